"""data/corpus.py: documents to token IDs on disk. test_all.py has the example by hand."""

import os
from collections import Counter

import numpy as np
import pytest

import data.corpus
import data.splitters
from data.corpus import Corpus
from data.items import split_pages
from data.sources import Files
from support.common import InputError
from tests.helpers import list_pages
from tokenizer import FIRST_WORD_ID
from words import list_words


def test_prepare_loses_no_word_and_numbers_them_by_frequency(text_path, load, monkeypatch):
    monkeypatch.setattr(data.corpus, "BLOCK", 1_001)  # its border is inside a document
    corpus = load(text_path)
    text = text_path.read_text()
    counts = Counter(list_words(text, "regex"))
    assert list_pages(corpus) == [list_words(line, "regex") for line in text.splitlines()]
    assert list(zip(corpus.words, corpus.counts[FIRST_WORD_ID:])) == counts.most_common()
    assert corpus.meta["words"] == counts.total()
    assert corpus.meta["distinct"] == len(counts)


def test_jobs_stay_in_order(write, load):
    """There are three of them, and more words than uint16 has numbers."""
    text = "".join(f"w{i} w{i} w{i} w{i} w{i}\n" for i in range(70_001))
    assert len(text) > 2_000_000
    corpus = load(write("a.txt", text))
    lines = corpus.ids.reshape(70_001, 6)
    assert (lines[:, 0] == FIRST_WORD_ID + np.arange(70_001)).all()


@pytest.mark.parametrize("split", ["bpe", "phrases"])
def test_subwords_keep_their_own_numbers(split, write, load):
    corpus = load(write("a.txt", "the cat sat on the mat\n" * 31), split, max_subwords=271)
    [pieces] = corpus.splitter.split_texts(["the cat sat on the mat"])
    assert list_pages(corpus) == [pieces] * 31
    assert corpus.words == corpus.splitter.units


def test_frequent_units_are_those_that_occur(write, load):
    """The first subwords are bytes, and most bytes are in no text."""
    corpus = load(write("a.txt", "a b b c c c"), "bpe", max_subwords=256)
    assert corpus.frequent(2) == ["Ġ", "c"]
    assert set(corpus.frequent(99)) == set("Ġabc")


def test_error_in_a_worker_ends_the_preparation(write, load, monkeypatch):
    """Nobody waits for anybody, and the reader does not read to the end first."""
    jobs = iter([None] + [["a b"]] * 500)
    monkeypatch.setattr(Files, "jobs", lambda self: jobs)
    with pytest.raises(TypeError):
        load(write("x.txt", "a b"))
    assert len(list(jobs)) > 400


def test_changed_file_is_another_corpus(write, load):
    """Its time says so, even where its size and its words are the same."""
    path = write("a.txt", "a b a b")
    first = load(path)
    assert load(path).folder == first.folder
    write("a.txt", "a b b a")
    os.utime(path, (0, 0))
    changed = load(path)
    assert changed.words == first.words
    assert changed.meta["digest"] != first.meta["digest"]


def test_split_pages_hold_out_one_in_ten_at_random(pages_path, load):
    train, held_out = split_pages(load(pages_path, "items"))
    assert len(held_out) == 40
    assert set(held_out) != set(range(40))
    assert sorted([*train, *held_out]) == list(range(400))


@pytest.mark.parametrize("name", ["ids.bin", "words.txt", "meta.json"])
def test_cut_corpus_is_refused(name, write, load):
    # no variable has the corpus: Windows cuts no file that is mapped
    folder = load(write("a.txt", "the cat sat\n" * 13)).folder
    path = os.path.join(folder, name)
    os.truncate(path, os.path.getsize(path) - 2)
    with pytest.raises(InputError, match="damaged corpus; remove it"):
        Corpus(folder)


def test_edit_of_the_splitting_is_another_corpus(write, load, tmp_path, monkeypatch):
    """Words of before the edit would be read without an error."""
    names = {path.name for path in data.corpus.CODE}
    assert {"rows.py", "sources.py", "splitters.py", "tokenizer.py", "words.py"} <= names
    path = write("a.txt", "a b")
    load(path)
    source = tmp_path / "words.py"
    source.write_text("# edited")
    monkeypatch.setattr(data.corpus, "CODE", [source])
    monkeypatch.setattr(data.splitters, "list_words", lambda text, how: [text])
    assert load(path).words == ["a b"]
