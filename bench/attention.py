"""BERT-LSH: LSH attention beside dense attention in time, work and memory, and in what it learns.

    python -m bench.attention attention (flops)
    python -m bench.attention auto --device cuda
    python -m bench.attention twins --data_dir glue/      an hour
    python -m bench.attention trained --runs out/lookup-bpe-mlm*

Paper map:    [BL Table 1] attention_flops   [BL Table 1] bench_flops
Notation:     B batch   H heads   L positions   e head size   n hash functions   r hyperplanes   m buckets
"""

import contextlib, functools, itertools, math, resource, statistics
from argparse import Namespace
from pathlib import Path
from unittest import mock

import torch
import torch.nn.functional as F

import attention
from bench import common
from bench.common import REQUIRED, Bench, Stopwatch, compare, load_run
from data.corpus import python_files, python_texts
from runtime import resolve_device

DENSE = F.scaled_dot_product_attention


def hash_both(q, k, draw, buckets=256):
    """Return the buckets (B, H, n, L) of queries and keys under a draw of hyperplanes."""
    return [attention.simhash(x, *draw, buckets) for x in (q, k)]


def permute_buckets(h):
    """Return buckets (B, H, n, L) at random positions: as many pairs collide, none because of its vectors."""
    return h.gather(-1, torch.rand(h.shape, device=h.device).argsort(-1))


def attention_flops(length, heads, width, bands, buckets, functions=1):
    """Count the operations of L, H, e, r, m, n as [BL Table 1] does, two for a multiply-add.

    Returns: dict: full, of q kᵀ alone (the weighted sum of values takes as many again); hashing, of queries
        and keys; dots and all, the pairs i <= j and all pairs of random vectors that collide, in expectation;
        pairs, the operations of the scores of dots.
    """
    chance = attention.collision_probability(math.pi / 2, bands, buckets, functions)
    dots = heads * length * (length + 1) / 2 * chance
    return dict(full=2 * heads * length**2 * width, dots=dots, pairs=2 * width * dots,
                all=heads * length**2 * chance, hashing=2 * heads * 2 * length * width * bands * functions)


def bench_flops(args, *, rounds=301):
    """[BL Table 1]: ten positions, two heads of 64; of dense attention q kᵀ alone is counted."""
    draw = attention.draw_hyperplanes(2, 1, 2, 64, 64, torch.Generator().manual_seed(0))
    q, k, v = torch.randn(3, 1, 2, 10, 64)
    cost, pairs = attention_flops(10, 2, 64, 2, 64), torch.randn(100, 2, 1, 2, 10, 64)
    dots = [attention.collisions(*hash_both(*pair, draw, 64)).triu().sum().item() for pair in pairs]
    lsh = functools.partial(attention.lsh_attention, q, k, v, pairs="upper")
    times = Stopwatch({"full": lambda: attention.full_attention(q, k, v),
                       "lsh": lambda: lsh(*hash_both(q, k, draw, 64))}, rounds).ms()
    full, hashing, scores = (cost[key] / 1e3 for key in ("full", "hashing", "pairs"))
    rows = [("KFLOPs, hashing alone", full, "25.60", hashing, "10.24"),
            ("KFLOPs, with the dot products", full, None, hashing + scores, None),
            ("dot products of the triangle, by law", 200, "200", cost["dots"], "28.5"),
            ("the same, mean of 100 draws", 200, "200", statistics.mean(dots), "28.5"),
            ("dot products of Algorithm 1 as printed, by law", 200, None, cost["all"], None),
            ("microseconds, the whole attention", 1000 * times["full"], "12.2 (q kᵀ)", 1000 * times["lsh"],
             "337 (scores)")]
    return [dict(zip(("name", "full", "paper_full", "lsh", "paper"), row)) for row in rows]


def lsh_all_pairs(q, k, v):
    """Return LSH attention over all colliding pairs with 8 hyperplanes and 256 buckets, hashing included."""
    draw = attention.draw_hyperplanes(q.shape[1], 1, 8, q.shape[3], 256, torch.Generator().manual_seed(0))
    return attention.lsh_attention(q, k, v, *hash_both(q, k, draw))


def memory_of_passes(attend, length):
    """Return the MiB that forward and backward of attend(q, k, v) add to the peak of a new process."""
    for L in (64, length):  # in the first pass the libraries allocate what they need once
        q, k, v = (torch.randn(1, 2, L, 64, requires_grad=True) for _ in range(3))
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        attend(q, k, v).sum().backward()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 2**10


def keep_freed_memory():
    """Make glibc keep what is freed from now on, as it does in a training process: it has freed as much."""
    torch.empty(30 * 2**20, dtype=torch.uint8)


def bench_attention(args, *, positions=16_384, rounds=None,
                    lengths=(64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 65536)):
    """Forward and back, float32, two heads of 64, 16,384 positions a batch; r 8, m 256, n 1, with hashing."""
    keep_freed_memory()
    rows, generator = [], torch.Generator().manual_seed(0)
    # new hyperplanes for every run: how evenly one draw fills the buckets is luck
    draws = [attention.draw_hyperplanes(2, 1, 8, 64, 256, generator) for _ in range(16)]
    for L in lengths:
        B = max(positions // L, 1)
        q, k, v = (torch.randn(B, 2, L, 64, requires_grad=True) for _ in range(3))
        cotangent = torch.randn_like(q)
        hashed = [hash_both(q, k, draw) for draw in draws]
        permuted = itertools.cycle([[permute_buckets(h) for h in pair] for pair in hashed])
        def new_hashes():  # computed when asked for, so that they are timed
            return (hash_both(q, k, draw) for draw in itertools.cycle(draws))
        def lsh(hashes, pairs):
            return attention.lsh_attention(q, k, v, *next(hashes), pairs=pairs)
        def run(use_backward, attend, *args):
            with torch.set_grad_enabled(use_backward):
                out = attend(*args)
            return torch.autograd.grad(out, (q, k, v), cotangent) if use_backward else out
        cases = dict(ours=(True, lsh, new_hashes(), "all"), forward=(False, lsh, new_hashes(), "all"),
                     random=(True, lsh, permuted, "all"))
        if L <= 1024:  # the literal formula takes matrices of L x L
            cases["upper"] = (True, lsh, new_hashes(), "upper")
        if L <= 16_384:
            cases |= dict(dense=(True, DENSE, q, k, v), dense_forward=(False, DENSE, q, k, v))
        num_pairs = sum(int(a.bincount(minlength=256) @ b.bincount(minlength=256)) for hq, hk in hashed
                        for a, b in zip(hq.flatten(0, 2), hk.flatten(0, 2))) / len(draws)
        watch = Stopwatch({name: functools.partial(run, *case) for name, case in cases.items()},
                          rounds or (9 if L <= 2048 else 3 if L > 16_384 else 5))
        row = dict(L=L, share=100 * num_pairs / (2 * B * L * L), dense_gflop=14 * 64 * 2 * B * L * L / 1e9,
                   gflop=(14 * 64 * num_pairs + 4 * 64 * 8 * 2 * B * L) / 1e9, **watch.ms(),
                   memory=common.run_in_new_process(memory_of_passes, lsh_all_pairs, L))
        if "dense" in cases:
            row |= dict(ratio=watch.ratio("dense", "ours"), ratio_forward=watch.ratio("dense_forward", "forward"),
                        dense_memory=common.run_in_new_process(memory_of_passes, DENSE, L))
        if "upper" in cases:
            row["ratio_upper"] = watch.ratio("dense", "upper")
        rows.append(row)
    return rows


def bench_auto(args, *, positions=8_192, heads=4, rounds=7, lengths=(64, 128, 256, 512, 1024, 2048, 4096, 16384)):
    """Forward and backward with hashing, e 64, r 8, m 256, n 1, all pairs: auto against the better of its two ways."""
    resolve_device(Namespace(device=args.device, dtype="float32", compile=False))  # is it here?
    keep_freed_memory()
    rows, draw = [], attention.draw_hyperplanes(heads, 1, 8, 64, 256, torch.Generator().manual_seed(0))
    draw = [x.to(args.device) for x in draw]
    for dtype, L in itertools.product((torch.float32, torch.bfloat16), lengths):
        B = max(positions // (heads * L), 1)
        q, k, v = (torch.randn(B, heads, L, 64, device=args.device, dtype=dtype, requires_grad=True) for _ in range(3))
        cotangent = torch.randn_like(q)
        def run(name):
            if dense := dict(kernel=DENSE, attention=attention.full_attention).get(name):
                out = dense(q, k, v)
            else:
                out = attention.lsh_attention(q, k, v, *hash_both(q, k, draw), impl=name)
            torch.autograd.grad(out, (q, k, v), cotangent)
            if q.is_cuda:
                torch.cuda.synchronize()
        names = ["blocks", "auto"] + ["dense", "attention", "kernel"] * (L <= 1024)
        watch = Stopwatch({name: functools.partial(run, name) for name in names}, rounds)
        times = watch.times
        better = list(map(min, times["blocks"], times["dense"])) if "dense" in times else times["blocks"]
        row = dict(L=L, dtype=str(dtype)[6:], batch=B, heads=heads, **watch.ms(),
                   regret=statistics.median(a / b for a, b in zip(times["auto"], better)))
        if "dense" in times:
            row |= dict(formula=watch.ratio("dense", "attention"), gain=watch.ratio("attention", "auto"))
        rows.append(row)
    return rows


def trained_layers(folder, sequences):
    """Yield number, layer, q, k, v (B, H, L, e) of a trained model's layers on docstrings of this Python."""
    net, tokenizer, _ = load_run(folder)
    size = sequences * net.config.length
    texts = (text for path in python_files().values() for text in python_texts(path))
    pieces = (tokenizer.ids(tokenizer.split(text)[0]).tolist() for text in texts)
    ids = list(itertools.islice(itertools.chain.from_iterable(pieces), size))
    net.set_codes(torch.from_numpy(tokenizer.codes()))
    x = net.embed_inputs(torch.tensor(ids).view(sequences, -1)).detach()
    for number, layer in enumerate(net.layers, 1):
        q, k, v = layer.attention.project(x)
        yield number, layer, q.detach(), k.detach(), v.detach()
        x = layer(x).detach()


def bench_trained(args, *, rounds=5, sequences=8):
    """Buckets of trained queries and keys: how many pairs, how much of the mass, which of the best keys."""
    rows, layers = [], ((run, *layer) for run in args.runs for layer in trained_layers(run, sequences))
    for (folder, number, _, *qkv), bands in itertools.product(layers, (2, 8)):
        q, k, v = (x.contiguous().requires_grad_() for x in qkv)
        (_, H, L, e), generator = q.shape, torch.Generator().manual_seed(0)
        hq, hk = hash_both(q, k, attention.draw_hyperplanes(H, 1, bands, e, 256, generator))
        row = dict(name=f"{Path(folder).name}, layer {number}, r {bands}", L=L)
        with torch.no_grad():
            weights = (q @ k.transpose(-2, -1) / math.sqrt(e)).softmax(-1)
            best = weights.topk(min(16, L)).indices
            for suffix, pair in (("", (hq, hk)), ("_random", map(permute_buckets, (hq, hk)))):
                is_collision = attention.collisions(*pair)  # (B, H, L, L)
                row |= {f"share{suffix}": 100 * is_collision.float().mean().item(),
                        f"mass{suffix}": 100 * (weights * is_collision).sum(-1).mean().item(),
                        f"recall{suffix}": 100 * is_collision.gather(-1, best).float().mean().item()}
        watch = Stopwatch({"ours": lambda: attention.lsh_attention(q, k, v, hq, hk).sum().backward(),
                           "dense": lambda: DENSE(q, k, v).sum().backward()}, rounds)
        rows.append(row | watch.ms() | dict(
            ratio=watch.ratio("dense", "ours"), largest=100 * hk[0, 0, 0].bincount().max().item() / L))
    return rows


CONTROL = "random pairs, equal number"  # the buckets, at random positions
TWINS = {"dense": ["--attn", "full"], "LSH, r 2, m 256": ["--lsh_bands", 2], CONTROL: ["--lsh_bands", 2]}


def use_random_buckets():
    """Return a context in which models permute their hash buckets: the control experiment."""
    simhash = attention.simhash
    return mock.patch.object(attention, "simhash", lambda *args: permute_buckets(simhash(*args)))


def train_twin(job):
    """Pre-train and fine-tune one twin; return its scores."""
    with use_random_buckets() if job[0] == CONTROL else contextlib.nullcontext():
        row = common.train_variant(job)
    return dict(loss=row["eval_loss"], accuracy=100 * row["rec@1"], sst2=row["sst2"])


def bench_twins(args, *flags):
    """BERT-LSH, its dense twin, and a control that attends to as many keys at random: MLM, then SST-2."""
    tuning = ["--data_dir", args.data_dir, "--cache", args.cache, "--dtype", "bfloat16"]
    finetune = functools.partial(common.finetune_run, tasks=dict(sst2=1), flags=tuning)
    return compare(args, TWINS, "--preset", "bert-lsh", "--vocab", 8_192, "--length", 128, "--batch", 32,
                   "--lr", 1e-3, "--warmup", args.steps // 10, "--dropout", 0, "--dtype", "bfloat16", *flags,
                   train=train_twin, after=finetune)


BENCHES = {
    "attention": Bench(bench_attention, "L:,:L | share:.2f:pairs that collide % | dense:,.0f:dense, ms | "
        "ours:,.0f:all, ms | ratio:.1f:× dense | upper:,.0f:upper, ms | ratio_upper:.1f:× dense | "
        "ratio_forward:.1f:all, forward alone, × dense | random:,.0f:random buckets, ms | "
        "dense_gflop:,.1f:dense, GFLOP | gflop:,.1f:all, GFLOP | dense_memory:,.0f:dense, MiB | "
        "memory:,.0f:all, MiB"),
    "auto": Bench(bench_auto, "dtype:s:dtype | L:,:L | batch:,:batch | heads:,:heads | "
        "kernel:,.1f:torch's kernel, ms | attention:,.1f:dense, ms | dense:,.1f:dense LSH formula, ms | "
        "blocks:,.1f:blocks, ms | auto:,.1f:auto, ms | regret:.2f:auto / better of two | "
        "formula:.2f:formula / dense | gain:.1f:dense / auto", dict(device="cpu")),
    "flops": Bench(bench_flops, "name:s: | full:,.2f:dense | paper_full:s:paper | lsh:,.2f:BERT-LSH | "
        "paper:s:paper"),
    "trained": Bench(bench_trained, "name:s:model | L:,:L | share:.1f:pairs that collide % | "
        "mass:.1f:of attention's mass % | mass_random:.1f:at random | recall:.1f:of the 16 best keys % | "
        "recall_random:.1f:at random | largest:.0f:largest bucket, % of a row | dense:,.1f:dense, ms | "
        "ours:,.1f:ours, ms | ratio:.1f:speed-up", dict(runs=REQUIRED)),
    "twins": Bench(bench_twins, "name:s:attention | loss:±:MLM loss | accuracy:±1:MLM accuracy % | "
        "sst2:±1:SST-2 after", common.COMPARE | dict(data_dir=REQUIRED))}
main = functools.partial(common.run_command, "attention", __doc__, BENCHES)

if __name__ == "__main__":
    main()
