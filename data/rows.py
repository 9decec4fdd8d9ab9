"""Files and hub data sets to rows: dict of column -> value. The one reader of rows.

    for row in read_rows("reviews.csv.gz"):
        print(row["text"])

Out of scope: which columns are documents (data/corpus.py), texts and labels (data/tasks.py).
"""

import codecs
import csv
import functools
import gzip
import itertools
import json
import os
import re
import sys

from common import InputError, blame_file

ENDINGS = (".txt", ".tsv", ".csv", ".jsonl", ".json", ".parquet")  # each may end in .gz too
PEEK = 100  # rows that decide on the columns
MAX_DAMAGED = 0.01  # share of the rows of a table that are left out


def read_rows(path, columns=None, keep_wrong=False, encoding=None, sep=None, header=None):
    """Read a file row by row. What cannot be decoded is replaced, and counted on stderr.

    Args:
        path: str, a file with one of ENDINGS, or with .gz after it.
        columns: list[str], of a table whose file may have no header: the first line is one where
            it has the last of these names.
        keep_wrong: bool, yield {} for a bad row, so that rows keep their numbers.
        encoding: str, one that Python knows. None: UTF-8, and UTF-16 is refused.
        sep: str, the character between cells, or None: a comma, of .tsv a tab. A .txt has none, but
            sep, of any length, cuts its lines into lists.
        header: "none": a table has no header, and its columns are "1", "2", ...; "first": the
            first line is the header. None: it is, but refused where it looks like a row.

    Yields:
        dict, column -> value. A line of a .txt has the column "text", with sep a list of str. A
        .json is a list of objects, or an object with it as "data", or has an object a line. The
        cells of .csv and .tsv stay str. Lines end at a line feed.

    Raises:
        InputError: No such file, another kind, or a damaged one. Rows count from 1.
    """
    ending = get_ending(path)
    if ending not in ENDINGS:
        raise InputError(f"{path}: expected a file in {', '.join(ENDINGS)} (or .gz).")
    num_rows = 0  # that could be read
    try:
        for row in parse_file(path, ending, columns, keep_wrong, encoding, sep, header):
            if isinstance(row, dict):
                yield row
            elif keep_wrong:
                yield {}
            else:
                raise ValueError(f"expected an object, got {row!r:.60}")
            num_rows += 1
    except InputError:
        raise
    except (FileNotFoundError, IsADirectoryError, PermissionError) as error:
        raise InputError(f"{path}: {error.strerror}.") from error
    except Exception as error:  # of gzip, csv, json and pyarrow, which do not name the file
        raise InputError(f"{path}: could not be read as {ending} after row {num_rows:,}: "
                         f"{error!r}. If the file was cut, copy it again; in a .csv close each "
                         "quotation mark.") from error


def parse_file(path, ending, columns, keep_wrong, encoding, sep, header):
    """Yield the rows of a file, see read_rows, as its format has them; what is no dict is bad."""
    open_file = gzip.open if path.lower().endswith(".gz") else open
    codec = encoding
    if encoding is None or codecs.lookup(encoding).name == "utf-8":
        codec = "utf-8-sig"  # a mark at the start is no text
    # newline: a carriage return alone ends no line
    with open_file(path, "rt", encoding=codec, errors="replace", newline="\n") as file:
        if ending == ".parquet":
            from pyarrow.parquet import ParquetFile  # takes a while to import
            for batch in ParquetFile(file.buffer).iter_batches():
                yield from batch.to_pylist()
            return
        if encoding is None:
            refuse_utf16(path, file.buffer)
        lines = read_lines(path, file)
        if ending == ".txt":
            for line in lines:  # each is a document
                text = line.rstrip("\n")
                if sep is not None:
                    text = text.split(sep)
                yield {"text": text}
        elif ending == ".jsonl":
            for line in lines:
                if line.strip():
                    yield parse_line(line)
        elif ending == ".json":
            yield from parse_json(path, "".join(lines))
        else:
            yield from parse_table(path, lines, ending, columns, keep_wrong, sep, header)


def refuse_utf16(path, file):
    """Raise InputError where a binary file begins as UTF-16: it would be read as noise."""
    start = file.peek(4096)
    has_mark = start.startswith((b"\xff\xfe", b"\xfe\xff"))
    if has_mark or b"\0" in start:
        raise InputError(f"{path}: expected UTF-8, got UTF-16 or NULs. Use --encoding utf-16, or "
                         "utf-8 to keep the NULs.")


def read_lines(path, file):
    """Yield the lines of a text file, then say how many characters were replaced, or are U+FFFD.

    Lines end with \\n. A carriage return inside a line becomes a space.
    """
    num_replaced = 0
    for line in file:
        num_replaced += line.count("\ufffd")
        yield line.replace("\r\n", "\n").replace("\r", " ")
    if num_replaced > 0:
        note_once(f"warning: {path}: {num_replaced:,} characters could not be decoded and were "
                  "replaced, or are U+FFFD in the file. If it is not UTF-8, use --encoding, for "
                  "example latin-1.")


def parse_line(line):
    """Return the value of a line of JSON; the line itself where it is broken."""
    try:
        return json.loads(line)
    except ValueError:
        return line


def parse_json(path, text):
    """Return the rows of a .json: a list, alone or as "data" of an object, or an object a line."""
    try:
        rows = json.loads(text)
    except ValueError:
        rows = [json.loads(line) for line in text.split("\n") if line.strip()]
    if isinstance(rows, dict):
        if "data" not in rows:
            raise InputError(f"{path}: expected a list of objects, or one as data of an object, "
                             f"got an object with {', '.join(rows)}.")
        rows = rows["data"]  # as SQuAD's own files have it
    return rows


def parse_table(path, lines, ending, columns, keep_wrong, sep, header):
    """Yield the rows of a .csv or .tsv, a few of which may have another number of cells.

    A line break in a text that is not quoted cuts a row in two. The second half may have as many
    cells as a row, so the row after a short one is left out, too.
    """
    csv.field_size_limit(2**31 - 1)  # a cell may be a whole article; a C long may have 32 bits
    # strict: else a stray quote takes all rows up to the next one into its cell
    options = dict(delimiter=",", strict=True)
    if ending == ".tsv":
        options = dict(delimiter="\t", quoting=csv.QUOTE_NONE)
    if sep is not None:
        if len(sep) != 1:
            raise InputError(f"--sep: expected one character for {ending}, got {sep!r}.")
        options["delimiter"] = sep
    table = csv.reader(lines, **options)
    rows = ((table.line_num, cells) for cells in table if cells)  # an empty line is no row
    head = list(itertools.islice(rows, 1 + PEEK))
    names = []
    if head:
        _, first = head[0]
        names = [name.strip() for name in first]
    if header == "none":
        names = [str(number) for number in range(1, len(names) + 1)]
    elif columns is not None and columns[-1] not in names:
        names = columns
    else:
        del head[:1]
        check_header(path, names, head, is_named=header == "first")

    num_rows = 0
    wrong_lines = []
    is_second_half = False
    for line_number, cells in itertools.chain(head, rows):
        num_rows += 1
        is_whole = len(cells) == len(names)
        if is_whole and not is_second_half:
            yield dict(zip(names, cells))
        elif keep_wrong:
            yield None
        if not is_whole:
            wrong_lines.append(line_number)
        is_second_half = len(cells) < len(names)
    if wrong_lines and not keep_wrong:
        message = (f"{path}: expected {len(names)} columns ({', '.join(names)}), got another "
                   f"number in {len(wrong_lines):,} of {num_rows:,} rows, the first in line "
                   f"{wrong_lines[0]:,}.")
        # a few are left out, as the hub's loader of GLUE does; many are a sign of another format
        if len(wrong_lines) > MAX_DAMAGED * num_rows:
            raise InputError(message)
        note_once(f"{message} They are left out, with the row after each that is short.")


def check_header(path, names, rows, is_named):
    """Raise InputError where the first line of a table is not cut, or names no columns.

    rows are the next ones, (line number, cells). is_named: --header says that it does name them.
    """
    if len(names) == 1 and re.search(r"[,;|\t]", names[0]):
        raise InputError(f"{path}: expected columns by comma, in a .tsv by tab, or by --sep, "
                         f"got {names[0]!r:.99}. Use --sep, for example --sep ';'.")
    for place, name in enumerate(names):
        if name == "":  # the index of pandas
            continue
        if name in names[:place]:
            raise InputError(f"{path}: expected columns of different names, got {names!r:.99}")
        cells = [cells[place] for _, cells in rows if len(cells) == len(names)]
        if not is_named and (name in cells or re.fullmatch(r"[-+]?\d+([.,]\d+)?", name)):
            raise InputError(f"{path}: expected a line of column names first, got "
                             f"{', '.join(names):.99}, where {name} looks like a cell. Use "
                             "--header none, and the columns are 1, 2, ...; or --header first.")


def read_hub(name, config=None, split="train"):
    """Yield the rows of a Hugging Face data set, streaming. A class label is a number.

    Raises:
        InputError or OSError: It could not be loaded; an OSError of the library names it.
    """
    import datasets  # takes seconds to import
    with blame_file(name):
        yield from datasets.load_dataset(name, config, split=split, streaming=True)


# -------------------------------------------------------------------------------------------------
# Flags, and what callers of read_rows need


def add_reader_flags(add):
    """Add --encoding, --sep and --header by `add`, the add_argument of a parser."""
    add("--encoding", metavar="NAME",
        help="encoding of text files, such as latin-1 or utf-16 (default: utf-8)")
    add("--sep", metavar="CHARACTER", type=read_separator,
        help="between the cells of a .csv or .tsv, or the items or texts of a line of a .txt "
        "(default: comma, of .tsv and pairs of texts tab, of items tab or else spaces)")
    add("--header", choices=("first", "none"),
        help="first: the first line of a .csv or .tsv names the columns, whatever it looks like; "
        "none: it is a row, and the columns are 1, 2, ... (default: first, unless it looks like a "
        "row)")


def read_separator(text):
    """Return the separator that a flag names: itself, or for \\t, as people type it, a tab."""
    return text.replace("\\t", "\t")


def reader_options(args):
    """Return the flags of add_reader_flags that are set, as arguments of read_rows."""
    options = dict(encoding=args.encoding, sep=args.sep, header=args.header)
    return {name: value for name, value in options.items() if value is not None}


def list_names(flag):
    """Return the names of columns in a flag, "a,b"; none of None."""
    if flag is None:
        return []
    return [name.strip() for name in flag.split(",")]


def peek_columns(rows):
    """Look at the first rows, since a single one may lack a column or have an empty cell in it.

    Args:
        rows: iterable of dict.

    Returns:
        dict, column -> one of its values, None where there is none; {} without rows.
        iterator of all rows, the first ones too.
    """
    rows = iter(rows)
    head = list(itertools.islice(rows, PEEK))
    examples = {}
    for row in head:
        for name, value in row.items():
            if examples.get(name) is None:
                examples[name] = value
    return examples, itertools.chain(head, rows)


def get_ending(path):
    """Return the file ending, such as ".csv", of a path that may end in .gz too."""
    return os.path.splitext(path.lower().removesuffix(".gz"))[1]


@functools.cache
def note_once(text):
    """Print a note on stderr, once: subwords take a reading of their own."""
    print(text, file=sys.stderr)
