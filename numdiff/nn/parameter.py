"""A trained array: views of the model's flat weight and gradient buffers."""

import copy
from collections.abc import Sequence
from typing import Any

from ..device import AnyArray, download, fill_zero
from ..dtypes import is_half
from ..kernels.reduce.second_pass import flush_for


class Parameter:
    """A trained array: views of the model's flat weight and gradient buffers, bound when the model
    is built.

    data, grad: float32; half: the copy of data in float16 or bfloat16, or None
    read: whether the float32 has been read since the step began: what is not need not come from
        another rank in each step, if the copy of 16 bits does (partition.py)
    written: whether the operation that uses it can write the gradient instead of adding to it
        (`grad_to_fill`); then it need not be zeroed before; for a DiT that is most of the buffer
    stale: the gradient is that of the previous step; the first operation overwrites it
    padding: how many of its elements are zeros that stay zero, and belong to the layout rather than
    to the model
    float8: of a linear layer's weight in FP8 its `Layer8`, or None (float8.py)
    frozen: it is not trained: an operation need not compute its gradient, which is not read
    (`FlatParameters.freeze`)
    loan: the `AliasedPart` that aliases its gradient and is not yet reclaimed, or None
    (aliasing.py)
    """

    __slots__ = (
        "shape",
        "initial",
        "half",
        "float8",
        "written",
        "stale",
        "frozen",
        "padding",
        "loan",
        "read",
        "_data",
        "_grad",
    )

    def __init__(self, shape: Sequence[int], initial: Any, written: bool = False, padding: int = 0):
        self.shape, self.initial, self.written, self.padding = (
            tuple(map(int, shape)),
            initial,
            written,
            padding,
        )
        self.stale = self.frozen = self.read = False
        self._data = self._grad = self.half = self.float8 = self.loan = None

    @property
    def data(self) -> AnyArray:
        self.read = True
        return self._data

    @data.setter
    def data(self, view):
        self._data = view

    @property
    def grad(self) -> AnyArray:
        """The gradient, to be added to, or read."""
        if self.loan is not None:
            self.loan.reclaim()
        flush_for(self._grad)
        if self.stale:
            self.stale = False
            fill_zero(self._grad)
        return self._grad

    @grad.setter
    def grad(self, view):
        self._grad = view

    def grad_to_fill(self) -> tuple[AnyArray, bool]:
        """(gradient, whether to add to it): an operation that can do both overwrites a stale one."""
        if self.loan is not None:
            self.loan.reclaim()
        flush_for(self._grad)
        accumulate, self.stale = not (self.stale or self.frozen), False
        return self._grad, accumulate

    def __deepcopy__(self, memo):
        """A copy with its own arrays; in the copy of a whole model, `FlatParameters` binds them to
        its buffers."""
        new = Parameter(self.shape, self.initial, self.written, self.padding)
        new.frozen = self.frozen
        for name in ("data", "grad", "half"):
            setattr(new, name, copy.deepcopy(getattr(self, name), memo))
        return new

    def __reduce__(self):
        """Its values as NumPy, without the gradient and the function for its initial values."""
        return restored_parameter, (
            self.shape,
            self.written,
            None if self.data is None else download(self.data),
            self.padding,
            self.frozen,
        )

    def like(self, x: AnyArray) -> AnyArray:
        """The values in the dtype of an activation x, for a product with it."""
        return self.half if is_half(x.dtype) else self.data


def restored_parameter(shape, written, data, padding=0, frozen=False):
    parameter = Parameter(shape, None, written, padding)
    parameter.data, parameter.frozen = data, frozen
    return parameter


def trains(*parameters):
    """Whether one of the Parameters (None: absent) is trained, so that an operation must be
    recorded for it."""
    return any(parameter is not None and not parameter.frozen for parameter in parameters)
