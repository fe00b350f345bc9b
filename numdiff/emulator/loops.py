"""Loops that wait: `while` loops give others a turn, and one that no other thread can end is
noticed."""

import sys
import time
import zlib

import numpy as np

from .arrays import CheckedArray, IntegerArray, PlainRecord, RecordArray, StructureElement
from .memory import Memory
from .values import leaves

TURNS = 4096  # turns of `while` loops after which a thread lets the others run
# turns that one turn counts for in a loop that seems to wait: its condition is constant or reads
# memory
WAITING = 64
ROUNDS = 16  # of looping before another block starts, which the loops may be waiting for
PATIENCE = 5.0  # seconds of the processor without any progress after which a wait counts as endless
# times the patience: how long loops may run that change nothing but their own variables
LONGEST = 12

# on a busy computer, time alone passes without any turn of a loop
processor_time = getattr(time, "thread_time", time.monotonic)


class Loops:
    """The part of a `Scheduler` that lets loops wait, but not for ever: kernels call `turn` in each
    `while`, and `Scheduler.run` calls the rest if only threads in loops can continue."""

    def __init__(self):
        self.spinning = []  # threads in loops, which let the others run
        self._counts = self._state = None  # shows in `_spin` whether anything still happens
        self._seen, self._rounds = None, 0  # likewise in `_loops_go_on`

    def turn(self, weight):
        """One turn of a `while` loop of the current thread, counted as `weight` turns; returns
        True."""
        thread = self.machine.thread
        thread.turns += weight
        if thread.turns >= TURNS:
            thread.turns = 0
            self.yield_turn(sys._getframe(2))
        return True

    def yield_turn(self, frame):
        """Let all others run before this thread continues."""
        thread = self.machine.thread
        thread.wait = ("loop", "", frame)
        self.spinning.append(thread)
        self.give_way()

    def _loop_variables(self):
        """The numbers that loops work with: a loop whose variables change computes something."""
        return {
            thread: [
                v if v == v else "NaN"
                for v in thread.wait[2].f_locals.values()
                if isinstance(v, (int, float, complex, np.generic))
            ]
            for thread in self.spinning
        }

    def _loops_go_on(self):
        """Whether the loops seem to get on by themselves, so that no other block need start yet."""
        seen = self.progress, self.machine.stores, self._loop_variables()
        self._rounds = 0 if self._seen is None else self._rounds + 1
        going, self._seen = seen != self._seen and self._rounds < ROUNDS, seen
        if not going:
            self._seen = None
        return going

    def _spin(self):
        """Only threads in loops can run: let them, but not for ever."""
        now, counts = processor_time(), (self.progress, self.machine.stores)
        if counts != self._counts:
            self._counts, self._begun = counts, now
        if self._repeats(now) or now - self._begun > LONGEST * self.machine.patience:
            self.machine.stuck(self)
            self.abandon()
            return
        self.awake, self.spinning = self.ordered(self.spinning), []

    def _repeats(self, now):
        """Whether the loops go through one state again and again: they wait, or one of them forgot
        its next index.

        Looked at twice, half the patience between: no variable of a loop and no byte that it can
        read has changed.
        """
        state = self.progress, self._loop_variables()
        if state != self._state:
            self._state, self._contents, self._looked = state, None, now
        elif now - self._looked > self.machine.patience / 2:
            before, self._contents, self._looked = self._contents, self._all_contents(), now
            return before == self._contents
        return False

    def _all_contents(self):
        """The memory that threads in loops can read: the arrays of the launch, those of their
        blocks and their own."""
        known = {}  # id of a Memory, which many threads see -> its checksum
        found = {None: [contents(memory, known) for memory in self.machine._memories.values()]}
        for thread in self.spinning:
            values = list(thread.block.shared.values())
            frame = thread.wait[2]
            while frame is not None and "__emulated__" in frame.f_globals:
                values += leaves(frame.f_locals.values())
                frame = frame.f_back
            found[thread] = [contents(value, known) for value in values]
        return found


def contents(value, known):
    """A value that changes with a kernel's variable: a checksum of an array's bytes, or the number
    that it is."""
    if value.__class__ in (StructureElement, PlainRecord):
        value = value._array if value.__class__ is StructureElement else np.asarray(value._data)
    if value.__class__ in (IntegerArray, RecordArray):
        value = value.data
    memory = value.memory if isinstance(value, CheckedArray) else value
    if memory.__class__ is Memory:
        if id(memory) not in known:
            known[id(memory)] = zlib.crc32(memory.bytes)
        return known[id(memory)]
    if isinstance(value, np.ndarray):
        return zlib.crc32(value.tobytes())
    return repr(value) if isinstance(value, (int, float, complex, np.generic)) else None
