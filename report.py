"""Results of a fine-tuning: mean and spread over seeds, the table, and a comparison with another fine-tuning.

Paper map:    [HF §4.4 eq.4] compare   [HF §4.4 eq.6] compare
Sources:      [HF] Xue & Aletras 2022, HashFormers
Out of scope: training and scoring (finetune.py).
"""

import json
import os

import numpy as np

from runtime import InputError

COLUMNS = ("mean", "std", "min", "max", "last", "majority", "bag_of_words")


def summarize(runs):
    """Return the row of results.json of one task, from the results of its seeds."""
    first, metric = runs[0], runs[0]["metric"]
    values = [run["best"][metric] for run in runs]
    labels = {str(run["seed"]): run["constant_prediction"] for run in runs}
    return dict(metric=metric, seeds=[run["seed"] for run in runs], values=values,
                mean=float(np.mean(values)), std=float(np.std(values, ddof=1)) if len(values) > 1 else None,
                min=min(values), max=max(values), last=float(np.mean([run["last"][metric] for run in runs])),
                n=first["n"], n_train=first["n_train"], **first["baselines"],
                all_metrics={m: float(np.mean([run["best"][m] for run in runs])) for m in first["best"]},
                one_class={seed: label for seed, label in labels.items() if label is not None})


def build_results(runs, settings, baseline=None):
    """Return the content of results.json.

    Args:
        runs: dict task -> list of what finetune.fit returns, one for each seed, the first with `baselines`.
        settings: dict, what was scored and how.
        baseline: as of read_results, or None.
    """
    results = dict(tasks={name: summarize(seeds) for name, seeds in runs.items()},
                   model=next(iter(runs.values()))[0]["model"], settings=settings)
    if len(runs) > 1:
        by_seed = np.mean([row["values"] for row in results["tasks"].values()], 0)
        std = float(np.std(by_seed, ddof=1)) if len(by_seed) > 1 else None
        results |= dict(average=float(by_seed.mean()), average_std=std)
    return results | (dict(compared=compare(results, baseline)) if baseline else {})


def write_json(path, content):
    """Replace a JSON file: a crash leaves the old one or the new one."""
    with open(path + ".tmp", "w") as file:
        json.dump(content, file, indent=1)
    os.replace(path + ".tmp", path)


def read_results(folder):
    """Return the mean score of each task and the parameter counts of another fine-tuning, from its --out."""
    try:
        with open(os.path.join(folder, "results.json")) as file:
            results = json.load(file)
        counts = {name: int(results["model"][name]) for name in ("parameters", "embedding")}
        tasks = {name: float(row["mean"]) for name, row in results["tasks"].items()}
        return dict(folder=folder, tasks=tasks, **counts)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"--baseline: expected the --out of another fine-tuning, got {folder} "
                         f"({type(error).__name__}: {error}).") from error


def compare(results, baseline):
    """Return the share of a baseline's score that is retained, and how much smaller the model is, in percent.

    Args:
        results: as in results.json.
        baseline: as of read_results.

    Returns:
        dict: prr by task, where the baseline scores above 0 [HF §4.4 eq.4]; prr_average, the ratio of the
        averages over the tasks of both; pcr_all and pcr_emb [HF §4.4 eq.6].
    """
    model, ours = results["model"], {name: row["mean"] for name, row in results["tasks"].items()}
    theirs = {name: mean for name, mean in baseline["tasks"].items() if name in ours}
    total = sum(theirs.values())
    return dict(baseline=baseline["folder"],
                prr={name: 100 * ours[name] / mean for name, mean in theirs.items() if mean > 0},
                prr_average=100 * sum(ours[name] for name in theirs) / total if total > 0 else None,
                pcr_all=100 * (1 - model["parameters"] / baseline["parameters"]),
                pcr_emb=100 * (1 - model["embedding"] / baseline["embedding"]))


def print_settings(args, config, counts, device):
    """Print what is about to run: the flags, a Config, counts of count_parameters, and a torch.device."""
    origin = f"pre-trained, {args.ckpt}" if args.ckpt and not args.from_scratch else "not pre-trained"
    print(f"model: {origin}, emb {config.emb}, {config.layers} layers, width {config.width}, length "
          f"{config.length}")
    print(f"parameters: {counts['total']:,}, of which embedding {counts['embedding']:,} "
          f"(PoEP {100 * counts['poep']:.2f} %)")
    print(f"training: {args.epochs} epochs, batch {args.batch}, lr {args.lr:g}, dropout {args.dropout}, "
          f"pool {args.pool}, {args.seeds} seeds from {args.seed}")
    print(f"device: {device}, {args.dtype}, {'compile' if args.compile else 'no compile'}")


def print_results(results):
    """Print the table of scores, and what to know about them."""
    widths = [max(7, len(column)) for column in COLUMNS]
    head = " ".join(f"{column:>{width}}" for column, width in zip(COLUMNS, widths))
    print(f"\n{'task':>9} {'metric':>9} {head} {'n':>7}")
    for name, row in results["tasks"].items():
        cells = ("n/a" if row[column] is None else f"{row[column]:.2f}" for column in COLUMNS)
        line = " ".join(f"{cell:>{width}}" for cell, width in zip(cells, widths))
        print(f"{name:>9} {row['metric']:>9} {line} {row['n']:7,}")
    if "average" in results:
        std = "n/a" if results["average_std"] is None else f"{results['average_std']:.2f}"
        print(f"{'average':>9} {'':>9} {results['average']:7.2f} {std:>7}")
    for name, row in results["tasks"].items():
        for seed, label in row["one_class"].items():
            print(f"{name}: the run with seed {seed} always predicts {label!r}, which counts in the mean")
        if row["bag_of_words"] is not None and row["mean"] <= row["bag_of_words"]:
            print(f"{name}: no better than a bag of words")
    for key, value in results.get("compared", {}).items():
        print(f"{key}: {value if isinstance(value, str) else json.dumps(value)}")
