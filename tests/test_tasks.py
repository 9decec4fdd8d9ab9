"""Tests of data/tasks.py: labels, columns, sources, metrics by hand, examples, baselines."""

import os
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import data.tasks
from common import InputError
from data.tasks import METRICS, TASKS, SequenceClassification, Task, bag_of_words, draw_rows
from data.tasks import parse_rows, read_task
from hashing import MD5
from model import PRESETS, Config
from tests.support import make_words
from tokenizer import CLS, SEP, HashTokenizer

WORDS = make_words(60, 3)
UP_OR_DOWN = Task(["text"], ["down", "up"], ["accuracy"])
NUMBER = Task(["text"], None, ["spearman"], "score")


def make_rows(texts, labels):
    """Return rows of single texts."""
    return [((text,), label) for text, label in zip(texts, labels, strict=True)]


def make_data(task, train, dev=None, **options):
    """Return the examples of rows, of at most nine positions. Without dev, train is both."""
    tokenizer = HashTokenizer(Config(**PRESETS["tiny"]), hash=MD5())
    devs = {"dev": train if dev is None else dev}
    return SequenceClassification(task, train, devs, tokenizer, 9, **options)


def flags(**changes):
    """Return what read_task reads of the flags of finetune.py."""
    names = ("train", "dev", "data_dir", "text", "label", "regression", "cache")
    return SimpleNamespace(**dict.fromkeys(names) | changes)


def write_table(path, rows):
    """Write a .tsv or, by its ending, a .csv without quotes; rows are sequences. Return str."""
    separator = "," if path.suffix == ".csv" else "\t"
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", encoding="utf-8") as file:
        for row in rows:
            print(*row, sep=separator, file=file)
    return str(path)


# Labels and columns


@pytest.mark.parametrize("name, cell, label", [
    ("sst2", "negative", "negative"),  # by name
    ("sst2", 1, "positive"),  # by number
    ("stsb", "2.5", 2.5),
])
def test_parse_rows_reads_label_by_name_or_number(name, cell, label):
    row = dict(sentence="a", sentence1="a", sentence2="b", label=cell)
    [(_, parsed)] = parse_rows([row], TASKS[name], "here")
    assert parsed == label


@pytest.mark.parametrize("name, cell, message", [
    ("stsb", -1.0, "labels of a test split are not public"),  # as the hub has it
    ("sst2", "2", "expected a label .negative, positive., got '2'"),  # there are two classes
    ("sst2", None, "got None"),
    ("stsb", float("nan"), "expected a label .a number below 1e38., got nan"),
    ("stsb", 1e200, "got 1e.200"),  # infinite in float32
])
def test_parse_rows_refuses_label(name, cell, message):
    row = dict(sentence="a", sentence1="a", sentence2="b")
    cells = [row | dict(label="0"), row | dict(label=cell)]
    with pytest.raises(InputError, match=f"here, row 2: .*{message}"):
        parse_rows(cells, TASKS[name], "here")


def test_parse_rows_chooses_columns_by_name():
    """The original files and the hub name them differently. An empty cell is an empty text."""
    row = {"Quality": "1", "#1 ID": "7", "#2 String": "b", "#1 String": None}
    assert parse_rows([row], TASKS["mrpc"], "here") == [(("", "b"), "equivalent")]


@pytest.mark.parametrize("cells, message", [
    ([], "here: expected rows, got none"),
    ([dict(sentence1="a", label=0)], "expected a column sentence2 or #2 String, got sentence1"),
    ([dict(sentence1="a", sentence2=5, label=0)], "here, row 1: expected text, got 5"),
])
def test_parse_rows_refuses_other_rows(cells, message):
    with pytest.raises(InputError, match=message):
        parse_rows(cells, TASKS["rte"], "here")


def test_draw_rows_is_at_random_and_in_order():
    rows = list(range(60))
    drawn = draw_rows(rows, 7)
    assert len(set(drawn)) == 7
    assert drawn == sorted(drawn)
    assert drawn != rows[:7]
    assert draw_rows(rows, None) == rows


# Sources: files of one's own, original files, the hub, the installed Python


def own_flags(folder, train, dev, text="title, body"):
    """Write two tables of two texts and a label; return flags that read them."""
    columns = ("title", "body", "topic")
    return flags(
        train=write_table(folder / "train.csv", [columns, *train]),
        dev=write_table(folder / "dev.csv", [columns, *dev]),
        text=text,
        label="topic",
    )


@pytest.mark.parametrize("regression, classes, metrics, labels", [
    (False, ["1", "2"], ["accuracy", "macro_f1"], ["2", "1"]),  # their order does not matter
    (True, None, ["spearman", "pearson"], [2.0, 1.0]),
])
def test_own_files_have_classes_or_numbers(tmp_path, regression, classes, metrics, labels):
    table = [("a", "b", 2), ("c", "d", 1)]
    args = own_flags(tmp_path, table, table)
    args.regression = regression
    task, train, devs = read_task("own", args)
    assert task == Task(["title", "body"], classes, metrics, "topic")
    assert train == [(("a", "b"), labels[0]), (("c", "d"), labels[1])]
    assert devs == {"dev": train}


@pytest.mark.parametrize("labels, message", [
    ("xxxx", "train.csv: expected two labels or more.*got 1"),
    ("wxyz", "got 4 for 4 rows. --regression is for numbers"),  # each occurs once
    ("xxyy", "dev.csv, row 1: expected a label .x, y., got 'other'"),
])
def test_own_files_refuse_labels_that_cannot_be_learned(tmp_path, labels, message):
    train = [("a", "b", label) for label in labels]
    args = own_flags(tmp_path, train, [("a", "b", "other")])
    with pytest.raises(InputError, match=message):
        read_task("own", args)


@pytest.mark.parametrize("text, num_seen", [
    ("title", 2),
    ("title,body", 1),  # both texts of a pair
])
def test_dev_rows_with_a_text_of_train_are_counted(tmp_path, capsys, text, num_seen):
    train = [("a", "b", "x"), ("c", "d", "y")]
    dev = [("a", "b", "x"), ("c", "other", "y"), ("e", "d", "x")]
    args = own_flags(tmp_path, train, dev, text)
    read_task("own", args)
    expected = f"{args.dev}: 3 rows to score, of which {num_seen} have a text of --train."
    assert expected in capsys.readouterr().err


def test_original_files_of_cola_have_no_header(tmp_path):
    for split in ("train", "dev"):
        path = tmp_path / "CoLA" / f"{split}.tsv"
        write_table(path, [("gj04", 0, "*", f"A {split}.")])
    _, train, devs = read_task("cola", flags(data_dir=str(tmp_path)))
    assert train == [(("A train.",), "unacceptable")]
    assert devs == {"dev": [(("A dev.",), "unacceptable")]}


def test_splits_of_the_hub_are_its_own(monkeypatch):
    """test_corpus.py has the names of its labels."""
    asked = []

    def read_hub(*hub, split):
        asked.append((*hub, split))
        return [dict(sentence1="a", sentence2="b", label="entailment")]

    monkeypatch.setattr(data.tasks, "read_hub", read_hub)
    _, train, devs = read_task("rte", flags())
    assert train == devs["dev"] == [(("a", "b"), "entailment")]
    assert asked == [
        ("nyu-mll/glue", "rte", "train"),
        ("nyu-mll/glue", "rte", "validation"),
    ]


def test_pydoc_holds_out_whole_files(tmp_path, monkeypatch):
    """Modules a and b have many files of two docstrings, "lone" one file, for one split only."""
    files = {}

    def add_file(name):
        path = tmp_path / f"{len(files)}.py"
        path.write_text(f'"""The first words of {name} ."""\n'
                        f'def f():\n    """And the second of {name} ."""')
        files[f"{name}.py".replace("/", os.sep)] = str(path)

    for i in range(60):
        add_file(f"a/{i}")
        add_file(f"b/{i}")
    add_file("lone")
    files[f"b{os.sep}copy.py"] = files[f"a{os.sep}0.py"]  # code is copied about
    monkeypatch.setattr(data.tasks, "python_files", lambda: files)

    task, train, devs = read_task("pydoc", flags(cache=str(tmp_path / "cache")))

    assert task.labels == ["a", "b"]
    names = []
    for (text,), label in train:
        name = text.split()[-2]
        assert name[0] == label
        names.append(name)
    held_out = [text.split()[-2] for (text,), _ in devs["dev"]]
    assert len(held_out) > 0
    assert not set(names) & set(held_out)
    assert len(names + held_out) == 2 * 60 * 2


# Metrics


@pytest.mark.parametrize("metric, predicted, truth, expected", [
    # class 0: 2 · 1 / (3 + 2), class 1: 2 · 2 / (3 + 3), class 2 is never predicted: 0
    ("macro_f1", [0, 1, 1, 1, 0, 0], [0, 0, 1, 1, 1, 2], (2 / 5 + 4 / 6 + 0) / 3),
    ("macro_f1", [1, 1], [1, 1], 1),  # class 0 is absent
    ("f1", [0, 0], [0, 0], 0),  # no class 1: 0/0
    # tp 2, tn 2, fp 1, fn 2: (2 · 2 - 1 · 2) / √(3 · 4 · 3 · 4)
    ("matthews", [1, 1, 1, 0, 0, 0, 0], [1, 1, 0, 1, 1, 0, 0], 2 / 12),
    ("matthews", [1, 1, 1], [0, 1, 1], 0),  # a constant
    ("spearman", [1.0, 2, 3, 4], [-5.0, -7, -7, -9], -np.sqrt(0.9)),  # ranks 4 2.5 2.5 1
])
def test_metric_by_hand(metric, predicted, truth, expected):
    """test_all.py has accuracy, F1 and Spearman without ties."""
    score = METRICS[metric](np.array(predicted), np.array(truth))
    assert score == pytest.approx(expected)


# Examples and baselines


def test_examples_are_pairs_cut_to_the_length():
    long_text = " ".join(WORDS)
    rows = [(("x y", "y"), 1.0), (("z", long_text), 2.0)]
    data = make_data(Task(["a", "b"], None, ["spearman"]), rows)
    assert data.examples[0].tolist() == [CLS, 5, 6, SEP, SEP, 6, SEP]
    assert len(data.examples[1]) == 9
    assert data.notes.startswith("2 texts or pairs exceed the 9")  # one of train, one of dev


def test_numbers_are_standardized():
    data = make_data(NUMBER, make_rows("xyz", [1.0, 3.0, 8.0]))
    mean, deviation = data.scale
    assert (mean, deviation) == pytest.approx((4, np.std([1, 3, 8])))
    assert data.targets * deviation + mean == pytest.approx([1, 3, 8])


def test_constant_prediction_is_named_in_the_unit_of_the_labels():
    """A checkpoint that was trained for this task keeps its scale: here mean 3, deviation 2."""
    data = make_data(NUMBER, make_rows("xy", [1.0, 9.0]), scale=[3.0, 2.0])
    assert data.targets.tolist() == [-1, 3]
    scores, constant = data.evaluate(lambda examples: [([0, 1], torch.full((2, 1), 0.5))])
    assert scores == dict(spearman=0)
    assert constant == "4"


def test_evaluate_restores_the_order_of_batches():
    """Logits of the right labels come in another order. A second dev split is wrong."""
    words = ["up", "down", "up", "up"]
    right = make_rows(words, words)
    wrong = make_rows(words, ["down", "up", "down", "down"])
    task = Task(["text"], ["down", "up"], ["accuracy"], dev=("dev", "dev_b"))
    data = make_data(task, right)
    data.devs["dev_b"] = data.encode(wrong)

    def predict(examples):
        logits = torch.eye(2)[data.targets]
        for indices in ([3, 1], [2, 0]):
            yield indices, logits[indices]

    scores, constant = data.evaluate(predict)
    assert scores == dict(accuracy=100, b_accuracy=0)
    assert constant is None


def test_majority_is_the_most_frequent_class_of_train():
    train = make_rows("aaa", ["up", "up", "down"])
    dev = make_rows("aaaa", ["up", "down", "down", "down"])
    baselines = make_data(UP_OR_DOWN, train, dev).baselines()
    assert baselines["majority"] == 25


def test_bag_of_words_learns_the_word_that_tells():
    texts = [np.array([1, 9, 8]), np.array([1, 8, 7])]
    targets = np.array([0, 1] * 20)
    assert bag_of_words(texts * 20, targets, texts, 2).tolist() == [0, 1]
