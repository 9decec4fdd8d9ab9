"""Rows of a user to Examples: texts or item sets, as infer.Predictor reads them.

    TextReader   a text, str; or a pair of texts, tuple
    SetReader    an item set: tuple of names, or str with tabs or else spaces between names

A row is what the user has. An Example is what the model reads, and is made of a row once:

    "The [MASK] sat"  ->  ids [CLS] the [MASK] sat [SEP]     words the [MASK] sat
"""

import re
from typing import NamedTuple

import numpy as np

from data.codes import MAX_UNKNOWN
from data.sources import is_names
from data.splitters import ItemNames, item_names
from support.common import InputError, blame
from support.runner import list_ids
from tokenizer import MASK, SPECIALS, build_inputs

MASK_WORD = SPECIALS[MASK]


class Example(NamedTuple):
    """A row as a model reads it."""

    row: object  # str or tuple, as the user has it
    ids: np.ndarray  # int32 (L,), token IDs with special tokens
    words: list  # str, those of the text or of both texts, [MASK] is one; or the names of a set
    num_cut: int  # words or items that were cut off, as they did not fit
    text_ids: tuple = ()  # for each text its token IDs, list of int: all of them
    spans: tuple = ()  # (start, end) of each word of the last text, in characters
    shown: tuple = ()  # int, where a set's names stand in `items`: not proposed for its [MASK]


def read_all(read, rows):
    """Return the Example of each row, read(row). The error of one of several has its number."""
    examples = []
    for number, row in enumerate(rows, 1):
        source = ""
        if len(rows) > 1:
            source = f"row {number:,}"
        with blame(source):
            examples.append(read(row))
    return examples


class Reader:
    """Base class: rows to Examples. A ValueError says that a row cannot be read.

    A subclass has

        read         (row) -> Example for the model's head
        list_notes   (Example) -> what a user has to know about how it was read, list[str]
        noun         what messages call a word of it

    Args:
        tokenizer: HashTokenizer.
        length: int, L.
        may_cut: bool, read the start of a row that is too long.
    """

    def __init__(self, tokenizer, length, may_cut):
        self.tokenizer = tokenizer
        self.splitter = tokenizer.splitter
        self.length = length
        self.may_cut = may_cut

    def read_for_vector(self, row):
        """Return the Example of a row for its vector: that of read, unless a subclass says."""
        return self.read(row)

    def read_word(self, text):
        """Return the one word, or item, of a text, as the tokenizer writes it."""
        words, _ = self.splitter.split(text)
        if len(words) != 1 or not self.tokenizer.is_known(words)[0]:
            raise InputError(f"expected one {self.noun} that this model knows, got {text!r:.60}.")
        return words[0]

    def list_unknown(self, words):
        """Return the words that the model cannot tell from other unknown words, list[str]."""
        unknown = []
        for word, is_known in zip(words, self.tokenizer.is_known(words)):
            if not is_known:
                unknown.append(word)
        return unknown

    def check_length(self, num_cut):
        """Raise a ValueError if words were cut, and may not be."""
        if num_cut > 0 and not self.may_cut:
            raise ValueError(f"expected at most {self.length} positions, got "
                             f"{self.length + num_cut}. Use --truncate, or truncate=True in "
                             "Python, to read the start.")


class TextReader(Reader):
    """Reads texts, or pairs of texts.

    Args:
        tokenizer, length, may_cut: as for Reader.
        columns: list[str], the name of each text of a row.
        has_masks: bool, whether [MASK] in a text marks a word to predict.
    """

    noun = "word"

    def __init__(self, tokenizer, length, may_cut, columns, has_masks):
        super().__init__(tokenizer, length, may_cut)
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
        self.check_length(num_cut)
        return Example(row, ids, words, num_cut, tuple(text_ids), spans)

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
        unknown = self.list_unknown(words)
        if len(unknown) <= MAX_UNKNOWN * len(words):
            return []
        return [f"the model knows nothing of {len(unknown):,} of {len(words):,} words; pre-train "
                "on such text, or with MD5"]


class SetReader(Reader):
    """Reads item sets, without the items that the model does not know.

    Args:
        tokenizer, length, may_cut: as for Reader.
        items: list[str], those that the model chooses from; some have spaces.
    """

    noun = "item"

    def __init__(self, tokenizer, length, may_cut, items):
        super().__init__(tokenizer, length, may_cut)
        self.splitter = ItemNames(items)  # the tokenizer's knows no name with spaces
        self.place_of_item = dict(zip(items, range(len(items))))

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
        if isinstance(row, str):
            names, _ = self.splitter.split(row)
        elif is_names(row):
            names = item_names(row)
        else:
            raise ValueError(f"expected an item set, a tuple of names or a str, got {row!r:.60}.")
        names = list(dict.fromkeys(names))  # each once
        if MASK_WORD in names:
            names.remove(MASK_WORD)
        unknown = set(self.list_unknown(names))
        known = [name for name in names if name not in unknown]
        if not known:  # an empty set: a head refuses it, and its vector is 0
            return Example(row, np.array([MASK], np.int32), [], 0)
        ids = first + list_ids(self.tokenizer, known).tolist()
        num_cut = max(0, len(ids) - self.length)
        self.check_length(num_cut)
        ids = np.array(ids[:self.length], np.int32)
        shown = [self.place_of_item[name] for name in known if name in self.place_of_item]
        return Example(row, ids, names, num_cut, shown=tuple(shown))

    def list_notes(self, example):
        unknown = self.list_unknown(example.words)
        if not unknown:
            return []
        return [f"unknown items were left out: {', '.join(unknown)}"]
