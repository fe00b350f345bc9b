"""Kernels on an emulated GPU: any of them, on the CPU, thread by thread, with checks (see
numdiff/emulator)."""

import functools
import random
import threading

import numpy as np

from .. import files
from ..emulator import ORDERS, Emulator, faults, writing
from ..emulator.memory import GLOBAL, Memory
from ..errors import NumdiffError
from .array import POISON, DeviceArray
from .compiler import scalar
from .requires import check_supported
from .threads import PerThread

writing.WRITERS.update(text=files.write_text, binary=files.atomic_file)


class KernelFault(faults.KernelFault, NumdiffError):
    """The emulator's, which the command line prints as one of numdiff's."""


class LaunchRefused(faults.LaunchRefused, NumdiffError):
    """As `KernelFault`."""


class Unsupported(faults.Unsupported, NumdiffError):
    """As `KernelFault`."""


KINDS = {kind.__base__: kind for kind in (KernelFault, LaunchRefused, Unsupported)}

ALIGNMENT = 256  # bytes, of every array's address: as the arena's


class EmulatorDevice:
    """A device of numdiff that runs launches in an `Emulator`; its options are those of
    `numdiff.emulator.device`."""

    name = "emulator"
    tf32 = PerThread(False)  # as in `Gpu`
    device_name = "emulated GPU (on the CPU, thread by thread)"
    multiprocessors = 2  # so few that even a tiny shape has more blocks
    peak_float32_flops = None  # there is no share of a peak to report

    def __init__(self, **options):
        self.machine = Emulator(**options)
        self.capability, self.shared_limit = self.machine.cc, self.machine.shared_limit
        self.launched = set()  # names of the kernels that have run
        self._turn = threading.Lock()  # it emulates one launch at a time
        self.vary_order = False  # whether each launch has a thread order of its own: tests set it
        self._random = random.Random(0)

    def __deepcopy__(self, memo):
        return self

    def __reduce__(self):
        return restore_emulator, ()

    def allocate(self, nbytes):
        memory = Memory(GLOBAL, nbytes)
        aligned = np.full(len(memory.bytes) + ALIGNMENT, POISON, np.uint8)
        start = -aligned.ctypes.data % ALIGNMENT
        memory.bytes = aligned[start : start + len(memory.bytes)]
        memory.address = memory.bytes.ctypes.data
        return memory

    @staticmethod
    def view(array):
        data = array.memory.bytes[array.offset : array.offset + array.nbytes]
        return data.view(array.dtype).reshape(array.shape)

    def upload(self, source, target):
        self.view(target)[...] = source
        target.memory.mark_written(target.offset, target.offset + target.nbytes)

    def download(self, array):
        return self.view(array).copy()

    def copy(self, source, target):
        self.view(target)[...] = self.view(source)
        valid = source.memory.valid[source.offset : source.offset + source.nbytes]
        target.memory.valid[target.offset : target.offset + target.nbytes] = valid

    def fill(self, array, byte):
        array.memory.bytes[array.offset : array.offset + array.nbytes] = byte
        if byte != POISON:  # poison is what unwritten memory holds
            array.memory.mark_written(array.offset, array.offset + array.nbytes)

    def synchronize(self):
        pass

    def launch(self, kernel, grid, block, args, shared=0, cluster=1):
        check_supported(self, kernel)
        arguments = _given(args)
        with self._turn:
            self.launched.add((kernel.py_func.__module__, kernel.py_func.__name__))
            if self.vary_order:
                self.machine.order = self._random.choice(ORDERS)
            try:
                self.machine.launch(kernel, grid, block, *arguments, shared=shared, cluster=cluster)
            except tuple(KINDS) as error:
                given = (
                    (error.kernel, error.faults)
                    if isinstance(error, faults.KernelFault)
                    else error.args
                )
                raise KINDS[type(error)](*given).with_traceback(error.__traceback__) from None


def _given(arguments):
    """[argument as the emulator takes it], tuples as tuples of their class."""
    return [
        _Argument(a)
        if isinstance(a, DeviceArray)
        else getattr(type(a), "_make", tuple)(_given(a))
        if isinstance(a, tuple)
        else scalar(a)
        for a in arguments
    ]


class _Argument:
    """A `DeviceArray` as the emulator takes it."""

    def __init__(self, array):
        self._array = array

    def emulated_memory(self):
        return self._array.memory, self._array.offset, self._array.shape or (1,), self._array.dtype


@functools.cache
def get_emulator(**options):
    """The emulator with these options, one for the process."""
    return EmulatorDevice(**options)


def restore_emulator():
    """The device of a pickled array."""
    return get_emulator(float64=False)
