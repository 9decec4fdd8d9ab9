"""Tests of finetune.py and bench/compare.py: runs of tiny models, resume, refusals, Table 2."""

import dataclasses
import json
import math
import os
import random
import shutil
import signal
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.optim.optimizer import register_optimizer_step_pre_hook

import finetune
from bench import compare
from common import InputError, Runtime, load_checkpoint, lock_output
from data.corpus import read_rows
from data.tasks import TASKS, SequenceClassification, Task
from hashing import MD5
from infer import Predictor
from model import PRESETS, Config
from tests.support import assert_refused, equal_weights, run_main, torchrun
from tests.test_squad import make_rows, nested_file
from tests.test_tasks import WORDS, write_table
from tokenizer import HashTokenizer

DEVICE = "--device cpu --dtype float32 --no-compile".split()
QUICK = [*DEVICE, *"--epochs 3 --lr 1e-2 --batch 16".split()]
# 397 rows, of which 40 choose the weights
STEPS = 69  # of a seed with QUICK: 3 epochs of 357 rows
# lr 0: the checkpoint that a run leaves holds the weights that it started from
NO_TRAINING = "--lr 0 --epochs 1 --limit 40 --seeds 1".split()


def sentence(rng, *more):
    """Return 3 to 9 words and `more`, in random order."""
    words = [*rng.sample(WORDS, rng.randint(3, 9)), *more]
    return " ".join(rng.sample(words, len(words)))


@pytest.fixture(scope="session")
def own(tmp_path_factory):
    """Flags of a task in files: one word tells the class, "zebra" or "quagga"."""
    folder = tmp_path_factory.mktemp("own")
    rng = random.Random(5)
    paths = []
    for split, n in (("train", 397), ("dev", 101)):
        rows = [("text", "label")]
        for _ in range(n):
            word, label = rng.choice([("zebra", "up"), ("quagga", "down")])
            rows.append((sentence(rng, word), label))
        paths.append(write_table(folder / f"{split}.tsv", rows))
    train, dev = paths
    return ["--text", "text", "--label", "label", "--train", train, "--dev", dev]


@pytest.fixture
def tune(sr_run):
    """A function that fine-tunes the tiny model and returns the results, those of results.json."""
    def run(out, *flags):
        done = run_main(finetune.main, "--ckpt", sr_run, *QUICK, "--out", out, *flags)
        assert done.code == 0, done
        assert done.result == json.loads((out / "results.json").read_text())
        return done.result

    return run


def score(start, out, *flags):
    """Score a fine-tuned model without training; return the results."""
    flags = ["--ckpt", start, *DEVICE, "--epochs", 0, "--out", out, *flags]
    return run_main(finetune.main, *flags).result


@pytest.fixture
def refuse(sr_run):
    """A function that asserts that a fine-tuning is refused with a line of these fragments."""
    def run(out, flags, *fragments):
        argv = ["--ckpt", sr_run, *QUICK, "--out", out, *flags]
        assert_refused(finetune.main, argv, *fragments)

    return run


@pytest.fixture
def before_step():
    """Record the learning rate of each step, and call actions[i](optimizer) before step i."""
    rates = []
    actions = {}

    def hook(optimizer, args, kwargs):
        encoder, _ = optimizer.param_groups
        if encoder["params"]:  # the control has none
            rates.append(encoder["lr"])
            if len(rates) in actions:
                actions[len(rates)](optimizer)

    handle = register_optimizer_step_pre_hook(hook)
    yield rates, actions
    handle.remove()


def read_weights(folder):
    return load_checkpoint(str(folder))["model"]


def made_up_result(seed, score, selection=0.0, num_rows=2):
    """Return what train_and_score returns where the first class is predicted of every row."""
    scores = dict(accuracy=float(score))
    return dict(seed=seed, best=scores, last=scores, predicted=[0] * num_rows,
                constant_prediction=None, selection=selection, log=[])


# Results


def test_results_summarize_the_seeds(tune, own, tmp_path):
    flags = ["--seeds", 2, "--limit", 390, "--eval_every", 30]
    row = tune(tmp_path, *own, *flags)["tasks"]["own"]
    assert row["seeds"] == [0, 1]
    assert row["mean"] == pytest.approx(np.mean(row["values"]))
    assert row["std"] == pytest.approx(np.std(row["values"], ddof=1))
    assert row["rows"] == dict(train=351, select=39, dev=101)
    assert row["n_train"] == 351
    log = read_rows(str(tmp_path / "log.jsonl"))
    assert [line["step"] for line in log] == [30, 60, 66] * 2


def test_score_beats_majority_and_is_read_back(tune, own, tmp_path):
    """Law: --epochs 0 and infer.py give the score that was saved."""
    row = tune(tmp_path / "a", *own, "--seeds", 1)["tasks"]["own"]
    assert 40 < row["majority"] < 60
    assert row["bag_of_words"] > 95
    assert row["mean"] > 95
    again = score(tmp_path / "a", tmp_path / "b", *own)
    assert again["tasks"]["own"]["values"] == row["values"]
    predictor = Predictor(str(tmp_path / "a"))
    is_right = []
    for dev_row in read_rows(own[-1]):
        label, _ = predictor.classify(dev_row["text"])[0]
        is_right.append(label == dev_row["label"])
    assert 100 * np.mean(is_right) == pytest.approx(row["mean"])


def test_predictions_reproduce_the_scores(tune, own, tmp_path):
    """Law: of each seed they have the accuracy that is reported, of the model and the control."""
    row = tune(tmp_path, *own, "--seeds", 2, "--epochs", 1)["tasks"]["own"]
    predictions = json.loads((tmp_path / "predictions.json").read_text())["own"]
    truth = []
    for dev_row in read_rows(own[-1]):
        truth.append(["down", "up"].index(dev_row["label"]))
    assert predictions["truth"] == truth
    right = np.array(predictions["predicted"]) == truth
    assert row["values"] == pytest.approx(100 * right.mean(1))
    scores = row["f1_per_label"]
    assert list(scores) == ["down", "up"]
    assert scores["down"] != scores["up"]
    macro_f1 = row["all_metrics"]["macro_f1"]
    assert (scores["down"] + scores["up"]) / 2 == pytest.approx(macro_f1)
    right = np.array(predictions["bag_of_words"]) == truth
    assert row["bag_of_words"] == pytest.approx(100 * right.mean())
    assert row["bag_of_words_std"] == pytest.approx(100 * right.mean(1).std(ddof=1))
    assert row["over_bag"] == pytest.approx(row["mean"] - row["bag_of_words"])


@pytest.mark.parametrize("difference, error, is_noted", [
    (1.9, 1.0, True),  # below two errors
    (0.0, 0.0, True),  # the same predictions
    (2.1, 1.0, False),
    (-5.0, 1.0, True),  # worse
])
def test_score_like_that_of_a_bag_of_words_is_noted(
        difference, error, is_noted, tune, own, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(finetune, "compare_predictions", lambda *args: (difference, error))
    results = tune(tmp_path, *own, *NO_TRAINING)
    finetune.print_results(results)
    out = capsys.readouterr().out
    assert f"minus a bag of words: {difference:+.2f} ± {error:.2f}" in out
    assert ("no better than a bag of words" in out) == is_noted


def test_glue_is_eight_tasks_and_their_average(tune, tmp_path, monkeypatch):
    """Made-up texts and scores: letters of a task's name, plus the seed."""
    task = Task(["text"], ["down", "up"], ["accuracy"])
    rows = [(("a",), "up"), (("b",), "down")]

    def train_and_score(args, runtime, job, model, data):
        return made_up_result(job.seed, len(job.name) + job.seed)

    monkeypatch.setattr(finetune, "read_task", lambda name, args: (task, rows, {"dev": rows}))
    monkeypatch.setattr(finetune, "train_and_score", train_and_score)
    results = tune(tmp_path, "--task", "glue", "--seeds", 2)
    assert " ".join(results["tasks"]) == "mnli qnli qqp rte sst2 mrpc cola stsb"  # no WNLI
    assert results["average"] == (3.75 + 4.75) / 2
    assert results["average_std"] == pytest.approx(0.5**0.5)
    assert (tmp_path / "stsb" / "ckpt.pt").exists()


def test_run_of_one_class_is_named(sr_run, own, tmp_path):
    """Its score is the majority's, which is no better than a bag of words."""
    rows = [("text", "label"), ("a", "down"), *[("a", "up")] * 59]
    train = write_table(tmp_path / "train.tsv", rows)
    done = run_main(finetune.main, "--ckpt", sr_run, *QUICK, *own, "--train", train, "--seeds", 2,
                    "--out", tmp_path)
    row = done.result["tasks"]["own"]
    assert row["mean"] == row["majority"]
    assert done.out.count("always predicts 'up'") == 2
    assert "no better than a bag of words" in done.out


# Rows that train, rows that choose, rows that are scored


def test_training_rows_are_divided_and_none_is_lost(tune, own, tmp_path, monkeypatch):
    """Law: train and select are the training rows, and dev the dev rows, in their order."""
    splits = {}

    def train_and_score(args, runtime, job, model, data):
        splits.update(data)
        return made_up_result(job.seed, 0, num_rows=101)

    monkeypatch.setattr(finetune, "train_and_score", train_and_score)
    monkeypatch.setattr(finetune, "compare_predictions", lambda *args: (0.0, 0.0))
    tune(tmp_path, *own, "--seeds", 1, "--select", 0.25)

    def list_rows(data):
        return [(*ids.tolist(), label) for ids, label in zip(data.examples, data.targets)]

    train = splits["train"]
    expected = []
    for path in (own[-3], own[-1]):
        rows = [((row["text"],), row["label"]) for row in read_rows(path)]
        data = SequenceClassification(train.task, rows, train.tokenizer, train.length)
        expected.append(list_rows(data))
    assert len(list_rows(splits["select"])) == 99  # a quarter of 397
    assert sorted(list_rows(train) + list_rows(splits["select"])) == sorted(expected[0])
    assert list_rows(splits["dev"]) == expected[1]


def test_slice_chooses_the_weights_and_dev_rows_score_them(tune, own, tmp_path, monkeypatch):
    """Law: dev rows are read at the end only, with the last weights and then the chosen ones."""
    accuracy = [50.0, 90.0, 90.0, 70.0]  # of the slice; of equal ones the earliest is chosen
    sizes = []
    heads = []

    def evaluate(runtime, model, data):
        sizes.append(len(data.examples))
        heads.append(model.head[1].weight.clone())
        if len(sizes) <= 4:
            return dict(accuracy=accuracy[len(sizes) - 1]), None
        return dict(accuracy=10.0 * len(sizes)), data.targets

    monkeypatch.setattr(finetune, "evaluate", evaluate)
    monkeypatch.setattr(finetune, "build_bag_of_words", lambda data: None)
    row = tune(tmp_path, *own, "--seeds", 1, "--eval_every", 18)["tasks"]["own"]

    assert sizes == [40, 40, 40, 40, 101, 101]
    last = heads[4]
    assert torch.equal(last, heads[3])
    assert row["last"] == 50
    chosen = heads[5]
    assert torch.equal(chosen, heads[1])
    assert row["mean"] == 60
    assert torch.equal(read_weights(tmp_path)["head.1.weight"], chosen)


def test_without_a_slice_the_last_weights_are_scored(tune, own, tmp_path):
    row = tune(tmp_path, *own, "--seeds", 1, "--select", 0)["tasks"]["own"]
    assert row["rows"] == dict(train=397, dev=101)
    assert row["mean"] == row["last"]
    for line in read_rows(str(tmp_path / "log.jsonl")):
        assert "accuracy" not in line


def test_slice_of_no_rows_is_said_to_choose_nothing(sr_run, own, tmp_path):
    done = run_main(finetune.main, "--ckpt", sr_run, *QUICK, *own, *NO_TRAINING, "--limit", 4,
                    "--out", tmp_path)
    assert done.result["tasks"]["own"]["rows"] == dict(train=4, dev=101)
    assert "own: --select 0.1 of 4 rows is none: the last weights are scored" in done.out
    assert "--select has" not in done.out


@pytest.mark.parametrize("limit, is_warned", [(290, True), (310, False)])
def test_slice_of_few_rows_is_said_to_choose_badly(sr_run, own, tmp_path, monkeypatch, limit,
                                                   is_warned):
    monkeypatch.setattr(finetune, "train_and_score", lambda args, runtime, job, model, data:
                        made_up_result(job.seed, 0, num_rows=101))
    done = run_main(finetune.main, "--ckpt", sr_run, *QUICK, *own, "--limit", limit,
                    "--out", tmp_path)
    assert (f"--select has {limit // 10} rows" in done.out) == is_warned


def test_share_of_the_training_rows_is_scored(tune, tmp_path):
    """Law: --dev 0.2 draws a fifth. Columns named text and label need no flag."""
    rows = [("text", "label")]
    for i in range(50):
        rows.append((f"word{i}", ["up", "down"][i % 2]))
    train = write_table(tmp_path / "train.tsv", rows)
    row = tune(tmp_path / "out", "--train", train, "--dev", 0.2, *NO_TRAINING)["tasks"]["own"]
    assert row["rows"] == dict(train=36, select=4, dev=10)
    assert row["split"] == f"0.2 of the rows of {train}"
    assert row["columns"] == ["text", "label"]


def test_questions_about_one_context_stay_together(tune, tmp_path, monkeypatch):
    """Law: no context of the slice trains. Twenty have five questions each."""
    rows = []
    for (question, context), answers in make_rows(random.Random(1), 20):
        rows += [((f"{question} {i}", context), answers) for i in range(5)]
    for split in ("train", "dev"):
        (tmp_path / f"{split}-v1.1.json").write_text(nested_file(rows))
    splits = {}

    def train_and_score(args, runtime, job, model, data):
        splits.update(data)
        scores = dict(f1=0.0, em=0.0)
        return made_up_result(job.seed, 0) | dict(best=scores, last=scores)

    monkeypatch.setattr(finetune, "train_and_score", train_and_score)
    tune(tmp_path / "out", "--task", "squad", "--data_dir", tmp_path, "--seeds", 1)

    contexts = {}
    for split in ("train", "select"):
        contexts[split] = {context for (_, context), _ in splits[split].rows}
    assert len(splits["select"].rows) == 10  # of 100
    assert len(contexts["select"]) == 2
    assert not contexts["train"] & contexts["select"]


def test_further_splits_are_scored_under_their_names(monkeypatch):
    """MNLI has two dev sets. The first one's score counts, and its predictions are kept."""
    scores = dict(dev_matched=70, dev_mismatched=60)
    monkeypatch.setattr(
        finetune, "evaluate", lambda args, model, data: (dict(accuracy=data), [data]))
    data = scores | dict(train=Namespace(task=TASKS["mnli"]))
    scores, predicted = finetune.evaluate_dev(None, None, data)
    assert scores == dict(accuracy=70, mismatched_accuracy=60)
    assert predicted == [70]


def test_labels_of_dev_rows_choose_nothing(tune, own, tmp_path):
    """Law: with their labels exchanged, the same weights of the same seed are kept."""
    other = dict(up="down", down="up")
    rows = [("text", "label")]
    for row in read_rows(own[-1]):
        rows.append((row["text"], other[row["label"]]))
    exchanged = write_table(tmp_path / "exchanged.tsv", rows)
    right = tune(tmp_path / "right", *own, "--seeds", 2)["tasks"]["own"]
    wrong = tune(tmp_path / "wrong", *own, "--seeds", 2, "--dev", exchanged)["tasks"]["own"]
    assert equal_weights(tmp_path / "right", tmp_path / "wrong")
    assert wrong["values"] == pytest.approx([100 - value for value in right["values"]])


def test_seed_with_the_best_slice_is_kept(tune, own, tmp_path, monkeypatch):
    """Law: not the seed with the best score of dev rows. Seed 1 has the best slice."""
    selections = [3.0, 5.0, 4.0]

    def train_and_score(args, runtime, job, model, data):
        model.state_dict()["head.1.bias"].fill_(job.seed)
        return made_up_result(job.seed, -job.seed, selections[job.seed], num_rows=101)

    monkeypatch.setattr(finetune, "train_and_score", train_and_score)
    monkeypatch.setattr(finetune, "build_bag_of_words", lambda data: None)
    tune(tmp_path, *own)
    assert read_weights(tmp_path)["head.1.bias"].unique() == 1


def test_regression_of_pairs_is_learned(tune, tmp_path):
    """The number of words of the second text, in units of its own."""
    rng = random.Random(4)
    rows = [("a", "b", "score")]
    for amount in rng.choices(range(5), k=700):
        rows.append((sentence(rng), "more " * amount + "end", 1000 + 100 * amount))
    train = write_table(tmp_path / "train.tsv", rows)
    dev = write_table(tmp_path / "dev.tsv", rows[:90])
    flags = ["--train", train, "--dev", dev, "--text", "a,b", "--label", "score", "--regression"]
    results = tune(tmp_path / "out", *flags, "--seeds", 1, "--epochs", 6)
    assert results["tasks"]["own"]["mean"] > 90  # Spearman's correlation
    predictor = Predictor(str(tmp_path / "out"))
    [(_, few)] = predictor.classify("a b c", "end")
    [(_, many)] = predictor.classify("a b c", "more more more more end")
    assert 900 < few < 1200 < many < 1500

    # the units are those of the training, whatever rows follow
    score(tmp_path / "out", tmp_path / "again", *flags, "--limit", 5)
    before = load_checkpoint(str(tmp_path / "out"))["task"]["scale"]
    assert load_checkpoint(str(tmp_path / "again"))["task"]["scale"] == before


def test_squad_is_learned_and_read_back(tune, tmp_path):
    """It learns where the answer stands, in windows; infer.py gives the same answers."""
    for split, seed, n in (("train", 1, 500), ("dev", 2, 40)):
        rows = make_rows(random.Random(seed), n, 0.2)
        (tmp_path / f"{split}-v2.0.json").write_text(nested_file(rows))
    results = tune(tmp_path, "--task", "squad_v2", "--data_dir", tmp_path, "--seeds", 1)
    row = results["tasks"]["squad_v2"]
    is_silent = [answers == [] for _, answers in rows]
    assert row["majority"] == pytest.approx(100 * np.mean(is_silent))
    assert row["mean"] > row["majority"] + 20
    assert row["over_bag"] is None  # a bag of words has no place in a text
    predictor = Predictor(str(tmp_path))
    is_right = []
    for texts, answers in rows:
        truths = [text for text, _ in answers] or [""]
        [(answer, _, _)] = predictor.answer(*texts, k=1)
        is_right.append([answer] == truths)
    assert 100 * np.mean(is_right) == pytest.approx(row["all_metrics"]["em"])


# Start


def test_pre_trained_weights_are_used_unless_from_scratch(tune, sr_run, own, tmp_path):
    name = "layers.0.up.weight"
    before = read_weights(sr_run)[name]
    tune(tmp_path / "tuned", *own, *NO_TRAINING)
    tune(tmp_path / "fresh", *own, *NO_TRAINING, "--from_scratch")
    assert torch.equal(read_weights(tmp_path / "tuned")[name], before)
    assert not torch.equal(read_weights(tmp_path / "fresh")[name], before)


def test_head_and_bag_are_kept_for_the_very_same_task(tune, own, tmp_path):
    tune(tmp_path / "tuned", *own, "--bag", 99, "--epochs", 1, "--seeds", 1)
    start = [*own, *NO_TRAINING, "--ckpt", tmp_path / "tuned"]
    tune(tmp_path / "same", *start)
    tune(tmp_path / "resized", *start, "--bag", 98)
    tune(tmp_path / "other", *start, "--text", "text,text")
    tuned = read_weights(tmp_path / "tuned")
    same = read_weights(tmp_path / "same")
    for name in ("head.1.weight", "bag.weight", "bag.idf"):
        assert torch.equal(same[name], tuned[name])
    resized = read_weights(tmp_path / "resized")
    assert torch.equal(resized["head.1.weight"], tuned["head.1.weight"])
    assert not resized["bag.weight"].any()
    assert resized["bag.idf"].max() > 1  # counted anew
    other = read_weights(tmp_path / "other")
    assert not torch.equal(other["head.1.weight"], tuned["head.1.weight"])


def test_missing_weights_are_refused_unless_their_part_is_new():
    """Law: the head of a new task is drawn anew. The encoder is the checkpoint's, all of it."""
    config = Config(**PRESETS["tiny"])
    task = Task(["text"], ["down", "up"], ["accuracy"])
    rows = [(("a",), "up"), (("b",), "down")]
    train = SequenceClassification(task, rows, HashTokenizer(config, hash=MD5()), 9)
    weights = finetune.build_model(config, {}, "own", train).state_dict()
    del weights["head.1.weight"]

    model = finetune.build_model(config, dict(model=weights), "own", train)
    for name, weight in weights.items():
        if not name.startswith("head."):
            assert torch.equal(model.state_dict()[name], weight)

    missing = "layers.0.up.weight"
    with pytest.raises(InputError, match=f"1 missing and 0 unexpected ones, as {missing}"):
        others = {name: weight for name, weight in weights.items() if name != missing}
        finetune.build_model(config, dict(model=others), "own", train)
    with pytest.raises(InputError, match="0 missing and 1 unexpected ones, as more"):
        others = weights | {"more": weights[missing]}
        finetune.build_model(config, dict(model=others), "own", train)


@pytest.mark.parametrize("flags, num_rows", [
    ("", 0),  # of any recipe
    ("--recipe paper", 0),
    ("--bag 99", 99),
    ("--bag 99 --text text,text", 0),  # a bag cannot compare two texts
])
def test_hybrid_is_asked_for_and_for_single_texts(flags, num_rows, tune, own, tmp_path):
    tune(tmp_path, *own, *NO_TRAINING, *flags.split())
    assert load_checkpoint(str(tmp_path))["config"]["bag"] == num_rows


def test_hybrid_reads_what_the_encoder_cannot_see(tune, tmp_path):
    """The label is the last word, behind the encoder's last position."""
    rows = [("text", "label")]
    for i in range(60):
        for label in ("up", "down"):
            rows.append(("x " * (99 + i % 9) + label, label))
    path = write_table(tmp_path / "rows.tsv", rows)
    flags = ["--train", path, "--dev", path, "--text", "text", "--label", "label", "--seeds", 1]
    row = tune(tmp_path, *flags, "--bag", 999)["tasks"]["own"]
    assert row["last"] == 100
    assert row["bag_of_words"] == 100  # the control reads what the model reads
    text, label = rows[1]
    assert Predictor(str(tmp_path)).classify(text)[0][0] == label


def test_proformer_trains_without_pre_training(own, tmp_path, monkeypatch):
    small = dataclasses.replace(finetune.SHAPES["proformer"], width=32, heads=4, ffn=64)
    monkeypatch.setitem(finetune.SHAPES, "proformer", small)
    done = run_main(finetune.main, "--preset", "proformer", *QUICK, *own, "--seeds", 1,
                    "--out", tmp_path)
    assert done.result["tasks"]["own"]["mean"] > 90
    assert not done.result["model"]["pretrained"]
    assert len(Predictor(str(tmp_path)).classify("zebra")) == 2


@pytest.mark.parametrize("ckpt, flags, out", [
    ("models/docstrings.pt", "", "out/docstrings-own"),  # a file of its own
    ("runs/a/best.pt", "--from_scratch", "out/a-scratch-own"),  # a file of a run
    ("runs/a", "", "out/a-own"),
])
def test_default_out_names_the_start_and_the_task(
        ckpt, flags, out, sr_run, own, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for path in ("models/docstrings.pt", "runs/a/ckpt.pt", "runs/a/best.pt"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(sr_run / "ckpt.pt", path)
    done = run_main(finetune.main, "--ckpt", ckpt, *QUICK, *own, *NO_TRAINING, *flags.split())
    assert f"Saved {out}/results.json" in done.out
    assert (tmp_path / out / "ckpt.pt").exists()


# Training


@pytest.mark.parametrize("steps, warmup, rates", [
    (12, 2, [1 / 2, 1, *[1, 1 / 2] * 5]),  # linear up, then five cosines of two steps
    (10, 0, [1, 1 / 2] * 5),  # nothing to warm up
    (4, 4, [1 / 4, 1 / 2, 3 / 4, 1]),
    (1, 1, [1]),
])
def test_learning_rate_rises_to_the_peak_and_never_above(steps, warmup, rates):
    factors = [finetune.learning_rate(step, steps, warmup) for step in range(steps)]
    assert factors == pytest.approx(rates)
    assert max(factors) == 1


def test_recipe_reaches_the_optimizer(tune, own, tmp_path, before_step):
    """[HF Table 5] 6 % of 80 steps to warm up, then five cosines of 15; Adam without decay."""
    groups = []
    rates, actions = before_step
    actions[80] = lambda optimizer: groups.extend(optimizer.param_groups)
    flags = "--batch 25 --epochs 5 --lr 1 --seeds 1 --select 0 --bag 64"
    tune(tmp_path, *own, *flags.split())
    assert len(rates) == 80
    assert rates[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1])
    assert rates[5::15] == [1] * 5
    assert rates[10::15] == pytest.approx([0.75] * 5)
    assert rates[15::15] == pytest.approx([0.25] * 5)
    encoder, bag = groups
    assert encoder["eps"] == 1e-6
    assert encoder["weight_decay"] == 0
    assert bag["weight_decay"] == 2
    assert bag["params"][0].shape == (64, 2)


def test_control_is_the_bag_trained_alone():
    """Law: train_and_score of the control is a linear model by hand, with a row for each word."""
    rows = []
    for text, label in (("a b c", "up"), ("a c", "up"), ("b d d", "down"), ("c d", "down")):
        rows.append(((text,), label))
    task = Task(["text"], ["down", "up"], ["accuracy"])
    tokenizer = HashTokenizer(Config(**PRESETS["tiny"]), hash=MD5())
    train = SequenceClassification(task, rows, tokenizer, 9)
    data = dict(train=train, dev=train)
    control = finetune.build_bag_of_words(data)
    args = Namespace(lr=0.1, epochs=9, batch=4, eval_every=None)
    runtime = Runtime(torch.device("cpu"), "float32", use_compile=False)

    result = finetune.train_and_score(args, runtime, finetune.Job("toy", 0, ""), control, data)

    # a row of x for each text: idf · ln(1 + count) of each ID, of length 1
    num_ids, _ = control.bag.weight.shape
    x = torch.zeros(4, num_ids)
    for i in range(num_ids):
        num_texts = sum(i in ids for ids in train.examples)
        for text, ids in enumerate(train.examples):
            count = (ids == i).sum()
            x[text, i] = (1 + math.log(5 / (1 + num_texts))) * math.log(1 + count)
    x /= x.norm(dim=1, keepdim=True)
    weight = torch.zeros(num_ids, 2, requires_grad=True)
    optimizer = torch.optim.AdamW([weight], eps=1e-6, weight_decay=2)
    for step in range(9):  # all texts in each
        optimizer.param_groups[0]["lr"] = 0.1 * finetune.learning_rate(step, 9, 1)
        loss = F.cross_entropy(30 * x @ weight, torch.from_numpy(train.targets))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_([weight], 1)
        optimizer.step()
    torch.testing.assert_close(control.bag.weight, weight)
    assert result["last"]["accuracy"] == 100


def test_weights_that_are_not_finite_are_refused(refuse, own, tmp_path, before_step):
    _, actions = before_step
    actions[STEPS] = lambda optimizer: optimizer.param_groups[0]["params"][-1].data.fill_(math.nan)
    refuse(tmp_path, own, "--lr", "finite")
    assert not list(tmp_path.glob("*.pt"))


def test_outputs_that_are_not_finite_are_refused_without_training_too(tune, own, tmp_path):
    tune(tmp_path / "tuned", *own, *NO_TRAINING)
    path = tmp_path / "tuned" / "ckpt.pt"
    checkpoint = load_checkpoint(str(path))
    checkpoint["model"]["head.1.weight"].fill_(math.inf)
    torch.save(checkpoint, path)
    argv = ["--ckpt", path, *DEVICE, "--epochs", 0, "--out", tmp_path / "out", *own]
    assert_refused(finetune.main, argv, "--lr, --ckpt: expected finite outputs")


# Runs in a folder


def test_interrupted_run_goes_on_with_the_next_job(sr_run, tune, own, tmp_path, before_step):
    """Ctrl-C in the second seed: the same command trains that one only, to the same results."""
    flags = [*own, "--seeds", 2]
    whole = tune(tmp_path / "a", *flags)
    rates, actions = before_step
    limit = len(rates) + STEPS + 30
    actions[limit] = lambda optimizer: signal.raise_signal(signal.SIGINT)
    done = run_main(finetune.main, "--ckpt", sr_run, *QUICK, "--out", tmp_path / "b", *flags)
    assert done.code == 130
    assert "Interrupted: 1 of 2 runs are finished" in done.out
    assert (tmp_path / "b" / "seed-0.pt").exists()

    assert tune(tmp_path / "b", *flags) == whole

    assert len(rates) == limit + STEPS
    assert equal_weights(tmp_path / "a", tmp_path / "b")
    log = (tmp_path / "a" / "log.jsonl").read_text()
    assert (tmp_path / "b" / "log.jsonl").read_text() == log
    assert not list((tmp_path / "b").glob("seed-*.pt"))


@pytest.mark.parametrize("num_calls", range(6))
def test_kill_while_the_best_weights_are_kept_loses_no_seed(num_calls, tmp_path, monkeypatch):
    """Law: a run of two tasks is then complete, or it has the files of all seeds."""
    (tmp_path / "results.json").touch()
    results = {}
    jobs = []
    for name in ("a", "b"):
        folder = tmp_path / name
        folder.mkdir()
        results[name] = [made_up_result(0, 0), made_up_result(1, 0, selection=1.0)]
        for seed in range(2):
            job = finetune.Job(name, seed, str(folder))
            Path(job.path).write_text(f"{name} {seed}")
            jobs.append(job)
    calls = []

    def killed(function):
        def call(*paths):
            if len(calls) == num_calls:
                raise KeyboardInterrupt
            calls.append(paths)
            function(*paths)

        return call

    monkeypatch.setattr(os, "replace", killed(os.replace))
    monkeypatch.setattr(os, "remove", killed(os.remove))
    with pytest.raises(KeyboardInterrupt):
        finetune.keep_best_weights(jobs, results)

    has_all_seeds = all(os.path.exists(job.path) for job in jobs)
    is_complete = finetune.is_complete(str(tmp_path), jobs)
    assert has_all_seeds or is_complete
    if is_complete:
        assert (tmp_path / "a" / "ckpt.pt").read_text() == "a 1"
        assert (tmp_path / "b" / "ckpt.pt").read_text() == "b 1"


def test_complete_run_prints_its_results_and_does_not_train(sr_run, own, tmp_path, before_step):
    rates, _ = before_step
    flags = [*QUICK, *own, "--epochs", 1, "--seeds", 1, "--out", tmp_path]
    first = run_main(finetune.main, "--ckpt", sr_run, *flags)
    num_steps = len(rates)
    again = run_main(finetune.main, "--ckpt", f"{sr_run}/", *flags)  # the same folder
    assert len(rates) == num_steps
    assert again.result == first.result
    assert "this run is complete" in again.out
    assert "own: accuracy of 101 rows" in again.out


def test_progress_is_written_at_once(sr_run, own, tmp_path, before_step, monkeypatch):
    """Law: when a step begins, the line of the evaluation before it has left the buffer."""
    path = tmp_path / "output"
    seen = []
    _, actions = before_step
    actions[24] = lambda optimizer: seen.append(path.read_text())
    flags = ["--ckpt", sr_run, *QUICK, *own, "--seeds", 1, "--out", str(tmp_path / "out")]
    with open(path, "w") as file:
        monkeypatch.setattr("sys.stdout", file)
        finetune.main([str(flag) for flag in [*flags, "--eval_every", 23]])
    assert "own, seed 0, step 23 of 69" in seen[0]


def test_folder_of_another_run_is_refused(tune, refuse, sr_run, own, tmp_path):
    """Of other flags, of texts or a checkpoint that changed. Results alone are worth keeping."""
    out = tmp_path / "out"
    dev = tmp_path / "dev.tsv"
    shutil.copy(own[-1], dev)
    copy = tmp_path / "copy"
    shutil.copytree(sr_run, copy)
    flags = [*own, *NO_TRAINING, "--dev", dev, "--ckpt", copy]
    tune(out, *flags)
    (out / "ckpt.pt").unlink()
    before = (out / "results.json").read_bytes()

    refuse(out, [*flags, "--batch", 9], f"--out {out}: belongs to another run", "batch was 16")
    refuse(copy, flags, "belongs to another run (it has no settings.json)")  # of pre-training
    with lock_output(str(out)):
        refuse(out, flags, f"--out {out}: in use")
    os.utime(copy / "ckpt.pt", (1, 1))
    refuse(out, flags, "another run (the checkpoint file was changed or copied)")
    shutil.copy2(sr_run / "ckpt.pt", copy)
    dev.write_text(dev.read_text() + "one more text\tup\n")
    refuse(out, flags, "another run (the texts differ)")
    assert (out / "results.json").read_bytes() == before


def test_dtype_auto_is_that_of_the_folder(tune, own, tmp_path, monkeypatch):
    monkeypatch.setattr("common.has_fast_bfloat16", lambda device: True)
    flags = [*own, *NO_TRAINING]
    tune(tmp_path, *flags)  # float32
    assert tune(tmp_path, *flags, "--dtype", "auto")["settings"]["dtype"] == "float32"


def test_two_ranks_give_the_results_of_one(tune, sr_run, own, tmp_path):
    flags = ["--ckpt", sr_run, *QUICK, *own, "--epochs", 1]
    one = tune(tmp_path / "1", *flags)
    torchrun(2, "finetune.py", *flags, "--out", tmp_path / "2")
    assert json.loads((tmp_path / "2" / "results.json").read_text()) == one
    assert one["tasks"]["own"]["seeds"] == [0, 1, 2]
    assert equal_weights(tmp_path / "1", tmp_path / "2")


# Bad input


@pytest.mark.parametrize("flags, fragment", [
    ("OWN --preset proformer", "not allowed with argument --ckpt"),  # two starts
    ("OWN --ckpt SETS", "item sets"),  # a model that reads no texts
    ("OWN --weights a", "--weights requires"),  # which would not be read
    ("OWN --task sst2 --label=", "--text requires"),  # a column that would not be read
    ("OWN --stride 5", "--stride requires --task squad"),
    ("--task sst2 --dev a", "--train requires --dev"),
    ("--task pydoc --train a --dev b", "--train: expected"),  # files that would not be read
    ("--label a", "got neither"),  # of --train and --dev
    ("OWN --text label", "--text: expected other columns"),  # the score would be perfect
    ("OWN --dev 0.001", "--dev 0.001: expected a share with rows"),
    ("OWN --dev 0.999", "--dev 0.999: expected a share that leaves rows to train on"),
    ("OWN --dev 1.5", "--dev: expected a file or a share between 0 and 1, got 1.5"),
    ("--task squad --train a --dev 0.1", "--dev: expected a file"),
    ("OWN --device tpu", "--device: expected"),
    ("OWN --data_dir a", "--data_dir: expected it or --train"),
    ("--task pydoc --sep ;", "--encoding and --sep require --train"),
    ("OWN --text a,b,c", "--text: expected one column"),  # of which the second would not be read
    ("OWN --dropout 1", "dropout"),  # what Config refuses
    ("OWN --epochs 0", "--batch requires --epochs of 1"),  # a flag without effect
    ("--task rte", "nyu-mll/glue"),  # the hub, without a network
])
def test_bad_input_is_refused_before_anything_is_written(
        flags, fragment, refuse, sets_run, own, tmp_path):
    flags = flags.replace("OWN", " ".join(own)).replace("SETS", str(sets_run))
    refuse(tmp_path / "out", flags.split(), fragment)
    assert not (tmp_path / "out").exists()


def test_scores_of_a_new_head_are_refused(sr_run, own, tmp_path):
    argv = ["--ckpt", sr_run, *DEVICE, "--epochs", 0, *own, "--out", tmp_path / "out"]
    assert_refused(finetune.main, argv, "--epochs 0 requires")
    for flags in (["--bag", 9], ["--seeds", 5], ["--select", 0.3]):
        assert_refused(finetune.main, [*argv, *flags], f"{flags[0]} requires --epochs of 1")
    assert not (tmp_path / "out").exists()


def test_damaged_settings_are_refused(refuse, own, tmp_path):
    (tmp_path / "settings.json").write_text('{"lr": 0.0')
    refuse(tmp_path, own, "settings.json: could not be read")


# Comparison

# [HF Table 1] scores: MNLI QNLI QQP RTE SST MRPC CoLA STS
BERT_MLM = "81.9 88.9 86.7 60.4 92.0 85.7 54.5 86.0"
# model | scores | [HF Table 2] retention in percent of each task, and of the average
TABLES = """
CANINE-C|77.7 87.6 82.8 62.0 85.7 81.4  2.3 83.9|94.9 98.5 95.5 102.6 93.2 95.0 4.2 97.6 88.6
ProFormer|45.2 59.1 71.4 53.9 82.1 71.2  9.7 22.1|55.2 66.5 82.4 89.2 89.2 83.1 17.8 25.7 65.2
MD 50K|79.6 88.4 86.9 66.4 88.0 86.8 57.3 86.1|97.2 99.4 100.2 109.9 95.7 101.3 105.1 100.1 100.5
MD 1K|67.9 80.5 81.0 55.8 72.9 78.4 19.0 79.0|82.9 90.6 93.4 92.4 79.2 91.5 34.9 91.9 84.0
MD Pool|75.6 84.9 84.9 59.7 86.7 82.7 45.7 82.0|92.3 95.5 97.9 98.8 94.2 96.5 83.9 95.3 94.7
MD Add|76.2 86.3 85.2 60.2 86.6 81.9 47.4 82.2|93.0 97.1 98.3 99.7 94.1 95.6 87.0 95.6 95.2
MD Proj|76.0 85.8 84.8 60.9 87.3 83.0 45.9 82.1|92.8 96.5 97.8 100.8 94.9 96.8 84.2 95.5 95.2
LSH 50K|76.1 86.5 85.5 65.5 83.6 84.2 42.7 83.7|92.9 97.3 98.6 108.4 90.9 98.2 78.3 97.3 95.6
LSH 1K|65.6 80.1 80.0 56.4 71.3 78.1  5.2 76.9|80.1 90.1 92.3 93.4 77.5 91.1 9.5 89.4 80.8
LSH Pool|78.0 87.7 86.4 65.6 88.1 84.2 55.3 85.6|95.2 98.7 99.7 108.6 95.8 98.2 101.5 99.5 99.2
LSH Add|78.6 88.2 86.0 63.1 88.0 84.0 57.7 85.9|96.0 99.2 99.2 104.5 95.7 98.0 105.9 99.9 99.2
LSH Proj|79.2 88.7 86.5 63.4 88.9 84.6 56.2 85.5|96.7 99.8 99.8 105.0 96.6 98.7 103.1 99.4 99.5
"""


def results_of(scores, parameters=30, embedding=10, **changes):
    """Return a results.json of the scores, float each, of tasks named a, b, c, …"""
    tasks = {}
    for name, score in zip("abcdefgh", scores):
        tasks[name] = dict(mean=score, metric="f1", n=7) | changes
    model = dict(parameters=parameters, embedding=embedding)
    return dict(tasks=tasks, model=model, settings=dict(bag=0, epochs=5, select=0.1))


def read_table():
    """Return dict of model -> scores, printed retentions, and the printed average of these."""
    table = {}
    for line in TABLES.strip().splitlines():
        model, scores, printed = line.split("|")
        *ratios, average = map(float, printed.split())
        table[model] = (list(map(float, scores.split())), ratios, average)
    return table


@pytest.mark.parametrize("model", read_table())
def test_retention_reproduces_table_2(model):
    """[HF §4.4 eq.4] The average is the ratio of averages: a mean of ratios is up to 3.4 off."""
    scores, ratios, average = read_table()[model]
    baseline = results_of(map(float, BERT_MLM.split()))
    compared = compare.compare(results_of(scores), baseline)
    assert list(compared["prr"].values()) == pytest.approx(ratios, abs=0.15)  # Table 1 is rounded
    assert compared["prr_average"] == pytest.approx(average, abs=0.1)


def test_erratum_retention_of_1k_rows_does_not_drop_20_percent():
    """[HF §5.2] prints "20%~26%"."""
    table = read_table()
    for kind, drop in (("MD", 16.5), ("LSH", 14.8)):
        many = table[f"{kind} 50K"][-1]
        few = table[f"{kind} 1K"][-1]
        assert many - few == pytest.approx(drop)


def test_compression_by_hand():
    """[HF §4.4 eq.6] 30 of 40 parameters and 10 of 20 are left. A score of 0 has no retention."""
    compared = compare.compare(results_of([5.0]), results_of([0.0], 40, 20))
    assert compared == dict(prr=dict(a=None), prr_average=None, pcr_all=25, pcr_emb=50)


@pytest.mark.parametrize("baseline, fragment", [
    (results_of([1.0], n=8), "a: expected equal n"),
    (results_of([1.0], metric="accuracy"), "a: expected equal metric"),
    (results_of([]), "expected a task that is in both"),
])
def test_unlike_scores_are_not_compared(baseline, fragment):
    with pytest.raises(InputError, match=fragment):
        compare.compare(results_of([1.0]), baseline)


def test_compare_reads_two_folders(tmp_path):
    (tmp_path / "results.json").write_text(json.dumps(results_of([5.0])))
    done = run_main(compare.main, tmp_path, tmp_path)
    assert "PRR average: 100.0 %" in done.out
    assert_refused(compare.main, [tmp_path, tmp_path / "missing"], "missing")


def test_compare_says_what_is_not_alike(tmp_path):
    """A hybrid, other epochs or another choice of weights are other methods, not other models."""
    for name, changes in (("a", {}), ("b", dict(bag=64, select=0))):
        results = results_of([5.0])
        results["settings"] |= changes
        (tmp_path / name).mkdir()
        (tmp_path / name / "results.json").write_text(json.dumps(results))
    done = run_main(compare.main, tmp_path / "a", tmp_path / "b")
    lines = [line for line in done.out.splitlines() if line.startswith("not alike")]
    assert lines == [
        "not alike: --bag 0 against 64",
        "not alike: --select 0.1 against 0",
    ]


def test_compare_with_an_older_run_says_that_it_had_no_such_flag(tmp_path):
    results = results_of([5.0])
    del results["settings"]["select"]
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "results.json").write_text(json.dumps(results_of([5.0])))
    (tmp_path / "results.json").write_text(json.dumps(results))
    done = run_main(compare.main, tmp_path / "new", tmp_path)
    assert "not alike: --select 0.1 against n/a" in done.out
