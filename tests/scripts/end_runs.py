"""End one run in many ways and resume it each time: its last state is that of an unbroken run.

    python tests/scripts/end_runs.py COUNT OUT CACHE [flags of pretrain.py]

COUNT is how often to end it. Each start of the run is a fork of this process. It ends at a counted
event (a file opened or renamed, an optimizer step), or where a file reaches a size, as on a full
disk. Nothing depends on the clock. Prints a JSON object.
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
from support.common import fingerprint, load_checkpoint
from tests.helpers import read_log

EXIT_CODES = {"kill": (0, -9), "terminate": (0, -15, 143), "full disk": (0, 2)}
SIGNALS = {"kill": signal.SIGKILL, "terminate": signal.SIGTERM}
NUM_EVENTS = 80  # about as many as a run has


def start(flags, folders, end="", number=0):
    """Fork, pre-train and end in the way `end`; return the exit code, negative for a signal."""
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    num_events = 0

    def count(*_):
        nonlocal num_events
        num_events += 1
        if num_events == number:
            os.kill(os.getpid(), SIGNALS[end])

    def audit(event, args):
        if event in ("open", "os.rename", "os.remove") and str(args[0]).startswith(folders):
            count()

    if end in SIGNALS:
        register_optimizer_step_pre_hook(count)
        sys.addaudithook(audit)
    elif end == "full disk":
        resource.setrlimit(resource.RLIMIT_FSIZE, (number, number))  # no file can be longer
    code = 0
    try:
        pretrain.main(flags)
    except SystemExit as error:
        code = error.code
    os._exit(code)


def final_state(out):
    """Return a fingerprint of weights, optimizer and log of a finished run."""
    saved = load_checkpoint(out)
    tensors = list(saved["model"].values())
    for state in saved["optimizer"]["state"].values():
        tensors += state.values()
    numbers = [tensor.tolist() for tensor in tensors]
    return fingerprint([numbers, repr(saved["run"]), read_log(out)])


def main(count, out, cache, *flags):
    folders = (out, cache)
    rng = random.Random(0)
    num_ended = 0
    states = []  # of finished runs
    last = 0  # step of the last checkpoint
    path = os.path.join(out, "ckpt.pt")
    sys.modules["matplotlib.figure"] = None  # pictures take longer than the steps
    assert start(flags, folders) == 0
    whole = final_state(out)
    shutil.rmtree(out)
    while num_ended < int(count) or not states:
        os.makedirs(out, exist_ok=True)
        if rng.random() < 0.1:
            shutil.rmtree(cache, ignore_errors=True)  # some starts end while the corpus is prepared
        end = rng.choice((*EXIT_CODES, "kill"))
        size = os.path.getsize(path) if os.path.exists(path) else 0
        most = NUM_EVENTS if end in SIGNALS else max(size, 100_000)
        code = start(flags, folders, end, rng.randrange(1, most))
        assert code in EXIT_CODES[end], f"{end}: unexpected exit code {code}"
        step = 0
        if os.path.exists(path):
            step = load_checkpoint(path)["step"]  # it is intact
        assert step >= last, f"{end}: progress was lost, {step} after {last}"
        last = step
        if code:
            num_ended += 1
        else:
            assert not [name for name in os.listdir(out) if "tmp" in name]
            states.append(final_state(out))
            shutil.rmtree(out)
            last = 0
    print(json.dumps(dict(ended=num_ended, runs=len(states), is_same=set(states) == {whole})))


if __name__ == "__main__":
    main(*sys.argv[1:])
