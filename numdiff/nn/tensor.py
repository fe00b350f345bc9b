"""Tensors and the tape: reverse-mode automatic differentiation in one file.

A `Tensor` is an array (NumPy or device) and, if something wants its gradient, a `Slot` to collect it in. While a `Tape`
is active every operation of `functional/` appends one record: the slot of its output, the slots of its inputs, and a
function from the output's gradient to the inputs' gradients. `tape.backward` walks the list from its end, so the order
is the execution order reversed, always the same, with no graph search and no recursion.

Memory. A record holds slots and whatever its function needs, never tensors; a tensor holds its slot, never the tape. So
there is no reference cycle, and an activation lives exactly until the forward pass has dropped it and the last record
that needs it has been played back.

Accumulation. Parameter gradients are added into the model's flat gradient buffer by the operations themselves (+=).
Activation gradients are assigned (=) by the first consumer that is played back and added by the later ones, the last
one not before somebody asks for the sum. An operation whose backward kernel can add takes the gradient that its first
input already has (`adds=True`), or two that are still to be added up (`adds=TWO`), which saves a pass over memory.
"""
import contextlib
import copy
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..device import AnyArray, download, fill_zero, upload
from ..device.threads import Stack
from ..dtypes import is_half
from ..errors import shown
from ..float8 import numbers_of
from ..kernels.beside import wait_for, wait_if_full
from ..kernels.concat import Pair
from ..kernels.elementwise import add_forward
from ..kernels.second_pass import collected, settle_for
from .together import completed

_active = Stack()  # the tapes that are recording in this thread, innermost last
_unwanted = Stack()  # weights of the linear layers whose results nobody reads, innermost last
TWO = 2  # for `adds`


class Slot:
    """Where the gradient of one tensor is collected while a tape is played back.

    gradient: the sum of what has been received, or None
    owned: an operation has left a gradient that nobody else holds, so whoever takes it may overwrite it; a sum of
        several gradients is a new array, and owned, too
    """

    __slots__ = ("_first", "_second", "owned")

    def __init__(self):
        self._first, self._second, self.owned = None, None, False

    @property
    def gradient(self):
        if self._second is not None:
            wait_for((self._first, self._second))
            self.gradient = add_forward(self._first, self._second)
        return self._first

    @gradient.setter
    def gradient(self, value):
        self._first, self._second = value, None

    def receive(self, gradient):
        if self.gradient is None:
            self._first = gradient
        else:
            self._second = gradient

    def take(self, count):
        """What has been received, as `count` gradients whose sum it is (None: no more); afterwards it is gone."""
        parts = (self._first, self._second) if count == TWO else (self.gradient,)
        self.gradient = None
        return parts


class Slots:
    """The slots of an operation with several outputs, taken as one: its gradient is the list of theirs."""

    __slots__ = ("slots",)

    def __init__(self, slots):
        self.slots = slots

    @property
    def gradient(self):
        """A list with a gradient for each output (None if nothing arrived); None if nothing arrived at all."""
        gradients = [slot.gradient for slot in self.slots]
        return None if all(g is None for g in gradients) else gradients

    @gradient.setter
    def gradient(self, value):
        for slot in self.slots:
            slot.gradient = value


class Tensor:
    """An array with an optional gradient.

    data: NumPy array or DeviceArray, or a `Pair` of two (`functional.pair`); bytes are in E4M3, for the one layer that
        reads them; requires_grad: collect `grad` for it (it
    is a leaf). After `tape.backward`, `grad` of such a leaf is an array like `data`.
    statistics: those that the convolution before left for a GroupNorm, or None; for a `Pair` a tuple of both
    owned: the array is an operation's result that its backward does not need: whoever alone reads it may overwrite it
    """

    __slots__ = ("data", "slot", "statistics", "owned")

    def __init__(self, data: AnyArray, requires_grad: bool = False, statistics: AnyArray | None = None):
        self.data, self.statistics, self.owned = data, statistics, False
        self.slot = Slot() if requires_grad else None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.data.shape

    @property
    def dtype(self) -> np.dtype:
        return self.data.dtype

    @property
    def requires_grad(self) -> bool:
        return self.slot is not None

    @property
    def grad(self) -> AnyArray | None:
        return self.slot.gradient if self.slot else None

    def numpy(self) -> np.ndarray:
        """The values as a NumPy array (waits for the device)."""
        return download(self.data)

    def __repr__(self):
        return f"Tensor({self.data!r})"


class Parameter:
    """A trained array: views of the model's flat weight and gradient buffers, bound when the model is built.

    data, grad: float32; half: the copy of data in float16 or bfloat16, or None
    read: whether the float32 has been read since the step began: what is not need not come from another rank in each
        step, if the copy of 16 bits does (partition.py)
    written: whether the operation that uses it can write the gradient instead of adding to it (`grad_to_fill`); then it
        need not be zeroed before; for a DiT that is most of the buffer
    stale: the gradient is that of the previous step; the first operation overwrites it
    padding: how many of its numbers are zeros that stay zero, and belong to the layout rather than to the model
    float8: of a linear layer's weight in FP8 its `Layer8`, or None (float8.py)
    frozen: it is not trained: an operation need not compute its gradient, and nobody reads it (`FlatParameters.freeze`)
    loan: the `Loan` of which its gradient is a part and that is still to be called in, or None (loans.py)
    """

    __slots__ = ("shape", "initial", "half", "float8", "written", "stale", "frozen", "padding", "loan", "read", "_data",
                 "_grad")

    def __init__(self, shape: Sequence[int], initial: Any, written: bool = False, padding: int = 0):
        self.shape, self.initial, self.written, self.padding = tuple(map(int, shape)), initial, written, padding
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
            self.loan.call_in()
        settle_for(self._grad)
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
            self.loan.call_in()
        settle_for(self._grad)
        accumulate, self.stale = not (self.stale or self.frozen), False
        return self._grad, accumulate

    def __deepcopy__(self, memo):
        """A copy with its own arrays; in the copy of a whole model, `FlatParameters` binds them to its buffers."""
        new = Parameter(self.shape, self.initial, self.written, self.padding)
        new.frozen = self.frozen
        for name in ("data", "grad", "half"):
            setattr(new, name, copy.deepcopy(getattr(self, name), memo))
        return new

    def __reduce__(self):
        """Its values as NumPy, without the gradient and the function for its initial values."""
        return restored_parameter, (self.shape, self.written, None if self.data is None else download(self.data),
                                    self.padding, self.frozen)

    def like(self, x: AnyArray) -> AnyArray:
        """The values in the dtype of an activation x, for a product with it."""
        return self.half if is_half(x.dtype) else self.data


def restored_parameter(shape, written, data, padding=0, frozen=False):
    parameter = Parameter(shape, None, written, padding)
    parameter.data, parameter.frozen = data, frozen
    return parameter


class Record:
    """One executed operation: what to call with the output's gradient, and where its results go.

    adds: `backward` takes a second argument, the gradient so far of the first input or None, and adds it to the first
        gradient that it returns; `TWO`: it takes a third argument, too, to be added to the second, or None
    """

    __slots__ = ("name", "output", "inputs", "backward", "adds")

    def __init__(self, name, output, inputs, backward, adds=False):
        self.name, self.output, self.inputs, self.backward, self.adds = name, output, inputs, backward, adds

    def outputs(self):
        """The slots of the results."""
        return self.output.slots if isinstance(self.output, Slots) else (self.output,)

    def play(self, arrived):
        """The gradients of the inputs from that of the output; that of the first input includes what it had received
        before."""
        if not self.adds:
            return self.backward(arrived)
        slot = self.inputs[0]
        before = (None,) * int(self.adds) if slot is None else slot.take(self.adds)
        return self.backward(arrived, *before)


class Tape:
    """Records operations while active (`with Tape() as tape:`); `tape.backward(y)` then gives every gradient.

    A tape records what its own thread does. Two threads may differentiate at the same time, each with its own tape,
    and also ask one model for gradients of its inputs; but gradients of parameters are summed in the model, so threads
    that need them must each have a model (`copy.deepcopy`).

    check_finite: stop at the first operation, forward or backward, whose result holds an infinity or a NaN, with a
    `FloatingPointError` that names it. Slow: it reads every result back; meant for finding a fault.
    """

    def __init__(self, check_finite: bool = False):
        self.records = []
        self.check_finite = check_finite

    def __enter__(self) -> "Tape":
        _active.append(self)
        return self

    def __exit__(self, *exception):
        _active.remove(self)

    def backward(self, output: Tensor, gradient: AnyArray | None = None) -> None:
        """Play the tape back from `output`.

        gradient: array like `output.data`, the gradient that arrives there; None means ones (a scalar loss).
        Every record is dropped as soon as it has been played, and with it the activations that it kept: a tape is
        played once. For several outputs, add them up first.
        """
        if getattr(output, "slot", None) is None:
            raise ValueError("backward() needs an output that depends on a parameter or on a tensor made with "
                             "requires_grad=True while the tape was active")
        if not any(output.slot in record.outputs() for record in reversed(self.records)):
            raise ValueError("this tape does not hold the operation that gave the output: a tape can be played back "
                             "only once, and only from what was computed while it was active; record the forward pass "
                             "again")
        if gradient is None:
            gradient = upload(np.ones(output.shape, np.float32), like=output.data)
        elif getattr(gradient, "shape", None) != output.shape:
            raise ValueError(f"the gradient that arrives at an output has its shape, {tuple(output.shape)}, and not "
                             f"{getattr(gradient, 'shape', None) or 'that of ' + shown(gradient)}")
        output.slot.receive(gradient)
        with collected(), completed():  # parameters' gradients are there when it ends
            while self.records:
                self._play(self.records.pop())

    def _play(self, record):
        arrived, record.output.gradient = record.output.gradient, None
        if arrived is None:  # nothing that was differentiated depends on it
            return
        wait_if_full()
        wait_for(arrived if isinstance(arrived, list) else (arrived,))
        gradients = record.play(arrived)
        if len(gradients) != len(record.inputs):
            raise ValueError(f"{record.name}: {len(gradients)} gradients for {len(record.inputs)} inputs")
        for slot, value in zip(record.inputs, gradients, strict=True):
            if self.check_finite and value is not None:
                check_finite(value, f"gradient from {record.name}")
            if slot is not None and value is not None:
                slot.receive(value)


@contextlib.contextmanager
def unwanted_from(weight):
    """Context in which nobody reads what the linear layer of this weight gives."""
    _unwanted.append(weight)
    try:
        yield
    finally:
        _unwanted.pop()


def is_wanted(weight):
    """Whether a linear layer's result is needed: not where it is recomputed for its backward alone (recompute.py)."""
    return not (_unwanted and _unwanted[-1] is weight)


def is_recording():
    """Whether a tape of this thread is active; if not, only results are needed."""
    return bool(_active) and _active[-1] is not None


def is_training():
    """Whether a tape of this thread is active, or the operations of one are to be recorded later (recompute.py)."""
    return bool(_active)


def record(name, result, inputs, backward, has_parameters=False, adds=False):
    """Wrap an operation's `result` array as a Tensor, and put the operation on the active tape.

    inputs: Tensors; backward: gradient of the result -> a tuple with one gradient (or None) for each input.
    has_parameters: the operation also adds to gradients of parameters (`trains`), so it is always recorded.
    adds: `backward` also takes the gradient so far of the first input (or None), and adds it (see `Record`).
    """
    tape = _active[-1] if _active else None
    if tape is None or not (has_parameters or any(x.slot for x in inputs)):
        return Tensor(result)
    name = f"{scope[-1]} {name}" if scope and scope[-1] else name
    if tape.check_finite:
        check_finite(result, name)
    output = Tensor(result, requires_grad=True)
    tape.records.append(Record(name, output.slot, tuple(x.slot for x in inputs), backward, adds))
    return output


def record_parts(name, results, inputs, backward, has_parameters=False):
    """`record` for an operation with several results: a list of Tensors; `backward` takes the list of gradients."""
    tape = _active[-1] if _active else None
    if tape is None or not (has_parameters or any(x.slot for x in inputs)):
        return [Tensor(result) for result in results]
    name = f"{scope[-1]} {name}" if scope and scope[-1] else name
    if tape.check_finite:
        for result in results:
            check_finite(result, name)
    outputs = [Tensor(result, requires_grad=True) for result in results]
    tape.records.append(Record(name, Slots([y.slot for y in outputs]), tuple(x.slot for x in inputs), backward))
    return outputs


scope = Stack()  # full names of the modules that this thread is executing, innermost last, to name records


def check_finite(array, name):
    parts = [download(part) for part in (array if isinstance(array, Pair) else [array])]
    parts = [numbers_of(part) if part.dtype == np.uint8 else part for part in parts]
    bad = sum(values.size - np.count_nonzero(np.isfinite(values)) for values in parts)
    if bad:
        raise FloatingPointError(f"{name} is the first non-finite tensor ({bad} of {array.size} values)")
