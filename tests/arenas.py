"""Devices for tests whose arrays are in an arena, as a GPU's do."""

import contextlib
import ctypes

import numpy as np

from numdiff.device.arena import Arena
from numdiff.device.array import POISON, DeviceArray
from numdiff.device.emulator import EmulatorDevice
from numdiff.diffusion.memory import Measuring
from numdiff.emulator.memory import GLOBAL, Memory


def segments(kept):
    """A function that takes memory of the host, at addresses as the driver gives them, for an
    arena."""

    def take(nbytes):
        kept.append(np.full(nbytes + 256, POISON, np.uint8))
        return kept[-1].ctypes.data + -kept[-1].ctypes.data % 256

    return take


class HeldMemory(Memory):
    """A part of an arena's segment."""

    __slots__ = ("block",)


class ArenaEmulator(EmulatorDevice):
    """An emulator whose arrays are in an arena, so that they may be one over the other."""

    def __init__(self):
        super().__init__(checks=False, float64=False)
        self.kept = []
        self.arena = Arena(segments(self.kept), 1 << 20)

    def allocate(self, nbytes):
        block = self.arena.allocate(nbytes)
        data = np.frombuffer((ctypes.c_uint8 * block.nbytes).from_address(block.address), np.uint8)
        memory = HeldMemory(GLOBAL, block.nbytes, address=block.address, data=data)
        memory.block = block
        return memory

    within = Measuring.within

    @staticmethod
    def pointer(array):
        return array.memory.address + array.offset


class LateEmulator(ArenaEmulator):
    """An emulator with further streams: what is launched there runs as late as it may, when the
    first waits for it. By then memory that was given to others meanwhile holds what they wrote."""

    recording = True

    def __init__(self):
        super().__init__()
        self.late, self.queue, self.done, self.jobs = {}, None, {}, 0

    @contextlib.contextmanager
    def forked(self, name):
        self.queue = self.late.setdefault(name, [])
        self.jobs += 1
        try:
            yield
        finally:
            self.queue = None

    def mark(self, name):
        return name, self.done.get(name, 0) + len(self.late[name])

    def wait_for(self, event):
        self._now_or_late(self._run_until, *event)

    def _run_until(self, name, end):
        while self.done.get(name, 0) < end:
            self._run_first(name)

    def join(self, name):
        while self.late.get(name):
            self._run_first(name)

    def _run_first(self, name):
        method, arguments = self.late[name].pop(0)
        self.done[name] = self.done.get(name, 0) + 1
        method(*arguments)

    def launch(self, kernel, grid, block, args, shared=0, cluster=1):
        self._now_or_late(super().launch, kernel, grid, block, args, shared, cluster)

    def fill(self, array, byte):
        self._now_or_late(super().fill, array, byte)

    def copy(self, source, target):
        self._now_or_late(super().copy, source, target)

    def _now_or_late(self, method, *arguments):
        if self.queue is None:
            method(*arguments)
        else:
            self.queue.append((method, _without_blocks(arguments)))


def _without_blocks(value):
    """Arguments over the same memory, which do not keep it from being freed."""
    if isinstance(value, DeviceArray):
        memory = value.memory
        same = HeldMemory(GLOBAL, memory.size, address=memory.address, data=memory.bytes)
        return DeviceArray(value.backend, value.shape, value.dtype, same, value.offset)
    if isinstance(value, tuple):
        parts = [_without_blocks(part) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    return value
