"""Tests of coherent.py: similar items share a bucket, and a prior that ranks by frequency."""

import json

import numpy as np
import pytest
import torch

from bloom import BloomMap, ItemMap
from coherent import coherent_map, item_vectors, popularity_prior
from search import beam_search
from tests.helpers import ROOT

# Coherent maps


def sets_of_two_topics():
    """Return 300 sets, of even items or of odd ones below 40: items, set after set, and sizes."""
    rng = np.random.default_rng(0)
    items = []
    sizes = rng.integers(4, 9, 300)
    for i, size in enumerate(sizes):
        topic = np.arange(i % 2, 40, 2)
        items.extend(rng.choice(topic, size, replace=False))
    return np.array(items), sizes


@pytest.mark.parametrize("width", [2, 40])  # of topics, of single items
def test_item_vectors_are_singular_vectors(width):
    """[SB App. D] The same cosines as with numpy's decomposition of the whole matrix."""
    items, sizes = sets_of_two_topics()
    sets = np.repeat(np.arange(300), sizes)
    A = np.zeros((300, 40))
    A[sets, items] = 1
    A /= np.sqrt(A.sum(0) * sizes[:, None])
    _, s, Vt = np.linalg.svd(A)
    expected = Vt[:width].T * s[:width]  # (items, width), the leading ones
    expected /= np.linalg.norm(expected, axis=1, keepdims=True)
    vectors = item_vectors(items, sizes, 40, width)
    difference = vectors @ vectors.T - expected @ expected.T
    assert np.abs(difference).max() < 1e-3


def test_item_vectors_of_few_sets_have_length_one():
    """20 sets have fewer singular vectors than the 64 dimensions. Items of no set are 0."""
    items = np.random.default_rng(1).integers(0, 200, 60)
    vectors = item_vectors(items, np.full(20, 3), 200)
    assert vectors.dtype == np.float32
    has_set = np.isin(np.arange(200), items)
    lengths = np.linalg.norm(vectors, axis=1)
    assert np.allclose(lengths, has_set, atol=1e-5)


def test_coherent_map_keeps_similar_items_together():
    """No two items share two buckets. Still most buckets of map 1 are of one topic, too."""
    items, sizes = sets_of_two_topics()
    bloom_map = coherent_map(items, sizes, 40, 4, coherent=2)
    assert len(np.unique(bloom_map.digest, axis=0)) == 40
    most_frequent = np.bincount(items).argmax()
    assert most_frequent in bloom_map.members[0, 0]
    topics = bloom_map.members % 2  # (m, 10, 4)
    is_pure = (topics == topics[:, :, :1]).all(2)
    assert is_pure[0].all()
    assert is_pure[1].sum() >= 6  # of a random map about one


def test_coherent_map_refuses_more_coherent_maps_than_maps():
    items, sizes = sets_of_two_topics()
    with pytest.raises(AssertionError, match="coherent: expected m at most"):
        coherent_map(items, sizes, 40, 4, m=2, coherent=3)


def test_coherent_map_quotes_its_recall():
    """The numbers of the docstring are those of results/simplewiki.json."""
    rows = json.loads((ROOT / "results/simplewiki.json").read_text("utf-8"))["rows"]
    rows = [row for row in rows if "of 2 maps coherent" in row["name"]]
    recalls = ", ".join(f"{row['rec@1']:.3f}" for row in rows)
    shares = ", ".join(f"{100 * row['certified']:.0f}" for row in rows)
    text = " ".join(coherent_map.__doc__.split())
    assert f"rec@1 {recalls}, and certificates for {shares} % of the lists" in text


# The prior


def test_popularity_prior_makes_a_model_that_knows_nothing_rank_items_by_frequency():
    """It predicts each bucket by its frequency. Then score + prior is log P(item), in both maps."""
    counts = np.random.default_rng(0).integers(0, 50, 901)
    for bloom_map in (BloomMap(901, 7, m=3), ItemMap(np.arange(1802).reshape(901, 2) % 31, 40)):
        P = torch.from_numpy((counts + 1) / (counts + 1).sum())  # (N,)
        frequency = torch.zeros(bloom_map.m, bloom_map.num_buckets, dtype=P.dtype)
        for j, column in enumerate(bloom_map.digest.T):
            frequency[j].index_add_(0, torch.from_numpy(column), P)
        prior = popularity_prior(counts, bloom_map)
        logp = frequency.log().unsqueeze(0)  # -inf for a bucket without items
        found = beam_search(logp, bloom_map, 20, rounds=None, prior=prior)
        assert found.certified.item()
        expected = P.log().topk(20).values
        torch.testing.assert_close(found.scores[0], expected, rtol=0, atol=1e-5)
