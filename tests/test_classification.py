"""Tests of data/classification.py: labels, columns, metrics by hand, examples, baselines."""

import dataclasses

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from data.classification import METRICS, SequenceClassification, parse_class, parse_number
from data.classification import parse_rows, standard_error
from data.tasks import TASKS, Task
from hashing import MD5
from model import Config
from support.common import InputError
from tests.test_tasks import WORDS, make_rows
from tokenizer import CLS, SEP, make_tokenizer

OWN = Task(["text"], [], ["accuracy"])  # its classes are not known yet
UP_OR_DOWN = Task(["text"], ["down", "up"], ["accuracy"])
NUMBER = Task(["text"], None, ["spearman"], "score", scale=[3.0, 2.0])


def make_data(task, rows):
    """Return the examples of rows, of at most nine positions."""
    tokenizer = make_tokenizer(Config(), hash=MD5())
    return SequenceClassification(task, rows, tokenizer, 9)


def two_batches(logits):
    """Yield the logits of four examples in another order: what `evaluate` reads."""
    for indices in ([3, 1], [2, 0]):
        yield indices, logits[indices]


# Labels and columns


@pytest.mark.parametrize("task, cell, label", [
    (TASKS["sst2"], "negative", "negative"),  # by name
    (TASKS["sst2"], 1, "positive"),  # by number
    (UP_OR_DOWN, " up ", "up"),
    (UP_OR_DOWN, "\ufeffup", "up"),  # two files with a byte-order mark, joined
    (UP_OR_DOWN, "up\u200b ", "up"),
    (OWN, "very \u00a0good\u200f", "very good"),
    (OWN, "cafe\u0301", "café"),  # both are printed alike
    (OWN, 1.0, "1"),  # in your own files, a number is a name
])
def test_parse_class_gives_a_name(task, cell, label):
    assert parse_class(cell, task, "here") == label


@pytest.mark.parametrize("task, cell, expected", [
    (TASKS["sst2"], "2", "negative, positive"),  # there are two classes
    (TASKS["sst2"], -1, "negative, positive"),  # GLUE hides the labels of test files
    (UP_OR_DOWN, 1, "down, up"),
    (OWN, ["a", "b"], "any text"),  # several labels
    (OWN, float("nan"), "any text"),  # an empty cell in a column of numbers
])
def test_parse_class_refuses_what_is_no_class(task, cell, expected):
    with pytest.raises(InputError, match=f"here: expected a label .{expected}."):
        parse_class(cell, task, "here")


def test_parse_number_gives_a_finite_number():
    assert parse_number("2.5", NUMBER, "here") == 2.5
    assert parse_number(-1, NUMBER, "here") == -1
    assert parse_number("\ufeff7", NUMBER, "here") == 7
    for cell in (float("nan"), 1e200, "x", None, ["1"]):  # 1e200 is infinite in float32
        with pytest.raises(InputError, match="here: expected a label .a number below 1e38"):
            parse_number(cell, NUMBER, "here")
    with pytest.raises(InputError, match="GLUE hides labels as -1"):  # STS-B would learn it
        parse_number(-1.0, TASKS["stsb"], "here")


def test_parse_rows_chooses_columns_by_name():
    """The original files and the hub name them differently. An empty cell is an empty text."""
    row = {"Quality": "1", "#1 ID": "7", "#2 String": "b", "#1 String": None}
    assert parse_rows([(1, row)], TASKS["mrpc"], "here", parse_class) == [(("", "b"), "equivalent")]


@pytest.mark.parametrize("cells, message", [
    ([], "here: expected rows, got none"),
    ([dict(sentence1="a", label=0)], "no column sentence2 among sentence1"),
    ([dict(sentence1="a", sentence2=5, label=0)], "here, row 1: expected text, got 5"),
    ([dict(sentence1="a", sentence2="b", label=0), dict(sentence1="a", label=0)],
     "here, row 2: no column sentence2"),  # else it would train on an empty text
])
def test_parse_rows_refuses_other_rows(cells, message):
    with pytest.raises(InputError, match=message):
        parse_rows(list(enumerate(cells, 1)), TASKS["rte"], "here", parse_class)


def test_column_under_both_of_its_names_is_refused():
    """The later one would win in silence."""
    row = dict(sentence1="a", sentence2="b", gold_label="neutral", label="entailment")
    with pytest.raises(InputError, match="both names of one"):
        parse_rows([(1, row)], TASKS["mnli"], "here", parse_class)


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


# Comparison of two models on the same rows


def test_error_of_one_seed_is_that_of_a_mean_of_rows():
    """Law: of 8 rows one model wins 3 and loses 1; the error is the deviation of these by √n."""
    n = 32_000
    truth = np.ones(n)
    predicted = np.tile([1, 1, 1, 0, 1, 1, 0, 0], n // 8)
    others = np.tile([0, 0, 0, 1, 1, 1, 0, 0], n // 8)
    error = standard_error("accuracy", [predicted], [others], truth)
    variance = 4 / 8 - (2 / 8)**2  # of the differences, 1, -1 or 0
    expected = 100 * np.sqrt(variance / n)
    # 20 groups measure a deviation to 1/√38 of it
    assert error == pytest.approx(expected, rel=3 / np.sqrt(38))


def test_error_of_seeds_is_that_of_their_mean():
    """All rows are alike, so only seeds differ, by 100 and by 0: the error is 100 / √2 / √2."""
    truth = np.ones(40)
    predicted = [np.ones(40), np.zeros(40)]
    others = [np.zeros(40), np.zeros(40)]
    assert standard_error("accuracy", predicted, others, truth) == pytest.approx(50)
    with pytest.raises(ValueError, match="zip"):  # of as many seeds
        standard_error("accuracy", predicted, others[:1], truth)


# Examples and baselines


def test_examples_are_pairs_cut_to_the_length():
    long_text = " ".join(WORDS)
    rows = [(("x y", "y"), 1.0), (("z", long_text), 2.0), (("", " \u200b"), 3.0)]
    data = make_data(Task(["a", "b"], None, ["spearman"], scale=[0.0, 1.0]), rows)
    assert data.ids[0].tolist() == [CLS, 5, 6, SEP, SEP, 6, SEP]
    assert len(data.ids[1]) == 9
    assert data.notes == "1 texts cut to 9 positions, 1 empty"


def test_numbers_are_standardized_by_the_scale():
    data = make_data(NUMBER, make_rows("xy", [1.0, 9.0]))
    assert data.targets.tolist() == [-1, 3]


@pytest.mark.parametrize("task, labels", [
    (UP_OR_DOWN, ["up", "down", "up", "up"]),
    (NUMBER, [1.0, 9.0, 4.0, 2.0]),
])
def test_eval_loss_is_the_mean_over_the_rows(task, labels):
    """Law: -log softmax of the right class, or the squared error in units of the scale.

    The logits come in another order than the rows.
    """
    data = make_data(task, make_rows("abcd", labels))
    logits = torch.randn(4, data.num_outputs)
    total = 0
    for row, target in zip(logits, data.targets):
        if task is NUMBER:
            total += (row[0] - target)**2
        else:
            total -= F.log_softmax(row, 0)[target]
    scores, _ = data.evaluate(two_batches(logits))
    assert scores["eval_loss"] == pytest.approx(total.item() / 4)


def test_balanced_loss_weighs_classes_alike():
    """Of four rows three are up: their weights are 4 / (2 · 3), that of the other is 4 / 2."""
    task = dataclasses.replace(UP_OR_DOWN, is_balanced=True)
    data = make_data(task, make_rows("abcd", ["up", "down", "up", "up"]))
    logits = torch.randn(4, 2)
    losses = -logits.log_softmax(1)
    assert data.loss(logits[:2], [0, 1]).item() == pytest.approx(
        (2 / 3 * losses[0, 1].item() + 2 * losses[1, 0].item()) / 2)


def test_eval_loss_of_a_balanced_task_has_no_weights():
    """Law: the rows that are scored weigh alike, so that losses with and without are comparable."""
    rows = make_rows("abcd", ["up", "down", "up", "up"])
    balanced = make_data(dataclasses.replace(UP_OR_DOWN, is_balanced=True), rows)
    logits = torch.randn(4, 2)
    plain_scores, _ = make_data(UP_OR_DOWN, rows).evaluate(two_batches(logits))
    scores, _ = balanced.evaluate(two_batches(logits))
    assert scores["eval_loss"] == plain_scores["eval_loss"]


def test_majority_is_the_most_frequent_class_of_train():
    train = make_data(UP_OR_DOWN, make_rows("aaa", ["up", "up", "down"]))
    dev = make_data(UP_OR_DOWN, make_rows("aaaa", ["up", "down", "down", "down"]))
    assert dev.majority(train) == 25
