"""Pre-train a transformer over hashed words.

    python pretrain.py                                               laptop: the docstrings of your Python
    python pretrain.py --emb pool --hash md5 --data my_texts/        your own files
    torchrun --nproc_per_node=8 pretrain.py --emb proj --hash lsh    eight GPUs, or processes on CPUs
    torchrun --nproc_per_node=8 pretrain.py --preset hashformer --emb proj --hash lsh \\
        --data wikipedia+bookcorpus                                  the paper
    python pretrain.py --emb median                                  which word is hidden? by its hashes
    python pretrain.py --preset superbloom-small                     sets of names: which one is missing?
    python pretrain.py --preset superbloom-small --data pages.jsonl --alpha 50        your own pages of items

Sources   [HF] Xue & Aletras 2022, HashFormers   [SR] Yamaguchi et al. 2021, Shuffle+Random
          [BERT] Devlin et al. 2019   [BL] Li & Yip, BERT-LSH
          [SB] Superbloom, ICLR 2020 submission   [CM] Median is all you need, a proposal
          [SV] Svenstrup et al. 2017, Hash Embeddings
Map       [HF Table 4] RECIPES   [HF §3.6] corrupt_sr   [SR §3] corrupt_sr   [BERT §3.1] corrupt_mlm
          [HF §3.1] parser   [HF §3.2] parser   [HF §3.3] parser   [HF §4.2] parser
          [BL §2.1] parser   [SB §2.4] loss_hash   [SB §3.1] Pages   [SB §3.3] loss_sampled   [SB §3.2] parser
          [CM] loss_hash   [SV] parser
Not here  scores on tasks; reading one text (infer.py).
Departs   1. Words are shuffled within their own row, among the chosen positions; the authors share one
             permutation over the batch, so that on short rows most of their shuffles change nothing.
          2. A replaced or shuffled word that comes out the same is labelled intact: nobody could tell.
          3. Random words are words of the corpus; the authors give Add and Proj random bits, as no word has.
          4. A batch, its corruption and its dropout depend on (seed, step, rank) and on nothing else: a run
             that was stopped goes on to the same last bit.
          5. Of every segment of a page at least one item is masked, however short it is. What a set holds
             already is no answer; the paper's lists have it.
Letters   B batch   L positions   W windows   V ids   M scored positions   N rows of the vocabulary
"""

import argparse
import array
import contextlib
import csv
import dataclasses
import functools
import gc
import glob
import gzip
import hashlib
import itertools
import json
import math
import multiprocessing
import os
import re
import shlex
import signal
import sys
import threading
import time
import warnings

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from tqdm import tqdm

import hashing
from hashing import CLS, FIRST, MASK, PAD, SEP, UNK, Encoder, InputError
from model import FORM, PRESETS, Config, ConfigError, Help, Model, at_least, beam_search, choose_machine
from model import cores, count_parameters, fingerprint, hash_logp, leave_together, load_checkpoint
from model import machine_flags, once, parameter_groups, save_checkpoint, torchrun_env, try_compile

LSH = ("lsh_bands", "lsh_buckets", "lsh_hashes", "lsh_fill", "lsh_pairs", "lsh_redraw")  # of --attn lsh
SKETCHES = {"hashes": "--emb bloom, mean, median, weighted, and of --objective hash-mlm",  # whose flag it is
            "buckets": "--emb mean, median, and of --objective hash-mlm", "weights": "--emb weighted"}
IGNORE = -100  # the label of a position that is not scored: torch's own default
EVAL_WORDS = 65_536  # held-out positions that an evaluation looks at
EVAL_PAGES = 2_000  # of held-out pages, where one item is asked for
SAMPLES = 8_192  # rows that stand for all in --objective sampled
TEXT = dict(encoding="utf-8", errors="surrogatepass", newline="\n")  # how word lists are written and read
PYTHON = ("python", "python-names")
PIECES = {"bpe": hashing.BPE, "phrases": hashing.Phrases}  # ways to split that have to be learnt
HUB = {"wikipedia": ("wikimedia/wikipedia", "20231101.en"), "bookcorpus": ("rojagtap/bookcorpus", None)}
LOADERS = {".txt": "text", ".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}

# How each size is trained. micro: the most sequences a device holds at once; lr_mlm: lr for --objective mlm.
RECIPES = {
    "tiny": dict(batch=32, micro=32, steps=10_000, lr=2e-3, lr_mlm=2e-3, warmup=300, beta2=0.999),
    "bert-lsh": dict(batch=64, micro=32, steps=20_000, lr=1e-3, lr_mlm=1e-3, warmup=1_000, beta2=0.999),
    "median": dict(batch=128, micro=32, steps=100_000, lr=2e-4, lr_mlm=2e-4, warmup=5_000, beta2=0.999),
    "hashformer": dict(batch=128, micro=16, steps=500_000, lr=5e-5, lr_mlm=1e-4, warmup=10_000,
                       beta2=0.9999),  # [HF Table 4]
    "superbloom-small": dict(batch=64, micro=16, steps=6_000, lr=2e-3, lr_mlm=2e-3, warmup=300, beta2=0.999,
                             mask=0.40),
    "superbloom": dict(batch=1024, micro=64, steps=1_000_000, lr=1e-4, lr_mlm=1e-4, warmup=10_000,
                       beta2=0.999, alpha=50),  # [SB §3.2]
}


# ---------------------------------------------------------------------------------------------------------
# Corpora: a task is a piece of work for one core, (kind, payload); reading it gives documents (str, or a
# page, a list of names)


def tasks_of(data, pages=False, field=None):
    """Cut corpora into tasks, lazily.

    in:  data str: names, paths or hub ids, joined by +; pages: rows may be lists of names, or pairs of a page
         and a name; field, the column of the lists, None: the first
    out: iterator of (kind, payload): ("texts", list[str or list]), or (name in PYTHON, list of .py paths)
    err: InputError when a part is none of these
    """
    for part in data.split("+"):
        if part in PYTHON:
            if field:
                raise InputError(f"--field {field}: {part} has no columns")
            paths = list(hashing.python_files().values())
            yield from ((part, paths[start:start + 64]) for start in range(0, len(paths), 64))
            continue
        texts, size = [], 0
        for text in _rows(part, pages, field):
            texts.append(text)
            size += len(text) * (1 if isinstance(text, str) else 8)
            if size > 1_000_000:
                yield "texts", texts
                texts, size = [], 0
        if texts:
            yield "texts", texts


def _rows(part, pages, field):
    """The texts of a file, a folder or a hub data set, streaming: nothing is held but a row (pairs: all)."""
    files = local_files(part)
    if files:
        kinds = [(LOADERS[_ending(file)], file) for file in files]
        texts = [file for kind, file in kinds if kind == "text"]
        # tables one by one, for each may have columns of its own
        sources = [("text", None, texts)] * bool(texts) + [(k, None, [f]) for k, f in kinds if k != "text"]
    elif part in HUB or re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", part) and _ending(part) not in LOADERS:
        sources = [(*HUB.get(part, (part, None)), None)]
    else:
        raise InputError(f"--data {part}: no such file or folder, and neither {', '.join((*PYTHON, *HUB))} "
                         f"nor a hub id like owner/name")
    for kind, config, paths in sources:
        try:
            column, groups = None, {}
            for row in _table(kind, config, paths):
                column = column or _column(part, row, pages, field)
                if isinstance(column, tuple):
                    page, item = (row[name] for name in column)
                    groups.setdefault(page, []).append(item)
                elif row[column]:
                    yield row[column]
            yield from groups.values()
        except InputError:
            raise
        except Exception as error:  # datasets raises its own, pyarrow's, the hub's and the network's
            why = f"{type(error).__name__}: {(str(error).strip() or 'no reason given').splitlines()[0]}"
            raise InputError(f"--data {part}: could not be read as {kind}: {why}") from error


def _table(kind, config, paths):
    """in: a loader of `datasets`, or a hub id, its configuration; paths of files or None; out: rows (dict)"""
    if kind == "csv":  # the library guesses types, a chunk at a time: 001 becomes 1, NA and null nothing
        csv.field_size_limit(sys.maxsize)
        for path in paths:
            with (gzip.open if path.endswith(".gz") else open)(path, "rt", encoding="utf-8-sig",
                                                               errors="replace", newline="") as file:
                yield from csv.DictReader(file)
        return
    import datasets  # two seconds, and only needed here

    options = dict(encoding_errors="replace") if kind in ("text", "json") else {}
    yield from datasets.load_dataset(kind, config, data_files=paths and list(map(glob.escape, paths)),
                                     split="train", streaming=True, **options)


def _column(part, row, pages, field):
    """in: part of --data, its first row, pages and field as tasks_of; out: column's name, or two of pairs"""
    strings = [name for name, value in row.items() if isinstance(value, str)]
    if not pages:
        if not strings:
            raise InputError(f"--data {part}: no column of text among {', '.join(row)}")
        return "text" if "text" in row else strings[0]
    lists = [name for name, value in row.items() if isinstance(value, list)]
    if field and "," in field:
        columns = tuple(field.split(","))
        if len(columns) != 2 or not set(columns) <= set(row):
            raise InputError(f"--field {field}: wanted a page's column and an item's, of {', '.join(row)}")
        return columns
    if field:
        if field not in row or not isinstance(row[field], (list, str, type(None))):
            raise InputError(f"--field {field}: no such list in {part}, but {', '.join(lists or row)}")
        return field
    if lists or len(row) == 1 and strings:
        return (lists or strings)[0]
    if len(row) != 2:
        raise InputError(f"--data {part}: wanted a list of items, or two columns, a page and an item, and "
                         f"found {', '.join(row)}: --field PAGE,ITEM says which two, --field LIST which list")
    return tuple(row)


def _ending(path):
    return os.path.splitext(path.removesuffix(".gz"))[1]


def local_files(part):
    """The files that --data names: one, or a folder's, in a fixed order; [] when there is no such path."""
    inside = glob.glob(os.path.join(glob.escape(part), "**"), recursive=True)
    found = [part] if os.path.isfile(part) else sorted(filter(os.path.isfile, inside))
    known = [file for file in found if _ending(file) in LOADERS]
    if os.path.exists(part) and not known:
        raise InputError(f"--data {part}: no file that ends in {', '.join(LOADERS)}, with or without .gz")
    return known


def documents(task):
    """The documents of a task. Python files are parsed, never imported or run.

    in:  task (kind, payload)
    out: iterator of str (of pages list). texts: themselves. python: one a docstring, and of pydoc_data one
         a help topic. python-names: one a function, the distinct names it uses
    """
    kind, payload = task
    if kind == "texts":
        yield from payload
        return
    for path in payload:
        yield from hashing.python_texts(path, names=kind == "python-names")


def page_of(document):
    """The distinct names of a page, in order.

    in:  document: a list of names or numbers, or str, names with tabs between them, or else spaces
    out: list[str]
    """
    if isinstance(document, str):
        document = document.split("\t") if "\t" in document else document.split()
    if any(isinstance(name, (dict, list)) for name in document):
        raise InputError(f"an item is a name or a number, and here is {str(document)[:60]}")
    names = (" ".join(str(name).split()) for name in document if name is not None)
    return [name for name in dict.fromkeys(names) if name]


def count_task(task, split, bpe=None):
    """Tokenise one task; runs in a worker process.

    in:  task; split "regex", "space", "items", "bpe" or "phrases"; bpe, for the last two, of PIECES
    out: the task's kind; words list[str], its distinct ones; places int64 in that list; lengths int64, one a
         document; characters int; replaced int, characters that were not valid UTF-8
    """
    texts = list(documents(task))
    table, places, lengths = {}, [], []
    if bpe:
        pages = bpe.split_many(texts)
    else:
        pages = map(page_of, texts) if split == "items" else (hashing.words_of(text, split) for text in texts)
    for words in pages:
        places += [table.setdefault(word, len(table)) for word in words]
        lengths.append(len(words))
    replaced = sum(text.count("\ufffd") for text in texts if isinstance(text, str))
    places, lengths = np.array(places, np.int64), np.array(lengths, np.int64)
    return task[0], list(table), places, lengths, sum(map(len, texts)), replaced


def prepare(data, split, cache, pieces=50_000, quiet=False, field=None):
    """Turn corpora into one array of word ids on disk, whatever the hash: one cache serves every variant.

    in:  data, field as tasks_of; split as count_task; cache folder; pieces, most of a BPE or of phrases;
         quiet: no bar
    out: the folder: ids.bin (documents, each closed by SEP), offsets.npy (where each starts), words.txt (from
         id FIRST on), counts.npy (by id), meta.json, and bpe.json for splits bpe and phrases
    Memory: the table of distinct words, and a few megabytes per core.
    """
    identity = [6, data, split, pieces if split in PIECES else None, field]  # 6: of the format
    for part in data.split("+"):
        files = hashing.python_files().values() if part in PYTHON else local_files(part)
        identity += [(os.path.abspath(f), os.path.getsize(f), os.stat(f).st_mtime_ns) for f in files]
    name = "".join(c if c.isalnum() else "-" for c in os.path.basename(data.rstrip("/")))[:40]
    path = os.path.join(cache, f"{name}-{split}-{fingerprint(identity)}")
    return once(path, lambda folder: _prepare(folder, data, split, pieces, quiet, field))


def _prepare(folder, data, split, pieces, quiet, field=None):
    os.mkdir(folder)
    ids_path, bpe = os.path.join(folder, "ids.bin"), None
    read = functools.partial(tasks_of, data, split == "items", field)
    if split in PIECES:
        texts = (text for task in read() for text in documents(task))
        bpe = PIECES[split].train(tqdm(texts, f"training {split}", unit=" documents", disable=quiet), pieces)
        with open(os.path.join(folder, "bpe.json"), "w", encoding="utf-8") as file:
            file.write(bpe.json)
    tasks = read()
    first = list(itertools.islice(tasks, 2))
    # processes cost more than a small corpus; and the BPE library has threads of its own
    workers = cores() if len(first) > 1 and not bpe else 1
    table, lengths, counts, seen = {}, array.array("q"), np.zeros(1 << 16, np.int64), set()
    characters, replaced, whole = 0, 0, hashlib.md5(usedforsecurity=False)
    with contextlib.ExitStack() as stack:
        run = stack.enter_context(multiprocessing.Pool(workers)).imap if workers > 1 else map
        out = stack.enter_context(open(ids_path, "wb"))
        bar = stack.enter_context(tqdm(desc=f"preparing {data}", unit="B", unit_scale=True, disable=quiet))
        room, over = threading.Semaphore(4 * workers), []  # imap alone would read ahead without limit
        # subtle: after an error the pool waits for the thread that feeds it, and that for room
        stack.callback(lambda: (over.append(True), room.release()))
        ahead = itertools.takewhile(lambda task: room.acquire() and not over, itertools.chain(first, tasks))
        work = functools.partial(count_task, split=split, bpe=bpe)
        for kind, words, places, sizes, size, bad in run(work, ahead):
            room.release()
            # a worker numbers words by its own list; here they get the ids of the whole corpus
            ids = [FIRST + table.setdefault(word, len(table)) for word in words]
            ids = np.array(ids, np.int64)[places]
            kept = []
            for document in np.split(ids, np.cumsum(sizes))[:-1]:
                if kind in PYTHON:  # code is copied about: once, and what is held out stays unseen
                    once_only = np.sort(document) if split == "items" else document
                    digest = hashlib.md5(once_only.tobytes(), usedforsecurity=False).digest()
                    if digest in seen:
                        continue
                    seen.add(digest)
                if len(document):
                    kept += [document, [SEP]]
                    lengths.append(len(document) + 1)
            if kept:
                kept = np.concatenate(kept)
                out.write(kept.astype(np.uint32).tobytes())
                whole.update(kept.tobytes())
                if len(counts) < FIRST + len(table):
                    counts = np.pad(counts, (0, FIRST + 2 * len(table) - len(counts)))
                found = np.bincount(kept)
                counts[:len(found)] += found
            characters, replaced = characters + size, replaced + bad
            bar.update(size)
    if not lengths:
        raise InputError(f"--data {data}: no words in it")
    dtype = "uint16" if FIRST + len(table) <= 1 << 16 else "uint32"
    if dtype == "uint16":  # known only now: the words are few
        wide = np.memmap(ids_path, np.uint32, "r")
        with open(ids_path + ".16", "wb") as out:
            for start in range(0, len(wide), 1 << 24):
                wide[start:start + (1 << 24)].astype(np.uint16).tofile(out)
        os.replace(ids_path + ".16", ids_path)
    lengths = np.array(lengths)
    np.save(os.path.join(folder, "offsets.npy"), np.cumsum(lengths) - lengths)
    np.save(os.path.join(folder, "counts.npy"), counts[:FIRST + len(table)])
    with open(os.path.join(folder, "words.txt"), "w", **TEXT) as file:
        for word in table:
            file.write(word + "\n")  # a word never holds white space
            whole.update(word.encode("utf-8", "surrogatepass") + b"\n")
    meta = dict(data=data, split=split, documents=len(lengths), words=int(lengths.sum()) - len(lengths),
                distinct=len(table), characters=characters, replaced=replaced, dtype=dtype,
                digest=whole.hexdigest())
    with open(os.path.join(folder, "meta.json"), "w") as file:
        json.dump(meta, file, indent=1)


def cached(path, read=np.load, **options):
    """in: path; the function that reads it, and its options; err: InputError when the file is broken"""
    try:
        return read(path, **options)
    except Exception as error:  # whatever the libraries raise
        raise InputError(f"{path} is broken ({error}): remove its folder, and it is made again") from error


def read_text(path):
    """in: path; out: str"""
    with open(path, **TEXT) as file:
        return file.read()


class Corpus:
    """A prepared corpus: its ids on disk, its words, and the windows that are trained and evaluated on."""

    def __init__(self, folder):
        """in: folder, what prepare() gave"""
        self.folder = folder
        try:
            with open(os.path.join(folder, "meta.json")) as file:
                self.meta = json.load(file)
            self.ids = np.memmap(os.path.join(folder, "ids.bin"), self.meta["dtype"], "r")
            whole = len(self.ids) == self.meta["words"] + self.meta["documents"]
        except (OSError, ValueError, KeyError, TypeError):
            whole = False
        if not whole:
            raise InputError(f"{folder} is not a whole corpus: remove it, and it is prepared again")
        self.counts = cached(os.path.join(folder, "counts.npy"), mmap_mode="r")

    def words(self):
        """The distinct words, in the order of their ids from FIRST on: list[str]"""
        words = cached(os.path.join(self.folder, "words.txt"), read_text).split("\n")[:-1]
        if len(words) != len(self.counts) - FIRST:
            raise InputError(f"{self.folder} is not a whole corpus: remove it, and it is prepared again")
        return words

    def frequent(self, most):
        """in: most int; out: int64, places in words() of the most frequent, ties by first appearance"""
        return np.argsort(-self.counts[FIRST:], kind="stable")[:most]

    def pages(self):
        """out: train, held: int64, the numbers of the documents, one in ten of them held out at random"""
        order = hashing.random_order(self.meta["documents"], 90)
        cut = max(len(order) // 10, 1)
        return order[cut:], order[:cut]

    def windows(self, length):
        """Where the windows are; one is [CLS] and length - 1 ids from its start on.

        in:  length L
        out: train list of (start, end), windows may lie anywhere inside; held int64 (W,), held-out starts

        The text is cut into up to 20 stretches and the last fiftieth of each is held out: every part of the
        corpus is represented, and held-out text is whole passages. No training window reaches into it.
        """
        n, step = len(self.ids), length - 1
        edges = np.linspace(0, n, max(1, min(20, n // (100 * step))) + 1).astype(np.int64)
        train, held = [], []
        for start, end in zip(edges[:-1], edges[1:]):
            middle = end - max((end - start) // 50, step)
            if middle - start < 2 * step:
                raise InputError(f"the corpus has {n:,} words, too few for windows of {length}: "
                                 f"wanted {3 * step:,} at least; use a smaller --length or more text")
            train.append((start, middle))
            held += range(middle, end - step + 1, step)
        most = min(len(held), max(1, EVAL_WORDS // length))
        return train, np.array(held)[np.linspace(0, len(held) - 1, most).astype(int)]


def draw(seed, batch, length, vocabulary, rows):
    """The chances of a step, drawn for the whole batch and then cut: the same on one rank as on eight.

    in:  seed list[int]; batch, sequences in all; length L; vocabulary V, all ids; rows slice of the batch
    out: chance float32 (3, rows, L) uniform in [0, 1); strangers int64 (rows, L) uniform over the words
    """
    rng = np.random.default_rng(seed)
    chance = rng.random((3, batch, length), np.float32)
    strangers = rng.integers(FIRST, vocabulary, (batch, length))
    return torch.from_numpy(chance[:, rows]), torch.from_numpy(strangers[rows])


class Batches:
    """The windows and chances of a step: a function of (seed, step), cut to the rows asked for."""

    def __init__(self, corpus, length, batch, vocabulary, seed):
        """in: corpus; length L; batch, sequences in all; vocabulary V, all ids, the specials' too; seed"""
        self.ids, self.length, self.batch = corpus.ids, length, batch
        self.vocabulary, self.seed, self.epoch, self.words = vocabulary, seed, None, length - 1
        train, self.held = corpus.windows(length)
        step = length - 1
        # one window fewer a stretch than would fit: each epoch shifts all by a number of words of its own
        self.starts = np.concatenate([np.arange(a, b - 2 * step + 1, step) for a, b in train])
        self.steps_per_epoch = len(self.starts) // batch
        if not self.steps_per_epoch:
            raise InputError(f"the corpus gives {len(self.starts):,} windows of {length}, less than one "
                             f"batch of {batch}: use a smaller --batch or --length, or more text")

    def step(self, step, rows):
        """in: step int; rows slice of 0 .. batch; out: ids int64 (rows, L), then what draw() gives"""
        epoch, place = divmod(step, self.steps_per_epoch)
        if epoch != self.epoch:
            rng = np.random.default_rng([self.seed, 1, epoch])
            self.epoch, self.shift = epoch, rng.integers(self.length - 1)
            self.order = rng.permutation(len(self.starts))
        chosen = self.order[place * self.batch:(place + 1) * self.batch][rows]
        drawn = draw([self.seed, 2, step], self.batch, self.length, self.vocabulary, rows)
        return self.read(self.starts[chosen] + self.shift), *drawn

    def held_out(self, rows):
        """in: rows slice of the held-out windows; out: as step(), the same in every run"""
        drawn = draw([0, 3], len(self.held), self.length, self.vocabulary, rows)
        return self.read(self.held[rows]), *drawn

    def read(self, starts):
        """in: starts (B,); out: int64 (B, L), [CLS] and L-1 ids"""
        ids = np.full((len(starts), self.length), CLS, np.int64)
        for row, start in zip(ids, starts):
            row[1:] = self.ids[start:start + self.length - 1]
        return torch.from_numpy(ids)


class Pages:
    """Sets instead of text: segments of pages, a function of (seed, step) as Batches are. [SB §3.1]

    A segment is a run of at most L items of one page, wherever it begins; PAD fills up shorter ones.
    Pages of one item have nothing to say.
    """

    def __init__(self, corpus, length, batch, vocabulary, seed, known=None):
        """in: as Batches; known bool by id of the corpus: the others are left out, None: all are known"""
        self.length, self.batch, self.vocabulary = length, batch, vocabulary
        self.seed, self.epoch = seed, None
        offsets = np.append(cached(os.path.join(corpus.folder, "offsets.npy")), len(corpus.ids))
        self.ids, self.first, self.size = corpus.ids, offsets[:-1], np.diff(offsets) - 1
        if known is not None:
            kept = known[corpus.ids] & (corpus.ids >= FIRST)
            self.ids, before = corpus.ids[kept], np.append(0, np.cumsum(kept))
            self.first, self.size = before[offsets[:-1]], np.diff(before[offsets])
        self.train, held = (pages[self.size[pages] > 1] for pages in corpus.pages())
        self.steps_per_epoch = len(self.train) // batch
        if not self.steps_per_epoch or not len(held):
            raise InputError(f"the corpus gives {len(self.train):,} pages with two items or more to train "
                             f"on, and {len(held):,} held out, of {len(self.size):,} pages in all: wanted a "
                             f"batch of {batch} and one page. Names stand between tabs or spaces, a table "
                             f"has a page and an item a row (--field); or a smaller --batch, or more pages")
        held = held[:EVAL_PAGES]
        self.held = held[np.argsort(self.size[held], kind="stable")]  # batches of a size have little PAD
        self.words = np.minimum(self.size[self.train], length).mean()

    def pages(self, step):
        """in: step int; out: int64 (batch,), the numbers of its pages"""
        epoch, place = divmod(step, self.steps_per_epoch)
        if epoch != self.epoch:
            rng = np.random.default_rng([self.seed, 1, epoch])
            self.epoch, self.order = epoch, rng.permutation(self.train)
        return self.order[place * self.batch:(place + 1) * self.batch]

    def by_size(self, step, passes):
        """in: step; passes, slices in a row; out: their rows dealt anew, pages of a size together"""
        rows = np.arange(passes[0].start, passes[-1].stop)
        rows = rows[np.argsort(np.minimum(self.size[self.pages(step)[rows]], self.length), kind="stable")]
        return np.split(rows, [part.start - passes[0].start for part in passes[1:]])

    def step(self, step, rows):
        """in: step int; rows of 0 .. batch; out: ids int64 (rows, at most L), then what draw() gives"""
        pages, chances = self.pages(step), np.random.default_rng([self.seed, 4, step]).random(self.batch)
        ids = self.read(pages[rows], chances[rows])
        chance, strangers = draw([self.seed, 2, step], self.batch, self.length, self.vocabulary, rows)
        return ids, chance[..., :ids.shape[1]], strangers[:, :ids.shape[1]]

    def held_out(self, rows):
        """One item of each held-out page is asked for: its chance says "masked", the others' "left alone".

        in:  rows slice of the held-out pages; out: as step(), the same in every run
        """
        chances = np.random.default_rng([0, 3]).random((2, len(self.held)))[:, rows]
        ids = self.read(self.held[rows], chances[0])
        chance = torch.ones(3, *ids.shape)
        asked = torch.from_numpy(chances[1] * np.minimum(self.size[self.held[rows]], self.length)).long()
        chance[:2, torch.arange(len(ids)), asked] = 0.0
        return ids, chance, torch.full_like(ids, FIRST)

    def read(self, pages, chances):
        """in: pages (B,), chances float (B,) in [0, 1): where each begins; out: int64 (B, longest)"""
        ids = np.full((len(pages), min(self.size[pages].max(), self.length)), PAD, np.int64)
        for row, page, chance in zip(ids, pages, chances):
            n = min(self.size[page], self.length)
            start = self.first[page] + int(chance * (self.size[page] - n + 1))
            row[:n] = self.ids[start:start + n]
        return torch.from_numpy(ids)


def build_encoder(args, config, corpus):
    """The way from words to codes that the flags ask for, fitted to the corpus where it needs one.

    in:  args; config Config; corpus
    out: Encoder; codes (V, C), computed once and kept beside the corpus; targets (V, k), the hashes that are
         predicted where they are not the codes, else None
    """
    form, bpe, lsh = FORM[args.emb], None, None
    sketch = (args.hashes, args.buckets, args.hash_seed) if args.hashes else None
    if form == "weighted":
        sketch += (config.weights,)
    if args.split in PIECES:
        path = os.path.join(corpus.folder, "bpe.json")
        bpe = cached(path, lambda path: PIECES[args.split](read_text(path)))
    if form in ("row", "digest"):
        words = [] if bpe else corpus.words()
        vocabulary = bpe.pieces if bpe else [words[i] for i in corpus.frequent(args.vocab)]
        encoder = Encoder(form, split=args.split, bpe=bpe, vocabulary=vocabulary,
                          bloom=build_bloom(args, corpus, vocabulary) if form == "digest" else None)
        return encoder, torch.from_numpy(encoder.codes()), None
    if args.hash == "lsh" and form in ("index", "chunks", "bits"):
        def fit(path):
            counts = dict(zip(corpus.words(), corpus.counts[FIRST:].tolist()))
            with open(path, "w") as file:
                json.dump(hashing.NgramLSH.fit(counts, args.features).grams, file)

        path = once(os.path.join(corpus.folder, f"ngrams-{args.features}.json"), fit)
        lsh = hashing.NgramLSH(cached(path, lambda path: json.loads(read_text(path))), args.features,
                               args.hash_seed)
    encoder = Encoder(form, args.hash, args.split, args.bits, args.chunk, config.rows, args.key, lsh, bpe,
                      sketch=sketch)

    def kept(about, special, hashes, slow=False):
        """in: what names the array; its first rows; function of words; slow: worth processes; out: tensor"""
        def make(path):
            words = corpus.words()
            parts = [words[i:i + 20_000] for i in range(0, len(words), 20_000)]
            with contextlib.ExitStack() as stack, open(path, "wb") as out:
                many = slow and len(parts) > 1
                run = stack.enter_context(multiprocessing.Pool(cores())).imap if many else map
                shape = (FIRST + len(words), special.shape[1])
                header = dict(descr=special.dtype.str, fortran_order=False, shape=shape)
                np.lib.format.write_array_header_1_0(out, header)
                special.tofile(out)
                for codes in tqdm(run(hashes, parts), "hashing words", len(parts), disable=args.quiet):
                    codes.tofile(out)

        path = once(os.path.join(corpus.folder, f"codes-{fingerprint(about)}.npy"), make)
        return torch.from_numpy(cached(path))

    about = [form, args.hash, args.bits, args.chunk, config.rows, args.key, lsh and (lsh.features, lsh.seed)]
    codes = kept(about + [sketch] * (form in ("sketch", "weighted")), encoder.special_codes(),
                 encoder.hash_words, slow=lsh and form == "index")  # the rest is done in seconds
    if args.objective != "hash-mlm" or form == "sketch":
        return encoder, codes, None
    specials = np.zeros((FIRST, args.hashes), np.int32)
    return encoder, codes, kept(["targets", sketch[:3], args.key], specials, encoder.targets)


def build_bloom(args, corpus, vocabulary):
    """in: args with alpha, hashes, hash_seed, coherent; corpus; vocabulary list[str]; out: BloomMap"""
    n, about = len(vocabulary), (args.alpha, args.hashes, args.hash_seed)
    if not args.coherent:
        return hashing.BloomMap(n, *about)
    place = {word: i for i, word in enumerate(vocabulary)}
    number = np.array([-1] * FIRST + [place.get(word, -1) for word in corpus.words()])

    def make(path):
        train, _ = corpus.pages()  # of held-out pages nothing is known
        offsets = np.append(cached(os.path.join(corpus.folder, "offsets.npy")), len(corpus.ids))
        pages = [number[corpus.ids[offsets[i]:offsets[i + 1]]] for i in train]
        pages = [page[page >= 0] for page in pages]
        if not sum(map(len, pages)):
            raise InputError("--coherent needs pages to learn from, and all are held out")
        made = hashing.coherent_map(np.concatenate(pages), np.array([len(page) for page in pages]), n,
                                    args.alpha, args.hashes, args.coherent, seed=args.hash_seed)
        with open(path, "wb") as file:
            np.save(file, made.members.reshape(args.hashes, -1)[:, :n])

    name = f"coherent-{fingerprint([n, *about, args.coherent])}.npy"
    return hashing.BloomMap(n, *about, orders=cached(once(os.path.join(corpus.folder, name), make)))


# ---------------------------------------------------------------------------------------------------------
# Objectives: a corruption, a loss, a report


def corrupt_sr(ids, chance, strangers, p=0.10):
    """Shuffle some words among themselves, replace others: which is which? [HF §3.6] [SR §3]

    in:  ids int64 (B, L); chance float (3, B, L) uniform in [0, 1); strangers int64 (B, L), words of the
         corpus, each distinct word equally likely; p
    out: inputs (B, L); labels (B, L): 0 intact, 1 shuffled, 2 random, IGNORE at specials

    A word is chosen for shuffling with p = 10 %, and of the remaining 90 % again 10 % = 9 % become random.
    The chosen words of a row trade places:

        ids        a b c d e f        chosen   . x . x . x          places in order    1 3 5 | 0 2 4
                                                                    places at random   5 1 3 | 0 2 4
        inputs     a f c b e d   <-   place 1 gets what stood at 5, place 3 what stood at 1, ...
    """
    ordinary = ids >= FIRST
    shuffled = ordinary & (chance[0] < p)
    random = ordinary & ~shuffled & (chance[1] < p)
    place = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    # both orders list the chosen places first and then the others alike, so the others trade with themselves
    in_order = torch.where(shuffled, place - ids.shape[1], place).argsort(dim=1, stable=True)
    at_random = torch.where(shuffled, chance[2], (place + 1).to(chance.dtype)).argsort(dim=1, stable=True)
    inputs = ids.scatter(1, in_order, ids.gather(1, at_random))
    inputs = torch.where(random, strangers, inputs)
    # subtle: labelled by what changed, not by what was chosen: "the" for "the" is no shuffle
    labels = torch.where(inputs == ids, 0, torch.where(shuffled, 1, 2))
    return inputs, labels.masked_fill(~ordinary, IGNORE)


def loss_sr(model, inputs, labels):
    """in: model, inputs and labels (B, L); out: loss summed over scored words; int64 (9,), true × guess"""
    logits, labels = model(inputs).flatten(0, 1).float(), labels.flatten()  # (B·L, 3), (B·L,)
    loss = F.cross_entropy(logits, labels, ignore_index=IGNORE, reduction="sum")
    scored = labels != IGNORE
    return loss, torch.bincount(labels[scored] * 3 + logits.argmax(1)[scored], minlength=9)


def report_sr(counts):
    """in: counts (9,); out: accuracy, what the commonest class would have, F1 by class and its mean"""
    table = np.asarray(counts, float).reshape(3, 3)
    right, true, guessed, total = np.diag(table), table.sum(1), table.sum(0), max(table.sum(), 1)
    f1 = 2 * right / np.maximum(true + guessed, 1)
    report = dict(accuracy=right.sum() / total, majority=true.max() / total, f1_intact=f1[0],
                  f1_shuffled=f1[1], f1_random=f1[2], macro_f1=f1.mean())
    return {name: float(value) for name, value in report.items()}


def corrupt_mlm(ids, chance, strangers, p=0.15):
    """Hide 15 % of the words. [BERT §3.1]

    in:  as corrupt_sr
    out: inputs (B, L); labels (B, L): the word that stood there, IGNORE where it was not chosen

    Of the chosen, 80 % become [MASK]; half of the remaining 20 % = 10 % any word of the vocabulary; the last
    10 % stay, so that the model cannot trust the words it sees.
    """
    chosen = (ids >= FIRST) & (chance[0] < p)
    masked = chosen & (chance[1] < 0.8)
    random = chosen & ~masked & (chance[2] < 0.5)
    inputs = torch.where(random, strangers, ids.masked_fill(masked, MASK))
    return inputs, ids.masked_fill(~chosen, IGNORE)


def corrupt_items(ids, chance, strangers, p=0.15):
    """As corrupt_mlm, but of each row at least one item is chosen: the one with the least chance. [SB §3.1]

    A page of five items would come without a question in 0.85^5 = 44 % of its turns.
    """
    least = chance[0].masked_fill(ids < FIRST, 2.0).argmin(1, keepdim=True)
    chosen = chance[:1].scatter(2, least.unsqueeze(0), 0.0)
    return corrupt_mlm(ids, torch.cat([chosen, chance[1:]]), strangers, p)


def masked(labels):
    """in: labels (B, L); out: int64 (M,), places of what is asked for in the flattened batch"""
    return (labels.flatten() != IGNORE).nonzero().squeeze(1)


def given(model, inputs, at):
    """What stands in a set already, for each place that is asked for: it is no answer, a set holds it once.

    in:  model; inputs (B, L); at int64 (M,), places in the flattened batch
    out: int64 (M, L), items from 0 on, -1 for specials; (0, L) for text, where a word may come again
    """
    if getattr(model, "module", model).config.order:
        return inputs[:0]
    return (inputs[at // inputs.shape[1]] - FIRST).clamp(min=-1)


def loss_mlm(model, inputs, labels):
    """in: model, inputs and labels (B, L); out: loss summed over masked words; int64 (4,), see report_mlm,
    which are counted in evaluation alone
    """
    at = masked(labels)
    logits = model(inputs, at=at).float()  # (M, N), never (B, L, N)
    rows = labels.flatten()[at] - 1  # the row of an ordinary id is id - 1: WORD has none, see hashing.Encoder
    loss, counts = F.cross_entropy(logits, rows, reduction="sum"), torch.zeros(4, dtype=torch.int64)
    if not model.training:
        items = logits[:, FIRST - 1:]  # no special is ever an answer
        if len(left_out := given(model, inputs, at)):
            items = F.pad(items, (1, 0)).scatter(1, left_out + 1, -torch.inf)[:, 1:]  # -1 has a column, too
        hit = items.topk(min(max(RECALL), items.shape[1])).indices + FIRST - 1 == rows.unsqueeze(1)
        counts = torch.stack([*(hit[:, :k].sum() for k in RECALL), torch.tensor(len(at), device=at.device)])
    return loss, counts.to(at.device)


RECALL = (1, 10, 20)


def report_mlm(counts):
    """in: counts (4,): words among the best 1, 10, 20, and all; out: recall at masked positions"""
    return {f"rec@{k}": float(count) / max(float(counts[-1]), 1) for k, count in zip(RECALL, counts)}


def loss_sampled(model, inputs, labels):
    """Masked words against a few thousand others instead of all of them. [SB §3.3]

    in:  as loss_mlm
    out: as loss_mlm; in evaluation loss_mlm itself, over all rows, the few of the specials too

    Rows are drawn with q(row) about 1 / rank, as words come. Taking log(S q) off a drawn row's logit makes
    the sum of exp an unbiased estimate of that over all rows but the right one, which is there anyway; a draw
    that hits the right one is left out.
    """
    if not model.training:
        return loss_mlm(model, inputs, labels)
    at = masked(labels)
    rows = labels.flatten()[at] - 1  # (M,)
    total = getattr(model, "module", model).config.rows - (FIRST - 1)
    drawn, logq = log_uniform(SAMPLES, total, at.device)
    drawn = drawn + FIRST - 1  # (S,)
    logits = model(inputs, at=at, rows=torch.cat([rows, drawn])).float()  # (M, M + S)
    right, others = logits[:, :len(at)].diagonal(), logits[:, len(at):] - (logq + math.log(SAMPLES))
    others = others.masked_fill(drawn == rows.unsqueeze(1), -torch.inf)
    loss = (torch.cat([right.unsqueeze(1), others], 1).logsumexp(1) - right).sum()
    return loss, torch.zeros(4, dtype=torch.int64, device=at.device)


def log_uniform(count, n, device):
    """Draw numbers that fall off as 1 / rank: q(i) = log((i + 2) / (i + 1)) / log(n + 1).

    in:  count S; n; out: drawn int64 (S,) in 0 .. n-1; their log q, float (S,)
    """
    drawn = (torch.rand(count, device=device, dtype=torch.float64) * math.log(n + 1)).exp().long() - 1
    drawn = drawn.clamp(0, n - 1)
    # subtle: in float32 the quotient (i + 2) / (i + 1) of a rare row is 1
    return drawn, ((1 / (drawn.double() + 1)).log1p() / math.log(n + 1)).log().float()


def loss_hash(model, inputs, labels):
    """The hashes of masked words or items, each among its buckets; no word is ever scored. [SB §2.4] [CM]

    in:  model with codes, of bloom a Bloom map; inputs and labels (B, L)
    out: loss summed over what is masked, of a word the mean over its hashes (for items the paper's sum over
         them divided by m, so that it compares with ln of the rows); int64 (6,), see report_hash. Words and
         items are looked for in evaluation alone.
    """
    net, at = getattr(model, "module", model), masked(labels)
    logits = model(inputs, at=at).float()  # (M, m, rows), of a sketch (M, k, R)
    words = labels.flatten()[at]
    codes = net.targets[words].long()  # (M, m)
    loss = F.cross_entropy(logits.flatten(0, 1), codes.flatten(), reduction="sum") / codes.shape[1]
    counts = torch.zeros(6, dtype=torch.int64, device=at.device)
    if not model.training and len(at):
        left_out = given(model, inputs, at)
        left_out = left_out if len(left_out) else None
        if net.bloom:
            search = functools.partial(beam_search, hash_logp(logits, net.bloom), net.bloom, max(RECALL),
                                       max(RECALL), exclude=left_out)
            hit, (_, _, certified, _) = search(rounds=None)[0] == (words - FIRST).unsqueeze(1), search()
            before = torch.where(hit.any(1), hit.byte().argmax(1), max(RECALL))  # ahead of the right one
        else:
            before = ranks(logits.log_softmax(-1), net.targets[FIRST:], words - FIRST, left_out)
            certified = torch.zeros_like(before)  # there is no beam
        right = (logits.argmax(-1) == codes).double().mean(1)  # (M,)
        counts = torch.stack([*((before < k).sum() for k in RECALL), certified.sum(), right.sum(),
                              torch.tensor(len(at), device=at.device)])
    return loss, counts


def ranks(logp, digests, words, exclude=None):
    """How many words score at least as much as the right one, itself not counted: ties go against it.

    in:  logp float (M, k, R); digests integer (V, k), of all words; words int64 (M,), the right ones; exclude
         int64 (M, E), words that do not count, -1 where there is none, or None
    out: int64 (M,)

    A score is a sum of k numbers, so all scores of some positions are one gather-and-add of whole rows.
    """
    M, k, R = logp.shape
    rows, out = digests.int() + R * torch.arange(k, dtype=torch.int32, device=digests.device), []
    for part in range(0, M, 128):
        table = logp[part:part + 128].flatten(1).T.contiguous()  # (k·R, 128)
        scores = F.embedding_bag(rows, table, mode="sum")  # (V, 128)
        right = words[part:part + 128]
        least = scores.gather(0, right.unsqueeze(0))
        if exclude is not None:
            scores = F.pad(scores, (0, 0, 1, 0)).scatter(0, exclude[part:part + 128].T + 1, -torch.inf)[1:]
            scores.scatter_(0, right.unsqueeze(0), least)
        out.append((scores >= least).sum(0) - 1)
    return torch.cat(out)


def report_hash(counts, beam=True):
    """in: counts (6,): items among the best 1, 10, 20; searches of which a first beam of 20 was certain;
         items' shares of hashes that are right; all; beam, False: there were none

    out: recall among all items or words of the corpus, every search taken on until it is certain; of items
         the share of those that were with a beam of 20; the share of hashes whose likeliest row is right
    """
    n = max(float(counts[-1]), 1)
    certified = {"certified": float(counts[3]) / n} if beam else {}
    return report_mlm(counts) | certified | {"hashes_right": float(counts[4]) / n}


# corruption, loss, report, and how many counts it reports
OBJECTIVES = {"sr": (corrupt_sr, loss_sr, report_sr, 9), "mlm": (corrupt_mlm, loss_mlm, report_mlm, 4),
              "sampled": (corrupt_mlm, loss_sampled, report_mlm, 4),
              "hash-mlm": (corrupt_mlm, loss_hash, report_hash, 6)}


# ---------------------------------------------------------------------------------------------------------
# The run


def resolve(args, world):
    """Fill in what the flags leave open, from the preset and each other; complain before the work begins.

    in:  args; world, number of ranks
    out: the model's Config as far as it is known before the corpus is
    """
    recipe, shape = RECIPES[args.preset], dict(PRESETS[args.preset])
    sets = args.split == "items" or not args.split and (not shape.get("order", True) or args.emb == "bloom")
    args.emb = args.emb or shape.get("emb", "bloom" if sets else "proj")
    args.split = "items" if sets else args.split or ("bpe" if args.emb == "lookup" else "regex")
    args.data = args.data or ("python-names" if sets else "python")
    if args.objective is None:  # the preset's, or, where that does not go with the embedding, what does
        head, kind = shape.get("head", "sr"), "mlm" if args.emb == "lookup" else "hash-mlm"
        args.objective = kind if sets or head != "sr" or FORM[args.emb] in ("digest", "sketch") else "sr"
    if args.emb == "bloom":
        args.alpha, args.hashes = args.alpha or recipe.get("alpha", 25), args.hashes or 2
    elif given := [flag for flag in ("alpha", "coherent") if getattr(args, flag)]:
        raise InputError(f"--{given[0]} is of --emb bloom, which was not asked for")
    blocks = FORM[args.emb] == "sketch" or args.objective == "hash-mlm" and args.emb != "bloom"
    used = dict(hashes=blocks or args.emb in ("bloom", "weighted"), buckets=blocks,
                weights=args.emb == "weighted")
    for flag, usual in dict(hashes=5, buckets=500, weights=50_000).items():
        if used[flag]:
            setattr(args, flag, getattr(args, flag) or usual)
        elif getattr(args, flag):
            raise InputError(f"--{flag} is of {SKETCHES[flag]}, which was not asked for")
    if args.objective != "sr":
        args.mask = recipe.get("mask", 0.15) if args.mask is None else args.mask
        if not 0 < args.mask < 1:
            raise InputError(f"--mask {args.mask}: wanted more than 0 and less than 1")
    elif given := [flag for flag in ("mask", "tied") if getattr(args, flag) is not None]:
        raise InputError(f"--{given[0]} is of the objectives that hide words, not of sr")
    if args.vocab is None and not sets:  # of sets all items
        args.vocab = (shape["rows"] - (FIRST - 1) if {"emb", "rows"} <= shape.keys() else
                      1_000_000 if args.split == "phrases" else 50_000)
    for name in ("batch", "micro", "steps"):
        setattr(args, name, recipe[name] if getattr(args, name) is None else getattr(args, name))
    if args.warmup is None:  # of a short run, a tenth
        args.warmup = min(recipe["warmup"], args.steps // 10)
    if args.lr is None:
        args.lr = recipe["lr" if args.objective == "sr" else "lr_mlm"]
    args.beta2 = recipe["beta2"]
    # out/proj-lsh, out/emb-md5-bpe, out/lookup-bpe-mlm
    hashed = FORM[args.emb] in ("index", "chunks", "bits")
    name = [args.emb] + [args.hash] * hashed + [args.split] * (args.split != "regex")
    usual = "hash-mlm" if FORM[args.emb] in ("digest", "sketch") else "sr"
    name += [args.objective] * (args.objective != usual)
    name += [] if args.tied is None else ["tied" if args.tied else "untied"]
    head = "mlm" if args.objective == "sampled" else args.objective
    shape |= dict(emb=args.emb, bits=args.bits, chunk=args.chunk, head=head, order=not sets)
    if sets:
        shape["length"] = min(shape["length"], 32)
    if args.width and not args.ffn:
        args.ffn = 4 * args.width
    for flag in ("layers", "width", "heads", "ffn", "length", "rows", "dropout", "tied", "attn", *SKETCHES,
                 *LSH):
        if getattr(args, flag) is not None:
            shape[flag] = getattr(args, flag)
    if args.field and not sets:
        raise InputError("--field is of pages, which --split items reads")
    if args.coherent and (args.coherent > args.hashes or not sets):
        raise InputError(f"--coherent {args.coherent}: wanted --split items and at most {args.hashes} maps")
    if sets and shape.get("attn") == "lsh":
        shape.setdefault("lsh_pairs", "all")
    if shape.get("attn") == "lsh":
        name.append("lsh-attention")
    elif given := [flag for flag in LSH if getattr(args, flag) is not None]:
        raise InputError(f"--{given[0]} is of --attn lsh, which was not asked for")
    args.out = args.out or os.path.join("out", "-".join(name))
    if args.key and not (blocks or args.emb == "weighted" or hashed and args.hash == "md5"):
        raise InputError("--key is of MD5, and here nothing is hashed with it: --hash md5")
    form = FORM[args.emb]
    Encoder(form, args.hash, bits=args.bits, chunk=args.chunk, vocabulary=[])  # has complaints of its own
    config = Config(**shape)
    # rotations of a vector of F features give F hyperplanes, so it must be as long as there are bits or rows
    least = dict(index=shape.get("rows", Config.rows), chunks=args.bits, bits=args.bits).get(form, 0)
    args.features = max(args.features, least)
    if args.hash == "lsh" and hashed and args.features > hashing.NgramLSH.MOST:
        raise InputError(f"--hash lsh has at most {hashing.NgramLSH.MOST:,} n-gram features, and so at most "
                         f"as many bits and rows; here it would need {args.features:,}")
    if args.batch % world:
        raise InputError(f"a batch of {args.batch} sequences cannot be shared evenly by {world} ranks: "
                         f"--batch {max(args.batch // world, 1) * world} can")
    return config


class Run:
    """One run on one rank: the model, its data, its optimizer, and what happens in a step."""

    # What makes a run itself: a checkpoint in which one of these differs belongs to another run.
    IDENTITY = ("split", "emb", "hash", "bits", "chunk", "key", "features", "hash_seed", "vocab",
                "objective", "batch", "steps", "lr", "warmup", "decay", "clip", "seed", "alpha", "hashes",
                "coherent", "mask", "buckets", "weights")

    def __init__(self, args):
        """in: args of parser(); every rank makes one"""
        self.rank, self.world, local = torchrun_env()
        self.args, config = args, resolve(args, self.world)
        self.device, self.dtype, compile = choose_machine(args, local)
        args.quiet = self.rank > 0
        self.corpus = Corpus(prepare(args.data, args.split, args.cache, args.vocab, args.quiet, args.field))
        self.encoder, codes, targets = build_encoder(args, config, self.corpus)
        self.config = config = dataclasses.replace(config, rows=self.encoder.rows)
        self.corrupt, self.loss_of, self.report, self.reported = OBJECTIVES[args.objective]
        if args.objective == "hash-mlm":
            self.report = functools.partial(report_hash, beam=bool(self.encoder.bloom))

        torch.manual_seed(args.seed)
        self.model = self.wrapped = Model(config).to(self.device)
        self.model.set_codes(codes, self.encoder.bloom, targets)
        self.remap, words = None, len(codes) - FIRST
        if self.encoder.fixed:  # the corpus's ids -> ids of the vocabulary, UNK for the rest
            ids = np.concatenate([np.arange(FIRST), self.encoder.ids(self.corpus.words())])
            self.remap = torch.from_numpy(ids.astype(np.int64)).to(self.device)
            found = self.remap[FIRST:].unique()
            self.found = found[found >= FIRST]  # pieces that never occur would give themselves away
            words = len(self.found)
        about = self.corpus, config.length, args.batch, FIRST + words, args.seed
        if config.order:
            self.batches = Batches(*about)
        else:  # of pages what the vocabulary lacks is left out
            known = None if self.remap is None else (self.remap != UNK).cpu().numpy()
            known = None if known is None or known[FIRST:].all() else known
            self.batches, self.corrupt = Pages(*about, known), corrupt_items
        if args.objective != "sr":
            self.corrupt = functools.partial(self.corrupt, p=args.mask)
        cuda = self.device.type == "cuda"
        self.optimizer = torch.optim.AdamW(parameter_groups(self.model, args.decay), lr=args.lr, eps=1e-8,
                                           betas=(0.9, args.beta2), fused=cuda or self.device.type == "cpu")
        self.path, self.step = os.path.join(args.out, "ckpt.pt"), 0
        self.identity = {name: getattr(args, name) for name in self.IDENTITY}
        self.identity |= dict(config=dataclasses.asdict(config), corpus=self.corpus.meta["digest"],
                              bloom=self.encoder.bloom and self.encoder.bloom.check())
        self.resume()
        if self.world > 1:
            dist.init_process_group("nccl" if cuda else "gloo", device_id=self.device if cuda else None)
            found = [None] * self.world
            dist.all_gather_object(found, (self.dtype, self.step))
            self.dtype = found[0][0]  # each rank tried: agree on one
            steps = [step for _, step in found]
            if len(set(steps)) > 1:
                raise InputError(f"the ranks found checkpoints of steps {steps} in {args.out}: wanted a "
                                 f"folder that all nodes see")

        share = args.batch // self.world  # of each step's sequences, this rank's are share·rank and on
        self.micro, end = min(args.micro, share), share * (self.rank + 1)
        self.passes = [slice(i, min(i + self.micro, end)) for i in range(end - share, end, self.micro)]
        self.compiled = compile and try_compile(self.model, self.dry_run)
        if self.world > 1:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)  # torch 2.11 does not have the newer name
                self.wrapped = torch.nn.parallel.DistributedDataParallel(
                    self.model, device_ids=[self.device.index] if cuda else None,
                    broadcast_buffers=False)  # codes and planes: large, and the same everywhere
            # subtle: after its first pass DDP packs gradients anew, and more than two ranks sum in another
            # order. For a run that goes on to sum as one that never stopped, this pass is none of training
            self.dry_run()

    def resume(self):
        """Go on where the folder's checkpoint stands, if there is one and it is of this very run."""
        os.makedirs(self.args.out, exist_ok=True)
        if not os.path.exists(self.path):
            return
        saved = load_checkpoint(self.path)
        there, here = dict(saved.get("run", {})), dict(self.identity)
        there |= dataclasses.asdict(saved["config"])  # as this code reads it: it may have new fields
        here |= here.pop("config")
        differs = [f"{k} is {there.get(k)} there, {here[k]} here" for k in here if there.get(k) != here[k]]
        if differs:
            raise ConfigError(f"{self.path} comes from another run ({'; '.join(differs)}): "
                              f"name another --out, or remove that file")
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.step = saved["step"]
        if self.args.dtype == "auto":  # what was chosen once stays
            self.dtype = saved["dtype"]

    def corrupted(self, *batch):
        """in: ids, chance, strangers of Batches, on the CPU; out: inputs and labels (B, L) on the device"""
        ids, chance, strangers = (t.to(self.device, non_blocking=True) for t in batch)
        if self.remap is not None:
            ids, strangers = self.remap[ids], self.found[strangers - FIRST]
        return self.corrupt(ids, chance, strangers)

    def load(self, step):
        """in: step; out: list of (inputs, labels), one for each pass of this rank"""
        # sets of all sizes: small ones together need little filling up
        passes = self.passes if self.config.order else self.batches.by_size(step, self.passes)
        return [self.corrupted(*self.batches.step(step, rows)) for rows in passes]

    def autocast(self):
        """Matrix products in self.dtype; what needs range stays in float32"""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.dtype == "bfloat16")

    def dry_run(self):
        """A pass forward and back that changes nothing."""
        try:
            with self.autocast():
                loss, _ = self.loss_of(self.wrapped, *self.load(0)[0])
            loss.backward()
        finally:
            self.model.zero_grad(set_to_none=True)

    def sum_over_ranks(self, tensor):
        """in: tensor; out: the same, summed in place over all ranks"""
        if self.world > 1:
            dist.all_reduce(tensor)
        return tensor

    def gradients(self, passes, scored):
        """Forward and backward for one step.

        in:  passes, what load() gave; scored float tensor, the number of scored positions in the whole batch
        out: the batch's mean loss, 0-dim tensor, the same on all ranks; the gradients lie in the parameters
        """
        total = torch.zeros((), device=self.device)
        for i, (inputs, labels) in enumerate(passes):
            last = i == len(passes) - 1
            with contextlib.nullcontext() if last or self.world == 1 else self.wrapped.no_sync():
                with self.autocast():
                    loss, _ = self.loss_of(self.wrapped, inputs, labels)
                # subtle: by the global count, else short passes weigh too much; DDP averages, so times world
                (loss * (self.world / scored)).backward()
            total += loss.detach()
        return self.sum_over_ranks(total) / scored

    @torch.no_grad()
    def evaluate(self):
        """out: dict of eval_loss and the objective's report, over all held-out windows of all ranks"""
        self.model.eval()
        mine = np.array_split(np.arange(len(self.batches.held)), self.world)[self.rank]
        total = torch.zeros(2 + self.reported, dtype=torch.float64, device=self.device)
        for start in range(0, len(mine), self.micro):
            part = mine[start:start + self.micro]
            inputs, labels = self.corrupted(*self.batches.held_out(slice(part[0], part[-1] + 1)))
            with self.autocast():
                loss, counts = self.loss_of(self.model, inputs, labels)
            total += torch.cat([torch.stack([loss, (labels != IGNORE).sum()]).double(), counts.double()])
        self.model.train()
        loss, scored, *counts = self.sum_over_ranks(total).tolist()
        return dict(eval_loss=loss / max(scored, 1), **self.report(counts))

    def save(self):
        """Write the checkpoint (rank 0 does); infer.py looks for neighbours among the words that go along."""
        if self.rank == 0:
            if not hasattr(self, "words"):
                words = self.corpus.words()
                self.words = [words[i] for i in self.corpus.frequent(50_000)]
            save_checkpoint(self.path, self.model, self.encoder.state(), step=self.step, dtype=self.dtype,
                            optimizer=self.optimizer.state_dict(), run=self.identity, words=self.words)

    def unwrap(self):
        """Let go of the wrapper that averages gradients, before the process group ends."""
        # subtle: as the group's last owner it would wait, holding Python's lock, for a thread of it that may
        # be waiting for that lock: once, on a busy machine, a rank hung at its very end
        self.wrapped = self.model
        gc.collect()

    def log(self, **row):
        """Append a line to log.jsonl (rank 0 does)"""
        if self.rank == 0:
            row = {k: float(f"{v:.6g}") if isinstance(v, float) else v for k, v in row.items()}
            with open(os.path.join(self.args.out, "log.jsonl"), "a") as file:
                file.write(json.dumps(row) + "\n")

    def trim_log(self):
        """Forget the lines of steps that the checkpoint does not know: they will be run again."""
        path, lines = os.path.join(self.args.out, "log.jsonl"), []
        if self.step and os.path.exists(path):
            with open(path) as file:
                for line in file:
                    with contextlib.suppress(ValueError, KeyError, TypeError):  # half a line, or a broken one
                        lines += [line] * (json.loads(line)["step"] <= self.step and line.endswith("\n"))
        with open(path + ".tmp", "w") as file:  # beside it, so that a crash loses no line
            file.writelines(lines)
        os.replace(path + ".tmp", path)

    def met(self):
        """out: str, a line on LSH attention: how many pairs of a held-out batch collide, and what is done"""
        c = self.config
        if c.attn == "full" or not c.layers:
            return ""
        self.model.eval()
        some = slice(self.micro) if c.order else slice(-self.micro, None)  # of sets the largest come last
        inputs, _ = self.corrupted(*self.batches.held_out(some))
        with self.autocast():
            layers = self.model.collisions(inputs)
        self.model.train()
        found = ", ".join(f"{100 * share:.1f} % of pairs collide, computed by {how}" for share, how in layers)
        return (f"attention   lsh: {c.lsh_hashes} × {c.lsh_bands} planes to {c.lsh_buckets} buckets, "
                f"fill {c.lsh_fill}, pairs {c.lsh_pairs}, no dropout of weights; by layer {found}\n")

    def introduce(self, loss):
        """Say what is about to run, and what theory expects of the loss; in: loss at this step."""
        a, c, meta, counts = self.args, self.config, self.corpus.meta, count_parameters(self.model)
        guess, classes, prior = "ln 3", 3, np.array([0.81, 0.10, 0.09])
        bloom, kind = self.encoder.bloom, "words" if c.order else "items"
        if a.objective != "sr":
            classes = c.rows if self.remap is not None else c.buckets
            guess, prior = f"ln {classes:,}", self.corpus.counts[FIRST:]
            if self.remap is not None:
                ids = self.remap.cpu().numpy()[FIRST:]
                prior = np.bincount(ids, prior, FIRST + len(self.encoder.words))[FIRST:]
            prior = prior / prior.sum()
        knowing = entropy(prior)
        if a.objective == "hash-mlm":
            digests = bloom.digest if bloom else self.model.targets[FIRST:].cpu().numpy()
            knowing = np.mean([entropy(np.bincount(column, prior)) for column in digests.T])
        if bloom:
            kind = f"{bloom.n_items:,} items in {bloom.m} maps of {bloom.buckets:,} buckets of {bloom.alpha}"
        replaced = f", {meta['replaced']:,} characters not UTF-8" if meta["replaced"] else ""
        hashed = f" of {a.hash}" if self.encoder.lsh or FORM[a.emb] in ("index", "chunks", "bits") else ""
        if FORM[a.emb] == "sketch":
            kind += f" by {c.hashes} × {c.buckets} rows"
        pages = ""
        if not c.order:
            first = self.batches.read(self.batches.train[:1], np.zeros(1))[0, :5]
            words = self.corpus.words()
            names = [words[i - FIRST] for i in first.tolist()]
            pages = f"pages       {self.batches.words:.1f} items on average; one: {', '.join(names)}\n"
        print(f"model       {a.emb}{hashed}, split {a.split}, objective {a.objective}; {c.layers} layers, "
              f"width {c.width}, {c.heads} heads, length {c.length}\n"
              f"parameters  {counts['total']:,}; to embed {kind} {counts['embedding']:,} "
              f"(PoEP {100 * counts['poep']:.2f} %), specials {counts['specials']:,}\n"
              f"corpus      {a.data}: {meta['words']:,} {'words' if c.order else 'items'}, "
              f"{meta['distinct']:,} distinct, {meta['documents']:,} documents{replaced}\n{pages}"
              f"batch       {a.batch} sequences = {self.world} ranks × {len(self.passes)} passes of "
              f"{self.micro} at most; {a.steps:,} steps = "
              f"{a.steps / self.batches.steps_per_epoch:.1f} epochs; lr {a.lr:g}, warm-up {a.warmup:,}\n"
              f"{self.met()}"
              f"machine     {self.device}, {self.dtype}, {'compiled' if self.compiled else 'not compiled'}, "
              f"torch {torch.__version__}, seed {a.seed}\n"
              f"loss        {loss:.3f} at step {self.step:,}; theory: {math.log(classes):.3f} = {guess} "
              f"before training, {knowing:.3f} for knowing frequencies alone",
              flush=True)

    def example(self):
        """out: str, what to ask this model first"""
        if self.config.order:
            return EXAMPLES["sr" if self.args.objective == "sr" else "mlm"]
        words = self.corpus.words()
        return " ".join([*(SOCKETS if set(SOCKETS) <= set(words) else words[:2]), "[MASK]"])

    def fit(self, stopped):
        """Train to the last step, or until told to.

        in:  stopped list, of catch_signals(): not empty means stop
        out: dict, the last evaluation
        """
        a, result = self.args, self.evaluate()
        if self.rank == 0:
            self.introduce(result["eval_loss"])
            self.trim_log()
        self.wrapped.train()
        bar = tqdm(total=a.steps, initial=self.step, unit="step", disable=a.quiet)
        passes = self.load(self.step) if self.step < a.steps else None
        clock, since = time.perf_counter(), self.step
        while self.step < a.steps:
            # one sum over the ranks carries how many positions count, and whether any rank was told to stop
            count = sum((labels != IGNORE).sum() for _, labels in passes).float().view(1)
            scored, told = self.sum_over_ranks(F.pad(count, (0, 1), value=float(len(stopped))))
            if told:
                break
            # dropout depends on the step alone, so that a resumed run draws what the unbroken one drew
            torch.manual_seed(((a.seed * 1_000_003 + self.step) * 4_099 + self.rank) % 2**63)
            if self.config.lsh_redraw:
                self.model.redraw(a.seed * 1_000_003 + self.step)
            lr = a.lr * schedule(self.step, a.steps, a.warmup)
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            loss = self.gradients(passes, scored.clamp(min=1))
            norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), a.clip)
            passes = self.load(self.step + 1) if self.step + 1 < a.steps else None  # a GPU is still busy
            loss, norm = loss.item(), norm.item()
            if not math.isfinite(loss + norm):
                raise ConfigError(f"step {self.step + 1}: loss {loss}, gradient norm {norm}. It was not "
                                  f"taken; a checkpoint in {a.out} is from before it. Try a lower --lr")
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            self.step += 1
            bar.update()
            if self.step % 10 == 0 or self.step == a.steps:
                seconds = (time.perf_counter() - clock) / ((self.step - since) * a.batch)
                speed = dict(words_per_s=self.batches.words / seconds, ms_per_sample=1000 * seconds)
                facts = (loss, *speed.values())
                bar.set_postfix_str("loss {:.3f}, {:,.0f} words/s, {:.2f} ms/sample".format(*facts))
                self.log(step=self.step, loss=loss, lr=lr, grad_norm=norm, **speed)
                clock, since = time.perf_counter(), self.step
            if self.step % a.eval_every == 0 or self.step == a.steps:
                paused = time.perf_counter()
                result = self.evaluate()
                self.log(step=self.step, **result)
                if self.rank == 0:
                    bar.write(f"step {self.step:,}: {describe(result)}", file=sys.stdout)
                clock += time.perf_counter() - paused
            if self.step % a.save_every == 0 or self.step == a.steps:
                self.save()
        bar.close()
        if self.step < a.steps:
            self.save()
            if self.rank == 0:
                print(f"told to stop: saved {self.path} at step {self.step:,}; the same command goes on")
            leave_together()
            raise SystemExit(128 + (stopped or [signal.SIGTERM])[0])
        if self.rank == 0:
            print(f"done: {self.path}: {describe(result)}\n"
                  f"next: python infer.py --ckpt {a.out} {shlex.quote(self.example())}")
        return result


EXAMPLES = {  # what to ask a trained model first
    "sr": "Returns True if the two arrays have the same shape and elements, False kubernetes otherwise.",
    "mlm": "Return the [MASK] of the elements of a list."}
SOCKETS = ("socket", "bind", "listen")  # the same of names in Python


@contextlib.contextmanager
def catch_signals():
    """Collect SIGTERM and Ctrl-C in a list instead of dying of them; out: that list."""
    caught, before = [], {}
    for number in (signal.SIGTERM, signal.SIGINT):
        with contextlib.suppress(ValueError):  # only a main thread may: not a notebook's
            before[number] = signal.signal(number, lambda number, frame: caught.append(number))
    try:
        yield caught
    finally:
        # subtle: a worker forked under these handlers could not be told to end
        for number, handler in before.items():
            signal.signal(number, handler)


def schedule(step, steps, warmup):
    """The learning rate's factor: linear up to 1 at the end of the warm-up, then linear towards 0."""
    return min((step + 1) / max(warmup, 1), (steps - step) / max(steps - warmup, 1))


def entropy(p):
    """in: p (n,), probabilities; out: in nats"""
    return float(-(p[p > 0] * np.log(p[p > 0])).sum())


def describe(result):
    """in: dict of floats; out: one line"""
    return ", ".join(f"{name} {value:.3f}" for name, value in result.items())


def parser():
    """All flags, in the order of the ideas."""
    p = argparse.ArgumentParser(formatter_class=Help, description=__doc__.split("\nSources")[0],
                                usage="python pretrain.py [flags]        (--help explains them)")
    sizes = "; ".join(f"{n} {s['layers']} layers of {s['width']}" for n, s in PRESETS.items() if n in RECIPES)
    g = p.add_argument_group("words", (
        "A corpus becomes words, and words become ids; no vocabulary limits them. [HF §3.1]\n"
        "The prepared corpus is kept, and does not depend on the hash."))
    g.add_argument("--data", metavar="A+B", help=(
        "python: the docstrings of the installed Python; python-names: the names its functions use; "
        "wikipedia, bookcorpus or any id of the hub; a file or folder of .txt .jsonl .csv .parquet, .gz too; "
        "a row is a document, of a .txt a line. Of items, a row is a page: a list of names or ids, or text "
        "with names between tabs or spaces; or, in a table of two columns, a page and one of its items. "
        "None: python, of items python-names"))
    g.add_argument("--split", choices=("regex", "space", "bpe", "phrases", "items"), help=(
        "words as runs of letters or of signs; as what stands between spaces; pieces of a byte-level BPE; "
        "the commonest words and pairs of words, and pieces for the rest; items: pages are sets, no order; "
        "None: regex, with --emb lookup bpe, with --emb bloom items"))
    g.add_argument("--field", metavar="NAME", help=(
        "of items: the column of lists, or of pairs both, PAGE,ITEM; None: the first list, or the two"))
    g.add_argument("--vocab", type=at_least(1), metavar="V", help=(
        "most pieces of a BPE, phrases, words of a lookup, or items (None: 50,000, a million, 50,000, all; "
        "or the preset's)"))
    g.add_argument("--cache", default="cache", metavar="DIR", help="where prepared corpora are kept")

    g = p.add_argument_group("hashes", (
        "MD5 scatters words; LSH gives words of similar spelling similar bits. [HF §3.2] [HF §3.3]\n"
        "Codes are computed once per distinct word and kept beside the corpus."))
    g.add_argument("--hash", choices=("md5", "lsh"), default="lsh",
                   help="of emb, pool, add and proj; md5: random; lsh: character n-grams, n = 1..4")
    g.add_argument("--bits", type=at_least(8), default=128, metavar="T",
                   help="bits of a word's hash (pool, add, proj)")
    g.add_argument("--chunk", type=at_least(1), default=10, metavar="k",
                   help="bits of a chunk (pool); its codebook has 2^k rows")
    g.add_argument("--features", type=at_least(1), default=50_000, metavar="F",
                   help="n-grams that count: the F commonest (lsh); more if there are more rows")
    g.add_argument("--key", help="secret of a keyed MD5; None: plain MD5")
    g.add_argument("--hash_seed", type=at_least(0), default=0, metavar="S",
                   help="of the hyperplanes (lsh), of Bloom maps, of sketches")

    g = p.add_argument_group("model", (
        "A post-LN transformer over the embedded words. [HF §4.2]\n"
        "The embedding is the subject: from 38.6 M parameters (emb) to 98 K (proj) at width 768."))
    g.add_argument("--emb", choices=tuple(FORM), help=(
        "lookup: a row per word of a vocabulary; emb: N rows shared by hash; pool: chunks pick rows of a "
        "codebook; add: one of two rows per bit; proj: correlation with the bits; bloom: m positions a word; "
        "mean, median, weighted: of k hashed rows (None: proj, or the preset's)"))
    g.add_argument("--preset", choices=tuple(RECIPES), default="tiny",
                   help=f"a size and how it is trained: {sizes}")
    for name, text in dict(layers="encoder layers; 0 is the probe that sees one word at a time", width="d",
                           heads="attention heads", ffn="width of the feed-forward layer; with --width 4 d",
                           length="positions of a sequence, [CLS] too", rows="N, buckets of emb").items():
        g.add_argument(f"--{name}", type=at_least(dict(layers=0, length=2).get(name, 1)), metavar="n",
                       help=text + " (None: the preset's)")
    g.add_argument("--dropout", type=float, metavar="p", help="also of attention weights (None: 0.1, tiny 0)")
    g.add_argument("--tied", action=argparse.BooleanOptionalAction, help=(
        "predict what is hidden by the rows of the embedding (lookup, bloom, mean, median), not by a table\n"
        "of the head's own, which learns sooner and takes as much again (None: lookup and bloom are tied)"))

    g = p.add_argument_group("Bloom digests (--emb bloom)", (
        "Each of N items is m hash tokens, and alpha items share one: m N / alpha rows for all. [SB §3.2]\n"
        "The m tokens stay side by side, m positions an item; each predicts its hash, a search the item."))
    g.add_argument("--alpha", type=at_least(1), metavar="a", help=(
        "items that share a token; of N items at most about the square root of N, with two hashes (None: 25, "
        "superbloom 50)"))
    g.add_argument("--hashes", type=at_least(1), metavar="m", help=(
        "m, tokens of an item (None: 2); k, hash functions of a sketch, see below (None: 5)"))
    g.add_argument("--coherent", type=at_least(0), metavar="n", help=(
        "of the m maps, so many put items together that stand on the same pages; the others are random "
        "(None: 0)"))

    g = p.add_argument_group("count-median sketch (--emb mean, median, weighted; --objective hash-mlm)", (
        "A word has a row in each of k blocks of R, and is their median, or mean. [CM] weighted: a sum of k\n"
        "rows of --rows, with k weights. [SV] To be predicted, any hashed word has k classes of R. [CM]"))
    g.add_argument("--buckets", type=at_least(1), metavar="R",
                   help="rows, or classes, of a hash function (None: 500)")
    g.add_argument("--weights", type=at_least(1), metavar="K",
                   help="rows of the table of weights (weighted; None: 50,000)")

    g = p.add_argument_group("attention", (
        "lsh: a query and a key meet only if r random planes sort them into one of m buckets. [BL §2.1]\n"
        "Exact, at the cost of those pairs: the longer the rows, the more it saves. No dropout of weights."))
    g.add_argument("--attn", choices=("full", "lsh"), help="None: full, or the preset's")
    for name, text in dict(lsh_bands="r, planes of a function: more, fewer pairs; None: 8, or the preset's",
                           lsh_buckets="m, buckets of a hash function; None: 256",
                           lsh_hashes="n, hash functions; a pair meets if one agrees; None: 1").items():
        g.add_argument(f"--{name}", type=at_least(1), metavar="n", help=text)
    g.add_argument("--lsh_fill", choices=("zero", "mask"), help=(
        "what other pairs weigh: exp(0) as in the paper, or nothing, but each position sees itself; "
        "None: zero"))
    g.add_argument("--lsh_pairs", choices=("upper", "all"), help=(
        "upper: one score for (i, j) and (j, i), that of i <= j, as in the paper; all: one for each; "
        "None: upper, of sets, which have no order, all"))
    g.add_argument("--lsh_redraw", action=argparse.BooleanOptionalAction,
                   help="new planes for every step of training, as the authors' code; None: no")

    g = p.add_argument_group("objective", (
        "sr: which words were shuffled, which replaced? Three classes, any vocabulary. [HF §3.6]\n"
        "mlm: which word was hidden? Needs a vocabulary to choose from. [BERT §3.1] sampled: the same, out\n"
        "of a few thousand rows instead of all. hash-mlm: which hashes has the hidden one? [SB §2.4] [CM]"))
    g.add_argument("--objective", choices=tuple(OBJECTIVES), help=(
        "None: sr; of mean, median and bloom, of sets and of presets that predict words hash-mlm, which goes "
        "with all but lookup, or mlm, which as sampled goes with lookup. "
        "Their evaluations say rec@k, how often what was hidden is among the k best of all"))

    g.add_argument("--mask", type=float, metavar="p", help=(
        "share of the words or items that are asked for (all but sr); None: 0.15, superbloom-small 0.4"))

    g = p.add_argument_group("training", (
        "AdamW, linear warm-up and decay; a batch is a function of (seed, step). [HF Table 4]\n"
        "None means the preset's value."))
    for name, kind, text in (("batch", at_least(1), "sequences a step, over all ranks and passes"),
                             ("micro", at_least(1), "most sequences a device holds at once"),
                             ("steps", at_least(1), "optimizer steps"),
                             ("lr", at_least(0, float), "peak learning rate"),
                             ("warmup", at_least(0), "steps to get there")):
        g.add_argument(f"--{name}", type=kind, metavar="n", help=text)
    g.add_argument("--decay", type=at_least(0, float), default=0.01, metavar="w", help="weight decay")
    g.add_argument("--clip", type=at_least(0, float), default=1.0, metavar="g", help="largest gradient norm")
    g.add_argument("--seed", type=at_least(0), default=0, metavar="S",
                   help="of weights, batches, corruption and dropout")

    g = p.add_argument_group("machine", (
        "The same command runs on a laptop and under torchrun; each choice is printed.\n"
        "SIGTERM and Ctrl-C save; the same command then goes on, to the same last bit."))
    machine_flags(g)
    g.add_argument("--out", metavar="DIR", help="ckpt.pt and log.jsonl go here; None: out/EMB-HASH")
    for name, text in (("eval_every", "evaluations"), ("save_every", "checkpoints")):
        g.add_argument(f"--{name}", type=at_least(1), default=1_000, metavar="n",
                       help=f"steps between {text}")
    return p


def main(argv=None):
    """in: argv list[str], None: the command line; out: dict, the last evaluation. Bad input exits with 2."""
    args, run = parser().parse_args(argv), None
    try:
        run = Run(args)
        with catch_signals() as stopped:
            result = run.fit(stopped)
        leave_together()
        return result
    except (InputError, ConfigError, OSError) as error:  # OSError: no space, no right to write there
        print(f"pretrain.py: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except KeyboardInterrupt:  # later ones are caught
        print("pretrain.py: told to stop before the training", file=sys.stderr)
        raise SystemExit(130) from None
    finally:
        if run:
            run.unwrap()
        if dist.is_initialized():
            dist.destroy_process_group()


if __name__ == "__main__":
    main()
