"""Tests of bench/claims.py: a verdict follows from two numbers, their runs and their rows."""

import math
import re
import statistics

import numpy as np
import pytest

from bench import claims
from bench.shares import outside_share_law
from support.common import read_json, write_json
from support.config import PRESETS
from tests.helpers import ROOT


def make_value(mean, std=1.0, seeds=3, name="a", **changes):
    """Return a value of read_cell, of a table in which it is the only variant."""
    value = dict(mean=mean, std=std, seeds=seeds, spread={}, rows=None, row_variance=0.0,
                 file="f", name=("f", name), key="score", n=None)
    if std is not None:
        value["spread"] = {("f", name): (std, seeds)}
    return value | changes


def read_table(file, key):
    """Return dict, name -> list of the values of a key, of the rows of results/FILE.json."""
    rows = read_json(ROOT / f"results/{file}.json")["rows"]
    return {row["name"]: row[f"{key}_all"] for row in rows if f"{key}_all" in row}


# 2.776 is Student's t of four degrees of freedom: the limit is 2.776 √(1/3 + 1/3) = 2.267
@pytest.mark.parametrize("difference, claim, verdict", [
    (2.28, {}, "holds"),
    (2.25, {}, "not decided"),
    (-2.28, {}, "does not hold"),
    (-2.28, dict(rule="lower"), "holds"),
    (0.2, dict(delta=2.5), "equal within 2.5"),
    (0.3, dict(delta=2.5), "not decided"),  # the interval ends at 2.57
    (2.28, dict(delta=9), "holds"),  # zero lies outside: this comes first
    (1.0, dict(paper="53.4, 50", effect=3.4), "the paper's effect is excluded at this size"),
    (1.0, dict(paper="53.2, 50", effect=3.2), "not decided"),
    (1.0, dict(paper="104, 100", effect=4), "not decided"),  # as a ratio, 52 and 50, it is inside
    (-1.0, dict(rule="lower", paper="46.6, 50", effect=-3.4),
     "the paper's effect is excluded at this size"),
    (0.2, dict(delta=2.5, paper="53.4, 50", effect=3.4), "equal within 2.5"),  # comes first
    (0.2, dict(rule="within", delta=2.5), "holds"),
    (5.0, dict(rule="within", delta=2.5), "does not hold, it is more"),
    (-5.0, dict(rule="within", delta=2.5), "does not hold, it is less"),
    (2.0, dict(rule="within", delta=2.5), "not decided"),
])
def test_verdict_follows_from_the_interval(difference, claim, verdict):
    here = make_value(50 + difference)
    control = make_value(50, name="b")
    kind, words = claims.judge(claim, here, control)
    assert words == verdict
    assert kind in claims.VERDICTS


def test_lead_has_the_interval_of_the_ratio(monkeypatch):
    """Fieller's: the ratios r with |51 - 50 r| at most t √(s² (1 + r²) / 3)."""
    sides = make_value(51), make_value(50, name="b")
    monkeypatch.setattr(claims, "read_sides", lambda claim: sides)
    lead, low, high = claims.find_lead({})
    assert lead == pytest.approx(2)
    for edge in (low, high):
        ratio = 1 + edge / 100
        limit = 2.776 * math.sqrt((1 + ratio**2) / 3)
        assert abs(51 - 50 * ratio) == pytest.approx(limit, rel=1e-3)
    assert low < 2 < high
    lead, low, high = claims.find_lead(dict(rule="lower"))
    assert low < lead < high and lead == pytest.approx(-2)


@pytest.mark.parametrize("difference, rule, verdict", [
    (0.1, "at least", "holds"),
    (-0.1, "at least", "does not hold"),
    (0.1, "equal", "does not hold"),
])
def test_numbers_without_an_error_are_compared_as_they_are(difference, rule, verdict):
    here = make_value(50 + difference, std=None, seeds=0)
    control = make_value(50, std=None, seeds=None)
    assert claims.judge(dict(rule=rule), here, control) == (verdict, verdict)


def test_numbers_with_an_error_have_no_exact_rule():
    value = make_value(50)
    with pytest.raises(ValueError, match="at least"):
        claims.judge(dict(rule="at least"), value, value)


@pytest.mark.parametrize("seeds", [1, 2])
def test_fewer_than_three_seeds_decide_nothing(seeds):
    kind, verdict = claims.judge({}, make_value(90, seeds=seeds), make_value(10))
    assert kind == "not decided"
    assert verdict.startswith("not decided, ")


@pytest.mark.parametrize("freedom, t", [
    (1, 12.706), (2, 4.303), (4, 2.776), (10, 2.228), (30, 2.042), (1e6, 1.960),
])
def test_quantiles_are_those_of_printed_tables(freedom, t):
    assert claims.find_quantile(freedom) == pytest.approx(t, abs=6e-4)


@pytest.mark.parametrize("among", [
    "",  # all variants of the table
    "proj",  # those of one task alone
])
def test_deviation_is_pooled_over_variants(among):
    claim = dict(here=["glue", "proj, lsh", "eval_loss"],
                 control=["glue", "proj, md5", "eval_loss"])
    if among:
        claim["among"] = among
    here, control = claims.read_sides(claim)

    difference = claims.compare(claim, here, control)

    runs = [values for name, values in read_table("glue", "eval_loss").items() if among in name]
    squares = sum((x - statistics.mean(values)) ** 2 for values in runs for x in values)
    freedom = sum(len(values) - 1 for values in runs)
    error = math.sqrt(squares / freedom * (1 / 3 + 1 / 3))
    assert difference.freedom == pytest.approx(freedom)
    assert difference.limit == pytest.approx(claims.find_quantile(freedom) * error)


def test_variant_without_a_number_of_runs_is_not_pooled():
    """The bag of words in controls.json has a deviation, but its runs were not kept."""
    here = claims.read_cell(["controls", "proj, lsh", "average"], {})
    assert ("controls", "bag of words, as emb 1K, md5") not in here["spread"]
    assert all(runs > 1 for _, runs in here["spread"].values())


def test_rows_of_different_kinds_are_not_pooled():
    """Welch: two variances s²/3 with two degrees of freedom each."""
    claim = dict(here=["glue", "proj, lsh", "eval_loss"], alone=True,
                 control=["glue", "proj, md5", "eval_loss"])
    difference = claims.compare(claim, *claims.read_sides(claim))
    runs = read_table("glue", "eval_loss")
    first = statistics.variance(runs["proj, lsh"]) / 3
    second = statistics.variance(runs["proj, md5"]) / 3
    freedom = (first + second) ** 2 / (first**2 / 2 + second**2 / 2)
    assert difference.freedom == pytest.approx(freedom)
    expected = claims.find_quantile(freedom) * math.sqrt(first + second)
    assert difference.limit == pytest.approx(expected, rel=1e-3)


def test_kept_rows_are_paired(tmp_path, monkeypatch):
    """Two rows that both find hard say nothing of the difference."""
    hard = np.array([10.0, 2.0, 7.0, 4.0])
    edge = np.array([1.0, 2.0, 1.0, 0.0])  # of the first variant, row by row
    rows = []
    for name, values in (("a", hard + edge), ("b", hard)):
        runs = [values - 1, values + 1]  # two runs of a variant
        rows.append(dict(
            name=name, seeds=3, score=values.mean(), score_std=0.5,
            score_rows=[" ".join(map(str, run)) for run in runs]))
    (tmp_path / "results").mkdir()
    write_json(tmp_path / "results/x.json", dict(rows=rows))
    monkeypatch.setattr(claims, "ROOT", tmp_path)
    claim = dict(here=["x", "a", "score"], control=["x", "b", "score"])

    difference = claims.compare(claim, *claims.read_sides(claim))

    of_runs = 0.25 * (1 / 3 + 1 / 3)  # four degrees of freedom
    of_rows = statistics.variance(edge) / 4  # three
    total = of_runs + of_rows
    freedom = total**2 / (of_runs**2 / 4 + of_rows**2 / 3)
    assert difference.mean == 1
    assert difference.freedom == pytest.approx(freedom)
    assert difference.limit == pytest.approx(claims.find_quantile(freedom) * math.sqrt(total))


def test_rows_that_were_not_kept_count_as_different_ones():
    claim = dict(here=["twins", "dense", "sst2"], control=["twins", "dense", "sst2"], n=872)
    here, control = claims.read_sides(claim)
    accuracy = statistics.mean(read_table("twins", "sst2")["dense"])
    of_rows = accuracy * (100 - accuracy) / 872
    assert here["row_variance"] == pytest.approx(of_rows)
    runs = read_table("twins", "sst2").values()
    of_runs = statistics.mean(map(statistics.variance, runs)) * (1 / 3 + 1 / 3)
    total = of_runs + 2 * of_rows
    freedom = total**2 / (of_runs**2 / 6 + 2 * of_rows**2 / 871)
    limit = claims.compare(claim, here, control).limit
    assert limit == pytest.approx(claims.find_quantile(freedom) * math.sqrt(total), rel=1e-4)


def test_rows_of_one_side_alone_count_as_different_ones():
    claim = dict(here=["sst2", "proj, lsh", "sst2"], control=["twins", "dense", "sst2"], n=872)
    here, control = claims.read_sides(claim)
    parts = claims.list_row_parts(claim, here, control)
    assert parts == [(pytest.approx(statistics.variance(here["rows"]) / 872), 871),
                     (control["row_variance"], 871)]


def test_error_of_a_correlation():
    claim = dict(n=1500, is_correlation=True)
    cell = claims.read_cell(["glue", "proj, lsh", "stsb"], claim)
    r = cell["mean"] / 100
    # for normal variables
    assert cell["row_variance"] == pytest.approx(1e4 * (1 - r**2) ** 2 * (1 + r**2 / 2) / 1500)


def test_share_of_the_control_has_the_share_of_its_error():
    cell = ["twins", "dense", "sst2"]
    whole = claims.compare({}, *claims.read_sides(dict(here=cell, control=cell)))
    claim = dict(here=cell, control=cell, share=0.1)
    here, part = claims.read_sides(claim)
    assert part["mean"] == pytest.approx(0.1 * here["mean"])
    assert part["std"] == pytest.approx(0.1 * here["std"])
    limit = claims.compare(claim, here, part).limit
    assert limit == pytest.approx(whole.limit * math.sqrt((1 + 0.01) / 2))


def test_ratio_of_two_numbers_of_a_row_has_no_error():
    cell = claims.read_cell(["bloom", "alpha 50, flat", "all / sure"], {})
    rows = read_json(ROOT / "results/bloom.json")["rows"]
    [row] = [row for row in rows if row["name"] == "alpha 50, flat"]
    assert cell["mean"] == row["all"] / row["sure"]
    assert cell["std"] is None
    assert cell["row_variance"] == 0


def test_readme_says_what_its_main_claims_are():
    listed = [claim for rows in read_json(ROOT / "docs/claims.json").values() for claim in rows]
    rows = [claim for claim in listed if "sides" in claim]
    text = (ROOT / "README.md").read_text("utf-8")
    assert f"has all {len(listed)} comparisons" in text
    assert len(rows) == 13
    assert all(claim.get("rule", "higher") in ("higher", "lower") for claim in rows)
    # the verdicts of its introduction and of its advice
    for name, kind in (
        ("Proj beats a bag of words, SST-2 (our control)", "does not hold"),
        ("Proj scores higher than a small BERT", "not decided"),
        ("α 4 (widths 256, 168), each item asked for in turn", "holds"),
        ("a table as wide with a full softmax (width 256), α 4", "not decided"),
        ("random walks without training, α 4, each item", "holds"),
        ("random walks without training, α 4, names of Python", "equal"),
        ("an untied table in a model of five times its size, 4,000", "does not hold"),
        ("the median names more hidden words than the mean, 4,000", "not decided"),
        ("after equal time of training", "holds"),
        ("MD5 bits under Proj, held-out docstrings, 1,500 steps", "holds"),
        ("english-detect.pt beats a bag of words, SST-2", "not decided"),
    ):
        claim = find_claim(name)
        assert claims.judge(claim, *claims.read_sides(claim))[0] == kind, name
    # what it says beside its table
    for own, other in (
        (("sst2", "proj, lsh"), ("bertmlm", "lookup of BPE pieces, MLM")),
        (("gaps-4000", "median"), ("untied-4000", "20,000 words, not tied")),
        (("simplewiki", "superbloom, 0 of 2 maps coherent"),
         ("sampled", "lookup, as wide, sampled softmax (d 256)")),
    ):
        sizes = [read_table_rows(file, name=name)["parameters"] for file, name in (own, other)]
        assert f"{100 * (1 - sizes[0] / sizes[1]):.0f} % of all parameters" in text
    for name, words in (
        ("Proj scores higher than Emb 1K, SST-2", "had {} points less on SST-2"),
        ("Proj beats a bag of words, SST-2 (our control)", "(by {} points), and whether"),
        ("an untied table in a model of five times its size, 4,000", "fewer words (by {} points)"),
        ("a table in a model of equal size, α 25", "it guessed {} points fewer links than"),
    ):
        difference = claims.measure_sides(find_claim(name))[2]
        assert words.format(f"{abs(difference):.1f}") in text
    english = read_table_rows("english", name="english-detect.pt, sst2")
    assert f"has {english['score']:.1f} %, and is [not shown to differ]" in text
    assert f"mean accuracy is about {english['score']:.0f} %. A bag" in text
    assert f"without pre-training, gets {english['bag_of_words']:.0f} %" in text


@pytest.mark.parametrize("here, control, changes, cell", [
    # 76.43 and 82.20 are 5.77 apart, and 76.4 and 82.2 as far as the means: 5.8
    (make_value(76.43), make_value(82.196, name="b"), {}, "82.2, A is **worse** by 5.8 ± 2.3"),
    (make_value(76.43), make_value(82.196, name="b"), dict(rule="lower"),
     "82.2, A is **better** by 5.8 ± 2.3"),
    (make_value(14.943), make_value(13.764, 1.0, name="b"), {},
     "13.76, **undecided** (difference +1.18 ± 2.27)"),
    (make_value(14.943), make_value(13.764, 1.0, name="b"), dict(delta=4),
     "13.76, **equal within 4** (difference +1.18 ± 2.27)"),
    (make_value(0.035, 0.001), make_value(0.114, 0.001, name="b"), dict(whole=1),
     "11.4, A is **worse** by 7.9 ± 0.2"),
])
def test_cell_of_readme_subtracts_rightly(here, control, changes, cell, monkeypatch):
    monkeypatch.setattr(claims, "read_sides", lambda claim: (here, control))
    claim = changes | dict(sides=["ours", "another"])
    score, beside = claims.compare_sides("A", claim, claims.count_digits(claim))
    assert beside == f"another: {cell}"
    other = re.search(r"[\d.]+", cell)[0]
    gap = re.search(r"([+\d.]+) ±", cell)[1]
    assert abs(float(score) - float(other)) == pytest.approx(float(gap))


def test_cells_of_a_row_of_readme_subtract_from_one_score():
    num_rows = 0
    for paper, listed in read_json(ROOT / "docs/claims.json").items():
        if not any("saves" in claim for claim in listed):
            continue
        num_rows += 1
        row = claims.list_front_cells(paper, listed)
        for cell in [row["replaced"], *(row["simpler"] or "").split("<br>")]:
            if cell:
                other, gap = re.search(r": ([\d.]+), .*?([-+\d.]+) ±", cell).groups()
                lead = float(row["score"]) - float(other)
                assert abs(lead) == pytest.approx(abs(float(gap))), cell
    assert num_rows == 4


def test_page_says_how_far_tokens_and_half_the_prior_are_ahead():
    page = " ".join((ROOT / "docs/superbloom.md").read_text("utf-8").split())
    claim = find_claim("α 4 (widths 256, 168), each item asked for in turn")
    difference, limit, _ = claims.compare(claim, *claims.read_sides(claim))
    assert f"by {difference:.1f} points of rec@1**" in page
    interval = f"{difference - limit:.1f} to {difference + limit:.1f}"
    assert f"with a 95 % interval of {interval}" in page
    walks = read_table_rows("walks", name="neighbors: random walks")
    sizes = np.array([int(size) for size in walks["sizes"].split()])
    assert f"{sizes.sum():,} predictions" in page
    # the recall of an item, by the size of its set
    scale = sizes.sum() / len(sizes)
    recall = {}
    for name, row in (("tokens", read_table_rows("equal", name="tokens-alpha4")), ("walks", walks)):
        hits = claims.read_rows(row, "recall") * scale  # of each set, in percent
        is_large = sizes >= 24
        recall[name] = [hits[part].sum() / sizes[part].sum() for part in (is_large, ~is_large)]
    words = "{:.1f} against {:.1f} %, and on smaller ones {:.1f} against {:.1f} %"
    (large, small), (walks_large, walks_small) = recall["tokens"], recall["walks"]
    assert words.format(large, walks_large, small, walks_small) in page
    full = find_claim("a table as wide with a full softmax (width 256), α 4")
    difference, limit, _ = claims.compare(full, *claims.read_sides(full))
    assert f"lead it by {difference:.1f} ± {limit:.1f} points, which is not decided" in page
    assert claims.judge(full, *claims.read_sides(full))[0] == "not decided"
    claim = find_claim("a full softmax ranks higher than a sampled one")
    difference, limit, _ = claims.compare(claim, *claims.read_sides(claim))
    assert f"the full softmax leads by {difference:.1f} points" in page
    assert limit - difference > 0 and difference + limit < claim["delta"] == 2
    claim = find_claim("random walks without training, α 4, each item")
    difference, limit, _ = claims.compare(claim, *claims.read_sides(claim))
    interval = f"{difference - limit:.1f} to {difference + limit:.1f}"
    assert f"lead by {difference:.1f} points ({interval})" in page
    names = find_claim("walks without training, α 4, names of Python")
    difference, limit, _ = claims.compare(names, *claims.read_sides(names))
    assert f"two hash tokens of α 4 lead by {difference:.1f} ± {limit:.1f} points" in page
    assert claims.judge(names, *claims.read_sides(names)) == ("equal", "equal within 1")
    sizes = read_table_rows("walks-names", name="neighbors: random walks")["sizes"].split()
    assert f"{sum(map(int, sizes)):,} predictions, settings" in page
    claim = find_claim("six layers rank higher than one wide")
    difference, _, _ = claims.compare(claim, *claims.read_sides(claim))
    lead, low, high = claims.find_lead(claim)
    assert f"Six layers beat it by {difference:.1f} points of rec@1**, {lead:.0f} %" in page
    assert f"interval of {low:.0f} to {high:.0f} % (the paper has " in page
    assert f"{claims.find_claimed_lead(claim):.0f} %): six runs a side" in page
    sampled = find_claim("a table as wide with a sampled softmax")
    difference, limit, _ = claims.compare(sampled, *claims.read_sides(sampled))
    tables_page = " ".join((ROOT / "docs/tables.md").read_text("utf-8").split())
    words = f"lead the wider table by {difference:.1f} points ({difference - limit:.1f} to "
    assert f"{words}{difference + limit:.1f}), with 62 % of its model's parameters" in tables_page
    for run in read_table_rows("layers", name="six")["runs"]:  # whole numbers of hits
        assert run["recall"] * 12_330 / 100 == pytest.approx(round(run["recall"] * 123.3), abs=1e-6)
    assert "12,330 predictions" in page
    six = read_table_rows("depth", name="superbloom, 6 layers")["rec@1"]
    wide = read_table_rows("wide")["rec@1"]
    assert f"({100 * six:.1f} and {100 * wide:.1f} %, results/depth.json and wide.json)" in page
    beam = read_table_rows("beams", name="bloom-items, B 20")
    sure = read_table_rows("beams", name="bloom-items, until certified")
    assert f"loses {100 * (sure['rec@20'] - beam['rec@20']):.2f} points of recall@20" in page
    rows = {row["name"]: row for row in read_json(ROOT / "results/prior-pages.json")["rows"]}
    for key in ("rec@1", "rec@10"):
        gains = []
        for draw in range(4):
            name = f"sets-tokens-alpha4-{draw}"
            gains.append(100 * (rows[f"{name}, 0.5"][key] - rows[f"{name}, 0.0"][key]))
        assert f"{key} by {statistics.mean(gains):.1f} " in page
        assert f"± {statistics.stdev(gains):.1f}" in page


def test_readme_says_what_was_measured_on_a_gpu():
    text = (ROOT / "README.md").read_text("utf-8")
    ratio = {}  # positions -> flash attention's time over that of LSH attention
    for L in (8_192, 16_384):
        row = read_table_rows("gpu-attention", dtype="bfloat16", data="random", L=L)
        ratio[L] = row["dense"] / row["flex"]
    assert ratio[8_192] < 1 < ratio[16_384]
    assert "On a GPU the layer is [faster](docs/speed.md) from 16,384 positions" in text
    proj = read_table_rows("gpu-steps", batch=64, compiled="yes")
    bert = read_table_rows("gpu-bert", batch=64, compiled="no")  # the faster of its two
    page = (ROOT / "docs/speed.md").read_text("utf-8")
    assert f"A step of Proj is {bert['ms'] / proj['ms']:.1f} times as fast as the faster" in page
    paper = PRESETS["hashformer"]
    positions = paper["steps"] * paper["batch"] * 512
    hours = positions / proj["tokens"] / 3600
    assert f"about {hours:.0f} hours on that H200 (not run; estimated" in text
    assert f"needs {proj['gib']:.0f} GiB of GPU memory" in text
    default = read_table_rows("gpu-words", name="tiny, B 32", workers="4", compiled="yes")
    words = PRESETS["tiny"]["steps"] * PRESETS["tiny"]["batch"] * 127
    assert words / default["low"] < 120


def test_page_says_what_symmetric_scores_and_the_hash_do_to_the_loss():
    page = " ".join((ROOT / "docs/claims.md").read_text("utf-8").split())
    loss = {row["name"]: row["loss"] for row in read_json(ROOT / "results/scores.json")["rows"]}
    gains = [loss[name] - loss[f"{name}-symmetric"] for name in ("dense", "lsh", "random")]
    assert "by {:.2f} with all pairs, {:.2f} with LSH of 2 hyperplanes, and {:.2f}".format(
        *gains) in page
    for name, words in (("lsh", "LSH raises the loss, by {:.2f} with plain scores and {:.2f}"),
                        ("random", "random pairs raise it by {:.2f} and {:.2f}")):
        plain = loss[name] - loss["dense"]
        symmetric = loss[f"{name}-symmetric"] - loss["dense-symmetric"]
        assert words.format(plain, symmetric) in page


def test_page_says_what_keys_outside_a_bucket_weigh():
    page = (ROOT / "docs/bert-lsh.md").read_text("utf-8")
    law = [100 * outside_share_law(64, r, 256) for r in (1, 2, 4, 8)]
    words = "{:.0f}, {:.0f}, {:.0f} and\n{:.0f} % with 1, 2, 4 and 8 hyperplanes"
    assert words.format(*law) in page


def test_readme_and_page_say_what_lsh_attention_does_after_equal_time():
    text = (ROOT / "README.md").read_text("utf-8")
    page = (ROOT / "docs/bert-lsh.md").read_text("utf-8")
    rows = {row["name"]: row for row in read_json(ROOT / "results/time.json")["rows"]}
    steps = {name: row["runs"][0]["settings"]["steps"] for name, row in rows.items()}
    assert f"{100 - 100 * steps['dense'] / steps['lsh']:.0f} % of a training step's time" in text
    script = (ROOT / "runs/bert-lsh-time.sh").read_text("utf-8")
    rates = re.search(r"([\d.]+)K and ([\d.]+)K words a second", script).groups()
    for name, rate in zip(("lsh", "dense"), rates):
        minutes = steps[name] * 4_096 / float(rate) / 1_000 / 60
        assert f"after {minutes:.0f} minutes" in text
        assert f"the same {minutes:.0f} minutes" in text
    pairs = statistics.mean(run["settings"]["pairs"] for run in rows["lsh"]["runs"])
    claim = find_claim("after equal time of training")
    difference, limit, _ = claims.compare(claim, *claims.read_sides(claim))
    lead = abs(difference)
    interval = f"{lead - limit:.2f} to {lead + limit:.2f}"
    assert f"lower by {lead:.2f} ({interval}), with {100 * pairs:.1f} % of the pairs" in page
    share = read_table_rows("steps", name="mlm, L 4096, bfloat16")["share_all"]
    assert f"two threads it takes [{share:.0f} %]" in page
    for name in ("mlm, L 1024, float32", "mlm, L 1024, bfloat16"):  # "about as long"
        assert 90 < read_table_rows("steps", name=name)["share_all"] < 110
    for name in ("sr, L 4096, float32", "sr, L 4096, bfloat16"):  # "would take twice that"
        assert 40 < read_table_rows("steps", name=name)["share_all"] < 60
    rows = {row["name"]: row for row in read_json(ROOT / "results/docstrings-more.json")["rows"]}
    dense = rows["dense, 1,024 positions"]["loss"]
    lsh = rows["LSH, r 8, m 256, 1,024 positions"]["loss"]
    assert f"the loss there is worse by {lsh - dense:.2f}" in text


def test_page_says_what_fewer_pairs_cost():
    page = " ".join((ROOT / "docs/claims.md").read_text("utf-8").split())
    rows = {row["name"]: row for row in read_json(ROOT / "results/frontier.json")["rows"]}
    dense = rows["128-dense"]["loss"]
    costs = [rows[f"128-{r}"]["loss"] - dense for r in (1, 2, 4, 8)]
    shares = [rows[f"128-{r}"]["pairs"] for r in (2, 4, 8)]
    words = ("higher by {:.2f} with one, which is equal within δ, and by {:.2f}, {:.2f} and {:.2f} "
             "with 2, 4 and 8, which score {:.0f}, {:.0f} and {:.0f} %")
    assert words.format(*costs, *shares) in page
    for L in (512, 1024):
        losses = [row["loss"] for name, row in rows.items() if name.startswith(f"{L}-")]
        assert max(losses) - min(losses) < 0.02
    stds = [row["loss_std"] for row in rows.values()]
    assert f"from {min(stds):.3f} to {max(stds):.3f}" in page
    shared = rows["128-shared-4"]["pairs"]
    assert f"{shared:.0f} % of the pairs in place of {shares[1]:.0f}" in page
    gain = dense - rows["128-shared-dense"]["loss"]
    assert f"such keys lower the loss by {gain:.2f}" in page


def read_table_rows(file, **values):
    """Return the only row of results/FILE.json that has these values."""
    rows = read_json(ROOT / f"results/{file}.json")["rows"]
    [row] = [row for row in rows if values.items() <= row.items()]
    return row


def find_claim(words):
    """Return the row of docs/claims.json that has these words."""
    listed = read_json(ROOT / "docs/claims.json").values()
    [claim] = [claim for rows in listed for claim in rows if words in claim["claim"]]
    return claim
