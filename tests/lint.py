"""Check the style of the project: print file:line and what is wrong; exit with 1 if anything is.

    python tests/lint.py

Here is only how the project is written: widths, phrases, docstrings, imports that run one way,
headings, and the table of files in the README. What the code does is tested by pytest.
"""

import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MAX_WIDTH = 100
LEAVES = {"hashing.py", "bloom.py", "embeddings.py", "attention.py"}  # each is copied alone
SCRIPTS = {"pretrain.py", "finetune.py", "infer.py"}

# What no line of code may hold, and why. A letter in brackets: so that no rule finds itself
RULES = {
    r"(?<![\w.])(exe[c]|eva[l]|global[s])\(": "code is not made of text",
    r"(?<![\w.`])has[h]\(": "differs between processes",
    r"\bexcep[t]:": "hides every error",
    r"type=boo[l]\b": 'bool("False") is True',
    r"trust_remote_cod[e]|weights_only=Fals[e]": "runs the code of a download",
    r"\w :[=] ": "an assignment has a line of its own",
    r"(?i)strange[r]|told to sto[p]|usual librar[y]|commones[t]|words of the trad[e]|is of -[-]|"
    r"wanted .{0,40}, go[t]|goes on, bi[t]|who meets who[m]": "expected plain technical English",
}


def check_lines(text):
    """Yield (line, message) of lines of code that are too wide or break a rule."""
    for number, line in enumerate(text.splitlines(), 1):
        if len(line) > MAX_WIDTH:
            yield number, f"expected at most {MAX_WIDTH} columns, got {len(line)}"
        for pattern, reason in RULES.items():
            match = re.search(pattern, line)
            if match:
                yield number, f"{match[0]}: {reason}"


def check_docstrings(tree):
    """Yield (line, message) of public functions and classes without a docstring."""
    for node in tree.body:
        name = getattr(node, "name", "_")  # only functions and classes have one
        if not name.startswith("_") and not ast.get_docstring(node):
            yield node.lineno, f"{name} has no docstring"


def list_imports(tree):
    """Return the set of paths, such as data/squad.py, of all names in the import statements."""
    paths = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            for name in re.findall(r"[\w.]+", ast.unparse(node)):
                paths.add(name.replace(".", "/") + ".py")
    return paths


def check_imports(imports):
    """Yield (file, message) where imports leave a leaf, read a script, or run in a circle.

    Args: imports dict, file -> set of files of ours that it imports.
    """
    for name, imported in imports.items():
        if name in LEAVES and imported:
            yield name, f"is copied alone, but imports {imported}"
        if imported & SCRIPTS and name != "baselines/canine.py":  # which is a script, too
            yield name, f"imports a script: {imported & SCRIPTS}"
    remaining = set(imports)
    free = remaining
    while free:  # take away what imports nothing of what remains
        free = {name for name in remaining if not imports[name] & remaining}
        remaining = remaining - free
    for name in remaining:
        yield name, f"imports in a circle: {imports[name] & remaining}"


def check_page(text):
    """Yield (line, message) of headings that are questions, or not in the list of contents."""
    for number, line in enumerate(text.splitlines(), 1):
        if re.match(r"#+ .*\?$", line):
            yield number, "expected a noun phrase as heading"
        if line.startswith("## "):
            anchor = re.sub(r"[^\w -]", "", line[3:].lower()).replace(" ", "-")
            if f"](#{anchor})" not in text:
                yield number, f"#{anchor} is not in the list of contents"


def main():
    """Print every problem; return whether there is any."""
    texts = {}
    for pattern in ("*.py", "*.md", "docs/*.md", "*/*.py", "tests/scripts/*.py"):
        for path in ROOT.glob(pattern):
            texts[str(path.relative_to(ROOT))] = path.read_text(encoding="utf-8")
    sources = {name for name in texts if not re.search(r"test|__init__|bench/|\.md", name)}
    imports = {}  # file -> files of ours that it imports
    problems = []

    for name, text in sorted(texts.items()):
        found = []  # (line, message)
        if name.endswith(".md"):
            found += check_page(text)
        else:
            found += check_lines(text)
        if name in sources:
            tree = ast.parse(text)
            found += check_docstrings(tree)
            imports[name] = list_imports(tree) & sources
            if f"]({name})" not in texts["README.md"]:
                found.append((1, "is not in the README's table of files"))
        problems += [f"{name}:{line}: {message}" for line, message in found]
    problems += [f"{name}:1: {message}" for name, message in check_imports(imports)]
    print("\n".join(problems))
    return len(problems) > 0


if __name__ == "__main__":
    sys.exit(main())
