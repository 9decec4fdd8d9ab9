"""Codes to vectors: one module per way to embed a word that is known by its hash alone.

Sources   [HF] Xue & Aletras 2022, HashFormers   [SB] Superbloom, ICLR 2020 submission
          [CM] Median is all you need, a proposal   [SV] Svenstrup et al. 2017, Hash Embeddings
Map       [HF §3.1] HashEmbedding   [HF §3.4 eq.1] PoolEmbedding   [HF §3.4 eq.2] AddEmbedding
          [HF §3.4 eq.3] ProjEmbedding   [HF App. B eq.11] LinearEmbedding   [SB §2.1] BloomEmbedding
          [CM] SketchEmbedding   [SV §3] WeightedEmbedding
Not here  where the codes come from (hashing.py); the rows of [CLS], [MASK] ... (model.py).
Departs   1. Every module computes the paper's function in a form that costs one matrix product or one gather
             (the median: comparisons of whole rows); the literal forms stand in the tests as oracles.
          2. No dropout inside (the authors' code has some in Pool; the paper has none).
          3. The importance of a word in WeightedEmbedding starts as normal(0, 1), not normal(0, 0.0005): a
             word that starts a thousand times smaller than the row of its type, which is added, is not heard.
Letters   B batch   L positions   C numbers a word   d width   T bits   k bits a chunk   J chunks   N rows
          m hashes an item   K rows of importance; of a sketch, k hash functions with R rows each
Try       python embeddings.py

Every module: codes (..., C) -> vectors (..., d), Bloom m vectors an item; rows start as normal(0, 0.02), cut
at ±2 std.
"""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F


def init_(weight, std=0.02):
    """Fill with a normal(0, std) cut at ±2 std; returns the weight."""
    return nn.init.trunc_normal_(weight, std=std, a=-2 * std, b=2 * std)


def unpack_bits(packed, bits):
    """Bytes to bits, most significant first.

    in:  packed uint8 (..., ceil(T/8)); bits T
    out: uint8 (..., T) of 0 and 1
    """
    shifts = torch.arange(7, -1, -1, dtype=torch.uint8, device=packed.device)
    return ((packed.unsqueeze(-1) >> shifts) & 1).flatten(-2)[..., :bits]


class LookupEmbedding(nn.Module):
    """The ordinary table: one row per word of a vocabulary. The baseline the others do without."""

    def __init__(self, rows, width):
        """in: rows N, one per word; width d"""
        super().__init__()
        self.weight = nn.Parameter(init_(torch.empty(rows, width)))  # (N, d)

    def forward(self, codes):
        """in: codes integer (..., 1), each in 0 .. N-1; out: (..., d)"""
        return F.embedding(codes.squeeze(-1).int(), self.weight)


class HashEmbedding(LookupEmbedding):
    """Emb: words share N rows by hash; the same lookup, but nobody owns a row. [HF §3.1]"""


class PoolEmbedding(nn.Module):
    """Pool: chunks pick rows of one codebook, summed with a weight per chunk and dimension. [HF §3.4 eq.1]

        e = Σ_j softmax_j(W)_j ⊙ B[c_j]        W (J, d): a softmax over the chunks, for each dimension apart

    Fast form: fold the weights into the codebook, a table per chunk, and let one embedding_bag add the rows.
    Folding costs J·2^k·d whatever the batch, and spares the (B, L, J, d) rows in memory.
    The last chunk is short (128 = 12·10 + 8) and uses the first 2^8 rows only.
    """

    def __init__(self, bits, chunk, width):
        """in: bits T; chunk k; width d"""
        super().__init__()
        self.chunks = -(-bits // chunk)
        self.codebook = nn.Parameter(init_(torch.empty(2**chunk, width)))  # (2^k, d)
        # subtle: not zeros. Equal weights would make every order of the chunks the same word.
        self.weight = nn.Parameter(init_(torch.empty(self.chunks, width)))  # (J, d)

    def forward(self, codes):
        """in: codes integer (..., J), each in 0 .. 2^k-1; out: (..., d)"""
        rows = self.codebook.shape[0]
        tables = self.weight.softmax(0).unsqueeze(1) * self.codebook  # (J, 2^k, d)
        offsets = torch.arange(0, self.chunks * rows, rows, dtype=torch.int32, device=codes.device)
        bags = (codes.int() + offsets).reshape(-1, self.chunks)  # (words, J), chunk j looks into table j
        e = F.embedding_bag(bags, tables.flatten(0, 1), mode="sum")
        return e.view(*codes.shape[:-1], e.shape[-1])


class AddEmbedding(nn.Module):
    """Add: every bit picks one of its own two rows, and the T rows are added. [HF §3.4 eq.2]

        e = Σ_j B^j[τ_j] / √T  =  (Σ_j B^j[0] + Σ_j τ_j (B^j[1] − B^j[0])) / √T      one product with the bits
    """

    def __init__(self, bits, width):
        """in: bits T; width d"""
        super().__init__()
        self.codebooks = nn.Parameter(init_(torch.empty(bits, 2, width)))  # (T, 2, d)

    def forward(self, codes):
        """in: codes of 0 and 1 (..., T); out: (..., d)"""
        zero, one = self.codebooks.unbind(1)  # (T, d)
        scale = 1 / math.sqrt(len(zero))
        return F.linear(codes.to(zero.dtype), ((one - zero) * scale).T, zero.sum(0) * scale)


class ProjEmbedding(nn.Module):
    """Proj: each dimension is the Pearson correlation of the word's bits with a learnt vector. [HF §3.4 eq.3]

        e_j = <τ − mean τ, w^j − mean w^j> / (‖τ − mean τ‖ ‖w^j − mean w^j‖)

    One product of the centred, normalised bits with the centred, normalised weights.
    """

    def __init__(self, bits, width):
        """in: bits T; width d"""
        super().__init__()
        self.weight = nn.Parameter(init_(torch.empty(width, bits)))  # (d, T): w^j has one entry per bit

    @staticmethod
    def _unit(x):
        x = x - x.mean(-1, keepdim=True)
        # subtle: clamp the square, not the root: a root's gradient at 0 is infinite, and that times 0 is NaN
        return x * x.square().sum(-1, keepdim=True).clamp(min=1e-16).rsqrt()

    def forward(self, codes):
        """in: codes of 0 and 1 (..., T); out: (..., d) in [-1, 1], and 0 where all bits are equal"""
        return F.linear(self._unit(codes.to(self.weight.dtype)), self._unit(self.weight))


class LinearEmbedding(nn.Module):
    """The word's bits times a learnt matrix: ProFormer's layer. [HF App. B eq.11]"""

    def __init__(self, bits, width):
        """in: bits T; width d"""
        super().__init__()
        self.weight = nn.Parameter(init_(torch.empty(bits, width)))  # (T, d)

    def forward(self, codes):
        """in: codes of 0 and 1 (..., T); out: (..., d)"""
        return codes.to(self.weight.dtype) @ self.weight


class BloomEmbedding(LookupEmbedding):
    """Bloom: an item is m rows of one table, and they stay m vectors side by side. [SB §2.1]

    Nothing is summed: which of the items that share a row is meant, the layers find out from the company.
    """

    def forward(self, codes):
        """in: codes integer (B, L, m), each in 0 .. N-1; out: (B, L·m, d), an item's m vectors in a row"""
        return F.embedding(codes.flatten(1).int(), self.weight)


class SketchEmbedding(nn.Module):
    """Count-median sketch: a word has a row in each of k blocks; coordinate by coordinate their median. [CM]

        rows of a word (k 3, d 2)    (1, 7)  (2, -9)  (900, 8)        median (2, 7)    mean (301, 2)

    One row that other words have pulled far away drags the mean along; the median moves at most to the next
    number in order, and goes along when most rows do. Of the median one row a coordinate gets the gradient,
    of the mean each gets 1/k. k is odd: of an even number there is no middle one.
    """

    def __init__(self, hashes, rows, width, agg="median"):
        """in: hashes k, odd; rows R of each block; width d; agg of AGGREGATIONS"""
        super().__init__()
        if hashes % 2 == 0 or hashes > 255:
            raise ValueError(f"a sketch of k = {hashes} hash functions: wanted an odd number, whose median "
                             f"is one of the rows, and at most 255")
        if agg not in AGGREGATIONS:
            raise ValueError(f"unknown aggregation {agg!r}: wanted {' or '.join(AGGREGATIONS)}")
        self.hashes, self.rows, self.agg = hashes, rows, agg
        self.weight = nn.Parameter(init_(torch.empty(hashes * rows, width)))  # (k·R, d), block after block

    def forward(self, codes):
        """in: codes integer (..., k), each in 0 .. R-1; out: (..., d)"""
        blocks = torch.arange(0, len(self.weight), self.rows, dtype=torch.int32, device=codes.device)
        rows = (codes.int() + blocks).reshape(-1, self.hashes)  # (words, k)
        out = AGGREGATIONS[self.agg](self.weight, rows)
        return out.view(*codes.shape[:-1], out.shape[-1])


AT_ONCE = 2**16  # numbers of one hash function's rows that RowMedian has in hand


class RowMedian(torch.autograd.Function):
    """The element-wise median of k rows of a table, by comparisons of whole rows; k odd. [CM]

    Minimum and maximum of two rows are vector instructions, a sort of five numbers is not. Some words at a
    time, so that their rows stay in the processor's cache; for the way back a byte a number is kept, whose it
    was, not k rows.
    """

    @staticmethod
    def parts(table, words):
        """in: table (N, d); words M; out: slices of the words, small on a CPU"""
        step = max(words if table.is_cuda else AT_ONCE // table.shape[1], 1)
        return (slice(start, start + step) for start in range(0, words, step))

    @staticmethod
    def forward(ctx, table, rows):
        """in: table (N, d); rows integer (M, k); out: (M, d)"""
        M, k = rows.shape
        out = table.new_empty(M, table.shape[1])
        chosen = torch.zeros(out.shape, dtype=torch.uint8, device=out.device)
        for part in RowMedian.parts(table, M):
            x = table.index_select(0, rows[part].T.flatten())
            *x, last = x.unflatten(0, (k, -1)).unbind()  # k times (words, d)
            middle = out[part] = median([*x, last])
            # whose number is it? Of equal ones the first row's: count the rows before it,
            # r_0 (1 + r_1 (1 + r_2 ...)), where r_j = 1 says that row j does not have it
            count = table.new_zeros(())
            for row in reversed(x):
                row.ne_(middle)  # in place 0.0 or 1.0: four times as fast as to bool
                count = torch.addcmul(row, row, count)
            chosen[part] = count
        ctx.save_for_backward(rows, chosen)
        ctx.table = table.shape
        return out

    @staticmethod
    def backward(ctx, gradient):
        """in: gradient (M, d); out: that of the table: each number of it goes to the row it came from"""
        (rows, chosen), (N, d) = ctx.saved_tensors, ctx.table
        table, starts = gradient.new_zeros(N, d), d * rows.long()  # of the rows in the flat table
        columns = torch.arange(d, device=rows.device)
        for part in RowMedian.parts(gradient, len(rows)):
            places = starts[part].gather(1, chosen[part].long()).add_(columns)
            table.view(-1).index_add_(0, places.flatten(), gradient[part].flatten())
        return table, None


def median(rows):
    """in: k tensors of a shape, k odd; out: their element-wise median, by comparisons alone

    The least of k // 2 + 2 numbers has more than half of all k above it, the greatest as many below: neither
    is the median. What is left without both has the same median: take in the next, until one is left.

        7 1 9 4 5    of 7 1 9 4 without 1 and 9: 7 4    of 7 4 5 without 4 and 7: 5
    """
    kept, rest = list(rows[:len(rows) // 2 + 2]), list(rows[len(rows) // 2 + 2:])
    while len(kept) > 1:
        least, greatest, middle = torch.minimum(*kept[:2]), torch.maximum(*kept[:2]), []
        for x in kept[2:-1]:
            x, least = torch.maximum(x, least), torch.minimum(x, least)
            middle.append(torch.minimum(x, greatest))
            greatest = torch.maximum(x, greatest)
        middle.append(torch.minimum(torch.maximum(kept[-1], least), greatest))
        kept, rest = middle + rest[:1], rest[1:]
    return kept[0]


AGGREGATIONS = {  # name of --emb -> function of a table (N, d) and rows of words, integer (M, k), to (M, d)
    "mean": lambda table, rows: F.embedding_bag(rows, table, mode="mean"),
    "median": RowMedian.apply,
}


class WeightedEmbedding(nn.Module):
    """Hash embeddings: k rows of a shared pool, each times the word's importance for it, and summed. [SV §3]

        e = Σ_j p_j · row_j        p: a row of the table of importance, which words share by another hash

    With `append` the k weights themselves are the vector's last numbers.
    """

    def __init__(self, hashes, rows, importance, width, append=False):
        """in: hashes k; rows N of the pool; importance K, rows of the table of weights; width d; append"""
        super().__init__()
        if append and width <= hashes:
            raise ValueError(f"width {width}: wanted more than the {hashes} weights that are appended")
        self.append = append
        self.weight = nn.Parameter(init_(torch.empty(rows, width - hashes * append)))  # (N, d), or (N, d - k)
        self.importance = nn.Parameter(init_(torch.empty(importance, hashes), std=1.0))  # (K, k)

    def forward(self, codes):
        """in: codes integer (..., k + 1), k in 0 .. N-1, then one in 0 .. K-1; out: (..., d)"""
        rows, weights = codes.reshape(-1, codes.shape[-1]).int().split([codes.shape[-1] - 1, 1], -1)
        p = F.embedding(weights.squeeze(-1), self.importance)  # (words, k)
        e = F.embedding_bag(rows, self.weight, mode="sum", per_sample_weights=p)
        e = torch.cat([e, p], -1) if self.append else e
        return e.view(*codes.shape[:-1], e.shape[-1])


def main(argv=None):
    """Embed three random words each way, and show shapes, parameters and the spread of the vectors."""
    torch.manual_seed(0)
    bits = torch.randint(0, 2, (3, 128))
    cases = {
        "lookup, 50,265 rows": (LookupEmbedding(50_265, 768), torch.tensor([[7], [11], [13]])),
        "emb, 1,038 rows": (HashEmbedding(1_038, 768), torch.tensor([[7], [11], [13]])),
        "pool, 13 chunks": (PoolEmbedding(128, 10, 768), torch.randint(0, 256, (3, 13))),
        "add, 128 bits": (AddEmbedding(128, 768), bits),
        "proj, 128 bits": (ProjEmbedding(128, 768), bits),
        "median, 5 of 500 rows": (SketchEmbedding(5, 500, 768), torch.randint(0, 500, (3, 5))),
        "mean, 5 of 500 rows": (SketchEmbedding(5, 500, 768, "mean"), torch.randint(0, 500, (3, 5))),
        "weighted, 2 of 1,038": (WeightedEmbedding(2, 1_038, 10_000, 768), torch.randint(0, 1_038, (3, 3))),
        "linear, 420 bits": (LinearEmbedding(420, 768), torch.randint(0, 2, (3, 420))),
        "bloom, 2 of 211,286": (BloomEmbedding(211_286, 768), torch.randint(0, 211_286, (1, 3, 2))),
    }
    print(f"{'':>22}  {'codes':>8}  {'vectors':>8}  {'parameters':>11}  std at the start")
    for name, (module, codes) in cases.items():
        vectors = module(codes)
        count = sum(p.numel() for p in module.parameters())
        shapes = ["×".join(map(str, t.shape)) for t in (codes, vectors)]
        print(f"{name:>22}  {shapes[0]:>8}  {shapes[1]:>8}  {count:11,}  {vectors.std():.4f}")


if __name__ == "__main__":
    main()
