"""Tile sizes that were measured to be best on a card, where a launcher's estimate would choose
others.

One file a card, `<card>.json`, written by `numdiff bench tune`: {kind: {"shape": choice}}. None is
checked in, since the estimates are as good (../../benchmark/README.md). A launcher reads the table
first and estimates for unknown shapes. A table older than the kernels loses nothing: entries that
no longer fit are ignored. Results depend on tiles in the rounding of split sums alone. Tiles depend
on the table, the card's name and size and the shape alone, never on a measurement while training.
So with the same table a card gives the same bits in every run.
"""

import contextlib
import functools
import json
import pathlib
import re

from ...errors import NumdiffError

FOLDER = pathlib.Path(__file__).resolve().parent
_ignored = False


def card_file(device_name):
    """The path of a card's table."""
    return FOLDER / (re.sub(r"[^a-z0-9]+", "-", device_name.lower()).strip("-") + ".json")


def key_of(*shape):
    """A shape, numbers and truth values, as JSON can name it."""
    return " ".join(str(int(n)) for n in shape)


def read_table(path):
    """(name of the card or None, {kind: {key: choice}}) of a file; a `NumdiffError` if it holds no
    table."""
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # neither UTF-8 nor JSON
        raise NumdiffError(
            f"the table of tiles {path} is not JSON ({error}); correct it, or remove it and write it "
            "again with numdiff bench tune."
        ) from error
    choices = table.get("choices") if isinstance(table, dict) else None
    if not isinstance(choices, dict) or not all(
        isinstance(rows, dict) for rows in choices.values()
    ):
        raise NumdiffError(
            f'the table of tiles {path} has no "choices" of the form {{kind: {{"shape": choice}}}}; '
            "correct it, or remove it and write it again with numdiff bench tune."
        )
    return table.get("card"), choices


@functools.cache
def table_of(device_name):
    """{kind: {key: choice}} of a card; empty where there is no table."""
    path = card_file(device_name)
    return read_table(path)[1] if path.exists() else {}


def tuned(backend, kind, *shape):
    """The choice for this shape on the backend's card, a tuple of whole numbers; None if the table
    has none."""
    choice = (
        None
        if _ignored
        else table_of(getattr(backend, "device_name", "")).get(kind, {}).get(key_of(*shape))
    )
    return (
        tuple(choice) if isinstance(choice, list) and all(type(n) is int for n in choice) else None
    )


def tuned_or(estimated, measured, backend, kind, *shape):
    """measured(choice) with the choice for this shape on the backend's card, else estimated().

    measured: raises ValueError where the choice does not fit, as it may if the table or the kernels
    were edited
    """
    choice = tuned(backend, kind, *shape)
    if choice is not None:
        with contextlib.suppress(ValueError):
            return measured(choice)
    return estimated()


@contextlib.contextmanager
def ignored():
    """Within the context no table is known: launchers estimate."""
    global _ignored
    before, _ignored = _ignored, True
    try:
        yield
    finally:
        _ignored = before
