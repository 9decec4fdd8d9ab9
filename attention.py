"""Attention over all pairs of positions, or with the scores of pairs that share a hash bucket.

Sources:
    [V] Vaswani et al. 2017, Attention Is All You Need
    [BL] Li & Yip 2024, BERT-LSH
Out of scope: causal masks; cross-attention, since q, k and v have one length.
Deviations:
    1. The paper fills a dense matrix of scores. The fast forms compute the scores of colliding
       pairs alone. The result is the same, up to rounding.
    2. Hyperplanes are drawn once, and again where you call SelfAttention.redraw. The authors' code
       draws them in every forward pass.
    3. The default is pairs="all". The authors' code has "upper".
    4. LSH attention is trained without attention dropout, as FlexAttention has none.
Notation:
    B batch   H heads   L positions   e head size   d hidden size   i query   j key
    n hash functions   r hyperplanes of a function ("bands" in the paper)
    hq, hk hash buckets of queries and keys, int64 (B, H, n, L)
    inside, outside: a key that shares a bucket with the query (they collide), and one that does not
Demo: python attention.py

A score is large where query and key point the same way, and such vectors usually share a hash
bucket. So LSH attention computes the scores inside alone. But that is no mask: in the paper a pair
that does not collide has the score 0, and so the weight exp(0) = 1. A query with c keys outside
reads the plain mean of their values, and gives it this share of its weight:

    c / (c + Σ exp(score))        the sum is over the keys inside

Random vectors collide with a probability P of about 1 / 2^r. So c and the sum both grow with L, and
the share hardly depends on it. For e 64 and 256 buckets:

    r hyperplanes                                            1       2       4       8
    share of the keys outside (outside_share_law)           36 %    60 %    86 %    98 %
    queries without a key inside, (1 - P)^L, for L = 128     0 %     0 %     0 %    37 %

The share is smaller where queries and keys are similar. fill="mask" is the other reading of the
idea: keys outside have no weight, and a query attends to its bucket and to itself.
"""

import functools
import math
import shutil
import warnings

import torch
import torch.nn as nn
import torch.nn.functional as F

FILLS = ("zero", "mask")  # what a pair that does not collide gets: the score 0, or no weight
# all: each pair has its own score. upper, as in the authors' code: the scores above the diagonal
# are mirrored below it
PAIRS = ("all", "upper")


# Attention over all pairs


def full_attention_reference(q, k, v, *, key_mask=None, dropout=0.0):
    """Return softmax(q kᵀ / √e) v over all keys that are not padding. [V §3.2.1]

    Args:
        q, k, v: float (B, H, L, e).
        key_mask: bool (B, L), True = attend, or None without padding. This is the opposite of the
            key_padding_mask of nn.MultiheadAttention.
        dropout: share of the attention weights set to 0. Pass it in training only.

    Returns:
        float (B, H, L, e). A query that attends to no key has the result 0.
    """
    e = q.shape[-1]
    scores = q @ k.transpose(-2, -1) / math.sqrt(e)  # (B, H, L, L)
    weights = masked_softmax(scores, widen_mask(key_mask))
    return F.dropout(weights, dropout) @ v


def masked_softmax(scores, is_key):
    """Return attention weights, (B, H, L, L) as scores; 0 where is_key is False. None: all keys."""
    if is_key is None:
        return scores.softmax(-1)
    # subtle: not -inf. Where no key is left, the softmax would be NaN
    lowest = torch.finfo(scores.dtype).min
    scores = scores.masked_fill(~is_key, lowest)
    weights = scores.softmax(-1)
    return weights.masked_fill(~is_key, 0.0)


def widen_mask(key_mask):
    """Return key_mask (B, L) as (B, 1, 1, L), for all heads and queries; None as None."""
    if key_mask is None:
        return None
    return key_mask[:, None, None, :]


# Hash buckets of queries and keys


@torch.no_grad()
def simhash(x, planes, coef, num_buckets):
    """Return the hash buckets of vectors. [BL §2.1]

    A vector lies above a hyperplane if its product with the hyperplane's normal is positive. Its
    bucket is the sum, mod num_buckets, of coef over the hyperplanes that it lies above:

        coef of 3 hyperplanes    9      12     3       bucket, num_buckets = 16
        a vector lies            above  above  below   (9 + 12) mod 16 = 5
        another lies             above  below  above   (9 + 3)  mod 16 = 12

    Hash queries and keys with the same hyperplanes.

    Args:
        x: float (B, H, L, e). A vector with NaN is above no hyperplane, so it has bucket 0.
        planes, coef: float32 (H, n, r, e), normals, and int64 (H, n, r), from draw_hyperplanes.
        num_buckets: int.

    Returns:
        int64 (B, H, n, L) in [0, num_buckets), computed in float32 under any autocast, without a
        gradient.

    Raises:
        ValueError: planes or coef has another size, or planes is rounded: in bfloat16 they would
            move about 0.4 % of the vectors to another bucket, with r = 8.
    """
    check_hyperplanes(x, planes, coef)
    with torch.autocast(x.device.type, enabled=False):
        products = torch.einsum("bhle,hnre->bhnlr", x.float(), planes)
    is_above = products > 0  # (B, H, n, L, r)
    terms = is_above * coef.unsqueeze(2)
    sums = terms.sum(-1)  # (B, H, n, L)
    return sums % num_buckets


def draw_hyperplanes(num_heads, num_functions, num_hyperplanes, head_size, num_buckets,
                     generator=None):
    """Sample the random hyperplanes and coefficients of simhash.

    Args:
        num_heads, num_functions, num_hyperplanes, head_size, num_buckets: int, H, n, r, e and
            the number of hash buckets.
        generator: torch.Generator on the CPU, so that a seed gives the same hash functions on every
            device. None takes PyTorch's own.

    Returns:
        planes float32 (H, n, r, e), the normals of the hyperplanes, with standard normal entries,
        and coef int64 (H, n, r), uniform in [0, num_buckets).

    Raises:
        ValueError: A number is 0. Without hyperplanes all vectors would share a bucket.
    """
    sizes = (num_heads, num_functions, num_hyperplanes, head_size, num_buckets)
    if min(sizes) < 1:
        raise ValueError(f"hyperplanes: expected sizes of at least 1, got {sizes}.")
    shape = (num_heads, num_functions, num_hyperplanes)
    planes = torch.randn(*shape, head_size, generator=generator, dtype=torch.float32, device="cpu")
    coef = torch.randint(num_buckets, shape, generator=generator, device="cpu")
    return planes, coef


def collisions(hq, hk):
    """Return whether query i and key j share a bucket of some function, bool (B, H, L, L)."""
    is_equal = hq.unsqueeze(-1) == hk.unsqueeze(-2)  # (B, H, n, L, L)
    return is_equal.any(2)


# Attention over colliding pairs


def lsh_attention_reference(q, k, v, hq, hk, *, fill="zero", pairs="all", key_mask=None):
    """Return LSH attention by the literal formula. [BL §2.2.2]

    Args:
        q, k, v: float (B, H, L, e).
        hq, hk: int64 (B, H, n, L), hash buckets of queries and keys, from simhash with the same
            hyperplanes.
        fill: "zero": a pair that does not collide has the score 0, as in the paper, so its weight
            is exp(0) = 1 before normalization. "mask": it has no weight, but a position always
            attends to itself, unless it is padding.
        pairs: "all": each pair has its own score. "upper": <q_i, k_j> and its collision for i <= j
            also serve (j, i), as in the authors' code. Then the result differs from full attention
            even if all pairs collide.
        key_mask: bool (B, L), True = attend, or None.

    Returns:
        float (B, H, L, e). A query that attends to no key has the result 0.
    """
    check_choices(fill, pairs)
    L, e = q.shape[2:]
    is_collision = collisions(hq, hk)  # (B, H, L, L)
    scores = q @ k.transpose(-2, -1) / math.sqrt(e)  # (B, H, L, L)

    if pairs == "upper":  # entry (j, i) below the diagonal becomes that of (i, j) above it
        scores = scores.triu() + scores.triu(1).transpose(-2, -1)
        is_collision = is_collision.triu() | is_collision.triu(1).transpose(-2, -1)

    is_key = widen_mask(key_mask)
    if fill == "zero":
        scores = scores.masked_fill(~is_collision, 0.0)
    else:
        is_itself = torch.eye(L, dtype=torch.bool, device=q.device)
        is_inside = is_collision | is_itself
        is_key = is_inside if is_key is None else is_inside & is_key

    return masked_softmax(scores, is_key) @ v


# Two laws: how often vectors collide, and what the keys outside weigh


def collision_probability(angle, num_hyperplanes, num_buckets, num_functions=1):
    """Return the probability that two vectors share a bucket. [BL §2.1, collision law]

    A random hyperplane passes between two vectors with probability angle/π, so they lie on the
    same side of all r hyperplanes of a function with probability p = (1 - angle/π)^r.
    Otherwise their sums still agree with probability 1/num_buckets. The paper prints
    p + 1/num_buckets, which can exceed 1.

    Args:
        angle: float or tensor, angle between the vectors in radians.
        num_hyperplanes, num_buckets, num_functions: int, r, the number of hash buckets, and n.

    Returns:
        1 - (1 - P)^n with P = p + (1 - p)/num_buckets.
    """
    p = (1 - angle / math.pi) ** num_hyperplanes
    P = p + (1 - p) / num_buckets
    return 1 - (1 - P) ** num_functions


def outside_share(q, k, hq, hk):
    """Return the share of each query's weight that keys outside have, (B, H, L), if fill="zero"."""
    e = q.shape[-1]
    is_outside = ~collisions(hq, hk)  # (B, H, L, L)
    scores = q @ k.transpose(-2, -1) / math.sqrt(e)
    weights = scores.masked_fill(is_outside, 0.0).softmax(-1)
    return (weights * is_outside).sum(-1)


def outside_share_law(head_size, num_hyperplanes, num_buckets):
    """Return about what outside_share is for independent vectors with standard normal entries.

    Their scores s are about normal(0, 1), and the angle of a pair is about acos(s / √e), so it
    collides with the probability P(s) of collision_probability. With means E over s, the share is

        E[1 - P] / (E[1 - P] + E[P exp(s)])
    """
    s = torch.linspace(-6, 6, 1001)
    density = torch.exp(-s.square() / 2)
    cosine = s / math.sqrt(head_size)
    angle = cosine.clamp(-1, 1).acos()
    P = collision_probability(angle, num_hyperplanes, num_buckets)
    outside = (density * (1 - P)).sum()
    inside = (density * P * s.exp()).sum()
    return (outside / (outside + inside)).item()


# A layer to copy


class SelfAttention(nn.Module):
    """Multi-head self-attention over all pairs, or over colliding pairs. [V §3.2.2] [BL Alg. 1]

    Under torch.compile LSH attention is a graph break. To train in bfloat16 use torch.autocast: the
    hyperplanes, buffers that are saved with the weights, have to stay float32.

    Args:
        hidden_size, num_heads: int, d and H. d is a multiple of H.
        attn: "full" or "lsh". The arguments after dropout are for "lsh" alone.
        dropout: share of the attention weights that training sets to 0, for "full" alone.
        num_functions, num_hyperplanes, num_buckets, generator: n, r and more, as in
            draw_hyperplanes.
        fill, pairs: as in lsh_attention.

    Shape:
        x float (B, L, d) and key_mask bool (B, L), True = attend, or None, to float (B, L, d).

    Raises:
        ValueError: A choice is unknown, d is no multiple of H, or a number for simhash is 0.

    Example:
        layer = SelfAttention(512, 8, attn="lsh")
        y = layer(torch.randn(2, 1024, 512))
    """

    def __init__(self, hidden_size, num_heads, *, attn="full", dropout=0.0, num_functions=1,
                 num_hyperplanes=8, num_buckets=256, fill="zero", pairs="all", generator=None):
        super().__init__()
        if attn not in ("full", "lsh"):
            raise ValueError(f"attn: expected full or lsh, got {attn!r}.")
        if num_heads < 1 or hidden_size % num_heads != 0:
            raise ValueError("hidden_size: expected a multiple of num_heads, "
                             f"got {hidden_size} and {num_heads}.")
        check_choices(fill, pairs)
        self.num_heads = num_heads
        self.attn = attn
        self.dropout = dropout
        self.num_buckets = num_buckets
        self.fill = fill
        self.pairs = pairs
        self.qkv = nn.Linear(hidden_size, 3 * hidden_size)
        self.out = nn.Linear(hidden_size, hidden_size)
        if attn == "lsh":
            shape = (num_heads, num_functions, num_hyperplanes)
            planes = torch.empty(*shape, hidden_size // num_heads, dtype=torch.float32)
            self.register_buffer("planes", planes)  # (H, n, r, e)
            self.register_buffer("coef", torch.empty(shape, dtype=torch.int64))  # (H, n, r)
            self.redraw(generator)

    def redraw(self, generator=None):
        """Draw new hyperplanes and coefficients, in place; requires attn="lsh". [BL §2.1]"""
        planes, coef = draw_hyperplanes(*self.planes.shape, self.num_buckets, generator)
        self.planes.copy_(planes)
        self.coef.copy_(coef)

    def project(self, x):
        """Return queries, keys and values, each (B, H, L, e), of x (B, L, d)."""
        qkv = self.qkv(x).unflatten(-1, (3, self.num_heads, -1))  # (B, L, 3, H, e)
        return qkv.permute(2, 0, 3, 1, 4).unbind()

    def forward(self, x, key_mask=None):
        """Map x (B, L, d) to (B, L, d)."""
        q, k, v = self.project(x)
        if self.attn == "full":
            dropout = self.dropout if self.training else 0.0
            a = full_attention(q, k, v, key_mask=key_mask, dropout=dropout)
        else:
            hq = simhash(q, self.planes, self.coef, self.num_buckets)  # (B, H, n, L)
            hk = simhash(k, self.planes, self.coef, self.num_buckets)
            a = lsh_attention(
                q, k, v, hq, hk,
                fill=self.fill,
                pairs=self.pairs,
                key_mask=key_mask)
        a = a.transpose(1, 2).flatten(2)  # (B, H, L, e) -> (B, L, H·e)
        return self.out(a)


# The same result, faster. If the literal formulas are all you need, stop here


# These sizes change the speed, and the result by rounding alone
MAX_FORMULA_BF16 = 512  # positions up to which full_attention of bfloat16 on a CPU is the formula
MAX_LITERAL = 256  # positions up to which impl="auto" takes the literal formula on a CPU
MAX_LITERAL_GPU = 512  # the same on a GPU
MIN_FLEX_HEAD = 16  # the narrowest head that FlexAttention compiles for a GPU
MAX_FORMULA_CELL = 64  # queries of a cell up to which attend is the formula, not PyTorch's kernel


def full_attention(q, k, v, *, key_mask=None, dropout=0.0):
    """Return full_attention_reference by PyTorch's kernel, which holds no (L, L) matrix. [V §3.2.1]

    Args and result are those of full_attention_reference. PyTorch's kernels have no second
    derivative.

    Raises:
        ValueError: If key_mask is not bool (B, L).
    """
    check_key_mask(key_mask, q)
    # For bfloat16 on a CPU the kernel was slower than the formula in a training step of 512
    # positions, and faster at 1,024 (batch 8)
    if q.is_cpu and q.dtype == torch.bfloat16 and q.shape[2] <= MAX_FORMULA_BF16:
        return full_attention_reference(q, k, v, key_mask=key_mask, dropout=dropout)
    is_key = widen_mask(key_mask)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=is_key, dropout_p=dropout)


def lsh_attention(q, k, v, hq, hk, *, fill="zero", pairs="all", key_mask=None, impl="auto"):
    """Return lsh_attention_reference by the form that is fastest here. [BL Alg. 1]

    Args:
        q, k, v, hq, hk, fill, pairs, key_mask: as in lsh_attention_reference.
        impl: "dense": the literal formula. "blocks": bucket by bucket, in float32 or float64; on a
            GPU do not allow TF32, which rounds the weight of the keys outside. "flex":
            FlexAttention, for a GPU, where it requires a C compiler and heads of at least 16.
            "auto": see choose_impl. torch.jit.trace always takes "dense".

    Returns:
        float (B, H, L, e), differentiable. A query that attends to no key has the result 0. NaN at
        a position, padding or not, may spread to all positions of its sequence. vmap takes "dense"
        alone.

    Raises:
        ValueError: An argument has another shape, n is 0, a choice is unknown, or impl does not
            serve: "blocks" and "flex" require n = 1 and pairs="all".

    Example:
        planes, coef = draw_hyperplanes(H, 1, 8, e, 256, torch.Generator().manual_seed(0))
        hq = simhash(q, planes, coef, 256)
        hk = simhash(k, planes, coef, 256)
        out = lsh_attention(q, k, v, hq, hk)
    """
    if torch.compiler.is_dynamo_compiling():
        # the shapes of the fast forms depend on the data, so torch.compile leaves them out
        uncompiled = uncompiled_lsh_attention()
        return uncompiled(q, k, v, hq, hk, fill=fill, pairs=pairs, key_mask=key_mask, impl=impl)
    check_arguments(q, k, v, hq, hk, key_mask)
    check_choices(fill, pairs)

    n = hq.shape[2]
    if impl == "auto":
        impl = choose_impl(q, n, pairs)
    if torch.jit.is_tracing():  # a trace would keep the shapes of its example, and be wrong
        impl = "dense"
    if impl == "dense":
        return lsh_attention_reference(
            q, k, v, hq, hk, fill=fill, pairs=pairs, key_mask=key_mask)

    if impl == "blocks":
        attend_fast = lsh_attention_blocks
    elif impl == "flex":
        attend_fast = lsh_attention_flex
    else:
        raise ValueError(f"impl: expected auto, dense, blocks or flex, got {impl!r}.")
    if n > 1 or pairs == "upper":
        raise ValueError(f"impl: {impl} requires one hash function and pairs='all', "
                         f"got {n} and {pairs!r}.")
    if key_mask is None:
        key_mask = torch.ones_like(hq[:, 0, 0], dtype=torch.bool)  # (B, L)
    hq = hq.squeeze(2)  # (B, H, L)
    hk = hk.squeeze(2)
    with torch.autocast(q.device.type, enabled=False):
        out = attend_fast(q, k, v, hq, hk, fill, key_mask)
    return out.to(q.dtype)


def choose_impl(q, n, pairs):
    """Return what impl="auto" takes."""
    B, _, L, e = q.shape
    if n > 1 or pairs == "upper":  # the fast forms cannot do these
        return "dense"
    max_literal = MAX_LITERAL_GPU if q.is_cuda else MAX_LITERAL
    if L <= max_literal or B == 0:  # little to save; an empty batch has no buckets
        return "dense"
    is_half = q.dtype in (torch.bfloat16, torch.float16)  # in float32 FlexAttention is slower
    if q.is_cuda and is_half and e >= MIN_FLEX_HEAD and has_compiler():
        return "flex"
    return "blocks"


# Bucket by bucket, for one hash function and pairs="all"


# sequence   one head of one text: there are B·H sequences of L positions
# row        a position of a sequence, numbered over all sequences from 0 to N - 1, N = B·H·L
# cell       the queries and keys of one sequence that share a hash bucket
# extra key  one key that stands for all keys outside a query's cell
# group      G cells of similar size, padded to x queries and y keys


def lsh_attention_blocks(q, k, v, hq, hk, fill, key_mask):
    """Return lsh_attention without an (L, L) matrix, in float32 or float64.

    Dense attention over the keys of a query's cell and one extra key is exact. With fill="zero" the
    extra key stands for the c keys of the sequence outside the cell. They have the score 0, so
    together they weigh c · exp(0) = exp(ln c): the score of the extra key is ln c, and its value is
    their mean. Here a query has the score ln 3 with the only key of its cell, two keys lie outside,
    and the values are 1, 2, 3:

        literal formula      weights exp(ln 3), exp(0), exp(0) = 3, 1, 1  (3·1 + 1·2 + 1·3) / 5
        cell and extra key   weights exp(ln 3), exp(ln 2) = 3, 2          (3·1 + 2·2.5)     / 5

    Both are 1.6. With fill="mask" the extra key is that at the query's own position, if it is in
    another cell. A loop would do:

        for each cell, and each query of the cell:
            scores = q · k / √e for the keys of the cell, then the score of the extra key
            values = v for the keys of the cell, then the value of the extra key
            output = softmax(scores) · values

    There may be thousands of cells. So the code below puts the vectors of all cells in tables, and
    cells of similar size in groups, and attends group by group. The memory grows with L, not L²,
    even if all positions share a bucket.

    Args:
        hq, hk: int64 (B, H, L), hash buckets.
        q, k, v, fill, key_mask: as in lsh_attention; key_mask is not None.
    """
    B, H, L, e = q.shape
    dtype = torch.promote_types(q.dtype, torch.float32)  # ln c needs more than 8 bits
    q = q.to(dtype)
    k = k.to(dtype)
    v = v.to(dtype)
    cell_q, cell_k = number_cells(hq, hk, key_mask)  # (B, H, L) each
    extra_score, extra_value = find_extra_key(q, k, v, cell_q, cell_k, key_mask, fill)

    table_q, table_k, table_v = make_tables(q, k, v, extra_score)
    rows_q, rows_k = group_cells(cell_q.flatten(), cell_k.flatten())
    out = attend_groups(table_q, table_k, table_v, rows_q, rows_k)  # (N, width)

    out = out.view(B, H, L, -1)
    extra_weight = out[..., e:e + 1]  # (B, H, L, 1)
    return out[..., :e] + extra_weight * extra_value


def number_cells(hq, hk, key_mask):
    """Return the number of each query's and of each key's cell, int64 (B, H, L) each.

    Cells of different sequences have different numbers. torch.unique would give 0, 1, 2, ..., but
    the size of its result depends on the data, so the host would wait for a GPU. Instead, sort the
    2L buckets of a sequence, L of queries and L of keys. A cell's number is the place of its
    bucket's first occurrence, plus 2L for each earlier sequence. So numbers have gaps and are below
    2N. Keys that are padding get 2N, which no query has.

    Here are two sequences of L = 3, so N = 6, and the last key is padding:

        row                     0  1  2    3  4  5
        bucket of the query     4  7  4    4  7  7
        bucket of the key       7  7  4    4  4  7

        buckets, sorted         4  4  4  7  7  7    4  4  4  7  7  7
        place + start           0  1  2  3  4  5    6  7  8  9 10 11

        cell of the query       0  3  0    6  9  9
        cell of the key         3  3  0    6  6 12

    Args:
        hq, hk, key_mask: as in lsh_attention_blocks.
    """
    B, H, L = hq.shape
    N = B * H * L
    buckets = torch.cat([hq, hk], 2)  # (B, H, 2L)
    in_order = buckets.sort().values
    place = torch.searchsorted(in_order, buckets)  # of the first occurrence, 0 to 2L - 1
    start = torch.arange(0, 2 * N, 2 * L, device=hq.device)  # sequence s has numbers from s·2L on
    cell = start.view(B, H, 1) + place  # (B, H, 2L)
    cell_q, cell_k = cell.chunk(2, 2)
    is_padding = ~key_mask.unsqueeze(1)  # (B, 1, L)
    return cell_q, cell_k.masked_fill(is_padding, 2 * N)


NO_SCORE = -1e30  # score of an extra key that does not exist; finite, since -inf · 0 is NaN


def find_extra_key(q, k, v, cell_q, cell_k, key_mask, fill):
    """Return the score (B, H, L, 1) and value (B, H, L, e) of each query's extra key.

    With fill="zero" it stands for all keys outside the query's cell. With fill="mask" it is the key
    at the query's own position, if that is outside. A query without an extra key gets the score
    NO_SCORE and the value 0.

    Args:
        q, k, v: float32 or float64 (B, H, L, e).
        cell_q, cell_k: from number_cells.
        key_mask: bool (B, L), False = padding.
    """
    is_key = key_mask[:, None, :, None]  # (B, 1, L, 1)
    if fill == "zero":
        count, mean = average_outside(v, is_key, cell_q, cell_k)
        score = count.log().clamp(min=NO_SCORE)
        return score, mean
    product = (q * k).sum(3, keepdim=True)  # (B, H, L, 1)
    score = product / math.sqrt(q.shape[3])
    is_outside = cell_q != cell_k  # (B, H, L)
    is_extra = is_key & is_outside.unsqueeze(3)
    score = score.masked_fill(~is_extra, NO_SCORE)
    value = v.masked_fill(~is_extra, 0.0)
    return score, value


def average_outside(v, is_key, cell_q, cell_k):
    """Return how many keys are outside each query's cell, (B, H, L, 1), and their mean value.

    A sum outside is the sum of the sequence minus that of the cell. The difference loses digits
    where nearly all keys are in the cell and their values are far from 0.
    """
    v = F.pad(v, (0, 1), value=1.0)  # (B, H, L, e + 1), the last column counts keys
    v = v.masked_fill(~is_key, 0.0)
    rows = v.flatten(0, 2)  # (N, e + 1)
    N, width = rows.shape
    cell_sums = rows.new_zeros(2 * N + 1, width)  # of each cell number
    cell_sums.index_add_(0, cell_k.flatten(), rows)
    inside = cell_sums.index_select(0, cell_q.flatten())  # (N, e + 1)
    sequence_sums = v.sum(2, keepdim=True)  # (B, H, 1, e + 1)
    outside = sequence_sums - inside.view_as(v)
    count = outside[..., -1:].detach()
    total = outside[..., :-1]
    return count, total / count.clamp(min=1)


def make_tables(q, k, v, extra_score):
    """Return tables of queries (N + 1, width), keys and values (N + 2, width), width e + 1.

    Row N + 1 is the extra key of all queries. Its score differs from query to query, so each query
    carries it in an added column e, where the extra key alone has a 1: their product is
    extra_score. Its value has a 1 there too, so column e of the output is its weight.

        row          query                   key       value
        0 to N - 1   (q / √e, extra_score)   (k, 0)    (v, 0)
        N            (0, 0)                  (0, 0)    (0, 0)    padding of a group
        N + 1                                (0, 1)    (0, 1)    extra key

    (lsh_attention_flex merges by log-sum-exp, which PyTorch's dense kernel does not return)
    """
    e = q.shape[3]
    num_zeros = 0
    if q.is_cuda:  # more columns of zeros: there PyTorch's kernel wants a multiple of 4
        num_zeros = 3
    table_q = torch.cat([q / math.sqrt(e), extra_score], 3)  # (B, H, L, e + 1)
    table_q = F.pad(table_q.flatten(0, 2), (0, num_zeros, 0, 1))
    table_k = F.pad(k.flatten(0, 2), (0, 1 + num_zeros, 0, 2))
    table_v = F.pad(v.flatten(0, 2), (0, 1 + num_zeros, 0, 2))
    with torch.no_grad():  # a constant; else autograd would copy the gradient of each table
        table_k[-1, e] = 1
        table_v[-1, e] = 1
    return table_q, table_k, table_v


def group_cells(cell_q, cell_k):
    """Return the rows of queries and of keys in each cell, cells of similar size in one group.

    Row N fills the cells of a group up to one size; row N + 1, the extra key, is the last key of
    each. In the example of number_cells, where N = 6, all cells are in one group:

        cell   queries   keys
        0      0  2      2  6  7
        3      1  6      0  1  7
        6      3  6      3  4  7
        9      4  5      6  6  7

    Args:
        cell_q, cell_k: int64 (N,), the cell of each query and of each key.

    Returns:
        rows_q, list of int64 (G, x), and rows_k, list of int64 (G, y), one of each for a group.
    """
    N = len(cell_q)
    cell = torch.stack([cell_q, cell_k])  # (2, N)
    # how many queries and keys each cell has; for bincount the host would wait
    count = cell.new_zeros(2, 2 * N + 1)
    count.scatter_add_(1, cell, torch.ones_like(cell))
    by_cell = cell.argsort(1)  # (2, N): the rows of cell 0, of cell 1, ...
    first = count.cumsum(1) - count  # where the rows of each cell begin in by_cell

    # Shapes depend on the counts, so the host needs them: here, and only here, it waits for a GPU
    host_count = count.cpu()
    cells = host_count[0].nonzero().squeeze(1)  # the numbers of those that have queries
    larger_count = host_count[:, cells].amax(0)  # of queries or of keys: the size of the cell
    # Sizes 1 to 4 are one group, then 5 to 6, 7 to 9, 10 to 13, ...: beyond 4 the largest size of a
    # group is at most 1.5 times the smallest, which bounds the padding of the larger side
    bounds = 4 * 1.5 ** torch.arange(64)  # 4, 6, 9, 13.5, ...
    group_of_cell = torch.bucketize(larger_count.float(), bounds)

    rows_q = []
    rows_k = []
    for group_number in group_of_cell.unique():
        group = cells[group_of_cell == group_number]  # (G,)
        max_q, max_k = host_count[:, group].amax(1).tolist()
        # subtle: non_blocking, else the host would wait once more for each group
        group = group.to(cell.device, non_blocking=True)
        queries = pad_cells(by_cell[0], first[0, group], count[0, group], max_q)
        keys = pad_cells(by_cell[1], first[1, group], count[1, group], max_k)
        rows_q.append(queries)  # (G, x)
        rows_k.append(F.pad(keys, (0, 1), value=N + 1))  # (G, y)
    return rows_q, rows_k


def attend_groups(table_q, table_k, table_v, rows_q, rows_k):
    """Return what each query attends to in its cell, (N, width).

    Args:
        table_q, table_k, table_v: from make_tables.
        rows_q, rows_k: from group_cells.
    """
    N = len(table_q) - 1
    q_groups = gather_groups(table_q, rows_q)
    k_groups = gather_groups(table_k, rows_k)
    v_groups = gather_groups(table_v, rows_k)
    outputs = []
    for g in range(len(rows_q)):
        is_key = (rows_k[g] != N).unsqueeze(1)  # (G, 1, y)
        out = attend(q_groups[g], k_groups[g], v_groups[g], is_key)  # (G, x, width)
        outputs.append(out.flatten(0, 1))

    # Put the queries back in order. The padding of all groups writes to row N, which is cut off
    rows = torch.cat([group.flatten() for group in rows_q])
    out = torch.zeros_like(table_q).index_copy_(0, rows, torch.cat(outputs))
    return out[:N]


def pad_cells(by_cell, first, count, size):
    """Return the rows of G cells, int64 (G, size). Behind the end of a cell is row N.

    The keys in the example of group_cells, N = 6:

        by_cell   2   0  1   3  4   5
        first     0   1      3      5
        count     1   2      2      0
        rows      2 6   0 1   3 4   6 6

    Args:
        by_cell: int64 (N,), the rows sorted by cell.
        first, count: int64 (G,), where the rows of each cell begin, and how many it has.
        size: int, the largest count.
    """
    N = len(by_cell)
    place = torch.arange(size, device=by_cell.device)  # (size,)
    index = first.unsqueeze(1) + place  # (G, size)
    rows = by_cell[index.clamp(max=N - 1)]
    is_behind = place >= count.unsqueeze(1)  # there are the rows of the next cell
    return rows.masked_fill(is_behind, N)


def gather_groups(table, rows):
    """Return the rows of each group: a list of int64 (G, size) to a list of (G, size, width).

    One gather serves all groups, since the backward pass of each gather fills a tensor as large as
    the table. For groups (4, 2) and (1, 7) it returns (15, width), which is split into 8 and 7
    rows, and shaped as (4, 2, width) and (1, 7, width).
    """
    all_rows = torch.cat([group.flatten() for group in rows])
    num_rows = [group.numel() for group in rows]
    parts = table.index_select(0, all_rows).split(num_rows)
    return [part.unflatten(0, group.shape) for part, group in zip(parts, rows)]


def attend(q, k, v, is_key):
    """Return softmax(q kᵀ) v over the keys of each cell, (G, x, width).

    Args:
        q, k, v: float (G, x, width), (G, y, width) and (G, y, width), q divided by √e.
        is_key: bool (G, 1, y), False = padding.
    """
    if q.shape[1] <= MAX_FORMULA_CELL:
        scores = q @ k.transpose(1, 2)  # (G, x, y)
        scores = scores.masked_fill(~is_key, -torch.inf)  # the extra key always has a score
        weights = scores.softmax(2)
        return weights @ v
    # PyTorch's kernel holds no matrix of scores. It wants a dimension of heads
    out = F.scaled_dot_product_attention(
        q.unsqueeze(1),
        k.unsqueeze(1),
        v.unsqueeze(1),
        attn_mask=is_key.unsqueeze(1),
        scale=1.0)
    return out.squeeze(1)


# On a GPU, by FlexAttention: no shape depends on the data, so the host never waits


FLEX_BLOCK = 128  # queries, and keys, of a block of FlexAttention


def lsh_attention_flex(q, k, v, hq, hk, fill, key_mask):
    """Return lsh_attention by FlexAttention and the extra key of lsh_attention_blocks, in float32.

    FlexAttention returns attention over the keys of a query's cell, and the log-sum-exp of their
    scores. They act together as one key with that score. A softmax of it and the extra score gives
    the weights of the two.

    Args:
        q, k, v, hq, hk, fill, key_mask: as in lsh_attention_blocks.
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

    FlexAttention skips a block of queries and a block of keys whose ranges of cells do not overlap
    (.). In the others (x), is_same_cell says which pairs collide. Blocks of 4:

        cells of                  sorted keys
        sorted queries   1 1 2 2    2 4 4 4    5 5 7 7
        1 1 1 2             x          x          .
        2 2 4 4             x          x          .
        4 5 5 7             .          x          x

    With more positions, more blocks lie far from the diagonal, where ranges do not overlap.
    """
    L = sorted_q.shape[2]
    first = torch.arange(0, L, FLEX_BLOCK, device=sorted_q.device)
    last = (first + FLEX_BLOCK - 1).clamp(max=L - 1)
    first_q = sorted_q[..., first, None]  # (B, H, blocks of queries, 1)
    last_q = sorted_q[..., last, None]
    first_k = sorted_k[..., None, first]  # (B, H, 1, blocks of keys)
    last_k = sorted_k[..., None, last]
    # two ranges overlap where each begins before the other ends
    overlap = (first_q <= last_k) & (first_k <= last_q)  # (B, H, blocks of queries, of keys)
    # For each block of queries BlockMask wants to know how many blocks of keys to read (count), and
    # a list of the numbers of all blocks of keys that begins with those; it ignores the rest.
    # Sorting 1 (overlaps) before 0 makes that list
    count = overlap.sum(3).int()
    numbers = overlap.int().argsort(descending=True, stable=True).int()

    def is_same_cell(b, h, i, j):
        return sorted_q[b, h, i] == sorted_k[b, h, j]

    from torch.nn.attention import flex_attention as flex  # here, as it loads torch._dynamo: 1 s
    return flex.BlockMask.from_kv_blocks(
        count,
        numbers,
        BLOCK_SIZE=FLEX_BLOCK,
        mask_mod=is_same_cell,
        seq_lengths=(L, L))


def attend_flex(q, k, v, blocks):
    """Return softmax(q kᵀ / √e) v over the pairs of a BlockMask, and log-sum-exps (B, H, L)."""
    from torch.nn.attention import flex_attention as flex
    if not hasattr(flex, "AuxRequest"):  # torch 2.8
        return flex.flex_attention(q, k, v, block_mask=blocks, return_lse=True)
    request = flex.AuxRequest(lse=True)
    out, aux = flex.flex_attention(q, k, v, block_mask=blocks, return_aux=request)
    return out, aux.lse


@functools.cache
def compile_flex():
    """Return attend_flex, which is compiled at its first call."""
    return torch.compile(attend_flex)


@functools.cache
def has_compiler():
    """Return whether a C compiler for FlexAttention is here; warn once if none is."""
    if shutil.which("gcc") or shutil.which("clang"):
        return True
    warnings.warn("LSH attention: found no C compiler for FlexAttention. It runs bucket by bucket, "
                  "which is slower on a GPU.")
    return False


# Helpers and checks


UNCOMPILED = []  # lsh_attention that torch.compile leaves out, once a compiled model has called it


def uncompiled_lsh_attention():
    """Return lsh_attention that torch.compile leaves out.

    As a decorator, torch.compiler.disable would load torch._dynamo at import, for about a second.
    """
    if not UNCOMPILED:  # one for all calls, or torch.compile would compile each anew
        UNCOMPILED.append(torch.compiler.disable(lsh_attention))
    return UNCOMPILED[0]


def check_key_mask(key_mask, q):
    """Raise a ValueError unless key_mask is None or bool (B, L): a float one would be a bias."""
    B, _, L, _ = q.shape
    if key_mask is not None and (key_mask.dtype != torch.bool or key_mask.shape != (B, L)):
        raise ValueError(f"key_mask: expected bool ({B}, {L}), "
                         f"got {key_mask.dtype} {[*key_mask.shape]}.")


def check_choices(fill, pairs):
    """Raise a ValueError unless fill and pairs are among FILLS and PAIRS."""
    if fill not in FILLS:
        raise ValueError(f"fill: expected zero or mask, got {fill!r}.")
    if pairs not in PAIRS:
        raise ValueError(f"pairs: expected all or upper, got {pairs!r}.")


def check_arguments(q, k, v, hq, hk, key_mask):
    """Raise a ValueError where shapes do not fit: a size of 1 would be broadcast."""
    B, H, L, _ = q.shape
    n = hq.shape[2]
    if k.shape != q.shape or v.shape != q.shape:
        raise ValueError("q, k, v: expected one shape, got "
                         f"{[*q.shape]}, {[*k.shape]} and {[*v.shape]}.")
    if n == 0 or hq.shape != (B, H, n, L) or hk.shape != hq.shape:  # without a hash no collision
        raise ValueError(f"hq, hk: expected ({B}, {H}, n, {L}), got "
                         f"{[*hq.shape]} and {[*hk.shape]}.")
    check_key_mask(key_mask, q)


def check_hyperplanes(x, planes, coef):
    """Raise a ValueError where sizes do not fit, as 1 would be broadcast, or planes is rounded."""
    _, H, _, e = x.shape
    _, n, r = coef.shape
    expected = (H, n, r, e)
    if (planes.shape != expected or coef.shape != expected[:3]
            or planes.dtype != torch.float32):
        raise ValueError(f"planes, coef: expected float32 ({H}, n, r, {e}) and ({H}, n, r), got "
                         f"{planes.dtype} {[*planes.shape]} and {[*coef.shape]}. Use "
                         "draw_hyperplanes, and torch.autocast in place of a cast.")


def main():
    """Print which pairs of queries and keys collide, and two laws beside what is measured."""
    torch.manual_seed(0)
    e = 64
    centers = torch.randn(3, e).repeat_interleave(4, 0)  # (12, e)
    q, k = centers + 0.3 * torch.randn(2, 1, 1, 12, e)  # (B, H, L, e) each
    hq, hk = hash_by_chance(q, k, 4)
    print("12 positions in 3 groups of 4 similar vectors. Rows are queries, columns are keys.\n"
          "#  on the same side of 4 hyperplanes: LSH attention computes the score of the pair\n"
          ".  not so: the score is 0, and the weight before normalization exp(0) = 1\n")
    for row in collisions(hq, hk)[0, 0].tolist():
        signs = [".#"[is_collision] for is_collision in row]
        print("  " + " ".join(signs))

    print("\n512 vectors that are not similar    keys inside           weight of keys outside")
    print("hyperplanes                         law      counted      law      measured")
    q, k = torch.randn(2, 1, 16, 512, e)
    for r in (1, 2, 4, 8):
        hq, hk = hash_by_chance(q, k, r)
        law = collision_probability(math.pi / 2, r, 256)  # nearly a right angle, on average
        counted = collisions(hq, hk).float().mean()
        share_law = outside_share_law(e, r, 256)
        share = outside_share(q, k, hq, hk).mean()
        print(f"{r:<36}{law:<9.1%}{counted:<13.1%}{share_law:<9.1%}{share:.1%}")


def hash_by_chance(q, k, num_hyperplanes):
    """Return buckets of q and k, (B, H, 1, L) each, of 256, by new hyperplanes."""
    _, H, _, e = q.shape
    planes, coef = draw_hyperplanes(H, 1, num_hyperplanes, e, 256)
    return simhash(q, planes, coef, 256), simhash(k, planes, coef, 256)


if __name__ == "__main__":
    main()
