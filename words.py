r"""Text to words: which characters make a word, and how a word is written when it is hashed.

Sources:
    [HF] Xue & Aletras 2022, HashFormers: Towards Vocabulary-independent Pre-trained Transformers
Out of scope: other splits and those that are learned (data/splitters.py), hashes of words
    (hashing.py).
Deviations:
    1. A word is a run of letters or of symbols, in lower case and in Unicode's form NFC ("regex").
       "space" splits as the paper does.
    2. A byte order mark, a zero-width space or a control character, such as NUL, separates words,
       as white space does.
    3. Hidden characters, such as marks of direction, are dropped, and so is a joiner, soft hyphen
       or tag before a word. A combining mark stays with the character before it.
Demo: python words.py "Don't stop!!"

    text                  words                        rule
    "Don't stop_1!!"      "don" "'" "t" "stop_1" "!!"  "regex": letters, digits and _, or symbols
    "Don't stop_1!!"      "don't" "stop_1!!"           "space": all that stands between separators
    "a\0b\u200bc"         "a" "b" "c"                  separators end a word
    "E\u0301te\u0301!"    "été" "!"                    a mark belongs to the character before it
    "a \u0301"            "a" "\u0301"                 a mark of nothing is a symbol of its own
    "so\u00adon"          "so\u00adon"                 a joiner stays inside a word
    "fi\u2060lm"          "film"                       a hidden character is dropped, and cuts none
    "\u200efilm \u200d!"  "film" "!"                   no word begins with one of these two
    "İYİ"                 "iyi"                        all is in lower case, and İ is one i
"""

import re
import sys
import unicodedata

# Kinds of characters, as they stand in [...] of a regular expression. Inside a word joiners, hidden
# characters and marks may stand; of the three only a mark, where it has nothing to change before
# it, may begin one

# White space, byte order mark, zero-width space, control characters
SEPARATORS = r"\s\ufeff\u200b\0-\x1f\x7f-\x9f"

# Joiners are part of a word's spelling, and join the letters around them or allow a line break
# there: zero-width non-joiner and joiner, soft hyphen, joiners of hieroglyphs. So are tags, which
# name the region of a flag
JOINERS = "\u200c\u200d\u00ad\U00013430-\U0001343f\U000e0020-\U000e007f"

# Hidden characters are no part of the spelling, so normalize_word drops them: marks of direction,
# word joiner, invisible operators of formulas, and marks of annotations, shorthand, music and
# languages
HIDDEN = ("\u061c\u180e\u200e\u200f\u202a-\u202e\u2060-\u206f\ufff9-\ufffb"
          "\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0001")
INVISIBLE = re.compile(f"[{HIDDEN}]")

# No word begins with these: a joiner has nothing before it to join there, and of hidden characters
# alone nothing would be left
SKIP = JOINERS + HIDDEN


def find_marks():
    """Return all combining marks (Mn, Mc, Me) as ranges: those of [...]."""
    # The scan ends at 0x20000: to the end of Unicode, 0x110000, it would take eight times as long,
    # at each import, and find only one range more, which is here by hand
    kinds = "".join(unicodedata.category(chr(code))[0] for code in range(0x20000))  # M: a mark
    ranges = ["\U000e0100-\U000e01ef"]
    for run in re.finditer("M+", kinds):
        ranges.append(f"{chr(run.start())}-{chr(run.end() - 1)}")
    return "".join(ranges)


# A mark changes the character before it, as an accent does
MARKS = find_marks()

# Patterns: the first character of a word, then any number of others
LETTERS = rf"\w[\w{MARKS}{SKIP}]*"
SYMBOLS = rf"[^\w{SEPARATORS}{SKIP}][^\w{SEPARATORS}]*"  # a mark may be the first
UNSEPARATED = rf"[^{SEPARATORS}{SKIP}][^{SEPARATORS}]*"
PATTERNS = {
    "regex": re.compile(f"{LETTERS}|{SYMBOLS}"),
    "space": re.compile(UNSEPARATED),
}


# Text to words: PATTERNS finds them, and normalize_word turns what is written into what is hashed


def split_words(text, how="regex"):
    """Split text into lower-case words and return their positions.

    Args:
        text: str.
        how: "regex": runs of letters, digits and _, and runs of other symbols, as the authors' code
            splits. "space": white space, as the paper says.

    Returns:
        words list[str], and spans list[(start, end)] in characters.

    Example:
        split_words("Don't stop!!")[0]  # ["don", "'", "t", "stop", "!!"]
    """
    words = []
    spans = []
    for match in PATTERNS[how].finditer(text):
        start, end = match.span()
        words.append(normalize_word(text[start:end]))
        spans.append((start, end))
    return words, spans


def list_words(text, how="regex"):
    """Return the words of split_words without their spans, about twice as fast."""
    if text.isascii():
        return PATTERNS[how].findall(text.lower())
    return [normalize_word(word) for word in PATTERNS[how].findall(text)]


def normalize_word(word):
    """Return a word of a text as it is hashed: visible, in lower case, in NFC."""
    if word.isascii():  # as most words are; the rest changes nothing in them
        return word.lower()
    word = INVISIBLE.sub("", word)
    word = unicodedata.normalize("NFC", word)
    # subtle: "İ".lower() is two characters, i and a dot, and would not be the i of "iyi"
    word = word.replace("İ", "i").lower()
    return unicodedata.normalize("NFC", word)  # again: J and a caron stay two, j and a caron are ǰ


def main():
    """Print the words of a text with their places."""
    text = " ".join(sys.argv[1:])
    if not text:
        text = "Don't stop!!"
    words, spans = split_words(text)
    for word, (start, end) in zip(words, spans):
        print(f"{start:4d} {end:4d}  {word}")


if __name__ == "__main__":
    main()
