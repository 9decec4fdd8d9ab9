"""data/corpus.py: files, hub data sets and the installed Python to token IDs on disk."""

import contextlib
import filecmp
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


def to_lines(rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


def pages_of(corpus):
    """Return the documents of a corpus as list of list[str]."""
    pages = [corpus.ids[a:b - 1] for a, b in zip(corpus.offsets[:-1], corpus.offsets[1:])]
    return [[corpus.words[i - FIRST_WORD_ID] for i in page] for page in pages]


def test_ids_are_given_by_frequency_and_ties_by_first_appearance(write, prepared):
    corpus = prepared(path := write("a.txt", "b a the\nc the a\n\nthe d d e\n"))
    assert corpus.words == ["the", "a", "d", "b", "c", "e"]
    assert corpus.ids.tolist() == [8, 6, 5, SEP, 9, 5, 6, SEP, 5, 7, 7, 10, SEP]
    assert corpus.counts.tolist() == [0, 0, 3, 0, 0, 3, 2, 2, 1, 1, 1]
    assert corpus.offsets.tolist() == [0, 4, 8, 13]
    assert corpus.meta.items() >= dict(data=path, split="regex", documents=3, words=10, distinct=6,
                                       replaced=0, dtype="uint16").items()
    assert sorted(os.listdir(corpus.folder)) == "counts.npy ids.bin meta.json offsets.npy words.txt".split()


def test_vocabulary_is_a_slice(text_path, prepared):
    """The V most frequent words have IDs FIRST_WORD_ID .. FIRST_WORD_ID + V - 1."""
    corpus = prepared(text_path)
    counts = Counter(word for words in pages_of(corpus) for word in words)
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
    paths = [write("all/a.TXT", "\n".join(TEXTS)), write("all/b.jsonl.gz", to_lines(rows)),
             write("all/c.csv", "\ufeffn,text\n" + "".join(f"{i},{text}\n" for i, text in enumerate(TEXTS))),
             write("all/d.tsv.gz", "text\tn\n" + "".join(f"{text}\t{i}\n" for i, text in enumerate(TEXTS))),
             write("all/e.json", json.dumps(rows)), write("all/f.json.gz", json.dumps(dict(data=rows))),
             str(tmp_path / "all/g.parquet")]
    datasets.Dataset.from_list(rows).to_parquet(paths[-1])
    for path in paths:
        corpus = prepared(path)
        assert sorted(corpus.words) == sorted(["fish", "one", "two", "naïve", "日本"]), path
        assert corpus.words[0] == "fish" and corpus.meta["documents"] == 3
    for name, content in (("notes.bin", b"\0\1"), (".hidden/i.txt", "unseen"), (".j.txt", "unseen"),
                          ("sub/h.jsonl", json.dumps(dict(body="one fish", year=1)))):
        write(f"all/{name}", content)
    corpus = prepared(tmp_path / "all")
    assert corpus.meta["words"] == 7 * 6 + 2 and "unseen" not in corpus.words
    both = prepared(f"{paths[0]}+{paths[2]}")
    assert both.meta["documents"] == 6 and both.meta["distinct"] == 5


def test_links_are_not_read_twice(write, prepared, tmp_path):
    write("all/a.txt", "one fish")
    for name, target in dict(loop="all", broken="absent", copy="all/a.txt").items():
        (tmp_path / f"all/{name}.txt").symlink_to(tmp_path / target)
    (tmp_path / "alias").symlink_to(tmp_path / "all")  # a folder that --data names itself is followed
    assert all(prepared(tmp_path / name).meta["words"] == 2 for name in ("all", "alias"))


def test_brackets_in_names_are_no_pattern(write, tmp_path):
    for name in ("a[1].jsonl", "a1.jsonl", "runs[1]/x.jsonl", "runs1/x.jsonl"):
        write(name, json.dumps(dict(text="right" if "[" in name else "wrong")))
    for name in ("a[1].jsonl", "runs[1]"):
        assert list(read_work(str(tmp_path / name))) == [("texts", ["right"])]


def test_cells_of_a_table_stay_text(write):
    """001, NA and null are names; a null is no text; a CSV has quotes, a TSV has none; a BOM is no text."""
    path = write("pairs.csv", "page,item\n1,001\n1,NA\n2,null\n2,5\n1,\n")
    assert list(read_work(path, True)) == [("texts", [["001", "NA", ""], ["null", "5"]])]
    assert list(read_work(write("numbers.csv", "text\n12\n13\n"))) == [("texts", ["12", "13"])]
    gap = to_lines([dict(text=None, url="u"), dict(text="the cat", url="u")])
    assert list(read_work(write("gap.jsonl", gap))) == [("texts", ["the cat"])]
    assert list(read_rows(write("a.csv", '\ufeffa,b\r\n"x, ""y""\nz",2\r\n'))) == [dict(a='x, "y"\nz', b="2")]
    rows = [dict(a='"x', b='2"'), dict(a="", b="")]  # an empty line is no row, empty cells are one
    assert list(read_rows(write("a.tsv", 'a\tb\r\n"x\t2"\r\n\r\n\t\r\n'))) == rows
    expected = [dict(text="x", label="1"), dict(text="y", label="2")]
    for head in ("", "text,label\n"):
        assert list(read_rows(write("a.csv", head + "x,1\ny,2\n\n"), ["text", "label"])) == expected


@pytest.mark.parametrize("bad", ["x,1,more", "x"])
def test_table_rows_of_another_length(bad, write, capsys):
    """A row that is longer or shorter than the header is an error, or up to 1 % of them are left out."""
    with pytest.raises(InputError, match=r"a.csv: expected 2 columns \(text, n\), got .* 1 of 3 rows"):
        list(read_rows(write("a.csv", f"text,n\na,1\n{bad}\nb,2\n")))
    assert len(list(read_rows(write("b.csv", "text,n\n" + "a,1\n" * 100 + bad)))) == 100
    assert "1 of 101 rows" in capsys.readouterr().err


@pytest.mark.parametrize("header,field,column", [
    ("n,text,more", None, "text"), ("body", None, "body"), ("n,text", "n", "n"), ("n,body", None, None),
    ("n,body", "text", None)])
def test_choose_column(header, field, column, write):
    """`field`, else text, else the only column; otherwise the error lists the columns and the flag."""
    rows = list(read_rows(write("a.csv", header + "\n" + header.replace("n", "7") + "\n")))
    message = "a.csv: expected .* got n, body. Use --text NAME"
    with contextlib.nullcontext() if column else pytest.raises(InputError, match=message):
        assert choose_column("a.csv", rows, field, "Use --text NAME.") == column


def test_chosen_columns_are_printed_once(write, tmp_path, capsys):
    for name in "ab":
        write(f"all/{name}.csv", "n,body\n1,one fish\n")
    prepare(str(tmp_path / "all"), "bpe", str(tmp_path / "cache"), quiet=False, field="body")
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("preparing ") and second == f"columns: body of {tmp_path}/all/a.csv"


def test_prepare_reads_bytes_of_any_kind(write, prepared):
    """What is not UTF-8 is replaced and counted. A line of megabytes, a NUL in it, no last newline: text."""
    corpus = prepared(write("a.txt", b"\xef\xbb\xbfcaf\xe9 ok\r\n" + b"word " * 700_001 + b"\ra\x00b"))
    assert corpus.meta["replaced"] == 1 and corpus.meta["documents"] == 3
    assert {"caf", "\ufffd", "ok", "word", "a", "b"} == set(corpus.words)
    rows = [dict(text=text) for text in ("\u2028 \x85 \x1c", "\ud800 lone", "a\rb")]
    assert {"\ud800", "lone", "a", "b"} == set(prepared(write("a.jsonl", to_lines(rows)), "space").words)


@pytest.mark.parametrize("kind", ["utf-16", "utf-16-le", "utf-16-be", "utf-32"])
@pytest.mark.parametrize("name,text", [("a.txt", "\u4e00 \u4e8c" * 9), ("a.csv.gz", "a"), ("a.jsonl", "{}")])
def test_utf16_is_refused(kind, name, text, write):
    with pytest.raises(InputError, match="expected UTF-8, got UTF-16 or NULs. Use iconv"):
        list(read_rows(write(name, text.encode(kind))))


def test_number_of_workers_does_not_change_the_corpus(write, tmp_path, monkeypatch):
    rng, words = random.Random(0), make_words(999)
    path = write("a.txt", "\n".join(" ".join(rng.choices(words, k=50)) for _ in range(9_001)))
    assert os.path.getsize(path) > 2_000_000  # more than one unit of work
    folders = []
    for workers in (1, 2):
        monkeypatch.setattr(data.corpus, "num_cores", lambda: workers)
        folders.append(prepare(path, "regex", str(tmp_path / f"cache-{workers}"), quiet=True))
    _, wrong, errors = filecmp.cmpfiles(*folders, os.listdir(folders[0]), shallow=False)
    assert not wrong and not errors


def test_error_in_a_worker_ends_the_preparation(tmp_path, write, monkeypatch):
    """With two workers and many units left, nobody waits for anybody."""
    works = ((("texts", ["a b"]), ("texts", None))[i == 3] for i in range(500))
    monkeypatch.setattr(data.corpus, "num_cores", lambda: 2)
    monkeypatch.setattr(data.corpus, "read_work", lambda *args, **options: works)
    with pytest.raises(TypeError):
        prepare(write("x.txt", "a b"), "regex", str(tmp_path / "cache"), quiet=True)
    assert len(list(works)) > 400  # it did not read to the end


def test_changed_file_is_prepared_again(write, prepared):
    """Also with more than 65,536 IDs, which are uint32."""
    first = prepared(path := write("a.txt", "one fish"))
    second, third = prepared(path), prepared(write("a.txt", " ".join(f"w{i}" for i in range(70_001))))
    assert second.folder == first.folder != third.folder and third.meta["words"] == 70_001
    assert third.ids.dtype == np.uint32 and third.ids[70_000] == FIRST_WORD_ID + 70_000


def test_item_sets_of_every_kind(write, pages_path, prepared):
    """Lists of names or numbers, names between tabs or else spaces, pairs; a page is a set, in order."""
    train, held_out = prepared(pages_path, "items").split_pages()
    assert sorted([*train, *held_out]) == list(range(400)) and len(held_out) == 40
    assert not (np.diff(held_out) > 0).all()

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
    assert pages("j.csv", "o,date,sku\n1,x,30\n2,x,4\n1,y,7\n", field="o, sku") == [["30", "7"], ["4"]]
    assert item_names("New  York\tJazz\t") == ["New York", "Jazz"]


@pytest.mark.parametrize("name,content,field,message", [
    ("a.csv", "id,url,title\n1,u,t\n", None, "expected a list of items, or two columns.* got id, url, title"),
    ("b.jsonl", '{"n": [1], "l": [2]}\n', None, "expected a list of items.* got n, l"),
    ("c.jsonl", '{"n": 1, "l": [[1], [2]]}\n', None, "row 1: expected names, or whole numbers, in l, got"),
    ("d.jsonl", '{"n": 1, "l": [1, 2]}\n', "n", "row 1: expected names, .* in n, got '1'"),
    ("h.jsonl", '{"l": [1, 2]}\n{"l": 7}\n', None, "row 2: expected names, .* in l, got '7'"),
    ("j.jsonl", '{"l": [1, 2]}\n{"l": [true]}\n', None, "row 2: expected names, .* in l, got"),
    ("k.csv", "page,item\n1,x\n,y\n", None, "row 2: expected names, .* in page, item"),
    ("e.csv", "order,date,sku\n1,x,30\n", "order,day", "expected columns order,day, got order, date, sku"),
    ("f.jsonl", '{"page": 1, "item": "x"}\n{"item": "y"}\n', None, "row 2: expected names, .* in page, item"),
    ("g.jsonl", '{"page": 1, "item": "x"}\n{"page": [1], "item": "y"}\n', "page,item", "in page, item")])
def test_item_sets_without_a_clear_column_are_refused(name, content, field, message, write, prepared):
    with pytest.raises(InputError, match=f"{name}.*{message}"):
        prepared(write(name, content), "items", field=field)


def test_python_files_are_parsed_and_never_run(write):
    path = write("module.py", '"""About the module."""\nraise SystemExit("it ran")\n\n'
                              'def f(a):\n    """What f does."""\n    b = a.size + len(a)\n    return b\n')
    paths = [path, write("broken.py", "def (:"), "absent.py"]
    assert list_documents(("python", paths)) == ["About the module.", "What f does."]
    [names] = list_documents(("python-names", paths))
    assert set(names.split()) == {"a", "b", "size", "len"}
    topics = write("topics.py", 'topics = {"assert": "The assert statement", "more": 7}\n')
    assert list(filter(None, python_texts(topics))) == ["The assert statement"]
    path = write("a.py", "def f(x):\n    a.b(c)\n    def g():\n        return d + e\n    return x + g()\n")
    pages = [sorted(page.split()) for page in python_texts(path, names=True)]
    assert sorted(pages) == [["a", "b", "c", "g", "x"], ["d", "e"]]  # an inner function is a page of its own


def test_python_files_are_those_of_the_installation():
    files = python_files()
    assert "json/decoder.py" in files and "numpy/__init__.py" in files and list(files) == sorted(files)
    assert len(set(files.values())) > 500 and any(path.endswith("topics.py") for path in files.values())
    assert not any("/test" in f"/{name}" or "site-packages" in name for name in files)


def test_copied_docstrings_and_functions_count_once(write, prepared, monkeypatch):
    """The same names in another order are the same page."""
    for name, split, text, parts, documents in (
            ("python", "regex", '"""The same text."""\n\ndef f():\n    """Text %s."""\n', "123", 4),
            ("python-names", "items", "def f():\n    return %s\n", ("x + y", "y - x", "x * z"), 2)):
        files = {str(i): write(f"{i}.py", text % part) for i, part in enumerate(parts)}
        monkeypatch.setattr(data.corpus, "python_files", lambda: files)
        assert prepared(name, split).meta["documents"] == documents
    assert prepared(write("copied.txt", "the same\nthe same\n")).meta["documents"] == 2  # texts stay


@pytest.mark.parametrize("name,content,message", [
    ("empty.txt", " \n \n", "empty.txt: expected text, got no words"),
    ("empty.csv", "", "empty.csv: expected text, got no words"),
    ("folder/notes.bin", "x", "folder: expected files in .txt, .* got none"),
    ("x.jsonl", '{"n": 1}\n', "x.jsonl: expected one column of text, got n. Use --field"),
    ("y.jsonl", '{"text": "a"}\n{"text": \n', "y.jsonl: could not be read as .jsonl after row 1: JSON"),
    ("deep.jsonl", '{"text": "a"}\n' + "[" * 100_000, "deep.jsonl: could not .*after row 1: Recursion"),
    ("deep.json", '{"a":' * 100_000, "deep.json: could not be read as .json after row 0: Recursion"),
    *((f"z{i}.jsonl", '{"text": "a"}\n{"text": %s}\n' % value, f"z{i}.jsonl, row 2: expected text in text")
      for i, value in enumerate(("7", "0", "false", "[]", '["a"]', "{}", "1.5"))),
    ("only.jsonl", '{"text": 5, "url": "u"}\n', "only.jsonl, row 1: expected text in text, got '5'"),
    *((f"q{i}.csv", 'text,n\n"a,1\n' + end, f"q{i}.csv: could not be read as .csv after row 0")
      for i, end in enumerate(("b,2\n" * 300, 'b" wide,2\n'))),
    ("twice.csv", "text,n,text\na,1,b\n", "twice.csv: expected columns of different names"),
    *((name, first + "\nb\n", f"{name}: expected columns .* by comma or tab, got .*{again}")
      for name, first, again in (("s.csv", "text;label", "text;label"), ("t.csv", "id\ttext", "id.*text"),
                                 ("c.tsv", "id,text", "id,text"))),
    ("dict.json", '{"text": "a"}', "dict.json, row 1: expected an object, got 'text'"),
    ("list.jsonl", '{"text": "a"}\n["b"]\n', "list.jsonl, row 2: expected an object"),
    ("number.json", "7", "number.json: could not be read as .json"),
    ("zip.txt.gz", gzip.compress(b"one fish two fish" * 99, mtime=0)[:20], "zip.txt.gz: could not be read as .txt"),
    ("not.csv.gz", b"not zipped", "not.csv.gz: could not be read as .csv"),
    ("cut.parquet", "PAR1 and no more", "cut.parquet: could not be read as .parquet")])
def test_damaged_files_are_named(name, content, message, prepared, tmp_path):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(InputError, match=message):
        prepared(tmp_path / name.split("/")[0])
    assert all(p.name.endswith((".lock", ".tmp")) for p in (tmp_path / "cache").glob("*"))


def test_bad_names_are_refused(write, prepared, tmp_path):
    path = write("a.txt", "one fish")
    for name in ("", "+", path + "+", path + "++x", path + "+absent.txt", "no such owner/no set"):
        with pytest.raises(InputError, match="--data.*Nothing was found there"):
            prepared(name)
    assert prepared(write("a.txt+b.txt", "two")).words == ["two"]  # a path that exists is one part
    with pytest.raises(InputError, match="--field requires a table, got --data python"):
        prepared("python", field="x")
    write("folder/a.csv", "text\na\n")
    os.mkfifo(tmp_path / "pipe.txt")
    for name, message in (("absent.csv", "a file, got a folder or nothing"), ("pipe.txt", "got none"),
                          ("folder", "a file, got a folder or nothing"), ("/dev/null", "got none")):
        with pytest.raises(InputError, match=message):
            list(read_rows(str(tmp_path / name)))


def test_hub_rows_have_label_names_and_errors_name_the_set(monkeypatch):
    class Rows(list):
        features = dict(label=SimpleNamespace(names=["no", "yes"]))

    with pytest.raises(InputError, match="owner/name: could not be loaded from the hub .* Download it"):
        list(read_hub("owner/name"))  # no network here
    import datasets
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", lambda *args, **options: None)
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
