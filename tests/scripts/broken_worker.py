"""Start workers whose import of this file fails, as where a package is broken. Must end."""

import multiprocessing

from support.common import run_script, start_workers

if __name__ == "__mp_main__":  # in a worker
    raise ImportError("broken package")


def start():
    with start_workers() as pool:
        print(list(pool.map(abs, [1])))


if __name__ == "__main__":
    multiprocessing.set_start_method("spawn")  # as on macOS and Windows
    run_script("broken_worker.py", start)
