"""Fine-tune a pre-trained model on a task: several seeds, with controls beside the score.

    python finetune.py --ckpt out/proj-lsh --task pydoc         offline: the module of a docstring
    python finetune.py --ckpt out/proj-lsh --task sst2          a task of GLUE, from the hub
    python finetune.py --ckpt out/proj-lsh --task glue --data_dir glue/     eight, from their files
    python finetune.py --ckpt out/proj-lsh --task squad         the words that answer a question
    python finetune.py --ckpt out/proj-lsh --train a.csv --dev b.csv --text title,body --label topic
    python finetune.py --preset proformer --task sst2           without pre-training
    torchrun --nproc_per_node=8 finetune.py --ckpt out/proj-lsh --task glue

A job is a task and a seed. It trains the model, and a bag of words on the same rows, and leaves
TASK-seed-N.json in --out: scores, predictions, losses. The same command skips finished jobs. In the
end --out has results.json, the means, and ckpt.pt, the best seed's model for infer.py.

Sources: [HF] Xue & Aletras 2022, HashFormers
Deviations:
    1. A tenth of the training rows chooses the evaluation whose weights are scored (--select), of
       equal ones the earliest. The scored rows choose nothing.
    2. Two evaluations per epoch, about (--eval_every). [HF Table 5]: five, of small tasks in 3.
    3. Gradients are clipped at norm 1, and the cosine restarts after each fifth of the steps after
       warm-up. The paper names no norm, and does not say how often.
    4. Models of width below 512 have an lr and a pool of their own (docs/finetuning.md).
    5. Batch 32 for every model. The median proposal fine-tunes with 64 (--batch 64).
"""

import argparse
import collections
import copy
import dataclasses
import datetime
import gc
import itertools
import math
import os
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
from tqdm import tqdm

from common import InputError, add_device_flags, at_least, autocast, blame_file, blame_input
from common import fingerprint, load_checkpoint, lock_output, read_json, read_ranks, remove
from common import resolve_device, run_script, save_checkpoint, send, share_by_size
from common import wait_for_ranks, write_json
from data.batches import length_batches, pad_batch
from data.codes import report_unknown
from data.rows import add_reader_flags
from data.squad import SQUAD, QuestionAnswering, read_squad
from data.tasks import GLUE, MAX_NAMED, TASKS, SequenceClassification, f1, read_task
from data.tasks import standard_error
from hashing import NgramLSH, list_words
from model import PRESETS, Config, Model, count_parameters, load_model
from tokenizer import FIRST_WORD_ID, HashTokenizer

WARMUP = 0.06  # share of the steps [HF Table 5]
CYCLES = 5  # of the cosine
BAG_LR = 0.1  # of the bag of words: of 0.03, 0.1 and 0.3 the best on MRPC, CoLA and STS-B
EVAL_POSITIONS = 32_768  # that an evaluation reads at once
FEW_ROWS = 30  # of --select; on fewer, early weights may score as high as the best
OWN_COLUMNS = ("text", "label", False)  # defaults of --text, --label, --regression
# The seed of a step, for new hyperplanes, is seed · stride + step: two seeds share none
SEED_STRIDE = 1_000_003


def build_parser():
    """Return the parser of all flags."""
    p = argparse.ArgumentParser(
        allow_abbrev=False, prog="finetune.py", description=__doc__,
        usage="python finetune.py (--ckpt DIR | --preset NAME) --task NAME [flags]  (see --help)",
        formatter_class=argparse.RawDescriptionHelpFormatter)
    start = p.add_mutually_exclusive_group(required=True)
    start.add_argument("--ckpt", type=os.path.normpath,
                       help="folder of a run of pretrain.py, or its ckpt.pt")
    start.add_argument("--preset", choices=("proformer", "proformer-tiny"),
                       help="a model with fresh weights, instead of --ckpt [HF §4.1]")
    p.add_argument("--from_scratch", action="store_true",
                   help="use the checkpoint's shape and hash, not its weights")
    add_run_flags(p.add_argument)
    p.set_defaults(compile=False)  # on an H200, two epochs of MRPC: 89 s with it, 34 s without
    return p


def add_run_flags(add):
    """Add the flags of a task and its training by `add`, the add_argument of a parser."""
    # the task
    add("--task", choices=("own", *TASKS, "glue", *SQUAD, "pydoc"), default="own",
        help="own: your files; glue: the paper's eight; pydoc: a docstring's module (default: own)")
    add("--data_dir", type=os.path.normpath,
        help="folder of original files, as SST-2/train.tsv (default: the hub)")
    add("--train", type=os.path.normpath,
        help="file of training rows, .tsv .csv .jsonl .json .parquet; with --task in its columns")
    add("--dev", type=file_or_share,
        help="file of rows to score; 0.1: a tenth of --train, which then does not train")
    add_reader_flags(add)
    add("--text", default="text",
        help="column of the text of your files, or A,B of both texts (default: text)")
    add("--label", default="label", help="column of the label of your files (default: label)")
    add("--regression", action="store_true", help="the labels of your files are numbers")
    add("--limit", type=at_least(1),
        help="training rows, drawn at random, the same for all seeds (default: all)")
    # the training
    add("--epochs", type=at_least(0), default=5, help="0 only scores (default: 5)")
    add("--batch", type=at_least(1), default=32, help="examples per step (default: 32)")
    add("--lr", type=at_least(0, float),
        help="peak learning rate (default: 3e-5, of a width below 512 1e-3)")
    add("--pool", choices=("cls", "mean"),
        help="what the head sees: the first position, or the mean of all (default: cls, of a width "
        "below 512 mean; of a checkpoint that was fine-tuned, its own)")
    add("--select", type=at_least(0, float, 0.5), default=0.1,
        help="share of the training rows that chooses the evaluation whose weights are scored; 0: "
        "the last one's (default: 0.1)")
    add("--dropout", type=at_least(0, float, 0.99),
        help="dropout probability (default: the checkpoint's)")
    add("--seeds", type=at_least(1), default=3, help="runs of a task (default: 3)")
    add("--seed", type=at_least(0), default=0,
        help="seed of the first run; the next has S+1 (default: 0)")
    add("--eval_every", type=at_least(1),
        help="steps between evaluations (default: half an epoch, rounded)")
    # device and files
    add_device_flags(add)
    add("--cache", default="cache", help="folder of prepared texts (default: cache)")
    add("--out", help="folder of the results (default: out/CKPT-TASK)")


def file_or_share(text):
    """Return a number between 0 and 1 as float, the name of a file as it is: the argparse type."""
    try:
        share = float(text)
    except ValueError:
        return os.path.normpath(text)
    if not 0 < share < 1:
        raise argparse.ArgumentTypeError(f"expected a file or a share between 0 and 1, got {text}")
    return share


def main(argv=None):
    """Fine-tune as the command line, or the list argv, says; return the content of results.json."""
    return run_script("finetune.py", finetune, build_parser().parse_args(argv))


def finetune(args):
    """Run a job for each task and seed, then write and print their means."""
    # Start: a checkpoint, or the shape of a model with fresh weights
    check_flags(args)
    checkpoint, config = load_start(args)
    fill_flags(args, checkpoint, config)
    config = dataclasses.replace(config, pool=args.pool, dropout=args.dropout)

    # Device: torchrun starts a process for each GPU. They share the jobs, and wait at the end
    rank, world, local_rank = read_ranks()
    if world > 1:
        dist.init_process_group("gloo", timeout=datetime.timedelta(days=30))
    runtime = resolve_device(args, local_rank)

    # Texts: all are read now, so that what is wrong with them shows before the training
    names = [args.task]
    if args.task == "glue":
        names = GLUE
    tasks = {}
    splits = {}  # task -> split -> rows
    for name in names:
        read = read_squad if name in SQUAD else read_task
        tasks[name], splits[name] = read(name, args)
        keep_or_drop_head(args, checkpoint, name, tasks[name])
        num_rows = len(splits[name].get("select", []))
        if args.select > 0 and num_rows < FEW_ROWS and rank == 0:
            print(f"warning: {name}: --select has {num_rows} rows, on which early weights may "
                  "score as high as the best. Use --select 0, or more rows.", file=sys.stderr)

    # Jobs: a folder holds those of one choice of flags, texts and checkpoint
    settings = dict(vars(args), out=None, dtype=runtime.dtype, texts=fingerprint(splits))
    if args.ckpt:  # not by the time of its file, which a copy would change
        settings["checkpoint"] = fingerprint([checkpoint["run"], checkpoint.get("step")])
    seeds = range(args.seed, args.seed + args.seeds)
    with lock_output(args.out, rank):
        check_out(args.out, settings)
        if rank == 0:
            print_start(args, runtime, config, checkpoint)
        jobs = itertools.product(names, seeds)  # without those that have left their file
        jobs = [job for job in jobs if not os.path.exists(job_path(args.out, *job, "json"))]
        wait_for_ranks()  # until all have listed the same jobs
        sizes = [len(splits[name]["train"]) for name, _ in jobs]
        last_name = None
        for name, seed in share_by_size(jobs, sizes, world)[rank]:
            if name != last_name:  # the jobs of a task follow each other, and share its token IDs
                data = encode_splits(config, checkpoint, name, tasks[name], splits[name])
                last_name = name
            result = run_job(args, runtime, config, checkpoint, name, data, seed)
            # now --out is of these settings. Last of all the file that says that the job is done
            write_json(os.path.join(args.out, "settings.json"), settings)
            write_json(job_path(args.out, name, seed, "json"), result)
            gc.collect()  # a compiled model refers to itself
        wait_for_ranks()
        if rank > 0:
            return None

        # Results: means over the seeds, and the weights for infer.py
        rows = {}
        for name in names:
            results = [read_json(job_path(args.out, name, seed, "json")) for seed in seeds]
            rows[name] = summarize(results)
            best_path = keep_best_weights(args, name, results)
        content = dict(tasks=rows, settings=settings)
        if len(names) > 1:  # average over tasks, then over seeds
            values = np.mean([row["values"] for row in rows.values()], axis=0)
            content |= dict(average=np.mean(values), average_std=deviation(values))
        write_json(os.path.join(args.out, "results.json"), content)
    print_results(content)
    print(f"Saved {args.out}/results.json. Next: python infer.py --ckpt {best_path}")
    return content


# -------------------------------------------------------------------------------------------------
# A job


def run_job(args, runtime, config, checkpoint, name, data, seed):
    """Train and score a model and its control; save the model, and return the results, a dict."""
    train_data = data["train"]
    codes = torch.from_numpy(train_data.tokenizer.codes())
    title = f"{name}, seed {seed}"

    # the control, first: the time left of the model is then that of the job. An answer of SQuAD has
    # a place in the text, of which a bag of words knows nothing
    control = None
    if args.epochs > 0 and train_data.head == "classify":
        bag = BagOfWords(len(codes), train_data.num_outputs).to(runtime.device)
        control = train_and_score(args, runtime, bag, data, seed, BAG_LR, f"{title}, bag of words")

    torch.manual_seed(seed)  # of the new weights and of dropout
    config = dataclasses.replace(config, head=train_data.head, labels=train_data.num_outputs)
    model = Model(config)
    model.load_state_dict(model.state_dict() | checkpoint["model"])  # which may have no head
    model.to(runtime.device)
    model.set_codes(codes)  # on the device of the weights
    if runtime.use_compile:
        torch._dynamo.config.recompile_limit = 64  # batches differ in length, and in having a mask
        model.encode = torch.compile(model.encode)
    result = train_and_score(args, runtime, model, data, seed, args.lr, title)
    result["size"] = count_parameters(model)
    if control is not None:
        result |= dict(control=control, truth=data["dev"].targets.tolist())

    task = train_data.description() | dict(name=name)
    save_checkpoint(job_path(args.out, name, seed, "pt"), model, train_data.tokenizer.state(),
                    run=result["best"], task=task, words=checkpoint.get("words", []))
    return result


class BagOfWords(nn.EmbeddingBag):
    """The control, a model that knows no order of words: the mean of a row of scores per word."""

    def __init__(self, num_ids, num_outputs):
        super().__init__(num_ids, num_outputs, mode="mean", padding_idx=0)
        nn.init.zeros_(self.weight)

    def forward(self, ids, key_mask=None):
        """Return logits (B, num_outputs) of ids int64 (B, L), 0 as padding."""
        return super().forward(ids)


def train_and_score(args, runtime, model, data, seed, lr, title):
    """Train a model and score it. Leave the weights in it that the slice chose.

    The model maps token IDs (B, L) and a mask to logits. data has SequenceClassification or
    QuestionAnswering of the splits train, dev, and select, which chooses the weights and may be
    missing. lr is the peak, title that of the lines of progress. Returned is the file of a job.
    """
    train_data = data["train"]
    metric = train_data.task.metrics[0]
    lengths = [len(ids) for ids in train_data.examples]
    batches = []  # of all epochs, indices of examples of similar length
    for epoch in range(args.epochs):
        batches += length_batches(lengths, args.batch, np.random.default_rng([seed, epoch]))
    num_steps = len(batches)
    warmup = math.ceil(WARMUP * num_steps)
    eval_every = args.eval_every
    if eval_every is None:  # twice per epoch
        eval_every = max(1, math.ceil(len(lengths) / args.batch) // 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr, eps=1e-6, weight_decay=0.0, fused=True)

    log = []
    losses = []  # since the last evaluation
    best_score = 0.0  # on the slice
    best_weights = None
    start = time.perf_counter()
    for step in tqdm(range(num_steps), title, leave=False, disable=None):  # None: in a terminal
        for group in optimizer.param_groups:
            group["lr"] = lr * learning_rate(step, num_steps, warmup)
        model.train()
        if isinstance(model, Model) and model.config.lsh_redraw:
            model.redraw_hyperplanes(seed * SEED_STRIDE + step)

        # forward, backward, clip, update
        targets = send(torch.from_numpy(train_data.targets[batches[step]]), runtime.device)
        logits = compute_logits(runtime, model, train_data, batches[step])
        loss = train_data.loss(logits, targets)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.detach())  # on the device: to read it would wait for a GPU

        # evaluate on the slice, and keep the best weights
        num_done = step + 1
        if num_done % eval_every == 0 or num_done == num_steps:
            scores = dict(loss=torch.stack(losses).mean().item())
            losses = []
            if "select" in data:
                more, _ = evaluate(runtime, model, data["select"])
                scores |= more
                if best_weights is None or scores[metric] > best_score:
                    best_score = scores[metric]
                    best_weights = copy.deepcopy(model.state_dict())
            log.append(dict(step=num_done) | scores)
            text = ", ".join(f"{name} {value:.2f}" for name, value in scores.items())
            seconds_left = (time.perf_counter() - start) / num_done * (num_steps - num_done)
            tqdm.write(f"{title}, step {num_done:,} of {num_steps:,}: {text}, "
                       f"{tqdm.format_interval(seconds_left)} left")
            sys.stdout.flush()  # in a file or a pipe it would wait for more lines

    # the rows to score: first with the last weights, then with the chosen ones
    last, predicted = evaluate(runtime, model, data["dev"])
    best = last
    if best_weights is not None:
        model.load_state_dict(best_weights)
        best, predicted = evaluate(runtime, model, data["dev"])
    f1_per_label = {}
    for number, label in enumerate(train_data.task.labels or []):
        f1_per_label[label] = 100 * f1(predicted, data["dev"].targets, number)
    return dict(seed=seed, metric=metric, rows={split: len(part) for split, part in data.items()},
                majority=data["dev"].majority(train_data), best=best, last=last,
                predicted=np.asarray(predicted).tolist(), f1_per_label=f1_per_label,
                selection=best_score, log=log)


def learning_rate(step, num_steps, warmup):
    """Return the factor of the peak: linear up, then five times a cosine down. [HF Table 5]"""
    if step < warmup:
        return (step + 1) / warmup
    progress = (step - warmup) / (num_steps - warmup)  # from 0 to below 1
    return 0.5 * (1 + math.cos(math.pi * ((CYCLES * progress) % 1)))


def compute_logits(runtime, model, part, chosen):
    """Return float32 logits of some examples of a split; chosen are their indices."""
    ids, key_mask = pad_batch([part.examples[i] for i in chosen])  # (B, L), (B, L)
    ids = send(ids, runtime.device)
    if key_mask is not None:  # None: nothing is padded
        key_mask = send(key_mask, runtime.device)
    with autocast(runtime.device, runtime.dtype):
        logits = model(ids, key_mask)
    return logits.float()


@torch.no_grad()
def evaluate(runtime, model, part):
    """Return the scores of a split, a value of data, as a dict; and what was predicted."""
    model.eval()
    lengths = [len(ids) for ids in part.examples]
    batches = []
    for chosen in length_batches(lengths, max(1, EVAL_POSITIONS // part.length)):
        logits = compute_logits(runtime, model, part, chosen)
        if not logits.isfinite().all():
            raise InputError("--lr, --ckpt: expected finite outputs of the model, got NaN or "
                             "infinity. Try a lower --lr or another checkpoint.")
        batches.append((chosen, logits))
    return part.evaluate(batches)


# -------------------------------------------------------------------------------------------------
# Start and texts


def check_flags(args):
    """Raise InputError where a flag is missing, or would be ignored and the result be wrong."""
    if bool(args.train) != bool(args.dev) or (args.task == "own" and not args.train):
        raise InputError("--train, --dev: expected both, or neither and a --task, got "
                         f"{args.train} and {args.dev}. --dev 0.1 is a tenth of --train.")
    if args.train and args.task in ("glue", "pydoc"):
        raise InputError(f"--train: expected one task of files, got --task {args.task}.")
    if args.task != "own" and (args.text, args.label, args.regression) != OWN_COLUMNS:
        raise InputError("--text, --label, --regression: expected files of your own, got --task "
                         f"{args.task}.")
    if isinstance(args.dev, float) and args.task in SQUAD:
        raise InputError(f"--dev: expected a file for --task {args.task}, got a share.")


def load_start(args):
    """Return the checkpoint that the models start from, dict, and the Config of its encoder.

    Its weights are none, {}, where they are to be fresh.
    """
    if args.preset:
        return dict(model={}), Config.choose(PRESETS[args.preset])
    with blame_file(args.ckpt):
        checkpoint = load_checkpoint(args.ckpt)
        config = load_model(checkpoint).config  # raises where the weights do not fit it
    if not config.order:  # so of item sets
        raise InputError(f"--ckpt {args.ckpt}: expected a model of texts, got one of item sets.")
    if args.from_scratch:
        checkpoint["model"] = {}
        checkpoint.pop("task", None)
    return checkpoint, config


def fill_flags(args, checkpoint, config):
    """Fill in the flags that were left out and follow from the model, or from others."""
    is_small = config.width < 512
    if args.lr is None:
        args.lr = 1e-3 if is_small else 3e-5  # [HF Table 5]
    if args.pool is None:
        args.pool = "mean" if is_small else "cls"  # Shuffle+Random never trains [CLS]
        if "task" in checkpoint:
            args.pool = config.pool
    if args.dropout is None:
        args.dropout = config.dropout
    if args.epochs == 0:  # nothing is random, and nothing is chosen
        args.seeds = 1
        args.select = 0.0
    if args.out is None:
        start = args.preset
        if args.ckpt:
            start = Path(args.ckpt).absolute().name.removesuffix(".pt")
        if args.from_scratch:
            start += "-scratch"
        args.out = os.path.join("out", f"{start}-{args.task}")


def keep_or_drop_head(args, checkpoint, name, task):
    """Remove the head of a checkpoint that was not trained for this very task and its columns."""
    known = checkpoint.get("task", {})
    expected = task.description() | dict(name=name)
    if all(known.get(key) == value for key, value in expected.items()):
        return
    if args.epochs == 0:
        raise InputError("--epochs 0 requires --ckpt of a model that was fine-tuned for this very "
                         f"task, {name}, with its columns and labels.")
    checkpoint.pop("task", None)
    weights = checkpoint["model"].items()
    checkpoint["model"] = {key: weight for key, weight in weights if not key.startswith("head.")}


def encode_splits(config, checkpoint, name, task, splits):
    """Return the data of train_and_score: rows of each split as token IDs. Print what they are."""
    with blame_input("--ckpt, --preset"):
        if "tokenizer" in checkpoint:
            tokenizer = HashTokenizer.load(checkpoint["tokenizer"], config)
        else:
            tokenizer = HashTokenizer(config, hash_name="lsh", hash=fit_hash(splits["train"]))
        scale = checkpoint.get("task", {}).get("scale")  # of the numbers that the head predicts
        data = {}
        for split, rows in splits.items():  # train comes first
            if name in SQUAD:
                part = QuestionAnswering(task, rows, tokenizer, config.length, name == "squad_v2")
            else:
                part = SequenceClassification(task, rows, tokenizer, config.length, scale)
                scale = part.scale
            data[split] = part
    ids = np.concatenate(data["train"].examples)
    counts = np.bincount(ids, minlength=FIRST_WORD_ID + len(tokenizer.words))
    report_unknown(tokenizer, tokenizer.words, counts)
    sizes = ", ".join(f"{split} {len(part):,}" for split, part in data.items())
    print(f"{name}: rows {sizes}; of train {data['train'].notes}", flush=True)
    return data


def fit_hash(rows):
    """Return the n-gram LSH that knows the n-grams of rows, list of (texts, label)."""
    counts = collections.Counter()
    for texts, _ in rows:
        for text in texts:
            counts.update(list_words(text))
    return NgramLSH.fit(counts)


# -------------------------------------------------------------------------------------------------
# The folder of the jobs


def check_out(out, settings):
    """Raise InputError where --out holds jobs of other settings, or a model of another script."""
    path = os.path.join(out, "settings.json")
    if not os.path.exists(path):
        if any(Path(out).rglob("*.pt")):
            raise InputError(f"--out {out}: belongs to another script. Use another --out.")
        return
    saved = read_json(path)
    changes = []
    for name, value in settings.items():
        if saved.get(name) != value:
            changes.append(f"{name} was {saved.get(name)} and is {value}")
    if changes:
        raise InputError(f"--out {out}: belongs to a run with other settings: "
                         f"{'; '.join(changes)}. Use another --out.")


def job_path(out, name, seed, ending):
    """Return the path of a file of a job: json, its results, or pt, its model."""
    return os.path.join(out, f"{name}-seed-{seed}.{ending}")


def print_start(args, runtime, config, checkpoint):
    """Print what is about to run."""
    origin = "pre-trained" if checkpoint["model"] else "not pre-trained"
    print(f"model: {origin}, emb {config.emb}, {config.layers} layers, width {config.width}, "
          f"length {config.length}")
    print(f"training: {args.epochs} epochs, batch {args.batch}, lr {args.lr:g}, dropout "
          f"{args.dropout}, pool {args.pool}, {args.seeds} seeds from {args.seed}")
    print(f"device: {runtime.device}, {runtime.dtype}, compile {runtime.use_compile}", flush=True)


def keep_best_weights(args, name, results):
    """Rename the model file of a task's best seed, remove those of the others; return its path."""
    best_path = os.path.join(args.out, "ckpt.pt")
    if args.task != name:  # of eight
        best_path = os.path.join(args.out, f"{name}.pt")
    # the scored rows do not choose the seed, either; without --select it is the first
    best = max(results, key=lambda result: result["selection"])
    for result in results:
        path = job_path(args.out, name, result["seed"], "pt")
        if result is best and os.path.exists(path):  # not so where the run was complete before
            os.replace(path, best_path)
        remove(path)
    return best_path


# -------------------------------------------------------------------------------------------------
# Results


def summarize(results):
    """Return the row of results.json of a task: means over the results of its seeds."""
    first = results[0]
    metric = first["metric"]
    values = [result["best"][metric] for result in results]
    best = average([result["best"] for result in results])
    last = average([result["last"] for result in results])
    row = dict(metric=metric, rows=first["rows"], size=first["size"], values=values,
               mean=best[metric], std=deviation(values), last=last[metric], all_metrics=best,
               f1_per_label=average([result["f1_per_label"] for result in results]),
               warnings=sum(map(warn_of_classes, results), []), majority=first["majority"],
               bag_of_words=None)
    if "control" in first:
        bag = [result["control"]["best"][metric] for result in results]
        predicted = [result["predicted"] for result in results]
        others = [result["control"]["predicted"] for result in results]
        row |= dict(bag_of_words=np.mean(bag), bag_of_words_std=deviation(bag),
                    over_bag=np.mean(values) - np.mean(bag),
                    over_bag_error=standard_error(metric, first["truth"], predicted, others))
    return row


def warn_of_classes(result):
    """Return what to say of the classes that a seed never predicts, a list of at most one str."""
    labels = list(result["f1_per_label"])
    missing = [label for i, label in enumerate(labels) if i not in result["predicted"]]
    if not missing:
        return []
    text = f"never predicts {shorten(missing)}"
    if len(missing) == len(labels) - 1:
        text = f"always predicts {labels[result['predicted'][0]]}"
    return [f"seed {result['seed']} {text}"]


def shorten(names):
    """Return the first names, joined, and how many others there are."""
    if len(names) > MAX_NAMED:
        names = [*names[:MAX_NAMED], f"and {len(names) - MAX_NAMED:,} others"]
    return ", ".join(names)


def average(scores):
    """Return the mean of each score over the seeds; scores is a list of dict."""
    return {name: np.mean([of_seed[name] for of_seed in scores]) for name in scores[0]}


def deviation(values):
    """Return the standard deviation of a sample; None of one value."""
    if len(values) == 1:
        return None
    return np.std(values, ddof=1)


def print_results(content):
    """Print the scores of each task beside its controls."""
    for name, row in content["tasks"].items():
        print(f"\n{name}: parameters {row['size']['total']:,}, PoEP {row['size']['poep']:.2%}")
        print(f"{name}: {row['metric']} {show(row['mean'], row['std'])}, last weights "
              f"{row['last']:.2f}, majority class {row['majority']:.2f}")
        scores = row["f1_per_label"]
        if scores:
            parts = [f"{label} {scores[label]:.1f}" for label in sorted(scores, key=scores.get)]
            macro = np.mean(list(scores.values()))
            print(f"{name}: macro F1 {macro:.2f}; F1 by class {shorten(parts)}")
        for warning in row["warnings"]:
            print(f"warning: {name}: {warning}, which counts in the mean")
        if row["bag_of_words"] is not None:
            bag = show(row["bag_of_words"], row["bag_of_words_std"])
            note = ""
            if row["over_bag"] <= 2 * row["over_bag_error"]:  # 0 ± 0, too
                note = ": no better than a bag of words"
            print(f"{name}: bag of words {bag}, difference {row['over_bag']:+.2f} ± "
                  f"{row['over_bag_error']:.2f}, its standard error over rows and seeds{note}")
    if "average" in content:
        print(f"average over the tasks: {show(content['average'], content['average_std'])}")


def show(mean, std):
    """Return a mean, and its deviation over seeds if there are several."""
    if std is None:
        return f"{mean:.2f}"
    return f"{mean:.2f} ± {std:.2f}"


if __name__ == "__main__":
    main()
