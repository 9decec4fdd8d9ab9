"""Files, hub data sets and the installed Python to token IDs on disk. The one reader of rows is here.

Paper map:    [HF §3.1] prepare
Out of scope: batches (data/batches.py); labels and metrics of tasks (data/tasks.py).

    read_rows -> choose_column -> split -> ids.bin (numbered once, by frequency) -> Corpus
"""

import csv
import gzip
import hashlib
import itertools
import json
import os
import re
import sys
from pathlib import Path

import numpy as np
from tqdm import tqdm

from bloom import random_order
from data.python_source import python_files, python_texts, walk_files
from hashing import list_words
from runtime import InputError, build_once, fingerprint, num_cores, start_workers
from tokenizer import FIRST_WORD_ID, SEP, SUBWORDS

PYTHON = ("python", "python-names")  # docstrings of the installed Python; names that its functions use
HUB = {"wikipedia": ("wikimedia/wikipedia", "20231101.en"), "bookcorpus": ("rojagtap/bookcorpus", None)}
ENDINGS = (".txt", ".tsv", ".csv", ".jsonl", ".json", ".parquet")
FORMAT = 8  # of prepared corpora


# ---------------------------------------------------------------------------------------------------------
# Rows: dict of column -> value


def get_ending(path):
    """Return the file ending, such as ".csv", of a path that may end in .gz too."""
    return os.path.splitext(path.lower().removesuffix(".gz"))[1]


def find_files(path):
    """Return the data files at a path: itself, or a folder's, each once in a fixed order; [] for no path."""
    files = [path] if os.path.isfile(path) else sorted(walk_files(path))
    known = {os.path.realpath(file): file for file in files if get_ending(file) in ENDINGS}  # links are one
    if os.path.exists(path) and not known:
        raise InputError(f"{path}: expected files in {', '.join(ENDINGS)} (or .gz), got none.")
    return list(known.values())


def read_rows(path, header=None, keep_wrong=False):
    """Read a file row by row: the only reader of the project.

    Args: path str, one of ENDINGS, .gz too; header list[str], the columns of a table that may have none;
            keep_wrong bool, a table's row with another number of cells becomes a row of None.
    Yields: dict, column to value. A line of a .txt is a row with the column "text"; a .json is a list of
        objects, or an object with it as "data"; cells of .csv and .tsv stay str, and a .tsv has no quotes.
    Raises: InputError: no such file, another kind, or a damaged one; row N is the Nth that was read.
    """
    if find_files(path) != [path]:
        raise InputError(f"{path}: expected a file, got a folder or nothing.")
    ending, number, opener = get_ending(path), 0, gzip.open if path.lower().endswith(".gz") else open
    try:
        with opener(path, "rt", encoding="utf-8-sig", errors="replace", newline="") as file:
            if ending == ".parquet":
                from pyarrow.parquet import ParquetFile  # takes a while to import
                rows = (row for batch in ParquetFile(file.buffer).iter_batches() for row in batch.to_pylist())
            elif re.match(rb"\xff\xfe|\xfe\xff|.*\0", file.buffer.peek(4096), re.DOTALL):
                raise InputError(f"{path}: expected UTF-8, got UTF-16 or NULs. Use iconv -f UTF-16 -t UTF-8.")
            elif ending in (".csv", ".tsv"):
                rows = _table_rows(path, file, ending == ".csv", header, keep_wrong)
            elif ending == ".json":
                rows = json.load(file)
                rows = rows.get("data", rows) if isinstance(rows, dict) else rows
            elif ending == ".jsonl":
                rows = (json.loads(line) for line in file if line.strip())
            else:
                rows = ({"text": line.rstrip("\r\n")} for line in file)
            for number, row in enumerate(rows, 1):
                if not isinstance(row, dict):
                    raise InputError(f"{path}, row {number:,}: expected an object, got {str(row)[:60]!r}.")
                yield row
    except InputError:
        raise
    except Exception as error:  # pyarrow has its own; a damaged .gz, JSON or CSV raise others
        raise InputError(f"{path}: could not be read as {ending} after row {number:,}: {error!r}") from error


def _table_rows(path, file, is_csv, header, keep_wrong):
    """Yield rows of .csv and .tsv; of those with another number of cells up to 1 % may be left out."""
    csv.field_size_limit(sys.maxsize)
    # strict: else a stray quote takes all rows up to the next one into its cell
    options = dict(strict=True) if is_csv else dict(delimiter="\t", quoting=csv.QUOTE_NONE)
    lines = filter(None, csv.reader(file, **options))
    first, total, wrong = next(lines, []), 0, []
    columns = header if header and len(first) == len(header) and header[-1] not in first else first
    names, others = list(filter(None, columns)), ";|\t" if is_csv else ",;|"
    if len(set(names)) < len(names) or len(names) == 1 and set(names[0]) & set(others):
        raise InputError(f"{path}: expected columns of different names by comma or tab, got {first!r:.99}")
    for total, cells in enumerate(itertools.chain([first] * (columns is header), lines), 1):
        if len(cells) == len(columns):
            yield dict(zip(columns, cells))
        elif keep_wrong:
            yield dict.fromkeys(columns)
        else:
            wrong.append(" | ".join(cells)[:60])
    if wrong:
        found = f"another number in {len(wrong):,} of {total:,} rows, the first {wrong[0]!r}."
        message = f"{path}: expected {len(columns)} columns ({', '.join(columns)}), got {found}"
        if len(wrong) > 0.01 * total:
            raise InputError(message)
        print(f"{message} They are left out.", file=sys.stderr)


def read_hub(name, config=None, split="train"):
    """Yield the rows of a Hugging Face data set, streaming; a class label becomes its name, -1 stays."""
    import datasets
    import huggingface_hub
    try:
        huggingface_hub.HfApi().dataset_info(name, timeout=10)  # load_dataset would retry for half a minute
        data = datasets.load_dataset(name, config, split=split, streaming=True)
        names = getattr((data.features or {}).get("label"), "names", None)
        for row in data:
            if names:
                row = row | dict(label=names[row["label"]] if row["label"] >= 0 else -1)
            yield row
    except Exception as error:  # datasets raises its own, the hub's and the network's
        raise InputError(f"{name}: could not be loaded from the hub ({error!r:.99}). Download it.") from error


def choose_column(source, rows, field=None, advice="Use --field NAME."):
    """Choose the column of the text: `field`, else the one called text, else the only column of strings.

    Args: source and advice str, for errors; rows list of dict, the first ones.
    """
    columns = list(dict.fromkeys(name for row in rows for name in row))
    strings = [name for name in columns if any(isinstance(row.get(name), str) for row in rows)]
    names = (["text"] * ("text" in columns) or strings) if field is None else [field]
    if len(names) != 1 or names[0] not in columns:
        found, expected = ", ".join(columns), f"a column {field}" if field else "one column of text"
        raise InputError(f"{source}: expected {expected}, got {found}. {advice}")
    return names[0]


def choose_set_columns(source, rows, field=None):
    """Choose the column of item lists (one name), or of a page and an item per row (two names)."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    lists = [name for name in columns if any(isinstance(row.get(name), list) for row in rows)]
    names = [name.strip() for name in field.split(",")] if field else lists or columns
    if len(names) > 2 or not field and len(lists) > 1 or not set(names) <= set(columns):
        expected = f"columns {field}" if field else "a list of items, or two columns, a page and an item"
        raise InputError(f"{source}: expected {expected}, got {', '.join(columns)}. Use --field NAME[,NAME].")
    return names


# ---------------------------------------------------------------------------------------------------------
# Documents: str, or a list of item names


def split_parts(data):
    """Return the parts of --data, which + joins; a path that exists is one part, whatever its name."""
    return [data] if os.path.exists(data) else data.split("+")


def _read_documents(part, is_sets, field, quiet):
    """Yield the documents of one part of --data, in files or on the hub."""
    if files := find_files(part):
        sources = ((file, read_rows(file)) for file in files)
    elif part in HUB or re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", part) and get_ending(part) not in ENDINGS:
        sources = [(part, read_hub(*HUB.get(part, (part,))))]
    else:
        raise InputError(f"--data {part}: expected a path, a hub ID or one of {', '.join((*PYTHON, *HUB))}. "
                         "Nothing was found there.")
    shown = None
    for source, rows in sources:
        head = list(itertools.islice(rows, 100))
        if not head:
            continue
        columns = choose_set_columns(source, head, field) if is_sets else [choose_column(source, head, field)]
        if get_ending(source) != ".txt" and columns != shown and not quiet:
            print(f"columns: {', '.join(columns)} of {source}")
            shown = columns
        pages = {}
        for number, row in enumerate(itertools.chain(head, rows), 1):
            value = [row.get(name) for name in columns] if len(columns) == 2 else row.get(columns[0])
            is_list = is_sets and isinstance(value, list)
            kinds = set(map(type, value if is_list else [value])) - {type(None)}
            is_orphan = len(columns) == 2 and value[0] in (None, "")
            if is_orphan or not kinds <= ({str, int} if is_list else {str}):
                expected = ("names, or whole numbers, in " if is_sets else "text in ") + ", ".join(columns)
                raise InputError(f"{source}, row {number:,}: expected {expected}, got {str(value)[:60]!r}.")
            if len(columns) == 2:
                pages.setdefault(value[0], []).append(value[1])
            elif value:
                yield value
        yield from pages.values()


def read_work(data, is_sets=False, field=None, quiet=True):
    """Cut corpora into units of work for one core, lazily.

    Args: data str, names, paths or hub IDs, joined by +; is_sets bool, rows are lists of names, or pairs of a
        page and a name; field str, which column, see choose_column; quiet bool, do not print the columns.
    Yields: (kind, payload): ("texts", list of documents), or (a name in PYTHON, list of .py paths).
    """
    for part in split_parts(data):
        if part in PYTHON:
            if field:
                raise InputError(f"--field requires a table, got --data {part}.")
            paths = list(python_files().values())
            yield from ((part, paths[start:start + 64]) for start in range(0, len(paths), 64))
            continue
        texts, size = [], 0
        for text in _read_documents(part, is_sets, field, quiet):
            if size > 1_000_000:
                yield "texts", texts
                texts, size = [], 0
            texts.append(text)
            size += len(text) * (1 if isinstance(text, str) else 8)
        yield "texts", texts


def list_documents(work):
    """Return the documents of a unit of work."""
    kind, payload = work
    if kind == "texts":
        return payload
    return [text for path in payload for text in python_texts(path, names=kind == "python-names")]


def item_names(document):
    """Return the distinct names of a page, in order: of a list, or of a text with tabs or spaces between."""
    if isinstance(document, str):
        document = document.split("\t") if "\t" in document else document.split()
    names = (" ".join(str(name).split()) for name in document if name is not None)
    return [name for name in dict.fromkeys(names) if name]


# ---------------------------------------------------------------------------------------------------------
# Numbering


def number_work(work, split, subwords=None):
    """Split one unit of work and number its words; runs in a worker process.

    Returns: kind; words list[str], the distinct ones, [] where subwords number themselves; numbers int64, of
        all words; lengths list[int], of documents; int, characters (of lists names), and those not UTF-8.
    """
    texts, table = list_documents(work), {}
    if subwords:
        pages = subwords.number_texts(texts)
    else:
        words_of_texts = (item_names(text) if split == "items" else list_words(text, split) for text in texts)
        pages = [[table.setdefault(word, len(table)) for word in words] for words in words_of_texts]
    numbers = np.array([number for page in pages for number in page], np.int64)
    replaced = sum(text.count("\ufffd") for text in texts if isinstance(text, str))
    return work[0], list(table), numbers, list(map(len, pages)), sum(map(len, texts)), replaced


def _run_workers(work, split, subwords):
    """Yield number_work of each unit, in order, on all cores where that pays."""
    first = list(itertools.islice(work, 2))
    work = itertools.chain(first, work)
    if subwords or len(first) < 2 or num_cores() == 1:  # the BPE library has threads of its own
        yield from (number_work(unit, split, subwords) for unit in work)
        return
    with start_workers() as pool:
        pending = []
        for unit in work:
            pending.append(pool.apply_async(number_work, (unit, split, subwords)))
            if len(pending) > 4 * num_cores():  # else the reader would run ahead without limit
                yield pending.pop(0).get()
        yield from (result.get() for result in pending)


def prepare(data, split, cache, max_subwords=50_000, quiet=False, field=None):
    """Turn corpora into one array of token IDs on disk. [HF §3.1]

    In memory are the distinct words, a table of sets and items, a .json file, and of Python the word IDs.

    Args: data, field as in read_work; split, one of tokenizer.SPLITS; cache str, the folder of all corpora;
        max_subwords int, pieces of a BPE or phrases at most; quiet bool, no progress bar.
    Returns: the folder that Corpus reads, one for every hash. Raises: InputError, data cannot be read.
    """
    identity = [FORMAT, data, split, max_subwords if split in SUBWORDS else None, field]
    for part in split_parts(data):
        files = python_files().values() if part in PYTHON else find_files(part)
        identity += [(os.path.abspath(f), os.path.getsize(f), os.stat(f).st_mtime_ns) for f in files]
    name = "".join(c if c.isalnum() else "-" for c in os.path.basename(data.rstrip("/")))[:40]
    path = os.path.join(cache, f"{name}-{split}-{fingerprint(identity)}")
    return build_once(path, lambda folder: _prepare(folder, data, split, max_subwords, quiet, field))


def _prepare(folder, data, split, max_subwords, quiet, field):
    """Write a prepared corpus: number words as they come, then renumber them by frequency."""
    os.mkdir(folder)
    if not quiet:
        print(f"preparing {data}, once for all runs, in {os.path.dirname(folder)}", flush=True)
    subwords = None
    if split in SUBWORDS:
        texts = (text for work in read_work(data, field=field) for text in list_documents(work))
        bar = tqdm(texts, f"training {split}", unit=" documents", disable=quiet or None)
        subwords = SUBWORDS[split].train(bar, max_subwords)
        Path(folder, "subwords.json").write_text(subwords.json, "utf-8")
    table, seen, meta = {}, set(), dict(data=data, split=split, replaced=0)
    with open(os.path.join(folder, "ids.tmp"), "wb") as out, \
            tqdm(desc=f"preparing {data}", unit=" characters", unit_scale=True, disable=quiet or None) as bar:
        work = read_work(data, split == "items", field, quiet)
        for kind, words, ids, sizes, size, bad in _run_workers(work, split, subwords):
            if not subwords:  # a worker numbers words by its own list; here by that of the whole corpus
                ids = np.array([table.setdefault(word, len(table)) for word in words], np.int64)[ids]
            documents = [ids[:0]]
            for document in filter(len, np.split(ids + FIRST_WORD_ID, np.cumsum(sizes))[:-1]):
                if kind in PYTHON:  # code is copied about: keep one, so that what is held out stays unseen
                    key = (np.sort(document) if split == "items" else document).tobytes()
                    if key in seen:
                        continue
                    seen.add(key)
                documents += [document, [SEP]]
            np.concatenate(documents).astype(np.uint32).tofile(out)
            meta["replaced"] += bad
            bar.update(size)
        if not out.tell():
            raise InputError(f"--data {data}: expected text, got no words.")
    _write_corpus(folder, subwords.units if subwords else list(table), not subwords, meta)


def _write_corpus(folder, words, by_frequency, meta):
    """Renumber the IDs of ids.tmp, unless subwords gave them, and write all files of a prepared corpus."""
    path, size, step = os.path.join(folder, "ids.tmp"), FIRST_WORD_ID + len(words), 1 << 24
    ids = np.memmap(path, np.uint32, "r")
    parts = [ids[start:start + step] for start in range(0, len(ids), step)]
    counts = sum(np.bincount(part, minlength=size) for part in parts)
    # the order of old IDs: special tokens, then words by frequency, ties by first appearance
    ranks = np.append([-1 - len(ids)] * FIRST_WORD_ID, -counts[FIRST_WORD_ID:] * by_frequency)
    order = np.argsort(ranks, kind="stable")
    dtype, whole = "uint16" if size <= 1 << 16 else "uint32", hashlib.md5(usedforsecurity=False)
    new_id = np.argsort(order).astype(dtype)
    with open(os.path.join(folder, "ids.bin"), "wb") as out:
        for new_ids in (new_id[part] for part in parts):
            new_ids.tofile(out)
            whole.update(new_ids)
    ends = [step * i + np.flatnonzero(part == SEP) + 1 for i, part in enumerate(parts)]
    np.save(os.path.join(folder, "offsets.npy"), np.concatenate([[0], *ends]))
    np.save(os.path.join(folder, "counts.npy"), counts[order])
    text = "".join(words[i - FIRST_WORD_ID] + "\n" for i in order[FIRST_WORD_ID:])  # no word has a line break
    Path(folder, "words.txt").write_bytes(text.encode("utf-8", "surrogatepass"))
    whole.update(text.encode("utf-8", "surrogatepass"))
    meta |= dict(documents=int(counts[SEP]), words=len(ids) - int(counts[SEP]), dtype=dtype,
                 distinct=int((counts[FIRST_WORD_ID:] > 0).sum()), digest=whole.hexdigest())
    Path(folder, "meta.json").write_text(json.dumps(meta, indent=1))
    os.remove(path)


class Corpus:
    """A prepared corpus: IDs on disk, words, counts.

    Attributes: ids memmap (n,), documents, each closed by SEP; offsets int64 (documents + 1,), where each
        starts; words list[str], of IDs from FIRST_WORD_ID on; counts int64, by ID; subwords BPE, Phrases or
        None; folder str; meta dict of data, split, documents, words, distinct, replaced, dtype, digest.
    """

    def __init__(self, folder):
        self.folder, self.subwords = folder, None
        try:
            self.meta = json.loads(Path(folder, "meta.json").read_text())
            self.ids = np.memmap(os.path.join(folder, "ids.bin"), self.meta["dtype"], "r")
            self.counts, self.offsets = (np.load(f"{folder}/{name}.npy") for name in ("counts", "offsets"))
            self.words = Path(folder, "words.txt").read_text("utf-8", "surrogatepass").split("\n")[:-1]
            if self.meta["split"] in SUBWORDS:
                self.subwords = SUBWORDS[self.meta["split"]](Path(folder, "subwords.json").read_text("utf-8"))
            if len(self.ids) != self.offsets[-1] or len(self.words) != len(self.counts) - FIRST_WORD_ID:
                raise ValueError("incomplete")
        except Exception as error:  # whatever numpy, JSON and the BPE library raise
            raise InputError(f"{folder}: damaged corpus ({error}). Remove it: it is built again.") from error

    def frequent(self, n):
        """Return the n most frequent words that occur: the first n, unless subwords have numbers."""
        counts = self.counts[FIRST_WORD_ID:]
        return [self.words[i] for i in np.argsort(-counts, kind="stable")[:n] if counts[i]]

    def split_pages(self):
        """Return train and held-out numbers of documents, one in ten of them held out at random."""
        order = random_order(self.meta["documents"], 90)
        return np.split(order, [max(len(order) // 10, 1)])[::-1]
