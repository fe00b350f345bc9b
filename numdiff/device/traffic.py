"""Copies between the host and a device that overlap the kernels: batches to the device, figures
back to the host.

A step must not wait for either. So a separate stream copies a batch into a second buffer while the
step before computes. One copy within the device, a few microseconds, then brings it to the address
that the step reads. Figures are copied down by another stream as soon as the step that made them is
done, and the host looks at them steps later.

    feed = make_feed([images, labels])        readback = make_readback([ring])
    feed.put([batch, its_labels])             readback.begin()
    …launch a step…                           …more steps…
    feed.put(…)                               readback.values()

Both bound how far the host runs ahead of a GPU: `put` returns once the previous batch has arrived,
which happens only after the step two before it is done. On a device that runs each launch at once,
like NumPy and the emulator, the same calls copy at once.
"""

import numpy as np

from .array import copy_into, download, empty_like, is_device
from .cpu import over_batch

# steps after which figures are read: one more than the host may be ahead, so that nothing waits for
# them
LAG = 4


class Feed:
    """Copies batches into `targets`, arrays that keep their addresses, at once."""

    def __init__(self, targets):
        self.targets = targets

    def put(self, sources):
        """Copy NumPy arrays like the targets into them, for what is launched from now on.

        The sources must stay as they are until the next `put` has returned.
        """
        for target, source in zip(self.targets, sources, strict=True):
            copy_into(target, source)


class GpuFeed(Feed):
    """Copies batches into `targets` on a GPU, concurrently with the kernels if the sources are
    page-locked."""

    def __init__(self, targets):
        super().__init__(targets)
        self.gpu = targets[0].backend
        self._waiting = [empty_like(target) for target in targets]  # the second buffer
        self._stream = stream_of(self.gpu)
        self._taken = event_of(self.gpu)  # the second buffer's contents have gone on to the targets
        self._arrived = [event_of(self.gpu), event_of(self.gpu)]  # alternately
        self._sources = [None, None]
        self._puts = 0

    def put(self, sources):
        gpu, driver, check = self.gpu, self.gpu._driver, self.gpu.check
        sources = [np.asarray(source, order="C") for source in sources]
        for target, source in zip(self.targets, sources, strict=True):
            if target.shape != source.shape or target.dtype != source.dtype:
                raise ValueError(
                    f"cannot copy {source.dtype}{source.shape} into {target.dtype}{target.shape}"
                )
        turn, before = self._puts % 2, 1 - self._puts % 2
        if self._puts:
            check(driver.cuStreamWaitEvent(self._stream, self._taken, 0))
        for array, source in zip(self._waiting, sources, strict=True):
            check(
                driver.cuMemcpyHtoDAsync(
                    gpu.pointer(array), source.ctypes.data, source.nbytes, self._stream
                )
            )
        check(driver.cuEventRecord(self._arrived[turn], self._stream))
        with gpu.turn:
            check(driver.cuStreamWaitEvent(gpu.stream_handle, self._arrived[turn], 0))
            for array, target in zip(self._waiting, self.targets, strict=True):
                gpu.copy(array, target)
            check(driver.cuEventRecord(self._taken, gpu.stream_handle))
        if self._puts:
            check(driver.cuEventSynchronize(self._arrived[before]))
        # a copy under way needs its source
        self._sources[turn], self._sources[before] = sources, None
        self._puts += 1


class Readback:
    """Copies of some arrays on the host, made immediately. lag: steps after which `values` should
    be requested."""

    lag = 0

    def __init__(self, arrays):
        self.arrays = arrays

    def begin(self):
        """Copy the arrays as they are after all that is launched so far."""
        self._values = [download(array) for array in self.arrays]

    def values(self):
        """NumPy arrays: what the last `begin` was for."""
        return self._values


class GpuReadback(Readback):
    """Copies of some arrays of a GPU, which arrive in page-locked memory while kernels run."""

    lag = LAG

    def __init__(self, arrays):
        super().__init__(arrays)
        self.gpu = arrays[0].backend
        self._host = [self.gpu.pinned(array.shape, array.dtype) for array in arrays]
        self._stream = stream_of(self.gpu)
        self._computed, self._arrived = event_of(self.gpu), event_of(self.gpu)

    def begin(self):
        gpu, driver, check = self.gpu, self.gpu._driver, self.gpu.check
        with gpu.turn:
            check(driver.cuEventRecord(self._computed, gpu.stream_handle))
        check(driver.cuStreamWaitEvent(self._stream, self._computed, 0))
        for array, host in zip(self.arrays, self._host, strict=True):
            check(
                driver.cuMemcpyDtoHAsync(
                    host.ctypes.data, gpu.pointer(array), array.nbytes, self._stream
                )
            )
        check(driver.cuEventRecord(self._arrived, self._stream))

    def values(self):
        self.gpu.check(self.gpu._driver.cuEventSynchronize(self._arrived))
        return [copy_of(host) for host in self._host]


def copy_of(host):
    """A copy of an array, in several threads if it is large: the system clears new memory first."""
    copy = np.empty_like(host)
    rows = host.reshape(-1)

    def part(chosen):
        copy.reshape(-1)[chosen] = rows[chosen]

    over_batch(part, rows.size, rows.size)
    return copy


class Pace:
    """Called after each piece of work, keeps the host at most `ahead` pieces ahead of the device.
    So the host notices Ctrl-C in time, and a progress bar shows the device's progress."""

    def __init__(self, backend, ahead=2):
        self.gpu = backend if hasattr(backend, "pinned") else None
        self._events, self._calls = (
            [event_of(self.gpu) for _ in range(ahead)] if self.gpu else [],
            0,
        )

    def __call__(self):
        if self.gpu:
            event = self._events[self._calls % len(self._events)]
            if self._calls >= len(self._events):
                self.gpu.check(self.gpu._driver.cuEventSynchronize(event))
            self.gpu.check(self.gpu._driver.cuEventRecord(event, self.gpu.stream_handle))
            self._calls += 1


def make_feed(targets):
    """The feed for some arrays, all on one device."""
    return (GpuFeed if runs_ahead(targets[0]) else Feed)(targets)


def make_readback(arrays):
    """The readback of some arrays, all on one device."""
    return (GpuReadback if runs_ahead(arrays[0]) else Readback)(arrays)


def runs_ahead(array):
    """Whether the host may continue while the array's device computes."""
    return is_device(array) and hasattr(array.backend, "pinned")


def stream_of(gpu):
    """A new stream that nothing else waits for."""
    return gpu.check(
        gpu._driver.cuStreamCreate(gpu._driver.CUstream_flags.CU_STREAM_NON_BLOCKING.value)
    )


def event_of(gpu):
    """A new event without timing; a host that waits for it sleeps."""
    known = gpu._driver.CUevent_flags
    flags = known.CU_EVENT_DISABLE_TIMING.value | known.CU_EVENT_BLOCKING_SYNC.value
    return gpu.check(gpu._driver.cuEventCreate(flags))
