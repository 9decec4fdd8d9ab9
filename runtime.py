"""Run a script on a machine: device and dtype, ranks and signals, locks on files, checkpoints (plain dicts).

Out of scope: models and data; model.py turns a checkpoint into a Model.
"""

import contextlib
import dataclasses
import hashlib
import json
import multiprocessing
import os
import shutil
import signal
import sys
import zipfile

import torch
import torch.distributed as dist
from filelock import FileLock, Timeout

from console import (HelpFormatter, InputError, add_device_flags, at_least, blame_input,  # noqa: F401
                     exit_on_bad_input, wrap)  # scripts import all of these from here

FORMAT = 4  # of checkpoints; each has the first three of these parts
PARTS = dict(config=dict, model=dict, encoder=dict, words=list, task=dict, run=dict, optimizer=dict, step=int)


def resolve_device(args, local_rank=0):
    """Return torch.device, dtype "float32" or "bfloat16", whether to compile; "cuda" is GPU local_rank."""
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
        is_native = torch.cuda.is_bf16_supported(including_emulation=False) if is_cuda else any(
            map(torch.cpu.get_capabilities().get, ("amx_bf16", "avx512_bf16", "bf16")))
        dtype = "bfloat16" if is_native else "float32"
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
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        print(f"--compile: not available here ({reason}). --no-compile hides this.", file=sys.stderr)
        return False


def read_ranks():
    """Return rank, world size and local rank as torchrun sets them: 0, 1, 0 without torchrun."""
    # subtle: a torchrun that restarts keeps one store, where new ranks wait for lost ones: pytorch #135712
    env = os.environ
    if env.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0" and env.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        raise InputError("torchrun --max-restarts: requires TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 to be set.")
    texts = [env.get(*pair) for pair in (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0"))]
    rank, world, local_rank = (int(text) if text.isdecimal() else -1 for text in texts)
    is_whole = world == 1 or {"RANK", "MASTER_ADDR", "MASTER_PORT"} <= {*env}
    if not 0 <= rank < world or local_rank < 0 or not is_whole:
        raise InputError(f"environment: expected RANK, WORLD_SIZE, LOCAL_RANK and MASTER_*, got {texts}.")
    return rank, world, local_rank


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


def start_workers():
    """Return a multiprocessing.Pool on all cores that leaves Ctrl-C to this process."""
    return multiprocessing.Pool(num_cores(), signal.signal, (signal.SIGINT, signal.SIG_IGN))


@contextlib.contextmanager
def catch_signals():
    """Collect SIGTERM, SIGHUP and Ctrl-C in the list that the block receives, instead of ending at once."""
    caught, previous, hangup = [], {}, getattr(signal, "SIGHUP", signal.SIGTERM)  # Windows has no SIGHUP
    is_nohup = signal.getsignal(hangup) is signal.SIG_IGN
    for number in (signal.SIGTERM, signal.SIGINT, hangup)[:2 if is_nohup else 3]:
        with contextlib.suppress(ValueError):  # only a main thread may set handlers, not a notebook's
            previous[number] = signal.signal(number, lambda number, frame: caught.append(number))
    try:
        yield caught
    finally:
        for number, handler in previous.items():  # subtle: a worker forked under ours could not be terminated
            signal.signal(number, signal.SIG_IGN if caught else handler)  # it is ending: once is enough


def make_folder(folder, flag):
    """Make a folder unless it exists; the InputError names the flag that chose it."""
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError as error:
        raise InputError(f"{flag} {folder}: expected a folder to write to, got {error.strerror}.") from error


@contextlib.contextmanager
def lock_output(folder, rank=0):
    """Make folder, a run's --out, and let rank 0 hold it in the block; InputError if another run does."""
    # the file .lock stays: one that is removed could be held twice
    make_folder(folder, "--out")
    try:
        with contextlib.nullcontext() if rank else FileLock(os.path.join(folder, ".lock"), timeout=0):
            yield
    except Timeout as error:
        raise InputError(f"--out {folder}: in use by another run. Use another --out.") from error


def build_once(path, build):
    """Return path after build(temporary path) made it, once: others wait, and a failure leaves nothing."""
    make_folder(os.path.dirname(path), "--cache")
    with FileLock(path + ".lock"):  # the system releases it when the process dies
        if not os.path.exists(path):
            shutil.rmtree(path + ".tmp", ignore_errors=True)  # of a process that was killed
            try:
                build(path + ".tmp")
                os.replace(path + ".tmp", path)
            finally:
                shutil.rmtree(path + ".tmp", ignore_errors=True)
                with contextlib.suppress(OSError):  # a file
                    os.remove(path + ".tmp")
    return path


def fingerprint(value):
    """Return twelve hex digits that identify a value of plain types, equal on every machine."""
    return hashlib.md5(json.dumps(value).encode(), usedforsecurity=False).hexdigest()[:12]


def is_intact(tensor):
    """Return whether a value is a plain tensor as a model has them: its numbers finite and all stored."""
    return (isinstance(tensor, torch.Tensor) and tensor.dtype in (torch.float32, torch.int64)
            and tensor.layout is torch.strided and not tensor.is_meta
            and tensor.untyped_storage().nbytes() >= tensor.nbytes  # else a view that repeats few numbers
            and bool(tensor.sum().isfinite()))


def save_checkpoint(path, model, encoder, **more):
    """Write a checkpoint beside the old one and then replace it: a crash leaves one of the two intact.

    path str; model nn.Module with a dataclass config; encoder dict, HashTokenizer.state(); more parts.
    InputError: a weight is not finite or the file cannot be written. An earlier file is unchanged.
    """
    weights, temporary = model.state_dict(), f"{path}.tmp"
    if wrong := [name for name, weight in weights.items() if not is_intact(weight)]:
        raise InputError(f"--lr: weight {wrong[0]} is not finite; {path} was not written. Try a lower --lr.")
    content = dict(format=FORMAT, config=dataclasses.asdict(model.config), model=weights, encoder=encoder)
    try:
        with open(temporary, "wb") as file:
            torch.save(content | more, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except (OSError, RuntimeError) as error:  # torch reports a full disk as a RuntimeError
        raise InputError(f"{path}: could not be saved ({error}). An earlier file is unchanged.") from error
    finally:
        with contextlib.suppress(OSError):
            os.remove(temporary)


def load_checkpoint(path):
    """Read and verify a checkpoint, a file or a folder's ckpt.pt; from here on its parts' types are trusted.

    Returns: dict with config (dict), model (state dict), encoder (dict) and whatever was saved beside them.
    Raises: InputError, it is missing, damaged, or of another format.
    """
    path = os.path.join(path, "ckpt.pt") if os.path.isdir(path) else path
    if not os.path.isfile(path):
        raise InputError(f"{path}: no checkpoint found. Train one with pretrain.py, or give its folder.")
    try:
        with zipfile.ZipFile(path) as file:  # the file must hold what it claims to, before memory is taken
            is_short = sum(entry.file_size for entry in file.infolist()) > os.path.getsize(path)
            if is_short or file.testzip():  # subtle: torch.load skips checksums
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
    if not all(isinstance(word, str) for word in content.get("words", [])) or content.get("step", 0) < 0:
        raise InputError(f"{path}: expected words to hold strings only, and step to be 0 or more.")
    if wrong := [name for name, weight in content["model"].items() if not is_intact(weight)]:
        raise InputError(f"{path}: expected weight {wrong[0]} with finite numbers, all of them stored.")
    return content


def load_optimizer(optimizer, state, path, step):
    """Load what Adam keeps of each parameter after step updates; its settings stay those of the flags.

    state, step: parts "optimizer" and "step" of the checkpoint at path, or None.
    InputError: the state is not of this model and step; of a wrong shape it would end the process.
    """
    own = optimizer.state_dict()
    try:
        groups, own_groups = ([group["params"] for group in x["param_groups"]] for x in (state, own))
        optimizer.load_state_dict(own | dict(state=state["state"]))
        fits = groups == own_groups and len(optimizer.state) == (sum(map(len, own_groups)) if step else 0)
        for weight, saved in optimizer.state.items():
            fits &= saved["step"].item() == step and all(
                is_intact(x) and x.shape == weight.shape for x in (saved["exp_avg"], saved["exp_avg_sq"]))
        if not fits:
            raise ValueError
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise InputError(f"{path}: expected the optimizer's state of this model at step {step}.") from error
