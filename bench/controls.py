"""Controls: scores that counting words reaches, beside those of models.

`frequency` guesses the label of a word in Shuffle+Random from how frequent the word is. `overlap`
judges a pair of texts by the words that they share. Neither reads the context of a word.

    python -m bench.controls frequency --runs out/proj-lsh
    python -m bench.controls overlap --data_dir glue/ --runs out/proj-lsh-stsb out/proj-lsh-mrpc
"""

import collections
import math
import statistics
from pathlib import Path

import numpy as np
import torch

from bench import harness
from bench.harness import CORPUS, GLUE_FILES, RUNS
from data.batches import TextBatches
from data.classification import METRICS, standard_error
from objectives import ShuffleRandom
from support.common import InputError, read_json
from support.results import read_result
from tokenizer import FIRST_WORD_ID
from words import list_words

# Shuffle+Random

FREQUENCY = """
    what judges a word | name        | s
    loss               | eval_loss   | .3f
    F1 intact          | f1_intact   | .3f
    F1 shuffled        | f1_shuffled | .3f
    F1 random          | f1_random   | .3f
"""


@torch.no_grad()
def bench_frequency(args, *, num_steps=200):
    """Score a model of S+R, and the frequency of each word alone, on the same held-out windows."""
    for folder in args.runs:
        model, _, corpus, _ = harness.load_run_with_corpus(folder, args)
        word_counts = corpus.counts[FIRST_WORD_ID:]
        batches = TextBatches(corpus.ids, word_counts, model.config.length, 32, seed=0)
        objective = ShuffleRandom()
        batch = objective.corrupt_batch(batches.eval_batch(slice(512)))

        # words of one class occur equally often, within a factor of two
        frequency_class = torch.from_numpy(np.log2(1 + corpus.counts).astype(int))  # (V,)
        logp = count_labels(objective, batches, frequency_class, num_steps)
        logits = logp[frequency_class[batch.inputs]]  # (B, L, 3)
        name = Path(folder).name
        judges = {
            name: model,
            f"{name}: frequency of the word alone": lambda ids, key_mask: logits,
        }
        for title, judge in judges.items():
            sums = objective.evaluate(judge, batch)
            yield dict(name=title, eval_loss=sums["loss"].item() / len(batch.positions),
                       **objective.metrics(sums))


def count_labels(objective, batches, frequency_class, num_steps):
    """Return log P(label | class of frequency), float (classes, 3), from training windows."""
    num_classes = int(frequency_class.max()) + 1
    counts = torch.ones(num_classes, len(ShuffleRandom.kinds))  # from 1, so that no share is 0
    for step in range(num_steps):
        batch = objective.corrupt_batch(batches.get_batch(step, slice(None)))
        words = batch.inputs.flatten()[batch.positions]
        cells = frequency_class[words] * len(ShuffleRandom.kinds) + batch.scored_labels()
        counts += torch.bincount(cells, minlength=counts.numel()).view_as(counts)
    shares = counts / counts.sum(1, keepdim=True)
    return shares.log()


# Pairs of texts

OVERLAP = """
    task                  | name       | s
    metric                | metric     | s
    model                 | model      | .1f ±
    cosine of word counts | cosine     | .1f
    difference            | difference | .1f ±
    n                     | n          | ,
"""


def bench_overlap(args):
    """Score fine-tuned models of pairs, and the cosine of the tf-idf word counts of both texts."""
    for folder in args.runs:
        for name in read_json(f"{folder}/results.json")["tasks"]:
            task, splits = harness.read_glue(name, args)
            is_numbers = task.labels is None
            if len(task.text_columns) != 2 or not (is_numbers or len(task.labels) == 2):
                raise InputError("--runs: expected fine-tunings on pairs of texts with numbers or "
                                 f"two classes, got {name} in {folder}.")
            train = splits["train"]
            idf = weigh_words(train)
            predicted = np.array([cosine(texts, idf) for texts, _ in splits["dev"]])
            # a correlation takes the cosine as it is; classes need a threshold
            if not is_numbers:
                cosines = np.array([cosine(texts, idf) for texts, _ in train])
                classes = np.array([task.labels.index(label) for _, label in train])
                threshold, above = choose_threshold(cosines, classes)
                predicted = np.where(predicted >= threshold, above, 1 - above)
            # the predictions of each seed, for an error over rows and seeds
            paths = sorted(Path(folder).glob(f"{name}-seed-*.json"))
            yield compare_with_model(name, [read_result(path) for path in paths], predicted)


def compare_with_model(name, results, predicted):
    """Return a row of the table.

    Args:
        name: str, the task.
        results: list of support.results.Result, one of each seed.
        predicted: array (n,), what the control predicts.
    """
    metric = results[0].metric
    truth = np.array(results[0].truth)
    models = [result.model.predicted for result in results]
    others = np.tile(predicted, (len(models), 1))  # the same for each seed
    scores = [result.model.scores[metric] for result in results]
    cosine_score = 100 * METRICS[metric](predicted, truth)
    return dict(name=name, metric=metric, n=len(truth),
                model=statistics.mean(scores), model_std=statistics.stdev(scores),
                cosine=cosine_score, difference=statistics.mean(scores) - cosine_score,
                difference_std=standard_error(metric, models, others, truth))


def weigh_words(rows):
    """Return dict, word -> ln((1 + n) / (1 + d)) + 1, where d of n training texts have the word."""
    num_texts = 0
    counts = collections.Counter()
    for texts, _ in rows:
        for text in texts:
            num_texts += 1
            counts.update(set(list_words(text)))
    idf = collections.defaultdict(lambda: math.log(1 + num_texts) + 1)  # for words never seen
    for word, count in counts.items():
        idf[word] = math.log((1 + num_texts) / (1 + count)) + 1
    return idf


def cosine(texts, idf):
    """Return the cosine of the word counts, times idf, of a pair of texts."""
    first, second = [collections.Counter(list_words(text)) for text in texts]
    # each count is weighted by idf, so products of two counts by its square
    product = sum(first[word] * second[word] * idf[word] ** 2 for word in first)
    lengths = []
    for counts in (first, second):
        lengths.append(sum((count * idf[word]) ** 2 for word, count in counts.items()))
    return product / math.sqrt(max(lengths[0] * lengths[1], 1e-12))


def choose_threshold(cosines, classes):
    """Return the threshold, and the class 0 or 1 above it, that fit most training rows."""
    # a task may number its classes either way, so both are tried
    best = (0, 0.0, 0)  # rows that fit, threshold, class above
    # in steps of 1 %, on training rows alone
    for threshold in np.linspace(0, 1, 101):
        is_above = cosines >= threshold
        for above in (0, 1):
            num_right = int((np.where(is_above, above, 1 - above) == classes).sum())
            best = max(best, (num_right, float(threshold), above))
    _, threshold, above = best
    return threshold, above


TABLES = {  # name -> function that yields the rows, columns, flags and their defaults
    "frequency": (bench_frequency, FREQUENCY, CORPUS | RUNS),
    "overlap": (bench_overlap, OVERLAP, GLUE_FILES | RUNS),
}


if __name__ == "__main__":
    harness.main("bench.controls", TABLES, __doc__)
