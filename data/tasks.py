"""Tasks of one or two texts, classification and regression: GLUE, your own files, docstrings (pydoc).

Paper map:    [GLUE §3] TASKS (Wang et al. 2019)
Out of scope: training (finetune.py); questions and answers (data/squad.py).
Deviations:   1. Numbers to predict are standardized for training; correlations do not change.
Notation:     B batch   n examples
"""

import contextlib
import dataclasses
import json
import os
import sys

import numpy as np
import torch
import torch.nn.functional as F
from tqdm import tqdm

from data.batches import length_batches
from data.corpus import ENDINGS, list_documents, python_files, read_hub, read_rows
from runtime import InputError, blame_input, build_once, fingerprint, start_workers
from tokenizer import build_inputs


@dataclasses.dataclass
class Task:
    """A row of TASKS: what is known of a task before its files are read."""

    texts: tuple  # column of the first text and, of a pair, of the second; a|b: either name
    labels: tuple | None  # class names in the hub's order, () for the training file's, None for numbers
    metrics: tuple  # keys of METRICS; the first is the task's own
    label: str = "label"  # column
    rows: tuple = (None, None)  # of train and dev, where known
    folder: str = ""  # of the original download; also names the submission; "": not a benchmark
    hub: str = "nyu-mll/glue"  # OWNER/NAME, whose configuration has the task's name, or OWNER/NAME/CONFIG
    dev: tuple = ("dev",)  # splits to score; the first one's score counts
    header: list | None = None  # columns of files without a header line
    in_average: bool = False  # one of the tasks of --task glue
    submits_names: bool = False  # the server expects class names, not digits


PAIR = ("sentence1|#1 String", "sentence2|#2 String")
ENTAILMENT, THREE_WAY = ("entailment", "not_entailment"), ("entailment", "neutral", "contradiction")
GLUE, NAMES, ACCURACY = dict(in_average=True), dict(in_average=True, submits_names=True), ("accuracy",)
TASKS = {  # [GLUE §3] Adding a task is adding a row. The average of eight is without WNLI, as in the papers.
    "mnli": Task(("premise|sentence1", "hypothesis|sentence2"), THREE_WAY, ACCURACY, "label|gold_label",
                 (392_702, 9_815), "MNLI", dev=("dev_matched", "dev_mismatched"), **NAMES),
    "qnli": Task(("question", "sentence"), ENTAILMENT, ACCURACY, "label", (104_743, 5_463), "QNLI", **NAMES),
    "qqp": Task(("question1", "question2"), ("not_duplicate", "duplicate"), ("f1", "accuracy"),
                "label|is_duplicate", (None, 40_430), "QQP", **GLUE),
    "rte": Task(PAIR, ENTAILMENT, ACCURACY, "label", (2_490, 277), "RTE", **NAMES),
    "sst2": Task(("sentence",), ("negative", "positive"), ACCURACY, "label", (67_349, 872), "SST-2", **GLUE),
    "mrpc": Task(PAIR, ("not_equivalent", "equivalent"), ("accuracy", "f1"), "label|Quality", (3_668, 408),
                 "MRPC", **GLUE),
    "cola": Task(("sentence",), ("unacceptable", "acceptable"), ("matthews", "accuracy"), "label",
                 (8_551, 1_043), "CoLA", header=["source", "label", "star", "sentence"], **GLUE),
    "stsb": Task(PAIR, None, ("spearman", "pearson"), "label|score", (5_749, 1_500), "STS-B", **GLUE),
    "wnli": Task(PAIR, ENTAILMENT[::-1], ACCURACY, "label", (635, 71), "WNLI"),
}
PARTS = "Give a part of a task by --train and --dev."
TABLES = [ending + gz for ending in ENDINGS if ending != ".txt" for gz in ("", ".gz")]
HIDDEN = "The labels of a test split are not public. --predict writes the file to submit."


def read_source(args, flag, folder, names, hub, split, header=None):
    """Return rows and source: the file of a flag, else a table in --data_dir, else a split on the hub."""
    path = flag and getattr(args, flag)
    if not path and args.data_dir:
        paths = [os.path.join(args.data_dir, folder, name + ending) for name in names for ending in TABLES]
        path = next(filter(os.path.isfile, paths), paths[0])
    if path:
        return list(read_rows(path, header)), path
    owner, name, *config = hub.split("/")
    split = split.replace("dev", "validation")
    return list(read_hub(f"{owner}/{name}", *config[:1], split=split)), f"{hub}, {split}"


def parse_label(cell, task, source):
    """Return a cell as a class name, however it is numbered, or as a float for a task of numbers."""
    text = str(cell).strip() if isinstance(cell, (str, int, float)) and cell == cell else ""  # no NaN
    if task.folder and text in ("-1", "-1.0"):
        raise InputError(f"{source}: expected a label, got -1. {HIDDEN}")
    if task.labels is None:
        with contextlib.suppress(ValueError):
            if abs(float(text)) < 1e38:  # NaN is not; float32 holds the others
                return float(text)
    elif text in task.labels or text and not task.labels:
        return text
    elif task.folder and text.isdecimal() and int(text) < len(task.labels):
        return task.labels[int(text)]
    expected = "a number below 1e38" if task.labels is None else ", ".join(task.labels) or "any text"
    raise InputError(f"{source}: expected a label ({expected}), got {cell!r:.60}.")


def parse_rows(rows, task, source, has_labels=True):
    """Return dict(first list[str], second list[str] or None, labels list[str] or list[float]) of rows.

    Args: rows list[dict]; task Task; source str, for messages; has_labels bool. InputError: they do not fit.
    """
    known, columns = dict.fromkeys(name for row in rows[:100] for name in row), []
    for names in (*task.texts, *[task.label] * has_labels):
        name = next((name for name in (names, *names.split("|")) if name in known), None)
        if name is None:
            hint = f" {HIDDEN}" if task.folder and names == task.label else ""
            raise InputError(f"{source}: expected a column {names.replace('|', ' or ')}, got "
                             f"{', '.join(known) or 'no rows'}.{hint}")
        columns.append([row.get(name) for row in rows])
    *texts, labels = columns if has_labels else (*columns, [])
    for i, cells in enumerate(zip(*texts), 1):
        if set(map(type, cells)) - {str, type(None)}:
            raise InputError(f"{source}, row {i:,}: expected text, got {str(cells)[:60]}.")
    first, second = ([cell or "" for cell in column] for column in (texts[0], texts[-1]))
    if not any(map(str.strip, first + second)):
        raise InputError(f"{source}: expected text, got {len(rows):,} rows without any.")
    labels = [parse_label(cell, task, f"{source}, row {i:,}") for i, cell in enumerate(labels, 1)]
    return dict(first=first, second=second if len(texts) > 1 else None, labels=labels)


def read_tests(name, args):
    """Return dict test split -> (texts as of parse_rows, the index of each row for the server)."""
    tests, task = {}, TASKS[name]
    for split in (dev.replace("dev", "test") for dev in task.dev):
        rows, source = read_source(args, None, task.folder, [split], f"{task.hub}/{name}", split, task.header)
        index = [row.get("index", row.get("idx", row.get("id", i))) for i, row in enumerate(rows)]
        tests[split] = parse_rows(rows, task, source, has_labels=False), index
    return tests


def read_task(name, args):
    """Return Task, the training split, and dict name -> dev split, each as of parse_rows.

    name is a key of TASKS, "pydoc", or "own": the files of --train and --dev; args has the flags. Raises
    InputError for a file that cannot be read or does not fit the task.
    """
    if name == "pydoc":
        return read_pydoc(args.cache)
    task = TASKS.get(name) or Task(
        tuple(map(str.strip, args.text.split(","))), None if args.regression else (),
        ("spearman", "pearson") if args.regression else ("accuracy", "macro_f1"), args.label)
    splits, dev = {}, task.dev[:1] if args.train else task.dev
    for split, flag, expected in zip(("train", *dev), ("train", "dev", None), (*task.rows, None)):
        rows, source = read_source(args, flag, task.folder, [split], f"{task.hub}/{name}", split, task.header)
        splits[split] = parse_rows(rows, task, source)
        if task.labels == ():  # sorted: their order in the file does not matter
            task.labels = tuple(sorted(set(splits[split]["labels"])))
            if not 2 <= len(task.labels) <= max(2, len(rows) // 2):
                found = f"{len(task.labels):,} for {len(rows):,} rows. --regression predicts numbers."
                raise InputError(f"{source}: expected two labels or more, each for several rows, got {found}")
        if expected and not args.train and len(rows) != expected:
            raise InputError(f"{source}: expected {expected:,} rows, got {len(rows):,}. {PARTS}")
    if args.train:
        seen, dev = ([*zip(part["first"], part["second"] or part["first"])] for part in splits.values())
        num_seen, note = len(list(filter(set(seen).__contains__, dev))), " It is not the official dev set."
        print("warning: " * bool(num_seen) + f"{args.dev}: {len(dev):,} rows to score, of which {num_seen:,} "
              "have a text of --train." + note * bool(task.folder), file=sys.stderr)
    return task, splits.pop("train"), splits


def read_pydoc(cache, num_labels=20, max_texts=1_000):
    """Read docstrings of the installed Python, labeled by top-level module; return as read_task.

    One file in ten is held out whole. Each of the num_labels largest modules has max_texts at most.
    """
    files = python_files()
    identity = [2, num_labels, max_texts] + [(name, os.path.getsize(path)) for name, path in files.items()]

    def build(path):
        rows, seen = {}, set()
        print("preparing pydoc, once for all runs", flush=True)
        with start_workers() as pool:
            texts_of_files = pool.imap(list_documents, (("python", [path]) for path in files.values()), 64)
            bar = tqdm(zip(files, texts_of_files), "reading docstrings", len(files), disable=None)
            for name, texts in bar:
                module = rows.setdefault(name.split(os.sep)[0].removesuffix(".py"), ([], []))
                part = module[int(fingerprint(name), 16) % 10 == 0]
                part += [text for text in dict.fromkeys(texts) if len(text.split()) >= 5 and text not in seen]
                seen.update(texts)
        labels = [label for label in sorted(rows) if all(rows[label])]  # train and held out
        rng, splits = np.random.default_rng(0), ([], [])
        for label in sorted(labels, key=lambda label: -len(rows[label][0]))[:num_labels]:
            for split, texts, most in zip(splits, rows[label], (max_texts, max_texts // 5)):
                split += [(label, texts[i]) for i in rng.permutation(len(texts))[:most].tolist()]
        with open(path, "w") as file:
            json.dump([[*zip(*split)] for split in splits], file)
    path = build_once(os.path.join(cache, f"pydoc-{fingerprint(identity)}.json"), build)
    with open(path) as file, blame_input(f"{path}: damaged file. Remove it, and it is built again"):
        train, dev = (dict(first=texts, second=None, labels=labels) for labels, texts in json.load(file))
    task = Task(("docstring",), tuple(sorted(set(train["labels"]))), ("accuracy", "macro_f1"))
    return task, train, {"dev": dev}


# Metrics: predictions and truth (n,), int classes or float values, to a fraction; 0/0 is 0
def accuracy(predicted, truth):
    """Return the share of correct classes."""
    return float((predicted == truth).mean())


def f1(predicted, truth, label=1):
    """Return the harmonic mean of precision and recall of one class."""
    correct = ((predicted == label) & (truth == label)).sum()
    return float(2 * correct / max((predicted == label).sum() + (truth == label).sum(), 1))


def macro_f1(predicted, truth):
    """Return the mean F1 of the classes that are predicted or true."""
    return float(np.mean([f1(predicted, truth, label) for label in np.union1d(predicted, truth)]))


def pearson(predicted, truth):
    """Return the linear correlation; 0 where either is constant."""
    if np.ptp(predicted) == 0 or np.ptp(truth) == 0:
        return 0.0
    return float(np.corrcoef(predicted, truth)[0, 1])


def spearman(predicted, truth):
    """Return the Pearson correlation of the ranks; ties share their mean rank."""
    def rank(values):
        _, place, count = np.unique(values, return_inverse=True, return_counts=True)
        return (np.cumsum(count) - (count - 1) / 2)[place]  # 5 7 7 9 -> 1 2.5 2.5 4

    return pearson(rank(predicted), rank(truth))


# Matthews correlation is Pearson's of two classes numbered 0 and 1
METRICS = {m.__name__: m for m in (accuracy, f1, macro_f1, pearson, spearman)} | dict(matthews=pearson)


class SequenceClassification:
    """Classification or regression of a text or of a pair.

    Args: task, train, devs as read_task returns them; tokenizer HashTokenizer, which learns the words; length
        int, positions; limit int, training rows, drawn at random (default: all); scale (mean, standard
        deviation) of the numbers to predict (default: of the training rows); has_bag, keep whole texts.
    Attributes: examples, list of int32 IDs; targets, int64 (n,) classes or float32 (n,) in units of `scale`.
    Argument predict of methods: function(examples) -> (indices, logits (B, num_outputs)) of batches.
    """
    head = "classify"

    def __init__(self, task, train, devs, tokenizer, length, limit=None, scale=None, has_bag=False):
        self.task, self.labels, self.metric, self.length = task, task.labels, task.metrics[0], length
        self.num_cut, self.num_outputs, self.has_one_text = 0, len(task.labels or [0]), len(task.texts) == 1
        self.tokenizer, self.columns, self.has_bag = tokenizer, [*task.texts, task.label], has_bag
        if limit and limit < len(train["labels"]):
            chosen = np.sort(np.random.default_rng(0).permutation(len(train["labels"]))[:limit]).tolist()
            train = {name: column and [column[i] for i in chosen] for name, column in train.items()}
        labels = train["labels"]
        self.scale = None if task.labels else scale or (float(np.mean(labels)), float(np.std(labels)) or 1.0)
        if self.scale and not (len(scale := self.scale) == 2 and np.isfinite(scale).all() and scale[1] > 0):
            raise InputError(f"scale: expected a mean and a deviation above 0, got {scale}.")
        self.examples, self.targets = self.encode(train)
        self.devs = {name: self.encode(dev) for name, dev in devs.items()}
        self.rows = dict(train=len(self.examples)) | {name: len(ids) for name, (ids, _) in self.devs.items()}
        self.n = self.rows[task.dev[0]]
        self.notes = f"{self.num_cut:,} texts or pairs exceed the {length} positions that the encoder reads"

    def encode(self, split):
        """Return the examples and targets of a split as of parse_rows."""
        first = self.tokenizer.ids_of_texts(split["first"])
        second = self.tokenizer.ids_of_texts(split["second"]) if split["second"] else [None] * len(first)
        options = self.length, self.tokenizer.separator, self.has_bag and self.has_one_text
        inputs = [build_inputs(a, b, *options) for a, b in zip(first, second)]
        self.num_cut += sum(num_cut > 0 for _, num_cut in inputs)
        if self.labels:
            number = {name: i for i, name in enumerate(self.labels)}
            targets = np.array([number[name] for name in split["labels"]], np.int64)
        else:
            targets = ((np.array(split["labels"]) - self.scale[0]) / self.scale[1]).astype(np.float32)
        return [ids for ids, _ in inputs], targets

    def loss(self, logits, targets):
        """Return the mean loss of logits (B, num_outputs) and targets (B,)."""
        return F.cross_entropy(logits, targets) if self.labels else F.mse_loss(logits[:, 0], targets)

    def predict_labels(self, examples, predict):
        """Return (n,) of examples: classes, or values in units of `scale`."""
        order, logits = zip(*predict(examples))
        logits = torch.cat(logits).cpu().numpy()[np.argsort(np.concatenate(order))]  # (n, num_outputs)
        return logits.argmax(1) if self.labels else logits[:, 0]

    def evaluate(self, predict):
        """Return a dict of metrics in percent, and the only label that is ever predicted, or None."""
        scores, constant_prediction = {}, None
        for split, (examples, truth) in self.devs.items():
            predicted = self.predict_labels(examples, predict)
            prefix = "" if split == self.task.dev[0] else split.removeprefix("dev_") + "_"
            scores |= {prefix + name: 100 * METRICS[name](predicted, truth) for name in self.task.metrics}
            if not prefix and np.ptp(predicted) < 1e-3:
                constant_prediction = (self.labels[predicted[0]] if self.labels else
                                       f"{self.scale[0] + self.scale[1] * predicted[0]:.4g}")
        return scores, constant_prediction

    def baselines(self):
        """Return the task's metric in percent of majority and bag_of_words, which need no transformer."""
        predicted, (examples, truth) = {}, self.devs[self.task.dev[0]]
        if self.labels:
            predicted["majority"] = np.full_like(truth, np.bincount(self.targets).argmax())
        if self.labels and self.tokenizer.words:  # CANINE has none
            predicted["bag_of_words"] = bag_of_words(self.examples, self.targets, examples, self.num_outputs)
        scores = {name: 100 * METRICS[self.metric](classes, truth) for name, classes in predicted.items()}
        return dict(majority=None, bag_of_words=None) | scores

    def description(self):
        """Return what infer.py has to know, as plain types."""
        texts, labels, scale = (value and list(value) for value in (self.task.texts, self.labels, self.scale))
        return dict(head=self.head, labels=labels, scale=scale, texts=texts, label=self.task.label,
                    pair=len(texts) == 2)

    def submission(self, predicted):
        """Return predictions as the strings that the server of the benchmark expects."""
        if self.labels is None:  # STS-B rates from 0 to 5
            return [f"{min(max(value * self.scale[1] + self.scale[0], 0), 5):.3f}" for value in predicted]
        return [self.labels[number] if self.task.submits_names else str(number) for number in predicted]


def bag_of_words(examples, targets, others, num_labels, epochs=5):
    """Return classes of `others`, int64, by logistic regression on the mean of a text's distinct words."""
    num_ids, rng = 1 + max(int(ids.max()) for ids in examples + others), np.random.default_rng(0)
    table = torch.zeros(num_ids, num_labels)  # the weights of [CLS] are a bias
    bag = torch.nn.EmbeddingBag.from_pretrained(table, freeze=False, mode="mean", sparse=True)
    optimizer = torch.optim.SparseAdam(bag.parameters())

    def compute_logits(some):
        some = [torch.from_numpy(np.unique(ids)).long() for ids in some]
        return bag(torch.cat(some), torch.tensor([0, *map(len, some[:-1])]).cumsum(0))

    for epoch in range(epochs):
        optimizer.param_groups[0]["lr"] = 0.1 * (1 - epoch / epochs)
        for chosen in length_batches([1] * len(examples), 32, rng):
            logits = compute_logits([examples[i] for i in chosen])
            optimizer.zero_grad()
            F.cross_entropy(logits, torch.from_numpy(targets[chosen])).backward()
            optimizer.step()
    return compute_logits(others).argmax(1).numpy()
