"""Turn text into words, words into token IDs, and token IDs into the hash codes that embeddings.py reads.

Paper map:    [HF §3.1] HashTokenizer   [SB §4] Phrases   [BERT §4.2] sliding_windows   [CM] sketch_targets
Out of scope: the hash functions (hashing.py), corpora on disk (data/corpus.py).
Deviations:   1. [HF] The BPE of the baselines lower-cases, as hashing does, so only the units of text differ.
              2. [SB §4] Phrases falls back on pieces of byte-level BPE; the paper uses WordPiece.
Notation:     V words   C code numbers per word   T bits   k bits of a chunk, or hash functions   L positions
              m hashes per item   R buckets of a hash function or map   N rows of a table that all words share
"""

import json
import re
from collections import Counter

import numpy as np
from tokenizers import ByteLevelBPETokenizer, Tokenizer

from bloom import BloomMap
from hashing import (HASHES, bits_to_chunks, check, check_int, check_words, list_words, sketch_index,
                     split_words)

# Token IDs of the special tokens, which are never hashed; words follow, the most frequent of a corpus first
SPECIALS = ("[PAD]", "[CLS]", "[SEP]", "[UNK]", "[MASK]")
PAD, CLS, SEP, UNK, MASK = range(5)
FIRST_WORD_ID = len(SPECIALS)


# ---------------------------------------------------------------------------------------------------------
# Text to words: `regex` and `space` are hashing.split_words; BPE and Phrases learn their units


def _make_encodable(text):
    """Return text of equal length for the BPE library: lone surrogates become "?"."""
    check("text", isinstance(text, str), "a str", text)
    # subtle: İ alone has a lower case of two characters, which would shift all offsets after it
    return text.encode("utf-8", "replace").decode().replace("İ", "i")


class BPE:
    """Byte-level byte-pair encoding through the `tokenizers` library: the vocabulary of the baselines.

    A piece that opens a word starts with "Ġ", the byte-level alphabet's sign for a space. Every text can be
    written in pieces, so there is no unknown piece. Attribute: units list[str], by the library's own number.
    """

    def __init__(self, text):
        """Load a tokenizer from its JSON text, the attribute `json` of another BPE."""
        self.json, self.tokenizer = text, Tokenizer.from_str(text)
        index = self.tokenizer.get_vocab()
        self.units = sorted(index, key=index.get)

    @classmethod
    def train(cls, texts, size=50_000, min_frequency=5):
        """Learn up to `size` pieces, of at least the 256 bytes, from an iterator of texts.

        Pairs rarer than min_frequency stay apart.
        Words are cut every 1,000 letters, as the time for a word grows with the square of its length.
        """
        check_int("size", size, 1, 10_000_000)  # the library reserves memory for all pieces at its start
        texts = (re.sub(r"\S{1000}", r"\g<0> ", _make_encodable(text)) for text in texts)
        tokenizer = ByteLevelBPETokenizer(add_prefix_space=True, lowercase=True)
        tokenizer.train_from_iterator(texts, size, min_frequency, show_progress=False)
        return cls(tokenizer.to_str())

    def split(self, text):
        """Return pieces list[str] and spans list[(start, end)], each with the space before its piece."""
        encoding = self.tokenizer.encode(_make_encodable(text))
        return encoding.tokens, encoding.offsets

    def number_texts(self, texts):
        """Return list of lists of int, each piece's index in `units`, on all cores."""
        return [e.ids for e in self.tokenizer.encode_batch_fast([_make_encodable(text) for text in texts])]


def match_longest(words, phrases, max_words):
    """Segment words into known phrases by greedy longest match. A single word is always allowed.

    Args: words list[str]; phrases, set or dict of str, words joined by one space; max_words int, of a phrase.
    Returns: list of (start, stop).  new york city hall -> (0, 2) (2, 4) with "new york" and "city hall"
    """
    runs, start = [], 0
    while start < len(words):
        stops = range(min(start + max_words, len(words)), start + 1, -1)
        stop = next((stop for stop in stops if " ".join(words[start:stop]) in phrases), start + 1)
        runs.append((start, stop))
        start = stop
    return runs


def split_names(text, names, max_words):
    """Split text into item names as they are written: case and punctuation stay.

    Args: text str, names between tabs, or else between spaces, where match_longest finds the longer `names`;
        names, a set or dict of str; max_words int, of the longest name.
    Returns: names list[str], inner spaces single, and spans list[(start, end)] in characters of text; between
        tabs a span includes the spaces around the name.
    """
    if "\t" in text:
        parts = [match for match in re.finditer("[^\t]+", text) if match.group().strip()]
        return [" ".join(match.group().split()) for match in parts], [match.span() for match in parts]
    words, parts = text.split(), list(re.finditer(r"\S+", text))
    runs = match_longest(words, names, max_words)
    return [" ".join(words[a:b]) for a, b in runs], [(parts[a].start(), parts[b - 1].end()) for a, b in runs]


class Phrases:
    """The most frequent words and pairs of words, and BPE pieces for the rest, longest match first. [SB §4]

    A vocabulary of a million contains many names: "new york" is one token. Attribute: units list[str].
    """
    MAX_COUNTED = 10_000_000  # words and pairs counted at a time; beyond it the rarer half is dropped

    def __init__(self, text):
        """Load from JSON text, the attribute `json` of another Phrases."""
        state = json.loads(text)
        self.json, self.bpe, self.phrases = text, BPE(state["bpe"]), set(state["phrases"])
        self.units = state["phrases"] + [piece for piece in self.bpe.units if piece not in self.phrases]
        self.index = {unit: i for i, unit in enumerate(self.units)}

    @classmethod
    def train(cls, texts, size=1_000_000, max_pieces=30_000):
        """Learn phrases and pieces from an iterator of texts: `size` at most, `max_pieces` of them pieces."""
        counts = Counter()

        def count_and_pass_on(texts):  # to BPE.train: an iterator of texts can be read only once
            for text in texts:
                words = list_words(text)
                counts.update([*words, *map(" ".join, zip(words, words[1:]))])
                if len(counts) > cls.MAX_COUNTED:
                    median = sorted(counts.values())[len(counts) // 2]
                    for phrase in [phrase for phrase, n in counts.items() if n <= median]:
                        del counts[phrase]
                yield text

        bpe = BPE.train(count_and_pass_on(texts), min(max_pieces, size))
        best = sorted(counts, key=lambda phrase: (-counts[phrase], phrase))[:max(size - len(bpe.units), 0)]
        return cls(json.dumps(dict(phrases=[phrase for phrase in best if counts[phrase] > 1], bpe=bpe.json)))

    def split(self, text):
        """Return phrases list[str] and spans list[(start, end)]; the bytes of a letter share its span."""
        words, spans = split_words(text)
        units, places = [], []
        for start, stop in match_longest(words, self.phrases, 2):
            a, b = spans[start][0], spans[stop - 1][1]
            found, inside = [" ".join(words[start:stop])], [(0, b - a)]
            if found[0] not in self.phrases:  # one word, in pieces. BPE lower-cases, and keeps offsets at İ
                found, inside = self.bpe.split(text[a:b])
            units += found
            places += [(a + first, a + last) for first, last in inside]
        return units, places

    def number_texts(self, texts):
        """Return list of lists of int, each phrase's index in `units`."""
        return [[self.index[unit] for unit in self.split(text)[0]] for text in texts]


SUBWORDS = {"bpe": BPE, "phrases": Phrases}  # ways to split that are learned from the corpus
SPLITS = ("regex", "space", *SUBWORDS, "items")


# ---------------------------------------------------------------------------------------------------------
# Words to codes


class HashTokenizer:
    """Map text to words, token IDs and hash codes: all that a checkpoint says about its text. [HF §3.1]

    The word list grows with the text and has no parameters: a new word gets the next free ID and is hashed on
    the fly. Code formats "row" and "digest" have a fixed vocabulary, with [UNK] for all other words.

        code_format   dtype   C          code numbers of a word
        row           int32   1          its row in a vocabulary, the token ID (lookup)
        index         int32   1          its hash bucket, 0 .. N-1 (emb)
        chunks        int16   ceil(T/k)  chunks of k bits (pool)
        bits          uint8   ceil(T/8)  T bits in bytes, most significant bit first (add, proj, linear)
        digest        int32   m          its bucket in each map, 0 .. R-1, not yet offset by block (bloom)
        sketch        int32   k          its bucket by each hash function, 0 .. R-1, likewise (mean, median)
        weighted      int32   k + 1      k rows 0 .. N-1, and a row of the importance table (weighted)

    Args:
        config: model.Config, or anything with its code_format (str) and the ints bits, chunk, rows, hashes,
            buckets, weights that the format needs.
        split: one of SPLITS. subwords: BPE or Phrases, for the splits of the same name.
        hash_name, hash: a key of HASHES and its fitted instance, for index, chunks and bits.
        vocabulary: list[str], the words of row and digest by ID. bloom_map: BloomMap of it, for digest.
        hash_seed, key: int and str or None, of the sketch hashes.
    """
    separator = SEP, SEP  # of build_inputs

    def __init__(self, config, split="regex", hash_name="md5", hash=None, subwords=None, vocabulary=None,
                 bloom_map=None, hash_seed=0, key=None):
        check("config", hasattr(config, "code_format"), "a model.Config", config)
        self.is_fixed, self.bloom_map = config.code_format in ("row", "digest"), bloom_map
        check("split", split in SPLITS, f"one of {', '.join(SPLITS)}", split)
        kind = SUBWORDS.get(split, type(None))  # the class of subwords, or of None
        check("subwords", isinstance(subwords, kind), f"{kind.__name__} for {split}", subwords)
        # formats with a hash function refuse its name or class, and None
        unfitted = (str, type, type(None)) if config.code_format in ("index", "chunks", "bits") else ()
        check("hash", not isinstance(hash, unfitted), "a fitted one, such as NgramLSH.fit(counts)", hash)
        check_int("hash_seed", hash_seed, 0, 1 << 64)
        check_words(vocabulary if self.is_fixed else [], "vocabulary")
        size = len(vocabulary) if config.code_format == "digest" else None  # None: expects no map
        check("bloom_map", getattr(bloom_map, "n_items", None) == size, "that of the vocabulary", bloom_map)
        self.config, self.split_name, self.subwords = config, split, subwords
        self.hash_name, self.hash, self.hash_seed, self.key = hash_name, hash, hash_seed, key
        self.words = list(vocabulary) if self.is_fixed else []  # of IDs FIRST_WORD_ID, FIRST_WORD_ID + 1, ...
        self.index = {word: FIRST_WORD_ID + i for i, word in enumerate(self.words)}
        self._codes = None  # of all words so far
        self._max_words = max((1 + word.count(" ") for word in self.words), default=1)  # of an item's name

    def split(self, text):
        """Return words list[str] and spans list[(start, end)] in characters."""
        if self.split_name == "items":
            return split_names(text, self.index, self._max_words)
        return self.subwords.split(text) if self.subwords else split_words(text, self.split_name)

    def ids(self, words):
        """Return the token IDs of words, int32 (len(words),). A new word is added, or UNK in a fixed list."""
        check_words(words)
        for word in () if self.is_fixed else words:
            if word not in self.index:
                self.index[word] = FIRST_WORD_ID + len(self.words)
                self.words.append(word)
                self._max_words = max(self._max_words, 1 + word.count(" "))
        return np.array([self.index.get(word, UNK) for word in words], np.int32)

    def ids_of_texts(self, texts):
        """Return an int32 (words,) per text, faster than split and ids; ValueError for split items."""
        if not self.subwords:
            return [self.ids(list_words(text, self.split_name)) for text in texts]
        units = self.subwords.units
        return [self.ids([units[i] for i in numbers]) for numbers in self.subwords.number_texts(texts)]

    def hash_words(self, words):
        """Return the codes (len(words), C) of words, with the dtype and C of their format."""
        c, kind = self.config, self.config.code_format
        if kind == "row":
            return self.ids(words)[:, None]
        if kind == "digest":  # the map's: codes() calls this method for other formats only
            return self.codes()[self.ids(words)]
        if kind == "index":
            return self.hash.index(words, c.rows).astype(np.int32)[:, None]
        if kind in ("bits", "chunks"):
            bits = self.hash.bits(words, c.bits)
            return np.packbits(bits, axis=1) if kind == "bits" else bits_to_chunks(bits, c.chunk)
        if kind == "sketch":
            return self.sketch_targets(words)
        if kind == "weighted":
            # of k + 1 independent hashes, k choose rows, and the last the row of importance weights
            rows, weights = (sketch_index(words, c.hashes + 1, n, self.hash_seed, self.key)
                             for n in (c.rows, c.weights))
            return np.concatenate([rows[:, :-1], weights[:, -1:]], 1).astype(np.int32)
        raise ValueError(f"code_format: expected one that HashTokenizer lists, got {kind!r}.")

    def sketch_targets(self, words):
        """Return int32 (len(words), k): the buckets that objective hash-mlm predicts for each word. [CM]"""
        c = self.config
        return sketch_index(words, c.hashes, c.buckets, self.hash_seed, self.key).astype(np.int32)

    def special_codes(self):
        """Return the codes of IDs 0 .. FIRST_WORD_ID - 1: zeros, or their rows in a table that has them."""
        if self.config.code_format == "digest":  # in each block after the map's own
            rows = self.bloom_map.buckets + np.arange(FIRST_WORD_ID, dtype=np.int32)
            return np.tile(rows[:, None], self.bloom_map.m)
        if self.config.code_format == "row":
            return np.arange(FIRST_WORD_ID, dtype=np.int32)[:, None]
        return np.zeros_like(self.hash_words([""] * FIRST_WORD_ID))  # of the same shape and dtype

    def codes(self):
        """Return the code table of all IDs so far, (FIRST_WORD_ID + V, C). Each word is hashed once."""
        if self._codes is None:
            self._codes = self.special_codes()
        if new := self.words[len(self._codes) - FIRST_WORD_ID:]:
            added = self.bloom_map.digest if self.bloom_map else self.hash_words(new)
            self._codes = np.concatenate([self._codes, added])
        return self._codes

    def state(self):
        """Return everything but the config as plain types; HashTokenizer.load restores it."""
        return dict(split=self.split_name, hash_name=self.hash_name, hash=self.hash and self.hash.state(),
                    subwords=self.subwords and self.subwords.json, hash_seed=self.hash_seed, key=self.key,
                    vocabulary=self.words if self.is_fixed else None,
                    bloom_map=self.bloom_map and self.bloom_map.state())

    @classmethod
    def load(cls, state, config):
        """Restore a tokenizer from state() and its model's config; ValueError where the two do not fit."""
        try:
            state = dict(state)
            state["hash"] = state["hash"] and HASHES[state["hash_name"]](**state["hash"])
            state["subwords"] = state["subwords"] and SUBWORDS[state["split"]](state["subwords"])
            if bloom_map := state["bloom_map"]:  # its number of items asks for memory, and is not trusted
                state["bloom_map"] = BloomMap.load(bloom_map | dict(n_items=len(state["vocabulary"])))
            tokenizer = cls(config, **state)
            tokenizer.hash_words(["a", *tokenizer.split("a")[0]])  # raises now if a part is wrong
            return tokenizer
        except Exception as error:  # numpy and the BPE library raise many types
            raise ValueError(f"not the state of a tokenizer for this model: {error!r}") from error


# ---------------------------------------------------------------------------------------------------------
# IDs to the input of a model


def build_inputs(first, second, length, separator=HashTokenizer.separator, keep_rest=False):
    """Build [CLS] A [SEP], or [CLS] A [SEP] [SEP] B [SEP]; cut the longer side first if both are too long.

    Args: first int32 (n,) and second int32 (m,) or None, token IDs; length int L, at least 5; separator, IDs;
        keep_rest bool, append the words of the first that do not fit, for a bag of words.
    Returns: ids int32, L at most, or more with the rest, and num_cut int, how many words did not fit.
        n 10, m 3, room 8 -> 5 and 3;   n 10, m 10, room 7 -> 4 and 3;   n 2, m 10, room 8 -> 2 and 6
    """
    check_int("length", length, 5, 1 << 31)
    between, second = ([], []) if second is None else (separator, second)
    room = length - 2 - len(between)
    # the first gets what the second leaves, or half of the room if that is more; the second gets the rest
    n = min(len(first), max(room - len(second), (room + 1) // 2))
    m = min(len(second), room - n)
    parts = [[CLS], first[:n], between, second[:m], [SEP], first[n:] if keep_rest else []]
    return np.concatenate(parts).astype(np.int32), len(first) - n + len(second) - m


def sliding_windows(question, context, length, stride):
    """Cut a long context into overlapping windows, each behind the question. [BERT §4.2]

    Args: question (n,), context (m,) int32, token IDs; length int L, at least 8; stride int, words from start
        to start. A question takes half of the room at most; every word of the context is in some window.
    Returns: list of (ids int32 (L at most,), first, start, stop): words start .. stop-1 of the context are at
        positions first, first + 1, ... of ids.
    """
    check_int("length", length, 8, 1 << 31)
    check_int("stride", stride, 1, 1 << 31)
    # [CLS] question [SEP] [SEP] context [SEP]: four special tokens, three of them before the context
    question = question[:(length - 4) // 2]
    room = length - 4 - len(question)
    step = min(stride, room)
    starts = range(0, max(len(context) - room, 0) + step, step)
    return [(build_inputs(question, context[start:start + room], length)[0], len(question) + 3, start,
             min(start + room, len(context))) for start in starts]
