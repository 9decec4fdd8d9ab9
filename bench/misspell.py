"""Misspelled texts: the scores of fine-tuned models, of bags of words, and of linear models.

    python -m bench.misspell scores --runs out/*
    python -m bench.misspell linear --runs topics/articles topics/nations glue/SST-2

A run of `scores` is an --out of finetune.py on one task with labels. A share of the words is
misspelled in the rows that are scored, and none in the training rows. A bag of words is trained for
each task, as finetune.py trains its control.

A run of `linear` is a folder of a task, with train and dev files. A text is the mean of its words'
features, LSH bits, MD5 bits or hashed n-grams in as many columns, and a linear model reads them. So
nothing but the features decides what a misspelling costs.
"""

import argparse
import collections
import itertools
import re
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

import finetune
from bench import harness
from bench.harness import RUNS
from data.rows import read_rows
from data.tasks import read_task
from hashing import NgramLSH, md5_bits, ngram_index
from support.common import read_json, resolve_device
from support.pretrained import encode_splits
from words import list_words

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
        dtype = resolve_device(settings).dtype  # as the run was trained, but on a CPU
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
        data = encode_splits(task, rows_of_splits, tokenizer, model.config.length)
        harness.set_codes(model, tokenizer)
        title = harness.name_run(results["settings"], name)  # model, task
        yield score_splits(title, model, data)

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
            recipe = finetune.choose_recipe(settings, data, settings.seed, dtype)
            recipe = finetune.choose_control_recipe(recipe, data)
            best, _ = finetune.train(bag, data, recipe)
            if best.weights is not None:
                bag.load_state_dict(best.weights)
            yield score_splits(title, bag, data)


def score_splits(title, model, data):
    """Return a row of the table: the score of each share of misspelled words."""
    row = dict(name=title)
    for split in map(str, SHARES):
        scores, _ = finetune.evaluate(model, data[split])
        row[split] = scores[data["train"].task.metrics[0]]
    # comparable between models of unlike scores
    row["kept"] = 100 * row["40"] / row["0"]
    return row


# Linear models

DRAWS = 6  # of the hash functions
WORST = 40  # percent of the words, of the endpoint
DECAYS = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2)
MAX_TRAIN = 10_000  # training rows, the first ones
GRAMS = 64  # n-grams that a word keeps

LINEAR = """
    features, columns, task         | name     | s
    as written                      | 0        | .1f ±
    10 % of words                   | 10       | .1f ±
    20 %                            | 20       | .1f ±
    40 %                            | 40       | .1f ±
    kept at 40 %, in % of the score | kept     | .1f ±
    majority class                  | majority | .1f
    n                               | n        | ,
"""


def bench_linear(args, *, sizes=(128, 1_024)):
    """Score misspelled rows by linear models of hashed words, over draws of the hash."""
    known = harness.read_known(args)
    for folder in args.runs:
        splits = read_splits(folder)
        models = {}  # name -> function that lists features, columns, draws of the hash
        for size in sizes:
            for kind, list_features in FEATURES.items():
                models[f"{kind}, {size:,}, {Path(folder).name}"] = (list_features, size, DRAWS)
        # it has no hash
        models[f"bag of words, {Path(folder).name}"] = (None, None, 0)
        for name, (list_features, size, num_draws) in models.items():
            if name in known:
                yield known[name]
            else:
                yield dict(name=name) | score_draws(list_features, size, splits, num_draws)


def read_splits(folder):
    """Return dict, split -> (list of lists of words, labels int64 (n,)), of the files of a task.

    The splits are train, and the dev rows with each share of misspelled words, such as "40".
    """
    rows = {}
    for split in ("train", "dev"):
        [path] = Path(folder).glob(f"{split}.*")
        rows[split] = []
        for row in itertools.islice(read_rows(str(path)), MAX_TRAIN):
            text = row["text"] if "text" in row else row["sentence"]
            rows[split].append((text, str(row["label"])))
    numbers = {label: i for i, label in enumerate(sorted({label for _, label in rows["train"]}))}

    def prepare(texts):
        words = [list_words(text) for text, _ in texts]
        return words, torch.tensor([numbers[label] for _, label in texts])

    splits = dict(train=prepare(rows["train"]))
    for share in SHARES:
        # the same seed for each share, as in bench_scores
        rng = np.random.default_rng(0)
        splits[str(share)] = prepare(
            [(misspell(text, share / 100, rng), label) for text, label in rows["dev"]])
    return splits


def list_lsh_bits(words, size, counts, draw):
    """Return -1 or 1 for each LSH bit of words, (V, size)."""
    lsh = NgramLSH.fit(counts, seed=draw)
    return 2.0 * lsh.bits(words, size) - 1


def list_md5_bits(words, size, counts, draw):
    """Return -1 or 1 for each MD5 bit of words, (V, size)."""
    return 2.0 * md5_bits(words, size, key=str(draw)) - 1


def list_gram_counts(words, size, counts, draw):
    """Return how many n-grams of each word have each hash bucket, (V, size)."""
    index = ngram_index(words, size + 1, GRAMS, seed=draw)  # (V, G); 0 is padding
    features = np.zeros((len(words), size + 1), np.float32)
    for column in index.T:
        features[np.arange(len(words)), column] += 1
    return features[:, 1:]


FEATURES = {  # name -> function(words, size, counts, draw)
    "LSH bits": list_lsh_bits,
    "MD5 bits": list_md5_bits,
    "n-grams": list_gram_counts,
}


def score_draws(list_features, size, splits, num_draws):
    """Return a row of the table: the scores of a kind of features, over draws of the hash.

    num_draws 0: nothing is random, and one run is scored.
    `kept_rows` has a number for each scored row, of divide_scores, a mean over draws: by them two
    kinds of features are compared row by row.
    """
    _, train_labels = splits["train"]
    runs = []  # a dict for each draw
    parts = []
    decay = None
    for draw in range(max(num_draws, 1)):
        inputs = embed_splits(list_features, size, splits, draw)
        if decay is None:  # chosen once, on training rows alone
            decay = choose_decay(inputs["train"], train_labels)
        weights = fit_linear(inputs["train"], train_labels, decay)
        run = {}
        is_right = {}
        for split in map(str, SHARES):
            _, labels = splits[split]
            predicted = apply_linear(inputs[split], weights).argmax(1)
            is_right[split] = 100 * (predicted == labels).double()  # (n,)
            run[split] = is_right[split].mean().item()
        run["kept"], part = divide_scores(is_right["0"], is_right[str(WORST)])
        runs.append(run)
        parts.append(part)

    _, labels = splits["0"]
    is_majority = labels == train_labels.mode().values
    row = harness.summarize(runs)
    row |= dict(seeds=num_draws, n=len(labels), majority=100 * is_majority.double().mean().item(),
                decay=decay, columns=inputs["train"].shape[1])
    rows = torch.stack(parts).mean(0)  # (n,)
    row["kept_rows"] = " ".join(f"{part:.0f}" for part in rows)
    return row


def divide_scores(clean, worst):
    """Return how much of a score is kept, and each row's part in it.

    Args:
        clean, worst: float (n,), 100 where a row is right and 0 where it is not, as written and
            misspelled.

    Returns:
        kept: float, 100 · mean of worst / mean of clean.
        parts: float (n,), whose mean is kept: the ratio as a linear function of the rows.
    """
    ratio = worst.mean() / clean.mean()
    change = worst - ratio * clean  # its mean is 0
    return 100 * ratio.item(), 100 * (ratio + change / clean.mean())


def embed_splits(list_features, size, splits, draw):
    """Return dict, split -> matrix (n, columns): the mean of each text's word features.

    list_features None: a bag of words, a column for each word of the training texts, sparse.
    """
    train_words, _ = splits["train"]
    counts = dict(collections.Counter(word for words in train_words for word in words))
    if list_features is None:
        return {split: count_words(texts, list(counts)) for split, (texts, _) in splits.items()}

    inputs = {}
    for split, (texts, _) in splits.items():
        vocabulary = sorted({word for words in texts for word in words})
        features = list_features(vocabulary, size, counts, draw)
        shares = count_words(texts, vocabulary)
        inputs[split] = shares @ torch.as_tensor(features, dtype=torch.float32)
    # columns of one scale, so that one decay fits all kinds
    mean = inputs["train"].mean(0)
    std = inputs["train"].std(0).clamp(min=1e-8)
    return {split: (matrix - mean) / std for split, matrix in inputs.items()}


def count_words(texts, vocabulary):
    """Return each word's share of each text, a sparse matrix (n, V); other words count nothing."""
    number_of = {word: i for i, word in enumerate(vocabulary)}
    places = []
    values = []
    for i, words in enumerate(texts):
        for word in words:
            if word in number_of:
                places.append((i, number_of[word]))
                values.append(1 / len(words))
    places = torch.tensor(places).T
    shape = (len(texts), len(vocabulary))
    return torch.sparse_coo_tensor(places, values, shape, check_invariants=True).coalesce()


def choose_decay(inputs, labels):
    """Return the weight decay that scores best on every tenth training row, by the others."""
    is_held = torch.arange(len(labels)) % 10 == 0
    best = (-1.0, None)
    for decay in DECAYS:
        weights = fit_linear(take_rows(inputs, ~is_held), labels[~is_held], decay)
        predicted = apply_linear(take_rows(inputs, is_held), weights).argmax(1)
        accuracy = (predicted == labels[is_held]).double().mean().item()
        best = max(best, (accuracy, decay), key=lambda pair: pair[0])
    return best[1]


def take_rows(inputs, is_taken):
    """Return the rows of a matrix, sparse or not, where bool (n,) is_taken is True."""
    return inputs.index_select(0, is_taken.nonzero().squeeze(1))


def fit_linear(inputs, labels, decay, steps=60):
    """Fit a softmax regression by L-BFGS; return its weights and bias."""
    num_classes = int(labels.max()) + 1
    weights = torch.zeros(inputs.shape[1], num_classes, requires_grad=True)
    bias = torch.zeros(num_classes, requires_grad=True)
    # a share of a text is small, so that weights of single words are large
    scale = decay if not inputs.is_sparse else decay / 100
    optimizer = torch.optim.LBFGS([weights, bias], max_iter=steps, line_search_fn="strong_wolfe")

    def closure():
        optimizer.zero_grad()
        loss = F.cross_entropy(apply_linear(inputs, (weights, bias)), labels)
        loss = loss + scale * weights.square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    return weights.detach(), bias.detach()


def apply_linear(inputs, weights):
    """Return the logits (n, classes)."""
    matrix, bias = weights
    if inputs.is_sparse:
        return torch.sparse.mm(inputs, matrix) + bias
    return inputs @ matrix + bias


TABLES = {
    "scores": (bench_scores, SCORES, RUNS | dict(cache="cache")),
    "linear": (bench_linear, LINEAR, RUNS | dict(known=None)),
}


if __name__ == "__main__":
    harness.main("bench.misspell", TABLES, __doc__)
