"""Fine-tune a pre-trained model on a task: several seeds, and simple methods beside the score.

    python finetune.py --ckpt out/proj-lsh --task pydoc                     offline: whose docstring is it?
    python finetune.py --ckpt out/proj-lsh --task sst2                      a task of GLUE, from the hub
    python finetune.py --ckpt out/proj-lsh --task glue --data_dir glue/     eight tasks, from its own files
    python finetune.py --ckpt out/proj-lsh --task squad                     which words answer a question?
    python finetune.py --ckpt out/proj-lsh --train a.csv --dev b.csv --text title,body --label topic
    python finetune.py --preset proformer --task sst2                       no pre-training at all
    torchrun --nproc_per_node=8 finetune.py --ckpt out/proj-lsh --task glue     a job a task and seed

Sources   [HF] Xue & Aletras 2022, HashFormers   [BERT] Devlin et al. 2019   [GLUE] Wang et al. 2019
          [SQ] Rajpurkar et al. 2016 and 2018, SQuAD
Map       [HF Table 5] RECIPES   [HF Table 5] schedule   [HF Table 5] parser   [HF §4.1] Start
          [HF §4.1] parser   [HF §4.4 eq.4] compare   [HF §4.4 eq.6] compare   [HF §4.4] parser
          [GLUE §3] GLUE   [BERT §4.2] Spans   [SQ §6] normalise
Not here  reading one text with the result: infer.py does, from the checkpoint that is left here.
Departs   1. The score is that of the best evaluation on the dev set, as usual; the last one's stands beside.
          2. Labels travel by name: in which order a file or a library numbers them is of no consequence.
          3. Numbers to predict are standardised for training; correlations do not notice.
          4. Words of the question are no candidates for an answer, neither in training nor after.
          5. Small models look at the mean of all positions instead of at [CLS], which Shuffle+Random never
             trains; --pool cls gives the paper's.
Letters   B batch   L positions   n examples   W windows
"""

import argparse
import bisect
import collections
import csv
import dataclasses
import datetime
import glob
import gzip
import json
import math
import multiprocessing
import os
import re
import string
import sys

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from tqdm import tqdm

import hashing
from hashing import PAD, Encoder, InputError
from model import PRESETS, Config, ConfigError, Help, Model, at_least, best_spans, choose_machine
from model import cores, count_parameters, fingerprint, load_checkpoint, machine_flags, once, parameter_groups
from model import leave_together, load_model, save_checkpoint, torchrun_env, try_compile

# What the paper does, and what models of less than 512 dimensions need
RECIPES = {
    "paper": dict(epochs=5, batch=32, lr=3e-5, pool="cls"),  # [HF Table 5]
    "small": dict(epochs=5, batch=32, lr=5e-4, pool="mean"),
}


@dataclasses.dataclass
class Task:
    """What is known of a task before its files are read."""

    folder: str  # in the original download; also the name of its submission file
    texts: tuple  # columns of the first text and of the second, if any; a|b: named one way or the other
    labels: tuple | None  # names in the hub's order, so that a file's digits mean the same; None: numbers
    metrics: tuple  # the first is the task's own
    rows: tuple = (None, None)  # of train and dev, where known
    label: str = "label"
    dev: tuple = ("dev",)


PAIR = ("sentence1|#1 String", "sentence2|#2 String")
ENTAILMENT = ("entailment", "not_entailment")
GLUE = {  # [GLUE §3]
    "mnli": Task("MNLI", ("premise|sentence1", "hypothesis|sentence2"),
                 ("entailment", "neutral", "contradiction"), ("accuracy",), (392_702, 9_815),
                 "label|gold_label", ("dev_matched", "dev_mismatched")),
    "qnli": Task("QNLI", ("question", "sentence"), ENTAILMENT, ("accuracy",), (104_743, 5_463)),
    "qqp": Task("QQP", ("question1", "question2"), ("not_duplicate", "duplicate"), ("f1", "accuracy"),
                (None, 40_430), "label|is_duplicate"),
    "rte": Task("RTE", PAIR, ENTAILMENT, ("accuracy",), (2_490, 277)),
    "sst2": Task("SST-2", ("sentence",), ("negative", "positive"), ("accuracy",), (67_349, 872)),
    "mrpc": Task("MRPC", PAIR, ("not_equivalent", "equivalent"), ("accuracy", "f1"), (3_668, 408),
                 "label|Quality"),
    "cola": Task("CoLA", ("sentence",), ("unacceptable", "acceptable"), ("matthews", "accuracy"),
                 (8_551, 1_043)),
    "stsb": Task("STS-B", PAIR, None, ("spearman", "pearson"), (5_749, 1_500), "label|score"),
    "wnli": Task("WNLI", PAIR, ENTAILMENT[::-1], ("accuracy",), (635, 71)),
}
AVERAGED = tuple(GLUE)[:8]  # the paper's eight; WNLI is left out, as nearly everywhere
SQUAD = {"squad": ("v1.1", 87_599, 10_570), "squad_v2": ("v2.0", 130_319, 11_873)}
COLA = ["source", "label", "star", "sentence"]  # its train and dev files have no header
ENDINGS = (".tsv", ".csv", ".jsonl", ".json", ".parquet")
TEST = ("the labels of a test split of GLUE are not public, and a score would mean nothing: "
        "--predict writes the file to submit")


# ---------------------------------------------------------------------------------------------------------
# Reading: files and the hub give rows (dict), rows give texts and labels


def read_table(path, header=None):
    """The rows of a file; .gz too.

    in:  path .tsv (a quote is a character like any other), .csv, .jsonl, .json or .parquet; header list[str],
         the columns of a .tsv that may have none
    out: columns list[str]; rows list[dict]
    err: InputError when it is not there, not of a known kind, or broken
    """
    ending = os.path.splitext(path.removesuffix(".gz"))[1]
    if not os.path.isfile(path):
        raise InputError(f"{path}: no such file")
    if ending not in ENDINGS:
        raise InputError(f"{path}: wanted a file that ends in {', '.join(ENDINGS)}, with or without .gz")
    try:
        if ending == ".parquet":
            import datasets  # takes two seconds, and only needed here

            rows = list(datasets.load_dataset("parquet", data_files=glob.escape(path), split="train",
                                              streaming=True))
            return list(rows[0]) if rows else [], rows
        with (gzip.open if path.endswith(".gz") else open)(path, "rt", encoding="utf-8-sig",
                                                           errors="replace", newline="") as file:
            if ending == ".json":
                rows = json.load(file)
                rows = rows.get("data") if isinstance(rows, dict) else rows
            elif ending == ".jsonl":
                rows = [json.loads(line) for line in file.read().split("\n") if line.strip()]
            elif ending == ".csv":
                csv.field_size_limit(sys.maxsize)
                cells = [row for row in csv.reader(file) if row]
            else:
                lines = file.read().split("\n")
                cells = [line.rstrip("\r").split("\t") for line in lines if line.strip()]
    except Exception as error:  # datasets raises its own and pyarrow's; a broken .gz, JSON or CSV have others
        raise InputError(f"{path}: could not be read as {ending}: {error}") from error
    if ending in (".json", ".jsonl"):
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            raise InputError(f"{path}: wanted an object with named fields in each row")
        return list(rows[0]) if rows else [], rows
    if not cells:
        return [], []
    bare = header and len(cells[0]) == len(header) and header[-1] not in cells[0]
    columns, cells = (header, cells) if bare else (cells[0], cells[1:])
    rows = [dict(zip(columns, row)) for row in cells if len(row) == len(columns)]
    if len(rows) < len(cells):  # QQP's own files have a few
        wrong = next(row for row in cells if len(row) != len(columns))
        said = (f"{path}: {len(cells) - len(rows):,} of {len(cells):,} rows do not have the "
                f"{len(columns)} columns {', '.join(columns)}; the first begins {' | '.join(wrong)[:60]!r}")
        if len(rows) < 0.99 * len(cells):
            raise InputError(said)
        print(f"{said}. They are left out.", file=sys.stderr)
    return columns, rows


def read_hub(name, config, split):
    """in: hub id, its configuration or None, split; out: columns; rows list[dict], labels by name"""
    import datasets

    try:
        data = datasets.load_dataset(name, config, split=split)
    except Exception as error:  # datasets raises its own, the hub's and the network's
        why = (str(error).strip() or "no reason given").splitlines()[0]
        raise InputError(f"{name} could not be loaded from the hub ({type(error).__name__}: {why}); "
                         f"--data_dir reads a download") from error
    rows, names = data.to_list(), getattr(data.features.get("label"), "names", None)
    if names:
        rows = [row | dict(label=names[row["label"]] if row["label"] >= 0 else -1) for row in rows]
    return data.column_names, rows


def column(columns, wanted, where, more=""):
    """in: columns there are; wanted "a" or "a|b"; where and more, for the complaint; out: the one there"""
    found = next((name for name in wanted.split("|") if name in columns), None)
    if found is None:
        raise InputError(f"{where}: wanted a column {' or '.join(wanted.split('|'))}, got "
                         f"{', '.join(columns) or 'none'}{more}")
    return found


def read_label(value, task, where):
    """in: value as it stands in a row; task; where; out: the label's name, or float for a number"""
    text = "" if value is None else str(value).strip()
    if text in ("-1", "-1.0") and task.folder != "own":
        raise InputError(f"{where}: the label is -1; {TEST}")
    if task.labels is None:
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        if not math.isfinite(number):
            raise InputError(f"{where}: wanted a number as the label, got {text!r}")
        return number
    if text in task.labels or not task.labels and text:
        return text
    if task.folder != "own" and text.isdecimal() and int(text) < len(task.labels):
        return task.labels[int(text)]
    raise InputError(f"{where}: unknown label {text!r}; wanted {', '.join(task.labels) or 'some text'}")


def split_of(table, task, where, scored=True):
    """Rows to texts and labels.

    in:  table (columns, rows); task; where; scored False: a test split, labels are not looked for
    out: dict(first list[str], second list[str] or None, labels list[str] or list[float])
    """
    columns, rows = table
    if not rows:
        raise InputError(f"{where}: no rows")
    places = [column(columns, text, where) for text in task.texts]
    texts = [["" if row.get(place) is None else str(row[place]) for row in rows] for place in places]
    labels = []
    if scored:
        label = column(columns, task.label, where, f"; {TEST}" if task.folder != "own" else "")
        labels = [read_label(row.get(label), task, f"{where}, row {i:,}") for i, row in enumerate(rows, 1)]
    return dict(first=texts[0], second=texts[1] if len(texts) > 1 else None, labels=labels)


def find_file(folder, *names):
    """in: folder; names without ending; out: the path of the first that exists, or None"""
    paths = (os.path.join(folder, name + end + gz) for name in names for end in ENDINGS for gz in ("", ".gz"))
    return next(filter(os.path.isfile, paths), None)


def glue_table(name, split, args):
    """in: name in GLUE; split "train", "dev_matched", "test" ...; args; out: table, where it came from"""
    task, header = GLUE[name], COLA if name == "cola" else None
    if args.data_dir:
        path = find_file(os.path.join(args.data_dir, task.folder), split)
        if path is None:
            raise InputError(f"{os.path.join(args.data_dir, task.folder)}: wanted {split}.tsv (or "
                             f"{', '.join(ENDINGS[1:])}), as in the GLUE download; --train and --dev name "
                             f"files of your own")
        return read_table(path, header), path
    split = split.replace("dev", "validation")
    return read_hub("nyu-mll/glue", name, split), f"nyu-mll/glue, {name}, {split}"


def read_tests(name, args):
    """in: name in GLUE; args; out: dict test split -> its texts, and each row's index for GLUE's server"""
    out = {}
    for split in (dev.replace("dev", "test") for dev in GLUE[name].dev):
        (columns, rows), where = glue_table(name, split, args)
        index = next((c for c in ("index", "idx", "id") if c in columns), None)
        texts = split_of((columns, rows), GLUE[name], where, scored=False)
        out[split] = texts, [row[index] for row in rows] if index else range(len(rows))
    return out


def read_sentences(name, args):
    """Everything a classification or regression task needs.

    in:  name in GLUE, "pydoc" or "own"; args
    out: task Task; train dict; devs dict name -> dict, as split_of gives them
    """
    if name == "pydoc":
        return read_pydoc(args.cache)
    task = GLUE.get(name)
    if task is None:
        metrics = ("spearman", "pearson") if args.regression else ("accuracy", "macro_f1")
        texts = tuple(text.strip() for text in args.text.split(","))
        task = Task("own", texts, None if args.regression else (), metrics, label=args.label)
    header = COLA if name == "cola" else None
    if args.train:
        train = split_of(read_table(args.train, header), task, args.train)
        if task.labels == ():  # sorted: their order in the file is of no consequence
            task.labels = tuple(sorted(set(train["labels"])))
            if len(task.labels) < 2:
                raise InputError(f"{args.train}: all labels are {task.labels[0]!r}: nothing to learn")
            if len(task.labels) > max(2, len(train["labels"]) // 2):
                raise InputError(f"{args.train}: {len(task.labels):,} different labels in "
                                 f"{len(train['labels']):,} rows; a number is predicted with --regression")
        return task, train, {task.dev[0]: split_of(read_table(args.dev, header), task, args.dev)}
    splits = {}
    for split, rows in zip(("train", *task.dev), (*task.rows, None)):
        table, where = glue_table(name, split, args)
        splits[split] = split_of(table, task, where)
        if rows and len(splits[split]["labels"]) != rows:
            raise InputError(f"{where}: wanted the {rows:,} rows of this split, got "
                             f"{len(splits[split]['labels']):,}. --train and --dev name a part of a task")
    return task, splits.pop("train"), splits


def _docstrings(path):  # for the workers, who can be sent no generator
    return list(hashing.python_texts(path))


def read_pydoc(cache, labels=20, most=1_000):
    """Which top-level module does a docstring come from? The 20 with most, a thousand each at most.

    in:  cache folder; labels; most, docstrings of one to train on; a fifth of that to score
    out: as read_sentences; whole files are held out, one in ten: docstrings of one file are too much alike

    The same docstrings are the corpus `python` of pre-training, without their labels.
    """
    files = hashing.python_files()
    about = [1, labels, most] + [(name, os.path.getsize(path)) for name, path in files.items()]

    def make(path):
        rows, seen = collections.defaultdict(lambda: ([], [])), set()
        with multiprocessing.Pool(cores()) as pool:
            read = zip(files, pool.imap(_docstrings, files.values(), 64))
            for name, texts in tqdm(read, "reading docstrings", len(files), unit=" files"):
                part = rows[name.split(os.sep)[0].removesuffix(".py")][int(fingerprint(name), 16) % 10 == 0]
                for text in texts:
                    if len(text.split()) >= 5 and text not in seen:
                        seen.add(text)
                        part.append(text)
        full = [label for label in sorted(rows) if all(rows[label])]  # some in training, some held out
        rng, kept = np.random.default_rng(0), ([], [])
        for label in sorted(full, key=lambda label: -len(rows[label][0]))[:labels]:
            for part, texts, share in zip(kept, rows[label], (most, most // 5)):
                part += [(label, texts[i]) for i in rng.permutation(len(texts))[:share].tolist()]
        with open(path, "w") as file:
            json.dump(kept, file)

    with open(once(os.path.join(cache, f"pydoc-{fingerprint(about)}.json"), make)) as file:
        train, dev = (dict(first=[text for _, text in rows], second=None, labels=[label for label, _ in rows])
                      for rows in json.load(file))
    names = tuple(sorted(set(train["labels"])))
    return Task("pydoc", ("docstring",), names, ("accuracy", "macro_f1")), train, {"dev": dev}


def read_squad(name, args):
    """in:  "squad" or "squad_v2"; args
    out: train, dev: lists of dict(id, question, context, answers list[(text, start)], [] for no answer)
    """
    version, *rows = SQUAD[name]
    out = []
    for split, wanted in zip(("train", "dev"), rows):
        path = getattr(args, split)
        if not path and args.data_dir:
            path = find_file(args.data_dir, f"{split}-{version}", f"squad-{version}-{split}")
            if path is None:
                raise InputError(f"{args.data_dir}: wanted {split}-{version}.json, its name in SQuAD; "
                                 f"--train and --dev name other files")
        where = path or f"rajpurkar/{name}"
        columns, table = (read_table(path) if path else
                          read_hub(where, None, dict(dev="validation").get(split, split)))
        found = []
        try:
            if "paragraphs" in columns:  # nested, as published
                table = [p for article in table for p in article["paragraphs"]]
                table = [dict(context=p["context"], **q) for p in table for q in p["qas"]]
            for row in table:
                a = row["answers"]  # a list of {text, answer_start}, or one {text: list, answer_start: list}
                pairs = (zip(a["text"], a["answer_start"]) if isinstance(a, dict)
                         else ((each["text"], each["answer_start"]) for each in a))
                found.append(dict(id=row["id"], question=row["question"], context=row["context"],
                                  answers=[(text, int(start)) for text, start in pairs]))
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(f"{where}: not questions as in SQuAD, with id, question, context and answers "
                             f"({type(error).__name__}: {error})") from error
        if not found or name == "squad" and not all(q["answers"] for q in found):
            raise InputError(f"{where}: no questions" if not found else
                             f"{where}: there are questions without an answer, as in --task squad_v2")
        if len(found) != wanted and not getattr(args, split):
            raise InputError(f"{where}: wanted {wanted:,} questions, got {len(found):,}. A part of SQuAD is "
                             f"named with --train and --dev")
        out.append(found)
    return out


# ---------------------------------------------------------------------------------------------------------
# Metrics: arrays of class numbers or of floats in, a fraction out; what is 0/0 is 0


def accuracy(guess, truth):
    """Share of right ones; in: int (n,), int (n,)"""
    return float((guess == truth).mean())


def f1(guess, truth, label=1):
    """Harmonic mean of precision and recall of one class; in: int (n,), int (n,), the class"""
    right = ((guess == label) & (truth == label)).sum()
    return float(2 * right / max((guess == label).sum() + (truth == label).sum(), 1))


def macro_f1(guess, truth):
    """Mean F1 over the classes that occur among guesses or truths; in: int (n,), int (n,)"""
    return float(np.mean([f1(guess, truth, label) for label in np.union1d(guess, truth)]))


def pearson(guess, truth):
    """Linear correlation; 0 when either is constant. in: float (n,), float (n,)"""
    if np.ptp(guess) == 0 or np.ptp(truth) == 0:
        return 0.0
    a, b = guess - guess.mean(), truth - truth.mean()
    return float((a * b).sum() / math.sqrt((a * a).sum() * (b * b).sum()))


def spearman(guess, truth):
    """Pearson correlation of the ranks, ties sharing their mean rank. in: float (n,), float (n,)"""
    def ranks(x):
        _, place, count = np.unique(x, return_inverse=True, return_counts=True)
        return (np.cumsum(count) - (count - 1) / 2)[place]  # 5 7 7 9 -> 1 2.5 2.5 4

    return pearson(ranks(guess), ranks(truth))


# Matthews correlation is Pearson's of two classes numbered 0 and 1
METRICS = dict(accuracy=accuracy, f1=f1, macro_f1=macro_f1, matthews=pearson, pearson=pearson,
               spearman=spearman)
_ARTICLES, _NO_SIGNS = re.compile(r"\b(a|an|the)\b"), str.maketrans("", "", string.punctuation)


def normalise(text):
    """Words of an answer without case, signs and articles: "The U.S. Army!" -> us army. [SQ §6]

    in: text str; out: list[str]
    """
    return _ARTICLES.sub(" ", text.lower().translate(_NO_SIGNS)).split()


def exact_and_f1(answer, truths, null=True):
    """in: answer, truths, as normalise() gives them; null: a truth [] is "no answer" and silence right (v2)
    out: EM and F1 of the best truth, each 0 .. 1
    """
    best = 0.0
    for truth in truths:
        common = sum((collections.Counter(answer) & collections.Counter(truth)).values())
        both = len(answer) + len(truth)
        best = max(best, 2 * common / both if answer and truth else float(null and both == 0))
    return float(answer in truths), best


# ---------------------------------------------------------------------------------------------------------
# A task made ready for a model: examples, loss, evaluation


def batches(lengths, size, rng=None):
    """Examples of similar length go together.

    in:  lengths (n,); size; rng: shuffled anew (sorted only within 64 batches); None: sorted, for evaluation
    out: list of int64 arrays, places of the examples
    """
    lengths, order = np.asarray(lengths), np.arange(len(lengths))
    if rng is None:
        order = np.argsort(lengths, kind="stable")
    else:
        order = rng.permutation(order)
        pools = np.split(order, np.arange(64 * size, len(order), 64 * size))
        order = np.concatenate([pool[np.argsort(lengths[pool], kind="stable")] for pool in pools])
    out = np.split(order, np.arange(size, len(order), size))
    return out if rng is None else [out[i] for i in rng.permutation(len(out))]


def pad(examples, most=None):
    """in: examples list of ids int32; most: pad to a power of two, or to `most` positions if that is less, so
    that a compiler sees a handful of shapes; None: to the longest
    out: ids int64 (B, L); mask bool (B, L), None when nothing is padded
    """
    longest = max(map(len, examples))
    longest = min(1 << (longest - 1).bit_length(), most) if most else longest
    ids = np.full((len(examples), longest), PAD, np.int64)
    for row, example in zip(ids, examples):
        row[:len(example)] = example
    ids = torch.from_numpy(ids)
    return ids, None if min(map(len, examples)) == longest else ids != PAD


def evaluation_batches(examples, length):
    """in: examples list of ids; length L of the model; out: batches of 32,768 positions at most"""
    return batches(list(map(len, examples)), max(1, 32_768 // length))


class Sentences:
    """Classification or regression of a text or of a pair."""

    head, outputs, notes = "classify", 1, ""

    def __init__(self, task, train, devs, encoder, length, limit=None, scale=None):
        """in: task, train, devs as read_sentences gives; encoder Encoder; length L; limit, training rows;
        scale (mean, deviation) of the numbers to predict, None: from the training rows
        """
        self.task, self.labels, self.primary, self.length = task, task.labels, task.metrics[0], length
        if task.labels:
            self.outputs = len(task.labels)
        if limit and limit < len(train["labels"]):
            keep = np.sort(np.random.default_rng(0).permutation(len(train["labels"]))[:limit]).tolist()
            train = {name: column and [column[i] for i in keep] for name, column in train.items()}
        if not task.labels and not scale:
            scale = float(np.mean(train["labels"])), float(np.std(train["labels"])) or 1.0
        self.scale, self.cut = scale, 0
        self.examples, self.targets = self.encode(train, encoder)
        self.devs = {name: self.encode(dev, encoder) for name, dev in devs.items()}
        self.n = len(next(iter(self.devs.values()))[0])
        if self.cut:
            self.notes = f"{self.cut:,} texts or pairs are longer than {length} positions and were cut"

    def encode(self, split, encoder):
        """in:  dict as split_of gives; encoder
        out: list of ids int32; the labels' numbers, int64 (n,), or float32 (n,) in units of the training
             rows' deviation, or None of a test split
        """
        first = encoder.ids_of(split["first"])
        second = encoder.ids_of(split["second"]) if split["second"] else [None] * len(first)
        packed = [hashing.pack(a, b, self.length) for a, b in zip(first, second)]
        self.cut += sum(cut > 0 for _, cut in packed)
        examples, labels = [ids for ids, _ in packed], split["labels"]
        if not labels:
            return examples, None
        if self.labels:
            place = {name: i for i, name in enumerate(self.labels)}
            return examples, np.array([place[name] for name in labels], np.int64)
        return examples, ((np.array(labels) - self.scale[0]) / self.scale[1]).astype(np.float32)

    def loss(self, logits, targets):
        """in: logits float (B, labels); targets (B,); out: mean loss"""
        return F.cross_entropy(logits, targets) if self.labels else F.mse_loss(logits[:, 0], targets)

    def predict(self, examples, forward):
        """in: examples; forward function(list of examples) -> float (B, labels); out: class or value, (n,)"""
        order = evaluation_batches(examples, self.length)
        logits = torch.cat([forward([examples[i] for i in chosen]) for chosen in order]).cpu().numpy()
        back = np.argsort(np.concatenate(order))
        return (logits.argmax(1) if self.labels else logits[:, 0])[back]

    def evaluate(self, forward):
        """in: forward, as in predict; out: dict of metrics in percent; the only label given, or None"""
        out, constant = {}, None
        for name, (examples, truth) in self.devs.items():
            guess = self.predict(examples, forward)
            prefix = "" if name == self.task.dev[0] else f"{name.removeprefix('dev_')}_"
            out |= {f"{prefix}{metric}": 100 * METRICS[metric](guess, truth) for metric in self.task.metrics}
            if not prefix and np.ptp(guess) < 1e-3:
                constant = self.labels[guess[0]] if self.labels else f"{guess[0]:.3g}"
        return out, constant

    def simple(self):
        """What needs no transformer: out: dict of the task's own metric in percent, majority, bag_of_words"""
        examples, truth = self.devs[self.task.dev[0]]
        if not self.labels:
            return dict(majority=None, bag_of_words=None)
        common = np.full_like(truth, np.bincount(self.targets).argmax())
        guess = bag_of_words(self.examples, self.targets, examples, self.outputs)
        metric = METRICS[self.primary]
        return dict(majority=100 * metric(common, truth), bag_of_words=100 * metric(guess, truth))

    def about(self):
        """What infer.py has to know, as plain types"""
        labels = list(self.labels) if self.labels else None
        return dict(head=self.head, labels=labels, scale=self.scale and list(self.scale),
                    texts=list(self.task.texts), label=self.task.label, pair=len(self.task.texts) == 2)


def bag_of_words(examples, targets, others, classes, epochs=5):
    """Logistic regression on the mean of a text's distinct words: what can be had without a transformer.

    in:  examples list of ids, targets int64 (n,); others list of ids to classify; classes
    out: int64 (others,)
    """
    rows, rng = 1 + max(int(ids.max()) for ids in examples + others), np.random.default_rng(0)
    bag = torch.nn.EmbeddingBag(rows, classes, mode="mean", sparse=True)  # the weights of [CLS] are a bias
    torch.nn.init.zeros_(bag.weight)
    optimizer = torch.optim.SparseAdam(bag.parameters())

    def logits(some):
        some = [torch.from_numpy(np.unique(ids)) for ids in some]
        offsets = torch.tensor([0, *map(len, some[:-1])], dtype=some[0].dtype).cumsum(0, dtype=some[0].dtype)
        return bag(torch.cat(some), offsets)

    for epoch in range(epochs):
        optimizer.param_groups[0]["lr"] = 0.1 * (1 - epoch / epochs)
        for chosen in batches([1] * len(examples), 32, rng):
            loss = F.cross_entropy(logits([examples[i] for i in chosen]), torch.from_numpy(targets[chosen]))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    with torch.no_grad():
        return logits(others).argmax(1).numpy()


class Spans:
    """Which words of a text answer a question? [BERT §4.2]

    A text that is too long is read in windows that overlap; a window without the answer points to [CLS].
    """

    head, outputs, labels, primary = "span", 2, None, "f1"

    def __init__(self, train, dev, encoder, length, stride=None, longest=None, limit=None, null=False):
        """in: train, dev as read_squad gives; encoder; length L; stride, words from one window to the next (a
        third of L); longest words of an answer (30); limit, training questions; null: some have no answer
        """
        self.length, self.null, self.n, self.split = length, null, len(dev), {}
        self.stride, self.longest = stride or max(1, length // 3), longest or 30
        if limit and limit < len(train):
            train = [train[i] for i in np.sort(np.random.default_rng(0).permutation(len(train))[:limit])]
        self.examples, targets, lost = [], [], 0
        for question in train:
            found, (windows, spans) = False, self.windows(question, encoder)
            answer = self.answer_words(spans, *question["answers"][0]) if question["answers"] else None
            for ids, first, start, stop in windows:
                inside = answer is not None and start <= answer[0] and answer[1] < stop
                found |= inside
                self.examples.append(ids)
                targets.append((first + answer[0] - start, first + answer[1] - start, first, stop - start)
                               if inside else (0, 0, first, stop - start))
            lost += bool(question["answers"]) and not found
        self.targets = np.array(targets, np.int64)  # (W, 4): start, end, the context's place and length
        self.questions, self.dev, self.dev_spans, places = dev, [], [], []
        for i, question in enumerate(dev):
            windows, spans = self.windows(question, encoder)
            self.dev += [ids for ids, *_ in windows]
            places += [(i, *place) for _, *place in windows]
            self.dev_spans.append(spans)
        self.places = np.array(places)  # (W, 4): question; first, start, stop of hashing.windows
        self.truths = [[normalise(text) for text, _ in q["answers"]] for q in dev]
        if null:  # as the official script: what is nothing but signs is no answer
            self.truths = [[truth for truth in truths if truth] or [[]] for truths in self.truths]
        self.lost = lost
        self.notes = (f"{len(train):,} questions in {len(self.examples):,} windows of {length}; "
                      f"answers that fall in no window: {lost:,} of training; "
                      f"an evaluation reads {len(self.dev):,} windows")

    def windows(self, question, encoder):
        """in: question dict; out: what hashing.windows gives, and the spans of the context's words"""
        context = question["context"]
        if context not in self.split:
            words, spans = encoder.split(context)
            self.split = {context: (encoder.ids(words), spans)}  # the questions about one text follow
        ids, spans = self.split[context]
        asked = encoder.ids(encoder.split(question["question"])[0])
        return hashing.windows(asked, ids, self.length, self.stride), spans

    @staticmethod
    def answer_words(spans, text, start):
        """in: spans of the words; an answer and where it starts; out: its (first, last) word, or None"""
        first = bisect.bisect_right([end for _, end in spans], start)
        last = bisect.bisect_left([begin for begin, _ in spans], start + len(text)) - 1
        return (first, last) if first <= last else None

    def loss(self, logits, targets):
        """in: logits float (B, L, 2); targets int64 (B, 4); out: mean of the two cross-entropies"""
        start, end, first, count = targets.unsqueeze(-1).unbind(1)  # (B, 1) each
        place = torch.arange(logits.shape[1], device=logits.device)
        allowed = (place == 0) | (place >= first) & (place < first + count)
        logits = logits.masked_fill(~allowed.unsqueeze(-1), -torch.inf)
        return (F.cross_entropy(logits[..., 0], start[:, 0]) + F.cross_entropy(logits[..., 1], end[:, 0])) / 2

    def answers(self, forward):
        """The best answer to each question of the dev set, and by how much it beats "none".

        in:  forward function(list of examples) -> logits (B, L, 2)
        out: texts list[str]; margins float (questions,), the span's score less that of [CLS]
        """
        best, null = np.full(self.n, -np.inf), np.full(self.n, np.inf)
        chosen = np.zeros((self.n, 2), np.int64)
        for batch in evaluation_batches(self.dev, self.length):
            logits = forward([self.dev[i] for i in batch])
            question, first, start, stop = self.places[batch].T
            place = np.arange(logits.shape[1])
            inside = (place >= first[:, None]) & (place < (first + stop - start)[:, None])
            found = best_spans(logits, torch.from_numpy(inside).to(logits.device), 1, self.longest)
            score, a, b, none = (t.reshape(-1).cpu().numpy() for t in found)
            for row, q in enumerate(question):
                null[q] = min(null[q], none[row])
                if score[row] > best[q]:
                    shift = start[row] - first[row]
                    best[q], chosen[q] = score[row], (a[row] + shift, b[row] + shift)
        texts = [q["context"][spans[a][0]:spans[b][1]].strip() if spans else ""
                 for q, spans, (a, b) in zip(self.questions, self.dev_spans, chosen.tolist())]
        return texts, best - null

    def scores(self, texts):
        """in: texts list[str], an answer to each question; out: float (questions, 2), EM and F1"""
        return np.array([exact_and_f1(normalise(text), truths, self.null)
                         for text, truths in zip(texts, self.truths)])

    def evaluate(self, forward):
        """in: forward, as in answers; out: dict in percent; "no answer" if that is all it says, or None

        v2: em and f1 answer where the span beats [CLS]; best_em and best_f1 where it does by `threshold`,
        which is tuned on this very set and so a little too good.
        """
        texts, margins = self.answers(forward)
        given = self.scores(texts)
        if not self.null:
            em, f1_ = (100 * given.mean(0)).tolist()
            return dict(f1=f1_, em=em), None
        silent = self.scores([""] * self.n)
        order = np.argsort(-margins, kind="stable")
        sure = margins[order]
        ends = np.flatnonzero(np.append(sure[1:] < sure[:-1], True))  # equal margins answer together
        gain = np.cumsum((given - silent)[order, 1])[ends]
        threshold = float(sure[ends[gain.argmax()]] if gain.max() > 0 else sure[0] + 1)
        em, f1_ = (100 * np.where((margins > 0)[:, None], given, silent).mean(0)).tolist()
        best_em, best_f1 = (100 * np.where((margins >= threshold)[:, None], given, silent).mean(0)).tolist()
        constant = None if (margins > 0).any() else "no answer"
        return dict(f1=f1_, em=em, best_f1=best_f1, best_em=best_em, threshold=threshold), constant

    def simple(self):
        """out: dict of F1 in percent: majority, what silence gets"""
        return dict(majority=100 * float(self.scores([""] * self.n)[:, 1].mean()), bag_of_words=None)

    def about(self):
        """What infer.py has to know, as plain types"""
        return dict(head=self.head, labels=None, pair=True, stride=self.stride, longest=self.longest,
                    null=self.null)


# ---------------------------------------------------------------------------------------------------------
# Runs


class Start:
    """Where fine-tuning starts: a checkpoint, its shape with fresh weights, or ProFormer. [HF §4.1]"""

    def __init__(self, args):
        """in: args of parser(); the recipe fills in what they leave open"""
        self.path = self.weights = self.hash = None
        self.task, self.words = {}, []
        if args.ckpt:
            checkpoint = load_checkpoint(args.ckpt)
            if not checkpoint["config"].order:
                raise InputError(f"--ckpt {args.ckpt} knows sets of items and cannot read texts: wanted a "
                                 f"model of another --split")
            self.path = os.path.join(args.ckpt, "ckpt.pt") if os.path.isdir(args.ckpt) else args.ckpt
            self.config, self.hash = checkpoint["config"], checkpoint["encoder"]
            self.words = checkpoint.get("words", [])
            weights = load_model(checkpoint).state_dict()  # which looks at them
            if not args.from_scratch:
                self.weights, self.task = weights, checkpoint.get("task", {})
        else:
            self.config = Config(**PRESETS[args.preset])
        recipe = RECIPES[args.recipe or ("paper" if self.config.width >= 512 else "small")]
        for flag, value in (recipe | (dict(pool=self.config.pool) if self.task else {})).items():
            setattr(args, flag, value if getattr(args, flag) is None else getattr(args, flag))
        dropout = self.config.dropout if args.dropout is None else args.dropout
        self.config = dataclasses.replace(self.config, pool=args.pool, dropout=dropout)

    def encoder(self, texts):
        """in: texts of the training set, which a model without pre-training takes its n-grams from"""
        if self.hash:
            return Encoder.load(self.hash)
        counts = collections.Counter(word for text in texts for word in hashing.words_of(text))
        return Encoder("bits", "lsh", bits=self.config.bits, lsh=hashing.NgramLSH.fit(counts))

    def shape(self, data):
        """in: data Sentences or Spans; out: Config of a model with a head for it"""
        return dataclasses.replace(self.config, head=data.head, labels=data.outputs)

    def model(self, name, data):
        """in: name of the task, data; out: Model, with a fresh head unless the checkpoint is of this task"""
        net = Model(self.shape(data))
        if self.weights:
            kept = self.knows(name, getattr(data, "task", None))
            weights = {k: v for k, v in self.weights.items() if kept or not k.startswith("head.")}
            net.load_state_dict(weights, strict=False)  # all but a head that is new
        return net

    def knows(self, name, task):
        """Was this checkpoint fine-tuned for this very task? in: its name; Task, None for SQuAD"""
        same = self.task.get("name") == name
        if task is None or not same:
            return same
        about = (list(task.labels) if task.labels else None, list(task.texts), task.label)
        return about == tuple(self.task.get(key) for key in ("labels", "texts", "label"))


def schedule(step, steps, warmup, cycles=5):
    """The learning rate's factor: linear up, then a cosine down, five times over. [HF Table 5]"""
    if step < warmup:
        return (step + 1) / warmup
    done = (step - warmup) / max(steps - warmup, 1)
    return 0.5 * (1 + math.cos(math.pi * ((cycles * done) % 1)))


class Tuner:
    """The flags, the machine and the texts; runs one job, a task with a seed, after another."""

    # what results.json says of its runs: others are not put in their place
    SETTINGS = ("ckpt", "preset", "from_scratch", "epochs", "batch", "lr", "pool", "dropout", "limit")
    # with the texts and the checkpoint, what makes a job itself
    IDENTITY = (*SETTINGS[1:], "eval_every", "stride", "max_answer")

    def __init__(self, args):
        """in: args of parser(); all files are read, so that what is wrong with them shows at once"""
        self.args, self.names, self.start = args, resolve(args), Start(args)
        self.rank, self.world, local = torchrun_env()
        self.device, self.dtype, self.compile = choose_machine(args, local)
        self.texts = {name: read_squad(name, args) if name in SQUAD else read_sentences(name, args)
                      for name in self.names}
        self.tests = {name: read_tests(name, args) for name in self.names if args.predict and name in GLUE}
        self.baseline = args.baseline and read_results(args.baseline)
        self.current = None, None, None  # the task that is ready: the seeds of a task follow each other
        self.jobs = [(name, args.seed + i) for name in self.names for i in range(args.seeds)]
        os.makedirs(args.out, exist_ok=True)
        self.results = os.path.join(args.out, "results.json")
        for name in self.names:
            if os.path.exists(self.path(name)) and not self.before(self.path(name)):
                raise InputError(f"{self.path(name)} is of no fine-tuning: name another --out")
        there = read_results(args.out)["settings"] if os.path.exists(self.results) else {}
        for flag, here in ((flag, getattr(args, flag)) for flag in self.SETTINGS):
            if there.get(flag, here) != here:
                raise InputError(f"{args.out} holds the results of another fine-tuning ({flag} is "
                                 f"{there[flag]} there, {here} here): name another --out")
        before = {job: self.before(self.path(*job)) for job in self.jobs
                  if os.path.exists(self.path(*job))}  # of a start that was interrupted
        if args.dtype == "auto" and before:  # what was chosen once stays
            self.dtype = next(iter(before.values())).get("dtype", self.dtype)
        if self.rank == 0 and not any(there == self.identity(*job) for job, there in before.items()):
            open(os.path.join(args.out, "log.jsonl"), "w").close()
        if self.world > 1:  # the ranks meet again only to compare notes, after hours of their own work
            dist.init_process_group("gloo", timeout=datetime.timedelta(days=30))
            choice = [self.dtype]
            dist.broadcast_object_list(choice, src=0)  # each rank tried: agree on one
            [self.dtype] = choice
            if not os.path.exists(os.path.join(args.out, "log.jsonl")):  # which rank 0 has begun by now
                raise InputError(f"{args.out} is not the first rank's: wanted a folder that all nodes see")

    def ready(self, name):
        """in: name of a task; out: its data, Sentences or Spans, and the encoder that knows its words"""
        if self.current[0] != name:
            a, start, length = self.args, self.start, self.start.config.length
            *task, train, devs = self.texts[name]
            same = start.task if start.knows(name, *task or [None]) else {}  # fine-tuned for this before
            if not a.epochs and not same:
                raise ConfigError(f"--epochs 0 scores a checkpoint of this very task, and {a.ckpt} is none")
            if name in SQUAD:
                encoder = start.encoder([q[part] for q in train for part in ("context", "question")])
                data = Spans(train, devs, encoder, length, a.stride or same.get("stride"),
                             a.max_answer or same.get("longest"), a.limit, name == "squad_v2")
            else:
                encoder = start.encoder(train["first"] + (train["second"] or []))
                data = Sentences(*task, train, devs, encoder, length, a.limit, same.get("scale"))
            self.current = name, data, encoder
        return self.current[1:]

    def identity(self, name, seed):
        """What makes a job itself, as plain types: flags, texts, and the checkpoint it starts from"""
        file = self.start.path and os.stat(self.start.path)
        flags = {flag: getattr(self.args, flag) for flag in self.IDENTITY}
        texts = fingerprint(self.texts[name][-2:])  # of train and dev, which come last
        # the first seed's job holds what the report says of the task, so being first is part of it
        return flags | dict(seed=seed, first=seed == self.args.seed, task=name, texts=texts, dtype=self.dtype,
                            start=file and [file.st_size, file.st_mtime_ns])

    @staticmethod
    def before(path):
        """in: path of a checkpoint; out: the identity of the job that wrote it, {} if it was none"""
        return load_checkpoint(path).get("run", {}).get("identity", {})

    def path(self, name, seed=None):
        """Where the weights of a job are kept until all are done, and of a task, the best seed's, for good"""
        folder = os.path.join(self.args.out, name) if len(self.names) > 1 else self.args.out
        os.makedirs(folder, exist_ok=True)
        return os.path.join(folder, "ckpt.pt" if seed is None else f"seed-{seed}.pt")

    def model(self, name):
        """in: name of a task; out: model on the device that knows all words so far"""
        data, encoder = self.ready(name)
        model = self.start.model(name, data).to(self.device)
        model.set_codes(torch.from_numpy(encoder.codes()))
        return model

    def forward(self, model, examples):
        """in: model; examples list of ids; out: its logits, float32"""
        ids, mask = pad(examples, self.start.config.length if self.compile else None)
        ids, mask = ids.to(self.device), None if mask is None else mask.to(self.device)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.dtype == "bfloat16"):
            logits = model(ids, mask)
        return logits.float()

    def reader(self, model):
        """in: model; out: function(list of examples) -> logits, without dropout and gradient"""
        return torch.no_grad()(lambda examples: self.forward(model.eval(), examples))

    def run(self, name, seed):
        """fit(), unless the same command has done this job already before it was interrupted"""
        path = self.path(name, seed)
        if os.path.exists(path):
            saved = load_checkpoint(path).get("run", {})
            same = saved.get("identity") == self.identity(name, seed)
            print(f"{name}, seed {seed}: {'done before' if same else 'of other flags, begun anew'}: {path}")
            if same:
                return saved["result"]
        return self.fit(name, seed)

    def fit(self, name, seed):
        """Train and evaluate once; the best weights stay in seed-S.pt of the task's folder.

        in:  name of the task; seed
        out: dict: seed; best, last: metrics of the best and the last evaluation; step of the best; constant:
             the only label it gave, or None; and what the report needs of the task
        """
        a, (data, encoder) = self.args, self.ready(name)
        torch.manual_seed(seed)
        model = self.model(name)
        sizes = list(map(len, data.examples))
        per_epoch = -(-len(sizes) // a.batch)
        steps = a.epochs * per_epoch
        every = a.eval_every or max(1, per_epoch // 2)
        result, weights, step, since, total = dict(seed=seed), None, 0, 0, torch.zeros((), device=self.device)
        optimizer = torch.optim.AdamW(parameter_groups(model, 0.0), lr=a.lr, eps=1e-6,
                                      fused=self.device.type in ("cuda", "cpu"))

        def loss_of(chosen):
            targets = torch.from_numpy(data.targets[chosen]).to(self.device)
            return data.loss(self.forward(model, [data.examples[i] for i in chosen]), targets)

        def score():
            nonlocal weights
            scores, constant = data.evaluate(self.reader(model))
            bar.set_postfix_str(f"{data.primary} {scores[data.primary]:.2f}")
            result.update(last=scores)
            if "best" not in result or scores[data.primary] > result["best"][data.primary]:
                result.update(step=step, best=scores, constant=constant)
                weights = {k: v.detach().clone() for k, v in model.state_dict().items()}
            row = dict(task=name, seed=seed, step=step, loss=total.item() / max(since, 1), **scores)
            with open(os.path.join(a.out, "log.jsonl"), "a") as file:
                file.write(json.dumps(row) + "\n")

        if self.compile:
            with torch.random.fork_rng():  # the trial uses up random numbers, and only a first job has one
                self.compile = try_compile(
                    model, lambda: loss_of(np.arange(min(a.batch, len(sizes)))).backward())
            model.zero_grad(set_to_none=True)
        order = (chosen for epoch in range(a.epochs)
                 for chosen in batches(sizes, a.batch, np.random.default_rng([seed, epoch])))
        bar = tqdm(order, f"{name}, seed {seed}", steps, unit="step", disable=self.rank > 0)
        for chosen in bar:
            lr = a.lr * schedule(step, steps, math.ceil(0.06 * steps))
            for group in optimizer.param_groups:
                group["lr"] = lr
            model.train()
            if model.config.lsh_redraw:
                model.redraw(seed * 1_000_003 + step)
            loss = loss_of(chosen)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            total, since, step = total + loss.detach(), since + 1, step + 1
            if step % every == 0 or step == steps:
                if not math.isfinite(total):
                    raise ConfigError(f"{name}, seed {seed}: the loss is {total.item()} by step {step:,}. "
                                      f"Try a lower --lr; the same command keeps the jobs that are done")
                score()
                total, since = torch.zeros_like(total), 0
        if not steps:  # the checkpoint's own score
            score()
        model.load_state_dict(weights)
        counts = count_parameters(model)
        result |= dict(metric=data.primary, n=data.n, n_train=len(data.examples), head=data.head,
                       model=dict(parameters=counts["total"], embedding=counts["embedding"],
                                  poep=100 * counts["poep"]))
        if seed == a.seed:
            result |= dict(simple=data.simple(), pair=data.about()["pair"])
        save_checkpoint(self.path(name, seed), model, encoder.state(), words=self.start.words,
                        task=data.about() | dict(name=name, metric=data.primary, scores=result["best"]),
                        run=dict(identity=self.identity(name, seed), result=result))
        return result


def submit(tuner, name):
    """Write what GLUE's server wants of the test split; of SQuAD the answers to the dev set.

    in:  tuner; name of the task, whose ckpt.pt is there
    out: paths written
    """
    (data, encoder), kept = tuner.ready(name), tuner.path(name)
    tests = tuner.tests.get(name, {})
    examples = {split: data.encode(texts, encoder)[0] for split, (texts, _) in tests.items()}
    model = tuner.model(name)
    model.load_state_dict(load_checkpoint(kept)["model"])
    forward, paths = tuner.reader(model), []
    if data.head == "span":
        texts, margins = data.answers(forward)
        said = {q["id"]: text if not data.null or margin > 0 else ""
                for q, text, margin in zip(data.questions, texts, margins)}
        paths.append(os.path.join(os.path.dirname(kept), "predictions.json"))
        with open(paths[-1], "w", encoding="utf-8") as file:
            json.dump(said, file, ensure_ascii=False)
    for split, (_, index) in tests.items():
        guess = data.predict(examples[split], forward)
        if data.labels is None:
            said = [f"{min(max(g * data.scale[1] + data.scale[0], 0), 5):.3f}" for g in guess]
        else:  # the server wants the words of the inference tasks and the digits of the others
            words = name in ("mnli", "qnli", "rte")
            said = [data.labels[g] if words else str(g) for g in guess]
        ending = dict(test_matched="-m", test_mismatched="-mm").get(split, "")
        paths.append(os.path.join(os.path.dirname(kept), f"{GLUE[name].folder}{ending}.tsv"))
        with open(paths[-1], "w") as file:
            file.write("index\tprediction\n")
            file.writelines(f"{i}\t{label}\n" for i, label in zip(index, said))
    return paths


# ---------------------------------------------------------------------------------------------------------
# The report


def summarise(runs):
    """in: runs list of what fit() gave, one a seed, the first first; out: dict for results.json"""
    first = runs[0]
    metric, values = first["metric"], [run["best"][first["metric"]] for run in runs]
    return dict(metric=metric, seeds=[run["seed"] for run in runs], values=values,
                mean=float(np.mean(values)), std=float(np.std(values, ddof=1)) if len(values) > 1 else None,
                min=min(values), max=max(values), last=float(np.mean([run["last"][metric] for run in runs])),
                n=first["n"], n_train=first["n_train"], **first["simple"],
                all_metrics={m: float(np.mean([run["best"][m] for run in runs])) for m in first["best"]},
                one_class={str(run["seed"]): run["constant"] for run in runs if run["constant"] is not None})


def read_results(folder):
    """in: folder of another fine-tuning; out: dict of its tasks (name -> mean), parameters, embedding,
    settings, folder
    """
    path = os.path.join(folder, "results.json")
    try:
        with open(path) as file:
            results = json.load(file)
        model = results["model"]
        return dict(tasks={name: float(r["mean"]) for name, r in results["tasks"].items()}, folder=folder,
                    parameters=int(model["parameters"]), embedding=int(model["embedding"]),
                    settings=dict(results["settings"]))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{path}: not the results of a fine-tuning "
                         f"({type(error).__name__}: {error})") from error


def compare(results, base):
    """How much of a baseline's score is kept [HF §4.4 eq.4], by how much smaller a model [HF §4.4 eq.6]?

    in:  results; base, what read_results gives
    out: dict of percentages: prr by task, where the baseline scores, and on average; pcr_all, pcr_emb
    """
    ours = results["model"]
    prr = {name: 100 * r["mean"] / base["tasks"][name] for name, r in results["tasks"].items()
           if base["tasks"].get(name, 0) > 0}
    average = float(np.mean(list(prr.values()))) if prr else None
    return dict(baseline=base["folder"], prr=prr, prr_average=average,
                pcr_all=100 * (1 - ours["parameters"] / base["parameters"]),
                pcr_emb=100 * (1 - ours["embedding"] / base["embedding"]))


def report(tuner, done):
    """Put the runs together, keep one checkpoint a task, write results.json, print it.

    in:  tuner; done dict (task, seed) -> what fit() gave
    out: what results.json holds
    """
    a, results = tuner.args, dict(tasks={})
    for name in tuner.names:
        runs = [done[job] for job in tuner.jobs if job[0] == name]
        results["tasks"][name] = summarise(runs)
    results["model"] = dict(done[tuner.jobs[0]]["model"], emb=tuner.start.config.emb,
                            pretrained=tuner.start.weights is not None)
    results["settings"] = dict(dtype=tuner.dtype, **{flag: getattr(a, flag) for flag in tuner.SETTINGS})
    if len(tuner.names) > 1:
        by_seed = np.mean([r["values"] for r in results["tasks"].values()], 0)
        spread = float(np.std(by_seed, ddof=1)) if a.seeds > 1 else None
        results |= dict(average=float(by_seed.mean()), average_std=spread)
    if tuner.baseline:
        results["compared"] = compare(results, tuner.baseline)
    with open(tuner.results + ".tmp", "w") as file:
        json.dump(results, file, indent=1)
    os.replace(tuner.results + ".tmp", tuner.results)
    show(results)
    for name, task in results["tasks"].items():  # one checkpoint a task stays
        best = task["seeds"][int(np.argmax(task["values"]))]
        os.replace(tuner.path(name, best), tuner.path(name))
        for path in glob.glob(os.path.join(glob.escape(os.path.dirname(tuner.path(name))), "seed-*.pt")):
            os.remove(path)
    for path in [path for name in tuner.names if a.predict for path in submit(tuner, name)]:
        print(f"wrote {path}")
    example = dict(span='"Who wrote the book?" "The book was written by Ada Lovelace in 1843."').get(
        runs[0]["head"], '"A first text." "A second text."' if runs[0]["pair"] else '"A text."')
    print(f"done: {tuner.results}\n"
          f"next: python infer.py --ckpt {os.path.dirname(tuner.path(name))} {example}")
    return results


def show(results):
    """in: results; prints the table and what there is to say about it"""
    def cell(value):
        return "—" if value is None else f"{value:.2f}"

    print(f"\n{'task':>8} {'metric':>9} {'mean':>7} {'± std':>7} {'min':>7} {'max':>7} {'last':>7} "
          f"{'majority':>9} {'bag of words':>13} {'n':>7}")
    for name, r in results["tasks"].items():
        print(f"{name:>8} {r['metric']:>9} {r['mean']:7.2f} {cell(r['std']):>7} {r['min']:7.2f} "
              f"{r['max']:7.2f} {r['last']:7.2f} {cell(r['majority']):>9} {cell(r['bag_of_words']):>13} "
              f"{r['n']:7,}")
    if "average" in results:
        print(f"{'average':>8} {'':>9} {results['average']:7.2f} {cell(results['average_std']):>7}")
    for name, r in results["tasks"].items():
        for seed, label in r["one_class"].items():
            print(f"{name}: the run with seed {seed} always says {label!r}; it counts in the mean")
        if r["bag_of_words"] is not None and r["mean"] <= r["bag_of_words"]:
            print(f"{name}: no better than a bag of words")
    for key, value in results.get("compared", {}).items():
        print(f"{key}: {value if isinstance(value, str) else json.dumps(value)}")


def introduce(tuner, data):
    """Say what is about to run; in: tuner, data of the first task"""
    a, c = tuner.args, tuner.start.config
    with torch.device("meta"):
        counts = count_parameters(Model(tuner.start.shape(data)))
    origin = "fresh weights, no pre-training" if tuner.start.weights is None else f"pre-trained, {a.ckpt}"
    print(f"model       {c.emb}; {c.layers} layers, width {c.width}, length {c.length}; {origin}\n"
          f"parameters  {counts['total']:,}; to embed words {counts['embedding']:,} "
          f"(PoEP {100 * counts['poep']:.2f} %)\n"
          f"training    {a.epochs} epochs, batch {a.batch}, lr {a.lr:g}, dropout {c.dropout}, pool {c.pool}, "
          f"{a.seeds} seeds from {a.seed} on\n"
          f"machine     {tuner.device}, {tuner.dtype}, {'compiled' if tuner.compile else 'not compiled'}, "
          f"torch {torch.__version__}", flush=True)


def resolve(args):
    """Complain before the work begins, name the folder; out: names of the tasks"""
    own = args.task is None
    if args.ckpt is None and args.preset is None:
        raise InputError("wanted --ckpt DIR, a folder of pretrain.py, or --preset proformer")
    if args.ckpt and args.preset:
        raise InputError(f"--preset {args.preset} contradicts --ckpt: the checkpoint says what model this is")
    if own and not (args.train and args.dev and args.text and args.label):
        raise InputError("wanted --task NAME, or all of --train --dev --text --label for files of your own")
    if own and args.text.count(",") > 1:
        raise InputError(f"--text {args.text}: wanted one column, or two with a comma between")
    if not own and (args.text or args.label or args.regression):
        raise InputError(f"--task {args.task} knows its columns: --text, --label, --regression are no help")
    if bool(args.train) != bool(args.dev):
        raise InputError("--train and --dev go together")
    if args.train and (args.task in ("glue", "pydoc") or args.data_dir):
        raise InputError("--train and --dev are for one task, and stand in the place of --data_dir")
    if args.data_dir and args.task == "pydoc" or args.task not in SQUAD and (args.stride or args.max_answer):
        raise InputError("--data_dir is for GLUE and SQuAD, --stride and --max_answer for SQuAD alone")
    if args.predict and (own or args.task == "pydoc" or args.train and args.task not in SQUAD):
        raise InputError("--predict is for the test split of a task of GLUE, or for SQuAD; "
                         "other texts: infer.py --file")
    if args.epochs == 0:
        args.seeds = 1  # nothing is drawn
    folder = os.path.abspath(args.ckpt or "")
    folder = folder if os.path.isdir(folder) else os.path.dirname(folder)
    name = args.preset or os.path.basename(folder) + "-scratch" * args.from_scratch
    args.out = args.out or os.path.join("out", f"{name}-{args.task or 'own'}")
    if args.ckpt and os.path.abspath(args.out) == folder:
        raise InputError(f"--out {args.out} is the checkpoint's own folder: name another")
    names = list(AVERAGED) if args.task == "glue" else [args.task or "own"]
    if os.path.exists(os.path.join(args.out, "results.json")):
        there = read_results(args.out)["tasks"]
        if list(there) != names:
            raise InputError(f"{args.out} holds the results of {', '.join(there)}: name another --out")
    return names


def parser():
    """All flags, in the order of the ideas."""
    p = argparse.ArgumentParser(formatter_class=Help, description=__doc__.split("\nSources")[0],
                                usage="python finetune.py (--ckpt DIR | --preset proformer) --task NAME "
                                      "[flags]        (--help explains them)")
    g = p.add_argument_group("start", (
        "The checkpoint holds the shape, the hash and the weights, so no flag asks for them.\n"
        "What did pre-training buy? The same command with --from_scratch says."))
    g.add_argument("--ckpt", metavar="DIR", help="folder of a run of pretrain.py, or its ckpt.pt")
    g.add_argument("--from_scratch", action="store_true", help="the checkpoint's shape and hash alone")
    g.add_argument("--preset", choices=("proformer",), help=(
        "instead of --ckpt: ProFormer, 2 layers over 420 bits of LSH, never pre-trained [HF §4.1]"))
    g = p.add_argument_group("task", (
        "GLUE: nine tasks, of which the paper averages eight; SQuAD: the words of a text that answer.\n"
        "pydoc needs no network: which of 20 modules does a docstring come from?"))
    g.add_argument("--task", choices=(*GLUE, "glue", *SQUAD, "pydoc"), help=(
        "glue: eight in turn, then their average; None: your own files, --train --dev --text --label"))
    g.add_argument("--data_dir", metavar="DIR", help=(
        "a download in the original layout: SST-2/train.tsv, CoLA/dev.tsv ... (.tsv .csv .jsonl .gz), "
        "train-v1.1.json; None: the hub"))
    g.add_argument("--train", metavar="FILE", help=(
        "training rows, .tsv .csv .jsonl .parquet; beside --task: a part of that task, in its own columns"))
    g.add_argument("--dev", metavar="FILE", help="rows that are scored")
    g.add_argument("--text", metavar="COL[,COL]", help="column of the text, or of both texts (own files)")
    g.add_argument("--label", metavar="COL", help="column of the label (own files)")
    g.add_argument("--regression", action="store_true", help="the label is a number, and near is good")
    g.add_argument("--limit", type=at_least(1), metavar="N", help=(
        "train on N rows or questions, drawn at random, the same for all seeds; the dev set stays whole"))
    g.add_argument("--stride", type=at_least(1), metavar="n", help=(
        "words from one window of a long text to the next (SQuAD; None: a third of the model's length)"))
    g.add_argument("--max_answer", type=at_least(1), metavar="n",
                   help="longest answer in words (SQuAD; None: 30)")

    g = p.add_argument_group("training", (
        "Adam, no weight decay, 6 % warm-up, a cosine with 5 hard restarts, clipping at 1. [HF Table 5]\n"
        f"Recipes: paper {RECIPES['paper']}, small {RECIPES['small']}."))
    g.add_argument("--recipe", choices=tuple(RECIPES), help="None: small for a width < 512, else paper")
    for name, kind, text in (("epochs", at_least(0), "passes over the training rows; 0: score a checkpoint "
                                                     "of this task as it is"),
                             ("batch", at_least(1), "examples a step"),
                             ("lr", at_least(0, float), "peak learning rate")):
        g.add_argument(f"--{name}", type=kind, metavar="n", help=text + " (None: the recipe's)")
    g.add_argument("--pool", choices=("cls", "mean"), help=(
        "what the head sees of a text: its first position, or the mean of all (None: the recipe's; of a "
        "checkpoint that was fine-tuned before, what it was)"))
    g.add_argument("--dropout", type=float, metavar="p",
                   help="share of values dropped (None: the checkpoint's)")
    g.add_argument("--seeds", type=at_least(1), default=3, metavar="N", help="how many runs of each task")
    g.add_argument("--seed", type=at_least(0), default=0, metavar="S",
                   help="of the first run: head, order of the rows, dropout; the next has S+1")
    g.add_argument("--eval_every", type=at_least(1), metavar="n",
                   help="steps between evaluations; the best one's weights are kept; None: half an epoch")

    g = p.add_argument_group("report", (
        "Beside each score: its spread over seeds, the commonest class, a bag of words.\n"
        "A run that always gives the same answer is named."))
    g.add_argument("--baseline", metavar="DIR", help=(
        "--out of another fine-tuning: print which share of its score is kept (PRR) and how much smaller "
        "the model is (PCR) [HF §4.4]"))
    g.add_argument("--predict", action="store_true", help=(
        "write what GLUE's server wants of the test split (it wants WNLI and AX too), or SQuAD's "
        "predictions.json (v2: threshold 0), with the best run; afterwards: --ckpt OUT --epochs 0 --predict"))

    g = p.add_argument_group("machine", (
        "Under torchrun every rank takes its share of tasks × seeds, one model each.\n"
        "On CPUs the scores are exactly those of a single process with as many threads."))
    machine_flags(g)
    g.add_argument("--cache", default="cache", metavar="DIR", help="where what pydoc reads is kept")
    g.add_argument("--out", metavar="DIR", help=(
        "results.json, log.jsonl and ckpt.pt go here, of glue in a folder a task; None: out/CKPT-TASK"))
    return p


def main(argv=None):
    """in: argv list[str], None: the command line; out: what results.json holds. Bad input exits with 2."""
    args = parser().parse_args(argv)
    try:
        tuner = Tuner(args)
        done = {}
        for name, seed in tuner.jobs[tuner.rank::tuner.world]:
            data, _ = tuner.ready(name)
            if (name, seed) == tuner.jobs[0]:
                introduce(tuner, data)
            if data.notes and seed == args.seed:
                print(f"{name}: {data.notes}")
            done[name, seed] = tuner.run(name, seed)
        if tuner.world > 1:
            parts = [None] * tuner.world
            dist.all_gather_object(parts, done)
            done = {job: result for each in parts for job, result in each.items()}
        results = report(tuner, done) if tuner.rank == 0 else None
        leave_together()
        return results
    except (InputError, ConfigError, OSError) as error:
        print(f"finetune.py: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        print("finetune.py: told to stop; the same command repeats only the jobs that are not done",
              file=sys.stderr)
        raise SystemExit(130) from None
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


if __name__ == "__main__":
    main()
