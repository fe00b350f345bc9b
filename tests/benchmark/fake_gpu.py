"""An emulator that says it is a GPU: its graphs call their function again, its events come at a fixed pace."""
import contextlib
from types import SimpleNamespace

from numdiff.device.emulator import EmulatorDevice

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


class FakeGpu(EmulatorDevice):
    device_name = "NVIDIA H100 80GB HBM3"
    peak_float32_flops, peak_bytes, stream_handle = 66.9e12, 1 << 20, 0

    def __init__(self):
        super().__init__(float64=False, checks=False)
        self._driver, self.arenas, self.captured = FakeDriver(), [], 0

    @staticmethod
    def check(result):
        assert result[0] == 0
        return result[1] if len(result) > 1 else None

    @staticmethod
    def memory_info():
        return 1 << 13, 1 << 14

    def new_arena(self):
        self.arenas.append(object())
        return self.arenas[-1]

    @contextlib.contextmanager
    def within(self, arena):
        assert arena in self.arenas
        yield

    def capture(self, function):
        self.captured += 1
        return function
