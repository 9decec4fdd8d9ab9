"""Tests of hashing.py: golden values, naive oracles, and the laws of the hash functions.

test_all.py works each hash function out by hand.
"""

import hashlib
import hmac
import json
import math
import re
from collections import Counter
from itertools import combinations

import hypothesis
import numpy as np
import pytest

import hashing
from hashing import HASHES, NgramLSH
from tests.helpers import make_words
from tests.test_words import ANY_TEXT, REPEATABLE


def test_ngrams_of_a_long_word_are_bounded():
    word = "acgt" * 250_000  # a line of a genome: a million letters
    lsh = NgramLSH.fit({word: 1})
    first = word[:hashing.MAX_LETTERS]
    assert len(hashing.list_ngrams(word)) == 4 * hashing.MAX_LETTERS - 6
    assert (lsh.bits([word], 128) == lsh.bits([first], 128)).all()


def test_products_of_the_longest_word_do_not_overflow():
    """Four n-grams, about 4,096 times each: eta is int32."""
    word = "a" * hashing.MAX_LETTERS
    lsh = NgramLSH.fit({word: 1}, 50_000)
    expected = np.zeros(128, np.int64)
    for f, gram in enumerate(lsh.grams):
        count = hashing.MAX_LETTERS + 1 - len(gram)
        expected += count * lsh.eta[f:f + 128].astype(np.int64)
    assert (lsh.products(word, 128) == expected).all()


@pytest.mark.parametrize("name", HASHES)
def test_hash_knows_a_word_if_its_code_differs_from_that_of_unknown_words(name):
    hash = HASHES[name].fit({"play": 2})
    words = ["play", "xyz", "ýý", "yes"]
    bits = hash.bits(words, 128)
    is_known = hash.knows(words)
    assert is_known.dtype == bool
    assert (is_known == (bits != hash.bits(["ωω"], 128)).any(1)).all()
    assert hash.knows([]).shape == (0,)


# MD5


@pytest.mark.parametrize("T", [8, 128, 130])
def test_md5_bits_are_the_first_of_more(T):
    bits = hashing.md5_bits(["play"], T)
    more = hashing.md5_bits(["play"], 256)
    assert (bits == more[:, :T]).all()


@REPEATABLE
@hypothesis.given(word=ANY_TEXT)
def test_md5_of_any_word_is_that_of_its_utf8(word):
    data = word.encode("utf-8", "surrogatepass")
    first = hashlib.md5(data).digest()
    second = hashlib.md5(data + b"\0\0\0\1").digest()
    digests = hashing.md5_digests([word], 2)[0]
    assert bytes(digests) == first + second
    keyed = hashing.md5_digests([word], key="secret")[0]
    assert bytes(keyed) == hmac.digest(b"secret", data, "md5")


# Sketches and chunks


def test_sketch_index_depends_on_seed_and_key():
    words = make_words(50)
    options = [
        dict(),
        dict(seed=1),
        dict(seed=2),
        dict(key="k"),
        dict(key="k", seed=1),
    ]
    sketches = [hashing.sketch_index(words, 5, 23, **each) for each in options]
    for first, second in combinations(sketches, 2):
        assert (first != second).mean() > 0.9
    assert (hashing.sketch_index(words, 5, 23, key="") == sketches[0]).all()  # empty: no key


def test_sketch_hash_functions_are_independent():
    """Two functions agree as often as chance: chi-square of R² cells, five sigma."""
    R = 23
    index = hashing.sketch_index(make_words(20_000), 5, R)
    expected = 20_000 / R**2
    freedom = R**2 - 1
    for first, second in combinations(index.T, 2):
        table = np.bincount(first * R + second, minlength=R**2)
        chi_square = ((table - expected) ** 2).sum() / expected
        assert abs(chi_square - freedom) < 5 * math.sqrt(2 * freedom)


def test_bits_to_chunks_takes_fifteen_bits_at_most():
    ones = np.ones((1, 15), np.uint8)
    assert hashing.bits_to_chunks(ones, 15).tolist() == [[2**15 - 1]]


# Locality-sensitive hashing of n-grams


@pytest.mark.parametrize("features", [113, 50_000])  # fewer than there are, or all of them
def test_ngram_lsh_fit_chooses_the_most_frequent_ngrams(features):
    """By frequency in the corpus, then by length and code point."""
    words = make_words(67) + ["日本", "naïve", "\ud800x"]
    counts = {word: 1 + 3 * i % 17 for i, word in enumerate(words)}
    frequency = Counter()
    for word, count in counts.items():
        frequency.update(hashing.list_ngrams(word) * count)
    ranked = sorted(frequency, key=lambda gram: (-frequency[gram], len(gram), gram))
    expected = ranked[:features]
    grams = NgramLSH.fit(counts, features).grams
    assert sorted(grams) == sorted(expected)
    # shuffled: as neighbors in eta, frequent n-grams would make bits depend on each other
    is_in_place = [a == b for a, b in zip(grams, expected)]
    assert np.mean(is_in_place) < 0.1


def test_ngram_lsh_without_features_is_zero():
    lsh = NgramLSH.fit({"": 3}, 7)
    assert lsh.grams == []
    assert not lsh.bits(["a", ""], 5).any()
    assert not lsh.index(["a", ""], 5).any()
    assert lsh.bits([], 5).shape == (0, 5)


def test_hashes_have_golden_values():
    """Another machine, another numpy, the same bits."""
    lsh = NgramLSH.fit({"play": 3, "plays": 2, "naïve": 1}, 997, 5)
    assert lsh.eta[:3].tolist() == [-3285, -5425, -1017]
    data = lsh.bits(["play", "nave"], 128).tobytes()
    data += lsh.index(["plays"], 99).tobytes()
    data += hashing.md5_digests(["é"]).tobytes()
    assert hashlib.sha256(data).hexdigest() == (
        "9c8a195f484e13bf899729f586b319edec00bfb4dcefabff6156c97b3690b724")


# HASHES, refusals


OPTIONS = {"md5": dict(key="k"), "lsh": dict(features=499, seed=7)}  # none is the default
WORDS = make_words(29)
COUNTS = dict.fromkeys(WORDS, 1)


@pytest.mark.parametrize("name", HASHES)
def test_hash_class_is_restored_from_its_state(name):
    fitted = HASHES[name].fit(COUNTS, **OPTIONS[name])
    state = json.loads(json.dumps(fitted.state()))
    restored = HASHES[name](**state)
    bits = restored.bits(WORDS, 130)
    assert bits.dtype == np.uint8
    assert (bits == fitted.bits(WORDS, 130)).all()
    index = restored.index(WORDS, 101)
    assert index.dtype == np.int64
    assert (index == fitted.index(WORDS, 101)).all()


@pytest.mark.parametrize("function, args, error, message", [
    # would be hashed letter by letter
    (hashing.md5_digests, ("play",), ValueError, "words: expected a list of str, got 'play'"),
    (NgramLSH(["a"], 9).bits, ("play", 9), ValueError, "words: expected a list of str, got 'play'"),
    # numpy gives 0 for every word
    (hashing.sketch_index, (["a"], 3, 0), AssertionError, "k, R: expected at least 1"),
    (NgramLSH.fit, (["play"],), AssertionError, "counts: expected a dict"),
    # int16 would overflow
    (hashing.bits_to_chunks, (np.ones((1, 20), np.uint8), 16), AssertionError, "size: expected"),
    # a window would run over the end of eta
    (NgramLSH(["a"], 9).index, (["a"], 10), AssertionError, "T, N: expected 1 to F, 9"),
])
def test_silently_wrong_arguments_are_refused(function, args, error, message):
    with pytest.raises(error, match=re.escape(message)):
        function(*args)
