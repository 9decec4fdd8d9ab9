"""Attention over all pairs of positions (dense), or over those that locality-sensitive hashing (LSH) selects.

Paper map:
    [V] Vaswani et al. 2017, Attention Is All You Need: [V §3.2.1] full_attention
    [BL] Li & Yip, BERT-LSH: [BL §2.1] simhash   [BL §2.1 law] collision_probability
        [BL §2.2.2] lsh_attention_reference   [BL Alg. 1] lsh_attention
Out of scope: causal masks; cross-attention (q, k, v have one length); projections to q, k, v (model.py).
Deviations:
    1. Dense attention calls torch's scaled_dot_product_attention, except where that is slow (full_attention).
    2. The paper fills a dense matrix. SparseLSHAttention computes its exact result from the colliding pairs.
    3. The hyperplanes are drawn once, or once per step, not in every forward pass as in the authors' code.
    4. LSH attention has no dropout on weights: a pair that does not collide has no weight of its own.
    5. The default is pairs="all". The released code, and the 28.5 dot products printed, are of a triangle,
       "upper". Algorithm 1 as printed runs over all of C, and the last writer of A[i, j] = A[j, i] wins.
Notation:
    B batch   H heads   L positions   e head size   n hash functions   r hyperplanes per function ("bands")
    m hash buckets   BH = B·H sequences   N = BH·L rows   P slots: rows in bucket order, with padding
    G buckets of one padded size   x, y query slots and key slots of such a bucket   i query   j key
    s score   w weight   M largest score of a row   z sum of exp(s - M) over a row   u width of the values
Demo: python attention.py
"""

import functools
import math

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
    h = (is_above.unflatten(-1, coef.shape[1:]) * coef.unsqueeze(1)).sum(-1) % buckets  # (B, H, L, n)
    return h.transpose(2, 3).contiguous()


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


MIN_SCORE = -1e30  # below every score, yet finite: the difference of two of them is 0, not NaN
SIZE_STEPS = (1.1, 1.25, 1.5, 2.0, 4.0)  # ratios between neighboring padded sizes that padded_sizes tries
MAX_CHUNK = 2**20  # scores computed at once: 4 MiB in float32, near the cache of a core and far from L²
MAX_SAVED = 8  # save weights for the backward pass up to 8 times the size of q; recompute larger ones
# Overhead of a layout, in pairs: the kernel calls for a padded size; moving a row to its bucket and back.
# Cost of one pair of the dense formula in bfloat16. Measured on two CPU cores.
COST_PER_SIZE, COST_PER_ROW, COST_BFLOAT16 = 2**14, 56, 0.35
MAX_DENSE_LENGTH = 1024  # above this length no (L, L) matrix is allocated


class BucketLayout:
    """The colliding pairs of one hash function: rows in bucket order, padded to few sizes.

    triangle        "upper" (i <= j), "lower" (i > j) or None
    earlier         hq, hk (N + 1,) of each earlier function: a pair belongs to the first in which it collides
    to_q, to_k      int64 (P,), row of each slot for results; N in a padding slot
    from_q, from_k  int64 (P,), row of each slot for inputs; the last row of the bucket in a padding slot
    shapes          list of (G, x, y): G buckets of x query slots and y key slots, in slot order
    num_pairs, cost int, pairs computed, with padding; the same plus overhead

        hq  5 7 5 5    bucket 5: queries 0 2 3, key 1    to_q    0 2 3 4  to_k    1   (4 = N: padding)
        hk  2 5 2 3    bucket 7: query 1, no key         from_q  0 2 3 3  from_k  1   shapes [(1, 4, 1)]
    """

    def __init__(self, hq, hk, key_mask=None, triangle=None, earlier=()):
        """Sort hq, hk (BH, L) into buckets, without the keys that key_mask (BH, L) excludes."""
        (BH, L), self.N, self.triangle, self.earlier = hq.shape, hq.numel(), triangle, earlier
        unused = int(torch.maximum(hq.max(), hk.max())) + 1
        if key_mask is not None:
            hk = hk.masked_fill(~key_mask, unused)  # a bucket without queries
        offset = torch.arange(BH, device=hq.device).unsqueeze(1) * (unused + 1)  # buckets per sequence
        bucket_q, order_q, first_q, count_q = group_equal((hq + offset).flatten())
        bucket_k, order_k, first_k, count_k = group_equal((hk + offset).flatten())
        match = torch.searchsorted(bucket_k, bucket_q).clamp(max=len(bucket_k) - 1)
        shared = (bucket_k[match] == bucket_q).nonzero().squeeze(1)
        first_q, count_q, match = first_q[shared], count_q[shared], match[shared]
        first_k, count_k = first_k[match], count_k[match]
        x, y, self.num_pairs, num_sizes = padded_sizes(count_q, count_k)
        self.cost = self.num_pairs + COST_PER_SIZE * num_sizes + COST_PER_ROW * self.N
        shape, order, _, G = group_equal(x * (8 * L) + y)  # every padded size is below 8 L
        self.shapes = [(g, s // (8 * L), s % (8 * L)) for g, s in zip(G.tolist(), shape.tolist())]
        self.to_q, self.from_q = fill_slots(first_q[order], count_q[order], x[order], order_q)
        self.to_k, self.from_k = fill_slots(first_k[order], count_k[order], y[order], order_k)

    def chunks(self):
        """Yield (s, t, G, allowed): slices of query slots (G·x) and key slots (G·y), and which pairs count.

        allowed is bool (G, x, y), or (G, 1, y) if the queries of a bucket agree. No query is in two chunks.
        """
        q = k = 0
        for num_buckets, x, y in self.shapes:
            max_buckets, max_queries = max(MAX_CHUNK // (x * y), 1), min(x, max(MAX_CHUNK // y, 1))
            for g in range(0, num_buckets, max_buckets):
                G = min(max_buckets, num_buckets - g)
                t = slice(k, k + G * y)
                for start in range(0, x, max_queries):  # splits a bucket only if G = 1
                    s = slice(q, q + G * min(max_queries, x - start))
                    q, i, j = s.stop, self.to_q[s].view(G, -1, 1), self.to_k[t].view(G, 1, y)
                    allowed = j < self.N
                    if self.triangle:
                        allowed = allowed & (i <= j if self.triangle == "upper" else i > j)
                    for hq, hk in self.earlier:
                        allowed = allowed & (hq[i] != hk[j])
                    yield s, t, G, allowed
                k = t.stop

    def orient(self, q, k):
        """Return (q, k), or (k, q) in the lower triangle, where queries and keys change places."""
        return (k, q) if self.triangle == "lower" else (q, k)

    def gather(self, q, k, s, t, G):
        """Return (G, x, e) and (G, y, e), the rows of q in query slots s and of k in key slots t."""
        return gather_rows(q, self.from_q[s], G), gather_rows(k, self.from_k[t], G)


def group_equal(keys):
    """Return the distinct keys of int64 (N,), the sorting order, each key's first index there and count."""
    keys, order = keys.sort(stable=True)
    keys, count = keys.unique_consecutive(return_counts=True)
    return keys, order, count.cumsum(0) - count, count


def padded_sizes(count_q, count_k):
    """Return the cheapest padded sizes x, y of the buckets, the number of pairs and of distinct (x, y)."""
    longest = max(count_q.max().item(), count_k.max().item()) if len(count_q) else 1
    candidates = []
    for step in SIZE_STEPS:  # many sizes cost kernel calls, few sizes cost padding: the data decides
        sizes = [1, 2, 4]
        while sizes[-1] < longest:
            sizes.append(max(math.ceil(sizes[-1] * step / 4) * 4, sizes[-1] + 4))
        sizes = torch.tensor(sizes, device=count_q.device)
        x, y = torch.searchsorted(sizes, count_q), torch.searchsorted(sizes, count_k)
        G = torch.bincount(x * len(sizes) + y, minlength=len(sizes) ** 2).view(len(sizes), -1)
        num_pairs, num_sizes = int((G * torch.outer(sizes, sizes)).sum()), int((G > 0).sum())
        candidates.append((sizes[x], sizes[y], num_pairs, num_sizes))
    return min(candidates, key=lambda c: c[2] + COST_PER_SIZE * c[3])


def fill_slots(first, count, size, rows):
    """Return the row of each slot (P,) for results and for inputs, from rows (N,) in bucket order."""
    bucket = torch.arange(len(size), device=size.device).repeat_interleave(size)  # (P,)
    offset = torch.arange(len(bucket), device=size.device) - (size.cumsum(0) - size)[bucket]  # (P,)
    row = rows[first[bucket] + torch.minimum(offset, count[bucket] - 1)]  # (P,)
    return torch.where(offset < count[bucket], row, len(rows)), row


def make_layouts(hq, hk, fill, pairs, key_mask=None):
    """Return the BucketLayouts of hq, hk (B, H, n, L) that together hold each colliding pair once."""
    mask = None if key_mask is None else key_mask.repeat_interleave(hq.shape[1], 0)  # (BH, L)
    hq, hk = (h.permute(2, 0, 1, 3).flatten(1, 2) for h in (hq, hk))  # (n, BH, L)
    layouts, flat = [], [(F.pad(a.flatten(), (0, 1)), F.pad(b.flatten(), (0, 1))) for a, b in zip(hq, hk)]
    for f in range(len(hq)):
        layouts.append(BucketLayout(hq[f], hk[f], mask, "upper" if pairs == "upper" else None, flat[:f]))
        if pairs == "upper":  # below the diagonal the score is that of the mirrored pair
            layouts.append(BucketLayout(hk[f], hq[f], mask, "lower", [(b, a) for a, b in flat[:f]]))
    if fill == "mask":  # one more function with one bucket per position, for positions that miss themselves
        position = torch.arange(hq.shape[2], device=hq.device).expand(hq.shape[1:])  # (BH, L)
        layouts.append(BucketLayout(position.masked_fill((hq == hk).any(0), hq.shape[2]), position, mask))
    return layouts


def gather_rows(rows, i, G):
    """Return (G, x, e): the rows (N, e) at i (G·x,)."""
    return rows.index_select(0, i).view(G, -1, rows.shape[1])


def chunk_scores(Q, K, allowed):
    """Return the scores (G, x, y) of Q (G, x, e) and K (G, y, e), -inf for pairs that are not allowed."""
    bias = Q.new_zeros(allowed.shape).masked_fill_(~allowed, -torch.inf)
    return torch.baddbmm(bias, Q, K.transpose(1, 2), alpha=Q.shape[-1] ** -0.5)


def merge_stats(stats, more):
    """Merge two (..., 3) of M, z and the number of pairs of a row: the online softmax, at the larger M."""
    (M, z, count), (M2, z2, count2) = stats.unbind(-1), more.unbind(-1)
    top = torch.maximum(M, M2)
    return torch.stack([top, z * (M - top).exp() + z2 * (M2 - top).exp(), count + count2], -1)


def softmax_terms(stats, num_keys):
    """Return (N + 1, 3) of top, inverse and b: w = exp(s - top) · inverse, and b is w without a collision."""
    M, z, count = stats.unbind(-1)
    # subtle: count the other keys; Σ (e^s - 1) + L cancels if all keys collide with low scores. Keep top and
    # log z apart: at scores of 1,000 their sum in float32 loses four digits.
    rest = num_keys - count  # num_keys is 0 for "mask", where no other key has a weight
    top = torch.where(rest > 0, M.clamp(min=0), M)
    b = torch.where(rest > 0, (-top).clamp(max=0).exp(), 0)
    z = z * (M - top).exp() + rest * b
    inverse = torch.where(z > 0, 1 / z, 0)  # 0 for a row without keys
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
    def forward(ctx, q, k, v, layouts, key_mask, use_zero_fill):
        """Return the output (B, H, L, u); key_mask bool (B, L) or None."""
        shape, (B, H, L), ctx.dtype, ctx.layouts = v.shape, q.shape[:3], q.dtype, layouts
        N, dtype = B * H * L, torch.promote_types(q.dtype, torch.float32)
        q, k, v = (x.flatten(0, 2).to(dtype) for x in (q, k, v))  # (N, e), v (N, u)
        mask = q.new_ones(B, L) if key_mask is None else key_mask.to(dtype)  # 1 = attend
        mask = mask.repeat_interleave(H, 0)  # (BH, L)
        num_keys = F.pad(mask.sum(1).repeat_interleave(L) * use_zero_fill, (0, 1))  # (N + 1,)
        stats, saved = mask.new_tensor([MIN_SCORE, 0, 0]).repeat(N + 1, 1), []
        is_saved = sum(layout.num_pairs for layout in layouts) <= MAX_SAVED * q.numel()
        for layout in layouts:  # a query may have keys in several layouts: weights need the sums over all
            for s, t, G, allowed in layout.chunks():
                S = chunk_scores(*layout.gather(*layout.orient(q, k), s, t, G), allowed)  # (G, x, y)
                M = S.amax(-1, keepdim=True).clamp_(min=MIN_SCORE)  # (G, x, 1)
                z = S.sub_(M).exp_().sum(-1, keepdim=True)  # (G, x, 1)
                more = torch.cat([M, z, allowed.sum(-1, keepdim=True, dtype=dtype).expand_as(z)], -1)
                # no query is twice in a layout
                stats[layout.to_q[s]] = merge_stats(gather_rows(stats, layout.to_q[s], G), more).flatten(0, 1)
                if is_saved:
                    saved.append((S, M))
        terms, next_saved = softmax_terms(stats, num_keys), iter(saved)
        out = mask.new_zeros(N + 1, shape[-1])
        for layout in layouts:
            for s, t, G, allowed in layout.chunks():
                top, inverse, base = gather_rows(terms, layout.to_q[s], G).split(1, -1)  # (G, x, 1) each
                W, M = next(next_saved, (None, top))
                if W is None:
                    W = chunk_scores(*layout.gather(*layout.orient(q, k), s, t, G), allowed).sub_(top).exp_()
                W.mul_((M - top).exp_().mul_(inverse))
                W = torch.addcmul(W, base, allowed.to(dtype), value=-1)  # (G, x, y)
                out.index_add_(0, layout.to_q[s], (W @ gather_rows(v, layout.from_k[t], G)).flatten(0, 1))
        v_sum = torch.bmm(mask.unsqueeze(1), v.view(B * H, L, -1))  # (BH, 1, u)
        out[:N].view(B * H, L, -1).addcmul_(terms[:N, 2].view(B * H, L, 1), v_sum)
        ctx.save_for_backward(q, k, v, out, terms, mask, *(W for W, _ in saved))
        return out[:N].view(shape).to(ctx.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dout):
        """Return the gradients of q, k, v for dout (B, H, L, u)."""
        q, k, v, out, terms, mask, *saved = ctx.saved_tensors
        shape, (BH, L), N, scale = dout.shape[:3], mask.shape, len(q), q.shape[1] ** -0.5
        dout = dout.flatten(0, 2).to(out.dtype)  # (N, u)
        grads = dq, dk, dv = [x.new_zeros(N + 1, x.shape[1]) for x in (q, k, v)]
        with torch.autocast(dout.device.type, enabled=False):  # the caller may run backward() under autocast
            D = torch.bmm(dout.unsqueeze(1), out[:N].unsqueeze(2)).view(N, 1)
            terms, weights = torch.cat([terms, F.pad(-D, (0, 0, 0, 1))], 1), iter(saved)  # (N + 1, 4), W
            for layout in ctx.layouts:
                (a, b), (da, db) = layout.orient(q, k), layout.orient(dq, dk)
                for s, t, G, allowed in layout.chunks():
                    (Q, K), (dO, V) = layout.gather(a, b, s, t, G), layout.gather(dout, v, s, t, G)
                    top, inverse, base, minus_D = gather_rows(terms, layout.to_q[s], G).split(1, -1)
                    W = next(weights, None)
                    if W is None:
                        W = chunk_scores(Q, K, allowed).sub_(top).exp_().mul_(inverse)
                    dS = torch.baddbmm(minus_D, dO, V.transpose(1, 2), beta=scale, alpha=scale).mul_(W)
                    W = torch.addcmul(W, base, allowed.to(W.dtype), value=-1)  # (G, x, y)
                    da.index_add_(0, layout.to_q[s], torch.bmm(dS, K).flatten(0, 1))
                    db.index_add_(0, layout.to_k[t], torch.bmm(dS.transpose(1, 2), Q).flatten(0, 1))
                    dv.index_add_(0, layout.to_k[t], torch.bmm(W.transpose(1, 2), dO).flatten(0, 1))
            b_dout = torch.bmm(terms[:N, 2].view(BH, 1, L), dout.view(BH, L, -1))  # (BH, 1, u)
        dv[:N].view(BH, L, -1).addcmul_(mask.unsqueeze(-1), b_dout)
        return *(d[:N].view(*shape, -1).to(ctx.dtype) for d in grads), None, None, None


def dense_lsh_attention(q, k, v, hq, hk, *, fill, pairs, key_mask=None):
    """Return lsh_attention_reference in fewer passes over (L, L), the implementation for short sequences."""
    L, is_collision = q.shape[2], collisions(hq, hk)
    scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-2, -1)  # (B, H, L, L)
    if pairs == "upper":  # the upper triangle with half of the diagonal, plus its mirror image
        half = torch.ones_like(scores[0, 0]).triu() - 0.5 * torch.eye(L, device=q.device, dtype=scores.dtype)
        scores = scores * half
        scores = scores + scores.transpose(-2, -1)
        is_collision = is_collision.triu() | is_collision.triu().transpose(-2, -1)
    if fill == "mask":
        is_collision = is_collision | torch.eye(L, dtype=torch.bool, device=q.device)
    scores = scores.masked_fill(~is_collision, 0.0 if fill == "zero" else -torch.inf)
    return masked_softmax(scores, key_mask) @ v


def select_implementation(hq, hk, *, fill, pairs, key_mask=None, impl="auto", dtype=torch.float32):
    """Return the cheaper implementation of lsh_attention for these buckets, and its layouts.

    Args:
        hq, hk, fill, pairs, key_mask, impl: as for lsh_attention.
        dtype: torch.dtype of the vectors.

    Returns:
        "dense" and None, or "blocks" and a list of BucketLayout.
    """
    (n, L), N = hq.shape[2:], hq[:, :, 0].numel()  # the sparse sums are in float32 in any case
    dense_cost = N * L * (1 + 0.5 * (pairs == "upper")) * (COST_BFLOAT16 if dtype.itemsize == 2 else 1)
    if impl == "blocks" or impl == "auto" and L > MAX_DENSE_LENGTH:
        dense_cost = math.inf
    num_layouts = n * (1 + (pairs == "upper")) + (fill == "mask")  # each has more than 16 sizes
    if impl != "dense" and (COST_PER_ROW * N + 16 * COST_PER_SIZE) * num_layouts < dense_cost:
        layouts = make_layouts(hq, hk, fill, pairs, key_mask)
        if sum(layout.cost for layout in layouts) < dense_cost:
            return "blocks", layouts
    return "dense", None


@torch.compiler.disable  # the shapes depend on the data, so there is nothing to compile once
def lsh_attention(q, k, v, hq, hk, *, fill="zero", pairs="all", key_mask=None, impl="auto"):
    """Return attention over the pairs whose hash buckets collide, exact in every mode. [BL Alg. 1]

    pairs="upper", not the default, is the triangle of the authors' released code. Algorithm 1 as printed runs
    over all of C and lets the last writer win.

    Args:
        q, k, v, hq, hk, fill, pairs, key_mask: as for lsh_attention_reference.
        impl: "blocks": from the colliding pairs, summed in float32 or float64. "dense": the formula in the
            dtype of q. "auto": the cheaper one (select_implementation).

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
    implementation, layouts = select_implementation(hq, hk, impl=impl, dtype=q.dtype, **mode)
    if implementation == "dense":
        return dense_lsh_attention(q, k, v, hq, hk, **mode)
    with torch.autocast(q.device.type, enabled=False):
        return SparseLSHAttention.apply(q, k, v, layouts, key_mask, fill == "zero")


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
