"""Tasks of one or two texts, classes or numbers: GLUE, your own files, docstrings (pydoc).

Sources:
    [GLUE] Wang et al. 2019, GLUE
Out of scope: training (finetune.py); questions and answers (data/squad.py); how the rows of pydoc
    are made (data/python_source.py).
Deviations:
    1. Numbers to predict are standardized for training. Correlations do not change.
Notation:
    B batch   n rows of a split

A record is a line of a file or of the hub: dict, column -> cell (data/rows.py: a row). A row is
what a task reads of it: (texts, label), a tuple of one text or of two, and the name of a class or a
float. An example is the token IDs of a row's texts, and a target its label as a number.

    records -> read_task -> Task and rows -> SequenceClassification -> examples, targets -> metrics
"""

import argparse
import collections
import dataclasses
import math
import os
import sys

import numpy as np
import torch
import torch.nn.functional as F

from common import InputError
from data.python_source import build_pydoc
from data.rows import list_names, peek_columns, read_hub, read_rows, reader_options
from tokenizer import build_inputs


@dataclasses.dataclass
class Task:
    """An entry of TASKS: what is known of a task before its files are read.

    Attributes:
        text_columns: list of str, of the text, or of each text of a pair.
        labels: list of str, the classes in the hub's order; [], those of the training file, which
            read_task fills in; or None, no classes: numbers, or the answers of SQuAD.
        metrics: list of str, keys of METRICS. The first is the task's own.
        label_column: str.
        folder: str, of the original download of GLUE, with a file SPLIT.tsv for each split. Its
            labels may be numbers of classes, and -1 is a hidden label. "": no task of GLUE.
        renamed: dict, a column's name in the original files -> its name on the hub, as above.
        dev_split: str, the files' name of the split to score.
        header: list of str, the columns of files without a header line, or None.
    """

    text_columns: list
    labels: list | None
    metrics: list
    label_column: str = "label"
    folder: str = ""
    renamed: dict = dataclasses.field(default_factory=dict)
    dev_split: str = "dev"
    header: list | None = None

    def description(self):
        """Return what makes two tasks the same. A checkpoint has it in description of its rows."""
        return dict(texts=self.text_columns, label=self.label_column, labels=self.labels)


PAIR = ["sentence1", "sentence2"]
ENTAILMENT = ["entailment", "not_entailment"]
ACCURACY = ["accuracy"]
CLASS_METRICS = ["accuracy", "macro_f1"]  # of your own files and pydoc
NUMBER_METRICS = ["spearman", "pearson"]
TASKS = {
    "mnli": Task(["premise", "hypothesis"], ["entailment", "neutral", "contradiction"], ACCURACY,
                 folder="MNLI", dev_split="dev_matched",
                 renamed={"sentence1": "premise", "sentence2": "hypothesis",
                          "gold_label": "label"}),
    "qnli": Task(["question", "sentence"], ENTAILMENT, ACCURACY, folder="QNLI"),
    "qqp": Task(["question1", "question2"], ["not_duplicate", "duplicate"], ["f1", "accuracy"],
                folder="QQP", renamed={"is_duplicate": "label"}),
    "rte": Task(PAIR, ENTAILMENT, ACCURACY, folder="RTE"),
    "sst2": Task(["sentence"], ["negative", "positive"], ACCURACY, folder="SST-2"),
    "mrpc": Task(PAIR, ["not_equivalent", "equivalent"], ["accuracy", "f1"], folder="MRPC",
                 renamed={"#1 String": "sentence1", "#2 String": "sentence2",
                          "Quality": "label"}),
    "cola": Task(["sentence"], ["unacceptable", "acceptable"], ["matthews", "accuracy"],
                 folder="CoLA", header=["source", "label", "star", "sentence"]),
    "stsb": Task(PAIR, None, NUMBER_METRICS, folder="STS-B", renamed={"score": "label"}),
    "wnli": Task(PAIR, ["not_entailment", "entailment"], ACCURACY, folder="WNLI"),
}
# the eight of the papers' average, without WNLI [GLUE §3]
GLUE = ["mnli", "qnli", "qqp", "rte", "sst2", "mrpc", "cola", "stsb"]

MAX_NAMED = 8  # labels that are listed
GROUPS = 20  # of rows, for standard_error

# Of draws of rows. With one seed for two flags, both would draw in the same order
LIMIT_SEED = 0  # of --limit
SELECT_SEED = 1  # of --select
DEV_SEED = 2  # of a share as --dev


# --------------------------------------------------------------------------------------------------
# Files and the hub to rows


def read_task(name, args):
    """Read a task's rows.

    Args:
        name: str, a key of TASKS, "pydoc", or "own": the files of --train and --dev.
        args: Namespace with the flags train, dev, data_dir, text, label, regression, limit,
            select, cache, encoding and sep; dev may be a share of the training rows.

    Returns:
        the Task; and dict, split -> rows: train, select where it has any, and dev.

    Raises:
        InputError: a file cannot be read, or does not fit the task.
    """
    task = choose_task(name, args)
    if name == "pydoc":  # its files are made here
        folder = build_pydoc(args.cache)
        files = {split: os.path.join(folder, f"{split}.jsonl") for split in ("train", "dev")}
        args = argparse.Namespace(**vars(args) | files)

    def read(split):
        original = os.path.join(task.folder, f"{split}.tsv")
        records, source = read_records(args, split, original, ("nyu-mll/glue", name), task.header)
        return parse_rows(records, task, source)

    train = read("train")
    if task.labels == []:  # dev may have no other classes
        task = dataclasses.replace(task, labels=find_classes(train))
    if isinstance(args.dev, float):
        dev, train = hold_out(train, args)
    else:
        dev = read(task.dev_split)
    if args.train:
        warn_of_leak(train, dev, args.dev)
    return task, divide_rows(train, args) | dict(dev=dev)


def choose_task(name, args):
    """Return the Task of a name as read_task takes it. That of "own" has the columns of --text."""
    if name == "pydoc":
        return Task(["docstring"], [], CLASS_METRICS)
    if name != "own":
        return TASKS[name]
    texts = list_names(args.text)
    if len(texts) > 2 or args.label in texts:  # of a label among the texts the score is perfect
        raise InputError(f"--text: expected one or two columns other than --label {args.label}, "
                         f"got {args.text}.")
    if args.regression:
        return Task(texts, None, NUMBER_METRICS, args.label)
    return Task(texts, [], CLASS_METRICS, args.label)


def read_records(args, split, original, hub, columns=None):
    """Read the records of a split: from the file of a flag, the original file, or the hub.

    Args:
        args: Namespace with the flags train, dev, data_dir, and of the reader.
        split: str, train, or a name that begins with dev.
        original: str, a path below --data_dir.
        hub: tuple, the first arguments of read_hub: a data set, and its configuration.
        columns: of read_rows.

    Returns:
        list of dict, column -> cell; and the name of the source, for messages.
    """
    path = args.train if split == "train" else args.dev
    if not path and args.data_dir is not None:
        path = os.path.join(args.data_dir, original)
    if path:
        return list(read_rows(path, columns, **reader_options(args))), path
    split = split.replace("dev", "validation")  # as the hub calls it
    return list(read_hub(*hub, split=split)), f"{'/'.join(hub)}, {split}"


# --------------------------------------------------------------------------------------------------
# Records to rows


def parse_label(cell, task, place):
    """Return the label in a cell, the name of a class or a float.

    Args:
        cell: str, number or None.
        task: Task, whose labels it may be.
        place: str, for messages.

    Raises:
        InputError: The cell is empty, a list or an object, or no label of the task.
    """
    label = ""  # of an empty cell, which is NaN in a column of numbers; and of a list or an object
    if isinstance(cell, (str, int, float)) and cell == cell:
        label = str(cell).strip()
    # of GLUE. subtle: -1 is a number, and STS-B would learn it
    if task.folder and label in ("-1", "-1.0"):
        raise InputError(f"{place}: expected a label, got {label}. The labels of a test split are "
                         "not public. infer.py --file writes predictions.")

    if task.labels is None:
        expected = "a number below 1e38"
        try:
            label = float(label)
        except ValueError:
            label = math.nan
        is_label = abs(label) < 1e38  # not so of infinity and NaN
    elif task.labels == []:
        expected = "any text"
        is_label = label != ""
    else:
        expected = ", ".join(task.labels)
        # files of GLUE may have its number, in the order of TASKS; in your own files 1 is a name
        if task.folder and label.isdecimal() and int(label) < len(task.labels):
            label = task.labels[int(label)]
        is_label = label in task.labels
    if not is_label:
        raise InputError(f"{place}: expected a label ({expected}), got {cell!r:.60}.")
    return label


def parse_rows(records, task, source, parse=parse_label):
    """Return the rows of a task.

    Args:
        records: list of dict, column -> cell.
        task: Task, which columns and labels to expect.
        source: str, for messages.
        parse: function of a cell, the task and a place to the label of a row.

    Raises:
        InputError: a column is missing, or a cell is no text or no label of the task. No record
            is left out: what is scored would change, and a wrong column might pass.
    """
    if not records:
        raise InputError(f"{source}: expected rows, got none.")
    # by name: the order of columns, and other columns, do not matter
    examples, _ = peek_columns(records)
    columns = {task.renamed.get(column, column): column for column in examples}  # ours -> theirs
    for name in (*task.text_columns, task.label_column):
        if name not in columns:
            raise InputError(f"{source}: expected a column {name}, got {', '.join(columns)}. "
                             "--text and --label choose those of your own files.")
    rows = []
    faults = {}  # number of a row -> message, of all rows, so that one run counts them
    for number, record in enumerate(records, 1):
        place = f"{source}, row {number:,}"
        try:
            texts = [parse_text(record.get(columns[name]), place) for name in task.text_columns]
            label = parse(record.get(columns[task.label_column]), task, place)
            rows.append((tuple(texts), label))
        except InputError as error:
            faults[number] = str(error)
    if faults:
        numbers = [f"{number:,}" for number in faults]
        raise InputError(f"{faults[min(faults)]} Rows at fault: {len(faults):,} of "
                         f"{len(records):,}; the first are {', '.join(numbers[:5])}.")
    return rows


def parse_text(cell, place):
    """Return a cell as str. An empty one is an empty text."""
    if cell is None:
        return ""
    if not isinstance(cell, str):
        raise InputError(f"{place}: expected text, got {cell!r:.60}.")
    return cell


def find_classes(rows):
    """Return the distinct labels, sorted: their order in the file does not matter."""
    classes = sorted({label for _, label in rows})
    # a class of its own for most rows: numbers, or the wrong column
    if not 2 <= len(classes) <= max(2, len(rows) // 2):
        raise InputError(f"--label: expected two labels or more, each for several rows, got "
                         f"{len(classes):,} for {len(rows):,} rows. --regression is for numbers.")
    if len({label.casefold() for label in classes}) < len(classes):
        print("warning: --label: some labels differ only in case, and are classes of their own.",
              file=sys.stderr)
    return classes


# --------------------------------------------------------------------------------------------------
# Rows to train on, and rows to score


def divide_rows(train, args, start=0):
    """Return dict, split -> rows: those of --limit, without --select, and these, if there are any.

    start is as of draw_groups.
    """
    if args.limit is not None:
        order = np.random.default_rng(LIMIT_SEED).permutation(len(train))
        train = [train[i] for i in np.sort(order[:args.limit])]
    count = round(args.select * len(train))
    select, train = draw_groups(train, count, SELECT_SEED, start)
    splits = dict(train=train)
    if select:
        splits["select"] = select
    return splits


def draw_groups(rows, count, seed, start=0):
    """Return at most `count` of the rows, drawn at random, and the others, both in their order.

    Rows with equal texts are drawn all or not at all: a model that was trained on one of them would
    score high on the others.

    Args:
        rows: list of (texts, label).
        count: int.
        seed: int.
        start: int, rows are equal if their texts from this one on are. Of questions (question,
            context) 1 keeps those about one context together.
    """
    order = np.random.default_rng(seed).permutation(len(rows))
    groups = collections.defaultdict(list)  # texts -> indices of the rows that have them
    for i in order.tolist():
        texts, _ = rows[i]
        groups[texts[start:]].append(i)

    # in random order, each group that still fits
    drawn = []
    for group in groups.values():
        if len(drawn) + len(group) <= count:
            drawn += group
    others = np.setdiff1d(order, drawn)
    return [rows[i] for i in sorted(drawn)], [rows[i] for i in others]


def hold_out(rows, args):
    """Return the share --dev of the rows of --train, to score, and the others, to train on."""
    count = round(args.dev * len(rows))
    dev, train = draw_groups(rows, count, DEV_SEED)  # by all texts: SQuAD takes no share
    if not dev or not train:
        raise InputError(f"--dev {args.dev:g}: expected a share that leaves rows to score and rows "
                         f"to train on, got {len(dev):,} and {len(train):,} of {args.train}.")
    return dev, train


def warn_of_leak(train, dev, path):
    """Say how many rows to score have the text, or both texts, of a training row."""
    # a model that learned them by heart would score high
    seen = {texts for texts, _ in train}
    num_seen = sum(texts in seen for texts, _ in dev)
    if num_seen > 0:
        print(f"warning: {path}: {len(dev):,} rows to score, of which {num_seen:,} have a text of "
              "--train.", file=sys.stderr)


# --------------------------------------------------------------------------------------------------
# Metrics: predictions and truth (n,), int classes or float values, to a fraction; 0/0 is 0


def accuracy(predicted, truth):
    """Return the share of correct classes."""
    return float((predicted == truth).mean())


def f1(predicted, truth, label=1):
    """Return the harmonic mean of precision and recall of one class."""
    # P = correct / predicted and R = correct / true, so 2PR / (P + R) is 2 correct / their sum
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


def ranks(values):
    """Return the ranks of values, from 1. Ties share their mean rank: 5 7 7 9 -> 1 2.5 2.5 4."""
    # of the distinct values, in ascending order
    _, which, count = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(count)  # 1 3 4: ties have the ranks last - count + 1 .. last
    mean = last - (count - 1) / 2
    return mean[which]


def spearman(predicted, truth):
    """Return the Pearson correlation of the ranks."""
    return pearson(ranks(predicted), ranks(truth))


METRICS = {
    "accuracy": accuracy,
    "f1": f1,
    "macro_f1": macro_f1,
    "matthews": pearson,  # the same, of two classes numbered 0 and 1
    "pearson": pearson,
    "spearman": spearman,
}


def standard_error(metric, truth, predicted, others):
    """Return the standard error of the mean difference of two models' scores, over rows and seeds.

    Args:
        metric: str, a key of METRICS.
        truth: (n,).
        predicted, others: (S, n), of S seeds of each model.

    Returns:
        float, in percent.
    """
    score = METRICS[metric]
    truth = np.array(truth)
    # the difference of each seed, without each group of rows
    num_groups = min(GROUPS, len(truth))
    group = np.random.default_rng(0).permutation(len(truth)) % num_groups
    differences = np.zeros((len(predicted), num_groups))  # (S, groups)
    for seed, (model, other) in enumerate(zip(np.array(predicted), np.array(others))):
        for left_out in range(num_groups):
            rows = group != left_out
            gain = score(model[rows], truth[rows]) - score(other[rows], truth[rows])
            differences[seed, left_out] = 100 * gain
    # rows: the jackknife, of a score that need not be a mean of rows. Seeds: the error of a mean
    variance = (num_groups - 1) * differences.mean(0).var()
    if len(differences) > 1:
        variance += differences.mean(1).var(ddof=1) / len(differences)
    return math.sqrt(variance)


# --------------------------------------------------------------------------------------------------
# Rows to examples


def measure_scale(rows):
    """Return mean and standard deviation of the rows' labels, which are numbers."""
    numbers = [label for _, label in rows]
    deviation = float(np.std(numbers))
    if deviation == 0:  # equal numbers: divided by 1 they are zeros
        deviation = 1.0
    return [float(np.mean(numbers)), deviation]


def describe_labels(rows):
    """Return the most frequent labels of rows and their counts; of numbers the range."""
    labels = [label for _, label in rows]
    if isinstance(labels[0], float):
        return f"labels from {min(labels):g} to {max(labels):g}"
    counts = collections.Counter(labels).most_common(MAX_NAMED)
    return f"labels {', '.join(f'{label} {count:,}' for label, count in counts)}"


class SequenceClassification:
    """Rows of a classification or regression task as token IDs, of one text or of a pair.

    Args:
        task: Task, as read_task returns it.
        rows: list of (texts, label), one split.
        tokenizer: HashTokenizer, which learns the words.
        length: int, positions.
        scale: mean and standard deviation of the numbers to predict. None: those of the rows, or
            the task has classes.

    Attributes:
        examples: list of n int32 token IDs.
        targets: (n,), int64 classes, or float32 in units of `scale`.
        notes: str, what was lost, and the labels.
    """

    head = "classify"

    def __init__(self, task, rows, tokenizer, length, scale=None):
        self.task = task
        self.tokenizer = tokenizer
        self.length = length
        if task.labels is None and scale is None:
            scale = measure_scale(rows)
        self.scale = scale
        # outputs: a score per class, or one number whose unit is the deviation of the labels
        self.num_outputs = 1
        if scale is None:
            self.num_outputs = len(task.labels)
        self.examples, num_cut = self.build_examples(rows)
        self.targets = self.build_targets(rows)
        self.notes = f"{num_cut:,} texts cut to {length} positions; {describe_labels(rows)}"

    def __len__(self):
        return len(self.examples)

    def build_examples(self, rows):
        """Return the token IDs of each row, and how many of them were cut to the length."""
        first = self.tokenizer.ids_of_texts([texts[0] for texts, _ in rows])
        second = [None] * len(rows)
        if len(self.task.text_columns) == 2:
            second = self.tokenizer.ids_of_texts([texts[1] for texts, _ in rows])
        examples = []
        num_cut = 0
        for a, b in zip(first, second):
            ids, num_words_cut = build_inputs(a, b, self.length, self.tokenizer.separator)
            examples.append(ids)
            if num_words_cut > 0:
                num_cut += 1
        return examples, num_cut

    def build_targets(self, rows):
        """Return the labels of rows as numbers of classes, or in units of the scale."""
        labels = [label for _, label in rows]
        if self.scale is None:
            return np.array([self.task.labels.index(label) for label in labels])
        mean, deviation = self.scale
        targets = (np.array(labels) - mean) / deviation
        return targets.astype(np.float32)

    def loss(self, logits, targets):
        """Return the mean loss of logits (B, num_outputs) and targets (B,)."""
        if self.scale is None:
            return F.cross_entropy(logits, targets)
        return F.mse_loss(logits[:, 0], targets)

    def evaluate(self, batches):
        """Score the predictions of a model.

        Args:
            batches: iterable of (indices, logits (B, num_outputs)): of all examples, in any order.

        Returns:
            dict of the metrics in percent and eval_loss; and (n,), what was predicted, as targets.
        """
        logits = np.zeros((len(self.examples), self.num_outputs), np.float32)
        for indices, part in batches:
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

    def majority(self, train):
        """Return the score in percent of the class that most training rows have.

        QuestionAnswering has this method, too: the score that needs no model.
        """
        if self.scale is not None:
            return 0.0  # the correlation of a constant
        most_frequent = np.bincount(train.targets).argmax()
        metric = METRICS[self.task.metrics[0]]
        return 100 * metric(np.full_like(self.targets, most_frequent), self.targets)

    def description(self):
        """Return what infer.py has to know, as plain types."""
        return self.task.description() | dict(scale=self.scale)
