"""What every script needs: errors of one line, devices, ranks, files built once, checkpoints.

Out of scope: models and data. model.load_model turns a checkpoint into a Model.
"""

import argparse
import contextlib
import dataclasses
import datetime
import functools
import gc
import hashlib
import importlib.util
import io
import json
import multiprocessing
import os
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import threading
import time
import traceback
import uuid
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from filelock import FileLock, Timeout
from torch.nn.parallel import DistributedDataParallel

FORMAT = 6  # checkpoints of another format are refused
COMPILERS = ("c++", "g++", "clang++", "cl")  # what torch.compile looks for
TRITON_CAPABILITY = (7, 0)  # of CUDA: Volta and later
MAX_WORKERS = 8  # of start_workers: where they are not forked each imports torch, for seconds
# What ends a run besides Ctrl-C and SIGTERM, where the system has it: a closed terminal, Slurm's
# warning before the time is over, Ctrl-Break
OTHER_SIGNALS = ("SIGHUP", "SIGUSR1", "SIGBREAK")
# Seconds between two tries to rename or remove a file: on Windows several writers of one file stop
# each other for a moment, and a scanner for longer
WAITS = (*[0.02] * 20, 0.1, 0.5, 2.0)


# -----------------------------------------------------------------------------
# Bad input: one line and exit code 2


class InputError(ValueError):
    """A flag or a file of the user is at fault, not the program."""


def run_script(name, function, *args):
    """Return function(*args). Print one line and exit with code 2 where the input is at fault.

    OSError, UnicodeError and out-of-memory errors count as bad input, too. Ctrl-C exits with code
    130. An error of the program itself keeps its traceback.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # UTF-8, whatever the locale says
            stream.reconfigure(encoding="utf-8", errors="backslashreplace")
    try:
        result = function(*args)
        print(end="", flush=True)  # there may be no sys.stdout
        return result
    except BrokenPipeError:  # what reads stdout has left, such as head
        # subtle: Python flushes stdout at exit and would raise again: point it at /dev/null
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(1)
    except KeyboardInterrupt:
        # a second one ends the process at once, without a traceback of what Python does at exit
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        print(f"{name}: Interrupted.", file=sys.stderr)
        raise SystemExit(130)
    except (InputError, OSError, UnicodeError, MemoryError, torch.OutOfMemoryError) as error:
        reason = " ".join(str(error).split())  # one line
        if not reason:  # a MemoryError has no text
            reason = type(error).__name__
        if isinstance(error, OSError) and error.filename is not None and error.filename2 is None:
            reason = f"{error.filename}: {error.strerror}"
        print(f"{name}: {reason}", file=sys.stderr)
        raise SystemExit(2)


@contextlib.contextmanager
def blame(source=""):
    """Turn a ValueError of the block into an InputError: "source: what the ValueError says".

    For our own checks, whose text helps the user. `reading` is for other libraries.
    """
    try:
        yield
    except InputError:  # it names the flag or the file already
        raise
    except ValueError as error:
        text = f"{source}: {error}" if source else str(error)
        raise InputError(text) from error


@contextlib.contextmanager
def reading(source):
    """Turn any error of the block into an InputError: "source: could not be read".

    For calls of other libraries, which raise many types of errors about a file, and for nothing
    else: an error of our own code would hide in the block. Our own code raises a ValueError about a
    file, and `blame` names the file. The line is cut at 200 characters.
    """
    try:
        yield
    except (InputError, FileNotFoundError, PermissionError):  # these name the file already
        raise
    except Exception as error:
        reason = f"could not be read ({type(error).__name__}: {error})"[:200]
        raise InputError(f"{source}: {reason}") from error


@contextlib.contextmanager
def writing(path):
    """Turn an OSError of the block that names no file into an InputError: path, and the reason.

    The error of a full disk is one of these.
    """
    try:
        yield
    except OSError as error:
        if error.filename is not None:
            raise
        raise InputError(f"{path}: could not be written ({error}). The disk may be "
                         "full.") from error


def at_least(minimum, kind=int, maximum=2**31 - 1):
    """Return an argparse type: a number of `kind` from minimum to maximum. NaN is refused."""
    def number(text):
        value = kind(text)  # argparse reports a ValueError as "invalid number value"
        if not minimum <= value <= maximum:
            raise argparse.ArgumentTypeError(f"expected {minimum} to {maximum}, got {text}")
        return value
    return number


def quote_command(words):
    """Return a command, a list of str, as the shell of this system takes it."""
    if sys.platform == "win32":
        return subprocess.list2cmdline(words)
    return shlex.join(words)


def make_parser(script, doc, **options):
    """Return an ArgumentParser whose --help begins with the commands in doc, a file's docstring."""
    commands = (doc or "").split("\nSources")[0]  # python -OO has no doc
    return argparse.ArgumentParser(
        allow_abbrev=False, prog=script, description=commands,
        formatter_class=argparse.RawDescriptionHelpFormatter, **options)


# -----------------------------------------------------------------------------
# Device


def add_device_flags(add):
    """Add --device, --dtype and --compile, without defaults, by `add`, a parser's add_argument."""
    add("--device", metavar="NAME",
        help="cpu, cuda, or auto: CUDA if present; mps and xpu are not tested (default: auto)")
    add("--dtype", choices=("auto", "float32", "bfloat16"),
        help="dtype of matrix products; auto: bfloat16 where the hardware has it (default: auto)")
    add("--compile", action=argparse.BooleanOptionalAction,
        help="compile the encoder with torch.compile (default: in pre-training on CUDA alone)")


def find_device(name, local_rank=0):
    """Return the torch.device of a name: cpu, cuda, or auto."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda":
        name = f"cuda:{local_rank}"
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()  # fails where it is not there
    except Exception as error:  # each backend of torch raises its own
        raise InputError(f"--device: expected cpu or a device that is here, got {name}.") from error
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


class Runtime(NamedTuple):
    """Where a model runs, and how, see resolve_device."""

    device: torch.device
    dtype: str  # of matrix products: "float32" or "bfloat16"
    use_compile: bool  # compile the encoder


def resolve_device(args, local_rank=0):
    """Return the Runtime of --device, --dtype and --compile."""
    device = find_device(args.device, local_rank)
    dtype = args.dtype
    if dtype == "auto":
        dtype = "bfloat16" if has_fast_bfloat16(device) else "float32"

    if args.device == "auto" and device.type == "cpu" and shutil.which("nvidia-smi"):
        if local_rank == 0:
            print("note: found nvidia-smi, but this PyTorch uses no GPU. pytorch.org has the "
                  "command that installs one with CUDA", file=sys.stderr)

    # By default pretrain.py compiles on CUDA, where that is possible
    use_compile = args.compile
    if use_compile is None:
        use_compile = device.type == "cuda"
    missing_part = find_missing_part(device) if use_compile else None
    if missing_part is not None:
        if args.compile:
            raise InputError(f"--compile: requires {missing_part}. Use --no-compile.")
        use_compile = False
        if local_rank == 0:
            print(f"note: runs slower, without torch.compile, which requires {missing_part}",
                  file=sys.stderr)
    return Runtime(device, dtype, use_compile)


def find_missing_part(device):
    """Return what torch.compile needs and does not find here, str, or None."""
    if not any(shutil.which(name) for name in COMPILERS):
        return "a C++ compiler, such as g++"
    if sys.platform == "linux":
        header = Path(sysconfig.get_path("include"), "Python.h")
        if not header.exists():
            return f"{header}, which is in the package python3-dev"
    if device.type == "cuda":
        if importlib.util.find_spec("triton") is None:
            return "Triton, which is here for Linux alone"
        if torch.cuda.get_device_capability(device) < TRITON_CAPABILITY:
            return "a GPU of compute capability 7.0, for Triton"
    return None


def has_fast_bfloat16(device):
    """Return whether a device multiplies bfloat16 in hardware, as far as PyTorch can say."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    # PyTorch cannot say it of other devices. On the CPU oneDNN makes use of it. Builds for macOS
    # lack oneDNN, and there bfloat16 is ten times slower than float32
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if not hasattr(torch.cpu, "get_capabilities"):  # torch 2.8 cannot say
        return False
    features = torch.cpu.get_capabilities()
    return any(features.get(name) for name in ("amx_bf16", "avx512_bf16", "bf16"))


def autocast(device, dtype):
    """Return a context in which matrix products are in `dtype`, and sums in float32."""
    return torch.autocast(device.type, torch.bfloat16, enabled=dtype == "bfloat16")


def send(tensor, device):
    """Return a tensor on a device, or None for None. The CPU does not wait for a copy to CUDA."""
    if tensor is None:
        return None
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    # subtle: others must wait. The memory may be freed before they have read it
    return tensor.to(device)


# -----------------------------------------------------------------------------
# Ranks: torchrun starts several processes of a script


class Ranks:
    """The processes that torchrun starts, one for each GPU; without torchrun this process alone.

        with Ranks() as ranks:
            ranks.connect("cuda", hours=12)
            ...                                 they leave each other at the end of the block

    With one rank every method does nothing, so a script has no other code for it.

    Attributes:
        rank: int, the number of this process.
        world: int, how many there are.
        local_rank: int, the number of this process on its machine, and of its GPU.
        is_first: bool, whether this is rank 0, which prints and writes.
    """

    def __init__(self):
        self.world = read_variable("WORLD_SIZE", 1)
        if self.world > 1:
            for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
                if name not in os.environ:
                    raise InputError(f"WORLD_SIZE: requires {name}, which torchrun sets. Use "
                                     "torchrun, or unset WORLD_SIZE.")
        self.rank = read_variable("RANK", 0)
        self.local_rank = read_variable("LOCAL_RANK", 0)
        if self.rank >= self.world:  # it would have no part of the work
            raise InputError(f"RANK: expected a number below WORLD_SIZE, {self.world}, got "
                             f"{self.rank}. Use torchrun, or unset both.")
        self.is_first = self.rank == 0

    def connect(self, device_type, **patience):
        """Find the other ranks. patience: how long one waits for the others, such as hours=12."""
        if self.world > 1:
            # nccl adds up gradients; gloo what the host counts, so that no step waits for the GPU
            dist.init_process_group("cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo")
            timeout = datetime.timedelta(**patience)
            self.patient_group = dist.new_group(backend="gloo", timeout=timeout)

    def __enter__(self):
        return self

    def __exit__(self, error_class, error, trace):
        """Leave the other ranks, after connect, whatever has ended the block."""
        if self.world == 1 or not dist.is_initialized():
            return
        # subtle: the result of wrap must be freed before the process group, or its destructor can
        # deadlock. After an error the traceback keeps the variables of all functions: clear those
        # of the error, and of those that it replaced
        while error is not None:
            traceback.clear_frames(error.__traceback__)
            error = error.__context__
        gc.collect()
        dist.destroy_process_group()

    def share(self, count):
        """Return this rank's part of the numbers 0 .. count - 1, an int array."""
        return np.array_split(np.arange(count), self.world)[self.rank]

    def total(self, number):
        """Return the sum of a number over the ranks. It is made on the host."""
        if self.world == 1:
            return number
        tensor = torch.from_numpy(np.array(number))  # int64 or float64
        dist.all_reduce(tensor)
        return tensor.item()

    def gather(self, value):
        """Return the list of all ranks' values, which are pickled."""
        if self.world == 1:
            return [value]
        values = [None] * self.world
        dist.all_gather_object(values, value)
        return values

    def add_up(self, numbers):
        """Return the sums over the ranks of a dict of numbers or arrays; some rank may have {}."""
        totals = {}
        for part in self.gather(numbers):
            for name, value in part.items():
                totals[name] = totals.get(name, 0) + value
        return totals

    def wait(self):
        """Wait until all ranks are here, as long as connect says. Other methods wait minutes."""
        if self.world > 1:
            dist.barrier(self.patient_group)

    def wrap(self, model):
        """Return a model whose gradients are the means over the ranks after backward."""
        if self.world > 1:
            return DistributedDataParallel(model)
        return model


def read_variable(name, default):
    """Return the whole number, 0 or more, in a variable of the environment; default: unset."""
    text = os.environ.get(name, str(default))
    if not text.isdecimal():
        raise InputError(f"{name}: expected a whole number, got {text!r}. Use torchrun, or unset "
                         f"{name}.")
    return int(text)


# -----------------------------------------------------------------------------
# Processor cores and signals


def num_cores():
    """Return how many processor cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count()


@contextlib.contextmanager
def start_workers():
    """Return a context with a ProcessPoolExecutor on all cores, eight at most.

    Ctrl-C interrupts this process alone, and then ends the others, whatever they are doing. They
    end with this process, too, if it is killed.
    """
    pool = ProcessPoolExecutor(min(num_cores(), MAX_WORKERS), initializer=begin_worker)
    with ending_children():
        try:
            yield pool
        except BrokenProcessPool as error:
            raise InputError("worker process: ended early. Its error is above; without one it was "
                             "killed. Use a machine with more memory.") from error
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def begin_worker():
    """Prepare this process, a worker: it ignores Ctrl-C, and ends when its parent has ended."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=end_with_parent, daemon=True).start()


def end_with_parent():
    """Wait for the parent of this process, and end.

    A forked worker holds the locks of its parent: if it stayed, the same command could not resume.
    """
    multiprocessing.parent_process().join()
    os._exit(1)


@contextlib.contextmanager
def ending_children():
    """Kill the processes that the block has started, however it ends.

    Python waits for them when it exits, which is forever if one is stuck.
    """
    before = multiprocessing.active_children()
    try:
        yield
    finally:
        for child in multiprocessing.active_children():
            if child not in before:
                # subtle: a DataLoader hears of the end of its worker, and raises an error here
                with contextlib.suppress(RuntimeError):
                    child.kill()
                    child.join()


@contextlib.contextmanager
def catch_signals():
    """Collect SIGTERM, Ctrl-C and OTHER_SIGNALS in the list that the block receives.

    The block reads the list between two steps. A second SIGTERM or Ctrl-C does not wait for that,
    and raises KeyboardInterrupt.
    """
    caught = []
    urgent = [signal.SIGTERM, signal.SIGINT]

    def catch(number, frame):
        is_second = number in urgent and any(other in urgent for other in caught)
        caught.append(number)
        if is_second:
            raise KeyboardInterrupt

    numbers = list(urgent)
    for name in OTHER_SIGNALS:
        number = getattr(signal, name, None)
        # nohup ignores SIGHUP, and so do we then
        if number is not None and signal.getsignal(number) != signal.SIG_IGN:
            numbers.append(number)
    handlers = {}
    for number in numbers:
        handlers[number] = signal.signal(number, catch)
    try:
        yield caught
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


# -----------------------------------------------------------------------------
# Files


@contextlib.contextmanager
def lock_output(folder, rank=0):
    """Make a run's folder, and let rank 0 hold it for the block.

    The system releases the lock if we are killed. A new folder in which nothing was written, as the
    run was refused, is removed.

    Raises:
        InputError: Another run holds the folder.
    """
    if rank > 0:
        yield
        return
    is_new = not os.path.isdir(folder)
    os.makedirs(folder, exist_ok=True)
    try:
        lock = acquire_lock(os.path.join(folder, ".lock"), "--out", timeout=0)
    except Timeout as error:
        raise InputError(f"--out {folder}: in use by another run. Use another --out.") from error
    try:
        with lock:
            yield
    finally:
        if is_new and set(os.listdir(folder)) <= {".lock"}:  # on Windows it is gone by now
            remove(folder)


def acquire_lock(path, flag, timeout=-1):
    """Return a context that holds the lock file at path, made for the folder of a flag.

    Raises:
        InputError: The file system has no locks, such as some network file systems.
        Timeout: Another process holds it after so many seconds; -1: wait for it.
    """
    try:
        return FileLock(path).acquire(timeout=timeout)
    except Timeout:
        raise
    except (OSError, NotImplementedError) as error:
        if getattr(error, "filename", None) is not None:  # a read-only folder, which it names
            raise
        raise InputError(f"{path}: could not be locked ({error}). Use {flag} on a local "
                         "disk.") from error


def remove(path):
    """Remove a file, or a folder with its contents, if it is there. Try again, as try_again."""
    if os.path.isdir(path):
        try_again(shutil.rmtree, path)
    else:
        try_again(functools.partial(Path(path).unlink, missing_ok=True))


def rename(old_path, new_path):
    """Rename a file or folder. Try again, as try_again."""
    try_again(os.replace, old_path, new_path)


def try_again(function, *args):
    """Call a function of files, again where a scanner of Windows, or NFS, holds one a moment."""
    for seconds in WAITS:
        try:
            function(*args)
            return
        except PermissionError:
            time.sleep(seconds)
    function(*args)


@contextlib.contextmanager
def replacing(path, ending="tmp"):
    """Write a file or folder beside its place, then rename it: a crash leaves the old or the new.

        with replacing("a.json") as temporary:
            Path(temporary).write_text("{}")

    Where several processes write the same path at once, each needs another ending.
    """
    temporary = f"{path}.{ending}"
    remove(temporary)  # left by a process that was killed
    try:
        with writing(path):
            yield temporary
        if os.path.isdir(path):  # built meanwhile by a process that its lock did not stop
            remove(temporary)
        else:
            rename(temporary, path)
    except BaseException:  # Ctrl-C too. A full disk would stay full
        remove(temporary)
        raise


def build_once(path, build, *args):
    """Return path. If it does not exist, one process makes it, and others wait.

    Args:
        path: str, a file or folder.
        build: function of a temporary path and args, which makes it there.
    """
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with acquire_lock(path + ".lock", "--cache"):
        if not os.path.exists(path):
            with replacing(path) as temporary:
                build(temporary, *args)
    return path


def fingerprint(value):
    """Return twelve hex digits that identify a value of plain types. The order of keys counts."""
    return hashlib.md5(json.dumps(value).encode(), usedforsecurity=False).hexdigest()[:12]


def list_changes(old, new):
    """Return how settings, a dict, differ from old ones, list of str. A secret key is not shown.

    A setting that old alone has does not count: it may change, or nothing reads it now.
    """
    changes = []
    for name, value in new.items():
        if old.get(name) == value:
            continue
        if name == "key":
            changes.append("key differs")
        else:
            changes.append(f"{name} was {old.get(name)} and is {value}")
    return changes


def read_json(path):
    """Return the content of a .json file of ours, a dict."""
    with reading(path):
        return dict(json.loads(Path(path).read_text("utf-8")))


def write_json(path, content):
    """Write a .json file. Several processes may write the same one at once."""
    with replacing(path, f"{uuid.uuid4()}.tmp") as temporary:
        Path(temporary).write_text(json.dumps(content, indent=1))


# -----------------------------------------------------------------------------
# Checkpoints


def save_checkpoint(path, model, tokenizer, **more):
    """Write a checkpoint: a crash leaves an earlier one or the new one.

    Args:
        path: str.
        model: nn.Module with a dataclass config.
        tokenizer: dict, HashTokenizer.state().
        more: other parts, plain types and tensors: optimizer, words, task, and run: the settings
            of pretrain.py or the results of finetune.py.

    Raises:
        InputError: A weight is not finite, or the disk is full. An earlier file is unchanged.
    """
    weights = model.state_dict()
    are_finite = [weight.isfinite().all() for weight in weights.values()]
    if not torch.stack(are_finite).all():  # a single wait for a GPU
        raise InputError(f"--lr: expected finite weights, got NaN or infinity. {path} was not "
                         "written. Try a lower --lr.")
    config = dataclasses.asdict(model.config)
    parts = dict(format=FORMAT, config=config, model=weights, tokenizer=tokenizer)
    with replacing(path) as temporary:
        save_parts(parts | more, temporary)


def save_parts(parts, path):
    """Write plain types and tensors to a file. An error, such as of a full disk, is an OSError."""
    try:
        torch.save(parts, path)
    except RuntimeError as error:
        raise OSError(str(error)) from error


def find_checkpoint(path):
    """Return the path of a checkpoint's file: the path itself, or ckpt.pt in that folder."""
    if os.path.isdir(path):
        return os.path.join(path, "ckpt.pt")
    return path


def load_checkpoint(path):
    """Return the parts of a checkpoint, a file or a folder's ckpt.pt. It cannot run code.

    The weights, parts["model"], have today's names, however old the file is.

    Raises:
        InputError: It is missing, damaged, or of another format.
    """
    path = find_checkpoint(path)
    if not os.path.isfile(path):
        raise InputError(f"{path}: no checkpoint found. Train one with pretrain.py, give its "
                         "folder, or run an interrupted command again.")
    try:
        parts = torch.load(path, map_location="cpu", weights_only=True)
        version = parts["format"]
    except Exception as error:  # torch's own message would advise to let the file run code
        raise InputError(f"{path}: could not be read as a checkpoint "
                         f"({type(error).__name__}).") from error
    if version != FORMAT:
        raise InputError(f"{path}: expected checkpoint format {FORMAT}, got {version}. Train it "
                         "again.")
    for name in ("config", "model", "tokenizer"):
        if name not in parts:
            raise InputError(f"{path}: expected a checkpoint with {name}, got {', '.join(parts)}.")
    parts["model"] = rename_weights(parts["model"])
    return parts


# How names of weights began in older checkpoints, and begin today
OLD_NAMES = {
    "embedding.": "inputs.embedding.",
    "specials.": "inputs.specials.",
    "positions.": "inputs.positions.",
    "types.": "inputs.types.",
    "norm.": "inputs.norm.",
    "head.1.": "head.dense.",
    "head.4.": "head.out.",
}
OLD_LINEAR = {  # heads of one layer; the bias alone is that of a table, as today
    "head.weight": "head.linear.weight",
    "head.bias": "head.linear.bias",
}


def rename_weights(weights):
    """Return the weights of a checkpoint by today's names, dict, name -> tensor.

        norm.weight -> inputs.norm.weight        head.4.bias -> head.out.bias
    """
    names = OLD_NAMES
    if "head.weight" in weights:
        names = OLD_NAMES | OLD_LINEAR
    renamed = {}
    for name, weight in weights.items():
        for old, new in names.items():
            if name.startswith(old):
                name = new + name.removeprefix(old)
                break
        renamed[name] = weight
    return renamed
