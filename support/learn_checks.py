"""The checks of learn.ipynb. They contain the answers: write your own first, then read.

`check` calls a function of the reader on a few cases and compares the results with those of this
code. If they differ, it compares them with those of the usual errors, and names the error that
gives the same results.

The first case of an exercise is an example of test_all.py, worked out by hand there. The truth is a
formula, which tests/test_learn.py compares with the classes of the project.

Notation:
    As in the file that an exercise is about: F features, T bits, d width, m maps, R buckets,
    N items, k hash functions, e head size.
"""

import copy
import functools
import math
import traceback
from typing import Callable, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from bloom import BloomMap
from embeddings import standardize
from hashing import NgramLSH, list_ngrams
from objectives import IGNORE_INDEX, ShuffleRandom
from search import SCORES, beam_search, exhaustive
from tokenizer import CLS, FIRST_WORD_ID, SEP

TOLERANCE = 1e-4  # of float32 results that are computed in another order
MAX_SHOWN = 12  # numbers of an array that a message shows


class Exercise(NamedTuple):
    """What check needs to know of a function that the reader writes."""

    list_cases: Callable  # () -> list of the arguments of each case, a tuple
    truth: Callable  # function of the same arguments, which is right
    errors: list  # (function of the same arguments, a usual error; what is wrong)


def check(name, yours):
    """Print whether a function of the reader is right, or which usual error it has.

    Args:
        name: str, a key of EXERCISES, or "my_score".
        yours: function of the arguments that the exercise names.
    """
    judge = judge_score if name == "my_score" else judge_function
    try:
        verdict = judge(name, yours)
    except Exception as error:  # the reader's code may raise anything
        verdict = f"raises {type(error).__name__}: {error}"
        for frame in traceback.extract_tb(error.__traceback__):
            if frame.name == name:
                verdict += f", at the line: {frame.line}"
        hint = RAISED.get((name, type(error)))
        if hint is not None:
            verdict += f". {hint}"
    print(f"{name}: {verdict}")


def reveal(guess, measured):
    """Print a guess and what was measured; only that the guess is missing where it is `...`."""
    if guess is ...:
        print("guess: not yet. Replace ... by a number, and run the cell again.")
    else:
        print(f"guess: {guess}   measured: {measured}")


def check_quiz(answers):
    """Print which answers are right, with the reason of each.

    Args:
        answers: list of True, False, or ... for not yet, in the order of QUIZ.
    """
    num_missing = 0
    num_right = 0
    for number, (answer, (truth, reason)) in enumerate(zip(answers, QUIZ), 1):
        if answer is ...:
            num_missing += 1
        elif answer == truth:
            num_right += 1
            print(f"{number:2} right, {truth}. {reason}")
        else:
            print(f"{number:2} wrong, it is {truth}. {reason}")
    print(f"quiz: {num_right} of {len(QUIZ)} right, {num_missing} not yet")


# Judging a function


def judge_function(name, yours):
    """Return what check prints about a function of EXERCISES."""
    exercise = EXERCISES[name]
    cases = exercise.list_cases()
    results = []
    for arguments in cases:
        result = call(yours, arguments)
        if not results and (result is None or result is ...):  # the body is still a blank
            return "not yet"
        results.append(to_array(result))
    expected = [to_array(call(exercise.truth, arguments)) for arguments in cases]
    wrong = [i for i in range(len(cases)) if not is_equal(results[i], expected[i])]
    if not wrong:
        return f"right in all {len(cases)} cases"

    # an error is named if it explains all results, the right ones too
    for usual_error, hint in exercise.errors:
        same = [to_array(call(usual_error, arguments)) for arguments in cases]
        if all(is_equal(a, b) for a, b in zip(results, same)):
            return f"not right yet. {hint}"

    i = wrong[0]
    shown = ", ".join(show(argument) for argument in cases[i])
    return (f"not right yet, and the error is not a usual one. Wrong in {len(wrong)} of "
            f"{len(cases)} cases, first in {name}({shown}): expected {show(expected[i])}, "
            f"got {show(results[i])}.")


def call(function, arguments):
    """Call a function with copies of arguments, so that it may change them."""
    return function(*copy.deepcopy(arguments))


def to_array(value):
    """Return a result, a tensor, array, list, tuple or number, as a float array."""
    if torch.is_tensor(value):
        value = value.detach()
    return np.asarray(value, float)


def is_equal(a, b):
    """Return whether two arrays have one shape and the same numbers; NaN equals NaN."""
    return a.shape == b.shape and np.allclose(a, b, TOLERANCE, TOLERANCE, equal_nan=True)


def show(value):
    """Return an argument or a result as a message shows it: of large ones the beginning."""
    if isinstance(value, (str, int, float)):
        return repr(value)
    if isinstance(value, dict):
        return f"{str(value):.60}"
    array = to_array(value).round(3)
    if array.size <= MAX_SHOWN:
        return str(array.tolist())
    numbers = ", ".join(str(number) for number in array.flatten()[:MAX_SHOWN].tolist())
    return f"shape {array.shape}: {numbers}, ..."


# 1. my_bits(word, feature_of_gram, eta, T): the bits of a word


def list_bits_cases():
    """An example by hand; words with repeated n-grams; words without a known n-gram."""
    eta = np.array([-3, 1, 2] * 2)
    cases = [("aab", {"a": 0, "b": 1, "ab": 2}, eta, 3)]
    words = ["banana", "mississippi", "play", "plays", "tattoo", "a"]
    lsh = NgramLSH.fit(dict.fromkeys(words, 1), features=97)
    feature_of_gram = {gram: f for f, gram in enumerate(lsh.grams)}
    for word in [*words, "zzz", ""]:
        cases.append((word, feature_of_gram, lsh.eta, 64))
    return cases


def add_windows(grams, feature_of_gram, eta, T, step=1):
    """Return the T products of the n-grams. With step -1 the hyperplanes rotate the other way."""
    num_features = len(eta) // 2
    products = np.zeros(T)
    for gram in grams:
        if gram in feature_of_gram:
            places = feature_of_gram[gram] + step * np.arange(T)
            products += eta[places % num_features]
    return products


def true_bits(word, *rest):
    return add_windows(list_ngrams(word), *rest) > 0


BITS_ERRORS = [
    (lambda word, *rest: add_windows(set(list_ngrams(word)), *rest) > 0,
     "Each n-gram is counted once. x counts repeated n-grams too: banana has three a."),
    (lambda word, *rest: add_windows(list_ngrams(word), *rest) >= 0,
     "A product of 0 gives the bit 0: use > 0 in place of >= 0."),
    (lambda word, *rest: add_windows(list_ngrams(word), *rest, step=-1) > 0,
     "The hyperplanes rotate the other way. n-gram f adds eta[f + j] to product j."),
    (lambda word, *rest: add_windows(list(word), *rest) > 0,
     "Only letters are used. The features are n-grams of 1 to 4 letters."),
]


# 2. my_proj(bits, weight): the vector of a word, by Proj


def list_proj_cases():
    """An example by hand, random bits, and bits that are all equal."""
    cases = [(torch.tensor([1.0, 1, 0, 0]), torch.tensor([[3.0, 1, 1, -1]]))]
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        bits = torch.randint(2, (24,), generator=generator).float()
        weight = torch.randn(7, 24, generator=generator) + 0.5
        cases.append((bits, weight))
    cases.append((torch.zeros(24), weight))
    return cases


def true_proj(bits, weight):
    return standardize(weight) @ standardize(bits)


def normalize(x):
    return F.normalize(x, dim=-1)


def center(x):
    return x - x.mean(-1, keepdim=True)


def correlate_by_std(bits, weight):
    x = center(bits) / bits.std()
    w = center(weight) / weight.std(-1, keepdim=True)
    return (w * x).mean(-1)


def divide_by_raw_lengths(bits, weight):
    return (center(weight) / weight.norm(dim=-1, keepdim=True)) @ (center(bits) / bits.norm())


PROJ_ERRORS = [
    (lambda bits, weight: normalize(weight) @ normalize(bits),
     "No mean is subtracted: this is the cosine. Subtract the mean of the bits, and of each row of "
     "weight."),
    (lambda bits, weight: normalize(weight) @ standardize(bits),
     "The mean is subtracted from the bits alone. Subtract that of each row of weight as well, "
     "before its length is taken."),
    (lambda bits, weight: standardize(weight) @ normalize(bits),
     "The mean is subtracted from weight alone. Subtract that of the bits as well, before their "
     "length is taken."),
    (lambda bits, weight: normalize(weight - weight.mean(0)) @ standardize(bits),
     "The mean of weight is taken over the d rows. Each row has its own mean, of its T numbers."),
    (lambda bits, weight: normalize(weight - weight.mean()) @ standardize(bits),
     "One mean is taken of all of weight. Each row has its own mean, of its T numbers."),
    (lambda bits, weight: center(weight) @ center(bits),
     "The product is not divided by the two lengths."),
    (correlate_by_std,
     "torch.std divides by T - 1, and the mean of products by T. Divide the product by the two "
     "lengths, or use std(correction=0)."),
    (divide_by_raw_lengths,
     "The lengths are taken before the means are subtracted. Take those of what is left."),
    (lambda bits, weight: standardize(weight) @ (center(bits) / center(bits).norm()),
     "Where all bits are equal, their length is 0, and you divide by it. The vector of such a word "
     "is 0."),
]


# 3. my_labels(ids, inputs, is_shuffled, is_random): the labels of Shuffle+Random


def list_labels_cases():
    """An example by hand, and a batch of few words, where many come to an equal place."""
    ids = torch.tensor([[CLS, 10, 11, 12, 13, 14, 15, 16, SEP]])
    noise = torch.full((3, *ids.shape), 0.9)
    noise[0, 0, [2, 4, 6]] = 0  # shuffled
    noise[1, 0, 7] = 0  # replaced
    noise[2, 0, [2, 4, 6]] = torch.tensor([0.3, 0.4, 0.2])  # the new order
    by_hand = shuffle_random(ids, noise, torch.full_like(ids, 99))

    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(CLS, FIRST_WORD_ID + 6, (20, 50), generator=generator)
    random_words = torch.randint(FIRST_WORD_ID, FIRST_WORD_ID + 6, ids.shape, generator=generator)
    noise = torch.rand(3, *ids.shape, generator=generator)
    return [by_hand, shuffle_random(ids, noise, random_words)]


def shuffle_random(ids, noise, random_words):
    """Return the arguments of my_labels for a batch, corrupted with noise (3, B, L)."""
    objective = ShuffleRandom()
    inputs, _ = objective.corrupt(ids, noise, random_words)
    is_word = ids >= FIRST_WORD_ID
    is_shuffled = is_word & (noise[0] < objective.rate)
    is_random = is_word & ~is_shuffled & (noise[1] < objective.rate)
    return ids, inputs, is_shuffled, is_random


def label(ids, inputs, is_shuffled, is_random, keep_shuffled=False, keep_random=False):
    """Return labels. Those of chosen words that did not change are 0, unless they are kept."""
    is_equal = inputs == ids
    labels = is_shuffled.long()
    labels[is_random] = 2
    if not keep_shuffled:
        labels[is_shuffled & is_equal] = 0
    if not keep_random:
        labels[is_random & is_equal] = 0
    labels[ids < FIRST_WORD_ID] = IGNORE_INDEX
    return labels


LABELS_ERRORS = [
    (lambda *batch: label(*batch, keep_shuffled=True, keep_random=True),
     "A word that was chosen and did not change has the label 0: a label says what changed, not "
     "what was chosen."),
    (lambda *batch: label(*batch, keep_shuffled=True),
     "The label is 1 where a shuffled word did not change. An equal word may come to its place: "
     "the label is 0."),
    (lambda *batch: label(*batch, keep_random=True),
     "The label is 2 where a random word equals the one that it replaces: the label is 0."),
    (lambda ids, *rest: label(ids, *rest).masked_fill(ids < FIRST_WORD_ID, 0),
     "Special tokens are scored. Their label is -100, where ids are below 5."),
    (lambda ids, inputs, is_shuffled, is_random: label(ids, inputs, is_random, is_shuffled),
     "Labels 1 and 2 are exchanged: 1 is shuffled, 2 is random."),
    (lambda ids, inputs, *rest: label(ids, inputs, *rest).masked_fill(inputs == ids, IGNORE_INDEX),
     "Words that did not change are left out. They are scored too, with the label 0."),
]


# 4. my_certificate(logp, digest, beam): is the best scored item the best of all?


@functools.cache  # 200 maps take a second
def list_certificate_cases():
    """An example by hand, whose best item equals the bound, and 200 random maps."""
    digest = torch.tensor([[0, 0], [0, 1], [1, 0], [1, 1]])
    p = torch.tensor([[0.6, 0.4], [0.3, 0.7]])
    cases = [(p.log(), digest, 1)]
    generator = torch.Generator().manual_seed(0)
    for seed in range(200):
        bloom_map = BloomMap(50 + seed % 50, alpha=1 + seed % 3, seed=seed)
        digest = torch.from_numpy(bloom_map.digest).long()
        logits = 3 * torch.randn(2, bloom_map.num_buckets, generator=generator)
        cases.append((logits.log_softmax(1), digest, 1 + seed % 4))
    return cases


def find_in_beams(logp, digest, beam):
    """Return whether the bucket of each item in each map is in the beam of the map, bool (N, m)."""
    beams = logp.topk(beam, 1).indices  # (m, B)
    return torch.stack([torch.isin(digest[:, j], beams[j]) for j in range(2)], 1)


def certify(logp, digest, beam, is_scored=None, place=None, reaches=torch.ge):
    """Return whether the best scored item is the best of all, and how many are scored.

    Args:
        logp: (m, R).
        digest: (N, m).
        beam: int.
        is_scored: bool (N,); None: items with a bucket in a beam.
        place: int, the bound adds up the bucket at this place of each map, from the best, 0;
            None: the last of the beam.
        reaches: function(best score, bound) -> bool.
    """
    if is_scored is None:
        is_scored = find_in_beams(logp, digest, beam).any(1)
    if place is None:
        place = beam - 1
    bound = logp.sort(1, descending=True).values[:, place].sum()
    scores = logp[0, digest[:, 0]] + logp[1, digest[:, 1]]  # (N,)
    best = scores.masked_fill(~is_scored, -math.inf).max()
    return reaches(best, bound), is_scored.sum()


CERTIFICATE_ERRORS = [
    (lambda *case: certify(*case, place=0),
     "The bound adds up the best bucket of each map. Use the last bucket of each beam: an item "
     "outside is in no beam."),
    (lambda logp, digest, beam: certify(logp, digest, beam, place=beam),
     "The bound adds up the first bucket behind each beam. That is valid and lower. The paper "
     "takes the last bucket of each beam."),
    (lambda *case: certify(*case, reaches=torch.gt),
     "An item that equals the bound is certified too: no item outside has more. Use >= in place "
     "of >."),
    (lambda logp, digest, beam: certify(
        logp, digest, beam, is_scored=torch.ones(len(digest), dtype=torch.bool)),
     "All items are scored. Score those that have a bucket in a beam."),
    (lambda *case: certify(*case, is_scored=find_in_beams(*case).all(1)),
     "Only items with both buckets in a beam are scored. One is enough."),
    (lambda logp, digest, beam: certify(
        logp, digest, beam, is_scored=torch.isin(digest, logp.topk(beam, 1).indices).any(1)),
     "A bucket of one map is looked up in the beams of both. Compare column j of digest with the "
     "beam of map j alone."),
    (lambda *case: (certify(*case)[0], find_in_beams(*case).sum()),
     "An item that is in two beams is counted twice."),
]


# my_score(parts): a score for which the certificate is wrong


def judge_score(name, yours):
    """Return what check prints about my_score: search a map where a certificate is wrong."""
    parts = [torch.tensor([-1.0, -2.0, -0.5]), torch.tensor([-3.0, -1.0, -0.5])]
    value = call(yours, [parts])
    if value is None or value is ...:
        return "not yet"
    if not torch.is_tensor(value) or value.shape != parts[0].shape:
        return "expected a tensor of the shape of each part."
    for known, score in SCORES.items():
        if torch.equal(value, score(parts)):
            return (f"this is the score {known}, which never falls when a part grows. The "
                    "certificate holds.")
    # beam_search takes the name of a score: for a while this is one
    generator = torch.Generator().manual_seed(0)
    SCORES["yours"] = yours
    try:
        for seed in range(50):
            bloom_map = BloomMap(40, 3, seed=seed)
            logp = torch.randn(1, 2, bloom_map.num_buckets, generator=generator).log_softmax(-1)
            found = beam_search(logp, bloom_map, 1, 2, score="yours")
            best, best_scores = exhaustive(logp, bloom_map, 1, score="yours")
            if found.certified.item() and best_scores > found.scores:
                return (f"right. The search certifies item {found.ids.item()}, but item "
                        f"{best.item()} scores more.")
    finally:
        del SCORES["yours"]
    return "the certificate held on 50 maps. The score must fall when a part grows."


# 6. my_median(rows) and my_loss(logits, buckets)


def list_median_cases():
    """An example by hand, odd counts, and even counts, which the embedding refuses."""
    cases = [(torch.tensor([[1.0, 7], [2, -9], [900, 8]]),)]
    generator = torch.Generator().manual_seed(0)
    for k in (5, 7, 1, 2, 4, 6):
        cases.append((torch.randn(k, 3, generator=generator),))
    return cases


def true_median(rows):
    return np.median(rows, 0)


MEDIAN_ERRORS = [
    (lambda rows: rows.mean(0),
     "This is the mean, which one large row drags along."),
    (lambda rows: rows.median(0).values,
     "torch.median of an even count is the lower of the two middle numbers. Take their mean."),
    (lambda rows: rows.sort(0).values[len(rows) // 2],
     "This is the upper of the two middle numbers of an even count. Take their mean."),
    (lambda rows: np.median(rows),
     "This is one number, the median of all. Take that of each column."),
    (lambda rows: rows.median(),
     "This is one number, the lower median of all. Take that of each column."),
    (lambda rows: rows.median(1).values,
     "This is the median of each row. Take that of each column."),
]


def list_loss_cases():
    """An example by hand, whose loss is (2 ln 3 + ln 2) / 3, and random logits."""
    logits = torch.zeros(3, 3)
    logits[1, 1] = math.log(2)
    cases = [(logits, torch.tensor([2, 1, 0]))]
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        logits = 2 * torch.randn(5, 11, generator=generator)
        buckets = torch.randint(11, (5,), generator=generator)
        cases.append((logits, buckets))
    return cases


def pick(numbers, buckets):
    """Return the number (k,) of each hash function's bucket, from numbers (k, R)."""
    return numbers.gather(1, buckets.unsqueeze(1)).squeeze(1)


def softmax_over_all(logits, buckets):
    logp = logits.flatten().log_softmax(0)
    return -pick(logp.view_as(logits), buckets).mean()


LOSS_ERRORS = [
    (lambda logits, buckets: F.cross_entropy(logits, buckets, reduction="sum"),
     "This is the sum of the k losses. The loss of a word is their mean."),
    (lambda logits, buckets: -pick(logits.softmax(1), buckets).mean().log(),
     "This is the logarithm of a mean probability. Take the logarithm of each first, then the "
     "mean."),
    (softmax_over_all,
     "This is one softmax over all k · R numbers, as Superbloom has. Here each hash function has a "
     "softmax of its own."),
    (lambda logits, buckets: -pick(logits.log_softmax(0), buckets).mean(),
     "The softmax runs over the k hash functions. Each function has one of its own, over R "
     "buckets: dimension 1."),
    (lambda logits, buckets: -pick(logits, buckets).mean(),
     "These are logits. The loss needs their logarithmic softmax, over R."),
    (lambda logits, buckets: -F.cross_entropy(logits, buckets),
     "The sign is missing: the loss is minus the logarithm."),
]


# 7. my_extra_key(scores, values, c, mean): LSH attention of one query


def list_extra_key_cases():
    """An example by hand, whose result is 1.6, and the queries of a random sequence."""
    scores = torch.tensor([math.log(3)])
    cases = [(scores, torch.tensor([[1.0]]), 2, torch.tensor([2.5]))]
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 20, 5, generator=generator)
    hq, hk = torch.randint(4, (2, 20), generator=generator)
    for i in range(20):
        cases.append(divide_keys(q[i], k, v, hk == hq[i]))
    return cases


def divide_keys(query, k, v, is_inside):
    """Return the arguments of my_extra_key for a query (e,), keys and values (L, e)."""
    scores = k[is_inside] @ query / math.sqrt(len(query))
    outside = v[~is_inside]
    return scores, v[is_inside], len(outside), outside.mean(0)


def attend(scores, values, extra_score, extra_value):
    """Return attention to the keys and one more."""
    scores = torch.cat([scores, torch.tensor([float(extra_score)])])
    values = torch.cat([values, extra_value.unsqueeze(0)])
    return scores.softmax(0) @ values


def true_extra_key(scores, values, c, mean):
    return attend(scores, values, math.log(c), mean)


def weigh_by_counts(scores, values, c, mean):
    inside = scores.softmax(0) @ values
    return (len(scores) * inside + c * mean) / (len(scores) + c)


EXTRA_KEY_ERRORS = [
    (lambda scores, values, c, mean: scores.softmax(0) @ values,
     "The keys outside are masked. They have the score 0, so each weighs exp(0) = 1."),
    (lambda scores, values, c, mean: attend(scores, values, c, mean),
     "The score of the extra key is c. Its weight is to be c, so its score is ln c."),
    (lambda scores, values, c, mean: attend(scores, values, 0, mean),
     "The extra key weighs 1, as one key of score 0. It stands for c of them."),
    (lambda scores, values, c, mean: attend(scores, values, math.log(c), c * mean),
     "The value of the extra key is the sum. Its weight counts c keys already, so its value is "
     "their mean."),
    (weigh_by_counts,
     "The two parts are weighed by their numbers of keys. A key inside weighs exp(score), not 1."),
]


RAISED = {  # name, error that a usual mistake raises -> what is wrong
    ("my_bits", KeyError): "A word may have n-grams that no word of the corpus has. They have no "
                           "number, and add nothing.",
    ("my_certificate", RuntimeError): "Is nothing scored? Score the items that have a bucket in "
                                      "a beam: one bucket is enough.",
}
EXERCISES = {
    "my_bits": Exercise(list_bits_cases, true_bits, BITS_ERRORS),
    "my_proj": Exercise(list_proj_cases, true_proj, PROJ_ERRORS),
    "my_labels": Exercise(list_labels_cases, label, LABELS_ERRORS),
    "my_certificate": Exercise(list_certificate_cases, certify, CERTIFICATE_ERRORS),
    "my_median": Exercise(list_median_cases, true_median, MEDIAN_ERRORS),
    "my_loss": Exercise(list_loss_cases, F.cross_entropy, LOSS_ERRORS),
    "my_extra_key": Exercise(list_extra_key_cases, true_extra_key, EXTRA_KEY_ERRORS),
}


# 8. The quiz: the truth of each statement, and why


QUIZ = [
    (False, "Counts choose which n-grams become features. x counts the n-grams of the word alone."),
    (True, "x · y = 0, so the angle is π / 2, and angle / π = 1/2 of the bits differ."),
    (False, "23 is the mean over draws of eta. Counts of single draws spread by about 4."),
    (True, "Bits less their mean change their sign, so each correlation does."),
    (False, "The words of all chosen places are dealt out to these places, by one permutation."),
    (False, "All distinct words have one probability, so most random words are rare."),
    (True, "The label says what changed. The model cannot see that a word was chosen."),
    (True, "It runs over m · (R + s) tokens. hash_logp reads the R of map j from row j of logits."),
    (True, "BloomMap swaps items in the last map until no two have the same digest."),
    (False, "It is the best by the model's numbers, which may be wrong."),
    (False, "rec@1 fell from 0.120 to 0.086. Certificates came sooner, from 0.069 to 0.984."),
    (True, "That of the middle number. The mean sends 1/k to each row."),
    (True, "The output has a table of its own, unless --tied is set."),
    (False, "They have the score 0, so each has the weight exp(0) = 1 before normalization."),
]
