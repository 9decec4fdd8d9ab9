"""Attention to copies: how much a word attends to the same word in the other text of a pair.

A model is read as pre-training left it, on pairs of STS-B's training rows. Only words count that
stand once in each text. Shares of attention are in percent, means over words and heads.

`repeats` asks how often the words of a text stand twice in a window, for each text of --data.

    python -m bench.copies copies --data_dir glue/ --runs models/english-detect.pt
    python -m bench.copies repeats --data wikipedia.jsonl+novels.jsonl
"""

from pathlib import Path

import numpy as np
import torch

from bench import harness
from bench.harness import CORPUS, GLUE_FILES, RUNS
from data.corpus import Corpus, prepare
from tokenizer import FIRST_WORD_ID, build_inputs

COPIES = """
    model                          | name      | s
    layer                          | layer     | ,
    copy                           | copy      | .1f
    another word of the other text | other     | .1f
    both neighbors                 | neighbors | .1f
    n                              | n         | ,
"""


def bench_copies(args):
    """Measure the attention of words to their copies, in each layer of pre-trained models."""
    _, splits = harness.read_glue("stsb", args)
    rows = splits["train"]
    chosen = np.random.default_rng(0).permutation(len(rows))[:400]
    pairs = [rows[i][0] for i in chosen]
    for folder in args.runs:
        model, tokenizer, _ = harness.load_run(folder)
        shares = [attend_to_copies(model, tokenizer, pair) for pair in pairs]
        shares = np.concatenate(shares, 1)  # (layers, words, 3)
        for layer, values in enumerate(shares, 1):
            copy, other, neighbors = 100 * np.nanmean(values, 0)
            yield dict(name=Path(folder).name, layer=layer, copy=copy, other=other,
                       neighbors=neighbors, n=len(values))


def attend_to_copies(model, tokenizer, pair):
    """Return the attention of each word of a pair of texts that has a copy, means over heads.

    Args:
        model: Model without padding or LSH attention.
        tokenizer: HashTokenizer.
        pair: tuple of two str.

    Returns:
        float (layers, words, 3): to the copy, to another word of the other text on average (NaN if
        there is none), and to both neighbors.
    """
    first, second = [tokenizer.ids(tokenizer.split(text)[0]) for text in pair]
    ids, num_cut = build_inputs(first, second, model.config.length)
    # [CLS] A [SEP] [SEP] B [SEP]
    first_text = slice(1, len(first) + 1)
    second_text = slice(len(first) + 3, len(ids) - 1)
    copies = []  # the word that attends, its copy, the text of the copy
    for i, word in enumerate(first, 1):
        is_copy = second == word
        if (first == word).sum() == 1 and is_copy.sum() == 1:
            j = second_text.start + is_copy.argmax()
            copies.append((i, j, second_text))
            copies.append((j, i, first_text))
    if num_cut > 0 or not copies:
        return np.empty((len(model.layers), 0, 3))
    ids = torch.from_numpy(ids).long().unsqueeze(0)  # (1, L)
    shares = []  # a list for each layer
    for q, k in harness.walk_layers(model, tokenizer, ids):
        scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5  # (1, H, L, L)
        weights = scores.softmax(-1).mean(1)[0]  # (L, L)
        values = []  # a tuple for each word
        for query, key, text in copies:
            row = weights[query]
            others = row[text]
            mean = (others.sum() - row[key]) / (len(others) - 1)
            values.append((row[key], mean, row[query - 1] + row[query + 1]))
        shares.append(values)
    return torch.tensor(shares, dtype=torch.float64).numpy()


REPEATS = """
    text                       | name  | s
    rarer words that repeat, % | twice | .1f
    rarer words                | n     | ,
"""


def bench_repeats(args, *, size=126, num_frequent=1_000):
    """Count how often a word beyond the 1,000 most frequent stands twice in 126 words."""
    for name in args.data.split("+"):  # a row for each text
        corpus = Corpus(prepare(name, "regex", args.cache))
        num_windows = len(corpus.ids) // size
        windows = corpus.ids[:num_windows * size].reshape(num_windows, size)
        num_twice = 0
        n = 0
        for window in windows:
            words, counts = np.unique(window, return_counts=True)
            counts = counts[words >= FIRST_WORD_ID + num_frequent]  # IDs are sorted by frequency
            num_twice += counts[counts > 1].sum().item()
            n += counts.sum().item()
        yield dict(name=Path(name).name, twice=100 * num_twice / n, n=n)


TABLES = {
    "copies": (bench_copies, COPIES, GLUE_FILES | RUNS),
    "repeats": (bench_repeats, REPEATS, CORPUS),
}


if __name__ == "__main__":
    harness.main("bench.copies", TABLES, __doc__)
