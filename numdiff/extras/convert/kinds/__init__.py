"""Weights of other programs, one record for each kind of model: `Weights` and its subclasses."""

from ....training.kinds.kind import imported
from .weights import Weights

# {kind: where its record is}; the others have `Weights`, which knows no foreign file
WEIGHTS = {
    "unet": "numdiff.extras.convert.kinds.unet_weights:UNetWeights",
    "dit": "numdiff.extras.convert.kinds.dit_weights:DiTWeights",
}


def weights_of(kind, reader="convert"):
    """The `Weights` of a kind of model: how other programs' files of it are read and written.

    kind: its `ModelKind`; reader: the command that reads, whose options its errors name
    """
    record = imported(WEIGHTS[kind.name]) if kind.name in WEIGHTS else Weights
    return record(kind, reader)
