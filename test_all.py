"""All tests, file by file in import order: a hand-worked example, an independent oracle, then theory.

    python -m pytest -q test_all.py                    everything, no network, a few minutes on two cores
    LONG=600 python -m pytest -q test_all.py -k "whatever_ends or any_text"      200 kills, texts for an hour

Bands of statistical tests are six standard deviations wide: over the few dozen such tests here a correct
program fails one run in ten million, while a wrong constant moves the mean by far more.
"""

import ast
import contextlib
import copy
import csv
import functools
import gzip
import hashlib
import hmac
import importlib
import io
import json
import math
import os
import random
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
import types
from collections import Counter
from dataclasses import asdict
from pathlib import Path

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import torch
import torch.nn.functional as F

import attention
import bench
import embeddings
import finetune
import hashing
import infer
import model
import pretrain
from hashing import BPE, CLS, FIRST, MASK, PAD, SEP, UNK, WORD, Encoder, InputError, NgramLSH
from model import Config, ConfigError, Model

HERE = Path(__file__).parent
LONG = int(os.environ.get("LONG", 0))  # seconds for each target of hypothesis; 200 kills, not 8
long = pytest.mark.skipif(not LONG, reason="minutes: LONG=600 runs it")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    """Sockets to anywhere but this machine are an error."""
    connect = socket.socket.connect

    def local_only(self, address):
        local = self.family == socket.AF_UNIX or address[0] in ("127.0.0.1", "::1", "localhost")
        assert local, f"network: {address}"
        return connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", local_only)


@pytest.fixture(autouse=True)
def same_chances():
    """What a test draws does not depend on the tests before it."""
    torch.manual_seed(0)


def words_like(count, seed=0, letters="etaoinshrdlu"):
    """Distinct made-up words of 2..12 letters."""
    rng = random.Random(seed)
    made = {}
    while len(made) < count:
        made["".join(rng.choices(letters, k=rng.randint(2, 12)))] = None
    return list(made)


@pytest.fixture(scope="session")
def text_file(tmp_path_factory):
    """A text of 3,000 lines with an order to learn: each word is one of two that may follow the last."""
    rng, words = random.Random(1), words_like(40, 7)
    follow = {w: rng.sample(words, 2) for w in words}
    lines, word = [], words[0]
    for _ in range(3000):
        line = []
        for _ in range(rng.randint(4, 15)):
            word = rng.choice(follow[word])
            line.append(word)
        lines.append(" ".join(line) + ".")
    path = tmp_path_factory.mktemp("text") / "small.txt"
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


SMALL = ["--layers", "1", "--width", "32", "--heads", "4", "--length", "17", "--batch", "8", "--steps", "6",
         "--warmup", "2", "--device", "cpu", "--dtype", "float32", "--no-compile",
         "--eval_every", "3", "--save_every", "3"]


@pytest.fixture
def small(text_file, tmp_path, tmp_path_factory):
    """Flags of a run of a second, with its own --out; the prepared corpus is shared."""
    cache = tmp_path_factory.getbasetemp() / "cache"

    def flags(*more, out="run"):
        return ["--data", str(text_file), "--cache", str(cache), "--out", str(tmp_path / out), *SMALL,
                *map(str, more)]

    return flags


def run_script(*command, **options):
    """A script in a process of its own: what users see."""
    return subprocess.run([sys.executable, *map(str, command)], cwd=HERE, capture_output=True, text=True,
                          timeout=3000 if LONG else 300, **options)


def refused(function, *args, says):
    """The call exits with code 2 and says so in one line, without a traceback."""
    error = io.StringIO()
    with contextlib.redirect_stderr(error), pytest.raises(SystemExit) as exit:
        function(*args)
    said = error.getvalue()
    assert exit.value.code == 2 and says in said and "Traceback" not in said, said


# ---------------------------------------------------------------------------------------------------------
# hashing.py


def test_split_by_hand():
    """'Don't' is a run of letters, a sign, a run of letters; two signs in a row stay one word."""
    words, spans = hashing.split_words("Don't stop!!")
    assert words == ["don", "'", "t", "stop", "!!"]
    assert spans == [(0, 3), (3, 4), (4, 5), (6, 10), (10, 12)]
    assert hashing.split_words("Don't stop!!", "space")[0] == ["don't", "stop!!"]
    with pytest.raises(InputError, match="regex, space"):
        hashing.split_words("a", "letters")


NASTY = ["", " \t\n", "İstanbul'da ΟΔΟΣ ẞ Ǆ", "a\x00b\x00", "\ud800 lone \udfff", "x" * 10_000, "日本語 and 한국어",
         "e\u0301\u0327 ﬃ Ⅷ", "a\u2028b\x85c\u00a0d", "🙂🙃 !?…", "ab " * 350_000]


@pytest.mark.parametrize("how", ["regex", "space"])
@pytest.mark.parametrize("text", NASTY, ids=range(len(NASTY)))
def test_offsets_hold_for_any_unicode(text, how):
    words, spans = hashing.split_words(text, how)
    assert [text[s:e].lower() for s, e in spans] == words == hashing.words_of(text, how)
    assert all(w and not re.search(r"\s", w) for w in words)
    assert "".join(text[s:e] for s, e in spans) == re.sub(r"\s+", "", text)


def test_md5_golden_values():
    """md5("play") = a34c..., cut by hand into 10-bit chunks: 1010 0011 10 = 654, 11 0100 1100 = 820, ..."""
    digests = hashing.md5_digests(["play", "plays"])
    assert bytes(digests[0]).hex() == "a3b34c0871dc2fd51eec5559b68f709d"
    assert bytes(digests[1]).hex() == "ed4018190d63d27337300381ca661fae"
    chunks = hashing.bits_to_chunks(hashing.md5_bits(["play"]), 10)
    assert chunks.tolist() == [[654, 820, 770, 113, 880, 765, 327, 748, 341, 411, 419, 880, 157]]
    assert hashing.md5_index(["play"], 50_000).tolist() == [15_933]


def test_erratum_printed_digests_are_of_other_words():
    """[HF §3.2] prints these as MD5 of play and plays; they belong to cat and mat."""
    assert bytes(hashing.md5_digests(["cat"])[0]).hex() == "d077f244def8a70e5ea758bd8352fcd8"
    assert bytes(hashing.md5_digests(["mat"])[0]).hex() == "4a258d930b7d3409982d727ddbb4ba88"


def test_md5_index_is_the_big_integer_modulo():
    words = words_like(101) + ["\ud800", ""]
    whole = [int(hashlib.md5(w.encode("utf-8", "surrogatepass")).hexdigest(), 16) for w in words]
    for n in (1, 2, 3, 1_038, 50_260, 65_537, 2**31 - 1, 2**32):
        assert hashing.md5_index(words, n).tolist() == [v % n for v in whole]
    with pytest.raises(InputError):
        hashing.md5_index(words, 0)


def test_md5_more_bits_and_key():
    words = words_like(11)
    assert (hashing.md5_bits(words, 300)[:, :128] == hashing.md5_bits(words)).all()
    second = hashlib.md5(words[0].encode() + bytes([0, 0, 0, 1])).digest()
    assert (np.packbits(hashing.md5_bits(words, 256)[0, 128:]) == list(second)).all()
    keyed = hashing.md5_digests(words, key="secret")
    assert bytes(keyed[3]) == hmac.digest(b"secret", words[3].encode(), "md5")
    assert (keyed != hashing.md5_digests(words)).mean() > 0.9


def test_chunks_by_hand():
    """The last chunk is short and is read as a number of its own length: 001 is 1, not 0010."""
    bits = np.array([[1, 0, 1, 0, 0, 1, 0, 0, 0, 0, 1]], np.uint8)
    assert hashing.bits_to_chunks(bits, 4).tolist() == [[10, 4, 1]]  # the example of [HF §3.4]
    assert hashing.bits_to_chunks(hashing.md5_bits(words_like(53)), 10)[:, -1].max() < 256
    with pytest.raises(InputError):
        hashing.bits_to_chunks(bits, 16)


def grams_of(word):
    """The definition, spelt out."""
    return Counter(word[i:i + n] for n in range(1, 5) for i in range(len(word) - n + 1))


def test_play_has_ten_ngrams():
    assert sum(grams_of("play").values()) == 10
    lsh = NgramLSH.fit({"play": 1})
    assert sorted(lsh.grams) == sorted(["p", "l", "a", "y", "pl", "la", "ay", "pla", "lay", "play"])


def test_fit_counts_by_corpus_frequency():
    """Frequency in the corpus, not in the word list; ties to the shorter, then by code point."""
    words = words_like(67) + ["日本", "naïve", "\ud800x"]
    counts = {w: 1 + 3 * i % 17 for i, w in enumerate(words)}
    frequency = Counter()
    for word, count in counts.items():
        for gram, times in grams_of(word).items():
            frequency[gram] += times * count
    expected = sorted(frequency, key=lambda g: (-frequency[g], len(g), g))
    assert NgramLSH.fit(counts, 113).grams == expected[:113]
    assert NgramLSH.fit(counts, 50_000).grams == expected  # fewer exist: all of them
    assert NgramLSH.fit({}, 7).bits(["a"], 5).tolist() == [[0] * 5]


@pytest.fixture(scope="module")
def lsh():
    words = words_like(400, 3) + ["play", "plays", "played", "xylophone"]
    return NgramLSH.fit(dict.fromkeys(words, 1), 997, seed=5)


def circulant_products(lsh, word, n):
    """x · R with R written out: r^j[f] = eta[(f + j) mod features]. [HF §3.3]"""
    x = np.zeros(lsh.features, np.int64)
    for gram, count in grams_of(word).items():
        if gram in lsh.grams:
            x[lsh.grams.index(gram)] += count
    eta = lsh.eta[:lsh.features].astype(np.int64)
    R = np.stack([np.roll(eta, -j) for j in range(n)], 1)
    return x @ R


def test_lsh_equals_the_explicit_circulant(lsh):
    words = ["play", "plays", "", "ZZZ", "日本", "ee", "tattoo" * 9] + words_like(23, 9)
    bits, index = lsh.bits(words, 131), lsh.index(words, 499)
    for word, row, i in zip(words, bits, index):
        assert (row == (circulant_products(lsh, word, 131) > 0)).all(), word
        assert i == circulant_products(lsh, word, 499).argmax(), word
    assert not bits[3].any() and index[3] == 0  # no known n-gram: all bits 0, index 0


def test_lsh_long_words_do_not_overflow(lsh):
    words = ["e" * 10_007, "et" * 40_009, "e"]
    for word, row, i in zip(words, lsh.bits(words, 16), lsh.index(words, 499)):
        assert (row == (circulant_products(lsh, word, 16) > 0)).all()
        assert i == circulant_products(lsh, word, 499).argmax()


def test_lsh_index_does_not_depend_on_company(lsh):
    """The stack of shared prefixes is an economy, not a rule; words longer than it is deep included."""
    words = words_like(61, 4) + ["e" * n for n in (1, 23, 24, 25, 26, 40)] + ["e" * 30 + "t", "e" * 30 + "ta"]
    assert lsh.index(words, 251).tolist() == [int(lsh.index([w], 251)[0]) for w in words]


def test_lsh_law():
    """E[Hamming] / T = angle / pi. The T bits of one pair share eta, so average over 64 seeds; six sigma of a
    binomial share with 64 · 128 draws, doubled for the correlation that rotations leave."""
    words = ["play", "plays", "xylophone"]
    cosine = 10 / math.sqrt(10 * 14)  # play's 10 n-grams lie in the 14 of plays
    assert math.isclose(cosine, 0.845, abs_tol=5e-4)
    grams = list(grams_of("playsxylophone"))
    drawn = [NgramLSH(grams, 5_003, seed).bits(words, 128) for seed in range(64)]
    share = np.mean([(b[0] != b[1]).mean() for b in drawn])
    expected = math.acos(cosine) / math.pi
    assert abs(expected * 128 - 23) < 0.5
    assert abs(share - expected) < 2 * 6 * math.sqrt(expected * (1 - expected) / (64 * 128))


def test_more_hyperplanes_than_features_is_an_error(lsh):
    for call in (lsh.bits, lsh.index):
        with pytest.raises(InputError, match="raise the features"):
            call(["a"], 998)
    with pytest.raises(InputError):
        NgramLSH([], 70_000)


def test_lsh_in_pieces_and_beyond_32_bits(lsh, monkeypatch):
    """More words than one pass takes; sums that would overflow: eta times a hundred, 50,009 n-grams."""
    words = words_like(4_999)
    for i in (0, 4_095, 4_096, 4_998):
        assert (lsh.bits(words, 16)[i] == lsh.bits([words[i]], 16)[0]).all()
    big = NgramLSH(["e"], 97)
    big.eta = big.eta * 100
    word, x = ["e" * 50_009], big.eta[:97].astype(np.int64)
    assert (big.bits(word, 97)[0] == (x > 0)).all() and big.index(word, 97)[0] == x.argmax()
    counts = {w: 1 + i for i, w in enumerate(words_like(67))}
    whole = NgramLSH.fit(counts).grams
    monkeypatch.setattr(NgramLSH, "PIECE", 7)
    assert NgramLSH.fit(counts).grams == whole


def test_hashes_are_the_same_in_every_process(lsh):
    code = ("import hashing as h, hashlib; l = h.NgramLSH.fit({'play': 3, 'plays': 2, 'naïve': 1}, 997, 5);"
            "d = l.bits(['play', 'nave'], 128).tobytes() + l.index(['plays'], 99).tobytes()"
            " + h.md5_digests(['é']).tobytes();"
            "print(hashlib.sha256(d).hexdigest())")
    seen = {run_script("-c", code, env=os.environ | {"PYTHONHASHSEED": s}).stdout for s in ("0", "1", "77")}
    # the value itself: another machine, another numpy, the same bits
    assert seen == {"4af19a9c3e6ab49b3c7956439a50144215449358e3ffb336061c4b80c786be92\n"}


@pytest.fixture(scope="module")
def bpe():
    return BPE.train(["the cat sat on the mat, the cats sat there"] * 50, size=300)


def test_bpe(bpe):
    pieces, spans = bpe.split("The caterpillar 日本")
    ids = [bpe.tokenizer.token_to_id(p) for p in pieces]
    assert pieces[0] == "Ġthe" and bpe.tokenizer.decode(ids).strip() == "the caterpillar 日本"
    assert spans[0] == (0, 3)
    assert bpe.split_many(["The caterpillar 日本", "\ud800"])[0] == pieces
    assert BPE(bpe.json).split("the mat")[0] == bpe.split("the mat")[0]
    assert len(BPE.train(["the cats sat there"] * 50, size=260).pieces) == 260
    rare = BPE.train(["rare words only once"], size=999)
    assert len(rare.tokenizer.get_vocab()) == 256  # no pair is seen five times


@pytest.mark.parametrize("form,hash", [(f, h) for f in ("index", "chunks", "bits") for h in ("md5", "lsh")])
def test_encoder(form, hash, lsh):
    encoder = Encoder(form, hash, bits=128, chunk=10, rows=499, lsh=lsh if hash == "lsh" else None)
    ids = encoder.ids(["play", "plays", "play"])
    assert ids.tolist() == [FIRST, FIRST + 1, FIRST] and encoder.ids(["new"]).tolist() == [FIRST + 2]
    codes = encoder.codes()
    bits = lsh.bits(["plays"], 128) if hash == "lsh" else hashing.md5_bits(["plays"])
    index = lsh.index(["plays"], 499) if hash == "lsh" else hashing.md5_index(["plays"], 499)
    expected = {"index": index[:, None], "chunks": hashing.bits_to_chunks(bits, 10),
                "bits": np.packbits(bits, axis=1)}[form]
    assert (codes[FIRST + 1] == expected).all() and not codes[:FIRST].any()
    assert codes.shape == (FIRST + 3, {"index": 1, "chunks": 13, "bits": 16}[form])  # 16 bytes: T = 128
    again = Encoder.load(json.loads(json.dumps(encoder.state())))
    again.ids(["play", "plays", "new"])
    assert (again.codes() == codes).all()


@pytest.mark.parametrize("form", ["index", "chunks", "bits"])
def test_encoder_keeps_what_it_was_given(form):
    """Nothing at its default; and the key matters."""
    given = dict(form=form, hash="md5", split="space", bits=24, chunk=7, rows=499, key="k")
    encoder = Encoder(**given)
    assert encoder.state().items() >= given.items() and encoder.split("don't")[0] == ["don't"]
    again, keyless = Encoder.load(encoder.state()), Encoder(**given | dict(key=None))
    for e in (encoder, again, keyless):
        e.ids(words_like(5))
    assert (again.codes() == encoder.codes()).all() and (keyless.codes() != encoder.codes()).any()


def test_encoder_computes_a_code_once(monkeypatch):
    encoder, asked = Encoder("bits"), []
    monkeypatch.setattr(encoder, "hash_words",
                        lambda words: asked.extend(words) or Encoder.hash_words(encoder, words))
    for text in ("a b a", "b c", "c"):
        encoder.ids(encoder.split(text)[0])
        encoder.codes()
    assert [w for w in asked if w] == ["a", "b", "c"]


def test_encoder_with_a_vocabulary_is_the_only_one_with_unknown_words():
    encoder = Encoder("row", vocabulary=["the", "cat"])
    assert encoder.ids(["cat", "dog"]).tolist() == [FIRST + 1, UNK] and encoder.rows == 7
    assert encoder.codes().ravel().tolist() == [PAD, CLS, SEP, UNK, MASK, UNK, 5, 6]  # WORD has no row
    assert (encoder.hash_words(["the", "dog", "cat"]) == [[5], [UNK], [6]]).all()
    with pytest.raises(InputError):
        Encoder("rows")
    with pytest.raises(InputError, match="1 .. 15"):
        Encoder("chunks", chunk=16)


def test_bloom_map_by_hand():
    """Order 0 1 | 2 3 | 4 5 and order 0 2 | 1 4 | 3 5: item 1 has bucket 0 in the first, 1 in the second."""
    made = hashing.BloomMap(6, 2, orders=[[0, 1, 2, 3, 4, 5], [0, 2, 1, 4, 3, 5]])  # nobody shares both
    assert made.digest.tolist() == [[0, 0], [0, 1], [1, 0], [1, 2], [2, 1], [2, 2]]
    assert made.members.tolist() == [[[0, 1], [2, 3], [4, 5]], [[0, 2], [1, 4], [3, 5]]]


def test_items_that_share_all_buckets_trade_places():
    """4 and 3 share bucket 2 of both maps of five buckets of two: one trades with an item of another."""
    order = [0, 1, 2, 5, 3, 4, 6, 7, 8, 9]
    made = hashing.BloomMap(10, 2, orders=[order, [0, 2, 1, 6, 3, 4, 5, 8, 7, 9]])
    assert len(np.unique(made.digest, axis=0)) == 10
    assert made.members[0].tolist() == [[0, 1], [2, 5], [3, 4], [6, 7], [8, 9]]
    moved = [i for i in range(10) if made.digest[i, 1] != [0, 1, 0, 2, 2, 3, 1, 4, 3, 4][i]]
    assert len(moved) >= 2 and {3, 4} & set(moved)
    assert np.bincount(made.digest[:, 1]).tolist() == [2] * 5


@pytest.mark.parametrize("n, alpha, m", [
    (7, 2, 2), (1_000, 7, 2), (997, 13, 3), (2_500, 50, 2), (2_601, 50, 2), (999, 31, 2), (27, 9, 3),
    (1, 1, 1), (1, 5, 2), (10, 1, 1), (50_003, 50, 2)])
def test_bloom_maps_are_balanced_and_no_two_items_are_one(n, alpha, m):
    made = hashing.BloomMap(n, alpha, m, seed=5)
    buckets = -(-n // alpha)
    assert made.digest.dtype == made.members.dtype == np.int32
    assert made.digest.shape == (n, m) and made.members.shape == (m, buckets, alpha)
    full = [alpha] * (buckets - 1) + [n - alpha * (buckets - 1)]
    for j in range(m):
        assert np.bincount(made.digest[:, j]).tolist() == full
        for bucket, row in enumerate(made.members[j]):
            held = row[row >= 0]
            assert (made.digest[held, j] == bucket).all() and (row[len(held):] == -1).all()
        assert sorted(made.members[j][made.members[j] >= 0].tolist()) == list(range(n))
    assert len(np.unique(made.digest, axis=0)) == n


def can_be_told_apart(n, alpha):
    """Gale and Ryser: a 0/1 matrix with these row and column sums exists."""
    buckets = -(-n // alpha)
    sums = [alpha] * (buckets - 1) + [n - alpha * (buckets - 1)]
    return all(sum(sums[:k]) <= sum(min(s, k) for s in sums) for k in range(1, buckets + 1))


def test_bloom_maps_exist_up_to_the_possible_alpha_and_not_beyond():
    """Two maps are a 0/1 matrix, buckets × buckets; whether one exists is a theorem; the code finds it."""
    for n in range(1, 61):
        for alpha in range(1, n + 2):
            if can_be_told_apart(n, alpha):
                made = hashing.BloomMap(n, alpha)
                assert len(np.unique(made.digest, axis=0)) == n
            else:
                with pytest.raises(InputError, match="is too large"):
                    hashing.BloomMap(n, alpha)
    for n, alpha, m in ((5, 2, 1), (9, 4, 2), (100, 11, 2), (0, 1, 2), (5, 0, 2), (5, 2, 0)):
        with pytest.raises(InputError):
            hashing.BloomMap(n, alpha, m)


def test_independent_orders_put_some_pairs_together_twice():
    """[SB footnote 3] is no gift: (alpha - 1)² / 2 pairs expected, whatever N is; six sigma of a Poisson."""
    n, alpha = 60_000, 50
    tokens = [np.argsort(hashing.random_order(n, 3, j)) // alpha for j in range(2)]
    cell = np.sort(tokens[0] * (n // alpha) + tokens[1])
    pairs, expected = (cell[1:] == cell[:-1]).sum(), (alpha - 1) ** 2 / 2
    assert abs(pairs - expected) < 6 * math.sqrt(expected)


def test_hashes_of_a_map_are_independent():
    """Buckets modulo 5 of both maps: 25 cells of 2,000 each, six sigma of a binomial. Other seeds, others."""
    made = hashing.BloomMap(50_000, 20, seed=1)
    cells = np.bincount(made.digest[:, 0] % 5 * 5 + made.digest[:, 1] % 5, minlength=25)
    assert np.abs(cells - 2_000).max() < 6 * math.sqrt(50_000 / 25 * 24 / 25)
    other = hashing.BloomMap(50_000, 20, seed=2)
    share = (other.digest == made.digest).mean()
    assert abs(share - 1 / 2_500) < 6 * math.sqrt(1 / 2_500 / 100_000)


def test_random_order_is_a_permutation_and_the_same_everywhere():
    assert sorted(hashing.random_order(1_001, 7, 1).tolist()) == list(range(1_001))
    assert hashing.random_order(8, 0).tolist() == [6, 0, 3, 1, 4, 2, 7, 5]
    assert hashing.BloomMap(10_007, 13, 2, seed=3).check() == "e785400f"  # after repairs, too


def test_a_map_is_its_seed(tmp_path):
    made = hashing.BloomMap(1_009, 11, 3, seed=4)
    state = made.state()
    assert state["orders"] is None and len(json.dumps(state)) < 120
    assert (hashing.BloomMap.load(state).digest == made.digest).all()
    with pytest.raises(InputError, match="unlike the one"):
        hashing.BloomMap.load(state | dict(seed=5))


def pages_of_two_worlds(pages=300, items=40, seed=0):
    """Pages of even items and pages of odd ones, six each: flat items, sizes."""
    rng = np.random.default_rng(seed)
    rows = [rng.choice(np.arange(i % 2, items, 2), 6, replace=False) for i in range(pages)]
    return np.concatenate(rows), np.full(pages, 6)


def test_page_vectors_are_the_singular_vectors():
    """Beside numpy's full decomposition of the weighted matrix: the same cosines."""
    items, sizes = pages_of_two_worlds()
    X = np.zeros((300, 40))
    X[np.repeat(np.arange(300), sizes), items] = 1
    X /= np.sqrt(sizes[:, None] * np.maximum(X.sum(0), 1))
    u, s, vt = np.linalg.svd(X)
    for width in (2, 40):
        want = (vt[:width] * s[:width, None]).T
        want /= np.linalg.norm(want, axis=1, keepdims=True)
        got = hashing.page_vectors(items, sizes, 41, width)
        assert np.abs(got[:40] @ got[:40].T - want @ want.T).max() < 1e-3
        assert not got[40].any()  # on no page


def test_coherent_maps_keep_alike_items_together_once():
    items, sizes = pages_of_two_worlds()
    made = hashing.coherent_map(items, sizes, 40, 5, width=2)
    assert len(np.unique(made.digest, axis=0)) == 40
    with pytest.MonkeyPatch.context() as patch:  # before anything is repaired: apart where that is possible
        patch.setattr(hashing.BloomMap, "_trade", lambda self: None)
        raw = hashing.coherent_map(items, sizes, 40, 5, width=2).digest
    assert len(np.unique(raw, axis=0)) >= 34
    assert all(np.bincount(column).tolist() == [5] * 8 for column in made.digest.T)
    first = made.members[0]
    assert all(len(set((row % 2).tolist())) == 1 for row in first)  # a bucket is of one world
    random_first = hashing.BloomMap(40, 5).members[0]
    assert not all(len(set((row % 2).tolist())) == 1 for row in random_first)
    one = hashing.coherent_map(items, sizes, 40, 5, coherent=1, width=2)
    assert (one.members[0] == first).all() and (one.members[1] % 2).any(1).sum() > 6
    again = hashing.BloomMap.load(made.state())
    assert (again.digest == made.digest).all() and (again.members == made.members).all()


def test_longest_matches_by_hand():
    """new york city hall: "new york" before "new", and "york city" comes too late."""
    known = {"new york", "york city", "city hall", "a b c"}
    assert hashing.longest_matches("new york city hall".split(), known, 3) == [(0, 2), (2, 4)]
    assert hashing.longest_matches("a b c a b".split(), known, 3) == [(0, 3), (3, 4), (4, 5)]
    assert hashing.longest_matches("a b c".split(), known, 2) == [(0, 1), (1, 2), (2, 3)]
    assert hashing.longest_matches([], known, 3) == []
    text = "Miles  Davis plays, Jazz"
    names, spans = hashing.split_names(text, {"Miles Davis"}, 2)
    assert names == ["Miles Davis", "plays,", "Jazz"]
    assert [text[a:b] for a, b in spans] == ["Miles  Davis", "plays,", "Jazz"]


def test_phrases():
    """Pairs and words by frequency, and pieces for what is left."""
    made = hashing.Phrases.train(["New York is new", "the New York mayor", "in New York"] * 9, 300, 270)
    assert {"new york", "york", "new", "the"} <= made.known and "mayor is" not in made.known
    assert len(made.pieces) <= 300 and len(set(made.pieces)) == len(made.pieces)
    text = "NEW  York mayor qzj"
    words, spans = made.split(text)
    assert words[:2] == ["new york", "mayor"] and [text[a:b] for a, b in spans[:2]] == ["NEW  York", "mayor"]
    assert "".join(words[2:]) == "Ġqzj" and [text[a:b] for a, b in spans[-2:]] == ["z", "j"]
    assert hashing.Phrases(made.json).split_many([text, ""]) == [words, []]
    with pytest.MonkeyPatch.context() as patch:  # little memory: rare pairs are forgotten, common ones not
        patch.setattr(hashing.Phrases, "MOST", 9)
        texts = [f"new york x{i % 20}" for i in range(40)]
        assert hashing.Phrases.train(texts, 300, 270).known == {"new york", "new", "york"}


def test_encoder_of_digests():
    """Ranges of their own: map 0 has rows 0 .. R-1, map 1 rows R .. 2R-1, and each special two rows more."""
    words = words_like(23)
    made = Encoder("digest", split="items", vocabulary=words, bloom=hashing.BloomMap(23, 3))
    codes = made.codes()
    assert made.rows == 2 * 8 + 2 * 5 and codes.shape == (FIRST + 23, 2) and codes.max() == made.rows - 1
    assert (codes[FIRST:] == made.bloom.digest + [0, 8]).all()
    assert codes[:5].flatten().tolist() == list(range(16, 26))
    assert made.ids([words[3], "?"]).tolist() == [FIRST + 3, UNK]
    again = Encoder.load(made.state())
    assert (again.codes() == codes).all() and again.split("a [b]")[0] == ["a", "[b]"]
    assert (made.hash_words(words[4:6]) == codes[FIRST + 4:FIRST + 6]).all()


def test_sketch_hashes_are_disjoint_slices_and_independent():
    """Each from eight bytes of its own; two functions agree with each other no more often than chance."""
    first = hashlib.md5(b"play").digest()
    more = hashlib.md5(b"play" + (1).to_bytes(4, "big")).digest()
    slices = [int.from_bytes(d[i:i + 8], "big") for d in (first, more) for i in (0, 8)]
    assert hashing.sketch_index(["play"], 3, 499).tolist() == [[x % 499 for x in slices[:3]]]
    words, R = words_like(20_000), 23
    index = hashing.sketch_index(words, 5, R)
    for seed in (0, 1):
        assert (hashing.sketch_index(words[:50], 5, R, seed) == index[:50]).all() == (seed == 0)
    for i in range(5):
        for j in range(i):  # the table of two functions: chi-square with R² - 1 degrees of freedom
            table = np.bincount(index[:, i] * R + index[:, j], minlength=R * R)
            chi = ((table - len(words) / R**2) ** 2).sum() / (len(words) / R**2)
            assert abs(chi - (R * R - 1)) < 5 * math.sqrt(2 * (R * R - 1))
    ids = np.arange(20_000)  # the family that does not work: what collides once, collides always
    both = [(ids * prime) % R for prime in (31, 37)]
    assert len(set(zip(*both))) == R
    for bad in (dict(k=0, rows=5), dict(k=1, rows=0)):
        with pytest.raises(InputError, match="wanted"):
            hashing.sketch_index(["a"], **bad)


def test_sketch_map_lists_each_word_once_in_its_bucket():
    words = words_like(301)
    made = hashing.SketchMap(words, 3, 17, seed=4)
    assert (made.digest == hashing.sketch_index(words, 3, 17, 4)).all()
    assert made.members.shape == (3, 17, made.alpha)
    for j in range(3):
        assert sorted(made.members[j][made.members[j] >= 0].tolist()) == list(range(301))
        for bucket, row in enumerate(made.members[j]):
            assert (made.digest[row[row >= 0], j] == bucket).all()
    assert made.alpha == max(np.bincount(column).max() for column in made.digest.T)
    assert hashing.SketchMap([], 3, 17).members.shape == (3, 17, 0)


@pytest.mark.parametrize("form,sketch", [("sketch", (5, 41, 3)), ("weighted", (2, None, 3, 97))])
def test_codes_of_sketches(form, sketch):
    encoder = Encoder(form, rows=53, sketch=sketch)
    encoder.ids(words := words_like(300))
    codes, k = encoder.codes(), sketch[0]
    assert codes.dtype == np.int32 and not codes[:FIRST].any()
    if form == "sketch":
        assert (codes[FIRST:] == hashing.sketch_index(words, 5, 41, 3)).all()
    else:
        assert (codes[FIRST:, :k] == hashing.sketch_index(words, k, 53, 3)).all()
        assert (codes[FIRST:, k] == hashing.sketch_index(words, 3, 97, 3)[:, 2]).all()  # a slice of its own
    again = Encoder.load(json.loads(json.dumps(encoder.state())))
    again.ids(words)
    assert (again.codes() == codes).all() and again.sketch == sketch


# ---------------------------------------------------------------------------------------------------------
# embeddings.py


def test_pool_is_the_weighted_sum_written_out():
    module, codes = embeddings.PoolEmbedding(21, 4, 7), torch.randint(0, 2, (5, 3, 6))  # J = 6, last of 1 bit
    codes[..., :5] = torch.randint(0, 16, (5, 3, 5))
    weight = module.weight.softmax(0)  # (J, d)
    literal = sum(weight[j] * module.codebook[codes[..., j]] for j in range(6))
    agree(module, codes, literal)


def test_add_is_the_sum_of_picked_rows_written_out():
    module, codes = embeddings.AddEmbedding(24, 7), torch.randint(0, 2, (5, 3, 24), dtype=torch.uint8)
    literal = sum(module.codebooks[j, codes[..., j].long()] for j in range(24)) / math.sqrt(24)
    agree(module, codes, literal)


def test_linear_is_a_sum_of_rows():
    module, codes = embeddings.LinearEmbedding(21, 7), torch.randint(0, 2, (5, 3, 21), dtype=torch.uint8)
    agree(module, codes, sum(module.weight[j] * codes[..., j, None] for j in range(21)))


def test_proj_is_the_correlation_written_out():
    module = embeddings.ProjEmbedding(24, 7).double()
    codes = torch.randint(0, 2, (5, 3, 24), dtype=torch.uint8)
    rows = []
    for tau in codes.flatten(0, 1).double():
        a = tau - tau.mean()
        for w in module.weight:
            b = w - w.mean()
            rows.append((a @ b) / (a.norm() * b.norm()))
    agree(module, codes, torch.stack(rows).view(5, 3, 7))
    by_numpy = np.corrcoef(codes[2, 1].numpy(), module.weight[4].detach().numpy())[0, 1]
    assert math.isclose(module(codes)[2, 1, 4].item(), by_numpy, rel_tol=1e-5)


def agree(module, codes, literal):
    """The fast form and the literal one: values and gradients."""
    fast, cotangent = module(codes), torch.randn_like(literal)
    assert fast.shape == literal.shape
    torch.testing.assert_close(fast, literal, rtol=1e-5, atol=1e-6)
    parameters = list(module.parameters())
    torch.testing.assert_close(torch.autograd.grad((fast * cotangent).sum(), parameters),
                               torch.autograd.grad((literal * cotangent).sum(), parameters),
                               rtol=1e-4, atol=1e-6)


def test_proj_of_constant_bits_is_zero_with_finite_gradient():
    module = embeddings.ProjEmbedding(128, 5)
    codes = torch.stack([torch.zeros(128), torch.ones(128)])
    out = module(codes)
    out.sum().backward()
    assert not out.any() and module.weight.grad.isfinite().all()


def test_lookup_and_hash_pick_rows():
    for kind in (embeddings.LookupEmbedding, embeddings.HashEmbedding):
        module = kind(11, 3)
        codes = torch.tensor([[[4], [0]], [[10], [4]]], dtype=torch.int32)
        assert (module(codes) == module.weight[codes.squeeze(-1).long()]).all()


@pytest.mark.parametrize("T", [128, 420, 13])
def test_unpack_bits_undoes_packing(T):
    bits, encoder = hashing.md5_bits(words_like(13), T), Encoder("bits", bits=T)
    packed = torch.from_numpy(encoder.hash_words(words_like(13)).copy()).view(13, 1, -(-T // 8))
    assert (embeddings.unpack_bits(packed, T)[:, 0].numpy() == bits).all()


def test_pool_with_equal_weights_is_blind_to_order():
    """Why W starts random: with equal weights "1 2" and "2 1" are one word."""
    module, codes = embeddings.PoolEmbedding(8, 4, 5), torch.tensor([[1, 2], [2, 1]])
    assert not torch.allclose(*module(codes), atol=1e-7)
    torch.nn.init.zeros_(module.weight)
    assert torch.allclose(*module(codes), atol=1e-7)


def test_spread_at_the_start():
    """Proj: a correlation of T random numbers has std 1/√(T−1) = 0.0887. Add: one row's, for √T² = T rows.
    A normal cut at two standard deviations has 0.8796 of its std."""
    torch.manual_seed(0)
    bits = torch.randint(0, 2, (64, 128))
    count = 64 * 768
    proj = embeddings.ProjEmbedding(128, 768)(bits).std().item()
    assert abs(proj - 1 / math.sqrt(127)) < 6 * proj / math.sqrt(2 * 768)  # 768 independent columns at least
    add = embeddings.AddEmbedding(128, 768)(bits).std().item()
    assert abs(add - 0.02 * 0.8796) < 6 * add / math.sqrt(2 * 768)
    weight = embeddings.init_(torch.empty(count))
    assert weight.abs().max() <= 0.04
    assert abs(weight.std().item() - 0.02 * 0.8796) < 6 * 0.02 / math.sqrt(2 * count)


def test_bloom_embedding_keeps_an_items_rows_apart():
    table = embeddings.BloomEmbedding(11, 3)
    codes = torch.tensor([[[4, 9], [0, 10]]], dtype=torch.int32)
    assert (table(codes) == table.weight[[4, 9, 0, 10]]).all() and table(codes).shape == (1, 4, 3)


def test_sketch_by_hand():
    """The example of SketchEmbedding's docstring, and what one row far away does to median and mean. [CM]"""
    for agg, expected in (("median", [2.0, 7.0]), ("mean", [301.0, 2.0])):
        sketch = embeddings.SketchEmbedding(3, 2, 2, agg)
        sketch.weight.data[:] = torch.tensor([[0, 0], [1, 7], [2, -9], [0, 0], [0, 0], [900, 8]])
        assert sketch(torch.tensor([[1, 0, 1]])).tolist() == [expected]
    rows = torch.randn(5, 7)
    for j in range(5):
        moved = rows.clone()
        moved[j] += 1000
        before, after = rows.sort(0).values, embeddings.median(list(moved))
        assert ((after == before[2]) | (after == before[3])).all()  # at most to its neighbour
        torch.testing.assert_close(moved.mean(0) - rows.mean(0), torch.full((7,), 200.0), rtol=1e-4, atol=0)
    assert embeddings.SketchEmbedding(3, 2, 2)(torch.zeros(1, 0, 3)).shape == (1, 0, 2)
    for k in (2, 4, 257):
        with pytest.raises(ValueError, match="odd"):
            embeddings.SketchEmbedding(k, 5, 3)
        with pytest.raises(ConfigError, match="odd"):
            Config(emb="mean", hashes=k)
    with pytest.raises(ValueError, match="mean or median"):
        embeddings.SketchEmbedding(3, 5, 3, "max")


@pytest.mark.parametrize("k", [1, 3, 5, 7, 9, 11])
def test_median_is_torchs_with_its_gradient(k, monkeypatch):
    """Also of ties, some words at a time, and of the same row many times."""
    x = list(torch.randint(0, 6, (k, 500)).float())
    assert (embeddings.median(x) == torch.stack(x).median(0).values).all()
    monkeypatch.setattr(embeddings, "AT_ONCE", 24)  # three words
    sketch = embeddings.SketchEmbedding(k, 6, 8).double()
    codes = torch.randint(0, 6, (4, 5, k))
    out = sketch(codes.short())
    rows = sketch.weight[codes + 6 * torch.arange(k)]  # (4, 5, k, 8)
    assert (out == rows.median(2).values).all()
    up = torch.randn_like(out)
    [ours], [exact] = (torch.autograd.grad(y, sketch.weight, up) for y in (out, rows.median(2).values))
    torch.testing.assert_close(ours, exact, rtol=1e-12, atol=1e-12)
    # one row a coordinate: what comes down is what went up
    torch.testing.assert_close(ours.sum(0), up.flatten(0, 1).sum(0), rtol=1e-9, atol=1e-12)
    equal = torch.ones(k, 3, requires_grad=True)  # of equals the first
    embeddings.RowMedian.apply(equal, torch.arange(k)[None]).sum().backward()
    assert equal.grad[0].eq(1).all() and not equal.grad[1:].any()


def test_median_and_mean_of_five_normals_have_their_spread():
    """0.536 σ and 0.447 σ; the median of the lower middle of four is biased, that of five is not. [CM]"""
    x = torch.randn(5, 200_000)
    spread = embeddings.median(list(x)).std().item(), x.mean(0).std().item()
    assert abs(spread[0] - 0.5356) < 0.005 and abs(spread[1] - 0.4472) < 0.005
    assert abs(embeddings.median(list(x)).mean()) < 0.01 and abs(x[:4].median(0).values.mean() + 0.297) < 0.01


def test_weighted_embedding_by_hand():
    table = embeddings.WeightedEmbedding(2, 4, 3, 2)
    table.weight.data[:] = torch.tensor([[1, 2], [3, 4], [5, 6], [7, 8]])
    table.importance.data[:] = torch.tensor([[0, 0], [2, -1], [0, 0]])
    assert table(torch.tensor([[[3, 0, 1]]])).tolist() == [[[13.0, 14.0]]]  # 2·(7, 8) - (1, 2): a sum
    table = embeddings.WeightedEmbedding(2, 4, 3, 5, append=True)
    out = table(torch.tensor([3, 0, 1]))
    assert out.shape == (5,) and (out[3:] == table.importance[1]).all()
    assert sum(p.numel() for p in table.parameters()) == 4 * 3 + 3 * 2


# ---------------------------------------------------------------------------------------------------------
# attention.py


@pytest.mark.parametrize("dtype,tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 0.02)])
@pytest.mark.parametrize("padded", [False, True])
def test_full_attention_equals_the_formula(dtype, tolerance, padded):
    """bfloat16 on a CPU takes its own path; the tolerance is its 8 bits of mantissa on weights up to 1."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 5, 3, 7, 11)  # B 5, H 3, L 7, e 11
    key_mask = torch.arange(7) < torch.tensor([7, 1, 3, 0, 6])[:, None] if padded else None
    expected = attention.full_attention_reference(q, k, v, key_mask=key_mask)
    inputs = [t.to(dtype).requires_grad_() for t in (q, k, v)]
    out = attention.full_attention(*inputs, key_mask=key_mask)
    assert out.dtype == dtype and (out.float() - expected).abs().max() < tolerance
    out.float().square().sum().backward()
    assert all(t.grad.isfinite().all() for t in inputs)
    if padded:
        assert not out[3].any()  # nothing to attend to


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_dropout_keeps_the_mean(dtype):
    torch.manual_seed(0)
    q, k, v = torch.zeros(1, 1, 500, 8), torch.zeros(1, 1, 500, 8), torch.ones(1, 1, 500, 8)
    out = attention.full_attention(*(t.to(dtype) for t in (q, k, v)), dropout=0.25).float()[..., 0]
    sigma = math.sqrt(0.25 / 0.75 / 500)  # of a row: 500 weights of 1/500, each 0 or 4/3
    assert 0.85 * sigma < out.std() < 1.15 * sigma and abs(out.mean() - 1) < 6 * sigma / math.sqrt(500) + 4e-3


def hashed(B=2, H=3, L=37, e=5, n=2, buckets=7, seed=0, dtype=torch.float32, scale=1.0):
    """Random q, k, v with gradients, and few random buckets, so that some hold many rows and some none."""
    g = torch.Generator().manual_seed(seed)
    q, k, v = (scale * torch.randn(B, H, L, e, generator=g, dtype=dtype) for _ in range(3))
    hq, hk = torch.randint(buckets, (2, B, H, n, L), generator=g)
    return [t.requires_grad_() for t in (q, k, v / scale)], (hq, hk)


def with_gradients(function, inputs, *args, **mode):
    """out: (output, gradients) of a sum that no symmetry can hide"""
    out = function(*inputs, *args, **mode)
    cotangent = torch.linspace(-1, 2, out.numel(), dtype=out.dtype).view_as(out)
    return out, torch.autograd.grad(out, inputs, cotangent)


def assert_exact(inputs, args, impl="blocks", **mode):
    expected, gradients = with_gradients(attention.lsh_attention_reference, inputs, *args, **mode)
    out, found = with_gradients(attention.lsh_attention, inputs, *args, **mode, impl=impl)
    assert out.shape == expected.shape and (out - expected).abs().max() <= 1e-5
    for name, a, b in zip("qkv", found, gradients):
        assert (a - b).norm() <= 1e-4 * b.norm() + 1e-12, name


MODES = [dict(fill=fill, pairs=pairs) for fill in ("zero", "mask") for pairs in ("upper", "all")]
padding = torch.arange(37) < torch.tensor([37, 20])[:, None]  # (B, L)


def test_simhash_by_hand():
    """Planes are the axes: x lies above those where it is positive; the sums of the docstring, mod 16."""
    planes, coef = torch.eye(3).view(1, 1, 3, 3), torch.tensor([[[9, 12, 3]]])
    x = torch.tensor([[1.0, 1, -1], [1, -1, 1], [-1, -1, -1], [0, 0, 0]]).view(1, 1, 4, 3)
    assert attention.simhash(x, planes, coef, 16).tolist() == [[[[5, 12, 0, 0]]]]


def test_simhash_shapes_dtype_and_autocast():
    """Each head has its own planes, each function its own buckets; bfloat16 around it changes nothing."""
    g = torch.Generator().manual_seed(0)
    planes, coef = attention.draw_planes(3, 4, 6, 5, 97, g)
    assert planes.shape == (3, 4, 6, 5) and coef.shape == (3, 4, 6) and 0 <= coef.min() and coef.max() < 97
    x = torch.randn(2, 3, 1_001, 5, generator=g, requires_grad=True)
    h = attention.simhash(x, planes, coef, 97)
    assert h.shape == (2, 3, 4, 1_001) and h.dtype == torch.int64 and not h.requires_grad
    above = (x[1, 2, 7] * planes[2, 3]).sum(-1) > 0
    assert h[1, 2, 3, 7] == coef[2, 3][above].sum() % 97
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(attention.simhash(x, planes, coef, 97), h)


@pytest.mark.parametrize("bands", [1, 2, 8])
@pytest.mark.parametrize("buckets", [2, 64])
@pytest.mark.parametrize("functions", [1, 3])
def test_collision_law(bands, buckets, functions):
    """[BL §2.1] 1 - (1 - p - (1 - p)/m)^n within three standard deviations, each angle 40,000 fresh draws.

    C_i are uniform, so two different sides get sums that agree by chance with probability exactly 1/m.
    """
    g = torch.Generator().manual_seed(bands * 100 + buckets + functions)
    draws = 40_000
    for angle in (0.0, 0.3, math.pi / 2, 3.0):
        planes, coef = attention.draw_planes(draws, functions, bands, 2, buckets, g)
        pair = torch.tensor([[1.0, 0.0], [math.cos(angle), math.sin(angle)]]).expand(1, draws, 2, 2)
        h = attention.simhash(pair, planes, coef, buckets)  # (1, draws, n, 2)
        share = (h[..., 0] == h[..., 1]).any(2).float().mean().item()
        law = attention.collision_probability(angle, bands, buckets, functions)
        assert abs(share - law) <= 3 * math.sqrt(law * (1 - law) / draws) + 1e-9, angle


@pytest.mark.parametrize("mode", MODES, ids=lambda m: "-".join(m.values()))
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("key_mask", [None, padding], ids=["", "padded"])
def test_lsh_attention_is_exact(mode, n, key_mask):
    """From the colliding pairs alone, the dense formula; with three functions many pairs meet twice."""
    assert_exact(*hashed(n=n), key_mask=key_mask, **mode)
    assert_exact(*hashed(n=n), key_mask=key_mask, **mode, impl="dense")


@pytest.mark.parametrize("mode", MODES, ids=lambda m: "-".join(m.values()))
@pytest.mark.parametrize("L", [1, 2, 7, 63, 513])
def test_lsh_attention_at_any_length(mode, L):
    assert_exact(*hashed(B=1, H=2, L=L, n=1, buckets=max(L // 5, 1)), **mode)


@pytest.mark.parametrize("mode", MODES, ids=lambda m: "-".join(m.values()))
@pytest.mark.parametrize("piece,keep", [(1, 0), (5, 100), (40, 0)])
def test_lsh_attention_in_pieces(monkeypatch, mode, piece, keep):
    """Buckets cut between queries, weights kept or computed again: the pieces add up to the whole."""
    monkeypatch.setattr(attention, "PIECE", piece)
    monkeypatch.setattr(attention, "KEEP", keep)
    assert_exact(*hashed(buckets=3), key_mask=padding, **mode)


@pytest.mark.parametrize("pairs", ["upper", "all"])
def test_lsh_attention_where_nothing_collides(pairs):
    """fill="zero": every key weighs the same, the mean of v. fill="mask": each position sees itself alone."""
    (q, k, v), (hq, hk) = hashed()
    hq, hk = torch.zeros_like(hq), torch.ones_like(hk)
    for impl in ("blocks", "dense"):
        out = attention.lsh_attention(q, k, v, hq, hk, pairs=pairs, impl=impl)
        assert (out - v.mean(2, keepdim=True)).abs().max() < 1e-6
        out = attention.lsh_attention(q, k, v, hq, hk, pairs=pairs, fill="mask", impl=impl)
        assert (out - v).abs().max() < 1e-6
    assert_exact([q, k, v], (hq, hk), pairs=pairs, key_mask=padding)


@pytest.mark.parametrize("impl", ["blocks", "dense"])
def test_lsh_attention_of_one_bucket_is_full_attention(impl):
    """The switch: with m = 1 all pairs collide, and nothing is left of the hashing."""
    (q, k, v), (hq, hk) = hashed(buckets=1)
    out = attention.lsh_attention(q, k, v, hq, hk, pairs="all", key_mask=padding, impl=impl)
    expected = attention.full_attention(q, k, v, key_mask=padding)
    assert (out - expected).abs().max() < 1e-5
    other = attention.lsh_attention(q, k, v, *hashed(buckets=7)[1], pairs="all", key_mask=padding, impl=impl)
    assert (other - expected).abs().max() > 0.1


@pytest.mark.parametrize("mode", MODES, ids=lambda m: "-".join(m.values()))
@pytest.mark.parametrize("scale", [-1.0, 1.0])
@pytest.mark.parametrize("buckets", [1, 4])
def test_lsh_attention_of_extreme_scores(mode, scale, buckets):
    """Scores beyond 150 or -150 in all of a row, against float64: exp(150) is infinite in float32, and where
    all keys collide and all scores are low, Σ (e^s - 1) + L is 0. Scores are off by 150 · 2^-24 at best."""
    (q, k, v), h = hashed(L=29, n=1, buckets=buckets)
    q, k = (q.detach().abs() * 4 + 12).requires_grad_(), (scale * (k.detach().abs() + 6)).requires_grad_()
    double = [t.double() for t in (q, k, v)]
    exact, gradients = with_gradients(attention.lsh_attention_reference, double, *h, **mode)
    out, found = with_gradients(attention.lsh_attention, [q, k, v], *h, **mode, impl="blocks")
    plain, plainly = with_gradients(attention.lsh_attention_reference, [q, k, v], *h, **mode)
    scores = (q @ k.transpose(-2, -1)).abs() / math.sqrt(5)
    assert 150 < scores.min() and scores.max() < 2_000
    assert (out - exact).abs().max() <= 2 * (plain - exact).abs().max() + 1e-5
    for a, b, c in zip(found, gradients, plainly):
        assert (a - b).norm() <= 2 * (c - b).norm() + 1e-4 * b.norm() + 1e-12


def test_lsh_attention_without_a_key():
    """A text of padding alone comes out 0, and sends no gradient."""
    inputs, buckets = hashed()
    key_mask = padding.clone()
    key_mask[1] = False
    for mode in MODES:
        out, gradients = with_gradients(attention.lsh_attention, inputs, *buckets, **mode, key_mask=key_mask,
                                        impl="blocks")
        assert not out[1].any() and not any(g[1].any() for g in gradients)
        for impl in ("blocks", "dense"):
            assert_exact(inputs, buckets, impl, **mode, key_mask=key_mask)


@pytest.mark.parametrize("mode", MODES, ids=lambda m: "-".join(m.values()))
def test_what_is_not_finite_stays_where_it_is(mode):
    """A NaN in one text is none of another's: padded slots repeat rows of their own bucket."""
    (q, k, v), h = hashed(B=3, H=2, L=13, n=1, buckets=5)
    for t in (q, k, v):
        t.data[2, 1, 12] = torch.nan  # the last row of all
    out, gradients = with_gradients(attention.lsh_attention, [q, k, v], *h, **mode, impl="blocks")
    assert out[2, 1].isnan().any() and not any(t[:2].isnan().any() for t in (out, *gradients))
    for impl in ("blocks", "dense"):  # and nothing hides it
        out = attention.lsh_attention(q, k, hashed(B=3, H=2, L=13)[0][2], *h, **mode, impl=impl)
        assert out[2, 1, 12].isnan().all()
    assert attention.full_attention_reference(q, k, v.nan_to_num(0))[2, 1, 12].isnan().all()
    assert attention.lsh_attention_reference(q, k, v.nan_to_num(0), *h, **mode)[2, 1, 12].isnan().all()


@pytest.mark.parametrize("mode", MODES, ids=lambda m: "-".join(m.values()))
def test_lsh_attention_gradient_is_a_difference_quotient(mode):
    inputs, buckets = hashed(B=1, H=2, L=9, e=3, buckets=4, dtype=torch.float64)
    mode = mode | dict(key_mask=padding[1:, 13:22], impl="blocks")
    assert torch.autograd.gradcheck(lambda *t: attention.lsh_attention(*t, *buckets, **mode), inputs)


@pytest.mark.parametrize("mode", MODES, ids=lambda m: "-".join(m.values()))
def test_lsh_attention_in_bfloat16(mode):
    """At most twice the error of the plain formula in bfloat16, forward and back; also under autocast."""
    inputs, buckets = hashed(L=64, e=16, buckets=9)
    low = [t.detach().bfloat16().requires_grad_() for t in inputs]
    reference, high = attention.lsh_attention_reference, [t.float() for t in low]
    exact, gradients = with_gradients(reference, high, *buckets, **mode)
    plain, plainly = with_gradients(reference, low, *buckets, **mode)
    with torch.autocast("cpu", torch.bfloat16):
        out, found = with_gradients(attention.lsh_attention, low, *buckets, **mode, impl="blocks")
    assert out.dtype == torch.bfloat16
    for a, b, c in zip((out, *found), (exact, *gradients), (plain, *plainly)):
        assert a.dtype == torch.bfloat16 and (a - b).norm() <= 2 * (c - b).norm()
    single = attention.lsh_attention(*inputs, *buckets, **mode, impl="blocks")
    with torch.autocast("cpu", torch.bfloat16):  # float32 in, float32 sums
        assert torch.equal(attention.lsh_attention(*inputs, *buckets, **mode, impl="blocks"), single)


def test_plan_by_hand():
    """The docstring's example: one bucket with three queries and one key; a bucket without keys is gone."""
    plan = attention.Plan(torch.tensor([[5, 7, 5, 5]]), torch.tensor([[2, 5, 2, 3]]))
    assert (plan.shapes, plan.to_q.tolist(), plan.to_k.tolist()) == ([(1, 4, 1)], [0, 2, 3, 4], [1])
    assert plan.from_q.tolist() == [0, 2, 3, 3] and plan.from_k.tolist() == [1] and plan.padded == 4
    [(s, t, G, allowed)] = plan.pieces()
    assert (s, t, G) == (slice(0, 4), slice(0, 1), 1) and allowed.tolist() == [[[True]]]


@pytest.mark.parametrize("pairs", ["upper", "all"])
def test_plans_hold_each_colliding_pair_once(pairs):
    """Three functions, a union: whatever two of them agree on belongs to the first."""
    _, (hq, hk) = hashed(n=3, buckets=4)
    collide = (hq.unsqueeze(-1) == hk.unsqueeze(-2)).any(2).flatten(0, 1)  # (R, L, L)
    keep = padding.repeat_interleave(3, 0)
    if pairs == "upper":
        collide = collide.triu() | collide.triu(1).transpose(1, 2)
    met = torch.zeros(6, 37, 37, dtype=torch.long)
    hq, hk = (h.permute(2, 0, 1, 3).flatten(1, 2) for h in (hq, hk))
    for plan in attention.make_plans(hq, hk, "zero", pairs, keep):
        for s, t, G, allowed in plan.pieces():
            i, j = plan.to_q[s].view(G, -1, 1), plan.to_k[t].view(G, 1, -1)
            i, j = (x.expand(G, i.shape[1], j.shape[2])[(allowed & (i < plan.N)).expand(G, i.shape[1], -1)]
                    for x in (i, j))
            met.view(-1).index_add_(0, i * 37 + j % 37, torch.ones_like(i))
    assert torch.equal(met, (collide & keep.unsqueeze(1)).long())


def test_choose_takes_what_costs_less():
    """Short rows and full buckets are dense, long rows in many buckets are not; auto says so and does so."""
    def which(L, buckets, **mode):
        return attention.choose(*torch.randint(buckets, (2, 1, 2, 1, L)), **mode)[0]

    assert which(64, 1000) == which(2048, 200, impl="dense") == "dense" and which(2048, 200) == "blocks"
    assert which(256, 1) == "dense" and which(attention.DENSE + 1, 1) == "blocks"  # no (L, L) matrix there
    assert which(64, 10, impl="blocks") == "blocks"
    (q, k, v), (hq, hk) = hashed(L=1024, n=1, buckets=200)
    assert torch.equal(attention.lsh_attention(q, k, v, hq, hk, pairs="all"),
                       attention.lsh_attention(q, k, v, hq, hk, pairs="all", impl="blocks"))
    with pytest.raises(ValueError, match="wanted one of zero, mask"):
        attention.lsh_attention(q, k, v, hq, hk, fill="none")
    with pytest.raises(ValueError, match="wanted .B, H, n, L."):
        attention.lsh_attention(q, k, v, hq[:, :1], hk)
    with pytest.raises(ValueError, match="not be below 0"):
        attention.lsh_attention(q, k, v, hq - 1, hk, impl="blocks")


def test_collision_share():
    _, (hq, hk) = hashed(n=2, buckets=4, L=400)
    assert abs(attention.collision_share(hq, hk) - (1 - 0.75 ** 2)) < 6 * math.sqrt(0.25 / 400)


def test_erratum_intersection():
    """[BL §1] "common buckets across all hash functions"; its matrix M and Algorithm 1 need one of them."""
    hq, hk = torch.tensor([0, 1]).view(1, 1, 2, 1), torch.tensor([0, 2]).view(1, 1, 2, 1)
    assert attention.collision_share(hq, hk) == 1


def test_erratum_collision_law():
    """[BL §2.1] (1 - θ/π)^r + 1/m is no probability: for equal vectors it is more than 1."""
    assert (1 - 0 / math.pi) ** 2 + 1 / 64 > 1 == attention.collision_probability(0.0, 2, 64)


# ---------------------------------------------------------------------------------------------------------
# model.py


def meta_count(**changes):
    with torch.device("meta"):
        config = Config(**model.PRESETS["hashformer"] | dict(head="classify") | changes)
        return model.count_parameters(Model(config))


def test_parameter_counts_of_the_paper():
    """[HF Table 2, App. B] as integers, d = 768, a binary task."""
    counts = {name: meta_count(emb=name) for name in ("emb", "pool", "add", "proj")}
    assert {n: c["embedding"] for n, c in counts.items()} == {
        "emb": 50_260 * 768, "pool": (13 + 1024) * 768, "add": 2 * 128 * 768, "proj": 128 * 768}
    assert [c["embedding"] for c in counts.values()] == [38_599_680, 796_416, 196_608, 98_304]
    assert all(c["total"] - c["embedding"] - c["specials"] == 86_043_650 for c in counts.values())
    assert {n: c["total"] for n, c in counts.items()} == {
        "emb": 124_647_170, "pool": 86_844_674, "add": 86_244_866, "proj": 86_146_562}
    lookup = meta_count(emb="lookup", rows=50_265)
    assert (lookup["embedding"], lookup["specials"], lookup["total"]) == (38_603_520, 0, 124_647_170)
    assert meta_count(emb="emb", rows=1_033)["total"] == 86_840_834  # 1,038 rows, five of them the specials'
    assert all(sum(c[k] for k in ("embedding", "specials", "positions", "encoder", "head")) == c["total"]
               for c in counts.values())


def test_printed_counts_are_the_formulas_and_the_word_row():
    """[HF Table 2] prints 797.2K, 197.4K, 99.1K: one d-vector more than the formulas of [HF App. B] give."""
    printed = {n: meta_count(emb=n)["embedding"] + 768 for n in ("pool", "add", "proj")}
    assert printed == {"pool": 797_184, "add": 197_376, "proj": 99_072}
    assert [round(v / 1e3, 1) for v in printed.values()] == [797.2, 197.4, 99.1]
    assert 1_038 * 768 == printed["pool"]  # "1K" rows of emb: chosen to equal pool


def test_proformer_counts():
    """[HF Table 2]: 322.6K to embed words = 420 · 768; the 15.1M in all hold no positions and no specials."""
    with torch.device("meta"):
        counts = model.count_parameters(Model(Config(**model.PRESETS["proformer"], head="classify")))
    assert counts["embedding"] == 420 * 768 == 322_560
    assert counts["embedding"] + counts["encoder"] + counts["head"] == 15_090_434
    assert round(counts["total"] / 1e6, 1) == 15.5


def test_erratum_poep():
    """[HF Table 2] prints 1.0 % for pool; 797,184 of 86.8 M are 0.9 %."""
    assert round(100 * 797_184 / 86_844_674, 1) == 0.9
    assert round(100 * meta_count(emb="emb")["poep"], 1) == 31.0


@pytest.mark.parametrize("attn", ["lsh", "full"])
def test_bert_lsh_has_as_many_parameters_as_its_twin(attn):
    """[BL §2.2] 32,000 pieces, two types, tied MLM head: 4.6 M, where it says 4.7 M; planes count nothing."""
    with torch.device("meta"):
        net = Model(Config(**model.PRESETS["bert-lsh"] | dict(attn=attn)))
    assert model.count_parameters(net)["total"] == 4_607_360


def tiny_model(**changes):
    torch.manual_seed(0)
    c = Config(**dict(layers=2, width=12, heads=3, ffn=20, length=9, rows=31, bits=16, chunk=5, buckets=7,
                      weights=11) | changes)
    net = Model(c).eval()
    form, rng = model.FORM[c.emb], np.random.default_rng(0)
    top = {"row": c.rows, "index": c.rows, "chunks": 2, "bits": 256, "digest": c.rows, "sketch": c.buckets,
           "weighted": min(c.rows, c.weights)}[form]
    columns = {"row": 1, "index": 1, "chunks": 4, "bits": 2, "digest": 2, "sketch": 5, "weighted": 6}
    codes = rng.integers(0, top, (FIRST + 25, columns[form]))
    net.set_codes(torch.from_numpy(codes.astype(np.uint8 if form == "bits" else np.int32)))
    return net


@pytest.mark.parametrize("emb", model.FORM)
def test_embed_adds_the_word_row_and_never_hashes_specials(emb):
    net = tiny_model(emb=emb)
    ids = torch.tensor([[CLS, FIRST, FIRST + 3, SEP, PAD, MASK]])
    out, codes = net.embed(ids), net.codes[ids]
    own = net.embedding(embeddings.unpack_bits(codes, 16) if model.FORM[emb] == "bits" else codes)
    special = torch.tensor([[True, False, False, True, True, True]])
    if emb in ("lookup", "bloom"):
        assert (out == own).all()
        return
    expected = own + (net.specials.weight[WORD] if emb != "emb" else 0)
    torch.testing.assert_close(out[~special], expected[~special])
    assert (out[special] == net.specials.weight[ids[special]]).all()
    before = out[special].clone()
    net.codes[:FIRST] = net.codes[:FIRST].flip(0)  # whatever the codes of the specials say
    assert (net.embed(ids)[special] == before).all()


@pytest.mark.parametrize("emb", model.FORM)
@pytest.mark.parametrize("head", ["sr", "classify", "span"])
def test_padding_changes_nothing(emb, head):
    net = tiny_model(emb=emb, head=head)
    for parameter in net.parameters():
        parameter.data += torch.randn_like(parameter)  # at the start attention is too weak to tell
    ids = torch.randint(FIRST, FIRST + 25, (3, 7))
    padded = F.pad(ids, (0, 2), value=PAD)
    out = net(padded, key_mask=padded != PAD)
    torch.testing.assert_close(out if head == "classify" else out[:, :7], net(ids), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(net(padded) if head == "classify" else net(padded)[:, :7], net(ids), atol=1e-5)


def test_masked_lm_scores_only_where_asked_and_is_tied():
    net = tiny_model(emb="lookup", head="mlm")
    ids, at = torch.randint(FIRST, FIRST + 25, (3, 7)), torch.tensor([2, 11, 20])
    x = net.encode(ids).flatten(0, 1)[at]
    hidden = net.head.norm(F.gelu(net.head.transform(x)))
    torch.testing.assert_close(net(ids, at=at), hidden @ net.embedding.weight.T + net.head.bias)


def test_layer_is_post_norm_written_out():
    """[BERT §3] LN(x + Attention(x)), then LN(x + FFN(x))."""
    net = tiny_model()
    layer, x = net.layers[0], torch.randn(2, 5, 12)
    q, k, v = layer.qkv(x).chunk(3, -1)
    heads = [attention.full_attention_reference(*(t[:, None, :, 4 * h:4 * h + 4] for t in (q, k, v)))[:, 0]
             for h in range(3)]
    y = F.layer_norm(x + layer.out(torch.cat(heads, -1)), (12,), layer.norm1.weight, layer.norm1.bias)
    y = F.layer_norm(y + layer.down(F.gelu(layer.up(y))), (12,), layer.norm2.weight, layer.norm2.bias)
    torch.testing.assert_close(layer(x), y, rtol=1e-4, atol=1e-5)


def test_encode_written_out():
    """Word, place and type, norm, layers; the two spare rows of the position table are never used."""
    net = tiny_model(spare_positions=2, types=2)
    for parameter in net.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter)
    ids = torch.randint(FIRST, FIRST + 25, (3, 7))
    x = net.norm(net.embed(ids) + net.positions.weight[2:9] + net.types.weight[0])
    for layer in net.layers:
        x = layer(x)
    torch.testing.assert_close(net.encode(ids), x)
    net = tiny_model(head="classify")
    torch.testing.assert_close(net(ids), net.head(net.encode(ids)[:, 0]))


def test_dropout_is_everywhere_in_training_and_nowhere_else(monkeypatch):
    net, ids, seen = tiny_model(dropout=0.5), torch.randint(FIRST, FIRST + 25, (3, 7)), []
    monkeypatch.setattr(model, "full_attention", lambda q, k, v, key_mask, dropout: seen.append(dropout) or v)
    assert torch.equal(net(ids), net(ids)) and set(seen) == {0.0}
    net.train()
    seen.clear()
    x = net.encode(ids).detach()
    assert set(seen) == {0.5} and not torch.equal(net.encode(ids), net.encode(ids))
    layer = net.layers[0]
    for keep in (layer.out, layer.down):  # each residual branch alone
        other = layer.down if keep is layer.out else layer.out
        before = other.weight.data.clone(), other.bias.data.clone()
        other.weight.data.zero_(), other.bias.data.zero_()
        assert not torch.equal(layer(x), layer(x))
        other.weight.data, other.bias.data = before
    monkeypatch.setattr(net, "encode", lambda ids, key_mask=None: x)
    assert not torch.equal(net(ids), net(ids))  # the head's own


def test_where_the_weights_start():
    """Sinusoids by hand: rates 1 and 1/100 at width 4. Matrices of the encoder: 0.02 · √(768/192) = 0.04."""
    expected = [math.sin(1), math.cos(1), math.sin(0.01), math.cos(0.01)]
    torch.testing.assert_close(model.sinusoids(3, 4)[1], torch.tensor(expected))
    net = tiny_model()
    torch.testing.assert_close(net.positions.weight.data, 2.25 * 15 ** -0.5 * model.sinusoids(9, 12))
    net = tiny_model(width=192, ffn=64)
    qkv = net.layers[0].qkv
    assert abs(qkv.weight.std().item() - 0.04 * 0.8796) < 2e-3 and not qkv.bias.any()
    assert abs(net.head.weight.std().item() - 0.02 * 0.8796) < 2e-3


def test_no_decay_on_biases_and_norms():
    net = tiny_model()
    groups = model.parameter_groups(net, 0.01)
    plain = {id(p) for p in groups[1]["params"]}
    assert groups[0]["weight_decay"] == 0.01 and groups[1]["weight_decay"] == 0.0
    for name, parameter in net.named_parameters():
        assert (id(parameter) in plain) == ("norm" in name or name.endswith("bias")), name
    assert sum(len(g["params"]) for g in groups) == len(list(net.parameters()))


def test_config_refuses_what_cannot_be():
    for bad, says in ((dict(width=10, heads=3), "multiple"), (dict(emb="emb", head="mlm"), "possible are"),
                      (dict(emb="medium"), "there are"), (dict(buckets=0), "at least 1"),
                      (dict(emb="mean", hashes=0), "at least 1"),
                      (dict(emb="lookup", head="hash-mlm"), "possible are"), (dict(head="x"), "there are")):
        with pytest.raises(ConfigError, match=says):
            Config(**bad)
    with pytest.raises(ConfigError, match="10 positions"):
        tiny_model().encode(torch.zeros(1, 10, dtype=torch.long))


def test_count_median_parameters():
    """[CM] with d 512: five blocks of 500 rows, against a row for each of 30,522 words and its parameters."""
    def counts(**changes):
        with torch.device("meta"):
            return model.count_parameters(Model(Config(**model.PRESETS["median"] | changes)))

    assert counts()["embedding"] == counts(emb="mean")["embedding"] == 1_280_000
    table = counts(emb="lookup", head="mlm")
    assert table["embedding"] == 15_627_264 and counts(emb="proj")["embedding"] == 512 * 128
    transform = 512 * 512 + 512 + 2 * 512  # and its norm; then a bias a row, and the rows if not tied
    assert table["head"] == transform + 30_522
    assert counts()["head"] == counts(emb="proj")["head"] == transform + 5 * 500 * 513


@pytest.mark.parametrize("emb", ["lookup", "bloom", "mean", "median"])
def test_tied_or_not_the_same_is_predicted(emb):
    """With the embedding's rows copied to its own table a head says what it says by them."""
    head = "mlm" if emb == "lookup" else "hash-mlm"
    about = dict(emb=emb, head=head, hashes=2 if emb == "bloom" else 5)
    nets = [tiny_model(tied=tied, **about) for tied in (True, False)]
    weights = nets[0].state_dict()
    assert set(nets[1].state_dict()) - set(weights) == {"head.table"}
    nets[1].load_state_dict(weights | {"head.table": weights["embedding.weight"]})
    ids = torch.randint(FIRST, FIRST + 25, (2, 4))
    a, b = (net(ids, at=torch.tensor([1, 6])) for net in nets)
    torch.testing.assert_close(a, b)
    assert Config(emb=emb, head=head).tied == (emb in ("lookup", "bloom"))
    assert Config(emb=emb, head="classify", tied=True).tied is None


def test_what_nothing_reads_is_refused(small):
    refused(pretrain.main, small("--key", "secret"), says="--key is of MD5")  # the default is LSH
    refused(pretrain.main, small("--emb", "lookup", "--key", "secret"), says="--key is of MD5")


@pytest.mark.parametrize("emb", ["proj", "lookup"])
def test_one_bit_is_a_size(emb):
    net = Model(Config(emb=emb, bits=1, rows=9, layers=0, width=8, heads=1))
    assert net.positions.weight.isfinite().all()


def test_what_cannot_be_tied_is_refused(small):
    refused(pretrain.main, small("--tied"), says="--tied is of the objectives that hide words")
    refused(pretrain.main, small("--objective", "hash-mlm", "--tied"), says="has no rows that could predict")


@pytest.mark.parametrize("emb", sorted(set(model.FORM) - {"lookup", "bloom"}))
def test_each_hash_is_predicted_among_the_rows_of_its_block(emb):
    """[CM] One vector, k softmaxes, each of sum 1, by a table of the head's own."""
    net = tiny_model(emb=emb, head="hash-mlm", hashes=5)
    net.head.transform.bias.data += torch.randn(12)
    ids = torch.randint(FIRST, FIRST + 25, (2, 4))
    logits = net(ids, at=torch.tensor([1, 6]))
    assert logits.shape == (2, 5, 7)
    x = net.head.norm(F.gelu(net.head.transform(net.encode(ids).flatten(0, 1)[[1, 6]])))
    for j in range(5):
        block = slice(7 * j, 7 * j + 7)
        torch.testing.assert_close(logits[:, j], x @ net.head.table[block].T + net.head.bias[block])
    made = types.SimpleNamespace(buckets=7, m=5)
    torch.testing.assert_close(model.hash_logp(logits, made).exp().sum(-1), torch.ones(2, 5))


def test_embedding_each_word_of_a_batch_once_changes_nothing():
    net = tiny_model(emb="median")
    ids = torch.randint(0, FIRST + 25, (3, 9))
    assert (net.embed(ids) == net.vectors(ids)).all()
    once, all_of = (torch.autograd.grad(f(ids).sum(), net.embedding.weight) for f in (net.embed, net.vectors))
    torch.testing.assert_close(once, all_of)


def test_checkpoint_round_trip(tmp_path):
    net, path = tiny_model(), str(tmp_path / "ckpt.pt")
    state = Encoder("bits", bits=16).state()
    model.save_checkpoint(path, net, state, step=3)
    back = model.load_checkpoint(str(tmp_path))
    again = model.load_model(back)
    assert back["step"] == 3 and back["encoder"] == state and back["config"] == net.config
    assert all((a == b).all() for a, b in zip(net.state_dict().values(), again.state_dict().values()))
    assert not again.training and "codes" not in net.state_dict() and os.listdir(tmp_path) == ["ckpt.pt"]


def test_broken_checkpoints_are_refused(tmp_path):
    path = tmp_path / "ckpt.pt"
    model.save_checkpoint(str(path), tiny_model(), {})
    whole = path.read_bytes()
    for content, says in ((whole[:len(whole) // 2], "not a whole checkpoint"), (b"", "not a whole"),
                          (b"hello", "not a whole")):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=says):
            model.load_checkpoint(str(path))
    torch.save({"format": 99}, path)
    with pytest.raises(ConfigError, match="format 99"):
        model.load_checkpoint(str(path))
    torch.save({"format": model.FORMAT, "config": asdict(Config()) | {"new": 1}}, path)
    with pytest.raises(ConfigError, match="does not know"):
        model.load_checkpoint(str(path))
    with pytest.raises(ConfigError, match="no checkpoint at"):
        model.load_checkpoint(str(tmp_path / "nowhere"))


def test_a_flipped_bit_is_never_read(tmp_path):
    """Anywhere in the file: it is refused, or what was saved comes back. torch.load alone is deceived."""
    path, rng, refused_, deceived = tmp_path / "ckpt.pt", random.Random(0), 0, 0
    model.save_checkpoint(str(path), tiny_model(), {}, words=["a"])
    whole, same = path.read_bytes(), repr(model.load_checkpoint(str(path)))
    for _ in range(300):
        bad = bytearray(whole)
        bad[rng.randrange(len(bad))] ^= 1 << rng.randrange(8)
        path.write_bytes(bad)
        try:
            assert repr(model.load_checkpoint(str(path))) == same
        except ConfigError:
            refused_ += 1
            with contextlib.suppress(Exception):
                torch.load(path)
                deceived += 1
    assert refused_ > 100 and deceived > 50


GONE = object()
BADS = (None, True, -1, 0, 1, 10**12, 1.5, "x", b"x", [], {}, [None], {"x": 1}, torch.zeros(2), GONE)


def leaves(tree, path=()):
    """in: nested dicts and lists; out: iterator of (path, value)"""
    pairs = tree.items() if isinstance(tree, dict) else enumerate(tree[:3]) if isinstance(tree, list) else ()
    for key, value in pairs:
        yield (*path, key), value
        yield from leaves(value, (*path, key))


@pytest.mark.parametrize("name", ["detect", "fill", "complete", "classify", "answer", "classify_phrases"])
def test_a_hostile_checkpoint_is_an_error(untrained, tmp_path, name):
    """Each value it holds replaced by others, also monstrous ones: it works or is refused."""
    reader = untrained[name]
    good = dict(format=model.FORMAT, config=asdict(reader.config), model=reader.model.state_dict(),
                encoder=reader.encoder.state(), words=reader.words[:3], task=reader.task)
    said, rng = Counter(), random.Random(0)
    for place, _ in [((key,), value) for key, value in good.items()] + list(leaves(good)):
        for bad in rng.sample(BADS, len(BADS) if LONG else 2):
            part = content = copy.deepcopy(good)
            for key in place[:-1]:
                part = part[key]
            part[place[-1]] = bad
            if bad is GONE:
                del part[place[-1]]
            torch.save(content, tmp_path / "ckpt.pt")
            try:
                reader = infer.Reader(str(tmp_path))
                text = "the cat" if name == "detect" else "the [MASK] cat"
                infer.look(reader, [text] * (1 + (name == "answer")), 2)
                said["fine"] += 1
            except BAD:
                said["refused"] += 1
    assert said["refused"] > 50 and said["fine"] > 3


@pytest.mark.parametrize("head, labels, task, says", [
    ("span", 2, dict(labels=None, pair=False, stride=5, longest=9, null=True), "no question"),
    ("classify", 2, dict(labels=None, pair=False, label="score", scale=[0.0, 1.0]), "not the labels"),
    ("classify", 1, dict(labels=None, pair=False, label=None, scale=[0.0, 1.0]), "not the labels"),
    ("sr", 2, dict(pair=True), "takes 1 text, got 2")])
def test_a_task_that_is_not_the_models_is_refused(tmp_path, head, labels, task, says):
    encoder = Encoder("index", rows=99)
    shape = dict(emb="emb", rows=99, layers=0, width=8, heads=1, length=64)
    net = Model(Config(**shape, head=head, labels=labels))
    model.save_checkpoint(str(tmp_path / "ckpt.pt"), net, encoder.state(), words=["a"], task=task)
    refused(infer.main, ["--ckpt", str(tmp_path), "a", "b"], says=says)


@pytest.mark.parametrize("device", ["meta", "cuda:99", "nowhere"])
def test_a_device_that_is_not_there_is_refused(small, device):
    refused(pretrain.main, [*small(), "--device", device], says=f"--device {device}: there is no such device"
            if device != "cuda:99" or torch.cuda.is_available() else "sees no CUDA device")


def test_sizes_that_are_looked_at_first_take_no_memory():
    with torch.device("meta"):
        Model(Config(emb="emb", rows=2**31, layers=1, width=8, heads=1, ffn=8, attn="lsh", lsh_bands=2**31))


def test_parts_of_other_checkpoints_are_refused(untrained, tmp_path):
    """What fits in size but not in kind; tensors that are one number; sizes that only the config has."""
    def content(name, **changes):
        reader = untrained[name]
        state, config = reader.encoder.state(), asdict(reader.config)
        return dict(format=model.FORMAT, model=reader.model.state_dict(), words=[], task=reader.task,
                    config=config | changes.pop("config", {}), encoder=state | changes)

    swollen = content("detect")
    swollen["model"] = {k: torch.zeros(()).expand(v.shape) for k, v in swollen["model"].items()}
    mixed = content("detect")
    mixed["encoder"] = untrained["fill"].encoder.state()
    for bad, says in ((swollen, "many times"), (mixed, "wants form bits"),
                      (content("detect", bits=121), "wants bits"),
                      (content("classify", chunk=9), "wants chunk"),
                      (content("complete", sketch=(5, 31)), "wanted k, R, seed"),
                      (content("complete", sketch=(5, 32, 0)), "wants sketch"),
                      (content("complete", config=dict(buckets=2**31, width=2**15)), "do not fit"),
                      (content("classify", config=dict(chunk=2**31)), "at most 15"),
                      (content("detect", config=dict(attn="lsh", lsh_bands=2**31)), "do not fit"),
                      (content("detect", config=dict(length=66, spare_positions=-2)), "at least 0"),
                      (content("detect", hash="x"), "unknown hash"),
                      (content("fill", vocabulary=list(range(300))), "other things than words")):
        torch.save(bad, tmp_path / "ckpt.pt")
        with pytest.raises(BAD, match=says) as error:
            infer.Reader(str(tmp_path))
        assert "\n" not in str(error.value)
    net = Model(Config(emb="weighted", hashes=2, rows=9, weights=99, width=8, heads=1, layers=0, length=9))
    net.set_codes(torch.tensor([[8, 8, 98]]))
    with pytest.raises(ConfigError, match="2 less than 9 and 1 less than 99"):
        net.set_codes(torch.tensor([[8, 8, 98], [9, 8, 98]]))


class Evil:
    """Unpickled, it would run a command."""

    def __reduce__(self):
        return os.system, ("echo owned",)


def test_a_checkpoint_cannot_run_code(tmp_path, capfd):
    torch.save({"format": model.FORMAT, "config": Evil()}, tmp_path / "ckpt.pt")
    with pytest.raises(ConfigError, match="not a whole"):
        model.load_checkpoint(str(tmp_path))
    assert "owned" not in capfd.readouterr().out


def test_a_failed_save_leaves_the_old_checkpoint(tmp_path, monkeypatch):
    path = str(tmp_path / "ckpt.pt")
    model.save_checkpoint(path, tiny_model(), {}, step=1)

    def full(content, file):
        file.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(ConfigError, match="No space left.*untouched"):
        model.save_checkpoint(path, tiny_model(), {}, step=2)
    assert model.load_checkpoint(path)["step"] == 1 and os.listdir(tmp_path) == ["ckpt.pt"]


def test_numbers_shared_with_hashing():
    assert (model.WORD, model.FIRST) == (hashing.WORD, hashing.FIRST)
    assert set(model.FORM.values()) == set(hashing.FORMS)


LSH = dict(attn="lsh", lsh_bands=3, lsh_buckets=5, lsh_hashes=2)


@pytest.mark.parametrize("fill", ["zero", "mask"])
@pytest.mark.parametrize("pairs", ["upper", "all"])
def test_lsh_layer_is_the_reference_between_its_projections(fill, pairs):
    """The switch: other planes say something else. A twin with full attention has the same weights."""
    net, twin = tiny_model(**LSH, lsh_fill=fill, lsh_pairs=pairs), tiny_model()
    x, key_mask = torch.randn(3, 7, 12), torch.arange(7) < torch.tensor([7, 4, 1])[:, None]
    layer, other = net.layers[1], twin.layers[1]
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), twin.parameters()))
    assert model.count_parameters(net) == model.count_parameters(twin)
    q, k, v = layer.project(x)
    hq, hk = (attention.simhash(t, layer.planes, layer.coef, 5) for t in (q, k))
    assert layer.planes.shape == (3, 2, 3, 4)  # H, n, r, e
    a = attention.lsh_attention_reference(q, k, v, hq, hk, fill=fill, pairs=pairs, key_mask=key_mask)
    y = layer.norm1(x + layer.out(a.transpose(1, 2).flatten(2)))
    expected = layer.norm2(y + layer.down(F.gelu(layer.up(y))))
    out = layer(x, key_mask)
    assert (out - expected).abs().max() < 1e-6 and (out - other(x, key_mask)).abs().max() > 1e-4
    net.redraw(1)
    assert not torch.equal(layer(x, key_mask), out)


def test_planes_come_from_the_seed_and_travel_with_the_model(tmp_path):
    """Each layer and head has its own, a seed draws them again, and a checkpoint brings them along."""
    same, other = tiny_model(**LSH), tiny_model(**LSH)
    assert torch.equal(same.layers[0].planes, other.layers[0].planes)
    torch.manual_seed(1)
    assert not torch.equal(same.layers[0].planes, Model(same.config).layers[0].planes)
    assert not torch.equal(same.layers[0].planes, same.layers[1].planes)
    assert not torch.equal(same.layers[0].planes[0], same.layers[0].planes[1])
    other.redraw(3)
    assert not torch.equal(same.layers[0].planes, other.layers[0].planes)
    assert not torch.equal(same.layers[0].coef, other.layers[0].coef)
    same.redraw(3)
    assert torch.equal(same.layers[1].planes, other.layers[1].planes)
    model.save_checkpoint(str(tmp_path / "ckpt.pt"), other, {})
    loaded = model.load_model(model.load_checkpoint(str(tmp_path)))
    for a, b in zip(loaded.layers, other.layers):
        assert torch.equal(a.planes, b.planes) and torch.equal(a.coef, b.coef)


def test_collisions_say_what_is_computed_how():
    """One bucket: all pairs of each layer collide, and nine positions are dense."""
    net = tiny_model(**LSH | dict(lsh_buckets=1))
    assert net.collisions(torch.randint(FIRST, FIRST + 25, (2, 9))) == [(1.0, "dense")] * 2
    shares = [share for share, _ in tiny_model(**LSH).collisions(torch.randint(FIRST, FIRST + 25, (2, 9)))]
    assert all(0.1 < share < 1 for share in shares)


@pytest.mark.parametrize("changes,says", [
    (dict(attn="half"), "full, lsh"), (dict(lsh_fill="one"), "zero, mask"),
    (dict(lsh_pairs="lower"), "upper, all"), (dict(lsh_hashes=0), "at least 1"),
    (dict(lsh_buckets=2**40), "at most 2"), (dict(lsh_redraw=True), "attn lsh")])
def test_unknown_attention_is_refused(changes, says):
    with pytest.raises(ConfigError, match=says):
        Config(**changes)


def bloom_model(n=53, alpha=5, m=2, **changes):
    """A small model over n items, its weights stirred, and the map."""
    torch.manual_seed(0)
    encoder = Encoder("digest", split="items", vocabulary=words_like(n), bloom=hashing.BloomMap(n, alpha, m))
    c = Config(**dict(emb="bloom", rows=encoder.rows, hashes=m, head="hash-mlm", order=False, act="relu",
                      layers=2, width=12, heads=3, ffn=20, length=9) | changes)
    net = Model(c).eval()
    for parameter in net.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter)
    net.set_codes(torch.from_numpy(encoder.codes()), encoder.bloom)
    return net, encoder


def test_a_set_has_no_order():
    """Permuting items permutes what comes out, with their m positions; two masks come out alike; and with
    positions neither holds."""
    for order, attn in ((False, "full"), (False, "lsh"), (True, "full")):
        net, _ = bloom_model(order=order, attn=attn, lsh_pairs="all")
        ids = torch.tensor([[FIRST + 3, MASK, FIRST + 41, FIRST + 7, MASK]])
        turn = torch.tensor([3, 0, 4, 2, 1])
        out = net.encode(ids).unflatten(1, (5, 2))
        turned = net.encode(ids[:, turn]).unflatten(1, (5, 2))
        assert torch.allclose(out[:, turn], turned, atol=1e-5) is not order
        assert torch.allclose(out[:, 1], out[:, 4], atol=1e-5) is not order
        assert not torch.allclose(out[:, 1, 0], out[:, 1, 1], atol=1e-3)  # [MASK_1] is not [MASK_2]
    with pytest.raises(ConfigError, match="a set has no order"):
        bloom_model(attn="lsh", lsh_pairs="upper")


def test_filling_up_a_set_changes_nothing():
    net, _ = bloom_model()
    ids = torch.tensor([[FIRST + 3, MASK, FIRST + 41]])
    at = torch.tensor([1])
    filled = F.pad(ids, (0, 4), value=PAD)
    torch.testing.assert_close(net(filled, at=at), net(ids, at=at), rtol=1e-4, atol=1e-5)
    both = torch.cat([F.pad(ids, (0, 1)), torch.tensor([[FIRST, FIRST + 1, MASK, FIRST + 2]])])
    torch.testing.assert_close(net(both, at=at), net(ids, at=at), rtol=1e-4, atol=1e-5)


def test_an_items_positions_share_its_place():
    """In text item i stands at place i, with all its m positions."""
    net, _ = bloom_model(order=True)
    ids = torch.tensor([[CLS, FIRST + 3, FIRST + 41]])
    rows = net.codes[ids].flatten(1)
    places = net.positions.weight[:3].repeat_interleave(2, 0)
    expected = net.norm(net.embedding.weight[rows] + places + net.types.weight[0])
    torch.testing.assert_close(net.placed(ids), expected)


@pytest.mark.parametrize("head", ["classify", "span", "sr"])
def test_other_heads_see_an_item_as_the_mean_of_its_positions(head):
    net, _ = bloom_model(head=head, order=True, pool="mean")
    ids = torch.randint(FIRST, FIRST + 53, (3, 7))
    x = net.encode(ids).unflatten(1, (7, 2)).mean(2)
    expected = net.head(x.mean(1)) if head == "classify" else net.head(x)
    torch.testing.assert_close(net(ids), expected)
    padded = F.pad(ids, (0, 2), value=PAD)
    out = net(padded, key_mask=padded != PAD)
    torch.testing.assert_close(out if head == "classify" else out[:, :7], net(ids), rtol=1e-4, atol=1e-5)


def test_hashes_are_predicted_by_their_own_positions_from_the_tied_table():
    net, _ = bloom_model()
    ids, at = torch.randint(FIRST, FIRST + 53, (2, 7)), torch.tensor([2, 9])
    x = net.encode(ids).unflatten(1, (7, 2)).flatten(0, 1)[at]  # (2, m, d)
    hidden = net.head.norm(F.gelu(net.head.transform(x)))
    expected = hidden @ net.embedding.weight.T + net.head.bias
    torch.testing.assert_close(net(ids, at=at), expected)
    rows = torch.tensor([5, 0, 17])
    torch.testing.assert_close(net(ids, at=at, rows=rows), expected[..., rows])


def test_ranked_logits_are_float32():
    """In bfloat16 hundreds of items tie; training may have them so, an evaluation may not."""
    net, _ = bloom_model()
    ids, at = torch.randint(FIRST, FIRST + 53, (2, 7)), torch.tensor([2, 9])
    with torch.autocast("cpu", torch.bfloat16):
        assert net(ids, at=at).dtype == torch.float32
        hidden = net.head.norm(F.gelu(net.head.transform(net.encode(ids).view(14, 2, 12)[at]))).float()
        assert net.train()(ids, at=at).dtype == torch.bfloat16
    with torch.autocast("cpu", torch.bfloat16):
        out = net.eval()(ids, at=at)
    torch.testing.assert_close(out, hidden @ net.embedding.weight.T + net.head.bias, rtol=1e-6, atol=1e-6)


def test_relu_is_the_papers_and_gelu_the_others():
    net, _ = bloom_model(layers=1)
    layer, x = net.layers[0], torch.randn(1, 4, 12)
    y = layer.norm1(x + layer.out(attention.full_attention(*layer.project(x)).transpose(1, 2).flatten(2)))
    torch.testing.assert_close(layer(x), layer.norm2(y + layer.down(layer.up(y).clamp(min=0))))


def test_superbloom_parameter_counts():
    """[SB Tables 1, 3, 4] in units of 2^20 and 2^30; four do not follow from their own numbers."""
    rows = {row["name"].split(": ")[1]: row for row in bench.bench_sizes(None)}
    wrong = {"superbloom", "superbloom-d384l1", "hash40-h512", "hash20-h1024"}
    assert {name for name, row in rows.items() if row["shown"] != row["printed"]} == wrong
    for name, (items, alpha, d, _, ffn, layers, text) in {
            name.split(": ")[1]: about for name, *about, _ in bench.SIZES}.items():
        v = items if alpha == 1 else 2 * -(-items // alpha)
        formula = (v * (d + 1) + layers * (4 * d * d + 2 * d * ffn + 9 * d + ffn) + 2 * d + 2 * d
                   + (d * d + d) + (d * d + 3 * d) + 512 * d * text)
        assert rows[name]["paper"] == formula, name


def test_erratum_table_of_superbloom():
    """[SB Table 1] 229M needs a table of 200,000 rows; 2N/50 is 211,276."""
    assert 2 * -(-5_281_889 // 50) == 211_276
    per_row = 768 + 1
    [row] = [row for row in bench.bench_sizes(None) if row["name"] == "Table 1: superbloom"]
    assert round((row["paper"] - (211_276 - 200_000) * per_row) / 2**20) == 229


def test_beam_search_by_hand():
    """Map 0: a b | c d; map 1: a c | b d. Map 0 gives 0.6, 0.4, map 1 0.3, 0.7.

    a 0.6 · 0.3 = 0.18   b 0.6 · 0.7 = 0.42   c 0.4 · 0.3 = 0.12   d 0.4 · 0.7 = 0.28
    One bucket each: {a, b} and {b, d}: a, b, d are scored, c is not. Best b = 0.42, the thresholds 0.6 · 0.7:
    b is certain to be first. The second, d = 0.28 < 0.42, is not.
    """
    made = hashing.BloomMap(4, 2, orders=[[0, 1, 2, 3], [0, 2, 1, 3]])
    logp = torch.tensor([[[0.6, 0.4], [0.3, 0.7]]]).log()
    ids, scores, certified, scored = infer.beam_search(logp, made, k=1, beam=1)
    assert ids.tolist() == [[1]] and certified.tolist() == [True] and scored.tolist() == [3]
    torch.testing.assert_close(scores.exp(), torch.tensor([[0.42]]))
    ids, scores, certified, scored = infer.beam_search(logp, made, k=2, beam=1)
    assert ids.tolist() == [[1, 3]] and certified.tolist() == [False] and scored.tolist() == [3]
    ids, scores, certified, scored = infer.beam_search(logp, made, k=4, beam=1, rounds=None)
    assert ids.tolist() == [[1, 3, 0, 2]] and certified.tolist() == [True] and scored.tolist() == [4]
    torch.testing.assert_close(scores.exp(), torch.tensor([[0.42, 0.28, 0.18, 0.12]]))


def test_beam_search_is_exhaustive_wherever_it_is_certified():
    """Thousands of random cases: sizes, ties, -inf, one to three hashes, every score; the oracle in numpy."""
    rng, seen, certain, wrong = np.random.default_rng(0), 0, 0, 0
    for case in range(700):
        n, m = int(rng.integers(1, 300)), int(rng.integers(1, 4))
        alpha = 1 if m == 1 else int(rng.integers(1, max(2, 0.9 * n ** (1 - 1 / m))))
        made = hashing.BloomMap(n, alpha, m, seed=case)
        P, k, beam = (int(rng.integers(1, top)) for top in (5, 13, 9))
        logits = rng.standard_normal((P, m, made.buckets)) * rng.integers(1, 6)
        logits = logits.round() if case % 3 == 0 else logits  # ties
        logp = torch.from_numpy(logits).log_softmax(-1)
        if case % 7 == 0:  # buckets of probability 0
            logp[torch.rand(logp.shape) < rng.choice([0.1, 0.9])] = -torch.inf
        parts = np.stack([logp[:, j].numpy()[:, made.digest[:, j]] for j in range(m)])  # (m, P, N)
        for score, every in (("sum", parts.sum(0)), ("min", parts.min(0)), ("max", parts.max(0)),
                             (lambda x: 2 * x[0] + x[-1].exp(), 2 * parts[0] + np.exp(parts[-1]))):
            every = every.copy()
            best = -np.sort(-every, axis=1)[:, :k]
            _, oracle = infer.exhaustive(logp, made, k, score)
            np.testing.assert_allclose(oracle.numpy(), best)
            if case % 4 == 0:  # and some items may not be answers
                left_out = torch.from_numpy(rng.integers(-1, n, (P, 3)))
                for row, some in zip(every, left_out.numpy()):
                    row[some[some >= 0]] = -np.inf
                best = -np.sort(-every, axis=1)[:, :k]
            else:
                left_out = None
            for rounds in (1, 2, None):
                found = infer.beam_search(logp, made, k, beam, rounds, score, left_out)
                ids, scores, certified, scored = found
                assert ids.shape == scores.shape == (P, min(k, n)) and (rounds or certified.all())
                for row in range(P):
                    found = ids[row][ids[row] >= 0].numpy()
                    assert len(set(found)) == len(found) <= scored[row] <= n
                    np.testing.assert_allclose(scores[row][:len(found)].numpy(), every[row, found])
                    seen, certain = seen + 1, certain + bool(certified[row])
                    exact = np.allclose(scores[row].numpy(), best[row])
                    assert exact or not certified[row], (case, score, rounds)
                    wrong += not exact
    assert seen > 10_000 and certain > 0.5 * seen and wrong > 100  # and without a certificate it may be wrong


def test_beam_search_on_long_rows_and_what_it_scores():
    """Rows long enough for the search by blocks; items scored are those of B buckets a map, each once."""
    made = hashing.BloomMap(60_000, 4)
    logp = torch.randn(3, 2, made.buckets).log_softmax(-1)
    values, places = model._best(logp, 5)
    torch.testing.assert_close(values, logp.topk(5).values, rtol=0, atol=0)
    assert (logp.gather(2, places) == values).all()
    ids, scores, _, scored = infer.beam_search(logp, made, k=7, beam=5)
    for row in range(3):
        reached = {i for j in range(2) for i in made.members[j][places[row, j]].flatten().tolist()}
        assert scored[row] == len(reached) and set(ids[row].tolist()) <= reached
    sure = infer.beam_search(logp, made, k=7, beam=5, rounds=None)
    torch.testing.assert_close(sure[1], infer.exhaustive(logp, made, 7)[1])
    assert (sure[3] < 60_000).all() and sure[2].all()


def test_specials_and_padding_are_never_found():
    """However likely the specials' rows and the last, short bucket: only items come back."""
    net, encoder = bloom_model(n=53, alpha=5)
    logits = torch.randn(4, 2, encoder.rows)
    logits[..., -10:] += 30  # [PAD_1] .. [MASK_2]
    logits[:, 0, 10] += 9  # the last bucket has 3 items of 5
    logp = model.hash_logp(logits, encoder.bloom)
    assert logp.shape == (4, 2, 11)
    every = logits.log_softmax(-1)
    assert (logp[:, 0] == every[:, 0, :11]).all() and (logp[:, 1] == every[:, 1, 11:22]).all()
    ids, _, _, _ = infer.beam_search(logp, encoder.bloom, k=53, rounds=None)
    assert all(sorted(row) == list(range(53)) for row in ids.tolist())
    ids, _, _, scored = infer.beam_search(logp, encoder.bloom, k=20, beam=1)
    assert (ids >= -1).all() and (scored <= 8).all() and ((ids >= 0).sum(1) == scored).all()


# ---------------------------------------------------------------------------------------------------------
# pretrain.py: corpora


def folder_of(data, tmp_path, **options):
    split, cache = options.pop("split", "regex"), str(tmp_path / "cache")
    return pretrain.prepare(str(data), split, cache, quiet=True, **options)


def test_prepare_by_hand(tmp_path):
    """Words get ids in order of appearance from FIRST = 6 on; each document is closed by SEP = 2."""
    (tmp_path / "a.txt").write_text("The cat.\n\nthe Dog the\n")
    corpus = pretrain.Corpus(folder_of(tmp_path / "a.txt", tmp_path))
    assert corpus.words() == ["the", "cat", ".", "dog"]
    assert corpus.ids.tolist() == [6, 7, 8, SEP, 6, 9, 6, SEP]
    assert corpus.counts.tolist() == [0, 0, 2, 0, 0, 0, 3, 1, 1, 1]
    assert np.load(Path(corpus.folder) / "offsets.npy").tolist() == [0, 4]
    assert corpus.frequent(2).tolist() == [0, 1]
    expected = dict(documents=2, words=6, distinct=4, characters=19, replaced=0, dtype="uint16")
    assert corpus.meta.items() >= expected.items()


def test_prepare_reads_every_kind_of_file(tmp_path):
    texts = ["one fish", "two fish", "naïve 日本"]
    folder = tmp_path / "all"
    folder.mkdir()
    (folder / "a.txt").write_text("\n".join(texts), encoding="utf-8")
    with gzip.open(folder / "b.jsonl.gz", "wt", encoding="utf-8") as file:
        file.writelines(json.dumps({"id": "x", "text": t}) + "\n" for t in texts)
    with open(folder / "c.csv", "w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([["n", "text"]] + [[i, t] for i, t in enumerate(texts)])
    import datasets

    datasets.Dataset.from_dict({"text": texts}).to_parquet(str(folder / "d.parquet"))
    (folder / "notes.bin").write_bytes(b"\0\1")
    for path in sorted(folder.iterdir())[:4]:
        corpus = pretrain.Corpus(folder_of(path, tmp_path))
        assert corpus.words() == ["one", "fish", "two", "naïve", "日本"], path
    (folder / "e.jsonl").write_text(json.dumps({"body": "one fish", "year": 1}), encoding="utf-8")
    assert pretrain.Corpus(folder_of(folder, tmp_path)).meta["words"] == 4 * 6 + 2
    both = pretrain.Corpus(folder_of(f"{folder}/a.txt+{folder}/c.csv", tmp_path))
    assert both.meta["documents"] == 6 and both.meta["distinct"] == 5


def test_what_ends_a_preparation_ends_it(tmp_path):
    """With workers and many tasks left; the pool must not wait for what feeds it."""
    (tmp_path / "x.txt").write_text("a b")
    done = run_script("-c", (
        "import pretrain; pretrain.cores = lambda: 2\n"
        "pretrain.tasks_of = lambda *a: ((('texts', ['a b']), ('texts', [7]))[i == 3] for i in range(500))\n"
        f"pretrain.prepare({str(tmp_path / 'x.txt')!r}, 'regex', {str(tmp_path)!r}, quiet=True)"))
    assert done.returncode and "AttributeError" in done.stderr


def test_files_are_those_that_are_named(tmp_path):
    """Brackets are no pattern."""
    for folder in ("runs[1]", "runs1"):
        (tmp_path / folder).mkdir()
    for name in ("a[1].jsonl", "a1.jsonl", "runs[1]/x.jsonl", "runs1/x.jsonl"):
        (tmp_path / name).write_text(json.dumps(dict(text="right" if "[" in name else "wrong")))
    for name in ("a[1].jsonl", "runs[1]"):
        assert list(pretrain.tasks_of(str(tmp_path / name))) == [("texts", ["right"])]


def test_cells_of_a_table_are_text(tmp_path):
    """001 stays 001, NA and null are names; a text that the first row lacks is no reason for another."""
    (tmp_path / "pairs.csv").write_text("page,item\n1,001\n1,NA\n2,null\n2,5\n1,\n")
    assert list(pretrain.tasks_of(str(tmp_path / "pairs.csv"), True)) == [
        ("texts", [["001", "NA", ""], ["null", "5"]])]
    (tmp_path / "numbers.csv").write_text("text\n12\n13\n")
    assert list(pretrain.tasks_of(str(tmp_path / "numbers.csv"))) == [("texts", ["12", "13"])]
    (tmp_path / "gap.jsonl").write_text('{"text": null, "url": "u"}\n{"text": "the cat", "url": "u"}\n')
    assert list(pretrain.tasks_of(str(tmp_path / "gap.jsonl"))) == [("texts", ["the cat"])]


def test_prepare_survives_nasty_files(tmp_path):
    """Not UTF-8: decoded with replacement and counted. A line of megabytes, NULs, no last newline: text."""
    (tmp_path / "a.txt").write_bytes(b"caf\xe9 ok\n" + b"word " * 700_000 + b"\na\x00b")
    corpus = pretrain.Corpus(folder_of(tmp_path / "a.txt", tmp_path))
    assert corpus.meta["replaced"] == 1 and corpus.meta["words"] == 3 + 700_000 + 3
    assert {"caf", "\ufffd", "ok", "word", "a", "\x00", "b"} == set(corpus.words())


def test_prepare_does_not_depend_on_the_cores(tmp_path, monkeypatch):
    rng = random.Random(0)
    lines = [" ".join(rng.choices(words_like(999), k=50)) for _ in range(9_000)]
    (tmp_path / "a.txt").write_text("\n".join(lines))
    one, many = str(tmp_path / "one"), str(tmp_path / "many")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})
    pretrain._prepare(one, str(tmp_path / "a.txt"), "regex", 0, True)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2})
    pretrain._prepare(many, str(tmp_path / "a.txt"), "regex", 0, True)
    assert os.path.getsize(tmp_path / "a.txt") > 2_000_000  # more than one task
    for name in os.listdir(one):
        assert Path(one, name).read_bytes() == Path(many, name).read_bytes(), name


def test_many_words_need_wider_ids(tmp_path):
    (tmp_path / "a.txt").write_text(" ".join(f"w{i}" for i in range(70_000)))
    corpus = pretrain.Corpus(folder_of(tmp_path / "a.txt", tmp_path))
    assert corpus.ids.dtype == np.uint32 and corpus.ids[69_999] == FIRST + 69_999


def test_python_corpus_is_parsed_and_never_run(tmp_path):
    path = tmp_path / "module.py"
    path.write_text('"""About the module."""\nraise SystemExit("it ran")\n\n'
                    'def f(a):\n    """What f does."""\n    b = a.size + len(a)\n    return b\n')
    (tmp_path / "broken.py").write_text("def (:")
    paths = [str(path), str(tmp_path / "broken.py"), str(tmp_path / "gone.py")]
    assert list(pretrain.documents(("python", paths))) == ["About the module.", "What f does."]
    [names] = pretrain.documents(("python-names", paths))
    assert set(names.split()) == {"a", "b", "size", "len"}
    found = hashing.python_files()
    assert any(p.endswith("topics.py") for p in found.values()) and len(set(found.values())) > 500


def test_copied_docstrings_count_once(tmp_path, monkeypatch):
    for i in range(3):
        (tmp_path / f"{i}.py").write_text(f'"""The same text."""\n\ndef f():\n    """Text {i}."""\n')
    found = {path.name: str(path) for path in sorted(tmp_path.glob("*.py"))}
    monkeypatch.setattr(hashing, "python_files", lambda: found)
    assert pretrain.Corpus(folder_of("python", tmp_path)).meta["documents"] == 4


def test_corpus_errors(tmp_path):
    (tmp_path / "empty.txt").write_text(" \n \n")
    (tmp_path / "x.jsonl").write_text('{"n": 1}\n')
    (tmp_path / "y.jsonl").write_text('{"text": \n')
    (tmp_path / "folder").mkdir()
    for data, says in (("empty.txt", "no words"), ("nowhere.txt", "no such file"),
                       ("folder", "no file that ends in"), ("x.jsonl", "no column of text"),
                       ("y.jsonl", "could not be read")):
        with pytest.raises(InputError, match=says):
            folder_of(tmp_path / data, tmp_path)
    with pytest.raises(InputError, match="could not be read"):
        folder_of("no-such-owner/no-such-set", tmp_path)
    left = [p for p in (tmp_path / "cache").iterdir() if not p.name.endswith((".lock", ".tmp"))]
    assert not left  # nothing half-made is ever found


def test_two_processes_prepare_once(tmp_path):
    """The second waits for the first, and finds its work."""
    code = ("import sys, time, model\n"
            "def make(p):\n    time.sleep(0.5)\n    open(p, 'w').write('x')\n    print('made')\n"
            f"model.once({str(tmp_path / 'thing')!r}, make)")
    both = [subprocess.Popen([sys.executable, "-c", code], cwd=HERE, stdout=subprocess.PIPE, text=True)
            for _ in range(2)]
    assert "".join(p.communicate()[0] for p in both).count("made") == 1


def test_windows_cover_all_and_keep_held_out_text_apart(text_file, tmp_path):
    corpus = pretrain.Corpus(folder_of(text_file, tmp_path))
    L, batch = 17, 13
    batches = pretrain.Batches(corpus, L, batch, 200, seed=3)
    held = {i for s in corpus.windows(L)[1] for i in range(s, s + L - 1)}
    everything, orders, shifts = np.zeros(len(corpus.ids), int), [], []
    for epoch in range(3):
        starts = np.concatenate([batches.step(epoch * batches.steps_per_epoch + s, slice(0, batch))[0] is None
                                 or batches.starts[batches.order[s * batch:(s + 1) * batch]] + batches.shift
                                 for s in range(batches.steps_per_epoch)])
        covered = np.bincount((starts[:, None] + np.arange(L - 1)).ravel(), minlength=len(everything))
        assert covered.max() == 1  # no text twice in an epoch
        assert not held & set(np.flatnonzero(covered))
        assert covered.sum() > 0.9 * (len(everything) - len(held))
        everything += covered
        orders.append(batches.order.tolist())
        shifts.append(int(batches.shift))
    assert orders[0] != orders[1] != orders[2] and len(set(shifts)) > 1
    ids, chance, strangers = batches.step(5, slice(2, 6))
    assert ids.shape == (4, L) and (ids[:, 0] == CLS).all() and chance.shape == (3, 4, L)
    assert strangers.min() >= FIRST and strangers.max() < 200
    following = batches.step(6, slice(2, 6))
    assert not any(torch.equal(a, b) for a, b in zip(following, (ids, chance, strangers)))
    train, _ = corpus.windows(L)
    assert len(train) == 20 and 0.015 < len(held) / len(corpus.ids) < 0.05
    kept = [pretrain.Batches(corpus, L, batch, 200, seed=s).held_out(slice(1, 4)) for s in (3, 4)]
    assert all(torch.equal(a, b) for a, b in zip(*kept))
    again = pretrain.Batches(corpus, L, batch, 200, seed=3).step(5, slice(0, batch))  # without drawing 0..4
    assert all((a[..., 2:6, :] == b).all() for a, b in zip(again, (ids, chance, strangers)))
    other = pretrain.Batches(corpus, L, batch, 200, seed=4).step(5, slice(2, 6))
    assert not (other[0] == ids).all() and not (other[1] == chance).all()


# pretrain.py: objectives


def test_shuffle_by_hand():
    """The docstring's example, with a replaced word at the end: b d f are chosen, and take places 5 1 3."""
    ids = torch.tensor([[CLS, 10, 11, 12, 13, 14, 15, 16, SEP]])
    chance = torch.ones(3, 1, 9) * 0.99
    chance[0, 0, [2, 4, 6]] = 0.05  # shuffled: b (11), d (13), f (15)
    chance[2, 0, [6, 2, 4]] = torch.tensor([0.1, 0.2, 0.3])  # at random: the word of place 6, then 2, then 4
    chance[1, 0, [0, 7, 8]] = 0.05  # random: only 16, for CLS and SEP are no words
    inputs, labels = pretrain.corrupt_sr(ids, chance, torch.full_like(ids, 77))
    assert inputs.tolist() == [[CLS, 10, 15, 12, 11, 14, 13, 77, SEP]]
    assert labels.tolist() == [[-100, 0, 1, 0, 1, 0, 1, 2, -100]]


def random_batch(rows=257, length=63, vocabulary=5_003, seed=0):
    rng = np.random.default_rng(seed)
    ids = torch.from_numpy(rng.integers(FIRST, vocabulary, (rows, length)))
    ids[:, 0], ids[:, 40] = CLS, SEP
    return ids, torch.from_numpy(rng.random((3, rows, length), np.float32)), torch.from_numpy(
        rng.integers(FIRST, vocabulary, (rows, length)))


def test_shuffle_and_random_laws():
    """10 % shuffled, 9 % random; a row keeps its words but for the random ones; labelled is what changed."""
    ids, chance, strangers = random_batch()
    inputs, labels = pretrain.corrupt_sr(ids, chance, strangers)
    words = ids >= FIRST
    assert ((labels == -100) == ~words).all() and (inputs[~words] == ids[~words]).all()
    assert ((inputs == ids) == (labels == 0))[words].all()
    total = int(words.sum())
    # a chosen word may draw its own place: with about 6 chosen a row, one word of a row in all
    for value, share in ((1, 0.10 - 1 / 61), (2, 0.09)):
        sigma = math.sqrt(share * (1 - share) / total)
        assert abs((labels == value).sum() / total - share) < 6 * sigma + 1e-3
    kept = torch.where(labels == 2, -1, inputs)
    for row in range(0, 257, 16):
        own = Counter(ids[row][labels[row] != 2].tolist())
        assert Counter(kept[row][labels[row] != 2].tolist()) == own  # nothing came from another row


def test_one_word_at_a_time_cannot_see_a_shuffle():
    """A probe that knows each word's frequency among shuffled and intact words is at chance: the two agree.
    Words follow a steep law: rarity would show; chi-square over 30 words, mean 29, six sigma = 29 + 6 √58."""
    rng = np.random.default_rng(0)
    share = 1 / np.arange(1, 31)
    ids = torch.from_numpy(FIRST + rng.choice(30, (2_003, 61), p=share / share.sum()))
    chance = torch.from_numpy(rng.random((3, 2_003, 61), np.float32))
    shuffled = chance[0] < 0.1
    inputs, labels = pretrain.corrupt_sr(ids, chance, torch.zeros_like(ids))
    seen = np.bincount(inputs[shuffled & (labels != 2)].numpy(), minlength=36)[FIRST:]
    expected = np.bincount(ids[shuffled].numpy(), minlength=36)[FIRST:]
    assert (seen == expected).all()  # the very same words: they only trade places
    everywhere = np.bincount(ids.flatten().numpy(), minlength=36)[FIRST:] / ids.numel()
    everywhere *= shuffled.sum().item()
    assert ((seen - everywhere) ** 2 / everywhere).sum() < 29 + 6 * math.sqrt(58)
    assert (labels == 1).sum() > 0 and ((labels == 1) <= shuffled).all()


def test_masking_law():
    """Of 15 %: 80 % [MASK], 10 % another word, 10 % kept."""
    ids, chance, strangers = random_batch()
    inputs, labels = pretrain.corrupt_mlm(ids, chance, strangers)
    words, chosen = ids >= FIRST, labels != -100
    assert not (chosen & ~words).any() and (labels[chosen] == ids[chosen]).all()
    assert (inputs[~chosen] == ids[~chosen]).all()
    total, n = int(words.sum()), int(chosen.sum())
    for count, of, share in ((n, total, 0.15), ((inputs == MASK).sum(), n, 0.8),
                             ((chosen & (inputs == strangers)).sum(), n, 0.1),
                             ((chosen & (inputs == ids)).sum(), n, 0.1)):
        assert abs(int(count) / of - share) < 6 * math.sqrt(share * (1 - share) / of) + 2 / 5_003


def test_corruption_thresholds():
    """The shares as they stand, on either side of each: 0.10; 0.15, of it 0.8, of the rest one half."""
    ids = torch.full((1, 3), FIRST)
    strangers = torch.full((1, 3), FIRST + 1)

    def chances(*values):
        return torch.tensor(values).view(3, 1, 1).expand(3, 1, 3)

    for low, high, place in ((0.1499, 0.1501, 0), (0.7999, 0.8001, 1), (0.4999, 0.5001, 2)):
        base = [0.0, 0.9, 0.0]  # chosen, not masked, random
        outcomes = []
        for value in (low, high):
            base[place] = value
            inputs, labels = pretrain.corrupt_mlm(ids, chances(*base), strangers)
            outcomes.append((inputs[0, 0].item(), labels[0, 0].item()))
        assert outcomes == {0: [(FIRST + 1, FIRST), (FIRST, -100)], 1: [(MASK, FIRST), (FIRST + 1, FIRST)],
                            2: [(FIRST + 1, FIRST), (FIRST, FIRST)]}[place]
    for value, label in ((0.0999, 2), (0.1001, 0)):
        assert pretrain.corrupt_sr(ids, chances(0.9, value, 0.0), strangers)[1].unique().tolist() == [label]
    row = torch.tensor([[FIRST, FIRST + 1]])
    order = torch.tensor([[0.9, 0.1]])
    for value, changed in ((0.0999, True), (0.1001, False)):
        chance = torch.stack([torch.full((1, 2), value), torch.ones(1, 2), order])
        assert torch.equal(pretrain.corrupt_sr(row, chance, row)[0], row.flip(1) if changed else row)


def test_losses_and_reports_by_hand():
    net = lambda logits: lambda *a, **k: logits  # noqa: E731, a model that says what it is told
    logits = torch.tensor([[[2., 0, 0], [2, 0, 0], [0, 0, 2], [0, 9, 0]]])
    labels = torch.tensor([[0, 1, 2, -100]])
    loss, confusion = pretrain.loss_sr(net(logits), None, labels)
    one = math.log(math.exp(2) + 2)
    assert math.isclose(loss, (one - 2) + one + (one - 2), rel_tol=1e-6)
    assert confusion.tolist() == [1, 0, 0, 1, 0, 0, 0, 0, 1]
    report = pretrain.report_sr(confusion)
    # intact: guessed twice, right once, one true: F1 = 2 / 3; shuffled 0; random 1
    expected = dict(accuracy=2 / 3, majority=1 / 3, f1_intact=2 / 3, f1_shuffled=0, f1_random=1,
                    macro_f1=5 / 9)
    assert {k: round(float(v), 6) for k, v in report.items()} == {k: round(v, 6) for k, v in expected.items()}
    # nothing scored: zero, not NaN
    assert pretrain.loss_sr(net(logits), None, torch.full((1, 4), -100))[0] == 0
    labels = torch.tensor([[FIRST + 1, -100, FIRST]])  # rows 6 and 5
    said = torch.cat([torch.eye(40)[[6]], torch.arange(40.)[None].remainder(28)])

    class Told:
        training, config = False, Config(emb="lookup", head="mlm")

        def __call__(self, *args, **more):
            return said

    loss, counts = pretrain.loss_mlm(Told(), labels, labels)
    expected = math.log(math.e + 39) - 1 + said[1].logsumexp(0) - 5
    assert math.isclose(loss, expected, rel_tol=1e-6)
    rank = (said[1, 5:] > 5).sum()  # specials' rows, 0 .. 4, are no rivals
    assert 20 <= rank and counts.tolist() == [1, 1, 1, 2]
    said[1, 5] = 26.5  # two rows have 27, none of them a special's
    assert pretrain.loss_mlm(Told(), labels, labels)[1].tolist() == [1, 2, 2, 2]
    # a set has an item once: of rows 7 .. 39, which score more than row 6, all but row 38 stand there already
    inputs = torch.tensor([[MASK] + [FIRST + i for i in range(2, 35) if i != 33]])
    labels, said = torch.full_like(inputs, -100), torch.arange(40.)[None]
    labels[0, 0] = FIRST + 1
    assert pretrain.loss_mlm(Told(), inputs, labels)[1].tolist() == [0, 0, 0, 1]
    Told.config = Config(emb="lookup", head="mlm", order=False)
    assert pretrain.loss_mlm(Told(), inputs, labels)[1].tolist() == [0, 1, 1, 1]


def test_schedule():
    assert [pretrain.schedule(s, 10, 4) for s in (0, 3, 4, 7, 9)] == [0.25, 1.0, 1.0, 0.5, 1 / 6]
    assert pretrain.schedule(0, 5, 0) == 1.0


# pretrain.py: runs


def weights(folder):
    return model.load_checkpoint(str(folder))["model"]


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a.values(), b.values(), strict=True))


VARIANTS = [("lookup", "md5", "bpe", "mlm"), ("lookup", "md5", "bpe", "sr"),
            ("lookup", "md5", "regex", "mlm"), ("emb", "lsh", "bpe", "sr"),
            ("proj", "lsh", "bpe", "sr"), ("proj", "md5", "space", "sr"),
            *((e, h, "regex", "sr") for e in ("emb", "pool", "add", "proj") for h in ("md5", "lsh"))]


@pytest.mark.parametrize("emb,hash,split,objective", VARIANTS)
def test_every_variant_trains_and_is_read_back(small, tmp_path, emb, hash, split, objective, capsys):
    flags = small("--emb", emb, "--hash", hash, "--split", split, "--objective", objective,
                  "--rows", 97, "--vocab", 400, "--features", 999)
    result = pretrain.main(flags)
    assert all(math.isfinite(v) for v in result.values())
    said = capsys.readouterr().out
    assert "parameters" in said and "next: python infer.py" in said
    lines = [json.loads(line) for line in open(tmp_path / "run" / "log.jsonl")]
    assert {"step", "loss", "lr", "grad_norm", "words_per_s"} <= set().union(*lines)
    assert [line["step"] for line in lines if "eval_loss" in line] == [3, 6]
    text = "tion [MASK] ï" if objective == "mlm" else "a b ï"
    infer.main(["--ckpt", str(tmp_path / "run"), text])
    assert capsys.readouterr().out


def test_learns_the_order_of_words(small, tmp_path, monkeypatch):
    """The switch: with attention it finds words out of order; --layers 0, one word at a time, finds none."""
    flags = ["--steps", "600", "--batch", "32", "--lr", "2e-3", "--warmup", "50", "--width", "64",
             "--eval_every", "600", "--dropout", "0"]
    whole = pretrain.main(small(*flags, "--layers", "2", out="whole"))
    probe = pretrain.main(small(*flags, "--layers", "0", out="probe"))
    assert whole["eval_loss"] < probe["eval_loss"] - 0.03 and probe["f1_shuffled"] < 0.05
    assert whole["f1_random"] > probe["f1_random"] + 0.1
    # order, not only company: with every place alike it is a bag of words, and worse
    monkeypatch.setattr(model, "sinusoids", lambda length, width: torch.zeros(length, width))
    args = pretrain.parser().parse_args(small(*flags, "--layers", "2", out="bag"))
    bag = pretrain.Run(args)
    bag.model.positions.weight.requires_grad_(False).zero_()
    assert whole["eval_loss"] < bag.fit([])["eval_loss"] - 0.01


def test_loss_at_the_start_is_what_theory_says(small, capsys):
    pretrain.main(small("--steps", "1"))
    [line] = [x for x in capsys.readouterr().out.splitlines() if x.startswith("loss")]
    found, theory = map(float, re.match(r"loss\s+([\d.]+) at step 0; theory: ([\d.]+) = ln 3", line).groups())
    assert theory == 1.099 and abs(found - theory) < 0.15


def die_at_step_3(flags):
    """A run that is lost after its checkpoint of step 3."""
    def die(self, original=pretrain.Run.save):
        original(self)
        if self.step == 3:
            raise SystemExit

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pretrain.Run, "save", die)
        with pytest.raises(SystemExit):
            pretrain.main(flags)


def test_resume_is_exact(small, tmp_path):
    """Stopped at step 3 and started again: weights, optimizer and log of the unbroken run, bit for bit."""
    pretrain.main(small("--dropout", "0.1", out="whole"))

    die_at_step_3(small("--dropout", "0.1", out="broken"))
    with open(tmp_path / "broken" / "log.jsonl", "a") as file:
        file.write('{"step": 5, "loss": 1}\n{"ste')  # of the life that was lost
    pretrain.main(small("--dropout", "0.1", out="broken"))
    assert same(weights(tmp_path / "whole"), weights(tmp_path / "broken"))
    a, b = (model.load_checkpoint(str(tmp_path / n))["optimizer"]["state"] for n in ("whole", "broken"))
    assert all(torch.equal(a[i][k], b[i][k]) for i in a for k in a[i])
    steps = [[json.loads(line)["step"] for line in open(tmp_path / n / "log.jsonl")]
             for n in ("whole", "broken")]
    assert steps[0] == steps[1]
    pretrain.main(small("--dropout", "0.1", out="broken"))  # finished already: says so, changes nothing
    assert same(weights(tmp_path / "whole"), weights(tmp_path / "broken"))


def test_passes_add_up_to_the_batch(small, tmp_path):
    """Three passes of at most 3 rows are one of 8: the loss is a mean over all scored words, not passes."""
    pretrain.main(small("--dropout", "0", out="one"))
    pretrain.main(small("--dropout", "0", "--micro", "3", out="three"))
    for a, b in zip(weights(tmp_path / "one").values(), weights(tmp_path / "three").values()):
        torch.testing.assert_close(a, b, rtol=0, atol=2e-5)  # Adam's first steps are signs: rounding shows


@pytest.mark.parametrize("attn", [(), ("--attn", "lsh", "--lsh_bands", "2")], ids=["full", "lsh"])
def test_two_ranks_are_one(small, tmp_path, attn):
    """The same windows and corruption for any number of ranks; gradients to 1e-6, then the first losses."""
    code = ("import sys, torch, pretrain\n"
            "run = pretrain.Run(pretrain.parser().parse_args(sys.argv[2:]))\n"
            "passes = run.load(0)\n"
            "n = run.sum_over_ranks(sum((l != -100).sum() for _, l in passes).float())\n"
            "loss = run.gradients(passes, n)\n"
            "grads = [p.grad for p in run.model.parameters()]\n"
            "if run.rank == 0: torch.save([loss] + grads, sys.argv[1])\n"
            "run.unwrap()\n"
            "if run.world > 1: torch.distributed.destroy_process_group()\n")
    script = tmp_path / "grads.py"
    script.write_text(code)
    env = os.environ | {"PYTHONPATH": str(HERE), "OMP_NUM_THREADS": "1"}
    run_script(script, tmp_path / "1.pt", *small("--dropout", "0", *attn, out="a"), env=env)
    done = run_script("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", script,
                      tmp_path / "2.pt", *small("--dropout", "0", "--micro", "3", *attn, out="b"), env=env)
    assert done.returncode == 0, done.stderr
    for a, b in zip(torch.load(tmp_path / "1.pt"), torch.load(tmp_path / "2.pt"), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_the_flags_arrive(small, tmp_path, monkeypatch):
    """Clip, decay, beta2, warm-up and seeds: each where it is used, none at another's place."""
    norms, seeds, clip, manual = [], [], torch.nn.utils.clip_grad_norm_, torch.manual_seed
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", lambda p, g: norms.append(g) or clip(p, g))
    monkeypatch.setattr(torch, "manual_seed", lambda seed: seeds.append(seed) or manual(seed))
    flags = small("--clip", "0.7", "--decay", "0.03", "--lr", "0.002")
    run = pretrain.Run(pretrain.parser().parse_args(flags))
    run.fit([])
    assert norms == [0.7] * 6 and len(set(seeds[1:])) == len(seeds[1:]) == 6  # one for the weights first
    groups = run.optimizer.param_groups
    assert [g["weight_decay"] for g in groups] == [0.03, 0.0] and groups[0]["betas"] == (0.9, 0.999)
    rows = [json.loads(line) for line in open(tmp_path / "run" / "log.jsonl")]
    [lr] = [row["lr"] for row in rows if "lr" in row]
    assert math.isclose(lr, 0.002 * pretrain.schedule(5, 6, 2), rel_tol=1e-5)
    monkeypatch.setenv("RANK", "1")
    first, seeds[:] = list(seeds), []
    with monkeypatch.context() as patch:
        patch.setattr(pretrain.Run, "evaluate", lambda self: {})  # a rank alone has no windows of its own
        pretrain.Run(pretrain.parser().parse_args(small(out="other"))).fit([])
    assert seeds[0] == first[0] and not set(seeds[1:]) & set(first[1:])  # the same weights, other dropout
    monkeypatch.delenv("RANK")
    third = pretrain.Run(pretrain.parser().parse_args(small("--seed", "1", out="third")))
    fourth = pretrain.Run(pretrain.parser().parse_args(small("--seed", "2", out="fourth")))
    assert not same(third.model.state_dict(), fourth.model.state_dict())
    loud = pretrain.Run(pretrain.parser().parse_args(small("--dropout", "0.5", out="loud")))
    assert loud.evaluate() == loud.evaluate()  # no dropout when it counts


def test_two_runs_share_a_cache_that_is_not_there_yet(small, tmp_path):
    """Started together, of one corpus and other hashes: one prepares, and each ends as it does alone."""
    hashes = {"lsh": ("--hash", "lsh"), "md5": ("--hash", "md5")}
    runs = {name: subprocess.Popen([sys.executable, "pretrain.py", *small(*flags, "--cache", tmp_path / "new",
                                                                          out=name)],
                                   cwd=HERE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            for name, flags in hashes.items()}
    for run in runs.values():
        assert not run.wait(timeout=200), run.stderr.read()
        run.communicate()
    for name, flags in hashes.items():
        pretrain.main(small(*flags, out="alone " + name))
        assert same(weights(tmp_path / name), weights(tmp_path / f"alone {name}"))
    assert not [f for _, _, files in os.walk(tmp_path / "new") for f in files if f.endswith(".tmp")]


@pytest.mark.parametrize("split", ["regex", "bpe"])
def test_a_broken_cache_is_named(small, tmp_path, split):
    flags = small("--cache", tmp_path / "cache", "--split", split)
    pretrain.main(flags)
    shutil.rmtree(tmp_path / "run")
    [folder] = [path for path in (tmp_path / "cache").iterdir() if path.is_dir()]
    # the codes first, then what they are made of
    for file in sorted(folder.iterdir(), key=lambda file: not file.name.startswith("codes")):
        if file.name != "offsets.npy" and file.suffix != ".lock":
            whole, grams = file.read_bytes(), file.name.startswith("ngrams")
            for codes in set(folder.glob("codes*.npy")) - {file}:
                codes.unlink()
            for bad in (whole[:len(whole) // 2], b"", b"{" if grams else b"[]", np.array([{}]).dumps()):
                file.write_bytes(bad)
                refused(pretrain.main, flags, says="remove it")
            file.write_bytes(whole)
    pretrain.main(flags)


def test_caches_are_told_apart(small, tmp_path):
    """Other keys and seeds give other codes, other texts and piece counts other corpora."""
    def codes(*flags):
        run = pretrain.Run(pretrain.parser().parse_args(small(*flags, out=str(len(os.listdir(tmp_path))))))
        return run.model.codes

    for a, b in ((("--hash", "md5"), ("--hash", "md5", "--key", "k")), ((), ("--hash_seed", "1")),
                 (("--bits", "64"), ("--bits", "128"))):
        assert codes(*a).shape != codes(*b).shape or (codes(*a) != codes(*b)).any()
    path = tmp_path / "a.txt"
    path.write_text("one two three " * 9)
    first = folder_of(path, tmp_path)
    assert folder_of(path, tmp_path) == first
    path.write_text("one two four " * 9)
    assert folder_of(path, tmp_path) != first
    few, many = (folder_of(path, tmp_path, split="bpe", pieces=n) for n in (300, 400))
    assert few != many


def test_resume_refuses_another_run(small, tmp_path, text_file):
    """Whatever makes the run itself, the corpus's content among it, must be the same."""
    pretrain.main(small())
    for more in (("--seed", "1"), ("--hash_seed", "1"), ("--lr", "0.1"), ("--decay", "0.1"),
                 ("--steps", "7"), ("--width", "64"), ("--batch", "4"), ("--clip", "2")):
        refused(pretrain.main, small(*more), says="comes from another run")
    longer = tmp_path / "longer.txt"
    longer.write_text(text_file.read_text() + "\none more line\n")
    refused(pretrain.main, small("--data", longer), says="corpus is")
    counts = Counter(hashing.words_of(text_file.read_text()))
    assert model.load_checkpoint(str(tmp_path / "run"))["words"][0] == counts.most_common(1)[0][0]


def test_random_words_of_a_lookup_are_words_that_occur(small):
    run = pretrain.Run(pretrain.parser().parse_args(small("--emb", "lookup", "--vocab", "400")))
    occurring = {i for i, n in zip(run.remap.tolist(), run.corpus.counts.tolist()) if n and i >= FIRST}
    assert set(run.found.tolist()) == occurring and len(occurring) < len(run.encoder.words)
    inputs, labels = run.load(0)[0]
    assert set(inputs[labels == 2].tolist()) <= occurring


def test_torchrun_as_typed(small, tmp_path):
    """The README's command with two ranks; the log has one writer, and evaluation counts each window once."""
    done = run_script("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "pretrain.py",
                      "--emb", "proj", "--hash", "lsh", *small("--dropout", "0", out="two"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("next:") == 1 and "2 ranks" in done.stdout
    pretrain.main(small("--dropout", "0", out="one"))
    rows = [[json.loads(line) for line in open(tmp_path / n / "log.jsonl")] for n in ("one", "two")]
    for a, b in zip(*rows, strict=True):
        assert a["step"] == b["step"] and math.isclose(a.get("loss", 0), b.get("loss", 0), rel_tol=1e-4)
        assert math.isclose(a.get("eval_loss", 0), b.get("eval_loss", 0), rel_tol=1e-4)


def test_a_lost_worker_is_replaced(small, tmp_path):
    """torchrun --max-restarts: a rank is killed, all start again from the checkpoint, and end as if never."""
    flags = ("--dropout", "0.1", "--steps", 60, "--save_every", 10, "--eval_every", 60, "--batch", 6)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=3"]
    env = os.environ | {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    done = run_script(*command[1:], "pretrain.py", *small(*flags, out="whole"), env=env)
    assert done.returncode == 0, done.stderr
    (tmp_path / "dies.py").write_text(
        "import os, sys, time, pretrain\n"
        "save, again = pretrain.Run.save, os.environ['TORCHELASTIC_RESTART_COUNT'] != '0'\n"
        "def dying(self):\n"
        "    save(self)\n"
        "    if self.step == 30 and self.rank == 1 and not again:\n"
        "        os.kill(os.getpid(), 9)\n"
        "pretrain.Run.save = dying\n"
        "time.sleep(2 * (again and os.environ['RANK'] == '0'))\n"  # rank 1 looks for it, and finds nobody yet
        "pretrain.main(sys.argv[1:])\n")
    done = run_script(*command[1:], "--max-restarts=1", tmp_path / "dies.py", *small(*flags, out="broken"),
                      env=env | {"PYTHONPATH": str(HERE)})
    assert done.returncode == 0 and "done:" in done.stdout, done.stderr
    assert re.search(r"at step (10|20|30);", done.stdout)
    assert same(weights(tmp_path / "whole"), weights(tmp_path / "broken"))


@pytest.mark.parametrize("script", ["pretrain", "finetune"])
def test_restarts_that_would_meet_the_dead_are_refused(monkeypatch, small, own, tmp_path, script):
    """With its default store a torchrun that restarts hands new ranks the addresses of lost ones."""
    for name, value in (("MAX_RESTARTS", "3"), ("USE_AGENT_STORE", "True")):
        monkeypatch.setenv(f"TORCHELASTIC_{name}", value)
    flags = small() if script == "pretrain" else ["--preset", "proformer", *own, "--out", str(tmp_path)]
    refused(getattr(sys.modules[script], "main"), flags, says="TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "False")
    assert model.torchrun_env() == (0, 1, 0)


def test_a_run_goes_on_with_another_number_of_ranks(small, tmp_path):
    """Begun alone, ended by two: to rounding what one gives."""
    pretrain.main(small("--dropout", "0", out="whole"))
    die_at_step_3(small("--dropout", "0", out="broken"))
    done = run_script("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "pretrain.py",
                      *small("--dropout", "0", out="broken"), env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0 and "at step 3;" in done.stdout, done.stderr
    for a, b in zip(*(weights(tmp_path / name).values() for name in ("whole", "broken")), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=2e-5)


def nodes(*flags, script="pretrain.py"):
    """A script on two nodes that meet at one address; flags: those of each; out: exit codes, outputs"""
    env = os.environ | {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"--rdzv_endpoint=127.0.0.1:{free.getsockname()[1]}"
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc_per_node=1", address,
               "--rdzv_backend=c10d", script]
    both = [subprocess.Popen([*command, *mine], cwd=HERE, env=env, stdout=subprocess.PIPE,
                             stderr=subprocess.PIPE, text=True) for mine in flags]
    said = [node.communicate(timeout=200) for node in both]
    return [node.returncode for node in both], said


def test_two_nodes(small, tmp_path):
    """Two agents: the run of one rank, to rounding; one of them speaks."""
    flags = small("--dropout", "0", "--cache", tmp_path / "cache", out="two")  # prepared by either
    codes, said = nodes(flags, flags)
    assert codes == [0, 0], said
    silent, loud = sorted((out for out, _ in said), key=len)
    assert "2 ranks" in loud and "done:" in loud and not silent
    pretrain.main(small("--dropout", "0", out="one"))
    for a, b in zip(*(weights(tmp_path / name).values() for name in ("one", "two")), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=2e-5)


def test_two_nodes_that_do_not_see_the_same_checkpoint(small):
    die_at_step_3(small(out="here"))
    codes, said = nodes(small(out="here"), small(out="there"))
    assert all(codes) and all("the ranks found checkpoints of steps" in error for _, error in said), said


def test_two_nodes_that_do_not_see_the_same_results(started, own, tmp_path):
    flags = [["--ckpt", str(started / "proj"), *QUICK, *own, "--out", str(tmp_path / name)] for name in "ab"]
    codes, said = nodes(*flags, script="finetune.py")
    assert all(codes) and any("a folder that all nodes see" in error for _, error in said), said


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_the_same_command_goes_on(small, tmp_path, number):
    command = [sys.executable, "pretrain.py",
               *small("--steps", "4000", "--save_every", "9999", "--eval_every", "9999")]
    run = subprocess.Popen(command, cwd=HERE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    log = tmp_path / "run" / "log.jsonl"
    deadline = time.time() + 120
    while not (log.exists() and log.read_text().count("\n") >= 3) and time.time() < deadline:
        time.sleep(0.05)
    run.send_signal(number)
    out, error = run.communicate(timeout=60)
    assert run.returncode == 128 + number and "told to stop" in out and "Traceback" not in error
    step = model.load_checkpoint(str(tmp_path / "run"))["step"]
    assert step >= 30
    run = subprocess.Popen(command, cwd=HERE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    line = next(line for line in run.stdout if line.startswith("loss"))
    run.kill()
    run.communicate()
    assert f"at step {step:,};" in line



# Forks lives of one run, with torch imported once, and ends each in a way of its own, until enough are ended.
LIVES = """
import glob, importlib, json, os, random, resource, shutil, signal, sys, time
import model

kills, script, saves, out, cache, *flags = sys.argv[1:]  # saves: a pattern, of what a run goes on from
main, rng, count, runs, last = importlib.import_module(script).main, random.Random(0), {}, [], 0


def life(limit=None):
    pid = os.fork()
    if pid:
        return pid
    said = out + "-said" if limit is None else os.devnull  # what is said is not on the disk that is full
    os.dup2(os.open(said, os.O_CREAT | os.O_TRUNC | os.O_WRONLY), 1)
    os.dup2(1, 2)
    if limit is not None:  # a full disk: nothing longer can be written
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    try:
        main(flags)
        code = 0
    except SystemExit as end:
        code = end.code
    sys.stdout.flush(), sys.stderr.flush()
    os._exit(code)


def end_state():
    saved, tensors = model.load_checkpoint(out), []
    with open(os.path.join(out, "results.json" if script == "finetune" else "log.jsonl")) as file:
        said = file.read()
    if script == "pretrain":
        said = [{k: v for k, v in json.loads(line).items() if k not in ("words_per_s", "ms_per_sample")}
                for line in said.splitlines()]
        tensors = [t for state in saved["optimizer"]["state"].values() for t in state.values()]
    tensors += saved["model"].values()
    return model.fingerprint([[t.tolist() for t in tensors], repr(saved["run"]), said])


def check(right, what):
    if not right:
        with open(out + "-said") as file:
            sys.exit(f"{what}: {file.read()[-2000:]}")


for _ in range(2):  # the second finds the corpus prepared, as most do
    shutil.rmtree(out, ignore_errors=True)
    begun = time.perf_counter()
    check(os.waitstatus_to_exitcode(os.waitpid(life(), 0)[1]) == 0, "the unbroken run")
    whole, whole_state = time.perf_counter() - begun, end_state()
shutil.rmtree(out)
while sum(count.values()) < int(kills) or not runs:
    os.makedirs(out, exist_ok=True)
    if rng.random() < 0.1:
        shutil.rmtree(cache, ignore_errors=True)  # killed while a corpus is prepared, too
    end = rng.choice(("KILL", "KILL", "TERM", "full", "cut", "flip"))
    path = rng.choice(sorted(glob.glob(os.path.join(out, saves))) or [""])
    size = os.path.getsize(path) if path else 0
    if end in ("cut", "flip") and size:
        with open(path, "rb") as file:
            good = file.read()
        bad = good[:rng.randrange(size)] if end == "cut" else bytearray(good)
        if end == "flip":
            bad[rng.randrange(size)] ^= 1 << rng.randrange(8)
        with open(path, "wb") as file:
            file.write(bad)
        try:
            same = repr(model.load_checkpoint(path))
        except model.ConfigError:
            same = None
            code = os.waitstatus_to_exitcode(os.waitpid(life(), 0)[1])
            check(code == 2 and open(path, "rb").read() == bad, "a broken checkpoint is refused, not changed")
        with open(path, "wb") as file:
            file.write(good)
        check(same in (None, repr(model.load_checkpoint(path))), "a flipped bit was read as if it were none")
        count[end] = count.get(end, 0) + 1
        continue
    pid = life(rng.randrange(max(size, 100_000)) if end == "full" else None)
    if end in ("KILL", "TERM"):
        time.sleep(rng.random() * whole)
        os.kill(pid, getattr(signal, f"SIG{end}"))
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    allowed = dict(KILL=(0, -9), TERM=(0, -15, 143), full=(0, 2)).get(end, (0,))
    check(code in allowed, f"{end} ended with {code}")
    left = [model.load_checkpoint(path) for path in glob.glob(os.path.join(out, saves))]  # all are whole
    step = sum(saved.get("step", 1) for saved in left) if code else last
    if os.path.exists(os.path.join(out, "results.json")):  # killed as it tidied up: what it was for is there
        last = step
    check(step >= last, f"{end} lost steps: {step} after {last}")
    last = step
    if code:
        count[end] = count.get(end, 0) + 1
    else:
        check(not [name for name in os.listdir(out) if "tmp" in name], "left behind")
        runs.append(end_state())
        shutil.rmtree(out)
        last = 0
print(json.dumps(dict(count=count, runs=len(runs), same=set(runs) == {whole_state}, seconds=whole)))
"""


def lives(script, saves, out, *more):
    """Runs LIVES, which a test has written beside `out`"""
    done = run_script(out.parent / "lives.py", 200 if LONG else 8, script, saves, out, *more,
                      env=os.environ | {"PYTHONPATH": str(HERE), "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr[-3000:]
    print(done.stdout)
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["same"] and said["runs"] and sum(said["count"].values()) >= 8


@pytest.mark.parametrize("flags", [("--dropout", "0.1"), pytest.param(("--emb", "median"), marks=long)],
                         ids=["proj", "median"])
def test_whatever_ends_a_run_the_same_command_goes_on(small, tmp_path, flags):
    """SIGKILL, SIGTERM, a full disk, a checkpoint cut or flipped, at random: the unbroken run's end."""
    (tmp_path / "lives.py").write_text(LIVES)
    flags = small(*flags, "--cache", tmp_path / "cache", "--steps", 40, "--save_every", 5, "--eval_every", 20)
    lives("pretrain", "ckpt.pt", tmp_path / "run", tmp_path / "cache", *flags)


@long
def test_whatever_ends_a_fine_tuning_the_same_command_goes_on(started, own, tmp_path):
    (tmp_path / "lives.py").write_text(LIVES)
    lives("finetune", "seed-*.pt", tmp_path / "tuned", tmp_path / "cache", "--ckpt", started / "proj", *QUICK,
          *own, "--seeds", 3, "--out", tmp_path / "tuned")


def test_signals_are_given_back(small):
    """After a run in the same process they are what they were: a worker forked later must die of SIGTERM."""
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    pretrain.main(small("--steps", "1"))
    assert before == (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT))


def test_a_loss_that_is_not_finite_stops_the_run(small, tmp_path, monkeypatch):
    loss_of = pretrain.loss_sr

    def poisoned(net, inputs, labels):
        loss, counts = loss_of(net, inputs, labels)
        return loss * (float("nan") if net.training and poisoned.calls == 4 else 1), counts

    def counting(self, passes, scored, original=pretrain.Run.gradients):
        poisoned.calls += 1
        return original(self, passes, scored)

    poisoned.calls = -1
    monkeypatch.setitem(pretrain.OBJECTIVES, "sr", (pretrain.corrupt_sr, poisoned, pretrain.report_sr, 9))
    monkeypatch.setattr(pretrain.Run, "gradients", counting)
    refused(pretrain.main, small(), says="step 5: loss nan")
    assert model.load_checkpoint(str(tmp_path / "run"))["step"] == 3
    assert all(p.isfinite().all() for p in weights(tmp_path / "run").values())


def test_compile_failure_is_loud_and_not_fatal(small, monkeypatch, capsys):
    monkeypatch.setattr(torch, "compile",
                        lambda f: lambda *a, **k: (_ for _ in ()).throw(RuntimeError("no compiler")))
    result = pretrain.main([*small(), "--compile"])
    assert math.isfinite(result["eval_loss"]) and "no compiler" in capsys.readouterr().err


def test_bad_flags_and_data_end_with_code_2(small, tmp_path, text_file):
    for more, says in ((("--emb", "proj", "--objective", "mlm"), "possible are"),
                       (("--width", "30"), "multiple"), (("--batch", "9999"), "less than one batch"),
                       (("--length", "99999"), "too few"), (("--bits", "0"), "wanted 8 or more"),
                       (("--emb", "emb", "--rows", "70000"), "65,535"),
                       (("--steps", "0"), "wanted 1 or more"),
                       (("--dropout", "1"), "less than 1"), (("--lr", "nan"), "wanted 0 or more"),
                       (("--device", "abacus"), "no such device"), (("--out", "/proc/no"), "/proc/no"),
                       (("--device", "cuda"), "no CUDA") if not torch.cuda.is_available()
                       else (("--batch", "0"), "wanted 1 or more"),
                       (("--data", "nowhere.txt"), "no such file")):
        refused(pretrain.main, [*small(), *more], says=says)
    refused(pretrain.main, ["--emb", "no"], says="invalid choice")
    pretrain.main(small())
    refused(pretrain.main, small("--lr", "1"), says="another run (lr is")
    (tmp_path / "run" / "ckpt.pt").write_bytes(b"x")
    refused(pretrain.main, small(), says="not a whole checkpoint")


def test_lsh_attention_trains_and_resumes(small, tmp_path, capsys):
    """New planes in every step, a function of seed and step: stopped and started again, the same bits."""
    flags = ("--attn", "lsh", "--lsh_bands", "2", "--lsh_redraw")
    pretrain.main(small(*flags, out="whole"))
    assert re.search(r"attention   lsh: 1 × 2 planes to 256 buckets.*% of pairs collide, computed by dense",
                     capsys.readouterr().out)

    die_at_step_3(small(*flags, out="broken"))
    early = weights(tmp_path / "broken")
    pretrain.main(small(*flags, out="broken"))
    late = weights(tmp_path / "broken")
    assert same(weights(tmp_path / "whole"), late)
    assert not torch.equal(early["layers.0.planes"], late["layers.0.planes"])
    pretrain.main(small(*flags[:-1], out="fixed"))  # the switch: without it they stay what the seed drew
    torch.manual_seed(0)
    drawn = Model(model.load_checkpoint(str(tmp_path / "fixed"))["config"]).layers[0].planes
    assert torch.equal(weights(tmp_path / "fixed")["layers.0.planes"], drawn)


def test_lsh_flags_belong_to_lsh_attention(small):
    refused(pretrain.main, small("--lsh_bands", "3"), says="--lsh_bands is of --attn lsh")
    refused(pretrain.main, small("--attn", "lsh", "--lsh_buckets", "0"), says="wanted 1 or more")


def test_preset_bert_lsh_brings_its_words_objective_and_attention():
    """[BL §2.2] 31,995 pieces and five specials make 32,000 rows; the twin differs in one flag."""
    for more, attn, name in (([], "lsh", "lookup-bpe-mlm-lsh-attention"),
                             (["--attn", "full"], "full", "lookup-bpe-mlm")):
        args = pretrain.parser().parse_args(["--preset", "bert-lsh", *more])
        config = pretrain.resolve(args, 1)
        assert (args.vocab, args.split, args.objective, config.emb) == (31_995, "bpe", "mlm", "lookup")
        assert config.attn == attn and config.rows == 32_000 and args.out == os.path.join("out", name)
    args = pretrain.parser().parse_args([])
    assert pretrain.resolve(args, 1).emb == "proj" and (args.vocab, args.objective) == (50_000, "sr")


def test_world_size_must_divide_the_batch(small, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    refused(pretrain.main, small(), says="cannot be shared evenly by 3 ranks")


# ---------------------------------------------------------------------------------------------------------
# pretrain.py: hashes of words to predict


@pytest.mark.parametrize("exclude", [False, True])
def test_ranks_count_what_scores_as_much(exclude):
    """Against every score one by one; equal digests go against the right word."""
    logp = torch.randn(300, 3, 4).log_softmax(-1)  # three parts of 128 rows at most
    digests = torch.randint(0, 4, (50, 3))  # 64 digests: some words share theirs
    words, out = torch.randint(0, 50, (300,)), torch.randint(-1, 50, (300, 2)) if exclude else None
    scores = torch.stack([logp[:, j, digests[:, j]] for j in range(3)]).sum(0)  # (300, 50)
    found = pretrain.ranks(logp, digests, words, out)
    for i, word in enumerate(words.tolist()):
        others = set(range(50)) - {word} - set(out[i].tolist() if exclude else [])
        equal = {w for w in others if (digests[w] == digests[word]).all()}
        more = {w for w in others - equal if scores[i, w] > scores[i, word]}
        assert found[i] == len(equal | more)
    assert (digests.unique(dim=0).shape[0] < 50) and 0 in found


@pytest.mark.parametrize("emb", ["median", "mean", "weighted", "emb", "pool", "add", "proj"])
def test_an_over_fitted_batch_is_decoded_to_its_words(emb):
    """[CM] From k hashes back to the very words, among thousands that were never seen, with a certificate."""
    torch.manual_seed(0)
    words = words_like(3_000)
    sketch = (5, 41, 0) + (97,) * (emb == "weighted")
    encoder = Encoder(model.FORM[emb], rows=61, bits=32, chunk=8, sketch=sketch)
    encoder.ids(words)
    c = Config(emb=emb, head="hash-mlm", rows=61, bits=32, chunk=8, buckets=41, weights=97, layers=1,
               width=48, heads=2, ffn=96, length=12, dropout=0.0)
    net = Model(c)
    targets = torch.from_numpy(np.concatenate([np.zeros((FIRST, 5), np.int32), encoder.targets(words)]))
    net.set_codes(torch.from_numpy(encoder.codes()), targets=targets)
    ids = FIRST + torch.arange(60).view(5, 12) % 31 * 7  # words that come again, in other company
    labels = torch.full_like(ids, -100)
    labels[:, [2, 7]] = ids[:, [2, 7]]
    inputs = ids.masked_fill(labels != -100, MASK)
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
    for _ in range(200):
        loss, _ = pretrain.loss_hash(net, inputs, labels)
        (loss / 10).backward()
        optimizer.step()
        optimizer.zero_grad()
    net.eval()
    with torch.no_grad():
        _, counts = pretrain.loss_hash(net, inputs, labels)
        logits = net(inputs, at=pretrain.masked(labels))
    assert counts.tolist() == [10, 10, 10, 0, 10, 10], counts
    made = hashing.SketchMap(words, 5, 41)
    found, _, certified, scored = infer.beam_search(model.hash_logp(logits, made), made, 1, 2, None)
    assert certified.all() and (scored < 3_000).all()
    assert (found[:, 0] == labels[labels != -100] - FIRST).all()


@pytest.mark.parametrize("flags", [("--emb", "median"), ("--emb", "mean"), ("--emb", "weighted"),
                                   ("--emb", "proj", "--objective", "hash-mlm"),
                                   ("--emb", "median", "--split", "bpe", "--vocab", "300"),
                                   ("--emb", "median", "--objective", "sr"), ("--emb", "emb", "--hash", "md5",
                                                                             "--objective", "hash-mlm")])
def test_sketches_train_resume_and_are_read_back(small, tmp_path, capsys, flags):
    flags = (*flags, "--rows", 61, "--hash_seed", 3) + ("--buckets", 31, "--hashes", 3) * (
        "mean" in flags or "median" in flags or "hash-mlm" in flags)
    result = pretrain.main(small(*flags, out="whole"))
    said = capsys.readouterr().out
    if "hash-mlm" in flags or "sr" not in flags and "weighted" not in flags:
        assert "ln 31 before training" in said and 0 <= result["hashes_right"] <= 1
        assert result["rec@1"] <= result["rec@10"] <= result["rec@20"]
    die_at_step_3(small(*flags, out="broken"))
    pretrain.main(small(*flags, out="broken"))
    assert same(weights(tmp_path / "whole"), weights(tmp_path / "broken"))
    reader = infer.Reader(tmp_path / "whole")
    if reader.config.head == "sr":
        assert len(reader.detect("a word of a text")[0]) == 5
    else:
        for beam in (None, 40):
            [missing] = infer.look(reader, ["a [MASK]"], 4, beam=beam)["missing"]
            assert len(missing["items"]) == 4 and missing["certified"]
            assert missing["total"] == len(reader.words)


def test_the_same_words_are_hidden_from_words_and_from_pieces():
    text = "A café, a Cat; the cat-like dog saw 4 cats and it's 'fine'."
    bpe = hashing.BPE.train(["the cat"] * 9)
    plain = [text.replace("é", "e")] * 40
    words = hashing.Encoder("bits")
    pieces = hashing.Encoder("row", split="bpe", bpe=bpe, vocabulary=bpe.pieces)
    (ids, hidden), (more_ids, more) = (bench.questions([text] + plain, e) for e in (words, pieces))
    assert len(ids) == 40  # the text that is not ASCII is none of them
    assert [[w for w, _ in row] for row in hidden] == [[w for w, _ in row] for row in more]
    asked = [w for row in hidden for w, _ in row]
    assert set(asked) == {"cafe", "a", "cat", "the", "dog", "saw", "cats", "and", "it"}  # after a space
    assert 0.1 < len(asked) / (40 * 11) < 0.2  # of them, 15 %
    for e, rows, gaps in ((words, ids, hidden), (pieces, more_ids, more)):
        for row, places in zip(rows, gaps):
            whole = [hashing.CLS, *e.ids(e.split(plain[0])[0]), hashing.SEP]
            at = [i for _, some in places for i in some]
            assert [a if i not in at else hashing.MASK for i, a in enumerate(whole)] == row
            for word, some in places:
                assert [whole[i] for i in some] == e.ids(e.split(word)[0]).tolist()


@pytest.mark.parametrize("flags", [("--emb", "median", "--buckets", 31),
                                   ("--emb", "lookup", "--objective", "mlm", "--split", "regex",
                                    "--vocab", 30),
                                   ("--emb", "lookup", "--objective", "mlm", "--vocab", 400)],
                         ids=["hashes", "rows", "pieces"])
def test_naming_hidden_words_is_scoring_all(small, tmp_path, text_file, flags):
    """Every candidate by hand: the sum over its hashes, its row, or its pieces, of those with as many."""
    pretrain.main(small(*flags, "--steps", 60, "--lr", 0.01, "--length", 128))
    reader, rank = infer.Reader(tmp_path / "run"), []
    texts = [line.replace(" ", " the ", 1) for line in text_file.read_text().splitlines()[:40]]
    words = sorted({w for line in texts for w in hashing.words_of(line) if w.isalpha()} - {"the"})
    ids, hidden = bench.questions(texts, reader.encoder)
    reader.model.set_codes(torch.from_numpy(reader.encoder.codes()))
    for row, gaps in zip(ids, hidden):
        for word, at in gaps:
            logp = reader.model(torch.tensor([row]), at=torch.tensor(at)).log_softmax(-1)
            if "median" in flags:
                digest = {w: list(enumerate(i)) for w, i in zip(words, hashing.sketch_index(words, 5, 31))}
                logp = logp[0]
            else:  # a row of the table is an id less one, for WORD has none
                units = {w: reader.encoder.split(w)[0] if reader.encoder.bpe else [w] for w in words}
                table = reader.encoder.table
                digest = {w: [(j, table[u] - 1) for j, u in enumerate(us)] for w, us in units.items()
                          if all(u in table for u in us)}
            scores = {w: sum(logp[j, i].item() for j, i in d) for w, d in digest.items()
                      if len(d) == len(digest.get(word, ()))}
            if word in words:
                rank.append(sum(s >= scores[word] - 1e-5 for s in scores.values()) - 1 if scores else 99)
    said = bench.name_hidden(tmp_path / "run", words, texts)
    assert said["asked"] == len(rank) > 20 and 0 < said["first"] < said["ten"]
    # near ties may go either way
    assert said["first"] == pytest.approx(100 * np.mean(np.less(rank, 1)), abs=2.5)
    assert said["ten"] == pytest.approx(100 * np.mean(np.less(rank, 10)), abs=2.5)


@pytest.mark.parametrize("emb", ["mean", "median", "weighted"])
@pytest.mark.parametrize("k", [1, 5])
def test_places_start_as_loud_beside_a_sketch_as_beside_a_row(emb, k):
    """Median and mean are compared with one loudness of places to words, 2.25 spreads of the words' own."""
    net = Model(Config(emb=emb, hashes=k, buckets=300, weights=300, rows=300, width=64, heads=2, layers=0,
                       length=32))
    codes = torch.randint(0, 300, (2_000, k + (emb == "weighted")))
    loud = net.positions.weight.abs().max() / net.embedding(codes).std()
    assert abs(loud / 2.25 - 1) < 0.06


def test_a_sketch_answers_from_any_list_of_words(small, tmp_path, capsys):
    """--words: also words that no text had; a key is part of the hash; finetune.py takes the model on."""
    flags = ("--emb", "weighted", "--objective", "hash-mlm", "--key", "s", "--rows", 41, "--weights", 31)
    pretrain.main(small(*flags))
    (tmp_path / "words.txt").write_text("Xylophone zebra\nzebra unheard-of\n")
    reader = infer.Reader(tmp_path / "run")
    first = reader.complete("a [MASK]", 3)[0]["total"]
    reader.look_among(tmp_path / "words.txt")
    [found] = reader.complete("a [MASK]", 9)
    assert first > 5 and {w for w, _ in found["items"]} == {"xylophone", "zebra", "unheard", "-", "of"}
    logp = model.hash_logp(reader.model(*reader.masks("a [MASK]")[:1], at=torch.tensor([2])),
                           types.SimpleNamespace(buckets=500, m=5))
    for word, score in found["items"]:
        index = hashing.sketch_index([word], 5, 500, key="s")[0]
        assert score == pytest.approx(sum(logp[0, j, i].item() for j, i in enumerate(index)), abs=1e-4)
    capsys.readouterr()
    infer.main(["--ckpt", str(tmp_path / "run"), "--words", str(tmp_path / "words.txt"), "a [MASK]"])
    assert "of 5 scored, certified" in capsys.readouterr().out
    refused(infer.main, ["--ckpt", str(tmp_path / "run"), "--words", "nowhere", "a [MASK]"], says="nowhere")
    rows = [f"{word} {i},{'ab'[i % 2]}" for i, word in enumerate(words_like(40))]
    (tmp_path / "own.csv").write_text("text,label\n" + "\n".join(rows))
    own = str(tmp_path / "own.csv")
    finetune.main(["--ckpt", str(tmp_path / "run"), "--train", own, "--dev", own, "--text", "text", "--label",
                   "label", "--epochs", "1", "--seeds", "1", "--device", "cpu", "--out",
                   str(tmp_path / "fine")])
    assert infer.Reader(tmp_path / "fine").classify("a text")[0][0] in "ab"


def test_names_of_several_words_in_sets_that_are_hashed(sets, tmp_path):
    pretrain.main(sets("--emb", "median", alpha=None))
    reader = infer.Reader(tmp_path / "sets")
    assert reader.split("Miles Davis [MASK]")[0] == ["Miles Davis", "[MASK]"]
    items = reader.complete("Miles Davis [MASK]", 120)[0]["items"]
    assert len(items) == 119 and "Miles Davis" not in dict(items)
    (tmp_path / "names.txt").write_text("Miles Davis\nBill Evans\n")
    reader.look_among(tmp_path / "names.txt")
    assert reader.words == ["Miles Davis", "Bill Evans"]


def test_a_run_from_before_there_were_sketches_goes_on(small, tmp_path, capsys):
    """Its config lacks the new fields, and has a number of hashes that nothing read."""
    pretrain.main(small())
    path = tmp_path / "run" / "ckpt.pt"
    saved = torch.load(path)
    for config in (saved["config"], saved["run"]["config"]):
        del config["buckets"], config["weights"]
        config["hashes"] = 2
    del saved["run"]["buckets"], saved["run"]["weights"]
    torch.save(saved, path)
    pretrain.main(small())
    refused(pretrain.main, small("--width", "64"), says="width is 32 there, 64 here")


def test_flags_of_sketches(small):
    for flags, says in ((("--emb", "median", "--hashes", "4"), "odd"),
                        (("--buckets", "9"), "--buckets is of"),
                        (("--hashes", "3"), "--hashes is of"), (("--weights", "9"), "--weights is of"),
                        (("--emb", "bloom", "--buckets", "9"), "--buckets is of"),
                        (("--emb", "median", "--alpha", "3"), "--alpha is of"),
                        (("--emb", "median", "--objective", "mlm"), "possible are sr, hash-mlm"),
                        (("--emb", "lookup", "--objective", "hash-mlm"), "possible are sr, mlm, sampled")):
        refused(pretrain.main, small(*flags), says=says)
    for more, found in (([], ("median", "hash-mlm", 5, 500, "regex", "out/median")),
                        (["--emb", "mean"], ("mean", "hash-mlm", 5, 500, "regex", "out/mean")),
                        (["--emb", "lookup"], ("lookup", "mlm", None, None, "bpe", "out/lookup-bpe-mlm")),
                        (["--emb", "proj"], ("proj", "hash-mlm", 5, 500, "regex", "out/proj-lsh-hash-mlm"))):
        args = pretrain.parser().parse_args(["--preset", "median", *more])
        config = pretrain.resolve(args, 1)
        assert (args.emb, args.objective, args.hashes, args.buckets, args.split, args.out) == found
        assert (config.layers, config.width, config.heads, config.length, args.batch) == (4, 512, 4, 512, 128)


# ---------------------------------------------------------------------------------------------------------
# pretrain.py: sets of items


@pytest.fixture(scope="session")
def page_file(tmp_path_factory):
    """Four hundred pages of 3..9 names out of one of 12 groups of 10: the others of a page say the group."""
    rng, names = random.Random(3), [name.title() for name in words_like(120, 5)]
    names[7] = "Miles Davis"
    path = tmp_path_factory.mktemp("pages") / "pages.jsonl"
    with open(path, "w") as file:
        for _ in range(400):
            group = rng.randrange(12)
            page = rng.sample(names[10 * group:10 * group + 10], rng.randint(3, 9))
            file.write(json.dumps(dict(title="t", links=page, other=[1, 2])) + "\n")
    return path


@pytest.fixture
def sets(page_file, tmp_path, tmp_path_factory):
    """Flags of a short run over pages; --alpha first, then --data and --cache."""
    cache = tmp_path_factory.getbasetemp() / "cache"

    def flags(*more, out="sets", alpha=5):
        return ["--alpha", "5"][:2 * bool(alpha)] + [
                "--data", str(page_file), "--cache", str(cache), "--out", str(tmp_path / out), "--preset",
                "superbloom-small", "--layers", "1", "--width", "32", "--heads", "2", "--length", "7",
                "--batch", "8", "--steps", "6", "--device", "cpu", "--dtype", "float32",
                "--no-compile",
                "--dropout", "0", "--eval_every", "3", "--save_every", "3", *map(str, more)]

    return flags


def pages_in(tmp_path, name, text, **options):
    """The pages of a file as pretrain.py keeps them: list of list[str]."""
    (tmp_path / name).write_text(text)
    folder = pretrain.prepare(str(tmp_path / name), "items", str(tmp_path / "cache"), **options)
    corpus = pretrain.Corpus(folder)
    words, pages = [None] * FIRST + corpus.words(), [[]]
    for i in corpus.ids:
        pages[-1:] = [pages[-1], []] if i == SEP else [[*pages[-1], words[i]]]
    return pages[:-1]


def test_pages_of_every_kind(tmp_path):
    """Lists of names or numbers, names between tabs or else spaces, pairs; a page is a set, in order."""
    rows = [dict(a="x", ids=[5, 3, 5], names=["New York", " Miles\n Davis ", None, ""]),
            dict(a="y", ids=[3], names=["Jazz", "New York"])]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    assert pages_in(tmp_path, "a.jsonl", lines) == [["5", "3"], ["3"]]
    named = pages_in(tmp_path, "b.jsonl", lines, field="names")
    assert named == [["New York", "Miles Davis"], ["Jazz", "New York"]]
    assert pages_in(tmp_path, "c.txt", "b a b\n\nNew York\tJazz\n") == [["b", "a"], ["New York", "Jazz"]]
    pairs = "page,item\n1,New York\n2,Jazz\n1,7\n1,New York\n"
    assert pages_in(tmp_path, "d.csv", pairs) == [["New York", "7"], ["Jazz"]]
    assert pages_in(tmp_path, "e.csv", "page,item\n1,30\n2,4\n1,7\n") == [["30", "7"], ["4"]]
    gaps = [dict(a=["x", "y"], b=["z"]), dict(a=None, b=["q"]), dict(a=["w"], b=[])]
    lines = "".join(json.dumps(row) + "\n" for row in gaps)
    assert pages_in(tmp_path, "f.jsonl", lines) == [["x", "y"], ["w"]]  # never another row's other list
    for name, text, says in (("g.csv", "id,url,title\n1,u,t\n", "wanted a list of items, or two columns"),
                             ("h.jsonl", '{"n": 1, "l": [[1], [2]]}\n', "a name or a number")):
        with pytest.raises(InputError, match=says):
            pages_in(tmp_path, name, text)
    three = "order,date,sku\n1,x,30\n2,x,4\n1,y,7\n"
    assert pages_in(tmp_path, "j.csv", three, field="order,sku") == [["30", "7"], ["4"]]
    with pytest.raises(InputError, match="wanted a page's column and an item's"):
        pages_in(tmp_path, "j.csv", three, field="order,day")
    with pytest.raises(InputError, match="no such list"):
        pages_in(tmp_path, "i.jsonl", '{"n": 1, "l": [1, 2]}\n', field="n")


def test_an_inner_function_has_a_page_of_its_own(tmp_path):
    path = tmp_path / "a.py"
    path.write_text("def f(x):\n    a.b(c)\n    def g():\n        return d + e\n    return x + g()\n")
    assert sorted(map(sorted, map(str.split, hashing.python_texts(str(path), names=True)))) == [
        ["a", "b", "c", "g", "x"], ["d", "e"]]


def test_pages_are_cut_into_segments(page_file, tmp_path_factory):
    """Training rows are runs of a training page, held-out rows of the others; each is asked for one place."""
    cache = tmp_path_factory.getbasetemp() / "cache"
    corpus = pretrain.Corpus(pretrain.prepare(str(page_file), "items", str(cache)))
    offsets = np.append(np.load(Path(corpus.folder) / "offsets.npy"), len(corpus.ids))
    page = [corpus.ids[a:b - 1].tolist() for a, b in zip(offsets[:-1], offsets[1:])]
    train, held = corpus.pages()
    assert sorted([*train, *held]) == list(range(400)) and len(held) == 40
    made = pretrain.Pages(corpus, 5, 8, FIRST + 120, 0)

    def belongs(row, numbers):
        row = [i for i in row.tolist() if i != PAD]
        return [n for n in numbers if len(row) == min(5, len(page[n])) and
                any(page[n][s:s + len(row)] == row for s in range(len(page[n])))]

    seen, starts = Counter(), set()
    assert made.steps_per_epoch == 45
    for step in range(45):
        ids, chance, strangers = made.step(step, slice(0, 8))
        assert ids.shape == strangers.shape == chance.shape[1:]
        for row in ids:
            [number, *_] = belongs(row, made.pages(step))
            starts.add(page[number].index(row[0].item()))
        seen.update(made.pages(step).tolist())
    assert set(seen) == set(train.tolist()) and set(seen.values()) == {1} and starts == {0, 1, 2, 3, 4}
    again, *_ = made.step(3, slice(2, 5))
    assert (again == made.step(3, np.arange(2, 5))[0]).all()
    ids, chance, _ = made.held_out(slice(0, 40))
    inputs, labels = pretrain.corrupt_items(ids, chance, torch.full_like(ids, FIRST))
    assert all(belongs(row, held) for row in ids)
    assert ((labels != -100).sum(1) == 1).all() and ((inputs == MASK) == (labels != -100)).all()
    assert (labels[labels != -100] == ids[labels != -100]).all()
    assert len(set((labels != -100).float().argmax(1).tolist())) > 3  # and not always the same place
    few = [row for part in (slice(0, 7), slice(7, 40)) for row in made.held_out(part)[0]]
    assert all((a[:len(b)] == b).all() for a, b in zip(ids, few))


def test_coherent_maps_know_nothing_of_held_out_pages(sets, monkeypatch):
    seen, make = [], hashing.coherent_map
    monkeypatch.setattr(hashing, "coherent_map", lambda items, sizes, *a, **k: seen.append((items, sizes)) or
                        make(items, sizes, *a, **k))
    run = pretrain.Run(pretrain.parser().parse_args(sets("--coherent", 2, "--hash_seed", 77)))
    [(items, sizes)] = seen
    train, held = run.corpus.pages()
    assert len(sizes) == len(train) == 360
    corpus, offsets = run.corpus, np.load(Path(run.corpus.folder) / "offsets.npy")
    words = corpus.words()
    for number, (page, size) in enumerate(zip(np.split(items, np.cumsum(sizes)[:-1]), sizes)):
        start = offsets[train[number]]
        names = [words[i - FIRST] for i in corpus.ids[start:start + size]]
        assert [run.encoder.words[i] for i in page] == names


def test_copied_functions_count_once(tmp_path, monkeypatch):
    """The same names in another order are the same page."""
    for name, body in (("a", "return x + y"), ("b", "return y - x"), ("c", "return x * z")):
        (tmp_path / f"{name}.py").write_text(f"def f():\n    {body}\n")
    monkeypatch.setattr(hashing, "python_files", lambda: {n: str(tmp_path / f"{n}.py") for n in "abc"})
    folder = pretrain.prepare("python-names", "items", str(tmp_path / "cache"))
    assert pretrain.Corpus(folder).meta["documents"] == 2


def test_pages_of_a_smaller_vocabulary(sets, page_file):
    """--vocab 30: of each page the thirty commonest items are left, also to be asked for, and no special."""
    run = pretrain.Run(pretrain.parser().parse_args(sets("--vocab", 30)))
    for step in range(run.batches.steps_per_epoch):
        ids, *_ = run.batches.step(step, slice(0, 8))
        assert set(ids[ids < FIRST].tolist()) <= {PAD} and ((ids >= FIRST).sum(1) >= 2).all()
    inputs, labels = run.corrupted(*run.batches.held_out(slice(0, len(run.batches.held))))
    assert ((inputs == MASK) == (labels != -100)).all() and (labels != -100).sum(1).eq(1).all()
    assert inputs.max() < FIRST + 30 and UNK not in inputs


def test_pages_of_a_size_go_together(page_file, tmp_path_factory):
    """The passes of a step hold the same rows as before, sorted by size: less to fill up, nothing lost."""
    cache = tmp_path_factory.getbasetemp() / "cache"
    corpus = pretrain.Corpus(pretrain.prepare(str(page_file), "items", str(cache)))
    made = pretrain.Pages(corpus, 9, 24, FIRST + 120, 0)
    passes = made.by_size(2, [slice(12, 18), slice(18, 24)])
    assert sorted(np.concatenate(passes)) == list(range(12, 24)) and [len(p) for p in passes] == [6, 6]
    small, large = (made.step(2, rows)[0] for rows in passes)
    assert small.shape[1] < large.shape[1] and (small != PAD).sum(1).max() <= (large != PAD).sum(1).min()
    whole = made.step(2, slice(12, 24))[0]
    rows = {tuple(i for i in row.tolist() if i) for row in whole}
    assert rows == {tuple(i for i in row.tolist() if i) for part in (small, large) for row in part}


def test_every_page_has_a_question():
    """A page of three is masked nowhere in 0.85³ = 61 % of its turns; here at its least chance then."""
    ids = torch.tensor([[FIRST, FIRST + 1, FIRST + 2, PAD]]).repeat(4_000, 1)
    chance = torch.rand(3, 4_000, 4)
    _, labels = pretrain.corrupt_items(ids, chance, ids)
    scored = labels != -100
    assert (scored.sum(1) >= 1).all() and not scored[:, 3].any()
    usual = pretrain.corrupt_mlm(ids, chance, ids)[1] != -100
    assert (scored[usual.any(1)] == usual[usual.any(1)]).all()
    alone = scored[~usual.any(1)]
    share = (~usual.any(1)).float().mean()
    assert (alone.sum(1) == 1).all() and abs(share - 0.85 ** 3) < 6 * 0.49 / 4_000 ** 0.5
    assert (alone[:, :3].float().argmax(1) == chance[0][~usual.any(1)][:, :3].argmin(1)).all()


def test_items_are_masked_whole():
    """All m hashes of an item together: corruption acts on items, before they become hashes."""
    net, encoder = bloom_model()
    ids = torch.arange(FIRST, FIRST + 50).view(10, 5)
    inputs, labels = pretrain.corrupt_items(ids, torch.rand(3, 10, 5), ids.flip(0))
    before, after = net.codes[ids], net.codes[inputs]
    changed = (before != after).sum(-1)
    special = inputs == MASK
    assert (changed[special] == 2).all() and (changed[labels == -100] == 0).all() and special.any()
    assert (inputs[~special] >= FIRST).all()


def test_loss_of_hashes_by_hand():
    """Cross-entropy of each hash over all rows, averaged over the m; recall through the search."""
    net, encoder = bloom_model()
    inputs = torch.tensor([[FIRST + 1, MASK, FIRST + 3], [MASK, FIRST + 9, PAD]])
    labels = torch.tensor([[-100, FIRST + 5, -100], [FIRST + 8, -100, -100]])
    loss, counts = pretrain.loss_hash(net, inputs, labels)
    every = net(inputs, at=torch.tensor([1, 3])).log_softmax(-1)
    expected = -sum(every[i, j, encoder.codes()[label, j]] for i, label in enumerate((FIRST + 5, FIRST + 8))
                    for j in range(2)) / 2
    torch.testing.assert_close(loss, expected)
    logits = net(inputs, at=torch.tensor([1, 3]))
    left_out = torch.tensor([[1, 3], [9, -1]])  # what stands there already
    logp = model.hash_logp(logits, encoder.bloom)
    _, _, certified, _ = infer.beam_search(logp, encoder.bloom, exclude=left_out)
    found, _ = infer.exhaustive(logp, encoder.bloom, exclude=left_out)
    ranks = [row.index(i) if i in row else 99 for row, i in zip(found.tolist(), (5, 8))]
    assert counts.tolist()[:3] == [sum(rank < k for rank in ranks) for k in (1, 10, 20)]
    assert counts[3] == certified.sum() and counts[-1] == 2
    net.train()
    assert not pretrain.loss_hash(net, inputs, labels)[1].any()  # no search in training
    report = pretrain.report_hash([1, 2, 3, 4, 2.5, 5])
    assert report == {"rec@1": 0.2, "rec@10": 0.4, "rec@20": 0.6, "certified": 0.8, "hashes_right": 0.5}


def test_the_full_vocabulary_is_never_built_in_training():
    """No tensor of floats in a step, forward or back, has as many numbers as there are items."""
    from torch.utils._python_dispatch import TorchDispatchMode
    largest = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            largest.extend(t.numel() for t in torch.utils._pytree.tree_leaves(out)
                           if isinstance(t, torch.Tensor) and t.is_floating_point())
            return out

    net, _ = bloom_model(n=40_009, alpha=97)
    net.train()
    inputs = torch.tensor([[FIRST + 1, MASK, FIRST + 30_000]])
    labels = torch.tensor([[-100, FIRST + 5, -100]])
    with Watch():
        loss, _ = pretrain.loss_hash(net, inputs, labels)
        loss.backward()
    assert max(largest) == net.embedding.weight.numel() < 40_009 / 3
    net.eval()  # and the watch would see it
    with Watch():
        infer.exhaustive(torch.randn(1, 2, net.bloom.buckets), net.bloom)
    assert max(largest) == 40_009


def test_sampled_softmax_is_unbiased():
    """The sum of exp over the drawn rows, each less log(S q), has the sum over all as its mean; six sigma.

    And with draws enough the loss is that of all rows; a draw of the right row does not count.
    """
    torch.manual_seed(1)
    n = 113
    drawn, logq = pretrain.log_uniform(200_000, n, "cpu")
    share = torch.bincount(drawn, minlength=n) / 200_000
    q = torch.tensor([math.log((i + 2) / (i + 1)) / math.log(n + 1) for i in range(n)])
    assert abs(q.sum() - 1) < 1e-6 and ((share - q).abs() < 6 * (q / 200_000).sqrt()).all()
    torch.testing.assert_close(logq.exp(), q[drawn])
    logits = torch.randn(n)
    estimates = (logits[drawn] - logq).exp()
    drawn_far, far = pretrain.log_uniform(99, 5_281_889, "cpu")  # rare rows: q is small and still right
    want = [math.log(math.log1p(1 / (i + 1)) / math.log(5_281_890)) for i in drawn_far.tolist()]
    torch.testing.assert_close(far, torch.tensor(want), rtol=1e-6, atol=1e-6)
    assert abs(estimates.mean() - logits.exp().sum()) < 6 * estimates.std() / 200_000 ** 0.5

    net = tiny_model(emb="lookup", head="mlm", rows=n + 5)
    net.embedding.weight.data *= 30
    net.head.bias.data[5 + 2] = 9  # a likely answer, which is often drawn: counted twice it would show
    net.set_codes(torch.tensor([[0], [1], [2], [3], [4], [3], *[[FIRST - 1 + i] for i in range(n)]]))
    inputs, labels = torch.tensor([[FIRST, MASK, FIRST + 3]]), torch.tensor([[-100, FIRST + 2, -100]])
    exact, counts = pretrain.loss_sampled(net, inputs, labels)  # in evaluation: exact
    assert (exact, counts.tolist()) == (pretrain.loss_mlm(net, inputs, labels)[0], [*counts[:3].tolist(), 1])
    logits = net(inputs, at=torch.tensor([1]))[0, 5:]
    net.train()
    losses = torch.stack([pretrain.loss_sampled(net, inputs, labels)[0].detach() for _ in range(60)])
    over_items = logits.logsumexp(0) - logits[2]  # no special among them
    assert abs(losses.mean() - over_items) < 6 * losses.std() / 60 ** 0.5 + 1e-3 and losses.std() > 0


@pytest.mark.parametrize("more", [(), ("--emb", "lookup"), ("--emb", "lookup", "--objective", "sampled"),
                                  ("--emb", "median"),
                                  ("--coherent", "1"), ("--attn", "lsh"), ("--vocab", "100")])
def test_sets_train_and_are_read_back(sets, tmp_path, capsys, more):
    sets = functools.partial(sets, alpha=None if {"lookup", "median"} & set(more) else 5)
    result = pretrain.main(sets(*more))
    assert {"rec@1", "rec@10", "rec@20"} <= set(result)
    reader = infer.Reader(tmp_path / "sets")
    said = capsys.readouterr().out
    assert "2 layers" not in said and "split items" in said
    name = next(w for w in reader.words if " " not in w)
    found = infer.look(reader, [f"{name} [MASK]"], 3)
    if "lookup" in more:
        assert len(found["masks"][0]) == 3
        assert len(infer.look(reader, [f"{name} [MASK]"], 10**6)["masks"][0]) == len(reader.encoder.words)
    else:
        [missing] = found["missing"]
        assert len(missing["items"]) == 3 and missing["certified"]
        total = 100 if "100" in more else 120
        assert missing["total"] == total
        everything = infer.look(reader, [f"{name} [MASK]"], total)["missing"][0]["items"]
        assert len(everything) == total - 1 and name not in dict(everything)  # which the set has
    resumed = pretrain.main(sets(*more))
    assert resumed == result


def test_superbloom_learns_which_names_go_together(sets, tmp_path, capsys):
    """Ten names of a group, nine at most on a page: with the group known, one of at most eight is right."""
    result = pretrain.main(sets("--steps", 700, "--lr", 3e-3, "--eval_every", 700, "--batch", 32,
                                "--length", 9, "--layers", 2, "--width", 64))
    assert result["rec@10"] > 0.6 and result["rec@1"] < 0.5  # among 120; by chance 0.08
    popularity, *_, walks = bench.neighbours(sets()[3], sets()[5], 9)
    assert popularity["rec@10"] < 0.2 and walks["rec@10"] > 0.8
    capsys.readouterr()
    infer.main(["--ckpt", str(tmp_path / "sets"), "--top_k", "3", "Miles  Davis [MASK]"])
    said = capsys.readouterr().out
    reader = infer.Reader(tmp_path / "sets")
    assert "of 120 scored, certified" in said and len(said.splitlines()) == 4
    for text in ("Mile [MASK]", "miles davis [MASK]"):
        refused(infer.main, ["--ckpt", str(tmp_path / "sets"), text], says="is none of the 120 items")
    assert reader.like("miles davis")[0] == "Miles Davis"
    best = reader.complete("Miles Davis [MASK]", 5)
    logits = reader.model(torch.tensor([[FIRST + reader.encoder.words.index("Miles Davis"), MASK]]),
                          at=torch.tensor([1]))
    ids, scores = infer.exhaustive(model.hash_logp(logits, reader.encoder.bloom), reader.encoder.bloom, 5,
                                   exclude=torch.tensor([[reader.encoder.words.index("Miles Davis")]]))
    assert [name for name, _ in best[0]["items"]] == [reader.encoder.words[i] for i in ids[0].tolist()]
    every = [name for name, _ in reader.complete("Miles Davis [MASK]", 999)[0]["items"]]
    assert sorted([*every, "Miles Davis"]) == sorted(reader.encoder.words)  # all but what stands there
    [one] = reader.complete("Miles Davis [MASK]", 5, beam=1)
    assert one["scored"] <= 10 < best[0]["scored"]
    (tmp_path / "pages.txt").write_text("Miles Davis\t[MASK]\nnobody [MASK]\n")
    capsys.readouterr()
    infer.main(["--ckpt", str(tmp_path / "sets"), "--file", str(tmp_path / "pages.txt"), "--top_k", "5"])
    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    assert first["missing"][0]["items"] == [list(pair) for pair in best[0]["items"]]
    assert (first["line"], second["line"]) == (1, 2) and "error" in second
    (tmp_path / "pages.jsonl").write_text('{"title": "t", "links": ["Miles Davis", "[MASK]"]}\n["a"]\n')
    infer.main(["--ckpt", str(tmp_path / "sets"), "--file", str(tmp_path / "pages.jsonl"), "--top_k", "5"])
    third, fourth = map(json.loads, capsys.readouterr().out.splitlines())
    assert third["missing"] == first["missing"] and "'a' is none" in fourth["error"]
    for text, hint in (("[mask]", "do you mean [MASK]?"), ("a,b [MASK]", "between spaces or tabs")):
        refused(infer.main, ["--ckpt", str(tmp_path / "sets"), text], says=hint)
    assert len(reader.neighbours("Miles Davis", 2)) == 2


def test_bench_of_sets(sets, tmp_path, monkeypatch):
    """Recall by beam width rises to that of the certain search, the run's own evaluation."""
    result = pretrain.main(sets("--steps", 100, "--eval_every", 100, "--lr", 3e-3))
    args = types.SimpleNamespace(runs=[str(tmp_path / "sets")], data=sets()[3], cache=sets()[5])
    rows = {row["name"]: row for row in bench.bench_beams(args)}
    for key in ("rec@1", "rec@10", "rec@20"):
        assert rows["sets, until certified"][key] == pytest.approx(result[key]), key
        assert rows["sets, B 1"][key] <= rows["sets, until certified"][key] + 0.1
    assert rows["sets, until certified"]["certified"] == 100
    assert rows["sets, B 1"]["scored"] <= 10 < rows["sets, B 10"]["scored"] <= 120
    deciles = [row["rec@1"] for name, row in rows.items() if "by frequency" in name]
    some = [share for share in deciles if share is not None]
    assert len(deciles) == 10 and min(some) <= result["rec@1"] <= max(some)
    assert rows["co-occurrence: walks"]["rec@10"] > 0.8
    with pytest.raises(InputError, match="trained on other pages"):
        args.data = str(other_pages(tmp_path))
        bench.bench_beams(args)


def other_pages(tmp_path):
    """Another file of pages."""
    (tmp_path / "other.txt").write_text("a b\n" * 30)
    return tmp_path / "other.txt"


def test_neighbours_spelt_out(tmp_path):
    """Given a, on pages {a b}, {a b c}: counts b 2, c 1; a walk gives b (1/2 + 1/3) / 2. Here by loops."""
    rng = random.Random(2)
    lines = [" ".join(rng.sample("abcdefghijklmnop", rng.randint(2, 6))) for _ in range(120)]
    (tmp_path / "p.txt").write_text("\n".join(lines))
    where = str(tmp_path / "p.txt"), str(tmp_path / "cache")
    rows = {row["name"].split(": ")[-1]: row for row in bench.neighbours(*where)}
    corpus = pretrain.Corpus(pretrain.prepare(where[0], "items", where[1]))
    pages = pretrain.Pages(corpus, 32, 1, 99, 0)
    ends = pages.first + pages.size
    train = [set(corpus.ids[pages.first[i]:ends[i]].tolist()) for i in corpus.pages()[0]]
    often = Counter(i for page in train for i in page)
    ids, chance, _ = pages.held_out(slice(0, 12))
    hits = Counter()
    for row, asked in zip(ids.tolist(), chance[0].argmin(1).tolist()):
        known = {i for k, i in enumerate(row) if k != asked and i != PAD}
        score = {name: Counter() for name in rows}
        for item in range(FIRST, FIRST + 16):
            score["popularity"][item] = often[item]
            for a in known:
                both = [page for page in train if {a, item} <= page]
                score["counts"][item] += len(both)
                score["cosines"][item] += len(both) / math.sqrt(max(often[a] * often[item], 1))
                score["walks"][item] += sum(1 / len(page) for page in both) / max(often[a], 1)
        for name, found in score.items():
            best = sorted((i for i in found if i not in known), key=lambda i: (-round(found[i], 9), i))
            for k in (1, 10):
                hits[name, k] += row[asked] in best[:k]
    for name, row in rows.items():
        for k in (1, 10):
            ties = 1 if name == "cosines" else 0  # which rounding may break otherwise
            assert abs(row[f"rec@{k}"] * 12 - hits[name, k]) < ties + 1e-6, name
    assert len({row["rec@1"] for row in rows.values()}) > 1


def test_same_size_is_the_largest_that_fits():
    width = bench.same_size(14_109, 4)

    def size(**changes):
        with torch.device("meta"):
            shape = model.PRESETS["superbloom-small"] | changes
            return model.count_parameters(Model(Config(**shape)))["total"]

    whole = size(rows=2 * (3_528 + 5))
    row = dict(emb="lookup", head="mlm", rows=14_109 + 5)
    assert size(**row, width=width, ffn=2 * width) <= whole < size(**row, width=width + 4, ffn=2 * width + 8)


def test_sets_resume_exactly_and_two_ranks_are_one(sets, tmp_path):
    pretrain.main(sets("--dropout", 0.1, out="whole"))
    die_at_step_3(sets("--dropout", 0.1, out="broken"))
    pretrain.main(sets("--dropout", 0.1, out="broken"))
    assert same(weights(tmp_path / "whole"), weights(tmp_path / "broken"))
    shutil.rmtree(tmp_path / "whole")
    pretrain.main(sets("--lr", 1e-3, out="whole"))
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "pretrain.py"]
    done = run_script(*command, *sets("--micro", 2, "--lr", 1e-3, out="two"),
                      env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    a, b = (model.load_checkpoint(tmp_path / name)["model"] for name in ("whole", "two"))
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=1e-4, atol=1e-5)


def test_text_of_phrases_through_bloom(small, tmp_path, capsys):
    """[SB §4] in small: words, pairs of words and pieces, hashed, with places; and back."""
    result = pretrain.main(small("--emb", "bloom", "--split", "phrases", "--vocab", 500, "--alpha", 3))
    assert result["certified"] > 0
    reader = infer.Reader(tmp_path / "run")
    assert reader.config.order and any(" " in word for word in reader.encoder.words)
    [missing] = infer.look(reader, ["a [MASK]"], 4)["missing"]
    assert len(missing["items"]) == 4
    again = pretrain.main(small("--emb", "bloom", "--split", "phrases", "--vocab", 500, "--alpha", 3,
                                "--objective", "sr", out="sr"))  # any objective of text
    assert "f1_random" in again


def test_bad_sets_end_with_code_2(sets, tmp_path, small):
    (tmp_path / "one.txt").write_text("a b\nc d\n")
    for flags, says in ((("--alpha", "60"), "is too large"), (("--field", "nowhere"), "no such list"),
                        (("--objective", "sr"), "a set has no order"), (("--objective", "mlm"), "hash-mlm"),
                        (("--emb", "lookup"), "--alpha is of --emb bloom"),
                        (("--coherent", "3"), "at most 2"), (("--mask", "1"), "--mask 1.0"),
                        (("--data", str(tmp_path / "one.txt"), "--alpha", "2"), "wanted a batch"),
                        (("--data", "python-names", "--field", "a"), "has no columns")):
        refused(pretrain.main, sets(*flags, out="bad"), says=says)
    for flags, says in ((("--field", "a"), "--split items"), (("--mask", "0.2"), "--mask is of")):
        refused(pretrain.main, small(*flags), says=says)
    pretrain.main(sets())
    refused(pretrain.main, sets("--alpha", "4"), says="alpha is 5 there, 4 here")
    refused(infer.main, ["--ckpt", str(tmp_path / "sets"), "no mask"], says="none of the 120")
    refused(infer.main, ["--ckpt", str(tmp_path / "sets"), "--near", "zzz"], says="none of the 120")
    refused(finetune.main, ["--ckpt", str(tmp_path / "sets"), "--task", "pydoc"], says="knows sets of items")
    checkpoint = torch.load(tmp_path / "sets" / "ckpt.pt")
    checkpoint["encoder"]["bloom"]["check"] = "00000000"
    torch.save(checkpoint, tmp_path / "sets" / "ckpt.pt")
    refused(infer.main, ["--ckpt", str(tmp_path / "sets"), "a [MASK]"], says="unlike the one")
    for preset, alpha in (("superbloom", 50), ("superbloom-small", None)):
        args = pretrain.parser().parse_args(["--preset", preset])
        config = pretrain.resolve(args, 1)
        assert (args.emb, args.split, args.data) == ("bloom", "items", "python-names")
        assert args.objective == "hash-mlm" and args.alpha == (alpha or 25)
        assert not config.order and config.act == "relu" and config.length == 32


# ---------------------------------------------------------------------------------------------------------
# finetune.py


def test_pack_by_hand():
    """10 and 3 words with room for 8: the longer gives up five. On a tie the second loses first."""
    a, b = np.arange(100, 110, dtype=np.int32), np.arange(200, 203, dtype=np.int32)
    ids, cut = hashing.pack(a, b, 12)
    assert ids.tolist() == [CLS, *range(100, 105), SEP, SEP, 200, 201, 202, SEP] and cut == 5
    for words, length, wanted in ((a, 5, [CLS, 100, 101, 102, SEP]), (b, 9, [CLS, 200, 201, 202, SEP])):
        ids, cut = hashing.pack(words, None, length)
        assert ids.tolist() == wanted and cut == len(words) - 3
    for n in range(7):
        for m in range(7):
            for room in range(1, 9):
                x, y = list(range(n)), list(range(m))
                while len(x) + len(y) > room:  # the definition
                    (x if len(x) > len(y) else y).pop()
                ids, cut = hashing.pack(np.arange(n), np.arange(m), room + 4)
                assert ids.tolist() == [CLS, *x, SEP, SEP, *y, SEP] and cut == n + m - len(x) - len(y)


@pytest.mark.parametrize("stride", [1, 3, 99])
def test_windows_hold_every_word_and_the_question(stride):
    rng = random.Random(stride)
    for _ in range(50):
        question = np.arange(1000, 1000 + rng.randint(1, 12))
        context, length = np.arange(rng.randint(1, 40)), rng.randint(8, 21)
        found = hashing.windows(question, context, length, stride)
        kept = question[:(length - 4) // 2]
        for ids, first, start, stop in found:
            assert len(ids) <= length and ids[1:1 + len(kept)].tolist() == kept.tolist()
            assert ids[first:first + stop - start].tolist() == list(range(start, stop)) and ids[-1] == SEP
        assert {i for _, _, a, b in found for i in range(a, b)} == set(context.tolist())
        assert all(b[2] - a[2] == min(stride, length - 4 - len(kept)) for a, b in zip(found, found[1:]))
    # the last one ends where the context ends, and none is inside another
    assert all(a[3] < b[3] for a, b in zip(found, found[1:])) and found[-1][3] == len(context)


def test_best_spans_are_the_best_of_all_pairs():
    logits = torch.randn(5, 11, 2)
    inside = torch.zeros(5, 11, dtype=torch.bool)
    for row, (a, b) in zip(inside, [(3, 11), (1, 2), (4, 9), (5, 5), (2, 8)]):
        row[a:b] = True
    scores, starts, ends, null = model.best_spans(logits, inside, 7, 3)
    assert torch.equal(null, logits[:, 0].sum(1))
    for row in range(5):
        pairs = {(i, j): (logits[row, i, 0] + logits[row, j, 1]).item() for i in range(11)
                 for j in range(i, min(i + 3, 11)) if inside[row, i] and inside[row, j]}
        wanted = sorted(pairs, key=pairs.get, reverse=True)[:7]
        found = zip(starts[row].tolist(), ends[row].tolist(), scores[row].tolist())
        got = [(i, j) for i, j, score in found if score > -math.inf]
        assert got == wanted
        torch.testing.assert_close(scores[row, :len(wanted)], torch.tensor([pairs[p] for p in wanted]))


def test_metrics_by_hand():
    """Six rows, truth 0 0 1 1 1 2, guess 0 1 1 1 0 0: three right. Class 1: 2 right of 3 guessed, 3 true."""
    guess, truth = np.array([0, 1, 1, 1, 0, 0]), np.array([0, 0, 1, 1, 1, 2])
    assert finetune.accuracy(guess, truth) == 0.5
    assert finetune.f1(guess, truth) == pytest.approx(2 * 2 / (3 + 3))
    assert finetune.macro_f1(guess, truth) == pytest.approx((2 * 1 / (3 + 2) + 4 / 6 + 0) / 3)
    assert finetune.f1(guess * 0, truth * 0) == 0.0  # a class that nobody has: 0/0
    assert finetune.macro_f1(np.array([1, 1]), np.array([1, 1])) == 1.0  # class 0 absent, and not counted
    # Matthews: tp 2, tn 1, fp 1, fn 2 -> (2·1 − 1·2) / √(3·4·2·3) = 0; then one more true negative
    matthews = finetune.METRICS["matthews"]
    assert abs(matthews(np.array([1, 1, 1, 0, 0, 0]), np.array([1, 1, 0, 1, 1, 0]))) < 1e-12
    got = matthews(np.array([1, 1, 1, 0, 0, 0, 0]), np.array([1, 1, 0, 1, 1, 0, 0]))
    assert got == pytest.approx((2 * 2 - 1 * 2) / math.sqrt(3 * 4 * 3 * 4))
    assert matthews(np.ones(5, int), np.array([0, 1, 1, 1, 0])) == 0.0  # a constant


def test_correlations_by_hand():
    """1 2 3 4 against 1 3 2 4: ranks differ by 0 1 1 0, so 1 − 6·2 / (4·15) = 0.8. Ties share a rank."""
    a, b = np.array([1.0, 2, 3, 4]), np.array([10.0, 30, 20, 99])
    assert finetune.spearman(a, b) == pytest.approx(0.8)
    assert finetune.pearson(a, b) == pytest.approx(np.corrcoef(a, b)[0, 1])
    tied = np.array([5.0, 7, 7, 9])  # ranks 1 2.5 2.5 4
    assert finetune.spearman(a, tied) == pytest.approx(np.corrcoef([1, 2, 3, 4], [1, 2.5, 2.5, 4])[0, 1])
    assert finetune.spearman(a, tied * 0) == finetune.pearson(tied * 0, a) == 0.0
    assert finetune.spearman(a, -a) == pytest.approx(-1)


def test_exact_match_and_f1_by_hand():
    """[SQ §6] "the Cat sat." against "A cat slept": cat of (cat sat) and (cat slept), F1 1/2."""
    assert finetune.normalise("The U.S. Army!") == ["us", "army"]
    assert finetune.normalise("a theory, an answer") == ["theory", "answer"]  # articles are whole words
    two = [finetune.normalise(t) for t in ("A cat slept", "dog")]
    assert finetune.exact_and_f1(finetune.normalise("the Cat sat."), two) == (0.0, 0.5)
    assert finetune.exact_and_f1(["dog"], two) == (1.0, 1.0)
    assert finetune.exact_and_f1(["cat", "cat"], [["cat"]]) == (0.0, pytest.approx(2 / 3))  # counted once
    assert finetune.exact_and_f1([], [[]]) == (1.0, 1.0)
    assert finetune.exact_and_f1([], [[], ["dog"]], null=False) == (1.0, 0.0)  # v1's script has it so
    assert finetune.exact_and_f1([], two) == finetune.exact_and_f1(["dog"], [[]]) == (0.0, 0.0)


def test_learning_rate_by_hand():
    """100 steps, 10 to warm up, five cosines of 18: 1 at 10, 28, 46 ..., half-way down 9 steps later."""
    assert [finetune.schedule(s, 100, 10) for s in (0, 4, 9)] == [0.1, 0.5, 1.0]
    for start in range(10, 100, 18):
        assert finetune.schedule(start, 100, 10) == 1.0
        assert finetune.schedule(start + 9, 100, 10) == pytest.approx(0.5)
        last = 0.5 * (1 + math.cos(math.pi * 17 / 18))
        assert finetune.schedule(start + 17, 100, 10) == pytest.approx(last)


def test_batches_hold_everything_once_and_pad_little():
    lengths = np.random.default_rng(0).integers(3, 60, 1_009)
    for rng in (None, np.random.default_rng(1)):
        found = finetune.batches(lengths, 13, rng)
        assert sorted(np.concatenate(found).tolist()) == list(range(1_009)) and len(found) == 78
        padded = sum(lengths[chosen].max() * len(chosen) for chosen in found)
        assert padded < 1.1 * lengths.sum()  # in random batches of 13 about 1.7
    a, b = (finetune.batches(lengths, 13, np.random.default_rng(1)) for _ in range(2))
    assert all((x == y).all() for x, y in zip(a, b))
    ids, mask = finetune.pad([np.array([1, 7, 8]), np.array([1, 9])])
    assert ids.tolist() == [[1, 7, 8], [1, 9, PAD]] and mask.tolist() == [[True] * 3, [True, True, False]]
    assert finetune.pad([np.array([1, 7, 8])])[1] is None
    shapes = {finetune.pad([np.ones(n, int)], 100)[0].shape[1] for n in range(1, 101)}
    assert shapes == {1, 2, 4, 8, 16, 32, 64, 100}  # never beyond the model's positions


TEXTS = ['He said "no', "a\u2028b", "naïve 日本"]


def test_tables_of_every_kind(tmp_path):
    """A quote is a character in a .tsv and means something in a .csv; all cells are strings but in .jsonl."""
    rows = [dict(text=t, label=str(i % 2)) for i, t in enumerate(TEXTS)]
    tsv = "text\tlabel\n" + "".join(f"{r['text']}\t{r['label']}\r\n" for r in rows)
    (tmp_path / "a.tsv").write_text("\ufeff" + tsv, encoding="utf-8", newline="")
    with gzip.open(tmp_path / "b.tsv.gz", "wt", encoding="utf-8", newline="") as file:
        file.write(tsv)
    with open(tmp_path / "c.csv", "w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([["text", "label"], *(r.values() for r in rows)])
    (tmp_path / "d.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    (tmp_path / "e.json").write_text(json.dumps(rows))
    import datasets

    datasets.Dataset.from_list(rows).to_parquet(str(tmp_path / "f.parquet"))
    for path in sorted(tmp_path.iterdir()):
        assert finetune.read_table(str(path)) == (["text", "label"], rows), path
    (tmp_path / "g.tsv").write_text(tsv + "one cell\n", encoding="utf-8")
    with pytest.raises(InputError, match="1 of 4 rows do not have the 2 columns text, label"):
        finetune.read_table(str(tmp_path / "g.tsv"))
    (tmp_path / "h.tsv").write_text("text\tlabel\n" + "a\tb\n" * 200 + "one cell\n", encoding="utf-8")
    assert len(finetune.read_table(str(tmp_path / "h.tsv"))[1]) == 200  # a few are left out, and said so
    (tmp_path / "i.jsonl").write_text('{"a": \n')
    (tmp_path / "j.jsonl").write_text("[1]\n")
    (tmp_path / "l.parquet").write_bytes(b"PAR1 not really")
    (tmp_path / "m.tsv.gz").write_bytes(b"\x1f\x8b not really")
    (tmp_path / "n.json").write_text("5")
    (tmp_path / "o.xls").write_text("")
    for name, says in (("i.jsonl", "could not be read as"), ("j.jsonl", "named fields"),
                       ("k.tsv", "no such file"), ("o.xls", "wanted"),
                       ("l.parquet", "could not"), ("m.tsv.gz", "could not"), ("n.json", "named fields")):
        with pytest.raises(InputError, match=says):
            finetune.read_table(str(tmp_path / name))


@pytest.fixture(scope="module")
def started(text_file, tmp_path_factory):
    """Folders of pre-trained models of a second each: proj, a lookup of BPE pieces, LSH attention."""
    cache, folder = tmp_path_factory.getbasetemp() / "cache", tmp_path_factory.mktemp("started")
    for name, more in (("proj", []), ("bpe", ["--emb", "lookup", "--vocab", "300"]),
                       ("lsh", ["--attn", "lsh", "--lsh_hashes", "2", "--lsh_redraw"])):
        pretrain.main(["--data", str(text_file), "--cache", str(cache), *SMALL, "--length", "33",
                       "--out", str(folder / name), *more])
    return folder


WORDS = words_like(60, 3)


def sentence(rng, *more):
    words = rng.sample(WORDS, rng.randint(3, 9)) + list(more)
    rng.shuffle(words)
    return " ".join(words)


def write_tsv(path, columns, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = ([columns] if columns else []) + rows
    path.write_text("".join("\t".join(map(str, row)) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def one_text(rng, n):
    """A word tells the class: "zebra" or "quagga"."""
    labels = [rng.choice(["zebra", "quagga"]) for _ in range(n)]
    return [(sentence(rng, label), dict(zebra="up", quagga="down")[label]) for label in labels]


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    """Flags that name a task of one's own, which a bag of words can do."""
    folder, rng = tmp_path_factory.mktemp("own"), random.Random(5)
    train = write_tsv(folder / "train.tsv", ["text", "label"], one_text(rng, 397))
    dev = write_tsv(folder / "dev.tsv", ["text", "label"], one_text(rng, 101))
    return ["--train", train, "--dev", dev, "--text", "text", "--label", "label"]


QUICK = ["--device", "cpu", "--dtype", "float32", "--no-compile", "--epochs", "3", "--lr", "1e-2",
         "--batch", "16"]


def tune(started, out, *more, name="proj"):
    """in: folder of started; out; flags; out: results.json of finetune.main"""
    flags = ["--ckpt", str(started / name), *QUICK, "--out", str(out), *map(str, more)]
    result = finetune.main(flags)
    assert result == json.loads((Path(out) / "results.json").read_text())
    return result


# pieces are many: some texts are cut
@pytest.mark.parametrize("name, least", [("proj", 95), ("bpe", 85), ("lsh", 95)])
def test_own_file_end_to_end(started, own, tmp_path, capsys, name, least):
    """Learns it, beats the majority, leaves a checkpoint that infer.py and --epochs 0 score the same."""
    flags = [*own, "--seeds", "2"] + (["--pool", "cls", "--epochs", "6"] if name == "bpe" else [])
    result = tune(started, tmp_path / "a", *flags, name=name)["tasks"]["own"]
    assert result["metric"] == "accuracy" and result["seeds"] == [0, 1] and result["n"] == 101
    assert result["min"] > least > 60 > result["majority"] > 40 and result["bag_of_words"] > least
    assert result["mean"] == pytest.approx(np.mean(result["values"]))
    assert result["std"] == pytest.approx(np.std(result["values"], ddof=1))
    assert sorted(p.name for p in (tmp_path / "a").iterdir()) == ["ckpt.pt", "log.jsonl", "results.json"]
    out = capsys.readouterr().out
    assert "majority" in out and "bag of words" in out and "next: python infer.py" in out
    again = finetune.main(["--ckpt", str(tmp_path / "a"), *QUICK, *own, "--epochs", "0",
                           "--out", str(tmp_path / "b")])
    assert again["tasks"]["own"]["mean"] == result["max"]
    reader = infer.Reader(str(tmp_path / "a"))
    _, rows = finetune.read_table(own[3])
    right = sum(reader.classify(row["text"])[0][0] == row["label"] for row in rows)
    assert 100 * right / len(rows) == pytest.approx(result["max"])
    assert {label for label, _ in reader.classify("a")} == {"up", "down"}
    assert sum(p for _, p in reader.classify("a")) == pytest.approx(1, abs=1e-6)


def test_order_of_labels_is_of_no_consequence(started, tmp_path, monkeypatch, capsys):
    """A hub that numbers the classes another way, a file of names, one of numbers: the same score."""
    import datasets

    rng, task = random.Random(2), finetune.GLUE["rte"]
    rows = [(sentence(rng), sentence(rng, rng.choice(WORDS)), rng.choice(task.labels)) for _ in range(120)]
    columns = ["sentence1", "sentence2", "label"]
    (tmp_path / "d").mkdir()
    kinds = {}
    for kind, names in (("hub", task.labels), ("permuted", task.labels[::-1])):
        features = datasets.Features(dict(zip(columns, [datasets.Value("string")] * 2)),
                                     label=datasets.ClassLabel(names=list(names)))
        kinds[kind] = datasets.Dataset.from_list([dict(zip(columns, row)) for row in rows], features=features)
    monkeypatch.setattr(finetune.GLUE["rte"], "rows", (120, 120))
    scores = []
    for kind, data in kinds.items():
        monkeypatch.setattr(datasets, "load_dataset", lambda *a, **k: data)
        assert data[0]["label"] == data.features["label"].str2int(rows[0][2])
        scores.append(tune(started, tmp_path / kind, "--task", "rte", "--seeds", "1"))
    for kind, label in (("names", str), ("digits", lambda name: task.labels.index(name))):
        for split in ("train", "dev"):
            written = [(a, b, label(c)) for a, b, c in rows]
            write_tsv(tmp_path / kind / "RTE" / f"{split}.tsv", columns, written)
        scores.append(tune(started, tmp_path / f"{kind}-out", "--task", "rte", "--seeds", "1",
                           "--data_dir", tmp_path / kind))
    assert all(score["tasks"] == scores[0]["tasks"] for score in scores)


def glue_folder(folder, monkeypatch, rows=37, names=finetune.AVERAGED + ("wnli",)):
    """A GLUE download in small: the original layouts and columns, digits or names as there."""
    rng = random.Random(9)
    for name in names:
        task = finetune.GLUE[name]
        monkeypatch.setattr(task, "rows", (rows, rows))
        texts = [t.split("|")[-1] for t in task.texts]
        label = task.label.split("|")[-1]
        words = name in ("mnli", "qnli", "rte")
        for split in ("train", *task.dev, *[d.replace("dev", "test") for d in task.dev]):
            found = []
            for i in range(rows):
                which = rng.randrange(len(task.labels or "12345"))
                first = [sentence(rng, WORDS[which]) for _ in texts]
                found.append([*first, task.labels[which] if words else which])
            if split.startswith("test"):
                write_tsv(folder / task.folder / f"{split}.tsv", ["index", *texts],
                          [[i, *row[:-1]] for i, row in enumerate(found)])
            elif name == "cola":
                found = [["gj04", row[-1], "", row[0]] for row in found]
                write_tsv(folder / "CoLA" / f"{split}.tsv", None, found)
            else:
                write_tsv(folder / task.folder / f"{split}.tsv", [*texts, label], found)
    return str(folder)


def test_glue_from_its_own_files_and_what_is_submitted(started, tmp_path, monkeypatch, capsys):
    folder = glue_folder(tmp_path / "glue", monkeypatch)
    result = tune(started, tmp_path / "out", "--task", "glue", "--data_dir", folder, "--seeds", "2",
                  "--epochs", "1", "--predict")
    assert list(result["tasks"]) == ["mnli", "qnli", "qqp", "rte", "sst2", "mrpc", "cola", "stsb"]
    by_seed = np.mean([r["values"] for r in result["tasks"].values()], 0)
    assert result["average"] == pytest.approx(by_seed.mean())
    assert result["average_std"] == pytest.approx(np.std(by_seed, ddof=1))
    metrics = {name: r["metric"] for name, r in result["tasks"].items()}
    assert metrics == dict(mnli="accuracy", qnli="accuracy", qqp="f1", rte="accuracy", sst2="accuracy",
                           mrpc="accuracy", cola="matthews", stsb="spearman")
    assert "mismatched_accuracy" in result["tasks"]["mnli"]["all_metrics"]
    files = {p.name: p.read_text().splitlines() for p in (tmp_path / "out").rglob("*.tsv")}
    assert set(files) == {"MNLI-m.tsv", "MNLI-mm.tsv", "QNLI.tsv", "QQP.tsv", "RTE.tsv", "SST-2.tsv",
                          "MRPC.tsv", "CoLA.tsv", "STS-B.tsv"}
    for name, lines in files.items():
        assert lines[0] == "index\tprediction" and len(lines) == 38
        assert [line.split("\t")[0] for line in lines[1:]] == list(map(str, range(37)))
        said = {line.split("\t")[1] for line in lines[1:]}
        if name[:4] in ("MNLI", "QNLI", "RTE."):
            assert said <= {"entailment", "neutral", "contradiction", "not_entailment"}
        elif name == "STS-B.tsv":
            assert all(0 <= float(x) <= 5 and len(x) == 5 for x in said)
        else:
            assert said <= {"0", "1"}
    reader = infer.Reader(str(tmp_path / "out" / "sst2"))  # what was submitted is what the checkpoint says
    _, rows = finetune.read_table(os.path.join(folder, "SST-2", "test.tsv"))
    said = [reader.classify(row["sentence"])[0][0] for row in rows]
    assert [["negative", "positive"][int(line.split("\t")[1])] for line in files["SST-2.tsv"][1:]] == said


def test_bad_tasks_are_refused(started, own, tmp_path, monkeypatch):
    folder = Path(glue_folder(tmp_path / "glue", monkeypatch, names=("sst2", "rte", "cola")))
    ours = ["--ckpt", str(started / "proj"), *QUICK]
    sst = [*ours, "--task", "sst2"]
    train, dev, test = (str(folder / "SST-2" / f"{split}.tsv") for split in ("train", "dev", "test"))
    minus = write_tsv(tmp_path / "minus.tsv", ["sentence", "label"], [("a", -1)])
    odd = write_tsv(tmp_path / "odd.tsv", ["sentence", "label"], [("a", "sideways")])
    number = write_tsv(tmp_path / "number.tsv", ["text", "label"], [("a", "1.5"), ("b", "high")])
    many = write_tsv(tmp_path / "many.tsv", ["text", "label"], [(f"a {i}", i / 7) for i in range(9)])
    empty = write_tsv(tmp_path / "empty.tsv", ["text", "label"], [])
    one = write_tsv(tmp_path / "one.tsv", ["text", "label"], [("a", "x"), ("b", "x")])
    gap = str(tmp_path / "gap.jsonl")
    Path(gap).write_text('{"text": "a", "label": "x"}\n{"text": "b"}\n')
    digits = write_tsv(tmp_path / "digits.tsv", ["text", "label"], [("a", 1), ("b", 2), ("c", 1)])
    other = write_tsv(tmp_path / "other.tsv", ["text", "label"], [("a", 3)])
    bare = tmp_path / "bare"
    shutil.copytree(folder / "SST-2", bare / "SST-2", ignore=shutil.ignore_patterns("test.tsv"))
    tuned = str(tmp_path / "sst")
    finetune.main([*sst, "--data_dir", str(folder), "--seeds", "1", "--epochs", "1", "--out", tuned])
    for flags, says in (
            ([*sst, "--train", train, "--dev", test], "labels of a test split of GLUE are not public"),
            ([*sst, "--train", train, "--dev", minus], "the label is -1; the labels of a test split"),
            ([*sst, "--train", train, "--dev", odd], "unknown label 'sideways'; wanted negative, positive"),
            ([*sst, "--train", odd, "--dev", str(folder / "RTE" / "dev.tsv")], "row 1: unknown label"),
            ([*sst, "--train", train, "--dev", str(folder / "RTE" / "dev.tsv")], "a column sentence, got"),
            ([*sst, "--data_dir", str(tmp_path)], "wanted train.tsv"),
            ([*sst, "--train", train], "go together"), ([*sst, "--text", "a"], "knows its columns"),
            ([*ours, "--train", train], "all of --train --dev --text --label"),
            ([*QUICK, "--task", "sst2"], "wanted --ckpt"),
            ([*sst, "--preset", "proformer"], "contradicts --ckpt"),
            ([*ours, *own, "--predict"], "--predict is for"),
            ([*ours, *own, "--out", str(started / "proj")], "the checkpoint's own folder"),
            ([*ours, *own, "--epochs", "0"], "scores a checkpoint of this very task"),
            ([*ours, "--ckpt", tuned, "--task", "rte", "--data_dir", str(folder), "--epochs", "0"],
             "scores a checkpoint of this very task"),
            ([*ours, *own, "--baseline", str(tmp_path)], "not the results of a fine-tuning"),
            ([*ours, *own, "--text", "title"], "wanted a column title, got text, label"),
            ([*ours, *own, "--text", "text,title"], "wanted a column title, got text, label"),
            ([*ours, *own, "--regression"], "wanted a number as the label, got"),
            ([*ours, *own, "--train", number, "--dev", number, "--regression"], "row 2: wanted a number"),
            ([*ours, *own, "--train", many], "predicted with --regression"),
            ([*ours, *own, "--train", empty], "no rows"),
            ([*ours, *own, "--ckpt", str(tmp_path / "no")], "no checkpoint"),
            ([*ours, *own, "--pool", "max"], "invalid choice"),
            ([*ours, "--task", "squad", "--train", train, "--dev", train], "not questions as in SQuAD"),
            ([*ours, "--task", "rte"], "could not be loaded from the hub"),
            ([*ours, *own, "--text", "a,b,c"], "one column, or two"),
            ([*ours, *own, "--stride", "3"], "for SQuAD alone"),
            ([*ours, *own, "--out", tuned], "holds the results of sst2"),
            ([*ours, *own, "--train", one], "nothing to learn"),
            ([*sst, "--data_dir", str(bare), "--predict"], "wanted test.tsv"),
            ([*ours, *own, "--train", gap], "row 2: unknown label ''"),
            ([*ours, *own, "--train", digits, "--dev", other], "unknown label '3'; wanted 1, 2"),
            ([*ours, *own, "--dev", write_tsv(tmp_path / "no.tsv", ["text", "x"], [("a", 1)])],
             "wanted a column label, got text, x\n")):
        where = [] if "--out" in flags else ["--out", str(tmp_path / "out")]
        refused(finetune.main, [*flags, *where], says=says)
    monkeypatch.setattr(finetune.GLUE["sst2"], "rows", (37, 38))
    refused(finetune.main, [*sst, "--data_dir", str(folder)], says="wanted the 38 rows of this split, got 37")


def test_regression_and_pairs(started, tmp_path, capsys):
    """How many words two texts share, from pairs in a .csv: learnable by comparing, in units of its own."""
    rng, folder = random.Random(4), tmp_path / "data"
    folder.mkdir()
    for split, n in (("train", 700), ("dev", 90)):
        with open(folder / f"{split}.csv", "w", newline="") as file:
            rows = csv.writer(file)
            rows.writerow(["a", "b", "score"])
            for _ in range(n):
                amount = rng.randrange(5)
                rows.writerow([sentence(rng), " ".join(["more"] * amount + ["end"]), 1000 + 100 * amount])
    result = tune(started, tmp_path / "out", "--train", folder / "train.csv", "--dev", folder / "dev.csv",
                  "--text", "a,b", "--label", "score", "--regression", "--seeds", "1", "--epochs", "6")
    task = result["tasks"]["own"]
    assert task["metric"] == "spearman" and task["mean"] > 90 and task["all_metrics"]["pearson"] > 90
    assert task["majority"] is None and task["bag_of_words"] is None
    # another regression starts anew from it: other columns, another scale, a fresh head
    with open(folder / "big.csv", "w", newline="") as file:
        csv.writer(file).writerows([["a", "value"]] + [[f"one {i}", 9e6 + i] for i in range(20)])
    flags = finetune.parser().parse_args(["--ckpt", str(tmp_path / "out"), "--train", str(folder / "big.csv"),
                                          "--dev", str(folder / "big.csv"), "--text", "a", "--label", "value",
                                          "--regression", "--out", str(tmp_path / "big")])
    tuner = finetune.Tuner(flags)
    head = tuner.model("own").head[1].weight
    assert tuner.ready("own")[0].scale[0] == pytest.approx(9e6 + 9.5)
    assert not torch.equal(head, model.load_checkpoint(str(tmp_path / "out"))["model"]["head.1.weight"])
    reader = infer.Reader(str(tmp_path / "out"))
    [(name, few)], [(_, many)] = (reader.classify("a b c", text) for text in ("end", "more " * 4 + "end"))
    assert name == "score" and 900 < few < 1200 < many < 1500


def test_pre_training_is_used_and_from_scratch_is_not(started, own, tmp_path):
    flags = finetune.parser().parse_args(["--ckpt", str(started / "proj"), *own, "--out", str(tmp_path)])
    tuner = finetune.Tuner(flags)
    before = model.load_checkpoint(str(started / "proj"))["model"]
    net = tuner.model("own")
    assert all(torch.equal(v, before[k]) for k, v in net.state_dict().items() if not k.startswith("head."))
    assert net.config.pool == "mean" and net.config.labels == 2  # a small model's recipe
    flags.from_scratch, flags.out = True, str(tmp_path / "b")
    fresh = finetune.Tuner(flags).model("own")
    assert not torch.equal(fresh.state_dict()["layers.0.up.weight"], before["layers.0.up.weight"])
    assert asdict(fresh.config) == asdict(net.config)


def test_pooling(monkeypatch):
    """mean: over what is not padding; cls: the first position."""
    x, mask = torch.randn(2, 5, 12), torch.tensor([[True] * 5, [True] * 3 + [False] * 2])
    mean, cls = (tiny_model(head="classify", pool=pool) for pool in ("mean", "cls"))
    torch.testing.assert_close(mean.pool(x, mask), torch.stack([x[0].mean(0), x[1, :3].mean(0)]))
    torch.testing.assert_close(mean.pool(x, None), x.mean(1))
    assert torch.equal(cls.pool(x, mask), x[:, 0])
    with pytest.raises(ConfigError, match="pool"):
        Config(pool="max")


def test_a_run_that_gives_one_answer_is_named(started, own, tmp_path, capsys):
    """59 rows of one class and one of the other: nothing to learn but the commoner name."""
    rows = [("a b c", "up")] * 59 + [("a b c", "down")]
    train = write_tsv(tmp_path / "train.tsv", ["text", "label"], rows)
    result = tune(started, tmp_path / "out", *own, "--train", train, "--seeds", "2")["tasks"]["own"]
    assert result["one_class"] == {"0": "up", "1": "up"} and result["mean"] == result["majority"]
    said = capsys.readouterr().out
    assert said.count("always says 'up'") == 2 and "no better than a bag of words" in said


def test_baseline_is_compared(started, own, tmp_path):
    """[HF §4.4] eq. 4 to 6 on the two models here."""
    base = tune(started, tmp_path / "a", *own, "--seeds", "1", name="bpe")
    ours = tune(started, tmp_path / "b", *own, "--seeds", "1", "--baseline", tmp_path / "a")
    kept = 100 * ours["tasks"]["own"]["mean"] / base["tasks"]["own"]["mean"]
    assert ours["compared"]["prr"] == {"own": pytest.approx(kept)}
    assert ours["compared"]["pcr_emb"] == pytest.approx(100 - 100 * 32 * 128 / base["model"]["embedding"])
    assert ours["compared"]["pcr_all"] == pytest.approx(
        100 - 100 * ours["model"]["parameters"] / base["model"]["parameters"])


def test_proformer_from_scratch(own, tmp_path, monkeypatch):
    small = model.PRESETS["proformer"] | dict(width=32, heads=4, ffn=64)
    monkeypatch.setitem(model.PRESETS, "proformer", small)
    result = finetune.main(["--preset", "proformer", *QUICK, *own, "--seeds", "1", "--out", str(tmp_path)])
    assert result["tasks"]["own"]["mean"] > 90 and not result["model"]["pretrained"]
    assert result["model"]["embedding"] == 420 * 32
    assert infer.Reader(str(tmp_path)).encoder.bits == 420


def test_two_ranks_give_what_one_gives(started, own, tmp_path):
    found = []
    for ranks in (1, 2):
        done = run_script("-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}",
                          "finetune.py", "--ckpt", started / "proj", *own, *QUICK,
                          "--out", tmp_path / str(ranks), env=os.environ | {"OMP_NUM_THREADS": "1"})
        assert done.returncode == 0, done.stderr[-2000:]
        assert done.stdout.count("parameters  ") == done.stdout.count("done: ") == 1
        found.append(json.loads((tmp_path / str(ranks) / "results.json").read_text()))
    assert found[0] == found[1] and found[0]["tasks"]["own"]["seeds"] == [0, 1, 2]
    same(*(model.load_checkpoint(str(tmp_path / r))["model"] for r in "12"))


def test_the_recipe_arrives(started, own, tmp_path, monkeypatch):
    """[HF Table 5] Adam ε 1e-6, no decay, 6 % of the steps to warm up; order and head by seed and epoch."""
    made, steps, orders = [], [], []
    adamw, schedule, batches = torch.optim.AdamW, finetune.schedule, finetune.batches

    def watch_batches(lengths, size, rng=None):
        found = batches(lengths, size, rng)
        if rng is not None and size == 25:
            orders.append(np.concatenate(found).tolist())
        return found

    monkeypatch.setattr(torch.optim, "AdamW", lambda g, **k: made.append((g, k)) or adamw(g, **k))
    monkeypatch.setattr(finetune, "schedule", lambda *a: steps.append(a) or schedule(*a))
    monkeypatch.setattr(finetune, "batches", watch_batches)
    flags = [*own, "--batch", "25", "--epochs", "5", "--lr", "1e-3"]
    tune(started, tmp_path / "a", *flags, "--seeds", "2")
    groups, options = made[0]
    assert options["eps"] == 1e-6 and options["lr"] == 1e-3 and "betas" not in options  # 0.9, 0.999
    assert all(group["weight_decay"] == 0 for group in groups)
    assert steps[:80] == [(i, 80, 5) for i in range(80)]  # 397 rows of 25 are 16 a epoch, 80 · 0.06 = 4.8
    assert len(orders) == 10 and len(set(map(tuple, orders))) == 10
    alone = tune(started, tmp_path / "b", *flags, "--seed", "1", "--seeds", "1")
    assert orders[10:] == orders[5:10]  # a seed is a seed, whatever ran before
    both = json.loads((tmp_path / "a" / "results.json").read_text())["tasks"]["own"]
    assert alone["tasks"]["own"]["values"] == both["values"][1:]
    last = [[json.loads(line) for line in open(tmp_path / x / "log.jsonl")][-1] for x in "ab"]
    assert last[0] == last[1]


def test_the_best_weights_are_kept(started, own, tmp_path, monkeypatch):
    """Evaluations of 50, 90 and 70: the second one's weights, and the last one's score beside it."""
    given, seen = iter([50.0, 90.0, 70.0]), []

    def evaluate(self, forward):
        score = next(given)
        seen.append(forward([self.examples[0]]))
        return dict(accuracy=score, macro_f1=0.0), None

    monkeypatch.setattr(finetune.Sentences, "evaluate", evaluate)
    result = tune(started, tmp_path, *own, "--seeds", "1", "--epochs", "3", "--eval_every", "25")
    assert result["tasks"]["own"]["mean"] == 90 and result["tasks"]["own"]["last"] == 70
    reader = infer.Reader(str(tmp_path))
    text = finetune.read_table(own[1])[1][0]["text"]
    said = torch.tensor([p for _, p in sorted(reader.classify(text))])  # down, up: the order of the labels
    torch.testing.assert_close(said, seen[1].softmax(-1)[0])
    assert not torch.allclose(said, seen[2].softmax(-1)[0])


def test_an_interrupted_fine_tuning_goes_on(started, own, tmp_path, monkeypatch, capsys):
    """Killed after the first of two seeds: the same command runs the second only, to the same results."""
    whole = tune(started, tmp_path / "a", *own, "--seeds", "2")
    fit, seeds = finetune.Tuner.fit, []

    def once_only(self, name, seed):
        seeds.append(seed)
        if seeds == [0, 1]:
            raise KeyboardInterrupt
        return fit(self, name, seed)

    monkeypatch.setattr(finetune.Tuner, "fit", once_only)
    with pytest.raises(SystemExit) as exit:
        tune(started, tmp_path / "b", *own, "--seeds", "2")
    assert exit.value.code == 130 and "told to stop" in capsys.readouterr().err
    again = tune(started, tmp_path / "b", *own, "--seeds", "2")
    assert again["tasks"] == whole["tasks"] and seeds == [0, 1, 1]
    same(*(model.load_checkpoint(str(tmp_path / x))["model"] for x in "ab"))
    seeds.clear()
    with pytest.raises(SystemExit):
        tune(started, tmp_path / "b", *own, "--seeds", "2")
    (tmp_path / "b" / "results.json").unlink()  # of the first one, which would be in the way
    tune(started, tmp_path / "b", *own, "--seeds", "2", "--batch", "13")  # another job: from the beginning
    assert seeds == [0, 1, 0, 1] and "begun anew" in capsys.readouterr().out
    assert not list((tmp_path / "b").glob("seed-*.pt"))
    monkeypatch.setattr(finetune, "report", lambda *a: None)  # as if killed just before it
    finetune.main(["--ckpt", str(started / "proj"), *QUICK, *own, "--seeds", "2",
                   "--out", str(tmp_path / "c")])
    monkeypatch.undo()
    late = tune(started, tmp_path / "c", *own, "--seed", "1", "--seeds", "1")  # what was second is now first
    assert late["tasks"]["own"]["values"] == whole["tasks"]["own"]["values"][1:]


# SQuAD


def questions(rng, n, none=0.0):
    """The answer is "zebra", alone or before "quagga", in a context of up to sixty other words."""
    found = []
    for i in range(n):
        words = rng.choices(WORDS, k=rng.randint(20, 60))
        place, long = rng.randrange(1, len(words) - 3), rng.randint(1, 2)
        answers = []
        if rng.random() >= none:
            words[place:place + long] = ["zebra", "quagga"][:long]
            start = len(" ".join(words[:place])) + 1
            answers = [(" ".join(words[place:place + long]), start)]
        found.append(dict(id=f"q{i}", question="Which word?", context=" ".join(words), answers=answers))
    return found


def flat(found):
    return [q | dict(title="t", answers=dict(text=[t for t, _ in q["answers"]],
                                             answer_start=[s for _, s in q["answers"]])) for q in found]


def nested(found):
    return dict(version="x", data=[dict(title="t", paragraphs=[dict(context=q["context"], qas=[dict(
        id=q["id"], question=q["question"],
        answers=[dict(text=t, answer_start=s) for t, s in q["answers"]])]) for q in found])])


def test_squad_files_nested_and_flat_are_one(tmp_path, monkeypatch):
    found = questions(random.Random(0), 7)
    monkeypatch.setitem(finetune.SQUAD, "squad", ("v1.1", 7, 7))
    (tmp_path / "train-v1.1.json").write_text(json.dumps(nested(found)))
    with gzip.open(tmp_path / "dev-v1.1.jsonl.gz", "wt") as file:
        file.writelines(json.dumps(row) + "\n" for row in flat(found))
    args = types.SimpleNamespace(train=None, dev=None, data_dir=str(tmp_path))
    train, dev = finetune.read_squad("squad", args)
    assert train == dev == found
    monkeypatch.setitem(finetune.SQUAD, "squad", ("v1.1", 8, 7))
    with pytest.raises(InputError, match="wanted 8 questions, got 7"):
        finetune.read_squad("squad", args)
    monkeypatch.setitem(finetune.SQUAD, "squad", ("v1.1", 7, 7))
    (tmp_path / "train-v1.1.json").write_text(json.dumps(nested(questions(random.Random(0), 7, none=1))))
    with pytest.raises(InputError, match="squad_v2"):
        finetune.read_squad("squad", args)


def gold(data):
    """A forward() that knows: 1 at the true start and end, -1 at [CLS], found by the ids it is given."""
    def forward(examples):
        longest = max(map(len, examples))
        logits = torch.zeros(len(examples), longest, 2)
        for row, ids in zip(logits, examples):
            i = next(i for i, other in enumerate(data.dev) if other is ids)
            question, first, start, stop = data.places[i].tolist()
            q = data.questions[question]
            row[0] = -1 if q["answers"] else 2
            if q["answers"]:
                a, b = data.answer_words(data.dev_spans[question], *q["answers"][0])
                if start <= a and b < stop:
                    row[first + a - start, 0] = row[first + b - start, 1] = 1
        return logits

    return forward


@pytest.mark.parametrize("split", ["regex", "bpe"])
@pytest.mark.parametrize("none", [0.0, 0.4])
def test_gold_spans_score_100(split, none, bpe):
    found = questions(random.Random(1), 40, none)
    encoder = (Encoder("row", split="bpe", bpe=bpe, vocabulary=bpe.pieces) if split == "bpe"
               else Encoder("bits", "md5"))
    data = finetune.Spans(found, found, encoder, 33 if split == "regex" else 131, null=none > 0)
    assert len(data.dev) > len(found) and data.lost == 0
    scores, _ = data.evaluate(gold(data))
    assert scores["em"] == scores["f1"] == 100
    assert all(scores[name] == 100 for name in scores if name != "threshold")
    for ids, (start, end, first, count) in zip(data.examples, data.targets):  # training has the same words
        if start:
            said = " ".join(encoder.words[i - FIRST] for i in ids[start:end + 1].tolist())
            assert said.replace("Ġ", "").replace(" ", "") in {q["answers"][0][0].replace(" ", "")
                                                             for q in found if q["answers"]}
    assert data.simple()["majority"] == pytest.approx(100 * sum(not q["answers"] for q in found) / len(found))


def test_answers_are_the_best_over_all_windows():
    """Random scores for every window, in batches of several questions, against going through all pairs."""
    found = questions(random.Random(4), 9, 0.3)
    data = finetune.Spans(found, found, Encoder("bits", "md5"), 25, stride=5, longest=3, null=True)
    scores = {i: torch.randn(len(ids), 2) for i, ids in enumerate(data.dev)}

    def forward(examples):
        out = torch.zeros(len(examples), max(map(len, examples)), 2)
        for row, ids in zip(out, examples):
            i = next(i for i, other in enumerate(data.dev) if other is ids)
            row[:len(ids)] = scores[i]
        return out

    texts, margins = data.answers(forward)
    for q, question in enumerate(found):
        pairs, null = {}, math.inf
        for i, (which, first, start, stop) in enumerate(data.places.tolist()):
            if which == q:
                null = min(null, scores[i][0].sum().item())
                for a in range(start, stop):
                    for b in range(a, min(a + 3, stop)):
                        value = scores[i][first + a - start, 0] + scores[i][first + b - start, 1]
                        pairs[a, b] = max(value.item(), pairs.get((a, b), -math.inf))
        (a, b), best = max(pairs.items(), key=lambda pair: pair[1])
        spans = hashing.split_words(question["context"])[1]
        assert texts[q] == question["context"][spans[a][0]:spans[b][1]]
        assert margins[q] == pytest.approx(best - null, abs=1e-5)


def test_the_question_is_no_candidate():
    """Loss over [CLS] and the context's words alone: positions 0, 4, 5, 6 here."""
    logits, targets = torch.randn(2, 9, 2), torch.tensor([[5, 6, 4, 3], [0, 0, 4, 3]])
    allowed, places = logits[:, [0, 4, 5, 6]], torch.tensor([[2, 3], [0, 0]])
    start, end = (F.cross_entropy(allowed[..., i], places[:, i]) for i in (0, 1))
    torch.testing.assert_close(finetune.Spans.loss(None, logits, targets), (start + end) / 2)


def test_an_answer_of_signs_alone_is_none_in_v2():
    """As in the official script: "." normalises to nothing, and silence is then right only if all do."""
    found = [dict(id="a", question="x", context="a b .", answers=[(".", 4), ("b", 2)]),
             dict(id="b", question="x", context="a b .", answers=[(".", 4)])]
    for null, silence in ((True, [[0, 0], [1, 1]]), (False, [[1, 0], [1, 0]])):
        data = finetune.Spans(found, found, Encoder("bits"), 20, null=null)
        assert data.scores(["", ""]).tolist() == silence


def test_an_answer_longer_than_any_window_is_counted():
    context = " ".join(WORDS)
    lost = dict(id="a", question="x", context=context, answers=[(context, 0)])
    assert finetune.Spans([lost], [lost], Encoder("bits", "md5"), 20).lost == 1
    assert finetune.Spans.answer_words([(0, 3), (4, 7), (8, 9)], "bc de", 1) == (0, 1)
    assert finetune.Spans.answer_words([(0, 3), (4, 7)], " ", 3) is None


def test_the_null_threshold_is_the_best_there_is(monkeypatch):
    """Against trying every threshold; equal margins answer together."""
    data = finetune.Spans.__new__(finetune.Spans)
    rng = np.random.default_rng(3)
    for n in (1, 2, 9, 50):
        data.null, data.n = True, n
        texts = [("right", "wrong")[i] for i in rng.integers(0, 2, n)]
        data.truths = [[["right"]] if i else [[]] for i in rng.integers(0, 2, n)]
        margins = rng.integers(-3, 4, n).astype(float)
        monkeypatch.setattr(data, "answers", lambda forward: (texts, margins), raising=False)

        def at(sure):
            return 100 * data.scores([text if s else "" for text, s in zip(texts, sure)])[:, 1].mean()

        scores, _ = data.evaluate(None)
        assert scores["f1"] == pytest.approx(at(margins > 0))
        assert scores["best_f1"] == pytest.approx(max(at(margins > t) for t in np.arange(-4.5, 5)))
        assert scores["best_f1"] == pytest.approx(at(margins >= scores["threshold"]))


def test_squad_end_to_end(started, tmp_path, capsys):
    """Learns where the answer stands, in windows; infer.py gives the same answers, with offsets."""
    for split, seed, n in (("train", 1, 500), ("dev", 2, 40)):
        (tmp_path / f"{split}.json").write_text(json.dumps(nested(questions(random.Random(seed), n, 0.2))))
    flags = ["--task", "squad_v2", "--train", tmp_path / "train.json", "--dev", tmp_path / "dev.json"]
    result = tune(started, tmp_path / "out", *flags, "--seeds", "1", "--predict")
    task = result["tasks"]["squad_v2"]
    assert task["metric"] == "f1"
    assert set(task["all_metrics"]) == {"f1", "em", "best_f1", "best_em", "threshold"}
    assert task["mean"] > task["majority"] + 20
    assert "answers that fall in no window: 0" in capsys.readouterr().out
    said = json.loads((tmp_path / "out" / "predictions.json").read_text())
    reader = infer.Reader(str(tmp_path / "out"))
    assert 1 <= len(reader.answer("which", "zebra", 8)) <= 2  # one word: fewer spans than asked for
    infer.main(["--ckpt", str(tmp_path / "out"), "--near", "zebra"])
    for q in questions(random.Random(2), 40, 0.2):
        found = reader.answer(q["question"], q["context"], 5)
        assert found[0][0] == said[q["id"]]
        assert all(q["context"][a:b] == text for text, (a, b), _ in found)
        assert [p for _, _, p in found] == sorted((p for _, _, p in found), reverse=True)


@pytest.mark.parametrize("name", ["proj", "bpe"])
def test_infer_answers_as_finetune_does(started, tmp_path, monkeypatch, name):
    """Random weights, so that answers and silence come from any window; offsets hold, for pieces too."""
    found = questions(random.Random(6), 15, 0.5)
    (tmp_path / "q.json").write_text(json.dumps(nested(found)))
    tune(started, tmp_path / "out", "--task", "squad_v2", "--train", tmp_path / "q.json", "--dev",
         tmp_path / "q.json", "--limit", "2", "--epochs", "1", "--seeds", "1", "--max_answer", "3", name=name)
    reader = infer.Reader(str(tmp_path / "out"))
    for weight in (*reader.model.layers.parameters(), reader.model.head.weight):
        torch.nn.init.normal_(weight)  # all of it, so that [CLS] too depends on the window
    data = finetune.Spans(found, found, reader.encoder, 33, longest=3, null=True)
    reader.model.set_codes(torch.from_numpy(reader.encoder.codes()))

    @torch.no_grad()
    def forward(examples):
        return reader.model(*finetune.pad(examples))

    shift = float(np.median(data.answers(forward)[1]))  # so that half of them are silent

    def shifted(*inputs):
        *spans, null = model.best_spans(*inputs)
        return *spans, null + shift

    monkeypatch.setattr(finetune, "best_spans", shifted)
    monkeypatch.setattr(infer, "best_spans", shifted)
    texts, margins = data.answers(forward)
    assert 0 < (margins > 0).sum() < 15 and len(data.dev) > 30
    for question, text, margin in zip(found, texts, margins):
        answers = reader.answer(question["question"], question["context"], 4)
        assert answers[0][0] == (text if margin > 0 else "")
        for said, (a, b), _ in answers:
            assert question["context"][a:b] == said == said.strip()


def test_pydoc_holds_out_whole_files(started, tmp_path, monkeypatch):
    """Modules "a" and "b" in many files each, "lone" in one, which cannot be both seen and held out."""
    files = {}
    for i in range(60):
        for name in ("a", "b"):
            path = tmp_path / f"{name}{i}.py"
            path.write_text(f'"""{sentence(random.Random(i), name * 4)} of file {i} here."""\n'
                            f'def f():\n    """{sentence(random.Random(-i), name * 4)} of file {i} too."""')
            files[f"{name}{os.sep}{i}.py"] = str(path)
    (tmp_path / "lone.py").write_text('"""One docstring of many words here."""\n')
    files["lone.py"] = str(tmp_path / "lone.py")
    monkeypatch.setattr(hashing, "python_files", lambda: files)
    task, train, devs = finetune.read_pydoc(str(tmp_path / "cache"))
    dev = devs["dev"]
    assert task.labels == ("a", "b") and set(dev["labels"]) == {"a", "b"}
    assert len(train["first"]) + len(dev["first"]) == 240
    seen, held = ({(label, text.split()[-2]) for label, text in zip(part["labels"], part["first"])}
                  for part in (train, dev))
    assert held and not seen & held  # by file: its number and its letter
    assert all(label * 4 in text for text, label in zip(train["first"], train["labels"]))
    result = tune(started, tmp_path / "out", "--task", "pydoc", "--cache", tmp_path / "cache", "--seeds", "1",
                  "--epochs", "6")
    assert result["tasks"]["pydoc"]["mean"] > 90


def test_limit_and_eval_every(started, own, tmp_path):
    result = tune(started, tmp_path, *own, "--limit", "50", "--eval_every", "3", "--seeds", "1",
                  "--epochs", "2")
    assert result["tasks"]["own"]["n_train"] == 50 and result["tasks"]["own"]["n"] == 101
    steps = [json.loads(line)["step"] for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert steps == [3, 6, 8]  # 50 rows of 16: 4 steps an epoch


def test_a_folder_of_another_run_is_left_alone(started, own, tmp_path):
    """--out of a pre-training, and a checkpoint whose weights are not those of its config."""
    shutil.copytree(started / "proj", tmp_path / "other")
    before = [(path.name, path.read_bytes()) for path in sorted((tmp_path / "other").iterdir())]
    flags = [*QUICK, *own, "--seeds", "1"]
    refused(finetune.main, ["--ckpt", str(started / "proj"), *flags, "--out", str(tmp_path / "other")],
            says="is of no fine-tuning")
    assert before == [(path.name, path.read_bytes()) for path in sorted((tmp_path / "other").iterdir())]
    flags = ["--ckpt", str(started / "proj"), *flags, "--out", str(tmp_path / "done"), "--epochs", "1"]
    finetune.main(flags)
    refused(finetune.main, [*flags, "--lr", "2e-2"], says="another fine-tuning (lr is 0.01 there, 0.02 here)")
    content, flags = torch.load(started / "proj" / "ckpt.pt"), [*QUICK, *own]
    content["config"]["width"] *= 2
    torch.save(content, tmp_path / "ckpt.pt")
    refused(finetune.main, ["--ckpt", str(tmp_path / "ckpt.pt"), *flags, "--out", str(tmp_path / "new")],
            says="do not fit the checkpoint's own config")


def test_classify_and_answer_on_the_command_line(started, own, tmp_path, capsys, monkeypatch):
    tune(started, tmp_path / "out", *own, "--seeds", "1")
    capsys.readouterr()
    where = ["--ckpt", str(tmp_path / "out")]
    infer.main([*where, "a zebra"])
    assert capsys.readouterr().out.split()[0] == "up"
    (tmp_path / "in.txt").write_text("a zebra\n\nquagga, quagga\n")
    (tmp_path / "in.jsonl").write_text('{"text": "a zebra"}\n{"text": "quagga, quagga"}\n')
    for name in ("in.txt", "in.jsonl"):
        infer.main([*where, "--file", str(tmp_path / name)])
        rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert [row["texts"] for row in rows] == [["a zebra"], ["quagga, quagga"]]
        assert [row["labels"][0][0] for row in rows] == ["up", "down"]
    half = '["a zebra \\ud83d"]'  # of an emoji that was cut
    (tmp_path / "odd.jsonl").write_text(f'{"[" * 100_000}\n{half}\n')
    done = run_script("infer.py", *where, "--file", tmp_path / "odd.jsonl")
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert "not JSON" in rows[0]["error"] and rows[1]["texts"] == json.loads(half) and not done.returncode
    with open("/dev/full", "w") as full:
        command = [sys.executable, "infer.py", *where, "--file", str(tmp_path / "in.txt")]
        done = subprocess.run(command, cwd=HERE, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 2 and re.fullmatch(r"infer.py: \[Errno 28\].*\n", done.stderr), done.stderr
    (tmp_path / "bad.jsonl").write_text('{"text": 3}\n{"text"\n5\n"a zebra"\n')
    infer.main([*where, "--file", str(tmp_path / "bad.jsonl")])
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["line"] for row in rows] == [1, 2, 3, 4] and rows[3]["labels"][0][0] == "up"
    assert "wanted texts" in rows[0]["error"] and "not JSON" in rows[1]["error"]
    refused(infer.main, [*where, "a", "--file", str(tmp_path / "in.txt")], says="not both")
    refused(infer.main, [*where, "--file", str(tmp_path / "gone.txt")], says="gone.txt")
    refused(infer.main, [*where, "a", "b"], says="takes 1 text, got 2")
    (tmp_path / "two.txt").write_text("a\tb\na zebra\n")  # one line is wrong, the next is answered
    infer.main([*where, "--file", str(tmp_path / "two.txt")])
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert "takes 1 text" in rows[0]["error"] and rows[1]["labels"][0][0] == "up"
    infer.main([*where, "--near", WORDS[0], "--top_k", "3"])  # the corpus's words are still known
    assert len(capsys.readouterr().out.splitlines()) == 3
    refused(infer.main, ["--ckpt", str(started / "proj"), "a", "b"], says="takes 1 text")
    with pytest.raises(ConfigError, match="needs? one"):
        infer.Reader(str(started / "proj")).classify("a")
    with pytest.raises(ConfigError, match="needs? one"):
        infer.Reader(str(tmp_path / "out")).answer("a", "b", 1)


# ---------------------------------------------------------------------------------------------------------
# infer.py


@pytest.fixture(scope="module")
def readers(text_file, tmp_path_factory):
    """A trained detector under each hash, and a masked language model over-fitted to the text's order."""
    cache, folder = tmp_path_factory.getbasetemp() / "cache", tmp_path_factory.mktemp("readers")
    base = ["--data", str(text_file), "--cache", str(cache), *SMALL]
    for name, more in (("lsh", ["--hash", "lsh"]), ("md5", ["--hash", "md5"]),
                       ("mlm", ["--emb", "lookup", "--split", "regex", "--objective", "mlm", "--steps", "800",
                                "--batch", "32", "--lr", "2e-3", "--width", "64", "--dropout", "0",
                                "--layers", "2", "--eval_every", "800"])):
        pretrain.main([*base, "--out", str(folder / name), *more])
    return {name: infer.Reader(str(folder / name)) for name in ("lsh", "md5", "mlm")}


def test_read_finds_masks_and_offsets(readers):
    text = "Die [MASK] ab[MASK]"
    words, spans, ids = readers["lsh"].read(text)
    assert words == ["die", "[MASK]", "ab", "[MASK]"]
    assert [text[s:e] for s, e in spans] == ["Die", "[MASK]", "ab", "[MASK]"]
    assert ids[0, [0, 2, 4, -1]].tolist() == [CLS, MASK, MASK, SEP] and ids.shape == (1, 6)
    assert readers["lsh"].read("[MAS] K")[0] == ["[", "mas", "]", "k"]  # looks like, is not


def test_detect_takes_any_word(readers):
    for text in [t for t in NASTY[2:8]] + ["zzzyx never seen"]:
        if "x" * 10_000 in text or len(text.split()) > 12:
            text = text[:200]
        words, spans, p = readers["lsh"].detect(text)
        assert p.shape == (len(words), 3) and torch.allclose(p.sum(-1), torch.ones(len(words)))
        assert [text[s:e].lower() for s, e in spans] == words
    with pytest.raises(ConfigError, match="hash-mlm"):
        readers["lsh"].detect("the [MASK] of a list")


def test_detect_and_fill_say_what_the_model_says(readers, monkeypatch):
    """A model that answers by the id modulo 3: each word gets its own answer, in the order of the classes."""
    assert infer.CLASSES == ("intact", "shuffled", "random")
    reader, text = readers["lsh"], "one two three four"
    monkeypatch.setattr(reader.model, "forward", lambda ids: F.one_hot(ids % 3, 3) * 20.0)
    probabilities = reader.detect(text)[2]
    assert probabilities.argmax(-1).tolist() == (reader.read(text)[2][0, 1:-1] % 3).tolist()
    [all_words] = readers["mlm"].fill("a [MASK] b", 10**6)
    named = [word for word, p in all_words if p > 0]
    assert sorted(named) == sorted(readers["mlm"].encoder.words)  # every word, and no special


# Any text at all: every character of Unicode, lone surrogates too, and what is known to be hard
FRAGMENTS = ("[MASK]", "[MASK", " ", "\t", "\n", "\x00", "\ud800", "\udfff", "\x85", "\u2028", "İ", "ﬃ",
             "e\u0301", "\u200d", "👩‍👩‍👧", "don't", "Ġ", "<unk>", "a" * 10_000, "ab " * 40, "日本語")
ANY_TEXT = st.lists(st.text(st.characters(exclude_categories=()), max_size=20) | st.sampled_from(FRAGMENTS),
                    max_size=12).map("".join)
BAD = (InputError, ConfigError)  # what a text may be refused with


def for_any_text(test):
    """Run a test on texts that hypothesis makes: a few in the suite, else as many as LONG seconds give."""
    end = []

    @functools.wraps(test)
    def timed(text, **fixtures):
        end[:] = end or [time.monotonic() + LONG]
        if not LONG or time.monotonic() < end[0]:
            test(text=text, **fixtures)

    healthy = [hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.function_scoped_fixture]
    settings = hypothesis.settings(max_examples=10**5 if LONG else 40, deadline=None, database=None,
                                   derandomize=not LONG, suppress_health_check=healthy)
    return settings(hypothesis.given(text=ANY_TEXT)(timed))


@pytest.fixture(scope="module")
def untrained(tmp_path_factory, bpe):
    """A reader for each head and kind of words, with fresh weights."""
    folder, shape = tmp_path_factory.mktemp("untrained"), dict(layers=1, width=8, heads=2, ffn=8, length=64)
    words = words_like(50) + ["cat", "the"]
    lsh = NgramLSH.fit({word: 1 for word in words}, 500)
    phrases = hashing.Phrases.train(["new york is the cat"] * 9, 300)
    pieces = dict(split="bpe", bpe=bpe, vocabulary=bpe.pieces)
    labels = dict(labels=["up", "down"], pair=False, label="a", scale=None)
    span = dict(labels=None, pair=True, stride=5, longest=9, null=True)
    made = dict(
        detect=(Encoder("bits", "lsh", lsh=lsh), dict(emb="proj"), {}),
        detect_pieces=(Encoder("row", **pieces), dict(emb="lookup"), {}),
        fill=(Encoder("row", **pieces), dict(emb="lookup", head="mlm"), {}),
        complete=(Encoder("sketch", sketch=(5, 31, 0)), dict(emb="median", buckets=31, head="hash-mlm"), {}),
        classify=(Encoder("chunks"), dict(emb="pool", head="classify"), labels),
        classify_phrases=(Encoder("row", split="phrases", bpe=phrases, vocabulary=phrases.pieces),
                          dict(emb="lookup", head="classify"), labels),
        answer=(Encoder("index", rows=99), dict(emb="emb", head="span"), span),
        answer_pieces=(Encoder("row", **pieces), dict(emb="lookup", head="span"), span))
    for name, (encoder, about, task) in made.items():
        net = Model(Config(**shape | dict(rows=encoder.rows) | about))
        model.save_checkpoint(str(folder / name), net, encoder.state(), words=words, task=task)
    return {name: infer.Reader(str(folder / name)) for name in made}


@for_any_text
def test_any_text_is_split_and_hashed(text, untrained):
    for how in ("regex", "space"):
        words, spans = hashing.split_words(text, how)
        assert [text[a:b].lower() for a, b in spans] == words == hashing.words_of(text, how)
        assert "".join(text[a:b] for a, b in spans) == re.sub(r"\s+", "", text)
    words = words or [text]
    assert [bytes(row) for row in hashing.md5_digests(words)] == [
        hashlib.md5(w.encode("utf-8", "surrogatepass")).digest() for w in words]
    assert (hashing.sketch_index(words, 5, 31) < 31).all()
    for name in ("detect", "complete", "classify", "answer"):
        encoder = Encoder.load(untrained[name].encoder.state())
        ids = encoder.ids(words)
        assert (ids >= FIRST).all() and len(encoder.codes()) == FIRST + len(set(words))
        assert np.array_equal(encoder.codes()[ids[:1]], Encoder.load(encoder.state()).hash_words(words[:1]))


@for_any_text
def test_any_text_goes_through_pieces(text, untrained):
    for name in ("detect_pieces", "classify_phrases"):
        encoder = untrained[name].encoder
        pieces, spans = encoder.split(text)
        assert len(pieces) == len(spans) and all(0 <= a <= b <= len(text) for a, b in spans)
        assert [a for a, _ in spans] == sorted(a for a, _ in spans)
        assert not set(text) - set("".join(text[a:b] for a, b in spans)) - set(filter(str.isspace, text))
        assert UNK not in encoder.ids(pieces)


@for_any_text
def test_any_text_is_judged(text, untrained):
    for name in ("detect", "detect_pieces"):
        try:
            words, spans, p = untrained[name].detect(text)
        except BAD:
            continue
        assert p.shape == (len(words), 3) and torch.allclose(p.sum(-1), torch.ones(len(words)))
        assert len(spans) == len(words) <= 62 and all(0 <= a <= b <= len(text) for a, b in spans)


@for_any_text
def test_any_text_is_filled(text, untrained):
    for name in ("fill", "complete"):
        try:
            [(_, found)] = infer.look(untrained[name], [text], 3).items()
        except BAD:
            continue
        assert len(found) == text.count("[MASK]") > 0
        for gap in found:
            scores = [score for _, score in (gap["items"] if name == "complete" else gap)]
            assert len(scores) == 3 and scores == sorted(scores, reverse=True)
            assert all(map(math.isfinite, scores))


@for_any_text
def test_any_text_is_classified(text, untrained):
    for name in ("classify", "classify_phrases"):
        with contextlib.suppress(*BAD):  # of no words
            assert sum(p for _, p in untrained[name].classify(text)) == pytest.approx(1)


@for_any_text
def test_any_text_is_asked(text, untrained):
    for name in ("answer", "answer_pieces"):
        for question, context in ((text, "the cat sat"), ("who", text), (text, text)):
            with contextlib.suppress(*BAD):
                for answer, (a, b), p in untrained[name].answer(question, context, 3):
                    assert context[a:b] == answer and 0 <= p <= 1


def test_suspects_come_worst_first(capsys):
    p = torch.tensor([[0.9, 0.1, 0.0], [0.2, 0.7, 0.1], [0.5, 0.1, 0.4]])
    infer.show_detected(["a", "b", "c"], [(0, 1), (2, 3), (4, 5)], p, "a b c", False)
    first, *rest = capsys.readouterr().out.splitlines()
    assert first == "a {b:shuffled} c" and [line.split()[0] for line in rest] == ["b", "c", "a"]


def test_neighbours_are_the_cosines(readers):
    reader = readers["lsh"]
    found = dict(reader.neighbours("ONE", 7))
    assert found == dict(reader.neighbours("one", 7)) and "one" not in found
    among = [w for w in reader.words if w != "one"]
    with torch.no_grad():
        ids = torch.from_numpy(reader.encoder.ids(["one"] + among))[None]
        v = reader.model.embed(ids)[0].double().numpy()
    v -= v.mean(0)
    cosines = v[1:] @ v[0] / np.linalg.norm(v[1:], axis=1) / np.linalg.norm(v[0])
    for word, cosine in found.items():
        assert abs(cosines[among.index(word)] - cosine) < 1e-4
    assert math.isclose(max(found.values()), cosines.max(), rel_tol=1e-4)
    with pytest.raises(InputError, match="2 words"):
        reader.neighbours("two words", 1)


def test_masks_among_pieces(small, tmp_path, bpe):
    """The pieces around a mask are those of the whole text: no stray space before it or a full stop."""
    path, encoder = str(tmp_path / "b.pt"), Encoder("row", split="bpe", bpe=bpe, vocabulary=bpe.pieces)
    net = Model(Config(emb="lookup", rows=encoder.rows, layers=0, width=8, heads=1, length=30))
    model.save_checkpoint(path, net, encoder.state(), words=bpe.pieces)
    reader = infer.Reader(path)
    other = BPE.train(["the box of axes"] * 50, size=300)  # letters that join
    for text in ("the [MASK] sat", "the [MASK].", "[MASK] cat", "[MASK] [MASK]", "the cat[MASK]"):
        words, spans, ids = reader.read(text)
        hidden = [i for i, w in enumerate(words) if w == "[MASK]"]
        assert len(hidden) == text.count("[MASK]") == (ids == MASK).sum() and "Ġ" not in words
        assert [text[s:e] for i, (s, e) in enumerate(spans) if i in hidden] == ["[MASK]"] * len(hidden)
    assert reader.read("the [MASK].")[0] == ["Ġthe", "[MASK]", "."]
    assert reader.read("the [MASK] sat")[0] == ["Ġthe", "[MASK]", "Ġsat"]
    reader.encoder.bpe = other
    for text in ("the bo[MASK] of", "the [MASK]es of", "the a[MASK]es", "[MASK]s[MASK]", "the[MASK]7[MASK]."):
        words, spans, _ = reader.read(text)  # letters and figures beside a mask are there
        assert "".join(text[a:b] for a, b in spans).replace(" ", "") == text.replace(" ", ""), words


def test_fill_names_a_word_that_may_follow(readers, text_file):
    """Two words may follow each: one of them must come out first, for most of the gaps."""
    lines = [line.rstrip(".").split() for line in text_file.read_text().splitlines()]
    follows = {}
    for line in lines:
        for a, b in zip(line, line[1:]):
            follows.setdefault(a, set()).add(b)
    right, asked = 0, [line for line in lines if len(line) >= 6][:40]
    for line in asked:
        [best] = readers["mlm"].fill(" ".join([*line[:3], "[MASK]", *line[4:6]]), 3)
        right += best[0][0] in follows[line[2]]
        assert best == sorted(best, key=lambda pair: -pair[1])
    assert right >= 0.5 * len(asked)  # a guess by frequency: 2 of 40


def test_a_misspelling_finds_its_word_under_lsh_and_not_under_md5(readers, tmp_path):
    """True from the first step on: Proj keeps the angles between bits."""
    words = ["receive", "the", "separate", "definitely", *words_like(300, 11, "abcdefghijklmnop")]
    for hash, finds in (("lsh", True), ("md5", False)):
        lsh = NgramLSH.fit(dict.fromkeys(words, 1)) if hash == "lsh" else None
        net = Model(Config(layers=0, width=512, heads=4, ffn=8, length=9))
        path = str(tmp_path / f"{hash}.pt")
        model.save_checkpoint(path, net, Encoder("bits", hash, lsh=lsh).state(), words=words)
        reader = infer.Reader(path)
        for wrong, right in (("recieve", "receive"), ("seperate", "separate"), ("definately", "definitely")):
            assert (reader.neighbours(wrong, 1)[0][0] == right) == finds
    assert len(readers["lsh"].neighbours("ab", 5)) == 5


def test_infer_errors(readers, tmp_path):
    for name, call, says in (("lsh", lambda r: r.fill("a [MASK]", 1), "objective mlm"),
                             ("lsh", lambda r: r.detect(" "), "no words"),
                             ("mlm", lambda r: r.detect("a"), "objective sr"),
                             ("mlm", lambda r: r.fill("a", 1), "write \\[MASK\\]"),
                             ("mlm", lambda r: r.neighbours("qqqq", 1), "not in this model's vocabulary"),
                             ("lsh", lambda r: r.detect("a " * 16), "18 positions")):
        with pytest.raises((InputError, ConfigError), match=says):
            call(readers[name])
    refused(infer.main, ["--ckpt", str(tmp_path), "a"], says="no checkpoint at")
    with pytest.raises(SystemExit) as exit:
        infer.main(["a"])
    assert exit.value.code == 2


def test_infer_command_line(small, tmp_path, capsys, monkeypatch):
    pretrain.main(small())
    where = ["--ckpt", str(tmp_path / "run")]
    capsys.readouterr()
    infer.main([*where, "one two three"])
    assert "intact" in capsys.readouterr().out
    infer.main([*where, "--near", "one", "--top_k", "3"])
    assert len(capsys.readouterr().out.splitlines()) == 3
    monkeypatch.setattr(sys, "stdin", io.StringIO("one two\n\nthree\n"))
    infer.main(where)  # a conversation: an empty line is answered, not fatal
    both = capsys.readouterr()
    assert both.out.count("> ") == 4 and "no words" in both.err
    refused(infer.main, [*where, "--top_k", "0", "a"], says="--top_k 0")


# ---------------------------------------------------------------------------------------------------------
# bench.py


def test_counts_table(capsys):
    rows = {row["name"]: row for row in bench.counts()}
    assert rows["emb 50K"]["total"] == 124_647_170 and rows["proj"]["total"] == 86_146_562
    assert all(row["printed"] == row["shown"] or row["note"] for row in rows.values())
    assert rows["pool"]["authors"] == 86_845_442 and rows["emb 1K"]["authors"] == 86_840_834


def test_medians_leave_the_first_round_out(monkeypatch):
    """A warm-up, whose end nobody looks at, then rounds of 1, 5, 2 seconds: the median is 2."""
    clock = iter([-9, 0, 1, 0, 5, 0, 2])
    monkeypatch.setattr(bench, "time", types.SimpleNamespace(perf_counter=lambda: next(clock)))
    assert bench.medians({"a": lambda: None}, 3) == {"a": 2}


def test_flops_of_bert_lsh():
    """[BL Table 1] 10 positions, two heads of 64: q kᵀ is 2·2·10·10·64 = 25,600 operations, hashing queries
    and keys 2·2·20·64·r·n = 5,120 r n; of 55 pairs a head 1/4 + 3/4/64 collide: 28.8 dot products."""
    cost = bench.attention_flops(10, 2, 64, 2, 64)
    assert cost["full"] == 25_600 and cost["hashing"] == 10_240
    assert cost["dots"] == 2 * 55 * (1 / 4 + 3 / 4 / 64) and round(cost["dots"], 1) == 28.8
    for n, r, m in ((1, 1, 8), (2, 4, 64), (4, 8, 1024)):  # [BL Figure 1]: linear in n and r, flat in m
        assert bench.attention_flops(10, 2, 64, r, m, n)["hashing"] == 5_120 * n * r


def test_dot_products_of_random_vectors():
    """28.8 by law, in 4,000 draws, within six standard errors; all pairs instead of i <= j would be 52.3."""
    g, dots = torch.Generator().manual_seed(0), []
    planes, coef = attention.draw_planes(8_000, 1, 2, 64, 64, g)
    q, k = torch.randn(2, 1, 8_000, 10, 64, generator=g)
    hq, hk = (attention.simhash(x, planes, coef, 64) for x in (q, k))
    collide = (hq.unsqueeze(-1) == hk.unsqueeze(-2)).squeeze(2).view(4_000, 2, 10, 10)  # two heads a draw
    dots = collide.triu().sum((1, 2, 3)).double()
    law = bench.attention_flops(10, 2, 64, 2, 64)["dots"]
    assert abs(dots.mean() - law) < 6 * dots.std() / math.sqrt(4_000)
    assert round(200 * (1 / 4 + 3 / 4 / 64), 1) == 52.3


def test_erratum_forty_percent():
    """[BL §3.1] "40 % of the KFLOPs" is hashing alone; with the dot products it buys it is 54 %."""
    cost = bench.attention_flops(10, 2, 64, 2, 64)
    assert cost["hashing"] / cost["full"] == 0.4
    assert round(100 * (cost["hashing"] + cost["pairs"]) / cost["full"]) == 54


def test_erratum_more_hashing_than_attention():
    """[BL Figure 1] with 8 bands hashing 10 positions costs 1.6 times the scores it saves."""
    cost = bench.attention_flops(10, 2, 64, 8, 64)
    assert cost["hashing"] / cost["full"] == 1.6


def test_erratum_seven_percent():
    """[BL §3.3] "7 % lower": 0.7672 and 0.7603 of 872 sentences are 669 and 663, 0.7 points."""
    assert round(0.7672 * 872) - round(0.7603 * 872) == 6 and round(100 * 6 / 872, 1) == 0.7


def test_erratum_how_much_slower():
    """[BL Table 1] 3.37e-4 s against 1.22e-5 s: the savings of 60 % ran 27.6 times as long."""
    assert round(3.37e-4 / 1.22e-5, 1) == 27.6


def test_deal_keeps_the_number_of_pairs():
    """The control of the bench: as many rows in each bucket, so as many pairs, at other places."""
    _, (hq, hk) = hashed(n=1, buckets=4)
    dealt = [bench.deal(h) for h in (hq, hk)]
    for a, b in zip((hq, hk), dealt):
        assert torch.equal(a.sort(-1).values, b.sort(-1).values) and not torch.equal(a, b)
    before, after = ((a.unsqueeze(-1) == b.unsqueeze(-2)).sum((-1, -2)) for a, b in ((hq, hk), dealt))
    assert torch.equal(before, after)


def test_the_control_trains_on_dealt_buckets(small, tmp_path):
    """What bench.py twins runs: the same command, other pairs, so other weights."""
    flags = ("--attn", "lsh", "--lsh_bands", "2", "--steps", "3", "--warmup", "1")
    pretrain.main(small(*flags, out="hash"))
    done = run_script("-c", bench.DEAL, "pretrain", *small(*flags, out="dealt"))
    assert done.returncode == 0, done.stderr
    ours, dealt = weights(tmp_path / "hash"), weights(tmp_path / "dealt")
    assert torch.equal(ours["layers.0.planes"], dealt["layers.0.planes"])
    assert not torch.equal(ours["layers.0.qkv.weight"], dealt["layers.0.qkv.weight"])


@pytest.mark.skipif(not os.path.exists("/proc/self/clear_refs"), reason="the system does not say")
def test_peak_memory_counts_what_a_pass_adds():
    """The (L, L) scores of two heads at L 2,048 are 32 MiB, and a plain formula holds some of them."""
    plain = bench.peak_memory(2048, "(q @ k.transpose(-2, -1)).softmax(-1) @ v")
    ours = bench.peak_memory(2048, bench.LSH_CALL)
    assert 60 < plain < 400 and ours < plain


def test_trained_layers_and_figures(started, monkeypatch, tmp_path):
    """Queries and keys of a checkpoint on docstrings; with one bucket all mass is on colliding pairs."""
    found = list(bench.trained_layers(str(started / "lsh"), 3))
    assert [number for number, *_ in found] == [1] and found[0][2].shape == (3, 4, 33, 8)
    monkeypatch.setattr(bench, "medians", lambda todo, rounds=7: {k: 1 + (k == "dense") for k in todo})
    args = bench.parser().parse_args(["trained", "--runs", str(started / "lsh")])
    rows = bench.bench_trained(args)
    assert [row["ratio"] for row in rows] == [2, 2] and all(0 < row["share"] < 100 for row in rows)
    monkeypatch.setattr(attention, "simhash", lambda x, *_: torch.zeros(*x.shape[:2], 1, x.shape[2]).long())
    for row in bench.bench_trained(args):
        assert (row["share"], row["recall"], row["largest"]) == (100, 100, 100)
        assert row["mass"] == pytest.approx(100, abs=1e-3)


def test_figures_are_drawn(started, small, tmp_path, monkeypatch, capsys):
    """All five, of data that is there: the bits are those of the words, the curves those of the logs."""
    pretrain.main(small("--emb", "median", "--steps", 40, out="median"))
    from matplotlib import axes
    shown, lines = [], []
    imshow, plot = axes.Axes.imshow, axes.Axes.plot
    monkeypatch.setattr(axes.Axes, "imshow", lambda self, x, **k: shown.append(x) or imshow(self, x, **k))
    monkeypatch.setattr(axes.Axes, "plot", lambda self, *a, **k: lines.append(a) or plot(self, *a, **k))
    monkeypatch.setattr(bench, "ASSETS", str(tmp_path / "assets"))
    bench.main(["figures", *small()[:4], "--runs", str(started / "lsh"), str(tmp_path / "median")])
    drawn = {path.name: path.stat().st_size for path in (tmp_path / "assets").iterdir()}
    assert set(drawn) == {path.name for path in (HERE / "assets").iterdir()} and min(drawn.values()) > 3_000
    text = (HERE / "README.md").read_text(encoding="utf-8")
    assert all(f"(assets/{name})" in text for name in drawn)
    assert any(np.array_equal(x, hashing.md5_bits(["play", "plays", "played", "playing", "display", "cat"]))
               for x in shown)
    rows = [json.loads(line) for line in open(tmp_path / "median" / "log.jsonl")]
    losses = [row["loss"] for row in rows if "loss" in row]
    curves = [line[1] for line in lines if len(line) > 1 and len(line[1]) == len(losses)]
    assert any(np.allclose(curve, losses) for curve in curves)


def test_rates_and_ratios(monkeypatch):
    """Every timed thing takes a second, the kernel two."""
    affinity = os.sched_getaffinity(0)
    monkeypatch.setattr(bench, "medians", lambda todo, rounds=7: {k: 1 + (k == "kernel") for k in todo})
    monkeypatch.setattr(bench, "many_words", lambda count: [words_like(100)])
    rates = {row["name"]: row["rate"] for row in bench.bench_hashing(None)}
    os.sched_setaffinity(0, affinity)
    assert rates["MD5 digests"] == 100 and rates["LSH index, N 50,260"] == 10
    assert {row["ratio"] for row in bench.bench_kernel(None)} == {2}


@pytest.mark.parametrize("command, says", [
    (["twins"], "needs --data_dir"), (["gaps"], "needs --text"), (["trained"], "needs --runs"),
    (["figures"], "needs --runs")])
def test_bench_says_what_it_needs(command, says):
    refused(bench.main, command, says=says)


def test_prose_on_hashed_attention_follows_the_results():
    """The numbers between the tables of the README, from the files the tables come from."""
    text = " ".join((HERE / "README.md").read_text(encoding="utf-8").split())

    def rows(name):
        return json.loads((HERE / "results" / f"{name}.json").read_text())["rows"]

    def paired(a, b):  # mean and standard error over the seeds
        gaps = np.subtract(a, b)
        return gaps.mean(), gaps.std(ddof=1) / math.sqrt(len(gaps))

    dense, lsh, random = rows("twins")
    for a, b, key, digits, said in ((dense, lsh, "loss_all", 2, "hashed attention, by {} ± {} on average"),
                                    (dense, lsh, "sst2_all", 1, "{} ± {} points"),
                                    (random, lsh, "loss_all", 2, "{} ± {} worse than the hash")):
        mean, error = paired(a[key], b[key])
        assert said.format(f"{mean:.{digits}f}", f"{error:.{digits}f}") in text
    by_length = {row["L"]: row for row in rows("attention")}
    assert "Faster than dense from 256 positions on" in text
    assert all(row["ratio"] > 1 for L, row in by_length.items() if 256 <= L < 65_536)
    assert (f"{by_length[1024]['ratio']:.1f} times at 1,024 and {by_length[16384]['ratio']:.0f} times at "
            f"16,384") in text
    last = by_length[65536]
    assert f"in {last['ours'] / 1000:.1f} seconds and {last['memory']:.0f} MiB" in text
    long = [row for row in rows("steps") if "2048" in row["name"]]
    for key, said in (("share", "{:.0f} to {:.0f} % of the dense one with `upper`"),
                      ("share_all", "{:.0f} to {:.0f} % with `all`")):
        assert said.format(min(row[key] for row in long), max(row[key] for row in long)) in text
    two = [row for row in rows("trained") if row["name"].endswith("r 2")]
    assert (f"{min(r['share'] for r in two):.0f} to {max(r['share'] for r in two):.0f} % of the pairs and "
            f"{min(r['mass'] for r in two):.0f} to {max(r['mass'] for r in two):.0f} % of the mass") in text


def test_prose_on_sets_follows_the_results():
    """What the README says of Superbloom in words has the numbers of results/*.json."""
    def rows(name):
        with open(HERE / "results" / f"{name}.json") as file:
            return {row["name"]: row for row in json.load(file)["rows"]}

    text = " ".join((HERE / "README.md").read_text(encoding="utf-8").split())
    wiki, names, depth, maps = (rows(n) for n in ("simplewiki", "beams", "depth", "coherent"))
    gaps, glue, beauty, books = (rows(n) for n in ("gaps", "median", "beauty", "books"))
    one_map = "superbloom, 1 of 2 maps coherent"
    [same] = [row for name, row in wiki.items() if "as many parameters" in name]
    walks = "co-occurrence: walks"

    def percent(row, key="rec@10"):
        return f"{100 * row[key]:.1f}"

    one, six = "1 layer", "6 layers"
    row, both = "a row for each", [maps[f"{n} of 2 maps coherent"] for n in (0, 1, 2)]
    claims = [
        f"{percent(wiki['superbloom'])} % for Superbloom, {percent(wiki[one_map])} with one coherent map, "
        f"{percent(same)} for a row for each item with as many parameters, {percent(wiki[walks])} for walks, "
        f"{percent(wiki['co-occurrence: counts'])} for counts",
        f"{percent(beauty[one_map])} and {percent(books[one_map])} %, against "
        f"{percent(beauty['popularity'])} and {percent(books['popularity'])} for popularity",
        f"{percent(names['bloom-items, until certified'])} % against {percent(names['popularity'])} for "
        f"popularity, {percent(names['co-occurrence: counts'])} for counts, "
        f"{percent(names['co-occurrence: cosines'])} for cosines and {percent(names[walks])} for walks",
        f"from {percent(depth[f'superbloom, {one}'])} to {percent(depth[f'superbloom, {six}'])} % hashed, "
        f"from {percent(depth[f'{row}, {one}'])} to {percent(depth[f'{row}, {six}'])} % not",
        "hashes right " + ", ".join(percent(found, "hashes_right") for found in both),
        "items (rec@1) " + ", ".join(percent(found, "rec@1") for found in both)]

    def spread(row, key):
        return f"{row[key]:.1f} ± {row[f'{key}_std']:.1f}"

    tables = "20,000 words", "20,000 BPE pieces"
    claims += [f"{spread(glue['median'], 'sst2')} on SST-2 where the mean has {spread(glue['mean'], 'sst2')}",
               f"on CoLA ({spread(glue['median'], 'cola')} against {spread(glue['mean'], 'cola')})",
               f"ahead on SST-2 ({spread(glue[tables[1]], 'sst2')}) and behind on STS-B "
               f"({spread(glue[tables[1]], 'stsb')})",
               f"it names {spread(gaps['median'], 'first')} % of the hidden words, the mean "
               f"{spread(gaps['mean'], 'first')} %",
               f"{spread(gaps['median'], 'first')} % with the median, "
               f"{spread(gaps['mean'], 'first')} % with the mean",
               f"{spread(gaps['weighted'], 'first')} % with learnt weights",
               f"{spread(gaps[f'{tables[0]}, not tied'], 'first')} % with a row for each of 20,000 words",
               f"and {spread(gaps['proj, LSH'], 'first')} % by a rival",
               f"have {spread(gaps['median, tied'], 'first')}, {spread(gaps['mean, tied'], 'first')} and "
               f"{spread(gaps[tables[0]], 'first')} %, and BPE, tied too, has "
               f"{spread(gaps[tables[1]], 'first')} %"]
    assert len({round(row["first"], 1) for row in glue.values()}) == 1  # all of them still name "the"
    _, last = re.findall(r"step 10,000: eval_loss (\S+), ", text)  # of the example of a gap
    claims.append(f"the held-out losses are {last} of the median")
    year, large = 365 * 24 * 3600, rows("million")["superbloom"]
    formers = rows("train")["hashformer: S+R, proj"]["ms"] / 1000 * 500_000 * 128 / year
    blooms = large["seconds"] / large["batch"] * 1_024 * 1_000_000 / year
    hashed = rows("steps")["mlm, L 512, bfloat16"]["upper"] / 1000 * 64 * 512 / 8_192 * 20_000 / 3600
    claims += [f"of 512) {formers:.1f} years, Superbloom (a billion pages) {blooms:.1f} years, BERT-LSH",
               f"rows of 512) {hashed:.0f} hours."]
    worse = {name: f"{row['more']:.3f}" for name, row in rows("robust").items()}
    lost, coarse = "1 row in 50 spoilt by 10 σ", "rows of 2 bits"
    claims += [f"its loss rises by {worse[f'median: {lost}']}, that of the mean by {worse[f'mean: {lost}']}",
               f"2 bits cost it {worse[f'median: {coarse}']}, the mean {worse[f'mean: {coarse}']}"]
    crowd, layer = rows("collisions")["k 5, R 500"], rows("sketch")
    claims += [f"of the running text {crowd['one']:.0f} % are",
               f"and {crowd['half']:.0f} % are behind a commoner"]
    assert crowd["counted"] == 0 and layer["median"]["ratio"] < 2  # "less than twice the time of the mean"
    claims.append(f"of five rows {layer['median, torch.median']['ratio']:.0f} times")
    for claim in claims:
        assert claim in text, claim
    speed = rows("bloom")
    at50 = [row for name, row in speed.items() if name.startswith("alpha 50")]
    assert min(row["ratio"] for row in at50) > 300 and max(row["beam"] for row in at50) < 1
    assert speed["alpha 50, peaked"]["ratio_sure"] > 30
    assert all(row["exact"] == "True" for row in speed.values())


def test_many_words_are_distinct():
    words = [w for part in bench.many_words(30_011, 9_999) for w in part]
    assert len(set(words)) == len(words) == 30_011


# ---------------------------------------------------------------------------------------------------------
# The project: what the documentation says is so

OURS = ["hashing", "embeddings", "attention", "model", "pretrain", "finetune", "infer", "bench"]
ARROWS = {"hashing": set(), "embeddings": set(), "attention": set(), "model": {"embeddings", "attention"},
          "pretrain": {"hashing", "model"}, "finetune": {"hashing", "model"},
          "infer": {"hashing", "model"}, "bench": set(OURS)}
TREES = {name: ast.parse((HERE / f"{name}.py").read_text(encoding="utf-8")) for name in OURS}


@pytest.mark.parametrize("name", OURS)
def test_imports_run_one_way(name):
    imported = {a.name for n in ast.walk(TREES[name]) if isinstance(n, ast.Import) for a in n.names}
    imported |= {n.module for n in ast.walk(TREES[name]) if isinstance(n, ast.ImportFrom)}
    assert imported & set(OURS) <= ARROWS[name]
    assert name != "hashing" or "torch" not in imported


@pytest.mark.parametrize("name", ["hashing", "embeddings", "attention"])
def test_leaves_run_alone(name, tmp_path):
    shutil.copy(HERE / f"{name}.py", tmp_path)
    done = subprocess.run([sys.executable, f"{name}.py"], cwd=tmp_path, capture_output=True, text=True,
                          timeout=120)
    assert done.returncode == 0 and done.stdout.count("\n") > 3, done.stderr


@pytest.mark.parametrize("name", OURS)
def test_public_functions_say_what_goes_in_and_out(name):
    for node in ast.walk(TREES[name]):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
            inner = isinstance(node, ast.FunctionDef) and any(
                node in ast.walk(f) for f in ast.walk(TREES[name])
                if isinstance(f, ast.FunctionDef) and f is not node)
            assert inner or ast.get_docstring(node), f"{name}.{node.name} has no docstring"


@pytest.mark.parametrize("name", [n for n in OURS if n != "bench"])
def test_header_tags_are_the_tags_at_the_lines(name):
    """The Map of a header names tags and where they stand; each stands there, and no other anywhere."""
    text = (HERE / f"{name}.py").read_text(encoding="utf-8")
    header, body = ast.get_docstring(TREES[name]), text.split('"""', 2)[2]
    mapped = re.findall(r"(\[[^\]]+\])\s+([\w.]+)",
                        re.search(r"Map(.*?)\n(?:Not here|Departs)", header, re.S)[1])
    tag = r"\[(?:HF|SR|BERT|V|GLUE|SQ|BL|SB|CM|SV)\b[^\]]*\]"
    assert {t for t, _ in mapped} == set(re.findall(tag, body)), name
    for t, place in mapped:
        node = next(n for n in ast.walk(TREES[name]) if getattr(n, "name", None) == place.split(".")[-1]
                    or isinstance(n, ast.Assign) and getattr(n.targets[0], "id", None) == place)
        around = ast.get_source_segment(text, node) + "\n" + text.splitlines()[node.lineno - 2]
        assert t in around, f"{name}: {t} does not stand at {place}"


def test_house_rules():
    for name in [*OURS, "test_all"]:
        text = (HERE / f"{name}.py").read_text(encoding="utf-8")
        assert max(map(len, text.splitlines())) <= 110, name
        for node in ast.walk(ast.parse(text)):
            assert not (isinstance(node, ast.ExceptHandler) and node.type is None), name
            if isinstance(node, ast.Call):
                called = getattr(node.func, "id", "")
                assert called not in ("exec", "eval", "globals", "hash"), f"{name}:{node.lineno}"
                assert not any(k.arg == "type" and getattr(k.value, "id", "") == "bool"
                               or k.arg in ("weights_only", "trust_remote_code") for k in node.keywords)


@pytest.mark.parametrize("name", ["pretrain", "finetune", "infer", "bench"])
def test_help_explains_every_flag_and_every_flag_is_read(name):
    done = run_script(f"{name}.py", "--help")
    assert done.returncode == 0 and "Traceback" not in done.stderr
    text = "".join((HERE / f"{n}.py").read_text(encoding="utf-8") for n in (name, "model"))
    for flag in set(re.findall(r"--(\w+)", done.stdout)) - {"help", "nproc_per_node"}:
        if not flag.startswith("no"):
            read = len(re.findall(rf"\.{flag}\b|\"{flag}\"", text))
            assert read > (f'"--{flag}"' not in text), f"--{flag} is never read"


def test_importing_does_nothing():
    done = run_script("-c", f"import {', '.join(OURS)}")
    assert done.returncode == 0 and not done.stdout and not done.stderr


def readme_commands():
    text = (HERE / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```(?:sh|bash)\n(.*?)```", text, re.S)
    return [line for block in blocks for line in block.splitlines() if "python" in line or "torchrun" in line]


def test_readme_commands_run(small, tmp_path, text_file, monkeypatch, capsys):
    """Each command of the README that this machine can run, with its own flags, then those of a tiny run."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(text_file.parent, tmp_path / "my_texts")
    kinds = Counter()
    for name in ("a.csv", "b.csv"):
        Path(name).write_text("title,body,topic\n" + "one two,three,five\na,b,six\n" * 9)
    Path("reviews.txt").write_text("a charming journey\n")
    Path("baskets.txt").write_text("socket bind [MASK]\n")
    Path("my_words.txt").write_text("with return zebra\n")
    page = random.Random(0)
    names = ["socket", "bind", "listen", *words_like(30)]
    Path("pages.jsonl").write_text("".join(json.dumps(dict(links=page.sample(names, 5))) + "\n"
                                           for _ in range(90)))
    found = questions(random.Random(0), 9)
    for split in ("train", "dev"):
        (tmp_path / f"{split}-v1.1.json").write_text(json.dumps(nested(found)))
    monkeypatch.setitem(finetune.SQUAD, "squad", ("v1.1", 9, 9))
    glue = glue_folder(tmp_path / "glue", monkeypatch)
    modules = {f"{name}/{i}.py": str(tmp_path / f"{name}{i}.py") for name in ("x", "y") for i in range(40)}
    for name, path in modules.items():
        Path(path).write_text(f'"""The docstring of the module {name} has words."""')
    monkeypatch.setattr(hashing, "python_files", lambda: modules)
    small_proformer = model.PRESETS["proformer"] | dict(width=32, heads=4, ffn=64)
    monkeypatch.setitem(model.PRESETS, "proformer", small_proformer)
    for line in readme_commands():
        line = line.split("#")[0].split("&&")[-1].strip()
        line = line.replace("$e", "proj").replace("$h", "md5").replace("$s", "0")
        words = shlex.split(line)
        script = next((w for w in words if w.endswith(".py")), None)
        if script is None:
            continue
        flags = words[words.index(script) + 1:]
        if script == "pretrain.py":
            pretrain.parser().parse_args(flags)  # the flags as printed
            flags += ["--out", str(tmp_path / f"p{kinds[script]}")] + small()[2:4] + SMALL
            flags += ["--data", str(text_file)] * ("pages.jsonl" not in flags)
            bloom = any("bloom" in flag for flag in flags) and "lookup" not in flags
            flags += ["--alpha", "3"] * bloom  # of few items
            pretrain.main([f for f in flags if f])
        elif script == "finetune.py":
            finetune.parser().parse_args(flags)
            if "--ckpt" in flags:  # out/proj-lsh of the first command, in small
                flags[flags.index("--ckpt") + 1] = str(tmp_path / "p0")
            task = flags[flags.index("--task") + 1] if "--task" in flags else "own"
            where = ["--data_dir", str(tmp_path) if task == "squad" else glue]
            where *= task not in ("own", "pydoc")
            # each in a folder of its own, as without --out; infer.py asks those from the first command
            out = task + "".join(flag for flag in ("-scratch", "-preset") if flag[1:] in " ".join(flags))
            quick = [*QUICK, "--epochs", "1", "--seeds", "1", "--out", str(tmp_path / f"f-{out}")]
            finetune.main([*flags, *where, *quick, *small()[2:4]])
        elif script == "infer.py":
            name = next((f"f-{task}" for task in ("sst2", "squad") if f"-{task}" in " ".join(flags)), None)
            mlm = any("[MASK]" in f for f in flags)
            if name is None:
                name = f"i{mlm}"
                more = ("--emb", "lookup", "--objective", "mlm") if mlm else ()
                if "out/bloom-items" in flags:
                    name, more = "ib", ("--data", "pages.jsonl", "--emb", "bloom", "--alpha", "3")
                if "out/median" in flags:
                    name, more = "im", ("--emb", "median", "--buckets", "31")
                pretrain.main(small(*more, "--length", "33", out=name))
            flags[flags.index("--ckpt") + 1] = str(tmp_path / name)
            infer.main(flags)
        elif script == "bench.py":
            bench.parser().parse_args(flags)
        else:
            assert script in ("hashing.py", "embeddings.py", "attention.py", "test_all.py"), line
        kinds[script] += 1
    assert kinds["pretrain.py"] >= 3 and kinds["infer.py"] >= 5 and kinds["finetune.py"] >= 5


def test_readme_numbers_are_the_measured_ones():
    """The tables between markers are what bench.py writes from results/."""
    text = (HERE / "README.md").read_text(encoding="utf-8")
    for name, table in bench.readme_tables().items():
        wanted = f"<!-- {name} -->\n{table}<!-- end -->"
        assert wanted in text, f"run python bench.py readme: {name} has changed"
