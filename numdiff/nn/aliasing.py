"""Aliasing activations onto the gradient buffer, which is not used before the backward pass.

A step reserves memory for the gradients of all weights, 4 bytes each. Until the backward pass
writes them, that memory is free. So once a block has run forward, its part of the buffer becomes
available to the blocks that run after it. The part is reclaimed when the backward pass requests the
first of the block's gradients:

    forward      block 0, aliased | block 1, over 0's, aliased | block 2, over 0's and 1's, aliased | …
    backward     … | 2 is reclaimed, block 2 | 1 is reclaimed, block 1 | 0 is reclaimed, block 0

THE INVARIANT. Arrays that a block allocates in its forward pass are freed before the first gradient
of an earlier block is requested. Such an array is held by records that are made after it was
allocated. The tape plays these records back before all earlier ones, and drops each after playing
it. Nothing else holds the array.

It is checked, not assumed. Memory is freed with the last reference to it, and a step ends with an
error if a part that is reclaimed still holds an array. That can only happen to a model that keeps
an activation for itself, or that uses a block's parameters again after the block. Such a model sets
`lends_gradients = False`.

THE SAME BITS. A gradient that operations add to must begin at zero. So must the gaps between
parameters, which the gradient norm and AdamW read, too. In an aliased part they are zeroed when it
is reclaimed, in a separate launch; all others are zeroed when the step begins. Large weights'
gradients are overwritten (`Parameter.stale`).

WHEN NOTHING IS ALIASED. With several microbatches: the buffer holds gradients while the next
microbatch runs forward. In a block with a frozen parameter: its gradient stays zero.

SEVERAL RANKS alias, too. A bucket (`mpi`) or group (`peer`, if it reduces concurrently with the
backward pass) is sent when all of its gradients are complete, so none of its blocks is aliased any
more. All that reads this step's gradients precedes the next step on the stream. NCCL's all-reduce
and the update are launched there, and `mpi` waits for its copies. With `peer` a rank passes a
barrier after which no other rank reads its memory: the last one of the gather, or the one in
`gather_partials` if ranks share the update.
"""

import contextlib
import functools

import numpy as np

from ..device import upload
from ..device.arena import AliasedArena
from ..device.side_stream import rejoin
from ..device.threads import ThreadStack
from ..errors import NumdiffError
from ..kernels.optimizer.zero_ranges import pieces, zero_ranges

FLOAT = np.dtype(np.float32).itemsize
SMALLEST = 4 << 20  # bytes of gradients that are worth a separate launch to zero some of them

_running = (
    ThreadStack()
)  # the `Aliasing` whose forward pass is running in this thread, innermost last


def begin_at_zero(spans):
    """What of the gradients must be zero before operations add to it, as `zero_ranges` takes it: of
    a gradient that is written the gap behind it, from a multiple of 4 on, which the kernel wants;
    others altogether.

    spans: (Parameter, first element, the one after its last, first of the next parameter) of each
    """
    ranges = [
        (stop // 4 * 4 if parameter.written else first, end)
        for parameter, first, stop, end in spans
    ]
    return pieces([(first, stop) for first, stop in ranges if first < stop])


class AliasedPart:
    """The part of the gradient buffer of one block, or of neighbouring ones, that activations may
    alias.

    Attributes blocks: the modules; left: those that have yet to run forward; out: whether it is
    aliased now
    """

    def __init__(self, aliasing, blocks, spans):
        """spans: of the parameters, as `FlatParameters.spans` gives them"""
        self.aliasing, self.blocks, self.left, self.out = aliasing, blocks, set(blocks), False
        self.parameters = [parameter for parameter, *_ in spans]
        self._zeroed = upload(begin_at_zero(spans), aliasing.parameters.grad)
        # in bytes
        self.first, self.nbytes = FLOAT * spans[0][1], FLOAT * (spans[-1][3] - spans[0][1])

    @property
    def pending(self):
        """Whether it has yet to be reclaimed."""
        return self.parameters[0].loan is self

    @property
    def address(self):
        return self.aliasing.backend.pointer(self.aliasing.parameters.grad) + self.first

    def ran(self, block):
        """A block has run forward: once all have, later ones may allocate their results here."""
        self.left.discard(block)
        if not (self.left or self.out):
            self.aliasing.arena.alias(self.address, self.nbytes)
            self.out = True

    def reclaim(self):
        """The first of these gradients is requested: from now on only gradients are stored here."""
        rejoin()  # the results here may still be read
        if self.out and not self.aliasing.arena.reclaim(self.address, self.nbytes):
            name = self.blocks[0].name
            raise NumdiffError(
                f"results of the forward pass are still where the gradients of {name} are to be "
                "written: the model keeps an activation, or uses a parameter of this block after it; "
                "set lends_gradients = False in its class."
            )
        zero_ranges(self.aliasing.parameters.grad, self._zeroed)
        self.forget()

    def forget(self):
        self.left, self.out = set(self.blocks), False
        for parameter in self.parameters:
            parameter.loan = None


class Aliasing:
    """Context of the forward and backward pass of one step, in which activations alias the blocks'
    gradients. `begin_gradients` comes before it, with `rest`.

    Attributes rest: the ranges of the gradients that are zeroed when a step begins, as
    `zero_ranges` takes them;
    arena: within the context, the arena of the aliased parts; current: the part of the block that
    runs forward now
    """

    def __init__(self, model):
        self.model, self.parameters, self.backend = model, model.parameters, model.backend
        self.arena = self.current = None
        self._lay_out()

    def _lay_out(self):
        self._trained_ranges = self.parameters.trained_ranges
        spans = self.parameters.spans()
        self.parts = [AliasedPart(self, *run) for run in self._runs(spans)]
        self._of_block = {block: part for part in self.parts for block in part.blocks}
        aliased = {parameter for part in self.parts for parameter in part.parameters}
        rest = begin_at_zero(span for span in spans.values() if span[0] not in aliased)
        self._rest = upload(rest, self.parameters.grad)

    def _runs(self, spans):
        """(blocks, spans of their parameters) of each part: neighbours, until they are SMALLEST."""
        blocks, found = [], []
        for block in self.model.blocks_within():
            inside = [spans[name] for name, _ in block.named_parameters()]
            if not inside or any(parameter.frozen for parameter, *_ in inside):
                continue
            if found and found[-1][3] != inside[0][1]:  # they are no neighbours
                blocks, found = [], []
            blocks, found = [*blocks, block], [*found, *inside]
            if FLOAT * (found[-1][3] - found[0][1]) >= SMALLEST:
                yield blocks, found
                blocks, found = [], []

    @property
    def rest(self):
        # others were frozen since the last step
        if self.parameters.trained_ranges != self._trained_ranges:
            self._lay_out()
        return self._rest

    def __enter__(self):
        self.arena = AliasedArena(self.backend.arena)
        for part in self.parts:
            for parameter in part.parameters:
                parameter.loan = part
        return self

    def __exit__(self, error, *_):
        for part in filter(lambda part: part.pending, self.parts):
            if error is None:  # no gradient of it was requested
                part.reclaim()
            else:
                part.forget()
        self.arena = None

    @contextlib.contextmanager
    def forward(self):
        """Context of the forward pass, within the other."""
        _running.append(self)
        try:
            yield
        finally:
            _running.pop()

    @contextlib.contextmanager
    def _passing(self, block):
        """Context of a block's forward pass."""
        part = self.current = self._of_block[block]
        try:
            with self.backend.within(self.arena):
                yield
        finally:
            self.current = None
        part.ran(block)

    @contextlib.contextmanager
    def _again(self, part):
        """Context in which the backward pass runs again what a block of this part ran forward."""
        if part.pending:
            part.reclaim()
        rejoin()  # what was freed there may still be read
        with self.backend.within(self.arena):
            yield


def passing(module):
    """Context of a module's forward pass; its allocations alias the gradients of blocks that ran
    before."""
    aliases = _running and module in _running[-1]._of_block
    return _running[-1]._passing(module) if aliases else contextlib.nullcontext()


def again():
    """For what the backward pass is to run again: a function that gives the context for it. What is
    allocated there is gone once it has been played back, so that it may alias the gradients of
    earlier blocks."""
    if not _running or _running[-1].current is None:
        return contextlib.nullcontext
    return functools.partial(_running[-1]._again, _running[-1].current)


def aliasing_of(model):
    """The `Aliasing` of a model's steps, or None without aliasing: a model that does not support
    it, or a device without an arena."""
    return Aliasing(model) if model.lends_gradients and hasattr(model.backend, "arena") else None
