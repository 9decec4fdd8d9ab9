"""Kill one run again and again and resume it: its last state is that of an unbroken run.

    python tests/scripts/end_runs.py COUNT OUT CACHE [flags of pretrain.py]

COUNT is how often to kill it. Each start of the run is a fork of this process. It ends at a counted
event: a file opened or renamed, an optimizer step. Nothing depends on the clock. Prints a JSON
object.
"""

import json
import os
import random
import shutil
import signal
import sys

from torch.optim.optimizer import register_optimizer_step_pre_hook

import pretrain
from support.common import fingerprint, load_checkpoint
from tests.helpers import read_log

NUM_EVENTS = 80  # about as many as a run has


def start(flags, folders, number=0):
    """Fork, pre-train, and be killed at an event, 0 for none; return whether the run has ended."""
    pid = os.fork()
    if pid:
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        assert code in (0, -signal.SIGKILL), f"unexpected exit code {code}"
        return code == 0
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    num_events = 0

    def count(*_):
        nonlocal num_events
        num_events += 1
        if num_events == number:
            os.kill(os.getpid(), signal.SIGKILL)

    def audit(event, args):
        if event in ("open", "os.rename", "os.remove") and str(args[0]).startswith(folders):
            count()

    register_optimizer_step_pre_hook(count)
    sys.addaudithook(audit)
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
    num_killed = 0
    states = []  # of finished runs
    last = 0  # step of the last checkpoint
    path = os.path.join(out, "ckpt.pt")
    sys.modules["matplotlib.figure"] = None  # pictures take longer than the steps
    assert start(flags, folders)
    whole = final_state(out)
    shutil.rmtree(out)
    while num_killed < int(count) or not states:
        os.makedirs(out, exist_ok=True)
        if rng.random() < 0.1:
            shutil.rmtree(cache, ignore_errors=True)  # some starts end while the corpus is prepared
        has_ended = start(flags, folders, rng.randrange(1, NUM_EVENTS))
        step = 0
        if os.path.exists(path):
            step = load_checkpoint(path)["step"]  # it is intact
        assert step >= last, f"progress was lost, {step} after {last}"
        last = step
        if has_ended:
            assert not [name for name in os.listdir(out) if "tmp" in name]
            states.append(final_state(out))
            shutil.rmtree(out)
            last = 0
        else:
            num_killed += 1
    print(json.dumps(dict(killed=num_killed, runs=len(states), is_same=set(states) == {whole})))


if __name__ == "__main__":
    main(*sys.argv[1:])
