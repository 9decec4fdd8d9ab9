"""Tasks of one or two texts, classes or numbers: GLUE, your own files, docstrings (pydoc).

Sources:
    [GLUE] Wang et al. 2019, GLUE
Out of scope: training (finetune.py); questions and answers (data/squad.py); how the rows of pydoc
    are made (data/python_source.py).
Deviations:
    1. Numbers to predict are standardized for training. Correlations do not change.
Notation:
    B batch   n rows of a split

    record   dict, column -> cell, as data/rows.py reads it from a file or the hub
    row      (texts, label): a tuple of one text or two, and the name of a class or a float
    example  the token IDs of a row's texts
    target   a row's label as a number

Example: a line of MRPC's original file. read_task gives the row, SequenceClassification the rest.

    record   {"Quality": "1", "#1 String": "a cat", "#2 String": "cats"}
    row      (("a cat", "cats"), "equivalent")
    example  [CLS] a cat [SEP] [SEP] cats [SEP]
    target   1
"""

import collections
import dataclasses
import math
import os

import numpy as np
import torch
import torch.nn.functional as F

from data.python_source import build_pydoc
from data.rows import is_hub_id, list_names, note_once, read_hub, read_rows, reader_options
from support.common import InputError, send
from tokenizer import build_inputs


@dataclasses.dataclass
class Task:
    """A task: an entry of TASKS, or the columns of your own files.

    Attributes:
        text_columns: list of str, the column of the text, or those of both texts of a pair.
        labels: list of str, the names of the classes, in the hub's order. [] until read_task finds
            them in your own files or in pydoc. None: no classes, but numbers, or SQuAD's answers.
        metrics: list of str, keys of METRICS, or ["f1"], which squad.py computes itself. The first
            one is the task's score.
        label_column: str.
        folder: str, where the original files are below --data_dir. Only tasks of GLUE have one, so
            it also tells them apart: there a label may be the number of a class, or -1 if hidden.
        renamed: dict, a column's name in the original files -> its name here and on the hub.
        dev_split: str, the split to score, as the original files call it.
        header: list of str, the columns of original files without a header line, or None.
        name: str, the key in TASKS, or "own".
        scale: [mean, standard deviation] of the training rows' numbers, which are predicted in
            units of it, or None for classes.
    """

    text_columns: list
    labels: list | None
    metrics: list
    label_column: str = "label"
    folder: str = ""
    renamed: dict = dataclasses.field(default_factory=dict)
    dev_split: str = "dev"
    header: list | None = None
    name: str = ""
    scale: list | None = None

    @property
    def has_classes(self):
        return self.labels is not None

    def identity(self):
        """Return what tells this task from others, dict; checkpoints store it."""
        return dict(name=self.name, texts=self.text_columns, label=self.label_column,
                    labels=self.labels)


PAIR = ["sentence1", "sentence2"]
ENTAILMENT = ["entailment", "not_entailment"]
CLASS_METRICS = ["accuracy", "macro_f1"]  # for your own files and pydoc
NUMBER_METRICS = ["spearman", "pearson"]
TASKS = {
    "mnli": Task(["premise", "hypothesis"], labels=["entailment", "neutral", "contradiction"],
                 metrics=["accuracy"], folder="MNLI", dev_split="dev_matched",
                 renamed={"sentence1": "premise", "sentence2": "hypothesis",
                          "gold_label": "label"}),
    "qnli": Task(["question", "sentence"], labels=ENTAILMENT, metrics=["accuracy"], folder="QNLI"),
    "qqp": Task(["question1", "question2"], labels=["not_duplicate", "duplicate"],
                metrics=["f1", "accuracy"], folder="QQP", renamed={"is_duplicate": "label"}),
    "rte": Task(PAIR, labels=ENTAILMENT, metrics=["accuracy"], folder="RTE"),
    "sst2": Task(["sentence"], labels=["negative", "positive"], metrics=["accuracy"],
                 folder="SST-2"),
    "mrpc": Task(PAIR, labels=["not_equivalent", "equivalent"], metrics=["accuracy", "f1"],
                 folder="MRPC", renamed={"#1 String": "sentence1", "#2 String": "sentence2",
                                         "Quality": "label"}),
    "cola": Task(["sentence"], labels=["unacceptable", "acceptable"],
                 metrics=["matthews", "accuracy"], folder="CoLA",
                 header=["source", "label", "star", "sentence"]),
    "stsb": Task(PAIR, labels=None, metrics=NUMBER_METRICS, folder="STS-B",
                 renamed={"score": "label"}),
    "pydoc": Task(["docstring"], labels=[], metrics=CLASS_METRICS),
}
# the eight of the papers' average; they leave out WNLI, the ninth [GLUE §3]
GLUE = [name for name, task in TASKS.items() if task.folder != ""]

GROUPS = 20  # groups of rows in standard_error
DEV_SHARE = 0.1  # share of --train that is scored where there is no --dev

# Seeds of random draws of rows. With one seed, two draws would have the same order
LIMIT_SEED = 0
SELECT_SEED = 1
DEV_SEED = 2


# --------------------------------------------------------------------------------------------------
# Files and the hub to rows


def read_task(name, args):
    """Read a task's rows.

    Args:
        name: str, a key of TASKS, or "own": the files of --train and --dev.
        args: Namespace with the flags train, dev, data_dir, text, label, regression, balanced,
            limit, select, cache, encoding, sep and header. Without dev, a tenth of the rows of
            train is scored.

    Returns:
        the Task; and dict, split -> rows: train, select unless it is empty, and dev.

    Raises:
        InputError: a file cannot be read, or does not fit the task.
    """
    task = choose_task(name, args)
    if args.balanced:  # classes count alike in the loss, and in the score that chooses the weights
        task.metrics = ["macro_f1", "accuracy"]
    train_path = args.train
    dev_path = args.dev
    if name == "pydoc":  # its files are made here
        folder = build_pydoc(args.cache)
        train_path = f"{folder}/train.jsonl"
        dev_path = f"{folder}/dev.jsonl"

    train = read_split(task, args, "train", train_path)
    if task.labels == []:
        task.labels = find_classes(train)  # a dev row of another class is refused
    if train_path is not None and dev_path is None:  # a tenth of --train
        dev, train = draw_groups(train, round(DEV_SHARE * len(train)), DEV_SEED)
    else:
        dev = read_split(task, args, task.dev_split, dev_path)
        # a model that memorized a training row would score high
        seen = {texts for texts, _ in train}
        num_seen = sum(texts in seen for texts, _ in dev)
        if dev_path is not None and num_seen > 0:
            note_once(f"warning: {dev_path}: {len(dev):,} rows to score, of which {num_seen:,} "
                      "have a text of --train.")
    if len(dev) < 2:  # a score of one row has no error
        raise InputError(f"--dev: expected two rows to score or more, got {len(dev)}. Without "
                         "--dev they are at most a tenth of --train, and rows of equal texts stay "
                         "together.")

    splits = split_train(train, args) | dict(dev=dev)
    if not task.has_classes:
        numbers = [label for _, label in splits["train"]]
        deviation = max(np.std(numbers), 1e-9)  # not 0, so that equal numbers become zeros
        task.scale = [float(np.mean(numbers)), float(deviation)]
    return task, splits


def choose_task(name, args):
    """Return a new Task: a copy from TASKS, or for "own" one of the columns of --text."""
    if name != "own":
        return dataclasses.replace(TASKS[name], name=name)
    texts = list_names(args.text)
    # a text that is the label gives a perfect score
    if len(texts) > 2 or len({*texts, args.label}) < len(texts) + 1:
        raise InputError(f"--text: expected one or two columns other than --label {args.label}, "
                         f"each once, got {args.text}.")
    labels = None if args.regression else []
    metrics = NUMBER_METRICS if args.regression else CLASS_METRICS
    return Task(texts, labels, metrics, args.label, name=name)


def read_split(task, args, split, path):
    """Return the rows of a split, train or the task's dev_split; path: a file, hub ID, or None."""
    original = os.path.join(task.folder, f"{split}.tsv")
    hub_id = f"nyu-mll/glue:{task.name}"
    records, source = read_records(args, split, path, original, hub_id, task.header)
    parse = parse_class if task.has_classes else parse_number
    return parse_rows(records, task, source, parse)


def read_records(args, split, path, original, hub_id, columns=None):
    """Read a split from the first of: path (a file, or a hub ID); --data_dir/original; hub_id.

    Args:
        args: Namespace with the flag data_dir, and those of the reader.
        split: str, train, or a name that begins with dev.
        path: str or None, the file or hub ID that --train or --dev names.
        original: str, a path below --data_dir.
        hub_id: str, the task's data set on the hub.
        columns: list of str, for files without a header line, or None.

    Returns:
        list of dict, column -> cell; and the name of the source, for messages.
    """
    if path is None and args.data_dir is not None:
        path = os.path.join(args.data_dir, original)
    if path is not None:
        if not is_hub_id(path):
            return list(read_rows(path, columns, **reader_options(args))), path
        hub_id = path
    split = split.replace("dev", "validation")  # as the hub calls it
    try:
        return list(read_hub(hub_id, split)), f"{hub_id} ({split})"
    except InputError as error:
        raise InputError(f"{error} Without the hub, use --data_dir, or --train and "
                         "--dev.") from error


# --------------------------------------------------------------------------------------------------
# Records to rows


def parse_rows(records, task, source, parse):
    """Return the rows of a task.

    Args:
        records: list of dict, column -> cell.
        task: Task, tells which columns and labels to expect.
        source: str, for messages.
        parse: function of a label cell, the task and a place, str, that returns the row's label.

    Raises:
        InputError: a column is missing, or a cell is no text or no label of the task. No record
            is left out: the scored rows would differ, and a wrong column might go unnoticed.
    """
    if not records:
        raise InputError(f"{source}: expected rows, got none.")
    rows = []
    for number, record in enumerate(records, 1):
        place = f"{source}, row {number:,}"
        # columns are found by our names: their order, and other columns, do not matter
        cells = {task.renamed.get(column, column): cell for column, cell in record.items()}
        if len(cells) < len(record):
            raise InputError(f"{place}: expected one name for each column, got both names of one: "
                             f"{', '.join(record)}.")
        for name in (*task.text_columns, task.label_column):
            if name not in cells:
                raise InputError(f"{place}: no column {name} among {', '.join(cells)}. "
                                 "--text and --label choose those of your own files.")
        texts = []
        for name in task.text_columns:
            text = cells[name]
            if text is None:  # an empty cell
                text = ""
            if not isinstance(text, str):
                raise InputError(f"{place}: expected text, got {text!r:.60}.")
            texts.append(text)
        label = parse(cells[task.label_column], task, place)
        rows.append((tuple(texts), label))
    return rows


def parse_class(cell, task, place):
    """Return the class in a label cell, str: one of the task's labels if they are known."""
    label = read_label(cell)
    names = task.labels
    # GLUE's files may have the number of a class; in your own files, 1 is a name
    if task.folder != "" and label.isdecimal() and int(label) < len(names):
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
    is_hidden = task.folder != "" and number == -1
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
        return str(cell).strip()
    return ""


def find_classes(rows):
    """Return the distinct labels, sorted: their order in the file does not matter."""
    classes = sorted({label for _, label in rows})
    # if most rows have a class of their own, the labels are numbers, or the column is wrong
    max_classes = max(2, len(rows) // 2)
    if not 2 <= len(classes) <= max_classes:
        raise InputError(f"--label: expected two labels or more, each for several rows, got "
                         f"{len(classes):,} for {len(rows):,} rows. --regression is for numbers.")
    return classes


# --------------------------------------------------------------------------------------------------
# Rows to train on, and rows to score


def split_train(train, args, group_of=tuple):
    """Draw --limit rows, and of these a share, --select, that chooses the weights.

    Args:
        train: list of (texts, label).
        args: Namespace with the flags limit and select.
        group_of: as in draw_groups.

    Returns:
        dict, split -> rows: train, and select unless it is empty.
    """
    if args.limit is not None:
        order = np.random.default_rng(LIMIT_SEED).permutation(len(train))
        train = [train[i] for i in np.sort(order[:args.limit])]
    num_select = round(args.select * len(train))
    select, train = draw_groups(train, num_select, SELECT_SEED, group_of)
    splits = dict(train=train)
    if select:
        splits["select"] = select
    elif num_select > 0:
        note_once("warning: --select: each group of rows is larger than the share; the last "
                  "weights are scored.")
    return splits


def draw_groups(rows, count, seed, group_of=tuple):
    """Draw at most `count` rows at random; return them and the others, both in their old order.

    The rows of a group are all drawn, or none is: a model that was trained on one of them would
    score high on the others.

    Args:
        rows: list of (texts, label).
        count: int.
        seed: int.
        group_of: function of a row's texts that returns its group. tuple: rows with equal texts.
    """
    order = np.random.default_rng(seed).permutation(len(rows))
    groups = collections.defaultdict(list)  # group -> indices of its rows
    for i in order.tolist():
        texts, _ = rows[i]
        groups[group_of(texts)].append(i)

    # greedy: a group too large for what is left is skipped, so fewer than count may be drawn
    drawn = []
    for group in groups.values():
        if len(drawn) + len(group) <= count:
            drawn += group
    others = np.setdiff1d(order, drawn)
    return [rows[i] for i in sorted(drawn)], [rows[i] for i in others]


# --------------------------------------------------------------------------------------------------
# Rows to examples


class SequenceClassification:
    """A split of a classification or regression task as token IDs, of one text or of a pair.

    Args:
        task: Task, as read_task returns it.
        rows: list of (texts, label), those of the split.
        tokenizer: HashTokenizer, which learns the words.
        length: int, the most positions of an example.

    Attributes:
        examples: list of n int32 arrays, token IDs.
        targets: (n,), int64 classes, or float32 numbers in units of the task's scale.
        num_outputs: int, the model's outputs: a score per class, or one number.
        notes: str, how many texts were cut, and how many rows have no text.
    """

    head = "classify"

    def __init__(self, task, rows, tokenizer, length):
        self.task = task
        self.tokenizer = tokenizer
        self.length = length
        self.num_outputs = len(task.labels) if task.has_classes else 1
        self.class_weights = None  # float32 (classes,), see balance

        # texts
        first = tokenizer.ids_of_texts([texts[0] for texts, _ in rows])
        second = [None] * len(rows)
        if len(task.text_columns) == 2:
            second = tokenizer.ids_of_texts([texts[1] for texts, _ in rows])
        self.examples = []
        num_cut = 0
        for a, b in zip(first, second):
            ids, num_words_cut = build_inputs(a, b, length, tokenizer.separator)
            self.examples.append(ids)
            if num_words_cut > 0:
                num_cut += 1
        num_empty = sum(not any(texts) for texts, _ in rows)
        self.notes = f"{num_cut:,} texts cut to {length} positions, {num_empty:,} empty"

        # labels
        labels = [label for _, label in rows]
        if task.has_classes:
            self.targets = np.array([task.labels.index(label) for label in labels])
        else:
            mean, deviation = task.scale
            targets = (np.array(labels) - mean) / deviation
            self.targets = targets.astype(np.float32)

    def __len__(self):
        return len(self.examples)

    def balance(self):
        """Let classes weigh alike in the loss: a row weighs n / (classes · rows of its class)."""
        counts = np.bincount(self.targets, minlength=self.num_outputs)  # (classes,)
        weights = len(self.targets) / (self.num_outputs * np.maximum(counts, 1))
        self.class_weights = torch.from_numpy(weights).float()

    def loss(self, logits, indices):
        """Return the mean loss of the examples with these indices; logits is (B, num_outputs)."""
        targets = send(torch.from_numpy(self.targets[indices]), logits.device)  # (B,)
        if not self.task.has_classes:
            return F.mse_loss(logits[:, 0], targets)
        if self.class_weights is None:
            return F.cross_entropy(logits, targets)
        # subtle: a mean over rows. torch's own mean divides by the weights of the batch, so that
        # a batch of frequent classes alone would count as much as if there were no weights
        weights = send(self.class_weights, logits.device)
        return F.cross_entropy(logits, targets, weights, reduction="none").mean()

    def evaluate(self, batches):
        """Score a model by its logits.

        Args:
            batches: iterable of (indices, logits (B, num_outputs)), all examples in any order.

        Returns:
            dict of the metrics in percent and eval_loss; and the predictions (n,), as targets are.
        """
        logits = np.zeros((len(self.examples), self.num_outputs), np.float32)
        for indices, part in batches:
            logits[indices] = part.cpu().numpy()
        if self.task.has_classes:
            predicted = logits.argmax(1)
        else:
            predicted = logits[:, 0]
        scores = {}  # plain numbers, as checkpoints hold them
        for name in self.task.metrics:
            scores[name] = 100 * float(METRICS[name](predicted, self.targets))
        loss = self.loss(torch.from_numpy(logits), np.arange(len(self)))
        scores["eval_loss"] = loss.item()
        return scores, predicted

    def majority(self, train):
        """Return the score in percent if all predictions are the most frequent class of train.

        QuestionAnswering has this method too: the score that needs no model.
        """
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
