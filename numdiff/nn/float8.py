"""A model's linear layers in FP8: bytes of their weights in both orientations, and delayed scales,
on the device.

`FlatParameters.keep_float8` makes it; the operations of `functional/` ask `layer_of` for a weight's
layer. A training step ends with `update`, after the optimizer has changed the weights. Ranks that
train together choose the scales by the largest numbers of all of them, which travel with the loss
(distributed/exchange.py). Samples are drawn in float16: without a tape no layer is found, and
nothing is counted.

The first block and the last stay in float16 (`Model.compute_in_float8`): what the first one gets is
small compared with what it adds, and all others read what it rounds. The default DiT's loss over
10,000 steps is 2.6 % above float16's with all twelve blocks in FP8. With this choice it is 0.27 %
above, and 0.44 % if the last block is in FP8, too. With the last one or two alone in float16 it is
1.6 and 1.8 % (3,000 steps).
"""

import numpy as np

from .. import kernels as K
from ..device import empty, upload, zeros
from ..dtypes import is_half
from ..kernels import linear_fp8
from ..kernels.linear_fp8 import Layer8, Scale8
from ..kernels.quantise import HISTORY, PARTIALS, matrices8, quantise_weights, scale_update
from . import recording

TENSORS = 2  # of a layer whose scales are delayed: what goes in, and what comes back


class Float8:
    """FP8 of the weights with these names.

    promoted: whether products are added up in float32 every 128 of k
    Attributes weights float32 (n,): the weights' scales, in the order of the names; scale float32
    (2 · n,), history float32 (2 · n, HISTORY), amax uint32 (2 · n, PARTIALS): of what goes into
    each, then of what comes back to it;
    of_ranks: uint32 (2 · n, ranks), of each the largest of this step once the exchange has
    finished; set by the exchange, None if there is one rank.
    """

    of_ranks = None

    def __init__(self, parameters, names, promoted=True):
        self.parameters, like, n = parameters, parameters.data, len(names)
        entries = {entry["name"]: entry for entry in parameters.index}
        places = [(entries[name]["offset"], *entries[name]["shape"]) for name in names]
        self.matrices = matrices8(places, like)
        self.rows, self.columns = (
            empty((self.matrices.total,), np.uint8, like=like) for _ in range(2)
        )
        self.weights, self.scale = (
            zeros(n, np.float32, like),
            upload(np.ones(TENSORS * n, np.float32), like),
        )
        self.history = zeros((TENSORS * n, HISTORY), np.float32, like)
        self.amax = zeros((TENSORS * n, PARTIALS), np.uint32, like)
        flat = self.amax.reshape(-1)

        def scale(k):
            return Scale8(self.scale[k : k + 1], flat[k * PARTIALS : (k + 1) * PARTIALS])

        start = 0
        for i, (name, (_, outputs, inputs)) in enumerate(zip(names, places, strict=True)):
            place = slice(start, start + outputs * inputs)
            start = place.stop
            parameters.parameters[name].float8 = Layer8(
                self.rows[place].reshape(outputs, inputs),
                self.columns[place].reshape(inputs, outputs),
                self.weights[i : i + 1],
                scale(TENSORS * i),
                scale(TENSORS * i + 1),
                promoted,
            )
        self.quantise()

    def quantise(self):
        """The weights' bytes and scales, from their float16 copy."""
        quantise_weights(self.parameters.half, self.matrices, self.rows, self.columns, self.weights)

    def update(self):
        """At the end of a step: scales of the next, and the weights as they are now."""
        scale_update(
            self.amax if self.of_ranks is None else self.of_ranks, self.history, self.scale
        )
        self.quantise()

    def arrays(self):
        """{name: array on the device}: what a bitwise resume needs."""
        return {"fp8_scale": self.scale, "fp8_history": self.history}


def layer_of(weight, x):
    """The `Layer8` with which a product of x, or of x's bytes, and this weight is computed; None
    for one in x's own type: of another weight, or where no tape records."""
    return (
        weight.float8
        if recording.is_training() and (is_half(x.dtype) or x.dtype == np.uint8)
        else None
    )


def bytes_for(weight, x, which):
    """The `Scale8` by which the norm before (which: "x"), or the gate after ("dy"), this weight's
    layer rounds for it; None if float16 is wanted. x: an activation of the same dtype; weight: may
    be None."""
    layer = None if weight is None else layer_of(weight, x)
    return getattr(layer, which) if layer is not None and linear_fp8.rounds_norms() else None


def keeps(weight):
    """Whether a backward needs the input of this weight's layer."""
    return recording.is_recording() and not weight.frozen


def linear_forward(x, weight, bias, layer, residual=None):
    """(x·weightᵀ + bias + residual, what the backward needs of x) of arrays and Parameters; layer:
    as `layer_of` gave it."""
    bias = None if bias is None else bias.data
    if layer is None and not recording.is_wanted(weight):
        return empty((*x.shape[:-1], weight.shape[0]), x.dtype, like=x), x
    if layer is None:
        return K.linear_forward(
            x, weight.like(x).reshape(weight.shape[0], -1), bias, residual=residual
        ), x
    return K.linear_fp8_forward(x, layer, bias, residual, keeps(weight))


def linear_gelu_forward(x, weight, bias, layer, keeps_u, following=None):
    """(u, GELU(u), what the backward needs of x); following: the layer that alone reads GELU(u), or
    None."""
    if layer is None:
        return *K.linear_gelu_forward(x, weight.like(x), bias.data, keeps_u=keeps_u), x
    return K.linear_fp8_gelu_forward(x, layer, bias.data, keeps_u, keeps(weight), following)


def linear_swiglu_forward(x, weight, bias, layer, keeps_u):
    bias = None if bias is None else bias.data
    if layer is None:
        return *K.linear_swiglu_forward(x, weight.like(x), bias, keeps_u=keeps_u), x
    return K.linear_fp8_swiglu_forward(x, layer, bias, keeps_u, keeps(weight))


def linear_backward(dy, kept, weight, layer, dweight, dbias, following=None, **options):
    """As `kernels.linear_backward`; kept: the forward's second return value, or None; following:
    with gelu_of, the layer whose backward alone reads du, or None."""
    if layer is None:
        w = weight.like(dy if kept is None else kept).reshape(weight.shape[0], -1)
        return K.linear_backward(dy, kept, w, dweight, dbias, **options)
    return K.linear_fp8_backward(
        dy, kept, weight.half, layer, dweight, dbias, following=following, **options
    )
