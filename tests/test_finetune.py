"""Tests of finetune.py: runs of tiny models, resume, refusals."""

import dataclasses
import json
import math
import os
import random
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook

import finetune
import infer
from data.rows import read_rows
from data.tasks import Task
from infer import Predictor
from model import PRESETS, STEP_STRIDE, Config, Model
from support import common
from support.common import Runtime, load_checkpoint, lock_output
from support.jobs import keep_best_model
from support.pretrained import Pretrained, choose_head, load_pretrained
from support.results import Outcome, Result, print_summary, read_result
from tests.pretend_gpu import pretend_gpu
from tests.helpers import assert_refused, equal_weights, fail_first, make_words, run_main
from tests.helpers import run_ranks, split_quoted, write_table
from tests.test_squad import make_rows

DEVICE = "--device cpu --dtype float32 --no-compile".split()
QUICK = [*DEVICE, *"--epochs 3 --lr 1e-2 --batch 16".split()]
# 397 rows, of which 40 choose the weights
STEPS = 69  # of a seed with QUICK: 3 epochs of 357 rows
# lr 0: the checkpoint that a run leaves holds the weights that it started from
NO_TRAINING = "--lr 0 --epochs 1 --limit 40 --seeds 1".split()
WORDS = make_words(60, 3)


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
    return ["--train", train, "--dev", dev]


@pytest.fixture
def tune(sr_run):
    """A function that fine-tunes the tiny model and returns the results, those of results.json."""
    def run(out, *flags):
        done = run_main(finetune.main, "--ckpt", sr_run, *QUICK, "--out", out, *flags)
        assert done.code == 0, done
        assert done.result == json.loads((out / "results.json").read_text())
        return done.result

    return run


@pytest.fixture
def refuse(sr_run):
    """A function that asserts that a fine-tuning is refused with a line of these fragments."""
    def run(out, flags, *fragments):
        argv = ["--ckpt", sr_run, *QUICK, "--out", out, *flags]
        assert_refused(finetune.main, argv, *fragments)

    return run


@pytest.fixture
def before_step():
    """Record the learning rate of each step of the encoder; call actions[i](group) before it."""
    rates = []
    actions = {}

    def hook(optimizer, args, kwargs):
        [group] = optimizer.param_groups
        if len(group["params"]) > 1:  # the control has one
            rates.append(group["lr"])
            if len(rates) in actions:
                actions[len(rates)](group)

    handle = register_optimizer_step_pre_hook(hook)
    yield rates, actions
    handle.remove()


def read_weights(folder):
    return load_checkpoint(str(folder))["model"]


# Results


def test_score_beats_majority_and_is_read_back(long_control, tune, refuse, own, tmp_path):
    """Law: --epochs 0 and infer.py give the score that was saved."""
    row = tune(tmp_path / "a", *own, "--seeds", 1)["tasks"]["own"]
    assert 40 < row["majority"] < 60
    assert row["bag_of_words"] > 95
    assert row["mean"] > 95
    again = tune(tmp_path / "b", *own, "--epochs", 0, "--ckpt", tmp_path / "a")
    assert again["tasks"]["own"]["values"] == row["values"]
    pooled = [*own, "--epochs", 0, "--ckpt", tmp_path / "a", "--pool", "cls"]
    refuse(tmp_path / "c", pooled, "--pool: expected mean")
    predictor = Predictor(str(tmp_path / "a"))
    is_right = []
    for dev_row in read_rows(own[-1]):
        label, _ = predictor.classify(dev_row["text"])[0]
        is_right.append(label == dev_row["label"])
    assert 100 * np.mean(is_right) == pytest.approx(row["mean"])


def test_predictions_reproduce_the_scores(long_control, tune, own, tmp_path):
    """Law: the files of the jobs have the accuracies that are reported, and these their mean."""
    row = tune(tmp_path, *own, "--seeds", 2, "--epochs", 1)["tasks"]["own"]
    truth = [int(dev_row["label"] == "up") for dev_row in read_rows(own[-1])]

    def accuracy(outcome):
        is_right = np.array(outcome.predicted) == truth
        return 100 * is_right.mean()

    values = []
    bag_values = []
    for seed in (0, 1):
        result = read_result(tmp_path / f"own-seed-{seed}.json")
        assert result.truth == truth
        values.append(accuracy(result.model))
        bag_values.append(accuracy(result.control))
        assert result.control.log[-1]["step"] >= 300
    assert row["values"] == pytest.approx(values)
    assert row["mean"] == pytest.approx(np.mean(values))
    assert row["std"] == pytest.approx(np.std(values, ddof=1))
    assert row["bag_of_words"] == pytest.approx(np.mean(bag_values))
    assert row["over_bag"] == pytest.approx(np.mean(values) - np.mean(bag_values))


@pytest.mark.parametrize("difference, note", [
    (-20.1, ": worse than a bag of words"),
    (-1.2, ": not shown to be better than a bag of words"),
    (1.4, ": not shown to be better than a bag of words"),  # exactly two standard errors
    (1.5, ""),
])
def test_summary_says_how_a_model_compares_with_a_bag_of_words(difference, note, capsys):
    print_summary("own", dict(
        f1_per_label={}, size=dict(total=9, poep=0.5), metric="accuracy", mean=50.0, std=1.0,
        last=50.0, majority=40.0, bag_of_words=50.0, bag_of_words_std=1.0, over_bag=difference,
        over_bag_error=0.7))
    *_, last = capsys.readouterr().out.splitlines()
    assert last.endswith(f"{difference:+.2f} ± 0.70, its standard error over rows and seeds{note}")


@pytest.mark.parametrize("f1, train_rows, rows, expected", [
    (40.0, 0, 3, "warning: own: no rows to train on: rare."),  # some are right by chance
    (0.0, 0, 0, "warning: own: no rows to train on: rare."),
    (0.0, 5, 0, "warning: own: no rows to score: rare."),
    (0.0, 5, 3, "warning: own: never predicted rightly: rare."),
    (40.0, 5, 3, "own: F1 of each class: rare 40.0 (3 rows)"),
])
def test_summary_says_which_classes_have_no_rows(f1, train_rows, rows, expected, capsys):
    print_summary("own", dict(
        f1_per_label=dict(rare=f1), rows_per_label=dict(rare=rows),
        train_rows_per_label=dict(rare=train_rows), size=dict(total=9, poep=0.5),
        metric="accuracy", mean=50.0, std=None, last=50.0, majority=40.0, bag_of_words=None))
    *_, last = capsys.readouterr().out.splitlines()
    assert last.startswith(expected)


def test_glue_is_eight_tasks_and_their_average(tune, tmp_path, monkeypatch):
    """Made-up texts and scores: letters of a task's name, plus the seed."""
    rows = [(("a",), "up"), (("b",), "down")]

    def read_task(name, args):
        task = Task(["text"], ["down", "up"], ["accuracy"], name=name)
        return task, dict(train=rows, dev=rows)

    def run_job(args, runtime, pretrained, data, seed):
        name = data["train"].task.name
        (tmp_path / f"{name}-seed-{seed}.pt").write_text(str(seed))
        scores = dict(accuracy=len(name) + seed)
        outcome = Outcome(scores, scores, predicted=[], selection=-seed, log=[])
        size = dict(total=1, poep=0)
        return Result(seed, "accuracy", [], [], {}, 0, None, size, outcome, None)

    monkeypatch.setattr(finetune, "read_task", read_task)
    monkeypatch.setattr(finetune, "run_job", run_job)
    results = tune(tmp_path, "--task", "glue", "--seeds", 2)
    assert " ".join(results["tasks"]) == "mnli qnli qqp rte sst2 mrpc cola stsb"
    assert results["average"] == (3.75 + 4.75) / 2
    assert (tmp_path / "stsb.pt").read_text() == "0"  # dev rows, on which 1 is better, choose none


def test_model_that_a_scanner_holds_is_kept_a_moment_later(tmp_path, monkeypatch):
    """Windows: the models were just written."""
    results = []
    for seed in (0, 1):
        (tmp_path / f"own-seed-{seed}.pt").write_text(str(seed))
        scores = dict(accuracy=50.0)
        outcome = Outcome(scores, scores, predicted=[], selection=seed, log=[])
        results.append(Result(seed, "accuracy", [], [], {}, 0, None, {}, outcome, None))
    monkeypatch.setattr(common, "WAITS", (0,))
    for owner, name in ((os, "replace"), (Path, "unlink")):
        monkeypatch.setattr(owner, name, fail_first(getattr(owner, name), num_failures=1))
    keep_best_model(SimpleNamespace(task="own", out=str(tmp_path)), "own", results)
    assert os.listdir(tmp_path) == ["ckpt.pt"]
    assert (tmp_path / "ckpt.pt").read_text() == "1"


def test_class_without_rows_is_said_to_be_one(tune, sr_run, tmp_path):
    """Law: a class is said to be missed only where it has rows to train on and rows to score."""
    rng = random.Random(6)
    train = [("text", "label")]
    for label in ["usual", "usual", "usual", "unscored"] * 30:
        train.append((sentence(rng), label))
    train += [("zebra quagga", "rare"), ("zebra zebra", "rare")]  # none is among those of --limit
    dev = [("text", "label"), ("zebra quagga", "rare"), *[(sentence(rng), "usual")] * 20]
    files = ["--train", write_table(tmp_path / "train.tsv", train),
             "--dev", write_table(tmp_path / "dev.tsv", dev)]
    few = "--limit 8 --select 0 --epochs 1 --seeds 1".split()

    done = run_main(
        finetune.main, "--ckpt", sr_run, *QUICK, *files, *few, "--out", tmp_path / "out")

    assert "warning: own: no rows to train on: rare." in done.out
    assert "warning: own: no rows to score: unscored." in done.out
    assert "never predicted" not in done.out


# Rows that choose, rows that are scored


def test_slice_chooses_the_weights_and_dev_rows_score_them(tune, own, tmp_path, monkeypatch):
    """Law: dev rows are read at the end only, with the last weights and then the chosen ones."""
    accuracy = [50.0, 90.0, 90.0, 90.0]  # of the slice
    eval_loss = [0.1, 0.5, 0.4, 0.4]  # the lower one decides, then the earlier one
    sizes = []
    heads = []

    def evaluate(model, data):
        if isinstance(model, finetune.BagOfWords):
            return dict(accuracy=0.0, eval_loss=1.0), data.targets.tolist()
        sizes.append(data.num_rows)
        heads.append(model.head.dense.weight.clone())
        if len(sizes) <= 4:
            i = len(sizes) - 1
            return dict(accuracy=accuracy[i], eval_loss=eval_loss[i]), None
        return dict(accuracy=10.0 * len(sizes)), data.targets.tolist()

    monkeypatch.setattr(finetune, "evaluate", evaluate)
    row = tune(tmp_path, *own, "--seeds", 1, "--eval_every", 18)["tasks"]["own"]

    assert sizes == [40, 40, 40, 40, 101, 101]
    last = heads[4]
    assert torch.equal(last, heads[3])
    assert row["last"] == 50
    chosen = heads[5]
    assert torch.equal(chosen, heads[2])
    assert row["mean"] == 60
    assert torch.equal(read_weights(tmp_path)["head.dense.weight"], chosen)


def test_first_seed_is_kept_without_rows_that_choose(tune, own, tmp_path):
    """Whatever the seeds score on dev rows."""
    flags = "--select 0 --seeds 3 --epochs 1 --limit 60".split()
    tune(tmp_path, *own, *flags)
    results = [read_result(tmp_path / f"own-seed-{seed}.json") for seed in (0, 1, 2)]
    assert [result.model.selection for result in results] == [None] * 3
    scores = [result.model.scores for result in results]
    assert scores[0] not in scores[1:]
    assert load_checkpoint(str(tmp_path))["run"] == scores[0]


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
    assert results["tasks"]["own"]["f1_per_label"] == {}
    predictor = Predictor(str(tmp_path / "out"))
    [(_, few)] = predictor.classify(("a b c", "end"))
    [(_, many)] = predictor.classify(("a b c", "more more more more end"))
    assert 900 < few < 1200 < many < 1500

    # the units are those of the training, whatever rows follow
    more = ["--epochs", 0, "--ckpt", tmp_path / "out", "--limit", 5]
    tune(tmp_path / "again", *flags, *more)
    before = load_checkpoint(str(tmp_path / "out"))["task"]["scale"]
    assert load_checkpoint(str(tmp_path / "again"))["task"]["scale"] == before


def test_squad_is_learned_and_read_back(tune, tmp_path):
    """It learns where the answer stands, in windows; infer.py gives the same answers."""
    for split, seed, n in (("train", 1, 500), ("dev", 2, 40)):
        rows = make_rows(random.Random(seed), n, 0.2)
        records = []
        for (question, context), answers in rows:
            answers = [dict(text=text, answer_start=start) for text, start in answers]
            records.append(dict(question=question, context=context, answers=answers))
        (tmp_path / f"{split}-v2.0.json").write_text(json.dumps(dict(data=records)))
    flags = ["--task", "squad_v2", "--data_dir", tmp_path, "--seeds", 1]
    row = tune(tmp_path / "out", *flags)["tasks"]["squad_v2"]
    assert row["mean"] > row["majority"] + 20
    assert row["bag_of_words"] is None  # a bag of words has no place in a text
    predictor = Predictor(str(tmp_path / "out"))
    is_right = []
    for texts, answers in rows:
        truths = [text for text, _ in answers] or [""]
        answer, _ = predictor.answer(texts)
        is_right.append([answer] == truths)
    assert 100 * np.mean(is_right) == pytest.approx(row["all_metrics"]["em"])


# Start


def test_weights_of_an_older_checkpoint_have_the_names_of_today():
    """Else a model that is built with fresh weights could keep some of them."""
    path = Path(finetune.__file__).with_name("models") / "english-detect.pt"
    args = finetune.build_parser().parse_args(["--ckpt", str(path)])
    pretrained = load_pretrained(args)
    assert pretrained.weights.keys() == Model(pretrained.config).state_dict().keys()


def test_pre_trained_weights_are_used_unless_from_scratch(tune, sr_run, own, tmp_path):
    name = "layers.0.up.weight"
    before = read_weights(sr_run)[name]
    tune(tmp_path / "tuned", *own, *NO_TRAINING)
    tune(tmp_path / "fresh", *own, *NO_TRAINING, "--from_scratch")
    assert torch.equal(read_weights(tmp_path / "tuned")[name], before)
    assert not torch.equal(read_weights(tmp_path / "fresh")[name], before)


def test_from_scratch_leaves_no_trained_head(tune, own, tmp_path):
    tune(tmp_path / "tuned", *own, "--epochs", 1, "--seeds", 1)
    flags = [*own, "--epochs", 0, "--ckpt", tmp_path / "tuned"]
    finetune.main([*map(str, flags), "--out", str(tmp_path / "same")])
    assert_refused(finetune.main, [*flags, "--from_scratch"], "--epochs 0 requires --ckpt")


def test_head_is_kept_for_the_very_same_task(tune, own, tmp_path):
    tune(tmp_path / "tuned", *own, "--epochs", 1, "--seeds", 1)
    start = [*own, *NO_TRAINING, "--ckpt", tmp_path / "tuned"]
    tune(tmp_path / "same", *start)
    other = tmp_path / "other.tsv"
    other.write_text(Path(own[1]).read_text().replace("text", "body", 1))  # a column of its own
    tune(tmp_path / "other", *start, "--train", other, "--dev", other, "--text", "body")
    tuned = read_weights(tmp_path / "tuned")["head.dense.weight"]
    assert torch.equal(read_weights(tmp_path / "same")["head.dense.weight"], tuned)
    assert not torch.equal(read_weights(tmp_path / "other")["head.dense.weight"], tuned)


def test_head_whose_checkpoint_has_no_scale_leaves_the_task_its_own():
    task = Task(["text"], None, ["spearman"], scale=[3.0, 2.0])
    _, chosen = choose_head(Pretrained(Config(), trained_task=task.identity()), task)
    assert chosen.scale == [3.0, 2.0]


def test_proformer_trains_without_pre_training(own, tmp_path, monkeypatch):
    small = PRESETS["proformer"] | dict(width=32, heads=4, ffn=64)
    monkeypatch.setitem(PRESETS, "proformer", small)
    monkeypatch.setattr(finetune, "NEAR_WORDS", 2)
    rows = [("text", "label"), ("zebra жираф", "up"), ("quagga", "down")]
    dev = write_table(tmp_path / "dev.tsv", rows)
    out = tmp_path / "my run"
    done = run_main(finetune.main, "--preset", "proformer", *QUICK, *own, "--dev", dev,
                    "--seeds", 1, "--out", out)
    assert done.result["tasks"]["own"]["mean"] == 100
    assert set(Predictor(str(out)).words) == {"quagga", "zebra"}  # the most frequent
    tokenizer = Predictor(str(out)).tokenizer
    # dev rows have no part in the hash
    assert tokenizer.is_known(["zebra", "жираф"]).tolist() == [True, False]
    [(neighbor, _)] = Predictor(str(out)).neighbors("quaggas", 1)
    assert neighbor == "quagga"  # among the words of the task
    _, command = done.out.split("Next: python infer.py ")
    assert run_main(infer.main, *split_quoted(command)).code == 0


# Training


@pytest.mark.parametrize("steps, warmup, rates", [
    (12, 1 / 6, [1 / 2, 1, *[1, 1 / 2] * 5]),  # linear up, then five cosines of two steps
    (10, 0, [1, 1 / 2] * 5),  # nothing to warm up
    (4, 1, [1 / 4, 1 / 2, 3 / 4, 1]),
])
def test_learning_rate_rises_to_the_peak_and_never_above(steps, warmup, rates, monkeypatch):
    monkeypatch.setattr(finetune, "WARMUP", warmup)
    factors = [finetune.lr_factor(step, steps) for step in range(steps)]
    assert factors == pytest.approx(rates)


def test_learning_rate_is_the_peak_at_every_restart(monkeypatch):
    """Law: no rounding puts the first step of a cosine at the end of the one before, at rate 0."""
    monkeypatch.setattr(finetune, "WARMUP", 0)
    for steps in range(5, 3_000, 5):
        for restart in range(0, steps, steps // 5):
            assert finetune.lr_factor(restart, steps) == 1


def test_recipe_reaches_the_optimizer(tune, own, tmp_path, before_step):
    """[HF Table 5] 6 % of 80 steps to warm up, then five cosines of 15; Adam without decay."""
    assert finetune.lr_factor(4, 80) == finetune.lr_factor(5, 80) == 1
    groups = []
    rates, actions = before_step
    actions[80] = groups.append
    flags = "--batch 25 --epochs 5 --lr 1 --seeds 1 --select 0".split()
    row = tune(tmp_path, *own, *flags)["tasks"]["own"]
    assert rates == [finetune.lr_factor(step, 80) for step in range(80)]
    assert groups[0]["eps"] == 1e-6
    assert groups[0]["weight_decay"] == 0
    assert row["mean"] == row["last"]  # without a slice


def test_hyperplanes_are_redrawn_in_each_step_of_the_model(tune, own, tmp_path, monkeypatch):
    """Each by a seed of its own. The control has none."""
    def load_redrawn(args):
        pretrained = load_pretrained(args)
        config = dataclasses.replace(pretrained.config, lsh_redraw=True)
        return dataclasses.replace(pretrained, config=config)

    seeds = []
    monkeypatch.setattr(finetune, "load_pretrained", load_redrawn)
    monkeypatch.setattr(Model, "redraw_hyperplanes", lambda model, seed: seeds.append(seed))
    tune(tmp_path, *own, *"--seeds 2 --epochs 1".split())
    first = list(range(STEPS // 3))
    assert seeds == first + [STEP_STRIDE + step for step in first]


def test_seeds_and_epochs_differ_and_only_steps_have_dropout(tune, own, tmp_path):
    """Each seed has a head and orders of its own. A batch has all rows, so an epoch is a step."""
    steps = []

    def record(model, inputs, output):
        if isinstance(model, Model):
            assert model.training == output.requires_grad
            if model.training:
                steps.append((str(inputs[0].tolist()), model.head.dense.weight.sum().item()))

    with register_module_forward_hook(record):
        tune(tmp_path, *own, *"--seeds 2 --epochs 2 --batch 357".split())
    batches, heads = zip(*steps)
    assert len(set(batches)) == len(steps) == 4
    assert heads[0] != heads[2]


def test_training_is_in_the_dtype_and_scoring_in_float32(tune, own, tmp_path):
    """Law: the scores are those of infer.py, which works in float32."""
    modes = set()

    def record(model, inputs, output):
        if isinstance(model, Model):
            modes.add((model.training, torch.is_autocast_enabled("cpu")))

    with register_module_forward_hook(record):
        tune(tmp_path, *own, *"--seeds 1 --epochs 1 --dtype bfloat16".split())
    assert modes == {(True, True), (False, False)}


def test_control_is_trained_on_the_cpu_beside_an_mps_model(tune, own, tmp_path, monkeypatch):
    """PyTorch 2.8 lacks _embedding_bag on mps: scores would be lost after the training."""
    devices = []

    def train_and_score(model, data, recipe):
        scores = dict(accuracy=50.0)
        return Outcome(scores, scores, data["dev"].targets.tolist(), selection=0.0, log=[])

    runtime = Runtime(torch.device("mps"), "float32", False)
    monkeypatch.setattr(finetune, "resolve_device", lambda args, local_rank: runtime)
    # no mps is here
    monkeypatch.setattr(nn.Module, "to", lambda model, device: devices.append(str(device)) or model)
    monkeypatch.setattr(finetune, "train_and_score", train_and_score)
    tune(tmp_path, *own, "--seeds", 1)
    assert devices == ["mps", "cpu"]


def test_weights_that_are_not_finite_are_refused(tune, refuse, own, tmp_path, before_step):
    """The folder stays free: the same command with another rate is not taken for another run."""
    _, actions = before_step
    actions[STEPS] = lambda group: group["params"][-1].data.fill_(math.nan)
    refuse(tmp_path, own, "--lr, --ckpt: expected finite outputs")
    assert not list(tmp_path.glob("*.pt"))
    tune(tmp_path, *own, *NO_TRAINING)


def test_training_step_never_waits_for_the_gpu(sr_run, own, tmp_path):
    """Law: with one evaluation, at the end, two epochs wait as often as one."""
    waits_of_epochs = []
    for epochs in (1, 2):
        flags = f"--device cuda --epochs {epochs} --seeds 1 --eval_every 999".split()
        out = ["--out", str(tmp_path / str(epochs))]
        with pretend_gpu() as waits:
            finetune.main(["--ckpt", str(sr_run), *QUICK, *own, *flags, *out])
        waits_of_epochs.append(waits)
    assert waits_of_epochs[0] == waits_of_epochs[1]


# Runs in a folder


@pytest.fixture(scope="module")
def whole(sr_run, own, tmp_path_factory):
    """The folder of a run of two seeds that nothing interrupts, and its results."""
    out = tmp_path_factory.mktemp("whole")
    done = run_main(finetune.main, "--ckpt", sr_run, *QUICK, "--out", out, *own, "--seeds", 2)
    return out, done.result


@pytest.mark.parametrize("moment, num_steps", [
    ("step 30", 2 * STEPS),  # in the first job
    ("control", 2 * STEPS),  # of the first job, whose model was saved
    (f"step {STEPS + 30}", STEPS),  # in the second job
    ("end", 0),  # while it keeps the best weights
])
def test_interrupted_run_goes_on_with_the_next_job(
        moment, num_steps, whole, sr_run, tune, own, tmp_path, before_step, monkeypatch):
    """Law: the same command trains what is missing, to the same results and weights."""
    flags = [*own, "--seeds", 2]
    rates, actions = before_step

    def interrupt(*args):
        signal.raise_signal(signal.SIGINT)  # Ctrl-C

    with monkeypatch.context() as patch:
        if moment == "control":
            patch.setattr(finetune, "BagOfWords", interrupt)
        elif moment == "end":
            patch.setattr("support.jobs.remove", interrupt)
        else:
            actions[int(moment.removeprefix("step "))] = interrupt
        done = run_main(finetune.main, "--ckpt", sr_run, *QUICK, "--out", tmp_path, *flags)
    assert done.code == 130
    assert "The same command goes on with the seeds that have not ended." in done.err
    rates.clear()
    actions.clear()

    # device and cache may differ
    again = tune(tmp_path, *flags, "--device", "cpu:0", "--cache", tmp_path)

    folder, results = whole
    assert again["tasks"] == results["tasks"]
    assert len(rates) == num_steps
    assert equal_weights(folder, tmp_path)
    assert not list(tmp_path.glob("own-seed-*.pt"))


def test_folder_of_another_run_is_refused(tune, refuse, sr_run, own, tmp_path):
    """Other flags, texts or a checkpoint that changed, or the folder of a pre-training."""
    out = tmp_path / "out"
    dev = tmp_path / "dev.tsv"
    shutil.copy(own[-1], dev)
    copied = tmp_path / "copy"
    shutil.copytree(sr_run, copied)
    flags = [*own, *NO_TRAINING, "--dev", dev, "--ckpt", copied]
    tune(out, *flags)
    before = (out / "results.json").read_bytes()

    refuse(out, [*flags, "--batch", 9], f"--out {out}: belongs to a run", "batch was 16 and is 9")
    refuse(copied, flags, "belongs to another script")
    with lock_output(str(out)):
        refuse(out, flags, f"--out {out}: in use")
    settings = json.loads((out / "settings.json").read_text())
    (out / "settings.json").write_text(json.dumps(settings | dict(format=1)))
    refuse(out, flags, "format was 1 and is 2")  # of an older finetune.py
    (out / "settings.json").write_text(json.dumps(settings))
    checkpoint = load_checkpoint(str(copied))
    # of a run with the same settings on another device
    checkpoint["model"]["inputs.norm.weight"] += 1
    torch.save(checkpoint, copied / "ckpt.pt")
    refuse(out, flags, "checkpoint was")
    shutil.copy(sr_run / "ckpt.pt", copied)
    dev.write_text(dev.read_text() + "one more text\tup\n")
    refuse(out, flags, "train_and_dev_rows was")
    assert (out / "results.json").read_bytes() == before


def test_two_ranks_give_the_results_of_one(long_control, tune, sr_run, own, tmp_path):
    flags = ["--ckpt", sr_run, *QUICK, *own, "--epochs", 1]
    one = tune(tmp_path / "1", *flags)
    command = ["finetune.py", *flags, "--out", tmp_path / "2"]
    run_ranks(command, command)
    assert json.loads((tmp_path / "2" / "results.json").read_text())["tasks"] == one["tasks"]
    assert equal_weights(tmp_path / "1", tmp_path / "2")


# Bad input


@pytest.mark.parametrize("flags, fragment", [
    ("OWN --preset proformer", "not allowed with argument --ckpt"),  # two starts
    ("OWN --ckpt SETS", "item sets"),  # a model that reads no texts
    ("--task sst2 --label=", "--label: expected a task that reads it, got --task sst2"),
    ("--task pydoc --dev a", "--dev: expected a task that reads it, got --task pydoc"),
    ("--task glue --dev a", "--train, --dev: expected one task"),
    ("OWN --regression --balanced", "--balanced requires a task of classes"),
    ("--task glue --balanced", "--balanced requires a task of classes"),  # STS-B has numbers
    ("--task sst2 --train a --data_dir b", "--data_dir requires"),
    ("--task pydoc --data_dir b", "--data_dir: expected a task that reads it"),
    ("--task sst2 --sep ;", "--encoding, --sep and --header require"),
    ("--task sst2 --dev a --sep ;", "Without the hub"),  # they are those of --dev
    ("--label a", "--task: expected a task, or your own files"),
    ("OWN --text label", "--text: expected one or two columns other"),  # a perfect score
    ("OWN --text a,b,c", "--text: expected one or two columns"),  # the second would not be read
    ("OWN --epochs 0", "--epochs 0 requires"),  # a new head
    ("--task rte", "Without the hub, use --data_dir"),  # no network
])
def test_bad_input_is_refused_before_anything_is_written(
        flags, fragment, refuse, sets_run, own, tmp_path):
    files = dict(OWN=own, SETS=[str(sets_run)])
    words = []
    for word in flags.split():
        words += files.get(word, [word])
    refuse(tmp_path / "out", words, fragment)
    assert not (tmp_path / "out").exists()


def test_from_scratch_requires_a_checkpoint(own):
    flags = ["--preset", "proformer", "--from_scratch", *own]
    assert_refused(finetune.main, flags, "--from_scratch requires --ckpt")


@pytest.mark.parametrize("flags, out", [
    ("--ckpt runs/a", "out/a-sst2"),
    ("--ckpt runs/a/best.pt --from_scratch", "out/a-scratch-sst2"),  # every run has this file
    ("--ckpt models/words.pt", "out/words-sst2"),
    ("--preset proformer", "out/proformer-sst2"),
])
def test_default_out_is_named_after_the_start(flags, out):
    args = finetune.build_parser().parse_args(["--task", "sst2", *flags.split()])
    args = finetune.fill_flags(args, Config().width)
    assert args.out == out
