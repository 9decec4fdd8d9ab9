"""What a run of pretrain.py reads: the corpus, its words as codes, and batches made ahead of time.

    data = load_data(args, initial, show_control=True)   once, before training
    held_out = corrupt_held_out(data.batches, ...)       the batches of all evaluations
    with open_loader(data.batches, ...) as loader:       the batches of each step

Out of scope: what is in a batch (batches.py, items.py), how it is corrupted (objectives.py), codes
(codes.py).
"""

import contextlib
import multiprocessing
import signal
from typing import NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader

from data.batches import Batches, TextBatches, divide
from data.codes import build_codes, build_targets, build_tokenizer, load_tokenizer, report_unknown
from data.corpus import Corpus, prepare
from data.items import ItemSetBatches, split_pages
from data.neighbors import CONTROL_NAMES, describe_neighbors
from data.rows import reader_options
from model import Config
from objectives import Batch
from support.common import InputError, begin_worker, blame, ending_children, num_cores
from tokenizer import FIRST_WORD_ID, HashTokenizer

GPU_WORKERS = 4  # processes that make batches: a GPU takes them faster than one process makes them
LOADER_PATIENCE = 600  # seconds to wait for a batch, the first of an epoch of billions of words
HAS_FORK = "fork" in multiprocessing.get_all_start_methods()  # a worker then copies no corpus


class Data(NamedTuple):
    """What a run reads: a corpus, its words as hashes, and its batches."""

    corpus: Corpus
    tokenizer: HashTokenizer
    config: Config  # of the model: the settings, and the sizes of tables of a vocabulary
    codes: torch.Tensor  # integer (5 + V, C), by token ID
    targets: torch.Tensor | None  # integer (5 + V, k), what hash-mlm predicts; None: not hash-mlm
    word_counts: np.ndarray  # int (V,), of each known word
    batches: Batches


def load_data(args, initial, show_control):
    """Prepare the corpus, and hash each distinct word once; return Data.

    Args:
        args: Namespace, all settings of pretrain.py.
        initial: dict, the checkpoint of --init_from, whose hashes are used; None: new ones.
        show_control: bool, print what a model of item sets has to beat.
    """
    # Words, and what maps them to codes
    with blame():  # without the package tokenizers there are no pieces
        folder = prepare(args.data, args.split, args.cache, max_subwords=args.vocab,
                         field=args.field, **reader_options(args))
    corpus = Corpus(folder)
    config = Config.choose(vars(args))
    if initial is None:
        tokenizer, config = build_tokenizer(args, config, corpus)
    else:  # args has the sizes of that run
        tokenizer = load_tokenizer(initial["tokenizer"], config, corpus)
    codes = build_codes(config, tokenizer, corpus)
    targets = build_targets(config, tokenizer, corpus, codes)
    # a hash that was just fitted to this corpus knows its words; that of another run, or a
    # vocabulary, may not. Unknown items of sets are left out
    if config.order and (initial is not None or tokenizer.is_fixed):
        report_unknown(tokenizer, corpus.words, corpus.counts)

    # Batches of token IDs
    word_counts = corpus.counts[FIRST_WORD_ID:len(codes)]
    options = dict(word_counts=word_counts, length=config.length, batch_size=args.batch,
                   seed=args.seed)
    with blame("--data, --batch, --length"):
        if config.order:
            batches = TextBatches(corpus.ids, short=args.short, **options)
        else:
            batches = ItemSetBatches(corpus.ids, corpus.offsets, *split_pages(corpus), **options)
    if not config.order and show_control and len(batches.ids) <= CONTROL_NAMES:
        print(describe_neighbors(batches), flush=True)
    return Data(corpus, tokenizer, config, codes, targets, word_counts, batches)


# -----------------------------------------------------------------------------
# Corrupted batches


def corrupt_held_out(batches, objective, micro, ranks):
    """Return this rank's part of the held-out set, a list of objectives.Batch of `micro` rows.

    It is corrupted once: all evaluations read the same.
    """
    parts = divide(ranks.share(batches.num_eval), micro)
    return [objective.corrupt_batch(batches.eval_batch(part)) for part in parts]


@contextlib.contextmanager
def open_loader(batches, objective, steps, rows, micro, num_workers, device):
    """Return a context with an iterator: it yields a list of objectives.Batch for each step.

    These are the micro-batches of the step. A worker sends them through a pipe as NumPy arrays:
    tensors would need shared memory, of which a container may have too little. Workers end with
    the block, even if they are stuck.

    Args:
        batches: Batches.
        objective: objectives.Objective, which corrupts them.
        steps: range, numbers of steps.
        rows: int array, the rows of each global batch that this rank reads.
        micro: int, rows of a micro-batch at most.
        num_workers: int, processes that make batches ahead of time; 0: this process makes them.
            None: as many as the device needs.
        device: torch.device, to which the batches will go.
    """
    def corrupt_step(step):
        """Return the micro-batches of a step, the same whichever worker makes them."""
        parts = batches.divide_rows(step, rows, micro)
        micro_batches = [objective.corrupt_batch(batches.get_batch(step, part)) for part in parts]
        return [to_arrays(batch) for batch in micro_batches]

    if num_workers is None:
        num_workers = 0
        if device.type == "cuda" and HAS_FORK:
            num_workers = min(GPU_WORKERS, num_cores())
    if num_workers > 0 and not HAS_FORK:
        raise InputError(f"--workers: requires a system that forks processes, such as Linux, got "
                         f"{num_workers}. Use --workers 0.")
    # the data set is the step numbers; collate_fn turns a number into its batches
    loader = DataLoader(
        steps, batch_size=None, collate_fn=corrupt_step,
        num_workers=num_workers, timeout=LOADER_PATIENCE if num_workers > 0 else 0,
        worker_init_fn=begin_loader_worker,
        multiprocessing_context="fork" if num_workers > 0 else None)
    with ending_children():
        try:
            yield ([to_tensors(batch) for batch in arrays] for arrays in start_loader(loader))
        # subtle: around the block, since a signal tells PyTorch of a dead worker, and its handler
        # raises the error wherever this process is then, such as in a step
        except RuntimeError as error:
            if not str(error).startswith("DataLoader "):
                raise
            # a worker was killed, such as for lack of shared memory, or is stuck
            raise InputError(f"--workers: {error}. Use --workers 0.") from error


def start_loader(loader):
    """Return an iterator over a DataLoader, whose workers start now."""
    try:
        return iter(loader)
    except OSError as error:  # too few open files are allowed, or no shared memory is there
        raise InputError(f"--workers: {error}. Use --workers 0.") from error


def begin_loader_worker(number):
    """Prepare this process, a worker: it lives until its parent ends it, or has ended."""
    begin_worker()
    # other signals have the handlers of catch_signals, but torch sets another for SIGTERM
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def to_arrays(batch):
    """Return an objectives.Batch, on the host, with NumPy arrays in place of tensors."""
    return Batch(*[None if part is None else part.numpy() for part in batch])


def to_tensors(batch):
    """Return an objectives.Batch with tensors in place of NumPy arrays."""
    return Batch(*[None if part is None else torch.as_tensor(part) for part in batch])


def until_signal(loader, ranks, signals):
    """Yield the micro-batches of each step, and end before the next one when a rank got a signal.

    A signal to one rank has to stop all of them before the same step. They can save then.

    Args:
        loader: as open_loader yields it.
        ranks: support.common.Ranks. Sums over the ranks are on the host: no step waits for a GPU.
        signals: list of int, which catch_signals fills.
    """
    for micro_batches in loader:
        if ranks.total(len(signals)) > 0:
            return
        yield micro_batches
