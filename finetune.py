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
    [HF §4.1] load_start
Sources:
    [HF] Xue & Aletras 2022, HashFormers
Out of scope: tasks and metrics (data/), labels of new texts (infer.py), the comparison of two
    fine-tunings (bench/compare.py).
Deviations:
    1. A tenth of the training rows chooses the evaluation whose weights are scored (--select).
       The scored rows choose nothing. The score of the last weights is reported too.
    2. Two evaluations per epoch (--eval_every). [HF Table 5]: five, of small tasks in 3 epochs.
    3. Gradients are clipped at norm 1, which the paper does not name.
    4. The cosine restarts after each fifth of the steps. The paper does not say how often.
    5. Models of width below 512 have a recipe of their own, "small" (docs/finetuning.md).
    6. Batch 32 for every model. The median proposal fine-tunes with 64 (--batch 64).
"""

import argparse
import contextlib
import dataclasses
import datetime
import functools
import json
import math
import os
import shlex
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from tqdm import tqdm

from baselines.bag import BagOfWords, HashedBag
from baselines.canine import CanineConfig, CharacterTokenizer, load_released, select_classes
from common import InputError, add_device_flags, at_least, autocast, blame_file, blame_input
from common import fingerprint, gather_from_ranks, load_checkpoint, lock_output, read_ranks
from common import resolve_device, run_script, save_checkpoint
from data.batches import length_batches, pad_batch
from data.corpus import add_reader_flags, reader_options
from data.squad import SQUAD, QuestionAnswering, read_squad
from data.tasks import GLUE, TASKS, SequenceClassification, compare_predictions, draw_groups
from data.tasks import draw_rows, f1, measure_scale, read_task
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
# Flags that may change when a run is resumed; an --out holds results of one choice of the others
FREE = ("recipe", "device", "compile", "cache", "out", "encoding", "sep")  # see texts
# The tasks that a flag requires; with others it would have no effect, and is refused
REQUIRES = {
    "text": ("own",),
    "label": ("own",),
    "regression": ("own",),
    "stride": SQUAD,
    "max_answer": SQUAD,
}
TRAINING = ("recipe", "batch", "lr", "pool", "bag", "dropout", "eval_every")  # flags for epochs
EVAL_POSITIONS = 32_768  # that an evaluation reads at once
WARMUP = 0.06  # share of the steps [HF Table 5]
CYCLES = 5  # of the cosine
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
        help="training rows, .tsv .csv .jsonl .parquet; of --task in its columns")
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
    add = p.add_argument_group("training", f"recipes [HF Table 5]\n{recipes}").add_argument
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
    add("--select", type=at_least(0, float, 0.5), default=0.1, metavar="SHARE",
        help="share of the training rows that chooses the evaluation whose weights are scored; 0: "
        "the last one's (default: 0.1)")
    add("--dropout", type=float, help="dropout probability (default: the checkpoint's)")
    add("--seeds", type=at_least(1, maximum=999), default=3,
        help="runs of each task (default: 3)")
    add("--seed", type=at_least(0), default=0,
        help="seed of the first run; the next has S+1 (default: 0)")
    add("--eval_every", type=at_least(1),
        help="steps between evaluations (default: half an epoch)")

    add = p.add_argument_group("device and files").add_argument
    add_device_flags(add)
    add("--cache", default="cache", metavar="DIR", help="folder of prepared texts (default: cache)")
    add("--out", metavar="DIR", help="folder of the results (default: out/CKPT-TASK)")
    return p


def file_or_share(text):
    """Return a number between 0 and 1 as float, anything else as it is: the argparse type."""
    with contextlib.suppress(ValueError):
        if 0 < float(text) < 1:
            return float(text)
    return text


def main(argv=None):
    """Fine-tune as the command line, or the list argv, says; return what finetune returns."""
    args = build_parser().parse_args(argv)
    return run_script("finetune.py", finetune, args)


def finetune(args):
    """Train each task with each seed, and write and print the results.

    Args:
        args: the flags of build_parser. Those that are None or "auto" are filled in.

    Returns:
        dict, the content of results.json; None on other ranks than 0.

    Raises:
        InputError: A flag or a file is at fault.
    """
    check_flags(args)

    # ---------------------------------------------------------------------------------------------
    # Ranks: torchrun starts one process for each GPU, and each does its share of the jobs, for
    # hours without a word to the others

    rank, world, local_rank = read_ranks()
    if world > 1:  # first: a rank notices that another one ends, but not that it never comes
        dist.init_process_group("gloo", timeout=datetime.timedelta(days=30))

    # ---------------------------------------------------------------------------------------------
    # Start: a checkpoint or a preset, and a recipe for the flags that are not set

    checkpoint, config = load_start(args)
    fill_flags(args, checkpoint, config)
    with blame_input("--pool, --bag, --dropout"):
        config = dataclasses.replace(config, pool=args.pool, bag=args.bag, dropout=args.dropout)

    # ---------------------------------------------------------------------------------------------
    # Texts: all files are read here, so that what is wrong with them shows before the training

    names = GLUE if args.task == "glue" else [args.task]
    texts = {}  # name -> Task, training rows, and the rows to score of each split
    descriptions = {}  # name -> what the checkpoint says of this very task, else {}
    for name in names:
        read = read_squad if name in SQUAD else read_task
        texts[name] = read(name, args)
        task = texts[name][0]
        # of the very same task the head, the bag, and the units or windows stay
        description = checkpoint.get("task", {})
        if description | task.description() | dict(name=name) != description:
            description = {}
        if args.epochs == 0 and not description:
            raise InputError("--epochs 0 requires --ckpt of a model that was fine-tuned for this "
                             f"very task, {name}, with its columns and labels.")
        if args.stride is None:
            args.stride = description.get("stride")
        if args.max_answer is None:
            args.max_answer = description.get("longest")
        descriptions[name] = description

    # ---------------------------------------------------------------------------------------------
    # --out is of one run at a time, and of one choice of flags, texts and checkpoint

    start = args.preset
    if args.ckpt:
        start_path = Path(args.ckpt).absolute()
        if start_path.is_dir():
            start_path = start_path / "ckpt.pt"
        start = start_path.parent.name
        if start_path.name not in ("ckpt.pt", "best.pt"):  # models/docstrings.pt
            start = start_path.stem
    if args.out is None:
        scratch = "-scratch" if args.from_scratch else ""
        args.out = os.path.join("out", f"{start}{scratch}-{args.task}")
    settings_path = os.path.join(args.out, "settings.json")
    saved = {}
    if os.path.exists(settings_path):
        with blame_file(settings_path):
            saved = dict(json.loads(Path(settings_path).read_text()))
    if args.dtype == "auto":
        args.dtype = saved.get("dtype", "auto")
    args.device, args.dtype, args.compile = resolve_device(args, local_rank)
    # one dtype for all ranks; from here on all have read the settings, and rank 0 may write
    args.dtype = gather_from_ranks(args.dtype)[0]
    settings = {flag: value for flag, value in vars(args).items() if flag not in FREE}
    settings["texts"] = fingerprint([splits[1:] for splits in texts.values()])
    if args.ckpt:
        file = start_path.stat()  # its content may change
        settings["checkpoint"] = [file.st_size, file.st_mtime_ns]
    refuse_other_run(args.out, saved, settings)

    folders = {}  # name -> that of its checkpoints
    for name in names:
        folders[name] = args.out if len(names) == 1 else os.path.join(args.out, name)
    results_path = os.path.join(args.out, "results.json")

    with lock_output(args.out, rank):  # makes the folder: what a flag can break was checked above
        checkpoints = [os.path.join(folder, "ckpt.pt") for folder in folders.values()]
        if all(os.path.exists(path) for path in [results_path, *checkpoints]):
            if rank > 0:
                return None
            with blame_file(results_path):
                content = json.loads(Path(results_path).read_text())
            print(f"{args.out}: this run is complete, and its results follow. Use another --out to "
                  "train again.")
            print_results(content)
            return content
        if rank == 0:
            write_json(settings_path, settings)

        # -----------------------------------------------------------------------------------------
        # Jobs: one for each task and seed. The file that a job leaves holds its weights and its
        # result, so that the same command goes on after an interruption: it skips finished jobs

        paths = {}  # (name, seed) -> the job's file
        seeds = range(args.seed, args.seed + args.seeds)
        for name in names:
            os.makedirs(folders[name], exist_ok=True)
            for seed in seeds:
                paths[name, seed] = os.path.join(folders[name], f"seed-{seed}.pt")
        if rank == 0:
            print_settings(args, config, checkpoint)
        if args.compile:  # graphs of encode: models differ in mask, bag and length
            torch._dynamo.config.recompile_limit = 64

        prepared = None
        try:
            for name, seed in list(paths)[rank::world]:
                path = paths[name, seed]
                if os.path.exists(path):
                    continue
                if name != prepared:  # the jobs of a task follow each other
                    description = descriptions[name]
                    data, facts = prepare_data(
                        args, config, checkpoint, description, name, *texts[name])
                    train = data["train"]
                    prepared = name

                torch.manual_seed(seed)  # of the new weights and of dropout
                model = build_model(config, checkpoint, train, is_same_task=bool(description))
                model.to(args.device)
                if args.compile:
                    model.encode = torch.compile(model.encode)
                result = train_one(args, name, seed, model, data)
                result |= dict(facts=facts, size=count_parameters(model))
                control = build_bag_of_words(data)
                if control is not None and args.epochs > 0:
                    control.to(args.device)
                    title = f"{name}, bag of words"
                    result["control"] = train_one(args, title, seed, control, data)
                save_checkpoint(path, model, train.tokenizer.state(), run=result,
                                task=train.description() | dict(name=name),
                                words=checkpoint.get("words", []))
        except KeyboardInterrupt as interrupt:
            num_finished = sum(os.path.exists(path) for path in paths.values())
            print(f"Interrupted: {num_finished} of {len(paths)} runs are finished and kept. Rerun "
                  "the same command to train the others.")
            raise SystemExit(130) from interrupt

        # -----------------------------------------------------------------------------------------
        # Results: rank 0 writes them, and keeps the best checkpoint of each task

        gather_from_ranks(None)  # waits for the jobs of all ranks
        if rank > 0:
            return None

        results = {job: load_checkpoint(path)["run"] for job, path in paths.items()}
        with open(os.path.join(args.out, "log.jsonl"), "w") as file:
            for result in results.values():
                for row in result["log"]:
                    print(json.dumps(row), file=file)

        predictions = collect_predictions(results)
        rows = {}
        for name in names:
            by_seed = [results[name, seed] for seed in seeds]
            task, *_ = texts[name]
            rows[name] = summarize(by_seed, predictions[name], task.labels)
        size = results[names[0], args.seed]["size"]
        content = dict(tasks=rows, settings=settings)
        content["model"] = dict(
            parameters=size["total"],
            embedding=size["embedding"],
            poep=100 * size["poep"],
            emb=config.emb,
            pretrained="model" in checkpoint,
        )
        if len(names) > 1:  # average over tasks, then over seeds
            by_seed = np.mean([row["values"] for row in rows.values()], axis=0)
            content["average"] = float(by_seed.mean())
            content["average_std"] = deviation(by_seed)
        write_json(results_path, content)
        write_json(os.path.join(args.out, "predictions.json"), predictions)

        for name in names:
            # the scored rows do not choose the seed, either
            best = max(seeds, key=lambda seed: results[name, seed]["selection"])
            os.replace(paths[name, best], os.path.join(folders[name], "ckpt.pt"))
            for file in Path(folders[name]).glob("seed-*.pt"):
                file.unlink()

    print_results(content)
    print(f"Saved {results_path}")
    print("Next:", shlex.join(["python", "infer.py", "--ckpt", folders[names[0]]]))
    return content


# -------------------------------------------------------------------------------------------------
# Training


def build_optimizer(model, lr):
    """Return Adam for the encoder, and with the weight decay of its own for the bag of words."""
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


def learning_rate(step, steps, warmup):
    """Return the factor of the peak: linear up, then five times a cosine down. [HF Table 5]"""
    if step < warmup:
        return (step + 1) / warmup
    progress = (step - warmup) / max(steps - warmup, 1)  # from 0 to 1
    return 0.5 * (1 + math.cos(math.pi * (CYCLES * progress % 1)))


def compute_logits(args, model, examples):
    """Return float32 logits of examples, a list of int32 arrays of token IDs."""
    # to compile few shapes, pad to powers of two up to this length
    max_length = model.config.length if args.compile else None
    ids, key_mask = pad_batch(examples, max_length)  # (B, L), bool (B, L) or None
    ids = ids.to(args.device)
    if key_mask is not None:
        key_mask = key_mask.to(args.device)
    with autocast(args.device, args.dtype):
        logits = model(ids, key_mask)
    return logits.float()


@torch.no_grad()
def evaluate(args, model, data):
    """Return the scores of a split, a dict, and what was predicted."""
    model.eval()
    batch_size = max(1, EVAL_POSITIONS // model.config.length)

    def predict(examples):
        lengths = [len(example) for example in examples]
        for chosen in length_batches(lengths, batch_size):
            logits = compute_logits(args, model, [examples[i] for i in chosen])
            if not logits.isfinite().all():
                raise InputError("--lr: expected finite outputs of the model, got NaN or infinity. "
                                 "Try a lower --lr.")
            yield chosen, logits

    return data.evaluate(predict)


def evaluate_dev(args, model, data):
    """Return the scores of all splits to score, and what was predicted of the first."""
    first, *others = data["train"].task.dev
    scores, predicted = evaluate(args, model, data[first])
    for split in others:  # of MNLI: mismatched_
        more, _ = evaluate(args, model, data[split])
        for metric, score in more.items():
            scores[f"{split.removeprefix('dev_')}_{metric}"] = score
    return scores, predicted


def train_one(args, name, seed, model, data):
    """Train a model on a task, and score it. Leave the chosen weights in it.

    Args:
        args: the flags, with device, dtype and compile as of resolve_device.
        name: str, the task, for the log.
        seed: int, orders the examples.
        model: nn.Module with token IDs (B, L) and mask to logits; its weights are overwritten.
        data: dict of split -> SequenceClassification or QuestionAnswering: train; select, whose
            score chooses the weights, or no such split; and the splits to score.

    Returns:
        dict of seed; best and last, the scores of the chosen and the last weights; predicted, by
        the chosen ones; constant_prediction, their only label or None; selection, the score that
        chose them; log, a list of one dict for each evaluation.
    """
    train = data["train"]
    optimizer = build_optimizer(model, args.lr)

    # the batches of all epochs: examples of similar length together
    lengths = [len(example) for example in train.examples]
    batches = []
    for epoch in range(args.epochs):
        batches += length_batches(lengths, args.batch, np.random.default_rng([seed, epoch]))
    steps = len(batches)
    warmup = math.ceil(WARMUP * steps)
    eval_every = args.eval_every
    if eval_every is None:
        eval_every = max(1, steps // max(1, args.epochs) // 2)  # twice per epoch

    metric = train.task.metrics[0]
    log = []
    selection = -math.inf  # the highest score of the rows that choose
    weights = None  # with that score
    last_step = 0  # of the last evaluation
    total_loss = torch.zeros((), device=args.device)  # since then
    # disable=None: no bar where there is no terminal
    for step in tqdm(range(steps + 1), f"{name}, seed {seed}", leave=False, disable=None):
        is_last = step == steps
        if is_last or (step > 0 and step % eval_every == 0):
            loss = total_loss.item() / max(1, step - last_step)
            row = dict(task=name, seed=seed, step=step, loss=loss)
            text = f"{name}, seed {seed}, step {step:,} of {steps:,}: loss {loss:.3f}"
            if "select" in data:
                scores, _ = evaluate(args, model, data["select"])
                row |= scores
                text += f", select {metric} {scores[metric]:.2f}"
                if scores[metric] > selection:
                    selection = scores[metric]
                    weights = {key: weight.clone() for key, weight in model.state_dict().items()}
            log.append(row)
            tqdm.write(text)
            sys.stdout.flush()  # in a file or a pipe, too, where it would wait for more lines
            total_loss.zero_()
            last_step = step
        if is_last:
            break

        # a step: forward, backward, clip, update
        for group in optimizer.param_groups:
            group["lr"] = args.lr * learning_rate(step, steps, warmup)
        model.train()
        if model.config.lsh_redraw:
            model.redraw_hyperplanes(seed * 1_000_003 + step)  # seeds share none, nor do steps
        chosen = batches[step]
        targets = torch.from_numpy(train.targets[chosen]).to(args.device)
        logits = compute_logits(args, model, [train.examples[i] for i in chosen])
        loss = train.loss(logits, targets)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        total_loss += loss.detach()

    last, predicted = evaluate_dev(args, model, data)
    best = last
    if weights is not None:
        model.load_state_dict(weights)
        best, predicted = evaluate_dev(args, model, data)
    dev = data[train.task.dev[0]]
    return dict(
        seed=seed,
        best=best,
        last=last,
        predicted=np.asarray(predicted).tolist(),
        constant_prediction=dev.name_constant(predicted),
        selection=selection,
        log=log,
    )


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
    """Return the checkpoint of --ckpt, or what a preset has of one, and the config. [HF §4.1]

    Returns:
        checkpoint: dict as of load_checkpoint, without model and task where the weights are fresh;
            of ProFormer it is empty.
        config: model.Config or CanineConfig.
    """
    checkpoint = {}
    if args.preset:
        config = SHAPES[args.preset]
        if config.emb == "canine":
            checkpoint["encoder"] = CharacterTokenizer().state()
        if args.weights:
            with blame_input(f"--weights {args.weights}"):
                config, checkpoint["model"] = load_released(args.weights)
    else:
        with blame_file(args.ckpt):
            checkpoint = load_checkpoint(args.ckpt)
            *classes, _ = select_classes(checkpoint["config"])
            # raises where weights and config do not fit; the jobs build models of their own
            config = load_model(checkpoint, classes).config
    if not config.order:
        raise InputError(f"--ckpt {args.ckpt}: expected a model of texts, got one of item sets.")
    if config.emb == "canine" and args.task in SQUAD:
        raise InputError(f"--task: expected a task with labels for canine, got {args.task}.")
    if args.from_scratch:
        checkpoint.pop("model", None)
        checkpoint.pop("task", None)
    return checkpoint, config


def fill_flags(args, checkpoint, config):
    """Set the flags that are None, by the recipe and by what the model was trained with."""
    recipe = args.recipe
    if recipe is None:
        recipe = "paper" if config.width >= PAPER_WIDTH else "small"
    defaults = RECIPES[recipe] | dict(dropout=config.dropout)
    if args.task == "own":
        defaults |= dict(text="text", label="label")
    is_canine = config.emb == "canine"  # it has one pool, and no words
    if is_canine or "task" in checkpoint:  # fine-tuned before
        defaults["pool"] = config.pool
    if is_canine or config.bag > 0 or args.epochs == 0:  # else the recipe may add a bag
        defaults["bag"] = config.bag
    for flag, value in defaults.items():
        if getattr(args, flag) is None:
            setattr(args, flag, value)
    if args.epochs == 0:  # nothing is random, and nothing is chosen
        args.seeds = 1
        args.select = 0.0


def prepare_data(args, config, checkpoint, description, name, task, train, devs):
    """Return a task's rows as token IDs, and what results.json says of them.

    Args:
        description: dict, of this task in a checkpoint that was fine-tuned for it, else {}.
        name: str, the task.
        task, train, devs: as of read_task or read_squad.

    Returns:
        dict of split (train, select, and those to score) -> SequenceClassification or
        QuestionAnswering, which share the tokenizer that knows their words; and dict of facts.
    """
    if args.limit is not None:
        train, _ = draw_rows(train, args.limit, seed=0)
    num_rows = len(train)
    select, train = draw_groups(train, round(args.select * num_rows), 1, task.group_start)
    if args.select > 0 and not select:
        print(f"{name}: --select {args.select:g} of {num_rows:,} rows is none: the last weights "
              "are scored, not the best")
    splits = dict(train=train)  # subtle: it is first, as the tokenizer numbers words in this order
    if select:
        splits["select"] = select
    splits |= devs
    with blame_input(f"--ckpt {args.ckpt}"):
        if checkpoint:
            _, _, tokenizer_class = select_classes(vars(config))
            tokenizer = tokenizer_class.load(checkpoint["encoder"], config)
        else:  # without pre-training, the n-grams are those of the training texts
            counts = Counter()
            for texts, _ in train:
                for text in texts:
                    counts.update(list_words(text))
            tokenizer = HashTokenizer(config, hash_name="lsh", hash=NgramLSH.fit(counts))
        if name in SQUAD:
            build = functools.partial(QuestionAnswering, stride=args.stride,
                                      max_words=args.max_answer,
                                      allow_no_answer=name == "squad_v2")
        else:
            scale = description.get("scale")
            if task.labels is None and scale is None:
                scale = measure_scale(train)
            has_bag = args.bag > 0 and len(task.texts) == 1  # a bag cannot compare two texts
            build = functools.partial(SequenceClassification, scale=scale, has_bag=has_bag)
        data = {}
        for split, rows in splits.items():
            data[split] = build(task, rows, tokenizer, config.length)

    if name == "pydoc":
        source = "held-out files of the installed Python"
    elif isinstance(args.dev, float):
        source = f"{args.dev:g} of the rows of {args.train}"
    elif args.dev:
        source = f"rows of {args.dev}"
    elif args.data_dir:
        source = f"dev set, {args.data_dir}"
    else:
        source = "dev set, hub"
    rows = {key: len(part) for key, part in splits.items()}
    columns = [*task.texts, task.label]
    sizes = ", ".join(f"{split} {size:,}" for split, size in rows.items())
    print(f"{name}: {source}; columns {', '.join(columns)}; rows {sizes}")
    print(f"{name}: of train {data['train'].notes}", flush=True)
    dev = data[task.dev[0]]
    truth = None  # of SQuAD, whose answers are texts
    if dev.head == "classify":
        truth = dev.targets.tolist()
    facts = dict(
        metric=task.metrics[0],
        n=rows[task.dev[0]],
        n_train=len(train),
        split=source,
        columns=columns,
        rows=rows,
        majority=dev.majority(data["train"]),
        truth=truth,
    )
    return data, facts


def build_model(config, checkpoint, data, is_same_task):
    """Return the model of a task's data, with the weights of a checkpoint as far as it has them.

    Args:
        config: of the encoder. The head follows from the data.
        checkpoint: dict. What it lacks is drawn at random.
        data: SequenceClassification or QuestionAnswering, the training rows.
        is_same_task: bool, the checkpoint was fine-tuned for it: its head and its bag stay.
    """
    num_rows = config.bag if data.has_bag else 0
    config = dataclasses.replace(config, head=data.head, labels=data.num_outputs, bag=num_rows)
    _, model_class, _ = select_classes(vars(config))
    model = model_class(config)

    weights = checkpoint.get("model", {})
    dropped = ()  # prefixes of the names of weights that begin anew
    if not is_same_task:
        dropped = ("head.", "bag.")
    elif len(weights.get("bag.weight", ())) != num_rows:  # another --bag
        dropped = ("bag.",)
    weights = {key: weight for key, weight in weights.items() if not key.startswith(dropped)}
    model.load_state_dict(weights, strict=False)

    model.set_codes(torch.from_numpy(data.tokenizer.codes()))
    # the idf of a bag counts the training texts once, when it is new
    if num_rows > 0 and "bag.weight" not in weights:
        model.bag.set_idf([model.bag_rows[torch.from_numpy(ids)] for ids in data.examples])
    return model


def build_bag_of_words(data):
    """Return the control without an encoder; None where there are no words or no labels.

    Args:
        data: dict, as prepare_data returns it.
    """
    train = data["train"]
    if train.head != "classify" or not train.tokenizer.words:  # CANINE has characters
        return None
    examples = []
    for part in data.values():
        examples += part.examples
    num_ids = 1 + max(ids.max() for ids in examples)
    return BagOfWords(train.examples, num_ids, train.num_outputs, train.length)


# -------------------------------------------------------------------------------------------------
# Files of --out


def refuse_other_run(folder, saved, settings):
    """Raise InputError where a folder holds checkpoints or results of other settings than these."""
    changes = []
    for name, value in settings.items():
        if saved.get(name) != value:
            changes.append(f"{name} was {saved.get(name)} and is {value}")
    has_results = any(Path(folder).rglob("*.pt")) or Path(folder, "results.json").exists()
    if changes and has_results:
        raise InputError(f"--out {folder}: belongs to another run ({'; '.join(changes)}). Use "
                         "another.")


def write_json(path, content):
    """Replace a JSON file: a crash leaves the old one or the new one."""
    Path(path + ".tmp").write_text(json.dumps(content, indent=1))
    os.replace(path + ".tmp", path)


# -------------------------------------------------------------------------------------------------
# Results


def deviation(values):
    """Return the standard deviation of a sample, None of one value."""
    if len(values) == 1:
        return None
    return float(np.std(values, ddof=1))


def collect_predictions(results):
    """Return predictions.json: of each task the truth, and per seed what was predicted of it.

    Args:
        results: dict of (task, seed) -> as train_one returns it, with facts, and with the control's
            result if there is one.
    """
    content = {}
    for (name, _), result in results.items():
        if name not in content:
            facts = result["facts"]
            content[name] = dict(metric=facts["metric"], truth=facts["truth"], predicted=[],
                                 bag_of_words=[])
        content[name]["predicted"].append(result["predicted"])
        if "control" in result:
            content[name]["bag_of_words"].append(result["control"]["predicted"])
    return content


def summarize(results, predictions, labels):
    """Return the row of results.json of one task.

    Args:
        results: list, of its seeds.
        predictions: dict, of the task in collect_predictions.
        labels: list of str, its classes, or None.
    """
    facts = {key: fact for key, fact in results[0]["facts"].items() if key != "truth"}
    metric = facts["metric"]
    control = dict(bag_of_words=None, bag_of_words_std=None, over_bag=None, over_bag_error=None)
    if predictions["bag_of_words"]:
        scores = [result["control"]["best"][metric] for result in results]
        difference, error = compare_predictions(
            metric, predictions["truth"], predictions["predicted"], predictions["bag_of_words"])
        control = dict(bag_of_words=float(np.mean(scores)), bag_of_words_std=deviation(scores),
                       over_bag=difference, over_bag_error=error)
    values = [result["best"][metric] for result in results]
    last = [result["last"][metric] for result in results]
    all_metrics = {}
    for name in results[0]["best"]:
        all_metrics[name] = float(np.mean([result["best"][name] for result in results]))
    f1_per_label = {}
    if labels is not None:
        truth = np.array(predictions["truth"])
        predicted = np.array(predictions["predicted"])  # (S, n)
        for number, label in enumerate(labels):
            scores = [f1(classes, truth, number) for classes in predicted]
            f1_per_label[label] = 100 * float(np.mean(scores))
    one_class = {}
    for result in results:
        if result["constant_prediction"] is not None:
            one_class[str(result["seed"])] = result["constant_prediction"]
    return facts | control | dict(
        seeds=[result["seed"] for result in results],
        values=values,
        mean=float(np.mean(values)),
        std=deviation(values),
        min=min(values),
        max=max(values),
        last=float(np.mean(last)),
        all_metrics=all_metrics,
        f1_per_label=f1_per_label,
        one_class=one_class,
        parameters=results[0]["size"]["total"],
    )


def print_settings(args, config, checkpoint):
    """Print what is about to run."""
    origin = "pre-trained" if "model" in checkpoint else "not pre-trained"
    print(f"model: {origin}, emb {config.emb}, {config.layers} layers, width {config.width}, "
          f"length {config.length}")
    print(f"training: {args.epochs} epochs, batch {args.batch}, lr {args.lr:g}, dropout "
          f"{args.dropout}, pool {args.pool}, bag {args.bag} (single texts), {args.seeds} seeds "
          f"from {args.seed}")
    print(f"device: {args.device}, {args.dtype}, compile {args.compile}")
    print("resume: rerun the same command, which keeps finished seeds", flush=True)


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
