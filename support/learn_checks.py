"""The checks of learn.ipynb. They contain the answers: write your own first, then read.

`check` calls a function of the reader on a few cases and compares the results with those of this
code. If they differ, it compares them with those of the usual errors, and names the error that
gives the same results.

An exercise is a function that makes its cases, and a dict of the usual errors, function -> hint.
The first case of each is an example of test_all.py, worked out by hand there.

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

from attention import lsh_attention_reference
from bloom import SCORES, BloomMap, beam_search, exhaustive
from embeddings import MedianEmbedding, ProjEmbedding, standardize
from hashing import NgramLSH, list_ngrams
from model import Config
from objectives import IGNORE_INDEX, MaskedHashes, ShuffleRandom, make_batch
from tokenizer import CLS, FIRST_WORD_ID, SEP

TOLERANCE = 1e-4  # of float32 results that are computed in another order
MAX_SHOWN = 12  # numbers of an array that a message shows


class Exercise(NamedTuple):
    """What check needs to know of a function that the reader writes."""

    make_cases: Callable  # () -> list of (arguments, expected result)
    hints: dict  # usual error, a function of the same arguments -> what is wrong


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
    cases = EXERCISES[name].make_cases()
    results = []
    for arguments, _ in cases:
        result = call(yours, arguments)
        if not results and (result is None or result is ...):  # the body is still a blank
            return "not yet"
        results.append(to_array(result))
    expected = [to_array(value) for _, value in cases]
    wrong = [i for i in range(len(cases)) if not is_equal(results[i], expected[i])]
    if not wrong:
        return f"right in all {len(cases)} cases"

    # an error is named if it explains all results, the right ones too
    for usual_error, hint in EXERCISES[name].hints.items():
        with np.errstate(all="ignore"):
            same = [to_array(call(usual_error, arguments)) for arguments, _ in cases]
        if all(is_equal(a, b) for a, b in zip(results, same)):
            return f"not right yet. {hint}"

    i = wrong[0]
    arguments, _ = cases[i]
    shown = ", ".join(show(argument) for argument in arguments)
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


def bits_cases():
    """An example by hand; words with repeated n-grams; words without a known n-gram."""
    by_hand = ("aab", {"a": 0, "b": 1, "ab": 2}, np.array([-3, 1, 2] * 2), 3)
    words = ["banana", "mississippi", "play", "plays", "tattoo", "a"]
    lsh = NgramLSH.fit(dict.fromkeys(words, 1), features=97)
    feature_of_gram = {gram: f for f, gram in enumerate(lsh.grams)}
    arguments = [by_hand]
    for word in [*words, "zzz", ""]:
        arguments.append((word, feature_of_gram, lsh.eta, 64))
    return [(args, true_bits(*args)) for args in arguments]


def true_bits(word, feature_of_gram, eta, T):
    lsh = NgramLSH(list(feature_of_gram), features=len(eta) // 2)
    lsh.eta = eta
    return lsh.bits([word], T)[0]


def add_windows(grams, feature_of_gram, eta, T, step=1):
    """Return the T products of the n-grams. With step -1 the hyperplanes rotate the other way."""
    num_features = len(eta) // 2
    products = np.zeros(T)
    for gram in grams:
        if gram in feature_of_gram:
            places = feature_of_gram[gram] + step * np.arange(T)
            products += eta[places % num_features]
    return products


def bits_counted_once(word, feature_of_gram, eta, T):
    return add_windows(set(list_ngrams(word)), feature_of_gram, eta, T) > 0


def bits_at_zero(word, feature_of_gram, eta, T):
    return add_windows(list_ngrams(word), feature_of_gram, eta, T) >= 0


def bits_rotated_back(word, feature_of_gram, eta, T):
    return add_windows(list_ngrams(word), feature_of_gram, eta, T, step=-1) > 0


def bits_of_letters(word, feature_of_gram, eta, T):
    return add_windows(list(word), feature_of_gram, eta, T) > 0


BITS_HINTS = {
    bits_counted_once: "Each n-gram is counted once. x counts repeated n-grams too: banana has "
                       "three a.",
    bits_at_zero: "A product of 0 gives the bit 0: use > 0 in place of >= 0.",
    bits_rotated_back: "The hyperplanes rotate the other way. n-gram f adds eta[f + j] to "
                       "product j.",
    bits_of_letters: "Only letters are used. The features are n-grams of 1 to 4 letters.",
}


# 2. my_proj(bits, weight): the vector of a word, by Proj


def proj_cases():
    """An example by hand, random bits, and bits that are all equal."""
    generator = torch.Generator().manual_seed(0)
    by_hand = (torch.tensor([1.0, 1, 0, 0]), torch.tensor([[3.0, 1, 1, -1]]))
    arguments = [by_hand]
    for _ in range(3):
        bits = torch.randint(2, (24,), generator=generator).float()
        weight = torch.randn(7, 24, generator=generator) + 0.5
        arguments.append((bits, weight))
    arguments.append((torch.zeros(24), weight))
    return [(args, true_proj(*args)) for args in arguments]


def true_proj(bits, weight):
    d, T = weight.shape
    proj = ProjEmbedding(T, d)
    proj.weight.data = weight
    return proj(bits.long()).detach()


def normalize(x):
    return F.normalize(x, dim=-1)


def center(x):
    return x - x.mean(-1, keepdim=True)


def proj_without_means(bits, weight):
    return normalize(weight) @ normalize(bits)


def proj_mean_of_bits_alone(bits, weight):
    return normalize(weight) @ standardize(bits)


def proj_mean_of_weight_alone(bits, weight):
    return standardize(weight) @ normalize(bits)


def proj_mean_over_d(bits, weight):
    return normalize(weight - weight.mean(0)) @ standardize(bits)


def proj_without_lengths(bits, weight):
    return center(weight) @ center(bits)


def proj_unbiased_std(bits, weight):
    x = center(bits) / bits.std()
    w = center(weight) / weight.std(-1, keepdim=True)
    return (w * x).mean(-1)


def proj_length_of_raw(bits, weight):
    return (center(weight) / weight.norm(dim=-1, keepdim=True)) @ (center(bits) / bits.norm())


def proj_divided_by_zero(bits, weight):
    x = center(bits)
    return standardize(weight) @ (x / x.norm())


PROJ_HINTS = {
    proj_without_means: "No mean is subtracted: this is the cosine. Subtract the mean of the bits, "
                        "and of each row of weight.",
    proj_mean_of_bits_alone: "The mean is subtracted from the bits alone. Subtract that of each "
                             "row of weight as well, before its length is taken.",
    proj_mean_of_weight_alone: "The mean is subtracted from weight alone. Subtract that of the "
                               "bits as well, before their length is taken.",
    proj_mean_over_d: "The mean of weight is taken over the d rows. Each row has its own mean, of "
                      "its T numbers.",
    proj_without_lengths: "The product is not divided by the two lengths.",
    proj_unbiased_std: "torch.std divides by T - 1, and the mean of products by T. Divide the "
                       "product by the two lengths, or use std(correction=0).",
    proj_length_of_raw: "The lengths are taken before the means are subtracted. Take those of what "
                        "is left.",
    proj_divided_by_zero: "Where all bits are equal, their length is 0, and you divide by it. The "
                          "vector of such a word is 0.",
}


# 3. my_labels(ids, inputs, is_shuffled, is_random): the labels of Shuffle+Random


def shuffle_random(ids, shuffle, replace, sort_key, random_words):
    """Return (arguments, expected) of my_labels for a batch, corrupted with this noise."""
    objective = ShuffleRandom()
    noise = torch.stack([shuffle, replace, sort_key])  # (3, B, L)
    inputs, labels = objective.corrupt(ids, noise, random_words)
    is_word = ids >= FIRST_WORD_ID
    is_shuffled = is_word & (shuffle < objective.rate)
    is_random = is_word & ~is_shuffled & (replace < objective.rate)
    return (ids, inputs, is_shuffled, is_random), labels


def labels_cases():
    """An example by hand, and a batch of few words, where many come to an equal place."""
    ids = torch.tensor([[CLS, 10, 11, 12, 13, 14, 15, 16, SEP]])
    high = torch.full(ids.shape, 0.9)
    shuffle = high.clone()
    shuffle[0, [2, 4, 6]] = 0
    replace = high.clone()
    replace[0, 7] = 0
    sort_key = high.clone()
    sort_key[0, [2, 4, 6]] = torch.tensor([0.3, 0.4, 0.2])
    by_hand = shuffle_random(ids, shuffle, replace, sort_key, torch.full_like(ids, 99))

    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(CLS, FIRST_WORD_ID + 6, (20, 50), generator=generator)
    random_words = torch.randint(FIRST_WORD_ID, FIRST_WORD_ID + 6, ids.shape, generator=generator)
    noise = torch.rand(3, *ids.shape, generator=generator)
    return [by_hand, shuffle_random(ids, *noise, random_words)]


def labels_of_choice(ids, inputs, is_shuffled, is_random):
    """Return labels of what was chosen, changed or not, special tokens not scored."""
    labels = is_shuffled.long()
    labels[is_random] = 2
    labels[ids < FIRST_WORD_ID] = IGNORE_INDEX
    return labels


def labels_shuffled_unchanged(ids, inputs, is_shuffled, is_random):
    labels = labels_of_choice(ids, inputs, is_shuffled, is_random)
    labels[is_random & (inputs == ids)] = 0
    return labels


def labels_random_unchanged(ids, inputs, is_shuffled, is_random):
    labels = labels_of_choice(ids, inputs, is_shuffled, is_random)
    labels[is_shuffled & (inputs == ids)] = 0
    return labels


def labels_of_specials(ids, inputs, is_shuffled, is_random):
    labels = labels_of_choice(ids, inputs, is_shuffled, is_random)
    labels[inputs == ids] = 0
    return labels


def labels_of_changes_alone(ids, inputs, is_shuffled, is_random):
    labels = labels_of_choice(ids, inputs, is_shuffled, is_random)
    labels[inputs == ids] = IGNORE_INDEX
    return labels


def labels_exchanged(ids, inputs, is_shuffled, is_random):
    labels = labels_of_choice(ids, inputs, is_random, is_shuffled)
    labels[(inputs == ids) & (ids >= FIRST_WORD_ID)] = 0
    return labels


LABELS_HINTS = {
    labels_of_choice: "A word that was chosen and did not change has the label 0: a label says "
                      "what changed, not what was chosen.",
    labels_shuffled_unchanged: "The label is 1 where a shuffled word did not change. An equal word "
                               "may come to its place: the label is 0.",
    labels_random_unchanged: "The label is 2 where a random word equals the one that it replaces: "
                             "the label is 0.",
    labels_of_specials: "Special tokens are scored. Their label is -100, where ids are below 5.",
    labels_exchanged: "Labels 1 and 2 are exchanged: 1 is shuffled, 2 is random.",
    labels_of_changes_alone: "Words that did not change are left out. They are scored too, with "
                             "the label 0.",
}


# 4. my_certificate(logp, digest, beam): is the best scored item the best of all?


@functools.cache  # 200 maps take a second
def certificate_cases():
    """An example by hand, whose best item equals the bound, and 200 random maps."""
    orders = [[0, 1, 2, 3], [0, 2, 1, 3]]
    p = torch.tensor([[0.6, 0.4], [0.3, 0.7]])
    cases = [certificate_case(p.log(), BloomMap(4, 2, orders=orders), 1)]
    generator = torch.Generator().manual_seed(0)
    for seed in range(200):
        bloom_map = BloomMap(50 + seed % 50, alpha=1 + seed % 3, seed=seed)
        logits = 3 * torch.randn(2, bloom_map.num_buckets, generator=generator)
        cases.append(certificate_case(logits.log_softmax(1), bloom_map, 1 + seed % 4))
    return cases


def certificate_case(logp, bloom_map, beam):
    """Return (arguments, expected) of my_certificate."""
    found = beam_search(logp.unsqueeze(0), bloom_map, 1, beam)
    digest = torch.from_numpy(bloom_map.digest).long()
    return (logp, digest, beam), (found.certified.item(), found.num_scored.item())


def certify(logp, digest, num_beams, place):
    """Return whether the best scored item reaches the bound.

    Args:
        logp: (m, R).
        digest: (N, m).
        num_beams: int (N,), in how many beams each item is. Those in none are not scored.
        place: int, the bound adds up the bucket at this place of each map, from the best, 0.
    """
    scores = item_scores(logp, digest)
    bound = logp.sort(1, descending=True).values[:, place].sum()
    return scores[num_beams > 0].max() >= bound


def item_scores(logp, digest):
    """Return the score of each item, (N,)."""
    return logp[0, digest[:, 0]] + logp[1, digest[:, 1]]


def count_beams(logp, digest, beam):
    """Return in how many of the m beams each item is, int (N,)."""
    beams = logp.topk(beam, 1).indices  # (m, B)
    first = torch.isin(digest[:, 0], beams[0])
    second = torch.isin(digest[:, 1], beams[1])
    return first.int() + second.int()


def certificate_of_best_buckets(logp, digest, beam):
    num_beams = count_beams(logp, digest, beam)
    return certify(logp, digest, num_beams, 0), (num_beams > 0).sum()


def certificate_of_next_buckets(logp, digest, beam):
    num_beams = count_beams(logp, digest, beam)
    return certify(logp, digest, num_beams, beam), (num_beams > 0).sum()


def certificate_above_bound(logp, digest, beam):
    num_beams = count_beams(logp, digest, beam)
    scores = item_scores(logp, digest)
    bound = logp.sort(1, descending=True).values[:, beam - 1].sum()
    return scores[num_beams > 0].max() > bound, (num_beams > 0).sum()


def certificate_of_all_items(logp, digest, beam):
    num_beams = torch.ones(len(digest))
    return certify(logp, digest, num_beams, beam - 1), len(digest)


def certificate_in_every_beam(logp, digest, beam):
    num_beams = count_beams(logp, digest, beam)
    is_scored = num_beams == 2
    if not is_scored.any():
        return False, 0
    return certify(logp, digest, is_scored, beam - 1), is_scored.sum()


def certificate_of_mixed_maps(logp, digest, beam):
    is_scored = torch.isin(digest, logp.topk(beam, 1).indices).any(1)
    return certify(logp, digest, is_scored, beam - 1), is_scored.sum()


def certificate_counted_twice(logp, digest, beam):
    num_beams = count_beams(logp, digest, beam)
    return certify(logp, digest, num_beams, beam - 1), num_beams.sum()


CERTIFICATE_HINTS = {
    certificate_of_best_buckets: "The bound adds up the best bucket of each map. Use the last "
                                 "bucket of each beam: an item outside is in no beam.",
    certificate_of_next_buckets: "The bound adds up the first bucket behind each beam. That is "
                                 "valid and lower. The paper takes the last bucket of each beam.",
    certificate_above_bound: "An item that equals the bound is certified too: no item outside has "
                             "more. Use >= in place of >.",
    certificate_of_all_items: "All items are scored. Score those that have a bucket in a beam.",
    certificate_in_every_beam: "Only items with both buckets in a beam are scored. One is enough.",
    certificate_of_mixed_maps: "A bucket of one map is looked up in the beams of both. Compare "
                               "column j of digest with the beam of map j alone.",
    certificate_counted_twice: "An item that is in two beams is counted twice.",
}


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


def median_cases():
    """An example by hand, odd counts, and even counts, which the embedding refuses."""
    generator = torch.Generator().manual_seed(0)
    arguments = [(torch.tensor([[1.0, 7], [2, -9], [900, 8]]),)]
    for k in (5, 7, 1, 2, 4, 6):
        arguments.append((torch.randn(k, 3, generator=generator),))
    return [(args, true_median(*args)) for args in arguments]


def true_median(rows):
    k, d = rows.shape
    if k % 2 == 0:
        return np.median(rows, 0)
    embedding = MedianEmbedding(k, 1, d)  # blocks of one row
    embedding.weight.data = rows
    return embedding(torch.zeros(k, dtype=torch.int64)).detach()


def median_mean(rows):
    return rows.mean(0)


def median_lower(rows):
    return rows.median(0).values


def median_upper(rows):
    return rows.sort(0).values[len(rows) // 2]


def median_of_all(rows):
    return np.median(rows)


def median_of_all_lower(rows):
    return rows.median()


def median_over_d(rows):
    return rows.median(1).values


MEDIAN_HINTS = {
    median_mean: "This is the mean, which one large row drags along.",
    median_lower: "torch.median of an even count is the lower of the two middle numbers. Take "
                  "their mean.",
    median_upper: "This is the upper of the two middle numbers of an even count. Take their "
                  "mean.",
    median_of_all: "This is one number, the median of all. Take that of each column.",
    median_of_all_lower: "This is one number, the lower median of all. Take that of each column.",
    median_over_d: "This is the median of each row. Take that of each column.",
}


def loss_cases():
    """An example by hand, whose loss is (2 ln 3 + ln 2) / 3, and random logits."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.zeros(3, 3)
    logits[1, 1] = math.log(2)
    arguments = [(logits, torch.tensor([2, 1, 0]))]
    for _ in range(3):
        logits = 2 * torch.randn(5, 11, generator=generator)
        arguments.append((logits, torch.randint(11, (5,), generator=generator)))
    return [(args, true_loss(*args)) for args in arguments]


def true_loss(logits, buckets):
    k, R = logits.shape
    config = Config(emb="mean", head="hash-mlm", hashes=k, buckets=R)
    targets = torch.zeros(FIRST_WORD_ID + 1, k, dtype=torch.int64)
    targets[FIRST_WORD_ID] = buckets  # of the only word
    objective = MaskedHashes(config, 0.15, targets)
    batch = make_batch(None, torch.tensor([[FIRST_WORD_ID]]))

    def model(inputs, key_mask, positions):
        return logits.unsqueeze(0)

    return objective.loss(model, batch)


def losses_of(logits, buckets):
    return F.cross_entropy(logits, buckets, reduction="none")  # (k,)


def loss_sum(logits, buckets):
    return losses_of(logits, buckets).sum()


def loss_of_mean_probability(logits, buckets):
    return -(-losses_of(logits, buckets)).exp().mean().log()


def loss_one_softmax(logits, buckets):
    k, R = logits.shape
    columns = buckets + R * torch.arange(k)
    return F.cross_entropy(logits.flatten().expand(k, -1), columns)


def loss_over_hashes(logits, buckets):
    logp = logits.log_softmax(0)
    return -logp.gather(1, buckets.unsqueeze(1)).mean()


def loss_of_logits(logits, buckets):
    return -logits.gather(1, buckets.unsqueeze(1)).mean()


def loss_without_minus(logits, buckets):
    return -losses_of(logits, buckets).mean()


LOSS_HINTS = {
    loss_sum: "This is the sum of the k losses. The loss of a word is their mean.",
    loss_of_mean_probability: "This is the logarithm of a mean probability. Take the logarithm of "
                              "each first, then the mean.",
    loss_one_softmax: "This is one softmax over all k · R numbers, as Superbloom has. Here each "
                      "hash function has a softmax of its own.",
    loss_over_hashes: "The softmax runs over the k hash functions. Each function has one of its "
                      "own, over R buckets: dimension 1.",
    loss_of_logits: "These are logits. The loss needs their logarithmic softmax, over R.",
    loss_without_minus: "The sign is missing: the loss is minus the logarithm.",
}


# 7. my_extra_key(scores, values, c, mean): LSH attention of one query


def extra_key_cases():
    """An example by hand, whose result is 1.6, and the queries of random sequences."""
    q = torch.tensor([math.log(3), 0, 0]).view(1, 1, 3, 1)
    k = torch.ones(1, 1, 3, 1)
    v = torch.tensor([1.0, 2, 3]).view(1, 1, 3, 1)
    hq = torch.tensor([0, 5, 5]).view(1, 1, 1, 3)
    hk = torch.tensor([0, 1, 2]).view(1, 1, 1, 3)
    cases = [extra_key_case(q, k, v, hq, hk, 0)]
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 1, 1, 20, 5, generator=generator).unbind()
    hq, hk = torch.randint(4, (2, 1, 1, 1, 20), generator=generator).unbind()
    for i in range(20):
        cases.append(extra_key_case(q, k, v, hq, hk, i))
    return cases


def extra_key_case(q, k, v, hq, hk, i):
    """Return (arguments, expected) of my_extra_key for query i."""
    out = lsh_attention_reference(q, k, v, hq, hk)[0, 0, i]  # (e,)
    is_inside = hk[0, 0, 0] == hq[0, 0, 0, i]  # (L,)
    keys = k[0, 0, is_inside]
    scores = keys @ q[0, 0, i] / math.sqrt(q.shape[3])
    outside = v[0, 0, ~is_inside]
    return (scores, v[0, 0, is_inside], len(outside), outside.mean(0)), out


def attend(scores, values, extra_score, extra_value):
    """Return attention to the keys and one more."""
    scores = torch.cat([scores, torch.tensor([float(extra_score)])])
    return scores.softmax(0) @ torch.cat([values, extra_value.unsqueeze(0)])


def extra_key_masked(scores, values, c, mean):
    return scores.softmax(0) @ values


def extra_key_c(scores, values, c, mean):
    return attend(scores, values, c, mean)


def extra_key_of_one(scores, values, c, mean):
    return attend(scores, values, 0, mean)


def extra_key_sum(scores, values, c, mean):
    return attend(scores, values, math.log(c), c * mean)


def extra_key_two_means(scores, values, c, mean):
    inside = scores.softmax(0) @ values
    return (len(scores) * inside + c * mean) / (len(scores) + c)


EXTRA_KEY_HINTS = {
    extra_key_masked: "The keys outside are masked. They have the score 0, so each weighs "
                      "exp(0) = 1.",
    extra_key_c: "The score of the extra key is c. Its weight is to be c, so its score is ln c.",
    extra_key_of_one: "The extra key weighs 1, as one key of score 0. It stands for c of them.",
    extra_key_sum: "The value of the extra key is the sum. Its weight counts c keys already, so "
                   "its value is their mean.",
    extra_key_two_means: "The two parts are weighed by their numbers of keys. A key inside weighs "
                         "exp(score), not 1.",
}


RAISED = {  # name, error that a usual mistake raises -> what is wrong
    ("my_bits", KeyError): "A word may have n-grams that no word of the corpus has. They have no "
                           "number, and add nothing.",
    ("my_certificate", RuntimeError): "Is nothing scored? Score the items that have a bucket in "
                                      "a beam: one bucket is enough.",
}
EXERCISES = {
    "my_bits": Exercise(bits_cases, BITS_HINTS),
    "my_proj": Exercise(proj_cases, PROJ_HINTS),
    "my_labels": Exercise(labels_cases, LABELS_HINTS),
    "my_certificate": Exercise(certificate_cases, CERTIFICATE_HINTS),
    "my_median": Exercise(median_cases, MEDIAN_HINTS),
    "my_loss": Exercise(loss_cases, LOSS_HINTS),
    "my_extra_key": Exercise(extra_key_cases, EXTRA_KEY_HINTS),
}


# 8. The quiz: the truth of each statement, and why


QUIZ = [
    (False, "Counts choose which n-grams become features. x counts the n-grams of the word alone."),
    (True, "x · y = 0, so the angle is π / 2, and angle / π = 1/2 of the bits differ."),
    (False, "23 is the mean over draws of eta. The count of one draw is about 23 ± 4."),
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
