"""An emulator that says it is a GPU: its kernels take a moment and do nothing, its graphs call
their function again, its events come at a fixed pace."""

import contextlib
import functools
from types import SimpleNamespace

import numpy as np

from numdiff.device.arena import Arena
from numdiff.device.array import POISON
from numdiff.device.emulator import ALIGNMENT, EmulatorDevice
from numdiff.emulator.memory import GLOBAL, Memory

EVENT_MS = 0.002  # between any two events


class FakeDriver:
    def __init__(self):
        self.alive, self.recorded, self.idle = 0, 0, False

    def cuEventCreate(self, flags):
        self.alive += 1
        return 0, SimpleNamespace(number=None)

    def cuEventRecord(self, event, stream):
        event.number = self.recorded
        self.recorded += 1
        return (0,)

    def cuEventQuery(self, event):
        return (0 if self.idle else 600,)

    def cuEventElapsedTime(self, a, b):
        return 0, EVENT_MS * (b.number - a.number)

    def cuEventDestroy(self, event):
        self.alive -= 1
        return (0,)


class Held(Memory):
    """Memory that an arena counts for as long as it lives."""

    __slots__ = ("block",)


class FakeGpu(EmulatorDevice):
    device_name = "NVIDIA H100 80GB HBM3"
    peak_float32_flops, stream_handle, turn = 66.9e12, 0, contextlib.nullcontext()

    def __init__(self):
        self._taken = 0
        self.arenas = [Arena(self._take_segment, 1 << 16)]
        self._arena = self.arenas[0]
        super().__init__(float64=False, checks=False)
        self._driver, self.captured = FakeDriver(), 0

    def copy(self, source, target):
        if source.nbytes < 1 << 24:  # what is larger is copied to be timed
            super().copy(source, target)

    def _take_segment(self, nbytes):
        self._taken += nbytes
        return self._taken - nbytes

    def allocate(self, nbytes):
        memory = Held(GLOBAL, nbytes)
        aligned = np.full(len(memory.bytes) + ALIGNMENT, POISON, np.uint8)
        start = -aligned.ctypes.data % ALIGNMENT
        memory.bytes = aligned[start : start + len(memory.bytes)]
        memory.address = memory.bytes.ctypes.data
        memory.block = self._arena.allocate(nbytes)
        return memory

    @property
    def arena(self):
        return self._arena

    @property
    def peak_bytes(self):
        return sum(arena.peak_bytes for arena in self.arenas)

    @staticmethod
    def check(result):
        assert result[0] == 0
        return result[1] if len(result) > 1 else None

    @staticmethod
    def pointer(array):
        return array.memory.address + array.offset

    @staticmethod
    def memory_info():
        return 1 << 13, 1 << 14

    def new_arena(self):
        self.arenas.append(Arena(self._take_segment, 1 << 16))
        return self.arenas[-1]

    @functools.cached_property
    def inference_arena(self):
        return self.new_arena()

    @staticmethod
    def trim(arena):
        arena.trim(lambda address: None)

    @contextlib.contextmanager
    def within(self, arena):
        assert getattr(arena, "outer", arena) in self.arenas
        outer, self._arena = self._arena, arena
        try:
            yield
        finally:
            self._arena = outer

    def launch(self, kernel, *_):
        """Runs nothing."""

    def capture(self, function):
        self.captured += 1
        return function
