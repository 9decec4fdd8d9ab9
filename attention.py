"""Attention over all pairs of positions, or with the scores of pairs that share a hash bucket.

Sources:
    [V] Vaswani et al. 2017, Attention Is All You Need
    [BL] Li & Yip 2024, BERT-LSH
Out of scope: causal masks; cross-attention, since q, k and v have one length; how to compute the
    scores of colliding pairs alone (attention_fast.py, and attention_flex.py for a GPU: copy them
    with this file if you need speed).
Deviations:
    1. The paper fills a dense matrix of scores. So does lsh_attention_reference. The fast forms
       compute those of colliding pairs alone. The result is the same, up to rounding.
    2. Hyperplanes are drawn once, and again where you call LSHSelfAttention.redraw. The authors'
       code draws them in every forward pass.
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
that does not collide has the score 0, and so the weight exp(0) = 1. fill="mask" is the other
reading of the idea: keys outside have no weight, and a query attends to its bucket and to itself.
"""

import importlib.util
import math
import warnings

import torch
import torch.nn as nn
import torch.nn.functional as F

# Choices of LSH attention; lsh_attention_reference explains the first two, lsh_attention the third
FILLS = ("zero", "mask")
PAIRS = ("all", "upper")
IMPLS = ("auto", "dense", "blocks", "flex")

# Positions up to which the formula is as fast as what replaces it: measured on two cores of an EPYC
# and on one H200, with heads of 64 (docs/speed.md, "Attention in two dtypes" and "One GPU")
MAX_FORMULA_BF16 = 512  # full_attention in bfloat16 on a CPU
MAX_FORMULA_LSH = 256  # lsh_attention on a CPU
MAX_FORMULA_LSH_GPU = 512


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


def full_attention(q, k, v, *, key_mask=None, dropout=0.0):
    """Return full_attention_reference by PyTorch's kernel, which holds no (L, L) matrix.

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

    By hand: a query at position 0 has the score ln 3 with key 0, which shares its bucket, and keys
    1 and 2 are outside. The values are 1, 2, 3:

        fill="zero"    weights exp(ln 3), exp(0), exp(0) = 3, 1, 1    (3·1 + 1·2 + 1·3) / 5 = 1.6
        fill="mask"    weights 3, 0, 0                                (3·1) / 3 = 1

    Scores of three positions, where all pairs collide:

        pairs="all"    a b c    pairs="upper"    a b c
                       d e f                     b e f
                       g h i                     c f i

    Args:
        q, k, v: float (B, H, L, e).
        hq, hk: int64 (B, H, n, L), hash buckets of queries and keys, from simhash with the same
            hyperplanes.
        fill: "zero": a pair that does not collide has the score 0, as in the paper, so its weight
            is exp(0) = 1 before normalization. "mask": it has no weight, but a position always
            attends to itself, unless it is padding.
        pairs: "all": each pair has its own score. "upper", as in the authors' code: the scores and
            collisions above the diagonal also serve below it, so the result differs from full
            attention even if all pairs collide.
        key_mask: bool (B, L), True = attend, or None.

    Returns:
        float (B, H, L, e). A query that attends to no key has the result 0.
    """
    check_choices(fill, pairs)
    L, e = q.shape[2:]
    is_collision = collisions(hq, hk)  # (B, H, L, L)
    scores = q @ k.transpose(-2, -1) / math.sqrt(e)  # (B, H, L, L)

    if pairs == "upper":
        scores = scores.triu() + scores.triu(1).transpose(-2, -1)
        is_collision = is_collision.triu() | is_collision.triu(1).transpose(-2, -1)

    is_attended = widen_mask(key_mask)
    if fill == "zero":
        scores = scores.masked_fill(~is_collision, 0.0)
    elif fill == "mask":
        is_itself = torch.eye(L, dtype=torch.bool, device=q.device)
        is_inside = is_collision | is_itself
        is_attended = is_inside if is_attended is None else is_inside & is_attended

    return masked_softmax(scores, is_attended) @ v


def lsh_attention(q, k, v, hq, hk, *, fill="zero", pairs="all", key_mask=None, impl="auto"):
    """Return lsh_attention_reference, by a faster form where one serves. [BL Alg. 1]

    Args:
        q, k, v, hq, hk, fill, pairs, key_mask: as in lsh_attention_reference.
        impl: "dense": the formula. "blocks": bucket by bucket, attention_fast.py. "flex":
            FlexAttention, for a GPU, attention_flex.py. "auto": the fastest of those that serve.
            torch.jit.trace always takes "dense". torch.export, torch.vmap and second derivatives
            require it.

    Returns:
        float (B, H, L, e), differentiable. A query that attends to no key has the result 0. One
        NaN, even at padding, may make all positions of its text NaN in its head, as 0 · NaN is NaN.

    Raises:
        ValueError: An argument has another shape, n is 0, a choice is unknown, or impl does not
            serve: "blocks" and "flex" require n = 1 and pairs="all".

    Example:
        planes, coef = draw_hyperplanes(H, 1, 8, e, 256, torch.Generator().manual_seed(0))
        hq = simhash(q, planes, coef, 256)
        hk = simhash(k, planes, coef, 256)
        out = lsh_attention(q, k, v, hq, hk)
    """
    check_arguments(q, k, v, hq, hk, key_mask)
    check_choices(fill, pairs)
    impl = choose_impl(impl, q, hq, pairs)
    if impl == "dense":
        return lsh_attention_reference(
            q, k, v, hq, hk, fill=fill, pairs=pairs, key_mask=key_mask)
    from attention_fast import lsh_attention_fast  # here, since this file works without it
    return lsh_attention_fast(q, k, v, hq, hk, fill, key_mask, impl)


def choose_impl(impl, q, hq, pairs):
    """Return "dense", or what lsh_attention_fast takes: "blocks", "flex", or "auto", one of these.

    Raises a ValueError if impl is not among IMPLS, or does not serve.
    """
    if impl not in IMPLS:
        raise ValueError(f"impl: expected auto, dense, blocks or flex, got {impl!r}.")
    n = hq.shape[2]
    has_fast_form = n == 1 and pairs == "all"
    if impl in ("blocks", "flex") and not has_fast_form:
        raise ValueError(f"impl: {impl} requires one hash function and pairs='all', "
                         f"got {n} and {pairs!r}.")
    if torch.jit.is_tracing():  # a trace would keep the sizes of the buckets of its example
        return "dense"
    if impl != "auto":
        return impl
    B, _, L, _ = q.shape
    max_formula = MAX_FORMULA_LSH_GPU if q.is_cuda else MAX_FORMULA_LSH
    if L <= max_formula or B == 0 or not has_fast_form:  # an empty batch has no buckets
        return "dense"
    # in each call, since torch.compile warns of functools.cache
    if importlib.util.find_spec("attention_fast") is None:
        warnings.warn("LSH attention: found no attention_fast.py beside attention.py. The result "
                      "is right, but takes the time and memory of all pairs.")
        return "dense"
    return "auto"


# Layers to copy


class SelfAttention(nn.Module):
    """Multi-head self-attention over all pairs of positions. [V §3.2.2]

    Args:
        hidden_size, num_heads: int, d and H. d is a multiple of H.
        dropout: share of the attention weights that training sets to 0.

    Shape:
        x float (B, L, d) and key_mask bool (B, L), True = attend, or None, to float (B, L, d).

    Raises:
        ValueError: d is no multiple of H.
    """

    def __init__(self, hidden_size, num_heads, *, dropout=0.0):
        super().__init__()
        if num_heads < 1 or hidden_size % num_heads != 0:
            raise ValueError("hidden_size: expected a multiple of num_heads, "
                             f"got {hidden_size} and {num_heads}.")
        self.num_heads = num_heads
        self.dropout = dropout
        self.qkv = nn.Linear(hidden_size, 3 * hidden_size)
        self.out = nn.Linear(hidden_size, hidden_size)

    @classmethod
    def from_config(cls, config, generator):
        """Return the layer of a model.Config. generator is unused: it draws hyperplanes."""
        return cls(config.width, config.heads, dropout=config.dropout)

    def forward(self, x, key_mask=None):
        """Map x (B, L, d) to (B, L, d)."""
        q, k, v = self.project(x)
        dropout = self.dropout if self.training else 0.0
        a = full_attention(q, k, v, key_mask=key_mask, dropout=dropout)
        return self.join_heads(a)

    def project(self, x):
        """Return queries, keys and values, each (B, H, L, e), of x (B, L, d)."""
        qkv = self.qkv(x).unflatten(-1, (3, self.num_heads, -1))  # (B, L, 3, H, e)
        return qkv.permute(2, 0, 3, 1, 4).unbind()

    def join_heads(self, a):
        """Return the output (B, L, d) of what all heads attended to, a (B, H, L, e)."""
        a = a.transpose(1, 2).flatten(2)  # (B, L, H·e)
        return self.out(a)


class LSHSelfAttention(SelfAttention):
    """Multi-head self-attention with the scores of colliding pairs. [BL Alg. 1]

    torch.compile leaves the fast forms out: they are a graph break. To train in bfloat16 use
    torch.autocast: the hyperplanes, buffers that are saved with the weights, have to stay float32.

    Args:
        hidden_size, num_heads: as in SelfAttention.
        num_functions, num_hyperplanes, num_buckets, generator: n, r and more, as in
            draw_hyperplanes.
        fill, pairs: as in lsh_attention_reference.

    Shape:
        x float (B, L, d) and key_mask bool (B, L), True = attend, or None, to float (B, L, d).

    Raises:
        ValueError: A choice is unknown, d is no multiple of H, or a number for simhash is 0.

    Example:
        layer = LSHSelfAttention(512, 8)
        y = layer(torch.randn(2, 1024, 512))
    """

    def __init__(self, hidden_size, num_heads, *, num_functions=1, num_hyperplanes=8,
                 num_buckets=256, fill="zero", pairs="all", generator=None):
        super().__init__(hidden_size, num_heads)  # without dropout: deviation 4
        check_choices(fill, pairs)
        self.num_buckets = num_buckets
        self.fill = fill
        self.pairs = pairs
        shape = (num_heads, num_functions, num_hyperplanes)
        planes = torch.empty(*shape, hidden_size // num_heads, dtype=torch.float32)
        self.register_buffer("planes", planes)  # (H, n, r, e)
        self.register_buffer("coef", torch.empty(shape, dtype=torch.int64))  # (H, n, r)
        self.redraw(generator)

    @classmethod
    def from_config(cls, config, generator):
        """Return the layer of a model.Config, with hyperplanes from a generator."""
        return cls(
            config.width,
            config.heads,
            num_functions=config.lsh_hashes,
            num_hyperplanes=config.lsh_bands,
            num_buckets=config.lsh_buckets,
            fill=config.lsh_fill,
            pairs=config.lsh_pairs,
            generator=generator)

    def forward(self, x, key_mask=None):
        """Map x (B, L, d) to (B, L, d)."""
        q, k, v = self.project(x)
        hq = simhash(q, self.planes, self.coef, self.num_buckets)  # (B, H, n, L)
        hk = simhash(k, self.planes, self.coef, self.num_buckets)
        a = lsh_attention(
            q, k, v, hq, hk,
            fill=self.fill,
            pairs=self.pairs,
            key_mask=key_mask)
        return self.join_heads(a)

    def redraw(self, generator=None):
        """Draw new hyperplanes and coefficients, in place. [BL §2.1]"""
        planes, coef = draw_hyperplanes(*self.planes.shape, self.num_buckets, generator)
        self.planes.copy_(planes)
        self.coef.copy_(coef)


ATTENTIONS = {
    "full": SelfAttention,
    "lsh": LSHSelfAttention,
}


# How often vectors collide


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


# Checks and helpers


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
    """Print which pairs of queries and keys collide."""
    torch.manual_seed(0)
    centers = torch.randn(3, 64).repeat_interleave(4, 0)  # (L, e) = (12, 64)
    q, k = centers + 0.3 * torch.randn(2, 1, 1, 12, 64)  # (B, H, L, e) each
    planes, coef = draw_hyperplanes(1, 1, 4, 64, 256)
    hq = simhash(q, planes, coef, 256)
    hk = simhash(k, planes, coef, 256)
    print("12 positions in 3 groups. The queries and keys of a group are similar, and none are "
          "equal.\nRows are queries, columns are keys.\n"
          "#  on the same side of 4 hyperplanes: LSH attention computes the score of the pair\n"
          ".  not so: the score is 0, and the weight before normalization exp(0) = 1\n")
    for row in collisions(hq, hk)[0, 0].tolist():
        signs = [".#"[is_collision] for is_collision in row]
        print("  " + " ".join(signs))


if __name__ == "__main__":
    main()
