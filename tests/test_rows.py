"""data/rows.py: files of every format to rows, and names of columns that look alike."""

import json

import datasets
import pytest

from data import rows as reader
from data.rows import number_rows, read_rows
from data.splitters import clean_name
from support.common import InputError
from tests.helpers import list_pages

ROWS = [dict(n=1, text="one fish"), dict(n=2, text="two fish"), dict(n=3, text="naïve 日本")]
TEXTS = [row["text"] for row in ROWS]


def to_lines(rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


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


@pytest.mark.parametrize("name, content, expected", [
    # 001 and NA are text; a quoted cell may have a line break; an empty line is no row; names of
    # columns are cleaned
    ("a.csv", 'a, b\u200b\n001,NA\n\n"x, ""y""\nz",\n', [["001", "NA"], ['x, "y"\nz', ""]]),
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


# Tables


def test_row_that_a_line_break_has_cut_goes_with_its_second_half(write, capsys):
    """Each half of `a bad⏎film, neg` is damaged, though the second has two cells."""
    path = write("a.tsv", "text\tlabel\n" + "fine\tpos\n" * 100 + "a bad\nfilm\tneg\nend\tpos\r\n")
    rows = list(read_rows(path))
    assert [row["text"] for row in rows] == ["fine"] * 100 + ["end"]
    assert "another number in 1 of 103 rows, the first in row 101" in capsys.readouterr().err


@pytest.mark.parametrize("wrong", ["x,1,more", "x"])
def test_table_row_of_another_length_is_never_shifted(wrong, write):
    path = write("a.csv", f"text,n\na,1\n{wrong}\nb,2\n")
    with pytest.raises(InputError, match=r"2 columns \(text, n\).* 1 of 3 rows, .* row 2"):
        list(read_rows(path))
    rows = list(read_rows(path, keep_damaged=True))
    assert rows[0]["text"] == "a"
    assert rows[1] == {}


@pytest.mark.parametrize("ending, header", [
    ("\n", "text, label"),
    ("\r\n", "\ufefftext, label"),  # three files of Excel
    ("\n", "Text,LABEL\u00a0"),
])
def test_header_of_joined_files_is_no_row(ending, header, write, capsys):
    """`cat a.csv b.csv c.csv`: else the label "label" would be a class."""
    body = ending.join(f'"text {i}",good' for i in range(120))
    first = f"text, label{ending}{body}{ending}"
    part = f"{header}{ending}{body}{ending}"
    path = write("all.csv", first + part + part)
    rows = list(read_rows(path))
    assert len(rows) == 360
    assert {row["label"] for row in rows} == {"good"}
    assert "all.csv: rows equal to the header, as in joined files: 2" in capsys.readouterr().err


def test_header_again_in_the_first_rows_is_refused_by_its_cause(write, capsys):
    """A table without a header may begin with two equal rows."""
    path = write("all.tsv", "text\tlabel\na\tb\nText\tlabel\nc\td\n")
    with pytest.raises(InputError, match="got text, label again in row 2.*--header first"):
        list(read_rows(path))
    rows = list(read_rows(path, header="first"))
    assert [row["text"] for row in rows] == ["a", "c"]
    assert "as in joined files: 1" in capsys.readouterr().err
    assert len(list(read_rows(path, header="none"))) == 4
    assert len(list(read_rows(path, columns=["text", "label"]))) == 4


@pytest.mark.parametrize("header", ["label,text", "\ufeff Label, TEXT\u00a0"])
@pytest.mark.parametrize("count, number", [(2, 3), (200, 201)])
def test_header_again_in_another_order_is_refused(header, count, number, write):
    """Else the labels of the second file would be texts."""
    path = write("all.csv", "text,label\n" + "a,b\n" * count + f"{header}\n" + "b,a\n" * 3)
    with pytest.raises(InputError, match=f"text, label in one order, got .* in row {number}, as"):
        list(read_rows(path, header="first"))
    with pytest.raises(InputError, match=f"all.csv: expected .* row {number}"):
        list(read_rows(path))
    assert len(list(read_rows(path, header="none"))) == count + 5
    rows = list(read_rows(write("b.csv", "text,label\nlabel,label\ntext,x\n"), header="first"))
    assert len(rows) == 2  # texts


def test_header_again_keeps_its_number_among_the_rows(write, capsys):
    """infer.py answers each row of a file by its number."""
    path = write("all.csv", "text,n\n" + "a,1\n" * 101 + "text,n\nb,2\n")
    rows = list(read_rows(path, keep_damaged=True, header="first"))
    assert rows[101] == {}
    assert rows[102] == dict(text="b", n="2")
    assert capsys.readouterr().err == ""


def test_number_of_a_row_counts_rows_that_are_left_out(write, load):
    """Messages name the row that the user finds there; an empty line is no row."""
    body = "1,x\n" * 100 + "short\n1,y\n" + "\nPAGE,item\n" + ",z\n"
    path = write("a.csv", f"page,item\n{body}")
    assert [number for number, _ in number_rows(path)] == [*range(1, 101), 104]
    with pytest.raises(InputError, match="row 104: expected names"):
        load(path, "items", field="page,item")


def test_ending_without_a_reader_is_refused(write, monkeypatch):
    """Else its bytes would be read as a table."""
    monkeypatch.setattr(reader, "ENDINGS", (".xlsx",))
    with pytest.raises(InputError, match="could not be read as .xlsx.*NotImplementedError"):
        list(read_rows(write("a.xlsx", "a,b\n1,2\n")))


def test_row_of_one_column_that_is_equal_to_the_first_one_is_asked_about(write):
    with pytest.raises(InputError, match="got yes again in row 3.*--header none"):
        list(read_rows(write("a.csv", "yes\nno\nno\nyes\n")))


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


# Names


@pytest.mark.parametrize("text", [
    "\ufeffpos", " pos\u200b ", "\u200b \ufeffpos\r\n", "p\u00ados\u200e", "\u2060 po\u2066s"])
def test_clean_name_has_nothing_invisible_at_its_ends(text):
    """And no marks of direction, word joiners and soft hyphens anywhere."""
    assert clean_name(text) == "pos"


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
