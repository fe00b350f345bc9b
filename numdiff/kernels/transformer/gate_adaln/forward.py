"""Gate, residual and adaptive norm, forward in one pass: a warp a token, which it holds in registers between sweeps.

THREE SWEEPS over the token, of which only the first reads x and h: z and the sum for the mean; squares about the mean;
    y. A lane has eight channels of each 256: 16 bytes of float16 an instruction.
A KERNEL FOR EACH norm, for tokens of up to 256, 512 … 1280 channels, with and without a gate: the text branches on
    constants.
LAUNCH
    256 threads for eight tokens, no shared memory.
NEEDS
    C a multiple of 8, up to 1280; sm_80
READ NEXT
    backward.py
"""
import math
from typing import NamedTuple

import numpy as np

from ....device import cuda, float32, int32, uint32
from ....device.eight import as_stored, load8, store8
from ....device.requires import requires
from ....device.specialise import Constant, Variants
from ...common import warp_sum
from ...quantise import keep_largest, store_rounded8
from ..adaln import NORMS, RMS, SHIFTED, WEIGHTED

WARP = 32
BLOCK = 256  # threads
ROWS = BLOCK // WARP  # tokens of a block
SWEEP = 8 * WARP  # channels that a warp has at a time
MAX_SWEEPS = 5  # the backward's sums, 24 registers each, leave just enough for the rest
ZEROS, ONES = 8 * (np.float32(0),), 8 * (np.float32(1),)  # for the shift and the weight that a norm has not

SWEEPS = Constant()  # a warp's over its token: it has up to 256 · SWEEPS channels
GATED = Constant()  # whether there are h and gate; without, z is x
EIGHT = Constant()  # whether y, backward dh, is rounded to E4M3, for a layer in FP8 that alone reads it
KEPT = Constant(lambda SWEEPS: 8 * SWEEPS)  # numbers that a lane keeps
# Of the norms, those that models have run with as many sweeps as their tokens take, the others with the most.
KEYS = [(sweeps, gated, norm) for norm in NORMS for gated in (False, True)
        for sweeps in (range(1, MAX_SWEEPS + 1) if norm.rms == norm.weighted else (MAX_SWEEPS,))]
EIGHT_KEYS = [key for key in KEYS if key[1] and key[2].rms == key[2].weighted]


def key_of(C, gated, norm):
    """The key of the kernels for tokens of C channels."""
    return -(-C // SWEEP) if norm.rms == norm.weighted else MAX_SWEEPS, gated, norm


def kernel_of(text, name, sweeps, gated, norm, launch_bounds, eight=False):
    kernel = norm.kernel(text, f"{'gate_' * gated}{name}_{sweeps}{'_eight' * eight}", "RMS", "WEIGHTED", "SHIFTED",
                         SWEEPS=sweeps, GATED=gated, EIGHT=eight, launch_bounds=launch_bounds)
    return requires("9.0")(kernel) if eight else kernel


class Shape(NamedTuple):
    """`rows` tokens, T an image, of C channels."""

    rows: int
    T: int
    C: int


class ForwardPlaces(NamedTuple):
    """Where image 0's gate, shift and scale begin, and how far the next image's are."""

    gate: int
    gate_pitch: int
    shift: int
    scale: int
    pitch: int


# Four or eight channels, as tuples ------------------------------------------------------------------------------------

@cuda.jit(device=True, forceinline=True)
def normalised(x, average, r):
    return (x[0] - average) * r, (x[1] - average) * r, (x[2] - average) * r, (x[3] - average) * r


@cuda.jit(device=True, forceinline=True)
def gated(x, h, gate):
    """x + gate · h of eight channels."""
    return (x[0] + gate[0] * h[0], x[1] + gate[1] * h[1], x[2] + gate[2] * h[2], x[3] + gate[3] * h[3],
            x[4] + gate[4] * h[4], x[5] + gate[5] * h[5], x[6] + gate[6] * h[6], x[7] + gate[7] * h[7])


@cuda.jit(device=True, forceinline=True)
def stored(array, v):
    """Eight channels as `array` will hold them."""
    return (as_stored(array, v[0]), as_stored(array, v[1]), as_stored(array, v[2]), as_stored(array, v[3]),
            as_stored(array, v[4]), as_stored(array, v[5]), as_stored(array, v[6]), as_stored(array, v[7]))


@cuda.jit(device=True, forceinline=True)
def modulated(x, average, r, scale, weight, shift):
    one = float32(1)
    x0, x1, x2, x3 = normalised(x, average, r)
    return (x0 * (weight[0] * (one + scale[0])) + shift[0], x1 * (weight[1] * (one + scale[1])) + shift[1],
            x2 * (weight[2] * (one + scale[2])) + shift[2], x3 * (weight[3] * (one + scale[3])) + shift[3])


@cuda.jit(device=True, forceinline=True)
def squares(x, average):
    x0, x1, x2, x3 = x[0] - average, x[1] - average, x[2] - average, x[3] - average
    return (x0 * x0 + x1 * x1) + (x2 * x2 + x3 * x3)


# The kernel -----------------------------------------------------------------------------------------------------------

def adaln_forward_v2(x, h, gate, shift, scales, z, ys, mean, rstd, shape, places, eps):
    """z and y (B, T, C), mean and rstd (B · T,).

    scales: (scale,), or with a weight (scale, weight); ys: (y,), or (bytes, their scale, amax); shape: a `Shape`,
    places: `ForwardPlaces`
    """
    lane = int32(cuda.threadIdx.x % WARP)
    row = cuda.blockIdx.x * ROWS + cuda.threadIdx.x // WARP
    if row < shape.rows:  # the same for all lanes of a warp
        kept = cuda.local.array(KEPT, "float32")
        first, b = row * shape.C + lane * 8, row // shape.T
        at = b * places.gate_pitch + places.gate + lane * 8
        total = float32(0)
        for s in range(SWEEPS):
            c = int32(lane * 8 + s * SWEEP)
            if c < shape.C:
                v = load8(x, first + s * SWEEP)
                if GATED:
                    v = stored(z, gated(v, load8(h, first + s * SWEEP), load8(gate, at + s * SWEEP)))
                    store8(z, first + s * SWEEP, v)
                for i in range(8):
                    kept[8 * s + i] = v[i]
                total += ((v[0] + v[1]) + (v[2] + v[3])) + ((v[4] + v[5]) + (v[6] + v[7]))
        average = float32(0)
        if not RMS:
            average = warp_sum(total) / float32(shape.C)
        total = float32(0)
        for s in range(SWEEPS):
            if lane * 8 + s * SWEEP < shape.C:
                k = 8 * s
                total += squares((kept[k], kept[k + 1], kept[k + 2], kept[k + 3]), average)
                total += squares((kept[k + 4], kept[k + 5], kept[k + 6], kept[k + 7]), average)
        r = float32(1) / math.sqrt(warp_sum(total) / float32(shape.C) + eps)
        factor, most = float32(1), uint32(0)
        if EIGHT:
            factor = float32(1) / ys[1][0]
        at_shift, at_scale = b * places.pitch + places.shift + lane * 8, b * places.pitch + places.scale + lane * 8
        for s in range(SWEEPS):
            if lane * 8 + s * SWEEP < shape.C:
                k = 8 * s
                a, d, w = load8(scales[0], at_scale + s * SWEEP), ZEROS, ONES
                if SHIFTED:
                    d = load8(shift, at_shift + s * SWEEP)
                if WEIGHTED:
                    w = load8(scales[1], lane * 8 + s * SWEEP)
                low = modulated((kept[k], kept[k + 1], kept[k + 2], kept[k + 3]), average, r, a[:4], w[:4], d[:4])
                high = modulated((kept[k + 4], kept[k + 5], kept[k + 6], kept[k + 7]), average, r, a[4:], w[4:], d[4:])
                if EIGHT:
                    most = store_rounded8(ys[0], first + s * SWEEP, low + high, factor, most)
                else:
                    store8(ys[0], first + s * SWEEP, low + high)
        if lane == 0:
            if not RMS:
                mean[row] = average
            rstd[row] = r
        if EIGHT:
            keep_largest(ys[2], int32(cuda.blockIdx.x), most, lane)


FORWARD = Variants(KEYS, lambda key: kernel_of(adaln_forward_v2, "adaln_forward_kernel_v2", *key, BLOCK))
# with three blocks a multiprocessor asked for, or ptxas takes 64 registers where 66 are needed, and spills two
EIGHT_FORWARD = Variants(EIGHT_KEYS, lambda key: kernel_of(adaln_forward_v2, "adaln_forward_kernel_v2", *key,
                                                           (BLOCK, 3), eight=True))
