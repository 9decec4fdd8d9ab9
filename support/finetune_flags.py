"""The flags of a task and its training: finetune.py and baselines/canine.py add, check, fill them.

Out of scope: the flags of pretrain.py (support/flags.py).
"""

from argparse import Namespace
from pathlib import Path

from data.rows import add_reader_flags, reader_options
from data.tasks import choose_task, list_tasks
from support.common import InputError, add_device_flags, at_least


def add_run_flags(add, tasks):
    """Add the flags of a task and its training by `add`, the add_argument of a parser."""
    positive = at_least(1)
    add("--task", choices=tasks, default="own",
        help="own: your files; squad, squad_v2: answers in a text; pydoc: the module of a "
        "docstring; glue: eight tasks (default: own)")
    add("--data_dir", help="folder of original files, as SST-2/train.tsv (default: the hub)")
    add("--train", help="table of training rows: a file, or a hub ID owner/name:CONFIG:SPLIT")
    add("--dev", help="table of rows to score (default: a tenth of --train, not trained on)")
    add_reader_flags(add)
    add("--text", help="column of the text in your files, or A,B for two texts (default: text)")
    add("--label", help="column of the label in your files (default: label)")
    add("--regression", action="store_true", help="the labels in your files are numbers")
    add("--balanced", action="store_true", help="weigh classes alike in the loss; score macro F1")
    add("--limit", type=positive, help="training rows, drawn at random (default: all)")
    # the training
    add("--epochs", type=at_least(0), default=5, help="0: only score (default: 5)")
    add("--batch", type=positive, default=32, help="examples per step (default: 32)")
    add("--lr", type=at_least(0, float), help="peak rate (default: 3e-5; 1e-3 below width 512)")
    add("--pool", choices=("cls", "mean"),
        help="the head reads the first position, or the mean (default: mean below a width of 512)")
    add("--select", type=at_least(0, float, 0.5), default=0.1,
        help="share of the training rows that chooses the weights; 0: the last (default: 0.1)")
    add("--seeds", type=positive, default=3, help="seeds per task (default: 3)")
    add("--seed", type=at_least(0), default=0, help="the first of the seeds (default: 0)")
    add("--eval_every", type=positive, help="steps between evaluations (default: half an epoch)")
    # device and files
    add_device_flags(add)
    add("--cache", default="cache", help="folder of prepared texts (default: cache)")
    add("--out", help="folder of the results (default: out/CKPT-TASK)")


def check_flags(args):
    """Raise InputError where a flag is missing, or would be ignored and the result be wrong."""
    if args.preset and args.from_scratch:
        raise InputError("--from_scratch requires --ckpt.")
    tasks = [choose_task(name, args) for name in list_tasks(args.task)]
    for task in tasks:
        for flag in ("train", "dev", "data_dir", "text", "label", "regression"):
            is_set = getattr(args, flag) not in (None, False)
            if is_set and flag not in task.flags:
                raise InputError(f"--{flag}: expected a task that reads it, got --task "
                                 f"{args.task}.")
        if "train" in task.flags and "data_dir" not in task.flags and not args.train:
            raise InputError("--task: expected a task, or your own files as --train and --dev.")
    if len(tasks) > 1 and (args.train or args.dev):
        raise InputError(f"--train, --dev: expected one task, got --task {args.task}.")
    if args.data_dir and args.train:
        raise InputError("--data_dir requires that the training rows are there, got --train.")
    if reader_options(args) and not (args.data_dir or args.train or args.dev):
        raise InputError("--encoding, --sep and --header require --train, --dev or --data_dir.")


def fill_flags(args, width, pool=None):
    """Return all flags, also those that were left out: as the checkpoint says, else by the width.

    pool: str, that of a checkpoint whose head was trained, else None.
    """
    args = Namespace(**vars(args))
    is_small = width < 512
    if args.lr is None:
        args.lr = 1e-3 if is_small else 3e-5  # [HF Table 5]
    if args.pool is None:
        args.pool = pool
    if args.pool is None:
        args.pool = "mean" if is_small else "cls"  # Shuffle+Random never trains [CLS]
    if args.epochs == 0:  # nothing is random, and nothing is chosen
        if pool not in (None, args.pool):
            raise InputError(f"--pool: expected {pool}, that of --ckpt, with --epochs 0.")
        args.seeds = 1
        args.select = 0.0
    if args.out is None:
        name = args.preset
        if args.ckpt:
            path = Path(args.ckpt).absolute()
            if path.name in ("ckpt.pt", "best.pt"):  # every run has them
                path = path.parent
            name = path.name.removesuffix(".pt")
        if args.from_scratch:
            name += "-scratch"
        args.out = f"out/{name}-{args.task}"
    return args
