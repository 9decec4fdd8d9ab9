"""finetune.py and report.py: runs of tiny models, resume, refusals, submissions, comparison of results."""

import csv
import json
import math
import os
import random
import shutil

import numpy as np
import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

import finetune
import model
from data.corpus import read_rows
from data.tasks import TASKS, SequenceClassification
from infer import Predictor
from report import build_results, compare, print_results
from runtime import load_checkpoint
from tests.support import assert_refused, equal_weights, run_main, torchrun
from tests.test_squad import make_questions, nested_file
from tests.test_tasks import WORDS, write_table

QUICK = "--device cpu --dtype float32 --no-compile --epochs 3 --lr 1e-2 --batch 16".split()


def sentence(rng, *more):
    words = rng.sample(WORDS, rng.randint(3, 9)) + list(more)
    rng.shuffle(words)
    return " ".join(words)


@pytest.fixture(scope="session")
def own(tmp_path_factory):
    """Flags of a task in files: one word tells the class, "zebra" or "quagga"."""
    folder, rng = tmp_path_factory.mktemp("own"), random.Random(5)
    flags = ["--text", "text", "--label", "label"]
    for split, n in (("train", 397), ("dev", 101)):
        names = [rng.choice(["zebra", "quagga"]) for _ in range(n)]
        rows = [(sentence(rng, name), dict(zebra="up", quagga="down")[name]) for name in names]
        flags += [f"--{split}", write_table(folder / f"{split}.tsv", [("text", "label"), *rows])]
    return flags


@pytest.fixture
def tune(sr_run):
    """A function that fine-tunes the tiny model and returns the results, which are those of results.json."""
    def run(out, *more):
        done = run_main(finetune.main, "--ckpt", sr_run, *QUICK, "--out", out, *more)
        assert done.code == 0, done
        assert done.result == json.loads((out / "results.json").read_text())
        return done.result

    return run


@pytest.fixture
def watch_steps():
    """A function that calls another one with the optimizer before each of its steps."""
    callbacks = []

    def call(optimizer, args, kwargs):  # a hook that returns a value would replace the arguments
        for callback in callbacks * isinstance(optimizer, torch.optim.AdamW):  # not the baseline's
            callback(optimizer)

    handle = register_optimizer_step_pre_hook(call)
    yield callbacks.append
    handle.remove()


def test_learning_rate_by_hand():
    """100 steps, 10 to warm up, five cosines of 18: 1 at 10, 28, 46 ..., half-way down 9 steps later."""
    assert [finetune.learning_rate(s, 100, 10) for s in (0, 4, 9)] == [0.1, 0.5, 1.0]
    for start in range(10, 100, 18):
        assert finetune.learning_rate(start, 100, 10) == 1.0
        assert finetune.learning_rate(start + 9, 100, 10) == pytest.approx(0.5)
        last = 0.5 * (1 + math.cos(math.pi * 17 / 18))
        assert finetune.learning_rate(start + 17, 100, 10) == pytest.approx(last)


def test_own_file_learns_and_is_read_back(tune, own, tmp_path):
    """The score beats the baselines; --epochs 0 and infer.py give the same one."""
    results = tune(tmp_path / "a", *own, "--seeds", 2, "--limit", 390, "--eval_every", 30)
    row = results["tasks"]["own"]
    assert row["metric"] == "accuracy" and row["seeds"] == [0, 1]
    assert row["n"] == 101 and row["n_train"] == 390
    log = map(json.loads, (tmp_path / "a" / "log.jsonl").read_text().splitlines())
    assert [line["step"] for line in log] == [30, 60, 75] * 2  # 25 steps per epoch
    assert row["min"] > 95 > 60 > row["majority"] > 40 and row["bag_of_words"] > 95 and not row["one_class"]
    assert row["mean"] == pytest.approx(np.mean(row["values"])) and row["max"] == max(row["values"])
    assert row["std"] == pytest.approx(np.std(row["values"], ddof=1))
    assert sorted(os.listdir(tmp_path / "a")) == ["ckpt.pt", "log.jsonl", "results.json", "settings.json"]
    flags = dict(zip(own[::2], own[1::2]))
    assert all(results["settings"][flag[2:]] == value for flag, value in flags.items())
    again = tune(tmp_path / "b", *own, "--epochs", 0, "--ckpt", tmp_path / "a", "--baseline", tmp_path / "a")
    assert again["tasks"]["own"]["values"] == [row["max"]]
    assert again["compared"]["prr_average"] == pytest.approx(100 * row["max"] / row["mean"])
    predictor, rows = Predictor(str(tmp_path / "a")), list(read_rows(flags["--dev"]))
    right = sum(predictor.classify(r["text"])[0][0] == r["label"] for r in rows)
    assert 100 * right / len(rows) == pytest.approx(row["max"])


def test_glue_from_files_and_submissions(tune, tmp_path, monkeypatch):
    """The original layouts and columns, with digits or names as there."""
    rng, rows = random.Random(9), 37
    for name, task in TASKS.items():
        monkeypatch.setattr(task, "rows", (rows, rows))
        columns, label = [t.split("|")[-1] for t in task.texts], task.label.split("|")[-1]
        for split in ("train", *task.dev, *[dev.replace("dev", "test") for dev in task.dev]):
            labels = [rng.randrange(len(task.labels or "12345")) for _ in range(rows)]
            texts = [[sentence(rng, WORDS[i]) for _ in columns] for i in labels]
            path = tmp_path / "glue" / task.folder / f"{split}.tsv"
            labels = [task.labels[i] for i in labels] if task.submits_names else labels
            if split.startswith("test"):
                write_table(path, [["index", *columns], *([i, *row] for i, row in enumerate(texts))])
            elif name == "cola":
                write_table(path, [["gj04", i, "", *row] for i, row in zip(labels, texts)])
            else:
                write_table(path, [[*columns, label], *([*row, i] for i, row in zip(labels, texts))])
    out = tmp_path / "out"
    flags = ["--data_dir", tmp_path / "glue", "--seeds", 2]
    results = tune(out, "--task", "glue", *flags, "--epochs", 1, "--predict")
    assert list(results["tasks"]) == ["mnli", "qnli", "qqp", "rte", "sst2", "mrpc", "cola", "stsb"]
    by_seed = np.mean([row["values"] for row in results["tasks"].values()], 0)
    assert results["average"] == pytest.approx(by_seed.mean())
    assert results["average_std"] == pytest.approx(np.std(by_seed, ddof=1))
    assert "mismatched_accuracy" in results["tasks"]["mnli"]["all_metrics"]
    files = {path.name: path.read_text().splitlines() for path in out.rglob("*.tsv")}
    names = "MNLI-m MNLI-mm QNLI QQP RTE SST-2 MRPC CoLA STS-B".split()
    assert sorted(files) == sorted(f"{name}.tsv" for name in names)
    for lines in files.values():
        assert [line.split("\t")[0] for line in lines] == ["index", *map(str, range(37))]
    predictor = Predictor(str(out / "sst2"))  # what is submitted is what the checkpoint predicts
    texts = [row["sentence"] for row in read_rows(str(tmp_path / "glue" / "SST-2" / "test.tsv"))]
    predicted = [predictor.classify(text)[0][0] for text in texts]
    digits = [int(line.split("\t")[1]) for line in files["SST-2.tsv"][1:]]
    assert [("negative", "positive")[digit] for digit in digits] == predicted


@pytest.mark.parametrize("flags, fragments", [
    (["--task", "sst2", "--dev", "a"], ["--train requires --dev"]),
    (["--task", "sst2", "--text", "a"], ["--text requires"]),
    (["--train", "a.tsv"], ["--task: expected", "--train --dev --text --label"]),
    (["--task", "sst2", "--preset", "proformer"], ["--ckpt: expected"]),
    (["OWN", "--predict"], ["--predict requires"]), (["OWN", "--text", "a,b,c"], ["--text", "a,b,c"]),
    (["OWN", "--stride", "3"], ["--stride requires --task squad or squad_v2"]),
    (["--task", "sst2", "--train", "a", "--dev", "b", "--data_dir", "c"], ["--train", "--data_dir"]),
    (["--task", "pydoc", "--data_dir", "c"], ["--data_dir requires"]),
    (["OWN", "--epochs", "0"], ["--epochs 0 requires"]), (["OWN", "--baseline", "no"], ["--baseline"]),
    (["OWN", "--text", "title"], ["train.tsv", "column title"]), (["OWN", "--ckpt", "no"], ["no checkpoint"]),
    (["OWN", "--regression"], ["train.tsv, row 1", "number"]), (["OWN", "--dropout", "1"], ["--dropout"]),
    (["--task", "rte"], ["nyu-mll/glue", "hub"]), (["OWN", "--pool", "max"], ["--pool", "max"])])
def test_bad_flags_are_refused(sr_run, own, tmp_path, flags, fragments):
    flags = [part for flag in flags for part in (own if flag == "OWN" else [flag])]
    assert_refused(finetune.main, ["--ckpt", sr_run, *QUICK, "--out", tmp_path / "out", *flags], *fragments)
    assert not (tmp_path / "out").exists()


def test_checkpoint_of_sets_is_refused(sets_run, own, tmp_path):
    assert_refused(finetune.main, ["--ckpt", sets_run, *QUICK, *own, "--out", tmp_path / "a"], "item sets")


def test_output_of_another_run_is_refused(sr_run, own, tune, tmp_path):
    """A folder of pre-training stays as it is; so does one of other flags, files or checkpoints."""
    shutil.copytree(sr_run, tmp_path / "other")
    before = {path.name: path.read_bytes() for path in (tmp_path / "other").iterdir()}
    flags = ["--ckpt", sr_run, *QUICK, *own, "--seeds", 1]
    assert_refused(finetune.main, [*flags, "--out", tmp_path / "other"], f"--out {tmp_path / 'other'}")
    assert before == {path.name: path.read_bytes() for path in (tmp_path / "other").iterdir()}
    tune(tmp_path / "a", *own, "--seeds", 1, "--epochs", 1)
    copy = shutil.copy(dict(zip(own[::2], own[1::2]))["--dev"], tmp_path / "copy.tsv")
    for more, name in ((["--lr", "2e-2"], "lr was 0.01 and is 0.02"), (["--dev", copy], "dev was"),
                       (["--ckpt", tmp_path / "other"], "ckpt was")):
        assert_refused(finetune.main, [*flags, "--epochs", 1, *more, "--out", tmp_path / "a"], name)
    tune(tmp_path / "a", *own, "--seeds", 1, "--epochs", 1, "--dtype", "auto")  # the dtype there is kept


def test_regression_of_pairs_is_learned(tune, tmp_path):
    """How many words two texts share, in units of its own; another regression starts with a new head."""
    rng, flags = random.Random(4), ["--text", "a,b", "--label", "score", "--regression", "--seeds", 1]
    for split, n in (("train", 700), ("dev", 90)):
        with open(tmp_path / f"{split}.csv", "w", newline="") as file:
            amounts = [rng.randrange(5) for _ in range(n)]
            rows = ([sentence(rng), " ".join(["more"] * n + ["end"]), 1000 + 100 * n] for n in amounts)
            csv.writer(file).writerows([["a", "b", "score"], *rows])
        flags += [f"--{split}", tmp_path / f"{split}.csv"]
    row = tune(tmp_path / "out", *flags, "--epochs", 6)["tasks"]["own"]
    assert row["metric"] == "spearman" and row["mean"] > 90 and row["all_metrics"]["pearson"] > 90
    assert row["majority"] is None and row["bag_of_words"] is None
    predictor = Predictor(str(tmp_path / "out"))
    [(name, few)], [(_, many)] = (predictor.classify("a b c", text) for text in ("end", "more " * 4 + "end"))
    assert name == "score" and 900 < few < 1200 < many < 1500
    flags += ["--ckpt", tmp_path / "out", "--out", tmp_path / "x", "--text", "b,a"]
    run = finetune.build_run(finetune.parser().parse_args(list(map(str, flags))))
    head = finetune.build_model(run, "own").head[1].weight
    assert not torch.equal(head, load_checkpoint(str(tmp_path / "out"))["model"]["head.1.weight"])


def test_pre_training_is_used_unless_from_scratch(sr_run, own, tmp_path):
    before, models = load_checkpoint(str(sr_run))["model"], []
    for more in ([], ["--from_scratch"]):
        flags = ["--ckpt", str(sr_run), *own, "--out", str(tmp_path / f"{more}"), *more]
        run = finetune.build_run(finetune.parser().parse_args(flags))
        models.append(finetune.build_model(run, "own"))
    tuned, fresh = models
    assert all(torch.equal(v, before[k]) for k, v in tuned.state_dict().items() if not k.startswith("head."))
    assert tuned.config == fresh.config and tuned.config.pool == "mean" and tuned.config.labels == 2
    assert not torch.equal(fresh.state_dict()["layers.0.up.weight"], before["layers.0.up.weight"])


def test_constant_prediction_is_named(tune, own, tmp_path, capsys):
    rows = [("a b c", "up")] * 59 + [("a b c", "down")]
    train = write_table(tmp_path / "train.tsv", [("text", "label"), *rows])
    results = tune(tmp_path / "out", *own, "--train", train, "--seeds", 2)
    row = results["tasks"]["own"]
    assert row["one_class"] == {"0": "up", "1": "up"} and row["mean"] == row["majority"]
    print_results(results)
    out = capsys.readouterr().out
    assert out.count("always predicts 'up'") == 2 and "no better than a bag of words" in out


def test_compare_by_hand():
    """[HF §4.4] eq. 4 and 6; the average is the ratio of the averages over the tasks of both."""
    rest = dict(seed=0, metric="f1", n=9, n_train=9, constant_prediction=None, baselines={},
                model=dict(parameters=30, embedding=10))
    runs = {name: [rest | dict(best=dict(f1=value), last=dict(f1=value))]
            for name, value in (("a", 60.0), ("b", 30.0), ("c", 7.0))}
    baseline = dict(folder="x", tasks=dict(a=80.0, b=40.0, d=9.0), parameters=40, embedding=20)
    results = build_results(runs, {}, baseline)
    prr = dict(prr=dict(a=75, b=75), prr_average=75)
    assert results["compared"] == dict(baseline="x", pcr_all=25, pcr_emb=50, **prr)
    assert results["average"] == pytest.approx(97 / 3) and results["average_std"] is None
    assert compare(results, baseline | dict(tasks=dict(a=30.0, b=60.0)))["prr_average"] == 100  # not 125
    assert compare(results, baseline | dict(tasks=dict(a=0.0)))["prr_average"] is None


def test_proformer_trains_from_scratch(own, tmp_path, monkeypatch):
    small = model.PRESETS["proformer"] | dict(width=32, heads=4, ffn=64)
    monkeypatch.setitem(model.PRESETS, "proformer", small)
    done = run_main(finetune.main, "--preset", "proformer", *QUICK, *own, "--seeds", 1, "--out", tmp_path)
    assert done.result["tasks"]["own"]["mean"] > 90 and not done.result["model"]["pretrained"]
    assert done.result["model"]["embedding"] == 420 * 32
    assert len(Predictor(str(tmp_path)).classify("zebra")) == 2


def test_two_ranks_give_the_results_of_one(sr_run, own, tmp_path):
    results = []
    for ranks in (1, 2):
        flags = ["--ckpt", sr_run, *own, *QUICK, "--epochs", 1, "--out", tmp_path / str(ranks)]
        done = torchrun(ranks, "finetune.py", *flags)
        assert done.stdout.count("parameters: ") == done.stdout.count("Next: ") == 1
        results.append(json.loads((tmp_path / str(ranks) / "results.json").read_text()))
    assert results[0] == results[1] and results[0]["tasks"]["own"]["seeds"] == [0, 1, 2]
    assert equal_weights(tmp_path / "1", tmp_path / "2")


def test_recipe_reaches_the_optimizer(tune, own, tmp_path, watch_steps):
    """[HF Table 5] Adam, eps 1e-6, no decay, 6 % of the steps to warm up."""
    steps = []
    watch_steps(lambda optimizer: steps.append(
        [(g["lr"], g["eps"], g["weight_decay"], g["betas"]) for g in optimizer.param_groups]))
    tune(tmp_path, *own, "--batch", 25, "--epochs", 5, "--lr", 1e-3, "--seeds", 2)
    assert len(steps) == 2 * 80  # 397 rows of 25 are 16 an epoch; 80 · 0.06 = 4.8 to warm up
    for step, groups in enumerate(steps):
        lr = 1e-3 * finetune.learning_rate(step % 80, 80, 5)
        assert groups == [(lr, 1e-6, 0.0, (0.9, 0.999))] * 2


def test_best_weights_are_saved(tune, own, tmp_path, monkeypatch):
    """Evaluations of 50, 90 and 70: the second one's weights, and the last one's score beside it."""
    values, logits = iter([50.0, 90.0, 70.0]), []

    def evaluate(self, predict):
        logits.append(next(iter(predict(self.examples[:1])))[1])
        return dict(accuracy=next(values), macro_f1=0.0), None

    monkeypatch.setattr(SequenceClassification, "evaluate", evaluate)
    row = tune(tmp_path, *own, "--seeds", 1, "--epochs", 3, "--eval_every", 25)["tasks"]["own"]
    assert row["mean"] == 90 and row["last"] == 70
    text = next(read_rows(dict(zip(own[::2], own[1::2]))["--train"]))["text"]
    saved = torch.tensor([p for _, p in sorted(Predictor(str(tmp_path)).classify(text))])  # down, up
    torch.testing.assert_close(saved, logits[1].softmax(-1)[0])
    assert not torch.allclose(saved, logits[2].softmax(-1)[0])


def test_interrupted_run_resumes_with_the_next_job(sr_run, tune, own, tmp_path, watch_steps):
    """Ctrl-C in the second seed: the same command runs that one only, to the same results."""
    whole, count, limit = tune(tmp_path / "a", *own, "--seeds", 2), [0], 75 + 10  # 75 steps a seed

    def interrupt(optimizer):
        count[0] += 1
        if count[0] == limit:
            raise KeyboardInterrupt

    watch_steps(interrupt)
    done = run_main(finetune.main, "--ckpt", sr_run, *QUICK, "--out", tmp_path / "b", *own, "--seeds", 2)
    assert done.code == 130 and "Interrupted" in done.err and (tmp_path / "b" / "seed-0.pt").exists()
    other = ["--ckpt", sr_run, *QUICK, "--out", tmp_path / "b", *own, "--batch", 13]
    assert_refused(finetune.main, other, "batch was")
    results = tune(tmp_path / "b", *own, "--seeds", 2)
    assert results == whole and count[0] == limit + 75
    assert equal_weights(tmp_path / "a", tmp_path / "b") and not list((tmp_path / "b").glob("seed-*.pt"))


def test_loss_that_is_not_finite_is_refused(sr_run, own, tmp_path, watch_steps):
    watch_steps(lambda optimizer: optimizer.param_groups[1]["params"][0].data.fill_(math.nan))
    assert_refused(finetune.main, ["--ckpt", sr_run, *QUICK, *own, "--out", tmp_path], "--lr", "nan")


def test_squad_is_learned_and_read_back(tune, tmp_path):
    """It learns where the answer stands, in windows; infer.py gives the same answers, with offsets."""
    flags = ["--task", "squad_v2", "--seeds", 1, "--predict"]
    for split, seed, n in (("train", 1, 500), ("dev", 2, 40)):
        questions = make_questions(random.Random(seed), n, 0.2)
        (tmp_path / f"{split}.json").write_text(json.dumps(nested_file(questions)))
        flags += [f"--{split}", tmp_path / f"{split}.json"]
    row = tune(tmp_path / "out", *flags)["tasks"]["squad_v2"]
    assert row["metric"] == "f1" and row["mean"] > row["majority"] + 20
    assert set(row["all_metrics"]) == {"f1", "em", "best_f1", "best_em", "threshold"}
    predictions = json.loads((tmp_path / "out" / "predictions.json").read_text())
    predictor = Predictor(str(tmp_path / "out"))
    for q in questions:
        assert predictor.answer(q["question"], q["context"], 5)[0][0] == predictions[q["id"]]
