"""pretrain.py: runs that train, resume and load again; ranks, signals and faults. Flags: test_settings.py."""

import json
import math
import os
import shutil
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

import pretrain
from bloom import coherent_map
from hashing import list_words
from model import Model, load_config, load_model
from runtime import load_checkpoint
from settings import parser
from tests.support import ROOT, SMALL, SMALL_SETS, assert_refused, equal_weights, run_main, run_script
from tests.support import torchrun
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
        small, i = [*SMALL_SETS], SMALL_SETS.index("--alpha")
        del small[i:i + 2 * ("--emb" in more)]
        files = "--data", pages_path, "--cache", cache_dir, "--out", tmp_path / out
        return list(map(str, [*files, *small, *more]))

    return flags


def build(flags):
    return pretrain.build_run(parser("").parse_args(flags))


def read_log(folder):
    """Return the rows of log.jsonl without the speed, which differs from run to run."""
    with open(folder / "log.jsonl") as file:
        rows = [json.loads(line) for line in file]
    return [{k: v for k, v in row.items() if k not in ("words_per_s", "ms_per_sample")} for row in rows]


def train_until_step_4(flags):
    """Train until the optimizer step after the checkpoint of step 3, and end there as a crash would."""
    def crash(*_):
        steps.append(1)
        if len(steps) == 4:
            raise KeyError("crash")

    steps, hook = [], register_optimizer_step_pre_hook(crash)
    try:
        with pytest.raises(KeyError, match="crash"):
            pretrain.main(flags)
    finally:
        hook.remove()


def assert_close_weights(*folders, atol=2e-5):
    """Compare weights; the first steps of Adam are signs, so that rounding shows."""
    for a, b in zip(*(load_checkpoint(str(folder))["model"].values() for folder in folders), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=atol)


# ---------------------------------------------------------------------------------------------------------
# Every embedding, hash, way to split and objective

TEXT_VARIANTS = [
    *(f"--emb {emb} --hash {hash}" for emb in ("emb", "pool", "add", "proj") for hash in ("md5", "lsh")),
    "--emb lookup --objective mlm", "--emb lookup --objective sr", "--emb median", "--emb proj --split bpe",
    "--emb linear --split space --hash md5 --key secret", "--emb lookup --split regex --objective sampled",
    "--emb mean --hash_seed 3", "--emb weighted --weights 13", "--emb weighted --objective hash-mlm",
    "--emb proj --objective hash-mlm",
    "--emb median --split bpe", "--emb median --objective sr", "--emb bloom --split phrases --alpha 3",
    "--emb bloom --split phrases --alpha 3 --objective sr", "--attn lsh --lsh_bands 2 --lsh_redraw"]
SET_VARIANTS = ["", "--emb lookup", "--emb lookup --objective sampled", "--emb median", "--coherent 1",
                "--attn lsh", "--vocab 100"]
VARIANTS = [("text", flags) for flags in TEXT_VARIANTS] + [("sets", flags) for flags in SET_VARIANTS]


@pytest.mark.parametrize("kind, variant", VARIANTS)
def test_variant_trains_resumes_and_loads(small, sets, tmp_path, kind, variant):
    """A run that crashed and resumed equals one that did not, and its checkpoint alone gives its results."""
    make, sizes = (small, "--rows 97 --features 999 --vocab 400") if kind == "text" else (sets, "")
    flags = f"{sizes} --dropout 0.1 {variant}".split()
    result = pretrain.main(make(*flags, out="whole"))
    assert all(math.isfinite(value) for value in result.values())
    train_until_step_4(make(*flags, out="resumed"))
    assert pretrain.main(make(*flags, out="resumed")) == result
    assert equal_weights(tmp_path / "whole", tmp_path / "resumed")
    log = read_log(tmp_path / "whole")
    assert log == read_log(tmp_path / "resumed")
    assert [row["step"] for row in log if "eval_loss" in row] == [3, 6]

    run, checkpoint = build(make(*flags, out="whole")), load_checkpoint(str(tmp_path / "whole"))
    codes, run.model = run.model.codes, load_model(checkpoint)
    tokenizer = HashTokenizer.load(checkpoint["encoder"], run.model.config)
    words = tokenizer.words or run.corpus.words
    assert (tokenizer.hash_words(words) == codes[FIRST_WORD_ID:FIRST_WORD_ID + len(words)].numpy()).all()
    run.model.set_codes(codes)
    assert pretrain.evaluate(run) == result


def test_log_has_losses_rates_and_metrics(small, tmp_path):
    result = pretrain.main(small("--steps", 10))
    [row] = [row for row in map(json.loads, open(tmp_path / "run" / "log.jsonl")) if "loss" in row]
    assert row["step"] == 10
    assert set(row) == {"step", "loss", "lr", "grad_norm", "words_per_s", "ms_per_sample"}
    assert {k: float(f"{v:.6g}") for k, v in result.items()} | dict(step=10) == read_log(tmp_path / "run")[-1]


def test_first_loss_is_that_of_the_uniform_baseline(small, sets):
    for flags, classes in ((small(), 3), (small("--emb", "median", "--buckets", "31", out="b"), 31),
                           (small("--emb", "lookup", "--objective", "mlm", "--vocab", "300", out="c"), 305)):
        run = build(flags)
        assert run.objective.expected_loss(run.corpus.counts[FIRST_WORD_ID:])[0] in (classes, run.config.rows)
        assert abs(pretrain.evaluate(run)["eval_loss"] - math.log(classes)) < 0.15


def test_attention_learns_the_order_of_words(small):
    """With attention the model finds words out of order; without, or without positions, it finds fewer."""
    flags = "--steps 600 --eval_every 600 --batch 32 --lr 2e-3 --warmup 50 --width 64 --layers".split()
    attending, alone = (pretrain.main(small(*flags, layers, out=layers)) for layers in "20")
    assert attending["eval_loss"] < alone["eval_loss"] - 0.03 and alone["f1_shuffled"] < 0.05
    assert attending["f1_random"] > alone["f1_random"] + 0.1
    run = build(small(*flags, 2, out="bag"))
    run.model.positions.weight.requires_grad_(False).zero_()
    assert attending["eval_loss"] < pretrain.fit(run, [])["eval_loss"] - 0.01


def test_superbloom_learns_which_names_go_together(sets):
    """A group has ten names, a set at most nine: the group known, one of eight or more is correct."""
    flags = "--steps 700 --eval_every 700 --lr 3e-3 --batch 32 --length 9 --layers 2 --width 64"
    result = pretrain.main(sets(*flags.split()))
    assert result["rec@10"] > 0.6 and result["rec@1"] < 0.5  # of 120 names; 10 at random are 0.08


# ---------------------------------------------------------------------------------------------------------
# Steps


def test_micro_batches_add_up_to_the_batch(small, tmp_path):
    """Three micro-batches of at most 3 rows are one of 8: the loss is a mean over scored positions."""
    pretrain.main(small(out="one"))
    pretrain.main(small("--micro", "3", out="three"))
    assert_close_weights(tmp_path / "one", tmp_path / "three")


def test_schedule_rises_and_falls_linearly(small):
    long = [1 / 4, 2 / 4, 3 / 4, 1, 1, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6]
    short = [1, 4 / 5, 3 / 5, 2 / 5, 1 / 5]
    for flags, expected in (("--steps 10 --warmup 4", long), ("--steps 5 --warmup 0", short)):
        rates, groups = [], []

        def record(optimizer, *_):
            rates.append(optimizer.param_groups[0]["lr"])
            groups[:] = optimizer.param_groups

        hook = register_optimizer_step_pre_hook(record)
        pretrain.main(small(*flags.split(), "--lr", "0.002", "--decay", "0.03", out=len(expected)))
        hook.remove()
        np.testing.assert_allclose(rates, 0.002 * np.array(expected), rtol=1e-12)
        assert [group["weight_decay"] for group in groups] == [0.03, 0] and groups[0]["betas"] == (0.9, 0.999)


def test_gradients_are_clipped(small, tmp_path):
    norms = []

    def record(optimizer, *_):
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"]]
        norms.append(torch.linalg.vector_norm(torch.stack([g.norm() for g in gradients])).item())

    hook = register_optimizer_step_pre_hook(record)
    pretrain.main(small("--clip", "0.05"))
    hook.remove()
    assert len(norms) == 6 and all(0.045 < norm < 0.0501 for norm in norms)
    [logged] = [row["grad_norm"] for row in read_log(tmp_path / "run") if "grad_norm" in row]
    assert logged > 0.06  # before clipping


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
    planes = {}
    for name, flags in dict(fixed=(), resampled=("--lsh_redraw",)).items():
        pretrain.main(small("--attn", "lsh", "--lsh_bands", "2", *flags, out=name))
        checkpoint = load_checkpoint(str(tmp_path / name))
        planes[name] = checkpoint["model"]["layers.0.planes"]
    torch.manual_seed(0)
    initial = Model(load_config(checkpoint)).layers[0].planes
    assert torch.equal(planes["fixed"], initial) and not torch.equal(planes["resampled"], initial)


# ---------------------------------------------------------------------------------------------------------
# Resuming


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


def test_resume_refuses_another_run(small, tmp_path, text_path):
    """Everything that makes the run itself has to agree, the content of the corpus too."""
    pretrain.main(small())
    longer = tmp_path / "longer.txt"
    longer.write_text(text_path.read_text() + "\none more line\n")
    changes = dict(seed=1, hash_seed=1, lr=0.5, decay=0.1, steps=7, warmup=1, width=64, batch=4, clip=2)
    for flag, value in changes.items():
        assert_refused(pretrain.main, small(f"--{flag}", value), "ckpt.pt", f"{flag} was", f" is {value}")
    assert_refused(pretrain.main, small("--data", longer), "ckpt.pt", "corpus was")
    counts = Counter(list_words(text_path.read_text()))
    assert load_checkpoint(str(tmp_path / "run"))["words"][0] == counts.most_common(1)[0][0]


def test_resume_refuses_a_hostile_checkpoint(small, tmp_path):
    pretrain.main(small("--steps", 3))
    path = tmp_path / "run" / "ckpt.pt"
    good = path.read_bytes()
    for damage in (lambda c: c["model"].update({"norm.weight": torch.ones(3)}), lambda c: c.pop("step"),
                   lambda c: c["model"].pop("norm.weight"), lambda c: c.pop("run"),
                   lambda c: c["optimizer"].pop("state"), lambda c: c["optimizer"].pop("param_groups"),
                   lambda c: c["config"].update(layers=2), lambda c: c.pop("optimizer")):
        path.write_bytes(good)
        damage(checkpoint := load_checkpoint(str(path)))
        torch.save(checkpoint, path)
        assert_refused(pretrain.main, small("--steps", 3), "ckpt.pt")
    path.write_bytes(good[:len(good) // 2])
    assert_refused(pretrain.main, small("--steps", 3), "ckpt.pt", "not an intact checkpoint")


def test_dtype_auto_keeps_that_of_the_checkpoint(small, tmp_path):
    for saved, other in (("bfloat16", "float32"), ("float32", "bfloat16")):
        train_until_step_4(small("--dtype", saved, out=saved))
        run = build(small("--dtype", "auto", out=saved))
        assert run.dtype == saved and build(small("--dtype", other, out=saved)).dtype == other
        assert math.isfinite(pretrain.fit(run, [])["eval_loss"])
        assert load_checkpoint(str(tmp_path / saved))["dtype"] == saved


# ---------------------------------------------------------------------------------------------------------
# Ranks


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
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    env = os.environ | RESTARTS | dict(OMP_NUM_THREADS="1", PYTHONPATH=str(ROOT), MASTER_PORT=port) | env
    options = dict(cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    commands = [[str(word).replace("PORT", port) for word in command] for command in commands]
    ranks = [env | dict(RANK=str(rank)) if "WORLD_SIZE" in env else env for rank in range(2)]
    runs = [subprocess.Popen([sys.executable, *command], env=env, **options)
            for env, command in zip(ranks, commands)]
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
    assert_close_weights(tmp_path / "whole", tmp_path / "resumed")
    for a, b in zip(*(read_log(tmp_path / name) for name in ("whole", "resumed")), strict=True):
        assert a == pytest.approx(b, rel=1e-3)


def test_ranks_with_different_checkpoints_are_refused(small):
    train_until_step_4(small(out="here"))
    codes, output = run_two(*(["pretrain.py", *small(out=out)] for out in ("here", "there")), **RANKS)
    assert codes == [2, 2], output
    assert all("--out: expected a folder that all nodes see" in error for _, error in output)


def test_signal_to_one_rank_stops_all_at_the_same_step(small, tmp_path):
    command = [SCRIPTS / "end_rank.py", "SIGTERM", "4", *small("--steps", "9999", "--save_every", "9999")]
    codes, output = run_two(command, command, **RANKS)
    assert codes == [128 + signal.SIGTERM] * 2 and "Interrupted at step 4" in output[0][0], output
    assert load_checkpoint(str(tmp_path / "run"))["step"] == 4


# ---------------------------------------------------------------------------------------------------------
# Signals and faults


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_saves_and_the_same_command_resumes(small, tmp_path, number):
    handlers = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    pretrain.main(small("--dropout", "0.1", out="whole"))
    steps = []

    def interrupt(*_):
        steps.append(1)
        if len(steps) == 5:
            os.kill(os.getpid(), number)

    hook = register_optimizer_step_pre_hook(interrupt)
    done = run_main(pretrain.main, *small("--dropout", "0.1", out="resumed"))
    hook.remove()
    assert done.code == 128 + number and "Interrupted at step 5" in done.out and len(steps) == 5
    assert load_checkpoint(str(tmp_path / "resumed"))["step"] == 5
    pretrain.main(small("--dropout", "0.1", out="resumed"))
    assert equal_weights(tmp_path / "whole", tmp_path / "resumed")
    assert handlers == (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT))


def test_run_resumes_whatever_ended_it(small, tmp_path):
    """SIGKILL, SIGTERM, a full disk, a half-written file, a damaged checkpoint: the same final state."""
    sizes = "--dropout 0.1 --steps 40 --save_every 5 --eval_every 20".split()
    flags = small("--cache", tmp_path / "cache", *sizes)
    done = run_script(SCRIPTS / "end_runs.py", "pretrain", 100 if LONG else 8, "ckpt.pt", tmp_path / "run",
                      tmp_path / "cache", *flags, check=True)
    result = json.loads(done.stdout)
    assert result["is_same"] and result["runs"] and sum(result["ended"].values()) >= 8


def test_loss_that_is_not_finite_ends_the_run(small, tmp_path):
    """The fifth training step gives NaN: it is not taken, and the checkpoint of step 3 stays."""
    steps = []

    def poison(module, inputs, output):
        if isinstance(module, Model) and module.training:
            steps.append(1)
            return output * math.nan if len(steps) == 5 else output

    hook = register_module_forward_hook(poison)
    try:
        assert_refused(pretrain.main, small(), "--lr", "step 5", "nan", tmp_path / "run")
    finally:
        hook.remove()
    checkpoint = load_checkpoint(str(tmp_path / "run"))
    assert checkpoint["step"] == 3 and all(weight.isfinite().all() for weight in checkpoint["model"].values())


def test_compiler_that_fails_is_reported_and_not_fatal(small, monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("no compiler")

    monkeypatch.setattr(torch, "compile", lambda function: fail)
    done = run_main(pretrain.main, *small("--compile"))
    assert done.code == 0 and "--compile" in done.err and "no compiler" in done.err
    assert math.isfinite(done.result["eval_loss"])


def test_two_runs_prepare_one_corpus_together(small, tmp_path):
    """Two runs of one corpus and two hashes start with an empty cache; each ends as it does alone."""
    cache = "--cache", tmp_path / "new", "--hash"
    codes, output = run_two(*(["pretrain.py", *small(*cache, name, out=name)] for name in ("lsh", "md5")))
    assert codes == [0, 0], output
    for name in "lsh", "md5":
        pretrain.main(small("--hash", name, out=f"{name} alone"))
        assert equal_weights(tmp_path / name, tmp_path / f"{name} alone")
    names = [path.name for path in (tmp_path / "new").rglob("*")]
    assert sum(name.startswith("codes-") and name.endswith(".npy") for name in names) == 2
    assert sum(name.endswith(".bin") for name in names) == 1
    assert not any(name.endswith(".tmp") for name in names)


@pytest.mark.parametrize("split", ["regex", "bpe"])
def test_damaged_cache_is_refused_and_named(small, tmp_path, split):
    flags = small("--cache", tmp_path / "cache", "--split", split, "--steps", "1")
    pretrain.main(flags)
    shutil.rmtree(tmp_path / "run")
    [folder] = [path for path in (tmp_path / "cache").iterdir() if path.is_dir()]
    files = [path for path in folder.iterdir() if path.suffix != ".lock" and path.name != "offsets.npy"]
    names = {path.name.split("-")[0] for path in files}
    assert names >= {"codes", "hash", "ids.bin", "words.txt", "counts.npy", "meta.json"}
    # the codes first, then what they are made of
    for path in sorted(files, key=lambda path: not path.name.startswith("codes")):
        good = path.read_bytes()
        for codes in set(folder.glob("codes*.npy")) - {path}:
            codes.unlink()
        for bad in (good[:len(good) // 2], b"", b"{", np.array([{}]).dumps()):
            path.write_bytes(bad)
            assert_refused(pretrain.main, flags, folder, "Remove")
        path.write_bytes(good)
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
    ("--data nowhere.txt", ("nowhere.txt",)), ("--out /proc/no", ("/proc/no",))])
def test_text_that_does_not_fit_the_flags_is_refused(small, flags, fragments):
    assert_refused(pretrain.main, small(*flags.split()), *fragments)


def test_item_sets_that_do_not_fit_the_flags_are_refused(sets, tmp_path):
    (tmp_path / "one.txt").write_text("a b\nc d\n")
    for flags, fragments in (("--alpha 60", ("--alpha", "60")), ("--field nowhere", ("nowhere",)),
                             (f"--alpha 2 --data {tmp_path / 'one.txt'}", ("--data", "two items")),
                             ("--data python-names --field a", ("--field", "python-names"))):
        assert_refused(pretrain.main, sets(*flags.split()), *fragments)
    pretrain.main(sets())
    assert_refused(pretrain.main, sets("--alpha", "4"), "alpha was 5", "is 4")
