"""Text to words, words to token IDs, and token IDs to the hash codes that embeddings.py reads.

Sources:
    [HF] Xue & Aletras 2022, HashFormers
    [SB] Superbloom, ICLR 2020 submission
    [BERT] Devlin et al. 2019, and its released code
    [CM] Median is all you need, a proposal
Out of scope: the hash functions (hashing.py), corpora on disk (data/corpus.py).
Deviations:
    1. [HF] The BPE of the baselines lower-cases, as hashing does, so that only the units differ.
    2. [SB §4] Phrases falls back on pieces of byte-level BPE; the paper uses WordPiece.
Notation:
    V words   C code numbers of a word   T bits   L positions   N rows of a table
    k hash functions   c bits of a chunk   m hashes of an item   R buckets of a hash function or map
Demo: python tokenizer.py
"""

import json
import re
from collections import Counter
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
from tokenizers import ByteLevelBPETokenizer, Tokenizer

from bloom import BloomMap
from hashing import (HASHES, MD5, NgramLSH, bits_to_chunks, check_words, list_words, ngram_index,
                     sketch_index, split_words)

# Token IDs of the special tokens, which are never hashed. Words follow, the most frequent first.
SPECIALS = ("[PAD]", "[CLS]", "[SEP]", "[UNK]", "[MASK]")
PAD, CLS, SEP, UNK, MASK = range(5)
FIRST_WORD_ID = len(SPECIALS)


class HashTokenizer:
    """Map text to words, words to token IDs, and IDs to hash codes. [HF §3.1]

        words, spans = tokenizer.split("A cat")    a cat
        ids = tokenizer.ids(words)                 5 6
        codes = tokenizer.codes()[ids]             (2, C), which an embedding reads

    Other libraries call the first two steps "encode"; ids_of_texts is both, for many texts.

    The word list grows with the text and has no parameters: a new word gets the next free ID, and
    is hashed once. In the code formats "row" and "digest" the vocabulary is fixed, and every other
    word is [UNK]. A checkpoint holds the state of one tokenizer.

    Args:
        config: model.Config: its code_format, see codes_of_words, and the sizes that the format
            needs: bits T, chunk c, rows N, hashes m or k, buckets R, weights (rows of the
            importance table) and grams G.
        split: one of SPLITS: regex, space, bpe, phrases, items. "items" cuts text at the names in
            the vocabulary, so it is meant for a fixed one.
        hash_name, hash: a key of HASHES and its fitted instance, for the formats index, chunks and
            bits.
        subwords: BPE or Phrases, for the splits of the same name, else None.
        vocabulary: list[str], the words of row and digest by ID.
        bloom_map: BloomMap of the vocabulary, for digest.
        hash_seed, key: int, and str or None, for the formats sketch, weighted and ngrams, and for
            sketch_targets. They do not change the hash above.

    Raises:
        ValueError: If a name is unknown, or the hash, the subwords, the vocabulary and the map do
            not fit each other or the config.
    """

    separator = (SEP, SEP)  # between two texts in build_inputs; a character tokenizer has another

    def __init__(self, config, split="regex", hash_name="md5", hash=None, subwords=None,
                 vocabulary=None, bloom_map=None, hash_seed=0, key=None):
        if split not in SPLITS:
            raise ValueError(f"split: expected one of {', '.join(SPLITS)}, got {split!r}.")
        if (subwords is not None) != (split in SUBWORDS):
            raise ValueError(f"subwords: required by split {' and '.join(SUBWORDS)} alone, "
                             f"got {subwords!r:.60} for {split}.")
        if hash_name not in HASHES:
            raise ValueError(f"hash_name: expected one of {', '.join(HASHES)}, got {hash_name!r}.")
        # hash_name must name the class of hash: load builds the hash from the name
        self.uses_hash = config.code_format in ("index", "chunks", "bits")
        if self.uses_hash and not isinstance(hash, HASHES[hash_name]):
            raise ValueError(f"hash: expected one of hash_name {hash_name!r}, got {hash!r:.60}.")
        self.config = config
        self.split_name = split
        self.subwords = subwords
        self.hash_name = hash_name
        self.hash = hash
        self.hash_seed = hash_seed
        self.key = key
        self.bloom_map = bloom_map
        self.words = []  # their IDs are FIRST_WORD_ID, FIRST_WORD_ID + 1, ...
        self.id_of_word = {}  # word -> ID
        self.max_words = 1  # words of the longest name: 2 for "New York"
        self.is_fixed = config.code_format in ("row", "digest")
        if self.is_fixed:
            if vocabulary is None:
                raise ValueError(f"vocabulary: required by code format {config.code_format}.")
            self.add_words(vocabulary)
            if len(self.words) < len(vocabulary):  # the IDs of all later words would shift
                raise ValueError("vocabulary: expected each word once, got one twice.")
        if config.code_format == "digest":
            if bloom_map is None or bloom_map.n_items != len(self.words):
                raise ValueError(f"bloom_map: expected that of {len(self.words)} words.")
        # (IDs, C), to which codes() appends. Last, as it reads the words, the hash and the map
        self.code_table = self.special_codes()

    # Text to words, and words to token IDs

    def split(self, text):
        """Return words list[str] and spans list[(start, end)] in characters."""
        if self.split_name == "items":
            return split_names(text, self.id_of_word, self.max_words)
        if self.subwords is not None:
            return self.subwords.split(text)
        return split_words(text, self.split_name)

    def ids(self, words):
        """Return the token IDs of words, int32 (V,). A new word is added, or it is UNK if fixed."""
        check_words(words)
        if not self.is_fixed:
            self.add_words(words)
        return np.array([self.id_of_word.get(word, UNK) for word in words], np.int32)

    def add_words(self, words):
        """Give each new word the next free ID."""
        for word in words:
            if word not in self.id_of_word:
                self.id_of_word[word] = FIRST_WORD_ID + len(self.words)
                self.words.append(word)
                self.max_words = max(self.max_words, 1 + word.count(" "))

    def ids_of_texts(self, texts):
        """Return the token IDs of each text, int32 (n,), faster than split and ids."""
        if self.subwords is not None:
            return [self.ids(words) for words in self.subwords.split_texts(texts)]
        if self.split_name == "items":
            return [self.ids(self.split(text)[0]) for text in texts]
        return [self.ids(list_words(text, self.split_name)) for text in texts]

    def is_known(self, words):
        """Return bool (V,): whether the model can tell a word from other unknown words.

        A fixed vocabulary reads other words as [UNK]. An LSH gives words without an n-gram of the
        corpus it was fitted to the same hash code, all zeros.
        """
        if self.is_fixed:
            return np.array([word in self.id_of_word for word in words], bool)
        if self.uses_hash and isinstance(self.hash, NgramLSH):
            return np.array([len(self.hash.list_features(word)) > 0 for word in words], bool)
        return np.ones(len(words), bool)

    # Token IDs to hash codes

    def codes(self):
        """Return the codes of all IDs so far, (FIRST_WORD_ID + V, C). Each word is hashed once."""
        num_hashed = len(self.code_table) - FIRST_WORD_ID
        new_words = self.words[num_hashed:]
        if new_words:
            added = self.codes_of_words(new_words)
            self.code_table = np.concatenate([self.code_table, added])
        return self.code_table

    def codes_of_words(self, words):
        """Return the codes (V, C) of words. In parentheses is the embedding that reads a format.

            code_format   dtype   C          code numbers of a word
            row           int32   1          its row in a vocabulary, the token ID (lookup)
            digest        int32   m          its bucket in each map, 0 .. R-1 (bloom)
            index         int32   1          its hash bucket, 0 .. N-1 (emb)
            bits          uint8   ceil(T/8)  T bits in bytes, first bit highest (add, proj, linear)
            chunks        int16   ceil(T/c)  chunks of c bits (pool)
            sketch        int32   k          its bucket by each function, 0 .. R-1 (mean, median)
            weighted      int32   k + 1      k rows 0 .. N-1, a row of importances (weighted)
            ngrams        int32   G          buckets 1 .. N-1 of its n-grams, then 0 (ngram)
        """
        c = self.config
        if self.is_fixed:
            return self.fixed_codes(self.ids(words))
        if c.code_format == "index":
            index = self.hash.index(words, c.rows)  # (V,)
            return index.astype(np.int32)[:, None]
        if c.code_format == "bits":
            return np.packbits(self.hash.bits(words, c.bits), axis=1)
        if c.code_format == "chunks":
            return bits_to_chunks(self.hash.bits(words, c.bits), c.chunk)
        if c.code_format == "sketch":
            return self.sketch_targets(words)
        if c.code_format == "weighted":
            # k independent hash functions choose rows, and one more chooses the row of weights
            rows = self.sketch(words, c.hashes, c.rows)  # (V, k)
            weights = self.sketch(words, c.hashes + 1, c.weights)[:, -1:]  # (V, 1)
            return np.concatenate([rows, weights], 1)
        if c.code_format == "ngrams":
            index = ngram_index(words, c.rows, c.grams, self.hash_seed, self.key)  # (V, G)
            return index.astype(np.int32)
        raise ValueError("code_format: expected one that codes_of_words lists, "
                         f"got {c.code_format!r}.")

    def sketch(self, words, k, rows):
        """Return int32 (V, k), the buckets of k hash functions with this tokenizer's seed."""
        return sketch_index(words, k, rows, self.hash_seed, self.key).astype(np.int32)

    def sketch_targets(self, words):
        """Return the k sketch buckets of words, int32 (V, k). [CM]

        They are the codes of the format sketch, and what hash-mlm predicts in all formats but
        digest.
        """
        return self.sketch(words, self.config.hashes, self.config.buckets)

    def fixed_codes(self, ids):
        """Return the codes (n, C) of token IDs (n,), special tokens too, in a fixed vocabulary."""
        if self.config.code_format == "row":
            return ids[:, None]
        # each of the m maps has R rows for its buckets, then a row for each special token
        is_special = ids < FIRST_WORD_ID  # (n,)
        codes = np.empty((len(ids), self.bloom_map.m), np.int32)
        codes[is_special] = self.bloom_map.buckets + ids[is_special, None]
        codes[~is_special] = self.bloom_map.digest[ids[~is_special] - FIRST_WORD_ID]
        return codes

    def special_codes(self):
        """Return the codes of the special tokens, (FIRST_WORD_ID, C).

        They are zeros where words are hashed: special tokens have vectors of their own in Model.
        """
        if self.is_fixed:
            return self.fixed_codes(np.arange(FIRST_WORD_ID, dtype=np.int32))
        no_codes = self.codes_of_words([])  # (0, C): no words, to learn the format's dtype and C
        return np.zeros((FIRST_WORD_ID, no_codes.shape[1]), no_codes.dtype)

    # Checkpoints

    def state(self):
        """Return plain types that load restores: all but the config and a growing word list."""
        state = dict(split=self.split_name, hash_name=self.hash_name, hash=None, subwords=None,
                     hash_seed=self.hash_seed, key=self.key, vocabulary=None, bloom_map=None)
        if self.hash is not None:
            state["hash"] = self.hash.state()
        if self.subwords is not None:
            state["subwords"] = self.subwords.json
        if self.is_fixed:
            state["vocabulary"] = self.words
        if self.bloom_map is not None:
            state["bloom_map"] = self.bloom_map.state()
        return state

    @classmethod
    def load(cls, state, config):
        """Return the tokenizer of a state() and a model's config; ValueError if they do not fit."""
        try:
            options = dict(state)
            if options["hash"] is not None:
                options["hash"] = HASHES[options["hash_name"]](**options["hash"])
            if options["subwords"] is not None:
                options["subwords"] = SUBWORDS[options["split"]](options["subwords"])
            if options["bloom_map"] is not None:
                options["bloom_map"] = BloomMap.load(options["bloom_map"])
            return cls(config, **options)
        except Exception as error:  # the BPE library raises plain Exception
            raise ValueError(f"not the state of a tokenizer for this model: {error!r}") from error


# Text to tokens that are learned from a corpus: BPE pieces, phrases


def make_encodable(text):
    """Return text with each character that the BPE library cannot read replaced by another."""
    # İ lower-cases to two characters, which would shift all later spans; lone surrogates are not
    # UTF-8, and become ?
    return text.encode("utf-8", "replace").decode().replace("İ", "i")


class BPE:
    """Byte-level byte-pair encoding by the `tokenizers` library, which the baselines use.

    A piece that opens a word starts with "Ġ", the byte-level alphabet's sign for a space. Every
    text can be written in pieces, so there is no unknown piece.

    Args:
        text: str, JSON, the attribute `json` of another BPE.

    Attributes:
        units: list[str], the pieces by the library's own number.
    """

    def __init__(self, text):
        self.json = text
        self.tokenizer = Tokenizer.from_str(text)
        number_of_piece = self.tokenizer.get_vocab()
        self.units = sorted(number_of_piece, key=number_of_piece.get)

    @classmethod
    def train(cls, open_texts, size=50_000):
        """Learn pieces from texts.

        Args:
            open_texts: function without arguments that returns an iterable of str.
            size: int, number of pieces, at least 256 for the bytes.
        """
        # a space after 1,000 letters, as the time for a word grows with the square of its length
        texts = (re.sub(r"\S{1000}", r"\g<0> ", make_encodable(text)) for text in open_texts())
        tokenizer = ByteLevelBPETokenizer(add_prefix_space=True, lowercase=True)
        # a pair of pieces that occurs less than five times stays apart
        tokenizer.train_from_iterator(texts, size, min_frequency=5, show_progress=False)
        return cls(tokenizer.to_str())

    def split(self, text):
        """Return pieces list[str] and spans list[(start, end)], with the space before a word."""
        encoding = self.tokenizer.encode(make_encodable(text))
        return encoding.tokens, encoding.offsets

    def split_texts(self, texts):
        """Return the pieces of each text, list[list[str]], without spans, on all cores."""
        encodings = self.tokenizer.encode_batch_fast([make_encodable(text) for text in texts])
        texts_pieces = []
        for encoding in encodings:  # the fast form has numbers only
            texts_pieces.append([self.units[i] for i in encoding.ids])
        return texts_pieces


class Phrases:
    """The most frequent words and pairs of words, and BPE pieces for the rest. [SB §4]

    The longest match comes first. A vocabulary of a million contains many names: "new york" is one
    token.

    Args:
        text: str, JSON, the attribute `json` of another Phrases.

    Attributes:
        units: list[str], phrases and then pieces, which are its tokens.
    """

    MAX_PIECES = 30_000  # BPE pieces among the tokens
    MAX_COUNTED = 10_000_000  # words and pairs in memory; beyond it the rarer half is dropped

    def __init__(self, text):
        state = json.loads(text)
        self.json = text
        self.bpe = BPE(state["bpe"])
        self.phrases = set(state["phrases"])
        # a piece spelled like a phrase is listed once, so both have one token ID
        pieces = [piece for piece in self.bpe.units if piece not in self.phrases]
        self.units = state["phrases"] + pieces

    @classmethod
    def train(cls, open_texts, size=1_000_000):
        """Learn `size` phrases and pieces from texts, which are read twice, see BPE.train."""
        counts = Counter()
        for text in open_texts():
            words = list_words(text)
            counts.update(words)
            counts.update(" ".join(pair) for pair in zip(words, words[1:]))
            if len(counts) > cls.MAX_COUNTED:
                counts = Counter(dict(counts.most_common(cls.MAX_COUNTED // 2)))
        # pieces first: phrases get the IDs that pieces leave
        bpe = BPE.train(open_texts, min(cls.MAX_PIECES, size))
        phrases = [phrase for phrase in counts if counts[phrase] > 1]
        phrases.sort(key=lambda phrase: (-counts[phrase], phrase))
        phrases = phrases[:max(size - len(bpe.units), 0)]
        return cls(json.dumps(dict(phrases=phrases, bpe=bpe.json)))

    def split(self, text):
        """Return tokens list[str] and spans list[(start, end)] in characters.

        Pieces that are bytes of one letter have the same span.
        """
        words, spans = split_words(text)
        units = []
        places = []
        for start, stop in match_longest(words, self.phrases, 2):
            phrase = " ".join(words[start:stop])
            first = spans[start][0]
            last = spans[stop - 1][1]
            if phrase in self.phrases:
                units.append(phrase)
                places.append((first, last))
            else:  # one word, in pieces of BPE, which lower-cases
                pieces, inside = self.bpe.split(text[first:last])
                units.extend(pieces)
                places.extend((first + a, first + b) for a, b in inside)
        return units, places

    def split_texts(self, texts):
        """Return the tokens of each text, list[list[str]]."""
        return [self.split(text)[0] for text in texts]


SUBWORDS = {"bpe": BPE, "phrases": Phrases}  # ways to split that are learned from the corpus
SPLITS = ("regex", "space", *SUBWORDS, "items")  # the first two are in hashing.PATTERNS


# Names of items


def match_longest(words, phrases, max_words):
    """Segment words into known phrases by greedy longest match. A single word is always allowed.

    Args:
        words: list[str].
        phrases: set or dict of str, words joined by one space.
        max_words: int, words of the longest phrase.

    Returns:
        list of (start, stop).

    Example:
        new york city hall gives (0, 2) (2, 4) with the phrases "new york" and "city hall".
    """
    runs = []
    start = 0
    while start < len(words):
        stop = min(start + max_words, len(words))
        while stop > start + 1 and " ".join(words[start:stop]) not in phrases:
            stop -= 1
        runs.append((start, stop))
        start = stop
    return runs


def split_names(text, names, max_words):
    """Split text into item names as they are written: case and punctuation stay.

    Args:
        text: str, a line of names between tabs, or without tabs of names between spaces, where
            match_longest finds those of several words.
        names: set or dict of str.
        max_words: int, words of the longest name. It does not count between tabs.

    Returns:
        names list[str], inner spaces single, and spans list[(start, end)] in characters of text.
        Between tabs a span includes the spaces around the name.
    """
    pattern = r"\S+"
    if "\t" in text:
        pattern = r"[^\t]+"
        max_words = 1
    matches = [match for match in re.finditer(pattern, text) if match.group().strip()]
    words = [match.group() for match in matches]
    spans = []
    for start, stop in match_longest(words, names, max_words):
        spans.append((matches[start].start(), matches[stop - 1].end()))
    found = [" ".join(text[start:end].split()) for start, end in spans]
    return found, spans


# IDs to the input of a model


def build_inputs(first, second, length, separator=HashTokenizer.separator):
    """Build [CLS] A [SEP], or [CLS] A [SEP] [SEP] B [SEP]. Cut the longer text first.

        first 10, second 3, room for 8 -> 5 and 3      first 10, second 10, room for 7 -> 4 and 3

    Args:
        first, second: int32 (n,), and int32 (m,) or None, token IDs.
        length: int, L, at least one word and the special tokens: 3, or 5 for a pair.
        separator: token IDs between the two.

    Returns:
        ids int32, L at most; and int, how many words were cut.
    """
    if second is None:
        separator = ()
        second = first[:0]
    if length < 3 + len(separator):
        raise ValueError(f"length: expected {3 + len(separator)} or more, got {length}.")
    num_first = len(first)
    num_second = len(second)
    num_cut = 0
    while num_first + num_second > length - 2 - len(separator):
        num_cut += 1
        if num_first > num_second:
            num_first -= 1
        else:
            num_second -= 1
    ids = np.concatenate([[CLS], first[:num_first], separator, second[:num_second], [SEP]])
    return ids.astype(np.int32), num_cut


class Window(NamedTuple):
    """Token IDs of a question and the words start .. stop-1 of its context.

    ids[offset] is word `start` of the context, ids[offset + 1] the next one.
    """

    ids: np.ndarray  # int32 (L at most,)
    offset: int
    start: int
    stop: int


def sliding_windows(question, context, length, stride):
    """Cut a long context into overlapping windows, each behind the question. [BERT run_squad.py]

    The windows have HashTokenizer's separator.

    Args:
        question, context: int32 (n,) and (m,), token IDs. A question takes half of the room at
            most.
        length: int, L, at least 8.
        stride: int, words from start to start. Every word of the context is in some window.

    Returns:
        list of Window.
    """
    # two words of question and context would not fit, or the windows would not move
    if length < 8 or stride < 1:
        raise ValueError("length, stride: expected at least 8 and 1, "
                         f"got {length} and {stride}.")
    # [CLS] question [SEP] [SEP] context [SEP]: four special tokens, three before the context
    question = question[:(length - 4) // 2]
    room = length - 4 - len(question)
    step = min(stride, room)  # a longer stride would leave words out
    windows = []
    start = 0
    while True:
        stop = min(start + room, len(context))
        ids, _ = build_inputs(question, context[start:stop], length)
        windows.append(Window(ids, len(question) + 3, start, stop))
        if stop == len(context):
            return windows
        start += step


def main():
    """Show the words, token IDs and hash codes of a text in three code formats."""
    text = "Play, plays; played!"
    for code_format in ("bits", "index", "sketch"):
        config = SimpleNamespace(code_format=code_format, bits=16, rows=50_000, hashes=3,
                                 buckets=500)
        tokenizer = HashTokenizer(config, hash=MD5())
        words, spans = tokenizer.split(text)
        ids = tokenizer.ids(words)
        codes = tokenizer.codes()
        print(f"\n   span  word    ID  {code_format}, {codes.dtype}")
        for (start, end), word, token_id in zip(spans, words, ids.tolist()):
            print(f"{start:3} {end:3}  {word:6} {token_id:3}  {codes[token_id].tolist()}")


if __name__ == "__main__":
    main()
