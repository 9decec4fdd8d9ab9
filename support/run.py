"""A run of pretrain.py: how far it has come, and its checkpoints in the folder --out.

    saved = load_saved("out/proj-lsh")                 the checkpoint to continue, or {}
    check_same_run(saved, facts, "out/proj-lsh")       raises if it is of another run
    run = Run("out/proj-lsh", facts, data, kinds, "float32", log, is_writer=True)
    run.restore(saved, model, optimizer)               to where the checkpoint ends
    run.save("best.pt", model)

Out of scope: the file of a checkpoint (common.py), log.jsonl (log.py), texts (reports.py).
"""

import math
from pathlib import Path

import torch

from support.common import InputError, list_changes, load_checkpoint, save_checkpoint
from support.flags import DEFAULTS, MAY_CHANGE

NEAR_WORDS = 50_000  # the most frequent words, among which infer.py --near searches


def load_saved(folder):
    """Return the checkpoint of a run that continues, dict; {} for a new run."""
    if not Path(folder, "ckpt.pt").exists():
        return {}
    return load_checkpoint(folder)


def list_settings(args):
    """Return those settings of a Namespace that are the same in each part of a run, dict."""
    return {name: value for name, value in vars(args).items() if name not in MAY_CHANGE}


def list_facts(args, data):
    """Return what two processes must agree on to be one run, dict: settings, words and hashes.

    Args:
        args: Namespace, all settings.
        data: data.loading.Data.
    """
    facts = list_settings(args) | dict(corpus=data.corpus.meta["digest"])
    bloom_map = data.tokenizer.coder.bloom_map
    if bloom_map is not None:
        facts |= dict(alpha=bloom_map.alpha, bloom=bloom_map.checksum())
    return facts


def check_same_run(saved, facts, folder):
    """Raise InputError if a checkpoint is of another run: its weights would be trained on.

    Args:
        saved: dict, as load_saved returns it.
        facts: dict, as list_settings or list_facts returns it, of this process.
        folder: str, --out.
    """
    if not saved:
        return
    changes = list_changes(DEFAULTS | saved["run"], facts)  # an older run lacks a new setting
    if "optimizer" not in saved:  # a copy of best.pt, or a checkpoint of finetune.py
        changes.append("it has no state of the optimizer")
    if changes:
        raise InputError(f"{folder}/ckpt.pt: expected a checkpoint of this run, got another: "
                         f"{'; '.join(changes)}. Use the former settings, or another --out. There "
                         f"--init_from {folder} starts from these weights, if sizes and hashes are "
                         "the same.")


def check_same_ranks(ranks, state):
    """Raise InputError unless all ranks have an equal state, a list."""
    ranks.wait()  # for the rank that prepares the corpus, which takes long
    states = ranks.gather(state)
    if any(other != states[0] for other in states):
        raise InputError("--out, --cache: expected a folder that all nodes see, got ranks that "
                         "differ in steps, data, hashes or dtypes.")


class Run:
    """How far a run has come, and its checkpoints. One rank alone writes.

    Args:
        folder: str, --out.
        facts: dict, as list_facts returns it.
        data: data.loading.Data, whose words go into the checkpoints.
        kinds: dict or None, those of the objective, which infer.py prints.
        dtype: str, that of matrix products.
        log: log.Log. A checkpoint knows how long its file is.
        is_writer: bool, whether this rank writes.

    Attributes:
        step: int, optimizer steps that are done.
        best: float, the lowest eval_loss so far.
    """

    def __init__(self, folder, facts, data, kinds, dtype, log, is_writer):
        self.folder = folder
        self.parts = dict(  # what all checkpoints have in common
            run=facts, dtype=dtype, kinds=kinds, tokenizer=data.tokenizer.state(),
            words=data.corpus.frequent(NEAR_WORDS))
        if data.tokenizer.coder.bloom_map is not None and not data.config.order:
            # for infer.py --prior
            self.parts["item_counts"] = torch.from_numpy(data.batches.count_items())
        self.log = log
        self.is_writer = is_writer
        self.step = 0
        self.best = math.inf

    def restore(self, saved, model, optimizer):
        """Go on where a checkpoint ends. saved: as load_saved returns it.

        The log loses the rows of later steps, which are taken again. A best.pt of a later step
        stays until they write it again. For {} both are of a run that ended before its first
        ckpt.pt, and best.pt is removed.
        """
        if saved:
            self.step = saved["step"]
            self.best = saved["best"]
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
        if self.is_writer:
            if not saved:
                Path(self.folder, "best.pt").unlink(missing_ok=True)
            self.log.cut(saved.get("log_size", 0))

    def save(self, name, model, optimizer=None):
        """Write a checkpoint of the run as it is now. One with the optimizer can be resumed.

        The log does not count the time of it.
        """
        if self.is_writer:
            state = dict(step=self.step, best=self.best, log_size=self.log.path.stat().st_size)
            if optimizer is not None:
                state["optimizer"] = optimizer.state_dict()
            save_checkpoint(f"{self.folder}/{name}", model, **self.parts, **state)
        self.log.restart_clock(self.step)
