"""Bag of words: scores of labels per word, or per hash bucket of words beside an encoder.

Paper map:
    [FH] HashedBag
Sources:
    [FH] Weinberger et al. 2009, Feature Hashing for Large Scale Multitask Learning
    Spärck Jones 1972: the idf of a row
    Cheng et al. 2016, Wide & Deep Learning: the sum of a linear and a deep model
Out of scope: codes of words (tokenizer.py), which tasks have a bag (finetune.py).
Deviations:
    1. [FH] also hashes each word to a sign, so that collisions cancel on average.
    2. In training the encoder's logits count twice in half of the texts, and not at all in the
       others. In evaluation they count once.
Notation:
    B batch   L positions   C code numbers of a word   V words   N rows
    P distinct pairs (text, row) of a batch
Demo: python -m baselines.bag
"""

import torch
import torch.nn as nn
import torch.nn.functional as F

from model import Config, Model

MERSENNE_PRIME = 2**31 - 1  # modulus of the hash function: larger than any number of rows


class HashedBag(nn.Module):
    """Add 30 · Σ x_r w_r / √Σ x_r² to an encoder's logits, where x_r = idf_r · ln(1 + n_r). [FH]

    n_r is how often the text has row r, and w_r are the scores of row r. All idf are 1 until
    `set_idf` counts the texts that have each row.

    Args:
        num_rows: int, N, number of hash buckets.
        labels: int, number of labels, or 1 for a regression.

    Shape:
        rows: int64 (B, L), the row of each token in 0 .. N-1, from hash_codes. Not checked.
        key_mask: bool (B, L), False = padding, or None without padding. HybridModel counts [CLS]
            and [SEP], too, whose rows act as a bias.
        logits: float (B, labels), from the encoder.
        output: float (B, labels).

    Example:
        bag = HashedBag(65_536, 2)
        rows = bag.hash_codes(codes)  # (V,), once
        logits = bag(rows[ids], key_mask, encoder(ids))
    """

    # Both constants were chosen on a few tasks (docs/finetuning.md). The size of each has a reason.
    # The bag must learn as fast as an encoder with the same learning rate. Adam changes each number
    # by about lr per step. A text of 20 words, all different and of equal idf, has 20 weights x of
    # 1/√20. All 20 rows move by lr, so one step changes the score of the text by 30 · 20/√20 · lr =
    # 134 · lr. The last layer of a head of width 128 reads 128 values of tanh, each at most 1, and
    # changes the score by at most 128 · lr.
    GAIN = 30

    # Weight decay of AdamW, which finetune.py sets: a step multiplies the rows by 1 - 2 · lr, so
    # that a row that only a few texts taught goes back to 0. An epoch of SST-2 has 2,105 steps,
    # with an lr of 0.0005 on average. After it e^(-2 · 2105 · 0.0005) = 12 % are left of what a
    # text taught the bag, until that text comes again.
    DECAY = 2

    def __init__(self, num_rows, labels):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(num_rows, labels))  # (N, labels)
        self.register_buffer("idf", torch.ones(num_rows))  # (N,)

    def forward(self, rows, key_mask, logits):
        B = len(rows)
        N = len(self.weight)

        # Count the distinct rows of each text. A key is N · text + row. With N = 10, texts of the
        # rows [7, 7, 2] and [2, 9] have the keys [7, 7, 2] and [12, 19]. Sorted, without repeats:
        #     key   2  7  12  19        text  0  0  1  1
        #     count 1  2   1   1        row   2  7  2  9        start  0, 2
        numbers = torch.arange(B, device=rows.device)  # (B,), of the texts
        keys = N * numbers.unsqueeze(1) + rows  # (B, L)
        if key_mask is not None:
            keys = keys[key_mask]
        keys, counts = keys.unique(return_counts=True)  # (P,), (P,)
        pair_text = keys // N
        pair_row = keys % N
        start = torch.searchsorted(pair_text, numbers)  # (B,), where each text begins

        # Weight each row of a text, and scale the weights of a text to length 1.
        x = self.idf[pair_row] * counts.log1p()  # (P,)
        squares = x.new_zeros(B).index_add(0, pair_text, x * x)  # (B,)
        x_unit = x / squares.sqrt()[pair_text]
        # a text without words has no pair, and the scores 0
        scores = F.embedding_bag(pair_row, self.weight, start, mode="sum",
                                 per_sample_weights=x_unit)

        # In training the bag predicts half of the texts alone. Otherwise the encoder memorizes the
        # texts, and the bag learns nothing. The switch is 0 or 2: the encoder learns logits that
        # fit when they count twice, and in evaluation they count once.
        if self.training:
            switch = F.dropout(torch.ones_like(logits[:, :1]), 0.5)  # (B, 1)
            logits = switch * logits
        return logits + self.GAIN * scores

    def hash_codes(self, codes):
        """Choose a row for each word: Σ code number · random factor, modulo a prime, modulo N.

        Args:
            codes: integer (V, C). Words with equal codes share a row.

        Returns:
            int64 (V,), the same on every machine with one version of PyTorch.
        """
        generator = torch.Generator().manual_seed(0)
        factors = torch.randint(2**31, codes.shape[1:], generator=generator)  # (C,)
        sums = (codes.long() * factors.to(codes.device)).sum(1)  # (V,)
        return sums % MERSENNE_PRIME % len(self.weight)

    def set_idf(self, texts):
        """Set idf_r = 1 + ln((1 + n) / (1 + d_r)), where d_r of the n texts have row r.

        Args:
            texts: sequence of int64 (L,), the rows of each text without padding.
        """
        rows = torch.cat([text.unique() for text in texts])
        counts = rows.bincount(minlength=len(self.idf))  # (N,), d_r
        shares = (1 + len(texts)) / (1 + counts)
        self.idf.copy_(1 + shares.log())


class HybridModel(Model):
    """An encoder that classifies texts, and the hashed bag of words beside it.

    The encoder reads the first config.length tokens of a text, the bag reads all of them.
    finetune.py gives pairs of texts no bag.

    Args:
        config: model.Config with head "classify" and bag, the rows of the bag, above 0.
    """

    def __init__(self, config):
        super().__init__(config)
        self.bag = HashedBag(config.bag, config.labels)
        self.register_buffer("bag_rows", None, persistent=False)  # (V,), set by set_codes

    def set_codes(self, codes):
        """Set the codes of all words, as Model does, and their rows of the bag."""
        super().set_codes(codes)
        rows = self.bag.hash_codes(torch.as_tensor(codes, device="cpu"))
        self.bag_rows = rows.to(self.device)

    def cut(self, ids, key_mask):
        """Return the first config.length positions of both, which the encoder reads."""
        if key_mask is not None:
            key_mask = key_mask[:, :self.config.length]
        return ids[:, :self.config.length], key_mask

    def encode(self, ids, key_mask=None):
        """Return the encoder's outputs (B, min(L, config.length), d), which infer.py reads."""
        ids, key_mask = self.cut(ids, key_mask)
        return super().encode(ids, key_mask)

    def forward(self, ids, key_mask=None):
        """Return logits (B, labels) of ids int64 (B, L) and key_mask bool (B, L) or None."""
        first_ids, first_mask = self.cut(ids, key_mask)
        logits = super().forward(first_ids, first_mask)
        return self.bag(self.bag_rows[ids], key_mask, logits)


class BagOfWords(nn.Module):
    """The bag alone, with a row for each word: what a model without an encoder would score.

    finetune.py trains it like the encoder, and prints its score beside the encoder's.

    Args:
        texts: list of integer arrays (L,), the token IDs of the training texts, for the idf.
        num_ids: int, number of token IDs.
        labels: int, number of labels, or 1 for a regression.
        length: int, positions, by which finetune.py chooses how many texts it scores at once.
    """

    def __init__(self, texts, num_ids, labels, length):
        super().__init__()
        self.config = Config(length=length)
        self.bag = HashedBag(num_ids, labels)
        self.bag.set_idf([torch.as_tensor(ids).long() for ids in texts])

    def forward(self, ids, key_mask=None):
        """Return logits (B, labels) of ids int64 (B, L) and key_mask bool (B, L) or None."""
        no_encoder = ids.new_zeros((len(ids), self.bag.weight.shape[1]), dtype=torch.float32)
        return self.bag(ids, key_mask, no_encoder)


def main():
    """Learn the labels of six texts without an encoder, and print the score of each word."""
    texts = ["fine film", "fine acting", "fine cast", "dull film", "dull cast", "dull plot"]
    labels = torch.tensor([0, 0, 0, 1, 1, 1])
    words = " ".join(texts).split()
    codes = [list(word.ljust(8).encode()) for word in words]  # letters, with spaces up to 8

    bag = HashedBag(1_024, 2)
    rows = bag.hash_codes(torch.tensor(codes)).view(6, 2)  # two words a text
    bag.set_idf(rows)
    optimizer = torch.optim.Adam(bag.parameters(), 0.01)
    no_encoder = torch.zeros(6, 2)
    for _ in range(20):
        loss = F.cross_entropy(bag(rows, None, no_encoder), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    print("label 0:", ", ".join(texts[:3]))
    print("label 1:", ", ".join(texts[3:]))
    print("\n   word  row of 1,024   idf  score of label 0 minus label 1")
    for word, row in sorted(set(zip(words, rows.flatten().tolist()))):
        score = bag.weight[row, 0] - bag.weight[row, 1]
        print(f"{word:>7}  {row:12}  {bag.idf[row]:.2f}  {score:+.2f}")


if __name__ == "__main__":
    main()
