"""Rows of a user to Examples: texts or item sets, as infer.Predictor reads them.

    TextReader   a text, str; or a pair of texts, tuple
    SetReader    an item set: tuple of names, or str with tabs or else spaces between names

A reader has

    splitter          what finds the words of a text, or the names in a str
    read              (row) -> Example for the model's head, or a ValueError: this is no such row
    read_for_vector   (row) -> Example for Predictor.embed
    list_notes        (Example) -> what a user has to know about how it was read, list[str]
"""

import re
import threading
from typing import NamedTuple

import numpy as np

from data.sources import is_names
from data.splitters import ItemNames, item_names
from support.common import blame
from tokenizer import MASK, MAX_UNKNOWN, SPECIALS, build_inputs

MASK_WORD = SPECIALS[MASK]
# subtle: held while the tokenizer's list of words grows, or is read. Threads may share a Predictor
LOCK = threading.Lock()


class Example(NamedTuple):
    """A row as a model reads it."""

    row: object  # str or tuple, as the user has it
    ids: np.ndarray  # int32 (L,), token IDs with special tokens
    words: list  # str, those of the text or of both texts, [MASK] is one; or the names of a set
    num_cut: int  # words or items that were cut off, as they did not fit
    text_ids: tuple = ()  # for each text its token IDs, list of int: all of them
    spans: tuple = ()  # (start, end) of each word of the last text, in characters
    shown: tuple = ()  # the names of a set, which are not proposed for its [MASK]


class TextReader:
    """Reads texts, or pairs of texts.

    Args:
        tokenizer: HashTokenizer.
        length: int, L.
        columns: list[str], the name of each text of a row.
        has_masks: bool, whether [MASK] in a text marks a word to predict.
    """

    def __init__(self, tokenizer, length, columns, has_masks):
        self.tokenizer = tokenizer
        self.splitter = tokenizer.splitter
        self.length = length
        self.columns = columns
        self.has_masks = has_masks

    def read(self, row):
        """Return the Example of a row: [CLS] words [SEP], and of a pair both texts."""
        texts = row
        if not isinstance(row, (tuple, list)):
            texts = [row]
        are_texts = all(isinstance(text, str) for text in texts)
        if not are_texts or len(texts) != len(self.columns):
            raise ValueError(f"expected a text or a tuple of texts ({', '.join(self.columns)}), "
                             f"got {row!r:.60}.")
        words = []
        text_ids = []
        for text in texts:
            found, ids, spans = self.split(text)
            words += found
            text_ids.append(ids)
        second = None
        if len(texts) == 2:
            second = text_ids[1]
        ids, num_cut = build_inputs(text_ids[0], second, self.length)
        return Example(row, ids, words, num_cut, tuple(text_ids), spans)

    read_for_vector = read

    def split(self, text):
        """Return words list[str], their token IDs list, and their spans up to the first [MASK].

            "a [MASK] cat"  ->  a [MASK] cat   [5, 4, 6]   [(0, 1)]
        """
        first = text
        others = []
        if self.has_masks:
            first, *others = re.split(r" ?\[MASK\]", text)
        words, spans = self.splitter.split(first)
        ids = list_ids(self.tokenizer, words).tolist()
        for part in others:
            # subtle: BPE adds a space to the start of a text, here to a line break instead of part.
            # Both become pieces that start at 0, and are dropped; other splits give no word there
            more, places = self.splitter.split("\n" + part)
            more = [word for word, (start, _) in zip(more, places) if start > 0]
            words += [MASK_WORD, *more]
            ids += [MASK, *list_ids(self.tokenizer, more).tolist()]
        return words, ids, spans

    def list_notes(self, example):
        if not example.words:
            return ["the text has no words"]
        words = [word for word in example.words if word != MASK_WORD]
        num_unknown = len(list_unknown(self.tokenizer, words))
        if num_unknown <= MAX_UNKNOWN * len(words):
            return []
        return [f"the model knows nothing of {num_unknown:,} of {len(words):,} words; pre-train on "
                "such text, or with MD5"]


class SetReader:
    """Reads item sets, without the items that the model does not know.

    Args:
        tokenizer: HashTokenizer.
        length: int, L.
        items: list[str], the known ones, of which some have spaces.
    """

    def __init__(self, tokenizer, length, items):
        self.tokenizer = tokenizer
        self.splitter = ItemNames(items)
        self.length = length

    def read(self, row):
        """Return the Example of a set and one [MASK], for an item that is missing.

        The user may write no [MASK], one or several.
        """
        return self.read_behind([MASK], row)

    def read_for_vector(self, row):
        """Return the Example of a set alone."""
        return self.read_behind([], row)

    def read_behind(self, first, row):
        """Return the Example of a set, whose token IDs follow those in first, list of int."""
        names = []
        document = row
        if isinstance(row, tuple):
            document = list(row)
        if isinstance(document, str):
            names, _ = self.splitter.split(document)
        elif is_names(document):
            names = item_names(document)
        names = [name for name in dict.fromkeys(names) if name != MASK_WORD]
        unknown = set(list_unknown(self.tokenizer, names))
        known = [name for name in names if name not in unknown]
        if not known:  # an empty set: a head refuses it, and its vector is 0
            return Example(row, np.array([MASK], np.int32), [], 0)
        ids = first + list_ids(self.tokenizer, known).tolist()
        num_cut = max(0, len(ids) - self.length)
        ids = np.array(ids[:self.length], np.int32)
        return Example(row, ids, names, num_cut, shown=tuple(names))

    def list_notes(self, example):
        unknown = list_unknown(self.tokenizer, example.words)
        if not unknown:
            return []
        return [f"unknown items were left out: {', '.join(unknown)}"]


def list_ids(tokenizer, words):
    """Return the token IDs of words, int32 (n,). The tokenizer may add them to its list."""
    with LOCK:
        return tokenizer.ids(words)


def list_unknown(tokenizer, words):
    """Return the words that the model cannot tell from other unknown words, list[str]."""
    is_known = tokenizer.is_known(words)
    return [word for word, is_good in zip(words, is_known) if not is_good]


def read_all(read, rows):
    """Return the Example of each row, read(row), or the row itself if it is an Example already.

    The error of one of several rows has its number.
    """
    examples = []
    for number, row in enumerate(rows, 1):
        source = ""
        if len(rows) > 1:
            source = f"row {number:,}"
        with blame(source):
            if not isinstance(row, Example):
                row = read(row)
        examples.append(row)
    return examples
