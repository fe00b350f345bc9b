"""How long each kernel of a step takes, by the best of three clocks that is available.

    graph    from inside the replayed graph: CUPTI, the driver's own, through PyTorch's profiler (`replayed`)
    events   each launch between two events of the driver, in a step that runs eagerly (`Clock`)
    host     by the host's clock, for a device that runs each launch at once (`HostClock`)

Python takes longer to launch a kernel than most kernels take to run, and events in an idle stream would measure that,
too. So `Clock` first blocks the stream with a kernel that only waits, until Python has launched the next kernels. What
the two events themselves add, a few microseconds, is measured on a kernel that does nothing, and subtracted.
"""
import importlib.util
import statistics
import time

from ..device import cuda, int64, nanoseconds, zeros

WINDOW = 100  # launches for which the stream is held at a time: the driver queues about a thousand, events included
HOLD_NS = 20_000_000  # longer than Python needs to launch and watch them; doubled when it was not
LONGEST_HOLD_NS = 320_000_000
EMPTY_KERNELS = 200  # replayed as one graph, for the time of one of them
TRIES = 6  # to launch before the stream is released, each with longer holds
NOT_KERNELS = ("memset", "memcpy")  # as launches are named; the profiler says Memset or, for some in a graph, memset32


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


class Clock:
    """Times a GPU's launches by events, with the stream blocked while they are made."""

    def __init__(self, gpu):
        self.gpu, self.driver = gpu, gpu._driver
        self.events = []
        self.status = zeros(1, "int32", gpu)
        self._launch = type(gpu).launch  # the class's own, which is not watched
        self.hold_ns, self.released = HOLD_NS, 0  # released: how often the stream was released before all was launched
        self._held = gpu.check(self.driver.cuEventCreate(0))  # happens when the stream is released
        self.overhead_us = 0.0
        self.overhead_us = self._measure_overhead()

    def _measure_overhead(self):
        """What two events add to a kernel: one that does nothing between them, less what it takes in a graph."""
        def nothing():
            self._launch(self.gpu, empty_kernel, 1, 1, (self.status,))

        between = statistics.median(self.undisturbed(lambda: self._microseconds_of([nothing] * WINDOW)))
        replay = self.gpu.capture(lambda: [nothing() for _ in range(EMPTY_KERNELS)])
        taken = min(self._microseconds_of([replay] * 3)) / EMPTY_KERNELS  # the GPU's time: hosts may be slow to launch
        return max(between - taken, 0.0)

    def _microseconds_of(self, calls):
        for call in calls:
            self.time(call)
        return self.microseconds()

    def undisturbed(self, run):
        """What run() returns, which times calls and asks for their `microseconds`; again, up to TRIES times, while the
        stream was released too early."""
        for _ in range(TRIES):
            released = self.released
            result = run()
            if self.released == released:
                break
        return result

    def time(self, call):
        """Run call() between two events."""
        if len(self.events) % (2 * WINDOW) == 0:
            self._wait()
            self._launch(self.gpu, hold_kernel, 1, 1, (self.status, self.hold_ns))
            self.gpu.check(self.driver.cuEventRecord(self._held, self.gpu.stream_handle))
        self._record()
        result = call()
        self._record()
        return result

    def _record(self):
        self.events.append(self.gpu.check(self.driver.cuEventCreate(0)))
        self.gpu.check(self.driver.cuEventRecord(self.events[-1], self.gpu.stream_handle))

    def _wait(self):
        """Wait for what is launched; if the stream was released too early, block it longer from now on."""
        if self.events and int(self.driver.cuEventQuery(self._held)[0]) == 0:
            self.hold_ns = min(2 * self.hold_ns, LONGEST_HOLD_NS)
            self.released += 1
        self.gpu.synchronize()

    def microseconds(self):
        """Of each call timed; forgets them."""
        self._wait()
        check, driver, events = self.gpu.check, self.driver, self.events
        times = [1e3 * float(check(driver.cuEventElapsedTime(a, b)))
                 for a, b in zip(events[::2], events[1::2], strict=True)]
        for event in events:
            check(driver.cuEventDestroy(event))
        self.events = []
        return [max(us - self.overhead_us, 0.0) for us in times]


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


def profiler_is_there():
    """Whether PyTorch is installed and sees a GPU, so that its profiler can use CUPTI; loads it, if so."""
    if importlib.util.find_spec("torch") is None:
        return False
    import torch
    return torch.cuda.is_available()


def replayed(step, launches, repeats):
    """((median µs of each launch inside the replayed graph, median µs of a whole replay), None), by CUPTI; or None and
    the reason why that is not available.

    launches: the names of the step's launches, in order; a graph of one stream replays them in the same order
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
    return times, None if times else f"of {repeats} × {len(launches)} launches the profiler saw {len(seen)}"


def match(seen, launches, repeats):
    """(µs of each launch, µs of a replay) from the profiler's (name, start, end); None where they do not match the
    launches.
    """
    seen = sorted(seen, key=lambda run: run[1])
    count = len(launches)
    if not launches or len(seen) != repeats * count:
        return None
    runs = [seen[k * count:(k + 1) * count] for k in range(repeats)]
    for run in runs:
        for name, (seen_name, _, _) in zip(launches, run, strict=True):
            if seen_name.lower().startswith(NOT_KERNELS) != (name in NOT_KERNELS):
                return None
    times = [statistics.median(end - start for _, start, end in same) for same in zip(*runs, strict=True)]
    return times, statistics.median(run[-1][2] - run[0][1] for run in runs)
