"""Runs that differ in their draw of the hash functions: held-out losses and recall, row by row.

    bash runs/hash-draws.sh                                  trains the runs, and skips known ones
    python -m bench.draws losses --runs 'out/draws-*' --known results/draws.json
    python -m bench.draws frontier --runs 'out/frontier-*'
    python -m bench.draws recall --runs 'out/sets-*' --data simplewiki.jsonl.gz
    python -m bench.draws neighbors --data simplewiki.jsonl.gz
    python -m bench.draws neighbors --data python-names --items 20000   beside runs of --vocab 20000

A folder such as out/draws-proj-lsh-0 is a run of the variant proj-lsh. The rows, windows of text or
item sets, and what is corrupted in them are the same for all runs of a corpus, whatever their
seeds, so that two variants can be compared row by row (bench/claims.py).
"""

import contextlib
import glob
import statistics
from argparse import Namespace
from pathlib import Path
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F

import attention
from bench import harness
from bench.attention_controls import CONTROLS
from bench.harness import CORPUS, RUNS, load_corpus
from bench.superbloom import read_sets
from data.batches import Draw, TextBatches
from data.codes import build_targets
from data.neighbors import NEIGHBORS, rank_hidden_items
from objectives import build_objective, make_batch
from support.common import load_checkpoint
from tokenizer import FIRST_WORD_ID

MAX_ITEMS = 32  # of a held-out set, as in the preset superbloom-small
SETTINGS = ("seed", "hash_seed", "key", "steps", "corpus")  # of a run, kept beside its rows

LOSSES = """
    variant          | name  | s
    loss             | loss  | .4f ±
    runs             | seeds | ,
    held-out windows | n     | ,
"""
FRONTIER = """
    positions, attention | name  | s
    scored pairs, %      | pairs | .2f
    loss                 | loss  | .4f ±
    runs                 | seeds | ,
    held-out windows     | n     | ,
"""
RECALL = """
    variant       | name   | s
    rec@1, %      | recall | .2f ±
    runs          | seeds  | ,
    held-out sets | n      | ,
"""


def bench_losses(args):
    """Collect the held-out losses of pre-trained runs, window by window."""
    return collect(args, "loss", measure_windows)


def bench_frontier(args):
    """Collect the held-out losses of LSH attention beside the share of pairs that it scores."""
    for row in collect(args, "loss", measure_windows):
        shares = [run["settings"]["pairs"] for run in row["runs"]]
        yield row | dict(pairs=100 * statistics.mean(shares))


def bench_recall(args):
    """Collect the recall of runs over item sets, set by set; each item of a set is masked once."""
    return collect(args, "recall", measure_sets)


def bench_neighbors(args):
    """Measure the recall of popularity and neighbors as that of runs, each item masked once."""
    sets, ids, _ = read_sets(load_corpus(args, "items"), MAX_ITEMS, args.items)
    rows, columns = ids.nonzero(as_tuple=True)  # (n,), the set and the place of each item
    draw = Draw(ids[rows], None, is_masked=F.one_hot(columns, ids.shape[1]).bool())
    is_first = rank_hidden_items(sets, draw) == 0  # (n, 4)
    sizes = " ".join(str(size) for size in np.bincount(rows))  # of S sets
    for name, is_hit in zip(NEIGHBORS, is_first.T):
        hits = np.bincount(rows, is_hit)  # (S,)
        recall = 100 * hits * len(hits) / len(rows)  # as of measure_sets
        yield dict(
            name=name,
            seeds=0,
            n=len(hits),
            recall=float(recall.mean()),
            recall_rows=write_rows(recall),
            sizes=sizes,
        )


def collect(args, key, measure):
    """Yield a row for each variant of --runs, and of the file --known.

    Runs that have not ended are left out.

    Args:
        args: Namespace with the flags of the tables.
        key: str, of what is measured.
        measure: function(folder, args) -> numbers of the held-out rows, float array (n,), whose
            mean is what is measured, and the settings of the run, dict.
    """
    variants = {}  # name -> list of (run, dict; its numbers, a text)
    for name, row in harness.read_known(args).items():
        variants[name] = list(zip(row["runs"], row[f"{key}_rows"]))
    folders = []
    for pattern in args.runs:
        folders += sorted(glob.glob(pattern))
    for folder in folders:
        name = Path(folder).name  # such as draws-proj-lsh-0
        _, _, variant = name.rpartition("-")[0].partition("-")
        runs = variants.setdefault(variant, [])
        known = [run["run"] for run, _ in runs]
        if name in known or not has_ended(folder):
            continue
        numbers, settings = measure(folder, args)
        run = {"run": name, "settings": settings, key: float(numbers.mean())}
        runs.append((run, write_rows(numbers)))

    for name, runs in variants.items():
        if not runs:  # none has ended
            continue
        runs.sort(key=lambda pair: pair[0]["run"])
        _, text = runs[0]
        row = dict(name=name, seeds=len(runs), n=len(text.split()), runs=[run for run, _ in runs])
        yield row | harness.summarize(
            [{key: run[key], f"{key}_rows": text} for run, text in runs])


def write_rows(numbers):
    """Return a number for each held-out row as a text."""
    # three digits a row: what is rounded away is far below the error of a mean
    return " ".join(f"{number:.3f}" for number in numbers)


def has_ended(folder):
    """Return whether a run has taken its last step."""
    if not Path(folder, "ckpt.pt").exists():
        return False
    checkpoint = load_checkpoint(folder)
    return checkpoint["step"] == checkpoint["run"]["steps"]


def load_ended(folder, args):
    """Return model, corpus, objective and settings of a run, as they are after its last step."""
    model, tokenizer, corpus, run = harness.load_run_with_corpus(folder, args)
    targets = build_targets(model.config, tokenizer, corpus, model.codes)
    objective = build_objective(model.config, Namespace(**run),
                                Namespace(targets=targets, tokenizer=tokenizer), model.device)
    return model, corpus, objective, {name: run[name] for name in SETTINGS}


@torch.no_grad()
def measure_windows(folder, args):
    """Measure a run's loss on each held-out window.

    Returns:
        losses: float array (W,). A window counts by its number of scored positions: the mean over
            windows is the loss of a position, as pretrain.py reports it.
        settings: dict, those of SETTINGS, and pairs, the share of pairs that have a score.
    """
    model, corpus, objective, settings = load_ended(folder, args)
    word_counts = corpus.counts[FIRST_WORD_ID:len(model.codes)]
    batches = TextBatches(corpus.ids, word_counts, model.config.length, 32, seed=0)
    # all windows are corrupted at once, as in an evaluation, and read one by one
    held_out = objective.corrupt_batch(batches.eval_batch(slice(None)))
    torch.manual_seed(0)  # for random buckets
    losses = []
    num_scored = 0
    with contextlib.ExitStack() as stack:
        # the controls that the run's name has are those in which it was trained
        for name, use_control in CONTROLS.items():
            if name in Path(folder).name:
                stack.enter_context(use_control())
        shares = stack.enter_context(count_pairs())
        for inputs, labels in zip(held_out.inputs, held_out.labels):
            batch = make_batch(inputs.unsqueeze(0), labels.unsqueeze(0))
            losses.append(objective.loss(model, batch).item())
            num_scored += len(batch.positions)
    pairs = statistics.mean(shares) if shares else 1.0
    return np.array(losses) * len(losses) / num_scored, settings | dict(pairs=pairs)


@contextlib.contextmanager
def count_pairs():
    """Collect the share of pairs that collide, of each call of LSH attention, in a list."""
    attend = attention.lsh_attention
    shares = []

    def watch(q, k, v, hq, hk, **options):
        shares.append(attention.collisions(hq, hk).float().mean().item())
        return attend(q, k, v, hq, hk, **options)

    with mock.patch.object(attention, "lsh_attention", watch):
        yield shares


@torch.no_grad()
def measure_sets(folder, args):
    """Measure a run's recall@1 on each held-out set, in percent.

    Each item of a set is masked in turn: a set of five items gives five predictions, not one.

    Returns:
        recall: float array (S,). A set counts by its number of items: the mean over sets is the
            recall of an item.
        settings: dict, those of SETTINGS.
    """
    model, corpus, objective, settings = load_ended(folder, args)
    _, sets, _ = read_sets(corpus, model.config.length, len(model.codes) - FIRST_WORD_ID)
    hits = []
    num_items = 0
    for ids in sets:
        items = ids[ids != 0]  # (n,), without padding
        n = len(items)
        # row i has item i masked
        draw = Draw(items.repeat(n, 1), None, is_masked=torch.eye(n, dtype=torch.bool))
        batch = objective.corrupt_batch(draw)
        logits = objective.predict(model, batch)
        hits.append(objective.tally(logits, batch)["hits"][0].item())
        num_items += n
    return 100 * np.array(hits) * len(hits) / num_items, settings


FLAGS = CORPUS | RUNS | dict(known=None)
TABLES = {  # name -> function that yields the rows, columns, flags and their defaults
    "losses": (bench_losses, LOSSES, FLAGS),
    "frontier": (bench_frontier, FRONTIER, FLAGS),
    "recall": (bench_recall, RECALL, FLAGS),
    "neighbors": (bench_neighbors, RECALL, CORPUS | dict(items=None)),
}


if __name__ == "__main__":
    harness.main("bench.draws", TABLES, __doc__)
