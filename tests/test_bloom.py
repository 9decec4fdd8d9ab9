"""Tests of bloom.py: the laws of the maps. test_all.py works them out by hand."""

import math
import re

import numpy as np
import pytest

import bloom
from bloom import BloomMap


def assert_is_bloom_map(bloom_map, n, alpha, m=2):
    """All buckets but the last are full, and no two items share all of theirs. [SB §3.2]

    members has the items of each bucket, ascending, and then -1.
    """
    digest = bloom_map.digest
    assert digest.shape == (n, m)
    assert len(np.unique(digest, axis=0)) == n
    for buckets, members in zip(digest.T, bloom_map.members):
        assert members.shape == (math.ceil(n / alpha), alpha)
        assert (members[:-1] >= 0).all()
        for bucket, row in enumerate(members.tolist()):
            items = np.flatnonzero(buckets == bucket).tolist()
            size = len(items)
            assert row[:size] == items
            assert set(row[size:]) <= {-1}


def test_bloom_map_of_the_alpha_that_the_error_names_is_found():
    """N items have R^m digests, R = N / alpha: four for each item."""
    for n in range(1, 61):
        for m in (2, 3):
            largest = (n ** (m - 1) / 4) ** (1 / m)
            largest = max(1, int(largest))
            assert_is_bloom_map(BloomMap(n, largest, m), n, largest, m)


def test_bloom_map_swaps_items_that_share_all_buckets():
    """2 and 3 share a bucket of both orders. One of them swaps places with another item."""
    bloom_map = BloomMap(6, 2, orders=[
        [0, 1, 2, 3, 4, 5],
        [2, 3, 0, 4, 1, 5],
    ])
    assert_is_bloom_map(bloom_map, 6, 2)
    is_moved = bloom_map.digest[:, 1] != [1, 2, 0, 0, 1, 2]  # where the order has them
    assert is_moved.sum() == 2
    assert is_moved[2] or is_moved[3]


def test_bloom_map_of_one_order_twice_swaps_items_in_several_turns():
    """Two items of three share both buckets with another: more than there are partners at once."""
    order = np.arange(36)
    assert_is_bloom_map(BloomMap(36, 3, orders=[order, order]), 36, 3)


def test_random_orders_put_some_pairs_together_twice():
    """[SB footnote 3] is not free: (alpha - 1)² / 2 such pairs, six sigma of a Poisson law."""
    n = 60_000
    alpha = 50
    first = bloom.cut_order(bloom.random_order(n, 3, 0), alpha)
    second = bloom.cut_order(bloom.random_order(n, 3, 1), alpha)
    num_digests = len(np.unique(first * n + second))  # a pair with the same digest counts once
    expected = (alpha - 1) ** 2 / 2
    assert abs(n - num_digests - expected) < 6 * math.sqrt(expected)


def test_bloom_map_is_the_same_on_every_machine():
    """Recorded: another machine, another numpy, the same numbers."""
    order = bloom.random_order(8, 0)
    assert order.tolist() == [6, 0, 3, 1, 4, 2, 7, 5]
    assert BloomMap(10_007, 13, seed=3).checksum() == "e785400f"  # after swaps


def test_bloom_map_of_another_seed_is_refused_at_load():
    state = BloomMap(1_009, 11, seed=4).state() | dict(seed=5)
    with pytest.raises(ValueError, match="^Bloom map: expected check"):
        BloomMap.load(state)


@pytest.mark.parametrize("arguments, message", [
    (dict(n_items=100, alpha=11), "alpha: expected about 5 at most, got 11."),
    (dict(n_items=2, alpha=1, orders=[[0, 1], [1, 1]]), "orders: expected 2 permutations of 2"),
])
def test_bloom_map_that_cannot_be_is_refused(arguments, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        BloomMap(**arguments)
