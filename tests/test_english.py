"""Plain technical English: words with a better term in the field do not return to docstrings,
comments and pages.

CONTRIBUTING.md has the rule: subject, verb, object; the field's noun; at most about 25 words a
sentence.
"""

import io
import pathlib
import re
import tokenize

import pytest

import numdiff

ROOT = pathlib.Path(numdiff.__file__).resolve().parents[1]
INSTEAD = {
    "beside": "compared with, next to, on a side stream, concurrently with, in addition to",
    "told": "reported, specified, given, receives",
    "tells": "reports, shows, gives",
    "lies": "is stored, is located, is at",
    "nobody": "no thread, no other operation, unused",
    "whoever": "the caller, the reader",
    "so many": "the count's name",
    "anew": "again, re-",
}
ALLOWED = {}  # {word: how often it is left}
HABIT = re.compile(rf"(?<![\w`.])({'|'.join(INSTEAD)})(?![\w`.(])", re.IGNORECASE)


def sentences(path):
    """The docstrings and comments of a Python file, or the text of a page."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md" or not HABIT.search(text):
        return [text]
    found, before = [], tokenize.NEWLINE
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            found.append(token.string)
            continue
        if token.type == tokenize.STRING and before in (
            tokenize.NEWLINE,
            tokenize.INDENT,
            tokenize.DEDENT,
        ):
            found.append(token.string)
        if token.type != tokenize.NL:
            before = token.type
    return found


@pytest.fixture(scope="module")
def habits():
    """{word: [file: the words around it]}"""
    found = {word: [] for word in INSTEAD}
    folders = [ROOT / name for name in ("numdiff", "cli", "data", "docs", "tests")]
    paths = [path for folder in folders for path in (*folder.rglob("*.py"), *folder.rglob("*.md"))]
    for path in sorted({*paths, *ROOT.glob("*.md")} - {pathlib.Path(__file__).resolve()}):
        for text in sentences(path):
            for match in HABIT.finditer(text):
                around = " ".join(text[max(0, match.start() - 30) : match.end() + 30].split())
                found[match[1].lower()].append(f"{path.relative_to(ROOT)}: … {around} …")
    return found


@pytest.mark.parametrize("word", INSTEAD)
def test_a_better_word_is_used(habits, word):
    assert len(habits[word]) <= ALLOWED.get(word, 0), f"write instead of {word!r}: {INSTEAD[word]}"
