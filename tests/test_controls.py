"""Tests of bench/controls.py: word frequency for Shuffle+Random, shared words for pairs."""

import json
from argparse import Namespace

import numpy as np
import pytest
import torch

from bench import controls, harness
from data.batches import TextBatches
from model import Config
from objectives import ShuffleRandom
from tests.test_bench import run_bench
from tokenizer import CLS, FIRST_WORD_ID, SEP


def test_frequency_beside_the_last_evaluation_of_the_model(sr_run, text_path, cache_dir):
    args = Namespace(runs=[str(sr_run)], cache=str(cache_dir), data=str(text_path))
    model, frequency = run_bench(controls, "frequency", args, num_steps=20)
    evaluation = harness.read_log(sr_run)[-1]
    for key in ("eval_loss", "f1_random", "f1_shuffled"):
        assert model[key] == pytest.approx(evaluation[key], rel=1e-4)
    # shuffling permutes words, so the frequency cannot tell them apart
    assert frequency["f1_shuffled"] < 0.05
    assert frequency["eval_loss"] < np.log(3)


COMMON = FIRST_WORD_ID
RARE = FIRST_WORD_ID + 1


@pytest.fixture
def batches():
    """Return windows of one word, in which each random word is one that no text has."""
    ids = np.full(2_000, COMMON)
    random_words = np.array([RARE])
    return TextBatches(ids, 9, 16, random_words, 0, CLS, SEP)


@pytest.fixture
def objective():
    return ShuffleRandom(Config(head="sr"), first_word_id=FIRST_WORD_ID)


def test_count_labels_finds_random_words_that_no_text_has(objective, batches):
    frequency_class = torch.zeros(RARE + 1, dtype=torch.long)
    frequency_class[RARE] = 1
    logp = controls.count_labels(objective, batches, frequency_class, num_steps=10)
    assert logp.exp().sum(1).tolist() == pytest.approx([1, 1])
    assert logp.argmax(1).tolist() == [0, 2]  # intact, random
    assert logp[1, 2].exp() > 0.95


def test_cosine_by_hand():
    # (1, 2, 0) and (1, 0, 2): 1 / 5
    assert controls.cosine(("a b", "a c"), dict(a=1.0, b=2.0, c=2.0)) == pytest.approx(0.2)
    assert controls.cosine(("a b b", "b b a"), dict(a=1.0, b=3.0)) == pytest.approx(1)
    assert controls.cosine(("", "a"), dict(a=1.0)) == 0


def test_idf_counts_texts_not_words():
    # four texts: "a" is in three, "b" in one
    idf = controls.weigh_words([(("a a", "a"), 0), (("a b", ""), 1)])
    assert idf["a"] == pytest.approx(np.log(5 / 4) + 1)
    assert idf["b"] == pytest.approx(np.log(5 / 2) + 1)
    assert idf["c"] == pytest.approx(np.log(5) + 1)


@pytest.mark.parametrize("classes, above", [([0, 0, 1, 1], 1), ([1, 1, 0, 0], 0)])
def test_threshold_separates_the_classes(classes, above):
    threshold, found = controls.choose_threshold(np.array([0.1, 0.2, 0.7, 0.9]), np.array(classes))
    assert 0.2 < threshold <= 0.7
    assert found == above


@pytest.fixture
def pairs(tmp_path):
    """Return a folder of MRPC's files, and of the results of two seeds about them."""
    (tmp_path / "MRPC").mkdir()
    lines = ["Quality\t#1 String\t#2 String"]
    for i in range(4):
        lines.append(f"1\tword{i} same\tword{i} same")
        lines.append(f"0\tword{i} other\tdifferent text")
    for split in ("train", "dev"):
        (tmp_path / "MRPC" / f"{split}.tsv").write_text("\n".join(lines))
    truth = [1, 0] * 4
    for seed, predicted, score in ((0, [1] * 8, 50.0), (1, truth, 100.0)):
        best = dict(accuracy=score)
        result = dict(metric="accuracy", truth=truth, predicted=predicted, best=best)
        (tmp_path / f"mrpc-seed-{seed}.json").write_text(json.dumps(result))
    (tmp_path / "results.json").write_text(json.dumps(dict(tasks=dict(mrpc={}))))
    return tmp_path


def test_overlap_beside_a_model(pairs):
    args = Namespace(data_dir=str(pairs), cache=None, runs=[str(pairs)])
    [row] = run_bench(controls, "overlap", args)
    # the model is right in 4 of 8 rows with one seed, in all with the other; so is the cosine
    assert row["n"] == 8
    assert row["model"] == 75
    assert row["cosine"] == 100
    assert row["difference"] == -25
    assert row["difference_std"] > 0
