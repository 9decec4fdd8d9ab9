"""Fine-tune a pre-trained model on a task: several seeds, with baselines beside the score.

    python finetune.py --ckpt out/proj-lsh --task pydoc                     offline: the module of a docstring
    python finetune.py --ckpt out/proj-lsh --task sst2                      a task of GLUE, from the hub
    python finetune.py --ckpt out/proj-lsh --task glue --data_dir glue/     eight tasks, from original files
    python finetune.py --ckpt out/proj-lsh --task squad                     the words that answer a question
    python finetune.py --ckpt out/proj-lsh --train a.csv --dev b.csv --text title,body --label topic
    python finetune.py --preset proformer --task sst2                       without pre-training
    torchrun --nproc_per_node=8 finetune.py --ckpt out/proj-lsh --task glue     one job per task and seed

Paper map:    [HF Table 5] RECIPES   [HF Table 5] learning_rate   [HF Table 5] parser   [HF §4.1] load_start
              [HF §4.1] parser   [HF §4.4] parser
Sources:      [HF] Xue & Aletras 2022, HashFormers
Out of scope: tasks and metrics (data/), tables of results (report.py), the labels of a text (infer.py).
Deviations:   1. The score is that of the best evaluation on the dev set; the last one's is reported too.
              2. Small models classify by the mean of all positions: Shuffle+Random never trains [CLS].
"""

import argparse
import collections
import dataclasses
import datetime
import functools
import glob
import json
import math
import os
import shlex
import sys

import numpy as np
import torch
import torch.distributed as dist
from tqdm import tqdm

from data.batches import length_batches, pad_batch
from data.squad import SQUAD, QuestionAnswering, read_squad
from data.tasks import TASKS, SequenceClassification, read_task, read_tests
from hashing import NgramLSH, list_words
from model import PRESETS, Config, Model, count_parameters, load_config, load_model, parameter_groups
from report import build_results, print_results, print_settings, read_results, write_json
from runtime import HelpFormatter, InputError, add_device_flags, at_least, autocast, barrier_before_exit
from runtime import blame_input, exit_on_bad_input, fingerprint, gather_from_ranks, load_checkpoint
from runtime import read_ranks, resolve_device, save_checkpoint, try_compile
from tokenizer import HashTokenizer

# The paper's settings [HF Table 5], and those of models of less than 512 dimensions
RECIPES = {"paper": dict(epochs=5, batch=32, lr=3e-5, pool="cls"),
           "small": dict(epochs=5, batch=32, lr=5e-4, pool="mean")}
OWN = "none (files of your own)"
# What is scored, and how: an --out holds the results of one choice
SETTINGS = ("task", "data_dir", "train", "dev", "text", "label", "regression", "limit", "stride",
            "max_answer", "ckpt", "preset", "from_scratch", "epochs", "batch", "lr", "pool", "dropout",
            "eval_every", "dtype")


@dataclasses.dataclass
class Run:
    """What a fine-tuning on one rank consists of: state without methods."""

    args: argparse.Namespace
    names: list  # of tasks
    config: Config  # of the encoder; the head follows from the task
    checkpoint: dict  # {} with --preset; without model and task with --from_scratch
    texts: dict  # name -> what read_task or read_squad returns
    tests: dict  # name -> what read_tests returns
    settings: dict  # content of settings.json
    device: torch.device
    rank: int
    world: int
    prepared: tuple = (None, None, None)  # name, data and tokenizer of the latest task


def requirements():
    """Return flag -> the values of --task that it works with."""
    files, benchmarks = (OWN, *TASKS, *SQUAD), ("glue", *TASKS, *SQUAD)
    return dict(text=(OWN,), label=(OWN,), regression=(OWN,), train=files, dev=files, data_dir=benchmarks,
                predict=benchmarks, stride=tuple(SQUAD), max_answer=tuple(SQUAD))


def check_flags(args):
    """Raise InputError where flags contradict each other."""
    if (args.ckpt is None) == (args.preset is None):
        raise InputError("--ckpt: expected a folder of pretrain.py, or else --preset proformer.")
    for flag, tasks in requirements().items():
        if getattr(args, flag) and (args.task or OWN) not in tasks:
            raise InputError(f"--{flag} requires --task {' or '.join(tasks)}.")
    if args.task is None and not (args.train and args.dev and args.text and args.label):
        raise InputError("--task: expected a name, or for your own files --train --dev --text --label.")
    if bool(args.train) != bool(args.dev):
        raise InputError("--train requires --dev, and --dev requires --train.")
    if args.train and (args.data_dir or args.predict and args.task not in SQUAD):
        raise InputError("--train: expected no --data_dir, and no --predict but of SQuAD; see infer.py.")
    if (args.text or "").count(",") > 1:
        raise InputError(f"--text: expected one column, or two with a comma between, got {args.text}.")


def load_start(args):
    """Return the checkpoint ({} for a preset) and its Config; fill in what the flags leave open. [HF §4.1]"""
    checkpoint, config = {}, Config(**PRESETS[args.preset or "proformer"])
    if args.ckpt:
        with blame_input(f"--ckpt {args.ckpt}"):
            checkpoint = load_checkpoint(args.ckpt)
            config = load_config(checkpoint)
            load_model(checkpoint)  # raises where the weights do not fit
    if not config.order:
        raise InputError(f"--ckpt {args.ckpt}: expected a model of texts, got one of item sets.")
    if args.from_scratch:
        checkpoint = {name: part for name, part in checkpoint.items() if name not in ("model", "task")}
    recipe = args.recipe or ("paper" if config.width >= 512 else "small")
    defaults = dict(RECIPES[recipe], dropout=config.dropout)
    if checkpoint.get("task"):  # fine-tuned before
        defaults["pool"] = config.pool
    for flag, value in defaults.items():
        setattr(args, flag, value if getattr(args, flag) is None else getattr(args, flag))
    with blame_input("--dropout"):
        return checkpoint, dataclasses.replace(config, pool=args.pool, dropout=args.dropout)


def build_run(args):
    """Resolve the flags and read all files, so that whatever is wrong with them shows before the training."""
    check_flags(args)
    rank, world, local_rank = read_ranks()
    checkpoint, config = load_start(args)
    if args.epochs == 0:
        args.seeds = 1  # nothing is random
    folder = os.path.abspath(args.ckpt or "")
    folder = os.path.dirname(folder) if os.path.isfile(folder) else folder
    start = args.preset or os.path.basename(folder) + "-scratch" * args.from_scratch
    args.out = args.out or os.path.join("out", f"{start}-{args.task or 'own'}")
    args.baseline = args.baseline and read_results(args.baseline)
    averaged = [name for name, task in TASKS.items() if task.in_average]
    names = averaged if args.task == "glue" else [args.task or "own"]
    texts = {name: (read_squad if name in SQUAD else read_task)(name, args) for name in names}
    tests = {name: read_tests(name, args) for name in names if args.predict and name in TASKS}
    path, saved = os.path.join(args.out, "settings.json"), {}
    if os.path.exists(path):
        with blame_input(path), open(path) as file:
            saved = dict(json.load(file))
    if args.dtype == "auto":  # a choice is kept
        args.dtype = saved.get("dtype", "auto")
    device, args.dtype, args.compile = resolve_device(args, local_rank)
    if world > 1:  # the ranks meet again after hours of their own work
        dist.init_process_group("gloo", timeout=datetime.timedelta(days=30))
        args.dtype = gather_from_ranks(args.dtype)[0]
    run = Run(args, names, config, checkpoint, texts, tests, {}, device, rank, world)
    if not args.epochs and not all(get_description(run, name) for name in names):
        raise InputError(f"--epochs 0 requires --ckpt of a model fine-tuned for this very task, {args.task}.")
    claim_output(run, path, saved)
    return run


def claim_output(run, path, saved):
    """Write settings.json, unless --out belongs to other settings."""
    args, settings = run.args, {flag: getattr(run.args, flag) for flag in SETTINGS}
    settings["texts"] = fingerprint([splits[-2:] for splits in run.texts.values()])
    if args.ckpt:
        status = os.stat(os.path.join(args.ckpt, "ckpt.pt") if os.path.isdir(args.ckpt) else args.ckpt)
        settings["checkpoint"] = [status.st_size, status.st_mtime_ns]
    files = glob.glob(os.path.join(glob.escape(args.out), "**", "*.pt"), recursive=True)
    changes = [f"{name} was {saved.get(name)} and is {value}" for name, value in settings.items()
               if saved.get(name) != value]
    if files and changes:
        raise InputError(f"--out {args.out}: belongs to another run ({'; '.join(changes)}). Use another.")
    run.settings = settings
    if run.rank == 0:
        os.makedirs(args.out, exist_ok=True)
        write_json(path, settings)
        if not any(os.path.basename(file).startswith("seed-") for file in files):
            open(os.path.join(args.out, "log.jsonl"), "w").close()
    gather_from_ranks(None)  # until the first rank has written it
    if not os.path.exists(path):
        raise InputError(f"--out {args.out}: expected a folder that all nodes see, got one of this node.")


def job_path(run, name, file):
    """Return the path of a task's file: in --out, or of several tasks in a folder each."""
    return os.path.join(run.args.out, *[name] * (len(run.names) > 1), file)


def get_description(run, name):
    """Return the checkpoint's description of its task if it was fine-tuned for this very task, else {}."""
    description, expected, (*task, _, _) = run.checkpoint.get("task", {}), dict(name=name), run.texts[name]
    for t in task:
        expected |= dict(labels=list(t.labels) if t.labels else None, texts=list(t.texts), label=t.label)
    return description if description == description | expected else {}


def prepare_task(run, name):
    """Return the data of a task and the tokenizer that knows its words; the latest task's are kept."""
    if run.prepared[0] == name:
        return run.prepared[1:]
    (*task, train, dev), before = run.texts[name], get_description(run, name)
    a, length = run.args, run.config.length
    with blame_input(f"--ckpt {a.ckpt}" if a.ckpt else "--preset"):
        if run.checkpoint:
            tokenizer = HashTokenizer.load(run.checkpoint["encoder"], run.config)
        else:  # without pre-training the n-grams are those of the training texts
            texts = (train["first"] + (train["second"] or []) if task else
                     [question[part] for question in train for part in ("context", "question")])
            counts = collections.Counter(word for text in texts for word in list_words(text))
            tokenizer = HashTokenizer(run.config, hash_name="lsh", hash=NgramLSH.fit(counts))
        if task:
            data = SequenceClassification(*task, train, dev, tokenizer, length, a.limit, before.get("scale"))
        else:
            data = QuestionAnswering(train, dev, tokenizer, length, a.stride or before.get("stride"),
                                     a.max_answer or before.get("longest"), a.limit, name == "squad_v2")
    run.prepared = name, data, tokenizer
    return data, tokenizer


def build_model(run, name):
    """Return the model, with a new head unless the checkpoint was fine-tuned for this very task."""
    data, tokenizer = prepare_task(run, name)
    model = Model(dataclasses.replace(run.config, head=data.head, labels=data.num_outputs))
    if weights := run.checkpoint.get("model"):
        keep_head = bool(get_description(run, name))
        weights = {key: value for key, value in weights.items() if keep_head or not key.startswith("head.")}
        model.load_state_dict(weights, strict=False)  # all but a new head
    model.to(run.device).set_codes(torch.from_numpy(tokenizer.codes()))
    return model


def compute_logits(run, model, examples):
    """Return the logits of examples, list of int32, as float32."""
    ids, key_mask = pad_batch(examples, run.config.length if run.args.compile else None)
    with autocast(run.device, run.args.dtype):
        logits = model(ids.to(run.device), key_mask if key_mask is None else key_mask.to(run.device))
    return logits.float()


@torch.no_grad()
def predict(run, model, examples):
    """Yield indices and logits of batches of 32,768 positions at most, without dropout and gradients."""
    model.eval()
    for chosen in length_batches(list(map(len, examples)), max(1, 32_768 // run.config.length)):
        yield chosen, compute_logits(run, model, [examples[i] for i in chosen])


def learning_rate(step, steps, warmup, cycles=5):
    """Return the factor of the learning rate: linear up, then a cosine down, five times. [HF Table 5]"""
    if step < warmup:
        return (step + 1) / warmup
    done = (step - warmup) / max(steps - warmup, 1)
    return 0.5 * (1 + math.cos(math.pi * ((cycles * done) % 1)))


def evaluate(run, model, data, best, row):
    """Score the dev set and log it; return the scores, and `best` or this evaluation, whichever is better."""
    scores, constant = data.evaluate(lambda examples: predict(run, model, examples))
    with open(os.path.join(run.args.out, "log.jsonl"), "a") as file:
        file.write(json.dumps(row | scores) + "\n")
    if best is None or scores[data.metric] > best["scores"][data.metric]:
        weights = {key: value.detach().clone() for key, value in model.state_dict().items()}
        best = dict(step=row["step"], scores=scores, constant_prediction=constant, weights=weights)
    return scores, best


def fit(run, name, seed):
    """Train and evaluate once; save the best weights as seed-S.pt and return the result of save_job."""
    a, (data, _) = run.args, prepare_task(run, name)
    torch.manual_seed(seed)
    model = build_model(run, name)
    optimizer = torch.optim.AdamW(parameter_groups(model, 0.0), lr=a.lr, eps=1e-6,
                                  fused=run.device.type in ("cuda", "cpu"))
    sizes = list(map(len, data.examples))
    per_epoch = -(-len(sizes) // a.batch)
    steps, eval_every = a.epochs * per_epoch, a.eval_every or max(1, per_epoch // 2)

    def compute_loss(chosen):
        targets = torch.from_numpy(data.targets[chosen]).to(run.device)
        return data.loss(compute_logits(run, model, [data.examples[i] for i in chosen]), targets)

    if a.compile:
        some = np.arange(min(a.batch, len(sizes)))
        with torch.random.fork_rng():  # the trial draws random numbers, and only the first job has one
            a.compile = try_compile(model, lambda: compute_loss(some).backward())
        model.zero_grad(set_to_none=True)
    order = (chosen for epoch in range(a.epochs)
             for chosen in length_batches(sizes, a.batch, np.random.default_rng([seed, epoch])))
    best, last, total = None, None, torch.zeros((), device=run.device)
    row = dict(task=name, seed=seed, step=0, loss=0.0)
    with tqdm(order, f"{name}, seed {seed}", steps, unit="step", disable=run.rank > 0) as bar:
        for step, chosen in enumerate(bar):
            for group in optimizer.param_groups:
                group["lr"] = a.lr * learning_rate(step, steps, math.ceil(0.06 * steps))
            model.train()
            if model.config.lsh_redraw:
                model.resample_hyperplanes(seed * 1_000_003 + step)
            loss = compute_loss(chosen)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            total += loss.detach()
            if (step + 1) % eval_every == 0 or step + 1 == steps:
                row |= dict(step=step + 1, loss=total.item() / (step + 1 - row["step"]))
                if not math.isfinite(row["loss"]):
                    raise InputError(f"--lr: {name}, seed {seed} has loss {row['loss']}. Try a lower one.")
                last, best = evaluate(run, model, data, best, row)
                bar.set_postfix_str(f"{data.metric} {last[data.metric]:.2f}")
                total.zero_()
    if not steps:  # the checkpoint's own score
        last, best = evaluate(run, model, data, best, row)
    return save_job(run, name, seed, model, best, last)


def save_job(run, name, seed, model, best, last):
    """Save the best weights with a description of the task; return what report.build_results needs."""
    data, tokenizer = prepare_task(run, name)
    model.load_state_dict(best["weights"])
    counts, description, scores = count_parameters(model), data.description(), best["scores"]
    path = job_path(run, name, f"seed-{seed}.pt")
    about = dict(parameters=counts["total"], embedding=counts["embedding"], poep=100 * counts["poep"],
                 emb=run.config.emb, pretrained="model" in run.checkpoint)
    result = dict(seed=seed, step=best["step"], best=scores, last=last, metric=data.metric, n=data.n,
                  constant_prediction=best["constant_prediction"], n_train=len(data.examples), model=about,
                  pair=description["pair"], head=data.head)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    task = description | dict(name=name, metric=data.metric, scores=scores)
    save_checkpoint(path, model, tokenizer.state(), words=run.checkpoint.get("words", []), task=task,
                    run=dict(result=result))
    return result


def run_jobs(run):
    """Run this rank's jobs but for those done before an interruption; return dict (task, seed) -> result."""
    jobs, results = [(name, run.args.seed + i) for name in run.names for i in range(run.args.seeds)], {}
    for name, seed in jobs[run.rank::run.world]:
        path, is_first = job_path(run, name, f"seed-{seed}.pt"), seed == run.args.seed
        if is_first:
            data, _ = prepare_task(run, name)
            if name == run.names[0]:
                with torch.device("meta"):  # counted, not allocated
                    model = Model(dataclasses.replace(run.config, head=data.head, labels=data.num_outputs))
                print_settings(run.args, run.config, count_parameters(model), run.device)
            print(f"{name}: {data.notes}", flush=True)
        if is_done := os.path.exists(path):
            print(f"{name}, seed {seed}: done before, {path}")
        result = load_checkpoint(path)["run"]["result"] if is_done else fit(run, name, seed)
        results[name, seed] = result | dict(baselines=data.baselines() if is_first else {})
    return results


def write_submission(run, name):
    """Write what GLUE's server expects of the test split, or SQuAD's answers to dev; return the paths."""
    (data, tokenizer), tests, contents = prepare_task(run, name), run.tests.get(name, {}), {}
    examples = {split: data.encode(texts, tokenizer)[0] for split, (texts, _) in tests.items()}
    model = build_model(run, name)  # after all words have an ID
    model.load_state_dict(load_checkpoint(job_path(run, name, "ckpt.pt"))["model"])
    read = functools.partial(predict, run, model)
    for split, (_, index) in tests.items():
        labels = data.submission(data.predict_labels(examples[split], read))
        suffix = dict(test_matched="-m", test_mismatched="-mm").get(split, "")
        lines = [f"{i}\t{label}\n" for i, label in zip(index, labels)]
        contents[f"{TASKS[name].folder}{suffix}.tsv"] = "".join(["index\tprediction\n", *lines])
    if not tests:
        contents["predictions.json"] = json.dumps(data.submission(read), ensure_ascii=False)
    for file_name, content in contents.items():
        with open(job_path(run, name, file_name), "w", encoding="utf-8") as file:
            file.write(content)
    return [job_path(run, name, file_name) for file_name in contents]


def finish(run, done):
    """Write results.json, keep the best checkpoint of each task, and print the table; return the results."""
    a, first = run.args, done[run.names[0], run.args.seed]
    runs = {name: [done[name, a.seed + i] for i in range(a.seeds)] for name in run.names}
    results = build_results(runs, run.settings, a.baseline)
    paths = [os.path.join(a.out, "results.json")]
    write_json(paths[0], results)
    for name, row in results["tasks"].items():
        best = row["seeds"][int(np.argmax(row["values"]))]
        os.replace(job_path(run, name, f"seed-{best}.pt"), job_path(run, name, "ckpt.pt"))
        for file in glob.glob(glob.escape(job_path(run, name, "seed-")) + "*.pt"):
            os.remove(file)
        paths += write_submission(run, name) if a.predict else []
    print_results(results)
    print("\n".join(f"Saved {path}" for path in paths))
    example = '"A first text." "A second text."' if first["pair"] else '"A text."'
    if first["head"] == "span":
        example = '"Who wrote the book?" "The book was written by Ada Lovelace in 1843."'
    print(f"Next: python infer.py --ckpt {shlex.quote(job_path(run, run.names[0], ''))} {example}")
    return results


def parser():
    """Return the parser of all flags, grouped by idea."""
    p = argparse.ArgumentParser(
        formatter_class=HelpFormatter, description=__doc__.split("\nPaper map")[0],
        usage="python finetune.py (--ckpt DIR | --preset proformer) --task NAME [flags]  (see --help)")

    def group(title, text):
        return p.add_argument_group(title, text).add_argument

    count = dict(type=at_least(1), metavar="n")
    flag = group("start", "The checkpoint holds shape, hash and weights, so no flag asks for them.")
    flag("--ckpt", metavar="DIR", help="folder of a run of pretrain.py, or its ckpt.pt")
    flag("--from_scratch", action="store_true", help="use the checkpoint's shape and hash, not its weights")
    flag("--preset", choices=("proformer",), help="instead of --ckpt: ProFormer, not pre-trained [HF §4.1]")
    flag = group("task", "GLUE; SQuAD: the words that answer a question; pydoc: the module of a docstring.")
    flag("--task", choices=(*TASKS, "glue", *SQUAD, "pydoc"),
         help="glue: the paper's eight in turn, then their average (default: your own files)")
    flag("--data_dir", metavar="DIR", help=(
        "a download: SST-2/train.tsv, CoLA/dev.tsv ..., or train-v1.1.json (default: the hub)"))
    flag("--train", metavar="FILE", help="training rows, .tsv .csv .jsonl .parquet; of --task in its columns")
    flag("--dev", metavar="FILE", help="rows to score")
    flag("--text", metavar="COL[,COL]", help="column of the text, or of both texts; requires your own files")
    flag("--label", metavar="COL", help="column of the label; requires your own files")
    flag("--regression", action="store_true", help="regression with float labels (MSE loss)")
    flag("--limit", **count, help="training rows, drawn at random, the same for all seeds (default: all)")
    flag("--stride", **count, help="words between windows of a text; requires SQuAD (default: length / 3)")
    flag("--max_answer", **count, help="longest answer, in words; requires SQuAD (default: 30)")
    flag = group("training", (
        "Adam, no weight decay, 6 % warm-up, a cosine with 5 hard restarts, clipping at 1. [HF Table 5]\n"
        f"Recipes: paper {RECIPES['paper']}, small {RECIPES['small']}."))
    flag("--recipe", choices=tuple(RECIPES), help="(default: small for a width below 512, else paper)")
    flag("--epochs", type=at_least(0), metavar="n", help=(
        "passes over the training rows; 0: score a checkpoint of this task as it is (default: the recipe's)"))
    flag("--batch", **count, help="examples per step (default: the recipe's)")
    flag("--lr", type=at_least(0, float), metavar="x", help="peak learning rate (default: the recipe's)")
    flag("--pool", choices=("cls", "mean"), help=(
        "what the head sees of a text: its first position, or the mean of all (default: the recipe's; of a "
        "checkpoint that was fine-tuned before, its own)"))
    flag("--dropout", type=float, metavar="p", help="dropout probability (default: the checkpoint's)")
    flag("--seeds", type=at_least(1), default=3, metavar="N", help="runs of each task")
    flag("--seed", type=at_least(0), default=0, metavar="S", help="seed of the first run; the next has S+1")
    flag("--eval_every", **count, help="steps between evaluations (default: half an epoch)")
    flag = group("report", "Beside each score: its spread over seeds, the majority class, a bag of words.")
    flag("--baseline", metavar="DIR", help=(
        "--out of another fine-tuning, to print retained score (PRR) and compression (PCR) [HF §4.4]"))
    flag("--predict", action="store_true", help=(
        "write what GLUE's server expects of the test split (it expects WNLI and AX too), or SQuAD's "
        "predictions.json, by the best run; afterwards: --ckpt OUT --epochs 0 --predict"))
    g = p.add_argument_group("device and files", "Under torchrun each rank takes its share of the jobs.")
    add_device_flags(g)
    g.add_argument("--cache", default="cache", metavar="DIR", help="folder of the docstrings of pydoc")
    g.add_argument("--out", metavar="DIR", help=(
        "folder of results.json, log.jsonl, ckpt.pt, of glue one per task (default: out/CKPT-TASK)"))
    return p


def main(argv=None):
    """Fine-tune as the command line, or the list argv, says; return the content of results.json on rank 0."""
    args = parser().parse_args(argv)
    with exit_on_bad_input("finetune.py"):
        try:
            run = build_run(args)
            done = {job: result for part in gather_from_ranks(run_jobs(run)) for job, result in part.items()}
            results = finish(run, done) if run.rank == 0 else None
            barrier_before_exit()
            return results
        except KeyboardInterrupt:
            print("finetune.py: Interrupted. Rerun the same command to resume after the last finished job.",
                  file=sys.stderr)
            raise SystemExit(130) from None


if __name__ == "__main__":
    main()
