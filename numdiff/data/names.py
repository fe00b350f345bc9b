"""How names of classes and files are compared: in Unicode's normal form C, without the spaces
around them.

macOS writes "é" as two characters, other systems as one. Names keep the spelling that they came
with; only comparisons use these keys.
"""

import unicodedata

VISIBLE = "LMNPS"  # Unicode's categories of letters, marks, numbers, punctuation and symbols


def key(name):
    """The form in which two names are compared."""
    name = str(name).strip()
    return name if name.isascii() else unicodedata.normalize("NFC", name).strip()


def loose_key(name):
    """`key`, without upper and lower case."""
    return unicodedata.normalize("NFC", key(name).casefold())


def is_blank(name):
    """Whether a name has nothing to see: it is empty, or holds spaces and invisible characters
    alone."""
    return not name[:1].isalnum() and not any(unicodedata.category(c)[0] in VISIBLE for c in name)
