"""Tests of bench/: tables at tiny sizes, and the arithmetic that tables rest on."""

import dataclasses
import functools
import json
import re
import shlex
import subprocess
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import attention as lsh_attention
import pretrain
from bench import attention, claims, copies, figures, gpu, harness, hashformers
from bench import sketch, superbloom, topics, training
from data.splitters import BPE
from hashing import MD5, sketch_index
from model import Config
from support.common import InputError, write_json
from support.results import Outcome, Result
from tests.helpers import ROOT, SMALL, assert_refused, make_words, needs_fork
from tokenizer import FIRST_WORD_ID, make_tokenizer


@pytest.fixture
def args(text_path, cache_dir):
    """Return a function of flags that differ from those of a comparison: one run of two steps."""
    flags = dict(data=str(text_path), cache=str(cache_dir), steps=2, seeds=1, only=".")
    return lambda **changes: Namespace(**flags | changes)


@pytest.fixture
def one_process(monkeypatch):
    """Run in this process what takes seconds to start a process for."""
    monkeypatch.setattr(harness, "run_in_new_process", lambda function, *args: function(*args))
    monkeypatch.setattr(harness, "run_jobs", map)


def run_bench(file, name, settings=None, **sizes):
    """Return the rows of a bench, which fill every column of its table."""
    measure, columns, _ = file.TABLES[name]
    rows = list(measure(settings, **sizes))
    assert set(re.findall(r"\| (\S+) +\|", columns)) <= set().union(*rows)
    harness.markdown(rows, columns)  # every cell has a format
    for row in rows:
        for key in {"dense_mib", "gib"} & set(row):  # memory of a GPU
            assert (row[key] is not None) == torch.cuda.is_available()
    return rows


# Commands


@pytest.mark.parametrize("file, name, sizes", [
    (attention, "auto", dict(rounds=1, positions=256, lengths=(16,))),
    (attention, "flops", dict(rounds=1)),
    (hashformers, "hashing", dict(rounds=1, num_words=300, repeats=3)),
    (sketch, "sketch", dict(rounds=1, num_words=300, shape=(2, 8))),
    (training, "steps", dict(rounds=1, lengths=(16,), positions=32, num_words=50)),
    (gpu, "kernels", dict(heads=2, positions=64, calls=1, lengths=(32,))),
    (gpu, "mfu", dict(preset="tiny", batches=(2,), compiles=(False,), calls=1)),
    pytest.param(gpu, "words", dict(models={"tiny": " ".join(SMALL[:10])},  # layers to batch
                                    num_words=90, steps=20, compiles=(False,)), marks=needs_fork),
])
def test_bench_at_tiny_sizes_fills_all_columns(file, name, sizes):
    run_bench(file, name, **sizes)


def test_bench_entities_fills_all_columns(args, pages_path, one_process):
    settings = args(data=str(pages_path), only="0 of 2", alpha=5)
    run_bench(superbloom, "entities", settings)


def test_rows_that_are_measured_stay_if_a_later_one_fails(tmp_path):
    def measure(args):
        """Fail after a row."""
        yield dict(name="a")
        raise KeyError

    path = tmp_path / "x.json"
    tables = dict(name=(measure, "name | name | s", {}))
    with pytest.raises(KeyError):
        harness.main("bench.file", tables, "", ["name", "--json", str(path)])
    result = json.loads(path.read_text())
    assert result["rows"] == [dict(name="a")]
    assert result["columns"] == "name | name | s"
    assert result["command"] == f"python -m bench.file name --json {shlex.quote(str(path))}"


def test_commit_is_unknown_outside_a_clone_and_changed_by_a_new_file(tmp_path, monkeypatch):
    monkeypatch.setattr(harness, "ROOT", tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert harness.describe_machine()["commit"] == "unknown"
    for command in ("init", "-c user.name=a -c user.email=a commit --allow-empty -m a"):
        subprocess.check_call(["git", "-C", tmp_path, *command.split()])
    assert "+" not in harness.describe_commit()
    tmp_path.joinpath("new.py").touch()
    assert harness.describe_commit().endswith("+changes")


@pytest.mark.parametrize("file, argv, fragment", [
    (attention, ["twins"], "--data_dir"),  # a required flag
    (superbloom, ["sizes", "--json", "/no/x.json"], "/no/x.json"),  # before the work
    (hashformers, ["glue", "--data_dir", "/no", "--only", "("], "--only"),
])
def test_command_with_bad_input_is_refused(file, argv, fragment):
    run = functools.partial(harness.main, "bench.file", file.TABLES, "")
    assert_refused(run, argv, fragment)


def test_topics_of_a_file_without_the_columns_are_refused(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"title": "t", "context": "a"}')
    argv = ["articles", str(path), str(tmp_path)]
    assert_refused(topics.main, argv, "row 1: expected a text in column question, got None")


# Times, comparisons, tables


def test_stopwatch_leaves_out_the_first_round_and_pairs_the_others(monkeypatch):
    # 9 and 9 seconds first, then 1, 5, 2 beside 1, 1, 4: medians 2 and 1, ratios 1, 5, 1/2
    clock = iter([0, 9, 0, 9, 0, 1, 0, 1, 0, 5, 0, 1, 0, 2, 0, 4])
    monkeypatch.setattr(harness.time, "perf_counter", lambda: next(clock))
    watch = harness.Stopwatch(dict(a=list, b=list), 3)
    monkeypatch.undo()
    assert watch.ms == {"a": 2000, "b": 1000}
    assert watch.ratio("a", "b") == 1


def test_compare_lists_every_seed_with_mean_and_deviation(args, one_process):
    def train(job):
        return dict(score=job.seed + len(job.name))

    variants = dict(a="--emb a", bcd="--emb bcd")
    first, second = harness.compare(args(seeds=3), variants, train, "--shared")
    assert first["score_all"] == [1, 2, 3]
    assert second["score"] == 4
    assert second["score_std"] == 1
    assert second["flags"] == "--shared --emb bcd"


def test_scores_keep_which_rows_are_right(tmp_path):
    """Two runs of a variant keep a number for each row, whose mean is the score."""
    result = dict(mean=75.0, all_metrics=dict(eval_loss=0.5), bag_of_words=50.0)
    write_json(tmp_path / "results.json", dict(tasks=dict(sst2=result)))
    # as finetune.py writes it
    outcome = Outcome(scores={}, last_scores={}, predicted=[1, 0, 1, 1], selection=0.0, log=[])
    control = dataclasses.replace(outcome, predicted=[0, 0, 0, 0])
    job = Result(seed=3, metric="accuracy", labels=[], train_counts=[], rows={}, majority=50.0,
                 truth=[1, 0, 0, 1], size={}, model=outcome, control=control)
    write_json(tmp_path / "sst2-seed-3.json", dataclasses.asdict(job))
    run = harness.read_scores(tmp_path, "sst2")
    assert run["sst2_bag_rows"] == "0 100 100 0"
    row = harness.summarize([run, run])
    assert row["sst2_rows"] == ["100 100 0 100"] * 2
    assert row["sst2"] == np.mean(claims.read_rows(row, "sst2"))


def test_markdown_equals_table_made_by_hand():
    rows = [
        dict(name="a", n=1_234, score=0.5, score_std=0.0123),
        dict(name="b", score=2.0),
        dict(name="c", score=None, score_std=2.0),
    ]
    columns = """
        a name | name          | s
        n      | n             | ,
        score  | score         | .3f ±
               | score         | .1f ±
        hidden | nobody_has_it | .1f
    """
    assert harness.markdown(rows, columns) == (
        "| a name | n | score |  |\n"
        "| --- | --: | --- | --- |\n"
        "| a | 1,234 | 0.500 ± 0.012 | 0.5 ± 0.0 |\n"
        "| b | not measured | 2.000 | 2.0 |\n"
        "| c | not measured | not measured | not measured |\n")


# BERT-LSH


def test_attention_flops_match_paper():
    # [BL Table 1]: q kᵀ alone is 2·2·10·10·64
    cost = attention.attention_flops(10, 2, 64, 2, 64)
    assert cost["full"] == 25_600
    assert cost["hashing"] == 10_240
    # 55 pairs a head; a pair collides where both signs are equal, else by chance in 1 of 64 buckets
    chance = 1 / 4 + 3 / 4 / 64
    assert cost["upper_pairs"] == 2 * 55 * chance
    # erratum [BL Alg. 1]: all of C, and not its triangle alone
    assert cost["all_pairs"] == 2 * 100 * chance
    # erratum [BL §3.1]: "40 %"
    share = (cost["hashing"] + cost["upper_scores"]) / cost["full"]
    assert round(100 * share) == 54
    # [BL Figure 1]: linear in r, flat in m
    many = attention.attention_flops(10, 2, 64, 4, 1024)
    assert many["hashing"] == 5_120 * 4


@needs_fork
@pytest.mark.parametrize("platform, peak", [("linux", 3 * 2**10), ("darwin", 3 * 2**20)])
def test_memory_of_passes_is_in_mib(monkeypatch, platform, peak):
    """Linux counts it in KiB, macOS in bytes."""
    import resource  # not on Windows
    peaks = iter([0, 0, peak])
    monkeypatch.setattr(resource, "getrusage", lambda _: SimpleNamespace(ru_maxrss=next(peaks)))
    monkeypatch.setattr(attention.sys, "platform", platform)
    assert attention.memory_of_passes("kernel", 8) == 3


@needs_fork  # memory is measured in a process of its own
def test_attention_in_one_bucket_has_all_pairs_and_the_work_of_hashing(monkeypatch, one_process):
    monkeypatch.setattr(lsh_attention, "simhash", lambda x, *_: 0 * x[..., 0].long().unsqueeze(2))
    [row] = run_bench(attention, "attention", positions=128, lengths=(64,), rounds=1)
    assert row["share"] == 100
    # seven products of q, k of 2 x 2 x 64 x 64 pairs, 64 numbers; 8 signs for q and for k
    assert row["dense_gflop"] == pytest.approx(7 * 2 * 64 * (2 * 2 * 64 * 64) / 1e9)
    assert row["gflop"] == pytest.approx(row["dense_gflop"] + 2 * 64 * 8 * 512 / 1e9)
    assert row["ratio"] == pytest.approx(row["dense"] / row["ours"])


def test_trained_buckets_by_hand(monkeypatch):
    """All queries and the 16 best of 32 keys share a bucket: 16 of weight 3, and 16 of weight 1."""
    q = torch.zeros(1, 1, 32, 4)
    q[..., 0] = 1
    k = torch.zeros(1, 1, 32, 4)
    k[..., ::2, 0] = 2 * np.log(3)  # a score is divided by √4
    k[..., 1::2, 1] = 1
    monkeypatch.setattr(lsh_attention, "simhash", lambda x, *_: (x[..., 1] > 0).long().unsqueeze(2))
    row = attention.measure_layer(q, k, bands=2)
    assert row["share"] == 50
    assert row["largest"] == 50
    assert row["recall"] == 100
    assert row["mass"] == pytest.approx(100 * 48 / 64)
    # n of 16 random keys are among the best: 16 + 2 n of the mass of 64
    assert row["mass_random"] == pytest.approx(25 + row["recall_random"] / 2)


# HashFormers and Superbloom


def test_counts_match_hashformers():
    # [HF Table 2]
    rows = {row["name"]: row for row in run_bench(hashformers, "counts")}
    assert rows["emb 50K"]["total"] == rows["lookup 50K (BERT)"]["total"] == 124_647_170
    assert rows["proj"]["total"] == 86_146_562
    assert rows["pool"]["authors"] == 86_845_442
    assert rows["emb 1K"]["authors"] == 86_840_834
    assert round(rows["proj"]["pcr_all"], 1) == 30.9
    assert round(rows["pool"]["poep"], 1) == 0.9  # erratum: printed as 1.0
    # erratum: what is printed is one d-vector above the formulas of App. B
    for row in rows.values():
        unit = dict(K=1e3, M=1e6)[row["printed"][-1]]
        printed = unit * float(row["printed"][:-1])
        assert row["with_word"] == pytest.approx(printed, abs=unit / 20)


def test_bench_collect_averages_the_seeds_of_a_model_and_compares_with_bert(tmp_path):
    runs = []
    for model, total in (("lookup-of-BPE-pieces-MLM", 28), ("proj-lsh", 7)):
        for seed in range(2):
            runs.append(str(tmp_path / f"{model}-{seed}"))
            for place, task in enumerate(hashformers.TASKS):
                content = dict(mean=total * place + 2 * seed, all_metrics=dict(eval_loss=0.5),
                               bag_of_words=float(place), size=dict(total=total, poep=0.25))
                folder = Path(f"{runs[-1]}-{task}")
                folder.mkdir()
                write_json(folder / "results.json", dict(tasks={task: content}))
    bert, proj, bag = hashformers.bench_collect(Namespace(runs=runs))
    assert bert["name"] == hashformers.BERT
    assert proj["name"] == "proj, lsh"
    assert proj["cola_all"] == [7, 9]
    assert proj["average_all"] == [14, 16]
    assert proj["poep"] == 25
    assert proj["prr"] == pytest.approx(100 * 15 / 57)
    assert proj["pcr"] == 75
    assert bag["average"] == 2
    with pytest.raises(InputError, match="--runs: .*proj-lsh-7"):
        hashformers.bench_collect(Namespace(runs=[*runs, str(tmp_path / "proj-lsh-7")]))


def test_bench_repeats_counts_words_that_stand_twice_in_a_window(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("the cat the dog a cat bird fish fish the one two")  # windows of 4
    settings = Namespace(data=str(path), cache=str(tmp_path / "cache"))
    [row] = copies.bench_repeats(settings, size=4, num_frequent=1)  # "the" is the most frequent
    # cat dog | a cat bird fish | fish one two: none repeats. The separator ends the text
    assert row["n"] == 9
    assert row["twice"] == 0
    [row] = copies.bench_repeats(settings, size=12, num_frequent=1)
    assert row["n"] == 9
    assert row["twice"] == pytest.approx(100 * 4 / 9)  # cat and fish


def test_sizes_match_superbloom_but_for_four():
    # [SB Tables 1, 3, 4]: four do not follow from their own numbers
    rows = {row["name"]: row for row in run_bench(superbloom, "sizes")}
    differ = {name.split(": ")[1] for name, row in rows.items() if row["shown"] != row["printed"]}
    assert differ == {"superbloom", "superbloom-d384l1", "hash40-h512", "hash20-h1024"}
    # erratum: 229M needs 200,000 rows, and 2N/50 is 211,276
    row = rows["Table 1: superbloom"]
    assert row["rows"] == 211_276
    assert round((row["paper"] - 11_276 * 769) / 2**20) == 229


def test_bench_bloom_compares_times_per_position():
    for row in run_bench(superbloom, "bloom", num_items=9_000, positions=8, rounds=1):
        assert row["exact"] == "True"
        # one of the eight positions is searched exhaustively
        assert row["ratio"] == pytest.approx(row["plain"] / row["beam"])


def test_bench_search_until_certified_equals_evaluation(sets_run, pages_path, args):
    settings = args(runs=[str(sets_run)], data=str(pages_path))
    rows = {row["name"]: row for row in run_bench(superbloom, "beams", settings)}
    sure = rows[f"{sets_run.name}, until certified"]
    evaluation = harness.read_log(sets_run)[-1]
    assert sure["certified"] == 100
    rows = {row["name"]: row for row in run_bench(superbloom, "prior", settings)}
    plain = rows[f"{sets_run.name}, 0.0"]
    for k in (1, 10, 20):
        assert sure[f"rec@{k}"] == pytest.approx(evaluation[f"rec@{k}"], abs=1e-4)
        assert plain[f"rec@{k}"] == sure[f"rec@{k}"]


# Sketch


def test_collisions_by_hand(monkeypatch):
    index = np.array([
        [0, 0, 0],  # 8 times
        [1, 0, 1],  # 4 times: behind the first in one bucket
        [0, 0, 2],  # twice: behind the first in two
    ])
    counts = np.array([0] * FIRST_WORD_ID + [8, 4, 2])
    corpus = Namespace(words=["a", "b", "c"], counts=counts)
    monkeypatch.setattr(sketch, "load_corpus", lambda args, split: corpus)
    monkeypatch.setattr(sketch, "sketch_index", lambda words, k, R: index[:, :k])
    rows = {row["name"]: row for row in run_bench(sketch, "collisions")}
    assert rows["k 1, R 500"]["counted"] == 1  # a and c
    row = rows["k 3, R 500"]
    assert row["expected"] == pytest.approx(3 / 500**3)
    assert row["one"] == pytest.approx(100 * 6 / 14)
    assert row["half"] == pytest.approx(100 * 2 / 14)


def test_hide_words_hides_the_same_words_from_words_and_pieces():
    text = "A cafe, a Cat; the cat-like dog saw 4 cats and it's 'fine'."
    bpe = BPE.train(["the cat"] * 9)
    by_words = make_tokenizer(Config(), hash=MD5())
    by_pieces = make_tokenizer(Config(emb="lookup"), bpe, vocabulary=bpe.units)
    found = []
    for tokenizer in (by_words, by_pieces):
        units, _ = tokenizer.split(text)
        found.append([])
        for row, gaps in zip(*sketch.hide_words([text] * 40, tokenizer)):
            for word, positions in gaps:
                found[-1].append(word)
                pieces, _ = tokenizer.split(word)
                row[positions[0]:positions[-1] + 1] = tokenizer.ids(pieces).tolist()
            assert row[1:-1] == tokenizer.ids(units).tolist()  # with the hidden words back
    assert found[0] == found[1]
    # words of letters after a space
    assert set(found[0]) == {"cafe", "a", "cat", "the", "dog", "saw", "cats", "and", "it"}


def test_texts_without_words_to_ask_for_are_refused(sr_run):
    with pytest.raises(InputError, match="--text"):
        sketch.name_hidden(sr_run, ["hi"], ["hi", "\0"])


@pytest.mark.parametrize("flags", [
    "--emb median --buckets 31",
    "--emb lookup --objective mlm --vocab 290",  # a word is several pieces
])
def test_name_hidden_equals_scoring_all_by_hand(
        flags, small, text_path, tmp_path, monkeypatch):
    pretrain.main(small(*flags.split(), "--steps", "2", "--length", "128"))
    run = harness.load_run(tmp_path / "run")
    model, tokenizer, _ = run
    for weight in model.parameters():
        torch.nn.init.normal_(weight)  # scores far apart: no tie
    monkeypatch.setattr(sketch, "load_run", lambda folder: run)
    texts = text_path.read_text().splitlines()[:200]
    words = make_words(40, 7)  # all that text_path has

    result = sketch.name_hidden(tmp_path / "run", words, texts)

    ranks = []
    for row, gaps in zip(*sketch.hide_words(texts, tokenizer)):
        for correct, positions in gaps:
            logits = model(torch.tensor([row]), masked_positions=torch.tensor(positions))
            logp = logits.flatten(0, -2).log_softmax(-1)  # a row per hash function, or per piece
            scores = {}
            for word in words:
                pieces, _ = tokenizer.split(word)
                columns = tokenizer.ids(pieces)
                if "median" in flags:
                    columns = sketch_index([word], 5, 31)[0]
                if len(columns) == len(logp):
                    scores[word] = logp[range(len(logp)), columns].sum()
            ranks.append(sum(score > scores[correct] for score in scores.values()))
    ranks = np.array(ranks)
    assert result["asked"] == len(ranks) > 100
    assert result["first"] == pytest.approx(100 * (ranks < 1).mean())
    assert result["ten"] == pytest.approx(100 * (ranks < 10).mean())


# Figures


def test_figures_are_those_of_assets(tmp_path, monkeypatch):
    monkeypatch.setattr(figures, "ASSETS", tmp_path)
    figures.main(["figures"])
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {path.name for path in (ROOT / "assets").iterdir()}


def test_erratum_retention_of_1k_rows_does_not_drop_20_percent():
    """[HF §5.2] prints "20%~26%" for the drop from 50K rows, of averages of [HF Table 2]."""
    page = (harness.ROOT / "docs/hashformers.md").read_text("utf-8")
    assert f"Table 2 gives {100.5 - 84.0:.1f} and {95.6 - 80.8:.1f} points" in page  # MD5, LSH
