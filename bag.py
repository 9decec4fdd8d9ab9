"""Hashed bag of words beside an encoder: label scores per hash bucket of words, without a vocabulary.

Paper map:    [FH] HashedBag
Sources:      [FH] Weinberger et al. 2009, Feature Hashing for Large Scale Multitask Learning. The sum of a
              linear and a deep model is that of Cheng et al. 2016, Wide & Deep Learning.
Deviations:   [FH] also hashes each word to a sign, so that collisions cancel on average.
Out of scope: codes of words (tokenizer.py), which tasks have a bag (finetune.py).
Notation:     B batch   L positions   C code numbers per word   V words   N rows
Demo:         python bag.py
"""

from hashlib import md5

import torch
import torch.nn as nn
import torch.nn.functional as F


class HashedBag(nn.Module):
    """Add GAIN / √L times the sum of the rows of a text's words to an encoder's logits. [FH]

    In training each text's encoder logits are 0 with probability 0.5, and the bag then predicts alone.
    Otherwise the encoder memorizes the texts, and the bag learns nothing. In evaluation both parts count.

    Args: rows int N; labels int.
    Shape: rows int64 (B, L) of words, key_mask bool (B, L), True = a word, or None, and logits (B, labels) of
        the encoder, to (B, labels).
    """
    GAIN = 30  # the bag learns as fast as the encoder at one learning rate: Adam's step is that rate

    def __init__(self, rows, labels):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(rows, labels))  # (N, labels)

    def hash_codes(self, codes):
        """Return a row int64 (V,) for the codes of each word, integer (V, C): equal codes share a row."""
        factors = torch.randint(2**31, codes.shape[1:], generator=torch.Generator().manual_seed(0))
        return (codes.long() * factors.to(codes.device)).sum(1) % (2**31 - 1) % len(self.weight)

    def forward(self, rows, key_mask, logits):
        scores = F.embedding(rows, self.weight)  # (B, L, labels)
        is_word = torch.ones_like(rows) if key_mask is None else key_mask.long()  # (B, L)
        if self.training:
            logits = logits * (torch.rand_like(logits[:, :1]) < 0.5)
        scale = self.GAIN * is_word.sum(1, keepdim=True).clamp(min=1).rsqrt()  # (B, 1)
        return logits + scale * (scores * is_word.unsqueeze(-1)).sum(1)


def main(argv=None):
    """Learn which of two labels six texts have, without an encoder, and print the score of each word."""
    texts = ["a fine and moving film", "fine acting", "fine cast"], ["a dull film", "dull cast", "dull plot"]
    words = sorted({word for label in texts for text in label for word in text.split()})
    bag = HashedBag(1_024, 2)
    codes = torch.tensor([list(md5(word.encode(), usedforsecurity=False).digest()) for word in words])
    row = dict(zip(words, bag.hash_codes(codes)))
    optimizer = torch.optim.Adam(bag.parameters(), 0.01)
    for _ in range(20):
        losses = []
        for label, some in enumerate(texts):
            for text in some:
                rows = torch.stack([row[word] for word in text.split()]).unsqueeze(0)  # (1, L)
                losses.append(F.cross_entropy(bag(rows, None, torch.zeros(1, 2)), torch.tensor([label])))
        optimizer.zero_grad()
        torch.stack(losses).mean().backward()
        optimizer.step()
    print(f"three texts of each label: {', '.join(texts[0])} / {', '.join(texts[1])}\n\n"
          "   word  row of 1,024  score of the first label minus the second")
    for word in words:
        first, second = bag.weight[row[word]].tolist()
        print(f"{word:>7}  {row[word]:12}  {first - second:+.2f}")


if __name__ == "__main__":
    main()
