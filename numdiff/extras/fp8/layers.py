"""A model's linear layers in FP8: bytes of their weights in both orientations, and delayed scales,
on the device.

`FlatParameters.keep_float8` makes it; nn/float8.py finds a weight's layer. A training step ends
with `update`, after the optimizer has changed the weights. Ranks that train together choose the
scales by the largest numbers of all of them, which travel with the loss (distributed/exchange.py).

The first block and the last stay in float16 (`Model.compute_in_float8`): what the first one gets is
small compared with what it adds, and all others read what it rounds. The default DiT's loss over
10,000 steps is 2.6 % above float16's with all twelve blocks in FP8. With this choice it is 0.27 %
above, and 0.44 % if the last block is in FP8, too. With the last one or two alone in float16 it is
1.6 and 1.8 % (3,000 steps).
"""

import numpy as np

from ...device import empty, upload, zeros
from ...device.rounded8 import PARTIALS
from .inference import InferenceFloat8
from .linear import Layer8
from .matmul import fp8_supports
from .quantise import HISTORY, Scale8, scale_update, share_largest
from .weights import matrices8, quantise_weights

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
    supports = staticmethod(fp8_supports)
    for_inference = InferenceFloat8

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

    def share_largest(self, table, rank):
        """Column `rank` of the table becomes the largest magnitudes of this step, and the others
        zero."""
        share_largest(self.amax, table, rank)
