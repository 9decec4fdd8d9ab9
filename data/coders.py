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
    row         its token ID                                 lookup
    digest      m rows, its Bloom digest                     bloom
    bits        T bits, eight in a byte                      add, proj, linear
    chunks      T bits, in numbers of c bits                 pool
    index       one bucket, 0 .. N-1                         emb
    sketch      k buckets, 0 .. R-1                          mean, median
    weighted    k rows, 0 .. N-1, and one of importances     weighted
    ngrams      G buckets at most, 1 .. N-1, then 0          ngram

A new format is a class here, and its line in CODERS.
"""

import numpy as np

from hashing import NgramLSH, bits_to_chunks, ngram_index, sketch_index


class Coder:
    """Base class: how words become codes.

    A subclass of words that are hashed has the method codes, (words) -> integers (V, C). One with a
    vocabulary has their codes in first_codes.

    Args:
        settings: a value for each name in `reads`, all that decides on the codes; others are
            ignored. A name is a field of model.Config, the flag hash_seed or key, or one of

                hash          instance of a class of hashing.HASHES
                vocabulary    list[str]; every other word is [UNK]
                bloom_map     bloom.BloomMap of the vocabulary

    Attributes of a class:
        flags: the flags of pretrain.py that change the codes; "hash" adds those of its class.
        default_split: how texts are split, if no flag says so.
        masked_objective: what predicts masked words, if no flag says so.
        is_predicted: hash-mlm predicts these codes. Else it predicts those of a SketchCoder.
    """

    reads = flags = ""
    default_split = "regex"
    masked_objective = "hash-mlm"
    is_predicted = False
    hash = None
    vocabulary = None
    bloom_map = None

    def __init__(self, **settings):
        for name in self.reads.split():
            setattr(self, name, settings[name])

    def first_codes(self, num_specials):
        """Return the codes of the first token IDs, (s, C): zeros, as special tokens have no hash.

        Model has vectors for them. The words of a vocabulary follow, (s + V, C).
        """
        none = self.codes([])  # (0, C)
        return np.zeros((num_specials, none.shape[1]), none.dtype)

    def table_sizes(self, num_specials):
        """Return the fields of model.Config that follow from a vocabulary, a dict of int."""
        return {}

    def knows(self, word):
        """Return whether the codes of a word differ from those of all unknown words."""
        return True


# A vocabulary: a word has a code by its place in it


class RowCoder(Coder):
    """The token ID: each word has a row of its own, the baseline. int32 (s + V, 1)."""

    reads = "vocabulary"
    flags = "vocab"
    default_split = "bpe"  # a table has no row for a new word, so it reads pieces
    masked_objective = "mlm"

    def first_codes(self, num_specials):
        ids = np.arange(num_specials + len(self.vocabulary), dtype=np.int32)
        return ids[:, None]

    def table_sizes(self, num_specials):
        return dict(rows=num_specials + len(self.vocabulary))


class DigestCoder(Coder):
    """The m buckets of a Bloom map: int32 (s + V, m). [SB §2.1]

    A map has R rows for its buckets, then a row for each special token.
    """

    reads = "vocabulary bloom_map"
    flags = "vocab alpha hashes hash_seed"
    default_split = "items"
    is_predicted = True

    def first_codes(self, num_specials):
        bloom_map = self.bloom_map
        assert bloom_map.n_items == len(self.vocabulary), "bloom_map: not that of the vocabulary"
        rows = bloom_map.buckets + np.arange(num_specials)
        special_codes = np.stack([rows] * bloom_map.m, 1)  # (s, m)
        return np.concatenate([special_codes, bloom_map.digest]).astype(np.int32)

    def table_sizes(self, num_specials):
        return dict(buckets=self.bloom_map.buckets + num_specials)


# A hash of --hash


class HashCoder(Coder):
    """What the formats of a --hash share."""

    def knows(self, word):
        # words without an n-gram of the corpus that an LSH was fitted to have equal codes
        return not isinstance(self.hash, NgramLSH) or len(self.hash.list_features(word)) > 0


class BitCoder(HashCoder):
    """T bits, eight in a byte: uint8 (V, ceil(T/8)). The first bit of a byte is its highest."""

    reads = flags = "hash bits"

    def codes(self, words):
        return np.packbits(self.hash.bits(words, self.bits), axis=1)


class ChunkCoder(HashCoder):
    """T bits, in numbers of c bits: int16 (V, ceil(T/c)). [HF §3.4]"""

    reads = flags = "hash bits chunk"

    def codes(self, words):
        return bits_to_chunks(self.hash.bits(words, self.bits), self.chunk)


class IndexCoder(HashCoder):
    """One of N buckets: int32 (V, 1). [HF §3.1]"""

    reads = flags = "hash rows"

    def codes(self, words):
        return self.hash.index(words, self.rows)[:, None].astype(np.int32)


# MD5 with a seed and a key


class SketchCoder(Coder):
    """k buckets, one of each hash function: int32 (V, k). [CM]"""

    reads = flags = "hashes buckets hash_seed key"
    is_predicted = True

    def codes(self, words):
        index = sketch_index(words, self.hashes, self.buckets, self.hash_seed, self.key)
        return index.astype(np.int32)


class WeightedCoder(Coder):
    """k rows of a table and one of the K of importances: int32 (V, k + 1). [SV §3]"""

    reads = flags = "hashes rows weights hash_seed key"

    def codes(self, words):
        rows = sketch_index(words, self.hashes, self.rows, self.hash_seed, self.key)
        # k + 1 hash functions are independent: the last one chooses the row of importances
        more = sketch_index(words, self.hashes + 1, self.weights, self.hash_seed, self.key)
        return np.concatenate([rows, more[:, -1:]], 1).astype(np.int32)


class NgramCoder(Coder):
    """The buckets of a word's n-grams, G at most, then 0: int32 (V, G). [FT §3.2]"""

    reads = "rows grams hash_seed key"
    flags = "rows hash_seed key"

    def codes(self, words):
        index = ngram_index(words, self.rows, self.grams, self.hash_seed, self.key)
        return index.astype(np.int32)


CODERS = {
    "row": RowCoder,
    "digest": DigestCoder,
    "bits": BitCoder,
    "chunks": ChunkCoder,
    "index": IndexCoder,
    "sketch": SketchCoder,
    "weighted": WeightedCoder,
    "ngrams": NgramCoder,
}
