"""Tests of bench/claims.py: a verdict follows from two numbers and their error."""

import math

import pytest

from bench import claims
from support.common import read_json
from tests.helpers import ROOT


def make_value(mean, error=1.0, seeds=3):
    """Return a number whose error is that of its seeds."""
    return dict(mean=mean, std=None, error=error, seed_error=error, seeds=seeds)


@pytest.mark.parametrize("difference, rule, verdict", [
    (3.94, "higher", "holds"),  # 2.78 errors of the difference, each number's being 1, are 3.93
    (3.92, "higher", "not decided"),
    (-3.94, "higher", "does not hold"),
    (-3.94, "lower", "holds"),
    (0.1, "at least", "holds"),
    (-0.1, "at least", "does not hold"),
    (0.1, "equal", "does not hold"),
])
def test_verdict_follows_from_the_error(difference, rule, verdict):
    error = 0 if rule in ("at least", "equal") else 1
    here = make_value(50 + difference, error)
    control = make_value(50, error)
    assert claims.judge(dict(rule=rule), here, control) == verdict


def test_numbers_with_an_error_have_no_exact_rule():
    value = make_value(50)
    with pytest.raises(ValueError, match="at least"):
        claims.judge(dict(rule="at least"), value, value)


@pytest.mark.parametrize("seed_errors, row_error, limit", [
    ([1, 1], 0, 2.776 * math.sqrt(2)),  # four degrees of freedom
    ([1, 0], 0, 4.303),  # two: one side has all of the spread
    ([1, 0.6], 0, 3.182 * math.sqrt(1.36)),  # 3.27, so three
    ([0, 0.1], 1, 2.776 * math.sqrt(1.01)),  # scored rows are many
    ([0, 0], 0, 0),
])
def test_limit_is_of_students_t_after_welch(seed_errors, row_error, limit):
    here, control = [dict(error=error, seed_error=error) for error in seed_errors]
    here["error"] = math.hypot(here["error"], row_error)
    assert claims.find_limit(here, control) == pytest.approx(limit)


def test_share_of_the_control_has_the_share_of_its_error():
    cell = ["twins", "dense", "sst2"]
    whole, part = claims.read_sides(dict(here=cell, control=cell, share=0.1))
    for key in ("mean", "std", "error", "seed_error"):
        assert part[key] == pytest.approx(0.1 * whole[key])


@pytest.mark.parametrize("seeds", [1, 2])
def test_fewer_than_three_seeds_decide_nothing(seeds):
    here = make_value(90, seeds=seeds)
    verdict = claims.judge({}, here, make_value(10))
    assert verdict.startswith("not decided")


def test_error_has_seeds_and_rows():
    cell = claims.read_cell(["twins", "dense", "sst2"], dict(n=872))
    rows = read_json(ROOT / "results/twins.json")["rows"]
    [row] = [row for row in rows if row["name"] == "dense"]
    accuracy = row["sst2"]
    of_seeds = row["sst2_std"] ** 2 / 3
    of_rows = accuracy * (100 - accuracy) / 872
    error = math.sqrt(of_seeds + of_rows)
    assert cell["error"] == pytest.approx(error)


def test_error_of_a_correlation():
    cell = claims.read_cell(["glue", "proj, lsh", "stsb"], dict(n=1500, is_correlation=True))
    r = cell["mean"] / 100
    of_rows = 100 * (1 - r**2) * math.sqrt((1 + r**2 / 2) / 1500)  # for normal variables
    assert cell["error"] == pytest.approx(math.hypot(cell["std"] / math.sqrt(3), of_rows))


def test_ratio_of_two_numbers_of_a_row_has_no_error():
    cell = claims.read_cell(["bloom", "alpha 50, flat", "all / sure"], {})
    rows = read_json(ROOT / "results/bloom.json")["rows"]
    [row] = [row for row in rows if row["name"] == "alpha 50, flat"]
    assert cell["mean"] == row["all"] / row["sure"]
    assert cell["error"] == 0
