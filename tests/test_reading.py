"""docs/reading.md and reading-2.md are true: functions exist, commands work, diffs apply."""

import re

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


def list_changes():
    """Return (file, changes) of each part of a diff: lines that begin with a space, + or -."""
    found = []
    for diff in re.findall(r"```diff\n(.*?)```", PAGE, re.S):
        for part in re.split(r"^--- ", diff, flags=re.M)[1:]:
            name, *changes = part.rstrip("\n").split("\n")
            found.append((name, changes))
    return found


@pytest.mark.parametrize("name, changes", list_changes())
def test_diff_fits_its_file(name, changes):
    """The lines that it keeps or removes are there, in this order, and the members it adds are new.

    So an exercise is never a part of the code already: it may be a contribution, too.
    """
    code = (ROOT / name).read_text(encoding="utf-8")
    lines = code.split("\n")
    place = 0
    for change in changes:
        text = change[1:]
        if change.startswith("+"):
            for member in MEMBER.findall(text):
                assert member not in code, f"{name} has {member} already: change the exercise"
        else:
            place = lines.index(text, place) + 1  # raises if the file has no such line
