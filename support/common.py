"""What every script needs: errors of one line, devices, ranks, files built once, checkpoints.

Out of scope: models and data. model.load_model turns a checkpoint into a Model.
"""

import argparse
import contextlib
import dataclasses
import datetime
import gc
import hashlib
import io
import json
import multiprocessing
import os
import shutil
import signal
import sys
import traceback
import uuid
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from filelock import FileLock, Timeout
from torch.nn.parallel import DistributedDataParallel

FORMAT = 6  # checkpoints of another format are refused
COMPILERS = ("c++", "g++", "clang++", "cl")  # what torch.compile looks for


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
        sys.stdout.flush()
        return result
    except BrokenPipeError:  # what reads stdout has left, such as head
        # subtle: Python flushes stdout at exit and would raise again: point it at /dev/null
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(1)
    except KeyboardInterrupt:
        print(f"{name}: Interrupted.", file=sys.stderr)
        raise SystemExit(130)
    except (InputError, OSError, UnicodeError, MemoryError, torch.OutOfMemoryError) as error:
        reason = " ".join(str(error).split())  # one line
        if not reason:  # a MemoryError has no text
            reason = type(error).__name__
        print(f"{name}: {reason}", file=sys.stderr)
        raise SystemExit(2)
    finally:
        if dist.is_initialized():
            # subtle: DDP must be freed before its process group, or its destructor can deadlock. It
            # is a local variable of train, which a traceback keeps alive: clear the frames of the
            # error, and of those that it replaced
            error = sys.exc_info()[1]
            while error is not None:
                traceback.clear_frames(error.__traceback__)
                error = error.__context__
            gc.collect()
            dist.destroy_process_group()


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

    For other libraries, which raise many types of errors about a file. Errors of our own code would
    hide in such a block. The line is cut at 200 characters.
    """
    try:
        yield
    except (InputError, FileNotFoundError, PermissionError):  # these name the file already
        raise
    except Exception as error:
        reason = f"could not be read ({type(error).__name__}: {error})"[:200]
        raise InputError(f"{source}: {reason}") from error


def at_least(minimum, kind=int, maximum=2**31 - 1):
    """Return an argparse type: a number of `kind` from minimum to maximum. NaN is refused."""
    def number(text):
        value = kind(text)  # argparse reports a ValueError as "invalid number value"
        if not minimum <= value <= maximum:
            raise argparse.ArgumentTypeError(f"expected {minimum} to {maximum}, got {text}")
        return value
    return number


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
        help="cpu, cuda, or auto: CUDA if present (default: auto)")
    add("--dtype", choices=("auto", "float32", "bfloat16"),
        help="dtype of matrix products; auto: bfloat16 where the hardware has it (default: auto)")
    add("--compile", action=argparse.BooleanOptionalAction,
        help="compile the encoder with torch.compile (default: pretrain.py does, on CUDA)")


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
    use_compile = args.compile
    if use_compile is None:
        use_compile = device.type == "cuda"
    if use_compile and not any(shutil.which(name) for name in COMPILERS):
        raise InputError("--compile: requires a C++ compiler, such as g++. Use --no-compile.")
    return Runtime(device, dtype, use_compile)


def has_fast_bfloat16(device):
    """Return whether a device multiplies bfloat16 in hardware, as far as PyTorch can say."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if not hasattr(torch.cpu, "get_capabilities"):  # torch 2.8 cannot say
        return False
    features = torch.cpu.get_capabilities()
    return any(features.get(name) for name in ("amx_bf16", "avx512_bf16", "bf16"))


def autocast(device, dtype):
    """Return a context in which matrix products are in `dtype`, and sums in float32."""
    return torch.autocast(device.type, torch.bfloat16, enabled=dtype == "bfloat16")


def send(tensor, device):
    """Return a tensor on a device, or None for None. The CPU does not wait for the copy."""
    if tensor is None:
        return None
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


# -----------------------------------------------------------------------------
# Ranks: torchrun starts several processes of a script


class Ranks:
    """The processes that torchrun starts, one for each GPU; without torchrun this process alone.

    With one rank every method does nothing, so a script has no other code for it.

    Attributes:
        rank: int, the number of this process.
        world: int, how many there are.
        local_rank: int, the number of this process on its machine, and of its GPU.
        is_first: bool, whether this is rank 0, which prints and writes.
    """

    def __init__(self):
        self.rank = int(os.environ.get("RANK", 0))
        self.world = int(os.environ.get("WORLD_SIZE", 1))
        self.local_rank = int(os.environ.get("LOCAL_RANK", 0))
        self.is_first = self.rank == 0

    def connect(self, device_type, **patience):
        """Find the other ranks. patience: how long one waits for the others, such as hours=12."""
        if self.world > 1:
            # nccl adds up gradients; gloo what the host counts, so that no step waits for the GPU
            dist.init_process_group("cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo")
            timeout = datetime.timedelta(**patience)
            self.patient_group = dist.new_group(backend="gloo", timeout=timeout)

    def share(self, count):
        """Return this rank's part of the numbers 0 .. count - 1, an int array."""
        return np.array_split(np.arange(count), self.world)[self.rank]

    def sum(self, tensor):
        """Return the sum of a tensor over the ranks, which replaces it."""
        if self.world > 1:
            dist.all_reduce(tensor)
        return tensor

    def gather(self, value):
        """Return the list of all ranks' values, which are pickled."""
        if self.world == 1:
            return [value]
        values = [None] * self.world
        dist.all_gather_object(values, value)
        return values

    def wait(self):
        """Wait until all ranks are here, as long as connect says. Other methods wait minutes."""
        if self.world > 1:
            dist.barrier(self.patient_group)

    def wrap(self, model):
        """Return a model whose gradients are the means over the ranks after backward."""
        if self.world > 1:
            return DistributedDataParallel(model)
        return model


# -----------------------------------------------------------------------------
# Processor cores and signals


def num_cores():
    """Return how many processor cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count()


def start_workers():
    """Return a multiprocessing.Pool on all cores. Ctrl-C interrupts this process alone."""
    # each worker begins with signal.signal(SIGINT, SIG_IGN)
    return multiprocessing.Pool(num_cores(), signal.signal, (signal.SIGINT, signal.SIG_IGN))


@contextlib.contextmanager
def catch_signals():
    """Collect SIGTERM and Ctrl-C in the list that the block receives, instead of ending at once."""
    caught = []

    def catch(number, frame):
        caught.append(number)

    handlers = {}
    for number in (signal.SIGTERM, signal.SIGINT):
        handlers[number] = signal.signal(number, catch)
    try:
        yield caught
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


# -----------------------------------------------------------------------------
# Files


def lock_output(folder, rank=0):
    """Make a run's folder and return a context in which rank 0 holds it.

    The system releases the lock if we are killed.

    Raises:
        InputError: Another run holds the folder.
    """
    if rank > 0:
        return contextlib.nullcontext()
    os.makedirs(folder, exist_ok=True)
    lock = FileLock(os.path.join(folder, ".lock"))
    try:
        return lock.acquire(timeout=0)
    except Timeout as error:
        raise InputError(f"--out {folder}: in use by another run. Use another --out.") from error


def remove(path):
    """Remove a file, or a folder with its contents, if it is there."""
    if os.path.isdir(path):
        shutil.rmtree(path)
    else:
        Path(path).unlink(missing_ok=True)


def build_once(path, build, *args):
    """Return path. If it does not exist, one process makes it, and others wait.

    Args:
        path: str, a file or folder.
        build: function of a temporary path and args, which makes it there. Then it is renamed.
    """
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with FileLock(path + ".lock"):
        if not os.path.exists(path):
            remove(path + ".tmp")  # left by a process that was killed
            try:
                build(path + ".tmp", *args)
                os.replace(path + ".tmp", path)
            except BaseException:  # Ctrl-C too
                remove(path + ".tmp")
                raise
    return path


def fingerprint(value):
    """Return twelve hex digits that identify a value of plain types. The order of keys counts."""
    return hashlib.md5(json.dumps(value).encode(), usedforsecurity=False).hexdigest()[:12]


def read_json(path):
    """Return the content of a .json file of ours, a dict."""
    with reading(path):
        return dict(json.loads(Path(path).read_text()))


def write_json(path, content):
    """Write a .json file: a crash leaves the old one or the new one."""
    temporary = f"{path}.{uuid.uuid4()}.tmp"  # several processes may write the same file at once
    Path(temporary).write_text(json.dumps(content, indent=1))
    os.replace(temporary, path)


# -----------------------------------------------------------------------------
# Checkpoints


def save_checkpoint(path, model, tokenizer, **more):
    """Write a checkpoint beside the old one, then replace it: a crash leaves one of the two intact.

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
    try:
        torch.save(parts | more, path + ".tmp")
        os.replace(path + ".tmp", path)
    except (OSError, RuntimeError) as error:  # torch reports a full disk as a RuntimeError
        remove(path + ".tmp")  # the disk would stay full
        raise InputError(f"{path}: could not be saved ({error}). An earlier file is "
                         "unchanged.") from error


def find_checkpoint(path):
    """Return the path of a checkpoint's file: the path itself, or ckpt.pt in that folder."""
    if os.path.isdir(path):
        return os.path.join(path, "ckpt.pt")
    return path


def load_checkpoint(path):
    """Return the parts of a checkpoint, a file or a folder's ckpt.pt. It cannot run code.

    Raises:
        InputError: It is missing, damaged, or of another format.
    """
    path = find_checkpoint(path)
    if not os.path.isfile(path):
        raise InputError(f"{path}: no checkpoint found. Train one with pretrain.py, or give its "
                         "folder.")
    try:
        parts = torch.load(path, map_location="cpu", weights_only=True)
        version = parts["format"]
    except Exception as error:  # torch's own message would advise to let the file run code
        raise InputError(f"{path}: could not be read as a checkpoint "
                         f"({type(error).__name__}).") from error
    if version != FORMAT:
        raise InputError(f"{path}: expected checkpoint format {FORMAT}, got {version}. Train it "
                         "again.")
    return parts
