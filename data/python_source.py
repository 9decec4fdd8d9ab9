"""The installed Python as a text, and as a task: pydoc. No file is imported or run.

Out of scope: splitting and numbering (data/corpus.py), other tasks (data/tasks.py).
"""

import ast
import collections
import functools
import json
import os
import sysconfig
import warnings
from pathlib import Path

import numpy as np

from support.common import build_once, fingerprint
from words import list_words

PLACES = ("platlib", "purelib", "stdlib")  # names in sysconfig: packages, standard library
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
DOCUMENTED = (ast.Module, ast.ClassDef, *FUNCTIONS)
# The task pydoc: name the module that a docstring comes from
PYDOC_MODULES = 20
PYDOC_ROWS = {"train": 1_000, "dev": 200}  # for each module, at most
PYDOC_MIN_WORDS = 5  # shorter docstrings are left out


def walk_files(folder):
    """Yield the paths of the files below a folder, without hidden ones and linked folders."""
    for root, folders, names in os.walk(folder):
        # assigned in place: os.walk goes on into the folders that this list has then. Sorted, so
        # that all machines have one order
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in names:
            path = os.path.join(root, name)
            if not name.startswith(".") and os.path.isfile(path):
                yield path  # not a pipe, not a broken link


def python_files(places=PLACES):
    """Return relative path -> path of the .py files of Python and its packages, without tests.

    Relative paths are such as json/decoder.py on each system, and sorted, so that all machines have
    one order.

    Args:
        places: names in sysconfig. Where two places have one relative path, the later one is read.
    """
    files = {}
    roots = dict.fromkeys(sysconfig.get_path(place) for place in places)  # packages are in one
    for root in roots:
        for path in walk_files(root):
            relative = Path(path).relative_to(root).as_posix()
            # files and folders whose names begin with test, which drops numpy/testing too
            is_test = "/test" in f"/{relative}"
            # the folder of the standard library holds site-packages, too
            is_package = "site-packages" in relative
            if relative.endswith(".py") and not is_test and not is_package:
                files[relative] = path
    return dict(sorted(files.items()))


def python_texts(path):
    """Yield the docstrings of a .py file, and the help topics of pydoc_data/topics.py."""
    for node in list_nodes(path):
        if isinstance(node, DOCUMENTED):
            text = ast.get_docstring(node)
            if text:
                yield text
        # Python's help topics are the values of one dict
        elif isinstance(node, ast.Dict) and Path(path).match("pydoc_data/topics.py"):
            for value in node.values:
                if isinstance(value, ast.Constant) and isinstance(value.value, str):
                    yield value.value


def python_names(path):
    """Yield the distinct names that each function of a .py file uses, joined by spaces.

    A function inside another is on its own.
    """
    for function in list_nodes(path):
        if not isinstance(function, FUNCTIONS):
            continue
        names = {}  # a dict keeps the order
        todo = collections.deque(function.body)
        while todo:  # breadth first
            node = todo.popleft()
            if isinstance(node, ast.Name):
                names[node.id] = True
            elif isinstance(node, ast.Attribute):
                names[node.attr] = True
            if not isinstance(node, FUNCTIONS):
                todo.extend(ast.iter_child_nodes(node))
        if len(names) > 1:
            yield " ".join(names)


def list_nodes(path):
    """Iterate over the nodes of a .py file's syntax tree; over none if it does not parse."""
    try:
        with open(path, "rb") as file, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in other people's strings
            return ast.walk(ast.parse(file.read()))
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return []  # a template, Python 2, a test of some parser


# -------------------------------------------------------------------------------------------------
# pydoc


@functools.cache  # it looks at thousands of files
def build_pydoc(cache):
    """Return the folder of train.jsonl and dev.jsonl. They are written once."""
    files = python_files()
    # another Python, another package, or an edit of this file is another task
    sizes = [os.path.getsize(path) for path in files.values()]
    code = Path(__file__).read_text("utf-8")
    identity = fingerprint([code, list(files), sizes])
    return build_once(os.path.join(cache, f"pydoc-{identity}"), write_pydoc, files)


def write_pydoc(folder, files):
    """Write the docstrings of the largest modules, with the module's name, to a new folder."""
    print("preparing pydoc, once for all runs", flush=True)
    # split -> top-level module -> docstrings
    texts = {split: collections.defaultdict(list) for split in PYDOC_ROWS}
    seen = set()  # copied code must not bring a text into both splits
    for relative, path in files.items():
        module = relative.split("/")[0].removesuffix(".py")
        # whole files are held out, one in ten, by a hash of the path: new files move no other
        is_held_out = int(fingerprint(relative), 16) % 10 == 0
        split = "dev" if is_held_out else "train"
        for text in python_texts(path):
            words = " ".join(list_words(text))  # equal for a model, whatever their case and spaces
            if len(text.split()) >= PYDOC_MIN_WORDS and words not in seen:
                texts[split][module].append(text)
                seen.add(words)

    # the modules with most texts, of those with texts in both splits
    shared = texts["train"].keys() & texts["dev"].keys()
    shared = sorted(shared, key=lambda module: (-len(texts["train"][module]), module))

    rng = np.random.default_rng(0)
    os.makedirs(folder)
    for module in shared[:PYDOC_MODULES]:
        for split, max_rows in PYDOC_ROWS.items():
            docstrings = texts[split][module]
            with open(os.path.join(folder, f"{split}.jsonl"), "a") as file:
                for i in rng.permutation(len(docstrings))[:max_rows]:
                    row = dict(docstring=docstrings[i], label=module)
                    file.write(json.dumps(row) + "\n")
