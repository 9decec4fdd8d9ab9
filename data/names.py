"""Names of items, classes and columns: those that look alike are equal."""

import re
import unicodedata


def clean_name(text):
    """Return a name in NFC, without white space, U+FEFF and U+200B at its ends.

    U+FEFF is a byte-order mark, which stands in the middle of joined files. U+200B is a space of
    width 0.
    """
    text = unicodedata.normalize("NFC", text)
    return re.sub(r"^[\s\ufeff\u200b]+|[\s\ufeff\u200b]+$", "", text)
