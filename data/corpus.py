"""Files, hub data sets and the installed Python to token IDs on disk; the one reader of rows.

Paper map:
    [HF §3.1] prepare
Sources:
    [HF] Xue & Aletras 2022, HashFormers
Out of scope: batches (data/batches.py); labels and metrics of tasks (data/tasks.py).

    read_rows -> choose_columns -> read_work -> split_work -> write_corpus -> Corpus
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
from collections import Counter, defaultdict, deque
from pathlib import Path

import numpy as np
from tqdm import tqdm

from bloom import random_order
from common import InputError, blame_file, build_once, fingerprint, num_cores, start_workers
from data.python_source import python_files, python_texts, walk_files
from hashing import list_words
from tokenizer import FIRST_WORD_ID, SEP, SUBWORDS

# docstrings of the installed Python, of its standard library alone; names in its functions
PYTHON = ("python", "stdlib", "python-names")
HUB = {  # name -> data set on the hub, and its configuration
    "wikipedia": ("wikimedia/wikipedia", "20231101.en"),
    "bookcorpus": ("rojagtap/bookcorpus",),
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
    add("--sep", metavar="CHARACTER",
        help="between the cells of a .csv or .tsv, or the items or texts of a line of a .txt "
        "(default: comma, of .tsv and pairs of texts tab)")


def reader_options(args):
    """Return the flags of add_reader_flags that are set, as arguments of read_rows."""
    options = dict(encoding=args.encoding, sep=args.sep)
    return {name: value for name, value in options.items() if value is not None}


def list_python(part):
    """Return the paths of the .py files that a name in PYTHON stands for."""
    if part == "stdlib":
        return list(python_files(["stdlib"]).values())
    return list(python_files().values())


def read_rows(path, header=None, keep_wrong=False, encoding="utf-8", sep=None):
    """Read a file row by row. What cannot be decoded is replaced, and counted on stderr.

    Args:
        path: str, a file with one of ENDINGS, or with .gz after it.
        header: list[str], the columns of a table whose file may have no header.
        keep_wrong: bool, a row of a table with another number of cells becomes a row of None, and
            what is no object an empty row.
        encoding: str, one that Python knows.
        sep: str, the character between cells, or None: a comma, of .tsv a tab, of .txt nothing.

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
        for row in _parse_rows(path, ending, header, keep_wrong, encoding, sep):
            if not isinstance(row, dict):
                if not keep_wrong:
                    raise ValueError(f"expected an object, got {row!r:.60}")
                row = {}
            yield row
            num_rows += 1
    except InputError:
        raise
    except Exception as error:  # of gzip, csv, json and pyarrow, which do not name the file
        raise InputError(f"{path}: could not be read as {ending} after row {num_rows:,}: "
                         f"{error!r}") from error


def _parse_rows(path, ending, header, keep_wrong, encoding, sep):
    """Yield the rows of a file as its format has them."""
    if codecs.lookup(encoding).name == "utf-8":
        encoding = "utf-8-sig"  # a mark at the start is no text
    open_file = gzip.open if path.lower().endswith(".gz") else open
    # newline="": csv wants line ends as they are
    with open_file(path, "rt", encoding=encoding, errors="replace", newline="") as file:
        if ending == ".parquet":
            from pyarrow.parquet import ParquetFile  # takes a while to import
            for batch in ParquetFile(file.buffer).iter_batches():
                yield from batch.to_pylist()
            return
        # UTF-16 would be read as noise; its mark and its NULs give it away
        start = file.buffer.peek(4096)
        is_utf16 = start.startswith((b"\xff\xfe", b"\xfe\xff")) or b"\0" in start
        if is_utf16 and encoding == "utf-8-sig":
            raise InputError(f"{path}: expected UTF-8, got UTF-16 or NULs. Use --encoding utf-16.")
        lines = _count_replaced(path, file)
        if ending == ".txt":
            for line in lines:
                text = line.rstrip("\r\n")
                if sep is not None:
                    text = text.split(sep)
                yield {"text": text}
        elif ending == ".jsonl":
            for line in lines:
                if line.strip():
                    yield _parse_line(line, keep_wrong)
        elif ending == ".json":
            rows = json.loads("".join(lines))
            if isinstance(rows, dict):
                rows = rows.get("data", rows)  # as SQuAD's own files have it
            yield from rows
        else:
            yield from _parse_table(path, lines, ending, header, keep_wrong, sep)


def _parse_line(line, keep_wrong):
    """Return the value of a line of a .jsonl; None for a broken one that is kept."""
    try:
        return json.loads(line)
    except ValueError:
        if not keep_wrong:
            raise
        return None


def _count_replaced(path, file):
    """Yield the lines of a file; then say how many characters could not be decoded."""
    num_replaced = 0
    for line in file:
        num_replaced += line.count("\ufffd")
        yield line
    if num_replaced > 0:
        print(f"warning: {path}: {num_replaced:,} characters could not be decoded and were "
              "replaced. Use --encoding, for example latin-1.", file=sys.stderr)


def _parse_table(path, lines, ending, header, keep_wrong, sep):
    """Yield the rows of a .csv or .tsv; up to 1 % of them may have another number of cells."""
    csv.field_size_limit(sys.maxsize)  # a cell may be a whole article
    # strict: else a stray quote takes all rows up to the next one into its cell
    options = dict(delimiter=",", strict=True)
    if ending == ".tsv":
        options = dict(delimiter="\t", quoting=csv.QUOTE_NONE)
    if sep is not None:
        options["delimiter"] = sep
    table = csv.reader(lines, **options)
    columns = next(table, [])
    names = [name for name in columns if name]
    is_uncut = len(names) == 1 and re.search(r"[,;|\t]", names[0])  # cut at another character
    if is_uncut:
        raise InputError(f"{path}: expected columns by comma, in a .tsv by tab, or by --sep, "
                         f"got {names[0]!r:.99}. Use --sep, for example --sep ';'.")
    if len(set(names)) < len(names):
        raise InputError(f"{path}: expected columns of different names, got {columns!r:.99}")
    first = []
    if header and header[-1] not in columns:
        first = columns  # the first line is a row
        columns = header

    num_rows = 0
    wrong_lines = []
    for cells in filter(None, itertools.chain([first], table)):  # an empty line is no row
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
    expected = "one column of text"
    max_names = 1
    kind = str
    if is_sets:
        expected = "a list of items, or two columns, a page and an item"
        max_names = 2
        kind = list
    names = [name for name in row if isinstance(row[name], kind)]
    if field is not None:
        expected = f"columns {field}"
        names = field.split(",")
    elif "text" in row and not is_sets:
        names = ["text"]
    elif is_sets and not names:
        names = list(row)
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
        for end in range(len(names), 0, -1):  # the longest path that exists, else one name
            part = "+".join(names[:end])
            if os.path.exists(part):
                break
        parts.append(part)
        names = names[end:]
    return parts


def name_data(data):
    """Return a name of --data for files and folders: my_texts+python of my_texts/+python."""
    names = [Path(part).resolve().stem for part in split_parts(data)]
    return "+".join(names)[:40]


def _list_sources(part, **reading):
    """Return (name, rows) of each file at a path, or of a hub data set. Rows are read later."""
    files = find_files(part)
    if files:
        return [(file, read_rows(file, **reading)) for file in files]
    # a missing file is looked for nowhere else: the hub would answer after half a minute
    is_path = os.path.exists(part) or get_ending(part) in ENDINGS
    if part not in HUB and (is_path or not re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", part)):
        raise InputError(f"--data {part}: expected files in {', '.join(ENDINGS)} (or .gz), a hub "
                         f"ID or one of {', '.join((*PYTHON, *HUB))}. Nothing was found there.")
    return [(part, read_hub(*HUB.get(part, (part,))))]


def _is_document(value, is_sets):
    """Return whether a cell is a text, or a list of names or whole numbers, or empty."""
    if is_sets and isinstance(value, list):
        return set(map(type, value)) <= {str, int, type(None)}
    return value is None or isinstance(value, str)


def _read_documents(part, is_sets, field, **reading):
    """Yield the documents of one part of --data, in files or on the hub."""
    for source, rows in _list_sources(part, **reading):
        # the first rows decide on the columns, as a single cell may be empty
        head = list(itertools.islice(rows, 100))
        if not head:
            continue
        known = {}  # column -> a value
        for row in head:
            for name, value in row.items():
                if known.get(name) is None:
                    known[name] = value
        columns = choose_columns(source, known, field, is_sets)
        is_pair = len(columns) == 2
        pages = {}  # page -> its items, of a table with a row for each item
        num_doubtful = 0
        for number, row in enumerate(itertools.chain(head, rows), 1):
            cells = [row.get(name) for name in columns]
            document = cells if is_pair else cells[0]
            has_no_page = is_pair and cells[0] in (None, "")
            if has_no_page or not _is_document(document, is_sets):
                raise InputError(f"{source}, row {number:,}: expected text, or of an item set "
                                 f"names or whole numbers, in {', '.join(columns)}, "
                                 f"got {document!r:.60}. Use --field.")
            if is_pair:
                page, item = cells
                pages.setdefault(page, []).append(item)
            elif document:
                is_cut_at_spaces = is_sets and isinstance(document, str) and "\t" not in document
                if is_cut_at_spaces and re.search("[,;]", document):
                    num_doubtful += 1
                yield document
        yield from pages.values()
        if num_doubtful > 0:
            print(f"warning: {source}: {num_doubtful:,} item sets have a comma or semicolon and "
                  "were cut at spaces. Use tabs, or in a .txt --sep.", file=sys.stderr)


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
        for text in _read_documents(part, is_sets, field, **reading):
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


def prepare(data, split, cache, max_subwords=50_000, quiet=False, field=None, **reading):
    """Turn corpora into one array of token IDs on disk, once. [HF §3.1]

    In memory are the distinct words, item sets of a table of pairs, a .json file, and the token
    IDs of Python.

    Args:
        data: str, see read_work; field: str or None; reading: encoding and sep of read_rows.
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
    """Write all files of a prepared corpus: number words as they appear, then by frequency."""
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
    id_of_word = defaultdict(itertools.count(FIRST_WORD_ID).__next__)  # a new word has the next ID
    id_counts = Counter()
    num_replaced = 0
    seen = set()
    works = read_work(data, split == "items", field, **reading)
    results = split_all(works, split, subwords)
    with open(folder / "ids.tmp", "wb") as file:
        for kind, documents, replaced in tqdm(results, f"preparing {data}", disable=hidden):
            num_replaced += replaced
            ids = []
            for document in documents:
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
    if not id_counts:
        raise InputError(f"--data {data}: expected text, got no words.")

    # order[new ID] is the old ID. Special tokens keep theirs, and subwords the order of their units
    order = list(range(FIRST_WORD_ID))
    if subwords is None:
        by_frequency = id_counts.most_common()  # among equal counts the first to appear comes first
        order.extend(i for i, _ in by_frequency if i != SEP)
    else:
        order.extend(id_of_word[unit] for unit in subwords.units)
    size = len(order)
    new_id = np.empty(size, "uint16" if size <= 1 << 16 else "uint32")
    new_id[order] = np.arange(size)  # new_id[old ID]

    # Second pass: IDs by frequency. The digest identifies the corpus in checkpoints.
    old_ids = np.memmap(folder / "ids.tmp", np.uint32, "r")
    offsets = [[0]]
    digest = hashlib.md5(usedforsecurity=False)
    with open(folder / "ids.bin", "wb") as file:
        for start in range(0, len(old_ids), PIECE):
            ids = new_id[old_ids[start:start + PIECE]]
            ids.tofile(file)
            digest.update(ids)
            offsets.append(start + 1 + np.flatnonzero(ids == SEP))
    os.remove(folder / "ids.tmp")
    np.save(folder / "offsets.npy", np.concatenate(offsets))
    np.save(folder / "counts.npy", [id_counts[i] for i in order])

    old_words = list(id_of_word)
    text = "".join(old_words[i - FIRST_WORD_ID] + "\n" for i in order[FIRST_WORD_ID:])
    text = text.encode("utf-8", "surrogatepass")  # JSON may hold half a surrogate pair
    (folder / "words.txt").write_bytes(text)
    digest.update(text)
    num_documents = id_counts.pop(SEP)
    meta = dict(
        data=data, split=split, replaced=num_replaced, documents=num_documents,
        words=id_counts.total(), dtype=new_id.dtype.name, distinct=len(id_counts),
        digest=digest.hexdigest())
    (folder / "meta.json").write_text(json.dumps(meta, indent=1))


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
    if subwords is not None:
        documents = subwords.split_texts(texts)
    elif split == "items":
        documents = map(item_names, texts)
    else:
        documents = [list_words(text, split) for text in texts]
    num_replaced = sum(text.count("\ufffd") for text in texts if isinstance(text, str))
    return work[0], ["\n".join(words) for words in documents if words], num_replaced


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
        meta: dict of data, split, documents, words, distinct, replaced, dtype, digest.
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
            if self.meta["split"] in SUBWORDS:
                text = (folder / "subwords.json").read_text("utf-8")
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
