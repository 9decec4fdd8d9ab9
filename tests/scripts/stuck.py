"""Pre-train where a worker process never answers. It prints "stuck" when it begins.

    python tests/scripts/stuck.py words|batch [flags of pretrain.py]

words: it splits the corpus. batch: it makes batches, of rank 1 if there are ranks.
"""

import os
import sys
import time

import data.corpus
import data.sources
import pretrain
from data.batches import TextBatches


def wait_forever(*_):
    print("stuck", file=sys.__stdout__, flush=True)  # a rank other than the first is redirected
    while True:
        time.sleep(1)


def main(place, *flags):
    if place == "words":
        data.sources.JOB_UNITS = 1_000  # several jobs, for several processes
        data.corpus.split_job = wait_forever
    elif os.environ.get("RANK", "1") == "1":
        TextBatches.get_batch = wait_forever
    pretrain.main(flags)


if __name__ == "__main__":
    main(*sys.argv[1:])
