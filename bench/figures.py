"""What is made of results/ and of trained runs: the figures of assets/ and the tables of the README.

    python -m bench.figures figures --runs out/*     draw assets/
    python -m bench.figures readme                   write the tables between the markers of README.md anew
"""

import contextlib, functools, json, os, re

import numpy as np

from attention import collisions
from bench import attention, common, hashformers, sketch, superbloom, training
from bench.common import REQUIRED, ROOT, Bench, load_corpus, load_run, markdown, run_name
from hashing import NgramLSH, md5_bits
from tokenizer import FIRST_WORD_ID

STYLE = {"savefig.dpi": 110, "figure.constrained_layout.use": True, "axes.spines.top": False, "legend.frameon": False,
         "axes.spines.right": False, "axes.grid": True, "axes.axisbelow": True, "grid.alpha": 0.3, "axes.titlesize": 10}


def read_json(*names):
    """Return the lines of a JSON lines file, or the content of results/NAME.json."""
    with open(os.path.join(*names)) as file:
        return [json.loads(line) for line in file] if names[-1].endswith("l") else json.load(file)


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
    axis.grid(False)
    axis.set_title(title)


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
    tenths = [row["rec@1"] for row in read_json(ROOT, "results", "beams.json")["rows"] if "by frequency" in row["name"]]
    with new_figure(folder, "recall", (6.4, 3), xlabel="tenths of the links, from frequent to rare items",
                    ylabel="rec@1, %", title="Superbloom on the names of Python: recall by frequency") as [axis]:
        axis.bar(range(10), 100 * np.array(tenths), width=0.8)
        axis.set_xticks(range(10), [f"{10 * i}–{10 * i + 10} %" for i in range(10)], fontsize=7)


def draw_bits(folder, args):
    """Draw the bits of six words by LSH and by MD5."""
    words, corpus = ["play", "plays", "played", "playing", "display", "cat"], load_corpus(args, "regex")
    lsh = NgramLSH.fit(dict(zip(corpus.words, corpus.counts[FIRST_WORD_ID:].tolist())))
    with new_figure(folder, "bits", (8, 3), 2) as axes:
        for axis, name, bits in zip(axes, ("LSH of n-grams", "MD5"), (lsh.bits(words, 128), md5_bits(words))):
            draw_matrix(axis, bits, f"128 bits by {name}, and how many differ from those of {words[0]}", aspect="auto",
                        vmax=1.4)
            axis.set_yticks(range(len(words)), words, fontsize=8)
            for row, num_different in enumerate((bits != bits[0]).sum(1)):
                axis.text(129, row, str(num_different), va="center", fontsize=8)


def draw_collisions(folder, run):
    """Draw which positions share a bucket in a trained run, of every layer and head."""
    maps = [(f"layer {number}, head {head}", is_collision)
            for number, layer, q, k, _ in attention.trained_layers(run, 1)
            for head, is_collision in enumerate(collisions(*layer.buckets(q, k))[0], 1)]
    with new_figure(folder, "collisions", (2.6 * len(maps), 2.9), 1, len(maps), ylabel="query position") as axes:
        for axis, (title, is_collision) in zip(axes, maps):
            draw_matrix(axis, is_collision.numpy(), f"{title}: {100 * is_collision.float().mean():.0f} %")
            axis.set(xlabel="key position")


def draw_losses(folder, name, runs, unit):
    """Draw how runs learn: a curve of the training loss, dots on held-out text."""
    with new_figure(folder, name, (6.4, 4), xlabel="steps", ylabel=unit,
                    title="loss in training; dots: on held-out text") as [axis]:
        for run in runs:
            points, dots = ([(row["step"], row[key]) for row in read_json(run, "log.jsonl") if key in row]
                            for key in ("loss", "eval_loss"))
            width = max(len(points) // 25, 1)  # a point is the mean of as many
            curve = [np.convolve(numbers, np.ones(width) / width, "valid") for numbers in np.array(points).T]
            [line] = axis.plot(*curve, label=run_name(run))
            axis.plot(*np.array(dots).T, "o", color=line.get_color(), markersize=4)
        axis.legend()


def draw_figures(args):
    """Draw all figures: from results/, from the corpus, and from those of the runs that have what one shows."""
    os.makedirs(args.assets, exist_ok=True)
    draw_results(args.assets)
    draw_bits(args.assets, args)
    runs = {run: load_run(run)[0].config for run in args.runs if os.path.exists(os.path.join(run, "log.jsonl"))}
    for run in [run for run, c in runs.items() if c.attn == "lsh"][:1]:
        draw_collisions(args.assets, run)
    for name, head, unit in (("loss", "hash-mlm", "nats a hash (ln R at the start)"),
                             ("variants", "sr", "nats a word (ln 3 at the start)")):
        if chosen := [run for run, c in runs.items() if c.head == head and c.code_format != "digest"]:
            draw_losses(args.assets, name, chosen, unit)


def readme_tables():
    """Return dict, marker of README.md -> markdown: the counts computed now, the others from results/."""
    columns = {name: bench.columns for file in (hashformers, attention, superbloom, sketch, training)
               for name, bench in file.BENCHES.items()}
    tables = {"counts": markdown(hashformers.count_paper_models(), columns["counts"])}
    for name in sorted(os.listdir(os.path.join(ROOT, "results"))):
        result = read_json(ROOT, "results", name)
        tables[name.removesuffix(".json")] = markdown(result["rows"], columns[result["bench"]]) + (
            "\n`{command}` on {device}, torch {torch}, commit {commit}, {date}.\n".format(**result | result["machine"]))
    return tables


def write_readme(args):
    """Write the tables between the markers of README.md anew."""
    path = os.path.join(ROOT, "README.md")
    with open(path, encoding="utf-8") as file:
        text = file.read()
    for name, table in readme_tables().items():
        text = re.sub(rf"(<!-- {name} -->\n).*?(<!-- end -->)", lambda m: m[1] + table + m[2], text, flags=re.S)
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)


BENCHES = {"readme": Bench(write_readme), "figures": Bench(draw_figures, "", dict(
    runs=REQUIRED, data="python", cache="cache", assets=os.path.join(ROOT, "assets")))}
main = functools.partial(common.run_command, "figures", __doc__, BENCHES)

if __name__ == "__main__":
    main()
