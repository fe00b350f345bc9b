"""Tensors in E4M3: rounding with a scale, and the scale from what earlier steps have seen.

MATHEMATICS
    q = E4M3(x / scale), so scale · q is x with 4 significant bits, as long as |x| ≤ 448 · scale;
    what is larger becomes 448 · scale, and what is no finite number NaN, so that an overflow stays
    one.
    All scales are powers of two: x / scale and scale · q are exact, and only E4M3 itself rounds.
    Activations and gradients, delayed scaling: one pass over a tensor rounds it, with the scale of
        the step before, and finds its largest magnitude. At the step's end, of the last HISTORY
        steps,
            scale = the least power of two ≥ MARGIN · largest / 448,
        so that the next step's numbers may be MARGIN times as large. A step with a number that is
        not finite is ignored; without any step counted yet the scale stays. Several ranks need the
        largest of all of them: each writes its own into its column of a table that is zero
        elsewhere, and the sum of the tables has all columns, exactly.
SHAPES
    quantise_forward    x (..., C) float16, scale float32 (1,) -> uint8 (..., C); amax uint32 (PARTIALS,)
    scale_update        amax uint32 (n, P), history float32 (n, HISTORY), scale float32 (n,); P: PARTIALS, or the ranks
    share_largest       amax uint32 (n, PARTIALS) -> table uint32 (n, ranks), to be added up as float32
    C is a multiple of 16.
VERSIONS
    one of each: 16 numbers a thread and turn, 32 bytes in and 16 out
LAUNCH
    quantise_forward: at most PARTIALS blocks of 256 threads. scale_update, share_largest: a block a
    tensor.
DETERMINISM
    a magnitude is compared as the integer that its bits are: the largest of all is exact, in
    whatever order. Each block has a place of its own in `amax`, and keeps the larger of what is
    there (of another microbatch) and its own; kernels that round what they write (`keep_largest`)
    share places, by an integer maximum.
COST
    3 bytes a number. Roof: memory.
SOURCE
    Micikevicius et al. 2022, "FP8 Formats for Deep Learning", arXiv:2209.05433, section 3.2, on a
    scale a tensor; Peng et al. 2023, "FP8-LM", arXiv:2310.18313, and NVIDIA's Transformer Engine,
    on delayed scaling.
READ NEXT
    weights.py: all weights of a model, in both orientations.
"""

from typing import NamedTuple

import numpy as np

from ...device import cuda, empty, float32, int32, launch, uint32
from ...device.eight import load8
from ...device.float8 import pack_e4m3x4
from ...device.requires import requires, supports
from ...device.rounded8 import PARTIALS, larger, scaled
from ...device.tensor_core import (
    float_of,
    store_words4,
    word_of,
)
from ...errors import NumdiffError
from ...float8 import LARGEST, bits_of
from ...kernels.operation import Problem, filled, half, numbers, operation, positive, single

BLOCK = 256  # threads
EACH = 16  # numbers of a thread and turn: 16 bytes of E4M3
HISTORY = 16  # steps whose largest magnitude counts
MARGIN = 2.0  # by which the next step may exceed them
MAGNITUDE, MANTISSA, EXPONENT, ONE = (
    uint32(0x7FFFFFFF),
    uint32(0x7FFFFF),
    uint32(0x7F800000),
    uint32(0x800000),
)
LIMIT = float32(1 / LARGEST)


class Scale8(NamedTuple):
    """scale: float32 (1,), by which the numbers of a tensor are divided; amax: uint32 (PARTIALS,),
    where the largest of them leaves its bits for the next step's scale."""

    scale: object
    amax: object

    def rounded(self, x):
        """x in E4M3: what kernels that round by themselves leave."""
        return quantise_forward(x, *self)


# Reference ----------------------------------------------------------------------------------------


def power_of_two(x):
    """The least power of two ≥ x, float32, for x > 0."""
    bits = np.asarray(x, np.float32).view(np.uint32)
    return ((bits + MANTISSA) & EXPONENT).view(np.float32)


def magnitude(x):
    """The bits of the largest |x|, uint32; a NaN is larger than all."""
    return np.max(np.asarray(x, np.float32).reshape(-1).view(np.uint32) & MAGNITUDE, initial=0)


@np.errstate(invalid="ignore")  # an infinity becomes a NaN
def quantise_forward_reference(x, scale, amax=None):
    x = x.astype(np.float32)
    if amax is not None:
        amax[0] = max(amax[0], magnitude(x))
    return bits_of(x * (np.float32(1) / scale[0]) + x * np.float32(0))


def scale_update_reference(amax, history, scale):
    largest = amax.max(axis=1).view(np.float32)
    history[:, 1:] = history[:, :-1].copy()
    history[:, 0] = np.where(np.isfinite(largest), largest, 0)
    most = history.max(axis=1)
    scale[...] = np.where(most > 0, power_of_two(most * np.float32(MARGIN) * LIMIT), scale)
    amax[...] = 0


def share_largest_reference(amax, table, rank):
    table[...] = 0
    table[:, rank] = amax.max(axis=1)
    amax[...] = 0


# Device functions ---------------------------------------------------------------------------------


@cuda.jit(device=True)
def block_largest(value):
    """The largest uint32 of the block's 256 threads, in every thread."""
    found = cuda.shared.array(BLOCK, uint32)
    t = int32(cuda.threadIdx.x)
    found[t] = value
    cuda.syncthreads()
    half = int32(BLOCK // 2)
    while half > 0:
        if t < half:
            found[t] = larger(found[t], found[t + half])
        cuda.syncthreads()
        half = int32(half // 2)
    return found[0]


@cuda.jit(device=True, forceinline=True)
def up_to_power(x):
    """The least power of two ≥ x > 0."""
    return float_of((word_of(x) + MANTISSA) & EXPONENT)


@cuda.jit(device=True, forceinline=True)
def largest8(most, x):
    """The larger of `most` and the magnitudes of eight float32, as bits."""
    for v in x:
        most = larger(most, word_of(v) & MAGNITUDE)
    return most


@cuda.jit(device=True, forceinline=True)
def pack8(x, f):
    """Eight float32 times f as two words of E4M3."""
    return (
        pack_e4m3x4(scaled(x[0], f), scaled(x[1], f), scaled(x[2], f), scaled(x[3], f)),
        pack_e4m3x4(scaled(x[4], f), scaled(x[5], f), scaled(x[6], f), scaled(x[7], f)),
    )


# Kernels ------------------------------------------------------------------------------------------


@requires("8.9")
@cuda.jit
def quantise_forward_kernel_v1(x, scale, y, amax, gathers):
    factor, most = float32(1) / scale[0], uint32(0)
    for i in range(cuda.grid(1) * EACH, x.size, cuda.gridsize(1) * EACH):
        low, high = load8(x, i), load8(x, i + 8)
        most = largest8(largest8(most, low), high)
        a, b = pack8(low, factor)
        c, d = pack8(high, factor)
        store_words4(y, i, a, b, c, d)
    if gathers:
        most = block_largest(most)
        if cuda.threadIdx.x == 0:
            amax[cuda.blockIdx.x] = larger(amax[cuda.blockIdx.x], most)


@cuda.jit(device=True)
def take_largest(amax, row):
    """The largest of a row, in every thread of the block; the row is zero afterwards."""
    most = uint32(0)
    for i in range(int32(cuda.threadIdx.x), int32(amax.shape[1]), BLOCK):
        most = larger(most, amax[row, i])
        amax[row, i] = uint32(0)
    return block_largest(most)


@cuda.jit
def scale_update_kernel_v1(amax, history, scale):
    """A block a tensor."""
    row, t = int32(cuda.blockIdx.x), int32(cuda.threadIdx.x)
    most = take_largest(amax, row)
    if t < HISTORY:
        kept = history[row, max(int32(t - 1), int32(0))]
        if t == 0:
            kept = float_of(most) if most < EXPONENT else float32(0)
    cuda.syncthreads()
    if t < HISTORY:
        history[row, t] = kept
    cuda.syncthreads()
    if t == 0:
        largest = float32(0)
        for i in range(HISTORY):
            largest = max(largest, history[row, i])
        if largest > float32(0):
            scale[row] = up_to_power(largest * float32(MARGIN) * LIMIT)


@cuda.jit
def share_largest_kernel_v1(amax, table, rank):
    """A block a tensor."""
    row = int32(cuda.blockIdx.x)
    most = take_largest(amax, row)
    for i in range(int32(cuda.threadIdx.x), int32(table.shape[1]), BLOCK):
        table[row, i] = most if i == rank else uint32(0)


# Cost ---------------------------------------------------------------------------------------------


def quantise_forward_cost(n):
    """(bytes, FLOPs) of n numbers."""
    return 3 * n, n


def scale_update_cost(n):
    """n: of the partial results of all tensors, read and zeroed."""
    return 8 * n, 0


def share_largest_cost(n):
    return scale_update_cost(n)


# Operations ---------------------------------------------------------------------------------------


def check_rounding(x):
    if not supports(x, quantise_forward_kernel_v1):
        raise NumdiffError(
            "E4M3 needs a GPU of compute capability 8.9 or later: use float16 on others."
        )
    if x.dtype != np.float16:
        raise ValueError(f"E4M3 is made of float16, not of {x.dtype}; use cast_forward first")


def _check_eights(x):
    if x.shape[-1] % EACH:
        raise ValueError(f"x {x.shape} must have a multiple of {EACH} numbers in a row")


def _twice(a, version):
    """Bytes of activations, their scale of the next step, and the bytes with that."""
    amax = a.amax.copy() if isinstance(a.amax, np.ndarray) else a.amax
    y = quantise_forward(a.x, a.scale[:1], amax[:PARTIALS])
    scale_update(amax.reshape(1, PARTIALS), a.history, a.scale)
    return y, quantise_forward(a.x, a.scale[:1]), a.history, a.scale, amax


def _activations(rng):
    x = rng.standard_normal((3, 11, 32)).astype(np.float16)
    x[0, 0, :3] = 3e4, -3e4, 6e-8
    return {
        "x": x,
        "scale": np.float32([0.25]),
        "history": np.float32([[5] * (HISTORY - 1) + [6e4]]),
        "amax": np.array([5] * PARTIALS, np.uint32),
    }


EXACT = {"tolerance": 0.0}


@operation(
    reference=quantise_forward_reference,
    cost=quantise_forward_cost,
    problems=[
        Problem(x=half(3, 11, 32), scale=numbers([0.25]), **EXACT),
        Problem("activations, twice, and their scale", inputs=_activations, run=_twice, **EXACT),
        Problem(
            x=half(64 * 256, 4 * 768),
            scale=single(1),
            amax=numbers(np.zeros(PARTIALS), np.uint32),
            measured=True,
        ),
    ],
)
def quantise_forward(x, scale, amax=None):
    """E4M3(x / scale) as a new array of bytes like x, float16 (..., C).

    scale: float32 (1,), a power of two; amax: uint32 (PARTIALS,), in which the bits of the largest
        |x| are kept, with what is there; None: not wanted
    """
    check_rounding(x)
    _check_eights(x)
    y = empty(x.shape, np.uint8, like=x)
    blocks = max(1, min(PARTIALS, -(-x.size // (BLOCK * EACH))))
    gathers = amax is not None
    launch(
        quantise_forward_kernel_v1,
        blocks,
        BLOCK,
        x.reshape(-1),
        scale,
        y.reshape(-1),
        amax if gathers else empty((1,), np.uint32, like=x),
        int(gathers),
    )
    return y


def _largest(rows):
    """The bits of largest magnitudes, rows of PARTIALS."""
    return filled(
        (rows, PARTIALS),
        lambda rng: (
            rng.standard_normal((rows, PARTIALS)).astype(np.float32).view(np.uint32) & MAGNITUDE
        ),
        np.uint32,
    )


@operation(
    reference=scale_update_reference,
    cost=scale_update_cost,
    problems=[
        Problem(amax=_largest(2), history=positive(2, HISTORY), scale=numbers([1, 1]), **EXACT)
    ],
    writes=("amax", "history", "scale"),
)
def scale_update(amax, history, scale):
    """At the end of a step: its largest magnitudes go into `history`, from which come the scales of
    the next; `amax` is zero again. amax: of this process, or the sum of all ranks' tables of
    `share_largest`"""
    launch(scale_update_kernel_v1, len(scale), BLOCK, amax, history, scale)


@operation(
    reference=share_largest_reference,
    cost=share_largest_cost,
    problems=[
        Problem(amax=_largest(2), table=numbers(np.full((2, 3), 7), np.uint32), rank=1, **EXACT)
    ],
    writes=("amax", "table"),
)
def share_largest(amax, table, rank):
    """Column `rank` of the table, one of several ranks, becomes the largest of each row of `amax`,
    which is zero again; the other columns become zero."""
    launch(share_largest_kernel_v1, len(amax), BLOCK, amax, table, rank)
