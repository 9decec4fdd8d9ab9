"""Files and hub data sets to rows: dict of column -> value. The one reader of rows.

    for row in read_rows("reviews.csv.gz"):
        print(row["text"])
    for number, row in number_rows("reviews.csv.gz"):      for messages: as the user counts them
        ...

Out of scope: which columns are documents (data/sources.py), texts and labels (data/tasks.py).
"""

import contextlib
import csv
import functools
import gzip
import io
import itertools
import json
import os
import re
import sys

from data.splitters import clean_name
from support.common import InputError, reading

ENDINGS = (".txt", ".tsv", ".csv", ".jsonl", ".json", ".parquet")  # each may end in .gz too
TABLES = (".tsv", ".csv")
PEEK = 100  # rows that decide on the columns
MAX_MARKS = 20  # spaces and invisible characters in a cell of a header that comes again
MAX_DAMAGED = 0.01  # share of the rows of a table that may be left out


def read_rows(path, columns=None, **options):
    """Yield the rows of number_rows, dict, without their numbers."""
    for _, row in number_rows(path, columns, **options):
        yield row


def number_rows(path, columns=None, keep_damaged=False, encoding=None, sep=None, header=None):
    """Read a file row by row. Bytes that cannot be decoded are replaced, and counted on stderr.

    Args:
        path: str, a file with one of ENDINGS, or with .gz after it.
        columns: list[str], names for a table without a header line, such as the original files of
            CoLA.
        keep_damaged: bool, yield {} for a damaged row. Otherwise those of a table are left out.
        encoding: str, one that Python knows. None: UTF-8, and UTF-16 is refused.
        sep: str, the character between the cells of a table. None: a tab in a .tsv, else a comma.
            In a .txt a sep of any length cuts each line into a list.
        header: "none": a table has no header, and its columns are "1", "2", ...; "first": the
            first line is the header. None: the first line is the header, and one that looks like a
            row, or comes again soon, is refused.

    Yields:
        number: int, that of the row, from 1. A row that is left out counts, and an empty line of a
            table or a .jsonl does not.
        row: dict, column -> value:

            .txt           a line, in the column "text": a str, or with sep a list of str
            .tsv .csv      a row of a table; its cells stay str
            .jsonl         a line, an object
            .json          the object, one of a list or of its list "data", or an object a line
            .parquet       a row

        Lines end at a line feed.

    Raises:
        InputError: The file is damaged, or of another kind.
        OSError: It cannot be opened.
    """
    ending = get_ending(path)
    if ending not in ENDINGS:
        raise InputError(f"{path}: expected a file in {', '.join(ENDINGS)} (or .gz).")
    number = 0
    rows = parse_file(path, ending, columns, keep_damaged, encoding, sep, header)
    try:
        for number, row in enumerate(rows, 1):
            if isinstance(row, dict):
                yield number, row
            elif keep_damaged:
                yield number, {}
            elif ending not in TABLES:  # parse_table says how many rows of a table are left out
                raise InputError(f"{path}, row {number:,}: expected an object, such as "
                                 f'{{"items": ["a", "b"]}}, got {row!r:.60}')
    except (InputError, FileNotFoundError, IsADirectoryError, PermissionError):
        raise  # they say what is wrong
    except Exception as error:  # gzip, csv, json and pyarrow do not name the file
        raise InputError(f"{path}: could not be read as {ending} after row {number:,}: "
                         f"{error!r}. If the file was cut, copy it again; in a .csv close each "
                         "quotation mark; check --encoding if you use it.") from error


def parse_file(path, ending, columns, keep_damaged, encoding, sep, header):
    """Yield the rows of a file, dict; anything else is a damaged row. See number_rows."""
    open_file = gzip.open if path.lower().endswith(".gz") else open
    with open_file(path, "rb") as file:
        if ending == ".parquet":
            with requiring("pyarrow", path):
                from pyarrow.parquet import ParquetFile  # takes a while to import
            for batch in ParquetFile(file).iter_batches():
                yield from batch.to_pylist()
            return
        lines = read_lines(path, file, encoding)
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
            yield from parse_json("".join(lines))
        elif ending in TABLES:
            table = split_cells(lines, ending, sep)
            yield from parse_table(path, table, columns, keep_damaged, header)
        else:
            raise NotImplementedError(ending)


def read_lines(path, file, encoding):
    """Yield the lines of a binary file, then say how many of its characters were replaced.

    Lines end with \\n alone. A carriage return inside a line becomes a space.
    """
    if encoding is None:
        # UTF-16 would decode to replacement characters
        start = file.peek(4096)
        if start.startswith((b"\xff\xfe", b"\xfe\xff")) or b"\0" in start:
            raise InputError(f"{path}: expected UTF-8, got UTF-16 or NULs. Use --encoding utf-16, "
                             "or utf-8 to keep the NULs.")
        encoding = "utf-8"
    num_replaced = 0
    lines = io.TextIOWrapper(file, encoding, errors="replace", newline="\n")
    for line in lines:
        num_replaced += line.count("\ufffd")
        line = line.removeprefix("\ufeff")  # a byte-order mark; joined files have several
        yield line.replace("\r\n", "\n").replace("\r", " ")
    if num_replaced > 0:
        note_once(f"warning: {path}: {num_replaced:,} characters could not be decoded and were "
                  "replaced, or are U+FFFD in the file. If it is not UTF-8, use --encoding, for "
                  "example latin-1.")


def parse_line(line):
    """Return the value of a line of JSON. A broken line stays a str, a damaged row."""
    try:
        return json.loads(line)
    except ValueError:
        return line


def parse_json(text):
    """Return the rows of a .json: an object, a list, such a list as "data", or an object a line."""
    try:
        rows = json.loads(text)
    except ValueError as error:
        try:
            rows = [json.loads(line) for line in text.split("\n") if line.strip()]
        except ValueError:
            raise error from None  # it has the place in the whole file
    if not isinstance(rows, dict):
        return rows
    # SQuAD's own files: an object with a list "data". Beside a text, data is a column
    if isinstance(rows.get("data"), list) and "text" not in rows:
        return rows["data"]
    return [rows]


def split_cells(lines, ending, sep):
    """Yield the cells of each row of a .csv or .tsv, list[str]. An empty line is no row."""
    csv.field_size_limit(2**31 - 1)  # a cell may be a whole article; a C long may have 32 bits
    if sep is None:
        sep = "\t" if ending == ".tsv" else ","
    quoting = csv.QUOTE_NONE if ending == ".tsv" else csv.QUOTE_MINIMAL
    # strict: without it the cell of a stray quote takes in all rows up to the next quote
    for cells in csv.reader(lines, delimiter=sep, quoting=quoting, strict=True):
        if cells:
            yield cells


def parse_table(path, table, columns, keep_damaged, header):
    """Yield the rows of a table, dict. A few may be damaged: they have another number of cells.

    The cells of each row that is left out are yielded as a list, in its place.

    A raw line break cuts "a bad film,neg" into rows "a bad" and "film,neg". The second looks whole,
    so a row after a short one is left out too. Joined files have their header again in the middle:
    rows equal to it, whatever their case, are left out; in another order they are refused.
    """
    head = list(itertools.islice(table, 1 + PEEK))
    if not head:
        return
    has_header = header != "none" and columns is None
    names, head = read_header(path, head, columns, header)
    num_headers = 0
    damaged = []  # numbers of the rows with another number of cells
    is_after_short = False
    for number, cells in enumerate(itertools.chain(head, table), 1):
        is_whole = len(cells) == len(names)
        is_header = has_header and are_names(cells, names)
        if is_header and fold_names(cells) != fold_names(names):  # its cells would be swapped
            raise InputError(f"{path}: expected columns {', '.join(names):.99} in one order, got "
                             f"{', '.join(cells):.99} in row {number:,}, as in joined files. "
                             "Join files of one order; if it is a row, rename a column.")
        if is_header:
            num_headers += 1
        if not is_whole:
            damaged.append(number)
        if is_whole and not is_header and not is_after_short:
            yield dict(zip(names, cells))
        else:
            yield cells
        is_after_short = len(cells) < len(names)  # for the next row
    if num_headers > 0 and not keep_damaged:
        note_once(f"warning: {path}: rows equal to the header, as in joined files: "
                  f"{num_headers:,}. They are left out.")
    if damaged and not keep_damaged:
        message = (f"{path}: expected {len(names)} columns ({', '.join(names)}), got another "
                   f"number in {len(damaged):,} of {number:,} rows, the first in row "
                   f"{damaged[0]:,}.")
        # few are left out, as the hub's loader of GLUE does; many are a sign of another format
        if len(damaged) > MAX_DAMAGED * number:
            raise InputError(message)
        note_once(f"{message} They are left out, and so is the row after each short one.")


def read_header(path, head, columns, header):
    """Return the names of the columns, and the rows of the head of a table.

    Header "none" decides first, then columns. Without both the first line has the names.

    Args:
        head: list of list[str], the cells of the first lines.
        path, columns, header: as in number_rows.

    Raises:
        InputError: The first line has one cell, with another separator inside, or it does not name
            the columns.
    """
    names = [clean_name(name) for name in head[0]]
    if len(names) == 1 and re.search(r"[,;|\t]", names[0]):
        raise InputError(f"{path}: expected columns by comma, in a .tsv by tab, or by --sep, got "
                         f"{names[0]!r:.99}. Use --sep, for example --sep ';', or a .txt for a "
                         "text a line.")
    if header == "none":
        return [str(number) for number in range(1, len(names) + 1)], head
    if columns is not None:
        return columns, head
    rows = head[1:]
    for number, row in enumerate(rows, 1):
        if header is None and are_names(row, names):
            raise InputError(f"{path}: expected a line of column names once, got "
                             f"{', '.join(names):.99} again in row {number}. Use --header first, "
                             "and such rows of joined files are left out; or --header none, if it "
                             "is a row.")
    for place, name in enumerate(names):
        if name == "":  # the index of pandas
            continue
        if name in names[:place]:
            raise InputError(f"{path}: expected columns of different names, got {names!r:.99}")
        cells = [row[place] for row in rows if len(row) == len(names)]
        is_cell = name in cells or re.fullmatch(r"[-+]?\d+([.,]\d+)?", name)
        if is_cell and header is None:
            raise InputError(f"{path}: expected a line of column names first, got "
                             f"{', '.join(names):.99}, where {name} looks like a cell. Use "
                             "--header none, and the columns are 1, 2, ...; or --header first.")
    return names, rows


def are_names(cells, names):
    """Return whether cells are the names of columns, in any order, case and invisible marks."""
    if len(cells) != len(names):
        return False
    folded = [name.casefold() for name in names]  # they are clean
    max_length = max(map(len, names)) + MAX_MARKS
    for cell in cells:  # nearly all rows end at their first cell
        if len(cell) > max_length:  # to clean each text would take longer than to read
            return False
        if clean_name(cell).casefold() not in folded:
            return False
    return sorted(fold_names(cells)) == sorted(folded)


def fold_names(names):
    """Return names of columns without what does not tell them apart, list[str]."""
    return [clean_name(name).casefold() for name in names]


def is_hub_id(text):
    """Return whether a text is an ID as read_hub takes it, and no path of a file.

    A mistyped path should not go to the hub, which answers after half a minute.
    """
    ending = get_ending(text)
    is_mistyped = ending != "" and os.path.isdir(os.path.dirname(text))  # such as notes/may.xlsx
    is_path = is_mistyped or os.path.exists(text) or ending in ENDINGS
    return not is_path and re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*(:[^:]*){0,2}", text) is not None


def read_hub(hub_id, split="train"):
    """Stream the rows of a Hugging Face data set. A class label is a number.

    Args:
        hub_id: str, owner/name, owner/name:CONFIG, or owner/name:CONFIG:SPLIT, where CONFIG may be
            empty, as in owner/name::test.
        split: str, where hub_id has none.

    Raises:
        InputError: The data set could not be loaded.
    """
    with requiring("datasets", hub_id):
        import datasets  # takes seconds to import
    name, config, split = parse_hub_id(hub_id, split)
    with reading(hub_id):
        yield from datasets.load_dataset(name, config, split=split, streaming=True)


def parse_hub_id(hub_id, split="train"):
    """Return the name, the configuration or None, and the split of an ID as read_hub takes it."""
    name, config, own_split = [*hub_id.split(":"), "", ""][:3]
    return name, config or None, own_split or split


# -------------------------------------------------------------------------------------------------
# Flags, and what callers of number_rows need


def add_reader_flags(add):
    """Add --encoding, --sep and --header by `add`, the add_argument of a parser."""
    add("--encoding", metavar="NAME",
        help="encoding of text files, such as latin-1 or utf-16 (default: utf-8)")
    add("--sep", metavar="CHARACTER", type=lambda text: text.replace("\\t", "\t"),  # typed as \t
        help="what separates cells, or items in a line of a .txt (default: comma in a .csv, else "
        "tab)")
    add("--header", choices=("first", "none"),
        help="the first line of a table names columns, or none does: they are 1, 2, ... (default: "
        "first, but a line that looks like a row is refused)")


def reader_options(args):
    """Return the flags of add_reader_flags that the user has set, as arguments of number_rows."""
    options = dict(encoding=args.encoding, sep=args.sep, header=args.header)
    return {name: value for name, value in options.items() if value is not None}


def list_names(flag):
    """Return the names of columns in a flag such as "a,b"."""
    return [name.strip() for name in flag.split(",")]


def peek_columns(rows):
    """Look at the first 100 rows, since one row alone may lack a column or a value.

    Args:
        rows: iterable of (number, row), as number_rows yields them.

    Returns:
        dict, column -> one of its values, None where there is none; {} without rows.
        iterator of all that rows has, from the first one on.
    """
    rows = iter(rows)
    head = list(itertools.islice(rows, PEEK))
    examples = {}
    for _, row in head:
        for name, value in row.items():
            if examples.get(name) is None:
                examples[name] = value
    return examples, itertools.chain(head, rows)


@contextlib.contextmanager
def requiring(package, source):
    """Turn an ImportError of the block into an InputError. Texts and tables need no package."""
    try:
        yield
    except ImportError as error:
        raise InputError(f"{source}: requires the package {package}, which could not be imported "
                         f"({error}). Install it: pip install {package}") from error


def get_ending(path):
    """Return the ending of a path, such as ".csv". A .gz behind it does not count."""
    return os.path.splitext(path.lower().removesuffix(".gz"))[1]


@functools.cache
def note_once(text):
    """Print a note on stderr, once, though files are read twice where subwords are learned."""
    print(text, file=sys.stderr)
