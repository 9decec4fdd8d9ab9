"""Tests of runtime.py: device and flags, ranks and signals, files that are built once, checkpoints."""

import argparse
import contextlib
import dataclasses
import io
import multiprocessing
import os
import random
import re
import resource
import shutil
import signal
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import finetune
import infer
import pretrain
import runtime
from model import load_model, parameter_groups
from runtime import InputError, build_once, load_checkpoint, lock_output, save_checkpoint
from tests.fixtures import HOSTILE, HOSTILE_TO_INFER, HOSTILE_TO_RESUME, SR_FLAGS, spoil_checkpoint
from tests.support import bloom_model, run_main, tiny_model

FORK = multiprocessing.get_context("fork")  # a child without new imports: a tenth of a second


def run_in_children(function, count=1):
    """Run a function in forked processes; return their exit codes."""
    children = [FORK.Process(target=function) for _ in range(count)]
    for child in children:
        child.start()
    return [child.join(60) or child.exitcode for child in children]


@pytest.mark.parametrize("error, code", [
    (InputError("--lr: expected 0 or more, got -1."), 2), (PermissionError(13, "not permitted", "x"), 2),
    (KeyboardInterrupt("Interrupted."), 130), (MemoryError("Unable to allocate 7 GiB"), 2),
    *((RuntimeError(text), 2) for text in ("can't allocate memory", "CUDA out of memory.", "overflowed")),
    (KeyError("a bug keeps its traceback"), None), (RuntimeError("so does this"), None)])
def test_exit_on_bad_input_prints_one_line_and_exits(capsys, error, code):
    with pytest.raises(SystemExit if code else type(error)) as end, runtime.exit_on_bad_input("pretrain.py"):
        raise error
    assert not code or end.value.code == code and capsys.readouterr().err == f"pretrain.py: {error}\n"


@pytest.mark.parametrize("kind, reason", dict(pipe="Broken pipe", full="No space", ascii=0, closed=0).items())
def test_output_that_fails_ends_only_a_script_that_needs_it(monkeypatch, kind, reason):
    def main(argv):
        sys.stdout = stream
        with runtime.exit_on_bad_input("x.py", needs_output=bool(argv)):
            print("4 × 2 \ud800", "a text" * 9_999)
            print("an error", file=sys.stderr)
            return sys.stdin.read()

    for argv in ([], ["needed"]):
        reader, writer = os.pipe()
        os.close(reader)  # as head -1 does
        stream = dict(pipe=open(writer, "w"), full=open("/dev/full", "w"),
                      ascii=io.TextIOWrapper(io.BytesIO(), "ascii"), closed=None)[kind]
        monkeypatch.setattr(sys, "stdin", None)
        done = run_main(main, *argv)
        if reason and argv:
            assert done.code == 2 and done.err.startswith("x.py: ") and reason in done.err
        else:
            assert not done.code and done.result == "" and done.err == "an error\n"
    assert kind != "ascii" or stream.buffer.getvalue().startswith(rb"4 \xd7 2 \ud800")


def test_blame_input_names_the_source_once():
    for error, source, expected in ((ValueError("x"), "--data", "--data: x"), (ValueError("x"), "", "x"),
                                    (InputError("--lr: x"), "--data", "--lr: x")):
        with pytest.raises(InputError) as raised, runtime.blame_input(source):
            raise error
        assert str(raised.value) == expected


def test_at_least_refuses_other_numbers_with_the_range():
    assert runtime.at_least(1)("1") == 1 and runtime.at_least(0, float)("1e-3") == 1e-3
    for args, text, span in (
            ((1,), "0", "int from 1 to 2147483647"), ((1,), "-3", "1 to"), ((0,), "1.5", "int from 0"),
            ((0,), str(2**31), "0 to"), ((0,), "9" * 20, "0 to"), ((0,), "x", "int"), ((0, float), "", ""),
            ((0, float), "nan", "float from 0 to 1e.38"), ((0, float), "-1e-9", ""), ((0, float), "inf", ""),
            ((1, int, 7), "8", "int from 1 to 7")):
        with pytest.raises(argparse.ArgumentTypeError, match=f"expected .*{span}.*, got {text}"):
            runtime.at_least(*args)(text)


def test_help_formatter_prints_defaults_that_are_values():
    parser = argparse.ArgumentParser(formatter_class=runtime.HelpFormatter, description="first\n    second")
    parser.add_argument("--seed", default=7, help="x")
    parser.add_argument("--out", help="x")
    text = parser.format_help()
    assert "first\n    second" in text and "x (default: 7)" in text and "None" not in text


def resolve(device="cpu", dtype="auto", compile=None):
    return runtime.resolve_device(SimpleNamespace(device=device, dtype=dtype, compile=compile))


def test_resolve_device_absent_device_is_refused():
    for device in ("meta", "cuda:99", "nowhere", ""):
        with pytest.raises(InputError, match=f"^--device: .*got {device}\\."):
            resolve(device)
    assert resolve("auto")[0].type == ("cuda" if torch.cuda.is_available() else "cpu")


def test_resolve_device_on_cpu_follows_flags_and_processor(monkeypatch):
    for dtype, features in (("float32", dict(amx_bf16=False)), ("bfloat16", dict(avx512_bf16=True))):
        monkeypatch.setattr(torch.cpu, "get_capabilities", features.copy)
        assert resolve() == (torch.device("cpu"), dtype, False)
        assert resolve(dtype="float32", compile=True)[1:] == ("float32", True)


def test_try_compile_failure_warns_and_restores_the_model(capsys):
    model = tiny_model()

    def fail():
        raise RuntimeError("no C++\ncompiler")

    assert runtime.try_compile(model, fail) is False and "encode" not in vars(model)
    assert "RuntimeError: no C++ compiler" in capsys.readouterr().err


TORCHRUN = dict(RANK="5", WORLD_SIZE="8", LOCAL_RANK="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
RESTARTS = dict(TORCHELASTIC_MAX_RESTARTS="3", TORCHELASTIC_USE_AGENT_STORE="True")  # would wait forever
ENVIRONMENTS = [TORCHRUN | dict(RANK="8"), TORCHRUN | dict(LOCAL_RANK="x"), *(
    {name: n} for name in ("WORLD_SIZE", "RANK") for n in ("2", "-1", "", "x")), dict(WORLD_SIZE="0")]


@pytest.mark.parametrize("env, expected", [
    ({}, (0, 1, 0)), (TORCHRUN, (5, 8, 1)), (RESTARTS, "requires TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"),
    (RESTARTS | dict(TORCHELASTIC_USE_AGENT_STORE="False"), (0, 1, 0)),
    *((env, "environment: expected RANK, WORLD_SIZE") for env in ENVIRONMENTS)])
def test_read_ranks_reads_torchrun_or_is_alone(monkeypatch, env, expected):
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    is_refused = isinstance(expected, str)
    with pytest.raises(InputError, match=expected) if is_refused else contextlib.nullcontext():
        assert runtime.read_ranks() == expected
    assert runtime.gather_from_ranks("x") == ["x"]
    runtime.barrier_before_exit()  # nobody to wait for


def test_catch_signals_collects_them_and_restores_handlers():
    signals = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP]
    before = [*map(signal.getsignal, signals)]
    with runtime.catch_signals() as caught:
        pass
    assert not caught and before == [*map(signal.getsignal, signals)]
    with runtime.catch_signals() as caught:
        for number in signals:
            os.kill(os.getpid(), number)
    for number in signals * 5:
        os.kill(os.getpid(), number)  # the process is about to end: it goes on to do so
    assert caught == signals
    with runtime.catch_signals() as caught:
        os.kill(os.getpid(), signal.SIGHUP)  # ignored, as under nohup
    assert not caught


def test_catch_signals_works_outside_the_main_thread():
    with ThreadPoolExecutor() as pool:
        assert pool.submit(lambda: runtime.catch_signals().__enter__()).result() == []


def test_lock_output_refuses_a_second_run(tmp_path):
    out = str(tmp_path / "a" / "b")
    for _ in range(2):  # released after the first
        with lock_output(out), lock_output(out, rank=1), lock_output(str(tmp_path)):
            with pytest.raises(InputError, match=f"^--out {out}: in use by another run"), lock_output(out):
                pass


def test_build_once_from_several_processes_builds_once(tmp_path):
    start, builds = FORK.Barrier(5), FORK.Value("i", 0)

    def build(path):
        with builds.get_lock():
            builds.value += 1
        Path(path).write_text("x" * 100_000)

    def child():
        start.wait(30)  # all ask at the same moment
        assert len(Path(build_once(str(tmp_path / "folder" / "thing"), build)).read_text()) == 100_000

    assert run_in_children(child, count=5) == [0] * 5 and builds.value == 1


def test_build_once_failure_leaves_nothing_and_the_next_call_builds(tmp_path):
    path = str(tmp_path / "thing")
    for leave in (lambda path: Path(path).write_text("half"), os.mkdir):
        def fail(temporary):
            leave(temporary)
            raise OSError("no space")

        with pytest.raises(OSError, match="no space"):
            build_once(path, fail)
        assert os.listdir(tmp_path) == ["thing.lock"]
    assert build_once(path, os.mkdir) == path and os.path.isdir(path)  # over the leftover of the failure
    build_once(path, fail)  # does not build again


def test_fingerprint_is_fixed_and_tells_values_apart():
    assert runtime.fingerprint(["a", 1, None]) == "f79cea04f934"  # on every machine
    values = [1, "1", [1], [1, 1], {"a": 1}, {"a": 2}, None, "\ud800", 1.0]
    assert len({runtime.fingerprint(value) for value in values}) == len(values)


@pytest.fixture
def path(tmp_path):
    """A checkpoint of a small model, in a folder whose name has signs of glob."""
    (folder := tmp_path / "run[1]*").mkdir()
    save_checkpoint(str(folder / "ckpt.pt"), tiny_model(), {"split": "regex"}, step=1, words=["a"])
    return folder / "ckpt.pt"


def test_checkpoint_round_trip_is_exact(tmp_path):
    model, tokenizer = bloom_model()
    save_checkpoint(str(tmp_path / "ckpt.pt"), model, tokenizer.state(), step=3)
    content = load_checkpoint(str(tmp_path))  # a folder means its ckpt.pt
    assert content["step"] == 3 and content["config"] == dataclasses.asdict(model.config)
    assert repr(content["encoder"]) == repr(tokenizer.state())
    again = load_model(content).state_dict()
    assert all(torch.equal(t, again[name]) for name, t in model.state_dict().items()) and "codes" not in again
    assert os.listdir(tmp_path) == ["ckpt.pt"]


def test_load_checkpoint_damaged_file_is_refused(path):
    intact = path.read_bytes()
    for content in (intact[:len(intact) // 2], intact[:-1], b"", b"hello"):
        path.write_bytes(content)
        with pytest.raises(InputError, match="ckpt.pt: not an intact checkpoint"):
            load_checkpoint(str(path))
    for name in (str(path.parent.parent), str(path) + "x", ""):
        with pytest.raises(InputError, match="no checkpoint found"):
            load_checkpoint(name)


def test_load_checkpoint_wrong_part_is_refused(path):
    content, formats = torch.load(path), [("format", x) for x in (0, runtime.FORMAT + 1, True, "1", None)]
    for part, value in [*formats, *((name, 1.5) for name in runtime.PARTS), ("words", [1]), ("step", -1)]:
        torch.save(content | {part: value}, path)
        with pytest.raises(InputError, match=f"expected .*{part}.*{value if part == 'format' else ''}"):
            load_checkpoint(str(path))


CASES = [(script, *damage) for script in (pretrain, finetune, infer) for damage in HOSTILE]
CASES += [(infer, *damage) for damage in HOSTILE_TO_INFER]
CASES += [(pretrain, *damage) for damage in HOSTILE_TO_RESUME]


@pytest.mark.parametrize("script, keys, kind, value", CASES, ids=lambda x: getattr(x, "__name__", str(x)[:9]))
def test_hostile_checkpoint_is_refused(sr_run, text_path, cache_dir, tmp_path, script, keys, kind, value):
    """By every script, in one line that names it, without a traceback; nothing is trained or written."""
    path = tmp_path / "ckpt.pt"
    shutil.copy(sr_run / "ckpt.pt", path)
    spoil_checkpoint(path, keys, value)
    before = path.stat().st_mtime_ns
    task = "--train a --dev b --text c --label d --out".split()
    argv = {pretrain: ["--data", text_path, "--cache", cache_dir, "--out", tmp_path, *SR_FLAGS],
            finetune: ["--ckpt", tmp_path, *task, tmp_path / "x"], infer: ["--ckpt", tmp_path, "one two"]}
    done = run_main(script.main, *argv[script])
    assert done.code == 2 and re.fullmatch(rf"{script.__name__}.py: .*{tmp_path}.*\n", done.err), done.err
    assert {*os.listdir(tmp_path)} <= {"ckpt.pt", ".lock"} and path.stat().st_mtime_ns == before


def test_load_optimizer_restores_the_state_and_keeps_the_settings(sr_run):
    checkpoint = load_checkpoint(str(sr_run))
    state, model = checkpoint["optimizer"]["state"], load_model(checkpoint)
    optimizer = torch.optim.AdamW(parameter_groups(model, 0.5), lr=0.25, fused=True)
    groups = [dict(params=group["params"], betas=None) for group in checkpoint["optimizer"]["param_groups"]]
    saved = dict(state=state, param_groups=groups)  # what is not needed is not trusted
    runtime.load_optimizer(optimizer, saved, "ckpt.pt", checkpoint["step"])
    assert repr(optimizer.state_dict()["state"]) == repr(state) and len(state) == len([*model.parameters()])
    assert [(g["lr"], g["weight_decay"]) for g in optimizer.param_groups] == [(0.25, 0.5), (0.25, 0)]
    optimizer.state.clear()
    runtime.load_optimizer(optimizer, saved | dict(state={}), "ckpt.pt", 0)
    for bad, step in (({}, 3), (state, 0), (state, 10**9)):
        with pytest.raises(InputError, match="^ckpt.pt: expected the optimizer's state of this model"):
            runtime.load_optimizer(optimizer, saved | dict(state=bad), "ckpt.pt", step)


def test_load_checkpoint_flipped_bit_is_never_read(path):
    """Anywhere in the file: it is refused, or what was saved comes back. torch.load alone is deceived."""
    rng, num_refused, num_deceived = random.Random(0), 0, 0
    intact, expected = path.read_bytes(), repr(load_checkpoint(str(path)))
    for _ in range(120):
        damaged = bytearray(intact)
        damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
        path.write_bytes(damaged)
        try:
            assert repr(load_checkpoint(str(path))) == expected
        except InputError:
            num_refused += 1
            with contextlib.suppress(Exception):
                torch.load(path)
                num_deceived += 1
    assert num_refused > 40 and num_deceived > 20


def test_load_checkpoint_that_claims_more_than_it_has_is_refused(tmp_path, monkeypatch):
    """A compressed entry, or one that the directory lists 50 times, would fill the memory."""
    path, reads = tmp_path / "ckpt.pt", []
    monkeypatch.setattr(zipfile.ZipExtFile, "read", lambda *args: reads.append(args))
    for kind, size, copies in (zipfile.ZIP_DEFLATED, 50_000_000, 0), (zipfile.ZIP_STORED, 10_000, 50):
        with zipfile.ZipFile(path, "w", kind) as file:
            file.writestr("archive/data.pkl", bytes(size))
            file.filelist.extend(file.filelist * copies)
        with pytest.raises(InputError, match="not an intact checkpoint"):
            load_checkpoint(str(path))
        assert path.stat().st_size < 100_000 and not reads


class Evil:
    """Unpickled, it would run a command."""
    def __reduce__(self):
        return os.system, ("echo owned",)


def test_load_checkpoint_cannot_run_code(path, capfd):
    torch.save({"format": runtime.FORMAT, "config": Evil()}, path)
    with pytest.raises(InputError, match="not an intact checkpoint"):
        load_checkpoint(str(path))
    assert "owned" not in capfd.readouterr().out


def test_save_checkpoint_on_a_full_disk_keeps_the_old_one(path):
    def save():
        resource.setrlimit(resource.RLIMIT_FSIZE, (2_000, 2_000))
        try:
            save_checkpoint(str(path), tiny_model(), {}, step=2)
        except InputError as error:
            sys.exit(0 if "could not be saved" in str(error) else 3)
        sys.exit(4)

    before = path.read_bytes()
    assert len(before) > 2_000 and run_in_children(save) == [0]
    assert path.read_bytes() == before and os.listdir(path.parent) == ["ckpt.pt"]


def test_save_checkpoint_of_weights_that_are_not_finite_keeps_the_old_one(path):
    before, model = path.read_bytes(), tiny_model()
    for value in (torch.nan, torch.inf, -torch.inf):
        model.norm.weight.data[-1] = value
        with pytest.raises(InputError, match="^--lr: weight norm.weight is not finite.* lower --lr"):
            save_checkpoint(str(path), model, {}, step=2)
        assert path.read_bytes() == before and os.listdir(path.parent) == ["ckpt.pt"]


def test_save_checkpoint_killed_while_writing_keeps_the_old_one(path, monkeypatch):
    def die(content, file):
        file.write(b"half")
        file.flush()
        os.kill(os.getpid(), signal.SIGKILL)

    def save():
        monkeypatch.setattr(torch, "save", die)  # in the child alone
        save_checkpoint(str(path), tiny_model(), {}, step=2)

    assert run_in_children(save) == [-signal.SIGKILL]
    assert len(os.listdir(path.parent)) == 2 and load_checkpoint(str(path))["step"] == 1
    save_checkpoint(str(path), tiny_model(), {}, step=3)  # removes the half file
    assert os.listdir(path.parent) == ["ckpt.pt"] and load_checkpoint(str(path))["step"] == 3
