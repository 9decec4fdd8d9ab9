"""Tasks of one or two texts, classes or numbers: GLUE, your own files, docstrings (pydoc).

Paper map:
    [GLUE §3] GLUE
Sources:
    [GLUE] Wang et al. 2019, GLUE
Out of scope: training (finetune.py); questions and answers (data/squad.py).
Deviations:
    1. Numbers to predict are standardized for training. Correlations do not change.
Notation:
    B batch   n examples

A row is (texts, label): a tuple of one text or two, and the name of a class or a float.

    read_task -> Task and rows -> SequenceClassification -> token IDs, targets -> metrics
"""

import collections
import contextlib
import dataclasses
import functools
import json
import os
import sys

import numpy as np
import torch
import torch.nn.functional as F
from tqdm import tqdm

from common import InputError, build_once, fingerprint
from data.corpus import read_hub, read_rows, reader_options
from data.python_source import python_files, python_texts
from tokenizer import build_inputs


@dataclasses.dataclass
class Task:
    """A row of TASKS: what is known of a task before its files are read."""

    texts: list  # columns, of one text or of two; a|b is either name
    labels: list | None  # classes in the hub's order; []: the training file's; None: numbers
    metrics: list  # keys of METRICS; the first is the task's own
    label: str = "label"  # column
    folder: str = ""  # of the original download, whose labels may be numbers of classes
    dev: tuple = ("dev",)  # splits to score; the first one's score counts
    header: list | None = None  # columns of files without a header line
    group_start: int = 0  # rows whose texts are equal, from this one on, are split together

    def description(self):
        """Return what a checkpoint says about its task. If all of it is equal, the task is."""
        return dict(texts=self.texts, label=self.label, labels=self.labels)


MAX_NAMED = 8  # labels that a line names
# The original files and the hub name some columns differently.
PAIR = ["sentence1|#1 String", "sentence2|#2 String"]
ENTAILMENT = ["entailment", "not_entailment"]
ACCURACY = ["accuracy"]
CLASS_METRICS = ["accuracy", "macro_f1"]  # of your own files and pydoc
NUMBER_METRICS = ["spearman", "pearson"]
TASKS = {
    "mnli": Task(["premise|sentence1", "hypothesis|sentence2"],
                 ["entailment", "neutral", "contradiction"], ACCURACY, "label|gold_label", "MNLI",
                 dev=("dev_matched", "dev_mismatched")),
    "qnli": Task(["question", "sentence"], ENTAILMENT, ACCURACY, "label", "QNLI"),
    "qqp": Task(["question1", "question2"], ["not_duplicate", "duplicate"], ["f1", "accuracy"],
                "label|is_duplicate", "QQP"),
    "rte": Task(PAIR, ENTAILMENT, ACCURACY, "label", "RTE"),
    "sst2": Task(["sentence"], ["negative", "positive"], ACCURACY, "label", "SST-2"),
    "mrpc": Task(PAIR, ["not_equivalent", "equivalent"], ["accuracy", "f1"], "label|Quality",
                 "MRPC"),
    "cola": Task(["sentence"], ["unacceptable", "acceptable"], ["matthews", "accuracy"], "label",
                 "CoLA", header=["source", "label", "star", "sentence"]),
    "stsb": Task(PAIR, None, ["spearman", "pearson"], "label|score", "STS-B"),
    "wnli": Task(PAIR, ["not_entailment", "entailment"], ACCURACY, "label", "WNLI"),
}
GLUE = [name for name in TASKS if name != "wnli"]  # the eight of the papers' average [GLUE §3]


# --------------------------------------------------------------------------------------------------
# Reading


def read_task(name, args):
    """Read a task's rows.

    Args:
        name: str, a key of TASKS, "pydoc", or "own": the files of --train and --dev.
        args: Namespace with the flags train, dev, data_dir, text, label, regression, cache,
            encoding and sep; dev may be a share of the training rows.

    Returns:
        the Task; the training rows; and dict, name of a split -> rows to score.

    Raises:
        InputError: a file cannot be read, or does not fit the task.
    """
    # what is read, and from which folder
    folder = args.data_dir
    ending = ".tsv"
    if name == "pydoc":
        task = Task(["docstring"], [], CLASS_METRICS)
        folder = build_pydoc(args.cache)
        ending = ".jsonl"
    elif name == "own":
        texts = [column.strip() for column in args.text.split(",")]
        if args.label in texts:  # the score would be perfect, and mean nothing
            raise InputError(f"--text: expected other columns than --label {args.label}, got "
                             f"{args.text}.")
        task = Task(texts, [], CLASS_METRICS, args.label)
        if args.regression:
            task = Task(texts, None, NUMBER_METRICS, args.label)
    else:
        task = TASKS[name]

    # the file of each split, None for the hub
    paths = dict.fromkeys(("train", *task.dev))
    has_share = isinstance(args.dev, float)
    if args.train:
        task = dataclasses.replace(task, dev=("dev",))  # of MNLI, too, one file is scored
        paths = dict(train=args.train)
        if not has_share:
            paths["dev"] = args.dev
    elif folder is not None:
        for split in paths:
            paths[split] = os.path.join(folder, task.folder, split + ending)

    # train comes first: dev may have no other classes
    splits = {}
    for split, path in paths.items():
        rows, source = read_source(path, ("nyu-mll/glue", name), split, task.header,
                                   **reader_options(args))
        splits[split] = parse_rows(rows, task, source)
        if task.labels == []:
            task = dataclasses.replace(task, labels=find_classes(splits["train"], source))
    train = splits.pop("train")
    if has_share:
        dev, train = draw_groups(train, round(args.dev * len(train)), seed=2)
        if not dev:
            raise InputError(f"--dev {args.dev:g}: expected a share with rows to score, got none "
                             f"of the {len(train):,} rows of {args.train}.")
        splits["dev"] = dev
    elif args.train:
        warn_of_leak(train, splits["dev"], args.dev)
    return task, train, splits


def read_source(path, hub, split, header=None, **reading):
    """Read the rows of a split.

    Args:
        path: str, a file, or None: the hub.
        hub: tuple, the arguments of read_hub, data set and configuration.
        split: str, train, or a name that begins with dev.
        header: list of str, the columns of a table without a header line.
        reading: encoding and sep of read_rows.

    Returns:
        list of dict, column -> cell; and the name of the source, for messages.
    """
    if path is not None:
        return list(read_rows(path, header, **reading)), path
    split = split.replace("dev", "validation")
    return list(read_hub(*hub, split=split)), f"{'/'.join(hub)}, {split}"


def draw_rows(rows, count, seed):
    """Return `count` of the rows, drawn at random, and the others, both in their order."""
    order = np.random.default_rng(seed).permutation(len(rows))
    drawn = [rows[i] for i in np.sort(order[:count])]
    others = [rows[i] for i in np.sort(order[count:])]
    return drawn, others


def draw_groups(rows, count, seed, start=0):
    """Return at most `count` of the rows, drawn at random, and the others, both in their order.

    Rows whose texts are equal, from number `start` on, stay together: a model that has seen them
    would score high on the others. Without such rows it draws what draw_rows does.
    """
    groups = collections.defaultdict(list)  # texts -> indices of rows
    for i in np.random.default_rng(seed).permutation(len(rows)).tolist():
        texts, _ = rows[i]
        groups[texts[start:]].append(i)
    is_drawn = np.zeros(len(rows), bool)
    for group in groups.values():
        if len(group) <= count:
            is_drawn[group] = True
            count -= len(group)
    drawn = [rows[i] for i in np.flatnonzero(is_drawn)]
    others = [rows[i] for i in np.flatnonzero(~is_drawn)]
    return drawn, others


def measure_scale(rows):
    """Return mean and standard deviation of the rows' labels, which are numbers."""
    _, numbers = zip(*rows)
    deviation = float(np.std(numbers))
    if deviation == 0:
        deviation = 1.0
    return [float(np.mean(numbers)), deviation]


def parse_rows(cells, task, source):
    """Return the rows of a task.

    Args:
        cells: list of dict, column -> cell.
        task: Task, which columns and labels to expect.
        source: str, for messages.

    Raises:
        InputError: a column is missing, or cells are no text or no label of the task. No row is
            left out: what is scored would change, and a wrong column might pass.
    """
    if not cells:
        raise InputError(f"{source}: expected rows, got none.")
    # by name: the order of columns, and other columns, do not matter
    known = {}
    for row in cells[:100]:  # an object of a .jsonl may lack a column
        known.update(row)
    columns = [find_column(names, known, source) for names in task.texts]
    label_column = find_column(task.label, known, source)
    rows = []
    errors = []  # of all rows at fault, so that one run names them
    numbers = []  # of these rows
    for number, row in enumerate(cells, 1):
        place = f"{source}, row {number:,}"
        try:
            texts = tuple(parse_text(row.get(column), place) for column in columns)
            rows.append((texts, parse_label(row.get(label_column), task, place)))
        except InputError as error:
            errors.append(str(error))
            numbers.append(f"{number:,}")
    if errors:
        raise InputError(f"{errors[0]} Rows at fault: {len(errors):,} of {len(cells):,}; the first "
                         f"are {', '.join(numbers[:5])}.")
    return rows


def find_column(names, known, source):
    """Return which of the names in "a|b" is a known column."""
    for name in names.split("|"):
        if name in known:
            return name
    expected = names.replace("|", " or ")
    raise InputError(f"{source}: expected a column {expected}, got {', '.join(known)}. --text and "
                     "--label choose those of your own files.")


def parse_text(cell, place):
    """Return a cell as str. An empty one is an empty text."""
    if cell is None:
        return ""
    if not isinstance(cell, str):
        raise InputError(f"{place}: expected text, got {cell!r:.60}.")
    return cell


def parse_label(cell, task, place):
    """Return a cell as the name of a class, which may be given by its number, or as a float."""
    text = str(cell).strip()
    if cell is None or cell != cell:  # an empty cell: NaN in a column of numbers
        text = ""
    # subtle: -1 is a number, and STS-B would learn it
    if task.folder and text in ("-1", "-1.0"):
        raise InputError(f"{place}: expected a label, got {text}. The labels of a test split are "
                         "not public. infer.py --file writes predictions.")
    if task.labels is None:
        expected = "a number below 1e38"  # float32 holds it
        with contextlib.suppress(ValueError):
            if abs(float(text)) < 1e38:
                return float(text)
    elif task.labels == []:
        expected = "any text"
        if text:
            return text
    else:
        expected = ", ".join(task.labels)
        if text in task.labels:
            return text
        # numbers of classes follow TASKS in the original files; those of your own are names
        if task.folder and text.isdecimal() and int(text) < len(task.labels):
            return task.labels[int(text)]
    raise InputError(f"{place}: expected a label ({expected}), got {cell!r:.60}.")


def find_classes(rows, source):
    """Return the distinct labels, sorted: their order in the file does not matter."""
    _, labels = zip(*rows)
    classes = sorted(set(labels))
    # a class of its own for most rows: numbers, or the wrong column
    if not 2 <= len(classes) <= max(2, len(rows) // 2):
        raise InputError(f"{source}: expected two labels or more, each for several rows, got "
                         f"{len(classes):,} for {len(rows):,} rows. --regression is for numbers.")
    folded = collections.Counter(label.casefold() for label in classes)
    alike = [label for label in classes if folded[label.casefold()] > 1]
    if alike:
        print(f"warning: {source}: {len(alike):,} labels differ only in case, and are classes of "
              f"their own: {', '.join(alike[:MAX_NAMED])}.", file=sys.stderr)
    return classes


def warn_of_leak(train, dev, path):
    """Say how many rows to score have the text, or both texts, of a training row."""
    # a model that learned them by heart would score high
    seen = {texts for texts, _ in train}
    num_seen = sum(texts in seen for texts, _ in dev)
    if num_seen > 0:
        print(f"warning: {path}: {len(dev):,} rows to score, of which {num_seen:,} have a text of "
              "--train.", file=sys.stderr)


def build_pydoc(cache):
    """Return the folder of pydoc: docstrings of the installed Python, by top-level module."""
    files = python_files()
    # another Python, or another package, is another task
    sizes = [os.path.getsize(path) for path in files.values()]
    folder = os.path.join(cache, f"pydoc-{fingerprint([3, list(files), sizes])}")
    return build_once(folder, functools.partial(write_pydoc, files))


def write_pydoc(files, folder):
    """Write train.jsonl and dev.jsonl of the largest modules. One file in ten is held out whole."""
    print("preparing pydoc, once for all runs", flush=True)
    texts = {"train": collections.defaultdict(list), "dev": collections.defaultdict(list)}
    seen = set()  # code is copied about: no text is in both splits
    for name, path in tqdm(files.items(), "reading docstrings", disable=None):
        module = name.split(os.sep)[0].removesuffix(".py")
        is_held_out = int(fingerprint(name), 16) % 10 == 0
        split = "dev" if is_held_out else "train"
        for text in python_texts(path):
            if len(text.split()) >= 5 and text not in seen:
                texts[split][module].append(text)
                seen.add(text)

    # the modules with most texts, of those that have some in both splits
    modules = texts["train"].keys() & texts["dev"].keys()
    modules = sorted(modules, key=lambda module: (-len(texts["train"][module]), module))
    # a random choice of their texts
    os.makedirs(folder)
    rng = np.random.default_rng(0)
    for module in modules[:20]:
        for split, size in (("train", 1_000), ("dev", 200)):
            part = texts[split][module]
            with open(os.path.join(folder, f"{split}.jsonl"), "a") as file:
                for i in rng.permutation(len(part))[:size]:
                    row = dict(docstring=part[i], label=module)
                    print(json.dumps(row), file=file)


# --------------------------------------------------------------------------------------------------
# Metrics: predictions and truth (n,), int classes or float values, to a fraction; 0/0 is 0


def accuracy(predicted, truth):
    """Return the share of correct classes."""
    return float((predicted == truth).mean())


def f1(predicted, truth, label=1):
    """Return the harmonic mean of precision and recall of one class."""
    num_correct = ((predicted == label) & (truth == label)).sum()
    total = (predicted == label).sum() + (truth == label).sum()
    return float(2 * num_correct / max(total, 1))


def macro_f1(predicted, truth):
    """Return the mean F1 of the classes that are predicted or true."""
    classes = np.union1d(predicted, truth)
    return float(np.mean([f1(predicted, truth, label) for label in classes]))


def pearson(predicted, truth):
    """Return the linear correlation; 0 where either is constant."""
    # of a constant the deviation is 0, and np.corrcoef gives NaN
    if np.ptp(predicted) == 0 or np.ptp(truth) == 0:
        return 0.0
    return float(np.corrcoef(predicted, truth)[0, 1])


def rank(values):
    """Return the ranks of values, from 1. Ties share their mean rank: 5 7 7 9 -> 1 2.5 2.5 4."""
    _, place, count = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(count)  # the last rank of each distinct value
    mean = last - (count - 1) / 2
    return mean[place]


def spearman(predicted, truth):
    """Return the Pearson correlation of the ranks."""
    return pearson(rank(predicted), rank(truth))


METRICS = {
    "accuracy": accuracy,
    "f1": f1,
    "macro_f1": macro_f1,
    "matthews": pearson,  # the same, of two classes numbered 0 and 1
    "pearson": pearson,
    "spearman": spearman,
}


def compare_predictions(metric, truth, predicted, others, rounds=1_000):
    """Compare two models on the same rows: the difference of their scores, and its error.

    The error is the standard deviation over rounds that draw rows and seeds anew, with replacement,
    the same for both models (paired bootstrap).

    Args:
        metric: str, a key of METRICS.
        truth: (n,).
        predicted, others: (S, n), of S seeds of each model.
        rounds: int.

    Returns:
        two floats, in percent.
    """
    truth = np.asarray(truth)
    predicted = np.asarray(predicted)
    others = np.asarray(others)

    def difference(seeds, rows):
        total = 0.0
        for seed in seeds:
            total += METRICS[metric](predicted[seed, rows], truth[rows])
            total -= METRICS[metric](others[seed, rows], truth[rows])
        return 100 * total / len(seeds)

    rng = np.random.default_rng(0)
    num_seeds, num_rows = predicted.shape
    drawn = []
    for _ in range(rounds):
        seeds = rng.integers(num_seeds, size=num_seeds)
        rows = rng.integers(num_rows, size=num_rows)
        drawn.append(difference(seeds, rows))
    return difference(range(num_seeds), np.arange(num_rows)), float(np.std(drawn))


# --------------------------------------------------------------------------------------------------
# Examples


def describe_labels(rows):
    """Return the labels of rows and their counts, the largest first; of numbers the range."""
    labels = [label for _, label in rows]
    if isinstance(labels[0], float):
        return f"labels from {min(labels):g} to {max(labels):g}"
    counts = collections.Counter(labels)
    names = [f"{label} {count:,}" for label, count in counts.most_common(MAX_NAMED)]
    if len(counts) > MAX_NAMED:
        names.append(f"and {len(counts) - MAX_NAMED:,} others")
    return f"labels {', '.join(names)}"


class SequenceClassification:
    """Rows of a classification or regression task as token IDs, of one text or of a pair.

    A `predict` that methods take is a function(examples) that yields (indices, logits
    (B, num_outputs)) of batches in any order.

    Args:
        task: Task, and rows: one split of them, as read_task returns them.
        tokenizer: HashTokenizer, which learns the words.
        length: int, positions.
        scale: mean and standard deviation of the numbers to predict. None: the task has classes.
        has_bag: bool, keep the words of a text that do not fit, for a bag of words.

    Attributes:
        examples: list of n int32 token IDs.
        targets: (n,), int64 classes, or float32 in units of `scale`.
        notes: str, what was lost, and the labels.
    """

    head = "classify"

    def __init__(self, task, rows, tokenizer, length, scale=None, has_bag=False):
        self.task = task
        self.tokenizer = tokenizer
        self.length = length
        self.scale = scale
        self.has_bag = has_bag
        # outputs: a score per class, or one number whose unit is the deviation of the labels
        self.num_outputs = 1
        if scale is None:
            self.num_outputs = len(task.labels)
        self.num_cut = 0
        self.examples, self.targets = self.encode(rows)
        self.notes = (f"{self.num_cut:,} texts or pairs exceed the {length} positions that the "
                      f"encoder reads; {describe_labels(rows)}")

    def encode(self, rows):
        """Return the examples and the targets of rows."""
        texts, labels = zip(*rows)
        columns = list(zip(*texts))
        first = self.tokenizer.ids_of_texts(columns[0])
        second = [None] * len(rows)
        if len(columns) == 2:
            second = self.tokenizer.ids_of_texts(columns[1])
        examples = []
        for a, b in zip(first, second):
            ids, num_cut = build_inputs(a, b, self.length, self.tokenizer.separator, self.has_bag)
            examples.append(ids)
            if num_cut > 0:
                self.num_cut += 1
        if self.scale is None:
            targets = [self.task.labels.index(label) for label in labels]
            return examples, np.array(targets)
        mean, deviation = self.scale
        targets = (np.array(labels) - mean) / deviation
        return examples, targets.astype(np.float32)

    def loss(self, logits, targets):
        """Return the mean loss of logits (B, num_outputs) and targets (B,)."""
        if self.scale is None:
            return F.cross_entropy(logits, targets)
        return F.mse_loss(logits[:, 0], targets)

    def evaluate(self, predict):
        """Return dict: the metrics in percent and eval_loss; and what was predicted, as targets."""
        logits = np.zeros((len(self.examples), self.num_outputs), np.float32)
        for indices, part in predict(self.examples):
            logits[indices] = part.cpu().numpy()
        predicted = logits[:, 0]
        if self.scale is None:
            predicted = logits.argmax(1)
        scores = {}
        for name in self.task.metrics:
            scores[name] = 100 * METRICS[name](predicted, self.targets)
        loss = self.loss(torch.from_numpy(logits), torch.from_numpy(self.targets))
        scores["eval_loss"] = loss.item()
        return scores, predicted

    def name_constant(self, predicted):
        """Return the only label that is predicted, as str, or None if there are several."""
        if np.ptp(predicted) > 1e-3:
            return None
        if self.scale is None:
            return self.task.labels[predicted[0]]
        mean, deviation = self.scale
        return f"{mean + deviation * predicted[0]:.4g}"

    def majority(self, train):
        """Return the metric in percent of the class that most training rows have."""
        if self.scale is not None:
            return None
        most_frequent = np.bincount(train.targets).argmax()
        metric = METRICS[self.task.metrics[0]]
        return 100 * metric(np.full_like(self.targets, most_frequent), self.targets)

    def description(self):
        """Return what infer.py has to know, as plain types."""
        return self.task.description() | dict(scale=self.scale)

