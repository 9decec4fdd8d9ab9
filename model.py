"""The transformer: token IDs to codes, to word vectors, through the encoder, to logits.

Sources:
    [HF] Xue & Aletras 2022, HashFormers
    [BERT] Devlin et al. 2019
    [V] Vaswani et al. 2017
    [BL] Li & Yip 2024, BERT-LSH
    [SB] Anderson et al. 2020, Superbloom
Out of scope: text and hashing (tokenizer.py, data/coders.py), how codes become vectors
    (embeddings.py), heads (heads.py), settings and presets (support/config.py), losses
    (objectives.py), files.
Deviations:
    1. Positions start as sinusoids. Matrices of the layers, and of the heads "classify" and "span",
       start with std 0.02 · √(768/d).
    2. The m vectors of an item share its position, where there are positions.
Notation:
    B batch   L positions   d hidden size (width)   H heads   e d/H   V token IDs   N rows
    C code numbers of a word   T bits of a word   s special tokens   M masked positions
    m vectors of an item or word: 1, but for bloom, which has several
"""

import copy
import math

import torch
import torch.nn as nn
import torch.nn.functional as F

from attention import ATTENTIONS
from embeddings import EMBEDDINGS, INIT_STD, init_normal, unpack_bits
from heads import HEADS
from support.config import PRESETS, Config

__all__ = ["HEADS", "PRESETS", "STEP_STRIDE", "Config", "Model", "TransformerLayer",
           "count_parameters", "load_model", "parameter_groups"]

BERT_WIDTH = 768  # the hidden size that INIT_STD is for [BERT §3]
# Amplitude of the position sinusoids, in units of the std of a word's vector. With an amplitude of
# 0.1, or random positions of std 0.02, the F1 of shuffled words stays 0 (docs/hashformers.md)
POSITION_SCALE = 2.25
LAYER_STRIDE = 1_009  # seed · stride + number of the layer seeds the hyperplanes of a layer
# seed · stride + step is the seed of a training step: two seeds share none below the stride
STEP_STRIDE = 1_000_003


class SpecialVectors(nn.Embedding):
    """Give special tokens vectors of their own, and words a vector that all share. [HF §3.1]

    Special tokens have the IDs 0 to s - 1 and no codes, so the vectors of their codes are dropped.
    Row i of the table is special token i. Row s, the word row, is added to every word. With s = 5:

        ids                    1, [CLS]   5, a word    8, another word
        x, vectors of codes    (dropped)  x_5          x_8
        result                 row 1      x_5 + row 5  x_8 + row 5

    Args:
        num_special: int, s.
        width: int, d.
        has_word_row: bool. If it is False, the result of a word is x.

    Shape:
        x float (..., d) and ids int64 (...) to (..., d).
    """

    def __init__(self, num_special, width, has_word_row):
        super().__init__(num_special + int(has_word_row), width)
        self.num_special = num_special
        self.has_word_row = has_word_row

    def forward(self, x, ids):
        # IDs of words are larger than all rows: they read the last one, the word row if any
        rows = F.embedding(ids.clamp(max=self.num_embeddings - 1), self.weight)  # (..., d)
        if self.has_word_row:
            x = x + rows
        is_word = ids >= self.num_special
        return torch.where(is_word.unsqueeze(-1), x, rows)


class InputEmbedding(nn.Module):
    """Embed token IDs: word + type + position, normed. [BERT §3]

        codes (B, L, C) -> word vectors (B, L, m, d) -> + type + position -> norm

    Args:
        c: Config.

    Shape:
        ids int64 (B, L) and their codes (B, L, C) to float (B, L, m, d).
    """

    def __init__(self, c):
        super().__init__()
        self.config = c
        self.embedding = EMBEDDINGS[c.emb].from_config(c)
        self.specials = None
        if self.embedding.needs_specials:
            self.specials = SpecialVectors(c.special_tokens, c.width, self.embedding.has_word_row)
        self.positions = None
        if c.order:
            # the first spare_positions rows are never read: RoBERTa and the paper's counts have two
            self.positions = nn.Embedding(c.length + c.spare_positions, c.width)
        self.types = nn.Embedding(c.types, c.width)
        self.norm = nn.LayerNorm(c.width)
        self.dropout = nn.Dropout(c.dropout)

    def forward(self, ids, codes):
        c = self.config
        L = ids.shape[1]
        assert L <= c.length, f"ids: expected at most {c.length} positions, got {L}"
        x = self.embed_words(ids, codes)
        if not self.embedding.is_stacked:
            x = x.unsqueeze(2)  # (B, L, m, d), m = 1
        x = x + self.embed_types(ids)
        if c.order:
            positions = self.positions.weight[c.spare_positions:][:L].unsqueeze(1)  # (L, 1, d)
            m = x.shape[2]
            x = x + positions.expand(-1, m, -1)  # an item's m vectors share one position
        return self.dropout(self.norm(x))

    def embed_words(self, ids, codes):
        """Return word vectors (..., d), or (..., m, d) for bloom. [HF §3.1]"""
        x = self.embedding(codes)
        if self.specials is not None:
            x = self.specials(x, ids)
        return x

    def embed_types(self, ids):
        """Return type vectors (B, L, 1, d), or (d,) where no text can be the second."""
        if not self.config.order or self.config.types == 1:
            return self.types.weight[0]
        return self.types(self.find_second_text(ids)).unsqueeze(2)

    def find_second_text(self, ids):
        """Return 0 for the first text and 1 for the second, int64 (B, L).

        [SEP] [SEP] divides a pair of texts, and the second [SEP] belongs to the second text. More
        follows, be it the [SEP] behind an empty text. A training window that is cut behind a
        document ends in [SEP] [SEP], too: there is no second text.

            ids     [CLS] a [SEP] [SEP] b [SEP]     [CLS] a b [SEP] [SEP] [PAD]
            type      0   0   0     1   1   1         0   0 0   0     0     0
        """
        is_sep = ids == self.config.sep_id
        follows_sep = F.pad(is_sep[:, :-1], (1, 0))  # (B, L)
        has_more = F.pad(ids[:, 1:] != 0, (0, 1))  # (B, L), False before padding and at the end
        is_divided = is_sep & follows_sep & has_more  # True at the second [SEP]
        return is_divided.cumsum(1).clamp(max=1)

    def init_weights(self):
        """Fill the tables with truncated normals, and then positions with sinusoids (deviation 1).

        The embedding has filled its own tables.
        """
        for table in (self.specials, self.positions, self.types):
            if table is not None:
                init_normal(table.weight)
        if self.positions is not None:
            amplitude = POSITION_SCALE * self.embedding.initial_std()
            waves = sinusoids(*self.positions.weight.shape)
            self.positions.weight.data.copy_(amplitude * waves)


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
        self.attention = ATTENTIONS[c.attn].from_config(c, generator)
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


class Model(nn.Module):
    """Embed token IDs, encode, and apply a head. Call `.to`, then set_codes.

        ids (B, L) -> inputs (B, L, m, d) -> layers, on L·m positions -> head -> logits

    The masked items of a set have equal outputs, since a set has no position embeddings. [SB §3.2]

    Args:
        config: Config.
    """

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.inputs = InputEmbedding(config)
        self.layers = nn.ModuleList()
        for number in range(config.layers):
            self.layers.append(TransformerLayer(config, number))
        self.head = HEADS[config.head](config)
        # (V, C), from set_codes. Not a buffer: DistributedDataParallel would broadcast it, and nccl
        # cannot send int16. So `.to` does not move it
        self.codes = None

        # Initial weights, once all parts are made: deviation 1
        wide_std = INIT_STD * math.sqrt(BERT_WIDTH / config.width)
        self.inputs.init_weights()
        init_matrices(self.layers, wide_std)
        init_matrices(self.head, wide_std if self.head.scales_init else INIT_STD)

    def forward(self, ids, key_mask=None, masked_positions=None, rows=None):
        """Encode and apply the head.

        Args:
            ids: int64 (B, L), token IDs.
            key_mask: bool (B, L), True = attend, or None without padding.
            masked_positions: int64 (M,), in the flattened batch, for heads mlm and hash-mlm.
            rows: int64 (num_sampled,), the rows to score, for head mlm; None: all.

        Returns:
            Logits, as the class of the head says: of each position (B, L, classes), of each text
            (B, labels), or of each masked position (M, ...).
        """
        x = self.encode(ids, key_mask)  # (B, L, m, d)
        if not self.head.predicts_rows:
            return self.head(x.mean(2), key_mask)  # an item is the mean of its m vectors
        assert masked_positions is not None, "masked_positions: required by mlm and hash-mlm"
        x = x.flatten(0, 1)[masked_positions]  # (M, m, d)
        # subtle: the head must not hold the embedding's table. The table would have two names, and
        # load_model makes a parameter for each name: from then on the two would differ
        table = self.inputs.embedding.weight if self.config.tied else None
        return self.head(x, table, rows)

    def encode(self, ids, key_mask=None):
        """Return the last layer's vectors, (B, L, m, d), of ids and key_mask as in forward."""
        x = self.inputs(ids, self.look_up_codes(ids))  # (B, L, m, d)
        m = x.shape[2]
        x = x.flatten(1, 2)  # (B, L·m, d): the m vectors of an item are m positions
        if key_mask is not None:
            key_mask = key_mask.repeat_interleave(m, 1)  # (B, L·m)
        for layer in self.layers:
            x = layer(x, key_mask)
        return x.unflatten(1, (-1, m))

    def embed(self, ids):
        """Return word vectors of ids (...), (..., d), or (..., m, d) for bloom: no positions."""
        return self.inputs.embed_words(ids, self.look_up_codes(ids))

    def look_up_codes(self, ids):
        """Return the codes (..., C) of ids (...). Bits are stored in bytes: unpack them."""
        assert self.codes is not None and self.codes.device == ids.device, (
            "call set_codes after .to(device)")
        # subtle: F.embedding refuses the ID −1; self.codes[ids] would read the last row
        codes = F.embedding(ids, self.codes)
        if self.config.code_format == "bits":
            codes = unpack_bits(codes, self.config.bits)  # (..., T)
        return codes

    def set_codes(self, codes):
        """Set the codes of all words, by token ID, on the device of the weights.

        Args:
            codes: integer (V, C), tensor or array. Bits are packed: uint8, C = ceil(T/8).

        Raises:
            ValueError: If the codes do not fit the embedding.
        """
        codes = torch.as_tensor(codes, device="cpu")
        if self.config.code_format == "bits":
            num_bytes = math.ceil(self.config.bits / 8)
            if codes.dtype != torch.uint8 or codes.shape[1:] != (num_bytes,):
                raise ValueError(f"codes: expected uint8 (V, {num_bytes}), "
                                 f"got {codes.dtype} {[*codes.shape]}.")
        else:
            self.inputs.embedding.check_range(codes)
        self.codes = codes.to(self.device)

    def redraw_hyperplanes(self, seed):
        """Draw new hyperplanes for the layers, which must have LSH attention, in place."""
        for layer in self.layers:
            layer.attention.redraw(layer.make_generator(seed))

    @property
    def device(self):
        """The device of the weights."""
        return self.inputs.types.weight.device


# Initial weights


def init_matrices(module, std):
    """Fill each nn.Linear of a module with a truncated normal, and its bias with 0, in place."""
    for part in module.modules():
        if isinstance(part, nn.Linear):
            init_normal(part.weight, std)
            nn.init.zeros_(part.bias)


def sinusoids(length, width):
    """Return sinusoids (L, d): a shift by n positions is one rotation everywhere. [V §3.5]"""
    frequencies = 10_000 ** (-torch.arange(0, width, 2) / width)  # (d/2,)
    angles = torch.arange(length).unsqueeze(1) * frequencies  # (L, d/2)
    waves = torch.stack([angles.sin(), angles.cos()], -1)  # (L, d/2, 2)
    return waves.flatten(1)[:, :width]


def load_model(checkpoint):
    """Return the Model of a checkpoint, in evaluation mode.

    Args:
        checkpoint: dict, as support.common.load_checkpoint returns it: weights by today's names.

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
        dict of int: embedding, specials, encoder, positions (with types and their norm), head,
        total; and poep, the share of parameters that embed words, in [0, 1].
    """
    counts = dict(embedding=0, specials=0, encoder=0, positions=0, head=0)
    part_of = dict(embedding="embedding", specials="specials", layers="encoder",
                   positions="positions", types="positions", norm="positions")
    for name, parameter in model.named_parameters():
        # CANINE-C has no module of inputs; its other parts count as the head
        part = part_of.get(name.removeprefix("inputs.").split(".")[0], "head")
        counts[part] += parameter.numel()
    counts["total"] = sum(counts.values())
    counts["poep"] = counts["embedding"] / counts["total"]
    return counts
