"""What the benches share: a stopwatch, models and runs, comparisons, tables, a command line.

A time is the median of several rounds in one process. Functions that are compared take turns in
each round, so a busy moment of the machine slows all of them. A ratio is the median of the ratios
of the rounds. An untimed round comes first. Each table names its processor.
"""

import argparse
import collections
import contextlib
import dataclasses
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
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch

import finetune
import pretrain
from common import InputError, at_least, has_fast_bfloat16, load_checkpoint, num_cores, reading
from common import read_json, run_script, write_json
from data.corpus import Corpus, prepare
from data.tasks import read_task
from hashing import MD5
from model import PRESETS, Config, Model, count_parameters, load_model
from tokenizer import HashTokenizer

ROOT = Path(__file__).resolve().parents[1]

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
    # subtle: a spawned child starts as a fork of us, so its peak memory (ru_maxrss) starts at
    # ours; a fork server is small
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


def list_dtypes():
    """Return the dtypes in which this processor trains: bfloat16 too where hardware has it."""
    if has_fast_bfloat16(torch.device("cpu")):
        return ["float32", "bfloat16"]
    return ["float32"]


def count_sizes(**config):
    """Return count_parameters of a Config's model, which is never allocated."""
    # tensors with shapes and without memory
    with torch.device("meta"):
        return count_parameters(Model(Config.choose(config)))


def build_model(words, preset, device="cpu", **changes):
    """Return an untrained Model of a preset with changes. Its IDs: special tokens, then words."""
    model = Model(Config.choose(PRESETS[preset] | changes)).to(device)
    tokenizer = HashTokenizer(model.config, hash=MD5(), vocabulary=words)
    tokenizer.ids(words)  # it learns them
    model.set_codes(torch.from_numpy(tokenizer.codes()))
    return model


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


def load_corpus(args, split, vocab=50_000):
    """Return the Corpus of --data; vocab is the largest number of pieces of a BPE."""
    return Corpus(prepare(args.data, split, args.cache, vocab, quiet=True))


def read_glue(task, args):
    """Return the Task of a name, and its rows by split, from the files of --data_dir."""
    # the flags of finetune.py that read_task looks at
    files = argparse.Namespace(data_dir=args.data_dir, cache=args.cache, train=None, dev=None,
                               encoding=None, sep=None, header=None, limit=None, select=0.0,
                               balanced=False)
    return read_task(task, files)


def load_corpus_of(run, args):
    """Return the Corpus of --data; InputError if a checkpoint's run was trained on another one."""
    corpus = load_corpus(args, run["split"], run["vocab"])
    if corpus.meta["digest"] != run["corpus"]:
        raise InputError("--data: expected the corpus that the run was trained on, "
                         f"got {args.data}.")
    return corpus


# Comparisons of runs

Job = collections.namedtuple("Job", "name flags folder seed")


def run_main(main, argv):
    """Run the main of a script in this process. Its output goes to stderr: stdout has the table."""
    with contextlib.redirect_stdout(sys.stderr):
        main([str(word) for word in argv])


def train_variant(job):
    """Train one run; return its last evaluation, its seconds and its sizes, dict."""
    # with the start of the script and its evaluations
    start = time.perf_counter()
    run_main(pretrain.main, [*job.flags, "--seed", job.seed, "--out", job.folder])
    seconds = time.perf_counter() - start
    sizes = count_sizes(**load_checkpoint(job.folder)["config"])
    result = dict(parameters=sizes["total"], table=sizes["embedding"], seconds=seconds)
    return read_log(job.folder)[-1] | result


def finetune_run(job, start, tasks, flags, main=finetune.main):
    """Fine-tune with the seed of a job.

    Args:
        job: Job.
        start: list of flags, --ckpt or --preset with its value.
        tasks: dict, task -> epochs.
        flags: list of flags, for all tasks.
        main: function(argv) of finetune.py or baselines/canine.py.

    Returns:
        dict: for each task TASK, its score; TASK_loss, on the rows that are scored; TASK_bag, the
        score of the bag of words, where there is one; TASK_em, for SQuAD.
    """
    scores = {}
    for task, epochs in tasks.items():
        out = f"{job.folder}-{task}"
        run = ["--task", task, "--epochs", epochs, "--seeds", 1, "--seed", job.seed, "--out", out]
        run_main(main, [*start, *run, *flags])
        result = read_json(f"{out}/results.json")["tasks"][task]
        scores[task] = result["mean"]
        scores[f"{task}_loss"] = result["all_metrics"]["eval_loss"]
        if result["bag_of_words"] is not None:
            scores[f"{task}_bag"] = result["bag_of_words"]
        if "em" in result["all_metrics"]:
            scores[f"{task}_em"] = result["all_metrics"]["em"]
    return scores


def run_jobs(function, jobs):
    """Yield function(job) for each job, in order, by a process per core with one thread each."""
    # spawn, as a fork of a process with threads may hang. One thread each: runs share no core
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(num_cores(), context, torch.set_num_threads, (1,)) as pool:
        yield from pool.map(function, jobs)


def compare(args, variants, shared=(), train=train_variant):
    """Train variants with the same budget, with several seeds each.

    Args:
        args: Namespace with the flags of COMPARE, and text or data_dir where a bench has them.
        variants: dict, name -> list of flags of pretrain.py.
        shared: list of flags, for all variants.
        train: function(job) that returns a dict of results. It runs in another process.

    Yields:
        dict, a row per variant: its settings, and for each result KEY its mean, KEY_std, the
        standard deviation, and KEY_all, the values by seed.
    """
    # names hold spaces and commas, so --only is a pattern
    with reading("--only"):
        names = [name for name in variants if re.search(args.only, name)]
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
                flags = [*shared, *variants[name], *budget]
                jobs.append(Job(name, flags, f"{folder}/{len(jobs)}", seed))
        # a generator: rows come while later jobs are running
        results = run_jobs(train, jobs)
        # in the order of jobs: all seeds of the first name, then those of the next
        for name in names:
            row = dict(name=name, flags=" ".join(map(str, [*shared, *variants[name]])))
            runs = list(itertools.islice(results, args.seeds))
            for key in runs[0]:
                values = [run[key] for run in runs]
                row[key] = statistics.mean(values)
                row[f"{key}_all"] = values
                # the deviation of one value is unknown, not 0
                if len(values) > 1:
                    row[f"{key}_std"] = statistics.stdev(values)
            yield row


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


# Tables


def markdown(rows, columns):
    """Return rows, list of dict, as a markdown table.

    Args:
        rows: list of dict. Where a row has no value, the table says "not measured".
        columns: str, a line per column: key, format, heading. "ms ,.0f ms per step" shows row["ms"]
            under the heading "ms per step", with f"{value:,.0f}". The format ± shows mean ±
            standard deviation (KEY and KEY_std) with three digits, ±1 with one. A column that no
            row has is left out.
    """
    shown = []  # (key, format, heading)
    for column in columns.strip().splitlines():
        key, form, *heading = column.split(maxsplit=2)
        # None shows as not measured; a column without the key is hidden
        if any(key in row for row in rows):
            shown.append((key, form, " ".join(heading)))
    lines = [
        [heading for _, _, heading in shown],
        ["---" if form[0] in "s±" else "--:" for _, form, _ in shown],
    ]
    for row in rows:
        lines.append([format_cell(row, key, form) for key, form, _ in shown])
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def format_cell(row, key, form):
    """Return a cell of a table, whose formats `markdown` describes."""
    value = row.get(key)
    if value is None:
        return "not measured"
    if form[0] != "±":
        return format(value, form)
    digits = form[1:] or "3"
    text = f"{value:.{digits}f}"
    std = row.get(f"{key}_std")
    if std is not None:
        text += f" ± {std:.{digits}f}"
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
    """Return the commit of this project; numbers without it cannot be repeated."""
    git = ["git", "-C", ROOT]
    try:
        commit = subprocess.check_output([*git, "rev-parse", "--short", "HEAD"], text=True).strip()
        changes = subprocess.check_output([*git, "diff", "HEAD", "--", "*.py"])
    except (OSError, subprocess.CalledProcessError):  # no git, or no clone
        return "unknown"
    if changes:
        commit += "+changes"  # which nobody can check out
    return commit


def caption(result):
    """Return the line below a table: its command, and where and when it was measured."""
    place = "on {device}, torch {torch}, commit {commit}, {date}.\n".format(**result["machine"])
    return f"`{result['command']}` {place}"


# Command line


@dataclasses.dataclass
class Bench:
    """A command of a bench file: a table, or files such as figures."""
    function: Callable  # (args) yields the rows of a table, dict; or writes files of its own
    columns: str = ""  # the columns of the table, see markdown; "" where there is none
    flags: dict = dataclasses.field(default_factory=dict)  # flag -> its default, or REQUIRED


REQUIRED = "required"  # in place of a flag's default
COMPARE = dict(data="python", steps=200, seeds=3, only=".", cache="cache")  # defaults of compare
FLAGS = {  # flag -> options of add_argument
    "alpha": dict(type=at_least(1), help="number of items that share a hash token"),
    "cache": dict(help="folder of prepared corpora"),
    "data": dict(help="corpus or item sets, as --data of pretrain.py"),
    "data_dir": dict(help="folder with the files of GLUE"),
    "device": dict(help="cpu, or cuda for a GPU"),
    "only": dict(help="regular expression: run the variants whose names match"),
    "runs": dict(nargs="+", help="folders of trained runs"),
    "seeds": dict(type=at_least(1, maximum=1_000), help="number of runs of each variant"),
    "steps": dict(type=at_least(1), help="number of optimizer steps of a run"),
    "text": dict(help="file of texts, a line each, in which words are hidden; no part of --data"),
}


def build_parser(doc, benches):
    """Return the parser of a bench file: its docstring, and its dict, command -> Bench."""
    p = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = p.add_subparsers(dest="name", required=True, metavar="NAME")
    for name, bench in benches.items():
        # the summary of the function is the help of its command
        title = bench.function.__doc__.splitlines()[0]
        command = commands.add_parser(name, help=title, description=title)
        if bench.columns:
            command.add_argument("--json", metavar="FILE", help="write the table to it as JSON")
        for flag, default in bench.flags.items():
            options = FLAGS[flag] | dict(metavar=flag.upper(), required=default == REQUIRED)
            if default not in (None, REQUIRED):
                options["default"] = default
                options["help"] += f" (default: {default})"
            command.add_argument(f"--{flag}", **options)
    return p


def run_command(subject, doc, benches, argv=None):
    """Run the command line of bench/SUBJECT.py, or argv. Bad input ends it with one line."""
    if argv is None:
        argv = sys.argv[1:]
    run_script(f"bench.{subject}", measure, subject, doc, benches, argv)


def measure(subject, doc, benches, argv):
    """Measure one table, print it, and write it to --json."""
    args = build_parser(doc, benches).parse_args(argv)
    bench = benches[args.name]
    if not bench.columns:
        bench.function(args)
        return
    # before the work, which may take hours
    if args.json and not Path(args.json).absolute().parent.is_dir():
        raise InputError(f"--json: expected a file in a folder that exists, got {args.json}.")
    command = shlex.join(["python", "-m", f"bench.{subject}", *argv])
    result = dict(bench=args.name, machine=describe_machine(), command=command, rows=[])
    for row in bench.function(args):
        print(row, file=sys.stderr, flush=True)
        result["rows"].append(row)
        if args.json:  # after each row: what is measured stays if the next one fails
            write_json(args.json, result)
    print(f"\n{markdown(result['rows'], bench.columns)}\n{caption(result)}")
