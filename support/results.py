"""The results of finetune.py: those of a job, and their means over the seeds.

    Outcome     what one model scores after its training
    Result      a job: the Outcomes of the model and of its control

Out of scope: training and scoring (finetune.py), the metrics (data/classification.py), the folder
    of a run (support/jobs.py).
"""

import collections
import dataclasses
from pathlib import Path

import numpy as np

from data.classification import f1, standard_error
from model import count_parameters
from support.common import read_json, reading, write_json

# of the file of a job: settings have it, so that a folder of another one is refused
RESULTS_FORMAT = 2


@dataclasses.dataclass
class Outcome:
    """What a model scores on the dev rows after its training."""

    scores: dict  # metric -> percent, of the weights that the selection rows choose
    last_scores: dict  # the same, of the last weights
    predicted: list  # for each dev row, by the chosen weights: class, number or answer
    selection: float | None  # score of the chosen weights on the selection rows; None: no such rows
    log: list  # of dict, the evaluations during training


@dataclasses.dataclass
class Result:
    """The results of a job, the content of TASK-seed-N.json."""

    seed: int
    metric: str  # the task's score, a key of the scores
    labels: list  # the classes, by number; [] where there are none
    train_counts: list  # rows of each class in train
    rows: dict  # split -> how many
    majority: float  # the score that needs no model
    truth: list | None  # for each dev row, as predicted; None for answers
    size: dict  # see model.count_parameters
    model: Outcome
    control: Outcome | None  # of the bag of words

    @classmethod
    def collect(cls, data, seed, model, outcome, control=None):
        """Return the Result of a job.

        Args:
            data: dict, split -> Examples.
            seed: int.
            model: nn.Module, which is counted.
            outcome, control: Outcome of the model and of the bag of words, or None.
        """
        dev = data["dev"]
        train = data["train"]
        truth = dev.targets.tolist() if dev.has_control else None
        labels = []
        train_counts = []
        if dev.task.has_classes:
            labels = dev.task.labels
            train_counts = np.bincount(train.targets, minlength=len(labels)).tolist()
        return cls(
            seed=seed,
            metric=dev.task.metrics[0],
            labels=labels,
            train_counts=train_counts,
            rows={split: part.num_rows for split, part in data.items()},
            majority=dev.majority(train),
            truth=truth,
            size=count_parameters(model),
            model=outcome,
            control=control)


def read_result(path):
    """Return the Result in the file of a job."""
    content = read_json(path)
    with reading(path):
        result = Result(**content)
        result.model = Outcome(**content["model"])
        if content["control"] is not None:
            result.control = Outcome(**content["control"])
    return result


def summarize(results):
    """Return the results of a task, dict: means over the seeds, as results.json has them.

    results: list of Result, one of each seed.
    """
    first = results[0]
    metric = first.metric
    models = [result.model for result in results]
    values = [outcome.scores[metric] for outcome in models]
    all_metrics = {}
    for name in models[0].scores:
        all_metrics[name] = np.mean([outcome.scores[name] for outcome in models])
    predicted = [outcome.predicted for outcome in models]  # (seeds, n)
    f1_per_label = {}
    rows_per_label = {}
    for number, label in enumerate(first.labels):
        truth = np.array(first.truth)
        scores = [100 * f1(np.array(row), truth, number) for row in predicted]
        f1_per_label[label] = np.mean(scores)
        rows_per_label[label] = first.truth.count(number)
    summary = dict(
        metric=metric,
        rows=first.rows,
        size=first.size,
        values=values,  # the score of each seed
        mean=all_metrics[metric],
        std=deviation(values),
        last=np.mean([outcome.last_scores[metric] for outcome in models]),  # of the last weights
        all_metrics=all_metrics,
        f1_per_label=f1_per_label,  # {} without classes
        rows_per_label=rows_per_label,  # of dev
        train_rows_per_label=dict(zip(first.labels, first.train_counts)),
        majority=first.majority,
        bag_of_words=None,  # these four: no control
        bag_of_words_std=None,
        over_bag=None,
        over_bag_error=None)
    if first.control is not None:
        bags = [result.control for result in results]
        bag_values = [outcome.scores[metric] for outcome in bags]
        summary["bag_of_words"] = np.mean(bag_values)
        summary["bag_of_words_std"] = deviation(bag_values)
        summary["over_bag"] = summary["mean"] - summary["bag_of_words"]
        bag_predicted = [outcome.predicted for outcome in bags]
        summary["over_bag_error"] = standard_error(metric, predicted, bag_predicted, first.truth)
    return summary


def deviation(values):
    """Return the standard deviation over the seeds, or None if there is one seed."""
    if len(values) == 1:
        return None
    return np.std(values, ddof=1)


def write_results(out, summaries, settings):
    """Write results.json to the folder out, and print it; return its content, dict.

    Args:
        out: str.
        summaries: dict, name of a task -> what summarize returns.
        settings: dict.
    """
    content = dict(tasks=summaries, settings=settings)
    for name, summary in summaries.items():
        print_summary(name, summary)
    if len(summaries) > 1:
        content["average"] = np.mean([summary["mean"] for summary in summaries.values()])
        print(f"average over the tasks: {content['average']:.2f}")
    write_json(Path(out, "results.json"), content)
    return content


def print_summary(name, summary):
    """Print the scores of a task beside its controls."""
    f1_per_label = summary["f1_per_label"]
    print(f"\n{name}: parameters {summary['size']['total']:,}, PoEP {summary['size']['poep']:.2%}")
    rival = "majority class" if f1_per_label else "without a model"
    mean = format_mean(summary["mean"], summary["std"])
    print(f"{name}: {summary['metric']} {mean}, last weights {summary['last']:.2f}, {rival} "
          f"{summary['majority']:.2f}")
    if summary["bag_of_words"] is not None:
        bag = format_mean(summary["bag_of_words"], summary["bag_of_words_std"])
        note = ""
        if summary["over_bag"] < -2 * summary["over_bag_error"]:
            note = ": worse than a bag of words"
        elif summary["over_bag"] <= 2 * summary["over_bag_error"]:  # also where both are 0
            note = ": not shown to be better than a bag of words"
        print(f"{name}: bag of words {bag}, difference {summary['over_bag']:+.2f} ± "
              f"{summary['over_bag_error']:.2f}, its standard error over rows and seeds{note}")
    scores = []
    missed = collections.defaultdict(list)  # reason -> classes
    for label, score in f1_per_label.items():
        scores.append(f"{label} {score:.1f} ({summary['rows_per_label'][label]:,} rows)")
        reason = explain_missed(summary, label)
        if reason is not None:
            missed[reason].append(label)
    if scores:
        print(f"{name}: F1 of each class: {', '.join(scores)}")
    for reason, labels in missed.items():
        print(f"warning: {name}: {reason}: {', '.join(labels)}. Use more rows, --dev, --epochs or "
              "--balanced, with another --out.")


def explain_missed(summary, label):
    """Return what is wrong with the score of a class, or None."""
    if summary["train_rows_per_label"][label] == 0:
        return "no rows to train on"  # any right prediction is chance
    if summary["rows_per_label"][label] == 0:
        return "no rows to score"
    if summary["f1_per_label"][label] == 0:
        return "never predicted rightly"
    return None


def format_mean(mean, std):
    """Return a mean as text, with ± its deviation over the seeds if there are several."""
    if std is None:
        return f"{mean:.2f}"
    return f"{mean:.2f} ± {std:.2f}"
