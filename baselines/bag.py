"""Hashed bag of words beside an encoder: label scores per hash bucket of words, without a vocabulary.

Paper map:    [FH] HashedBag
Sources:      [FH] Weinberger et al. 2009, Feature Hashing for Large Scale Multitask Learning. The weight of a
              word in few texts is that of Spärck Jones 1972. The sum of a linear and a deep model is that of
              Cheng et al. 2016, Wide & Deep Learning.
Deviations:   [FH] also hashes each word to a sign, so that collisions cancel on average.
Out of scope: codes of words (tokenizer.py), which tasks have a bag (finetune.py).
Notation:     B batch   L positions   C code numbers per word   V words   N rows
Demo:         python baselines/bag.py
"""

from hashlib import md5

import torch
import torch.nn as nn
import torch.nn.functional as F


class HashedBag(nn.Module):
    """Add GAIN · Σ x_r row_r / √Σ x_r² to an encoder's logits, with x_r = idf_r · ln(1 + n_r). [FH]

    A text has row r n_r times; idf is 1 for all rows until `set_idf` has counted the texts that have them.
    In training dropout takes the encoder away from half of the texts, and the bag predicts them alone.
    Otherwise the encoder memorizes the texts, and the bag learns nothing.

    Args: rows int N; labels int.
    Shape: rows int64 (B, L) of words, key_mask bool (B, L), True = a word, or None, and logits (B, labels) of
        the encoder, to (B, labels).
    """
    GAIN = 30  # the bag learns as fast as the encoder at one learning rate: Adam's step is that rate
    DECAY = 2  # weight decay of AdamW: each step shrinks the rows by 2 · lr, so few texts leave little

    def __init__(self, rows, labels):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(rows, labels))  # (N, labels)
        self.register_buffer("idf", torch.ones(rows))  # (N,)

    def hash_codes(self, codes):
        """Return a row int64 (V,) for the codes of each word, integer (V, C): equal codes share a row."""
        factors = torch.randint(2**31, codes.shape[1:], generator=torch.Generator().manual_seed(0))
        return (codes.long() * factors.to(codes.device)).sum(1) % (2**31 - 1) % len(self.weight)

    def set_idf(self, texts):
        """Set idf = 1 + ln((1 + n) / (1 + n_r)), where n_r of the n texts, int64 (L,) each, have row r."""
        counts = torch.cat([rows.unique() for rows in texts]).bincount(minlength=len(self.idf))
        self.idf.copy_(1 + ((1 + len(texts)) / (1 + counts)).log())

    def forward(self, rows, key_mask, logits):
        N, texts = len(self.weight), torch.arange(len(rows), device=rows.device)
        keys = rows + N * texts.unsqueeze(1)  # (B, L): the row of another text has another number
        keys, counts = keys[slice(None) if key_mask is None else key_mask].unique(return_counts=True)
        text, row = keys // N, keys % N  # of each distinct row of each text, in order
        x = self.idf[row] * counts.log1p()
        x = x / x.new_zeros(len(texts)).index_add(0, text, x * x).sqrt()[text]  # a text's x have length 1
        start = torch.searchsorted(text, texts)
        scores = F.embedding_bag(row, self.weight, start, mode="sum", per_sample_weights=x)  # (B, labels)
        keep = F.dropout(torch.ones_like(logits[:, :1]), 0.5, self.training)  # in training 0 or 2, else 1
        return keep * logits + self.GAIN * scores


def main(argv=None):
    """Learn which of two labels six texts have, without an encoder, and print the score of each word."""
    texts = ["a fine and moving film", "fine acting", "fine cast", "a dull film", "dull cast", "dull plot"]
    words = sorted({*" ".join(texts).split()})
    bag = HashedBag(1_024, 2)
    codes = torch.tensor([list(md5(word.encode(), usedforsecurity=False).digest()) for word in words])
    row = dict(zip(words, bag.hash_codes(codes)))
    rows = [torch.stack([row[word] for word in text.split()]) for text in texts]
    labels = torch.tensor([0, 0, 0, 1, 1, 1])
    bag.set_idf(rows)
    optimizer = torch.optim.Adam(bag.parameters(), 0.01)
    for _ in range(20):
        logits = torch.cat([bag(text.unsqueeze(0), None, torch.zeros(1, 2)) for text in rows])  # (6, 2)
        optimizer.zero_grad()
        F.cross_entropy(logits, labels).backward()
        optimizer.step()
    print(f"three texts of each label: {', '.join(texts[:3])} / {', '.join(texts[3:])}\n\n"
          "   word  row of 1,024   idf  score of the first label minus the second")
    for word, n in row.items():
        print(f"{word:>7}  {n:12}  {bag.idf[n]:.2f}  {-bag.weight[n].diff().item():+.2f}")


if __name__ == "__main__":
    main()
