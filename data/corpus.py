"""Files, hub data sets and the installed Python to token IDs on disk; the one reader of rows.

Paper map:
    [HF §3.1] prepare
Sources:
    [HF] Xue & Aletras 2022, HashFormers
Out of scope: batches (data/batches.py); labels and metrics of tasks (data/tasks.py).

A row's way:

    read_rows -> read_documents -> read_work -> split_work, in several processes -> drop_copies
    -> write_first_ids -> write_final_ids -> ids.bin, read by Corpus

Example: the documents "the cat" and "a cat a cat" become

    ids.tmp      5 6 2 7 6 7 6 2     IDs by first appearance; 2 is [SEP], the end of a document
    ids.bin      7 5 2 6 5 6 5 2     IDs by frequency
    words.txt    cat a the           offsets    0 3 8
"""

import codecs
import csv
import gzip
import hashlib
import itertools
import json
import os
import re
import sys
from collections import Counter, deque
from pathlib import Path

import numpy as np
from tqdm import tqdm

from bloom import random_order
from common import InputError, blame_file, build_once, fingerprint, num_cores, start_workers
from data.python_source import python_files, python_texts, walk_files
from hashing import list_words
from tokenizer import FIRST_WORD_ID, SEP, SUBWORDS

# python: docstrings of the installed Python; stdlib: of its standard library alone; python-names:
# the names that functions use
PYTHON = ("python", "stdlib", "python-names")
HUB = {  # name -> data set on the hub, and its configuration
    "wikipedia": ("wikimedia/wikipedia", "20231101.en"),
    "bookcorpus": ("rojagtap/bookcorpus",),
}
ENDINGS = (".txt", ".tsv", ".csv", ".jsonl", ".json", ".parquet")  # each may end in .gz too
FORMAT = 8  # of prepared corpora
PIECE = 1 << 24  # token IDs in memory at a time
PEEK = 100  # rows that decide on the columns
HELD_OUT_KEY = 90  # of the random order of documents: every run holds out the same


# ---------------------------------------------------------------------------------------------
# Rows: dict of column -> value


def get_ending(path):
    """Return the file ending, such as ".csv", of a path that may end in .gz too."""
    return os.path.splitext(path.lower().removesuffix(".gz"))[1]


def find_files(path):
    """Return the data files at a path, itself or those below a folder; [] where nothing is."""
    if os.path.isfile(path):
        return [path]
    paths = sorted(walk_files(path, follow_links=True))
    files = [file for file in paths if get_ending(file) in ENDINGS]
    # a file and a link to it count once: else one would be held out and the other trained
    return list({os.path.realpath(file): file for file in files}.values())


def add_reader_flags(add):
    """Add --encoding and --sep by `add`, the add_argument of a parser."""
    add("--encoding", metavar="NAME",
        help="encoding of text files, such as latin-1 or utf-16 (default: utf-8)")
    add("--sep", metavar="CHARACTER", type=read_separator,
        help="between the cells of a .csv or .tsv, or the items or texts of a line of a .txt "
        "(default: comma, of .tsv and pairs of texts tab, of items tab or else spaces)")


def read_separator(text):
    """Return the separator that a flag names: itself, or for \\t, as people type it, a tab."""
    return text.replace("\\t", "\t")


def reader_options(args):
    """Return the flags of add_reader_flags that are set, as arguments of read_rows."""
    options = dict(encoding=args.encoding, sep=args.sep)
    return {name: value for name, value in options.items() if value is not None}


def list_names(flag):
    """Return the names of columns in a flag, "a,b"; none of None."""
    if flag is None:
        return []
    return [name.strip() for name in flag.split(",")]


def list_python(part):
    """Return the paths of the .py files that a name in PYTHON stands for."""
    if part == "stdlib":
        return list(python_files(["stdlib"]).values())
    return list(python_files().values())


def read_rows(path, header=None, keep_wrong=False, encoding="utf-8", sep=None):
    """Read a file row by row. What cannot be decoded is replaced, and counted on stderr.

    Args:
        path: str, a file with one of ENDINGS, or with .gz after it.
        header: list[str], the columns of a table whose file may have no header; the text is last.
        keep_wrong: bool, yield bad rows too, so that rows keep their numbers: a row of
            a table with another number of cells has None in each column, and a broken line, or what
            is no object, is an empty row.
        encoding: str, one that Python knows.
        sep: str, the character between cells, or None: a comma, of .tsv a tab. A .txt has none, but
            sep, of any length, cuts its lines into lists.

    Yields:
        dict, column -> value. A line of a .txt has the column "text", with sep a list of str. A
        .json is a list of objects, or an object with it as "data". The cells of .csv and .tsv stay
        str.

    Raises:
        InputError: No such file, another kind, or a damaged one. Rows count from 1.
    """
    ending = get_ending(path)
    if ending not in ENDINGS:
        raise InputError(f"{path}: expected a file in {', '.join(ENDINGS)} (or .gz).")
    num_rows = 0  # that could be read
    try:
        for row in parse_file(path, ending, header, keep_wrong, encoding, sep):
            if not isinstance(row, dict):
                if not keep_wrong:
                    raise ValueError(f"expected an object, got {row!r:.60}")
                row = {}
            yield row
            num_rows += 1
    except InputError:
        raise
    except (FileNotFoundError, IsADirectoryError, PermissionError) as error:
        raise InputError(f"{path}: {error.strerror}.") from error
    except Exception as error:  # of gzip, csv, json and pyarrow, which do not name the file
        raise InputError(f"{path}: could not be read as {ending} after row {num_rows:,}: "
                         f"{error!r}. If the file was cut, copy it again; in a .csv close each "
                         "quotation mark.") from error


def parse_file(path, ending, header, keep_wrong, encoding, sep):
    """Yield the rows of a file as its format has them."""
    if codecs.lookup(encoding).name == "utf-8":
        encoding = "utf-8-sig"  # a mark at the start is no text
    open_file = gzip.open if path.lower().endswith(".gz") else open
    # newline="": csv wants line ends as they are
    with open_file(path, "rt", encoding=encoding, errors="replace", newline="") as file:
        if ending == ".parquet":
            yield from parse_parquet(file.buffer)
            return
        if encoding == "utf-8-sig":
            refuse_utf16(path, file.buffer)
        lines = count_replaced(path, file)
        if ending == ".txt":
            for line in lines:  # each is a document
                text = line.rstrip("\r\n")
                if sep is not None:
                    text = text.split(sep)
                yield {"text": text}
        elif ending == ".jsonl":
            for line in lines:
                if line.strip():
                    yield parse_line(line, keep_wrong)
        elif ending == ".json":
            rows = json.loads("".join(lines))
            if isinstance(rows, dict):
                rows = rows.get("data", rows)  # as SQuAD's own files have it
            yield from rows
        else:
            yield from parse_table(path, lines, ending, header, keep_wrong, sep)


def parse_parquet(file):
    """Yield the rows of a binary .parquet file."""
    from pyarrow.parquet import ParquetFile  # takes a while to import
    for batch in ParquetFile(file).iter_batches():
        yield from batch.to_pylist()


def refuse_utf16(path, file):
    """Raise InputError where a binary file begins as UTF-16: it would be read as noise."""
    start = file.peek(4096)
    has_mark = start.startswith((b"\xff\xfe", b"\xfe\xff"))
    if has_mark or b"\0" in start:
        raise InputError(f"{path}: expected UTF-8, got UTF-16 or NULs. Use --encoding utf-16.")


def parse_line(line, keep_wrong):
    """Return the value of a line of a .jsonl; None for a broken one that is kept."""
    try:
        return json.loads(line)
    except ValueError:
        if not keep_wrong:
            raise
        return None


def count_replaced(path, file):
    """Yield the lines of a file; then say how many characters were replaced, or are U+FFFD."""
    num_replaced = 0
    for line in file:
        num_replaced += line.count("\ufffd")
        yield line
    if num_replaced > 0:
        print(f"warning: {path}: {num_replaced:,} characters could not be decoded and were "
              "replaced, or are U+FFFD in the file. If it is not UTF-8, use --encoding, for "
              "example latin-1.", file=sys.stderr)


def parse_table(path, lines, ending, header, keep_wrong, sep):
    """Yield the rows of a .csv or .tsv; up to 1 % of them may have another number of cells."""
    csv.field_size_limit(sys.maxsize)  # a cell may be a whole article
    # strict: else a stray quote takes all rows up to the next one into its cell
    options = dict(delimiter=",", strict=True)
    if ending == ".tsv":
        options = dict(delimiter="\t", quoting=csv.QUOTE_NONE)
    if sep is not None:
        if len(sep) != 1:
            raise InputError(f"--sep: expected one character for {ending}, got {sep!r}.")
        options["delimiter"] = sep
    table = csv.reader(lines, **options)
    columns = next(table, [])
    check_columns(path, columns)
    rows = table
    # a task's file may lack the header, as CoLA's does: without the name of the text, the last
    # column, the first line is a row
    if header and header[-1] not in columns:
        rows = itertools.chain([columns], table)
        columns = header

    num_rows = 0
    wrong_lines = []
    for cells in rows:
        if not cells:  # an empty line
            continue
        num_rows += 1
        if len(cells) == len(columns):
            yield dict(zip(columns, cells))
        elif keep_wrong:
            yield dict.fromkeys(columns)
        else:
            wrong_lines.append(table.line_num)
    if wrong_lines:
        message = (f"{path}: expected {len(columns)} columns ({', '.join(columns)}), got another "
                   f"number in {len(wrong_lines):,} of {num_rows:,} rows, the first in line "
                   f"{wrong_lines[0]:,}.")
        # a few are left out, as the hub's loader of GLUE does; many are a sign of another format
        if len(wrong_lines) > 0.01 * num_rows:
            raise InputError(message)
        print(f"{message} They are left out.", file=sys.stderr)


def check_columns(path, columns):
    """Raise InputError where the first line of a table is not cut, or names a column twice."""
    names = [name for name in columns if name]
    if len(names) == 1 and re.search(r"[,;|\t]", names[0]):
        raise InputError(f"{path}: expected columns by comma, in a .tsv by tab, or by --sep, "
                         f"got {names[0]!r:.99}. Use --sep, for example --sep ';'.")
    if len(set(names)) < len(names):
        raise InputError(f"{path}: expected columns of different names, got {columns!r:.99}")


def read_hub(name, config=None, split="train"):
    """Yield the rows of a Hugging Face data set, streaming. A class label becomes its name.

    Raises:
        InputError or OSError: It could not be loaded; an OSError of the library names it.
    """
    import datasets  # takes seconds to import
    with blame_file(name):
        data = datasets.load_dataset(name, config, split=split, streaming=True)
        classes = None  # names of the labels 0, 1, ...
        if data.features is not None:
            classes = getattr(data.features.get("label"), "names", None)
        for row in data:
            if classes is not None and row["label"] >= 0:  # -1 is a hidden label
                row["label"] = classes[row["label"]]
            yield row


def choose_columns(source, row, field=None, is_sets=False):
    """Choose the columns of the documents.

    Args:
        source: str, for the message of an error.
        row: dict, the columns and a value of each.
        field: str, names joined by commas, or None: a text is the column "text", else the only one
            of strings; an item set is the only one of lists, else the only one or two at all.
        is_sets: bool, documents are item sets.

    Returns:
        list of str: one name, or of item sets two, a page and one of its items.

    Raises:
        InputError: There is no such column, or there are several.
    """
    max_names = 1
    if field is not None:
        expected = f"columns {field}"
        names = list_names(field)
        if is_sets:
            max_names = 2
    elif is_sets:
        expected = "a list of items, or two columns, a page and an item"
        names = [name for name in row if isinstance(row[name], list)]
        if not names:
            names = list(row)
            max_names = 2
    else:
        expected = "one column of text"
        names = [name for name in row if isinstance(row[name], str)]
        if "text" in row:
            names = ["text"]
    if not 1 <= len(names) <= max_names or not set(names) <= set(row):
        raise InputError(f"{source}: expected {expected}, got {', '.join(row)}. "
                         "Use --field NAME, of item sets also PAGE,ITEM.")
    return names


# ---------------------------------------------------------------------------------------------
# Documents: str, or a list of item names


def split_parts(data):
    """Return the parts of --data, which + joins. A path that exists may have a + in its name."""
    names = data.split("+")
    parts = []
    while names:
        # the longest path that exists, else one name
        end = len(names)
        while end > 1 and not os.path.exists("+".join(names[:end])):
            end -= 1
        parts.append("+".join(names[:end]))
        names = names[end:]
    return parts


def name_data(data):
    """Return the part of file names that stands for --data: my_texts+python of my_texts/+python."""
    names = [Path(part).resolve().stem for part in split_parts(data)]
    return "+".join(names)[:40]


def list_sources(part, **reading):
    """Return (name, rows) of each file at a path, or of a hub data set. Rows are read later."""
    files = find_files(part)
    if files:
        return [(file, read_rows(file, **reading)) for file in files]
    # the hub is not asked for a mistyped file: it would answer after half a minute
    is_path = os.path.exists(part) or get_ending(part) in ENDINGS
    is_hub_id = not is_path and re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", part) is not None
    if part not in HUB and not is_hub_id:
        raise InputError(f"--data {part}: expected files in {', '.join(ENDINGS)} (or .gz), a hub "
                         f"ID or one of {', '.join((*PYTHON, *HUB))}. Nothing was found there.")
    hub = HUB.get(part, (part,))
    return [(part, read_hub(*hub))]


def is_document(value, is_sets):
    """Return whether a cell is a text, or a list of names or whole numbers, or empty."""
    if is_sets and isinstance(value, list):
        # by type: for isinstance True is a whole number, too
        return all(type(name) in (str, int, type(None)) for name in value)
    return value is None or isinstance(value, str)


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


def read_documents(part, is_sets, field, **reading):
    """Yield the documents of one part of --data, in files or on the hub."""
    for source, rows in list_sources(part, **reading):
        examples, rows = peek_columns(rows)
        if not examples:
            continue
        columns = choose_columns(source, examples, field, is_sets)
        if len(columns) == 2:
            yield from group_pairs(source, rows, *columns)
        else:
            yield from read_column(source, rows, columns[0], is_sets)


def read_column(source, rows, column, is_sets):
    """Yield the cells of a column that are not empty."""
    num_doubtful = 0
    num_at_tabs = 0  # sets that are cut there
    num_at_spaces = 0
    for number, row in enumerate(rows, 1):
        document = row.get(column)
        if not is_document(document, is_sets):
            raise name_wrong_row(source, number, column, document)
        if not document:
            continue
        if is_sets and isinstance(document, str):
            if "\t" in document:
                num_at_tabs += 1
            elif len(document.split()) > 1:
                num_at_spaces += 1
                if re.search("[,;|]", document):
                    num_doubtful += 1
        yield document
    if num_doubtful > 0:
        print(f"warning: {source}: {num_doubtful:,} item sets have a comma, semicolon or bar and "
              "were cut at spaces. Use tabs, or in a .txt --sep.", file=sys.stderr)
    if num_at_tabs > 0 and num_at_spaces > 0:
        print(f"warning: {source}: {num_at_spaces:,} item sets without a tab were cut at spaces, "
              f"{num_at_tabs:,} at tabs. Write a tab behind a single name with spaces.",
              file=sys.stderr)


def group_pairs(source, rows, page_column, item_column):
    """Return the item sets of a table with a row for each page and item."""
    pages = {}  # page -> its items
    for number, row in enumerate(rows, 1):
        page = row.get(page_column)
        item = row.get(item_column)
        if page in (None, "") or not is_document([page, item], is_sets=True):
            columns = f"{page_column}, {item_column}"
            raise name_wrong_row(source, number, columns, [page, item])
        pages.setdefault(page, []).append(item)
    return pages.values()


def name_wrong_row(source, number, columns, value):
    """Return the InputError of a row that has no document."""
    return InputError(f"{source}, row {number:,}: expected text, or of an item set names or whole "
                      f"numbers, in {columns}, got {value!r:.60}. Use --field.")


def read_work(data, is_sets=False, field=None, **reading):
    """Cut corpora into units of work for one core, lazily.

    Args:
        data: str, names, paths or hub IDs, joined by +.
        is_sets: bool, rows are lists of names, or pairs of a page and a name.
        field: str or None, see choose_columns.
        reading: encoding and sep of read_rows.

    Yields:
        (kind, payload): "texts" and a list of documents, or a name in PYTHON and a list of paths.
    """
    for part in split_parts(data):
        if part in PYTHON:
            if field is not None or reading:
                raise InputError(f"--field, --encoding, --sep: require files, got --data {part}.")
            paths = list_python(part)
            for start in range(0, len(paths), 64):  # files; parsing takes most of the time
                yield part, paths[start:start + 64]
            continue
        texts = []
        size = 0
        for text in read_documents(part, is_sets, field, **reading):
            texts.append(text)
            size += len(text)
            if size > 1_000_000:  # characters; of lists, names
                yield "texts", texts
                texts = []
                size = 0
        yield "texts", texts


def list_documents(work):
    """Return the documents of a unit of work, of read_work."""
    kind, payload = work
    if kind == "texts":
        return payload
    texts = []
    for path in payload:
        texts.extend(python_texts(path, names=kind == "python-names"))
    return texts


def item_names(document):
    """Return the distinct names of a set, in order.

    Args:
        document: list of str, int or None, or a str with tabs or else spaces between names.
    """
    if isinstance(document, list):
        parts = document
    elif "\t" in document:  # then names may have spaces
        parts = document.split("\t")
    else:
        parts = document.split()
    names = [" ".join(str(part).split()) for part in parts if part is not None]
    return [name for name in dict.fromkeys(names) if name]


# ---------------------------------------------------------------------------------------------
# Words to token IDs


def prepare(data, split, cache, max_subwords=50_000, quiet=False, field=None, **reading):
    """Turn corpora into one array of token IDs on disk, once. [HF §3.1]

    In memory are the distinct words with their counts, where each document starts, item sets of a
    table of pairs, a .json file, and of Python each distinct document.

    Args:
        data: str, see read_work.
        split: str, one of tokenizer.SPLITS.
        cache: str, the folder of all corpora.
        max_subwords: int, pieces of a BPE or phrases at most.
        quiet: bool, no progress bar.
        field: str or None, see choose_columns.
        reading: encoding and sep of read_rows.

    Returns:
        str, the folder that Corpus reads. A change of a file makes another one.

    Raises:
        InputError: Data cannot be read, or has no words.
    """
    # another content, split or column is another folder
    num_subwords = max_subwords if split in SUBWORDS else None
    identity = [FORMAT, data, split, num_subwords, field]
    if reading:
        identity.append(reading)
    for part in split_parts(data):
        files = list_python(part) if part in PYTHON else find_files(part)
        for file in files:
            stat = os.stat(file)
            identity.append((os.path.abspath(file), stat.st_size, stat.st_mtime_ns))
    path = os.path.join(cache, f"{name_data(data)}-{split}-{fingerprint(identity)}")

    if not quiet and not os.path.exists(path):
        print(f"preparing {data}, once for all runs, in {cache}", flush=True)

    def write(temporary):
        write_corpus(Path(temporary), data, split, max_subwords, quiet, field, **reading)

    return build_once(path, write)


def write_corpus(folder, data, split, max_subwords, quiet, field, **reading):
    """Write all files of a prepared corpus, see prepare, to a new folder."""
    folder.mkdir()
    hidden = True if quiet else None  # of progress bars; None: where no terminal shows them
    subwords = None
    if split in SUBWORDS:
        works = read_work(data, field=field, **reading)
        texts = itertools.chain.from_iterable(map(list_documents, works))
        bar = tqdm(texts, f"training {split}", unit=" documents", disable=hidden)
        subwords = SUBWORDS[split].train(bar, max_subwords)
        (folder / "subwords.json").write_text(subwords.json, "utf-8")

    # First pass: IDs by first appearance, since how frequent a word is shows at the end.
    works = read_work(data, split == "items", field, **reading)
    results = tqdm(split_all(works, split, subwords), f"preparing {data}", disable=hidden)
    words, counts = write_first_ids(folder, drop_copies(results, split), subwords)
    if not counts:
        raise InputError(f"--data {data}: expected text, got no words.")

    # old_of_new[new ID] is the old ID. Special tokens keep theirs, and subwords their order
    old_of_new = list(range(FIRST_WORD_ID + len(words)))
    if subwords is None:
        by_frequency = counts.most_common()  # among equal counts the first to appear comes first
        # counts has SEP, too, once for each document
        old_of_new[FIRST_WORD_ID:] = [i for i, _ in by_frequency if i != SEP]
    words = [words[i - FIRST_WORD_ID] for i in old_of_new[FIRST_WORD_ID:]]

    # Second pass: IDs by frequency. The digest identifies the corpus in checkpoints.
    dtype, digest = write_final_ids(folder, old_of_new)
    text = "".join(word + "\n" for word in words)
    encoded = text.encode("utf-8", "surrogatepass")  # JSON may hold half a surrogate pair
    digest.update(encoded)
    (folder / "words.txt").write_bytes(encoded)
    np.save(folder / "counts.npy", [counts[i] for i in old_of_new])
    num_documents = counts[SEP]  # each is closed by one, which is no word
    meta = dict(
        data=data, split=split, documents=num_documents, words=counts.total() - num_documents,
        dtype=dtype, distinct=len(counts) - 1, digest=digest.hexdigest())
    (folder / "meta.json").write_text(json.dumps(meta, indent=1))


def drop_copies(results, split):
    """Drop each document of Python that repeats an earlier one: held-out text stays unseen.

    Code is copied about, so its docstrings and sets of names repeat. Two sets are copies in any
    order.

    Args:
        results: iterator of what split_work returns.
        split: str, as of split_work.

    Yields:
        documents, as of split_work.
    """
    seen = set()
    for kind, documents in results:
        if kind in PYTHON:
            first_ones = []
            for document in documents:
                key = document
                if split == "items":
                    key = tuple(sorted(document.split("\n")))
                if key not in seen:
                    seen.add(key)
                    first_ones.append(document)
            documents = first_ones
        yield documents


def write_first_ids(folder, results, subwords):
    """Number words by first appearance, and write ids.tmp: all documents, each closed by SEP.

    Args:
        folder: Path.
        results: iterator of what drop_copies yields. A document is words joined by line breaks.
        subwords: as of split_work. They have their IDs from the start.

    Returns:
        words: list[str], of IDs from FIRST_WORD_ID on.
        counts: Counter, ID -> how often it occurs.
    """
    id_of_word = {}
    if subwords is not None:
        id_of_word = {unit: i for i, unit in enumerate(subwords.units, FIRST_WORD_ID)}
    counts = Counter()
    with open(folder / "ids.tmp", "wb") as file:
        for documents in results:
            ids = []
            for document in documents:
                words = document.split("\n")
                for word in words:
                    if word not in id_of_word:
                        id_of_word[word] = FIRST_WORD_ID + len(id_of_word)
                ids.extend([id_of_word[word] for word in words])
                ids.append(SEP)
            counts.update(ids)
            np.array(ids, np.uint32).tofile(file)
    return list(id_of_word), counts


def write_final_ids(folder, old_of_new):
    """Write ids.bin and offsets.npy from ids.tmp, and remove that.

    Args:
        folder: Path.
        old_of_new: list of int, the old ID of each new one.

    Returns:
        dtype, str; and digest, a hashlib object, of the IDs.
    """
    size = len(old_of_new)
    new_of_old = np.empty(size, "uint16" if size <= 1 << 16 else "uint32")
    new_of_old[old_of_new] = np.arange(size)  # the inverse
    old_ids = np.memmap(folder / "ids.tmp", np.uint32, "r")
    offsets = [[0]]  # where documents start: behind each SEP
    digest = hashlib.md5(usedforsecurity=False)
    with open(folder / "ids.bin", "wb") as file:
        for start in range(0, len(old_ids), PIECE):
            ids = new_of_old[old_ids[start:start + PIECE]]
            ids.tofile(file)
            digest.update(ids)
            offsets.append(start + 1 + np.flatnonzero(ids == SEP))
    np.save(folder / "offsets.npy", np.concatenate(offsets))
    os.remove(folder / "ids.tmp")
    return new_of_old.dtype.name, digest


def split_work(work, split, subwords=None):
    """Split one unit of work into words. It runs in a worker process.

    Args:
        work: (kind, payload), of read_work.
        split: str, one of tokenizer.SPLITS; subwords: its BPE or Phrases, or None.

    Returns:
        kind, as in work.
        documents: list[str], the words of each, joined by line breaks, which no word has: a str is
            faster to send than a list.
    """
    texts = list_documents(work)
    if subwords is not None:
        documents = subwords.split_texts(texts)
    elif split == "items":
        documents = map(item_names, texts)
    else:
        documents = [list_words(text, split) for text in texts]
    return work[0], ["\n".join(words) for words in documents if words]


def split_all(works, split, subwords):
    """Yield split_work of each unit, in order, on all cores where that pays."""
    # a small file is one unit; to start processes takes 0.1 s, on macOS and Windows seconds
    head = list(itertools.islice(works, 2))
    works = itertools.chain(head, works)
    if len(head) < 2 or subwords is not None:  # the BPE library has threads of its own
        for work in works:
            yield split_work(work, split, subwords)
        return
    with start_workers() as pool:
        pending = deque()
        for work in works:
            pending.append(pool.apply_async(split_work, (work, split)))
            if len(pending) > 4 * num_cores():  # else the reader runs ahead without limit
                yield pending.popleft().get()
        for result in pending:
            yield result.get()


class Corpus:
    """A prepared corpus: IDs on disk, words, counts.

    Args:
        folder: str, of prepare.

    Attributes:
        ids: uint16 or uint32 memmap (n,), of documents, each closed by SEP.
        offsets: int64 (documents + 1,), where each document starts.
        words: list[str], of IDs from FIRST_WORD_ID on; counts: int64, by ID.
        subwords: BPE, Phrases or None.
        meta: dict of data, split, documents, words, distinct, dtype, digest.
    """

    def __init__(self, folder):
        self.folder = folder
        self.subwords = None
        with blame_file(f"{folder} (damaged corpus; remove it and it is built again)"):
            folder = Path(folder)
            self.meta = json.loads((folder / "meta.json").read_text())
            # memmap: the IDs stay on disk until a batch reads them
            self.ids = np.memmap(folder / "ids.bin", self.meta["dtype"], "r")
            self.counts = np.load(folder / "counts.npy")
            self.offsets = np.load(folder / "offsets.npy")
            text = (folder / "words.txt").read_text("utf-8", "surrogatepass")
            self.words = text.split("\n")[:-1]
            split = self.meta["split"]
            if split in SUBWORDS:
                state = (folder / "subwords.json").read_text("utf-8")
                self.subwords = SUBWORDS[split](state)
            num_ids = FIRST_WORD_ID + len(self.words)
            if len(self.ids) != self.offsets[-1] or len(self.counts) != num_ids:
                raise ValueError("incomplete")

    def frequent(self, n):
        """Return the n most frequent words that occur, list[str]: the first n, unless subwords."""
        counts = self.counts[FIRST_WORD_ID:]
        order = np.argsort(-counts, kind="stable")[:n]
        return [self.words[i] for i in order if counts[i] > 0]

    def split_pages(self):
        """Return the indices of train and of held-out documents, one in ten at random."""
        order = random_order(self.meta["documents"], HELD_OUT_KEY)
        num_held_out = max(len(order) // 10, 1)
        return order[num_held_out:], order[:num_held_out]
