"""Attention over all pairs of positions (dense), or over those that locality-sensitive hashing (LSH) selects.

Paper map:
    [V] Vaswani et al. 2017, Attention Is All You Need: [V §3.2.1] full_attention
    [BL] Li & Yip, BERT-LSH: [BL §2.1] simhash   [BL §2.1 law] collision_probability
        [BL §2.2.2] lsh_attention_reference   [BL Alg. 1] lsh_attention
Out of scope: causal masks; cross-attention (q, k, v have one length); projections to q, k, v (model.py); the
    sums over colliding pairs alone (blocks.py, to be copied with this file).
Deviations:
    1. Dense attention calls torch's scaled_dot_product_attention, except where that is slow (full_attention).
       Dropout on a CPU draws 16 bits per number (apply_dropout): a probability is rounded to 1/65,536.
    2. The paper fills a dense matrix. blocks.py computes its exact result from the colliding pairs alone,
       where measure_costs predicts that this is faster. The two ways round differently.
    3. The hyperplanes are drawn once, or once per step, not in every forward pass as in the authors' code.
    4. LSH attention has no dropout on weights: a pair that does not collide has no weight of its own.
    5. lsh_attention defaults to pairs="all"; Config.lsh_pairs to "upper", the triangle of the released code.
       Algorithm 1 as printed visits all of C: the last writer of A[i, j] = A[j, i] wins.
Notation:
    B batch   H heads   L positions   e head size   n hash functions   r hyperplanes per function ("bands")
    m hash buckets   u width of the values   BH = B·H sequences   N = BH·L rows   i query   j key   s score
Demo: python attention.py
"""

import functools
import itertools
import math
import time

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

from blocks import MASKED, MAX_CHUNK, Costs, SparseLSHAttention, compare, make_layouts

MAX_DENSE_LENGTH = 1024  # above this length impl="auto" allocates no (L, L) matrix
# dtype and dimensions of arguments, and choices. Within one call equal letters are equal sizes, and all
# "float" are one dtype; "floating" is any.
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
    # subtle: on a CPU the kernel has no dropout, and is slower on short rows of bfloat16 (docs/operations.md)
    if not q.is_cpu or not dropout and (q.dtype != torch.bfloat16 or q.shape[-2] > 1024):
        mask = None if key_mask is None else key_mask[:, None, None, :]  # (B, 1, 1, L)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout)
    scores = (q / math.sqrt(q.shape[-1])) @ k.transpose(-2, -1)  # (B, H, L, L)
    weights = masked_softmax(scores, key_mask)
    return (apply_dropout(weights, dropout) if dropout else weights) @ v


def apply_dropout(x, p):
    """Return x with a share p < 1 of its numbers, drawn at random, 0, and the others divided by 1 - p.

    F.dropout draws 53 bits for each number, which takes a CPU longer than a softmax. 16 bits are enough.
    Compiled, and on a GPU, it is F.dropout, which draws other numbers.
    """
    if not x.is_cpu or torch.compiler.is_compiling():
        return F.dropout(x, p)
    threshold = min(round(p * 2**16), 2**16 - 1)  # at most the largest number of 16 bits
    drawn = torch.empty(-(-x.numel() // 4), dtype=torch.int64).random_(-2**63, None)  # four numbers each
    drawn = drawn.view(torch.int16)[:x.numel()].view(x.shape)  # uniform from -2^15 to 2^15 - 1
    keep = torch.ge(drawn, threshold - 2**15, out=torch.empty_like(x))  # 1 or 0
    return x * keep.mul_(2**16 / (2**16 - threshold))


class Dropout(nn.Dropout):
    """nn.Dropout by apply_dropout."""
    def forward(self, x):
        return apply_dropout(x, self.p) if self.training and self.p else x


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
    """Return the share of colliding pairs, in [0, 1], in the batch's first row, hq, hk int64 (B, H, n, L)."""
    (_, H, _, L), chunks = hq.shape, hq[:1].split(128, dim=-1)  # no (L, L) matrix
    return sum(collisions(chunk, hk[:1]).sum().item() for chunk in chunks) / (H * L * L)


def lsh_attention_reference(q, k, v, hq, hk, *, fill="zero", pairs="all", key_mask=None):
    """Return LSH attention by the literal formula: the oracle of the tests. [BL §2.2.2]

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
    # floats, which compare faster: exact below 2^24 and 2^53
    hq, hk = (h.flatten(0, 1).to(torch.float32 if h.max() < 2**24 else torch.float64) for h in (hq, hk))
    half = q.new_ones(L, L, dtype=dtype).triu().fill_diagonal_(0.5)
    tensors, out = [*(x.flatten(0, 1).to(product_dtype) for x in (q, k, v)), hq, hk, keys], []
    tensors[0] = tensors[0] * e**-0.5  # in the dtype of the products
    # a few sequences at a time: their matrices stay near the processor
    for q, k, v, hq, hk, keys in zip(*(x.split(max(MAX_CHUNK // 2 // L**2, 1)) for x in tensors)):
        equal = zip(hq.unsqueeze(-1).unbind(1), hk.unsqueeze(-2).unbind(1))
        A = functools.reduce(torch.maximum, (compare(torch.eq, a, b, dtype) for a, b in equal))  # (G, L, L)
        S = (q @ k.transpose(1, 2)).to(dtype)
        if use_upper:  # the upper triangle with half of the diagonal, plus its mirror image
            A *= half
            if fill == "mask":
                A.diagonal(dim1=1, dim2=2).fill_(0.5)
                keys = (A + A.transpose(1, 2)) * keys
        S = S * A
        if use_upper:
            S = S + S.transpose(1, 2)
        if fill == "mask" or key_mask is not None:
            W = torch.add(S, 1 - keys, alpha=MASKED).softmax(-1) * keys  # 0 in a row without keys
        else:
            W = S.softmax(-1)
        out.append(W.to(product_dtype) @ v)
    return torch.cat(out).unflatten(0, (B, H)).to(input_dtype)


@functools.cache
def measure_costs(device_type, dtype, width, fill="zero", pairs="all", use_grad=True):
    """Return the Costs of this machine, from a few small passes of some 0.3 s in all, kept for the process.

    Args:
        device_type, dtype, width: str, torch.dtype and int, of the vectors.
        fill, pairs: as for lsh_attention.
        use_grad: whether passes include backward.
    """
    generator, is_cuda = torch.Generator().manual_seed(0), device_type == "cuda"
    clock = time.perf_counter if is_cuda else time.thread_time  # of this thread: other processes do not count

    def draw(*shape):
        return torch.randn(shape, generator=generator).to(device_type, dtype)

    def time_passes(functions):
        """Return the least seconds of each function in three rounds of all, after one that warms up."""
        times = np.zeros((4, len(functions)))
        for row, (i, function) in itertools.product(times, enumerate(functions)):
            start = clock()
            function()
            if is_cuda:
                torch.cuda.synchronize()
            row[i] = clock() - start
        return times[1:].min(0)

    def attend(hq, hk, impl, *qkv):
        with torch.set_grad_enabled(use_grad):
            out = lsh_attention(*qkv, hq, hk, fill=fill, pairs=pairs, impl=impl, costs=trial)
        if use_grad:
            torch.autograd.grad(out, qkv, qkv[-1])

    a, b, cases, numbers = draw(16, 64, 64), draw(16, 64, 64).float(), [], []
    with torch.inference_mode(False), torch.autocast(device_type, enabled=False):
        in_dtype, in_float32 = time_passes([lambda: torch.bmm(a, a), lambda: torch.bmm(b, b)])
        trial = Costs(1, 0, 0, 0, has_fast_bfloat16=float(dtype.itemsize == 2 and in_dtype < in_float32))
        for B, L, m, impl in ((16, 256, 64, "blocks"), (4, 256, 2, "blocks"), (1, 256, 64, "blocks"),
                              (1, 256, 8, "blocks"), (64, 64, 64, "dense"), (4, 256, 64, "dense")):
            hq, hk = torch.randint(m, (2, B, 1, 1, L), generator=generator).to(device_type)
            qkv = [draw(B, 1, L, width).requires_grad_(use_grad) for _ in range(3)]
            cases.append(functools.partial(attend, hq, hk, impl, *qkv))
            layouts = [x.fill() for x in make_layouts(hq, hk, fill, pairs, costs=trial)]  # the fewest pairs
            parts = [(x.num_pairs, (x.N + len(x.to_q)) / 2, len(x.shapes), 1) for x in layouts]
            numbers.append(np.sum(parts, 0) if impl == "blocks" else (B * L * L, B * L))
        results = [(*n, seconds) for n, seconds in zip(numbers, time_passes(cases))]
    blocks, dense = results[:4], results[4:]
    return Costs(*fit_costs(blocks, Costs()[:4]), *fit_costs(dense, Costs()[4:6]), trial.has_fast_bfloat16)


def fit_costs(cases, defaults):
    """Return costs (n,) of which each case, (numbers (n,), seconds), is the sum of the products with numbers.

    Least squares of relative errors. Where the few cases do not tell costs apart, they keep the defaults'
    proportions.
    """
    *numbers, seconds = np.array(cases, float).T
    share = np.array(numbers).T * defaults / seconds[:, None]  # of the time measured, by the defaults
    prior = np.full(len(defaults), 1 / share.sum(1).mean())  # all costs by the same factor, with weight 0.3
    system = np.vstack([share, 0.3 * np.eye(len(defaults))]), np.append(np.ones(len(cases)), 0.3 * prior)
    return (np.maximum(np.linalg.lstsq(*system)[0], 0.03 * prior) * defaults).tolist()


def select_implementation(hq, hk, costs, *, fill, pairs, key_mask=None, impl="auto"):
    """Return the cheaper implementation of lsh_attention for these buckets, and its layouts.

    Args:
        hq, hk, fill, pairs, key_mask, impl: as for lsh_attention.
        costs: Costs of this machine, from measure_costs. In a close case the layouts of batch elements
            0, 8, 16, ... predict the cost of all.

    Returns:
        "dense" and None, or "blocks" and a list of BucketLayout.
    """
    if impl == "dense":
        return "dense", None
    (n, L), N = hq.shape[2:], hq[:, :, 0].numel()
    num_layouts = n * (1 + (pairs == "upper")) + (fill == "mask")
    dense = N * (costs.dense_row + L * costs.dense_pair)
    if impl == "blocks" or L > MAX_DENSE_LENGTH:
        dense = math.inf
    least = num_layouts * (costs.layout + costs.size + N / 2 * costs.row)  # before buckets are counted
    if len(hq) > 1 and least < dense < 2 * least:  # a close case: a part predicts the whole
        scale = len(hq) / len(hq[::8])
        mask = None if key_mask is None else key_mask[::8]
        scaled_costs = costs._replace(pair=scale * costs.pair, row=scale * costs.row)
        least = sum(layout.cost for layout in make_layouts(hq[::8], hk[::8], fill, pairs, mask, scaled_costs))
    if least < dense:
        layouts = make_layouts(hq, hk, fill, pairs, key_mask, costs)
        if sum(layout.cost for layout in layouts) < dense:
            return "blocks", [layout.fill() for layout in layouts]
    return "dense", None


@torch.compiler.disable  # the shapes depend on the data, so there is nothing to compile once
def lsh_attention(q, k, v, hq, hk, *, fill="zero", pairs="all", key_mask=None, impl="auto", costs=None):
    """Return attention with scores for colliding pairs; the others have score 0 or no weight. [BL Alg. 1]

    Args:
        q, k, v, hq, hk, fill, pairs, key_mask: as for lsh_attention_reference.
        impl: "blocks": from the colliding pairs. "dense": the formula. "auto": up to L = 1,024 the one
            predicted to be faster, then blocks. Softmax and its sums are in float32 or float64.
        costs: Costs, or None: those of this machine, measured at first use. Save and pass them where another
            process must choose alike, and so give equal bits.

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
    implementation, layouts = select_implementation(hq, hk, costs, impl=impl, **mode)
    dtype = torch.float32 if q.dtype.itemsize == 2 and not costs.has_fast_bfloat16 else q.dtype
    with torch.autocast(q.device.type, enabled=False):
        if implementation == "blocks":
            return SparseLSHAttention.apply(q, k, v, layouts, key_mask, fill == "zero", dtype)
        return dense_lsh_attention(q, k, v, hq, hk, dtype, **mode)


def main(argv=None):
    """Demo: print which pairs collide and compare the sparse result with the reference."""
    generator = torch.Generator().manual_seed(0)
    centers = torch.randn(3, 64, generator=generator).repeat_interleave(4, 0)  # (12, e)
    q, k, v = centers + 0.1 * torch.randn(3, 1, 1, 12, 64, generator=generator)
    planes, coef = draw_hyperplanes(1, 1, 4, 64, 64, generator)
    hq, hk = simhash(q, planes, coef, 64), simhash(k, planes, coef, 64)
    print("12 positions in 3 groups of 4 similar vectors. Rows are queries, columns are keys.\n"
          "Vectors on the same side of r = 4 random hyperplanes share one of m = 64 buckets;\n"
          "similar vectors usually do, unless a hyperplane passes between them.\n"
          "#  query and key share a bucket: LSH attention computes their score   .  it does not\n")
    for row, *pair in zip(collisions(hq, hk)[0, 0], hq.flatten(), hk.flatten()):
        print("  " + " ".join(".#"[is_collision] for is_collision in row),
              "  query bucket {:2}, key bucket {:2}".format(*pair))
    gap = lsh_attention(q, k, v, hq, hk, impl="blocks") - lsh_attention_reference(q, k, v, hq, hk)
    print(f"\nLargest difference from the literal formula of LSH attention: {gap.abs().max():.1e}")


if __name__ == "__main__":
    main()
