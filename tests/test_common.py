"""Tests of support/common.py: errors of one line, devices, ranks, files built once, checkpoints."""

import argparse
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
import weakref
from multiprocessing.pool import ThreadPool
from pathlib import Path

import pytest
import torch

from model import HEADS, load_model
from support import common
from support.common import InputError, blame, build_once, load_checkpoint, lock_output, reading
from support.common import save_checkpoint
from tests.helpers import HAS_FORK, ROOT, fail_first, needs_fork, run_script, tiny_model

if HAS_FORK:
    FORK = multiprocessing.get_context("fork")  # children see the patches of a test


def run_in_children(function, count=1):
    """Run a function in forked processes and return their exit codes."""
    children = [FORK.Process(target=function) for _ in range(count)]
    for child in children:
        child.start()
    for child in children:
        child.join(60)
    return [child.exitcode for child in children]


# Bad input


def raise_error(error):
    raise error


@pytest.mark.parametrize("error, code, line", [
    (InputError("--lr: expected\n0 or more."), 2, "--lr: expected 0 or more."),
    (PermissionError(13, "not permitted", "a.txt"), 2, "a.txt: not permitted"),
    (MemoryError(), 2, "MemoryError"),
    (torch.OutOfMemoryError("CUDA is full"), 2, "CUDA is full"),  # a RuntimeError
    (KeyboardInterrupt(), 130, "Interrupted."),
])
def test_run_script_prints_one_line_and_exits(capsys, error, code, line):
    with pytest.raises(SystemExit) as end:
        common.run_script("pretrain.py", raise_error, error)
    assert end.value.code == code
    assert capsys.readouterr().err == f"pretrain.py: {line}\n"


def test_run_script_error_of_the_program_keeps_its_traceback():
    with pytest.raises(ValueError):
        common.run_script("pretrain.py", raise_error, ValueError("x"))


@needs_fork
def test_second_ctrl_c_while_python_ends_prints_no_traceback():
    code = ("import atexit, signal; atexit.register(signal.raise_signal, signal.SIGINT); "
            "from support import common; "
            "common.run_script('x.py', signal.raise_signal, signal.SIGINT)")
    done = run_script("-c", code, code=-signal.SIGINT)
    assert done.stderr == "x.py: Interrupted.\n"


def test_run_script_without_stdout_ends_as_with_it(monkeypatch):
    """Python has none where it was closed, as by >&-, or under pythonw of Windows."""
    monkeypatch.setattr(sys, "stdout", None)
    assert common.run_script("x.py", abs, -3) == 3


@needs_fork  # on Windows this is another error
def test_run_script_whose_reader_leaves_ends_quietly():
    code = "from support import common; common.run_script('x.py', lambda: print('x' * 99_999))"
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, **pipes) as run:
        run.stdout.close()
        assert run.stderr.read() == b""


def test_files_and_output_are_utf8_whatever_the_locale_says(tmp_path):
    """Half of a surrogate pair is no character."""
    path = tmp_path / "a.json"
    path.write_text(r'{"F1": "± 3 \ud83d"}', encoding="utf-8")
    code = ("import sys; from support import common; "
            "common.run_script('x.py', lambda: print(common.read_json(sys.argv[1])['F1']))")
    ascii_only = dict(PYTHONIOENCODING="ascii", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0", LC_ALL="C")
    assert run_script("-c", code, path, **ascii_only).stdout == "± 3 \\ud83d\n"


@pytest.mark.parametrize("context, error, message", [
    (blame("--data"), ValueError("x"), "^--data: x$"),
    (blame("--data"), InputError("--lr: x"), "^--lr: x$"),  # it names its source
    (reading("a.npy"), KeyError("x"), "^a.npy: could not be read"),
])
def test_blame_names_the_source_once(context, error, message):
    with pytest.raises(InputError, match=message):
        with context:
            raise error


@pytest.mark.parametrize("text", ["0", "8", "nan"])
def test_at_least_refuses_other_numbers(text):
    number = common.at_least(1, float, maximum=7)
    assert number("7") == 7
    with pytest.raises(argparse.ArgumentTypeError, match=f"expected 1 to 7, got {text}"):
        number(text)


# Devices


@pytest.mark.parametrize("name", ["cuda:99", "abacus", "hpu"])
def test_device_that_is_not_here_is_refused(name):
    with pytest.raises(InputError, match=f"^--device: .*got {name}"):
        common.find_device(name)


@pytest.mark.parametrize("device, feature, has_onednn, dtype", [
    ("cpu", "avx512_bf16", True, "bfloat16"),
    ("cpu", "bf16", True, "bfloat16"),
    ("cpu", "avx2", True, "float32"),
    ("cpu", "bf16", False, "float32"),  # PyTorch for macOS has nothing that uses it
    ("mps", "bf16", True, "float32"),  # another device does not follow the processor
    ("xpu", "bf16", True, "float32"),
])
def test_dtype_auto_follows_the_processor(monkeypatch, device, feature, has_onednn, dtype):
    device = torch.device(device)
    # raising=False: torch 2.8 has no such function
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {feature: True}, raising=False)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: has_onednn)
    monkeypatch.setattr(common, "find_device", lambda *_: device)
    args = argparse.Namespace(device=device.type, dtype="auto", compile=None)
    assert common.resolve_device(args) == (device, dtype, False)


@pytest.mark.parametrize("has_bfloat16, dtype", [(True, "bfloat16"), (False, "float32")])
def test_dtype_auto_of_a_gpu_is_what_it_does_not_emulate(gpu, monkeypatch, has_bfloat16, dtype):
    """A T4 emulates bfloat16, and is slow at it."""
    monkeypatch.setattr(
        torch.cuda, "is_bf16_supported",
        lambda including_emulation=True: including_emulation or has_bfloat16)
    args = argparse.Namespace(device="cuda", dtype="auto", compile=False)
    assert common.resolve_device(args).dtype == dtype


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    """Let find_device return a GPU, on Linux, with all that torch.compile needs."""
    (tmp_path / "Python.h").touch()
    monkeypatch.setattr(common, "COMPILERS", [sys.executable])
    monkeypatch.setattr(common.sys, "platform", "linux")
    monkeypatch.setattr(common.sysconfig, "get_path", lambda name: tmp_path)
    monkeypatch.setattr(common.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(common, "find_device", lambda *_: torch.device("cuda", 0))


@pytest.mark.parametrize("owner, name, value, reason", [
    (common, "COMPILERS", ["absent"], "C++ compiler"),  # Windows, slim containers
    (common.importlib.util, "find_spec", lambda name: None, "Triton"),  # Windows
    (common.sysconfig, "get_path", lambda name: "/absent", "Python.h"),  # WSL
    (torch.cuda, "get_device_capability", lambda device: (6, 0), "capability"),  # P100
])
def test_compile_that_is_not_possible_is_off_with_a_note_and_refused_by_flag(
        gpu, monkeypatch, capsys, owner, name, value, reason):
    args = argparse.Namespace(device="cuda", dtype="float32", compile=None)
    assert common.resolve_device(args).use_compile
    assert capsys.readouterr().err == ""

    monkeypatch.setattr(owner, name, value)

    assert not common.resolve_device(args).use_compile
    assert reason in capsys.readouterr().err
    args.compile = True
    with pytest.raises(InputError, match="--compile: requires .*--no-compile") as error:
        common.resolve_device(args)
    assert reason in str(error.value)


def test_gpu_that_pytorch_cannot_use_is_noted(monkeypatch, capsys):
    """The build of PyTorch for Windows that pip installs has no CUDA."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(common.shutil, "which", lambda name: name)
    args = argparse.Namespace(device="auto", dtype="float32", compile=False)
    common.resolve_device(args)
    assert "nvidia-smi" in capsys.readouterr().err
    common.resolve_device(args, local_rank=1)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("name, is_async", [("cpu", False), ("mps", False), ("cuda", True)])
def test_send_waits_unless_the_memory_is_pinned(name, is_async):
    """Else another tensor may be in that memory before the device has read it."""
    calls = []

    class FakeTensor:
        def pin_memory(self):
            calls.append("pinned")
            return self

        def to(self, device, non_blocking=False):
            calls.append(non_blocking)

    common.send(FakeTensor(), torch.device(name))
    assert calls == (["pinned", True] if is_async else [False])


# Ranks


def test_ranks_free_what_failed_before_their_group(monkeypatch, two_ranks):
    """DDP can deadlock if its group goes first. The traceback stays readable."""
    models = []

    def fail():
        model = tiny_model()
        models.append(weakref.ref(model))
        raise InputError

    monkeypatch.setattr(common.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(common.dist, "destroy_process_group", lambda: models.append(models[0]()))
    with pytest.raises(InputError) as error:
        with common.Ranks():
            fail()
    assert models[1] is None  # when the group went
    assert error.traceback[-1].name == "fail"


@pytest.mark.parametrize("variables, message", [
    (dict(WORLD_SIZE="2", RANK="0"), "WORLD_SIZE: requires LOCAL_RANK"),
    (dict(WORLD_SIZE="two"), "WORLD_SIZE: expected a whole number, got 'two'"),
    (dict(WORLD_SIZE="1", RANK=""), "RANK: expected a whole number, got ''"),
    (dict(RANK="1"), "RANK: expected a number below WORLD_SIZE, 1, got 1"),
    (dict(WORLD_SIZE="1", RANK="1"), "RANK: expected a number below WORLD_SIZE, 1, got 1"),
])
def test_rank_that_no_torchrun_has_set_is_refused(monkeypatch, variables, message):
    """Else it would do nothing in silence, as it has no part of the work."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(InputError, match=f"^{message}"):
        common.Ranks()


def test_one_rank_needs_no_distributed_pytorch(monkeypatch):
    """ROCm for Windows has none."""
    monkeypatch.delattr(common.dist, "is_initialized")
    with common.Ranks() as ranks:
        ranks.connect("cpu")
        assert ranks.total(3) == 3
        assert ranks.add_up(dict(a=2)) == dict(a=2)


# Processes and signals


def test_worker_that_cannot_start_ends_the_script_in_one_line():
    done = run_script(ROOT / "tests" / "scripts" / "broken_worker.py", code=2)
    assert done.stderr.splitlines()[-1].startswith("broken_worker.py: worker process: ended early")


def test_start_workers_are_eight_at_most_and_end_with_the_block(monkeypatch):
    monkeypatch.setattr(common, "num_cores", lambda: 64)
    before = multiprocessing.active_children()
    with common.start_workers() as pool:
        assert pool._max_workers == 8
        assert list(pool.map(abs, [-1, -2])) == [1, 2]
        pool.submit(time.sleep, 100)
    give_up = time.time() + 10
    while multiprocessing.active_children() != before and time.time() < give_up:
        time.sleep(0.01)  # the pool's own thread waits for them too, and may be the first
    assert multiprocessing.active_children() == before


@needs_fork  # and the signals of Unix
def test_second_ctrl_c_interrupts_at_once():
    """Slurm sends SIGUSR1 first, and SIGTERM when the time is over."""
    with pytest.raises(KeyboardInterrupt):
        with common.catch_signals() as caught:
            for number in (signal.SIGUSR1, signal.SIGUSR1, signal.SIGTERM):
                signal.raise_signal(number)
            assert caught == [signal.SIGUSR1, signal.SIGUSR1, signal.SIGTERM]
            signal.raise_signal(signal.SIGINT)


@needs_fork
def test_signals_are_those_that_the_system_has(monkeypatch):
    """Windows has Ctrl-Break, and neither SIGHUP nor SIGUSR1."""
    usr1 = signal.SIGUSR1
    before = signal.getsignal(usr1)
    monkeypatch.delattr(signal, "SIGHUP")
    monkeypatch.delattr(signal, "SIGUSR1")
    monkeypatch.setattr(signal, "SIGBREAK", signal.SIGWINCH, raising=False)
    with common.catch_signals() as caught:
        assert signal.getsignal(usr1) == before
        signal.raise_signal(signal.SIGBREAK)
    assert caught == [signal.SIGBREAK]


@needs_fork
def test_signal_that_nohup_ignores_stays_ignored():
    handler = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with common.catch_signals() as caught:
        signal.raise_signal(signal.SIGHUP)
    signal.signal(signal.SIGHUP, handler)
    assert caught == []


# Files


@pytest.mark.parametrize("platform, command", [
    ("linux", "python infer.py 'the cat'"),
    ("win32", 'python infer.py "the cat"'),  # cmd.exe takes ' for a letter
])
def test_command_is_quoted_for_the_shell_of_the_system(monkeypatch, platform, command):
    monkeypatch.setattr(common.sys, "platform", platform)
    assert common.quote_command(["python", "infer.py", "the cat"]) == command


@pytest.mark.parametrize("error", [OSError(37, "No locks available"), NotImplementedError("flock")])
def test_file_system_without_locks_is_named(monkeypatch, tmp_path, error):
    def acquire(*_, **__):
        raise error

    monkeypatch.setattr(common.FileLock, "acquire", acquire)
    path = str(tmp_path / "corpus")
    with pytest.raises(InputError, match=f"^{re.escape(path)}.lock: could not be locked .*--cache"):
        build_once(path, os.mkdir)
    with pytest.raises(InputError, match="Use --out on a local disk"):
        lock_output(str(tmp_path)).__enter__()


def test_lock_in_a_read_only_folder_is_not_said_to_lack_locks(monkeypatch, tmp_path):
    def acquire(lock, timeout):
        raise OSError(30, "Read-only file system", lock.lock_file)

    monkeypatch.setattr(common.FileLock, "acquire", acquire)
    with pytest.raises(OSError, match="Read-only") as error:
        build_once(str(tmp_path / "corpus"), os.mkdir)
    assert error.value.filename == str(tmp_path / "corpus.lock")


@pytest.mark.parametrize("owner, name, make", [
    (Path, "unlink", Path.touch), (common.shutil, "rmtree", Path.mkdir)])
def test_removal_that_a_scanner_stops_is_tried_again(monkeypatch, tmp_path, owner, name, make):
    path = tmp_path / "name"
    make(path)
    monkeypatch.setattr(common, "WAITS", (0, 0))
    monkeypatch.setattr(owner, name, fail_first(getattr(owner, name), num_failures=2))
    common.remove(path)
    assert not path.exists()


@pytest.mark.parametrize("num_failures, is_renamed", [(1, True), (99, False)])
def test_rename_that_a_scanner_stops_is_tried_again(
        monkeypatch, tmp_path, num_failures, is_renamed):
    monkeypatch.setattr(common, "WAITS", (0, 0))
    monkeypatch.setattr(os, "replace", fail_first(os.replace, num_failures))
    path = str(tmp_path / "name")
    if is_renamed:
        build_once(path, os.mkdir)
    else:
        with pytest.raises(PermissionError):
            build_once(path, os.mkdir)
    assert os.path.exists(path) == is_renamed
    assert not os.path.exists(path + ".tmp")


def test_build_once_accepts_a_folder_that_another_process_has_built(tmp_path):
    """On a file system whose locks stop nobody."""
    path = tmp_path / "corpus"

    def build(temporary):
        os.mkdir(temporary)
        path.mkdir()
        (path / "ids.bin").touch()

    build_once(str(path), build)
    assert set(os.listdir(tmp_path)) - {"corpus.lock"} == {"corpus"}  # Windows removes the lock
    assert os.listdir(path) == ["ids.bin"]


def test_new_folder_of_a_refused_run_is_removed(tmp_path):
    folder = tmp_path / "new"
    for names in ([], ["log.jsonl"]):
        with pytest.raises(InputError):
            with lock_output(str(folder)):
                for name in names:
                    (folder / name).touch()
                raise InputError
        assert folder.exists() == bool(names)
    with lock_output(str(tmp_path)):  # an old one stays
        pass
    assert tmp_path.exists()


def test_lock_output_is_held_until_the_block_ends(tmp_path):
    folder = str(tmp_path / "run")
    with lock_output(folder):
        with pytest.raises(InputError, match="in use by another run"):
            with lock_output(folder):
                pass
        with lock_output(folder, rank=1):  # of the same run
            pass
    with lock_output(folder):
        pass


@needs_fork
def test_build_once_from_several_processes_builds_once(tmp_path):
    start = FORK.Barrier(5)
    num_builds = FORK.Value("i", 0)

    def build(path):
        with num_builds.get_lock():
            num_builds.value += 1
        time.sleep(0.2)  # for the others to come, if nothing holds them
        Path(path).write_text("x" * 100_000)

    def child():
        start.wait(30)  # all ask at the same moment
        path = build_once(str(tmp_path / "folder" / "file"), build)
        assert len(Path(path).read_text()) == 100_000

    assert run_in_children(child, count=5) == [0] * 5
    assert num_builds.value == 1


def test_replacing_that_fails_keeps_the_old_file(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("old")
    with pytest.raises(KeyboardInterrupt):
        with common.replacing(path) as temporary:
            Path(temporary).write_text("half")
            raise KeyboardInterrupt
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["a.txt"]


def make_file(path):
    Path(path).touch(exist_ok=False)


@pytest.mark.parametrize("make", [os.mkdir, make_file])
def test_build_once_after_a_failure_builds_anew(make, tmp_path):
    path = str(tmp_path / "name")

    def fail(temporary):
        make(temporary)
        raise OSError(28, "No space left on device")

    message = f"{re.escape(path)}: could not be written .*No space.* disk may"
    with pytest.raises(InputError, match=f"^{message}"):
        build_once(path, fail)
    assert set(os.listdir(tmp_path)) <= {"name.lock"}  # nothing is left of it
    build_once(path, make)  # raises where it is still there
    assert os.path.exists(path)


def test_write_json_from_several_threads_never_fails(tmp_path):
    path = str(tmp_path / "settings.json")
    with ThreadPool(4) as pool:
        pool.map(lambda number: common.write_json(path, dict(number=number)), range(1_200))
    assert common.read_json(path)["number"] in range(1_200)
    assert os.listdir(tmp_path) == ["settings.json"]


def test_fingerprint_is_fixed_and_tells_types_apart():
    """Every machine finds the same files."""
    assert common.fingerprint(["a", 1, None]) == "f79cea04f934"
    assert common.fingerprint(["a", "1", None]) != "f79cea04f934"


# Checkpoints


@pytest.fixture
def path(tmp_path):
    """A checkpoint of step 1."""
    path = tmp_path / "ckpt.pt"
    save_checkpoint(str(path), tiny_model(), dict(split="regex"), step=1)
    return path


class Evil:
    """Unpickled, it would run a command."""

    def __reduce__(self):
        return os.system, ("echo owned",)


def test_load_checkpoint_cannot_run_code(path, capfd):
    torch.save(dict(format=common.FORMAT, config=Evil()), path)
    with pytest.raises(InputError, match="ckpt.pt: could not be read as a checkpoint"):
        load_checkpoint(str(path))
    assert "owned" not in capfd.readouterr().out


def cut(path):
    path.write_bytes(path.read_bytes()[:-99])


def change_format(path):
    torch.save(dict(format=3), path)


def drop_config(path):
    torch.save(dict(format=common.FORMAT, model={}), path)


@pytest.mark.parametrize("damage, message", [
    (cut, "could not be read"),
    (change_format, f"expected checkpoint format {common.FORMAT}, got 3"),
    (drop_config, "expected a checkpoint with config, got format, model"),
])
def test_load_checkpoint_that_is_not_whole_is_refused(path, damage, message):
    damage(path)
    with pytest.raises(InputError, match=f"^{re.escape(str(path))}: {message}"):
        load_checkpoint(str(path))


@pytest.mark.parametrize("head", HEADS)
def test_older_checkpoint_is_loaded_by_its_names(head, path):
    """They had no `inputs`, and heads were nn.Linear and nn.Sequential."""
    net = tiny_model(head=head, emb="lookup" if head == "mlm" else "mean", tied=False)
    old_weights = {"adapter.weight": torch.zeros(3)}  # what no version knows keeps its name
    for name, weight in net.state_dict().items():
        name = name.removeprefix("inputs.").replace("head.linear.", "head.")
        name = name.replace("head.dense.", "head.1.").replace("head.out.", "head.4.")
        old_weights[name] = weight
    save_checkpoint(str(path), net, {})
    torch.save(torch.load(path) | dict(model=old_weights), path)

    checkpoint = load_checkpoint(str(path))

    assert "adapter.weight" in checkpoint["model"]
    del checkpoint["model"]["adapter.weight"]
    loaded = load_model(checkpoint)
    for name, weight in net.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], weight)


def test_save_checkpoint_with_nan_weights_keeps_the_old_one(path):
    model = tiny_model()
    model.inputs.norm.weight.data[-1] = torch.nan
    with pytest.raises(InputError, match="^--lr: expected finite weights"):
        save_checkpoint(str(path), model, {}, step=2)
    assert load_checkpoint(str(path))["step"] == 1


def save_with_full_disk(path):
    import resource  # not on Windows
    resource.setrlimit(resource.RLIMIT_FSIZE, (2_000, 2_000))
    with pytest.raises(InputError, match="could not be written"):
        save_checkpoint(path, tiny_model(), {}, step=2)
    assert not os.path.exists(path + ".tmp")


def save_and_die(path):
    def write_half(parts, temporary):
        Path(temporary).write_text("half")
        os.kill(os.getpid(), signal.SIGKILL)

    torch.save = write_half  # in the child alone
    save_checkpoint(path, tiny_model(), {}, step=2)


@needs_fork
@pytest.mark.parametrize("save, code", [(save_with_full_disk, 0), (save_and_die, -9)])  # SIGKILL
def test_save_checkpoint_that_fails_keeps_the_old_one(path, save, code):
    assert run_in_children(lambda: save(str(path))) == [code]
    assert load_checkpoint(str(path))["step"] == 1
    save_checkpoint(str(path), tiny_model(), {}, step=3)  # over the half file
    assert load_checkpoint(str(path))["step"] == 3
    assert os.listdir(path.parent) == ["ckpt.pt"]
