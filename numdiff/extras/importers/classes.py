"""From labels to classes: one rule for every format, be it folders, prefixes, .csv, .json, metadata
or arrays.

A label is a text. Numbers of JSON and of arrays are the text that a .csv has for them.
THE SAME CLASS   labels that are equal in normal form C without the spaces around them; and 1.0 and 1, as programs for
                 tables write whole numbers of a column with gaps
ORDER            by value where all labels are numbers (2 before 10), else by text
NO LABEL         an empty text, null and NaN

What is merged, or may be an error, is reported in a note.
"""

import math
import re
from dataclasses import dataclass, field
from decimal import Decimal

import numpy as np

from ...data.names import is_blank, key, loose_key
from ...errors import UsageError
from .source import MAXIMUM_CLASSES, examples, short

WHOLE = re.compile(r"[+-]?[0-9]+(\.0*)?")
NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]{1,6})?")
# in any case, with or without a sign: no class among numbers
NOT_NUMBERS = ("nan", "inf", "infinity")
MISSING = ("nan", "null", "none", "nil", "na", "n/a", "#n/a", "undefined", "?", "-")
IN_NUMERIC_ORDER, IN_TEXT_ORDER, IN_THE_FILES_ORDER = (
    "in numeric order",
    "in the order of their text",
    "in the file's order",
)


@dataclass
class Labelled:
    """The classes of images, and the label of each."""

    classes: list | None = None  # names, None if there are no labels
    numbers: list | None = None  # an index into `classes` for each image
    order: str = ""  # of the classes, in words
    notes: list = field(default_factory=list)  # sentences for the summary
    merged: list = field(default_factory=list)  # lists of the spellings of one class


def number_classes(values, order="numbers"):
    """The `Labelled` of a label for each image: texts or numbers. order: "numbers", or "words" to
    sort all as text."""
    values = [(type(value), value) for value in map(_plain, values)]  # True is 1, and 1.0 as well
    spelled = {typed: label_text(typed[1]) for typed in dict.fromkeys(values)}
    spellings = [spelled[typed] for typed in values]
    found = {text: key(text) for text in dict.fromkeys(spellings)}
    if all(WHOLE.fullmatch(name) for name in found.values()):
        found = {text: _whole(name) for text, name in found.items()}
    groups = {}
    for text, name in found.items():
        groups.setdefault(name, []).append(text)
    if len(groups) > MAXIMUM_CLASSES:
        raise UsageError(
            f"there are {len(groups):,} different labels, more than {MAXIMUM_CLASSES:,} classes: check "
            "them, or add --labels none."
        )
    _refuse_gaps(groups)
    numeric = order == "numbers" and all(map(NUMBER.fullmatch, groups))
    ordered = sorted(groups, key=(lambda name: (Decimal(name), name)) if numeric else None)
    index = {name: i for i, name in enumerate(ordered)}
    names = [groups[name][0].strip() if key(groups[name][0]) == name else name for name in ordered]
    merged = [texts for texts in groups.values() if len(texts) > 1]
    return Labelled(
        names,
        [index[found[text]] for text in spellings],
        in_words(names, numeric),
        [*_notes(ordered, merged, spellings)],
        merged,
    )


def in_words(names, numeric):
    """The order of classes in words; "" where there is nothing to order."""
    return "" if len(names) < 2 else IN_NUMERIC_ORDER if numeric else IN_TEXT_ORDER


def is_missing(value):
    """Whether a value stands where a label should, and is none: None, NaN, or a text without a
    visible character."""
    return (
        value is None
        or isinstance(value, float)
        and math.isnan(value)
        or isinstance(value, str)
        and is_blank(value)
    )


def label_text(value):
    """The text of a label, as it is spelled; a `UsageError` if it is neither a text nor a number."""
    if (
        is_missing(value)
        or isinstance(value, bool)
        or not isinstance(value, int | float | str)
        or (isinstance(value, float) and math.isinf(value))
    ):
        raise UsageError(
            f"a label is {short(value)}, and a label must be a word or a number: fix the labels."
        )
    return value if isinstance(value, str) else repr(value)


def check_names(names, where):
    """Names of classes from a list in a file, which must be visible and differ; `where` names the
    list in messages."""
    if len(names) > MAXIMUM_CLASSES:
        raise UsageError(
            f"{where} has {len(names):,} names, more than {MAXIMUM_CLASSES:,} classes: check it."
        )
    seen = {}
    for i, name in enumerate(names):
        if isinstance(name, bool) or not isinstance(name, str | int) or is_missing(name):
            raise UsageError(f"{where} has {short(name)}, which is no name of a class: fix it.")
        if (first := seen.setdefault(key(name), i)) != i:
            raise UsageError(
                f"{where} has two names that are the same, {spelling(names[first])} and "
                f"{spelling(name)}: rename one."
            )
    return [str(name) for name in names]


def spelling(text):
    """A name as Python writes it, in ASCII where it could be taken for another one."""
    text = str(text)
    return short(text) if text == key(text) else ascii(text)[:100]


def listed(names):
    """Spellings, joined by "and"."""
    shown = [spelling(name) for name in names[:4]]
    return ", ".join(shown[:-1]) + " and " + shown[-1] + (", …" if len(names) > 4 else "")


def _plain(value):
    if isinstance(value, np.generic):
        value = value.item()
    if not isinstance(value, int | float | str):
        raise UsageError(
            f"a label is {short(value)}, and a label must be a word or a number: fix the labels."
        )
    return value


def _whole(name):
    """A whole number without .0, and zero without a sign."""
    digits = name.split(".")[0]
    return digits.lstrip("+-") if not digits.strip("+-0") else digits


def _refuse_gaps(groups):
    gaps = [name for name in groups if name.lstrip("+-").lower() in NOT_NUMBERS]
    if (
        gaps
        and len(gaps) < len(groups)
        and all(NUMBER.fullmatch(name) for name in groups if name not in gaps)
    ):
        raise UsageError(
            f"a label is {short(gaps[0])}, where the others are numbers, and so it is no class: fix the "
            "labels."
        )


def _notes(names, merged, spellings):
    if all(map(WHOLE.fullmatch, names)) and (
        dotted := next((text for text in spellings if "." in text), None)
    ):
        yield f"Whole numbers are named without a point: {dotted.strip()} is the class {_whole(key(dotted))}."
    if merged:
        shown = "; ".join(listed(texts) for texts in merged[:3]) + (
            "; …" if len(merged) > 3 else ""
        )
        yield (
            "Labels that differ only in spaces around them, in Unicode's form or in .0 are one class "
            f"({shown}): rename one of them if they are two."
        )
    alike = {}
    for name in names:
        alike.setdefault(Decimal(name) if NUMBER.fullmatch(name) else _look(name), []).append(name)
    alike = [group for group in alike.values() if len(group) > 1]
    if alike:
        shown = "; ".join(listed(group) for group in alike[:3]) + ("; …" if len(alike) > 3 else "")
        yield (
            f"Some classes differ only in upper and lower case, spaces or digits ({shown}): give them one spelling "
            "if they are one class."
        )
    gaps = [name for name in names if name.lower() in MISSING]
    if gaps:
        yield (
            f"{'A class is' if len(gaps) == 1 else 'Classes are'} called {examples([short(n) for n in gaps])}: if "
            "that means that there is no label, remove these images or label them."
        )
    if not all(map(WHOLE.fullmatch, names)) and all(map(NUMBER.fullmatch, names)):
        yield f"The labels are fractions, and each of the {len(names):,} values is a class of its own."


def _look(name):
    """A name without what the eye may miss."""
    return "".join(c for c in loose_key(name) if not c.isspace() and not is_blank(c))
