"""Gate, residual and adaptive norm, backward in one pass: a block has a chunk of an image's tokens
with all channels.

WHAT A WARP DOES
    It takes every n-th token of the chunk, of n warps. Its next two tokens are copied to shared
    memory while it works on one. Two sweeps over a token: the averages of f and f · xhat; then dx
    and dh. If it is given x instead of z, the first sweep makes z of that, in its place; h and gate
    are read anyway.
    The sums over tokens stay in registers until the end, 24 of them for each 256 channels, without
    a shift 16. Then the block adds its warps', and leaves one row of each sum for ../columns.py, or
    for reduce/trees.py, to add up.
SHARED MEMORY
    1 + scale and gate in float32, then for each warp its two tokens, each dy, z, dz and h. A lane
    reads only what it has copied itself, so that no barrier stands between the copies and their
    use.
LAUNCH
    grid (chunks, B), up to 384 threads, without a shift 512; 150 KiB of dynamic shared memory at
    768 channels of float16 and 384 threads. `choose_plan` picks chunks and warps.
DETERMINISM
    a warp adds its tokens in order, a block its warps in order.
SOURCE
    PTX ISA, section 9.7.9.25.3 (cp.async).
READ NEXT
    launcher.py
"""

import functools
from typing import NamedTuple

from ....device import cuda, device_inline, float32, int32, load4, store4, uint32
from ....device.async_copy import cp_async_commit, cp_async_wait
from ....device.common import warp_sum
from ....device.eight import copy8, load8, store8
from ....device.four import dot4, multiply4, shift4, sum4
from ....device.limits import HOPPER_SHARED, MULTIPROCESSORS
from ....device.requires import requires
from ....device.rounded8 import keep_largest, store_rounded8
from ....device.specialise import Constant, Variants
from ...norms.row_norm import RMS, SHIFTED, WEIGHTED, average_of
from .forward import (
    EIGHT,
    EIGHT_KEYS,
    GATED,
    KEYS,
    SWEEP,
    SWEEPS,
    WARP,
    gated,
    kernel_of,
    normalised,
)

STAGES = 2  # tokens of a warp in shared memory: the one that it works on, and the next
MAX_CHUNKS = 16  # of an image
OVERHEAD = 2  # tokens' worth of time that a block takes to begin and to end


def threads_of(sweeps, shifted=True):
    """At most, in the backward: as many as leave a thread the registers for its sums, fewer where
    there is no shift."""
    if not shifted and sweeps <= 3:
        return 512
    return 384 if sweeps <= 4 else 256


SCALE = Constant(lambda SWEEPS, SHIFTED: 8 * SWEEPS if SHIFTED else 0)  # where, in `totals`
GATE = Constant(lambda SWEEPS, SCALE: 8 * SWEEPS + SCALE)
TOTALS = Constant(lambda SWEEPS, GATED, GATE: 8 * SWEEPS + GATE if GATED else GATE)
ARRAYS = Constant(lambda GATED: 4 if GATED else 3)  # of a token in shared memory


class Chunks(NamedTuple):
    """T tokens an image, of C channels; chunk: tokens of a block; ring: element at which tokens
    start in shared memory; has_dz: whether z itself has a gradient; of_x: whether x is given
    instead of z."""

    T: int
    C: int
    chunk: int
    ring: int
    has_dz: int
    of_x: int


class Factors(NamedTuple):
    """The start of image 0's scale and gate, and the strides to the next image's."""

    scale: int
    scale_pitch: int
    gate: int
    gate_pitch: int


class RowBackwardPlaces(NamedTuple):
    """The starts of dshift, dscale and dgate in the arrays of sums, and the lengths of their rows."""

    shift: int
    shift_row: int
    scale: int
    scale_row: int
    gate: int
    gate_row: int


# The producer: copies to shared memory ------------------------------------------------------------


@device_inline
def start_token(kept, at, source, i, c, C):
    """Start copies of this lane's channels, c, c + 256 …, of a token that starts at source[i], to
    kept[at …]."""
    while c < C:
        copy8(kept, at, source, i + c)
        at, c = int32(at + SWEEP), int32(c + SWEEP)


@device_inline
def start_copies(kept, at, arrays, i, c, cut):
    """The producer: start copies of this lane's channels of a token of dy, z, dz and h, one group."""
    dy, z, dz, h = arrays
    start_token(kept, at, dy, i, c, cut.C)
    start_token(kept, at + cut.C, z, i, c, cut.C)
    if cut.has_dz:
        start_token(kept, at + 2 * cut.C, dz, i, c, cut.C)
    if GATED:
        start_token(kept, at + 3 * cut.C, h, i, c, cut.C)


# 1 + scale and gate in shared memory --------------------------------------------------------------


@device_inline
def place_of(c):
    """The place of four channels from c on: of each sweep the lanes' first four, then their other
    four."""
    return c // SWEEP * SWEEP + c % 8 * WARP + c % SWEEP // 8 * 4


@device_inline
def fill_factors(floats, first, vector, start, C, one, t, threads):
    """floats[first …] = one + the channels of a vector, in an order in which 8 lanes that read 16
    bytes each, as one access of shared memory, find them in 32 different banks."""
    c = int32(4 * t)
    while c < C:
        at = int32(first + place_of(c))
        store4(floats, at, *shift4(one, load4(vector, start + c)))
        c = int32(c + 4 * threads)


@device_inline
def fill_weighted(floats, scales, start, C, t, threads):
    """floats = weight · (1 + scale), in the same order."""
    c, one = int32(4 * t), float32(1)
    while c < C:
        a0, a1, a2, a3 = load4(scales[0], start + c)
        w0, w1, w2, w3 = load4(scales[1], c)
        store4(
            floats,
            int32(place_of(c)),
            w0 * (one + a0),
            w1 * (one + a1),
            w2 * (one + a2),
            w3 * (one + a3),
        )
        c = int32(c + 4 * threads)


@device_inline
def factors_of(floats, first, lane):
    """What a lane has there for its eight channels."""
    return load4(floats, first + lane * 4), load4(floats, first + SWEEP // 2 + lane * 4)


# Two sweeps over a token --------------------------------------------------------------------------
# `totals` holds the lane's sums over tokens: dshift's, then dscale's, then dgate's; tuples have
# four channels.


@device_inline
def look_at_four(totals, shift, scale, dy, x, factor):
    """Adds to Σ dy and Σ dy · xhat; what four channels bring to Σ f and Σ f · xhat."""
    for i in range(4):
        if SHIFTED:
            totals[shift + i] += dy[i]
        totals[scale + i] += dy[i] * x[i]
    f = multiply4(dy, factor)
    return sum4(f), dot4(f, x)


@device_inline
def norm_gradient(dy, x, factor, dz, r, a, k):
    """g of four channels, from the averages a of f and k of f · xhat."""
    return (
        dz[0] + r * (dy[0] * factor[0] - a - x[0] * k),
        dz[1] + r * (dy[1] * factor[1] - a - x[1] * k),
        dz[2] + r * (dy[2] * factor[2] - a - x[2] * k),
        dz[3] + r * (dy[3] * factor[3] - a - x[3] * k),
    )


@device_inline
def gate_gradient(totals, first, g, h, gate):
    """dh of four channels; adds to dgate."""
    for i in range(4):
        totals[first + i] += g[i] * h[i]
    return multiply4(g, gate)


@device_inline
def gate_token(floats, kept, at, s, lane, C):
    """z = x + gate · h of a sweep's eight channels, as the forward stored it, in the place of x."""
    low, high = factors_of(floats, (SWEEPS + s) * SWEEP, lane)
    store8(kept, at + C, gated(load8(kept, at + C), load8(kept, at + 3 * C), low + high))


@device_inline
def look_at_token(totals, floats, kept, at, c, lane, average, r, cut):
    """The first sweep over a token: adds to the sums of dshift and dscale; the averages of f and of
    f · xhat."""
    C = cut.C
    sum_f = sum_fx = float32(0)
    for s in range(SWEEPS):
        if c + s * SWEEP < C:
            here = int32(at + s * SWEEP)
            if GATED:
                if cut.of_x:
                    gate_token(floats, kept, here, s, lane, C)
            d, x = load8(kept, here), load8(kept, here + C)
            low, high = factors_of(floats, s * SWEEP, lane)
            f, fx = look_at_four(
                totals, 8 * s, SCALE + 8 * s, d[:4], normalised(x[:4], average, r), low
            )
            sum_f += f
            sum_fx += fx
            f, fx = look_at_four(
                totals, 8 * s + 4, SCALE + 8 * s + 4, d[4:], normalised(x[4:], average, r), high
            )
            sum_f += f
            sum_fx += fx
    a = float32(0)
    if not RMS:
        a = warp_sum(sum_f) / float32(C)
    return a, warp_sum(sum_fx) / float32(C)


@device_inline
def write_token(dx, dhs, i, totals, floats, kept, place, norm, averages, cut, factor, most):
    """The second sweep: dx and dh of a token, which starts at dx[i] for this lane; adds to the sums
    of dgate. The next `most`."""
    (average, r), (a, k), (at, c, lane) = norm, averages, place
    for s in range(SWEEPS):
        if c + s * SWEEP < cut.C:
            here = int32(at + s * SWEEP)
            d, x = load8(kept, here), load8(kept, here + cut.C)
            low, high = factors_of(floats, s * SWEEP, lane)
            zero = float32(0)
            before = (zero, zero, zero, zero, zero, zero, zero, zero)
            if cut.has_dz:
                before = load8(kept, here + 2 * cut.C)
            g0 = norm_gradient(d[:4], normalised(x[:4], average, r), low, before[:4], r, a, k)
            g1 = norm_gradient(d[4:], normalised(x[4:], average, r), high, before[4:], r, a, k)
            store8(dx, i + s * SWEEP, g0 + g1)
            if GATED:
                branch = load8(kept, here + 3 * cut.C)
                low, high = factors_of(floats, (SWEEPS + s) * SWEEP, lane)
                back = gate_gradient(totals, GATE + 8 * s, g0, branch[:4], low) + gate_gradient(
                    totals, GATE + 8 * s + 4, g1, branch[4:], high
                )
                if EIGHT:
                    most = store_rounded8(dhs[0], i + s * SWEEP, back, factor, most)
                else:
                    store8(dhs[0], i + s * SWEEP, back)
    return most


# The block's sums ---------------------------------------------------------------------------------


@device_inline
def bring(floats, at, totals, first):
    store4(floats, at, totals[first], totals[first + 1], totals[first + 2], totals[first + 3])
    store4(
        floats, at + 4, totals[first + 4], totals[first + 5], totals[first + 6], totals[first + 7]
    )


@device_inline
def sum_of_warps(floats, c, C, warps):
    """The sums of four channels of the warps' rows in shared memory, in order."""
    s0, s1, s2, s3 = load4(floats, c)
    at = int32(c + C)
    for _ in range(1, warps):
        x0, x1, x2, x3 = load4(floats, at)
        s0, s1, s2, s3 = s0 + x0, s1 + x1, s2 + x2, s3 + x3
        at = int32(at + C)
    return s0, s1, s2, s3


@device_inline
def add_warps(floats, out, start, C, warps, t, threads):
    """out[start …] = the sums of the warps' rows."""
    c = int32(4 * t)
    while c < C:
        store4(out, start + c, *sum_of_warps(floats, c, C, warps))
        c = int32(c + 4 * threads)


@device_inline
def add_warps_weighted(floats, dscales, places, scales, k, C, warps, t, threads):
    """From S, the sums of the warps' rows: dscale's, weight · S, and dweight's, (1 + scale) · S;
    scale from k on."""
    c, one = int32(4 * t), float32(1)
    while c < C:
        s0, s1, s2, s3 = sum_of_warps(floats, c, C, warps)
        a0, a1, a2, a3 = load4(scales[0], k + c)
        w0, w1, w2, w3 = load4(scales[1], c)
        store4(dscales[0], places[0] + c, w0 * s0, w1 * s1, w2 * s2, w3 * s3)
        store4(
            dscales[1],
            places[1] + c,
            (one + a0) * s0,
            (one + a1) * s1,
            (one + a2) * s2,
            (one + a3) * s3,
        )
        c = int32(c + 4 * threads)


@device_inline
def write_sums(out, start, floats, place, totals, first, c, C, warps):
    """out[start …] = the block's sums, of which each lane has 8 · SWEEPS from totals[first] on. All
    threads call it."""
    bring_sums(floats, place, totals, first, c, C)
    add_warps(floats, out, start, C, warps, int32(cuda.threadIdx.x), int32(cuda.blockDim.x))


@device_inline
def bring_sums(floats, place, totals, first, c, C):
    """Each warp's sums to its row in shared memory."""
    cuda.syncthreads()  # the previous contents are no longer read
    for s in range(SWEEPS):
        if c + s * SWEEP < C:
            bring(floats, place + s * SWEEP, totals, first + 8 * s)
    cuda.syncthreads()


# The kernel ---------------------------------------------------------------------------------------


@requires("7.5")
def adaln_backward_v2(arrays, scales, gate, mean, rstd, dx, dhs, sums, cut, factors, places):
    """dx and dh (B, T, C), and a block's sums for dshift, dscale and dgate, three arrays, where
    `places` says.

    arrays: dy, z, dz and h; z: or x, where cut.of_x
    scales: (scale,), or with a weight (scale, weight), and then `sums` has a fourth array (B ·
    chunks, C), for dweight;
    dhs: (dh,), or (bytes, their scale, amax); cut: `Chunks`; factors: `Factors`
    """
    floats = cuda.shared.array(0, float32, alignment=128)
    kept = cuda.shared.array(0, arrays[1].dtype.type, alignment=128)
    T, C = cut.T, cut.C
    t, threads = int32(cuda.threadIdx.x), int32(cuda.blockDim.x)
    lane, warp, warps = int32(t % WARP), int32(t // WARP), int32(threads // WARP)
    c = int32(lane * 8)
    b = cuda.blockIdx.y
    start, token = b * T, int32(cuda.blockIdx.x * cut.chunk + warp)
    end = int32(min(cuda.blockIdx.x * cut.chunk + cut.chunk, T))
    own = int32(cut.ring + warp * (STAGES * ARRAYS) * C + c)
    for stage in range(STAGES):
        ahead = int32(token + stage * warps)
        if ahead < end:
            start_copies(kept, int32(own + stage * ARRAYS * C), arrays, (start + ahead) * C, c, cut)
        cp_async_commit()
    average = r = float32(0)
    if token < end:
        average, r = average_of(mean, start + token), rstd[start + token]
    first_scale = b * factors.scale_pitch + factors.scale
    if WEIGHTED:
        fill_weighted(floats, scales, first_scale, C, t, threads)
    else:
        fill_factors(floats, 0, scales[0], first_scale, C, float32(1), t, threads)
    if GATED:
        fill_factors(
            floats,
            SWEEPS * SWEEP,
            gate,
            b * factors.gate_pitch + factors.gate,
            C,
            float32(0),
            t,
            threads,
        )
    totals = cuda.local.array(TOTALS, "float32")
    for i in range(TOTALS):
        totals[i] = float32(0)
    stage, unit, most = int32(0), float32(1), uint32(0)
    if EIGHT:
        unit = float32(1) / dhs[1][0]
    cuda.syncthreads()  # the factors are there
    while token < end:
        next_average = next_r = float32(0)  # before they are needed: their way from memory is long
        if token + warps < end:
            next_average, next_r = (
                average_of(mean, start + token + warps),
                rstd[start + token + warps],
            )
        cp_async_wait(1)
        at = int32(own + stage)
        averages = look_at_token(totals, floats, kept, at, c, lane, average, r, cut)
        most = write_token(
            dx,
            dhs,
            (start + token) * C + c,
            totals,
            floats,
            kept,
            (at, c, lane),
            (average, r),
            averages,
            cut,
            unit,
            most,
        )
        ahead = int32(token + STAGES * warps)
        if ahead < end:
            start_copies(kept, at, arrays, (start + ahead) * C, c, cut)
        cp_async_commit()
        token, average, r, stage = (
            int32(token + warps),
            next_average,
            next_r,
            int32(ARRAYS * C - stage),
        )

    row = b * cuda.gridDim.x + cuda.blockIdx.x
    if EIGHT:
        keep_largest(dhs[2], int32(row), most, lane)
    place = int32(warp * C + c)  # the warps' sums replace the factors and the tokens
    if SHIFTED:
        write_sums(
            sums[0], row * places.shift_row + places.shift, floats, place, totals, 0, c, C, warps
        )
    at = row * places.scale_row + places.scale
    if WEIGHTED:
        bring_sums(floats, place, totals, SCALE, c, C)
        add_warps_weighted(
            floats, (sums[1], sums[3]), (at, row * C), scales, first_scale, C, warps, t, threads
        )
    else:
        write_sums(sums[1], at, floats, place, totals, SCALE, c, C, warps)
    if GATED:
        write_sums(
            sums[2], row * places.gate_row + places.gate, floats, place, totals, GATE, c, C, warps
        )


def made(key, eight=False):
    bounds = threads_of(key[0], key[2].shifted), 1
    return kernel_of(adaln_backward_v2, "adaln_backward_kernel_v2", *key, bounds, eight)


BACKWARD, EIGHT_BACKWARD = Variants(KEYS, made), Variants(EIGHT_KEYS, lambda key: made(key, True))


@functools.cache
def choose_plan(
    B,
    T,
    C,
    itemsize,
    is_gated,
    limit=HOPPER_SHARED,
    multiprocessors=MULTIPROCESSORS,
    chunks=None,
    sweeps=None,
    shifted=True,
):
    """(warps, chunks of an image's tokens, tokens a chunk, bytes before the ring, shared bytes), or
    None.

    As many warps as there is shared memory for; as many chunks (if not given) as end soonest,
    counting turns of a warp.
    sweeps: of the kernel (default: what C channels take); shifted: whether it has a shift
    """
    vectors, arrays = (2, 4) if is_gated else (1, 3)
    sweeps = sweeps or -(-C // SWEEP)
    before, token = 4 * vectors * sweeps * SWEEP, STAGES * arrays * C * itemsize
    most = threads_of(sweeps, shifted) // WARP
    warps = min((limit - before) // token, most)
    if warps < 1:
        return None

    def turns(n):
        chunk = -(-T // n)
        return -(-B * n // multiprocessors) * (-(-chunk // warps) + OVERHEAD)

    if chunks is None:
        chunks = min(range(1, min(T, MAX_CHUNKS) + 1), key=turns)
        chunks = -(-T // -(-T // chunks))
    return warps, chunks, -(-T // chunks), before, before + warps * token
