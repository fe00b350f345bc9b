"""What a tape records, and where the gradient of a tensor is collected while it is played back.

The first consumer that is played back assigns the gradient, and later ones add to it. The last
addition is deferred until the sum is read. An operation whose backward kernel can add then takes
the gradient that its first input already has (`adds=True`), or the two terms of the sum
(`adds=TWO`), which saves a pass over memory.
"""

from ..device.side_stream import wait_for
from ..kernels.elementwise import add_forward

TWO = 2  # for `adds`


class Slot:
    """The sum of one tensor's gradients while a tape is played back.

    gradient: the sum of the gradients that have arrived, or None
    owned: no other operation holds the gradient, so the one that takes it may overwrite it; the sum
        of several gradients is a new array, and owned, too
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
        """Remove and return the gradient, as `count` terms of a sum; None stands for a missing
        term."""
        parts = (self._first, self._second) if count == TWO else (self.gradient,)
        self.gradient = None
        return parts


class Slots:
    """The slots of an operation with several outputs, taken as one: its gradient is the list of
    theirs."""

    __slots__ = ("slots",)

    def __init__(self, slots):
        self.slots = slots

    @property
    def gradient(self):
        """A list with a gradient for each output (None if nothing arrived); None if nothing arrived
        at all."""
        gradients = [slot.gradient for slot in self.slots]
        return None if all(g is None for g in gradients) else gradients

    @gradient.setter
    def gradient(self, value):
        for slot in self.slots:
            slot.gradient = value


class Record:
    """One executed operation: the function to call with its output's gradient, and where the
    results go.

    adds: `backward` takes the gradient so far of the first input (or None) as a second argument,
        and adds it to the first gradient that it returns; `TWO`: it takes two such terms
    parameters: Parameters to whose gradients `backward` adds; None stands for an absent one
    deferred: a `DeferredLayer`, or None, for each layer of the operation whose gradients are
        computed together with those of other layers
    """

    __slots__ = ("name", "output", "inputs", "backward", "adds", "_parameters", "_deferred")

    def __init__(self, name, output, inputs, backward, adds=False, parameters=(), deferred=()):
        self.name, self.output, self.inputs = name, output, inputs
        self.backward, self.adds = backward, adds
        self._parameters, self._deferred = parameters, deferred

    @property
    def parameters(self):
        """All Parameters to whose gradients playing this record may add: with a deferred layer,
        those of all layers that are deferred together, once the forward pass has ended."""
        own = [parameter for parameter in self._parameters if parameter is not None]
        together = [layer.group.parameters for layer in self._deferred if layer is not None]
        return [*own, *(parameter for group in together for parameter in group)]

    def play(self, arrived):
        """The gradients of the inputs from that of the output, one (or None) for each input."""
        so_far = ()
        if self.adds:
            slot = self.inputs[0]
            so_far = (None,) * int(self.adds) if slot is None else slot.take(self.adds)
        gradients = self.backward(arrived, *so_far)
        if len(gradients) != len(self.inputs):
            raise ValueError(
                f"{self.name}: {len(gradients)} gradients for {len(self.inputs)} inputs"
            )
        return gradients
