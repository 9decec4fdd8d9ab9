"""Fine-tune a pre-trained model on a task: several seeds, with baselines beside the score.

    python finetune.py --ckpt out/proj-lsh --task pydoc                     offline: the module of a docstring
    python finetune.py --ckpt out/proj-lsh --task sst2                      a task of GLUE, from the hub
    python finetune.py --ckpt out/proj-lsh --task glue --data_dir glue/     eight tasks, from original files
    python finetune.py --ckpt out/proj-lsh --task squad                     the words that answer a question
    python finetune.py --ckpt out/proj-lsh --train a.csv --dev b.csv --text title,body --label topic
    python finetune.py --preset proformer --task sst2                       without pre-training
    python finetune.py --preset canine --weights canine-c/ --task sst2      the released CANINE-C, a rival
    torchrun --nproc_per_node=8 finetune.py --ckpt out/proj-lsh --task glue     one job per task and seed

Paper map:    [HF Table 5] RECIPES   [HF Table 5] learning_rate   [HF Table 5] parser   [HF §4.1] load_start
              [HF §4.1] parser   [HF §4.4] parser
Sources:      [HF] Xue & Aletras 2022, HashFormers
Out of scope: tasks and metrics (data/), tables of results (report.py), the labels of a text (infer.py).
Deviations:   1. The score is the best evaluation's on the scored rows; the last one's is reported too.
              2. Two evaluations per epoch (--eval_every); [HF Table 5]: five, of small tasks in 3 epochs.
              3. Gradients are clipped at norm 1, which the paper does not name.
              4. The cosine restarts after each fifth of the steps: the paper does not say how often.
              5. Models of width below 512 have a recipe of their own, "small" (docs/finetuning.md).
              6. Batch 32 for every model; the median proposal fine-tunes with 64 (--batch 64).
"""

import argparse
import collections
import dataclasses
import datetime
import functools
import json
import math
import os
import shlex
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from tqdm import tqdm

from baselines.bag import HashedBag
from baselines.canine import CanineConfig, CharacterTokenizer, load_released, select_classes
from data.batches import length_batches, pad_batch
from data.squad import SQUAD, QuestionAnswering, read_squad
from data.tasks import TASKS, SequenceClassification, read_task, read_tests
from hashing import NgramLSH, list_words
from model import PRESETS, Config, count_parameters, load_model
from report import build_results, print_results, print_settings, read_results, write_json
from runtime import HelpFormatter, InputError, add_device_flags, at_least, autocast, barrier_before_exit
from runtime import blame_input, exit_on_bad_input, fingerprint, gather_from_ranks, load_checkpoint
from runtime import lock_output, read_ranks, resolve_device, save_checkpoint, try_compile
from tokenizer import HashTokenizer

# The paper's settings [HF Table 5], and those of models of less than 512 dimensions
RECIPES = {"paper": dict(epochs=5, batch=32, lr=3e-5, pool="cls", bag=0),
           "small": dict(epochs=5, batch=32, lr=1e-3, pool="mean", bag=65_536)}
OWN = "left out (your own files)"
# An --out holds the results of one choice of all flags but these
FREE = ("recipe", "baseline", "predict", "device", "compile", "cache", "out")


class Run:
    """State of a fine-tuning on one rank: build_run sets it, and the functions below read it.

    args, rank, world, device, settings: how it runs; the last is the content of settings.json.
    checkpoint: what it starts from; without model and task with --from_scratch, {} with --preset proformer.
    config: of the encoder; the head follows from the task. about: the model, for results.json.
    texts: name -> Task (of SQuAD None), training rows, rows to score. tests: name -> as of read_tests.
    """


def check_flags(args):
    """Raise InputError where flags contradict each other."""
    files, benchmarks = (OWN, *TASKS, *SQUAD), ("glue", *TASKS, *SQUAD)
    tasks_of_flags = dict(text=(OWN,), label=(OWN,), regression=(OWN,), train=files, dev=files,
                          data_dir=benchmarks, predict=benchmarks, stride=(*SQUAD,), max_answer=(*SQUAD,))
    if (args.ckpt is None) == (args.preset is None):
        raise InputError("--ckpt: expected a folder of pretrain.py, or else --preset proformer or canine.")
    if args.weights and (args.preset != "canine" or args.from_scratch):
        raise InputError("--weights requires --preset canine, without --from_scratch.")
    for flag, tasks in tasks_of_flags.items():
        if getattr(args, flag) and (args.task or OWN) not in tasks:
            raise InputError(f"--{flag} requires --task {' or '.join(tasks)}.")
    open_flags = [flag for flag in ("train", "dev", "text", "label") if not getattr(args, flag)]
    if args.task is None and open_flags:
        raise InputError("--task: expected a name, or for your own files --train --dev --text --label, got "
                         f"no --{open_flags[0]}.")
    if bool(args.train) != bool(args.dev):
        raise InputError("--train requires --dev, and --dev requires --train.")
    if args.train and (args.data_dir or args.predict and args.task not in SQUAD):
        raise InputError("--train: expected no --data_dir, and no --predict but of SQuAD; see infer.py.")
    if (args.text or "").count(",") > 1:
        raise InputError(f"--text: expected one column, or two with a comma between, got {args.text}.")


def load_start(args):
    """Return the checkpoint, or what a preset has of one, and its config; fill in open flags. [HF §4.1]"""
    checkpoint, config = {}, Config(**PRESETS["proformer"])
    if args.preset == "canine":
        config, checkpoint["encoder"] = CanineConfig(), CharacterTokenizer().state()
    if args.weights:
        with blame_input(f"--weights {args.weights}"):
            config, checkpoint["model"] = load_released(args.weights)
    if args.ckpt:
        with blame_input(f"--ckpt {args.ckpt}"):
            checkpoint = load_checkpoint(args.ckpt)
            # raises where weights do not fit; jobs draw a new head
            config = load_model(checkpoint, select_classes(checkpoint["config"])[:2]).config
    if not config.order:
        raise InputError(f"--ckpt {args.ckpt}: expected a model of texts, got one of item sets.")
    is_canine = config.emb == "canine"
    if is_canine and args.task in SQUAD:
        raise InputError(f"--task: expected a task with labels for canine, got {args.task}.")
    if args.from_scratch:
        checkpoint = {name: part for name, part in checkpoint.items() if name not in ("model", "task")}
    recipe = RECIPES[args.recipe or ("paper" if config.width >= 512 else "small")]
    of_model = dict(pool=config.pool) if is_canine or checkpoint.get("task") else {}  # if fine-tuned before
    of_model |= dict(bag=config.bag) if is_canine or config.bag or args.epochs == 0 else {}
    defaults = recipe | dict(dropout=config.dropout) | of_model
    vars(args).update({flag: value for flag, value in defaults.items() if getattr(args, flag) is None})
    with blame_input("--dropout" if not is_canine else "--pool, --bag, --dropout"):
        return checkpoint, dataclasses.replace(config, pool=args.pool, bag=args.bag, dropout=args.dropout)


def build_run(args):
    """Resolve the flags and read all files, so that whatever is wrong with them shows before the training."""
    check_flags(args)
    run = Run()
    run.args, (run.rank, run.world, local_rank) = args, read_ranks()
    if run.world > 1:  # first: ranks notice when another ends, not when it never comes
        dist.init_process_group("gloo", timeout=datetime.timedelta(days=30))  # each works for hours alone
    run.checkpoint, run.config = load_start(args)
    args.seeds = args.seeds if args.epochs else 1  # without training nothing is random
    path = os.path.abspath(args.ckpt or "")
    path = os.path.join(path, "ckpt.pt") if os.path.isdir(path) else path
    start = args.preset or os.path.basename(os.path.dirname(path)) + "-scratch" * args.from_scratch
    args.out = args.out or os.path.join("out", f"{start}-{args.task or 'own'}")
    args.baseline = args.baseline and read_results(args.baseline)
    names = [n for n, t in TASKS.items() if t.in_average] if args.task == "glue" else [args.task or "own"]
    run.texts = {n: (None, *read_squad(n, args)) if n in SQUAD else read_task(n, args) for n in names}
    run.tests = {name: read_tests(name, args) for name in names if args.predict and name in TASKS}
    # --dtype auto: the dtype in which this --out was begun
    args.dtype = read_settings(args.out).get("dtype", "auto") if args.dtype == "auto" else args.dtype
    run.device, args.dtype, args.compile = resolve_device(args, local_rank)
    args.dtype = gather_from_ranks(args.dtype)[0]
    run.settings = {flag: value for flag, value in vars(args).items() if flag not in FREE}
    run.settings["texts"] = fingerprint([splits[-2:] for splits in run.texts.values()])
    if args.ckpt:
        run.settings["checkpoint"] = [os.stat(path).st_size, os.stat(path).st_mtime_ns]
    if not args.epochs and not all(get_description(run, name) for name in names):
        raise InputError("--epochs 0 requires --ckpt of a model fine-tuned for this very task, "
                         f"{args.task or 'its columns and labels'}.")
    return run


def read_settings(folder):
    """Return the content of settings.json in an --out, {} where there is none."""
    path = Path(folder, "settings.json")
    with blame_input(path):
        content = json.loads(path.read_text()) if path.exists() else {}
    return content if isinstance(content, dict) else {}


def claim_output(run):
    """Write settings.json, unless --out is of another run; keep the finished jobs' lines of log.jsonl."""
    out, saved = run.args.out, read_settings(run.args.out)
    changes = ["other texts" if name == "texts" else f"{name} was {saved.get(name)} and is {value}"
               for name, value in run.settings.items() if saved.get(name) != value]
    if changes and (any(Path(out).rglob("*.pt")) or Path(out, "results.json").exists()):
        raise InputError(f"--out {out}: belongs to another run ({'; '.join(changes)}). Use another.")
    if run.rank == 0:
        write_json(os.path.join(out, "settings.json"), run.settings)
        finished = [json.dumps(dict(task=name, seed=seed))[:-1] + "," for name, seed, file in list_jobs(run)
                    if os.path.exists(file)]
        (log := Path(out, "log.jsonl")).touch()
        lines = log.read_text().splitlines(keepends=True)
        log.write_text("".join(line for line in lines if line.startswith(tuple(finished))))
    gather_from_ranks(None)  # until the first rank has written it
    if not read_settings(out):
        raise InputError(f"--out {out}: expected a folder that all nodes see, got one of this node.")


def job_path(run, name, file):
    """Return the path of a task's file: in --out, or of several tasks in a folder each."""
    return os.path.join(run.args.out, name if len(run.texts) > 1 else "", file)


def list_jobs(run):
    """Return (task, seed, path of the checkpoint that it leaves) of each job."""
    seeds = range(run.args.seed, run.args.seed + run.args.seeds)
    return [(name, seed, job_path(run, name, f"seed-{seed}.pt")) for name in run.texts for seed in seeds]


def get_description(run, name):
    """Return the checkpoint's description of its task if it was fine-tuned for this very task, else {}."""
    description, expected, (task, *_) = run.checkpoint.get("task", {}), dict(name=name), run.texts[name]
    if task:
        expected |= dict(labels=task.labels and list(task.labels), texts=list(task.texts), label=task.label)
    return description if expected.items() <= description.items() else {}


@functools.lru_cache(maxsize=1)
def prepare_task(run, name):
    """Return the data of a task, with the tokenizer that knows its words; the latest task's are kept."""
    (task, train, dev), before = run.texts[name], get_description(run, name)
    a, length = run.args, run.config.length
    with blame_input(f"--ckpt {a.ckpt}" if a.ckpt else "--preset"):
        if run.checkpoint:
            tokenizer = select_classes(vars(run.config))[2].load(run.checkpoint["encoder"], run.config)
        else:  # without pre-training the n-grams are those of the training texts
            texts = (train["first"] + (train["second"] or []) if task else
                     [question[part] for question in train for part in ("context", "question")])
            counts = collections.Counter(word for text in texts for word in list_words(text))
            tokenizer = HashTokenizer(run.config, hash_name="lsh", hash=NgramLSH.fit(counts))
        if task:
            return SequenceClassification(task, train, dev, tokenizer, length, a.limit, before.get("scale"),
                                          bool(a.bag))
        return QuestionAnswering(train, dev, tokenizer, length, a.stride or before.get("stride"),
                                 a.max_answer or before.get("longest"), a.limit, name == "squad_v2")


def new_model(run, data):
    """Return the fresh model of a task: the bag of words is for single texts, as it cannot compare two."""
    bag = run.args.bag if data.has_one_text else 0
    config = dataclasses.replace(run.config, head=data.head, labels=data.num_outputs, bag=bag)
    return select_classes(vars(config))[1](config)


def build_model(run, name, data):
    """Return the model of a task's data, with a new head unless the checkpoint is of this very task."""
    weights, model = run.checkpoint.get("model", {}), new_model(run, data)
    heads = () if get_description(run, name) else ("head.", "bag.")
    heads += ("bag.",) * (len(weights.get("bag.weight", ())) != model.config.bag)  # another --bag
    weights = {key: weight for key, weight in weights.items() if not key.startswith(heads)}
    model.load_state_dict(weights, strict=False)
    model.to(run.device).set_codes(torch.from_numpy(data.tokenizer.codes()))
    if model.config.bag and "bag.weight" not in weights:
        model.bag.set_idf([model.bag_rows[ids] for ids in map(torch.from_numpy, data.examples)])
    return model


def compute_logits(run, model, examples):
    """Return the logits of examples, list of int32, as float32."""
    ids, key_mask = pad_batch(examples, run.config.length if run.args.compile else None)
    with autocast(run.device, run.args.dtype):
        return model(*(x if x is None else x.to(run.device) for x in (ids, key_mask))).float()


@torch.no_grad()
def predict(run, model, examples):
    """Yield indices and logits of batches of 32,768 encoder positions at most, without dropout, gradients."""
    model.eval()
    for chosen in length_batches(list(map(len, examples)), max(1, 32_768 // run.config.length)):
        logits = compute_logits(run, model, [examples[i] for i in chosen])
        if not logits.isfinite().all():
            raise InputError("--lr: expected finite outputs of the model, got nan or inf. Try a lower --lr.")
        yield chosen, logits


def learning_rate(step, steps, warmup, cycles=5):
    """Return the factor of the learning rate: linear up, then a cosine down, five times. [HF Table 5]"""
    if step < warmup:
        return (step + 1) / warmup
    done = (step - warmup) / max(steps - warmup, 1)
    return 0.5 * (1 + math.cos(math.pi * ((cycles * done) % 1)))


def evaluate(run, model, data, best, row):
    """Score the dev rows and log it; return the scores, and the better one of `best` and this evaluation."""
    scores, constant = data.evaluate(functools.partial(predict, run, model))
    with open(os.path.join(run.args.out, "log.jsonl"), "a") as file:
        print(json.dumps(row | scores), file=file)
    if best is None or scores[data.metric] > best["best"][data.metric]:
        weights = {key: value.detach().clone() for key, value in model.state_dict().items()}
        best = dict(step=row["step"], best=scores, constant_prediction=constant, weights=weights)
    return scores, best


def fit(run, name, seed, path):
    """Train and evaluate; save the best weights with a description of the task; return the job's result."""
    a, data = run.args, prepare_task(run, name)
    torch.manual_seed(seed)
    model = build_model(run, name, data)
    groups = [dict(params=[p for name, p in model.named_parameters() if name.startswith("bag.") == is_bag],
                   weight_decay=HashedBag.DECAY * is_bag) for is_bag in (False, True)]  # 0.0: Adam
    optimizer = torch.optim.AdamW(groups, a.lr, eps=1e-6, fused=run.device.type in ("cuda", "cpu"))
    order = [chosen for epoch in range(a.epochs) for chosen in length_batches(
        list(map(len, data.examples)), a.batch, np.random.default_rng([seed, epoch]))]
    steps, eval_every = len(order), a.eval_every or max(1, len(order) // max(1, a.epochs) // 2)

    def compute_loss(chosen):
        targets = torch.from_numpy(data.targets[chosen]).to(run.device)
        return data.loss(compute_logits(run, model, [data.examples[i] for i in chosen]), targets)

    if a.compile and order:
        torch._dynamo.config.recompile_limit = 64  # graphs of encode: tasks differ in mask, bag, length
        devices = [run.device] if run.device.type == "cuda" else []
        with torch.random.fork_rng(devices):  # the trial must not change what the training draws
            a.compile = try_compile(model, lambda: compute_loss(order[0]).backward())
    best, last, total = None, None, torch.zeros((), device=run.device)
    row = dict(task=name, seed=seed, step=0, loss=0.0)
    with tqdm(order, f"{name}, seed {seed}", steps, unit="step", disable=run.rank > 0 or None) as bar:
        for step, chosen in enumerate(bar):
            for group in optimizer.param_groups:
                group["lr"] = a.lr * learning_rate(step, steps, math.ceil(0.06 * steps))
            model.train()
            if model.config.lsh_redraw:
                model.redraw_hyperplanes(seed * 1_000_003 + step)
            optimizer.zero_grad()  # of the last step or the trial
            loss = compute_loss(chosen)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            total += loss.detach()
            if (step + 1) % eval_every == 0 or step + 1 == steps:
                row |= dict(step=step + 1, loss=total.item() / (step + 1 - row["step"]))
                last, best = evaluate(run, model, data, best, row)
                bar.set_postfix_str(f"{data.metric} {last[data.metric]:.2f}")
                total.zero_()
    if not steps:  # the checkpoint's own score
        last, best = evaluate(run, model, data, best, row)
    model.load_state_dict(best.pop("weights"))
    result = best | dict(seed=seed, last=last, metric=data.metric, n=data.n, n_train=data.rows["train"])
    os.makedirs(os.path.dirname(path), exist_ok=True)
    task = data.description() | dict(name=name, metric=data.metric, scores=best["best"])
    about = dict(words=run.checkpoint.get("words", []), task=task, run=result)
    save_checkpoint(path, model, data.tokenizer.state(), **about)
    return result


def run_jobs(run):
    """Run this rank's jobs but for those done before an interruption; return dict (task, seed) -> result."""
    a, jobs, results = run.args, list_jobs(run), {}
    for name, seed, path in jobs[run.rank::run.world]:
        if is_first := seed == a.seed:
            data = prepare_task(run, name)
            with torch.device("meta"):  # counted, not allocated
                n = count_parameters(new_model(run, data))
            if (name, seed, path) == jobs[0]:
                run.about = dict(parameters=n["total"], embedding=n["embedding"], poep=100 * n["poep"],
                                 emb=run.config.emb, pretrained="model" in run.checkpoint)
                print_settings(a, run.config, run.about, run.device)
            split = f"rows of {a.dev}" if a.dev else f"dev set, {a.data_dir or 'hub'}"
            if name == "pydoc":
                split = "held-out files of the installed Python"
            facts = dict(split=split, columns=data.columns, rows=data.rows, parameters=n["total"])
            print(f"{name}: {split}; {data.notes}", flush=True)
        result = load_checkpoint(path)["run"] if os.path.exists(path) else fit(run, name, seed, path)
        print(f"{name}, seed {seed}: {result['metric']} {result['best'][result['metric']]:.2f}", flush=True)
        results[name, seed] = result | (dict(baselines=data.baselines(), facts=facts) if is_first else {})
    return results


def write_submission(run, name):
    """Write what GLUE's server expects of the test split, or SQuAD's answers to dev; return the paths."""
    data, tests, contents = prepare_task(run, name), run.tests.get(name, {}), {}
    examples = {split: data.encode(texts)[0] for split, (texts, _) in tests.items()}
    model = build_model(run, name, data)  # subtle: after encode, which gives the test's words their IDs
    model.load_state_dict(load_checkpoint(job_path(run, name, "ckpt.pt"))["model"])
    read = functools.partial(predict, run, model)
    for split, (_, index) in tests.items():
        labels = data.submission(data.predict_labels(examples[split], read))
        suffix = dict(test_matched="-m", test_mismatched="-mm").get(split, "")
        lines = [f"{i}\t{label}\n" for i, label in zip(index, labels)]
        contents[f"{TASKS[name].folder}{suffix}.tsv"] = "index\tprediction\n" + "".join(lines)
    if not tests:
        contents["predictions.json"] = json.dumps(data.submission(read))
    for file, content in contents.items():
        Path(job_path(run, name, file)).write_text(content, encoding="utf-8")
    return [job_path(run, name, file) for file in contents]


def finish(run, done):
    """Write results.json, keep the best checkpoint of each task, and print the table; return the results."""
    a, (first, *_) = run.args, run.texts
    runs = {name: [done[name, a.seed + i] for i in range(a.seeds)] for name in run.texts}
    results = build_results(runs, run.about, run.settings, a.baseline)
    paths = [os.path.join(a.out, "results.json")]
    write_json(paths[0], results)
    for name, row in results["tasks"].items():
        best = row["seeds"][int(np.argmax(row["values"]))]
        os.replace(job_path(run, name, f"seed-{best}.pt"), job_path(run, name, "ckpt.pt"))
        for file in Path(job_path(run, name, "")).glob("seed-*.pt"):
            file.unlink()
        paths += write_submission(run, name) if a.predict else []
    print_results(results)
    print("\n".join(f"Saved {path}" for path in paths))
    task, _, dev = run.texts[first]  # the first row that was scored, its first words
    row = dev[task.dev[0]] if task else {name: [dev[0][name]] for name in ("question", "context")}
    texts = [" ".join(row[part][0].split()[:30]) for part in row if part != "labels" and row[part]]
    folder = os.path.dirname(job_path(run, first, "ckpt.pt"))
    print("Next:", shlex.join(["python", "infer.py", "--ckpt", folder, *texts]))
    return results


def parser():
    """Return the parser of all flags, grouped by idea."""
    p = argparse.ArgumentParser(
        formatter_class=HelpFormatter, description=(__doc__ or "").split("\nPaper map")[0],
        usage="python finetune.py (--ckpt DIR | --preset NAME) --task NAME [flags]  (see --help)")
    count = dict(type=at_least(1), metavar="n")
    flag = p.add_argument_group("start", "The checkpoint holds shape, hash and weights.").add_argument
    flag("--ckpt", metavar="DIR", help="folder of a run of pretrain.py, or its ckpt.pt")
    flag("--from_scratch", action="store_true", help="use the checkpoint's shape and hash, not its weights")
    flag("--preset", choices=("proformer", "canine"), help="instead of --ckpt: fresh weights [HF §4.1]")
    flag("--weights", metavar="DIR", help="folder of the released CANINE-C; requires --preset canine")
    flag = p.add_argument_group("task", "glue: the paper's eight; pydoc: a docstring's module.").add_argument
    flag("--task", choices=(*TASKS, "glue", *SQUAD, "pydoc"), help="(default: your own files)")
    flag("--data_dir", metavar="DIR", help="original files, as SST-2/train.tsv (default: the hub)")
    flag("--train", metavar="FILE", help="training rows, .tsv .csv .jsonl .parquet; of --task in its columns")
    flag("--dev", metavar="FILE", help="rows to score")
    flag("--text", metavar="COL[,COL]", help="column of the text, or of both texts; requires your own files")
    flag("--label", metavar="COL", help="column of the label; requires your own files")
    flag("--regression", action="store_true", help="regression with float labels (MSE loss)")
    flag("--limit", **count, help="training rows, drawn at random, the same for all seeds (default: all)")
    flag("--stride", **count, help="words between windows of a text; requires SQuAD (default: length / 3)")
    flag("--max_answer", **count, help="longest answer, in words; requires SQuAD (default: 30)")
    recipes = "; ".join(f"{name}: {', '.join(f'{flag} {value}' for flag, value in recipe.items())}"
                        for name, recipe in RECIPES.items())
    flag = p.add_argument_group("training", f"Recipes; paper is [HF Table 5]. {recipes}").add_argument
    flag("--recipe", choices=tuple(RECIPES), help="(default: small for a width below 512, else paper)")
    flag("--epochs", type=at_least(0, maximum=999), metavar="n", help="0 only scores (default: the recipe's)")
    flag("--batch", **count, help="examples per step (default: the recipe's)")
    flag("--lr", type=at_least(0, float), metavar="x", help="peak learning rate (default: the recipe's)")
    flag("--pool", choices=("cls", "mean"), help="what the head sees: the first position, or the mean of all "
         "(default: the recipe's; of a checkpoint that was fine-tuned before, its own)")
    flag("--bag", type=at_least(0, maximum=1 << 24), metavar="n", help="rows of a hashed bag of words beside "
         "the encoder, for tasks of one text; 0: none (default: the recipe's)")
    flag("--dropout", type=float, metavar="p", help="dropout probability (default: the checkpoint's)")
    flag("--seeds", type=at_least(1, maximum=999), default=3, metavar="N", help="runs of each task")
    flag("--seed", type=at_least(0), default=0, metavar="S", help="seed of the first run; the next has S+1")
    flag("--eval_every", **count, help="steps between evaluations (default: half an epoch)")
    flag = p.add_argument_group("report", "Beside each score: baselines without a transformer.").add_argument
    flag("--baseline", metavar="DIR", help="--out of another fine-tuning, for PRR and PCR [HF §4.4]")
    flag("--predict", action="store_true", help="write predictions of the test split for GLUE's server "
         "(it wants WNLI and AX too), or of SQuAD's dev set; afterwards: --ckpt OUT --epochs 0 --predict")
    group = p.add_argument_group("device and files", "Under torchrun each rank takes its share of the jobs.")
    add_device_flags(group.add_argument)
    group.add_argument("--cache", default="cache", metavar="DIR", help="folder of the docstrings of pydoc")
    group.add_argument("--out", metavar="DIR", help="folder of the results (default: out/CKPT-TASK)")
    return p


def main(argv=None):
    """Fine-tune as the command line, or the list argv, says; return the content of results.json on rank 0."""
    args = parser().parse_args(argv)
    with exit_on_bad_input("finetune.py", hint="Rerun the command: it keeps finished seeds."):
        run = build_run(args)
        with lock_output(args.out, run.rank):
            claim_output(run)
            done = collections.ChainMap(*gather_from_ranks(run_jobs(run)))
            barrier_before_exit()
            return finish(run, done) if run.rank == 0 else None


if __name__ == "__main__":
    main()
