"""docs/reading.md is true: functions, tests and quoted lines exist, and commands select tests.

The answers that state a number or a name are computed again, where no training is needed.
"""

import ast
import itertools
import math
import re
import shlex
import string
from collections import Counter

import numpy as np
import pytest

from bloom import BloomMap
from data.tasks import draw_groups
from hashing import sketch_index
from pretrain import list_uses
from tests.lint import find_definition
from tests.support import ROOT

PAGE = (ROOT / "docs/reading.md").read_text(encoding="utf-8")
STOPS = PAGE.split("\n### ")[1:]


def list_functions():
    """Return (file, name) of each function to read: after "Read", a link and names in backticks."""
    found = []
    for paragraph in re.findall(r"^Read \[.*?\n\n", PAGE, re.M | re.S):
        for path, names in re.findall(r"\]\(\.\./(.*?)\):([^\[]*)", paragraph):
            for name in re.findall(r"`(.*?)`", names):
                found.append((path, name))
    return found


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
        assert name in names


def test_quoted_lines_of_code_exist():
    """A diff has "--- file" first; "-" and " " begin a line of that file, and "+" a new one."""
    diffs = re.findall(r"```diff\n(.*?)```", PAGE, re.S)
    assert diffs
    for diff in diffs:
        for line in diff.splitlines():
            if line.startswith("--- "):
                code = (ROOT / line[4:]).read_text(encoding="utf-8").splitlines()
            elif line[0] in "- ":
                assert line[1:] in code, line


def test_both_beam_searches_name_the_lines_that_the_page_promises():
    """Comments such as "lines 5 and 6: ..." in bloom.py."""
    assert 'comments "line 2" to "line 8", the lines of the algorithm' in PAGE
    code = (ROOT / "bloom.py").read_text(encoding="utf-8")
    lines = code.splitlines()
    for name in ("beam_search_reference", "beam_search"):
        node = find_definition(ast.parse(code), name)
        body = "\n".join(lines[node.lineno:node.end_lineno])
        numbers = set()
        for part in re.findall(r"# lines? (\d(?: and \d)?)", body):
            numbers.update(part.split(" and "))
        assert sorted(numbers) == list("2345678"), name


def test_numbers_of_pairs_in_stop_3():
    """Pairs of the words of three letters that share all k hashes of 50 buckets."""
    words = ["".join(letters) for letters in itertools.product(string.ascii_lowercase, repeat=3)]
    num_pairs = math.comb(len(words), 2)
    expected = [f"{num_pairs / 50**k:,.0f}" for k in (1, 2, 3)]
    counted = []
    for k in (1, 2, 3, 5):
        groups = Counter(map(bytes, sketch_index(words, k, 50)))
        counted.append(f"{sum(math.comb(n, 2) for n in groups.values()):,}")
    text = " ".join(PAGE.split())
    assert f"{', '.join(expected)} and {num_pairs / 50**5:.1f} for k" in text
    assert f"Counted are {', '.join(counted[:3])} and {counted[3]}." in text


def test_number_of_digests_in_stop_11(monkeypatch):
    monkeypatch.setattr(BloomMap, "swap_repeated", lambda self: True)
    digest = BloomMap(1_000, 7, seed=5).digest
    _, counts = np.unique(digest, axis=0, return_counts=True)
    num_alike = counts[counts > 1].sum()
    text = " ".join(PAGE.split())
    assert f"1,000 items have {len(counts)} digests, so {1_000 - len(counts)} are missing" in text
    assert f"and {num_alike} items cannot be told from another" in text


def test_flags_and_rows_of_stop_14():
    """The head of S+R uses --noise alone. Three texts have eight rows each; two are asked for."""
    assert "`--noise`: the table `HEAD_FLAGS` goes by head." in PAGE
    assert list_uses()["objective"]["sr"] == ["noise"]
    assert "\nNo row chooses. A tenth of 24 rows is two" in PAGE
    rows = [(("a good thing",), 0), (("a bad thing",), 1), (("a strange thing",), 2)] * 8
    selecting, train = draw_groups(rows, round(0.1 * len(rows)), seed=1)
    assert selecting == []
    assert train == rows
