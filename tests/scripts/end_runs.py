"""End one run in many ways and resume it each time: its last state is that of an unbroken run.

    python tests/scripts/end_runs.py COUNT OUT CACHE [flags of pretrain.py]

COUNT is how often to end it. Each start of the run is a fork of this process. It ends at a counted
event (a file opened or renamed, an optimizer step) or at a byte of a file. Nothing depends on the
clock. Prints a JSON object.
"""

import json
import os
import random
import resource
import shutil
import signal
import sys

from torch.optim.optimizer import register_optimizer_step_pre_hook

import pretrain
from common import fingerprint, load_checkpoint

SIGNALS = {"kill": signal.SIGKILL, "terminate": signal.SIGTERM}
EXIT_CODES = {"kill": (0, -9), "terminate": (0, -15, 143), "full disk": (0, 2),
              "killed while writing": (0, -signal.SIGXFSZ)}
NUM_EVENTS = 80  # about as many as a run has


def start(flags, out, cache, end="", number=0):
    """Fork, pre-train and end in the way `end`; return the exit code, negative for a signal."""
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    target = out + "-output"
    if "full" in end or "writing" in end:
        target = os.devnull
    file = os.open(target, os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
    os.dup2(file, 1)
    os.dup2(1, 2)
    num_events = 0

    def count(*_):
        nonlocal num_events
        num_events += 1
        if num_events == number:
            os.kill(os.getpid(), SIGNALS[end])

    def audit(event, args):
        if event in ("open", "os.rename", "os.remove") and str(args[0]).startswith((out, cache)):
            count()

    if end in SIGNALS:
        register_optimizer_step_pre_hook(count)
        sys.addaudithook(audit)
    elif end:
        resource.setrlimit(resource.RLIMIT_FSIZE, (number, number))  # no file can be longer
        if end == "killed while writing":
            signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # ends the process there
    try:
        pretrain.main(flags)
        code = 0
    except SystemExit as error:
        code = error.code
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def final_state(out):
    """Return a fingerprint of weights, optimizer and log of a finished run."""
    rows = []
    with open(os.path.join(out, "log.jsonl")) as file:
        for line in file:
            row = json.loads(line)
            row.pop("words_per_s", None)
            row.pop("ms_per_sample", None)
            rows.append(row)
    saved = load_checkpoint(out)
    tensors = list(saved["model"].values())
    for state in saved["optimizer"]["state"].values():
        tensors += state.values()
    numbers = [tensor.tolist() for tensor in tensors]
    return fingerprint([numbers, repr(saved["run"]), rows])


def main(count, out, cache, *flags):
    run = (flags, out, cache)
    rng = random.Random(0)
    ended = {}  # way -> how often
    states = []  # of finished runs
    last = 0  # step of the last checkpoint
    path = os.path.join(out, "ckpt.pt")

    def check(is_right, message):
        if not is_right:
            with open(out + "-output") as file:
                sys.exit(f"{message}: {file.read()[-2000:]}")

    check(start(*run) == 0, "the uninterrupted run failed")
    whole = final_state(out)
    shutil.rmtree(out)
    while sum(ended.values()) < int(count) or not states:
        os.makedirs(out, exist_ok=True)
        if rng.random() < 0.1:
            shutil.rmtree(cache, ignore_errors=True)  # some starts end while the corpus is prepared
        end = rng.choice((*EXIT_CODES, "kill"))
        size = os.path.getsize(path) if os.path.exists(path) else 0
        most = NUM_EVENTS if end in SIGNALS else max(size, 100_000)
        code = start(*run, end, rng.randrange(1, most))
        check(code in EXIT_CODES[end], f"{end}: unexpected exit code {code}")
        step = 0
        if os.path.exists(path):
            step = load_checkpoint(path)["step"]  # it is intact
        check(step >= last, f"{end}: progress was lost, {step} after {last}")
        last = step
        if code:
            ended[end] = ended.get(end, 0) + 1
        else:
            left = [name for name in os.listdir(out) if "tmp" in name]
            check(not left, "temporary files were left behind")
            states.append(final_state(out))
            shutil.rmtree(out)
            last = 0
    print(json.dumps(dict(ended=ended, runs=len(states), is_same=set(states) == {whole})))


if __name__ == "__main__":
    main(*sys.argv[1:])
