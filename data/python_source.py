"""The installed Python as a text: its files, and what they say. No file is imported or run.

Out of scope: splitting and numbering (data/corpus.py), labels (data/tasks.py).
"""

import ast
import os
import sysconfig
import warnings

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
DOCUMENTED = (ast.Module, ast.ClassDef, *FUNCTIONS)


def walk_files(folder, follow_links=False):
    """Yield the paths of the files below a folder, without hidden ones.

    follow_links: bool, read linked folders too, each folder once.
    """
    seen = set()  # a linked folder may be above itself
    for root, folders, names in os.walk(folder, followlinks=follow_links):
        # in place, as os.walk goes on with this list; in an order that is that of every machine
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        place = os.path.realpath(root)
        if place in seen:
            folders.clear()
            continue
        seen.add(place)
        for name in names:
            path = os.path.join(root, name)
            if not name.startswith(".") and os.path.isfile(path):
                yield path  # not a pipe, not a broken link


def python_files(places=("platlib", "purelib", "stdlib")):
    """Return name -> path of the .py files of Python and its installed packages, without tests.

    Tests are files, or in folders, whose names begin with test. Names are relative, such as
    json/decoder.py, and sorted: the order is that of every machine.

    Args:
        places: of sysconfig: packages, and the standard library. The last one wins.
    """
    files = {}
    for place in places:
        root = sysconfig.get_path(place)
        for path in walk_files(root):
            name = os.path.relpath(path, root)
            # the folder of the standard library holds site-packages, too
            if name.endswith(".py") and "site-packages" not in name and "/test" not in f"/{name}":
                files[name] = path
    return dict(sorted(files.items()))


def python_texts(path, names=False):
    """Yield the docstrings of a .py file and the help topics of pydoc.

    Args:
        path: str. A file that does not parse has no texts.
        names: bool, yield for each function the distinct names that it uses, joined by spaces,
            instead. A function inside another is on its own.
    """
    try:
        with open(path, "rb") as file, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in other people's strings
            tree = ast.parse(file.read())
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return  # a template, Python 2, a test of some parser
    for node in ast.walk(tree):
        if names:
            if isinstance(node, FUNCTIONS):
                used = _list_used_names(node)
                if len(used) > 1:
                    yield " ".join(used)
        elif isinstance(node, DOCUMENTED):
            text = ast.get_docstring(node)
            if text:
                yield text
        elif isinstance(node, ast.Dict) and path.endswith("topics.py"):
            for value in node.values:
                if isinstance(value, ast.Constant) and isinstance(value.value, str):
                    yield value.value


def _list_used_names(function):
    """Return the distinct names in the body of a function, but for those in functions inside it."""
    used = {}  # a dict keeps the order
    todo = list(function.body)
    for node in todo:  # breadth first: the list grows while it is read
        if isinstance(node, ast.Name):
            used[node.id] = True
        elif isinstance(node, ast.Attribute):
            used[node.attr] = True
        if not isinstance(node, FUNCTIONS):
            todo.extend(ast.iter_child_nodes(node))
    return list(used)
