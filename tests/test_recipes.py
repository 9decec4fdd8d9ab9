"""Flags of pretrain.py: what they resolve to, recipes of the papers' rows, and what is refused."""

import dataclasses

import pytest

import pretrain
from model import Config
from tests.recipes import RECIPES
from tests.support import assert_refused


def resolve(flags):
    """Return the settings of a command line, those of Config included, as a dict."""
    args, _ = pretrain.parse_flags(flags.split())
    config = Config.choose(vars(args))
    return vars(args) | dataclasses.asdict(config)


ROWS = [row for row, *_ in RECIPES]


@pytest.mark.parametrize("row, command, paper, departures", RECIPES, ids=ROWS)
def test_recipe_resolves_to_the_hyper_parameters_of_the_paper(row, command, paper, departures):
    settings = resolve(command)
    found = {name: settings[name] for name in paper}
    assert found == paper | departures
    assert departures.keys() <= paper.keys()


@pytest.mark.parametrize("flags, expected", [
    # emb, hash, split, objective, data, out
    ("", "proj lsh regex sr python out/proj-lsh"),
    ("--hash md5", "proj md5 regex sr python out/proj-md5"),
    ("--emb pool --split bpe", "pool lsh bpe sr python out/pool-lsh-bpe"),
    ("--emb lookup", "lookup lsh bpe sr python out/lookup-bpe"),
    ("--emb lookup --no-tied --objective mlm",
     "lookup lsh bpe mlm python out/lookup-bpe-mlm"),
    ("--emb median", "median lsh regex hash-mlm python out/median"),
    ("--emb median --objective sr", "median lsh regex sr python out/median-sr"),
    ("--emb bloom", "bloom lsh items hash-mlm python-names out/bloom-items"),
    ("--emb bloom --split phrases", "bloom lsh phrases hash-mlm python out/bloom-phrases"),
    ("--split items", "bloom lsh items hash-mlm python-names out/bloom-items"),
    ("--preset superbloom --emb lookup", "lookup lsh items mlm python-names out/lookup-items-mlm"),
    ("--preset bert-lsh", "lookup lsh bpe mlm python out/lookup-bpe-mlm-lsh-attention"),
    ("--preset median --emb proj", "proj lsh regex hash-mlm python out/proj-lsh-hash-mlm"),
    ("--data my_texts/", "proj lsh regex sr my_texts/ out/proj-lsh-my_texts"),
    ("--data x/a.csv+python", "proj lsh regex sr x/a.csv+python out/proj-lsh-a+python"),
])
def test_flags_resolve_to_words_embedding_objective_and_out(flags, expected):
    settings = resolve(flags)
    names = ("emb", "hash", "split", "objective", "data", "out")
    assert " ".join(settings[name] for name in names) == expected


@pytest.mark.parametrize("flags, expected", [
    # a preset's sizes and recipe
    ("", dict(layers=2, width=128, length=128, bits=128, batch=32, steps=10_000, lr=2e-3)),
    ("--preset bert-lsh-fast", dict(width=128, lsh_bands=2, batch=64, steps=20_000, lr=1e-3)),
    ("--preset median --emb lookup", dict(vocab=30_517, tied=True)),
    ("--preset superbloom-small", dict(alpha=25, mask=0.40, width=256, length=32)),
    # the command line goes first
    ("--preset superbloom --decay 0.1", dict(decay=0.1)),
    # what follows from other flags
    ("--split items --length 40", dict(length=40)),
    ("--split items --attn lsh", dict(lsh_pairs="all")),
    ("--width 64 --heads 2", dict(ffn=256)),
    ("--split phrases", dict(vocab=1_000_000)),
    ("--steps 50", dict(warmup=5)),
    ("--steps 50 --warmup 0", dict(warmup=0)),
    ("--bits 60000", dict(features=60_000)),
    ("--emb emb --rows 777 --features 9", dict(features=777)),
    ("--preset hashformer --emb lookup --objective mlm", dict(lr=1e-4)),
])
def test_sizes_and_recipe_resolve_to(flags, expected):
    settings = resolve(flags)
    assert {name: settings[name] for name in expected} == expected


@pytest.mark.parametrize("flags, fragments", [
    ("--width 30", ["width", "30", "multiple"]),
    ("--dropout 1", ["dropout", "1.0"]),
    ("--lr nan", ["--lr", "nan"]),
    ("--emb no", ["--emb", "no"]),
    ("--chunk 16 --emb pool", ["chunk", "16"]),
    ("--emb median --hashes 4", ["hashes", "4", "odd"]),  # a median of an even number
    ("--emb proj --objective mlm", ["objective", "mlm", "proj"]),
    ("--objective hash-mlm --tied", ["tied", "proj"]),
    ("--mask 1 --objective hash-mlm", ["--mask", "1"]),
    # flags whose effect would be missed
    ("--emb lookup --hash md5", ["--hash", "lookup"]),
    ("--vocab 9", ["--vocab", "proj"]),
    ("--mask 0.5", ["--mask requires --objective mlm"]),
    ("--lsh_bands 2", ["requires --attn lsh"]),
    ("--key secret", ["--key requires --hash md5"]),
    ("--coherent 3 --split items", ["--coherent", "3"]),
    ("--split items --attn lsh --lsh_pairs upper", ["lsh_pairs", "upper"]),
    ("--split items --short 0.1", ["--short", "items"]),
])
def test_flags_that_contradict_are_refused_before_any_file_is_made(tmp_path, flags, fragments):
    files = ["--cache", tmp_path, "--out", tmp_path / "out"]
    assert_refused(pretrain.main, [*flags.split(), *files], *fragments)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("flag, value", [
    ("width", 64),  # of the model
    ("hash", "md5"),  # of the tokenizer
])
def test_init_from_with_another_size_or_hash_is_refused(sr_run, flag, value):
    flags = ["--init_from", sr_run, f"--{flag}", value]
    assert_refused(pretrain.main, flags, f"--{flag}: expected", "--init_from", f"got {value}")


def test_init_from_may_cut_another_share_of_windows(sr_run):
    args, _ = pretrain.parse_flags(["--init_from", str(sr_run), "--short", "0"])
    assert args.short == 0
