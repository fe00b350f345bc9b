"""The weights' gradients of a block's linear layers in one launch, once all of what they are made of is there.

Each is a product of the gradient dy that arrives at a layer and of the layer's input x, with too few tiles for a GPU
(kernels/linear_gradients.py). Nobody reads it before the backward pass ends, or until it leaves for other ranks. So a
block runs forward within `together`, where its layers join; in the backward pass each puts dy and x aside, and the last
one, which has run first, launches the product of all.

    backward     … fc2: dy, x aside | fc1: dy, x aside | attention's proj: … | attention | qkv: …, and the launch

MEMORY. dy and x of fc1, fc2 and proj stay until then, where each was dropped by its own layer: of a DiT at most 11 · D
numbers a token, of one block at a time. u, which is as wide as fc1's dy, has gone by then where GELU(u) was kept.

THE INVARIANT of loans.py holds: what has been put aside is gone when the block's first layer has been played back,
before a gradient of an earlier block is asked for. The gradients themselves are asked for when they are launched; until
then they are `stale`, or a loan, and what watches the backward pass (distributed/buckets.py) finds all layers' weights
at each of the layers.

A layer that is not played back, as nothing depends on it, leaves the others waiting: they are launched when the
backward pass ends (`completed`).
"""
import contextlib

from ..device.threads import Stack
from ..kernels.linear_gradients import linear_gradients_backward

_open = Stack()  # the `Together` of the blocks that run forward in this thread, innermost last
_begun = Stack()  # those that wait for layers in this thread's backward passes


class Together:
    """Layers of one forward pass of a block.

    weights: those that may join; parameters: weights and biases of those that have; aside: (weight, bias, dy, x) of
    those that have been played back
    """

    def __init__(self, weights):
        self.weights, self.parameters, self.layers, self.aside = weights, [], 0, []

    def join(self, weight, bias):
        """For a layer's backward: the function that it gives dy (R, N) and x (R, K) instead of computing gradients."""
        self.layers += 1
        self.parameters += [parameter for parameter in (weight, bias) if parameter is not None]

        def put_aside(dy, x):
            if not self.aside:
                _begun.append(self)
            self.aside.append((weight, bias, dy, x))
            if len(self.aside) == self.layers:
                self.launch()

        return put_aside

    def launch(self):
        """The gradients of what has been put aside: in one launch, or in two where some are added to."""
        given, self.aside = self.aside, []
        if self in _begun.items:
            _begun.remove(self)
        launches = {}
        for weight, bias, dy, x in given:
            dweight, accumulate = weight.grad_to_fill()
            dbias = None if bias is None or bias.frozen else bias.grad
            launches.setdefault(accumulate, []).append((dy, x, dweight, dbias))
        for accumulate, layers in launches.items():
            linear_gradients_backward(layers, accumulate)


@contextlib.contextmanager
def together(weights):
    """Context of a block's forward pass: layers with these weights join."""
    _open.append(Together(weights))
    try:
        yield
    finally:
        _open.pop()


def joined(weight, bias):
    """What `Together.join` gives, or None for a layer that is by itself."""
    group = _open[-1] if _open else None
    return group.join(weight, bias) if group and any(weight is other for other in group.weights) else None


@contextlib.contextmanager
def completed():
    """Context of a backward pass: what waits at its end, of that which has begun within, is launched."""
    before = len(_begun)
    try:
        yield
        while len(_begun) > before:
            _begun[-1].launch()
    finally:
        del _begun.items[before:]
