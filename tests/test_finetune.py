"""finetune.py and report.py: runs of tiny models, resume, refusals, submissions, comparison of results."""

import json
import math
import os
import random
import shlex
import shutil
import signal
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

import finetune
from data.corpus import read_rows
from data.tasks import TASKS, SequenceClassification
from infer import Predictor
from model import PRESETS
from report import compare, print_results
from runtime import load_checkpoint, lock_output
from tests.support import assert_refused, equal_weights, run_main, run_script, torchrun
from tests.test_squad import make_questions, nested_file
from tests.test_tasks import WORDS, write_table

QUICK = "--device cpu --dtype float32 --no-compile --epochs 3 --lr 1e-2 --batch 16".split()


def sentence(rng, *more):
    words = [*rng.sample(WORDS, rng.randint(3, 9)), *more]
    return " ".join(rng.sample(words, len(words)))


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
def steps():
    """The settings of each optimizer step so far, and a dict of what to call before which step."""
    groups, actions = [], {}

    def call(optimizer, args, kwargs):  # a hook that returns a value would replace the arguments
        if isinstance(optimizer, torch.optim.Adam):  # not the baseline's
            groups.append([optimizer.param_groups[0][key] for key in ("lr", "eps", "weight_decay", "betas")])
            actions.get(len(groups), id)(optimizer)

    handle = register_optimizer_step_pre_hook(call)
    yield groups, actions
    handle.remove()


def build_model(*flags):
    """Return the model that finetune.py would train with these flags."""
    run = finetune.build_run(finetune.parser().parse_args(list(map(str, flags))))
    return finetune.build_model(run, "own", finetune.prepare_task(run, "own"))


def test_own_file_learns_and_is_read_back(tune, own, tmp_path):
    """The score beats the baselines; --epochs 0 and infer.py give the same one."""
    results = tune(tmp_path / "a", *own, "--seeds", 2, "--limit", 390, "--eval_every", 30)
    row = results["tasks"]["own"]
    assert dict(metric="accuracy", seeds=[0, 1], n=101, n_train=390).items() <= row.items()
    assert [r["step"] for r in read_rows(str(tmp_path / "a" / "log.jsonl"))] == [30, 60, 75] * 2
    assert row["min"] > 95 > 60 > row["majority"] > 40 and row["bag_of_words"] > 95 and not row["one_class"]
    assert (row["mean"], row["std"]) == pytest.approx((np.mean(row["values"]), np.std(row["values"], ddof=1)))
    assert {*os.listdir(tmp_path / "a")} >= {*"ckpt.pt log.jsonl results.json settings.json".split()}
    flags = dict(zip(own[::2], own[1::2]))
    assert all(results["settings"][flag[2:]] == value for flag, value in flags.items())
    scored = dict(split=f"rows of {flags['--dev']}", columns=["text", "label"], rows=dict(train=390, dev=101))
    assert scored.items() <= row.items()
    again = tune(tmp_path / "b", *own, "--epochs", 0, "--ckpt", tmp_path / "a", "--baseline", tmp_path / "a")
    assert again["tasks"]["own"]["values"] == [row["max"]]
    assert again["compared"]["prr_average"] == pytest.approx(100 * row["max"] / row["mean"])
    predictor, rows = Predictor(str(tmp_path / "a")), list(read_rows(flags["--dev"]))
    right = sum(predictor.classify(r["text"])[0][0] == r["label"] for r in rows)
    assert 100 * right / len(rows) == pytest.approx(row["max"])


def test_glue_from_files_and_submissions(tune, tmp_path, monkeypatch):
    """The original layouts and columns, with digits or names as there."""
    rng, n = random.Random(9), 37
    for name, task in TASKS.items():
        monkeypatch.setattr(task, "rows", (n, n))
        columns, label = [t.split("|")[-1] for t in task.texts], task.label.split("|")[-1]
        for split in ("train", *task.dev, *[dev.replace("dev", "test") for dev in task.dev]):
            labels = [rng.randrange(len(task.labels or "12345")) for _ in range(n)]
            texts = [[sentence(rng, WORDS[i]) for _ in columns] for i in labels]
            path = tmp_path / "glue" / task.folder / f"{split}.tsv"
            labels = [task.labels[i] for i in labels] if task.submits_names else labels
            if split.startswith("test"):
                write_table(path, [["index", *columns], *([i, *row] for i, row in enumerate(texts))])
            elif name == "cola":
                write_table(path, [["gj04", i, "", *row] for i, row in zip(labels, texts)])
            else:
                write_table(path, [[*columns, label], *([*row, i] for i, row in zip(labels, texts))])
    out, flags = tmp_path / "out", "--task glue --seeds 2 --epochs 1 --predict".split()
    results = tune(out, *flags, "--data_dir", tmp_path / "glue")
    assert "mismatched_accuracy" in results["tasks"]["mnli"]["all_metrics"]
    assert list(results["tasks"]) == ["mnli", "qnli", "qqp", "rte", "sst2", "mrpc", "cola", "stsb"]
    means = np.mean([row["values"] for row in results["tasks"].values()], 0)
    assert [results["average"], results["average_std"]] == pytest.approx([means.mean(), means.std(ddof=1)])
    scored = dict(split=f"dev set, {tmp_path / 'glue'}", rows=dict(train=n, dev_matched=n, dev_mismatched=n))
    assert scored.items() <= results["tasks"]["mnli"].items()
    n_parameters = {name: row["parameters"] for name, row in results["tasks"].items()}
    assert n_parameters["sst2"] == n_parameters["rte"] + 2 * 65_536  # a bag for single texts
    files = {path.name: path.read_text().splitlines() for path in out.rglob("*.tsv")}
    assert {*files} == {f"{name}.tsv" for name in "MNLI-m MNLI-mm QNLI QQP RTE SST-2 MRPC CoLA STS-B".split()}
    index = ["index", *map(str, range(n))]
    assert all([line.split("\t")[0] for line in lines] == index for lines in files.values())
    predictor = Predictor(str(out / "sst2"))  # what is submitted is what the checkpoint predicts
    texts = [row["sentence"] for row in read_rows(str(tmp_path / "glue" / "SST-2" / "test.tsv"))]
    predicted = [predictor.classify(text)[0][0] for text in texts]
    assert [("negative", "positive")[int(line[-1])] for line in files["SST-2.tsv"][1:]] == predicted


@pytest.mark.parametrize("flags, fragment", [
    ("--task sst2 --dev a", "--train requires --dev"), ("--task sst2 --text a", "--text requires --task"),
    ("--train a.tsv", "--train --dev --text --label"), ("--task sst2 --preset proformer", "--ckpt: expected"),
    ("OWN --predict", "--predict requires"), ("OWN --text a,b,c", "--text: expected one column, or two"),
    ("OWN --stride 3", "--stride requires --task squad or squad_v2"), ("OWN --dropout 1", "--dropout"),
    ("--task sst2 --train a --dev b --data_dir c", "--data_dir"), ("OWN --pool max", "--pool"),
    ("--task pydoc --data_dir c", "--data_dir requires"), ("OWN --epochs 0", "--epochs 0 requires"),
    ("OWN --baseline no", "--baseline"), ("OWN --text title", "train.tsv: expected a column title"),
    ("OWN --ckpt no", "no checkpoint"), ("OWN --ckpt SETS", "item sets"), ("--task rte", "nyu-mll/glue"),
    ("OWN --regression", "train.tsv, row 1: expected a label (a"), (f"OWN --seed {2**64 - 1}", "--seed"),
    (f"OWN --out {__file__}", f"--out {__file__}: expected a folder")])
def test_bad_flags_are_refused(sr_run, sets_run, own, tmp_path, flags, fragment):
    flags = [part for flag in flags.split() for part in dict(OWN=own, SETS=[sets_run]).get(flag, [flag])]
    assert_refused(finetune.main, ["--ckpt", sr_run, *QUICK, "--out", tmp_path / "out", *flags], fragment)
    assert not (tmp_path / "out").exists()


def test_baseline_without_parameters_is_refused(sr_run, own, tmp_path):
    counts = dict(parameters=0, embedding=0)
    (tmp_path / "results.json").write_text(json.dumps(dict(model=counts, tasks=dict(own=dict(mean=1, n=2)))))
    assert_refused(finetune.main, ["--ckpt", sr_run, *QUICK, *own, "--baseline", tmp_path], "--baseline: expected")


def test_output_of_another_run_is_refused(sr_run, own, tune, tmp_path):
    """A folder of pre-training stays as it is; so does one of other flags, files, columns or checkpoints."""
    other, out, flags = tmp_path / "other", tmp_path / "a", [*own, *"--seeds 1 --epochs 1 --bag 0".split()]
    shutil.copytree(sr_run, other)
    trained = tune(out, *flags)["model"]
    before = (out / "results.json").read_bytes()
    (out / "ckpt.pt").unlink()  # results alone are worth keeping
    rows = [(row["text"], row["label"], "a") for row in read_rows(own[-1])]
    copy = write_table(tmp_path / "copy.tsv", [("text", "label", "title"), *rows])
    for more, name in ((["--lr", "2e-2"], "lr was 0.01 and is 0.02"), (["--seed", 7], "seed was 0"),
                       (["--dev", copy], "dev was"), (["--ckpt", other], "ckpt was"),
                       (["--out", other], f"--out {other}: belongs"),
                       (["--train", copy, "--dev", copy, "--text", "title"], "text was text and is title")):
        assert_refused(finetune.main, ["--ckpt", sr_run, *QUICK, *flags, "--out", out, *more], name)
    with lock_output(str(out)):
        assert_refused(finetune.main, ["--ckpt", sr_run, *flags, "--out", out], f"--out {out}: in use")
    assert (out / "results.json").read_bytes() == before and equal_weights(sr_run, other)
    tune(out, *flags, "--dtype", "auto")  # the dtype there is kept
    assert tune(tmp_path / "b", *own, "--epochs", 0, "--ckpt", out)["model"]["parameters"] == trained["parameters"]


def test_regression_of_pairs_is_learned(sr_run, tune, tmp_path):
    """How many words the second text has, in units of its own. Both rows of token types are trained."""
    rng, flags = random.Random(4), ["--text", "a,b", "--label", "score", "--regression", "--seeds", 1]
    for split, n in (("train", 700), ("dev", 90)):
        amounts = rng.choices(range(5), k=n)
        rows = [(sentence(rng), "more " * amount + "end", 1000 + 100 * amount) for amount in amounts]
        flags += [f"--{split}", write_table(tmp_path / f"{split}.tsv", [("a", "b", "score"), *rows])]
    checkpoint = load_checkpoint(str(sr_run))
    checkpoint["config"]["types"], types = 2, checkpoint["model"]["types.weight"].repeat(2, 1)
    torch.save(checkpoint | dict(model=checkpoint["model"] | {"types.weight": types}), tmp_path / "two.pt")
    row = tune(tmp_path / "out", *flags, "--epochs", 6, "--ckpt", tmp_path / "two.pt")["tasks"]["own"]
    after = load_checkpoint(str(tmp_path / "out"))["model"]
    assert (after["types.weight"] != types).any(1).tolist() == [True, True]
    assert row["metric"] == "spearman" and row["mean"] > 90 and row["all_metrics"]["pearson"] > 90
    assert row["majority"] is None and row["bag_of_words"] is None
    predictor = Predictor(str(tmp_path / "out"))
    [(name, few)], [(_, many)] = (predictor.classify("a b c", text) for text in ("end", "more " * 4 + "end"))
    assert name == "score" and 900 < few < 1200 < many < 1500
    other = build_model(*flags, "--ckpt", tmp_path / "out", "--text", "b,a")  # another task: with a new head
    assert not torch.equal(other.head[1].weight, after["head.1.weight"])


def test_pre_training_is_used_unless_from_scratch(sr_run, own):
    before = load_checkpoint(str(sr_run))["model"]
    tuned, fresh = (build_model("--ckpt", sr_run, *own, *more) for more in ([], ["--from_scratch"]))
    assert all(torch.equal(v, before[k]) for k, v in tuned.state_dict().items() if not k.startswith(("head.", "bag.")))
    assert tuned.config == fresh.config and tuned.config.pool == "mean" and tuned.config.labels == 2
    assert not torch.equal(fresh.state_dict()["layers.0.up.weight"], before["layers.0.up.weight"])


def test_bag_of_words_is_for_single_texts_and_learned(sr_run, tune, own, tmp_path):
    """Rows of --bag; 0 and tasks of two texts have none. A tuned checkpoint keeps its own weights and idf."""
    assert build_model("--ckpt", sr_run, *own).config.bag == finetune.RECIPES["small"]["bag"]
    assert build_model("--ckpt", sr_run, *own, "--bag", 0).config.bag == 0
    assert build_model("--ckpt", sr_run, *own, "--text", "text,text").config.bag == 0
    tune(tmp_path / "out", *own, "--bag", 99, "--epochs", 1)
    weight, idf = (load_checkpoint(str(tmp_path / "out"))["model"][f"bag.{name}"] for name in ("weight", "idf"))
    assert weight.shape == (99, 2) and (weight != 0).any(1).sum() > 5 and 1 <= idf.min() < idf.max()
    tuned = build_model("--ckpt", tmp_path / "out", *own, "--limit", 9)  # other counts, not counted again
    assert torch.equal(tuned.bag.weight, weight) and torch.equal(tuned.bag.idf, idf)
    other = build_model("--ckpt", tmp_path / "out", *own, "--bag", 98)
    assert other.bag.weight.shape == (98, 2) and not other.bag.weight.any() and other.head[1].weight.any()
    assert other.bag.idf.max() > 1
    assert build_model("--ckpt", tmp_path / "out", *own, "--bag", 0).config.bag == 0


def test_bag_reads_whole_texts(sr_run, tune, tmp_path):
    """The label is the last word, far behind the encoder's last position; infer.py reads texts as finetune.py."""
    rows = [("text", "label")] + [("x " * (99 + i % 9) + label, label) for i in range(60) for label in ("up", "down")]
    train = write_table(tmp_path / "train.tsv", rows)
    flags = "--ckpt", sr_run, "--train", train, "--dev", train, "--text", "text", "--label", "label", "--lr", 0.01
    scores = [tune(tmp_path / f"bag{bag}", *flags, "--bag", bag)["tasks"]["own"]["last"] for bag in (999, 0)]
    assert scores == [100, 50]
    p = Predictor(tmp_path / "bag999")
    assert [p.classify(text)[0][0] for text, _ in rows[1:9]] == [label for _, label in rows[1:9]]
    torch.testing.assert_close(p.embed([rows[1][0]]), p.embed([" ".join("x" * (p.config.length - 2))]))


def test_constant_prediction_is_named(tune, own, tmp_path, capsys):
    rows = [("text", "label"), *[("a b c", "up")] * 59, ("a b c", "down")]
    train = write_table(tmp_path / "train.tsv", rows)
    print_results(results := tune(tmp_path / "out", *own, "--train", train, "--seeds", 2))
    row = results["tasks"]["own"]
    assert row["one_class"] == {"0": "up", "1": "up"} and row["mean"] == row["majority"]
    out = capsys.readouterr().out
    assert out.count("always predicts 'up'") == 2 and "no better than a bag of words" in out


# [HF Table 1 | Table 2] MNLI QNLI QQP RTE SST MRPC CoLA STS; Table 2: retention in percent, and "GLUE Avg."
TABLES = """81.9 88.9 86.7 60.4 92.0 85.7 54.5 86.0 | BERT-MLM, the baseline
77.7 87.6 82.8 62.0 85.7 81.4  2.3 83.9 | 94.9 98.5  95.5 102.6 93.2  95.0   4.2  97.6  88.6 CANINE-C
45.2 59.1 71.4 53.9 82.1 71.2  9.7 22.1 | 55.2 66.5  82.4  89.2 89.2  83.1  17.8  25.7  65.2 ProFormer
79.6 88.4 86.9 66.4 88.0 86.8 57.3 86.1 | 97.2 99.4 100.2 109.9 95.7 101.3 105.1 100.1 100.5 MD Emb 50K
67.9 80.5 81.0 55.8 72.9 78.4 19.0 79.0 | 82.9 90.6  93.4  92.4 79.2  91.5  34.9  91.9  84.0 MD Emb 1K
75.6 84.9 84.9 59.7 86.7 82.7 45.7 82.0 | 92.3 95.5  97.9  98.8 94.2  96.5  83.9  95.3  94.7 MD Pool
76.2 86.3 85.2 60.2 86.6 81.9 47.4 82.2 | 93.0 97.1  98.3  99.7 94.1  95.6  87.0  95.6  95.2 MD Add
76.0 85.8 84.8 60.9 87.3 83.0 45.9 82.1 | 92.8 96.5  97.8 100.8 94.9  96.8  84.2  95.5  95.2 MD Proj
76.1 86.5 85.5 65.5 83.6 84.2 42.7 83.7 | 92.9 97.3  98.6 108.4 90.9  98.2  78.3  97.3  95.6 LSH Emb 50K
65.6 80.1 80.0 56.4 71.3 78.1  5.2 76.9 | 80.1 90.1  92.3  93.4 77.5  91.1   9.5  89.4  80.8 LSH Emb 1K
78.0 87.7 86.4 65.6 88.1 84.2 55.3 85.6 | 95.2 98.7  99.7 108.6 95.8  98.2 101.5  99.5  99.2 LSH Pool
78.6 88.2 86.0 63.1 88.0 84.0 57.7 85.9 | 96.0 99.2  99.2 104.5 95.7  98.0 105.9  99.9  99.2 LSH Add
79.2 88.7 86.5 63.4 88.9 84.6 56.2 85.5 | 96.7 99.8  99.8 105.0 96.6  98.7 103.1  99.4  99.5 LSH Proj"""


def test_retention_and_compression_reproduce_table_2():
    """[HF §4.4] eq. 4 and 6: averages within 0.1. Without a task of one model, z, another n, x, or metric, y."""
    scores, printed = zip(*(line.split(" | ") for line in TABLES.splitlines()))
    bert, *models = [dict(zip("abcdefgh", map(float, line.split()))) for line in scores]
    theirs = {name: dict(mean=score, n=7, metric="f1") for name, score in (bert | dict(x=9.0, y=9.0, z=9.0)).items()}
    theirs["x"]["n"], theirs["y"]["metric"] = 8, "accuracy"
    baseline = dict(folder="x", parameters=40, embedding=20, tasks=theirs)
    for scored, line in zip(models, printed[1:], strict=True):
        tasks = {name: dict(mean=score, n=7, metric="f1") for name, score in (scored | dict(x=5.0, y=5.0)).items()}
        compared = compare(dict(model=dict(parameters=30, embedding=10), tasks=tasks), baseline)
        *ratios, average = map(float, line.split()[:9])
        assert compared["prr_average"] == pytest.approx(average, abs=0.1)  # a mean of ratios is up to 3.4 off
        assert list(compared["prr"].values()) == pytest.approx(ratios, abs=0.15)  # Table 1 is rounded
    assert (compared["baseline"], compared["pcr_all"], compared["pcr_emb"]) == ("x", 25, 50)
    average = {model: float(last) for *_, last, model in (line.split(maxsplit=9) for line in printed[1:])}
    # erratum [HF §5.2]: the retention of Emb (1K) does not drop "20%~26%"
    assert [round(average[f"{h} Emb 50K"] - average[f"{h} Emb 1K"], 1) for h in ("MD", "LSH")] == [16.5, 14.8]
    assert compare(dict(model=baseline, tasks=tasks), baseline | dict(tasks={}))["prr_average"] is None


def test_proformer_trains_from_scratch(own, tmp_path, monkeypatch):
    monkeypatch.setitem(PRESETS, "proformer", dict(PRESETS["proformer"], width=32, heads=4, ffn=64))
    done = run_main(finetune.main, "--preset", "proformer", *QUICK, *own, "--seeds", 1, "--out", tmp_path)
    assert done.result["tasks"]["own"]["mean"] > 90 and not done.result["model"]["pretrained"]
    assert done.result["model"]["embedding"] == 420 * 32
    assert len(Predictor(str(tmp_path)).classify("zebra")) == 2


def test_two_ranks_give_the_results_of_one(sr_run, own, tmp_path):
    """On an ASCII terminal, into a folder that is not; the proposed command holds the first text to score."""
    outs, flags = [tmp_path / "é 1", tmp_path / "é 2"], ["finetune.py", "--ckpt", sr_run, *own, *QUICK]
    for ranks, out in enumerate(outs, 1):
        done = torchrun(ranks, *flags, "--epochs", 1, "--out", out, PYTHONIOENCODING="ascii")
        assert done.stdout.count("parameters: ") == done.stdout.count("Next: ") == 1
        assert shlex.split(done.stdout.split("Next: ")[1])[-1] == next(read_rows(own[-1]))["text"]
    one, two = (json.loads((out / "results.json").read_text()) for out in outs)
    assert one == two and one["tasks"]["own"]["seeds"] == [0, 1, 2] and equal_weights(*outs)

    # without torchrun, which would end the other one: a rank that does not find its file
    env = dict(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(20_000 + os.getpid() % 10_000), WORLD_SIZE="2")
    flags, env["LOCAL_RANK"] = [*flags, "--out", tmp_path / "out"], "0"
    with ThreadPoolExecutor() as pool:
        other = pool.submit(run_script, *flags, RANK="0", **env)
        done = run_script(*flags, "--dev", "missing.tsv", RANK="1", **env)
    assert done.returncode == 2 and "missing.tsv" in done.stderr and other.result().returncode


def test_recipe_reaches_the_optimizer(tune, own, tmp_path, steps):
    """[HF Table 5] Adam, eps 1e-6, no decay; 6 % of 80 steps, 4.8, to warm up, then five cosines of 15.

    The rows of the bag alone have a decay of 2, and the same learning rate."""
    groups = []
    steps[1][80] = lambda optimizer: groups.extend(
        (g["lr"], g["weight_decay"], sum(p.numel() for p in g["params"])) for g in optimizer.param_groups)
    tune(tmp_path, *own, "--batch", 25, "--epochs", 5, "--lr", 1, "--seeds", 1)  # 397 rows: 16 steps an epoch
    lrs = [lr for lr, *_ in steps[0]]
    assert lrs[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1]) and lrs[5::15] == [1] * 5 and len(lrs) == 80
    assert lrs[10::15] == pytest.approx([0.75] * 5) and lrs[15::15] == pytest.approx([0.25] * 5)
    assert all(rest == [1e-6, 0, (0.9, 0.999)] for _, *rest in steps[0])
    assert groups[1] == (groups[0][0], 2, 2 * finetune.RECIPES["small"]["bag"]) and groups[0][2] > 10_000


def test_best_weights_are_saved(tune, own, tmp_path, monkeypatch):
    """Evaluations of 50, 90 and 70: the second one's weights, and the last one's score beside it."""
    values, logits = iter([50.0, 90.0, 70.0]), []

    def evaluate(self, predict):
        logits.append(next(iter(predict(self.examples[:1])))[1])
        return dict(accuracy=next(values), macro_f1=0.0), None

    monkeypatch.setattr(SequenceClassification, "evaluate", evaluate)
    row = tune(tmp_path, *own, "--seeds", 1, "--epochs", 3, "--eval_every", 25)["tasks"]["own"]
    assert row["mean"] == 90 and row["last"] == 70
    text = next(read_rows(own[own.index("--train") + 1]))["text"]
    saved = torch.tensor([p for _, p in sorted(Predictor(str(tmp_path)).classify(text))])  # down, up
    torch.testing.assert_close(saved, logits[1].softmax(-1)[0])
    assert not torch.allclose(saved, logits[2].softmax(-1)[0])


def test_interrupted_run_resumes_with_the_next_job(sr_run, tune, own, tmp_path, steps):
    """Ctrl-C in the second seed: the same command runs that one only, to the same results and log."""
    whole, flags, limit = tune(tmp_path / "a", *own, "--seeds", 2), [*own, "--seeds", 2], 3 * 75 + 30
    steps[1][limit] = lambda optimizer: signal.raise_signal(signal.SIGINT)  # 75 steps a seed
    done = run_main(finetune.main, "--ckpt", sr_run, *QUICK, "--out", tmp_path / "b", *flags)
    assert done.code == 130 and "Interrupted" in done.err and (tmp_path / "b" / "seed-0.pt").exists()
    assert tune(tmp_path / "b", *flags) == whole and len(steps[0]) == limit + 75
    assert equal_weights(tmp_path / "a", tmp_path / "b") and not list((tmp_path / "b").glob("seed-*.pt"))
    logs = [(tmp_path / name / "log.jsonl").read_text() for name in "ab"]
    assert logs[0] == logs[1] and logs[0].count("\n") == 2 * 7


@pytest.mark.parametrize("step, value", [(1, math.nan), (75, math.inf)])  # 75: the last
def test_weights_that_are_not_finite_are_refused(sr_run, own, tmp_path, steps, step, value):
    steps[1][step] = lambda optimizer: optimizer.param_groups[0]["params"][-1].data.fill_(value)
    assert_refused(finetune.main, ["--ckpt", sr_run, *QUICK, *own, "--out", tmp_path], "--lr", "finite")
    assert not list(tmp_path.glob("*.pt")) and not (tmp_path / "results.json").exists()


def test_squad_is_learned_and_read_back(tune, tmp_path):
    """It learns where the answer stands, in windows; infer.py gives the same answers, with offsets."""
    flags = ["--task", "squad_v2", "--seeds", 1, "--predict"]
    for split, seed, n in (("train", 1, 500), ("dev", 2, 40)):
        questions = make_questions(random.Random(seed), n, 0.2)
        (tmp_path / f"{split}.json").write_text(json.dumps(nested_file(questions)))
        flags += [f"--{split}", tmp_path / f"{split}.json"]
    row = tune(tmp_path / "out", *flags)["tasks"]["squad_v2"]
    assert row["metric"] == "f1" and row["mean"] > row["majority"] + 20 and row["n_train"] == 500
    assert set(row["all_metrics"]) == {"f1", "em", "best_f1", "best_em", "threshold"}
    predictions = json.loads((tmp_path / "out" / "predictions.json").read_text())
    predictor = Predictor(str(tmp_path / "out"))
    for q in questions:
        assert predictor.answer(q["question"], q["context"], 5)[0][0] == predictions[q["id"]]
