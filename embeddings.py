"""Embed words that are known by their hash codes alone: one class per method.

Paper map:    [HF §3.1] HashEmbedding   [HF §3.4 eq.1] PoolEmbedding   [HF §3.4 eq.2] AddEmbedding
              [HF §3.4 eq.3] ProjEmbedding   [HF App. B eq.11] LinearEmbedding   [SB §2.1] BloomEmbedding
              [CM] SketchEmbedding   [SV §3] WeightedEmbedding
Sources:      [HF] Xue & Aletras 2022, HashFormers   [SB] Superbloom, ICLR 2020 submission
              [CM] Median is all you need, a proposal   [SV] Svenstrup et al. 2017, Hash Embeddings
Out of scope: how words get their codes (hashing.py, tokenizer.py), vectors of special tokens (model.py).
Deviations:   1. No dropout inside. The authors' code has some in Pool, the paper has none.
              2. Importance weights start as normal(0, 1), as 0.0005 gives words no effect.
Notation:     B batch   L positions   M words   C code numbers per word   d width   T bits   J chunks   N rows
              m hashes per item, R rows each   k bits of a chunk (Pool), hash functions   K importance rows
Demo:         python embeddings.py

Modules map codes (..., C), tensor or array, to vectors (..., d), BloomEmbedding to (..., m, d). Tables start
as normal(0, 0.02), truncated at ±2 std. Each class states these facts, where c is a model.Config:
    code_format        how a word's codes are laid out; tokenizer.HashTokenizer lists the formats
    sizes              the fields of c that are the constructor's arguments
    code_limits        of a module: pairs (how many code numbers, exclusive limit), which forward checks
    needs_specials     whether special tokens need vectors outside of it, or its own table has them
    has_word_row       whether one learned vector is added to every ordinary word
    can_tie, is_tied   whether its rows can be the output layer, and whether they are by default
    is_stacked         whether a word becomes m vectors side by side, which stay apart in the sequence
    is_costly          whether embed is slow, so that the model embeds each distinct word of a batch once
    initial_std(c)     approximate std of its vectors before training, without the mean that words share
"""

import math
from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F


def init_normal(weight, std=0.02):
    """Fill with normal(0, std), truncated at ±2 std, in place; return the weight."""
    return nn.init.trunc_normal_(weight, std=std, a=-2 * std, b=2 * std)


def unpack_bits(packed, bits):
    """Unpack bytes, packed uint8 (..., ceil(T/8)), into bits, uint8 (..., T), most significant bit first."""
    shifts = torch.arange(7, -1, -1, dtype=torch.uint8, device=packed.device)
    return ((packed.unsqueeze(-1) >> shifts) & 1).flatten(-2)[..., :bits]


def check_codes(codes, limits, name="codes"):
    """Return codes (..., C) as a tensor; ValueError unless integers within limits, pairs (count, limit)."""
    codes, (counts, ends) = torch.as_tensor(codes), zip(*limits)
    fits = not codes.is_floating_point() and codes.shape[-1:] == (sum(counts),)
    if fits and codes.is_cpu and codes.numel() and not torch.compiler.is_compiling():  # a GPU would wait
        # subtle: compared as int, because 256 as uint8 is 0
        fits = all(x.min() >= 0 and int(x.max()) < end for x, end in zip(codes.split(counts, -1), ends))
    if not fits:
        expected = "integers, " + " and ".join(f"{count} below {end:,}" for count, end in limits)
        raise ValueError(f"{name}: expected {expected}, got {codes.dtype} {[*codes.shape]}, or out of range.")
    return codes


class Embedding(nn.Module):
    """Base class: default facts, and forward, which checks codes (..., C) and calls embed with (M, C)."""
    code_format, sizes, needs_specials, has_word_row = "bits", ("bits", "width"), True, True
    can_tie = is_tied = is_stacked = is_costly = False

    def __init__(self, *code_limits):
        super().__init__()
        self.code_limits = code_limits

    @classmethod
    def from_config(cls, c):
        return cls(*(getattr(c, name) for name in cls.sizes))

    def initial_std(self, c):
        return 0.02

    def check(self, codes):
        check_codes(codes, self.code_limits)

    def table_rows(self, codes):  # int32 (M, C), of a table with a block of rows for each code number
        [(count, rows)] = self.code_limits
        return codes.int() + rows * torch.arange(count, dtype=torch.int32, device=codes.device)

    def forward(self, codes):
        codes = check_codes(codes, self.code_limits)
        e = self.embed(codes.reshape(-1, codes.shape[-1]))  # (M, d), or (M, m, d)
        return e.view(*codes.shape[:-1], *e.shape[1:])


class LookupEmbedding(Embedding):
    """Lookup: a standard table, one row per word, the baseline. Codes (..., 1) below N to (..., d)."""
    code_format, sizes, needs_specials, has_word_row = "row", ("rows", "width"), False, False
    can_tie = is_tied = True

    def __init__(self, rows, width):
        super().__init__((1, rows))
        self.weight = nn.Parameter(init_normal(torch.empty(rows, width)))  # (N, d)

    def embed(self, codes):
        return F.embedding(codes.squeeze(-1).int(), self.weight)


class HashEmbedding(LookupEmbedding):
    """Emb: one row per hash bucket, shared by the words in it. [HF §3.1] Not SV's: see WeightedEmbedding."""
    code_format, needs_specials, can_tie, is_tied = "index", True, False, False


class PoolEmbedding(Embedding):
    """Pool: chunks choose rows of one codebook, summed with a weight per chunk and dimension. [HF §3.4 eq.1]

        e = Σ_j softmax_j(W)_j ⊙ B[c_j]        W (J, d): a softmax over the chunks, for each dimension apart

    Fast form: weights folded into the codebook, a table per chunk. The last may be short (128 = 12·10 + 8).
    Args: bits int T, chunk int k up to 15 (codes are int16), width int d.
    Shape: codes integer (..., J), each below 2^k, to (..., d).
    """
    code_format, sizes = "chunks", ("bits", "chunk", "width")

    def __init__(self, bits, chunk, width):
        if not 0 < chunk <= 15:
            raise ValueError(f"chunk: expected 1 to 15 bits, got {chunk}.")
        num_chunks = -(-bits // chunk)
        super().__init__((num_chunks, 2**chunk))
        self.codebook = nn.Parameter(init_normal(torch.empty(2**chunk, width)))  # (2^k, d)
        # subtle: not zeros. Equal weights would give the same vector for every order of the chunks.
        self.weight = nn.Parameter(init_normal(torch.empty(num_chunks, width)))  # (J, d)

    def initial_std(self, c):  # mean of about T/k rows
        return 0.02 * (c.chunk / c.bits) ** 0.5

    def embed(self, codes):
        tables = self.weight.softmax(0).unsqueeze(1) * self.codebook  # (J, 2^k, d)
        return F.embedding_bag(self.table_rows(codes), tables.flatten(0, 1), mode="sum")  # chunk j, table j


class AddEmbedding(Embedding):
    """Add: every bit chooses one of its own two rows, and the T rows are added. [HF §3.4 eq.2]

        e = Σ_j B^j[τ_j] / √T  =  (Σ_j B^j[0] + Σ_j τ_j (B^j[1] − B^j[0])) / √T      one product with the bits

    Args: bits int T, width int d.  Shape: codes of 0 and 1 (..., T) to (..., d).
    """
    def __init__(self, bits, width):
        super().__init__((bits, 2))
        self.codebooks = nn.Parameter(init_normal(torch.empty(bits, 2, width)))  # (T, 2, d)

    def embed(self, codes):
        (zero, one), scale = self.codebooks.unbind(1), 1 / math.sqrt(len(self.codebooks))  # (T, d), (T, d)
        return F.linear(codes.to(zero.dtype), ((one - zero) * scale).T, zero.sum(0) * scale)


class ProjEmbedding(Embedding):
    """Proj: each dimension is the Pearson correlation of the bits with a learned vector. [HF §3.4 eq.3]

        e_j = <τ − mean τ, w^j − mean w^j> / (‖τ − mean τ‖ ‖w^j − mean w^j‖)      one product with the bits

    Args: bits int T, width int d.  Shape: codes of 0 and 1 (..., T) to (..., d); 0 where all bits are equal.
    """
    def __init__(self, bits, width):
        super().__init__((bits, 2))
        self.weight = nn.Parameter(init_normal(torch.empty(width, bits)))  # (d, T): w^j has one entry per bit

    def initial_std(self, c):  # the variance of a correlation of T random pairs is 1 / (T - 1)
        return max(c.bits - 1, 1) ** -0.5

    def embed(self, codes):
        def normalize(x):
            x = x - x.mean(-1, keepdim=True)
            # subtle: clamp the square, not the root: a root's gradient at 0 is infinite, times 0 it is NaN
            return x * x.square().sum(-1, keepdim=True).clamp(min=1e-16).rsqrt()

        return F.linear(normalize(codes.to(self.weight.dtype)), normalize(self.weight))


class LinearEmbedding(Embedding):
    """Linear: the word's bits times a learned matrix, ProFormer's layer. [HF App. B eq.11]"""
    def __init__(self, bits, width):
        super().__init__((bits, 2))
        self.weight = nn.Parameter(init_normal(torch.empty(bits, width)))  # (T, d)

    def initial_std(self, c):  # bits are 1/2 ± 1/2: T rows times ±1/2; times 1/2 they are a shared mean
        return 0.01 * c.bits**0.5

    def embed(self, codes):
        return codes.to(self.weight.dtype) @ self.weight


class BloomEmbedding(Embedding):
    """Bloom: an item is m rows, one of each map's block, which stay m vectors side by side. [SB §2.1]

    The transformer layers disambiguate colliding items from context.
    Args: hashes int m; rows int R of a block; width int d.  Shape: codes integer (..., m), each in 0 .. R-1,
        as bloom.BloomMap.digest has them, to (..., m, d).
    """
    code_format, sizes, needs_specials, has_word_row = "digest", ("hashes", "buckets", "width"), False, False
    can_tie = is_tied = is_stacked = True

    def __init__(self, hashes, rows, width):
        super().__init__((hashes, rows))
        self.weight = nn.Parameter(init_normal(torch.empty(hashes * rows, width)))  # (m·R, d), block by block

    def embed(self, codes):
        return F.embedding(self.table_rows(codes), self.weight)


class SketchEmbedding(BloomEmbedding):
    """Count-median sketch: a word has a row in each of k blocks; take the element-wise median or mean. [CM]

        rows of a word (k 3, d 2)    (1, 7)  (2, -9)  (900, 8)        median (2, 7)    mean (301, 2)

    One row that other words have pulled far away drags the mean along; the median moves at most to the next
    number in order. Of the median one row per coordinate gets the gradient, of the mean each row gets 1/k.
    Args: hashes int k, odd, as an even number of rows has no middle one; rows int R; width int d; aggregate
        "median" or "mean".  Shape: codes integer (..., k), each in 0 .. R-1, to (..., d).
    """
    # "emb" is the aggregate: median or mean
    code_format, sizes, is_tied, is_stacked = "sketch", ("hashes", "buckets", "width", "emb"), False, False
    needs_specials = has_word_row = is_costly = True

    def __init__(self, hashes, rows, width, aggregate="median"):
        super().__init__(hashes, rows, width)
        if hashes % 2 == 0 or hashes > 255:
            raise ValueError(f"hashes: expected an odd number of at most 255 for a sketch, got {hashes}.")
        if aggregate not in ("median", "mean"):
            raise ValueError(f"aggregate: expected median or mean, got {aggregate!r}.")
        self.aggregate = aggregate

    def initial_std(self, c):  # measured on words that take row i of every block: the blocks are independent
        return self(torch.arange(min(c.buckets, 4_096)).unsqueeze(1).expand(-1, c.hashes)).std()

    def embed(self, codes):
        rows = self.table_rows(codes)
        if self.aggregate == "mean":
            return F.embedding_bag(rows, self.weight, mode="mean")
        return RowMedian.apply(self.weight, rows)


class RowMedian(torch.autograd.Function):
    """The element-wise median of k rows of a table, k odd, by comparisons of rows: vector instructions. [CM]

    A CPU takes words in parts whose rows stay in its cache. Backward needs a uint8 row index per element.
    """
    PART = 2**16  # numbers of one hash function's rows that are processed at once on a CPU

    @staticmethod
    def forward(ctx, table, rows):
        """Return (M, d) from table (N, d) and rows integer (M, k)."""
        (M, k), d = rows.shape, table.shape[1]
        out, chosen = table.new_empty(M, d), torch.empty(M, d, dtype=torch.uint8, device=table.device)
        ctx.num_rows, ctx.step = len(table), max(M if table.is_cuda else RowMedian.PART // d, 1)
        for part, result, which in zip(*(t.split(ctx.step) for t in (rows, out, chosen))):
            *x, last = table.index_select(0, part.T.flatten()).unflatten(0, (k, -1)).unbind()  # (words, d)
            result[:] = middle = median([*x, last])
            # the first row that equals the median is r_0 (1 + r_1 (1 + r_2 ...)), r_j = 1 if row j differs:
            #     of 3 rows, row 0: 0 · (1 + r_1) = 0    row 1: 1 · (1 + 0) = 1    row 2: 1 · (1 + 1) = 2
            count = table.new_zeros(())
            for row in reversed(x):
                row.ne_(middle)  # in place 0.0 or 1.0: four times as fast as to bool
                count = torch.addcmul(row, row, count)
            which[:] = count
        ctx.save_for_backward(rows, chosen)
        return out

    @staticmethod
    def backward(ctx, gradient):
        (rows, chosen), d = ctx.saved_tensors, gradient.shape[1]
        table, starts = gradient.new_zeros(ctx.num_rows, d), d * rows.long()  # starts in the flat table
        for part, which, up in zip(*(t.split(ctx.step) for t in (starts, chosen, gradient))):
            places = part.gather(1, which.long()).add_(torch.arange(d, device=rows.device))
            table.view(-1).index_add_(0, places.flatten(), up.flatten())  # to the row that it came from
        return table, None


def median(rows):
    """Return the element-wise median of a list of k tensors, k odd, by comparisons alone.

    The smallest of k // 2 + 2 numbers has more than half of all k above it, the largest as many below, so
    neither is the median. Without both the median is the same: take in the next number, until one is left.

        7 1 9 4 5    of 7 1 9 4 without 1 and 9: 7 4    of 7 4 5 without 4 and 7: 5
    """
    pool, rest = list(rows[:len(rows) // 2 + 2]), list(rows[len(rows) // 2 + 2:])
    while len(pool) > 1:
        low, high, middle = torch.minimum(*pool[:2]), torch.maximum(*pool[:2]), []
        for x in pool[2:-1]:
            x, low = torch.maximum(x, low), torch.minimum(x, low)
            middle.append(torch.minimum(x, high))
            high = torch.maximum(x, high)
        middle.append(torch.minimum(torch.maximum(pool[-1], low), high))
        pool, rest = middle + rest[:1], rest[1:]
    return pool[0]


def median_reference(rows):
    """Return the element-wise median of a list of k tensors, written out: sort, take the middle one."""
    return torch.stack(list(rows)).sort(0).values[len(rows) // 2]


class WeightedEmbedding(Embedding):
    """Weighted: k rows of a shared pool, each times the word's importance weight, and summed. [SV §3]

        e = Σ_j p_j · row_j        p: a row of the importance table, which words share by another hash

    Args: hashes int k, rows int N, importance_rows int K, width int d.
    Shape: codes integer (..., k+1), k rows below N and last the row of p, below K, to (..., d).
    """
    code_format, sizes = "weighted", ("hashes", "rows", "weights", "width")

    def __init__(self, hashes, rows, importance_rows, width):
        super().__init__((hashes, rows), (1, importance_rows))
        self.weight = nn.Parameter(init_normal(torch.empty(rows, width)))  # (N, d)
        self.importance = nn.Parameter(init_normal(torch.empty(importance_rows, hashes), std=1.0))  # (K, k)

    def initial_std(self, c):  # measured
        return self(torch.arange(min(c.rows, c.weights, 4_096)).unsqueeze(1).expand(-1, c.hashes + 1)).std()

    def embed(self, codes):
        p = F.embedding(codes[:, -1].int(), self.importance)  # (M, k)
        return F.embedding_bag(codes[:, :-1].int(), self.weight, mode="sum", per_sample_weights=p)


EMBEDDINGS = {"lookup": LookupEmbedding, "emb": HashEmbedding, "pool": PoolEmbedding, "add": AddEmbedding,
              "proj": ProjEmbedding, "linear": LinearEmbedding, "bloom": BloomEmbedding,
              "median": SketchEmbedding, "mean": SketchEmbedding, "weighted": WeightedEmbedding}


def main(argv=None):
    """Embed 100 random words with every method; print shapes, parameters and the std of the vectors."""
    torch.manual_seed(0)
    c = SimpleNamespace(rows=50_260, bits=128, chunk=10, hashes=5, buckets=500, weights=50_000, width=768)
    print("100 random words. Measured std: tables are truncated to 0.88; linear adds a shared mean.\n\n"
          f"{'method':>8}  {'codes':>9}  {'vectors':>9}  {'parameters':>10}  expected  measured")
    for name, cls in EMBEDDINGS.items():
        c.emb, c.hashes = name, 2 if cls.is_stacked else 5  # as in model.Config
        module = cls.from_config(c).requires_grad_(False)
        codes = torch.cat([torch.randint(0, end, (1, 100, count)) for count, end in module.code_limits], -1)
        vectors, size = module(codes), sum(p.numel() for p in module.parameters())
        shapes = "  ".join(f"{'×'.join(map(str, tensor.shape[1:])):>9}" for tensor in (codes, vectors))
        print(f"{name:>8}  {shapes}  {size:>10,}  {module.initial_std(c):8.4f}  {vectors.std():8.4f}")


if __name__ == "__main__":
    main()
