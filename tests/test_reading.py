"""docs/reading.md and reading-2.md are true: functions exist, commands work, diffs apply."""

import re
import shutil
import subprocess
import sys

import pytest

from tests.commands import list_page_commands, split_command
from tests.helpers import ROOT

PAGE = ""
for name in ("reading", "reading-2"):
    PAGE += (ROOT / f"docs/{name}.md").read_text(encoding="utf-8")


def list_functions():
    """Return (file, name) of each function to read: after "Read", a link and names in backticks."""
    found = []
    for paragraph in re.findall(r"^Read \[.*?\n\n", PAGE, re.M | re.S):
        for path, names in re.findall(r"\]\(\.\./(.*?)\):([^\[]*)", paragraph):
            for name in re.findall(r"`(.*?)`", names):
                found.append((path, name))
    return found


def list_tests(path):
    """Return the names of the test functions of a file, without importing it."""
    code = (ROOT / path).read_text(encoding="utf-8")
    return re.findall(r"^def (test_\w+)", code, re.M)


@pytest.mark.parametrize("path, name", list_functions())
def test_function_to_read_exists(path, name):
    code = (ROOT / path).read_text(encoding="utf-8")
    *_, last = name.split(".")  # without its class
    assert re.search(rf"^ *(def|class) {last}\b|^{last} = ", code, re.M), f"{path} has no {name}"


def test_commands_select_tests_and_answers_name_tests():
    """-k takes parts of names, joined by "or"; each part must select a test of the files."""
    names = []
    for words in list_page_commands():
        script, flags = split_command(words)
        if script == "pytest" and "-k" in flags:
            files = [word for word in flags if word.endswith(".py")]
            tests = [name for file in files for name in list_tests(file)]
            for part in flags[-1].split(" or "):
                assert any(part in name for name in tests), part
            names += tests
    for name in re.findall(r"`(test_\w+)(?:\[\w+\])?`", PAGE):  # with the case in brackets or not
        assert name in names


# a member that a line adds: a class, a line of a dict, a branch
MEMBER = re.compile(r'class \w+|"\w+": |== "\w+"')


def apply_diff(folder, diff):
    """Change files of a folder. A line of a diff begins with a space, + or -, or is "--- FILE".

    What a diff adds must be new: an exercise may be a contribution, too.
    """
    for part in re.split(r"^--- ", diff, flags=re.M)[1:]:
        name, *changes = part.rstrip("\n").split("\n")
        code = (folder / name).read_text(encoding="utf-8")
        lines = code.split("\n")
        place = None  # of the next line
        first = []  # added before the first line that is there already
        for change in changes:
            mark = change[:1]
            text = change[1:]
            if mark == "+":
                for member in MEMBER.findall(text):
                    assert member not in code, f"{name} has {member} already: change the exercise"
            if mark == "+" and place is None:
                first.append(text)
            elif mark == "+":
                lines.insert(place, text)
                place += 1
            else:
                found = lines.index(text, place or 0)  # raises if the file has no such line
                if place is None:
                    lines[found:found] = first
                    found += len(first)
                place = found + 1
                if mark == "-":
                    place = found
                    del lines[found]
        (folder / name).write_text("\n".join(lines), encoding="utf-8")


def test_diffs_apply_and_all_tests_can_be_collected(tmp_path):
    for path in ROOT.glob("**/*.py"):
        copy = tmp_path / path.relative_to(ROOT)
        if copy.parts[len(tmp_path.parts)] in ("out", "cache", ".venv", "venv"):
            continue
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copy)
    for name in ("pyproject.toml", "README.md", "docs", "runs", "results", "models", "learn.ipynb"):
        (tmp_path / name).symlink_to(ROOT / name)
    diffs = re.findall(r"```diff\n(.*?)```", PAGE, re.S)
    for diff in diffs:
        apply_diff(tmp_path, diff)
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-n", "0"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:]
    assert len(diffs) == 5
