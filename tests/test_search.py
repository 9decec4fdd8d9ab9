"""Tests of search.py: the beam search against two oracles. test_all.py works it out by hand."""

import re

import numpy as np
import pytest
import torch

import search
from bloom import BloomMap, ItemMap
from search import beam_search, beam_search_reference, exhaustive, hash_logp

# Beam search


def weigh_first(parts):
    """Return a score that is not in SCORES: the first map counts twice."""
    return 2 * parts[0] + sum(parts[1:])


def random_case(rng, case, has_ties=False):
    """Return bloom_map, logp (P, m, R), k, beam, exclude (P, 3), of a small search.

    has_ties: buckets have equal probabilities, and some have the probability 0.
    """
    n = int(rng.integers(1, rng.choice([12, 300])))  # half of the maps have few items
    m = int(rng.integers(1, 4))
    P = int(rng.integers(1, 5))
    k = int(rng.integers(1, 13))  # some maps have fewer items than k
    beam = int(rng.integers(1, 9))
    if case % 5 == 0:
        bloom_map = ItemMap(rng.integers(0, 13, (n, m)), 13)
    else:
        largest = int(0.5 * n ** (1 - 1 / m))  # near the limit swaps may fail
        alpha = rng.integers(1, max(largest, 1) + 1)
        bloom_map = BloomMap(n, alpha, m, seed=case)
    logits = 3 * rng.standard_normal((P, m, bloom_map.num_buckets))
    if has_ties:
        logits = logits.round()
        logits[logits < -4] = -np.inf
    logp = torch.from_numpy(logits).log_softmax(-1)
    exclude = torch.from_numpy(rng.integers(-1, n, (P, 3)))
    return bloom_map, logp, k, beam, exclude


def random_prior(bloom_map, seed, has_ties=False):
    """Return prior (N,): normal numbers, or -1, 0 and 1, of which many items have the largest."""
    generator = torch.Generator().manual_seed(seed)
    prior = 2 * torch.randn(bloom_map.n_items, generator=generator, dtype=torch.float64)
    if has_ties:
        prior = prior.round().clamp(-1, 1)
    return prior


@pytest.mark.parametrize("has_prior", [False, True])
@pytest.mark.parametrize("score", [*search.SCORES, "first twice"])
def test_beam_search_matches_reference(score, has_prior, monkeypatch):
    """[SB §2.5 Alg.1] in plain loops: the same scores, items and certificates."""
    monkeypatch.setitem(search.SCORES, "first twice", weigh_first)  # as a user of the file does
    rng = np.random.default_rng(1)
    for case in range(60):
        bloom_map, logp, k, beam, exclude = random_case(rng, case)
        prior = random_prior(bloom_map, case) if has_prior else None
        result = beam_search(logp, bloom_map, k, beam, 1, score, exclude, prior)
        for p, (ids, scores, certified, _) in enumerate(zip(*result)):
            expected_ids, expected_scores, is_certified = beam_search_reference(
                logp[p], bloom_map, k, beam, score, exclude[p].tolist(), prior)
            assert scores.tolist() == expected_scores
            assert certified == is_certified
            # elsewhere items tie, and come in any order
            if score not in ("min", "max") and isinstance(bloom_map, BloomMap):
                assert ids.tolist() == expected_ids


def test_second_round_finds_what_twice_the_beam_finds():
    """The positions that the first round certifies have the best scores already."""
    bloom_map = BloomMap(3_001, 3)
    logp = torch.randn(60, 2, bloom_map.num_buckets).log_softmax(-1)
    first = beam_search(logp, bloom_map, beam=4)
    expected = beam_search(logp, bloom_map, beam=8)
    assert not torch.equal(first.scores, expected.scores)
    found = beam_search(logp, bloom_map, beam=4, rounds=2)
    assert torch.equal(found.scores, expected.scores)
    # the first round alone has searched for those that it certifies
    num_scored = torch.where(first.certified, first.num_scored, expected.num_scored)
    assert torch.equal(found.num_scored, num_scored)


@pytest.mark.parametrize("beam, wider", [(1, 2), (4, 8), (5, 20), (6, 20)])
def test_beam_doubles_until_it_may_hold_all_items(beam, wider):
    """Two maps of 20 buckets of 3: beams of 8 hold 48 items at most, and of 10 all 60."""
    assert search.widen_beam(beam, BloomMap(60, 3)) == wider


def test_search_certifies_that_items_outside_have_probability_zero():
    """Fewer than k items have another probability, and the bound is log 0."""
    bloom_map = BloomMap(12, 3)
    logp = torch.full((1, 2, 4), -torch.inf)
    logp[0, :, 0] = 0
    found = beam_search(logp, bloom_map, 5, beam=2)
    expected_ids, _, is_certified = beam_search_reference(logp[0], bloom_map, 5, beam=2)
    assert found.ids[0].tolist() == expected_ids
    assert found.certified.item()
    assert is_certified


@pytest.mark.parametrize("has_prior", [False, True])
@pytest.mark.parametrize("score", search.SCORES)
def test_beam_search_certifies_only_the_best_items(score, has_prior):
    """[SB §2.5 Alg.1] Certified scores are those of the exhaustive search, which has no beam."""
    rng = np.random.default_rng(0)
    num_wrong = 0  # without a certificate
    num_partial = 0  # certified without scoring all
    for case in range(300):
        has_ties = case % 3 == 0
        bloom_map, logp, k, beam, exclude = random_case(rng, case, has_ties)
        prior = random_prior(bloom_map, case, has_ties) if has_prior else None
        _, best = exhaustive(logp, bloom_map, k, score, exclude, prior)
        for rounds in (1, 2, None):
            ids, scores, certified, num_scored = beam_search(
                logp, bloom_map, k, beam, rounds, score, exclude, prior)
            assert torch.equal(ids < 0, scores == -torch.inf)
            is_best = (scores == best).all(1)
            assert (is_best | ~certified).all()
            num_wrong += (~is_best).sum()
            is_partial = certified & (num_scored < bloom_map.n_items)
            num_partial += is_partial.sum()
        assert certified.all()  # rounds=None
    assert num_wrong > 200  # else the cases were too easy
    assert num_partial > 300


# Logits


def test_hash_logp_takes_the_block_of_each_map():
    """One softmax over all blocks. Hash token j is a row of block j, never a special token."""
    bloom_map = BloomMap(53, 5)  # 11 buckets of a map
    logits = torch.randn(4, 2, 2 * 16)  # blocks of 11 buckets and 5 special tokens
    expected = logits.log_softmax(-1)
    logp = hash_logp(logits, bloom_map)
    assert torch.equal(logp[:, 0], expected[:, 0, :11])
    assert torch.equal(logp[:, 1], expected[:, 1, 16:27])


def test_hash_logp_of_bfloat16_has_the_digits_of_float32():
    bloom_map = BloomMap(6, 2)
    logits = torch.randn(4, 2, 2 * 5).bfloat16()
    logp = hash_logp(logits, bloom_map)
    assert torch.equal(logp, hash_logp(logits.float(), bloom_map))


@pytest.mark.parametrize("search", [exhaustive, beam_search])
@pytest.mark.parametrize("changes, message", [
    (dict(logp=torch.zeros(2, 2, 4)), "logp: expected (P, 2, 3), got [2, 2, 4]."),
    # topk would rank NaN first: the items of its bucket would be the answer
    (dict(logp=torch.full((2, 2, 3), torch.nan)), "logp: expected log-probabilities, got NaN or"),
    # with -inf in another map the score would be NaN
    (dict(logp=torch.full((2, 2, 3), torch.inf)), "logp: expected log-probabilities, got NaN or"),
    (dict(k=0), "k: expected 1 or more, got 0."),
    # would be broadcast
    (dict(exclude=torch.tensor([[0, 1]])), "exclude: expected int64 (2, E), got"),
    (dict(prior=torch.zeros(1)), "prior: expected 6 finite numbers, got [1]"),
    # would be read as the items 0 and 1
    (dict(exclude=torch.tensor([[True], [False]])), "exclude: expected int64 (2, E), got"),
    # token IDs, say: a beam would exclude other items, or none
    (dict(exclude=torch.tensor([[6], [-1]])), "exclude: expected items below 6, or -1."),
    (dict(exclude=torch.tensor([[5], [-2]])), "exclude: expected items below 6, or -1."),
    (dict(prior=torch.full((6,), torch.inf)), "prior: expected 6 finite numbers, got [6]"),
    (dict(prior=torch.full((6,), torch.nan)), "prior: expected 6 finite numbers, got [6]"),
])
def test_search_of_what_would_fail_in_silence_is_refused(search, changes, message):
    arguments = dict(logp=torch.zeros(2, 2, 3), bloom_map=BloomMap(6, 2)) | changes
    with pytest.raises(ValueError, match=re.escape(message)):
        search(**arguments)


def test_beam_of_no_bucket_is_refused():
    with pytest.raises(ValueError, match="^beam: expected 1 or more, got 0."):
        beam_search(torch.zeros(2, 2, 3), BloomMap(6, 2), beam=0)


def test_hash_logp_of_another_number_of_maps_is_refused():
    with pytest.raises(ValueError, match="^logits: expected 2 rows of each position, got 3."):
        hash_logp(torch.zeros(4, 3, 2 * 5), BloomMap(6, 2))


def test_top_buckets_are_those_of_topk():
    """Blocks of 64 and a rest, ties, infinite values, and rows too short for blocks."""
    for R in (5, 64, 320, 321, 700):
        logp = torch.randn(3, 2, R).round(decimals=1)
        logp[0, 0] = -torch.inf
        values, buckets = search.top_buckets(logp, 4)
        expected = logp.topk(4).values
        assert torch.equal(values, expected)
        assert torch.equal(logp.gather(2, buckets), values)
        for row in buckets.flatten(0, 1).tolist():
            assert len(set(row)) == 4
