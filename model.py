"""The transformer: config, presets, encoder, heads, parameter counts.

Paper map:    [HF §3.1] Model.embed   [HF §4.1] PRESETS   [HF §4.2] PRESETS   [HF Table 4] parameter_groups
              [HF §4.4 eq.7] count_parameters   [HF App. B] count_parameters   [BERT §3] TransformerLayer
              [BERT §3.1] MaskedLMHead   [SR §3] build_head   [V §3.5] sinusoids   [BL §2.1] TransformerLayer
              [BL §2.2] PRESETS   [SB §2.3] Model   [SB §3.2] Model   [SB Table 1] PRESETS   [CM] PRESETS
Sources:      [HF] Xue & Aletras 2022, HashFormers   [BERT] Devlin et al. 2019   [SR] Yamaguchi et al. 2021
              [V] Vaswani et al. 2017   [BL] Li & Yip, BERT-LSH   [SB] Superbloom   [CM] the median proposal
Out of scope: text and hashing (tokenizer.py), losses (objectives.py), files (runtime.py).
Deviations:   1. Positions start as sinusoids. Matrices of the layers, and of the heads "classify" and "span",
              start with std 0.02 · √(768/d).   2. In text an item's m vectors share its position.
Notation:     B batch   L positions   C code numbers per word   d width   H heads   e d/H   V token IDs
              N rows   S scored rows   M masked positions   m vectors per item (Bloom; else 1)
              k hash functions of R buckets   n hash functions of r hyperplanes      Demo: python model.py
"""

from dataclasses import dataclass, fields

import torch
import torch.nn as nn
import torch.nn.functional as F

from attention import Dropout, draw_hyperplanes, full_attention, lsh_attention, simhash
from baselines.bag import HashedBag
from embeddings import EMBEDDINGS, check_codes, init_normal, unpack_bits

CHOICES = dict(emb=EMBEDDINGS, head=("sr", "mlm", "hash-mlm", "classify", "span"), act=("gelu", "relu"),
               pool=("cls", "mean"), attn=("full", "lsh"), lsh_fill=("zero", "mask"),
               lsh_pairs=("upper", "all"))


@dataclass
class Config:
    """Everything that shapes the weights, in plain types; it is saved with them in the checkpoint."""
    emb: str = "proj"
    rows: int = 50_260  # N: rows of lookup (those of special tokens included), emb and weighted
    bits: int = 128  # T: bits of a word's hash (pool, add, proj, linear)
    chunk: int = 10  # k: bits of a chunk (pool)
    hashes: int | None = None  # m, vectors of an item (bloom; default 2); k, hash functions (else; default 5)
    buckets: int = 500  # R: rows of a block (mean, median; bloom with special tokens); classes of a hash
    weights: int = 50_000  # K: rows of the importance table (weighted)
    layers: int = 12
    width: int = 768  # d
    heads: int = 12  # H
    ffn: int = 3072
    act: str = "gelu"  # of the feed-forward layer
    order: bool = True  # False: a sequence is a set, without positions, padded with 0
    length: int = 512  # positions, [CLS] included; of a set, the most items
    spare_positions: int = 0  # unused rows of the position table: RoBERTa and the paper have 2
    types: int = 1  # rows of the token type table; 2: the second text of a pair has row 1
    special_tokens: int = 5  # token IDs below it are special tokens, and ID 0 is padding
    sep_id: int = 2  # token ID of [SEP]; the second text of a pair begins after [SEP] [SEP]
    dropout: float = 0.1
    head: str = "sr"
    tied: bool | None = None  # mlm, hash-mlm: output layer = the embedding's rows (default: lookup and bloom)
    labels: int = 2  # classes of classify; 1: a regression
    bag: int = 0  # rows of the hashed bag of words beside head classify; 0: none
    pool: str = "cls"  # what classify sees: cls, the first position, or mean, of all positions
    attn: str = "full"  # full, or lsh: only pairs that collide
    lsh_bands: int = 8  # r: hyperplanes of a hash function
    lsh_buckets: int = 256  # m
    lsh_hashes: int = 1  # n: hash functions; a pair collides if one of them agrees
    lsh_fill: str = "zero"  # score of the other pairs: zero, as in the paper, or mask: they get no weight
    lsh_pairs: str = "upper"  # upper: (i, j) and (j, i) share a score, as in the authors' code; all: one each
    lsh_redraw: bool = False  # new hyperplanes in every training step

    def __post_init__(self):
        for name, value in vars(self).items():  # the type, the choices and the range of each field
            kind, least = Config.__annotations__[name], int(name not in ("layers", "spare_positions", "bag"))
            if not isinstance(value, (int, float) if kind is float else kind):
                raise ValueError(f"{name}: expected {kind}, got {value!r}.")
            if value not in CHOICES.get(name, [value]):
                raise ValueError(f"{name}: expected one of {', '.join(CHOICES[name])}, got {value!r}.")
            if kind in (int, int | None) and value is not None and not least <= value <= 2**31:
                raise ValueError(f"{name}: expected {least} to 2^31, got {value}.")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout: expected at least 0 and less than 1, got {self.dropout}.")
        if self.width % self.heads:
            raise ValueError(f"width: expected a multiple of {self.heads} heads, got {self.width}.")
        if self.attn == "lsh" and self.lsh_pairs == "upper" and not self.order:
            raise ValueError("lsh_pairs: expected all for sets, got upper, which needs an order.")
        embedding, self.predicts_rows = EMBEDDINGS[self.emb], self.head in ("mlm", "hash-mlm")
        self.code_format = embedding.code_format  # how a word's codes are laid out: tokenizer.HashTokenizer
        # mlm needs a row per word, hash-mlm hashes to predict; a set has no order to shuffle, and no texts
        masked = "mlm" if self.code_format == "row" else "hash-mlm"
        heads = ("sr", masked, "classify", "span") if self.order else (masked,)
        if self.head not in heads:
            raise ValueError(f"objective: expected {' or '.join(heads[:2])} for {self.emb}, got {self.head}.")
        if self.tied and self.predicts_rows and not embedding.can_tie:
            able = [name for name, cls in EMBEDDINGS.items() if cls.can_tie]
            raise ValueError(f"tied requires emb {', '.join(able)}, got {self.emb}.")
        self.tied = (embedding.is_tied if self.tied is None else self.tied) if self.predicts_rows else None
        has_hashes = self.code_format in ("digest", "sketch", "weighted") or self.head == "hash-mlm"
        self.hashes = (self.hashes or (2 if embedding.is_stacked else 5)) if has_hashes else None


SUPERBLOOM = dict(emb="bloom", head="hash-mlm", order=False, act="relu", types=2, length=32)
PRESETS = {  # the sizes of the papers [HF §4.1]; tiny and superbloom-small, for two cores, are ours
    "tiny": dict(layers=2, width=128, heads=4, ffn=512, length=128, rows=8_192, dropout=0.0),
    "bert-lsh": dict(emb="lookup", head="mlm", attn="lsh", lsh_bands=2, layers=2, width=128, heads=2, ffn=512,
                     length=512, rows=32_000, types=2),  # [BL §2.2]; its dense counterpart is --attn full
    "median": dict(emb="median", head="hash-mlm", layers=4, width=512, heads=4, ffn=2048, length=512,
                   rows=30_522),  # [CM]
    "hashformer": dict(layers=12, width=768, heads=12, ffn=3072, length=512, spare_positions=2),  # [HF §4.2]
    "superbloom": SUPERBLOOM | dict(layers=12, width=768, heads=12, ffn=3072),  # [SB Table 1]
    "superbloom-small": SUPERBLOOM | dict(layers=2, width=256, heads=4, ffn=512),
    "proformer": dict(emb="linear", bits=420, layers=2, width=768, heads=12, ffn=3072, length=512),
}


def sinusoids(length, width):
    """Return sinusoids (L, d): a shift by n positions is the same rotation at every position. [V §3.5]"""
    angles = torch.arange(length)[:, None] * 10_000 ** (-torch.arange(0, width, 2) / width)  # (L, d/2)
    return torch.stack([angles.sin(), angles.cos()], -1).flatten(1)[:, :width]


class TransformerLayer(nn.Module):
    """Self-attention and feed-forward layer, each followed by residual sum and norm (post-LN). [BERT §3]"""
    def __init__(self, c, number):
        super().__init__()
        self.config, self.number, self.dropout = c, number, Dropout(c.dropout)
        self.lsh_costs = {}  # whether with gradients -> Costs of LSH attention; {}: measured at first use
        self.qkv, self.out = nn.Linear(c.width, 3 * c.width), nn.Linear(c.width, c.width)
        self.up, self.down = nn.Linear(c.width, c.ffn), nn.Linear(c.ffn, c.width)
        self.norm1, self.norm2 = nn.LayerNorm(c.width), nn.LayerNorm(c.width)
        if c.attn == "lsh":
            shape = c.heads, c.lsh_hashes, c.lsh_bands
            self.register_buffer("planes", torch.empty(*shape, c.width // c.heads))  # (H, n, r, e)
            self.register_buffer("coef", torch.empty(shape, dtype=torch.int64))  # (H, n, r)
            self.draw(torch.initial_seed())

    def draw(self, seed):
        """Draw the hyperplanes and coefficients of this layer's hash functions, in place. [BL §2.1]"""
        # subtle: from a generator of their own, so that the weights equal those of the dense model
        c, generator = self.config, torch.Generator("cpu").manual_seed((seed * 1_009 + self.number) % 2**63)
        if not self.planes.is_meta:
            self.planes[:], self.coef[:] = draw_hyperplanes(*self.planes.shape, c.lsh_buckets, generator)

    def project(self, x):
        """Return queries, keys and values, each (B, H, L, e), of x (B, L, d)."""
        # (B, L, 3·d) -> (B, L, 3, H, e) -> (3, B, H, L, e)
        return self.qkv(x).unflatten(-1, (3, self.config.heads, -1)).permute(2, 0, 3, 1, 4)

    def buckets(self, q, k):
        """Return the buckets int64 (B, H, n, L) of queries and of keys. [BL §2.1]"""
        return [simhash(x, self.planes, self.coef, self.config.lsh_buckets) for x in (q, k)]

    def forward(self, x, key_mask=None):
        """Map x (B, L, d) to (B, L, d); key_mask bool (B, L), True = attend, or None."""
        c, (q, k, v) = self.config, self.project(x)
        if c.attn == "lsh":
            a = lsh_attention(q, k, v, *self.buckets(q, k), fill=c.lsh_fill, pairs=c.lsh_pairs,
                              key_mask=key_mask, costs=self.lsh_costs.get(torch.is_grad_enabled()))
        else:
            a = full_attention(q, k, v, key_mask=key_mask, dropout=c.dropout if self.training else 0.0)
        x = self.norm1(x + self.dropout(self.out(a.transpose(1, 2).flatten(2))))
        return self.norm2(x + self.dropout(self.down(getattr(F, c.act)(self.up(x)))))


class MaskedLMHead(nn.Module):
    """Dense layer, GELU, norm; then a product with the embedding's or its own table, and bias. [BERT §3.1]"""
    def __init__(self, c, rows):
        super().__init__()
        self.transform, self.norm = nn.Linear(c.width, c.width), nn.LayerNorm(c.width)
        self.bias = nn.Parameter(torch.zeros(rows))
        self.table = None if c.tied else nn.Parameter(init_normal(torch.empty(rows, c.width)))  # (N, d)

    def forward(self, x, table, rows=None):
        """Return logits (..., S) of x (..., d); table (N, d) or None: its own; rows int64 (S,) or None: N."""
        table, bias = self.table if table is None else table, self.bias
        if rows is not None:
            table, bias = table[rows], bias[rows]
        x = self.norm(F.gelu(self.transform(x)))
        # subtle: evaluate in float32. In bfloat16 many logits tie, and recall would depend on how ties break.
        with torch.autocast(kind := x.device.type, enabled=self.training and torch.is_autocast_enabled(kind)):
            return F.linear(x if self.training else x.float(), table, bias)


def build_head(c):
    """Return the module that c.head names."""
    if c.head in ("sr", "span"):  # 0 intact, 1 shuffled, 2 random [SR §3]; start and end of an answer
        return nn.Linear(c.width, 3 if c.head == "sr" else 2)
    if c.head == "classify":
        dense, out = nn.Linear(c.width, c.width), nn.Linear(c.width, c.labels)
        return nn.Sequential(Dropout(c.dropout), dense, nn.Tanh(), Dropout(c.dropout), out)
    return MaskedLMHead(c, c.rows if c.head == "mlm" else c.hashes * c.buckets)


class Model(nn.Module):
    """Token IDs to codes to vectors, encoder, head. Args: config Config. Call set_codes before the model."""
    def __init__(self, config):
        super().__init__()
        c = self.config = config
        e = self.embedding = EMBEDDINGS[c.emb].from_config(c)
        self.vectors_per_item = c.hashes if e.is_stacked else 1  # m
        self.specials = nn.Embedding(c.special_tokens + e.has_word_row, c.width) if e.needs_specials else None
        self.positions = nn.Embedding(c.length + c.spare_positions, c.width) if c.order else None
        self.types, self.norm = nn.Embedding(c.types, c.width), nn.LayerNorm(c.width)
        self.layers = nn.ModuleList(TransformerLayer(c, i) for i in range(c.layers))
        self.dropout, self.head = Dropout(c.dropout), build_head(c)
        self.bag = HashedBag(c.bag, c.labels) if c.bag and c.head == "classify" else None
        scaled = ("layers", "head") if c.head in ("classify", "span") else "layers"
        for name, module in self.named_modules():
            if isinstance(module, (nn.Embedding, nn.Linear)):  # scaled: BERT's 0.02 is for width 768
                init_normal(module.weight, 0.02 * (768 / c.width) ** 0.5 if name.startswith(scaled) else 0.02)
            if isinstance(module, nn.Linear):
                nn.init.zeros_(module.bias)
        if c.order and not self.types.weight.is_meta:  # with a small scale no shuffled word is found
            self.positions.weight.data[:] = 2.25 * e.initial_std(c) * sinusoids(*self.positions.weight.shape)
        self.register_buffer("codes", None, persistent=False)
        self.register_buffer("bag_rows", None, persistent=False)

    @property
    def device(self):  # of the weights
        return self.types.weight.device

    def set_codes(self, codes):
        """Set codes by token ID, integer (V, C), C = ceil(T/8) for bits; ValueError if they do not fit."""
        c, codes = self.config, torch.as_tensor(codes, device="cpu")
        if codes.ndim != 2:
            raise ValueError(f"codes: expected (V, C), got shape {tuple(codes.shape)}.")
        limits = [(-(-c.bits // 8), 256)] if c.code_format == "bits" else self.embedding.code_limits
        self.codes = check_codes(codes, limits).to(self.device)
        self.bag_rows = self.bag and self.bag.hash_codes(codes).to(self.device)

    def embed(self, ids):
        """Return the word vectors alone, (..., L·m, d) of ids (..., L): no positions, no norm. [HF §3.1]"""
        if self.embedding.is_costly and ids.ndim == 2 and ids.is_cpu and not torch.compiler.is_compiling():
            distinct, places = ids.unique(return_inverse=True)  # (words,), (B, L); a word occurs about twice
            return F.embedding(places, self.embed(distinct))
        if self.codes is None:
            raise ValueError("codes: expected set_codes(codes) before the model is used, got none.")
        check_codes(ids.unsqueeze(-1), [(1, len(self.codes))], "ids")
        c, codes = self.config, self.codes[ids]  # (B, L, C)
        x = self.embedding(unpack_bits(codes, c.bits) if c.code_format == "bits" else codes)
        if self.specials is None:
            return x.flatten(-3, -2) if self.embedding.is_stacked else x
        is_word = (ids >= c.special_tokens).unsqueeze(-1)
        # special tokens have a row each; all words have the last, which is added where has_word_row
        special = self.specials(ids.clamp(max=len(self.specials.weight) - 1))
        return torch.where(is_word, x + special if self.embedding.has_word_row else x, special)

    def embed_inputs(self, ids):
        """Return what the first layer sees, (B, L·m, d) of ids (B, L): word + type + position, normalized."""
        if ids.ndim != 2:
            raise ValueError(f"ids: expected (B, L), got shape {tuple(ids.shape)}.")
        c, m = self.config, self.vectors_per_item
        ids = ids[:, :c.length] if self.bag else ids  # the bag alone reads the rest
        if (L := ids.shape[1]) > c.length:
            raise ValueError(f"text: expected at most {c.length} positions (--length), got {L}. Shorten it.")
        types = self.types.weight[0]
        if c.order and c.types > 1:  # two [SEP] in a row divide a pair; one [SEP] ends a document in a window
            is_pair = (ids[:, 1:] == c.sep_id) & (ids[:, :-1] == c.sep_id)  # (B, L - 1)
            types = self.types(F.pad(is_pair.cumsum(1).clamp(max=1), (1, 0))).repeat_interleave(m, 1)
        x = self.embed(ids) + types
        if c.order:  # an item's m vectors share one; in a set all [MASK_1] have equal outputs [SB §3.2]
            x = x + self.positions.weight[c.spare_positions:][:L].repeat_interleave(m, 0)
        return self.dropout(self.norm(x))

    def padding_mask(self, ids, key_mask=None):
        """Return the attention mask of the vectors, bool (B, L·m) or None; sets are padded with ID 0."""
        c, m = self.config, self.vectors_per_item
        key_mask = ids != 0 if key_mask is None and not c.order else key_mask
        return None if key_mask is None else key_mask[:, :c.length].repeat_interleave(m, 1)

    def encode(self, ids, key_mask=None):
        """Return (B, L·m, d) of ids (B, L); key_mask bool (B, L), True = attend, or None without padding."""
        x, key_mask = self.embed_inputs(ids), self.padding_mask(ids, key_mask)
        for layer in self.layers:
            x = layer(x, key_mask)
        return x

    def resample_hyperplanes(self, seed):
        """Draw new hyperplanes for every layer with LSH attention, in place."""
        for layer in self.layers:
            layer.draw(seed)

    def pool(self, x, key_mask):
        """Return one vector per text, (B, d), of x (B, L, d)."""
        weight = torch.ones_like(x[..., :1]) if key_mask is None else key_mask[:, :x.shape[1], None].to(x)
        return x[:, 0] if self.config.pool == "cls" else (x * weight).sum(1) / weight.sum(1)

    def forward(self, ids, key_mask=None, masked_positions=None, rows=None):
        """Encode and apply the head.
        Args: ids int64 (B, L); key_mask bool (B, L), True = attend, or None; for heads mlm and hash-mlm
            masked_positions int64 (M,) in the flattened batch, and rows int64 (S,) to score, or None: all.
        Returns: sr (B, L, 3); span (B, L, 2); classify (B, labels); mlm (M, N) or (M, S); hash-mlm of bloom
            (M, m, m·R) or (M, m, S), each hash among the rows of all blocks [SB §2.3]; other hash-mlm
            (M, k, R), each hash among the rows of its block [CM], without the choice of rows.
        """
        c, is_stacked = self.config, self.embedding.is_stacked
        if c.predicts_rows != (masked_positions is not None):
            raise ValueError(f"masked_positions: expected with head mlm or hash-mlm alone, this is {c.head}.")
        x = self.encode(ids, key_mask)
        x = x.unflatten(1, (-1, self.vectors_per_item)) if is_stacked else x  # (B, L, m, d)
        if c.predicts_rows:
            table = self.embedding.weight if c.tied else None
            logits = self.head(x.flatten(0, 1)[masked_positions], table, rows)
            return logits if c.head == "mlm" or is_stacked else logits.unflatten(-1, (c.hashes, c.buckets))
        x = x.mean(2) if is_stacked else x
        if c.head != "classify":
            return self.head(self.dropout(x))
        logits = self.head(self.pool(x, key_mask))
        return self.bag(self.bag_rows[ids], key_mask, logits) if self.bag else logits


def parameter_groups(model, decay):
    """Return two groups for AdamW: weight decay for tables and matrices, none for vectors. [HF Table 4]"""
    return [dict(params=[p for p in model.parameters() if p.ndim >= 2], weight_decay=decay),
            dict(params=[p for p in model.parameters() if p.ndim < 2], weight_decay=0.0)]


def count_parameters(model):
    """Return parameters of each part and in all; poep, the embedding's share. [HF App. B] [HF §4.4 eq.7]"""
    parts = dict(embedding=[model.embedding], specials=[model.specials], encoder=[model.layers],
                 positions=[model.positions, model.types, model.norm], head=[model.head, model.bag],
                 total=[model])
    counts = {part: sum(p.numel() for m in some if m for p in m.parameters()) for part, some in parts.items()}
    return counts | dict(poep=counts["embedding"] / counts["total"])


def load_config(checkpoint, kind=Config):
    """Return the config of a checkpoint. ValueError where it has an unknown field, or two contradict."""
    if unknown := set(checkpoint["config"]) - {field.name for field in fields(kind)}:
        raise ValueError(f"config: expected the fields of Config, got {', '.join(map(str, unknown))} too.")
    return kind(**checkpoint["config"])


def load_model(checkpoint, kinds=(Config, Model)):
    """Return the model of runtime.load_checkpoint's dict, in evaluation mode; ValueError if they differ."""
    config, weights = load_config(checkpoint, kinds[0]), checkpoint["model"]
    if config.layers > len(weights):  # each has several; a size that is wrong must not take memory
        raise ValueError(f"layers: expected at most one per weight, got {config.layers:,}.")
    try:
        with torch.device("meta"):
            model = kinds[1](config)
        if wrong := [name for name, w in model.state_dict().items() if weights[name].dtype != w.dtype]:
            raise ValueError(f"weights: expected another dtype of {', '.join(wrong[:3])}.")
        model.load_state_dict(weights, assign=True)
    except (RuntimeError, AttributeError, TypeError, KeyError) as error:
        raise ValueError(f"weights: they do not fit: {' '.join(str(error).split())[:300]}") from error
    return model.eval()


def main(argv=None):
    """Print the parameters of the HashFormers paper's model for two labels with each embedding method."""
    print(f"{'method':>8}  {'embedding':>10}  {'whole model':>11}  share of parameters; 12 layers, width 768")
    for emb, N in (dict.fromkeys(EMBEDDINGS, 50_260) | dict(lookup=50_265)).items():  # five are special
        with torch.device("meta"):  # counted, not allocated
            sizes = count_parameters(Model(Config(**PRESETS["hashformer"], emb=emb, rows=N, head="classify")))
        print(f"{emb:>8}  {sizes['embedding']:10,}  {sizes['total']:11,}  {sizes['poep']:5.1%}")


if __name__ == "__main__":
    main()
