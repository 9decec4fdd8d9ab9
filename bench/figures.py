"""What is made of results/ and of trained runs: figures of assets/, tables of README.md and docs/.

    python -m bench.figures figures --runs out/*               draw assets/
    python -m bench.figures figures --runs RUN --out FOLDER    draw what RUN learned, without touching assets/
    python -m bench.figures readme                             write the tables between the markers anew
"""

import contextlib, functools, os, re
from pathlib import Path

import numpy as np
import torch

from attention import collisions
from bench import attention, common, hashformers, sketch, superbloom, training
from bench.common import REQUIRED, ROOT, Bench, caption, load_corpus, load_run, markdown, read_json
from console import InputError, blame_input
from embeddings import ProjEmbedding
from hashing import NgramLSH, md5_bits
from tests.recipes import RECIPES
from tokenizer import FIRST_WORD_ID

STYLE = {"savefig.dpi": 110, "figure.constrained_layout.use": True, "axes.spines.top": False,
         "axes.spines.right": False, "axes.grid": True, "axes.axisbelow": True, "grid.alpha": 0.3,
         "axes.titlesize": 10, "legend.frameon": False}
ASSETS = os.path.join(ROOT, "assets")
UNITS = {"hash-mlm": "nats a hash (ln R at the start)", "sr": "nats a word (ln 3 at the start)",
         "mlm": "nats a word"}


@contextlib.contextmanager
def new_figure(folder, name, size, rows=1, columns=1, **labels):
    """Yield the list of axes of a figure in the one style of all, and write it to FOLDER/NAME.png."""
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot
    with pyplot.rc_context(STYLE):
        figure, axes = pyplot.subplots(rows, columns, figsize=size, squeeze=False)
        axes[0, 0].set(**labels)
        yield axes.ravel()
        figure.savefig(os.path.join(folder, f"{name}.png"))
        pyplot.close(figure)
    print(f"Saved {os.path.join(folder, name)}.png")


def draw_matrix(axis, matrix, title, **options):
    """Draw a matrix of 0 and 1."""
    axis.imshow(matrix, cmap="Greys", interpolation="nearest", **options)
    axis.set_title(title)
    axis.grid(False)


def draw_results(folder):
    """Draw time by length, of results/attention.json, and recall by frequency, of results/beams.json."""
    result = read_json(ROOT, "results", "attention.json")
    rows = [row for row in result["rows"] if row["L"] <= 16_384]
    lengths = [row["L"] for row in rows]
    with new_figure(folder, "attention", (6.4, 4), xlabel="positions of a sequence (16,384 in a batch)",
                    ylabel="ms, forward and backward",
                    title=f"r 8, m 256, two heads of 64, float32; {result['machine']['device']}") as [axis]:
        for key, label, style in (("dense", "dense (scaled_dot_product_attention)", "o-"),
                                  ("upper", "LSH, pairs upper", "s-"), ("ours", "LSH, pairs all", "^-")):
            axis.loglog(lengths, [row[key] for row in rows], style, label=label)
        axis.set_xticks(lengths, [f"{L:,}" for L in lengths], fontsize=8)
        axis.minorticks_off()
        axis.legend()
    rows = read_json(ROOT, "results", "beams.json")["rows"]
    tenths = [100 * row["rec@1"] for row in rows if "by frequency" in row["name"]]
    with new_figure(folder, "recall", (6.4, 3), xlabel="tenths of the links, from frequent to rare items",
                    ylabel="rec@1, %", title="Superbloom on names of Python: recall by frequency") as [axis]:
        axis.bar(range(10), tenths, width=0.8)
        axis.set_xticks(range(10), [f"{10 * i}–{10 * i + 10} %" for i in range(10)], fontsize=7)


def draw_pipeline(folder):
    """Draw how words become bits, by MD5 and by LSH, and bits a vector, by Proj: picture of the README."""
    words = ["play", "plays", "cat"]
    torch.manual_seed(0)
    lsh, proj = NgramLSH.fit(dict.fromkeys(words, 1)), ProjEmbedding(128, 16).requires_grad_(False)
    notes = "MD5\n\nof the whole word", "LSH\n\nof its n-grams:\np l a y pl la ay\npla lay play"
    titles = "2. 128 bits (32 shown), black = 1", "3. vector: correlation of the\nbits with learned vectors"
    with new_figure(folder, "pipeline", (8, 3.4), 2, 3, title="1. hash a word") as axes:
        for i, (note, bits) in enumerate(zip(notes, (md5_bits(words), lsh.bits(words, 128)))):
            axes[3 * i].text(0.5, 0.5, note, fontsize=11, va="center", ha="center")
            axes[3 * i].axis("off")
            matrices = bits[:, :32], proj(torch.from_numpy(bits))
            for axis, matrix, title in zip(axes[3 * i + 1:], matrices, titles):
                draw_matrix(axis, matrix, "" if i else title, aspect="auto")
                axis.set(xticks=[], yticks=range(3), yticklabels=words)
            for row, num_different in enumerate((bits != bits[0]).sum(1)):
                axes[3 * i + 1].text(32, row, f"{num_different} differ", va="center", fontsize=9)


def draw_bits(folder, args):
    """Draw the bits of six words by LSH and by MD5."""
    words, corpus = ["play", "plays", "played", "playing", "display", "cat"], load_corpus(args, "regex")
    lsh = NgramLSH.fit(dict(zip(corpus.words, corpus.counts[FIRST_WORD_ID:].tolist())))
    with new_figure(folder, "bits", (8, 3), 2) as axes:
        for axis, name, bits in zip(axes, ("LSH of n-grams", "MD5"), (lsh.bits(words, 128), md5_bits(words))):
            title = f"128 bits by {name}, and how many differ from those of {words[0]}"
            draw_matrix(axis, bits, title, aspect="auto", vmax=1.4)
            axis.set_yticks(range(len(words)), words, fontsize=8)
            for row, num_different in enumerate((bits != bits[0]).sum(1)):
                axis.text(129, row, str(num_different), va="center", fontsize=8)


def draw_collisions(folder, run):
    """Draw which positions share a bucket in a trained run, of every layer and head."""
    maps = [(f"layer {number}, head {head}", is_collision)
            for number, layer, q, k, _ in attention.trained_layers(run, 1)
            for head, is_collision in enumerate(collisions(*layer.buckets(q, k))[0], 1)]
    size = 2.6 * len(maps), 2.9
    with new_figure(folder, "collisions", size, 1, len(maps), ylabel="query position") as axes:
        for axis, (title, is_collision) in zip(axes, maps):
            draw_matrix(axis, is_collision.numpy(), f"{title}: {100 * is_collision.float().mean():.0f} %")
            axis.set(xlabel="key position")


def draw_losses(folder, name, runs, unit):
    """Draw how runs learn: a curve of the training loss, dots on held-out text."""
    with new_figure(folder, name, (6.4, 4), xlabel="steps", ylabel=unit,
                    title="loss in training; dots: on held-out text") as [axis]:
        for run in runs:
            with blame_input(f"--runs {run}, log.jsonl"):
                log = read_json(run, "log.jsonl")
            points, dots = ([(row["step"], row[key]) for row in log if key in row]
                            for key in ("loss", "eval_loss"))
            width = max(len(points) // 25, 1)  # a point is the mean of as many
            curve = [np.convolve(numbers, np.ones(width) / width, "valid") for numbers in zip(*points)]
            [line] = axis.plot(*(curve or [[], []]), label=Path(run).name)
            axis.plot(*np.array(dots).reshape(-1, 2).T, "o", color=line.get_color(), markersize=4)
        axis.legend()


def draw_figures(args):
    """Draw all figures of assets/, or, with --out, those of the runs alone: losses, colliding pairs."""
    folder, names = args.out or ASSETS, {head: f"loss-{head}" for head in UNITS}
    runs = [run for run in args.runs if os.path.exists(os.path.join(run, "log.jsonl"))]
    if not runs:
        raise InputError(f"--runs: expected folders with ckpt.pt and log.jsonl, got {', '.join(args.runs)}.")
    configs = {run: load_run(run)[0].config for run in runs}
    os.makedirs(folder, exist_ok=True)
    if not args.out:
        names = {"hash-mlm": "loss", "sr": "variants"}
        configs = {run: c for run, c in configs.items() if c.code_format != "digest"}
        draw_results(folder)
        draw_pipeline(folder)
        draw_bits(folder, args)
    for run in [run for run, c in configs.items() if c.attn == "lsh" and c.order][:1]:
        draw_collisions(folder, run)
    for head, name in names.items():
        if runs := [run for run, c in configs.items() if c.head == head]:
            draw_losses(folder, name, runs, UNITS[head])


def readme_tables():
    """Return dict, marker -> markdown: the recipes of tests/recipes.py, counts, and tables of results/."""
    columns = {name: bench.columns for file in (hashformers, attention, superbloom, sketch, training)
               for name, bench in file.BENCHES.items()}
    tables = recipe_tables() | {"counts": markdown(hashformers.count_paper_models(), columns["counts"])}
    for path in Path(ROOT, "results").glob("*.json"):
        result = read_json(path)
        tables[path.stem] = f"{markdown(result['rows'], columns[result['bench']])}\n{caption(result)}"
    return tables


def recipe_tables():
    """Return dict, marker of docs/ -> markdown: the commands of tests/recipes.py, and how they depart."""
    rows = {page: [] for page in ("hashformers", "superbloom", "sketch", "bert-lsh")}
    for name, command, _, departures in RECIPES:
        departs = ", ".join(f"{key} {value}" for key, value in departures.items())
        page = name.split(" ")[0].strip(",").lower().replace("median", "sketch")
        rows[page].append(dict(name=name, command=f"`{command}`", departs=departs))
    columns = "name:s:row | command:s:flags of pretrain.py | departs:s:departs from the paper"
    return {f"recipes {page}": markdown(lines, columns) for page, lines in rows.items()}


def write_readme(args):
    """Write the tables between the markers of README.md and docs/ anew."""
    tables = readme_tables()
    for path in [Path(ROOT, "README.md"), *Path(ROOT, "docs").glob("*.md")]:
        text = path.read_text(encoding="utf-8")
        for name, table in tables.items():
            pattern = rf"(?s)(<!-- {name} -->\n).*?(<!-- end -->)"
            text = re.sub(pattern, lambda m: m[1] + table + m[2], text)
        path.write_text(text, encoding="utf-8")


BENCHES = {"figures": Bench(draw_figures, "", dict(runs=REQUIRED, data="python", cache="cache", out=None)),
           "readme": Bench(write_readme)}
main = functools.partial(common.run_command, "figures", __doc__, BENCHES)

if __name__ == "__main__":
    main()
