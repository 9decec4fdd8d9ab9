"""End one run in many ways and resume it each time: its last state must be that of a run that nothing ended.

    python tests/scripts/end_runs.py COUNT OUT CACHE [flags of pretrain.py]

COUNT is how often to end it. Each start of the run is a fork of this process. It ends at a counted event (a
file opened or renamed, an optimizer step) or at a byte of a file. Nothing depends on the clock. Prints a JSON
object.
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
    target = os.devnull if "full" in end or "writing" in end else out + "-output"
    os.dup2(os.open(target, os.O_CREAT | os.O_TRUNC | os.O_WRONLY), 1)
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
            signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # the system ends the process at that byte
    try:
        pretrain.main(flags)
        code = 0
    except SystemExit as error:
        code = error.code
    sys.stdout.flush(), sys.stderr.flush()
    os._exit(code)


def final_state(out):
    """Return a fingerprint of weights, optimizer and log of a finished run."""
    with open(os.path.join(out, "log.jsonl")) as file:
        rows = [json.loads(line) for line in file]
    rows = [{k: v for k, v in row.items() if k not in ("words_per_s", "ms_per_sample")} for row in rows]
    saved = load_checkpoint(out)
    tensors = [*saved["model"].values()]
    for state in saved["optimizer"]["state"].values():
        tensors += state.values()
    return fingerprint([[tensor.tolist() for tensor in tensors], repr(saved["run"]), rows])


def main(count, out, cache, *flags):
    run, rng, ended, states, last = (flags, out, cache), random.Random(0), {}, [], 0
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
        code = start(*run, end, rng.randrange(1, NUM_EVENTS if end in SIGNALS else max(size, 100_000)))
        check(code in EXIT_CODES[end], f"{end}: unexpected exit code {code}")
        step = load_checkpoint(path)["step"] if os.path.exists(path) else 0  # it is intact
        check(step >= last, f"{end}: progress was lost, {step} after {last}")
        last = step
        if code:
            ended[end] = ended.get(end, 0) + 1
        else:
            check(not [name for name in os.listdir(out) if "tmp" in name], "temporary files were left behind")
            states.append(final_state(out))
            shutil.rmtree(out)
            last = 0
    print(json.dumps(dict(ended=ended, runs=len(states), is_same=set(states) == {whole})))


if __name__ == "__main__":
    main(*sys.argv[1:])
