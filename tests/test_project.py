"""The project's own rules: imports, docstrings, style, help texts, and a README whose commands run."""

import ast
import re
import shutil
import subprocess
import sys

import pytest

from tests.support import ROOT

LEAVES = ("hashing", "bloom", "embeddings", "attention")  # each can be copied alone
SCRIPTS = ("pretrain", "finetune", "infer")
FILES = ("hashing", "bloom", "embeddings", "attention", "baselines.bag", "baselines.canine", "model",
         "objectives", "tokenizer",
         "runtime", "console", "infer_io", "settings", "pretrain", "finetune", "infer", "report", "data.python_source",
         "data.corpus", "data.batches", "data.codes", "data.tasks", "data.squad")
PATHS = {name: ROOT / f"{name.replace('.', '/')}.py" for name in FILES}
TEXTS = {name: path.read_text(encoding="utf-8") for name, path in PATHS.items()}
TREES = {name: ast.parse(text) for name, text in TEXTS.items()}


def own_imports(name):
    """Return the files of ours that a file imports."""
    modules = set()
    for node in ast.walk(TREES[name]):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            modules |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return modules & set(FILES)


def test_every_source_file_is_listed():
    files = {path.stem for path in ROOT.glob("*.py")}
    for folder in ("data", "baselines"):
        files |= {f"{folder}.{path.stem}" for path in (ROOT / folder).glob("*.py")} - {f"{folder}.__init__"}
    assert files - {"conftest", "test_all"} == set(FILES)


def test_imports_run_one_way_on_few_floors():
    floors = {}

    def floor(name, below=()):
        assert name not in below, f"circle: {below}"
        if name not in floors:
            floors[name] = 1 + max((floor(other, (*below, name)) for other in own_imports(name)), default=0)
        return floors[name]

    assert max(map(floor, FILES)) <= 6
    assert not any(own_imports(name) for name in (*LEAVES, "data.batches", "console"))
    assert not any(own_imports(name) & set(SCRIPTS) for name in FILES)
    assert "torch" not in TEXTS["hashing"].replace("torch.", "")


def run_python(*arguments, cwd=ROOT):
    """Run Python in a process of its own."""
    return subprocess.run([sys.executable, *arguments], cwd=cwd, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize("name", LEAVES)
def test_leaf_runs_alone(name, tmp_path):
    shutil.copy(PATHS[name], tmp_path)
    done = run_python(f"{name}.py", cwd=tmp_path)
    assert done.returncode == 0 and 3 < done.stdout.count("\n") <= 25, done.stderr


@pytest.mark.parametrize("name", ["model", "objectives", "baselines.bag", "baselines.canine"])
def test_demo_fits_a_screen(name):
    done = run_python("-m", name)
    assert done.returncode == 0 and 3 < done.stdout.count("\n") <= 25, done.stderr


@pytest.mark.parametrize("name", FILES)
def test_public_names_have_docstrings(name):
    for node in TREES[name].body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
            assert ast.get_docstring(node), f"{name}.{node.name}"


@pytest.mark.parametrize("name", FILES)
def test_paper_map_matches_tags_in_code(name):
    """A header's `Paper map` names tags and where they are; each is there, and no other tag anywhere."""
    header, body = ast.get_docstring(TREES[name]), TEXTS[name].split('"""', 2)[2]
    tags = set(re.findall(r"\[(?:HF|SR|FH|CA|BERT|V|GLUE|SQ|BL|SB|CM|SV)\b[^\]]*\]", body))
    section = re.search(r"Paper map:(.*?)\n(?=\w[\w ]*:)", header + "\nEnd:", re.S)
    def find(tree, place):
        """Return the function, class or assignment of a dotted name, or None."""
        first, _, rest = place.partition(".")
        for node in ast.walk(tree):
            names = [getattr(node, "name", None), *(getattr(t, "id", None) for t in getattr(node, "targets", ()))]
            if first in names and not isinstance(node, ast.alias):
                return find(node, rest) if rest else node

    places = re.findall(r"(\[[^\]]+\])\s+([\w.]+)", section[1] if section else "")
    places = [(tag, place) for tag, place in places if find(TREES[name], place)]  # not a title after a tag
    assert {tag for tag, _ in places} == tags
    for tag, place in places:
        node = find(TREES[name], place)
        source = ast.get_source_segment(TEXTS[name], node) + "\n" + TEXTS[name].splitlines()[node.lineno - 2]
        assert tag in source, f"{tag} does not stand at {place}"


BANNED_CALLS = ("exec", "eval", "globals", "hash")
# in a form that does not match itself
BANNED_WORDS = re.compile(r"strange[r]|told to sto[p]|usual librar[y]|commones[t]|words of the trad[e]|is of -[-]|"
                          r"wanted .{0,40}, go[t]|goes on, bi[t]|who meets who[m]", re.I)
SOURCES = [path for pattern in ("*.py", "data/*.py", "baselines/*.py", "bench/*.py", "tests/**/*.py")
           for path in ROOT.glob(pattern)]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_source_follows_house_rules(path):
    text = path.read_text(encoding="utf-8")
    width = 120 if path.parts[-2] in ("bench", "tests") else 110
    assert max(map(len, text.splitlines() or [""])) <= width
    assert not BANNED_WORDS.findall(text)
    for node in ast.walk(ast.parse(text)):
        assert not (isinstance(node, ast.ExceptHandler) and node.type is None)
        if isinstance(node, ast.Call):
            assert getattr(node.func, "id", "") not in BANNED_CALLS, node.lineno
            for keyword in node.keywords:
                assert keyword.arg not in ("weights_only", "trust_remote_code")
                assert not (keyword.arg == "type" and getattr(keyword.value, "id", "") == "bool")


@pytest.mark.parametrize("mode", [(), ("-OO",)])  # without docstrings
@pytest.mark.parametrize("name", SCRIPTS)
def test_help_names_every_flag_and_every_flag_is_read(name, mode):
    done = run_python(*mode, f"{name}.py", "--help")
    assert done.returncode == 0 and "Traceback" not in done.stderr and "None:" not in done.stdout
    text = "".join(TEXTS[other] for other in {name, *own_imports(name)})
    for flag in set(re.findall(r"--(\w+)", done.stdout)) - {"help", "nproc_per_node"}:
        if not flag.startswith("no"):
            reads = len(re.findall(rf'\.{flag}\b|"{flag}"|\b{flag}=', text))
            assert reads > (f'"--{flag}"' not in text), f"--{flag} is never read"


def test_importing_does_nothing():
    done = run_python("-c", f"import {', '.join(FILES)}")
    assert done.returncode == 0 and not done.stdout and not done.stderr
