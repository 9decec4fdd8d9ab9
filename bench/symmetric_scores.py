"""pretrain.py with symmetric scores of all pairs, the dense twin of --lsh_pairs upper.

    python -m bench.symmetric_scores --preset bert-lsh --attn full

Pairs (i, j) and (j, i) share the score of <q_i, k_j>, i <= j, as with --lsh_buckets 1 --lsh_pairs
upper, where all pairs collide; this is about four times as fast. The flags are those of
pretrain.py.
"""

import math
from unittest import mock

import torch.nn.functional as F

import attention
import pretrain
from support.flags import build_parser  # noqa: F401, its flags


def symmetric_attention(q, k, v, *, key_mask=None, dropout=0.0):
    """Return attention like full_attention, whose scores below the diagonal mirror those above."""
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])  # (B, H, L, L)
    scores = scores.triu() + scores.triu(1).transpose(-2, -1)
    weights = attention.masked_softmax(scores, attention.widen_mask(key_mask))
    return F.dropout(weights, dropout) @ v


def use_symmetric_scores():
    """Return a context in which dense attention has symmetric scores."""
    return mock.patch.object(attention, "full_attention", symmetric_attention)


def main(argv=None):
    """Pre-train as argv says (default: the command line); return the last evaluation."""
    with use_symmetric_scores():
        return pretrain.main(argv)


if __name__ == "__main__":
    main()
