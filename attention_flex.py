"""LSH attention of attention.py by FlexAttention, for a GPU: another form of attention_fast.py.

Read attention_fast.py first: this file takes its cells, its extra key, and its example. Bucket by
bucket the host has to wait for the sizes of the cells. Here no shape depends on the data, so it
never waits: FlexAttention skips the blocks of the sorted matrix of scores that hold no pair.
attention_fast.lsh_attention_fast calls this file.

Notation:
    B batch   H heads   L positions   e head size   hq, hk hash buckets of queries and keys
    cell       the queries and the keys of one sequence that share a bucket
    extra key  one key that stands for all keys outside a query's cell
    block      FLEX_BLOCK queries, and as many keys
"""

import functools

import torch
from torch.nn.attention import flex_attention as flex

from attention_fast import find_extra_key, number_cells

FLEX_BLOCK = 128  # queries, and keys, of a block of FlexAttention


def lsh_attention_flex(q, k, v, hq, hk, fill, key_mask):
    """Return lsh_attention by FlexAttention and the extra key, in float32.

    FlexAttention returns attention over the keys of a query's cell, and the log-sum-exp of their
    scores. They act together as one key with that score. A softmax of it and the extra score gives
    the weights of the two. No shape depends on the data, so the host never waits for the GPU.

    Args:
        q, k, v, hq, hk, fill, key_mask: as in attention_fast.lsh_attention_blocks.
    """
    kernel = compile_flex() if q.is_cuda else attend_flex

    # 1. Number the cells, and find the extra key of each query
    cell_q, cell_k = number_cells(hq, hk, key_mask)
    extra_score, extra_value = find_extra_key(
        q.float(), k.float(), v.float(), cell_q, cell_k, key_mask, fill)

    # 2. Sort the rows by cell, attend within cells, and put the queries back in order
    sorted_q, order_q = cell_q.sort()
    sorted_k, order_k = cell_k.sort()
    inside, lse = kernel(
        take_rows(q, order_q),
        take_rows(k, order_k),
        take_rows(v, order_k),
        find_blocks(sorted_q, sorted_k))
    place = order_q.argsort()
    inside = take_rows(inside, place)
    lse = lse.gather(2, place)
    lse = lse.unsqueeze(3)  # (B, H, L, 1)

    # 3. Merge. The softmax of two scores is the sigmoid of their difference
    extra_weight = torch.sigmoid(extra_score - lse)
    # a query without keys has lse -inf, and its result may be NaN
    inside = inside.masked_fill(lse == -torch.inf, 0.0)
    return (1 - extra_weight) * inside + extra_weight * extra_value


def take_rows(x, rows):
    """Return x (B, H, L, e) in the order of rows int64 (B, H, L)."""
    index = rows.unsqueeze(3).expand_as(x)
    return x.gather(2, index)


def find_blocks(sorted_q, sorted_k):
    """Return the BlockMask of queries and keys in the order of their cells, int64 (B, H, L) each.

    In the example, with blocks of two queries and two keys for this picture:

        cells      keys  0  0    0  6    6 12   12 16
        queries  0       #  #    #  .
                 0       #  #    #  .

                 0       #  #    #  .    .  .
                 6       .  .    .  #    #  .

                 6                .  #    #  .
                 6                .  #    #  .

                12                        .  #    #  .
                12                        .  #    #  .

    FlexAttention skips a block (blank) where the range of cells of its queries and that of its keys
    do not overlap. In the others it computes all scores, and is_same_cell masks those of two cells
    (.). With more positions, a larger share of the blocks lies far from the diagonal.
    """
    L = sorted_q.shape[2]
    first = torch.arange(0, L, FLEX_BLOCK, device=sorted_q.device)  # positions
    last = (first + FLEX_BLOCK - 1).clamp(max=L - 1)
    # the lowest and the highest cell of each block's queries, and of its keys
    low_q = sorted_q[..., first].unsqueeze(3)  # (B, H, blocks of queries, 1)
    high_q = sorted_q[..., last].unsqueeze(3)
    low_k = sorted_k[..., first].unsqueeze(2)  # (B, H, 1, blocks of keys)
    high_k = sorted_k[..., last].unsqueeze(2)
    # two ranges overlap where each begins before the other ends
    is_read = (low_q <= high_k) & (low_k <= high_q)  # (B, H, blocks of queries, of keys)
    # For each block of queries BlockMask wants the number of blocks of keys to read, and a list of
    # all blocks of keys in which those come first. Sorting 1 (is read) before 0 makes that list
    count = is_read.sum(3).int()
    read_first = is_read.int().argsort(descending=True, stable=True).int()

    def is_same_cell(b, h, i, j):
        return sorted_q[b, h, i] == sorted_k[b, h, j]

    return flex.BlockMask.from_kv_blocks(
        count,
        read_first,
        BLOCK_SIZE=FLEX_BLOCK,
        mask_mod=is_same_cell,
        seq_lengths=(L, L))


def attend_flex(q, k, v, blocks):
    """Return softmax(q kᵀ / √e) v over the pairs of a BlockMask, and log-sum-exps (B, H, L)."""
    if not hasattr(flex, "AuxRequest"):  # torch 2.8
        return flex.flex_attention(q, k, v, block_mask=blocks, return_lse=True)
    request = flex.AuxRequest(lse=True)
    out, aux = flex.flex_attention(q, k, v, block_mask=blocks, return_aux=request)
    return out, aux.lse


@functools.cache
def compile_flex():
    """Return attend_flex, which is compiled at its first call."""
    return torch.compile(attend_flex)
