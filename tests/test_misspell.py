"""Misspelled texts and topic tasks: what the benches build, and one table at a tiny size."""

import json
from argparse import Namespace

import numpy as np
import pytest

import finetune
from bench import misspell, topics, training
from data.rows import read_rows
from tests.test_bench import run_bench


def test_misspelled_word_keeps_its_start_or_its_end():
    """One error of "qwaz" is in one letter, or in two neighbors."""
    rng = np.random.default_rng(0)
    words = {misspell.misspell_word("qwaz", rng) for _ in range(300)}
    assert "qwaz" not in words
    assert all(word[0] == "q" or word[-2:] == "az" for word in words - {"wqaz"})
    assert {len(word) for word in words} == {3, 4, 5}


@pytest.mark.parametrize("share", [0.0, 0.25, 1.0])
def test_misspell_changes_the_share_of_words(share):
    text = " ".join(["words"] * 4_000)
    changed = misspell.misspell(text, share, np.random.default_rng(0)).split(" ")
    count = sum(word != "words" for word in changed)
    sigma = np.sqrt(4_000 * share * (1 - share))
    assert abs(count - 4_000 * share) <= 6 * sigma


def test_topics_hold_a_group_in_one_split(tmp_path):
    rows = []
    for number in range(400):
        context = f"paragraph {number // 4}"
        rows.append(dict(title=f"t{number // 100}", context=context, question=f"{number}?"))
    source = tmp_path / "squad.jsonl"
    source.write_text("\n".join(map(json.dumps, rows)))

    topics.main(["articles", str(source), str(tmp_path)])

    paragraphs = []
    for split in ("train", "dev"):
        rows = read_rows(f"{tmp_path}/articles/{split}.jsonl")
        paragraphs.append({int(row["text"][:-1]) // 4 for row in rows})
    train, dev = paragraphs
    assert train.isdisjoint(dev)
    assert train | dev == set(range(100))


def test_topics_take_the_nation_of_the_first_paragraph():
    long = "word " * 20
    rows = [
        dict(title="A", text=f"A was an Italian painter. {long}\nA is a British citizen. {long}"),
        dict(title="B", text=f"B was a Martian painter. {long}\nB was a British citizen. {long}"),
        dict(title="C", text=f"short\nC was a French painter. {long}\nshort"),
    ]
    assert topics.list_paragraphs(rows) == [("A", f"A is a British citizen. {long}", "Italian")]


def test_scores_of_rows_as_written_are_those_of_fine_tuning(
        long_control, sr_run, tmp_path, cache_dir):
    path = tmp_path / "rows.tsv"
    path.write_text("text\tlabel\n" + 30 * "very cold water\tcold\nvery warm water\twarm\n")
    out = str(tmp_path / "out")
    tuned = finetune.main([
        "--ckpt", str(sr_run), "--train", str(path), "--dev", str(path), "--text", "text",
        "--label", "label", "--seeds", "1", "--epochs", "30", "--device", "cpu", "--out", out])

    model, bag = misspell.bench_scores(Namespace(runs=[out], cache=str(cache_dir)))

    expected = tuned["tasks"]["own"]
    assert model["0"] == pytest.approx(expected["mean"])
    assert bag["0"] == pytest.approx(expected["bag_of_words"])
    assert bag["40"] < bag["0"]
    [row] = run_bench(training, "tasks", Namespace(runs=[out, "out/none"]))  # it has no results
    assert row["name"] == f"{sr_run.name}, {tmp_path.name}"
    assert row["score"] == expected["mean"]
    assert row["over_bag_std"] == expected["over_bag_error"]
