"""Pre-training objectives: how each corrupts its input, its loss, and what its evaluation reports.

Sources:
    [HF] Xue & Aletras 2022, HashFormers
    [SR] Yamaguchi et al. 2021, Shuffle+Random
    [BERT] Devlin et al. 2019
    [SB] Anderson et al. 2020, Superbloom
    [CM] Median is all you need, a proposal
Out of scope: batches, the noise that decides what is corrupted (data/batches.py), heads (model.py),
    pages of item sets (data/items.py).
Deviations:
    1. Words are shuffled within their row. The authors share one permutation of positions over a
       batch, which moves few words of a short row.
    2. Random words are words of the corpus. The authors give Add and Proj bits that no word has.
    3. The loss of an item is the mean over its m tokens.
Notation:
    ids and labels are token IDs. The number of an item, or word, is its ID minus first_word_id
    B batch   L positions   M masked positions   V token IDs   W items   N rows of a table
    E excluded items   m hashes of an item, one for each map   k hash functions of a sketch
    R buckets of each, or of a map   s special tokens
Demo: python objectives.py
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from bloom import BloomMap, beam_search, hash_logp
from support.common import send
from tokenizer import FIRST_WORD_ID, MASK

IGNORE_INDEX = -100  # the label of a position that is not scored: torch's own default
RECALL = (1, 10, 20)  # the k of recall@k
MAX_RECALL = max(RECALL)
RANK_PART = 128  # masked words that rank_words scores at a time: bounds its memory


class Batch(NamedTuple):
    """A corrupted micro-batch.

    make_batch makes it on the host: nonzero on a GPU would make the host wait for the number of
    scored positions.
    """

    inputs: torch.Tensor  # int64 (B, L), token IDs
    labels: torch.Tensor  # int64 (B, L), IGNORE_INDEX where a position is not scored
    positions: torch.Tensor  # int64 (M,), the scored positions of the flattened batch
    key_mask: torch.Tensor | None  # bool (B, L), False = padding; None: without padding

    def to(self, device):
        """Return this batch, from the host, on a device. The host does not wait."""
        return Batch(*[send(part, device) for part in self])

    def scored_labels(self):
        """Return the labels of the scored positions, int64 (M,)."""
        return self.labels.flatten()[self.positions]


def make_batch(inputs, labels, key_mask=None):
    """Return the Batch of inputs and labels int64 (B, L), and of a key_mask bool (B, L)."""
    is_scored = labels.flatten() != IGNORE_INDEX
    positions = is_scored.nonzero().squeeze(1)
    return Batch(inputs, labels, positions, key_mask)


@dataclass
class Objective:
    """Base class. A batch passes through the methods of a subclass in this order:

        corrupt         (ids (B, L), noise (3, B, L), random_words (B, L)) -> inputs, which the
                        model reads, and labels, what it should predict, int64 (B, L) each. A label
                        is IGNORE_INDEX where the position is not scored. noise is uniform in
                        0 .. 1, three numbers a position, which a subclass names
        score           (model, Batch) -> logits, and the loss summed over the scored positions
        count           (logits, Batch) -> dict of tensors: how many predictions are right
        metrics         (sums over batches of what evaluate returns) -> dict of float: shares

    Training calls loss for each batch. An evaluation calls evaluate for each, and metrics at the
    end. A subclass also has

        head            a key of model.HEADS
        options         the flags of pretrain.py that only some objectives read, and this one does
        kinds           dict, label -> name of a kind of word, 0 a word as it was; None: labels are
                        words or hashes
        expected_loss   (word_counts (W,), sums of evaluate) -> (num_classes, loss): classes to
                        choose from, and the loss of a model that knows only how frequent each is.
                        An untrained model has a loss of about ln num_classes
    """

    config: object  # model.Config
    mask_rate: float | None = None  # share of words to mask; not of sr
    mask_id: int | None = None  # token ID of [MASK]
    first_word_id: int | None = None  # token ID of the first word
    targets: torch.Tensor | None = None  # (V, k) by token ID, the buckets that hash-mlm predicts
    bloom_map: BloomMap | None = None  # of items, for emb bloom alone
    num_samples: int | None = None  # of sampled softmax
    sr_rate: float = 0.10  # share of words that sr shuffles, and of the others that it replaces
    options = ()  # no fields: a class has these
    kinds = None

    def corrupt_batch(self, draw):
        """Corrupt a data.batches.Draw by its noise, or mask what it says; return a Batch."""
        if draw.is_masked is None:
            inputs, labels = self.corrupt(draw.ids, draw.noise, draw.random_words)
        else:  # held-out item sets
            inputs = draw.ids.masked_fill(draw.is_masked, self.mask_id)
            labels = draw.ids.masked_fill(~draw.is_masked, IGNORE_INDEX)
        return make_batch(inputs, labels, draw.key_mask)

    def loss(self, model, batch):
        """Return the training loss summed over the scored positions."""
        _, loss = self.score(model, batch)
        return loss

    def evaluate(self, model, batch):
        """Return what adds up over batches, a dict of tensors: loss, scored positions, counts."""
        logits, loss = self.score(model, batch)
        num_scored = torch.tensor(len(batch.positions))
        return dict(loss=loss, scored=num_scored, **self.count(logits, batch))


# Shuffle+Random


class ShuffleRandom(Objective):
    """Shuffle+Random (S+R): is each word intact, shuffled or random? [HF §3.6] [SR §3]"""

    head = "sr"
    options = ("noise",)
    kinds = {0: "intact", 1: "shuffled", 2: "random"}

    def corrupt(self, ids, noise, random_words):
        """Shuffle some words among themselves and replace others.

        Noise chooses words to be shuffled, others to be replaced, and the new order. Here the sort
        keys order places 1, 3, 5 as 5, 1, 3: place 1 gets the word of 5, 3 that of 1, 5 that of 3:

            ids           a b c d e f
            is_shuffled   . x . x . x
            inputs        a f c b e d

        Returns:
            inputs and labels int64 (B, L): 0 intact, 1 shuffled, 2 random.
        """
        shuffle, replace, sort_key = noise  # (B, L) each
        is_word = ids >= self.first_word_id
        is_shuffled = is_word & (shuffle < self.sr_rate)
        is_random = is_word & ~is_shuffled & (replace < self.sr_rate)

        inputs = torch.where(is_random, random_words, ids)
        for b in range(len(ids)):
            places = is_shuffled[b].nonzero().squeeze(1)
            new_order = sort_key[b, places].argsort(stable=True)
            inputs[b, places] = ids[b, places[new_order]]

        labels = is_shuffled.long()
        labels[is_random] = 2
        labels[inputs == ids] = 0  # subtle: "the" in place of "the" is intact
        labels[~is_word] = IGNORE_INDEX
        return inputs, labels

    def score(self, model, batch):
        logits = model(batch.inputs, batch.key_mask).flatten(0, 1).float()  # (B·L, 3)
        loss = F.cross_entropy(logits, batch.labels.flatten(), reduction="sum")
        return logits, loss

    def count(self, logits, batch):
        """Return how often each label (row) got each prediction (column), int64 (3, 3)."""
        n = logits.shape[1]  # 3, or the classes of another head
        predictions = logits.argmax(1)[batch.positions]  # (M,)
        cells = batch.scored_labels() * n + predictions
        return dict(table=torch.bincount(cells, minlength=n * n).view(n, n))

    def metrics(self, sums):
        """Return accuracy, that of the majority class, F1 of each kind and its mean."""
        table = np.asarray(sums["table"], float)
        total = max(table.sum(), 1)
        correct = table.diagonal()
        num_labeled = table.sum(1)
        num_predicted = table.sum(0)
        f1 = 2 * correct / np.maximum(num_labeled + num_predicted, 1)
        metrics = dict(accuracy=correct.sum() / total, majority=num_labeled.max() / total)
        for label, kind in self.kinds.items():
            metrics[f"f1_{kind}"] = f1[label]
        metrics["macro_f1"] = f1[list(self.kinds)].mean()
        return metrics

    def expected_loss(self, word_counts, sums):
        num_labeled = np.asarray(sums["table"], float).sum(1)  # after corruption
        return len(num_labeled), unigram_loss(num_labeled, num_labeled)


# Masked words


class MaskedWords(Objective):
    """Masked-word prediction: which word of the vocabulary was there? [BERT §3.1]"""

    head = "mlm"
    options = ("mask",)

    def corrupt(self, ids, noise, random_words):
        """Choose words to predict: 80 % become [MASK], 10 % a random word, 10 % stay. [BERT §3.1]

        Words that stay keep the model from trusting what it sees.

        Returns:
            inputs and labels int64 (B, L): the token ID of a chosen word.
        """
        choose, mask, replace = noise  # (B, L) each
        is_word = ids >= self.first_word_id
        is_chosen = is_word & (choose < self.mask_rate)
        is_masked = is_chosen & (mask < 0.8)
        is_random = is_chosen & ~is_masked & (replace < 0.5)  # half of the other 20 %

        inputs = ids.masked_fill(is_masked, self.mask_id)
        inputs = torch.where(is_random, random_words, inputs)
        labels = ids.masked_fill(~is_chosen, IGNORE_INDEX)
        return inputs, labels

    def score(self, model, batch):
        """Score masked positions alone: logits (M, N), never (B, L, N)."""
        logits = model(batch.inputs, batch.key_mask, batch.positions).float()  # (M, N)
        labels = batch.scored_labels()  # (M,): the row of a word is its ID
        return logits, F.cross_entropy(logits, labels, reduction="sum")

    def count_classes(self, labels, weights=None):
        """Return how often labels (M,) have each class, (1, N). Label i counts weights[i] times."""
        return torch.bincount(labels, weights, self.config.rows).unsqueeze(0)

    def count(self, logits, batch):
        """Return how many of the words are among the model's best 1, 10 and 20."""
        rank = self.rank(logits, batch)
        return {f"rec@{k}": (rank < k).sum() for k in RECALL}

    def rank(self, logits, batch):
        """Return how many words the model ranks before each masked word, int64 (M,)."""
        scores = logits[:, self.first_word_id:]  # (M, W): special tokens are never predicted
        scores = exclude_items(scores, self.excluded(batch))
        return rank_items(scores, batch.scored_labels() - self.first_word_id)

    def excluded(self, batch):
        """Return the words that are no predictions of each masked position, int64 (M, E), or None.

        Words are numbered from 0, and -1 is none. In a text every word may be right.
        """
        return None

    def metrics(self, sums):
        """Return recall@k, each as rec@k."""
        return {f"rec@{k}": share(sums, f"rec@{k}") for k in RECALL}

    def expected_loss(self, word_counts, sums):
        ids = torch.arange(len(word_counts)) + self.first_word_id
        # how often each class occurs in the corpus: (1, N), or for hashes (k, R)
        counts = self.count_classes(ids, torch.from_numpy(word_counts)).numpy()
        losses = [unigram_loss(*rows) for rows in zip(counts, self.label_counts(counts, sums))]
        return counts.shape[1], float(np.mean(losses))

    def label_counts(self, counts, sums):
        """Return how often each class is a label, (k, R), up to a factor.

        Words of a text are masked in proportion to counts, how often they occur.
        """
        return counts


class SampledWords(MaskedWords):
    """Masked words against a few thousand sampled rows instead of all: sampled softmax. [SB §3.3]

    The cross-entropy of a word needs the sum of exp(logit) over all words. Its own term is exact.
    The sum over the others is estimated from n samples: a word that is drawn with probability q
    adds exp(logit) / (n q). For n = 1 and two other words with exp(logit) 6 and 2, the sum is 8:

        drawn     q       estimate
        6         0.5     6 / 0.5 = 12
        2         0.5     2 / 0.5 =  4        mean 0.5 · 12 + 0.5 · 4 = 8

    The mean is the sum for every q > 0. To divide exp(logit) by n q is to subtract log(n q) from
    the logit. A sample that is the correct word adds nothing.

    BPE pieces are not numbered by frequency, so the estimate is noisier for them. Evaluation scores
    all words and the special tokens, which training never scores: its loss is higher on average.
    """

    options = ("mask", "samples")

    def loss(self, model, batch):
        labels = batch.scored_labels()  # (M,)
        ranks, q = sample_ranks(self.num_samples, self.config.rows - self.first_word_id)
        samples = send(ranks, labels.device) + self.first_word_id  # (num_samples,)
        log_q = send(q.log().float(), labels.device)

        # One call scores everything: the columns are the M correct words, then the samples.
        # Position i needs column i, its own word, and all samples
        M = len(labels)
        rows = torch.cat([labels, samples])  # (M + num_samples,)
        logits = model(batch.inputs, batch.key_mask, batch.positions, rows).float()
        correct = logits[:, :M].diagonal()  # (M,), column i of row i; the others are not used
        others = logits[:, M:] - (log_q + math.log(self.num_samples))  # (M, num_samples)
        others = others.masked_fill(samples == labels.unsqueeze(1), -torch.inf)
        candidates = torch.cat([correct.unsqueeze(1), others], 1)  # (M, 1 + num_samples)
        losses = candidates.logsumexp(1) - correct  # (M,)
        return losses.sum()


# Masked hashes


class MaskedHashes(MaskedWords):
    """Masked words, predicted by their k buckets of a sketch alone. [CM]

    Training scores buckets. Evaluation scores all words by their buckets, and ranks them.
    """

    head = "hash-mlm"

    def score(self, model, batch):
        # (M, k, R), or (M, m, m·(R + s)) for a Bloom map, whose m is k below
        logits = model(batch.inputs, batch.key_mask, batch.positions).float()
        targets = self.hash_targets(batch.scored_labels())  # (M, k)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
        return logits, loss / targets.shape[1]  # the loss of a word is the mean over its k hashes

    def count_classes(self, labels, weights=None):
        """Return how often the words have each bucket, (k, R)."""
        targets = self.targets.to(labels.device)[labels]  # (M, k)
        rows = self.config.buckets
        return torch.stack([torch.bincount(column, weights, rows) for column in targets.T])

    def hash_targets(self, labels):
        """Return the class that each row of logits should predict: token IDs (M,) to (M, k)."""
        return self.targets[labels].long()

    def count(self, logits, batch):
        """Return how many words are among the best 1, 10, 20; and right hashes."""
        is_right = logits.argmax(-1) == self.hash_targets(batch.scored_labels())  # (M, k)
        return dict(super().count(logits, batch), hashes_right=is_right.sum())

    def rank(self, logits, batch):
        """Return what MaskedWords.rank does, by the scores of all words."""
        word_targets = self.targets[self.first_word_id:]  # (W, k)
        words = batch.scored_labels() - self.first_word_id
        return rank_words(logits.log_softmax(-1), word_targets, words, self.excluded(batch))

    def metrics(self, sums):
        """Return recall@k, and the share of right hashes."""
        hashes_right = share(sums, "hashes_right") / self.config.hashes
        return dict(super().metrics(sums), hashes_right=hashes_right)


class MaskedDigests(MaskedHashes):
    """Masked items, or phrases, predicted by their m buckets of bloom_map. [SB §2.4]

    The m maps share one table of m·(R + s) rows, one after another. An evaluation searches the best
    items, and does not score all.
    """

    def hash_targets(self, labels):
        targets = super().hash_targets(labels)  # (M, m), in 0 .. R-1
        rows_per_map = self.config.buckets  # R + s
        starts = rows_per_map * torch.arange(targets.shape[1], device=labels.device)
        targets = targets + starts
        return targets

    def count(self, logits, batch):
        """Return the counts of MaskedHashes, and how many lists are certified.

        A beam of 20 has proved then, in one round, that it found the best 20.
        """
        logp = hash_logp(logits, self.bloom_map)
        _, _, certified, _ = beam_search(
            logp, self.bloom_map, MAX_RECALL, exclude=self.excluded(batch))
        return dict(super().count(logits, batch), certified=certified.sum())

    def metrics(self, sums):
        """Return the metrics of MaskedHashes, and the share of certified lists."""
        return dict(super().metrics(sums), certified=share(sums, "certified"))

    def rank(self, logits, batch):
        """Return what MaskedWords.rank does, but 20 for an item that is not among the best 20."""
        logp = hash_logp(logits, self.bloom_map)
        best, *_ = beam_search(  # (M, 20), searched until they are certified
            logp, self.bloom_map, MAX_RECALL, rounds=None, exclude=self.excluded(batch))
        items = batch.scored_labels() - self.first_word_id
        is_hit = best == items.unsqueeze(1)  # (M, 20)
        is_before = is_hit.cumsum(1) == 0  # the items before the hit
        return is_before.sum(1).masked_fill(~is_hit.any(1), MAX_RECALL)

    def expected_loss(self, word_counts, sums):
        num_classes, loss = super().expected_loss(word_counts, sums)
        return num_classes * self.config.hashes, loss  # one softmax over all maps


OBJECTIVES = {
    "sr": ShuffleRandom,
    "mlm": MaskedWords,
    "sampled": SampledWords,
    "hash-mlm": MaskedHashes,
}


def build_objective(config, args, data, device):
    """Return the objective of a run of pretrain.py, with what it needs of settings and data.

    Args:
        config: model.Config.
        args: Namespace, all settings.
        data: data.loading.Data.
        device: torch.device, of the model.
    """
    return choose_class(args.objective, config)(
        config, mask_rate=args.mask, sr_rate=args.noise, mask_id=MASK,
        first_word_id=FIRST_WORD_ID, targets=send(data.targets, device),
        bloom_map=data.tokenizer.coder.bloom_map, num_samples=args.samples)


def choose_class(name, config):
    """Return the class of a name in OBJECTIVES for a model's data: words, digests, item sets."""
    objective_class = OBJECTIVES[name]
    if name == "hash-mlm" and config.code_format == "digest":
        objective_class = MaskedDigests
    if config.order:
        return objective_class

    class MaskedItems(ItemSets, objective_class):  # ItemSets stands at the end of this file
        """The objective of masked words, for item sets."""

    return MaskedItems


# Helpers


def share(sums, name):
    """Return a sum of Objective.evaluate as a share of the scored positions, float."""
    return float(sums[name]) / max(float(sums["scored"]), 1)


def rank_words(logp, digests, items, exclude=None):
    """Return the rank of each correct word, see rank_items, by its hash buckets, int64 (M,).

    Args:
        logp: float (M, k, R). The score of a word is the sum of logp at its k buckets.
        digests: integer (W, k), each word's k buckets.
        items: int64 (M,), the numbers of the correct words.
        exclude: int64 (M, E), other words that do not count, -1 for none; or None.
    """
    ranks = torch.empty_like(items)
    for start in range(0, len(items), RANK_PART):
        part = slice(start, start + RANK_PART)
        scores = 0
        for j in range(logp.shape[1]):
            scores = scores + logp[part, j].index_select(1, digests[:, j].int())  # (part of M, W)
        if exclude is not None:
            scores = exclude_items(scores, exclude[part])
        ranks[part] = rank_items(scores, items[part])
    return ranks


def exclude_items(scores, items):
    """Return scores (M, W) with -inf at items, int64 (M, E), -1 for none, or None."""
    if items is None:
        return scores
    scores = F.pad(scores, (0, 1))
    row = torch.arange(len(scores), device=scores.device).unsqueeze(1)  # (M, 1)
    scores[row, items] = -torch.inf  # -1 indexes the extra column, which is cut off again
    return scores[:, :-1]


def rank_items(scores, items):
    """Return how many other words score at least as much as the correct one, int64 (M,).

    Args:
        scores: float (M, W).
        items: int64 (M,), the numbers of the correct words.
    """
    correct = scores.gather(1, items.unsqueeze(1))  # (M, 1)
    # subtle: every comparison with NaN is False. With >= a diverged model would have rank -1, so
    # recall 1
    return (~(scores < correct)).sum(1) - 1  # all but the correct one


def sample_ranks(num_samples, n):
    """Draw from n words by rank, frequent ones more often; return ranks int64, q float64.

    Rank r, from 0, has probability q = log((r + 2) / (r + 1)) / log(n + 1), which is about
    proportional to 1 / (r + 1). The q of ranks 0 .. r add up to log(r + 2) / log(n + 1). For n = 3:

        rank r             0            1               2
        q                  0.50         0.29            0.21
        u that draws it    0 .. 0.50    0.50 .. 0.79    0.79 .. 1

    A uniform u draws the first rank whose sum exceeds u. It is (n + 1)^u - 1, rounded down: u = 0.6
    draws rank 1, since 4^0.6 - 1 = 1.3.
    """
    # on the CPU: the same samples on every device, and MPS has no float64. The generator is that of
    # PyTorch, which pretrain.py seeds before each step
    u = torch.rand(num_samples, dtype=torch.float64)
    rank = (u * math.log(n + 1)).exp().long() - 1
    rank = rank.clamp(max=n - 1)  # where exp was rounded up to n + 1
    # q = log((r + 2) / (r + 1)) = log1p(1 / (r + 1))
    q = (1 / (rank.double() + 1)).log1p() / math.log(n + 1)
    return rank, q


def unigram_loss(counts, labels):
    """Return the mean loss of a model that predicts each of n classes by its frequency.

    Args:
        counts: (n,), how often each class occurs. With labels = counts the loss is their entropy.
        labels: (n,), how often each is to be predicted.
    """
    is_label = labels > 0
    p = counts[is_label] / counts.sum()
    share = labels[is_label] / labels.sum()
    return float(-(share * np.log(p)).sum())


# Item sets


class ItemSets:
    """What masked words of item sets have instead of the methods of MaskedWords. [SB §3.1]"""

    def excluded(self, batch):
        """Return the other items of the set of each masked position, int64 (M, L), -1 for none."""
        row = batch.positions // batch.inputs.shape[1]  # (M,)
        ids = batch.inputs[row]  # (M, L)
        is_special = ids < self.first_word_id
        # subtle: 10 % of the words to predict stay in the input, and must not be excluded
        is_answer = ids == batch.scored_labels().unsqueeze(1)
        return torch.where(is_special | is_answer, -1, ids - self.first_word_id)

    def count(self, logits, batch):
        """Return the counts of the objective, and how often each class is a label."""
        masked = self.count_classes(batch.scored_labels())  # (1, N) or (k, R), for label_counts
        return dict(super().count(logits, batch), masked=masked)

    def label_counts(self, counts, sums):
        """Return how often each class is a label.

        At least one item of a set is masked, so items of small sets are labels more often than they
        occur.
        """
        return np.asarray(sums["masked"])


def main():
    """Shuffle and replace words of a sentence; print what the model sees, and the labels."""
    names = "every quick brown fox jumps over the lazy dog".split()
    generator = torch.Generator().manual_seed(66)  # a seed that shows every case
    ids = torch.arange(len(names)).unsqueeze(0)  # (1, 9)
    random_words = torch.randint(len(names), ids.shape, generator=generator)
    noise = torch.rand(3, *ids.shape, generator=generator)
    objective = ShuffleRandom(None, first_word_id=0, sr_rate=0.40)
    inputs, labels = objective.corrupt(ids, noise, random_words)

    for title, row, texts in (
        ("text", ids, names),
        ("inputs", inputs, names),
        ("labels", labels, ShuffleRandom.kinds),
    ):
        print(f"{title:8}", *[f"{texts[i]:>9}" for i in row[0].tolist()], sep="")
    print("\nWords are chosen 4 times as often as usual, as the text is short.")


if __name__ == "__main__":
    main()
