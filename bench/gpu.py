"""One GPU: attention, training steps, words per second. runs/gpu.sh has all.

    python -m bench.gpu kernels         or mfu, words

A time is the mean of calls in a row between two waits for the GPU: as in training, the host may be
ahead of it.

Notation:
    B batch   H heads   L positions   n hash functions   r hyperplanes   m buckets
    MFU operations of the model per second, in percent of what the GPU can do
"""

import functools
import itertools
import tempfile
import time
from pathlib import Path

import torch

import pretrain
from bench import attention, harness, training
from model import PRESETS
from support.log import count_operations, measure_gpu
from support.common import find_device
from tokenizer import FIRST_WORD_ID

VOCABULARY = 30_522  # of BERT
YES_NO = {True: "yes", False: "no"}


def time_on_gpu(function, calls):
    """Return the milliseconds of a call, and the MiB on the GPU at their peak, None without it."""
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
    peak = torch.cuda.max_memory_allocated() / 2**20 if is_gpu else None
    return ms, peak


# Attention by length

KERNELS = """
    dtype            | dtype      | s
    vectors          | data       | s
    L                | L          | ,
    B                | B          | ,
    dense, ms        | dense      | .1f
    LSH, blocks, ms  | blocks     | .1f
    LSH, flex, ms    | flex       | .1f
    LSH, literal, ms | literal    | .1f
    dense, MiB       | dense_mib  | ,.0f
    blocks, MiB      | blocks_mib | ,.0f
    flex, MiB        | flex_mib   | ,.0f
"""


def bench_kernels(args, *, heads=12, positions=32_768, calls=10,
                  lengths=(512, 2048, 8192, 16_384, 32_768, 65_536)):
    """Time attention, forward and backward with hashing: heads of 64, r 8, m 256, n 1."""
    device = find_device("auto")
    # drawn on the CPU: the same hyperplanes on every device
    draw = [part.to(device) for part in attention.draw_functions(heads)]
    torch.manual_seed(0)
    dtypes = ("bfloat16", "float32")
    for dtype, data, L in itertools.product(dtypes, ("random", "64 clusters"), lengths):
        if dtype == "float32" and L > 16_384:  # without flash attention, dense takes too long
            continue
        # as many positions in a batch at every length
        B = max(positions // L, 1)
        # queries, keys, values, and the gradient of the output
        x = torch.randn(4, B, heads, L, 64, device=device)
        if data == "64 clusters":  # queries and keys around 64 points: their buckets are uneven
            centers = torch.randn(64, 64, device=device)
            cluster = torch.randint(64, (2, B, heads, L), device=device)
            x[:2] = centers[cluster] + 0.1 * x[:2]
        q, k, v, cotangent = x.to(getattr(torch, dtype))
        inputs = [part.requires_grad_() for part in (q, k, v)]
        impls = {"dense": "kernel", "blocks": "blocks"}
        if q.is_cuda:  # FlexAttention has no backward pass on a CPU
            impls["flex"] = "flex"
        if L <= 2048:  # the literal formula holds matrices of L x L
            impls["literal"] = "dense"
        # None: a column of the table even where FlexAttention cannot run
        row = dict(dtype=dtype, data=data, L=L, B=B, flex=None, flex_mib=None)
        # the inputs are no part of what a call needs
        before = torch.cuda.memory_allocated() / 2**20
        for name, impl in impls.items():
            call = functools.partial(attention.run_passes, impl, *inputs, draw, cotangent)
            row[name], peak = time_on_gpu(call, calls)
            row[f"{name}_mib"] = None if peak is None else peak - before
        yield row


# Training steps

MFU = """
    model                | name     | s
    batch                | batch    | ,
    compiled             | compiled | s
    ms per step          | ms       | .1f
    positions per second | tokens   | ,.0f
    MFU %                | mfu      | .1f
    GiB                  | gib      | .1f
"""
BERT = "Hugging Face BERT, MLM"


def bench_mfu(args, *, preset="hashformer", batches=(64, 16), compiles=(True, False), calls=10):
    """Time a training step of Proj, Shuffle+Random, beside BERT of Hugging Face Transformers.

    MFU counts the operations of the encoder, and those of BERT's logits, at all positions.
    """
    shape = PRESETS[preset]
    words = harness.made_up_words(VOCABULARY)
    device = find_device("auto")
    dtype = "bfloat16" if torch.cuda.is_available() else "float32"
    names = ("Proj, Shuffle+Random", BERT)
    for name, B, is_compiled in itertools.product(names, batches, compiles):
        torch.compiler.reset()  # else a second batch size is compiled for all sizes
        # any words take as long
        ids = torch.randint(FIRST_WORD_ID, VOCABULARY, (B, shape["length"]))
        model = harness.build_model(words, preset, device).train()
        operations = count_operations(model)  # of a position
        if name == BERT:  # it has the same encoder, so the same operations
            model = training.build_transformers_model(shape, VOCABULARY)
            if model is None:  # Transformers is not installed
                return
            model.to(device)
            if is_compiled:
                model.compile()
            # logits: a multiplication and an addition, once forward and twice backward
            operations += 6 * shape["width"] * VOCABULARY
            step = training.objective_step(model, "mlm", ids, dtype, training.loss_by_transformers)
        else:
            if is_compiled:
                model.encode = torch.compile(model.encode)  # as in pretrain.py
            step = training.objective_step(model, "sr", ids, dtype)
        ms, peak = time_on_gpu(step, calls)
        tokens = 1000 * B * shape["length"] / ms
        row = dict(name=name, batch=B, compiled=YES_NO[is_compiled], ms=ms, tokens=tokens,
                   gib=None, mfu=None)
        if peak is not None:
            row["gib"] = peak / 1024
            numbers = measure_gpu(tokens * operations, "bfloat16")
            if "mfu" in numbers:  # not where the peak of the GPU is unknown
                row["mfu"] = 100 * numbers["mfu"]
        yield row


# Words per second

WORDS = """
    model                  | name     | s
    compiled               | compiled | s
    --workers              | workers  | s
    words per second, from | low      | ,.0f
    to                     | high     | ,.0f
"""


MODELS = {  # name -> flags of pretrain.py
    "tiny, B 32": "",
    "4 layers of 256, B 256": "--layers 4 --width 256 --batch 256 --micro 256",
}


def bench_words(args, *, models=MODELS, num_words=20_000, steps=400, compiles=(True, False)):
    """Measure pretrain.py, which makes batches in its own process, or in four workers."""
    # made-up words, so that no text has to be at hand
    words = harness.made_up_words(num_words)
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder, "text.txt")
        text.write_text(" ".join(100 * words))
        cases = itertools.product(models, compiles, (0, 4))
        for number, (name, is_compiled, workers) in enumerate(cases):
            torch.compiler.reset()
            # a folder for each run, which else would resume the one before
            out = f"{folder}/{number}"
            choice = "--compile" if is_compiled else "--no-compile"
            harness.run_main(pretrain.main, [
                *models[name].split(), choice, "--workers", workers, "--steps", steps,
                "--data", text, "--cache", f"{folder}/cache", "--out", out])
            rows = [row for row in harness.read_log(out) if "words_per_s" in row]
            speeds = [row["words_per_s"] for row in rows[len(rows) // 2:]]  # the first ones compile
            yield dict(name=name, compiled=YES_NO[is_compiled], workers=str(workers),
                       low=min(speeds), high=max(speeds))


TABLES = {  # name -> function that yields the rows, columns, flags and their defaults
    "kernels": (bench_kernels, KERNELS, {}),
    "mfu": (bench_mfu, MFU, {}),
    "words": (bench_words, WORDS, {}),
}


if __name__ == "__main__":
    harness.main("bench.gpu", TABLES, __doc__)
