"""What differs on other systems, tried on Linux: shells, line ends, the workflow for all three."""

import re
import shutil
import subprocess

import pytest

from tests.commands import PAGES
from tests.helpers import ROOT

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
