"""The transformer: config, encoder, heads, parameter counts, beam search over hashes, checkpoints.

Sources   [HF] Xue & Aletras 2022, HashFormers   [BERT] Devlin et al. 2019
          [SR] Yamaguchi et al. 2021, Shuffle+Random   [V] Vaswani et al. 2017, Attention Is All You Need
          [BL] Li & Yip, BERT-LSH   [SB] Superbloom, ICLR 2020 submission
          [CM] Median is all you need, a proposal
Map       [HF §3.1] Model.embed   [HF §4.1] PRESETS   [HF §4.2] PRESETS   [HF Table 4] parameter_groups
          [HF §4.4 eq.7] count_parameters   [HF App. B] count_parameters
          [BERT §3] Layer   [BERT §3.1] MaskedLMHead   [SR §3] Model   [V §3.5] sinusoids
          [BL §2.1] Layer   [BL §2.2] PRESETS   [SB §2.3] Model   [SB §3.2] Model
          [CM] PRESETS   [SB Table 1] PRESETS   [SB §2.5 Alg.1] beam_search   [SB App. C] beam_search
Not here  strings and hashes (hashing.py): a model sees ids and an array that gives each id its codes.
Departs   1. One combined projection for queries, keys and values: the same function, one product.
          2. The vocabulary's logits are computed at masked positions only, never for the whole batch.
          3. The position table starts as sinusoids, and matrices with std 0.02 · √(768/d), which is the usual
             0.02 at the paper's width: small models learn to attend sooner.
          4. The beam of beam_search doubles; the paper's grows by B. And a beam is its B rows: of others that
             tie with the last one the certificate speaks too, they need not be scored.
Letters   B batch   L positions   C code numbers a word   d width   H heads   e d/H   V ids
          M scored positions   N rows, items   m hashes an item   R buckets a map   P distributions
"""

import argparse
import contextlib
import fcntl
import functools
import glob
import hashlib
import json
import os
import shutil
import sys
import time
import zipfile
from dataclasses import asdict, dataclass, fields

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

from attention import choose, collision_share, draw_planes, full_attention, lsh_attention, simhash
from embeddings import AGGREGATIONS, AddEmbedding, BloomEmbedding, HashEmbedding, LinearEmbedding
from embeddings import LookupEmbedding, PoolEmbedding, ProjEmbedding, SketchEmbedding, WeightedEmbedding
from embeddings import init_, unpack_bits

PAD, WORD, FIRST = 0, 5, 6  # ids 0..5 are specials, words follow; numbers of hashing.py, which a test pins
FORMAT = 1  # of checkpoints
PARTS = dict(model=dict, encoder=dict, words=list, task=dict, run=dict, optimizer=dict, step=int)  # of them
# which form of codes each embedding takes, see hashing.FORMS
FORM = {"lookup": "row", "emb": "index", "pool": "chunks", "add": "bits", "proj": "bits",
        "linear": "bits", "bloom": "digest", **dict.fromkeys(AGGREGATIONS, "sketch"), "weighted": "weighted"}
TIES = ("row", "digest", "sketch")  # forms of embeddings whose rows could predict what is hidden
HEADS = ("sr", "mlm", "hash-mlm", "classify", "span")
ACTIVATIONS = {"gelu": F.gelu, "relu": F.relu}


class ConfigError(ValueError):
    """A model that cannot be built, a checkpoint that cannot be used; scripts print it and exit with 2."""


@dataclass
class Config:
    """Everything that shapes the weights, in plain types; it travels with them in the checkpoint."""

    emb: str = "proj"  # lookup, emb, pool, add, proj, linear, bloom, mean, median, weighted
    rows: int = 50_260  # N: rows of lookup, bloom (their specials among them), emb and weighted
    bits: int = 128  # T: bits of a word's hash (pool, add, proj, linear)
    chunk: int = 10  # k: bits of a chunk (pool)
    hashes: int | None = None  # m, positions of an item (bloom), None: 2; k of a sketch, None: 5
    buckets: int = 500  # R: rows of each hash function's block (mean, median), classes of each to predict
    weights: int = 50_000  # K: rows of the table of importance (weighted)
    layers: int = 12
    width: int = 768  # d
    heads: int = 12  # H
    ffn: int = 3072
    act: str = "gelu"  # of the feed-forward layer: gelu, relu
    order: bool = True  # False: a sequence is a set, without positions, and 0 fills it up
    length: int = 512  # positions, [CLS] among them; of a set, the most items
    spare_positions: int = 0  # rows of the position table that nothing uses: RoBERTa's 2, so the paper's
    types: int = 1
    dropout: float = 0.1
    head: str = "sr"  # sr, mlm, hash-mlm, classify, span
    tied: bool | None = None  # mlm, hash-mlm predict by the embedding's rows; None: lookup and bloom do
    labels: int = 2  # of classify
    pool: str = "cls"  # what classify looks at: cls, the first position, or mean, of all positions
    attn: str = "full"  # full, lsh: only pairs whose buckets collide
    lsh_bands: int = 8  # r: planes of a hash function
    lsh_buckets: int = 256  # m
    lsh_hashes: int = 1  # n: hash functions; a pair collides if one of them agrees
    lsh_fill: str = "zero"  # what other pairs score: zero, as in the paper, or mask, no weight at all
    lsh_pairs: str = "upper"  # upper: one score for (i, j) and (j, i), as in the paper; all: one for each
    lsh_redraw: bool = False  # new planes for every step of training

    def __post_init__(self):
        for field in fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, (int, float) if field.type is float else field.type):
                raise ConfigError(f"{field.name} {value!r}: wanted {field.type}")
        if self.emb not in FORM:
            raise ConfigError(f"unknown embedding {self.emb!r}; there are {', '.join(FORM)}")
        if FORM[self.emb] in ("digest", "sketch", "weighted") or self.head == "hash-mlm":
            self.hashes = (2 if self.emb == "bloom" else 5) if self.hashes is None else self.hashes
        else:
            self.hashes = None  # nothing hashes more than once
        for name in ("rows", "bits", "chunk", "layers", "width", "heads", "ffn", "length", "types", "labels",
                     "spare_positions", "hashes", "buckets", "weights", "lsh_bands", "lsh_buckets",
                     "lsh_hashes"):
            value, least = getattr(self, name), int(name not in ("layers", "spare_positions"))
            if value is not None and not least <= value <= 2**31:
                raise ConfigError(f"{name} {value}: wanted at least {least} and at most 2^31")
        if FORM[self.emb] == "sketch" and (self.hashes % 2 == 0 or self.hashes > 255):
            raise ConfigError(f"a sketch of {self.hashes} hash functions: wanted an odd number, whose median "
                              f"is one of its rows, and at most 255")
        if self.emb == "pool" and self.chunk > 15:
            raise ConfigError(f"chunks of {self.chunk} bits: wanted at most 15")
        for name, known in (("head", HEADS), ("pool", ("cls", "mean")), ("attn", ("full", "lsh")),
                            ("act", ACTIVATIONS), ("lsh_fill", ("zero", "mask")),
                            ("lsh_pairs", ("upper", "all"))):
            if getattr(self, name) not in known:
                raise ConfigError(f"unknown {name} {getattr(self, name)!r}; there are {', '.join(known)}")
        if self.attn == "lsh" and self.lsh_pairs == "upper" and not self.order:
            raise ConfigError("lsh_pairs upper scores (i, j) by i <= j, and a set has no order: wanted all")
        if self.lsh_redraw and self.attn == "full":
            raise ConfigError("lsh_redraw is of attn lsh")
        if not 0 <= self.dropout < 1:
            raise ConfigError(f"dropout {self.dropout}: wanted at least 0 and less than 1")
        if self.width % self.heads:
            near = max(self.width // self.heads, 1) * self.heads
            raise ConfigError(f"width {self.width} is not divisible by {self.heads} heads: "
                              f"wanted a multiple, such as {near}")
        fits = ["sr"] * self.order + (["mlm", "sampled"] if self.emb == "lookup" else ["hash-mlm"])
        fits = f"with emb {self.emb} {'' if self.order else 'of a set '}possible are {', '.join(fits)}"
        if self.head == "mlm" and self.emb != "lookup":
            raise ConfigError(f"objectives mlm and sampled predict rows of a vocabulary, which only emb "
                              f"lookup has; {fits}")
        if self.head == "hash-mlm" and self.emb == "lookup":
            raise ConfigError(f"objective hash-mlm predicts hashes, which all but emb lookup have; {fits}")
        if self.head == "sr" and not self.order:
            raise ConfigError(f"objective sr asks which words were moved, and a set has no order; {fits}")
        if self.head not in ("mlm", "hash-mlm"):
            self.tied = None  # nothing predicts rows
        elif self.tied is None:
            self.tied = FORM[self.emb] in ("row", "digest")
        elif self.tied and FORM[self.emb] not in TIES:
            raise ConfigError(f"tied: emb {self.emb} has no rows that could predict what is hidden; lookup, "
                              f"bloom, mean and median have")


# The sizes of the papers; `tiny` is ours, to train in minutes on two cores.
PRESETS = {
    "tiny": dict(layers=2, width=128, heads=4, ffn=512, length=128, rows=8_192, dropout=0.0),
    "bert-lsh": dict(emb="lookup", head="mlm", attn="lsh", lsh_bands=2, layers=2, width=128, heads=2, ffn=512,
                     length=512, rows=32_000, types=2),  # [BL §2.2]; its dense twin is --attn full
    "median": dict(emb="median", head="hash-mlm", layers=4, width=512, heads=4, ffn=2048, length=512,
                   rows=30_522),  # [CM]
    "hashformer": dict(layers=12, width=768, heads=12, ffn=3072, length=512, spare_positions=2),  # [HF §4.2]
    # [SB Table 1]: heads and width of the feed-forward as there; the number of rows follows from the items
    "superbloom": dict(emb="bloom", head="hash-mlm", order=False, act="relu", types=2, layers=12, width=768,
                       heads=12, ffn=3072, length=32),
    "superbloom-small": dict(emb="bloom", head="hash-mlm", order=False, act="relu", types=2, layers=2,
                             width=256, heads=4, ffn=512, length=32),
    # never pre-trained [HF §4.1]
    "proformer": dict(emb="linear", bits=420, layers=2, width=768, heads=12, ffn=3072, length=512),
}


def sinusoids(length, width):
    """Where the position table starts: waves of 2π to 20,000π positions; it is trained from there. [V §3.5]

    in:  length L; width d
    out: float (L, d) in [-1, 1]

    From random rows, attention has to learn L pairs of places before it finds a neighbour. Among sinusoids
    "one further" is the same rotation everywhere.
    """
    rates = 10_000 ** (-torch.arange(0, width, 2) / width)  # (d/2,)
    angles = torch.arange(length)[:, None] * rates  # (L, d/2)
    return torch.stack([angles.sin(), angles.cos()], -1).flatten(1)[:, :width]


class Layer(nn.Module):
    """Self-attention and feed-forward, the norm after each residual sum (post-LN). [BERT §3]"""

    def __init__(self, c, number):
        super().__init__()
        self.config, self.number, self.dropout = c, number, nn.Dropout(c.dropout)
        self.qkv, self.out = nn.Linear(c.width, 3 * c.width), nn.Linear(c.width, c.width)
        self.up, self.down = nn.Linear(c.width, c.ffn), nn.Linear(c.ffn, c.width)
        self.norm1, self.norm2 = nn.LayerNorm(c.width), nn.LayerNorm(c.width)
        if c.attn == "lsh":
            # subtle: from a generator of their own, so that the weights are those of the model without planes
            shape = c.heads, c.lsh_hashes, c.lsh_bands
            self.register_buffer("planes", torch.empty(*shape, c.width // c.heads))
            self.register_buffer("coef", torch.empty(shape, dtype=torch.int64))
            if not self.planes.is_meta:
                self.planes[:], self.coef[:] = self.draw(torch.initial_seed())

    def draw(self, seed):
        """in: seed int; out: planes (H, n, r, e), coef (H, n, r) of this layer's hash functions"""
        c, generator = self.config, torch.Generator("cpu").manual_seed((seed * 1_009 + self.number) % 2**63)
        return draw_planes(c.heads, c.lsh_hashes, c.lsh_bands, c.width // c.heads, c.lsh_buckets, generator)

    def project(self, x):
        """in: (B, L, d); out: queries, keys, values, each (B, H, L, e)"""
        return self.qkv(x).unflatten(-1, (3, self.config.heads, -1)).permute(2, 0, 3, 1, 4)

    def buckets(self, q, k):
        """in: queries, keys (B, H, L, e); out: their buckets int64 (B, H, n, L). [BL §2.1]"""
        return (simhash(x, self.planes, self.coef, self.config.lsh_buckets) for x in (q, k))

    def forward(self, x, key_mask=None):
        """in: x (B, L, d), key_mask bool (B, L) or None; out: (B, L, d)"""
        c, (q, k, v) = self.config, self.project(x)
        if c.attn == "lsh":
            a = lsh_attention(q, k, v, *self.buckets(q, k), fill=c.lsh_fill, pairs=c.lsh_pairs,
                              key_mask=key_mask)
        else:
            a = full_attention(q, k, v, key_mask=key_mask, dropout=c.dropout if self.training else 0.0)
        x = self.norm1(x + self.dropout(self.out(a.transpose(1, 2).flatten(2))))
        return self.norm2(x + self.dropout(self.down(ACTIVATIONS[c.act](self.up(x)))))


class MaskedLMHead(nn.Module):
    """Transform, then a table as the output layer, and a bias: the embedding's, or its own. [BERT §3.1]"""

    def __init__(self, c, rows):
        """in: c Config; rows N of the output"""
        super().__init__()
        self.transform, self.norm = nn.Linear(c.width, c.width), nn.LayerNorm(c.width)
        self.bias = nn.Parameter(torch.zeros(rows))
        self.table = None if c.tied else nn.Parameter(init_(torch.empty(rows, c.width)))  # (N, d)

    def forward(self, x, table, rows=None):
        """in: x (..., d), table (N, d), None: its own, rows int64 (S,), None: all; out: logits of these"""
        table, bias = self.table if table is None else table, self.bias
        if rows is not None:
            table, bias = table[rows], bias[rows]
        x = self.norm(F.gelu(self.transform(x)))
        # subtle: in bfloat16 many items tie with others, and recall would hang on the order of equals
        exact = not self.training
        with torch.autocast(x.device.type, enabled=not exact and torch.is_autocast_enabled(x.device.type)):
            return F.linear(x.float() if exact else x, table, bias)


class Model(nn.Module):
    """Codes -> vectors -> encoder -> head."""

    def __init__(self, config):
        """in: config Config; the codes of the words are given later, by set_codes"""
        super().__init__()
        c = self.config = config
        self.embedding = {
            "lookup": lambda: LookupEmbedding(c.rows, c.width),
            "emb": lambda: HashEmbedding(c.rows, c.width),
            "pool": lambda: PoolEmbedding(c.bits, c.chunk, c.width),
            "add": lambda: AddEmbedding(c.bits, c.width),
            "proj": lambda: ProjEmbedding(c.bits, c.width),
            "linear": lambda: LinearEmbedding(c.bits, c.width),
            "bloom": lambda: BloomEmbedding(c.rows, c.width),
            "weighted": lambda: WeightedEmbedding(c.hashes, c.rows, c.weights, c.width),
        }.get(c.emb, lambda: SketchEmbedding(c.hashes, c.buckets, c.width, c.emb))()
        self.m = c.hashes if c.emb == "bloom" else 1  # positions that an id takes
        # Rows of their own for the specials. A table of lookup or bloom has them inside; the rows of emb are
        # free, so a WORD row shared by all would add nothing: five are left. Pool, add and proj get all six.
        self.specials = None
        if c.emb not in ("lookup", "bloom"):
            self.specials = nn.Embedding(5 if c.emb == "emb" else 6, c.width)
        self.positions = nn.Embedding(c.length + c.spare_positions, c.width) if c.order else None
        self.types = nn.Embedding(c.types, c.width)
        self.norm, self.dropout = nn.LayerNorm(c.width), nn.Dropout(c.dropout)
        self.layers = nn.ModuleList(Layer(c, i) for i in range(c.layers))
        self.head = {
            "sr": lambda: nn.Linear(c.width, 3),  # 0 intact, 1 shuffled, 2 random [SR §3]
            "mlm": lambda: MaskedLMHead(c, c.rows),
            "hash-mlm": lambda: MaskedLMHead(c, c.rows if c.emb == "bloom" else c.hashes * c.buckets),
            "classify": lambda: nn.Sequential(nn.Dropout(c.dropout), nn.Linear(c.width, c.width), nn.Tanh(),
                                              nn.Dropout(c.dropout), nn.Linear(c.width, c.labels)),
            "span": lambda: nn.Linear(c.width, 2),  # start and end
        }[c.head]()
        for name, module in self.named_modules():
            if isinstance(module, nn.Embedding):
                init_(module.weight)
            elif isinstance(module, nn.Linear):  # BERT's 0.02, and in the encoder what it is at BERT's width
                init_(module.weight, 0.02 * (768 / c.width) ** 0.5 if name.startswith("layers") else 0.02)
                nn.init.zeros_(module.bias)
        # Places start louder than words, whose spread at the start depends on the kind of embedding.
        spread = {"proj": max(c.bits - 1, 1) ** -0.5, "pool": 0.02 * (c.chunk / c.bits) ** 0.5,
                  "linear": 0.01 * c.bits ** 0.5}.get(c.emb, 0.02)
        with torch.no_grad():
            if FORM[c.emb] in ("sketch", "weighted"):  # of five rows the median varies more than the mean
                rows = c.buckets if FORM[c.emb] == "sketch" else min(c.rows, c.weights)
                codes = torch.arange(min(rows, 4_096))
                columns = c.hashes + (c.emb == "weighted")
                spread = self.embedding(codes.unsqueeze(1).expand(-1, columns)).std()
            if c.order:
                self.positions.weight.copy_(2.25 * spread * sinusoids(*self.positions.weight.shape))
        self.register_buffer("codes", None, persistent=False)
        self.register_buffer("targets", None, persistent=False)
        self.bloom = None

    @property
    def device(self):
        """out: torch.device of the weights"""
        return self.types.weight.device

    def set_codes(self, codes, bloom=None, targets=None):
        """in: codes (V, C) by id, specials first, any integer type, bits packed in bytes; bloom BloomMap;
        targets (V, k): the hashes to predict of head hash-mlm, None: the codes
        err: ConfigError when they are not of this model
        """
        def fit(codes, parts):  # parts: list of (how many numbers, less than what)
            return codes.shape[1:] == (sum(count for count, _ in parts),) and all(
                not part.numel() or 0 <= int(part.min()) <= int(part.max()) < most
                for part, (_, most) in zip(codes.split([count for count, _ in parts], 1), parts))

        c, known, k = self.config, 0 if self.codes is None else len(self.codes), self.config.hashes
        wanted = {"row": [(1, c.rows)], "index": [(1, c.rows)], "digest": [(k, c.rows)],
                  "chunks": [(-(-c.bits // c.chunk), 2**min(c.chunk, 15))], "bits": [(-(-c.bits // 8), 256)],
                  "sketch": [(k, c.buckets)], "weighted": [(k, c.rows), (1, c.weights)]}[FORM[c.emb]]
        # of codes that grow with each text the new ones are looked at
        if not fit(codes[known:], wanted) or targets is not None and not fit(targets, [(k, c.buckets)]):
            wanted = " and ".join(f"{count} less than {most:,}" for count, most in wanted)
            raise ConfigError(f"codes {tuple(codes.shape)} do not fit a model with emb {c.emb}: "
                              f"wanted {wanted} a word")
        self.codes, self.bloom = codes.to(self.device), bloom
        self.targets = self.codes if targets is None else targets.to(self.device)

    def embed(self, ids):
        """in: ids (B, L); out: (B, L·m, d), the word's vector alone: no position, no norm. [HF §3.1]"""
        sketch = FORM[self.config.emb] == "sketch" and ids.device.type == "cpu"
        if sketch and not torch.compiler.is_compiling():
            once, places = ids.unique(return_inverse=True)  # a batch has about two words of a kind
            return F.embedding(places, self.vectors(once.unsqueeze(0)).squeeze(0))
        return self.vectors(ids)

    def vectors(self, ids):
        """in: ids (B, L); out: (B, L·m, d), as embed"""
        codes = self.codes[ids]  # (B, L, C)
        if FORM[self.config.emb] == "bits":
            codes = unpack_bits(codes, self.config.bits)  # (B, L, T)
        x = self.embedding(codes)
        if self.specials is None:
            return x
        word = ids >= FIRST
        if self.config.emb == "emb":
            return torch.where(word.unsqueeze(-1), x, self.specials(ids.clamp(max=WORD - 1)))
        return x.masked_fill(~word.unsqueeze(-1), 0.0) + self.specials(ids.clamp(max=WORD))

    def placed(self, ids):
        """in: ids (B, L) integer; out: (B, L·m, d), what the first layer sees: words and their places

        An item's m positions share its place. A set has none: then permuting items permutes what comes out,
        and all [MASK_1] of a sequence become equal, for nothing tells them apart. [SB §3.2]
        """
        c, L = self.config, ids.shape[1]
        if L > c.length:
            what = "positions" if c.order else "items"
            raise ConfigError(f"{L} {what}, but the model has {c.length}: give fewer, or train with --length")
        x = self.embed(ids) + self.types.weight[0]
        if c.order:
            places = self.positions.weight[c.spare_positions:c.spare_positions + L]  # (L, d)
            x = x + (places if self.m == 1 else places.repeat_interleave(self.m, 0))
        return self.dropout(self.norm(x))

    def encode(self, ids, key_mask=None):
        """in: ids (B, L) integer; key_mask bool (B, L), None without padding; out: (B, L·m, d)"""
        x = self.placed(ids)
        if not self.config.order and key_mask is None:
            key_mask = ids != PAD
        if key_mask is not None and self.m > 1:
            key_mask = key_mask.repeat_interleave(self.m, 1)
        for layer in self.layers:
            x = layer(x, key_mask)
        return x

    @torch.no_grad()
    def redraw(self, seed):
        """in: seed int, of the step; new planes for every layer with LSH attention, in place"""
        for layer in self.layers:
            for buffer, fresh in zip((layer.planes, layer.coef), layer.draw(seed)):
                buffer.copy_(fresh)

    @torch.no_grad()
    def collisions(self, ids):
        """in: ids (B, L); out: of each layer the share of pairs that collide, and "dense" or "blocks" """
        x, c, found = self.placed(ids), self.config, []
        key_mask = None if c.order else (ids != PAD).repeat_interleave(self.m, 1)
        for layer in self.layers:
            q, k, _ = layer.project(x)
            hq, hk = layer.buckets(q, k)
            how, *_ = choose(hq, hk, fill=c.lsh_fill, pairs=c.lsh_pairs, dtype=q.dtype)
            found.append((collision_share(hq, hk), how))
            x = layer(x, key_mask)
        return found

    def pool(self, x, key_mask):
        """in: x (B, L, d), key_mask bool (B, L) or None; out: (B, d), one vector a text"""
        if self.config.pool == "cls":
            return x[:, 0]
        if key_mask is None:
            return x.mean(1)
        weight = key_mask.unsqueeze(-1).to(x.dtype)  # (B, L, 1)
        return (x * weight).sum(1) / weight.sum(1)

    def forward(self, ids, key_mask=None, at=None, rows=None):
        """Encode, and apply the head.

        in:  ids (B, L); key_mask bool (B, L) or None; at int64 (M,), places in the flattened batch, and rows
             int64 (S,) of the table or None for all: of the heads that predict rows
        out: sr (B, L, 3), mlm (M, N) or (M, S), hash-mlm (M, m, N) of bloom, else (M, k, R), classify
             (B, labels), span (B, L, 2)

        hash-mlm: each of an item's m positions predicts its own row, among all rows. [SB §2.3] Where a word
        has one position, its vector predicts all k hashes, each among the R rows of its block. [CM]
        """
        c, x = self.config, self.encode(ids, key_mask)
        if c.emb == "bloom":
            x = x.unflatten(1, (-1, self.m))  # (B, L, m, d)
        if c.head in ("mlm", "hash-mlm"):
            logits = self.head(x.flatten(0, 1)[at], self.embedding.weight if c.tied else None, rows)
            blocks = c.head == "hash-mlm" and c.emb != "bloom"
            return logits.unflatten(-1, (c.hashes, c.buckets)) if blocks else logits
        x = x.mean(2) if c.emb == "bloom" else x
        if c.head == "classify":
            return self.head(self.pool(x, key_mask))
        return self.head(self.dropout(x))


def parameter_groups(model, decay):
    """Weight decay for tables and matrices, none for biases and norms. [HF Table 4]

    in:  model; decay float
    out: two groups for AdamW
    """
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    return [dict(params=matrices, weight_decay=decay), dict(params=vectors, weight_decay=0.0)]


def count_parameters(model):
    """Exact counts by part; the parts add up to the total. [HF App. B]

    in:  model, on any device, meta too
    out: dict: embedding (what the hash needs), specials, positions (with types and norm), encoder, head,
         total, and poep, the share of the embedding in the total [HF §4.4 eq.7]
    """
    def size(*modules):
        return sum(p.numel() for m in modules if m is not None for p in m.parameters())

    parts = dict(embedding=size(model.embedding), specials=size(model.specials),
                 positions=size(model.positions, model.types, model.norm), encoder=size(model.layers),
                 head=size(model.head))
    total = size(model)
    return parts | dict(total=total, poep=parts["embedding"] / total)


@torch.no_grad()
def best_spans(logits, inside, most, longest):
    """The best answers of each window: pairs start <= end with the largest sum of their two scores.

    in:  logits float (B, L, 2); inside bool (B, L), the context's positions; most n; longest words an answer
    out: scores float (B, n), starts and ends int64 (B, n), best first, -inf where there are fewer; null
         float (B,), the score of "no answer", which is [CLS] to [CLS]
    """
    start, end = logits.float().unbind(-1)  # (B, L) each
    null = start[:, 0] + end[:, 0]
    start, end = start.masked_fill(~inside, -torch.inf), end.masked_fill(~inside, -torch.inf)
    longest = min(longest, inside.shape[1])
    # all pairs, exactly: start i with the `longest` ends from i on, (B, L, longest)
    pairs = start.unsqueeze(-1) + F.pad(end, (0, longest - 1), value=-torch.inf).unfold(1, longest, 1)
    scores, best = pairs.flatten(1).topk(min(most, pairs[0].numel()))
    starts = best // longest
    return scores, starts, starts + best % longest, null


# ---------------------------------------------------------------------------------------------------------
# From distributions over hashes to items


SCORES = {"sum": sum, "min": lambda parts: functools.reduce(torch.minimum, parts),
          "max": lambda parts: functools.reduce(torch.maximum, parts)}


def _best(x, k):
    """torch.topk along the last axis, faster on long rows: the k largest lie in the k blocks of top maxima.

    in:  x float (..., R); k int <= R
    out: values (..., k), in order; places int64 (..., k)
    """
    R, block = x.shape[-1], 64
    if R < 4 * block * k:
        return x.topk(k)
    whole = R // block * block
    blocks = x[..., :whole].unflatten(-1, (-1, block))  # a view; what is left over is one more block
    first = blocks.amax(-1).topk(k).indices.sort().values  # (..., k)
    inside = (first.unsqueeze(-1) * block + torch.arange(block, device=x.device)).flatten(-2)
    rest = torch.arange(whole, R, device=x.device).expand(*x.shape[:-1], -1)
    inside = torch.cat([inside, rest], -1)
    values, places = x.gather(-1, inside).topk(k)
    return values, inside.gather(-1, places)


def hash_logp(logits, bloom_map):
    """in: logits float (P, m, rows) of head hash-mlm; out: (P, m, R), log-probabilities of each map's buckets

    Of a sketch each hash has a softmax of its own. [CM] Of bloom the softmax is over the whole table, so that
    a position's R probabilities miss what it gives to other maps. That is one factor a map: it changes no
    order by sums of logarithms, but may change one by min or max.
    """
    R, logp = bloom_map.buckets, logits.log_softmax(-1)
    if logits.shape[-1] == R:
        return logp
    return torch.stack([logp[:, j, j * R:(j + 1) * R] for j in range(bloom_map.m)], 1)


def _among(token, beam, maybe, R):
    """Which buckets are in the beam of their row: one binary search for all rows.

    in:  token int64 (P, C); beam int64 (P, b); maybe bool (P, C), those worth a look; R, buckets
    out: bool (P, C)
    """
    found = torch.zeros_like(maybe)
    row, column = maybe.nonzero(as_tuple=True)
    if len(row) and beam.shape[1]:
        ranges = R * torch.arange(len(beam), device=beam.device)  # row r's buckets become r·R .. r·R + R-1
        keys = (beam.sort().values + ranges.unsqueeze(1)).flatten()  # so that all are in order
        key = token[row, column] + ranges[row]
        place = torch.searchsorted(keys, key).clamp(max=len(keys) - 1)
        found[row, column] = keys[place] == key
    return found


@torch.no_grad()
def beam_search(logp, bloom_map, k=20, beam=20, rounds=1, score="sum", exclude=None):
    """The k items that score best, found among those that share a likely bucket. [SB §2.5 Alg.1]

    in:  logp float (P, m, R), log-probabilities of the buckets of each map (R = ceil(N/alpha));
         bloom_map hashing.BloomMap; k items wanted, at most N; beam B, buckets of each map to look into;
         rounds: with B, 2B, 4B, ... buckets until the certificate holds, None: without limit;
         score "sum", "min" or "max" of an item's m log-probabilities, or any function of a list of m tensors
         that is increasing in each [SB App. C]; exclude int64 (P, E) or None: items that may not be an
         answer, -1 where there is none
    out: ids int64 (P, k) and scores (P, k), best first, -1 and -inf where fewer were found; certified bool
         (P,): no other item scores more than the last of these; scored int64 (P,), items that were scored

    An item outside has in each map at most the B-th largest probability, so its score is at most that of
    these m thresholds: the certificate. Each item is scored once: in a later map only if no earlier map, and
    in a later round only if no earlier round has reached it. A beam that has grown to more items than there
    are gives way to scoring all.
    """
    if min(k, beam) < 1:
        raise ConfigError(f"k {k}, beam {beam}: wanted 1 or more")
    gamma = SCORES.get(score, score)
    digest, members = (torch.from_numpy(a).to(logp.device) for a in (bloom_map.digest, bloom_map.members))
    P, m, R = logp.shape
    N, k, width, turn = bloom_map.n_items, min(k, bloom_map.n_items), min(beam, R), 0
    ids = torch.full((P, k), -1, dtype=torch.int64, device=logp.device)
    scores = torch.full((P, k), -torch.inf, dtype=logp.dtype, device=logp.device)
    certified = torch.zeros(P, dtype=torch.bool, device=logp.device)
    scored = torch.zeros(P, dtype=torch.int64, device=logp.device)
    todo = torch.arange(P, device=logp.device)  # the positions without a certificate
    before = torch.empty(P, m, 0, dtype=torch.int64, device=logp.device)  # their buckets of earlier rounds
    while len(todo) and (rounds is None or turn < rounds):
        x = logp if not turn else logp[todo]
        if turn and m * width * bloom_map.alpha >= N:  # a beam that has grown as wide as the whole
            left_out = None if exclude is None else exclude[todo]
            ids[todo], scores[todo] = exhaustive(x, bloom_map, k, score, left_out)
            certified[todo], scored[todo] = True, N
            break
        # subtle: a bucket of probability 0 must not tie with those that are through
        rest = x if not turn else x.clamp(min=torch.finfo(x.dtype).min).scatter(2, before, -torch.inf)
        _, fresh = _best(rest, width - before.shape[2])  # (P, m, b), the buckets of this round: line 4
        values, tokens = x.gather(2, fresh), torch.cat([before, fresh], 2)  # tokens (P, m, width): the beam
        every, each = [ids[todo]], [scores[todo]]  # candidates and their scores, with the best so far
        for j in range(m):
            # line 5: the items of these buckets, (P, C), C = b·alpha, -1 where a bucket is short
            items = members[j].index_select(0, fresh[:, j].flatten()).view(len(todo), -1)
            new, parts = items >= 0, []
            items = items.clamp(min=0).long()
            if exclude is not None:
                new &= (items.unsqueeze(2) != exclude[todo].unsqueeze(1)).all(2)
            for i in range(m):
                if i == j:  # all items of a bucket have its probability
                    parts.append(values[:, j].repeat_interleave(bloom_map.alpha, 1))
                    continue
                token = digest[:, i].index_select(0, items.flatten()).view_as(items).long()
                parts.append(x[:, i].gather(1, token))
                # Scored already? By an earlier map in this round or before, by a later one in rounds before.
                # What is in a beam has at least the beam's last probability: only those are looked up.
                beam_i = (tokens if i < j else before)[:, i]
                new &= ~_among(token, beam_i, new & (parts[i] >= values[:, i, -1:]), R)
            each.append(gamma(parts).masked_fill(~new, -torch.inf))  # line 6
            every.append(items)
            scored[todo] += new.sum(1)
        best, place = torch.cat(each, 1).topk(k)
        ids[todo] = torch.cat(every, 1).gather(1, place).masked_fill(best == -torch.inf, -1)
        scores[todo] = best
        # line 7; fewer than k answers score -inf and are never sure, unless all buckets have been looked into
        sure = (best[:, -1] >= gamma(values[:, :, -1].unbind(1))) | (width == R)
        certified[todo] = sure
        todo, before, width, turn = todo[~sure], tokens[~sure], min(2 * width, R), turn + 1
    return ids, scores, certified, scored


@torch.no_grad()
def exhaustive(logp, bloom_map, k=20, score="sum", exclude=None):
    """The same by scoring every item: the oracle, and what the beam is measured against.

    in:  as beam_search
    out: ids int64 (P, k), scores (P, k), best first
    """
    gamma, digest = SCORES.get(score, score), torch.from_numpy(bloom_map.digest).to(logp.device).T
    ids, scores = [], []
    for i, x in enumerate(logp):  # (m, R)
        every = gamma([row.index_select(0, tokens) for row, tokens in zip(x, digest)])  # (N,)
        if exclude is not None:
            every[exclude[i][exclude[i] >= 0]] = -torch.inf
        best, places = _best(every, min(k, bloom_map.n_items))
        ids.append(places.masked_fill(best == -torch.inf, -1))
        scores.append(best)
    return torch.stack(ids), torch.stack(scores)


# ---------------------------------------------------------------------------------------------------------
# The machine


class Help(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """For argparse: line breaks as they are written, and every default that is something."""

    def _get_help_string(self, action):
        return action.help if action.default in (None, False) else super()._get_help_string(action)


def at_least(least, kind=int):
    """in: least; kind int or float; out: a type for argparse, a number that is not smaller"""
    def read(text):
        if not kind(text) >= least:  # NaN is not
            raise argparse.ArgumentTypeError(f"{text}: wanted {least} or more")
        return kind(text)

    read.__name__ = "number"
    return read


def machine_flags(group):
    """in: an argparse group; adds --device, --dtype and --compile, the same for every script that trains"""
    group.add_argument("--device", default="auto", metavar="NAME",
                       help="cpu, cuda; auto: cuda if there is one")
    group.add_argument("--dtype", choices=("auto", "float32", "bfloat16"), default="auto", help=(
        "of matrix products; auto: bfloat16 where it is faster, which on a CPU is tried out"))
    group.add_argument("--compile", action=argparse.BooleanOptionalAction,
                       help="torch.compile; None: on CUDA only")


def torchrun_env():
    """Where torchrun put this process; out: rank, world, local rank: 0, 1, 0 without it"""
    # subtle: a torchrun that restarts lends one store to all its starts, and in it new ranks find the
    # addresses of those that were lost, and wait for the dead: pytorch issue 135712
    if (os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"
            and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"):
        raise ConfigError("torchrun --max-restarts: new ranks may wait for ever for lost ones; start it with "
                          "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in the environment, on several nodes with "
                          "--rdzv_backend=c10d too")
    return tuple(int(os.environ.get(name, usual)) for name, usual in
                 (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0)))


def leave_together():
    """Ranks that are done wait for each other before they leave the process group; a no-op without one."""
    # subtle: the group's threads free what was sent, and need Python's lock for it. Waiting gives it to them;
    # one that asks for it when the interpreter is ending aborts the process
    if dist.is_initialized():
        dist.barrier()


def cores():
    """out: int, the processor cores that this process may use"""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def choose_machine(args, local_rank=0):
    """What --device, --dtype and --compile mean here.

    in:  args with device, dtype, compile (None: where it pays); local_rank, which of the machine's GPUs
    out: device torch.device, dtype "float32" or "bfloat16", compile bool
    """
    kind = ("cuda" if torch.cuda.is_available() else "cpu") if args.device == "auto" else args.device
    if kind.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError("--device cuda: this torch sees no CUDA device; use --device cpu")
    try:
        device = torch.device(kind, local_rank) if kind == "cuda" else torch.device(kind)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        torch.zeros((), device=device).item()  # is it there?
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"--device {kind}: there is no such device; try cpu or cuda") from error
    dtype = "float32" if args.dtype == "auto" else args.dtype
    if device.type == "cuda":
        dtype = "bfloat16" if args.dtype == "auto" and torch.cuda.is_bf16_supported() else dtype
    if device.type == "cpu" and args.dtype == "auto":
        # with bf16 instructions a product is about four times faster, without them far slower: try one
        seconds = {}
        for name in ("float32", "bfloat16") * 5:  # in turns, the best of each: a busy moment decides nothing
            a = torch.ones(512, 512, dtype=getattr(torch, name))
            start = time.perf_counter()
            a @ a
            seconds[name] = min(seconds.get(name, 9.0), time.perf_counter() - start)
        dtype = "bfloat16" if seconds["bfloat16"] < 0.6 * seconds["float32"] else "float32"
    return device, dtype, device.type == "cuda" if args.compile is None else args.compile


def try_compile(model, run):
    """Compile the encoder if that works here, else say why not and go on: speed is never worth the run.

    in:  model; run function(), a pass forward and back
    out: bool
    """
    model.encode = torch.compile(model.encode)
    try:
        run()
        return True
    except Exception as error:  # no C++ compiler, no Triton, an unsupported device: many things, none fatal
        del model.encode  # the plain method shows again
        torch._dynamo.reset()
        why = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        print(f"--compile does not work here ({why}); running without it, slower. "
              f"--no-compile silences this.", file=sys.stderr)
        return False


def once(path, make):
    """Make a file or folder exactly once, however many processes ask: the others wait, then find it.

    in:  path str; make function(temporary path), which writes it; what fails half-way leaves nothing at path
    out: path
    """
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path + ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the system drops it when the process dies
        if not os.path.exists(path):
            shutil.rmtree(path + ".tmp", ignore_errors=True)
            make(path + ".tmp")
            os.replace(path + ".tmp", path)
    return path


def fingerprint(thing):
    """Twelve hex digits that name a thing of plain types, the same in every process and on every machine."""
    text = json.dumps(thing).encode("utf-8", "surrogatepass")
    return hashlib.md5(text, usedforsecurity=False).hexdigest()[:12]


# ---------------------------------------------------------------------------------------------------------
# Checkpoints: weights, config and hash as tensors and plain types, loadable with torch.load's safe default


def save_checkpoint(path, model, encoder, **more):
    """Write a checkpoint beside the old one, then put it in its place: a crash leaves one of the two, whole.

    in:  path str; model; encoder dict, what hashing.Encoder.state() gives; more: tensors and plain types
    err: ConfigError when it cannot be written; the old one is untouched
    """
    content = dict(format=FORMAT, config=asdict(model.config), model=model.state_dict(), encoder=encoder)
    content |= more
    temporary = f"{path}.{os.getpid()}.tmp"
    try:
        with open(temporary, "wb") as file:
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except (OSError, RuntimeError) as error:  # torch reports a full disk as a RuntimeError
        if os.path.exists(temporary):
            os.remove(temporary)
        raise ConfigError(f"could not save {path} ({error}); an earlier one there is untouched") from error
    for left in glob.glob(f"{glob.escape(path)}.*.tmp"):  # by a process that was killed as it wrote
        with contextlib.suppress(OSError):
            os.remove(left)


def load_checkpoint(path):
    """Read a checkpoint, on the CPU.

    in:  path str, a file or a folder with ckpt.pt
    out: dict with config (Config), model (state dict), encoder (dict), and whatever was saved beside them
    err: ConfigError when it is missing, broken, or of another format
    """
    path = os.path.join(path, "ckpt.pt") if os.path.isdir(path) else path
    if not os.path.exists(path):
        raise ConfigError(f"no checkpoint at {path}: train one with pretrain.py, or name its folder")
    try:
        with zipfile.ZipFile(path) as file:
            broken = file.testzip()  # subtle: torch.load does not look at the checksums that it wrote
        if broken:
            raise ValueError(broken)
        content = torch.load(path, map_location="cpu")
    except Exception as error:  # whatever a broken file makes the unpickler raise
        raise ConfigError(f"{path} is not a whole checkpoint ({type(error).__name__})") from error
    found = content.get("format") if isinstance(content, dict) else None
    if not isinstance(found, int) or found != FORMAT:
        raise ConfigError(f"{path} has format {found}, this code reads {FORMAT}: use the code that wrote it")
    known = {field.name for field in fields(Config)}
    if not isinstance(content.get("config"), dict) or set(content["config"]) - known:
        raise ConfigError(f"{path} holds a config this code does not know: use the code that wrote it")
    for name, kind in PARTS.items():
        needed = name in content or name in ("model", "encoder")
        if needed and not isinstance(content.get(name), kind):
            raise ConfigError(f"{path} holds no {name} that this code can read")
    if not all(isinstance(word, str) for word in content.get("words", [])):
        raise ConfigError(f"{path} holds words that are none")
    return content | dict(config=Config(**content["config"]))


def load_model(checkpoint):
    """in: what load_checkpoint gave; out: Model with its weights, in evaluation mode, without codes"""
    config, weights = checkpoint["config"], checkpoint["model"]
    try:
        if config.layers > len(weights):
            raise RuntimeError(f"{config.layers:,} layers")
        if any(t.untyped_storage().nbytes() < t.numel() * t.element_size() for t in weights.values()):
            raise RuntimeError("numbers that are there once and count many times")
        with torch.device("meta"):  # before a size that is a lie takes all memory
            Model(config).load_state_dict(weights, assign=True)
        model = Model(config)
        model.load_state_dict(weights)
    except (RuntimeError, AttributeError, TypeError) as error:
        why = " ".join(str(error).split())[:300]
        raise ConfigError(f"the weights do not fit the checkpoint's own config: {why}") from error
    return model.eval()
