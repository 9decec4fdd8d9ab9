"""Fine-tune a pre-trained model on a task, with several seeds and a control.

    python finetune.py --ckpt out/proj-lsh --task pydoc         offline: the module of a docstring
    python finetune.py --ckpt out/proj-lsh --task sst2          a task of GLUE, from the hub
    python finetune.py --ckpt out/proj-lsh --task squad         the words that answer a question
    python finetune.py --ckpt out/proj-lsh --train a.csv --dev b.csv --text title,body --label topic
    torchrun --nproc_per_node=8 finetune.py --ckpt out/proj-lsh --task glue     eight tasks

A job is one task with one seed. It trains the model, and a bag of words as the control, and scores
both on the dev rows. It writes TASK-seed-N.json to --out: scores, predictions and losses. The same
command skips finished jobs; more seeds need a new --out. At the end --out has the means over the
seeds, results.json, and the model of the best seed, ckpt.pt, for infer.py.

Sources: [HF] Xue & Aletras 2022, HashFormers
Deviations:
    1. A tenth of the training rows, the selection rows, chooses the weights that are scored: those
       of the best evaluation, or of the earliest of equal ones (--select). Dev rows choose nothing.
    2. About two evaluations per epoch (--eval_every). [HF Table 5]: five, and three for small tasks
    3. Gradients are clipped at norm 1, and the cosine restarts after each fifth of the steps that
       follow the warm-up. The paper gives no norm, and does not say how often the cosine restarts.
    4. Models of width below 512 have their own lr and pool (docs/finetuning.md).
"""

import collections
import copy
import dataclasses
import gc
import hashlib
import itertools
import math
import os
import shlex
from pathlib import Path

import numpy as np
import torch
import torch.nn as nn

from data.batches import length_batches, pad_batch
from data.codes import report_unknown
from data.rows import add_reader_flags, reader_options
from data.squad import SQUAD, QuestionAnswering, read_squad
from data.tasks import GLUE, TASKS, SequenceClassification, f1, read_task, standard_error
from hashing import NgramLSH, list_words
from model import PRESETS, Config, Model, count_parameters, load_model
from support.common import InputError, Ranks, add_device_flags, at_least, autocast, blame
from support.common import find_checkpoint, fingerprint, load_checkpoint, lock_output, make_parser
from support.common import read_json, reading, remove, resolve_device, run_script, save_checkpoint
from support.common import send, write_json
from tokenizer import FIRST_WORD_ID, HashTokenizer, make_tokenizer

WARMUP = 0.06  # share of the steps [HF Table 5]
CYCLES = 5  # cosines after the warm-up; each restarts at the peak
BAG_LR = 0.1  # for the bag of words: the best of 0.03, 0.1 and 0.3 on MRPC, CoLA and STS-B
BAG_STEPS = 300  # at least: fewer leave it half trained on a small file. GLUE's tasks have more
EVAL_POSITIONS = 32_768  # positions in a batch of an evaluation
STEP_STRIDE = 1_000_003  # new hyperplanes are drawn with seed · stride + step: two seeds share none
NEAR_WORDS = 50_000  # words of --preset, the most frequent, that infer.py --near searches
# A rerun may change these flags: digests of the texts and of the checkpoint are compared
PLACES = ("out", "ckpt", "train", "dev", "data_dir", "cache", "device")


def finetune(args, ranks):
    """Run one job for each task and seed, then write and print the means over the seeds."""
    # Start: a checkpoint, or the sizes of a model with fresh weights
    check_flags(args)
    checkpoint, config = load_start(args)
    fill_flags(args, checkpoint, config)

    # Device: torchrun starts a process, called rank, for each GPU
    ranks.connect("cpu", days=30)  # they exchange nothing: each has jobs of its own
    runtime = resolve_device(args, ranks.local_rank)

    # Texts: all are read before the first job, so that a bad file shows at once
    names = GLUE if args.task == "glue" else [args.task]
    tasks = {}
    splits = {}  # task -> split -> rows
    starts = {}  # task -> the checkpoint, as drop_other_head returns it
    for name in names:
        read = read_squad if name in SQUAD else read_task
        tasks[name], splits[name] = read(name, args)
        starts[name] = drop_other_head(checkpoint, tasks[name])
        if args.epochs == 0 and not starts[name]["task"]:
            raise InputError("--epochs 0 requires --ckpt of a model that was fine-tuned for this "
                             f"very task, {name}, with its columns and labels.")

    # Jobs: the folder --out holds those of one choice of flags, texts and checkpoint
    settings = dict(vars(args), device=str(runtime.device), dtype=runtime.dtype,
                    train_and_dev_rows=fingerprint(splits), checkpoint=checkpoint["digest"])
    seeds = range(args.seed, args.seed + args.seeds)
    with lock_output(args.out, ranks.rank):
        check_out(args.out, settings)
        if ranks.is_first:
            write_json(Path(args.out, "settings.json"), settings)
            for name, value in settings.items():
                print(f"{name}: {value}")
        jobs = [job for job in itertools.product(names, seeds)
                if not os.path.exists(f"{job_path(args.out, *job)}.json")]
        # rank r takes the jobs r, r + world, ... of those that are left; the longest come first
        jobs.sort(key=lambda job: -len(splits[job[0]]["train"]))
        ranks.wait()  # no job starts before rank 0 holds --out, none ends before all have listed
        data = None  # of the last job: jobs of a task follow each other and share its token IDs
        for name, seed in jobs[ranks.rank::ranks.world]:
            if data is None or data["train"].task.name != name:
                data = encode_splits(config, starts[name], tasks[name], splits[name])
            result = run_job(args, runtime, config, starts[name], data, seed)
            write_json(f"{job_path(args.out, name, seed)}.json", result)
            gc.collect()  # a compiled model refers to itself, and would stay in memory
        ranks.wait()  # rank 0 reads the results when all ranks have written theirs
        if not ranks.is_first:
            return None

        # Results: means over the seeds, and a model for infer.py
        summaries = {}
        for name in names:
            results = [read_json(f"{job_path(args.out, name, seed)}.json") for seed in seeds]
            summaries[name] = summarize(results)
            best_path = keep_best_weights(args, name, results)  # for glue that of the last task
        content = dict(tasks=summaries, settings=settings)
        if len(names) > 1:
            content["average"] = np.mean([row["mean"] for row in summaries.values()])
        write_json(Path(args.out, "results.json"), content)
    print_results(content)
    command = ["python", "infer.py", "--ckpt", best_path]
    command += [f"some {column}" for column in tasks[name].text_columns]
    print(f"Saved {args.out}/results.json. Next: {shlex.join(command)}")
    return content


def run_job(args, runtime, config, start, data, seed):
    """Train, score and save a model, train and score its control; return the results, dict."""
    train_data = data["train"]
    task = train_data.task
    tokenizer = train_data.tokenizer
    title = f"{task.name}, seed {seed}"

    # Model: the weights of the checkpoint; those that it lacks, such as a new head, stay fresh
    torch.manual_seed(seed)  # for fresh weights and dropout
    config = dataclasses.replace(config, head=train_data.head, labels=train_data.num_outputs,
                                 pool=args.pool)
    model = Model(config)
    model.load_state_dict(model.state_dict() | start["model"])
    model.to(runtime.device)
    model.set_codes(tokenizer.codes())  # after .to, which does not move codes
    if runtime.use_compile:
        model.encode = torch.compile(model.encode, dynamic=True)  # batches differ in length
    result = train_and_score(args, runtime, model, data, seed, args.lr, title)
    result |= dict(seed=seed, size=count_parameters(model))
    path = f"{job_path(args.out, task.name, seed)}.pt"
    words = start.get("words", tokenizer.words[:NEAR_WORDS])
    save_checkpoint(path, model, tokenizer.state(), run=result["best"], words=words,
                    task=task.identity() | dict(scale=task.scale))

    # Control. SQuAD has none: a bag of words does not know where in the text a word stands
    if args.epochs > 0 and train_data.head == "classify":
        bag = BagOfWords(len(model.codes), train_data.num_outputs).to(runtime.device)
        bag_args = copy.copy(args)
        bag_args.epochs = max(args.epochs, math.ceil(BAG_STEPS * args.batch / len(train_data)))
        if bag_args.epochs > args.epochs:  # else the lines of its evaluations would be many
            bag_args.eval_every = BAG_STEPS // 10
        result["control"] = train_and_score(
            bag_args, runtime, bag, data, seed, BAG_LR, f"{title}, bag of words")
        result["truth"] = data["dev"].targets.tolist()
    return result


class BagOfWords(nn.EmbeddingBag):
    """The control: a word has a score per output, a text their mean. It knows no order of words."""

    def __init__(self, num_ids, num_outputs):
        super().__init__(num_ids, num_outputs, mode="mean", padding_idx=0)
        nn.init.zeros_(self.weight)

    def forward(self, ids, key_mask=None):  # ids (B, L), 0 is padding -> (B, num_outputs)
        return super().forward(ids)


def train_and_score(args, runtime, model, data, seed, lr, title):
    """Train a model as train does; return its scores on data["dev"], a part of the job's file."""
    best_weights, log = train(args, runtime, model, data, seed, lr, title)
    dev = data["dev"]
    last, predicted = evaluate(runtime, model, dev)  # of the last weights
    chosen = last  # dev scores of the weights that the selection rows choose, not the best scores
    selection = 0.0
    metric = dev.task.metrics[0]
    if best_weights is not None:
        model.load_state_dict(best_weights)
        chosen, predicted = evaluate(runtime, model, dev)
        selection = max(row[metric] for row in log)

    f1_per_label = {}
    rows_per_label = {}  # of dev
    for number, label in enumerate(dev.task.labels or []):  # None: numbers, or answers
        f1_per_label[label] = 100 * f1(predicted, dev.targets, number)
        rows_per_label[label] = int(np.sum(dev.targets == number))
    return dict(
        metric=metric,
        rows={split: len(part) for split, part in data.items()},
        majority=dev.majority(data["train"]),
        best=chosen,
        last=last,
        predicted=np.asarray(predicted).tolist(),
        f1_per_label=f1_per_label,
        rows_per_label=rows_per_label,
        selection=selection,
        log=log)


def train(args, runtime, model, data, seed, lr, title):
    """Train a model on data["train"], and evaluate it on data["select"] about twice per epoch.

    Args:
        args: Namespace with the flags epochs, batch, balanced and eval_every.
        model: nn.Module, maps token IDs (B, L) and an attention mask to logits.
        data: dict, split -> SequenceClassification or QuestionAnswering; may have no select.
        seed: int, decides the order of the examples.
        lr: float, the peak learning rate.
        title: str, what each line of progress begins with.

    Returns:
        weights: dict, those of the best evaluation, the earliest of equal ones, or None without
            data["select"].
        log: list of dict, the scores of each evaluation.
    """
    train_data = data["train"]
    if args.balanced:
        train_data.balance()
    metric = train_data.task.metrics[0]
    examples = train_data.examples
    batches = []  # of all epochs; each holds indices of examples of similar length
    for epoch in range(args.epochs):
        batches += length_batches(examples, args.batch, np.random.default_rng([seed, epoch]))
    num_steps = len(batches)
    warmup = math.ceil(WARMUP * num_steps)
    eval_every = args.eval_every
    if eval_every is None:  # twice per epoch
        eval_every = max(1, math.ceil(len(examples) / args.batch) // 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr, eps=1e-6, weight_decay=0.0, fused=True)

    log = []
    losses = []  # since the last evaluation
    best_score = -math.inf
    best_weights = None
    for step, indices in enumerate(batches):
        optimizer.param_groups[0]["lr"] = lr * lr_factor(step, num_steps, warmup)
        model.train()
        if isinstance(model, Model) and model.config.lsh_redraw:
            model.redraw_hyperplanes(seed * STEP_STRIDE + step)

        # Forward, backward, clip, update
        logits = compute_logits(runtime, model, train_data, indices)
        loss = train_data.loss(logits, indices)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.detach())  # stays on the device: to read it would wait for a GPU

        # Evaluate on the selection rows, and keep the best weights
        num_done = step + 1
        if num_done % eval_every == 0 or num_done == num_steps:
            scores = dict(loss=torch.stack(losses).mean().item())
            losses = []
            if "select" in data:
                select_scores, _ = evaluate(runtime, model, data["select"])
                scores |= select_scores
                if scores[metric] > best_score:
                    best_score = scores[metric]
                    best_weights = copy.deepcopy(model.state_dict())
            log.append(dict(step=num_done) | scores)
            text = ", ".join(f"{name} {value:.2f}" for name, value in scores.items())
            print(f"{title}, step {num_done:,} of {num_steps:,}: {text}", flush=True)
    return best_weights, log


def lr_factor(step, num_steps, warmup):
    """Return what the peak lr is multiplied by: a rise to 1, then five cosines. [HF Table 5]"""
    if step < warmup:
        return (step + 1) / warmup
    progress = (step - warmup) / (num_steps - warmup)  # from 0 to below 1
    place = (CYCLES * progress) % 1  # in a cosine, from its peak at 0
    return 0.5 * (1 + math.cos(math.pi * place))


@torch.no_grad()
def evaluate(runtime, model, part):
    """Return the scores of a model on one split of data, dict, and its predictions."""
    model.eval()
    batches = []
    for indices in length_batches(part.examples, max(1, EVAL_POSITIONS // part.length)):
        batches.append((indices, compute_logits(runtime, model, part, indices)))
    # after the loop, since each check waits for a GPU
    if not all(logits.isfinite().all() for _, logits in batches):
        raise InputError("--lr, --ckpt: expected finite outputs of the model, got NaN or infinity. "
                         "Try a lower --lr or another checkpoint.")
    return part.evaluate(batches)


def compute_logits(runtime, model, part, indices):
    """Return the float32 logits of the examples with these indices in one split of data."""
    ids, key_mask = pad_batch([part.examples[i] for i in indices])  # (B, L), (B, L)
    ids = send(ids, runtime.device)
    key_mask = send(key_mask, runtime.device)  # None where nothing is padded
    with autocast(runtime.device, runtime.dtype):
        logits = model(ids, key_mask)
    return logits.float()


# What finetune calls: the start of the jobs, and their folder


def load_start(args):
    """Return the checkpoint to start from, dict, and the Config of its encoder.

    The dict has
        model, task          weights, and the task of its head; {} with --preset or --from_scratch
        tokenizer, words     not with --preset
        digest               of the file; None with --preset
    """
    if args.preset:
        return dict(model={}, task={}, digest=None), Config.choose(PRESETS[args.preset])
    with reading(args.ckpt):
        checkpoint = load_checkpoint(args.ckpt)
        config = load_model(checkpoint).config  # raises where the weights do not fit it
        content = Path(find_checkpoint(args.ckpt)).read_bytes()
    checkpoint["digest"] = hashlib.sha256(content).hexdigest()
    checkpoint.setdefault("task", {})  # {} unless it was fine-tuned
    if not config.order:
        raise InputError(f"--ckpt {args.ckpt}: expected a model of texts, got one of item sets.")
    if args.from_scratch:
        checkpoint |= dict(model={}, task={})
    return checkpoint, config


def drop_other_head(checkpoint, task):
    """Return the checkpoint as it is if it was trained for this very task, else without a head."""
    if task.identity().items() <= checkpoint["task"].items():  # same name, columns and labels
        return checkpoint
    weights = {name: weight for name, weight in checkpoint["model"].items()
               if not name.startswith("head.")}
    return checkpoint | dict(model=weights, task={})  # a new dict: other tasks share the old one


def encode_splits(config, start, task, splits):
    """Return the data of a job, dict, split -> its rows as token IDs; print how many there are."""
    if start["task"]:  # its head predicts numbers in these units
        task = dataclasses.replace(task, scale=start["task"].get("scale"))
    data = {}
    with blame("--ckpt, --preset"):
        if "tokenizer" in start:
            with reading("--ckpt"):
                tokenizer = HashTokenizer.load(start["tokenizer"], config)
        else:  # --preset: the hash knows the words of the training rows
            word_counts = collections.Counter()
            for texts, _ in splits["train"]:
                for text in texts:
                    word_counts.update(list_words(text))
            tokenizer = make_tokenizer(config, hash=NgramLSH.fit(word_counts))
            tokenizer.add_words([word for word, _ in word_counts.most_common()])
        kind = QuestionAnswering if task.name in SQUAD else SequenceClassification
        for split, rows in splits.items():
            data[split] = kind(task, rows, tokenizer, config.length)
    ids = np.concatenate(data["train"].examples)
    counts = np.bincount(ids, minlength=FIRST_WORD_ID + len(tokenizer.words))
    report_unknown(tokenizer, tokenizer.words, counts)
    sizes = ", ".join(f"{split} {len(part):,}" for split, part in data.items())
    print(f"{task.name}: rows {sizes}; of train {data['train'].notes}", flush=True)
    return data


def check_out(out, settings):
    """Raise InputError if --out has jobs with other settings, or files of another script."""
    names = {path.name for path in Path(out).glob("*") if path.suffix in (".json", ".pt")}
    if names <= {"settings.json"}:  # no job has finished: other settings may take the folder
        return
    if "settings.json" not in names:
        raise InputError(f"--out {out}: belongs to another script. Use another --out.")
    saved = read_json(Path(out, "settings.json"))
    changes = []
    for name, value in settings.items():
        if name not in PLACES and saved.get(name) != value:
            changes.append(f"{name} was {saved.get(name)} and is {value}")
    if changes:
        raise InputError(f"--out {out}: belongs to a run with other settings: "
                         f"{'; '.join(changes)}. Use another --out.")


def job_path(out, name, seed):
    """Return the path of a job's files without an ending: .json its results, .pt its model."""
    return f"{out}/{name}-seed-{seed}"


def keep_best_weights(args, name, results):
    """Rename the model file of a task's best seed, remove those of the others; return its path."""
    best_path = f"{args.out}/ckpt.pt"
    if args.task == "glue":
        best_path = f"{args.out}/{name}.pt"
    # the selection rows choose the seed. Without them all seeds are equal, and the first is best
    best = max(results, key=lambda result: result["selection"])
    for result in results:
        path = f"{job_path(args.out, name, result['seed'])}.pt"
        if result is best and os.path.exists(path):  # else a finished run has renamed it already
            os.replace(path, best_path)
        remove(path)
    return best_path


# Results


def summarize(results):
    """Return the results of a task, dict: means over results, a list of what run_job returns."""
    first = results[0]
    metric = first["metric"]
    values = [result["best"][metric] for result in results]
    mean = np.mean(values)
    row = dict(
        metric=metric,
        rows=first["rows"],
        size=first["size"],
        values=values,
        mean=mean,
        std=deviation(values),
        last=average(results, "last")[metric],
        all_metrics=average(results, "best"),
        f1_per_label=average(results, "f1_per_label"),
        rows_per_label=first["rows_per_label"],
        majority=first["majority"],
        bag_of_words=None)
    if "control" in first:
        controls = [result["control"] for result in results]
        bag_values = [control["best"][metric] for control in controls]
        bag_mean = np.mean(bag_values)
        predicted = [result["predicted"] for result in results]  # (seeds, n)
        bag_predicted = [control["predicted"] for control in controls]
        row |= dict(
            bag_of_words=bag_mean,
            bag_of_words_std=deviation(bag_values),
            over_bag=mean - bag_mean,
            over_bag_error=standard_error(metric, predicted, bag_predicted, first["truth"]))
    return row


def average(results, key):
    """Return the mean of each score over the seeds; each result has a dict of scores as `key`."""
    scores = [result[key] for result in results]
    return {name: np.mean([row[name] for row in scores]) for name in scores[0]}


def deviation(values):
    """Return the standard deviation over the seeds, or None if there is one seed."""
    if len(values) == 1:
        return None
    return np.std(values, ddof=1)


def print_results(content):
    """Print the scores of each task beside its controls."""
    for name, row in content["tasks"].items():
        print(f"\n{name}: parameters {row['size']['total']:,}, PoEP {row['size']['poep']:.2%}")
        rival = "majority class" if row["f1_per_label"] else "without a model"
        print(f"{name}: {row['metric']} {format_mean(row['mean'], row['std'])}, last weights "
              f"{row['last']:.2f}, {rival} {row['majority']:.2f}")
        if row["bag_of_words"] is not None:
            bag = format_mean(row["bag_of_words"], row["bag_of_words_std"])
            note = ""
            if row["over_bag"] <= 2 * row["over_bag_error"]:  # also where both are 0
                note = ": not shown to be better than a bag of words"
            print(f"{name}: bag of words {bag}, difference {row['over_bag']:+.2f} ± "
                  f"{row['over_bag_error']:.2f}, its standard error over rows and seeds{note}")
        if row["f1_per_label"]:  # the task has classes
            scores = [f"{label} {score:.1f} ({row['rows_per_label'][label]:,} rows)"
                      for label, score in row["f1_per_label"].items()]
            print(f"{name}: F1 of each class: {', '.join(scores)}")
        missed = [label for label, score in row["f1_per_label"].items() if score == 0]
        if missed:
            print(f"warning: {name}: never predicted rightly: {', '.join(missed)}. Use more rows "
                  "or --epochs, or --balanced, with another --out.")
    if "average" in content:
        print(f"average over the tasks: {content['average']:.2f}")


def format_mean(mean, std):
    """Return a mean as text, with ± its deviation over the seeds if there are several."""
    if std is None:
        return f"{mean:.2f}"
    return f"{mean:.2f} ± {std:.2f}"


# Flags


def build_parser():
    """Return the parser of all flags."""
    usage = "python finetune.py (--ckpt DIR | --preset NAME) (--task NAME | --train CSV) [flags]"
    p = make_parser("finetune.py", __doc__, usage=usage)
    start = p.add_mutually_exclusive_group(required=True)
    start.add_argument("--ckpt", help="folder of a run of pretrain.py, or its ckpt.pt")
    start.add_argument("--preset", choices=("proformer", "proformer-tiny"),
                       help="a model with fresh weights, instead of --ckpt")
    p.add_argument("--from_scratch", action="store_true", help="fresh weights, hash of --ckpt")
    add_run_flags(p.add_argument, ("own", *TASKS, "glue", *SQUAD))
    p.set_defaults(device="auto", dtype="auto",
                   compile=False)  # on an H200, two epochs of MRPC: 89 s with it, 34 s without
    return p


def add_run_flags(add, tasks):
    """Add the flags of a task and its training by `add`, the add_argument of a parser."""
    positive = at_least(1)
    # the task
    add("--task", choices=tasks, default="own",
        help="own: your files; pydoc: a docstring's module; glue: eight (default: own)")
    add("--data_dir", help="folder of original files, as SST-2/train.tsv (default: the hub)")
    add("--train", help="table of training rows: a file, or a hub ID owner/name:CONFIG:SPLIT")
    add("--dev", help="table of rows to score (default: a tenth of --train, not trained on)")
    add_reader_flags(add)
    add("--text", default="text",
        help="column of the text in your files, or A,B for two texts (default: text)")
    add("--label", default="label", help="column of the label in your files (default: label)")
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
    if args.task == "own" and not args.train:
        raise InputError("--task: expected a task, or your own files as --train and --dev.")
    if (args.train or args.dev) and args.task in ("glue", "pydoc"):
        raise InputError(f"--train, --dev: expected one task of files, got --task {args.task}.")
    if args.balanced and (args.regression or args.task in ("stsb", "glue", *SQUAD)):
        raise InputError("--balanced requires a task of classes.")
    if args.task in SQUAD and args.train and not args.dev:
        raise InputError(f"--train with --task {args.task} requires --dev.")
    if args.data_dir and (args.train or args.task == "pydoc"):
        raise InputError("--data_dir requires a task of GLUE or SQuAD, and no --train.")
    if reader_options(args) and not (args.data_dir or args.train or args.dev):
        raise InputError("--encoding, --sep and --header require --train, --dev or --data_dir.")
    columns = (args.text, args.label, args.regression)
    if args.task != "own" and columns != ("text", "label", False):
        raise InputError("--text, --label, --regression: expected files of your own.")


def fill_flags(args, checkpoint, config):
    """Set the flags that were left out and follow from the model or from other flags."""
    is_small = config.width < 512
    if args.lr is None:
        args.lr = 1e-3 if is_small else 3e-5  # [HF Table 5]
    if args.pool is None:
        args.pool = "mean" if is_small else "cls"  # Shuffle+Random never trains [CLS]
        if checkpoint["task"]:
            args.pool = config.pool
    if args.epochs == 0:  # nothing is random, and nothing is chosen
        if checkpoint["task"] and args.pool != config.pool:
            raise InputError(f"--pool: expected {config.pool}, that of --ckpt, with --epochs 0.")
        args.seeds = 1
        args.select = 0.0
    if args.out is None:
        start = args.preset
        if args.ckpt:
            path = Path(args.ckpt).absolute()
            if path.name in ("ckpt.pt", "best.pt"):  # every run has them
                path = path.parent
            start = path.name.removesuffix(".pt")
        if args.from_scratch:
            start += "-scratch"
        args.out = f"out/{start}-{args.task}"


def start(args):
    """Fine-tune, on each rank that torchrun starts."""
    with Ranks() as ranks:
        return finetune(args, ranks)


def main(argv=None):
    """Fine-tune as the command line, or the list argv, says; return the content of results.json."""
    return run_script("finetune.py", start, build_parser().parse_args(argv))


if __name__ == "__main__":
    main()
