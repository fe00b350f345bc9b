"""A training step's time by kernel and by layer, and the owners of its memory.

A step runs eagerly while its operations and launches are watched. The time of each launch comes, if
possible, from inside the replayed graph, else from events around each launch (clocks.py). With
events each kernel is timed by itself, whereas in a graph it starts while the previous one ends, so
the sum over all kernels may exceed the captured step. The step as it trains is measured, too, and
shown next to the sum.

Bytes and FLOPs of an operation (costs.py) are counted for the longest of its kernels. An operation
that calls others is charged only what they are not. Without a GPU the same tables show the
operations: on the CPU a kernel is one call of NumPy's.
"""

import contextlib
import json
import statistics
import time
from collections import defaultdict
from dataclasses import dataclass

from ..device import get_backend, one_after_another
from ..device.roof import Roof
from ..errors import NumdiffError
from ..files import write_text
from ..progress_bar import progress_bar
from ..settings import counted
from .clocks import GpuClock, HostClock, NoClock, profiler_is_there, replayed, times_of
from .costs import arrays_in, cost_of, roof_of
from .memory import memory_of
from .watch import Layers, watching_launches, watching_operations


@dataclass
class ProfiledLaunch:
    """One run of a kernel. us: its time; span: number of the operation that it belongs to, or None."""

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


def run_timed(step, clock, repeats=1, warmup=1):
    """([Launch], [Span], how many launches could not be timed) of eager runs of a step: medians."""
    if warmup:
        run_watched(step, clock)  # once for one-time work, and to adjust the clock

    def run():
        found = run_watched(step, clock)
        return found, [launch.us for launch in found[0]]

    (launches, spans), times, missing = times_of(run, repeats)
    for launch, us in zip(launches, times, strict=True):
        launch.us = us
    return launches, spans, missing


def run_watched(step, clock):
    """([Launch], [Span]) of one eager run of a step: of a device's launches with a clock, else of
    NumPy's calls."""
    launches, spans, stack, started = [], [], [], []

    def around_launch(name, grid, block, call):
        layer, direction = layers.now()
        launches.append(
            ProfiledLaunch(name, layer, direction, grid, block, stack[-1] if stack else None)
        )
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
            launches.append(
                ProfiledLaunch(
                    function.__name__, layer, direction, None, None, number, 1e6 * (taken - nested)
                )
            )
            if started:
                started[-1] += taken
        span.moved, span.flops = cost_of(function, arguments, result)
        if span.parent is not None:
            parent = spans[span.parent]
            parent.nested_moved += span.moved
            parent.nested_flops += span.flops or 0
        return result

    with (
        Layers() as layers,
        watching_operations(around_operation),
        one_after_another(),
        watching_launches(step.backend if clock else None, around_launch),
    ):
        step.run_eagerly()
    if clock is not None:
        for launch, us in zip(launches, clock.microseconds(), strict=True):
            launch.us = us
    return launches, spans


class Profile:
    """What `profile_step` found.

    launches: [Launch] in order; device; step_ms: of the step as it trains, captured on a GPU;
    captured: whether it is;
    clock: how the launches were timed, in words; replay_us: from the first kernel's start to the
    last one's end inside the graph, or None; roof: of the card; flops_per_step: of the model's
    products, as counted for the MFU; memory: as `memory_of`
    """

    def __init__(
        self,
        launches,
        spans,
        device,
        step_ms,
        captured,
        roof,
        precision,
        flops_per_step,
        clock="",
        replay_us=None,
        memory=None,
    ):
        self.launches, self.spans = launches, spans
        self.device, self.step_ms, self.captured = device, step_ms, captured
        self.roof, self.precision, self.flops_per_step = roof, precision, flops_per_step
        self.clock, self.replay_us, self.memory = clock, replay_us, memory
        self._share_costs()

    def _share_costs(self):
        """Give each operation's own cost to the longest of its kernels."""
        longest = {}
        for launch in self.launches:
            if launch.span is not None and (
                launch.span not in longest or launch.us > longest[launch.span].us
            ):
                longest[launch.span] = launch
        for number, launch in longest.items():
            span = self.spans[number]
            launch.moved = max(span.moved - span.nested_moved, 0)
            launch.flops = None if span.flops is None else max(span.flops - span.nested_flops, 0)

    @property
    def total_us(self):
        return sum(launch.us for launch in self.launches)

    def table(self, key):
        """[(key, calls, µs, share, bytes, FLOPs, share of the roof or None)], the longest first;
        key: of a Launch."""
        groups = defaultdict(list)
        for launch in self.launches:
            groups[key(launch)].append(launch)
        total, rows = self.total_us or 1.0, []
        for name, launches in groups.items():
            us = sum(launch.us for launch in launches)
            best = [self._least_seconds(launch) for launch in launches]
            known = self.roof.bandwidth and us and any(best)
            rows.append(
                (
                    name,
                    len(launches),
                    us,
                    us / total,
                    sum(launch.moved or 0 for launch in launches),
                    sum(launch.flops or 0 for launch in launches),
                    1e6 * sum(best) / us if known else None,
                )
            )
        return sorted(rows, key=lambda row: -row[2])

    def _least_seconds(self, launch):
        """The least time of a launch by the roof; 0 if its cost is unknown."""
        if launch.span is None or not self.roof.bandwidth or launch.moved is None:
            return 0.0
        span = self.spans[launch.span]
        return self.roof.share(
            1.0, launch.moved, launch.flops, roof_of(span.name, span.dtype, self.precision)
        )[0]

    def by_kernel(self):
        return self.table(lambda launch: launch.kernel)

    def by_layer(self, depth=2):
        """As `table`, by the first `depth` parts of the layers' names and the direction."""
        return self.table(
            lambda launch: (".".join(launch.layer.split(".")[:depth]), launch.direction)
        )

    def chrome(self):
        """The profile as the text of a Chrome trace (chrome://tracing, ui.perfetto.dev): kernels
        one after the other, without the gaps between them, and above them layers and directions."""
        events = [
            {"ph": "M", "name": "thread_name", "pid": 0, "tid": row, "args": {"name": name}}
            for row, name in enumerate(("direction", "layer", "kernel"))
        ]
        at, open_since = 0.0, {}
        for launch in [*self.launches, None]:
            for row, name in ((0, launch and launch.direction), (1, launch and f"{launch.layer}")):
                if row in open_since and open_since[row][0] != name:
                    before, since = open_since.pop(row)
                    events.append(
                        {
                            "ph": "X",
                            "name": before,
                            "cat": "step",
                            "pid": 0,
                            "tid": row,
                            "ts": since,
                            "dur": at - since,
                            "args": {},
                        }
                    )
                if launch and row not in open_since:
                    open_since[row] = name, at
            if launch:
                about = {
                    "layer": launch.layer,
                    "grid": str(launch.grid),
                    "block": str(launch.block),
                }
                if launch.span is not None:
                    about["operation"] = self.spans[launch.span].name
                if launch.us and launch.moved:
                    about["GB/s"] = round(launch.moved / launch.us / 1e3, 1)
                if launch.us and launch.flops:
                    about["TFLOP/s"] = round(launch.flops / launch.us / 1e6, 2)
                events.append(
                    {
                        "ph": "X",
                        "name": launch.kernel,
                        "cat": launch.direction,
                        "pid": 0,
                        "tid": 2,
                        "ts": at,
                        "dur": launch.us,
                        "args": about,
                    }
                )
                at += launch.us
        return json.dumps({"traceEvents": events, "displayTimeUnit": "ns"})

    def save(self, path):
        """Write the Chrome trace; a `NumdiffError` if that fails."""
        write_text(path, self.chrome(), "the trace")


class ShownProgress:
    """Context of a measurement, which says of each part what it is: `started(text)`.

    On the emulator, where each of PARTS is a step that may take minutes, a terminal gets instead a
    bar of the kernels that have run. Their number is known once a step has run.
    """

    PARTS = 3

    def __init__(self, backend, started):
        self.started, self.left, self.before = started or (lambda what: None), self.PARTS, 0
        self.bar = progress_bar(
            None, "profiling", "kernel", shown=None if started and is_emulated(backend) else False
        )
        self.watching = (
            contextlib.nullcontext()
            if self.bar.disable
            else watching_launches(backend, self._count)
        )

    def __enter__(self):
        self.watching.__enter__()
        return self

    def __exit__(self, *exception):
        self.watching.__exit__(*exception)
        self.bar.close()

    def __call__(self, what):
        """A part begins."""
        if self.bar.disable:
            self.started(what)
            return
        if self.left < self.PARTS:
            self.bar.total = self.bar.n + self.left * (self.bar.n - self.before)
        self.left, self.before = self.left - 1, self.bar.n
        self.bar.to(self.bar.n, what)

    def _count(self, name, grid, block, call):
        result = call()
        self.bar.update()
        return result


def is_emulated(backend):
    """Whether a device runs each launch at once, thread by thread; it captures nothing."""
    return backend is not None and not hasattr(backend, "capture")


def profile_step(options, repeats=3, steps=10, warmup=3, clock="auto", started=None):
    """The `Profile` of a training step of the model and batch that `options` (a TrainOptions)
    describe.

    repeats: runs, over which each launch's median is taken; steps, warmup: runs of the step as it
    trains; clock: on a GPU, "graph" or "events" (see clocks.py); "auto": the first where PyTorch is
    installed; started(text): called before each part (see `ShownProgress`)
    """
    gpu = options.device == "cuda"
    if clock == "graph" and not (gpu and profiler_is_there()):
        raise NumdiffError(
            "times from inside a graph need a GPU, and PyTorch for its profiler; use --clock events."
        )
    inside = (
        gpu and not options.eager and (clock == "graph" or clock == "auto" and profiler_is_there())
    )
    with ShownProgress(get_backend(options.device), started) as show:
        return measure(options, repeats, steps, warmup, inside, show)


def measure(options, repeats, steps, warmup, inside, show):
    """As `profile_step`. inside: whether a replayed graph is timed; show: a `ShownProgress`"""
    from .step import NumdiffStep, seconds_in_turns

    show("the first step")
    step = NumdiffStep(options)
    backend = step.backend
    emulated = is_emulated(backend)
    steps, repeats, warmup = (1, 1, 0) if emulated else (steps, repeats, warmup)
    show("the step as it trains")
    times = seconds_in_turns([step], steps, warmup)[0]
    memory = memory_of(step)
    fault = replay_us = None
    show("kernel by kernel")
    if inside:
        launches, spans = run_watched(step, NoClock())
        step.record_in_order()
        found, fault = replayed(step, [launch.kernel for launch in launches], repeats)
        if found:
            how = "inside the replayed graph, by CUPTI"
            for launch, us in zip(launches, found[0], strict=True):
                launch.us = us
            replay_us = found[1]
    if replay_us is None:
        timer = None if backend is None else HostClock() if emulated else GpuClock(backend)
        launches, spans, missing = run_timed(step, timer, repeats, warmup)
        how = "by the host's clock"
        if isinstance(timer, GpuClock):
            how = f"each by itself, between events, whose {timer.overhead_us:.1f} µs are taken off"
            how += f"; without {counted(missing, 'kernel')}, for which the host was late" * (
                missing > 0
            )
            how += f" (not inside the graph: {fault})" if fault else ""
    return Profile(
        launches,
        spans,
        getattr(backend, "device_name", "cpu (NumPy)"),
        1e3 * statistics.median(times),
        step.step.capture,
        Roof(backend),
        options.precision,
        step.trainer.flops_per_step,
        how,
        replay_us,
        memory,
    )
