"""Compare fine-tunings: how much of the score is retained, and how much smaller the model is.

    python -m bench.compare retention --runs out/lookup-bpe-mlm-glue out/proj-lsh-glue

The first folder is the baseline, with which the others are compared. Each is an --out of
finetune.py.

Sources:
    [HF] Xue & Aletras 2022, HashFormers
"""

from pathlib import Path

from bench import harness
from bench.harness import RUNS
from common import InputError, read_json

RETENTION = """
    model     | name    | s
    MNLI      | mnli    | .1f
    QNLI      | qnli    | .1f
    QQP       | qqp     | .1f
    RTE       | rte     | .1f
    SST-2     | sst2    | .1f
    MRPC      | mrpc    | .1f
    CoLA      | cola    | .1f
    STS-B     | stsb    | .1f
    PRR %     | average | .1f
    PCR all % | pcr_all | .1f
    PCR emb % | pcr_emb | .1f
    PoEP %    | poep    | .1f
"""


def bench_retention(args):
    """Compare the scores and sizes of fine-tunings with those of the first one. [HF Table 2]"""
    # scores and sizes stand there, so no checkpoint is read
    runs = [read_json(f"{folder}/results.json") for folder in args.runs]
    for folder, results in zip(args.runs[1:], runs[1:]):
        compared = compare(results, runs[0])
        *_, last = results["tasks"].values()
        yield dict(name=Path(folder).name, average=compared["prr_average"],
                   pcr_all=compared["pcr_all"], pcr_emb=compared["pcr_emb"],
                   poep=100 * last["size"]["poep"], **compared["prr"])


def compare(results, baseline):
    """Return performance retention (PRR) and parameter compression (PCR), in percent.

    Args:
        results, baseline: dict, contents of results.json. A task counts if both have it.

    Returns:
        dict:
            prr: dict, task -> score in percent of the baseline's, None where that is 0 or less.
                [HF §4.4 eq.4]
            prr_average: the same ratio for the averages over the tasks.
            pcr_all, pcr_emb: percent of all parameters, and of the embedding's parameters, that
                are saved. [HF §4.4 eq.6]

    Raises:
        InputError: The two share no task, or a task differs in its rows or in its metric.
    """
    prr = {}
    total = 0.0
    baseline_total = 0.0
    for name, row in results["tasks"].items():
        if name not in baseline["tasks"]:
            continue
        other = baseline["tasks"][name]
        for key in ("metric", "rows"):
            if row[key] != other[key]:
                raise InputError(f"{name}: expected equal {key}, got {row[key]} and {other[key]}. "
                                 "Score the same rows.")
        # the last task's: heads differ by a few hundred parameters
        size = row["size"]
        baseline_size = other["size"]
        # in percent of the baseline's score, as the paper has it
        prr[name] = percent(row["mean"], other["mean"])
        total += row["mean"]
        baseline_total += other["mean"]
    if not prr:
        raise InputError("results.json: expected a task that is in both, got none.")
    return dict(
        prr=prr,
        prr_average=percent(total, baseline_total),
        pcr_all=100 - percent(size["total"], baseline_size["total"]),
        pcr_emb=100 - percent(size["embedding"], baseline_size["embedding"]),
    )


def percent(value, whole):
    """Return value in percent of whole, None where whole is 0 or less, as a correlation may be."""
    if whole <= 0:
        return None
    return 100 * value / whole


TABLES = {"retention": (bench_retention, RETENTION, RUNS)}


if __name__ == "__main__":
    harness.main("bench.compare", TABLES, __doc__)
