"""What is made of results/ and of trained runs: figures of assets/, tables of README.md and docs/.

    python -m bench.figures figures                            draw assets/ from results/ and from examples
    python -m bench.figures figures --runs RUN                 those of a trained run too: colliding pairs
    python -m bench.figures figures --runs out/* --out FOLDER  draw losses and colliding pairs of runs alone
    python -m bench.figures readme                             write the tables between the markers anew
"""

import contextlib, functools, io, os, re
from collections import Counter
from pathlib import Path

import numpy as np
import torch

import objectives
from attention import collision_probability, collisions, draw_hyperplanes, simhash
from bench import attention, common, hashformers, sketch, superbloom, training
from bench.common import ROOT, Bench, caption, load_run, markdown, read_json
from bloom import BloomMap
from console import InputError, blame_input
from embeddings import ProjEmbedding
from hashing import NgramLSH, list_words, md5_bits
from tests.recipes import RECIPES

STYLE = {"savefig.dpi": 110, "figure.constrained_layout.use": True, "axes.spines.top": False,
         "axes.spines.right": False, "axes.grid": True, "axes.axisbelow": True, "grid.alpha": 0.3,
         "axes.titlesize": 10, "legend.frameon": False}
ASSETS = os.path.join(ROOT, "assets")
UNITS = {"hash-mlm": "nats per hash (ln R at the start)", "sr": "nats per word (ln 3 at the start)",
         "mlm": "nats per word"}


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


def draw_boxes(axis, rows, height=0.5):
    """Draw rows of (x, width, text, shade 0 white to 1 black) as boxes, the first row on top."""
    for y, boxes in enumerate(rows):
        for x, width, text, shade in boxes:
            axis.bar(x, height, width, -y - height / 2, align="edge", color=str(1 - shade), edgecolor="0.4")
            color = "white" if shade > 0.5 else "black"
            axis.text(x + width / 2, -y, text, ha="center", va="center", fontsize=9, color=color)
    axis.set_ylim(0.5 - len(rows), 0.5)
    axis.axis("off")


def draw_corruption(folder):
    """Draw a text before and after Shuffle+Random, and the labels: the example of python objectives.py."""
    shades = dict(intact=0, shuffled=0.25, random=0.7)
    with contextlib.redirect_stdout(io.StringIO()) as out:
        objectives.main()
    lines = [line.split()[-9:] for line in out.getvalue().splitlines()[:3]]
    with new_figure(folder, "corruption", (8, 2)) as [axis]:
        draw_boxes(axis, [[(i, 0.94, word, row and shades[label])
                           for i, (word, label) in enumerate(zip(line, lines[2]))]
                          for row, line in enumerate(lines)])
        for row, name in enumerate(("text", "input", "label")):
            axis.text(-0.1, -row, name, ha="right", va="center")


def draw_maps(folder):
    """Draw the two Bloom maps of python bloom.py; the width of a bucket is its probability."""
    bloom_map = BloomMap(12, alpha=3, m=2, seed=1)
    p = [0.64, 0.19, 0.14, 0.03], [0.56, 0.02, 0.22, 0.20]
    with new_figure(folder, "maps", (8, 2.4)) as [axis]:
        rows, gap = [], 0.05  # a bucket of probability 0.02 still shows its items
        for members, shares in zip(bloom_map.members, p):
            widths = np.array(shares) + gap
            starts = np.append(0, np.cumsum(widths))
            rows.append([(x, w, f"{share:.2f}\n" + " ".join(map(str, sorted(bucket))), 0.25 * (9 in bucket))
                         for x, w, share, bucket in zip(starts, widths, shares, members.tolist())])
        draw_boxes(axis, rows, 0.8)
        for j in range(2):
            axis.text(-0.01, -j, f"map {j}", ha="right", va="center")
        axis.set_title("12 items in buckets of 3; width: probability; gray: the buckets of item 9, "
                       "log 0.64 + log 0.22 = -1.96", fontsize=9)


def draw_law(folder):
    """Draw the share of pairs of a given angle that collide, beside the law; bars: 95 % of the mean."""
    angles, num_pairs, degrees = torch.linspace(0, torch.pi / 2, 10), 4_000, 180 / torch.pi
    g = torch.Generator().manual_seed(0)
    with new_figure(folder, "law", (6.4, 3.4), xlabel="angle between query and key, degrees",
                    ylabel="probability of a collision",
                    title=f"lines: law; dots: {num_pairs:,} random pairs each, 95 % interval") as [axis]:
        for (n, r, m), mark in zip(((1, 2, 64), (1, 8, 256), (3, 8, 256)), "osv"):
            q, k = torch.linalg.qr(torch.randn(num_pairs, 64, 2, generator=g))[0].unbind(-1)
            shares = []
            for angle in angles:  # a hash function per pair, as the law is about random hyperplanes
                x = torch.stack([q, q * angle.cos() + k * angle.sin()], 1).unsqueeze(0)  # (1, pairs, 2, 64)
                h = simhash(x, *draw_hyperplanes(num_pairs, n, r, 64, m, g), m)  # (1, pairs, n, 2)
                shares.append((h[..., 0] == h[..., 1]).any(-1).float().mean().item())
            p = collision_probability(angles, r, m, n).numpy()
            [line] = axis.plot(degrees * angles, p, color="0.6", linewidth=1)
            error = 1.96 * np.sqrt(p * (1 - p) / num_pairs)
            axis.errorbar(degrees * angles, shares, error, fmt=mark, markersize=4, label=f"n {n}, r {r}, m {m}")
        axis.legend()


def draw_dots(folder, name, rows, key, about, **labels):
    """Draw the mean and standard deviation over seeds of a column of results, a row each."""
    with new_figure(folder, name, (6.4, 0.9 + 0.25 * len(rows)), **labels) as [axis]:
        for y, row in enumerate(rows):
            axis.errorbar(row[key], -y, xerr=row[f"{key}_std"], fmt="o", color="black", markersize=4, capsize=3)
        axis.set_yticks([-y for y in range(len(rows))], [about.format(**row) for row in rows])


def draw_comparisons(folder):
    """Draw which model names hidden words, of results/gaps.json, and the losses of results/variants.json."""
    rows = [row | dict(million=row["parameters"] / 1e6) for row in read_json(ROOT, "results", "gaps.json")["rows"]]
    draw_dots(folder, "gaps", rows, "first", "{name} ({million:.1f} M)",
              xlabel="hidden words of other packages named first, %",
              title=f"n = {rows[0]['asked']:,} words; mean ± standard deviation of {rows[0]['seeds']} seeds")
    rows = [row for row in read_json(ROOT, "results", "variants.json")["rows"] if "f1_random" in row]
    draw_dots(folder, "variants", sorted(rows, key=lambda row: row["eval_loss"]), "eval_loss", "{name}",
              xlabel="held-out S+R loss, nats per word (ln 3 = 1.10 at the start)",
              title=f"{rows[0]['steps']} steps; mean ± standard deviation of {rows[0]['seeds']} seeds")


def draw_results(folder):
    """Draw time by length, of results/attention.json, and recall by frequency, of results/beams.json."""
    result = read_json(ROOT, "results", "attention.json")
    rows = [row for row in result["rows"] if row["L"] <= 16_384]
    lengths = [row["L"] for row in rows]
    with new_figure(folder, "attention", (6.4, 4), xlabel="positions of a sequence (16,384 in a batch)",
                    ylabel="ms, forward and backward",
                    title=f"r 8, m 256, two heads of 64, float32; {result['machine']['device']}") as [axis]:
        for key, label, style in (("dense", "dense (scaled_dot_product_attention)", "o-"),
                                  ("upper", "LSH, pairs upper: the literal formula", "s-"),
                                  ("ours", "LSH, pairs all", "^-")):
            times = [row.get(key, float("nan")) for row in rows]  # the literal formula: short rows only
            axis.loglog(lengths, times, style, label=label)
        axis.set_xticks(lengths, [f"{L:,}" for L in lengths], fontsize=8)
        axis.minorticks_off()
        axis.legend()
    rows = read_json(ROOT, "results", "beams.json")["rows"]
    tenths = [100 * row["rec@1"] for row in rows if "by frequency" in row["name"]]
    with new_figure(folder, "recall", (6.4, 3), xlabel="tenths of the links, from frequent to rare items",
                    ylabel="rec@1, %", title="about 200 links per bar, one seed; 95 % interval") as [axis]:
        p, z = np.array(tenths) / 100, 1.96**2 / 200
        middle, half = (p + z / 2) / (1 + z), np.sqrt(z * p * (1 - p) + z**2 / 4) / (1 + z)  # Wilson's interval
        error = 100 * np.maximum([p - middle + half, middle + half - p], 0)
        axis.bar(range(10), tenths, width=0.8, color="0.6", yerr=error, capsize=3)
        axis.set_xticks(range(10), [f"{10 * i}–{10 * i + 10} %" for i in range(10)], fontsize=7)


def draw_pipeline(folder):
    """Draw how words become bits, by MD5 and by LSH, and bits a vector, by Proj: picture of the README."""
    words = ["play", "plays", "cat"]
    torch.manual_seed(0)
    corpus = Path(ROOT, "README.md").read_text(encoding="utf-8")  # any text will do
    lsh, proj = NgramLSH.fit(Counter(list_words(corpus))), ProjEmbedding(128, 16).requires_grad_(False)
    notes = "MD5\n\nof the whole word", "LSH\n\nof its n-grams:\np l a y pl la ay\npla lay play"
    titles = "2. 128 bits (32 shown), black = 1", "3. vector: correlation of the\nbits with untrained vectors"
    with new_figure(folder, "pipeline", (8, 3.4), 2, 3, title="1. hash a word") as axes:
        for i, (note, bits) in enumerate(zip(notes, (md5_bits(words), lsh.bits(words, 128)))):
            axes[3 * i].text(0.5, 0.5, note, fontsize=11, va="center", ha="center")
            axes[3 * i].axis("off")
            matrices = bits[:, :32], proj(torch.from_numpy(bits))
            for axis, matrix, title in zip(axes[3 * i + 1:], matrices, titles):
                draw_matrix(axis, matrix, "" if i else title, aspect="auto")
                axis.set(xticks=[], yticks=range(3), yticklabels=words)
            for row, num_different in enumerate((bits != bits[0]).sum(1)):
                axes[3 * i + 1].text(32, row, f"{num_different} of 128\ndiffer", va="center", fontsize=8)


def draw_collisions(folder, run):
    """Draw which positions share a bucket in a trained run: a row of maps per layer, a column per head."""
    layers = [(number, collisions(*layer.attention.hash_buckets(q, k))[0])
              for number, layer, q, k, _ in attention.trained_layers(run, 1)]
    shape = len(layers), len(layers[0][1])
    with new_figure(folder, "collisions", (2.2 * shape[1], 2.3 * shape[0]), *shape) as axes:
        maps = [(number, head, x) for number, heads in layers for head, x in enumerate(heads, 1)]
        for axis, (number, head, is_collision) in zip(axes, maps):
            share = 100 * is_collision.float().mean()
            draw_matrix(axis, is_collision.numpy(), f"layer {number}, head {head}: {share:.0f} %")
            axis.set(xlabel="key position" * (number == shape[0]), ylabel="query position" * (head == 1))


def draw_losses(folder, name, runs, unit):
    """Draw how runs learn: a curve of the training loss, dots on held-out text."""
    with new_figure(folder, name, (6.4, 4), xlabel="optimizer steps", ylabel=unit,
                    title="lines: loss in training; dots: on held-out text; one seed") as [axis]:
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
    folder = args.out or ASSETS
    runs = [run for run in args.runs if os.path.exists(os.path.join(run, "log.jsonl"))]
    if not runs and (args.runs or args.out):
        raise InputError(f"--runs: expected folders with ckpt.pt and log.jsonl, got {', '.join(args.runs)}.")
    configs = {run: load_run(run)[0].config for run in runs}
    os.makedirs(folder, exist_ok=True)
    if not args.out:
        for draw in (draw_results, draw_pipeline, draw_corruption, draw_maps, draw_law, draw_comparisons):
            draw(folder)
    for run in [run for run, c in configs.items() if c.attn == "lsh" and c.order][:1]:
        draw_collisions(folder, run)
    for head in UNITS if args.out else ():
        if runs := [run for run, c in configs.items() if c.head == head]:
            draw_losses(folder, f"loss-{head}", runs, UNITS[head])


def readme_tables():
    """Return dict, marker -> markdown: the recipes of tests/recipes.py, counts, and tables of results/."""
    columns = {name: bench.columns for file in (hashformers, attention, superbloom, sketch, training)
               for name, bench in file.BENCHES.items()}
    tables = recipe_tables() | {"counts": markdown(hashformers.count_paper_models(), columns["counts"])}
    for path in Path(ROOT, "results").glob("*.json"):
        result = read_json(path)  # what a figure or a sentence says in full is left out
        rows = [row for row in result["rows"] if not re.search("by frequency$", row.get("name", ""))]
        tables[path.stem] = f"{markdown(rows, columns[result['bench']])}\n{caption(result)}"
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


BENCHES = {"figures": Bench(draw_figures, "", dict(runs=[], out=None)),
           "readme": Bench(write_readme)}
main = functools.partial(common.run_command, "figures", __doc__, BENCHES)

if __name__ == "__main__":
    main()
