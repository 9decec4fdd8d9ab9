"""Run a script on a machine: device and dtype, ranks and signals, locks on files, checkpoints.

Out of scope: models and data. A checkpoint is a plain dict here; model.py turns it into a Model.
"""

import argparse
import contextlib
import dataclasses
import glob
import hashlib
import json
import os
import shutil
import signal
import sys
import zipfile

import torch
import torch.distributed as dist
from filelock import FileLock

FORMAT = 2  # of checkpoints; each has the first three of these parts
PARTS = dict(config=dict, model=dict, encoder=dict, words=list, task=dict, run=dict, optimizer=dict, step=int)


class InputError(ValueError):
    """A flag, a file or a checkpoint is at fault, not the program. Scripts print it and exit with code 2."""


@contextlib.contextmanager
def exit_on_bad_input(script):
    """Turn an InputError or OSError (no space, no permission) into one line on stderr and exit code 2."""
    try:
        yield
    except (InputError, OSError) as error:
        print(f"{script}: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


@contextlib.contextmanager
def blame_input(source=""):
    """Raise a plain ValueError of the block as InputError: the user's `source`, a flag or file, caused it."""
    try:
        yield
    except ValueError as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{source}: {error}" if source else str(error)) from error


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Keep the line breaks of descriptions, and print every default that is a value."""

    def _get_help_string(self, action):
        return action.help if action.default in (None, False) else super()._get_help_string(action)


def at_least(minimum, kind=int):
    """Return an argparse type: a number of `kind`, `minimum` or larger."""
    def number(text):
        if kind(text) >= minimum:  # NaN is not
            return kind(text)
        raise argparse.ArgumentTypeError(f"expected {minimum} or more, got {text}")
    return number


def add_device_flags(group):
    """Add --device, --dtype and --compile to an argparse group."""
    group.add_argument("--device", default="auto", metavar="NAME", help="cpu, cuda, or auto: CUDA if present")
    group.add_argument("--dtype", choices=("auto", "float32", "bfloat16"), default="auto",
                       help="dtype of matrix products; auto: bfloat16 where the device has it in hardware")
    group.add_argument("--compile", action=argparse.BooleanOptionalAction,
                       help="compile the encoder with torch.compile (default: on CUDA only)")


def resolve_device(args, local_rank=0):
    """Resolve --device, --dtype and --compile on this machine.

    Args: args Namespace with device, dtype and compile; local_rank int, which of the GPUs "cuda" means.
    Returns: torch.device, dtype "float32" or "bfloat16", bool whether to compile.
    Raises: InputError, this PyTorch cannot use the device.
    """
    name = ("cuda" if torch.cuda.is_available() else "cpu") if args.device == "auto" else args.device
    try:
        device = torch.device(name, local_rank) if name == "cuda" else torch.device(name)
        torch.zeros((), device=device).item()  # does it exist?
        if device.type == "cuda":
            torch.cuda.set_device(device)
    except (RuntimeError, AssertionError, AttributeError) as error:
        raise InputError(f"--device: expected cpu or a device that is here, got {name}.") from error
    dtype, is_cuda = args.dtype, device.type == "cuda"
    if dtype == "auto":
        features = {} if is_cuda else torch.cpu.get_capabilities()
        has_bfloat16 = any(features.get(name) for name in ("amx_bf16", "avx512_bf16", "bf16"))
        dtype = "bfloat16" if has_bfloat16 or is_cuda and torch.cuda.is_bf16_supported() else "float32"
    return device, dtype, is_cuda if args.compile is None else args.compile


def autocast(device, dtype):
    """Return a context in which matrix products are computed in `dtype` and reductions in float32."""
    return torch.autocast(device.type, torch.bfloat16, enabled=dtype == "bfloat16")


def try_compile(model, run):
    """Compile model.encode if run(), a forward and backward pass, works then, else warn; return whether."""
    model.encode = torch.compile(model.encode)
    try:
        run()
        return True
    except Exception as error:  # no C++ compiler, no Triton, an unsupported device: many types, none fatal
        del model.encode  # the plain method shows again
        torch._dynamo.reset()
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        print(f"--compile: not available here ({reason}). --no-compile hides this.", file=sys.stderr)
        return False


def read_ranks():
    """Return rank, world size and local rank as torchrun sets them: 0, 1, 0 without torchrun."""
    # subtle: a torchrun that restarts keeps one store, where new ranks wait for lost ones: pytorch #135712
    if (os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"
            and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"):
        raise InputError("torchrun --max-restarts: requires TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in the "
                         "environment, and on several nodes --rdzv_backend=c10d.")
    defaults = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0}
    return tuple(int(os.environ.get(name, default)) for name, default in defaults.items())


def gather_from_ranks(value):
    """Return the list of every rank's value, a plain object: [value] without a process group."""
    values = [value] * (dist.get_world_size() if dist.is_initialized() else 1)
    if dist.is_initialized():
        dist.all_gather_object(values, value)
    return values


def barrier_before_exit():
    """Let finished ranks wait for each other before they leave the process group."""
    # subtle: the group's threads free what was sent and need Python's lock for it; waiting releases the lock.
    # A thread that asks for it while the interpreter shuts down aborts the process.
    if dist.is_initialized():
        dist.barrier()


def num_cores():
    """Return how many processor cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


@contextlib.contextmanager
def catch_signals():
    """Collect SIGTERM and Ctrl-C in the list that the block receives, instead of ending the process."""
    caught, previous = [], {}
    for number in (signal.SIGTERM, signal.SIGINT):
        with contextlib.suppress(ValueError):  # only a main thread may set handlers, not a notebook's
            previous[number] = signal.signal(number, lambda number, frame: caught.append(number))
    try:
        yield caught
    finally:
        for number, handler in previous.items():  # subtle: a worker forked under ours could not be terminated
            signal.signal(number, handler)


def build_once(path, build):
    """Call build(temporary path) exactly once to make a file or folder at path, which is returned.

    Other processes that ask for it wait. A failure half-way leaves nothing at path.
    """
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with FileLock(path + ".lock"):  # the system releases it when the process dies
        if not os.path.exists(path):
            shutil.rmtree(path + ".tmp", ignore_errors=True)
            build(path + ".tmp")
            os.replace(path + ".tmp", path)
    return path


def fingerprint(value):
    """Return twelve hex digits that identify a value of plain types, equal on every machine."""
    return hashlib.md5(json.dumps(value).encode(), usedforsecurity=False).hexdigest()[:12]


def save_checkpoint(path, model, encoder, **more):
    """Write a checkpoint beside the old one and then replace it: a crash leaves one of the two intact.

    Args: path str; model nn.Module with a dataclass config; encoder dict, HashTokenizer.state(); more parts.
    Raises: InputError, it cannot be written. An earlier file is unchanged.
    """
    content = dict(format=FORMAT, config=dataclasses.asdict(model.config), model=model.state_dict())
    content, temporary = content | dict(encoder=encoder) | more, f"{path}.{os.getpid()}.tmp"
    try:
        with open(temporary, "wb") as file:
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except (OSError, RuntimeError) as error:  # torch reports a full disk as a RuntimeError
        raise InputError(f"{path}: could not be saved ({error}). An earlier file is unchanged.") from error
    finally:
        for leftover in glob.glob(f"{glob.escape(path)}.*.tmp"):  # also of a process killed while it wrote
            with contextlib.suppress(OSError):
                os.remove(leftover)


def load_checkpoint(path):
    """Read a checkpoint on the CPU and verify it; from here on the project trusts its parts' types.

    Args: path str, a file, or a folder with ckpt.pt.
    Returns: dict with config (dict), model (state dict), encoder (dict) and whatever was saved beside them.
    Raises: InputError, it is missing, damaged, or of another format.
    """
    path = os.path.join(path, "ckpt.pt") if os.path.isdir(path) else path
    if not os.path.isfile(path):
        raise InputError(f"{path}: no checkpoint found. Train one with pretrain.py, or give its folder.")
    try:
        with zipfile.ZipFile(path) as file:  # the file must hold what it claims to, before memory is taken
            entries = file.infolist()
            is_compressed = any(entry.compress_type != zipfile.ZIP_STORED for entry in entries)
            is_short = sum(entry.file_size for entry in entries) > os.path.getsize(path)
            if is_compressed or is_short or file.testzip():  # subtle: torch.load skips checksums
                raise ValueError
        content = torch.load(path, map_location="cpu")
    except Exception as error:  # whatever a damaged file makes the unpickler raise
        raise InputError(f"{path}: not an intact checkpoint ({type(error).__name__}).") from error
    version = content.get("format") if isinstance(content, dict) else None
    if type(version) is not int or version != FORMAT:
        raise InputError(f"{path}: expected checkpoint format {FORMAT}, got {version}. Train it again.")
    for i, (name, kind) in enumerate(PARTS.items()):
        if (i < 3 or name in content) and not isinstance(part := content.get(name), kind):
            raise InputError(f"{path}: expected {name} to be a {kind.__name__}, got {type(part).__name__}.")
    if not all(isinstance(word, str) for word in content.get("words", [])):
        raise InputError(f"{path}: expected words to hold strings only.")
    for name, tensor in content["model"].items():  # a view that repeats few numbers can claim any size
        is_plain = isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided and not tensor.is_meta
        if not is_plain or tensor.untyped_storage().nbytes() < tensor.nbytes:
            raise InputError(f"{path}: expected weight {name} with all of its numbers stored.")
    return content
