"""Runs that differ in their draw of the hash functions: held-out losses, window by window.

    bash runs/hash-draws.sh                                  trains the runs, and skips known ones
    python -m bench.draws losses --runs out/draws-* --known results/draws.json

A folder such as out/draws-proj-lsh-0 is a run of the variant proj-lsh. The windows and their
corrupted words are the same for all runs of a corpus, whatever their seeds, so that two variants
can be compared window by window (bench/claims.py).
"""

import contextlib
import statistics
from pathlib import Path

import numpy as np
import torch

from bench import harness
from bench.attention import use_random_buckets
from bench.harness import CORPUS, RUNS
from data.batches import TextBatches
from objectives import OBJECTIVES, make_batch
from support.common import load_checkpoint, read_json
from tokenizer import FIRST_WORD_ID, MASK

RANDOM = "random"  # in the name of a variant that bench/random_pairs.py trained
SETTINGS = ("seed", "hash_seed", "key", "steps", "corpus")  # of a run, kept beside its losses

LOSSES = """
    variant                 | name  | s
    loss                    | loss  | .4f ±
    runs, a hash draw each  | seeds | ,
    held-out windows        | n     | ,
"""


def bench_losses(args):
    """Collect the held-out losses of pre-trained runs, window by window."""
    variants = {}  # name -> list of dict, a run each
    if args.known is not None and Path(args.known).exists():
        for row in read_json(args.known)["rows"]:
            runs = [run | dict(windows=text) for run, text in zip(row["runs"], row["loss_rows"])]
            variants[row["name"]] = runs
    for folder in args.runs:
        run = Path(folder).name
        _, _, variant = run.rpartition("-")[0].partition("-")
        runs = variants.setdefault(variant, [])
        if any(known["run"] == run for known in runs):
            continue
        losses, settings = measure_windows(folder, args)
        # three digits a window: what is rounded away is far below the error of a mean
        text = " ".join(f"{loss:.3f}" for loss in losses)
        runs.append(dict(run=run, loss=float(losses.mean()), settings=settings, windows=text))

    for name, runs in variants.items():
        runs.sort(key=lambda run: run["run"])
        losses = [run["loss"] for run in runs]
        row = dict(name=name, seeds=len(runs), n=len(runs[0]["windows"].split()),
                   loss=statistics.mean(losses), loss_all=losses)
        if len(losses) > 1:
            row["loss_std"] = statistics.stdev(losses)
        # a number for each window, of each run
        yield row | dict(runs=runs, loss_rows=[run.pop("windows") for run in runs])


def measure_windows(folder, args):
    """Measure a run's loss on each held-out window, with the weights of its last step.

    Returns:
        losses: float array (W,). A window counts by its number of scored positions: the mean over
            windows is the loss of a position, as pretrain.py reports it.
        settings: dict, those of SETTINGS.
    """
    checkpoint = load_checkpoint(Path(folder, "ckpt.pt"))
    run = checkpoint["run"]
    assert checkpoint["step"] == run["steps"], f"{folder}: expected a run that has ended"
    model, tokenizer, _ = harness.load_run(folder)
    corpus = harness.load_corpus_of(run, args)
    tokenizer.ids(corpus.words)
    harness.set_codes(model, tokenizer)
    config = model.config
    batches = TextBatches(
        corpus.ids, corpus.counts[FIRST_WORD_ID:len(model.codes)], config.length, 32, seed=0)
    objective = OBJECTIVES[run["objective"]](  # sr or mlm
        config, mask_rate=run["mask"], sr_rate=run["noise"], mask_id=MASK,
        first_word_id=FIRST_WORD_ID)

    # all windows are corrupted at once, as in an evaluation, and read one by one
    held_out = objective.corrupt_batch(batches.eval_batch(slice(None)))
    context = contextlib.nullcontext()  # changes nothing
    if RANDOM in Path(folder).name:
        context = use_random_buckets()
    model.eval()
    torch.manual_seed(0)  # for random buckets
    sums = []
    num_scored = 0
    with torch.no_grad(), context:
        for inputs, labels in zip(held_out.inputs, held_out.labels):
            batch = make_batch(inputs.unsqueeze(0), labels.unsqueeze(0))
            sums.append(objective.loss(model, batch).item())
            num_scored += len(batch.positions)
    losses = np.array(sums) * len(sums) / num_scored
    return losses, {name: run[name] for name in SETTINGS}


TABLES = {  # name -> function that yields the rows, columns, flags and their defaults
    "losses": (bench_losses, LOSSES, CORPUS | RUNS | dict(known=None)),
}


if __name__ == "__main__":
    harness.main("bench.draws", TABLES, __doc__)
