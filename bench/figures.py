"""What is made of results/ and of trained runs: figures of assets/, tables of README.md and docs/.

`figures` draws what the pages show: laws and examples, which it computes, and results, which it
reads from results/*.json. `readme` writes the tables between the markers, such as
<!-- attention --> for results/attention.json; a test compares the pages with what it writes.

    python -m bench.figures figures                            draw assets/
    python -m bench.figures figures --runs RUN                 colliding pairs of a trained run too
    python -m bench.figures figures --runs out/* --out FOLDER  losses and colliding pairs of runs
    python -m bench.figures readme                             write the tables anew
"""

import contextlib
import io
import os
import re
from collections import Counter
from pathlib import Path

import numpy as np
import torch

import objectives
from attention import collision_probability, collisions, draw_hyperplanes, simhash
from bench import attention, harness, hashformers, sketch, superbloom, training
from bench.harness import ROOT, Bench, caption, load_run, markdown, read_json
from bloom import BloomMap
from common import InputError, blame_input
from embeddings import ProjEmbedding
from hashing import NgramLSH, list_words, md5_bits
from tests.recipes import RECIPES

ASSETS = os.path.join(ROOT, "assets")
STYLE = {"savefig.dpi": 110, "figure.constrained_layout.use": True, "axes.spines.top": False,
         "axes.spines.right": False, "axes.grid": True, "axes.axisbelow": True, "grid.alpha": 0.3,
         "axes.titlesize": 10, "legend.frameon": False}
UNITS = {"hash-mlm": "nats per hash (ln R at the start)", "sr": "nats per word (ln 3 at the start)",
         "mlm": "nats per word"}


def draw_figures(args):
    """Draw all figures of assets/, or, with --out, losses and colliding pairs of --runs alone."""
    # out/* has fine-tuned folders too, which are left out
    runs = {}  # folder -> config
    for folder in args.runs or []:
        if os.path.exists(os.path.join(folder, "log.jsonl")):
            model, _, _ = load_run(folder)
            runs[folder] = model.config
    if not runs and (args.runs or args.out):
        raise InputError(f"--runs: expected folders with ckpt.pt and log.jsonl, got {args.runs}.")
    folder = args.out or ASSETS
    os.makedirs(folder, exist_ok=True)
    if args.out:  # a figure an objective: their losses have different units
        for head, unit in UNITS.items():
            same = [run for run, config in runs.items() if config.head == head]
            if same:
                draw_losses(folder, f"loss-{head}", same, unit)
    else:
        for draw in (draw_pipeline, draw_corruption, draw_maps, draw_law, draw_attention,
                     draw_recall, draw_gaps, draw_variants):
            draw(folder)
    # one map of collisions, of the first run that has LSH attention
    for run, config in runs.items():
        if config.attn == "lsh" and config.order:
            draw_collisions(folder, run)
            break
    return []  # rows of a table


@contextlib.contextmanager
def new_figure(folder, name, size, rows=1, columns=1, **labels):
    """Yield the axes of a figure in the one style of all, an array, and write FOLDER/NAME.png."""
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot
    with pyplot.rc_context(STYLE):
        figure, axes = pyplot.subplots(rows, columns, figsize=size, squeeze=False)
        axes[0, 0].set(**labels)
        yield axes.ravel()
        path = os.path.join(folder, f"{name}.png")
        figure.savefig(path)
        pyplot.close(figure)
    print(f"Saved {path}")


# Laws and examples


def draw_matrix(axis, matrix, title, **options):
    """Draw a matrix of 0 and 1."""
    axis.imshow(matrix, cmap="Greys", interpolation="nearest", **options)
    axis.set_title(title)
    axis.grid(False)


def draw_box(axis, x, y, width, height, text, shade):
    """Draw a box with its left edge at x and its middle at y, of shade 0 white to 1 black."""
    axis.bar(x, height, width, y - height / 2, align="edge", color=str(1 - shade), edgecolor="0.4")
    color = "white" if shade > 0.5 else "black"
    axis.text(x + width / 2, y, text, ha="center", va="center", fontsize=9, color=color)


def draw_pipeline(folder):
    """Draw how words become bits, by MD5 and by LSH, and a vector, by Proj."""
    words = ["play", "plays", "cat"]
    torch.manual_seed(0)
    text = Path(ROOT, "README.md").read_text(encoding="utf-8")  # any text will do
    lsh = NgramLSH.fit(Counter(list_words(text)))
    proj = ProjEmbedding(128, 16).requires_grad_(False)
    notes = ("MD5\n\nof the whole word", "LSH\n\nof its n-grams:\np l a y pl la ay\npla lay play")
    titles = ["2. 128 bits (32 shown), black = 1",
              "3. vector: correlation of the\nbits with untrained vectors"]
    with new_figure(folder, "pipeline", (8, 3.4), 2, 3, title="1. hash a word") as axes:
        hashes = (md5_bits(words), lsh.bits(words, 128))  # a row of the figure each
        for note, bits, row in zip(notes, hashes, axes.reshape(2, 3)):
            row[0].text(0.5, 0.5, note, fontsize=11, va="center", ha="center")
            row[0].axis("off")
            draw_matrix(row[1], bits[:, :32], titles[0], aspect="auto")
            vectors = proj(torch.from_numpy(bits)).numpy()  # (3, 16)
            draw_matrix(row[2], vectors, titles[1], aspect="auto")
            for axis in row[1:]:
                axis.set(xticks=[], yticks=range(3), yticklabels=words)
            for y, num_different in enumerate((bits != bits[0]).sum(1)):
                row[1].text(32, y, f"{num_different} of 128\ndiffer", va="center", fontsize=8)
            titles = ["", ""]  # the first row's are enough


def draw_corruption(folder):
    """Draw a text before and after Shuffle+Random, and the labels: the demo of objectives.py."""
    shades = dict(intact=0, shuffled=0.25, random=0.7)
    # the last nine words of the first three lines that the demo prints
    with contextlib.redirect_stdout(io.StringIO()) as out:
        objectives.main()
    text, inputs, labels = [line.split()[-9:] for line in out.getvalue().splitlines()[:3]]
    with new_figure(folder, "corruption", (8, 2)) as [axis]:
        for x, label in enumerate(labels):
            draw_box(axis, x, 0, 0.94, 0.5, text[x], 0)
            draw_box(axis, x, -1, 0.94, 0.5, inputs[x], shades[label])
            draw_box(axis, x, -2, 0.94, 0.5, label, shades[label])
        for y, name in enumerate(("text", "input", "label")):
            axis.text(-0.1, -y, name, ha="right", va="center")
        axis.set_ylim(-2.5, 0.5)
        axis.axis("off")


def draw_maps(folder):
    """Draw the two Bloom maps of python bloom.py; the width of a bucket is its probability."""
    bloom_map = BloomMap(12, alpha=3, m=2, seed=1)
    # of the buckets of each map, as in the demo of bloom.py
    p = [[0.64, 0.19, 0.14, 0.03], [0.56, 0.02, 0.22, 0.20]]
    with new_figure(folder, "maps", (8, 2.4)) as [axis]:
        for j in range(2):
            axis.text(-0.01, -j, f"map {j}", ha="right", va="center")
            x = 0
            for share, items in zip(p[j], bloom_map.members[j].tolist()):
                text = f"{share:.2f}\n" + " ".join(str(item) for item in sorted(items))
                width = share + 0.05  # a bucket of probability 0.02 still shows its items
                draw_box(axis, x, -j, width, 0.8, text, 0.25 * (9 in items))
                x += width
        axis.set_ylim(-1.5, 0.5)
        axis.axis("off")
        axis.set_title("12 items in buckets of 3; width: probability; gray: the buckets of item 9, "
                       "log 0.64 + log 0.22 = -1.96", fontsize=9)


def draw_law(folder):
    """Draw the share of pairs of a given angle that collide, beside the law."""
    angles = torch.linspace(0, torch.pi / 2, 10)
    degrees = (180 / torch.pi * angles).numpy()
    num_pairs = 4_000
    g = torch.Generator().manual_seed(0)
    title = f"lines: law; dots: {num_pairs:,} random pairs each, 95 % interval"
    with new_figure(folder, "law", (6.4, 3.4), xlabel="angle between query and key, degrees",
                    ylabel="probability of a collision", title=title) as [axis]:
        for n, r, m, mark in ((1, 2, 64, "o"), (1, 8, 256, "s"), (3, 8, 256, "v")):
            plane = torch.linalg.qr(torch.randn(num_pairs, 64, 2, generator=g))[0]
            q, k = plane.unbind(-1)  # (pairs, 64), at right angles
            shares = []
            for angle in angles:  # a hash function per pair, as the law is about random hyperplanes
                other = q * angle.cos() + k * angle.sin()
                x = torch.stack([q, other], 1).unsqueeze(0)  # (1, pairs, 2, 64)
                planes, coef = draw_hyperplanes(num_pairs, n, r, 64, m, g)
                h = simhash(x, planes, coef, m)  # (1, pairs, n, 2)
                is_collision = (h[..., 0] == h[..., 1]).any(-1)
                shares.append(is_collision.float().mean().item())
            p = collision_probability(angles, r, m, n).numpy()
            axis.plot(degrees, p, color="0.6", linewidth=1)
            # of the mean of num_pairs draws that are 0 or 1
            error = 1.96 * np.sqrt(p * (1 - p) / num_pairs)
            label = f"n {n}, r {r}, m {m}"
            axis.errorbar(degrees, shares, error, fmt=mark, markersize=4, label=label)
        axis.legend()


# Results


def read_rows(name):
    """Return the rows of results/NAME.json."""
    return read_json(ROOT, "results", f"{name}.json")["rows"]


def draw_attention(folder):
    """Draw time by length."""
    result = read_json(ROOT, "results", "attention.json")
    rows = [row for row in result["rows"] if row["L"] <= 16_384]  # dense attention's lengths
    lengths = [row["L"] for row in rows]
    title = f"r 8, m 256, two heads of 64, float32; {result['machine']['device']}"
    lines = (
        ("dense", "dense (scaled_dot_product_attention)", "o-"),
        ("upper", "LSH, pairs upper: the literal formula", "s-"),
        ("ours", "LSH, pairs all", "^-"),
    )
    with new_figure(folder, "attention", (6.4, 4), ylabel="ms, forward and backward", title=title,
                    xlabel="positions of a sequence (16,384 in a batch)") as [axis]:
        for key, label, style in lines:
            times = [row.get(key, np.nan) for row in rows]  # the literal formula: short rows only
            axis.loglog(lengths, times, style, label=label)
        axis.set_xticks(lengths, [f"{L:,}" for L in lengths], fontsize=8)
        axis.minorticks_off()
        axis.legend()


def draw_recall(folder):
    """Draw recall by frequency."""
    rows = [row for row in read_rows("beams") if "by frequency" in row["name"]]
    p = np.array([row["rec@1"] for row in rows])
    # Wilson's interval, which stays within 0 and 1: middle ± half
    z = 1.96**2 / 200
    middle = (p + z / 2) / (1 + z)
    half = np.sqrt(z * p * (1 - p) + z**2 / 4) / (1 + z)
    below = p - middle + half
    above = middle + half - p
    error = 100 * np.maximum([below, above], 0)  # rounding makes a 0 negative
    labels = [f"{10 * i}–{10 * i + 10} %" for i in range(10)]
    with new_figure(folder, "recall", (6.4, 3), ylabel="rec@1, %",
                    xlabel="tenths of the links, from frequent to rare items",
                    title="about 200 links per bar, one seed; 95 % interval") as [axis]:
        axis.bar(range(10), 100 * p, width=0.8, color="0.6", yerr=error, capsize=3)
        axis.set_xticks(range(10), labels, fontsize=7)


def draw_gaps(folder):
    """Draw which model names hidden words."""
    rows = read_rows("gaps")
    labels = [f"{row['name']} ({row['parameters'] / 1e6:.1f} M)" for row in rows]
    draw_dots(folder, "gaps", rows, "first", labels, f"n = {rows[0]['asked']:,} words",
              xlabel="hidden words of other packages named first, %")


def draw_variants(folder):
    """Draw the losses of variants of HashFormers."""
    rows = [row for row in read_rows("variants") if "f1_random" in row]
    rows.sort(key=lambda row: row["eval_loss"])
    labels = [row["name"] for row in rows]
    draw_dots(folder, "variants", rows, "eval_loss", labels, f"{rows[0]['steps']} steps",
              xlabel="held-out S+R loss, nats per word (ln 3 = 1.10 at the start)")


def draw_dots(folder, name, rows, key, labels, about, xlabel):
    """Draw the mean and standard deviation over seeds of a column of results, a row each."""
    title = f"{about}; mean ± standard deviation of {rows[0]['seeds']} seeds"
    size = (6.4, 0.9 + 0.25 * len(rows))
    with new_figure(folder, name, size, xlabel=xlabel, title=title) as [axis]:
        for y, row in enumerate(rows):
            axis.errorbar(row[key], -y, xerr=row.get(f"{key}_std"), fmt="o", color="black",
                          markersize=4, capsize=3)
        axis.set_yticks([-y for y in range(len(rows))], labels)


# Trained runs


def draw_collisions(folder, run):
    """Draw which positions share a bucket: a row of maps per layer, a column per head."""
    layers = []
    for _, layer, q, k, _ in attention.trained_layers(run, 1):
        hq, hk = layer.attention.hash_buckets(q, k)
        layers.append(collisions(hq, hk)[0])  # (H, L, L)
    L, H = len(layers), len(layers[0])
    with new_figure(folder, "collisions", (2.2 * H, 2.3 * L), L, H) as axes:
        for i, axis in enumerate(axes):
            layer, head = divmod(i, H)
            is_collision = layers[layer][head]
            share = 100 * is_collision.float().mean()
            title = f"layer {layer + 1}, head {head + 1}: {share:.0f} %"
            draw_matrix(axis, is_collision.numpy(), title)
            if layer == L - 1:
                axis.set_xlabel("key position")
            if head == 0:
                axis.set_ylabel("query position")


def draw_losses(folder, name, runs, unit):
    """Draw how runs learn: a curve of the training loss, dots on held-out text."""
    with new_figure(folder, name, (6.4, 4), xlabel="optimizer steps", ylabel=unit,
                    title="lines: loss in training; dots: on held-out text; one seed") as [axis]:
        for number, run in enumerate(runs):
            with blame_input(f"--runs {run}, log.jsonl"):
                log = harness.read_log(run)
            color = f"C{number}"
            steps, losses = list_points(log, "loss")
            if steps:
                width = max(len(steps) // 25, 1)  # a point of the curve is the mean of as many
                mean = np.ones(width) / width
                axis.plot(np.convolve(steps, mean, "valid"), np.convolve(losses, mean, "valid"),
                          color=color, label=Path(run).name)
            steps, losses = list_points(log, "eval_loss")
            axis.plot(steps, losses, "o", color=color, markersize=4)
        axis.legend()


def list_points(log, key):
    """Return the steps and the values of a key of log.jsonl."""
    steps = [row["step"] for row in log if key in row]
    values = [row[key] for row in log if key in row]
    return steps, values


# Tables


def write_readme(args):
    """Write the tables between the markers of README.md and docs/ anew."""
    tables = readme_tables()
    for path in [Path(ROOT, "README.md"), *Path(ROOT, "docs").glob("*.md")]:
        text = path.read_text(encoding="utf-8")
        for name, table in tables.items():
            pattern = rf"(?s)(<!-- {name} -->\n).*?(<!-- end -->)"
            text = re.sub(pattern, lambda m: m[1] + table + m[2], text)
        path.write_text(text, encoding="utf-8")
    return []


def readme_tables():
    """Return dict, marker -> markdown: recipes, counts, and tables of results/."""
    columns = {}
    for file in (hashformers, attention, superbloom, sketch, training):
        for name, bench in file.BENCHES.items():
            columns[name] = bench.columns
    tables = recipe_tables()
    # results of the scripts name the bench that has their columns
    tables["counts"] = markdown(list(hashformers.count_paper_models()), columns["counts"])
    for path in Path(ROOT, "results").glob("*.json"):
        result = read_json(path)
        rows = []
        for row in result["rows"]:
            if not row.get("name", "").endswith("by frequency"):  # a figure shows them in full
                rows.append(row)
        tables[path.stem] = markdown(rows, columns[result["bench"]]) + "\n" + caption(result)
    return tables


RECIPE_COLUMNS = """
    name       s    row
    command    s    flags of pretrain.py
    departs    s    departs from the paper
"""


def recipe_tables():
    """Return dict, marker -> markdown: commands of the papers' rows, and how they depart."""
    pages = dict(HashFormers=[], Superbloom=[], Median=[])
    pages["BERT-LSH"] = []
    for name, command, _, departures in RECIPES:
        departs = ", ".join(f"{key} {value}" for key, value in departures.items())
        page = re.match(r"[\w-]+", name)[0]
        pages[page].append(dict(name=name, command=f"`{command}`", departs=departs))
    tables = {}
    for page, rows in pages.items():
        page = page.lower().replace("median", "sketch")
        tables[f"recipes {page}"] = markdown(rows, RECIPE_COLUMNS)
    return tables


BENCHES = {
    "figures": Bench(draw_figures, flags=dict(runs=None, out=None)),
    "readme": Bench(write_readme),
}


def main(argv=None):
    """Run a command of this file."""
    harness.run_command("figures", __doc__, BENCHES, argv)


if __name__ == "__main__":
    main()
