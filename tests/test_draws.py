"""Losses by window, the weight inside a bucket, linear models of misspelled texts."""

import json
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest
import torch

import attention
import metrics
import objectives
import pretrain
from bench import attention_controls, claims, draws, harness, misspell, shares, superbloom
from data import neighbors
from support.common import write_json
from tests.helpers import SMALL_SETS, make_link
from tests.test_bench import run_bench


def list_flags(folder, text_path, cache_dir, known=None):
    """Return the flags of the table of losses."""
    return Namespace(runs=[str(folder)], data=str(text_path), cache=str(cache_dir), known=known)


# Losses by window


@pytest.mark.parametrize("run, folder, name", [
    ("sr_run", "draws-proj-lsh-0", "proj-lsh"),
    ("mlm_run", "scores-dense-0", "dense"),  # windows are weighted by what they mask
])
def test_mean_over_windows_is_the_last_evaluation(
        run, folder, name, request, tmp_path, text_path, cache_dir):
    folder = tmp_path / folder
    make_link(folder, request.getfixturevalue(run))
    [row] = run_bench(draws, "losses", list_flags(folder, text_path, cache_dir))
    evaluation = harness.read_log(folder)[-1]
    assert row["name"] == name
    assert row["loss"] == pytest.approx(evaluation["eval_loss"], rel=1e-4)
    rows = claims.read_rows(row, "loss")
    assert len(rows) == row["n"] > 10
    assert rows.mean() == pytest.approx(row["loss"], abs=1e-3)
    assert rows.std() > 0


def test_each_item_of_a_set_is_masked_once(
        sets_run, tmp_path, pages_path, cache_dir, monkeypatch):
    """The items that the evaluation masks are among them, with the same ranks."""
    folder = tmp_path / "sets-tokens-0"
    make_link(folder, sets_run)
    flags = list_flags(folder, pages_path, cache_dir)
    ranks = []  # a tensor for each set

    def watch(ranks_of_set):
        ranks.append(ranks_of_set)
        return metrics.count_hits(ranks_of_set)

    monkeypatch.setattr(objectives, "count_hits", watch)
    [row] = run_bench(draws, "recall", flags)

    is_first = torch.cat(ranks) == 0
    assert row["recall"] == pytest.approx(100 * is_first.double().mean().item())
    assert row["n"] == len(ranks) < len(is_first)
    model, corpus, *_ = draws.load_ended(folder, flags)
    sets, *_ = superbloom.read_sets(corpus, model.config.length)
    masked = sets.eval_batch(slice(None)).is_masked
    chosen = torch.stack([part[mask[:len(part)]] for part, mask in zip(ranks, masked)])
    evaluation = harness.read_log(sets_run)[-1]
    for k in (1, 10, 20):
        recall = (chosen < k).double().mean().item()
        assert recall == pytest.approx(evaluation[f"rec@{k}"], abs=1e-6)


def test_neighbors_guess_each_item_of_a_set_once(pages_path, cache_dir, monkeypatch):
    draws_seen = []

    def watch(sets, draw):
        draws_seen.append(draw)
        return neighbors.rank_hidden_items(sets, draw)

    monkeypatch.setattr(draws, "rank_hidden_items", watch)
    args = Namespace(data=str(pages_path), cache=str(cache_dir), items=None)
    *_, walks = run_bench(draws, "neighbors", args)

    [draw] = draws_seen
    sets, ids, _ = superbloom.read_sets(harness.load_corpus(args, "items"), draws.MAX_ITEMS)
    rows, columns = draw.is_masked.nonzero(as_tuple=True)
    assert rows.tolist() == list(range(len(draw.ids)))  # one item of each row is masked
    masked = draw.ids[rows, columns]
    assert masked.tolist() == ids[ids != 0].tolist()
    # the share of items, not of sets, whose rank is 0
    is_first = neighbors.rank_hidden_items(sets, draw)[:, 3] == 0
    assert 0 < is_first.mean() < 1
    assert walks["recall"] == pytest.approx(100 * is_first.mean())
    assert claims.read_rows(walks, "recall").mean() == pytest.approx(walks["recall"], abs=1e-3)
    assert walks["n"] == len(ids)
    assert walks["sizes"].split() == [str(n) for n in ids.count_nonzero(1).tolist()]


def test_neighbors_of_the_most_frequent_items_have_the_sets_of_a_run_with_this_vocab(
        pages_path, tmp_path, cache_dir, monkeypatch):
    num_items = 60
    folder = tmp_path / "sets-tokens-0"
    flags = list_flags(folder, pages_path, cache_dir)
    pretrain.main([*SMALL_SETS, "--data", flags.data, "--cache", flags.cache, "--out", str(folder),
                   "--length", str(draws.MAX_ITEMS), "--vocab", str(num_items)])
    sizes = []  # of the sets that the run reads

    def watch(ranks_of_set):
        sizes.append(str(len(ranks_of_set)))
        return metrics.count_hits(ranks_of_set)

    monkeypatch.setattr(objectives, "count_hits", watch)
    [run] = run_bench(draws, "recall", flags)

    flags.items = None
    *_, of_all = run_bench(draws, "neighbors", flags)
    flags.items = num_items
    *_, walks = run_bench(draws, "neighbors", flags)

    assert walks["sizes"].split() == sizes
    assert walks["n"] == run["n"] < of_all["n"]
    assert 0 < walks["recall"] < 100


def test_known_runs_are_kept_and_not_measured_again(
        sr_run, text_path, cache_dir, tmp_path, monkeypatch):
    run = tmp_path / "draws-proj-lsh-0"
    make_link(run, sr_run)
    other = dict(run="draws-proj-lsh-1", loss=0.5, settings={})
    path = tmp_path / "known.json"
    write_json(path, dict(rows=[dict(name="proj-lsh", runs=[other], loss_rows=["0.4 0.6"])]))
    settings = dict(seed=0)
    monkeypatch.setattr(
        draws, "measure_windows", lambda folder, args: (np.array([0.2, 0.3]), settings))

    flags = list_flags(run, text_path, cache_dir, str(path))
    [row] = draws.bench_losses(flags)
    write_json(path, dict(rows=[row]))
    monkeypatch.setattr(draws, "measure_windows", None)
    [again] = draws.bench_losses(flags)

    assert row["seeds"] == 2
    assert row["loss_all"] == [0.25, 0.5]
    assert row["loss_rows"] == ["0.200 0.300", "0.4 0.6"]
    assert json.dumps(again) == json.dumps(row)


def test_runs_that_have_not_ended_are_left_out(tmp_path, text_path, cache_dir, monkeypatch):
    steps = {"draws-a-0": 3, "draws-a-1": 2}
    for name in steps:
        (tmp_path / name).mkdir()
        (tmp_path / name / "ckpt.pt").touch()
    (tmp_path / "draws-b-0").mkdir()  # no checkpoint yet
    monkeypatch.setattr(draws, "load_checkpoint", lambda folder: dict(
        step=steps[Path(folder).name], run=dict(steps=3)))
    monkeypatch.setattr(draws, "measure_windows", lambda folder, args: (np.array([0.2]), {}))
    [row] = draws.bench_losses(list_flags(tmp_path / "draws-*", text_path, cache_dir))
    assert [run["run"] for run in row["runs"]] == ["draws-a-0"]


def test_random_pairs_train_with_buckets_of_the_same_sizes(small, monkeypatch):
    """The control hashes as LSH attention does, and then moves the buckets."""
    moved = []
    permute = attention_controls.permute_buckets

    def watch(buckets):
        result = permute(buckets)
        moved.append((buckets, result))
        return result

    monkeypatch.setattr(attention_controls, "permute_buckets", watch)
    before = attention.simhash
    flags = "--steps 1 --emb lookup --split regex --objective mlm --attn lsh --lsh_bands 2"
    attention_controls.main(["random", *small(*flags.split())])
    assert attention.simhash is before
    for buckets, result in moved:
        assert torch.equal(buckets.sort(-1).values, result.sort(-1).values)
    assert any(not torch.equal(buckets, result) for buckets, result in moved)


# The weight inside a bucket


def test_weight_inside_is_near_its_law_for_random_vectors(sr_run, text_path):
    args = Namespace(runs=[str(sr_run)], text=str(text_path))
    rows = run_bench(shares, "shares", args, hyperplanes=(2,), lengths=(256,), num_windows=2)
    random, *layers = rows
    assert random["inside"] == pytest.approx(random["law"], abs=3)
    assert len(layers) == harness.load_run(sr_run)[0].config.layers
    assert all(0 < row["inside"] < 100 for row in layers)


def test_one_bucket_has_all_keys_and_all_the_weight(monkeypatch):
    q, k = torch.randn(2, 1, 2, 5, 4)
    many = shares.measure(q, k, 1, torch.Generator().manual_seed(0))
    monkeypatch.setattr(shares, "NUM_BUCKETS", 1)
    one = shares.measure(q, k, 1, torch.Generator().manual_seed(0))
    assert 0 < many["inside"] < 100
    assert one == dict(inside=pytest.approx(100), empty=0)


# Linear models of misspelled texts


@pytest.fixture
def task(tmp_path):
    """A folder of a task of two topics, each with words of its own."""
    rng = np.random.default_rng(0)
    words = dict(animal=["elephant", "giraffe", "monkey"], color=["yellow", "purple", "orange"])
    for split, size in (("train", 60), ("dev", 30)):
        with open(tmp_path / f"{split}.jsonl", "w") as file:
            for i in range(size):
                label = ["animal", "color"][i % 2]
                text = " ".join(rng.choice(words[label], 4))
                print(json.dumps(dict(text=text, label=label)), file=file)
    return tmp_path


def test_linear_models_at_tiny_sizes_fill_all_columns(task, monkeypatch):
    monkeypatch.setattr(misspell, "DRAWS", 2)
    args = Namespace(runs=[str(task)], known=None)
    rows = run_bench(misspell, "linear", args, sizes=(16,))
    assert [row["columns"] for row in rows] == [16, 16, 16, 6]
    assert [row["seeds"] for row in rows] == [2, 2, 2, 0]  # a bag of words has no hash
    for row in rows:
        assert row["0"] == 100  # words of one topic alone
        assert row["majority"] == 50
        assert row["n"] == 30


def test_parts_of_rows_have_the_mean_that_is_compared(task):
    splits = misspell.read_splits(task)
    row = misspell.score_draws(misspell.FEATURES["MD5 bits"], 16, splits, 2)
    parts = claims.read_rows(row, "kept")
    assert parts.mean() == pytest.approx(row["kept"], abs=0.5)  # they are rounded
    assert row["kept"] == pytest.approx(np.mean(row["kept_all"]))


def test_dev_rows_with_no_errors_are_the_dev_rows(task):
    splits = misspell.read_splits(task)
    clean, _ = splits["0"]
    worst, _ = splits["40"]
    assert clean[0][0] in ("elephant", "giraffe", "monkey")
    assert clean != worst


def test_kept_share_by_hand():
    """4 of 5 rows are right as written, and 2 of them where misspelled: half is kept.

    A row adds 100 / 80 · (its change from half of what it was), in percent.
    """
    clean = torch.tensor([100.0, 100, 100, 100, 0])
    worst = torch.tensor([100.0, 100, 0, 0, 0])
    kept, parts = misspell.divide_scores(clean, worst)
    assert kept == pytest.approx(50)
    assert parts.tolist() == pytest.approx([112.5, 112.5, -12.5, -12.5, 50])


def test_one_bucket_with_the_upper_pairs_has_symmetric_scores_of_all_pairs():
    q, k, v = torch.randn(3, 2, 2, 9, 4)
    bucket = torch.zeros(2, 2, 1, 9, dtype=torch.int64)
    result = attention.lsh_attention_reference(q, k, v, bucket, bucket, pairs="upper")
    scores = q @ k.transpose(-2, -1) / 2  # √4
    symmetric = scores.triu() + scores.triu(1).transpose(-2, -1)
    assert torch.allclose(result, symmetric.softmax(-1) @ v, atol=1e-6)
