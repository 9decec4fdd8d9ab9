"""The heads of a model: what becomes of the vectors of its last layer. One class per head.

Sources:
    [BERT] Devlin et al. 2019
    [SR] Yamaguchi et al. 2021, Shuffle+Random
    [SB] Anderson et al. 2020, Superbloom
    [CM] Median is all you need, a proposal
Out of scope: labels and losses (objectives.py), and results as a user reads them (infer.py).
Notation:
    B batch   L positions   d hidden size (width)   M masked positions   N rows of a table
    k hash functions of R buckets each   m vectors of an item, s special tokens (bloom)

    in HEADS   scores                                   logits
    sr         three classes of each word               (B, L, 3)
    span       begin and end of an answer               (B, L, 2)
    classify   the labels of a text                     (B, labels)
    mlm        the words of a table, for a masked word  (M, N)
    hash-mlm   the hashes of a masked word or item      (M, k, R), or (M, m, m·(R + s))

A head is a class and its line in HEADS. Others ask of the class:

    method          the method of infer.Predictor for it, and its key in infer.READOUTS
    predicts_rows   whether it scores rows of a table at masked positions, which [MASK] marks
    scales_init     whether its matrices start with the std of deviation 1 of model.py
    fits            (Config) -> whether it can stand on such an encoder
    forward         (x, key_mask) -> logits; if predicts_rows (x, table, rows) -> logits
"""

import torch
import torch.nn as nn
import torch.nn.functional as F

from embeddings import new_table


# A score for each class at each position


class PositionHead(nn.Linear):
    """One linear layer at each position: x (B, L, d) to logits (B, L, num_classes)."""

    predicts_rows = False

    def __init__(self, c):
        super().__init__(c.width, self.num_classes)
        self.dropout = nn.Dropout(c.dropout)

    @staticmethod
    def fits(c):
        return c.order  # a set has no text to label

    def forward(self, x, key_mask):
        return super().forward(self.dropout(x))


class ShuffleRandomHead(PositionHead):
    """Is a word intact 0, shuffled 1 or random 2? [SR §3]"""

    method = "detect"
    scales_init = False
    num_classes = 3


class SpanHead(PositionHead):
    """Is a word the first, or the last, of an answer? [BERT §4.2]"""

    method = "answer"
    scales_init = True
    num_classes = 2


# A score for each label of a text


class TextHead(nn.Sequential):
    """Two layers on one vector of the text: x (B, L, d) to logits (B, labels). [BERT §4.1]"""

    method = "classify"
    predicts_rows = False
    scales_init = True

    def __init__(self, c):
        super().__init__(
            nn.Dropout(c.dropout), nn.Linear(c.width, c.width), nn.Tanh(),
            nn.Dropout(c.dropout), nn.Linear(c.width, c.labels))
        self.pool = c.pool

    @staticmethod
    def fits(c):
        return c.order

    def forward(self, x, key_mask):
        return super().forward(self.pool_positions(x, key_mask))

    def pool_positions(self, x, key_mask):
        """Return the vector of [CLS], or the mean of all positions but padding, (B, d)."""
        if self.pool == "cls":
            return x[:, 0]
        if key_mask is None:
            return x.mean(1)
        weight = key_mask.unsqueeze(-1).to(x)  # (B, L, 1)
        total = (x * weight).sum(1)
        return total / weight.sum(1).clamp(min=1)  # 0 for a text of padding alone


# A score for each row of a table, at masked positions


class MaskedWordHead(nn.Module):
    """Which word was masked? Dense layer, GELU, norm, product with a table of words. [BERT §3.1]

    Args:
        c: Config. If c.tied is not true, the head has a table of its own.

    Shape:
        x float (..., d) and table float (N, d), the head's own or that of the embedding, to logits
        (..., N), or (..., num_sampled) of the rows int64 (num_sampled,).
    """

    method = "fill_mask"
    predicts_rows = True
    scales_init = False

    def __init__(self, c):
        super().__init__()
        num_rows = self.count_rows(c)  # N
        self.transform = nn.Linear(c.width, c.width)
        self.norm = nn.LayerNorm(c.width)
        self.bias = nn.Parameter(torch.zeros(num_rows))
        if not c.tied:
            self.table = new_table(num_rows, c.width)  # (N, d)

    @staticmethod
    def fits(c):
        return c.code_format == "row"  # each word has a row to be predicted as

    @staticmethod
    def count_rows(c):
        return c.rows

    def forward(self, x, table, rows=None):
        bias = self.bias
        if rows is not None:
            table = table[rows]
            bias = bias[rows]
        x = self.norm(F.gelu(self.transform(x)))
        if self.training:
            return F.linear(x, table, bias)
        # subtle: evaluate in float32. In bfloat16 many logits tie, and recall depends on the order.
        with torch.autocast(x.device.type, enabled=False):
            return F.linear(x.float(), table, bias)


class MaskedHashHead(MaskedWordHead):
    """Which hashes has the masked word? The rows are buckets of its hash functions. [SB §2.3] [CM]

    Shape:
        A word has one vector: x (M, d) to logits (M, k, R). Each hash function has a block of R
        rows, and all are scored by that vector.
        An item of bloom has m vectors: x (M, m, d) to (M, m, m·(R + s)), or (M, m, num_sampled).
        Each vector is compared with the rows of all blocks.
    """

    method = "predict_missing"

    def __init__(self, c):
        super().__init__(c)
        self.num_hashes = c.hashes

    @staticmethod
    def fits(c):
        return c.code_format != "row"

    @staticmethod
    def count_rows(c):
        return c.hashes * c.buckets

    def forward(self, x, table, rows=None):
        logits = super().forward(x, table, rows)
        if x.ndim == 2:  # one vector of each word
            logits = logits.unflatten(-1, (self.num_hashes, -1))  # (M, k, R)
        return logits


HEADS = {
    "sr": ShuffleRandomHead,
    "mlm": MaskedWordHead,
    "hash-mlm": MaskedHashHead,
    "classify": TextHead,
    "span": SpanHead,
}
