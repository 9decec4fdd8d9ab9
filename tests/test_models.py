"""The models in models/: they load, are as their card says, and do what the README shows."""

import hashlib

import pytest
import torch

import infer
from bench import shrink
from common import load_checkpoint, save_checkpoint
from infer import Predictor
from model import load_model
from tests.support import ROOT, run_main, tiny_model

CARD = " ".join((ROOT / "models" / "README.md").read_text().split())  # without line breaks
NAMES = ("docstrings.pt", "names.pt")


@pytest.mark.parametrize("name", NAMES)
def test_model_is_the_file_of_the_card_and_small(name):
    content = (ROOT / "models" / name).read_bytes()
    assert hashlib.sha256(content).hexdigest() in CARD
    assert len(content) < 2_000_000


def test_shrunk_checkpoint_says_what_the_whole_one_says(sr_run, tmp_path):
    """Its weights have three digits."""
    path = tmp_path / "small.pt"
    shrink.main([str(sr_run), str(path)])
    _, _, expected = Predictor(str(sr_run)).detect("a zebra and an owl")
    _, _, probabilities = Predictor(str(path)).detect("a zebra and an owl")
    assert probabilities.numpy() == pytest.approx(expected.numpy(), abs=0.01)
    assert path.stat().st_size < (sr_run / "best.pt").stat().st_size


def test_shrunk_checkpoint_keeps_the_buckets_of_lsh_attention(tmp_path):
    model = tiny_model(attn="lsh")
    path = str(tmp_path / "small.pt")
    save_checkpoint(str(tmp_path / "ckpt.pt"), model, {}, run={}, step=1, words=[])
    shrink.main([str(tmp_path), path])
    attention = load_model(load_checkpoint(path)).layers[0].attention
    assert torch.equal(attention.planes, model.layers[0].attention.planes)
    assert torch.equal(attention.coef, model.layers[0].attention.coef)
    assert attention.coef.dtype == torch.int64


def test_infer_without_ckpt_takes_the_docstrings_model():
    done = run_main(infer.main, "Open the file and return a kubernetes stream of bytes.")
    assert "intact" in done.out
    assert "models/docstrings.pt" in done.err


def test_names_model_completes_a_set():
    predictor = Predictor(str(ROOT / "models" / "names.pt"))
    [found] = predictor.predict_missing("socket bind listen [MASK]", 8)
    names = [name for name, _ in found["items"]]
    assert found["total"] == 20_000
    assert {"family", "sock", "getfqdn", "SOCK_STREAM"} <= set(names)
