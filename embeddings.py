"""Codes to vectors: one module per way to embed a word that is known by its hash alone.

Sources   [HF] Xue & Aletras 2022, HashFormers   [SB] Superbloom, ICLR 2020 submission
Map       [HF §3.1] HashEmbedding   [HF §3.4 eq.1] PoolEmbedding   [HF §3.4 eq.2] AddEmbedding
          [HF §3.4 eq.3] ProjEmbedding   [HF App. B eq.11] LinearEmbedding   [SB §2.1] BloomEmbedding
Not here  where the codes come from (hashing.py); the rows of [CLS], [MASK] ... (model.py).
Departs   1. Every module computes the paper's function in a form that costs one matrix product or one gather;
             the literal forms stand in the tests as oracles.
          2. No dropout inside (the authors' code has some in Pool; the paper has none).
Letters   B batch   L positions   C numbers a word   d width   T bits   k bits a chunk   J chunks   N rows
          m hashes an item
Try       python embeddings.py

Every module: codes (..., C) -> vectors (..., d), Bloom m vectors an item; weights start as normal(0, 0.02),
cut at ±2 std.
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
        bags = (codes.int() + offsets).flatten(0, -2)  # (words, J), chunk j looks into table j
        return F.embedding_bag(bags, tables.flatten(0, 1), mode="sum").unflatten(0, codes.shape[:-1])


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
        "linear, 420 bits": (LinearEmbedding(420, 768), torch.randint(0, 2, (3, 420))),
        "bloom, 2 of 211,286": (BloomEmbedding(211_286, 768), torch.randint(0, 211_286, (1, 3, 2))),
    }
    print(f"{'':>20}  {'codes':>8}  {'vectors':>8}  {'parameters':>11}  std at the start")
    for name, (module, codes) in cases.items():
        vectors = module(codes)
        count = sum(p.numel() for p in module.parameters())
        shapes = ["×".join(map(str, t.shape)) for t in (codes, vectors)]
        print(f"{name:>20}  {shapes[0]:>8}  {shapes[1]:>8}  {count:11,}  {vectors.std():.4f}")


if __name__ == "__main__":
    main()
