"""Convolutions of a result with another resolution, in one kernel, for inference: the checks and
the records.

MATHEMATICS
    upsampled    conv2d(upsample(x), weight) + bias: nearest neighbour ×2, then 3 × 3 taps
    halved       3 × 3 taps with stride 2 and zeros at the bottom and the right: Σ_tap x[2p + tap] · weight[tap]
SHAPES, VERSIONS, LAUNCH, DETERMINISM, COST
    hopper/resampled.py. There is no other version: where `resampled_supports` says no, the caller composes
    conv2d_forward with upsample_forward or window_forward.
SOURCE
    the padding of halved: Rombach et al. 2022, arXiv:2112.10752.
READ NEXT
    hopper/resampled.py, the kernels
"""

import functools

import numpy as np

from ...device import empty, is_device
from ...dtypes import HALVES, in_single
from ..groupnorm.normalise import channel_statistics_reference
from ..operation import Problem, Version, half, operation, replaced, single
from ..operation.versions import capped
from .direct import conv2d_forward_reference
from .hopper import resampled as hopper
from .hopper.convolution import hopper_supports, statistics_shape


def resampled_supports(x, weight, halved=False):
    """Whether `upsampled_conv2d_forward`, or `halved_conv2d_forward`, takes these operands."""
    if not is_device(x) or capped("conv2d", 6) < 6 or x.dtype != weight.dtype:
        return False
    even = x.shape[1] % 2 == x.shape[2] % 2 == x.shape[3] % 64 == 0
    result = 4 * x.size // x.shape[3] * weight.shape[0]
    small = max(x.size, result) < 2**31
    fits = small and weight.shape[1] == 3 and hopper_supports(x, weight, 1)
    return fits and (even or not halved)


def _shape(x, weight, halved):
    B, H, W, _ = x.shape
    return (B, H // 2, W // 2, len(weight)) if halved else (B, 2 * H, 2 * W, len(weight))


def resampled_statistics(x, weight, halved=False):
    """A new array for the statistics of the result (../groupnorm/normalise.py), or None if 8 × 8
    pixels, of each phase, do not tile it."""
    # every second row and column of an upsampled image
    shape = statistics_shape(_shape(x, weight, True) if halved else (*x.shape[:3], len(weight)))
    if shape is None:
        return None
    return empty((shape[0], shape[1] * (1 if halved else 4), *shape[2:]), np.float32, like=x)


@in_single()
def upsampled_conv2d_reference(x, weight, bias=None, statistics=None):
    y = conv2d_forward_reference(x.repeat(2, 1).repeat(2, 2), weight, bias)
    if statistics is not None:
        statistics[...] = np.concatenate(
            [channel_statistics_reference(y[:, a::2, b::2]) for a in (0, 1) for b in (0, 1)], 1
        )
    return y


@in_single()
def halved_conv2d_reference(x, weight, bias=None, statistics=None):
    H, W = x.shape[1:3]
    padded = np.pad(x, ((0, 0), (1, 2), (1, 2), (0, 0)))
    # a convolution of stride 1 pads again, and its result at (2p + 2) is what is looked for
    y = conv2d_forward_reference(padded, weight, bias)[:, 2 : H + 2 : 2, 2 : W + 2 : 2]
    if statistics is not None:
        statistics[...] = channel_statistics_reference(y)
    return np.ascontiguousarray(y)


def _check(x, weight, halved):
    if is_device(x) and not resampled_supports(x, weight, halved):
        raise ValueError(
            f"x {x.dtype}{tuple(x.shape)} and weight {weight.dtype}{tuple(weight.shape)} need Hopper's "
            "kernel, 16 bits, 3 × 3 taps"
            + (
                ", even sides and channels in 64s: use window_forward and conv2d_forward"
                if halved
                else " and channels in eights: use upsample_forward and conv2d_forward"
            )
        )


def upsampled_conv2d_cost(x, weight):
    """(bytes, FLOPs): four launches read x, and each its quarter of the folded weight."""
    B, H, W, C = x.shape
    N = len(weight)
    return 2 * (4 * x.size + 41 * N * C + 4 * B * H * W * N), 32 * B * H * W * C * N


def halved_conv2d_cost(x, weight):
    B, H, W, C = x.shape
    N = len(weight)
    return 2 * (x.size + 9 * N * C + B * H * W * N // 4), 18 * B * H * W * C * N // 4


def _problem(function, x, n, statistics, *tile, **more):
    given = {"statistics": single(*statistics)} if statistics else {}
    return Problem(
        f"float16, tile {tile}{', statistics' if statistics else ''}",
        x=half(*x),
        weight=half(n, 3, 3, x[3]),
        bias=single(n),
        within=functools.partial(
            replaced,
            hopper.__name__,
            **{function: functools.partial(getattr(hopper, function), only=tile)},
        ),
        **given,
        **more,
    )


UPSAMPLED, HALVED = "upsampled_forward", "halved_forward"
HOPPER = {"requires": "9.0a", "dtypes": tuple(HALVES), "ladder": "conv2d", "number": 6}


@operation(
    reference=upsampled_conv2d_reference,
    check=lambda x, weight: _check(x, weight, False),
    cost=upsampled_conv2d_cost,
    versions=[Version("hopper", measured=False, **HOPPER)],
    writes=("statistics",),
    problems=[
        _problem(UPSAMPLED, (1, 3, 5, 8), 8, None, 64, 1, bfloat16="exhaustive"),
        _problem(UPSAMPLED, (1, 8, 8, 8), 72, (1, 4, 2, 36), 64, 1, fast=False),
        _problem(UPSAMPLED, (2, 2, 2, 8), 8, None, 128, 2, fast=False),
        Problem(
            x=half(32, 64, 64, 512),
            weight=half(512, 3, 3, 512),
            bias=single(512),
            measured="not yet",
        ),
    ],
)
def upsampled_conv2d_forward(x, weight, bias=None, statistics=None, version=None):
    """A new array (B, 2H, 2W, N); statistics: of `resampled_statistics`, to be written."""
    y = empty(_shape(x, weight, False), x.dtype, like=x)
    return hopper.upsampled_forward(x, weight, bias, y, statistics)


@operation(
    reference=halved_conv2d_reference,
    check=lambda x, weight: _check(x, weight, True),
    cost=halved_conv2d_cost,
    versions=[Version("hopper", measured=False, **HOPPER)],
    writes=("statistics",),
    problems=[
        _problem(HALVED, (1, 4, 6, 64), 8, None, 64, 1, bfloat16="exhaustive"),
        _problem(HALVED, (1, 16, 16, 128), 8, (1, 1, 2, 4), 64, 1, fast=False),
        _problem(HALVED, (2, 2, 2, 64), 8, None, 128, 2, fast=False),
        Problem(
            x=half(32, 256, 256, 128),
            weight=half(128, 3, 3, 128),
            bias=single(128),
            measured="not yet",
        ),
    ],
)
def halved_conv2d_forward(x, weight, bias=None, statistics=None, version=None):
    """A new array (B, H / 2, W / 2, N); statistics: of `resampled_statistics`, to be written."""
    y = empty(_shape(x, weight, True), x.dtype, like=x)
    return hopper.halved_forward(x, weight, bias, y, statistics)
