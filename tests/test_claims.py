"""Tests of bench/claims.py: a verdict follows from two numbers and their error."""

import math

import pytest

from bench import claims
from common import read_json
from tests.support import ROOT


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
    assert claims.judge(dict(rule=rule), here, make_value(50, error)) == verdict


def test_numbers_with_an_error_have_no_exact_rule():
    with pytest.raises(ValueError, match="at least"):
        claims.judge(dict(rule="at least"), make_value(50), make_value(50))


@pytest.mark.parametrize("here, control, limit", [
    (dict(error=1, seed_error=1), dict(error=1, seed_error=1), 2.776 * math.sqrt(2)),  # 4 degrees
    (dict(error=1, seed_error=1), dict(error=0, seed_error=0), 4.303),  # 2: one side's seeds
    (dict(error=1, seed_error=1), dict(error=0.6, seed_error=0.6), 3.182 * 1.1662),  # 3.27, so 3
    (dict(error=1, seed_error=0.1), dict(error=1, seed_error=0), 2.776 * math.sqrt(2)),  # rows
    (dict(error=0, seed_error=0), dict(error=0, seed_error=0), 0),
])
def test_limit_is_of_students_t_after_welch(here, control, limit):
    assert claims.find_limit(here, control) == pytest.approx(limit, rel=1e-4)


def test_share_of_the_control_has_the_share_of_its_error():
    cell = ["twins", "dense", "sst2"]
    whole, part = claims.read_sides(dict(here=cell, control=cell, share=0.1))
    for key in ("mean", "std", "error", "seed_error"):
        assert part[key] == pytest.approx(0.1 * whole[key])


@pytest.mark.parametrize("seeds", [1, 2])
def test_fewer_than_three_seeds_decide_nothing(seeds):
    verdict = claims.judge({}, make_value(90, seeds=seeds), make_value(10))
    assert verdict.startswith("not decided")


def test_error_has_seeds_and_rows():
    cell = claims.read_cell(["twins", "dense", "sst2"], dict(n=872))
    rows = read_json(ROOT / "results/twins.json")["rows"]
    [row] = [row for row in rows if row["name"] == "dense"]
    of_seeds = row["sst2_std"] ** 2 / 3
    of_rows = row["sst2"] * (100 - row["sst2"]) / 872
    assert cell["error"] == pytest.approx(math.sqrt(of_seeds + of_rows))
    assert cell["seeds"] == 3


def test_error_of_a_correlation():
    cell = claims.read_cell(["glue", "proj, lsh", "stsb"], dict(n=1500, is_correlation=True))
    r = cell["mean"] / 100
    of_rows = 100 * (1 - r**2) * math.sqrt((1 + r**2 / 2) / 1500)  # for normal variables
    assert cell["error"] == pytest.approx(math.hypot(cell["std"] / math.sqrt(3), of_rows))


def test_ratio_of_two_numbers_of_a_row_has_no_error():
    cell = claims.read_cell(["bloom", "alpha 50, flat", "all / sure"], {})
    rows = read_json(ROOT / "results/bloom.json")["rows"]
    [row] = [row for row in rows if row["name"] == "alpha 50, flat"]
    assert cell == dict(mean=row["all"] / row["sure"], std=None, error=0, seed_error=0, seeds=0)
