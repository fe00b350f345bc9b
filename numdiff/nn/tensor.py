"""Tensors and the tape: reverse-mode automatic differentiation on one page.

A `Tensor` is an array (NumPy or device) and, if its gradient is needed, a `Slot` that collects it
(slots.py). While a `Tape` is active every operation of `functional/` appends one record: the slot
of its output, the slots of its inputs, and a function from the output's gradient to the inputs'
gradients. `tape.backward` plays the list from its end: the order is the reverse of execution,
always the same, with no graph search and no recursion. Gradients of parameters are added into the
model's flat gradient buffer by the operations themselves.
A record holds slots and what its function needs, never tensors; a tensor holds its slot, never the
tape. So an activation lives until the last record that needs it has been played.
"""

import numpy as np

from ..device import AnyArray, download, upload
from .parameter import trains
from .recording import check_finite, check_played_back, scoped, tapes
from .scheduling import backward_pass, before_operation
from .slots import Record, Slot, Slots


class Tensor:
    """An array with an optional gradient.
    data: NumPy array, DeviceArray, or a `Pair` of two; requires_grad: a leaf, whose `grad` is an
    array like `data`
    statistics: the sums that the convolution before it left for a GroupNorm, or None; for a `Pair`
    a tuple of both
    owned: the backward of the operation that made it does not need it, so its only reader may
    overwrite it
    """

    __slots__ = ("data", "slot", "statistics", "owned")

    def __init__(
        self, data: AnyArray, requires_grad: bool = False, statistics: AnyArray | None = None
    ):
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


class Tape:
    """Records operations while active (`with Tape() as tape:`); `tape.backward(y)` then gives every
    gradient.
    It records its own thread. Gradients of parameters are summed in the model, so each thread needs
    its own copy of it.
    check_finite: name the first operation whose result or gradient is not finite; slow, since all
    results are read.
    """

    def __init__(self, check_finite: bool = False):
        self.records: list[Record] = []
        self.check_finite = check_finite

    def __enter__(self) -> "Tape":
        tapes.append(self)
        return self

    def __exit__(self, *exception) -> None:
        tapes.remove(self)

    def backward(self, output: Tensor, gradient: AnyArray | None = None) -> None:
        """Play the tape back from `output`, once. gradient: array like `output.data`; None: ones,
        of a scalar loss."""
        check_played_back(self.records, output, gradient)
        if gradient is None:
            gradient = upload(np.ones(output.shape, np.float32), like=output.data)
        output.slot.receive(gradient)  # type: ignore[union-attr]  # checked above
        with backward_pass():
            while self.records:
                self._play(self.records.pop())

    def _play(self, record):
        arrived, record.output.gradient = record.output.gradient, None
        if arrived is None:  # nothing that was differentiated depends on it
            return
        before_operation(arrived)
        for slot, value in zip(record.inputs, record.play(arrived), strict=True):
            if self.check_finite and value is not None:
                check_finite(value, f"gradient from {record.name}")
            if slot is not None and value is not None:
                slot.receive(value)


def record(name, result, inputs, backward, parameters=(), adds=False, deferred=()):
    """Wrap an operation's `result` as a Tensor, and put the operation on the active tape.
    result: an array, or a list: then the results are a list, and `backward` takes a list
    backward: gradient of the result -> one gradient (or None) for each of the Tensors `inputs`
    parameters, adds, deferred: see `Record`; one that trains a parameter is always recorded
    """
    several = type(result) in (list, tuple)  # a `Pair` is one array
    results, tape = result if several else [result], tapes[-1] if tapes else None
    is_recorded = tape is not None and (trains(*parameters) or any(x.slot for x in inputs))
    outputs = [Tensor(array, requires_grad=is_recorded) for array in results]
    if is_recorded:
        name = scoped(name)
        if tape.check_finite:
            for array in results:
                check_finite(array, name)
        slot = Slots([y.slot for y in outputs]) if several else outputs[0].slot
        slots = tuple(x.slot for x in inputs)
        tape.records.append(Record(name, slot, slots, backward, adds, parameters, deferred))
    return outputs if several else outputs[0]
