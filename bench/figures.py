"""Draw the figures of the pages, and write their tables, from results/.

`figures` draws examples, which it computes, and results, which it reads from results/*.json.
`readme` writes the tables between the markers of README.md and docs/, such as <!-- attention -->
for results/attention.json; a test compares the pages with what it writes.

    python -m bench.figures figures                 draw assets/
    python -m bench.figures readme                  write the tables anew
"""

import argparse
import contextlib
import math
import re
import textwrap
from collections import Counter

import torch

import attention
from bench import attention as attention_bench
from bench import claims, controls, copies, gpu, hashformers, misspell, sketch, superbloom, training
from bench.harness import ROOT, caption, markdown
from bloom import DEMO_ORDERS, DEMO_PROBABILITIES, BloomMap
from embeddings import ProjEmbedding
from hashing import NgramLSH, list_words, md5_bits
from support.common import read_json, run_script

ASSETS = ROOT / "assets"
WITHOUT_TABLE = {"variants"}  # results with numbers of the prose alone
STYLE = {"savefig.dpi": 110, "figure.constrained_layout.use": True, "axes.spines.top": False,
         "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.3,
         "axes.titlesize": 10, "legend.frameon": False}


def main(argv=None):
    """Draw the figures, or write the tables, as the command line or the list argv says."""
    args = build_parser().parse_args(argv)
    if args.what == "readme":
        write_tables()
    else:
        draw_pipeline()
        draw_maps()
        draw_buckets()
        draw_attention()
        draw_claims()


def build_parser():
    """Return the parser of the command line."""
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("what", choices=("figures", "readme"))
    return p


@contextlib.contextmanager
def new_figure(name, size, rows=1, columns=1):
    """Yield the axes of a new figure, an array, then write assets/NAME.png.

    Args:
        name: str.
        size: width and height in inches.
        rows, columns: int, the grid of axes.
    """
    # here, so that tables can be written without matplotlib
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot
    with pyplot.rc_context(STYLE):
        figure, axes = pyplot.subplots(rows, columns, figsize=size, squeeze=False)
        yield axes.ravel()
        path = ASSETS / f"{name}.png"
        figure.savefig(path)
        pyplot.close(figure)
    print(f"Saved {path}")


# Examples


def draw_pipeline():
    """Draw how words become bits, by MD5 and by LSH, and a vector, by Proj."""
    words = ["play", "plays", "cat"]
    ticks = dict(xticks=[], yticks=range(3), yticklabels=words)
    torch.manual_seed(0)
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")  # any text will do
    ngrams = NgramLSH.fit(Counter(list_words(text)))
    proj = ProjEmbedding(128, 16).requires_grad_(False)
    kinds = {  # a row of the figure each
        "MD5 of the whole word": md5_bits(words),
        "LSH of n-grams,\nof play: p l a y pl\nla ay pla lay play": ngrams.bits(words, 128),
    }
    with new_figure("pipeline", (8.6, 3.6), 2, 2) as axes:
        for (kind, bits), (left, right) in zip(kinds.items(), axes.reshape(2, 2)):
            left.set(ylabel=kind)
            vectors = proj(torch.from_numpy(bits)).numpy()  # (3, 16)
            for axis, matrix in ((left, bits[:, :32]), (right, vectors)):
                axis.imshow(matrix, cmap="Greys", interpolation="nearest", aspect="auto")
                axis.grid(False)
                axis.set(**ticks)
            for y, num_different in enumerate((bits != bits[0]).sum(1)):
                text = f"{num_different} of 128\ndiffer from play"
                left.text(32.3, y, text, va="center", fontsize=8)
        axes[0].set_title("1. hash a word: 128 bits (32 shown), black = 1.\n"
                          "Unrelated words: about 64 differ")
        axes[1].set_title("2. embed by Proj: correlate the bits with\n"
                          "16 vectors (here random), dark = high")


def draw_maps():
    """Draw the two Bloom maps of python bloom.py; the width of a bucket is its probability."""
    bloom_map = BloomMap(12, alpha=3, orders=DEMO_ORDERS)
    title = ("Two maps put 12 items into buckets of 3. Width: the probability of a bucket.\n"
             "Gray: the buckets of item 9; its score is log 0.64 + log 0.22 = -1.96")
    with new_figure("maps", (8, 2.4)) as [axis]:
        for j in range(2):
            x = 0
            for share, items in zip(DEMO_PROBABILITIES[j], bloom_map.members[j].tolist()):
                width = share + 0.05  # a bucket of probability 0.02 still shows its items
                color = "0.75" if 9 in items else "white"
                axis.barh(-j, width, left=x, color=color, edgecolor="0.4")
                text = " ".join(map(str, sorted(items)))
                axis.text(x + width / 2, -j, f"{share:.2f}\n{text}", ha="center", va="center",
                          fontsize=8)
                x += width
        axis.set(xticks=[], yticks=[0, -1], yticklabels=["map 0", "map 1"])
        axis.set_title(title, fontsize=9)


def draw_buckets():
    """Draw which queries and keys share a hash bucket: in the order of the text, and sorted."""
    generator = torch.Generator().manual_seed(1)
    q, k = torch.randn(2, 1, 1, 24, 16, generator=generator)
    draw = attention.draw_hyperplanes(1, 1, 3, 16, 8, generator)  # 3 hyperplanes: 8 buckets
    hq, hk = [attention.simhash(x, *draw, 8).flatten() for x in (q, k)]  # (24,)
    orders = {
        "queries and keys in the order of the text": (torch.arange(24), torch.arange(24)),
        "sorted by bucket: each bucket is one dense block": (hq.argsort(), hk.argsort()),
    }
    with new_figure("buckets", (8, 4), columns=2) as axes:
        for axis, (title, (rows, columns)) in zip(axes, orders.items()):
            is_collision = hq[rows, None] == hk[columns]  # (24, 24)
            axis.imshow(is_collision, cmap="Greys", vmax=1.5)
            axis.grid(False)
            axis.set_title(title, fontsize=9)
            axis.set(xlabel="key, its bucket", ylabel="query, its bucket")
            axis.set_xticks(range(24), hk[columns].tolist(), fontsize=7)
            axis.set_yticks(range(24), hq[rows].tolist(), fontsize=7)


# Results


def draw_attention():
    """Draw the time of attention by the length of a sequence: on a CPU, and on a GPU."""
    on_cpu = read_json(ROOT / "results/attention.json")
    on_gpu = read_json(ROOT / "results/gpu-attention.json")
    cpu_rows = [row for row in on_cpu["rows"] if "dense" in row]
    gpu_rows = []
    for row in on_gpu["rows"]:
        if row["dtype"] == "bfloat16" and row["data"] == "random" and row["L"] < 65_536:
            gpu_rows.append(row)
    _, processor = on_gpu["machine"]["device"].split(", ")
    panels = (  # title, rows, key of LSH attention
        (f"CPU, {on_cpu['machine']['device']}\n16,384 positions a batch, 2 heads, float32",
         cpu_rows, "ours"),
        (f"GPU, {processor}, random vectors\n32,768 positions a batch, 12 heads, bfloat16",
         gpu_rows, "flex"),
    )
    with new_figure("attention", (9, 3.6), columns=2) as axes:
        for axis, (title, rows, key) in zip(axes, panels):
            lengths = [row["L"] for row in rows]
            axis.loglog(lengths, [row["dense"] for row in rows], "o--", label="dense")
            axis.loglog(lengths, [row[key] for row in rows], "s-", label="LSH, 8 hyperplanes")
            axis.set(title=title, xlabel="positions of a sequence",
                     ylabel="ms, forward and backward")
            axis.set_xticks(lengths, lengths, fontsize=7)
            axis.minorticks_off()
            axis.legend(fontsize=8)


def draw_claims():
    """Draw the claims of README that are decided: what was measured here beside its control."""
    decided = []
    for paper, rows in read_json(ROOT / "docs/claims.json").items():
        for claim in rows:
            if "front" not in claim:
                continue
            here, control = claims.read_sides(claim)
            verdict = claims.judge(claim, here, control)
            if not verdict.startswith("not decided"):
                decided.append((paper, claim, verdict, here, control))
    columns = math.ceil(len(decided) / 3)
    with new_figure("claims", (2.5 * columns, 9.9), 3, columns) as axes:
        for axis in axes[len(decided):]:
            axis.set_axis_off()
        axes[0].figure.suptitle(
            f"The {len(decided)} claims of README that are decided. Blue: the claim holds. Orange: "
            "it does not. Gray: what it is compared with.\nError bars: standard deviation of three "
            "seeds. Speeds are of a CPU, one run")
        for axis, (paper, claim, verdict, here, control) in zip(axes, decided):
            own_color = "tab:blue" if verdict == "holds" else "tab:orange"
            for x, value, color in ((0, here, own_color), (1, control, "0.8")):
                axis.bar(x, value["mean"], yerr=value["std"], capsize=4, width=0.7, color=color)
                text = claims.write_number(value | dict(std=None))  # as in the table
                axis.text(x, 0, text, ha="center", va="bottom", weight="bold")
            axis.set_xticks([0, 1], claim["bars"])
            axis.set_ylabel(textwrap.fill(claim["unit"], 30))
            text = textwrap.fill(claim["front"], 26)
            axis.set_title(f"{paper}:\n{text}\n→ {verdict}", fontsize=9)


# Tables


def write_tables():
    """Write the tables between the markers of README.md and docs/ anew."""
    tables = readme_tables()
    for path in [ROOT / "README.md", *ROOT.glob("docs/*.md")]:
        text = path.read_text(encoding="utf-8")
        for name, table in tables.items():
            pattern = rf"(?s)(<!-- {name} -->\n).*?(<!-- end -->)"
            # a function, as re.sub would read backslashes of a table
            text = re.sub(pattern, lambda m: m[1] + table + m[2], text)
        path.write_text(text, encoding="utf-8")


def readme_tables():
    """Return dict, marker -> markdown: counts, and tables of results/."""
    tables = dict(counts=markdown(list(hashformers.count_paper_models()), hashformers.COUNTS))
    tables |= dict(claims.list_tables())
    fastest = []  # of each model, compiled or not
    for name in ("gpu-bert", "gpu-steps"):
        rows = read_json(ROOT / f"results/{name}.json")["rows"]
        fastest.append(min([row for row in rows if row["batch"] == 64], key=lambda row: row["ms"]))
    tables["front gpu"] = markdown(fastest, gpu.MFU)
    benches = {}
    for file in (attention_bench, controls, copies, gpu, hashformers, misspell, sketch, superbloom,
                 training):
        for name, table in file.TABLES.items():
            if name in benches:  # a result would be shown in the columns of another table
                raise ValueError(f"TABLES: expected one {name}, got two.")
            benches[name] = table
    # each result has a table, whether a page shows it or not
    for path in ROOT.glob("results/*.json"):
        result = read_json(path)
        bench = result["bench"]
        if bench in WITHOUT_TABLE:
            continue
        # each result names the bench that has its columns
        _, columns, _ = benches[bench]
        table = markdown(result["rows"], columns)
        tables[path.stem] = f"{table}\n{caption(result)}"
    return tables


if __name__ == "__main__":
    run_script("bench.figures", main)
