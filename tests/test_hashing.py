"""Tests of hashing.py: golden values, the explicit products as oracle, and the laws of the hash functions."""

import hashlib
import hmac
import json
import math
import re
import sysconfig
from collections import Counter
from pathlib import Path

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

import hashing
from data.python_source import python_texts
from hashing import HASHES, NgramLSH
from tests.support import make_words, run_main


# == Text to words
def check_spans(text):
    for how in ("regex", "space"):
        words, spans = hashing.split_words(text, how)
        assert [text[start:end].lower() for start, end in spans] == words == hashing.list_words(text, how)
        assert all(word and not re.search(r"[\s\ufeff\0]", word) for word in words)
        assert "".join(text[start:end] for start, end in spans) == re.sub(r"[\s\ufeff\0]+", "", text)


HARD_TEXTS = ["", " \t\n", "İstanbul'da ΟΔΟΣ ẞ Ǆ", "\ufeffa\0b \ufeff c\ufeff", "\ud800 lone \udfff",
              "日本語 and 한국어", "e\u0301\u0327 ﬃ Ⅷ", "a\u2028b\x85c\u00a0d", "🙂🙃 !?…", "x" * 10_000, "ab " * 350_000]
ANY_TEXT = st.lists(st.text(st.characters(exclude_categories=()), max_size=20)
                    | st.sampled_from(HARD_TEXTS[:-1]), max_size=12).map("".join)


@pytest.mark.parametrize("text", HARD_TEXTS, ids=range(len(HARD_TEXTS)))
def test_split_words_hard_text_keeps_offsets(text):
    check_spans(text)


@hypothesis.settings(max_examples=40, deadline=None, database=None, derandomize=True)
@hypothesis.given(text=ANY_TEXT)
def test_split_and_hash_any_text(text):
    check_spans(text)
    words = hashing.list_words(text) or [text]
    assert [bytes(row) for row in hashing.md5_digests(words)] == [
        hashlib.md5(word.encode("utf-8", "surrogatepass")).digest() for word in words]
    assert (hashing.sketch_index(words, 5, 31) < 31).all()
    lsh = NgramLSH.fit(Counter(words), 997)
    check_against_reference(lsh, words, 17, 3)


# == MD5, chunks, sketches
def test_md5_golden_values():
    """[HF §3.2] prints the digests of cat and mat as those of play and plays: an erratum."""
    digests = {"play": "a3b34c0871dc2fd51eec5559b68f709d", "plays": "ed4018190d63d27337300381ca661fae",
               "cat": "d077f244def8a70e5ea758bd8352fcd8", "mat": "4a258d930b7d3409982d727ddbb4ba88"}
    assert [bytes(row).hex() for row in hashing.md5_digests(list(digests))] == list(digests.values())
    assert hashing.sketch_index(["play"], 5, 500).tolist() == [[409, 489, 306, 104, 165]]


def test_md5_index_is_big_integer_modulo():
    words = make_words(101) + ["\ud800", ""]
    integers = [int(hashlib.md5(word.encode("utf-8", "surrogatepass")).hexdigest(), 16) for word in words]
    for n in (1, 2, 3, 1_038, 50_260, 65_537, np.int64(2**31 - 1), 2**32):
        assert hashing.md5_index(words, n).tolist() == [value % int(n) for value in integers]


def test_md5_more_bits_and_key():
    words = make_words(11)
    assert (hashing.md5_bits(words, 300)[:, :128] == hashing.md5_bits(words)).all()
    second = hashlib.md5(words[0].encode() + bytes([0, 0, 0, 1])).digest()
    assert (np.packbits(hashing.md5_bits(words, 256)[0, 128:]) == list(second)).all()
    keyed = hashing.md5_digests(words, key="secret")
    assert bytes(keyed[3]) == hmac.digest(b"secret", words[3].encode(), "md5")


def test_bits_to_chunks_limits():
    """15 bits fit int16, and the last chunk of 128 bits has 8 of them."""
    chunks = hashing.bits_to_chunks(np.ones((1, 15), np.uint8), 15)
    assert chunks.tolist() == [[2**15 - 1]] and chunks.dtype == np.int16
    assert 128 < hashing.bits_to_chunks(hashing.md5_bits(make_words(53)), 10)[:, -1].max() < 256


def test_sketch_index_takes_disjoint_slices():
    first = hashlib.md5(b"play").digest()
    more = hashlib.md5(b"play" + (1).to_bytes(4, "big")).digest()
    slices = [int.from_bytes(digest[i:i + 8], "big") for digest in (first, more) for i in (0, 8)]
    assert hashing.sketch_index(["play"], 3, 499).tolist() == [[x % 499 for x in slices[:3]]]
    words = make_words(50)
    index = hashing.sketch_index(words, 5, 23)
    assert index.dtype == np.int64 and (hashing.sketch_index(words, 5, 23, 1) != index).mean() > 0.9
    assert (hashing.sketch_index(words, 5, 23, key="k") != index).mean() > 0.9


def test_sketch_hash_functions_are_independent():
    """Two functions agree no more often than chance: chi-square, R² - 1 degrees of freedom, five sigma."""
    words, R = make_words(20_000), 23
    index = hashing.sketch_index(words, 5, R)
    for i in range(5):
        for j in range(i):
            table = np.bincount(index[:, i] * R + index[:, j], minlength=R * R)
            chi = ((table - len(words) / R**2) ** 2).sum() / (len(words) / R**2)
            assert abs(chi - (R * R - 1)) < 5 * math.sqrt(2 * (R * R - 1))
    ids = np.arange(20_000)  # the family that does not work: a pair that collides once collides always
    assert len(set(zip(ids * 31 % R, ids * 37 % R))) == R


# == Locality-sensitive hashing of n-grams
def count_grams(word):
    """The definition, spelled out."""
    return Counter(word[i:i + n] for n in range(1, 5) for i in range(len(word) - n + 1))


def rank_grams(counts):
    """Return n-grams by frequency in the corpus, not in the word list, then by length and code point."""
    frequency = Counter()
    for word, count in counts.items():
        for gram, times in count_grams(word).items():
            frequency[gram] += times * count
    return sorted(frequency, key=lambda gram: (-frequency[gram], len(gram), gram))


def check_against_reference(lsh, words, T, N):
    products = hashing.ngram_products_reference(lsh, words, max(T, N))
    assert (lsh.bits(words, T) == (products[:, :T] > 0)).all()
    assert (lsh.index(words, N) == products[:, :N].argmax(1)).all()


def test_ngram_lsh_fit_shuffles_the_most_frequent_ngrams():
    words = make_words(67) + ["日本", "naïve", "\ud800x"]
    counts = {word: 1 + 3 * i % 17 for i, word in enumerate(words)}
    ranked = rank_grams(counts)
    for features in (113, 50_000):  # of 50,000, fewer exist: all of them
        first, again, other = (NgramLSH.fit(counts, features, seed).grams for seed in (0, 0, 1))
        assert set(first) == set(other) == set(ranked[:features]) and len(first) == len(ranked[:features])
        assert first == again and sum(a == b for a, b in zip(first, other)) < 9
        assert sum(a == b for a, b in zip(first, ranked)) < 9


def test_ngram_lsh_bits_are_nearly_independent():
    """At least 126 of 128 bits are effective on words of docstrings; 110 were, numbered by frequency.

    Effective bits of a word: T² / Σ_ij c_ij², with c_ij the correlation of bits i and j over random eta. Bits
    are signs of normal variables: c = 2/π arcsin r, with r the autocorrelation at lag j - i of the word's
    n-gram counts, by feature. The sum is averaged over 400 words. T independent bits give T.
    """
    counts = Counter()
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("[a-h]*.py")):
        counts.update(word for text in python_texts(str(path)) for word in hashing.list_words(text))
    words = sorted(word for word in counts if word.isalpha() and len(word) > 2)[::len(counts) // 400]
    effective, ranked, lags = [], rank_grams(counts), np.arange(128)
    for lsh in (NgramLSH.fit(counts), NgramLSH(ranked, 50_000)):
        sums = []
        for word in words:
            features = np.array([lsh.feature_of_gram[gram] for gram in count_grams(word).elements()])
            lag = np.subtract.outer(features, features)
            r = np.bincount(lag[(lag >= 0) & (lag < 128)], minlength=128)
            sums.append(128 + 2 * (128 - lags)[1:] @ (2 / np.pi * np.arcsin(r / r[0])[1:]) ** 2)
        effective.append(128**2 / np.mean(sums))
    assert len(counts) > 1_000 and 126 <= effective[0] < 128 and 100 < effective[1] < 116, effective


def test_ngram_lsh_without_features_is_zero():
    for counts in ({}, {"": 3}):
        lsh = NgramLSH.fit(counts, 7)
        assert lsh.grams == [] and not lsh.bits(["a", ""], 5).any() and not lsh.index(["a", ""], 5).any()
        assert lsh.bits([], 5).shape == (0, 5) and lsh.index([], 5).shape == (0,)


def test_ngram_lsh_matches_explicit_products(lsh):
    words = ["play", "plays", "", "ZZZ", "日本", "ee", "tattoo" * 9] + make_words(23, 9)
    for T, N in ((131, 499), (1, 1), (997, 997)):
        check_against_reference(lsh, words, T, N)
    assert not lsh.bits(["ZZZ"], 131).any() and lsh.index(["ZZZ"], 499) == 0  # no known n-gram


def test_ngram_lsh_long_words_do_not_overflow(lsh):
    check_against_reference(lsh, ["e" * 10_007, "et" * 40_009, "e"], 16, 499)
    big = NgramLSH(["e"], 97)
    big.eta = big.eta * 100
    x = big.eta[:97].astype(np.int64)
    assert (big.bits(["e" * 50_009], 97)[0] == (x > 0)).all() and big.index(["e" * 50_009], 97) == x.argmax()


def test_ngram_lsh_does_not_depend_on_the_other_words(lsh):
    """The stack of shared prefixes and the batches of words only save time and memory."""
    words = make_words(61, 4) + ["e" * n for n in (1, 23, 24, 25, 26, 40)]
    words += ["e" * 30 + "t", "e" * 30 + "ta"]
    assert lsh.index(words, 251).tolist() == [int(lsh.index([word], 251)[0]) for word in words]
    words = make_words(4_999)
    bits = lsh.bits(words, 16)
    for i in (0, 4_095, 4_096, 4_998):
        assert (bits[i] == lsh.bits([words[i]], 16)[0]).all()


def test_ngram_lsh_golden_values():
    """Another machine, another numpy, the same bits. A state keeps the order of its n-grams."""
    counts = {"play": 3, "plays": 2, "naïve": 1}
    fitted, state = NgramLSH.fit(counts, 997, 5), dict(grams=rank_grams(counts), features=997, seed=5)
    goldens = ("9c8a195f484e13bf899729f586b319edec00bfb4dcefabff6156c97b3690b724",
               "4af19a9c3e6ab49b3c7956439a50144215449358e3ffb336061c4b80c786be92")
    for lsh, golden in zip((fitted, NgramLSH(**state)), goldens, strict=True):
        data = (lsh.bits(["play", "nave"], 128), lsh.index(["plays"], 99), hashing.md5_digests(["é"]))
        assert hashlib.sha256(b"".join(numbers.tobytes() for numbers in data)).hexdigest() == golden


# == HASHES, bad arguments, the demo
@pytest.mark.parametrize("name", HASHES)
def test_hash_classes_share_one_interface(name):
    words, options = make_words(29), {"md5": dict(key="k"), "lsh": dict(features=499, seed=7)}[name]
    cls = HASHES[name]
    assert set(cls.options) == set(options) and isinstance(cls.needs_counts, bool)
    assert isinstance(cls.index_is_slow, bool) and (cls.max_outputs is None or cls.max_outputs > 0)
    hash_function = cls.fit(dict.fromkeys(words, 1), **options)
    bits, index = hash_function.bits(words, 130), hash_function.index(words, 101)
    assert bits.dtype == np.uint8 and bits.shape == (29, 130) and bits.max() == 1
    assert index.dtype == np.int64 and index.shape == (29,) and 0 <= index.min() <= index.max() < 101
    copy = cls(**json.loads(json.dumps(hash_function.state())))
    assert (copy.bits(words, 130) == bits).all() and (copy.index(words, 101) == index).all()
    assert copy.state() == hash_function.state()
    default = cls.fit(dict.fromkeys(words, 1))  # the options change both
    assert (default.bits(words, 130) != bits).any() and (default.index(words, 101) != index).any()


ONES = np.ones((1, 99), np.uint8)
BAD_ARGUMENTS = {
    ("split_words", "text: expected a str, got b'a'"): [(b"a",)],
    ("list_words", "text: expected a str, got None"): [(None,)],
    ("split_words", "how: expected regex or space, got 'letters'"): [("a", "letters")],
    ("md5_digests", "count: expected 1 to 4,294,967,296, got "): [(["a"], 1.5), (["a"], 0)],
    ("md5_digests", "key: expected a str or None, got b'k'"): [(["a"], 1, b"k")],
    ("md5_bits", "words: expected a list of str, got "): [("play",), (["a", 5],), ({"a"},), (None,)],
    ("md5_bits", "bits: expected 1 to 4,294,967,296, got "): [(["a"], 0), (["a"], "9")],
    ("md5_index", "words: expected a list of str, got 'play'"): [("play", 9)],
    ("md5_index", "n: expected 1 to 4,294,967,296, got "): [(["a"], 0), (["a"], 2**32 + 1), (["a"], "9")],
    ("sketch_index", "words: expected a list of str, got 'play'"): [("play", 3, 9)],
    ("sketch_index", "k: expected 1 to 255, got "): [(["a"], 0, 5), (["a"], 256, 5)],
    ("sketch_index", "rows: expected 1 to 4,294,967,296, got "): [(["a"], 1, 0)],
    ("bits_to_chunks", "k: expected 1 to 15, got "): [(ONES, 16), (ONES, 0)],
    ("bits_to_chunks", "bits: expected uint8 (V, T) of 0 and 1, got "): [
        (2 * ONES, 5), ([[0, 1]], 5), (ONES / 1, 5), (ONES[0], 5), (ONES[:, :0], 5)],
    ("lsh.bits", "words: expected a list of str, got "): [("play", 9), ([b"a"], 9)],
    ("lsh.bits", "T: expected 1 to 997, got "): [(["a"], 0), (["a"], "9"), (["a"], 1.5)],
    ("lsh.bits", "T: expected 1 to 997, got 998. Raise the features"): [(["a"], 998)],
    ("lsh.index", "words: expected a list of str, got "): [("play", 9), (("a", None), 9)],
    ("lsh.index", "N: expected 1 to 997, got "): [(["a"], 0), (["a"], 998)],
    ("NgramLSH.fit", "counts: expected a dict of word -> count, got "): [(["play"],), ("play",)],
    ("NgramLSH", "features: expected 1 to 65,535, got "): [([], 65_536), ([], "9")],
    ("NgramLSH", "features: expected 2 to 65,535, got 1"): [(["a", "b"], 1)],
}


@pytest.mark.parametrize("name, args, message", [
    (name, args, message) for (name, message), cases in BAD_ARGUMENTS.items() for args in cases])
def test_bad_arguments_raise_value_error(lsh, name, args, message):
    methods = {"lsh.bits": lsh.bits, "lsh.index": lsh.index, "NgramLSH.fit": NgramLSH.fit}
    with pytest.raises(ValueError, match=re.escape(message)):
        (vars(hashing) | methods)[name](*args)


def test_demo_counts_the_bits_that_differ():
    """play and plays differ in 74 bits of MD5 and in 24 of the LSH, by the law in 23; play is bucket 15,933."""
    lines = run_main(hashing.main, "play plays played").out.splitlines()
    rows = [line.split()[-2:] for line in lines if line.strip().startswith("plays")]
    assert rows == [["74", "23"], ["24", "23"]] and "'play': 15933" in lines[-1] and max(map(len, lines)) <= 100
