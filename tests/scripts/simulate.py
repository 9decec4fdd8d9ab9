"""Run scripts of the project, one after the other, where the system lacks what Linux has.

    python tests/scripts/simulate.py no-fork pretrain.py --data my_texts/ infer.py "a text"

    no-fork            processes are spawned, as on macOS and Windows
    no-compiler        no C++ compiler, no Triton
    no-distributed     a PyTorch without torch.distributed
"""

import multiprocessing
import os
import runpy
import shutil
import sys

import torch


def remove_fork():
    methods = multiprocessing.get_all_start_methods()
    if "fork" not in methods:  # Windows
        return
    methods.remove("fork")
    get_context = multiprocessing.context.DefaultContext.get_context

    def get_other_context(self, method=None):
        if method == "fork":
            raise ValueError("cannot find context for 'fork'")
        return get_context(self, method)

    multiprocessing.set_start_method("spawn")
    multiprocessing.get_all_start_methods = lambda: methods
    multiprocessing.context.DefaultContext.get_context = get_other_context
    del os.fork


def remove_compiler():
    shutil.which = lambda *_, **__: None
    sys.modules["triton"] = None  # an import of it fails


def remove_distributed():
    torch.distributed.is_available = lambda: False
    for name in ("is_initialized", "init_process_group", "all_reduce", "barrier"):
        delattr(torch.distributed, name)


SYSTEMS = {
    "no-fork": remove_fork,
    "no-compiler": remove_compiler,
    "no-distributed": remove_distributed,
}

if __name__ == "__main__":
    system, *words = sys.argv[1:]
    SYSTEMS[system]()
    sys.path.insert(0, os.getcwd())
    commands = []
    for word in words:
        if word.endswith(".py"):
            commands.append([])
        commands[-1].append(word)
    for command in commands:
        sys.argv = command
        runpy.run_path(command[0], run_name="__main__")
