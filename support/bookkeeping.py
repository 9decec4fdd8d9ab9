"""A run of pretrain.py apart from training: checkpoints, log, speed, and what it prints.

    run = Run(args, ranks, runtime)       raises if --out holds another run
    run.add_data(data)                    raises if its words or hashes were others
    run.restore(model, optimizer)         continues where ckpt.pt ends
    run.log(dict(eval_loss=1.09))         a row of log.jsonl
    run.save("best.pt", model)

Out of scope: the file of a checkpoint (common.py), the figure of the losses (plot.py).
"""

import contextlib
import datetime
import json
import math
import shlex
import signal
import time
from pathlib import Path

import torch

from data.neighbors import CONTROL_NAMES, describe_neighbors
from model import count_operations, count_parameters
from support.common import InputError, load_checkpoint, save_checkpoint
from support.flags import DEFAULTS, identity
from support.plot import draw_losses
from tokenizer import FIRST_WORD_ID

NEAR_WORDS = 50_000  # the most frequent words, among which infer.py --near searches
SHOW_EVERY = 30  # seconds between lines of progress
PEAK_TFLOPS = {  # of dense products in bfloat16, by the name that PyTorch gives a GPU
    "NVIDIA A100-SXM4-40GB": 312,
    "NVIDIA A100-SXM4-80GB": 312,
    "NVIDIA H100 80GB HBM3": 989,
    "NVIDIA H200": 989,
}


class Run:
    """Where a run is, how far it has come, and its folder --out. Rank 0 alone prints and writes.

    Args:
        args: Namespace, all settings of pretrain.py.
        ranks: common.Ranks.
        runtime: common.Runtime.

    Attributes:
        args, ranks: as above.
        device, use_compile: those of runtime.
        dtype: str, of matrix products: that of runtime, or of the checkpoint with --dtype auto.
        step: int, optimizer steps that are done.
        best: float, the lowest eval_loss so far.
        identity: dict, what two processes must agree on to be one run: settings, words, hashes.
        saved: dict, the checkpoint that this run continues; {} for a new run.
        data: pretrain.Data.

    Raises:
        InputError: --out has a checkpoint of another run.
    """

    def __init__(self, args, ranks, runtime):
        self.args = args
        self.ranks = ranks
        self.device, self.dtype, self.use_compile = runtime
        self.folder = Path(args.out)
        self.log_path = self.folder / "log.jsonl"
        self.saved = {}
        if (self.folder / "ckpt.pt").exists():
            self.saved = load_checkpoint(args.out)
        self.identity = {}
        self.identify(identity(args))
        self.step = self.saved.get("step", 0)
        self.best = self.saved.get("best", math.inf)
        if args.dtype == "auto":
            self.dtype = self.saved.get("dtype", self.dtype)
        self.last_shown = time.perf_counter()

    def identify(self, facts):
        """Add facts, a dict, to the identity; InputError if those of the checkpoint differ."""
        self.identity |= facts
        if not self.saved:
            return
        old = DEFAULTS | self.saved["run"]  # an older run lacks a new setting
        changes = []
        for name, value in facts.items():
            if old.get(name) != value and name == "key":  # a secret
                changes.append("key differs")
            elif old.get(name) != value:
                changes.append(f"{name} was {old.get(name)} and is {value}")
        if "optimizer" not in self.saved:  # a copy of best.pt, or a checkpoint of finetune.py
            changes.append("it has no state of the optimizer")
        if changes:
            raise InputError(f"{self.folder}/ckpt.pt: expected a checkpoint of this run, got "
                             f"another: {'; '.join(changes)}. Use another --out. There --init_from "
                             f"{self.folder} starts from these weights, if sizes and hashes are "
                             "the same.")

    def add_data(self, data):
        """Keep the data, and add its words and hashes to the identity."""
        self.data = data
        facts = dict(corpus=data.corpus.meta["digest"])
        bloom_map = data.tokenizer.coder.bloom_map
        if bloom_map is not None:
            facts |= dict(alpha=bloom_map.alpha, bloom=bloom_map.checksum())
        self.identify(facts)

    def restore(self, model, optimizer):
        """Load weights and optimizer of the checkpoint, if any, and cut the log behind it."""
        if self.saved:
            model.load_state_dict(self.saved["model"])
            optimizer.load_state_dict(self.saved["optimizer"])
        self.ranks.wait()  # for the rank that prepares the corpus
        states = self.ranks.gather([self.step, self.dtype, self.identity])
        if any(state != states[0] for state in states):
            raise InputError("--out, --cache: expected a folder that all nodes see, got ranks that "
                             "differ in steps, data, hashes or dtypes.")
        if self.ranks.is_first:
            if self.step == 0:  # best.pt is of a run that ended before its first ckpt.pt
                (self.folder / "best.pt").unlink(missing_ok=True)
            # subtle: cut the rows after the checkpoint; those steps are logged again
            with open(self.log_path, "a") as file:
                file.truncate(min(self.saved.get("log_size", 0), file.tell()))

    def save(self, name, model, **more):
        """Write a checkpoint of the run as it is now. It resumes if `more` has the optimizer."""
        if self.ranks.is_first:
            save_checkpoint(
                f"{self.folder}/{name}", model, self.data.tokenizer.state(), run=self.identity,
                dtype=self.dtype, words=self.data.corpus.frequent(NEAR_WORDS), step=self.step,
                best=self.best, log_size=self.log_path.stat().st_size, **more)
        self.restart_clock()

    # What a run logs and prints

    def is_due(self, every):
        """Return whether something is to be done now that is done every so many steps, and last."""
        return self.step % every == 0 or self.step == self.args.steps

    def log(self, numbers):
        """Append a row to log.jsonl, with six digits. All ranks have the same numbers, a dict."""
        row = dict(step=self.step)
        for name, value in numbers.items():
            if not math.isfinite(value):
                raise InputError(f"--lr: expected finite numbers in step {self.step}, got {name} "
                                 f"{value}. The checkpoints beside {self.log_path} are of "
                                 "earlier steps. Try a lower --lr.")
            row[name] = float(f"{value:.6g}")
        if self.ranks.is_first:
            with open(self.log_path, "a") as file:
                file.write(json.dumps(row) + "\n")
        self.restart_clock()

    def log_step(self, model, numbers):
        """Log a training step and its speed, and print a line every 30 seconds."""
        seconds = (time.perf_counter() - self.clock) / (self.step - self.clock_step)
        words_per_s = self.args.batch * self.data.batches.words_per_sequence / seconds
        numbers["words_per_s"] = words_per_s
        if self.device.type == "cuda":
            operations_per_s = words_per_s * count_operations(model) / self.ranks.world
            numbers |= measure_gpu(operations_per_s, self.dtype)
        self.log(numbers)
        if time.perf_counter() - self.last_shown >= SHOW_EVERY:
            self.show(describe_progress(numbers, self.step, self.args.steps, seconds))
            self.last_shown = time.perf_counter()

    def log_evaluation(self, result):
        """Log and print an evaluation, a dict; return whether its loss is the lowest so far."""
        self.log(result)
        self.show(f"step {self.step:,}: {describe_result(result)}")
        is_best = result["eval_loss"] < self.best
        if is_best:
            self.best = result["eval_loss"]
        return is_best

    def restart_clock(self):
        """Measure speed from here: the first step, or the end of a pause to log or save."""
        self.clock = time.perf_counter()
        self.clock_step = self.step

    def show(self, text):
        """Print text, unless --quiet."""
        if not self.args.quiet:
            with contextlib.suppress(OSError):  # a reader that has left does not end a run
                print(text, flush=True)


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


def describe_progress(row, step, num_steps, seconds):
    """Return a line of progress: row is that of the log, seconds those of a step."""
    text = (f"step {step:,} of {num_steps:,}: loss {row['loss']:.3f}, "
            f"{row['words_per_s']:,.0f} words/s")
    for name in ("tflops", "peak_gib", "mfu"):  # on a GPU
        if name in row:
            text += f", {name} {row[name]:.3g}"
    left = datetime.timedelta(seconds=round((num_steps - step) * seconds))
    return f"{text}, {left} left"


def describe_result(result):
    """Return the numbers of an evaluation as text."""
    return ", ".join(f"{name} {value:.3f}" for name, value in result.items())


# -----------------------------------------------------------------------------
# Reports before and after training


def report_start(run, model):
    """Print what is about to run; for new runs of item sets also the control, which takes time."""
    args = run.args
    c = model.config
    size = count_parameters(model)
    meta = run.data.corpus.meta
    batches = run.data.batches
    num_rows = args.batch // run.ranks.world
    run.show(
        f"model: emb {args.emb}, split {args.split}, objective {args.objective}, {c.layers} "
        f"layers, width {c.width}, length {c.length}, attention {args.attn}\n"
        f"parameters: {size['total']:,}; embedding {size['embedding']:,} "
        f"(PoEP {100 * size['poep']:.2f} %)\n"
        f"corpus: {meta['data']}, {meta['words']:,} words, {meta['distinct']:,} distinct, "
        f"{meta['documents']:,} documents; {batches.num_eval:,} held-out sequences\n"
        f"steps: {args.steps:,} = {args.steps / batches.steps_per_epoch:.1f} epochs, "
        f"lr {args.lr:g}, warm-up {args.warmup:,}\n"
        f"batch: {args.batch} = {run.ranks.world} ranks × {math.ceil(num_rows / args.micro)} "
        f"micro-batches of at most {args.micro}\n"
        f"device: {run.device}, {run.dtype}, compile {run.use_compile}, "
        f"torch {torch.__version__}, seed {args.seed}")
    is_new = not run.saved and not args.quiet
    if is_new and not c.order and len(batches.ids) <= CONTROL_NAMES:
        run.show(describe_neighbors(batches))


def report_baselines(run, result, num_classes, unigram_loss):
    """Print the loss so far and two baselines; return these.

    Args:
        result: dict, an evaluation.
        num_classes, unigram_loss: what Objective.expected_loss returns.

    Returns:
        uniform_loss: float, that of an untrained model.
        unigram_loss: float, that of label frequencies.
    """
    uniform_loss = math.log(num_classes)
    # abs: the entropy of labels that are all equal is -0.0
    run.show(f"eval_loss: {result['eval_loss']:.3f} at step {run.step:,}; uniform baseline "
             f"{uniform_loss:.3f} = ln {num_classes:,}, label frequencies {abs(unigram_loss):.3f}")
    return uniform_loss, unigram_loss


def report_end(run, signals, result, baselines):
    """Print how the run has ended, and what to do next; SystemExit if a signal interrupted it."""
    path = run.folder / "ckpt.pt"
    if run.step < run.args.steps:
        run.show(f"Interrupted at step {run.step:,}; saved {path}. Rerun the same command "
                 "to resume: on a CPU bit for bit, with the same ranks, threads and --micro.")
        number = signals[0] if signals else signal.SIGTERM  # another rank received it
        raise SystemExit(128 + number)
    if run.saved.get("step") == run.step:
        run.show(f"This run has ended. Step {run.step:,}: {describe_result(result)}")
    else:
        run.show(f"Saved {path}, and the lowest loss in best.pt: eval_loss {run.best:.3f}")
    uniform_loss, unigram_loss = baselines
    if result["eval_loss"] >= unigram_loss > 0:
        run.show("warning: no better than label frequencies. Use more --steps, or more text.")
    if run.ranks.is_first:
        run.show(draw_losses(run.folder, uniform_loss, unigram_loss))
    command = ["python", "infer.py", "--ckpt", run.args.out, example_input(run.data)]
    run.show("Next: " + shlex.join(command))


def example_input(data):
    """Return an input of infer.py that shows what the model has learned."""
    if not data.config.order:  # which names go with these, of a held-out set?
        ids, *_ = data.batches.eval_batch([data.batches.num_eval // 2])  # (1, L)
        return "\t".join(data.corpus.words[i - FIRST_WORD_ID] for i in ids[0, :3].tolist())
    if data.config.head == "sr":  # which words are out of order?
        return "the cat sat mat the on"
    return "the cat sat on the [MASK]"
