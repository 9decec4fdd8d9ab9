"""Texts with a label: GLUE, your own files, docstrings. Files to rows, rows to examples, scores.

Sources:
    [GLUE] Wang et al. 2019, GLUE
Out of scope: the list of tasks and the rows that choose and score (data/tasks.py); questions and
    answers (data/squad.py); how the rows of pydoc are made (data/python_source.py).
Deviations:
    1. Numbers to predict are standardized for training. Correlations do not change.
Notation:
    B batch   n rows of a split

    record   dict, column -> cell, as data/rows.py reads it from a file or the hub
    row      (texts, label): a tuple of one text or two, and the name of a class or a float
    example  the token IDs of a row's texts
    target   a row's label as a number

Example: a line of MRPC's original file. read_table gives the row, SequenceClassification the rest.

    record   {"Quality": "1", "#1 String": "a cat", "#2 String": "cats"}
    row      (("a cat", "cats"), "equivalent")
    example  [CLS] a cat [SEP] [SEP] cats [SEP]
    target   1
"""

import math
import os

import numpy as np
import torch
import torch.nn.functional as F

from data.python_source import build_pydoc
from data.rows import is_hub_id, number_rows, read_hub, reader_options
from data.splitters import clean_item
from support.common import InputError, send
from tokenizer import build_inputs

GROUPS = 20  # groups of rows in standard_error


# --------------------------------------------------------------------------------------------------
# Files and the hub to rows
#
# A reader of a task returns the rows of a split, "train" or "dev". Its arguments are the task, the
# flags and the split


def read_table(task, args, split):
    """Read a table of texts and labels: --train or --dev, else that of a task of GLUE.

    Args:
        task: data.tasks.Task.
        args: Namespace with the flags train, dev and data_dir, and those of the reader of files.
        split: str, train or dev.

    Returns:
        list of (texts, label).
    """
    if split == "dev":
        split = task.dev_split
    original = os.path.join(task.folder, f"{split}.tsv")
    records, source = read_records(args, split, original, f"nyu-mll/glue:{task.name}", task.header)
    parse = parse_class if task.has_classes else parse_number
    return parse_rows(records, task, source, parse)


def read_pydoc(task, args, split):
    """Read the docstrings of the installed Python, as read_table reads a file."""
    path = f"{build_pydoc(args.cache)}/{split}.jsonl"
    return parse_rows(list(number_rows(path)), task, path, parse_class)


def read_records(args, split, original, hub_id, columns=None):
    """Read a split from the first of: --train or --dev; --data_dir/original; the hub.

    Args:
        args: as in read_table.
        split: str, train, or a name that begins with dev.
        original: str, a path below --data_dir.
        hub_id: str, the data set on the hub, unless --train or --dev names one.
        columns: list of str, for files without a header line, or None.

    Returns:
        list of (number, record), of dict, column -> cell; and the name of the source, for messages.
    """
    path = args.train if split == "train" else args.dev
    if path is None and args.data_dir is not None:
        path = os.path.join(args.data_dir, original)
    if path is not None:
        if not is_hub_id(path):
            return list(number_rows(path, columns, **reader_options(args))), path
        hub_id = path
    split = split.replace("dev", "validation")  # as the hub calls it
    try:
        return list(enumerate(read_hub(hub_id, split), 1)), f"{hub_id} ({split})"
    except InputError as error:
        raise InputError(f"{error} Without the hub, use --data_dir, or --train and "
                         "--dev.") from error


# --------------------------------------------------------------------------------------------------
# Records to rows


def parse_rows(records, task, source, parse_label):
    """Return the rows of a task.

    No record is left out: the scored rows would differ, and a wrong column might go unnoticed.

    Args:
        records: list of (number, record), as read_records returns them.
        task: data.tasks.Task, tells which columns and labels to expect.
        source: str, for messages.
        parse_label: function of a cell, the task and a place, str, that returns the row's label.

    Raises:
        InputError: a column is missing, or a cell is no text or no label of the task.
    """
    if not records:
        raise InputError(f"{source}: expected rows, got none.")
    rows = []
    for number, record in records:
        place = f"{source}, row {number:,}"
        cells = name_cells(record, task, place)
        texts = tuple(parse_text(cells[name], place) for name in task.text_columns)
        label = parse_label(cells[task.label_column], task, place)
        rows.append((texts, label))
    return rows


def name_cells(record, task, place):
    """Return the cells of a record by our names of the columns: their order does not matter."""
    cells = {task.renamed.get(column, column): cell for column, cell in record.items()}
    if len(cells) < len(record):  # the later one would win in silence
        raise InputError(f"{place}: expected one name for each column, got both names of one: "
                         f"{', '.join(record)}.")
    for name in (*task.text_columns, task.label_column):
        if name not in cells:
            raise InputError(f"{place}: no column {name} among {', '.join(cells)}. "
                             "--text and --label choose those of your own files.")
    return cells


def parse_text(cell, place):
    """Return the text in a cell; an empty cell has an empty text."""
    if cell is None:
        return ""
    if not isinstance(cell, str):
        raise InputError(f"{place}: expected text, got {cell!r:.60}.")
    return cell


def parse_class(cell, task, place):
    """Return the class in a label cell, str: one of the task's labels if they are known."""
    label = read_label(cell)
    names = task.labels
    # GLUE's files may have the number of a class; in your own files, 1 is a name
    if task.is_glue and label.isdecimal() and int(label) < len(names):
        label = names[int(label)]
    if label == "" or (names and label not in names):
        expected = ", ".join(names) if names else "any text"
        raise InputError(f"{place}: expected a label ({expected}), got {cell!r:.60}.")
    return label


def parse_number(cell, task, place):
    """Return the number in a label cell, float."""
    try:
        number = float(read_label(cell))
    except ValueError:
        number = math.nan
    is_hidden = task.is_glue and number == -1
    # NaN is not below 1e38; above it, float32 is infinite
    if is_hidden or not abs(number) < 1e38:
        raise InputError(f"{place}: expected a label (a number below 1e38; GLUE hides labels as "
                         f"-1), got {cell!r:.60}.")
    return number


def read_label(cell):
    """Return the text of a label cell. It is "" if the cell is empty, a list or an object."""
    if isinstance(cell, float) and cell.is_integer():
        cell = int(cell)  # JSON may have 1 and 1.0, which are one class
    if isinstance(cell, (str, int, float)) and cell == cell:  # NaN is an empty cell of numbers
        return clean_item(str(cell))
    return ""


# --------------------------------------------------------------------------------------------------
# Rows to examples


class Examples:
    """Base class: the rows of a split as token IDs. They score a model's logits.

    A row is what is scored: a text, a pair of texts, or a question. An example is what a model
    reads at once. A text is one example; a question has one for each window of its context.

    A subclass sets the attributes below but num_rows, and has

        loss       (logits, indices) -> the mean loss to train on, a tensor. logits is float32
                   (B, ...), a model's outputs for B examples, indices int64 (B,), which these are
        evaluate   (batches) -> scores, dict, metric -> percent, and eval_loss; and what the model
                   predicts, list of num_rows classes, numbers or answers. batches is a list of
                   (indices, logits): all examples once, in any order
        majority   (train) -> the score in percent that needs no model. train is the Examples of
                   the training rows

    Args:
        task: data.tasks.Task, as read_task returns it.
        rows: list of (texts, label), those of the split.
        tokenizer: HashTokenizer, which learns the words.
        length: int, the most positions of an example.

    Attributes:
        ids: list of int32 arrays, the token IDs of each example.
        num_rows: int.
        num_outputs: int, the outputs of a model, or of each position.
        notes: str, what was lost, such as words that did not fit.
    """

    head = None  # of the model, a key of model.HEADS
    has_control = False  # whether each row has one number, `targets`, that a bag of words can learn

    def __init__(self, task, rows, tokenizer, length):
        self.task = task
        self.tokenizer = tokenizer
        self.length = length
        self.num_rows = len(rows)


class SequenceClassification(Examples):
    """The rows of a classification or regression task as token IDs: each row is an example.

    Attributes, besides those of Examples:
        targets: (n,), int64 classes, or float32 numbers in units of the task's scale.
        num_outputs: int, the model's outputs: a score per class, or one number.
        notes: str, how many texts were cut, and how many rows have no words.
    """

    head = "classify"
    has_control = True

    def __init__(self, task, rows, tokenizer, length):
        super().__init__(task, rows, tokenizer, length)
        self.num_outputs = len(task.labels) if task.has_classes else 1
        self.encode_texts([texts for texts, _ in rows])
        self.encode_labels([label for _, label in rows])

    def encode_texts(self, pairs):
        """Set ids and notes. pairs: list of n tuples, of one text or two."""
        columns = [self.tokenizer.ids_of_texts(texts) for texts in zip(*pairs)]
        words_per_row = [sum(map(len, texts_ids)) for texts_ids in zip(*columns)]
        num_empty = words_per_row.count(0)
        if len(columns) == 1:
            columns.append([None] * len(pairs))  # no second texts
        self.ids = []
        num_cut = 0
        for first, second in zip(*columns):
            ids, num_words_cut = build_inputs(first, second, self.length, self.tokenizer.separator)
            self.ids.append(ids)
            if num_words_cut > 0:
                num_cut += 1
        self.notes = f"{num_cut:,} texts cut to {self.length} positions, {num_empty:,} empty"

    def encode_labels(self, labels):
        """Set targets. labels: list of n classes, str, or numbers."""
        if self.task.has_classes:
            self.targets = np.array([self.task.labels.index(label) for label in labels])
        else:
            mean, deviation = self.task.scale
            self.targets = np.float32((np.array(labels) - mean) / deviation)

    def loss(self, logits, indices):
        """Return the mean loss of the examples with these indices; logits is (B, num_outputs)."""
        targets = send(torch.from_numpy(self.targets[indices]), logits.device)  # (B,)
        if not self.task.is_balanced:
            return self.unweighted_loss(logits, targets)
        # subtle: a mean over rows. torch's own mean divides by the weights of the batch, so that
        # a batch of frequent classes alone would count as much as if there were no weights
        weights = send(self.class_weights(), logits.device)
        return F.cross_entropy(logits, targets, weights, reduction="none").mean()

    def class_weights(self):
        """Return the weight of a row of each class, float32 (classes,): all classes weigh alike.

        It is n / (classes · rows of the class): for 3 rows "up" and 1 "down", 2/3 and 2.
        """
        counts = np.bincount(self.targets, minlength=self.num_outputs)
        weights = self.num_rows / (self.num_outputs * np.maximum(counts, 1))
        return torch.from_numpy(weights).float()

    def unweighted_loss(self, logits, targets):
        """Return the mean loss of rows that weigh alike; targets is (B,)."""
        if self.task.has_classes:
            return F.cross_entropy(logits, targets)
        return F.mse_loss(logits[:, 0], targets)

    def evaluate(self, batches):
        """Return the metrics in percent and eval_loss, dict; and the predictions, a list.

        Args:
            batches: list of (indices, logits (B, num_outputs)), all rows in any order.
        """
        logits = np.zeros((self.num_rows, self.num_outputs), np.float32)
        for indices, part in batches:
            logits[indices] = part.cpu().numpy()
        if self.task.has_classes:
            predicted = logits.argmax(1)
        else:
            predicted = logits[:, 0]
        scores = {}  # plain numbers, as checkpoints hold them
        for name in self.task.metrics:
            scores[name] = 100 * float(METRICS[name](predicted, self.targets))
        loss = self.unweighted_loss(torch.from_numpy(logits), torch.from_numpy(self.targets))
        scores["eval_loss"] = loss.item()
        return scores, predicted.tolist()

    def majority(self, train):
        """Return the score in percent that needs no model: all are train's most frequent class."""
        if not self.task.has_classes:
            return 0.0  # the correlation of a constant
        most_frequent = np.bincount(train.targets).argmax()
        metric = METRICS[self.task.metrics[0]]
        return 100 * float(metric(np.full_like(self.targets, most_frequent), self.targets))


# --------------------------------------------------------------------------------------------------
# Metrics
#
# Each takes predictions and truth, arrays (n,) of int classes or of floats. It returns a fraction,
# not percent, and 0 in place of 0/0


def accuracy(predicted, truth):
    """Return the share of correct classes."""
    return (predicted == truth).mean()


def f1(predicted, truth, label=1):
    """Return the harmonic mean of precision and recall of one class."""
    # P = correct / predicted and R = correct / true, so 2PR / (P + R) is 2 correct / their sum
    is_predicted = predicted == label
    is_true = truth == label
    total = is_predicted.sum() + is_true.sum()
    return 2 * (is_predicted & is_true).sum() / max(total, 1)


def macro_f1(predicted, truth):
    """Return the mean F1 of the classes that are predicted or true."""
    classes = np.union1d(predicted, truth)
    return np.mean([f1(predicted, truth, label) for label in classes])


def pearson(predicted, truth):
    """Return the linear correlation, or 0 if one of the two is constant."""
    # np.corrcoef would divide by its deviation, 0, and give NaN
    if np.ptp(predicted) == 0 or np.ptp(truth) == 0:
        return 0.0
    return np.corrcoef(predicted, truth)[0, 1]


def ranks(values):
    """Return the ranks of values, from 1. Ties share their mean rank: 5 7 7 9 -> 1 2.5 2.5 4."""
    # distinct values in ascending order
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
    "matthews": pearson,  # for two classes, numbered 0 and 1, they are the same
    "pearson": pearson,
    "spearman": spearman,
}


def standard_error(metric, predicted, others, truth):
    """Return the standard error of the mean difference between two models' scores, in percent.

    The error over rows is that of a jackknife: the scores are measured again without each of 20
    groups of rows. The error over seeds, of the mean of their differences, is added to it.

    Args:
        metric: str, a key of METRICS.
        predicted, others: (S, n), predictions of S seeds of each model.
        truth: (n,).
    """
    score = METRICS[metric]
    truth = np.array(truth)
    num_groups = min(GROUPS, len(truth))
    group_of_row = np.random.default_rng(0).permutation(len(truth)) % num_groups  # (n,)
    differences = []  # differences[s][g]: gain of seed s without group g
    for model, other in zip(np.array(predicted), np.array(others), strict=True):  # (n,), of a seed
        gains = []
        for left_out in range(num_groups):
            rows = group_of_row != left_out
            gains.append(score(model[rows], truth[rows]) - score(other[rows], truth[rows]))
        differences.append(gains)
    differences = 100 * np.array(differences)  # (S, groups)
    of_groups = differences.mean(0)  # (groups,), without each group, means over seeds
    of_seeds = differences.mean(1)  # (S,), close to each seed's difference on all rows
    variance = (num_groups - 1) * of_groups.var()  # delete-a-group jackknife
    if len(of_seeds) > 1:
        variance += of_seeds.var(ddof=1) / len(of_seeds)
    return math.sqrt(variance)
