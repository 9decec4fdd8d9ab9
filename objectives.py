"""Pre-training objectives: how each corrupts its input, its loss, and what its evaluation reports.

Paper map:    [HF §3.6] ShuffleRandom   [SR §3] ShuffleRandom   [BERT §3.1] mask_words   [SB §3.1] mask_words
              [SB §3.3] SampledWords   [SB §2.4] MaskedHashes   [CM] MaskedHashes
Sources:      [HF] Xue & Aletras 2022, HashFormers   [SR] Yamaguchi et al. 2021, Shuffle+Random
              [BERT] Devlin et al. 2019   [SB] Superbloom, ICLR 2020 submission   [CM] Median is all you need
Out of scope: batches and the noise that decides what is corrupted (data/batches.py); heads (model.py).
Deviations:   1. Words are shuffled within their row. The authors' one permutation for a batch moves fewer.
              2. Random words are words of the corpus. The authors give Add and Proj bits that no word has.
              3. Items that a set already shows are excluded as predictions. The paper's lists include them.
              4. Of a set at least one item is masked; the loss of an item is the mean over its m tokens.
Notation:     B batch   L positions   M masked positions   V words   N rows   S sampled rows   m hashes of an
              item   k hash functions of a sketch   R buckets of one      Demo: python objectives.py
"""

import math

import numpy as np
import torch
import torch.nn.functional as F

from bloom import BloomMap, beam_search, hash_logp

IGNORE_INDEX = -100  # the label of a position that is not scored: torch's own default
RECALL = (1, 10, 20)


def entropy(p):
    """Return the entropy in nats of counts p (n,)."""
    p = p[p > 0] / p.sum()
    return float(-(p * np.log(p)).sum())


class Objective:
    """Base class: what an objective knows of the run, and what the training loop calls.

    A subclass states head, one of model.py's, and num_counts, and adds two methods:
        evaluate(model, inputs, labels) -> summed loss; counts (num_counts,), which add up over batches
        expected_loss(word_counts (V,), counts) -> number of classes; loss in nats by their frequencies alone

    Args: config, model.Config; mask_rate, share of words to mask; mask_id and first_word_id,
        IDs of [MASK] and of the first word; targets integer (V, k) by token ID, the hashes to predict, each
        in 0 .. R-1 of its block; bloom_map, bloom.BloomMap of items, or None; num_samples int S.
    """
    def __init__(self, config, mask_rate=None, mask_id=None, first_word_id=None, targets=None,
                 bloom_map=None, num_samples=None):
        self.config, self.bloom_map, self.targets = config, bloom_map, targets
        self.mask_rate, self.mask_id, self.first_word_id = mask_rate, mask_id, first_word_id
        self.num_samples = num_samples

    def corrupt(self, ids, noise, random_words):
        """Return inputs, labels int64 (B, L). Args: as mask_words: ids, noise, random_words."""
        return mask_words(ids, noise, random_words, self.mask_rate, self.mask_id, self.first_word_id,
                          is_set=not self.config.order)

    def loss(self, model, inputs, labels):
        """Return the loss summed over scored positions, a 0-dim tensor with gradient."""
        return self.evaluate(model, inputs, labels)[0]

    def metrics(self, counts):
        """Return dict of float from the counts (num_counts,) of all batches: shares of the last count.

        certified: share of items that one beam of 20 certifies; hashes_right: share of hashes predicted.
        """
        names = [*(f"rec@{k}" for k in RECALL), "certified", "hashes_right"]  # of mlm the first three
        shares = {name: float(n) / max(float(counts[-1]), 1) for name, n in zip(names, counts[:-1])}
        return {name: share for name, share in shares.items() if name != "certified" or self.bloom_map}

    def visible_items(self, inputs, positions):
        """Return the items of each masked position's set, int64 (M, L), -1 for none; or None for text."""
        if not self.config.order:  # a set holds an item once, so these cannot be answers; // gives the row
            return (inputs[positions // inputs.shape[1]] - self.first_word_id).clamp(min=-1)


def masked_logits(model, inputs, labels, **options):
    """Return the masked positions (M,) of the flattened batch, their labels (M,) and logits (M, ...)."""
    positions = (labels.flatten() != IGNORE_INDEX).nonzero().squeeze(1)
    logits = model(inputs, masked_positions=positions, **options).float()  # never (B, L, N)
    return positions, labels.flatten()[positions], logits


class ShuffleRandom(Objective):
    """Shuffle+Random (S+R): is each word intact, shuffled or random? [HF §3.6] [SR §3]"""
    head, num_counts, p = "sr", 9, 0.10

    def corrupt(self, ids, noise, random_words):
        """Shuffle some words among themselves and replace others; labels 0 intact, 1 shuffled, 2 random.

        noise[0] shuffles 10 % of words, noise[1] replaces 10 % of the others, noise[2] is the new order:
            ids        a b c d e f        shuffled . x . x . x          positions in order    1 3 5 | 0 2 4
                                          these trade, 0 2 4 stay       in random order       5 1 3 | 0 2 4
            inputs     a f c b e d   <-   position 1 gets what was at 5, position 3 what was at 1, ...
        """
        is_word = ids >= self.first_word_id
        is_shuffled = is_word & (noise[0] < self.p)
        is_random = is_word & ~is_shuffled & (noise[1] < self.p)
        # stable sorts: after the shuffled positions come the others, in the same order twice
        in_order = (~is_shuffled).int().argsort(dim=1, stable=True)
        random_order = noise[2].masked_fill(~is_shuffled, 2.0).argsort(dim=1, stable=True)
        inputs = torch.where(is_random, random_words, ids.scatter(1, in_order, ids.gather(1, random_order)))
        # subtle: labeled by what changed, not by what was chosen: "the" for "the" is no shuffle
        labels = torch.where(inputs == ids, 0, torch.where(is_shuffled, 1, 2))
        return inputs, labels.masked_fill(~is_word, IGNORE_INDEX)

    def evaluate(self, model, inputs, labels):
        """Return the summed loss, and the counts of 3 · label + prediction, int64 (9,)."""
        logits, labels = model(inputs).flatten(0, 1).float(), labels.flatten()  # (B·L, 3), (B·L,)
        loss = F.cross_entropy(logits, labels, ignore_index=IGNORE_INDEX, reduction="sum")
        return loss, torch.bincount((labels * 3 + logits.argmax(1))[labels != IGNORE_INDEX], minlength=9)

    def metrics(self, counts):
        """Return accuracy, the accuracy of the majority class, F1 by class and its mean, of counts (9,)."""
        table = np.asarray(counts, float).reshape(3, 3)
        total, f1 = max(table.sum(), 1), 2 * table.diagonal() / np.maximum(table.sum(0) + table.sum(1), 1)
        values = np.array([np.trace(table) / total, table.sum(1).max() / total, *f1, f1.mean()]).tolist()
        return dict(zip("accuracy majority f1_intact f1_shuffled f1_random macro_f1".split(), values))

    def expected_loss(self, word_counts, counts):
        return 3, entropy(np.reshape(counts, (3, 3)).sum(1))  # of the labels of this corpus


def mask_words(ids, noise, random_words, p, mask_id, first_word_id, is_set=False):
    """Mask words: of a share p, 80 % become [MASK], 10 % any word, and 10 % stay. [BERT §3.1]

    The last 10 % keep the model from trusting what it sees. Of a set at least the item of lowest noise is
    chosen: else 0.85^5 = 44 % of sets of five items would have nothing to predict. [SB §3.1]
    Args: ids, random_words int64 (B, L); noise float (3, B, L) in [0, 1): row 0 chooses words, row 1 masks
        them, row 2 replaces them.  Returns: inputs, labels int64 (B, L).
    """
    is_word, is_chosen = ids >= first_word_id, noise[0] < p
    if is_set:  # 2.0 is above every noise
        is_chosen = is_chosen.scatter(1, noise[0].masked_fill(~is_word, 2.0).argmin(1, keepdim=True), True)
    is_chosen = is_chosen & is_word
    is_masked = is_chosen & (noise[1] < 0.8)
    is_random = is_chosen & ~is_masked & (noise[2] < 0.5)
    inputs = torch.where(is_random, random_words, ids.masked_fill(is_masked, mask_id))
    return inputs, ids.masked_fill(~is_chosen, IGNORE_INDEX)


class MaskedWords(Objective):
    """Masked-word prediction over a vocabulary. [BERT §3.1]"""
    head, num_counts = "mlm", 4

    def loss(self, model, inputs, labels):
        _, rows, logits = masked_logits(model, inputs, labels)  # the row of a word is its ID
        return F.cross_entropy(logits, rows, reduction="sum")

    def evaluate(self, model, inputs, labels):
        """Return the summed loss, and how many words are among the best 1, 10, 20, and in all, int64 (4,)."""
        positions, rows, logits = masked_logits(model, inputs, labels)
        items = logits[:, self.first_word_id:]  # special tokens are never predicted
        if (visible := self.visible_items(inputs, positions)) is not None:
            items = F.pad(items, (1, 0)).scatter(1, visible + 1, -torch.inf)[:, 1:]  # column 0 takes the -1
        best = items.topk(min(max(RECALL), items.shape[1])).indices + self.first_word_id  # (M, 20)
        counts = [*((best == rows.unsqueeze(1))[:, :k].sum() for k in RECALL), rows.new_tensor(len(rows))]
        return F.cross_entropy(logits, rows, reduction="sum"), torch.stack(counts)

    def expected_loss(self, word_counts, counts):
        return self.config.rows, entropy(word_counts)


class SampledWords(MaskedWords):
    """Masked words against a few thousand sampled rows instead of all: sampled softmax. [SB §3.3]

    Rank r of n words is drawn with q = log((r + 2) / (r + 1)) / log(n + 1), about proportional to 1 / r. With
    log(S q) subtracted from the logits, the sum of exp is an unbiased estimate of that over all words but the
    correct one, which is included once. BPE pieces are not numbered by frequency, so it is noisier for them.
    """
    def loss(self, model, inputs, labels):
        rows, n = labels[labels != IGNORE_INDEX], self.config.rows - self.first_word_id  # (M,)
        u = torch.rand(self.num_samples, device=rows.device, dtype=torch.float64)
        rank = ((u * math.log(n + 1)).exp().long() - 1).clamp(0, n - 1)  # (S,), from 0: exp is in [1, n + 1)
        # subtle: in float32 (rank + 2) / (rank + 1) of a rare row is 1
        log_q = ((1 / (rank.double() + 1)).log1p() / math.log(n + 1)).log().float()
        logits = masked_logits(model, inputs, labels, rows=torch.cat([rows, rank + self.first_word_id]))[2]
        correct = logits[:, :len(rows)].diagonal()  # (M,): of (M, M + S), column i is the i-th word
        others = logits[:, len(rows):] - (log_q + math.log(self.num_samples))
        others = others.masked_fill(rank == (rows - self.first_word_id).unsqueeze(1), -torch.inf)
        return (torch.cat([correct.unsqueeze(1), others], 1).logsumexp(1) - correct).sum()


class MaskedHashes(Objective):
    """Predict the hash buckets of masked words or items; only evaluation scores words. [SB §2.4] [CM]"""
    head, num_counts = "hash-mlm", 6

    def hash_loss(self, words, logits):
        """Return the summed loss of words (M,), and the classes to predict, int64 (M, k)."""
        targets = self.targets[words].long()
        if self.bloom_map:  # logits (M, m, m·R) are over the blocks of all maps, not (M, k, R)
            targets += self.config.buckets * torch.arange(targets.shape[1], device=words.device)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
        return loss / targets.shape[1], targets

    def loss(self, model, inputs, labels):
        return self.hash_loss(*masked_logits(model, inputs, labels)[1:])[0]

    def evaluate(self, model, inputs, labels):
        """Return the loss and counts (6,): words among the best 1, 10, 20; certified; hashes right; all."""
        positions, words, logits = masked_logits(model, inputs, labels)
        loss, targets = self.hash_loss(words, logits)
        items, visible = words - self.first_word_id, self.visible_items(inputs, positions)
        if self.bloom_map:
            logp, beam = hash_logp(logits, self.bloom_map), max(RECALL)
            best = beam_search(logp, self.bloom_map, beam, beam, rounds=None, exclude=visible)[0]  # exact
            certified = beam_search(logp, self.bloom_map, beam, beam, exclude=visible)[2]  # in one round
            rank = ((best == items.unsqueeze(1)).cumsum(1) == 0).sum(1)  # items before the correct one
        else:
            rank = rank_words(logits.log_softmax(-1), self.targets[self.first_word_id:], items, visible)
            certified = torch.zeros_like(rank)  # there is no beam
        correct = (logits.argmax(-1) == targets).double().mean(1).sum()
        hits = [(rank < k).sum() for k in RECALL]
        return loss, torch.stack([*hits, certified.sum(), correct, words.new_tensor(len(words))])

    def expected_loss(self, word_counts, counts):
        targets = self.targets[self.first_word_id:].cpu().numpy()[:len(word_counts)]
        unigram = np.mean([entropy(np.bincount(column, word_counts)) for column in targets.T])
        return self.config.buckets * (self.config.hashes if self.bloom_map else 1), float(unigram)


def rank_words(logp, digests, words, exclude=None):
    """Return how many other words score at least what the correct one does, int64 (M,).

    Args: logp (M, k, R), of which a score is a sum of k; digests integer (V, k), each word's k buckets; words
        int64 (M,), the correct ones; exclude int64 (M, E), words that do not count, -1 for none; or None.
    """
    M, k, R = logp.shape
    if exclude is not None:  # the correct word always counts
        exclude = exclude.masked_fill(exclude == words.unsqueeze(1), -1)
    rows, ranks = digests.int() + R * torch.arange(k, dtype=torch.int32, device=digests.device), []
    for part in (slice(i, i + 128) for i in range(0, M, 128)):  # bounds the memory of scores
        scores = F.embedding_bag(rows, logp[part].flatten(1).T.contiguous(), mode="sum")  # (V, 128)
        if exclude is not None:
            scores = F.pad(scores, (0, 0, 1, 0)).scatter(0, exclude[part].T + 1, -torch.inf)[1:]
        ranks.append((scores >= scores.gather(0, words[part].unsqueeze(0))).sum(0) - 1)
    return torch.cat(ranks) if ranks else words


OBJECTIVES = {"sr": ShuffleRandom, "mlm": MaskedWords, "sampled": SampledWords, "hash-mlm": MaskedHashes}


def main(argv=None):
    """Corrupt a sentence in two ways; print what the model sees and the labels that it has to predict."""
    names, g = "[PAD] [MASK] every quick brown fox jumps over the lazy dog".split(), torch.Generator()
    ids = torch.arange(2, len(names)).unsqueeze(0)  # (1, 9)
    noise = torch.rand(3, *ids.shape, generator=g.manual_seed(2)) / 4  # low: corrupts more of a short text
    random_words = torch.randint(2, len(names), ids.shape, generator=g)
    inputs, labels = ShuffleRandom(None, first_word_id=2).corrupt(ids, noise, random_words)
    masked, answers = mask_words(ids, noise, random_words, 0.15, mask_id=1, first_word_id=2)
    for title, row, texts in (("text", ids, names), ("Shuffle+Random", inputs, names),
                              ("  labels", labels, ["intact", "shuffled", "random"]),
                              ("Masked words", masked, names), ("  labels", answers, names),
                              ("  or hashes", answers, ["", "", *map(str, BloomMap(9, 3).digest.tolist())])):
        print(f"{title:15}" + "".join(f"{texts[i] if i >= 0 else '-':>9}" for i in row[0].tolist()))
    print("\nA label of - is not scored. Hashes are buckets of two Bloom maps. Rates are 4 times as usual.")


if __name__ == "__main__":
    main()
