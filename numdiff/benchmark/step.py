"""How long a training step takes: medians of many, after a warm-up, on any device.

Where PyTorch's step is measured, too, the two take turns, step by step, in the same minutes on the
same card.
"""

import gc
import math
import statistics
import time
from contextlib import nullcontext

import numpy as np

from ..device import copy_into, synchronize
from ..device.planned import collect
from ..device.roof import peak_flops
from ..device.side_stream import in_order
from ..errors import OutOfMemoryError, UsageError
from ..progress_bar import progress_bar
from ..sizes import sides
from ..training.build import build_model, build_trainer, describe_recomputation
from ..training.compiling import aside, compiling
from ..training.forecast import peak_memory
from ..training.price import with_and_without
from . import CLASSES
from .memory import memory_of

COMPARED = {
    name: ("bf16" if name in ("fp16", "fp8") else name,)
    for name in ("fp32", "tf32", "fp16", "bf16", "fp8")
}  # in PyTorch
# PyTorch's plain one, and its fastest
BEST_MODES = {"cuda": ("eager", "graphs"), "cpu": ("eager", "compile")}
SPREAD = 0.02  # of the random values that replace initial zeros


class RandomImages:
    """A stand-in for a dataset: the same random images for every step, so that no disk is measured.

    Images of other channel counts than one or three are float32, like latents.
    """

    def __init__(self, count, size, channels, classes=None):
        generator = np.random.default_rng(0)
        self.shape = (count, *sides(size), channels)
        self.dtype = np.dtype(np.uint8 if channels in (1, 3) else np.float32)
        if self.dtype == np.uint8:
            self.images = generator.integers(0, 256, self.shape, np.uint8)
        else:
            self.images = generator.standard_normal(self.shape, np.float32)
        self.labels = (
            None if classes is None else generator.integers(0, classes, count).astype(np.int32)
        )


def random_model(options):
    """The model that the options describe, without zero weights."""
    num_classes = (options.num_classes or CLASSES) if options.class_cond else None
    model = build_model(options, options.channels or 3, num_classes)
    fill_zeros(model)
    return model


def random_trainer(options, model):
    """A Trainer of a model on random images, and those images."""
    images = RandomImages(options.batch, options.image_size, model.in_channels, model.num_classes)
    options.flip = options.flip and images.dtype == np.uint8
    return build_trainer(options, model, images), images


def plan_step(options, card):
    """[Key] of the kernels of a training step on random images, on a card."""
    return collect(lambda device: NumdiffStep(options.changed(device=device)), card)


def fill_zeros(model):
    """Random values for the weights that start from zero: a card that multiplies zeros runs cooler,
    and so faster."""
    parameters = model.parameters
    parts = [
        (entry["offset"], math.prod(entry["shape"]))
        for entry in parameters.index
        if entry["name"] in parameters.zeros
    ]
    longest = max((count for _, count in parts), default=0)
    values = random_values(longest)
    for first, count in parts:
        copy_into(parameters.data[first : first + count], values[:count])
    parameters.round()


def random_values(count):
    """What replaces initial zeros, float32 (count,)."""
    return SPREAD * np.random.default_rng(0).standard_normal(count, np.float32)


class MeasuredJob:
    """A measured job on numdiff's side; a subclass has `backend` and run()."""

    def wait(self):
        synchronize(self.backend)

    @property
    def peak_bytes(self):
        if self.backend is None:
            return peak_memory()
        return getattr(self.backend, "peak_bytes", 0)


class NumdiffStep(MeasuredJob):
    """numdiff's training step, loaded with random images. Attributes trainer, first_s: seconds of
    the first step."""

    def __init__(self, options, echo=aside):
        started = time.perf_counter()
        self.options = options
        ahead = nullcontext()
        if options.device == "cuda":
            ahead = compiling(lambda card: plan_step(options, card), echo=echo)
        with ahead:
            model = random_model(options)
        self.trainer, images = random_trainer(options, model)
        self.step, self.backend = self.trainer.step_function, self.trainer.model.backend
        self.step.load(images.images, images.labels)
        self.run()
        self.wait()
        self.first_s = time.perf_counter() - started
        if self.step.capture:  # the second run captures, and must not be measured either
            self.run()
            self.wait()

    def run(self):
        self.step.run()

    def record_in_order(self):
        """From now on `run` replays a graph of one stream, in which kernels come as they are
        launched."""
        self.step.record_anew()
        with in_order():
            self.run()
            self.wait()

    def run_eagerly(self):
        """One step whose kernels are launched one by one, so that it can be watched; `run` may
        replay a graph."""
        captures, self.step.capture = self.step.capture, False
        try:
            with self.backend.within(self.step.arena) if captures else nullcontext():
                self.step.run()
            self.wait()
        finally:
            self.step.capture = captures


def seconds_in_turns(steps, count, warmup):
    """[seconds of each of `count` runs] of several steps, which alternate, after `warmup` runs
    each.

    steps: objects with run() and wait(); every run is waited for.
    """
    for step in steps:
        for _ in range(warmup):
            step.run()
        step.wait()
    times = [[] for _ in steps]
    with progress_bar(count, "measuring", "repetition") as bar:
        for _ in range(count):
            for step, taken in zip(steps, times, strict=True):
                start = time.perf_counter()
                step.run()
                step.wait()
                taken.append(time.perf_counter() - start)
            bar.update()
    return times


def summary(times, flops, images, peak):
    """{ms, ms_fastest, ms_slowest, tflops, images_per_second, mfu} of the seconds of several steps."""
    median = statistics.median(times)
    return {
        "ms": median * 1e3,
        "ms_fastest": min(times) * 1e3,
        "ms_slowest": max(times) * 1e3,
        "tflops": flops / median / 1e12,
        "images_per_second": images / median,
        "mfu": flops / median / peak if peak else None,
    }


def beside_torch(ours, versus, make, count, warmup, summarise, started=None):
    """`ours` and each of PyTorch's (mode, precision) pairs, alternating: (seconds of ours, a dict
    of each pair).

    make(mode, precision): PyTorch's side: run(), wait(), close(), peak_bytes, parameters, first_s
    summarise(seconds, precision): a dict with ms; started(text): called before each pair
    A dict has mode, precision, what summarise gives, peak_mib, first_s, parameters, and ratio:
    PyTorch's ms / ours in the same turns; or, of a pair that failed, mode, precision and fault.
    """
    from .torch_step import wait_of

    times, rows = [], []
    for mode, precision in versus:
        if started:
            started(f"PyTorch {mode}, {precision}{wait_of(mode)}")
        row, theirs = {"mode": mode, "precision": precision}, None
        try:
            theirs = make(mode, precision)
            pair = seconds_in_turns([ours, theirs], count, warmup)
            row |= summarise(pair[1], precision)
            row |= {
                "peak_mib": theirs.peak_bytes / 2**20,
                "first_s": theirs.first_s,
                "parameters": theirs.parameters,
                "ratio": row["ms"] / summarise(pair[0])["ms"],
            }
            times += pair[0]
        except Exception as fault:  # the failure of one mode must not hide the others
            row = {
                "mode": mode,
                "precision": precision,
                "fault": " ".join(f"{type(fault).__name__}: {fault}".split())[:120],
            }
        rows.append(row)
        if theirs is not None:
            theirs.close()
    return times, rows


def bench_step(options, steps=20, warmup=5, versus=(), started=None):
    """Times of `steps` training steps of the model and batch that `options` (a TrainOptions)
    describe.

    The host waits for each step. Loading the batch is excluded: a training run loads it
    concurrently with the step.

    versus: (mode, precision) pairs of PyTorch's step, of torch_step.MODES and PRECISIONS, each
        alternating with numdiff's; started(text): called before each
    Returns a dict: ms (median), ms_fastest, ms_slowest, first_step_s (compiling or loading the
    kernels included), tflops, mfu (share of the card's peak in that precision, or None),
    images_per_second, peak_mib, peak_of ("device arenas" or "process"), memory (as `memory_of`, or
    None), parameters, flops_per_step, device; recompute: None, or as `price_of` gives it; and
    versus: a list of dicts as `beside_torch` gives, with ms_fastest, ms_slowest, tflops and mfu.
    """
    if steps < 1 or warmup < 0:
        raise UsageError("--steps must be at least 1 and --warmup at least 0.")
    if versus:
        from .torch_step import TorchStep, require_torch

        require_torch()
    ours = NumdiffStep(options)
    backend, flops = ours.backend, ours.trainer.flops_per_step
    device, count = (
        getattr(backend, "device_name", "cpu (NumPy)"),
        ours.trainer.model.parameters.count,
    )

    def summarise(seconds, precision=None):
        return summary(
            seconds, flops, options.batch, peak_flops(backend, precision or options.precision)
        )

    times, others = beside_torch(
        ours, versus, lambda *pair: TorchStep(options, *pair), steps, warmup, summarise, started
    )
    times = times or seconds_in_turns([ours], steps, warmup)[0]
    peak = ours.peak_bytes / 2**20
    result = {
        "device": device,
        **summarise(times),
        "first_step_s": ours.first_s,
        "peak_mib": peak,
        "memory": memory_of(ours),
        "peak_of": "device arenas" if backend else "process",
        "parameters": count,
        "flops_per_step": flops,
        "versus": others,
        "recompute": None,
    }
    if options.recompute != "no":
        sizes, arena = ours.trainer.model.options, ours.step.arena
        ours = None
        gc.collect()
        if arena is not None:
            backend.trim(arena)
        result["recompute"] = price_of(options, sizes, backend, steps, warmup, started)
    return result


def price_of(options, sizes, backend, steps, warmup, started=None):
    """What recomputing costs and saves: a dict of foreseen (a line), and of a step that recomputes
    nothing ms and mib (None on the CPU), or a fault."""
    peaks = with_and_without(options, sizes, backend) if hasattr(backend, "arenas") else None
    row = {"foreseen": describe_recomputation(options, sizes, peaks)}
    if started:
        started("the step that recomputes nothing")
    try:
        step = NumdiffStep(options.changed(recompute="no"))
        times = seconds_in_turns([step], steps, warmup)[0]
        memory = memory_of(step)
        return {**row, "ms": statistics.median(times) * 1e3, "mib": memory and memory[0] / 2**20}
    except OutOfMemoryError as fault:  # which may be why one recomputes
        return {**row, "fault": str(fault)}
