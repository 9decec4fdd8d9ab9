"""What an evaluation reports: accuracy and F1 of labels, recall of words, the loss of a baseline.

An evaluation goes batch by batch, over several processes. So a measure has two parts: what is
counted in a batch, and what follows from the sums of the counts over all batches.

    labels of positions    count_table                                     -> measure_table
    words                  rank_scores, rank_words, or                     -> measure_recall
                           rank_in_lists: a rank of each word; count_hits
    baseline               count_classes                                   -> unigram_loss

Sources:
    [SB] Anderson et al. 2020, Superbloom
    [CM] Median is all you need, a proposal
Out of scope: what is counted for which objective (objectives.py), models, batches, token IDs.
Notation:
    M scored positions   W words, or items of a set   k hash functions of R buckets each
    E excluded words     C classes of a softmax    h classes of a word
    A word is its number, 0 .. W - 1
"""

import numpy as np
import torch
import torch.nn.functional as F

RECALL = (1, 10, 20)  # the k of recall@k
MAX_RECALL = max(RECALL)
NOT_FOUND = MAX_RECALL  # the rank of a word that no search has found: a miss for each k
RANK_PART = 128  # positions that rank_words scores at a time: bounds its memory


# Labels: accuracy and F1


def count_table(logits, labels):
    """Return how often each label (row) gets each prediction (column), int64 (n, n).

    The labels 0 1 1 1 with the predictions 0 1 0 1 give [[1, 0], [1, 2]].

    Args:
        logits: float (M, n); the largest is the prediction.
        labels: int64 (M,), below n.
    """
    n = logits.shape[1]
    cells = labels * n + logits.argmax(1)
    return torch.bincount(cells, minlength=n * n).view(n, n)


def measure_table(table, kinds):
    """Return accuracy, that of the majority class, F1 of each kind and its mean, a dict of float.

    For [[1, 0], [1, 2]] the accuracy is 3/4, that of the majority 3/4, and F1 2/3 and 4/5.

    Args:
        table: (n, n), of count_table.
        kinds: dict, label -> name.
    """
    table = np.asarray(table, float)
    total = table.sum()
    correct = table.diagonal()
    num_labeled = table.sum(1)
    num_predicted = table.sum(0)
    f1 = 2 * correct / np.maximum(num_labeled + num_predicted, 1)
    metrics = dict(accuracy=correct.sum() / total, majority=num_labeled.max() / total)
    for label, kind in kinds.items():
        metrics[f"f1_{kind}"] = f1[label]
    labels = list(kinds)
    metrics["macro_f1"] = f1[labels].mean()
    return metrics


# Words: recall


def rank_scores(scores, words, exclude):
    """Return the rank of each correct word: how many others score at least as much, int64 (M,).

    The scores 4 9 7 7 of four words give word 1 the rank 0, and word 2 the rank 2. With word 1
    excluded, word 2 has the rank 1.

    Args:
        scores: float (M, W).
        words: int64 (M,), the correct words.
        exclude: int64 (M, E), other words that do not count, -1 for none.
    """
    correct = scores.gather(1, words.unsqueeze(1))  # (M, 1)
    if exclude.shape[1] > 0:  # a text excludes no word, and its scores need no copy
        scores = F.pad(scores, (1, 0))  # a first column, which stands for -1
        scores.scatter_(1, exclude + 1, -torch.inf)
        scores = scores[:, 1:]
    # subtle: every comparison with NaN is False. With >= a diverged model would have rank -1, so
    # recall 1
    return (~(scores < correct)).sum(1) - 1  # all but the correct one


def rank_words(logp, digests, words, exclude=None):
    """Return the rank of each correct word, as rank_scores does, by its hash buckets. [CM]

    Args:
        logp: float (M, k, R). The score of a word is the sum of logp at its k buckets.
        digests: integer (W, k), each word's k buckets.
        words: int64 (M,), the correct words.
        exclude: as in rank_scores; None: no word.
    """
    if exclude is None:
        exclude = words.new_empty(len(words), 0)
    ranks = torch.empty_like(words)
    for start in range(0, len(words), RANK_PART):
        part = slice(start, start + RANK_PART)
        scores = 0
        for j in range(logp.shape[1]):
            scores = scores + logp[part, j].index_select(1, digests[:, j].int())  # (part of M, W)
        ranks[part] = rank_scores(scores, words[part], exclude[part])
    return ranks


def rank_in_lists(best, items):
    """Return the place of each correct item in its list, NOT_FOUND if it is not there, int64 (M,).

    A list is that of a search, which does not score all items. [SB §2.5]

    Args:
        best: int64 (M, MAX_RECALL at most), the best items of each position, best first.
        items: int64 (M,), the correct items.
    """
    is_hit = best == items.unsqueeze(1)  # one True in a row at most
    return is_hit.int().argmax(1).masked_fill(~is_hit.any(1), NOT_FOUND)


def count_hits(ranks):
    """Return how many of the ranks (M,) are among the first k, for each k of RECALL, int64 (3,)."""
    return torch.stack([(ranks < k).sum() for k in RECALL])


def measure_recall(hits, num_scored):
    """Return recall@k, the share of the scored positions that are hits, a dict: rec@1, ...

    Args:
        hits: float (3,), sums of count_hits.
        num_scored: float.
    """
    metrics = {}
    for k, count in zip(RECALL, hits):
        metrics[f"rec@{k}"] = count / num_scored
    return metrics


# The loss of a baseline


def count_classes(classes, num_classes):
    """Return how often each class occurs in each column of classes (n, h), (h, C).

    The rows 0 1 and 2 1, for C = 3, give [[1, 0, 1], [0, 2, 0]].
    """
    return torch.stack([torch.bincount(column, minlength=num_classes) for column in classes.T])


def unigram_loss(counts, label_counts):
    """Return the mean loss of a model that predicts each class by its frequency.

    Args:
        counts: (C,), how often each class occurs.
        label_counts: (C,), how often each is to be predicted. If these are the counts, the loss is
            their entropy: for 2 1 1 it is 1/2 ln 2 + 1/4 ln 4 + 1/4 ln 4 = 1.04.
    """
    is_label = label_counts > 0
    p = counts[is_label] / counts.sum()
    share = label_counts[is_label] / label_counts.sum()
    return float(-(share * np.log(p)).sum())
