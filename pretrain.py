"""Pre-train a transformer over hashed words.

    python pretrain.py                                               laptop: the docstrings of your Python
    python pretrain.py --emb pool --hash md5 --data my_texts/        your own files
    torchrun --nproc_per_node=8 pretrain.py --emb proj --hash lsh    eight GPUs, or processes on CPUs
    torchrun --nproc_per_node=8 pretrain.py --preset hashformer --emb proj --hash lsh \\
        --data wikipedia+bookcorpus                                  the paper's size and data
    python pretrain.py --emb median                                  masked words, predicted by their hashes
    python pretrain.py --preset superbloom-small                     masked names of item sets
    python pretrain.py --preset superbloom-small --data pages.jsonl --alpha 50        your own item sets

Paper map:    [HF Table 4] take_step
Out of scope: flags (settings.py), objectives (objectives.py), scores on tasks (finetune.py), texts of a user
              (infer.py).
Deviations:   1. A batch, its noise and its dropout depend on (seed, step, rank) and nothing else: a resumed
                 run ends with the same bits as one that never stopped.
"""

import contextlib
import dataclasses
import gc
import json
import math
import os
import shlex
import signal
import sys
import time
import warnings

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from tqdm import tqdm

from data.batches import ItemSetBatches, TextBatches
from data.codes import build_codes, build_tokenizer
from data.corpus import Corpus, prepare
from model import Model, count_parameters, parameter_groups
from objectives import IGNORE_INDEX, OBJECTIVES
from runtime import InputError, autocast, barrier_before_exit, blame_input, catch_signals
from runtime import exit_on_bad_input, gather_from_ranks, load_checkpoint, read_ranks, resolve_device
from runtime import save_checkpoint, try_compile
from settings import parser, resolve
from tokenizer import CLS, FIRST_WORD_ID, MASK, UNK

# with the config and the corpus, what makes a run itself: a checkpoint that differs belongs to another run
IDENTITY = ("split", "hash", "key", "features", "hash_seed", "vocab", "objective", "batch", "steps", "lr",
            "warmup", "decay", "clip", "seed", "alpha", "coherent", "mask")


class Run:
    """State of one run on one rank: build_run sets it, and the functions below read it.

    args, config, rank, world, device, dtype: settings. corpus, tokenizer, num_ids, batches, micro_size,
    slices: data. model, ddp_model (wrapped for ranks), objective, optimizer, is_compiled: what trains.
    step, identity, path, log_path: where it stands, and what a checkpoint must agree with.
    """


def build_run(args):
    """Build tokenizer, codes, batches, model, objective and optimizer, and resume from a checkpoint."""
    run = Run()
    run.args, (run.rank, run.world, local_rank) = args, read_ranks()
    config = resolve(args, run.world)
    run.device, run.dtype, use_compile = resolve_device(args, local_rank)
    args.quiet = run.rank > 0

    with blame_input():
        folder = prepare(args.data, args.split, args.cache, args.vocab, args.quiet, args.field)
        run.corpus = corpus = Corpus(folder)
        run.tokenizer = build_tokenizer(args, config, corpus)
        run.config = config = run.tokenizer.config
        codes, targets = build_codes(args, run.tokenizer, corpus)
        # of a fixed vocabulary, IDs from num_ids on are unknown words; a random word must occur in the corpus
        run.num_ids = FIRST_WORD_ID + len(run.tokenizer.words if run.tokenizer.is_fixed else corpus.words)
        words = FIRST_WORD_ID + np.flatnonzero(corpus.counts[FIRST_WORD_ID:run.num_ids])
        about = config.length, args.batch, words, args.seed
        run.batches = TextBatches(corpus.ids, *about, CLS) if config.order else ItemSetBatches(
            corpus.ids, corpus.offsets, *corpus.split_pages(), *about, (FIRST_WORD_ID, run.num_ids))
    share = args.batch // run.world  # of each step's sequences, this rank has those from share · rank on
    run.micro_size, end = min(args.micro, share), share * (run.rank + 1)
    run.slices = [slice(i, min(i + run.micro_size, end)) for i in range(end - share, end, run.micro_size)]

    torch.manual_seed(args.seed)
    run.model = run.ddp_model = Model(config).to(run.device)
    run.model.set_codes(codes)
    bloom_map = run.tokenizer.bloom_map
    run.objective = OBJECTIVES[args.objective](config, args.mask, MASK, FIRST_WORD_ID, targets.to(run.device),
                                               bloom_map)
    run.optimizer = torch.optim.AdamW(parameter_groups(run.model, args.decay), lr=args.lr, eps=1e-8,
                                      betas=(0.9, args.beta2), fused=run.device.type in ("cuda", "cpu"))
    run.identity = {name: getattr(args, name) for name in IDENTITY} | dict(
        corpus=corpus.meta["digest"], bloom=bloom_map and bloom_map.check())
    run.path, run.log_path = os.path.join(args.out, "ckpt.pt"), os.path.join(args.out, "log.jsonl")
    resume(run)
    connect_ranks(run, use_compile)
    return run


def resume(run):
    """Continue from the checkpoint of --out, if there is one and it is of this very run."""
    os.makedirs(run.args.out, exist_ok=True)
    run.step = 0
    if not os.path.exists(run.path):
        return
    checkpoint = load_checkpoint(run.path)
    saved = checkpoint.get("run", {}) | checkpoint["config"]
    changes = [f"{name} was {saved.get(name)} and is {value}" for name, value in
               (run.identity | dataclasses.asdict(run.config)).items() if saved.get(name) != value]
    if changes:
        raise InputError(f"{run.path}: belongs to another run ({'; '.join(changes)}). Use another --out, or "
                         f"remove it.")
    try:
        run.model.load_state_dict(checkpoint["model"])
        run.optimizer.load_state_dict(checkpoint["optimizer"])
        run.step, dtype = checkpoint["step"], checkpoint["dtype"]
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise InputError(f"{run.path}: expected weights, optimizer and step of this run, got {reason}. Use "
                         f"another --out, or remove it.") from error
    if run.args.dtype == "auto":  # a choice is kept
        run.dtype = dtype


def connect_ranks(run, use_compile):
    """Compile the model, and wrap it so that ranks average their gradients."""
    is_cuda = run.device.type == "cuda"
    if run.world > 1:
        dist.init_process_group("nccl" if is_cuda else "gloo", device_id=run.device if is_cuda else None)
        steps = gather_from_ranks(run.step)
        if len(set(steps)) > 1:
            raise InputError(f"--out: expected a folder that all nodes see, got steps {steps} on the ranks.")
    run.is_compiled = use_compile and try_compile(run.model, lambda: dry_run(run))
    if run.world > 1:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # torch 2.11 does not have the newer name
            run.ddp_model = torch.nn.parallel.DistributedDataParallel(
                run.model, device_ids=[run.device.index] if is_cuda else None,
                broadcast_buffers=False)  # codes and hyperplanes: large, and equal on all ranks
        # subtle: after its first pass DDP packs gradients anew, and more than two ranks sum in another order.
        # With this pass a resumed run sums as one that never stopped
        dry_run(run)


def dry_run(run):
    """Run forward and backward without a step; it changes nothing."""
    try:
        with autocast(run.device, run.dtype):
            loss = run.objective.loss(run.ddp_model, *get_micro_batches(run, 0)[0])
        loss.backward()
    finally:
        run.model.zero_grad(set_to_none=True)


def get_micro_batches(run, step):
    """Return a list of (inputs, labels) on the device, one for each micro-batch of this rank."""
    return [corrupt(run, run.batches.get_batch(step, rows))
            for rows in run.batches.micro_batch_rows(step, run.slices)]


def corrupt(run, batch):
    """Return inputs and labels on the device, of ids, noise and random words."""
    ids, noise, random_words = (tensor.to(run.device, non_blocking=True) for tensor in batch)
    return run.objective.corrupt(ids.masked_fill(ids >= run.num_ids, UNK), noise, random_words)


def sum_over_ranks(tensor):
    """Sum a tensor over all ranks, in place; return it."""
    if dist.is_initialized():
        dist.all_reduce(tensor)
    return tensor


def compute_gradients(run, micro_batches, num_scored):
    """Run the forward and backward passes of one step; the gradients are in the parameters.

    Args:
        micro_batches: list of (inputs, labels).
        num_scored: float tensor, scored positions of the global batch.

    Returns:
        The mean loss of the global batch, a 0-dim tensor, the same on all ranks.
    """
    total = torch.zeros((), device=run.device)
    for i, (inputs, labels) in enumerate(micro_batches):
        is_last = i == len(micro_batches) - 1
        with contextlib.nullcontext() if is_last or run.world == 1 else run.ddp_model.no_sync():
            with autocast(run.device, run.dtype):
                loss = run.objective.loss(run.ddp_model, inputs, labels)
            # subtle: by the global count, else short micro-batches weigh too much; DDP averages: times world
            (loss * (run.world / num_scored)).backward()
        total += loss.detach()
    return sum_over_ranks(total) / num_scored


@torch.no_grad()
def evaluate(run):
    """Return eval_loss and the objective's metrics over the held-out sequences of all ranks."""
    run.model.eval()
    rows = np.array_split(np.arange(run.batches.num_eval), run.world)[run.rank]
    total = torch.zeros(2 + run.objective.num_counts, dtype=torch.float64, device=run.device)
    for part in (rows[i:i + run.micro_size] for i in range(0, len(rows), run.micro_size)):
        inputs, labels = corrupt(run, run.batches.eval_batch(slice(part[0], part[-1] + 1)))
        with autocast(run.device, run.dtype):
            loss, counts = run.objective.evaluate(run.model, inputs, labels)
        total += torch.cat([torch.stack([loss, (labels != IGNORE_INDEX).sum()]).double(), counts.double()])
    run.model.train()
    loss, num_scored, *counts = sum_over_ranks(total).tolist()
    return dict(eval_loss=loss / max(num_scored, 1), **run.objective.metrics(counts))


def save(run):
    """Write the checkpoint, on rank 0."""
    if run.rank == 0:
        save_checkpoint(run.path, run.model, run.tokenizer.state(), step=run.step, dtype=run.dtype,
                        run=run.identity, optimizer=run.optimizer.state_dict(),
                        words=run.corpus.frequent(50_000))


def write_log(run, **row):
    """Append a line to log.jsonl, on rank 0."""
    if run.rank == 0:
        row = {name: float(f"{value:.6g}") if isinstance(value, float) else value
               for name, value in row.items()}
        with open(run.log_path, "a") as file:
            file.write(json.dumps(row) + "\n")


def trim_log(run):
    """Remove the lines of steps after the checkpoint's from log.jsonl: they will run again."""
    lines = []
    if run.step and os.path.exists(run.log_path):
        with open(run.log_path) as file:
            for line in file:
                with contextlib.suppress(ValueError, KeyError, TypeError):  # half a line, or a damaged one
                    lines += [line] * (json.loads(line)["step"] <= run.step and line.endswith("\n"))
    with open(run.log_path + ".tmp", "w") as file:  # beside it, so that a crash loses no line
        file.writelines(lines)
    os.replace(run.log_path + ".tmp", run.log_path)


def describe(result):
    """Return a dict of floats as one line."""
    return ", ".join(f"{name} {value:.3f}" for name, value in result.items())


def print_summary(run, loss):
    """Print what is about to run, and the loss that theory expects."""
    a, c, meta, batches = run.args, run.config, run.corpus.meta, run.batches
    counts, bloom_map = count_parameters(run.model), run.tokenizer.bloom_map
    classes, unigram = run.objective.expected_loss(run.corpus.counts[FIRST_WORD_ID:run.num_ids])
    print(f"model: emb {a.emb}, split {a.split}, objective {a.objective}, {c.layers} layers, width "
          f"{c.width}, length {c.length}")
    print(f"parameters: {counts['total']:,}; embedding {counts['embedding']:,} (PoEP "
          f"{100 * counts['poep']:.2f} %)")
    print(f"corpus: {a.data}, {meta['words']:,} words, {meta['distinct']:,} distinct, {meta['documents']:,} "
          f"documents, {meta['replaced']:,} characters not UTF-8")
    if bloom_map:
        print(f"Bloom map: {bloom_map.n_items:,} items in {bloom_map.m} maps of {bloom_map.buckets:,} "
              f"buckets of {bloom_map.alpha}; {batches.words_per_sequence:.1f} items per set")
    print(f"batch: {a.batch} sequences = {run.world} ranks × {len(run.slices)} micro-batches of at most "
          f"{run.micro_size}")
    print(f"steps: {a.steps:,} = {a.steps / batches.steps_per_epoch:.1f} epochs, lr {a.lr:g}, warm-up "
          f"{a.warmup:,}")
    if c.attn == "lsh" and c.layers:
        run.model.eval()
        rows = slice(run.micro_size) if c.order else slice(-run.micro_size, None)  # of sets, the largest
        with autocast(run.device, run.dtype):
            layers = run.model.lsh_statistics(corrupt(run, batches.eval_batch(rows))[0])
        run.model.train()
        shares = ", ".join(f"{100 * share:.1f} % ({how})" for share, how in layers)
        print(f"attention: lsh, pairs that collide in each layer {shares}")
    print(f"device: {run.device}, {run.dtype}, {'compiled' if run.is_compiled else 'not compiled'}, torch "
          f"{torch.__version__}, seed {a.seed}")
    print(f"eval_loss: {loss:.3f} at step {run.step:,}; uniform baseline {math.log(classes):.3f} = ln "
          f"{classes:,}, frequencies alone {unigram:.3f}", flush=True)


def take_step(run, micro_batches, num_scored):
    """Take one optimizer step; return what to log, and the next step's micro-batches. [HF Table 4]"""
    a = run.args
    # dropout depends on the step alone, so that a resumed run draws what the uninterrupted one drew
    torch.manual_seed(((a.seed * 1_000_003 + run.step) * 4_099 + run.rank) % 2**63)
    if run.config.lsh_redraw:
        run.model.resample_hyperplanes(a.seed * 1_000_003 + run.step)
    # linear up to 1 at the end of the warm-up, then linear towards 0
    lr = a.lr * min((run.step + 1) / max(a.warmup, 1), (a.steps - run.step) / max(a.steps - a.warmup, 1))
    for group in run.optimizer.param_groups:
        group["lr"] = lr
    loss = compute_gradients(run, micro_batches, num_scored)
    norm = torch.nn.utils.clip_grad_norm_(run.model.parameters(), a.clip)
    is_last = run.step + 1 == a.steps
    next_batches = None if is_last else get_micro_batches(run, run.step + 1)  # while a GPU is still busy
    loss, norm = loss.item(), norm.item()
    if not math.isfinite(loss + norm):
        raise InputError(f"--lr: step {run.step + 1} has loss {loss} and gradient norm {norm}, and was not "
                         f"taken. The checkpoint in {a.out} is older. Try a lower --lr.")
    run.optimizer.step()
    run.optimizer.zero_grad(set_to_none=True)
    run.step += 1
    return dict(loss=loss, lr=lr, grad_norm=norm), next_batches


def fit(run, caught):
    """Train to the last step, or until catch_signals' list is not empty; return the last evaluation."""
    a, result = run.args, evaluate(run)  # before training, to compare with the loss that theory expects
    if run.rank == 0:
        print_summary(run, result["eval_loss"])
        trim_log(run)
    run.ddp_model.train()
    micro_batches = get_micro_batches(run, run.step) if run.step < a.steps else None
    clock, since = time.perf_counter(), run.step
    with tqdm(total=a.steps, initial=run.step, unit="step", disable=a.quiet) as bar:
        while run.step < a.steps:
            # one sum over the ranks carries how many positions are scored, and whether any rank has to stop
            num_scored = sum((labels != IGNORE_INDEX).sum() for _, labels in micro_batches).float().view(1)
            num_scored, must_stop = sum_over_ranks(F.pad(num_scored, (0, 1), value=float(len(caught))))
            if must_stop:
                break
            row, micro_batches = take_step(run, micro_batches, num_scored.clamp(min=1))
            bar.update()
            is_last = run.step == a.steps
            if run.step % 10 == 0 or is_last:
                seconds = (time.perf_counter() - clock) / ((run.step - since) * a.batch)
                words = run.batches.words_per_sequence
                speed = dict(words_per_s=words / seconds, ms_per_sample=1000 * seconds)
                facts = row["loss"], *speed.values()
                bar.set_postfix_str("loss {:.3f}, {:,.0f} words/s, {:.2f} ms/sample".format(*facts))
                write_log(run, step=run.step, **row, **speed)
                clock, since = time.perf_counter(), run.step
            if run.step % a.eval_every == 0 or is_last:
                pause = time.perf_counter()
                result = evaluate(run)
                write_log(run, step=run.step, **result)
                if run.rank == 0:
                    bar.write(f"step {run.step:,}: {describe(result)}", file=sys.stdout)
                clock += time.perf_counter() - pause
            if run.step % a.save_every == 0 or is_last:
                save(run)
    if run.step < a.steps:
        save(run)
        if run.rank == 0:
            print(f"Interrupted at step {run.step:,}; saved {run.path}. Rerun the same command to resume.")
        barrier_before_exit()
        raise SystemExit(128 + (caught or [signal.SIGTERM])[0])
    return result


def train(args):
    """Build a run, train it and say how to continue; return the last evaluation."""
    run = build_run(args)
    try:
        with catch_signals() as caught:
            result = fit(run, caught)
        if run.rank == 0:
            text = run.objective.example if run.config.order else " ".join([*run.corpus.words[:2], "[MASK]"])
            print(f"Saved {run.path}: {describe(result)}")
            print(f"Next: python infer.py --ckpt {shlex.quote(args.out)} {shlex.quote(text)}")
        barrier_before_exit()
        return result
    finally:
        # subtle: let go of DDP before the process group ends. As the group's last owner it would wait,
        # holding Python's lock, for a thread that may be waiting for that lock
        run.ddp_model = run.model
        gc.collect()


def main(argv=None):
    """Train as argv says (default: the command line); return the last evaluation. Bad input exits with 2."""
    args = parser(__doc__.split("\nPaper map")[0]).parse_args(argv)
    with exit_on_bad_input("pretrain.py"):
        try:
            return train(args)
        except KeyboardInterrupt:  # later ones are caught
            print("pretrain.py: Interrupted before the training.", file=sys.stderr)
            raise SystemExit(130) from None


if __name__ == "__main__":
    main()
