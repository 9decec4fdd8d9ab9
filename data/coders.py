"""Words to the codes that an embedding reads: one class per code format.

Sources:
    [HF] Xue & Aletras 2022, HashFormers
    [SB] Anderson et al. 2020, Superbloom
    [CM] Median is all you need, a proposal
    [SV] Svenstrup et al. 2017, Hash Embeddings
    [FT] Bojanowski et al. 2017, Enriching Word Vectors with Subword Information
Out of scope: the hash functions (hashing.py), Bloom maps (bloom.py), token IDs (tokenizer.py), how
    codes become vectors (embeddings.py).
Notation:
    V words   C code numbers of a word   T bits   c bits of a chunk   N rows of a table
    k hash functions   m hashes of an item   R buckets of a hash function or map
    K rows of the importance table   G n-grams of a word at most   s special tokens

A code format says what the codes of a word are. The attribute code_format of a class in
embeddings.py names the one that it reads:

    format      codes of a word                              embeddings
    bits        T bits, eight in a byte                      add, proj, linear
    chunks      T bits, in numbers of c bits                 pool
    index       one bucket, 0 .. N-1                         emb
    sketch      k buckets, 0 .. R-1                          mean, median
    weighted    k rows, 0 .. N-1, and one of importances     weighted
    ngrams      G buckets at most, 1 .. N-1, then 0          ngram
    row         its token ID                                 lookup
    digest      m rows, its Bloom digest                     bloom

A new format is a class here, and its line in CODERS. The fields of the class are all that its codes
depend on. Two things follow from them: which flags pretrain.py takes, and which runs share a file
of codes (data/codes.py). A new part of a format has lines in Coder, FLAGS_OF_PART and, where it is
made, in data/codes.py.
"""

from dataclasses import dataclass, fields
from inspect import signature

import numpy as np

from bloom import BloomMap
from hashing import HASHES, bits_to_chunks, ngram_index, sketch_index


class Coder:
    """Base class: how words become codes.

    A subclass is a dataclass with a method codes. A field of it is a field of model.Config, the
    flag hash_seed or key, or one of these parts:

        hash          instance of a class of hashing.HASHES
        vocabulary    list[str]; every other word is [UNK]
        bloom_map     bloom.BloomMap of the vocabulary

    Attributes of a class:
        default_split: how texts are split, if no flag says so.
        masked_objective: what predicts masked words, if no flag says so.
        is_predicted: hash-mlm predicts these codes. Else it predicts those of a SketchCoder.
    """

    default_split = "regex"
    masked_objective = "hash-mlm"
    is_predicted = False

    # A part that is no field of a class is None. Without types these lines are no fields, but
    # defaults of fields
    hash = None
    vocabulary = None
    bloom_map = None

    def __post_init__(self):
        for name in ("hash", "vocabulary", "bloom_map"):
            if name in self.list_fields() and getattr(self, name) is None:
                raise ValueError(f"{name}: expected a part of the codes, got None.")

    def codes(self, words):
        """Return the codes of words, a list[str]: integers (V, C)."""
        raise NotImplementedError

    def special_codes(self, num_specials):
        """Return the codes of special tokens, (s, C): zeros, as Model has other vectors for them.

        They are the first token IDs.
        """
        none = self.codes([])  # (0, C)
        return np.zeros((num_specials, none.shape[1]), none.dtype)

    def knows(self, words):
        """Return bool (V,): whether the codes of a word differ from those of all unknown words."""
        if self.hash is not None:
            return self.hash.knows(words)
        return np.ones(len(words), bool)

    def table_sizes(self, num_specials):
        """Return the fields of model.Config that follow from a vocabulary, a dict of int."""
        return {}

    # What follows from the fields

    @classmethod
    def list_fields(cls):
        """Return the names of all that the codes depend on, list[str]."""
        return [field.name for field in fields(cls)]

    @classmethod
    def list_flags(cls, hash_class):
        """Return the flags of pretrain.py that change the codes, a set of str.

        It has the names of other fields, too.

        Args:
            hash_class: a class of hashing.HASHES, as --hash says.
        """
        flags = set()
        for name in cls.list_fields():
            flags.add(name)  # most fields have a flag of the same name
            flags.update(FLAGS_OF_PART.get(name, []))
            if name == "hash":
                flags.update(hash_class.options.values())
        return flags

    @classmethod
    def from_settings(cls, settings):
        """Return the coder of a dict of settings, which may have others besides its fields."""
        return cls(**{name: settings[name] for name in cls.list_fields()})

    # Saved and loaded

    def state(self):
        """Return the fields as a dict of plain types: equal states mean equal codes."""
        state = {name: getattr(self, name) for name in self.list_fields()}
        if self.hash is not None:
            names = {hash_class: name for name, hash_class in HASHES.items()}
            state["hash_name"] = names[type(self.hash)]
            state["hash"] = self.hash.state()
        if self.bloom_map is not None:
            state["bloom_map"] = self.bloom_map.state()
        return state

    @classmethod
    def load(cls, state, config):
        """Return the coder of a checkpoint.

        Args:
            state: dict, HashTokenizer.state(). What is no field of the class is ignored: older
                checkpoints name a hash where there is none.
            config: model.Config, whose sizes are those of the model.

        Raises:
            ValueError: A field is missing, or a part of an unknown kind, or damaged.
        """
        settings = state | vars(config)
        names = cls.list_fields()
        for name in names:
            if name not in settings:
                raise ValueError(f"tokenizer: expected {name}, got {', '.join(state)}.")
        if "hash" in names:
            settings["hash"] = load_hash(state.get("hash_name"), state["hash"])
        if "bloom_map" in names:
            settings["bloom_map"] = BloomMap.load(state["bloom_map"])
        return cls.from_settings(settings)


# A part is made from these flags, and a hash from those of its class too (data/codes.py)
FLAGS_OF_PART = {"vocabulary": ["vocab"], "bloom_map": ["alpha", "hashes", "hash_seed"]}


# A hash of --hash


@dataclass(kw_only=True)
class BitCoder(Coder):
    """T bits, eight in a byte: uint8 (V, ceil(T/8)). The first bit of a byte is its highest."""

    hash: object
    bits: int

    def codes(self, words):
        bits = self.hash.bits(words, self.bits)  # (V, T) of 0 and 1
        return np.packbits(bits, axis=1)


@dataclass(kw_only=True)
class ChunkCoder(Coder):
    """T bits, in numbers of c bits: int16 (V, ceil(T/c)). [HF §3.4]"""

    hash: object
    bits: int
    chunk: int

    def codes(self, words):
        bits = self.hash.bits(words, self.bits)  # (V, T) of 0 and 1
        return bits_to_chunks(bits, self.chunk)


@dataclass(kw_only=True)
class IndexCoder(Coder):
    """One of N buckets: int32 (V, 1). [HF §3.1]"""

    hash: object
    rows: int

    def codes(self, words):
        index = self.hash.index(words, self.rows)  # (V,)
        return index[:, None].astype(np.int32)


# MD5 with a seed and a key


@dataclass(kw_only=True)
class SketchCoder(Coder):
    """k buckets, one of each hash function: int32 (V, k). [CM]"""

    is_predicted = True
    hashes: int
    buckets: int
    hash_seed: int
    key: str | None

    def codes(self, words):
        index = sketch_index(words, self.hashes, self.buckets, self.hash_seed, self.key)
        return index.astype(np.int32)


@dataclass(kw_only=True)
class WeightedCoder(Coder):
    """k rows of a table and one of the K of importances: int32 (V, k + 1). [SV §3]"""

    hashes: int
    rows: int
    weights: int
    hash_seed: int
    key: str | None

    def codes(self, words):
        rows = sketch_index(words, self.hashes, self.rows, self.hash_seed, self.key)
        # k + 1 hash functions are independent: the last one chooses the row of importances
        more = sketch_index(words, self.hashes + 1, self.weights, self.hash_seed, self.key)
        importance = more[:, -1:]  # (V, 1)
        return np.concatenate([rows, importance], 1).astype(np.int32)


@dataclass(kw_only=True)
class NgramCoder(Coder):
    """The buckets of a word's n-grams, G at most, then 0: int32 (V, G). [FT §3.2]"""

    rows: int
    grams: int
    hash_seed: int
    key: str | None

    def codes(self, words):
        index = ngram_index(words, self.rows, self.grams, self.hash_seed, self.key)
        return index.astype(np.int32)


# A vocabulary: a word has a code by its place in it


@dataclass(kw_only=True)
class VocabularyCoder(Coder):
    """What the formats of a vocabulary share. Special tokens have rows of the same table."""

    vocabulary: list

    def list_places(self, words):
        """Return the place of each word in the vocabulary, int32 (V,)."""
        place_of_word = {word: place for place, word in enumerate(self.vocabulary)}
        return np.array([place_of_word[word] for word in words], np.int32)


@dataclass(kw_only=True)
class RowCoder(VocabularyCoder):
    """The token ID: each word has a row of its own, the baseline. int32 (V, 1)."""

    default_split = "bpe"  # a table has no row for a new word, so it reads pieces
    masked_objective = "mlm"
    special_tokens: int  # s, whose rows come first

    def codes(self, words):
        rows = self.special_tokens + self.list_places(words)  # (V,)
        return rows[:, None]

    def special_codes(self, num_specials):
        rows = np.arange(num_specials, dtype=np.int32)  # (s,)
        return rows[:, None]

    def table_sizes(self, num_specials):
        return dict(rows=num_specials + len(self.vocabulary))


@dataclass(kw_only=True)
class DigestCoder(VocabularyCoder):
    """The m buckets of a Bloom map: int32 (V, m). [SB §2.1]

    Each map has a block of R + s rows: for its R buckets, and then for special tokens.
    """

    default_split = "items"
    is_predicted = True
    bloom_map: BloomMap

    def __post_init__(self):
        super().__post_init__()
        num_words = len(self.vocabulary)
        if self.bloom_map.n_items != num_words:
            raise ValueError(f"bloom_map: expected that of {num_words:,} words, got one of "
                             f"{self.bloom_map.n_items:,} items.")

    def codes(self, words):
        digest = self.bloom_map.digest  # (N, m), by place in the vocabulary
        return digest[self.list_places(words)]

    def special_codes(self, num_specials):
        rows = self.bloom_map.num_buckets + np.arange(num_specials, dtype=np.int32)  # (s,)
        return np.stack([rows] * self.bloom_map.m, 1)

    def table_sizes(self, num_specials):
        # subtle: buckets is R of a map, but R + s of model.Config
        return dict(buckets=self.bloom_map.num_buckets + num_specials)


CODERS = {
    "bits": BitCoder,
    "chunks": ChunkCoder,
    "index": IndexCoder,
    "sketch": SketchCoder,
    "weighted": WeightedCoder,
    "ngrams": NgramCoder,
    "row": RowCoder,
    "digest": DigestCoder,
}


# Parts of a checkpoint


def load_hash(name, state):
    """Return the hash of a name and a state(); ValueError for an unknown name or other fields."""
    if name not in HASHES:
        raise ValueError(f"hash: expected one of {[*HASHES]}, got {name!r}.")
    expected = signature(HASHES[name]).parameters
    if set(state) != set(expected):
        raise ValueError(f"hash {name}: expected {', '.join(expected)}, got {', '.join(state)}.")
    return HASHES[name](**state)
