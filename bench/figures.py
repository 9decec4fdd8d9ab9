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
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import torch

import objectives
from attention import collision_probability, collisions, draw_hyperplanes, simhash
from bench import attention, controls, harness, hashformers, misspell, sketch, superbloom
from bench import training
from bench.harness import ROOT, Bench, caption, load_run, markdown, read_json
from bloom import DEMO_ORDERS, BloomMap
from common import InputError, blame_input
from embeddings import ProjEmbedding
from hashing import NgramLSH, list_words, md5_bits
from tests.recipes import RECIPES

ASSETS = ROOT / "assets"
STYLE = {"savefig.dpi": 110, "figure.constrained_layout.use": True, "axes.spines.top": False,
         "axes.spines.right": False, "axes.grid": True, "axes.axisbelow": True, "grid.alpha": 0.3,
         "axes.titlesize": 10, "legend.frameon": False}
UNITS = {"hash-mlm": "nats per hash (ln R at the start)", "sr": "nats per word (ln 3 at the start)",
         "mlm": "nats per word"}


def draw_figures(args):
    """Draw all figures of assets/, or, with --out, losses and colliding pairs of --runs alone."""
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
                     draw_recall, draw_gaps, draw_variants, draw_scores, draw_misspelled,
                     draw_operations, draw_curves):
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


def draw_matrix(axis, matrix, **labels):
    """Draw a matrix of 0 and 1."""
    axis.imshow(matrix, cmap="Greys", interpolation="nearest", aspect="auto")
    axis.grid(False)
    axis.set(**labels)


def draw_pipeline(folder):
    """Draw how words become bits, by MD5 and by LSH, and a vector, by Proj."""
    words = ["play", "plays", "cat"]
    ticks = dict(xticks=[], yticks=range(3), yticklabels=words)
    torch.manual_seed(0)
    text = Path(ROOT, "README.md").read_text(encoding="utf-8")  # any text will do
    lsh = NgramLSH.fit(Counter(list_words(text)))
    proj = ProjEmbedding(128, 16).requires_grad_(False)
    kinds = {  # a row of the figure each
        "MD5 of the whole word": md5_bits(words),
        "LSH of its n-grams:\np l a y pl la ay\npla lay play": lsh.bits(words, 128),
    }
    with new_figure(folder, "pipeline", (8, 3.4), 2, 2) as axes:
        for (kind, bits), (left, right) in zip(kinds.items(), axes.reshape(2, 2)):
            draw_matrix(left, bits[:, :32], ylabel=kind, **ticks)
            draw_matrix(right, proj(torch.from_numpy(bits)).numpy(), **ticks)  # (3, 16)
            for y, num_different in enumerate((bits != bits[0]).sum(1)):
                left.text(32, y, f"{num_different} of 128\ndiffer", va="center", fontsize=8)
        axes[0].set_title("1. hash a word: 128 bits (32 shown), black = 1")
        axes[1].set_title("2. vector: correlation of the\nbits with untrained vectors")


def draw_corruption(folder):
    """Draw a text before and after Shuffle+Random, and the labels: the demo of objectives.py."""
    shades = dict(intact="white", shuffled="0.85", random="0.65")
    # the last nine words of the first three lines that the demo prints
    with contextlib.redirect_stdout(io.StringIO()) as out:
        objectives.main()
    lines = [line.split()[-9:] for line in out.getvalue().splitlines()[:3]]
    colors = [shades[label] for label in lines[2]]
    with new_figure(folder, "corruption", (8, 1.6)) as [axis]:
        axis.table(lines, [["white"] * 9, colors, colors], rowLabels=["text", "input", "label"],
                   cellLoc="center", bbox=(0, 0, 1, 1))
        axis.axis("off")


def draw_maps(folder):
    """Draw the two Bloom maps of python bloom.py; the width of a bucket is its probability."""
    bloom_map = BloomMap(12, alpha=3, orders=DEMO_ORDERS)
    # of the buckets of each map, as in the demo of bloom.py
    p = [[0.64, 0.19, 0.14, 0.03], [0.56, 0.02, 0.22, 0.20]]
    title = ("12 items in buckets of 3; width: probability; gray: the buckets of item 9, "
             "log 0.64 + log 0.22 = -1.96")
    with new_figure(folder, "maps", (8, 2.4)) as [axis]:
        for j in range(2):
            x = 0
            for share, items in zip(p[j], bloom_map.members[j].tolist()):
                width = share + 0.05  # a bucket of probability 0.02 still shows its items
                color = "0.75" if 9 in items else "white"
                axis.barh(-j, width, left=x, color=color, edgecolor="0.4")
                text = " ".join(map(str, sorted(items)))
                axis.text(x + width / 2, -j, f"{share:.2f}\n{text}", ha="center", va="center",
                          fontsize=8)
                x += width
        axis.set(xticks=[], yticks=[0, -1], yticklabels=["map 0", "map 1"])
        axis.set_title(title, fontsize=9)


def draw_law(folder):
    """Draw the share of pairs of a given angle that collide, beside the law."""
    num_pairs = 4_000
    g = torch.Generator().manual_seed(0)
    angles = torch.linspace(0, torch.pi / 2, 10)
    degrees = np.linspace(0, 90, 10)
    rotations = torch.stack([angles.cos(), angles.sin()])  # (2, 10)
    title = f"lines: law; dots: {num_pairs:,} random pairs each, 95 % interval"
    with new_figure(folder, "law", (6.4, 3.4), xlabel="angle between query and key, degrees",
                    ylabel="probability of a collision", title=title) as [axis]:
        for n, r, m in ((1, 2, 64), (1, 8, 256), (3, 8, 256)):
            # in a random plane a vector and those at all angles to it
            plane, _ = torch.linalg.qr(torch.randn(num_pairs, 64, 2, generator=g))
            x = (plane @ rotations).transpose(1, 2)  # (pairs, 10, 64)
            # hash functions for every pair, as the law is about random hyperplanes
            planes, coef = draw_hyperplanes(num_pairs, n, r, 64, m, g)
            h = simhash(x.unsqueeze(0), planes, coef, m)  # (1, pairs, n, 10)
            is_collision = (h == h[..., :1]).any(2)
            shares = is_collision.float().mean((0, 1))  # (10,)
            p = collision_probability(angles, r, m, n)
            axis.plot(degrees, p, color="0.6", linewidth=1)
            # of the mean of num_pairs draws that are 0 or 1
            error = 1.96 * (p * (1 - p) / num_pairs).sqrt()
            label = f"n {n}, r {r}, m {m}"
            axis.errorbar(degrees, shares, error, fmt="o", markersize=4, label=label)
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
    lines = {
        "dense": "dense (scaled_dot_product_attention)",
        "upper": "LSH, pairs upper: the literal formula",
        "ours": "LSH, pairs all",
    }
    with new_figure(folder, "attention", (6.4, 4), ylabel="ms, forward and backward", title=title,
                    xlabel="positions of a sequence (16,384 in a batch)") as [axis]:
        for key, label in lines.items():
            times = [row.get(key, np.nan) for row in rows]  # the literal formula: short rows only
            axis.loglog(lengths, times, "o-", label=label)
        axis.set_xticks(lengths, lengths, fontsize=8)
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
    labels = [f"{10 * i}–{10 * i + 10} %" for i in range(10)]
    with new_figure(folder, "recall", (6.4, 3), ylabel="rec@1, %",
                    xlabel="tenths of the links, from frequent to rare items",
                    title="about 200 links per bar, one seed; 95 % interval") as [axis]:
        axis.bar(labels, 100 * p, color="0.6")
        axis.errorbar(labels, 100 * middle, 100 * half, fmt="none", color="black", capsize=3)
        axis.tick_params("x", labelsize=7)


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


def draw_scores(folder):
    """Draw the default run's scores beside those of its controls."""
    rows = read_rows("default")
    cosines = {f"proj-lsh, {row['name']}": row["cosine"] for row in read_rows("overlap")}
    for row in rows:
        row["cosine"] = cosines.get(row["name"])
    labels = [f"{row['name'].split(', ')[1]} (n = {row['n']:,})" for row in rows]
    columns = {
        "majority": ("majority class", dict(fmt="|", color="0.5", markersize=12)),
        "bag_of_words": ("bag of words", dict(fmt="s", color="tab:orange")),
        "cosine": ("cosine of word counts", dict(fmt="x", color="tab:green")),
        "score": ("encoder, 0.45 M parameters", dict(fmt="o", color="tab:blue")),
    }
    with new_figure(folder, "scores", (8.4, 3.4), xlabel="score, % or 100 × correlation",
                    title="default run; mean ± standard deviation of three seeds") as [axis]:
        for key, (label, look) in columns.items():
            for row, name in zip(rows, labels):
                if row.get(key) is not None:  # regression: no majority class; one text: no cosine
                    axis.errorbar(row[key], name, xerr=row.get(f"{key}_std"), label=label,
                                  capsize=3, **look)
                    label = None  # one line of the legend is enough
        axis.invert_yaxis()
        axis.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))


def draw_operations(folder):
    """Draw what hashing costs by the number of hash functions and hyperplanes. [BL Figure 1]"""
    functions = range(1, 6)
    with new_figure(folder, "operations", (5.4, 3.2), xlabel="hash functions n",
                    ylabel="thousand operations",
                    title="ten positions, two heads of 64, any number of buckets") as [axis]:
        for bands in (2, 4, 8):
            costs = [attention.attention_flops(10, 2, 64, bands, 64, n) for n in functions]
            axis.plot(functions, [cost["hashing"] / 1e3 for cost in costs], "o-",
                      label=f"hashing, {bands} hyperplanes")
        axis.axhline(costs[0]["full"] / 1e3, color="0.5", label="dense attention, q kᵀ alone")
        axis.set_xticks(functions)
        axis.legend()


def draw_curves(folder):
    """Draw the losses of BERT-LSH and its dense twin in pre-training. [BL Figure 2]"""
    rows = defaultdict(list)
    for row in read_rows("curves"):
        rows[row["name"]].append(row)
    with new_figure(folder, "curves", (5.4, 3.4), xlabel="optimizer steps",
                    ylabel="nats per masked word",
                    title="lines: loss in training; dots: held-out text; one seed") as [axis]:
        for number, (name, part) in enumerate(rows.items()):
            steps = [row["step"] for row in part]
            color = f"C{number}"
            axis.plot(steps, [row["loss"] for row in part], color=color, linewidth=1, label=name)
            axis.plot(steps, [row["eval_loss"] for row in part], "o", color=color, markersize=4)
        axis.legend()


def draw_misspelled(folder):
    """Draw scores by the share of misspelled words, a panel a task."""
    shares = ("0", "10", "20", "40")
    panels = defaultdict(list)
    for row in read_rows("misspell"):
        _, task = row["name"].split(", ")
        panels[task].append(row)
    with new_figure(folder, "misspelled", (9, 3.6), columns=len(panels)) as axes:
        for axis, (task, rows) in zip(axes, panels.items()):
            axis.set(title=f"{task}, one seed", xlabel="misspelled words, %")
            for row in rows:
                model, _ = row["name"].split(", ")
                style = "--" if "bag" in model else "-"
                axis.plot(shares, [row[share] for share in shares], style, marker=".", label=model)
        axes[0].set(ylabel="accuracy, %")
        axes[-1].legend(fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))


def draw_dots(folder, name, rows, key, labels, about, xlabel):
    """Draw the mean and standard deviation over seeds of a column of results, a row each."""
    title = f"{about}; mean ± standard deviation of {rows[0]['seeds']} seeds"
    means = [row[key] for row in rows]
    deviations = [row[f"{key}_std"] for row in rows]
    size = (6.4, 0.9 + 0.25 * len(rows))
    with new_figure(folder, name, size, xlabel=xlabel, title=title) as [axis]:
        axis.errorbar(means, labels, xerr=deviations, fmt="o", color="black", markersize=4,
                      capsize=3)
        axis.invert_yaxis()


# Trained runs


def draw_collisions(folder, run):
    """Draw which positions share a bucket: a row of maps per layer, a column per head."""
    layers = []
    for _, layer, q, k, _ in attention.trained_layers(run, 1):
        hq, hk = layer.attention.hash_buckets(q, k)
        layers.append(collisions(hq, hk)[0])  # (H, L, L)
    num_layers = len(layers)
    num_heads = hq.shape[1]
    size = (2.2 * num_heads, 2.3 * num_layers)
    with new_figure(folder, "collisions", size, num_layers, num_heads) as axes:
        for i, is_collision in enumerate(torch.cat(layers)):  # (L, L)
            layer, head = divmod(i, num_heads)
            share = 100 * is_collision.float().mean()
            draw_matrix(axes[i], is_collision.numpy(), xlabel="key position",
                        ylabel="query position",
                        title=f"layer {layer + 1}, head {head + 1}: {share:.0f} %")
            axes[i].label_outer()


def draw_losses(folder, name, runs, unit):
    """Draw how runs learn: a curve of the training loss, dots on held-out text."""
    with new_figure(folder, name, (6.4, 4), xlabel="optimizer steps", ylabel=unit,
                    title="lines: loss in training; dots: on held-out text; one seed") as [axis]:
        for number, run in enumerate(runs):
            with blame_input(f"--runs {run}, log.jsonl"):
                log = harness.read_log(run)
            for key, style, label in (("loss", "-", Path(run).name), ("eval_loss", "o", None)):
                steps = [row["step"] for row in log if key in row]
                values = [row[key] for row in log if key in row]
                axis.plot(steps, values, style, color=f"C{number}", linewidth=1, markersize=4,
                          label=label)
        axis.legend()


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
    tables = recipe_tables()
    tables["counts"] = markdown(list(hashformers.count_paper_models()), hashformers.COUNTS)
    benches = {}
    for file in (hashformers, attention, superbloom, sketch, training, misspell, controls):
        benches |= file.BENCHES
    for path in Path(ROOT, "results").glob("*.json"):
        result = read_json(path)
        rows = []
        for row in result["rows"]:
            if not row.get("name", "").endswith("by frequency"):  # a figure shows them in full
                rows.append(row)
        # results of the scripts name the bench that has their columns
        columns = benches[result["bench"]].columns
        tables[path.stem] = markdown(rows, columns) + "\n" + caption(result)
    return tables


RECIPE_COLUMNS = """
    name       s    row
    command    s    flags of pretrain.py
    departs    s    departs from the paper
"""


def recipe_tables():
    """Return dict, marker -> markdown: commands of the papers' rows, and how they depart."""
    rows = defaultdict(list)  # marker -> rows
    for name, command, _, departures in RECIPES:
        page = re.match(r"[\w-]+", name)[0].lower().replace("median", "sketch")
        departs = ", ".join(f"{key} {value}" for key, value in departures.items())
        row = dict(name=name, command=f"`{command}`", departs=departs)
        rows[f"recipes {page}"].append(row)
    return {marker: markdown(rows[marker], RECIPE_COLUMNS) for marker in rows}


BENCHES = {
    "figures": Bench(draw_figures, flags=dict(runs=None, out=None)),
    "readme": Bench(write_readme),
}


def main(argv=None):
    """Run a command of this file."""
    harness.run_command("figures", __doc__, BENCHES, argv)


if __name__ == "__main__":
    main()
