"""What the benches share: the command line that prints a table, a stopwatch, models, comparisons.

Each bench file has TABLES: dict, name of a table -> (function, columns, flags). For example,
`python -m bench.sketch gaps --seeds 1` calls bench_gaps(args) of bench/sketch.py, which yields a
dict a row; print_table prints the rows in the columns GAPS.

A time is the median of several rounds in one process. Functions that are compared take turns in
each round, so a busy moment of the machine slows all of them. A ratio is the median of the ratios
of the rounds. An untimed round comes first. Each table names its processor.
"""

import contextlib
import itertools
import json
import multiprocessing
import os
import platform
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

import finetune
import pretrain
from data.corpus import Corpus, prepare
from data.tasks import read_task
from hashing import MD5
from model import PRESETS, Config, Model, count_parameters, load_model
from support.common import InputError, at_least, load_checkpoint, make_parser, num_cores
from support.common import read_json, run_script, write_json
from support.results import read_result
from tokenizer import HashTokenizer, make_tokenizer

ROOT = Path(__file__).resolve().parents[1]

# Command line

REQUIRED = "required"  # in place of a flag's default
# flags of tables, with their defaults
RUNS = dict(runs=REQUIRED)
GLUE_FILES = dict(data_dir=REQUIRED, cache="cache")
CORPUS = dict(data="python", cache="cache")
COMPARE = CORPUS | dict(steps=200, seeds=3, only=".")
FLAGS = {  # flag -> options of add_argument
    "alpha": dict(
        type=at_least(1), help="number of items that share a hash token (default: %(default)s)"),
    "cache": dict(help="folder of prepared corpora (default: %(default)s)"),
    "data": dict(help="corpus or item sets, as --data of pretrain.py (default: %(default)s)"),
    "data_dir": dict(help="folder with the files of GLUE"),
    "items": dict(
        type=at_least(2),
        help="number of items, the most frequent ones, as --vocab of pretrain.py (default: all)"),
    "known": dict(help="a file of --json with runs that are not measured again"),
    "only": dict(help="regular expression: run the variants whose names match"),
    "runs": dict(nargs="+", help="folders of trained runs"),
    "seeds": dict(
        type=at_least(1), help="number of runs of a variant (default: %(default)s)"),
    "steps": dict(
        type=at_least(1), help="number of optimizer steps of a run (default: %(default)s)"),
    "text": dict(help="file of texts, a line each, in which words are hidden; no part of --data"),
}


def main(module, tables, doc, argv=None):
    """Print the table that the command line of a bench file, or the list argv, names.

    Args:
        module: str, such as bench.sketch.
        tables: dict, name of a table -> (function, columns, flags). function(args) yields the rows,
            dict; `markdown` describes columns; flags is dict, flag -> its default, or REQUIRED.
        doc: str, the docstring of the file.
    """
    if argv is None:
        argv = sys.argv[1:]
    args = build_parser(module, tables, doc).parse_args(argv)
    measure, columns, _ = tables[args.name]
    command = shlex.join(["python", "-m", module, *argv])
    # bad input ends it with one line
    run_script(module, print_table, measure, columns, args, command)


def print_table(measure, columns, args, command):
    """Print the rows of measure(args) as a table, and keep them in the file --json."""
    # before the work, which may take hours
    if args.json and not Path(args.json).absolute().parent.is_dir():
        raise InputError(f"--json: expected a file in a folder that exists, got {args.json}.")
    result = dict(
        bench=args.name, columns=columns, machine=describe_machine(), command=command, rows=[])
    with contextlib.redirect_stdout(sys.stderr):  # progress: stdout has the table
        for row in measure(args):
            print(row)
            result["rows"].append(row)
            if args.json:  # after each row: what is measured stays if the next one fails
                write_json(args.json, result)
    print(f"\n{markdown(result['rows'], columns)}\n{caption(result)}")


def build_parser(module, tables, doc=""):
    """Return the parser of a bench file: a command for each table, with the flags that it reads."""
    p = make_parser(f"python -m {module}", doc)
    commands = p.add_subparsers(dest="name", required=True, metavar="NAME")
    for name, (measure, _, flags) in tables.items():
        # the summary of the function is the help of its command
        title = measure.__doc__.splitlines()[0]
        command = commands.add_parser(name, help=title, description=title)
        command.add_argument("--json", metavar="FILE", help="write the table to it as JSON")
        for flag, default in flags.items():
            command.add_argument(
                f"--{flag}", default=default, required=default == REQUIRED, **FLAGS[flag])
    return p


def read_known(args):
    """Return the rows of the file --known by their names, dict; {} where there is no file."""
    if args.known is None or not Path(args.known).exists():
        return {}
    return {row["name"]: row for row in read_json(args.known)["rows"]}


# Tables


def markdown(rows, columns):
    """Return rows, list of dict, as a markdown table.

    Args:
        rows: list of dict.
        columns: str, a line per column: heading | key | format. The line "ms per step | ms | .1f"
            shows row["ms"] as format(row["ms"], ".1f") does. The format ".1f ±" adds the row's
            value of the key "ms_std". A column whose key no row has is left out.
    """
    lines = [[], []]  # headings, and the rules below them
    shown = []
    for column in columns.strip().splitlines():
        heading, key, form = [part.strip() for part in column.split("|")]
        if any(key in row for row in rows):
            lines[0].append(heading)
            is_text = form == "s" or "±" in form
            lines[1].append("---" if is_text else "--:")  # numbers are set to the right
            shown.append((key, form))
    for row in rows:
        lines.append([format_cell(row, key, form) for key, form in shown])
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def format_cell(row, key, form):
    """Return row[key] in a format, such as ".1f ±"; "not measured" where it is None or missing."""
    if row.get(key) is None:
        return "not measured"
    number = form.removesuffix(" ±")
    text = format(row[key], number)
    std = row.get(f"{key}_std")
    if "±" in form and std is not None:  # one seed has no deviation
        text += f" ± {std:{number}}"
    return text


def describe_machine():
    """Return dict of device, torch, commit and date: where and when a table was measured."""
    processor = platform.processor()
    if torch.cuda.is_available():
        processor = torch.cuda.get_device_name()
    elif os.path.exists("/proc/cpuinfo"):  # on Linux Python knows no name
        names = re.findall(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
        if names:
            processor = names[0]
    return dict(device=f"{num_cores()} cores, {processor}", torch=torch.__version__,
                commit=describe_commit(), date=time.strftime("%Y-%m-%d"))


def describe_commit():
    """Return the commit of this project; values without it cannot be repeated."""
    git = ["git", "-C", ROOT]
    try:
        commit = subprocess.check_output([*git, "rev-parse", "--short", "HEAD"], text=True).strip()
        # with new files, which git diff leaves out
        changes = subprocess.check_output([*git, "status", "--porcelain", "--", "*.py"])
    except (OSError, subprocess.CalledProcessError):  # no git, or no clone
        return "unknown"
    if changes:
        commit += "+changes"  # which nobody can check out
    return commit


def caption(result):
    """Return the line below a table: its command, and where and when it was measured."""
    place = "on {device}, torch {torch}, commit {commit}, {date}.\n".format(**result["machine"])
    return f"`{result['command']}` {place}"


# Time


class Stopwatch:
    """Time functions that take turns.

    Args:
        functions: dict, name -> function(). What they return is ignored.
        rounds: int, timed calls of each function, after one that is not timed.

    Attributes:
        times: dict, name -> list of the seconds of each round.
        ms: dict, name -> median milliseconds.
    """

    def __init__(self, functions, rounds):
        self.times = {name: [] for name in functions}
        for turn in range(rounds + 1):
            for name, function in functions.items():
                start = time.perf_counter()
                function()
                seconds = time.perf_counter() - start
                if turn > 0:  # the first call allocates memory and fills caches
                    self.times[name].append(seconds)
        self.ms = {name: 1000 * statistics.median(times) for name, times in self.times.items()}

    def ratio(self, slow, fast):
        """Return how many times as long `slow` takes as `fast`."""
        # within a round the machine was as busy for one as for the other
        pairs = zip(self.times[slow], self.times[fast])
        return statistics.median(a / b for a, b in pairs)


def run_in_new_process(function, *args):
    """Return function(*args), computed by a fresh process, whose peak memory is its own."""
    # subtle: ru_maxrss of a spawned process starts at the parent's peak. Workers of a fork server
    # start from its own, which is small
    context = multiprocessing.get_context("forkserver")
    with ProcessPoolExecutor(1, context) as pool:
        return pool.submit(function, *args).result()


# Words, models and runs

SYLLABLES = [a + b for a, b in itertools.product("bcdfghjklmnprstvwxyz", "aeiou")]  # 100


def made_up_words(count):
    """Return distinct made-up words of 2 to 10 letters, list[str]."""
    words = []
    for i in range(count):
        # a syllable for two digits. 7,919 is prime to 100: neighbors have unrelated spellings
        number = i * 7_919 % 100**5
        word = SYLLABLES[number % 100]
        while number >= 100:
            number //= 100
            word = SYLLABLES[number % 100] + word
        words.append(word)
    return words


def count_sizes(config):
    """Return count_parameters of the model of a dict of Config's fields. It is never allocated."""
    # tensors with shapes and without memory
    with torch.device("meta"):
        return count_parameters(Model(Config.choose(config)))


def build_model(words, preset, device="cpu", **changes):
    """Return an untrained Model of a preset with changes. Its IDs: special tokens, then words."""
    model = Model(Config.choose(PRESETS[preset] | changes)).to(device)
    tokenizer = make_tokenizer(model.config, hash=MD5(), vocabulary=words)
    tokenizer.ids(words)  # it learns them
    set_codes(model, tokenizer)
    return model


def set_codes(model, tokenizer):
    """Give a model the codes of all words that its tokenizer has met."""
    model.set_codes(torch.from_numpy(tokenizer.codes()))


def read_log(folder):
    """Return the log of a pre-training, list of dict."""
    lines = Path(folder, "log.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def load_run(folder):
    """Return Model, HashTokenizer and checkpoint of a trained run."""
    checkpoint = load_checkpoint(folder)
    model = load_model(checkpoint)
    tokenizer = HashTokenizer.load(checkpoint["tokenizer"], model.config)
    return model, tokenizer, checkpoint


@torch.no_grad()
def walk_layers(model, tokenizer, ids):
    """Yield queries and keys (B, H, L, e) of each layer, on token IDs (B, L) without padding."""
    set_codes(model, tokenizer)
    x = model.inputs(ids, model.look_up_codes(ids)).flatten(1, 2)  # (B, L·m, d)
    for layer in model.layers:
        q, k, _ = layer.attention.project(x)
        yield q, k
        x = layer(x)


def load_corpus(args, split, vocab=50_000):
    """Return the Corpus of --data; vocab is the largest number of pieces of a BPE."""
    return Corpus(prepare(args.data, split, args.cache, vocab))


def read_glue(task, args):
    """Return the Task of a name, and its rows by split, from the files of --data_dir."""
    # --ckpt is required, and read_task does not look at it
    flags = ["--ckpt", "", "--select", "0", "--data_dir", args.data_dir, "--cache", args.cache]
    return read_task(task, finetune.build_parser().parse_args(flags))


def load_run_with_corpus(folder, args):
    """Return Model, HashTokenizer, Corpus of --data and flags, dict, of a trained run.

    The model has the codes of all words of the corpus.

    Raises:
        InputError: The run was trained on another corpus.
    """
    model, tokenizer, checkpoint = load_run(folder)
    run = checkpoint["run"]
    corpus = load_corpus(args, run["split"], run["vocab"])
    if corpus.meta["digest"] != run["corpus"]:
        raise InputError("--data: expected the corpus that the run was trained on, "
                         f"got {args.data}.")
    tokenizer.ids(corpus.words)  # it learns them
    set_codes(model, tokenizer)
    return model, tokenizer, corpus, run


def name_run(settings, task):
    """Return "model, task" as tables show it; settings are those in results.json of finetune.py."""
    # the folder of the user's file tells one own task from another
    if task == "own":
        task = Path(settings["train"]).absolute().parent.name
    name = settings["preset"]
    if name is None:
        name = Path(settings["ckpt"]).name
    if settings["from_scratch"]:
        name += ", from scratch"
    if settings["select"] == 0:
        name += ", last weights"
    return f"{name}, {task}"


# Comparisons of runs


class Job(NamedTuple):
    """A run in a comparison."""
    name: str  # the variant
    flags: list  # for pretrain.py, without --seed and --out
    seed: int
    folder: str  # --out


def compare(args, variants, train, shared=""):
    """Train variants with the same budget, with several seeds each.

    Args:
        args: Namespace with the flags of COMPARE.
        variants: dict, name -> str, flags of pretrain.py.
        train: function(job) that returns a dict of results, such as train_variant. It runs in
            another process.
        shared: str, flags for all variants.

    Yields:
        dict, a row per variant: its name and flags, and for each result KEY its mean over seeds,
        KEY_std, its standard deviation, and KEY_all, its values.
    """
    # names hold spaces and commas, so --only is a pattern
    try:
        names = [name for name in variants if re.search(args.only, name)]
    except re.error as error:
        raise InputError(f"--only: expected a regular expression, got {args.only} ({error}).")
    if not names:
        raise InputError(f"--only: expected a regular expression of {', '.join(variants)}, "
                         f"got {args.only}.")
    # one evaluation at the end, and no checkpoint before
    budget = ["--data", args.data, "--steps", args.steps, "--cache", args.cache,
              "--eval_every", args.steps, "--save_every", 10**9]
    with tempfile.TemporaryDirectory() as folder:
        jobs = []
        for name in names:
            for seed in range(args.seeds):
                flags = [*shared.split(), *variants[name].split(), *budget]
                jobs.append(Job(name, flags, seed, f"{folder}/{len(jobs)}"))
        # an iterator in the order of jobs: a row comes while later jobs are running
        results = run_jobs(train, jobs)
        for name in names:
            runs = [next(results) for _ in range(args.seeds)]
            flags = f"{shared} {variants[name]}"
            yield dict(name=name, flags=flags.strip()) | summarize(runs)


def run_jobs(function, jobs):
    """Yield function(job) for each job, in order, by a process per core with one thread each."""
    # spawn, as a fork of a process with threads may hang. One thread each: runs share no core
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(num_cores(), context, torch.set_num_threads, (1,)) as pool:
        yield from pool.map(function, jobs)


def summarize(runs):
    """Return the mean of each KEY of the runs, list of dict, with KEY_std and KEY_all.

    A KEY_rows holds a number for each scored row, in a str: all runs' are kept, as a list.
    """
    row = {}
    for key in runs[0]:
        if key.endswith("_rows"):
            row[key] = [run[key] for run in runs]
            continue
        values = [run[key] for run in runs]
        row[key] = statistics.mean(values)
        row[f"{key}_all"] = values
        # the deviation of one value is unknown, not 0
        if len(values) > 1:
            row[f"{key}_std"] = statistics.stdev(values)
    return row


def train_variant(job):
    """Train one run; return its last evaluation, its seconds and its sizes, dict."""
    # with the start of the script and its evaluations
    start = time.perf_counter()
    run_main(pretrain.main, [*job.flags, "--seed", job.seed, "--out", job.folder])
    seconds = time.perf_counter() - start
    sizes = count_sizes(load_checkpoint(job.folder)["config"])
    result = dict(parameters=sizes["total"], table=sizes["embedding"], seconds=seconds)
    return read_log(job.folder)[-1] | result


def finetune_run(job, start, tasks, flags, main=finetune.main):
    """Fine-tune a model with the seed of a job.

    Args:
        job: Job.
        start: list of flags, --ckpt or --preset with its value.
        tasks: dict, task -> epochs.
        flags: list of flags, for all tasks.
        main: function(argv) of finetune.py or baselines/canine.py.

    Returns:
        dict: for each task TASK, its score; TASK_loss, on the rows that are scored; TASK_bag, the
        score of the bag of words, where there is one; TASK_em, for SQuAD; TASK_rows and
        TASK_bag_rows, of an accuracy: the rows that are right, as list_right says, by which two
        models are compared row by row (bench/claims.py).
    """
    scores = {}
    for task, epochs in tasks.items():
        out = f"{job.folder}-{task}"
        run = ["--task", task, "--epochs", epochs, "--seeds", 1, "--seed", job.seed, "--out", out]
        run_main(main, [*start, *run, *flags])
        scores |= read_scores(out, task)
    return scores


def read_scores(out, task):
    """Return the scores of a fine-tuning in the folder out, as finetune_run does for each task."""
    result = read_json(f"{out}/results.json")["tasks"][task]
    scores = {task: result["mean"], f"{task}_loss": result["all_metrics"]["eval_loss"]}
    if result["bag_of_words"] is not None:
        scores[f"{task}_bag"] = result["bag_of_words"]
    if "em" in result["all_metrics"]:
        scores[f"{task}_em"] = result["all_metrics"]["em"]
    for path in Path(out).glob(f"{task}-seed-*.json"):  # one: a run has one seed
        job = read_result(path)
        if job.metric == "accuracy":
            scores[f"{task}_rows"] = list_right(job.model, job.truth)
            if job.control is not None:
                scores[f"{task}_bag_rows"] = list_right(job.control, job.truth)
    return scores


def list_right(outcome, truth):
    """Return 100 for each row that an Outcome has right, 0 for the others, as a str."""
    is_right = np.array(outcome.predicted) == np.array(truth)
    return " ".join("100" if right else "0" for right in is_right)


def run_main(main, argv):
    """Run the main of a script in this process. Its output goes to stderr: stdout has the table."""
    with contextlib.redirect_stdout(sys.stderr):
        main([str(word) for word in argv])
