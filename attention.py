"""Attention between positions: (B, H, L, e) queries, keys and values -> the same shape.

Over all pairs, or over those whose query and key fall into one bucket of a hash: exact, and at the cost of
those pairs alone.

Sources   [V] Vaswani et al. 2017, Attention Is All You Need   [BL] Li & Yip, BERT-LSH
Map       [V §3.2.1] full_attention   [BL §2.1] simhash   [BL §2.1 law] collision_probability
          [BL §2.2.2] lsh_attention_reference   [BL Alg. 1] lsh_attention
Not here  the projections to queries, keys and values (model.py); hashing of *words* (hashing.py).
Departs   1. The kernel is torch's scaled_dot_product_attention, but where it is slow (see full_attention).
          2. The paper fills a dense matrix pair by pair; here its exact result comes from the colliding pairs
             alone (see Colliding).
          3. The planes are drawn once, from a seed, or once a step; the authors' code draws new ones in every
             forward pass, in evaluation too.
          4. With LSH no dropout on attention weights: a pair that does not collide has no weight of its own.
Letters   B batch   H heads   L positions   e width of a head   n hash functions   r planes of one ("bands")
          m buckets   R = B·H sequences   N = R·L rows   P slots: rows in bucket order, with padding
          G buckets of one size   x, y slots of such a bucket for queries and for keys
          i query   j key   s score   w weight   M a row's largest score   z the sum of its exp(s - M)
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
    weights = scores.softmax(-1).masked_fill((scores == -torch.inf).all(-1, keepdim=True), 0.0)
    return weights @ v


# ---------------------------------------------------------------------------------------------------------
# Which pairs collide


def draw_planes(heads, functions, bands, width, buckets, generator):
    """in: heads H, functions n, bands r, width e, buckets m, generator torch.Generator of the CPU
    out: planes float (H, n, r, e), standard normal; coef int64 (H, n, r), uniform in [0, m)
    """
    planes = torch.randn(heads, functions, bands, width, generator=generator, device="cpu")
    return planes, torch.randint(buckets, (heads, functions, bands), generator=generator, device="cpu")


@torch.no_grad()
def simhash(x, planes, coef, buckets):
    """The buckets of each vector: on which side of r planes it lies, and a random sum of that. [BL §2.1]

    in:  x (B, H, L, e); planes float (H, n, r, e); coef int64 (H, n, r); buckets m
    out: int64 (B, H, n, L) in [0, m); computed in float32 whatever x and autocast are, without a gradient

        side of g_1, g_2, g_3    coef    h(x), m 16
        above above below        9 12 3  (9 + 12) mod 16 = 5
        above below above        9 12 3  (9 + 3)  mod 16 = 12      another side, most likely another bucket
    """
    with torch.autocast(x.device.type, enabled=False):
        above = x.float() @ planes.float().flatten(1, 2).transpose(1, 2) > 0  # (B, H, L, n·r)
    h = (above.unflatten(-1, coef.shape[1:]) * coef.unsqueeze(1)).sum(-1) % buckets  # (B, H, L, n)
    return h.transpose(2, 3).contiguous()


def collision_probability(angle, bands, buckets, functions=1):
    """How likely two vectors share a bucket of some function. [BL §2.1 law]

    in:  angle between them, radians; bands r, buckets m, functions n
    out: 1 - (1 - P)^n with P = p + (1 - p)/m and p = (1 - angle/π)^r: on one side of all planes, or else by
         chance. The paper's P = p + 1/m exceeds 1 for equal vectors.
    """
    p = (1 - angle / math.pi) ** bands
    return 1 - (1 - p - (1 - p) / buckets) ** functions


def collision_share(hq, hk):
    """in: hq, hk int64 (B, H, n, L); out: float, the share of the first sequence's pairs that collide"""
    (H, _, L), many = hq.shape[1:], 0
    for h in range(H):
        for part in hq[0, h].split(1024, dim=-1):  # a thousand queries at a time: never (L, L)
            many += (part.unsqueeze(-1) == hk[0, h].unsqueeze(-2)).any(0).sum().item()
    return many / (H * L * L)


def lsh_attention_reference(q, k, v, hq, hk, *, fill="zero", pairs="upper", key_mask=None):
    """Attention where buckets of query and key collide, written out: the oracle. [BL §2.2.2]

    in:  q, k, v (B, H, L, e); hq, hk int64 (B, H, n, L), at least 0: the buckets of queries and of keys;
         fill, what becomes of a pair that collides in no function: "zero", a score of 0 and so a weight of
         exp(0), as in the paper; "mask", no weight, but a position always sees itself;
         pairs: "upper", the paper's: a score <q_i, k_j> is computed for i <= j only and serves (j, i) too;
         "all", each pair has its own; key_mask bool (B, L) or None
    out: (B, H, L, e); costs an (L, L) matrix per head
    """
    L = q.shape[2]
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])  # (B, H, L, L)
    collide = (hq.unsqueeze(-1) == hk.unsqueeze(-2)).any(2)  # (B, H, L, L)
    if pairs == "upper":
        upper = torch.ones(L, L, dtype=torch.bool, device=q.device).triu()
        scores = torch.where(upper, scores, scores.transpose(-2, -1))
        collide = torch.where(upper, collide, collide.transpose(-2, -1))
    if fill == "mask":
        collide = collide | torch.eye(L, dtype=torch.bool, device=q.device)
    scores = scores.masked_fill(~collide, 0.0 if fill == "zero" else -torch.inf)
    if key_mask is not None:
        scores = scores.masked_fill(~key_mask[:, None, None, :], -torch.inf)
    # a row of only -inf has softmax NaN: no key at all, and so 0
    return scores.softmax(-1).masked_fill((scores == -torch.inf).all(-1, keepdim=True), 0.0) @ v


# ---------------------------------------------------------------------------------------------------------
# The same from the colliding pairs alone

LEAST = -1e30  # below every score, yet finite: the difference of two of them is 0, not NaN
STEPS = (1.1, 1.25, 1.5, 2.0, 4.0)  # from one size that buckets are padded to, to the next
PIECE = 2**20  # most scores computed at once: 4 MiB in float32, near a core's cache and far from L²
KEEP = 8  # weights are kept for the way back if they are no more numbers than 8 q; else computed again
# What a plan costs beside its padded pairs, in pairs: the calls for one size, and a row's way into its bucket
# and back. Measured on two CPU cores (python bench.py attention).
PER_SIZE, PER_ROW = 2**14, 56
HALF = 0.35  # what a pair of the dense formula costs in bfloat16
DENSE = 1024  # the longest rows for which an (L, L) matrix is made at all


class Plan:
    """The pairs of one hash function, or of one triangle of them: rows in bucket order, padded to few sizes.

    to_q, to_k     int64 (P,), the row in each slot, N where a bucket is padded: where results go
    from_q, from_k int64 (P,), the same, but the bucket's last row where padded: where vectors come from
    shapes         list of (G, x, y): buckets of x query slots and y key slots, in the order of the slots

        hq  5 7 5 5    bucket 5: queries 0 2 3, key 1       to_q    0 2 3 4   to_k    1    4 = N is padding
        hk  2 5 2 3           7: query 1, no key: no pair   from_q  0 2 3 3   from_k  1    shapes [(1, 4, 1)]
    """

    def __init__(self, hq, hk, keep=None, triangle=None, before=()):
        """in: hq, hk int64 (R, L), buckets of queries and keys; keep bool (R, L), keys that count, None: all;
        triangle "upper" (i <= j), "lower" (i > j) or None; before, list of (hq, hk) (N + 1,) of the functions
        before this one: a pair belongs to the first function in which it collides
        """
        (R, L), self.N, self.triangle, self.before = hq.shape, hq.numel(), triangle, before
        if min(hq.min(), hk.min()) < 0:
            raise ValueError("buckets must not be below 0")
        top = int(torch.maximum(hq.max(), hk.max())) + 1
        if keep is not None:
            hk = hk.masked_fill(~keep, top)  # a bucket without queries
        own = torch.arange(R, device=hq.device).unsqueeze(1) * (top + 1)  # each sequence has its own buckets
        bucket_q, order_q, first_q, count_q = grouped((hq + own).flatten())
        bucket_k, order_k, first_k, count_k = grouped((hk + own).flatten())
        at = torch.searchsorted(bucket_k, bucket_q).clamp(max=len(bucket_k) - 1)
        both = (bucket_k[at] == bucket_q).nonzero().squeeze(1)
        first_q, count_q, at = first_q[both], count_q[both], at[both]
        first_k, count_k = first_k[at], count_k[at]
        x, y, self.padded, sizes = padded_sizes(count_q, count_k)
        self.cost = self.padded + PER_SIZE * sizes + PER_ROW * self.N
        shape, order, _, many = grouped(x * (8 * L) + y)  # no size is as long as 8 L
        self.shapes = [(G, s // (8 * L), s % (8 * L)) for G, s in zip(many.tolist(), shape.tolist())]
        self.to_q, self.from_q = in_slots(first_q[order], count_q[order], x[order], order_q)
        self.to_k, self.from_k = in_slots(first_k[order], count_k[order], y[order], order_k)

    def pieces(self):
        """The pairs in pieces of at most PIECE, or of one query where its keys are more.

        out: s, t slices of the query slots (G·x) and key slots (G·y); G; allowed bool (G, x, y), or (G, 1, y)
             where all queries of a bucket agree. No query is in two pieces, a key may be.
        """
        q = k = 0
        for many, x, y in self.shapes:
            most, some = max(PIECE // (x * y), 1), min(x, max(PIECE // y, 1))  # buckets, queries of a bucket
            for g in range(0, many, most):
                G = min(most, many - g)
                t = slice(k, k + G * y)
                for start in range(0, x, some):
                    part = min(some, x - start)
                    s = slice(q, q + G * part)
                    yield s, t, G, self.allowed(self.to_q[s].view(G, -1, 1), self.to_k[t].view(G, 1, y))
                    q = s.stop
                k = t.stop

    def roles(self, q, k):
        """in: what belongs to queries and to keys; out: the same, changed over in the lower triangle"""
        return (k, q) if self.triangle == "lower" else (q, k)

    def allowed(self, i, j):
        """in: rows i (G, x, 1) of queries, j (G, 1, y) of keys; out: bool, see pieces"""
        allowed = j < self.N
        if self.triangle:
            allowed = allowed & (i <= j if self.triangle == "upper" else i > j)
        for a, b in self.before:
            allowed = allowed & (a[i] != b[j])
        return allowed


def grouped(keys):
    """in: int64 (N,); out: the distinct keys, the order that sorts, where each begins, how often it is"""
    keys, order = keys.sort(stable=True)
    keys, count = keys.unique_consecutive(return_counts=True)
    return keys, order, count.cumsum(0) - count, count


def padded_sizes(count_q, count_k):
    """Pad buckets to few sizes, so that all of one size make one product.

    in:  count_q, count_k int64 (buckets,)
    out: x, y int64 (buckets,); how many pairs that makes, how many different (x, y)

    A fine ladder of sizes spends little on padding and much on calls, a coarse one the reverse. Which is
    cheapest depends on the data, so each is tried.
    """
    longest = max(count_q.max().item(), count_k.max().item()) if len(count_q) else 1
    best = None
    for step in STEPS:
        ladder = [1, 2, 4]
        while ladder[-1] < longest:
            ladder.append(max(math.ceil(ladder[-1] * step / 4) * 4, ladder[-1] + 4))
        ladder = torch.tensor(ladder, device=count_q.device)
        x, y = torch.searchsorted(ladder, count_q), torch.searchsorted(ladder, count_k)
        many = torch.bincount(x * len(ladder) + y, minlength=len(ladder) ** 2).view(len(ladder), -1)
        pairs, sizes = int((many * torch.outer(ladder, ladder)).sum()), int((many > 0).sum())
        if best is None or pairs + PER_SIZE * sizes < best[2] + PER_SIZE * best[3]:
            best = ladder[x], ladder[y], pairs, sizes
    return best


def in_slots(first, count, size, rows):
    """in: first, count, size int64 (buckets,); rows int64 (N,) in bucket order; out: twice (P,), see Plan"""
    bucket = torch.arange(len(size), device=size.device).repeat_interleave(size)  # (P,)
    within = torch.arange(len(bucket), device=size.device) - (size.cumsum(0) - size)[bucket]
    row = rows[first[bucket] + torch.minimum(within, count[bucket] - 1)]
    return torch.where(within < count[bucket], row, len(rows)), row


def make_plans(hq, hk, fill, pairs, keep=None):
    """in: hq, hk int64 (n, R, L); fill and pairs as in lsh_attention; keep bool (R, L) or None
    out: list of Plan, which together hold each pair that collides once
    """
    plans, flat = [], [(F.pad(a.flatten(), (0, 1)), F.pad(b.flatten(), (0, 1))) for a, b in zip(hq, hk)]
    for f in range(len(hq)):
        before = flat[:f]
        if pairs == "all":
            plans.append(Plan(hq[f], hk[f], keep, None, before))
        else:  # below the diagonal the score is that of the mirrored pair: queries and keys change places
            plans.append(Plan(hq[f], hk[f], keep, "upper", before))
            plans.append(Plan(hk[f], hq[f], keep, "lower", [(b, a) for a, b in before]))
    if fill == "mask":  # one more function, whose buckets are a position each: for those that miss themselves
        place = torch.arange(hq.shape[2], device=hq.device).expand(hq.shape[1:])
        plans.append(Plan(place.masked_fill((hq == hk).any(0), place.shape[1]), place, keep))
    return plans


def take(rows, i, G):
    """in: rows (N, e), i int64 (G·x,); out: (G, x, e)"""
    return rows.index_select(0, i).view(G, -1, rows.shape[1])


def scores(Q, K, allowed):
    """in: Q (G, x, e), K (G, y, e), allowed bool; out: (G, x, y), -inf where a pair does not count"""
    bias = Q.new_zeros(allowed.shape).masked_fill_(~allowed, -torch.inf)
    return torch.baddbmm(bias, Q, K.transpose(1, 2), alpha=Q.shape[-1] ** -0.5)


def merge(stats, more):
    """in: twice (N + 1, 3): of each row the largest score M, the sum of exp(s - M), and how many pairs
    out: the same of all its pairs: the online softmax, both sums brought to the larger maximum
    """
    (M, z, count), (M2, z2, count2) = stats.unbind(-1), more.unbind(-1)
    top = torch.maximum(M, M2)
    return torch.stack([top, z * (M - top).exp() + z2 * (M2 - top).exp(), count + count2], -1)


def softmax_terms(stats, key_count):
    """What turns scores into weights, w = exp(s - top) · inverse, and b, a weight without collision.

    in:  stats (N + 1, 3) of merge; key_count (N + 1,), how many keys weigh, colliding or not; 0 for "mask"
    out: (N + 1, 3) of top, inverse, b; row N, of padding, such that its weights are 0

    subtle: the rest is counted, not subtracted as exponentials: where all keys collide and all scores are
    low, Σ (e^s - 1) + L would be a difference of equal numbers. And top stays apart from the logarithm of
    the sum: at scores of 1,000 a float32 of both has lost four digits.
    """
    M, z, count = stats.unbind(-1)
    rest = key_count - count  # below 0 for "mask", where no other key weighs
    top = torch.where(rest > 0, M.clamp(min=0), M)
    b = torch.where(rest > 0, (-top).clamp(max=0).exp(), 0)
    z = z * (M - top).exp() + rest * b
    inverse = torch.where(z > 0, 1 / z, 0)  # a row without any key: weights of 0
    terms = torch.stack([top, inverse, b * inverse], -1)
    terms[-1] = terms.new_tensor([torch.inf, 0, 0])
    return terms


class Colliding(torch.autograd.Function):
    """Attention from the colliding pairs alone, forward and back.

    A pair that does not collide scores 0 and weighs exp(0), so the dense softmax needs no dense matrix. With
    M_i the largest score of row i, 0 among them if some key does not collide, and rest_i such keys:

      z_i   = Σ_{j collides} exp(s_ij - M_i) + rest_i exp(-M_i)    w_ij = exp(s_ij - M_i) / z_i
      out_i = Σ_{j collides} (w_ij - b_i) v_j + b_i Σ_j v_j        b_i  = exp(-M_i) / z_i, 0 if rest_i = 0
      ds_ij = w_ij (dout_i · v_j - D_i)   D_i = dout_i · out_i     dq_i = Σ_j ds_ij k_j / √e, dk_j likewise
      dv_j  = Σ_{i collides} (w_ij - b_i) dout_i + Σ_i b_i dout_i

    With fill="mask" rest is 0. On CUDA sums are atomic: the last bits may differ from run to run.
    """

    @staticmethod
    def forward(ctx, q, k, v, plans, keep, zero):
        """in: q, k, v (R, L, e); plans list; keep bool (R, L) or None; zero bool, fill; out: (R, L, e)"""
        (R, L, e), N, ctx.dtype = q.shape, q.shape[0] * q.shape[1], q.dtype
        work = torch.promote_types(q.dtype, torch.float32)
        q, k, v = (x.flatten(0, 1).to(work) for x in (q, k, v))  # (N, e)
        real = q.new_ones(R, L) if keep is None else keep.to(work)
        key_count = F.pad(real.sum(1, keepdim=True).expand(R, L).flatten() * zero, (0, 1))  # (N + 1,)
        stats = real.new_tensor([LEAST, 0, 0]).repeat(N + 1, 1)
        ctx.plans, kept = plans, []
        room = sum(plan.padded for plan in plans) <= KEEP * N * e
        for plan in plans:  # a query may have keys in several plans: no weight is known before all are seen
            a, b = plan.roles(q, k)
            found = real.new_tensor([LEAST, 0, 0]).repeat(N + 1, 1)
            for s, t, G, allowed in plan.pieces():
                S = scores(take(a, plan.from_q[s], G), take(b, plan.from_k[t], G), allowed)
                M = S.amax(-1, keepdim=True).clamp_(min=LEAST)
                z = S.sub_(M).exp_().sum(-1, keepdim=True)
                count = allowed.sum(-1, keepdim=True, dtype=work).expand_as(z)
                found[plan.to_q[s]] = torch.cat([M, z, count], -1).flatten(0, 1)
                if room:
                    kept.append((S, M))
            stats = merge(stats, found)
        terms, ready = softmax_terms(stats, key_count), iter(kept)
        out = real.new_zeros(N + 1, e)
        for plan in plans:
            a, b = plan.roles(q, k)
            for s, t, G, allowed in plan.pieces():
                top, inverse, base = take(terms, plan.to_q[s], G).split(1, -1)
                if room:
                    W, M = next(ready)
                    W.mul_((M - top).exp_().mul_(inverse))
                else:
                    W = scores(take(a, plan.from_q[s], G), take(b, plan.from_k[t], G), allowed)
                    W.sub_(top).exp_().mul_(inverse)
                W = torch.addcmul(W, base, allowed.to(work), value=-1)
                out.index_add_(0, plan.to_q[s], torch.bmm(W, take(v, plan.from_k[t], G)).flatten(0, 1))
        everything = torch.bmm(real.unsqueeze(1), v.view(R, L, e))  # (R, 1, e)
        out[:N].view(R, L, e).addcmul_(terms[:N, 2].view(R, L, 1), everything)
        ctx.save_for_backward(q, k, v, out, terms, real, *(W for W, _ in kept))
        return out[:N].view(R, L, e).to(ctx.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dout):
        """in: (R, L, e); out: gradients of q, k, v"""
        with torch.autocast(dout.device.type, enabled=False):  # someone may call backward() under it
            return *Colliding.gradients(ctx, dout), None, None, None

    @staticmethod
    def gradients(ctx, dout):
        """in, out: as backward"""
        q, k, v, out, terms, real, *kept = ctx.saved_tensors
        (R, L, e), N, work = dout.shape, len(q), out.dtype
        dout = dout.flatten(0, 1).to(work)
        D = torch.bmm(dout.unsqueeze(1), out[:N].unsqueeze(2)).view(N, 1)
        terms, ready = torch.cat([terms, F.pad(-D, (0, 0, 0, 1))], 1), iter(kept)  # (N + 1, 4)
        dq, dk, dv = (torch.zeros_like(out) for _ in range(3))
        for plan in ctx.plans:
            (a, b), (da, db) = plan.roles(q, k), plan.roles(dq, dk)
            for s, t, G, allowed in plan.pieces():
                Q, dO = take(a, plan.from_q[s], G), take(dout, plan.from_q[s], G)
                K, V = take(b, plan.from_k[t], G), take(v, plan.from_k[t], G)
                top, inverse, base, minus_D = take(terms, plan.to_q[s], G).split(1, -1)
                W = next(ready) if kept else scores(Q, K, allowed).sub_(top).exp_().mul_(inverse)
                dS = torch.baddbmm(minus_D, dO, V.transpose(1, 2), beta=e**-0.5, alpha=e**-0.5).mul_(W)
                W = torch.addcmul(W, base, allowed.to(work), value=-1)
                da.index_add_(0, plan.to_q[s], torch.bmm(dS, K).flatten(0, 1))
                db.index_add_(0, plan.to_k[t], torch.bmm(dS.transpose(1, 2), Q).flatten(0, 1))
                dv.index_add_(0, plan.to_k[t], torch.bmm(W.transpose(1, 2), dO).flatten(0, 1))
        spread = torch.bmm(terms[:N, 2].view(R, 1, L), dout.view(R, L, e))  # (R, 1, e)
        dq, dk, dv = (d[:N].view(R, L, e) for d in (dq, dk, dv))
        dv.addcmul_(real.unsqueeze(-1), spread)
        return dq.to(ctx.dtype), dk.to(ctx.dtype), dv.to(ctx.dtype)


def dense_lsh_attention(q, k, v, hq, hk, *, fill, pairs, key_mask=None):
    """The formula of the reference in fewer passes over the (L, L) matrix: what short rows get.

    in, out: as lsh_attention_reference
    """
    L = q.shape[2]
    apart = hq[:, :, 0].unsqueeze(-1) != hk[:, :, 0].unsqueeze(-2)  # (B, H, L, L), pairs that do not collide
    for f in range(1, hq.shape[2]):
        apart &= hq[:, :, f].unsqueeze(-1) != hk[:, :, f].unsqueeze(-2)
    scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-2, -1)
    if pairs == "upper":  # the upper triangle with half of the diagonal, and the same mirrored
        half = torch.ones_like(scores[0, 0]).triu() - 0.5 * torch.eye(L, device=q.device, dtype=scores.dtype)
        scores = scores * (~apart * half if fill == "zero" else half)
        scores = scores + scores.transpose(-2, -1)
    elif fill == "zero":
        scores = scores.masked_fill(apart, 0.0)
    if fill == "mask":
        if pairs == "upper":
            apart = apart.triu() | apart.triu().transpose(-2, -1)
        scores = scores.masked_fill(apart & ~torch.eye(L, dtype=torch.bool, device=q.device), -torch.inf)
    if key_mask is None:
        return scores.softmax(-1) @ v
    scores = scores.masked_fill(~key_mask[:, None, None, :], -torch.inf)
    return scores.softmax(-1).masked_fill((scores == -torch.inf).all(-1, keepdim=True), 0.0) @ v


def choose(hq, hk, *, fill="zero", pairs="upper", key_mask=None, impl="auto", dtype=torch.float32):
    """Which way lsh_attention will go: what costs less, counted for these very buckets.

    in:  as lsh_attention; dtype of the vectors
    out: "dense" or "blocks"; the plans of blocks, None for dense; keep bool (R, L), keys that count, or None

    Dense costs all L² pairs of a sequence; blocks cost the colliding ones, padding, and a price for each row,
    which for short rows is more.
    """
    (B, H, n, L), N = hq.shape, hq[:, :, 0].numel()
    keep = None if key_mask is None else key_mask.unsqueeze(1).expand(B, H, L).flatten(0, 1)
    many = n * (1 + (pairs == "upper")) + (fill == "mask")  # plans
    dense = N * L * (1 + 0.5 * (pairs == "upper")) if L <= DENSE else math.inf
    dense *= HALF if dtype.itemsize == 2 else 1  # blocks sum in float32 all the same
    if impl == "dense" or impl == "auto" and (PER_ROW * N + 16 * PER_SIZE) * many >= dense:  # a plan has more
        return "dense", None, keep
    plans = make_plans(*(h.permute(2, 0, 1, 3).flatten(1, 2) for h in (hq, hk)), fill, pairs, keep)
    if impl == "auto" and sum(plan.cost for plan in plans) >= dense:
        return "dense", None, keep
    return "blocks", plans, keep


@torch.compiler.disable  # shapes depend on the data: nothing that could be compiled once
def lsh_attention(q, k, v, hq, hk, *, fill="zero", pairs="upper", key_mask=None, impl="auto"):
    """Attention where buckets of query and key collide, exact in every mode. [BL Alg. 1]

    in:  as lsh_attention_reference; impl: "blocks", from the colliding pairs alone, summed in float32 or
         better; "dense", the formula in the dtype of q; "auto", whichever costs less here (see choose)
    out: (B, H, L, e). Differentiable once.
    err: ValueError for an unknown mode, buckets below 0 or of another shape
    """
    if not hq.shape == hk.shape == (*q.shape[:2], hq.shape[2], q.shape[2]):
        raise ValueError(f"buckets {tuple(hq.shape)}, {tuple(hk.shape)} of vectors {tuple(q.shape)}: wanted "
                         f"(B, H, n, L) of (B, H, L, e)")
    for name, value, known in (("fill", fill, ("zero", "mask")), ("pairs", pairs, ("upper", "all")),
                               ("impl", impl, ("auto", "dense", "blocks"))):
        if value not in known:
            raise ValueError(f"{name} {value!r}: wanted one of {', '.join(known)}")
    how, plans, keep = choose(hq, hk, fill=fill, pairs=pairs, key_mask=key_mask, impl=impl, dtype=q.dtype)
    if how == "dense":
        return dense_lsh_attention(q, k, v, hq, hk, fill=fill, pairs=pairs, key_mask=key_mask)
    with torch.autocast(q.device.type, enabled=False):
        out = Colliding.apply(*(x.flatten(0, 1) for x in (q, k, v)), plans, keep, fill == "zero")
    return out.view(q.shape)


def main(argv=None):
    """Twelve vectors around three directions: who meets whom, and blocks beside the formula."""
    generator = torch.Generator().manual_seed(0)
    centre = torch.randn(3, 64, generator=generator).repeat_interleave(4, 0)  # (12, e)
    q, k = (centre + 0.3 * torch.randn(1, 1, 12, 64, generator=generator) for _ in range(2))
    planes, coef = draw_planes(1, 2, 8, 64, 256, generator)
    hq, hk = simhash(q, planes, coef, 256), simhash(k, planes, coef, 256)
    collide = (hq.unsqueeze(-1) == hk.unsqueeze(-2)).any(2)[0, 0]
    print("queries down, keys across; # where they share a bucket of one of two functions (r 8, m 256)\n")
    for row, bucket in zip(collide, hq[0, 0, 0]):
        print("  " + " ".join("#" if c else "." for c in row), f"  bucket {bucket}")
    angle = F.cosine_similarity(q[0, 0].unsqueeze(1), k[0, 0].unsqueeze(0), dim=-1).acos()
    law, count = collision_probability(angle, 8, 256, 2).sum(), 0
    for _ in range(1000):
        hq, hk = (simhash(x, planes, coef, 256) for x in (q, k))
        count += (hq.unsqueeze(-1) == hk.unsqueeze(-2)).any(2).sum().item() / 1000
        planes, coef = draw_planes(1, 2, 8, 64, 256, generator)
    print(f"\npairs that collide, of 144: {count:.1f} in a thousand draws of the planes; by law {law:.1f}")
    v = torch.randn(1, 1, 12, 64, generator=generator)
    for fill in ("zero", "mask"):
        blocks = lsh_attention(q, k, v, hq, hk, fill=fill, impl="blocks")
        gap = blocks - lsh_attention_reference(q, k, v, hq, hk, fill=fill)
        print(f"fill={fill}: largest difference between blocks and formula {gap.abs().max():.1e}")


if __name__ == "__main__":
    main()
