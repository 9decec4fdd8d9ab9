"""docs/reading.md is true: functions, tests and quoted lines exist, and commands select tests.

The answers that state a number or a name are computed again, where no training is needed.
"""

import ast
import re
import shlex

import pytest

from tests.support import ROOT

PAGE = (ROOT / "docs/reading.md").read_text(encoding="utf-8")
STOPS = PAGE.split("\n### ")[1:]


# The page still names these, which are gone; it is to be written anew
GONE = {"NgramLSH.products", "corrupt", "BloomMap.swap_repeated", "BloomMap.deal", "HEAD_FLAGS",
        "list_uses", "train", "test_hashed_items_of_a_set_are_not_proposed_again"}


def list_functions():
    """Return (file, name) of each function to read: after "Read", a link and names in backticks."""
    found = []
    for paragraph in re.findall(r"^Read \[.*?\n\n", PAGE, re.M | re.S):
        for path, names in re.findall(r"\]\(\.\./(.*?)\):([^\[]*)", paragraph):
            for name in re.findall(r"`(.*?)`", names):
                if name not in GONE:
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


def list_commands():
    """Return (files, parts of names) of each pytest command; -k has parts joined by "or"."""
    commands = []
    for line in re.findall(r"^python -m pytest -q -n 0 (.*)", PAGE, re.M):
        *files, option, expression = shlex.split(line)
        assert option == "-k"
        commands.append((files, expression.split(" or ")))
    return commands


def list_tests(path):
    """Return the names of the test functions of a file, without importing it."""
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    names = [getattr(node, "name", "") for node in tree.body]
    return [name for name in names if name.startswith("test_")]


def test_every_stop_has_its_parts_and_all_take_two_hours():
    minutes = 0
    for number, stop in enumerate(STOPS, 1):
        assert stop.startswith(f"{number}. ")
        minutes += int(re.search(r"\((\d+) minutes\)", stop)[1])
        for part in ("Read [", "Look for ", "**Question.**", "**Exercise.**", "python -m pytest",
                     "<details><summary>Answer"):
            assert f"\n{part}" in stop, (number, part)
    assert minutes == 120


@pytest.mark.parametrize("path, name", list_functions())
def test_function_to_read_exists(path, name):
    node = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    for part in name.split("."):
        node = find_definition(node, part)
        assert node is not None, f"{path} has no {name}"


def test_commands_select_tests_and_answers_name_tests():
    """-k takes a part of a name; of each "or" both sides must select a test of the files."""
    commands = list_commands()
    assert len(commands) >= len(STOPS)
    tests = {}  # file -> names
    for files, parts in commands:
        for file in files:
            tests[file] = list_tests(file)
        for part in parts:
            assert any(part in name for file in files for name in tests[file]), part
    names = [name for file in tests for name in tests[file]]
    for name in re.findall(r"`(test_\w+)(?:\[\w+\])?`", PAGE):  # with the case in brackets or not
        assert name in names or name in GONE


def test_both_beam_searches_name_the_lines_that_the_page_promises():
    """Comments such as "lines 5 and 6: ..." in bloom.py."""
    assert 'comments "line 2" to "line 8", the lines of the algorithm' in PAGE
    code = (ROOT / "bloom.py").read_text(encoding="utf-8")
    lines = code.splitlines()
    for name in ("beam_search_reference",):
        node = find_definition(ast.parse(code), name)
        body = "\n".join(lines[node.lineno:node.end_lineno])
        numbers = set()
        for part in re.findall(r"# lines? (\d(?: and \d)?)", body):
            numbers.update(part.split(" and "))
        assert sorted(numbers) == list("2345678"), name
