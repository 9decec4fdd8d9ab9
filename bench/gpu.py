"""One GPU in six minutes: attention, training steps, words per second, ranks.

    python -m bench.gpu --json results/gpu.json
    python -m bench.gpu --quick                 tiny sizes in seconds, also without a GPU

Each of the four tables has a share of the six minutes, and begins no row after it. A time is the
mean of calls in a row between two waits for the GPU: as in training, the host may be ahead of it.
The JSON file is written with each row, so a run that breaks off keeps what it has.

Notation:
    B batch   H heads   L positions
    MFU operations of the model per second, in percent of what the GPU can do
"""

import argparse
import functools
import itertools
import shlex
import sys
import tempfile
import time
from argparse import Namespace
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

import attention
import pretrain
from bench import harness, training
from common import InputError, find_device, read_json, run_script, write_json
from model import PRESETS, count_operations
from tokenizer import FIRST_WORD_ID

FULL = Namespace(
    calls=10, compiled=("yes", "no"),
    positions=32_768, heads=12, lengths=(512, 2048, 8192, 16_384, 32_768, 65_536),
    preset="hashformer", batches=(64, 16), rows=30_522,  # BERT's vocabulary
    words=20_000, steps=400, workers=(0, 4),
    models={
        "tiny, B 32": [],
        "4 layers of 256, B 256": ["--layers", 4, "--width", 256, "--batch", 256, "--micro", 256],
    })
QUICK = Namespace(
    calls=1, compiled=("no",),
    positions=64, heads=2, lengths=(32,),
    preset="tiny", batches=(2,), rows=300,
    words=90, steps=20, workers=(0, 1),
    models={"1 layer, B 2": ["--layers", 1, "--batch", 2]})


def measure(function, calls):
    """Return the milliseconds of a call, and the MiB on the GPU at their peak."""
    is_gpu = torch.cuda.is_available()
    for _ in range(3):  # the first ones compile and allocate memory
        function()
    if is_gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    for _ in range(calls):
        function()
    if is_gpu:
        torch.cuda.synchronize()  # a call returns before the GPU is done
    # a mean: calls overlap, so that none of them has a time of its own
    ms = 1000 * (time.perf_counter() - start) / calls
    return ms, torch.cuda.max_memory_allocated() / 2**20


# Attention by length

ATTENTION = """
    dtype         s       dtype
    data          s       vectors
    L             ,       L
    B             ,       B
    kernel        .1f     dense, ms
    blocks        .1f     LSH, blocks, ms
    flex          .1f     LSH, flex, ms
    sketch        .1f     first sketch of flex, ms
    dense         .1f     LSH, literal, ms
    kernel_mib    ,.0f    dense, MiB
    blocks_mib    ,.0f    blocks, MiB
    flex_mib      ,.0f    flex, MiB
"""


def bench_attention(size):
    """Time attention, forward and backward with hashing: heads of 64, r 8, m 256, n 1."""
    device = find_device("auto")
    # drawn on the CPU: the same hyperplanes on every device
    generator = torch.Generator().manual_seed(0)
    draw = attention.draw_hyperplanes(size.heads, 1, 8, 64, 256, generator)
    planes, coef = [part.to(device) for part in draw]
    dtypes = ("bfloat16", "float32")
    for dtype, data, L in itertools.product(dtypes, ("random", "64 clusters"), size.lengths):
        if dtype == "float32" and L > 16_384:  # without flash attention, dense takes too long
            continue
        # as many positions in a batch at every length
        B = max(size.positions // L, 1)
        # queries, keys, values, and the gradient of the output
        x = torch.randn(4, B, size.heads, L, 64, device=device)
        if data == "64 clusters":  # queries and keys around 64 points: their buckets are uneven
            centers = torch.randn(64, 64, device=device)
            cluster = torch.randint(64, (2, B, size.heads, L), device=device)
            x[:2] = centers[cluster] + 0.1 * x[:2]
        q, k, v, cotangent = x.to(getattr(torch, dtype))
        inputs = [part.requires_grad_() for part in (q, k, v)]

        def both_passes(way):
            if way == "kernel":
                out = F.scaled_dot_product_attention(q, k, v)
            else:
                hq = attention.simhash(q, planes, coef, 256)
                hk = attention.simhash(k, planes, coef, 256)
                out = attention.lsh_attention(q, k, v, hq, hk, impl=way)
            # grad, not backward, which would add up gradients in q, k and v
            torch.autograd.grad(out, inputs, cotangent)

        ways = ["kernel", "blocks"]
        if q.is_cuda:  # FlexAttention has no backward pass on a CPU
            ways.append("flex")
        if L <= 2048:  # the literal formula holds matrices of L x L
            ways.append("dense")
        row = dict(dtype=dtype, data=data, L=L, B=B, flex=None, flex_mib=None)
        # the inputs are no part of what a call needs
        before = torch.cuda.memory_allocated() / 2**20
        for way in ways:
            ms, peak = measure(functools.partial(both_passes, way), size.calls)
            row[way] = ms
            row[f"{way}_mib"] = peak - before
        yield row


# Training steps

STEPS = """
    name        s       model
    batch       ,       B
    compiled    s       compiled
    ms          .1f     ms per step
    tokens      ,.0f    positions per second
    mfu         .1f     MFU %
    gib         .1f     GiB
"""
BERT = "Hugging Face BERT, MLM"


def bench_steps(size):
    """Time a training step of Proj, Shuffle+Random, beside BERT of Hugging Face Transformers.

    MFU counts the operations of the encoder, and those of BERT's logits, at all positions.
    """
    shape = PRESETS[size.preset]
    cases = itertools.product(("Proj, Shuffle+Random", BERT), size.batches, size.compiled)
    for name, B, compiled in cases:
        model = build_model(size, compiled)
        operations = count_operations(model)  # of a position
        if name == BERT:
            device = model.device
            model = training.build_transformers_model(shape, size.rows)
            if model is None:
                return
            model.to(device)
            if compiled == "yes":
                model.compile()
            # a multiplication and an addition, once forward and twice backward
            operations += 6 * shape["width"] * size.rows
            step = build_step(model, size, B, "mlm", training.loss_by_transformers)
        else:
            step = build_step(model, size, B)
        ms, peak = measure(step, size.calls)
        tokens = 1000 * B * shape["length"] / ms
        row = dict(name=name, batch=B, compiled=compiled, ms=ms, tokens=tokens, gib=peak / 1024)
        row["mfu"] = percent_of_peak(tokens * operations)
        yield row


def percent_of_peak(rate):
    """Return operations per second in percent of this GPU's peak; None: the peak is not known."""
    if not torch.cuda.is_available():
        return None
    peak = pretrain.PEAK_TFLOPS.get(torch.cuda.get_device_name())
    if peak is None:
        return None
    return 100 * rate / (1e12 * peak)


def build_model(size, compiled, rank=0):
    """Return an untrained Model of the preset on the device of a rank."""
    torch.compiler.reset()  # else a second batch size is compiled for all sizes
    words = harness.made_up_words(size.rows)
    model = harness.build_model(words, size.preset, find_device("auto", rank)).train()
    if compiled == "yes":
        model.encode = torch.compile(model.encode)  # as in pretrain.py
    return model


def build_step(model, size, B, objective="sr", loss=None):
    """Return a function that takes a training step on B sequences, which are on the device."""
    # any words take as long
    ids = torch.randint(FIRST_WORD_ID, size.rows, (B, PRESETS[size.preset]["length"]))
    dtype = "bfloat16" if torch.cuda.is_available() else "float32"
    return training.objective_step(model, objective, ids, dtype, loss)


# Words per second

WORDS = """
    name        s       model
    compiled    s       compiled
    workers     s       --workers
    low         ,.0f    words per second, from
    high        ,.0f    to
"""


def bench_words(size):
    """Measure pretrain.py, which makes batches in its own process, or in four workers."""
    # made-up words, so that no text has to be at hand
    words = harness.made_up_words(size.words)
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder, "text.txt")
        text.write_text(" ".join(100 * words))
        cases = itertools.product(size.models, size.compiled, size.workers)
        for number, (name, compiled, workers) in enumerate(cases):
            torch.compiler.reset()
            # a folder for each run, which else would resume the one before
            out = f"{folder}/{number}"
            choice = dict(yes="--compile", no="--no-compile")[compiled]
            harness.run_main(pretrain.main, [
                *size.models[name], choice, "--workers", workers, "--steps", size.steps,
                "--data", text, "--cache", f"{folder}/cache", "--out", out])
            rows = [row for row in harness.read_log(out) if "words_per_s" in row]
            speeds = [row["words_per_s"] for row in rows[len(rows) // 2:]]  # the first ones compile
            yield dict(name=name, compiled=compiled, workers=str(workers),
                       low=min(speeds), high=max(speeds))


# Ranks

RANKS = """
    ranks      ,       ranks
    backend    s       backend
    batch      ,       B, all ranks
    ms         .1f     ms per step
    tokens     ,.0f    positions per second
"""


def bench_ranks(size):
    """Time a training step of one rank, and of two, which add up their gradients."""
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    worlds = [1]
    if torch.cuda.device_count() > 1:
        worlds.append(2)
    for world in worlds:
        B = world * size.batches[0]
        with tempfile.TemporaryDirectory() as folder:
            if world == 1:  # in this process, as a new one takes seconds to start
                time_rank(0, world, folder, size)
            else:
                torch.multiprocessing.spawn(time_rank, (world, folder, size), world)
            ms = read_json(f"{folder}/ms.json")["ms"]
        tokens = 1000 * B * PRESETS[size.preset]["length"] / ms
        yield dict(ranks=world, backend=backend, batch=B, ms=ms, tokens=tokens)


def time_rank(rank, world, folder, size):
    """Time a training step as a rank of several. The first one writes it to FOLDER/ms.json."""
    # before the ranks connect: find_device sets the device of the rank
    model = build_model(size, size.compiled[0], rank)
    backend = "gloo" if model.device.type == "cpu" else "cpu:gloo,cuda:nccl"  # as in pretrain.py
    dist.init_process_group(
        backend, init_method=f"file://{folder}/ranks", rank=rank, world_size=world)
    step = build_step(DistributedDataParallel(model), size, size.batches[0])
    ms, _ = measure(step, size.calls)
    # a process that was spawned returns nothing
    if rank == 0:
        write_json(f"{folder}/ms.json", dict(ms=ms))
    dist.destroy_process_group()


# All tables

PARTS = {  # name -> function(size) that yields rows, columns, seconds
    "attention": (bench_attention, ATTENTION, 140),
    "steps": (bench_steps, STEPS, 110),
    "words": (bench_words, WORDS, 70),
    "ranks": (bench_ranks, RANKS, 30),
}


def format_tables(result):
    """Return dict, marker -> markdown, of the content of results/gpu.json."""
    tables = {}
    for name, (_, columns, _) in PARTS.items():
        table = harness.markdown(result[name], columns)
        tables[f"gpu-{name}"] = f"{table}\n{harness.caption(result)}"
    return tables


def build_parser():
    """Return the parser of this file's flags."""
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--json", metavar="FILE", help="write the tables to this file as JSON")
    p.add_argument("--quick", action="store_true", help="tiny sizes, to try this without a GPU")
    return p


def run(argv):
    """Measure all tables and print them."""
    args = build_parser().parse_args(argv)
    size = QUICK if args.quick else FULL
    if not args.quick and not torch.cuda.is_available():
        raise InputError("requires a GPU. Use --quick to try it without one.")
    command = shlex.join(["python", "-m", "bench.gpu", *argv])
    result = dict(command=command, machine=harness.describe_machine())
    # all parts now, so that the file of a run that broke off has its tables
    result |= {name: [] for name in PARTS}
    for name, (function, _, seconds) in PARTS.items():
        start = time.perf_counter()
        for row in function(size):
            print(row, file=sys.stderr, flush=True)
            result[name].append(row)
            # after each row: a borrowed machine may be taken away
            if args.json:
                write_json(args.json, result)
            if time.perf_counter() - start > seconds:
                print(f"{name}: no more rows after {seconds} s", file=sys.stderr)
                break
    print(*format_tables(result).values(), sep="\n")


def main(argv=None):
    """Measure as the command line says, or the list argv."""
    if argv is None:
        argv = sys.argv[1:]
    run_script("bench.gpu", run, argv)


if __name__ == "__main__":
    main()
