"""data/sources.py, data/python_source.py: what --data names, to documents."""

import os
import sys

import datasets
import pytest

import data.sources
from data.python_source import python_files, python_names
from data.sources import PythonTexts, choose_columns, find_sources, name_data
from data.splitters import ItemNames, item_names
from support.common import InputError
from tests.helpers import list_pages, make_link


# Parts of --data


def test_plus_joins_sources(write, load):
    corpus = load(write("a.txt", "x") + "+" + write("b.txt", "y"))
    assert list_pages(corpus) == [["x"], ["y"]]


@pytest.mark.parametrize("source, again", [
    *[("a.txt", again) for again in ("a.txt", "./a.txt", "link.txt", "hard.txt", "../all")],
    ("bookcorpus", "rojagtap/bookcorpus"),
    ("owner/name", "owner/name::train"),
])
def test_source_that_is_named_twice_is_refused(source, again, write, load, monkeypatch):
    """Its texts would be held out and trained on."""
    path = write("all/a.txt", "x")
    monkeypatch.chdir(os.path.dirname(path))
    make_link("link.txt", path)
    os.link(path, "hard.txt")
    with pytest.raises(InputError, match=f"each file or name once, got .* and {again}"):
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


@pytest.mark.parametrize("name", [
    "", "sub/absent.csv", "a.txt+", "my/folder", "my/absent.xlsx", "a/b/c:de",
    "owner/name:de:train:x"])  # no hub IDs
def test_data_that_is_nowhere_is_refused(name, write, load, tmp_path, monkeypatch):
    write("my/folder/notes.bin", "x")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match="--data.*Nothing was found there"):
        load(name)


@pytest.mark.parametrize("data, options", [
    ("python", dict(sep=";")),
    ("python", dict(field="a")),
    ("owner/name", dict(encoding="latin-1")),
])
def test_flags_of_files_require_files(data, options, load):
    with pytest.raises(InputError, match=f"requires? .*, got {data}"):
        load(data, **options)


@pytest.mark.parametrize("data, expected", [
    ("owner/na.me:20.de:test", ("owner/na.me", "20.de", "test")),
    ("wikipedia", ("wikimedia/wikipedia", "20231101.en", "train")),
])
def test_hub_id_may_name_configuration_and_split(data, expected, load, monkeypatch):
    calls = []

    def load_dataset(name, config, split, streaming):
        calls.append((name, config, split))
        return [dict(text="one fish"), dict(text="two fish")]

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert load(data).words[0] == "fish"
    assert calls == [expected]


@pytest.mark.parametrize("package, data", [
    ("datasets", "owner/name"),
    ("pyarrow.parquet", "a.parquet"),
])
def test_package_that_is_missing_is_named(package, data, write, load, tmp_path, monkeypatch):
    """There is no pyarrow for free-threaded Python, and texts need none."""
    monkeypatch.setitem(sys.modules, package, None)
    write("a.parquet", "")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=f"^{data}: requires the package .*: pip install"):
        load(data)


def test_name_of_hub_data_has_its_configuration():
    """Else runs over two languages would share their default --out."""
    assert name_data("owner/name:20.de+texts/a.csv") == "name-20.de+a"


def test_files_of_a_folder_are_those_that_can_be_read(write, tmp_path):
    expected = [write("all/a[1].txt", "x"), write("all/sub.csv", "x")]
    for name in (".hidden.txt", ".git/x.txt", "notes.bin"):
        write(f"all/{name}", "x")
    make_link(tmp_path / "all/broken.txt", "absent")
    [source] = find_sources(str(tmp_path / "all"), "regex", None, {})
    assert source.paths == expected


def test_link_to_a_file_of_its_folder_is_no_second_text(write, tmp_path):
    """Such as latest.txt -> 2026-05.txt. It comes first by name, and is read under the other."""
    path = write("all/2026-05.txt", "x")
    outside = write("b.txt", "y")
    for link, target in [("0latest.txt", path), ("latest.txt", path), ("1.txt", outside)]:
        make_link(tmp_path / "all" / link, target)
    make_link(tmp_path / "all/2.txt", outside)
    os.link(path, tmp_path / "all/3.txt")
    [source] = find_sources(str(tmp_path / "all"), "regex", None, {})
    names = [os.path.basename(path) for path in source.paths]
    assert names == ["1.txt", "2026-05.txt"]


# Texts


@pytest.mark.parametrize("field, row, expected", [
    ("more", dict(text="x", more="y"), "more"),
    (None, dict(text="x", more="y"), "text"),
    (None, dict(n=1, body="y"), "body"),  # the only strings
])
def test_choose_columns_takes_field_then_text_then_the_only_strings(field, row, expected):
    assert choose_columns("a.csv", row, False, field) == [expected]


def test_item_sets_that_are_read_as_texts_are_refused_with_their_preset(write, load):
    with pytest.raises(InputError, match="got items. Use --preset superbloom-small"):
        load(write("a.jsonl", '{"items": ["a", "b"]}\n'))


def test_empty_cells_do_not_decide_on_the_column(write, load):
    """One of two texts is null in the first row, and may be the one that is meant."""
    path = write("a.jsonl", '{"a": "x", "b": null}\n{"a": "x", "b": "y"}\n')
    with pytest.raises(InputError, match="expected one column of text, got a, b"):
        load(path)


def test_rows_without_the_column_are_counted(write, load, capsys):
    load(write("a.jsonl", '{"text": "x"}\n{"Text": "y"}\n{"text": null}\n'))
    assert "a.jsonl: 1 of 3 rows have no text" in capsys.readouterr().err


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
    ("text.txt", "b a b\n\nNew York Jazz\n", None, [["b", "a"], ["New", "York", "Jazz"]]),
])
def test_item_sets_of_every_kind(name, content, field, expected, write, load):
    corpus = load(write(name, content), "items", field=field)
    assert list_pages(corpus) == expected


@pytest.mark.parametrize("name, content, expected", [
    ("a.txt", "sea salt\trye bread\nolive oil\n", [["sea salt", "rye bread"], ["olive oil"]]),
    ("b.txt.gz", "olive oil\r\nParis, France\ttea\r\n", [["olive oil"], ["Paris, France", "tea"]]),
    ("c.txt", "olive oil\n" * 150 + "a\tb\n", [["olive oil"]] * 150 + [["a", "b"]]),
    ("d.csv", 'n,items\n1,olive oil\n2,"a\tb c"\n', [["olive oil"], ["a", "b c"]]),
    ("e.txt", "olive oil\n\ntea\n", [["olive", "oil"], ["tea"]]),  # no tab in the whole file
])
def test_tab_anywhere_decides_for_the_file(name, content, expected, write, load):
    """Else a line of one name would be a set that nobody wrote."""
    field = "items" if name == "d.csv" else None
    assert list_pages(load(write(name, content), "items", field=field)) == expected


def test_each_file_of_item_sets_has_its_own_separator(write, load, tmp_path):
    write("all/a.txt", "olive oil\n")
    write("all/b.txt", "olive oil\nrye bread\ttea\n")
    corpus = load(tmp_path / "all", "items")
    assert list_pages(corpus) == [["olive", "oil"], ["olive oil"], ["rye bread", "tea"]]


@pytest.mark.parametrize("content", ["\nred tea, milk\n", "tea\n\nred tea, milk\n"])
def test_line_of_a_set_in_another_format_is_refused(content, write, load):
    """Else the names would be red, "tea," and so on."""
    with pytest.raises(InputError, match="sets.txt: expected item sets.*got 'red tea, milk'"):
        load(write("sets.txt", content), "items")


def test_page_of_two_files_is_one_set(write, load, tmp_path):
    write("all/a.csv", "page,item\n1,x\n2,y\n")
    write("all/b.jsonl", '{"page": 1, "item": "z"}\n')
    corpus = load(tmp_path / "all", "items", field="page,item")
    assert list_pages(corpus) == [["x", "z"], ["y"]]


@pytest.mark.parametrize("name, content, field, message", [
    ("a.csv", "item,page\nx,1\n", None, "one column of lists, got item, page. .*SET,ITEM"),
    ("b.jsonl", '{"n": [1], "l": [2]}\n', None, "one column of lists, got n, l"),
    ("c.csv", "order,sku\n1,30\n", "order,day", "columns order,day, got order, sku"),
    ("d.jsonl", '{"l": [1]}\n{"l": [[1]]}\n', None, "row 2: expected in all rows"),
    # converters of XML write a list of one as a text: one name, or two?
    ("g.jsonl", '{"l": ["a", "b"]}\n{"l": "olive oil"}\n', None, "row 2: expected in all rows"),
    ("h.jsonl", '{"l": "a\\tb"}\n{"l": ["olive oil"]}\n', None, "row 2: expected in all rows"),
    # an item without a page
    ("e.csv", "page,item\n1,x\n,y\n", "page,item", "row 2: expected names"),
    ("i.jsonl", '{"l": ["a"]}\n{"l": 0}\n', None, "row 2: expected in all rows"),
    ("j.jsonl", '{"mask": [true, false]}\n', None, "row 1: expected in all rows"),
    ("f.jsonl", '{"p": 1, "l": [2]}\n', "p,l", "row 1: expected .* of a set and an item"),
])
def test_item_sets_without_a_clear_column_are_refused(name, content, field, message, write, load):
    with pytest.raises(InputError, match=f"{name}.*{message}"):
        load(write(name, content), "items", field=field)


@pytest.mark.parametrize("name, content, field", [
    ("a.txt", "caf\u00e9\ttea\ncafe\u0301\ttea\n\ufeffcaf\u00e9 \u200b\ttea\n", None),
    ("b.jsonl", '{"l": ["caf\u00e9", "tea"]}\n' * 2 + '{"l": ["cafe\u0301", "tea\ufeff"]}\n', None),
    ("c.csv", "p,i\n1,caf\u00e9\n1,tea\n\u200b2,cafe\u0301\n2,tea\n3,tea\n3,caf\u00e9\n", "p,i"),
])
def test_names_that_look_alike_are_one_item(name, content, field, write, load):
    """NFC, and nothing invisible at the ends."""
    corpus = load(write(name, content), "items", field=field)
    assert sorted(corpus.words) == ["caf\u00e9", "tea"]
    assert corpus.meta["documents"] == 3


def test_names_that_a_user_types_are_those_of_the_corpus():
    names, spans = ItemNames(["caf\u00e9 noir", "tea"]).split("tea cafe\u0301 noir")
    assert names == ["tea", "caf\u00e9 noir"]
    assert spans == [(0, 3), (4, 14)]
    names, _ = ItemNames().split("\ufeffcafe\u0301 noir\t\u200e\tte\u00ada\u200b")
    assert names == ["caf\u00e9 noir", "tea"]


# The installed Python


@pytest.mark.parametrize("name", ["python", "stdlib"])
def test_docstrings_are_no_item_sets(name, load):
    with pytest.raises(InputError, match=f"--split items: requires item sets, got {name}"):
        load(name, "items")


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
