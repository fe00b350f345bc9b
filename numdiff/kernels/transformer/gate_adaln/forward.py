"""Gate, residual and adaptive norm, forward in one pass: a warp a token, held in registers between
sweeps.

THREE SWEEPS over the token, of which only the first reads x and h: z and the sum for the mean;
    squares about the mean; y. A lane has eight channels of every 256: 16 bytes of float16 an
    instruction. z is kept as it is stored, in 16 bits two channels a register.
LOADS FIRST
    The compilers move no load past a store. So all of x, h and gate is loaded before anything is
    computed, and scale and shift before z is stored. Without a gate, where no z is stored, each
    sweep of y loads its own: 56 registers instead of 90 for 1152 channels in 16 bits, so that a
    multiprocessor has 32 tokens at once, and not 16.
A KERNEL FOR EACH norm, for tokens of up to 256, 512 … 1280 channels, with and without a gate: the
    source branches on constants. In 16 bits, tokens of 264 to 384 channels have half a warp each
    and three pieces of 128 channels, which leave no lane idle at 384, in 64 registers: 132
    multiprocessors run 8,448 tokens at once.
LAUNCH
    blocks of 256 threads for eight tokens, or 16; no shared memory.
NEEDS
    C a multiple of 8, up to 1280; sm_80
SOURCE
    reference.py; PTX ISA, section 9.7.9 (ld, st, shfl.sync).
READ NEXT
    backward.py
"""

import math
from typing import NamedTuple

from ....device import cuda, device_inline, float32, int32, uint32
from ....device.common import warp_sum
from ....device.eight import fetch8, load8_into, numbers8, store8_from, words8
from ....device.four import add4, dot4, multiply4
from ....device.requires import requires
from ....device.rounded8 import keep_largest, store_rounded8
from ....device.specialise import Constant, Variants
from ...norms.row_norm import NORMS, RMS, SHIFTED, WEIGHTED

WARP = 32
BLOCK = 256  # threads
SWEEP = 8 * WARP  # channels that a warp takes at a time
HALF = 1.5  # sweeps of 32 lanes, run as three of 16: 384 channels leave no lane idle
MAX_SWEEPS = 5  # the backward's sums, 24 registers each, leave just enough for the rest

LANES = Constant()  # that share a token: 32, or 16
SPAN = Constant(lambda LANES: 8 * LANES)  # channels that they take at a time
SWEEPS = Constant()  # of those lanes over their token: it has up to SPAN · SWEEPS channels
GATED = Constant()  # whether there are h and gate; without, z is x
# whether y, backward dh, is rounded to E4M3, for a layer in FP8 that alone reads it
EIGHT = Constant()
# The norms that models have run with as many sweeps as their tokens take, the others with the most.
KEYS = [
    (sweeps, gated, norm)
    for norm in NORMS
    for gated in (False, True)
    for sweeps in (range(1, MAX_SWEEPS + 1) if norm.rms == norm.weighted else (MAX_SWEEPS,))
]
EIGHT_KEYS = [key for key in KEYS if key[1] and key[2].rms == key[2].weighted]
HALF_KEYS = [(HALF, *key[1:]) for key in KEYS if key[0] == 2]  # of the forward


def key_of(C, gated, norm):
    """The key of the kernels for tokens of C channels."""
    return -(-C // SWEEP) if norm.rms == norm.weighted else MAX_SWEEPS, gated, norm


def forward_key_of(C, gated, norm, itemsize):
    """The key of the forward, for elements of `itemsize` bytes."""
    key = key_of(C, gated, norm)
    half = HALF, gated, norm
    return half if itemsize == 2 and SWEEP < C <= HALF * SWEEP and half in HALF_KEYS else key


def lanes_of(key):
    """Lanes that share a token, in the forward."""
    return WARP // 2 if key[0] == HALF else WARP


def kernel_of(text, name, sweeps, gated, norm, launch_bounds, eight=False, **constants):
    """constants: LANES, for the forward; with half a warp there are twice as many sweeps."""
    name = f"{norm.prefix}{'gate_' * gated}{name}_{str(sweeps).replace('.', '_')}{'_eight' * eight}"
    sweeps = int(2 * sweeps) if sweeps == HALF else sweeps
    kernel = norm.kernel(
        text,
        name,
        "RMS",
        "WEIGHTED",
        "SHIFTED",
        SWEEPS=sweeps,
        GATED=gated,
        EIGHT=eight,
        launch_bounds=launch_bounds,
        **constants,
    )
    return requires("8.9")(kernel) if eight else kernel


class RowForwardShape(NamedTuple):
    """`rows` tokens of C channels, T of them an image."""

    rows: int
    T: int
    C: int


class ForwardPlaces(NamedTuple):
    """The elements at which image 0's gate, shift and scale begin, and the distances to the next
    image's."""

    gate: int
    gate_pitch: int
    shift: int
    scale: int
    pitch: int


# Four or eight channels, as tuples ----------------------------------------------------------------


@device_inline
def normalised(x, average, r):
    return (x[0] - average) * r, (x[1] - average) * r, (x[2] - average) * r, (x[3] - average) * r


@device_inline
def gated(x, h, gate):
    """x + gate · h of eight channels."""
    return add4(x[:4], multiply4(gate[:4], h[:4])) + add4(x[4:], multiply4(gate[4:], h[4:]))


@device_inline
def squares(x, average):
    d = x[0] - average, x[1] - average, x[2] - average, x[3] - average
    return dot4(d, d)


# The kernel ---------------------------------------------------------------------------------------


@device_inline
def sum_of_lanes(value):
    """The sum over the LANES of a token, in each of them."""
    if LANES == WARP:
        return warp_sum(value)
    lanes = uint32(0xFFFF) << uint32(cuda.threadIdx.x & LANES)  # the others may have no token
    for step in (8, 4, 2, 1):
        value += cuda.shfl_xor_sync(lanes, value, step)
    return value


@device_inline
def fetch_token(words, array, first, c, C):
    """Load this lane's channels, c … c + 7, c + SPAN …, of a token; the first of them is
    array[first]."""
    for s in range(SWEEPS):
        if c + s * SPAN < C:
            fetch8(array, first + s * SPAN, words[s])


@device_inline
def factors(scales, c, words, f, g):
    """f: 1 + scale of eight channels, whose words have been fetched, times the weight of channels
    c … c + 7, for which g is free."""
    numbers8(scales[0], words, f)
    for i in range(8):
        f[i] = float32(1) + f[i]
    if WEIGHTED:
        load8_into(scales[1], c, g)
        for i in range(8):
            f[i] *= g[i]


def adaln_forward_v2(x, h, gate, shift, scales, z, ys, mean, rstd, shape, places, eps):
    """z and y (B, T, C), mean and rstd (B · T,) float32, from x and h (B, T, C).

    scales: (scale,), or with a weight (scale, weight); ys: (y,), or (bytes, their scale, amax);
    shape: a `RowForwardShape`;
    places: `ForwardPlaces`, of gate, shift and scale
    """
    c, C = int32(cuda.threadIdx.x % LANES * 8), shape.C
    row = cuda.blockIdx.x * (BLOCK // LANES) + cuda.threadIdx.x // LANES
    if row < shape.rows:  # the same for all lanes of a token
        kept = cuda.local.array((SWEEPS, 8), "uint32")
        a, b = cuda.local.array((SWEEPS, 8), "uint32"), cuda.local.array((SWEEPS, 8), "uint32")
        v, f, g = (
            cuda.local.array(8, "float32"),
            cuda.local.array(8, "float32"),
            cuda.local.array(8, "float32"),
        )
        first, image = row * C + c, row // shape.T
        fetch_token(kept, x, first, c, C)
        if GATED:
            fetch_token(a, h, first, c, C)
            fetch_token(b, gate, image * places.gate_pitch + places.gate + c, c, C)
        total = float32(0)
        for s in range(SWEEPS):
            if c + s * SPAN < C:
                numbers8(x, kept[s], v)
                if GATED:
                    numbers8(h, a[s], f)
                    numbers8(gate, b[s], g)
                    for i in range(8):
                        v[i] = v[i] + g[i] * f[i]
                    words8(z, v, kept[s])
                    numbers8(z, kept[s], v)
                total += ((v[0] + v[1]) + (v[2] + v[3])) + ((v[4] + v[5]) + (v[6] + v[7]))
        of_scale = image * places.pitch + places.scale + c
        of_shift = image * places.pitch + places.shift + c
        if GATED:
            fetch_token(a, scales[0], of_scale, c, C)
            if SHIFTED:
                fetch_token(b, shift, of_shift, c, C)
            for s in range(SWEEPS):
                if c + s * SPAN < C:
                    numbers8(z, kept[s], v)
                    store8_from(z, first + s * SPAN, v)
        average = float32(0)
        if not RMS:
            average = sum_of_lanes(total) / float32(C)
        total = float32(0)
        for s in range(SWEEPS):
            if c + s * SPAN < C:
                numbers8(z, kept[s], v)
                total += squares((v[0], v[1], v[2], v[3]), average) + squares(
                    (v[4], v[5], v[6], v[7]), average
                )
        r = float32(1) / math.sqrt(sum_of_lanes(total) / float32(C) + eps)
        factor, most = float32(1), uint32(0)
        if EIGHT:
            factor = float32(1) / ys[1][0]
        for s in range(SWEEPS):
            if c + s * SPAN < C:
                if not GATED:
                    fetch8(scales[0], of_scale + s * SPAN, a[s])
                    if SHIFTED:
                        fetch8(shift, of_shift + s * SPAN, b[s])
                numbers8(z, kept[s], v)
                factors(scales, c + s * SPAN, a[s], f, g)
                for i in range(8):
                    g[i] = float32(0)
                if SHIFTED:
                    numbers8(shift, b[s], g)
                for i in range(8):
                    v[i] = (v[i] - average) * r * f[i] + g[i]
                if EIGHT:
                    most = store_rounded8(
                        ys[0],
                        first + s * SPAN,
                        (v[0], v[1], v[2], v[3], v[4], v[5], v[6], v[7]),
                        factor,
                        most,
                    )
                else:
                    store8_from(ys[0], first + s * SPAN, v)
        if c == 0:
            if not RMS:
                mean[row] = average
            rstd[row] = r
        if EIGHT:
            keep_largest(ys[2], int32(cuda.blockIdx.x), most, int32(cuda.threadIdx.x % WARP))


def made(key, eight=False):
    """A key's kernel. Three blocks a multiprocessor to E4M3, or ptxas takes 64 of 66 registers, and
    spills two."""
    blocks = 3 if eight else 4 if key[0] == HALF else 1
    return kernel_of(
        adaln_forward_v2,
        "adaln_forward_kernel_v2",
        *key,
        (BLOCK, blocks),
        eight,
        LANES=lanes_of(key),
    )


FORWARD = Variants(KEYS + HALF_KEYS, made)
EIGHT_FORWARD = Variants(EIGHT_KEYS, lambda key: made(key, True))
