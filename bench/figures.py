"""Draw the figures of the pages, and write their tables, from results/ and from trained runs.

`figures` draws laws and examples, which it computes, and results, which it reads from
results/*.json. `readme` writes the tables between the markers of README.md and docs/, such as
<!-- attention --> for results/attention.json; a test compares the pages with what it writes.

    python -m bench.figures figures                 draw assets/
    python -m bench.figures figures --run RUN       draw the colliding pairs of a run as well
    python -m bench.figures readme                  write the tables anew
"""

import contextlib
import re
from collections import Counter, defaultdict

import torch

from attention import collisions
from bench import attention, claims, controls, copies, gpu, harness, hashformers, misspell
from bench import sketch, superbloom, training
from bench.harness import ROOT, Bench, caption, markdown
from bloom import DEMO_ORDERS, BloomMap
from common import InputError, read_json
from embeddings import ProjEmbedding
from hashing import NgramLSH, list_words, md5_bits

ASSETS = ROOT / "assets"
STYLE = {"savefig.dpi": 110, "figure.constrained_layout.use": True, "axes.spines.top": False,
         "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.3,
         "axes.titlesize": 10, "legend.frameon": False}


def draw_figures(args):
    """Draw the figures of assets/."""
    for draw in (draw_pipeline, draw_maps, draw_attention, draw_claims, draw_scores, draw_curves):
        draw()
    if args.run is not None:
        draw_collisions(args.run)
    return []  # no rows of a table


@contextlib.contextmanager
def new_figure(name, size, rows=1, columns=1, **labels):
    """Yield the axes of a new figure, an array, then write assets/NAME.png.

    Args:
        name: str.
        size: width and height in inches.
        rows, columns: int, the grid of axes.
        labels: xlabel, ylabel and title of the first axes.
    """
    # here, so that tables can be written without matplotlib
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot
    with pyplot.rc_context(STYLE):
        figure, axes = pyplot.subplots(rows, columns, figsize=size, squeeze=False)
        axes[0, 0].set(**labels)
        yield axes.ravel()
        path = ASSETS / f"{name}.png"
        figure.savefig(path)
        pyplot.close(figure)
    print(f"Saved {path}")


# Laws and examples


def draw_matrix(axis, matrix, **labels):
    """Draw a matrix of 0 and 1."""
    axis.imshow(matrix, cmap="Greys", interpolation="nearest", aspect="auto")
    axis.grid(False)
    axis.set(**labels)


def draw_pipeline():
    """Draw how words become bits, by MD5 and by LSH, and a vector, by Proj."""
    words = ["play", "plays", "cat"]
    ticks = dict(xticks=[], yticks=range(3), yticklabels=words)
    torch.manual_seed(0)
    text = (ROOT / "README.md").read_text(encoding="utf-8")  # any text will do
    lsh = NgramLSH.fit(Counter(list_words(text)))
    proj = ProjEmbedding(128, 16).requires_grad_(False)
    kinds = {  # a row of the figure each
        "MD5 of the whole word": md5_bits(words),
        "LSH of its n-grams:\np l a y pl la ay\npla lay play": lsh.bits(words, 128),
    }
    with new_figure("pipeline", (8, 3.4), 2, 2) as axes:
        for (kind, bits), (left, right) in zip(kinds.items(), axes.reshape(2, 2)):
            draw_matrix(left, bits[:, :32], ylabel=kind, **ticks)
            draw_matrix(right, proj(torch.from_numpy(bits)).numpy(), **ticks)  # (3, 16)
            for y, num_different in enumerate((bits != bits[0]).sum(1)):
                left.text(32, y, f"{num_different} of 128\ndiffer", va="center", fontsize=8)
        axes[0].set_title("1. hash a word: 128 bits (32 shown), black = 1")
        axes[1].set_title("2. vector: correlation of the\nbits with untrained vectors")


def draw_maps():
    """Draw the two Bloom maps of python bloom.py; the width of a bucket is its probability."""
    bloom_map = BloomMap(12, alpha=3, orders=DEMO_ORDERS)
    # the probabilities of the buckets of each map, as in the demo of bloom.py
    p = [
        [0.64, 0.19, 0.14, 0.03],
        [0.56, 0.02, 0.22, 0.20],
    ]
    title = ("12 items in buckets of 3; width: probability; gray: the buckets of item 9, "
             "log 0.64 + log 0.22 = -1.96")
    with new_figure("maps", (8, 2.4)) as [axis]:
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


# Results


def read_rows(name):
    """Return the rows of results/NAME.json."""
    return read_json(ROOT / "results" / f"{name}.json")["rows"]


def draw_attention():
    """Draw the time of attention by the length of a sequence: on a CPU, and on a GPU."""
    on_cpu = {"dense": "dense (torch's kernel)", "ours": "LSH attention, bucket by bucket"}
    on_gpu = {"kernel": "dense (flash attention)", "blocks": "LSH attention, bucket by bucket"}
    rows = []
    for row in read_json(ROOT / "results/gpu.json")["attention"]:
        if row["dtype"] == "bfloat16" and row["data"] == "random" and row["L"] < 65_536:
            rows.append(row)
    panels = (
        ("2 CPU cores, 2 heads, 16,384 positions a batch", on_cpu, read_rows("attention")[:-1]),
        ("one H200, 12 heads, 32,768 positions a batch", on_gpu, rows),
    )
    with new_figure("attention", (9, 3.6), columns=2) as axes:
        for axis, (title, lines, rows) in zip(axes, panels):
            lengths = [row["L"] for row in rows]
            for (key, label), mark in zip(lines.items(), ("o--", "s-")):
                axis.loglog(lengths, [row[key] for row in rows], mark, label=label)
            axis.set(title=title, xlabel="positions of a sequence", ylabel="ms, lower is better")
            axis.set_xticks(lengths, lengths, fontsize=7)
            axis.minorticks_off()
            axis.legend(fontsize=8)


def draw_claims():
    """Draw by how many standard errors each claim of README leads its control."""
    looks = {"holds": ("o", "tab:blue"), "not decided": ("D", "0.5"),
             "does not hold": ("X", "tab:orange")}
    names = []
    with new_figure("claims", (9, 4.2), xlabel="lead over the control, standard errors") as [axis]:
        for paper, rows in read_json(ROOT / "docs/claims.json").items():
            front = [row for row in rows if "front" in row]
            for row in claims.list_claims(front):
                if row.get("lead") is not None:
                    names.append(f"{row['claim']} [{paper}]")
                    verdict, *_ = row["verdict"].split(" (")
                    mark, color = looks[verdict]
                    axis.plot(row["lead"], names[-1], mark, color=color)
        for verdict, (mark, color) in looks.items():
            axis.plot([], [], mark, color=color, label=f"{verdict} here")
        for limit in (-claims.LIMIT, claims.LIMIT):
            axis.axvline(limit, color="0.3", linestyle="--")
        axis.invert_yaxis()
        axis.legend(fontsize=8)


def draw_scores():
    """Draw the default run's scores beside those of its controls."""
    rows = read_rows("default")
    cosines = {f"proj-lsh, {row['name']}": row["cosine"] for row in read_rows("overlap")}
    for row in rows:
        row["cosine"] = cosines.get(row["name"])
    labels = []
    for row in rows:
        _, task = row["name"].split(", ")
        labels.append(f"{task} (n = {row['n']:,})")
    columns = {  # key -> marker, color, legend
        "majority": ("|", "gray", "majority class"),
        "bag_of_words": ("s", "tab:orange", "bag of words"),
        "cosine": ("x", "tab:green", "cosine of word counts"),
        "score": ("o", "tab:blue", "encoder, 0.45 M parameters"),
    }
    with new_figure("scores", (8.4, 3.4), xlabel="score, % or 100 × correlation",
                    title="default run; mean ± standard deviation of three seeds") as [axis]:
        for key, (marker, color, label) in columns.items():
            for row, name in zip(rows, labels):
                if row.get(key) is not None:  # regression: no majority class; one text: no cosine
                    axis.errorbar(row[key], name, xerr=row.get(f"{key}_std"), label=label,
                                  capsize=3, fmt=marker, color=color)
                    label = None  # one line of the legend is enough
        axis.invert_yaxis()
        axis.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))


def draw_curves():
    """Draw the losses of BERT-LSH and its dense twin in pre-training. [BL Figure 2]"""
    rows = defaultdict(list)
    for row in read_rows("curves"):
        rows[row["name"]].append(row)
    with new_figure("curves", (5.4, 3.4), xlabel="optimizer steps",
                    ylabel="nats per masked word",
                    title="lines: loss in training; dots: held-out text; one seed") as [axis]:
        for number, (name, part) in enumerate(rows.items()):
            steps = [row["step"] for row in part]
            color = f"C{number}"
            axis.plot(steps, [row["loss"] for row in part], color=color, linewidth=1, label=name)
            axis.plot(steps, [row["eval_loss"] for row in part], "o", color=color, markersize=4)
        axis.legend()


# Trained runs


def draw_collisions(run):
    """Draw which positions of a run with LSH attention share a bucket: layers by heads."""
    model, _, _ = harness.load_run(run)
    if model.config.attn != "lsh" or not model.config.order:
        raise InputError(f"--run: expected a run on text with --attn lsh, got {run}.")
    layers = []
    for _, layer, q, k, _ in attention.trained_layers(run, 1):
        hq, hk = layer.attention.hash_buckets(q, k)
        layers.append(collisions(hq, hk)[0])  # (H, L, L)
    num_layers = model.config.layers
    num_heads = model.config.heads
    size = (2.2 * num_heads, 2.3 * num_layers)
    with new_figure("collisions", size, num_layers, num_heads) as axes:
        for i, is_collision in enumerate(torch.cat(layers)):  # (L, L)
            layer, head = divmod(i, num_heads)
            share = 100 * is_collision.float().mean()
            title = f"layer {layer + 1}, head {head + 1}: {share:.0f} %"
            draw_matrix(axes[i], is_collision.numpy(), xlabel="key position",
                        ylabel="query position", title=title)
            axes[i].label_outer()


# Tables


def write_readme(args):
    """Write the tables between the markers of README.md and docs/ anew."""
    tables = readme_tables()
    for path in [ROOT / "README.md", *ROOT.glob("docs/*.md")]:
        text = path.read_text(encoding="utf-8")
        for name, table in tables.items():
            pattern = rf"(?s)(<!-- {name} -->\n).*?(<!-- end -->)"
            # a function, as re.sub would read backslashes of a table
            text = re.sub(pattern, lambda m: m[1] + table + m[2], text)
        path.write_text(text, encoding="utf-8")
    return []


def readme_tables():
    """Return dict, marker -> markdown: counts, and tables of results/."""
    tables = dict(counts=markdown(list(hashformers.count_paper_models()), hashformers.COUNTS))
    tables |= claims.list_tables()
    benches = {}
    for file in (hashformers, attention, superbloom, sketch, training, misspell, controls, copies):
        benches |= file.BENCHES
    # each result has a table, whether a page shows it or not
    for path in ROOT.glob("results/*.json"):
        result = read_json(path)
        if path.stem == "gpu":  # a file of four tables
            tables |= gpu.format_tables(result)
            continue
        if result["bench"] not in benches:  # numbers of the prose, without a table
            continue
        # each result names the bench that has its columns
        table = markdown(result["rows"], benches[result["bench"]].columns)
        tables[path.stem] = f"{table}\n{caption(result)}"
    return tables


BENCHES = {
    "figures": Bench(draw_figures, flags=dict(run=None)),
    "readme": Bench(write_readme),
}


def main(argv=None):
    """Run the command of this file that the command line, or the list argv, names."""
    harness.run_command("figures", __doc__, BENCHES, argv)


if __name__ == "__main__":
    main()
