"""The models in models/: they load, are as their card says, and do what the README shows."""

import hashlib
import re
from pathlib import Path

import numpy as np
import pytest
import torch

import infer
import pretrain
from bench import copies, shrink
from infer import Predictor
from model import load_model
from support.common import load_checkpoint, save_checkpoint
from tests.helpers import ROOT, run_main, tiny_model

CARD = " ".join((ROOT / "models" / "README.md").read_text("utf-8").split())  # without line breaks
SIZES = {  # megabytes at most
    "english-detect.pt": 8,
    "english-fill.pt": 9,
    "names.pt": 9,
}


@pytest.mark.parametrize("name, size", SIZES.items())
def test_model_is_the_file_of_the_card_and_small(name, size):
    content = (ROOT / "models" / name).read_bytes()
    assert hashlib.sha256(content).hexdigest() in CARD
    assert len(content) < size * 1_000_000


def test_readme_says_of_random_and_shuffled_words_what_the_card_says():
    f1 = re.search(r"F1 (0\.\d+) of random words, (0\.\d+) of shuffled words", CARD).groups()
    steps, windows, words = re.search(r"([\d,]+) of (\d+) windows of (\d+) words", CARD).groups()
    millions = int(steps.replace(",", "")) * int(windows) * int(words) / 1e6
    text = (ROOT / "README.md").read_text("utf-8")
    random, shuffled = map(float, f1)
    assert f"read {millions:.0f} million words (21 million, twelve times), has" in text
    assert "21.4 million words" in CARD and "12 epochs" in CARD
    assert f"has {random:.2f} and {shuffled:.2f}." in text


def test_shrunk_checkpoint_says_what_the_whole_one_says(sr_run, tmp_path):
    """Its weights have three digits, and its objective may have kinds of its own."""
    kinds = {0: "intact", 2: "strange"}
    torch.save(load_checkpoint(str(sr_run)) | dict(kinds=kinds), tmp_path / "ckpt.pt")
    path = tmp_path / "small.pt"
    shrink.main([str(tmp_path), str(path)])
    small = Predictor(str(path))
    _, _, expected = Predictor(str(sr_run)).detect("a zebra and an owl")
    _, _, probabilities = small.detect("a zebra and an owl")
    assert probabilities.numpy() == pytest.approx(expected.numpy(), abs=0.01)
    assert small.kinds == kinds
    assert path.stat().st_size < (sr_run / "best.pt").stat().st_size


def test_shrunk_checkpoint_of_item_sets_keeps_their_counts(small, tmp_path):
    pretrain.main(small(data="sets"))
    path = str(tmp_path / "small.pt")
    shrink.main([str(tmp_path / "run"), path])
    counts = load_checkpoint(str(tmp_path / "run"))["item_counts"]
    assert torch.equal(Predictor(path, prior=0.5).item_counts, counts)


def test_shrunk_checkpoint_keeps_the_buckets_of_lsh_attention(tmp_path):
    model = tiny_model(attn="lsh")
    path = str(tmp_path / "small.pt")
    save_checkpoint(str(tmp_path / "ckpt.pt"), model, {}, run={}, step=1, words=[])
    shrink.main([str(tmp_path), path])
    attention = load_model(load_checkpoint(path)).layers[0].attention
    assert torch.equal(attention.planes, model.layers[0].attention.planes)
    assert torch.equal(attention.coef, model.layers[0].attention.coef)
    assert attention.coef.dtype == torch.int64


@pytest.mark.parametrize("text, name, answer", [
    ("She looked out of the kubernetes.", "english-detect.pt", "{kubernetes:random}"),
    ("She opened the [MASK] and looked out of the window.", "english-fill.pt", " door "),
])
def test_infer_without_ckpt_takes_the_model_that_fits_the_text(text, name, answer):
    done = run_main(infer.main, text)
    assert str(Path("models", name)) in done.err
    assert answer in done.out


def test_detect_model_gives_recorded_probabilities():
    """p(intact): "the of" are exchanged, and "kubernetes" is out of place."""
    predictor = Predictor(str(ROOT / "models" / "english-detect.pt"))
    words, _, probabilities = predictor.detect("She looked out the of kubernetes.")
    assert words == ["she", "looked", "out", "the", "of", "kubernetes", "."]
    is_intact = [0.999, 0.999, 0.943, 0.534, 0.461, 0.145, 0.991]
    assert probabilities[:, 0].tolist() == pytest.approx(is_intact, abs=0.01)


def test_fill_model_gives_recorded_scores():
    predictor = Predictor(str(ROOT / "models" / "english-fill.pt"))
    [found] = predictor.predict_missing("The king sat on his [MASK].", 3)
    names, scores = zip(*found["items"])
    assert names == ("head", "arm", "shoulder")
    assert scores == pytest.approx([-13.56, -14.68, -14.80], abs=0.02)


def test_names_model_completes_a_set():
    predictor = Predictor(str(ROOT / "models" / "names.pt"))
    [found] = predictor.predict_missing("year month [MASK]", 5)
    names = [name for name, _ in found["items"]]
    assert found["total"] == 20_000
    assert names == ["day", "self", "second", "minute", "hour"]


def test_uniform_attention_gives_a_copy_what_it_gives_any_word():
    predictor = Predictor(str(ROOT / "models" / "english-detect.pt"))
    for layer in predictor.model.layers:
        layer.attention.qkv.weight.zero_()
    pair = ("the file the value", "a file")  # only "file" stands once in each
    shares = copies.attend_to_copies(predictor.model, predictor.tokenizer, pair)
    length = 4 + 2 + 4  # words and special tokens
    assert shares.shape == (4, 2, 3)  # layers; from each "file" to the other
    assert shares == pytest.approx(np.broadcast_to([1 / length, 1 / length, 2 / length], (4, 2, 3)))
