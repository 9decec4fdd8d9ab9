"""Batches of token IDs: windows of text, padding.

Sources:
    [BERT] Devlin et al. 2019, and its code, create_pretraining_data.py
Out of scope: files (data/corpus.py), item sets (data/items.py), what an objective does to a batch
    (objectives.py).
Notation:
    B batch   L positions   n token IDs of a corpus   V words   W windows
    r rows of a batch that a rank or a micro-batch reads

A batch and its noise are a function of (seed, step) alone, so a resumed run sees the same batches
as one that never stopped. They are defined for the global batch. A rank asks for its rows of it, so
the number of ranks changes nothing.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from tokenizer import CLS, FIRST_WORD_ID, SEP, UNK

MAX_STRETCHES = 20  # of a text; the end of each is held out
MIN_STRETCH = 100  # windows; a shorter text has fewer stretches
HELD_OUT = 50  # one word in 50 is held out
MAX_EVAL_WORDS = 65_536  # held-out positions of an evaluation
POOL = 64  # batches whose examples length_batches sorts together

# What a random generator is for: a part of its seed, so that no two of them draw the same numbers
ORDER = 1
NOISE = 2
EVALUATION = 3
SEGMENTS = 4  # of data/items.py
LENGTHS = 5


class Draw(NamedTuple):
    """Some rows of a batch, and the random numbers from which an objective corrupts them.

    A Draw has noise and random_words, or is_masked.
    """

    ids: torch.Tensor  # int64 (r, L), 0 as padding. L is that of the longest row
    key_mask: torch.Tensor | None  # bool (r, L), False = padding; None: no row is ever padded
    # float32 (3, r, L), uniform in [0, 1): three numbers a position, which Objective.corrupt names
    noise: torch.Tensor | None = None
    random_words: torch.Tensor | None = None  # int64 (r, L), uniform over the words that occur
    is_masked: torch.Tensor | None = None  # bool (r, L), exactly these are masked


class Batches:
    """What TextBatches and items.ItemSetBatches share: the examples of a step, and its noise.

    A run calls get_batch, divide_rows and eval_batch. A subclass has

        draw_order      (epoch) -> the order of all training examples, int64: starts of windows, or
                        pages
        read            (examples, rng) -> the token IDs of r of them, int64 (r, L), 0 as padding.
                        The RowGenerator decides which part of each is read
        read_purpose    int, the part of that generator's seed
        eval_batch      (rows) -> the Draw of some of the num_eval held-out rows, one for all seeds

    Args:
        word_counts: int (V,), how often each known word occurs. All IDs from 5 + V on are unknown.
        length: int, L.
        batch_size: int, B, of the global batch.
        seed: int, of order and noise.

    Attributes, which a subclass sets:
        steps_per_epoch: int.
        num_eval: int, held-out sequences.
        words_per_sequence: float, words of a training sequence, on average.
        has_padding: bool.
    """

    def __init__(self, word_counts, length, batch_size, seed):
        self.length = length
        self.batch_size = batch_size
        self.seed = seed
        self.num_known = FIRST_WORD_ID + len(word_counts)
        self.word_ids = FIRST_WORD_ID + np.flatnonzero(word_counts)  # some pieces do not occur
        self.order_epoch = None  # that of self.order
        self.order = None  # of draw_order, kept by examples

    def get_batch(self, step, rows):
        """Return the Draw of some rows of a step's global batch.

        Args:
            step: int, from 0 on.
            rows: int array or slice.
        """
        examples = self.examples(step)[rows]
        rng = RowGenerator((self.seed, self.read_purpose, step), self.batch_size, rows)
        ids = self.read(examples, rng)
        rng = RowGenerator((self.seed, NOISE, step), self.batch_size, rows)
        return self.add_noise(ids, rng)

    def examples(self, step):
        """Return the training examples of a step, int64 (B,); each epoch shuffles them."""
        epoch, place = divmod(step, self.steps_per_epoch)
        if epoch != self.order_epoch:  # once: a large corpus has millions of examples
            self.order_epoch = epoch
            self.order = self.draw_order(epoch)
        first = place * self.batch_size
        return self.order[first:first + self.batch_size]

    def add_noise(self, ids, rng):
        """Return the Draw of IDs, int64 (r, L), with noise by a RowGenerator."""
        L = ids.shape[1]
        noise = [rng.random(self.length, dtype=np.float32)[:, :L] for _ in range(3)]
        random_words = self.word_ids[rng.integers(0, len(self.word_ids), self.length)[:, :L]]
        key_mask = ids != 0 if self.has_padding else None
        return Draw(ids, key_mask, torch.from_numpy(np.stack(noise)),
                    torch.from_numpy(random_words))

    def divide_rows(self, step, rows, size):
        """Return the rows of each micro-batch: `rows`, an int array, in parts of at most `size`."""
        return divide(rows, size)


class RowGenerator:
    """Random numbers for some rows of a batch.

    Numbers are drawn for the whole batch, and those of the rows are returned. So the numbers of a
    row do not depend on which rank, or micro-batch, reads it. That is cheap: a few milliseconds for
    65,536 positions.

    Args:
        seed: tuple of int.
        batch_size: int, rows of the whole batch.
        rows: int array or slice, r rows.
    """

    def __init__(self, seed, batch_size, rows):
        self.rng = np.random.default_rng(seed)
        self.batch_size = batch_size
        self.rows = rows

    def random(self, *shape, dtype=np.float64):
        """Return uniform numbers in [0, 1), (r, *shape)."""
        return self.rng.random((self.batch_size, *shape), dtype)[self.rows]

    def integers(self, start, stop, *shape):
        """Return uniform integers from start to stop - 1, (r, *shape)."""
        return self.rng.integers(start, stop, (self.batch_size, *shape))[self.rows]


# Windows of text


class TextBatches(Batches):
    """Windows of text, each behind a [CLS].

    Some training windows are cut, since users' texts are short: a model trained on full windows
    does badly on them. A cut window has a random length, ends with [SEP], as a text does, and is
    padded. [BERT] cuts one in ten as well: short_seq_prob in its code.

    Args:
        ids: integer (n,), token IDs of the corpus. Unknown ones are read as [UNK].
        word_counts, length, batch_size, seed: as in Batches; one position of length is [CLS].
        short: float, share of the training windows that are cut.

    Raises:
        ValueError: If the text has too few windows for one batch.
    """

    read_purpose = LENGTHS

    def __init__(self, ids, word_counts, length, batch_size, seed, short=0.0):
        super().__init__(word_counts, length, batch_size, seed)
        self.ids = ids
        self.short = short
        self.has_padding = short > 0
        self.min_size = min(3, length)  # of a cut window: [CLS], a word and [SEP]
        cut_words = (self.min_size + length) / 2 - 2  # on average
        self.words_per_sequence = (1 - short) * (length - 1) + short * cut_words
        self.starts, self.eval_starts = text_windows(len(ids), length)
        self.num_eval = len(self.eval_starts)
        self.steps_per_epoch = len(self.starts) // batch_size
        if self.steps_per_epoch == 0:
            raise ValueError(f"expected batches of at most {len(self.starts):,} windows of this "
                             f"text, got {batch_size}. Use smaller batches or more text.")

    def draw_order(self, epoch):
        """Draw the starts of an epoch's windows: one shift for all, and their order."""
        rng = np.random.default_rng([self.seed, ORDER, epoch])
        shift = rng.integers(self.length - 1)
        return rng.permutation(self.starts) + shift

    def read(self, starts, rng):
        """Read windows, and cut a share of them. [BERT]"""
        ids = self.read_windows(starts)
        is_cut = rng.random() < self.short  # (r,)
        sizes = rng.integers(self.min_size, self.length + 1)  # (r,)
        for window, cut, size in zip(ids, is_cut, sizes):  # views: ids changes
            if cut:
                window[size - 1] = SEP
                window[size:] = 0
        return ids

    def eval_batch(self, rows):
        ids = self.read_windows(self.eval_starts[rows])
        return self.add_noise(ids, RowGenerator((0, EVALUATION), self.num_eval, rows))

    def read_windows(self, starts):
        """Return int64 (r, L): the windows that begin at starts, int64 (r,)."""
        places = starts[:, None] + np.arange(self.length - 1)  # (r, L - 1)
        ids = self.ids[places].astype(np.int64)
        ids[ids >= self.num_known] = UNK
        ids = np.insert(ids, 0, CLS, axis=1)
        return torch.from_numpy(ids)


def text_windows(num_ids, length):
    """Cut a corpus into training windows and held-out windows of length - 1 IDs.

    The text is cut into up to 20 stretches, and the last fiftieth of each is held out. So every
    part of the text is represented, and held-out text is whole passages.

        | training, held out | training, held out | ...

    Each epoch shifts all training windows by the same number of IDs, less than a window.

    Args:
        num_ids: int, n.
        length: int, L, with the [CLS] that every window begins with.

    Returns:
        train, held_out: int64 (W,), the starts of the windows.

    Raises:
        ValueError: If there are too few IDs for a window of each kind.
    """
    window_size = length - 1  # without [CLS]
    num_stretches = min(MAX_STRETCHES, num_ids // (MIN_STRETCH * window_size))
    edges = np.linspace(0, num_ids, max(1, num_stretches) + 1).astype(np.int64)
    train = []
    held_out = []
    for start, end in zip(edges[:-1], edges[1:]):
        middle = end - max((end - start) // HELD_OUT, window_size)
        if middle - start < 2 * window_size:
            raise ValueError(f"expected at least {3 * window_size:,} words for windows of "
                             f"{length}, got {num_ids:,}. Use a smaller length, more text, "
                             "or --split bpe.")
        # one window fewer than fits: a shifted one must not reach into held-out text
        num_fit = (middle - start) // window_size
        train.extend(start + window_size * np.arange(num_fit - 1))
        held_out.extend(range(middle, end - window_size + 1, window_size))
    # at most MAX_EVAL_WORDS positions are scored: windows at equal distances in a large text
    num_windows = min(len(held_out), max(1, MAX_EVAL_WORDS // length))
    chosen = np.linspace(0, len(held_out) - 1, num_windows).astype(int)
    return np.array(train), np.array(held_out)[chosen]


# Examples of any length


def length_batches(examples, batch_size, rng=None):
    """Batch examples of similar length together, since they need little padding.

    Args:
        examples: list of n sequences.
        batch_size: int.
        rng: numpy Generator, to shuffle; 64 batches are then sorted by length together. None: all
            examples, sorted by length.

    Returns:
        list of int64 arrays, the indices of a batch's examples.
    """
    lengths = np.array([len(example) for example in examples])
    pools = [np.arange(len(lengths))]
    if rng is not None:
        pools = divide(rng.permutation(len(lengths)), POOL * batch_size)
    batches = []
    for pool in pools:
        by_length = np.argsort(lengths[pool], kind="stable")
        batches.extend(divide(pool[by_length], batch_size))
    if rng is not None:
        batches = [batches[i] for i in rng.permutation(len(batches))]
    return batches


def divide(values, size):
    """Divide an array or a list into parts of a size; the last may be shorter."""
    return [values[start:start + size] for start in range(0, len(values), size)]


def pad_batch(examples):
    """Pad sequences with 0 to the longest.

    Args:
        examples: list of integer arrays without 0.

    Returns:
        ids: int64 (B, L).
        mask: bool (B, L), True = attend, or None where nothing is padded.
    """
    examples = [torch.as_tensor(example, dtype=torch.int64) for example in examples]
    ids = pad_sequence(examples, batch_first=True)
    mask = ids != 0
    if mask.all():
        mask = None
    return ids, mask
