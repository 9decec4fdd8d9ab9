"""The papers' claims beside what was measured here: tables of docs/claims.md and README.md.

docs/claims.json names, for each claim, a cell of results/ and its control. The verdict follows from
the two and their error, by the rule below, and from nothing else.

    python -m bench.figures readme      write the tables anew
"""

import math

from bench.harness import ROOT, markdown
from common import read_json

# Two-sided 95 % of Student's t with four degrees of freedom: three seeds, and three of the control.
# All rows have it. Where one side alone varies, the degrees of freedom are two, and the limit
# would be 4.30
LIMIT = 2.78
COLUMNS = """
    claim     s    claim
    place     s    place
    paper     s    paper
    here      s    here
    control   s    control
    verdict   s    holds here?
    script    s    script
"""
FRONT = """
    claim     s    PAPER: claim
    here      s    here
    control   s    control
    verdict   s    holds here?
    script    s    script
"""


def judge(claim, here, control):
    """Return the verdict on a claim, and the lead in its direction, in standard errors.

    A claim that one number is higher (or lower) holds if the lead is more than LIMIT standard
    errors. One seed decides nothing, because its spread is not known. The rules "at least" and
    "equal" compare numbers that have no error, so they have no lead.

    Args:
        claim: dict, a row of docs/claims.json. Its share (default: 1) multiplies the control.
        here, control: dict with mean, error (standard error of the mean) and seeds.
    """
    rule = claim.get("rule", "higher")
    share = claim.get("share", 1)
    difference = here["mean"] - share * control["mean"]
    if rule == "at least":
        return name_verdict(difference >= 0), None
    if rule == "equal":
        return name_verdict(round(difference, 2) == 0), None
    if rule == "lower":
        difference = -difference
    elif rule != "higher":
        raise ValueError(f"rule: expected higher, lower, at least or equal, got {rule}.")
    if here["seeds"] == 1 or control["seeds"] == 1:
        return "not decided, one seed", None
    error = math.hypot(here["error"], share * control["error"])
    if error == 0:
        raise ValueError(f"rule {rule}: expected numbers with an error. Use at least, or equal.")
    lead = difference / error
    if abs(lead) <= LIMIT:
        return "not decided", lead
    return name_verdict(lead > 0), lead


def name_verdict(is_true):
    """Return the word of the tables for a decided claim."""
    return "holds" if is_true else "does not hold"


def read_cell(cell, claim):
    """Return dict of mean, std, error and seeds of a cell of results/.

    The error is that of a mean over seeds and, where the claim has an n, of n rows.

    Args:
        cell: file, row (its name, or its L) and key; or a number, which has no error.
        claim: dict with, where they differ from these defaults: n (None), the number of rows that
            were scored, by here and by control as if they were different ones; whole (100), what
            all of them score; is_correlation (False), whether the score is no share of the rows.
    """
    if isinstance(cell, int | float):
        return dict(mean=cell, std=None, error=0, seeds=None)
    file, name, key = cell
    rows = read_json(ROOT / f"results/{file}.json")["rows"]
    # a row of a bench by length has L in place of a name
    [row] = [row for row in rows if name in (row.get("name"), row.get("L"))]
    # 0: nothing is random, as in counting
    seeds = row.get("seeds", len(row.get(f"{key}_all", [])))
    std = row.get(f"{key}_std")
    variance = 0
    if std is not None:
        assert seeds > 0, f"results/{file}.json does not say how many seeds it has"
        variance += std**2 / seeds
    if "n" in claim:
        whole = claim.get("whole", 100)
        share = row[key] / whole
        # the variance of a share p of n rows is p (1 - p) / n
        row_variance = share * (1 - share)
        if claim.get("is_correlation"):  # Spearman's [Bonett and Wright 2000]
            row_variance = (1 - share**2) ** 2 * (1 + share**2 / 2)
        variance += whole**2 * row_variance / claim["n"]
    return dict(mean=row[key], std=std, error=math.sqrt(variance), seeds=seeds)


def write_cell(cell, value):
    """Return "name: mean ± std" of a cell of docs/claims.json and its value."""
    form = ".3f" if abs(value["mean"]) < 10 else ".1f"
    text = format(value["mean"], form)
    if value["std"] is not None:
        text += f" ± {value['std']:{form}}"
    if isinstance(cell, list):
        text = f"{cell[1]}: {text}"
    return text


def list_claims(claims):
    """Yield the rows of a table from rows of docs/claims.json."""
    for claim in claims:
        script = claim["script"]
        row = dict(claim=claim["claim"], place=claim["place"], paper=claim["paper"] or "no number",
                   script=f"`runs/{script}.sh`")
        if "cost" in claim:
            row |= dict(here="not run", control="not run",
                        verdict=f"not run: {claim['cost']} of a core")
        else:
            here = read_cell(claim["here"], claim)
            control = read_cell(claim["control"], claim)
            verdict, lead = judge(claim, here, control)
            row |= dict(here=write_cell(claim["here"], here),
                        control=write_cell(claim["control"], control), verdict=verdict, lead=lead)
        if "note" in claim:
            row["verdict"] += f" ({claim['note']})"
        yield row


def list_tables():
    """Yield marker and markdown of the tables: all claims of a paper, and those of README."""
    for paper, claims in read_json(ROOT / "docs/claims.json").items():
        yield f"claims {paper}", markdown(list(list_claims(claims)), COLUMNS)
        front = [claim for claim in claims if "front" in claim]
        yield f"front {paper}", markdown(list(list_claims(front)), FRONT.replace("PAPER", paper))
