"""The owners of a GPU's memory at a training step's peak.

The arenas are asked: each range that a step takes is noted with the layer and the operation that
took it, until it is given back. What was taken before the step are the buffers that all steps
share.
"""

import contextlib
from collections import Counter

from .watch import BETWEEN, MODEL, Layers, watching_operations

# device/side_stream.py
IN_FLIGHT = "backward", "freed, but in use by weight gradients on the side stream"


class Holdings:
    """Context: the bytes of each owner in some arenas at the moment of their highest total.

    owner(): names the current owner. Afterwards peak: bytes; held: Counter of bytes by owner, None
    for what was taken before, IN_FLIGHT for memory that is freed but not yet available.
    """

    def __init__(self, arenas, owner):
        self.arenas, self.owner = arenas, owner
        self.peak, self.held = 0, Counter()
        self._live = {}  # (arena's number, address) -> (owner, bytes)

    def __enter__(self):
        for number, arena in enumerate(self.arenas):
            self._watch(number, arena)
        self._note()
        return self

    def __exit__(self, *_):
        for arena in self.arenas:
            del arena.allocate, arena._release  # uncovers the class's own methods

    def _watch(self, number, arena):
        allocate, release = arena.allocate, arena._release

        def watched_allocate(nbytes):
            block = allocate(nbytes)
            self._live[number, block.address] = self.owner(), block.nbytes
            self._note()
            return block

        def watched_release(address, nbytes):
            self._live.pop((number, address), None)
            release(address, nbytes)

        arena.allocate, arena._release = watched_allocate, watched_release

    def _note(self):
        used = sum(arena.used_bytes for arena in self.arenas)
        if used > self.peak:
            self.peak, self.held = used, Counter()
            for owner, nbytes in self._live.values():
                self.held[owner] += nbytes
            if in_flight := sum(arena.held_since(0) for arena in self.arenas):
                self.held[IN_FLIGHT] = in_flight
            self.held[None] = used - sum(self.held.values())


def memory_of(step, depth=2):
    """(bytes that a `NumdiffStep` holds at most at once, [(what, bytes)], the largest first); None
    without arenas.

    depth: parts of a layer's name that distinguish layers
    """
    if not hasattr(step.backend, "arenas"):
        return None
    stack = []

    def owner():
        layer, direction = layers.now()
        layer = layer if layer in (BETWEEN, MODEL) else ".".join(layer.split(".")[:depth])
        return f"{layer} {direction}", stack[0] if stack else ""

    def around(function, arguments, call):
        stack.append(function.__name__)
        try:
            return call()
        finally:
            stack.pop()

    with contextlib.ExitStack() as held:
        layers = held.enter_context(Layers())
        held.enter_context(watching_operations(around))
        holdings = held.enter_context(Holdings(step.backend.arenas, owner))
        step.run_eagerly()
    before = holdings.held.pop(None, 0)
    rows = [
        *kept_buffers(step),
        *(
            (f"{layer}: {operation or 'results'}", nbytes)
            for (layer, operation), nbytes in holdings.held.items()
        ),
    ]
    rest = before - sum(nbytes for _, nbytes in kept_buffers(step))
    rows.append(("all else that steps share", rest))
    return holdings.peak, sorted((row for row in rows if row[1] > 0), key=lambda row: -row[1])


def kept_buffers(step):
    """[(what, bytes)] of the buffers that all steps share."""
    parameters, optimizer, images = (
        step.trainer.model.parameters,
        step.trainer.optimizer,
        step.step.images,
    )
    named = (
        ("weights", parameters.data),
        ("gradients of the weights", parameters.grad),
        ("float16 copy of the weights", parameters.half),
        ("AdamW's m", optimizer.m),
        ("AdamW's v", optimizer.v),
        ("average of the weights", optimizer.ema),
        ("batch", images),
        ("next batch", images),
    )
    return [(name, array.nbytes) for name, array in named if array is not None]


def in_short(memory):
    """The owners of the memory, in one line: buffers, and the step's own arrays, in MiB."""
    peak, rows = memory
    ours = [row for row in rows if ": " in row[0]]
    step = sum(nbytes for _, nbytes in ours)
    largest = ", ".join(f"{name} {nbytes / 2**20:,.0f}" for name, nbytes in ours[:2])
    return (
        f"{peak / 2**20:,.0f} MiB at once: {(peak - step) / 2**20:,.0f} kept between steps, {step / 2**20:,.0f} of "
        f"activations and their gradients" + (f" (most: {largest})" if largest else "")
    )
