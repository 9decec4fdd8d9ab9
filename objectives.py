"""Pre-training objectives: how each corrupts its input, its loss, and what its evaluation reports.

The first part is training, one class an objective. Each class ends with the methods that evaluate
it. What these call is in the second part: ranks of words, and the losses of baselines.

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
    3. The loss of an item is the mean over its k tokens.
Notation:
    ids and labels are token IDs. The number of a word, or item, is its ID minus FIRST_WORD_ID
    B batch   L positions   M masked positions   V token IDs   W words, or items of a set
    k hashes of a word: of a sketch, or the maps of an item, which [SB] calls m
    S buckets of a hash, config.buckets; for a map the special tokens are among them
    C classes of a softmax: V, or S of a sketch, or k·S of a Bloom map   E excluded words
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

    def to_arrays(self):
        """Return this batch, from the host, with NumPy arrays in place of tensors."""
        return Batch(*[None if part is None else part.numpy() for part in self])

    def to_tensors(self):
        """Return this batch with tensors in place of NumPy arrays."""
        return Batch(*[None if part is None else torch.as_tensor(part) for part in self])

    def scored_labels(self):
        """Return the labels of the scored positions, int64 (M,)."""
        return self.labels.flatten()[self.positions]


def make_batch(inputs, labels, key_mask=None):
    """Return the Batch of inputs and labels int64 (B, L), and of a key_mask bool (B, L)."""
    is_scored = labels.flatten() != IGNORE_INDEX
    positions = is_scored.nonzero().squeeze(1)
    return Batch(inputs, labels, positions, key_mask)


class Objective:
    """Base class. Training passes a batch through

        corrupt         (ids (B, L), noise (3, B, L), random_words (B, L)) -> inputs, which the
                        model reads, and labels, what it should predict, int64 (B, L) each. A label
                        is IGNORE_INDEX where the position is not scored. noise is uniform in
                        0 .. 1, three numbers a position, which a subclass names
        score           (model, Batch) -> logits, and the loss summed over the scored positions

    An evaluation calls evaluate for each batch, which calls score and

        count           (logits, Batch) -> dict of tensors, which add up over batches: such as how
                        many predictions are right

    and at the end, with the sums over all batches of what evaluate returns,

        metrics         (sums) -> dict of float
        expected_loss   (word_counts (W,), sums) -> (num_classes, loss): classes to choose from, and
                        the loss of a model that knows only how frequent each is. An untrained model
                        has a loss of about ln num_classes

    A subclass with fields has from_run, which build_objective calls. A class also has
    """

    head = None  # a key of model.HEADS
    options = ()  # the flags of pretrain.py that only some objectives read, and this one does
    kinds = None  # dict, label -> name, 0 a word as it was; None: labels are words or hashes

    @classmethod
    def from_run(cls, config, args, data, device):
        """Return the objective of a run of pretrain.py. Arguments: as of build_objective."""
        return cls()

    def corrupt_batch(self, draw):
        """Corrupt a data.batches.Draw by its noise, or mask what it says; return a Batch."""
        if draw.is_masked is None:
            inputs, labels = self.corrupt(draw.ids, draw.noise, draw.random_words)
        else:  # held-out item sets
            inputs = draw.ids.masked_fill(draw.is_masked, MASK)
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


@dataclass
class ShuffleRandom(Objective):
    """Shuffle+Random (S+R): is each word intact, shuffled or random? [HF §3.6] [SR §3]"""

    rate: float = 0.10  # share of words that are shuffled, and of the others that are replaced

    head = "sr"
    options = ("noise",)
    kinds = {0: "intact", 1: "shuffled", 2: "random"}

    @classmethod
    def from_run(cls, config, args, data, device):
        return cls(args.noise)

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
        is_word = ids >= FIRST_WORD_ID
        is_shuffled = is_word & (shuffle < self.rate)
        is_random = is_word & ~is_shuffled & (replace < self.rate)

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

    # Evaluation

    def count(self, logits, batch):
        """Return how often each label (row) got each prediction (column), int64 (3, 3)."""
        n = logits.shape[1]  # 3, or the classes of another head
        predictions = logits.argmax(1)[batch.positions]  # (M,)
        cells = batch.scored_labels() * n + predictions
        return dict(table=torch.bincount(cells, minlength=n * n).view(n, n))

    def metrics(self, sums):
        return measure_table(sums["table"], self.kinds)

    def expected_loss(self, word_counts, sums):
        num_labeled = np.asarray(sums["table"], float).sum(1)  # after corruption
        return len(num_labeled), unigram_loss(num_labeled, num_labeled)


@dataclass
class MaskedWords(Objective):
    """Masked-word prediction: which word of the vocabulary was there? [BERT §3.1]"""

    config: object  # model.Config
    mask_rate: float  # share of words to predict

    head = "mlm"
    options = ("mask",)

    @classmethod
    def from_run(cls, config, args, data, device):
        return cls(config, args.mask)

    def corrupt(self, ids, noise, random_words):
        """Choose words to predict: 80 % become [MASK], 10 % a random word, 10 % stay. [BERT §3.1]

        Words that stay keep the model from trusting what it sees.

        Returns:
            inputs and labels int64 (B, L): the token ID of a chosen word.
        """
        choose, mask, replace = noise  # (B, L) each
        is_word = ids >= FIRST_WORD_ID
        is_chosen = is_word & (choose < self.mask_rate)
        is_masked = is_chosen & (mask < 0.8)
        is_random = is_chosen & ~is_masked & (replace < 0.5)  # half of the other 20 %

        inputs = ids.masked_fill(is_masked, MASK)
        inputs = torch.where(is_random, random_words, inputs)
        labels = ids.masked_fill(~is_chosen, IGNORE_INDEX)
        return inputs, labels

    def score(self, model, batch):
        """Score masked positions alone: logits (M, V), never (B, L, V)."""
        logits = model(batch.inputs, batch.key_mask, batch.positions).float()
        loss = F.cross_entropy(logits, batch.scored_labels(), reduction="sum")
        return logits, loss

    def find_classes(self, labels):
        """Return the classes that the words have in a softmax: token IDs (M,) to (M, 1)."""
        return labels.unsqueeze(1)  # the class of a word is its ID

    # Evaluation

    def count(self, logits, batch):
        """Return how many words are among the model's best 1, 10 and 20, and each class's labels.

        rec@k is a count, and labeled (1, C): how often each class is a label.
        """
        rank = self.rank(logits, batch)  # (M,)
        counts = {f"rec@{k}": (rank < k).sum() for k in RECALL}
        classes = self.find_classes(batch.scored_labels())
        counts["labeled"] = count_classes(classes, logits.shape[-1])
        return counts

    def rank(self, logits, batch):
        """Return how many words the model ranks before each masked word, int64 (M,)."""
        scores = logits[:, FIRST_WORD_ID:]  # (M, W): special tokens are never predicted
        scores = exclude_words(scores, self.find_excluded(batch))
        return rank_scores(scores, batch.scored_labels() - FIRST_WORD_ID)

    def find_excluded(self, batch):
        """Return the words that are no predictions of each masked position, int64 (M, E), or None.

        They are numbered from 0, and -1 is none. In a text every word may be right.
        """
        if self.config.order:
            return None
        return find_other_items(batch)

    def metrics(self, sums):
        """Return each count as a share of the scored positions, such as rec@1."""
        num_scored = max(float(sums["scored"]), 1)
        metrics = {}
        for name, value in sums.items():
            if name not in ("loss", "scored", "labeled"):
                metrics[name] = float(value) / num_scored
        return metrics

    def expected_loss(self, word_counts, sums):
        labeled = np.asarray(sums["labeled"])  # (k, C)
        num_classes = labeled.shape[1]
        # how often each class occurs in the corpus
        ids = FIRST_WORD_ID + torch.arange(len(word_counts))
        classes = self.find_classes(ids).cpu()
        counts = count_classes(classes, num_classes, torch.from_numpy(word_counts)).numpy()
        # Words of a text are masked as often as they occur, up to a factor. At least one item of a
        # set is masked, so items of small sets are labels more often
        if self.config.order:
            labeled = counts
        losses = [unigram_loss(counts[j], labeled[j]) for j in range(len(counts))]
        return num_classes, float(np.mean(losses))


@dataclass
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

    num_samples: int  # n

    options = ("mask", "samples")

    @classmethod
    def from_run(cls, config, args, data, device):
        return cls(config, args.mask, args.samples)

    def loss(self, model, batch):
        labels = batch.scored_labels()  # (M,)
        M = len(labels)
        ranks, q = sample_ranks(self.num_samples, self.config.rows - FIRST_WORD_ID)
        samples = send(ranks, labels.device) + FIRST_WORD_ID  # (n,)
        log_q = send(q.log().float(), labels.device)

        # One call scores everything: the columns are the M correct words, then the samples.
        # Position i needs column i, its own word, and all samples
        rows = torch.cat([labels, samples])  # (M + n,)
        logits = model(batch.inputs, batch.key_mask, batch.positions, rows).float()
        correct = logits[:, :M].diagonal()  # (M,), column i of row i; the others are not used
        others = logits[:, M:]  # (M, n)

        others = others - (log_q + math.log(self.num_samples))
        is_correct = samples == labels.unsqueeze(1)
        others = others.masked_fill(is_correct, -torch.inf)
        candidates = torch.cat([correct.unsqueeze(1), others], 1)  # (M, 1 + n)
        losses = candidates.logsumexp(1) - correct  # (M,)
        return losses.sum()


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


@dataclass
class MaskedHashes(MaskedWords):
    """Masked words, or items, predicted by their k hash buckets alone. [CM] [SB §2.4]

    Training scores buckets. Evaluation ranks words by the scores of their buckets.
    """

    targets: torch.Tensor  # integer (V, k), the buckets of each token ID
    bloom_map: BloomMap | None = None  # whose buckets they are; None: those of a sketch

    head = "hash-mlm"

    @classmethod
    def from_run(cls, config, args, data, device):
        targets = send(data.targets, device)
        return cls(config, args.mask, targets, data.tokenizer.coder.bloom_map)

    def score(self, model, batch):
        logits = model(batch.inputs, batch.key_mask, batch.positions).float()  # (M, k, C)
        classes = self.find_classes(batch.scored_labels())  # (M, k)
        loss = F.cross_entropy(logits.flatten(0, 1), classes.flatten(), reduction="sum")
        return logits, loss / classes.shape[1]  # the loss of a word is the mean over its k hashes

    def find_classes(self, labels):
        """Return the classes that the words have in k softmaxes: token IDs (M,) to (M, k).

        Each hash of a sketch has S classes, its buckets. The k maps of items share one table of k·S
        rows, one block after another, and each is scored against all: for S = 10 the buckets 3 and
        4 are the classes 3 and 14. [SB §2.3]
        """
        classes = self.targets[labels].long()
        if self.bloom_map is not None:
            starts = self.config.buckets * torch.arange(classes.shape[1], device=classes.device)
            classes = classes + starts
        return classes

    # Evaluation

    def count(self, logits, batch):
        """Return the counts of MaskedWords, how many hashes are right, and certified lists.

        A list is certified if a beam of 20 has proved, in one round, that it found the best 20.
        """
        counts = super().count(logits, batch)
        is_right = logits.argmax(-1) == self.find_classes(batch.scored_labels())  # (M, k)
        counts["hashes_right"] = is_right.sum()
        if self.bloom_map is not None:
            logp = hash_logp(logits, self.bloom_map)
            excluded = self.find_excluded(batch)
            _, _, certified, _ = beam_search(logp, self.bloom_map, MAX_RECALL, exclude=excluded)
            counts["certified"] = certified.sum()
        return counts

    def rank(self, logits, batch):
        """Return what MaskedWords.rank does, but 20 for an item that is not among the best 20."""
        words = batch.scored_labels() - FIRST_WORD_ID
        excluded = self.find_excluded(batch)
        if self.bloom_map is not None:
            logp = hash_logp(logits, self.bloom_map)
            return rank_by_search(logp, self.bloom_map, words, excluded)
        return rank_words(logits.log_softmax(-1), self.targets[FIRST_WORD_ID:], words, excluded)

    def metrics(self, sums):
        metrics = super().metrics(sums)
        metrics["hashes_right"] /= self.config.hashes
        return metrics


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
    return OBJECTIVES[args.objective].from_run(config, args, data, device)


# -----------------------------------------------------------------------------
# Evaluation


def measure_table(table, kinds):
    """Return accuracy, that of the majority class, F1 of each kind and its mean.

    Args:
        table: (n, n), how often each label (row) got each prediction (column).
        kinds: dict, label -> name.
    """
    table = np.asarray(table, float)
    total = max(table.sum(), 1)
    correct = table.diagonal()
    num_labeled = table.sum(1)
    num_predicted = table.sum(0)
    f1 = 2 * correct / np.maximum(num_labeled + num_predicted, 1)
    metrics = dict(accuracy=correct.sum() / total, majority=num_labeled.max() / total)
    for label, kind in kinds.items():
        metrics[f"f1_{kind}"] = f1[label]
    metrics["macro_f1"] = f1[list(kinds)].mean()
    return metrics


def rank_scores(scores, words):
    """Return how many other words score at least as much as the correct one, int64 (M,).

    Args:
        scores: float (M, W).
        words: int64 (M,), the numbers of the correct words.
    """
    correct = scores.gather(1, words.unsqueeze(1))  # (M, 1)
    # subtle: every comparison with NaN is False. With >= a diverged model would have rank -1, so
    # recall 1
    return (~(scores < correct)).sum(1) - 1  # all but the correct one


def rank_words(logp, digests, words, exclude=None):
    """Return the rank of each correct word, see rank_scores, by its hash buckets, int64 (M,).

    Args:
        logp: float (M, k, S). The score of a word is the sum of logp at its k buckets.
        digests: integer (W, k), each word's k buckets.
        words: int64 (M,), the numbers of the correct words.
        exclude: int64 (M, E), other words that do not count, -1 for none; or None.
    """
    ranks = torch.empty_like(words)
    for start in range(0, len(words), RANK_PART):
        part = slice(start, start + RANK_PART)
        scores = 0
        for j in range(logp.shape[1]):
            scores = scores + logp[part, j].index_select(1, digests[:, j].int())  # (part of M, W)
        if exclude is not None:
            scores = exclude_words(scores, exclude[part])
        ranks[part] = rank_scores(scores, words[part])
    return ranks


def rank_by_search(logp, bloom_map, items, exclude):
    """Return the rank of each correct item in its list of the best 20, or 20, int64 (M,).

    The search goes on until the lists are certified. Arguments: as of rank_words, and a BloomMap.
    """
    best, _, _, _ = beam_search(logp, bloom_map, MAX_RECALL, rounds=None, exclude=exclude)
    is_hit = best == items.unsqueeze(1)  # (M, 20)
    is_before = is_hit.cumsum(1) == 0  # the items before the hit
    return is_before.sum(1).masked_fill(~is_hit.any(1), MAX_RECALL)


def find_other_items(batch):
    """Return the other items of the set of each masked position, int64 (M, L), -1 for none.

    They are numbered from 0. [SB §3.1]
    """
    row = batch.positions // batch.inputs.shape[1]  # (M,)
    ids = batch.inputs[row]  # (M, L)
    is_special = ids < FIRST_WORD_ID
    # subtle: 10 % of the items to predict stay in the input, and must not be excluded
    is_answer = ids == batch.scored_labels().unsqueeze(1)
    return torch.where(is_special | is_answer, -1, ids - FIRST_WORD_ID)


def exclude_words(scores, words):
    """Return scores (M, W) with -inf at words, int64 (M, E), -1 for none, or None."""
    if words is None:
        return scores
    scores = F.pad(scores, (0, 1))
    row = torch.arange(len(scores), device=scores.device).unsqueeze(1)  # (M, 1)
    scores[row, words] = -torch.inf  # -1 indexes the extra column, which is cut off again
    return scores[:, :-1]


def count_classes(classes, num_classes, weights=None):
    """Return how often each class occurs in each column of (n, k), (k, C).

    Row i counts weights[i] times, once by default.
    """
    return torch.stack([torch.bincount(column, weights, num_classes) for column in classes.T])


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


def main():
    """Shuffle and replace words of a sentence; print what the model sees, and the labels."""
    names = "every quick brown fox jumps over the lazy dog".split()
    generator = torch.Generator().manual_seed(66)  # a seed that shows every case
    ids = FIRST_WORD_ID + torch.arange(len(names)).unsqueeze(0)  # (1, 9)
    random_words = FIRST_WORD_ID + torch.randint(len(names), ids.shape, generator=generator)
    noise = torch.rand(3, *ids.shape, generator=generator)
    inputs, labels = ShuffleRandom(rate=0.40).corrupt(ids, noise, random_words)

    print("text            inputs          label")
    for i, name in enumerate(names):
        word = names[inputs[0, i] - FIRST_WORD_ID]
        kind = ShuffleRandom.kinds[labels[0, i].item()]
        print(f"{name:16}{word:16}{kind}")
    print("\nWords are chosen 4 times as often as usual, as the text is short.")


if __name__ == "__main__":
    main()
