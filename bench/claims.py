"""The papers' claims beside what was measured here: tables of docs/claims.md and README.md.

A claim is a row of docs/claims.json, such as

    {"claim": "LSH bits score higher than MD5 bits under Proj, GLUE", "rule": "higher", ...
     "here": ["glue", "proj, lsh", "average"], "control": ["glue", "proj, md5", "average"]}

Its verdict follows from the two numbers, the spread of their runs and the rows that they score, by
the rule in `judge`, and from nothing else. The fields of a claim:

    claim, place, paper         text: what it says, where ("none": ours), and the paper's number
    here, control               [file, row, key], the number in results/, or a number. The key
                                "all / sure" is the ratio of two
    rule                        see `judge`
    delta                       the smallest difference that matters, said before the runs
    effect                      the paper's difference, of the same endpoint
    share                       the control is multiplied by it
    n, whole, is_correlation, seeds     see `read_cell`
    among                       of a table of several tasks: the variants that have it in their name
                                are pooled, and no others
    alone                       nothing is pooled: each side has its own spread
    note                        one to three sentences behind the verdict
    script                      its name in runs/
    measured, sides             of a row of README's tables: what was measured, and short names of
                                the two sides. The picture has these rows, too
    saves                       what the method saves. Rows with it are README's first table

    python -m bench.figures readme      write the tables anew
"""

import math
import re
from collections import Counter
from typing import NamedTuple

import numpy as np

from bench.harness import ROOT, markdown
from support.common import read_json

CONFIDENCE = 0.95
VERDICTS = {  # kind of a verdict -> how the counts name it
    "holds": "{} hold",
    "does not hold": "{} do not",
    "equal": "{} turned out equal within the δ that was said before",
    "excluded": "for {} the paper's effect is excluded at this size",
    "not decided": "{} are not decided",
}
COLUMNS = """
    claim            | claim   | s
    place            | place   | s
    paper            | paper   | s
    here             | here    | s
    control          | control | s
    lead that counts | lead    | s
    holds here?      | verdict | s
    script           | script  | s
"""
# README's table
RESULTS = """
    method           | method   | s
    saves            | saves    | s
    measured         | measured | s
    its score        | score    | s
    what it replaces | replaced | s
    simpler ways     | simpler  | s
"""


def list_tables():
    """Yield marker and markdown: all claims of each paper, README's table, the counts."""
    counts = {"papers": Counter(), "ours": Counter()}
    front = []
    for paper, claims in read_json(ROOT / "docs/claims.json").items():
        rows = [list_cells(claim) for claim in claims]
        yield f"claims {paper}", markdown(rows, COLUMNS)
        if any("saves" in claim for claim in claims):
            front.append(list_front_cells(paper, claims))
        for row in rows:
            owner = "ours" if row["place"].startswith("none") else "papers"
            counts[owner][row["kind"]] += 1
    yield "claims results", markdown(front, RESULTS)
    # a sentence for the papers' claims, and one for ours
    text = ""
    names = {
        "papers": "claims of the papers and the proposal (a claim on two tasks is two)",
        "ours": "claims of our own, many against simpler methods,",
    }
    for owner, name in names.items():
        count = counts[owner]
        parts = []
        for kind, words in VERDICTS.items():
            if count[kind] > 0:
                parts.append(words.format(count[kind]))
        text += f"Of {count.total()} {name} {', '.join(parts[:-1])}, and {parts[-1]}.\n"
    yield "claims count", text


def list_cells(claim):
    """Return the row of a table of docs/claims.md, dict, from a row of docs/claims.json."""
    here, control = read_sides(claim)
    difference = compare(claim, here, control)
    kind, verdict = judge(claim, here, control)
    script = f"runs/{claim['script']}.sh"
    if "seed" in verdict:
        lead = "none"
    elif difference.limit == 0:
        lead = "any"
    else:
        lead = write_number(dict(mean=difference.limit, std=None))
    row = dict(
        claim=claim["claim"], place=claim["place"], paper=claim["paper"],
        here=name_cell(claim, "here") + write_number(here),
        control=name_cell(claim, "control") + write_number(control),
        lead=lead, kind=kind, verdict=verdict, script=f"`{script}`")
    note = claim.get("note", "")
    # pooling supposes that all variants of a table vary alike: say where the verdict leans on it
    _, own_verdict = judge(claim | dict(alone=True), here, control)
    if own_verdict != verdict:
        note = f"{note} By the spread of these two alone: {own_verdict}.".lstrip()
    if here["file"] != control["file"] and control["seeds"]:
        note = f"{note} Trained at another time.".lstrip()
    if note:
        row["verdict"] += f". {note}"
    return row


def list_front_cells(paper, claims):
    """Return the row of a paper in README's table, dict, from its claims in docs/claims.json.

    The claim that has "saves" is beside what the method replaces, those with "simpler" are beside
    simpler ways.
    """
    [main] = [claim for claim in claims if "saves" in claim]
    simpler = [claim for claim in claims if claim.get("simpler")]
    digits = max(count_digits(claim) for claim in [main, *simpler])
    score, replaced = compare_sides(paper, main, digits)
    others = [compare_sides(paper, claim, digits)[1] for claim in simpler]
    return dict(method=f"**{paper}**, {main['sides'][0]}", saves=main["saves"],
                measured=main["measured"], score=score, replaced=replaced,
                simpler="<br>".join(others) or None)


def measure_sides(claim):
    """Return both sides' scores, their difference, and half of its interval. A share is in %."""
    here, control = read_sides(claim)
    difference, limit, _ = compare(claim, here, control)
    scale = 100 if claim.get("whole") == 1 else 1
    return [scale * number for number in (here["mean"], control["mean"], difference, limit)]


def count_digits(claim):
    """Return the fewest digits with which a reader's subtraction is right, and ± is not 0."""
    for digits in range(1, 5):
        own, other, gap, error = [round(number, digits) for number in measure_sides(claim)]
        if round(own - other, digits) == gap and error > 0:
            break
    return digits


def compare_sides(paper, claim, digits):
    """Return the method's score, str, and its rival's name and score, and who is better, str."""
    own, other, difference, error = measure_sides(claim)
    gap = round(own, digits) - round(other, digits)  # so that a reader's subtraction is right
    is_higher = difference > 0
    wants_higher = claim.get("rule", "higher") == "higher"
    word = "better" if is_higher == wants_higher else "worse"
    kind, words = judge(claim, *read_sides(claim))
    if kind in ("equal", "not decided", "excluded"):
        name = words if kind == "equal" else "undecided"
        verdict = f"**{name}** (difference {gap:+.{digits}f} ± {error:.{digits}f})"
    else:
        verdict = f"{paper} is **{word}** by {abs(gap):.{digits}f} ± {error:.{digits}f}"
    return f"{own:.{digits}f}", f"{claim['sides'][1]}: {other:.{digits}f}, {verdict}"


def find_lead(claim):
    """Return the lead of the side that is claimed better, and its interval, in % of the rival.

    The interval is from low to high. It has each ratio of the two sides that `compare_ratio` does
    not reject. Positive is better, of a loss as well as of a score.
    """
    here, control = read_sides(claim)
    ratio = here["mean"] / control["mean"]
    edges = []
    for direction in (-1, 1):
        inside = ratio
        outside = ratio + direction  # a lead of 100 % more, or less
        for _ in range(30):
            middle = (inside + outside) / 2
            missing, limit, _ = compare_ratio(claim, here, control, middle)
            if abs(missing) > limit:
                outside = middle
            else:
                inside = middle
        edges.append(inside)
    lead, low, high = [100 * (r - 1) for r in (ratio, *edges)]
    if claim.get("rule") == "lower":
        return -lead, -high, -low
    return lead, low, high


def find_claimed_lead(claim):
    """Return the lead that the paper prints, in % of the rival: "0.6, 0.5" is 20."""
    _, rival = read_paper(claim)
    return 100 * abs(claim["effect"]) / rival


def read_paper(claim):
    """Return the two numbers that the paper prints, that of the claimed side first."""
    numbers = re.findall(r"[\d.]+", claim["paper"])
    claimed = float(numbers[0])
    rival = float(numbers[1])
    assert abs(claimed - rival - claim["effect"]) < 1e-9, claim["paper"]
    return claimed, rival


# The rule


class Difference(NamedTuple):
    """A difference of two means, and its interval: mean - limit to mean + limit."""

    mean: float
    limit: float  # Student's t times the standard error
    freedom: float  # degrees of freedom


def compare(claim, here, control):
    """Return the Difference of two values of read_sides.

    Its variance is a sum of two parts:

        runs    s² / n on each side, s² being pooled over all variants of the tables (pool_variance)
        rows    where both kept a number for each scored row, the same rows: the variance of the
                differences of a row, over the number of rows. Else the sampling error of each
                side, as if they scored different rows, which is too large

    The degrees of freedom are those of Satterthwaite.
    """
    parts = [*list_run_parts(claim, here, control), *list_row_parts(claim, here, control)]
    mean = here["mean"] - control["mean"]
    total = sum(variance for variance, _ in parts)
    if total == 0:
        return Difference(mean, 0.0, math.inf)
    # Satterthwaite: parts with few degrees of freedom count by the square of their variance
    freedom = total**2 / sum(variance**2 / freedom for variance, freedom in parts)
    limit = find_quantile(freedom) * math.sqrt(total)
    return Difference(mean, limit, freedom)


def list_run_parts(claim, here, control):
    """Return the variances of a difference from run to run, list of (variance, freedom)."""
    share = claim.get("share", 1)
    parts = []
    # one deviation for both sides, from all variants of their tables
    if here["spread"] and control["spread"] and here["key"] == control["key"]:
        if not claim.get("alone"):
            variants = here["spread"] | control["spread"]
            variance, freedom = pool_variance(choose_variants(claim, variants, None))
            both = 1 / here["seeds"] + share**2 / control["seeds"]
            return [(variance * both, freedom)]
    # else a deviation for each side that has one: two numbers of a row, say, have two keys
    for value, factor in ((here, 1), (control, share)):
        if value["spread"]:
            variants = choose_variants(claim, value["spread"], value["name"])
            variance, freedom = pool_variance(variants)
            parts.append((factor**2 * variance / value["seeds"], freedom))
    return parts


def choose_variants(claim, variants, own_name):
    """Return the variants of a table, a dict as in pool_variance, that a claim pools."""
    if claim.get("alone"):
        return {own_name: variants[own_name]}
    chosen = {}
    for (file, name), spread in variants.items():
        if claim.get("among", "") in name:
            chosen[file, name] = spread
    return chosen


def list_row_parts(claim, here, control):
    """Return the variances of a difference from row to row, list of (variance, freedom)."""
    share = claim.get("share", 1)
    # subtle: a row that both find hard cancels. Without pairing it would count twice
    if here["rows"] is not None and control["rows"] is not None:
        differences = here["rows"] - share * control["rows"]  # (n,)
        n = len(differences)
        return [(differences.var(ddof=1) / n, n - 1)]
    parts = []
    for value, factor in ((here, 1), (control, share)):
        n = value["n"]
        row_variance = value["row_variance"]
        if value["rows"] is not None:  # those of the other side were not kept
            n = len(value["rows"])
            row_variance = value["rows"].var(ddof=1) / n
        if row_variance > 0:
            parts.append((factor**2 * row_variance, n - 1))
    return parts


def pool_variance(spread):
    """Return the variance of a run, pooled over variants, and its degrees of freedom.

    spread: dict, (file, name) -> (standard deviation, number of runs) of a variant.
    """
    freedom = sum(count - 1 for _, count in spread.values())
    # a variant with more runs counts more
    squares = sum((count - 1) * std**2 for std, count in spread.values())
    return squares / freedom, freedom


def find_quantile(freedom):
    """Return the t that |Student's t| exceeds with a probability of 5 %.

    With t = √freedom · tan(θ) the density is that of θ, cos(θ)^(freedom - 1), on a finite range.
    """
    theta = np.linspace(0, np.pi / 2, 100_001)
    density = np.cos(theta) ** (freedom - 1)
    # the area from 0 to each θ by trapezoids, of which a constant factor cancels
    area = np.cumsum(density) - density / 2 - density[0] / 2
    angle = np.interp(CONFIDENCE * area[-1], area, theta)
    return math.sqrt(freedom) * math.tan(angle)


def judge(claim, here, control):
    """Return the verdict on a claim: its kind, of VERDICTS, and its words.

    A claim that one number is higher (or lower) is decided by the interval of the difference, for
    which three runs a side are needed:

        holds, does not hold    zero lies outside, on the claimed side or the other
        equal                   the interval has zero and lies within ± delta
        excluded                the paper's lead lies outside, as a difference and as a ratio
        not decided             what is left

    The rule "within" claims that the difference is at most delta: it holds if the interval lies
    within ± delta, and does not if it lies outside. The rules "at least" and "equal" are for
    numbers without an error; equal allows 0.005.

    Args:
        claim: dict, a row of docs/claims.json, with a rule (default: higher).
        here, control: dict of read_sides.
    """
    # 0 and None are neither: nothing is random
    seeds = [here["seeds"], control["seeds"]]
    if 1 in seeds:
        return "not decided", "not decided, one seed"
    if 2 in seeds:
        return "not decided", "not decided, two seeds"
    rule = claim.get("rule", "higher")
    difference, limit, _ = compare(claim, here, control)
    if (limit > 0) != (rule in ("higher", "lower", "within")):
        raise ValueError(f"rule {rule}: expected higher, lower or within for numbers with an "
                         f"error, at least or equal for others, got a limit of {limit}.")
    # does zero, or ± delta, lie outside the interval?
    delta = claim.get("delta", 0)
    is_decided = True
    if rule == "within":
        holds = abs(difference) + limit <= delta
        is_decided = holds or abs(difference) - limit > delta
    elif rule in ("higher", "lower"):
        holds = (difference > 0) == (rule == "higher")
        is_decided = abs(difference) > limit
    elif rule == "at least":
        holds = difference >= 0
    elif rule == "equal":
        holds = round(difference, 2) == 0
    else:
        raise ValueError("rule: expected higher, lower, within, at least or equal, got "
                         f"{rule}.")
    if is_decided and holds:
        return "holds", "holds"
    if is_decided and rule == "within":
        side = "more" if difference > 0 else "less"
        return "does not hold", f"does not hold, it is {side}"
    if is_decided:
        return "does not hold", "does not hold"
    # zero lies inside: is the interval narrow, or does it leave the paper's number out?
    if rule != "within" and abs(difference) + limit <= delta:
        return "equal", f"equal within {delta}"
    if "effect" in claim and excludes_paper(claim, here, control):
        return "excluded", "the paper's effect is excluded at this size"
    return "not decided", "not decided"


def excludes_paper(claim, here, control):
    """Return whether our interval leaves out the paper's lead, as a difference and as a ratio.

    A difference alone says little where our numbers are far smaller than the paper's: 0.128 more
    than 0.306 is much more than 0.128 more than 0.073.
    """
    difference, limit, _ = compare(claim, here, control)
    claimed, rival = read_paper(claim)
    missing, missing_limit, _ = compare_ratio(claim, here, control, claimed / rival)
    return abs(difference - claim["effect"]) > limit and abs(missing) > missing_limit


def compare_ratio(claim, here, control, ratio):
    """Return the Difference of here and `ratio` times the control."""
    scaled = control | dict(mean=ratio * control["mean"])
    share = ratio * claim.get("share", 1)
    return compare(claim | dict(share=share), here, scaled)


# Numbers of results/


def read_sides(claim):
    """Return the values of read_cell that a claim compares: here, and its share of the control."""
    here = read_cell(claim["here"], claim)
    control = read_cell(claim["control"], claim)
    for key in ("mean", "std"):
        if "share" in claim and control[key] is not None:
            control[key] *= claim["share"]
    return here, control


def read_cell(cell, claim):
    """Return what a cell of results/ says, dict:

        mean, std       of its runs; std None: of one run, or nothing is random
        seeds           number of runs; None for a number of docs/claims.json, 0: nothing is random
        spread          dict, (file, name) -> (std, seeds) of all variants of its table
        rows            array (n,), a number for each scored row, a mean over runs; None: not kept
        row_variance    the sampling variance of n rows, where they were not kept
        file, name, key, n

    An average over tasks has no n, so its error leaves out the sampling error of the rows.

    Args:
        cell: file, row (its name, or its L) and key; or a number, which has no error.
        claim: dict with, where they differ from these defaults: n (None), the number of rows that
            were scored; whole (100), what all of them score; is_correlation (False), whether the
            score is no share of the rows; seeds (those of the row).
    """
    value = dict(mean=cell, std=None, seeds=None, spread={}, rows=None, row_variance=0.0,
                 file=None, name=None, key=None, n=claim.get("n"))
    if isinstance(cell, int | float):
        return value
    file, name, key = cell
    table = read_json(ROOT / f"results/{file}.json")["rows"]
    # a row of a bench by length has L in place of a name
    [row] = [row for row in table if name in (row.get("name"), row.get("L"))]
    value |= dict(file=file, name=(file, name), key=key)
    if " / " in key:
        above, below = key.split(" / ")
        return value | dict(mean=row[above] / row[below], seeds=0)
    value |= dict(mean=row[key], std=row.get(f"{key}_std"), rows=read_rows(row, key),
                  seeds=claim.get("seeds", count_runs(row, key)))
    if value["std"] is not None:
        assert value["seeds"] > 0, f"results/{file}.json does not say how many seeds it has"
        for other in table:
            runs = count_runs(other, key)  # 0 of a control whose runs were not kept
            if other.get(f"{key}_std") is not None and runs > 1:
                value["spread"][file, other["name"]] = (other[f"{key}_std"], runs)
    if "n" in claim and value["rows"] is None:
        whole = claim.get("whole", 100)
        share = row[key] / whole
        # the variance of a share p of n rows is p (1 - p) / n
        row_variance = share * (1 - share)
        if claim.get("is_correlation"):  # Spearman's [Bonett and Wright 2000]
            row_variance = (1 - share**2) ** 2 * (1 + share**2 / 2)
        value["row_variance"] = whole**2 * row_variance / claim["n"]
    return value


def count_runs(row, key):
    """Return the number of runs of a row's key; 0: nothing is random, as in counting."""
    return row.get("seeds", len(row.get(f"{key}_all", [])))


def read_rows(row, key):
    """Return a number for each scored row, the mean over runs, float array (n,); None: not kept."""
    texts = row.get(f"{key}_rows")
    if texts is None:
        return None
    if isinstance(texts, str):
        texts = [texts]
    return np.mean([[float(number) for number in text.split()] for text in texts], axis=0)


def name_cell(claim, side):
    """Return "name: " of the cell "here" or "control" of a claim; "" where it is a number."""
    cell = claim[side]
    if not isinstance(cell, list):
        return ""
    _, name, key = cell
    if isinstance(claim["control"], list) and claim["here"][1] == claim["control"][1]:
        name = f"{name}, {key}"  # two numbers of one row
    if side == "control" and "share" in claim:
        name = f"{claim['share']} × {name}"
    return f"{name}: "


def write_number(value):
    """Return "mean ± std" of a value of read_cell, or its mean alone, with about three digits."""
    mean = value["mean"]
    if isinstance(mean, int):  # exact, a number of docs/claims.json
        return str(mean)
    if abs(mean) < 0.01:
        form = ".4f"
    elif abs(mean) < 1:
        form = ".3f"
    elif abs(mean) < 10:
        form = ".2f"
    else:
        form = ".1f"
    text = format(mean, form)
    if value["std"] is not None:
        text += f" ± {value['std']:{form}}"
    return text
