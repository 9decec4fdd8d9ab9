"""Tests of words.py: what is a word, where it stands in a text, and how it is hashed."""

import ast
import re
import sys
import unicodedata

import hypothesis
import hypothesis.strategies as st
import pytest

from words import MARKS
from words import __doc__ as HEADER
from words import list_words, normalize_word, split_words

# white space, byte order mark, zero-width space, control characters
SEPARATORS = r"[\s\ufeff\u200b\0-\x1f\x7f-\x9f]+"
INVISIBLE = ("[\u061c\u180e\u200e\u200f\u202a-\u202e\u2060-\u206f\ufff9-\ufffb"
             "\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0001]")
JOINERS = "[\u200c\u200d\xad\U00013430-\U0001343f\U000e0020-\U000e007f]"
HARD_TEXTS = [
    "",
    " \t\n",
    "İstanbul'da ΟΔΟΣ ẞ Ǆ",  # lower() changes the length, or depends on the place
    "\ufeffa\0b \ufeff c\ufeff",
    "\ud800 lone \udfff",  # surrogates, as JSON can produce
    "日本語 and 한국어",
    "\u0958 \uf900",  # NFC replaces them, without a mark
    "e\u0301\u0327 ﬃ Ⅷ",  # combining marks, ligature, Roman number
    "a\u2028b\x85c\u00a0d",  # separators of lines and words
    "🙂🙃 !?…",
    "x" * 10_000,
    "\u200ea\u2060b\u200b\u200f \u2066\u0301c\u2069.",  # marks of direction, word joiner
    "\u200d\u200ea\u200c\xad \xad\u0301b\u200b\u200dc\x07\u200d\ufffa\x9f",  # joiners, controls
]
ANY_TEXT = st.text(st.characters(exclude_categories=()), max_size=60) | st.sampled_from(HARD_TEXTS)
REPEATABLE = hypothesis.settings(max_examples=60, deadline=None, database=None, derandomize=True)


def test_table_of_the_header_is_what_split_words_returns():
    """A line has a text, its words, and a rule, which may begin with the name of a pattern."""
    lines = re.findall(r'^    (".*?")  +(".*?")  +(.+)$', HEADER, re.M)
    assert len(lines) == HEADER.count('\n    "') == 9
    for text, expected, rule in lines:
        how = "space" if rule.startswith('"space"') else "regex"
        words, _ = split_words(ast.literal_eval(text), how)
        assert words == [ast.literal_eval(word) for word in re.findall('".*?"', expected)]


@REPEATABLE
@hypothesis.given(text=ANY_TEXT)
@pytest.mark.parametrize("how", ["regex", "space"])
def test_split_words_keeps_offsets_and_all_characters(how, text):
    words, spans = split_words(text, how)
    parts = [text[start:end] for start, end in spans]
    visible = [re.sub(INVISIBLE, "", part) for part in parts]
    assert words == [normalize_word(part) for part in visible]
    assert words == list_words(text, how)
    invisible = f"{INVISIBLE}|{JOINERS}"
    covered = re.sub(invisible, "", "".join(parts))
    assert covered == re.sub(invisible, "", re.sub(SEPARATORS, "", text))
    assert "" not in words
    assert not re.search(SEPARATORS, "".join(words))
    assert not any(re.match(invisible, word) for word in words)


@pytest.mark.parametrize("word, expected", [
    ("Ἀθήνα", "ἀθήνα"),
    ("ΟΔΟΣ", "οδος"),
    ("e\u0301", "é"),
    ("İYİ", "iyi"),  # Turkish capitals are their small letters, composed or not
    ("I\u0307yi\u0301", "iyí"),
    ("fi\u2060lm\u200f", "film"),
    ("so\u00adon", "so\u00adon"),
])
def test_normalize_word_by_hand(word, expected):
    assert normalize_word(word) == expected


@pytest.mark.parametrize("text, words, spans", [
    ("good\u200bfilm", ["good", "film"], [(0, 4), (5, 9)]),  # a zero-width space separates
    ("film\u200e.", ["film", "."], [(0, 5), (5, 6)]),  # a mark of direction is dropped ...
    ("\u202bשלום\u202c!", ["שלום", "!"], [(1, 6), (6, 7)]),  # ... before a word, too
    ("a\u2060b \u2066\u2069 c", ["ab", "c"], [(0, 3), (7, 8)]),  # alone it is no word
    ("\u180e\u200e", [], []),
    ("x\u200f\u0301y", ["x\u0301y"], [(0, 4)]),  # a combining mark behind it
    ("می \u200cخواهم", ["می", "خواهم"], [(0, 2), (4, 9)]),  # joiners of nothing are dropped, too
    ("fi\ufff9l\u2065m \U000e0001\U0001bca0\U0001d173", ["film"], [(0, 6)]),
    ("a\x07b \x7f", ["a", "b"], [(0, 1), (2, 3)]),  # control characters separate
    # marks belong to the character before
    ("हिन्दी में", ["हिन्दी", "में"], [(0, 6), (7, 10)]),  # vowels of Hindi are marks
    ("E\u0301te\u0301!", ["été", "!"], [(0, 5), (5, 6)]),  # decomposed accents
    ("❤\ufe0f!", ["❤\ufe0f!"], [(0, 3)]),  # a mark of a symbol
    ("a \u0301", ["a", "\u0301"], [(0, 1), (2, 3)]),  # of nothing
    ("a\ufeff\u0301", ["a", "\u0301"], [(0, 1), (2, 3)]),
    ("می\u200cرود so\u00adon", ["می\u200cرود", "so\u00adon"], [(0, 6), (7, 12)]),  # joiners
    ("\U000e0067a 🏴\U000e0067!", ["a", "🏴\U000e0067!"], [(1, 2), (3, 6)]),  # tag of a flag
])
def test_invisible_characters_go_and_marks_stay_with_their_letter(text, words, spans):
    assert split_words(text) == (words, spans)
    assert list_words(text) == words


VISIBLE = "ARABIC|SYRIAC|KAITHI"  # their format characters are signs, such as that of a year


def test_format_characters_of_unicode_are_no_words_and_cut_none():
    """Readers would not see why a text has one word more. A space of width 0 does separate."""
    for letter in map(chr, range(sys.maxunicode + 1)):
        is_format = unicodedata.category(letter) == "Cf"
        if not is_format or re.match(VISIBLE, unicodedata.name(letter)):
            continue
        assert list_words(f"{letter} {letter}a") == ["a"]
        is_separator = re.match(SEPARATORS, letter) is not None
        assert len(list_words(f"a{letter}b")) == 1 + is_separator


def test_marks_are_those_of_unicode():
    """Of Python's version of Unicode: a mark that is missing here would cut words."""
    pattern = re.compile(f"[{MARKS}]")
    for letter in map(chr, range(sys.maxunicode + 1)):
        is_mark = unicodedata.category(letter)[0] == "M"
        assert is_mark == (pattern.match(letter) is not None)
