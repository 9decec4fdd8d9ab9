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

import argparse
import contextlib
import dataclasses
import datetime
import json
import math
import os
import signal
import sys
import time

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from tqdm import tqdm

from common import InputError, add_device_flags, at_least, autocast, blame_input, catch_signals
from common import gather_from_ranks, load_checkpoint, lock_output, read_ranks, remove
from common import resolve_device, run_script, save_checkpoint, sum_over_ranks
from data.batches import build_batches
from data.codes import build_codes, build_targets, build_tokenizer, list_vocabulary, load_tokenizer
from data.codes import report_unknown
from data.corpus import Corpus, name_data, prepare
from data.rows import add_reader_flags, reader_options
from embeddings import EMBEDDINGS
from model import CHOICES, PRESETS, Config, Model, count_operations, count_parameters
from model import parameter_groups
from objectives import OBJECTIVES
from plot import draw_losses
from tokenizer import FIRST_WORD_ID, HASHES, MASK, SPLITS

# The seed of a step is seed · stride + step: runs of fewer steps share none with another seed
SEED_STRIDE = 1_000_003
RANK_STRIDE = 4_099  # the same for ranks


def train(args, start):
    """Train with settings args from weights of the checkpoint start, or None; return the result."""
    # Ranks: torchrun starts a process for each GPU. The first one alone prints and writes
    rank, world, local_rank = read_ranks()
    device, dtype, use_compile = resolve_device(args, local_rank)
    is_gpu = device.type == "cuda"
    is_first = rank == 0
    args.quiet = args.quiet or not is_first
    if args.batch % world != 0:
        raise InputError(f"--batch: expected a multiple of {world} ranks, got {args.batch}.")
    if world > 1:
        # nccl adds up gradients; gloo what the host counts, so that no step waits for the GPU
        dist.init_process_group("cpu:gloo,cuda:nccl" if is_gpu else "gloo")
        # ranks wait in this group, with its patience, for a node that prepares its corpus
        patient = dist.new_group(backend="gloo", timeout=datetime.timedelta(hours=12))

    def show(text):
        if not args.quiet:
            with contextlib.suppress(OSError):  # a reader that has left does not end a run
                tqdm.write(text)
                sys.stdout.flush()

    # Resume: the same command goes on where the checkpoint ends. That must be of this run, which
    # is checked before hours of preparation, and again when the data is known
    run = {name: value for name, value in vars(args).items() if name not in FREE}
    if start is not None:
        run["init_from"] = f"{os.path.normpath(args.init_from)} at step {start['step']}"
    path = os.path.join(args.out, "ckpt.pt")
    saved = None
    if os.path.exists(path):
        saved = load_checkpoint(path)
        refuse_other_run(saved["run"], run, path)

    # Data: token IDs on disk, and the hash codes of each distinct word
    with blame_input():
        corpus = Corpus(prepare(args.data, args.split, args.cache, args.vocab, args.quiet,
                                args.field, **reader_options(args)))
        config = finalize(args, corpus)
        if start is None:
            tokenizer = build_tokenizer(args, config, corpus)
        else:
            tokenizer = load_tokenizer(start["tokenizer"], config, corpus)
        codes = build_codes(config, tokenizer, corpus, args.quiet)
        targets = build_targets(config, tokenizer, corpus, codes)  # None where none is predicted
        # a hash that was just fitted to this corpus knows it
        if args.order and not args.quiet and (start is not None or tokenizer.is_fixed):
            report_unknown(tokenizer, corpus.words, corpus.counts)
        word_counts = corpus.counts[FIRST_WORD_ID:len(codes)]  # of the known words
        batches = build_batches(args, config, corpus, word_counts)

    # Model, objective, optimizer
    torch.manual_seed(args.seed)
    model = Model(config)
    if start is not None:
        model.load_state_dict(start["model"])
    model.to(device).train()
    model.set_codes(codes)
    if targets is not None:
        targets = targets.to(device)
    objective = OBJECTIVES[args.objective](
        config, mask_rate=args.mask, noise_rate=args.noise, mask_id=MASK,
        first_word_id=FIRST_WORD_ID, targets=targets, bloom_map=tokenizer.bloom_map,
        num_samples=args.samples)
    groups = parameter_groups(model, args.decay)
    optimizer = torch.optim.AdamW(groups, betas=(0.9, args.beta2), fused=True)

    run["corpus"] = corpus.meta["digest"]
    if tokenizer.bloom_map is not None:
        run["bloom"] = tokenizer.bloom_map.checksum()
    step = 0
    best = math.inf
    log_size = 0
    if saved is not None:
        refuse_other_run(saved["run"], run, path)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        step = saved["step"]
        best = saved["best"]
        log_size = saved["log_size"]
        if args.dtype == "auto":
            dtype = saved["dtype"]
        saved = None  # gives its memory back
    elif is_first:  # of a run that ended before its first ckpt.pt
        remove(os.path.join(args.out, "best.pt"))

    # Compile, and join the ranks
    if use_compile:
        model.encode = torch.compile(model.encode)
    ddp_model = model
    if world > 1:
        states = gather_from_ranks((step, dtype, run), patient)
        if states.count(states[0]) < world:
            raise InputError("--out, --cache: expected a folder that all nodes see, got ranks that "
                             "differ in steps, data, hashes or dtypes.")
        # takes the mean of the gradients over ranks, while backward still computes others
        ddp_model = DistributedDataParallel(model)

    # The rows that this rank reads, in micro-batches. Of a batch of 8, rank 1 of 2 with --micro 3
    # reads the rows 4 to 6, and 7. Held-out rows are dealt out too, and corrupted once for all
    share = args.batch // world
    micro = min(args.micro, share)
    end = share * (rank + 1)
    slices = [slice(i, min(i + micro, end)) for i in range(share * rank, end, micro)]
    rows = np.array_split(np.arange(batches.num_eval), world)[rank]
    held_out = []
    for i in range(0, len(rows), micro):
        held_out.append(objective.corrupt_batch(*batches.eval_batch(rows[i:i + micro])))

    # Summary: what is about to run, and the loss that theory expects of an untrained model
    show(describe(args, model, corpus, batches, tokenizer.bloom_map))
    show(f"batch: {args.batch} = {world} ranks × {len(slices)} micro-batches of at most {micro}\n"
         f"device: {device}, {dtype}, compile {use_compile}, torch {torch.__version__}, "
         f"seed {args.seed}")
    result, counts = evaluate(model, objective, held_out, device, dtype)
    num_classes, unigram_loss = objective.expected_loss(word_counts, counts)
    uniform_loss = math.log(num_classes)
    show(f"eval_loss: {result['eval_loss']:.3f} at step {step:,}; uniform baseline "
         f"{uniform_loss:.3f} = ln {num_classes:,}, frequencies alone {unigram_loss:.3f}")

    # Log and checkpoints. Rows after the last checkpoint are cut, as their steps run again
    log_path = os.path.join(args.out, "log.jsonl")
    if is_first:
        with open(log_path, "a") as file:
            file.truncate(min(log_size, file.tell()))
    frequent_words = corpus.frequent(50_000)  # candidates of infer.py

    def save(name, **state):
        if is_first:
            save_checkpoint(
                os.path.join(args.out, name), model, tokenizer.state(), run=run, dtype=dtype,
                words=frequent_words, step=step, best=best, log_size=os.path.getsize(log_path),
                **state)

    # -----------------------------------------------------------------------------
    # Training loop
    def read_step(step):
        """Return the corrupted micro-batches of a step and this rank, whichever worker reads."""
        micro_batches = []
        # rows: a slice, or of item sets an array, since sets of similar size go together
        for rows in batches.micro_batch_rows(step, slices):
            micro_batches.append(objective.corrupt_batch(*batches.get_batch(step, rows)))
        return micro_batches

    if args.workers is None:
        args.workers = 4 if is_gpu else 0
    loader = DataLoader(
        range(args.steps), batch_size=None, sampler=range(step, args.steps), collate_fn=read_step,
        num_workers=args.workers, pin_memory=is_gpu,
        # a worker lives until this process ends it: torch would end it at SIGTERM
        worker_init_fn=lambda worker: signal.signal(signal.SIGTERM, signal.SIG_IGN),
        multiprocessing_context="fork" if args.workers > 0 else None)  # fork copies no corpus
    max_norm = args.clip if args.clip > 0 else math.inf  # inf: measured, not clipped
    words = args.batch * batches.words_per_sequence  # of a step
    operations = words * count_operations(model) / world  # of a step and device
    was_finished = step == args.steps
    clock = time.perf_counter()  # when the last row of the log was, at clock_step
    clock_step = step
    shown = clock  # when the last line of progress was
    # None: where there is no terminal, lines instead of a bar
    bar = tqdm(initial=step, total=args.steps, leave=False, disable=args.quiet or None)
    with bar, catch_signals() as signals:
        for micro_batches in loader:
            # Add up over ranks: the scored positions of the whole batch, and the signals, so that a
            # signal to one rank stops all of them before the same step
            num_scored = sum(len(batch.positions) for batch in micro_batches)
            numbers = sum_over_ranks(torch.tensor([num_scored, len(signals)]))
            num_scored, num_signals = numbers.tolist()
            if num_signals > 0:
                save("ckpt.pt", optimizer=optimizer.state_dict())
                break

            # Dropout and sampled rows depend on seed, step and rank alone, so that a resumed run
            # draws the same
            step_seed = args.seed * SEED_STRIDE + step
            torch.manual_seed((step_seed * RANK_STRIDE + rank) % 2**63)
            if config.lsh_redraw:
                model.redraw_hyperplanes(step_seed)

            # Forward and backward. objective.loss is the sum over the scored positions of a
            # micro-batch. The loss of the step is the mean over those of the whole batch, so each
            # sum is divided by num_scored, and the gradients add up. A mean of means would give a
            # micro-batch with few scored positions too much weight.
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

            # Clip and step
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            lr = learning_rate(args, step)
            for group in optimizer.param_groups:
                group["lr"] = lr
            optimizer.step()
            step += 1
            bar.update()

            # Now and then log, evaluate and save. No other step waits for the GPU
            is_last = step == args.steps
            if step % 10 == 0 or is_last:
                mean_loss = sum_over_ranks(total_loss.cpu()).item() / num_scored
                seconds = (time.perf_counter() - clock) / (step - clock_step)  # of a step
                row = dict(loss=mean_loss, lr=lr, grad_norm=norm.item())
                row["words_per_s"] = words / seconds
                if is_gpu:
                    row["tflops"] = operations / seconds / 1e12
                    row["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
                write_log(log_path, step, row, is_first)
                text = f"loss {mean_loss:.3f}, {words / seconds:,.0f} words/s"
                bar.set_postfix_str(text)
                if bar.disable and time.perf_counter() - shown >= 30:
                    left = tqdm.format_interval((args.steps - step) * seconds)
                    show(f"step {step:,} of {args.steps:,}: {text}, {left} left")
                    shown = time.perf_counter()
            if step % args.eval_every == 0 or is_last:
                result, _ = evaluate(model, objective, held_out, device, dtype)
                write_log(log_path, step, result, is_first)
                if result["eval_loss"] < best:
                    best = result["eval_loss"]
                    save("best.pt")
                metrics = ", ".join(f"{name} {value:.3f}" for name, value in result.items())
                show(f"step {step:,}: {metrics}")
            if step % args.save_every == 0 or is_last:
                save("ckpt.pt", optimizer=optimizer.state_dict())
            if step % 10 == 0:  # here, so that a row's speed is that of the steps alone
                clock = time.perf_counter()
                clock_step = step

    # End
    if world > 1:
        dist.barrier(patient)  # subtle: a rank that leaves early aborts the others
    if step < args.steps:
        show(f"Interrupted at step {step:,}; saved {path}. Rerun the same command to resume, "
             "bit for bit on the same device, ranks, threads and --micro.")
        number = signals[0] if signals else signal.SIGTERM  # of another rank
        raise SystemExit(128 + number)
    word = "Finished before:" if was_finished else "Saved"
    show(f"{word} {path}, and the lowest loss in best.pt: eval_loss {best:.3f}")
    if result["eval_loss"] >= unigram_loss:
        show("warning: no better than frequencies alone. Use more --steps, or more text.")
    if is_first:
        show(draw_losses(args.out, uniform_loss, unigram_loss))
    show(f"Next: python infer.py --ckpt {args.out}")
    return result


# -----------------------------------------------------------------------------
# What train calls


def learning_rate(args, step):
    """Return a step's rate: warm-up to --lr, then linear [HF Table 4] or rsqrt decay. [SB §3.2]"""
    rise = (step + 1) / max(args.warmup, 1)  # 1 at the end of the warm-up
    # fall is at least 1 during the warm-up, so that min takes rise
    if args.schedule == "linear":
        fall = (args.steps - step) / max(args.steps - args.warmup, 1)
    else:
        fall = rise**-0.5
    return args.lr * min(rise, fall)


@torch.no_grad()
def evaluate(model, objective, held_out, device, dtype):
    """Return loss and metrics of all ranks' held-out batches, a dict, and the metrics' counts."""
    model.eval()
    # loss, scored positions, and the metrics' counts, all of which add up over batches and ranks
    sums = torch.zeros(2 + objective.num_counts, dtype=torch.float64)
    for batch in held_out:
        with autocast(device, dtype):
            loss, counts = objective.evaluate(model, batch.to(device))
        sums[0] += loss.item()
        sums[1] += len(batch.positions)
        sums[2:] += counts.cpu()
    model.train()

    total_loss, num_scored, *counts = sum_over_ranks(sums).tolist()
    if num_scored == 0:
        raise InputError("--data: expected words to predict in the held-out text, got none. "
                         "Use more text or a larger --mask.")
    result = dict(eval_loss=total_loss / num_scored, **objective.metrics(counts))
    return result, counts


def write_log(path, step, numbers, is_first):
    """Append a row to log.jsonl, with six digits. All ranks have the same numbers, a dict."""
    row = dict(step=step)
    for name, value in numbers.items():
        if not math.isfinite(value):
            raise InputError(f"--lr: expected finite numbers in step {step}, got {name} {value}. "
                             f"What stands beside {path} is older. Try a lower --lr.")
        row[name] = float(f"{value:.6g}")
    if is_first:
        with open(path, "a") as file:
            file.write(json.dumps(row) + "\n")


def describe(args, model, corpus, batches, bloom_map):
    """Return the first lines of a run, about its model, corpus and steps."""
    c = model.config
    size = count_parameters(model)
    lines = [
        f"model: emb {args.emb}, split {args.split}, objective {args.objective}, {c.layers} "
        f"layers, width {c.width}, length {c.length}, attention {args.attn}",
        f"parameters: {size['total']:,}; embedding {size['embedding']:,} "
        f"(PoEP {100 * size['poep']:.2f} %)",
        "corpus: {data}, {words:,} words, {distinct:,} distinct, {documents:,} documents; "
        .format(**corpus.meta) + f"{batches.num_eval:,} held-out sequences",
        f"steps: {args.steps:,} = {args.steps / batches.steps_per_epoch:.1f} epochs, "
        f"lr {args.lr:g}, warm-up {args.warmup:,}"]
    if bloom_map is not None:
        lines.append(f"Bloom map: {bloom_map.n_items:,} items in {bloom_map.m} maps of "
                     f"{bloom_map.buckets:,} buckets of {bloom_map.alpha}; with special tokens "
                     f"{bloom_map.m * c.buckets:,} rows")
    return "\n".join(lines)


def refuse_other_run(old, new, path):
    """Raise InputError unless the run of the checkpoint at `path`, old, has our settings, new."""
    changes = []
    for name, value in new.items():
        if old.get(name) != value:
            changes.append(f"{name} was {old.get(name)} and is {value}")
    if changes:
        raise InputError(f"{path}: expected a checkpoint of this run, got another: "
                         f"{'; '.join(changes)}. Use another --out. There --init_from "
                         f"{os.path.dirname(path)} starts from these weights, of the same sizes.")


# -----------------------------------------------------------------------------
# Settings: flags and fields of model.Config, most of them both

# Defaults beside those of Config, and of presets. That of emb follows from others (fill_settings)
DEFAULTS = dict(
    data="python", vocab=50_000, cache="cache", hash="lsh", features=50_000, hash_seed=0, emb=None,
    preset="tiny", alpha=25, coherent=0, mask=0.15, noise=0.10, samples=8_192, short=0.0,
    schedule="linear", decay=0.01, beta2=0.999, lr_mlm=None, clip=1.0, seed=0, eval_every=1_000,
    save_every=1_000, quiet=False)
# With --init_from these come from the other run, as do the fields of Config
WORDS = ("preset", "split", "vocab", "hash", "features", "key", "hash_seed", "alpha", "coherent",
         "objective")
HASHED = ("index", "chunks", "bits")  # code formats that --hash makes
PREDICTED = ("digest", "sketch")  # code formats that the default objective predicts
# A run may be resumed with other values of these. Instead of --data its content is compared
FREE = ("data", "field", "encoding", "sep", "header", "cache", "out", "device", "dtype", "compile",
        "micro", "workers", "eval_every", "save_every", "quiet")


def parse_flags(argv=None):
    """Return all settings as a Namespace, and the checkpoint of --init_from or None."""
    parser = build_parser()
    defaults = vars(parser.parse_args([]))
    # parsed again, flags that are not on the command line stay None
    flags = vars(parser.parse_args(argv, argparse.Namespace(**dict.fromkeys(defaults))))
    flags = {name: value for name, value in flags.items() if value is not None}
    start = None
    inherited = {}
    if "init_from" in flags:
        start = load_checkpoint(flags["init_from"])
        inherited = read_inherited(start, flags)

    # The later one counts: default, preset, checkpoint of --init_from, flag
    fixed = inherited | flags
    preset = PRESETS[(defaults | fixed)["preset"]]
    args = argparse.Namespace(**defaults | preset | inherited | flags)
    fill_settings(args, fixed)
    check_flags(args, flags)
    if args.out is None:
        args.out = name_output(args)
    return args, start


def read_inherited(start, flags):
    """Return the settings that a run takes from the checkpoint of --init_from: sizes and words.

    Data, batch, steps and rates are defaults of its preset, whatever flags the other run had.
    """
    run = start["run"]  # settings of pretrain.py, or results of finetune.py
    source = f"--init_from {flags['init_from']}"
    if any(name not in run for name in WORDS):
        raise InputError(f"{source}: expected a checkpoint of pretrain.py.")
    with blame_input(source):
        config = Config(**start["config"])
    inherited = {name: run[name] for name in WORDS} | dataclasses.asdict(config)
    for name, value in inherited.items():
        may_differ = name in ("preset", "dropout")  # the weights fit all the same
        if name in flags and flags[name] != value and not may_differ:
            raise InputError(f"--{name}: expected {value}, as in {source}, got {flags[name]}. "
                             "Remove one of the two flags.")
    return inherited


def fill_settings(args, fixed):
    """Set in place what follows from other settings, unless it is among the fixed ones, a dict."""
    predicts_words = args.head != "sr"  # the preset, or the run of --init_from

    # what a sequence is. Bloom digests are of items
    if args.split is None:
        is_bloom = args.emb is not None and EMBEDDINGS[args.emb].code_format == "digest"
        if is_bloom or not args.order:
            args.split = "items"
    args.order = args.split != "items"
    if not args.order:
        predicts_words = True  # a set has no order that shuffling could change
        # lsh_pairs upper would take one score for (i, j) and (j, i), by the order of i and j
        sets = dict(data="python-names", vocab=None, length=32, lsh_pairs="all", short=0.0)
        vars(args).update(sets | fixed)

    # what a word is: a table with a row for each word has none for a new one, so it reads pieces.
    # Hashes read whole words, as any word has a hash
    if args.emb is None:
        args.emb = "proj" if args.order else "bloom"
    code_format = EMBEDDINGS[args.emb].code_format
    if args.split is None:
        args.split = "bpe" if code_format == "row" else "regex"

    # what is predicted
    if args.objective is None:
        args.objective = "hash-mlm" if code_format in PREDICTED else "sr"
        if args.objective == "sr" and predicts_words:
            args.objective = "mlm" if code_format == "row" else "hash-mlm"
    args.head = OBJECTIVES[args.objective].head

    # sizes and rates
    follows = dict(warmup=min(args.warmup, args.steps // 10))
    if args.split == "phrases":
        follows["vocab"] = 1_000_000
    if "width" in fixed:
        follows["ffn"] = 4 * args.width
    if args.head != "sr" and args.lr_mlm is not None:
        follows["lr"] = args.lr_mlm
    vars(args).update(follows | fixed)
    # LSH needs a hyperplane for each bit or row. They are the rotations of one random vector of F
    # numbers, of which there are F (hashing.NgramLSH)
    num_hyperplanes = args.rows if code_format == "index" else args.bits
    args.features = max(args.features, num_hyperplanes)


def check_flags(args, flags):
    """Raise InputError for settings that contradict each other, or flags without their effect.

    flags are those of the command line. A size of another method is ignored.
    """
    code_format = EMBEDDINGS[args.emb].code_format
    is_hashed = code_format in HASHED
    if "hash" in flags and not is_hashed:
        raise InputError(f"--hash: {args.emb} has no such hash. Use another --emb.")
    if "key" in flags:  # it is for secrets
        is_lsh = is_hashed and args.hash == "lsh" and args.head != "hash-mlm"
        if is_lsh or code_format in ("row", "digest"):
            raise InputError("--key requires --hash md5, a sketch, or --objective hash-mlm.")
    if "vocab" in flags and args.split in ("regex", "space") and is_hashed:
        raise InputError(f"--vocab: {args.emb} reads any word. Use --split bpe.")
    if "mask" in flags and args.head == "sr":
        raise InputError("--mask requires --objective mlm, sampled or hash-mlm.")
    if args.attn != "lsh" and any(name.startswith("lsh_") for name in flags):
        raise InputError("--lsh_... requires --attn lsh.")
    if args.short > 0 and not args.order:
        raise InputError("--short requires texts, got --split items.")
    with blame_input(), torch.device("meta"):
        config = Config.choose(vars(args))
        Model(config)  # takes no memory, and raises where sizes do not fit each other
    if args.coherent > 0:
        if code_format != "digest" or args.order or args.coherent > config.hashes:
            raise InputError("--coherent requires --emb bloom over item sets, and at most as many "
                             f"as --hashes, got {args.coherent}.")


def name_output(args):
    """Return the default --out, such as out/proj-lsh: what a run hashes, predicts and reads."""
    code_format = EMBEDDINGS[args.emb].code_format
    parts = [args.emb]
    if code_format in HASHED:
        parts.append(args.hash)
    if args.split != "regex":
        parts.append(args.split)
    usual_objective = "hash-mlm" if code_format in PREDICTED else "sr"
    if args.objective != usual_objective:
        parts.append(args.objective)
    if args.attn == "lsh":
        parts.append("lsh-attention")
    if args.data != ("python" if args.order else "python-names"):
        parts.append(name_data(args.data))
    return os.path.join("out", "-".join(parts))


def finalize(args, corpus):
    """Return the Config of the model, which nothing changes later: settings, and a vocabulary."""
    config = Config.choose(vars(args))
    if args.init_from:
        return config  # of the other run
    num_words = len(list_vocabulary(args, corpus))
    if config.code_format == "row":
        config.rows = FIRST_WORD_ID + num_words
    if config.code_format == "digest":  # of a map: a row for each bucket and special token
        config.buckets = FIRST_WORD_ID + math.ceil(num_words / args.alpha)
    return config


def build_parser():
    """Return the parser of all flags, with the defaults of Config and DEFAULTS."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False,
        prog="pretrain.py",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="python pretrain.py [flags]        (--help explains them)",
        description=(__doc__ or "").split("\nOne training step")[0])
    fields = {field.name: field.default for field in dataclasses.fields(Config)}
    parser.set_defaults(**fields | DEFAULTS)
    count = at_least(1)
    index = at_least(0)
    rate = at_least(0, float)
    share = at_least(0.001, float, 0.999)

    def add(flag, kind, help):
        """Add a flag to the last group. kind: its choices, bool, or a function of its text."""
        if kind is bool:
            options = dict(action=argparse.BooleanOptionalAction)
        elif isinstance(kind, tuple):
            options = dict(choices=kind)
        else:
            options = dict(type=kind)
        action = group.add_argument(flag, **options)
        default = PRESETS["tiny"].get(action.dest, action.default)
        action.help = help if default is None else f"{help} (default: {default})"

    group = parser.add_argument_group("words: every distinct word gets an ID [HF §3.1]")
    add("--data", str, "python: docstrings of the installed Python; stdlib: of its library; "
        "python-names: sets of names; wikipedia or any hub ID; file or folder; or several, with +")
    add("--split", SPLITS, "regex: runs of letters or punctuation; space: at white space; bpe: BPE "
        "pieces; phrases: frequent words and pairs, and pieces for the rest; items: item sets "
        "(default: regex, of lookup bpe, of bloom items)")
    add("--field", str, "column of text or lists; of sets also PAGE,ITEM (default: text)")
    add_reader_flags(group.add_argument)
    add("--vocab", count, "BPE pieces, or words of a lookup; of phrases 1,000,000, of items all")
    add("--cache", str, "folder of prepared corpora; one serves all hashes")

    group = parser.add_argument_group("hashes: of --emb emb, pool, add, proj and linear")
    add("--hash", tuple(HASHES), "md5 gives random bits [HF §3.2], lsh of n-grams similar words "
        "similar bits [HF §3.3]")
    add("--bits", at_least(8, maximum=1 << 16), "T of each hash")
    add("--chunk", count, "bits of a chunk of pool")
    add("--features", count, "n-grams that lsh keeps, at least --bits or --rows")
    add("--key", str, "secret key of md5 and of sketches (default: none)")
    add("--hash_seed", index, "seed of lsh, Bloom maps and sketches")

    group = parser.add_argument_group("model: a post-LN transformer over embedded words [HF §4.2]")
    presets = tuple(name for name in PRESETS if "steps" in PRESETS[name])  # others: finetune.py
    add("--preset", presets, "sizes and recipe of a paper, or ours for two cores: defaults "
        "of other flags. This help shows those of tiny")
    add("--emb", tuple(EMBEDDINGS), "how a word becomes a vector: a class of embeddings.py "
        "(default: proj, of sets bloom, or the preset's)")
    add("--layers", at_least(0, maximum=1_000), "encoder layers; 0 sees one word at a time")
    add("--width", count, "hidden size d")
    add("--heads", count, "attention heads")
    add("--ffn", count, "feed-forward size; with --width 4 d")
    add("--length", at_least(2), "positions, [CLS] included")
    add("--types", count, "token type embeddings")
    add("--rows", count, "hash buckets of emb and weighted")
    add("--act", CHOICES["act"], "feed-forward activation")
    add("--dropout", float, "also of attention")
    add("--tied", bool, "share the rows of lookup, bloom, median or mean with the output layer "
        "(default: of lookup and bloom)")

    group = parser.add_argument_group(
        "Bloom digests: --emb bloom [SB §3.2]. Sketches: median and mean [CM], weighted [SV], and "
        "--objective hash-mlm")
    add("--alpha", count, "items that share a Bloom token, at most √N")
    add("--coherent", index, "maps with items of a page together")
    add("--hashes", at_least(1, maximum=99), "m of an item, k of a sketch (default: 2, 5)")
    add("--buckets", count, "rows, or classes, of a hash function of a sketch")
    add("--weights", count, "rows of the importance table of weighted")

    group = parser.add_argument_group("attention: dense, or of the pairs that collide [BL §2.1]")
    add("--attn", CHOICES["attn"], "full: without the flags below")
    add("--lsh_bands", count, "hyperplanes of a hash function")
    add("--lsh_buckets", count, "buckets of a hash function")
    add("--lsh_hashes", count, "hash functions; a pair collides if one agrees")
    add("--lsh_fill", CHOICES["lsh_fill"], "other pairs weigh exp(0), or nothing")
    add("--lsh_pairs", CHOICES["lsh_pairs"], "upper: (i, j) and (j, i) share a score, as released")
    add("--lsh_redraw", bool, "new hyperplanes in every training step")

    group = parser.add_argument_group("objective")
    add("--objective", tuple(OBJECTIVES), "sr: shuffled and random words [HF §3.6]; mlm, sampled: "
        "masked words of lookup [BERT §3.1] [SB §3.3]; hash-mlm: hashes of masked words [SB §2.4] "
        "(default: sr; of sketches, sets and presets that predict words mlm or hash-mlm)")
    add("--mask", share, "share of words masked, of all but sr")
    add("--noise", share, "share of words shuffled, and of the others replaced, of sr")
    add("--samples", count, "rows of the softmax of sampled")
    add("--short", at_least(0, float, 1), "share of text windows cut in training, as short texts")

    group = parser.add_argument_group("training, device and files")
    add("--init_from", str, "start from weights of another run, whose words and sizes stay")
    add("--batch", count, "sequences per step, all ranks")
    add("--micro", count, "sequences a device holds at once")
    add("--steps", count, "optimizer steps; for more of them, later, --init_from and a new --out")
    add("--lr", rate, "peak learning rate")
    add("--warmup", index, "steps to the peak; by default at most a tenth of --steps")
    add("--schedule", ("linear", "rsqrt"), "decay [HF Table 4] [SB §3.2]")
    add("--decay", rate, "weight decay of AdamW; 0: Adam")
    add("--clip", rate, "gradient clipping norm; 0: none")
    add("--seed", index, "of weights, batches, noise, dropout")
    add_device_flags(group.add_argument)
    add("--workers", index, "processes that make batches (default: 4 for a GPU, else 0)")
    add("--out", str, "folder of checkpoints and log (default: out/ and a name, as out/proj-lsh)")
    add("--eval_every", count, "steps between evaluations")
    add("--save_every", count, "steps between checkpoints")
    add("--quiet", bool, "print errors alone")
    return parser


def pretrain(argv):
    """Parse the flags, hold --out, and train; return the last evaluation."""
    args, start = parse_flags(argv)
    rank, _, _ = read_ranks()
    with lock_output(args.out, rank):  # another run may be saving the checkpoint there
        return train(args, start)


def main(argv=None):
    """Train as argv says (default: the command line); return the last evaluation."""
    return run_script("pretrain.py", pretrain, argv)


if __name__ == "__main__":
    main()
