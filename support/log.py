"""The log of a run of pretrain.py: rows of log.jsonl, its speed, and lines on the screen.

    log.restart_clock(step)
    log.write_step(step, dict(loss=1.09, lr=1e-3))          with its speed
    log.write_evaluation(step, dict(eval_loss=1.08))
    log.show("text")

Out of scope: what the texts say (reports.py), the figure of the losses (plot.py).
"""

import contextlib
import json
import math
import time
from pathlib import Path

import torch

from support.common import InputError, writing
from support.reports import describe_progress, describe_result

SHOW_EVERY = 30  # seconds between lines of progress
PEAK_TFLOPS = {  # of dense products in bfloat16, by the name that PyTorch gives a GPU
    "NVIDIA A100-SXM4-40GB": 312,
    "NVIDIA A100-SXM4-80GB": 312,
    "NVIDIA H100 80GB HBM3": 989,
    "NVIDIA H200": 989,
}


class Log:
    """log.jsonl, the clock, and what is printed. All ranks call it, and rank 0 alone writes.

    Args:
        folder: str, of log.jsonl.
        num_steps: int, --steps, for the time that is left.
        words_per_step: float, of all ranks.
        model: model.Model, whose operations are counted on a GPU.
        ranks: common.Ranks.
        runtime: common.Runtime, device and dtype.
    """

    def __init__(self, folder, num_steps, words_per_step, model, ranks, runtime):
        self.path = Path(folder, "log.jsonl")
        self.num_steps = num_steps
        self.words_per_step = words_per_step
        self.model = model
        self.ranks = ranks
        self.runtime = runtime
        self.last_shown = time.perf_counter()
        self.clock = None  # the time and the step of restart_clock, which comes first
        self.clock_step = None

    def show(self, text):
        """Print text. What ranks other than the first print goes nowhere, see pretrain.start."""
        with contextlib.suppress(OSError):  # a reader that has left does not end a run
            print(text, flush=True)

    def cut(self, size):
        """Make an empty log.jsonl, or cut it to its first bytes."""
        with open(self.path, "a") as file:
            file.truncate(min(size, file.tell()))

    def write_step(self, step, numbers):
        """Write a training step and its speed, and print a line every 30 seconds."""
        seconds = (time.perf_counter() - self.clock) / (step - self.clock_step)  # of a step
        words_per_s = self.words_per_step / seconds
        numbers = numbers | dict(words_per_s=words_per_s)
        if self.runtime.device.type == "cuda":
            operations_per_s = words_per_s * count_operations(self.model) / self.ranks.world
            numbers |= measure_gpu(operations_per_s, self.runtime.dtype)
        self.write(step, numbers)
        if time.perf_counter() - self.last_shown >= SHOW_EVERY:
            self.show(describe_progress(numbers, step, self.num_steps, seconds))
            self.last_shown = time.perf_counter()

    def write_evaluation(self, step, result):
        """Write and print an evaluation, a dict."""
        self.write(step, result)
        self.show(f"step {step:,}: {describe_result(result)}")

    def write(self, step, numbers):
        """Append a row to log.jsonl, with six digits. All ranks have the same numbers, a dict."""
        row = dict(step=step)
        for name, value in numbers.items():
            if not math.isfinite(value):
                raise InputError(f"--lr: expected finite numbers in step {step}, got {name} "
                                 f"{value}. The checkpoints beside {self.path} are of earlier "
                                 "steps. Try a lower --lr.")
            row[name] = float(f"{value:.6g}")
        if self.ranks.is_first:
            with writing(self.path), open(self.path, "a") as file:
                file.write(json.dumps(row) + "\n")
        self.restart_clock(step)

    def restart_clock(self, step):
        """Measure speed from here: the first step, or the end of a pause to log or save."""
        self.clock = time.perf_counter()
        self.clock_step = step


def measure_gpu(operations_per_s, dtype):
    """Return what the log has on a GPU: TFLOP/s, the peak of memory in GiB, and MFU.

    MFU, model FLOPs utilization, is TFLOP/s as a share of the device's peak, where that is known.
    """
    tflops = operations_per_s / 1e12
    numbers = dict(tflops=tflops, peak_gib=torch.cuda.max_memory_allocated() / 2**30)
    peak = PEAK_TFLOPS.get(torch.cuda.get_device_name())
    if peak is not None and dtype == "bfloat16":
        numbers["mfu"] = tflops / peak
    return numbers


def count_operations(model):
    """Return the operations of a training step for each word of a full sequence.

    Each layer costs 6 operations per weight of its matrices, 2 forward and 4 backward, and 12·d per
    attended position (Chowdhery et al. 2022, PaLM, appendix B). A multiplication with its addition
    counts as two. The embedding, the head, and the pairs of LSH attention are not counted. An item
    has m positions, and each of them attends to m · length.
    """
    c = model.config
    m = c.hashes if model.inputs.embedding.is_stacked else 1
    weights = sum(p.numel() for p in model.layers.parameters() if p.ndim == 2)
    attended = m * c.length if c.attn == "full" else 0  # positions
    return m * (6 * weights + 12 * c.layers * c.width * attended)
