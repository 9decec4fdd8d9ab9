"""Tests of bloom.py: maps at their limits, beam search against two oracles; test_all.py has both by hand."""

import json
import math

import numpy as np
import pytest
import torch

import bloom
from bloom import BloomMap, SketchMap, beam_search, beam_search_reference, coherent_map, exhaustive, item_vectors


# == Bloom maps
def check_map(bloom_map, n, alpha, m):
    """Full buckets but for the last, members that are the digest's inverse, and no two items alike."""
    buckets = -(-n // alpha)
    assert (bloom_map.n_items, bloom_map.alpha, bloom_map.m, bloom_map.buckets) == (n, alpha, m, buckets)
    assert bloom_map.digest.dtype == bloom_map.members.dtype == np.int32
    assert bloom_map.digest.shape == (n, m) and bloom_map.members.shape == (m, buckets, alpha)
    for j in range(m):
        sizes = np.bincount(bloom_map.digest[:, j])
        assert sizes.tolist() == [alpha] * (buckets - 1) + [n - alpha * (buckets - 1)]
        for bucket, row in enumerate(bloom_map.members[j]):
            items = row[row >= 0]
            assert (bloom_map.digest[items, j] == bucket).all() and (row[len(items):] == -1).all()
        assert sorted(bloom_map.members[j][bloom_map.members[j] >= 0].tolist()) == list(range(n))
    assert len(np.unique(bloom_map.digest, axis=0)) == n


def test_bloom_map_swaps_items_that_share_all_buckets():
    """4 and 3 share bucket 2 of both maps: one of them swaps places with an item of another bucket."""
    order = [0, 1, 2, 5, 3, 4, 6, 7, 8, 9]
    bloom_map = BloomMap(10, 2, orders=[order, [0, 2, 1, 6, 3, 4, 5, 8, 7, 9]])
    check_map(bloom_map, 10, 2, 2)
    assert bloom_map.members[0].tolist() == [[0, 1], [2, 5], [3, 4], [6, 7], [8, 9]]
    moved = [i for i in range(10) if bloom_map.digest[i, 1] != [0, 1, 0, 2, 2, 3, 1, 4, 3, 4][i]]
    assert len(moved) >= 2 and {3, 4} & set(moved)


@pytest.mark.parametrize("n, alpha, m", [
    (7, 2, 2), (1_000, 7, 2), (997, 13, 3), (2_500, 50, 2), (2_601, 50, 2), (999, 31, 2), (27, 9, 3),
    (1, 1, 1), (1, 5, 2), (10, 1, 1), (20_011, 50, 2)])
def test_bloom_map_is_balanced_and_tells_items_apart(n, alpha, m):
    check_map(BloomMap(n, alpha, m, seed=5), n, alpha, m)


def test_bloom_map_exists_up_to_the_possible_alpha():
    """Two maps are a 0/1 matrix, buckets × buckets; where one exists (Gale and Ryser), the code finds it."""
    for n in range(1, 61):
        for alpha in range(1, n + 2):
            buckets = -(-n // alpha)
            sums = [alpha] * (buckets - 1) + [n - alpha * (buckets - 1)]
            if all(sum(sums[:k]) <= sum(min(s, k) for s in sums) for k in range(1, buckets + 1)):
                assert len(np.unique(BloomMap(n, alpha).digest, axis=0)) == n
            else:
                with pytest.raises(ValueError, match="alpha: expected about"):
                    BloomMap(n, alpha)


@pytest.mark.parametrize("arguments, message", [
    (dict(n_items=5, alpha=2, m=1), "alpha"), (dict(n_items=9, alpha=4), "alpha"),
    (dict(n_items=100, alpha=11), "alpha: expected about 10"), (dict(n_items=0, alpha=1), "n_items"),
    (dict(n_items=5, alpha=0), "alpha"), (dict(n_items=5, alpha=2, m=0), "m"),
    (dict(n_items=5, alpha=1, m=256), "m < 256"), (dict(n_items=6.0, alpha=2), "n_items, alpha, m: exp"),
    (dict(n_items=4, alpha=2, orders=[[0, 1, 2, 3]]), "orders: expected 2 permutations"),
    (dict(n_items=4, alpha=2, orders=[[0, 1, 2, 3], [0, 2, 1, 1]]), "orders: expected 2 permutations")])
def test_bloom_map_bad_arguments_raise(arguments, message):
    with pytest.raises(ValueError, match=message):
        BloomMap(**arguments)


def test_random_orders_put_some_pairs_together_twice():
    """[SB footnote 3] does not come for free: (alpha - 1)² / 2 pairs expected; six sigma of a Poisson."""
    n, alpha = 60_000, 50
    tokens = [np.argsort(bloom.random_order(n, 3, j)) // alpha for j in range(2)]
    cell = np.sort(tokens[0] * (n // alpha) + tokens[1])
    pairs, expected = (cell[1:] == cell[:-1]).sum(), (alpha - 1) ** 2 / 2
    assert abs(pairs - expected) < 6 * math.sqrt(expected)


def test_bloom_map_hashes_are_independent():
    """Buckets modulo 5 of both maps: 25 cells of 2,000 each, six sigma of a binomial; seeds differ."""
    bloom_map = BloomMap(50_000, 20, seed=1)
    cells = np.bincount(bloom_map.digest[:, 0] % 5 * 5 + bloom_map.digest[:, 1] % 5, minlength=25)
    assert np.abs(cells - 2_000).max() < 6 * math.sqrt(50_000 / 25 * 24 / 25)
    share = (BloomMap(50_000, 20, seed=2).digest == bloom_map.digest).mean()
    assert abs(share - 1 / 2_500) < 6 * math.sqrt(1 / 2_500 / 100_000)


def test_bloom_map_state_is_its_seed_which_means_the_same_on_every_machine():
    assert sorted(bloom.random_order(1_001, 7, 1).tolist()) == list(range(1_001))
    assert bloom.random_order(8, 0).tolist() == [6, 0, 3, 1, 4, 2, 7, 5]
    assert BloomMap(10_007, 13, 2, seed=3).check() == "e785400f"  # after repairs, too
    bloom_map = BloomMap(1_009, 11, 3, seed=4)
    state = bloom_map.state()
    assert state["orders"] is None and len(json.dumps(state)) < 120
    assert (BloomMap.load(state).digest == bloom_map.digest).all()
    assert (BloomMap(np.int64(1_009), np.int64(11), np.int64(3), np.int64(4)).digest == bloom_map.digest).all()
    with pytest.raises(ValueError, match="Bloom map: expected check"):
        BloomMap.load(state | dict(seed=5))


# == Coherent maps and sketch maps
def sets_of_two_topics(sets=300, items=40, seed=0):
    """Sets of six even items and sets of six odd items: flat items, sizes."""
    rng = np.random.default_rng(seed)
    rows = [rng.choice(np.arange(i % 2, items, 2), 6, replace=False) for i in range(sets)]
    return np.concatenate(rows), np.full(sets, 6)


@pytest.mark.parametrize("width", [2, 40])
def test_item_vectors_are_singular_vectors(width):
    """The same cosines as numpy's full decomposition of the weighted matrix."""
    items, sizes = sets_of_two_topics()
    X = np.zeros((300, 40))
    X[np.repeat(np.arange(300), sizes), items] = 1
    X /= np.sqrt(sizes[:, None] * np.maximum(X.sum(0), 1))
    u, s, vt = np.linalg.svd(X)
    expected = (vt[:width] * s[:width, None]).T
    expected /= np.linalg.norm(expected, axis=1, keepdims=True)
    vectors = bloom.item_vectors(items, sizes, 41, width)
    assert vectors.dtype == np.float32 and not vectors[40].any()  # in no set
    assert np.abs(vectors[:40] @ vectors[:40].T - expected @ expected.T).max() < 1e-3
    # fewer sets than dimensions: items of sets have length 1, the others 0
    few = np.random.default_rng(1).integers(0, 200, 60)
    length = np.linalg.norm(item_vectors(few, np.full(20, 3), 200), axis=1)
    assert np.allclose(length, np.isin(np.arange(200), few), atol=1e-5)


def count_pure(table):
    """Return how many buckets have items of one topic only."""
    return sum(len(set((row % 2).tolist())) == 1 for row in table)


def test_coherent_map_deals_the_last_map_where_swaps_fail():
    """20 buckets of 20 of 400 items, of at most 20: nearly every digest is taken."""
    items, sizes = np.random.default_rng(0).integers(0, 400, 900), np.full(300, 3)
    bloom_map = coherent_map(items, sizes, 400, 19, coherent=2)
    assert len(np.unique(bloom_map.digest, axis=0)) == 400
    assert np.array_equal(BloomMap.load(bloom_map.state()).digest, bloom_map.digest)


def test_coherent_map_keeps_similar_items_together_once():
    """Map 0 has only pure buckets. So has most of map 1, although no two items may share a bucket again; with
    the order of map 0 it would have one or none, because repairs would swap most items with random ones."""
    items, sizes = sets_of_two_topics()
    bloom_map = bloom.coherent_map(items, sizes, 40, 4, width=2)
    check_map(bloom_map, 40, 4, 2)
    assert count_pure(bloom_map.members[0]) == 10 and count_pure(bloom_map.members[1]) >= 6
    assert count_pure(BloomMap(40, 4, orders=[bloom_map.members[0].flatten()] * 2).members[1]) < 4
    assert count_pure(BloomMap(40, 4).members[0]) < 4
    one = bloom.coherent_map(items, sizes, 40, 4, coherent=1, width=2)
    assert (one.members[0] == bloom_map.members[0]).all() and count_pure(one.members[1]) < 4
    loaded = BloomMap.load(bloom_map.state())
    assert (loaded.digest == bloom_map.digest).all() and (loaded.members == bloom_map.members).all()


def test_sketch_map_lists_each_word_once_per_function():
    digest = np.random.default_rng(0).integers(0, 17, (301, 3))
    sketch_map = SketchMap(digest, 17)
    assert (sketch_map.digest == digest).all() and sketch_map.digest.dtype == np.int32
    assert (sketch_map.n_items, sketch_map.m, sketch_map.buckets) == (301, 3, 17)
    assert sketch_map.alpha == max(np.bincount(column).max() for column in digest.T)
    assert sketch_map.members.shape == (3, 17, sketch_map.alpha) and sketch_map.members.dtype == np.int32
    for j in range(3):
        assert sorted(sketch_map.members[j][sketch_map.members[j] >= 0].tolist()) == list(range(301))
        for bucket, row in enumerate(sketch_map.members[j]):
            assert (digest[row[row >= 0], j] == bucket).all()
    assert SketchMap(np.zeros((0, 3), np.int64), 17).members.shape == (3, 17, 0)
    for bad in ([[17]], [[-1]], [1], [[0.5]], [["a"]]):
        with pytest.raises(ValueError, match="digest: expected"):
            SketchMap(bad, 17)


# == Beam search
def random_case(case, rng):
    """A map of one to three hashes, log-probabilities with ties or -inf in some cases, and excluded items."""
    n, m = int(rng.integers(1, 300)), int(rng.integers(1, 4))
    alpha = 1 if m == 1 else int(rng.integers(1, max(2, 0.9 * n ** (1 - 1 / m))))
    bloom_map = BloomMap(n, alpha, m, seed=case) if case % 5 else SketchMap(rng.integers(0, 13, (n, m)), 13)
    P, k, beam = (int(rng.integers(1, bound)) for bound in (5, 13, 9))
    logits = rng.standard_normal((P, m, bloom_map.buckets)) * rng.integers(1, 6)
    logp = torch.from_numpy(logits.round() if case % 3 == 0 else logits).log_softmax(-1)  # ties
    if case % 7 == 0:  # buckets of probability 0
        logp[torch.from_numpy(rng.random(logp.shape)) < rng.choice([0.1, 0.9])] = -torch.inf
    exclude = torch.from_numpy(rng.integers(-1, n, (P, 3))) if case % 4 == 0 else None
    return bloom_map, logp, k, beam, exclude


def test_beam_search_matches_exhaustive_where_certified():
    """Thousands of random cases, every score, the oracle in numpy."""
    rng, num_rows, num_certified, num_wrong = np.random.default_rng(0), 0, 0, 0
    for case in range(300):
        bloom_map, logp, k, beam, exclude = random_case(case, rng)
        n, m, P = bloom_map.n_items, bloom_map.m, len(logp)
        parts = np.stack([logp[:, j].numpy()[:, bloom_map.digest[:, j]] for j in range(m)])  # (m, P, N)
        for score, every in (("sum", parts.sum(0)), ("min", parts.min(0)), ("max", parts.max(0)),
                             (lambda x: 2 * x[0] + x[-1].exp(), 2 * parts[0] + np.exp(parts[-1]))):
            every = every.copy()
            for row, excluded in zip(every, [] if exclude is None else exclude.numpy()):
                row[excluded[excluded >= 0]] = -np.inf
            best = -np.sort(-every, axis=1)[:, :k]
            np.testing.assert_allclose(exhaustive(logp, bloom_map, k, score, exclude)[1].numpy(), best)
            for rounds in (1, 2, None):
                ids, scores, certified, scored = beam_search(logp, bloom_map, k, beam, rounds, score, exclude)
                assert ids.shape == scores.shape == (P, min(k, n)) and (rounds or certified.all())
                for row in range(P):
                    items = ids[row][ids[row] >= 0].numpy()
                    assert len(set(items)) == len(items) <= scored[row] <= n
                    np.testing.assert_allclose(scores[row][:len(items)].numpy(), every[row, items])
                    is_exact = np.allclose(scores[row].numpy(), best[row])
                    assert is_exact or not certified[row], (case, score, rounds)
                    num_rows, num_certified = num_rows + 1, num_certified + bool(certified[row])
                    num_wrong += not is_exact
    # without a certificate the result may be wrong
    assert num_rows > 5_000 and num_certified > 0.5 * num_rows and num_wrong > 100


@pytest.mark.parametrize("rounds", [1, 2, None])
@pytest.mark.parametrize("score", list(bloom.SCORES))
def test_beam_search_matches_reference(score, rounds):
    """Algorithm 1 in plain loops, where no two buckets tie: the same scores, items and certificates."""
    rng, num_rows = np.random.default_rng(1), 0
    for case in (case for case in range(120) if case % 3 and case % 7):
        bloom_map, logp, k, beam, exclude = random_case(case, rng)
        ids, scores, certified, _ = beam_search(logp, bloom_map, k, beam, rounds, score, exclude)
        for row in range(len(logp)):
            excluded = () if exclude is None else exclude[row].tolist()
            expected = beam_search_reference(logp[row], bloom_map, k, beam, rounds, score, excluded)
            is_item = ids[row] >= 0
            assert (scores[row][is_item].tolist(), bool(certified[row])) == expected[1:]
            if score == "sum" and isinstance(bloom_map, BloomMap):  # elsewhere items tie, in any order
                assert ids[row][is_item].tolist() == expected[0]
            num_rows += 1
    assert num_rows > 100


def test_beam_search_on_long_rows_scores_each_reached_item_once():
    """Rows long enough for the search by blocks; the items scored are those of B buckets of each map."""
    bloom_map = BloomMap(60_000, 4)
    logp = torch.randn(3, 2, bloom_map.buckets).log_softmax(-1)
    buckets = logp.topk(5).indices
    ids, scores, _, scored = beam_search(logp, bloom_map, k=7, beam=5)
    for row in range(3):
        reached = {i for j in range(2) for i in bloom_map.members[j][buckets[row, j]].flatten().tolist()}
        assert scored[row] == len(reached) and set(ids[row].tolist()) <= reached
    _, scores, certified, scored = beam_search(logp, bloom_map, k=7, beam=5, rounds=None)
    torch.testing.assert_close(scores, exhaustive(logp, bloom_map, 7)[1])
    assert (scored < 60_000).all() and certified.all()


def test_hash_logp_drops_special_rows_and_empty_slots():
    """However likely the rows of special tokens and the short bucket are, only items come back."""
    bloom_map = BloomMap(53, 5)  # 11 buckets a map; the last has 3 items of 5
    logits = torch.randn(4, 2, 2 * 16)
    logits.unflatten(-1, (2, 16))[..., -5:] += 30  # the rows of special tokens
    logits[:, 0, 10] += 9
    logp, every = bloom.hash_logp(logits, bloom_map), logits.log_softmax(-1)
    assert torch.equal(logp, torch.stack([every[:, 0, :11], every[:, 1, 16:27]], 1))
    ids, _, _, _ = beam_search(logp, bloom_map, k=53, rounds=None)
    assert all(sorted(row) == list(range(53)) for row in ids.tolist())
    ids, _, _, scored = beam_search(logp, bloom_map, k=20, beam=1)
    assert (ids >= -1).all() and (scored <= 8).all() and ((ids >= 0).sum(1) == scored).all()
    sketch_map = SketchMap(np.zeros((3, 2), np.int64), 32)  # one softmax per hash function
    assert torch.equal(bloom.hash_logp(logits, sketch_map), every)


@pytest.mark.parametrize("searches, shape, options, message", [
    ("be", (1, 2, 3), dict(score="mean"), "score: expected sum, min, max or a function, got 'mean'"),
    ("be", (1, 2, 3), dict(k=0), "k, beam, rounds: expected 1 or more, got 0"),
    ("b", (1, 2, 3), dict(beam=0), "beam, rounds: .* got 20, 0"), ("b", (1, 2, 3), dict(rounds=0), "rounds"),
    ("be", (1, 2, 4), {}, r"logp: expected float \(P, 2, 3\), got torch.float32 \(1, 2, 4\)"),  # another map
    ("be", (1, 3, 3), {}, "logp: expected float"), ("be", (2, 3), {}, "logp: expected float"),
    ("be", (1, 2, 3), dict(exclude=torch.tensor([6])), r"exclude: expected int64 \(1, E\) below 6, got"),
    ("be", (1, 2, 3), dict(exclude=torch.tensor([[6]])), "exclude"),
    ("be", (1, 2, 3), dict(exclude=torch.tensor([[1.0]])), "exclude"),
    ("h", (1, 3, 6), {}, r"logits: expected \(P, 2, 3\) or 2 such blocks"), ("h", (2, 6), {}, "logits: exp"),
    ("h", (1, 2, 7), {}, "logits: expected"), ("h", (1, 2, 4), {}, "logits: expected")])
def test_search_bad_arguments_raise(searches, shape, options, message):
    for name in searches:
        function = dict(b=beam_search, e=exhaustive, h=bloom.hash_logp)[name]
        with pytest.raises(ValueError, match=message):
            function(torch.zeros(shape), BloomMap(6, 2), **options)


def test_demo_certifies_the_best_items(capsys):
    bloom.main()
    lines = capsys.readouterr().out.splitlines()
    certified, best = [x for x in lines if x.endswith(", certified")], lines[-1].split(": ")[1]
    assert lines[-1].startswith("Exhaustive") and certified and all(best in line for line in certified)
    assert max(map(len, lines)) <= 100 and "scores [-1.96 -2.06]" in certified[0]
