"""docs/reading.md and reading-2.md are true: the functions to read exist, commands select tests."""

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
