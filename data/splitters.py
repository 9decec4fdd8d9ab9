"""Text to words: one class for each --split.

Sources:
    [HF] Xue & Aletras 2022, HashFormers
    [SB] Anderson et al. 2020, Superbloom
Out of scope: what a word is, and how it is written when it is hashed (words.py), token IDs
    (tokenizer.py).
Deviations:
    1. [HF] The BPE of the baselines lower-cases, as words.py does. The rest differs: it lower-cases
       each letter alone (Σ at the end of a word too), and keeps decomposed accents, which NFC
       composes. It has pieces for invisible marks, which words.py drops, and for a byte order mark,
       U+200B and control characters, which separate words.
    2. [SB §4] Phrases falls back on pieces of byte-level BPE; the paper uses WordPiece. The pieces
       are of a word as it is written, with the invisible marks in it: so spans are right.

    split      words of "New York mayor!"
    regex      new  york  mayor  !
    space      new  york  mayor!
    items      New  York  mayor!            names as they are written, known ones with spaces too
    bpe        Ġnew  Ġyork  Ġmay  or  !     pieces that were learned from a corpus
    phrases    new york  mayor  !           phrases that were learned from a corpus, or pieces
"""

import json
import re
import unicodedata
from collections import Counter

from words import INVISIBLE, list_words, split_words


class Splitter:
    """Base class: what the split of a text into words has. A subclass has a method split.

    Attributes:
        name: str, its key in SPLITS.
        json: str, what it has learned from a corpus; None: nothing.
        use_workers: bool, other processes may split a corpus. Each job takes the splitter along.
    """

    json = None
    use_workers = True

    def split(self, text):
        """Return words list[str] and spans list[(start, end)] in characters."""
        raise NotImplementedError

    def split_texts(self, texts):
        """Return the words of each document, list[list[str]]: without spans some are faster."""
        return [self.split(text)[0] for text in texts]

    def show(self, word):
        """Return a word as people write it, on one line."""
        return word.replace("\n", "\\n")

    def state(self):
        """Return a dict of plain types: load_splitter(state) splits a corpus alike."""
        return dict(split=self.name, subwords=self.json)


# Words


class Words(Splitter):
    """Runs of letters or of symbols."""

    name = "regex"

    def split(self, text):
        return split_words(text, self.name)

    def split_texts(self, texts):
        return [list_words(text, self.name) for text in texts]


class SpacedWords(Words):
    """Runs of characters between white space."""

    name = "space"


# Names of items


class ItemNames(Splitter):
    """Names as they are written, whose case and punctuation stay.

    split reads what a user types, with the names that are known. split_texts reads the item sets of
    a corpus, before any name is known: each name once.

    Args:
        names: iterable of str, the known ones, of which some have spaces. state() lacks them.
    """

    name = "items"

    def __init__(self, names=()):
        self.names = set(names)
        num_words = [1 + name.count(" ") for name in self.names]
        self.max_words = max(num_words, default=1)

    def split(self, text):
        """Return the names in a text, list[str], and spans list[(start, end)].

        Args:
            text: str, one line. If it has tabs, they separate the names. Otherwise spaces do, and
                match_longest joins the words of a known name.

        Returns:
            Inner spaces of names are single. Between tabs a span includes the spaces after a name.

        Example:
            ItemNames(["Miles Davis"]).split("Miles  Davis jazz")[0]  # ["Miles Davis", "jazz"]
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
            name = clean_item(text[first:last])
            if name:  # it had visible characters
                names.append(name)
                spans.append((first, last))
        return names, spans

    def split_texts(self, documents):
        """Return the item_names of each set of a corpus, list[list[str]]."""
        return list(map(item_names, documents))


def item_names(document):
    """Return the distinct names of a set of a corpus, in order.

    Args:
        document: list of str, int or None, or a str that ItemNames splits.
    """
    names = []
    if isinstance(document, str):
        names, _ = ItemNames().split(document)
    else:
        for part in document:
            name = "" if part is None else clean_item(str(part))
            if name:
                names.append(name)
    return list(dict.fromkeys(names))


def clean_item(text):
    """Return the name of an item: clean_name of a text, whose inner spaces become single."""
    return " ".join(clean_name(text).split())


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


def clean_name(text):
    """Return a name in NFC, without what is invisible in it.

    That is white space, U+FEFF and U+200B at its ends, and anywhere soft hyphens and the INVISIBLE
    of words.py. Names of items, classes and columns that look alike are equal then. U+FEFF is a
    byte-order mark, which stands in the middle of joined files. U+200B is a space of width 0.
    """
    if not text.isascii():  # as most names are
        text = INVISIBLE.sub("", text).replace("\u00ad", "")
        text = unicodedata.normalize("NFC", text)
    return re.sub(r"^[\s\ufeff\u200b]+|[\s\ufeff\u200b]+$", "", text)


# Pieces and phrases that are learned from a corpus


class BPE(Splitter):
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
    use_workers = False  # its library uses all cores

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
    def train(cls, texts, size=50_000):
        """Learn pieces from texts.

        Args:
            texts: iterable of str.
            size: int, number of pieces, at least 256 for the bytes.
        """
        tokenizer = import_tokenizers().ByteLevelBPETokenizer(add_prefix_space=True, lowercase=True)
        encodable = map(make_encodable, texts)
        # a pair of pieces that occurs less than five times stays apart
        tokenizer.train_from_iterator(
            cut_long_words(encodable), size, min_frequency=5, show_progress=False)
        return cls(tokenizer.to_str())

    def split(self, text):
        """Return pieces list[str] and spans list[(start, end)], with the space before a word."""
        encoding = self.tokenizer.encode(make_encodable(text))
        return encoding.tokens, encoding.offsets

    def split_texts(self, texts):
        """Return the pieces of each text, list[list[str]], without spans, on all cores."""
        encodable = list(map(make_encodable, texts))
        texts_pieces = []
        for encoding in self.tokenizer.encode_batch_fast(encodable):  # it has numbers only
            texts_pieces.append([self.units[i] for i in encoding.ids])
        return texts_pieces

    def show(self, word):
        # it writes the bytes of " café" as "ĠcafÃ©"
        return super().show(import_tokenizers().decoders.ByteLevel().decode([word]))


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


def cut_long_words(texts):
    """Yield each text with a space after 1,000 letters of a word.

    The time for a word grows with the square of its length.
    """
    for text in texts:
        yield re.sub(r"\S{1000}", r"\g<0> ", text)


class Phrases(Splitter):
    """The most frequent words and pairs of words, and BPE pieces for the rest. [SB §4]

    The longest match comes first. A vocabulary of a million contains many names: "new york" is one
    token.

    Args:
        json_text: str, the attribute `json` of another Phrases.

    Attributes:
        units: list[str], phrases and then pieces, which are its tokens.

    Raises:
        ValueError: json_text is damaged.
    """

    name = "phrases"
    use_workers = False  # a million phrases would go along with each job
    MAX_PIECES = 30_000  # BPE pieces among the tokens
    MAX_COUNTED = 10_000_000  # words and pairs in memory; beyond it the rarer half is dropped

    def __init__(self, json_text):
        try:
            state = json.loads(json_text)
            phrases = list(state["phrases"])
            pieces_json = state["bpe"]
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"phrases: could not be read ({error!r})") from error
        self.json = json_text
        self.bpe = BPE(pieces_json)
        self.phrases = set(phrases)
        # a piece spelled like a phrase is listed once, so both have one token ID
        pieces = [piece for piece in self.bpe.units if piece not in self.phrases]
        self.units = phrases + pieces

    @classmethod
    def train(cls, texts, size):
        """Learn `size` phrases and pieces from texts, as BPE.train does.

        Texts are read twice: a list, or another iterable that begins anew each time.
        """
        assert iter(texts) is not texts, "texts: expected what can be read twice, such as a list"
        counts = cls.count_phrases(texts)
        # `size` counts the BPE pieces too: learn them first, and fill the rest with phrases
        bpe = BPE.train(texts, min(cls.MAX_PIECES, size))
        num_phrases = max(size - len(bpe.units), 0)
        phrases = [phrase for phrase in counts if counts[phrase] > 1]
        phrases.sort(key=lambda phrase: (-counts[phrase], phrase))
        state = dict(phrases=phrases[:num_phrases], bpe=bpe.json)
        return cls(json.dumps(state))

    @classmethod
    def count_phrases(cls, texts):
        """Return how often each word and each pair of words occurs, a Counter."""
        counts = Counter()
        for text in texts:
            words = list_words(text)
            counts.update(words)
            pairs = zip(words, words[1:])
            counts.update(map(" ".join, pairs))
            if len(counts) > cls.MAX_COUNTED:
                counts = Counter(dict(counts.most_common(cls.MAX_COUNTED // 2)))
        return counts

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

    def show(self, word):
        if word in self.phrases:
            return super().show(word)
        return self.bpe.show(word)


# Splitters by name

SUBWORDS = {"bpe": BPE, "phrases": Phrases}  # learned from a corpus
SPLITS = {"regex": Words, "space": SpacedWords, **SUBWORDS, "items": ItemNames}


def load_splitter(state):
    """Return the splitter of a state(). A ValueError says what is damaged."""
    split = state.get("split")
    if split not in SPLITS:
        raise ValueError(f"split: expected one of {[*SPLITS]}, got {split!r}.")
    if split in SUBWORDS:
        return SUBWORDS[split](state.get("subwords"))
    return SPLITS[split]()
