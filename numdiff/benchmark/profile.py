"""Where a training step's time goes: by kernel, and by layer.

The step runs eagerly with two events of the driver around each launch, and the times are those between them. The
captured step is faster than their sum: in a graph one kernel starts while the last one ends. It is measured too, and
stands beside the sum.

Python takes longer to launch a kernel than most kernels take to run, and an event of an idle stream would count that,
too. So the stream is held up first, by a kernel that only waits, until Python has launched the next kernels (`Clock`).

Bytes and FLOPs of an operation (costs.py) are counted for the longest of its kernels. An operation that calls others
counts what they do not. Without a GPU the same tables show the operations: on the CPU a kernel is one call of NumPy's.
"""
import json
import statistics
import time
from collections import defaultdict
from dataclasses import dataclass

from ..device import cuda, int64, nanoseconds, zeros
from ..device.roof import Roof
from ..errors import NumdiffError
from .costs import arrays_in, cost_of, roof_of
from .watch import Layers, watching_launches, watching_operations

WINDOW = 100  # launches for which the stream is held at a time: the driver queues about a thousand, events included
HOLD_NS = 20_000_000  # longer than Python needs to launch them, and to look on; doubled where it was not
LONGEST_HOLD_NS = 320_000_000


@cuda.jit
def hold_kernel(status, wait):
    """Wait so many nanoseconds."""
    end = nanoseconds() + int64(wait)
    while nanoseconds() < end:
        pass
    status[0] = wait


@dataclass
class Launch:
    """One kernel's run. us: how long; span: number of the operation that it is of, or None."""

    kernel: str
    layer: str
    direction: str
    grid: object
    block: object
    span: int | None
    us: float = 0.0
    moved: int | None = None
    flops: int | None = None


@dataclass
class Span:
    """One call of an operation. own: its cost less that of the operations that it calls."""

    name: str
    dtype: object
    parent: int | None
    moved: int = 0
    flops: int | None = None
    nested_moved: int = 0
    nested_flops: int = 0


class Clock:
    """Times launches of a GPU by events, the stream held up while they are made."""

    def __init__(self, gpu):
        self.gpu, self.driver = gpu, gpu._driver
        self.events = []
        self.status = zeros(1, "int32", gpu)
        self._launch = type(gpu).launch  # the class's own, which nobody watches
        self.hold_ns = HOLD_NS
        self._held = gpu.check(self.driver.cuEventCreate(0))  # happens when the stream is let go

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
        """Wait for what is launched; where the stream was let go before all was, hold it longer from now on."""
        if self.events and int(self.driver.cuEventQuery(self._held)[0]) == 0:
            self.hold_ns = min(2 * self.hold_ns, LONGEST_HOLD_NS)
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
        return times


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


def run_watched(step, clock):
    """([Launch], [Span]) of one eager run of a step; with a clock, of a device's launches, else of NumPy's calls."""
    launches, spans, stack, started = [], [], [], []

    def around_launch(name, grid, block, call):
        layer, direction = layers.now()
        launches.append(Launch(name, layer, direction, grid, block, stack[-1] if stack else None))
        return clock.time(call)

    def around_operation(function, arguments, call):
        number = len(spans)
        dtype = next((a.dtype for a in arrays_in(list(arguments.values()))), None)
        span = Span(function.__name__, dtype, stack[-1] if stack else None)
        spans.append(span)
        stack.append(number)
        started.append(0.0)  # seconds that nested operations took
        layer, direction = layers.now()
        start = time.perf_counter()
        try:
            result = call()
        finally:
            stack.pop()
            taken, nested = time.perf_counter() - start, started.pop()
        if clock is None:
            launches.append(Launch(function.__name__, layer, direction, None, None, number, 1e6 * (taken - nested)))
            if started:
                started[-1] += taken
        span.moved, span.flops = cost_of(function, arguments, result)
        if span.parent is not None:
            parent = spans[span.parent]
            parent.nested_moved += span.moved
            parent.nested_flops += span.flops or 0
        return result

    with Layers() as layers, watching_operations(around_operation), \
            watching_launches(step.backend if clock else None, around_launch):
        step.run_eagerly()
    if clock is not None:
        for launch, us in zip(launches, clock.microseconds(), strict=True):
            launch.us = us
    return launches, spans


class Profile:
    """What `profile_step` found.

    launches: [Launch] in order; device; step_ms: of the step as it trains, captured on a GPU; captured: whether it is;
    roof: of the card; flops_per_step: of the model's products, as the MFU counts
    """

    def __init__(self, launches, spans, device, step_ms, captured, roof, precision, flops_per_step):
        self.launches, self.spans = launches, spans
        self.device, self.step_ms, self.captured = device, step_ms, captured
        self.roof, self.precision, self.flops_per_step = roof, precision, flops_per_step
        self._share_costs()

    def _share_costs(self):
        """Give each operation's own cost to the longest of its kernels."""
        longest = {}
        for launch in self.launches:
            if launch.span is not None and (launch.span not in longest or launch.us > longest[launch.span].us):
                longest[launch.span] = launch
        for number, launch in longest.items():
            span = self.spans[number]
            launch.moved = max(span.moved - span.nested_moved, 0)
            launch.flops = None if span.flops is None else max(span.flops - span.nested_flops, 0)

    @property
    def total_us(self):
        return sum(launch.us for launch in self.launches)

    def table(self, key):
        """[(key, calls, µs, share, bytes, FLOPs, share of the roof or None)], the longest first; key: of a Launch."""
        groups = defaultdict(list)
        for launch in self.launches:
            groups[key(launch)].append(launch)
        total, rows = self.total_us or 1.0, []
        for name, launches in groups.items():
            us = sum(launch.us for launch in launches)
            best = [self._least_seconds(launch) for launch in launches]
            known = self.roof.bandwidth and us and any(best)
            rows.append((name, len(launches), us, us / total, sum(launch.moved or 0 for launch in launches),
                         sum(launch.flops or 0 for launch in launches), 1e6 * sum(best) / us if known else None))
        return sorted(rows, key=lambda row: -row[2])

    def _least_seconds(self, launch):
        """What the roof allows for a launch; 0 where its cost is not known."""
        if launch.span is None or not self.roof.bandwidth or launch.moved is None:
            return 0.0
        span = self.spans[launch.span]
        return self.roof.share(1.0, launch.moved, launch.flops, roof_of(span.name, span.dtype, self.precision))[0]

    def by_kernel(self):
        return self.table(lambda launch: launch.kernel)

    def by_layer(self, depth=2):
        """As `table`, by the first `depth` parts of the layers' names and the direction."""
        return self.table(lambda launch: (".".join(launch.layer.split(".")[:depth]), launch.direction))

    def chrome(self):
        """The profile as the text of a Chrome trace (chrome://tracing, ui.perfetto.dev): kernels one after the other,
        without the gaps between them, and above them layers and directions."""
        events = [{"ph": "M", "name": "thread_name", "pid": 0, "tid": row, "args": {"name": name}}
                  for row, name in enumerate(("direction", "layer", "kernel"))]
        at, open_since = 0.0, {}
        for launch in [*self.launches, None]:
            for row, name in ((0, launch and launch.direction), (1, launch and f"{launch.layer}")):
                if row in open_since and open_since[row][0] != name:
                    before, since = open_since.pop(row)
                    events.append({"ph": "X", "name": before, "cat": "step", "pid": 0, "tid": row, "ts": since,
                                   "dur": at - since, "args": {}})
                if launch and row not in open_since:
                    open_since[row] = name, at
            if launch:
                about = {"layer": launch.layer, "grid": str(launch.grid), "block": str(launch.block)}
                if launch.span is not None:
                    about["operation"] = self.spans[launch.span].name
                if launch.us and launch.moved:
                    about["GB/s"] = round(launch.moved / launch.us / 1e3, 1)
                if launch.us and launch.flops:
                    about["TFLOP/s"] = round(launch.flops / launch.us / 1e6, 2)
                events.append({"ph": "X", "name": launch.kernel, "cat": launch.direction, "pid": 0, "tid": 2,
                               "ts": at, "dur": launch.us, "args": about})
                at += launch.us
        return json.dumps({"traceEvents": events, "displayTimeUnit": "ns"})

    def save(self, path):
        """Write the Chrome trace; a `NumdiffError` where that does not work."""
        try:
            with open(path, "w", encoding="utf-8") as file:
                file.write(self.chrome())
        except OSError as error:
            raise NumdiffError(f"cannot write the trace {path}: {error.strerror}.") from error


def profile_step(options, repeats=3, steps=10, warmup=3):
    """The `Profile` of a training step of the model and batch that `options` (a TrainOptions) describe.

    repeats: eager runs, of which each launch gets its median; steps, warmup: runs of the step as it trains
    """
    from .step import NumdiffStep, seconds_in_turns
    step = NumdiffStep(options)
    backend = step.backend
    emulated = backend is not None and not hasattr(backend, "capture")
    steps, repeats, warmup = (1, 1, 0) if emulated else (steps, repeats, warmup)
    times = seconds_in_turns([step], steps, warmup)[0]
    clock = None if backend is None else HostClock() if emulated else Clock(backend)
    if warmup:
        run_watched(step, clock)  # once for what happens only once
    runs = [run_watched(step, clock) for _ in range(repeats)]
    launches, spans = runs[-1]
    for same in zip(*(run[0] for run in runs), strict=True):
        same[-1].us = statistics.median(launch.us for launch in same)
    return Profile(launches, spans, getattr(backend, "device_name", "cpu (NumPy)"),
                   1e3 * statistics.median(times), step.step.capture, Roof(backend), options.precision,
                   step.trainer.flops_per_step)
