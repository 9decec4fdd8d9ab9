"""Documents to token IDs on disk, once for all runs.

Sources:
    [HF] Xue & Aletras 2022, HashFormers
Out of scope: what --data names, and its documents (data/sources.py), batches (data/batches.py).

prepare writes a folder, in the five steps of write_corpus, and Corpus reads it:

    1. choose_splitter  documents    ->  subwords.json, for --split bpe and phrases alone
    2. split_all        documents    ->  words, in several processes
    3. number_words     words        ->  numbers.bin
    4. sort_words       numbers.bin  ->  counts.npy, words.txt
    5. renumber         numbers.bin  ->  ids.bin, offsets.npy

Example: the documents "the cat" and "a cat a cat" become

    numbers.bin  5 6 2 7 6 7 6 2     by first appearance 5, 6, 7 are the, cat, a; 2 is [SEP], the
                                     end of a document
    counts.npy   0 0 2 0 0 3 2 1     by ID. By frequency 5, 6, 7 are cat, a, the
    words.txt    cat a the
    ids.bin      7 5 2 6 5 6 5 2
    offsets.npy  0 3 8               where documents start, and the end
"""

import hashlib
import itertools
import json
import os
from collections import deque
from pathlib import Path

import numpy as np
from tqdm import tqdm

from data.sources import find_sources, name_data
from data.splitters import SPLITS, SUBWORDS, load_splitter
from support.common import InputError, blame, build_once, fingerprint, reading, remove
from support.common import start_workers, write_json
from tokenizer import FIRST_WORD_ID, SEP

# The code that decides what a corpus contains. An edit of it, be it of a comment, builds corpora
# again. A version number would leave a stale corpus wherever somebody forgets it
ROOT = Path(__file__).resolve().parents[1]
CODE = [ROOT / name for name in (
    "data/corpus.py", "data/python_source.py", "data/rows.py", "data/sources.py",
    "data/splitters.py", "tokenizer.py", "words.py")]
BLOCK = 1 << 24  # token IDs in memory at a time
MAX_PENDING = 32  # jobs that other processes have at a time, four for each of eight


def prepare(data, split, cache, max_subwords=50_000, field=None, **reader):
    """Turn corpora into one array of token IDs on disk, once. [HF §3.1]

    Documents that repeat, exactly or in another case, are left out of Python sources alone. In
    other sources a held-out document may have a copy that is trained on: remove copies first.

    Memory holds the distinct words, where each document starts, the item sets of a table of pairs,
    a whole .json file, and for Python sources every distinct document.

    Args:
        data: str, names, paths or hub IDs, joined by +.
        split: str, a key of data.splitters.SPLITS.
        cache: str, the folder of all corpora.
        max_subwords: int, pieces of a BPE or phrases at most.
        field: str or None, see data.sources.choose_columns.
        reader: encoding, sep and header of number_rows.

    Returns:
        str, the folder that Corpus reads.

    Raises:
        InputError: Data cannot be read, or has no words.
    """
    sources = find_sources(data, split, field, reader)

    # the folder's name has a fingerprint of all that decides its content
    num_subwords = max_subwords if split in SUBWORDS else None
    code = [path.read_text("utf-8") for path in CODE]
    files = list_files(sources)
    identity = [data, split, num_subwords, field, reader, *code, *files]
    folder = os.path.join(cache, f"{name_data(data)}-{split}-{fingerprint(identity)}")
    return build_once(folder, write_corpus, data, split, sources, max_subwords)


def list_files(sources):
    """Return the path, size and time of change of each file of sources, a list of tuples."""
    files = []
    for source in sources:
        for path in source.paths:
            stat = os.stat(path)
            files.append((os.path.abspath(path), stat.st_size, stat.st_mtime_ns))
    return files


def write_corpus(folder, data, split, sources, max_subwords):
    """Write all files of a prepared corpus to a new folder.

    sources: list of data.sources.Source. The other arguments are those of prepare.
    """
    folder = Path(folder)
    folder.mkdir()
    print(f"preparing {data}, once for all runs, in {folder.parent}", flush=True)

    # 1. Learn subwords from all texts, before any text is split
    splitter, number_of_word = choose_splitter(folder, split, sources, max_subwords)

    # 2. and 3. Split all documents, and number their words by first appearance: their IDs, which
    # are by frequency, are not known before the end
    write_numbers(folder, data, sources, splitter, number_of_word)

    # 4. Sort the words by frequency, but not subwords
    words = list(number_of_word)
    counts, id_of_number = sort_words(folder, words, by_frequency=split not in SUBWORDS)

    # 5. Replace the numbers by IDs
    digest = renumber(folder, id_of_number)
    word_counts = counts[FIRST_WORD_ID:]
    write_json(folder / "meta.json", dict(
        data=data, split=split, documents=int(counts[SEP]), words=int(word_counts.sum()),
        distinct=int((word_counts > 0).sum()), dtype=str(id_of_number.dtype), digest=digest))


def choose_splitter(folder, split, sources, max_subwords):
    """Return the splitter of --split; one of subwords learns them, and writes subwords.json.

    Returns:
        splitter: data.splitters.Splitter.
        number_of_word: dict, subword -> number, in the order of their library; else empty.
    """
    if split not in SUBWORDS:
        return SPLITS[split](), {}
    splitter = SUBWORDS[split].train(Documents(sources), max_subwords)
    (folder / "subwords.json").write_text(splitter.json, "utf-8")
    number_of_word = {word: i for i, word in enumerate(splitter.units, FIRST_WORD_ID)}
    return splitter, number_of_word


def write_numbers(folder, data, sources, splitter, number_of_word):
    """Write numbers.bin: number_words of all documents. New words are added to number_of_word."""
    seen = set()  # the words of documents, of sources where equal ones count once
    with open(folder / "numbers.bin", "wb") as file:
        for source in sources:
            documents_of_jobs = split_all(source, splitter)
            # disable=None: no bar unless stderr is a terminal
            for documents in tqdm(documents_of_jobs, f"preparing {source.part}", disable=None):
                if source.has_copies:
                    documents = drop_copies(documents, seen, source.is_sets)
                number_words(documents, number_of_word).tofile(file)
        if file.tell() == 0:
            raise InputError(f"--data {data}: expected text, got no words.")


# -------------------------------------------------------------------------------------------------
# Documents to words, in several processes


class Documents:
    """The documents of all sources, read anew by each loop over them."""

    def __init__(self, sources):
        self.sources = sources

    def __iter__(self):
        for source in self.sources:
            for job in source.jobs():
                yield from source.documents(job)


def split_all(source, splitter):
    """Yield split_job of each job of a source, in order, by other processes where that pays."""
    # a small file is one job; processes start in 0.1 s, on macOS and Windows in seconds
    jobs = source.jobs()
    head = list(itertools.islice(jobs, 2))
    jobs = itertools.chain(head, jobs)
    if len(head) < 2 or not splitter.use_workers:
        for job in jobs:
            yield split_job(source.documents, job, splitter)
        return
    with start_workers() as pool:
        pending = deque()
        for job in jobs:
            pending.append(pool.submit(split_job, source.documents, job, splitter))
            if len(pending) > MAX_PENDING:  # else the reader runs ahead without limit
                yield pending.popleft().result()
        for future in pending:
            yield future.result()


def split_job(open_job, job, splitter):
    """Split the documents of a job into words.

    Args:
        open_job: function, Source.documents.
        job: its argument.
        splitter: data.splitters.Splitter.

    Returns:
        list[str], the words of each document joined by line breaks, which are in no word. Another
        process sends a str faster than a list.
    """
    words_of_documents = splitter.split_texts(open_job(job))
    return ["\n".join(words) for words in words_of_documents if words]


def drop_copies(documents, seen, is_sets):
    """Return the documents that are not in `seen`, a set, and add them.

    Args:
        documents: list[str], the joined words of each, as split_job returns them.
        is_sets: bool, the order of the names in a document does not count.
    """
    new = []
    for joined_words in documents:
        key = joined_words
        if is_sets:
            key = "\n".join(sorted(joined_words.split("\n")))
        if key not in seen:
            seen.add(key)
            new.append(joined_words)
    return new


# -------------------------------------------------------------------------------------------------
# Words to token IDs on disk


def number_words(documents, number_of_word):
    """Return the numbers of the words of documents. A new word gets the next number.

    Args:
        documents: list[str], the joined words of each, as split_job returns them.
        number_of_word: dict, word -> number, FIRST_WORD_ID and on. New words are added.

    Returns:
        uint32 (n,). SEP ends each document.
    """
    numbers = []
    for joined_words in documents:
        for word in joined_words.split("\n"):
            next_number = FIRST_WORD_ID + len(number_of_word)
            numbers.append(number_of_word.setdefault(word, next_number))
        numbers.append(SEP)
    return np.array(numbers, np.uint32)


def sort_words(folder, words, by_frequency):
    """Give each word its ID; write counts.npy and words.txt, by ID.

    Args:
        folder: Path, with numbers.bin.
        words: list[str], V words by number.
        by_frequency: bool, the most frequent word gets the first ID; among equally frequent ones
            the first to appear. Otherwise the numbers are the IDs, as for subwords.

    Returns:
        counts: int64 (5 + V,), how often each ID occurs.
        id_of_number: uint16 or uint32 (5 + V,).
    """
    num_ids = FIRST_WORD_ID + len(words)
    counts_by_number = np.zeros(num_ids, np.int64)
    for block in read_blocks(folder / "numbers.bin"):
        counts_by_number += np.bincount(block, minlength=num_ids)

    # number_of_id[ID] is the number of the word that gets this ID. Special tokens keep their place
    number_of_id = np.arange(num_ids)
    if by_frequency:
        by_count = np.argsort(-counts_by_number[FIRST_WORD_ID:], kind="stable")
        number_of_id[FIRST_WORD_ID:] = FIRST_WORD_ID + by_count
    id_of_number = np.empty(num_ids, "uint16" if num_ids <= 1 << 16 else "uint32")
    id_of_number[number_of_id] = np.arange(num_ids)

    counts = counts_by_number[number_of_id]
    np.save(folder / "counts.npy", counts)
    text = "".join([words[i - FIRST_WORD_ID] + "\n" for i in number_of_id[FIRST_WORD_ID:]])
    # JSON may hold half a surrogate pair
    (folder / "words.txt").write_bytes(text.encode("utf-8", "surrogatepass"))
    return counts, id_of_number


def renumber(folder, id_of_number):
    """Turn numbers.bin into ids.bin and offsets.npy.

    Returns:
        str, a digest of ids.bin and words.txt, which tells a checkpoint its corpus.
    """
    digest = hashlib.md5(usedforsecurity=False)
    num_written = 0
    offsets = [[0]]
    with open(folder / "ids.bin", "wb") as file:
        for block in read_blocks(folder / "numbers.bin"):
            ids = id_of_number[block]
            ids.tofile(file)
            digest.update(ids)
            offsets.append(num_written + 1 + np.flatnonzero(ids == SEP))  # behind each SEP
            num_written += len(ids)
    digest.update((folder / "words.txt").read_bytes())
    np.save(folder / "offsets.npy", np.concatenate(offsets))
    remove(folder / "numbers.bin")
    return digest.hexdigest()


def read_blocks(path):
    """Yield the numbers of numbers.bin, uint32, a block at a time: the whole may exceed memory."""
    with open(path, "rb") as file:
        while True:
            block = np.fromfile(file, np.uint32, BLOCK)
            if len(block) == 0:
                return
            yield block


# -------------------------------------------------------------------------------------------------
# A prepared corpus


class Corpus:
    """A prepared corpus: IDs on disk, words, counts.

    Args:
        folder: str, the result of prepare.

    Attributes:
        ids: uint16 or uint32 memmap (n,), token IDs. SEP ends each document.
        offsets: int64 (documents + 1,), where each document starts.
        words: list[str], by ID - FIRST_WORD_ID; counts: int64, by ID.
        splitter: data.splitters.Splitter, which has split the texts.
        meta: dict with data, split, documents, words, distinct, dtype, digest.
    """

    def __init__(self, folder):
        self.folder = folder
        path = Path(folder)
        source = f"{folder} (damaged corpus; remove it and it is built again)"
        with reading(source):
            self.meta = json.loads((path / "meta.json").read_text("utf-8"))
            # memmap: the IDs stay on disk until a batch reads them
            self.ids = np.memmap(path / "ids.bin", self.meta["dtype"], "r")
            self.counts = np.load(path / "counts.npy")
            self.offsets = np.load(path / "offsets.npy")
            # read_text would turn a carriage return in a word into a line end
            text = (path / "words.txt").read_bytes().decode("utf-8", "surrogatepass")
        self.words = text.split("\n")[:-1]
        state = dict(split=self.meta["split"])
        with blame(source):
            if state["split"] in SUBWORDS:
                state["subwords"] = (path / "subwords.json").read_text("utf-8")
            self.splitter = load_splitter(state)
        num_ids = FIRST_WORD_ID + len(self.words)
        if len(self.ids) != self.offsets[-1] or len(self.counts) != num_ids:
            raise InputError(f"{source}: incomplete")

    def frequent(self, n):
        """Return the n most frequent words that occur, list[str]. Subwords are not by frequency."""
        counts = self.counts[FIRST_WORD_ID:]
        order = np.argsort(-counts, kind="stable")[:n]
        return [self.words[i] for i in order if counts[i] > 0]
