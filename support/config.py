"""The settings of a model (Config), which of them fit together, and those of the papers (PRESETS).

Apart from model.py, which reads as a transformer without them: it takes each setting by its name,
and its notation explains them. Import Config and PRESETS from model.

Sources:
    [HF] Xue & Aletras 2022, HashFormers
    [BERT] Devlin et al. 2019
    [BL] Li & Yip 2024, BERT-LSH
    [SB] Anderson et al. 2020, Superbloom
    [CM] Median is all you need, a proposal
"""

from dataclasses import dataclass, fields

from attention import ATTENTIONS, FILLS, PAIRS
from embeddings import EMBEDDINGS
from heads import HEADS


@dataclass
class Config:
    """Everything that shapes the weights, in plain types; a checkpoint holds it.

    An embedding reads these fields, beside width, and ignores the other sizes of tables and hashes:

        method               fields
        lookup, emb          rows
        pool                 bits, chunk
        add, proj, linear    bits
        bloom                hashes (m), buckets (R buckets and s special tokens)
        median, mean         hashes (k), buckets (R)
        weighted             hashes (k), rows, weights
        ngram                rows, grams

    With all of them head hash-mlm reads hashes and buckets, k and R of the sketch that it predicts.
    """

    # Embedding
    emb: str = "proj"
    rows: int = 50_260  # N rows of the table; those of lookup have the special tokens, too
    bits: int = 128  # T bits of a word's hash
    chunk: int = 10  # bits of a chunk
    hashes: int | None = None  # by default 2 for bloom, else 5
    buckets: int = 500  # rows of a hash function's block
    weights: int = 50_000  # rows of the importance table
    grams: int = 64  # G n-grams that a word keeps
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
    # The table that heads mlm and hash-mlm score. True: the embedding's, which is refused where its
    # tie is "no". False: their own. None: the embedding's if its tie is "yes", else their own
    tied: bool | None = None
    labels: int = 2  # classes of classify; 1: a regression
    pool: str = "cls"  # classify sees cls, the first position, or the mean of all positions
    # Attention: attention.py
    attn: str = "full"  # full: all pairs; lsh: pairs that collide, without dropout of weights
    lsh_bands: int = 8  # r: hyperplanes of a hash function
    lsh_buckets: int = 256  # buckets of a hash function
    lsh_hashes: int = 1  # n: hash functions; a pair collides if one of them agrees
    lsh_fill: str = "zero"  # other pairs have a score of 0, as in the paper; mask: no weight
    lsh_pairs: str = "all"  # each pair has its own score; upper: (i, j) and (j, i) share one
    lsh_redraw: bool = False  # new hyperplanes in every training step

    def __post_init__(self):
        check_choices(self)
        embedding = EMBEDDINGS[self.emb]
        if self.hashes is None:
            self.hashes = 2 if embedding.is_stacked else 5
        if self.tied is None and self.predicts_rows:
            self.tied = embedding.tie == "yes"
        check_types(self)
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
        """Return the Config of a checkpoint's dict. Fields that an older one lacks have defaults.

        Raises:
            ValueError: A field is unknown, or has a value that it cannot have.
        """
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


# Which values are allowed, and which fit together


CHOICES = {
    "emb": EMBEDDINGS,
    "act": ("gelu", "relu"),
    "head": HEADS,
    "pool": ("cls", "mean"),
    "attn": ATTENTIONS,
    "lsh_fill": FILLS,
    "lsh_pairs": PAIRS,
}
# Whole numbers that may be 0; all others are at least 1. layers: embedding and head alone. rows:
# the method has no table of words. sep_id: a token ID
NATURAL = ("layers", "rows", "spare_positions", "sep_id")


def check_choices(c):
    """Raise a ValueError if a field of a Config has an unknown value."""
    for name, choices in CHOICES.items():
        value = getattr(c, name)
        if value not in choices:
            raise ValueError(f"{name}: expected one of {[*choices]}, got {value!r}.")


def check_types(c):
    """Raise a ValueError if a number of a Config is not whole or too small, or a switch no bool.

    PyTorch refuses a dropout, the only other number, outside 0 .. 1.
    """
    for field in fields(c):
        value = getattr(c, field.name)
        least = 0 if field.name in NATURAL else 1
        if field.type in (int, int | None):  # hashes has a value by now
            if type(value) is not int or value < least:  # True is an int, too
                raise ValueError(f"{field.name}: expected an integer of at least {least}, got "
                                 f"{value}.")
        if field.type in (bool, bool | None) and not isinstance(value, field.type):
            raise ValueError(f"{field.name}: expected True or False, got {value!r}.")


def check_contradictions(c):
    """Raise a ValueError if fields of a Config contradict each other."""
    if c.attn == "lsh" and c.lsh_pairs == "upper" and not c.order:
        raise ValueError("lsh_pairs: expected all for sets, got upper, which needs an order.")
    if c.tied and EMBEDDINGS[c.emb].tie == "no":
        raise ValueError(f"tied requires an embedding with rows of words or hashes, got {c.emb}.")

    fitting = [name for name, head in HEADS.items() if head.fits(c)]
    if c.head not in fitting:
        raise ValueError(f"head (--objective): expected {' or '.join(fitting[:2])} for {c.emb}, "
                         f"got {c.head}.")


# Presets


# A preset has the sizes of a model and the recipe that trains it. Keys that are fields of Config
# shape the model; the others (batch, lr, ...) are defaults of pretrain.py's flags. Among these:
#
#     micro      sequences a device holds at once
#     lr_mlm     the learning rate where the head predicts rows: masked words or hashes
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
