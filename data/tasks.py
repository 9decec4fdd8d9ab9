"""The tasks of finetune.py, and the rows of a task that train, that choose, and that are scored.

    task, splits = read_task("sst2", args)      train 60,614 rows, select 6,735, dev 872

Out of scope: training (finetune.py); how a split is read, encoded and scored (for texts with a
    label data/classification.py, for questions and answers data/squad.py).

A task is a line of TASKS. What is special about it are its two parts:

    read             a function of the task, the flags and a split, "train" or "dev". It returns the
                     rows, list of (texts, label): a tuple of one text or two, and what is to be
                     predicted.
    examples_class   makes token IDs of rows, and scores a model: an Examples of
                     data/classification.py.
"""

import collections
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from data.classification import SequenceClassification, read_pydoc, read_table
from data.rows import list_names, note_once
from data.squad import QuestionAnswering, read_squad
from support.common import InputError
from words import list_words

DEV_SHARE = 0.1  # share of --train that is scored where there is no --dev

# Seeds of random draws of rows. With one seed, two draws would have the same order
LIMIT_SEED = 0
SELECT_SEED = 1
DEV_SEED = 2


@dataclass(frozen=True)
class Task:
    """A task: an entry of TASKS.

    Attributes:
        text_columns: list of str, the column of the text, or those of both texts of a pair.
        labels: list of str, the names of the classes, in the hub's order. []: the classes are those
            of the training rows, which read_task finds. None: no classes, but numbers, or answers.
        metrics: list of str, keys of the scores that Examples.evaluate returns. The first one is
            the task's score.
        label_column: str.
        read: function of the task, the flags and a split that returns its rows.
        examples_class: class of a split's rows as token IDs, a data.classification.Examples.
        flags: tuple of str, those of --train, --dev, --data_dir, --text, --label and --regression
            that `read` takes. With text, the columns are those that the flags name.
        group_of: function of a row's texts that returns those which decide on its group. A group is
            never divided between the rows that train and those that choose or are scored.
        folder: str, where the original files of a task of GLUE are below --data_dir.
        renamed: dict, a column's name in the original files -> its name here and on the hub.
        dev_split: str, the split to score, as the original files call it.
        header: list of str, the columns of original files without a header line, or None.
        name: str, the key in TASKS.
        scale: [mean, standard deviation] of the training rows' numbers, which are predicted in
            units of it, or None where labels are no numbers.
        is_balanced: bool, classes weigh alike in the loss of the training.
    """

    text_columns: list
    labels: list | None
    metrics: list
    label_column: str = "label"
    read: Callable = read_table
    examples_class: type = SequenceClassification
    flags: tuple = ("train", "dev", "data_dir")
    group_of: Callable = tuple
    folder: str = ""
    renamed: dict = field(default_factory=dict)
    dev_split: str = "dev"
    header: list | None = None
    name: str = ""
    scale: list | None = None
    is_balanced: bool = False

    @property
    def has_classes(self):
        return self.labels is not None

    @property
    def is_glue(self):
        """Whether a label may be the number of a class, or -1 if it is hidden."""
        return self.folder != ""

    def group(self, texts):
        """Return what tells the group of a row's texts from others, tuple of str.

        Texts are equal if their words are: a model sees no case and no double space.
        """
        return tuple(" ".join(list_words(text)) for text in self.group_of(texts))

    def identity(self):
        """Return what tells this task from others, dict; checkpoints store it."""
        return dict(name=self.name, texts=self.text_columns, label=self.label_column,
                    labels=self.labels)


PAIR = ["sentence1", "sentence2"]
ENTAILMENT = ["entailment", "not_entailment"]
CLASS_METRICS = ["accuracy", "macro_f1"]
NUMBER_METRICS = ["spearman", "pearson"]
SQUAD = Task(["question", "context"], labels=None, metrics=["f1"], label_column="answers",
             read=read_squad, examples_class=QuestionAnswering,
             group_of=lambda texts: texts[1:])  # questions about one context
TASKS = {
    # your own files
    "own": Task(["text"], labels=[], metrics=CLASS_METRICS,
                flags=("train", "dev", "text", "label", "regression")),
    # GLUE
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
    # the module of a docstring of the installed Python
    "pydoc": Task(["docstring"], labels=[], metrics=CLASS_METRICS, read=read_pydoc, flags=()),
    # the words of a text that answer a question, or in v2 none
    "squad": SQUAD,
    "squad_v2": SQUAD,
}
# the eight of the papers' average; they leave out WNLI, the ninth of Wang et al. 2019, §3
GLUE = [name for name, task in TASKS.items() if task.is_glue]


def list_tasks(name):
    """Return the names of the tasks of --task."""
    return GLUE if name == "glue" else [name]


def choose_task(name, args):
    """Return a Task: that of TASKS, with the columns of --text if its reader takes them."""
    task = replace(TASKS[name], name=name)
    if "text" in task.flags:
        if args.text is not None:
            task = replace(task, text_columns=list_names(args.text))
        if args.label is not None:
            task = replace(task, label_column=args.label)
        columns = [*task.text_columns, task.label_column]
        # a text that is the label gives a perfect score
        if len(columns) > 3 or len(set(columns)) < len(columns):
            raise InputError("--text: expected one or two columns other than --label "
                             f"{task.label_column}, each once, got {args.text}.")
        if args.regression:
            task = replace(task, labels=None, metrics=NUMBER_METRICS)
    if args.balanced:  # classes count alike in the loss, and in the score that chooses the weights
        if not task.has_classes:
            raise InputError("--balanced requires a task of classes.")
        task = replace(task, is_balanced=True, metrics=["macro_f1", "accuracy"])
    return task


def read_task(name, args):
    """Read a task's rows.

    Args:
        name: str, a key of TASKS.
        args: Namespace with the flags of a task in finetune.py. With train and without dev, a tenth
            of the rows of train is scored.

    Returns:
        the Task; and dict, split -> rows: train, select unless it is empty, and dev.

    Raises:
        InputError: a file cannot be read, or does not fit the task.
    """
    task = choose_task(name, args)
    train = task.read(task, args, "train")
    if task.labels == []:
        task = replace(task, labels=find_classes(train))  # a dev row of another class is refused
    if args.train is not None and args.dev is None:
        dev, train = draw_groups(train, round(DEV_SHARE * len(train)), DEV_SEED, task.group)
    else:
        dev = task.read(task, args, "dev")
        if args.dev is not None:
            warn_of_shared_texts(task, train, dev, args.dev)
    if len(dev) < 2:  # a score of one row has no error
        raise InputError(f"--dev: expected two rows to score or more, got {len(dev)}. Without "
                         "--dev they are at most a tenth of --train, and rows of equal texts stay "
                         "together.")

    splits = split_train(task, train, args) | dict(dev=dev)
    if task.labels is None and task.examples_class.head == "classify":  # numbers
        numbers = [label for _, label in splits["train"]]
        deviation = max(np.std(numbers), 1e-9)  # not 0, so that equal numbers become zeros
        task = replace(task, scale=[float(np.mean(numbers)), float(deviation)])
    return task, splits


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
# Rows that train, and rows that choose or are scored


def warn_of_shared_texts(task, train, dev, source):
    """Warn of dev rows whose texts are in train: a model that memorized them would score high."""
    seen = {task.group(texts) for texts, _ in train}
    num_seen = sum(task.group(texts) in seen for texts, _ in dev)
    if num_seen > 0:
        note_once(f"warning: {source}: {len(dev):,} rows to score, of which {num_seen:,} have a "
                  "text of --train.")


def split_train(task, train, args):
    """Draw --limit rows, and of these a share, --select, that chooses the weights.

    Args:
        task: Task.
        train: list of (texts, label).
        args: Namespace with the flags limit and select.

    Returns:
        dict, split -> rows: train, and select unless it is empty.
    """
    if args.limit is not None:
        order = np.random.default_rng(LIMIT_SEED).permutation(len(train))
        train = [train[i] for i in np.sort(order[:args.limit])]
    num_select = round(args.select * len(train))
    select, train = draw_groups(train, num_select, SELECT_SEED, task.group)
    splits = dict(train=train)
    if select:
        splits["select"] = select
    elif num_select > 0:
        note_once("warning: --select: each group of rows is larger than the share; the last "
                  "weights are scored.")
    return splits


def draw_groups(rows, count, seed, group_of):
    """Draw at most `count` rows at random; return them and the others, both in their old order.

    The rows of a group are all drawn, or none is: a model that was trained on one of them would
    score high on the others.

    Args:
        rows: list of (texts, label).
        count: int.
        seed: int.
        group_of: function of a row's texts that returns its group.
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
