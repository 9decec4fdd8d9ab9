"""Files, hub data sets and the installed Python to token IDs on disk; the one reader of rows.

Paper map:
    [HF §3.1] prepare
Sources:
    [HF] Xue & Aletras 2022, HashFormers
Out of scope: batches (data/batches.py); labels and metrics of tasks (data/tasks.py).

    read_rows -> choose_column -> read_work -> split_work -> write_corpus -> Corpus
"""

import csv
import gzip
import hashlib
import itertools
import json
import os
import re
import sys
from collections import Counter, defaultdict, deque
from pathlib import Path

import numpy as np
from tqdm import tqdm

from bloom import random_order
from common import InputError, blame_file, build_once, fingerprint, num_cores, start_workers
from data.python_source import python_files, python_texts, walk_files
from hashing import list_words
from tokenizer import FIRST_WORD_ID, SEP, SUBWORDS

PYTHON = ("python", "python-names")  # docstrings of the installed Python; names in its functions
HUB = {  # name -> data set and its configuration on the hub
    "wikipedia": ("wikimedia/wikipedia", "20231101.en"),
    "bookcorpus": ("rojagtap/bookcorpus", None),
}
ENDINGS = (".txt", ".tsv", ".csv", ".jsonl", ".json", ".parquet")  # each may end in .gz too
FORMAT = 8  # of prepared corpora
PIECE = 1 << 24  # token IDs in memory at a time


# ---------------------------------------------------------------------------------------------
# Rows: dict of column -> value


def get_ending(path):
    """Return the file ending, such as ".csv", of a path that may end in .gz too."""
    return os.path.splitext(path.lower().removesuffix(".gz"))[1]


def find_files(path):
    """Return the data files at a path, itself or those below a folder; [] where nothing is."""
    candidates = sorted(walk_files(path))
    if os.path.isfile(path):
        candidates = [path]
    files = {}  # by real path: a file and a link to it count once
    for file in candidates:
        if get_ending(file) in ENDINGS:
            files[os.path.realpath(file)] = file
    if os.path.exists(path) and not files:
        raise InputError(f"{path}: expected files in {', '.join(ENDINGS)} (or .gz), got none.")
    return list(files.values())


def read_rows(path, header=None, keep_wrong=False):
    """Read a file row by row.

    Args:
        path: str, a file with one of ENDINGS, or with .gz after it.
        header: list[str], the columns of a table whose file may have no header.
        keep_wrong: bool, a row of a table with another number of cells becomes a row of None.

    Yields:
        dict, column -> value. A line of a .txt has the column "text". A .json is a list of
        objects, or an object with it as "data". The cells of .csv and .tsv stay str.

    Raises:
        InputError: No such file, another kind, or a damaged one. Rows count from 1.
    """
    ending = get_ending(path)
    if not os.path.isfile(path) or ending not in ENDINGS:
        raise InputError(f"{path}: expected a file in {', '.join(ENDINGS)} (or .gz), got none.")
    number = 0
    try:
        for row in _parse_rows(path, ending, header, keep_wrong):
            number += 1
            if not isinstance(row, dict):
                found = str(row)[:60]
                raise InputError(f"{path}, row {number:,}: expected an object, got {found!r}.")
            yield row
    except InputError:
        raise
    except Exception as error:  # of gzip, csv, json and pyarrow, which do not name the file
        raise InputError(f"{path}: could not be read as {ending} after row {number:,}: "
                         f"{error!r}") from error


def _parse_rows(path, ending, header, keep_wrong):
    """Yield the rows of a file as its format has them."""
    open_file = gzip.open if path.lower().endswith(".gz") else open
    # newline="": csv wants line ends as they are
    with open_file(path, "rt", encoding="utf-8-sig", errors="replace", newline="") as file:
        if ending == ".parquet":
            from pyarrow.parquet import ParquetFile  # takes a while to import
            for batch in ParquetFile(file.buffer).iter_batches():
                yield from batch.to_pylist()
            return
        # UTF-16 would be read as noise; its mark and its NULs give it away
        start = file.buffer.peek(4096)
        if start.startswith((b"\xff\xfe", b"\xfe\xff")) or b"\0" in start:
            raise InputError(f"{path}: expected UTF-8, got UTF-16 or NULs. "
                             "Use iconv -f UTF-16 -t UTF-8.")
        if ending == ".txt":
            for line in file:
                yield {"text": line.rstrip("\r\n")}
        elif ending == ".jsonl":
            for line in file:
                if line.strip():
                    yield json.loads(line)
        elif ending == ".json":
            rows = json.load(file)
            if isinstance(rows, dict):
                rows = rows.get("data", rows)
            yield from rows
        else:
            yield from _parse_table(path, file, ending, header, keep_wrong)


def _parse_table(path, file, ending, header, keep_wrong):
    """Yield the rows of a .csv or .tsv; up to 1 % of them may have another number of cells."""
    csv.field_size_limit(sys.maxsize)  # a cell may be a whole article
    # strict: else a stray quote takes all rows up to the next one into its cell
    options = dict(strict=True)
    if ending == ".tsv":
        options = dict(delimiter="\t", quoting=csv.QUOTE_NONE)
    rows = csv.DictReader(file, **options)
    columns = rows.fieldnames or []
    names = [name for name in columns if name]
    is_uncut = len(names) == 1 and re.search(r"[,;|\t]", names[0])  # cut at another character
    if is_uncut or len(set(names)) < len(names):
        raise InputError(f"{path}: expected columns of different names by comma or tab, "
                         f"got {columns!r:.99}")
    if header and len(columns) == len(header) and header[-1] not in columns:
        yield dict(zip(header, columns))  # the first line is a row
        columns = header
        rows.fieldnames = header

    number = 0
    wrong_lines = []
    for number, row in enumerate(rows, 1):
        # DictReader stores surplus cells under the column None, and None for missing cells
        if None not in row and None not in row.values():
            yield row
        elif keep_wrong:
            yield dict.fromkeys(columns)
        else:
            wrong_lines.append(rows.line_num)
    if wrong_lines:
        message = (f"{path}: expected {len(columns)} columns ({', '.join(columns)}), got another "
                   f"number in {len(wrong_lines):,} of {number:,} rows, the first in line "
                   f"{wrong_lines[0]:,}.")
        if len(wrong_lines) > 0.01 * number:
            raise InputError(message)
        print(f"{message} They are left out.", file=sys.stderr)


def read_hub(name, config=None, split="train"):
    """Yield the rows of a Hugging Face data set, streaming. A class label becomes its name.

    Raises:
        InputError or OSError: It could not be loaded; an OSError of the library names it.
    """
    import datasets  # takes seconds to import
    with blame_file(name):
        data = datasets.load_dataset(name, config, split=split, streaming=True)
        label = (data.features or {}).get("label")
        for row in data:
            if hasattr(label, "names") and row["label"] >= 0:  # -1 is a hidden label
                row["label"] = label.names[row["label"]]
            yield row


def _list_columns(rows, kind=object):
    """Return the names of the columns that hold a value of a type, in order."""
    names = {}  # a dict keeps the order
    for row in rows:
        for name, value in row.items():
            if isinstance(value, kind):
                names[name] = True
    return list(names)


def choose_column(source, rows, field=None, advice="Use --field NAME."):
    """Choose the column of the text: `field`, else "text", else the only column of strings.

    Args:
        source: str, for the message of an error; advice: str, what it tells the user to do.
        rows: list of dict, the first rows.
        field: str or None.

    Returns:
        str.

    Raises:
        InputError: There is no such column, or there are several columns of strings.
    """
    columns = _list_columns(rows)
    names = [field]
    expected = f"a column {field}"
    if field is None:
        names = ["text"] if "text" in columns else _list_columns(rows, str)
        expected = "one column of text"
    if len(names) != 1 or names[0] not in columns:
        raise InputError(f"{source}: expected {expected}, got {', '.join(columns)}. {advice}")
    return names[0]


def choose_set_columns(source, rows, field=None):
    """Choose the column of item lists (one name), or of a page and an item a row (two names)."""
    columns = _list_columns(rows)
    names = _list_columns(rows, list)
    expected = "a list of items, or two columns, a page and an item"
    if field is not None:
        names = [name.strip() for name in field.split(",")]
        expected = f"columns {field}"
    elif not names:
        names = columns
    if len(names) > 2 or not set(names) <= set(columns):
        raise InputError(f"{source}: expected {expected}, got {', '.join(columns)}. "
                         "Use --field NAME[,NAME].")
    return names


# ---------------------------------------------------------------------------------------------
# Documents: str, or a list of item names


def split_parts(data):
    """Return the parts of --data, which + joins. A path that exists is one part."""
    if os.path.exists(data):
        return [data]  # its name may have a +
    return data.split("+")


def _list_sources(part):
    """Yield a name and the rows of each file at a path, or of a hub data set."""
    files = find_files(part)
    for file in files:
        yield file, read_rows(file)
    if files:
        return
    # a missing file is looked for nowhere else: the hub would answer after half a minute
    is_hub_id = re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", part) is not None
    if part not in HUB and (not is_hub_id or get_ending(part) in ENDINGS):
        raise InputError(f"--data {part}: expected a path, a hub ID or one of "
                         f"{', '.join((*PYTHON, *HUB))}. Nothing was found there.")
    yield part, read_hub(*HUB.get(part, (part,)))


def _is_document(value, is_sets):
    """Return whether a cell is a text, or a list of names or whole numbers, or empty."""
    if is_sets and isinstance(value, list):
        return set(map(type, value)) <= {str, int, type(None)}
    return value is None or isinstance(value, str)


def _read_documents(part, is_sets, field):
    """Yield the documents of one part of --data, in files or on the hub."""
    for source, rows in _list_sources(part):
        # the first rows decide on the columns, as a single cell may be empty
        head = list(itertools.islice(rows, 100))
        if not head:
            continue
        if is_sets:
            columns = choose_set_columns(source, head, field)
        else:
            columns = [choose_column(source, head, field)]
        is_pair = len(columns) == 2
        pages = {}  # page -> its items, of a table with a row for each item
        for number, row in enumerate(itertools.chain(head, rows), 1):
            value = row.get(columns[0])
            has_page = value not in (None, "")
            if is_pair:
                value = [value, row.get(columns[1])]
            if not _is_document(value, is_sets) or (is_pair and not has_page):
                expected = "names, or whole numbers," if is_sets else "text"
                raise InputError(f"{source}, row {number:,}: expected {expected} in "
                                 f"{', '.join(columns)}, got {str(value)[:60]!r}. Use --field.")
            if is_pair:
                page, item = value
                pages.setdefault(page, []).append(item)
            elif value:
                yield value
        yield from pages.values()


def read_work(data, is_sets=False, field=None):
    """Cut corpora into units of work for one core, lazily.

    Args:
        data: str, names, paths or hub IDs, joined by +.
        is_sets: bool, rows are lists of names, or pairs of a page and a name.
        field: str, the column, see choose_column and choose_set_columns.

    Yields:
        (kind, payload): "texts" and a list of documents, or a name in PYTHON and a list of paths.
    """
    for part in split_parts(data):
        if part in PYTHON:
            if field is not None:
                raise InputError(f"--field requires a table, got --data {part}.")
            paths = list(python_files().values())
            for start in range(0, len(paths), 64):  # files; parsing takes most of the time
                yield part, paths[start:start + 64]
            continue
        texts = []
        size = 0
        for text in _read_documents(part, is_sets, field):
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
    # a tab says that names may have spaces
    if isinstance(document, str):
        document = document.split("\t") if "\t" in document else document.split()
    names = [" ".join(str(name).split()) for name in document if name is not None]
    return [name for name in dict.fromkeys(names) if name]


# ---------------------------------------------------------------------------------------------
# Words to token IDs


def prepare(data, split, cache, max_subwords=50_000, quiet=False, field=None):
    """Turn corpora into one array of token IDs on disk, once. [HF §3.1]

    In memory are the distinct words, item sets of a table of pairs, a .json file, and the token
    IDs of Python.

    Args:
        data: str, see read_work; field: str or None.
        split: str, one of tokenizer.SPLITS.
        cache: str, the folder of all corpora.
        max_subwords: int, pieces of a BPE or phrases at most.
        quiet: bool, no progress bar.

    Returns:
        str, the folder that Corpus reads. A change of a file makes another one.

    Raises:
        InputError: Data cannot be read, or has no words.
    """
    # another content, split or column is another folder
    identity = [FORMAT, data, split, max_subwords if split in SUBWORDS else None, field]
    for part in split_parts(data):
        files = python_files().values() if part in PYTHON else find_files(part)
        for file in files:
            stat = os.stat(file)
            identity.append((os.path.abspath(file), stat.st_size, stat.st_mtime_ns))
    name = re.sub(r"[\W_]", "-", os.path.basename(data.rstrip("/")))[:40]
    path = os.path.join(cache, f"{name}-{split}-{fingerprint(identity)}")

    if not quiet and not os.path.exists(path):
        print(f"preparing {data}, once for all runs, in {cache}", flush=True)

    def build(folder):
        write_corpus(folder, data, split, max_subwords, quiet, field)

    return build_once(path, build)


def write_corpus(folder, data, split, max_subwords, quiet, field):
    """Write all files of a prepared corpus: number words as they appear, then by frequency."""
    os.mkdir(folder)
    hidden = True if quiet else None  # of progress bars; None: where no terminal shows them
    id_of_word = defaultdict(itertools.count(FIRST_WORD_ID).__next__)  # a new word has the next ID
    subwords = None
    if split in SUBWORDS:
        works = read_work(data, field=field)
        texts = itertools.chain.from_iterable(map(list_documents, works))
        bar = tqdm(texts, f"training {split}", unit=" documents", disable=hidden)
        subwords = SUBWORDS[split].train(bar, max_subwords)
        Path(folder, "subwords.json").write_text(subwords.json, "utf-8")
        id_of_word.update(zip(subwords.units, itertools.count(FIRST_WORD_ID)))

    # First pass: IDs by first appearance, since how frequent a word is shows at the end.
    id_counts = Counter()
    seen = set()
    num_replaced = 0
    works = read_work(data, split == "items", field)
    results = split_all(works, split, subwords)
    path = os.path.join(folder, "ids.tmp")
    with open(path, "wb") as file:
        for kind, documents, replaced in tqdm(results, f"preparing {data}", disable=hidden):
            num_replaced += replaced
            ids = []
            for document in filter(None, documents):
                words = document.split("\n")
                if kind in PYTHON:  # code is copied about: keep one, so held-out text stays unseen
                    key = tuple(sorted(words)) if split == "items" else document
                    if key in seen:
                        continue
                    seen.add(key)
                ids.extend([id_of_word[word] for word in words])
                ids.append(SEP)
            id_counts.update(ids)
            np.array(ids, np.uint32).tofile(file)
    num_documents = id_counts.pop(SEP, 0)
    if num_documents == 0:
        raise InputError(f"--data {data}: expected text, got no words.")

    # subtle: most_common keeps the order of insertion among equal counts
    # Order of the old IDs: by frequency, ties by first appearance. Subwords keep their numbers.
    old_words = list(id_of_word)
    size = FIRST_WORD_ID + len(old_words)
    order = [i for i, _ in id_counts.most_common()]
    if subwords is not None:
        order = list(range(FIRST_WORD_ID, size))
    dtype = "uint16" if size <= 1 << 16 else "uint32"
    new_id = np.arange(size).astype(dtype)  # special tokens keep their IDs
    new_id[order] = np.arange(FIRST_WORD_ID, size)

    # Second pass: IDs by frequency. The digest identifies the corpus in checkpoints.
    old_ids = np.memmap(path, np.uint32, "r")
    offsets = [[0]]
    digest = hashlib.md5(usedforsecurity=False)
    with open(os.path.join(folder, "ids.bin"), "wb") as file:
        for start in range(0, len(old_ids), PIECE):
            ids = new_id[old_ids[start:start + PIECE]]
            ids.tofile(file)
            digest.update(ids)
            offsets.append(start + 1 + np.flatnonzero(ids == SEP))
    np.save(os.path.join(folder, "offsets.npy"), np.concatenate(offsets))
    os.remove(path)

    counts = np.zeros(size, np.int64)
    counts[SEP] = num_documents
    counts[FIRST_WORD_ID:] = [id_counts[i] for i in order]
    np.save(os.path.join(folder, "counts.npy"), counts)
    text = "".join(old_words[i - FIRST_WORD_ID] + "\n" for i in order)
    text = text.encode("utf-8", "surrogatepass")  # JSON may hold half a surrogate pair
    Path(folder, "words.txt").write_bytes(text)
    digest.update(text)
    meta = dict(
        data=data, split=split, replaced=num_replaced, documents=num_documents,
        words=id_counts.total(), dtype=dtype, distinct=len(id_counts), digest=digest.hexdigest())
    Path(folder, "meta.json").write_text(json.dumps(meta, indent=1))


def split_work(work, split, subwords=None):
    """Split one unit of work into words. It runs in a worker process.

    Args:
        work: (kind, payload), of read_work.
        split: str, one of tokenizer.SPLITS; subwords: its BPE or Phrases, or None.

    Returns:
        kind, as in work.
        documents: list[str], the words of each, joined by line breaks, which no word has: a str is
            faster to send than a list.
        num_replaced: int, characters that are not UTF-8.
    """
    texts = list_documents(work)
    documents = []
    if subwords is not None:
        for numbers in subwords.number_texts(texts):
            documents.append([subwords.units[i] for i in numbers])
    elif split == "items":
        documents = map(item_names, texts)
    else:
        documents = [list_words(text, split) for text in texts]
    num_replaced = sum(text.count("\ufffd") for text in texts if isinstance(text, str))
    return work[0], ["\n".join(words) for words in documents], num_replaced


def split_all(works, split, subwords):
    """Yield split_work of each unit, in order, on all cores where that pays."""
    # a single unit is done before processes have started
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
        meta: dict of data, split, documents, words, distinct, replaced, dtype, digest.
    """

    def __init__(self, folder):
        self.folder = folder
        self.subwords = None
        with blame_file(f"{folder} (damaged corpus; remove it and it is built again)"):
            # memmap: the IDs stay on disk until a batch reads them
            self.meta = json.loads(Path(folder, "meta.json").read_text())
            self.ids = np.memmap(os.path.join(folder, "ids.bin"), self.meta["dtype"], "r")
            self.counts = np.load(os.path.join(folder, "counts.npy"))
            self.offsets = np.load(os.path.join(folder, "offsets.npy"))
            text = Path(folder, "words.txt").read_text("utf-8", "surrogatepass")
            self.words = text.split("\n")[:-1]
            if self.meta["split"] in SUBWORDS:
                text = Path(folder, "subwords.json").read_text("utf-8")
                self.subwords = SUBWORDS[self.meta["split"]](text)
            num_ids = FIRST_WORD_ID + len(self.words)
            if len(self.ids) != self.offsets[-1] or len(self.counts) != num_ids:
                raise ValueError("incomplete")

    def frequent(self, n):
        """Return the n most frequent words that occur, list[str]: the first n, unless subwords."""
        counts = self.counts[FIRST_WORD_ID:]
        order = np.argsort(-counts, kind="stable")[:n]
        return [self.words[i] for i in order if counts[i] > 0]

    def split_pages(self):
        """Return train and held-out numbers of documents, one in ten of them held out at random."""
        order = random_order(self.meta["documents"], 90)
        num_held_out = max(len(order) // 10, 1)
        return order[num_held_out:], order[:num_held_out]
