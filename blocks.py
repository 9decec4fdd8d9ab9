"""LSH attention from the colliding pairs alone: rows in buckets, buckets in tiles, and the softmax over them.

Paper map:    [BL Alg. 1] SparseLSHAttention
Sources:      [BL] Li & Yip, BERT-LSH
Out of scope: hash functions, the literal and the dense formula, and when they are faster (attention.py).
Notation:     B batch   H heads   L positions   e head size   u width of the values   n hash functions
              BH = B·H sequences   N = BH·L rows   P slots: rows in bucket order, with padding
              G tiles of one size   x, y query slots and key slots of a tile   T size of small tiles
              i query   j key   s score   w weight   M largest score of a row   z sum of exp(s - M) over a row
"""

import math
from collections import namedtuple

import numpy as np
import torch
import torch.nn.functional as F

MASKED, MIN_SCORE = -2e30, -1e30  # score of a pair that does not count; least maximum of a row. Both finite
TILES, SIZE_STEPS = (16, 32, 64, 128), (1.1, 1.25, 1.5, 2.0)  # tile sizes, and ratios of larger sizes, to try
MAX_CHUNK = 2**20  # scores computed at once: 4 MiB in float32
MAX_SAVED = 8  # save weights for the backward pass up to 8 times the size of q; recompute larger ones


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
    to_q, to_k      int64, row of each query slot and of each key slot for results; N in a padding slot
    from_q, from_k  int64, the same for inputs; a row of the same sequence in a padding slot
    in_q, in_k      float, number of a slot's bucket within its tile; -1 and -2 in a padding slot
    shapes          list of (G, x, y): G tiles of x query slots and y key slots, in slot order
    num_pairs, cost pairs of all tiles, padding included, and seconds, as predicted from Costs

        hq  5 7 5 5    bucket 5: queries 0 2 3, key 1    to_q  0 2 3 4   from_q  0 2 3 0   in_q  0 0 0 -1
        hk  2 5 2 3    bucket 7: query 1, no key         4 = N: padding  were T 4:         shapes [(1, 4, 4)]
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
                num_rows = (self.N + int(x.sum())) / 2
                cost = (costs.layout + costs.pair * num_pairs + costs.row * num_rows + costs.size * num_sizes)
                if cost < self.cost:
                    self.cost, self.num_pairs, self.tile = cost, num_pairs, T
                    self.packed = shared[larger_last], sequence[larger_last], *packed[:-1], size
            if not has_larger:
                break

    def fill(self):
        """Assign a slot to each row; return the layout."""
        bucket, sequence, start, opening, tile, size = self.packed
        # 1. Tiles of one size follow each other: the slots before each tile, of its queries and of its keys
        by_size = np.lexsort(size[::-1])
        shapes, counts = np.unique(size, axis=1, return_counts=True)
        self.shapes = [(G, *shape) for G, shape in zip(counts.tolist(), shapes.T.tolist())]
        Q, P = int(size[0].sum()), int(size.sum())  # Q query slots, then key slots
        before = np.empty_like(size)
        before[:, by_size] = size[:, by_size].cumsum(1) - size[:, by_size] + [[0], [Q]]
        # 2. A group is a bucket's queries, or its keys: its first slot, and the bucket's number in its tile
        groups = 2 * bucket + [[0], [1]]
        first_slot, number = (np.full(len(self.group_size), -1) for _ in range(2))  # -1: without a partner
        first_slot[groups] = before[:, tile] + start
        number[groups] = np.arange(len(tile)) - opening[tile]
        padding = np.concatenate([np.repeat(sequence[opening][by_size], s[by_size]) for s in size]) * self.L
        first_slot, number, padding = (torch.from_numpy(x).to(self.rows.device)
                                       for x in (first_slot, number, padding))
        # 3. A row's slot: the first one of its group, and as many further as rows of the group come before it
        rows_before = self.group_size.cumsum(0) - self.group_size  # in the groups before
        slot = (first_slot - rows_before)[self.groups] + torch.arange(2 * self.N, device=self.rows.device)
        slot = torch.where(number[self.groups] < 0, P, slot)  # of a row without partner: behind the last
        # 4. What is in each slot: a row and the number of its bucket, or padding
        to, inside = slot.new_full((P + 1,), self.N), slot.new_full((P + 1,), -1, dtype=torch.float32)
        to[slot], inside[slot] = self.rows, number[self.groups].float()
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
    return start - start[:, opening[tile]], opening, tile, total


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
    """Return 1 where operation(a, b) holds, else 0. A bool and its conversion would be two passes."""
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
    b = torch.where(rest > 0, exp(-top), 0)
    z = z * exp(M - top) + rest * b
    inverse = torch.where(count + num_keys > 0, 1 / z, 0)  # 0 for a row without keys
    terms = torch.stack([top, inverse, b * inverse], -1)  # (N + 1, 3)
    terms[-1] = terms.new_tensor([torch.finfo(terms.dtype).max, 0, 0])  # weights of 0 for row N, padding
    return terms


class SparseLSHAttention(torch.autograd.Function):
    """LSH attention from the colliding pairs, forward and backward. [BL Alg. 1]

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
