"""Which tiles are best on this card: measures every candidate at the shapes of a model's float16
products and convolutions.

Launchers choose by an estimate. A choice that is measured to be faster by more than a few per cent
goes into the card's table (numdiff/kernels/tuning), which launchers ask first.

A step of the model is recorded on a stand-in for the card, which runs nothing, and every candidate
is called there, which shows what kernels will be needed. They are compiled in parallel; then the
card only has to measure.
"""

import contextlib
import itertools
import json
import math
import pathlib
import time

import numpy as np

from ..device import empty, get_backend
from ..device.planned import Planned, card_of
from ..device.requires import supports
from ..errors import NumdiffError, UsageError
from ..files import atomic_file
from ..kernels.conv2d.hopper import convolution as conv2d_hopper
from ..kernels.conv2d.hopper import weight_gradient_3x3 as conv2d_hopper_gradient_3x3
from ..kernels.matmul import choice as matmul_choice
from ..kernels.tuning import card_file, ignored, key_of, read_table, table_of
from ..training.compiling import compile_ahead
from .kernels import Array, TimedCalls, for_each, microseconds_in_turns, record_calls

GAIN = 0.03  # by which a choice must beat the estimate's to be recorded
CLOSE = 1.25  # times the best of a first round: slower ones are not measured again
HOPELESS = 1.4  # times the least estimate: those estimated to be slower are not measured at all
ROUNDS = 5
SPLITS = (1, 2, 3, 4, 5, 6, 8, 11, 16)
PARTS = (1, 2, 3, 4, 5, 6, 8, 11, 12, 16, 22, 24, 32, 44, 64, 66, 128, 132)
CLUSTERS = (1, 2, 3, 4, 8)


@contextlib.contextmanager
def replaced(module, name, function):
    """Context: module.name is `function`."""
    before = getattr(module, name)
    setattr(module, name, function)
    try:
        yield
    finally:
        setattr(module, name, before)


def rows_of(x):
    """The leading axes of an array (..., C), taken together."""
    return math.prod(x.shape[:-1])


class MatmulTiles:
    """(tile of M, tile of N, slices of K) of matmul's rung 6."""

    kind = "matmul v6"

    @staticmethod
    def shape(call):
        """(M, N, K, whether K may be split) of a recorded call that has such tiles, or None."""
        given = call.arguments
        if call.name == "matmul_pair_forward":
            return rows_of(given["x"]), given["weight"].shape[0], given["x"].shape[-1], False
        if call.name == "matmul_pair_backward":
            return rows_of(given["dy"]), given["x"].shape[-1], given["dy"].shape[-1], False
        if call.name == "matmul_pair_gradient":
            return given["dy"].shape[-1], given["x"].shape[-1], rows_of(given["dy"]), True
        if call.name != "matmul_forward" or call.dtype != np.float16:
            return None
        a, b = given["a"], given["b"]
        if len(a.shape) != 2:
            return None
        M, K = a.shape[::-1] if given["transpose_a"] else a.shape
        N = b.shape[0] if given["transpose_b"] else b.shape[1]
        if not matmul_choice.by_eight((), (a.shape[1], b.shape[1], N)):
            return None  # not for rung 6
        out, out_dtype = given["out"], given["out_dtype"]
        return M, N, K, np.dtype(out_dtype or (a if out is None else out).dtype) == np.float32

    @staticmethod
    def candidates(shape, multiprocessors):
        M, _, K, split = shape
        slices = [
            n for n in SPLITS if n == 1 or split and K // n >= matmul_choice.SHORTEST_HALF_SLICE
        ]
        pairs = range(1 + (matmul_choice.pairs_fit(M) and not split))
        return [
            [*tile, n, paired]
            for tile, n, paired in itertools.product(matmul_choice.HALF_TILES[6], slices, pairs)
        ]

    @staticmethod
    def estimated(shape, multiprocessors):
        *sizes, split = shape
        product = matmul_choice.HalfProduct(1, *sizes, nbytes=4 if split else 2)
        tile, slices, paired, _ = matmul_choice.choose_half_tile(6, product, split, multiprocessors)
        return [*tile, slices, int(paired)]

    @staticmethod
    @contextlib.contextmanager
    def forced(choice):
        with (
            replaced(
                matmul_choice, "choose_half", lambda *_, **more: (tuple(choice[:2]), choice[2], 0.0)
            ),
            replaced(matmul_choice, "PAIRS", bool(choice[3])),
        ):
            yield


class ConvolutionTiles:
    """(channels of a tile, halves of its pixels, taps of the weight in a stage) of conv2d's rung 6."""

    kind, name, given, result = "conv2d v6", "hopper_forward", "x", "y"

    @classmethod
    def shape(cls, call):
        """(B, H, W, input channels, output channels, kernel) of a recorded call, or None."""
        if call.name != cls.name:
            return None
        given = call.arguments
        return *given[cls.given].shape, given[cls.result].shape[3], given["weight"].shape[1]

    @staticmethod
    def candidates(shape, multiprocessors):
        taps = (1, 3) if shape[5] == 3 else (1,)
        return [[*tile, n] for tile, n in itertools.product(conv2d_hopper.VARIANTS, taps)]

    @staticmethod
    def estimated(shape, multiprocessors):
        plan = conv2d_hopper.choose_plan(*shape, True, multiprocessors)[1]
        return [plan.bn, plan.pixels // 128, plan.taps_per_stage]

    @staticmethod
    def forced(choice):
        choose = conv2d_hopper.choose_plan
        return replaced(
            conv2d_hopper,
            "choose_plan",
            lambda *given: choose(*given[:8], tuple(choice[:2]), choice[2], *given[10:]),
        )


class InputGradientTiles(ConvolutionTiles):
    """The same for its input gradient."""

    kind, name, given, result = "conv2d_input_gradient v6", "hopper_input_gradient", "dy", "dx"


class WeightGradientTiles:
    """(channels of x in a tile, parts, pixels in a stage, blocks of a cluster) of the 3 × 3 weight
    gradient."""

    kind = "conv2d_weight_gradient_3x3 v6"

    @staticmethod
    def shape(call):
        """(B, H, W, channels of x, channels of dy) of a recorded call, or None."""
        if call.name != "hopper_weight_gradient_3x3":
            return None
        x, dy = call.arguments["x"], call.arguments["dy"]
        return *x.shape, dy.shape[3]

    @staticmethod
    def candidates(shape, multiprocessors):
        estimates = {}
        for choice in itertools.product(
            conv2d_hopper_gradient_3x3.WIDTHS, PARTS, conv2d_hopper_gradient_3x3.PIXELS, CLUSTERS
        ):
            with contextlib.suppress(ValueError):  # does not fit
                ns, plan = conv2d_hopper_gradient_3x3.choose_plan(
                    *shape, True, multiprocessors, choice
                )
                if plan.parts == choice[1]:  # otherwise there are fewer
                    estimates[choice] = ns
        least = min(estimates.values(), default=0.0)
        return [list(choice) for choice, ns in estimates.items() if ns < HOPELESS * least]

    @staticmethod
    def estimated(shape, multiprocessors):
        plan = conv2d_hopper_gradient_3x3.choose_plan(*shape, True, multiprocessors)[1]
        return [plan.channels, plan.parts, plan.width * plan.height * plan.images, plan.blocks]

    @staticmethod
    def forced(choice):
        choose = conv2d_hopper_gradient_3x3.choose_plan
        return replaced(
            conv2d_hopper_gradient_3x3,
            "choose_plan",
            lambda *given: choose(*given[:7], tuple(choice)),
        )


TABLES = MatmulTiles, ConvolutionTiles, InputGradientTiles, WeightGradientTiles


def tune(options, path=None, echo=lambda line: None, shapes=None, seconds=math.inf):
    """Measure, and write the table of this card; returns (path, {kind: {key: choice}} of what is
    new).

    options: of a model in float16, whose shapes are measured; path: of the file (default: the
    card's own), which keeps what it has of other shapes; shapes: how many of each kind, those with
    most arithmetic (default: all); seconds: after which no further shape is begun

    The table is written after each shape, so an interruption loses nothing found so far.
    """
    if math.isnan(seconds):
        raise UsageError("--timeout nan must be a number of seconds.")
    if options.device != "cuda":
        raise NumdiffError(
            "tile sizes are measured on a GPU, and --device is not cuda; run it on the card."
        )
    if options.precision != "fp16":
        raise NumdiffError("the table is of float16 kernels; give --precision fp16.")
    end, backend = time.monotonic() + seconds, get_backend("cuda")
    if not supports(backend, conv2d_hopper.conv2d_forward_kernels_v6):
        raise NumdiffError(
            f"only the kernels of compute capability 9.0 have tiles to tune, and {backend.device_name} "
            f"has {'.'.join(map(str, backend.capability))}."
        )
    path = path or card_file(backend.device_name)
    write_table(path, backend.device_name, {})  # if it cannot be written, say so now
    with ignored():
        card = card_of(backend)
        found = problems(planned_calls(options, card), shapes)
        echo(f"{len(found)} shapes")
        compile_ahead(planned_kernels(found, card), backend.cache, echo)
        return path, tune_problems(
            found,
            TimedCalls(backend),
            echo,
            lambda choices: write_table(path, backend.device_name, choices),
            end,
        )


def planned_calls(options, card):
    """The calls that a step of the model makes on this card; nothing runs."""
    from .step import NumdiffStep

    return record_calls(NumdiffStep(options.changed(device=Planned(card))), split_passes=False)


def problems(calls, shapes=None):
    """[(table, call, shape)] of recorded calls: each shape once, those with most arithmetic in a
    step first."""
    found, counts = {}, {}
    for table, call in itertools.product(
        TABLES, sorted(calls, key=lambda call: -(call.flops or 0))
    ):
        shape = table.shape(call)
        if (
            shape is not None
            and (table, shape) not in found
            and (shapes is None or counts.get(table, 0) < shapes)
        ):
            counts[table] = counts.get(table, 0) + 1
            found[table, shape] = call
    found = [(table, call, shape) for (table, shape), call in found.items()]
    return sorted(found, key=lambda problem: -(problem[1].flops or 0) * problem[1].count)


def choices_of(table, shape, multiprocessors):
    """The estimate's choice, then all others."""
    estimated = table.estimated(shape, multiprocessors)
    return [estimated, *(c for c in table.candidates(shape, multiprocessors) if c != estimated)]


def planned_kernels(found, card):
    """[Key] of every kernel that measuring these problems will launch."""
    planned = Planned(card)

    def made(value):
        if isinstance(value, Array):
            return empty(value.shape, value.dtype, planned)
        return for_each(made, value)

    for table, call, shape in found:
        arguments = {name: made(value) for name, value in call.arguments.items()}
        for choice in choices_of(table, shape, card.multiprocessors):
            with contextlib.suppress(ValueError), table.forced(choice):  # does not fit
                call.function(**arguments)
    return list(planned.kernels)


def tune_problems(problems, measured, echo, save=lambda found: None, end=math.inf):
    """{kind: {key: choice, None if the estimate's own is best}}; save(found): called after each."""
    found = {}
    for done, (table, call, shape) in enumerate(problems):
        if time.monotonic() > end:
            echo(f"out of time: {len(problems) - done} shapes are left")
            break
        choice, us, estimated, before = best_choice(table, call, shape, measured)
        better = choice != estimated and us < (1 - GAIN) * before
        found.setdefault(table.kind, {})[key_of(*shape)] = choice if better else None
        save(found)
        echo(
            f"{done + 1:3d} of {len(problems)} {table.kind:29s} {'×'.join(map(str, map(int, shape))):28s} {estimated} "
            f"{before:8.1f} µs" + (f"   {choice} {us:8.1f} µs" if better else "")
        )
    return found


def best_choice(table, call, shape, measured):
    """(best choice, its µs, the estimate's choice, its µs)."""
    sets = measured.arguments(call)
    choices, jobs = [], []
    for choice in choices_of(table, shape, measured.backend.multiprocessors):
        try:
            with table.forced(choice):
                jobs.append(measured.job(call.function, sets, None))
            choices.append(choice)
        except ValueError:  # does not fit
            continue
    rough = microseconds_in_turns(jobs, 1)
    close = [k for k, us in enumerate(rough) if k == 0 or us < CLOSE * min(rough)]
    times = dict(zip(close, microseconds_in_turns([jobs[k] for k in close], ROUNDS), strict=True))
    best = min(close, key=times.__getitem__)
    return choices[best], times[best], choices[0], times[0]


def write_table(path, device_name, found):
    """Update a card's file: choices found better are put in, others are taken out.

    A file that does not exist yet begins with the contents of the card's own.
    """
    path, card = pathlib.Path(path), device_name
    if path.exists():
        card, known = read_table(path)
    else:
        known = table_of(device_name)
    if card not in (None, device_name):
        raise NumdiffError(
            f"{path} is the table of another card, {card}, not of {device_name}; give another --out."
        )
    choices = {kind: dict(rows) for kind, rows in known.items()}
    for kind, rows in found.items():
        kept = choices.setdefault(kind, {})
        for key, choice in rows.items():
            kept.pop(key, None)
            if choice is not None:
                kept[key] = choice
    lines = [
        f"  {json.dumps(kind)}: {{\n"
        + ",\n".join(
            f"   {json.dumps(key)}: {json.dumps(choice)}"
            for key, choice in sorted(rows.items(), key=_numbers)
        )
        + "\n  }"
        for kind, rows in sorted(choices.items())
        if rows
    ]
    text = (
        f'{{\n "card": {json.dumps(device_name)},\n "choices": {{\n'
        + ",\n".join(lines)
        + "\n }\n}\n"
    )
    try:
        with atomic_file(path) as file:
            file.write(text.encode())
    except NumdiffError as error:
        raise NumdiffError(
            f"cannot write the table {path}: {error.__cause__.strerror}; give another --out."
        ) from error
    table_of.cache_clear()


def _numbers(row):
    return [math.inf if not n.isdigit() else int(n) for n in row[0].split()]
