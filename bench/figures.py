"""Draw the figures of the pages, and write their tables, from results/.

`figures` draws examples, which it computes, and results, which it reads from results/*.json.
`readme` writes the tables between the markers of README.md and docs/, such as <!-- attention -->
for results/attention.json; a test compares the pages with what it writes.

    python -m bench.figures figures                 draw assets/
    python -m bench.figures readme                  write the tables anew
"""

import contextlib
import re
import textwrap
from collections import Counter

import torch

import attention
from bench import attention as attention_bench
from bench import claims, hashformers, shares
from bench.harness import ROOT, caption, markdown
from bloom import DEMO_ORDERS, BloomMap
from embeddings import ProjEmbedding
from hashing import NgramLSH, md5_bits
from search import DEMO_PROBABILITIES
from support.common import make_parser, read_json, run_script
from words import list_words

ASSETS = ROOT / "assets"
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
        draw_effects()
        draw_frontier()


def build_parser():
    """Return the parser of the command line."""
    p = make_parser("python -m bench.figures", __doc__)
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
    # every n-gram of these words is known. With few others, the bits would depend on each other
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    counts = Counter(words + list_words(text))
    torch.manual_seed(0)
    proj = ProjEmbedding(128, 16).requires_grad_(False)
    lsh_bits = NgramLSH.fit(counts).bits(words, 128)
    kinds = {  # a row of the figure: title, and bits of each word
        "MD5 of the whole word": md5_bits(words),
        "LSH of n-grams\n(play: p l a y pl\nla ay pla lay play)": lsh_bits,
    }
    with new_figure("pipeline", (9.4, 3.8), 2, 2) as axes:
        for (kind, bits), (left, right) in zip(kinds.items(), axes.reshape(2, 2)):
            left.set(ylabel=kind)
            vectors = proj(torch.from_numpy(bits))  # (3, 16)
            for axis, matrix in ((left, bits[:, :32]), (right, vectors.numpy())):
                axis.imshow(matrix, cmap="Greys", interpolation="nearest", aspect="auto")
                axis.grid(False)
                axis.set(**ticks)
            cosines = torch.cosine_similarity(vectors[:1], vectors)
            for y in (1, 2):
                count = (bits[y] != bits[0]).sum()
                left.text(32.3, y, f"{count} of 128\ndiffer from\nplay", va="center", fontsize=8)
                text = f"cosine with\nplay: {cosines[y]:.2f}"
                right.text(15.8, y, text, va="center", fontsize=8)
        axes[0].set_title("1. Hash a word: 128 bits, of which 32 are shown\n"
                          "(black: 1)")
        axes[1].set_title("2. Proj: each of 16 columns is the correlation of the bits with\n"
                          "a vector, here a random one (black: highest)")


def draw_maps():
    """Draw the two Bloom maps of python search.py, and a beam of two buckets with its bound."""
    bloom_map = BloomMap(12, alpha=3, orders=DEMO_ORDERS)
    beam = 2
    title = ("Two maps put 12 items into buckets 0 to 3, whose width is their probability. Blue: "
             "the beam, the two likeliest of each map.\n"
             "Item [9] scores log 0.64 + log 0.22 = -1.96, the others in blue less. "
             "Items outside score log 0.19 + log 0.22 = -3.18 at most")
    with new_figure("maps", (9, 2.6)) as [axis]:
        for j in range(2):
            x = 0
            y = -1.6 * j
            shares = DEMO_PROBABILITIES[j]
            last = sorted(shares, reverse=True)[beam - 1]
            for share, items in zip(shares, bloom_map.members[j].tolist()):
                color = "#cfe3f5" if share >= last else "white"
                axis.barh(y, share, left=x, color=color, edgecolor="0.4")
                text = " ".join(f"[{item}]" if item == 9 else str(item) for item in sorted(items))
                label = f"{share:.2f}\n{text}"
                if share < 0.1:  # too narrow for its text
                    axis.text(x + share / 2, y + 0.45, label, ha="center", fontsize=7)
                else:
                    axis.text(x + share / 2, y, label, ha="center", va="center", fontsize=8)
                x += share
        axis.grid(False)
        axis.set(xticks=[], yticks=[0, -1.6], yticklabels=["map 0", "map 1"], ylim=(-2.1, 1.2))
        axis.set_title(title, fontsize=9)


def draw_buckets():
    """Draw which queries and keys share a hash bucket, and what the other keys weigh together."""
    num = 24
    size = 16
    buckets = 8
    generator = torch.Generator().manual_seed(1)
    q, k = torch.randn(2, 1, 1, num, size, generator=generator)
    hyperplanes = attention.draw_hyperplanes(1, 1, 3, size, buckets, generator)  # 3: 8 buckets
    hq, hk = attention_bench.hash_both(q, k, hyperplanes, buckets)  # (1, 1, 1, 24)
    outside = shares.outside_share(q, k, hq, hk).flatten()  # (24,)
    hq = hq.flatten()
    hk = hk.flatten()
    is_collision = hq[:, None] == hk  # (24, 24)
    in_text = torch.arange(num)
    orders = (  # of queries, of keys
        (in_text, in_text),
        (hq.argsort(stable=True), hk.argsort(stable=True)),
    )
    with new_figure("buckets", (9, 4.4), columns=2) as axes:
        for axis, (rows, columns) in zip(axes, orders):
            image = torch.zeros(num, num + 3)
            image[:, :num] = 0.6 * is_collision[rows][:, columns]
            axis.imshow(image, cmap="Greys", vmin=0, vmax=1)
            axis.grid(False)
            axis.axvline(num + 0.5, color="0.5", linewidth=0.8)
            for y, share in enumerate(outside[rows].tolist()):
                axis.text(num + 1.6, y, f"{share:.2f}", ha="center", va="center", fontsize=6)
            axis.set(xlabel="key, its bucket", ylabel="query, its bucket")
            axis.set_xticks(range(num), hk[columns].tolist(), fontsize=7)
            axis.set_yticks(range(num), hq[rows].tolist(), fontsize=7)
        axes[0].set_title("24 random queries and keys, 3 hyperplanes, 8 buckets.\n"
                          "Gray: they share a bucket, and are scored. White: score 0", fontsize=9)
        axes[1].set_title("Sorted by bucket: blocks. Numbers: the share of a query's\n"
                          "attention that its white keys have, as one extra key", fontsize=9)


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
    panels = (  # title, rows, key of LSH attention, positions of a batch
        (f"CPU, {on_cpu['machine']['device']}, 2 heads, float32\n"
         "LSH: the literal formula up to 256 positions, then by bucket",
         cpu_rows, "ours", 16_384),
        (f"GPU, {processor}, 12 heads, bfloat16\n"
         "dense: flash attention. LSH: FlexAttention", gpu_rows, "flex", 32_768),
    )
    with new_figure("attention", (9, 3.6), columns=2) as axes:
        for axis, (title, rows, key, positions) in zip(axes, panels):
            lengths = [row["L"] for row in rows]
            lines = (("dense", "dense", "o--"), (key, "LSH, 8 hyperplanes", "s-"))
            for name, label, style in lines:
                # a batch has fewer sequences where they are longer
                times = [row[name] * row["L"] / positions for row in rows]
                axis.loglog(lengths, times, style, label=label)
            axis.set(title=title, xlabel="positions of a sequence",
                     ylabel="ms a sequence, forward and backward")
            axis.set_xticks(lengths, lengths, fontsize=7)
            axis.minorticks_off()
            axis.legend(fontsize=8)


def draw_effects():
    """Draw the leads of the main claims in % of their rivals, beside those of the papers."""
    rows = []
    for paper, listed in read_json(ROOT / "docs/claims.json").items():
        for claim in listed:
            if "sides" in claim:
                rows.append((paper, claim))
    names = []
    with new_figure("effects", (10, 1 + 0.45 * len(rows))) as [axis]:
        for y, (paper, claim) in enumerate(rows):
            lead, low, high = claims.find_lead(claim)
            color = "0.4"  # not decided
            if low > 0:
                color = "tab:blue"
            if high < 0:
                color = "tab:orange"
            axis.errorbar(lead, y, xerr=[[lead - low], [high - lead]], fmt="o", color=color,
                          capsize=4)
            axis.annotate(f"{lead:+.0f} %", (lead, y), (0, 7), ha="center", fontsize=8,
                          textcoords="offset points", color=color)
            if "effect" in claim:  # the paper has a number of the same measure
                axis.plot(claims.find_claimed_lead(claim), y, "D", color="black", fillstyle="none")
            own, other = claim["sides"]
            measured, *_ = claim["measured"].split(" (")  # (lower is better)
            names.append(textwrap.fill(f"{paper}: {own} over {other}; {measured}", 64))
        axis.plot([], [], "D", color="black", fillstyle="none",
                  label="the paper's lead, where it has this measure")
        for color, verdict in (("tab:blue", "better"), ("tab:orange", "worse"),
                               ("0.4", "undecided")):
            axis.errorbar([], [], xerr=[], fmt="o", color=color, capsize=4,
                          label=f"ours, with its 95 % interval: {verdict}")
        axis.axvline(0, color="0.5", linewidth=0.8)
        axis.set_yticks(range(len(names)), names, fontsize=8)
        axis.set_ylim(len(names) - 0.5, -0.8)
        axis.set_xlim(left=-85)
        axis.set_xlabel("lead of the method (lower loss, higher score), in % of its rival")
        # below the axis, where it covers no row
        axis.figure.legend(loc="outside lower center", fontsize=8, ncols=3)


def draw_frontier():
    """Draw the loss of LSH attention, less that of dense attention, against the scored pairs."""
    rows = {row["name"]: row for row in read_rows("frontier")}
    with new_figure("frontier", (6, 3.6)) as [axis]:
        for L, color in ((128, "tab:blue"), (512, "tab:orange"), (1024, "tab:green")):
            places = []
            means = []
            for kind in ("8", "4", "2", "1", "shared-4"):
                pairs = rows[f"{L}-{kind}"]["pairs"]
                cost = find_cost(L, kind)
                marker = "x" if kind == "shared-4" else "o"
                axis.errorbar(pairs, cost.mean, cost.limit, fmt=marker, color=color, capsize=3)
                if L == 128:
                    axis.annotate(f"r {kind[-1]}", (pairs, cost.mean), (6, 4), fontsize=8,
                                  textcoords="offset points")
                if kind != "shared-4":
                    places.append(pairs)
                    means.append(cost.mean)
            axis.plot(places, means, "o-", color=color, label=f"{L:,} positions")
        axis.plot([], [], "x", color="black", label="the keys are the queries")
        axis.axhline(0, color="0.5", linewidth=0.8)
        axis.set_xscale("log")
        axis.set_xticks([0.5, 1, 2, 5, 10, 20, 50, 100], [0.5, 1, 2, 5, 10, 20, 50, 100])
        axis.minorticks_off()
        axis.set(xlabel="scored pairs, %",
                 title="masked-word loss, less that of all pairs, with 95 % intervals")
        axis.legend(fontsize=8)


def find_cost(L, kind):
    """Return by how much a kind of LSH attention has a higher loss, claims.Difference."""
    claim = dict(here=["frontier", f"{L}-{kind}", "loss"],
                 control=["frontier", f"{L}-dense", "loss"])
    return claims.compare(claim, *claims.read_sides(claim))


def read_rows(name):
    return read_json(ROOT / f"results/{name}.json")["rows"]


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
    # each result has a table, whether a page shows it or not
    for path in ROOT.glob("results/*.json"):
        result = read_json(path)
        table = markdown(result["rows"], result["columns"])
        tables[path.stem] = f"{table}\n{caption(result)}"
    return tables


if __name__ == "__main__":
    run_script("bench.figures", main)
