"""BERT-LSH: LSH attention beside dense attention in time, work and memory, and in what it learns.

    python -m bench.attention kernel (attention, flops)
    python -m bench.attention twins --data_dir glue/      an hour
    python -m bench.attention trained --runs out/lookup-bpe-mlm*

Paper map:    [BL Table 1] attention_flops   [BL Figure 1] bench_flops
Notation:     B batch   H heads   L positions   e head size   n hash functions   r hyperplanes   m hash buckets
"""

import contextlib, functools, itertools, math, os, statistics, sys
from unittest import mock

import torch
import torch.nn.functional as F

import attention
import model
from bench import common
from bench.common import REQUIRED, Bench, Stopwatch, compare, load_run, run_name
from data.corpus import python_files, python_texts

DENSE = F.scaled_dot_product_attention


def random_qkv(*shape):
    """Return random queries, keys and values (B, H, L, e) that need gradients."""
    return [torch.randn(*shape, requires_grad=True) for _ in range(3)]


def hash_both(q, k, draw, buckets=256):
    """Return the buckets (B, H, n, L) of queries and keys under a draw of hyperplanes."""
    return [attention.simhash(x, *draw, buckets) for x in (q, k)]


def permute_buckets(h):
    """Return buckets (B, H, n, L) at random positions: as many pairs collide, none because of its vectors."""
    return h.gather(-1, torch.rand(h.shape, device=h.device).argsort(-1))


def bench_kernel(args, *, shapes=((64, 2, 128), (16, 12, 512), (4, 12, 1024)), rounds=5):
    """Forward and backward on the CPU in bfloat16: torch's kernel against full_attention's three lines."""
    rows = []
    for B, H, L in shapes:
        q, k, v = (torch.randn(B, L, H, 64, dtype=torch.bfloat16).transpose(1, 2).requires_grad_() for _ in range(3))
        cotangent = torch.randn_like(q)
        watch = Stopwatch({"ours": lambda: attention.full_attention(q, k, v).backward(cotangent),
                           "kernel": lambda: DENSE(q, k, v).backward(cotangent)}, rounds)
        rows.append(dict(name=f"B {B}, H {H}, L {L}, e 64", **watch.ms(), ratio=watch.ratio("kernel", "ours")))
    return rows


def attention_flops(length, heads, width, bands, buckets, functions=1):
    """Count the operations of L, H, e, r, m, n as [BL Table 1] does, two for a multiply-add.

    Returns: dict: full, of q kᵀ; hashing, of queries and keys; dots, the pairs i <= j of random vectors that collide
        in all heads, in expectation; pairs, the operations of their scores.
    """
    dots = heads * length * (length + 1) / 2 * attention.collision_probability(math.pi / 2, bands, buckets, functions)
    return dict(full=2 * heads * length**2 * width, dots=dots, pairs=2 * width * dots,
                hashing=2 * heads * 2 * length * width * bands * functions)


def bench_flops(args, *, rounds=301):
    """[BL Table 1 and Figure 1]: one sequence of 10 positions, two heads of 64; times on this machine."""
    draw = attention.draw_hyperplanes(2, 1, 2, 64, 64, torch.Generator().manual_seed(0))
    q, k, v = torch.randn(3, 1, 2, 10, 64)
    cost, dots = attention_flops(10, 2, 64, 2, 64), []
    for _ in range(100):
        dots.append(attention.collisions(*hash_both(*torch.randn(2, 1, 2, 10, 64), draw, 64)).triu().sum().item())
    times = Stopwatch({"full": lambda: attention.full_attention(q, k, v),
                       "lsh": lambda: attention.lsh_attention(q, k, v, *hash_both(q, k, draw, 64))}, rounds).ms()
    full, hashing, pairs = (cost[key] / 1e3 for key in ("full", "hashing", "pairs"))
    rows = [("KFLOPs, hashing alone", full, "25.60", hashing, "10.24"),
            ("KFLOPs, with the dot products", full, "—", hashing + pairs, "—"),
            ("dot products, by law", 200, "200", cost["dots"], "28.5"),
            ("dot products, mean of 100 draws", 200, "200", statistics.mean(dots), "28.5"),
            ("microseconds, the whole attention", 1000 * times["full"], "12.2 (q kᵀ)", 1000 * times["lsh"],
             "337 (scores)"),
            *((f"Figure 1: KFLOPs of hashing, n {n}, r {r}", full, None,
               attention_flops(10, 2, 64, r, 64, n)["hashing"] / 1e3) for n in (1, 2, 4) for r in (1, 2, 4, 8))]
    return [dict(zip(("name", "full", "paper_full", "lsh", "paper"), row)) for row in rows]


def lsh_all_pairs(q, k, v):
    """Return LSH attention over all colliding pairs with 8 hyperplanes and 256 buckets, hashing included."""
    draw = attention.draw_hyperplanes(q.shape[1], 1, 8, q.shape[3], 256, torch.Generator().manual_seed(0))
    return attention.lsh_attention(q, k, v, *hash_both(q, k, draw), pairs="all")


def memory_of_passes(attend, length):
    """Return the MiB that forward and backward of attend(q, k, v) add at most, in a process of its own (Linux)."""
    def read(key):
        with open("/proc/self/status") as file:
            return next(int(line.split()[1]) for line in file if line.startswith(key))

    for L in (64, length):  # in the first pass the libraries allocate what they need once
        q, k, v = random_qkv(1, 2, L, 64)
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")  # the peak starts anew
        before = read("VmRSS")
        attend(q, k, v).sum().backward()
        peak = read("VmHWM") - before
    return peak / 2**10


def peak_memory(attend, length):
    """Return memory_of_passes in a new process, or None where the system does not count it."""
    if os.path.exists("/proc/self/clear_refs"):
        return common.run_in_new_process(memory_of_passes, attend, length)


def bench_attention(args, *, positions=16_384, lengths=(64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 65536),
                    rounds=None):
    """Forward and back, float32, two heads of 64, 16,384 positions a batch; r 8, m 256, n 1, with hashing."""
    rows, generator = [], torch.Generator().manual_seed(0)
    # new hyperplanes for every run: how evenly one draw fills the buckets is luck
    draws = [attention.draw_hyperplanes(2, 1, 8, 64, 256, generator) for _ in range(16)]
    for L in lengths:
        B = max(positions // L, 1)
        q, k, v = random_qkv(B, 2, L, 64)
        cotangent = torch.randn_like(q)
        hashed = [hash_both(q, k, draw) for draw in draws]
        permuted = itertools.cycle([[permute_buckets(h) for h in pair] for pair in hashed])

        def time_of(attend, use_backward=True):
            def run():
                with torch.set_grad_enabled(use_backward):
                    out = attend()
                return torch.autograd.grad(out, (q, k, v), cotangent) if use_backward else out
            return run

        def lsh(pairs="all", is_random=False):
            planes = itertools.cycle(draws)

            def attend():
                buckets = next(permuted) if is_random else hash_both(q, k, next(planes))
                return attention.lsh_attention(q, k, v, *buckets, pairs=pairs)
            return attend

        functions = {"ours": time_of(lsh()), "upper": time_of(lsh("upper")), "random": time_of(lsh(is_random=True)),
                     "forward": time_of(lsh(), False)}
        if L <= 16_384:
            functions |= dict(dense=time_of(lambda: DENSE(q, k, v)),
                              dense_forward=time_of(lambda: DENSE(q, k, v), False))
        num_pairs = sum(count_pairs(*pair) for pair in hashed) / len(draws)
        row = dict(L=L, share=100 * num_pairs / (2 * B * L * L), dense_gflop=14 * 64 * 2 * B * L * L / 1e9,
                   gflop=(14 * 64 * num_pairs + 4 * 64 * 8 * 2 * B * L) / 1e9,
                   impl=attention.select_implementation(*hashed[0], pairs="all")[0],
                   impl_upper=attention.select_implementation(*hashed[0])[0])
        watch = Stopwatch(functions, rounds or (9 if L <= 2048 else 3 if L > 16_384 else 5))
        row |= watch.ms()
        if "dense" in functions:
            row |= dict(ratio=watch.ratio("dense", "ours"), ratio_upper=watch.ratio("dense", "upper"),
                        ratio_forward=watch.ratio("dense_forward", "forward"), dense_memory=peak_memory(DENSE, L))
        rows.append(row | dict(memory=peak_memory(lsh_all_pairs, L)))
        print(rows[-1], file=sys.stderr, flush=True)
    return rows


def count_pairs(hq, hk):
    """Return how many pairs of queries and keys collide, from the sizes of the buckets; n 1, m 256."""
    sizes = [[x.bincount(minlength=256) for x in h.view(-1, h.shape[-1])] for h in (hq, hk)]
    return sum(int(a @ b) for a, b in zip(*sizes))


def trained_layers(folder, sequences=8):
    """Yield number, layer, q, k, v (B, H, L, e) of a trained model's layers on text, the docstrings of this Python."""
    net, tokenizer, _ = load_run(folder)
    ids, length = [], net.config.length
    for _, path in sorted(python_files().items()):
        for text in python_texts(path):
            ids += tokenizer.ids(tokenizer.split(text)[0]).tolist()
        if len(ids) >= sequences * length:
            break
    net.set_codes(torch.from_numpy(tokenizer.codes()))
    x = net.embed_inputs(torch.tensor(ids[:sequences * length]).view(sequences, length)).detach()
    for number, layer in enumerate(net.layers, 1):
        yield number, layer, *layer.project(x).detach()
        x = layer(x).detach()


def bench_trained(args, *, rounds=5, sequences=8):
    """Buckets of trained queries and keys: how many pairs, how much of the mass, which of the best keys."""
    rows = []
    for folder in args.runs:
        for (number, _, *qkv), bands in itertools.product(trained_layers(folder, sequences), (2, 8)):
            q, k, v = (x.contiguous().requires_grad_() for x in qkv)
            (_, H, L, e), generator = q.shape, torch.Generator().manual_seed(0)
            hq, hk = hash_both(q, k, attention.draw_hyperplanes(H, 1, bands, e, 256, generator))
            with torch.no_grad():
                weights = (q @ k.transpose(-2, -1) / math.sqrt(e)).softmax(-1)
                best = weights.topk(min(16, L)).indices
                row = dict(name=f"{run_name(folder)}, layer {number}, r {bands}", L=L)
                for suffix, pair in (("", (hq, hk)), ("_random", map(permute_buckets, (hq, hk)))):
                    is_collision = attention.collisions(*pair)  # (B, H, L, L)
                    row |= {f"share{suffix}": 100 * is_collision.float().mean().item(),
                            f"mass{suffix}": 100 * (weights * is_collision).sum(-1).mean().item(),
                            f"recall{suffix}": 100 * is_collision.gather(-1, best).float().mean().item()}
            row |= dict(largest=100 * hk.flatten(0, 2)[0].bincount().max().item() / L,
                        impl=attention.select_implementation(hq, hk, pairs="all")[0])
            watch = Stopwatch({
                "ours": lambda: attention.lsh_attention(q, k, v, hq, hk, pairs="all").sum().backward(),
                "dense": lambda: DENSE(q, k, v).sum().backward()}, rounds)
            rows.append(row | watch.ms() | dict(ratio=watch.ratio("dense", "ours")))
    return rows


CONTROL = "as many random pairs"  # the buckets, at random positions
TWINS = {"dense": ["--attn", "full"], "LSH, r 2, m 256": ["--lsh_bands", 2], CONTROL: ["--lsh_bands", 2]}


def use_random_buckets():
    """Return a context in which models permute their hash buckets: the control experiment."""
    simhash = model.simhash
    return mock.patch.object(model, "simhash", lambda *args: permute_buckets(simhash(*args)))


def train_twin(job):
    """Pre-train and fine-tune one twin; return its scores."""
    with use_random_buckets() if job[0] == CONTROL else contextlib.nullcontext():
        row = common.train_variant(job)
    return dict(loss=row["eval_loss"], accuracy=100 * row["rec@1"], sst2=row["sst2"])


def bench_twins(args, *flags):
    """BERT-LSH, its dense twin, and a control that attends to as many keys at random: MLM, then SST-2."""
    tuning = ["--data_dir", args.data_dir, "--cache", args.cache, "--dtype", "bfloat16"]
    return compare(args, TWINS, "--preset", "bert-lsh", "--vocab", 8_192, "--length", 128, "--batch", 32,
                   "--dropout", 0, "--dtype", "bfloat16", *flags, train=train_twin,
                   after=functools.partial(common.finetune_run, tasks=dict(sst2=1), flags=tuning))


BENCHES = {
    "kernel": Bench(bench_kernel, "name:s:bfloat16, CPU | kernel:.1f:kernel, ms | ours:.1f:ours, ms | "
                    "ratio:.1f:faster"),
    "attention": Bench(bench_attention, "L:,:L | share:.2f:pairs that collide % | dense:,.0f:dense, ms | "
                       "ours:,.0f:all, ms | ratio:.1f:× dense | upper:,.0f:upper, ms | ratio_upper:.1f:× dense | "
                       "ratio_forward:.1f:all, forward alone, × dense | random:,.0f:random buckets, ms | "
                       "dense_gflop:,.1f:dense, GFLOP | gflop:,.1f:all, GFLOP | dense_memory:,.0f:dense, MiB | "
                       "memory:,.0f:all, MiB | impl:s:all by | impl_upper:s:upper by"),
    "flops": Bench(bench_flops, "name:s: | full:,.2f:full | paper_full:s:paper | lsh:,.2f:BERT-LSH | paper:s:paper"),
    "trained": Bench(bench_trained, "name:s:model | L:,:L | share:.1f:pairs that collide % | "
                     "mass:.1f:of attention's mass % | mass_random:.1f:at random | recall:.1f:of the 16 best keys % | "
                     "recall_random:.1f:at random | largest:.0f:largest bucket, % of a row | dense:,.1f:dense, ms | "
                     "ours:,.1f:ours, ms | ratio:.1f:faster | impl:s:by", dict(runs=REQUIRED)),
    "twins": Bench(bench_twins, "name:s:attention | loss:±:MLM loss | accuracy:±1:MLM accuracy % | sst2:±1:SST-2 after",
                   common.COMPARE | dict(data_dir=REQUIRED))}
main = functools.partial(common.run_command, "attention", __doc__, BENCHES)

if __name__ == "__main__":
    main()
