"""The models in models/: they load, are as their card says, and do what the README shows."""

import hashlib
import random
import re

import numpy as np
import pytest
import torch

import infer
from bench import copies, shrink
from infer import Predictor
from model import load_model
from support.common import load_checkpoint, save_checkpoint
from tests.helpers import ROOT, run_main, tiny_model

CARD = " ".join((ROOT / "models" / "README.md").read_text().split())  # without line breaks
SIZES = {  # megabytes at most
    "english-detect.pt": 8,
    "english-fill.pt": 9,
    "names.pt": 2,
}


@pytest.mark.parametrize("name, size", SIZES.items())
def test_model_is_the_file_of_the_card_and_small(name, size):
    content = (ROOT / "models" / name).read_bytes()
    assert hashlib.sha256(content).hexdigest() in CARD
    assert len(content) < size * 1_000_000


def test_readme_says_of_shuffled_words_what_the_card_says():
    f1 = float(re.search(r"(0\.\d+) of shuffled words", CARD)[1])
    steps, windows, words = re.search(r"([\d,]+) of (\d+) windows of (\d+) words", CARD).groups()
    millions = int(steps.replace(",", "")) * int(windows) * int(words) / 1e6
    text = (ROOT / "README.md").read_text()
    assert f"on {millions:.0f} million words, has an F1 of {f1:.2f} for shuffled" in text


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
    assert f"models/{name}" in done.err
    assert answer in done.out


def read_prose():
    """Return lines of prose of this project's pages, list[str]."""
    lines = []
    for page in sorted((ROOT / "docs").glob("*.md")):
        for line in page.read_text().splitlines():
            if re.fullmatch(r"[A-Za-z][^`|<>*\[]{80,}", line):  # no table, code or link
                lines.append(line)
    return lines


def test_detect_model_suspects_the_swapped_word_of_a_line():
    """The score of the card: one word a line is replaced by another word of these pages."""
    rng = random.Random(0)
    lines = read_prose()
    pool = sorted(set(re.findall(r"\b[a-z]+\b", " ".join(lines))))
    texts = []
    places = []
    for line in lines:
        start, end = rng.choice(list(re.finditer(r"\b[a-z]+\b", line))).span()
        new = rng.choice(pool)
        texts.append(line[:start] + new + line[end:])
        places.append((start, start + len(new)))

    num_found = 0
    predictor = Predictor(str(ROOT / "models" / "english-detect.pt"))
    for (_, spans, probabilities), place in zip(predictor.detect(texts), places):
        num_found += spans[probabilities[:, 0].argmin()] == place
    num_words = sum(len(line.split()) for line in lines) / len(lines)
    assert len(lines) > 150
    assert 2 / num_words < num_found / len(lines) < 0.3  # by chance: 1 / num_words


def test_fill_model_names_the_masked_word_of_a_line():
    """The score of the card: one word a line is masked, among the model's 5,000 words."""
    rng = random.Random(0)
    predictor = Predictor(str(ROOT / "models" / "english-fill.pt"))
    texts = []
    words = []
    for line in read_prose():
        match = rng.choice(list(re.finditer(r"\b[a-z]+\b", line)))
        if match.group() in predictor.words:
            texts.append(f"{line[:match.start()]}[MASK]{line[match.end():]}")
            words.append(match.group())

    num_found = 0
    for [mask], word in zip(predictor.predict_missing(texts, 10), words):
        num_found += word in [name for name, _ in mask["items"]]
    frequent = [word for word in predictor.words if word.isalpha()][:10]
    num_frequent = sum(word in frequent for word in words)
    assert num_frequent / len(words) + 0.1 < num_found / len(words) < 0.65


def test_names_model_completes_a_set():
    predictor = Predictor(str(ROOT / "models" / "names.pt"))
    [found] = predictor.predict_missing("socket bind listen [MASK]", 8)
    names = [name for name, _ in found["items"]]
    assert found["total"] == 20_000
    assert {"family", "sock", "getfqdn", "SOCK_STREAM"} <= set(names)


def test_uniform_attention_gives_a_copy_what_it_gives_any_word():
    predictor = Predictor(str(ROOT / "models" / "english-detect.pt"))
    for layer in predictor.model.layers:
        layer.attention.qkv.weight.zero_()
    pair = ("the file the value", "a file")  # only "file" stands once in each
    shares = copies.attend_to_copies(predictor.model, predictor.tokenizer, pair)
    length = 4 + 2 + 4  # words and special tokens
    assert shares.shape == (4, 2, 3)  # layers; from each "file" to the other
    assert shares == pytest.approx(np.broadcast_to([1 / length, 1 / length, 2 / length], (4, 2, 3)))
