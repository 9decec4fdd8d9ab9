"""The control of item sets: guess a hidden item by its neighbors, without training.

The items that often stand on a page with the visible ones are the guess. A model that names no more
hidden items has learned no more than how often two items meet.

Out of scope: the pages, training and held out (data/items.py).
Notation:
    V token IDs   n held-out sets   page: an item set

Example: item 0 is visible. Where two score alike, the item that the corpus names first is ahead.

    pages                  0 1 | 0 1 2 | 2 3 | 2
    popularity             items 0 to 3 have 2 2 3 1 pages
    counts                 item 1 is on two pages of item 0, item 2 on one
    cosines                2 / √(2 · 2) and 1 / √(3 · 2)
    random walks           from 0 to one of its pages, then to an item there: (1/2 + 1/3) / 2 to 1
"""

import collections

import numpy as np

from tokenizer import FIRST_WORD_ID

CONTROL_SETS = 500  # held-out item sets whose items neighbors guess, in seconds
CONTROL_NAMES = 5_000_000  # in all item sets; with more it would take minutes and gigabytes
NEIGHBORS = ("popularity", "neighbors: counts", "neighbors: cosines", "neighbors: random walks")


def describe_neighbors(batches):
    """Return a line on the control of item sets: recall@10 by neighbors, without training."""
    num_sets = min(batches.num_eval, CONTROL_SETS)
    # at equal distances, as they are sorted by size
    rows = np.linspace(0, batches.num_eval - 1, num_sets).astype(int)
    is_hit = rank_hidden_items(batches, batches.eval_batch(rows)) < 10  # (n, 4)
    recalls = [f"{name} {share:.3f}" for name, share in zip(NEIGHBORS, is_hit.mean(0))]
    return f"rec@10 to beat, on {num_sets:,} sets, without training: {', '.join(recalls)}"


def rank_hidden_items(sets, draw):
    """Return the rank of each hidden item, from 0, by each of NEIGHBORS, int (n, 4).

    Args:
        sets: items.ItemSetBatches, whose training pages vote.
        draw: data.batches.Draw of n item sets, one item of each masked.
    """
    pages_of = list_training_pages(sets)
    num_ids = sets.num_known
    frequency = np.array([len(pages_of[item]) for item in range(num_ids)])
    seen_at = np.zeros(num_ids, int)  # where the corpus names an item first
    items, places = np.unique(sets.ids, return_index=True)
    seen_at[items] = places

    hidden = draw.is_masked.int().argmax(1)  # (n,), columns
    neighbors_of = {}  # visible item -> its neighbors and their scores, which many sets share
    ranks = []
    for row, column in zip(draw.ids.numpy(), hidden.tolist()):
        visible = np.delete(row, column)
        scores = np.zeros((len(NEIGHBORS), num_ids))
        scores[0] = frequency
        for item in visible.tolist():
            pages = pages_of[item]
            if not pages:  # padding, or no training page
                continue
            if item not in neighbors_of:
                neighbors_of[item] = score_neighbors(pages, frequency)
            neighbors, shares = neighbors_of[item]
            scores[1:, neighbors] += shares
        # special tokens, padding among them, and visible items are no candidates
        scores[:, :FIRST_WORD_ID] = -1
        scores[:, visible] = -1
        ranks.append(count_ahead(scores, row[column], seen_at))
    return np.array(ranks)


def list_training_pages(sets):
    """Return the pages of each item, a defaultdict: held-out sets do not vote for their items."""
    pages_of = collections.defaultdict(list)
    for i in sets.train_pages:
        start = sets.page_starts[i]
        page = sets.ids[start:start + sets.page_sizes[i]]
        for item in page.tolist():
            pages_of[item].append(page)
    return pages_of


def score_neighbors(pages, frequency):
    """Return the items of an item's pages, int (i,), and their scores by three rules, (3, i).

    A neighbor scores how often both stand on a page: as it is, over √(frequency · frequency), or
    each page as 1 / (its size · the number of pages), as a random walk would reach it.

    Args:
        pages: list of int arrays, the training pages of the item.
        frequency: int (V,), the training pages of each item.
    """
    sizes = np.array([len(page) for page in pages])
    neighbors, which = np.unique(np.concatenate(pages), return_inverse=True)
    counts = np.bincount(which)
    cosines = counts / np.sqrt(frequency[neighbors] * len(pages))
    walks = np.bincount(which, np.repeat(1 / sizes, sizes)) / len(pages)
    return neighbors, np.stack([counts, cosines, walks])


def count_ahead(scores, correct, seen_at):
    """Count the items that are ahead of the correct one in each row of scores, (rows, V).

    The correct item loses a tie to an item with a smaller seen_at.
    """
    # a rank is a count: nothing is sorted
    least = scores[:, [correct]]
    is_tied = (scores == least) & (seen_at < seen_at[correct])
    is_ahead = (scores > least) | is_tied
    return is_ahead.sum(1)
