"""Item sets, the data of Superbloom: which pages are held out, their coherent map, and batches.

Sources:
    [SB] Anderson et al. 2020, Superbloom
Out of scope: files of item sets (data/sources.py), names of items (data/splitters.py),
    Bloom maps (bloom.py) and the search (search.py), what neighbors guess (data/neighbors.py).
    Phrases of a text have Bloom digests too, without this file.
Notation:
    B batch   L positions   n token IDs of a corpus   P pages, item sets
    r rows of a batch that a rank or a micro-batch reads

A page is an item set. It has no order: the model adds no positions to its items.
"""

import numpy as np
import torch

from bloom import random_order
from coherent import coherent_map
from data.batches import EVALUATION, ORDER, SEGMENTS, Batches, Draw, RowGenerator, divide, pad_batch
from support.common import InputError
from tokenizer import FIRST_WORD_ID

HELD_OUT_KEY = 90  # seed of the order of pages: every run holds out the same ones
MAX_EVAL_PAGES = 2_000  # held-out pages of an evaluation; one item of each is masked


# Pages of a corpus


def split_pages(corpus):
    """Return the numbers of training pages, and of a tenth that is held out, int64, shuffled."""
    order = random_order(corpus.meta["documents"], HELD_OUT_KEY)
    num_held_out = max(len(order) // 10, 1)
    return order[num_held_out:], order[:num_held_out]


def list_items(ids, offsets, num_known):
    """Return the items of all pages, without separators and unknown ones.

    With pages of 3 and 2 items, a separator behind each, offsets are 0 4 7, num_before is
    0 1 2 3 3 4 5 5, and edges are 0 3 5.

    Args:
        ids: integer (n,), token IDs of all pages.
        offsets: int64 (P + 1,), where each page begins in ids.
        num_known: int, all IDs from this on are unknown.

    Returns:
        items: integer, their token IDs.
        edges: int64 (P + 1,), where each page begins in items.
    """
    is_item = (ids >= FIRST_WORD_ID) & (ids < num_known)
    num_before = np.append(0, np.cumsum(is_item))  # (n + 1,), items before each place
    return ids[is_item], num_before[offsets]


class ItemSetBatches(Batches):
    """Segments of item sets: a run of at most L items of one page, 0 as padding. [SB §3.1]

    A page is an item set. The segment of a page with more than L items is drawn at each reading.

    Args:
        ids: integer (n,), token IDs of all pages. All but known items are left out.
        offsets: int64 (P + 1,), where each page begins in ids.
        train_pages, eval_pages: int64, numbers of pages, in random order: the first held-out ones
            are a sample. Those with less than two items are left out: an item is predicted from the
            others of its page.
        word_counts, length, batch_size, seed: as in Batches.

    Raises:
        ValueError: If there are too few pages for one batch.
    """

    has_padding = True
    read_purpose = SEGMENTS

    def __init__(self, ids, offsets, train_pages, eval_pages, word_counts, length, batch_size,
                 seed):
        super().__init__(word_counts, length, batch_size, seed)
        self.ids, edges = list_items(ids, offsets, self.num_known)
        self.page_starts = edges[:-1]  # (P,), in self.ids
        self.page_sizes = np.diff(edges)  # (P,), items of each page
        self.segment_sizes = np.minimum(self.page_sizes, length)

        # The pages that are read
        self.train_pages = train_pages[self.page_sizes[train_pages] > 1]
        eval_pages = eval_pages[self.page_sizes[eval_pages] > 1][:MAX_EVAL_PAGES]
        self.num_eval = len(eval_pages)
        by_size = np.argsort(self.page_sizes[eval_pages], kind="stable")
        self.eval_pages = eval_pages[by_size]  # pages of one size together need little padding
        self.steps_per_epoch = len(self.train_pages) // batch_size
        if self.steps_per_epoch == 0 or self.num_eval == 0:
            raise ValueError(f"expected {batch_size:,} training sets of two items or more and a "
                             f"held-out one, got {len(self.train_pages):,} and {self.num_eval:,}. "
                             "Use a smaller batch, more sets, or, in a .txt, tabs.")
        self.words_per_sequence = float(self.segment_sizes[self.train_pages].mean())

    def count_items(self):
        """Return how often the training pages have each item, int64 (N,)."""
        is_training = np.zeros(len(self.page_sizes), bool)
        is_training[self.train_pages] = True
        items = self.ids[is_training.repeat(self.page_sizes)] - FIRST_WORD_ID
        return np.bincount(items, minlength=self.num_known - FIRST_WORD_ID)

    def draw_order(self, epoch):
        rng = np.random.default_rng([self.seed, ORDER, epoch])
        return rng.permutation(self.train_pages)

    def read(self, pages, rng):
        return self.read_segments(pages, rng.random())

    def read_segments(self, pages, fractions):
        """Read a segment of each page.

        For L = 5, a page of 7 items has the segments 0 .. 4, 1 .. 5 and 2 .. 6. The fraction 0.5
        reads the second.

        Args:
            pages: int64 (r,).
            fractions: float64 (r,) in [0, 1): where in its page a segment begins.

        Returns:
            int64 (r, L), L of the longest.
        """
        sizes = self.segment_sizes[pages]
        num_starts = self.page_sizes[pages] - sizes + 1
        starts = self.page_starts[pages] + (fractions * num_starts).astype(np.int64)
        segments = [self.ids[start:start + size] for start, size in zip(starts, sizes)]
        ids, _ = pad_batch(segments)
        return ids

    def eval_batch(self, rows):
        """Return the Draw of held-out pages, where one item of each is masked."""
        pages = self.eval_pages[rows]
        rng = RowGenerator((0, EVALUATION), self.num_eval, rows)
        starts = rng.random()  # (r,) of the segments, as fractions
        places = rng.random()  # (r,) of the masked items, as fractions
        ids = self.read_segments(pages, starts)
        column = (places * self.segment_sizes[pages]).astype(np.int64)  # (r,)
        is_masked = torch.zeros_like(ids, dtype=torch.bool)
        is_masked[torch.arange(len(ids)), column] = True
        return Draw(ids, ids != 0, is_masked=is_masked)

    def divide_rows(self, step, rows, size):
        """Return the rows of each micro-batch, sorted by the size of their page. rows: int array.

        Pages of equal size need no padding. Rows 0 .. 3 with 5 2 4 2 items, two in a micro-batch:
        rows 1 and 3, then rows 2 and 0.
        """
        sizes = self.segment_sizes[self.examples(step)[rows]]
        by_size = np.argsort(sizes, kind="stable")
        return divide(rows[by_size], size)


# A map of items that go together


def learn_map(corpus, coherent, options):
    """Return the state of the coherent map of the training pages. [SB App. D]

    Held-out pages would tell which items go together.

    Args:
        corpus: data.corpus.Corpus.
        coherent: int, number of maps whose buckets have similar items.
        options: dict of n_items, alpha, m and seed, as of BloomMap.
    """
    ids, edges = list_items(corpus.ids, corpus.offsets, FIRST_WORD_ID + options["n_items"])
    items = ids.astype(np.int64) - FIRST_WORD_ID
    train_pages, _ = split_pages(corpus)
    pages = [items[edges[number]:edges[number + 1]] for number in train_pages]
    sizes = np.diff(edges)[train_pages]
    if sizes.sum() == 0:
        raise InputError("--coherent: requires training pages, got none. Use more item sets.")
    return coherent_map(np.concatenate(pages), sizes, coherent=coherent, **options).state()
