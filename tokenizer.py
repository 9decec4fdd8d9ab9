"""Text to words, words to token IDs, and a table of the codes of all token IDs.

Sources:
    [HF] Xue & Aletras 2022, HashFormers
Out of scope: how a text is split (data/splitters.py), words to codes (data/coders.py), corpora on
    disk (data/corpus.py).
Notation:
    V words of the word list   n words of a text   C code numbers of a word   L positions
"""

import numpy as np

from data.coders import CODERS, SketchCoder
from data.splitters import Words, load_splitter
from hashing import check_words

# Token IDs of the special tokens, which are never hashed. Words follow: in the order of the
# vocabulary, or as they first appear
SPECIALS = ("[PAD]", "[CLS]", "[SEP]", "[UNK]", "[MASK]")
PAD, CLS, SEP, UNK, MASK = range(5)
FIRST_WORD_ID = len(SPECIALS)


class HashTokenizer:
    """Map text to words, words to token IDs, and IDs to hash codes. [HF §3.1]

        tokenizer = make_tokenizer(Config(bits=128), hash=MD5())
        words, spans = tokenizer.split("A cat")    a cat
        ids = tokenizer.ids(words)                 5 6
        codes = tokenizer.codes()[ids]             (2, C), which an embedding reads

    The word list has no parameters, and grows with the text: a new word gets the next free ID, and
    is hashed once. With a vocabulary the list is fixed: every other word is [UNK].

    Args:
        coder: instance of a class of data.coders.CODERS, which hashes words.
        splitter: instance of a class of data.splitters.SPLITS, which finds the words of a text.
        target_coder: instance of such a class, whose codes the objective hash-mlm predicts: coder
            itself if coder.is_predicted, else a SketchCoder.

    Raises:
        ValueError: A word is twice in the vocabulary of coder.
    """

    separator = (SEP, SEP)  # between two texts in build_inputs; a character tokenizer has another

    def __init__(self, coder, splitter, target_coder):
        self.coder = coder
        self.splitter = splitter
        self.target_coder = target_coder
        self.words = []  # their IDs are FIRST_WORD_ID, FIRST_WORD_ID + 1, ...
        self.id_of_word = {}
        # (IDs, C): row i is of ID i. codes() appends the words that are missing
        self.code_table = coder.special_codes(FIRST_WORD_ID)
        self.is_fixed = coder.vocabulary is not None
        if self.is_fixed:
            self.add_words(coder.vocabulary)
            # a word listed twice would shift the IDs of all later words
            if len(self.words) != len(coder.vocabulary):
                raise ValueError("vocabulary: expected each word once.")

    def split(self, text):
        """Return words list[str] and spans list[(start, end)] in characters."""
        return self.splitter.split(text)

    def ids(self, words):
        """Return the token IDs of words, int32 (n,).

        subtle: new words join the word list first. If the list is fixed, they are UNK.
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

    def codes(self):
        """Return the codes of all IDs so far, (FIRST_WORD_ID + V, C). Each word is hashed once."""
        num_hashed = len(self.code_table) - FIRST_WORD_ID
        new_words = self.words[num_hashed:]
        if new_words:
            self.code_table = np.concatenate([self.code_table, self.coder.codes(new_words)])
        return self.code_table

    def is_known(self, words):
        """Return bool (n,): whether the model can tell a word from other unknown words."""
        if self.is_fixed:
            return np.array([word in self.id_of_word for word in words], bool)
        return self.coder.knows(words)

    def state(self):
        """Return one dict of plain types, from which load gives each of the three parts its fields.

        A field of both coders, such as hash_seed, has one value, as both are made from the same
        settings. A word list that grows is not in it: load begins with an empty one.
        """
        return self.splitter.state() | self.target_coder.state() | self.coder.state()

    @staticmethod
    def load(state, config):
        """Return the tokenizer of a state() and a model's config.

        Raises:
            ValueError: A part is missing, of an unknown kind, or damaged.
        """
        splitter = load_splitter(state)
        coder = CODERS[config.code_format].load(state, config)
        target_coder = choose_target_coder(coder, state, config)
        return HashTokenizer(coder, splitter, target_coder)


def make_tokenizer(config, splitter=None, hash_seed=0, key=None, hash=None, vocabulary=None,
                   bloom_map=None):
    """Return the tokenizer of a model.

    Args:
        config: model.Config: the code format of its embedding, and the sizes of the codes.
        splitter: as for HashTokenizer; None: Words.
        hash_seed, key: int, and str or None, as in hashing.sketch_index.
        hash, vocabulary, bloom_map: parts of a data.coders.Coder. Those that the code format does
            not have are ignored.
    """
    if splitter is None:
        splitter = Words()
    settings = vars(config) | dict(
        hash_seed=hash_seed, key=key, hash=hash, vocabulary=vocabulary, bloom_map=bloom_map)
    coder = CODERS[config.code_format].from_settings(settings)  # takes those that are its fields
    target_coder = choose_target_coder(coder, settings, config)
    return HashTokenizer(coder, splitter, target_coder)


def choose_target_coder(coder, settings, config):
    """Return the coder that hash-mlm predicts: coder itself, or a SketchCoder.

    settings: dict, with hash_seed and key, from which coder was made.
    """
    if coder.is_predicted:
        return coder
    return SketchCoder.load(settings, config)


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
