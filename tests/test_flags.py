"""Random flags: every script ends with finite results or with one line of error, never with a traceback."""

import json
import os
import random
import resource
import sys
import tempfile
from io import StringIO
from pathlib import Path

import hypothesis
import hypothesis.strategies as st
import pytest

import finetune
import infer
import pretrain
import settings
from bench import attention, common, figures, hashformers, sketch, superbloom, training
from model import PRESETS
from tests.support import SMALL, run_main
from tests.test_infer import paths  # noqa: F401  a fixture: untrained models with all heads
from tests.test_squad import make_questions, nested_file

EXAMPLES = 500 if "LONG" in os.environ else 10  # of each of the four kinds of scripts
USUAL, HUGE = ["1", "2", "3", "8", "0.1"], ["9" * 5_000, "2147483647", "2147483648", "1e38", "1e39", "inf"]
NUMBERS = HUGE + ["", " 2", *"0 31 1_0 0.5 1e-3 -1 nan -inf x ² ١".split()]
TEXTS = ["", " ", "x", "no/such/file.txt", "é/日本", "\udcff", "a,b", "%s {}", "-1", "a" * 300, "/dev/null"]
TRAIN = " ".join(SMALL) + " --steps 2 --warmup 0 --cache {cache} --out out --data "
TUNE = "--epochs 1 --seeds 1 --device cpu --dtype float32 --train {dir}/train.%s --dev {dir}/dev.%s "
OWN, SQUAD, COLUMNS = TUNE % ("tsv", "tsv"), TUNE % ("json", "json"), "--text sentence --label label"
SCRIPTS = dict(  # main, parser, and how the command lines begin
    pretrain=[(pretrain.main, settings.parser(""), [TRAIN + kind for kind in (
        "{pages} --preset superbloom-small --alpha 5", "{text}", "{text} --emb lookup --objective mlm",
        "{text} --emb median", "{text} --emb weighted", "{text} --attn lsh")])],
    finetune=[(finetune.main, finetune.parser(), [
        OWN + "--ckpt {sr} " + COLUMNS, OWN + "--preset proformer " + COLUMNS,
        OWN + "--ckpt {sr} --task sst2", SQUAD + "--ckpt {sr} --task squad_v2"])],
    infer=[(infer.main, infer.parser(), [""])], bench=[])
for file in (attention, figures, hashformers, sketch, superbloom, training):
    commands = common.parser("", file.BENCHES)._actions[-1].choices
    start = dict(data="{pages}" if file is superbloom else "{text}", cache="{cache}", text="{text}", count=3)
    for name, bench in file.BENCHES.items():  # those without flags, and auto, take minutes
        words = [name, *(f"--{flag}={start[flag]}" for flag in bench.flags if flag in start)]
        SCRIPTS["bench"] += [(file.main, commands[name], [" ".join(words)])] * (bool(bench.flags) and name != "auto")


@pytest.fixture(scope="module")
def local(request, tmp_path_factory, paths):  # noqa: F811
    """Places for SCRIPTS, and flag -> usual texts, where not all of its type are here and end soon."""
    folder, rng = tmp_path_factory.mktemp("local"), random.Random(5)
    text, pages, cache, *runs = (str(request.getfixturevalue(name)) for name in (
        "text_path", "pages_path", "cache_dir", "sr_run", "sets_run", "median_run"))
    for name, questions in (("train", make_questions(rng, 30)), ("dev", make_questions(rng, 30))):
        rows = [f"{question['context']}\t{i % 2}" for i, question in enumerate(questions)]
        (folder / f"{name}.tsv").write_text("\n".join(["sentence\tlabel", *rows]))
        (folder / f"{name}.json").write_text(json.dumps(nested_file(questions)))
    (folder / "results.json").write_text('{"model": {"parameters": 9, "embedding": 3}, "tasks": {}}')
    files, runs = [text, pages, *map(str, folder.iterdir())], [*runs, *map(str, paths.values())]
    return dict(text=text, pages=pages, cache=cache, sr=runs[0], dir=folder), dict(
        dict.fromkeys(("data", "train", "dev", "file", "words"), files), ckpt=runs, init_from=runs, runs=runs,
        data_dir=[str(folder)], baseline=[str(folder)], cache=[cache], text=["sentence", text],
        vectors=["a.npy", "/dev/full"], columns=["text", "sentence"], field=["text", "links", "title,n"],
        label=["label"], only=["1", "lsh", "("], device=["cpu", "tpu", "cuda:7"], compile=["--no-compile"],
        steps=["1", "3"], epochs=["0", "1"], layers=["0", "2"], seeds=["1", "2"], count=["1"],
        task=["sst2", "mnli", "squad"], texts=["the cat", "[MASK] the", "Miles Davis [MASK]", "zebra"])


def draw_command_line(draw, parser, start, local):
    """Draw words after start: the required flags and up to four more, most of them with usual values."""
    chosen = draw(st.lists(st.sampled_from(parser._actions[1:]), max_size=4, unique_by=id))  # without --help
    required = [action for action in parser._actions if action.required and action not in chosen]
    for action in required + chosen:
        others = NUMBERS if action.type and action.dest not in local else TEXTS
        usual = local.get(action.dest) or action.choices or (USUAL if action.type else TEXTS)
        value = st.sampled_from([*usual] * (4 * len(others)) + others * len(usual))
        if action.nargs == 0:
            start = [*start, draw(st.sampled_from(local.get(action.dest, action.option_strings)))]
        elif action.option_strings:
            start = [*start, f"{action.option_strings[-1]}={draw(value)}"]
        else:
            start = start + draw(st.lists(value, max_size=2))
    return start


@pytest.mark.parametrize("kind", SCRIPTS)
@hypothesis.settings(max_examples=EXAMPLES, deadline=None, database=None, derandomize=True,
                     suppress_health_check=list(hypothesis.HealthCheck))
@hypothesis.given(data=st.data())
def test_random_flags_give_results_or_are_refused(kind, local, data):
    """Each run has a new folder, on a machine of 1 GB. Of benches, the results of runs are made up."""
    peak = max(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, 2 << 20)  # 2 GB, in KiB
    (places, texts), (main, parser, starts) = local, data.draw(st.sampled_from(SCRIPTS[kind]))
    start = data.draw(st.sampled_from(starts)).format(**places).split()
    argv = draw_command_line(data.draw, parser, start, texts)
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(os, "sysconf", lambda name: 1 << 15)  # pages, and bytes of one
        patch.setattr(sys, "stdin", StringIO("the [MASK] cat\n\n"))
        patch.setitem(PRESETS, "proformer", PRESETS["proformer"] | dict(width=24, heads=2, length=32))
        patch.setattr(common, "run_jobs", lambda function, jobs: ({"eval_loss": 1.0} for _ in jobs))
        patch.setattr(common, "run_in_new_process", lambda function, *args: (None, 1.0))
        patch.setattr(figures, "ASSETS", "assets")
        done = run_main(main, *argv)
        assert done.code in (None, 0) or done.code in (2, 130) and done.err.strip(), (argv, done)
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss <= peak, argv
        files = [] if done.code else Path().rglob("*.json*")
        text = done.out + done.err + "".join(path.read_text() for path in files)
        assert not any(word in text for word in ("Traceback", "NaN", "Infinity")), (argv, done)
