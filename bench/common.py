"""What all benches share: a stopwatch, models and runs, comparisons of runs, result tables, a command line.

A time is the median of several rounds in one process. Compared functions take turns: a busy moment of the
machine hits all alike. A ratio is the median of the ratios of the rounds. Each table names its processor.
"""

import argparse, collections, contextlib, io, json, multiprocessing, os, platform, re, resource, shlex
import statistics, subprocess, sys, tempfile, time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch

import finetune
import pretrain
from console import HelpFormatter, InputError, at_least, exit_on_bad_input
from data.corpus import Corpus, prepare
from hashing import MD5
from model import PRESETS, Config, Model, count_parameters, load_model, parameter_groups
from runtime import autocast, load_checkpoint, num_cores, resolve_device
from tokenizer import HashTokenizer

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def list_dtypes():
    """Return the dtypes in which this processor trains: float32, and bfloat16 where hardware has it."""
    _, best, _ = resolve_device(argparse.Namespace(device="cpu", dtype="auto", compile=False))
    return list(dict.fromkeys(["float32", best]))


class Stopwatch:
    """Times of functions (dict, name -> function()) that take turns, after one untimed round."""

    def __init__(self, functions, rounds, clock=time.perf_counter):
        self.times = {name: [] for name in functions}
        for turn in range(rounds + 1):
            for name, function in functions.items():
                start = clock()
                function()
                self.times[name] += [clock() - start] * (turn > 0)

    def ms(self):
        """Return dict, name -> median milliseconds."""
        return {name: 1000 * statistics.median(times) for name, times in self.times.items()}

    def ratio(self, slow, fast):
        """Return how many times as long `slow` takes as `fast`: the median of the ratios of the rounds."""
        return statistics.median(a / b for a, b in zip(self.times[slow], self.times[fast]))


def run_in_new_process(function, *args):
    """Return function(*args), computed by a fresh process: its memory and its first calls are its own."""
    # subtle: not "spawn": a child begins with the ru_maxrss of the process that calls exec, here ours
    with ProcessPoolExecutor(1, multiprocessing.get_context("forkserver")) as pool:
        return pool.submit(function, *args).result()


def measure_memory(function, *args):
    """Return function(*args), and the peak memory in GiB of this process or the largest of its children."""
    result, who = function(*args), (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    return result, max(resource.getrusage(each).ru_maxrss for each in who) / 2**20


def made_up_words(stop, start=0):
    """Return made-up words number start .. stop-1, distinct, list[str] of 2 to 10 letters."""
    syllables = [a + b for a in "bcdfghjklmnprstvwxyz" for b in "aeiou"]  # 100: one for two digits
    # 7,919 is prime to 100: neighbors in the list have unrelated spellings
    numbers = (str(i * 7_919 % 100**5) for i in range(start, stop))
    pairs = (re.findall("..", "0" * (len(number) % 2) + number) for number in numbers)
    return ["".join(syllables[int(pair)] for pair in digits) for digits in pairs]


def sizes_of(**config):
    """Return count_parameters of a Config's model, which is never allocated."""
    with torch.device("meta"):
        return count_parameters(Model(Config(**config)))


def build_model(words, preset, **changes):
    """Return an untrained Model of a preset with changes; its token IDs are special tokens, then words."""
    net = Model(Config(**PRESETS[preset] | changes))
    tokenizer = HashTokenizer(net.config, hash=MD5(), vocabulary=words)
    tokenizer.ids(words)
    net.set_codes(torch.from_numpy(tokenizer.codes()))
    return net


def training_step(net, compute_loss, dtype, clip=None):
    """Return a function that takes a training step with AdamW; clip: largest norm of the gradient."""
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


def read_json(*names):
    """Return the content of a JSON file, or the lines of a .jsonl file, as lists and dicts."""
    with open(os.path.join(*names)) as file:
        return [json.loads(line) for line in file] if file.name.endswith("l") else json.load(file)


def load_run(folder):
    """Return Model, HashTokenizer and checkpoint of a trained run."""
    net = load_model(checkpoint := load_checkpoint(folder))
    return net, HashTokenizer.load(checkpoint["encoder"], net.config), checkpoint


def load_corpus(args, split, checkpoint=None):
    """Return the Corpus of --data; InputError if the run of the checkpoint was trained on another one."""
    vocab = checkpoint["run"]["vocab"] if checkpoint else 50_000  # which only a split into pieces reads
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
            command = f"{main.__module__}.py {shlex.join(argv)}"
            raise InputError(f"{command}: {output.getvalue()[-2000:]}") from None


def finetune_run(folder, seed, tasks, flags):
    """Fine-tune the checkpoint in a folder; return dict, task -> score, of tasks dict, name -> epochs."""
    scores = {}
    for task, epochs in tasks.items():
        out = f"{folder}-{task}"
        run_quietly(finetune.main, ["--ckpt", folder, "--task", task, "--epochs", epochs, "--seeds", 1, "--bag", 0,
                                    "--seed", seed, "--out", out, *flags])
        scores[task] = read_json(out, "results.json")["tasks"][task]["mean"]
    return scores


def train_variant(job):
    """Train one run; return what its last evaluation says, its sizes, and what `after` adds."""
    _, flags, folder, seed, after = job
    run_quietly(pretrain.main, [*flags, "--seed", seed, "--out", folder])
    sizes, row = sizes_of(**load_checkpoint(folder)["config"]), read_json(folder, "log.jsonl")[-1]
    del row["step"]
    more = after(folder, seed) if after else {}
    return row | dict(parameters=sizes["total"], table=sizes["embedding"]) | more


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

    Args: args Namespace of COMPARE and json; variants dict, name -> flags of pretrain.py; flags of all;
        after function(folder, seed) -> dict of more results; train as train_variant.
    Returns: list of rows: settings, and of each result KEY the mean, KEY_std and KEY_all, one per seed.
    """
    try:
        names = [name for name in variants if re.search(args.only, name)]
    except re.error:
        names = []
    if not names:
        raise InputError(f"--only: expected a regular expression of {', '.join(variants)}, got {args.only}.")
    shared = {key: value for key in ("data", "steps", "seeds", "text", "data_dir")
              if (value := getattr(args, key, None))}
    settings = {name: shared | dict(flags=" ".join(map(str, [*flags, *variants[name]]))) for name in names}
    rows = {row["name"]: row for row in read_rows(args.json)
            if settings.get(row.get("name"), {"": 0}).items() <= row.items()}
    results = {}
    budget = ["--data", args.data, "--steps", args.steps, "--cache", args.cache, "--eval_every", args.steps,
              "--save_every", 10**9]
    with tempfile.TemporaryDirectory() as folder:
        jobs = [(name, [*flags, *variants[name], *budget], f"{folder}/{i}-{seed}", seed, after)
                for i, name in enumerate(names) if name not in rows for seed in range(args.seeds)]
        for (name, *_), result in zip(jobs, run_jobs(train, jobs)):
            results.setdefault(name, []).append(result)
            print(name, result, file=sys.stderr, flush=True)
    for name, runs in results.items():
        rows[name] = dict(name=name) | settings[name]
        for key in runs[0]:
            values = [run[key] for run in runs]
            std = statistics.stdev(values) if len(values) > 1 else None
            rows[name] |= {key: statistics.mean(values), f"{key}_std": std, f"{key}_all": values}
    return [rows[name] for name in names]


def markdown(rows, columns):
    """Return rows, list of dict, as a markdown table without the columns that no row has.

    columns is "KEY:FORMAT:HEADING | ...". The format ± shows mean ± standard deviation with three digits, ±1
    with one. A row without a key says "not measured".
    """
    def cell(row, key, form):
        if row.get(key) is None:
            return "not measured"
        if "±" not in form:
            return format(row[key], form)
        digits, std = form[1:] or "3", row.get(f"{key}_std")
        return f"{row[key]:.{digits}f}" + ("" if std is None else f" ± {std:.{digits}f}")
    columns = [column.split(":") for column in columns.split(" | ")]
    columns = [column for column in columns if any(column[0] in row for row in rows)]
    lines = [[heading for _, _, heading in columns],
             ["---" if form[:1] in ("", "s", "±") else "--:" for _, form, _ in columns],
             *([cell(row, key, form) for key, form, _ in columns] for row in rows)]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def describe_machine():
    """Return dict of device, torch, commit and date: where and of which code a table is measured."""
    def git(*command):
        return subprocess.run(["git", *command], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    cpuinfo = Path("/proc/cpuinfo").read_text() if os.path.exists("/proc/cpuinfo") else ""
    name, *_ = re.findall(r"model name\s*: (.*)", cpuinfo) + [platform.processor() or platform.machine()]
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"{os.cpu_count()} cores, {name}"
    commit = git("rev-parse", "--short", "HEAD") + "+changes" * bool(git("diff", "HEAD", "--", "*.py"))
    return dict(device=device, torch=torch.__version__, commit=commit, date=time.strftime("%Y-%m-%d"))


def caption(result):
    """Return the line below a table: its command, and where and of which commit it was measured."""
    text = "`{command}` on {device}, torch {torch}, commit {commit}, {date}.\n"
    return text.format(**result | result["machine"])


def read_rows(path):
    """Return the rows of an earlier --json file, [] without one."""
    try:
        return [dict(row) for row in read_json(path)["rows"]] if path and os.path.getsize(path) else []
    except (ValueError, KeyError, TypeError):
        raise InputError(f"--json: expected a result file of a bench, got {path}. Use another.") from None


REQUIRED = object()
COMPARE = dict(data="python", steps=200, seeds=3, only="", cache="cache")  # flags of compare, defaults
HELP = dict(data="corpus or item sets, as --data of pretrain.py", cache="folder of prepared corpora",
            steps="optimizer steps of a run", seeds="runs of each variant", runs="folders of trained runs",
            alpha="items that share a hash token", count="number of distinct words",
            only="run the variants whose names match this regular expression",
            data_dir="folder with the files of GLUE", text="file with texts to hide words of, one a line",
            device="cpu, or cuda for a GPU",
            out="folder for the figures of --runs alone (default: all figures, to assets/)")
# a subcommand: function(args) -> rows, columns as for markdown, dict, flag -> default or REQUIRED
Bench = collections.namedtuple("Bench", "function columns flags", defaults=("", {}))


def parser(doc, benches):
    """Return the parser of a bench file: doc str, its docstring; benches dict, subcommand -> Bench."""
    p = argparse.ArgumentParser(description=doc, formatter_class=HelpFormatter)
    commands = p.add_subparsers(dest="name", required=True, metavar="NAME")
    for name, bench in benches.items():
        title = (bench.function.__doc__ or name).splitlines()[0].replace("%", "%%")  # none with python -OO
        command = commands.add_parser(name, help=title, description=title, formatter_class=HelpFormatter)
        command.add_argument("--json", metavar="FILE", help="result file, as results/NAME.json for the docs")
        for flag, default in bench.flags.items():
            options = dict(required=True) if default is REQUIRED else dict(default=default)
            if isinstance(default, int):  # all seeds are listed
                options |= dict(type=at_least(1, maximum=1_000 if flag == "seeds" else None))
            nargs = "+" if flag == "runs" else None
            command.add_argument(f"--{flag}", help=HELP[flag], metavar=flag.upper(), nargs=nargs, **options)
    return p


def run_command(subject, doc, benches, argv=None):
    """Run the command line of bench/SUBJECT.py: print a table and write it to --json."""
    argv = sys.argv[1:] if argv is None else argv
    with exit_on_bad_input(f"bench.{subject}", needs_output="--json" not in argv):
        args = parser(doc, benches).parse_args(argv)
        if args.json:  # before the work, which may take hours
            open(args.json, "a").close()
        if not (rows := benches[args.name].function(args)):
            return
        command = re.sub(r" --cache \S+", "", shlex.join(argv))  # any folder will do
        command = re.sub(r"--runs( (?!--)\S+)+", "--runs out/*", command)  # before the shell expanded it
        command = f"python -m bench.{subject} {command}"
        result = dict(bench=args.name, machine=describe_machine(), command=command, rows=rows)
        print(f"\n{markdown(rows, benches[args.name].columns)}\n{caption(result)}")
        if args.json:
            Path(args.json).write_text(json.dumps(result, indent=1) + "\n")
