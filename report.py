"""Results of a fine-tuning: mean and spread over seeds, the table, and a comparison with another fine-tuning.

Paper map:    [HF §4.4 eq.4] compare   [HF §4.4 eq.6] compare
Sources:      [HF] Xue & Aletras 2022, HashFormers
Out of scope: training and scoring (finetune.py).
"""

import json
from pathlib import Path

import numpy as np

from runtime import InputError

COLUMNS = dict(mean=6, std=6, min=6, max=6, last=6, majority=8, bag_of_words=12)  # of the table: their widths


def summarize(runs):
    """Return the row of results.json of one task, from the results of its seeds."""
    first, metric = runs[0], runs[0]["metric"]
    values = [run["best"][metric] for run in runs]
    return dict(metric=metric, seeds=[run["seed"] for run in runs], values=values,
                mean=float(np.mean(values)), std=float(np.std(values, ddof=1)) if len(values) > 1 else None,
                min=min(values), max=max(values), last=float(np.mean([run["last"][metric] for run in runs])),
                n=first["n"], n_train=first["n_train"], **first["baselines"],
                all_metrics={m: float(np.mean([run["best"][m] for run in runs])) for m in first["best"]},
                one_class={str(run["seed"]): run["constant_prediction"] for run in runs
                           if run["constant_prediction"] is not None})


def build_results(runs, model, settings, baseline):
    """Return the content of results.json.

    Args:
        runs: dict task -> list of what finetune.fit returns, one for each seed, the first with `baselines`,
            and `facts`, a dict of split (which texts were scored), columns, rows of each split, parameters.
        model: dict of what is the same for all tasks; its parameters are those for the first one.
        settings: dict, the flags and files that the scores follow from.
        baseline: as of read_results, or None.
    """
    tasks = {name: summarize(seeds) | seeds[0]["facts"] for name, seeds in runs.items()}
    results = dict(tasks=tasks, model=model, settings=settings)
    if len(runs) > 1:
        by_seed = np.mean([row["values"] for row in tasks.values()], 0)
        std = float(np.std(by_seed, ddof=1)) if len(by_seed) > 1 else None
        results |= dict(average=float(by_seed.mean()), average_std=std)
    return results | (dict(compared=compare(results, baseline)) if baseline else {})


def write_json(path, content):
    """Replace a JSON file: a crash leaves the old one or the new one."""
    (temporary := Path(path + ".tmp")).write_text(json.dumps(content, indent=1))
    temporary.replace(path)


def read_results(folder):
    """Return the mean score of each task and the parameter counts of another fine-tuning, from its --out."""
    try:
        results = json.loads(Path(folder, "results.json").read_text())
        counts = {name: int(results["model"][name]) for name in ("parameters", "embedding")}
        tasks = {name: row | dict(mean=float(row["mean"])) for name, row in results["tasks"].items()}
        if min(counts.values()) < 1:
            raise ValueError(counts)
        return dict(folder=folder, tasks=tasks, **counts)
    except (OSError, ArithmeticError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise InputError(f"--baseline: expected an --out of finetune.py, got {folder} ({error}).") from error


def compare(results, baseline):
    """Return the share of a baseline's score that is retained, and how much smaller the model is, in percent.

    Args:
        results: as in results.json.
        baseline: as of read_results.

    Returns:
        dict: prr by task, where the baseline scores above 0 [HF §4.4 eq.4]; prr_average, the ratio of the
        averages over the tasks of both with equal metric and rows; pcr_all and pcr_emb [HF §4.4 eq.6].
    """
    ours = {name: row["mean"] for name, row in results["tasks"].items()
            if all(row[key] == baseline["tasks"].get(name, {}).get(key) for key in ("n", "metric"))}
    theirs = {name: baseline["tasks"][name]["mean"] for name in ours}
    return dict(baseline=baseline["folder"],
                prr={name: 100 * mean / theirs[name] for name, mean in ours.items() if theirs[name] > 0},
                prr_average=100 * sum(ours.values()) / total if (total := sum(theirs.values())) > 0 else None,
                pcr_all=100 * (1 - results["model"]["parameters"] / baseline["parameters"]),
                pcr_emb=100 * (1 - results["model"]["embedding"] / baseline["embedding"]))


def print_settings(args, config, model, device):
    """Print what is about to run: the flags, a Config, model as in results.json, and a torch.device."""
    origin = f"pre-trained, {args.ckpt or args.weights}" if model["pretrained"] else "not pre-trained"
    print(f"model: {origin}, emb {config.emb}, {config.layers} layers, width {config.width}, length "
          f"{config.length}")
    print("parameters: {parameters:,}, of which embedding {embedding:,} (PoEP {poep:.2f} %)".format(**model))
    print(f"training: {args.epochs} epochs, batch {args.batch}, lr {args.lr:g}, dropout {args.dropout}, "
          f"pool {args.pool}, bag {args.bag} (single texts), {args.seeds} seeds from {args.seed}")
    print(f"device: {device}, {args.dtype}, {'compile' if args.compile else 'no compile'}")


def print_results(results):
    """Print the table of scores, and what to know about them."""
    print(f"\n{'task':>8} {'metric':>8}", *(f"{c:>{width}}" for c, width in COLUMNS.items()), "    n")
    for name, row in results["tasks"].items():
        cells = {column: "n/a" if row[column] is None else f"{row[column]:.2f}" for column in COLUMNS}
        line = " ".join(f"{cells[column]:>{width}}" for column, width in COLUMNS.items())
        print(f"{name:>8} {row['metric']:>8} {line} {row['n']:5,}")
    if "average" in results:
        std = "n/a" if results["average_std"] is None else f"{results['average_std']:.2f}"
        print(f"{'average':>8} {'':>8} {results['average']:6.2f} {std:>6}")
    for name, row in results["tasks"].items():
        rows = ", ".join(f"{n:,} {split}" for split, n in row["rows"].items())
        print(f"{name}: {row['split']}; columns {', '.join(row['columns'])}; rows {rows}")
        for seed, label in row["one_class"].items():
            print(f"{name}: the run with seed {seed} always predicts {label!r}, which counts in the mean")
        bag = row["bag_of_words"]
        if bag is not None and row["last"] <= bag:  # the best score is no lower
            print(f"{name}: no better than a bag of words" + " at the last evaluation" * (row["mean"] > bag))
    for key, value in results.get("compared", {}).items():
        print(f"{key}: {value if isinstance(value, str) else json.dumps(value)}")
