"""Pre-train a transformer over hashed words.

    python pretrain.py                                              train on the docstrings of the
                                                                    installed Python packages
    python pretrain.py --emb pool --hash md5 --data my_texts/       your own files
    python pretrain.py --objective hash-mlm                         masked words, by their hashes
    python pretrain.py --preset superbloom-small --data pages.jsonl      your own item sets
    torchrun --nproc_per_node=8 pretrain.py --emb proj --hash lsh   eight GPUs or processes

Sources: [HF] Xue & Aletras 2022, HashFormers. [SB] Anderson et al. 2020, Superbloom

One training step of the default run, B = 32 sequences of L = 128 positions, d = 128:

    ids, key_mask,          batches.get_batch(step, rows): a function of seed and step, so that a
    noise, random_words     resumed run reads the same batches
    inputs, labels (B, L)   objective.corrupt: some words are shuffled, others are random. Workers
                            of the DataLoader do this ahead of time: it does not need the model
    codes (B, L, T / 8)     model.codes[inputs]. Nothing is hashed here: each distinct word was
                            hashed once, before training, and a word's bits are a row of a table
    x (B, L, d)             model.embedding: codes to vectors; model.layers: attention
    logits (B, L, 3)        model.head: intact, shuffled or random?
    loss                    objective.loss: the sum over positions. It is divided by their number in
                            the batch of all ranks, then come backward and optimizer.step
"""

import contextlib
import datetime
import json
import math
import os
import shlex
import signal
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from common import InputError, autocast, blame, catch_signals
from common import find_checkpoint, gather_from_ranks, load_checkpoint, lock_output, read_ranks
from common import resolve_device, run_script, save_checkpoint
from data.batches import TextBatches, divide
from data.codes import build_codes, build_targets, build_tokenizer, fit_sizes, load_tokenizer
from data.codes import report_unknown
from data.corpus import Corpus, prepare
from data.neighbors import CONTROL_NAMES, describe_neighbors
from data.rows import reader_options
from flags import DEFAULTS, parse_flags
from items import ItemSetBatches, for_sets, split_pages
from model import Config, Model, count_operations, count_parameters, parameter_groups
from objectives import choose_objective
from plot import draw_losses
from tokenizer import FIRST_WORD_ID, MASK

LOG_EVERY = 10  # steps
SHOW_EVERY = 30  # seconds between lines of progress
PEAK_TFLOPS = {  # of dense products in bfloat16, by the name that PyTorch gives a GPU
    "NVIDIA A100-SXM4-40GB": 312,
    "NVIDIA A100-SXM4-80GB": 312,
    "NVIDIA H100 80GB HBM3": 989,
    "NVIDIA H200": 989,
}
GPU_WORKERS = 4  # processes that make batches: a GPU takes them faster than one process makes them
SEED_STRIDE = 1_000_003  # two runs with different --seed share no seed of a step below the stride
RANK_STRIDE = 4_099  # the same for the ranks of a step
# Settings that may change when a run resumes. What load_data makes of the first line is compared
# instead, run["corpus"] and run["alpha"]: the same text may lie elsewhere, and decides on alpha
MAY_CHANGE = (
    "data field encoding sep header cache alpha is_alpha_default "
    "out device dtype compile micro workers eval_every save_every quiet").split()


def train(args, initial, rank, world, local_rank):
    """Train a model; return the last evaluation.

    Args:
        args: Namespace, all settings.
        initial: dict, the checkpoint of --init_from, or None.
        rank, world, local_rank: int, as read_ranks returns them.
    """
    # torchrun starts a process, a rank, for each GPU. Rank 0 alone prints and writes to --out
    is_first = rank == 0
    args.quiet = args.quiet or not is_first
    device, dtype, use_compile = resolve_device(args, local_rank)
    if args.batch % world != 0:
        raise InputError(f"--batch: expected a multiple of {world} ranks, got {args.batch}.")
    args.micro = min(args.micro, args.batch // world)
    host_group = None  # in which ranks wait for each other
    if world > 1:
        # nccl adds up gradients; gloo what the host counts, so that no step waits for the GPU
        dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
        # one node prepares the corpus, and the others are patient
        host_group = dist.new_group(backend="gloo", timeout=datetime.timedelta(hours=12))

    # `run` is what two processes must agree on to be one run. A checkpoint in --out has to be of
    # this run: its settings are compared now, before hours of preparation
    run = dict(vars(args))
    for name in MAY_CHANGE:
        del run[name]
    if initial is not None:
        source = Path(find_checkpoint(args.init_from)).parent
        if source.resolve() == Path(args.out).resolve():  # it would be overwritten
            raise InputError(f"--out {args.out}: expected another folder than that of --init_from, "
                             "got the same. Use another --out.")
        run["init_from"] = f"{os.path.normpath(args.init_from)} at step {initial['step']}"
    checkpoint_path = os.path.join(args.out, "ckpt.pt")
    resumed = None
    if os.path.exists(checkpoint_path):
        resumed = load_checkpoint(checkpoint_path)
        refuse_another_run(checkpoint_path, resumed, run)

    # Words, their hashes, and batches of token IDs. The config is final from here on. This also
    # lowers args.alpha if it was not given
    corpus, tokenizer, config, codes, targets, batches = load_data(args, initial)
    run["corpus"] = corpus.meta["digest"]
    run["alpha"] = args.alpha
    bloom_map = tokenizer.coder.bloom_map
    if bloom_map is not None:
        run["bloom"] = bloom_map.checksum()
    if resumed is not None:
        # again: corpus, alpha and Bloom map are known only now
        refuse_another_run(checkpoint_path, resumed, run)

    # Model, objective and optimizer
    torch.manual_seed(args.seed)
    model = Model(config)
    if initial is not None:
        model.load_state_dict(initial["model"])
    model.to(device).train()
    model.set_codes(codes)
    if targets is not None:
        targets = targets.to(device)
    objective_class = choose_objective(args.objective, config)
    if not config.order:
        objective_class = for_sets(objective_class)
    objective = objective_class(
        config, mask_rate=args.mask, sr_rate=args.noise, mask_id=MASK,
        first_word_id=FIRST_WORD_ID, targets=targets, bloom_map=bloom_map,
        num_samples=args.samples)
    groups = parameter_groups(model, args.decay)
    optimizer = torch.optim.AdamW(groups, betas=(0.9, args.beta2), fused=True)

    # Start from nothing, or where the checkpoint ends
    step = 0
    best = math.inf  # lowest eval_loss
    log_size = 0  # bytes of log.jsonl
    if resumed is not None:
        model.load_state_dict(resumed["model"])
        optimizer.load_state_dict(resumed["optimizer"])
        step = resumed["step"]
        best = resumed["best"]
        log_size = resumed["log_size"]
        if args.dtype == "auto":
            dtype = resumed["dtype"]
    log_path = os.path.join(args.out, "log.jsonl")
    if is_first:
        if step == 0:  # best.pt is of a run that ended before its first ckpt.pt
            Path(args.out, "best.pt").unlink(missing_ok=True)
        # subtle: cut the rows after the checkpoint; those steps are logged again
        with open(log_path, "a") as file:
            file.truncate(min(log_size, file.tell()))

    if use_compile:
        # windows of text have one shape, to compile for; sets have many
        model.encode = torch.compile(model.encode, dynamic=not config.order)
    ddp_model = model
    if world > 1:
        states = gather_from_ranks([step, dtype, run], host_group)
        if any(state != states[0] for state in states):
            raise InputError("--out, --cache: expected a folder that all nodes see, got ranks that "
                             "differ in steps, data, hashes or dtypes.")
        # takes the mean of the gradients over ranks, while backward still computes others
        ddp_model = DistributedDataParallel(model)

    # This rank's rows of each global batch, and of the held-out set, which is corrupted once
    rows = np.array_split(np.arange(args.batch), world)[rank]
    loader = build_loader(args, batches, objective, rows, step, device)
    held_out_rows = np.array_split(np.arange(batches.num_eval), world)[rank]
    held_out = []
    for part in divide(held_out_rows, args.micro):
        held_out.append(objective.corrupt_batch(*batches.eval_batch(part)))

    # What is about to run, its loss so far, and two baselines: uniform, which an untrained model
    # has, and label frequencies (from word_counts, sums or both)
    runtime = f"{device}, {dtype}, compile {use_compile}"
    show(args, describe(args, model, corpus, batches, world, runtime))
    if not config.order and resumed is None and not args.quiet:
        if len(batches.ids) <= CONTROL_NAMES:
            show(args, describe_neighbors(batches))
    result, sums = evaluate(model, objective, held_out, dtype)
    word_counts = corpus.counts[FIRST_WORD_ID:len(codes)]  # (V,) of each known word
    num_classes, unigram_loss = objective.expected_loss(word_counts, sums)
    uniform_loss = math.log(num_classes)
    # abs: the entropy of labels that are all equal is -0.0
    show(args, f"eval_loss: {result['eval_loss']:.3f} at step {step:,}; uniform baseline "
         f"{uniform_loss:.3f} = ln {num_classes:,}, label frequencies {abs(unigram_loss):.3f}")
    if step == args.steps:
        metrics = ", ".join(f"{name} {value:.3f}" for name, value in result.items())
        show(args, f"This run has ended. Step {step:,}: {metrics}")
    frequent_words = corpus.frequent(50_000)  # infer.py searches among these

    def save(name, **state):
        """Write a checkpoint of the run as it is now."""
        if is_first:
            save_checkpoint(
                os.path.join(args.out, name), model, tokenizer.state(), run=run, dtype=dtype,
                words=frequent_words, step=step, best=best, log_size=os.path.getsize(log_path),
                **state)

    # -----------------------------------------------------------------------------
    # Training loop
    max_norm = args.clip if args.clip > 0 else math.inf  # inf: measured, not clipped
    words_per_step = args.batch * batches.words_per_sequence
    operations_per_step = words_per_step * count_operations(model) / world  # of a device
    last_shown = time.perf_counter()  # when a line of progress was printed
    timer_start = last_shown  # speed is measured from here: the end of the last pause
    timer_step = step
    with catch_signals() as signals:
        for micro_batches in loader:
            # Two sums over the ranks, on the host: the scored positions of the whole batch, and
            # the signals, since a signal to one rank has to stop all of them before the same step
            num_scored = sum(len(batch.positions) for batch in micro_batches)
            counts = torch.tensor([num_scored, len(signals)])
            if world > 1:
                dist.all_reduce(counts)
            num_scored, num_signals = counts.tolist()
            if num_signals > 0:
                save("ckpt.pt", optimizer=optimizer.state_dict())
                break
            num_scored = max(num_scored, 1)  # a divisor

            # Dropout and sampled rows depend on seed, step and rank alone: a resumed run draws the
            # same
            step_seed = args.seed * SEED_STRIDE + step
            torch.manual_seed((step_seed * RANK_STRIDE + rank) % 2**63)
            if config.lsh_redraw:
                model.redraw_hyperplanes(step_seed)

            # loss of a step = (sum of the losses of all ranks) / num_scored, not a mean of means.
            # subtle: DDP divides gradients by world, hence the factor world
            scale = world / num_scored
            optimizer.zero_grad()
            total_loss = torch.zeros((), device=device)
            for i, batch in enumerate(micro_batches):
                if world > 1:  # exchange gradients once a step, in the last backward
                    ddp_model.require_backward_grad_sync = i == len(micro_batches) - 1
                with autocast(device, dtype):
                    loss = objective.loss(ddp_model, batch.to(device))
                (loss * scale).backward()
                total_loss += loss.detach()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            lr = learning_rate(args, step)
            for group in optimizer.param_groups:
                group["lr"] = lr
            optimizer.step()
            step += 1

            # Now and then pause to log, evaluate or save. No other step waits for the GPU
            is_last = step == args.steps
            is_logged = step % LOG_EVERY == 0 or is_last
            is_evaluated = step % args.eval_every == 0 or is_last
            is_saved = step % args.save_every == 0 or is_last
            if not (is_logged or is_evaluated or is_saved):
                continue
            total_loss = total_loss.cpu()  # waits for the GPU
            if world > 1:
                dist.all_reduce(total_loss)
            # subtle: the clock is read after that wait
            seconds_per_step = (time.perf_counter() - timer_start) / (step - timer_step)
            if is_logged:
                numbers = dict(loss=total_loss.item() / num_scored, lr=lr, grad_norm=norm.item(),
                               words_per_s=words_per_step / seconds_per_step)
                if device.type == "cuda":
                    numbers |= measure_gpu(operations_per_step / seconds_per_step, dtype)
                write_log(log_path, step, numbers, is_first)
                if time.perf_counter() - last_shown >= SHOW_EVERY:
                    show(args, describe_progress(numbers, step, args.steps, seconds_per_step))
                    last_shown = time.perf_counter()
            if is_evaluated:
                result, _ = evaluate(model, objective, held_out, dtype)
                write_log(log_path, step, result, is_first)
                if result["eval_loss"] < best:
                    best = result["eval_loss"]
                    save("best.pt")
                metrics = ", ".join(f"{name} {value:.3f}" for name, value in result.items())
                show(args, f"step {step:,}: {metrics}")
            if is_saved:
                save("ckpt.pt", optimizer=optimizer.state_dict())
            timer_start = time.perf_counter()
            timer_step = step

    # End
    if world > 1:
        dist.barrier(host_group)  # subtle: a rank that leaves early aborts the others
    if step < args.steps:
        show(args, f"Interrupted at step {step:,}; saved {checkpoint_path}. Rerun the same command "
             "to resume: on a CPU bit for bit, with the same ranks, threads and --micro.")
        number = signals[0] if signals else signal.SIGTERM  # another rank received it
        raise SystemExit(128 + number)
    show(args, f"Saved {checkpoint_path}, and the lowest loss in best.pt: eval_loss {best:.3f}")
    if result["eval_loss"] >= unigram_loss > 0:
        show(args, "warning: no better than label frequencies. Use more --steps, or more text.")
    if is_first:
        show(args, draw_losses(args.out, uniform_loss, unigram_loss))
    command = ["python", "infer.py", "--ckpt", args.out, example_input(config, corpus, batches)]
    show(args, "Next: " + shlex.join(command))
    return result


# -----------------------------------------------------------------------------
# Before the loop: the last checkpoint, data


def refuse_another_run(path, saved, run):
    """Raise InputError unless the settings in run, a dict, are those of a saved checkpoint."""
    changes = []
    for name, value in run.items():
        old = saved["run"].get(name, DEFAULTS.get(name))  # an older run lacks a new setting
        if old != value and name == "key":  # a secret
            changes.append("key differs")
        elif old != value:
            changes.append(f"{name} was {old} and is {value}")
    if "optimizer" not in saved:  # a copy of best.pt, or a checkpoint of finetune.py
        changes.append("it has no state of the optimizer")
    if changes:
        raise InputError(f"{path}: expected a checkpoint of this run, got another: "
                         f"{'; '.join(changes)}. Use another --out. There --init_from "
                         f"{os.path.dirname(path)} starts from these weights, if sizes and hashes "
                         "are the same.")


def load_data(args, initial):
    """Prepare the corpus, make the config final, and hash each distinct word once.

    Returns:
        corpus: data.corpus.Corpus.
        tokenizer: HashTokenizer.
        config: model.Config.
        codes: integer (5 + V, C), by token ID.
        targets: integer (5 + V, k), what hash-mlm predicts; None for other objectives.
        batches: data.batches.Batches.
    """
    with blame():
        folder = prepare(args.data, args.split, args.cache, max_subwords=args.vocab,
                         quiet=args.quiet, field=args.field, **reader_options(args))
        corpus = Corpus(folder)

        # The config: the settings, and the table sizes of the vocabulary
        config = Config.choose(vars(args))
        if initial is None:
            fit_sizes(args, config, corpus)
            tokenizer = build_tokenizer(args, config, corpus)
        else:  # args has the sizes of that run
            tokenizer = load_tokenizer(initial["tokenizer"], config, corpus)

        # Words to codes
        codes = build_codes(config, tokenizer, corpus)
        targets = build_targets(config, tokenizer, corpus, codes)
    # a hash that was just fitted to this corpus knows it
    if config.order and not args.quiet and (initial is not None or tokenizer.is_fixed):
        report_unknown(tokenizer, corpus.words, corpus.counts)

    options = dict(word_counts=corpus.counts[FIRST_WORD_ID:len(codes)], length=config.length,
                   batch_size=args.batch, seed=args.seed)
    with blame("--data, --batch, --length"):
        if config.order:
            batches = TextBatches(corpus.ids, short=args.short, **options)
        else:
            batches = ItemSetBatches(corpus.ids, corpus.offsets, *split_pages(corpus), **options)
    return corpus, tokenizer, config, codes, targets, batches


def build_loader(args, batches, objective, rows, first_step, device):
    """Return a DataLoader of this rank's steps from first_step on.

    A step is a list of corrupted micro-batches, objectives.Batch, of `rows` of its global batch.
    """
    def corrupt_step(step):
        """Return the micro-batches of a step, the same whichever worker makes them."""
        micro_batches = []
        for part in batches.divide_rows(step, rows, args.micro):
            micro_batches.append(objective.corrupt_batch(*batches.get_batch(step, part)))
        return micro_batches

    is_gpu = device.type == "cuda"
    num_workers = args.workers
    if num_workers is None:
        num_workers = GPU_WORKERS if is_gpu else 0
    # the data set is the step numbers; collate_fn turns a number into its batches
    return DataLoader(
        range(first_step, args.steps), batch_size=None, collate_fn=corrupt_step,
        num_workers=num_workers, pin_memory=is_gpu,
        # a worker lives until this process ends it: it inherits the handlers of catch_signals, but
        # torch sets another for SIGTERM
        worker_init_fn=lambda worker: signal.signal(signal.SIGTERM, signal.SIG_IGN),
        multiprocessing_context="fork" if num_workers > 0 else None)  # fork copies no corpus


# -----------------------------------------------------------------------------
# In the loop: evaluation, log, progress


@torch.no_grad()
def evaluate(model, objective, held_out, dtype):
    """Return loss and metrics of all ranks' held-out batches, a dict of float, and their sums."""
    model.eval()
    parts = []  # the sums of each micro-batch, dict
    for batch in held_out:
        with autocast(model.device, dtype):
            part = objective.evaluate(model, batch.to(model.device))
        for name, value in part.items():
            part[name] = value.cpu().double().numpy()
        parts.append(part)
    model.train()

    parts = sum(gather_from_ranks(parts), [])  # of all ranks; some may have no held-out batch
    totals = {}
    for name in parts[0]:
        totals[name] = sum(part[name] for part in parts)
    if totals["scored"] == 0:
        raise InputError("--data: expected words to predict in the held-out text, got none. "
                         "Use more text or a larger --mask.")
    eval_loss = float(totals["loss"] / totals["scored"])
    return dict(eval_loss=eval_loss, **objective.metrics(totals)), totals


def learning_rate(args, step):
    """Return a step's rate: warm-up to --lr, then linear [HF Table 4] or rsqrt decay. [SB §3.2]"""
    rise = (step + 1) / max(args.warmup, 1)  # 1 at the end of the warm-up
    # fall is at least 1 during the warm-up, so that min takes rise
    if args.schedule == "linear":
        fall = (args.steps - step) / max(args.steps - args.warmup, 1)
    else:
        fall = rise**-0.5
    return args.lr * min(rise, fall)


def write_log(path, step, numbers, is_first):
    """Append a row to log.jsonl, with six digits. All ranks have the same numbers, a dict."""
    row = dict(step=step)
    for name, value in numbers.items():
        if not math.isfinite(value):
            raise InputError(f"--lr: expected finite numbers in step {step}, got {name} {value}. "
                             f"The checkpoints beside {path} are of earlier steps. Try a lower "
                             "--lr.")
        row[name] = float(f"{value:.6g}")
    if is_first:
        with open(path, "a") as file:
            file.write(json.dumps(row) + "\n")


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


def example_input(config, corpus, batches):
    """Return an input of infer.py that shows what the model has learned."""
    if not config.order:  # which names go with these, of a held-out set?
        ids, *_ = batches.eval_batch([batches.num_eval // 2])  # (1, L)
        return "\t".join(corpus.words[i - FIRST_WORD_ID] for i in ids[0, :3].tolist())
    if config.head == "sr":  # which words are out of order?
        return "the cat sat mat the on"
    return "the cat sat on the [MASK]"


def show(args, text):
    """Print text, unless --quiet."""
    if not args.quiet:
        with contextlib.suppress(OSError):  # a reader that has left does not end a run
            print(text, flush=True)


def describe(args, model, corpus, batches, world, runtime):
    """Return the first lines of a run, about its model, corpus and steps."""
    c = model.config
    size = count_parameters(model)
    meta = corpus.meta
    lines = [
        f"model: emb {args.emb}, split {args.split}, objective {args.objective}, {c.layers} "
        f"layers, width {c.width}, length {c.length}, attention {args.attn}",
        f"parameters: {size['total']:,}; embedding {size['embedding']:,} "
        f"(PoEP {100 * size['poep']:.2f} %)",
        f"corpus: {meta['data']}, {meta['words']:,} words, {meta['distinct']:,} distinct, "
        f"{meta['documents']:,} documents; {batches.num_eval:,} held-out sequences",
        f"steps: {args.steps:,} = {args.steps / batches.steps_per_epoch:.1f} epochs, "
        f"lr {args.lr:g}, warm-up {args.warmup:,}",
        f"batch: {args.batch} = {world} ranks × {math.ceil(args.batch // world / args.micro)} "
        f"micro-batches of at most {args.micro}",
        f"device: {runtime}, torch {torch.__version__}, seed {args.seed}"]
    return "\n".join(lines)


def pretrain(argv):
    """Parse the flags, hold --out, and train; return the last evaluation."""
    args, initial = parse_flags(argv, __doc__)
    rank, world, local_rank = read_ranks()
    with lock_output(args.out, rank):  # another run may be saving the checkpoint there
        return train(args, initial, rank, world, local_rank)


def main(argv=None):
    """Train as argv says (default: the command line); return the last evaluation."""
    return run_script("pretrain.py", pretrain, argv)


if __name__ == "__main__":
    main()
