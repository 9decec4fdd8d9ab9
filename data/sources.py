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
from data.rows import ENDINGS, get_ending, is_hub_id, list_names, note_once, number_rows
from data.rows import parse_hub_id, peek_columns, read_hub
from data.splitters import clean_name
from support.common import InputError

HUB = {  # name -> data set on the hub
    "wikipedia": "wikimedia/wikipedia:20231101.en",
    "bookcorpus": "rojagtap/bookcorpus",
}
JOB_FILES = 64  # Python files of a job
JOB_UNITS = 1_000_000  # characters of a job, or names: a second of work


def find_sources(data, split, field, reader):
    """Return the source of each part of --data. What would be read twice is refused.

    Args:
        data: str, parts joined by +.
        split: str, "items" for item sets.
        field, reader: as in Source.
    """
    parts = data.split("+")
    if len(parts) > 1 and os.path.exists(data):  # such as c++.txt
        raise InputError(f"--data {data}: + joins sources. Use a path without +.")
    sources = []
    name_of = {}  # what is read -> its name
    for part in parts:
        source_class = choose_source(part)
        source = source_class(part, split == "items", field, reader)
        sources.append(source)
        # a text that is read twice, such as by a link, may be held out and trained on
        for content, name in source.contents().items():
            if content in name_of:
                raise InputError(f"--data {data}: expected each file or name once, got "
                                 f"{name_of[content]} and {name}.")
            name_of[content] = name
    return sources


def choose_source(part):
    """Return the class of a part of --data."""
    if part in SOURCES or part in HUB:
        if os.path.exists(part):  # no silent guess
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
        reader: dict, encoding, sep and header of number_rows.

    Attributes:
        paths: list of str, files that its documents come from. An edited file is another corpus.
    """

    has_rows = False  # --field chooses a column of them
    has_files = False  # --encoding, --sep and --header say how to read them
    has_copies = False  # equal documents count once
    has_sets = True  # documents may be item sets

    def __init__(self, part, is_sets, field, reader):
        if field is not None and not self.has_rows:
            raise InputError(f"--field: requires rows, got {part}.")
        if reader and not self.has_files:
            raise InputError(f"--encoding, --sep, --header: require files, got {part}.")
        if is_sets and not self.has_sets:  # the words of a text would be its items
            raise InputError(f"--split items: requires item sets, got {part}. Use python-names.")
        self.part = part
        self.is_sets = is_sets
        self.field = field
        self.reader = reader
        self.paths = self.find_paths()

    def find_paths(self):
        return []

    def contents(self):
        """Return dict, all that is read -> its name. Sources with a key in common are refused."""
        return {self.part: self.part}

    @classmethod
    def documents(cls, job):
        """Return the documents of a job, list. Another process calls it, without the object."""
        return job


class RowSource(Source):
    """Rows with columns. One process reads them, and a job is a list of documents.

    A subclass has tables, list of str, the names of its files or its data set, and
    open_table(table) -> an iterator of (number, row).
    """

    has_rows = True

    def jobs(self):
        read = read_sets if self.is_sets else read_texts
        # subtle: a job is filled and forgotten, as all documents may exceed memory
        job = []
        num_units = 0
        for document in read(self):
            job.append(document)
            num_units += len(document)  # characters of a text, names of a set
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
        # two links to a file, or the file and a link, such as latest.txt, are one text
        path_of = {}
        for path in sorted(paths, key=os.path.islink):
            path_of.setdefault(identify_file(path), path)
        paths = sorted(path_of.values())
        if not paths:
            raise InputError(f"--data {self.part}: expected files in {', '.join(ENDINGS)} (or "
                             f".gz), a hub ID or one of {', '.join((*SOURCES, *HUB))}. Nothing "
                             "was found there.")
        return paths

    def contents(self):
        return {identify_file(path): path for path in self.paths}

    @property
    def tables(self):
        return self.paths

    def open_table(self, path):
        return number_rows(path, **self.reader)


def identify_file(path):
    """Return what all links to a file have in common, hard ones too."""
    status = os.stat(path)
    if status.st_ino == 0:  # some file systems have no such numbers
        return os.path.realpath(path)
    return status.st_dev, status.st_ino


class Hub(RowSource):
    """A data set on the hub."""

    @property
    def tables(self):
        return [HUB.get(self.part, self.part)]

    def contents(self):
        return {parse_hub_id(table): table for table in self.tables}

    def open_table(self, hub_id):
        return enumerate(read_hub(hub_id), 1)


class PythonTexts(Source):
    """Docstrings of the installed Python and its packages. A job is a list of paths.

    Workers parse the files. Code is copied about, so equal docstrings count once: held-out ones
    would be seen in training.
    """

    has_copies = True
    has_sets = False
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

    has_sets = True
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
    for table in source.tables:
        for number, [text] in read_cells(source, table):
            # a number is no text: the column may be a wrong one
            if text is not None and not isinstance(text, str):
                raise InputError(f"{table}, row {number:,}: expected text, got {text!r:.60}. Use "
                                 "--field for another column, --split items for lists.")
            if text:
                yield text


def read_sets(source):
    """Yield the item sets of a RowSource, lists, without empty ones."""
    # --field SET,ITEM: each row has one item
    if source.field is not None and len(list_names(source.field)) == 2:
        yield from read_pairs(source)
        return
    # Otherwise each row has a set. All sets of a table have one form, lists or texts
    for table in source.tables:
        split = choose_split(source, table)
        for number, [items] in read_cells(source, table):
            if items in (None, "", []):
                continue
            is_good = is_names(items) if split is None else isinstance(items, str)
            if not is_good:
                raise InputError(f"{table}, row {number:,}: expected in all rows lists of names or "
                                 f"whole numbers, or in all rows texts, got {items!r:.60}. Use "
                                 "--field for another column.")
            if split is not None:
                items = split(items)
            yield items


def choose_split(source, table):
    """Return the function that splits the sets of a table into names; None if they are lists.

    Tabs in any of the sets decide for all: then "olive oil" is one name, and else it is two. So a
    table of texts is read twice.
    """
    has_texts = False
    example = ""  # the first set with a comma
    for _, [items] in read_cells(source, table):
        if items in (None, ""):
            continue
        if not isinstance(items, str):
            break
        if "\t" in items:  # names may have spaces
            return lambda text: text.split("\t")
        has_texts = True
        if "," in items and example == "":
            example = items
    if not has_texts:
        return None
    # names split by commas alone would get commas at their ends
    if example != "":
        raise InputError(f"{table}: expected item sets, names split by tabs or spaces, got "
                         f"{example!r:.60}. Use --sep ',' for commas, a .jsonl for JSON.")
    return str.split


def read_pairs(source):
    """Yield the items of each page, list. A row has a page and one of its items.

    A page may be in several files.
    """
    # rows of a page need not be neighbors, so the whole table is in memory
    pages = defaultdict(list)  # page -> its items
    for table in source.tables:
        for number, cells in read_cells(source, table):
            page, item = cells
            if page in (None, "") or not is_names(cells):  # an item without a page is in no set
                raise InputError(f"{table}, row {number:,}: expected names or whole numbers of a "
                                 f"set and an item, got {cells!r:.60}. Use --field SET,ITEM.")
            pages[clean_name(str(page))].append(item)  # "1" in a table and 1 in JSON are one page
    yield from pages.values()


def read_cells(source, table):
    """Yield the number of each row, and its cells in the columns of the documents, list.

    Args:
        source: RowSource.
        table: str, one of source.tables.
    """
    examples, rows = peek_columns(source.open_table(table))
    if not examples:
        return
    columns = choose_columns(table, examples, source.is_sets, source.field)
    if columns != ["text"]:  # a choice that the user should see
        note_once(f"columns: {', '.join(columns)} of {source.part}")
    num_incomplete = 0
    for number, row in rows:
        if not set(columns) <= set(row):
            num_incomplete += 1
        yield number, [row.get(name) for name in columns]
    if num_incomplete > 0:
        note_once(f"warning: {table}: {num_incomplete:,} of {number:,} rows have no "
                  f"{', '.join(columns)}.")


def is_names(value):
    """Return whether a value is a list, or tuple, of names, whole numbers or None, no name."""
    if not isinstance(value, (list, tuple)):
        return False
    for name in value:
        # a list of True and False is a mask, or the like, of another column
        if isinstance(name, bool) or not isinstance(name, (str, int, type(None))):
            return False
    return True


# -------------------------------------------------------------------------------------------------
# The columns of documents


def choose_columns(table, examples, is_sets, field=None, flag="--field"):
    """Choose the column of the documents; of sets it may be two: a page and one of its items.

    Args:
        table: str, the name of a file or data set, for the message of an error.
        examples: dict, the columns and a value of each.
        is_sets: bool, the documents are item sets and no texts.
        field: str, names joined by commas. None: of texts the column "text", or else the only one
            of strings; of sets the only column, or the only one of lists.
        flag: str, the flag that sets field, for the message.

    Returns:
        list of str, one name or two.

    Raises:
        InputError: There is no such column, or there are several.
    """
    kind = list if is_sets else str
    most = 1
    if field is not None:
        names = list_names(field)
        if is_sets:
            most = 2
    elif is_sets and len(examples) == 1:
        names = list(examples)
    elif not is_sets and "text" in examples:
        names = ["text"]
    else:
        names = [name for name in examples if isinstance(examples[name], kind)]
    # several columns of strings are refused: one of them may be the label
    if 1 <= len(names) <= most and set(names) <= set(examples):
        return names
    advice = f"{flag} NAME"
    if is_sets:
        expected = "one column of lists" if field is None else f"columns {field}"
        advice += (", a .txt file with a set a line or, in training, --field SET,ITEM for rows of "
                   "set and item")
    else:
        expected = "one column of text" if field is None else f"column {field}"
        if flag == "--field" and isinstance(examples.get("items"), list):
            advice = "--preset superbloom-small for item sets"
    raise InputError(f"{table}: expected {expected}, got {', '.join(examples)}. Use {advice}.")
