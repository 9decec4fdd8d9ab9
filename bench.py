"""Every number that is claimed: counts that are exact, speeds as ratios within one run, tables from results/.

    python bench.py counts         parameters of each row of the paper's Table 2, exact, beside what it prints
    python bench.py hashing        words per second on one core
    python bench.py embeddings     each embedding beside the encoder it feeds
    python bench.py kernel         the two ways to compute full attention on this machine
    python bench.py attention      LSH attention beside dense, 64 to 65,536 positions: time, work, memory
    python bench.py flops          the operations of BERT-LSH as its Table 1 and Figure 1 count them
    python bench.py steps          a training step with full and with LSH attention
    python bench.py train          milliseconds a sample, Shuffle+Random against masked LM (Table 3)
    python bench.py words          a corpus of twelve million distinct words: time and memory
    python bench.py variants       every embedding and hash, short runs, three seeds (half an hour and more)
    python bench.py twins          BERT-LSH, its dense twin and a random control, trained alike (an hour)
    python bench.py trained --runs out/lookup-bpe-mlm*          buckets of trained queries and keys
    python bench.py figures --runs out/*     draw assets/
    python bench.py sizes          parameters of Superbloom's models, exact, beside what its tables print
    python bench.py bloom          beam search beside scoring all of 5,281,889 items, at the paper's densities
    python bench.py million        a training step of a model over 5,281,889 items: time and memory
    python bench.py entities --data pages.jsonl      Superbloom, its baselines, neighbours (Tables 1 and 2)
    python bench.py depth --data pages.jsonl         one layer and many, hashed and not (Table 3)
    python bench.py coherent --data pages.jsonl      random and coherent maps (Table 7)
    python bench.py beams --runs out/bloom-items     by beam width (Table 6), frequency (Figure 3); neighbours
    python bench.py sketch         a row a word, mean, median and weighted sum of hashed rows: size and time
    python bench.py collisions     who shares buckets, counted and by formula
    python bench.py gaps --text FILE     hidden words named by hashes, rows and pieces; GLUE (two hours)
    python bench.py robust --runs out/median out/mean     what a spoilt table does to vectors and loss
    python bench.py evaluation     an evaluation of finetune.py beside the forward passes it is made of
    python bench.py tasks --runs out/*          the results of several fine-tunings in one table
    python bench.py readme         write the tables of README.md anew from results/

A time is the median of several in one process; what is compared takes turns: a busy moment hits all alike.
"""

import argparse
import concurrent.futures
import functools
import itertools
import json
import math
import os
import platform
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time

import numpy as np
import torch
import torch.nn.functional as F

import attention
import embeddings
import finetune
import hashing
import infer
import model
import pretrain

HERE = os.path.dirname(os.path.abspath(__file__))
RESULTS, ASSETS = os.path.join(HERE, "results"), os.path.join(HERE, "assets")


def machine():
    """Where a number was measured: dict of device, torch, commit, date."""
    def git(*command):
        return subprocess.run(["git", *command], cwd=HERE, capture_output=True, text=True).stdout.strip()

    commit = git("rev-parse", "--short", "HEAD") + "+changes" * bool(git("diff", "HEAD", "--", "*.py"))
    cpu = f"{os.cpu_count()} cores, {platform.machine()}"
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else cpu
    return dict(device=device, torch=torch.__version__, commit=commit, date=time.strftime("%Y-%m-%d"))


def medians(functions, rounds=7):
    """Time functions in turns; in: name -> function; out: name -> median seconds, after one untimed round"""
    times = {name: [] for name in functions}
    for turn in range(rounds + 1):
        for name, function in functions.items():
            start = time.perf_counter()
            function()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            if turn:
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(t) for name, t in times.items()}


def table(rows, columns):
    """in: rows list[dict], columns dict key -> (heading, format); out: markdown"""
    def cell(row, key, form):
        value = row.get(key)
        return "—" if value is None else format(value, form)

    aligned = ["---" if form in ("", "s") else "--:" for _, form in columns.values()]
    lines = [[heading for heading, _ in columns.values()], aligned]
    lines += [[cell(row, key, form) for key, (_, form) in columns.items()] for row in rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


# ---------------------------------------------------------------------------------------------------------


def counts(args=None):
    """The parameters of [HF Table 2], exact, beside what the paper prints; out: list of rows"""
    def count(**changes):
        with torch.device("meta"):
            config = model.Config(**model.PRESETS["hashformer"] | dict(head="classify") | changes)
            return model.count_parameters(model.Model(config))

    bert = count(emb="lookup", rows=50_265)
    d, rows = 768, []
    for name, changes, word_row, printed, printed_total, authors, note in (
            ("lookup 50K (BERT)", dict(emb="lookup", rows=50_265), 0, "38.6M", "124.6M", 0, ""),
            ("emb 50K", dict(emb="emb", rows=50_260), 0, "38.6M", "124.6M", 0, ""),
            ("emb 1K", dict(emb="emb", rows=1_038), 0, "797.2K", "86.8M", -5 * d,
             "theirs: the specials are among the rows"),
            ("pool", dict(emb="pool"), d, "797.2K", "86.8M", d,
             "theirs: a 1,025th codebook row, for padding"),
            ("add", dict(emb="add"), d, "197.4K", "86.2M", 0, ""),
            ("proj", dict(emb="proj"), d, "99.1K", "86.1M", 0, "")):
        c = count(**changes)
        embedding = c["embedding"] + word_row
        shown = f"{embedding / 1e6:.1f}M" if embedding >= 1e6 else f"{embedding / 1e3:.1f}K"
        rows.append(dict(name=name, embedding=c["embedding"], with_word=embedding, shown=shown,
                         printed=printed, total=c["total"], printed_total=printed_total,
                         authors=c["total"] + authors, pcr_all=100 * (1 - c["total"] / bert["total"]),
                         pcr_emb=100 * (1 - embedding / bert["embedding"]),
                         poep=100 * embedding / c["total"], note=note))
    return rows


COUNTS = dict(name=("model", "s"), embedding=("to embed words", ","), with_word=("with the WORD row", ","),
              printed=("paper prints", "s"), total=("in all", ","), printed_total=("paper prints", "s"),
              authors=("in the authors' code", ","), pcr_all=("PCR all %", ".1f"),
              pcr_emb=("PCR emb %", ".1f"), poep=("PoEP %", ".1f"), note=("", "s"))


def many_words(count, part=100_000):
    """Made-up distinct words of 2..10 letters: i in base 100, a syllable a digit; lists of at most `part`"""
    syllables = [a + b for a in "bcdfghjklmnprstvwxyz" for b in "aeiou"]
    for start in range(0, count, part):
        words = []
        for i in range(start, min(start + part, count)):
            # 7,919 is prime to 100 and its powers: neighbours in the list are strangers in spelling
            i, word = i * 7_919 % 100**5 if count <= 100**5 else i, ""
            while True:
                i, digit = divmod(i, 100)
                word = syllables[digit] + word
                if not i:
                    break
            words.append(word)
        yield words


def bench_hashing(args):
    """Words per second on one core, distinct words; targets 1 M (MD5), 150 K (LSH bits), 5 K (LSH index)."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    [words] = many_words(100_000)
    n = 50_260
    start = time.perf_counter()
    lsh = hashing.NgramLSH.fit(dict.fromkeys(words, 1), features=n)
    fit = time.perf_counter() - start
    seconds = medians({
        "MD5 digests": lambda: hashing.md5_digests(words),
        "MD5 index, N 50,260": lambda: hashing.md5_index(words, n),
        "LSH bits, T 128": lambda: lsh.bits(words, 128),
        "LSH index, N 50,260": lambda: lsh.index(words[::10], n),
        "text to words, characters": lambda: hashing.words_of(TEXT),
        "text to ids, characters": lambda: pretrain.count_task(("texts", [TEXT]), "regex"),
    }, 5)
    amounts = {"LSH index, N 50,260": len(words) // 10, "text to words, characters": len(TEXT),
               "text to ids, characters": len(TEXT)}
    rows = [dict(name=k, rate=amounts.get(k, len(words)) / s) for k, s in seconds.items()]
    return rows + [dict(name="LSH fit", rate=len(words) / fit)]


TEXT = "The 12 quick-witted foxes (all of them!) jumped over one lazy dog; it didn't mind. " * 20_000
HASHING = dict(name=("one core", "s"), rate=("a second", ",.0f"))


def bench_embeddings(args):
    """Forward and backward of each embedding at width 768 beside the twelve layers it feeds; target 10 %."""
    B, L, d = 4, 512, 768
    config = model.Config(**model.PRESETS["hashformer"] | dict(layers=2, dropout=0.0))
    net = model.Model(config)
    x = torch.randn(B, L, d)
    cotangent = torch.randn(B, L, d)
    bits = torch.randint(0, 2, (B, L, 128), dtype=torch.uint8)
    cases = {"emb 50K": (embeddings.HashEmbedding(50_260, d), torch.randint(0, 50_260, (B, L, 1))),
             "emb 1K": (embeddings.HashEmbedding(1_038, d), torch.randint(0, 1_038, (B, L, 1))),
             "pool": (embeddings.PoolEmbedding(128, 10, d), torch.randint(0, 256, (B, L, 13))),
             "add": (embeddings.AddEmbedding(128, d), bits), "proj": (embeddings.ProjEmbedding(128, d), bits)}

    def embed(module, codes):
        def run():
            with torch.autocast("cpu", torch.bfloat16):
                out = module(codes)
            out.backward(cotangent.to(out.dtype))
            module.zero_grad(set_to_none=True)
        return run

    def encode():
        with torch.autocast("cpu", torch.bfloat16):
            y = x
            for layer in net.layers:
                y = layer(y)
        y.float().backward(cotangent)
        net.zero_grad(set_to_none=True)

    seconds = medians({k: embed(*v) for k, v in cases.items()} | {"encoder": encode}, 5)
    encoder = seconds.pop("encoder") * 6  # two layers were timed, there are twelve
    return [dict(name=k, ms=1000 * s, encoder=1000 * encoder, share=100 * s / encoder)
            for k, s in seconds.items()]


EMBEDDINGS = dict(name=("embedding, 4 × 512 words", "s"), ms=("ms", ",.1f"),
                  encoder=("12 layers, ms", ",.0f"), share=("share %", ".1f"))


def bench_kernel(args):
    """Forward and backward on the CPU in bfloat16: torch's kernel against full_attention's three lines."""
    rows = []
    for B, H, L, e in ((64, 2, 128, 64), (16, 12, 512, 64), (4, 12, 1024, 64)):
        q, k, v = (torch.randn(B, L, H, e, dtype=torch.bfloat16).transpose(1, 2).requires_grad_()
                   for _ in range(3))
        cotangent = torch.randn_like(q)
        s = medians({"ours": lambda: attention.full_attention(q, k, v).backward(cotangent),
                     "kernel": lambda: F.scaled_dot_product_attention(q, k, v).backward(cotangent)}, 5)
        rows.append(dict(name=f"B {B}, H {H}, L {L}, e {e}", ours=1000 * s["ours"], kernel=1000 * s["kernel"],
                         ratio=s["kernel"] / s["ours"]))
    return rows


KERNEL = dict(name=("bfloat16, CPU", "s"), kernel=("kernel, ms", ".1f"), ours=("ours, ms", ".1f"),
                 ratio=("faster", ".1f"))


def attention_flops(length, heads, width, bands, buckets, functions=1):
    """What scores cost, exactly and by law, as [BL Table 1] counts it: two operations a multiply-add.

    in:  L, H, e, r, m, n
    out: dict: full, of q kᵀ; hashing, of queries and keys; dots, the pairs i <= j that random vectors make
         collide, in all heads; pairs, their cost
    """
    p = attention.collision_probability(math.pi / 2, bands, buckets, functions)
    dots = heads * length * (length + 1) / 2 * p
    return dict(full=2 * heads * length**2 * width, dots=dots, pairs=2 * width * dots,
                hashing=2 * heads * 2 * length * width * bands * functions)


def bench_flops(args):
    """[BL Table 1 and Figure 1]: one sequence of 10 positions, two heads of 64; times on this machine."""
    planes, coef = attention.draw_planes(2, 1, 2, 64, 64, torch.Generator().manual_seed(0))
    q, k, v = torch.randn(3, 1, 2, 10, 64)
    cost, dots = attention_flops(10, 2, 64, 2, 64), []
    for _ in range(100):
        q1, k1 = torch.randn(2, 1, 2, 10, 64)
        hq, hk = (attention.simhash(x, planes, coef, 64) for x in (q1, k1))
        dots.append((hq.unsqueeze(-1) == hk.unsqueeze(-2)).any(2).triu().sum().item())

    def ours():
        return attention.lsh_attention(q, k, v, *(attention.simhash(x, planes, coef, 64) for x in (q, k)))

    times = medians({"full": lambda: attention.full_attention(q, k, v), "lsh": ours}, 301)
    rows = [dict(name="KFLOPs, hashing alone", full=cost["full"] / 1e3, paper_full="25.60",
                 lsh=cost["hashing"] / 1e3, paper="10.24"),
            dict(name="KFLOPs, with the dot products", full=cost["full"] / 1e3, paper_full="—",
                 lsh=(cost["hashing"] + cost["pairs"]) / 1e3, paper="—"),
            dict(name="dot products, by law", full=200, paper_full="200", lsh=cost["dots"], paper="28.5"),
            dict(name="dot products, mean of 100 draws", full=200, paper_full="200",
                 lsh=statistics.mean(dots), paper="28.5"),
            dict(name="microseconds, the whole attention", full=1e6 * times["full"], paper_full="12.2 (q kᵀ)",
                 lsh=1e6 * times["lsh"], paper="337 (scores)")]
    for n in (1, 2, 4):
        rows += [dict(name=f"Figure 1: KFLOPs of hashing, n {n}, r {r}", full=cost["full"] / 1e3,
                      lsh=attention_flops(10, 2, 64, r, 64, n)["hashing"] / 1e3) for r in (1, 2, 4, 8)]
    return rows


FLOPS = dict(name=("", "s"), full=("full", ",.2f"), paper_full=("paper", "s"), lsh=("BERT-LSH", ",.2f"),
             paper=("paper", "s"))


def deal(h):
    """in: buckets (B, H, n, L); out: the same buckets at other positions: as many pairs, none for a reason"""
    return h.gather(-1, torch.rand(h.shape, device=h.device).argsort(-1))


def peak_memory(length, how):
    """in: L; how, code of q, k, v, planes, coef; out: MiB a pass forward and back adds at most (or None)"""
    if not os.path.exists("/proc/self/clear_refs"):
        return None
    code = f"""
import torch, attention
from torch.nn.functional import scaled_dot_product_attention
def memory(key):
    with open('/proc/self/status') as file:
        return next(int(line.split()[1]) for line in file if line.startswith(key))
planes, coef = attention.draw_planes(2, 1, 8, 64, 256, torch.Generator().manual_seed(0))
def run(L):
    q, k, v = (torch.randn(1, 2, L, 64, requires_grad=True) for _ in range(3))
    with open('/proc/self/clear_refs', 'w') as file:
        file.write('5')  # the peak starts anew
    before = memory('VmRSS')
    ({how}).sum().backward()
    return memory('VmHWM') - before
run(64)  # what the libraries allocate once
print(run({length}))"""
    done = subprocess.run([sys.executable, "-c", code], cwd=HERE, capture_output=True, text=True, check=True)
    return int(done.stdout) / 2**10


LSH_CALL = ("attention.lsh_attention(q, k, v, *(attention.simhash(x, planes, coef, 256) for x in (q, k)), "
            "pairs='all')")


def bench_attention(args):
    """Forward and back, float32, two heads of 64, 16,384 positions a batch; r 8, m 256, n 1, with hashing."""
    rows, generator = [], torch.Generator().manual_seed(0)
    # new planes for every run: how evenly one draw fills the buckets is luck
    draws = [attention.draw_planes(2, 1, 8, 64, 256, generator) for _ in range(16)]
    for L in (64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 65536):
        B = max(16_384 // L, 1)
        q, k, v = (torch.randn(B, 2, L, 64, requires_grad=True) for _ in range(3))
        cotangent = torch.randn_like(q)
        hashed = [[attention.simhash(x, *draw, 256) for x in (q, k)] for draw in draws]
        dealt = itertools.cycle([[deal(h) for h in pair] for pair in hashed])

        def lsh(pairs="all", back=True, random=False):
            planes = itertools.cycle(draws)

            def run():
                draw = next(planes)
                buckets = next(dealt) if random else [attention.simhash(x, *draw, 256) for x in (q, k)]
                with torch.set_grad_enabled(back):
                    out = attention.lsh_attention(q, k, v, *buckets, pairs=pairs)
                return torch.autograd.grad(out, (q, k, v), cotangent) if back else out
            return run

        def dense(back=True):
            def run():
                with torch.set_grad_enabled(back):
                    out = F.scaled_dot_product_attention(q, k, v)
                return torch.autograd.grad(out, (q, k, v), cotangent) if back else out
            return run

        many = 2 * B * L * L
        sizes = [[x.bincount(minlength=256) for x in h.view(-1, L)] for pair in hashed for h in pair]
        both = zip(sizes[::2], sizes[1::2])
        pairs = sum(int(a @ b) for hq, hk in both for a, b in zip(hq, hk)) / len(draws)
        hq, hk = hashed[0]
        row = dict(L=L, share=100 * pairs / many, dense_gflop=14 * 64 * many / 1e9,
                   gflop=(14 * 64 * pairs + 4 * 64 * 8 * 2 * B * L) / 1e9,
                   impl=attention.choose(hq, hk, pairs="all")[0], impl_upper=attention.choose(hq, hk)[0])
        todo = {"ours": lsh(), "upper": lsh("upper"), "random": lsh(random=True), "forward": lsh(back=False)}
        if L <= 16_384:
            todo |= {"dense": dense(), "dense_forward": dense(False)}
        seconds = medians(todo, 9 if L <= 2048 else 3 if L > 16_384 else 5)
        row |= {name: 1000 * s for name, s in seconds.items()}
        if "dense" in seconds:
            row |= dict(ratio=seconds["dense"] / seconds["ours"],
                        ratio_upper=seconds["dense"] / seconds["upper"],
                        ratio_forward=seconds["dense_forward"] / seconds["forward"])
            row["dense_memory"] = peak_memory(L, "scaled_dot_product_attention(q, k, v)")
        row["memory"] = peak_memory(L, LSH_CALL)
        print(row, file=sys.stderr, flush=True)
        rows.append(row)
    return rows


ATTENTION = dict(L=("L", ","), share=("pairs that collide %", ".2f"), dense=("dense, ms", ",.0f"),
                 ours=("all, ms", ",.0f"), ratio=("× dense", ".1f"), upper=("upper, ms", ",.0f"),
                 ratio_upper=("× dense", ".1f"), ratio_forward=("all, forward alone, × dense", ".1f"),
                 random=("random buckets, ms", ",.0f"), dense_gflop=("dense, GFLOP", ",.1f"),
                 gflop=("all, GFLOP", ",.1f"), dense_memory=("dense, MiB", ",.0f"),
                 memory=("all, MiB", ",.0f"), impl=("all by", "s"), impl_upper=("upper by", "s"))


def trained_layers(folder, sequences=8):
    """What the layers of a trained model do with real text, the docstrings of this Python.

    in:  folder of a checkpoint; out: iterator of (layer's number, layer, q, k, v), each (B, H, L, e)
    """
    reader, ids = infer.Reader(folder), []
    length = reader.config.length
    for _, path in sorted(hashing.python_files().items()):
        for text in hashing.python_texts(path):
            ids += reader.encoder.ids(reader.encoder.split(text)[0]).tolist()
        if len(ids) >= sequences * length:
            break
    x = reader.model.placed(reader.ready(ids[:sequences * length]).view(sequences, length)).detach()
    for number, layer in enumerate(reader.model.layers, 1):
        yield number, layer, *layer.project(x).detach()
        x = layer(x).detach()


def bench_trained(args):
    """Buckets of trained queries and keys: how many pairs, how much of the mass, which of the best keys."""
    rows = []
    for folder in args.runs:
        for number, layer, q, k, v in trained_layers(folder):
            q, k, v = (x.contiguous().requires_grad_() for x in (q, k, v))
            L, e, best = q.shape[2], q.shape[3], 16
            for bands in (2, 8):
                generator = torch.Generator().manual_seed(0)
                planes, coef = attention.draw_planes(q.shape[1], 1, bands, e, 256, generator)
                hq, hk = (attention.simhash(x, planes, coef, 256) for x in (q, k))
                with torch.no_grad():
                    collide = (hq.unsqueeze(-1) == hk.unsqueeze(-2)).squeeze(2)  # (B, H, L, L)
                    dealt = (deal(hq).unsqueeze(-1) == deal(hk).unsqueeze(-2)).squeeze(2)
                    weights = (q @ k.transpose(-2, -1) / math.sqrt(e)).softmax(-1)
                    top = weights.topk(best).indices
                name = os.path.basename(os.path.normpath(folder))
                row = dict(name=f"{name}, layer {number}, r {bands}", L=L,
                           share=100 * collide.float().mean().item(),
                           mass=100 * (weights * collide).sum(-1).mean().item(),
                           mass_random=100 * (weights * dealt).sum(-1).mean().item(),
                           recall=100 * collide.gather(-1, top).float().mean().item(),
                           recall_random=100 * dealt.gather(-1, top).float().mean().item(),
                           largest=100 * hk.flatten(0, 2)[0].bincount().max().item() / L,
                           impl=attention.choose(hq, hk, pairs="all")[0])
                ours = functools.partial(attention.lsh_attention, q, k, v, hq, hk, pairs="all")
                dense = functools.partial(F.scaled_dot_product_attention, q, k, v)
                todo = {"ours": lambda: ours().sum().backward(), "dense": lambda: dense().sum().backward()}
                row |= {name: 1000 * s for name, s in medians(todo, 5).items()}
                rows.append(row | dict(ratio=row["dense"] / row["ours"]))
    return rows


TRAINED = dict(name=("model", "s"), L=("L", ","), share=("pairs that collide %", ".1f"),
               mass=("of attention's mass %", ".1f"), mass_random=("at random", ".1f"),
               recall=("of the 16 best keys %", ".1f"), recall_random=("at random", ".1f"),
               largest=("largest bucket, % of a row", ".0f"), dense=("dense, ms", ",.1f"),
               ours=("ours, ms", ",.1f"), ratio=("faster", ".1f"), impl=("by", "s"))


def figures(args):
    """Draw assets/: from results/ time by length and recall by frequency, from the corpus bits of words, from
    the first run with LSH attention who meets whom, from those that predict hashes or detect their losses.
    """
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    os.makedirs(ASSETS, exist_ok=True)

    def kept(name):
        with open(os.path.join(RESULTS, f"{name}.json")) as file:
            return json.load(file)

    def save(figure, name):
        for axis in figure.axes:
            axis.spines[["top", "right"]].set_visible(False)
        figure.savefig(os.path.join(ASSETS, f"{name}.png"), dpi=110)
        plt.close(figure)
        print(f"drawn: {os.path.join(ASSETS, name)}.png")

    by_length = kept("attention")
    rows = [row for row in by_length["rows"] if row["L"] <= 16_384]
    figure, axes = plt.subplots(figsize=(6.4, 4), layout="constrained")
    for key, label, style in (("dense", "dense (scaled_dot_product_attention)", "o-"),
                              ("upper", "LSH, pairs upper", "s-"), ("ours", "LSH, pairs all", "^-")):
        axes.loglog([row["L"] for row in rows], [row[key] for row in rows], style, label=label)
    axes.set(xlabel="positions of a sequence (16,384 in a batch)", ylabel="ms, forward and back",
             title=f"r 8, m 256, two heads of 64, float32; {by_length['machine']['device']}")
    axes.set_xticks([row["L"] for row in rows], [f"{row['L']:,}" for row in rows], fontsize=8)
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    save(figure, "attention")

    tenths = [row for row in kept("beams")["rows"] if "by frequency" in row["name"]]
    figure, axes = plt.subplots(figsize=(6.4, 3), layout="constrained")
    axes.bar(range(10), [100 * row["rec@1"] for row in tenths], width=0.8)
    axes.set(xlabel="tenths of the links, from the commonest items to the rarest", ylabel="named first, %",
             title="Superbloom on the names of Python: recall by frequency")
    axes.set_xticks(range(10), [f"{10 * i}–{10 * i + 10} %" for i in range(10)], fontsize=7)
    save(figure, "recall")

    words = ["play", "plays", "played", "playing", "display", "cat"]
    corpus = pretrain.Corpus(pretrain.prepare(args.data, "regex", args.cache))
    lsh = hashing.NgramLSH.fit(dict(zip(corpus.words(), corpus.counts[hashing.FIRST:].tolist())))
    figure, axes = plt.subplots(2, 1, figsize=(8, 3), layout="constrained")
    for axis, name, bits in zip(axes, ("LSH of n-grams", "MD5"),
                                (lsh.bits(words, 128), hashing.md5_bits(words))):
        axis.imshow(bits, cmap="Greys", aspect="auto", interpolation="nearest", vmax=1.4)
        axis.set_yticks(range(len(words)), words, fontsize=8)
        axis.set_title(f"128 bits by {name}, and how many differ from those of {words[0]}", fontsize=9)
        for row, differ in enumerate((bits != bits[0]).sum(1)):
            axis.text(129, row, str(differ), va="center", fontsize=8)
    save(figure, "bits")

    runs = [folder for folder in args.runs if os.path.exists(os.path.join(folder, "log.jsonl"))]
    configs = {folder: model.load_checkpoint(folder)["config"] for folder in runs}
    for folder in [folder for folder, c in configs.items() if c.attn == "lsh"][:1]:
        draw_met(plt, folder, save)
    draw_losses(plt, [folder for folder, c in configs.items() if c.head == "hash-mlm" and c.emb != "bloom"],
                save, "loss", "nats a hash (ln R at the start)")
    draw_losses(plt, [folder for folder, c in configs.items() if c.head == "sr"],
                save, "variants", "nats a word (ln 3 at the start)")


def draw_losses(plt, folders, save, name, unit):
    """How runs learn; in: pyplot; folders of runs; save(figure, name); name of the figure; unit of losses"""
    figure, axes = plt.subplots(figsize=(6.4, 4), layout="constrained")
    for folder in folders:
        with open(os.path.join(folder, "log.jsonl")) as file:
            log = [json.loads(line) for line in file]
        steps, losses = np.array([(row["step"], row["loss"]) for row in log if "loss" in row]).T
        wide = max(len(losses) // 25, 1)  # a point is the mean of as many
        shown = [np.convolve(numbers, np.ones(wide) / wide, "valid") for numbers in (steps, losses)]
        [line] = axes.plot(*shown, label=os.path.basename(os.path.normpath(folder)))
        held = np.array([(row["step"], row["eval_loss"]) for row in log if "eval_loss" in row])
        axes.plot(*held.T, "o", color=line.get_color(), markersize=4)
    axes.set(xlabel="steps", ylabel=unit, title="loss in training; dots: on held-out text")
    axes.grid(alpha=0.3)
    if folders:
        axes.legend(frameon=False)
        save(figure, name)
    plt.close(figure)


def draw_met(plt, folder, save):
    """Which positions share a bucket in a trained run; in: pyplot; folder of a run; save(figure, name)"""
    found = []
    for number, layer, q, k, v in trained_layers(folder, 1):
        hq, hk = layer.buckets(q, k)
        found += [(f"layer {number}, head {h + 1}", c) for h, c in
                  enumerate((hq.unsqueeze(-1) == hk.unsqueeze(-2)).any(2)[0])]
    figure, axes = plt.subplots(1, len(found), figsize=(2.6 * len(found), 2.9), layout="constrained")
    for axis, (title, collide) in zip(axes, found):
        axis.imshow(collide.numpy(), cmap="Greys", interpolation="nearest")
        axis.set_title(f"{title}: {100 * collide.float().mean():.0f} %", fontsize=10)
        axis.set(xlabel="key position")
    axes[0].set(ylabel="query position")
    save(figure, "collisions")


def bench_steps(args):
    """A training step (forward, backward, AdamW) of the BERT-LSH model with full and with LSH attention."""
    rows, words = [], [word for part in many_words(20_000) for word in part]
    for objective, emb in (("mlm", "lookup"), ("sr", "proj")):
        vocabulary = [str(i) for i in range(31_995)] if emb == "lookup" else None
        encoder = hashing.Encoder(model.FORM[emb], vocabulary=vocabulary)
        if emb == "proj":
            encoder.ids(words)
        corrupt, loss_of, *_ = pretrain.OBJECTIVES[objective]
        for L, dtype in itertools.product((128, 512, 2048), ("float32", "bfloat16")):
            todo, ids = {}, torch.randint(hashing.FIRST, 20_000, (8_192 // L, L))
            chance = torch.from_numpy(np.random.default_rng(0).random((3, *ids.shape), np.float32))
            for name, changes in (("full", dict(attn="full")), ("upper", {}), ("all", dict(lsh_pairs="all"))):
                shape = model.PRESETS["bert-lsh"] | dict(length=L, dropout=0.0, lsh_bands=8)
                net = model.Model(model.Config(**shape | dict(emb=emb, head=objective) | changes))
                net.set_codes(torch.from_numpy(encoder.codes()))
                optimizer = torch.optim.AdamW(model.parameter_groups(net, 0.01), fused=True)
                inputs, labels = corrupt(ids, chance, ids.flip(0))

                def run(net=net, optimizer=optimizer, inputs=inputs, labels=labels):
                    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bfloat16"):
                        loss, _ = loss_of(net, inputs, labels)
                    (loss / labels.numel()).backward()
                    optimizer.step()
                    optimizer.zero_grad(set_to_none=True)
                todo[name] = run
            row = {name: 1000 * s for name, s in medians(todo, 5).items()}
            row |= dict(share=100 * row["upper"] / row["full"], share_all=100 * row["all"] / row["full"])
            rows.append(row | dict(name=f"{objective}, L {L}, {dtype}"))
            print(rows[-1], file=sys.stderr, flush=True)
    return rows


STEPS = dict(name=("8,192 positions a step", "s"), full=("full, ms", ",.0f"), upper=("LSH upper, ms", ",.0f"),
             share=("% of full", ".0f"), all=("LSH all, ms", ",.0f"), share_all=("% of full", ".0f"))


def bench_train(args):
    """A step (forward, backward, AdamW) of S+R and of MLM on the same encoder, per sample: [HF Table 3]."""
    rows = []
    for preset, batch in (("tiny", 64), ("hashformer", 4)):
        shape, steps = model.PRESETS[preset], {}
        L = shape["length"]
        ids = torch.randint(hashing.FIRST, 50_000, (batch, L))
        rng = np.random.default_rng(0)
        chance = torch.from_numpy(rng.random((3, batch, L), np.float32))

        def make(emb, objective, whole=False):
            config = model.Config(**shape | dict(emb=emb, rows=50_265, head=objective))
            net = model.Model(config).train()
            form = model.FORM[emb]
            vocabulary = [str(i) for i in range(50_260)] if form == "row" else None
            encoder = hashing.Encoder(form, vocabulary=vocabulary)
            if form != "row":
                encoder.ids([str(i) for i in range(50_000)])
            net.set_codes(torch.from_numpy(encoder.codes()))
            optimizer = torch.optim.AdamW(model.parameter_groups(net, 0.01), fused=True)
            corrupt, loss_of, *_ = pretrain.OBJECTIVES[objective]

            def run():
                inputs, labels = corrupt(ids, chance, ids.flip(0))
                with torch.autocast("cpu", torch.bfloat16):
                    if whole:  # logits for every position, as the usual code has it
                        logits = net(inputs, at=torch.arange(inputs.numel()))
                        targets = (labels.flatten() - 1).clamp(min=-100)
                        loss = F.cross_entropy(logits.float(), targets, ignore_index=-100, reduction="sum")
                    else:
                        loss, _ = loss_of(net, inputs, labels)
                (loss / labels.numel()).backward()
                torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            return run

        peer = usual_library(shape, ids, chance)
        for name, what in (("MLM, lookup 50K, all positions", ("lookup", "mlm", True)),
                           ("MLM, lookup 50K", ("lookup", "mlm")), ("S+R, lookup 50K", ("lookup", "sr")),
                           ("S+R, emb 50K", ("emb", "sr")), ("S+R, pool", ("pool", "sr")),
                           ("S+R, add", ("add", "sr")), ("S+R, proj", ("proj", "sr"))):
            steps[name] = make(*what)
        if peer:
            steps["MLM, usual library, float32"] = peer
        seconds = medians(steps, 3)
        for name, s in seconds.items():
            row = dict(name=f"{preset}: {name}", ms=1000 * s / batch, speed=seconds["MLM, lookup 50K"] / s,
                       against_all=seconds["MLM, lookup 50K, all positions"] / s)
            if peer:
                row["against_usual"] = seconds["MLM, usual library, float32"] / s
            rows.append(row)
    return rows


def usual_library(shape, ids, chance):
    """The same step by the library that most people use, if installed; it is not among our requirements."""
    try:
        import transformers
    except ImportError:
        return None
    config = transformers.BertConfig(vocab_size=50_265, hidden_size=shape["width"],
                                     num_hidden_layers=shape["layers"], num_attention_heads=shape["heads"],
                                     intermediate_size=shape["ffn"], max_position_embeddings=shape["length"])
    net = transformers.BertForMaskedLM(config).train()
    optimizer = torch.optim.AdamW(net.parameters())

    def run():
        inputs, labels = pretrain.corrupt_mlm(ids, chance, ids.flip(0))
        net(input_ids=inputs, labels=labels).loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return run


TRAIN = dict(name=("step", "s"), ms=("ms a sample", ".2f"), speed=("× our MLM", ".2f"),
             against_all=("× MLM, all positions", ".2f"), against_usual=("× usual library", ".2f"))


def bench_words(args):
    """Twelve million distinct words: prepared, hashed, trained on for two steps, each in its own process."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "words.txt")
        with open(path, "w") as file:
            for words in many_words(args.count):
                file.writelines(" ".join(words[i:i + 1000]) + "\n" for i in range(0, len(words), 1000))
        prepare = f"import pretrain; pretrain.prepare({path!r}, 'regex', {folder!r}, quiet=True)"
        run = ["pretrain.py", "--data", path, "--cache", folder, "--steps", "2", "--device", "cpu"]
        for name, command in (
                ("prepare", ["-c", prepare]),
                ("hash with MD5, train 2 steps", [*run, "--hash", "md5", "--out", folder + "/a"]),
                ("hash with LSH, train 2 steps", [*run, "--hash", "lsh", "--out", folder + "/b"]),
                ("hashed already, train 2 steps",
                 [*run, "--hash", "lsh", "--seed", "1", "--out", folder + "/c"])):
            start = time.perf_counter()
            code = ("import resource, subprocess, sys; "
                    "done = subprocess.run([sys.executable] + sys.argv[1:], capture_output=True);"
                    "sys.stderr.buffer.write(done.stderr[-2000:]) if done.returncode else None;"
                    "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss); "
                    "sys.exit(done.returncode)")
            done = subprocess.run([sys.executable, "-c", code, *command], cwd=HERE,
                                  stdout=subprocess.PIPE, text=True, check=True)
            rows.append(dict(name=name, seconds=time.perf_counter() - start,
                             gigabytes=int(done.stdout) / 2**20, words=args.count))
    return rows


WORDS = dict(name=("step", "s"), words=("distinct words", ","), seconds=("seconds", ",.0f"),
             gigabytes=("peak memory, GiB", ".2f"))

# what bench.py variants runs: name -> flags
VARIANTS = {
    **{f"{e}, {h}": ["--emb", e, "--hash", h]
       for e in ("emb", "pool", "add", "proj") for h in ("md5", "lsh")},
    "lookup of BPE pieces": ["--emb", "lookup"],
    **{f"{e}, {h}, of BPE pieces": ["--emb", e, "--hash", h, "--split", "bpe"]
       for e in ("emb", "proj") for h in ("md5", "lsh")},
    "lookup of BPE pieces, MLM": ["--emb", "lookup", "--objective", "mlm"],
    "one word at a time (proj, lsh, no layers)": ["--layers", "0"],
}


def bench_variants(args):
    """Every variant with the same budget and seeds on one corpus: mean and std of the last evaluation."""
    return compare(args, VARIANTS)


def compare(args, variants, *common, after=None):
    """Train each of some variants with several seeds, as many at once as there are cores.

    in:  args; variants: name -> flags of pretrain.py; common flags; after: function of a run's folder and its
         seed, gives a dict of more to say of it
    out: list of rows: the means of what the last evaluations say, and their std
    """
    variants = {name: flags for name, flags in variants.items() if re.search(args.only, name)}

    def run(job):
        number, (name, flags), seed = job
        out = os.path.join(folder, f"{number}-{seed}")
        command = [sys.executable, "pretrain.py", *common, *flags, "--seed", seed, "--out", out,
                   "--data", args.data,
                   "--steps", args.steps, "--cache", args.cache, "--eval_every", args.steps,
                   "--save_every", 10**9]
        done = subprocess.run(list(map(str, command)), cwd=HERE, capture_output=True, text=True,
                              env=os.environ | {"OMP_NUM_THREADS": "1"})
        if done.returncode:
            sys.exit(f"{' '.join(map(str, command))}\n{done.stderr[-2000:]}")
        with open(os.path.join(out, "log.jsonl")) as file:
            *_, last = map(json.loads, file)
        with torch.device("meta"):
            counts = model.count_parameters(model.Model(model.load_checkpoint(out)["config"]))
        last |= after(out, seed) if after else {}
        print(name, seed, last, file=sys.stderr, flush=True)
        return last | dict(parameters=counts["total"], table=counts["embedding"])

    cores, kept = len(os.sched_getaffinity(0)), {}
    if args.json and os.path.exists(args.json):  # rows of the same budget stay: a table can be resumed
        with open(args.json) as file:
            kept = {row["name"]: row for row in json.load(file)["rows"]}
    wanted = {name: dict(data=args.data, steps=args.steps, seeds=args.seeds,
                         flags=" ".join(map(str, [*common, *flags])),
                         **{k: v for k in ("text", "data_dir") if (v := getattr(args, k))})
              for name, flags in variants.items()}
    kept = {name: row for name, row in kept.items() if wanted.get(name, {"": 0}).items() <= row.items()}
    missing = {name: flags for name, flags in variants.items() if name not in kept}
    # as many runs at once as there are cores, a thread each: faster than one after the other
    with tempfile.TemporaryDirectory() as folder, concurrent.futures.ThreadPoolExecutor(cores) as pool:
        jobs = [(i, v, seed) for i, v in enumerate(missing.items()) for seed in range(args.seeds)]
        results = list(pool.map(run, jobs))
    for i, name in enumerate(missing):
        mine = results[i * args.seeds:(i + 1) * args.seeds]
        row = kept[name] = dict(name=name, **wanted[name])
        for key in mine[0].keys() - {"step"}:
            values = [result[key] for result in mine]
            row[key] = statistics.mean(values)
            row[f"{key}_std"] = statistics.stdev(values) if len(values) > 1 else None
    return [kept[name] for name in variants]


VARIANT_COLUMNS = dict(name=("embedding, hash", "s"), accuracy=("accuracy", "±"),
                       f1_intact=("F1 intact", "±"), f1_shuffled=("F1 shuffled", "±"),
                       f1_random=("F1 random", "±"), eval_loss=("loss", "±"))


TWINS = {  # what bench.py twins runs: name -> flags
    "dense": ["--attn", "full"],
    "LSH, r 2, m 256": ["--lsh_bands", "2"],
    "as many random pairs": ["--lsh_bands", "2"],  # and the buckets dealt to other positions
}
# Buckets keep their sizes and so the number of pairs, and lose what they had to do with the vectors.
DEAL = ("import sys, bench, model; simhash = model.simhash\n"
        "model.simhash = lambda *a: bench.deal(simhash(*a))\n"
        "getattr(bench, sys.argv[1]).main(sys.argv[2:])")


def bench_twins(args):
    """BERT-LSH, its dense twin, and a control that meets as many keys at random: MLM, then SST-2."""
    def run(job):
        number, (name, flags), seed = job
        out = os.path.join(args.cache, "twins", f"{number}-{seed}")
        both = ["--seed", seed, "--dtype", "bfloat16", "--cache", args.cache]
        train = ["pretrain", "--preset", "bert-lsh", *flags, "--vocab", 8_192, "--length", 128, "--batch", 32,
                 "--dropout", 0, "--steps", args.steps, "--eval_every", args.steps, "--data", args.data,
                 "--out", out, *both]
        tune = ["finetune", "--ckpt", out, "--task", "sst2", "--data_dir", args.data_dir, "--epochs", 1,
                "--seeds", 1, "--out", out + "-sst2", *both]
        print(name, "seed", seed, "begins", file=sys.stderr, flush=True)
        for script, *more in (train, tune):  # either goes on where an earlier attempt stopped
            start = ["-c", DEAL, script] if "random" in name else [f"{script}.py"]
            done = subprocess.run([sys.executable, *start, *map(str, more)], cwd=HERE, text=True,
                                  capture_output=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
            if done.returncode:
                sys.exit(f"{name}, seed {seed}, {script}: {done.stderr[-2000:]}")
        with open(os.path.join(out, "log.jsonl")) as file:
            *_, last = map(json.loads, file)
        with open(os.path.join(out + "-sst2", "results.json")) as file:
            sst2 = json.load(file)["tasks"]["sst2"]["mean"]
        row = dict(loss=last["eval_loss"], accuracy=100 * last["rec@1"], sst2=sst2)
        print(name, seed, row, file=sys.stderr, flush=True)
        return row

    with concurrent.futures.ThreadPoolExecutor(model.cores()) as pool:
        jobs = [(i, v, seed) for seed in range(args.seeds) for i, v in enumerate(TWINS.items())]
        results = dict(zip([(name, seed) for _, (name, _), seed in jobs], pool.map(run, jobs)))
    rows = []
    for name in TWINS:
        mine = [results[name, seed] for seed in range(args.seeds)]
        row = dict(name=name, steps=args.steps, seeds=args.seeds)
        for key in mine[0]:
            values = [result[key] for result in mine]
            row |= {key: statistics.mean(values), f"{key}_all": values,
                    f"{key}_std": statistics.stdev(values) if len(values) > 1 else None}
        rows.append(row)
    return rows


TWIN_COLUMNS = dict(name=("attention", "s"), loss=("MLM loss", "±"), accuracy=("MLM accuracy %", "±1"),
                    sst2=("SST-2 after", "±1"))


SIZES = (  # [SB Tables 1, 3 and 4]: name, items, alpha, d, heads, dF, layers, text?, what is printed
    ("Table 1: baseline", 5_281_889, 1, 48, 4, 1024, 12, False, "248M"),
    ("Table 1: sampled-softmax", 5_281_889, 1, 512, 8, 2048, 12, False, "2.6G"),
    ("Table 1: superbloom", 5_281_889, 50, 768, 12, 3072, 12, False, "229M"),
    ("Table 3: baseline-l1", 500_000, 1, 256, 1, 1024, 1, False, "123M"),
    ("Table 3: baseline-l12", 500_000, 1, 256, 8, 1024, 12, False, "132M"),
    ("Table 3: superbloom-d256l1", 500_000, 20, 256, 1, 1024, 1, False, "13M"),
    ("Table 3: superbloom-d384l1", 500_000, 20, 384, 1, 1536, 1, False, "21M"),
    ("Table 3: superbloom-d256l12", 500_000, 20, 256, 8, 1024, 12, False, "21M"),
    ("Table 4: baseline-h64", 1_000_000, 1, 64, 4, 256, 12, True, "62.6M"),
    ("Table 4: hash40-h512", 1_000_000, 40, 512, 8, 2048, 12, True, "62.3M"),
    ("Table 4: baseline-h256", 1_000_000, 1, 256, 8, 1024, 12, True, "254.4M"),
    ("Table 4: hash20-h1024", 1_000_000, 20, 1024, 16, 4096, 12, True, "246.3M"))


def bench_sizes(args):
    """The parameters of [SB Tables 1, 3 and 4], exact; M and G are 2^20 and 2^30 there."""
    rows = []
    for name, items, alpha, d, heads, ffn, layers, text, printed in SIZES:
        hashes = 1 if alpha == 1 else 2
        vocabulary = hashes * -(-items // alpha)
        with torch.device("meta"):
            config = model.Config(emb="lookup" if hashes == 1 else "bloom", rows=vocabulary, hashes=hashes,
                                  head="mlm" if hashes == 1 else "hash-mlm", act="relu", order=text, types=2,
                                  layers=layers, width=d, heads=heads, ffn=ffn, length=512 if text else 32)
            total = model.count_parameters(model.Model(config))["total"]
        paper = total + d * d + d  # BERT's pooler, which their formula has and nothing uses
        unit, digits = (2**30, 1) if paper > 2**30 else (2**20, 1 if text else 0)
        shown = f"{paper / unit:.{digits}f}{'G' if unit == 2**30 else 'M'}"
        rows.append(dict(name=name, rows=vocabulary, total=total, paper=paper, shown=shown, printed=printed))
    return rows


SIZE_COLUMNS = dict(name=("model", "s"), rows=("rows", ","), total=("ours, specials left out", ","),
                    paper=("with the pooler", ","), shown=("that is", "s"), printed=("paper prints", "s"))


def bench_bloom(args):
    """Beam search (B = k = 20) and exhaustive scoring of 5,281,889 items, m 2, 64 positions."""
    rows, n, generator = [], 5_281_889, torch.Generator().manual_seed(0)
    for alpha in (10, 20, 50):
        start = time.perf_counter()
        bloom = hashing.BloomMap(n, alpha)
        built = time.perf_counter() - start
        digest = torch.from_numpy(bloom.digest).long()
        for kind in ("flat", "peaked"):
            logits = 2 * torch.randn(64, 2, bloom.buckets, generator=generator)
            if kind == "peaked":  # one item's hashes stand out, as of a trained model that is sure
                item = digest[torch.randint(n, (64,), generator=generator)]  # (64, 2)
                logits.scatter_add_(2, item.unsqueeze(2), torch.full((64, 2, 1), 20.0))
            logp = logits.log_softmax(-1)

            def plain():  # torch.topk on all scores, nothing of ours
                for x in logp[:8]:
                    sum(row.index_select(0, column) for row, column in zip(x, columns)).topk(20)

            columns = [column.contiguous() for column in torch.from_numpy(bloom.digest).T]
            seconds = medians({"beam": lambda: model.beam_search(logp, bloom),
                               "sure": lambda: model.beam_search(logp, bloom, rounds=None),
                               "best": lambda: model.beam_search(logp, bloom, k=1, rounds=None),
                               "all": lambda: model.exhaustive(logp[:8], bloom), "plain": plain}, 5)
            per = {name: 1000 * s / (8 if name in ("all", "plain") else 64) for name, s in seconds.items()}
            _, _, certified, scored = model.beam_search(logp, bloom)
            _, scores, _, more = model.beam_search(logp, bloom, rounds=None)
            exact = (scores[:8] == model.exhaustive(logp[:8], bloom)[1]).all().item()
            rows.append(dict(name=f"alpha {alpha}, {kind}", built=built, **per,
                             ratio=per["plain"] / per["beam"], ratio_all=per["all"] / per["beam"],
                             ratio_sure=per["plain"] / per["sure"],
                             scored=scored.double().mean().item(), scored_sure=more.double().mean().item(),
                             certified=100 * certified.double().mean().item(), exact=str(exact)))
            print(rows[-1], file=sys.stderr, flush=True)
    return rows


BLOOM = dict(name=("map, distributions", "s"), built=("map built, s", ".1f"),
             beam=("beam, ms a position", ".3f"), scored=("items scored", ",.0f"),
             certified=("certified %", ".0f"), sure=("until certified, ms", ".3f"),
             scored_sure=("items scored", ",.0f"), best=("k = 1, ms", ".3f"),
             plain=("exhaustive, torch.topk, ms", ".1f"), ratio=("× beam", ".0f"),
             ratio_sure=("× until certified", ".0f"),
             all=("exhaustive, our top k, ms", ".1f"), ratio_all=("× beam", ".0f"),
             exact=("same scores", "s"))


def bench_million(args):
    """A step over 5,281,889 items at alpha 50 on this machine, in a process of its own."""
    code = f"""
import sys, time, resource, torch, hashing, model, pretrain
import numpy as np
bloom = hashing.BloomMap(5_281_889, 50)
rows = 2 * (bloom.buckets + 5)
shape = model.PRESETS[sys.argv[1]]
net = model.Model(model.Config(**shape | dict(rows=rows, dropout=0.0))).train()
ranges = np.arange(2, dtype=np.int32) * np.int32(bloom.buckets)
codes = np.concatenate([np.arange(12, dtype=np.int32).reshape(6, 2) % 10 + rows - 10, bloom.digest + ranges])
net.set_codes(torch.from_numpy(codes), bloom)
optimizer = torch.optim.AdamW(model.parameter_groups(net, 0.01), fused=True)
ids = torch.randint(6, 6 + bloom.n_items, (int(sys.argv[2]), 32))
for step in range(3):
    start = time.perf_counter()
    inputs, labels = pretrain.corrupt_items(ids, torch.rand(3, *ids.shape), ids.flip(0))
    with torch.autocast("cpu", torch.bfloat16):
        loss, _ = pretrain.loss_hash(net, inputs, labels)
    (loss / (labels >= 0).sum()).backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    seconds = time.perf_counter() - start
total = sum(p.numel() for p in net.parameters())
print(total, seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, float(loss) / len(ids))
"""
    rows = []
    for preset, batch in (("superbloom-small", 64), ("superbloom", 16)):
        done = subprocess.run([sys.executable, "-c", code, preset, str(batch)], cwd=HERE, capture_output=True,
                              text=True, check=True)
        total, seconds, memory, _ = map(float, done.stdout.split())
        rows.append(dict(name=preset, batch=batch, total=int(total), seconds=seconds, memory=memory))
    return rows


MILLION = dict(name=("preset, alpha 50", "s"), total=("parameters", ","), batch=("pages of 32 a step", ","),
               seconds=("s a step", ".2f"), memory=("peak memory of the process, GiB", ".2f"))


def neighbours(data, cache, length=32, field=None):
    """What needs no training, on the pages that pretrain.py holds out: recall at 1, 10, 20.

    in:  data, cache, field as pretrain.prepare; length L
    out: list of rows: popularity; co-occurrence neighbours, an item's score the sum over those that are given
         of how often both stand on a training page, as it is, over √(frequency · frequency), or, a step of a
         walk from the item to a page to an item, each page 1 / (its size · the given item's frequency). Items
         that are given are left out.
    """
    corpus = pretrain.Corpus(pretrain.prepare(data, "items", cache, quiet=True, field=field))
    top, k = hashing.FIRST + corpus.meta["distinct"], max(pretrain.RECALL)
    pages = pretrain.Pages(corpus, length, 1, top, 0)
    train, _ = corpus.pages()
    sizes = pages.size[train]
    starts = np.cumsum(sizes) - sizes
    ends = pages.first + pages.size
    items = np.concatenate([corpus.ids[pages.first[i]:ends[i]] for i in train]).astype(int)
    frequency = np.bincount(items, minlength=top)
    on = np.repeat(np.arange(len(train)), sizes)[np.argsort(items, kind="stable")]  # pages, item after item
    first = np.cumsum(frequency) - frequency
    ids, chance, _ = pages.held_out(slice(0, len(pages.held)))
    names = ("popularity", "co-occurrence: counts", "co-occurrence: cosines", "co-occurrence: walks")
    found = np.zeros((len(names), len(pretrain.RECALL)))
    for row, asked in zip(ids.numpy(), chance[0].argmin(1).tolist()):
        given = np.delete(row, asked)
        given = given[given >= hashing.FIRST]
        scores = np.zeros((len(names), top))
        scores[0] = frequency
        for item in given:
            where = on[first[item]:first[item] + frequency[item]]
            if len(where):
                company = np.concatenate([items[starts[i]:starts[i] + sizes[i]] for i in where])
                both = np.bincount(company, minlength=top)
                scores[1] += both
                scores[2] += both / np.sqrt(np.maximum(frequency, 1) * len(where))
                scores[3] += np.bincount(company, np.repeat(1 / sizes[where], sizes[where]), top) / len(where)
        scores[:, given] = -1
        for i, score in enumerate(scores):
            rank = (score > score[row[asked]]).sum() + (score[:row[asked]] == score[row[asked]]).sum()
            found[i] += [rank < n for n in pretrain.RECALL]
    found /= len(ids)
    return [dict(name=name, **{f"rec@{n}": share for n, share in zip(pretrain.RECALL, line)})
            for name, line in zip(names, found)]


def same_size(n_items, alpha):
    """in: N; alpha; out: the largest width at which a row for each item makes no more parameters"""
    shape = model.PRESETS["superbloom-small"]

    def size(**changes):
        with torch.device("meta"):
            return model.count_parameters(model.Model(model.Config(**shape | changes)))["total"]

    whole, step = size(rows=2 * (-(-n_items // alpha) + 5)), shape["heads"]
    row = dict(emb="lookup", head="mlm", rows=n_items + 5)
    width = step
    while size(**row, width=width + step, ffn=2 * (width + step)) <= whole:
        width += step
    return width


def bench_entities(args):
    """Superbloom, baselines of its size and of its width, neighbours: recall over all items. [SB Table 2]"""
    corpus = pretrain.Corpus(pretrain.prepare(args.data, "items", args.cache))
    width, row = same_size(corpus.meta["distinct"], args.alpha), "a row for each"
    lookup, sampled = ["--emb", "lookup"], ["--objective", "sampled"]
    small = [*lookup, "--width", width, "--ffn", 2 * width]
    variants = {"superbloom": ["--alpha", args.alpha],
                "superbloom, 1 of 2 maps coherent": ["--alpha", args.alpha, "--coherent", 1],
                f"{row}, as many parameters (d {width}), sampled": small + sampled}
    if corpus.meta["distinct"] < 20_000:  # of more items a full softmax, or a table so wide, takes hours here
        variants |= {f"{row}, as many parameters (d {width})": small,
                     f"{row}, same width, sampled": lookup + sampled, f"{row}, same width": lookup}
    rows = compare(args, variants, "--preset", "superbloom-small")
    return rows + [found | dict(data=args.data) for found in neighbours(args.data, args.cache)]


def bench_depth(args):
    """One layer and six, hashed and not: what do layers add? [SB Table 3]"""
    variants = {f"{'superbloom' if hashed else 'a row for each'}, {layers} layer{'s' * (layers > 1)}":
                ["--layers", layers, *(["--alpha", args.alpha] if hashed else ["--emb", "lookup"])]
                for hashed in (True, False) for layers in (1, 6)}
    return compare(args, variants, "--preset", "superbloom-small", *NARROW)


def bench_coherent(args):
    """Maps that put alike items together, none, one and both of two. [SB Table 7]"""
    return compare(args, {f"{n} of 2 maps coherent": ["--coherent", n] for n in (0, 1, 2)},
                   "--preset", "superbloom-small", "--alpha", args.alpha, *NARROW)


# many runs: a smaller model, of the commonest items alone, as [SB §3.4]
NARROW = ("--width", 128, "--ffn", 256, "--vocab", 2_000, "--lr", 1e-3)
ENTITIES = dict(name=("model", "s"), parameters=("parameters", ","), table=("of the table", ","),
                **{f"rec@{k}": (f"rec@{k}", "±") for k in pretrain.RECALL},
                hashes_right=("hashes right", "±"), certified=("certified", "±"), eval_loss=("loss", "±"))


def bench_beams(args):
    """Recall by beam width [SB Table 6], by how frequent the item is [SB Figure 3]; neighbours."""
    rows = []
    for folder in args.runs:
        reader = infer.Reader(folder)
        reader.needs("hash-mlm", "bench.py beams is of models with --emb bloom")
        run = model.load_checkpoint(folder)["run"]
        if run["vocab"]:
            raise hashing.InputError(f"{folder} was trained with --vocab: wanted a run over all items")
        corpus = pretrain.Corpus(pretrain.prepare(args.data, "items", args.cache, quiet=True))
        if corpus.meta["digest"] != run["corpus"]:
            raise hashing.InputError(f"{folder} was trained on other pages than --data {args.data}")
        place = np.concatenate([np.arange(hashing.FIRST), reader.encoder.ids(corpus.words())])
        pages = pretrain.Pages(corpus, reader.config.length, 1, len(place), 0)
        ids, chance, _ = pages.held_out(slice(0, len(pages.held)))
        ids, asked = torch.from_numpy(place[ids.numpy()]).long(), chance[0].argmin(1)
        right = ids.gather(1, asked.unsqueeze(1))  # (P, 1)
        left_out = (ids.scatter(1, asked.unsqueeze(1), hashing.MASK) - hashing.FIRST).clamp(min=-1)
        reader.ready([hashing.MASK])
        logp = []
        for part, at in zip(ids.scatter(1, asked.unsqueeze(1), hashing.MASK).split(64), asked.split(64)):
            with torch.no_grad():
                logits = reader.model(part, at=at + part.shape[1] * torch.arange(len(part)))
                logp.append(model.hash_logp(logits, reader.encoder.bloom))
        logp, name = torch.cat(logp), os.path.basename(os.path.normpath(folder))
        for beam in (1, 10, 20, 100, None):
            ids, _, certified, scored = model.beam_search(logp, reader.encoder.bloom, 20, beam or 20,
                                                          1 if beam else None, exclude=left_out)
            hit = ids + hashing.FIRST == right
            rows.append(dict(name=f"{name}, B {beam}" if beam else f"{name}, until certified",
                             certified=100 * certified.double().mean().item(),
                             scored=scored.double().mean().item(),
                             **{f"rec@{k}": hit[:, :k].any(1).double().mean().item()
                                for k in pretrain.RECALL}))
            if beam is None:
                top = hit[:, :1].any(1).numpy()
        # ten parts of the links, from the most frequent items to the rarest
        counts = corpus.counts[hashing.FIRST:][np.argsort(place[hashing.FIRST:], kind="stable")]
        reached = np.cumsum(counts) / counts.sum()  # the vocabulary is in order of frequency
        decile = np.minimum((10 * (reached[right[:, 0].numpy() - hashing.FIRST] - 1e-9)).astype(int), 9)
        rows += [dict(name=f"{name}, links {10 * i} to {10 * i + 10} % by frequency",
                      **{"rec@1": float(top[decile == i].mean()) if (decile == i).any() else None})
                 for i in range(10)]
    return rows + neighbours(args.data, args.cache)


BEAMS = dict(name=("run, beam", "s"), **{f"rec@{k}": (f"rec@{k}", ".3f") for k in pretrain.RECALL},
             certified=("certified %", ".1f"), scored=("items scored", ",.0f"))


def bench_evaluation(args):
    """What an evaluation pass of finetune.py costs beside the forward passes it is made of."""
    rng, words = np.random.default_rng(0), [word for part in many_words(20_000, 20_000) for word in part]
    texts = [" ".join(rng.choice(words, rng.integers(8, 60))) for _ in range(2_000)]
    split = dict(first=texts, second=None, labels=["up"] * 1_000 + ["down"] * 1_000)
    task = finetune.Task("own", ("text",), ("down", "up"), ("accuracy", "macro_f1"))
    asked = [dict(id=i, question="which words ?", context=f"{a} {b}", answers=[(a.split()[0], 0)])
             for i, (a, b) in enumerate(zip(texts[:500], texts[500:]))]
    encoder, rows = hashing.Encoder("bits"), []
    sentences = finetune.Sentences(task, split, {"dev": split}, encoder, 128)
    spans = finetune.Spans(asked[:1], asked, encoder, 128)
    for name, data in (("2,000 texts, classes", sentences), ("500 questions, spans", spans)):
        net = model.Model(model.Config(**model.PRESETS["tiny"], head=data.head)).eval()
        net.set_codes(torch.from_numpy(encoder.codes()))
        examples = data.devs["dev"][0] if data.head == "classify" else data.dev
        chosen = finetune.evaluation_batches(examples, 128)
        padded = [finetune.pad([examples[i] for i in batch]) for batch in chosen]

        def forward(examples):
            return net(*finetune.pad(examples))

        with torch.no_grad():
            times = medians({"whole": lambda: data.evaluate(forward),
                             "alone": lambda: [net(ids, mask) for ids, mask in padded]}, 5)
        rows.append(dict(name=name, whole=1000 * times["whole"], alone=1000 * times["alone"],
                         outside=100 * (1 - times["alone"] / times["whole"])))
    return rows


EVALUATION = dict(name=("dev set", "s"), whole=("evaluation, ms", ",.0f"),
                  alone=("forward passes alone, ms", ",.0f"),
                  outside=("outside the model %", ".1f"))


def bench_tasks(args):
    """Scores of several fine-tunings: a row a model, a column a task, mean ± std over the seeds."""
    rows, simple = {}, [dict(name="the commonest class"), dict(name="a bag of words")]
    for folder in args.runs:
        path = os.path.join(folder, "results.json")
        if not os.path.exists(path):
            continue
        with open(path) as file:
            run = json.load(file)
        about = run["settings"]
        name = about["preset"] or os.path.basename(os.path.normpath(about["ckpt"]))
        name += ", from scratch" * about["from_scratch"]
        for task, r in run["tasks"].items():
            rows.setdefault(name, dict(name=name)).update({task: r["mean"], f"{task}_std": r["std"]})
            simple[0][task] = r["majority"]
            if r["bag_of_words"] is not None and "bpe" not in name:  # of words, not of pieces
                simple[1][task] = r["bag_of_words"]
    return [rows[name] for name in sorted(rows)] + simple


TASKS = dict(name=("model", "s"), **{task: (title, "±1") for task, title in (
    ("sst2", "SST-2"), ("cola", "CoLA"), ("mrpc", "MRPC"), ("rte", "RTE"), ("stsb", "STS-B"), ("qqp", "QQP"),
    ("qnli", "QNLI"), ("mnli", "MNLI"), ("squad", "SQuAD F1"), ("pydoc", "pydoc"))})


def with_spread(rows, columns):
    """markdown, where a column of format ± shows mean ± std with three digits, ±1 with one"""
    shown = []
    for row in rows:
        new = dict(row)
        for key, (_, form) in columns.items():
            if form[:1] == "±" and row.get(key) is not None:
                spread, digits = row.get(f"{key}_std"), form[1:] or "3"
                spread = f" ± {spread:.{digits}f}" if spread is not None else ""
                new[key] = f"{row[key]:.{digits}f}{spread}"
        shown.append(new)
    columns = {key: c for key, c in columns.items() if any(key in row for row in rows)}
    return table(shown, {k: (h, "s" if f[:1] == "±" else f) for k, (h, f) in columns.items()})


# ---------------------------------------------------------------------------------------------------------

def bench_sketch(args):
    """The embedding layer of [CM], forward and backward, 8 rows of 512 words as frequent as in text."""
    rng, todo, rows = np.random.default_rng(0), {}, []
    rank = torch.from_numpy(30_000 ** rng.random((8, 512))).long()  # Zipf's law
    ids = hashing.FIRST + rank.clamp(max=29_999)
    up = torch.from_numpy(rng.standard_normal((8, 512, 512), np.float32))
    words = [word for part in many_words(30_000) for word in part]
    for name, changes in (("a row a word", dict(emb="lookup", head="mlm")), ("mean", dict(emb="mean")),
                          ("median", {}), ("weighted", dict(emb="weighted", rows=2_500, weights=10_000)),
                          ("proj", dict(emb="proj"))):
        c = model.Config(**model.PRESETS["median"] | changes)
        net, form = model.Model(c), model.FORM[c.emb]
        sketch = (c.hashes, c.buckets, 0, c.weights)[:4 if form == "weighted" else 3]
        encoder = hashing.Encoder(form, rows=c.rows, vocabulary=words, sketch=sketch)
        encoder.ids(words)
        net.set_codes(torch.from_numpy(encoder.codes()))

        def run(net=net, embed=None):
            (embed or net.embed)(ids).backward(up)
            net.zero_grad(set_to_none=True)
        todo[name] = run
        rows.append(dict(name=name, parameters=model.count_parameters(net)["embedding"]))
        if name == "median":
            def torchs(ids, net=net, blocks=c.buckets * torch.arange(c.hashes)):
                return net.embedding.weight[net.codes[ids] + blocks].median(2).values
            todo["median, torch.median"] = functools.partial(run, embed=torchs)
            rows.append(rows[-1] | dict(name="median, torch.median"))
    seconds = medians(todo, 15)
    return [row | dict(ms=1000 * seconds[row["name"]], ratio=seconds[row["name"]] / seconds["mean"])
            for row in rows]


SKETCH = dict(name=("4,096 words, d 512, k 5, R 500", "s"), parameters=("parameters", ","), ms=("ms", ".1f"),
              ratio=("× mean", ".2f"))


def bench_collisions(args):
    """Words of a corpus in the buckets of a sketch: how crowded, who is drowned, who cannot be told apart."""
    corpus = pretrain.Corpus(pretrain.prepare(args.data, "regex", args.cache, quiet=True))
    words, counts = corpus.words(), corpus.counts[hashing.FIRST:]
    V, rows = len(words), []
    for k, R in ((1, 500), (3, 500), (5, 500), (1, 5_000), (3, 5_000), (5, 50), (3, 50), (2, 500)):
        index = hashing.sketch_index(words, k, R)
        commonest = np.zeros((k, R), np.int64)
        for j in range(k):
            np.maximum.at(commonest[j], index[:, j], counts)
        behind = (commonest[np.arange(k), index] > counts[:, None]).sum(1)  # in how many buckets
        same = np.unique(index @ R ** np.arange(k), return_counts=True)[1]
        rows.append(dict(name=f"k {k}, R {R:,}", words=V / R, most=int(np.bincount(index[:, 0]).max()),
                         one=100 * counts[behind > 0].sum() / counts.sum(),
                         half=100 * counts[2 * behind > k].sum() / counts.sum(),
                         counted=int((same * (same - 1) // 2).sum()), expected=V * (V - 1) / 2 / R**k))
    return rows


COLLISIONS = dict(name=("hash functions, buckets", "s"), words=("words a bucket", ",.1f"), most=("most", ","),
                  one=("% of text behind a commoner word in a bucket", ".1f"),
                  half=("in most of its buckets", ".1f"), counted=("pairs with all buckets equal", ","),
                  expected=("V (V - 1) / 2 R^k", ",.1f"))


def questions(texts, encoder):
    """Hide 15 % of the words of some texts, the same ones whatever a model reads: of letters, after a space.

    in:  texts list[str], those in ASCII, of which the first 50 words are read; encoder
    out: list of ids list[int], [CLS] .. [SEP] with MASK in place of what is hidden; the hidden words and
         their places, list of list of (word, list[int]): a word of several pieces has as many
    """
    rng, ids, hidden = np.random.default_rng(0), [], []
    for text in texts:
        if not text.isascii() or not text.strip():  # pieces of other letters are many
            continue
        words, spans = hashing.split_words(text)
        chances = rng.random(len(words))
        units, places = encoder.split(text[:spans[:50][-1][1]])
        row = encoder.ids(units).tolist()
        hidden.append([])
        for word, (a, b), chance in list(zip(words, spans, chances))[:50]:
            if chance < 0.15 and word.isalpha() and text[a - 1:a] == " ":
                first = a - bool(encoder.bpe)  # a piece may hold the space before it, or be it
                at = [i for i, (start, end) in enumerate(places) if start < b and end > first]
                if encoder.bpe and [units[i] for i in at] != encoder.split(word)[0]:
                    raise hashing.InputError(f"{word!r} is cut otherwise in its text: {text[:60]}")
                hidden[-1].append((word, [1 + i for i in at]))
                for i in at:
                    row[i] = hashing.MASK
        ids.append([hashing.CLS, *row, hashing.SEP])
    return ids, hidden


@torch.no_grad()
def name_hidden(folder, words, texts):
    """How often is a hidden word the first, or among ten, of all words? One question for every head.

    in:  folder of a run of pretrain.py over text, hash-mlm or mlm; words list[str], all that are possible;
         texts list[str]
    out: dict of first, ten, in percent; asked, how many

    A word scores by the log-probabilities of its hashes, of its row, or of its pieces. How many pieces the
    hidden word has is given away: it competes with words of as many.
    """
    reader = infer.Reader(folder)
    net, encoder = reader.model, reader.encoder
    ids, hidden = questions(texts, encoder)
    net.set_codes(torch.from_numpy(encoder.codes()))
    if net.config.head == "hash-mlm":
        digests = hashing.sketch_index(words, *encoder.sketch[:3], encoder.key).tolist()
    else:
        pieces = [encoder.split(word)[0] if encoder.bpe else [word] for word in words]
        digests = [[encoder.table.get(p, -1) - hashing.FIRST for p in row] for row in pieces]
    groups, group = {}, {}  # number of pieces -> its words; word -> number of pieces, place
    for word, digest in zip(words, digests):
        if min(digest) >= 0:
            same = groups.setdefault(len(digest), [])
            group[word] = len(digest), len(same)
            same.append(digest)
    found = {n: ([], []) for n in groups}
    for row, gaps in zip(ids, hidden):
        gaps = [(group[word], at) for word, at in gaps if word in group]
        if gaps:
            logits = net(torch.tensor([row]), at=torch.tensor([i for _, at in gaps for i in at]))
            if net.config.head == "mlm":
                logits = logits[:, None, hashing.FIRST - 1:]
            for ((n, place), at), mine in zip(gaps, logits.split([len(at) for _, at in gaps])):
                found[n][0].append(mine.flatten(0, 1).log_softmax(-1))
                found[n][1].append(place)
    before = torch.cat([pretrain.ranks(torch.stack(logp), torch.tensor(groups[n]), torch.tensor(places))
                        for n, (logp, places) in found.items() if places])
    known = set(words)
    asked = sum(word in known for gaps in hidden for word, _ in gaps)
    return dict(first=100 * (before < 1).sum().item() / asked, ten=100 * (before < 10).sum().item() / asked,
                asked=asked)


def bench_gaps(args):
    """Models that predict hashes, rows and pieces, trained alike: words named among all; GLUE. [CM]"""
    texts = []
    if args.text:
        with open(args.text, encoding="utf-8") as file:
            texts = [line for line in file if line.strip()]
    words = pretrain.Corpus(pretrain.prepare(args.data, "regex", args.cache)).words()
    words = [word for word in words if word.isalpha()]  # as are those that are hidden

    def after(folder, seed):
        scores = name_hidden(folder, words, texts) if texts else {}
        for task, epochs in (("sst2", 1), ("cola", 5), ("mrpc", 5), ("stsb", 5)) if args.data_dir else ():
            command = [sys.executable, "finetune.py", "--ckpt", folder, "--task", task, "--epochs", epochs,
                       "--data_dir", args.data_dir, "--seeds", 1, "--seed", seed, "--out", f"{folder}-{task}",
                       "--cache", args.cache]
            done = subprocess.run(list(map(str, command)), cwd=HERE, capture_output=True, text=True,
                                  env=os.environ | {"OMP_NUM_THREADS": "1"})
            if done.returncode:
                sys.exit(f"{' '.join(map(str, command))}\n{done.stderr[-2000:]}")
            with open(os.path.join(f"{folder}-{task}", "results.json")) as file:
                scores[task] = json.load(file)["tasks"][task]["mean"]
        return scores

    hashes, table = ["--objective", "hash-mlm"], ["--emb", "lookup", "--objective", "mlm", "--vocab", 20_000]
    return compare(args, {"median": ["--emb", "median"], "mean": ["--emb", "mean"],
                          "median, tied": ["--emb", "median", "--tied"],
                          "mean, tied": ["--emb", "mean", "--tied"],
                          "proj, LSH": ["--emb", "proj", "--hash", "lsh", *hashes],
                          "20,000 BPE pieces": table,
                          "20,000 words": [*table, "--split", "regex"],
                          "20,000 words, not tied": [*table, "--split", "regex", "--no-tied"],
                          "weighted": ["--emb", "weighted", "--rows", 2_500, *hashes],
                          "pool, LSH": ["--emb", "pool", "--hash", "lsh", *hashes],
                          "emb, MD5": ["--emb", "emb", "--hash", "md5", "--rows", 2_500, *hashes]},
                   after=after)


def bench_robust(args):
    """A trained table spoilt in four ways, the head left whole: how far do vectors and loss move? [CM]"""
    rows = []
    for folder in args.runs:
        reader = infer.Reader(folder)
        c, net, name = reader.config, reader.model, os.path.basename(os.path.normpath(folder))
        if model.FORM[c.emb] != "sketch" or c.head != "hash-mlm" or not c.order or c.buckets % 2:
            raise hashing.InputError(f"{folder}: wanted a run over text with --emb mean or median, hash-mlm, "
                                     f"and an even number of buckets")
        run = model.load_checkpoint(folder)["run"]
        about = args.data, run["split"], args.cache, run["vocab"]
        corpus = pretrain.Corpus(pretrain.prepare(*about, quiet=True))
        if corpus.meta["digest"] != run["corpus"]:
            raise hashing.InputError(f"{folder} was trained on other text than --data {args.data}")
        reader.encoder.ids(corpus.words())
        net.set_codes(torch.from_numpy(reader.encoder.codes()))
        batches = pretrain.Batches(corpus, c.length, 32, len(net.codes), 0)
        inputs, labels = pretrain.corrupt_mlm(*batches.held_out(slice(0, 64)))
        weight = net.embedding.weight.data.clone()
        blocks = weight.view(c.hashes, c.buckets, -1)

        def rounded(bits):
            step = weight.abs().amax(1, keepdim=True) / (2 ** (bits - 1) - 1)
            return (weight / step).round() * step

        spoilt = weight.clone()
        generator = torch.Generator().manual_seed(0)
        lost = torch.randperm(len(weight), generator=generator)[:len(weight) // 50]
        spoilt[lost] += 10 * weight.std() * torch.randn(len(lost), c.width, generator=generator)
        shared = (blocks + blocks.roll(c.buckets // 2, 1)) / 2
        before = None
        for how, table in (("as trained", weight), ("1 row in 50 spoilt by 10 σ", spoilt),
                           ("rows of 4 bits", rounded(4)), ("rows of 2 bits", rounded(2)),
                           ("half as many buckets", shared.flatten(0, 1))):
            net.embedding.weight.data = table.clone()
            with torch.no_grad():
                vectors = net.embed(inputs)[inputs >= hashing.FIRST]
                logits = net(inputs, at=pretrain.masked(labels))
                targets = net.targets[labels[labels != pretrain.IGNORE]].long()
                loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten()).item()
            before = (vectors, loss) if before is None else before
            moved = ((vectors - before[0]).norm(dim=-1) / before[0].norm(dim=-1)).mean().item()
            rows.append(dict(name=f"{name}: {how}", moved=100 * moved, loss=loss, more=loss - before[1]))
    return rows


ROBUST = dict(name=("run, table", "s"), moved=("vectors moved, %", ".1f"), loss=("held-out loss", ".3f"),
              more=("more by", ".3f"))


GAPS = dict(name=("model", "s"), parameters=("parameters", ","), table=("to embed", ","),
            first=("named first, %", "±1"), ten=("among ten, %", "±1"), eval_loss=("held-out loss", "±"),
            sst2=("SST-2", "±1"), cola=("CoLA", "±1"), mrpc=("MRPC", "±1"), stsb=("STS-B", "±1"))


BENCHES = {"counts": (counts, COUNTS), "hashing": (bench_hashing, HASHING),
           "embeddings": (bench_embeddings, EMBEDDINGS), "kernel": (bench_kernel, KERNEL),
           "attention": (bench_attention, ATTENTION), "flops": (bench_flops, FLOPS),
           "steps": (bench_steps, STEPS), "trained": (bench_trained, TRAINED),
           "train": (bench_train, TRAIN), "words": (bench_words, WORDS),
           "variants": (bench_variants, VARIANT_COLUMNS), "evaluation": (bench_evaluation, EVALUATION),
           "twins": (bench_twins, TWIN_COLUMNS), "tasks": (bench_tasks, TASKS),
           "sizes": (bench_sizes, SIZE_COLUMNS), "bloom": (bench_bloom, BLOOM),
           "million": (bench_million, MILLION), "entities": (bench_entities, ENTITIES),
           "depth": (bench_depth, ENTITIES), "coherent": (bench_coherent, ENTITIES),
           "beams": (bench_beams, BEAMS), "sketch": (bench_sketch, SKETCH),
           "collisions": (bench_collisions, COLLISIONS), "robust": (bench_robust, ROBUST),
           "gaps": (bench_gaps, GAPS)}

ON_PAGES = ("entities", "depth", "coherent", "beams")
# or of runs that are there already
LONG = ("words", "variants", "gaps", "twins", "trained", "tasks", "robust", *ON_PAGES)


def write(path, name, rows):
    """Keep a table with where it was measured: one JSON file a table."""
    command = re.sub(r" --cache \S+", "", " ".join(["python bench.py", *sys.argv[1:]]))  # where is no matter
    command = re.sub(r"--runs( (?!--)\S+)+", "--runs out/*", command)  # before the shell spelt it out
    with open(path, "w") as file:
        json.dump(dict(bench=name, machine=machine(), command=command, rows=rows), file, indent=1)
        file.write("\n")


def readme_tables():
    """The tables of the README: counts computed now, the others from results/; out: dict name -> markdown"""
    tables = {"counts": table(counts(), COUNTS)}
    for name in sorted(os.listdir(RESULTS)):
        with open(os.path.join(RESULTS, name)) as file:
            kept = json.load(file)
        where = kept["machine"]
        stamp = (f"\n`{kept['command']}` on {where['device']}, torch {where['torch']}, "
                 f"commit {where['commit']}, {where['date']}.\n")
        tables[name.removesuffix(".json")] = with_spread(kept["rows"], BENCHES[kept["bench"]][1]) + stamp
    return tables


def parser():
    """The flags."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("what", choices=(*BENCHES, "figures", "readme", "all"),
                   help=f"all: all but {', '.join(LONG)}")
    p.add_argument("--json", metavar="FILE",
                   help="keep the table there; results/NAME.json makes it one of the README's")
    p.add_argument("--count", type=int, default=12_000_000, metavar="n",
                   help="words: distinct words (default 12,000,000)")
    p.add_argument("--data", metavar="A+B", help=(
        "variants, gaps, twins, robust, collisions: the corpus (default python); entities, depth, coherent, "
        "beams: the pages (default python-names)"))
    p.add_argument("--alpha", type=int, default=25, metavar="a",
                   help="entities, depth, coherent: items that share a token (default 25)")
    p.add_argument("--steps", type=int, default=200, metavar="n",
                   help="variants, gaps, twins, entities, depth, coherent: steps (default 200)")
    p.add_argument("--seeds", type=int, default=3, metavar="n",
                   help="the same: runs of each (default 3)")
    p.add_argument("--only", default="", metavar="RE", help=(
        "variants, gaps, entities, depth, coherent: those whose names match a regular expression"))
    p.add_argument("--data_dir", metavar="DIR", help="twins, gaps: GLUE's files")
    p.add_argument("--text", metavar="FILE", help="gaps: a text to hide words of, a paragraph a line")
    p.add_argument("--runs", nargs="*", default=[], metavar="DIR",
                   help="tasks: folders of finetune.py, those with a results.json; trained, figures: of "
                        "pretrain.py")
    p.add_argument("--cache", default="cache", metavar="DIR",
                   help="variants, twins: where prepared corpora are kept (default cache)")
    return p


def main(argv=None):
    """in: argv list[str] or None for the command line; prints tables"""
    p = parser()
    args = p.parse_args(argv)
    if args.what == "readme":
        path = os.path.join(HERE, "README.md")
        with open(path, encoding="utf-8") as file:
            text = file.read()
        for name, markdown in readme_tables().items():
            text = re.sub(rf"(<!-- {name} -->\n).*?(<!-- end -->)", lambda m: m[1] + markdown + m[2], text,
                          flags=re.S)
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
        return
    args.data = args.data or ("python-names" if args.what in ON_PAGES else "python")
    if args.what == "twins" and not args.data_dir:
        p.error("twins needs --data_dir, a folder with GLUE's SST-2")
    if args.what == "gaps" and not args.text and not args.data_dir:
        p.error("gaps needs --text, a file that is not among --data, or --data_dir, GLUE's files")
    if args.what in ("trained", "figures", "tasks", "beams", "robust") and not args.runs:
        p.error(f"{args.what} needs --runs")
    if args.what == "figures":
        return figures(args)
    chosen = [n for n in BENCHES if n not in LONG] if args.what == "all" else [args.what]
    if args.json and len(chosen) > 1:
        os.makedirs(args.json, exist_ok=True)
    for name in chosen:
        function, columns = BENCHES[name]
        rows = function(args)
        print(f"\n{function.__doc__.splitlines()[0]}\n\n{with_spread(rows, columns)}", flush=True)
        if args.json:
            write(args.json if len(chosen) == 1 else os.path.join(args.json, f"{name}.json"), name, rows)


if __name__ == "__main__":
    try:
        main()
    except (model.ConfigError, hashing.InputError) as error:
        print(f"bench.py: {error}", file=sys.stderr)
        sys.exit(2)
