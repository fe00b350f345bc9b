"""Problems of GroupNorm, both directions: small ones for each kernel, and a UNet's.

Version 3 chooses a plan for a shape: what is kept in shared memory, in registers, and by how many
blocks of a cluster. Small shapes get few of the plans, so some problems are solved within a plan
that is given.

SHAPES
    as in reference.py
SOURCE
    plain bookkeeping; operation/problem.py says what a problem is.
READ NEXT
    launcher.py, whose records have them.
"""

import contextlib
import functools
import math
import sys

import numpy as np

from ..concat import Pair
from ..operation import Problem, half, positive, single
from .normalise import channel_statistics_reference
from .plan import make_plan, make_plan_half
from .reference import groupnorm_forward_reference

HOPPER = 132  # multiprocessors
ONE_PASS = {"versions": ("one-pass",)}
UP_TO_ONE_PASS = {"versions": ("block-per-group", "chunked", "one-pass")}


@contextlib.contextmanager
def planned(make):
    """Context: version 3 has the plan that `make` returns."""
    launcher = sys.modules[f"{__package__}.launcher"]
    before, launcher.plan_for = launcher.plan_for, lambda *_: make()
    try:
        yield
    finally:
        launcher.plan_for = before


def forward_problem(label, shape, groups, silu=True, array=half, **more):
    C = shape[-1]
    return Problem(
        label, x=array(*shape), weight=single(C), bias=single(C), groups=groups, silu=silu, **more
    )


def backward_problem(label, shape, groups, silu=True, array=half, residuals=1, **more):
    """residuals: 0 to 2 gradients from other branches."""
    C, pixels = shape[-1], array(*shape)
    statistic = shape[0], groups
    return Problem(
        label,
        dy=pixels,
        x=pixels,
        weight=single(C),
        bias=single(C),
        mean=single(*statistic),
        rstd=positive(*statistic),
        dweight=single(C),
        dbias=single(C),
        groups=groups,
        silu=silu,
        residual=(None, pixels, (pixels, pixels))[residuals],
        derived=functools.partial(statistics_of, groups),
        **more,
    )


def statistics_of(groups, arrays):
    """mean and rstd of a problem's x, or of the two arrays of a `Pair`."""
    x = np.concatenate((arrays["x.0"], arrays["x.1"]), axis=-1) if "x.0" in arrays else arrays["x"]
    _, mean, rstd = groupnorm_forward_reference(
        x.astype(np.float32), arrays["weight"], arrays["bias"], groups
    )
    return {"mean": mean, "rstd": rstd}


def each_version():
    """Yields (whether it is of the backward, its `Problem`), as the functions below do."""
    for silu in (False, True):
        label = "silu" if silu else "plain"
        yield False, forward_problem(label, (1, 3, 3, 16), 4, silu, single, **UP_TO_ONE_PASS)
        yield (
            True,
            backward_problem(
                label, (2, 3, 3, 16), 4, silu, single, residuals=int(silu), **UP_TO_ONE_PASS
            ),
        )


def of_odd_shapes():
    """One group of all channels, groups of one channel, and channels that no vector divides."""
    ladder = UP_TO_ONE_PASS["versions"]
    for label, shape, groups, versions in (
        ("one group", (3, 4, 4, 20), 1, ladder[:2]),
        ("groups of one", (2, 9, 8), 8, ladder),
        ("fives", (2, 7, 5, 30), 5, ladder[:1]),
        ("two rows of blocks", (1, 70, 128), 2, ladder[1:2]),
    ):
        more = {"array": single, "versions": versions}
        yield False, forward_problem(label, shape, groups, True, **more)
        yield True, backward_problem(label, shape, groups, False, residuals=0, **more)


def each_tile():
    """Version 3 with tiles that only large shapes have."""
    for label, shape, groups, tile, threads in (
        ("tiles", (3, 9, 16), 4, 8, 32),
        ("odd lanes", (1, 35, 24), 8, 24, 96),
        ("few rows", (1, 9, 64), 16, 64, 32),
        ("threads share a channel", (1, 49, 16), 1, 16, 64),
        ("more iterations than parts", (1, 150, 8), 2, 8, 32),
    ):
        for backward, make in ((False, forward_problem), (True, backward_problem)):
            for array, nbytes in ((half, 2), (single, 4)):
                B, P, C = shape
                plan = functools.partial(
                    make_plan,
                    B,
                    P,
                    C,
                    C // groups,
                    nbytes,
                    backward,
                    tile,
                    threads,
                    1 << 17,
                    HOPPER,
                )
                yield (
                    backward,
                    make(
                        f"{'float16, ' * (array is half)}{label}",
                        shape,
                        groups,
                        array=array,
                        fast=array is half,
                        within=functools.partial(planned, plan),
                        **ONE_PASS,
                    ),
                )


def of_little_shared_memory():
    """Version 3 has to read again what does not fit."""
    for backward, make in ((False, forward_problem), (True, backward_problem)):
        plan = functools.partial(
            make_plan, 1, 70, 8, 4, 2, backward, 8, 32, 3900 if backward else 2000, HOPPER
        )
        yield (
            backward,
            make(
                "float16, reads again",
                (1, 70, 8),
                2,
                bfloat16=True,
                within=functools.partial(planned, plan),
                **ONE_PASS,
            ),
        )


def half_plan(shape, groups, backward, part, team, cluster, near):
    """Of version 3 by parts of 16 or 32 channels: `near` iterations' pixels in registers, `cluster`
    blocks."""
    B, P, C = shape
    sizes, limit = (B, P, C, C // groups, backward, part, team), 1 << 17
    if near:
        plan = make_plan_half(*sizes, limit, HOPPER, cluster)
        limit = plan.shared - near * 4 * plan.rows * plan.tile
    plan = make_plan_half(*sizes, limit, HOPPER, cluster)
    assert plan.near == near
    return plan


def in_half(
    backward,
    shape,
    groups,
    part,
    team,
    silu,
    cluster=1,
    near=0,
    residuals=None,
    note="",
    fast=True,
):
    """A problem of version 3 in 16 bits within such a plan."""
    count = math.lcm(shape[2] // groups, part) // part
    label = (
        f"float16, {count} times {'sixteen' if part == 16 else 'thirty-two'} channels"
        f"{f', {cluster} blocks a cluster' * (cluster > 1)}{f', {near} turns in registers' * (near > 0)}"
        f"{', two residuals' * (residuals == 2)}{note}"
    )
    plan = functools.partial(half_plan, shape, groups, backward, part, team, cluster, near)
    more = {
        "within": functools.partial(planned, plan),
        "bfloat16": label == "float16, 1 times sixteen channels",
        "fast": fast and not (backward and cluster == 4),
        **ONE_PASS,
    }
    if not backward:
        return False, forward_problem(label, shape, groups, silu, **more)
    return True, backward_problem(
        label, shape, groups, silu, residuals=int(silu) if residuals is None else residuals, **more
    )


def each_plan():
    for backward in (False, True):
        yield in_half(backward, (2, 37, 32), 8, 16, 2, True)
        yield in_half(backward, (2, 20, 96), 16, 16, 1, True)
        yield in_half(backward, (2, 19, 32), 8, 32, 2, True)
        yield in_half(backward, (2, 10, 96), 16, 32, 1, False)
        yield in_half(backward, (1, 40, 48), 8, 16, 1, True, cluster=4)
        yield in_half(backward, (2, 36, 64), 8, 32, 2, True, cluster=2)
    yield in_half(True, (2, 96, 16), 4, 16, 1, True, near=2)
    yield in_half(True, (2, 48, 16), 4, 16, 1, False, near=1)
    yield in_half(True, (1, 48, 32), 4, 32, 2, True, near=1)
    yield in_half(True, (1, 112, 16), 2, 16, 1, True, near=2, residuals=2)
    yield in_half(True, (1, 24, 32), 2, 32, 1, True, residuals=2)
    yield in_half(True, (1, 24, 32), 2, 32, 1, True, cluster=2, residuals=2)
    yield in_half(True, (1, 32, 16), 2, 16, 1, True, cluster=2, residuals=2)
    for backward in (False, True):
        yield in_half(backward, (1, 41, 32), 1, 32, 3, True, note=", one group")
        yield in_half(backward, (17, 5, 16), 2, 16, 1, True, note=", many images", fast=False)
        yield in_half(backward, (1, 180, 16), 1, 16, 2, True, note=", many iterations", fast=False)
        yield in_half(backward, (1, 40, 96), 16, 32, 1, True, cluster=8, fast=False)
    yield in_half(True, (1, 256, 16), 4, 16, 1, True, cluster=8, near=1, fast=False)
    yield in_half(True, (1, 96, 32), 4, 32, 2, True, cluster=2, near=1)


def of_two_arrays():
    """x is a `Pair`: a kernel reads both, or, with 12 channels in the first, a copy joins them."""
    for label, array, shape, groups, more in (
        ("float16, two arrays", half, (2, 9, 16, 8), 2, ONE_PASS),
        ("float16, two arrays, between groups", half, (2, 9, 8, 8), 4, {"versions": ()}),
        ("two arrays", single, (2, 9, 16, 8), 2, {"versions": ()}),
        ("float16, two arrays, joined first", half, (1, 6, 12, 4), 2, {"versions": ()}),
    ):
        B, P, first, second = shape
        pair, vector = Pair(array(B, P, first), array(B, P, second)), single(first + second)
        given = {"weight": vector, "bias": vector, "groups": groups, "silu": True, **more}
        yield False, Problem(label, x=pair, **given)
        yield (
            True,
            Problem(
                label,
                dy=array(B, P, first + second),
                x=pair,
                mean=single(B, groups),
                rstd=positive(B, groups),
                dweight=vector,
                dbias=vector,
                residual=pair,
                derived=functools.partial(statistics_of, groups),
                **given,
            ),
        )


def of_known_statistics():
    """Of one array, small and so large that chunks are joined; of two, the first an image of which
    each pixel was taken four times."""

    def images(rng, *shapes):
        """Images, and their statistics."""
        images = [rng.standard_normal(shape).astype(np.float16) for shape in shapes]
        return images, [channel_statistics_reference(a.astype(np.float32)) for a in images]

    def one(shape, rng):
        (image,), (known,) = images(rng, shape)
        return {"x": image, "statistics": known}

    def two(rng):
        (image, x_2), (known, known_2) = images(rng, (2, 8, 8, 16), (2, 16, 16, 8))
        return {
            "x.0": image.repeat(2, axis=1).repeat(2, axis=2),
            "x.1": x_2,
            "statistics.0": known,
            "statistics.1": known_2,
        }

    def known(*shape):
        return single(*channel_statistics_reference(np.zeros(shape, np.float32)).shape)

    more = {"groups": 4, "versions": ("known-statistics",)}
    for label, shape in (("", (2, 8, 8, 16)), (", 80 chunks", (1, 8, 640, 8))):
        yield (
            False,
            Problem(
                f"known statistics, float16{label}",
                x=half(*shape),
                weight=single(shape[3]),
                bias=single(shape[3]),
                statistics=known(*shape),
                inputs=functools.partial(one, shape),
                bfloat16=not label,
                **more,
            ),
        )
    yield (
        False,
        Problem(
            "known statistics, float16, two arrays",
            x=Pair(half(2, 16, 16, 16), half(2, 16, 16, 8)),
            weight=single(24),
            bias=single(24),
            silu=True,
            statistics=(known(2, 8, 8, 16), known(2, 16, 16, 8)),
            inputs=two,
            bfloat16=True,
            **more,
        ),
    )


def of_a_model():
    """The UNet's largest image."""
    shape, measured = (32, 64, 64, 64), {"measured": True}
    later = {"versions": ("chunked", "one-pass")}
    yield False, forward_problem(None, shape, 32, **UP_TO_ONE_PASS, **measured)
    yield False, forward_problem(None, shape, 32, array=single, **later, **measured)
    yield (
        False,
        forward_problem(
            None,
            shape,
            32,
            statistics=single(32, 64 * 64 // 64, 2, 64 // 2),
            note="statistics known",
            versions=("known-statistics",),
            **measured,
        ),
    )
    yield True, backward_problem(None, shape, 32, residuals=0, **UP_TO_ONE_PASS, **measured)
    yield True, backward_problem(None, shape, 32, array=single, residuals=0, **later, **measured)


def problems(backward):
    """[Problem] of a direction."""
    groups = (
        each_version,
        of_odd_shapes,
        each_tile,
        of_little_shared_memory,
        each_plan,
        of_two_arrays,
        of_known_statistics,
        of_a_model,
    )
    return [
        problem for group in groups for is_backward, problem in group() if is_backward == backward
    ]
