"""Pre-train a transformer over hashed words.

    python pretrain.py                                            laptop: docstrings of your Python
    python pretrain.py --emb pool --hash md5 --data my_texts/     your own files
    torchrun --nproc_per_node=8 pretrain.py --emb proj --hash lsh            eight GPUs or processes
    torchrun --nproc_per_node=8 pretrain.py --preset hashformer --emb proj --hash lsh \\
        --data wikipedia+bookcorpus                               the paper's size and data
    python pretrain.py --emb median                               masked words, predicted by hashes
    python pretrain.py --preset superbloom-small                  masked names of item sets
    python pretrain.py --preset superbloom-small --data pages.jsonl --alpha 50       your own sets
    python pretrain.py --init_from out/proj-lsh --data my_texts/  from the weights of another run

One training step of the default run, B = 32 sequences of L = 128 positions, d = 128:

    ids, noise, random      batches.get_batch(step, rows): a function of seed and step, so that a
                            resumed run reads the same batches
    inputs, labels (B, L)   objective.corrupt: some words are shuffled, others are random. So far
                            nothing needs the model: workers of the DataLoader are steps ahead
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
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from common import InputError, autocast, blame, catch_signals
from common import gather_from_ranks, load_checkpoint, lock_output, read_ranks, remove
from common import resolve_device, run_script, save_checkpoint, sum_over_ranks
from data.batches import Batches, ItemSetBatches, TextBatches, divide
from data.codes import build_codes, build_targets, build_tokenizer, list_vocabulary, load_tokenizer
from data.codes import report_unknown
from data.corpus import Corpus, prepare
from data.rows import reader_options
from flags import parse_flags
from model import Config, Model, count_operations, count_parameters, parameter_groups
from objectives import OBJECTIVES
from plot import draw_losses
from tokenizer import FIRST_WORD_ID, MASK, HashTokenizer

LOG = "log.jsonl"
LOG_EVERY = 10  # steps
SHOW_EVERY = 30  # seconds between lines of progress
PEAK_TFLOPS = {  # of dense products in bfloat16, by the name that PyTorch gives a GPU
    "NVIDIA A100-SXM4-40GB": 312,
    "NVIDIA A100-SXM4-80GB": 312,
    "NVIDIA H100 80GB HBM3": 989,
    "NVIDIA H200": 989,
}
GPU_WORKERS = 4  # processes that make batches: a GPU takes them faster than one process makes them
# The seed of a step is --seed · SEED_STRIDE + step, so that two runs with different seeds have no
# seed of a step in common, unless they are longer than the stride
SEED_STRIDE = 1_000_003
RANK_STRIDE = 4_099  # the same for the ranks of a step
# Settings that may change when a run resumes. The text behind --data is compared, not its path
FREE = ("data field encoding sep header cache out device dtype compile micro workers eval_every "
        "save_every quiet").split()


def train(args, start):
    """Train with the settings args from start, a checkpoint or None; return the last evaluation."""
    # torchrun starts a process, a rank, for each GPU. Rank 0 alone prints and writes files
    rank, world, local_rank = read_ranks()
    is_first = rank == 0
    device, dtype, use_compile = resolve_device(args, local_rank)
    host_group = join_ranks(args, world, device)
    args.quiet = args.quiet or not is_first
    args.micro = min(args.micro, args.batch // world)

    # The same command resumes where its last checkpoint ends, --init_from starts another run
    run = {name: value for name, value in vars(args).items() if name not in FREE}
    if start is not None:
        run["init_from"] = f"{os.path.normpath(args.init_from)} at step {start['step']}"
    path = os.path.join(args.out, "ckpt.pt")
    saved = None
    if os.path.exists(path):
        saved = load_checkpoint(path)
        refuse_another_run(path, saved, run)  # before hours of preparation

    data = load_data(args, start)
    config = data.config  # final: nothing changes it from here on
    model, objective, optimizer = build(args, start, data, device)
    run["corpus"] = data.corpus.meta["digest"]
    if data.tokenizer.bloom_map is not None:
        run["bloom"] = data.tokenizer.bloom_map.checksum()

    # Start from nothing, or where the checkpoint ends
    step = 0
    best = math.inf  # lowest eval_loss
    log_size = 0  # bytes of log.jsonl
    if saved is not None:
        refuse_another_run(path, saved, run)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        step = saved["step"]
        best = saved["best"]
        log_size = saved["log_size"]
        if args.dtype == "auto":
            dtype = saved["dtype"]
    log_path = os.path.join(args.out, LOG)
    if is_first:
        if step == 0:  # best.pt is of a run that ended before its first ckpt.pt
            remove(os.path.join(args.out, "best.pt"))
        with open(log_path, "a") as file:  # the steps after the checkpoint are logged again
            file.truncate(min(log_size, file.tell()))

    if use_compile:
        # windows of text have one shape, to compile for; sets have many
        model.encode = torch.compile(model.encode, dynamic=not config.order)
    ddp_model = model
    if world > 1:
        state = [step, dtype, run]
        if gather_from_ranks(state, host_group).count(state) < world:
            raise InputError("--out, --cache: expected a folder that all nodes see, got ranks that "
                             "differ in steps, data, hashes or dtypes.")
        # takes the mean of the gradients over ranks, while backward still computes others
        ddp_model = DistributedDataParallel(model)
    loader, held_out = read_batches(args, data.batches, objective, step, device)

    # What is about to run, and the loss that theory expects of an untrained model
    show(args, describe(args, model, data, world, f"{device}, {dtype}, compile {use_compile}"))
    result, sums = evaluate(model, objective, held_out, dtype)
    num_classes, unigram_loss = objective.expected_loss(data.word_counts, sums)
    uniform_loss = math.log(num_classes)
    show(args, f"eval_loss: {result['eval_loss']:.3f} at step {step:,}; uniform baseline "
         f"{uniform_loss:.3f} = ln {num_classes:,}, frequencies alone {unigram_loss:.3f}")
    frequent_words = data.corpus.frequent(50_000)  # infer.py searches among these

    def save(name, **state):
        """Write a checkpoint of the run as it is now."""
        if is_first:
            save_checkpoint(
                os.path.join(args.out, name), model, data.tokenizer.state(), run=run, dtype=dtype,
                words=frequent_words, step=step, best=best, log_size=os.path.getsize(log_path),
                **state)

    # -----------------------------------------------------------------------------
    # Training loop
    max_norm = args.clip if args.clip > 0 else math.inf  # inf: measured, not clipped
    words = args.batch * data.batches.words_per_sequence  # of a step
    operations = words * count_operations(model) / world  # of a step and device
    was_finished = step == args.steps
    shown = time.perf_counter()  # when the last line of progress was printed
    clock = shown  # when the timed steps began, after clock_step
    clock_step = step
    with catch_signals() as signals:
        for micro_batches in loader:
            # Sum over the ranks, on the host: the scored positions of the whole batch, and the
            # signals, since a signal to one rank has to stop all of them before the same step
            num_scored = sum(len(batch.positions) for batch in micro_batches)
            totals = sum_over_ranks(torch.tensor([num_scored, len(signals)]))
            num_scored, num_signals = totals.tolist()
            if num_signals > 0:
                save("ckpt.pt", optimizer=optimizer.state_dict())
                break

            # Dropout and sampled rows depend on seed, step and rank alone: a resumed run draws the
            # same
            step_seed = args.seed * SEED_STRIDE + step
            torch.manual_seed((step_seed * RANK_STRIDE + rank) % 2**63)
            if config.lsh_redraw:
                model.redraw_hyperplanes(step_seed)

            # The loss of a step is the mean over the scored positions of the whole batch: the sum
            # of each micro-batch is divided by num_scored, and gradients add up. A mean of means
            # would give a micro-batch with few scored positions too much weight.
            # subtle: DDP takes the mean of the ranks' gradients. Times world it is their sum
            num_scored = max(num_scored, 1)
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

            # Now and then log, evaluate and save. No other step waits for the GPU
            is_last = step == args.steps
            if step % LOG_EVERY == 0 or is_last:
                mean_loss = sum_over_ranks(total_loss.cpu()).item() / num_scored
                # subtle: the clock is read after the loss, which waits for the GPU
                seconds = (time.perf_counter() - clock) / (step - clock_step)  # of a step
                gpu = {}
                if device.type == "cuda":
                    gpu = measure_gpu(operations / seconds, dtype)
                row = dict(loss=mean_loss, lr=lr, grad_norm=norm.item(),
                           words_per_s=words / seconds, **gpu)
                write_log(log_path, step, row, is_first)
                if time.perf_counter() - shown >= SHOW_EVERY:
                    speed = f"{words / seconds:,.0f} words/s"
                    for name, value in gpu.items():
                        speed += f", {name} {value:.3g}"
                    left = datetime.timedelta(seconds=round((args.steps - step) * seconds))
                    show(args, f"step {step:,} of {args.steps:,}: loss {mean_loss:.3f}, {speed}, "
                         f"{left} left")
                    shown = time.perf_counter()
            if step % args.eval_every == 0 or is_last:
                result, _ = evaluate(model, objective, held_out, dtype)
                write_log(log_path, step, result, is_first)
                if result["eval_loss"] < best:
                    best = result["eval_loss"]
                    save("best.pt")
                metrics = ", ".join(f"{name} {value:.3f}" for name, value in result.items())
                show(args, f"step {step:,}: {metrics}")
            if step % args.save_every == 0 or is_last:
                save("ckpt.pt", optimizer=optimizer.state_dict())
            if step % LOG_EVERY == 0:  # evaluating and saving do not count for the next row
                clock = time.perf_counter()
                clock_step = step

    # End
    if world > 1:
        dist.barrier(host_group)  # subtle: a rank that leaves early aborts the others
    if step < args.steps:
        show(args, f"Interrupted at step {step:,}; saved {path}. Rerun the same command to resume, "
             "bit for bit on the same device, ranks, threads and --micro.")
        number = signals[0] if signals else signal.SIGTERM  # another rank received it
        raise SystemExit(128 + number)
    word = "Finished before:" if was_finished else "Saved"
    show(args, f"{word} {path}, and the lowest loss in best.pt: eval_loss {best:.3f}")
    if result["eval_loss"] >= unigram_loss:
        show(args, "warning: no better than frequencies alone. Use more --steps, or more text.")
    if is_first:
        show(args, draw_losses(args.out, uniform_loss, unigram_loss))
    example = "the cat sat mat the on"  # which words are out of order?
    if objective.head != "sr":
        example = "the cat sat on the [MASK]"
    if not config.order:
        example = "\t".join(frequent_words[:2])  # which names go with these?
    show(args, "Next: " + shlex.join(["python", "infer.py", "--ckpt", args.out, example]))
    return result


# -----------------------------------------------------------------------------
# Before the loop: ranks, data, the last checkpoint


def join_ranks(args, world, device):
    """Connect the ranks; return the group in which they wait for each other, None for one rank."""
    if args.batch % world != 0:
        raise InputError(f"--batch: expected a multiple of {world} ranks, got {args.batch}.")
    if world == 1:
        return None
    # nccl adds up gradients; gloo what the host counts, so that no step waits for the GPU
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    # one node prepares the corpus, and the others are patient
    return dist.new_group(backend="gloo", timeout=datetime.timedelta(hours=12))


def refuse_another_run(path, saved, run):
    """Raise InputError unless the settings in run, a dict, are those of a saved checkpoint."""
    changes = []
    for name, value in run.items():
        old = saved["run"].get(name)
        if old != value:
            changes.append(f"{name} was {old} and is {value}")
    if "optimizer" not in saved:  # such as a copy of best.pt
        changes.append("it has no state of the optimizer")
    if changes:
        raise InputError(f"{path}: expected a checkpoint of this run, got another: "
                         f"{'; '.join(changes)}. Use another --out. There --init_from "
                         f"{os.path.dirname(path)} starts from these weights, of the same sizes.")


class Data(NamedTuple):
    """What load_data returns."""

    corpus: Corpus
    config: Config
    tokenizer: HashTokenizer
    codes: torch.Tensor  # integer (5 + V, C), by token ID
    targets: torch.Tensor | None  # integer (5 + V, k), what hash-mlm predicts
    word_counts: np.ndarray  # int (V,), how often each known word occurs
    batches: Batches


def load_data(args, start):
    """Prepare the corpus, make the config final, and hash each distinct word once; return Data."""
    with blame():
        folder = prepare(args.data, args.split, args.cache, args.vocab, args.quiet, args.field,
                         **reader_options(args))
        corpus = Corpus(folder)
        config = finalize(args, corpus)
        if start is None:
            tokenizer = build_tokenizer(args, config, corpus)
        else:
            tokenizer = load_tokenizer(start["tokenizer"], config, corpus)
        codes = build_codes(config, tokenizer, corpus, args.quiet)
        targets = build_targets(config, tokenizer, corpus, codes)
    # a hash that was just fitted to this corpus knows it
    if config.order and not args.quiet and (start is not None or tokenizer.is_fixed):
        report_unknown(tokenizer, corpus.words, corpus.counts)

    word_counts = corpus.counts[FIRST_WORD_ID:len(codes)]
    with blame("--data, --batch, --length"):
        if config.order:
            batches = TextBatches(corpus.ids, word_counts, config.length, args.batch, args.seed,
                                  args.short)
        else:
            batches = ItemSetBatches(corpus.ids, corpus.offsets, *corpus.split_pages(),
                                     word_counts, config.length, args.batch, args.seed)
    return Data(corpus, config, tokenizer, codes, targets, word_counts, batches)


def finalize(args, corpus):
    """Return the Config of the model: the settings, and the table sizes of the vocabulary."""
    config = Config.choose(vars(args))
    if args.init_from:  # args has the sizes of that run
        return config
    num_words = len(list_vocabulary(args, corpus))
    if config.code_format == "row":
        config.rows = FIRST_WORD_ID + num_words
    if config.code_format == "digest":  # a row for each bucket and special token of a map
        config.buckets = FIRST_WORD_ID + math.ceil(num_words / args.alpha)
    return config


def build(args, start, data, device):
    """Return model, objective and optimizer; the weights are those of start unless it is None."""
    torch.manual_seed(args.seed)
    model = Model(data.config)
    if start is not None:
        model.load_state_dict(start["model"])
    model.to(device).train()
    model.set_codes(data.codes)
    targets = data.targets
    if targets is not None:
        targets = targets.to(device)
    objective = OBJECTIVES[args.objective](
        data.config, mask_rate=args.mask, noise_rate=args.noise, mask_id=MASK,
        first_word_id=FIRST_WORD_ID, targets=targets, bloom_map=data.tokenizer.bloom_map,
        num_samples=args.samples)
    groups = parameter_groups(model, args.decay)
    optimizer = torch.optim.AdamW(groups, betas=(0.9, args.beta2), fused=True)
    return model, objective, optimizer


# -----------------------------------------------------------------------------
# Batches of a rank


def read_batches(args, batches, objective, step, device):
    """Return this rank's corrupted micro-batches, lists of objectives.Batch.

    The first result is a DataLoader with a list for each step from `step` on. The second is the
    list of held-out micro-batches, corrupted once for all evaluations.
    """
    rank, world, _ = read_ranks()
    rows = np.array_split(np.arange(args.batch), world)[rank]  # of each global batch
    held_out_rows = np.array_split(np.arange(batches.num_eval), world)[rank]
    held_out = []
    for part in divide(held_out_rows, args.micro):
        held_out.append(objective.corrupt_batch(*batches.eval_batch(part)))

    def read_step(step):
        """Return the micro-batches of a step, the same whichever worker reads it."""
        micro_batches = []
        for part in batches.divide_rows(step, rows, args.micro):
            micro_batches.append(objective.corrupt_batch(*batches.get_batch(step, part)))
        return micro_batches

    is_gpu = device.type == "cuda"
    num_workers = args.workers
    if num_workers is None:
        num_workers = GPU_WORKERS if is_gpu else 0
    loader = DataLoader(
        range(step, args.steps), batch_size=None, collate_fn=read_step,  # for each step a list
        num_workers=num_workers, pin_memory=is_gpu,
        # a worker lives until this process ends it: torch would end it at SIGTERM
        worker_init_fn=lambda worker: signal.signal(signal.SIGTERM, signal.SIG_IGN),
        multiprocessing_context="fork" if num_workers > 0 else None)  # fork copies no corpus
    return loader, held_out


# -----------------------------------------------------------------------------
# In the loop: evaluation, log, progress


@torch.no_grad()
def evaluate(model, objective, held_out, dtype):
    """Return loss and metrics of all ranks' held-out batches, a dict of float, and their sums."""
    model.eval()
    parts = []  # a dict for each micro-batch
    for batch in held_out:
        with autocast(model.device, dtype):
            sums = objective.evaluate(model, batch.to(model.device))
        parts.append({name: value.cpu().double().numpy() for name, value in sums.items()})
    model.train()

    totals = {}
    for sums in sum(gather_from_ranks(parts), []):  # a rank may have no held-out batch
        for name, value in sums.items():
            totals[name] = totals.get(name, 0) + value
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


def show(args, text):
    """Print text, unless --quiet."""
    if not args.quiet:
        with contextlib.suppress(OSError):  # a reader that has left does not end a run
            print(text, flush=True)


def describe(args, model, data, world, runtime):
    """Return the first lines of a run, about its model, corpus and steps."""
    c = model.config
    size = count_parameters(model)
    meta = data.corpus.meta
    lines = [
        f"model: emb {args.emb}, split {args.split}, objective {args.objective}, {c.layers} "
        f"layers, width {c.width}, length {c.length}, attention {args.attn}",
        f"parameters: {size['total']:,}; embedding {size['embedding']:,} "
        f"(PoEP {100 * size['poep']:.2f} %)",
        f"corpus: {meta['data']}, {meta['words']:,} words, {meta['distinct']:,} distinct, "
        f"{meta['documents']:,} documents; {data.batches.num_eval:,} held-out sequences",
        f"steps: {args.steps:,} = {args.steps / data.batches.steps_per_epoch:.1f} epochs, "
        f"lr {args.lr:g}, warm-up {args.warmup:,}",
        f"batch: {args.batch} = {world} ranks × {math.ceil(args.batch // world / args.micro)} "
        f"micro-batches of at most {args.micro}",
        f"device: {runtime}, torch {torch.__version__}, seed {args.seed}"]
    if c.attn == "lsh" and c.dropout > 0:
        lines.append("dropout: not of attention weights, with --attn lsh")
    bloom_map = data.tokenizer.bloom_map
    if bloom_map is not None:
        lines.append(f"Bloom map: {bloom_map.n_items:,} items in {bloom_map.m} maps of "
                     f"{bloom_map.buckets:,} buckets of {bloom_map.alpha}; with special tokens "
                     f"{bloom_map.m * c.buckets:,} rows")
    return "\n".join(lines)


def pretrain(argv):
    """Parse the flags, hold --out, and train; return the last evaluation."""
    commands = (__doc__ or "").split("\nOne training step")[0]  # no __doc__: python -OO
    args, start = parse_flags(argv, description=commands)
    rank, _, _ = read_ranks()
    with lock_output(args.out, rank):  # another run may be saving the checkpoint there
        return train(args, start)


def main(argv=None):
    """Train as argv says (default: the command line); return the last evaluation."""
    return run_script("pretrain.py", pretrain, argv)


if __name__ == "__main__":
    main()
