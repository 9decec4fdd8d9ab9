"""The installed Python as a text: which files it has, and what they say in words. No file is imported or run.

Out of scope: splitting and numbering (data/corpus.py), labels (data/tasks.py).
"""

import ast
import os
import sysconfig
import warnings


def walk_files(folder, ending=""):
    """Yield the files below a folder: no hidden ones, and none of a linked folder, which may be a loop."""
    for root, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        names = [name for name in names if name.endswith(ending) and not name.startswith(".")]
        yield from filter(os.path.isfile, (os.path.join(root, name) for name in names))


def python_files():
    """Return name -> path of every .py file of the standard library and installed packages, without tests."""
    files = {}
    for root in dict.fromkeys(sysconfig.get_path(name) for name in ("platlib", "purelib", "stdlib")):
        files |= {os.path.relpath(path, root): path for path in walk_files(root, ".py")}  # the last one wins
    return {name: files[name] for name in sorted(files)
            if "site-packages" not in name and "/test" not in f"/{name}"}


def python_texts(path, names=False):
    """Yield the docstrings of a .py file and the help topics of pydoc; nothing of a file that does not parse.

    With `names`, yield for each function the distinct names that it uses, joined by spaces, instead.
    """
    try:
        with open(path, "rb") as file, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in other people's strings
            tree = ast.parse(file.read())
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return  # a template, Python 2, a test of some parser
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(tree):
        if names and isinstance(node, functions):
            used, todo = [], list(node.body)
            for n in todo:  # breadth first, as ast.walk; an inner function is a page of its own
                used += [name for field, name in ast.iter_fields(n) if field in ("id", "attr")]
                todo += [] if isinstance(n, functions) else ast.iter_child_nodes(n)
            if len(set(used)) > 1:
                yield " ".join(dict.fromkeys(used))
        elif not names and isinstance(node, (ast.Module, ast.ClassDef, *functions)):
            yield ast.get_docstring(node) or ""
        elif not names and isinstance(node, ast.Dict) and path.endswith("topics.py"):
            yield from (v.value for v in node.values if isinstance(getattr(v, "value", None), str))
