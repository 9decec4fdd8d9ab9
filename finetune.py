"""Fine-tune a pre-trained model on a task: several seeds, with baselines beside the score.

    python finetune.py --ckpt out/proj-lsh --task pydoc         offline: the module of a docstring
    python finetune.py --ckpt out/proj-lsh --task sst2          a task of GLUE, from the hub
    python finetune.py --ckpt out/proj-lsh --task glue --data_dir glue/     eight, from their files
    python finetune.py --ckpt out/proj-lsh --task squad         the words that answer a question
    python finetune.py --ckpt out/proj-lsh --train a.csv --dev b.csv --text title,body --label topic
    python finetune.py --preset proformer --task sst2           without pre-training
    python finetune.py --preset canine --weights canine-c/ --task sst2      the released CANINE-C
    torchrun --nproc_per_node=8 finetune.py --ckpt out/proj-lsh --task glue

Paper map:
    [HF Table 5] RECIPES
    [HF Table 5] learning_rate
    [HF Table 5] build_parser
    [HF §4.1] build_parser
    [HF §4.1] load_preset
Sources:
    [HF] Xue & Aletras 2022, HashFormers
Out of scope: tasks and metrics (data/), labels of new texts (infer.py), the comparison of two
    fine-tunings (bench/compare.py).
Deviations:
    1. A tenth of the training rows chooses the evaluation whose weights are scored (--select), of
       equal ones the earliest. The scored rows choose nothing. The score of the last weights is
       reported too.
    2. Two evaluations per epoch, about (--eval_every). [HF Table 5]: five, of small tasks in 3
       epochs.
    3. Gradients are clipped at norm 1, which the paper does not name.
    4. The cosine restarts after each fifth of the steps after warm-up. The paper does not say how
       often.
    5. Models of width below 512 have a recipe of their own, "small" (docs/finetuning.md).
    6. Batch 32 for every model. The median proposal fine-tunes with 64 (--batch 64).
"""

import argparse
import contextlib
import dataclasses
import datetime
import json
import math
import os
import shlex
import shutil
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from tqdm import tqdm

from baselines.bag import BagOfWords, HashedBag
from baselines.canine import CanineConfig, CharacterTokenizer, load_released, select_classes
from common import InputError, add_device_flags, at_least, autocast, blame_file, blame_input
from common import find_checkpoint, fingerprint, gather_from_ranks, load_checkpoint, lock_output
from common import read_ranks, resolve_device, run_script, save_checkpoint, wait_for_ranks
from data.batches import length_batches, pad_batch
from data.corpus import add_reader_flags, reader_options
from data.squad import SQUAD, QuestionAnswering, read_squad
from data.tasks import GLUE, LIMIT_SEED, SELECT_SEED, TASKS, SequenceClassification, Task
from data.tasks import compare_predictions, draw_groups, draw_rows, f1, measure_scale, read_task
from hashing import NgramLSH, list_words
from model import PRESETS, Config, count_parameters, load_model
from tokenizer import HashTokenizer

# Defaults of the flags of the same names
RECIPES = {
    "paper": dict(epochs=5, batch=32, lr=3e-5, pool="cls", bag=0),  # [HF Table 5]
    "small": dict(epochs=5, batch=32, lr=1e-3, pool="mean", bag=0),
}
TINY = dict(layers=2, width=128, heads=4, ffn=512, dropout=0.0)
# --preset -> shape of a model with fresh weights [HF §4.1]; those of size tiny are ours
SHAPES = {
    "proformer": Config(**PRESETS["proformer"]),
    "proformer-tiny": Config(emb="linear", bits=420, length=128, **TINY),
    "canine": CanineConfig(),
    "canine-tiny": CanineConfig(length=512, positions=1_024, **TINY),
}
PAPER_WIDTH = 512  # models of less than these dimensions have the recipe "small"
# Flags that may change when a run is resumed; an --out holds results of one choice of the others.
# --encoding and --sep are compared by the texts that they give
FREE = ("recipe", "device", "compile", "cache", "out", "encoding", "sep")
# Settings that are no flags: what to say where they are not those of --out
CHANGED_FILES = {
    "texts": "the texts differ",
    "checkpoint": "the checkpoint file was changed or copied",
}
# The tasks that a flag requires; with others it would have no effect, and is refused
REQUIRES = {
    "text": ("own",),
    "label": ("own",),
    "regression": ("own",),
    "stride": SQUAD,
    "max_answer": SQUAD,
}
# Flags that would have no effect with --epochs 0, and are refused
TRAINING = ("recipe", "batch", "lr", "pool", "bag", "dropout", "eval_every", "seeds", "select")
FEW_ROWS = 30  # of --select, below which it chooses badly
EVAL_POSITIONS = 32_768  # that an evaluation reads at once
WARMUP = 0.06  # share of the steps [HF Table 5]
CYCLES = 5  # of the cosine
# The seed of a step, for new hyperplanes, is seed · stride + step. Runs of two seeds share none, if
# they have fewer steps than the stride
SEED_STRIDE = 1_000_003
SCORES = ("mean", "std", "min", "max", "last", "bag_of_words", "majority")  # that are printed


def build_parser():
    """Return the parser of all flags, grouped by idea."""
    p = argparse.ArgumentParser(
        allow_abbrev=False,
        prog="finetune.py",
        description=(__doc__ or "").split("\nPaper map")[0],
        usage="python finetune.py (--ckpt DIR | --preset NAME) --task NAME [flags]  (see --help)",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )

    group = p.add_argument_group("start")
    add = group.add_mutually_exclusive_group(required=True).add_argument
    add("--ckpt", metavar="DIR", help="folder of a run of pretrain.py, or its ckpt.pt")
    add("--preset", choices=tuple(SHAPES),
        help="a model with fresh weights, instead of --ckpt [HF §4.1]")
    add = group.add_argument
    add("--from_scratch", action="store_true",
        help="use the checkpoint's shape and hash, not its weights")
    add("--weights", metavar="DIR",
        help="folder of the released CANINE-C; requires --preset canine")

    add = p.add_argument_group("task").add_argument
    add("--task", choices=("own", *TASKS, "glue", *SQUAD, "pydoc"), default="own",
        help="own: your files; glue: the paper's eight; pydoc: a docstring's module (default: own)")
    add("--data_dir", metavar="DIR", help="original files, as SST-2/train.tsv (default: the hub)")
    add("--train", metavar="FILE",
        help="training rows, .tsv .csv .jsonl .json .parquet; with --task in that task's columns")
    add("--dev", type=file_or_share, metavar="FILE|SHARE",
        help="rows to score; 0.1: a tenth of --train, which then does not train")
    add_reader_flags(add)
    add("--text", metavar="COL[,COL]",
        help="column of the text, or of both texts; requires --task own (default: text)")
    add("--label", metavar="COL",
        help="column of the label; requires --task own (default: label)")
    add("--regression", action="store_true",
        help="the labels are numbers; requires --task own")
    add("--limit", type=at_least(1),
        help="training rows, drawn at random, the same for all seeds (default: all)")
    add("--stride", type=at_least(1),
        help="words between windows of a text; requires SQuAD (default: length / 3)")
    add("--max_answer", type=at_least(1),
        help="longest answer, in words; requires SQuAD (default: 30)")

    recipes = "\n".join(f"{name}: {recipe}" for name, recipe in RECIPES.items())
    add = p.add_argument_group("training", f"recipes: [HF Table 5], ours\n{recipes}").add_argument
    add("--recipe", choices=tuple(RECIPES),
        help="defaults of the next five flags (default: small for a width below 512, else paper)")
    add("--epochs", type=at_least(0, maximum=999), help="0 only scores")
    add("--batch", type=at_least(1), help="examples per step")
    add("--lr", type=at_least(0, float), help="peak learning rate")
    add("--pool", choices=("cls", "mean"),
        help="what the head sees: the first position, or the mean of all; of a checkpoint that was "
        "fine-tuned before, its own")
    add("--bag", type=at_least(0, maximum=1 << 24),
        help="rows of a hashed bag of words beside the encoder, for tasks of one text: the hybrid, "
        "which is in none of the papers; 0: none")
    add("--select", type=at_least(0, float, 0.5), metavar="SHARE",
        help="share of the training rows that chooses the evaluation whose weights are scored, of "
        "equal ones the earliest; 0: the last one's (default: 0.1)")
    add("--dropout", type=float, help="dropout probability (default: the checkpoint's)")
    add("--seeds", type=at_least(1, maximum=999),
        help="runs of each task (default: 3)")
    add("--seed", type=at_least(0), default=0,
        help="seed of the first run; the next has S+1 (default: 0)")
    add("--eval_every", type=at_least(1),
        help="steps between evaluations (default: half an epoch, rounded)")

    add = p.add_argument_group("device and files").add_argument
    add_device_flags(add)
    add("--cache", default="cache", metavar="DIR", help="folder of prepared texts (default: cache)")
    add("--out", metavar="DIR", help="folder of the results (default: out/CKPT-TASK)")
    return p


def file_or_share(text):
    """Return a number between 0 and 1 as float, the name of a file as it is: the argparse type."""
    try:
        share = float(text)
    except ValueError:
        return text
    if not 0 < share < 1:
        raise argparse.ArgumentTypeError(f"expected a file or a share between 0 and 1, got {text}")
    return share


def main(argv=None):
    """Fine-tune as the command line, or the list argv, says; return what finetune returns."""
    args = build_parser().parse_args(argv)
    return run_script("finetune.py", finetune, args)


def finetune(args):
    """Train each task with each seed, and write and print the results.

    Args:
        args: the flags of build_parser.

    Returns:
        dict, the content of results.json; None on other ranks than 0.

    Raises:
        InputError: A flag or a file is at fault.
    """
    check_flags(args)
    # torchrun starts a process for each GPU, which does its share of the jobs, for hours without a
    # word to the others. Join first: of ranks that have joined, one that ends is noticed
    rank, world, local_rank = read_ranks()
    if world > 1:
        dist.init_process_group("gloo", timeout=datetime.timedelta(days=30))

    # the start: a checkpoint or a preset, and flags that follow from it
    checkpoint, config = load_start(args)
    args = fill_flags(args, checkpoint, config)
    with blame_input("--pool, --bag, --dropout"):
        config = dataclasses.replace(config, pool=args.pool, bag=args.bag, dropout=args.dropout)

    # the texts: all are read here, so that what is wrong with them shows before the training
    tasks = read_tasks(args)
    refuse_new_heads(args, checkpoint, tasks)

    # the folder: of one run at a time, and of one choice of flags, texts and checkpoint
    saved = read_json(args.out, "settings.json")
    runtime = choose_runtime(args, saved, local_rank)
    settings = collect_settings(args, runtime, tasks)
    refuse_other_run(args.out, saved, settings)
    jobs = list_jobs(args, tasks)
    with lock_output(args.out, rank):  # makes the folder: what a flag can break was checked above
        if is_complete(args.out, jobs):
            return show_complete_run(args.out, rank)
        if rank == 0:
            write_json(args.out, "settings.json", settings)
            print_settings(args, runtime, config, checkpoint)

        # the jobs of this rank; then wait for those of the others
        with report_interrupt(jobs):
            run_jobs(args, runtime, config, checkpoint, tasks, jobs[rank::world])
        wait_for_ranks()
        if rank > 0:
            return None

        # the results, and the best weights of each task
        results = load_results(jobs)
        content = summarize(config, checkpoint, tasks, settings, results)
        write_results(args.out, content, results)
        keep_best_weights(jobs, results)

    print_results(content)
    print(f"Saved {os.path.join(args.out, 'results.json')}")
    print("Next:", shlex.join(["python", "infer.py", "--ckpt", jobs[0].folder]))
    return content


# -------------------------------------------------------------------------------------------------
# Start


def check_flags(args):
    """Raise InputError where a flag is missing, or would be ignored without a word."""
    if args.weights and (args.preset != "canine" or args.from_scratch):
        raise InputError("--weights requires --preset canine, without --from_scratch.")
    if (args.train is None) != (args.dev is None):
        raise InputError("--train requires --dev, and --dev requires --train. --dev 0.1 is a tenth "
                         "of --train.")
    if isinstance(args.dev, float) and args.task in SQUAD:
        raise InputError(f"--dev: expected a file for --task {args.task}, got a share.")
    if args.train and args.task in ("glue", "pydoc"):
        raise InputError(f"--train: expected one task of files, got --task {args.task}.")
    if args.train and args.data_dir:
        raise InputError("--data_dir: expected it or --train, got both.")
    if reader_options(args) and not args.train:
        raise InputError("--encoding and --sep require --train and --dev.")
    if args.task == "own":
        if args.train is None:
            raise InputError("--task: expected a name, or for your own files --train and --dev, "
                             "got neither.")
        if args.text is not None and args.text.count(",") > 1:
            raise InputError(f"--text: expected one column, or two with a comma, got {args.text}.")
    for flag, tasks in REQUIRES.items():
        if getattr(args, flag) and args.task not in tasks:
            raise InputError(f"--{flag} requires --task {' or '.join(tasks)}, got {args.task}.")
    for flag in TRAINING:
        if args.epochs == 0 and getattr(args, flag) is not None:
            raise InputError(f"--{flag} requires --epochs of 1 or more. With 0 the model is scored "
                             "as it is.")


def load_start(args):
    """Return the checkpoint that the models start from, and the config of its encoder.

    Returns:
        checkpoint: dict as of load_checkpoint, without model and task where the weights are fresh.
        config: model.Config or CanineConfig.
    """
    if args.preset:
        checkpoint, config = load_preset(args)
    else:
        with blame_file(args.ckpt):
            checkpoint = load_checkpoint(args.ckpt)
            classes = select_classes(checkpoint["config"])
            # raises where weights and config do not fit; the jobs build models of their own
            config = load_model(checkpoint, classes.config, classes.model).config
    if not config.order:  # so of item sets
        raise InputError(f"--ckpt {args.ckpt}: expected a model of texts, got one of item sets.")
    if config.emb == "canine" and args.task in SQUAD:
        raise InputError(f"--task: expected a task with labels for canine, got {args.task}.")
    if args.from_scratch:
        checkpoint.pop("model", None)
        checkpoint.pop("task", None)
    return checkpoint, config


def load_preset(args):
    """Return the checkpoint and config of --preset, as load_start does. [HF §4.1]

    The checkpoint has no more than these parts:

        proformer   none: choose_tokenizer makes a tokenizer from the training texts
        canine      tokenizer; with --weights also model
    """
    checkpoint = {}
    config = SHAPES[args.preset]
    if config.emb == "canine":
        checkpoint["tokenizer"] = CharacterTokenizer().state()
    if args.weights:
        with blame_input(f"--weights {args.weights}"):
            config, checkpoint["model"] = load_released(args.weights)
    return checkpoint, config


def fill_flags(args, checkpoint, config):
    """Return the flags, where those that were left out follow from the recipe and the model."""
    recipe = args.recipe
    if recipe is None:
        recipe = "paper" if config.width >= PAPER_WIDTH else "small"
    defaults = dict(RECIPES[recipe])
    defaults["seeds"] = 3
    defaults["select"] = 0.1
    if args.epochs == 0:  # nothing is random, and nothing is chosen
        defaults["seeds"] = 1
        defaults["select"] = 0.0
    defaults["dropout"] = config.dropout
    defaults["out"] = default_out(args)
    if args.task == "own":
        defaults["text"] = "text"
        defaults["label"] = "label"

    is_canine = config.emb == "canine"  # it has one pool, and no words
    known_task = checkpoint.get("task", {})  # of a model that was fine-tuned before
    if is_canine or known_task:
        defaults["pool"] = config.pool
    if is_canine or config.bag > 0 or args.epochs == 0:
        defaults["bag"] = config.bag
    if known_task.get("name") == args.task:
        defaults["stride"] = known_task.get("stride")  # of SQuAD
        defaults["max_answer"] = known_task.get("longest")

    flags = dict(vars(args))
    for flag, value in defaults.items():
        if flags[flag] is None:
            flags[flag] = value
    return argparse.Namespace(**flags)


def default_out(args):
    """Return out/START-TASK. START is the folder of a run, the name of a file, or a preset."""
    start = args.preset
    if args.ckpt:
        path = Path(find_checkpoint(args.ckpt)).absolute()
        start = path.parent.name
        if path.name not in ("ckpt.pt", "best.pt"):  # models/docstrings.pt
            start = path.stem
    if args.from_scratch:
        start += "-scratch"
    return os.path.join("out", f"{start}-{args.task}")


# -------------------------------------------------------------------------------------------------
# Texts


@dataclasses.dataclass
class TaskData:
    """A task, and its rows as read_task or read_squad returns them."""

    name: str  # as of --task
    task: Task
    train: list
    devs: dict  # split -> rows to score


def read_tasks(args):
    """Return a list of TaskData: of --task glue eight, else one."""
    names = GLUE if args.task == "glue" else [args.task]
    tasks = []
    for name in names:
        read = read_squad if name in SQUAD else read_task
        task, train, devs = read(name, args)
        tasks.append(TaskData(name, task, train, devs))
    return tasks


def is_same_task(checkpoint, name, task):
    """Return whether the checkpoint was fine-tuned for this very task: its columns and labels.

    Then its head, its bag, and the units of its numbers stay.
    """
    known_task = checkpoint.get("task", {})
    if known_task.get("name") != name:
        return False
    for key, value in task.description().items():
        if known_task.get(key) != value:
            return False
    return True


def refuse_new_heads(args, checkpoint, tasks):
    """Raise InputError where --epochs 0 would score a head that no task has trained."""
    for task_data in tasks:
        if args.epochs == 0 and not is_same_task(checkpoint, task_data.name, task_data.task):
            raise InputError("--epochs 0 requires --ckpt of a model that was fine-tuned for this "
                             f"very task, {task_data.name}, with its columns and labels.")


# -------------------------------------------------------------------------------------------------
# Folder and settings


def read_json(out, name):
    """Return the content of a file of --out, a dict; {} without such a file."""
    path = os.path.join(out, name)
    if not os.path.exists(path):
        return {}
    with blame_file(path):
        return dict(json.loads(Path(path).read_text()))


def write_json(out, name, content):
    """Replace a file of --out: a crash leaves the old one or the new one."""
    path = os.path.join(out, name)
    Path(path + ".tmp").write_text(json.dumps(content, indent=1))
    os.replace(path + ".tmp", path)


def choose_runtime(args, saved, local_rank):
    """Return the Runtime. --dtype auto is that of the saved settings, and equal on all ranks."""
    runtime = resolve_device(args, local_rank)
    dtype = runtime.dtype
    if args.dtype == "auto":
        dtype = saved.get("dtype", dtype)
    # subtle: also waits until all ranks have read the settings. Later rank 0 writes them
    dtypes = gather_from_ranks(dtype)
    return runtime._replace(dtype=dtypes[0])


def collect_settings(args, runtime, tasks):
    """Return what may not change between the runs in a folder: flags, texts and checkpoint."""
    settings = {flag: value for flag, value in vars(args).items() if flag not in FREE}
    for flag in ("ckpt", "train", "dev", "data_dir"):
        if isinstance(settings[flag], str):  # run and run/ are one folder
            settings[flag] = os.path.normpath(settings[flag])
    settings["dtype"] = runtime.dtype  # not auto
    settings["texts"] = fingerprint([(task_data.train, task_data.devs) for task_data in tasks])
    if args.ckpt:
        file = os.stat(find_checkpoint(args.ckpt))
        settings["checkpoint"] = [file.st_size, file.st_mtime_ns]
    return settings


def list_changes(saved, settings):
    """Return what is not equal in the settings of two runs, a list of str."""
    if not saved:  # the folder is of pretrain.py, or has a .pt of another origin
        return ["it has no settings.json"]
    changes = []
    for name, value in settings.items():
        if saved.get(name) == value:
            continue
        if name in CHANGED_FILES:
            changes.append(CHANGED_FILES[name])
        else:
            changes.append(f"{name} was {saved.get(name)} and is {value}")
    return changes


def refuse_other_run(out, saved, settings):
    """Raise InputError where --out holds checkpoints or results of other settings than these."""
    changes = list_changes(saved, settings)
    has_results = any(Path(out).rglob("*.pt")) or Path(out, "results.json").exists()
    if changes and has_results:
        raise InputError(f"--out {out}: belongs to another run ({'; '.join(changes)}). Use "
                         "another.")


def is_complete(out, jobs):
    """Return whether --out has results, and the best weights of each task."""
    paths = [os.path.join(job.folder, "ckpt.pt") for job in jobs]
    paths.append(os.path.join(out, "results.json"))
    return all(os.path.exists(path) for path in paths)


def show_complete_run(out, rank):
    """Return the results that --out holds, after rank 0 has printed them; None on other ranks."""
    if rank > 0:
        return None
    content = read_json(out, "results.json")
    print(f"{out}: this run is complete, and its results follow. Use another --out to train again.")
    print_results(content)
    return content


def print_settings(args, runtime, config, checkpoint):
    """Print what is about to run."""
    origin = "pre-trained" if "model" in checkpoint else "not pre-trained"
    print(f"model: {origin}, emb {config.emb}, {config.layers} layers, width {config.width}, "
          f"length {config.length}")
    print(f"training: {args.epochs} epochs, batch {args.batch}, lr {args.lr:g}, dropout "
          f"{args.dropout}, pool {args.pool}, bag {args.bag} (single texts), {args.seeds} seeds "
          f"from {args.seed}")
    print(f"device: {runtime.device}, {runtime.dtype}, compile {runtime.use_compile}")
    print("resume: rerun the same command, which keeps finished seeds", flush=True)


# -------------------------------------------------------------------------------------------------
# Jobs


@dataclasses.dataclass
class Job:
    """A task and a seed: one model to train.

    Its file holds the weights and the result. A job is finished when its file is there, so that
    the same command goes on after an interruption.
    """

    name: str  # of the task
    seed: int
    folder: str

    @property
    def path(self):
        """Return the path of the job's file, a checkpoint."""
        return os.path.join(self.folder, f"seed-{self.seed}.pt")


def list_jobs(args, tasks):
    """Return the jobs of a run, task by task. Of several tasks each has a folder of its own."""
    jobs = []
    for task_data in tasks:
        folder = args.out
        if len(tasks) > 1:
            folder = os.path.join(args.out, task_data.name)
        for seed in range(args.seed, args.seed + args.seeds):
            jobs.append(Job(task_data.name, seed, folder))
    return jobs


@contextlib.contextmanager
def report_interrupt(jobs):
    """After Ctrl-C in the block, say how many jobs are finished, and end with exit code 130."""
    try:
        yield
    except KeyboardInterrupt as interrupt:
        num_finished = sum(os.path.exists(job.path) for job in jobs)
        print(f"Interrupted: {num_finished} of {len(jobs)} runs are finished and kept. Rerun the "
              "same command to train the others.")
        raise SystemExit(130) from interrupt


def run_jobs(args, runtime, config, checkpoint, tasks, jobs):
    """Run those of the jobs that are not finished; the jobs of a task share its token IDs."""
    if runtime.use_compile:  # graphs of encode: models differ in mask, bag and length
        torch._dynamo.config.recompile_limit = 64
    for task_data in tasks:
        unfinished = []
        for job in jobs:
            if job.name == task_data.name and not os.path.exists(job.path):
                unfinished.append(job)
        if not unfinished:
            continue
        splits = divide_rows(args, task_data)
        data = encode_splits(args, config, checkpoint, task_data, splits)
        facts = collect_facts(args, task_data, splits, data)
        print_facts(task_data.name, facts, data["train"].notes)
        for job in unfinished:
            run_job(args, runtime, config, checkpoint, job, data, facts)


def divide_rows(args, task_data):
    """Return dict, split -> rows: train, select unless it is empty, and the splits to score."""
    train = task_data.train
    if args.limit is not None:
        train, _ = draw_rows(train, args.limit, LIMIT_SEED)
    num_rows = len(train)
    count = round(args.select * num_rows)
    select, train = draw_groups(train, count, SELECT_SEED, task_data.task.group_start)
    if args.select > 0 and not select:
        print(f"{task_data.name}: --select {args.select:g} of {num_rows:,} rows is none: the last "
              "weights are scored, not the best")
    if 0 < len(select) < FEW_ROWS:
        print(f"warning: {task_data.name}: --select has {len(select)} rows, on which early weights "
              "may score as high as the best. Use --select 0, or more rows.")
    splits = dict(train=train)
    if select:
        splits["select"] = select
    return splits | task_data.devs


def encode_splits(args, config, checkpoint, task_data, splits):
    """Return the rows of each split as token IDs.

    Args:
        task_data: TaskData.
        splits: dict, as divide_rows returns it.

    Returns:
        dict, split -> SequenceClassification or QuestionAnswering, which share the tokenizer that
        knows their words.
    """
    if task_data.name in SQUAD:
        data_class = QuestionAnswering
        options = dict(stride=args.stride, max_words=args.max_answer,
                       allow_no_answer=task_data.name == "squad_v2")
    else:
        data_class = SequenceClassification
        is_pair = len(task_data.task.text_columns) == 2
        has_bag = args.bag > 0 and not is_pair  # a bag cannot compare two texts
        options = dict(scale=choose_scale(checkpoint, task_data, splits["train"]), has_bag=has_bag)
    data = {}
    start = f"--ckpt {args.ckpt}" if args.ckpt else f"--preset {args.preset}"
    with blame_input(start):
        tokenizer = choose_tokenizer(config, checkpoint, splits["train"])
        for split, part in splits.items():
            data[split] = data_class(task_data.task, part, tokenizer, config.length, **options)
    return data


def choose_scale(checkpoint, task_data, train):
    """Return the unit of the numbers to predict, mean and standard deviation; None of classes."""
    if task_data.task.labels is not None:
        return None
    if is_same_task(checkpoint, task_data.name, task_data.task):
        return checkpoint["task"]["scale"]
    return measure_scale(train)


def choose_tokenizer(config, checkpoint, train):
    """Return the tokenizer of the checkpoint, or one with the n-grams of the training texts."""
    if "tokenizer" in checkpoint:
        classes = select_classes(vars(config))
        return classes.tokenizer.load(checkpoint["tokenizer"], config)
    counts = Counter()
    for texts, _ in train:
        for text in texts:
            counts.update(list_words(text))
    return HashTokenizer(config, hash_name="lsh", hash=NgramLSH.fit(counts))


def collect_facts(args, task_data, splits, data):
    """Return what results.json says of the rows of a task, a dict."""
    task = task_data.task
    num_rows = {split: len(part) for split, part in splits.items()}
    dev = data[task.dev_splits[0]]
    return dict(
        metric=task.metrics[0],
        n=num_rows[task.dev_splits[0]],
        n_train=num_rows["train"],
        split=name_source(args, task_data.name),
        columns=[*task.text_columns, task.label_column],
        rows=num_rows,
        majority=dev.majority(data["train"]),
    )


def name_source(args, name):
    """Return where the rows to score of a task come from."""
    if name == "pydoc":
        return "held-out files of the installed Python"
    if isinstance(args.dev, float):
        return f"{args.dev:g} of the rows of {args.train}"
    if args.dev:
        return f"rows of {args.dev}"
    if args.data_dir:
        return f"dev set, {args.data_dir}"
    return "dev set, hub"


def list_truth(data):
    """Return the targets of the rows to score, a list; None of SQuAD, whose answers are texts."""
    task = data["train"].task
    dev = data[task.dev_splits[0]]
    if dev.head == "classify":
        return dev.targets.tolist()
    return None


def print_facts(name, facts, notes):
    """Print which columns and rows of a task are read, and notes: what is lost, and the labels."""
    columns = ", ".join(facts["columns"])
    sizes = ", ".join(f"{split} {size:,}" for split, size in facts["rows"].items())
    print(f"{name}: {facts['split']}; columns {columns}; rows {sizes}")
    print(f"{name}: of train {notes}", flush=True)


def run_job(args, runtime, config, checkpoint, job, data, facts):
    """Train and score the model of a job, and its control, and write the job's file."""
    train_data = data["train"]
    torch.manual_seed(job.seed)  # of the new weights and of dropout
    model = build_model(config, checkpoint, job.name, train_data)
    model.to(runtime.device)
    if runtime.use_compile:
        model.encode = torch.compile(model.encode)
    result = train_and_score(args, runtime, job, model, data)
    result["facts"] = facts
    result["truth"] = list_truth(data)
    result["size"] = count_parameters(model)
    # the control: a bag of words without an encoder, trained alike
    control = build_bag_of_words(data)
    if control is not None and args.epochs > 0:
        control.to(runtime.device)
        control_job = dataclasses.replace(job, name=f"{job.name}, bag of words")
        result["control"] = train_and_score(args, runtime, control_job, control, data)

    os.makedirs(job.folder, exist_ok=True)
    task = train_data.description() | dict(name=job.name)
    words = checkpoint.get("words", [])
    tokenizer = train_data.tokenizer.state()
    save_checkpoint(job.path, model, tokenizer, run=result, task=task, words=words)


# -------------------------------------------------------------------------------------------------
# Models


def build_model(config, checkpoint, name, train_data):
    """Return the model of a task, with the checkpoint's weights where it has some.

    Args:
        config: of the encoder. The head follows from the task.
        name: str, the task.
        train_data: SequenceClassification or QuestionAnswering, the training rows.
    """
    num_rows = config.bag if train_data.has_bag else 0
    config = dataclasses.replace(
        config, head=train_data.head, labels=train_data.num_outputs, bag=num_rows)
    model = select_classes(vars(config)).model(config)

    new_parts = []  # whose weights stay as they were drawn
    if not is_same_task(checkpoint, name, train_data.task):
        new_parts = ["head", "bag"]
    elif checkpoint["config"]["bag"] != num_rows:  # of the same task, with another --bag
        new_parts = ["bag"]
    if "model" in checkpoint:
        load_weights(model, checkpoint["model"], new_parts)

    model.set_codes(torch.from_numpy(train_data.tokenizer.codes()))
    # the idf of a bag counts the training texts once, when it is new
    if num_rows > 0 and "bag" in new_parts:
        model.bag.set_idf([model.bag_rows[torch.from_numpy(ids)] for ids in train_data.examples])
    return model


def load_weights(model, weights, new_parts):
    """Copy weights into a model, except into its new parts.

    Args:
        model: nn.Module.
        weights: dict, as of state_dict.
        new_parts: list of str, the first words of names, as bag of bag.weight.

    Raises:
        InputError: A weight of another part is missing, or the model has no weight of a name.
    """
    old = {key: weight for key, weight in weights.items() if key.split(".")[0] not in new_parts}
    missing, unexpected = model.load_state_dict(old, strict=False)
    missing = [key for key in missing if key.split(".")[0] not in new_parts]
    if missing or unexpected:
        wrong = missing + unexpected
        raise InputError(f"--ckpt: expected the weights of the model, got {len(missing)} missing "
                         f"and {len(unexpected)} unexpected ones, as {wrong[0]}.")


def build_bag_of_words(data):
    """Return the control without an encoder; None where there are no words or no labels.

    Args:
        data: dict, as encode_splits returns it.
    """
    train_data = data["train"]
    if train_data.head != "classify" or not train_data.tokenizer.words:  # CANINE has characters
        return None
    examples = []
    for part in data.values():
        examples += part.examples
    num_ids = 1 + max(ids.max() for ids in examples)
    return BagOfWords(train_data.examples, num_ids, train_data.num_outputs, train_data.length)


# -------------------------------------------------------------------------------------------------
# Training


def train_and_score(args, runtime, job, model, data):
    """Train a model on a task, and score it. Leave the chosen weights in it.

    Args:
        args: the flags.
        runtime: Runtime.
        job: Job. Its seed orders the examples, its name is for the log.
        model: nn.Module with token IDs (B, L) and mask to logits; its weights are overwritten.
        data: dict of split -> SequenceClassification or QuestionAnswering: train; select, whose
            score chooses the weights, or no such split; and the splits to score.

    Returns:
        dict of seed; best and last, the scores of the chosen and the last weights; predicted, by
        the chosen ones; constant_prediction, their only label or None; selection, the score that
        chose them; log, a list of one dict for each evaluation.
    """
    log, best_weights = train(args, runtime, job, model, data)
    last, predicted = evaluate_dev(runtime, model, data)
    best = last
    if best_weights.state is not None:
        model.load_state_dict(best_weights.state)
        best, predicted = evaluate_dev(runtime, model, data)
    dev = data[data["train"].task.dev_splits[0]]
    return dict(
        seed=job.seed,
        best=best,
        last=last,
        predicted=np.asarray(predicted).tolist(),
        constant_prediction=dev.name_constant(predicted),
        selection=best_weights.score,
        log=log,
    )


def train(args, runtime, job, model, data):
    """Train a model on a task; the arguments are those of train_and_score.

    Returns:
        list of dict, one for each evaluation; and BestWeights.
    """
    train_data = data["train"]
    metric = train_data.task.metrics[0]
    batches = draw_batches(train_data.examples, args.batch, args.epochs, job.seed)
    num_steps = len(batches)
    warmup = math.ceil(WARMUP * num_steps)
    eval_every = args.eval_every
    if eval_every is None:  # twice per epoch
        eval_every = max(1, math.ceil(len(train_data.examples) / args.batch) // 2)

    optimizer = build_optimizer(model, args.lr)
    best_weights = BestWeights()
    log = []
    total_loss = torch.zeros((), device=runtime.device)  # since the last evaluation
    num_losses = 0
    start = time.perf_counter()
    # disable=None: no bar where there is no terminal
    for step in tqdm(range(num_steps), f"{job.name}, seed {job.seed}", leave=False, disable=None):
        for group in optimizer.param_groups:
            group["lr"] = args.lr * learning_rate(step, num_steps, warmup)
        model.train()
        if model.config.lsh_redraw:
            model.redraw_hyperplanes(job.seed * SEED_STRIDE + step)

        # forward, backward, clip, update
        chosen = batches[step]  # indices of examples
        targets = torch.from_numpy(train_data.targets[chosen]).to(runtime.device)
        logits = compute_logits(runtime, model, [train_data.examples[i] for i in chosen])
        loss = train_data.loss(logits, targets)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        total_loss += loss.detach()  # on the device: to read it would wait for a GPU
        num_losses += 1

        num_done = step + 1
        if num_done % eval_every == 0 or num_done == num_steps:
            mean_loss = total_loss.item() / num_losses
            row = dict(task=job.name, seed=job.seed, step=num_done, loss=mean_loss)
            if "select" in data:
                scores, _ = evaluate(runtime, model, data["select"])
                row |= scores
                best_weights.update(model, scores[metric])
            log.append(row)
            seconds_left = (time.perf_counter() - start) / num_done * (num_steps - num_done)
            print_progress(row, num_steps, metric, seconds_left)
            total_loss.zero_()
            num_losses = 0
    return log, best_weights


def draw_batches(examples, batch_size, epochs, seed):
    """Return the batches of all epochs, arrays of indices: examples of similar length together."""
    lengths = [len(example) for example in examples]
    batches = []
    for epoch in range(epochs):
        batches += length_batches(lengths, batch_size, np.random.default_rng([seed, epoch]))
    return batches


def build_optimizer(model, lr):
    """Return AdamW: no decay for encoder and head, HashedBag.DECAY for weights named bag.

    These are the part that --bag adds, and all of the control.
    """
    encoder = []
    bag = []
    for name, parameter in model.named_parameters():
        if name.startswith("bag."):
            bag.append(parameter)
        else:
            encoder.append(parameter)
    groups = [
        dict(params=encoder, weight_decay=0.0),
        dict(params=bag, weight_decay=HashedBag.DECAY),
    ]
    return torch.optim.AdamW(groups, lr, eps=1e-6, fused=True)


def learning_rate(step, num_steps, warmup):
    """Return the factor of the peak: linear up, then five times a cosine down. [HF Table 5]"""
    if step < warmup:
        return (step + 1) / warmup
    progress = (step - warmup) / (num_steps - warmup)  # from 0 to below 1
    return 0.5 * (1 + math.cos(math.pi * ((CYCLES * progress) % 1)))


def compute_logits(runtime, model, examples):
    """Return float32 logits of examples, a list of int32 arrays of token IDs."""
    # to compile few shapes, pad to powers of two up to this length
    max_length = model.config.length if runtime.use_compile else None
    ids, key_mask = pad_batch(examples, max_length)  # (B, L), bool (B, L) or None
    ids = ids.to(runtime.device)
    if key_mask is not None:
        key_mask = key_mask.to(runtime.device)
    with autocast(runtime.device, runtime.dtype):
        logits = model(ids, key_mask)
    return logits.float()


def evaluate(runtime, model, part):
    """Return the scores of a split, a value of data, as a dict; and what was predicted."""
    return part.evaluate(predict(runtime, model, part.examples))


@torch.no_grad()
def predict(runtime, model, examples):
    """Yield (indices, logits) of batches of examples of similar length, in evaluation mode."""
    model.eval()
    batch_size = max(1, EVAL_POSITIONS // model.config.length)
    lengths = [len(example) for example in examples]
    for chosen in length_batches(lengths, batch_size):
        logits = compute_logits(runtime, model, [examples[i] for i in chosen])
        if not logits.isfinite().all():
            raise InputError("--lr, --ckpt: expected finite outputs of the model, got NaN or "
                             "infinity. Try a lower --lr or another checkpoint.")
        yield chosen, logits


def evaluate_dev(runtime, model, data):
    """Return the scores of all splits to score, and what was predicted of the first."""
    first, *others = data["train"].task.dev_splits
    scores, predicted = evaluate(runtime, model, data[first])
    for split in others:  # of MNLI: mismatched_
        more, _ = evaluate(runtime, model, data[split])
        for metric, score in more.items():
            scores[f"{split.removeprefix('dev_')}_{metric}"] = score
    return scores, predicted


class BestWeights:
    """The weights of a model with the highest score; of equal scores the earliest.

    Attributes:
        score: float, -inf before the first update.
        state: dict as of state_dict, None before the first update.
    """

    def __init__(self):
        self.score = -math.inf
        self.state = None

    def update(self, model, score):
        """Copy the weights of the model, if its score is higher than all before."""
        if score > self.score:
            self.score = score
            self.state = {key: weight.clone() for key, weight in model.state_dict().items()}


def print_progress(row, num_steps, metric, seconds_left):
    """Print a row of the log, above the progress bar, and how long its training still takes."""
    text = f"{row['task']}, seed {row['seed']}, step {row['step']:,} of {num_steps:,}: "
    text += f"loss {row['loss']:.3f}"
    if metric in row:
        text += f", select {metric} {row[metric]:.2f}"
    text += f", {tqdm.format_interval(seconds_left)} left"
    tqdm.write(text)
    sys.stdout.flush()  # in a file or a pipe, too, where it would wait for more lines


# -------------------------------------------------------------------------------------------------
# Results


def load_results(jobs):
    """Return dict: task -> the results of its seeds, as run_job saved them."""
    results = {}
    for job in jobs:
        results.setdefault(job.name, [])
        results[job.name].append(load_checkpoint(job.path)["run"])
    return results


def summarize(config, checkpoint, tasks, settings, results):
    """Return the content of results.json.

    Args:
        tasks: list of TaskData.
        settings: dict, of the run.
        results: dict, as load_results returns it.
    """
    summaries = {}
    for task_data in tasks:
        summaries[task_data.name] = summarize_task(results[task_data.name], task_data.task.labels)
    size = results[tasks[0].name][0]["size"]
    model = dict(
        parameters=size["total"],
        embedding=size["embedding"],
        poep=100 * size["poep"],
        emb=config.emb,
        pretrained="model" in checkpoint,
    )
    content = dict(tasks=summaries, settings=settings, model=model)
    if len(tasks) > 1:  # average over tasks, then over seeds
        scores = [row["values"] for row in summaries.values()]  # (tasks, seeds)
        by_seed = np.mean(scores, axis=0)
        content["average"] = float(by_seed.mean())
        content["average_std"] = deviation(by_seed)
    return content


def summarize_task(results, labels):
    """Return the row of results.json of one task.

    Args:
        results: list, of its seeds.
        labels: list of str, its classes, or None.
    """
    row = dict(results[0]["facts"])
    metric = row["metric"]
    predictions = collect_predictions(results)
    row |= summarize_control(results, predictions)
    values = [result["best"][metric] for result in results]
    last = [result["last"][metric] for result in results]
    return row | dict(
        seeds=[result["seed"] for result in results],
        values=values,
        mean=float(np.mean(values)),
        std=deviation(values),
        min=min(values),
        max=max(values),
        last=float(np.mean(last)),
        all_metrics=average_metrics(results),
        f1_per_label=score_labels(predictions, labels),
        one_class=find_constant_seeds(results),
        parameters=results[0]["size"]["total"],
    )


def collect_predictions(results):
    """Return the entry of a task in predictions.json: the truth, and what each seed predicted."""
    metric = results[0]["facts"]["metric"]
    content = dict(metric=metric, truth=results[0]["truth"], predicted=[], bag_of_words=[])
    for result in results:
        content["predicted"].append(result["predicted"])
        if "control" in result:
            content["bag_of_words"].append(result["control"]["predicted"])
    return content


def summarize_control(results, predictions):
    """Return the score of the bag of words, and how far the encoder is above it."""
    if not predictions["bag_of_words"]:
        return dict(bag_of_words=None, bag_of_words_std=None, over_bag=None, over_bag_error=None)
    metric = predictions["metric"]
    scores = [result["control"]["best"][metric] for result in results]
    difference, error = compare_predictions(
        metric, predictions["truth"], predictions["predicted"], predictions["bag_of_words"])
    return dict(bag_of_words=float(np.mean(scores)), bag_of_words_std=deviation(scores),
                over_bag=difference, over_bag_error=error)


def deviation(values):
    """Return the standard deviation of a sample, None of one value."""
    if len(values) == 1:
        return None
    return float(np.std(values, ddof=1))


def average_metrics(results):
    """Return each metric's mean over the seeds."""
    means = {}
    for metric in results[0]["best"]:
        means[metric] = float(np.mean([result["best"][metric] for result in results]))
    return means


def score_labels(predictions, labels):
    """Return each label's F1 score in percent, the mean over the seeds; {} without labels."""
    scores = {}
    if labels is not None:
        truth = np.array(predictions["truth"])
        predicted = np.array(predictions["predicted"])  # (S, n)
        for number, label in enumerate(labels):
            by_seed = [f1(classes, truth, number) for classes in predicted]
            scores[label] = 100 * float(np.mean(by_seed))
    return scores


def find_constant_seeds(results):
    """Return dict: seed, as str -> its label, of the seeds that predict one label of all rows."""
    constant = {}
    for result in results:
        if result["constant_prediction"] is not None:
            constant[str(result["seed"])] = result["constant_prediction"]
    return constant


def write_results(out, content, results):
    """Write log.jsonl, results.json and predictions.json."""
    predictions = {}
    with open(os.path.join(out, "log.jsonl"), "w") as file:
        for name, by_seed in results.items():
            predictions[name] = collect_predictions(by_seed)
            for result in by_seed:
                for row in result["log"]:
                    print(json.dumps(row), file=file)
    write_json(out, "results.json", content)
    write_json(out, "predictions.json", predictions)


def keep_best_weights(jobs, results):
    """Make the file of each task's best seed its ckpt.pt, and remove the files of all seeds."""
    for job in jobs:
        # the scored rows do not choose the seed, either. Without --select each selection is -inf,
        # and max takes the first
        best = max(results[job.name], key=lambda result: result["selection"])
        if job.seed == best["seed"]:
            path = os.path.join(job.folder, "ckpt.pt")
            shutil.copyfile(job.path, path + ".tmp")
            os.replace(path + ".tmp", path)
    # subtle: only now, when each task has its ckpt.pt and the run is complete. A run that is killed
    # before goes on from the files of all its seeds
    for job in jobs:
        os.remove(job.path)


def format_score(score):
    """Return a score with two decimals, n/a for None."""
    return "n/a" if score is None else f"{score:.2f}"


def print_results(results):
    """Print the scores, and what to know about them."""
    model = results["model"]
    print(f"\nparameters: {model['parameters']:,}, of which embedding {model['embedding']:,} (PoEP "
          f"{model['poep']:.2f} %)")
    if "average" in results:
        std = format_score(results["average_std"])
        print(f"average over the tasks: {results['average']:.2f}, std {std}")
    for name, row in results["tasks"].items():
        scores = ", ".join(f"{key} {format_score(row[key])}" for key in SCORES)
        print(f"{name}: {row['metric']} of {row['n']:,} rows: {scores}")
        for seed, label in row["one_class"].items():
            print(f"{name}: the run with seed {seed} always predicts {label!r}, which counts in "
                  "the mean")
        if row["over_bag"] is not None:
            note = ""
            if row["over_bag"] <= 2 * row["over_bag_error"]:  # 0 ± 0, too
                note = ": no better than a bag of words"
            print(f"{name}: minus a bag of words: {row['over_bag']:+.2f} ± "
                  f"{row['over_bag_error']:.2f}, standard error of rows and seeds{note}")


if __name__ == "__main__":
    main()
