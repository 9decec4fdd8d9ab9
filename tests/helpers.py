"""Helpers of the tests: made-up words, tiny models, flags of short runs, and runs of scripts."""

import contextlib
import io
import math
import multiprocessing
import os
import random
import runpy
import shlex
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from bench import harness
from bloom import BloomMap
from data.splitters import ItemNames
from model import Config, Model
from objectives import OBJECTIVES
from support.common import load_checkpoint
from tokenizer import FIRST_WORD_ID, SEP, make_tokenizer

ROOT = Path(__file__).parents[1]
SMALL = (
    "--layers 1 --width 32 --heads 4 --length 17 --batch 8 --steps 6 --warmup 2 --device cpu "
    "--dtype float32 --no-compile --eval_every 3 --save_every 3").split()
SMALL_SETS = [*SMALL, *(
    "--preset superbloom-small --alpha 5 --heads 2 --length 7 --warmup 0 --dropout 0").split()]
# Windows has no fork, sends no signals, and PyTorch for it cannot connect ranks everywhere
HAS_FORK = hasattr(os, "fork")
needs_fork = pytest.mark.skipif(not HAS_FORK, reason="requires a system that forks processes")
needs_full_disk = pytest.mark.skipif(  # macOS and Windows have none
    sys.platform != "linux", reason="requires /dev/full")

if "forkserver" in multiprocessing.get_all_start_methods():
    WARM = multiprocessing.get_context("forkserver")
    WARM.set_forkserver_preload(["tests.helpers", "pretrain", "finetune", "torch._dynamo"])
else:  # Windows
    WARM = multiprocessing.get_context("spawn")


def split_quoted(command):
    """Return the words of a command that common.quote_command wrote, list of str."""
    if sys.platform == "win32":  # a backslash is a letter of its paths
        return [word.strip('"') for word in shlex.split(command, posix=False)]
    return shlex.split(command)


def make_words(count, seed=0, letters="etaoinshrdlu"):
    """Return distinct made-up words of 2 to 12 letters."""
    rng = random.Random(seed)
    words = []
    for _ in range(4 * count):
        size = rng.randint(2, 12)
        words.append("".join(rng.choices(letters, k=size)))
    return list(dict.fromkeys(words))[:count]


def choose_emb(objective):
    """Return an embedding that trains an objective, by what its head predicts."""
    emb_of_head = {"mlm": "lookup", "hash-mlm": "median"}
    return emb_of_head.get(OBJECTIVES[objective].head, "proj")


def write_table(path, rows):
    """Write a .tsv or, by its ending, a .csv without quotes; rows are sequences. Return str."""
    separator = "," if path.suffix == ".csv" else "\t"
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", encoding="utf-8") as file:
        for row in rows:
            print(*row, sep=separator, file=file)
    return str(path)


def make_link(path, target):
    """Make a symbolic link to a file or folder, or skip the test: Windows may allow none."""
    try:
        os.symlink(target, path, target_is_directory=os.path.isdir(target))
    except OSError as error:
        pytest.skip(f"no symbolic links: {error}")


def list_pages(corpus):
    """Return the documents of a corpus as list of list[str], by its IDs and its offsets."""
    pages = []
    for start, stop in zip(corpus.offsets[:-1], corpus.offsets[1:]):
        assert corpus.ids[stop - 1] == SEP
        pages.append([corpus.words[i - FIRST_WORD_ID] for i in corpus.ids[start:stop - 1]])
    return pages


def run_main(main, *argv):
    """Call a script's main in this process; return exit code, out, err, and its result."""
    code = 0
    result = None
    out = io.StringIO()
    err = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            result = main([str(word) for word in argv])
        except SystemExit as end:
            code = end.code
    return SimpleNamespace(code=code, out=out.getvalue(), err=err.getvalue(), result=result)


def assert_refused(main, argv, *fragments):
    """Assert that a script exits with code 2 and one line of error that names all fragments."""
    done = run_main(main, *argv)
    line = done.err.strip().split("\n")[-1]  # argparse prints its usage before it
    assert done.code == 2, done
    assert "Traceback" not in done.err
    for fragment in fragments:
        assert str(fragment) in line


def fail_first(function, num_failures):
    """Return a function that fails so often, as on Windows, before it does what another does."""
    failures = []

    def fail(*args, **options):
        if len(failures) < num_failures:
            failures.append(args)
            raise PermissionError(5, "Access is denied", str(args[0]))
        return function(*args, **options)
    return fail


def run_script(*command, code=0, **env):
    """Run python with these words in a process of its own, which must end with this code.

    env: more environment variables. PYTHONPATH has the project, unless it is one of them.
    """
    words = [str(word) for word in command]
    env = os.environ | dict(OMP_NUM_THREADS="1", PYTHONPATH=str(ROOT)) | env
    done = subprocess.run([sys.executable, *words], cwd=ROOT, env=env, capture_output=True,
                          encoding="utf-8", timeout=300)
    assert done.returncode == code, done.stderr[-3000:]
    return done


def fork_script(words, env, folder):
    """Run a script in this process, whose words are str; write folder/out and folder/err."""
    for number, name in ((1, "out"), (2, "err")):
        file = os.open(os.path.join(folder, name), os.O_WRONLY | os.O_CREAT)
        os.dup2(file, number)
    os.chdir(ROOT)
    os.environ.update(env)
    torch.set_num_threads(1)
    sys.argv = words
    runpy.run_path(words[0], run_name="__main__")


def skip_without_ranks():
    """Skip the test that calls this, where several ranks are not supported."""
    if not HAS_FORK:
        pytest.skip("several ranks require Linux or macOS")


def torchrun(num_processes, *command, **env):
    """Run a script under torchrun on this machine; flags of torchrun may come before its path."""
    skip_without_ranks()
    options = ["--standalone", f"--nproc_per_node={num_processes}"]
    return run_script("-m", "torch.distributed.run", *options, *command, **env)


def run_ranks(*commands, code=0, **env):
    """Run scripts at the same time, as the ranks of one group; return what each printed.

    The ranks are forks of a process that has imported PyTorch, which takes longer than most runs.

    Args:
        commands: a script and its flags for each rank.
        code: with which all must end.
    """
    skip_without_ranks()
    env |= dict(WORLD_SIZE=str(len(commands)), MASTER_ADDR="127.0.0.1", MASTER_PORT=find_port())
    with tempfile.TemporaryDirectory() as root:
        ranks = []
        for rank, command in enumerate(commands):
            folder = Path(root, str(rank))
            folder.mkdir()
            words = [str(word) for word in command]
            of_rank = env | dict(RANK=str(rank), LOCAL_RANK=str(rank))
            process = WARM.Process(target=fork_script, args=(words, of_rank, str(folder)))
            process.start()
            ranks.append((process, folder))
        runs = []
        for process, folder in ranks:
            process.join(300)
            run = SimpleNamespace(code=process.exitcode, out=(folder / "out").read_text("utf-8"),
                                  err=(folder / "err").read_text("utf-8"))
            runs.append(run)
            process.kill()  # one that has not ended
    for run in runs:
        assert run.code == code, run.err[-3000:]
    return runs


def find_port():
    """Return a free port of this machine, str."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        return str(free.getsockname()[1])


def read_log(folder):
    """Return the rows of log.jsonl without the speed, which differs from run to run."""
    rows = harness.read_log(folder)
    for row in rows:
        row.pop("words_per_s", None)
    return rows


def equal_weights(*folders):
    """Return whether the checkpoints of two folders hold the same weights, bit for bit."""
    first, second = [load_checkpoint(str(folder))["model"] for folder in folders]
    assert first.keys() == second.keys()
    return all(torch.equal(first[name], second[name]) for name in first)


def tiny_model(**changes):
    """Return a fresh Model of odd sizes with random codes of 25 words, in evaluation mode."""
    torch.manual_seed(0)
    sizes = dict(layers=2, width=12, heads=3, ffn=20, length=9, rows=31, bits=16, chunk=5,
                 buckets=7, weights=11)
    c = Config(**sizes | changes)
    model = Model(c)
    model.eval()
    rng = np.random.default_rng(0)
    if c.code_format == "bits":  # packed, T bits in bytes
        codes = rng.integers(0, 256, (30, math.ceil(c.bits / 8))).astype(np.uint8)
    else:
        limits = model.inputs.embedding.code_limits
        codes = rng.integers(0, limits, (30, len(limits)))
    model.set_codes(torch.from_numpy(codes))
    return model


def bloom_model(n=53, alpha=5, m=2, **changes):
    """Return a small Model over n items with its weights stirred, and its HashTokenizer."""
    bloom_map = BloomMap(n, alpha, m)
    sizes = dict(emb="bloom", head="hash-mlm", hashes=m, order=False, act="relu",
                 buckets=bloom_map.num_buckets + FIRST_WORD_ID)
    model = tiny_model(**sizes | changes)
    tokenizer = make_tokenizer(model.config, ItemNames(), vocabulary=make_words(n),
                               bloom_map=bloom_map)
    model.set_codes(torch.from_numpy(tokenizer.codes()))
    for parameter in model.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter)
    return model, tokenizer
