"""End one run in many ways and resume it each time: its last state must be that of a run that nothing ended.

    python tests/scripts/end_runs.py SCRIPT COUNT SAVES OUT CACHE [flags of SCRIPT]

SCRIPT is pretrain or finetune, COUNT how often to end it, SAVES the pattern of its checkpoints in OUT. Each
start of the run is a fork of this process. It ends at a counted event (a file opened or renamed, an optimizer
step), at a byte of a file, or meets a damaged checkpoint. Nothing depends on the clock. Prints a JSON object.
"""

import glob
import importlib
import json
import os
import random
import resource
import shutil
import signal
import sys

from torch.optim.optimizer import register_optimizer_step_pre_hook

from runtime import InputError, fingerprint, load_checkpoint

SIGNALS = {"kill": signal.SIGKILL, "terminate": signal.SIGTERM}
EXIT_CODES = {"kill": (0, -9), "terminate": (0, -15, 143), "full disk": (0, 2),
              "killed while writing": (0, -signal.SIGXFSZ)}
NUM_EVENTS = 80  # about as many as a run has


def start(main, flags, out, cache, end="", number=0):
    """Fork, run the script and end it in the way `end`; return the exit code, negative for a signal."""
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
        main(flags)
        code = 0
    except SystemExit as error:
        code = error.code
    sys.stdout.flush(), sys.stderr.flush()
    os._exit(code)


def final_state(out, saves):
    """Return a fingerprint of weights, optimizer and log or results of a finished run."""
    with open(glob.glob(os.path.join(out, "*.json*"))[0]) as file:
        rows = [json.loads(line) for line in file] if file.name.endswith("l") else json.load(file)
    if isinstance(rows, list):
        rows = [{k: v for k, v in row.items() if k not in ("words_per_s", "ms_per_sample")} for row in rows]
    saved = load_checkpoint(out)
    tensors = [*saved["model"].values()]
    for state in saved.get("optimizer", {}).get("state", {}).values():
        tensors += state.values()
    return fingerprint([[tensor.tolist() for tensor in tensors], repr(saved.get("run")), rows])


def damage(path, end, rng):
    """Cut a checkpoint or flip one bit; return the good bytes and the bad ones, which are on disk."""
    with open(path, "rb") as file:
        good = file.read()
    bad = bytearray(good[:rng.randrange(len(good))] if end == "cut" else good)
    if end == "flip":
        bad[rng.randrange(len(bad))] ^= 1 << rng.randrange(8)
    with open(path, "wb") as file:
        file.write(bad)
    return good, bytes(bad)


def main(script, count, saves, out, cache, *flags):
    main, rng, ended, states, last = importlib.import_module(script).main, random.Random(0), {}, [], 0
    run = main, flags, out, cache

    def check(is_right, message):
        if not is_right:
            with open(out + "-output") as file:
                sys.exit(f"{message}: {file.read()[-2000:]}")

    check(start(*run) == 0, "the uninterrupted run failed")
    whole = final_state(out, saves)
    shutil.rmtree(out)
    while sum(ended.values()) < int(count) or not states:
        os.makedirs(out, exist_ok=True)
        if rng.random() < 0.1:
            shutil.rmtree(cache, ignore_errors=True)  # some starts end while the corpus is prepared
        end = rng.choice((*EXIT_CODES, "kill", "cut", "flip"))
        path = rng.choice(sorted(glob.glob(os.path.join(out, saves))) or [""])
        size = os.path.getsize(path) if path else 0
        if end in ("cut", "flip"):
            if not size:
                continue
            before = repr(load_checkpoint(path))
            good, bad = damage(path, end, rng)
            try:
                check(repr(load_checkpoint(path)) == before, "a damaged checkpoint was read as an intact one")
            except InputError:
                code = start(*run)
                with open(path, "rb") as file:
                    check(code == 2 and file.read() == bad, f"expected exit code 2, got {code}")
            with open(path, "wb") as file:
                file.write(good)
            ended[end] = ended.get(end, 0) + 1
            continue
        code = start(*run, end, rng.randrange(1, NUM_EVENTS if end in SIGNALS else max(size, 100_000)))
        check(code in EXIT_CODES[end], f"{end}: unexpected exit code {code}")
        checkpoints = map(load_checkpoint, glob.glob(os.path.join(out, saves)))  # all are intact
        step = sum(checkpoint.get("step", 1) for checkpoint in checkpoints)
        check(not code or step >= last or os.path.exists(os.path.join(out, "results.json")),
              f"{end}: progress was lost, {step} after {last}")
        last = step
        if code:
            ended[end] = ended.get(end, 0) + 1
        else:
            check(not [name for name in os.listdir(out) if "tmp" in name], "temporary files were left behind")
            states.append(final_state(out, saves))
            shutil.rmtree(out)
            last = 0
    print(json.dumps(dict(ended=ended, runs=len(states), is_same=set(states) == {whole})))


if __name__ == "__main__":
    main(*sys.argv[1:])
