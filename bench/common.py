"""What all benches share: a stopwatch, the stamp of a table, result files, many runs at once, flags.

A time is the median of several rounds in one process, and functions that are compared take turns: a busy moment of
the machine hits all alike. A ratio is the median of the ratios of the rounds. Every table names its processor.
"""

import argparse, contextlib, io, json, multiprocessing, os, platform, re, resource, shlex
import statistics, subprocess, sys, tempfile, time
from concurrent.futures import ProcessPoolExecutor
from typing import Callable, NamedTuple

import torch

import finetune
import pretrain
from data.corpus import Corpus, prepare
from hashing import MD5
from model import PRESETS, Config, Model, count_parameters, load_model, parameter_groups
from runtime import HelpFormatter, InputError, at_least, autocast, exit_on_bad_input, load_checkpoint, num_cores
from tokenizer import HashTokenizer

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


class Stopwatch:
    """Times of functions that take turns, after one untimed round.

    Args: functions dict, name -> function(); rounds int; clock function() -> seconds.
    """

    def __init__(self, functions, rounds=7, clock=time.perf_counter):
        self.times = {name: [] for name in functions}
        for turn in range(rounds + 1):
            for name, function in functions.items():
                start = clock()
                function()
                if torch.cuda.is_available():
                    torch.cuda.synchronize()
                seconds = clock() - start
                self.times[name] += [seconds] * (turn > 0)

    def ms(self):
        """Return dict, name -> median milliseconds."""
        return {name: 1000 * statistics.median(times) for name, times in self.times.items()}

    def ratio(self, slow, fast):
        """Return how many times as long `slow` takes as `fast`: the median of the ratios of the rounds."""
        return statistics.median(a / b for a, b in zip(self.times[slow], self.times[fast]))


def run_in_new_process(function, *args):
    """Return function(*args), computed by a fresh process: its memory and its first calls are its own."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *args).result()


def measure_memory(function, *args):
    """Return function(*args), and the peak memory in GiB of this process or the largest of its children."""
    result, who = function(*args), (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    return result, max(resource.getrusage(each).ru_maxrss for each in who) / 2**20


def made_up_words(stop, start=0):
    """Return distinct made-up words number start .. stop-1, list[str] of 2 to 10 letters: a syllable per digit."""
    syllables, words = [a + b for a in "bcdfghjklmnprstvwxyz" for b in "aeiou"], []
    for i in range(start, stop):
        i, word = i * 7_919 % 100**5, ""  # prime to 100: neighbors in the list have unrelated spellings
        while not word or i:
            i, digit = divmod(i, 100)
            word = syllables[digit] + word
        words.append(word)
    return words


def sizes_of(**config):
    """Return count_parameters of a Config's model, which is never allocated."""
    with torch.device("meta"):
        return count_parameters(Model(Config(**config)))


def build_model(words, preset, **changes):
    """Return an untrained Model of a preset with changes, whose token IDs are the special tokens and then words."""
    config = Config(**PRESETS[preset] | changes)
    tokenizer = HashTokenizer(config, hash=MD5(), vocabulary=words)
    tokenizer.ids(words)
    net = Model(config)
    net.set_codes(torch.from_numpy(tokenizer.codes()))
    return net


def training_step(net, compute_loss, dtype="bfloat16", clip=None):
    """Return a function that takes one training step: forward, backward, AdamW.

    Args: net Module; compute_loss function() -> 0-dim tensor; dtype str, of products; clip float, gradient norm.
    """
    optimizer = torch.optim.AdamW(parameter_groups(net, 0.01), fused=True)

    def step():
        with autocast(torch.device("cpu"), dtype):
            loss = compute_loss()
        loss.backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(net.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return step


def run_name(folder):
    """Return the name of a run in tables: its folder's."""
    return os.path.basename(os.path.normpath(folder))


def load_run(folder):
    """Return Model, HashTokenizer and checkpoint of a trained run."""
    checkpoint = load_checkpoint(folder)
    net = load_model(checkpoint)
    return net, HashTokenizer.load(checkpoint["encoder"], net.config), checkpoint


def load_corpus(args, split, checkpoint=None):
    """Return the Corpus of --data and --cache. InputError: the run of the checkpoint was trained on another one."""
    vocab = checkpoint["run"]["vocab"] if checkpoint and split != "items" else 50_000
    corpus = Corpus(prepare(args.data, split, args.cache, vocab, quiet=True))
    if checkpoint and corpus.meta["digest"] != checkpoint["run"]["corpus"]:
        raise InputError(f"--data: expected the corpus that the run was trained on, got {args.data}.")
    return corpus


def run_quietly(main, argv):
    """Run the main of a script in this process; its output is shown only if it fails."""
    argv, output = list(map(str, argv)), io.StringIO()
    try:
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            main(argv)
    except SystemExit as error:
        if error.code:
            raise InputError(f"{main.__module__}.py {shlex.join(argv)}: {output.getvalue()[-2000:]}") from None


def finetune_run(folder, seed, tasks, flags):
    """Fine-tune the checkpoint in a folder; return dict, task -> score, of tasks dict, name -> epochs."""
    scores = {}
    for task, epochs in tasks.items():
        out = f"{folder}-{task}"
        run_quietly(finetune.main, ["--ckpt", folder, "--task", task, "--epochs", epochs, "--seeds", 1, "--seed", seed,
                                    "--out", out, *flags])
        with open(os.path.join(out, "results.json")) as file:
            scores[task] = json.load(file)["tasks"][task]["mean"]
    return scores


def train_variant(job):
    """Train one run; return what its last evaluation says, its sizes, and what `after` adds."""
    _, flags, folder, seed, after = job
    run_quietly(pretrain.main, [*flags, "--seed", seed, "--out", folder])
    sizes = sizes_of(**load_checkpoint(folder)["config"])
    with open(os.path.join(folder, "log.jsonl")) as file:
        *_, row = map(json.loads, file)
    del row["step"]
    return row | dict(parameters=sizes["total"], table=sizes["embedding"]) | (after(folder, seed) if after else {})


def run_jobs(function, jobs):
    """Yield function(job) of each job in order: as many at once as there are cores, with one thread each."""
    if len(jobs) < 2:
        yield from map(function, jobs)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(num_cores(), context, torch.set_num_threads, (1,)) as pool:
        yield from pool.map(function, jobs)


def compare(args, variants, *flags, after=None, train=train_variant):
    """Train variants with several seeds each. Rows of the same budget in --json stay: a table can be resumed.

    Args:
        args: Namespace with data, steps, seeds, only, cache, json; text and data_dir where the bench has them.
        variants: dict, name -> flags of pretrain.py. flags: those of all variants.
        after: function(folder of a run, seed) -> dict of more results.
        train: function(tuple of name, flags, folder, seed, after) -> dict of results.

    Returns:
        list of rows: the settings, and of each result KEY the mean, KEY_std and KEY_all, one number per seed.
    """
    settings, rows, results = {}, {}, {}
    for name in (name for name in variants if re.search(args.only, name)):
        settings[name] = dict(data=args.data, steps=args.steps, seeds=args.seeds,
                              flags=" ".join(map(str, [*flags, *variants[name]])),
                              **{k: v for k in ("text", "data_dir") if (v := getattr(args, k, None))})
    if args.json and os.path.exists(args.json):
        with open(args.json) as file:
            rows = {row["name"]: row for row in json.load(file)["rows"]
                    if settings.get(row["name"], {"": 0}).items() <= row.items()}
    budget = ["--data", args.data, "--steps", args.steps, "--cache", args.cache, "--eval_every", args.steps,
              "--save_every", 10**9]
    with tempfile.TemporaryDirectory() as folder:
        jobs = [(name, [*flags, *variants[name], *budget], os.path.join(folder, f"{i}-{seed}"), seed, after)
                for i, name in enumerate(settings) if name not in rows for seed in range(args.seeds)]
        for (name, *_), result in zip(jobs, run_jobs(train, jobs)):
            results.setdefault(name, []).append(result)
            print(name, result, file=sys.stderr, flush=True)
    for name in results:
        rows[name] = dict(name=name) | settings[name]
        for key in results[name][0]:
            values = [result[key] for result in results[name]]
            std = statistics.stdev(values) if len(values) > 1 else None
            rows[name] |= {key: statistics.mean(values), f"{key}_std": std, f"{key}_all": values}
    return [rows[name] for name in settings]


def markdown(rows, columns):
    """Return rows, list of dict, as a markdown table.

    columns is "KEY:FORMAT:HEADING | ...". The format ± shows mean ± standard deviation with three digits, ±1 with
    one. Of a table with such a format, a column that no row has is left out.
    """
    def cell(row, key, form):
        if row.get(key) is None:
            return "—"
        if "±" not in form:
            return format(row[key], form)
        digits, std = form[1:] or "3", row.get(f"{key}_std")
        return f"{row[key]:.{digits}f}" + ("" if std is None else f" ± {std:.{digits}f}")

    has_spread, columns = "±" in columns, [column.split(":") for column in columns.split(" | ")]
    columns = [c for c in columns if not has_spread or any(c[0] in row for row in rows)]
    lines = [[heading for _, _, heading in columns],
             ["---" if form[:1] in ("", "s", "±") else "--:" for _, form, _ in columns]]
    lines += [[cell(row, key, form) for key, form, _ in columns] for row in rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def write_result(path, subject, name, argv, rows):
    """Write rows to a JSON file, with the command, and where and of which commit they were measured."""
    def git(*command):
        return subprocess.run(["git", *command], cwd=ROOT, capture_output=True, text=True).stdout.strip()

    device = f"{os.cpu_count()} cores, {platform.processor() or platform.machine()}"
    if torch.cuda.is_available():
        device = torch.cuda.get_device_name()
    elif os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo") as file:
            names = [line.split(":")[1].strip() for line in file if line.startswith("model name")]
        device = f"{os.cpu_count()} cores, {names[0]}" if names else device
    commit = git("rev-parse", "--short", "HEAD") + "+changes" * bool(git("diff", "HEAD", "--", "*.py"))
    machine = dict(device=device, torch=torch.__version__, commit=commit, date=time.strftime("%Y-%m-%d"))
    command = re.sub(r" --cache \S+", "", f"python -m bench.{subject} {shlex.join(argv)}")  # any folder will do
    command = re.sub(r"--runs( (?!--)\S+)+", "--runs out/*", command)  # before the shell expanded it
    with open(path, "w") as file:
        json.dump(dict(bench=name, machine=machine, command=command, rows=rows), file, indent=1)
        file.write("\n")


REQUIRED = object()
COMPARE = dict(data="python", steps=200, seeds=3, only="", cache="cache")  # flags of compare and their defaults
HELP = dict(data="corpus or item sets, as --data of pretrain.py", cache="folder of prepared corpora",
            steps="optimizer steps of a run", seeds="runs of each variant", alpha="items that share a hash token",
            only="run the variants whose names match this regular expression", count="number of distinct words",
            data_dir="folder with the files of GLUE", text="file with texts to hide words of, one a line",
            runs="folders of trained runs", assets="folder of the figures")


class Bench(NamedTuple):
    """A subcommand: function(args) -> rows, columns of their table as for markdown, flag -> default or REQUIRED."""

    function: Callable
    columns: str = ""
    flags: dict = {}


def parser(doc, benches):
    """Return the parser of a bench file: doc str, its docstring; benches dict, subcommand -> Bench."""
    p = argparse.ArgumentParser(description=doc, formatter_class=HelpFormatter)
    commands = p.add_subparsers(dest="name", required=True, metavar="NAME")
    for name, bench in benches.items():
        title = bench.function.__doc__.splitlines()[0].replace("%", "%%")
        command = commands.add_parser(name, help=title, description=title, formatter_class=HelpFormatter)
        command.add_argument("--json", metavar="FILE", help="result file, such as results/NAME.json for the README")
        for flag, default in bench.flags.items():
            options = dict(required=True) if default is REQUIRED else dict(default=default)
            options |= dict(type=at_least(1)) if isinstance(default, int) else {}
            options |= dict(nargs="+") if flag == "runs" else {}
            command.add_argument(f"--{flag}", help=HELP[flag], metavar=flag.upper(), **options)
    return p


def run_command(subject, doc, benches, argv=None):
    """Run the command line of bench/SUBJECT.py: print a table and write it to --json."""
    argv = sys.argv[1:] if argv is None else argv
    args = parser(doc, benches).parse_args(argv)
    bench = benches[args.name]
    with exit_on_bad_input(f"bench.{subject}"):
        if rows := bench.function(args):
            print(f"\n{bench.function.__doc__.splitlines()[0]}\n\n{markdown(rows, bench.columns)}", flush=True)
            if args.json:
                write_result(args.json, subject, args.name, argv, rows)
