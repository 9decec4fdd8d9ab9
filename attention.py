"""Attention between positions: (B, H, L, e) queries, keys and values -> the same shape.

Sources   [V] Vaswani et al. 2017, Attention Is All You Need
Map       [V §3.2.1] full_attention
Not here  the projections to queries, keys and values (model.py); hashing of *words* (hashing.py).
Departs   1. The kernel is torch's scaled_dot_product_attention, but where it is slow (see full_attention).
Letters   B batch   H heads   L positions   e width of a head
Try       python attention.py
"""

import math

import torch
import torch.nn.functional as F


def full_attention(q, k, v, *, key_mask=None, dropout=0.0):
    """softmax(q kᵀ / √e) v over all keys that are not padding. [V §3.2.1]

    in:  q, k, v (B, H, L, e); key_mask bool (B, L), True where there is a word, None without padding;
         dropout, the share of attention weights set to 0 (training only)
    out: (B, H, L, e); a row whose every key is padding comes out 0

    Without padding no mask is made: flash kernels take none, and a pre-training batch has no padding.
    In bfloat16 on a CPU the lines below are faster than torch's kernel there, forward and backward, twice at
    L 128, and no slower up to L 1,024 (python bench.py attention). Elsewhere the kernel wins.
    """
    if q.device.type == "cpu" and q.dtype == torch.bfloat16 and q.shape[-2] <= 1024:
        scores = (q / math.sqrt(q.shape[-1])) @ k.transpose(-2, -1)  # (B, H, L, L)
        if key_mask is not None:
            scores = scores.masked_fill(~key_mask[:, None, None, :], -torch.inf)
        weights = scores.softmax(-1)
        if key_mask is not None:
            weights = weights.masked_fill(~key_mask[:, None, None, :], 0.0)  # a row of only -inf: NaN
        return F.dropout(weights, dropout, training=dropout > 0) @ v
    mask = None if key_mask is None else key_mask[:, None, None, :]  # (B, 1, 1, L)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout)


def full_attention_reference(q, k, v, *, key_mask=None):
    """The same, written out: the oracle of the tests, and the formula to read. [V §3.2.1]

    in, out: as full_attention, without dropout; costs an (L, L) matrix per head
    """
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])  # (B, H, L, L)
    if key_mask is not None:
        scores = scores.masked_fill(~key_mask[:, None, None, :], -torch.inf)
    # a row of only -inf has softmax NaN; torch's kernel says 0, and so do we
    return scores.softmax(-1).nan_to_num(0.0) @ v


def main(argv=None):
    """Attend over a line of six positions, the last two of them padding, and show the weights."""
    torch.manual_seed(0)
    q, k = torch.randn(2, 1, 1, 6, 16)  # (B, H, L, e)
    key_mask = torch.tensor([[True] * 4 + [False] * 2])
    one = torch.eye(6)[None, None]  # v = 1: out = weights
    weights = full_attention_reference(q, k, one, key_mask=key_mask)[0, 0]
    for row in weights:
        print("  ".join(f"{w:.2f}" for w in row))
    v = torch.randn(1, 1, 6, 16)
    gap = full_attention(q, k, v, key_mask=key_mask) - full_attention_reference(q, k, v, key_mask=key_mask)
    print(f"largest difference between kernel and formula: {gap.abs().max():.1e}")


if __name__ == "__main__":
    main()
