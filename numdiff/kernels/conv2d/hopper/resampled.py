"""Convolutions on Hopper's tensor cores whose result has another resolution: after nearest ×2
upsampling, and of stride 2.

MATHEMATICS
    upsampled   y[2p + a] = Σ_tap x[(2p + a + tap - 1) // 2] · weight[tap], in each direction: the taps of an even
                row (a = 0) see the rows p - 1, p, p of x, those of an odd one p, p, p + 1. So each of the four
                phases (a, b) is a convolution of x with 2 × 2 taps, sums of taps of weight:
                    a = 0: w[0], w[1] + w[2]        a = 1: w[0] + w[1], w[2]
    halved      y[p] = Σ_tap x[2p + tap] · weight[tap]: zeros are padded at the bottom and the right alone. Taps 0
                and 2 see x's even rows p and p + 1, tap 1 the odd row p.
WHAT IS NEW, AND WHY IT PAYS
    upsampled   4 · 4 products for a pixel of x instead of 4 · 9, and the upsampled image is neither written nor
                read. convolution.py's kernel, launched once for each phase: y of a phase is a tensor map that begins
                at its first pixel and has doubled strides.
    halved      the same kernel with another order of taps. x is a tensor map (B, H / 2, 2, W / 2, 2C): a box takes
                every second row and column, and the four boxes of 64 channels serve 4, 2, 2 and 1 taps.
SHAPES
    x (B, H, W, C) float16 or bfloat16, weight (N, 3, 3, C) like it, bias (N,) float32
    upsampled   y (B, 2H, 2W, N), folded (4N, 2, 2, C), C and N multiples of 8;
                statistics (B, 4 · H / 8 · W / 8, 2, N / 2) float32: of each phase's 8 × 8 pixels
    halved      y (B, H / 2, W / 2, N), H and W even, C a multiple of 64, N of 8;
                statistics (B, H / 16 · W / 16, 2, N / 2)
LAUNCH
    as convolution.py; the fold: a thread an element of `folded`
DETERMINISM
    one warpgroup sums an output, in the order of channels and taps.
ACCURACY
    sums of taps are made in float32, and rounded once.
COST
    upsampled   32 · B · H · W · C · N FLOPs; halved: 18 · B · H / 2 · W / 2 · C · N
SOURCE
    the project's own; the fold: Shi et al. 2016, "Is the deconvolution layer the same as a
    convolutional layer?", arXiv:1609.07009.
READ NEXT
    weight_gradient.py
"""

import itertools

import numpy as np

from ....device import cuda, empty, float32, launch
from ....device.common import divide
from ....device.half import in_bfloat16
from ....device.tensor_map import tensor_map
from .convolution import (
    ConvStatistics,
    conv2d_halved_kernels,
    conv2d_upsampled_kernels,
    launch_tiles,
    map_of_results,
    map_of_weight,
    maps_for,
    plan_for,
)
from .layout import BK, ConvMaps, ConvShape, PhaseShape

BLOCK = 256  # threads of the fold


def folded_reference(weight):
    """(4N, 2, 2, C): the taps of the phases (0, 0), (0, 1), (1, 0), (1, 1) of a weight (N, 3, 3, C)."""

    def rows(w, a, axis):
        first, middle, last = np.split(w, 3, axis)
        pair = (first, middle + last) if a == 0 else (first + middle, last)
        return np.concatenate(pair, axis)

    phases = itertools.product(range(2), repeat=2)
    return np.concatenate([rows(rows(weight, a, 1), b, 2) for a, b in phases])


@cuda.jit
def fold_kernel(weight, folded, N, C):
    """folded (4N, 2, 2, C) of weight (N, 3, 3, C), both flat."""
    i = cuda.grid(1)
    if i < folded.size:
        rest, c = divide(i, C)
        rest, column = divide(rest, 2)
        n, row = divide(rest, 2)
        phase, n = divide(n, N)
        a, b = divide(phase, 2)
        # the first tap of a sum, and how many
        top, left = row * (1 + a), column * (1 + b)
        rows, columns = 1 + (row ^ a), 1 + (column ^ b)
        total = float32(0)
        for r in range(top, top + rows):
            for s in range(left, left + columns):
                total += float32(weight[((n * 3 + r) * 3 + s) * C + c])
        folded[i] = total


def fold(weight):
    """`folded_reference` of a device's weight, as a new array like it."""
    N, _, _, C = weight.shape
    folded = empty((4 * N, 2, 2, C), weight.dtype, like=weight)
    launch(
        in_bfloat16(fold_kernel, weight.dtype),
        -(-folded.size // BLOCK),
        BLOCK,
        weight.reshape(-1),
        folded.reshape(-1),
        N,
        C,
    )
    return folded


def upsampled_forward(x, weight, bias, y, statistics=None, only=None):
    """y = conv2d(upsample(x), weight) + bias; only: a forced tile (BN, SUB), for tests."""
    (B, H, W, C), N = x.shape, y.shape[3]
    folded, flat, pixel = fold(weight), y.reshape(-1), N * y.dtype.itemsize
    view = {"dims": (N, W, H, B), "strides": (2 * pixel, 4 * W * pixel, 4 * W * H * pixel)}
    for phase, (a, b) in enumerate(itertools.product(range(2), repeat=2)):
        taps = folded[phase * N : (phase + 1) * N]
        plan = plan_for(x, y, 2, bias is not None, False, only=only)
        maps = maps_for(plan, x, taps, y, None, False)
        map_y = map_of_results(plan, flat[(a * 2 * W + b) * N :], **view)
        left = statistics and ConvStatistics(
            statistics, statistics.shape[1], phase * (H // 8) * (W // 8)
        )
        launch_tiles(
            conv2d_upsampled_kernels,
            plan,
            maps._replace(y=map_y, residual=map_y),
            x,
            PhaseShape(B, H, W, N, -(-C // BK), 2, 1 - a, 1 - b),
            bias,
            statistics=left,
        )
    return y


def halved_forward(x, weight, bias, y, statistics=None, only=None):
    """y = the convolution of stride 2 of x with weight + bias; only: a forced tile (BN, SUB), for
    tests."""
    (B, H, W, C), (h, w, N), pixel = x.shape, y.shape[1:], x.shape[3] * x.dtype.itemsize
    plan = plan_for(x, y, 3, bias is not None, False, only=only, strided=True)
    map_x = tensor_map(
        x,
        (BK, plan.width + 1, 1, plan.height + 1, plan.images),
        dims=(2 * C, w, 2, h, B),
        strides=(2 * pixel, W * pixel, 2 * W * pixel, H * W * pixel),
    )
    map_y = map_of_results(plan, y)
    launch_tiles(
        conv2d_halved_kernels,
        plan,
        ConvMaps(map_x, map_of_weight(plan, weight, False), map_y, map_y),
        x,
        ConvShape(B, h, w, N, C // BK, 3),
        bias,
        statistics=statistics and ConvStatistics(statistics, statistics.shape[1]),
    )
    return y
