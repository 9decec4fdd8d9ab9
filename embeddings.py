"""Embed words that are known by their hash codes alone: one class per method.

Sources:
    [HF] Xue & Aletras 2022, HashFormers
    [SB] Anderson et al. 2020, Superbloom
    [CM] Median is all you need, a proposal
    [SV] Svenstrup et al. 2017, Hash Embeddings
    [FT] Bojanowski et al. 2017, Enriching Word Vectors with Subword Information
Out of scope: how words get their codes (hashing.py, data/coders.py), vectors of special tokens,
    [PAD] included (model.py).
Deviations:
    1. No dropout inside. The authors' code has some in Pool, the paper has none.
    2. Weighted starts with importance weights of normal(0, 1), truncated at ±2, and rows of std
       0.02. The released code has importance std 0.0005 and row std 0.1: all vectors are nearly 0.
Notation:
    c codes of a word, C of them   T bits of a word   τ_j bit j, 0 or 1   J chunks of a word
    B table of N rows   B^j table of bit or block j   P, p weights   e vector   d its width
    m hashes of an item   k hash functions   R buckets of a block   s special tokens
    K rows of the importance table   G n-grams that a word may have
Demo: python embeddings.py

Every module maps codes c, integers (..., C), to vectors e, float (..., d):

    lookup, emb     e = B[c]                        a row of a table
    pool            e = Σ_j P_j ⊙ B[c_j]            J chunks choose rows of one codebook
    add             e = Σ_j B^j[τ_j] / √T           every bit chooses one of its own two rows
    proj            e_i = correlation of τ and w^i  bits τ
    linear          e = τ W
    bloom           B^1[c_1], …, B^m[c_m]           side by side: m vectors (..., m, d)
    median, mean    e = median or mean of B^1[c_1], …, B^k[c_k]
    weighted        e = Σ_j p_j B[c_j]
    ngram           e = Σ_j B[c_j]                  all n-grams of a word

hashing.py returns numpy arrays, which are codes as they are. data/coders.py stores bits in bytes:
unpack_bits restores them.
"""

import inspect
import math
from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

INIT_STD = 0.02  # of tables, as in BERT
MAX_CHUNK = 15  # bits of a chunk; equals that of hashing.py, as this file imports no other


class Embedding(nn.Module):
    """Base class. A subclass makes its tables, and has its formula in `embed`.

    The arguments of its constructor are fields of model.Config.

    Args:
        code_limits: list of C ints. Code number j is in 0 .. code_limits[j] - 1.

    Attributes of a class, which model.py reads (the defaults are those of a method of bits):
        code_format: how a word's codes are laid out: data/coders.py lists the formats.
        needs_specials: special tokens have no codes, and model.py has a table for them.
        has_word_row: that table, if any, has a row more, which is added to every word.
        tie: may the output layer use the rows? "yes", as it does by default; "optional"; or "no".
        is_stacked: an item has m vectors, which take m places in the sequence.
    """

    code_format = "bits"
    needs_specials = True
    has_word_row = True
    tie = "no"
    is_stacked = False

    def __init__(self, code_limits):
        super().__init__()
        self.code_limits = code_limits

    @classmethod
    def from_config(cls, config):
        """Return the module for a model.Config: its fields have the names of the arguments."""
        names = inspect.signature(cls).parameters
        return cls(*[getattr(config, name) for name in names])

    def initial_std(self):
        """Return about the std of vectors before training; the model scales positions by it."""
        return INIT_STD

    def forward(self, codes):
        """Return vectors (..., d), or (..., m, d), of codes (..., C).

        Raises:
            ValueError: The codes are no integers, or not C.
            IndexError, or RuntimeError when compiled and in ngram: A code has no row. A bit other
                than 0 and 1 is not detected.
        """
        codes = torch.as_tensor(codes)
        self.check_form(codes)  # subtle: some formulas would broadcast codes of another size
        return self.embed(codes)

    def embed(self, codes):
        """Return vectors (..., d), or (..., m, d), of codes (..., C), which are integers."""
        raise NotImplementedError

    def check_form(self, codes):
        """Raise a ValueError unless codes are integers (..., C)."""
        num_codes = len(self.code_limits)  # C
        if codes.is_floating_point() or codes.shape[-1] != num_codes:
            raise ValueError(f"codes: expected integers (..., {num_codes}), "
                             f"got {codes.dtype} {[*codes.shape]}.")

    def check_range(self, codes):
        """Raise a ValueError unless codes, integers (V, C), are within code_limits.

        Model.set_codes calls it once for all words.
        """
        self.check_form(codes)
        limits = torch.tensor(self.code_limits)  # subtle: int64, as 256 in uint8 would be 0
        if ((codes < 0) | (codes >= limits)).any():
            raise ValueError("codes: expected 0 to the limit of each column, got another number.")


# A row of a table


class LookupEmbedding(Embedding):
    """Lookup: a standard table with a row for each word, the baseline.

    Args:
        rows: int, N.
        width: int, d.

    Shape:
        codes (..., 1), each below N, to (..., d).
    """

    code_format = "row"
    needs_specials = False
    has_word_row = False
    tie = "yes"

    def __init__(self, rows, width):
        super().__init__([rows])
        self.weight = new_table(rows, width)  # (N, d)

    def embed(self, codes):
        return F.embedding(codes[..., 0].long(), self.weight)


class HashEmbedding(LookupEmbedding):
    """Emb: a row for each hash bucket, which the words of the bucket share. [HF §3.1]

    Args and shape are those of LookupEmbedding. The hash embeddings of Svenstrup et al. are
    WeightedEmbedding.
    """

    code_format = "index"
    needs_specials = True  # but no word row: its rows can learn what all words share
    tie = "no"  # words that share a row would have equal logits


# Chunks and bits


class PoolEmbedding(Embedding):
    """Pool: chunks choose rows of one codebook, summed with learned weights. [HF §3.4 eq.1]

        e = Σ_j P_j ⊙ B[c_j]        P (J, d): the softmax of W over the chunks

    W (J, d) has a weight for each chunk and dimension. Why chunks: T bits as one number would need
    2^T rows, and single bits, as in Add, cannot tell which bits occur together. A chunk of 10 bits
    can, among 10 neighbors, and all chunks share its 2^10 rows.

    Args:
        bits: int, T.
        chunk: int, bits of a chunk, up to 15. The last chunk may be short: 128 = 12 · 10 + 8.
        width: int, d.

    Shape:
        codes (..., J), each below 2^chunk, to (..., d).
    """

    code_format = "chunks"

    def __init__(self, bits, chunk, width):
        if not 1 <= chunk <= MAX_CHUNK:
            raise ValueError(f"chunk: expected 1 to {MAX_CHUNK} bits, got {chunk}.")
        num_chunks = math.ceil(bits / chunk)
        last_chunk = bits - chunk * (num_chunks - 1)  # bits
        super().__init__([2**chunk] * (num_chunks - 1) + [2**last_chunk])
        self.bits = bits
        self.chunk = chunk
        self.codebook = new_table(2**chunk, width)  # (2^chunk, d)
        # subtle: with equal weights, words with the same chunks in another order would be equal
        self.weight = new_table(num_chunks, width)  # (J, d)

    def initial_std(self):
        # of the mean of J rows, if all chunks are whole; a short last one counts as a part of a row
        return INIT_STD * math.sqrt(self.chunk / self.bits)

    def embed(self, codes):
        # (P * codebook[codes]).sum(-2) would make J · d numbers for each word. P_j ⊙ B[c] is
        # (P_j ⊙ B)[c]: weight all J · 2^chunk rows once, then look up
        tables = self.weight.softmax(0).unsqueeze(1) * self.codebook  # (J, 2^chunk, d)
        e = 0
        for j, table in enumerate(tables):
            e = e + F.embedding(codes[..., j].long(), table)  # (..., d)
        return e


class AddEmbedding(Embedding):
    """Add: every bit chooses one of its own two rows, and the T rows are added. [HF §3.4 eq.2]

        e = Σ_j B^j[τ_j] / √T  =  (Σ_j B^j[0] + Σ_j τ_j (B^j[1] − B^j[0])) / √T

    The second form needs only one product with the bits.

    Args:
        bits: int, T.
        width: int, d.

    Shape:
        codes of 0 and 1 (..., T) to (..., d).
    """

    def __init__(self, bits, width):
        super().__init__([2] * bits)
        self.codebooks = new_table(bits, 2, width)  # (T, 2, d)

    def embed(self, codes):
        zero, one = self.codebooks.unbind(1)  # (T, d), (T, d)
        scale = 1 / math.sqrt(len(self.codebooks))
        difference = (one - zero) * scale  # (T, d)
        return F.linear(codes.to(zero.dtype), difference.T, zero.sum(0) * scale)


class ProjEmbedding(Embedding):
    """Proj: each dimension is the Pearson correlation of the bits with a vector. [HF §3.4 eq.3]

        e_i = <τ − mean τ, w^i − mean w^i> / (‖τ − mean τ‖ ‖w^i − mean w^i‖)

    Why a correlation: e_i is between -1 and 1, however many bits are 1 and however large w^i is.
    Only the pattern counts, and bits that are all flipped give −e. The plain product of Linear
    adds a mean that all words share.

    Args:
        bits: int, T.
        width: int, d.

    Shape:
        codes of 0 and 1 (..., T) to (..., d). The vector is 0 where all bits are equal, as those of
        a word without a known n-gram are.
    """

    def __init__(self, bits, width):
        super().__init__([2] * bits)
        self.weight = new_table(width, bits)  # (d, T): w^i is row i

    def initial_std(self):
        bits = self.weight.shape[1]  # T
        return 1 / math.sqrt(max(bits - 1, 1))  # of the correlation of T random pairs

    def embed(self, codes):
        bits = standardize(codes.to(self.weight.dtype))  # (..., T)
        return F.linear(bits, standardize(self.weight))


def standardize(x):
    """Return x (..., T) with mean 0 and length 1 in the last dimension; 0 if x is constant."""
    dtype = x.dtype
    x = x.to(torch.promote_types(dtype, torch.float32))  # in float16 1e-16 is 0, and 0 / 0 is NaN
    x = x - x.mean(-1, keepdim=True)
    square = x.square().sum(-1, keepdim=True)
    # subtle: bound the square, not its root, whose gradient at 0 is infinite
    x = x * square.clamp(min=1e-16).rsqrt()
    return x.to(dtype)


class LinearEmbedding(Embedding):
    """Linear: the word's bits times a learned matrix, ProFormer's layer. [HF App. B eq.11]

    Args:
        bits: int, T.
        width: int, d.

    Shape:
        codes of 0 and 1 (..., T) to (..., d).
    """

    def __init__(self, bits, width):
        super().__init__([2] * bits)
        self.weight = new_table(bits, width)  # (T, d)

    def initial_std(self):
        # A bit is 1/2 ± 1/2. The sum of T rows times 1/2 is a mean that all words share. Words
        # differ by the sum of T rows times ±1/2, and this is its std.
        return INIT_STD / 2 * math.sqrt(len(self.weight))

    def embed(self, codes):
        return codes.to(self.weight.dtype) @ self.weight


# Several hash functions


class BloomEmbedding(Embedding):
    """Bloom: an item is a row of each of m blocks, which stay m vectors side by side. [SB §2.1]

    As in a Bloom filter, a row is shared by many items, and the m rows together by none. The
    transformer layers tell items that share a row apart by their context.

    Args:
        hashes: int, m.
        buckets: int, R + s, rows of a block: the buckets of a map, then the special tokens.
        width: int, d.

    Shape:
        codes (..., m), each below R + s, of bloom.BloomMap.digest or of special tokens, to
        (..., m, d).
    """

    code_format = "digest"
    needs_specials = False
    tie = "yes"
    is_stacked = True

    def __init__(self, hashes, buckets, width):
        super().__init__([buckets] * hashes)
        self.weight = new_table(hashes * buckets, width)  # (m·(R + s), d)

    def embed(self, codes):
        return gather_rows(codes, self.weight)


def gather_rows(codes, table):
    """Return row codes[..., j] of block j, for all m blocks of a table.

    Args:
        codes: integer (..., m), each below the rows of a block.
        table: float (m · rows, d), m blocks. A sketch has k blocks.

    Returns:
        float (..., m, d).
    """
    m = codes.shape[-1]
    rows = []
    # a lookup in each block, so that a code beyond its block raises and never reads the next block
    for j, block in enumerate(table.unflatten(0, (m, -1))):  # (rows, d)
        rows.append(F.embedding(codes[..., j].long(), block))
    return torch.stack(rows, -2)


class SketchEmbedding(Embedding):
    """Sketch: k rows of a word, one of each block, become one vector. [CM]

    A sketch, as in count-median sketch, is a table that is smaller than what it stores: each word
    has k places, by k hash functions, and shares each with other words. Reading a word combines its
    k rows. A subclass says how in `aggregate`:

        rows of a word (k 3, d 2)    (1, 7)  (2, -9)  (900, 8)        median (2, 7)    mean (301, 2)

    One row that other words have pulled far away drags the mean along. However far away it is, it
    moves the median at most to the neighboring value. So the median is right as long as more than
    half of the k rows are: it lies between those. Its gradient goes to one row in each dimension;
    the mean's goes to all rows, 1/k each. vmap does not take the median and the mean on a CPU.

    Args:
        hashes: int, k, odd: an even number of rows has no middle one. The mean is held to it, too,
            so that it compares with the median.
        buckets: int, R, rows of a block.
        width: int, d.

    Shape:
        codes (..., k), each below R, as hashing.sketch_index returns them, to (..., d).
    """

    code_format = "sketch"
    tie = "optional"

    def __init__(self, hashes, buckets, width):
        super().__init__([buckets] * hashes)
        if hashes % 2 == 0:
            raise ValueError(f"hashes: expected an odd number for a sketch, got {hashes}.")
        self.weight = new_table(hashes * buckets, width)  # (k·R, d)

    def initial_std(self):
        return measure_std(self)

    def embed(self, codes):
        # The median is slow on a CPU, and a word occurs about twice in a batch: compute it once for
        # each distinct word, which takes about a third of the time (bench/sketch.py). A compiled
        # module cannot, as it does not know how many are distinct
        if codes.is_cpu and not torch.compiler.is_compiling():
            *shape, k = codes.shape
            words, places = codes.reshape(-1, k).unique(dim=0, return_inverse=True)
            vectors = self.aggregate_rows(words)  # (distinct words, d)
            return F.embedding(places.view(shape), vectors)  # (..., d)
        return self.aggregate_rows(codes)

    def aggregate_rows(self, codes):
        """Return what becomes of the k rows of each word: codes (..., k) to (..., d)."""
        rows = gather_rows(codes, self.weight)  # (..., k, d)
        return self.aggregate(rows)

    def aggregate(self, rows):
        """Return vectors (..., d) of rows (..., k, d)."""
        raise NotImplementedError


class MedianEmbedding(SketchEmbedding):
    """Count-median sketch: the middle one of k numbers, in each dimension. [CM]"""

    def aggregate(self, rows):
        return rows.median(-2).values  # (..., d)


class MeanEmbedding(SketchEmbedding):
    """The mean of the same rows. [CM]"""

    def aggregate(self, rows):
        return rows.mean(-2)  # (..., d)


class WeightedEmbedding(Embedding):
    """Weighted: k rows of one table, each times an importance weight, summed. [SV §3]

        e = Σ_j p_j · row_j

    The weights p (k,) are a row of the importance table. One more hash function chooses that row,
    so words share it.

    Args:
        hashes: int, k.
        rows: int, N.
        weights: int, K, rows of the importance table.
        width: int, d.

    Shape:
        codes (..., k + 1) to (..., d): k rows below N, and last the row of p, below K.
    """

    code_format = "weighted"

    def __init__(self, hashes, rows, weights, width):
        super().__init__([rows] * hashes + [weights])
        self.weight = new_table(rows, width)  # (N, d)
        self.importance = new_table(weights, hashes, std=1.0)  # (K, k)

    def initial_std(self):
        # measure_std takes codes (i, ..., i), whose vector is (Σ_j p_j) · row_i. As the p_j are
        # independent with mean 0, its variance is that of Σ_j p_j · row_j
        return measure_std(self)

    def embed(self, codes):
        rows = F.embedding(codes[..., :-1].long(), self.weight)  # (..., k, d)
        p = F.embedding(codes[..., -1].long(), self.importance)  # (..., k)
        return (p.unsqueeze(-1) * rows).sum(-2)


class NgramEmbedding(Embedding):
    """Ngram: the rows of a word's hashed character n-grams, summed. [FT §3.2]

        e = Σ_j B[c_j]        over all j with c_j > 0

    Words have different numbers of n-grams, so the code 0 is padding. Row 0 is never read. PyTorch
    has no second derivative of such a sum.

    Args:
        rows: int, N, with row 0.
        grams: int, G.
        width: int, d.

    Shape:
        codes (..., G), each below N, as hashing.ngram_index returns them, to (..., d). The vector
        is 0 where all codes are padding.
    """

    code_format = "ngrams"

    def __init__(self, rows, grams, width):
        super().__init__([rows] * grams)
        if rows < 2:
            raise ValueError(f"rows: expected at least 2, one of them for padding, got {rows}.")
        self.weight = new_table(rows, width)  # (N, d)

    def initial_std(self):
        return INIT_STD * math.sqrt(22)  # of the sum of 22 rows, the n-grams of "<hello>"

    def embed(self, codes):
        *shape, num_grams = codes.shape
        codes = codes.reshape(-1, num_grams).long()  # (words, G)
        # subtle: padding_idx leaves row 0 out of the sum, so that it has no gradient, either
        e = F.embedding_bag(codes, self.weight, mode="sum", padding_idx=0)  # (words, d)
        return e.view(*shape, e.shape[1])


EMBEDDINGS = {
    "lookup": LookupEmbedding,
    "emb": HashEmbedding,
    "pool": PoolEmbedding,
    "add": AddEmbedding,
    "proj": ProjEmbedding,
    "linear": LinearEmbedding,
    "bloom": BloomEmbedding,
    "median": MedianEmbedding,
    "mean": MeanEmbedding,
    "weighted": WeightedEmbedding,
    "ngram": NgramEmbedding,
}


# Helpers


def new_table(*shape, std=INIT_STD):
    """Return a parameter of this shape, filled by init_normal."""
    return nn.Parameter(init_normal(torch.empty(shape), std))


def init_normal(weight, std=INIT_STD):
    """Fill with normal(0, std), truncated at ±2 std, in place; return the weight."""
    return nn.init.trunc_normal_(weight, std=std, a=-2 * std, b=2 * std)


@torch.no_grad()
def measure_std(embedding):
    """Return the std of the vectors of the codes (i, ..., i), for 4,096 numbers i at most.

    It is a tensor, not a float: a module on the device "meta" has no numbers to read.
    """
    limits = embedding.code_limits
    numbers = torch.arange(min(4_096, *limits))
    codes = numbers.unsqueeze(1).expand(-1, len(limits))  # (words, C)
    return embedding(codes).std()


def unpack_bits(packed, bits):
    """Return bits uint8 (..., T) of bytes uint8 (..., ceil(T/8)), most significant bit first.

    The model calls it, as BitCoder of data/coders.py packs them.
    """
    shifts = torch.arange(7, -1, -1, dtype=torch.uint8, device=packed.device)
    unpacked = (packed.unsqueeze(-1) >> shifts) & 1  # (..., ceil(T/8), 8)
    return unpacked.flatten(-2)[..., :bits]


def main():
    """Embed 100 words with every method; print shapes and parameters."""
    c = SimpleNamespace(rows=50_260, bits=128, chunk=10, hashes=5, buckets=500, weights=50_000,
                        grams=64, width=768)
    print("  method  vectors of 100 words  parameters")
    for name, embedding_class in EMBEDDINGS.items():
        with torch.device("meta"):  # shapes without numbers, which takes no time
            module = embedding_class.from_config(c)
            codes = torch.zeros(100, len(module.code_limits), dtype=torch.int64)
            shape = [*module(codes).shape]  # [100, d], or [100, m, d]
        num_parameters = sum(p.numel() for p in module.parameters())
        print(f"{name:>8}  {str(shape):>20}  {num_parameters:10,}")


if __name__ == "__main__":
    main()
