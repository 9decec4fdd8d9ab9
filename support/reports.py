"""What pretrain.py prints about a run: functions that take numbers and return text.

Out of scope: when it is printed (pretrain.py, log.py), figures (plot.py).
"""

import datetime
import math

import torch

from model import count_parameters
from support.common import quote_command
from tokenizer import FIRST_WORD_ID


def describe_run(args, data, model, world, runtime):
    """Return what is about to run: model, data, steps and device.

    Args:
        args: Namespace, all settings.
        data: data.loading.Data.
        world: int, ranks.
        runtime: common.Runtime.
    """
    c = model.config
    size = count_parameters(model)
    meta = data.corpus.meta
    num_epochs = args.steps / data.batches.steps_per_epoch
    num_micro_batches = math.ceil(args.batch // world / args.micro)
    return (
        f"model: emb {args.emb}, split {args.split}, objective {args.objective}, {c.layers} "
        f"layers, width {c.width}, length {c.length}, attention {args.attn}\n"
        f"parameters: {size['total']:,}; embedding {size['embedding']:,} "
        f"(PoEP {100 * size['poep']:.2f} %)\n"
        f"corpus: {meta['data']}, {meta['words']:,} words, {meta['distinct']:,} distinct, "
        f"{meta['documents']:,} documents; {data.batches.num_eval:,} held-out sequences\n"
        f"steps: {args.steps:,} = {num_epochs:.1f} epochs, lr {args.lr:g}, "
        f"warm-up {args.warmup:,}\n"
        f"batch: {args.batch} = {world} ranks × {num_micro_batches} micro-batches of at most "
        f"{args.micro}\n"
        f"device: {runtime.device}, {runtime.dtype}, compile {runtime.use_compile}, "
        f"torch {torch.__version__}, seed {args.seed}")


def describe_baselines(step, result, num_classes, unigram_loss):
    """Return the loss so far, of an evaluation, beside two that know nothing of a text.

    Args:
        step: int.
        result: dict, the evaluation.
        num_classes: int, of which an untrained model guesses one.
        unigram_loss: float, that of the label frequencies.
    """
    # abs: the entropy of labels that are all equal is -0.0
    return (f"eval_loss: {result['eval_loss']:.3f} at step {step:,}; uniform baseline "
            f"{math.log(num_classes):.3f} = ln {num_classes:,}, label frequencies "
            f"{abs(unigram_loss):.3f}")


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
    """Return the numbers of an evaluation, a dict, as text."""
    return ", ".join(f"{name} {value:.3f}" for name, value in result.items())


def describe_interruption(step, folder):
    """Return how to resume a run that a signal has ended. folder: --out."""
    return (f"Interrupted at step {step:,}; saved {folder}/ckpt.pt. Rerun the same command to "
            "resume: on a CPU bit for bit, with the same ranks, threads and --micro.")


def describe_end(folder, run, result, baselines, had_ended):
    """Return how a run has ended, with a warning if it has learned nothing.

    Args:
        folder: str, --out.
        run: run.Run.
        result: dict, the last evaluation.
        baselines: num_classes and unigram_loss, as Objective.expected_loss returns them.
        had_ended: bool, whether it had ended before this process, which has saved nothing then.
    """
    if had_ended:
        text = f"This run has ended. Step {run.step:,}: {describe_result(result)}"
    else:
        text = f"Saved {folder}/ckpt.pt, and the lowest loss in best.pt: eval_loss {run.best:.3f}"
    _, unigram_loss = baselines
    if result["eval_loss"] >= unigram_loss > 0:
        text += "\nwarning: no better than label frequencies. Use more --steps, or more text."
    return text


def describe_next(folder, data):
    """Return the command of infer.py that shows what the model in a folder has learned.

    data: data.loading.Data, of which an input is taken.
    """
    if not data.config.order:  # which names go with these, of a held-out set?
        ids, *_ = data.batches.eval_batch([data.batches.num_eval // 2])  # (1, L)
        names = [data.corpus.words[i - FIRST_WORD_ID] for i in ids[0, :3].tolist()]
        has_spaces = any(" " in name for name in names)
        example = ("\t" if has_spaces else " ").join(names)
    elif data.config.predicts_rows:  # which word is it?
        example = "the cat sat on the [MASK]"
    else:  # which words are out of order?
        example = "the cat sat mat the on"
    return "Next: " + quote_command(["python", "infer.py", "--ckpt", folder, example])
