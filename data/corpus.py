"""Texts and item sets in files, on the hub or in the installed Python, to token IDs on disk.

Sources:
    [HF] Xue & Aletras 2022, HashFormers
Out of scope: the formats of files (data/rows.py), batches (data/batches.py).

From a row to token IDs:

    find_files -> read_rows -> read_documents -> read_jobs -> split_job, in several processes
    -> number_words -> numbers.bin -> renumber -> ids.bin, which Corpus reads

Example: the documents "the cat" and "a cat a cat" become

    numbers.bin  5 6 2 7 6 7 6 2     words by first appearance; 2 is [SEP], the end of a document
    ids.bin      7 5 2 6 5 6 5 2     words by frequency
    words.txt    cat a the
    offsets.npy  0 3 8
"""

import hashlib
import itertools
import json
import os
from collections import defaultdict, deque
from pathlib import Path

import numpy as np
from tqdm import tqdm

from bloom import random_order
from common import InputError, build_once, fingerprint, num_cores, reading, start_workers
from common import write_json
from data.batches import divide
from data.python_source import PLACES, python_files, python_names, python_texts, walk_files
from data.rows import ENDINGS, get_ending, is_hub_id, list_names, note_once, peek_columns
from data.rows import read_hub, read_rows
from hashing import list_words
from tokenizer import FIRST_WORD_ID, SEP, SUBWORDS

PYTHON = {  # name -> where its .py files are, and what reads the documents of one
    "python": (PLACES, python_texts),  # docstrings of the installed Python
    "stdlib": (["stdlib"], python_texts),  # docstrings of the standard library alone
    "python-names": (PLACES, python_names),  # for each function the names that it uses
}
HUB = {  # name -> data set on the hub
    "wikipedia": "wikimedia/wikipedia:20231101.en",
    "bookcorpus": "rojagtap/bookcorpus",
}
ROOT = Path(__file__).resolve().parents[1]
SOURCES = [ROOT / "hashing.py", ROOT / "tokenizer.py"]  # they split text; an edit takes effect
FORMAT = 10  # bump it with any edit in data/ that changes a corpus: all are built again
BLOCK = 1 << 24  # token IDs in memory at a time
JOB_FILES = 64  # Python files in the work of one core at a time
JOB_UNITS = 1_000_000  # characters, or names in lists, in such work
HELD_OUT_KEY = 90  # seed of the order of documents: every run holds out the same ones


# -------------------------------------------------------------------------------------------------
# --data to a folder


def prepare(data, split, cache, max_subwords=50_000, quiet=False, field=None, **reader):
    """Turn corpora into one array of token IDs on disk, once. [HF §3.1]

    Memory holds the distinct words, where each document starts, the item sets of a table of pairs,
    a whole .json file, and for Python sources every distinct document.

    Args:
        data: str, names, paths or hub IDs, joined by +.
        split: str, one of tokenizer.SPLITS.
        cache: str, the folder of all corpora.
        max_subwords: int, pieces of a BPE or phrases at most.
        quiet: bool, no progress bar.
        field: str or None, see choose_columns.
        reader: encoding, sep and header of read_rows.

    Returns:
        str, the folder that Corpus reads.

    Raises:
        InputError: Data cannot be read, or has no words.
    """
    # the folder's name has a fingerprint of all that decides its content
    num_subwords = max_subwords if split in SUBWORDS else None
    identity = [FORMAT, data, split, num_subwords, field, reader]
    identity += [source.read_text("utf-8") for source in SOURCES]
    parts = data.split("+")
    files = []
    for part in parts:
        for file in find_files(part):
            stat = os.stat(file)
            identity.append((os.path.abspath(file), stat.st_size, stat.st_mtime_ns))
            if part not in PYTHON:  # its documents count once, see number_words
                files.append(os.path.realpath(file))
    # a text that is read twice may be held out and trained on
    if len(set(parts)) < len(parts) or len(set(files)) < len(files):
        raise InputError(f"--data {data}: expected each file or name once.")
    path = os.path.join(cache, f"{name_data(data)}-{split}-{fingerprint(identity)}")

    if not quiet and not os.path.exists(path):
        print(f"preparing {data}, once for all runs, in {cache}", flush=True)
    return build_once(path, write_corpus, data, split, max_subwords, quiet, field, reader)


def write_corpus(folder, data, split, max_subwords, quiet, field, reader):
    """Write all files of a prepared corpus to a new folder. The arguments are those of prepare."""
    folder = Path(folder)
    folder.mkdir()
    is_hidden = True if quiet else None  # None: unless stderr is a terminal
    is_sets = split == "items"

    # numbers.bin holds the numbers of words, in the order of the text. Special tokens have 0 to 4,
    # so the first word has FIRST_WORD_ID. Subwords are learned from the texts first, and have
    # numbers before any text is split
    subwords = None
    number_of = {}  # word -> its number
    if split in SUBWORDS:
        def open_texts():
            jobs = read_jobs(data, is_sets, field, **reader)
            for job in tqdm(jobs, f"training {split}", disable=is_hidden):
                yield from list_documents(job)

        subwords = SUBWORDS[split].train(open_texts, max_subwords)
        (folder / "subwords.json").write_text(subwords.json, "utf-8")
        number_of = {word: i for i, word in enumerate(subwords.units, FIRST_WORD_ID)}

    # Read and split all documents once, on all cores. Other words get numbers by first appearance
    # now, and IDs by frequency, which is known at the end, in renumber
    jobs = read_jobs(data, is_sets, field, **reader)
    results = tqdm(split_all(jobs, split, subwords), f"preparing {data}", disable=is_hidden)
    number_words(results, number_of, is_sets, folder / "numbers.bin")
    if os.path.getsize(folder / "numbers.bin") == 0:
        raise InputError(f"--data {data}: expected text, got no words.")
    sizes = renumber(folder, list(number_of), by_frequency=subwords is None)
    write_json(folder / "meta.json", dict(data=data, split=split, **sizes))


# -------------------------------------------------------------------------------------------------
# The files and data sets that --data names


def find_files(part):
    """Return the paths of the files of a part of --data: a name in PYTHON, a file, a folder.

    A hub ID has none, []. A folder's linked folders, and files of other kinds, are left out.
    """
    if part in PYTHON:
        places, _ = PYTHON[part]
        return list(python_files(places).values())
    if os.path.isfile(part):
        return [part]
    files = {}
    for file in sorted(walk_files(part)):
        if get_ending(file) in ENDINGS:
            # a file and a link to it count once, or one would be held out and the other trained on
            files[os.path.realpath(file)] = file
    return list(files.values())


def list_sources(part, **reader):
    """Return (name, rows) of each file at a path, or of a hub data set. Rows are read later."""
    files = find_files(part)
    if files:
        return [(file, read_rows(file, **reader)) for file in files]
    hub_id = HUB.get(part, part)
    if not is_hub_id(hub_id):
        raise InputError(f"--data {part}: expected files in {', '.join(ENDINGS)} (or .gz), a hub "
                         f"ID or one of {', '.join((*PYTHON, *HUB))}. Nothing was found there.")
    if reader:
        raise InputError(f"--encoding, --sep, --header: require files, got {part}.")
    return [(part, read_hub(hub_id))]


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
# Rows to documents: str, or a list of item names


def read_documents(part, is_sets, field, **reader):
    """Yield the documents of a part of --data, in files or on the hub, without empty ones."""
    pages = defaultdict(list)  # page -> its items, which may be in several files
    for source, rows in list_sources(part, **reader):
        examples, rows = peek_columns(rows)
        if not examples:
            continue
        columns = choose_columns(source, examples, field, is_sets)
        if columns != ["text"]:
            note_once(f"columns: {', '.join(columns)} of {part}")
        num_incomplete = 0
        for number, row in enumerate(rows, 1):
            cells = [row.get(name) for name in columns]  # a document; or a page and an item
            if not set(columns) <= set(row):
                num_incomplete += 1
            is_pair = len(cells) == 2
            document = cells if is_pair else cells[0]
            # an item without a page is in no set
            if not is_document(document, is_sets) or (is_pair and cells[0] in (None, "")):
                raise InputError(f"{source}, row {number:,}: expected text, or in an item set "
                                 f"names or whole numbers, in {', '.join(columns)}, got "
                                 f"{document!r:.60}. Use --field: one column of text or of lists, "
                                 "or PAGE,ITEM.")
            if is_pair:
                page, item = cells
                pages[str(page)].append(item)  # "1" in a table and 1 in JSON are one page
            elif document:
                yield document
        if num_incomplete > 0:
            note_once(f"warning: {source}: {num_incomplete:,} of {number:,} rows have no "
                      f"{', '.join(columns)}.")
    yield from pages.values()


def is_document(value, is_sets):
    """Return whether a cell is a text, or a list of names or whole numbers, or empty."""
    if is_sets and isinstance(value, list):
        return all(isinstance(name, (str, int, type(None))) for name in value)
    return value is None or isinstance(value, str)


def choose_columns(source, row, field=None, is_sets=False, flag="--field"):
    """Choose the columns of the documents.

    Args:
        source: str, for the message of an error.
        row: dict, the columns and a value of each.
        field: str, names joined by commas. None: for texts the column "text", or else the only one
            of strings; for item sets the only one of lists, or else the only one at all.
        is_sets: bool, documents are item sets.
        flag: str, the flag that sets field, for the message.

    Returns:
        list of str: one name, or for item sets two, a page and one of its items.

    Raises:
        InputError: There is no such column, or there are several.
    """
    if field is not None:
        expected = f"columns {field}"
        names = list_names(field)
        max_names = 2 if is_sets else 1
        if set(names) <= set(row) and len(names) <= max_names:
            return names
    elif is_sets:
        expected = "one column of lists"
        names = [name for name in row if isinstance(row[name], list)]
        if len(names) == 1:
            return names
        if len(row) == 1:
            return list(row)
    else:
        expected = "one column of text"
        if "text" in row:
            return ["text"]
        names = [name for name in row if isinstance(row[name], str)]
        if len(names) == 1:
            return names
    raise InputError(f"{source}: expected {expected}, got {', '.join(row)}. "
                     f"Use {flag} NAME, or PAGE,ITEM for the item sets of --data.")


# -------------------------------------------------------------------------------------------------
# Documents to words, on all cores


def read_jobs(data, is_sets=False, field=None, **reader):
    """Yield the work of one core at a time.

    Args:
        data: str, as in prepare.
        is_sets: bool, rows are lists of names, or pairs of a page and a name.
        field: str or None, see choose_columns.
        reader: encoding, sep and header of read_rows.

    Yields:
        (kind, payload): "texts" and a list of documents, or a name in PYTHON and a list of paths.
    """
    for part in data.split("+"):
        if part in PYTHON:
            if field is not None or reader:
                raise InputError("--field, --encoding, --sep, --header: require files, "
                                 f"got {part}.")
            # workers parse them, which takes longest
            for paths in divide(find_files(part), JOB_FILES):
                yield part, paths
            continue
        documents = []
        num_units = 0  # characters, or names in lists
        for document in read_documents(part, is_sets, field, **reader):
            documents.append(document)
            num_units += len(document)
            if num_units > JOB_UNITS:
                yield "texts", documents
                documents = []
                num_units = 0
        yield "texts", documents


def split_all(jobs, split, subwords):
    """Yield split_job of each job, in order, on all cores where that pays."""
    # a small file is one job; processes start in 0.1 s, on macOS and Windows in seconds
    head = list(itertools.islice(jobs, 2))
    jobs = itertools.chain(head, jobs)
    if len(head) < 2 or subwords is not None:  # the BPE library has threads of its own
        for job in jobs:
            yield split_job(job, split, subwords)
        return
    with start_workers() as pool:
        pending = deque()
        for job in jobs:
            pending.append(pool.apply_async(split_job, (job, split)))
            if len(pending) > 4 * num_cores():  # else the reader runs ahead without limit
                yield pending.popleft().get()
        for result in pending:
            yield result.get()


def split_job(job, split, subwords=None):
    """Split the documents of a job into words, in a worker process.

    Args:
        job: (kind, payload) from read_jobs.
        split: str, one of tokenizer.SPLITS; subwords: its BPE or Phrases, or None.

    Returns:
        kind, as in job.
        documents: list[str], the words of each joined by line breaks, which are in no word. A str
            is faster to send than a list.
    """
    kind, _ = job
    texts = list_documents(job)
    if subwords is not None:
        documents = subwords.split_texts(texts)
    elif split == "items":
        documents = [item_names(text) for text in texts]
    else:
        documents = [list_words(text, split) for text in texts]
    return kind, ["\n".join(words) for words in documents if words]


def list_documents(job):
    """Return the documents of a job from read_jobs."""
    kind, payload = job
    if kind == "texts":
        return payload
    _, read = PYTHON[kind]
    texts = []
    for path in payload:
        texts.extend(read(path))
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


# -------------------------------------------------------------------------------------------------
# Words to token IDs on disk


def number_words(results, number_of, is_sets, path):
    """Write documents as the numbers of their words, uint32. SEP ends each document.

    Code is copied about, so its docstrings and sets of names repeat, and held-out text would be
    seen in training: only the first of equal documents in Python sources is written.

    Args:
        results: iterable of (kind, documents), see split_job.
        number_of: dict, word -> its number. A new word gets the next one.
        is_sets: bool, documents are item sets, which are equal in any order.
        path: of the new file.
    """
    seen = set()
    with open(path, "wb") as file:
        for kind, documents in results:
            is_code = kind in PYTHON  # the other kind is "texts"
            numbers = []
            for document in documents:
                words = document.split("\n")
                if is_code:
                    key = tuple(sorted(words)) if is_sets else document
                    if key in seen:
                        continue
                    seen.add(key)
                for word in words:
                    numbers.append(number_of.setdefault(word, FIRST_WORD_ID + len(number_of)))
                numbers.append(SEP)
            np.array(numbers, np.uint32).tofile(file)


def renumber(folder, words, by_frequency):
    """Turn numbers.bin into ids.bin, offsets.npy, counts.npy and words.txt.

    Args:
        folder: Path.
        words: list[str], V words by number.
        by_frequency: bool, the most frequent word gets the first ID; among equally frequent ones
            the first to appear. Otherwise the numbers are the IDs, as for subwords.

    Returns:
        dict for meta.json: sizes, the dtype of ids.bin, and a digest, which tells a checkpoint
        its corpus.
    """
    # Count the words
    numbers = np.memmap(folder / "numbers.bin", np.uint32, "r")
    num_ids = FIRST_WORD_ID + len(words)
    counts_by_number = np.zeros(num_ids, np.int64)
    for block in divide(numbers, BLOCK):
        counts_by_number += np.bincount(block, minlength=num_ids)
    word_counts = counts_by_number[FIRST_WORD_ID:]

    # Sort them: words[order[i]] has ID FIRST_WORD_ID + i. id_of_number is the inverse, and keeps
    # the special tokens
    order = np.arange(len(words))
    if by_frequency:
        order = np.argsort(-word_counts, kind="stable")
    dtype = "uint16" if num_ids <= 1 << 16 else "uint32"
    id_of_number = np.arange(num_ids).astype(dtype)
    id_of_number[FIRST_WORD_ID + order] = np.arange(FIRST_WORD_ID, num_ids)
    counts = np.append(counts_by_number[:FIRST_WORD_ID], word_counts[order])
    np.save(folder / "counts.npy", counts)
    text = "".join([words[i] + "\n" for i in order])
    text = text.encode("utf-8", "surrogatepass")  # JSON may hold half a surrogate pair
    (folder / "words.txt").write_bytes(text)

    # Write their IDs
    digest = hashlib.md5(usedforsecurity=False)
    num_written = 0
    offsets = [[0]]
    with open(folder / "ids.bin", "wb") as file:
        for block in divide(numbers, BLOCK):
            ids = id_of_number[block]
            ids.tofile(file)
            digest.update(ids)
            offsets.append(num_written + 1 + np.flatnonzero(ids == SEP))  # behind each SEP
            num_written += len(ids)
    digest.update(text)
    np.save(folder / "offsets.npy", np.concatenate(offsets))
    del numbers, block  # Windows removes no file that is mapped into memory
    os.remove(folder / "numbers.bin")
    return dict(documents=int(counts[SEP]), words=int(word_counts.sum()), dtype=dtype,
                distinct=int((word_counts > 0).sum()), digest=digest.hexdigest())


class Corpus:
    """A prepared corpus: IDs on disk, words, counts.

    Args:
        folder: str, the result of prepare.

    Attributes:
        ids: uint16 or uint32 memmap (n,), token IDs. SEP ends each document.
        offsets: int64 (documents + 1,), where each document starts.
        words: list[str], by ID - FIRST_WORD_ID; counts: int64, by ID.
        subwords: BPE, Phrases or None.
        meta: dict with data, split, documents, words, distinct, dtype, digest.
    """

    def __init__(self, folder):
        self.folder = folder
        self.subwords = None
        with reading(f"{folder} (damaged corpus; remove it and it is built again)"):
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
        """Return the n most frequent words that occur, list[str]. Subwords are not by frequency."""
        counts = self.counts[FIRST_WORD_ID:]
        order = np.argsort(-counts, kind="stable")[:n]
        return [self.words[i] for i in order if counts[i] > 0]

    def split_pages(self):
        """Return the indices of training documents, and of a random tenth that is held out."""
        order = random_order(self.meta["documents"], HELD_OUT_KEY)
        num_held_out = max(len(order) // 10, 1)
        return order[num_held_out:], order[:num_held_out]
