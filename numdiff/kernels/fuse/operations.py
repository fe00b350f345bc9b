"""What a chain is made of: places, where an argument's numbers are, and operations, steps with
their derivatives.

SOURCE
    __init__.py.
READ NEXT
    kernel_text.py
"""

import inspect

from ...device import cuda, device_inline
from ..reduce.trees import column_sum_reference, sample_sum_reference

UNCHANGED = "dy"  # the derivative that hands dy on as it is


class Place:
    """The places of an argument's elements, for element i of y or, in a sum over rows, for a
    channel of an image.

    said: the shape, in words; shape: it from y's; flat, rows: the index as text, of what is in
    `uses`, too
    summed: the sum over rows of a gradient, where it is one; numpy: function(argument, y's shape),
    of NumPy's arrays
    loads: {neighbours: device function(argument, i)} in place of an index
    Neighbours of y must be neighbours there. One without `rows` has no part in sums, and a gradient
    only where each number is read once.
    """

    def __init__(
        self,
        said,
        shape=None,
        flat="",
        rows="",
        summed=None,
        loads=None,
        numpy=lambda a, shape: a,
        **uses,
    ):
        self.said, self.shape, self.flat, self.rows, self.summed = said, shape, flat, rows, summed
        self.loads, self.numpy, self.uses = loads, numpy, uses


EACH = Place("like x", lambda shape: shape, "i", "i")
PER_CHANNEL = Place("(C,)", lambda shape: shape[-1:], "i % C", "channel", column_sum_reference)
PER_SAMPLE = Place(
    "(B, C)",
    lambda shape: (shape[0], shape[-1]),
    "i // sample * C + i % C",
    "image * C + channel",
    sample_sum_reference,
    numpy=lambda a, shape: a.reshape(len(a), *[1] * (len(shape) - 2), -1),
)
NUMBER = Place("a number")


@cuda.jit(device=True)
def select(condition, a, b):
    """a where the condition holds, else b: what an operation uses in place of Python's `if`."""
    return a if condition else b


@cuda.jit(device=True)
def as_it_is(x):
    return x


class Operation:
    """A step of a chain, y = function(x, *operands), and its derivatives.

    function: of one element's float32 numbers, with typed literals (`float32(1)`); no loops or
    `if`, but `select`
    places: where each operand is, in order: EACH, PER_CHANNEL, PER_SAMPLE or NUMBER
    derivatives: {argument: function}, of `dy` and any of `y` and the arguments, by their names; or
    UNCHANGED
    gradients: one function instead that returns all of them, in order, where they share what is
    computed
    """

    def __init__(self, function, *places, gradients=None, **derivatives):
        self.function, self.places = on_device(function), places
        self.name = self.function.py_func.__name__.replace("<lambda>", "step")
        self.takes, *self.operands = inspect.signature(self.function.py_func).parameters
        self.derivatives = {
            (name,): d if d is UNCHANGED else on_device(d) for name, d in derivatives.items()
        }
        if gradients:
            self.derivatives = {(self.takes, *self.operands): on_device(gradients)}
        if len(places) != len(self.operands):
            raise ValueError(
                f"fuse: {self.name} has {len(self.operands)} operands after {self.takes}, and "
                f"{len(places)} places: say of each where it is, such as PER_CHANNEL."
            )
        known = {"dy", "y", self.takes, *self.operands}
        for names, derivative in self.derivatives.items():
            if unknown := {*names, *parameters(derivative)} - known:
                raise ValueError(
                    f"fuse: {self.name} has no argument {', '.join(sorted(unknown))}: give derivatives of "
                    f"{', '.join([self.takes, *self.operands])}; they may name these, dy and y."
                )


def on_device(function):
    return function if hasattr(function, "py_func") else device_inline(function)


def parameters(derivative):
    return (
        ["dy"]
        if derivative is UNCHANGED
        else list(inspect.signature(derivative.py_func).parameters)
    )
