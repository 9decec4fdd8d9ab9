"""Pre-training objectives: what each corrupts, what the model should predict, and the loss.

An objective is one class. The base class shows which methods it has, and how they call each other.
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
    2. Random words are words of the corpus. The authors give Add and Proj bits that no word has.
    3. The loss of an item is the mean over its k tokens.
    4. The other items of a set are excluded as predictions. The lists of [SB] include them.
    5. At least one item of a set is masked. [SB §3.1] masks 15 %, which may be none.
Notation:
    ids and labels are token IDs. The number of a word, or item, is its ID minus FIRST_WORD_ID
    B batch   L positions   M scored positions   V token IDs   W words, or items of a set
    k hashes of a word: of a sketch, or the maps of an item, which [SB] calls m
    S buckets of a hash, config.buckets; for a map the special tokens are among them
    C classes of a softmax: V, or S of a sketch, or k·S of a Bloom map   E excluded words
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from bloom import BloomMap, beam_search, hash_logp
from metrics import MAX_RECALL, count_classes, count_hits, count_table, measure_recall
from metrics import measure_table, rank_in_lists, rank_scores, rank_words, unigram_loss
from support.common import send
from tokenizer import FIRST_WORD_ID, MASK

IGNORE_INDEX = -100  # the label of a position that is not scored: torch's own default


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

        each batch                      corrupt_batch    corrupt
        each batch of a training step   loss             predict, cross_entropy: SampledWords has
                                                         a loss of its own
        each batch of an evaluation     evaluate         predict, cross_entropy, tally
        the end of an evaluation        metrics, expected_loss: with the sums of what evaluate
                                        returned for its batches
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
        """Corrupt a data.batches.Draw by its noise, or mask what it says; return a Batch."""
        if draw.is_masked is None:
            inputs, labels = self.corrupt(draw.ids, draw.noise, draw.random_words)
        else:  # held-out item sets
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

    def predict(self, model, batch):
        return model(batch.inputs, batch.key_mask).float()  # (B, L, 3)

    def cross_entropy(self, logits, batch):
        return F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), reduction="sum")

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

        Words that stay keep the model from trusting what it sees. Of a set at least one item is
        chosen: else 0.85^5 = 44 % of the sets of five would have nothing to predict (deviation 5).

        Returns:
            inputs and labels int64 (B, L): the token ID of a chosen word.
        """
        choose, mask, replace = noise  # (B, L) each
        is_word = ids >= FIRST_WORD_ID
        is_chosen = is_word & (choose < self.mask_rate)
        if not self.config.order:  # the first item of each set that a larger rate would choose
            first = choose.masked_fill(~is_word, torch.inf).argmin(1, keepdim=True)  # (B, 1)
            is_chosen = is_chosen.scatter(1, first, True) & is_word  # a set may have no item
        is_masked = is_chosen & (mask < 0.8)
        is_random = is_chosen & ~is_masked & (replace < 0.5)  # half of the other 20 %

        inputs = ids.masked_fill(is_masked, MASK)
        inputs = torch.where(is_random, random_words, inputs)
        labels = ids.masked_fill(~is_chosen, IGNORE_INDEX)
        return inputs, labels

    def predict(self, model, batch):
        """Score masked positions alone: logits (M, V), never (B, L, V)."""
        return model(batch.inputs, batch.key_mask, batch.positions).float()

    def cross_entropy(self, logits, batch):
        return F.cross_entropy(logits, batch.scored_labels(), reduction="sum")

    def find_classes(self, labels):
        """Return the class of each word in the softmax: token IDs (M,) to (M, 1)."""
        return labels.unsqueeze(1)  # its ID. A subclass has k classes of each word

    # Evaluation

    def tally(self, logits, batch):
        """Return a dict.

        hits            int64 (3,), of count_hits
        label_counts    int64 (k, C), how often each class is a label
        ...             the counts of rank_labels
        """
        classes = self.find_classes(batch.scored_labels())
        ranks, counts = self.rank_labels(logits, batch)
        return dict(
            hits=count_hits(ranks),
            label_counts=count_classes(classes, logits.shape[-1]),
            **counts)

    def rank_labels(self, logits, batch):
        """Rank each correct word among all; a subclass that ranks otherwise has its own.

        Returns:
            ranks: int64 (M,), how many other words score at least as much.
            counts: dict of tensors, what else a subclass counts for its metrics.
        """
        words = batch.scored_labels() - FIRST_WORD_ID
        scores = logits[:, FIRST_WORD_ID:]  # (M, W): special tokens are never predicted
        return rank_scores(scores, words, self.find_excluded(batch)), {}

    def find_excluded(self, batch):
        """Return the words that are no predictions of each scored position, int64 (M, E).

        These are the other items of its set, by number, and -1 is none (deviation 4). A text has
        no such words, and E is 0: a word may be there twice.
        """
        if self.config.order:
            return batch.positions.new_empty(len(batch.positions), 0)
        row = batch.positions // batch.inputs.shape[1]  # (M,)
        ids = batch.inputs[row]  # (M, L), the set
        is_special = ids < FIRST_WORD_ID
        # subtle: held-out sets hide the answer. But 10 % of those that corrupt chooses stay in the
        # input, and must not be excluded
        is_answer = ids == batch.scored_labels().unsqueeze(1)
        return torch.where(is_special | is_answer, -1, ids - FIRST_WORD_ID)

    def metrics(self, sums):
        return measure_recall(sums["hits"], sums["scored"])

    def expected_loss(self, word_counts, sums):
        label_counts = sums["label_counts"]  # (k, C)
        num_classes = label_counts.shape[1]
        # how often each class occurs in the corpus
        ids = FIRST_WORD_ID + torch.arange(len(word_counts))
        classes = self.find_classes(ids).cpu()  # (W, k)
        counts = count_classes(classes, num_classes, torch.from_numpy(word_counts)).numpy()
        losses = [unigram_loss(c, label_c) for c, label_c in zip(counts, label_counts)]  # k
        return num_classes, float(np.mean(losses))


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

    num_samples: int  # n

    options = ("mask", "samples")

    @classmethod
    def from_run(cls, config, args, data, device):
        return cls(config, args.mask, args.samples)

    def draw_samples(self, device):
        """Draw n words, frequent ones more often; return token IDs int64 (n,), log q float32 (n,).

        Words are numbered by frequency. Word r of W is drawn with the probability
        q = log((r + 2) / (r + 1)) / log(W + 1), about proportional to 1 / (r + 1). The q of words
        0 .. r add up to log(r + 2) / log(W + 1). For W = 3:

            word r             0            1               2
            q                  0.50         0.29            0.21
            u that draws it    0 .. 0.50    0.50 .. 0.79    0.79 .. 1

        A uniform u draws the first word whose sum exceeds u. It is (W + 1)^u - 1, rounded down:
        u = 0.6 draws word 1, since 4^0.6 - 1 = 1.3.
        """
        W = self.config.rows - FIRST_WORD_ID  # words
        # on the CPU: the same samples on every device, and MPS has no float64. The generator is
        # that of PyTorch, which pretrain.py seeds before each step
        u = torch.rand(self.num_samples, dtype=torch.float64)
        word = (u * math.log(W + 1)).exp().long() - 1
        word = word.clamp(max=W - 1)  # where exp was rounded up to W + 1
        # log((r + 2) / (r + 1)) = log1p(1 / (r + 1))
        q = (1 / (word.double() + 1)).log1p() / math.log(W + 1)
        return send(FIRST_WORD_ID + word, device), send(q.log().float(), device)

    def loss(self, model, batch):
        labels = batch.scored_labels()  # (M,)
        samples, log_q = self.draw_samples(labels.device)  # (n,) each

        # One call scores everything: the columns are the M correct words, then the samples.
        # Position i needs column i, its own word, and all samples
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


@dataclass
class MaskedHashes(MaskedWords):
    """Masked words, predicted by the k hash buckets of their sketch alone. [CM]

    Training scores buckets. Evaluation ranks words by the scores of their buckets.
    """

    targets: torch.Tensor  # integer (V, k), the buckets of each token ID

    head = "hash-mlm"

    @classmethod
    def from_run(cls, config, args, data, device):
        return cls(config, args.mask, send(data.targets, device))

    def cross_entropy(self, logits, batch):
        """Return the loss of logits (M, k, C): that of a word is the mean over its k hashes."""
        classes = self.find_classes(batch.scored_labels())  # (M, k)
        loss = F.cross_entropy(logits.flatten(0, 1), classes.flatten(), reduction="sum")
        return loss / classes.shape[1]

    def find_classes(self, labels):
        """Return the class of each hash in its softmax, the bucket: token IDs (M,) to (M, k)."""
        return self.targets[labels].long()

    # Evaluation

    def rank_labels(self, logits, batch):
        """Rank each correct word by the scores of its buckets, and count hashes_right."""
        words = batch.scored_labels() - FIRST_WORD_ID
        digests = self.targets[FIRST_WORD_ID:]  # (W, k)
        ranks = rank_words(logits.log_softmax(-1), digests, words, self.find_excluded(batch))
        return ranks, dict(hashes_right=self.count_right_hashes(logits, batch))

    def count_right_hashes(self, logits, batch):
        """Return how many of the M·k hashes have the largest logit, int64 ()."""
        is_right = logits.argmax(-1) == self.find_classes(batch.scored_labels())  # (M, k)
        return is_right.sum()

    def metrics(self, sums):
        metrics = super().metrics(sums)
        metrics["hashes_right"] = sums["hashes_right"] / sums["scored"] / self.config.hashes
        return metrics


@dataclass
class MaskedDigests(MaskedHashes):
    """Masked items, or phrases, predicted by the k hash tokens of their Bloom digest. [SB §2.4]

    Evaluation searches for the best items, as there may be too many to score all.
    """

    bloom_map: BloomMap

    @classmethod
    def from_run(cls, config, args, data, device):
        bloom_map = data.tokenizer.coder.bloom_map
        return cls(config, args.mask, send(data.targets, device), bloom_map)

    def find_classes(self, labels):
        """Return the class of each hash in its softmax: token IDs (M,) to (M, k).

        The k maps share one table of k·S rows, one block after another, and the softmax of each
        hash is over all: for S = 10 the buckets 3 and 4 are the classes 3 and 14. [SB §2.3]
        """
        buckets = super().find_classes(labels)  # (M, k)
        starts = self.config.buckets * torch.arange(buckets.shape[1], device=buckets.device)
        return buckets + starts

    # Evaluation

    def rank_labels(self, logits, batch):
        """Find the place of each correct item among the best; NOT_FOUND: it is not there.

        certified counts for how many positions one round of search, with a beam of 20, proves that
        it has found the best 20 items.
        """
        logp = hash_logp(logits, self.bloom_map)  # (M, k, S less special tokens)
        exclude = self.find_excluded(batch)
        one_round = beam_search(logp, self.bloom_map, MAX_RECALL, exclude=exclude)
        # the ranks are those of a search until the best are proved
        best = beam_search(logp, self.bloom_map, MAX_RECALL, rounds=None, exclude=exclude)
        ranks = rank_in_lists(best.ids, batch.scored_labels() - FIRST_WORD_ID)
        return ranks, dict(
            hashes_right=self.count_right_hashes(logits, batch),
            certified=one_round.certified.sum())

    def metrics(self, sums):
        metrics = super().metrics(sums)
        metrics["certified"] = sums["certified"] / sums["scored"]
        return metrics


OBJECTIVES = {
    "sr": ShuffleRandom,
    "mlm": MaskedWords,
    "sampled": SampledWords,
    "hash-mlm": MaskedHashes,  # or MaskedDigests, of items and phrases
}


def build_objective(config, args, data, device):
    """Return the objective of a run of pretrain.py, with what it needs of settings and data.

    Args:
        config: model.Config.
        args: Namespace, all settings.
        data: data.loading.Data.
        device: torch.device, of the model.
    """
    objective_class = OBJECTIVES[args.objective]
    if objective_class is MaskedHashes and data.tokenizer.coder.bloom_map is not None:
        objective_class = MaskedDigests
    return objective_class.from_run(config, args, data, device)
