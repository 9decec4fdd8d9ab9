"""Batches of token IDs: windows of text, segments of item sets, padding.

A batch and its noise are a function of (seed, step) alone, so that a resumed run sees the same batches.

Paper map:    [SB §3.1] ItemSetBatches
Out of scope: files (data/corpus.py); what is done to a batch (objectives.py). Everything here takes arrays.
Notation:     B batch   L positions   W windows   P pages
"""

import numpy as np
import torch

MAX_EVAL_WORDS = 65_536  # held-out positions of an evaluation
MAX_EVAL_PAGES = 2_000  # held-out pages of an evaluation; one item of each is masked


def sample_noise(seed, batch_size, length, words, rows):
    """Sample a step's noise for the global batch, then slice rows of it: the same on one rank as on eight.

    Args: seed list[int]; batch_size, length int; words int64 (V,), token IDs; rows slice or int array.
    Returns: noise float32 (3, rows, L) uniform in [0, 1); random_words int64 (rows, L) uniform over words.
    """
    rng = np.random.default_rng(seed)
    noise = rng.random((3, batch_size, length), np.float32)
    places = rng.integers(0, len(words), (batch_size, length))
    return torch.from_numpy(noise[:, rows]), torch.from_numpy(words[places[rows]])


def text_windows(num_ids, length):
    """Cut a corpus into training stretches and held-out windows of length - 1 IDs.

    The text is cut into up to 20 stretches and the last fiftieth of each is held out: every part of the text
    is represented, and held-out text is whole passages. No training window reaches into it.
    Returns: train list of (start, end), windows may lie anywhere inside; held_out int64 (W,), their starts.
    Raises: ValueError, too few IDs for one window of each.
    """
    step = length - 1
    edges = np.linspace(0, num_ids, max(1, min(20, num_ids // (100 * step))) + 1).astype(np.int64)
    train, held_out = [], []
    for start, end in zip(edges[:-1], edges[1:]):
        middle = end - max((end - start) // 50, step)
        if middle - start < 2 * step:
            raise ValueError(f"--data: expected at least {3 * step:,} words for windows of {length}, got "
                             f"{num_ids:,}. Use a smaller --length or more text.")
        train.append((start, middle))
        held_out += range(middle, end - step + 1, step)
    most = min(len(held_out), max(1, MAX_EVAL_WORDS // length))
    return train, np.array(held_out)[np.linspace(0, len(held_out) - 1, most).astype(int)]


class TextBatches:
    """Windows of text: the sequences and noise of a step, sliced to the rows asked for.

    Args: ids integer (n,), the corpus; length int L; batch_size int, of the global batch; words int64 (V,),
        token IDs to draw random words from; seed int; first_id int, of [CLS], which every window begins with.
    Attributes: num_eval, steps_per_epoch int; words_per_sequence float.
    Raises: ValueError, too few windows for one batch.
    """
    def __init__(self, ids, length, batch_size, words, seed, first_id):
        self.ids, self.length, self.batch_size, self.words = ids, length, batch_size, words
        self.seed, self.first_id, self.epoch, self.words_per_sequence = seed, first_id, None, length - 1
        train, self.eval_starts = text_windows(len(ids), length)
        # one window fewer per stretch than would fit: each epoch shifts all by a number of words of its own
        self.starts = np.concatenate([np.arange(a, b - 2 * (length - 1) + 1, length - 1) for a, b in train])
        self.num_eval, self.steps_per_epoch = len(self.eval_starts), len(self.starts) // batch_size
        if not self.steps_per_epoch:
            raise ValueError(f"--batch: expected at most {len(self.starts):,} windows of this text, got "
                             f"{batch_size}. Use a smaller --batch or more text.")

    def get_batch(self, step, rows):
        """Return ids int64 (rows, L), noise and random words of the rows of a step's global batch."""
        epoch, place = divmod(step, self.steps_per_epoch)
        if epoch != self.epoch:
            rng = np.random.default_rng([self.seed, 1, epoch])
            self.epoch, self.shift = epoch, rng.integers(self.length - 1)
            self.order = rng.permutation(len(self.starts))
        chosen = self.order[place * self.batch_size:(place + 1) * self.batch_size][rows]
        noise = sample_noise([self.seed, 2, step], self.batch_size, self.length, self.words, rows)
        return self._read(self.starts[chosen] + self.shift), *noise

    def micro_batch_rows(self, step, slices):
        """Return the rows of each micro-batch of this rank: the slices as they are."""
        return slices

    def eval_batch(self, rows):
        """Return held-out windows as get_batch does, the same in every run."""
        noise = sample_noise([0, 3], self.num_eval, self.length, self.words, rows)
        return self._read(self.eval_starts[rows]), *noise

    def _read(self, starts):
        """Return int64 (B, L): the windows that begin at starts."""
        ids = self.ids[starts[:, None] + np.arange(self.length - 1)].astype(np.int64)  # (B, L - 1)
        return torch.from_numpy(np.insert(ids, 0, self.first_id, axis=1))


class ItemSetBatches:
    """Segments of item sets: a run of at most L items of one page, wherever it begins; 0 pads. [SB §3.1]

    Args, attributes, errors: as TextBatches, and offsets int64 (P + 1,), where each page begins in ids;
        train_pages, eval_pages int64, their numbers, of which pages of one item are skipped; limits (first,
        last), the IDs of items.
    """
    def __init__(self, ids, offsets, train_pages, eval_pages, length, batch_size, words, seed, limits):
        self.length, self.batch_size, self.words, self.seed = length, batch_size, words, seed
        self.epoch, is_item = None, (ids >= limits[0]) & (ids < limits[1])  # separators are not
        before = np.append(0, np.cumsum(is_item))
        self.ids, self.first, self.size = ids[is_item], before[offsets[:-1]], np.diff(before[offsets])
        self.train, held_out = (pages[self.size[pages] > 1] for pages in (train_pages, eval_pages))
        self.steps_per_epoch, self.num_eval = len(self.train) // batch_size, len(held_out[:MAX_EVAL_PAGES])
        if not self.steps_per_epoch or not self.num_eval:
            raise ValueError(f"--data: expected {batch_size * 10 // 9 + 1:,} sets of two items or more, of "
                             f"which one in ten is held out, got {len(self.train) + len(held_out):,}. Use a "
                             "smaller --batch, more sets, or tabs between items.")
        held_out = held_out[:self.num_eval]
        self.held_out = held_out[np.argsort(self.size[held_out], kind="stable")]  # equal sizes: less padding
        self.words_per_sequence = np.minimum(self.size[self.train], length).mean()

    def _pages(self, step):
        """Return int64 (batch_size,), the pages of a step."""
        epoch, place = divmod(step, self.steps_per_epoch)
        if epoch != self.epoch:
            rng = np.random.default_rng([self.seed, 1, epoch])
            self.epoch, self.order = epoch, rng.permutation(self.train)
        return self.order[place * self.batch_size:(place + 1) * self.batch_size]

    def micro_batch_rows(self, step, slices):
        """Return this rank's rows dealt anew, pages of equal size together: they need little padding."""
        rows = np.arange(slices[0].start, slices[-1].stop)
        rows = rows[np.argsort(np.minimum(self.size[self._pages(step)[rows]], self.length), kind="stable")]
        return np.split(rows, [part.start - slices[0].start for part in slices[1:]])

    def get_batch(self, step, rows):
        """Return ids int64 (rows, longest), noise and random words of the rows of a step's global batch."""
        offsets = np.random.default_rng([self.seed, 4, step]).random(self.batch_size)
        ids = self.read(self._pages(step)[rows], offsets[rows])
        noise, words = sample_noise([self.seed, 2, step], self.batch_size, self.length, self.words, rows)
        return ids, noise[..., :ids.shape[1]], words[:, :ids.shape[1]]

    def eval_batch(self, rows):
        """Mask one item of each held-out page: its noise says "masked", that of all others "left alone"."""
        random = np.random.default_rng([0, 3]).random((2, self.num_eval))[:, rows]
        ids = self.read(self.held_out[rows], random[0])
        noise = torch.ones(3, *ids.shape)
        masked = torch.from_numpy(random[1] * np.minimum(self.size[self.held_out[rows]], self.length)).long()
        noise[:2, torch.arange(len(ids)), masked] = 0.0
        return ids, noise, torch.full_like(ids, self.words[0])

    def read(self, pages, offsets):
        """Return int64 (B, longest): a segment of each page; offsets float (B,) in [0, 1) say where."""
        sizes = np.minimum(self.size[pages], self.length)
        starts = self.first[pages] + (offsets * (self.size[pages] - sizes + 1)).astype(np.int64)
        return pad_batch([self.ids[start:stop] for start, stop in zip(starts, starts + sizes)])[0]


def length_batches(lengths, batch_size, rng=None):
    """Return a list of int64 arrays, indices of examples: those of similar length are batched together.
    Args: lengths (n,); batch_size int; rng Generator, to shuffle and sort within 64 batches; None sorts all.
    """
    lengths, pool_size = np.asarray(lengths), 64 * batch_size if rng else max(len(lengths), 1)
    order = rng.permutation(len(lengths)) if rng else np.arange(len(lengths))
    pools = np.split(order, np.arange(pool_size, len(order), pool_size))
    order = np.concatenate([pool[np.argsort(lengths[pool], kind="stable")] for pool in pools])
    batches = np.split(order, np.arange(batch_size, len(order), batch_size))
    return [batches[i] for i in rng.permutation(len(batches))] if rng else batches


def pad_batch(examples, max_length=None):
    """Pad sequences with 0 to the longest, or to a power of two: a compiler then sees a handful of shapes.

    Args: examples, list of int32 arrays; max_length int, the limit of that power (longer examples keep their
        length), or None for the longest.
    Returns: ids int64 (B, L), and mask bool (B, L), True = attend, or None where nothing is padded.
    """
    longest = max(map(len, examples))
    longest = min(1 << (longest - 1).bit_length(), max(longest, max_length)) if max_length else longest
    ids = np.zeros((len(examples), longest), np.int64)
    for row, example in zip(ids, examples):
        row[:len(example)] = example
    ids = torch.from_numpy(ids)
    return ids, None if min(map(len, examples)) == longest else ids != 0
