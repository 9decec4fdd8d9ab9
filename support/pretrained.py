"""What the jobs of finetune.py start from: a pre-trained model, and a task's rows as token IDs.

    pretrained = load_pretrained(args)              the model of --ckpt or --preset
    start, task = choose_head(pretrained, task)     its head stays, or is left out
    data = encode_rows(task, rows, start)           dict, split -> Examples
    print_rows(data)                                how many there are

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
    """What a fine-tuning starts from: --ckpt has all of it, --preset the config alone."""

    config: Config
    weights: dict = dataclasses.field(default_factory=dict)  # name -> tensor; others are fresh
    trained_task: dict | None = None  # identity and scale; None: no task has trained the head
    tokenizer: dict | None = None  # its state; None: it is built from the training rows
    words: list | None = None  # that infer.py --near searches; None: those of the training rows
    digest: str | None = None  # of the checkpoint's file

    @property
    def pool(self):
        """What the trained head reads, cls or mean, be it of another task; None: none was trained.

        Without a trained head config.pool is a default, which no training has used.
        """
        return self.config.pool if self.trained_task else None

    def has_head(self, task):
        """Return whether the head was trained for this task: same name, columns and labels."""
        if not self.trained_task:
            return False
        identity = task.identity()
        trained = {key: self.trained_task[key] for key in identity if key in self.trained_task}
        return trained == identity


def load_pretrained(args):
    """Return the Pretrained of --preset, or that of --ckpt, with --from_scratch without weights."""
    if args.preset:
        return Pretrained(Config.choose(PRESETS[args.preset]))
    pretrained = read_pretrained(args.ckpt)
    if args.from_scratch:
        return dataclasses.replace(pretrained, weights={}, trained_task=None)
    return pretrained


def read_pretrained(path):
    """Return the Pretrained of a checkpoint, a file or its folder."""
    checkpoint = load_checkpoint(path)
    with blame(path):
        model = load_model(checkpoint)
    if not model.config.order:
        raise InputError(f"--ckpt {path}: expected a model of texts, got one of item sets.")
    content = Path(find_checkpoint(path)).read_bytes()
    return Pretrained(
        config=model.config, weights=model.state_dict(), trained_task=checkpoint.get("task"),
        tokenizer=checkpoint["tokenizer"], words=checkpoint["words"],
        digest=hashlib.sha256(content).hexdigest())


def choose_head(pretrained, task):
    """Return what the jobs of a task start from, a Pretrained, and the task with the scale to use.

    A head that was trained for this very task stays. If it predicts numbers, these are in units of
    the rows that it was trained on, whose scale its checkpoint keeps: the task takes that scale in
    place of the one of its own rows. Any other head is left out of the weights.
    """
    if pretrained.has_head(task):
        scale = pretrained.trained_task.get("scale", task.scale)
        return pretrained, dataclasses.replace(task, scale=scale)
    weights = {name: weight for name, weight in pretrained.weights.items()
               if not name.startswith("head.")}
    return dataclasses.replace(pretrained, weights=weights), task


def encode_rows(task, rows, pretrained):
    """Return the rows of a task as token IDs, `data`: dict, split -> Examples."""
    # the checkpoint may have a damaged tokenizer, or a length without room for two texts. The rows
    # were checked when they were read, and presets raise no ValueError
    with blame("--ckpt"):
        tokenizer = build_tokenizer(pretrained, rows["train"])
        return encode_splits(task, rows, tokenizer, pretrained.config.length)


def print_rows(data):
    """Print how many rows a task has, and which share of its training words is unknown.

    data: dict, split -> Examples. While they were encoded, the list of their tokenizer has grown by
    their words, unless it is fixed: their IDs are all below FIRST_WORD_ID + len(tokenizer.words).
    """
    train_data = data["train"]
    tokenizer = train_data.tokenizer
    ids = np.concatenate(train_data.ids)
    counts = np.bincount(ids, minlength=FIRST_WORD_ID + len(tokenizer.words))
    report_unknown(tokenizer, tokenizer.words, counts)
    sizes = ", ".join(f"{split} {examples.num_rows:,}" for split, examples in data.items())
    print(f"{train_data.task.name}: rows {sizes}; of train {train_data.notes}", flush=True)


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
        tokenizer: HashTokenizer, whose list of words grows by those of the rows; or
            CharacterTokenizer of baselines/canine.py.
        length: int, the most positions of an example.
    """
    data: dict[str, Examples] = {}
    for split, split_rows in rows.items():
        data[split] = task.examples_class(task, split_rows, tokenizer, length)
    return data
