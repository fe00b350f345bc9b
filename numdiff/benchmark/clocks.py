"""How long each kernel of a step takes, by the best of three clocks that is available.

    graph    from inside the replayed graph: CUPTI, the driver's own, through PyTorch's profiler (`replayed`)
    events   each launch between two events of the driver, in a step that runs eagerly (`GpuClock`)
    host     by the host's clock, for a device that runs each launch at once (`HostClock`)

Python takes longer to launch a kernel than most kernels take to run, and events in an idle stream
would measure that, too. So `GpuClock` first blocks the stream with a kernel that only waits, until
Python has launched the next kernels. What the two events themselves add, a few microseconds, is
measured on a kernel that does nothing, and subtracted.
"""

import importlib.util
import math
import statistics
import time

from ..device import cuda, int64, nanoseconds, zeros

# launches for which the stream is held at a time: the driver queues about a thousand, events
# included
WINDOW = 100
# longer than Python needs to launch and time most of them; doubled if that was too short
HOLD_NS = 20_000_000
LONGEST_HOLD_NS = 320_000_000
EMPTY_KERNELS = 200  # replayed as one graph, for the time of one of them
TRIES = 6  # more runs for calls that came too late
# as launches are named; the profiler says Memset or, for some in a graph, memset32
NOT_KERNELS = ("memset", "memcpy")


@cuda.jit
def hold_kernel(status, wait):
    """Wait for `wait` nanoseconds."""
    end = nanoseconds() + int64(wait)
    while nanoseconds() < end:
        pass
    status[0] = wait


@cuda.jit
def empty_kernel(status):
    """Do nothing."""


class GpuClock:
    """Times a GPU's launches by events, with the stream blocked while they are made.

    The host may wait for the GPU between two launches, or be slow: before each launch the stream is
    blocked again if it has run free. A launch during which it came free has no time: NaN
    (`times_of` makes another run for it).
    """

    def __init__(self, gpu):
        self.gpu, self.driver = gpu, gpu._driver
        # two events a call; the numbers of calls that came too late
        self.events, self.late = [], set()
        self.status = zeros(1, "int32", gpu)
        self._launch = type(gpu).launch  # the class's own, which is not watched
        self.hold_ns = HOLD_NS
        self._held = gpu.check(self.driver.cuEventCreate(0))  # happens when the stream is released
        self._calls = 0  # since the stream was blocked
        # when the last call ended, and the longest pause between two, in seconds
        self._last = self._longest = 0.0
        self.overhead_us = 0.0
        self.overhead_us = self._measure_overhead()

    def _measure_overhead(self):
        """The time that two events add to a kernel: an empty kernel between them, less its time in
        a graph."""

        def nothing():
            self._launch(self.gpu, empty_kernel, 1, 1, (self.status,))

        between = times_of(lambda: self._microseconds_of([nothing] * WINDOW), 1)[1]
        replay = self.gpu.capture(lambda: [nothing() for _ in range(EMPTY_KERNELS)])
        # the GPU's time: hosts are slow to launch
        taken = times_of(lambda: self._microseconds_of([replay] * 3), 1)[1]
        return max(statistics.median(between) - statistics.median(taken) / EMPTY_KERNELS, 0.0)

    def _microseconds_of(self, calls):
        for call in calls:
            self.time(call)
        return None, self.microseconds()

    def time(self, call):
        """Run call() between two events."""
        now = time.perf_counter()
        self._longest = max(self._longest, now - self._last)
        if self._calls % WINDOW == 0:
            self.gpu.synchronize()
            self._hold()
        elif self._is_free():
            # for being slow, not for having waited for the GPU
            if self._longest < self.hold_ns / 2e9:
                self._hold_longer()
            self._hold()
        self._record()
        result = call()
        self._record()
        if self._is_free():
            self.late.add(len(self.events) // 2 - 1)
            self._hold_longer()
            self._longest = math.inf  # that was it
        self._calls += 1
        self._last = time.perf_counter()
        return result

    def _hold(self):
        """Block the stream until `hold_ns` from now."""
        self._launch(self.gpu, hold_kernel, 1, 1, (self.status, self.hold_ns))
        self.gpu.check(self.driver.cuEventRecord(self._held, self.gpu.stream_handle))
        self._calls, self._longest = 0, 0.0

    def _hold_longer(self):
        self.hold_ns = min(2 * self.hold_ns, LONGEST_HOLD_NS)

    def _is_free(self):
        """Whether the stream is no longer blocked."""
        return int(self.driver.cuEventQuery(self._held)[0]) == 0

    def _record(self):
        self.events.append(self.gpu.check(self.driver.cuEventCreate(0)))
        self.gpu.check(self.driver.cuEventRecord(self.events[-1], self.gpu.stream_handle))

    def microseconds(self):
        """The time of each call, NaN if the stream became idle meanwhile; clears the list."""
        self.gpu.synchronize()
        check, driver, events, late = self.gpu.check, self.driver, self.events, self.late
        times = [
            1e3 * float(check(driver.cuEventElapsedTime(a, b)))
            for a, b in zip(events[::2], events[1::2], strict=True)
        ]
        for event in events:
            check(driver.cuEventDestroy(event))
        self.events, self.late, self._calls = [], set(), 0
        return [
            math.nan if number in late else max(us - self.overhead_us, 0.0)
            for number, us in enumerate(times)
        ]


class HostClock:
    """Times calls by the host's clock: for a device that runs each launch at once."""

    def __init__(self):
        self.times = []

    def time(self, call):
        start = time.perf_counter()
        result = call()
        self.times.append(1e6 * (time.perf_counter() - start))
        return result

    def microseconds(self):
        times, self.times = self.times, []
        return times


class NoClock:
    """Times nothing."""

    def __init__(self):
        self.count = 0

    def time(self, call):
        self.count += 1
        return call()

    def microseconds(self):
        times, self.count = [0.0] * self.count, 0
        return times


def times_of(run, repeats):
    """(what the last run returned, [median µs of each call], how many calls have no time, which
    counts as 0).

    run: times calls, always the same, and returns (something, their µs); runs `repeats` times, and
    up to TRIES times more for calls of which no run has a time
    """
    runs = []
    while (
        len(runs) < repeats
        or len(runs) < repeats + TRIES
        and any(all(map(math.isnan, same)) for same in zip(*runs, strict=True))
    ):
        result, times = run()
        runs.append(times)
    found = [[us for us in same if not math.isnan(us)] for same in zip(*runs, strict=True)]
    return result, [statistics.median(times) if times else 0.0 for times in found], found.count([])


def profiler_is_there():
    """Whether PyTorch is installed and sees a GPU, so that its profiler can use CUPTI; loads it, if
    so."""
    if importlib.util.find_spec("torch") is None:
        return False
    import torch

    return torch.cuda.is_available()


def replayed(step, launches, repeats):
    """((median µs of each launch inside the replayed graph, median µs of a whole replay), None), by
    CUPTI; or None and the reason why that is not available.

    launches: the names of the step's launches, in order; a graph of one stream replays them in the
    same order
    """
    import torch
    from torch.profiler import ProfilerActivity, profile

    step.wait()
    try:
        with profile(activities=[ProfilerActivity.CUDA]) as found:
            for _ in range(repeats):
                step.run()
            step.wait()
        events = [e for e in found.events() if e.device_type == torch.autograd.DeviceType.CUDA]
        seen = [(e.name, e.time_range.start, e.time_range.end) for e in events]
    except Exception as error:  # the profiler can fail in many ways, and there is another clock
        return None, f"{type(error).__name__}: {error}"
    times = match(seen, launches, repeats)
    return (
        times,
        None if times else f"of {repeats} × {len(launches)} launches the profiler saw {len(seen)}",
    )


def match(seen, launches, repeats):
    """(µs of each launch, µs of a replay) from the profiler's (name, start, end); None if they do
    not match the launches.
    """
    seen = sorted(seen, key=lambda run: run[1])
    count = len(launches)
    if not launches or len(seen) != repeats * count:
        return None
    runs = [seen[k * count : (k + 1) * count] for k in range(repeats)]
    for run in runs:
        for name, (seen_name, _, _) in zip(launches, run, strict=True):
            if seen_name.lower().startswith(NOT_KERNELS) != (name in NOT_KERNELS):
                return None
    times = [
        statistics.median(end - start for _, start, end in same) for same in zip(*runs, strict=True)
    ]
    return times, statistics.median(run[-1][2] - run[0][1] for run in runs)
