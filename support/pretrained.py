"""What the jobs of finetune.py start from: a pre-trained model, and a task's rows as token IDs.

    pretrained = load_pretrained(args)              the model of --ckpt or --preset
    start, task = fit_head(pretrained, task)        its head stays, or is left out
    data = encode_rows(task, rows, start)           dict, split -> Examples

Out of scope: how rows are read and divided (data/tasks.py), training (finetune.py).
"""

import collections
import dataclasses
import hashlib
from pathlib import Path

import numpy as np

from data.classification import Examples
from data.codes import report_unknown
from hashing import NgramLSH
from model import PRESETS, Config, load_model
from support.common import InputError, blame, find_checkpoint, load_checkpoint
from tokenizer import FIRST_WORD_ID, HashTokenizer, make_tokenizer
from words import list_words


@dataclasses.dataclass
class Pretrained:
    """The model of --ckpt. With --preset it has sizes alone, and with --from_scratch no weights."""

    config: Config
    weights: dict  # name -> tensor; those that are not here are fresh
    task: dict  # that the head was trained for: its identity and scale; {}: no head was trained
    tokenizer: dict | None = None  # its state; None: it is built from the training rows
    words: list | None = None  # that infer.py --near searches; None: those of the training rows
    digest: str | None = None  # of the checkpoint's file

    @property
    def pool(self):
        """What the trained head reads, cls or mean, be it of another task; None: none was trained.

        Without a trained head config.pool is a default, which no training has used.
        """
        return self.config.pool if self.task else None

    def has_head(self, task):
        """Return whether the head was trained for this task: same name, columns and labels."""
        identity = task.identity()
        trained = {key: self.task[key] for key in identity if key in self.task}
        return trained == identity


def load_pretrained(args):
    """Return the Pretrained model of --ckpt or --preset."""
    if args.preset:
        return Pretrained(Config.choose(PRESETS[args.preset]), weights={}, task={})
    checkpoint = load_checkpoint(args.ckpt)
    with blame(args.ckpt):
        model = load_model(checkpoint)
    config = model.config
    if not config.order:
        raise InputError(f"--ckpt {args.ckpt}: expected a model of texts, got one of item sets.")
    weights = model.state_dict()
    task = checkpoint.get("task", {})
    if args.from_scratch:
        weights = {}
        task = {}
    content = Path(find_checkpoint(args.ckpt)).read_bytes()
    return Pretrained(config, weights, task, checkpoint["tokenizer"], checkpoint["words"],
                      digest=hashlib.sha256(content).hexdigest())


def fit_head(pretrained, task):
    """Return what the jobs of a task start from, a Pretrained, and the task with the scale to use.

    A head that was trained for this very task stays. If it predicts numbers, these are in units of
    the rows that it was trained on, task.scale, which its checkpoint keeps: the task takes that
    scale in place of the one of its own rows. Any other head is left out of the weights.
    """
    if pretrained.has_head(task):
        return pretrained, dataclasses.replace(task, scale=pretrained.task.get("scale"))
    weights = {name: weight for name, weight in pretrained.weights.items()
               if not name.startswith("head.")}
    return dataclasses.replace(pretrained, weights=weights), task


def encode_rows(task, rows, pretrained):
    """Return the rows of a task as token IDs, `data`; print how many there are."""
    with blame("--ckpt, --preset"):
        tokenizer = build_tokenizer(pretrained, rows["train"])
        data = encode_splits(task, rows, tokenizer, pretrained.config.length)
    ids = np.concatenate(data["train"].ids)
    counts = np.bincount(ids, minlength=FIRST_WORD_ID + len(tokenizer.words))
    report_unknown(tokenizer, tokenizer.words, counts)
    sizes = ", ".join(f"{split} {examples.num_rows:,}" for split, examples in data.items())
    print(f"{task.name}: rows {sizes}; of train {data['train'].notes}", flush=True)
    return data


def build_tokenizer(pretrained, train_rows):
    """Return the tokenizer of a checkpoint, or one whose hash knows the words of the rows."""
    if pretrained.tokenizer is not None:
        return HashTokenizer.load(pretrained.tokenizer, pretrained.config)
    word_counts = collections.Counter()
    for texts, _ in train_rows:
        for text in texts:
            word_counts.update(list_words(text))
    tokenizer = make_tokenizer(pretrained.config, hash=NgramLSH.fit(word_counts))
    tokenizer.add_words([word for word, _ in word_counts.most_common()])
    return tokenizer


def encode_splits(task, rows, tokenizer, length):
    """Return the rows of each split as token IDs: dict, split -> Examples.

    Args:
        task: Task.
        rows: dict, split -> list of (texts, label).
        tokenizer: HashTokenizer, or CharacterTokenizer of baselines/canine.py. It learns the words.
        length: int, the most positions of an example.
    """
    data: dict[str, Examples] = {}
    for split, split_rows in rows.items():
        data[split] = task.examples_class(task, split_rows, tokenizer, length)
    return data
