"""Tests of data/tasks.py: which rows train, which choose, which are scored; and their sources."""

import json
import random
import unicodedata
from types import SimpleNamespace

import datasets
import pytest

import data.python_source
import data.classification
from data.rows import note_once
from data.tasks import draw_groups, read_task
from support.common import InputError
from tests.helpers import make_words, write_table
from words import list_words

WORDS = make_words(60, 3)


def make_rows(texts, labels):
    """Return rows of single texts."""
    return [((text,), label) for text, label in zip(texts, labels, strict=True)]


def flags(**changes):
    """Return what read_task reads of the flags of finetune.py."""
    names = ("train", "dev", "data_dir", "text", "label", "regression", "cache", "encoding",
             "sep", "header", "limit")
    return SimpleNamespace(**dict.fromkeys(names) | dict(select=0.0, balanced=False) | changes)


# Draws


def test_draw_groups_draws_at_random():
    """Law: another seed, and the start of the file, are other rows."""
    rows = make_rows(map(str, range(60)), range(60))
    drawn, _ = draw_groups(rows, 7, seed=1, group_of=tuple)
    other_seed, _ = draw_groups(rows, 7, seed=2, group_of=tuple)
    assert len(drawn) == 7
    assert drawn not in (other_seed, rows[:7])


@pytest.mark.parametrize("num_questions, group_of", [
    (1, tuple),  # both texts are equal
    (60, lambda texts: texts[1]),  # the second ones are, as of questions about one context
])
def test_draw_groups_keeps_equal_texts_together(num_questions, group_of):
    """Law: each text is on one side, in the order of the file; at most `count` rows are drawn."""
    rows = [((str(i % num_questions), str(i % 12)), i) for i in range(60)]
    drawn, others = draw_groups(rows, 23, 1, group_of)
    assert len(drawn) == 20  # four groups of five
    drawn_contexts = {texts[1] for texts, _ in drawn}
    assert drawn == [row for row in rows if row[0][1] in drawn_contexts]
    assert others == [row for row in rows if row[0][1] not in drawn_contexts]


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


@pytest.mark.parametrize("regression, classes, scale, labels", [
    (False, ["1", "3"], None, ["3", "1"]),  # their order in the file does not matter
    (True, None, [2.0, 1.0], [3.0, 1.0]),  # mean and standard deviation
])
def test_own_files_have_classes_or_numbers(tmp_path, regression, classes, scale, labels):
    table = [("a", "b", 3), ("c", "d", 1)]
    args = own_flags(tmp_path, table, table)
    args.regression = regression
    task, splits = read_task("own", args)
    assert task.labels == classes
    assert task.scale == scale
    train = [(("a", "b"), labels[0]), (("c", "d"), labels[1])]
    assert splits == dict(train=train, dev=train)


def test_balanced_task_weighs_its_classes_and_is_scored_by_macro_f1(tmp_path):
    table = [("a", "b", "x"), ("c", "d", "y")]
    args = own_flags(tmp_path, table, table)
    args.balanced = True
    task, _ = read_task("own", args)
    assert task.is_balanced
    assert task.metrics[0] == "macro_f1"


@pytest.mark.parametrize("labels, message", [
    ("xxxx", "--label: expected two labels or more.*got 1"),
    ("wxyz", "got 4 for 4 rows. --regression is for numbers"),  # each occurs once
    ("xxyy", "dev.csv, row 1: expected a label .x, y., got 'other'"),
])
def test_own_files_refuse_labels_that_cannot_be_learned(tmp_path, labels, message):
    train = [("a", "b", label) for label in labels]
    args = own_flags(tmp_path, train, [("a", "b", "other")])
    with pytest.raises(InputError, match=message):
        read_task("own", args)


@pytest.mark.parametrize("changes, message", [
    # the score of one row would have no standard error, found out after the training
    (dict(), "--dev: expected two rows to score or more, got 1"),
    (dict(dev=None), "got 0. .* rows of equal texts stay together"),
    (dict(dev=""), "expected a file"),  # not a tenth of --train
    (dict(text="body,body"), "--text: .* each once, got body,body"),
])
def test_flags_that_score_too_little_are_refused(tmp_path, changes, message):
    args = own_flags(tmp_path, [("a", "b", "xy"[i % 2]) for i in range(60)], [("e", "f", "x")])
    vars(args).update(changes)
    with pytest.raises(InputError, match=message):
        read_task("own", args)


def test_limit_and_select_divide_the_training_rows(tmp_path):
    rows = [(str(i), "b", "xy"[i % 2]) for i in range(60)]
    args = own_flags(tmp_path, rows, rows)
    args.limit = 40
    args.select = 0.1
    _, splits = read_task("own", args)
    assert len(splits["train"]) == 36
    assert len(splits["select"]) == 4
    assert len(splits["dev"]) == 60


def test_select_that_no_group_fits_is_noted(tmp_path, capsys):
    """A model of all epochs is then scored, not the best one."""
    rows = [("a", "b", "xy"[i % 2]) for i in range(60)]
    args = own_flags(tmp_path, rows, rows)
    args.select = 0.1
    note_once.cache_clear()  # another test may have had this note
    _, splits = read_task("own", args)
    assert splits.keys() == {"train", "dev"}
    assert "--select: each group of rows is larger than the share" in capsys.readouterr().err


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


def respell(text):
    """Return what is the same text to a model, in other case, spaces and decomposed accents."""
    text = unicodedata.normalize("NFD", text.title())
    return "\t" + text.replace(" ", " \u2028") + " "


def test_equal_words_are_equal_texts(tmp_path, capsys):
    """Law: a text with the words of another, as list_words has them, is on its side of each draw.

    Labels are coin flips, so a dev row that is in train in another spelling leaks.
    """
    rng = random.Random(1)
    rows = []
    for _ in range(150):
        text = " ".join(["café", *rng.sample(WORDS, 6)])
        label = rng.choice(["up", "down"])
        rows += [(text, label), (respell(text), label)]
    train = tmp_path / "train.jsonl"
    train.write_text("\n".join(json.dumps(dict(text=text, label=label)) for text, label in rows))
    args = flags(train=str(train), select=0.1)
    _, splits = read_task("own", args)
    words = []
    for part in ("train", "select", "dev"):
        words.append({tuple(list_words(text)) for (text,), _ in splits[part]})
    assert [len(part) for part in words] == [122, 13, 15]  # each twice
    assert len(set.union(*words)) == 150

    dev = tmp_path / "dev.jsonl"
    lines = [json.dumps(dict(text=text, label=label)) for text, label in rows]
    train.write_text("\n".join(lines[::2]))
    dev.write_text("\n".join(lines[1::2]))
    read_task("own", flags(train=str(train), dev=str(dev)))
    assert "150 rows to score, of which 150 have a text of --train" in capsys.readouterr().err


def test_original_files_of_cola_have_no_header(tmp_path):
    for split in ("train", "dev"):
        path = tmp_path / "CoLA" / f"{split}.tsv"
        write_table(path, [("gj04", 0, "*", f"A {split}.")] * 2)
    _, splits = read_task("cola", flags(data_dir=str(tmp_path)))
    assert splits == dict(train=[(("A train.",), "unacceptable")] * 2,
                          dev=[(("A dev.",), "unacceptable")] * 2)


def test_splits_of_the_hub_are_its_own(monkeypatch):
    def read_hub(hub_id, split):
        assert hub_id == "nyu-mll/glue:rte"
        return [dict(sentence1=split, sentence2="b", label="entailment")] * 2

    monkeypatch.setattr(data.classification, "read_hub", read_hub)
    _, splits = read_task("rte", flags())
    assert splits == dict(train=[(("train", "b"), "entailment")] * 2,
                          dev=[(("validation", "b"), "entailment")] * 2)


def test_train_and_dev_may_be_on_the_hub(monkeypatch):
    """Law: --train owner/name reads the split train, --dev validation, unless it names one."""
    calls = []

    def load_dataset(name, config, split, streaming):
        calls.append((name, config, split))
        return [dict(text=split, label="up"), dict(text="b", label="down")]

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    own = flags(train="a/b:de", dev="a/b", text="text", label="label")
    _, splits = read_task("own", own)
    own.dev = "a/b::test"
    read_task("own", own)
    assert splits["dev"] == [(("validation",), "up"), (("b",), "down")]
    assert calls == [("a/b", "de", "train"), ("a/b", None, "validation"),
                     ("a/b", "de", "train"), ("a/b", None, "test")]


def test_pydoc_holds_out_whole_files(tmp_path, monkeypatch):
    """Modules a and b have many files of two docstrings, "lone" one file, for one split only."""
    files = {}

    def add_file(name):
        path = tmp_path / f"{len(files)}.py"
        path.write_text(f'"""The first words of {name} ."""\n'
                        f'def f():\n    """And the second of {name} ."""')
        files[f"{name}.py"] = str(path)

    for i in range(60):
        add_file(f"a/{i}")
        add_file(f"b/{i}")
    add_file("lone")
    files["b/copy.py"] = files["a/0.py"]  # code is copied about
    copy = tmp_path / "copy.py"
    copy.write_text('"""THE  first words\nof a/1 ."""')  # with other case and spaces, too
    files["b/1copy.py"] = str(copy)
    monkeypatch.setattr(data.python_source, "python_files", lambda: files)

    task, splits = read_task("pydoc", flags(cache=str(tmp_path / "cache")))

    assert task.labels == ["a", "b"]
    names = []
    for (text,), label in splits["train"]:
        name = text.split()[-2]
        assert name[0] == label
        names.append(name)
    held_out = [text.split()[-2] for (text,), _ in splits["dev"]]
    assert {"a/1", "b/9"} <= set(held_out)  # by name, on every machine
    assert not set(names) & set(held_out)
    assert len(names + held_out) == 2 * 60 * 2
