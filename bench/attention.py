"""BERT-LSH: LSH attention beside dense attention in time, work and memory, and what it learns.

The tables measure how long attention takes by the length of the sequence, how many pairs collide,
and how many of a trained model's best keys are among them. "× dense" is the time of dense attention
over that of LSH attention in the same round: above 1, LSH attention is faster.

    python -m bench.attention attention
    python -m bench.attention flops
    python -m bench.attention auto
    python -m bench.attention twins --data_dir glue/      an hour
    python -m bench.attention trained --runs out/lookup-bpe-mlm*

Notation:
    B batch   H heads   L positions   e head size
    n hash functions   r hyperplanes   m buckets
    hq, hk hash buckets of queries and keys, int64 (B, H, n, L)
"""

import contextlib
import functools
import importlib
import itertools
import math
import statistics
import sys
from pathlib import Path

import torch
import torch.nn.functional as F

import attention
from bench import harness
from bench.attention_controls import permute_buckets, use_random_pairs
from bench.harness import GLUE_FILES, RUNS, Stopwatch
from data.python_source import python_files, python_texts


def draw_functions(num_heads, num_hyperplanes=8, num_buckets=256, size=64):
    """Draw a hash function for each head, always the same."""
    generator = torch.Generator().manual_seed(0)
    return attention.draw_hyperplanes(num_heads, 1, num_hyperplanes, size, num_buckets, generator)


def hash_both(q, k, draw, num_buckets=256):
    """Return the buckets of queries and keys under a draw of hyperplanes."""
    return attention.simhash(q, *draw, num_buckets), attention.simhash(k, *draw, num_buckets)


def random_qkv(*shape, dtype=torch.float32):
    """Return random queries, keys and values that need a gradient."""
    return [torch.randn(*shape, dtype=dtype, requires_grad=True) for _ in range(3)]


def run_passes(impl, q, k, v, draw, cotangent=None, pairs="all"):
    """Run attention forward, and backward where there is a cotangent, the gradient of the output.

    impl: "kernel", PyTorch's dense attention; "attention", ours; else that of LSH attention.
    """
    with torch.set_grad_enabled(cotangent is not None):
        if impl == "kernel":
            out = F.scaled_dot_product_attention(q, k, v)
        elif impl == "attention":
            out = attention.full_attention(q, k, v)
        else:
            hq, hk = hash_both(q, k, draw)
            out = attention.lsh_attention(q, k, v, hq, hk, impl=impl, pairs=pairs)
    if cotangent is not None:
        # grad, not backward, which would add up gradients in q, k and v
        torch.autograd.grad(out, (q, k, v), cotangent)


# Operations


def attention_flops(length, heads, head_size, num_hyperplanes, num_buckets):
    """Count the operations of L, H, e, r, m as [BL Table 1] does, two for a multiply-add.

    Returns:
        dict of floats:
            full: operations of q kᵀ alone; the weighted sum of values takes as many again.
            hashing: operations of hashing queries and keys.
            upper_pairs: pairs i <= j of random vectors that collide, in expectation.
            all_pairs: all pairs of random vectors that collide, in expectation.
            upper_scores: operations of the scores of upper_pairs.
    """
    chance = attention.collision_probability(math.pi / 2, num_hyperplanes, num_buckets)
    upper_pairs = heads * length * (length + 1) / 2 * chance
    num_vectors = 2 * heads * length  # queries and keys
    return dict(
        full=2 * heads * length**2 * head_size,
        hashing=num_vectors * 2 * head_size * num_hyperplanes,
        upper_pairs=upper_pairs,
        all_pairs=heads * length**2 * chance,
        upper_scores=2 * head_size * upper_pairs,
    )


FLOPS = """
             | name       | s
    dense    | full       | ,.2f
    paper    | paper_full | s
    BERT-LSH | lsh        | ,.2f
    paper    | paper      | s
"""


def bench_flops(args, *, rounds=301):
    """Count operations [BL Table 1]: ten positions, two heads of 64; q kᵀ alone for dense."""
    q, k, v = torch.randn(3, 1, 2, 10, 64)
    draw = draw_functions(2, 2, 64)

    def lsh():
        hq, hk = hash_both(q, k, draw, 64)
        return attention.lsh_attention(q, k, v, hq, hk, pairs="upper")

    ms = Stopwatch(dict(full=lambda: attention.full_attention(q, k, v), lsh=lsh), rounds).ms
    cost = attention_flops(10, 2, 64, 2, 64)
    full = cost["full"] / 1e3  # in thousands, as the paper prints them
    hashing = cost["hashing"] / 1e3
    with_scores = hashing + cost["upper_scores"] / 1e3
    lines = (  # what; dense attention: ours, the paper's; LSH attention: ours, the paper's
        ("KFLOPs, hashing alone", full, "25.60", hashing, "10.24"),
        ("KFLOPs, with the dot products", full, None, with_scores, None),
        ("dot products of the triangle, by law", 200, "200", cost["upper_pairs"], "28.5"),
        ("dot products of Algorithm 1 as printed, by law", 200, None, cost["all_pairs"], None),
        ("microseconds, the whole attention", 1000 * ms["full"], "12.2 (q kᵀ)",
         1000 * ms["lsh"], "337 (scores)"),
    )
    for line in lines:
        yield dict(zip(("name", "full", "paper_full", "lsh", "paper"), line))


# Time and memory by length


def memory_of_passes(impl, length):
    """Return the MiB that run_passes adds to the process's peak."""
    import resource  # not on Windows
    unit = 1 if sys.platform == "darwin" else 2**10  # bytes of ru_maxrss, which is in KiB on Linux
    importlib.import_module("attention_fast")  # else the first pass of blocks would load it
    for L in (64, length):  # the libraries allocate what they need once in the first pass
        q, k, v = random_qkv(1, 2, L, 64)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        run_passes(impl, q, k, v, draw_functions(2), torch.ones(1).expand_as(q))
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * unit / 2**20


ATTENTION = """
    L                           | L             | ,
    pairs that collide %        | share         | .2f
    dense, ms                   | dense         | ,.0f
    all, ms                     | ours          | ,.0f
    × dense                     | ratio         | .1f
    upper, ms                   | upper         | ,.0f
    × dense                     | ratio_upper   | .1f
    all, forward alone, × dense | ratio_forward | .1f
    dense, GFLOP                | dense_gflop   | ,.1f
    all, GFLOP                  | gflop         | ,.1f
    dense, MiB                  | dense_memory  | ,.0f
    all, MiB                    | memory        | ,.0f
"""


def bench_attention(args, *, positions=16_384, rounds=5,
                    lengths=(64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 65536)):
    """Time attention by length, with hashing: float32, two heads of 64, r 8, m 256, n 1."""
    generator = torch.Generator().manual_seed(0)
    # new hyperplanes in every round: how evenly one draw fills the buckets is luck
    draws = [attention.draw_hyperplanes(2, 1, 8, 64, 256, generator) for _ in range(16)]
    for L in lengths:
        q, k, v = random_qkv(max(positions // L, 1), 2, L, 64)
        cotangent = torch.randn_like(q)

        # the number of pairs that collide, a mean over the draws
        num_pairs = 0
        for draw in draws:
            hq, hk = hash_both(q, k, draw)  # (B, H, 1, L)
            sizes_q = F.one_hot(hq, 256).sum(-2)  # (B, H, 1, m)
            sizes_k = F.one_hot(hk, 256).sum(-2)
            num_pairs += (sizes_q * sizes_k).sum().item()
        num_pairs /= len(draws)

        def run(turns, impl, *options):
            run_passes(impl, q, k, v, next(turns), *options)

        passes = {"ours": ("auto", cotangent), "forward": ("auto",)}
        if L <= 1024:  # the literal formula takes matrices of L x L
            passes["upper"] = ("auto", cotangent, "upper")
        if L <= 16_384:
            passes["dense"] = ("kernel", cotangent)
            passes["dense_forward"] = ("kernel",)
        functions = {}
        for name, options in passes.items():
            # every pass has the draws in the same order
            functions[name] = functools.partial(run, itertools.cycle(draws), *options)
        watch = Stopwatch(functions, rounds)

        num_vectors = q.shape[:3].numel()  # of queries, and of keys
        all_pairs = num_vectors * L
        flops_of_pair = 7 * 2 * 64  # two products of e numbers forward, five backward
        flops_of_vector = 2 * 64 * 8  # hashing: r hyperplanes
        gflop = (flops_of_pair * num_pairs + flops_of_vector * 2 * num_vectors) / 1e9
        row = dict(L=L, share=100 * num_pairs / all_pairs, gflop=gflop, **watch.ms)
        row["dense_gflop"] = flops_of_pair * all_pairs / 1e9
        row["memory"] = harness.run_in_new_process(memory_of_passes, "auto", L)
        if "dense" in passes:
            row["ratio"] = watch.ratio("dense", "ours")
            row["ratio_forward"] = watch.ratio("dense_forward", "forward")
            row["dense_memory"] = harness.run_in_new_process(memory_of_passes, "kernel", L)
        if "upper" in passes:
            row["ratio_upper"] = watch.ratio("dense", "upper")
        yield row


AUTO = """
    dtype                   | dtype     | s
    L                       | L         | ,
    batch                   | batch     | ,
    heads                   | heads     | ,
    torch's kernel, ms      | kernel    | ,.1f
    dense, ms               | attention | ,.1f
    literal LSH formula, ms | dense     | ,.1f
    blocks, ms              | blocks    | ,.1f
    auto, ms                | auto      | ,.1f
    auto / better of two    | regret    | .2f
    literal LSH / dense     | formula   | .2f
    dense / auto            | gain      | .1f
"""


def bench_auto(args, *, positions=8_192, heads=4, rounds=7,
               lengths=(64, 128, 256, 512, 1024, 2048, 4096, 16384)):
    """Time impl="auto" beside the better of its two ways, with hashing: e 64, r 8, m 256, n 1."""
    draw = draw_functions(heads)
    for dtype, L in itertools.product(("float32", "bfloat16"), lengths):
        B = max(positions // (heads * L), 1)
        q, k, v = random_qkv(B, heads, L, 64, dtype=getattr(torch, dtype))
        cotangent = torch.randn_like(q)

        impls = ["blocks", "auto"]
        if L <= 1024:  # the formulas take matrices of L x L
            impls += ["dense", "attention", "kernel"]  # "dense" is the impl that collects no bucket
        functions = {}
        for impl in impls:
            functions[impl] = functools.partial(run_passes, impl, q, k, v, draw, cotangent)
        watch = Stopwatch(functions, rounds)
        row = dict(L=L, dtype=dtype, batch=B, heads=heads, **watch.ms)
        # in each round, against the faster of its two ways
        better = watch.times["blocks"]  # seconds of each round
        if "dense" in impls:
            better = map(min, better, watch.times["dense"])
            row["formula"] = watch.ratio("dense", "attention")
            row["gain"] = watch.ratio("attention", "auto")
        regrets = [time / best for time, best in zip(watch.times["auto"], better)]
        yield row | dict(regret=statistics.median(regrets))


# Trained models


def trained_layers(folder):
    """Return an iterator of q, k (B, H, L, e) of each layer of a run, on docstrings of Python."""
    model, tokenizer, _ = harness.load_run(folder)
    num_words = 8 * model.config.length
    ids = []  # of one long text, cut into eight sequences
    for path in python_files().values():
        for text in python_texts(path):
            words, _ = tokenizer.split(text)
            ids += tokenizer.ids(words).tolist()
        if len(ids) >= num_words:
            break
    return harness.walk_layers(model, tokenizer, torch.tensor(ids[:num_words]).view(8, -1))


TRAINED = """
    model                      | name          | s
    L                          | L             | ,
    pairs that collide %       | share         | .1f
    of attention's mass %      | mass          | .1f
    at random                  | mass_random   | .1f
    of the 16 best keys %      | recall        | .1f
    at random                  | recall_random | .1f
    largest bucket, % of a row | largest       | .0f
"""


def bench_trained(args):
    """Measure the pairs, the attention mass and the best keys in the buckets of trained layers."""
    torch.manual_seed(0)  # for the random buckets
    for folder in args.runs:
        for number, (q, k) in enumerate(trained_layers(folder), 1):
            for bands in (2, 8):
                name = f"{Path(folder).name}, layer {number}, r {bands}"
                yield dict(name=name) | measure_layer(q, k, bands)


def measure_layer(q, k, bands):
    """Return a row of the table: what shares a bucket; q, k (B, H, L, e) are those of a layer."""
    _, H, L, e = q.shape
    hq, hk = hash_both(q, k, draw_functions(H, bands, size=e))
    sizes = hk[0, 0, 0].bincount()  # buckets of the first head of the first row
    row = dict(L=L, largest=100 * sizes.max().item() / L)
    # dense attention: its weights, and the keys that have the largest ones
    scores = q @ k.transpose(-2, -1) / math.sqrt(e)
    weights = scores.softmax(-1)  # (B, H, L, L)
    best = weights.topk(min(16, L)).indices  # (B, H, L, 16)
    buckets = {"": (hq, hk), "_random": (permute_buckets(hq), permute_buckets(hk))}
    for suffix, (queries, keys) in buckets.items():
        is_collision = attention.collisions(queries, keys)  # (B, H, L, L)
        mass = (weights * is_collision).sum(-1)  # (B, H, L)
        is_found = is_collision.gather(-1, best)
        row[f"share{suffix}"] = 100 * is_collision.float().mean().item()
        row[f"mass{suffix}"] = 100 * mass.mean().item()
        row[f"recall{suffix}"] = 100 * is_found.float().mean().item()
    return row


CONTROL = "random pairs, equal number"  # the same buckets at random positions
TWINS = {  # name -> flags of pretrain.py
    "dense": "--attn full",
    "LSH, r 2, m 256": "--lsh_bands 2",
    CONTROL: "--lsh_bands 2",
    "LSH, new hyperplanes each step": "--lsh_bands 2 --lsh_redraw",
}


def train_twin(job, flags):
    """Pre-train one twin and fine-tune it on SST-2 and SQuAD; return its scores."""
    context = contextlib.nullcontext()  # changes nothing
    if job.name == CONTROL:
        context = use_random_pairs()
    with context:
        result = harness.train_variant(job)
        start = ["--ckpt", job.folder]
        scores = harness.finetune_run(job, start, dict(sst2=1), flags)
        scores |= harness.finetune_run(job, start, dict(squad=3), [*flags, "--limit", 10_000])
    loss = result["eval_loss"]
    return dict(loss=loss, perplexity=math.exp(loss), accuracy=100 * result["rec@1"],
                seconds=result["seconds"]) | scores


TWINS_COLUMNS = """
    attention      | name       | s
    MLM loss       | loss       | .3f ±
    perplexity     | perplexity | .0f ±
    MLM accuracy % | accuracy   | .1f ±
    seconds        | seconds    | .0f ±
    SST-2          | sst2       | .1f ±
    loss           | sst2_loss  | .3f ±
    bag of words   | sst2_bag   | .1f ±
    SQuAD F1       | squad      | .1f ±
    EM             | squad_em   | .1f ±
    loss           | squad_loss | .3f ±
"""


def bench_twins(args):
    """Train BERT-LSH, its dense twin, and a control that attends to as many random keys."""
    shared = ("--preset bert-lsh --vocab 8192 --length 128 --batch 32 --lr 0.001 "
              f"--warmup {args.steps // 10} --dropout 0 --dtype bfloat16")
    tuning = ["--data_dir", args.data_dir, "--cache", args.cache, "--dtype", "bfloat16"]
    train = functools.partial(train_twin, flags=tuning)
    return harness.compare(args, TWINS, train, shared)


TABLES = {  # name -> function that yields the rows, columns, flags and their defaults
    "attention": (bench_attention, ATTENTION, {}),
    "auto": (bench_auto, AUTO, {}),
    "flops": (bench_flops, FLOPS, {}),
    "trained": (bench_trained, TRAINED, RUNS),
    "twins": (bench_twins, TWINS_COLUMNS, harness.COMPARE | GLUE_FILES),
}


if __name__ == "__main__":
    harness.main("bench.attention", TABLES, __doc__)
