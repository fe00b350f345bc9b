"""The kinds of models that can be trained, one record each: all that the rest of numdiff must know
about a kind.

    kinds.get("unet")       its `ModelKind`; a `UsageError` for an unknown name
    kinds.names()           of the diffusion models, in the order of the command line
    kinds.every()           {name: record} of what can be trained, autoencoders of extensions too
    kinds.register(kind)    a third kind, from a file of your own: commands, options.json and checkpoints know it then

unet.py and dit.py are the examples to follow; kind.py says what a record holds and what it may
leave out.
"""

from ...errors import UsageError
from ...extensions import available
from .dit import DIT
from .kind import ModelKind
from .unet import UNET

KINDS = {kind.name: kind for kind in (UNET, DIT)}  # of diffusion models


def every():
    """{name: record} of all kinds that can be trained."""
    return {**KINDS, **available("kind")}


def get(name):
    """The record of a kind of model."""
    if not isinstance(name, str) or name not in every():
        raise UsageError(f"--model {str(name)[:60]} does not exist; use {' or '.join(every())}.")
    return every()[name]


def names():
    """The names of the kinds of diffusion models, the first of them the default."""
    return tuple(KINDS)


def register(kind: ModelKind):
    """Add a record; a `UsageError` for a name that is taken, or that no command could have."""
    if not kind.name.isidentifier() or kind.name in every():
        raise UsageError(f"a model kind cannot be called {kind.name!r}: use a word of its own.")
    KINDS[kind.name] = kind


def owner(setting, model):
    """The kind, other than `model`, that alone has a setting; None for a setting of `model` or of
    all kinds."""
    if setting in get(model).table:
        return None
    return next((kind for kind in every().values() if setting in kind.table), None)
