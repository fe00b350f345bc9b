"""Deferred weight gradients: those of a block's linear layers in one launch, once all of their operands are complete.

Each gradient is a product of the gradient dy that arrives at a layer and the layer's input x. It has too few tiles to
fill a GPU (kernels/linear_gradients.py). It is not read before the backward pass ends, or before it is sent to other
ranks. So a block runs forward within `together`, and its layers register there. In the backward pass each layer defers
dy and x. The last layer played back, the first of the forward pass, launches the products of all.

    backward     … fc2: defer dy, x | fc1: defer dy, x | attention's proj: … | attention | qkv: …, and the launch

MEMORY. dy and x of fc1, fc2 and proj stay until the launch, instead of being freed layer by layer. In a DiT these are
at most 11 · D elements a token, of one block at a time. u, which is as wide as fc1's dy, is freed by then if GELU(u)
was kept.

THE INVARIANT of aliasing.py holds. Deferred arrays are freed when the block's first layer has been played back, before
a gradient of an earlier block is requested. The gradients themselves are requested at the launch. Until then they are
`stale` or aliased, and distributed/buckets.py, which watches the backward pass, finds the weights of all these layers
in the record of each.

If the layers are small, that launch runs concurrently with the backward pass of the block before
(kernels/side_stream.py).

If a layer is not played back, since nothing depends on it, the others stay deferred. They are launched when the
backward pass ends (`completed`).
"""
import contextlib

from ..device.threads import Stack
from ..kernels.linear_gradients import linear_gradients_backward
from ..kernels.side_stream import on_side_stream

SMALL = 9 << 20  # bytes of a layer's dy up to which the launch goes to the side stream (kernels/side_stream.py)

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
            with on_side_stream(layers[0][0], *(gradient for layer in layers for gradient in layer[2:]), small=SMALL):
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
