"""data/tasks.py: rows of TASKS, labels, metrics by hand, baselines, examples."""

import math
import os
import random
from pathlib import Path
from types import SimpleNamespace

import datasets
import huggingface_hub
import numpy as np
import pytest
import torch

import data.tasks
from data.tasks import METRICS, TASKS, SequenceClassification, Task, bag_of_words, parse_rows, read_pydoc
from data.tasks import read_task, read_tests
from hashing import MD5
from model import PRESETS, Config
from runtime import InputError
from tests.support import make_words
from tokenizer import CLS, SEP, HashTokenizer

WORDS = make_words(60, 3)


def make_tokenizer():
    return HashTokenizer(Config(**PRESETS["tiny"]), hash=MD5())  # only token IDs are asked for


def flags(**changes):
    names = "train dev data_dir text label regression cache".split()
    return SimpleNamespace(**dict.fromkeys(names) | changes)


def write_table(path, rows):
    """Write a .tsv or, by its ending, a .csv without quotes; rows are sequences."""
    path.parent.mkdir(parents=True, exist_ok=True)
    sep = "," if path.suffix == ".csv" else "\t"
    path.write_text("".join(sep.join(map(str, row)) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def test_metrics_by_hand():
    """Beside test_all.py. Matthews: tp 2, tn 1, fp 1, fn 2 -> (2·1 - 1·2) / √(3·4·2·3) = 0; then one more tn."""
    f1, macro_f1, matthews, spearman, pearson = map(METRICS.get, "f1 macro_f1 matthews spearman pearson".split())
    predicted, truth = np.array([0, 1, 1, 1, 0, 0]), np.array([0, 0, 1, 1, 1, 2])
    assert macro_f1(predicted, truth) == pytest.approx((2 * 1 / (3 + 2) + 4 / 6 + 0) / 3)
    assert f1(predicted * 0, truth * 0) == 0.0  # a class that never occurs: 0/0
    assert macro_f1(np.array([1, 1]), np.array([1, 1])) == 1.0  # class 0 is absent
    predicted, truth = np.array([1, 1, 1, 0, 0, 0, 0]), np.array([1, 1, 0, 1, 1, 0, 0])
    assert abs(matthews(predicted[:-1], truth[:-1])) < 1e-12
    assert matthews(predicted, truth) == pytest.approx((2 * 2 - 1 * 2) / math.sqrt(3 * 4 * 3 * 4))
    assert matthews(np.ones(5, int), np.array([0, 1, 1, 1, 0])) == 0.0  # a constant
    a, tied = np.array([1.0, 2, 3, 4]), np.array([5.0, 7, 7, 9])  # ties share a rank: 1 2.5 2.5 4
    assert spearman(a, -tied) == pytest.approx(-np.corrcoef([1, 2, 3, 4], [1, 2.5, 2.5, 4])[0, 1])
    assert spearman(a, tied * 0) == pearson(tied * 0, a) == 0.0


def test_tasks_are_glue_and_average_eight():
    assert [name for name, task in TASKS.items() if task.in_average] == [
        "mnli", "qnli", "qqp", "rte", "sst2", "mrpc", "cola", "stsb"]
    others = {name: task.metrics[0] for name, task in TASKS.items() if task.metrics[0] != "accuracy"}
    assert others == dict(qqp="f1", cola="matthews", stsb="spearman")
    assert all(metric in METRICS for task in TASKS.values() for metric in task.metrics)


@pytest.mark.parametrize("label, message", [
    ("-1", "not public"), ("sideways", "negative, positive"), ("2", "'2'"), (None, "None"),
    ({"x": 1}, "{'x': 1}"), (b"0", "b'0'"), (float("nan"), "nan")])
def test_parse_rows_refuses_label(label, message):
    rows = [dict(sentence="a", label="0"), dict(sentence="b", label=label)]
    with pytest.raises(InputError, match=f"here, row 2.*{message}"):
        parse_rows(rows, TASKS["sst2"], "here")


def test_parse_rows_reads_names_digits_and_numbers():
    rows = [dict(sentence="a", label=1), dict(sentence=None, label="negative")]
    split = parse_rows(rows, TASKS["sst2"], "here")
    assert split == dict(first=["a", ""], second=None, labels=["positive", "negative"])
    rows = [{"#1 String": "a", "#2 String": "b", "score": "2.5"}]
    assert parse_rows(rows, TASKS["stsb"], "here") == dict(first=["a"], second=["b"], labels=[2.5])
    for bad in ("nan", "inf", 1e200, -1e200, True, [1]):
        with pytest.raises(InputError, match="here, row 1: expected a label .a number below 1e38., got"):
            parse_rows([{"sentence1": "a", "sentence2": "b", "label": bad}], TASKS["stsb"], "here")
    for text in (5, ["a"], {"a": 1}, b"a"):
        with pytest.raises(InputError, match="here, row 2: expected text, got"):
            parse_rows([dict(label=0), dict(sentence=text, label=0)], TASKS["sst2"], "here")
    for name, rows, message in (
            ("sst2", [dict(sentence=" ", label=0), dict(label=0)], "here: expected text, got 2 rows with"),
            ("rte", [dict(sentence="a", label=0)], "column sentence1 or #1 String, got sentence, label"),
            ("sst2", [dict(sentence="a")], "column label, got sentence. The labels of a test split")):
        with pytest.raises(InputError, match=message):
            parse_rows(rows, TASKS[name], "here")


@pytest.mark.parametrize("rows, message", [
    ([("a", "x"), ("b", "x")], "two labels or more.*got 1"), ([], "got no rows"),
    ([(f"a {i}", i / 7) for i in range(9)], "--regression")])
def test_own_file_refuses_labels_without_use(tmp_path, rows, message):
    path = write_table(tmp_path / "a.tsv", [("text", "label"), *rows])
    with pytest.raises(InputError, match=message):
        read_task("own", flags(train=path, dev=path, text="text", label="label"))


def test_own_file_sorts_labels_and_dev_must_share_them(tmp_path, capsys):
    columns = "title", "body", "topic"
    train = write_table(tmp_path / "a.csv", [columns, ("a", "b", 2), ("c", "d", 1), ("e", "f", 2)])
    dev = write_table(tmp_path / "b.csv", [columns, ("a", "b", 3)])
    args = dict(train=train, dev=train, text="title, body", label="topic")
    task, split, devs = read_task("own", flags(**args))
    assert task.labels == ("1", "2") and task.metrics == ("accuracy", "macro_f1") and devs == {"dev": split}
    assert split == dict(first=["a", "c", "e"], second=["b", "d", "f"], labels=["2", "1", "2"])
    with pytest.raises(InputError, match="b.csv, row 1: expected a label .1, 2., got '3'"):
        read_task("own", flags(**args | dict(dev=dev)))
    assert "a.csv: 3 rows to score, of which 3 have a text of --train" in capsys.readouterr().err
    task, split, _ = read_task("own", flags(**args, regression=True))
    assert task.labels is None and split["labels"] == [2.0, 1.0, 2.0] and task.metrics[0] == "spearman"


def test_cola_reads_files_without_header(tmp_path, monkeypatch):
    monkeypatch.setattr(TASKS["cola"], "rows", (2, 1))
    write_table(tmp_path / "CoLA" / "train.tsv", [("gj04", 1, "", "A text."), ("gj04", 0, "*", "Text a.")])
    write_table(tmp_path / "CoLA" / "dev.tsv", [("gj04", 1, "", "Another.")])
    task, train, devs = read_task("cola", flags(data_dir=str(tmp_path)))
    assert train == dict(first=["A text.", "Text a."], second=None, labels=["acceptable", "unacceptable"])
    assert devs["dev"]["first"] == ["Another."]
    monkeypatch.setattr(TASKS["cola"], "rows", (3, 1))
    for name, message in dict(cola="3 rows, got 2", sst2="SST-2.*train.tsv: expected a file").items():
        with pytest.raises(InputError, match=message):
            read_task(name, flags(data_dir=str(tmp_path)))


def test_test_split_has_index_and_needs_no_labels(tmp_path):
    write_table(tmp_path / "MNLI" / "test_matched.tsv", [("index", "sentence1", "sentence2"), (7, "a", "b")])
    write_table(tmp_path / "MNLI" / "test_mismatched.tsv", [("sentence1", "sentence2"), "cd", "ef"])
    tests = read_tests("mnli", flags(data_dir=str(tmp_path)))
    assert tests["test_matched"] == (dict(first=["a"], second=["b"], labels=[]), ["7"])
    assert tests["test_mismatched"][1] == [0, 1]


def test_hub_labels_travel_by_name(tmp_path, monkeypatch):
    """A hub that numbers the classes another way, a file of names, and one of digits: the same rows."""
    monkeypatch.setattr(TASKS["rte"], "rows", (9, 9))
    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", lambda *args, **options: None)
    rng, names, string = random.Random(2), TASKS["rte"].labels, datasets.Value("string")
    rows = [(rng.choice(WORDS), rng.choice(WORDS), rng.choice(names)) for _ in range(9)]
    columns, splits = ("sentence1", "sentence2", "label"), []
    for order in (names, names[::-1]):
        label = datasets.ClassLabel(names=list(order))
        features = datasets.Features(sentence1=string, sentence2=string, label=label)
        hub = datasets.Dataset.from_list([dict(zip(columns, row)) for row in rows], features=features)
        monkeypatch.setattr(datasets, "load_dataset", lambda *a, hub=hub, **k: hub)
        splits.append(read_task("rte", flags()))
    for kind, number in (("names", str), ("digits", names.index)):
        for split in ("train", "dev"):
            lines = [columns, *((a, b, number(c)) for a, b, c in rows)]
            write_table(tmp_path / kind / "RTE" / f"{split}.tsv", lines)
        splits.append(read_task("rte", flags(data_dir=str(tmp_path / kind))))
    assert all(split == splits[0] for split in splits)


def test_pydoc_holds_out_whole_files(tmp_path, monkeypatch):
    """Modules "a" and "b" in many files each, "lone" in one, which cannot be both trained on and held out."""
    files = {f"{name}{os.sep}{i}.py": str(tmp_path / f"{name}{i}.py") for i in range(60) for name in "ab"}
    for file, path in files.items():
        name, i = file.removesuffix(".py").split(os.sep)
        words = " ".join([*random.Random(int(i)).sample(WORDS, 5), name * 4])
        Path(path).write_text(f'"""{words} of file {i} a."""\ndef f():\n    """{words} of file {i} b."""')
    files["lone.py"] = str(tmp_path / "lone.py")
    Path(files["lone.py"]).write_text('"""One docstring of many words here."""\n')
    monkeypatch.setattr(data.tasks, "python_files", lambda: files)
    task, train, devs = read_pydoc(str(tmp_path / "cache"))
    dev = devs["dev"]
    assert task.labels == ("a", "b") and set(dev["labels"]) == {"a", "b"}
    assert len(train["first"]) + len(dev["first"]) == 240
    seen, held_out = ({(label, text.split()[-2]) for label, text in zip(part["labels"], part["first"])}
                      for part in (train, dev))
    assert held_out and not seen & held_out  # by file: its number and its letter
    assert all(label * 4 in text for text, label in zip(train["first"], train["labels"]))
    next((tmp_path / "cache").glob("pydoc-*.json")).write_text("[[")
    with pytest.raises(InputError, match="damaged file. Remove it"):
        read_pydoc(str(tmp_path / "cache"))


def test_examples_are_cut_limited_and_scaled():
    task = Task(("a", "b"), None, ("spearman",))
    train = dict(first=["x y", "z", "x"], second=["y", "y z", " ".join(WORDS)], labels=[1.0, 3.0, 8.0])
    about = {"dev": train}, make_tokenizer(), 9
    sequences = SequenceClassification(task, train, *about)
    assert sequences.examples[0].tolist() == [CLS, 5, 6, SEP, SEP, 6, SEP]
    assert sequences.num_outputs == 1 and sequences.notes.startswith("2 texts")  # once in train, once in dev
    assert sequences.scale == (4.0, pytest.approx(np.std([1, 3, 8])))
    np.testing.assert_allclose(sequences.targets * sequences.scale[1] + 4, [1, 3, 8], rtol=1e-6)
    for scale in ((1.0, 0.0), (1.0,)):
        with pytest.raises(InputError, match="expected a mean"):
            SequenceClassification(task, train, *about, scale=scale)
    assert sequences.evaluate(lambda examples: [(np.arange(3), torch.full((3, 1), 0.5))])[1] == "5.472"  # unscaled
    one, two = (SequenceClassification(task, train, *about, limit=2) for _ in range(2))
    assert len(one.examples) == 2 and one.targets.tolist() == two.targets.tolist() and one.n == 3
    assert sequences.description() == dict(head="classify", labels=None, scale=list(sequences.scale),
                                           texts=["a", "b"], label="label", pair=True)


def test_evaluate_restores_order_of_batches():
    """Logits that know the label by its word, handed over in a random order of batches."""
    labels = [random.Random(i).choice(["up", "down"]) for i in range(23)]
    split = dict(first=[f"{label} {WORDS[i]}" for i, label in enumerate(labels)], second=None, labels=labels)
    task = Task(("text",), ("down", "up"), ("accuracy", "f1"), dev=("dev_a", "dev_b"))
    wrong = dict(split, labels=[dict(up="down", down="up")[label] for label in labels])
    tokenizer = make_tokenizer()
    sequences = SequenceClassification(task, split, {"dev_a": split, "dev_b": wrong}, tokenizer, 9)

    def predict(examples):
        order = np.random.default_rng(0).permutation(len(examples))
        for part in np.array_split(order, 4):
            is_up = torch.tensor([float(tokenizer.id_of_word["up"] in examples[i]) for i in part])
            yield part, torch.stack([1 - is_up, is_up], 1)

    scores, constant = sequences.evaluate(predict)
    assert scores == dict(accuracy=100, f1=100, b_accuracy=0, b_f1=0) and constant is None


def test_baselines_know_the_majority_and_the_words():
    rng = np.random.default_rng(0)
    labels = ["up" if x < 0.7 else "down" for x in rng.random(200)]
    texts = [f"{rng.choice(WORDS)} {label} {rng.choice(WORDS)}" for label in labels]
    train, dev = (dict(first=texts[a:b], second=None, labels=labels[a:b]) for a, b in ((0, 150), (150, 200)))
    task = Task(("text",), ("down", "up"), ("accuracy",))
    baselines = SequenceClassification(task, train, {"dev": dev}, make_tokenizer(), 9).baselines()
    assert baselines["majority"] == pytest.approx(100 * labels[150:].count("up") / 50)
    assert baselines["bag_of_words"] > baselines["majority"]
    ids = [np.array([1, 9]), np.array([1, 7])]
    assert bag_of_words(ids * 20, np.array([0, 1] * 20), ids, 2).tolist() == [0, 1]


def test_submission_has_names_digits_or_clipped_numbers():
    for name, predicted, lines in (
            ("rte", [0, 1], ["entailment", "not_entailment"]), ("qqp", [0, 1], ["0", "1"]),
            ("stsb", [-9.0, 0.0, 0.5, 9.0], ["0.000", "2.000", "2.500", "5.000"])):
        labels = list(TASKS[name].labels or (1.0, 3.0))[:2]
        split = dict(first=["a", "b"], second=["c", "d"], labels=labels)
        sequences = SequenceClassification(TASKS[name], split, {"dev": split}, make_tokenizer(), 9)
        assert sequences.submission(np.array(predicted)) == lines
