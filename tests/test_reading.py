"""docs/reading.md and reading-2.md are true: the functions to read exist, commands select tests."""

import ast
import re

import pytest

from tests.commands import list_page_commands, split_command
from tests.support import ROOT

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


def find_definition(node, name):
    """Return the statement in the body of a node that defines a name; None without one."""
    for child in getattr(node, "body", []):
        if getattr(child, "name", "") == name:
            return child
        if isinstance(child, ast.Assign) and ast.unparse(child.targets[0]) == name:
            return child
    return None


def list_tests(path):
    """Return the names of the test functions of a file, without importing it."""
    code = (ROOT / path).read_text(encoding="utf-8")
    return re.findall(r"^def (test_\w+)", code, re.M)


@pytest.mark.parametrize("path, name", list_functions())
def test_function_to_read_exists(path, name):
    node = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    for part in name.split("."):
        node = find_definition(node, part)
        assert node is not None, f"{path} has no {name}"


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
