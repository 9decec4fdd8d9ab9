"""The jobs of finetune.py in their folder, --out: whose they are, and what stays at the end.

A job is one task with one seed. TASK-seed-N.json has its results, and TASK-seed-N.pt its model.

Out of scope: running a job (finetune.py), results and their means (support/results.py).
"""

import collections
import os
from pathlib import Path

from support.common import InputError, list_changes, quote_command, read_json, remove, rename
from support.results import read_result, summarize, write_results

# A rerun may change these flags: digests of the texts and of the checkpoint are compared
PLACES = ("out", "ckpt", "train", "dev", "data_dir", "cache", "device")


def check_out(out, settings):
    """Raise InputError if --out has jobs with other settings, or files of another script."""
    names = {path.name for path in Path(out).glob("*") if path.suffix in (".json", ".pt")}
    if names <= {"settings.json"}:  # no job has finished: other settings may take the folder
        return
    if "settings.json" not in names:
        raise InputError(f"--out {out}: belongs to another script. Use another --out.")
    saved = read_json(Path(out, "settings.json"))
    fixed = {name: value for name, value in settings.items() if name not in PLACES}
    changes = list_changes(saved, fixed)
    if changes:
        raise InputError(f"--out {out}: belongs to a run with other settings: "
                         f"{'; '.join(changes)}. Use another --out.")


def job_path(out, name, seed):
    """Return the path of a job's files without an ending: .json its results, .pt its model."""
    return f"{out}/{name}-seed-{seed}"


def model_path(args, name):
    """Return the path of the model that is kept of a task."""
    if args.task == "glue":
        return f"{args.out}/{name}.pt"
    return f"{args.out}/ckpt.pt"


def list_seeds(args):
    """Return the seeds of each task."""
    return range(args.seed, args.seed + args.seeds)


def share_jobs(args, rows, ranks):
    """Return this rank's part of the jobs that are left: dict, name of a task -> list of seeds.

    Rank r takes the jobs r, r + world, ..., the longest first: each has about as much to do.
    """
    jobs = []
    for name in sorted(rows, key=lambda name: -len(rows[name]["train"])):
        for seed in list_seeds(args):
            if not os.path.exists(f"{job_path(args.out, name, seed)}.json"):
                jobs.append((name, seed))
    seeds_of_task = collections.defaultdict(list)
    for name, seed in jobs[ranks.rank::ranks.world]:
        seeds_of_task[name].append(seed)
    return seeds_of_task


def collect_results(args, tasks, settings):
    """Write and print the means over the seeds; return the content of results.json.

    Of each task the model of one seed is kept, the best on the selection rows.
    """
    summaries = {}
    for name in tasks:
        results = []
        for seed in list_seeds(args):
            results.append(read_result(f"{job_path(args.out, name, seed)}.json"))
        summaries[name] = summarize(results)
        keep_best_model(args, name, results)
    content = write_results(args.out, summaries, settings)
    *_, last = tasks.values()
    command = ["python", "infer.py", "--ckpt", model_path(args, last.name)]
    command += [f"some {column}" for column in last.text_columns]
    print(f"Saved {args.out}/results.json. Next: {quote_command(command)}")
    return content


def keep_best_model(args, name, results):
    """Rename the model file of a task's best seed, and remove those of the others."""
    best = results[0]  # without selection rows nothing says which seed is better
    selections = [result.model.selection for result in results]
    if None not in selections:
        best = results[selections.index(max(selections))]
    for result in results:
        path = f"{job_path(args.out, name, result.seed)}.pt"
        if result is best and os.path.exists(path):  # else a finished run has renamed it already
            rename(path, model_path(args, name))
        remove(path)
