"""Tests of hashing.py: golden values, the explicit products as oracle, and the laws of the hash functions."""

import hashlib
import hmac
import json
import math
import os
import random
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

import hashing
from hashing import HASHES, MD5, NgramLSH

ROOT = Path(hashing.__file__).parent


def random_words(count, seed=0, letters="etaoinshrdlu"):
    """Distinct made-up words of 2..12 letters."""
    rng, words = random.Random(seed), {}
    while len(words) < count:
        words["".join(rng.choices(letters, k=rng.randint(2, 12)))] = None
    return list(words)


def run_python(*command, cwd=ROOT, **environment):
    result = subprocess.run([sys.executable, *command], cwd=cwd, capture_output=True, text=True, timeout=300,
                            env=os.environ | environment)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def ngram_lsh():
    words = random_words(400, 3) + ["play", "plays", "played", "xylophone"]
    return NgramLSH.fit(dict.fromkeys(words, 1), 997, seed=5)


# ---------------------------------------------------------------------------------------------------------
# Text to words


def test_split_words_by_hand():
    """'Don't' is a run of letters, a symbol, a run of letters; two symbols in a row stay one word."""
    words, spans = hashing.split_words("Don't stop!!")
    assert words == ["don", "'", "t", "stop", "!!"]
    assert spans == [(0, 3), (3, 4), (4, 5), (6, 10), (10, 12)]
    assert hashing.split_words("Don't stop!!", "space")[0] == ["don't", "stop!!"]


@pytest.mark.parametrize("split", [hashing.split_words, hashing.list_words])
def test_split_words_unknown_how_raises(split):
    with pytest.raises(ValueError, match="how: expected regex or space, got 'letters'"):
        split("a", "letters")


def check_spans(text):
    for how in ("regex", "space"):
        words, spans = hashing.split_words(text, how)
        assert [text[start:end].lower() for start, end in spans] == words == hashing.list_words(text, how)
        assert all(word and not re.search(r"\s", word) for word in words)
        assert "".join(text[start:end] for start, end in spans) == re.sub(r"\s+", "", text)


HARD_TEXTS = ["", " \t\n", "İstanbul'da ΟΔΟΣ ẞ Ǆ", "a\x00b\x00", "\ud800 lone \udfff", "x" * 10_000,
           "日本語 and 한국어", "e\u0301\u0327 ﬃ Ⅷ", "a\u2028b\x85c\u00a0d", "🙂🙃 !?…", "ab " * 350_000]
ANY_CHARACTERS = st.text(st.characters(exclude_categories=()), max_size=20)
ANY_TEXT = st.lists(ANY_CHARACTERS | st.sampled_from(HARD_TEXTS[:-1]), max_size=12).map("".join)


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
    assert (lsh.bits(words, 17) == hashing.ngram_bits_reference(lsh, words, 17)).all()


# ---------------------------------------------------------------------------------------------------------
# MD5, chunks, sketches


def test_md5_golden_values():
    """md5("play") = a34c..., cut by hand into 10-bit chunks: 1010 0011 10 = 654, 11 0100 1100 = 820, ...

    [HF §3.2] prints the digests of cat and mat as those of play and plays: an erratum.
    """
    digests = {"play": "a3b34c0871dc2fd51eec5559b68f709d", "plays": "ed4018190d63d27337300381ca661fae",
               "cat": "d077f244def8a70e5ea758bd8352fcd8", "mat": "4a258d930b7d3409982d727ddbb4ba88"}
    assert [bytes(row).hex() for row in hashing.md5_digests(list(digests))] == list(digests.values())
    chunks = hashing.bits_to_chunks(hashing.md5_bits(["play"]), 10)
    assert chunks.tolist() == [[654, 820, 770, 113, 880, 765, 327, 748, 341, 411, 419, 880, 157]]
    assert hashing.md5_index(["play"], 50_000).tolist() == [15_933]
    assert hashing.sketch_index(["play"], 5, 500).tolist() == [[409, 489, 306, 104, 165]]


def test_md5_index_is_big_integer_modulo():
    words = random_words(101) + ["\ud800", ""]
    integers = [int(hashlib.md5(word.encode("utf-8", "surrogatepass")).hexdigest(), 16) for word in words]
    for n in (1, 2, 3, 1_038, 50_260, 65_537, 2**31 - 1, 2**32):
        assert hashing.md5_index(words, n).tolist() == [value % n for value in integers]


def test_md5_more_bits_and_key():
    words = random_words(11)
    assert (hashing.md5_bits(words, 300)[:, :128] == hashing.md5_bits(words)).all()
    second = hashlib.md5(words[0].encode() + bytes([0, 0, 0, 1])).digest()
    assert (np.packbits(hashing.md5_bits(words, 256)[0, 128:]) == list(second)).all()
    keyed = hashing.md5_digests(words, key="secret")
    assert bytes(keyed[3]) == hmac.digest(b"secret", words[3].encode(), "md5")
    assert (keyed != hashing.md5_digests(words)).mean() > 0.9


def test_bits_to_chunks_by_hand():
    """The last chunk is short and is read as a number of its own length: 001 is 1, not 0010."""
    bits = np.array([[1, 0, 1, 0, 0, 1, 0, 0, 0, 0, 1]], np.uint8)
    chunks = hashing.bits_to_chunks(bits, 4)
    assert chunks.tolist() == [[10, 4, 1]] and chunks.dtype == np.int16  # the example of [HF §3.4]
    assert hashing.bits_to_chunks(np.ones((1, 15), np.uint8), 15).tolist() == [[2**15 - 1]]
    assert hashing.bits_to_chunks(hashing.md5_bits(random_words(53)), 10)[:, -1].max() < 256


def test_sketch_index_takes_disjoint_slices():
    first = hashlib.md5(b"play").digest()
    more = hashlib.md5(b"play" + (1).to_bytes(4, "big")).digest()
    slices = [int.from_bytes(digest[i:i + 8], "big") for digest in (first, more) for i in (0, 8)]
    assert hashing.sketch_index(["play"], 3, 499).tolist() == [[x % 499 for x in slices[:3]]]
    words = random_words(50)
    index = hashing.sketch_index(words, 5, 23)
    assert index.dtype == np.int64 and (hashing.sketch_index(words, 5, 23, 1) != index).mean() > 0.9
    assert (hashing.sketch_index(words, 5, 23, key="k") != index).mean() > 0.9


def test_sketch_hash_functions_are_independent():
    """Two functions agree no more often than chance: chi-square, R² - 1 degrees of freedom, five sigma."""
    words, R = random_words(20_000), 23
    index = hashing.sketch_index(words, 5, R)
    for i in range(5):
        for j in range(i):
            table = np.bincount(index[:, i] * R + index[:, j], minlength=R * R)
            chi = ((table - len(words) / R**2) ** 2).sum() / (len(words) / R**2)
            assert abs(chi - (R * R - 1)) < 5 * math.sqrt(2 * (R * R - 1))
    ids = np.arange(20_000)  # the family that does not work: a pair that collides once collides always
    assert len(set(zip(ids * 31 % R, ids * 37 % R))) == R


# ---------------------------------------------------------------------------------------------------------
# Locality-sensitive hashing of n-grams


def count_grams(word):
    """The definition, spelled out."""
    return Counter(word[i:i + n] for n in range(1, 5) for i in range(len(word) - n + 1))


def test_ngram_lsh_play_has_ten_ngrams():
    assert sum(count_grams("play").values()) == 10
    lsh = NgramLSH.fit({"play": 1})
    assert sorted(lsh.grams) == sorted(["p", "l", "a", "y", "pl", "la", "ay", "pla", "lay", "play"])


def test_ngram_lsh_fit_counts_by_corpus_frequency():
    """Frequency in the corpus, not in the word list; ties go to the shorter, then by code point."""
    words = random_words(67) + ["日本", "naïve", "\ud800x"]
    counts = {word: 1 + 3 * i % 17 for i, word in enumerate(words)}
    frequency = Counter()
    for word, count in counts.items():
        for gram, times in count_grams(word).items():
            frequency[gram] += times * count
    expected = sorted(frequency, key=lambda gram: (-frequency[gram], len(gram), gram))
    assert NgramLSH.fit(counts, 113).grams == expected[:113]
    assert NgramLSH.fit(counts, 50_000).grams == expected  # fewer exist: all of them


def test_ngram_lsh_without_features_is_zero():
    for counts in ({}, {"": 3}):
        lsh = NgramLSH.fit(counts, 7)
        assert lsh.grams == [] and not lsh.bits(["a", ""], 5).any() and not lsh.index(["a", ""], 5).any()
        assert lsh.bits([], 5).shape == (0, 5) and lsh.index([], 5).shape == (0,)


def test_ngram_lsh_fit_in_passes_is_the_same(monkeypatch):
    counts, passes = {word: 1 + i for i, word in enumerate(random_words(67))}, []
    grams, gram_keys = NgramLSH.fit(counts).grams, hashing._gram_keys
    monkeypatch.setattr(hashing, "_gram_keys", lambda *args: passes.append(args) or gram_keys(*args))
    monkeypatch.setattr(NgramLSH, "words_per_pass", 7)
    assert NgramLSH.fit(counts).grams == grams and len(passes) > 67 / 7


def check_against_reference(lsh, words, T, N):
    assert (lsh.bits(words, T) == hashing.ngram_bits_reference(lsh, words, T)).all()
    assert (lsh.index(words, N) == hashing.ngram_index_reference(lsh, words, N)).all()


def test_ngram_lsh_matches_explicit_products(ngram_lsh):
    words = ["play", "plays", "", "ZZZ", "日本", "ee", "tattoo" * 9] + random_words(23, 9)
    check_against_reference(ngram_lsh, words, 131, 499)
    check_against_reference(ngram_lsh, words, 1, 1)
    check_against_reference(ngram_lsh, words, 997, 997)
    assert not ngram_lsh.bits(["ZZZ"], 131).any() and ngram_lsh.index(["ZZZ"], 499) == 0  # no known n-gram


def test_ngram_reference_counts_by_definition(ngram_lsh):
    word, T = "tattoo", 97
    x, eta = np.zeros(997, np.int64), ngram_lsh.eta[:997].astype(np.int64)
    for gram, count in count_grams(word).items():
        if gram in ngram_lsh.grams:
            x[ngram_lsh.grams.index(gram)] = count
    products = [sum(int(x[f]) * int(eta[(f + j) % 997]) for f in range(997)) for j in range(T)]
    assert hashing.ngram_bits_reference(ngram_lsh, [word], T)[0].tolist() == [p > 0 for p in products]
    assert hashing.ngram_index_reference(ngram_lsh, [word], T) == np.argmax(products)


def test_ngram_lsh_long_words_do_not_overflow(ngram_lsh):
    check_against_reference(ngram_lsh, ["e" * 10_007, "et" * 40_009, "e"], 16, 499)
    big = NgramLSH(["e"], 97)
    big.eta = big.eta * 100
    x = big.eta[:97].astype(np.int64)
    assert (big.bits(["e" * 50_009], 97)[0] == (x > 0)).all() and big.index(["e" * 50_009], 97) == x.argmax()


def test_ngram_lsh_does_not_depend_on_the_other_words(ngram_lsh):
    """The stack of shared prefixes and the batches of words only save time and memory."""
    words = random_words(61, 4) + ["e" * n for n in (1, 23, 24, 25, 26, 40)]
    words += ["e" * 30 + "t", "e" * 30 + "ta"]
    assert ngram_lsh.index(words, 251).tolist() == [int(ngram_lsh.index([word], 251)[0]) for word in words]
    words = random_words(4_999)
    bits = ngram_lsh.bits(words, 16)
    for i in (0, 4_095, 4_096, 4_998):
        assert (bits[i] == ngram_lsh.bits([words[i]], 16)[0]).all()


def test_ngram_lsh_hamming_distance_is_the_angle():
    """E[Hamming] / T = angle / pi. The T bits of one pair share eta, so average over 64 seeds; six sigma of a
    binomial share of 64 · 128 draws, doubled for the correlation that rotations leave."""
    cosine = 10 / math.sqrt(10 * 14)  # play's 10 n-grams lie in the 14 of plays
    assert math.isclose(cosine, 0.845, abs_tol=5e-4)
    grams = list(count_grams("playsxylophone"))
    bits = [NgramLSH(grams, 5_003, seed).bits(["play", "plays"], 128) for seed in range(64)]
    share, expected = np.mean([(b[0] != b[1]).mean() for b in bits]), math.acos(cosine) / math.pi
    assert abs(expected * 128 - 23) < 0.5
    assert abs(share - expected) < 2 * 6 * math.sqrt(expected * (1 - expected) / (64 * 128))


# ---------------------------------------------------------------------------------------------------------
# HASHES, bad arguments, the script


@pytest.mark.parametrize("name", HASHES)
def test_hash_classes_share_one_interface(name):
    words, options = random_words(29), {"md5": dict(key="k"), "lsh": dict(features=499, seed=7)}[name]
    cls = HASHES[name]
    assert set(cls.options) == set(options) and isinstance(cls.needs_counts, bool)
    assert isinstance(cls.index_is_slow, bool) and (cls.max_outputs is None or cls.max_outputs > 0)
    hash_function = cls.fit(dict.fromkeys(words, 1), **options)
    bits, index = hash_function.bits(words, 130), hash_function.index(words, 101)
    assert bits.dtype == np.uint8 and bits.shape == (29, 130) and bits.max() == 1
    assert index.dtype == np.int64 and index.shape == (29,) and 0 <= index.min() <= index.max() < 101
    copy = cls.load(json.loads(json.dumps(hash_function.state())))
    assert (copy.bits(words, 130) == bits).all() and (copy.index(words, 101) == index).all()
    assert copy.state() == hash_function.state()
    default = cls.fit(dict.fromkeys(words, 1))
    assert (default.bits(words, 130) != bits).any() and (default.index(words, 101) != index).any()


def test_hash_classes_facts():
    assert not MD5.needs_counts and not MD5.index_is_slow and MD5.max_outputs is None
    assert NgramLSH.needs_counts and NgramLSH.index_is_slow and NgramLSH.max_outputs == 65_535
    assert (MD5.fit().bits(["a"], 99) == hashing.md5_bits(["a"], 99)).all()
    assert (MD5("k").index(["a"], 99) == hashing.md5_index(["a"], 99, "k")).all()


@pytest.mark.parametrize("call, message", [
    (lambda lsh: hashing.md5_bits("play"), "words: expected a list of str, got str 'play'"),
    (lambda lsh: hashing.md5_index("play", 9), "words: expected a list of str"),
    (lambda lsh: hashing.sketch_index("play", 3, 9), "words: expected a list of str"),
    (lambda lsh: lsh.bits("play", 9), "words: expected a list of str"),
    (lambda lsh: lsh.index("play", 9), "words: expected a list of str"),
    (lambda lsh: NgramLSH.fit(["play"]), "counts: expected a dict .* got list"),
    (lambda lsh: hashing.md5_bits(["a"], 0), "bits: expected 1"),
    (lambda lsh: hashing.md5_index(["a"], 0), "n: expected 1"),
    (lambda lsh: hashing.md5_index(["a"], 2**32 + 1), "n: expected 1"),
    (lambda lsh: hashing.bits_to_chunks(np.ones((1, 99), np.uint8), 16), "k: expected 1 to 15, got 16"),
    (lambda lsh: hashing.sketch_index(["a"], 0, 5), "k: expected 1 to 255, got 0"),
    (lambda lsh: hashing.sketch_index(["a"], 1, 0), "rows: expected 1"),
    (lambda lsh: lsh.bits(["a"], 998), "T: expected 1 to 997, got 998. Raise the features"),
    (lambda lsh: lsh.index(["a"], 998), "N: expected 1 to 997, got 998. Raise the features"),
    (lambda lsh: lsh.bits(["a"], 0), "T: expected 1"),
    (lambda lsh: lsh.index(["a"], 0), "N: expected 1"),
    (lambda lsh: NgramLSH([], 65_536), "features: expected 1 to 65,535, got 65,536"),
    (lambda lsh: NgramLSH(["a", "b"], 1), "features: expected 2 to 65,535, got 1"),
])
def test_bad_arguments_raise_value_error(ngram_lsh, call, message):
    with pytest.raises(ValueError, match=message):
        call(ngram_lsh)


def test_hashes_are_the_same_in_every_process():
    """The value is fixed: another machine, another numpy, the same bits."""
    code = ("import hashing as h, hashlib; l = h.NgramLSH.fit({'play': 3, 'plays': 2, 'naïve': 1}, 997, 5);"
            "d = l.bits(['play', 'nave'], 128).tobytes() + l.index(['plays'], 99).tobytes()"
            " + h.md5_digests(['é']).tobytes();"
            "print(hashlib.sha256(d).hexdigest())")
    outputs = {run_python("-c", code, PYTHONHASHSEED=seed) for seed in ("0", "1", "77")}
    assert outputs == {"4af19a9c3e6ab49b3c7956439a50144215449358e3ffb336061c4b80c786be92\n"}


def test_script_runs_alone_in_an_empty_folder(tmp_path):
    """play and plays differ in 74 bits of MD5 and in 23 bits of the LSH; play is bucket 15,933."""
    shutil.copy(ROOT / "hashing.py", tmp_path)
    lines = run_python("hashing.py", "play plays played", cwd=tmp_path).splitlines()
    assert len(lines) < 25 and "'play': 15933" in lines[-1]
    assert [line.split()[-1] for line in lines if line.split()[0] == "plays"] == ["74", "23"]
