"""Check the style of the project: print file:line and what is wrong; exit with 1 if anything is.

    python tests/lint.py

Here is only how the project is written: widths, phrases, docstrings, Paper maps, imports that run
one way, headings, and the table of files in the README. What the code does is tested by pytest.
"""

import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MAX_WIDTH = 100
LEAVES = {"hashing.py", "bloom.py", "embeddings.py", "attention.py"}  # each is copied alone
SCRIPTS = {"pretrain.py", "finetune.py", "infer.py"}
PAPER_TAG = r"\[(?:HF|SR|FH|CA|BERT|V|GLUE|SQ|BL|SB|CM|SV)\b[^\]]*\]"

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


def find_definition(node, name):
    """Return the statement in the body of a node that defines a name; None without one."""
    for child in getattr(node, "body", []):
        if getattr(child, "name", "") == name:
            return child
        if isinstance(child, ast.Assign) and ast.unparse(child.targets[0]) == name:
            return child
    return None


def check_paper_map(text, tree):
    """Yield (line, message) where the header's Paper map and the tags in the code differ.

    The map has pairs such as `[HF §3.2] md5_digests`: the tag stands in the definition of that
    name or in the line above. The code has no other tags.
    """
    lines = text.splitlines()
    header_end = tree.body[0].end_lineno
    header = "\n".join(lines[:header_end])
    section = header.partition("Paper map:")[2]
    section = re.split(r"\n\w[\w ]*:", section)[0]  # up to the next title
    mapped = set()
    for tag, place in re.findall(r"(\[[^\]]+\])\s+([\w.]+)", section):
        mapped.add(tag)
        node = tree
        for name in place.split("."):  # Model.embed is embed in Model
            node = find_definition(node, name)
        if node is None:
            yield 1, f"Paper map: {place} not found"
        elif tag not in "\n".join(lines[node.lineno - 2:node.end_lineno]):
            yield node.lineno, f"Paper map: {tag} does not stand at {place}"
    for number, line in enumerate(lines[header_end:], header_end + 1):
        for tag in re.findall(PAPER_TAG, line):
            if tag not in mapped:
                yield number, f"{tag} is not in the Paper map"


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
        if imported & SCRIPTS:
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
            found += check_paper_map(text, tree)
            imports[name] = list_imports(tree) & sources
            if f"]({name})" not in texts["README.md"]:
                found.append((1, "is not in the README's table of files"))
        problems += [f"{name}:{line}: {message}" for line, message in found]
    problems += [f"{name}:1: {message}" for name, message in check_imports(imports)]
    print("\n".join(problems))
    return len(problems) > 0


if __name__ == "__main__":
    sys.exit(main())
