"""The weight gradients of a block's linear layers in one launch, once all of their operands are there.

Each is a product of the gradient dy that arrives at a layer and the layer's input x, with too few tiles to fill a GPU
(kernels/linear_gradients.py). Nobody reads it before the backward pass ends, or before it leaves for other ranks. So a
block runs forward within `together`, where its layers join; in the backward pass each puts dy and x aside, and the last
one to be played back, the first of the forward pass, launches the products of all.

    backward     … fc2: dy, x aside | fc1: dy, x aside | attention's proj: … | attention | qkv: …, and the launch

MEMORY. dy and x of fc1, fc2 and proj stay until then, instead of being dropped layer by layer: in a DiT at most 11 · D
numbers a token, of one block at a time. u, which is as wide as fc1's dy, is gone by then where GELU(u) was kept.

THE INVARIANT of loans.py holds: what has been put aside is gone when the block's first layer has been played back,
before a gradient of an earlier block is asked for. The gradients themselves are asked for at the launch; until then
they are `stale`, or on loan, and what watches the backward pass (distributed/buckets.py) finds the weights of all these
layers in the record of each.

Where the layers are small, that launch runs beside the backward pass of the block before (kernels/beside.py).

A layer that is not played back, as nothing depends on it, leaves the others waiting: they are launched when the
backward pass ends (`completed`).
"""
import contextlib

from ..device.threads import Stack
from ..kernels.beside import beside
from ..kernels.linear_gradients import linear_gradients_backward

SMALL = 9 << 20  # bytes of a layer's dy up to which the launch goes to the second stream (kernels/beside.py)

_open = Stack()  # the `Together` of the blocks that run forward in this thread, innermost last
_begun = Stack()  # those still waiting for layers in this thread's backward passes


class Together:
    """Layers of one forward pass of a block.

    weights: of the layers that may join; layers: how many have joined, parameters: their weights and biases; aside:
    (weight, bias, dy, x) of those that have been played back and not launched
    """

    def __init__(self, weights):
        self.weights, self.parameters, self.layers, self.aside = weights, [], 0, []

    def join(self, weight, bias):
        """The function to which a layer's backward gives dy (R, N) and x (R, K) instead of computing gradients."""
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
        """Launch the gradients of what has been put aside, once; twice where only some of them are added to."""
        given, self.aside = self.aside, []
        if self in _begun.items:
            _begun.remove(self)
        launches = {}
        for weight, bias, dy, x in given:
            dweight, accumulate = weight.grad_to_fill()
            dbias = None if bias is None or bias.frozen else bias.grad
            launches.setdefault(accumulate, []).append((dy, x, dweight, dbias))
        for accumulate, layers in launches.items():
            with beside(layers[0][0], *(gradient for layer in layers for gradient in layer[2:]), small=SMALL):
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
    """What `Together.join` returns, or None for a layer that computes its own gradients."""
    group = _open[-1] if _open else None
    return group.join(weight, bias) if group and any(weight is other for other in group.weights) else None


@contextlib.contextmanager
def completed():
    """Context of a backward pass: at its end, whatever has begun to wait inside it is launched."""
    before = len(_begun)
    try:
        yield
        while len(_begun) > before:
            _begun[-1].launch()
    finally:
        del _begun.items[before:]
