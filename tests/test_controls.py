"""Tests of bench/controls.py: word frequency for Shuffle+Random, shared words for pairs."""

from argparse import Namespace

import numpy as np
import pytest

from bench import controls, harness
from support.results import Outcome, Result
from tests.test_bench import run_bench


def test_frequency_beside_the_last_evaluation_of_the_model(sr_run, text_path, cache_dir):
    args = Namespace(runs=[str(sr_run)], cache=str(cache_dir), data=str(text_path))
    model, frequency = run_bench(controls, "frequency", args, num_steps=20)
    evaluation = harness.read_log(sr_run)[-1]
    for key in ("eval_loss", "f1_random", "f1_shuffled"):
        assert model[key] == pytest.approx(evaluation[key], rel=1e-4)
    # shuffling permutes words, so the frequency cannot tell them apart
    assert frequency["f1_shuffled"] < 0.05
    assert frequency["eval_loss"] < np.log(3)


def test_cosine_by_hand():
    idf = dict(a=1.0, b=2.0, c=2.0)
    assert controls.cosine(("a b", "a c"), idf) == pytest.approx(0.2)  # (1, 2, 0) and (1, 0, 2)
    assert controls.cosine(("a b b", "b b a"), idf) == pytest.approx(1)
    assert controls.cosine(("", "a"), idf) == 0


def test_idf_counts_texts_not_words():
    rows = [
        (("a a", "a"), 0),
        (("a b", ""), 1),
    ]
    idf = controls.weigh_words(rows)
    # "a" is in three of four texts, "c" in none
    assert idf["a"] == pytest.approx(np.log(5 / 4) + 1)
    assert idf["c"] == pytest.approx(np.log(5) + 1)


def test_threshold_has_the_classes_in_their_order():
    cosines = np.array([0.1, 0.2, 0.7, 0.9])
    threshold, above = controls.choose_threshold(cosines, np.array([1, 1, 0, 0]))
    assert 0.2 < threshold <= 0.7
    assert above == 0


def test_overlap_beside_two_seeds_of_a_model():
    truth = [1, 0] * 4
    # one seed is right in 4 of 8 rows, the other in all, as the cosine is
    results = []
    for predicted, score in (([1] * 8, 50.0), (truth, 100.0)):
        scores = dict(accuracy=score)
        outcome = Outcome(scores, scores, predicted, selection=0, log=[])
        results.append(Result(0, "accuracy", [], [], {}, 0, truth, {}, outcome, None))

    row = controls.compare_with_model("mrpc", results, np.array(truth))

    assert row["model"] == 75
    assert row["cosine"] == 100
    assert row["difference"] == -25
    assert row["difference_std"] > 0
