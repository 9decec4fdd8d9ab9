"""Tests of support/flags.py: random flags give results or one line of error."""

import random
import re
from pathlib import Path

import pytest

import finetune
import infer
import pretrain
from support.flags import build_parser as build_pretrain_parser
from tests.helpers import SMALL, run_main

USUAL = ["1", "2", "3", "8", "0.1"]
WRONG_NUMBERS = ["", "x", "0", "-1", "1_0", "1e-3", "1e39", "inf", "nan", "²", "9" * 5_000]
WRONG_TEXTS = ["", " ", "x", "a,b", "%s {}", "é/日本", "\udcff", "no/such/file.txt", "/dev/null",
               "a" * 300]


def draw_flags(rng, parser, known):
    """Return up to five random flags of a parser, as words --flag=value.

    Args:
        known: dict, flag -> values that are here. Three of four values are among these, or among
            the choices of the parser, or usual. The others are wrong, or unusual.
    """
    words = []
    actions = [action for action in parser._actions if action.option_strings]
    for action in rng.sample(actions[1:], rng.randint(1, 5)):  # without --help
        flag = action.option_strings[-1]
        if action.nargs == 0:
            words.append(flag)
            continue
        values = known.get(action.dest, action.choices or USUAL)
        if rng.random() < 0.25:
            values = WRONG_NUMBERS if action.type else WRONG_TEXTS
        words.append(f"{flag}={rng.choice(list(values))}")
    return words


@pytest.fixture
def files(request, tmp_path, monkeypatch, text_path, pages_path, cache_dir):
    """Return dict, flag -> values that are here, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    runs = [request.getfixturevalue(name) for name in ("sr_run", "sets_run", "median_run")]
    Path("rows.csv").write_text("text,label\n" + "a good thing,yes\na bad thing,no\n" * 9)
    texts = ["rows.csv", text_path, pages_path]
    return dict(
        # of pretrain.py
        data=[text_path, pages_path],
        field=["text", "links"],
        cache=[cache_dir],
        init_from=runs,
        preset=["tiny"],
        # of finetune.py
        train=texts,
        dev=texts,
        text=["text"],
        label=["label"],
        task=["sst2"],
        data_dir=["."],
        # of infer.py
        ckpt=runs,
        file=texts,
        vectors=["v.npy", "/dev/full"],
        # of all
        out=["out"],
        device=["cpu", "tpu"],
        dtype=["float32"],
    )


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("script, build_parser, start", [
    (pretrain, build_pretrain_parser,
     "--data {data} --cache {cache} " + " ".join(SMALL)),
    (finetune, finetune.build_parser,
     "--ckpt {ckpt} --train rows.csv --dev rows.csv --text text --label label --epochs 1 "
     "--seeds 1 --device cpu --dtype float32 --no-compile"),
    (infer, infer.build_parser, "--ckpt {ckpt}"),
])
def test_random_flags_give_results_or_one_line(script, build_parser, start, seed, files):
    """The whole script, with a tiny model: exit code 0 and finite numbers, or 2 and one line."""
    rng = random.Random(seed)
    argv = start.format(**{flag: values[0] for flag, values in files.items()}).split()
    argv += draw_flags(rng, build_parser(), files)
    if script is infer:
        argv.append(rng.choice(["the cat", "[MASK] the", "", "zebra"]))

    done = run_main(script.main, *argv)

    assert done.code in (None, 0, 2), (argv, done)
    if done.code == 2:
        last_line = done.err.strip().splitlines()[-1]  # argparse prints its usage before it
        assert re.match(r"\w+\.py: ", last_line), (argv, done)
    text = done.out + done.err
    for path in Path().rglob("*.json*"):
        text += path.read_text()
    for word in ("Traceback", "NaN", "Infinity"):
        assert word not in text, (argv, done)
