"""Texts and item sets in files, on the hub or in the installed Python, to token IDs on disk.

Sources:
    [HF] Xue & Aletras 2022, HashFormers
Out of scope: the formats of files (data/rows.py), batches (data/batches.py).

prepare writes a folder, once, in the steps of write_corpus, and Corpus reads it:

    find_files      --data        ->  paths of files
    read_documents  paths         ->  rows, by data/rows.py  ->  texts (read_sets: item sets)
    split_all       documents     ->  words, in several processes
    number_words    words         ->  numbers.bin
    renumber        numbers.bin   ->  ids.bin, words.txt, offsets.npy, counts.npy

Example: the documents "the cat" and "a cat a cat" become

    numbers.bin  5 6 2 7 6 7 6 2     by first appearance 5, 6, 7 are the, cat, a; 2 is [SEP], the
                                     end of a document
    ids.bin      7 5 2 6 5 6 5 2     by frequency 5, 6, 7 are cat, a, the
    words.txt    cat a the
    offsets.npy  0 3 8               where documents start, and the end
    counts.npy   0 0 2 0 0 3 2 1     by ID
"""

import functools
import hashlib
import itertools
import json
import os
from collections import deque
from pathlib import Path

import numpy as np
from tqdm import tqdm

from data.batches import divide
from data.items import key_of_set, read_sets
from data.python_source import PLACES, python_files, python_names, python_texts, walk_files
from data.rows import ENDINGS, find_columns, get_ending, is_hub_id, parse_hub_id, read_cells
from data.rows import read_hub, read_rows
from support.common import InputError, build_once, fingerprint, num_cores, reading, start_workers
from support.common import write_json
from tokenizer import FIRST_WORD_ID, SEP, SUBWORDS, make_splitter

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
# bump it with any edit in data/ that changes a corpus: all are built again
FORMAT = 10
BLOCK = 1 << 24  # token IDs in memory at a time
JOB_FILES = 64  # Python files in the work of one core at a time
JOB_UNITS = 1_000_000  # characters, or names in lists, in such work


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
    files = check_parts(data, field, reader)

    # the folder's name has a fingerprint of all that decides its content
    num_subwords = max_subwords if split in SUBWORDS else None
    identity = [FORMAT, data, split, num_subwords, field, reader]
    identity += [source.read_text("utf-8") for source in SOURCES]
    for paths in files.values():
        for file in paths:
            stat = os.stat(file)
            identity.append((os.path.abspath(file), stat.st_size, stat.st_mtime_ns))
    path = os.path.join(cache, f"{name_data(data)}-{split}-{fingerprint(identity)}")
    return build_once(
        path, write_corpus, data, files, split, max_subwords, quiet, field, reader)


def write_corpus(folder, data, files, split, max_subwords, quiet, field, reader):
    """Write all files of a prepared corpus to a new folder.

    files: dict, part of data -> paths, see find_files. The other arguments are those of prepare.
    """
    folder = Path(folder)
    folder.mkdir()
    if not quiet:
        print(f"preparing {data}, once for all runs, in {folder.parent}", flush=True)
    is_hidden = True if quiet else None  # None: unless stderr is a terminal
    read = read_documents
    key_of = str  # documents with equal keys are copies: each text is its own
    if split == "items":
        read = read_sets
        key_of = key_of_set

    # Subwords are learned from all texts, before any text is split. They keep the library's numbers
    subwords = None
    number_of = {}  # word -> its number, FIRST_WORD_ID or more: special tokens are 0 to 4
    if split in SUBWORDS:
        open_texts = functools.partial(read_texts, files, field, reader)
        subwords = SUBWORDS[split].train(open_texts, max_subwords)
        (folder / "subwords.json").write_text(subwords.json, "utf-8")
        number_of = {word: i for i, word in enumerate(subwords.units, FIRST_WORD_ID)}
    splitter = make_splitter(split, subwords)

    # Split all documents, on all cores. Words get numbers by first appearance, as IDs, which are
    # by frequency, are not known before the end
    seen = set()  # the documents of Python sources so far
    with open(folder / "numbers.bin", "wb") as file:
        for part, paths in files.items():
            jobs = read_jobs(part, paths, read, field, reader)
            results = split_all(part, jobs, splitter)
            for documents in tqdm(results, f"preparing {part}", disable=is_hidden):
                if part in PYTHON:
                    documents = drop_copies(documents, seen, key_of)
                number_words(documents, number_of).tofile(file)
        if file.tell() == 0:
            raise InputError(f"--data {data}: expected text, got no words.")

    sizes = renumber(folder, list(number_of), by_frequency=subwords is None)
    write_json(folder / "meta.json", dict(data=data, split=split, **sizes))


# -------------------------------------------------------------------------------------------------
# The files and data sets that --data names


def check_parts(data, field, reader):
    """Return dict, part -> the paths of its files. Parts are refused that do not fit together.

    A part of --data is one name, path or hub ID between + signs. The arguments are as in prepare.
    """
    parts = data.split("+")
    if len(parts) > 1 and os.path.exists(data):
        raise InputError(f"--data {data}: + joins sources. Use a path without +.")
    files = {}
    texts = []  # what is read: files, hub IDs, and names in PYTHON, whose documents count once
    for part in parts:
        paths = find_files(part)
        files[part] = paths
        if part in PYTHON and field is not None:
            raise InputError(f"--field: requires rows, got {part}.")
        if reader and (part in PYTHON or not paths):
            raise InputError(f"--encoding, --sep, --header: require files, got {part}.")
        if part in PYTHON:
            texts.append(part)
        elif paths:
            texts.extend(os.path.realpath(file) for file in paths)
        else:
            texts.append(parse_hub_id(HUB.get(part, part)))
    # a text that is read twice, such as by a link, may be held out and trained on
    if len(set(texts)) < len(texts):
        raise InputError(f"--data {data}: expected each file or name once.")
    return files


def find_files(part):
    """Return the paths of the files of a part of --data: a name in PYTHON, a file, a folder.

    A hub ID has none, []. A folder's linked folders, and files of other kinds, are left out.
    """
    if part in (*PYTHON, *HUB) and os.path.exists(part):
        raise InputError(f"--data {part}: expected a name or a path, got both. Use ./{part} for "
                         "the path, or rename it.")
    if part in PYTHON:
        places, _ = PYTHON[part]
        return list(python_files(places).values())
    if os.path.isfile(part):
        return [part]
    files = [file for file in sorted(walk_files(part)) if get_ending(file) in ENDINGS]
    if not files and not is_hub_id(HUB.get(part, part)):
        raise InputError(f"--data {part}: expected files in {', '.join(ENDINGS)} (or .gz), a hub "
                         f"ID or one of {', '.join((*PYTHON, *HUB))}. Nothing was found there.")
    return files


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
# Rows to texts. data/items.py has the same steps for item sets


def open_sources(part, paths, reader):
    """Return the rows of each source of a part of --data, a dict of iterators.

    Args:
        part: str; paths: its files, or [] for a data set on the hub.
        reader: as in prepare.
    """
    if not paths:
        return {part: read_hub(HUB.get(part, part))}
    return {path: read_rows(path, **reader) for path in paths}


def read_documents(part, sources, field):
    """Yield the texts of a part of --data, without empty ones. items.read_sets is that of sets.

    Args:
        part: str; sources: as open_sources returns them.
        field: str or None, see choose_columns.
    """
    for [text] in read_cells(part, sources, field, choose_columns, is_text):
        if text:
            yield text


def is_text(cells):
    """Return whether the cells of a row are one text, or an empty one."""
    [text] = cells
    return text is None or isinstance(text, str)


def choose_columns(source, row, field=None, flag="--field"):
    """Choose the column of the texts, list of one str.

    Args:
        source: str, for the message of an error.
        row: dict, the columns and a value of each.
        field: str, its name. None: the column "text", or else the only one of strings.
        flag: str, the flag that sets field, for the message.

    Raises:
        InputError: There is no such column, or there are several.
    """
    names = ["text"]
    if "text" not in row:
        names = [name for name in row if isinstance(row[name], str)]
    return find_columns(source, row, field, names, "one column of text", f"Use {flag} NAME.")


# -------------------------------------------------------------------------------------------------
# Documents to words, on all cores. A job is the work of one core at a time: a list of documents,
# or for Python sources a list of paths, whose documents the worker reads


def read_jobs(part, paths, read, field, reader):
    """Yield lists of documents; for Python sources lists of paths, since workers parse the files.

    Args:
        part, paths, reader: as in open_sources.
        read: read_documents or items.read_sets; field: its argument.
    """
    if part in PYTHON:
        yield from divide(paths, JOB_FILES)
        return
    documents = []
    num_units = 0  # characters, or names in lists
    for document in read(part, open_sources(part, paths, reader), field):
        documents.append(document)
        num_units += len(document)
        if num_units > JOB_UNITS:
            yield documents
            documents = []
            num_units = 0
    if documents:
        yield documents


def read_texts(files, field, reader):
    """Yield the documents of all parts of --data; files: dict, part of data -> paths."""
    for part, paths in files.items():
        for job in read_jobs(part, paths, read_documents, field, reader):
            yield from list_documents(part, job)


def list_documents(part, job):
    """Return the documents of a job."""
    if part not in PYTHON:
        return job
    _, read = PYTHON[part]
    documents = []
    for path in job:
        documents.extend(read(path))
    return documents


def split_all(part, jobs, splitter):
    """Yield split_job of each job, in order, on all cores where that pays."""
    # a small file is one job; processes start in 0.1 s, on macOS and Windows in seconds
    head = list(itertools.islice(jobs, 2))
    jobs = itertools.chain(head, jobs)
    if len(head) < 2 or splitter.json is not None:  # the BPE library has threads of its own
        for job in jobs:
            yield split_job(part, job, splitter)
        return
    with start_workers() as pool:
        pending = deque()
        for job in jobs:
            pending.append(pool.submit(split_job, part, job, splitter))
            if len(pending) > 4 * num_cores():  # else the reader runs ahead without limit
                yield pending.popleft().result()
        for result in pending:
            yield result.result()


def split_job(part, job, splitter):
    """Split the documents of a job into words.

    Args:
        part, job: as read_jobs has them.
        splitter: as tokenizer.make_splitter returns it.

    Returns:
        list[str], the words of each document joined by line breaks, which are in no word. Another
        process sends a str faster than a list.
    """
    documents = splitter.split_texts(list_documents(part, job))
    return ["\n".join(words) for words in documents if words]


def drop_copies(documents, seen, key_of):
    """Return the documents whose key_of is not in `seen`, a set, and add it.

    Code is copied about, so its docstrings and sets of names repeat, and held-out text would be
    seen in training.

    Args:
        documents: list of str, as split_job returns them.
        key_of: function of a document.
    """
    new = []
    for document in documents:
        key = key_of(document)
        if key not in seen:
            seen.add(key)
            new.append(document)
    return new


# -------------------------------------------------------------------------------------------------
# Words to token IDs on disk


def number_words(documents, number_of):
    """Return the numbers of the words of documents, uint32 (n,). SEP ends each document.

    Args:
        documents: list of str, as split_job returns them.
        number_of: dict, word -> its number. A new word gets the next one.
    """
    numbers = []
    for document in documents:
        for word in document.split("\n"):
            numbers.append(number_of.setdefault(word, FIRST_WORD_ID + len(number_of)))
        numbers.append(SEP)
    return np.array(numbers, np.uint32)


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

    # Sort them. number_of_id[ID] is the number of the word that gets this ID; id_of_number is the
    # inverse. Special tokens keep their place
    number_of_id = np.arange(num_ids)
    if by_frequency:
        by_count = np.argsort(-counts_by_number[FIRST_WORD_ID:], kind="stable")
        number_of_id[FIRST_WORD_ID:] = FIRST_WORD_ID + by_count
    dtype = "uint16" if num_ids <= 1 << 16 else "uint32"
    id_of_number = np.empty(num_ids, dtype)
    id_of_number[number_of_id] = np.arange(num_ids)
    counts = counts_by_number[number_of_id]  # by ID
    np.save(folder / "counts.npy", counts)
    text = "".join([words[i - FIRST_WORD_ID] + "\n" for i in number_of_id[FIRST_WORD_ID:]])
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
    word_counts = counts[FIRST_WORD_ID:]
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
            path = Path(folder)
            self.meta = json.loads((path / "meta.json").read_text())
            # memmap: the IDs stay on disk until a batch reads them
            self.ids = np.memmap(path / "ids.bin", self.meta["dtype"], "r")
            self.counts = np.load(path / "counts.npy")
            self.offsets = np.load(path / "offsets.npy")
            text = (path / "words.txt").read_text("utf-8", "surrogatepass")
            self.words = text.split("\n")[:-1]
            split = self.meta["split"]
            if split in SUBWORDS:
                state = (path / "subwords.json").read_text("utf-8")
                self.subwords = SUBWORDS[split](state)
            num_ids = FIRST_WORD_ID + len(self.words)
            if len(self.ids) != self.offsets[-1] or len(self.counts) != num_ids:
                raise ValueError("incomplete")

    def frequent(self, n):
        """Return the n most frequent words that occur, list[str]. Subwords are not by frequency."""
        counts = self.counts[FIRST_WORD_ID:]
        order = np.argsort(-counts, kind="stable")[:n]
        return [self.words[i] for i in order if counts[i] > 0]
