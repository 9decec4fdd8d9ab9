"""pretrain.py: runs that train, resume and load; ranks, signals, faults. Flags: test_recipes.py."""

import contextlib
import itertools
import json
import math
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.nn.modules.module import register_module_forward_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook

import infer
import pretrain
from bloom import BloomMap
from embeddings import EMBEDDINGS
from model import Config, Model
from objectives import IGNORE_INDEX, OBJECTIVES, make_batch
from support import plot
from support.common import InputError, Ranks, load_checkpoint, lock_output, num_cores
from support.log import Log
from tests.helpers import HAS_FORK, ROOT, SMALL, SMALL_SETS, assert_refused, choose_emb
from tests.helpers import equal_weights, find_port, make_words, needs_fork, needs_full_disk
from tests.helpers import read_log, run_main, run_ranks, split_quoted, torchrun

SCRIPTS = ROOT / "tests" / "scripts"
RESTARTS = dict(TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")  # for torchrun --max-restarts
TWO_STEPS = "--steps 2 --warmup 0 --eval_every 2 --save_every 2 --micro 3 --dropout 0".split()


@pytest.fixture
def other_text(tmp_path):
    """The path of a text of other words."""
    path = tmp_path / "other.txt"
    path.write_text(" ".join(make_words(60, 9) * 40))
    return path


def at_step(number, act):
    """Return a context in which the number-th step of an optimizer begins with act()."""
    steps = itertools.count(1)

    def hook(*_):
        if next(steps) == number:
            act()

    return register_optimizer_step_pre_hook(hook)


class Crash(Exception):
    pass


def crash_in_step(number, flags):
    """Train, and end as a crash would when a step begins. Step 4 is after the first checkpoint."""
    def crash():
        raise Crash

    with at_step(number, crash), pytest.raises(Crash):
        pretrain.main(flags)


# Training


def list_kinds():
    """Return (data, flags) of a run of each objective and of each code format, and of LSH."""
    kinds = [("sets", "--emb bloom"),
             ("text", "--data PAGES --split items --emb lookup --objective mlm"),
             ("text", "--data PAGES --split items --emb lookup --objective sampled"),
             ("text", "--emb bloom --split phrases --alpha 3 --vocab 400 --objective sr"),
             ("text", "--emb bloom --split phrases --alpha 3 --vocab 400 --objective hash-mlm"),
             ("text", "--emb lookup --vocab 400 --objective sr"),
             ("text", "--emb proj --objective hash-mlm"),
             ("text", "--attn lsh --lsh_bands 2 --lsh_redraw")]
    for objective in OBJECTIVES:
        emb = choose_emb(objective)
        vocab = "--vocab 400" if emb == "lookup" else ""
        kinds.append(("text", f"--emb {emb} {vocab} --objective {objective}"))
    embs = {embedding.code_format: emb for emb, embedding in EMBEDDINGS.items()}
    for code_format in sorted(embs.keys() - {"row", "digest"}):
        kinds.append(("text", f"--emb {embs[code_format]} --objective sr"))
    return kinds


@pytest.fixture(scope="module")
def kinds(text_path, pages_path, cache_dir, tmp_path_factory):
    """Train each kind for two steps; return list of flags without --out, folders, and runs."""
    folder = tmp_path_factory.mktemp("kinds")
    trained = []
    for i, (data, flags) in enumerate(list_kinds()):
        words = ["--data", text_path, *SMALL, "--length", "33"]  # for the pieces of the last line
        if data == "sets":
            words = ["--data", pages_path, *SMALL_SETS]
        words += [*flags.split(), *TWO_STEPS]
        words = [str(pages_path) if word == "PAGES" else str(word) for word in words]
        words += ["--cache", str(cache_dir)]
        out = folder / str(i)
        done = run_main(pretrain.main, *words, "--out", out)
        trained.append((words, out, done))
    return trained


def test_two_steps_of_each_kind(kinds):
    """Every kind of run trains, evaluates, saves, and names a command for infer.py."""
    for flags, out, done in kinds:
        losses = [row["loss"] for row in read_log(out) if "loss" in row]
        assert len(losses) == 1, flags  # of the last step
        assert 0 < losses[0] < 20, flags
        assert 0 < done.result["eval_loss"] < 20, flags
        assert load_checkpoint(str(out))["step"] == 2, flags
        *_, last = done.out.splitlines()
        python, script, *words = split_quoted(last.removeprefix("Next: "))
        assert [python, script] == ["python", "infer.py"]
        assert run_main(infer.main, *words, "--device", "cpu").code == 0, flags


@pytest.mark.parametrize("data, flags", [
    ("text", "--emb proj --features 999"),  # the default: S+R over LSH bits
    ("text", "--emb lookup --vocab 400 --objective mlm"),  # BPE pieces and their rows
    # draws in each step, and has unknown words: the text has 35
    ("text", "--emb lookup --vocab 20 --split regex --objective sampled --samples 9"),
    ("text", "--emb median --micro 3"),  # a sketch predicts its own hashes
    ("text", "--emb weighted --weights 13 --objective hash-mlm --rows 97"),  # two tables of codes
    ("text", "--emb bloom --split phrases --alpha 3 --vocab 400"),  # a Bloom map over text
    ("text", "--hash md5 --attn lsh --lsh_bands 2 --lsh_redraw"),  # hyperplanes of each step
    ("sets", "--coherent 1 --micro 3"),  # item sets
])
def test_run_that_crashed_and_resumed_equals_one_that_did_not(small, tmp_path, data, flags):
    flags = ["--dropout", "0.1", *flags.split()]

    result = pretrain.main(small(*flags, out="whole", data=data))
    if "--micro" in flags and HAS_FORK:
        flags += ["--workers", "2"]  # which change nothing
    crash_in_step(4, small(*flags, out="resumed", data=data))
    with open(tmp_path / "resumed" / "log.jsonl", "a") as file:
        file.write('{"step": 4, "loss": 1}\n{"ste')  # as a killed run leaves it
    resumed = pretrain.main(small(*flags, out="resumed", data=data))

    assert all(math.isfinite(value) for value in result.values())
    assert resumed == result
    assert equal_weights(tmp_path / "whole", tmp_path / "resumed")
    assert read_log(tmp_path / "whole") == read_log(tmp_path / "resumed")


def test_run_from_a_checkpoint_begins_with_its_evaluation(small, tmp_path):
    """A step at a learning rate of 0 changes nothing. The Bloom map is that of the checkpoint."""
    result = pretrain.main(small("--coherent", "1", out="start", data="sets"))
    one_step = ["--steps", "1", "--warmup", "0", "--lr", "0", "--init_from", tmp_path / "start"]
    assert pretrain.main(small("--coherent", "1", *one_step, data="sets")) == result


def test_losses_are_drawn(small, tmp_path, monkeypatch):
    monkeypatch.setattr(pretrain, "draw_losses", plot.draw_losses)
    done = run_main(pretrain.main, *small())
    path = tmp_path / "run" / "loss.png"
    assert f"Saved {path}" in done.out
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("flags, num_classes", [
    ("--emb median --buckets 31", 31),
    ("--emb lookup --objective mlm --vocab 300", 305),  # with special tokens
])
def test_loss_of_an_untrained_model_is_the_uniform_baseline(small, flags, num_classes):
    flags = small(*flags.split(), *"--steps 1 --warmup 0 --lr 0".split())
    done = run_main(pretrain.main, *flags)
    assert abs(done.result["eval_loss"] - math.log(num_classes)) < 0.15
    assert f"= ln {num_classes}," in done.out


def test_attention_learns_the_order_of_words(small):
    """A model with attention finds words out of order; one that sees a word at a time does not."""
    flags = "--steps 600 --eval_every 600 --batch 32 --lr 2e-3 --warmup 50 --width 64".split()
    attending = pretrain.main(small(*flags, "--layers", "2", out="2"))
    alone = pretrain.main(small(*flags, "--layers", "0", out="0"))
    assert attending["eval_loss"] < alone["eval_loss"] - 0.03
    assert attending["f1_random"] > alone["f1_random"] + 0.1
    assert alone["f1_shuffled"] < 0.05


def test_superbloom_learns_which_names_go_together(small):
    """A group has ten names, a set at most nine: with the group known one of eight is correct."""
    flags = "--steps 700 --eval_every 700 --lr 3e-3 --batch 32 --length 9 --layers 2 --width 64"
    result = pretrain.main(small(*flags.split(), data="sets"))
    assert result["rec@10"] > 0.6  # of 120 names; 10 at random are 0.08
    assert result["rec@1"] < 0.5  # no leak of the masked name


def test_share_of_unknown_words_is_printed(sr_run, tmp_path):
    """No n-gram is known. test_codes.py tests the share."""
    path = tmp_path / "text.txt"
    path.write_text("фильм хорошо " * 300, encoding="utf-8")
    files = ["--data", path, "--cache", tmp_path / "cache", "--out", tmp_path / "out"]
    rates = "--steps 1 --warmup 0 --batch 1 --device cpu --no-compile --length 33".split()
    done = run_main(pretrain.main, *files, *rates, "--init_from", sr_run)
    assert re.search("warning: .*: 100.0%", done.out)


def test_labels_that_are_all_equal_have_no_entropy(small, tmp_path):
    """No word of the held-out text is shuffled or random: the loss cannot be lower than zero."""
    path = tmp_path / "text.txt"
    path.write_text("a b c d e f g h i j\n" * 60)
    done = run_main(pretrain.main, *small("--data", path, "--length", "9", "--noise", "0.001"))
    assert "label frequencies 0.000" in done.out
    assert "warning: no better" not in done.out


# Steps


@pytest.mark.parametrize("flags, rates", [
    ("--steps 10 --warmup 4", [1 / 4, 2 / 4, 3 / 4, 1, 1, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6]),
    ("--steps 5 --warmup 0", [1, 4 / 5, 3 / 5, 2 / 5, 1 / 5]),
    ("--steps 5 --warmup 2 --schedule rsqrt", [0.5, 1, (2 / 3)**0.5, (2 / 4)**0.5, (2 / 5)**0.5]),
])
def test_learning_rate_follows_the_schedule(flags, rates):
    args, _ = pretrain.parse_flags([*flags.split(), "--lr", "0.002"])
    found = [pretrain.learning_rate(args, step) / 0.002 for step in range(args.steps)]
    assert found == pytest.approx(rates, rel=1e-12)


def test_step_with_nothing_to_score_has_a_divisor():
    """All its words may stay unmasked; the steps behind it are still taken."""
    ids = torch.tensor([[5, 6, 7]])
    empty = make_batch(ids, torch.full_like(ids, IGNORE_INDEX))
    full = make_batch(ids, ids)
    model = torch.nn.Linear(1, 1)
    objective = SimpleNamespace(loss=lambda model, batch: len(batch.positions) * model.bias.sum())
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    runtime = SimpleNamespace(device=torch.device("cpu"), dtype="float32")
    for batches, expected in (([empty], 1), ([empty, full], 3)):
        _, num_scored, norm = pretrain.train_step(
            model, objective, optimizer, batches, 0, Ranks(), runtime)
        assert num_scored == expected
        assert norm == len(batches) - 1  # the gradient of a mean, not of a sum of 3


def test_optimizer_has_the_rates_decay_and_betas_of_the_flags(small):
    groups = []

    def record(optimizer, *_):
        groups[:] = optimizer.param_groups

    with register_optimizer_step_pre_hook(record):
        pretrain.main(small(*"--decay 0.03 --lr 0.5 --steps 1 --warmup 0".split()))
    assert [group["weight_decay"] for group in groups] == [0.03, 0.0]  # matrices, vectors
    assert [group["lr"] for group in groups] == [0.5, 0.5]
    assert groups[0]["betas"] == (0.9, 0.999)


def test_gradients_are_clipped_to_a_norm(small, tmp_path):
    norms = []

    def record(optimizer, *_):
        gradients = []
        for group in optimizer.param_groups:
            gradients += [parameter.grad for parameter in group["params"]]
        norms.append(torch.nn.utils.get_total_norm(gradients).item())

    with register_optimizer_step_pre_hook(record):
        pretrain.main(small("--clip", "0.05", "--steps", "10"))
        pretrain.main(small("--clip", "0", "--steps", "10", out="unclipped"))
    assert 0.0499 < min(norms[:10]) and max(norms[:10]) < 0.0501
    assert min(norms[10:]) > 0.06
    assert read_log(tmp_path / "run")[-2]["grad_norm"] > 0.06  # before clipping


@pytest.mark.parametrize("is_redrawn", [False, True])
def test_hyperplanes_are_redrawn_only_by_flag(small, tmp_path, is_redrawn):
    pretrain.main(small("--attn", "lsh", *["--lsh_redraw"] * is_redrawn))
    checkpoint = load_checkpoint(str(tmp_path / "run"))
    torch.manual_seed(0)
    initial = Model(Config(**checkpoint["config"])).layers[0].attention.planes
    planes = checkpoint["model"]["layers.0.attention.planes"]
    assert torch.equal(planes, initial) == (not is_redrawn)


def test_seed_decides_the_weights_and_each_step_has_its_own_draws(small, tmp_path):
    """At a learning rate of 0 the weights are those of the start."""
    seeds = []
    with register_optimizer_step_pre_hook(lambda *_: seeds.append(torch.initial_seed())):
        for seed in ("1", "2"):
            pretrain.main(small("--seed", seed, "--lr", "0", out=seed))
    assert len(set(seeds)) == 2 * 6  # steps
    assert not equal_weights(tmp_path / "1", tmp_path / "2")


# Resuming


def test_start_removes_the_best_weights_of_another_run_but_not_those_of_init_from(
        small, tmp_path):
    """Without a ckpt.pt no flags are there to compare."""
    pretrain.main(small())
    (tmp_path / "run" / "ckpt.pt").unlink()
    best = tmp_path / "run" / "best.pt"
    assert_refused(pretrain.main, small("--init_from", best), "--out", "another folder")
    assert best.exists()
    crash_in_step(1, small())
    assert not best.exists()


def test_finished_run_started_again_changes_nothing(small, tmp_path):
    pretrain.main(small())
    before = read_log(tmp_path / "run")
    again = run_main(pretrain.main, *small())
    assert read_log(tmp_path / "run") == before
    # the last evaluation is printed once more
    assert re.search(rf"has ended.* accuracy {before[-1]['accuracy']:.3f}", again.out)


def test_resume_of_a_run_with_other_flags_or_another_text_is_refused(small, tmp_path, text_path):
    """Other flags before data is prepared."""
    pretrain.main(small())
    cache = tmp_path / "cache"
    for flags, change in [
        ("--noise 0.2", "noise was 0.1 and is 0.2"),  # weights and codes would fit
        ("--emb lookup", "split was regex and is bpe"),  # what follows from a flag
    ]:
        assert_refused(pretrain.main, small(*flags.split(), "--cache", cache), "ckpt.pt", change)
    assert not cache.exists()
    longer = tmp_path / "longer.txt"
    longer.write_text(text_path.read_text() + "\none more line\n")
    assert_refused(pretrain.main, small("--data", longer), "ckpt.pt", "corpus was")


def test_best_checkpoint_has_the_lowest_loss_and_survives_a_crash(small, tmp_path):
    flags = "--lr 0.5 --warmup 0 --eval_every 1".split()  # too high: the loss rises again
    crash_in_step(4, small(*flags))
    pretrain.main(small(*flags))

    rows = [row for row in read_log(tmp_path / "run") if "eval_loss" in row]
    lowest = min(rows, key=lambda row: row["eval_loss"])
    best = load_checkpoint(str(tmp_path / "run" / "best.pt"))
    assert best["step"] == lowest["step"] < 4  # before the crash
    assert "optimizer" not in best


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_dtype_auto_keeps_that_of_the_checkpoint(small, tmp_path, dtype):
    crash_in_step(4, small("--dtype", dtype))
    pretrain.main(small("--dtype", "auto"))
    assert load_checkpoint(str(tmp_path / "run"))["dtype"] == dtype


def test_init_from_takes_weights_words_and_sizes_to_other_data(small, tmp_path, other_text):
    pretrain.main(small(*"--emb median --attn lsh --hash_seed 3".split(), out="start"))
    nothing = "--lr 0 --steps 1 --warmup 0 --seed 1".split()  # another seed: other hyperplanes

    pretrain.main(small("--data", other_text, "--init_from", tmp_path / "start", *nothing))

    start = load_checkpoint(str(tmp_path / "start"))
    then = load_checkpoint(str(tmp_path / "run"))
    assert equal_weights(tmp_path / "start", tmp_path / "run")
    assert then["config"] == start["config"]
    assert then["tokenizer"] == start["tokenizer"]


def test_resume_of_a_continued_run_without_init_from_is_refused(small, tmp_path):
    """It would train the weights of one run on the codes of another."""
    pretrain.main(small("--hash_seed", "1", out="start"))
    crash_in_step(4, small("--init_from", tmp_path / "start", out="next"))
    assert_refused(pretrain.main, small(out="next"), "init_from was", "start at step 6 and is None")


def test_init_from_with_words_of_another_corpus_is_refused(
        mlm_run, cache_dir, tmp_path, other_text):
    files = ["--data", other_text, "--cache", cache_dir, "--out", tmp_path]
    flags = [*files, "--init_from", mlm_run, "--device", "cpu", "--steps", "1"]
    assert_refused(pretrain.main, flags, "--init_from", "pieces and words of its own corpus")


def test_run_of_an_older_version_resumes(small, tmp_path):
    """A setting that it lacks counts as its default. It has an alpha, though no Bloom map."""
    result = pretrain.main(small())
    path = tmp_path / "run" / "ckpt.pt"
    checkpoint = load_checkpoint(str(path))
    del checkpoint["run"]["coherent"]
    del checkpoint["run"]["noise"]
    checkpoint["run"]["alpha"] = 25
    torch.save(checkpoint, path)
    assert pretrain.main(small()) == result
    assert_refused(pretrain.main, small("--noise", 0.2), "noise was 0.1 and is 0.2")


def test_control_of_item_sets_is_printed_once(small):
    """The names of a group stand together; there are twelve groups of ten."""
    first = run_main(pretrain.main, *small(data="sets"))
    again = run_main(pretrain.main, *small(data="sets"))
    recalls = re.search(r"without training: popularity (\S+), .* cosines (\S+), ", first.out)
    assert float(recalls[1]) < 0.4
    assert float(recalls[2]) > 0.9
    assert "without training" not in again.out


def test_alpha_fits_few_items_unless_it_is_given(small, tmp_path):
    """Law: it is the largest that 12 items allow. Another alpha is that of another run."""
    flags = small("--vocab", 12, data="sets")
    place = flags.index("--alpha")
    del flags[place:place + 2]

    done = run_main(pretrain.main, *flags)

    alpha = load_checkpoint(str(tmp_path / "run"))["run"]["alpha"]
    assert f"alpha: {alpha} items a token, as 12 are too few for 4" in done.out
    assert infer.Predictor(str(tmp_path / "run")).readout.item_map.alpha == alpha
    with pytest.raises(ValueError):
        BloomMap(12, alpha + 1)
    pretrain.main(flags)
    pretrain.main([*flags, "--alpha", str(alpha)])  # the same run
    assert_refused(pretrain.main, [*flags, "--alpha", alpha - 1], f"alpha was {alpha} and is")
    assert_refused(pretrain.main, [*flags, "--alpha", alpha + 1], "--alpha for 12 items: alpha")


def test_resume_with_another_key_does_not_print_a_key(small, tmp_path):
    flags = "--emb pool --hash md5 --key".split()
    pretrain.main(small(*flags, "hunter2"))
    done = run_main(pretrain.main, *small(*flags, "guess"))
    assert "key differs" in done.err
    assert "hunter2" not in done.err + done.out
    assert "guess" not in done.err + done.out


def test_checkpoint_without_an_optimizer_is_refused(small, tmp_path):
    """A copy of best.pt; a checkpoint of finetune.py has none either."""
    pretrain.main(small())
    path = tmp_path / "run" / "ckpt.pt"
    shutil.copy(tmp_path / "run" / "best.pt", path)
    assert_refused(pretrain.main, small(), "ckpt.pt", "it has no state of the optimizer")


# Ranks


@pytest.mark.parametrize("ranks, flags", [
    (2, "--micro 3"),
    # two held-out windows for three ranks, and with few masked positions some rank has none
    (3, "--emb lookup --objective mlm --mask 0.004 --batch 3 --length 200"),
], ids=["sr", "idle"])
def test_ranks_compute_the_gradients_of_one(small, tmp_path, monkeypatch, ranks, flags):
    """Each rank draws a dropout of its own."""
    flags = ["--dropout", "0", *flags.split()]
    script = SCRIPTS / "save_gradients.py"
    with monkeypatch.context() as patch:
        patch.setenv("WORLD_SIZE", "1")
        patch.setenv("RANK", "0")
        save = runpy.run_path(script)["main"]
        save(tmp_path / "one-rank-", *small(*flags, out="a"))
    run_ranks(*[[script, tmp_path / "rank-", *small(*flags, out="b")]] * ranks)

    one = torch.load(tmp_path / "one-rank-0.pt")
    several = [torch.load(tmp_path / f"rank-{rank}.pt") for rank in range(ranks)]
    for rank in several:  # DDP gives every rank the mean
        torch.testing.assert_close(rank["gradients"], one["gradients"], rtol=1e-5, atol=1e-6)
    assert len({rank["seed"] for rank in several}) == ranks


def test_lost_rank_is_replaced_and_changes_nothing(small, tmp_path):
    """torchrun --max-restarts: one of two ranks is killed, and both resume from the checkpoint."""
    flags = "--dropout 0.1 --steps 45 --save_every 10 --eval_every 45 --batch 6".split()
    run_ranks(*[["pretrain.py", *small(*flags, out="whole")]] * 2)
    script = ["--max-restarts=1", SCRIPTS / "end_rank.py", "SIGKILL", "32"]
    done = torchrun(2, *script, *small(*flags, out="restarted"), **RESTARTS)
    assert "Saved" in done.stdout
    assert equal_weights(tmp_path / "whole", tmp_path / "restarted")
    assert read_log(tmp_path / "whole") == read_log(tmp_path / "restarted")


def test_two_ranks_compute_the_losses_of_one_for_each_kind(kinds, tmp_path):
    jobs = []
    for i, (flags, _, _) in enumerate(kinds):
        jobs.append([*flags, "--out", str(tmp_path / str(i))])
    path = tmp_path / "jobs.json"
    path.write_text(json.dumps(jobs))

    command = [SCRIPTS / "run_jobs.py", path]
    run_ranks(command, command)

    for i, (flags, out, _) in enumerate(kinds):
        tolerance = 0.03 if "sampled" in flags else 1e-4  # each rank draws its own samples
        one = read_log(out)
        two = read_log(tmp_path / str(i))
        for a, b in zip(one, two, strict=True):
            assert a == pytest.approx(b, rel=tolerance, abs=tolerance), flags


def test_ranks_with_different_checkpoints_are_refused(small):
    crash_in_step(4, small(out="here"))
    runs = run_ranks(*[["pretrain.py", *small(out=out)] for out in ("here", "there")], code=2)
    for run in runs:
        assert "expected a folder that all nodes see" in run.err


def test_signal_to_one_rank_stops_all_and_changes_nothing(small, tmp_path):
    """Law: they stop at the same step, and the same command ends as an unbroken run does."""
    flags = ["--dropout", "0.1"]
    run_ranks(*[["pretrain.py", *small(*flags, out="whole")]] * 2)
    flags = small(*flags, out="stopped")
    command = [SCRIPTS / "end_rank.py", "SIGTERM", "4", *flags]
    runs = run_ranks(command, command, code=128 + signal.SIGTERM)
    assert "Interrupted at step 4" in runs[0].out
    for line in runs[1].out.splitlines():  # one rank prints
        assert line.startswith("[Gloo]")  # which is PyTorch 2.8
    run_ranks(*[["pretrain.py", *flags]] * 2)
    assert equal_weights(tmp_path / "whole", tmp_path / "stopped")
    assert read_log(tmp_path / "whole") == read_log(tmp_path / "stopped")


def test_ranks_that_cannot_share_a_batch_are_refused(small, two_ranks):
    assert_refused(pretrain.main, small("--batch", "7"), "--batch", "2 ranks", "7")


# Signals and faults


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGBREAK"])
def test_signal_saves_the_run(small, tmp_path, name):
    """test_run_resumes_whatever_ended_it resumes one."""
    number = getattr(signal, name, None)
    if number is None:
        pytest.skip(f"this system has no {name}")
    handler = signal.getsignal(number)
    if handler == signal.SIG_IGN:
        pytest.skip("ignored, as nohup ignores SIGHUP")
    with at_step(5, lambda: signal.raise_signal(number)):
        done = run_main(pretrain.main, *small())
    assert signal.getsignal(number) == handler  # again
    assert done.code == 128 + number
    assert "Interrupted at step 5" in done.out
    assert load_checkpoint(str(tmp_path / "run"))["step"] == 5


@needs_full_disk
def test_log_and_picture_on_a_full_disk_are_named(tmp_path):
    log = Log("", 1, 1, None, Ranks(), None)
    log.path = Path("/dev/full")
    with pytest.raises(InputError, match="^/dev/full: could not be written"):
        log.write(1, dict(loss=1.0))
    (tmp_path / "log.jsonl").touch()
    (tmp_path / "loss.png").symlink_to("/dev/full")
    pytest.importorskip("matplotlib")
    with pytest.raises(InputError, match="loss.png: could not be written"):
        plot.draw_losses(str(tmp_path), 3, 1.0)


def start_stuck(place, *flags, **env):
    """Start scripts/stuck.py in a session of its own; it says when a worker is stuck."""
    command = [sys.executable, SCRIPTS / "stuck.py", place, *flags]
    env = os.environ | dict(OMP_NUM_THREADS="1", PYTHONPATH=str(ROOT)) | env
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    return subprocess.Popen(command, cwd=ROOT, env=env, start_new_session=True, **pipes)


def interrupt_until_they_end(*runs):
    """Send SIGINT to runs, again and again until they end, a minute at most.

    The system may take several signals for one if they come at once.
    """
    for _ in range(60):
        for run in runs:
            if run.poll() is None:
                run.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            for run in runs:
                run.wait(timeout=1)
            return
    for run in runs:
        run.kill()
    pytest.fail("a run has not ended")


@needs_fork
def test_one_ctrl_c_ends_a_run_that_is_stuck_in_preparation(small, tmp_path):
    """A terminal sends it to the workers, too. No half corpus is left."""
    cache = tmp_path / "cache"
    with start_stuck("words", *small("--cache", cache)) as run:
        num_stuck = 0
        while num_stuck < min(num_cores(), 8):  # all workers: one that starts is not ready yet
            line = run.stdout.readline()
            assert line, run.stderr.read()
            num_stuck += line.count("stuck")  # two may share a line
        os.killpg(run.pid, signal.SIGINT)
        try:
            _, error = run.communicate(timeout=60)  # its workers have these pipes, too
        finally:
            run.kill()
    assert run.returncode == 130
    # Python's own thread of the pool may complain about its killed workers after this line
    assert "pretrain.py: Interrupted." in error.splitlines()
    assert "Process-" not in error  # the workers, such as ForkProcess-1, leave it to their parent
    assert [path.suffix for path in cache.iterdir()] == [".lock"]


@needs_fork  # and the signals of Unix
@pytest.mark.parametrize("place, name", [
    ("words", "SIGTERM"),  # docker stop, which signals the run alone
    ("words", "SIGKILL"),
    ("batch", "SIGKILL"),
])
def test_run_that_is_killed_leaves_no_worker(small, tmp_path, place, name):
    """Workers that stay would hold its locks, and the same command could not resume."""
    number = getattr(signal, name)  # Windows has no SIGKILL
    with start_stuck(place, *small("--cache", tmp_path / "cache", "--workers", "1")) as run:
        while "stuck" not in run.stdout.readline():
            assert run.poll() is None, run.stderr.read()
        run.send_signal(number)
        try:
            run.communicate(timeout=60)  # until nobody has its pipes
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(run.pid, signal.SIGKILL)
    assert run.returncode == -number
    with lock_output(str(tmp_path / "run")):
        pass


@needs_fork
def test_ctrl_c_ends_ranks_of_which_one_is_stuck(small):
    flags = small("--workers", "1")
    env = dict(WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=find_port())
    runs = [start_stuck("batch", *flags, RANK=rank, LOCAL_RANK=rank, **env) for rank in "01"]
    while "stuck" not in runs[1].stdout.readline():
        pass
    interrupt_until_they_end(*runs)
    for run in runs:
        run.communicate(timeout=60)
        assert run.returncode != 0


def test_run_resumes_whatever_ended_it(small, tmp_path):
    """SIGKILL at any moment: the same final state."""
    sizes = "--dropout 0.1 --steps 40 --save_every 5 --eval_every 20".split()
    flags = small("--cache", tmp_path / "cache", *sizes)
    about = [8, tmp_path / "run", tmp_path / "cache"]
    [done] = run_ranks([SCRIPTS / "end_runs.py", *about, *flags])
    result = json.loads(done.out)
    assert result["is_same"]
    assert result["runs"] > 0
    assert result["killed"] >= 8


def test_loss_that_is_not_finite_ends_the_run_and_is_not_saved(small, tmp_path):
    """The fifth training step gives NaN: the checkpoint of step 3 stays."""
    steps = itertools.count(1)

    def poison(module, inputs, output):
        if isinstance(module, Model) and module.training and next(steps) == 5:
            return output * math.nan
        return output

    with register_module_forward_hook(poison):
        assert_refused(pretrain.main, small(), "--lr", "nan", tmp_path / "run")
    checkpoint = load_checkpoint(str(tmp_path / "run"))
    assert checkpoint["step"] == 3
    assert all(weight.isfinite().all() for weight in checkpoint["model"].values())


@needs_fork  # on Windows this is another error
def test_reader_of_the_output_that_leaves_does_not_end_a_run(small, tmp_path):
    command = [sys.executable, "pretrain.py", *small("--steps", "40")]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    with subprocess.Popen(command, cwd=ROOT, **pipes) as run:
        run.stdout.readline()
        run.stdout.close()
        error = run.stderr.read()
    assert b"Traceback" not in error
    assert load_checkpoint(str(tmp_path / "run"))["step"] == 40


def test_two_runs_in_one_folder_are_refused(small, tmp_path):
    with lock_output(str(tmp_path / "run")):
        assert_refused(pretrain.main, small(), "--out", "in use")


@pytest.mark.parametrize("flags, fragments", [
    ("--batch 9999", ["--batch", "9999"]),  # more than the text has windows
    ("--length 99999", ["--data", "99999"]),  # longer than the text
    ("--data nowhere.txt", ["nowhere.txt"]),
    ("--out /proc/no", ["/proc/no"]),  # cannot be written
    ("--width 2000000000", ["--width", "2000000000"]),
])
def test_run_that_is_impossible_is_refused_and_saves_nothing(small, tmp_path, flags, fragments):
    assert_refused(pretrain.main, small(*flags.split()), *fragments)
    assert not list(tmp_path.rglob("*.pt"))


def test_evaluation_without_a_masked_word_is_refused(small, tmp_path):
    few = tmp_path / "few.txt"
    few.write_text("a b c d e f g h i j\n" * 60)
    flags = "--emb median --length 9 --mask 0.001".split()
    assert_refused(pretrain.main, small("--data", few, *flags), "words to predict")
