"""Kernels in Numba's CUDA simulator: real threads on the CPU, tiny shapes only, no warp operations.

Active where the environment variable NUMBA_ENABLE_CUDASIM=1 is set before the first import. Arrays are NumPy arrays.
"""
import functools

import numpy as np

from .gpu import scalar


class Simulator:
    name = "simulator"
    capability = (7, 5)
    multiprocessors = 2

    def allocate(self, nbytes):
        return np.empty(nbytes, np.uint8)

    @staticmethod
    def view(array):
        data = array.memory[array.offset:array.offset + array.nbytes]
        return data.view(array.dtype).reshape(array.shape)

    def upload(self, source, target):
        self.view(target)[...] = source

    def download(self, array):
        return self.view(array).copy()

    def copy(self, source, target):
        self.view(target)[...] = self.view(source)

    def fill(self, array, byte):
        array.memory[array.offset:array.offset + array.nbytes] = byte

    def synchronize(self):
        pass

    def launch(self, kernel, grid, block, args, shared=0):
        values = [self.view(a) if hasattr(a, "backend") else scalar(a) for a in args]
        kernel[grid, block, 0, shared](*values)


@functools.cache
def get_simulator():
    return Simulator()
