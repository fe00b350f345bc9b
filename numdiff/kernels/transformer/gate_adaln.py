"""Gate, residual and the adaptive norm after it: the seam between two branches of a transformer, in one pass.

MATHEMATICS, for token t of image b; all but h's product is gate.py, then adaln.py
        z = x + gate[b] · h          y = LayerNorm(z) · (1 + scale[b]) + shift[b]          both z and y are results
    Backward, from dy and from what arrives for z itself, dz: with xhat the normalised z, f = dy · (1 + scale),
        g = dz + rstd · (f - average(f) - xhat · average(f · xhat))          all of z's gradient
        dx = g       dh = gate · g       dgate = Σ_t g · h       dshift = Σ_t dy       dscale = Σ_t dy · xhat
    Without h (the norm before a network's first branch) z is x and there is no gate. RMSNorm, a weight and no shift as
    in adaln.py, each on its own: f = dy · weight · (1 + scale), and Σ_t dy · xhat gives both dscale and dweight.
SHAPES
    x, h, z, y and their gradients (B, T, C) float16, bfloat16 or float32; gate, shift, scale (B, C), arrays or
    `Columns`; weight, dweight (C,), mean, rstd (B · T,) float32. dgate, dshift, dscale: float32 (B, C) for arrays, for
    columns what columns.py adds up
VERSIONS
    v1 unfused: the kernels of gate.py and adaln.py, one after the other, and an addition.
    v2 fused: one kernel each way. Forward: a warp a token, which it holds in registers between the sweeps. Backward: a
       block owns a chunk of an image's tokens with all channels, a warp every n-th of them, of n warps. A warp's next
       tokens are copied to shared memory while it works on one; the sums over tokens stay in registers until the end,
       24 of them for each 256 channels, without a shift 16. 16 bytes an instruction throughout. (C a multiple of 8, up
       to 1280; sm_80) A kernel for each norm: the text branches on constants.
MEASURED
    NVIDIA H200, 2026-11-22, PyTorch 2.11.0: numdiff bench kernels --of files; * is the launcher's choice
    gate_adaln_forward, 64×256×768, 64×256×768, float16
        v1      48.8 µs    2,073 GB/s   51 % of memory
        v2*     31.2 µs    3,245 GB/s   79 % of memory   1.57 × v1
    gate_adaln_backward, 64×256×768, 64×256×768, float16
        v1       105 µs    1,452 GB/s   35 % of memory
        v2*     69.3 µs    2,194 GB/s   53 % of memory   1.51 × v1
LAUNCH
    forward: 256 threads for eight tokens, no shared memory. Backward: grid (chunks, B), up to 384 threads, without a
    shift 512; two tokens a warp in dynamic shared memory, 150 KiB at 768 channels of float16 and 384 threads.
    `choose_plan` picks chunks and warps.
DETERMINISM
    no atomics: a warp adds its tokens in order, a block its warps in order, and columns.py (of dweight: reduce.py) the
    blocks. What is added to what depends on the shape and on the GPU's multiprocessors.
ACCURACY
    z is rounded to its type before it is normalised, so that the backward sees the same one.
COST
    in passes over an array of n elements: 4 forward, where one after the other they take 5; 6 backward, where they take
    3 for the gate, 3 for dx, 2 for the sums and 3 for the addition. Roof: memory bandwidth.
SOURCE
    Peebles and Xie 2023, arXiv:2212.09748, section 3.2 and figure 3; Yao, Yang, Wang 2025, arXiv:2501.01423 (the block
    with RMSNorm); PTX ISA, section 9.7.9.25.3 (cp.async).
READ NEXT
    numdiff/nn/dit.py
"""
import functools
import math
from typing import NamedTuple

import numpy as np

from ...device import cuda, empty, empty_like, float32, int32, is_device, launch, load4, store4, zeros
from ...device.async_copy import cp_async_commit, cp_async_wait
from ...device.eight import as_stored, copy8, load8, store8
from ...device.limits import HOPPER_SHARED, MULTIPROCESSORS, multiprocessors_of, shared_limit
from ...device.requires import requires, supports
from ...device.specialise import Constant, Variants
from ...dtypes import in_single, is_half
from ..common import warp_sum
from ..elementwise import add_forward
from ..reduce import column_sum
from ..versions import capped, versions_by_name
from .adaln import (
    NORMS,
    RMS,
    SHIFTED,
    WEIGHTED,
    Norm,
    adaln_backward,
    adaln_backward_reference,
    adaln_forward,
    adaln_forward_reference,
    average_of,
    check_norm,
)
from .columns import Columns, as_columns
from .gate import gate_backward, gate_backward_reference, gate_forward, gate_forward_reference

WARP = 32
BLOCK = 256  # threads of the forward
ROWS = BLOCK // WARP
SWEEP = 8 * WARP  # channels that a warp has at a time
MAX_SWEEPS = 5  # their sums, 24 registers each, leave just enough for the rest
STAGES = 2  # tokens of a warp in shared memory: the one that it works on, and the next
MAX_CHUNKS = 16  # of an image
ZEROS, ONES = 8 * (np.float32(0),), 8 * (np.float32(1),)  # for the shift and the weight that a norm has not
OVERHEAD = 2  # tokens' worth of time that a block takes to begin and to end


# References -----------------------------------------------------------------------------------------------------------

@in_single(2, 3)
def gate_adaln_forward_reference(x, h, gate, shift, scale, eps=1e-6, weight=None, norm="layer"):
    z = x if h is None else gate_forward_reference(x, h, gate)
    return (z, *adaln_forward_reference(z, shift, scale, eps, weight, norm))


@in_single(2, 3, 4)
def gate_adaln_backward_reference(dz, dy, z, h, gate, shift, scale, mean, rstd, weight=None, dweight=None):
    dx, dshift, dscale = adaln_backward_reference(dy, z, scale, mean, rstd, weight, dweight, shift is not None)
    if dz is not None:
        dx += dz
    dh, dgate = (None, None) if h is None else gate_backward_reference(dx, h, gate)
    return dx, dh, dgate, dshift, dscale


# Device functions -----------------------------------------------------------------------------------------------------
# Tuples of four channels; `totals` holds the lane's sums over tokens: dshift's, then dscale's, then dgate's.

@cuda.jit(device=True, forceinline=True)
def normalised(x, average, r):
    return (x[0] - average) * r, (x[1] - average) * r, (x[2] - average) * r, (x[3] - average) * r


@cuda.jit(device=True, forceinline=True)
def look_at_four(totals, shift, scale, dy, x, factor):
    """Adds to Σ dy and Σ dy · xhat; what four channels bring to Σ f and Σ f · xhat."""
    for i in range(4):
        if SHIFTED:
            totals[shift + i] += dy[i]
        totals[scale + i] += dy[i] * x[i]
    f0, f1, f2, f3 = dy[0] * factor[0], dy[1] * factor[1], dy[2] * factor[2], dy[3] * factor[3]
    return (f0 + f1) + (f2 + f3), (f0 * x[0] + f1 * x[1]) + (f2 * x[2] + f3 * x[3])


@cuda.jit(device=True, forceinline=True)
def norm_gradient(dy, x, factor, dz, r, a, k):
    """g of four channels, from the averages a of f and k of f · xhat."""
    return (dz[0] + r * (dy[0] * factor[0] - a - x[0] * k), dz[1] + r * (dy[1] * factor[1] - a - x[1] * k),
            dz[2] + r * (dy[2] * factor[2] - a - x[2] * k), dz[3] + r * (dy[3] * factor[3] - a - x[3] * k))


@cuda.jit(device=True, forceinline=True)
def gate_gradient(totals, first, g, h, gate):
    """dh of four channels; adds to dgate."""
    for i in range(4):
        totals[first + i] += g[i] * h[i]
    return g[0] * gate[0], g[1] * gate[1], g[2] * gate[2], g[3] * gate[3]


@cuda.jit(device=True, forceinline=True)
def start_token(kept, at, source, i, c, C):
    """Start copies of this lane's channels, c, c + 256 …, of a token that starts at source[i], to kept[at …]."""
    while c < C:
        copy8(kept, at, source, i + c)
        at, c = int32(at + SWEEP), int32(c + SWEEP)


@cuda.jit(device=True, forceinline=True)
def place_of(c):
    """Where four channels from c on lie: of each sweep the lanes' first four, then their other four."""
    return c // SWEEP * SWEEP + c % 8 * WARP + c % SWEEP // 8 * 4


@cuda.jit(device=True, forceinline=True)
def fill_factors(floats, first, vector, start, C, one, t, threads):
    """floats[first …] = one + the channels of a vector, in an order in which 8 lanes that read 16 bytes each, as one
    access of shared memory, find them in 32 different banks."""
    c = int32(4 * t)
    while c < C:
        a0, a1, a2, a3 = load4(vector, start + c)
        at = int32(first + place_of(c))
        store4(floats, at, one + a0, one + a1, one + a2, one + a3)
        c = int32(c + 4 * threads)


@cuda.jit(device=True, forceinline=True)
def fill_weighted(floats, scales, start, C, t, threads):
    """floats = weight · (1 + scale), in the same order."""
    c, one = int32(4 * t), float32(1)
    while c < C:
        a0, a1, a2, a3 = load4(scales[0], start + c)
        w0, w1, w2, w3 = load4(scales[1], c)
        store4(floats, int32(place_of(c)), w0 * (one + a0), w1 * (one + a1), w2 * (one + a2), w3 * (one + a3))
        c = int32(c + 4 * threads)


@cuda.jit(device=True, forceinline=True)
def factors_of(floats, first, lane):
    """What a lane has there for its eight channels."""
    return load4(floats, first + lane * 4), load4(floats, first + SWEEP // 2 + lane * 4)


@cuda.jit(device=True, forceinline=True)
def bring(floats, at, totals, first):
    store4(floats, at, totals[first], totals[first + 1], totals[first + 2], totals[first + 3])
    store4(floats, at + 4, totals[first + 4], totals[first + 5], totals[first + 6], totals[first + 7])


@cuda.jit(device=True, forceinline=True)
def sum_of_warps(floats, c, C, warps):
    """The sums of four channels of the warps' rows in shared memory, in order."""
    s0, s1, s2, s3 = load4(floats, c)
    at = int32(c + C)
    for _ in range(1, warps):
        x0, x1, x2, x3 = load4(floats, at)
        s0, s1, s2, s3 = s0 + x0, s1 + x1, s2 + x2, s3 + x3
        at = int32(at + C)
    return s0, s1, s2, s3


@cuda.jit(device=True, forceinline=True)
def add_warps(floats, out, start, C, warps, t, threads):
    """out[start …] = the sums of the warps' rows."""
    c = int32(4 * t)
    while c < C:
        s0, s1, s2, s3 = sum_of_warps(floats, c, C, warps)
        store4(out, start + c, s0, s1, s2, s3)
        c = int32(c + 4 * threads)


@cuda.jit(device=True, forceinline=True)
def add_warps_weighted(floats, dscales, places, scales, k, C, warps, t, threads):
    """From S, the sums of the warps' rows: dscale's, weight · S, and dweight's, (1 + scale) · S; scale from k on."""
    c, one = int32(4 * t), float32(1)
    while c < C:
        s0, s1, s2, s3 = sum_of_warps(floats, c, C, warps)
        a0, a1, a2, a3 = load4(scales[0], k + c)
        w0, w1, w2, w3 = load4(scales[1], c)
        store4(dscales[0], places[0] + c, w0 * s0, w1 * s1, w2 * s2, w3 * s3)
        store4(dscales[1], places[1] + c, (one + a0) * s0, (one + a1) * s1, (one + a2) * s2, (one + a3) * s3)
        c = int32(c + 4 * threads)


@cuda.jit(device=True, forceinline=True)
def gated(array, x, h, gate):
    """x + gate · h of eight channels, as `array` will hold them."""
    return (as_stored(array, x[0] + gate[0] * h[0]), as_stored(array, x[1] + gate[1] * h[1]),
            as_stored(array, x[2] + gate[2] * h[2]), as_stored(array, x[3] + gate[3] * h[3]),
            as_stored(array, x[4] + gate[4] * h[4]), as_stored(array, x[5] + gate[5] * h[5]),
            as_stored(array, x[6] + gate[6] * h[6]), as_stored(array, x[7] + gate[7] * h[7]))


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


# v2 forward: a warp a token -------------------------------------------------------------------------------------------

SWEEPS = Constant()  # a warp's over its token: it has up to 256 · SWEEPS channels
GATED = Constant()  # whether there are h and gate; without, z is x
KEPT = Constant(lambda SWEEPS: 8 * SWEEPS)  # numbers that a lane keeps
# Of the norms, those that models have run with as many sweeps as their tokens take, the others with the most.
KEYS = [(sweeps, gated, norm) for norm in NORMS for gated in (False, True)
        for sweeps in (range(1, MAX_SWEEPS + 1) if norm.rms == norm.weighted else (MAX_SWEEPS,))]


def key_of(C, gated, norm):
    """The key of the kernels for tokens of C channels."""
    return -(-C // SWEEP) if norm.rms == norm.weighted else MAX_SWEEPS, gated, norm


def kernel_of(text, name, sweeps, gated, norm, launch_bounds):
    return norm.kernel(text, f"{'gate_' * gated}{name}_{sweeps}", "RMS", "WEIGHTED", "SHIFTED", SWEEPS=sweeps,
                       GATED=gated, launch_bounds=launch_bounds)


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


def adaln_forward_v2(x, h, gate, shift, scales, z, y, mean, rstd, shape, places, eps):
    """z and y (B, T, C), mean and rstd (B · T,).

    scales: (scale,), or with a weight (scale, weight); shape: a `Shape`, places: `ForwardPlaces`
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
                    v = gated(z, v, load8(h, first + s * SWEEP), load8(gate, at + s * SWEEP))
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
                store8(y, first + s * SWEEP, low + high)
        if lane == 0:
            if not RMS:
                mean[row] = average
            rstd[row] = r


FORWARD = Variants(KEYS, lambda key: kernel_of(adaln_forward_v2, "adaln_forward_kernel_v2", *key, BLOCK))


# v2 backward: a block a chunk of an image's tokens --------------------------------------------------------------------
# Shared memory: 1 + scale and gate in float32, then for each warp its two tokens, each dy, z, dz and h. A lane reads
# only what it has copied itself, so that no barrier stands between the copies and their use.

def threads_of(sweeps, shifted=True):
    """At most, in the backward: as many as leave a thread the registers for its sums, fewer where there is no shift."""
    if not shifted and sweeps <= 3:
        return 512
    return 384 if sweeps <= 4 else 256


SCALE = Constant(lambda SWEEPS, SHIFTED: 8 * SWEEPS if SHIFTED else 0)  # where, in `totals`
GATE = Constant(lambda SWEEPS, SCALE: 8 * SWEEPS + SCALE)
TOTALS = Constant(lambda SWEEPS, GATED, GATE: 8 * SWEEPS + GATE if GATED else GATE)
ARRAYS = Constant(lambda GATED: 4 if GATED else 3)  # of a token in shared memory


class Chunks(NamedTuple):
    """T tokens an image, of C channels; chunk: tokens of a block; ring: element at which tokens start in shared memory;
    has_dz: whether z itself has a gradient."""

    T: int
    C: int
    chunk: int
    ring: int
    has_dz: int


class Factors(NamedTuple):
    """Where image 0's scale and gate begin, and how far the next image's are."""

    scale: int
    scale_pitch: int
    gate: int
    gate_pitch: int


class Places(NamedTuple):
    """Where in the arrays of sums those of dshift, dscale and dgate begin, and how long their rows are."""

    shift: int
    shift_row: int
    scale: int
    scale_row: int
    gate: int
    gate_row: int


@cuda.jit(device=True, forceinline=True)
def start_copies(kept, at, arrays, i, c, cut):
    """The producer: start copies of this lane's channels of a token of dy, z, dz and h, one group."""
    dy, z, dz, h = arrays
    start_token(kept, at, dy, i, c, cut.C)
    start_token(kept, at + cut.C, z, i, c, cut.C)
    if cut.has_dz:
        start_token(kept, at + 2 * cut.C, dz, i, c, cut.C)
    if GATED:
        start_token(kept, at + 3 * cut.C, h, i, c, cut.C)


@cuda.jit(device=True, forceinline=True)
def look_at_token(totals, floats, kept, at, c, lane, average, r, C):
    """The first sweep over a token: adds to the sums of dshift and dscale; the averages of f and of f · xhat."""
    sum_f = sum_fx = float32(0)
    for s in range(SWEEPS):
        if c + s * SWEEP < C:
            here = int32(at + s * SWEEP)
            d, x = load8(kept, here), load8(kept, here + C)
            low, high = factors_of(floats, s * SWEEP, lane)
            f, fx = look_at_four(totals, 8 * s, SCALE + 8 * s, d[:4], normalised(x[:4], average, r), low)
            sum_f += f
            sum_fx += fx
            f, fx = look_at_four(totals, 8 * s + 4, SCALE + 8 * s + 4, d[4:], normalised(x[4:], average, r), high)
            sum_f += f
            sum_fx += fx
    a = float32(0)
    if not RMS:
        a = warp_sum(sum_f) / float32(C)
    return a, warp_sum(sum_fx) / float32(C)


@cuda.jit(device=True, forceinline=True)
def write_token(dx, dh, i, totals, floats, kept, at, c, lane, norm, averages, cut):
    """The second sweep: dx and dh of a token, which starts at dx[i] for this lane; adds to the sums of dgate."""
    (average, r), (a, k) = norm, averages
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
                store8(dh, i + s * SWEEP, gate_gradient(totals, GATE + 8 * s, g0, branch[:4], low) +
                       gate_gradient(totals, GATE + 8 * s + 4, g1, branch[4:], high))


@cuda.jit(device=True, forceinline=True)
def write_sums(out, start, floats, place, totals, first, c, C, warps):
    """out[start …] = the block's sums, of which each lane has 8 · SWEEPS from totals[first] on. All threads call it."""
    bring_sums(floats, place, totals, first, c, C)
    add_warps(floats, out, start, C, warps, int32(cuda.threadIdx.x), int32(cuda.blockDim.x))


@cuda.jit(device=True, forceinline=True)
def bring_sums(floats, place, totals, first, c, C):
    """Each warp's sums to its row in shared memory."""
    cuda.syncthreads()  # nobody reads what lies there any more
    for s in range(SWEEPS):
        if c + s * SWEEP < C:
            bring(floats, place + s * SWEEP, totals, first + 8 * s)
    cuda.syncthreads()


@requires("8.0")
def adaln_backward_v2(dy, z, dz, h, scales, gate, mean, rstd, dx, dh, sums, cut, factors, places):
    """dx and dh (B, T, C), and a block's sums for dshift, dscale and dgate, three arrays, where `places` says.

    scales: (scale,), or with a weight (scale, weight), and then `sums` has a fourth array (B · chunks, C), for dweight;
    cut: `Chunks`; factors: `Factors`
    """
    floats = cuda.shared.array(0, float32, alignment=128)
    kept = cuda.shared.array(0, z.dtype.type, alignment=128)
    T, C, arrays = cut.T, cut.C, (dy, z, dz, h)
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
        fill_factors(floats, SWEEPS * SWEEP, gate, b * factors.gate_pitch + factors.gate, C, float32(0), t, threads)
    totals = cuda.local.array(TOTALS, "float32")
    for i in range(TOTALS):
        totals[i] = float32(0)
    stage = int32(0)
    cuda.syncthreads()  # the factors are there
    while token < end:
        next_average = next_r = float32(0)  # before they are needed: their way from memory is long
        if token + warps < end:
            next_average, next_r = average_of(mean, start + token + warps), rstd[start + token + warps]
        cp_async_wait(1)
        at = int32(own + stage)
        averages = look_at_token(totals, floats, kept, at, c, lane, average, r, C)
        write_token(dx, dh, (start + token) * C + c, totals, floats, kept, at, c, lane, (average, r), averages, cut)
        ahead = int32(token + STAGES * warps)
        if ahead < end:
            start_copies(kept, at, arrays, (start + ahead) * C, c, cut)
        cp_async_commit()
        token, average, r, stage = int32(token + warps), next_average, next_r, int32(ARRAYS * C - stage)

    row = b * cuda.gridDim.x + cuda.blockIdx.x
    place = int32(warp * C + c)  # the factors and the tokens give way to the warps' sums
    if SHIFTED:
        write_sums(sums[0], row * places.shift_row + places.shift, floats, place, totals, 0, c, C, warps)
    at = row * places.scale_row + places.scale
    if WEIGHTED:
        bring_sums(floats, place, totals, SCALE, c, C)
        add_warps_weighted(floats, (sums[1], sums[3]), (at, row * C), scales, first_scale, C, warps, t, threads)
    else:
        write_sums(sums[1], at, floats, place, totals, SCALE, c, C, warps)
    if GATED:
        write_sums(sums[2], row * places.gate_row + places.gate, floats, place, totals, GATE, c, C, warps)


BACKWARD = Variants(KEYS, lambda key: kernel_of(adaln_backward_v2, "adaln_backward_kernel_v2", *key,
                                                (threads_of(key[0], key[2].shifted), 1)))


# Launchers ------------------------------------------------------------------------------------------------------------

@functools.cache
def choose_plan(B, T, C, itemsize, is_gated, limit=HOPPER_SHARED, multiprocessors=MULTIPROCESSORS, chunks=None,
                sweeps=None, shifted=True):
    """(warps, chunks of an image's tokens, tokens a chunk, bytes before the ring, shared bytes), or None.

    As many warps as there is shared memory for; as many chunks (if not told) as end soonest, counting turns of a warp.
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


def gate_adaln_supports(like, C):
    """Whether version 2 runs on tokens of C channels that lie where the array `like` does, and have its type."""
    return (is_device(like) and capped("gate_adaln", 2) == 2 and C % 8 == 0 and C <= SWEEP * MAX_SWEEPS
            and (is_half(like.dtype) or like.dtype == np.float32) and supports(like, FORWARD, BACKWARD)
            and choose_plan(1, 1, C, like.dtype.itemsize, True, shared_limit(like)) is not None)


def _check(x, h, vectors, version, weight=None, norm="layer"):
    """(B, T, C, version)."""
    if x.ndim != 3 or h is not None and h.shape != x.shape:
        raise ValueError(f"gate_adaln takes tokens (B, T, C), x and h alike, not {tuple(x.shape)} and "
                         f"{h if h is None else tuple(h.shape)}; reshape an image to (B, H·W, C)")
    B, T, C = x.shape
    for vector in vectors:
        if vector is not None and tuple(vector.shape) != (B, C):
            raise ValueError(f"gate_adaln: gate, shift and scale must be (B, C) = {(B, C)}, not {tuple(vector.shape)}")
    check_norm("gate_adaln", C, weight, norm)
    takes, columns = gate_adaln_supports(x, C), any(isinstance(vector, Columns) for vector in vectors)
    if version is None:
        version = 2 if takes else 1
    if is_device(x) and (version == 2 and not takes or version == 1 and columns):
        raise ValueError(f"version 2 (fused) takes a multiple of 8 channels, at most {SWEEP * MAX_SWEEPS}, on a "
                         f"device of capability 8.0; version 1 (unfused) takes whole arrays, not columns; not {C} "
                         "channels here: use version=1 and chunk")
    return B, T, C, version


@versions_by_name(asks=True)
def gate_adaln_forward(x, h, gate, shift, scale, eps=1e-6, weight=None, norm="layer", version=None):
    """(z, y, mean (B·T,), rstd (B·T,)): z = x + gate · h and its norm, times weight · (1 + scale), plus shift.

    x, h (B, T, C); h and gate None: z is x. gate, shift, scale: (B, C), arrays or `Columns`; weight: (C,) float32.
    shift, weight: None where there is none; norm: "layer", or "rms", which has no mean: None
    """
    B, T, C, version = _check(x, h, (gate, shift, scale), version, weight, norm)
    if not is_device(x):
        return gate_adaln_forward_reference(x, h, gate, shift, scale, eps, weight, norm)
    if version == 1:
        z = x if h is None else gate_forward(x, h, gate)
        return (z, *adaln_forward(z, shift, scale, eps, weight, norm))
    is_gated, which = h is not None, Norm(norm == "rms", weight is not None, shift is not None)
    z, y, rstd = empty_like(x) if is_gated else x, empty_like(x), empty((B * T,), np.float32, like=x)
    mean = None if which.rms else empty((B * T,), np.float32, like=x)
    scale = as_columns(scale)  # what stands for an absent array is not looked at
    shift, gate = as_columns(shift) if which.shifted else scale, as_columns(gate) if is_gated else scale
    flat, branch = x.reshape(-1), (h if is_gated else x).reshape(-1)
    launch(FORWARD[key_of(C, is_gated, which)], -(-B * T // ROWS), BLOCK, flat, branch, gate.flat, shift.flat,
           (scale.flat,) if weight is None else (scale.flat, weight), z.reshape(-1), y.reshape(-1),
           rstd if which.rms else mean, rstd, Shape(B * T, T, C),
           ForwardPlaces(gate.first, gate.pitch, shift.first, scale.first, scale.pitch), float(eps))
    return z, y, mean, rstd


@versions_by_name(asks=True)
def gate_adaln_backward(dz, dy, z, h, gate, shift, scale, mean, rstd, weight=None, dweight=None, version=None):
    """(dx, dh, dgate, dshift, dscale) from the gradients of z (None: nothing has arrived) and of y (None: so, too).

    z: what the forward gave; of `shift` only the place is needed; mean None: of RMSNorm. dh and dgate are None where h
    is, dshift where shift is. The gradient of the weight is added into `dweight` (None: not wanted).
    """
    B, T, C, version = _check(z, h, (gate, shift, scale), version, weight)
    if dy is None:
        dy = zeros(z.shape, z.dtype, like=z)
    if not is_device(z):
        return gate_adaln_backward_reference(dz, dy, z, h, gate, shift, scale, mean, rstd, weight, dweight)
    if version == 1:
        dx, dshift, dscale = adaln_backward(dy, z, scale, mean, rstd, weight, dweight, shift is not None)
        if dz is not None:
            dx = add_forward(dx, dz)
        dh, dgate = (None, None) if h is None else gate_backward(dx, h, gate)
        return dx, dh, dgate, dshift, dscale
    is_gated, which = h is not None, Norm(mean is None, weight is not None, shift is not None)
    given = shift, scale, gate if is_gated else None
    vectors = [v if v is None else as_columns(v) for v in given]
    agreed = min({v.sums.blocks for v in vectors if v is not None} - {None}, default=None)  # of those beside these
    key = key_of(C, is_gated, which)
    warps, chunks, chunk, before, nbytes = choose_plan(B, T, C, z.dtype.itemsize, is_gated, shared_limit(z),
                                                       multiprocessors_of(z), agreed, key[0], which.shifted)
    places, gradients = zip(*((None, None) if v is None else v.sums.place(v, chunks) for v in vectors), strict=True)
    _, scale_, gate_ = vectors = [vectors[1] if v is None else v for v in vectors]  # an absent one is not read
    sums, scales, shares = tuple(places[1] if p is None else p for p in places), (scale_.flat,), None
    if which.weighted:
        shares = empty((B * chunks, C), np.float32, like=z)
        sums, scales = (*sums, shares.reshape(-1)), (scale_.flat, weight)
    dx, dh, flat = empty_like(z), empty_like(z) if is_gated else None, z.reshape(-1)
    launch(BACKWARD[key], (chunks, B), WARP * warps, dy.reshape(-1), flat, flat if dz is None else dz.reshape(-1),
           h.reshape(-1) if is_gated else flat, scales, gate_.flat, rstd if which.rms else mean, rstd, dx.reshape(-1),
           (dh if is_gated else dx).reshape(-1), sums,
           Chunks(T, C, chunk, before // z.dtype.itemsize, int(dz is not None)),
           Factors(scale_.first, scale_.pitch, gate_.first, gate_.pitch),
           Places(*(n for v in vectors for n in (v.first, v.pitch))), shared=nbytes)
    if dweight is not None and shares is not None:
        column_sum(shares, dweight)
    dshift, dscale, dgate = (g if g is None or isinstance(v, Columns) else g.whole()
                             for v, g in zip(given, gradients, strict=True))
    return dx, dh, dgate, dshift, dscale


# Cost -----------------------------------------------------------------------------------------------------------------

def gate_adaln_forward_cost(B, T, C, itemsize=4):
    """(bytes, FLOPs) over B images of T tokens of C channels."""
    return itemsize * (4 * B * T * C + 3 * B * C) + 8 * B * T, 12 * B * T * C


def gate_adaln_backward_cost(B, T, C, itemsize=4):
    return itemsize * (6 * B * T * C + 2 * B * C) + 4 * (3 * B * C + 2 * B * T), 20 * B * T * C
