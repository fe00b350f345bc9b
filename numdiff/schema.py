"""The strict reader of JSON in files: a parser that accepts nothing irregular, and schemas of what
is allowed.

    SETTINGS = record({"steps": integer(1, 100000)}, {"schedule": choice("linear", "cosine"),
    "rate": number(0)}) check(parse_json(text), SETTINGS, "the settings")

A schema is a function (value, where) that returns None or raises a `Mismatch`, whose text says
where and what. Values are quoted in it in short. Everything that a schema accepts is bounded: no
number is larger, no text or list longer than it says.
"""

import json
import math
import reprlib

from .files import Refused

JSON_BYTES = 32 << 20  # of a text: the names of a million classes
SAFE_INTEGER = 2**53  # beyond it, a float cannot represent every integer


class Mismatch(Refused):
    """A value is not what its schema says."""


def parse_json(text, limit=JSON_BYTES):
    """The value of a JSON text (str or bytes); a `Mismatch` for anything else, including NaN and
    infinity."""
    if len(text) > limit:
        raise Mismatch(f"its text has {len(text):,} bytes, and at most {limit:,} are taken")
    try:
        return json.loads(text, parse_constant=_no_constant, parse_float=_finite, parse_int=_short)
    except RecursionError:
        raise Mismatch("it is nested too deeply") from None
    except Mismatch:
        raise
    # also for bytes that are no text, and for integers of thousands of digits
    except ValueError as error:
        raise Mismatch(f"it is not JSON ({str(error)[:80]})") from None


def _no_constant(word):
    raise Mismatch(f"it holds {word}, which is no number")


def _short(digits):
    if len(digits) > 100:
        raise Mismatch(f"it holds {digits[:20]}…, which is too large a number")
    return int(digits)


def _finite(digits):
    value = float(digits)
    if not math.isfinite(value):
        raise Mismatch(f"it holds {digits[:20]}, which is too large a number")
    return value


def check(value, schema, where):
    """Check `value` against a schema; returns it. where: what it is, the beginning of a
    `Mismatch`'s text."""
    schema(value, where)
    return value


def _wrong(value, where, wanted):
    return Mismatch(f"{where} is {reprlib.repr(value)} and must be {wanted}")


def integer(low=-SAFE_INTEGER, high=SAFE_INTEGER):
    """A whole number from low to high."""

    def schema(value, where):
        if type(value) is not int or not low <= value <= high:
            raise _wrong(value, where, f"a whole number from {low} to {high}")

    return schema


def number(low=-1e30, high=1e30):
    """A finite number from low to high."""

    def schema(value, where):
        if type(value) not in (int, float) or not low <= value <= high:
            raise _wrong(value, where, f"a number from {low:g} to {high:g}")

    return schema


def text(length=1000):
    """A text of at most `length` characters."""

    def schema(value, where):
        if type(value) is not str or len(value) > length:
            raise _wrong(value, where, f"a text of at most {length} characters")

    return schema


def boolean(value, where):
    """True or false."""
    if type(value) is not bool:
        raise _wrong(value, where, "true or false")


def anything(value, where):
    """Any JSON value, for keys that only a newer numdiff knows."""


def choice(*values):
    """One of some texts."""

    def schema(value, where):
        if type(value) is not str or value not in values:
            raise _wrong(value, where, " or ".join(values))

    return schema


def optional(inner):
    """Null, or what `inner` says."""

    def schema(value, where):
        if value is not None:
            inner(value, where)

    return schema


def items(inner, length, least=0):
    """A list of `least` to `length` values, each as `inner` says."""

    def schema(value, where):
        if type(value) is not list or not least <= len(value) <= length:
            raise _wrong(value, where, f"a list of {least} to {length} values")
        for i, item in enumerate(value):
            inner(item, f"{where}[{i}]")

    return schema


def record(required, more=None, other=None):
    """An object with the keys of `required`, perhaps those of `more`, and no others unless `other`
    is their schema."""
    known = {**required, **(more or {})}

    def schema(value, where):
        if type(value) is not dict:
            raise _wrong(value, where, "an object")
        missing = [key for key in required if key not in value]
        if missing:
            raise Mismatch(f"{where} has no {missing[0]}")
        for key, item in value.items():
            inner = known.get(key, other)
            if inner is None:
                raise Mismatch(f"{where} has {reprlib.repr(key)}, which this numdiff does not know")
            inner(item, f"{where}.{key}" if key in known else f"{where}.{key[:40]}")

    return schema


def options(value, where):
    """An object of options: numbers, texts, true, false, null, and lists of numbers or texts."""
    atom = (int, float, str, bool, type(None))
    if type(value) is not dict or len(value) > 1000:
        raise _wrong(value, where, "an object of options")
    for key, item in value.items():
        many = type(item) is list and len(item) <= 1000
        if not all(type(v) in atom and len(str(v)) <= 4096 for v in (item if many else [item])):
            raise _wrong(
                item,
                f"{where}.{key[:40]}",
                "a number, a text, true, false or null, or a list of them",
            )


def of_defaults(defaults, schemas=None, nullable=()):
    """A record whose keys are those of `defaults`, none of them required.

    A value is as `schemas` says, or else of its default's kind: a number for a number, a list of
    numbers for a list of them. Where the default is None, and for the keys of `nullable`, null is
    allowed, too.
    """
    known = {key: (schemas or {}).get(key) or like(value) for key, value in defaults.items()}
    return record(
        {},
        {
            key: optional(inner) if key in nullable or defaults[key] is None else inner
            for key, inner in known.items()
        },
    )


def like(value):
    """The schema of values of the kind of `value`."""
    if isinstance(value, bool):
        return boolean
    if isinstance(value, int):
        return integer(-(2**31), 2**31)
    if isinstance(value, float):
        return number()
    if isinstance(value, str):
        return text()
    if isinstance(value, (list, tuple)):
        return items(like(value[0]) if value else number(), 1000)
    return either(number(), text(), boolean)


def either(*inner):
    """What one of several schemas says."""

    def schema(value, where):
        faults = []
        for one in inner:
            try:
                return one(value, where)
            except Mismatch as error:
                faults.append(error)
        raise faults[0]

    return schema
