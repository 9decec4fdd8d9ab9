"""Text to words, words to token IDs, and token IDs to the hash codes that embeddings.py reads.

Sources:
    [HF] Xue & Aletras 2022, HashFormers
    [SB] Anderson et al. 2020, Superbloom
    [BERT] Devlin et al. 2019, and its released code
    [CM] Median is all you need, a proposal
Out of scope: the hash functions (hashing.py), corpora on disk (data/corpus.py).
Deviations:
    1. [HF] The BPE of the baselines lower-cases, as hashing does. The rest differs: it lower-cases
       each letter alone (Σ at the end of a word too), keeps decomposed accents, which NFC composes,
       and has pieces for a byte order mark and NUL, which separate words.
    2. [SB §4] Phrases falls back on pieces of byte-level BPE; the paper uses WordPiece.
Notation:
    V words   C code numbers of a word   T bits   L positions   N rows of a table
    k hash functions   c bits of a chunk   m hashes of an item   R buckets of a hash function or map
    G n-grams of a word at most
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

# Token IDs of the special tokens, which are never hashed. Words follow: in the order of the
# vocabulary, or as they first appear
SPECIALS = ("[PAD]", "[CLS]", "[SEP]", "[UNK]", "[MASK]")
PAD, CLS, SEP, UNK, MASK = range(5)
FIRST_WORD_ID = len(SPECIALS)

# Ways to split a text. The first two are those of hashing.split_words; "bpe" and "phrases" are
# learned from a corpus, see SUBWORDS; "items" finds names, see split_names
SPLITS = ("regex", "space", "bpe", "phrases", "items")

# Code formats: what a word's codes are, which arguments of HashTokenizer make them, and which
# embeddings read them
#
#   row        its token ID                               vocabulary              lookup
#   digest     m rows, its Bloom digest                   vocabulary, bloom_map   bloom
#   bits       T bits, eight in a byte                    hash                    add, proj, linear
#   chunks     T bits, in numbers of c bits               hash                    pool
#   index      one bucket, 0 .. N-1                       hash                    emb
#   sketch     k buckets, 0 .. R-1                        hash_seed, key          mean, median
#   weighted   k rows, 0 .. N-1, and one of importances   hash_seed, key          weighted
#   ngrams     G buckets at most, 1 .. N-1, then 0        hash_seed, key          ngram
FIXED = ("row", "digest")  # every word that is not in the vocabulary is [UNK]
HASHED = ("bits", "chunks", "index")


class HashTokenizer:
    """Map text to words, words to token IDs, and IDs to hash codes. [HF §3.1]

        words, spans = tokenizer.split("A cat")    a cat
        ids = tokenizer.ids(words)                 5 6
        codes = tokenizer.codes()[ids]             (2, C), which an embedding reads

    The word list has no parameters, and grows with the text: a new word gets the next free ID, and
    is hashed once. In the code formats of FIXED it is a vocabulary, and every other word is [UNK].

    Args:
        config: model.Config: the code format of its embedding, and the sizes of the codes.
        split: one of SPLITS.
        hash: instance of a class of HASHES.
        subwords: BPE or Phrases, for the splits of the same name, else None.
        vocabulary: list[str], the words by ID.
        bloom_map: BloomMap of the vocabulary.
        hash_seed, key: int, and str or None, for sketch_targets too.

    An argument that the code format does not need is ignored.
    """

    separator = (SEP, SEP)  # between two texts in build_inputs; a character tokenizer has another

    def __init__(self, config, split="regex", hash=None, subwords=None, vocabulary=None,
                 bloom_map=None, hash_seed=0, key=None):
        assert split in SPLITS, f"split: expected one of {SPLITS}, got {split!r}"
        assert (split in SUBWORDS) == (subwords is not None), f"subwords: not of {split}"
        self.config = config
        self.split_name = split
        self.hash = hash
        self.subwords = subwords
        self.bloom_map = bloom_map
        self.hash_seed = hash_seed
        self.key = key
        self.words = []  # their IDs are FIRST_WORD_ID, FIRST_WORD_ID + 1, ...
        self.id_of_word = {}  # word -> ID
        self.set_names([])
        self.is_fixed = config.code_format in FIXED
        # code_table (IDs, C) has row i for ID i. It is complete for a fixed vocabulary; else it
        # starts with the special tokens, and codes() appends the words that are missing
        if self.is_fixed:
            self.add_words(vocabulary)
            self.set_names(vocabulary)
            # a word listed twice would shift the IDs of all later words
            assert len(self.words) == len(vocabulary), "vocabulary: expected each word once"
            self.code_table = self.fixed_codes()
        else:
            # zeros, as Model has vectors for special tokens; hashed words give shape and dtype
            self.code_table = np.zeros_like(self.codes_of_words(["a"] * FIRST_WORD_ID))

    # Text to words, and words to token IDs

    def split(self, text):
        """Return words list[str] and spans list[(start, end)] in characters."""
        if self.subwords is not None:
            return self.subwords.split(text)
        if self.split_name == "items":
            return split_names(text, self.names, self.max_words)
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

    def set_names(self, names):
        """Set the known names, list[str], for the split "items": those of several words, too."""
        self.names = set(names)
        # subtle: not those of add_words, or a text would change how the next one is split
        self.max_words = max([1 + name.count(" ") for name in names], default=1)

    def ids_of_texts(self, texts):
        """Return the token IDs of each text, int32 (n,), faster than split and ids.

        It does not split at names of items.
        """
        if self.subwords is not None:
            return [self.ids(words) for words in self.subwords.split_texts(texts)]
        return [self.ids(list_words(text, self.split_name)) for text in texts]

    def is_known(self, words):
        """Return bool (V,): whether the model can tell a word from other unknown words.

        A fixed vocabulary reads other words as [UNK]. An LSH gives words without an n-gram of the
        corpus it was fitted to the same hash code, all zeros.
        """
        if self.is_fixed:
            known = [word in self.id_of_word for word in words]
        elif self.config.code_format in HASHED and isinstance(self.hash, NgramLSH):
            known = [len(self.hash.list_features(word)) > 0 for word in words]
        else:
            known = [True] * len(words)
        return np.array(known, bool)

    # Token IDs to hash codes

    def codes(self):
        """Return the codes of all IDs so far, (FIRST_WORD_ID + V, C). Each word is hashed once."""
        new_words = self.words[len(self.code_table) - FIRST_WORD_ID:]
        if new_words:
            self.code_table = np.concatenate([self.code_table, self.codes_of_words(new_words)])
        return self.code_table

    def codes_of_words(self, words):
        """Return the codes of words, integers (V, C), by the table of code formats above."""
        if self.is_fixed:
            return self.code_table[self.ids(words)]
        config = self.config
        code_format = config.code_format
        if code_format == "bits":  # the first bit of a byte is its highest
            return np.packbits(self.hash.bits(words, config.bits), axis=1)  # uint8 (V, ceil(T/8))
        if code_format == "chunks":
            bits = self.hash.bits(words, config.bits)  # (V, T)
            return bits_to_chunks(bits, config.chunk)  # int16 (V, ceil(T/c))
        if code_format == "index":
            codes = self.hash.index(words, config.rows)[:, None]  # (V, 1)
        elif code_format == "sketch":
            codes = self.sketch_targets(words)  # (V, k)
        elif code_format == "weighted":
            rows = sketch_index(words, config.hashes, config.rows, self.hash_seed, self.key)
            # k + 1 hash functions are independent: the last one chooses the row of importances
            more = sketch_index(words, config.hashes + 1, config.weights, self.hash_seed, self.key)
            codes = np.concatenate([rows, more[:, -1:]], 1)  # (V, k + 1)
        elif code_format == "ngrams":
            codes = ngram_index(words, config.rows, config.grams, self.hash_seed, self.key)
        else:
            raise ValueError(f"unknown code format {code_format!r}")
        return codes.astype(np.int32)

    def sketch_targets(self, words):
        """Return the k buckets of each word that hash-mlm predicts, int32 (V, k). [CM]

        The code format digest does not use them: its targets are the digests.
        """
        config = self.config
        buckets = sketch_index(words, config.hashes, config.buckets, self.hash_seed, self.key)
        return buckets.astype(np.int32)

    def fixed_codes(self):
        """Return the codes (FIRST_WORD_ID + V, C) of a fixed vocabulary, special tokens first."""
        if self.config.code_format == "row":
            ids = np.arange(FIRST_WORD_ID + len(self.words), dtype=np.int32)
            return ids[:, None]
        # digest: a map has R rows for its buckets, then a row for each special token
        bloom_map = self.bloom_map
        assert bloom_map.n_items == len(self.words), "bloom_map: not that of the vocabulary"
        rows = bloom_map.buckets + np.arange(FIRST_WORD_ID)  # of the special tokens
        special_codes = np.stack([rows] * bloom_map.m, 1)  # (FIRST_WORD_ID, m)
        return np.concatenate([special_codes, bloom_map.digest]).astype(np.int32)

    # Checkpoints

    def state(self):
        """Return plain types that load restores: all but the config and a growing word list."""
        # load looks hash_name up even where hash is None, so it must be a name in HASHES
        state = dict(split=self.split_name, hash_name="md5", hash=None, subwords=None,
                     hash_seed=self.hash_seed, key=self.key, vocabulary=None, bloom_map=None)
        if self.hash is not None:
            name_of_class = {hash_class: name for name, hash_class in HASHES.items()}
            state["hash_name"] = name_of_class[type(self.hash)]
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
        """Return the tokenizer of a state() and a model's config.

        Raises:
            Exception: The state is damaged or does not fit the model. The BPE library raises this
                type.
        """
        options = dict(state)
        hash_class = HASHES[options.pop("hash_name")]
        if options["hash"] is not None:
            options["hash"] = hash_class(**options["hash"])
        if options["subwords"] is not None:
            options["subwords"] = SUBWORDS[options["split"]](options["subwords"])
        if options["bloom_map"] is not None:
            options["bloom_map"] = BloomMap.load(options["bloom_map"])
        return cls(config, **options)


# Tokens that are learned from a corpus: BPE pieces, phrases


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
        json_text: str, the attribute `json` of another BPE.

    Attributes:
        units: list[str], the pieces by the library's own number.
    """

    def __init__(self, json_text):
        self.json = json_text
        self.tokenizer = Tokenizer.from_str(json_text)
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
        json_text: str, the attribute `json` of another Phrases.

    Attributes:
        units: list[str], phrases and then pieces, which are its tokens.
    """

    MAX_PIECES = 30_000  # BPE pieces among the tokens
    MAX_COUNTED = 10_000_000  # words and pairs in memory; beyond it the rarer half is dropped

    def __init__(self, json_text):
        state = json.loads(json_text)
        self.json = json_text
        self.bpe = BPE(state["bpe"])
        self.phrases = set(state["phrases"])
        # a piece spelled like a phrase is listed once, so both have one token ID
        pieces = [piece for piece in self.bpe.units if piece not in self.phrases]
        self.units = state["phrases"] + pieces

    @classmethod
    def train(cls, open_texts, size=1_000_000):
        """Learn `size` phrases and pieces from texts, as BPE.train does. They are read twice."""
        counts = Counter()
        for text in open_texts():
            words = list_words(text)
            counts.update(words)
            counts.update(" ".join(pair) for pair in zip(words, words[1:]))
            if len(counts) > cls.MAX_COUNTED:
                counts = Counter(dict(counts.most_common(cls.MAX_COUNTED // 2)))
        # `size` counts the BPE pieces too: learn them first, and fill the rest with phrases
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
        tokens = []
        token_spans = []
        for start, stop in match_longest(words, self.phrases, 2):
            phrase = " ".join(words[start:stop])
            first = spans[start][0]
            last = spans[stop - 1][1]
            if phrase in self.phrases:
                tokens.append(phrase)
                token_spans.append((first, last))
            else:  # one word, in pieces of BPE, which lower-cases
                pieces, inside = self.bpe.split(text[first:last])
                tokens.extend(pieces)
                token_spans.extend((first + a, first + b) for a, b in inside)
        return tokens, token_spans

    def split_texts(self, texts):
        """Return the tokens of each text, list[list[str]]."""
        return [self.split(text)[0] for text in texts]


SUBWORDS = {"bpe": BPE, "phrases": Phrases}


# Names of items


def match_longest(words, phrases, max_words):
    """Cut a list of words into known phrases, the longest first, and single words.

    Args:
        words: list[str].
        phrases: set or dict of str, words joined by one space.
        max_words: int, words of the longest phrase.

    Yields:
        (start, stop), the places of a phrase or a word in words.

    Example:
        new york city hall gives (0, 2) (2, 4) with the phrases "new york" and "city hall".
    """
    start = 0
    while start < len(words):
        stop = min(start + max_words, len(words))
        while stop > start + 1 and " ".join(words[start:stop]) not in phrases:
            stop -= 1
        yield start, stop
        start = stop


def split_names(text, names, max_words):
    """Split text into item names as they are written: case and punctuation stay.

    Args:
        text: str, one line. If it has tabs, they separate the names. Otherwise spaces do, and
            match_longest joins the words of a known name.
        names: set or dict of str, the known ones.
        max_words: int, words of the longest name.

    Returns:
        names list[str], inner spaces single, and spans list[(start, end)] in characters of text.
        Between tabs a span includes the spaces after the name.
    """
    if "\t" in text:
        spans = [match.span() for match in re.finditer(r"\S[^\t]*", text)]
    else:
        words = text.split()
        word_spans = [match.span() for match in re.finditer(r"\S+", text)]
        spans = []
        for start, stop in match_longest(words, names, max_words):
            spans.append((word_spans[start][0], word_spans[stop - 1][1]))
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
    first = list(first)
    if second is None:
        second = ()
        separator = ()
    second = list(second)
    room = length - 2 - len(separator)  # for words
    if room < 1:
        raise ValueError(f"length: expected {3 + len(separator)} or more, got {length}.")
    num_cut = max(0, len(first) + len(second) - room)
    for _ in range(num_cut):
        longer = first if len(first) > len(second) else second
        longer.pop()
    ids = [CLS, *first, *separator, *second, SEP]
    return np.array(ids, np.int32), num_cut


class Window(NamedTuple):
    """Token IDs of a question and the words start .. stop-1 of its context.

    ids[offset] is word `start` of the context, ids[offset + 1] the next one.
    """

    ids: np.ndarray  # int32 (L at most,)
    offset: int
    start: int
    stop: int


def sliding_windows(question, context, length):
    """Cut a long context into overlapping windows, each behind the question. [BERT run_squad.py]

    Every word of the context is in some window.

    Args:
        question, context: int32 (n,) and (m,), token IDs. A question is cut to half of the room.
        length: int, L, at least 8: two words of each.

    Returns:
        list of Window.
    """
    if length < 8:
        raise ValueError(f"length: expected 8 or more, got {length}.")
    # [CLS] question [SEP] [SEP] context [SEP]: four special tokens, three before the context
    question = question[:(length - 4) // 2]
    room = length - 4 - len(question)
    # words between starts, never more than room. run_squad.py uses 128 where L is 384
    stride = length // 3
    windows = []
    start = 0
    while True:
        stop = min(start + room, len(context))
        ids, _ = build_inputs(question, context[start:stop], length)
        windows.append(Window(ids, len(question) + 3, start, stop))
        if stop == len(context):
            return windows
        start += stride


def main():
    """Show the words of a text, with their spans, token IDs and 32 bits of MD5."""
    config = SimpleNamespace(code_format="bits", bits=32)
    tokenizer = HashTokenizer(config, hash=MD5())
    words, spans = tokenizer.split("Play, plays; played!")
    ids = tokenizer.ids(words)
    codes = tokenizer.codes()[ids]  # (V, 4), eight bits in each byte
    print("word    span      ID  bits")
    for word, span, token_id, bits in zip(words, spans, ids, np.unpackbits(codes, axis=1)):
        print(f"{word:6}  {str(span):8}  {token_id:2}  {''.join(map(str, bits))}")


if __name__ == "__main__":
    main()
