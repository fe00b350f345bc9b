"""Each version of each operation at a model's own shapes: those with which one training step calls
it.

A step is watched once to record the arguments of its operations. Each call is then repeated on
random numbers of the same shapes. On a GPU this is a replay of a graph of several calls, over
copies of the arguments that together exceed the second-level cache. Rates count the least that the
operation needs (costs.py), so that versions compare.
"""

import datetime
import importlib.metadata
import importlib.util
import inspect
import statistics
import time
import warnings
from dataclasses import dataclass

import numpy as np

from ..device import DeviceArray, copy_into, empty_like, synchronize, upload
from ..device.roof import Roof
from ..dtypes import is_half
from ..emulator.values import leaves
from ..errors import NumdiffError, UsageError, near_miss
from ..kernels.conv2d import conv2d_backward
from ..kernels.operation import Array
from ..kernels.operation.versions import label, name_of, numbers_of
from ..kernels.transformer.columns import RowColumns
from .costs import arrays_in, cost_of, roof_of
from .replays import MAX_CALLS, REPLAY_S, repeated
from .torch_kernels import torch_call
from .watch import watching_launches, watching_operations

ROUNDS = 9
SLOW_S = 0.1  # a call that takes longer is timed once
CACHE = 150e6  # bytes that the copies of the arguments should exceed together
MAX_COPIES = 8
POOL = 2**22 - 3  # random numbers, used repeatedly: not a multiple of a row
POSITIVE = ("v", "rstd", "probabilities")  # arguments that are never below zero
SHAPES = 3  # per operation that was not named


@dataclass
class Recorded:
    """One distinct call of an operation. count: how often a step makes it."""

    function: object
    arguments: dict
    moved: int
    flops: int | None
    outermost: bool
    count: int = 1
    apart: tuple = ()  # words that distinguish it from calls of the same shapes

    @property
    def name(self):
        return self.function.__name__

    @property
    def dtype(self):
        """The dtype of the first array of floats."""
        return next(
            (a.dtype for a in self._arrays() if a.dtype.kind == "f" or is_half(a.dtype)),
            np.dtype(np.float32),
        )

    def _arrays(self):
        return [
            a
            for value in self.arguments.values()
            for a in (value if isinstance(value, (list, tuple)) else [value])
            if isinstance(a, Array)
        ]

    def shape(self):
        """The arguments in a few words."""
        given = self.arguments
        words = [str(a) for a in self._arrays()[:2]]
        words += [
            f"{name} {given[name]}"
            for name in ("stride", "heads")
            if isinstance(given.get(name), int) and given[name] != 1
        ]
        words += [
            name
            for name in ("silu", "transpose_a", "transpose_b", "accumulate")
            if given.get(name) is True
        ]
        return ", ".join([*words, *self.apart])


def record_calls(step, split_passes=True):
    """[Recorded] of one run of a training step, in the order of their first calls, nested
    operations included.

    split_passes: record a convolution's backward as its two passes
    """
    found, depth = {}, [0]
    whole = (conv2d_backward,) if split_passes else ()

    def around(function, arguments, call):
        if function in whole:
            return call()
        places = {}
        kept = {name: _keep(value, places, name in POSITIVE) for name, value in arguments.items()}
        key = (
            function.__name__,
            tuple(
                (name, repr(value)) for name, value in kept.items() if not isinstance(value, float)
            ),
            str(_dtypes(arguments)),
        )
        depth[0] += 1
        try:
            result = call()
        finally:
            depth[0] -= 1
        if key in found:
            found[key].count += 1
            found[key].outermost |= depth[0] == 0
        else:
            found[key] = Recorded(
                function, kept, *cost_of(function, arguments, result), depth[0] == 0
            )
        return result

    with watching_operations(around):
        step.run_eagerly()
    return list(found.values())


def told_apart(calls):
    """The calls; those of one operation, type and text get the words by which their arguments
    differ."""
    groups = {}
    for call in calls:
        groups.setdefault((call.name, call.dtype, call.shape()), []).append(call)
    for group in groups.values():
        words = {
            name: [_word(name, call.arguments.get(name)) for call in group]
            for name in group[0].arguments
        }
        differing = {name: each for name, each in words.items() if len(set(each)) > 1}
        for name in list(differing):  # a gradient has the shape of what it is of
            if name.startswith("d") and _given(differing[name]) == _given(
                differing.get(name[1:], ())
            ):
                del differing[name]
        for i, call in enumerate(group):
            call.apart = tuple(
                each[i] if len(set(each) - {""}) > 1 else name
                for name, each in differing.items()
                if each[i]
            )
    return calls


def _given(words):
    return [bool(word) for word in words]


def _word(name, value):
    """The word that distinguishes this argument from others of its name; "" if there is none."""
    if value is None or value is False or isinstance(value, float):
        return ""
    if hasattr(value, "_fields"):  # such as a stack of matrices
        value = "×".join(str(v) for v in value if v is not None)
    return name if value is True else f"{name} {value}"


def _dtypes(arguments):
    return [a.dtype for a in arrays_in(list(arguments.values()))]


def for_each(function, value):
    """`function` of each item of a list, tuple or NamedTuple, in one of the same type; anything
    else as it is."""
    if hasattr(value, "_fields"):
        return type(value)(*map(function, value))
    return type(value)(map(function, value)) if type(value) in (list, tuple) else value


def _keep(value, places, positive=False):
    """An argument without its memory."""
    if isinstance(value, (list, tuple)):
        return for_each(lambda item: _keep(item, places), value)
    if isinstance(value, RowColumns):  # a separate array does as well
        return Array(value.shape, value.dtype, None, places.setdefault(id(value), len(places)))
    if not isinstance(value, (np.ndarray, DeviceArray)):
        return value
    values = None
    if value.dtype.kind in "iub" and value.size <= 1 << 20:
        values = value.backend.download(value) if isinstance(value, DeviceArray) else value.copy()
    return Array(
        tuple(value.shape), value.dtype, values, places.setdefault(id(value), len(places)), positive
    )


def versions_of(function):
    """The versions that an operation may have (some may refuse a call); () if it has no `version`."""
    if "version" not in inspect.signature(function).parameters:
        return ()
    return numbers_of(function.__name__)


class TimedCalls:
    """Times calls on one backend; all captures share an arena, since they run one by one."""

    def __init__(self, backend):
        self.backend = backend
        self.arena = backend.new_arena() if hasattr(backend, "new_arena") else None
        self.numbers = np.random.default_rng(0).standard_normal(POOL, np.float32)

    def arguments(self, recorded):
        """Copies of a call's arguments, enough to exceed a cache together."""
        nbytes = sum(
            np.prod(a.shape, dtype=np.int64) * a.dtype.itemsize for a in recorded._arrays()
        )
        copies = int(np.clip(-(-CACHE // max(nbytes, 1)), 2, MAX_COPIES)) if self.arena else 1
        first = self._make(recorded.arguments)
        return [first, *(self._copy(first) for _ in range(copies - 1))]

    def _copy(self, arguments):
        """The same arguments in other memory; arguments that were one array stay one."""
        made = {}

        def copy(value):
            if isinstance(value, (np.ndarray, DeviceArray)):
                if id(value) not in made:
                    made[id(value)] = empty_like(value)
                    copy_into(made[id(value)], value)
                return made[id(value)]
            return for_each(copy, value)

        return {name: copy(value) for name, value in arguments.items()}

    def _filled(self, array):
        """An `Array` on the device: its values, which are integers, or random numbers."""
        if array.values is not None:
            return upload(array.make(np.random.default_rng(0)), self.backend)
        numbers = np.resize(self.numbers.astype(array.dtype, copy=False), array.shape)
        return upload(np.abs(numbers) if array.positive else numbers, self.backend)

    def _make(self, arguments):
        made = {}

        def array(value):
            if isinstance(value, Array):
                if value.place not in made:
                    made[value.place] = self._filled(value)
                return made[value.place]
            return for_each(array, value)

        return {name: array(value) for name, value in arguments.items()}

    def kernels(self, function, arguments, version):
        """(name, grid, block, numbers) of each kernel that a call launches; raises what the call
        does where the version refuses it. Versions may launch the same kernels with other numbers;
        numbers of 2**31 or more may be addresses.
        """
        launches = []

        def around(name, grid, block, call):
            numbers = [
                a for a in leaves(call.args) if isinstance(a, (int, np.integer)) and a < 2**31
            ]
            launches.append((name, str(grid), str(block), str(numbers)))
            return call()

        with watching_launches(self.backend, around):
            call_with(function, arguments, version)
        return tuple(launches)

    def job(self, function, sets, version):
        """(a function that makes `calls` calls, the wait for them, calls)."""
        backend = self.backend

        def once(i):
            call_with(function, sets[i % len(sets)], version)

        def wait():
            synchronize(backend)

        if self.arena is not None:
            once(0)  # loads the kernels
        wait()
        start = time.perf_counter()
        once(0)
        wait()
        taken = time.perf_counter() - start
        if taken > SLOW_S or self.arena is None:
            return lambda: once(0), wait, 1
        # launching from Python takes time, too
        calls = int(np.clip(4 * REPLAY_S / max(taken, 1e-6), 4, MAX_CALLS))
        with backend.within(self.arena):
            # make what is made once for each address, such as tensor maps
            for i in range(len(sets)):
                once(i)
            wait()
            replay = backend.capture(lambda: [once(i) and None for i in range(calls)])
        return repeated(replay, wait, calls)


def call_with(function, arguments, version):
    if version is not None:
        arguments = {**arguments, "version": version}
    return function(**arguments)


def microseconds_in_turns(jobs, rounds=ROUNDS):
    """Median microseconds of a call of each job (run, wait, calls); the jobs alternate."""
    times = [[] for _ in jobs]
    for turn in range(rounds + 1):
        for (run, wait, calls), taken in zip(jobs, times, strict=True):
            if taken and taken[0] * calls > 1e6 * SLOW_S:
                continue
            start = time.perf_counter()
            run()
            wait()
            if turn:
                taken.append(1e6 * (time.perf_counter() - start) / calls)
            elif calls == 1:
                taken.append(1e6 * (time.perf_counter() - start))
    return [statistics.median(taken) for taken in times]


def wanted_calls(calls, operations, shapes):
    """The calls to measure: those of the named operations, at any depth, or all that the step
    itself makes."""
    names = sorted({call.name for call in calls})
    for operation in operations:
        if not any(name == operation or name.startswith(operation + "_") for name in names):
            short = [name.rpartition("_")[0] for name in names]
            raise UsageError(
                f"no operation {operation!r} in this step{near_miss(operation, [*names, *short])}: use "
                f"some of {', '.join(names)}."
            )
    groups = {}
    for call in calls:
        if any(call.name == o or call.name.startswith(o + "_") for o in operations) or (
            not operations and call.outermost
        ):
            groups.setdefault(call.name, []).append(call)
    limit = shapes or (None if operations else SHAPES)
    return [
        call
        for group in groups.values()
        for call in sorted(group, key=lambda c: -(c.flops or 0) - c.moved)[:limit]
    ]


def bench_kernels(options, operations=(), chosen=False, shapes=None, versus=False):
    """Yields a dict for each version of each operation at each shape of a training step of the
    options' model: operation, shape, version ("v3", with a star where the launcher chooses it),
    name (of the version, or None), calls (a step), us, gb_s, tflops, roof (share), bound ("memory"
    or "arithmetic"), torch_us (None if PyTorch has no counterpart or is not installed); bandwidth
    (bytes/s), precision and peak (FLOP/s in it): the roof, None where unknown; dtype; card.

    operations: names, none for all; chosen: no version but the launcher's; shapes: how many of each
    operation
    versus: PyTorch is required
    """
    from .step import NumdiffStep
    from .torch_step import require_torch

    if versus:
        require_torch()
    step = NumdiffStep(options)
    calls = told_apart(wanted_calls(record_calls(step), operations, shapes))
    backend, roof = step.backend, Roof(step.backend)
    del step  # its memory is needed
    measured = TimedCalls(backend)
    for call in calls:
        yield from bench_call(call, measured, roof, options.precision, chosen)


def results_of(rows):
    """The contents of a file of rows, with the card, the day and PyTorch's version."""
    torch = importlib.metadata.version("torch") if importlib.util.find_spec("torch") else None
    return {
        "card": rows[0]["card"] if rows else None,
        "date": datetime.date.today().isoformat(),
        "torch": torch,
        "rows": rows,
    }


def bench_call(call, measured, roof, precision, chosen=False, versions=None):
    """Yields the rows of one call. versions: only these, and the launcher's choice only if it is
    one of them."""
    function, backend = call.function, measured.backend
    sets = measured.arguments(call)
    known = versions_of(function) if backend is not None else ()
    favourite = measured.kernels(function, sets[0], None)
    jobs, labels = (
        [measured.job(function, sets, None)] if versions is None else [],
        ["*"] * (versions is None),
    )
    for version in known if versions is None else versions:
        try:
            launched = measured.kernels(function, sets[0], version)
        except (ValueError, NumdiffError):  # not for these operands
            continue
        except Exception as fault:  # the failure of one version must not hide the others
            warnings.warn(
                f"{call.name} version {label(call.name, version, call.dtype)} failed: {fault}",
                stacklevel=2,
            )
            continue
        if launched == favourite and labels[:1] == ["*"]:
            labels[0] = f"v{version}*"
        elif not chosen:
            jobs.append(measured.job(function, sets, version))
            labels.append(f"v{version}" + "*" * (versions is not None and launched == favourite))
    theirs = torch_call(call, sets[0], precision) if backend is None or measured.arena else None
    times = microseconds_in_turns(jobs + ([theirs] if theirs else []))
    theirs_us = times.pop() if theirs else None
    for us, version in sorted(zip(times, labels, strict=True), key=lambda pair: pair[1]):
        kind = roof_of(call.name, call.dtype, precision)
        share, bound = roof.share(us / 1e6, call.moved, call.flops, kind)
        yield {
            "operation": call.name,
            "shape": call.shape(),
            "dtype": call.dtype.name,
            "version": version,
            "name": name_of(call.name, int(version.strip("v*") or 0), call.dtype),
            "calls": call.count,
            "us": us,
            "gb_s": call.moved / us / 1e3,
            "tflops": call.flops and call.flops / us / 1e6,
            "roof": share,
            "bound": bound,
            "torch_us": theirs_us,
            "bandwidth": roof.bandwidth,
            "precision": kind,
            "peak": roof.flops(kind),
            "card": getattr(backend, "device_name", None),
        }
