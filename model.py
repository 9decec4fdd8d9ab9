"""The transformer: config, presets, encoder, heads, parameter counts.

Sources:
    [HF] Xue & Aletras 2022, HashFormers
    [BERT] Devlin et al. 2019
    [SR] Yamaguchi et al. 2021, Shuffle+Random
    [V] Vaswani et al. 2017
    [BL] Li & Yip 2024, BERT-LSH
    [SB] Anderson et al. 2020, Superbloom
    [CM] Median is all you need, a proposal
Out of scope: text and hashing (tokenizer.py, data/coders.py), losses (objectives.py), files.
Deviations:
    1. Positions start as sinusoids. Matrices of the layers, and of the heads "classify" and "span",
       start with std 0.02 · √(768/d).
    2. The m vectors of an item share its position, where there are positions.
Notation:
    B batch   L positions   d hidden size (width)   H heads   e d/H   V token IDs   N rows
    C code numbers of a word   m vectors of an item (1, or as many as bloom has)
    s special tokens   M masked positions   k hash functions of R buckets each   T bits of a word
"""

import copy
import math
from dataclasses import dataclass, fields

import torch
import torch.nn as nn
import torch.nn.functional as F

from attention import FILLS, PAIRS, SelfAttention
from embeddings import EMBEDDINGS, INIT_STD, init_normal, new_table, unpack_bits

BERT_WIDTH = 768  # the hidden size that INIT_STD is for [BERT §3]
# Amplitude of the position sinusoids, in units of the std of a word's vector. With an amplitude of
# 0.1, or random positions of std 0.02, the F1 of shuffled words stays 0 (docs/hashformers.md)
POSITION_SCALE = 2.25
LAYER_STRIDE = 1_009  # seed · stride + number of the layer seeds the hyperplanes of a layer


@dataclass
class Config:
    """Everything that shapes the weights, in plain types; a checkpoint holds it."""

    # Embedding. In brackets: the methods (emb) that read the field; the others ignore it. Head
    # hash-mlm reads hashes and buckets with all of them: k and R of the sketch that it predicts
    emb: str = "proj"
    rows: int = 50_260  # N rows of the table [lookup (with special tokens), emb, weighted, ngram]
    bits: int = 128  # T bits of a word's hash [pool, add, proj, linear]
    chunk: int = 10  # bits of a chunk [pool]
    # [bloom] m vectors of an item, by default 2
    # [median, mean, weighted] k hash functions, by default 5
    hashes: int | None = None
    # [bloom] R + s rows of a block, as special tokens have rows, too
    # [median, mean] R rows of a block
    buckets: int = 500
    weights: int = 50_000  # rows of the importance table [weighted]
    grams: int = 64  # G n-grams that a word keeps [ngram]
    # Encoder
    layers: int = 12
    width: int = 768  # d
    heads: int = 12  # H
    ffn: int = 3072  # feed-forward size
    act: str = "gelu"  # of the feed-forward layer
    # Inputs
    order: bool = True  # False: sequences are item sets, without positions
    length: int = 512  # positions, [CLS] included; in item sets the most items
    spare_positions: int = 0  # unused rows of the position table: RoBERTa and the paper have 2
    types: int = 1  # rows of the token type table; 2: the second text of a pair has row 1
    special_tokens: int = 5  # token IDs below it are special tokens, and ID 0 is padding
    sep_id: int = 2  # token ID of [SEP]; type row 1 begins at the second of [SEP] [SEP]
    dropout: float = 0.1
    # Head
    head: str = "sr"
    # The table that heads mlm and hash-mlm score. True: the embedding's. False: their own. None:
    # the embedding's if its tie is "yes", else their own. Where tie is "no", True is refused
    # whatever the head
    tied: bool | None = None
    labels: int = 2  # classes of classify; 1: a regression
    pool: str = "cls"  # classify sees cls, the first position, or the mean of all positions
    # Attention: attention.py
    attn: str = "full"  # full: all pairs; lsh: pairs that collide
    lsh_bands: int = 8  # r: hyperplanes of a hash function
    lsh_buckets: int = 256  # buckets of a hash function
    lsh_hashes: int = 1  # n: hash functions; a pair collides if one of them agrees
    lsh_fill: str = "zero"  # other pairs have a score of 0, as in the paper; mask: no weight
    lsh_pairs: str = "all"  # each pair has its own score; upper: (i, j) and (j, i) share one
    lsh_redraw: bool = False  # new hyperplanes in every training step

    def __post_init__(self):
        check_choices(self)  # the checks are near the end of this file
        embedding = EMBEDDINGS[self.emb]
        if self.hashes is None:
            self.hashes = 2 if embedding.is_stacked else 5
        if self.tied is None and self.predicts_rows:
            self.tied = embedding.tie == "yes"
        check_sizes(self)
        check_contradictions(self)

    @property
    def code_format(self):
        """How a word's codes are laid out: a key of data.coders.CODERS."""
        return EMBEDDINGS[self.emb].code_format

    @property
    def predicts_rows(self):
        """Whether the head scores rows of a table at masked positions."""
        return HEADS[self.head].predicts_rows

    @classmethod
    def load(cls, settings):
        """Return the Config of a checkpoint's dict; ValueError where it has other fields."""
        names = [field.name for field in fields(cls)]
        unknown = [name for name in settings if name not in names]
        if unknown:
            raise ValueError(f"config: expected fields of Config, got {', '.join(unknown)}.")
        return cls(**settings)

    @classmethod
    def choose(cls, settings):
        """Return the Config of a dict of settings, which may have others besides its fields."""
        names = [field.name for field in fields(cls)]
        return cls(**{name: settings[name] for name in names if name in settings})


class TransformerLayer(nn.Module):
    """Self-attention and feed-forward layer, each with residual sum and norm after it. [BERT §3]

    Args:
        c: Config.
        number: int, place of the layer, which decides its hyperplanes. [BL §2.1]

    Shape:
        x float (B, L, d) and key_mask bool (B, L), True = attend, or None, to float (B, L, d).
    """

    def __init__(self, c, number):
        super().__init__()
        self.number = number
        # subtle: hyperplanes have a generator of their own, so that the weights of a model with LSH
        # attention equal those of the dense model
        generator = self.make_generator(torch.initial_seed())
        self.attention = SelfAttention(
            c.width, c.heads, attn=c.attn, dropout=c.dropout, num_functions=c.lsh_hashes,
            num_hyperplanes=c.lsh_bands, num_buckets=c.lsh_buckets, fill=c.lsh_fill,
            pairs=c.lsh_pairs, generator=generator)
        self.up = nn.Linear(c.width, c.ffn)
        self.down = nn.Linear(c.ffn, c.width)
        self.act = nn.GELU() if c.act == "gelu" else nn.ReLU()
        self.norm1 = nn.LayerNorm(c.width)
        self.norm2 = nn.LayerNorm(c.width)
        self.dropout = nn.Dropout(c.dropout)

    def make_generator(self, seed):
        """Return the generator of this layer's hyperplanes.

        seed is PyTorch's when the model is built, later that of a training step.
        """
        return torch.Generator("cpu").manual_seed((seed * LAYER_STRIDE + self.number) % 2**63)

    def forward(self, x, key_mask=None):
        a = self.attention(x, key_mask)
        x = self.norm1(x + self.dropout(a))
        f = self.down(self.act(self.up(x)))
        return self.norm2(x + self.dropout(f))


# Heads. A head is a class with
#
#   method          the method of infer.Predictor for it, and its key in infer.READOUTS
#   predicts_rows   whether it scores rows of a table at masked positions, which [MASK] marks
#   scales_init     whether its matrices start with the std of deviation 1
#   fits            (Config) -> whether it can stand on such an encoder
#   forward         (x, key_mask) -> logits; if predicts_rows (x, table, rows) -> logits
#
# and its line in HEADS. x are the vectors of the last layer


class PositionHead(nn.Linear):
    """A score for each class at each position: x (B, L, d) to logits (B, L, num_classes)."""

    predicts_rows = False

    def __init__(self, c):
        super().__init__(c.width, self.num_classes)
        self.dropout = nn.Dropout(c.dropout)

    @staticmethod
    def fits(c):
        return c.order  # a set has no text to label

    def forward(self, x, key_mask):
        return super().forward(self.dropout(x))


class ShuffleRandomHead(PositionHead):
    """Is a word intact 0, shuffled 1 or random 2? [SR §3]"""

    method = "detect"
    scales_init = False
    num_classes = 3


class SpanHead(PositionHead):
    """Is a word the first, or the last, of an answer? [BERT §4.2]"""

    method = "answer"
    scales_init = True
    num_classes = 2


class TextHead(nn.Sequential):
    """A score for each label of a text: x (B, L, d) to logits (B, labels)."""

    method = "classify"
    predicts_rows = False
    scales_init = True

    def __init__(self, c):
        super().__init__(
            nn.Dropout(c.dropout), nn.Linear(c.width, c.width), nn.Tanh(),
            nn.Dropout(c.dropout), nn.Linear(c.width, c.labels))
        self.pool = c.pool

    @staticmethod
    def fits(c):
        return c.order

    def forward(self, x, key_mask):
        if self.pool == "cls":
            return super().forward(x[:, 0])
        if key_mask is None:
            return super().forward(x.mean(1))
        weight = key_mask.unsqueeze(-1).to(x)  # (B, L, 1)
        # 0 for a text of padding alone
        return super().forward((x * weight).sum(1) / weight.sum(1).clamp(min=1))


class MaskedWordHead(nn.Module):
    """Which word was masked? Dense layer, GELU, norm, product with a table of words. [BERT §3.1]

    Args:
        c: Config. If c.tied is not true, the head has a table of its own.

    Shape:
        x float (..., d) and table float (N, d), the head's own or that of the embedding, to logits
        (..., N), or (..., num_sampled) of the rows int64 (num_sampled,).
    """

    method = "fill_mask"
    predicts_rows = True
    scales_init = False

    def __init__(self, c):
        super().__init__()
        self.transform = nn.Linear(c.width, c.width)
        self.norm = nn.LayerNorm(c.width)
        self.bias = nn.Parameter(torch.zeros(self.count_rows(c)))
        if not c.tied:
            self.table = new_table(self.count_rows(c), c.width)  # (N, d)

    @staticmethod
    def fits(c):
        return c.code_format == "row"  # each word has a row to be predicted as

    @staticmethod
    def count_rows(c):
        return c.rows

    def forward(self, x, table, rows=None):
        bias = self.bias
        if rows is not None:
            table = table[rows]
            bias = bias[rows]
        x = self.norm(F.gelu(self.transform(x)))
        if self.training:
            return F.linear(x, table, bias)
        # subtle: evaluate in float32. In bfloat16 many logits tie, and recall depends on the order.
        with torch.autocast(x.device.type, enabled=False):
            return F.linear(x.float(), table, bias)


class MaskedHashHead(MaskedWordHead):
    """Which hashes has the masked word? The rows are buckets of its hash functions. [SB §2.3] [CM]

    Shape:
        x (M, d), one vector of a word, to logits (M, k, R): each hash function has its own block of
        R rows, from one vector. x (M, m, d), the m vectors of an item, to (M, m, m·(R + s)), or
        (M, m, num_sampled): each is compared with the rows of all blocks.
    """

    method = "predict_missing"

    def __init__(self, c):
        super().__init__(c)
        self.num_hashes = c.hashes

    @staticmethod
    def fits(c):
        return c.code_format != "row"

    @staticmethod
    def count_rows(c):
        return c.hashes * c.buckets

    def forward(self, x, table, rows=None):
        logits = super().forward(x, table, rows)
        if x.ndim == 2:
            logits = logits.unflatten(-1, (self.num_hashes, -1))  # (M, k, R)
        return logits


HEADS = {
    "sr": ShuffleRandomHead,
    "mlm": MaskedWordHead,
    "hash-mlm": MaskedHashHead,
    "classify": TextHead,
    "span": SpanHead,
}


class Model(nn.Module):
    """Embed token IDs by their codes, encode, and apply a head. Call `.to`, then set_codes.

        ids (B, L) -> codes (B, L, C) -> word vectors (B, L·m, d) -> layers -> head -> logits

    m is 1 but for bloom, which gives an item m vectors: they are m positions of the sequence. The
    masked items of a set have equal outputs, since a set has no position embeddings. [SB §3.2]

    Args:
        config: Config.
    """

    def __init__(self, config):
        super().__init__()
        self.config = config
        c = config
        self.embedding = EMBEDDINGS[c.emb].from_config(c)
        self.vectors_per_item = c.hashes if self.embedding.is_stacked else 1  # m
        self.specials = None
        if self.embedding.needs_specials:
            # a row for each special token, and the word row, which is added to every word
            num_rows = c.special_tokens + int(self.embedding.has_word_row)
            self.specials = nn.Embedding(num_rows, c.width)
        self.positions = None
        if c.order:
            self.positions = nn.Embedding(c.length + c.spare_positions, c.width)
        self.types = nn.Embedding(c.types, c.width)
        self.norm = nn.LayerNorm(c.width)
        self.dropout = nn.Dropout(c.dropout)
        self.layers = nn.ModuleList()
        for number in range(c.layers):
            self.layers.append(TransformerLayer(c, number))
        self.head = HEADS[c.head](c)
        self.init_weights()
        # (V, C), from set_codes. Not a buffer: DistributedDataParallel would broadcast it, and nccl
        # cannot send int16. So `.to` does not move it
        self.codes = None

    def set_codes(self, codes):
        """Set the codes of all words, by token ID, on the device of the weights.

        Args:
            codes: integer (V, C), tensor or array. Bits are packed: uint8, C = ceil(T/8).

        Raises:
            ValueError: If the codes do not fit the embedding.
        """
        codes = torch.as_tensor(codes, device="cpu")
        if self.config.code_format == "bits":  # stored in bytes: embed unpacks them
            num_bytes = math.ceil(self.config.bits / 8)
            if codes.dtype != torch.uint8 or codes.shape[1:] != (num_bytes,):
                raise ValueError(f"codes: expected uint8 (V, {num_bytes}), "
                                 f"got {codes.dtype} {[*codes.shape]}.")
        else:
            self.embedding.check_range(codes)
        self.codes = codes.to(self.device)

    def forward(self, ids, key_mask=None, masked_positions=None, rows=None):
        """Encode and apply the head.

        Args:
            ids: int64 (B, L), token IDs.
            key_mask: bool (B, L), True = attend, or None without padding.
            masked_positions: int64 (M,), in the flattened batch. Pass it for heads mlm and hash-mlm
                only.
            rows: int64 (num_sampled,), the rows to score, for head mlm and for bloom; None: all.

        Returns:
            Logits, as the class of the head says: of each position (B, L, classes), of each text
            (B, labels), or of each masked position (M, ...).
        """
        is_stacked = self.embedding.is_stacked
        x = self.encode(ids, key_mask)  # (B, L·m, d)
        if is_stacked:
            x = x.unflatten(1, (-1, self.vectors_per_item))  # (B, L, m, d)
        if not self.head.predicts_rows:
            assert masked_positions is None, "masked_positions: for heads mlm and hash-mlm alone"
            if is_stacked:
                x = x.mean(2)  # (B, L, d)
            return self.head(x, key_mask)
        assert masked_positions is not None, "masked_positions: required by heads mlm and hash-mlm"
        x = x.flatten(0, 1)[masked_positions]  # (M, d), or (M, m, d)
        # subtle: if the head held the embedding's table, load_model would untie the two
        table = self.embedding.weight if self.config.tied else self.head.table
        return self.head(x, table, rows)

    def encode(self, ids, key_mask=None):
        """Return the last layer's vectors (B, L·m, d) of ids (B, L).

        key_mask is as in forward.
        """
        if key_mask is not None:
            key_mask = key_mask.repeat_interleave(self.vectors_per_item, 1)  # (B, L·m)
        x = self.embed_inputs(ids)
        for layer in self.layers:
            x = layer(x, key_mask)
        return x

    def embed_inputs(self, ids):
        """Return the input of the first layer, (B, L·m, d): word + type + position, normed."""
        c = self.config
        m = self.vectors_per_item
        L = ids.shape[1]
        assert L <= c.length, f"ids: expected at most {c.length} positions, got {L}"
        x = self.embed(ids)  # (B, L·m, d)
        if c.order and c.types > 1:
            types = self.types(self.find_second_text(ids)).repeat_interleave(m, 1)  # (B, L·m, d)
        else:
            types = self.types.weight[0]
        x = x + types
        if c.order:  # an item's m vectors share one position
            positions = self.positions.weight[c.spare_positions:][:L]
            x = x + positions.repeat_interleave(m, 0)
        return self.dropout(self.norm(x))

    def embed(self, ids):
        """Return word vectors (..., L·m, d) of ids (..., L): no positions, no norm. [HF §3.1]"""
        c = self.config
        assert self.codes is not None and self.codes.device == ids.device, (
            "call set_codes after .to(device)")
        # subtle: F.embedding refuses the ID −1; self.codes[ids] would read the last row
        codes = F.embedding(ids, self.codes)  # (..., L, C)
        if c.code_format == "bits":
            codes = unpack_bits(codes, c.bits)  # (..., L, T)
        x = self.embedding(codes)  # (..., L, d), or (..., L, m, d)
        if self.embedding.is_stacked:
            x = x.flatten(-3, -2)  # (..., L·m, d)
        if self.specials is None:
            return x
        # Row i is special token i; words, whose IDs are larger, are clamped to the last row. That
        # is the word row, added to each word. Where there is none (emb), words read a special
        # token's row, and torch.where drops it
        last_row = self.specials.num_embeddings - 1
        special = self.specials(ids.clamp(max=last_row))  # (..., L, d)
        if self.embedding.has_word_row:
            x = x + special
        is_word = (ids >= c.special_tokens).unsqueeze(-1)  # (..., L, 1)
        return torch.where(is_word, x, special)

    def find_second_text(self, ids):
        """Return 0 for the first text and 1 for the second, int64 (B, L).

        [SEP] [SEP] divides a pair of texts, and the second [SEP] belongs to the second text. More
        follows, be it the [SEP] behind an empty text. A training window that is cut behind a
        document ends in [SEP] [SEP], too: there is no second text.
        """
        is_sep = ids == self.config.sep_id
        is_divided = is_sep[:, :-2] & is_sep[:, 1:-1] & (ids[:, 2:] != 0)  # (B, L - 2)
        is_divided = F.pad(is_divided, (1, 1))  # (B, L), True at the second [SEP]
        return is_divided.cumsum(1).clamp(max=1)

    def init_weights(self):
        """Fill nn.Linear and nn.Embedding with truncated normals, and positions with sinusoids.

        Tables of words and of heads are plain parameters, which their modules have filled.
        """
        c = self.config
        # these parts have the std of deviation 1, all others INIT_STD
        scaled_parts = ("layers", "head") if self.head.scales_init else ("layers",)
        for name, module in self.named_modules():
            std = INIT_STD
            if name.startswith(scaled_parts):
                std = INIT_STD * math.sqrt(BERT_WIDTH / c.width)
            if isinstance(module, (nn.Embedding, nn.Linear)):
                init_normal(module.weight, std)
            if isinstance(module, nn.Linear):
                nn.init.zeros_(module.bias)
        if c.order and not self.positions.weight.is_meta:  # meta tensors have no numbers
            amplitude = POSITION_SCALE * self.embedding.initial_std()
            self.positions.weight.data.copy_(amplitude * sinusoids(*self.positions.weight.shape))

    def redraw_hyperplanes(self, seed):
        """Draw new hyperplanes for the layers, which must have LSH attention, in place."""
        for layer in self.layers:
            layer.attention.redraw(layer.make_generator(seed))

    @property
    def device(self):
        """The device of the weights."""
        return self.types.weight.device


def sinusoids(length, width):
    """Return sinusoids (L, d): a shift by n positions is one rotation everywhere. [V §3.5]"""
    frequencies = 10_000 ** (-torch.arange(0, width, 2) / width)  # (d/2,)
    angles = torch.arange(length).unsqueeze(1) * frequencies  # (L, d/2)
    waves = torch.stack([angles.sin(), angles.cos()], -1)  # (L, d/2, 2)
    return waves.flatten(1)[:, :width]


def load_model(checkpoint):
    """Return the Model of a checkpoint, in evaluation mode.

    Raises:
        ValueError: The config has unknown fields or values, or the weights do not fit it.
    """
    config = Config.load(checkpoint["config"])
    with torch.device("meta"):  # takes no memory, until the weights are assigned
        model = Model(config)
    weights = copy.deepcopy(checkpoint["model"])  # two models of a checkpoint share none
    try:
        model.load_state_dict(weights, assign=True)
    except RuntimeError as error:
        raise ValueError(f"weights: {str(error):.200}") from error
    return model.float().eval()  # those in models/ have half precision


def parameter_groups(model, decay):
    """Return groups for AdamW: weight decay for matrices, none for vectors. [HF Table 4]"""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    return [dict(params=matrices, weight_decay=decay), dict(params=vectors, weight_decay=0.0)]


def count_parameters(model):
    """Count the parameters of each part. [HF App. B] [HF §4.4 eq.7]

    Returns:
        dict of int: embedding, specials, encoder, positions (with types and their norm), head (all
        the rest), total; and poep, the share of parameters that embed words, in [0, 1].
    """
    counts = dict(embedding=0, specials=0, encoder=0, positions=0, head=0)
    part_of = dict(embedding="embedding", specials="specials", layers="encoder",
                   positions="positions", types="positions", norm="positions")
    for name, parameter in model.named_parameters():
        part = part_of.get(name.split(".")[0], "head")
        counts[part] += parameter.numel()
    counts["total"] = sum(counts.values())
    counts["poep"] = counts["embedding"] / counts["total"]
    return counts


def count_operations(model):
    """Return the operations of a training step for each word of a full sequence.

    Each layer costs 6 operations per weight of its matrices, 2 forward and 4 backward, and 12·d per
    attended position (Chowdhery et al. 2022, PaLM, appendix B). A multiplication with its addition
    counts as two. The embedding, the head, and the pairs of LSH attention are not counted. An item
    has m positions, and each of them attends to m · length.
    """
    c = model.config
    m = model.vectors_per_item
    weights = sum(p.numel() for p in model.layers.parameters() if p.ndim == 2)
    attended = m * c.length if c.attn == "full" else 0  # positions
    return m * (6 * weights + 12 * c.layers * c.width * attended)


# The values of a Config: which are allowed, and which the papers have

CHOICES = {
    "emb": EMBEDDINGS,
    "act": ("gelu", "relu"),
    "order": (True, False),
    "head": HEADS,
    "tied": (True, False, None),
    "pool": ("cls", "mean"),
    "attn": ("full", "lsh"),
    "lsh_fill": FILLS,
    "lsh_pairs": PAIRS,
    "lsh_redraw": (True, False),
}
# Whole numbers that may be 0. layers: embedding and head alone. rows: the method has no table of
# words. sep_id: a token ID
NATURAL = ("layers", "rows", "spare_positions", "sep_id")
POSITIVE = ("bits", "chunk", "hashes", "buckets", "weights", "grams", "width", "heads", "ffn",
            "length", "types", "special_tokens", "labels", "lsh_bands", "lsh_buckets", "lsh_hashes")


def check_choices(c):
    """Raise a ValueError if a field of a Config has an unknown value."""
    for name, choices in CHOICES.items():
        value = getattr(c, name)
        if value not in choices:
            raise ValueError(f"{name}: expected one of {[*choices]}, got {value!r}.")


def check_sizes(c):
    """Raise a ValueError if a number of a Config is not whole, or too small."""
    for name in NATURAL + POSITIVE:
        value = getattr(c, name)
        least = 0 if name in NATURAL else 1
        if type(value) is not int or value < least:  # True is an int, too
            raise ValueError(f"{name}: expected an integer of at least {least}, got {value}.")


def check_contradictions(c):
    """Raise a ValueError if fields of a Config contradict each other."""
    if c.attn == "lsh" and c.lsh_pairs == "upper" and not c.order:
        raise ValueError("lsh_pairs: expected all for sets, got upper, which needs an order.")
    if c.tied and EMBEDDINGS[c.emb].tie == "no":
        raise ValueError(f"tied requires an embedding with rows of words or hashes, got {c.emb}.")

    heads = [name for name, head in HEADS.items() if head.fits(c)]
    if c.head not in heads:
        raise ValueError(f"head (--objective): expected {' or '.join(heads[:2])} for {c.emb}, "
                         f"got {c.head}.")


# A preset has the sizes of a model and the recipe that trains it. Keys that are fields of Config
# shape the model; the others (batch, lr, ...) are defaults of pretrain.py's flags. Among these:
#
#     micro      sequences a device holds at once
#     lr_mlm     the learning rate of mlm, sampled and hash-mlm
#     short      share of the training windows that are cut, as short texts
#     max_alpha  items that share a Bloom token, if --alpha does not say; fewer where items are few
#     vocab      BPE pieces; the rows of lookup have the special tokens, too

TINY = dict(layers=2, width=128, heads=4, ffn=512, length=128, dropout=0.0)
BERT_BASE = dict(layers=12, width=768, heads=12, ffn=3072, length=512)  # [BERT §3]
# types 2: the second row is never read, but the paper's counts of parameters have it
SUPERBLOOM = dict(emb="bloom", head="hash-mlm", order=False, act="relu", types=2, length=32)
# [BL §2.2]; its dense counterpart is --attn full
BERT_LSH = dict(emb="lookup", head="mlm", attn="lsh", lsh_bands=2, lsh_pairs="upper", layers=2,
                width=128, heads=2, ffn=512, length=512, rows=32_000, types=2, vocab=31_995)
PRESETS = {
    # Ours, for two cores
    "tiny": TINY | dict(rows=8_192, batch=32, micro=32, steps=10_000, lr=2e-3, warmup=300,
                        short=0.25),
    "superbloom-small": SUPERBLOOM | dict(layers=2, width=256, heads=4, ffn=512, mask=0.40,
                                          batch=64, micro=16, steps=6_000, lr=2e-3, warmup=300),

    # The papers'
    # [HF §4.1] [HF §4.2] [HF Table 4]
    "hashformer": BERT_BASE | dict(spare_positions=2, batch=128, micro=16, steps=500_000, lr=5e-5,
                                   lr_mlm=1e-4, warmup=10_000, beta2=0.9999),
    # [SB Table 1] [SB §3.2]; Adam is AdamW without decay
    "superbloom": BERT_BASE | SUPERBLOOM | dict(
        max_alpha=50, batch=1024, micro=64, steps=1_000_000, lr=1e-4, warmup=10_000, decay=0.0,
        schedule="rsqrt"),
    # [CM]; rows and vocab matter only with --emb lookup, the baseline
    "median": dict(emb="median", head="hash-mlm", layers=4, width=512, heads=4, ffn=2048,
                   length=512, rows=30_522, vocab=30_517,
                   batch=128, micro=32, steps=100_000, lr=2e-4, warmup=5_000),
    # as its authors train it [BL §2.4], and as we do
    "bert-lsh": BERT_LSH | dict(batch=8, micro=8, steps=88_245, lr=5e-5, warmup=0, decay=0.0),
    "bert-lsh-fast": BERT_LSH | dict(batch=64, micro=32, steps=20_000, lr=1e-3, warmup=1_000),

    # Sizes alone, for finetune.py, which trains them from scratch [ProFormer]
    "proformer": BERT_BASE | dict(emb="linear", bits=420, layers=2),
    "proformer-tiny": TINY | dict(emb="linear", bits=420),
}
