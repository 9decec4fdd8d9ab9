"""The heads of a model: what becomes of the vectors of its last layer. One class per head.

Sources:
    [BERT] Devlin et al. 2019
    [SR] Yamaguchi et al. 2021, Shuffle+Random
    [SB] Anderson et al. 2020, Superbloom
    [CM] Median is all you need, a proposal
Out of scope: labels and losses (objectives.py), and results as a user reads them (readouts.py).
Notation:
    B batch   L positions   d hidden size (width)   M masked positions   N rows of a table
    k hash functions of R buckets each   s special tokens
    m vectors of an item or word: 1, but for bloom, which has several

    in HEADS   scores                                   logits
    sr         three classes of each word               (B, L, 3)
    span       begin and end of an answer               (B, L, 2)
    classify   the labels of a text                     (B, labels)
    mlm        the words of a table, for a masked word  (M, N)
    hash-mlm   the hashes of a masked word or item      (M, k, R), or (M, m, m·(R + s))

A new head is a class here, and its line in HEADS.
"""

import torch
import torch.nn as nn
import torch.nn.functional as F

from embeddings import EMBEDDINGS, new_table


class Head(nn.Module):
    """Base class. A subclass makes its matrices, and has the method forward, which returns logits.

    Attributes of a class:
        method: the method of infer.Predictor for it, and its key in readouts.READOUTS.
        predicts_rows: it scores rows of a table at masked positions, which [MASK] marks.
        scales_init: its matrices start with the std of deviation 1 of model.py.

    Model calls forward by predicts_rows, with the vectors x of the last layer:

        False   (x, key_mask)       x float (B, L, d), the mean of the m vectors of a position;
                                    key_mask bool (B, L), False = padding, or None
        True    (x, table, rows)    x float (M, m, d), at the masked positions; table float (N, d),
                                    rows of the embedding, None: the head has a table of its own;
                                    rows int64 (num_sampled,), those to score, for head mlm
                                    alone; None: all
    """

    method = None
    predicts_rows = False
    scales_init = False

    @staticmethod
    def fits(c):
        """Return whether the head can stand on the encoder of a Config."""
        return c.order  # a set has no text to label


# A score for each class at each position


class PositionHead(Head):
    """One linear layer at each position: logits (B, L, num_classes), a number of the subclass."""

    def __init__(self, c):
        super().__init__()
        self.dropout = nn.Dropout(c.dropout)
        self.linear = nn.Linear(c.width, self.num_classes)

    def forward(self, x, key_mask):
        return self.linear(self.dropout(x))


class ShuffleRandomHead(PositionHead):
    """Is a word intact 0, shuffled 1 or random 2? [SR §3]"""

    method = "detect"
    num_classes = 3


class SpanHead(PositionHead):
    """Is a word the first, or the last, of an answer? [BERT §4.2]"""

    method = "answer"
    scales_init = True
    num_classes = 2


# A score for each label of a text


class TextHead(Head):
    """Two layers on one vector of the text: logits (B, labels). [BERT §4.1]"""

    method = "classify"
    scales_init = True

    def __init__(self, c):
        super().__init__()
        self.pool = c.pool
        self.dropout = nn.Dropout(c.dropout)
        self.dense = nn.Linear(c.width, c.width)
        self.out = nn.Linear(c.width, c.labels)

    def forward(self, x, key_mask):
        x = self.pool_positions(x, key_mask)
        x = self.dense(self.dropout(x)).tanh()
        return self.out(self.dropout(x))

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


class MaskedWordHead(Head):
    """Which word was masked? Dense layer, GELU, norm, product with a table of words. [BERT §3.1]

    The logits are (M, N), or (M, num_sampled) of the rows that are asked for.

    Args:
        c: Config. If c.tied is not true, the head has a table of its own.
    """

    method = "fill_mask"
    predicts_rows = True

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

    def forward(self, x, table, rows):
        logits = self.score_rows(x, table, rows)  # (M, 1, N), as m is 1
        return logits.squeeze(1)

    def score_rows(self, x, table, rows):
        """Return the product of each vector with each row, (M, m, N)."""
        if table is None:
            table = self.table
        bias = self.bias
        if rows is not None:
            table = table[rows]
            bias = bias[rows]
        x = self.norm(F.gelu(self.transform(x)))
        if self.training:
            return F.linear(x, table, bias)
        # subtle: evaluate in float32. In bfloat16 many logits tie, and recall depends on the order.
        with torch.autocast(x.device.type, enabled=False):
            return F.linear(x.float(), table.float(), bias.float())


class MaskedHashHead(MaskedWordHead):
    """Which hashes has the masked word? The rows are buckets of its hash functions. [SB §2.3] [CM]

    A word has one vector, and each of its k hash functions a block of R rows. All are scored by
    that vector: logits (M, k, R). An item of bloom has m vectors, and each is compared with the
    rows of all m blocks: logits (M, m, m·(R + s)).
    """

    method = "predict_missing"

    def __init__(self, c):
        super().__init__(c)
        self.num_hashes = c.hashes
        self.is_stacked = EMBEDDINGS[c.emb].is_stacked

    @staticmethod
    def fits(c):
        return c.code_format != "row"

    @staticmethod
    def count_rows(c):
        return c.hashes * c.buckets  # buckets: R of a sketch, R + s of bloom

    def forward(self, x, table, rows):
        assert rows is None, "rows: a sample of rows has no blocks"
        logits = self.score_rows(x, table, rows)  # (M, m, rows)
        if self.is_stacked:
            return logits
        return logits.squeeze(1).unflatten(1, (self.num_hashes, -1))  # (M, k, R)


HEADS = {
    "sr": ShuffleRandomHead,
    "mlm": MaskedWordHead,
    "hash-mlm": MaskedHashHead,
    "classify": TextHead,
    "span": SpanHead,
}
