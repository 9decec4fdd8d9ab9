"""Text to words, words to token IDs, and a table of the codes of all token IDs.

Sources:
    [HF] Xue & Aletras 2022, HashFormers
    [SB] Anderson et al. 2020, Superbloom
Out of scope: words to codes (data/coders.py), corpora on disk (data/corpus.py).
Deviations:
    1. [HF] The BPE of the baselines lower-cases, as hashing does. The rest differs: it lower-cases
       each letter alone (Σ at the end of a word too), keeps decomposed accents, which NFC composes,
       and has pieces for a byte order mark and NUL, which separate words.
    2. [SB §4] Phrases falls back on pieces of byte-level BPE; the paper uses WordPiece.
Notation:
    V words   C code numbers of a word   L positions
Demo: python tokenizer.py
"""

import inspect
import json
import re
import unicodedata
from collections import Counter

import numpy as np

from bloom import BloomMap
from data.coders import CODERS, BitCoder, SketchCoder
from hashing import HASHES, MD5, check_words, list_words, split_words

# Token IDs of the special tokens, which are never hashed. Words follow: in the order of the
# vocabulary, or as they first appear
SPECIALS = ("[PAD]", "[CLS]", "[SEP]", "[UNK]", "[MASK]")
PAD, CLS, SEP, UNK, MASK = range(5)
FIRST_WORD_ID = len(SPECIALS)
MAX_UNKNOWN = 0.1  # share of the words of a text that may be unknown; above it users are told


# Text to words. A splitter is an instance of a class with
#
#   name            its key in SPLITS, which stands behind the last of them
#   json            str, what it has learned from a corpus; None: nothing
#   split           (text) -> words list[str] and spans list[(start, end)] in characters
#   split_texts     (texts) -> the words of each, list[list[str]], faster and without spans


class Words:
    """The split "regex": runs of letters or of symbols."""

    name = "regex"
    json = None

    def split(self, text):
        return split_words(text, self.name)

    def split_texts(self, texts):
        return [list_words(text, self.name) for text in texts]


class SpacedWords(Words):
    """The split "space": runs of characters between white space."""

    name = "space"


# Words to token IDs to codes


class HashTokenizer:
    """Map text to words, words to token IDs, and IDs to hash codes. [HF §3.1]

        tokenizer = make_tokenizer(Config(bits=128), hash=MD5())
        words, spans = tokenizer.split("A cat")    a cat
        ids = tokenizer.ids(words)                 5 6
        codes = tokenizer.codes()[ids]             (2, C), which an embedding reads

    The word list has no parameters, and grows with the text: a new word gets the next free ID, and
    is hashed once.

    Args:
        coder: instance of a class of data.coders.CODERS, which hashes words.
        splitter: instance of a class of SPLITS, which finds the words of a text.
        targets: SketchCoder, whose codes hash-mlm predicts unless coder.is_predicted.
    """

    is_fixed = False  # whether new words are unknown, instead of added to the list
    separator = (SEP, SEP)  # between two texts in build_inputs; a character tokenizer has another

    def __init__(self, coder, splitter, targets):
        self.coder = coder
        self.splitter = splitter
        self.targets = targets
        self.words = []  # their IDs are FIRST_WORD_ID, FIRST_WORD_ID + 1, ...
        self.id_of_word = {}
        # (IDs, C): row i is of ID i. codes() appends the words that are missing
        self.code_table = coder.special_codes(FIRST_WORD_ID)

    def split(self, text):
        """Return words list[str] and spans list[(start, end)] in characters."""
        return self.splitter.split(text)

    def ids(self, words):
        """Return the token IDs of words, int32 (V,).

        subtle: it first adds new words to the word list, unless that is fixed. They are UNK then.
        """
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

    def ids_of_texts(self, texts):
        """Return the token IDs of each text, int32 (n,), faster than split and ids."""
        return [self.ids(words) for words in self.splitter.split_texts(texts)]

    def is_known(self, words):
        """Return bool (V,): whether the model can tell a word from other unknown words."""
        return self.coder.knows(words)

    def codes(self):
        """Return the codes of all IDs so far, (FIRST_WORD_ID + V, C). Each word is hashed once."""
        new_words = self.words[len(self.code_table) - FIRST_WORD_ID:]
        if new_words:
            self.code_table = np.concatenate([self.code_table, self.coder.codes(new_words)])
        return self.code_table

    def state(self):
        """Return a dict of plain types: what load needs besides the sizes in a model's config.

        A word list that grows is not in it: load begins with an empty one.
        """
        coder = self.coder
        state = dict(
            split=self.splitter.name, subwords=self.splitter.json,
            hash_seed=self.targets.hash_seed, key=self.targets.key,
            hash_name=None, hash=None, vocabulary=coder.vocabulary, bloom_map=None)
        if coder.hash is not None:
            state["hash"] = coder.hash.state()
            for name, hash_class in HASHES.items():
                if type(coder.hash) is hash_class:
                    state["hash_name"] = name
        if coder.bloom_map is not None:
            state["bloom_map"] = coder.bloom_map.state()
        return state

    @staticmethod
    def load(state, config):
        """Return the tokenizer of a state() and a model's config.

        Raises:
            ValueError: A part is missing, of an unknown kind, or damaged.
        """
        for name in ("split", "subwords", "hash_seed", "key", "hash_name", "hash", "vocabulary",
                     "bloom_map"):
            if name not in state:
                raise ValueError(f"tokenizer: expected {name}, got {', '.join(state)}.")
        if state["split"] not in SPLITS:
            raise ValueError(f"split: expected one of {[*SPLITS]}, got {state['split']!r}.")
        subwords = None
        if state["split"] in SUBWORDS:
            subwords = SUBWORDS[state["split"]](state["subwords"])
        hash = None
        if state["hash"] is not None:  # if it is None, older checkpoints have a name all the same
            hash = load_hash(state["hash_name"], state["hash"])
        bloom_map = None
        if state["bloom_map"] is not None:
            bloom_map = BloomMap.load(state["bloom_map"])
        return make_tokenizer(
            config, state["split"], subwords, hash_seed=state["hash_seed"], key=state["key"],
            hash=hash, vocabulary=state["vocabulary"], bloom_map=bloom_map)


def load_hash(name, state):
    """Return the hash of a name and a state(); ValueError for an unknown name or other fields."""
    if name not in HASHES:
        raise ValueError(f"hash: expected one of {[*HASHES]}, got {name!r}.")
    expected = inspect.signature(HASHES[name]).parameters
    if set(state) != set(expected):
        raise ValueError(f"hash {name}: expected {', '.join(expected)}, got {', '.join(state)}.")
    return HASHES[name](**state)


class FixedTokenizer(HashTokenizer):
    """The words are those of the coder's vocabulary, and every other word is [UNK]."""

    is_fixed = True

    def __init__(self, coder, splitter, targets):
        super().__init__(coder, splitter, targets)
        self.add_words(coder.vocabulary)
        # a word listed twice would shift the IDs of all later words
        assert len(self.words) == len(coder.vocabulary), "vocabulary: expected each word once"

    def is_known(self, words):
        return np.array([word in self.id_of_word for word in words], bool)


def make_tokenizer(config, split="regex", subwords=None, hash_seed=0, key=None, hash=None,
                   vocabulary=None, bloom_map=None):
    """Return the tokenizer of a model.

    Args:
        config: model.Config: the code format of its embedding, and the sizes of the codes.
        split, subwords: as in make_splitter.
        hash_seed, key: int, and str or None, as in hashing.sketch_index.
        hash, vocabulary, bloom_map: parts of a data.coders.Coder. Those that the code format does
            not have are ignored.
    """
    if config.code_format not in CODERS:
        raise ValueError(f"unknown code format {config.code_format!r}")
    settings = vars(config) | dict(
        hash_seed=hash_seed, key=key, hash=hash, vocabulary=vocabulary, bloom_map=bloom_map)
    coder = CODERS[config.code_format].choose(settings)
    splitter = make_splitter(split, subwords)
    targets = SketchCoder.choose(settings)
    if coder.vocabulary is not None:
        return FixedTokenizer(coder, splitter, targets)
    return HashTokenizer(coder, splitter, targets)


# Tokens that are learned from a corpus: BPE pieces, phrases


def make_encodable(text):
    """Return text with each character that the BPE library cannot read replaced by another."""
    # İ lower-cases to two characters, which would shift all later spans; lone surrogates are not
    # UTF-8, and become ?
    return text.encode("utf-8", "replace").decode().replace("İ", "i")


def import_tokenizers():
    """Return the `tokenizers` library. Nothing but BPE needs it, and some systems have none."""
    try:
        import tokenizers
    except ImportError as error:
        raise ValueError("--split bpe, phrases: requires the package tokenizers, not found. "
                         "Install it, or use --split regex.") from error
    return tokenizers


class BPE:
    """Byte-level byte-pair encoding by the `tokenizers` library, which the baselines use.

    A piece that opens a word starts with "Ġ", the byte-level alphabet's sign for a space. Every
    text can be written in pieces, so there is no unknown piece.

    Args:
        json_text: str, the attribute `json` of another BPE.

    Attributes:
        units: list[str], the pieces by the library's own number.

    Raises:
        ValueError: json_text is damaged.
    """

    name = "bpe"

    def __init__(self, json_text):
        self.json = json_text
        library = import_tokenizers()
        try:
            self.tokenizer = library.Tokenizer.from_str(json_text)
        except Exception as error:  # the library has no type of its own
            raise ValueError(f"pieces of BPE: could not be read ({error})") from error
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
        tokenizer = import_tokenizers().ByteLevelBPETokenizer(add_prefix_space=True, lowercase=True)
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

    name = "phrases"
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
                for a, b in inside:
                    token_spans.append((first + a, first + b))
        return tokens, token_spans

    def split_texts(self, texts):
        """Return the tokens of each text, list[list[str]]."""
        return [self.split(text)[0] for text in texts]


# Names of items


def clean_name(text):
    """Return a name in NFC, without white space, U+FEFF and U+200B at its ends.

    Names of items, classes and columns that look alike are equal then. U+FEFF is a byte-order mark,
    which stands in the middle of joined files. U+200B is a space of width 0.
    """
    text = unicodedata.normalize("NFC", text)
    return re.sub(r"^[\s\ufeff\u200b]+|[\s\ufeff\u200b]+$", "", text)


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


class ItemNames:
    """The split "items": names as they are written, whose case and punctuation stay.

    Args:
        names: iterable of str, the known ones, of which some have spaces.
    """

    name = "items"
    json = None

    def __init__(self, names=()):
        self.names = set(names)
        self.max_words = 1
        for name in self.names:
            self.max_words = max(self.max_words, 1 + name.count(" "))

    def split(self, text):
        """Return the names in a text, list[str], and spans list[(start, end)].

        Args:
            text: str, one line. If it has tabs, they separate the names. Otherwise spaces do, and
                match_longest joins the words of a known name.

        Returns:
            Inner spaces of names are single. Between tabs a span includes the spaces after a name.
        """
        pattern = r"\S+"
        max_words = self.max_words
        if "\t" in text:
            pattern = r"\S[^\t]*"
            max_words = 1
        matches = list(re.finditer(pattern, text))
        parts = [clean_name(match[0]) for match in matches]
        names = []
        spans = []
        for start, stop in match_longest(parts, self.names, max_words):
            first = matches[start].start()
            last = matches[stop - 1].end()
            names.append(" ".join(clean_name(text[first:last]).split()))
            spans.append((first, last))
        return names, spans

    def split_texts(self, texts):
        """Return the item_names of each set of a corpus, list[list[str]]."""
        return [item_names(text) for text in texts]


def item_names(document):
    """Return the distinct names of a set of a corpus, in order.

    Args:
        document: list of str, int or None, or a str that ItemNames splits.
    """
    if isinstance(document, str):
        names, _ = ItemNames().split(document)
    else:
        names = [" ".join(clean_name(str(part)).split()) for part in document if part is not None]
    return [name for name in dict.fromkeys(names) if name]


SUBWORDS = {"bpe": BPE, "phrases": Phrases}  # learned from a corpus
SPLITS = {"regex": Words, "space": SpacedWords, **SUBWORDS, "items": ItemNames}


def make_splitter(split, subwords=None):
    """Return the splitter of a name.

    Args:
        split: str, a key of SPLITS.
        subwords: BPE or Phrases, which have learned from a corpus, if split is the name of theirs.
    """
    assert split in SPLITS, f"split: expected one of {[*SPLITS]}, got {split!r}"
    assert (split in SUBWORDS) == (subwords is not None), f"subwords: not of {split}"
    if subwords is not None:
        return subwords
    return SPLITS[split]()


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


def main():
    """Show the words of a text, with their spans, token IDs and 32 bits of MD5."""
    tokenizer = HashTokenizer(BitCoder(hash=MD5(), bits=32), Words(), targets=None)
    words, spans = tokenizer.split("Play, plays; played!")
    ids = tokenizer.ids(words)
    codes = tokenizer.codes()[ids]  # (V, 4), eight bits in each byte
    print("word    span      ID  bits")
    for word, span, token_id, bits in zip(words, spans, ids, np.unpackbits(codes, axis=1)):
        print(f"{word:6}  {str(span):8}  {token_id:2}  {''.join(map(str, bits))}")


if __name__ == "__main__":
    main()
