"""Problems of gate_adaln, both directions: every kernel, with a gate and without, of every norm;
columns; FP8 bytes.

SHAPES
    as in reference.py
SOURCE
    plain bookkeeping; operation/problem.py says what a problem is.
READ NEXT
    launcher.py, whose records have them.
"""

import functools
import sys

import numpy as np

from ...norms.row_norm import NORMS
from ...operation import Problem, half, positive, single
from .. import columns
from .forward import HALF_KEYS, KEYS
from .reference import gate_adaln_forward_reference

PLAIN = NORMS[0]  # DiT's


def statistics(arrays):
    """mean, unless the problem has none, and rstd of the tokens z, or x, of a backward."""
    rms = "mean" not in arrays
    z = arrays["x"] if "z" not in arrays else arrays["z"]
    norm = "rms" if rms else "layer"
    scale = arrays["modulation.2"]
    _, _, mean, rstd = gate_adaln_forward_reference(z, None, None, None, scale, norm=norm)
    return {"rstd": rstd} if rms else {"mean": mean, "rstd": rstd}


def vectors(shape, norm, gated, array):
    """gate, shift and scale."""
    B, _, C = shape
    vector = array(B, C)
    return vector if gated else None, vector if norm.shifted else None, vector


def forward_problem(shape, norm=PLAIN, gated=True, array=single, **more):
    tokens = array(*shape)
    gate, shift, scale = vectors(shape, norm, gated, array)
    return Problem(
        x=tokens,
        h=tokens if gated else None,
        norm=norm.kind,
        gate=gate,
        shift=shift,
        scale=scale,
        weight=single(shape[2]) if norm.weighted else None,
        **more,
    )


def backward_problem(shape, norm=PLAIN, gated=True, array=single, of_x=False, arrives=None, **more):
    """dz arrives too where there is a gate, or where the norm is not DiT's, unless `arrives` says
    otherwise."""
    (B, T, C), tokens = shape, array(*shape)
    more["derived"] = more.get("derived", statistics)
    return Problem(
        dz=tokens if (gated or norm != PLAIN if arrives is None else arrives) else None,
        dy=tokens,
        z=None if of_x else tokens,
        x=tokens if of_x else None,
        h=tokens if gated else None,
        mean=None if norm.rms else single(B * T),
        rstd=positive(B * T),
        dweight=single(C) if norm.weighted else None,
        modulation=vectors(shape, norm, gated, array),
        weight=single(C) if norm.weighted else None,
        **more,
    )


# Each kernel --------------------------------------------------------------------------------------


def label_of(C, norm, gated, array):
    return (
        f"{'' if norm == PLAIN else f'{norm}, '}{'' if gated else 'no gate, '}{C} channels"
        f"{', float16' * (array is half)}"
    )


def both(shape, norm=PLAIN, gated=True, array=single, of_x=False, backward=True, **more):
    """Yields (whether it is of the backward, its `Problem`)."""
    C = shape[-1]
    label = label_of(C, norm, gated, array)
    versions = None if C == 40 else ("fused",)  # the other's kernels are gate.py's and adaln.py's
    fast = C <= 16 or norm == PLAIN and C == (264 if gated else 40)
    more = {"versions": versions, "fast": fast, "bfloat16": C == 16, **more}
    yield False, forward_problem(shape, norm, gated, array, label=label, **more)
    if backward:
        yield True, backward_problem(shape, norm, gated, array, label=label, **more)
    if of_x:
        yield (
            True,
            backward_problem(shape, norm, gated, array, of_x=True, label=f"{label}, of x", **more),
        )


def each_kernel(call):
    for gated in (True, False):
        yield from both((2, 3, 40), gated=gated, of_x=gated)
        yield from both((1, 3, 264), gated=gated, array=half)
        for C in (264, 520, 776, 1032):
            yield from both((1, 1, C), gated=gated)
    # both versions, and channels that no vector divides
    for norm in NORMS:
        if norm != PLAIN and norm.rms == norm.weighted:
            for gated in (True, False):
                yield from both((2, 5, 24), norm, gated, versions=None, fast=gated and norm.shifted)
    for gated in (True, False):
        yield from both((2, 3, 33), NORMS[-1], gated, versions=None, fast=gated)
        yield (
            True,
            backward_problem(
                (2, 5, 48),
                gated=gated,
                arrives=not gated,
                label=f"{'no gate, ' * (not gated)}48 channels, {'no ' * gated}dz",
                fast=gated,
            ),
        )
    for sweeps, gated, norm in KEYS:
        if norm != PLAIN:
            yield from both((1, 1, 256 * sweeps - 248), norm, gated)
    for _, gated, norm in HALF_KEYS:
        if norm != PLAIN:
            yield from both((1, 3, 264), norm, gated, half, backward=False)
    for norm in NORMS:
        if norm.rms and norm.weighted:  # LightningDiT's
            yield from both((1, 2, 16), norm, array=half)


# Columns ------------------------------------------------------------------------------------------


def in_two(call, run):
    """run() with two warps a block and two blocks an image."""
    launcher = sys.modules[call.__module__]

    def forced(a, version):
        choose = launcher.choose_plan

        def few(B, T, C, itemsize, is_gated, *others):
            _, _, _, before, nbytes = choose(B, T, C, itemsize, is_gated, *others)
            return 2, 2, -(-T // 2), before, nbytes

        launcher.choose_plan = few
        try:
            return run(a, version)
        finally:
            launcher.choose_plan = choose

    return forced


def of_columns(call):
    """gate, shift and scale as columns of one array, whose gradients meet."""
    B, T, C = 2, 11, 16
    tokens = half(B, T, C)
    given = {"x": tokens, "h": tokens, "modulation": half(B, 3 * C)}

    def forward(a, version):
        return call(a.x, a.h, *columns.columns_forward(a.modulation, 3), version=version)

    def backward(a, version, of_x):
        dx, dh, *gradients = call(
            a.dz,
            a.dy,
            None if of_x else a.x,
            a.h,
            columns.columns_forward(a.modulation, 3),
            a.mean,
            a.rstd,
            version=version,
            x=a.x if of_x else None,
        )
        return dx, dh, columns.join_columns(gradients, a.modulation.dtype)

    def derived(arrays):
        return statistics(
            {"x": arrays["x"], "modulation.2": np.zeros((B, C), arrays["x"].dtype), "mean": None}
        )

    more = {"versions": ("fused",), "bfloat16": True}
    yield False, Problem(f"{C} channels, float16", run=forward, **given, **more)
    for of_x in (False, True):
        yield (
            True,
            Problem(
                f"{C} channels, float16{', of x' * of_x}",
                dz=tokens,
                dy=tokens,
                derived=derived,
                run=in_two(call, functools.partial(backward, of_x=of_x)),
                **given,
                **more,
            ),
        )


# Of a model's size --------------------------------------------------------------------------------


def of_a_model(call):
    """A DiT-B/2's, and with RMSNorm a LightningDiT-B/2's."""
    shape = 64, 256, 768
    given = {"array": half, "measured": True}
    rms = next(norm for norm in NORMS if norm.rms and norm.weighted and norm.shifted)
    yield False, forward_problem(shape, **given)
    yield True, backward_problem(shape, **given)
    yield True, backward_problem(shape, of_x=True, note="of x", **given)
    for norm, note in ((rms, "RMSNorm"), (rms._replace(shifted=False), "RMSNorm, no shift")):
        for gated in (True, False):
            said = f"{note}{'' if gated else ', no gate'}"
            yield False, forward_problem(shape, norm, gated, note=said, **given)
            yield True, backward_problem(shape, norm, gated, note=said, **given)


def problems(call, backward):
    """[Problem] of a direction, whose operation is `call`."""
    return [
        problem
        for group in (each_kernel, of_columns, of_a_model)
        for is_backward, problem in group(call)
        if is_backward == backward
    ]
