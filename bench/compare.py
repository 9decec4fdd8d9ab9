"""Compare two fine-tunings: how much of the score is retained, and how much smaller the model is.

    python -m bench.compare out/proj-lsh-glue out/lookup-bpe-mlm-glue

Sources:
    [HF] Xue & Aletras 2022, HashFormers
Out of scope: the fine-tunings. Both folders are an --out of finetune.py.
"""

import argparse

from common import InputError, read_json, reading, run_script


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


def print_comparison(*folders):
    """Print each ratio of two fine-tunings on a line."""
    # scores and sizes stand there, so no checkpoint is read
    results, baseline = [read_json(f"{folder}/results.json") for folder in folders]
    with reading(" or ".join(folders)):  # results of another program
        compared = compare(results, baseline)
    lines = {f"PRR {task}": ratio for task, ratio in compared["prr"].items()}
    lines["PRR average"] = compared["prr_average"]
    lines["PCR all"] = compared["pcr_all"]
    lines["PCR embedding"] = compared["pcr_emb"]
    # scores of unlike budgets can be compared, but not without a word
    for flag in ("epochs", "select"):
        values = [run["settings"][flag] for run in (results, baseline)]
        if values[0] != values[1]:
            print(f"not alike: --{flag} {values[0]} against {values[1]}")
    for name, ratio in lines.items():
        text = "n/a" if ratio is None else f"{ratio:.1f} %"
        print(f"{name}: {text}")


def main(argv=None):
    """Compare the two folders of the command line, or of the list argv."""
    p = argparse.ArgumentParser(description="Compare two fine-tunings: PRR and PCR [HF §4.4].")
    p.add_argument("folder", help="--out of finetune.py")
    p.add_argument("baseline", help="--out of another fine-tuning, of the same tasks")
    args = p.parse_args(argv)
    run_script("bench.compare", print_comparison, args.folder, args.baseline)


if __name__ == "__main__":
    main()
