"""The commands that pages print and scripts of runs/ run, as lists of words, and their check."""

import importlib
import os
import re
import shlex
import subprocess
import tempfile
from pathlib import Path

import pytest

import pretrain
from bench import harness
from support.flags import build_parser
from tests.helpers import HAS_FORK, ROOT

PAGES = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in
         (ROOT / "README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("*/README.md"))}
RUNS = sorted(ROOT.glob("runs/*.sh"))


def list_page_commands():
    """Return the commands of all pages: a line each, or in backticks in a table or a sentence."""
    text = "\n".join(PAGES.values()).replace("\\\n", "")
    commands = re.findall(r"(?:^|&& )((?:python|torchrun) [^`#>\n]*)", text, re.M)
    commands += re.findall(r"`((?:python|torchrun) [^`]*)`", text)
    return [shlex.split(command) for command in dict.fromkeys(commands)]


def list_run_commands(path):
    """Return the commands that a script of runs/ runs, where python and torchrun only print."""
    if not HAS_FORK:
        pytest.skip("requires bash, and files that are programs")
    with tempfile.TemporaryDirectory() as folder:
        for name in ("python", "torchrun"):
            program = Path(folder, name)
            program.write_text(f'#!/usr/bin/env bash\nprintf "%q " {name} "$@"\necho\n')
            program.chmod(0o755)
        env = os.environ | dict(PATH=f"{folder}:{os.environ['PATH']}")
        done = subprocess.run([path], env=env, capture_output=True, text=True, check=True)
    return [shlex.split(line) for line in done.stdout.splitlines()]


def split_command(words):
    """Return the script or module that a command runs, and what follows it."""
    for i, word in enumerate(words):
        if word == "-m":
            return words[i + 1], words[i + 2:]
        if word.endswith(".py"):
            return word, words[i + 1:]
    return "", []  # python -c


def check_command(words):
    """Exit, or raise an error, unless a command names a script and its flags parse."""
    script, flags = split_command(words)
    if script in ("", "pytest"):
        return
    module = importlib.import_module(script.removesuffix(".py"))
    if script == "pretrain.py":
        build_parser().parse_args(flags)
        if "--init_from" not in flags:  # which needs a checkpoint
            pretrain.parse_flags(flags)  # they go together, and build a model
    elif hasattr(module, "TABLES"):  # a bench
        harness.build_parser(script, module.TABLES).parse_args(flags)
    elif hasattr(module, "build_parser"):  # no demo
        module.build_parser().parse_args(flags)
