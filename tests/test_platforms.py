"""What differs on other systems, tried on Linux: shells, line ends, and what a system lacks."""

import os
import re
import shutil
import subprocess
import sys

import pytest

from tests.commands import PAGES
from tests.helpers import ROOT, SMALL

FENCES = [(page, code) for page, text in PAGES.items()
          for code in re.findall(r"```sh\n(.*?)```", text, re.S)]


@pytest.mark.parametrize("page, code", FENCES)
def test_commands_of_a_page_have_no_comments(page, code):
    """zsh, the shell of macOS, passes "# a comment" to the command that is typed before it."""
    assert "#" not in code, page


@pytest.mark.skipif(shutil.which("zsh") is None, reason="zsh is not installed")
@pytest.mark.parametrize("page, code", FENCES)
def test_commands_of_a_page_parse_in_zsh(page, code):
    done = subprocess.run(["zsh", "-f", "-n"], input=code, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, ""), page


def test_scripts_keep_their_line_ends_in_a_clone_on_windows():
    attributes = (ROOT / ".gitattributes").read_text()
    assert "*.sh text eol=lf" in attributes
    for path in [*ROOT.glob("runs/*.sh"), ROOT / ".ci/run"]:
        assert b"\r" not in path.read_bytes(), path


def test_workflow_names_files_that_exist_and_tests_the_range_of_torch():
    yaml = pytest.importorskip("yaml")  # datasets brings it
    workflow = yaml.safe_load((ROOT / ".github/workflows/test.yml").read_text())
    lines = []
    for job in workflow["jobs"].values():
        for step in job["steps"]:
            assert len({"run", "uses"} & set(step)) == 1, step
            lines += step.get("run", "").splitlines()
    for name in re.findall(r"[\w/-]+\.(?:py|txt)\b", "\n".join(lines)):
        is_output = f"> {name}" in "\n".join(lines)
        assert is_output or (ROOT / name).exists(), name
    matrix = workflow["jobs"]["suite"]["strategy"]["matrix"]["include"]
    oldest = re.search(r"torch>=([\d.]+)", (ROOT / "requirements.txt").read_text())[1]
    assert f"torch=={oldest}.0" in [row["torch"] for row in matrix]
    assert {row["os"].split("-")[0] for row in matrix} == {"ubuntu", "macos", "windows"}


# Whole runs where a system lacks something


def simulate(system, script, *flags, prefix=(), code=0, **env):
    """Run a script as tests/scripts/simulate.py says, or behind a command; return the process."""
    command = [*prefix, sys.executable]
    if system is not None:
        command += ["tests/scripts/simulate.py", system]
    command += [script, *map(str, flags)]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"} | env,
                          capture_output=True, text=True, timeout=280)
    assert done.returncode == code, done.stderr[-3000:]
    assert "Traceback" not in done.stderr
    return done


def train_and_infer(system, text_path, tmp_path, *flags, **options):
    """Pre-train for two steps, and ask the model; return what the two printed."""
    flags = [*SMALL, "--steps", 2, "--data", text_path, *flags]
    files = ["--cache", tmp_path / "cache", "--out", tmp_path / "out"]
    trained = simulate(system, "pretrain.py", *flags, *files, **options)
    asked = simulate(system, "infer.py", "--ckpt", tmp_path / "out", "the cat sat", **options)
    return trained.stdout, asked.stdout


@pytest.mark.parametrize("system", ["no-fork", "no-compiler", "no-distributed"])
def test_system_that_lacks_something_trains_and_infers(system, text_path, tmp_path):
    trained, asked = train_and_infer(system, text_path, tmp_path)
    assert "Saved" in trained
    assert "intact" in asked


def test_fine_tuning_without_distributed_pytorch_ends(tmp_path):
    rows = [f"a good thing {i},yes\na bad thing {i},no\n" for i in range(20)]
    (tmp_path / "a.csv").write_text("text,label\n" + "".join(rows))
    flags = "--ckpt models/english-detect.pt --epochs 1 --seeds 1 --device cpu --dtype float32"
    files = ["--train", tmp_path / "a.csv", "--out", tmp_path / "out"]
    simulate("no-distributed", "finetune.py", *flags.split(), *files)
    assert (tmp_path / "out/results.json").exists()


def test_consoles_of_windows_show_every_letter_or_its_escape(tmp_path):
    """cp1252 has no letter of Thai; a script prints an escape instead of ending."""
    done = simulate(None, "infer.py", "the café sat on ไทย", PYTHONIOENCODING="cp1252")
    assert "caf" in done.stdout
