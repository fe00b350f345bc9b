"""Copies that overlap kernels, over a stand-in for the driver that delays and reorders streams as
much as allowed."""

import ctypes
from types import SimpleNamespace

import numpy as np
import pytest

from numdiff.device import DeviceArray, traffic
from numdiff.device.gpu import Turn
from numdiff.device.traffic import (
    LAG,
    Feed,
    GpuFeed,
    GpuReadback,
    Readback,
    make_feed,
    make_readback,
)

COMPUTE = 0


class LazyDriver:
    """Streams are queues; whenever the host waits, any operation that may run is run next, at
    random."""

    CUstream_flags = SimpleNamespace(CU_STREAM_NON_BLOCKING=SimpleNamespace(value=1))
    CUevent_flags = SimpleNamespace(
        CU_EVENT_DISABLE_TIMING=SimpleNamespace(value=2),
        CU_EVENT_BLOCKING_SYNC=SimpleNamespace(value=1),
    )

    def __init__(self, rng):
        self.rng, self.streams, self.done, self.records = rng, {COMPUTE: []}, set(), 0

    def cuStreamCreate(self, flags):
        self.streams[len(self.streams)] = []
        return 0, len(self.streams) - 1

    def cuEventCreate(self, flags):
        return 0, SimpleNamespace(last=None)

    def cuEventRecord(self, event, stream):
        self.records += 1
        event.last = self.records
        self.streams[stream].append((None, lambda ticket=self.records: self.done.add(ticket)))
        return (0,)

    def cuStreamWaitEvent(self, stream, event, flags):
        self.streams[stream].append((event.last, lambda: None))
        return (0,)

    def copy(self, target, source, nbytes, stream):
        self.streams[stream].append((None, lambda: ctypes.memmove(target, source, nbytes)))
        return (0,)

    cuMemcpyHtoDAsync = cuMemcpyDtoHAsync = copy

    def cuEventSynchronize(self, event):
        while event.last is not None and event.last not in self.done:
            self.run_one()
        return (0,)

    def run_one(self):
        ready = [
            q for q in self.streams.values() if q and (q[0][0] is None or q[0][0] in self.done)
        ]
        assert ready, "the streams wait for each other"
        ready[self.rng.integers(len(ready))].pop(0)[1]()


class LazyGpu:
    name, stream_handle, turn = "cuda", COMPUTE, Turn()

    def __init__(self, rng):
        self._driver = LazyDriver(rng)

    @staticmethod
    def check(result):
        assert result[0] == 0
        return result[1] if len(result) > 1 else None

    @staticmethod
    def allocate(nbytes):
        return np.zeros(nbytes, np.uint8)

    @staticmethod
    def pointer(array):
        return array.memory.ctypes.data + array.offset

    @staticmethod
    def pinned(shape, dtype):
        return np.zeros(shape, dtype)

    def copy(self, source, target):
        self._driver.copy(self.pointer(target), self.pointer(source), source.nbytes, COMPUTE)

    def compute(self, function):
        self._driver.streams[COMPUTE].append((None, function))

    def array(self, shape, dtype):
        return DeviceArray(
            self, shape, dtype, self.allocate(int(np.prod(shape)) * np.dtype(dtype).itemsize)
        )


def view(array):
    return array.memory.view(array.dtype).reshape(array.shape)


@pytest.mark.parametrize("seed", range(20))
def test_every_step_gets_its_batch_and_every_answer_is_right(seed):
    """The host writes into the sources as soon as it may; the streams run in any order that their
    events allow."""
    rng = np.random.default_rng(seed)
    gpu = LazyGpu(rng)
    images, labels, ring = (
        gpu.array((4, 3), np.uint8),
        gpu.array((4,), np.int32),
        gpu.array((16,), np.float32),
    )
    feed, readback = make_feed([images, labels]), make_readback([ring])
    assert type(feed) is GpuFeed and type(readback) is GpuReadback and readback.lag == LAG
    sources = [(np.zeros((4, 3), np.uint8), np.zeros(4, np.int32)) for _ in range(2)]
    finished, ahead, asked = [], [], None
    for step in range(40):
        batch = sources[step % 2]  # those of the step before the last: its copy must have been made
        batch[0][...], batch[1][...] = step, 1000 + step
        feed.put(batch)

        def compute(step=step):
            assert (view(images) == step).all() and (view(labels) == 1000 + step).all()
            view(ring)[step % 16] = step
            finished.append(step)

        gpu.compute(compute)
        ahead.append(step - len(finished))
        if step % 8 == 5:
            readback.begin()
            asked = step
        if asked is not None and step == asked + LAG:
            row = readback.values()[0]
            assert [row[s % 16] for s in range(asked - 5, asked + 1)] == list(
                range(asked - 5, asked + 1)
            )
    assert max(ahead) <= 3 and not finished[20:] == []
    while any(gpu._driver.streams.values()):
        gpu._driver.run_one()
    assert finished == list(range(40))


def test_a_batch_of_another_kind_is_refused():
    gpu = LazyGpu(np.random.default_rng(0))
    feed = make_feed([gpu.array((4, 3), np.uint8)])
    for wrong in (np.zeros((4, 2), np.uint8), np.zeros((4, 3), np.float32)):
        with pytest.raises(ValueError, match="cannot copy"):
            feed.put([wrong])


def test_without_a_gpu_copies_are_made_at_once():
    x = np.zeros(3, np.float32)
    feed, readback = make_feed([x]), make_readback([x])
    assert type(feed) is Feed and type(readback) is Readback and readback.lag == 0
    feed.put([np.arange(3, dtype=np.float32)])
    readback.begin()
    x[:] = 7
    np.testing.assert_array_equal(readback.values()[0], [0, 1, 2])
    assert traffic.runs_ahead(x) is False
