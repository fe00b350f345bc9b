"""Tile sizes that were measured to be best on a card, where a launcher's estimate would choose others.

One file a card, `<card>.json`, written by `numdiff bench tune` and checked in: {kind: {"shape": choice}}. A launcher
asks `tuned` first and estimates where nothing is known, so that a card without a file loses nothing. Results depend on
tiles in the rounding of split sums alone, and tiles on the table, the card's name and size and the shape alone, never
on a measurement while training: with the same table a card gives the same bits in every run.
"""
import contextlib
import functools
import json
import pathlib
import re

FOLDER = pathlib.Path(__file__).resolve().parent
_ignored = False


def card_file(device_name):
    """Where the table of a card lies."""
    return FOLDER / (re.sub(r"[^a-z0-9]+", "-", device_name.lower()).strip("-") + ".json")


def key_of(*shape):
    """A shape, numbers and truth values, as JSON can name it."""
    return " ".join(str(int(n)) for n in shape)


@functools.cache
def table_of(device_name):
    """{kind: {key: choice}} of a card; empty where there is no table."""
    path = card_file(device_name)
    return json.loads(path.read_text(encoding="utf-8"))["choices"] if path.exists() else {}


def tuned(backend, kind, *shape):
    """The choice for this shape on the backend's card, as a list; None where the estimate has to do."""
    return None if _ignored else table_of(getattr(backend, "device_name", "")).get(kind, {}).get(key_of(*shape))


@contextlib.contextmanager
def ignored():
    """Within the context no table is known: launchers estimate."""
    global _ignored
    before, _ignored = _ignored, True
    try:
        yield
    finally:
        _ignored = before
