"""What differs on other systems, tried on Linux: shells, line ends, and what a system lacks."""

import re
import shutil
import subprocess

import pytest

from tests.commands import PAGES
from tests.helpers import ROOT, SMALL, run_script, write_table


@pytest.mark.parametrize("page", PAGES)
def test_commands_of_a_page_are_those_of_zsh(page):
    """zsh, the shell of macOS, passes "# a comment" to the command that is typed before it."""
    code = "".join(re.findall(r"```sh\n(.*?)```", PAGES[page], re.S))
    assert "#" not in code
    if shutil.which("zsh") is None:
        pytest.skip("zsh is not installed")
    done = subprocess.run(["zsh", "-f", "-n"], input=code, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_scripts_keep_their_line_ends_in_a_clone_on_windows():
    attributes = (ROOT / ".gitattributes").read_text("utf-8")
    assert "*.sh text eol=lf" in attributes
    for path in [*ROOT.glob("runs/*.sh"), ROOT / ".ci/run"]:
        assert b"\r" not in path.read_bytes(), path


def test_workflow_names_files_that_exist_and_tests_the_range_of_torch():
    yaml = pytest.importorskip("yaml")  # datasets brings it
    workflow = yaml.safe_load((ROOT / ".github/workflows/test.yml").read_text("utf-8"))
    lines = []
    for job in workflow["jobs"].values():
        for step in job["steps"]:
            assert len({"run", "uses"} & set(step)) == 1, step
            lines += step.get("run", "").splitlines()
    for name in re.findall(r"[\w/-]+\.(?:py|txt)\b", "\n".join(lines)):
        is_output = f"> {name}" in "\n".join(lines)
        assert is_output or (ROOT / name).exists(), name
    matrix = workflow["jobs"]["suite"]["strategy"]["matrix"]["include"]
    oldest = re.search(r"torch>=([\d.]+)", (ROOT / "requirements.txt").read_text("utf-8"))[1]
    assert f"torch=={oldest}.0" in [row["torch"] for row in matrix]
    assert {row["os"].split("-")[0] for row in matrix} == {"ubuntu", "macos", "windows"}


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
