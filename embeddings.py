"""Embed words that are known by their hash codes alone: one class per method.

Paper map:    [HF §3.1] HashEmbedding   [HF §3.4 eq.1] PoolEmbedding   [HF §3.4 eq.2] AddEmbedding
              [HF §3.4 eq.3] ProjEmbedding   [HF App. B eq.11] LinearEmbedding   [SB §2.1] BloomEmbedding
              [CM] SketchEmbedding   [SV §3] WeightedEmbedding
Sources:      [HF] Xue & Aletras 2022, HashFormers   [SB] Superbloom, ICLR 2020 submission
              [CM] Median is all you need, a proposal   [SV] Svenstrup et al. 2017, Hash Embeddings
Out of scope: how words get their codes (hashing.py, tokenizer.py), vectors of special tokens (model.py).
Deviations:   1. Fast forms: a matrix product, a gather, comparisons of rows. Tests hold the literal ones.
              2. No dropout inside. The authors' code has some in Pool, the paper has none.
              3. Importance weights start as normal(0, 1): with normal(0, 0.0005) words have no effect.
Notation:     B batch   L positions   M words   C code numbers per word   d width   T bits   J chunks of k
              N rows   m hashes per item   k hash functions of a sketch, R rows each   K importance rows
Demo:         python embeddings.py

Every module maps codes (..., C) to vectors (..., d), BloomEmbedding to m vectors per item; tables start as
normal(0, 0.02). Each class states what the rest of the project has to know about it, c being a model.Config:

    code_format        how a word's codes are laid out; tokenizer.HashTokenizer lists the formats
    sizes              fields of c that shape it, in the order of the constructor's arguments before the width
    limits             pairs (how many code numbers, exclusive limit), ints or fields of c; see code_limits
    needs_specials     whether special tokens need vectors outside of it, or its own table has them
    has_word_row       whether one learned vector is added to every ordinary word, where words have no rows
    can_tie, is_tied   whether its rows can be the output layer, and whether they are by default
    is_stacked         whether an item stays c.hashes vectors; is_costly: whether to embed once a batch
    initial_std(c)     standard deviation of its vectors before training, up to truncation and a shared mean
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


class Embedding(nn.Module):
    """Base class: the facts that most methods share."""
    code_format, sizes, limits, needs_specials, has_word_row = "bits", ("bits",), None, True, True
    can_tie = is_tied = is_stacked = is_costly = False

    @classmethod
    def from_config(cls, c):
        return cls(*(getattr(c, name) for name in cls.sizes), c.width)

    @classmethod
    def code_limits(cls, c):
        limits = cls.limits or [(-(-c.bits // 8), 256)]  # by default, bits packed in bytes
        return [tuple(getattr(c, x) if isinstance(x, str) else x for x in pair) for pair in limits]

    def initial_std(self, c):
        return 0.02


class LookupEmbedding(Embedding):
    """Lookup: a standard table, one row per word, the baseline. Codes (..., 1) below N to (..., d)."""
    code_format, sizes, limits, needs_specials, has_word_row = "row", ("rows",), [(1, "rows")], False, False
    can_tie = is_tied = True

    def __init__(self, rows, width):
        super().__init__()
        self.weight = nn.Parameter(init_normal(torch.empty(rows, width)))  # (N, d)

    def forward(self, codes):
        return F.embedding(codes.squeeze(-1).int(), self.weight)


class HashEmbedding(LookupEmbedding):
    """Emb: words that hash to the same of N rows share it. [HF §3.1] [SV §3] means WeightedEmbedding."""
    code_format, needs_specials, can_tie, is_tied = "index", True, False, False


class PoolEmbedding(Embedding):
    """Pool: chunks choose rows of one codebook, summed with a weight per chunk and dimension. [HF §3.4 eq.1]

        e = Σ_j softmax_j(W)_j ⊙ B[c_j]        W (J, d): a softmax over the chunks, for each dimension apart

    Fast form: fold the weights into the codebook, which gives a table per chunk; one embedding_bag adds the
    rows. Folding costs J·2^k·d, whatever the batch, and saves (B, L, J, d) numbers of memory. The last chunk
    is short (128 = 12·10 + 8) and uses the first 2^8 rows only.

    Args: bits int T, chunk int k up to 15, width int d.  Shape: codes integer (..., J) < 2^k to (..., d).
    """
    code_format, sizes = "chunks", ("bits", "chunk")

    def __init__(self, bits, chunk, width):
        super().__init__()
        if not 0 < chunk <= 15:
            raise ValueError(f"chunk: expected 1 to 15 bits, got {chunk}.")
        self.num_chunks = -(-bits // chunk)
        self.codebook = nn.Parameter(init_normal(torch.empty(2**chunk, width)))  # (2^k, d)
        # subtle: not zeros. Equal weights would give the same vector for every order of the chunks.
        self.weight = nn.Parameter(init_normal(torch.empty(self.num_chunks, width)))  # (J, d)

    @classmethod
    def code_limits(cls, c):
        return [(-(-c.bits // c.chunk), 2**c.chunk)]

    def initial_std(self, c):
        return 0.02 * (c.chunk / c.bits) ** 0.5

    def forward(self, codes):
        tables = self.weight.softmax(0).unsqueeze(1) * self.codebook  # (J, 2^k, d)
        offsets = torch.arange(self.num_chunks, dtype=torch.int32, device=codes.device) * len(self.codebook)
        bags = (codes.int() + offsets).reshape(-1, self.num_chunks)  # (M, J), chunk j reads table j
        e = F.embedding_bag(bags, tables.flatten(0, 1), mode="sum")
        return e.view(*codes.shape[:-1], e.shape[-1])


class AddEmbedding(Embedding):
    """Add: every bit chooses one of its own two rows, and the T rows are added. [HF §3.4 eq.2]

        e = Σ_j B^j[τ_j] / √T  =  (Σ_j B^j[0] + Σ_j τ_j (B^j[1] − B^j[0])) / √T      one product with the bits

    Args: bits int T, width int d.  Shape: codes of 0 and 1 (..., T) to (..., d).
    """
    def __init__(self, bits, width):
        super().__init__()
        self.codebooks = nn.Parameter(init_normal(torch.empty(bits, 2, width)))  # (T, 2, d)

    def forward(self, codes):
        zero, one = self.codebooks.unbind(1)  # (T, d)
        scale = 1 / math.sqrt(len(zero))
        return F.linear(codes.to(zero.dtype), ((one - zero) * scale).T, zero.sum(0) * scale)


class ProjEmbedding(Embedding):
    """Proj: each dimension is the Pearson correlation of the bits with a learned vector. [HF §3.4 eq.3]

        e_j = <τ − mean τ, w^j − mean w^j> / (‖τ − mean τ‖ ‖w^j − mean w^j‖)      one product with the bits

    Args: bits int T, width int d.  Shape: codes of 0 and 1 (..., T) to (..., d); 0 where all bits are equal.
    """
    def __init__(self, bits, width):
        super().__init__()
        self.weight = nn.Parameter(init_normal(torch.empty(width, bits)))  # (d, T): w^j has one entry per bit

    def initial_std(self, c):
        return max(c.bits - 1, 1) ** -0.5

    @staticmethod
    def _normalize(x):
        x = x - x.mean(-1, keepdim=True)
        # subtle: clamp the square, not the root: a root's gradient at 0 is infinite, and times 0 it is NaN
        return x * x.square().sum(-1, keepdim=True).clamp(min=1e-16).rsqrt()

    def forward(self, codes):
        return F.linear(self._normalize(codes.to(self.weight.dtype)), self._normalize(self.weight))


class LinearEmbedding(Embedding):
    """Linear: the word's bits times a learned matrix, ProFormer's layer. [HF App. B eq.11]"""

    def __init__(self, bits, width):
        super().__init__()
        self.weight = nn.Parameter(init_normal(torch.empty(bits, width)))  # (T, d)

    def initial_std(self, c):
        return 0.01 * c.bits**0.5

    def forward(self, codes):
        return codes.to(self.weight.dtype) @ self.weight


class BloomEmbedding(LookupEmbedding):
    """Bloom: an item is m rows of one table, which stay m vectors side by side. [SB §2.1]

    The transformer layers disambiguate colliding items from context.  Shape: codes (B, L, m) to (B, L·m, d).
    """
    code_format, limits, is_stacked = "digest", [("hashes", "rows")], True

    def forward(self, codes):
        return F.embedding(codes.flatten(1).int(), self.weight)


class SketchEmbedding(Embedding):
    """Count-median sketch: a word has a row in each of k blocks; take the element-wise median or mean. [CM]

        rows of a word (k 3, d 2)    (1, 7)  (2, -9)  (900, 8)        median (2, 7)    mean (301, 2)

    One row that other words have pulled far away drags the mean along; the median moves at most to the next
    number in order. Of the median one row per coordinate gets the gradient, of the mean each row gets 1/k.

    Args: hashes int k, odd, as an even number of rows has no middle one; rows int R; width int d; aggregate
        "median" or "mean".  Shape: codes integer (..., k), each in 0 .. R-1, to (..., d).
    """
    code_format, limits, can_tie, is_costly = "sketch", [("hashes", "buckets")], True, True

    def __init__(self, hashes, rows, width, aggregate="median"):
        super().__init__()
        if hashes % 2 == 0 or hashes > 255:
            raise ValueError(f"hashes: expected an odd number of at most 255 for a sketch, got {hashes}.")
        if aggregate not in ("median", "mean"):
            raise ValueError(f"aggregate: expected median or mean, got {aggregate!r}.")
        self.num_hashes, self.rows, self.aggregate = hashes, rows, aggregate
        self.weight = nn.Parameter(init_normal(torch.empty(hashes * rows, width)))  # (k·R, d), block by block

    @classmethod
    def from_config(cls, c):
        return cls(c.hashes, c.buckets, c.width, c.emb)

    def initial_std(self, c):  # measured: of five rows the median varies more than the mean
        return self(torch.arange(min(c.buckets, 4_096)).unsqueeze(1).expand(-1, c.hashes)).std()

    def forward(self, codes):
        blocks = torch.arange(0, len(self.weight), self.rows, dtype=torch.int32, device=codes.device)
        rows = (codes.int() + blocks).reshape(-1, self.num_hashes)  # (M, k)
        if self.aggregate == "mean":
            e = F.embedding_bag(rows, self.weight, mode="mean")
        else:
            e = RowMedian.apply(self.weight, rows)
        return e.view(*codes.shape[:-1], e.shape[-1])


class RowMedian(torch.autograd.Function):
    """The element-wise median of k rows of a table, by comparisons of whole rows; k odd. [CM]

    Minimum and maximum of two rows are vector instructions; a sort of five numbers is not. A CPU takes words
    in parts whose rows stay in its cache. Backward needs one uint8 row index per output element.
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
            # whose number is it? Of equal ones the first row's: count the rows before it,
            # r_0 (1 + r_1 (1 + r_2 ...)), where r_j = 1 says that row j differs
            count = table.new_zeros(())
            for row in reversed(x):
                row.ne_(middle)  # in place 0.0 or 1.0: four times as fast as to bool
                count = torch.addcmul(row, row, count)
            which[:] = count
        ctx.save_for_backward(rows, chosen)
        return out

    @staticmethod
    def backward(ctx, gradient):
        """Return the table's gradient: each number of (M, d) goes to the row that it came from."""
        (rows, chosen), d = ctx.saved_tensors, gradient.shape[1]
        table, starts = gradient.new_zeros(ctx.num_rows, d), d * rows.long()  # starts in the flat table
        for part, which, up in zip(*(t.split(ctx.step) for t in (starts, chosen, gradient))):
            places = part.gather(1, which.long()).add_(torch.arange(d, device=rows.device))
            table.view(-1).index_add_(0, places.flatten(), up.flatten())
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

    Args: hashes int k, rows int N, importance_rows int K, width int d; append bool, let the k weights be the
        vector's last numbers.  Shape: codes integer (..., k + 1), k below N, then one below K, to (..., d).
    """
    code_format, limits = "weighted", [("hashes", "rows"), (1, "weights")]
    sizes = "hashes", "rows", "weights"

    def __init__(self, hashes, rows, importance_rows, width, append=False):
        super().__init__()
        if append and width <= hashes:
            raise ValueError(f"width: expected more than the {hashes} appended weights, got {width}.")
        self.append = append
        self.weight = nn.Parameter(init_normal(torch.empty(rows, width - hashes * append)))  # (N, d or d - k)
        self.importance = nn.Parameter(init_normal(torch.empty(importance_rows, hashes), std=1.0))  # (K, k)

    def initial_std(self, c):  # measured
        return self(torch.arange(min(c.rows, c.weights, 4_096)).unsqueeze(1).expand(-1, c.hashes + 1)).std()

    def forward(self, codes):
        rows, weights = codes.reshape(-1, codes.shape[-1]).int().split([codes.shape[-1] - 1, 1], -1)
        p = F.embedding(weights.squeeze(-1), self.importance)  # (M, k)
        e = F.embedding_bag(rows, self.weight, mode="sum", per_sample_weights=p)  # (M, d or d - k)
        e = torch.cat([e, p], -1) if self.append else e
        return e.view(*codes.shape[:-1], e.shape[-1])


EMBEDDINGS = {"lookup": LookupEmbedding, "emb": HashEmbedding, "pool": PoolEmbedding, "add": AddEmbedding,
              "proj": ProjEmbedding, "linear": LinearEmbedding, "bloom": BloomEmbedding,
              "median": SketchEmbedding, "mean": SketchEmbedding, "weighted": WeightedEmbedding}


def main(argv=None):
    """Embed 100 random words with every method; print shapes, parameters and the spread of the vectors."""
    torch.manual_seed(0)
    c = SimpleNamespace(rows=50_260, bits=128, chunk=10, hashes=5, buckets=500, weights=50_000, width=768)
    print("100 words with random codes: the std of their vectors before training, expected and measured\n")
    print(f"{'method':>8}  {'codes':>9}  {'vectors':>9}  {'parameters':>10}  expected  measured")
    for c.emb, cls in EMBEDDINGS.items():
        module = cls.from_config(c).requires_grad_(False)
        codes = torch.cat([torch.randint(0, end, (1, 100, count)) for count, end in cls.code_limits(c)], -1)
        codes = unpack_bits(codes.byte(), c.bits) if cls.code_format == "bits" else codes
        vectors, size = module(codes), sum(p.numel() for p in module.parameters())
        shapes = "  ".join(f"{'×'.join(map(str, tensor.shape[1:])):>9}" for tensor in (codes, vectors))
        print(f"{c.emb:>8}  {shapes}  {size:>10,}  {module.initial_std(c):8.4f}  {vectors.std():8.4f}")


if __name__ == "__main__":
    main()
