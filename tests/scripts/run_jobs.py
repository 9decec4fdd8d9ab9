"""Run several command lines of pretrain.py, one after the other, as a rank of one group.

    RANK=0 WORLD_SIZE=2 ... python tests/scripts/run_jobs.py JOBS.json      lists of flags
"""

import json
import sys

import torch.distributed as dist

import pretrain


def main(path):
    with open(path) as file:
        jobs = json.load(file)
    dist.init_process_group("gloo")
    # all jobs have this group
    dist.init_process_group = lambda backend: None
    dist.destroy_process_group = lambda: None
    sys.modules["matplotlib.figure"] = None  # pictures take longer than the steps
    for flags in jobs:
        pretrain.main(flags)


if __name__ == "__main__":
    main(*sys.argv[1:])
