"""data/corpus.py, data/sources.py, data/rows.py: files and the installed Python to token IDs."""

import gzip
import json
import os
from collections import Counter

import datasets
import numpy as np
import pytest

import data.corpus
import data.sources
import tokenizer
from data.corpus import Corpus, prepare
from data.items import split_pages
from data.python_source import python_files, python_names
from data.rows import read_rows
from data.sources import Files, PythonTexts, choose_columns, find_sources, name_data
from hashing import list_words
from support.common import InputError
from tokenizer import FIRST_WORD_ID, SEP, item_names

ROWS = [dict(n=1, text="one fish"), dict(n=2, text="two fish"), dict(n=3, text="naïve 日本")]
TEXTS = [row["text"] for row in ROWS]


@pytest.fixture
def write(tmp_path):
    """Return a function that writes a file below tmp_path: bytes, or text, zipped for .gz."""
    def write(name, content):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, str):
            content = content.encode()
            if name.endswith(".gz"):
                content = gzip.compress(content)
        path.write_bytes(content)
        return str(path)

    return write


@pytest.fixture
def load(tmp_path):
    """Return a function that prepares data and loads it."""
    def load(data, split="regex", **options):
        folder = prepare(str(data), split, str(tmp_path / "cache"), quiet=True, **options)
        return Corpus(folder)

    return load


def to_lines(rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


def list_pages(corpus):
    """Return the documents of a corpus as list of list[str], by its IDs and its offsets."""
    pages = []
    for start, stop in zip(corpus.offsets[:-1], corpus.offsets[1:]):
        assert corpus.ids[stop - 1] == SEP
        pages.append([corpus.words[i - FIRST_WORD_ID] for i in corpus.ids[start:stop - 1]])
    return pages


# Words to token IDs; test_all.py has the example by hand


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
    [pieces] = corpus.subwords.split_texts(["the cat sat on the mat"])
    assert list_pages(corpus) == [pieces] * 31
    assert corpus.words == corpus.subwords.units


def test_frequent_units_are_those_that_occur(write, load):
    """The first subwords are bytes, and most bytes are in no text."""
    corpus = load(write("a.txt", "a b b c c c"), "bpe", max_subwords=256)
    assert corpus.frequent(2) == ["Ġ", "c"]
    assert set(corpus.frequent(99)) == set("Ġabc")


def test_error_in_a_worker_ends_the_preparation(write, load, monkeypatch):
    """Nobody waits for anybody, and the reader does not read to the end first."""
    jobs = iter([None] + [["a b"]] * 500)
    monkeypatch.setattr(Files, "jobs", lambda self: jobs)
    monkeypatch.setattr(data.corpus, "num_cores", lambda: 2)
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
    corpus = load(write("a.txt", "the cat sat\n" * 13))
    path = os.path.join(corpus.folder, name)
    os.truncate(path, os.path.getsize(path) - 2)
    with pytest.raises(InputError, match="damaged corpus; remove it"):
        Corpus(corpus.folder)


def test_edit_of_the_splitting_is_another_corpus(write, load, tmp_path, monkeypatch):
    """Words of before the edit would be read without an error."""
    path = write("a.txt", "a b")
    load(path)
    source = tmp_path / "hashing.py"
    source.write_text("# edited")
    monkeypatch.setattr(data.corpus, "CODE", [source])
    monkeypatch.setattr(tokenizer, "list_words", lambda text, how: [text])
    assert load(path).words == ["a b"]


def test_plus_joins_sources(write, load):
    corpus = load(write("a.txt", "x") + "+" + write("b.txt", "y"))
    assert list_pages(corpus) == [["x"], ["y"]]


@pytest.mark.parametrize("source, again", [
    *[("a.txt", again) for again in ("a.txt", "./a.txt", "link.txt", "../all")],
    ("bookcorpus", "rojagtap/bookcorpus"),
    ("owner/name", "owner/name::train"),
])
def test_source_that_is_named_twice_is_refused(source, again, write, load, monkeypatch):
    """Its texts would be held out and trained on."""
    path = write("all/a.txt", "x")
    monkeypatch.chdir(os.path.dirname(path))
    os.symlink(path, "link.txt")
    with pytest.raises(InputError, match="expected each file or name once"):
        load(f"{source}+{again}")


@pytest.mark.parametrize("name, message", [
    ("stdlib", "got both. Use ./stdlib"),
    ("bookcorpus", "got both. Use ./bookcorpus"),
    ("c++.txt", r"\+ joins sources"),
])
def test_path_that_reads_as_something_else_is_refused(name, message, write, load, monkeypatch):
    monkeypatch.chdir(os.path.dirname(write(name, "x")))
    with pytest.raises(InputError, match=message):
        load(name)


# Rows of files


@pytest.mark.parametrize("name, content", [
    ("a.TXT", "\n".join(TEXTS)),
    ("a.csv", "\ufefftext,n\r\n" + "".join(f"{text},1\r\n" for text in TEXTS)),
    ("a.tsv.gz", "text\tn\n" + "".join(f"{text}\t1\n" for text in TEXTS)),
    ("a.jsonl.gz", to_lines(ROWS)),
    ("a.json", json.dumps(ROWS)),
    ("data.json", json.dumps(dict(data=ROWS))),  # as SQuAD has it
    ("lines.json", to_lines(ROWS)),
])
def test_read_rows_reads_every_format(name, content, write):
    rows = read_rows(write(name, content))
    assert [row["text"] for row in rows] == TEXTS


def test_read_rows_reads_parquet(tmp_path):
    path = str(tmp_path / "a.parquet")
    datasets.Dataset.from_list(ROWS).to_parquet(path)
    assert list(read_rows(path)) == ROWS


@pytest.mark.parametrize("value", [{}, "", [1]])
def test_column_data_of_one_row_is_no_list_of_rows(value, write):
    row = dict(text="x", data=value)
    assert list(read_rows(write("a.json", json.dumps(row)))) == [row]


@pytest.mark.parametrize("data, expected", [
    ("owner/na.me:20.de:test", ("owner/na.me", "20.de", "test")),
    ("wikipedia", ("wikimedia/wikipedia", "20231101.en", "train")),
])
def test_hub_id_may_name_configuration_and_split(data, expected, load, monkeypatch):
    calls = []

    def load_dataset(name, config, split, streaming):
        calls.append((name, config, split))
        return ROWS

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert load(data).words[0] == "fish"
    assert calls == [expected]


def test_name_of_hub_data_has_its_configuration():
    """Else runs over two languages would share their default --out."""
    assert name_data("owner/name:20.de+texts/a.csv") == "name-20.de+a"


@pytest.mark.parametrize("name, content, expected", [
    # 001 and NA are text; a quoted cell may have a line break; an empty line is no row; names of
    # columns are stripped
    ("a.csv", 'a, b\n001,NA\n\n"x, ""y""\nz",\n', [["001", "NA"], ['x, "y"\nz', ""]]),
    ("a.tsv", 'a\tb\n"x\t2"\n\t\n', [['"x', '2"'], ["", ""]]),  # no quotes in a .tsv
])
def test_cells_of_a_table_stay_text(name, content, expected, write):
    rows = list(read_rows(write(name, content)))
    assert rows == [dict(zip("ab", cells)) for cells in expected]


@pytest.mark.parametrize("name, content, sep, expected", [
    ("a.csv", 'a;b\nx, y;"1;2"\n', ";", [dict(a="x, y", b="1;2")]),
    ("a.txt", "New York;Jazz\r\n", ";", [dict(text=["New York", "Jazz"])]),
])
def test_sep_is_between_the_cells(name, content, sep, expected, write):
    assert list(read_rows(write(name, content), sep=sep)) == expected


@pytest.mark.parametrize("name, content, encoding, expected", [
    ("a.txt", "naïve\n".encode("latin-1"), "latin-1", "naïve"),
    ("a.csv", "text\nnaïve\n".encode("utf-16"), "utf-16", "naïve"),
    ("a.txt", b"a\0b\n", "utf-8", "a\0b"),  # NULs are kept where UTF-8 is named
    ("a.csv", b"\xef\xbb\xbftext\nx\n", "UTF8", "x"),  # and its mark is no text
])
def test_files_are_read_in_their_encoding(name, content, encoding, expected, write):
    assert list(read_rows(write(name, content), encoding=encoding)) == [dict(text=expected)]


def test_cell_of_a_whole_article_is_read(write):
    article = "word " * 50_000  # Python's csv refuses more than 131,072 characters by default
    assert list(read_rows(write("a.csv", f"text\n{article}\n"))) == [dict(text=article)]


def test_row_that_a_line_break_has_cut_goes_with_its_second_half(write, capsys):
    """Each half of `a bad⏎film, neg` is damaged, though the second has two cells."""
    path = write("a.tsv", "text\tlabel\n" + "fine\tpos\n" * 100 + "a bad\nfilm\tneg\nend\tpos\r\n")
    rows = list(read_rows(path))
    assert [row["text"] for row in rows] == ["fine"] * 100 + ["end"]
    assert "another number in 1 of 103 rows, the first in row 101" in capsys.readouterr().err


@pytest.mark.parametrize("name, content, message", [
    ("a.csv", "u1,New York\nu1,Jazz\n", "got u1, New York, where u1 looks like a cell"),
    ("b.csv", "1,x\n2,y\n", "where 1 looks like a cell. Use --header none"),
])
def test_first_row_is_not_lost_where_a_header_is_missing(name, content, message, write, load):
    path = write(name, content)
    with pytest.raises(InputError, match=message):
        load(path, "items")
    corpus = load(path, "items", header="none", field="1,2")
    assert sum(map(len, list_pages(corpus))) == 2
    assert len(list(read_rows(path, header="first"))) == 1


def test_separator_is_asked_for_where_a_header_is_missing(write):
    """Else the label would be a part of the text."""
    with pytest.raises(InputError, match="Use --sep"):
        list(read_rows(write("a.csv", "a bad film;neg\n"), header="none"))


@pytest.mark.parametrize("wrong", ["x,1,more", "x"])
def test_table_row_of_another_length_is_never_shifted(wrong, write):
    path = write("a.csv", f"text,n\na,1\n{wrong}\nb,2\n")
    with pytest.raises(InputError, match=r"2 columns \(text, n\).* 1 of 3 rows, .* row 2"):
        list(read_rows(path))
    rows = list(read_rows(path, keep_damaged=True))
    assert rows[0]["text"] == "a"
    assert rows[1] == {}


@pytest.mark.parametrize("field, row, expected", [
    ("more", dict(text="x", more="y"), "more"),
    (None, dict(text="x", more="y"), "text"),
    (None, dict(n=1, body="y"), "body"),  # the only strings
])
def test_choose_columns_takes_field_then_text_then_the_only_strings(field, row, expected):
    assert choose_columns("a.csv", row, field) == [expected]


def test_empty_cells_do_not_decide_on_the_column(write, load):
    """One of two texts is null in the first row, and may be the one that is meant."""
    path = write("a.jsonl", '{"a": "x", "b": null}\n{"a": "x", "b": "y"}\n')
    with pytest.raises(InputError, match="expected one column of text, got a, b"):
        load(path)


def test_rows_without_the_column_are_counted(write, load, capsys):
    load(write("a.jsonl", '{"text": "x"}\n{"Text": "y"}\n{"text": null}\n'))
    assert "a.jsonl: 1 of 3 rows have no text" in capsys.readouterr().err


def test_files_of_a_folder_are_those_that_can_be_read(write, tmp_path):
    expected = [write("all/a[1].txt", "x"), write("all/sub.csv", "x")]
    for name in (".hidden.txt", ".git/x.txt", "notes.bin"):
        write(f"all/{name}", "x")
    (tmp_path / "all/broken.txt").symlink_to("absent")
    [source] = find_sources(str(tmp_path / "all"), "regex", None, {})
    assert source.paths == expected


def test_bytes_that_are_not_utf8_are_counted_on_stderr(write, load, capsys):
    """A NUL after the first kilobytes is text."""
    content = b"\xef\xbb\xbfcaf\xe9 ok\r\n" + b"word " * 9_001 + b"\ra\x00\xe9"
    corpus = load(write("a.txt", content))
    assert ": 2 characters could not be decoded" in capsys.readouterr().err
    assert sorted(corpus.words) == sorted(["caf", "\ufffd", "ok", "word", "a"])
    assert corpus.meta["documents"] == 2


def test_half_a_surrogate_pair_is_a_character(write, load):
    corpus = load(write("a.jsonl", to_lines([dict(text="\ud800 a\rb \u2028"), dict(text=None)])))
    assert corpus.words == ["\ud800", "a", "b"]


# Item sets


def test_item_names_are_a_set_in_order():
    assert item_names("New  York\tJazz\t\tNew York") == ["New York", "Jazz"]
    assert item_names("b a b") == ["b", "a"]
    assert item_names([" Miles\n Davis ", None, "", 3, "3"]) == ["Miles Davis", "3"]


@pytest.mark.parametrize("name, content, field, expected", [
    ("list.jsonl", '{"t": "y", "l": null}\n{"t": "x", "l": [5, 3, 5]}\n', None, [["5", "3"]]),
    ("item.csv", "items\nb a\n", None, [["b", "a"]]),
    ("pairs.csv", "item,page\nNew York,1\nx,2\n7,1\n", "page,item", [["New York", "7"], ["x"]]),
    ("three.csv", "o,date,sku\n1,x,30\n2,x,4\n1,y,7\n", "o, sku", [["30", "7"], ["4"]]),
    ("text.txt", "b a b\n\nNew York\tJazz\n", None, [["b", "a"], ["New York", "Jazz"]]),
])
def test_item_sets_of_every_kind(name, content, field, expected, write, load):
    corpus = load(write(name, content), "items", field=field)
    assert list_pages(corpus) == expected


def test_page_of_two_files_is_one_set(write, load, tmp_path):
    write("all/a.csv", "page,item\n1,x\n2,y\n")
    write("all/b.jsonl", '{"page": 1, "item": "z"}\n')
    corpus = load(tmp_path / "all", "items", field="page,item")
    assert list_pages(corpus) == [["x", "z"], ["y"]]


@pytest.mark.parametrize("data, options", [
    ("python", dict(sep=";")),
    ("python", dict(field="a")),
    ("owner/name", dict(encoding="latin-1")),
])
def test_flags_of_files_require_files(data, options, load):
    with pytest.raises(InputError, match=f"requires? .*, got {data}"):
        load(data, **options)


@pytest.mark.parametrize("name, content, field, message", [
    ("a.csv", "item,page\nx,1\n", None, "one column of lists, got item, page. .*SET,ITEM"),
    ("b.jsonl", '{"n": [1], "l": [2]}\n', None, "one column of lists, got n, l"),
    ("c.csv", "order,sku\n1,30\n", "order,day", "columns order,day, got order, sku"),
    ("d.jsonl", '{"l": [1]}\n{"l": [[1]]}\n', None, "row 2: expected names"),
    # an item without a page
    ("e.csv", "page,item\n1,x\n,y\n", "page,item", "row 2: expected names"),
    ("f.jsonl", '{"p": 1, "l": [2]}\n', "p,l", "row 1: expected .* of a set and an item"),
])
def test_item_sets_without_a_clear_column_are_refused(name, content, field, message, write, load):
    with pytest.raises(InputError, match=f"{name}.*{message}"):
        load(write(name, content), "items", field=field)


# The installed Python


def test_python_texts_are_docstrings_and_topics(write):
    """A file is parsed and never run; one that does not parse has no texts."""
    module = write("m.py", '"""About m."""\nraise SystemExit\ndef f(a):\n    """What f does."""\n')
    broken = write("broken.py", "def (:")
    topics = write("pydoc_data/topics.py", 'topics = {"assert": "The statement", "more": 7}\n')
    texts = PythonTexts.documents([module, broken, "absent.py", topics])
    assert texts == ["About m.", "What f does.", "The statement"]


def test_python_names_are_those_of_each_function(write):
    """A function inside another is a page of its own."""
    path = write("a.py", "def f(x):\n  a.b(c)\n  def g():\n    return d + e\n  return x\n")
    pages = [set(page.split()) for page in python_names(path)]
    assert pages == [{"a", "b", "c", "x"}, {"d", "e"}]


def test_python_files_are_those_of_the_installation_without_tests():
    files = python_files()
    assert "json/decoder.py" in files
    assert "numpy/__init__.py" in files
    assert list(files) == sorted(files)
    assert not any("/test" in f"/{name}" for name in files)
    assert "numpy/__init__.py" not in python_files(["stdlib"])


@pytest.mark.parametrize("name, split", [("python", "regex"), ("python-names", "items")])
def test_copied_code_counts_once(name, split, write, load, monkeypatch):
    """Else held-out documents would be seen in training. The order in a set does not count."""
    code = 'def f():\n    """%s"""\n    return %s\n'
    files = dict(
        a=write("a.py", code % ("One", "x + y")),
        b=write("b.py", code % ("one", "y - x")),
        c=write("c.py", code % ("two", "x * z")))
    monkeypatch.setattr(data.sources, "python_files", lambda places: files)
    assert load(name, split).meta["documents"] == 2


# Bad input


@pytest.mark.parametrize("name, content, message", [
    ("empty.txt", " \n \n", "expected text, got no words"),
    ("notes.bin", "x", "notes.bin: expected a file in .txt"),
    ("a.jsonl", '{"a": "x", "b": "y"}\n', "a.jsonl: expected one column of text, got a, b. Use"),
    ("b.jsonl", '{"text": "a"}\n{"text": \n', "b.jsonl, row 2: expected an object"),
    ("c.jsonl", '{"text": "a"}\n{"text": 0}\n', "c.jsonl, row 2: expected text, got 0"),
    ("e.csv", 'text,n\n"a,1\nb,2\n', "e.csv: .* as .csv after row 0.*close each quot"),
    ("f.csv", "text,n,text\na,1,b\n", "f.csv: expected columns of different names"),
    ("g.csv", "text;label\na;1\n", "g.csv: expected columns by comma.* Use --sep"),
    ("h.txt.gz", b"not zipped", "h.txt.gz: could not be read as .txt.*copy it again"),
    ("j.txt", "日本".encode("utf-16"), "j.txt: expected UTF-8, got UTF-16"),
    ("l.json", '{"train": [{"text": "a"}]}', "l.json: expected one column of text, got train"),
    ("m.json", '[\n {"text": "a"}\n {"text": "b"}\n]', "Expecting ',' delimiter: line 3 column 2"),
])
def test_damaged_files_are_named(name, content, message, write, load):
    with pytest.raises(InputError, match=message):
        load(write(name, content))


def test_line_of_a_set_in_another_format_is_refused(write, load):
    """Else the names would be red, "tea," and so on."""
    with pytest.raises(InputError, match="sets.txt: expected item sets"):
        load(write("sets.txt", "red tea, milk\n"), "items")


@pytest.mark.parametrize("name", [
    "", "sub/absent.csv", "a.txt+", "my/folder", "my/absent.xlsx", "a/b/c:de",
    "owner/name:de:train:x"])  # no hub IDs
def test_data_that_is_nowhere_is_refused(name, write, load, tmp_path, monkeypatch):
    write("my/folder/notes.bin", "x")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match="--data.*Nothing was found there"):
        load(name)
