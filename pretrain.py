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

The functions stand in the order in which a reader needs them: pretrain sets up, train has the loop,
train_step the step. Out of scope: settings (support/flags.py); checkpoints, log and reports
(support/bookkeeping.py).
"""

import math
import signal
from typing import NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader

from data.batches import Batches, TextBatches, divide
from data.codes import build_codes, build_targets, build_tokenizer, load_tokenizer, report_unknown
from data.corpus import Corpus, prepare
from data.items import ItemSetBatches, for_sets, split_pages
from data.rows import reader_options
from model import Config, Model, parameter_groups
from objectives import choose_objective
from support.bookkeeping import Run, report_baselines, report_end, report_start
from support.common import InputError, Ranks, autocast, blame, catch_signals, lock_output
from support.common import resolve_device, run_script, send
from support.flags import parse_flags
from tokenizer import FIRST_WORD_ID, MASK, HashTokenizer

LOG_EVERY = 10  # steps
GPU_WORKERS = 4  # processes that make batches: a GPU takes them faster than one process makes them
SEED_STRIDE = 1_000_003  # two runs with different --seed share no seed of a step below the stride
RANK_STRIDE = 4_099  # the same for the ranks of a step


def pretrain(args, initial, ranks):
    """Prepare data and model, then train from where the last checkpoint ends.

    Args:
        args: Namespace, all settings. They are final.
        initial: dict, the checkpoint of --init_from, or None.
        ranks: support.common.Ranks: torchrun starts a process, a rank, for each GPU.

    Returns:
        dict of float, the last evaluation.
    """
    runtime = resolve_device(args, ranks.local_rank)
    ranks.connect(runtime.device.type, hours=12)  # one node prepares the corpus, the others wait
    run = Run(args, ranks, runtime)  # raises if --out has a checkpoint with other settings

    # Words, their hashes, and batches of token IDs. This may take hours
    data = load_data(args, initial)
    run.add_data(data)  # raises if the checkpoint is of other words or hashes

    # Model, objective and optimizer: fresh, from --init_from, or as the checkpoint has them
    torch.manual_seed(args.seed)
    model = Model(data.config)
    if initial is not None:
        model.load_state_dict(initial["model"])
    model.to(run.device).train()
    model.set_codes(data.codes)
    objective_class = choose_objective(args.objective, data.config)
    if not data.config.order:
        objective_class = for_sets(objective_class)
    objective = objective_class(
        data.config, mask_rate=args.mask, sr_rate=args.noise, mask_id=MASK,
        first_word_id=FIRST_WORD_ID, targets=send(data.targets, run.device),
        bloom_map=data.tokenizer.coder.bloom_map, num_samples=args.samples)
    optimizer = torch.optim.AdamW(
        parameter_groups(model, args.decay), betas=(0.9, args.beta2), fused=True)
    run.restore(model, optimizer)
    if runtime.use_compile:
        # windows of text have one shape, to compile for; sets have many
        model.encode = torch.compile(model.encode, dynamic=not model.config.order)

    # What is about to run, its loss so far, and two baselines: a uniform guess, which an untrained
    # model makes, and label frequencies (from counts of words, sums of labels or both)
    report_start(run, model)
    held_out = corrupt_held_out(run, data.batches, objective)
    result, sums = evaluate(run, model, objective, held_out)
    baselines = report_baselines(run, result, *objective.expected_loss(data.word_counts, sums))

    # Train, unless the checkpoint is of the last step
    with catch_signals() as signals:
        if run.step < args.steps:
            loader = build_loader(run, data.batches, objective)
            result = train(run, model, objective, optimizer, loader, held_out, signals)
    ranks.wait()  # subtle: a rank that leaves early aborts the others
    report_end(run, signals, result, baselines)
    return result


# -----------------------------------------------------------------------------
# Training


def train(run, model, objective, optimizer, loader, held_out, signals):
    """Take the steps that are left; now and then log, evaluate and save.

    Args:
        loader: iterable of the micro-batches of each step, as build_loader returns it.
        held_out: list of objectives.Batch.
        signals: list of int, which catch_signals fills. Training ends before the next step if it
            is not empty, on this rank or another.

    Returns:
        dict of float, the last evaluation; None after a signal.
    """
    ddp_model = run.ranks.wrap(model)
    run.restart_clock()
    for micro_batches in loader:
        # Two sums over the ranks, on the host: the scored positions of the whole batch, and the
        # signals, since a signal to one rank has to stop all of them before the same step
        num_scored = sum(len(batch.positions) for batch in micro_batches)
        counts = run.ranks.sum(torch.tensor([num_scored, len(signals)]))
        num_scored, num_signals = counts.tolist()
        if num_signals > 0:
            run.save("ckpt.pt", model, optimizer=optimizer.state_dict())
            return None
        num_scored = max(num_scored, 1)  # a divisor
        seed_step(run, model)
        loss, norm = train_step(run, ddp_model, objective, optimizer, micro_batches, num_scored)
        run.step += 1

        # Now and then pause to log, evaluate or save. No other step waits for the GPU
        if run.is_due(LOG_EVERY):
            loss = run.ranks.sum(loss.cpu()).item() / num_scored
            lr = optimizer.param_groups[0]["lr"]
            run.log_step(model, dict(loss=loss, lr=lr, grad_norm=norm.item()))
        if run.is_due(run.args.eval_every):
            result, _ = evaluate(run, model, objective, held_out)
            if run.log_evaluation(result):  # the lowest loss so far
                run.save("best.pt", model)
        if run.is_due(run.args.save_every):
            run.save("ckpt.pt", model, optimizer=optimizer.state_dict())
    return result


def train_step(run, model, objective, optimizer, micro_batches, num_scored):
    """Take one optimizer step.

    The loss of a step is one mean: the sum over the scored positions of all ranks, divided by
    their number. It is no mean of means, so ranks and micro-batches may score unequally many.

    Args:
        model: Model, or what Ranks.wrap makes of it.
        micro_batches: list of objectives.Batch, those of this rank. Their gradients add up.
        num_scored: int, scored positions of all ranks, or 1 if there are none.

    Returns:
        loss: tensor, the sum over the scored positions of this rank.
        norm: tensor, that of the gradient, before it is clipped.
    """
    # subtle: DDP takes the mean of the ranks' gradients, hence the factor world
    scale = run.ranks.world / num_scored
    total_loss = torch.zeros((), device=run.device)
    optimizer.zero_grad()
    for i, batch in enumerate(micro_batches):
        # DDP exchanges gradients once a step, in the last backward. A plain Model ignores this
        model.require_backward_grad_sync = i == len(micro_batches) - 1
        with autocast(run.device, run.dtype):
            loss = objective.loss(model, batch.to(run.device))
        (loss * scale).backward()
        total_loss += loss.detach()

    max_norm = run.args.clip if run.args.clip > 0 else math.inf  # inf: measured, not clipped
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(run.args, run.step)
    optimizer.step()
    return total_loss, norm


def learning_rate(args, step):
    """Return a step's rate: warm-up to --lr, then linear [HF Table 4] or rsqrt decay. [SB §3.2]"""
    rise = (step + 1) / max(args.warmup, 1)  # 1 at the end of the warm-up
    # fall is at least 1 during the warm-up, so that min takes rise
    if args.schedule == "linear":
        fall = (args.steps - step) / max(args.steps - args.warmup, 1)
    else:
        fall = rise**-0.5
    return args.lr * min(rise, fall)


def seed_step(run, model):
    """Seed what a step draws: dropout, sampled rows, hyperplanes. A resumed run draws the same."""
    step_seed = run.args.seed * SEED_STRIDE + run.step
    torch.manual_seed((step_seed * RANK_STRIDE + run.ranks.rank) % 2**63)
    if model.config.lsh_redraw:
        model.redraw_hyperplanes(step_seed)


@torch.no_grad()
def evaluate(run, model, objective, held_out):
    """Return loss and metrics of all ranks' held-out batches, a dict of float, and their sums."""
    model.eval()
    parts = []  # the sums of each micro-batch, dict
    for batch in held_out:
        with autocast(run.device, run.dtype):
            part = objective.evaluate(model, batch.to(run.device))
        for name, value in part.items():
            part[name] = value.cpu().double().numpy()
        parts.append(part)
    model.train()

    parts = sum(run.ranks.gather(parts), [])  # of all ranks; some may have no held-out batch
    totals = {}
    for name in parts[0]:
        totals[name] = sum(part[name] for part in parts)
    if totals["scored"] == 0:
        raise InputError("--data: expected words to predict in the held-out text, got none. "
                         "Use more text or a larger --mask.")
    eval_loss = float(totals["loss"] / totals["scored"])
    return dict(eval_loss=eval_loss, **objective.metrics(totals)), totals


# -----------------------------------------------------------------------------
# Data


class Data(NamedTuple):
    """What a run reads: a corpus, its words as hashes, and its batches."""

    corpus: Corpus
    tokenizer: HashTokenizer
    config: Config  # of the model: the settings, and the sizes of tables of a vocabulary
    codes: torch.Tensor  # integer (5 + V, C), by token ID
    targets: torch.Tensor | None  # integer (5 + V, k), what hash-mlm predicts; None: not hash-mlm
    word_counts: np.ndarray  # int (V,), of each known word
    batches: Batches


def load_data(args, initial):
    """Prepare the corpus, and hash each distinct word once; return Data."""
    with blame():
        folder = prepare(args.data, args.split, args.cache, max_subwords=args.vocab,
                         quiet=args.quiet, field=args.field, **reader_options(args))
        corpus = Corpus(folder)
        config = Config.choose(vars(args))
        if initial is None:
            tokenizer, config = build_tokenizer(args, config, corpus)
        else:  # args has the sizes of that run
            tokenizer = load_tokenizer(initial["tokenizer"], config, corpus)
        codes = build_codes(config, tokenizer, corpus)
        targets = build_targets(config, tokenizer, corpus, codes)
    # a hash that was just fitted to this corpus knows it
    if config.order and not args.quiet and (initial is not None or tokenizer.is_fixed):
        report_unknown(tokenizer, corpus.words, corpus.counts)

    word_counts = corpus.counts[FIRST_WORD_ID:len(codes)]
    options = dict(word_counts=word_counts, length=config.length, batch_size=args.batch,
                   seed=args.seed)
    with blame("--data, --batch, --length"):
        if config.order:
            batches = TextBatches(corpus.ids, short=args.short, **options)
        else:
            batches = ItemSetBatches(corpus.ids, corpus.offsets, *split_pages(corpus), **options)
    return Data(corpus, tokenizer, config, codes, targets, word_counts, batches)


def build_loader(run, batches, objective):
    """Return a DataLoader of the steps that are left.

    A step is a list of corrupted micro-batches, objectives.Batch, of this rank's rows of its global
    batch.
    """
    rows = run.ranks.share(run.args.batch)

    def corrupt_step(step):
        """Return the micro-batches of a step, the same whichever worker makes them."""
        parts = batches.divide_rows(step, rows, run.args.micro)
        return [objective.corrupt_batch(batches.get_batch(step, part)) for part in parts]

    is_gpu = run.device.type == "cuda"
    num_workers = run.args.workers
    if num_workers is None:
        num_workers = GPU_WORKERS if is_gpu else 0
    # the data set is the step numbers; collate_fn turns a number into its batches
    return DataLoader(
        range(run.step, run.args.steps), batch_size=None, collate_fn=corrupt_step,
        num_workers=num_workers, pin_memory=is_gpu,
        # a worker lives until this process ends it: it inherits the handlers of catch_signals, but
        # torch sets another for SIGTERM
        worker_init_fn=lambda worker: signal.signal(signal.SIGTERM, signal.SIG_IGN),
        multiprocessing_context="fork" if num_workers > 0 else None)  # fork copies no corpus


def corrupt_held_out(run, batches, objective):
    """Return this rank's part of the held-out set, a list of objectives.Batch.

    It is corrupted once: all evaluations read the same.
    """
    parts = divide(run.ranks.share(batches.num_eval), run.args.micro)
    return [objective.corrupt_batch(batches.eval_batch(part)) for part in parts]


# -----------------------------------------------------------------------------
# The command


def start(argv):
    """Read the flags, hold --out, and pre-train; return the last evaluation."""
    ranks = Ranks()
    args, initial = parse_flags(argv, __doc__)
    with lock_output(args.out, ranks.rank):  # another run may be saving the checkpoint there
        return pretrain(args, initial, ranks)


def main(argv=None):
    """Train as argv says (default: the command line); return the last evaluation."""
    return run_script("pretrain.py", start, argv)


if __name__ == "__main__":
    main()
