"""data/loading.py: workers, and what ends them. test_pretrain.py has runs with workers."""

import math
import multiprocessing
import os
import signal
import time
from types import SimpleNamespace

import pytest
import torch

from data import loading
from data.batches import TextBatches
from objectives import MaskedWords, RowTarget, make_batch
from support.common import InputError, Ranks
from tests.helpers import needs_fork


@pytest.fixture
def build_loader():
    """Return a function: the context of a loader of two steps for a device, with some workers."""
    def build(device, num_workers):
        batches = TextBatches(torch.arange(5, 1_005).numpy(), [1] * 1_000, 9, 4, 0)
        objective = MaskedWords(SimpleNamespace(order=True), 0.15, RowTarget())
        return loading.open_loader(
            batches, objective, range(2), Ranks().share(4), 4, num_workers, torch.device(device))
    return build


def watch_loaders(monkeypatch):
    """Return a dict, to which each DataLoader adds its options."""
    options = {}
    monkeypatch.setattr(loading, "DataLoader", lambda steps, **more: options.update(more) or steps)
    return options


@pytest.mark.parametrize("device, cores, num_workers", [("cpu", 16, 0), ("cuda", 16, 4),
                                                        ("cuda", 2, 2)])
def test_number_of_workers_follows_device_and_cores(
        build_loader, monkeypatch, device, cores, num_workers):
    """More workers than cores slow each other down, and PyTorch warns of them."""
    monkeypatch.setattr(loading, "HAS_FORK", True)
    monkeypatch.setattr(loading, "num_cores", lambda: cores)
    options = watch_loaders(monkeypatch)
    with build_loader(device, None):
        assert options["num_workers"] == num_workers


def test_system_without_fork_has_no_workers(build_loader, monkeypatch):
    monkeypatch.setattr(loading, "HAS_FORK", False)
    options = watch_loaders(monkeypatch)
    with build_loader("cuda", None):
        assert options["num_workers"] == 0
    with pytest.raises(InputError, match="^--workers: .*got 2"):
        with build_loader("cpu", 2):
            pass


def die():
    os.kill(os.getpid(), signal.SIGKILL)  # as the system does where memory is short


@needs_fork
@pytest.mark.parametrize("act, message", [(lambda: time.sleep(999), "timed out"), (die, "worker")])
def test_worker_that_is_stuck_or_dead_ends_the_run_in_one_line(
        build_loader, monkeypatch, act, message):
    """Nothing is left that the end of Python would wait for."""
    monkeypatch.setattr(loading, "LOADER_PATIENCE", 1)
    monkeypatch.setattr(TextBatches, "get_batch", lambda *_: act())
    with pytest.raises(InputError, match=f"^--workers: .*{message}.* Use --workers 0"):
        with build_loader("cpu", 1) as loader:
            next(iter(loader))
    assert multiprocessing.active_children() == []


@needs_fork
def test_workers_need_no_shared_memory(build_loader, monkeypatch):
    """A container may have 1 MB of it. PyTorch's workers then hang instead of ending."""
    def refuse(*_):
        raise RuntimeError("unable to allocate shared memory")

    monkeypatch.setattr(loading, "LOADER_PATIENCE", 5)
    monkeypatch.setattr(torch.UntypedStorage, "_share_fd_cpu_", refuse)
    with build_loader("cpu", 1) as loader:
        steps = list(loading.until_signal(loader, Ranks(), []))
    assert len(steps) == 2
    assert isinstance(steps[0][0].inputs, torch.Tensor)


@needs_fork
def test_workers_that_cannot_start_end_the_run_in_one_line(build_loader, monkeypatch):
    """ulimit -n is small, or a container has no shared memory for locks."""
    def refuse():
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(loading.DataLoader, "__iter__", lambda loader: refuse())
    with pytest.raises(InputError, match="^--workers: .*Too many open files. Use --workers 0"):
        with build_loader("cpu", 1):
            pass


@needs_fork
def test_error_of_our_own_in_a_worker_keeps_its_text(build_loader, monkeypatch):
    monkeypatch.setattr(TextBatches, "get_batch", lambda *_: math.sqrt(-1))
    with pytest.raises(ValueError, match="math domain error"):
        with build_loader("cpu", 1) as loader:
            next(iter(loader))


def test_signal_ends_the_steps_before_the_next_one():
    ids = torch.tensor([[5, 6, 7]])
    signals = []
    steps = loading.until_signal([[make_batch(ids, ids)]] * 3, Ranks(), signals)
    next(steps)
    signals.append(signal.SIGTERM)
    assert list(steps) == []
