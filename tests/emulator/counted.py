"""What the emulator counts of an operation of the project, for the tests of cost functions."""

import numpy as np

from numdiff.device import upload
from numdiff.device.emulator import EmulatorDevice
from numdiff.emulator.counts import Recorder

RNG = np.random.default_rng(0)
B, P, C = 2, 8, 32  # samples, pixels of each, channels
N = B * P * C


class Counted:
    """Runs an operation on an emulated device and keeps its figures."""

    def __init__(self, operation):
        recorder = Recorder()
        self.device = EmulatorDevice(recorder=recorder, checks=False)
        operation(self)
        self.recorder, self.total = recorder, recorder.total()

    def __call__(self, *shape):
        return upload(RNG.standard_normal(shape).astype(np.float32), self.device)

    def full(self, value, *shape):
        return upload(np.full(shape, value, np.float32), self.device)


def number(u, value, dtype, count=1):
    return upload(np.full(count, value, dtype), u.device)


def steps(u, count):
    return upload(np.arange(count, dtype=np.int32), u.device)


def samples(u):
    return number(u, 3, np.uint32), upload(np.arange(2, dtype=np.uint32), u.device)
