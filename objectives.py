"""Pre-training objectives: what each corrupts, what the model should predict, and the loss.

An objective is one class. The base class shows which methods it has, and how they call each other.
Those of masked words are MaskedWords with a target, which says by which classes a word is
predicted:

    objective            class           target          a word is           and is ranked by
    mlm                  MaskedWords     RowTarget       a row of a table    rank_scores
    sampled              SampledWords    RowTarget       a row of a table    rank_scores
    hash-mlm of words    MaskedHashes    SketchTarget    k hash buckets      rank_words
    hash-mlm of items    MaskedHashes    DigestTarget    m hash tokens       beam_search

What an evaluation counts and reports is in metrics.py; an objective chooses from it.

Sources:
    [HF] Xue & Aletras 2022, HashFormers
    [SR] Yamaguchi et al. 2021, Shuffle+Random
    [BERT] Devlin et al. 2019
    [SB] Anderson et al. 2020, Superbloom
    [CM] Median is all you need, a proposal
Out of scope: batches, the noise that decides what is corrupted (data/batches.py), heads (heads.py),
    pages of item sets (data/items.py).
Deviations:
    1. Words are shuffled within their row. The authors share one permutation of positions over a
       batch, which moves few words of a short row.
    2. Random words are words of the corpus. For Add and Proj the authors draw random bits instead:
       a code that no word has.
    3. The loss of an item is the mean over its m tokens.
    4. The other items of a set are excluded as predictions. The lists of [SB] include them.
    5. At least one item of a set is masked. [SB §3.1] masks 15 %, which may be none.
Notation:
    ids and labels are token IDs. The number of a word, or item, is its ID minus FIRST_WORD_ID
    B batch   L positions   M scored positions   V token IDs   W words, or items of a set
    k hash functions of a sketch   m hashes of an item   R buckets of each   s special tokens
    h classes of a word: 1, k or m   C classes of a softmax: V, R or m·(R + s)   E excluded words
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from bloom import BloomMap
from metrics import MAX_RECALL, count_classes, count_hits, count_table, measure_recall
from metrics import measure_table, rank_in_lists, rank_scores, rank_words, unigram_loss
from search import beam_search, hash_logp
from support.common import send
from tokenizer import FIRST_WORD_ID, MASK

IGNORE_INDEX = -100  # the label of a position that is not scored


class Batch(NamedTuple):
    """A corrupted micro-batch.

    make_batch makes it on the host: nonzero on a GPU would make the host wait for the number of
    scored positions.
    """

    inputs: torch.Tensor  # int64 (B, L), token IDs
    labels: torch.Tensor  # int64 (B, L), IGNORE_INDEX where a position is not scored
    positions: torch.Tensor  # int64 (M,), the scored positions of the flattened batch
    key_mask: torch.Tensor | None  # bool (B, L), False = padding; None: without padding

    def scored_labels(self):
        """Return the labels of the scored positions, int64 (M,)."""
        return self.labels.flatten()[self.positions]

    def to(self, device):
        """Return this batch, from the host, on a device. The host does not wait."""
        return Batch(*[send(part, device) for part in self])


def make_batch(inputs, labels, key_mask=None):
    """Return the Batch of inputs and labels int64 (B, L), and of a key_mask bool (B, L)."""
    is_scored = labels.flatten() != IGNORE_INDEX
    positions = is_scored.nonzero().squeeze(1)
    return Batch(inputs, labels, positions, key_mask)


class Objective:
    """Base class. A subclass has those methods that raise an error here.

    What pretrain.py calls, and what that calls:

        each batch                      corrupt_batch             corrupt
        each batch of a training step   loss                      predict, cross_entropy
        each batch of an evaluation     evaluate                  predict, cross_entropy, tally
        the end of an evaluation        metrics, expected_loss

    The last two get the sums of what evaluate returned for all batches. SampledWords alone has a
    loss that calls neither predict nor cross_entropy. The lines of a dataclass that have a type are
    the arguments of its constructor.
    """

    head = None  # a key of heads.HEADS
    options = ()  # the flags of pretrain.py that only some objectives read, and this one does
    kinds = None  # dict, label -> name, 0 a word as it was; None: labels are words or hashes

    @classmethod
    def from_run(cls, config, args, data, device):
        """Return the objective of a run of pretrain.py. Arguments: as of build_objective."""
        return cls()

    # Training

    def corrupt_batch(self, draw):
        """Corrupt a data.batches.Draw by its noise, or mask what it says; return a Batch.

        Held-out item sets say what: one item of each is masked, and all others are there to predict
        it from. By noise several would be hidden, and some replaced.
        """
        if draw.is_masked is None:
            inputs, labels = self.corrupt(draw.ids, draw.noise, draw.random_words)
        else:
            inputs = draw.ids.masked_fill(draw.is_masked, MASK)
            labels = draw.ids.masked_fill(~draw.is_masked, IGNORE_INDEX)
        return make_batch(inputs, labels, draw.key_mask)

    def corrupt(self, ids, noise, random_words):
        """Return inputs, which the model reads, and labels, which it should predict.

        Args:
            ids: int64 (B, L).
            noise: float (3, B, L), uniform in 0 .. 1: three numbers a position. A subclass says
                what each decides.
            random_words: int64 (B, L), token IDs, of which some replace words.

        Returns:
            inputs and labels: int64 (B, L). A label is IGNORE_INDEX where nothing is predicted.
        """
        raise NotImplementedError

    def loss(self, model, batch):
        """Return the training loss of a Batch, summed over the scored positions."""
        return self.cross_entropy(self.predict(model, batch), batch)

    def predict(self, model, batch):
        """Return the logits of a model, float32. Their shape depends on the head."""
        raise NotImplementedError

    def cross_entropy(self, logits, batch):
        """Return the loss of these logits, summed over the scored positions."""
        raise NotImplementedError

    # Evaluation

    def evaluate(self, model, batch):
        """Return what adds up over batches, a dict of tensors: loss, scored, and the tally."""
        logits = self.predict(model, batch)
        loss = self.cross_entropy(logits, batch)
        num_scored = torch.tensor(len(batch.positions))
        return dict(loss=loss, scored=num_scored, **self.tally(logits, batch))

    def tally(self, logits, batch):
        """Return the counts that metrics and expected_loss need, a dict of tensors."""
        raise NotImplementedError

    def metrics(self, sums):
        """Return what an evaluation reports, such as accuracy, a dict of float.

        sums: dict of float64 arrays, with the keys of evaluate.
        """
        raise NotImplementedError

    def expected_loss(self, word_counts, sums):
        """Return what a model has to beat.

        Args:
            word_counts: int (W,), how often each word occurs in the corpus.
            sums: as in metrics.

        Returns:
            num_classes: int, classes to choose from. The loss of a guess is ln num_classes.
            loss: float, that of a model which knows only how frequent each class is.
        """
        raise NotImplementedError


@dataclass
class ShuffleRandom(Objective):
    """Shuffle+Random (S+R): is each word intact, shuffled or random? [HF §3.6] [SR §3]"""

    head = "sr"
    options = ("noise",)
    kinds = {0: "intact", 1: "shuffled", 2: "random"}

    rate: float = 0.10  # share of words that are shuffled, and of the others that are replaced

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

    def predict(self, model, batch):
        return model(batch.inputs, batch.key_mask).float()  # (B, L, 3)

    def cross_entropy(self, logits, batch):
        return F.cross_entropy(
            logits.flatten(0, 1),
            batch.labels.flatten(),
            ignore_index=IGNORE_INDEX,
            reduction="sum")

    # Evaluation

    def tally(self, logits, batch):
        """Return a dict of table, int64 (3, 3): how often each label got each prediction."""
        scored = logits.flatten(0, 1)[batch.positions]  # (M, 3)
        return dict(table=count_table(scored, batch.scored_labels()))

    def metrics(self, sums):
        return measure_table(sums["table"], self.kinds)

    def expected_loss(self, word_counts, sums):
        label_counts = np.asarray(sums["table"], float).sum(1)
        return len(label_counts), unigram_loss(label_counts, label_counts)


# Masked words


@dataclass
class MaskedWords(Objective):
    """Masked-word prediction: which word, or item, was there? [BERT §3.1]

    The target says by which classes a word is predicted. The class Target lists its methods.
    """

    head = "mlm"
    options = ("mask",)

    config: object  # model.Config
    mask_rate: float  # share of words to predict
    target: object  # Target

    @classmethod
    def from_run(cls, config, args, data, device):
        return cls(config, args.mask, RowTarget())

    def corrupt(self, ids, noise, random_words):
        """Choose words to predict: 80 % become [MASK], 10 % a random word, 10 % stay. [BERT §3.1]

        Words that stay keep the model from trusting what it sees. At least one item of a set is
        chosen: else 0.85^5 = 44 % of the sets of five would have nothing to predict (deviation 5).

        Returns:
            inputs and labels int64 (B, L): the token ID of a chosen word.
        """
        choose, mask, replace = noise  # (B, L) each
        is_word = ids >= FIRST_WORD_ID
        is_chosen = is_word & (choose < self.mask_rate)
        if not self.config.order:  # the item of each set whose number in choose is the smallest
            smallest = choose.masked_fill(~is_word, torch.inf).argmin(1, keepdim=True)  # (B, 1)
            is_chosen = is_chosen.scatter(1, smallest, True) & is_word  # a set may have no item
        is_masked = is_chosen & (mask < 0.8)
        is_random = is_chosen & ~is_masked & (replace < 0.5)  # half of the other 20 %

        inputs = ids.masked_fill(is_masked, MASK)
        inputs = torch.where(is_random, random_words, inputs)
        labels = ids.masked_fill(~is_chosen, IGNORE_INDEX)
        return inputs, labels

    def predict(self, model, batch):
        """Score masked positions alone: logits (M, V), (M, k, R) or (M, m, m·(R + s))."""
        return model(batch.inputs, batch.key_mask, batch.positions).float()

    def cross_entropy(self, logits, batch):
        """Return the loss of logits: that of a word is the mean over its h classes."""
        classes = self.target.find_classes(batch.scored_labels())  # (M, h)
        logits = logits.flatten(0, -2)  # (M·h, C)
        loss = F.cross_entropy(logits, classes.flatten(), reduction="sum")
        return loss / classes.shape[1]

    # Evaluation

    def tally(self, logits, batch):
        """Return the target's tally, and label_counts (h, C): how often each class is a label."""
        labels = batch.scored_labels()
        classes = self.target.find_classes(labels)  # (M, h)
        counts = self.target.tally(logits, labels, self.find_excluded(batch))
        counts["label_counts"] = count_classes(classes, logits.shape[-1])
        return counts

    def find_excluded(self, batch):
        """Return the words that are no predictions of each scored position, int64 (M, E).

        These are the other items of its set, by number, and -1 is none (deviation 4). The inputs
        have them all if one item is masked and none replaced, as in evaluations of pretrain.py
        (corrupt_batch). A text has no such words, and E is 0: a word may be there twice.
        """
        if self.config.order:
            return batch.positions.new_empty(len(batch.positions), 0)
        row = batch.positions // batch.inputs.shape[1]  # (M,)
        ids = batch.inputs[row]  # (M, L), the set
        is_special = ids < FIRST_WORD_ID
        # subtle: evaluate also takes batches of corrupt, where 10 % of the answers stay in the
        # inputs. An answer is no other item: if it were excluded, it would never be a hit
        is_answer = ids == batch.scored_labels().unsqueeze(1)
        return torch.where(is_special | is_answer, -1, ids - FIRST_WORD_ID)

    def metrics(self, sums):
        return self.target.metrics(sums)

    def expected_loss(self, word_counts, sums):
        label_counts = sums["label_counts"]
        h, C = label_counts.shape
        ids = FIRST_WORD_ID + torch.arange(len(word_counts))  # (W,), all words
        classes = self.target.find_classes(ids).cpu().numpy()  # (W, h)
        losses = []
        for j in range(h):
            counts = np.bincount(classes[:, j], word_counts, C)  # of each class in the corpus
            losses.append(unigram_loss(counts, label_counts[j]))
        return C, float(np.mean(losses))


@dataclass
class MaskedHashes(MaskedWords):
    """Masked words, or items, predicted by their hashes: training scores no word. [CM] [SB §2.4]"""

    head = "hash-mlm"

    @classmethod
    def from_run(cls, config, args, data, device):
        buckets = send(data.targets, device)
        bloom_map = data.tokenizer.coder.bloom_map
        if bloom_map is None:
            target = SketchTarget(buckets)
        else:
            target = DigestTarget(buckets, bloom_map, config.buckets)
        return cls(config, args.mask, target)


# By which classes a masked word is predicted


class Target:
    """Base class. A subclass has those methods that raise an error here.

    The methods of MaskedWords that call each:

        find_classes    cross_entropy, tally, expected_loss
        tally           tally
        metrics         metrics
    """

    def find_classes(self, labels):
        """Return the h classes of each word: token IDs (M,) to int64 (M, h)."""
        raise NotImplementedError

    def tally(self, logits, labels, exclude):
        """Rank the correct words, and return the counts that metrics needs, a dict of tensors.

        Args:
            logits: float (M, V) where a word is one class, else (M, h, C).
            labels: int64 (M,), token IDs of the correct words.
            exclude: int64 (M, E), other words that do not count, by number, -1 for none.

        Returns:
            dict of hits, int64 (3,), of count_hits, and of what a subclass adds.
        """
        raise NotImplementedError

    def metrics(self, sums):
        """Return what an evaluation reports, a dict of float. sums: as in Objective.metrics."""
        return measure_recall(sums["hits"], sums["scored"])


class RowTarget(Target):
    """A word is its row of a table: one softmax over all token IDs. [BERT §3.1]"""

    def find_classes(self, labels):
        """Return the class of each word, its ID: token IDs (M,) to (M, 1)."""
        return labels.unsqueeze(1)

    def tally(self, logits, labels, exclude):
        """Rank the words by logits (M, V). Special tokens are never predicted."""
        scores = logits[:, FIRST_WORD_ID:]  # (M, W)
        ranks = rank_scores(scores, labels - FIRST_WORD_ID, exclude)
        return dict(hits=count_hits(ranks))


@dataclass
class HashTarget(Target):
    """Base class: a word is h hashes. hashes_right is the share of those predicted right."""

    buckets: torch.Tensor  # integer (V, h), of each token ID

    def count_right(self, logits, labels):
        """Return how many of the hashes have the largest of their logits (M, h, C), int64 ()."""
        return (logits.argmax(-1) == self.find_classes(labels)).sum()

    def metrics(self, sums):
        metrics = super().metrics(sums)
        metrics["hashes_right"] = sums["hashes_right"] / sums["scored"] / self.buckets.shape[1]
        return metrics


class SketchTarget(HashTarget):
    """A word is the k buckets of its sketch. Each hash function has a softmax over R. [CM]"""

    def find_classes(self, labels):
        """Return the class of each hash, its bucket: token IDs (M,) to (M, k)."""
        return self.buckets[labels].long()

    def tally(self, logits, labels, exclude):
        """Rank the words by the logits (M, k, R) of their buckets, and count hashes_right."""
        logp = logits.log_softmax(-1)
        sketches = self.buckets[FIRST_WORD_ID:]  # (W, k)
        ranks = rank_words(logp, sketches, labels - FIRST_WORD_ID, exclude)
        return dict(hits=count_hits(ranks), hashes_right=self.count_right(logits, labels))


@dataclass
class DigestTarget(HashTarget):
    """An item, or phrase, is the m hash tokens of its Bloom digest. [SB §2.4]

    The maps share one table, in which each has a block of R + s rows, and the softmax of each token
    is over all of them. [SB §2.3]
    """

    bloom_map: BloomMap
    block_size: int  # R + s

    def find_classes(self, labels):
        """Return the class of each hash token, its row: token IDs (M,) to (M, m).

        For blocks of 10 rows the buckets 3 and 4 are the classes 3 and 14.
        """
        buckets = self.buckets[labels].long()  # (M, m)
        starts = self.block_size * torch.arange(buckets.shape[1], device=buckets.device)
        return buckets + starts

    def tally(self, logits, labels, exclude):
        """Search for the best items, as there may be too many to score all.

        certified counts for how many positions one round of search, with a beam of 20, proves that
        it has found the best 20 items.
        """
        logp = hash_logp(logits, self.bloom_map)  # (M, m, R)
        one_round = beam_search(logp, self.bloom_map, MAX_RECALL, exclude=exclude)
        # the ranks are those of a search until the best are proved. It begins with the same round:
        # together they take at most twice its time
        best = beam_search(logp, self.bloom_map, MAX_RECALL, rounds=None, exclude=exclude)
        ranks = rank_in_lists(best.ids, labels - FIRST_WORD_ID)
        return dict(
            hits=count_hits(ranks),
            hashes_right=self.count_right(logits, labels),
            certified=one_round.certified.sum())

    def metrics(self, sums):
        metrics = super().metrics(sums)
        metrics["certified"] = sums["certified"] / sums["scored"]
        return metrics


# Sampled softmax


@dataclass
class SampledWords(MaskedWords):
    """Masked words against a few thousand sampled words instead of all: sampled softmax. [SB §3.3]

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

    num_samples: int  # n

    @classmethod
    def from_run(cls, config, args, data, device):
        return cls(config, args.mask, RowTarget(), args.samples)

    def loss(self, model, batch):
        labels = batch.scored_labels()  # (M,)
        # on the CPU: the same samples on every device, and MPS has no float64. The generator is
        # that of PyTorch, which pretrain.py seeds before each step
        u = torch.rand(self.num_samples, dtype=torch.float64)
        words, log_q = sample_words(u, self.config.rows - FIRST_WORD_ID)
        samples = send(FIRST_WORD_ID + words, labels.device)  # (n,)
        log_q = send(log_q, labels.device)  # (n,)

        # One call scores everything: the columns are the M correct words, then the samples.
        # Position i needs column i, its own word, and all samples. The other M - 1 are scored for
        # nothing: a model has one list of columns for all positions
        columns = torch.cat([labels, samples])  # (M + n,)
        logits = model(batch.inputs, batch.key_mask, batch.positions, columns).float()
        correct = logits.diagonal()  # (M,), column i of row i
        others = logits[:, len(labels):]  # (M, n)

        others = others - (log_q + math.log(self.num_samples))
        is_correct = samples == labels.unsqueeze(1)
        others = others.masked_fill(is_correct, -torch.inf)
        candidates = torch.cat([correct.unsqueeze(1), others], 1)  # (M, 1 + n)
        losses = candidates.logsumexp(1) - correct  # (M,)
        return losses.sum()


def sample_words(u, W):
    """Return the words that uniform u draws of W, int64 (n,), and log q, float32 (n,).

    u is float64 (n,), in [0, 1). Words are numbered by frequency. Word r of W is drawn with the
    probability q = log((r + 2) / (r + 1)) / log(W + 1), about proportional to 1 / (r + 1). The q of
    words 0 .. r add up to log(r + 2) / log(W + 1). For W = 3:

        word r             0            1               2
        q                  0.50         0.29            0.21
        u that draws it    0 .. 0.50    0.50 .. 0.79    0.79 .. 1

    A uniform u draws the first word whose sum exceeds u. It is (W + 1)^u - 1, rounded down:
    u = 0.6 draws word 1, since 4^0.6 - 1 = 1.3.
    """
    words = (u * math.log(W + 1)).exp().long() - 1
    words = words.clamp(max=W - 1)  # where exp was rounded up to W + 1
    # log((r + 2) / (r + 1)) = log1p(1 / (r + 1))
    q = (1 / (words.double() + 1)).log1p() / math.log(W + 1)
    return words, q.log().float()


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
