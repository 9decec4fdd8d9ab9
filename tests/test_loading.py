"""data/loading.py: workers, and what ends them. test_pretrain.py has runs with workers."""


import pytest
import torch

from data import loading
from data.batches import TextBatches
from objectives import MaskedWords
from support.common import InputError, Ranks



@pytest.fixture
def build_loader():
    """Return a function: the loader of two steps for a device, with some workers."""
    def build(device, num_workers):
        batches = TextBatches(torch.arange(5, 1_005).numpy(), [1] * 1_000, 9, 4, 0)
        objective = MaskedWords(None, mask_rate=0.15, mask_id=4, first_word_id=5)
        return loading.build_loader(
            batches, objective, range(2), Ranks().share(4), 4, num_workers, torch.device(device))
    return build


@pytest.mark.parametrize("device, cores, num_workers", [("cpu", 16, 0), ("cuda", 16, 4),
                                                        ("cuda", 2, 2)])
def test_number_of_workers_follows_device_and_cores(
        build_loader, monkeypatch, device, cores, num_workers):
    """More workers than cores slow each other down, and PyTorch warns of them."""
    monkeypatch.setattr(loading, "num_cores", lambda: cores)
    assert build_loader(device, None).num_workers == num_workers


def test_system_without_fork_has_no_workers(build_loader, monkeypatch):
    monkeypatch.setattr(loading, "HAS_FORK", False)
    assert build_loader("cuda", None).num_workers == 0
    with pytest.raises(InputError, match="^--workers: .*got 2"):
        build_loader("cpu", 2)
