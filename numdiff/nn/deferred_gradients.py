"""Deferred weight gradients: those of a block's linear layers in one launch, once all of their
operands are complete.

Each gradient is a product of the gradient dy that arrives at a layer and the layer's input x. It
has too few tiles to fill a GPU (kernels/linear/gradients.py). It is not read before the backward
pass ends, or before it is sent to other ranks. So a block runs forward within `deferring`, and its
layers register there. In the backward pass each layer defers dy and x. The last layer played back,
the first of the forward pass, launches the products of all.

    backward     … fc2: defer dy, x | fc1: defer dy, x | attention's proj: … | attention | qkv: …, and the launch

MEMORY. dy and x of fc1, fc2 and proj stay until the launch, instead of being freed layer by layer.
In a DiT these are at most 11 · D elements a token, of one block at a time. u, which is as wide as
fc1's dy, is freed by then if GELU(u) was kept.

THE INVARIANT of aliasing.py holds. Deferred arrays are freed when the block's first layer has been
played back, before a gradient of an earlier block is requested. The gradients themselves are
requested at the launch. Until then they are `stale` or aliased, and the record of each layer names
the parameters of all of them (`Record.parameters`), for distributed/buckets.py, which watches the
backward pass.

If the layers are small, that launch runs concurrently with the backward pass of the block before
(device/side_stream.py).

If a layer is not played back, since nothing depends on it, the others stay deferred. They are
launched when the backward pass ends (`flushed_at_end`).
"""

import contextlib
from typing import NamedTuple

from ..device.side_stream import on_side_stream
from ..device.threads import ThreadStack
from ..kernels.linear.gradients import linear_gradients_backward
from .parameter import Parameter

# bytes of a layer's dy up to which the launch goes to the side stream (device/side_stream.py)
SMALL = 9 << 20

# the `DeferredGradients` of the blocks that run forward in this thread, innermost last
_open = ThreadStack()
_pending = ThreadStack()  # those with deferred layers in this thread's backward passes


class DeferredGradients:
    """Layers of one forward pass of a block.

    weights: of the layers that may register; layers: the number that has registered
    parameters: their weights and biases
    deferred: (weight, bias, dy, x) of layers that have been played back and not flushed
    """

    def __init__(self, weights):
        self.weights, self.parameters, self.layers, self.deferred = weights, [], 0, []

    def register(self, weight, bias):
        """The `DeferredLayer` of a layer with these Parameters; bias may be None."""
        self.layers += 1
        self.parameters += [parameter for parameter in (weight, bias) if parameter is not None]
        return DeferredLayer(self, weight, bias)

    def defer(self, *layer):
        """Keep (weight, bias, dy, x) of a layer; with the last one, compute all gradients."""
        if not self.deferred:
            _pending.append(self)
        self.deferred.append(layer)
        if len(self.deferred) == self.layers:
            self.flush()

    def flush(self):
        """Compute the deferred gradients in one launch; in two if only some of them are added to."""
        given, self.deferred = self.deferred, []
        if self in _pending.items:
            _pending.remove(self)
        launches = {}
        for weight, bias, dy, x in given:
            dweight, accumulate = weight.grad_to_fill()
            dbias = None if bias is None or bias.frozen else bias.grad
            launches.setdefault(accumulate, []).append((dy, x, dweight, dbias))
        for accumulate, layers in launches.items():
            with on_side_stream(
                layers[0][0], *(gradient for layer in layers for gradient in layer[2:]), small=SMALL
            ):
                linear_gradients_backward(layers, accumulate)


class DeferredLayer(NamedTuple):
    """One layer of a `group`. The layer's backward calls it with dy (R, N) and x (R, K) instead of
    computing the gradients of weight and bias."""

    group: DeferredGradients
    weight: Parameter
    bias: Parameter | None

    def __call__(self, dy, x):
        self.group.defer(self.weight, self.bias, dy, x)


@contextlib.contextmanager
def deferring(weights):
    """Context of a block's forward pass: layers with these weights register."""
    _open.append(DeferredGradients(weights))
    try:
        yield
    finally:
        _open.pop()


def deferral_of(weight, bias):
    """The result of `DeferredGradients.register`, or None for a layer that computes its own
    gradients."""
    group = _open[-1] if _open else None
    return (
        group.register(weight, bias)
        if group and any(weight is other for other in group.weights)
        else None
    )


@contextlib.contextmanager
def flushed_at_end():
    """Context of a backward pass: at its end, all gradients deferred inside it are flushed."""
    before = len(_pending)
    try:
        yield
        while len(_pending) > before:
            _pending[-1].flush()
    finally:
        del _pending.items[before:]
