"""What --data names, to documents: files, data sets on the hub, the installed Python.

Out of scope: the formats of files (data/rows.py), documents to token IDs (data/corpus.py).

--data is a part, or several joined by +. find_sources makes a source of each:

    my_texts/, a.csv           Files: a folder, or one file
    owner/name, wikipedia      Hub: a data set on the hub, or its name in HUB
    python                     the class of the name in SOURCES

A source has jobs, and documents of a job. A job is the work of one core at a time. A document is a
text, str. With --split items it is an item set: a list of names, or a str of names.

A new source is a class and its line in SOURCES.
"""

import os
from collections import defaultdict
from pathlib import Path

from data.batches import divide
from data.python_source import PLACES, python_files, python_names, python_texts, walk_files
from data.rows import ENDINGS, get_ending, is_hub_id, list_names, note_once, parse_hub_id
from data.rows import peek_columns, read_hub, read_rows
from support.common import InputError

HUB = {  # name -> data set on the hub
    "wikipedia": "wikimedia/wikipedia:20231101.en",
    "bookcorpus": "rojagtap/bookcorpus",
}
JOB_FILES = 64  # Python files of a job
JOB_UNITS = 1_000_000  # characters of a job, or names in lists


def find_sources(data, split, field, reader):
    """Return the source of each part of --data. Parts that do not fit together are refused.

    Args:
        data: str, parts joined by +.
        split: str, "items" for item sets.
        field, reader: as in Source.
    """
    parts = data.split("+")
    if len(parts) > 1 and os.path.exists(data):
        raise InputError(f"--data {data}: + joins sources. Use a path without +.")
    sources = []
    contents = []
    for part in parts:
        source_class = choose_source(part)
        source = source_class(part, split == "items", field, reader)
        sources.append(source)
        contents.extend(source.list_contents())
    # a text that is read twice, such as by a link, may be held out and trained on
    if len(set(contents)) < len(contents):
        raise InputError(f"--data {data}: expected each file or name once.")
    return sources


def choose_source(part):
    """Return the class of a part of --data."""
    if part in SOURCES or part in HUB:
        if os.path.exists(part):
            raise InputError(f"--data {part}: expected a name or a path, got both. Use ./{part} "
                             "for the path, or rename it.")
        return SOURCES.get(part, Hub)
    if is_hub_id(part):
        return Hub
    return Files


def name_data(data):
    """Return a name of --data for files: my_texts/+owner/name:de gives my_texts+name-de."""
    names = []
    for part in data.split("+"):
        if is_hub_id(part):
            names.append(part.split("/")[1].replace(":", "-"))
        else:
            names.append(Path(part).resolve().stem)
    return "+".join(names)[:40]


# -------------------------------------------------------------------------------------------------
# Sources


class Source:
    """Base class: a part of --data.

    A subclass has jobs() -> an iterator of jobs, plain values that are sent to other processes. It
    may have documents, paths and contents of its own.

    Args:
        part: str, its name in --data.
        is_sets: bool, documents are item sets and no texts.
        field: str or None, the column of the documents, see choose_columns.
        reader: dict, encoding, sep and header of read_rows.

    Attributes:
        paths: list of str, files that its documents come from. An edited file is another corpus.
    """

    has_rows = False  # --field chooses a column of them
    has_files = False  # --encoding, --sep and --header say how to read them
    has_copies = False  # equal documents count once

    def __init__(self, part, is_sets, field, reader):
        if field is not None and not self.has_rows:
            raise InputError(f"--field: requires rows, got {part}.")
        if reader and not self.has_files:
            raise InputError(f"--encoding, --sep, --header: require files, got {part}.")
        self.part = part
        self.is_sets = is_sets
        self.field = field
        self.reader = reader
        self.paths = self.find_paths()

    def find_paths(self):
        return []

    def list_contents(self):
        """Return names of all that is read, list. Sources with a name in common are refused."""
        return [self.part]

    @classmethod
    def documents(cls, job):
        """Return the documents of a job, list. Another process calls it, without the object."""
        return job


class RowSource(Source):
    """Rows with columns. One process reads them, and a job is a list of documents.

    A subclass has open_tables() -> dict, the name of a file or data set -> an iterator of its rows.
    """

    has_rows = True

    def jobs(self):
        read = read_sets if self.is_sets else read_texts
        job = []
        num_units = 0
        for document in read(self):
            job.append(document)
            num_units += len(document)
            if num_units > JOB_UNITS:
                yield job
                job = []
                num_units = 0
        if job:
            yield job


class Files(RowSource):
    """A file, or the files of a folder, without those of other kinds and linked folders."""

    has_files = True

    def find_paths(self):
        if os.path.isfile(self.part):
            return [self.part]
        paths = [path for path in sorted(walk_files(self.part)) if get_ending(path) in ENDINGS]
        if not paths:
            raise InputError(f"--data {self.part}: expected files in {', '.join(ENDINGS)} (or "
                             f".gz), a hub ID or one of {', '.join((*SOURCES, *HUB))}. Nothing "
                             "was found there.")
        return paths

    def list_contents(self):
        return [os.path.realpath(path) for path in self.paths]

    def open_tables(self):
        return {path: read_rows(path, **self.reader) for path in self.paths}


class Hub(RowSource):
    """A data set on the hub."""

    def __init__(self, part, *options):
        super().__init__(part, *options)
        self.hub_id = HUB.get(part, part)

    def list_contents(self):
        return [parse_hub_id(self.hub_id)]

    def open_tables(self):
        return {self.part: read_hub(self.hub_id)}


class PythonTexts(Source):
    """Docstrings of the installed Python and its packages. A job is a list of paths.

    Workers parse the files. Code is copied about, so equal docstrings count once: held-out ones
    would be seen in training.
    """

    has_copies = True
    places = PLACES
    read_file = staticmethod(python_texts)

    def find_paths(self):
        return list(python_files(self.places).values())

    def jobs(self):
        yield from divide(self.paths, JOB_FILES)

    @classmethod
    def documents(cls, job):
        documents = []
        for path in job:
            documents.extend(cls.read_file(path))
        return documents


class StandardLibrary(PythonTexts):
    """Docstrings of the standard library alone."""

    places = ("stdlib",)


class PythonNames(PythonTexts):
    """The names that each function of the installed Python uses."""

    read_file = staticmethod(python_names)


SOURCES = {
    "python": PythonTexts,
    "stdlib": StandardLibrary,
    "python-names": PythonNames,
}


# -------------------------------------------------------------------------------------------------
# Rows to documents


def read_texts(source):
    """Yield the texts of a RowSource, without empty ones."""
    for table, number, [text] in read_cells(source, choose_columns):
        if text is not None and not isinstance(text, str):
            raise InputError(f"{table}, row {number:,}: expected text, got {text!r:.60}. Use "
                             "--field for another column, --split items for lists.")
        if text:
            yield text


def read_sets(source):
    """Yield the item sets of a RowSource, without empty ones: a cell, or the items of a page."""
    if source.field is not None and len(list_names(source.field)) == 2:
        yield from read_pairs(source)
        return
    for table, number, [items] in read_cells(source, choose_corpus_columns):
        if items is not None and not isinstance(items, str) and not is_names(items):
            raise InputError(f"{table}, row {number:,}: expected names or whole numbers, got "
                             f"{items!r:.60}. Use --field for another column.")
        if items:
            yield items


def read_pairs(source):
    """Yield the items of each page, list. A row has a page and one of its items.

    A page may be in several files.
    """
    pages = defaultdict(list)  # page -> its items
    for table, number, cells in read_cells(source, choose_set_columns):
        page, item = cells
        if page in (None, "") or not is_names(cells):
            raise InputError(f"{table}, row {number:,}: expected names or whole numbers of a set "
                             f"and an item, got {cells!r:.60}. Use --field SET,ITEM.")
        pages[str(page)].append(item)  # "1" in a table and 1 in JSON are one page
    yield from pages.values()


def read_cells(source, choose):
    """Yield of each row: its table, str; its number, from 1; its cells in the chosen columns, list.

    Args:
        source: RowSource.
        choose: choose_columns or another function of a table's name, an example of each column
            and a field, which returns names of columns.
    """
    for table, rows in source.open_tables().items():
        examples, rows = peek_columns(rows)
        if not examples:
            continue
        columns = choose(table, examples, source.field)
        if columns != ["text"]:
            note_once(f"columns: {', '.join(columns)} of {source.part}")
        num_incomplete = 0
        for number, row in enumerate(rows, 1):
            if not set(columns) <= set(row):
                num_incomplete += 1
            yield table, number, [row.get(name) for name in columns]
        if num_incomplete > 0:
            note_once(f"warning: {table}: {num_incomplete:,} of {number:,} rows have no "
                      f"{', '.join(columns)}.")


def is_names(value):
    """Return whether a value is a list of names or whole numbers."""
    if not isinstance(value, list):
        return False
    return all(isinstance(name, (str, int, type(None))) for name in value)


# -------------------------------------------------------------------------------------------------
# The columns of documents


def choose_columns(table, examples, field=None, flag="--field"):
    """Choose the column of the texts, list of one str.

    Args:
        table: str, the name of a file or data set, for the message of an error.
        examples: dict, the columns and a value of each.
        field: str, its name. None: the column "text", or else the only one of strings.
        flag: str, the flag that sets field, for the message.

    Raises:
        InputError: There is no such column, or there are several.
    """
    if field is not None:
        names = list_names(field)
    elif "text" in examples:
        names = ["text"]
    else:
        names = [name for name in examples if isinstance(examples[name], str)]
    if len(names) != 1 or names[0] not in examples:
        expected = "one column of text" if field is None else f"column {field}"
        raise InputError(f"{table}: expected {expected}, got {', '.join(examples)}. Use {flag} "
                         "NAME.")
    return names


def choose_set_columns(table, examples, field=None, flag="--field"):
    """Choose the column of the sets, or two: a page and one of its items.

    Args:
        table, examples, flag: as in choose_columns.
        field: str, names joined by commas. None: the only column, or the only one of lists.

    Returns:
        list of str, one name or two.

    Raises:
        InputError: There is no such column, or there are several.
    """
    most = 1
    if field is not None:
        names = list_names(field)
        most = 2
    elif len(examples) == 1:
        names = list(examples)
    else:
        names = [name for name in examples if isinstance(examples[name], list)]
    if not 1 <= len(names) <= most or not set(names) <= set(examples):
        expected = "one column of lists" if field is None else f"columns {field}"
        advice = f"Use {flag} NAME"
        if flag == "--field":
            advice += ", or --field SET,ITEM for rows of set and item"
        raise InputError(f"{table}: expected {expected}, got {', '.join(examples)}. {advice}, or "
                         "a .txt file with a set a line.")
    return names


def choose_corpus_columns(table, examples, field):
    """Return choose_set_columns; InputError if commas seem to divide a set that is one str."""
    [name] = choose_set_columns(table, examples, field)
    items = examples[name]
    if isinstance(items, str) and "," in items and "\t" not in items:
        raise InputError(f"{table}: expected item sets, names split by tabs or spaces, got "
                         f"{items!r:.60}. Use --sep ',' for commas, a .jsonl for JSON.")
    return [name]
