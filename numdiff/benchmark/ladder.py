"""The ladder of a whole training step: the same model and images, one technique more a row.

A row is a context, not another program: `at_most` (kernels/operation/versions.py) keeps the launchers below a
version, operation by operation, and precision, graph, batch and loader are options of a run. The
first rows are launched kernel by kernel; what that leaves idle is seen in their times by component,
which come from a step that is launched so in every row.

A row runs at least the first steps of the same training, from the same weights over the same images
and noise. So its losses are compared with those of the first row: every technique but the smaller
types must leave them unchanged.
"""

import contextlib
import csv
import gc
import io
import math
import os
import re
import statistics
import time
from collections import Counter
from typing import NamedTuple

import numpy as np

from ..data.dataset import open_dataset
from ..data.loader import Loader
from ..device import get_backend
from ..device.arena import SEGMENT, Arena
from ..device.limits import MAX_BLOCKS_YZ
from ..device.planned import collect
from ..device.roof import Roof, peak_flops
from ..diffusion.memory import Measuring
from ..errors import NumdiffError, TooManyElementsError, UsageError
from ..kernels.operation.versions import CEILED, at_most
from ..sizes import sides
from ..training.compiling import aside, compiling
from .clocks import GpuClock, HostClock
from .profile import Profile, run_timed
from .step import NumdiffStep, summary

# The techniques, as the highest version of each operation; what is absent is free. Softmax and the
# norms begin with a block a row, which adds in shared memory.
FIRST_ONLY = {**dict.fromkeys(CEILED, 1), "flash_attention": "unfused", "epilogue": "apart"}
TILED = {
    **FIRST_ONLY,
    "matmul": "tiled",
    "linear_group": "tiled",
    "conv2d": "im2col",
    "column_sum": "tree",
    "sample_sum": "tree",
}
NORMS = (
    "adaln",
    "gate_adaln",
    "groupnorm",
    "groupnorm_backward",
    "layernorm",
    "layernorm_backward",
    "qk_norm_rope",
    "rmsnorm",
)
UNFUSED = {
    **dict.fromkeys(NORMS, 1),
    "adamw_update": "vectorised",
    "flash_attention": "unfused",
    "epilogue": "apart",
}
UNFLASHED = {"flash_attention": "unfused"}


class Rung(NamedTuple):
    """A rung. name; ceilings: as of `at_most`; kernels: whether it is about kernels that only a
    device has; tensor_cores, graph, largest, loaded: what it adds"""

    name: str
    ceilings: dict = {}  # noqa: RUF012 - never changed
    precision: str = "fp32"
    kernels: bool = False
    graph: bool = False
    largest: bool = False
    loaded: bool = False


ROWS = (
    Rung("float32, naive kernels", FIRST_ONLY),
    Rung("tiles in shared memory", TILED, kernels=True),
    Rung("vectorised tiles, implicit GEMM", UNFUSED, kernels=True),
    Rung("fused norms and epilogues", UNFLASHED),
    Rung("flash attention"),
    Rung("tf32 on tensor cores", precision="tf32", kernels=True),
    Rung("fp16 on tensor cores", precision="fp16", kernels=True),
    Rung("the step as a graph", precision="fp16", kernels=True, graph=True),
    Rung("the largest batch that fits", precision="fp16", kernels=True, graph=True, largest=True),
    Rung("data from disk, prefetched", precision="fp16", graph=True, largest=True, loaded=True),
)
WITHOUT_KERNELS = "float32, one operation a pass"  # the first row's name in NumPy
COMPONENTS = ("conv2d", "linear", "norm", "attention", "elementwise", "optimizer", "copies")
BELONGS = (
    ("conv2d", r"conv2d|depthwise|im2col|im2win|winograd"),
    ("norm", r"norm|adaln"),
    ("attention", r"attention|flash|softmax|^sla_"),
    ("linear", r"linear|matmul"),
    ("optimizer", r"adamw|ema_|global_norm|squares|loss_scale|telemetry|advance"),
    ("copies", r"mem(cpy|set)|concat|cast|chunk|columns|patchify|copy|fill|gather|take|place"),
)
FLAT = re.compile("global_norm|zero_ranges")  # "norm" of the gradients is the optimiser's
LEAST = 3  # steps that are measured, however slow they are
ROW_S = 15.0  # seconds that a row's steps may take beyond those
TINY = 1e-30  # no loss is less, but of a model that is not computed
ROOM = 0.98  # of the free memory; the driver takes some for graphs and for local memory
# losses of the first steps: as many as a row has run, and all where its steps take less than
# BRIEF_MS
COMPARED = 50
BRIEF_MS = 50.0
# largest deviation of a loss that is expected, as a share of it
BARS = {"fp32": 1e-3, "tf32": 2e-2, "fp16": 2e-2}


# Which rows ---------------------------------------------------------------------------------------


def chosen(numbers):
    """[(number, Row)] of the requested numbers (None: all); a `UsageError` for one that does not
    exist."""
    if numbers == ():
        raise UsageError(
            f"--rows none leaves no row to measure: give some of 1 to {len(ROWS)}, or leave it out."
        )
    for number in numbers or ():
        if not 1 <= number <= len(ROWS):
            raise UsageError(f"--rows {number}: the ladder has rows 1 to {len(ROWS)}.")
    return [(n, row) for n, row in enumerate(ROWS, 1) if numbers is None or n in numbers]


def check_rows(options, numbers):
    """Raise a `UsageError` for rows that there are not, and for data that none of them reads."""
    reads = [n for n, row in enumerate(ROWS, 1) if row.loaded]
    if not any(row.loaded for _, row in chosen(numbers)) and options.data is not None:
        raise UsageError(
            f"--data {options.data} is for row {', '.join(map(str, reads))}, and the other rows take "
            "random images: leave it out, or measure that row, too."
        )


def left_out(row, backend, unsuitable=None):
    """Why a row does not apply on this device, in words; None if it does. unsuitable: why the data
    does not."""
    gpu = hasattr(backend, "capture")
    if row.loaded:
        return unsuitable
    if row.kernels and backend is None:
        return "it is about CUDA kernels, and NumPy computes here; it needs a GPU"
    if (row.graph or row.precision != "fp32") and not gpu:
        return "it needs a GPU"
    return None


def options_of(row, options, batch, backend):
    """The options of a run as the row takes them."""
    gpu = hasattr(backend, "capture")
    return options.changed(
        precision=row.precision if gpu else "fp32",
        eager=not row.graph,
        batch=batch,
        microbatch=None,
    )


def unsuitable_data(options, dataset):
    """Why training images cannot be read from the dataset for this model; None if they can."""
    wanted = *sides(options.image_size), options.channels or 3
    if tuple(dataset.shape[1:]) != wanted:
        found, taken = ("×".join(map(str, shape)) for shape in (dataset.shape[1:], wanted))
        return (
            f"{dataset.path} has images of {found}, and the model takes {taken}; give other --data"
        )
    return (
        "its model has classes, and the data no labels; give other --data"
        if (options.class_cond and dataset.labels is None)
        else None
    )


# The largest batch --------------------------------------------------------------------------------


def bytes_for(options, gpu, batch):
    """Bytes that a step of `batch` images takes on a GPU, with the weights; NaN if an array is too
    large to count."""
    taken, device = [], Measuring(gpu)
    device.arena = Arena(lambda nbytes: taken.append(nbytes) or sum(taken) - nbytes)
    try:
        NumdiffStep(options.changed(device=device, batch=batch))
    except TooManyElementsError:
        return math.nan
    finally:
        device.arena = None
    return sum(taken)


def largest_batch(options, gpu, room=None):
    """The largest batch whose step fits into `room` bytes (None: what is free), to within a
    sixteenth; 0: not even that of the options."""
    room = ROOM * gpu.memory_info()[0] - 2 * SEGMENT if room is None else room
    low, high = 0, options.batch
    while high <= MAX_BLOCKS_YZ and bytes_for(options, gpu, high) <= room:
        low, high = high, 2 * high
    high = min(high, MAX_BLOCKS_YZ + 1)  # of images, a block at least each
    while low and high - low > max(1, low // 16):
        middle = (low + high) // 2
        low, high = (middle, high) if bytes_for(options, gpu, middle) <= room else (low, middle)
    return low if low < 16 else low // 8 * 8


# A row --------------------------------------------------------------------------------------------


class FromDisk:
    """A `NumdiffStep` whose every run takes a batch from the prefetching loader: run(), wait()."""

    def __init__(self, step, dataset):
        self.step, self.wait = step, step.wait
        self.loader = Loader(dataset, step.options.batch, step.options.seed, backend=step.backend)

    def run(self):
        self.step.step.load(*next(self.loader))
        self.step.run()


def paced(step, steps, warmup, seconds=ROW_S, together=False):
    """Seconds of each of `steps` runs after `warmup`, of fewer (at least LEAST) where they take
    longer than `seconds`.

    together: wait for a third of the runs at a time and divide its time by their number, so that
    copies overlap steps
    """

    def timed(count):
        start = time.perf_counter()
        for _ in range(count):
            step.run()
        step.wait()
        return (time.perf_counter() - start) / count

    once = timed(1)
    count = min(steps, max(min(LEAST, steps), int(seconds / once)))
    for _ in range(min(warmup, count) - 1):
        timed(1)
    if together:
        return [time for _ in range(3) for time in [timed(max(1, count // 3))] * max(1, count // 3)]
    return [timed(1) for _ in range(count)]


def component(names):
    """Which of COMPONENTS a kernel's time belongs to; names: of the operations that it ran in, the
    outermost first, and its own."""
    for name in names:
        if FLAT.search(name):
            return "optimizer"
        for part, pattern in BELONGS:
            if re.search(pattern, name):
                return part
    return "elementwise"


def by_component(profile):
    """{component: ms} of a `Profile`."""
    spent = Counter(dict.fromkeys(COMPONENTS, 0.0))
    for launch in profile.launches:
        names, span = [launch.kernel], launch.span
        while span is not None:
            names.insert(0, profile.spans[span].name)
            span = profile.spans[span].parent
        spent[component(names)] += launch.us / 1e3
    return dict(spent)


def watched(step, precision):
    """The `Profile` of one step that is launched kernel by kernel."""
    backend = step.backend
    clock = (
        None
        if backend is None
        else GpuClock(backend)
        if hasattr(backend, "capture")
        else HostClock()
    )
    launches, spans, _ = run_timed(step, clock, warmup=isinstance(clock, GpuClock))
    return Profile(
        launches, spans, "", 0.0, False, Roof(None), precision, step.trainer.flops_per_step
    )


def measure_row(row, step, steps, warmup, dataset=None):
    """The measurements of one row's step: a dict as `bench_ladder` gives, without the comparisons."""
    options = step.options
    runner = FromDisk(step, dataset) if row.loaded else step
    try:
        times = paced(runner, steps, warmup, together=row.loaded)
    finally:
        if row.loaded:
            runner.wait()
            runner.loader.close()
    flops, peak = (
        step.trainer.flops_per_step,
        peak_flops(step.backend, options.precision) if step.backend else None,
    )
    comparable = not (row.largest or row.loaded)
    done = 1 + bool(step.step.capture) + min(warmup, len(times)) + len(times)  # runs so far
    if comparable and 1e3 * statistics.median(times) < BRIEF_MS:
        for _ in range(done, COMPARED):
            step.run()
        step.wait()
        done = max(done, COMPARED)
    losses = step.step.telemetry(0, min(done, COMPARED))[:, 0].tolist() if comparable else []
    found = watched(step, options.precision)
    parts = by_component(found)
    return {
        "batch": options.batch,
        "precision": options.precision,
        **summary(times, flops, options.batch, peak),
        "steps": len(times),
        "peak": peak,
        "losses": losses,
        "components": parts,
        "idle_ms": max(0.0, 1e3 * statistics.median(times) - sum(parts.values())),
        "moved": sum(launch.moved or 0 for launch in found.launches),
        "flops": flops,
    }


@contextlib.contextmanager
def own_memory(backend):
    """Context: allocations come from a separate arena, which returns its memory to the driver
    afterwards. Gives a function: the peak of bytes held, or None if the device does not count them.
    """
    if not hasattr(backend, "new_arena"):
        yield lambda: None
        return
    before = len(backend.arenas)
    arena = backend.new_arena()
    try:
        with backend.within(arena):
            yield lambda: sum(each.peak_bytes for each in backend.arenas[before:])
    finally:
        gc.collect()
        for each in backend.arenas[before:]:
            backend.trim(each)


def plan(options, rows, backend):
    """A function: card -> [Key] of the kernels of all these rows, but for a larger batch."""

    def keys_on(card):
        keys = {}
        for _, row in rows:
            if not row.largest:
                with at_most(row.ceilings):
                    wanted = options_of(row, options, options.batch, backend)
                    keys |= dict.fromkeys(
                        collect(
                            lambda device, o=wanted: NumdiffStep(o.changed(device=device)), card
                        )
                    )
        return list(keys)

    return keys_on


# The ladder ---------------------------------------------------------------------------------------


def bench_ladder(options, numbers=None, steps=20, warmup=3, started=None, echo=aside):
    """Yields a dict a row of the model and batch that `options` (a TrainOptions) describe, in
    order.

    numbers: of ROWS, from 1; steps, warmup: of each, fewer where a step takes seconds;
    started(text): called before A dict has number, name and left_out (why it does not apply), or
    fault (what went wrong), or: batch, precision, steps (measured), ms (median), ms_fastest,
    ms_slowest, images_per_second, tflops, mfu (share of the card's peak in that precision), peak
    (that peak), speedup (images/s over the first row's), peak_mib, components {name: ms}, idle_ms
    (of the step less the kernels'), losses (of the first steps), compared (how many of them),
    deviation (the largest from the first row's, or, where that has run fewer steps, from those of
    the next row of its precision, as a share), moved (bytes), flops, bandwidth (bytes/s or None)
    """
    if steps < 1 or warmup < 1:
        raise UsageError("--steps and --warmup must be at least 1.")
    backend = get_backend(options.device)
    with contextlib.ExitStack() as held:
        rows, unsuitable, dataset = chosen(numbers), None, None
        if any(row.loaded for _, row in rows):
            # its pictures are brought to any size
            folder = options.data is not None and os.path.isdir(options.data)
            dataset = held.enter_context(
                open_dataset(options.data, options.image_size if folder else None)
            )
            unsuitable = unsuitable_data(options, dataset)
            if unsuitable:
                with contextlib.suppress(UsageError):  # a size to which they cannot be averaged
                    dataset = held.enter_context(open_dataset(options.data, options.image_size))
                    unsuitable = unsuitable_data(options, dataset)
        applying = [(n, row) for n, row in rows if left_out(row, backend, unsuitable) is None]
        if options.device == "cuda":
            with compiling(plan(options, applying, backend), echo=echo):
                pass
        with own_memory(backend):
            bandwidth = Roof(backend).bandwidth if hasattr(backend, "memory_info") else None
        first, curve, batch = None, [], None
        for number, row in rows:
            name = WITHOUT_KERNELS if number == 1 and backend is None else row.name
            found = {"number": number, "name": name, "bandwidth": bandwidth}
            reason = left_out(row, backend, unsuitable)
            if reason is None:
                if started:
                    started(f"row {number}, {name}")
                if row.largest and batch is None and hasattr(backend, "memory_info"):
                    batch = largest_batch(options_of(row, options, options.batch, backend), backend)
                reason = (
                    "no batch as large as that of the other rows fits"
                    if batch == 0 and row.largest
                    else None
                )
            found |= (
                {"left_out": reason}
                if reason
                else attempt(
                    row,
                    options_of(row, options, row.largest and batch or options.batch, backend),
                    backend,
                    steps,
                    warmup,
                    dataset,
                )
            )
            if "ms" in found:
                first = first or found
                found["speedup"] = found["images_per_second"] / first["images_per_second"]
                curve = curve or found["losses"]
                found["deviation"] = deviation(found["losses"], curve)
                found["compared"] = min(len(found["losses"]), len(curve))
                if found["precision"] == first["precision"]:  # a slow first row has few
                    curve = [*curve, *found["losses"][len(curve) :]]
            yield found


def attempt(row, options, backend, steps, warmup, dataset):
    """`measure_row` of a new step; of one that fails {"fault": a sentence}, so that the other rows
    are measured."""
    try:
        with at_most(row.ceilings), own_memory(backend) as peak:
            step = NumdiffStep(options)
            found = measure_row(row, step, steps, warmup, dataset)
            most = peak()
            del step
        return {**found, "peak_mib": None if most is None else most / 2**20}
    except NumdiffError as fault:
        return {"fault": str(fault)}


def deviation(losses, reference):
    """The largest difference of two losses of the same step, as a share of the second's; None
    without any."""
    shares = [abs(a - b) / max(abs(b), TINY) for a, b in zip(losses, reference, strict=False)]
    return float(np.max(shares)) if shares else None  # NaN, if one is


def worst(rows):
    """{precision: (largest deviation, how many losses a row were compared at least, at most, what
    is expected)} of measured rows."""
    found = {}
    for row in rows[1:]:
        if row.get("deviation") is not None:
            most, least, longest = found.get(row["precision"], (0.0, math.inf, 0))[:3]
            found[row["precision"]] = (
                float(np.maximum(most, row["deviation"])),
                min(least, row["compared"]),
                max(longest, row["compared"]),
                BARS[row["precision"]],
            )
    return found


def as_csv(rows):
    """The text of a table of the rows."""
    names = (
        "number",
        "name",
        "left_out",
        "fault",
        "batch",
        "precision",
        "steps",
        "ms",
        "ms_fastest",
        "ms_slowest",
        "images_per_second",
        "tflops",
        "speedup",
        "mfu",
        "peak_mib",
        "deviation",
    )
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*names, *(f"{part}_ms" for part in COMPONENTS), "idle_ms"])
    for row in rows:
        parts = row.get("components", {})
        writer.writerow(
            [
                *(row.get(name) for name in names),
                *(parts.get(part) for part in COMPONENTS),
                row.get("idle_ms"),
            ]
        )
    return text.getvalue()
