"""Tasks of one or two texts, classes or numbers: GLUE, your own files, docstrings (pydoc).

Paper map:
    [GLUE §3] GLUE
Sources:
    [GLUE] Wang et al. 2019, GLUE
Out of scope: training (finetune.py); questions and answers (data/squad.py).
Deviations:
    1. Numbers to predict are standardized for training. Correlations do not change.
Notation:
    B batch   n rows of a split

A record is a line of a file or of the hub: dict, column -> cell (data/corpus.py: a row). A row is
what a task reads of it: (texts, label), a tuple of one text or of two, and the name of a class or a
float. An example is the token IDs of a row's texts, and a target its label as a number.

    records -> read_task -> Task and rows -> SequenceClassification -> examples, targets -> metrics
"""

import collections
import dataclasses
import json
import os
import sys

import numpy as np
import torch
import torch.nn.functional as F
from tqdm import tqdm

from common import InputError, build_once, fingerprint
from data.corpus import peek_columns, read_hub, read_rows, reader_options
from data.python_source import python_files, python_texts
from tokenizer import build_inputs


@dataclasses.dataclass
class Task:
    """An entry of TASKS: what is known of a task before its files are read.

    Attributes:
        text_columns: list of str, of the text, or of each text of a pair. a|b is either name.
        labels: list of str, the classes in the hub's order; [], those of the training file, which
            read_task fills in; or None, no classes: numbers, or the answers of SQuAD.
        metrics: list of str, keys of METRICS. The first is the task's own.
        label_column: str; a|b as in text_columns.
        folder: str, of the original download of GLUE, with a file SPLIT.tsv for each split. Its
            labels may be numbers of classes, and -1 is a hidden label. "": no task of GLUE.
        dev_splits: tuple of str, the splits to score. The first one's score counts.
        header: list of str, the columns of files without a header line, or None.
        group_start: int. draw_groups keeps rows together whose texts from this one on are equal:
            0, all texts; 1, of SQuAD, the context.
    """

    text_columns: list
    labels: list | None
    metrics: list
    label_column: str = "label"
    folder: str = ""
    dev_splits: tuple = ("dev",)
    header: list | None = None
    group_start: int = 0

    def description(self):
        """Return what makes two tasks the same. A checkpoint has it in description of its rows."""
        return dict(texts=self.text_columns, label=self.label_column, labels=self.labels)


# The original files and the hub name some columns differently.
PAIR = ["sentence1|#1 String", "sentence2|#2 String"]
ENTAILMENT = ["entailment", "not_entailment"]
ACCURACY = ["accuracy"]
CLASS_METRICS = ["accuracy", "macro_f1"]  # of your own files and pydoc
NUMBER_METRICS = ["spearman", "pearson"]
TASKS = {
    "mnli": Task(["premise|sentence1", "hypothesis|sentence2"],
                 ["entailment", "neutral", "contradiction"], ACCURACY,
                 label_column="label|gold_label", folder="MNLI",
                 dev_splits=("dev_matched", "dev_mismatched")),
    "qnli": Task(["question", "sentence"], ENTAILMENT, ACCURACY, folder="QNLI"),
    "qqp": Task(["question1", "question2"], ["not_duplicate", "duplicate"], ["f1", "accuracy"],
                label_column="label|is_duplicate", folder="QQP"),
    "rte": Task(PAIR, ENTAILMENT, ACCURACY, folder="RTE"),
    "sst2": Task(["sentence"], ["negative", "positive"], ACCURACY, folder="SST-2"),
    "mrpc": Task(PAIR, ["not_equivalent", "equivalent"], ["accuracy", "f1"],
                 label_column="label|Quality", folder="MRPC"),
    "cola": Task(["sentence"], ["unacceptable", "acceptable"], ["matthews", "accuracy"],
                 folder="CoLA", header=["source", "label", "star", "sentence"]),
    "stsb": Task(PAIR, None, NUMBER_METRICS, label_column="label|score", folder="STS-B"),
    "wnli": Task(PAIR, ["not_entailment", "entailment"], ACCURACY, folder="WNLI"),
}
# the eight of the papers' average, without WNLI [GLUE §3]
GLUE = ["mnli", "qnli", "qqp", "rte", "sst2", "mrpc", "cola", "stsb"]

# pydoc: which module does a docstring come from?
PYDOC_FORMAT = 3  # of its prepared files
PYDOC_MODULES = 20
PYDOC_ROWS = {"train": 1_000, "dev": 200}  # of a module, at most
PYDOC_MIN_WORDS = 5  # of a docstring

MAX_NAMED = 8  # labels that a message lists

# Of draw_rows and draw_groups. With one seed for two flags, both would draw in the same order
LIMIT_SEED = 0  # of --limit
SELECT_SEED = 1  # of --select
DEV_SEED = 2  # of a share as --dev


# --------------------------------------------------------------------------------------------------
# Files and the hub to rows


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
    task = choose_task(name, args)
    splits = {}  # split -> rows
    for split, path in find_paths(name, task, args).items():
        hub = ("nyu-mll/glue", name)  # read where path is None
        records, source = read_source(path, hub, split, task.header, **reader_options(args))
        splits[split] = parse_rows(records, task, source)
        if task.labels == []:  # of train, which comes first; dev may have no other classes
            task = dataclasses.replace(task, labels=find_classes(splits[split], source))
    train = splits.pop("train")

    if isinstance(args.dev, float):
        splits["dev"], train = hold_out(train, args)
    elif args.train:
        warn_of_leak(train, splits["dev"], args.dev)
    return task, train, splits


def choose_task(name, args):
    """Return the Task of a name as read_task takes it. That of "own" has the columns of --text."""
    if name == "pydoc":
        return Task(["docstring"], [], CLASS_METRICS)
    if name != "own":
        task = TASKS[name]
        if args.train:  # one file is scored, also of MNLI, which has two
            task = dataclasses.replace(task, dev_splits=("dev",))
        return task
    texts = [column.strip() for column in args.text.split(",")]
    if args.label in texts:  # the score would be perfect, and mean nothing
        raise InputError(f"--text: expected other columns than --label {args.label}, got "
                         f"{args.text}.")
    if args.regression:
        return Task(texts, None, NUMBER_METRICS, args.label)
    return Task(texts, [], CLASS_METRICS, args.label)


def find_paths(name, task, args):
    """Return dict, split -> path of its file, or None where the hub has it. train comes first."""
    splits = ("train", *task.dev_splits)
    if args.train:
        paths = dict(train=args.train)
        if not isinstance(args.dev, float):  # a share of train is no file
            paths["dev"] = args.dev
        return paths
    if name == "pydoc":
        folder = build_pydoc(args.cache)
        return {split: os.path.join(folder, f"{split}.jsonl") for split in splits}
    if args.data_dir is not None:
        folder = os.path.join(args.data_dir, task.folder)
        return {split: os.path.join(folder, f"{split}.tsv") for split in splits}
    return dict.fromkeys(splits)


def read_source(path, hub, split, header=None, **reading):
    """Read the records of a split.

    Args:
        path: str, a file, or None: the hub.
        hub: tuple, the first arguments of read_hub: a data set, and its configuration.
        split: str, train, or a name that begins with dev.
        header: list of str, the columns of a table without a header line.
        reading: encoding and sep of read_rows.

    Returns:
        list of dict, column -> cell; and the name of the source, for messages.
    """
    if path is not None:
        return list(read_rows(path, header, **reading)), path
    split = split.replace("dev", "validation")  # as the hub calls it
    return list(read_hub(*hub, split=split)), f"{'/'.join(hub)}, {split}"


# --------------------------------------------------------------------------------------------------
# Records to rows


def parse_rows(records, task, source):
    """Return the rows of a task.

    Args:
        records: list of dict, column -> cell.
        task: Task, which columns and labels to expect.
        source: str, for messages.

    Raises:
        InputError: a column is missing, or cells are no text or no label of the task. No record
            is left out: what is scored would change, and a wrong column might pass.
    """
    if not records:
        raise InputError(f"{source}: expected rows, got none.")
    # by name: the order of columns, and other columns, do not matter
    examples, _ = peek_columns(records)
    text_columns = [find_column(names, examples, source) for names in task.text_columns]
    label_column = find_column(task.label_column, examples, source)

    rows = []
    messages = []  # of all rows at fault, so that one run counts them
    numbers = []  # of these rows
    for number, record in enumerate(records, 1):
        place = f"{source}, row {number:,}"
        try:
            texts = [parse_text(record.get(column), place) for column in text_columns]
            label = parse_label(record.get(label_column), task, place)
            rows.append((tuple(texts), label))
        except InputError as error:
            messages.append(str(error))
            numbers.append(f"{number:,}")
    if messages:
        raise InputError(f"{messages[0]} Rows at fault: {len(messages):,} of {len(records):,}; "
                         f"the first are {', '.join(numbers[:5])}. Correct or remove them.")
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
    """Return the label in a cell, the name of a class or a float.

    Args:
        cell: str, number or None.
        task: Task, whose labels it may be.
        place: str, for messages.

    Raises:
        InputError: The cell is empty, or no label of the task.
    """
    is_empty = cell is None or cell != cell  # NaN, in a column of numbers
    text = "" if is_empty else str(cell).strip()
    # of GLUE. subtle: -1 is a number, and STS-B would learn it
    if task.folder and text in ("-1", "-1.0"):
        raise InputError(f"{place}: expected a label, got {text}. The labels of a test split are "
                         "not public. infer.py --file writes predictions.")
    if task.labels is None:
        expected = "a number below 1e38"
        label = parse_number(text)
    elif task.labels == []:
        expected = "any text"
        label = text
    else:
        expected = ", ".join(task.labels)
        label = parse_class(text, task)
    if label in (None, ""):
        raise InputError(f"{place}: expected a label ({expected}), got {cell!r:.60}.")
    return label


def parse_number(text):
    """Return text as a float, or None where it is no number, or too large for float32."""
    try:
        number = float(text)
    except ValueError:
        return None
    if abs(number) < 1e38:  # not so of infinity and NaN
        return number
    return None


def parse_class(text, task):
    """Return the class of a task that text names, or None."""
    if text in task.labels:
        return text
    # files of GLUE may have its number, in the order of TASKS; in your own files 1 is a name
    if task.folder and text.isdecimal() and int(text) < len(task.labels):
        return task.labels[int(text)]
    return None


def find_classes(rows, source):
    """Return the distinct labels, sorted: their order in the file does not matter."""
    classes = sorted({label for _, label in rows})
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


# --------------------------------------------------------------------------------------------------
# Rows to train on, and rows to score


def draw_rows(rows, count, seed):
    """Return `count` of the rows, drawn at random, and the others, both in their order."""
    order = np.random.default_rng(seed).permutation(len(rows))
    drawn = [rows[i] for i in np.sort(order[:count])]
    others = [rows[i] for i in np.sort(order[count:])]
    return drawn, others


def draw_groups(rows, count, seed, start=0):
    """Return at most `count` of the rows, drawn at random, and the others, both in their order.

    Rows with equal texts are drawn all or not at all: a model that was trained on one of them would
    score high on the others. Without such rows it draws what draw_rows does.

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
    is_drawn = np.zeros(len(rows), bool)
    room = count
    for group in groups.values():
        if len(group) <= room:
            is_drawn[group] = True
            room -= len(group)
    drawn = [rows[i] for i in np.flatnonzero(is_drawn)]
    others = [rows[i] for i in np.flatnonzero(~is_drawn)]
    return drawn, others


def hold_out(rows, args):
    """Return the share --dev of the rows of --train, to score, and the others, to train on."""
    count = round(args.dev * len(rows))
    dev, train = draw_groups(rows, count, DEV_SEED)  # by all texts: SQuAD takes no share
    if not dev:
        raise InputError(f"--dev {args.dev:g}: expected a share with rows to score, got none of "
                         f"the {len(rows):,} rows of {args.train}.")
    if not train:
        raise InputError(f"--dev {args.dev:g}: expected a share that leaves rows to train on, got "
                         f"all of the {len(rows):,} rows of {args.train}. Use a smaller share.")
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
# pydoc: docstrings of the installed Python


def build_pydoc(cache):
    """Return the folder of train.jsonl and dev.jsonl. They are written once."""
    files = python_files()  # name, such as json/decoder.py -> path
    # another Python, or another package, is another task
    sizes = [os.path.getsize(path) for path in files.values()]
    identity = fingerprint([PYDOC_FORMAT, list(files), sizes])

    def write(temporary):
        write_pydoc(files, temporary)

    return build_once(os.path.join(cache, f"pydoc-{identity}"), write)


def write_pydoc(files, folder):
    """Write a random choice of the docstrings of the largest modules."""
    print("preparing pydoc, once for all runs", flush=True)
    texts = collect_docstrings(files)
    # the modules with most texts, of those that have some in both splits
    modules = texts["train"].keys() & texts["dev"].keys()
    modules = sorted(modules, key=lambda module: (-len(texts["train"][module]), module))
    os.makedirs(folder)
    rng = np.random.default_rng(0)
    for module in modules[:PYDOC_MODULES]:
        for split, max_rows in PYDOC_ROWS.items():
            docstrings = texts[split][module]
            chosen = rng.permutation(len(docstrings))[:max_rows]
            with open(os.path.join(folder, f"{split}.jsonl"), "a") as file:
                for i in chosen:
                    print(json.dumps(dict(docstring=docstrings[i], label=module)), file=file)


def collect_docstrings(files):
    """Return dict, split -> top-level module -> docstrings. One file in ten is held out whole."""
    texts = {"train": collections.defaultdict(list), "dev": collections.defaultdict(list)}
    seen = set()  # code is copied about: no text is in both splits
    for name, path in tqdm(files.items(), "reading docstrings", disable=None):
        module = name.split(os.sep)[0].removesuffix(".py")
        # by a hash of its name, so that other files do not move it
        is_held_out = int(fingerprint(name), 16) % 10 == 0
        split = "dev" if is_held_out else "train"
        for text in python_texts(path):
            if len(text.split()) >= PYDOC_MIN_WORDS and text not in seen:
                texts[split][module].append(text)
                seen.add(text)
    return texts


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
        difference and error, floats in percent; above 0: predicted is better.
    """
    truth = np.asarray(truth)
    predicted = np.asarray(predicted)
    others = np.asarray(others)
    score = METRICS[metric]

    def compare(seeds, rows):
        """Return the difference on these rows, the mean over these seeds."""
        total = 0.0
        for seed in seeds:
            total += score(predicted[seed, rows], truth[rows])
            total -= score(others[seed, rows], truth[rows])
        return 100 * total / len(seeds)

    rng = np.random.default_rng(0)
    num_seeds, num_rows = predicted.shape
    differences = []
    for _ in range(rounds):
        seeds = rng.integers(num_seeds, size=num_seeds)
        rows = rng.integers(num_rows, size=num_rows)
        differences.append(compare(seeds, rows))
    difference = compare(range(num_seeds), np.arange(num_rows))  # each seed and row once
    return difference, float(np.std(differences))


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

    Args:
        task: Task, as read_task returns it.
        rows: list of (texts, label), one split.
        tokenizer: HashTokenizer, which learns the words.
        length: int, positions.
        scale: mean and standard deviation of the numbers to predict. None: the task has classes.
        has_bag: bool, keep the words of the first text that do not fit, for a bag of words.

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
        self.examples, num_cut = self.build_examples(rows)
        self.targets = self.build_targets(rows)
        num_empty = len([texts for texts, _ in rows if "" in texts])
        self.notes = (f"{num_cut:,} texts or pairs exceed the {length} positions that the encoder "
                      f"reads, {num_empty:,} are empty; {describe_labels(rows)}")

    def build_examples(self, rows):
        """Return the token IDs of each row, and how many of them were cut to the length."""
        first = self.tokenizer.ids_of_texts([texts[0] for texts, _ in rows])
        second = [None] * len(rows)
        if len(self.task.text_columns) == 2:
            second = self.tokenizer.ids_of_texts([texts[1] for texts, _ in rows])
        examples = []
        num_cut = 0
        for a, b in zip(first, second):
            ids, num_words_cut = build_inputs(a, b, self.length, self.tokenizer.separator,
                                              self.has_bag)
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

    def name_constant(self, predicted):
        """Return the only label that is predicted, as str, or None if there are several."""
        if np.ptp(predicted) > 1e-3:  # largest minus smallest; of numbers, rounding is no spread
            return None
        if self.scale is None:
            return self.task.labels[predicted[0]]
        mean, deviation = self.scale
        return f"{mean + deviation * predicted[0]:.4g}"

    def majority(self, train):
        """Return the score in percent of the class that most training rows have. Numbers: None.

        QuestionAnswering has this method, too: the score that needs no model.
        """
        if self.scale is not None:
            return None
        most_frequent = np.bincount(train.targets).argmax()
        metric = METRICS[self.task.metrics[0]]
        return 100 * metric(np.full_like(self.targets, most_frequent), self.targets)

    def description(self):
        """Return what infer.py has to know, as plain types."""
        return self.task.description() | dict(scale=self.scale)

