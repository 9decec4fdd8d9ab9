"""Misspelled texts: the scores of fine-tuned models and of bags of words.

    python -m bench.misspell scores --runs out/*

Each run is an --out of finetune.py on one task with labels. A share of the words is misspelled in
the rows that are scored, and none in the training rows. A bag of words is trained for each task, as
finetune.py trains its control.
"""

import argparse
import re

import numpy as np

import finetune
from bench import harness
from bench.harness import RUNS
from data.tasks import read_task
from support.common import read_json, resolve_device

SHARES = (0, 10, 20, 40)  # percent of the words
ROWS = ("qwertyuiop", "asdfghjkl", "zxcvbnm")  # of a keyboard
LETTERS = "".join(ROWS)
ERRORS = ("swap", "drop", "add", "hit")

SCORES = """
    model, task                     | name | s
    as written                      | 0    | .1f
    10 % of words                   | 10   | .1f
    20 %                            | 20   | .1f
    40 %                            | 40   | .1f
    kept at 40 %, in % of the score | kept | .1f
"""


def misspell_word(word, rng):
    """Return a word with one typing error: two letters swapped, one dropped, added or mistyped."""
    # never the last letter, so that there is one to swap with
    place = rng.integers(len(word) - 1)
    first = word[:place]
    letter = word[place]
    rest = word[place + 1:]
    error = ERRORS[rng.integers(4)]
    if error == "swap":
        return first + rest[0] + letter + rest[1:]
    if error == "drop":
        return first + rest
    if error == "add":
        return first + letter + LETTERS[rng.integers(26)] + rest
    for row in ROWS:
        i = row.find(letter.lower())
        if i >= 0:
            neighbors = row[max(i - 1, 0):i] + row[i + 1:i + 2]  # left and right
            hit = neighbors[rng.integers(len(neighbors))]
    return first + hit + rest


def misspell(text, share, rng):
    """Return a text in which a share of the words of three letters and more is misspelled."""
    def change(match):
        if rng.random() >= share:
            return match[0]
        return misspell_word(match[0], rng)

    # an error in one or two letters leaves nothing of a word
    return re.sub(r"[A-Za-z]{3,}", change, text)


def bench_scores(args):
    """Score misspelled rows by each run, and by a bag of words for each task."""
    seen = set()
    for folder in args.runs:
        results = read_json(f"{folder}/results.json")
        [name] = results["tasks"]
        settings = argparse.Namespace(**results["settings"] | dict(cache=args.cache, device="cpu"))
        # as the run was trained, but on a CPU
        runtime = resolve_device(settings)
        model, tokenizer, _ = harness.load_run(folder)
        task, rows_of_splits = read_task(name, settings)
        # the dev rows, misspelled anew for each share with the same seed, are a split each
        for share in SHARES:
            rng = np.random.default_rng(0)
            rows = []
            for texts, label in rows_of_splits["dev"]:
                rows.append((tuple(misspell(text, share / 100, rng) for text in texts), label))
            rows_of_splits[str(share)] = rows
        # misspelled words get codes as any new word does
        data = finetune.encode_splits(task, rows_of_splits, tokenizer, model.config.length)
        harness.set_codes(model, tokenizer)
        title = harness.name_run(results["settings"], name)  # model, task
        yield score_splits(title, runtime, model, data)

        # a bag of words is the same for all models of a task that split the texts alike
        units = "words"
        if tokenizer.splitter.name == "bpe":
            units = "pieces"
        _, task_name = title.rsplit(", ", 1)
        title = f"bag of {units}, {task_name}"
        if title not in seen:
            seen.add(title)
            bag = finetune.BagOfWords(len(model.codes), data["train"].num_outputs)
            # finetune.py keeps no weights of its control
            recipe = finetune.choose_recipe(settings, data, settings.seed)
            recipe = finetune.choose_control_recipe(recipe, data)
            weights, _ = finetune.train(bag, data, recipe, runtime, f"{name}, bag of words")
            if weights is not None:
                bag.load_state_dict(weights)
            yield score_splits(title, runtime, bag, data)


def score_splits(title, runtime, model, data):
    """Return a row of the table: the score of each share of misspelled words."""
    row = dict(name=title)
    for split in map(str, SHARES):
        scores, _ = finetune.evaluate(model, data[split], runtime)
        row[split] = scores[data["train"].task.metrics[0]]
    # comparable between models of unlike scores
    row["kept"] = 100 * row["40"] / row["0"]
    return row


TABLES = {"scores": (bench_scores, SCORES, RUNS | dict(cache="cache"))}


if __name__ == "__main__":
    harness.main("bench.misspell", TABLES, __doc__)
