"""CANINE-C: an encoder that reads characters, each hashed to a row of eight tables. There is no vocabulary.

Paper map:    [CA §3.1] Canine.embed   [CA §3.1] Canine.attend_locally   [CA §3.1] Canine.downsample
              [CA §3.1] Canine.upsample   [HF §4.1] CanineConfig
Sources:      [CA] Clark et al. 2021, CANINE   [HF] Xue & Aletras 2022, HashFormers: it is their baseline
Out of scope: pre-training, CANINE-S, n-grams of characters, questions and answers (--task squad).
Deviations:   1. Matrices start as model.py's do, with std 0.02 · √(768/d); positions with 0.02, no sinusoids.
              2. A block of padding attends to nothing, in transformers to the padding: that shows in the last
                 two characters' vectors of a text of 128·n or 128·n - 1 characters, and nowhere else.
              3. encode pads to full windows and two more: its outputs do not depend on the batch.
Notation:     B batch   L characters   d width   k hash functions   N rows of a hash table
Demo:         python -m baselines.canine
"""

import json
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

from attention import Dropout
from model import Config, Model, TransformerLayer
from tokenizer import FIRST_WORD_ID, SEP, HashTokenizer

PRIMES = (31, 43, 59, 61, 73, 97, 103, 113)  # of the k hash functions
RATE, BLOCK = 4, 128  # characters of a window of the convolutions, and of a block of local attention
SPECIAL_POINTS = 0, 0xE000, 0xE001, 0xE004, 0xE003  # of [PAD] [CLS] [SEP] [UNK] [MASK], by token ID
# config.json of the release: the names of sizes, and what is the same for all
SIZES = dict(layers="num_hidden_layers", width="hidden_size", heads="num_attention_heads",
             ffn="intermediate_size", rows="num_hash_buckets", positions="num_hash_buckets",
             types="type_vocab_size")
FIXED = dict(model_type="canine", hidden_act="gelu", layer_norm_eps=1e-12, num_hash_functions=len(PRIMES),
             downsampling_rate=RATE, upsampling_kernel_size=RATE, local_transformer_stride=BLOCK)


@dataclass
class CanineConfig:
    """Everything that shapes the weights, in plain types; the defaults are the paper's size. [HF §4.1]"""
    emb: str = "canine"  # tells a checkpoint from those of model.Config
    layers: int = 12  # deep ones, beside the local one and the last one
    width: int = 768  # d
    heads: int = 12
    ffn: int = 3072
    rows: int = 16_384  # N
    length: int = 2_048  # characters of a text, special tokens included
    positions: int = 16_384  # rows of the position table
    types: int = 16  # rows of the token type table; texts use two
    dropout: float = 0.1
    head: str = "classify"
    labels: int = 2
    pool: str = "cls"
    bag: int = 0  # rows of a bag of words: without words, none
    # no fields, as they never differ: what TransformerLayer, finetune.py and infer.py ask for
    act, attn, code_format, order, predicts_rows, lsh_redraw = "gelu", "full", "points", True, False, False

    def __post_init__(self):
        for name, kind in [(field.name, field.type) for field in fields(self)]:
            value, only = getattr(self, name), dict(emb="canine", head="classify", pool="cls", bag=0)
            fits = isinstance(value, (int, float) if kind is float else kind)
            if not fits or value != only.get(name, value):
                raise ValueError(f"{name}: expected {only.get(name, kind)} of canine, got {value!r}.")
            room = 3 * RATE - 1 + (self.length if type(self.length) is int else 0)
            minima = dict(layers=0, bag=0, dropout=0, length=5, types=2, positions=room)
            low, end = minima.get(name, 1), 1 if kind is float else 2**31
            if kind is not str and not low <= value < end:
                raise ValueError(f"{name}: expected at least {low} and less than {end}, got {value}.")
        if self.width % self.heads or self.width % len(PRIMES):
            raise ValueError(f"width: expected a multiple of {self.heads} heads and of 8, got {self.width}.")


def hash_rows(points, num_rows):
    """Return int64 (..., k), (code point + 1) · prime mod N, the row in each table, of code points (...)."""
    return (points.unsqueeze(-1) + 1) * torch.tensor(PRIMES, device=points.device) % num_rows


class Canine(nn.Module):
    """Characters, a local layer, a position per four characters for the deep layers, a head. Args: config."""
    vectors_per_item, specials, bag, codes = 1, None, None, ()  # what infer.py and count_parameters ask for
    device = property(lambda self: self.types.weight.device)

    def __init__(self, c):
        super().__init__()
        self.config, self.dropout, d = c, Dropout(c.dropout), c.width
        self.embedding = nn.Embedding(len(PRIMES) * c.rows, d // len(PRIMES))  # table after table
        self.positions, self.types = nn.Embedding(c.positions, d), nn.Embedding(c.types, d)
        self.norm, self.down_norm, self.up_norm = (nn.LayerNorm(d) for _ in range(3))
        self.down, self.up = nn.Conv1d(d, d, RATE, RATE), nn.Conv1d(2 * d, d, RATE)
        self.local, self.final = TransformerLayer(c, 0), TransformerLayer(c, 1 + c.layers)
        self.layers = nn.ModuleList(TransformerLayer(c, 1 + i) for i in range(c.layers))
        self.pooler, self.head = nn.Linear(d, d), nn.Sequential(Dropout(c.dropout), nn.Linear(d, c.labels))
        for module in self.modules():
            if isinstance(module, nn.LayerNorm):
                module.eps = FIXED["layer_norm_eps"]
            elif isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
            elif isinstance(module, (nn.Linear, nn.Conv1d)):
                nn.init.normal_(module.weight, std=0.02 * (768 / d) ** 0.5)
                nn.init.zeros_(module.bias)

    def set_codes(self, codes):
        """Do nothing, as a code point is its own code: the interface is that of model.Model."""

    def embed(self, ids):
        """Return (..., d) of token IDs int64 (...): a row of d/k from each of the k tables. [CA §3.1]"""
        special = torch.tensor(SPECIAL_POINTS, device=ids.device)[ids.clamp(max=FIRST_WORD_ID - 1)]
        points = torch.where(ids < FIRST_WORD_ID, special, ids - FIRST_WORD_ID)
        starts = torch.arange(len(PRIMES), device=ids.device) * self.config.rows  # (k,), of the tables
        return self.embedding(hash_rows(points, self.config.rows) + starts).flatten(-2)  # (..., k, d/k)

    def attend_locally(self, x, key_mask):
        """Return (B, L, d) of x (B, L, d): blocks are rows of a batch, apart from each other. [CA §3.1]"""
        (B, L, d), size = x.shape, min(x.shape[1], BLOCK)
        x, key_mask = F.pad(x, (0, 0, 0, -L % size)), F.pad(key_mask, (0, -L % size))
        return self.local(x.reshape(-1, size, d), key_mask.reshape(-1, size)).reshape(B, -1, d)[:, :L]

    def downsample(self, x):
        """Return (B, L/4, d) of (B, L, d): the first character, then windows of 4 but the last. [CA §3.1]

            [CLS] t h e   · c a t   [SEP] 0 0 0   ->   [CLS]   [CLS]the   ·cat
        """
        windows = F.gelu(self.down(x.transpose(1, 2))).transpose(1, 2)  # (B, L/4, d)
        return self.down_norm(torch.cat([x[:, :1], windows[:, :-1]], 1))

    def upsample(self, x, short, key_mask):
        """Return (B, L, d) of characters x (B, L, d) and the deep layers' outputs (B, L/4, d). [CA §3.1]"""
        # window i is at place i + 1; the last one was dropped, so that its characters read the one before
        place = (torch.arange(x.shape[1], device=x.device) // RATE + 1).clamp(max=short.shape[1] - 1)  # (L,)
        x = torch.cat([x, short[:, place]], -1).transpose(1, 2)  # (B, 2·d, L)
        x = F.gelu(self.up(F.pad(x, (1, 2)))).transpose(1, 2)  # (B, L, d)
        return self.final(self.dropout(self.up_norm(x)), key_mask)

    def contextualize(self, ids, types, key_mask, use_upsampling=True):
        """Return characters (B, L, d), or None without upsampling, and the pooled first position (B, d).

        Args: ids, types int64 (B, L), token IDs and token types, L at least 4; key_mask bool (B, L).
        """
        x = self.embed(ids) + self.types(types) + self.positions.weight[:ids.shape[1]]
        x = self.attend_locally(self.dropout(self.norm(x)), key_mask)  # (B, L, d)
        short = self.downsample(x)
        # subtle: windows move one place right, their mask does not: none attends to a text's last window
        short_mask = key_mask[:, :RATE * short.shape[1]].unflatten(1, (-1, RATE)).any(-1)  # (B, L/4)
        for layer in self.layers:
            short = layer(short, short_mask)
        return self.upsample(x, short, key_mask) if use_upsampling else None, self.pooler(short[:, 0]).tanh()

    def encode(self, ids, key_mask=None, use_upsampling=True):
        """Return (B, L, d) of token IDs (B, L), or the pooled (B, d). After the first [SEP] types are 1."""
        key_mask = torch.ones_like(ids, dtype=torch.bool) if key_mask is None else key_mask
        is_sep, more = (ids == SEP).long(), (0, -ids.shape[1] % RATE + 2 * RATE)
        types = (is_sep.cumsum(1) - is_sep).clamp(max=1) * key_mask
        x, pooled = self.contextualize(*(F.pad(x, more) for x in (ids, types, key_mask)), use_upsampling)
        return x[:, :ids.shape[1]] if use_upsampling else pooled

    def forward(self, ids, key_mask=None):
        """Return logits (B, labels) of token IDs int64 (B, L); key_mask bool (B, L), default: all."""
        return self.head(self.encode(ids, key_mask, use_upsampling=False))


class CharacterTokenizer:
    """Map text to token IDs of characters, as HashTokenizer does of words. A pair has one [SEP] between."""
    separator, is_fixed, subwords, bloom_map, words, index = (SEP,), False, None, None, (), {}

    def split(self, text):
        """Return characters list[str] and spans list[(start, end)]."""
        return list(text), [(i, i + 1) for i in range(len(text))]

    def ids(self, words):
        """Return int32 (n,), code points + 5, of a text or list of characters; case and spaces are kept."""
        return np.frombuffer("".join(words).encode("utf-32-le", "surrogatepass"), "<i4") + FIRST_WORD_ID

    def ids_of_texts(self, texts):
        """Return a list of int32 (characters,), one for each text."""
        return list(map(self.ids, texts))

    def codes(self):
        """Return no codes, as code points need none."""
        return np.zeros((0, 1), np.int32)

    def state(self):
        """Return what a checkpoint says about its text."""
        return dict(split="characters")

    @classmethod
    def load(cls, state, config):
        """Return the tokenizer of a state(); ValueError for another's."""
        if state != cls().state():
            raise ValueError(f"encoder: expected {cls().state()}, got {str(state)[:60]}.")
        return cls()


def select_classes(emb):
    """Return the classes of config, model and tokenizer for an emb: these, or those of hashed words."""
    if emb == "canine":
        return CanineConfig, Canine, CharacterTokenizer
    return Config, Model, HashTokenizer


def released_names(config):
    """Return dict: name of each weight but the head's -> the release's names, whose tensors it joins."""
    layer = dict(qkv="attention.self.query attention.self.key attention.self.value", up="intermediate.dense",
                 out="attention.output.dense", norm1="attention.output.LayerNorm", down="output.dense",
                 norm2="output.LayerNorm")
    stacks = {f"layers.{i}": f"encoder.layer.{i}" for i in range(config.layers)}
    stacks |= dict(local="initial_char_encoder.layer.0", final="final_char_encoder.layer.0")
    tables = " ".join(f"char_embeddings.HashBucketCodepointEmbedder_{i}" for i in range(len(PRIMES)))
    names = dict(embedding=tables, positions="char_embeddings.char_position_embeddings", up="projection.conv",
                 types="char_embeddings.token_type_embeddings", norm="char_embeddings.LayerNorm",
                 down="chars_to_molecules.conv", down_norm="chars_to_molecules.LayerNorm",
                 pooler="pooler.dense", up_norm="projection.LayerNorm")
    names |= {f"{ours}.{part}": " ".join(f"{theirs}.{name}" for name in layer[part].split())
              for ours, theirs in stacks.items() for part in layer}
    return {f"{ours}.{kind}": [f"{name}.{kind}" for name in some.split()] for ours, some in names.items()
            for kind in ("weight", "bias")[:1 if ours in ("embedding", "positions", "types") else 2]}


def load_released(folder):
    """Return CanineConfig and weights, without a head, of a release's folder; ValueError: they do not fit."""
    try:
        settings = FIXED | json.loads(Path(folder, "config.json").read_text(encoding="utf-8"))
        if wrong := {name: settings[name] for name, value in FIXED.items() if settings[name] != value}:
            raise ValueError(f"config.json: expected {FIXED}, got {wrong}.")
        sizes = {ours: settings[name] for ours, name in SIZES.items() if name in settings}
        config = CanineConfig(length=min(2_048, sizes.get("positions", 16_384) - 3 * RATE + 1), **sizes)
        if (path := Path(folder, "pytorch_model.bin")).exists():
            theirs = torch.load(path, map_location="cpu")
        else:
            from safetensors.torch import load_file
            theirs = load_file(Path(folder, "model.safetensors"))
        theirs = {name.removeprefix("canine."): weight.float() for name, weight in theirs.items()}
        names, known = released_names(config), {name for name in theirs if not name.endswith("position_ids")}
        if wrong := sorted(known ^ {*sum(names.values(), [])}):
            raise ValueError(f"expected the weights of a CANINE, got others or none of {wrong[:3]}.")
        weights = {ours: torch.cat([theirs[name] for name in some]) for ours, some in names.items()}
        with torch.device("meta"):
            Canine(config).load_state_dict(weights, strict=False, assign=True)  # raises where shapes differ
        return config, weights
    except Exception as error:  # whatever a damaged file makes the readers and torch.cat raise
        raise ValueError(f"{folder}: expected config.json and weights of a CANINE, got {error!r}.") from error


def main(argv=None):
    """Print the parameters of each part beside the paper's, and the rows of the letters of a word."""
    with torch.device("meta"):  # counted, not allocated
        model = Canine(CanineConfig())
    counts = {name: sum(p.numel() for p in part.parameters()) for name, part in model.named_children()}
    counts["total"] = sum(counts.values()) - counts.pop("head")
    paper = dict(embedding=f"paper: 12.3M; {16_000 * 768:,} of 16,000 rows",
                 total=f"paper: 121.0M; {counts['total'] - 14_336 * 768:,} of 2,048 positions")
    lines = [f"{name:>10}  {n:11,}  {paper.get(name, '')}" for name, n in counts.items() if n]
    print(*lines, "\nletter  code point  row of 16,384 in each table", sep="\n")
    for letter in "word":
        print(f"{letter:>6}  {ord(letter):10} ", *hash_rows(torch.tensor(ord(letter)), 16_384).tolist())


if __name__ == "__main__":
    main()
