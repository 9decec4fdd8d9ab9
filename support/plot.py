"""The losses of a run as a picture.

Out of scope: several runs in a figure, and the figures of assets/ (bench/figures.py).
"""

import json
import math
import os

from support.common import writing


def draw_losses(folder, num_classes, unigram_loss):
    """Draw the losses of a run over its steps, where matplotlib is installed.

    Args:
        folder: str, --out of pretrain.py. log.jsonl is read, and loss.png is written.
        num_classes: int, of which an untrained model guesses one.
        unigram_loss: float, of a model that knows only how frequent each label or word is.

    Returns:
        str, a line that says where the picture is, or how to get it.
    """
    path = os.path.join(folder, "loss.png")
    try:
        from matplotlib.figure import Figure  # takes a while to import
    except ImportError:
        return (f"For a picture, {path}: pip install matplotlib, and rerun the same command. A "
                "finished run evaluates once and draws.")
    log_path = os.path.join(folder, "log.jsonl")
    with open(log_path) as file:
        log = [json.loads(line) for line in file]

    figure = Figure(figsize=(6.4, 4))
    axis = figure.subplots()
    for key, style, label in (("loss", "-", "training"), ("eval_loss", "o-", "held-out set")):
        rows = [row for row in log if key in row]
        steps = [row["step"] for row in rows]
        losses = [row[key] for row in rows]
        axis.plot(steps, losses, style, linewidth=1, markersize=3, label=label)
    axis.axhline(math.log(num_classes), color="gray", linestyle="--", label="uniform baseline")
    axis.axhline(unigram_loss, color="gray", linestyle=":", label="label frequencies")
    axis.set(xlabel="optimizer steps", ylabel="cross-entropy, nats")
    axis.legend()
    with writing(path):
        figure.savefig(path)
    return f"Saved {path}: the losses in training and on the held-out set, and two baselines"
