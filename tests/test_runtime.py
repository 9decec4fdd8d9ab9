"""Tests of runtime.py: device and flags, ranks and signals, files that are built once, checkpoints.

Run by torchrun as a script, it is a rank of test_ranks_gather_values_and_close_the_group.
"""

import argparse
import contextlib
import dataclasses
import json
import multiprocessing
import os
import random
import resource
import signal
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import runtime
from model import load_model
from runtime import InputError, build_once, load_checkpoint, save_checkpoint
from tests.support import bloom_model, tiny_model, torchrun

FORK = multiprocessing.get_context("fork")  # a child without new imports: a tenth of a second


def run_in_children(function, count=1):
    """Run a function in forked processes; return their exit codes."""
    children = [FORK.Process(target=function) for _ in range(count)]
    for child in children:
        child.start()
    return [child.join(60) or child.exitcode for child in children]


def test_exit_on_bad_input_prints_one_line_and_exits_with_2(capsys):
    for error in (InputError("--lr: expected 0 or more, got -1."), PermissionError(13, "not permitted", "x")):
        with pytest.raises(SystemExit) as end, runtime.exit_on_bad_input("pretrain.py"):
            raise error
        assert end.value.code == 2 and capsys.readouterr().err == f"pretrain.py: {error}\n"
    with pytest.raises(KeyError), runtime.exit_on_bad_input("pretrain.py"):
        raise KeyError("a bug keeps its traceback")


def test_blame_input_names_the_source_once():
    for error, source, expected in ((ValueError("x"), "--data", "--data: x"), (ValueError("x"), "", "x"),
                                    (InputError("--lr: x"), "--data", "--lr: x")):
        with pytest.raises(InputError) as raised, runtime.blame_input(source):
            raise error
        assert str(raised.value) == expected


def test_at_least_refuses_smaller_numbers_and_nan():
    assert runtime.at_least(1)("1") == 1 and runtime.at_least(0, float)("1e-3") == 1e-3
    for minimum, kind, text in ((1, int, "0"), (1, int, "-3"), (0, float, "nan"), (0, float, "-1e-9")):
        with pytest.raises(argparse.ArgumentTypeError, match=f"expected {minimum} or more, got {text}"):
            runtime.at_least(minimum, kind)(text)


def test_help_formatter_prints_defaults_that_are_values():
    parser = argparse.ArgumentParser(formatter_class=runtime.HelpFormatter, description="first\n    second")
    for flag, default in (("--seed", 7), ("--out", None)):
        parser.add_argument(flag, default=default, help="x")
    text = parser.format_help()
    assert "first\n    second" in text and "x (default: 7)" in text and "None" not in text


def resolve(device="cpu", dtype="auto", compile=None):
    return runtime.resolve_device(SimpleNamespace(device=device, dtype=dtype, compile=compile))


@pytest.mark.parametrize("device", ["meta", "cuda:99", "nowhere", ""])
def test_resolve_device_absent_device_is_refused(device):
    with pytest.raises(InputError, match=f"^--device: .*got {device}\\."):
        resolve(device)
    assert resolve("auto")[0].type == ("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("features,expected", [(dict(avx2=True, amx_bf16=False), "float32"),
                                               (dict(avx512_bf16=True), "bfloat16")])
def test_resolve_device_on_cpu_follows_flags_and_processor(monkeypatch, features, expected):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: features)
    assert resolve() == (torch.device("cpu"), expected, False)
    assert resolve(dtype="float32", compile=True)[1:] == ("float32", True)


def test_autocast_computes_products_in_the_dtype_and_sums_in_float32():
    x = torch.randn(8, 8)
    for dtype in ("float32", "bfloat16"):
        with runtime.autocast(torch.device("cpu"), dtype):
            assert (x @ x).dtype == getattr(torch, dtype) and x.log_softmax(-1).dtype == torch.float32


def test_try_compile_failure_warns_and_restores_the_model(capsys):
    model = tiny_model()

    def fail():
        raise RuntimeError("no C++\ncompiler")

    assert runtime.try_compile(model, fail) is False and "encode" not in vars(model)
    assert "RuntimeError: no C++ compiler" in capsys.readouterr().err


def test_read_ranks_reads_torchrun_or_is_alone(monkeypatch):
    assert runtime.read_ranks() == (0, 1, 0) and runtime.gather_from_ranks("x") == ["x"]
    runtime.barrier_before_exit()  # nobody to wait for
    for name, value in (("RANK", "5"), ("WORLD_SIZE", "8"), ("LOCAL_RANK", "1")):
        monkeypatch.setenv(name, value)
    assert runtime.read_ranks() == (5, 8, 1)


def test_read_ranks_refuses_restarts_that_would_wait_forever(monkeypatch):
    """With its default store a torchrun that restarts hands new ranks the addresses of lost ones."""
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    with pytest.raises(InputError, match="requires TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"):
        runtime.read_ranks()
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "False")
    assert len(runtime.read_ranks()) == 3


def run_rank(folder):
    """Gather from all ranks, leave together, and write what was seen."""
    rank, world, _ = runtime.read_ranks()
    with runtime.exit_on_bad_input("test"):
        dist.init_process_group("gloo")
        values = runtime.gather_from_ranks({"rank": rank})

        runtime.barrier_before_exit()
        with open(os.path.join(folder, f"{rank}.json"), "w") as file:
            json.dump([world, [value["rank"] for value in values]], file)
        if rank == 0:
            raise InputError("the first rank fails")


def test_ranks_gather_values_and_close_the_group(tmp_path):
    done = torchrun(2, __file__, tmp_path, check=False)
    assert "test: the first rank fails" in done.stderr and "AssertionError" not in done.stderr, done.stderr
    assert [(tmp_path / f"{rank}.json").read_text() for rank in range(2)] == ["[2, [0, 1]]"] * 2


def test_catch_signals_collects_them_and_restores_handlers():
    before = [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)]
    with runtime.catch_signals() as caught:
        for number in (signal.SIGTERM, signal.SIGINT):
            os.kill(os.getpid(), number)
    assert caught == [signal.SIGTERM, signal.SIGINT]
    assert before == [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)]


def test_catch_signals_works_outside_the_main_thread():
    with ThreadPoolExecutor() as pool:
        assert pool.submit(lambda: runtime.catch_signals().__enter__()).result() == []


def test_build_once_from_several_processes_builds_once(tmp_path):
    start, builds = FORK.Barrier(5), FORK.Value("i", 0)

    def build(path):
        with builds.get_lock():
            builds.value += 1
        with open(path, "w") as file:
            file.write("x" * 100_000)

    def child():
        start.wait(30)  # all ask at the same moment
        with open(build_once(str(tmp_path / "folder" / "thing"), build)) as file:
            assert len(file.read()) == 100_000

    assert run_in_children(child, count=5) == [0] * 5 and builds.value == 1


def test_build_once_failure_leaves_nothing_and_the_next_call_builds(tmp_path):
    path = str(tmp_path / "thing")

    def fail(temporary):
        os.mkdir(temporary)
        raise OSError("no space")

    with pytest.raises(OSError, match="no space"):
        build_once(path, fail)
    assert not os.path.exists(path)
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


def test_load_checkpoint_missing_file_is_refused(tmp_path):
    for name in (str(tmp_path), str(tmp_path / "nowhere"), ""):
        with pytest.raises(InputError, match="no checkpoint found"):
            load_checkpoint(name)


def test_load_checkpoint_damaged_file_is_refused(path):
    intact = path.read_bytes()
    for content in (intact[:len(intact) // 2], intact[:-1], b"", b"hello"):
        path.write_bytes(content)
        with pytest.raises(InputError, match="ckpt.pt: not an intact checkpoint"):
            load_checkpoint(str(path))


@pytest.mark.parametrize("version", [0, runtime.FORMAT + 1, True, "1", None])
def test_load_checkpoint_other_format_is_refused(path, version):
    torch.save(torch.load(path) | {"format": version}, path)
    with pytest.raises(InputError, match=f"expected checkpoint format {runtime.FORMAT}, got {version}"):
        load_checkpoint(str(path))


WRONG_WEIGHTS = (1, torch.zeros(1).expand(2**40), torch.zeros(2, device="meta"), torch.eye(3).to_sparse())


@pytest.mark.parametrize("part,value", [*((name, 1.5) for name in runtime.PARTS), ("words", [1]),
                                        *(("model", {"a": weight}) for weight in WRONG_WEIGHTS)])
def test_load_checkpoint_wrong_part_is_refused(path, part, value):
    """Also weights of which not all numbers are stored: one that counts 2^40 times would fill the memory."""
    torch.save(torch.load(path) | {part: value}, path)
    with pytest.raises(InputError, match=f"expected (weight )?(a|{part})"):
        load_checkpoint(str(path))


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


def test_load_checkpoint_compressed_entry_is_refused_without_inflating(tmp_path, monkeypatch):
    path, reads = tmp_path / "ckpt.pt", []
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("archive/data.pkl", bytes(50_000_000))
    monkeypatch.setattr(zipfile.ZipExtFile, "read", lambda *args: reads.append(args))
    with pytest.raises(InputError, match="not an intact checkpoint"):
        load_checkpoint(str(path))
    assert path.stat().st_size < 100_000 and not reads


def test_load_checkpoint_entries_that_overlap_are_refused(tmp_path):
    """One stored entry that the directory lists 50 times claims more bytes than the file has."""
    path = tmp_path / "ckpt.pt"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("archive/data.pkl", bytes(10_000))
        file.filelist.extend(file.filelist * 50)
    with pytest.raises(InputError, match="not an intact checkpoint"):
        load_checkpoint(str(path))


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


if __name__ == "__main__":
    run_rank(sys.argv[1])
