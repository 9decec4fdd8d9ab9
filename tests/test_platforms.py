"""What differs on other systems, tried on Linux: shells, and what a system lacks."""

import re

import pytest

from tests.commands import PAGES
from tests.helpers import ROOT, SMALL, run_script, write_table


@pytest.mark.parametrize("page", PAGES)
def test_commands_of_a_page_have_no_comments(page):
    """zsh, the shell of macOS, passes "# a comment" to the command that is typed before it."""
    code = "".join(re.findall(r"```sh\n(.*?)```", PAGES[page], re.S))
    assert "#" not in code


def test_workflow_tests_the_oldest_torch_of_the_requirements():
    oldest = re.search(r"torch>=([\d.]+)", (ROOT / "requirements.txt").read_text())[1]
    assert f"torch=={oldest}.0" in (ROOT / ".github/workflows/test.yml").read_text()


# Whole runs where a system lacks something


@pytest.mark.parametrize("system", ["no-fork", "no-compiler", "no-distributed"])
def test_system_that_lacks_something_trains_infers_and_fine_tunes(system, text_path, tmp_path):
    """Two steps of pre-training, a question, and an epoch of fine-tuning, in one process."""
    rows = [(f"text {number}", "ab"[number % 2]) for number in range(40)]
    table = write_table(tmp_path / "a.csv", [("text", "label"), *rows])
    run = tmp_path / "run"
    tuned = tmp_path / "tuned"
    flags = [*SMALL, "--steps", 2, "--data", text_path, "--cache", tmp_path / "cache", "--out", run]
    tuning = "--epochs 1 --seeds 1 --device cpu --dtype float32".split()
    done = run_script(
        "tests/scripts/simulate.py", system,
        "pretrain.py", *flags,
        "infer.py", "--ckpt", run, "the cat sat",
        "finetune.py", "--ckpt", run, "--train", table, "--out", tuned, *tuning)
    assert "Traceback" not in done.stderr
    assert "Saved" in done.stdout
    assert "intact" in done.stdout
    assert (tuned / "results.json").exists()
