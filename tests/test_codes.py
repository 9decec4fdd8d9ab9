"""Tests of data/codes.py: what is hashed, and what is kept in files beside the corpus."""

import copy
import re
from multiprocessing.pool import ThreadPool
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from data import codes, items
from data.splitters import Words
from hashing import MD5, NgramLSH
from model import Config
from support.common import InputError
from tests.helpers import make_words
from tokenizer import FIRST_WORD_ID, SEP, make_tokenizer

WORDS = make_words(120)
# what the flags of pretrain.py say; of Config, the sizes of all embeddings
ARGS = dict(split="regex", hash="lsh", features=999, key=None, hash_seed=0, vocab=50, alpha=5,
            max_alpha=5, coherent=0)
SIZES = dict(bits=64, hashes=2, buckets=31, rows=97, weights=53)


def make_corpus(folder):
    """Return a Corpus of 60 pages of two words each, of which six are held out."""
    pages = FIRST_WORD_ID + np.arange(120).reshape(60, 2)
    ids = np.insert(pages, 2, SEP, axis=1).flatten()
    counts = np.arange(FIRST_WORD_ID + 120)
    return SimpleNamespace(folder=str(folder), words=WORDS, counts=counts, splitter=Words(),
                           ids=ids, offsets=np.arange(0, 181, 3), meta=dict(documents=60))


def build(corpus, emb="proj", head="sr", **flags):
    """Return the tokenizer, the codes and the targets that flags ask for."""
    args = SimpleNamespace(**ARGS | flags)
    config = Config(emb=emb, head=head, **SIZES)
    tokenizer, config = codes.build_tokenizer(args, config, corpus)
    table = codes.build_codes(config, tokenizer, corpus)
    return tokenizer, table, codes.build_targets(config, tokenizer, corpus, table)


@pytest.mark.parametrize("emb", ["proj", "pool", "emb", "median", "weighted", "ngram",
                                 "lookup", "bloom"])
def test_codes_are_those_of_each_token_id(tmp_path, emb):
    tokenizer, table, _ = build(make_corpus(tmp_path), emb)
    num_words = ARGS["vocab"] if tokenizer.is_fixed else 120
    tokenizer.ids(WORDS[:num_words])
    assert np.array_equal(table, tokenizer.codes())


@pytest.mark.parametrize("emb, flags, sizes", [
    ("lookup", {}, dict(rows=FIRST_WORD_ID + 50)),
    ("bloom", {}, dict(buckets=FIRST_WORD_ID + 10)),  # of five words each
    # 3 buckets of 4 words have 3 · 3 digests, too few for ten words; 4 of 3 have 16
    ("bloom", dict(vocab=10, alpha=None), dict(buckets=FIRST_WORD_ID + 4)),
    ("median", {}, {}),
])
def test_vocabulary_decides_on_the_sizes_of_tables(tmp_path, emb, flags, sizes):
    args = SimpleNamespace(**ARGS | flags)
    config = Config(emb=emb, **SIZES)
    given = copy.deepcopy([vars(args), config])
    _, fitted = codes.build_tokenizer(args, config, make_corpus(tmp_path))
    assert fitted == Config(emb=emb, **SIZES | sizes)
    assert given == [vars(args), config]  # neither has changed


@pytest.mark.parametrize("emb", ["proj", "median", "weighted"])
def test_targets_of_hash_mlm_are_sketches(tmp_path, emb):
    tokenizer, _, targets = build(make_corpus(tmp_path), emb, "hash-mlm")
    expected = tokenizer.target_coder.codes(WORDS)
    assert np.array_equal(targets[FIRST_WORD_ID:], expected)
    build(make_corpus(tmp_path), "median", "hash-mlm")  # has the same sketch
    assert len(list(tmp_path.glob("codes-*.pt"))) == (1 if emb == "median" else 2)


def test_targets_are_the_codes_of_digests_and_none_of_other_heads(tmp_path):
    _, table, targets = build(make_corpus(tmp_path), "bloom", "hash-mlm")
    assert targets is table
    assert build(make_corpus(tmp_path), "proj", "sr")[2] is None


def test_hash_is_fitted_to_the_counts_of_the_corpus(tmp_path):
    corpus = make_corpus(tmp_path)
    tokenizer, _, _ = build(corpus, features=70)
    counts = dict(zip(WORDS, corpus.counts[FIRST_WORD_ID:]))
    assert tokenizer.coder.hash.grams == NgramLSH.fit(counts, 70).grams


def test_files_of_other_hashes_are_kept_apart(tmp_path):
    """Codes of another hash would be read without an error."""
    corpus = make_corpus(tmp_path)
    variants = [
        dict(hash="md5"),
        dict(hash="md5", key="k"),
        dict(hash="lsh"),
        dict(hash="lsh", features=70),
        dict(emb="pool"),  # other codes of the same hash
        dict(emb="median"),
        dict(emb="median", hash_seed=1),
    ]
    tables = [build(corpus, **variant)[1].tolist() for variant in variants]
    for i, table in enumerate(tables):
        assert table not in tables[:i]
        assert table == build(corpus, **variants[i])[1].tolist()  # from its file


def test_edit_of_a_hash_function_takes_effect(tmp_path, monkeypatch):
    """The codes of before the edit would be read without an error."""
    assert {"codes.py", "items.py"} <= {path.name for path in codes.CODE}  # learn_map's pages
    corpus = make_corpus(tmp_path)
    _, before, _ = build(corpus, hash="md5")
    source = tmp_path / "hashing.py"
    source.write_text("# edited")
    monkeypatch.setattr(codes, "CODE", [source])
    monkeypatch.setattr(MD5, "bits", lambda self, words, T: np.ones((len(words), T), np.uint8))
    _, after, _ = build(corpus, hash="md5")
    assert (after[FIRST_WORD_ID:] == 255).all()
    assert not (before[FIRST_WORD_ID:] == 255).all()


def test_full_disk_is_named_and_leaves_no_half_file(tmp_path, monkeypatch):
    """PyTorch reports it as a RuntimeError."""
    def save(parts, path):
        open(path, "w").close()
        raise RuntimeError("unexpected pos 704 vs 598")

    monkeypatch.setattr(torch, "save", save)
    with pytest.raises(InputError, match="codes-.*.pt: could not be written .*disk may be full"):
        build(make_corpus(tmp_path), hash="md5")
    assert {path.suffix for path in tmp_path.iterdir()} <= {".lock"}  # on Windows it is gone by now


@pytest.mark.parametrize("name", ["fit-lsh-*", "codes-*"])
def test_damaged_file_is_refused_by_name(tmp_path, name):
    corpus = make_corpus(tmp_path)
    build(corpus)
    [path] = tmp_path.glob(f"{name}.pt")
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(InputError, match=f"^{re.escape(str(path))}: "):
        build(corpus)


def build_coherent_map(folder, moved=slice(0)):
    """Return the digests of a coherent map; each item of the moved pages goes to the next one."""
    corpus = make_corpus(folder)
    first_items = corpus.ids.reshape(60, 3)[moved, 0]
    first_items[:] = np.roll(first_items, 1)
    tokenizer, _, _ = build(corpus, "bloom", coherent=1, vocab=120)
    return tokenizer.coder.bloom_map.digest


def test_coherent_map_learns_from_training_pages_alone(tmp_path, monkeypatch):
    """[SB App. D] Held-out pages would tell which items go together."""
    pages = (np.arange(6, 60), np.arange(6))
    monkeypatch.setattr(items, "split_pages", lambda corpus: pages)
    digest = build_coherent_map(tmp_path / "1")
    assert np.array_equal(digest, build_coherent_map(tmp_path / "2", moved=slice(0, 6)))
    assert not np.array_equal(digest, build_coherent_map(tmp_path / "3", moved=slice(6, 60)))


def test_words_that_are_hashed_in_several_processes_keep_their_order(monkeypatch):
    monkeypatch.setattr(codes, "start_workers", lambda: ThreadPool(2))
    monkeypatch.setattr(codes, "MAX_HASHED", 50)
    tokenizer = make_tokenizer(Config(), hash=MD5())
    table = codes.hash_corpus(tokenizer.coder, SimpleNamespace(words=WORDS))
    assert np.array_equal(table[FIRST_WORD_ID:], tokenizer.coder.codes(WORDS))


@pytest.mark.parametrize("counts, line", [
    ([9, 9, 9, 0, 0, 4, 6, 0], ""),  # special tokens are no words
    ([0, 0, 0, 1, 0, 4, 13, 2], "warning: unknown words, all alike to the model: 15.0%"),
    ([0, 0, 0, 0, 0, 0, 19, 1], "unknown words, all alike to the model: 5.0%\n"),
])
def test_report_unknown_prints_the_share_of_words_by_count(counts, line, capsys):
    """The word "dog" of the corpus and [UNK] are unknown."""
    tokenizer = make_tokenizer(Config(emb="lookup"), vocabulary=["the", "cat"])
    codes.report_unknown(tokenizer, ["the", "cat", "dog"], np.array(counts))
    out = capsys.readouterr().out
    assert out.split(". Use")[0] == line
