"""Rows of a user to Examples: texts or item sets, as infer.Predictor reads them.

    TextReader   a text, str; or a pair of texts, tuple
    SetReader    an item set: tuple of names, or str with tabs or else spaces between names

A reader has

    splitter     what finds the words of a text, or the names in a str
    read         (row) -> Example, or a ValueError: this is no such row
    list_notes   (Example) -> what a user has to know about how the row was read, list[str]
"""

import re
import threading
from typing import NamedTuple

import numpy as np

from data.sources import is_names
from support.common import blame
from tokenizer import MASK, MAX_UNKNOWN, SPECIALS, build_inputs, item_names

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
        has_masks: bool, whether [MASK] marks a word to predict. In fine-tuning it is ordinary text.
    """

    def __init__(self, tokenizer, length, columns, has_masks):
        self.tokenizer = tokenizer
        self.splitter = tokenizer.splitter
        self.length = length
        self.columns = columns
        self.has_masks = has_masks

    def read(self, row):
        texts = row if isinstance(row, (tuple, list)) else [row]
        are_texts = all(isinstance(text, str) for text in texts)
        if not are_texts or len(texts) != len(self.columns):
            kind = "a text" if len(self.columns) == 1 else "a tuple of texts"
            raise ValueError(f"expected {kind} ({', '.join(self.columns)}), got {row!r:.60}.")
        words = []
        text_ids = []
        for text in texts:
            found, ids, spans = self.split(text)
            words += found
            text_ids.append(ids)
        second = text_ids[1] if len(texts) == 2 else None
        ids, num_cut = build_inputs(text_ids[0], second, self.length)
        return Example(row, ids, words, num_cut, tuple(text_ids), spans)

    def split(self, text):
        """Return words list[str], their token IDs, and their spans up to the first [MASK].

            "a [MASK] cat" -> a [MASK] cat, [5, 4, 6], [(0, 1)]
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
        unknown = list_unknown(self.tokenizer, words)
        if len(unknown) <= MAX_UNKNOWN * len(words):
            return []
        return [f"the model knows nothing of {len(unknown):,} of {len(words):,} words; pre-train "
                "on such text, or with MD5"]


class SetReader:
    """Reads item sets, without the items that the model does not know.

    A set has one [MASK], and it comes first. The user may write none, one or several.

    Args:
        tokenizer: HashTokenizer.
        splitter: ItemNames of the known items, some of which have spaces.
        length: int, L.
        adds_mask: bool. False: the Example is of the items alone.
    """

    def __init__(self, tokenizer, splitter, length, adds_mask):
        self.tokenizer = tokenizer
        self.splitter = splitter
        self.length = length
        self.adds_mask = adds_mask

    def read(self, row):
        names = []
        if isinstance(row, str):
            names, _ = self.splitter.split(row)
        elif isinstance(row, (tuple, list)) and is_names(list(row)):
            names = item_names(list(row))
        names = [name for name in dict.fromkeys(names) if name != MASK_WORD]
        unknown = set(list_unknown(self.tokenizer, names))
        known = [name for name in names if name not in unknown]
        if not known:  # an empty set: heads refuse it, and its vector is 0
            return Example(row, np.array([MASK], np.int32), [], 0)
        ids = list_ids(self.tokenizer, known)
        if self.adds_mask:
            ids = np.append(np.int32(MASK), ids)
        num_cut = max(0, len(ids) - self.length)
        return Example(row, ids[:self.length], names, num_cut, shown=tuple(names))

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
    """Return read(row) of each row; the error of one of several rows has its number."""
    examples = []
    for number, row in enumerate(rows, 1):
        source = f"row {number:,}" if len(rows) > 1 else ""
        with blame(source):
            examples.append(read(row))
    return examples
