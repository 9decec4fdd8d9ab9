"""Misspelled texts and topic tasks: what the benches build, and one table at a tiny size."""

import json
from argparse import Namespace

import numpy as np
import pytest

import finetune
from bench import misspell, topics


def distance(a, b):
    """Return how many letters to add, drop, replace or swap with the next lead from a to b."""
    if not a or not b:
        return len(a) + len(b)
    steps = [distance(a[1:], b) + 1, distance(a, b[1:]) + 1]
    steps.append(distance(a[1:], b[1:]) + (a[0] != b[0]))
    if a[:2] == b[1::-1]:
        steps.append(distance(a[2:], b[2:]) + 1)
    return min(steps)


def test_misspelled_word_is_one_typing_error_away():
    rng = np.random.default_rng(0)
    words = [misspell.misspell_word("qwaz", rng) for _ in range(300)]
    assert {distance("qwaz", word) for word in words} <= {0, 1}  # 0: a swap of equal letters
    assert {len(word) for word in words} == {3, 4, 5}


@pytest.mark.parametrize("share", [0.0, 0.25, 1.0])
def test_misspell_changes_the_share_of_words(share):
    words = ["letters"] * 4_000
    changed = misspell.misspell(" ".join(words), share, np.random.default_rng(0)).split(" ")
    count = sum(word != "letters" for word in changed)
    # a quarter of the changes swaps neighbors; tt are equal, one place in six
    expected = 4_000 * share * (1 - 1 / 4 / 6)
    assert abs(count - expected) <= 6 * np.sqrt(4_000 * 0.25) * (share > 0)


def test_topics_hold_a_group_in_one_split(tmp_path):
    rows = []
    for number in range(400):
        context = f"paragraph {number // 4}"
        rows.append(dict(title=f"t{number // 100}", context=context, question=f"{number}?"))
    source = tmp_path / "squad.jsonl"
    source.write_text("\n".join(json.dumps(row) for row in rows))

    topics.main(["articles", str(source), str(tmp_path / "out")])

    groups = {}
    for split in ("train", "dev"):
        path = tmp_path / "out" / "articles" / f"{split}.jsonl"
        texts = [json.loads(line) for line in path.read_text().splitlines()]
        assert {row["label"] for row in texts} == {"t0", "t1", "t2", "t3"}
        groups[split] = {int(row["text"][:-1]) // 4 for row in texts}
    assert groups["train"].isdisjoint(groups["dev"])
    assert groups["train"] | groups["dev"] == set(range(100))


def test_topics_take_the_nation_of_the_first_paragraph():
    long = "word " * 20
    rows = [
        dict(title="A", text=f"A was an Italian painter. {long}\nA is a British citizen. {long}"),
        dict(title="B", text=f"B was a Martian painter. {long}\nB was a British citizen. {long}"),
        dict(title="C", text=f"short\nC was a French painter. {long}\nshort"),
    ]
    assert topics.list_paragraphs(rows) == [("A", f"A is a British citizen. {long}", "Italian")]


def test_scores_of_rows_as_written_are_those_of_fine_tuning(sr_run, tmp_path, cache_dir):
    rng = np.random.default_rng(0)
    for split in ("train", "dev"):
        with open(tmp_path / f"{split}.jsonl", "w") as file:
            for _ in range(60):
                label = ["cold", "warm"][rng.integers(2)]
                print(json.dumps(dict(text=f"very {label} water", label=label)), file=file)
    flags = ["--ckpt", str(sr_run), "--text", "text", "--label", "label", "--seeds", "1"]
    files = ["--train", str(tmp_path / "train.jsonl"), "--dev", str(tmp_path / "dev.jsonl")]
    tuned = finetune.main([*flags, *files, "--epochs", "30", "--device", "cpu", "--out",
                           str(tmp_path / "out")])

    args = Namespace(runs=[str(tmp_path / "out")], cache=str(cache_dir))
    model, bag = misspell.bench_scores(args)

    assert model["0"] == pytest.approx(tuned["tasks"]["own"]["mean"])
    assert bag["0"] == pytest.approx(tuned["tasks"]["own"]["bag_of_words"])
    assert bag["40"] < bag["0"]
