"""Attention over all pairs of positions (dense), or over those that locality-sensitive hashing (LSH) selects.

Paper map:
    [V] Vaswani et al. 2017, Attention Is All You Need: [V §3.2.1] full_attention
    [BL] Li & Yip, BERT-LSH: [BL §2.1] simhash   [BL §2.1 law] collision_probability
        [BL §2.2.2] lsh_attention_reference   [BL Alg. 1] lsh_attention
Out of scope: causal masks; cross-attention (q, k, v have one length); projections to q, k, v (model.py).
Deviations:
    1. Dense attention calls torch's scaled_dot_product_attention, except where that is slow (full_attention).
    2. The paper fills a dense matrix. SparseLSHAttention computes its exact result from the colliding pairs,
       where measure_costs predicts that this is faster. The two ways round differently.
    3. The hyperplanes are drawn once, or once per step, not in every forward pass as in the authors' code.
    4. LSH attention has no dropout on weights: a pair that does not collide has no weight of its own.
    5. The default is pairs="all". The released code, and the 28.5 dot products printed, are of a triangle,
       "upper". Algorithm 1 as printed runs over all of C, and the last writer of A[i, j] = A[j, i] wins.
Notation:
    B batch   H heads   L positions   e head size   n hash functions   r hyperplanes per function ("bands")
    m hash buckets   BH = B·H sequences   N = BH·L rows   P slots: rows in bucket order, with padding
    G tiles of one size   x, y query slots and key slots of a tile   i query   j key   T size of small tiles
    s score   w weight   M largest score of a row   z sum of exp(s - M) over a row   u width of the values
Demo: python attention.py
"""

import functools
import math
import time
from collections import namedtuple

import numpy as np
import torch
import torch.nn.functional as F

# dtype and dimensions of arguments, and choices. In a call a letter is one size, and "float" is one dtype.
TENSORS = dict(q="float BHLe", k="float BHLe", v="float BHLu", key_mask="bool BL", hq="int64 BHnL",
               hk="int64 BHnL", x="float BHLe", planes="floating Hnre", coef="int64 Hnr")
CHOICES = dict(fill=("zero", "mask"), pairs=("all", "upper"), impl=("auto", "blocks", "dense"))


def check_arguments(**arguments):
    """Raise a ValueError that names the first argument whose dtype, shape or value is not as above."""
    sizes = {}
    for name, x in arguments.items():
        if name in CHOICES and x not in CHOICES[name]:
            raise ValueError(f"{name}: expected one of {', '.join(CHOICES[name])}, got {x!r}")
        if name in CHOICES or x is None and name == "key_mask":
            continue
        (kind, letters), is_tensor = TENSORS[name].split(), torch.is_tensor(x)
        is_ok = is_tensor and (x.is_floating_point() if "float" in kind else x.dtype == getattr(torch, kind))
        if not is_ok or x.dim() != len(letters) or 0 in x.shape or any(
                sizes.setdefault(a, n) != n for a, n in zip([kind, *letters], [x.dtype, *x.shape])):
            expected = ", ".join(f"{a}={sizes.get(a, 'any')}" for a in letters)
            got = f"{x.dtype} {tuple(x.shape)}" if is_tensor else type(x).__name__
            raise ValueError(f"{name}: expected {sizes.get(kind, kind)} ({expected}), got {got}")
        if name in ("hq", "hk") and not 0 <= x.min() <= x.max() < 2**31:
            raise ValueError(f"{name}: expected 0 to 2^31 - 1, got {x.min()} to {x.max()}. Use simhash.")


def full_attention(q, k, v, *, key_mask=None, dropout=0.0):
    """Return softmax(q kᵀ / √e) v over all keys that are not padding. [V §3.2.1]

    Args:
        q, k, v: float (B, H, L, e), (B, H, L, e) and (B, H, L, u).
        key_mask: bool (B, L), True = attend. Pass None without padding: flash kernels accept no mask.
        dropout: share of the attention weights set to 0. Pass it in training only.

    Returns:
        float (B, H, L, u). A row whose every key is padding is 0.
    """
    check_arguments(q=q, k=k, v=v, key_mask=key_mask)
    if q.device.type != "cpu" or q.dtype != torch.bfloat16 or q.shape[-2] > 1024:
        mask = None if key_mask is None else key_mask[:, None, None, :]  # (B, 1, 1, L)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout)
    scores = (q / math.sqrt(q.shape[-1])) @ k.transpose(-2, -1)  # (B, H, L, L), up to 2x the kernel's speed
    return F.dropout(masked_softmax(scores, key_mask), dropout, training=dropout > 0) @ v


def full_attention_reference(q, k, v, *, key_mask=None):
    """Return full_attention without dropout, by the literal formula: the oracle of the tests. [V §3.2.1]"""
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])  # (B, H, L, L)
    return masked_softmax(scores, key_mask) @ v


def masked_softmax(scores, key_mask):
    """Return attention weights (B, H, L, L); in a row without keys they are 0, where softmax gives NaN."""
    if key_mask is None:
        return scores.softmax(-1)
    scores = scores.masked_fill(~key_mask[:, None, None, :], -torch.inf)
    return scores.softmax(-1).masked_fill(scores.detach().amax(-1, keepdim=True) == -torch.inf, 0.0)


def draw_hyperplanes(heads, functions, bands, width, buckets, generator):
    """Sample the random hyperplanes and coefficients of simhash.

    Args:
        heads, functions, bands, width, buckets: int, H, n, r, e and m.
        generator: torch.Generator on the CPU, so that a seed gives the same hash functions on every device.

    Returns:
        planes float32 (H, n, r, e), standard normal, and coef int64 (H, n, r), uniform in [0, m).
    """
    planes = torch.randn(heads, functions, bands, width, generator=generator, device="cpu")
    return planes, torch.randint(buckets, (heads, functions, bands), generator=generator, device="cpu")


@torch.no_grad()
def simhash(x, planes, coef, buckets):
    """Return the hash buckets of each vector: the sum of coef over the hyperplanes below it, mod m. [BL §2.1]

        x is, of 3 hyperplanes   coef     bucket, m = 16
        above above below        9 12 3   (9 + 12) mod 16 = 5
        above below above        9 12 3   (9 + 3)  mod 16 = 12     other sides, most likely another bucket

    Args:
        x: float (B, H, L, e).
        planes, coef: float (H, n, r, e) and int64 (H, n, r), from draw_hyperplanes.
        buckets: int, m.

    Returns:
        int64 (B, H, n, L) in [0, m), computed in float32 under any autocast, without a gradient.
    """
    check_arguments(x=x, planes=planes, coef=coef)
    with torch.autocast(x.device.type, enabled=False):
        is_above = x.float() @ planes.float().flatten(1, 2).transpose(1, 2) > 0  # (B, H, L, n·r)
    is_above = is_above.unflatten(-1, coef.shape[1:]).transpose(2, 3)  # (B, H, n, L, r)
    # a product in float64 is exact below 2^53, and much faster than integers
    return (is_above.double() @ coef.double().unsqueeze(-1)).squeeze(-1).long() % buckets


def collision_probability(angle, bands, buckets, functions=1):
    """Return the probability that two vectors share a bucket of at least one function. [BL §2.1 law]

    Args:
        angle: float or tensor, angle between the vectors in radians.
        bands, buckets, functions: int, r, m and n.

    Returns:
        1 - (1 - P)^n with P = p + (1 - p)/m and p = (1 - angle/π)^r. The paper's p + 1/m can exceed 1.
    """
    p = (1 - angle / math.pi) ** bands
    return 1 - (1 - p - (1 - p) / buckets) ** functions


def collisions(hq, hk):
    """Return bool (B, H, L, L): whether query i and key j share a bucket of at least one function."""
    is_equal = (a.unsqueeze(-1) == b.unsqueeze(-2) for a, b in zip(hq.unbind(2), hk.unbind(2)))
    return functools.reduce(torch.logical_or, is_equal)


def collision_share(hq, hk):
    """Return the share of colliding pairs, in [0, 1], in the first sequence of hq, hk int64 (B, H, n, L)."""
    chunks, num_pairs = hq[:1].split(128, dim=-1), hq[0, :, 0].numel() * hq.shape[-1]  # no (L, L) matrix
    return sum(collisions(chunk, hk[:1]).sum().item() for chunk in chunks) / num_pairs


def lsh_attention_reference(q, k, v, hq, hk, *, fill="zero", pairs="all", key_mask=None):
    """Return LSH attention by the literal formula: the oracle of the tests. [BL §2.2.2]

    pairs="upper", not the default, is the triangle of the authors' released code. Algorithm 1 as printed runs
    over all of C and lets the last writer win.

    Args:
        q, k, v: float (B, H, L, e), (B, H, L, e) and (B, H, L, u).
        hq, hk: int64 (B, H, n, L) in [0, 2^31), hash buckets of queries and keys.
        pairs: "all": own score per pair. "upper": <q_i, k_j> for i <= j also serves (j, i), which differs
            from full attention even if all pairs collide.
        fill: "zero": a pair without a collision has the score 0, as in the paper. "mask": it has no weight,
            but a position always attends to itself.
        key_mask: bool (B, L), True = attend, or None.

    Returns:
        float (B, H, L, u), by way of an (L, L) matrix per head.
    """
    check_arguments(q=q, k=k, v=v, hq=hq, hk=hk, key_mask=key_mask, fill=fill, pairs=pairs)
    L, is_collision = q.shape[2], collisions(hq, hk)
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])  # (B, H, L, L)
    if pairs == "upper":
        upper = torch.ones(L, L, dtype=torch.bool, device=q.device).triu()
        scores, is_collision = (torch.where(upper, x, x.transpose(-2, -1)) for x in (scores, is_collision))
    if fill == "mask":
        is_collision = is_collision | torch.eye(L, dtype=torch.bool, device=q.device)
    scores = scores.masked_fill(~is_collision, 0.0 if fill == "zero" else -torch.inf)
    return masked_softmax(scores, key_mask) @ v


MASKED, MIN_SCORE = -2e30, -1e30  # score of a pair that does not count; least maximum of a row. Both finite
TILES, SIZE_STEPS = (16, 32, 64, 128), (1.1, 1.25, 1.5, 2.0)  # tile sizes, and ratios of larger sizes, to try
MAX_CHUNK = 2**20  # scores computed at once: 4 MiB in float32, far from L²
MAX_SAVED = 8  # save weights for the backward pass up to 8 times the size of q; recompute larger ones
MAX_DENSE_LENGTH = 1024  # above this length no (L, L) matrix is allocated


# Seconds on a machine (measure_costs): of blocks for each pair of a tile, row (half of it for its slot), size
# of tiles and layout; of the dense formula for each pair and row. Then 1 if products in bfloat16 are faster
# than in float32, else 0. The defaults give the proportions
Costs = namedtuple("Costs", "pair row size layout dense_pair dense_row has_fast_bfloat16",
                   defaults=(1.5e-8, 1.6e-6, 8e-4, 2.5e-3, 1.2e-8, 1.2e-6, 0.0))


class BucketLayout:
    """The colliding pairs of one hash function: rows in slots, bucket by bucket, in tiles of few sizes.

    A tile has whole buckets of one sequence: as many small ones as fit, or a larger one alone.

    triangle        "upper" (i <= j), "lower" (i > j) or None
    earlier         hq, hk (N,) of each earlier function: a pair belongs to the first in which it collides
    to_q, to_k      int64 (P,), row of each slot for results; N in a padding slot
    from_q, from_k  int64 (P,), row of each slot for inputs; a row of the same sequence in a padding slot
    in_q, in_k      float (P,), number of a slot's bucket within its tile; -1 and -2 in a padding slot
    shapes          list of (G, x, y): G tiles of x query slots and y key slots, in slot order
    num_pairs, cost pairs of all tiles, and seconds, as predicted from Costs

        hq  5 7 5 5    bucket 5: queries 0 2 3, key 1    to_q  0 2 3 4   from_q  0 2 3 0   in_q  0 0 0 -1
        hk  2 5 2 3    bucket 7: query 1, no key         4 = N: padding  tile of 4         shapes [(1, 4, 4)]
    """

    def __init__(self, hq, hk, costs=Costs(), key_mask=None, triangle=None, earlier=()):
        """Choose tiles for hq, hk (BH, L), without the keys that key_mask (BH, L) excludes. Next: fill."""
        (BH, self.L), self.N, self.triangle, self.earlier = hq.shape, hq.numel(), triangle, earlier
        unused = int(torch.maximum(hq.max(), hk.max())) + 1
        if key_mask is not None:
            hk = hk.masked_fill(~key_mask, unused)  # a bucket without queries
        offset = torch.arange(BH, device=hq.device).unsqueeze(1) * (unused + 1)  # buckets per sequence
        # two groups per bucket, its queries and then its keys
        buckets, order = torch.stack([hq + offset, hk + offset]).flatten().sort(stable=True)  # (2 N,)
        names, index = buckets.unique_consecutive(return_inverse=True)
        self.rows, self.groups = order % self.N, 2 * index + (order >= self.N)
        self.group_size = self.groups.bincount(minlength=2 * len(names))
        sizes = self.group_size.view(-1, 2).T.cpu().numpy()  # numpy has less overhead per call
        shared = sizes.min(0).nonzero()[0]  # buckets with queries and keys
        sequence = names.cpu().numpy()[shared] // (unused + 1)
        self.cost = math.inf
        for T in TILES:
            larger_last = np.lexsort((sizes[:, shared].max(0) > T, sequence))
            packed = pack_tiles(sizes[:, shared[larger_last]], sequence[larger_last], T)
            has_larger = bool((packed[-1] > T).any())
            for step in SIZE_STEPS if has_larger else SIZE_STEPS[:1]:
                x, y = size = np.where(packed[-1].max(0) > T, padded_sizes(packed[-1], step), T)
                num_pairs, num_sizes = int(x @ y), len(np.unique(x * 2**32 + y))
                cost = costs.layout + float(np.dot(costs[:3], [num_pairs, (self.N + x.sum()) / 2, num_sizes]))
                if cost < self.cost:
                    self.cost, self.num_pairs, self.tile = cost, num_pairs, T
                    self.packed = shared[larger_last], sequence[larger_last], *packed[:-1], size
            if not has_larger:
                break

    def fill(self):
        """Assign a slot to each row; return the layout."""
        bucket, sequence, start, opening, tile, size = self.packed
        by_size = np.lexsort(size[::-1])
        shapes, counts = np.unique(size, axis=1, return_counts=True)
        self.shapes = [(G, *shape) for G, shape in zip(counts.tolist(), shapes.T.tolist())]
        Q, P = int(size[0].sum()), int(size.sum())  # Q query slots, then key slots
        first = np.empty_like(size)
        first[:, by_size] = size[:, by_size].cumsum(1) - size[:, by_size] + [[0], [Q]]
        table, groups = np.full((2, len(self.group_size)), -1), 2 * bucket + [[0], [1]]
        table[0, groups] = first[:, tile] + start  # first slot of a group
        table[1, groups] = np.arange(len(tile)) - opening[tile]  # its bucket's number within the tile
        padding = np.concatenate([np.repeat(sequence[opening][by_size], s[by_size]) for s in size]) * self.L
        table, padding = (torch.from_numpy(x).to(self.rows.device) for x in (table, padding))
        slot = (table[0] - self.group_size.cumsum(0) + self.group_size)[self.groups]
        slot = slot + torch.arange(2 * self.N, device=slot.device)
        slot = torch.where(table[0][self.groups] < 0, P, slot)  # of a row without partner: behind the last
        to, inside = slot.new_full((P + 1,), self.N), slot.new_full((P + 1,), -1, dtype=torch.float32)
        to[slot], inside[slot] = self.rows, table[1][self.groups].float()
        (self.to_q, self.to_k, _), (self.in_q, in_k, _) = (x.split([Q, P - Q, 1]) for x in (to, inside))
        self.in_k = torch.where(in_k < 0, -2, in_k)
        self.from_q, self.from_k = torch.where(to[:P] < self.N, to[:P], padding).split([Q, P - Q])
        return self

    def chunks(self, dtype=torch.float32):
        """Yield (s, t, G, allowed): slices of query slots (G·x) and key slots (G·y), and which pairs count.

        allowed is 1 or 0, (G, x, y), or (G, 1, y) if the queries of a tile agree. No query is in two chunks.
        """
        q = k = 0
        for num_tiles, x, y in self.shapes:
            max_tiles, max_queries = max(MAX_CHUNK // (x * y), 1), min(x, max(MAX_CHUNK // y, 1))
            for g in range(0, num_tiles, max_tiles):
                G = min(max_tiles, num_tiles - g)
                t = slice(k, k + G * y)
                for first in range(0, x, max_queries):  # splits a tile only if G = 1
                    s = slice(q, q + G * min(max_queries, x - first))
                    q, i, j = s.stop, self.from_q[s].view(G, -1, 1), self.from_k[t].view(G, 1, y)
                    number = self.in_q[s].view(G, -1, 1)
                    if max(x, y) > self.tile:  # one bucket: all its pairs count, but for padding
                        number = number.new_zeros(1, 1, 1)
                    allowed = compare(torch.eq, number, self.in_k[t].view(G, 1, y), dtype)
                    if self.triangle:
                        order = torch.le if self.triangle == "upper" else torch.gt
                        allowed = allowed * compare(order, (i % self.L).float(), (j % self.L).float(), dtype)
                    for hq, hk in self.earlier:
                        allowed = allowed * (hq[i] != hk[j])
                    yield s, t, G, allowed
                k = t.stop

    def orient(self, q, k):
        """Return (q, k), or (k, q) in the lower triangle, where queries and keys change places."""
        return (k, q) if self.triangle == "lower" else (q, k)

    def gather(self, q, k, s, t, G):
        """Return (G, x, e) and (G, y, e), the rows of q in query slots s and of k in key slots t."""
        return gather_rows(q, self.from_q[s], G), gather_rows(k, self.from_k[t], G)


def pack_tiles(sizes, sequence, T):
    """Put buckets in order into tiles of T slots for queries and T for keys; a larger bucket is alone.

    Args:
        sizes, sequence: int (2, n) and (n,), queries and keys of n buckets, and their sequences in order.

    Returns:
        start (2, n), slots of its tile before each bucket; opening (G,), first bucket of each tile; tile (n,)
        of each bucket; total (2, G), queries and keys of each tile.
    """
    end, index, opening, bucket = sizes.cumsum(1), np.arange(len(sequence)), [], 0
    start = end - sizes
    stop = [np.searchsorted(e, s + T, "right") for s, e in zip(start, end)]  # the first that does not fit
    stop = np.minimum(np.minimum(*stop), np.searchsorted(sequence, sequence, "right"))
    stop, num_buckets = np.maximum(stop, index + 1).tolist(), len(index)
    while bucket < num_buckets:
        opening.append(bucket)
        bucket = stop[bucket]
    opening, tile = np.array(opening, int), np.searchsorted(opening, index, "right") - 1
    total = np.add.reduceat(sizes, opening, 1) if num_buckets else sizes
    return start - start[:, opening][:, tile], opening, tile, total


def padded_sizes(sizes, step):
    """Return sizes rounded up to multiples of 4 near powers of step, so that few are distinct."""
    powers = step ** np.ceil(np.log(sizes) / math.log(step))
    return (np.ceil(np.maximum(powers, sizes) / 4) * 4).astype(np.int64)


def make_layouts(hq, hk, fill, pairs, key_mask=None, costs=Costs()):
    """Return the BucketLayouts of hq, hk (B, H, n, L) that together hold each colliding pair once."""
    mask = None if key_mask is None else key_mask.repeat_interleave(hq.shape[1], 0)  # (BH, L)
    hq, hk = (h.permute(2, 0, 1, 3).flatten(1, 2) for h in (hq, hk))  # (n, BH, L)
    layouts, flat = [], [(a.flatten(), b.flatten()) for a, b in zip(hq, hk)]
    for f in range(len(hq)):
        triangle = "upper" if pairs == "upper" else None
        layouts.append(BucketLayout(hq[f], hk[f], costs, mask, triangle, flat[:f]))
        if triangle:  # below the diagonal the score is that of the mirrored pair
            layouts.append(BucketLayout(hk[f], hq[f], costs, mask, "lower", [(b, a) for a, b in flat[:f]]))
    if fill == "mask":  # one more function with one bucket per position, for positions that miss themselves
        position = torch.arange(hq.shape[2], device=hq.device).expand(hq.shape[1:])  # (BH, L)
        misses = position.masked_fill((hq == hk).any(0), hq.shape[2])
        layouts.append(BucketLayout(misses, position, costs, mask))
    return layouts


def gather_rows(rows, i, G):
    """Return (G, x, e): the rows (N, e) at i (G·x,)."""
    return rows.index_select(0, i).view(G, -1, rows.shape[1])


def compare(operation, a, b, dtype):
    """Return 1 where operation(a, b) holds, else 0. On a CPU bool and its conversion take 5 times as long."""
    return operation(a, b, out=a.new_empty(torch.broadcast_shapes(a.shape, b.shape), dtype=dtype))


def exp(x):
    """Compute exp of x in place, at least 1e-38: CPUs take 25 times as long where it is 0 or denormal."""
    return x.clamp_(min=-87).exp_()


def multiply(a, b, dtype):
    """Return the batched product a b in dtype, computed in the dtype of b."""
    return torch.bmm(a.to(b.dtype), b).to(dtype)


def scaled_product(bias, Q, K, scale, beta=1):
    """Return beta · bias + scale · Q Kᵀ (G, x, y) of Q (G, x, e) and K (G, y, e), in the dtype of bias."""
    if Q.dtype == bias.dtype:
        return torch.baddbmm(bias, Q, K.transpose(1, 2), beta=beta, alpha=scale)
    return torch.add(beta * bias, torch.bmm(Q, K.transpose(1, 2)), alpha=scale)


def masked_scores(Q, K, allowed):
    """Return the scores (G, x, y) of Q (G, x, e) and K (G, y, e), MASKED for pairs that are not allowed."""
    return scaled_product(allowed - 1, Q, K, Q.shape[-1] ** -0.5, -MASKED)


def merge_stats(stats, more):
    """Merge two (..., 3) of M, z and the number of pairs of a row: the online softmax, at the larger M."""
    (M, z, count), (M2, z2, count2) = stats.unbind(-1), more.unbind(-1)
    top = torch.maximum(M, M2)
    return torch.stack([top, z * exp(M - top) + z2 * exp(M2 - top), count + count2], -1)


def softmax_terms(stats, num_keys):
    """Return (N + 1, 3) of top, inverse and b: w = exp(s - top) · inverse, and b is w without a collision."""
    M, z, count = stats.unbind(-1)
    # subtle: count the other keys; Σ (e^s - 1) + L cancels if all keys collide with low scores. Keep top and
    # log z apart: at scores of 1,000 their sum in float32 loses four digits.
    rest = num_keys - count  # num_keys is 0 for "mask", where no other key has a weight
    top = torch.where(rest > 0, M.clamp(min=0), M)
    b = torch.where(rest > 0, exp((-top).clamp(max=0)), 0)
    z = z * exp(M - top) + rest.clamp(min=0) * b
    inverse = torch.where(count + num_keys > 0, 1 / z, 0)  # 0 for a row without keys
    terms = torch.stack([top, inverse, b * inverse], -1)  # (N + 1, 3)
    terms[-1] = terms.new_tensor([torch.finfo(terms.dtype).max, 0, 0])  # weights of 0 for row N, padding
    return terms


class SparseLSHAttention(torch.autograd.Function):
    """LSH attention from the colliding pairs, forward and backward.

    Pairs that do not collide share the score 0: the dense softmax needs no dense matrix. rest_i counts them
    in row i (0 for fill="mask"). M_i is the largest score of row i, their 0 included.

      z_i   = Σ_{j collides} exp(s_ij - M_i) + rest_i exp(-M_i)    w_ij = exp(s_ij - M_i) / z_i
      out_i = Σ_{j collides} (w_ij - b_i) v_j + b_i Σ_j v_j        b_i  = exp(-M_i) / z_i, 0 if rest_i = 0
      ds_ij = w_ij (dout_i · v_j - D_i)   D_i = dout_i · out_i     dq_i = Σ_j ds_ij k_j / √e, dk_j likewise
      dv_j  = Σ_{i collides} (w_ij - b_i) dout_i + Σ_i b_i dout_i

    On CUDA the sums are atomic: the last bits can differ between runs.
    """

    @staticmethod
    def forward(ctx, q, k, v, layouts, key_mask, use_zero_fill, product_dtype):
        """Return the output (B, H, L, u); key_mask bool (B, L) or None; products in product_dtype."""
        shape, (B, H, L), ctx.dtype, ctx.layouts = v.shape, q.shape[:3], q.dtype, layouts
        N, dtype = B * H * L, torch.promote_types(q.dtype, torch.float32)  # dtype of sums and statistics
        q, k, v = (x.flatten(0, 2).to(product_dtype) for x in (q, k, v))  # (N, e), v (N, u)
        mask = q.new_ones(B, L, dtype=dtype) if key_mask is None else key_mask.to(dtype)  # 1 = attend
        mask = mask.repeat_interleave(H, 0)  # (BH, L)
        num_keys = F.pad(mask.sum(1).repeat_interleave(L) * use_zero_fill, (0, 1))  # (N + 1,)
        stats, saved = mask.new_tensor([MIN_SCORE, 0, 0]).repeat(N + 1, 1), []
        is_saved = sum(layout.num_pairs for layout in layouts) <= MAX_SAVED * q.numel()
        for layout in layouts:  # a query may have keys in several layouts: weights need the sums over all
            for s, t, G, allowed in layout.chunks(dtype):
                S = masked_scores(*layout.gather(*layout.orient(q, k), s, t, G), allowed)  # (G, x, y)
                M = S.amax(-1, keepdim=True).clamp_(min=MIN_SCORE)  # (G, x, 1)
                z = exp(S.sub_(M)).sum(-1, keepdim=True)  # (G, x, 1)
                more = torch.cat([M, z, allowed.sum(-1, keepdim=True).expand_as(z)], -1)
                # no query is twice in a layout
                stats[layout.to_q[s]] = merge_stats(gather_rows(stats, layout.to_q[s], G), more).flatten(0, 1)
                if is_saved:
                    saved.append((S, M))
        terms, next_saved = softmax_terms(stats, num_keys), iter(saved)
        out = mask.new_zeros(N + 1, shape[-1])
        for layout in layouts:
            for s, t, G, allowed in layout.chunks(dtype):
                top, inverse, base = gather_rows(terms, layout.to_q[s], G).split(1, -1)  # (G, x, 1) each
                W, M = next(next_saved, (None, top))
                if W is None:
                    W = masked_scores(*layout.gather(*layout.orient(q, k), s, t, G), allowed)
                    W = exp(W.sub_(top))
                W.mul_(exp(M - top).mul_(inverse))
                O = torch.addcmul(W, base, allowed, value=-1)  # (G, x, y)
                O = multiply(O, gather_rows(v, layout.from_k[t], G), dtype)  # (G, x, u)
                out.index_add_(0, layout.to_q[s], O.flatten(0, 1))
        v_sum = torch.bmm(mask.unsqueeze(1), v.view(B * H, L, -1).to(dtype))  # (BH, 1, u)
        out[:N].view(B * H, L, -1).addcmul_(terms[:N, 2].view(B * H, L, 1), v_sum)
        ctx.save_for_backward(q, k, v, out, terms, mask, *(W for W, _ in saved))
        return out[:N].view(shape).to(ctx.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dout):
        """Return the gradients of q, k, v for dout (B, H, L, u)."""
        q, k, v, out, terms, mask, *saved = ctx.saved_tensors
        shape, (BH, L), N, scale = dout.shape[:3], mask.shape, len(q), q.shape[1] ** -0.5
        dtype, dout = out.dtype, dout.flatten(0, 2)  # (N, u)
        grads = dq, dk, dv = [out.new_zeros(N + 1, x.shape[1]) for x in (q, k, v)]
        with torch.autocast(dout.device.type, enabled=False):  # the caller may run backward() under autocast
            D = torch.linalg.vecdot(dout.to(dtype), out[:N]).unsqueeze(1)  # (N, 1)
            terms, saved = torch.cat([terms, F.pad(-scale * D, (0, 0, 0, 1))], 1), iter(saved)  # (N + 1, 4)
            b_dout = torch.bmm(terms[:N, 2].view(BH, 1, L), dout.to(dtype).view(BH, L, -1))  # (BH, 1, u)
            dout = dout.to(q.dtype)
            for layout in ctx.layouts:
                (a, b), (da, db) = layout.orient(q, k), layout.orient(dq, dk)
                for s, t, G, allowed in layout.chunks(dtype):
                    top, inverse, base, minus_D = gather_rows(terms, layout.to_q[s], G).split(1, -1)
                    (Q, K), (dO, V) = layout.gather(a, b, s, t, G), layout.gather(dout, v, s, t, G)
                    W = next(saved, None)
                    if W is None:
                        W = exp(masked_scores(Q, K, allowed).sub_(top)).mul_(inverse)
                    dS = scaled_product(minus_D, dO, V, scale).mul_(W)
                    W = torch.addcmul(W, base, allowed, value=-1)  # (G, x, y)
                    da.index_add_(0, layout.to_q[s], multiply(dS, K, dtype).flatten(0, 1))
                    db.index_add_(0, layout.to_k[t], multiply(dS.transpose(1, 2), Q, dtype).flatten(0, 1))
                    dv.index_add_(0, layout.to_k[t], multiply(W.transpose(1, 2), dO, dtype).flatten(0, 1))
        dv[:N].view(BH, L, -1).addcmul_(mask.unsqueeze(-1), b_dout)
        return *(d[:N].view(*shape, -1).to(ctx.dtype) for d in grads), None, None, None, None


def dense_lsh_attention(q, k, v, hq, hk, product_dtype, *, fill, pairs, key_mask=None):
    """Return lsh_attention_reference in fewer passes over (L, L), the implementation for short sequences."""
    (B, H, L, e), input_dtype, use_upper = q.shape, q.dtype, pairs == "upper"
    dtype = torch.promote_types(q.dtype, torch.float32)
    if fill == "mask" and not use_upper:
        mask = collisions(hq, hk) | torch.eye(L, dtype=torch.bool, device=q.device)
        mask = mask if key_mask is None else mask & key_mask[:, None, None, :]
        return F.scaled_dot_product_attention(*(x.to(product_dtype) for x in (q, k, v)), mask).to(q.dtype)
    keys = q.new_ones(B, L) if key_mask is None else key_mask
    keys = keys.to(dtype).repeat_interleave(H, 0).unsqueeze(1)  # (BH, 1, L), 1 = attend
    hq, hk = (h.flatten(0, 1).to(torch.float32 if h.max() < 2**24 else torch.float64) for h in (hq, hk))
    half = torch.ones_like(keys[0].expand(L, L)).triu() - 0.5 * torch.eye(L, device=q.device)
    tensors, out = [*(x.flatten(0, 1).to(product_dtype) for x in (q * e**-0.5, k, v)), hq, hk, keys], []
    # a few sequences at a time: their matrices stay near the processor
    for q, k, v, hq, hk, keys in zip(*(x.split(max(MAX_CHUNK // 4 // L**2, 1)) for x in tensors)):
        equal = zip(hq.unsqueeze(-1).unbind(1), hk.unsqueeze(-2).unbind(1))
        A = functools.reduce(torch.maximum, (compare(torch.eq, a, b, dtype) for a, b in equal))  # (G, L, L)
        S = (q @ k.transpose(1, 2)).to(dtype)
        if use_upper:  # the upper triangle with half of the diagonal, plus its mirror image
            A *= half
            if fill == "mask":
                A.diagonal(dim1=1, dim2=2).fill_(0.5)
                keys = (A + A.transpose(1, 2)) * keys
            S = S * A
            S = S + S.transpose(1, 2)
        else:
            S = S * A
        if fill == "mask" or key_mask is not None:
            W = torch.add(S, 1 - keys, alpha=MASKED).softmax(-1) * keys  # 0 in a row without keys
        else:
            W = S.softmax(-1)
        out.append(W.to(product_dtype) @ v)
    return torch.cat(out).unflatten(0, (B, H)).to(input_dtype)


@functools.cache
def measure_costs(device_type, dtype, width, fill="zero", pairs="all", use_grad=True):
    """Return the Costs of this machine, from a few small passes of some 0.2 s in all, once per process.

    Args:
        device_type, dtype, width: str, torch.dtype and int, of the vectors.
        fill, pairs: as for lsh_attention.
        use_grad: whether passes include backward.
    """
    generator, is_cuda, blocks, dense = torch.Generator().manual_seed(0), device_type == "cuda", [], []
    clock = time.perf_counter if is_cuda else time.thread_time  # whatever else this processor does

    def draw(*shape):
        return torch.randn(shape, generator=generator).to(device_type, dtype)

    def time_pass(function, *args):
        """Return the least seconds of two rounds after a first one."""
        times = []
        for _ in range(3):
            start = clock()
            function(*args)
            if is_cuda:
                torch.cuda.synchronize()
            times.append(clock() - start)
        return min(times[1:])

    def attend(hq, hk, impl, *qkv):
        with torch.set_grad_enabled(use_grad):
            out = lsh_attention(*qkv, hq, hk, fill=fill, pairs=pairs, impl=impl, costs=trial)
        if use_grad:
            torch.autograd.grad(out, qkv, qkv[-1])

    a = draw(16, 64, 64)
    is_fast = dtype.itemsize == 2 and time_pass(torch.bmm, a, a) < time_pass(torch.bmm, a.float(), a.float())
    trial = Costs(1, 0, 0, 0, has_fast_bfloat16=float(is_fast))  # the fewest pairs
    with torch.inference_mode(False):
        for B, L, m, impl in ((16, 256, 64, "blocks"), (4, 256, 2, "blocks"), (1, 256, 64, "blocks"),
                              (1, 256, 8, "blocks"), (64, 64, 64, "dense"), (4, 256, 64, "dense")):
            hq, hk = torch.randint(m, (2, B, 1, 1, L), generator=generator).to(device_type)
            qkv = [draw(B, 1, L, width).requires_grad_(use_grad) for _ in range(3)]
            seconds = time_pass(attend, hq, hk, impl, *qkv)
            if impl == "dense":
                dense.append((B * L * L, B * L, seconds))
            else:
                layouts = [x.fill() for x in make_layouts(hq, hk, fill, pairs, costs=trial)]
                parts = [(x.num_pairs, (x.N + len(x.to_q)) / 2, len(x.shapes), 1) for x in layouts]
                blocks.append((*np.sum(parts, 0), seconds))
    return Costs(*fit_costs(blocks, Costs()[:4]), *fit_costs(dense, Costs()[4:6]), trial.has_fast_bfloat16)


def fit_costs(cases, defaults):
    """Return costs (n,) of which each case, (numbers (n,), seconds), is the sum of the products with numbers.

    Least squares of relative errors. Where the few cases do not tell costs apart, they keep the defaults'
    proportions.
    """
    *numbers, seconds = np.array(cases, float).T
    share = np.array(numbers).T * defaults / seconds[:, None]  # of the time measured, by the defaults
    prior = np.full(len(defaults), 0.3 / share.sum(1).mean())
    system = np.vstack([share, 0.3 * np.eye(len(defaults))]), np.append(np.ones(len(cases)), prior)
    return (np.maximum(np.linalg.lstsq(*system)[0], 0.1 * prior) * defaults).tolist()


def select_implementation(hq, hk, *, fill, pairs, key_mask=None, impl="auto", dtype=torch.float32,
                          costs=None):
    """Return the cheaper implementation of lsh_attention for these buckets, and its layouts.

    Args:
        hq, hk, fill, pairs, key_mask, impl: as for lsh_attention.
        dtype: torch.dtype of the vectors.
        costs: Costs, or None: those of this machine.

    Returns:
        "dense" and None, or "blocks" and a list of BucketLayout.
    """
    (n, L), N = hq.shape[2:], hq[:, :, 0].numel()
    costs = costs or measure_costs(hq.device.type, dtype, 64, fill, pairs)
    num_layouts = n * (1 + (pairs == "upper")) + (fill == "mask")
    dense = N * (costs.dense_row + L * costs.dense_pair)
    if impl == "blocks" or impl == "auto" and L > MAX_DENSE_LENGTH:
        dense = math.inf
    least = num_layouts * (costs.layout + costs.size + N / 2 * costs.row)  # before buckets are counted
    if impl != "dense" and least < dense:
        layouts = make_layouts(hq, hk, fill, pairs, key_mask, costs)
        if sum(layout.cost for layout in layouts) < dense:
            return "blocks", [layout.fill() for layout in layouts]
    return "dense", None


@torch.compiler.disable  # the shapes depend on the data, so there is nothing to compile once
def lsh_attention(q, k, v, hq, hk, *, fill="zero", pairs="all", key_mask=None, impl="auto", costs=None):
    """Return attention over the pairs whose hash buckets collide, exact in every mode. [BL Alg. 1]

    pairs="upper", not the default, is the triangle of the authors' released code. Algorithm 1 as printed runs
    over all of C and lets the last writer win.

    Args:
        q, k, v, hq, hk, fill, pairs, key_mask: as for lsh_attention_reference.
        impl: "blocks": from the colliding pairs. "dense": the formula. "auto": the one predicted
            to be faster. Both sum in float32 or float64.
        costs: Costs, or None: those of this machine, measured at first use. Keep them where equal inputs must
            give equal bits in another process.

    Returns:
        float (B, H, L, u), differentiable once.

    Raises:
        ValueError: If an argument has another dtype, shape or value than check_arguments allows.

    Example:
        planes, coef = draw_hyperplanes(heads, 1, 8, width, 256, torch.Generator().manual_seed(0))
        hq, hk = simhash(q, planes, coef, 256), simhash(k, planes, coef, 256)
        out = lsh_attention(q, k, v, hq, hk)
    """
    mode = dict(fill=fill, pairs=pairs, key_mask=key_mask)
    check_arguments(q=q, k=k, v=v, hq=hq, hk=hk, impl=impl, **mode)
    use_grad = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    costs = costs or measure_costs(q.device.type, q.dtype, q.shape[-1], fill, pairs, use_grad)
    implementation, layouts = select_implementation(hq, hk, impl=impl, costs=costs, **mode)
    dtype = torch.float32 if q.dtype.itemsize == 2 and not costs.has_fast_bfloat16 else q.dtype
    with torch.autocast(q.device.type, enabled=False):
        if implementation == "blocks":
            return SparseLSHAttention.apply(q, k, v, layouts, key_mask, fill == "zero", dtype)
        return dense_lsh_attention(q, k, v, hq, hk, dtype, **mode)


def main(argv=None):
    """Demo: print which pairs collide and compare the sparse result with the reference."""
    generator = torch.Generator().manual_seed(0)
    centers = torch.randn(3, 64, generator=generator).repeat_interleave(4, 0)  # (12, e)
    q, k, v = centers + 0.3 * torch.randn(3, 1, 1, 12, 64, generator=generator)
    planes, coef = draw_hyperplanes(1, 1, 4, 64, 64, generator)
    hq, hk = simhash(q, planes, coef, 64), simhash(k, planes, coef, 64)
    print("12 positions in 3 groups of 4 similar vectors. Rows are queries, columns are keys.\n"
          "Vectors on the same side of r = 4 random hyperplanes share one of m = 64 buckets.\n"
          "#  query and key share a bucket: LSH attention computes their score   .  it does not\n")
    for row, bucket in zip(collisions(hq, hk)[0, 0], hq.flatten()):
        print("  " + " ".join(".#"[is_collision] for is_collision in row), f"  query bucket {bucket:2}")
    gap = lsh_attention(q, k, v, hq, hk, impl="blocks") - lsh_attention_reference(q, k, v, hq, hk)
    print(f"\nLargest difference between the sparse result and the dense formula: {gap.abs().max():.1e}")


if __name__ == "__main__":
    main()
