"""The kinds of models that can be trained, one record each: all that the rest of numdiff must know
about a kind.

    kinds.get("unet")       its `ModelKind`; a `UsageError` for an unknown name
    kinds.names()           in the order of the command line
    kinds.register(kind)    a third kind, from a file of your own: commands, options.json and checkpoints know it then

unet.py and dit.py are the examples to follow; kind.py says what a record holds and what it may
leave out.
"""

from ...errors import UsageError
from .dit import DIT
from .kind import ModelKind
from .unet import UNET

KINDS = {kind.name: kind for kind in (UNET, DIT)}


def get(name):
    """The record of a kind of model."""
    if not isinstance(name, str) or name not in KINDS:
        raise UsageError(f"--model {str(name)[:60]} does not exist; use {' or '.join(KINDS)}.")
    return KINDS[name]


def names():
    """The names of all kinds, the first of them the default."""
    return tuple(KINDS)


def register(kind: ModelKind):
    """Add a record; a `UsageError` for a name that is taken, or that no command could have."""
    if not kind.name.isidentifier() or kind.name in KINDS:
        raise UsageError(f"a model kind cannot be called {kind.name!r}: use a word of its own.")
    KINDS[kind.name] = kind


def owner(setting, model):
    """The kind, other than `model`, that alone has a setting; None for a setting of `model` or of
    all kinds."""
    if setting in get(model).table:
        return None
    return next((kind for kind in KINDS.values() if setting in kind.table), None)
