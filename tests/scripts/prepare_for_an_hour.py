"""Prepare a corpus whose jobs take an hour each, in the folder that the command line names."""

import sys
import time

from data import corpus, sources
from support.common import run_script


class SlowSource(sources.Source):
    """Jobs of an hour. Each says when it begins."""

    def jobs(self):
        yield from range(8)  # one for each worker

    @classmethod
    def documents(cls, job):
        print("at work", flush=True)
        time.sleep(3_600)


if __name__ == "__main__":
    sources.SOURCES["slow"] = SlowSource
    run_script("prepare", corpus.prepare, "slow", "regex", sys.argv[1])
