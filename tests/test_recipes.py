"""Flags of pretrain.py: what they resolve to, those of the papers' rows, and what is refused."""

import dataclasses
from fnmatch import fnmatch
from pathlib import Path

import pytest
import torch

import pretrain
from model import Config
from support.common import load_checkpoint
from tests.commands import RUNS, list_run_commands, split_command
from tests.helpers import assert_refused, run_main


def resolve(flags):
    """Return the settings of a list of flags, those of Config included, as a dict."""
    args, _ = pretrain.parse_flags(flags)
    config = Config.choose(vars(args))
    return vars(args) | dataclasses.asdict(config)


# What a paper says, or where it is silent its released code, by the names of flags and of Config's
# fields, unless the script says it itself: for the rows of runs/ whose --out matches a pattern. A
# later pattern goes first
PAPERS = {
    # HashFormers §4.2, Table 4. 50K rows are 50,260 by the printed parameters
    "hf-*": dict(
        layers=12, width=768, heads=12, ffn=3072, length=512, types=1, act="gelu", dropout=0.1,
        batch=128, steps=500_000, lr=5e-5, warmup=10_000, schedule="linear", decay=0.01,
        beta2=0.9999, objective="sr", split="space", bits=128, chunk=10),
    "hf-bert-*": dict(split="bpe", vocab=50_000),
    "hf-bert-mlm": dict(objective="mlm", lr=1e-4, mask=0.15),
    "hf-pieces-*": dict(split="bpe", vocab=50_000),
    "hf-*-emb-50k": dict(rows=50_260),
    # Superbloom §3.2. Adam is AdamW without decay
    "sb*": dict(
        mask=0.15, length=32, types=2, act="relu", order=False, layers=12, vocab=None,
        steps=1_000_000, batch=1024, lr=1e-4, schedule="rsqrt", decay=0.0),
    "sb*baseline*": dict(objective="mlm"),
    "sb-superbloom": dict(width=768, heads=12, ffn=3072, emb="bloom", hashes=2, max_alpha=50),
    "sb3-d*": dict(emb="bloom", hashes=2),
    "sb[37]-*": dict(vocab=500_000, batch=4096, lr=2e-4),
    "sb3-*l1": dict(layers=1),
    # §4 trains on text as BERT does; batch, rate and steps are not given
    "sb4-*": dict(length=512, order=True, vocab=1_000_000),
    "sb[47]-hash*": dict(emb="bloom", hashes=2),
    # BERT-LSH §2.4 and the released code
    "bl-*": dict(
        layers=2, width=128, heads=2, ffn=512, length=512, types=2, act="gelu", emb="lookup",
        split="bpe", vocab=31_995, rows=32_000, objective="mlm", mask=0.15, attn="full", batch=8,
        steps=88_245, lr=5e-5, warmup=0, schedule="linear", decay=0.0),
    "bl-bert-lsh": dict(
        attn="lsh", lsh_bands=2, lsh_buckets=256, lsh_hashes=1, lsh_fill="zero",
        lsh_pairs="upper", lsh_redraw=True),
    # Median is all you need
    "cm-*": dict(
        layers=4, width=512, heads=4, length=512, batch=128, hashes=5, buckets=500,
        objective="hash-mlm"),
    "cm-lookup": dict(objective="mlm"),
}


def test_runs_of_the_papers_rows_resolve_to_their_settings():
    found = {}  # row, the name of --out -> settings
    for path in RUNS:
        for words in list_run_commands(path):
            script, flags = split_command(words)
            if script == "pretrain.py":
                settings = resolve(flags)
                found[Path(settings["out"]).name] = settings
    for pattern in PAPERS:  # each has its rows
        assert any(fnmatch(row, pattern) for row in found), pattern
    for row, settings in found.items():
        expected = {}
        for pattern, values in PAPERS.items():
            if fnmatch(row, pattern):
                expected |= values
        assert {name: settings[name] for name in expected} == expected, row


@pytest.mark.parametrize("flags, expected", [
    # emb, hash, split, objective, data, out
    ("", "proj lsh regex sr python out/proj-lsh"),
    ("--emb pool --split bpe", "pool lsh bpe sr python out/pool-lsh-bpe"),
    ("--emb lookup", "lookup lsh bpe sr python out/lookup-bpe"),
    ("--emb median", "median lsh regex hash-mlm python out/median"),
    ("--emb bloom", "bloom lsh items hash-mlm python-names out/bloom-items"),
    ("--preset bert-lsh", "lookup lsh bpe mlm python out/lookup-bpe-mlm-lsh-attention"),
    ("--preset median --emb proj", "proj lsh regex hash-mlm python out/proj-lsh-hash-mlm"),
    ("--data x/a.csv+python", "proj lsh regex sr x/a.csv+python out/proj-lsh-a+python"),
])
def test_flags_resolve_to_words_embedding_objective_and_out(flags, expected):
    settings = resolve(flags.split())
    names = ("emb", "hash", "split", "objective", "data", "out")
    assert " ".join(settings[name] for name in names) == expected


@pytest.mark.parametrize("flags, expected", [
    ("--preset median --emb lookup", dict(vocab=30_517, tied=True)),  # of the preset
    # the command line goes first
    ("--preset superbloom --decay 0.1", dict(decay=0.1)),
    # what follows from other flags
    ("--split items --attn lsh", dict(lsh_pairs="all")),
    ("--width 64 --heads 2", dict(ffn=256)),
    ("--steps 50", dict(warmup=5)),
    ("--steps 50 --warmup 0", dict(warmup=0)),
    ("--preset hashformer --emb lookup --objective mlm", dict(lr=1e-4)),
])
def test_sizes_and_recipe_resolve_to(flags, expected):
    settings = resolve(flags.split())
    assert {name: settings[name] for name in expected} == expected


@pytest.mark.parametrize("flags, fragments", [
    ("--emb median --hashes 4", ["hashes", "4", "odd"]),  # a median of an even number
    ("--mask 1 --objective hash-mlm", ["--mask", "1"]),
    # flags whose effect would be missed
    ("--emb lookup --hash md5", ["--hash requires other", "--emb lookup"]),
    ("--vocab 9", ["--vocab requires other", "--split regex"]),
    ("--mask 0.5", ["--mask requires other", "--objective sr"]),
    ("--buckets 7 --emb bloom", ["--buckets requires other", "--emb bloom"]),
    ("--features 9", ["--features: expected 128 at least"]),
    ("--key secret", ["--key requires other", "--hash lsh"]),
    ("--hash md5 --hash_seed 3", ["--hash_seed requires other", "--hash md5"]),
    ("--emb lookup --hash_seed 3", ["--hash_seed requires other", "--emb lookup"]),
    ("--coherent 3 --split items", ["--coherent", "3"]),
    ("--split items --short 0.1", ["--short", "items"]),
])
def test_flags_that_contradict_are_refused_before_any_file_is_made(tmp_path, flags, fragments):
    # without the check it would be the data that is refused, before hours of training
    files = ["--data", "absent.txt", "--out", tmp_path / "out"]
    assert_refused(pretrain.main, [*flags.split(), *files], *fragments)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("flag, value", [
    ("width", 64),  # of the model
    ("hash", "md5"),  # of the tokenizer
])
def test_init_from_with_another_size_or_hash_is_refused(sr_run, flag, value):
    flags = ["--init_from", sr_run, f"--{flag}", value]
    assert_refused(pretrain.main, flags, f"--{flag}: expected", "--init_from")


@pytest.mark.parametrize("name", ["preset", "split", "hash", "objective"])
def test_init_from_with_a_kind_that_is_no_more_is_refused(sr_run, tmp_path, name):
    checkpoint = load_checkpoint(str(sr_run))
    checkpoint["run"] = checkpoint["run"] | {name: "gone"}
    torch.save(checkpoint, tmp_path / "ckpt.pt")
    flags = ["--init_from", tmp_path, "--out", tmp_path / "out"]
    assert_refused(pretrain.main, flags, f"expected a {name} of", "got gone")


def test_init_from_with_another_key_does_not_print_it(sr_run):
    flags = ["--init_from", sr_run, "--key", "guess"]
    done = run_main(pretrain.main, *flags)
    assert "--key: expected" in done.err
    assert "guess" not in done.err
