"""pretrain.py: runs that train, resume and load again; ranks, signals and faults. Flags: test_settings.py."""

import itertools
import json
import math
import os
import shlex
import signal
import socket
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest
import torch
from torch.nn.modules.module import register_module_forward_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook

import attention
import model
import pretrain
from bloom import coherent_map
from hashing import list_words
from model import Model, load_config, load_model
from runtime import load_checkpoint, lock_output
from settings import parser, resolve
from tests.support import ROOT, SMALL, SMALL_SETS, assert_refused, equal_weights, make_words, run_main
from tests.support import run_script, torchrun
from tokenizer import FIRST_WORD_ID, HashTokenizer

LONG = "LONG" in os.environ  # end a run 100 times instead of 8
SCRIPTS = ROOT / "tests" / "scripts"
RESTARTS = dict(TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")


@pytest.fixture
def small(text_path, cache_dir, tmp_path):
    """Return a function: flags of a run of a second over text, with an --out of its own."""
    def flags(*more, out="run"):
        files = "--data", text_path, "--cache", cache_dir, "--out", tmp_path / str(out)
        return list(map(str, [*files, *SMALL, *more]))
    return flags


@pytest.fixture
def sets(pages_path, cache_dir, tmp_path):
    """Return a function: flags of a run of a second over item sets; --alpha 5, unless they name an --emb."""
    def flags(*more, out="run"):
        files = "--data", pages_path, "--cache", cache_dir, "--out", tmp_path / out
        small = " ".join(SMALL_SETS).replace("--alpha 5" if "--emb" in more else "nothing", "").split()
        return list(map(str, [*files, *small, *more]))
    return flags


def build(flags):
    args = parser("").parse_args(flags)
    start = load_checkpoint(args.init_from) if args.init_from else None
    return pretrain.build_run(args, resolve(args, 1, start), start)


def read_log(folder):
    """Return the rows of log.jsonl without the speed, which differs from run to run."""
    with open(folder / "log.jsonl") as file:
        rows = [json.loads(line) for line in file]
    return [{k: v for k, v in row.items() if k not in ("words_per_s", "ms_per_sample")} for row in rows]


def at_step(number, act):
    """Return a context in which the number-th step of an optimizer begins with act()."""
    steps = itertools.count(1)
    return register_optimizer_step_pre_hook(lambda *_: act() if next(steps) == number else None)


def train_until_step_4(flags):
    """Train until the optimizer step after the checkpoint of step 3, and end there as a crash would."""
    with at_step(4, lambda: {}["crash"]), pytest.raises(KeyError, match="crash"):
        pretrain.main(flags)


# == Every embedding, hash, way to split and objective
TEXT_VARIANTS = [
    *(f"--emb {emb} --hash {hash}" for emb in ("emb", "pool", "add", "proj") for hash in ("md5", "lsh")),
    "--emb lookup --objective mlm", "--emb lookup --objective sr", "--emb median", "--emb proj --split bpe",
    "--emb linear --split space --hash md5 --key secret", "--emb lookup --split regex --objective sampled",
    "--emb mean --hash_seed 3", "--emb weighted --weights 13", "--emb weighted --objective hash-mlm",
    "--emb proj --objective hash-mlm", "--emb median --split bpe", "--emb median --objective sr",
    "--emb bloom --split phrases --alpha 3", "--emb bloom --split phrases --alpha 3 --objective sr",
    "--attn lsh --lsh_bands 2 --lsh_redraw"]
SET_VARIANTS = ["", "--emb lookup", "--emb lookup --objective sampled", "--emb median", "--coherent 1",
                "--attn lsh", "--vocab 100"]


@pytest.mark.parametrize("kind, variant", [("text", flags) for flags in TEXT_VARIANTS]
                         + [("sets", flags) for flags in SET_VARIANTS])
def test_variant_trains_resumes_and_loads(small, sets, tmp_path, kind, variant):
    """A run that crashed and resumed equals one that did not, and its checkpoint alone gives its results."""
    make, sizes = small if kind == "text" else sets, " --rows 97" * ("emb emb" in variant)
    sizes += " --vocab 400" * (kind == "text" and any(x in variant for x in ("lookup", "bpe", "phrases")))
    sizes += " --features 999" * ("--hash lsh" in variant or "proj" in variant and "md5" not in variant)
    flags = f"{sizes} --dropout 0.1 {variant}".split()
    result = pretrain.main(make(*flags, out="whole"))
    assert all(math.isfinite(value) for value in result.values())
    train_until_step_4(make(*flags, out="resumed"))
    assert pretrain.main(make(*flags, out="resumed")) == result
    assert equal_weights(tmp_path / "whole", tmp_path / "resumed")
    assert (log := read_log(tmp_path / "whole")) == read_log(tmp_path / "resumed")
    assert [row["step"] for row in log if "eval_loss" in row] == [3, 6]
    run, checkpoint = build(make(*flags, out="whole")), load_checkpoint(str(tmp_path / "whole"))
    codes, run.model = run.model.codes, load_model(checkpoint)
    tokenizer = HashTokenizer.load(checkpoint["encoder"], run.model.config)
    words = tokenizer.words or run.corpus.words
    assert (tokenizer.hash_words(words) == codes[FIRST_WORD_ID:FIRST_WORD_ID + len(words)].numpy()).all()
    run.model.set_codes(codes)
    assert pretrain.evaluate(run) == result


def test_first_loss_is_that_of_the_uniform_baseline(small, sets):
    for flags, classes in ((small(), 3), (small("--emb", "median", "--buckets", "31", out="b"), 31),
                           (small("--emb", "lookup", "--objective", "mlm", "--vocab", "300", out="c"), 305)):
        run = build(flags)
        assert run.objective.expected_loss(np.ones(9), [1] * 9)[0] in (classes, run.config.rows)
        assert abs(pretrain.evaluate(run)["eval_loss"] - math.log(classes)) < 0.15


def test_attention_learns_the_order_of_words(small):
    """With attention the model finds words out of order; without, or without positions, it finds fewer."""
    flags = "--steps 600 --eval_every 600 --batch 32 --lr 2e-3 --warmup 50 --width 64 --layers".split()
    attending, alone = (pretrain.main(small(*flags, layers, out=layers)) for layers in "20")
    assert attending["eval_loss"] < alone["eval_loss"] - 0.03 and alone["f1_shuffled"] < 0.05
    assert attending["f1_random"] > alone["f1_random"] + 0.1
    run = build(small(*flags, 2, out="bag"))
    run.model.positions.weight.requires_grad_(False).zero_()
    with lock_output(run.args.out):  # makes the folder
        assert attending["eval_loss"] < pretrain.fit(run, [])["eval_loss"] - 0.01


def test_superbloom_learns_which_names_go_together(sets):
    """A group has ten names, a set at most nine: the group known, one of eight or more is correct."""
    flags = "--steps 700 --eval_every 700 --lr 3e-3 --batch 32 --length 9 --layers 2 --width 64"
    result = pretrain.main(sets(*flags.split()))
    assert result["rec@10"] > 0.6 and result["rec@1"] < 0.5  # of 120 names; 10 at random are 0.08


# == Steps
@pytest.mark.parametrize("flags, expected, decay", [
    ("--steps 10 --warmup 4", [1 / 4, 2 / 4, 3 / 4, 1, 1, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6], 0.03),
    ("--steps 5 --warmup 0", [1, 4 / 5, 3 / 5, 2 / 5, 1 / 5], 0.03),
    ("--steps 5 --warmup 2 --schedule rsqrt --optimizer adam", [0.5, 1, *(2 / np.array([3, 4, 5]))**0.5], 0)])
def test_schedule_and_weight_decay_follow_the_flags(small, flags, expected, decay):
    rates, groups = [], []

    def record(optimizer, *_):
        rates.append(optimizer.param_groups[0]["lr"])
        groups[:] = optimizer.param_groups

    with register_optimizer_step_pre_hook(record):
        pretrain.main(small(*flags.split(), "--lr", "0.002", *["--decay", "0.03"] * (decay > 0)))
    np.testing.assert_allclose(rates, 0.002 * np.array(expected), rtol=1e-12)
    assert [group["weight_decay"] for group in groups] == [decay, 0] and groups[0]["betas"] == (0.9, 0.999)


def test_gradients_are_clipped_and_the_log_has_losses_rates_and_metrics(small, tmp_path):
    norms = []

    def record(optimizer, *_):
        gradients = [p.grad.norm() for group in optimizer.param_groups for p in group["params"]]
        norms.append(torch.linalg.vector_norm(torch.stack(gradients)).item())

    with register_optimizer_step_pre_hook(record):
        result = pretrain.main(small("--clip", "0.05", "--steps", 10))
        pretrain.main(small("--clip", 0, "--steps", 2, out="any"))
    assert len(norms) == 12 and all(0.045 < norm < 0.0501 for norm in norms[:10]) and min(norms[10:]) > 0.06
    [row] = [row for row in map(json.loads, open(tmp_path / "run" / "log.jsonl")) if "loss" in row]
    assert row["step"] == 10 and row["grad_norm"] > 0.06  # before clipping
    assert set(row) == {"step", "loss", "lr", "grad_norm", "words_per_s", "ms_per_sample"}
    assert {k: float(f"{v:.6g}") for k, v in result.items()} | dict(step=10) == read_log(tmp_path / "run")[-1]


def test_dropout_depends_on_the_rank_and_weights_on_the_seed(small):
    run = build(small("--dropout", "0.5", "--lr", "0"))
    batches, num_scored = pretrain.get_micro_batches(run, 0), torch.tensor(8.0 * 16)
    assert pretrain.evaluate(run) == pretrain.evaluate(run)

    def loss(rank):
        run.rank, run.step = rank, 0
        return pretrain.take_step(run, batches, num_scored)[0]["loss"]

    assert loss(0) == loss(0) != loss(1)
    weights = [build(small("--seed", seed, out=seed)).model.types.weight for seed in "112"]
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])


def test_random_words_of_a_lookup_occur_in_the_corpus(small):
    """A vocabulary of pieces has some that a corpus never uses."""
    run = build(small("--emb", "lookup", "--vocab", "400"))
    ids = set(np.unique(run.corpus.ids).tolist()) - set(range(FIRST_WORD_ID))
    assert set(run.batches.words.tolist()) == ids and len(ids) < len(run.tokenizer.words)
    inputs, labels = pretrain.get_micro_batches(run, 0)[0]
    assert (labels == 2).any() and set(inputs[labels == 2].tolist()) <= ids


def test_coherent_maps_are_built_from_training_pages_only(sets):
    run = build(sets("--coherent", 2, "--hash_seed", 77))
    corpus, (train, held_out) = run.corpus, run.corpus.split_pages()
    assert len(train) == 360 and len(held_out) == 40

    def members(pages):
        pages = [corpus.ids[corpus.offsets[i]:corpus.offsets[i + 1] - 1].astype(np.int64) for i in pages]
        items, sizes = np.concatenate(pages) - FIRST_WORD_ID, np.array(list(map(len, pages)))
        return coherent_map(items, sizes, 120, 5, 2, 2, seed=77).members

    assert (run.tokenizer.bloom_map.members == members(train)).all()
    assert (run.tokenizer.bloom_map.members != members(np.concatenate([train, held_out]))).any()


def test_hyperplanes_are_resampled_only_by_flag(small, tmp_path):
    for name in ("fixed", "resampled"):
        pretrain.main(small("--attn", "lsh", "--lsh_bands", "2", *["--lsh_redraw"] * (name != "fixed"), out=name))
    fixed, resampled = (load_checkpoint(str(tmp_path / name)) for name in ("fixed", "resampled"))
    torch.manual_seed(0)
    initial = Model(load_config(fixed)).layers[0].attention.planes
    assert [torch.equal(c["model"]["layers.0.attention.planes"], initial) for c in (fixed, resampled)] == [True, False]


# == Resuming
def test_resume_trims_the_log_and_restores_the_optimizer(small, tmp_path):
    pretrain.main(small("--dropout", "0.1", out="whole"))
    train_until_step_4(small("--dropout", "0.1", out="resumed"))
    with open(tmp_path / "resumed" / "log.jsonl", "a") as file:
        file.write('{"step": 5, "loss": 1}\n[1]\n{"ste')  # as a killed run leaves it
    for _ in range(2):  # the second time it is finished, and nothing changes
        pretrain.main(small("--dropout", "0.1", out="resumed"))
        a, b = (load_checkpoint(str(tmp_path / name))["optimizer"]["state"] for name in ("whole", "resumed"))
        assert a and all(torch.equal(a[i][name], b[i][name]) for i in a for name in a[i])
        assert read_log(tmp_path / "whole") == read_log(tmp_path / "resumed")


def test_measure_collisions_of_one_bucket_are_all_pairs(small):
    for buckets, is_expected in ((1, lambda share: share == 1), (256, lambda share: 0.001 < share < 0.9)):
        run = build(small("--attn", "lsh", "--lsh_buckets", buckets))
        for share in pretrain.measure_collisions(run.model, run.batches.get_batch(0, slice(4))[0]):
            assert is_expected(share)


def test_summary_of_lsh_attention_fits_a_terminal(small, capsys):
    pretrain.main(small("--attn", "lsh", "--layers", 7))
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("attention: lsh")]
    assert lines and max(map(len, lines)) <= 80


def test_resume_refuses_another_run(small, tmp_path, text_path):
    """Everything that makes the run itself has to agree, the content of the corpus too; errors name it."""
    pretrain.main(small())
    longer = tmp_path / "longer.txt"
    longer.write_text(text_path.read_text() + "\none more line\n")
    changes = dict(seed=1, hash_seed=1, lr=0.5, decay=0.1, steps=7, warmup=1, width=64, batch=4, clip=2, types=2)
    for flag, value in changes.items():
        assert_refused(pretrain.main, small(f"--{flag}", value), "ckpt.pt", f"{flag} was", f" is {value}")
    assert_refused(pretrain.main, small("--data", longer), "ckpt.pt", "got another: --data was another text")
    assert_refused(pretrain.main, small("--emb", "lookup"), "ckpt.pt", "split was regex and is bpe", "; ...")
    counts = Counter(list_words(text_path.read_text()))
    assert load_checkpoint(str(tmp_path / "run"))["words"][0] == counts.most_common(1)[0][0]


def test_best_checkpoint_has_the_lowest_loss_and_survives_a_crash(small, tmp_path):
    flags = "--lr 0.3 --warmup 0 --eval_every 1".split()  # too high: the loss rises again
    pretrain.main(small(*flags, out="whole"))
    train_until_step_4(small(*flags, out="resumed"))
    pretrain.main(small(*flags, out="resumed"))
    losses = {row["step"]: row["eval_loss"] for row in read_log(tmp_path / "whole") if "eval_loss" in row}
    best, other = (load_checkpoint(str(tmp_path / name / "best.pt")) for name in ("whole", "resumed"))
    assert best["step"] == other["step"] == min(losses, key=losses.get) < 6 and "optimizer" not in best
    assert load_checkpoint(str(tmp_path / "whole"))["best"] == pytest.approx(min(losses.values()), 1e-5)
    assert equal_weights(tmp_path / "whole" / "best.pt", tmp_path / "resumed" / "best.pt")


def test_dtype_auto_keeps_that_of_the_checkpoint(small, tmp_path):
    for saved, other in (("bfloat16", "float32"), ("float32", "bfloat16")):
        train_until_step_4(small("--dtype", saved, out=saved))
        run = build(small("--dtype", "auto", out=saved))
        assert run.dtype == saved and build(small("--dtype", other, out=saved)).dtype == other
        assert math.isfinite(pretrain.fit(run, [])["eval_loss"])
        assert load_checkpoint(str(tmp_path / saved))["dtype"] == saved


@pytest.mark.parametrize("flags", ["--hash md5 --bits 64 --dropout 0.1", "--emb median --attn lsh --hash_seed 3"])
def test_init_from_starts_with_the_weights_on_other_data(small, tmp_path, flags):
    """Words, sizes, hash and its seed come from the checkpoint."""
    pretrain.main(small(*flags.split(), out="start"))
    start, other = load_checkpoint(str(tmp_path / "start")), tmp_path / "other.txt"
    other.write_text(" ".join(make_words(60, 9) * 40))
    begin = small("--data", other, "--init_from", tmp_path / "start", "--batch", 5, out="next")
    run = build(begin)
    assert run.step == 0 and not run.optimizer.state and run.config.attn == start["config"]["attn"]
    assert all(torch.equal(weight, start["model"][name]) for name, weight in run.model.state_dict().items())
    codes = HashTokenizer.load(start["encoder"], run.config).hash_words(run.corpus.words)
    assert (codes == run.model.codes[FIRST_WORD_ID:].numpy()).all()
    train_until_step_4(begin)
    assert math.isfinite(pretrain.main(begin)["eval_loss"]) and read_log(tmp_path / "next")[-1]["step"] == 6
    assert_refused(pretrain.main, small("--data", other, "--batch", 5, *flags.split(), out="next"),
                   "init_from was", "start at step 6 and is None")


def test_init_from_takes_sizes_words_and_recipe_from_the_checkpoint(sets, tmp_path):
    pretrain.main(sets("--width", 48, "--coherent", 1, out="start"))
    flags = *sets(out="next")[:6], "--init_from", str(tmp_path / "start"), "--steps", "12", "--device", "cpu"
    run, start = build(flags), load_checkpoint(str(tmp_path / "start"))
    assert run.config == load_config(start) and run.config.width == 48
    assert (run.args.preset, run.args.alpha, run.args.mask) == ("superbloom-small", 5, 0.40)
    bloom_map = HashTokenizer.load(start["encoder"], run.config).bloom_map
    assert (run.tokenizer.bloom_map.digest == bloom_map.digest).all()


# == Ranks
@pytest.mark.parametrize("ranks, flags", [
    (2, "--micro 3"), (2, "--micro 3 --attn lsh --lsh_bands 2"),
    # two held-out windows for three ranks, and with few masked positions some rank has none
    (3, "--emb lookup --objective mlm --mask 0.004 --batch 3 --length 200")], ids=["sr", "lsh", "idle"])
def test_ranks_compute_the_loss_and_gradients_of_one(small, tmp_path, ranks, flags):
    flags, script = ["--dropout", "0", *flags.split()], SCRIPTS / "save_gradients.py"
    run_script(script, tmp_path / "1.pt", *small(*flags, out="a"), check=True)
    torchrun(ranks, script, tmp_path / "n.pt", *small(*flags, out="b"))
    one, several = (torch.load(tmp_path / name) for name in ("1.pt", "n.pt"))
    assert "mlm" not in flags or several["num_idle"] >= 1 and one["loss"] > 0
    one["num_idle"] = several["num_idle"]
    torch.testing.assert_close(one, several, rtol=1e-5, atol=1e-6)


def test_lost_rank_is_replaced_and_changes_nothing(small, tmp_path):
    """torchrun --max-restarts: one of three ranks is killed, and all resume from the checkpoint."""
    flags = "--dropout 0.1 --steps 45 --save_every 10 --eval_every 45 --batch 6".split()
    torchrun(3, "pretrain.py", *small(*flags, out="whole"), **RESTARTS)
    script = "--max-restarts=1", SCRIPTS / "end_rank.py", "SIGKILL", "32"
    done = torchrun(3, *script, *small(*flags, out="restarted"), **RESTARTS)
    assert "Saved" in done.stdout and equal_weights(tmp_path / "whole", tmp_path / "restarted")
    assert read_log(tmp_path / "whole") == read_log(tmp_path / "restarted")


def run_two(*commands, **env):
    """Run two commands of python at the same time; return their exit codes and (out, err)."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    env = os.environ | RESTARTS | dict(OMP_NUM_THREADS="1", PYTHONPATH=str(ROOT), MASTER_PORT=port) | env
    options = dict(cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    commands = [[sys.executable, *(str(word).replace("PORT", port) for word in command)] for command in commands]
    ranks = [env | dict(RANK=str(rank)) if "WORLD_SIZE" in env else env for rank in range(2)]
    runs = [subprocess.Popen(command, env=env, **options) for env, command in zip(ranks, commands)]
    output = [run.communicate(timeout=200) for run in runs]
    return [run.returncode for run in runs], output


RANKS = dict(WORLD_SIZE="2", MASTER_ADDR="127.0.0.1")  # two ranks without torchrun: they start sooner


def test_run_of_one_rank_resumes_on_two_nodes(small, tmp_path):
    """Two torchrun agents: one rank prints and writes the log, and each held-out window is evaluated once."""
    pretrain.main(small("--steps", 10, out="whole"))
    train_until_step_4(small("--steps", 10, out="resumed"))
    flags = "--nnodes=2 --nproc_per_node=1 --rdzv_backend=c10d --rdzv_endpoint=127.0.0.1:PORT".split()
    flags += "pretrain.py", *small("--steps", 10, "--cache", tmp_path / "cache", out="resumed")
    node = ["-m", "torch.distributed.run", *flags]
    codes, output = run_two(node, node)
    silent, talking = sorted((out for out, _ in output), key=len)
    assert codes == [0, 0] and "Saved" in talking and not silent, output
    a, b = (load_checkpoint(str(tmp_path / name))["model"] for name in ("whole", "resumed"))
    torch.testing.assert_close(b, a, rtol=0, atol=2e-5)  # the first steps of Adam are signs: rounding shows
    for a, b in zip(*(read_log(tmp_path / name) for name in ("whole", "resumed")), strict=True):
        assert a == pytest.approx(b, rel=1e-3)


def test_ranks_with_different_checkpoints_are_refused(small):
    train_until_step_4(small(out="here"))
    codes, output = run_two(*(["pretrain.py", *small(out=out)] for out in ("here", "there")), **RANKS)
    assert codes == [2, 2], output
    assert all("expected a folder that all nodes see" in error for _, error in output)
    codes, output = run_two(*(["pretrain.py", *small("--hash_seed", seed, out=seed)] for seed in (1, 2)), **RANKS)
    assert codes == [2, 2] and all("differ in steps, data" in " ".join(error.split()) for _, error in output), output


def test_signal_to_one_rank_stops_all_at_the_same_step(small, tmp_path):
    command = [SCRIPTS / "end_rank.py", "SIGTERM", "4", *small("--steps", "9999", "--save_every", "9999")]
    codes, output = run_two(command, command, **RANKS)
    assert codes == [128 + signal.SIGTERM] * 2 and "Interrupted at step 4" in output[0][0], output
    assert load_checkpoint(str(tmp_path / "run"))["step"] == 4


# == Signals and faults
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_saves_and_the_same_command_resumes(small, tmp_path, number):
    flags = "--dropout", "0.1"
    pretrain.main(small(*flags, out="whole"))
    with at_step(5, lambda: signal.raise_signal(number)):
        done = run_main(pretrain.main, *small(*flags, out="resumed"))
    assert done.code == 128 + number and "Interrupted at step 5" in done.out
    assert load_checkpoint(str(tmp_path / "resumed"))["step"] == 5
    pretrain.main(small(*flags, out="resumed"))
    assert equal_weights(tmp_path / "whole", tmp_path / "resumed")


def test_run_resumes_whatever_ended_it(small, tmp_path):
    """SIGKILL, SIGTERM, a full disk, a half-written file: the same final state."""
    sizes = "--dropout 0.1 --steps 40 --save_every 5 --eval_every 20".split()
    about = 100 if LONG else 8, tmp_path / "run", tmp_path / "cache"
    flags = small("--cache", tmp_path / "cache", *sizes)
    result = json.loads(run_script(SCRIPTS / "end_runs.py", *about, *flags, check=True).stdout)
    assert result["is_same"] and result["runs"] and sum(result["ended"].values()) >= 8


def test_loss_that_is_not_finite_ends_the_run(small, tmp_path):
    """The fifth training step gives NaN: it is not taken, and the checkpoint of step 3 stays."""
    steps = itertools.count(1)

    def poison(module, inputs, output):
        if isinstance(module, Model) and module.training:
            return output * math.nan if next(steps) == 5 else output

    with register_module_forward_hook(poison):
        assert_refused(pretrain.main, small(), "--lr", "step 5", "nan", tmp_path / "run")
    checkpoint = load_checkpoint(str(tmp_path / "run"))
    assert checkpoint["step"] == 3 and all(weight.isfinite().all() for weight in checkpoint["model"].values())


def test_output_cannot_end_a_run_which_saves_first(small, tmp_path, monkeypatch):
    """A reader that leaves after a line; then a print that fails: what it would have said is saved."""
    command = [sys.executable, "pretrain.py", *small("--steps", 40, out="piped")]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as run:
        run.stdout.readline()
        run.stdout.close()
        assert b"Traceback" not in run.stderr.read()
    assert run.returncode == 0 and load_checkpoint(str(tmp_path / "piped"))["step"] == 40
    monkeypatch.setattr(pretrain, "print_line", lambda run, text, **values: {}[text])
    with pytest.raises(KeyError, match="step 3:"):
        pretrain.main(small())
    assert load_checkpoint(str(tmp_path / "run"))["step"] == 3


def test_output_without_a_terminal_is_plain_lines_and_quiet_is_quiet(small, monkeypatch, tmp_path, capsys):
    pretrain.main(small(out="prepared"))
    monkeypatch.setattr(pretrain, "PROGRESS_SECONDS", 0)
    done = run_main(pretrain.main, *small("--steps", 30))
    lines = done.err.splitlines()
    assert "\r" not in done.out + done.err and len(lines) == 3
    assert lines[0].startswith("step 10 of 30: loss ") and "Saved" in done.out and "warning" not in done.out
    run = build(small("--steps", 99_999, out="long"))
    pretrain.evaluate(run)
    pretrain.print_summary(run, 1.0)
    assert "warning: more than 20 epochs" in capsys.readouterr().out
    done = run_main(pretrain.main, *small("--quiet", out="quiet"))
    assert done.out == done.err == "" and load_checkpoint(str(tmp_path / "quiet"))["step"] == 6
    with lock_output(str(tmp_path / "quiet")):  # another run, which may be saving its checkpoint
        monkeypatch.setattr(pretrain, "load_own_checkpoint", pytest.fail)
        assert_refused(pretrain.main, small(out="quiet"), "--out", "quiet", "in use")


@pytest.mark.parametrize("kind, flags, num_words", [
    ("text", "", 12), ("text", "--emb lookup --objective mlm --vocab 300", 12), ("text", "--emb median", 12),
    ("text", "--emb bloom --split phrases --alpha 3 --vocab 300", 12), ("sets", "", 3)])
def test_next_command_shows_held_out_words(small, sets, text_path, pages_path, kind, flags, num_words):
    make, path = (small, text_path) if kind == "text" else (sets, pages_path)
    done = run_main(pretrain.main, *make(*flags.split(), "--steps", 2, out="a 'b"))
    *command, text = shlex.split(done.out.splitlines()[-1])
    words = text.split()
    assert command[1:4] == ["python", "infer.py", "--ckpt"] and command[4].endswith("a 'b")
    has_mask = "objective sr" not in done.out
    assert 3 <= len(words) <= num_words + 1 and words.count("[MASK]") == has_mask
    assert all(word in path.read_text() for word in words if word != "[MASK]")


def test_damaged_codes_or_hash_are_refused_and_named(small, tmp_path):
    flags = small("--cache", tmp_path / "cache", out="a")
    pretrain.main(flags)
    flags += "--out", str(tmp_path / "b")
    [folder] = [path for path in (tmp_path / "cache").iterdir() if path.is_dir()]
    for path in sorted([*folder.glob("codes*.npy"), *folder.glob("fit*.json")]):  # codes, then their hash
        good = path.read_bytes()
        for bad in (good[:len(good) // 2], b"", b"{", np.array([{}]).dumps()):
            path.write_bytes(bad)
            assert_refused(pretrain.main, flags, folder, "Remove")
        path.unlink()
    assert math.isfinite(pretrain.main(flags)["eval_loss"])


def test_caches_of_other_hashes_are_kept_apart(small):
    variants = ("--hash md5", "--hash md5 --key k", "", "--hash_seed 1", "--bits 64", "--emb median",
                "--emb median --key k", "--emb median --hash_seed 1")
    codes = [build(small(*flags.split(), out=i)).model.codes for i, flags in enumerate(variants)]
    for i, a in enumerate(codes):
        assert all(a.shape != b.shape or (a != b).any() for b in codes[:i])


@pytest.mark.parametrize("flags, fragments", [
    ("--batch 9999", ("--batch", "9999")), ("--length 99999", ("--data", "99999")),
    ("--field a", ("--field",)), ("--device abacus", ("--device", "abacus")),
    ("--data nowhere.txt", ("nowhere.txt",)), ("--out /proc/no", ("--out /proc/no",)),
    (f"--cache {__file__}", (f"--cache {__file__}: expected a folder",)),
    ("--steps 1 --warmup 0 --lr 1e38", ("--lr", "at step 1", "nan"))])
def test_run_that_is_impossible_is_refused_and_saves_nothing(small, tmp_path, flags, fragments):
    assert_refused(pretrain.main, small(*flags.split()), *fragments)
    assert not list(tmp_path.rglob("*.pt"))


def test_evaluation_of_no_masked_word_is_refused(small, tmp_path):
    (few := tmp_path / "few.txt").write_text("a b c d e f g h i j\n" * 60)
    assert_refused(pretrain.main, small("--data", few, *"--emb median --length 9 --mask 0.001".split()), "to predict")


def test_item_sets_that_do_not_fit_the_flags_are_refused(sets, tmp_path):
    (tmp_path / "one.txt").write_text("a b\nc d\n")
    for flags, fragments in (("--alpha 60", ("--alpha", "60")), ("--field nowhere", ("nowhere",)),
                             (f"--alpha 2 --data {tmp_path / 'one.txt'}", ("--data", "two items")),
                             ("--data python-names --field a", ("--field", "python-names"))):
        assert_refused(pretrain.main, sets(*flags.split()), *fragments)
    pretrain.main(sets())
    assert_refused(pretrain.main, sets("--alpha", "4"), "alpha was 5", "is 4")
