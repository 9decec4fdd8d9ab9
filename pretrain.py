"""Pre-train a transformer over hashed words.

    python pretrain.py                                              train on the docstrings of the
                                                                    installed Python packages
    python pretrain.py --emb pool --hash md5 --data my_texts/       your own files
    python pretrain.py --objective hash-mlm                         masked words, by their hashes
    python pretrain.py --preset superbloom-small --data pages.jsonl      your own item sets
    torchrun --nproc_per_node=8 pretrain.py --emb proj --hash lsh   eight GPUs or processes

Sources: [HF] Xue & Aletras 2022, HashFormers. [SB] Anderson et al. 2020, Superbloom

One training step of the default run. B = 32 sequences of L = 128 positions, d = 128 numbers a
vector, T = 128 bits of a word's hash, eight of them in a byte:

    Draw(ids, noise, ...)   batches.get_batch(step, rows): a function of seed and step, so that a
                            resumed run reads the same batches
    inputs, labels (B, L)   objective.corrupt: some words are shuffled, others are random. For a GPU
                            workers do this ahead of time: it does not need the model
    codes (B, L, T / 8)     model.codes of inputs. Nothing is hashed here: each distinct word was
                            hashed once, before training, and a word's bits are a row of a table
    x (B, L, d)             model.inputs: codes to vectors; model.layers: attention
    logits (B, L, 3)        model.head: intact, shuffled or random?
    loss                    objective.loss: the sum over positions. It is divided by their number in
                            the batch of all ranks, then come backward and optimizer.step

The functions stand in the order in which a reader needs them: pretrain sets up, train has the loop,
train_step the step. Out of scope: settings (support/flags.py), words and batches (data/loading.py),
checkpoints (support/run.py), log.jsonl (support/log.py), what is printed (support/reports.py).
"""

import contextlib
import io
import math
import signal
import sys

import torch

from data.loading import corrupt_held_out, load_data, open_loader, until_signal
from model import STEP_STRIDE, Model, parameter_groups
from objectives import build_objective
from support.common import InputError, Ranks, autocast, catch_signals, lock_output, resolve_device
from support.common import run_script
from support.flags import parse_flags
from support.log import Log
from support.plot import draw_losses
from support.reports import describe_baselines, describe_end, describe_interruption
from support.reports import describe_next, describe_run
from support.run import Run, check_same_ranks, check_same_run, list_facts, list_settings
from support.run import load_saved

LOG_EVERY = 10  # steps
RANK_STRIDE = 4_099  # seed of a step · stride + rank is that of a rank


def pretrain(args, initial, ranks):
    """Prepare data and model, train from the last checkpoint on; return the last evaluation.

    Args:
        args: Namespace, all settings. They are final.
        initial: dict, the checkpoint of --init_from, or None.
        ranks: support.common.Ranks: torchrun starts a process, a rank, for each GPU.
    """
    runtime = resolve_device(args, ranks.local_rank)
    ranks.connect(runtime.device.type, hours=12)  # one node prepares the corpus, the others wait

    # The checkpoint to continue, {} for a new run. Other settings are refused before the slow work
    saved = load_saved(args.out)
    check_same_run(saved, list_settings(args), args.out)
    if args.dtype == "auto" and saved:
        runtime = runtime._replace(dtype=saved["dtype"])

    # Words, their hashes, and batches of token IDs. This may take hours
    data = load_data(args, initial, show_control=not saved and ranks.is_first)
    facts = list_facts(args, data)
    check_same_run(saved, facts, args.out)  # of the same words and hashes, too
    check_same_ranks(ranks, [saved.get("step"), runtime.dtype, facts])

    # Model, objective and optimizer: fresh, from --init_from, or as the checkpoint has them
    model = build_model(args.seed, data, initial, runtime)
    objective = build_objective(data.config, args, data, runtime.device)
    optimizer = torch.optim.AdamW(
        parameter_groups(model, args.decay), betas=(0.9, args.beta2), fused=True)
    log = Log(args.out, args.steps, args.batch * data.batches.words_per_sequence, model, ranks,
              runtime)
    run = Run(args.out, facts, data, objective.kinds, runtime.dtype, log, ranks.is_first)
    run.restore(saved, model, optimizer)

    # What is about to run, its loss so far, and two baselines: a uniform guess, label frequencies
    log.show(describe_run(args, data, model, ranks.world, runtime))
    held_out = corrupt_held_out(data.batches, objective, args.micro, ranks)
    result, totals = evaluate(model, objective, held_out, ranks, runtime)
    baselines = objective.expected_loss(data.word_counts, totals)
    log.show(describe_baselines(run.step, result, *baselines))

    # Train, unless the checkpoint is of the last step
    had_ended = run.step == args.steps
    if not had_ended:
        with catch_signals() as signals, open_loader(
                data.batches, objective, range(run.step, args.steps), ranks.share(args.batch),
                args.micro, args.workers, runtime.device) as loader:
            result = train(args, run, model, objective, optimizer,
                           until_signal(loader, ranks, signals), held_out, ranks, runtime)
    ranks.wait()  # subtle: a rank that leaves early aborts the others
    if run.step < args.steps:
        log.show(describe_interruption(run.step, args.out))
        number = signals[0] if signals else signal.SIGTERM  # another rank received it
        raise SystemExit(128 + number)

    log.show(describe_end(args.out, run, result, baselines, had_ended))
    if ranks.is_first:
        log.show(draw_losses(args.out, *baselines))
    log.show(describe_next(args.out, data))
    return result


def build_model(seed, data, initial, runtime):
    """Return a Model with fresh weights, or with those of a checkpoint, initial."""
    torch.manual_seed(seed)
    model = Model(data.config)
    if initial is not None:
        model.load_state_dict(initial["model"])
    model.to(runtime.device)
    model.set_codes(data.codes)
    if runtime.use_compile:
        # windows of text have one shape, to compile for; sets have many
        model.encode = torch.compile(model.encode, dynamic=not data.config.order)
    return model


# -----------------------------------------------------------------------------
# Training


def train(args, run, model, objective, optimizer, loader, held_out, ranks, runtime):
    """Take the steps that are left; now and then log, evaluate and save.

    Args:
        loader: iterable of lists of objectives.Batch, the part of this rank of each step. It ends
            at the last step, or at a signal.
        held_out: list of objectives.Batch.

    Returns:
        dict of float, the last evaluation; {} if a signal came before it.
    """
    result = {}
    ddp_model = ranks.wrap(model)
    run.log.restart_clock(run.step)
    for micro_batches in loader:
        # A rate for this step, and random numbers that a resumed run draws again
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(args, run.step)
        seed_step(args.seed, run.step, ranks.rank, model)
        loss, num_scored, norm = train_step(
            ddp_model, objective, optimizer, micro_batches, args.clip, ranks, runtime)
        run.step += 1

        # Now and then pause to log, evaluate or save. No other step waits for the GPU, but to send
        # new hyperplanes (--lsh_redraw)
        if is_due(LOG_EVERY, run.step, args.steps):
            loss = ranks.total(loss.item()) / num_scored
            lr = optimizer.param_groups[0]["lr"]
            run.log.write_step(run.step, dict(loss=loss, lr=lr, grad_norm=norm.item()))
        if is_due(args.eval_every, run.step, args.steps):
            result, _ = evaluate(model, objective, held_out, ranks, runtime)
            run.log.write_evaluation(run.step, result)
            if result["eval_loss"] < run.best:
                run.best = result["eval_loss"]
                run.save("best.pt", model)
        if is_due(args.save_every, run.step, args.steps):
            run.save("ckpt.pt", model, optimizer)
    if run.step < args.steps:
        run.save("ckpt.pt", model, optimizer)
    return result


def train_step(model, objective, optimizer, micro_batches, clip, ranks, runtime):
    """Take one optimizer step.

    The loss of a step is one mean: the sum over the scored positions of all ranks, divided by
    their number. It is no mean of means, so ranks and micro-batches may score unequally many.

    Args:
        model: Model, or what Ranks.wrap makes of it.
        micro_batches: list of objectives.Batch, those of this rank. Their gradients add up.
        clip: float, norm of the gradient at most; 0: any.

    Returns:
        loss: tensor, the sum over the scored positions of this rank.
        num_scored: int, positions that all ranks score, 1 if there are none.
        norm: tensor, that of the gradient, before it is clipped.
    """
    num_scored = ranks.total(sum(len(batch.positions) for batch in micro_batches))
    num_scored = max(num_scored, 1)  # a divisor
    scale = ranks.world / num_scored  # subtle: DDP takes the mean of the ranks' gradients
    total_loss = torch.zeros((), device=runtime.device)
    optimizer.zero_grad()
    for i, batch in enumerate(micro_batches):
        # DDP exchanges gradients once a step, in the last backward. A plain Model ignores this
        model.require_backward_grad_sync = i == len(micro_batches) - 1
        with autocast(runtime.device, runtime.dtype):
            loss = objective.loss(model, batch.to(runtime.device))
        (loss * scale).backward()
        total_loss += loss.detach()

    max_norm = clip if clip > 0 else math.inf  # inf: measured, not clipped
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    optimizer.step()
    return total_loss, num_scored, norm


def is_due(every, step, num_steps):
    """Return whether a step does what is done every so many steps, and in the last one."""
    return step % every == 0 or step == num_steps


def learning_rate(args, step):
    """Return a step's rate: warm-up to --lr, then linear [HF Table 4] or rsqrt decay. [SB §3.2]"""
    if step < args.warmup:
        return args.lr * ((step + 1) / args.warmup)
    if args.schedule == "linear":
        return args.lr * ((args.steps - step) / (args.steps - args.warmup))
    if args.schedule == "rsqrt":
        return args.lr * ((step + 1) / max(args.warmup, 1)) ** -0.5
    raise NotImplementedError(args.schedule)


def seed_step(seed, step, rank, model):
    """Seed what a step draws; a resumed run draws the same.

    Each rank has dropout and sampled rows of its own. All have the same hyperplanes.
    """
    step_seed = seed * STEP_STRIDE + step
    torch.manual_seed((step_seed * RANK_STRIDE + rank) % 2**63)
    if model.config.lsh_redraw:
        model.redraw_hyperplanes(step_seed)


@torch.no_grad()
def evaluate(model, objective, held_out, ranks, runtime):
    """Evaluate a model on the held-out batches of all ranks.

    Returns:
        result: dict of float, the loss of a position and the metrics of the objective.
        totals: dict, the sums from which they follow, of Objective.evaluate.
    """
    model.eval()
    sums = {}  # of this rank; {} where it has no held-out batch
    for batch in held_out:
        with autocast(runtime.device, runtime.dtype):
            part = objective.evaluate(model, batch.to(runtime.device))
        for name, value in part.items():
            sums[name] = sums.get(name, 0) + value.cpu().double().numpy()
    model.train()

    totals = ranks.add_up(sums)
    if totals["scored"] == 0:
        raise InputError("--data: expected words to predict in the held-out text, got none. "
                         "Use more text or a larger --mask.")
    eval_loss = float(totals["loss"] / totals["scored"])
    return dict(eval_loss=eval_loss, **objective.metrics(totals)), totals


# -----------------------------------------------------------------------------
# The command


def start(argv):
    """Read the flags, hold --out, and pre-train; return the last evaluation."""
    with Ranks() as ranks:
        output = sys.stdout if ranks.is_first else io.StringIO()  # one rank prints
        with contextlib.redirect_stdout(output):
            args, initial = parse_flags(argv, __doc__)
            with lock_output(args.out, ranks.rank):  # another run may save its checkpoint there
                return pretrain(args, initial, ranks)


def main(argv=None):
    """Train as argv says (default: the command line); return the last evaluation."""
    return run_script("pretrain.py", start, argv)


if __name__ == "__main__":
    main()
