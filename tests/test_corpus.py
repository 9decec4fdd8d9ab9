"""data/corpus.py: files, hub data sets and the installed Python to token IDs on disk."""

import gzip
import json
import os
import random
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest

import data.corpus
from data.corpus import (Corpus, choose_column, item_names, list_documents, prepare, python_files, read_hub,
                         read_rows, read_work)
from data.python_source import python_texts
from runtime import InputError
from tests.support import make_words
from tokenizer import FIRST_WORD_ID, SEP

TEXTS = ["one fish", "two fish", "naïve 日本"]


@pytest.fixture
def write(tmp_path):
    """Return a function that writes a file below tmp_path, zipped if its name says so."""
    def write(name, content):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        content = content if isinstance(content, bytes) else content.encode()
        path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
        return str(path)

    return write


@pytest.fixture
def prepared(tmp_path):
    """Return a function that prepares data and loads it."""
    def prepared(data, split="regex", **options):
        return Corpus(prepare(str(data), split, str(tmp_path / "cache"), quiet=True, **options))

    return prepared


@pytest.fixture
def installed(monkeypatch):
    """Return a function that makes these files the installed Python: its one consumer here is read_work."""
    return lambda *paths: monkeypatch.setattr(data.corpus, "python_files", lambda: {p: str(p) for p in paths})


def to_lines(rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


def pages_of(corpus):
    """Return the documents of a corpus as list of list[str]."""
    pages = [corpus.ids[a:b - 1] for a, b in zip(corpus.offsets[:-1], corpus.offsets[1:])]
    return [[corpus.words[i - FIRST_WORD_ID] for i in page] for page in pages]


def test_ids_are_given_by_frequency_and_ties_by_first_appearance(write, prepared):
    path = write("a.txt", "b a the\nc the a\n\nthe d d e\n")
    corpus = prepared(path)
    assert corpus.words == ["the", "a", "d", "b", "c", "e"]
    assert corpus.ids.tolist() == [8, 6, 5, SEP, 9, 5, 6, SEP, 5, 7, 7, 10, SEP]
    assert corpus.counts.tolist() == [0, 0, 3, 0, 0, 3, 2, 2, 1, 1, 1]
    assert corpus.offsets.tolist() == [0, 4, 8, 13]
    expected = dict(data=path, split="regex", documents=3, words=10, distinct=6, characters=23, replaced=0,
                    dtype="uint16")
    assert corpus.meta.items() >= expected.items() and sorted(os.listdir(corpus.folder)) == [
        "counts.npy", "ids.bin", "meta.json", "offsets.npy", "words.txt"]


def test_vocabulary_is_a_slice(text_path, prepared):
    """The V most frequent words have IDs FIRST_WORD_ID .. FIRST_WORD_ID + V - 1."""
    corpus, counts = prepared(text_path), Counter()
    for words in pages_of(corpus):
        counts.update(words)
    assert corpus.words[:7] == [word for word, _ in counts.most_common(7)] == corpus.frequent(7)
    assert corpus.counts[FIRST_WORD_ID:].tolist() == [counts[word] for word in corpus.words]
    assert (np.diff(corpus.counts[FIRST_WORD_ID:]) <= 0).all()


@pytest.mark.parametrize("split", ["bpe", "phrases"])
def test_pieces_keep_the_numbers_of_their_bpe(split, write, prepared):
    corpus = prepared(write("a.txt", "the cat sat on the mat\n" * 31), split, max_subwords=271)
    assert corpus.words == corpus.subwords.units and len(corpus.words) <= 271
    [numbers] = corpus.subwords.number_texts(["the cat sat on the mat"])
    assert corpus.ids.tolist() == [*(FIRST_WORD_ID + np.array(numbers)), SEP] * 31
    assert corpus.meta["distinct"] == len(set(numbers)) < len(corpus.counts) - FIRST_WORD_ID
    by_count = [corpus.words[i] for i in np.argsort(-corpus.counts[FIRST_WORD_ID:], kind="stable")]
    assert corpus.frequent(3) == by_count[:3] != corpus.words[:3]


def test_prepare_reads_every_kind_of_file(write, prepared, tmp_path):
    import datasets

    rows = [dict(id="x", text=text) for text in TEXTS]
    paths = [write("all/a.txt", "\n".join(TEXTS)), write("all/b.jsonl.gz", to_lines(rows)),
             write("all/c.csv", "\ufeffn,text\n" + "".join(f"{i},{text}\n" for i, text in enumerate(TEXTS))),
             write("all/d.tsv.gz", "text\tn\n" + "".join(f"{text}\t{i}\n" for i, text in enumerate(TEXTS))),
             write("all/e.json", json.dumps(rows)), write("all/f.json.gz", json.dumps(dict(data=rows))),
             str(tmp_path / "all/g.parquet")]
    datasets.Dataset.from_list(rows).to_parquet(paths[-1])
    for path in paths:
        corpus = prepared(path)
        assert sorted(corpus.words) == sorted(["fish", "one", "two", "naïve", "日本"]), path
        assert corpus.words[0] == "fish" and corpus.meta["documents"] == 3
    write("all/notes.bin", b"\0\1")
    write("all/sub/h.jsonl", json.dumps(dict(body="one fish", year=1)))
    write("all/.hidden/i.txt", "unseen")
    write("all/.j.txt", "unseen")
    corpus = prepared(tmp_path / "all")
    assert corpus.meta["words"] == 7 * 6 + 2 and "unseen" not in corpus.words
    both = prepared(f"{paths[0]}+{paths[2]}")
    assert both.meta["documents"] == 6 and both.meta["distinct"] == 5


def test_linked_folder_is_not_read_twice(write, prepared, tmp_path):
    write("all/a.txt", "one fish")
    (tmp_path / "all" / "loop").symlink_to(tmp_path / "all")
    (tmp_path / "all" / "broken.txt").symlink_to(tmp_path / "absent")
    assert prepared(tmp_path / "all").meta["words"] == 2
    (tmp_path / "alias").symlink_to(tmp_path / "all")  # a folder that --data names itself is followed
    assert prepared(tmp_path / "alias").meta["words"] == 2


def test_brackets_in_names_are_no_pattern(write, tmp_path):
    for name in ("a[1].jsonl", "a1.jsonl", "runs[1]/x.jsonl", "runs1/x.jsonl"):
        write(name, json.dumps(dict(text="right" if "[" in name else "wrong")))
    for name in ("a[1].jsonl", "runs[1]"):
        assert list(read_work(str(tmp_path / name))) == [("texts", ["right"])]


def test_cells_of_a_table_stay_text(write):
    """001 stays 001, NA and null are names; the column of a text that the first row lacks is the text's."""
    path = write("pairs.csv", "page,item\n1,001\n1,NA\n2,null\n2,5\n1,\n")
    assert list(read_work(path, True)) == [("texts", [["001", "NA", ""], ["null", "5"]])]
    assert list(read_work(write("numbers.csv", "text\n12\n13\n"))) == [("texts", ["12", "13"])]
    path = write("gap.jsonl", '{"text": null, "url": "u"}\n{"text": "the cat", "url": "u"}\n')
    assert list(read_work(path)) == [("texts", ["the cat"])]


def test_csv_has_quotes_and_tsv_has_none_and_bom_is_no_text(write):
    assert list(read_rows(write("a.csv", '\ufeffa,b\r\n"x, ""y""\nz",2\r\n\r\n'))) == [dict(a='x, "y"\nz', b="2")]
    assert list(read_rows(write("a.tsv", 'a\tb\r\n"x\t2"\r\n\r\n'))) == [dict(a='"x', b='2"')]


def test_table_without_a_header_takes_the_one_it_is_handed(write):
    for content in ("x,1\ny,2\n", "text,label\nx,1\ny,2\n"):
        rows = list(read_rows(write("a.csv", content), ["text", "label"]))
        assert rows == [dict(text="x", label="1"), dict(text="y", label="2")]


@pytest.mark.parametrize("bad", ["x,1,more", "x"])
def test_table_rows_of_another_length(bad, write, capsys):
    """A row that is longer or shorter than the header is an error, or up to 1 % of them are left out."""
    with pytest.raises(InputError, match=r"a.csv: expected 2 columns \(text, n\), got .* 1 of 3 rows"):
        list(read_rows(write("a.csv", f"text,n\na,1\n{bad}\nb,2\n")))
    rows = list(read_rows(write("b.csv", "text,n\n" + "a,1\n" * 100 + bad + "\n")))
    assert len(rows) == 100 and "1 of 101 rows" in capsys.readouterr().err


@pytest.mark.parametrize("header,field,column", [
    ("n,text,more", None, "text"), ("body", None, "body"), ("n,text", "n", "n"), ("n,body", None, None),
    ("n,body", "text", None)])
def test_choose_column(header, field, column, write):
    """`field`, else text, else the only column; otherwise the error lists the columns and the flag."""
    rows = list(read_rows(write("a.csv", header + "\n" + header.replace("n", "7") + "\n")))
    if column:
        assert choose_column("a.csv", rows, field) == column
    else:
        with pytest.raises(InputError, match="a.csv: expected .* got n, body. Use --text NAME"):
            choose_column("a.csv", rows, field, "--text")


def test_chosen_columns_are_printed_once(write, tmp_path, capsys):
    for name in "ab":
        write(f"all/{name}.csv", "n,body\n1,one fish\n")
    prepare(str(tmp_path / "all"), "bpe", str(tmp_path / "cache"), quiet=False, field="body")
    assert capsys.readouterr().out == f"columns: body of {tmp_path}/all/a.csv\n"


def test_prepare_reads_bytes_of_any_kind(write, prepared):
    """What is not UTF-8 is replaced and counted. A line of megabytes, NULs, no last newline: text."""
    corpus = prepared(write("a.txt", b"caf\xe9 ok\n" + b"word " * 700_001 + b"\na\x00b"))
    assert corpus.meta["replaced"] == 1 and corpus.meta["words"] == 3 + 700_001 + 3
    assert {"caf", "\ufffd", "ok", "word", "a", "\x00", "b"} == set(corpus.words)


def test_corpus_of_any_characters_is_read_back(write, prepared):
    texts = ["\u2028 \x85 \x1c", "\ud800 lone", "a\rb"]
    corpus = prepared(write("a.jsonl", to_lines(dict(text=text) for text in texts)), "space")
    assert {"\ud800", "lone", "a", "b"} == set(corpus.words)


def test_number_of_workers_does_not_change_the_corpus(write, tmp_path, monkeypatch):
    rng, words = random.Random(0), make_words(999)
    path = write("a.txt", "\n".join(" ".join(rng.choices(words, k=50)) for _ in range(9_001)))
    assert os.path.getsize(path) > 2_000_000  # more than one unit of work
    folders = []
    for workers in (1, 2):
        monkeypatch.setattr(data.corpus, "num_cores", lambda: workers)
        folders.append(prepare(path, "regex", str(tmp_path / f"cache-{workers}"), quiet=True))
    for name in os.listdir(folders[0]):
        one, two = (open(os.path.join(folder, name), "rb").read() for folder in folders)
        assert one == two, name


def test_error_in_a_worker_ends_the_preparation(tmp_path, write, monkeypatch):
    """With two workers and many units left, nobody waits for anybody."""
    works = ((("texts", ["a b"]), ("texts", [7]))[i == 3] for i in range(500))
    monkeypatch.setattr(data.corpus, "num_cores", lambda: 2)
    monkeypatch.setattr(data.corpus, "read_work", lambda *args, **options: works)
    with pytest.raises(AttributeError):
        prepare(write("x.txt", "a b"), "regex", str(tmp_path / "cache"), quiet=True)
    assert len(list(works)) > 400  # it did not read to the end


def test_more_than_65536_ids_are_uint32(write, prepared):
    corpus = prepared(write("a.txt", " ".join(f"w{i}" for i in range(70_001))))
    assert corpus.ids.dtype == np.uint32 and corpus.ids[70_000] == FIRST_WORD_ID + 70_000


def test_changed_file_is_prepared_again(write, prepared):
    first = prepared(write("a.txt", "one fish"))
    assert prepared(first.meta["data"]).folder == first.folder
    second = prepared(write("a.txt", "two fish swim"))
    assert second.folder != first.folder and second.meta["words"] == 3


def test_item_sets_of_every_kind(write, prepared):
    """Lists of names or numbers, names between tabs or else spaces, pairs; a page is a set, in order."""
    def pages(name, content, **options):
        return pages_of(prepared(write(name, content), "items", **options))

    rows = [dict(a="x", ids=[5, 3, 5], names=["New York", " Miles\n Davis ", None, ""]),
            dict(a="y", ids=[3], names=["Jazz", "New York"])]
    named = [["New York", "Miles Davis"], ["Jazz", "New York"]]
    assert pages("b.jsonl", to_lines(rows), field="names") == named
    assert pages("a.jsonl", to_lines(row | dict(names="") for row in rows)) == [["5", "3"], ["3"]]
    assert pages("c.txt", "b a b\n\nNew York\tJazz\n") == [["b", "a"], ["New York", "Jazz"]]
    assert pages("d.csv", "page,item\n1,New York\n2,Jazz\n1,7\n1,New York\n") == [["New York", "7"], ["Jazz"]]
    assert pages("e.tsv", "page\titem\n1\t30\n2\t4\n1\t7\n") == [["30", "7"], ["4"]]
    gaps = [dict(a=["x", "y"], b="z"), dict(a=None, b="q"), dict(a=["w"], b=""), dict(b="v")]
    assert pages("f.jsonl", to_lines(gaps)) == [["x", "y"], ["w"]]  # never the row's other column
    three = "order,date,sku\n1,x,30\n2,x,4\n1,y,7\n"
    assert pages("j.csv", three, field="order,sku") == [["30", "7"], ["4"]]
    assert item_names("New  York\tJazz\t") == ["New York", "Jazz"]


@pytest.mark.parametrize("name,content,field,message", [
    ("a.csv", "id,url,title\n1,u,t\n", None, "expected a list of items, or two columns.* got id, url, title"),
    ("b.jsonl", '{"n": [1], "l": [2]}\n', None, "expected a list of items.* got n, l"),
    ("c.jsonl", '{"n": 1, "l": [[1], [2]]}\n', None, "expected names or numbers in l, got"),
    ("d.jsonl", '{"n": 1, "l": [1, 2]}\n', "n", "expected names or numbers in n, got '1'"),
    ("e.csv", "order,date,sku\n1,x,30\n", "order,day", "expected columns order,day, got order, date, sku"),
    ("f.jsonl", '{"page": 1, "item": "x"}\n{"item": "y"}\n', None, "expected names or numbers in page, item"),
    ("g.jsonl", '{"page": 1, "item": "x"}\n{"page": [1], "item": "y"}\n', "page,item", "in page, item")])
def test_item_sets_without_a_clear_column_are_refused(name, content, field, message, write, prepared):
    with pytest.raises(InputError, match=f"{name}: .*{message}"):
        prepared(write(name, content), "items", field=field)


def test_split_pages_holds_out_one_in_ten(pages_path, prepared):
    train, held_out = prepared(pages_path, "items").split_pages()
    assert sorted([*train, *held_out]) == list(range(400)) and len(held_out) == 40
    assert not (np.diff(held_out) > 0).all()


def test_python_files_are_parsed_and_never_run(write):
    path = write("module.py", '"""About the module."""\nraise SystemExit("it ran")\n\n'
                              'def f(a):\n    """What f does."""\n    b = a.size + len(a)\n    return b\n')
    paths = [path, write("broken.py", "def (:"), "absent.py"]
    assert list_documents(("python", paths)) == ["About the module.", "What f does."]
    [names] = list_documents(("python-names", paths))
    assert set(names.split()) == {"a", "b", "size", "len"}
    path = write("topics.py", 'topics = {"assert": "The assert statement", "more": 7}\n')
    assert [text for text in python_texts(path) if text] == ["The assert statement"]


def test_python_files_are_those_of_the_installation():
    files = python_files()
    assert "json/decoder.py" in files and "numpy/__init__.py" in files and list(files) == sorted(files)
    assert len(set(files.values())) > 500 and any(path.endswith("topics.py") for path in files.values())
    assert not any("/test" in f"/{name}" or "site-packages" in name for name in files)


def test_inner_function_has_a_page_of_its_own(write):
    path = write("a.py", "def f(x):\n    a.b(c)\n    def g():\n        return d + e\n    return x + g()\n")
    pages = [sorted(page.split()) for page in python_texts(path, names=True)]
    assert sorted(pages) == [["a", "b", "c", "g", "x"], ["d", "e"]]


def test_copied_docstrings_and_functions_count_once(write, prepared, installed):
    """The same names in another order are the same page."""
    text = '"""The same text."""\n\ndef f():\n    """Text %s."""\n'
    installed(*(write(f"{i}.py", text % i) for i in range(3)))
    assert prepared("python").meta["documents"] == 4
    bodies = dict(a="return x + y", b="return y - x", c="return x * z")
    installed(*(write(f"{name}.py", f"def f():\n    {body}\n") for name, body in bodies.items()))
    assert prepared("python-names", "items").meta["documents"] == 2
    copied = write("copied.txt", "the same\nthe same\n")  # a text is left as it is
    assert prepared(copied).meta["documents"] == 2


@pytest.mark.parametrize("name,content,message", [
    ("empty.txt", " \n \n", "empty.txt: expected text, got no words"),
    ("empty.csv", "", "empty.csv: expected text, got no words"),
    ("folder/notes.bin", "x", "folder: expected a file that ends in .txt"),
    ("x.jsonl", '{"n": 1}\n', "x.jsonl: expected one column of text, got n. Use --field"),
    ("y.jsonl", '{"text": "a"}\n{"text": \n', "y.jsonl: could not be read as .jsonl"),
    ("z.jsonl", '{"text": "a"}\n{"text": 7}\n', "z.jsonl: expected text in text, got '7'"),
    ("list.jsonl", '{"text": "a"}\n["b"]\n', "list.jsonl, row 2: expected an object"),
    ("number.json", "7", "number.json: could not be read as .json"),
    ("zip.txt.gz", None, "zip.txt.gz: could not be read as .txt"),
    ("not.csv.gz", None, "not.csv.gz: could not be read as .csv"),
    ("cut.parquet", "PAR1 and no more", "cut.parquet: could not be read as .parquet")])
def test_damaged_files_are_named(name, content, message, write, prepared, tmp_path):
    path = write(name, content or "one fish two fish" * 99)
    if name == "zip.txt.gz":
        with open(path, "r+b") as file:
            file.truncate(20)
    elif content is None:
        with open(path, "wb") as file:
            file.write(b"not zipped")
    with pytest.raises(InputError, match=message):
        prepared(tmp_path / name.split("/")[0])
    assert all(p.name.endswith((".lock", ".tmp")) for p in (tmp_path / "cache").glob("*"))


@pytest.mark.parametrize("suffix,message", [
    ("+", "got an empty one"), ("++x", "got an empty one"), ("+absent.txt", "Nothing was found there")])
def test_empty_or_absent_part_of_data_is_refused(suffix, message, write, prepared):
    with pytest.raises(InputError, match=f"--data.*{message}"):
        prepared(write("a.txt", "one fish") + suffix)


def test_bad_names_are_refused(write, prepared, tmp_path):
    for data_name in ("", "+", "no such owner/no set"):
        with pytest.raises(InputError, match="--data"):
            prepared(data_name)
    with pytest.raises(InputError, match="--field requires a table, got --data python"):
        prepared("python", field="x")
    for name, message in (("absent.csv", "file not found"), ("", "expected a file that ends in")):
        with pytest.raises(InputError, match=message):
            list(read_rows(str(tmp_path / name)))


def test_hub_rows_have_label_names_and_errors_name_the_set(monkeypatch):
    class Rows(list):
        features = dict(label=SimpleNamespace(names=["no", "yes"]))

    import datasets

    rows = Rows([dict(text="a", label=1), dict(text="b", label=-1)])
    monkeypatch.setattr(datasets, "load_dataset", lambda name, *args, **options: rows)
    assert list(read_hub("owner/name")) == [dict(text="a", label="yes"), dict(text="b", label=-1)]
    rows.append(dict(text="c", label=2))
    with pytest.raises(InputError, match="owner/name: could not be loaded from the hub .IndexError"):
        list(read_hub("owner/name"))


@pytest.mark.parametrize("name", "ids.bin counts.npy offsets.npy words.txt meta.json subwords.json".split())
@pytest.mark.parametrize("num_cut", [None, 2, 10**9])
def test_damaged_corpus_is_refused(name, num_cut, write, prepared):
    corpus = prepared(write("a.txt", "the cat sat\n" * 13), "bpe", max_subwords=263)
    path = os.path.join(corpus.folder, name)
    if num_cut is None:
        os.remove(path)
    else:
        os.truncate(path, max(os.path.getsize(path) - num_cut, 0))
    with pytest.raises(InputError, match="damaged corpus .*Remove it"):
        Corpus(corpus.folder)
