"""The files as a user meets them: those that are copied alone, demos, --help, and imports."""

import importlib
import re
from dataclasses import fields
from inspect import signature

import pytest

import finetune
import infer
from data.coders import CODERS
from embeddings import EMBEDDINGS
from model import Config
from support.flags import DEFAULTS, INHERITED, MAY_CHANGE, build_parser, list_conditional
from tests.helpers import ROOT, run_main, run_script

PARSERS = [build_parser, finetune.build_parser, infer.build_parser]
FOLDERS = ("", "data/", "support/", "baselines/")
SOURCES = [path for folder in FOLDERS for path in ROOT.glob(f"{folder}*.py")]
SOURCES = [path for path in SOURCES if "test" not in path.name]


def assert_fits_a_screen(text):
    """Assert that a demo shows something, in at most 25 lines of at most 110 columns."""
    lines = text.splitlines()
    assert 3 < len(lines) <= 25
    assert max(map(len, lines)) <= 110


def test_demos_of_leaves_run_where_no_other_file_is_found():
    code = (
        "import runpy, sys\n"
        "sys.path.remove('')\n"
        "for path in sys.argv[1:]:\n"
        "    sys.argv = [path]\n"
        "    runpy.run_path(path, run_name='__main__')\n"
        "    print('<end>')")
    names = ("words", "hashing", "embeddings", "bloom", "search", "attention")
    leaves = [ROOT / f"{name}.py" for name in names]
    done = run_script("-c", code, *leaves, PYTHONPATH="")
    *demos, rest = done.stdout.split("<end>\n")
    assert len(demos) == len(leaves)
    for demo in demos:
        assert_fits_a_screen(demo)


@pytest.mark.parametrize("name", ["pretrain", "finetune", "infer"])
def test_help_of_a_script_works(name):
    script = importlib.import_module(name)

    done = run_main(script.main, "--help")

    assert done.code == 0
    assert "usage" in done.out
    assert "None" not in done.out  # a missing text or default


@pytest.mark.parametrize("build_parser", PARSERS)
def test_flag_of_a_script_is_read(build_parser):
    """A flag that nobody reads has no effect."""
    text = "".join(path.read_text("utf-8") for path in SOURCES)
    for action in build_parser()._actions[1:]:  # without --help
        assert re.search(rf"\b(args|config|c|self)\.{action.dest}\b", text), action.dest


def test_field_of_config_has_a_flag_and_is_read():
    """Else nobody can choose it, or it has no effect. The checks of config.py do not count."""
    follow = {  # from a preset, the data, the task or another flag
        "grams", "act", "order", "spare_positions", "types", "special_tokens", "sep_id", "head",
        "labels", "pool"}
    names = {field.name for field in fields(Config)}
    assert names - {action.dest for action in build_parser()._actions} == follow
    sources = [path for path in SOURCES if path.name not in ("config.py", "flags.py", "canine.py")]
    text = "".join(path.read_text("utf-8") for path in sources)
    used = set(re.findall(r"\b(?:c|config)\.(\w+)", text))
    for embedding in EMBEDDINGS.values():
        used |= {*signature(embedding).parameters, *CODERS[embedding.code_format].list_fields()}
    assert names <= used


def test_setting_of_pretraining_has_its_place():
    """A new one, too: does --init_from take it along, may it change when a run resumes?"""
    of_one_run = {
        "init_from", "batch", "steps", "lr", "lr_mlm", "warmup", "schedule", "decay", "beta2",
        "clip", "seed", "mask", "noise", "samples", "short"}
    names = {action.dest for action in build_parser()._actions[1:]} | set(DEFAULTS)
    of_model = {field.name for field in fields(Config)}
    assert names - of_model - {*INHERITED, *MAY_CHANGE} == of_one_run
    assert not set(INHERITED) & set(MAY_CHANGE)


def test_flag_of_hashes_is_refused_where_it_has_no_effect():
    """By the fields of a code format, or FLAGS_OF_PART; --coherent has a check of its own."""
    for group in build_parser()._action_groups:
        if group.title.startswith(("hashes", "Bloom")):
            flags = {action.dest for action in group._group_actions}
            assert flags and flags - list_conditional() <= {"coherent"}


def test_importing_does_nothing():
    paths = [path.relative_to(ROOT).with_suffix("").as_posix() for path in SOURCES]
    names = ", ".join(paths).replace("/", ".")
    done = run_script("-c", f"import {names}")
    assert done.stdout + done.stderr == ""


@pytest.mark.parametrize("pattern", [
    r"(?<![\w.`])hash\(",  # the builtin: its value for a str differs between processes
    r"type=bool\b",  # bool("False") is True
    r"trust_remote_code|weights_only=False",  # a download would run its code
])
def test_code_avoids_what_fails_in_silence(pattern):
    for path in SOURCES:
        assert not re.search(pattern, path.read_text(encoding="utf-8")), path
