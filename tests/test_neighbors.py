"""data/neighbors.py: items beside visible ones, by co-occurrence alone."""

import numpy as np
import pytest

from data.items import ItemSetBatches
from data.neighbors import count_ahead, rank_hidden_items, score_neighbors
from tokenizer import FIRST_WORD_ID, SEP


def test_scores_of_neighbors_by_hand():
    pages = [
        np.array([0, 1]),  # those of item 0
        np.array([0, 1, 2]),
    ]
    frequency = np.array([2, 2, 3, 1])  # items 2 and 3 are on other pages too

    neighbors, scores = score_neighbors(pages, frequency)

    counts, cosines, walks = scores
    assert neighbors.tolist() == [0, 1, 2]
    # item 0 stands with 1 on two pages, with 2 on one
    assert counts.tolist() == [2, 2, 1]
    assert cosines == pytest.approx([1, 1, 1 / np.sqrt(6)])
    # a walk from 0 takes each of its pages with 1/2, then an item there: 1 has (1/2 + 1/3) / 2
    assert walks == pytest.approx([5 / 12, 5 / 12, 1 / 6])


def test_count_ahead_gives_a_tie_to_the_item_seen_first():
    scores = np.array([
        [5, 3, 3, 3, 1],
    ])
    seen_at = np.array(
        [4, 1, 2, 0, 3])
    assert count_ahead(scores, 2, seen_at) == 3


def test_neighbors_find_the_other_item_of_a_pair_and_popularity_does_not():
    """Nine pairs of items, each on ten training pages; a tenth pair is on twenty."""
    first = np.arange(FIRST_WORD_ID, FIRST_WORD_ID + 20, 2)
    pairs = np.stack([first, first + 1], axis=1)
    pages = [
        *pairs[:9],  # held out
        *np.tile(pairs, (10, 1)),
        *np.tile(pairs[9], (10, 1)),
    ]
    ids = np.insert(pages, 2, SEP, axis=1)
    numbers = np.arange(len(pages))
    sets = ItemSetBatches(
        ids.flatten(),
        3 * np.arange(len(pages) + 1),  # offsets
        train_pages=numbers[9:],
        eval_pages=numbers[:9],
        word_counts=np.ones(20),
        length=5,
        batch_size=4,
        seed=0)

    ranks = rank_hidden_items(sets, sets.eval_batch(np.arange(9)))

    assert (ranks[:, 0] >= 2).all()  # behind both items of the frequent pair
    assert (ranks[:, 1:] == 0).all()
