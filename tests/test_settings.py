"""settings.py: what the flags of pretrain.py resolve to, what each requires, and what is refused."""

import os

import pytest
import torch

import settings
from pretrain import main
from runtime import InputError
from tests.recipes import RECIPES
from tests.support import assert_refused, make_words, run_main


def resolve(flags, world=1):
    """Return the resolved flags and the config of a command line."""
    args = settings.parser("").parse_args(flags.split())
    return args, settings.resolve(args, world)


# == What flags resolve to
@pytest.mark.parametrize("flags, expected", [
    ("", "proj lsh regex sr python out/proj-lsh"), ("--hash md5", "proj md5 regex sr python out/proj-md5"),
    ("--emb pool --split bpe", "pool lsh bpe sr python out/pool-lsh-bpe"),
    ("--emb lookup", "lookup lsh bpe sr python out/lookup-bpe"),
    ("--emb lookup --objective mlm --no-tied", "lookup lsh bpe mlm python out/lookup-bpe-mlm-untied"),
    ("--emb median", "median lsh regex hash-mlm python out/median"),
    ("--emb weighted", "weighted lsh regex sr python out/weighted"),
    ("--emb median --objective sr", "median lsh regex sr python out/median-sr"),
    ("--emb proj --objective hash-mlm", "proj lsh regex hash-mlm python out/proj-lsh-hash-mlm"),
    ("--emb bloom", "bloom lsh items hash-mlm python-names out/bloom-items"),
    ("--emb bloom --split phrases", "bloom lsh phrases hash-mlm python out/bloom-phrases"),
    ("--split items", "bloom lsh items hash-mlm python-names out/bloom-items"),
    ("--preset superbloom --emb lookup", "lookup lsh items mlm python-names out/lookup-items-mlm"),
    ("--preset bert-lsh", "lookup lsh bpe mlm python out/lookup-bpe-mlm-lsh-attention"),
    ("--preset bert-lsh --attn full", "lookup lsh bpe mlm python out/lookup-bpe-mlm"),
    ("--preset median --emb mean", "mean lsh regex hash-mlm python out/mean"),
    ("--preset median --emb lookup", "lookup lsh bpe mlm python out/lookup-bpe-mlm"),
    ("--preset median --emb proj", "proj lsh regex hash-mlm python out/proj-lsh-hash-mlm"),
    ("--attn lsh", "proj lsh regex sr python out/proj-lsh-lsh-attention")])
def test_flags_resolve_to(flags, expected):
    args, config = resolve(flags)
    values = args.emb, args.hash, args.split, args.objective, args.data, args.out.replace(os.sep, "/")
    assert " ".join(values) == expected
    assert config.emb == args.emb and config.head == dict(sampled="mlm").get(args.objective, args.objective)
    assert config.order == (args.split != "items") and config.attn == args.attn


@pytest.mark.parametrize("row, command, paper, departures", RECIPES, ids=[row for row, *_ in RECIPES])
def test_recipe_resolves_to_the_hyper_parameters_of_the_paper(row, command, paper, departures):
    args, config = resolve(command)
    values = vars(args) | vars(config)
    assert {name: values[name] for name in paper} == paper | departures
    assert not departures.keys() - paper.keys() and not departures.items() & paper.items()


@pytest.mark.parametrize("flags, expected", [
    ("", dict(layers=2, width=128, length=128, bits=128, batch=32, steps=10_000, lr=2e-3, warmup=300,
              decay=0.01, optimizer="adamw", schedule="linear", samples=None, alpha=None, mask=None)),
    ("--preset bert-lsh-fast", dict(width=128, lsh_bands=2, batch=64, steps=20_000, lr=1e-3, warmup=1_000)),
    ("--preset median", dict(ffn=2048, hashes=5, steps=100_000, lr=2e-4)),
    ("--preset median --emb lookup", dict(vocab=30_517, hashes=None, tied=True)),
    ("--preset superbloom", dict(micro=64, decay=0.0, warmup=10_000)),
    ("--preset superbloom-small", dict(alpha=25, mask=0.40, width=256, length=32)),
    ("--split items --length 40", dict(length=40)), ("--split items --attn lsh", dict(lsh_pairs="all")),
    ("--emb pool --bits 96 --chunk 7 --layers 3 --length 65 --dropout 0.25 --ffn 99 --heads 8 --width 104",
     dict(emb="pool", bits=96, chunk=7, layers=3, length=65, dropout=0.25, ffn=99, heads=8, width=104)),
    ("--act relu --types 2", dict(act="relu", types=2)), ("--optimizer adam", dict(decay=0.0)),
    ("--emb lookup --objective sampled", dict(samples=8_192)), ("--split phrases", dict(vocab=1_000_000)),
    ("--width 64 --heads 2", dict(ffn=256, vocab=50_000)),
    ("--steps 50", dict(warmup=5)), ("--steps 50 --warmup 0", dict(warmup=0)),
    ("--bits 60000", dict(features=60_000)), ("--emb emb --rows 777 --features 9", dict(features=777))])
def test_sizes_and_recipe_resolve_to(flags, expected):
    args, config = resolve(flags)
    values = vars(args) | vars(config)
    assert {name: values[name] for name in expected} == expected


# == What is refused
def example(flag):
    """Return a value that a flag accepts by itself, as words of the command line."""
    [action] = [action for action in settings.parser("")._actions if action.dest == flag]
    value = action.choices[0] if action.choices else dict(mask=0.5, bits=8).get(flag, 1)
    return [f"--{flag}"] if action.nargs == 0 else [f"--{flag}", str(value)]


ACCEPTED = dict(vocab="--emb proj --split bpe", alpha="--emb bloom", coherent="--split items", hashes="--emb median",
                weights="--emb weighted", buckets="--objective hash-mlm",
                mask="--emb lookup --objective mlm", tied="--emb median", decay="--optimizer adamw",
                samples="--emb lookup --objective sampled", rows="--emb weighted", chunk="--emb pool",
                bits="--emb add", hash="--emb emb", features="--hash lsh", hash_seed="--hash lsh")
REFUSED = dict(decay="--optimizer adam", bits="--emb emb", hash="--emb lookup", features="--hash md5",
               hash_seed="--emb pool --hash md5")


@pytest.mark.parametrize("flag", settings.requirements())
def test_flag_without_what_it_requires_is_refused(flag):
    flags, others = " ".join(example(flag)), settings.requirements()[flag]
    with pytest.raises(InputError, match=f"--{flag} requires --{next(iter(others))}"):
        resolve(f"{flags} {REFUSED.get(flag, '')}")
    resolve(f"{flags} {ACCEPTED.get(flag, '--attn lsh')}")


@pytest.mark.parametrize("flags, fragments", [
    ("--width 30", ("width", "30", "multiple")), ("--dropout 1", ("dropout", "1.0")),
    ("--bits 0", ("--bits", "0")), ("--steps 0", ("--steps", "0")), ("--lr nan", ("--lr", "nan")),
    ("--lr -1", ("--lr", "-1")), ("--emb no", ("--emb", "no")),
    ("--preset proformer", ("--preset", "proformer")), ("--chunk 16 --emb pool", ("chunk", "16")),
    ("--length 1", ("--length", "1")), ("--seed -1", ("--seed", "-1")), ("--nonsense 1", ("--nonsense",)),
    ("--seed 18446744073709551616", ("--seed", "18446744073709551616")), ("--width 9999999", ("--width",)),
    ("--vocab 4294967296 --emb lookup", ("--vocab", "4294967296")), ("--hashes 2147483647", ("--hashes",)),
    ("--warmup 11 --steps 10", ("--warmup", "11", "10")), ("--warmup 10001", ("--warmup", "10,000")),
    ("--emb proj --objective mlm", ("objective", "mlm", "proj")),
    ("--emb lookup --objective hash-mlm", ("objective", "hash-mlm")),
    ("--emb bloom --objective sr", ("objective", "sr")),
    ("--emb median --hashes 4", ("hashes", "4", "odd")), ("--emb bloom --buckets 9", ("--buckets", "bloom")),
    ("--emb weighted --buckets 9", ("--buckets", "weighted")),
    ("--objective hash-mlm --tied", ("tied", "proj")), ("--key secret", ("--key", "md5")),
    ("--emb lookup --key secret", ("--key",)), ("--emb bloom --key secret", ("--key",)),
    ("--mask 1 --objective hash-mlm", ("--mask", "1.0")), ("--vocab 9", ("--vocab requires", "lookup")),
    ("--mask 0 --objective hash-mlm", ("--mask", "0.0")), ("--coherent 3 --split items", ("--coherent", "3")),
    ("--coherent 1 --split items --emb lookup", ("--coherent", "--emb bloom")),
    ("--coherent 1 --split regex --emb bloom", ("--coherent", "--split items")),
    ("--attn lsh --lsh_buckets 0", ("--lsh_buckets", "0")),
    ("--split items --attn lsh --lsh_pairs upper", ("lsh_pairs", "upper")),
    ("--attn lsh --lsh_bands 3000000000", ("lsh_bands", "3000000000")), ("--layers 1000000", ("--layers", "GB")),
    ("--width 1000000 --heads 1", ("--width", "GB")), ("--emb median --buckets 2147483647", ("GB",)),
    ("--emb emb --hash md5 --rows 2000000000", ("GB",))])
def test_flags_that_contradict_are_refused(flags, fragments, tmp_path):
    """Exit code 2 and one line that names the flag and its value, before a corpus is prepared."""
    assert_refused(main, [*flags.split(), "--cache", tmp_path, "--out", tmp_path / "out"], *fragments)
    assert not list(tmp_path.iterdir())


def test_init_from_refuses_what_its_weights_do_not_fit(sr_run, mlm_run, text_path, cache_dir, tmp_path):
    begin = ["--data", text_path, "--cache", cache_dir, "--out", tmp_path / "out"]
    other = tmp_path / "other.txt"
    other.write_text(" ".join(make_words(60, 9) * 40))
    for flags in ("--width 64", "--emb pool", "--hash md5", "--bits 64", "--objective hash-mlm",
                  "--split bpe", "--types 2", "--hash_seed 1", "--features 99", "--attn lsh", "--length 17"):
        assert_refused(main, [*begin, "--init_from", sr_run, *flags.split()],
                       f"{flags.split()[0]}: expected", "--init_from", f"got {flags.split()[1]}")
    assert_refused(main, [*begin, "--data", other, "--init_from", mlm_run], "--init_from", "--data",
                   "pieces and words of its own corpus")
    assert_refused(main, [*begin, "--init_from", tmp_path / "nowhere"], "nowhere", "no checkpoint")
    checkpoint = torch.load(sr_run / "ckpt.pt")
    for name, value in (("preset", "foo"), ("hash", 7), ("split", None), ("vocab", KeyError)):
        run = {key: x for key, x in (checkpoint["run"] | {name: value}).items() if x is not KeyError}
        torch.save(checkpoint | dict(run=run), tmp_path / "changed.pt")
        assert_refused(main, [*begin, "--init_from", tmp_path / "changed.pt"], "expected a checkpoint of pretrain.py")


def test_ranks_that_cannot_share_a_batch_are_refused(monkeypatch, tmp_path):
    ranks = dict(WORLD_SIZE="3", RANK="0", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
    for name, value in ranks.items():
        monkeypatch.setenv(name, value)
    assert_refused(main, ["--out", tmp_path / "out", "--batch", "8"], "--batch", "3 ranks", "8", "Use 6")
    assert resolve("--batch 9", world=3)[0].batch == 9


def test_help_explains_every_flag():
    done = run_main(main, "--help")
    actions = settings.parser("")._actions
    assert done.code == 0 and all(action.option_strings[-1] in done.out for action in actions)
    assert all(action.help for action in actions) and "None" not in done.out
