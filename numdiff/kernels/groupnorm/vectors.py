"""Parts of GroupNorm's one-pass kernels, whose threads take eight neighbouring channels: 16 or 32
bytes of a pixel.

Loads, stores and copies of eight are in ../../device/eight.py.

SOURCE
    one_pass.py; PTX ISA, section 9.7.3 (ex2.approx.ftz.f32, rcp.approx.ftz.f32, tanh.approx.f32).
"""

import math
from typing import NamedTuple

from ...device import cuda, device_inline, float32, int32, int64
from ...device.approximate import power_of_two, reciprocal, tanh_approximate
from ...device.common import divide
from ...device.eight import fetch8, has_16_bits

WARP, WARP_BITS = 32, 5  # threads; t >> 5 is t // 32 without a division
VECTOR = 8  # channels of a thread
AT_ONCE = 4  # pixels that a thread loads together
AT_ONCE = 4  # pixels that a thread loads together
WORDS = 8  # that eight float32 take; float16 use the first four
# at most: 16 warps hide a multiprocessor's latencies where its shared memory is filled by one block
THREADS = 512
PARTS = 4  # groups of copies: the sums begin when the first group has arrived
LOG2_E = float32(math.log2(math.e))


# What kernels are given, and pass on --------------------------------------------------------------


class NormVectorShape(NamedTuple):
    """Of an array (B, P, C) that is read from two, of which the first has `seam` channels. width:
    channels a group"""

    P: int
    C: int
    seam: int
    width: int


class NormVectorWalk(NamedTuple):
    """How a thread walks over its pixels, P in all: in x from element `first` on, `step` elements
    at a time; in shared memory from element `own` on, `turn` at a time."""

    P: int
    first: int
    step: int
    own: int
    turn: int


class BackwardWalk(NamedTuple):
    """As `NormVectorWalk`, over dy, too, which is `half` elements after x in shared memory."""

    P: int
    first: int
    step: int
    first_dy: int
    step_dy: int
    own: int
    turn: int
    half: int


class NormVectorArrays(NamedTuple):
    """In global memory; x, residual and dx: the one of the two arrays that has the thread's
    channels."""

    x: object
    dy: object
    residual: object
    dx: object


class Affine(NamedTuple):
    """A thread's eight channels: z = (x - mean) · scale + shift."""

    means: object
    scales: object
    shifts: object


# Device functions ---------------------------------------------------------------------------------


@device_inline
def sigmoid(z):
    return reciprocal(float32(1) + power_of_two(-LOG2_E * z))


@device_inline
def silu8(like, z):
    """z becomes SiLU(z), which will be stored in an array like this one: for 16 bits by tanh, see
    `through_silu8`."""
    if has_16_bits(like):
        for k in range(VECTOR):
            h = float32(0.5) * z[k]
            z[k] = h * tanh_approximate(h) + h
    else:
        for k in range(VECTOR):
            z[k] *= sigmoid(z[k])


@device_inline
def clear(values):
    for k in range(VECTOR):
        values[k] = float32(0)


@device_inline
def locate(c, pixel, b, P, C, seam, rows):
    """Channel c of a pixel of sample b in two arrays that are read as one, of which the first has
    `seam` of C channels: (negative if it is in the first one, for `one_of`; its element there; how
    far from it the pixel `rows` later is)."""
    beyond = int32(c - seam)
    channels, channel = (int32(seam), c) if beyond < 0 else (int32(C - seam), beyond)
    return (
        beyond,
        int64(b) * int32(P * channels) + int32(pixel * channels + channel),
        int32(rows * channels),
    )


@device_inline
def fetch_pixels(array, p, end, rows, i, step, words):
    """Load a thread's next pixels, p, p + rows …, below `end`, all at once, so that ptxas waits
    once for all.

    array[i]: the first channel of pixel p; words: (AT_ONCE, WORDS), as `fetch8` brings them
    """
    for k in range(AT_ONCE):
        if p < end:
            fetch8(array, i, words[k])
        p, i = int32(p + rows), i + step


@device_inline
def find_groups(first, width, groups):
    """groups[k]: the group of channel first + k."""
    group, before = divide(first, width)
    left = int32(width - before)  # channels of this group from here on
    for k in range(VECTOR):
        groups[k] = group
        left -= int32(1)
        if left == 0:
            group, left = int32(group + 1), int32(width)


@device_inline
def lanes_sum(total, lanes):
    """The sum over `lanes` neighbouring lanes, a power of two, in all of them."""
    step = int32(lanes >> 1)
    while step > 0:
        total += cuda.shfl_xor_sync(0xFFFFFFFF, total, step)
        step >>= int32(1)
    return total


@device_inline
def accumulate(value, d, total_gx, total_g):
    for k in range(VECTOR):
        total_gx[k] += d[k] * value[k]
        total_g[k] += d[k]


@device_inline
def through_silu8(like, x, d, scales, shifts, activate):
    """d becomes the gradient of z = x · scale + shift. All eight take each step together: none
    waits for the others.

    like: an array of d's type. For 16 bits 1 / (1 + e⁻ᶻ) is tanh(z / 2) / 2 + 1 / 2: one special
    function instead of two, with an error of 2⁻¹² at most.
    """
    if activate:
        z, s = cuda.local.array(VECTOR, float32), cuda.local.array(VECTOR, float32)
        for k in range(VECTOR):
            z[k] = x[k] * scales[k] + shifts[k]
        if has_16_bits(like):
            for k in range(VECTOR):
                s[k] = tanh_approximate(float32(0.5) * z[k])
            for k in range(VECTOR):
                s[k] = float32(0.5) * s[k] + float32(0.5)
        else:
            for k in range(VECTOR):
                s[k] = sigmoid(z[k])
        for k in range(VECTOR):
            z[k] -= z[k] * s[k]
        for k in range(VECTOR):
            d[k] *= s[k] * z[k] + s[k]


@device_inline
def gradient8(like, x, d, means, scales, bias, activate):
    """x -= mean; d becomes the gradient of z = x · scale + bias; like: as `through_silu8`."""
    for k in range(VECTOR):
        x[k] -= means[k]
    through_silu8(like, x, d, scales, bias, activate)
