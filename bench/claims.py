"""The papers' claims beside what was measured here: tables of docs/claims.md and README.md.

A claim is a row of docs/claims.json, such as

    {"claim": "LSH bits score higher than MD5 bits under Proj, GLUE", "rule": "higher", ...
     "here": ["glue", "proj, lsh", "average"], "control": ["glue", "proj, md5", "average"]}

Its verdict follows from the two numbers and their errors, by the rule in `judge`, and from nothing
else. The fields of a row:

    claim, place, paper         text: what it says, where ("none": ours), and the paper's number
    here, control               [file, row, key], the number in results/, or a number; the key
                                "all / sure" is the ratio of two
    rule                        see `judge`
    share                       the control is multiplied by it
    n, whole, is_correlation, seeds     see `read_cell`
    note                        one to three sentences behind the verdict
    script                      its name in runs/
    front                       short words for the claim, which README and the figure show
    bars, unit                  what they call the two numbers, and the unit

    python -m bench.figures readme      write the tables anew
"""

import math
from collections import Counter

from bench.harness import ROOT, markdown
from support.common import read_json

# Student's t, two-sided 95 %, by degrees of freedom; three seeds on each side have at most four
LIMITS = {2: 4.303, 3: 3.182, 4: 2.776}
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
FRONT = """
    claim       | front       | s
    measured    | unit        | s
    here        | own_bar     | s
    control     | control_bar | s
    holds here? | kind        | s
    note        | note        | s
    script      | link        | s
"""


def list_tables():
    """Yield marker and markdown: all claims of each paper, README's main ones, the counts."""
    counts = {"papers": Counter(), "ours": Counter()}
    for paper, claims in read_json(ROOT / "docs/claims.json").items():
        rows = [list_cells(claim) for claim in claims]
        yield f"claims {paper}", markdown(rows, COLUMNS)
        yield f"front {paper}", markdown([row for row in rows if "front" in row], FRONT)
        for row in rows:
            owner = "ours" if row["place"].startswith("none") else "papers"
            counts[owner][row["kind"]] += 1
    text = ""
    for owner, name in (("papers", "claims (one per task) of the papers and the proposal"),
                        ("ours", "claims of our own, many against simpler methods,")):
        count = counts[owner]
        text += (f"Of {count.total()} {name} {count['holds']} hold, {count['does not hold']} do "
                 f"not, and {count['not decided']} are not decided.\n")
    yield "claims count", text


def list_cells(claim):
    """Return the row of both tables, dict, from a row of docs/claims.json."""
    here, control = read_sides(claim)
    script = f"runs/{claim['script']}.sh"
    verdict = judge(claim, here, control)
    limit = find_limit(here, control)
    if "seed" in verdict:
        lead = "none"
    elif limit == 0:
        lead = "any"
    else:
        lead = write_number(dict(mean=limit, std=None))
    row = dict(
        claim=claim["claim"], place=claim["place"], paper=claim["paper"],
        here=name_cell(claim, "here") + write_number(here),
        control=name_cell(claim, "control") + write_number(control),
        lead=lead, kind=verdict.split(",")[0], verdict=verdict, script=f"`{script}`")
    note = claim.get("note", "")
    if here["file"] != control["file"] and control["file"] is not None:
        note = f"{note} Trained at another time.".lstrip()
    if note:
        row["verdict"] += f". {note}"
    if "front" in claim:
        own, other = claim["bars"]
        row |= dict(front=claim["front"], unit=claim["unit"], note=note,
                    own_bar=f"{own}: {write_number(here)}",
                    control_bar=f"{other}: {write_number(control)}",
                    link=f"[{claim['script']}]({script})")
    return row


def read_sides(claim):
    """Return the values of read_cell that a claim compares: here, and its share of the control."""
    here = read_cell(claim["here"], claim)
    control = read_cell(claim["control"], claim)
    for key in ("mean", "std", "error", "seed_error"):
        if "share" in claim and control[key] is not None:
            control[key] *= claim["share"]
    return here, control


def find_limit(here, control):
    """Return the lead that decides a claim: Student's t times the standard error, after Welch.

    Three seeds have two degrees of freedom. If one side has all of the spread, so has the
    difference; if both have as much, it has four. Scored rows are many.
    """
    error = math.hypot(here["error"], control["error"])
    freedom = 4
    spread = here["seed_error"] ** 4 / 2 + control["seed_error"] ** 4 / 2
    if spread > 0:
        freedom = min(4, error**4 / spread)
    return LIMITS[math.floor(freedom + 1e-6)] * error


def judge(claim, here, control):
    """Return the verdict on a claim: "holds", "does not hold", or "not decided".

    A claim that one number is higher (or lower) is decided by a difference above find_limit, for
    which three seeds a side are needed. The rules "at least" and "equal" are for numbers without an
    error; equal allows 0.005.

    Args:
        claim: dict, a row of docs/claims.json, with a rule (default: higher).
        here, control: dict of read_sides.
    """
    seeds = [here["seeds"], control["seeds"]]
    if 1 in seeds:
        return "not decided, one seed"
    if 2 in seeds:  # LIMITS are those of three
        return "not decided, two seeds"
    rule = claim.get("rule", "higher")
    difference = here["mean"] - control["mean"]
    limit = find_limit(here, control)
    if (limit > 0) != (rule in ("higher", "lower")):
        raise ValueError(f"rule {rule}: expected higher or lower for numbers with an error, at "
                         f"least or equal for others, got a limit of {limit}.")
    if limit > 0 and abs(difference) <= limit:
        return "not decided"
    if rule == "higher":
        holds = difference > 0
    elif rule == "lower":
        holds = difference < 0
    elif rule == "at least":
        holds = difference >= 0
    elif rule == "equal":
        holds = round(difference, 2) == 0
    else:
        raise ValueError(f"rule: expected higher, lower, at least or equal, got {rule}.")
    return "holds" if holds else "does not hold"


def read_cell(cell, claim):
    """Return dict of mean, std, error, seed_error, seeds and file of a cell of results/.

    The error is that of a mean over seeds (seed_error) and, where the claim has an n, of n rows.
    An average over tasks has no n, so its error leaves out the sampling error of the rows. The rows
    count as independent on both sides, although they are the same rows; so the error is too large.

    Args:
        cell: file, row (its name, or its L) and key; or a number, which has no error.
        claim: dict with, where they differ from these defaults: n (None), the number of rows that
            were scored; whole (100), what all of them score; is_correlation (False), whether the
            score is no share of the rows; seeds (those of the row).
    """
    if isinstance(cell, int | float):
        return dict(mean=cell, std=None, error=0, seed_error=0, seeds=None, file=None)
    file, name, key = cell
    rows = read_json(ROOT / f"results/{file}.json")["rows"]
    # a row of a bench by length has L in place of a name
    [row] = [row for row in rows if name in (row.get("name"), row.get("L"))]
    if " / " in key:
        above, below = key.split(" / ")
        ratio = row[above] / row[below]
        return dict(mean=ratio, std=None, error=0, seed_error=0, seeds=0, file=file)
    mean = row[key]
    std = row.get(f"{key}_std")
    # 0: nothing is random, as in counting
    seeds = claim.get("seeds", row.get("seeds", len(row.get(f"{key}_all", []))))
    seed_error = 0
    if std is not None:
        assert seeds > 0, f"results/{file}.json does not say how many seeds it has"
        seed_error = std / math.sqrt(seeds)
    variance = seed_error**2
    if "n" in claim:
        whole = claim.get("whole", 100)
        share = mean / whole
        # the variance of a share p of n rows is p (1 - p) / n
        row_variance = share * (1 - share)
        if claim.get("is_correlation"):  # Spearman's [Bonett and Wright 2000]
            row_variance = (1 - share**2) ** 2 * (1 + share**2 / 2)
        variance += whole**2 * row_variance / claim["n"]
    return dict(mean=mean, std=std, error=math.sqrt(variance), seed_error=seed_error, seeds=seeds,
                file=file)


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
    """Return "mean ± std" of a value of read_cell, or its mean alone, with three digits."""
    mean = value["mean"]
    if isinstance(mean, int):  # exact, a number of docs/claims.json
        return str(mean)
    if abs(mean) < 1:
        form = ".3f"
    elif abs(mean) < 10:
        form = ".2f"
    else:
        form = ".1f"
    text = format(mean, form)
    if value["std"] is not None:
        text += f" ± {value['std']:{form}}"
    return text
