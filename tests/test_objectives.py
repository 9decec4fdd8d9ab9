"""Tests of objectives.py and metrics.py: corruption, losses and counts, by hand, loops and law."""

import math
from argparse import Namespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from bloom import BloomMap
from data.batches import Draw
from model import Config
from metrics import rank_words
from objectives import IGNORE_INDEX as IGNORE
from objectives import OBJECTIVES, DigestTarget, MaskedHashes, MaskedWords, RowTarget, SampledWords
from objectives import ShuffleRandom, SketchTarget, build_objective, make_batch, sample_words
from search import beam_search, hash_logp
from tests.helpers import bloom_model, choose_emb, tiny_model
from tokenizer import MASK, PAD, SEP
from tokenizer import FIRST_WORD_ID as F0

CAT = F0
DOG = F0 + 1
COW = F0 + 2
SHUFFLE = ShuffleRandom()
ITEM_1 = make_batch(torch.tensor([[MASK]]), torch.tensor([[F0 + 1]]))  # item 1 alone, masked


def masked_words(order=True):
    """Return MaskedWords of a text, or of item sets, which have no order; 15 % are masked."""
    return MaskedWords(Config(emb="lookup", head="mlm", order=order), 0.15, RowTarget())


def fixed_model(logits):
    """Return a model whose logits are always these."""
    return lambda inputs, key_mask=None, masked_positions=None: logits


def evaluate(objective, logits, batch):
    """Return the sums of an evaluation of one batch, as pretrain.py makes them."""
    sums = objective.evaluate(fixed_model(logits), batch)
    return {name: value.double().numpy() for name, value in sums.items()}


# Shuffle+Random: what is corrupted


def test_shuffle_random_moves_words_within_their_row():
    """Deviation 1. Labels say what changed: "the" in place of "the" is intact."""
    ids = torch.randint(F0, F0 + 98, (257, 63))
    ids[:, [0, 40]] = SEP
    noise = torch.rand(3, 257, 63)
    inputs, labels = SHUFFLE.corrupt(ids, noise, random_words=ids.flip(0))
    is_intact = (ids >= F0) & (inputs == ids)
    assert torch.equal(labels == 0, is_intact)
    for before, after, label in zip(ids, inputs, labels):
        is_own = label != 2  # not a random word
        before = before[is_own].tolist()
        after = after[is_own].tolist()
        assert sorted(after) == sorted(before)


# Masked words: what is corrupted. test_all.py has the rates of [BERT §3.1]


# Losses and counts by hand


def test_set_has_at_least_one_item_to_predict():
    """Else a set of three would have nothing to predict in 0.85³ = 61 % of its turns. [SB §3.1]"""
    ids = torch.tensor([[CAT, DOG, COW], [DOG, COW, PAD], [CAT, DOG, COW]])
    choose = torch.tensor([[0.9, 0.5, 0.7], [0.8, 0.9, 0.1], [0.1, 0.9, 0.05]])
    noise = torch.stack([choose, torch.zeros(3, 3), torch.zeros(3, 3)])
    expected = torch.tensor([[IGNORE, DOG, IGNORE], [DOG, IGNORE, IGNORE], [CAT, IGNORE, COW]])
    _, labels = masked_words(order=False).corrupt(ids, noise, ids)
    assert torch.equal(labels, expected)
    _, labels = masked_words(order=True).corrupt(ids, noise, ids)
    assert (labels[:2] == IGNORE).all()  # a text may have none


def test_set_without_items_has_none_to_predict():
    """The label of a special token would be no item."""
    ids = torch.tensor([[PAD, PAD, PAD], [SEP, MASK, PAD]])
    inputs, labels = masked_words(order=False).corrupt(ids, torch.zeros(3, 2, 3), ids)
    assert torch.equal(inputs, ids)
    assert (labels == IGNORE).all()


def test_masked_words_loss_and_recall_by_hand():
    """Special tokens, three of which score more than all words, have a share in the loss alone."""
    num_better = torch.tensor([0, 1, 9, 10, 19, 20])
    logits = -torch.arange(40.0).repeat(6, 1)
    logits[:, 3:F0] = -99
    for i in range(6):  # in each row the 35 words have another order
        logits[i, F0:] = logits[i, F0:].roll(3 * i)
    words = F0 + (num_better + 3 * torch.arange(6)) % 35
    labels = words.unsqueeze(0)
    batch = make_batch(labels, labels)
    objective = masked_words()

    sums = evaluate(objective, logits, batch)

    normalizer = logits[0].logsumexp(0)
    expected = 6 * normalizer + (F0 + num_better).sum()  # minus the logits of the words
    assert sums["loss"].item() == pytest.approx(expected.item())
    recall = objective.metrics(sums)
    assert recall["rec@1"] == 1 / 6
    assert recall["rec@10"] == 3 / 6
    assert recall["rec@20"] == 5 / 6


@pytest.mark.parametrize("inputs, word, hits", [
    # of the 28 items that score more, 19 are in the set already; PAD is no item from the end
    ([MASK, *range(F0, F0 + 19), PAD], F0 + 28, [0, 1, 1]),
    # 10 % of the words to predict stay in the input, and are right answers
    ([F0, F0 + 3, F0 + 7], F0, [1, 1, 1]),
])
def test_visible_items_of_a_set_are_no_predictions(inputs, word, hits):
    """Deviation 4."""
    logits = -torch.arange(37.0).unsqueeze(0)
    inputs = torch.tensor([inputs])
    labels = torch.full_like(inputs, IGNORE)
    labels[0, 0] = word
    batch = make_batch(inputs, labels)
    objective = masked_words(order=False)
    sums = evaluate(objective, logits, batch)
    assert list(objective.metrics(sums).values()) == hits


def masked_hashes(digests, buckets, bloom_map=None, **sizes):
    """Return MaskedHashes of words in text with these buckets (V, k), or of the items of a map."""
    targets = F.pad(torch.as_tensor(digests), (0, 0, F0, 0))
    sizes = dict(emb="median") | sizes
    config = Config(head="hash-mlm", buckets=buckets, hashes=targets.shape[1], **sizes)
    target = SketchTarget(targets)
    if bloom_map is not None:
        target = DigestTarget(targets, bloom_map, buckets)
    return MaskedHashes(config, 0.15, target)


def masked_items(bloom_map):
    """Return MaskedHashes of sets; after a map's R buckets its block has special tokens."""
    return masked_hashes(bloom_map.digest, bloom_map.num_buckets + F0, bloom_map, emb="bloom",
                         order=False)


def test_masked_hashes_loss_and_counts_by_hand():
    """[CM] Two hashes of three buckets, of probabilities 1/2 1/4 1/4 and 1/4 1/2 1/4.

        CAT   buckets 0 1   1/4
        DOG   buckets 0 0   1/8, of two hashes one is right
        COW   buckets 2 1   1/8, counts against DOG, which is third
    """
    objective = masked_hashes([[0, 1], [0, 0], [2, 1]], buckets=3)
    p = torch.tensor([
        [1 / 2, 1 / 4, 1 / 4],
        [1 / 4, 1 / 2, 1 / 4],
    ])
    logits = p.log().expand(2, 2, 3)  # (M, k, R)
    labels = torch.tensor([[CAT, DOG]])
    sums = evaluate(objective, logits, make_batch(None, labels))
    mean = (math.log(4) + math.log(8)) / 2
    assert sums["loss"].item() == pytest.approx(mean)
    assert objective.metrics(sums) == {
        "rec@1": 0.5,
        "rec@10": 1,
        "rec@20": 1,
        "hashes_right": 0.75,
    }


def test_masked_items_loss_and_right_tokens_by_hand():
    """[SB §2.3] Each token is a row of both blocks. The loss of an item is the mean over tokens."""
    bloom_map = BloomMap(6, alpha=2, m=2)
    objective = masked_items(bloom_map)
    rows = objective.config.buckets
    logits = torch.zeros(1, 2, 2 * rows)
    a, b = bloom_map.digest[1]
    logits[0, 0, a] = 1  # the likeliest row is right for the first token
    logits[0, 1, b] = 1  # for the second it is one of the first block, where that token has no rows

    sums = evaluate(objective, logits, ITEM_1)

    normalizer = math.log(2 * rows - 1 + math.e)
    assert sums["loss"].item() == pytest.approx(normalizer - 1 / 2)
    assert objective.metrics(sums)["hashes_right"] == 0.5
    num_classes, _ = objective.expected_loss(np.ones(6), sums)
    assert num_classes == 2 * rows


def test_masked_item_of_probability_zero_is_no_hit():
    """A map of 15 items has no list of 20 that could be full without it."""
    bloom_map = BloomMap(15, alpha=2)
    objective = masked_items(bloom_map)
    logits = torch.zeros(1, 2, 2 * objective.config.buckets)
    bucket = bloom_map.digest[1, 0]
    logits[0, 0, bucket] = -torch.inf
    sums = evaluate(objective, logits, ITEM_1)
    assert objective.metrics(sums)["rec@20"] == 0


def test_masked_items_counts_match_scores_of_all_items():
    """[SB §2.5] The beam search finds the best items; one round certifies some of the lists."""
    bloom_map = BloomMap(211, alpha=2, m=2)
    objective = masked_items(bloom_map)
    visible = torch.arange(100).expand(200, 100)  # the same half of the items in every set
    items = torch.randint(100, 211, (200,))
    inputs = F.pad(F0 + visible, (1, 0), value=MASK)  # (200, 101)
    labels = torch.full_like(inputs, IGNORE)
    labels[:, 0] = F0 + items

    batch = make_batch(inputs, labels)

    logits = torch.randn(200, 2, 2 * objective.config.buckets)
    sums = evaluate(objective, logits, batch)

    logp = hash_logp(logits, bloom_map)  # (200, m, R): each token in its own block
    ranks = rank_words(logp, torch.from_numpy(bloom_map.digest), items, visible)
    assert sums["hits"].tolist() == [(ranks < k).sum() for k in (1, 10, 20)]
    certified = beam_search(logp, bloom_map, 20, 20, exclude=visible).certified
    assert 0 < certified.sum() < 200
    assert objective.metrics(sums)["certified"] == certified.sum() / 200


def test_rank_words_matches_loops():
    """A word with the digest of the correct one counts against it, unless it is excluded."""
    logp = torch.randn(300, 3, 3, dtype=torch.float64)  # more than one part of 128 positions
    digests = torch.randint(0, 3, (50, 3))  # 50 words have at most 27 digests
    a, b, c = digests.T
    words = torch.randint(0, 50, (300,))
    exclude = torch.randint(-1, 50, (300, 2))
    is_correct = exclude == words.unsqueeze(1)
    exclude[is_correct] = -1
    ranks = rank_words(logp, digests, words, exclude)
    for i, word in enumerate(words):
        scores = logp[i, 0, a] + logp[i, 1, b] + logp[i, 2, c]  # (50,)
        expected = 0
        for other in range(50):
            if other != word and other not in exclude[i]:
                expected += int(scores[other] >= scores[word])
        assert ranks[i] == expected


@pytest.mark.parametrize("score", [0.0, torch.nan])
def test_equal_scores_and_nan_have_no_recall(score):
    """NaN is neither more nor less: a model that diverged would have recall 1, or that of ties."""
    labels = torch.tensor([[F0, F0 + 1]])  # the most frequent words, which topk takes first
    logits = torch.full((2, 40), score)
    batch = make_batch(labels, labels)
    objective = masked_words()
    sums = evaluate(objective, logits, batch)
    assert objective.metrics(sums)["rec@20"] == 0


# Sampled softmax


def sample_loss(scores, num_samples):
    """Return the loss of one position whose word has rank 2, and the sampled ranks (S,)."""
    config = Config(emb="lookup", head="mlm", rows=F0 + len(scores))
    objective = SampledWords(config, 0.15, RowTarget(), num_samples)
    scored = []

    def model(inputs, key_mask, masked_positions, rows):
        scored.extend(rows - F0)
        return scores[rows - F0].unsqueeze(0)  # (M 1, 1 + S)

    batch = make_batch(None, torch.tensor([[F0 + 2]]))
    loss = objective.loss(model, batch)
    return loss, torch.stack(scored[1:])


def test_sampled_softmax_is_unbiased():
    """[SB §3.3] Law: the mean of exp(loss) is that of the full softmax, with 7 samples as well."""
    scores = torch.randn(113)
    scores[2] = 5  # a likely answer, which is often sampled: counted twice it would show
    losses = []
    for _ in range(2_000):
        loss, _ = sample_loss(scores, 7)
        losses.append(loss)
    estimates = torch.stack(losses).exp()
    sigma = estimates.std() / math.sqrt(2_000)
    full_loss = -scores.log_softmax(0)[2]
    assert abs(estimates.mean() - full_loss.exp()) < 6 * sigma


def test_sampled_words_by_hand():
    """The first of three words has the q log 2 / log 4 = 0.5, two have log 3 / log 4 = 0.79."""
    u = torch.tensor([0.0, 0.49, 0.51, 0.79, 0.80, 0.999], dtype=torch.float64)
    words, log_q = sample_words(u, 3)
    assert words.tolist() == [0, 0, 1, 1, 2, 2]
    assert log_q[:2].exp().tolist() == [0.5, 0.5]


@pytest.mark.parametrize("n", [113, 5_281_889])  # in float32 (r + 2) / (r + 1) of a rare word is 1
def test_sampled_softmax_weighs_a_word_by_its_rank(n):
    """[SB §3.3] Rank r of n words has q = log((r + 2) / (r + 1)) / log(n + 1)."""
    loss, ranks = sample_loss(torch.zeros(1).expand(n), 99)
    r = ranks[ranks != 2].double()  # the correct word counts once, with weight 1
    q = ((r + 2) / (r + 1)).log() / math.log(n + 1)
    weights = 1 / (99 * q)
    expected = torch.log(1 + weights.sum())
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)


# The loss that theory expects


class RandomWords(ShuffleRandom):
    """Words are replaced alone."""

    kinds = {0: "intact", 2: "random"}


def test_metrics_are_those_of_the_kinds_of_an_objective():
    """F1 by hand: 2 · 6 / (8 + 7), 2 · 1 / (2 + 3). A class without a name is left out."""
    table = torch.tensor([[6, 0, 2], [0, 0, 0], [1, 0, 1]])
    metrics = RandomWords().metrics(dict(table=table))
    assert metrics["f1_intact"] == pytest.approx(12 / 15)
    assert metrics["f1_random"] == pytest.approx(2 / 5)
    assert metrics["macro_f1"] == pytest.approx((12 / 15 + 2 / 5) / 2)
    assert "f1_shuffled" not in metrics


class TwoKinds(ShuffleRandom):
    """A head of two classes."""

    kinds = {0: "intact", 1: "random"}


def test_counts_are_those_of_the_classes_of_the_head():
    """The labels 0 1 1 1 get the predictions 0 1 0 1."""
    objective = TwoKinds()
    logits = torch.eye(2)[[0, 1, 0, 1]].unsqueeze(0)  # (B 1, L 4, 2)
    sums = evaluate(objective, logits, make_batch(None, torch.tensor([[0, 1, 1, 1]])))
    assert sums["table"].tolist() == [[1, 0], [1, 2]]
    assert objective.metrics(sums)["accuracy"] == 0.75
    num_classes, _ = objective.expected_loss(None, sums)
    assert num_classes == 2


def test_expected_loss_of_kinds_is_the_entropy_of_the_labels():
    table = [[5, 2, 1], [0, 3, 1], [4, 0, 0]]  # 8 intact, 4 shuffled, 4 random: 1, 2 and 2 bits
    n, loss = SHUFFLE.expected_loss(None, dict(table=table))
    assert n == 3
    assert loss == pytest.approx(1.5 * math.log(2))


@pytest.mark.parametrize("objective, shape, bits", [
    (masked_words(), (50_260,), 7 / 3),
    (masked_words(order=False), (50_260,), 7 / 3),
    (masked_items(BloomMap(4, alpha=1)), (2, 18), 7 / 3),
    # of one hash each bucket has half of the words, of the other one bucket has all: 1 and 0 bits
    (masked_hashes([[0, 3], [1, 3], [1, 3], [1, 3]], buckets=7), (2, 7), 0.5),
])
def test_expected_loss_is_that_of_what_is_masked(objective, shape, bits):
    """The labels are the frequent word and twice a rare one: 1, 3 and 3 bits by frequency."""
    labels = torch.tensor([[CAT], [COW], [COW]])
    inputs = torch.full_like(labels, MASK)
    logits = torch.zeros(3, *shape)
    sums = evaluate(objective, logits, make_batch(inputs, labels))
    num_classes, loss = objective.expected_loss(np.array([4, 2, 1, 1]), sums)
    assert num_classes == shape[-1]
    assert loss == pytest.approx(bits * math.log(2))


# All objectives


def build(name, num_samples):
    """Return a tiny model without dropout, its objective, and a Batch (2, 9)."""
    model = tiny_model(emb=choose_emb(name), head=OBJECTIVES[name].head, dropout=0.0)
    args = Namespace(objective=name, mask=0.15, noise=0.10, samples=num_samples)
    tokenizer = Namespace(coder=Namespace(bloom_map=None))
    data = Namespace(targets=torch.randint(0, 7, (30, 5)), tokenizer=tokenizer)
    objective = build_objective(model.config, args, data, torch.device("cpu"))
    ids = torch.arange(18).view(2, 9)
    noise = torch.rand(3, 2, 9) / 3  # low: corrupts more of a short text
    batch = objective.corrupt_batch(Draw(ids, None, noise, ids.flip(1)))
    return model, objective, batch


@pytest.mark.parametrize("name", OBJECTIVES)
def test_loss_and_evaluate_agree(name):
    """Of sampled softmax the mean of 200 losses, of 4,000 samples each, within six sigma."""
    model, objective, batch = build(name, num_samples=4_000)
    head = model.head
    bias = head.linear.bias if hasattr(head, "linear") else head.bias
    bias.data.normal_()  # so that the classes differ
    if name == "sampled":
        model.head.bias.data[:F0] = -100  # special tokens are never sampled
    expected = objective.evaluate(model.eval(), batch)["loss"]
    model.train()
    losses = [objective.loss(model, batch) for _ in range(200)]
    losses = torch.stack(losses)
    sigma = losses.std() / math.sqrt(200)  # 0 for all others
    assert abs(losses.mean() - expected) < 6 * sigma + 1e-4


@pytest.mark.parametrize("name", OBJECTIVES)
def test_batch_without_labels_has_no_loss(name):
    model, objective, batch = build(name, num_samples=7)
    labels = torch.full_like(batch.labels, IGNORE)
    batch = make_batch(batch.inputs, labels)
    loss = objective.loss(model, batch)
    sums = objective.evaluate(model, batch)
    assert loss == 0
    assert not any(value.any() for value in sums.values())


# What hashing is for


def test_masked_hashes_training_scores_no_vocabulary():
    """No tensor that the backward pass needs has as many numbers as a third of the items."""
    num_items = 40_009
    model, tokenizer = bloom_model(n=num_items, alpha=97)
    targets = torch.from_numpy(tokenizer.codes())
    target = DigestTarget(targets, tokenizer.coder.bloom_map, model.config.buckets)
    objective = MaskedHashes(model.config, 0.15, target)
    inputs = torch.tensor([[F0 + 1, MASK]])
    labels = torch.tensor([[IGNORE, F0 + 5]])
    sizes = []

    def pack(tensor):
        sizes.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        objective.loss(model, make_batch(inputs, labels))
    assert model.inputs.embedding.weight.numel() in sizes
    assert max(sizes) < num_items / 3
