"""SwiGLU and its backward at the end of Hopper's products, so that neither is a separate pass.

    forward     u = x·w12ᵀ + b12, of 2 · H columns;  h = silu(u1) · u2,  u1 = u[:, :H], u2 = u[:, H:]
    backward    dh = dy·w3, of H columns;            du1 = dh · u2 · silu'(u1),  du2 = dh · silu(u1)

Where these products do not run, SwiGLU is a pass between two others: ../../transformer/swiglu.py.

FORWARD
    h needs columns j of both halves, H apart. A block's tile takes half of its columns from each:
    its tile of the weight is two boxes, rows j … of the first half, then rows H + j … of the
    second. The accumulators of u1[i, j] and u2[i, j] are then in one thread, 32 · (blocks of u1)
    apart, and no threads exchange data. Each pair of blocks of 64 columns gives three tiles, u1, u2
    and h, which take turns in the two buffers of shared memory.
BACKWARD
    A block of dh becomes two of du, from two of u: as for GELU' an idle warp brings them while the
    product is made, and stores what the consumer leaves in their place (`exchange`). Two buffers of
    two tiles for each consumer are 64 KiB where most others need 32, so the pipeline has up to two
    stages less.
HALVES
    A tensor map of u as (M, 2, H) says which half a box belongs to, and where that half ends: H
    needs no more than to be a multiple of 8, as everything that TMA touches.
ARITHMETIC
    silu(a) = a/2 · (1 + tanh(a/2)): one special function an element of h, by tanh.approx, whose
    error moves silu by 2⁻¹² · |a| at most, as fast_gelu.py says of GELU. A tile of 128 × 256 has
    128 × 128 elements of h: 1,024 cycles, and as long again for storing three tiles. In the
    backward s = 1 / (1 + e^-a) comes from an exponential and a
    reciprocal: 4,096 cycles for 128 × 256 of dh, as for GELU'.
SOURCE
    Shazeer 2020, arXiv:2002.05202, eq. 6.
READ NEXT
    row_sums.py; ../activations.py, the caller.
"""

import math

from ....device import cuda, device_inline, float32, int32, uint32
from ....device.approximate import power_of_two, reciprocal, tanh_approximate
from ....device.tensor_core import load_word, pack_half2, unpack_half2
from ....device.tma import tma_store_2d, tma_store_3d, tma_store_commit
from .layout import BLOCKS, BN, BOX_BYTES
from .staging import (
    await_tile,
    bias_of,
    loaded_tile,
    offer_tiles,
    return_tile,
    store_two,
    store_words,
    word_place,
)

LOG2_E = float32(math.log2(math.e))


@device_inline
def gate(a, b):
    """silu(a) · b."""
    h = float32(0.5) * a
    return (h + h * tanh_approximate(h)) * b


@device_inline
def gate_gradients(g, a, b):
    """(da, db) of `gate` from g, its result's gradient."""
    s = reciprocal(float32(1) + power_of_two(-LOG2_E * a))
    y = a * s
    return g * b * (s + y - y * s), g * y


# Forward ------------------------------------------------------------------------------------------


@device_inline
def prefetch_biases(gates, place, target):
    """As `prefetch_bias`, for a tile of BN / 2 columns of each half of the bias (2 · H,)."""
    bias, first_column, H = target.arrays.bias, place.first_column, target.work.N
    b0 = b1 = float32(0)
    t = int32(cuda.threadIdx.x & 127)
    # 0 where a tile is so wide that each thread has a number of both
    half = int32(uint32(t) // uint32(BN // 2))
    n = int32(first_column + t - half * (BN // 2))
    if target.epilogue.has_bias and n < H:
        b0 = bias[n + half * H]
        if BN > 128:
            b1 = bias[n + H]
    return b0, b1


@device_inline
def biased(block, j, half, acc, place, staging):
    """Two neighbours of a block with their bias: columns 8 · j … of the thread's row, or of the one
    8 below."""
    b0, b1 = bias_of(block, j, place, staging)
    i = 32 * block + 4 * j + 2 * half
    return acc[i] + b0, acc[i + 1] + b1


@device_inline
def stage_words(words, turn, place, staging):
    """A warpgroup's 64 × 64 results in the buffer whose turn it is, ready for TMA; returns the
    buffer's first byte."""
    tile = int32(staging.at + (turn & 1) * BOX_BYTES)
    await_tile()
    store_words(words, tile, place, staging)
    offer_tiles()
    return tile


@device_inline
def half_of_pair(part, column, words, turn, acc, place, staging, maps, pair):
    """Columns of u1 (part 0) or u2 (part 1) of a pair of blocks."""
    for j in range(8):
        for half in range(2):
            u0, u1 = biased(pair + part * BLOCKS, j, half, acc, place, staging)
            words[2 * j + half] = pack_half2(u0, u1)
    tile = stage_words(words, turn, place, staging)
    if cuda.threadIdx.x % 128 == 0:
        tma_store_3d(
            staging.base + uint32(tile),
            maps.c,
            uint32(column),
            uint32(part),
            uint32(place.first_row),
        )
        tma_store_commit()


@device_inline
def write_swiglu(block, turn, amax, acc, gates, place, staging, target):
    """u1, u2 = accumulators + bias, if they are kept, and silu(u1) · u2, of 64 columns.

    block: the columns are those of blocks number `block` and block + BLOCKS
    """
    maps, work, keeps_u = target.maps, target.work, target.epilogue.has_residual
    column = int32(place.first_column + 64 * block)
    if column < work.N and place.first_row < work.M:
        words = cuda.local.array(16, "uint32")
        if keeps_u:
            half_of_pair(0, column, words, turn, acc, place, staging, maps, block)
            half_of_pair(1, column, words, int32(turn + 1), acc, place, staging, maps, block)
            turn = int32(turn + 2)
        for j in range(8):
            for half in range(2):
                a0, a1 = biased(block, j, half, acc, place, staging)
                b0, b1 = biased(block + BLOCKS, j, half, acc, place, staging)
                words[2 * j + half] = pack_half2(gate(a0, b0), gate(a1, b1))
        tile = stage_words(words, turn, place, staging)
        if cuda.threadIdx.x % 128 == 0:
            tma_store_2d(
                staging.base + uint32(tile), maps.d, uint32(column), uint32(place.first_row)
            )
            tma_store_commit()
        turn = int32(turn + 1)
    return turn, amax


# Backward -----------------------------------------------------------------------------------------


@device_inline
def write_swiglu_gradient(block, turn, amax, acc, gates, place, staging, target):
    """(du1, du2) of 64 columns from dh, the accumulators, in the two tiles that hold u1 and u2; the
    next turn."""
    work = target.work
    if int32(place.first_column + 64 * block) < work.N and place.first_row < work.M:
        tile = loaded_tile(turn, 2, staging)
        first, second = cuda.local.array(16, "uint32"), cuda.local.array(16, "uint32")
        for j in range(8):
            for half in range(2):
                at = word_place(tile, place.thread_row, place.lane, j, half)
                first[2 * j + half] = load_word(staging.tiles, at)
                second[2 * j + half] = load_word(staging.tiles, at + BOX_BYTES)
        for j in range(8):
            for half in range(2):
                i = 32 * block + 4 * j + 2 * half
                a0, a1 = unpack_half2(first[2 * j + half])
                b0, b1 = unpack_half2(second[2 * j + half])
                da0, db0 = gate_gradients(acc[i], a0, b0)
                da1, db1 = gate_gradients(acc[i + 1], a1, b1)
                first[2 * j + half] = pack_half2(da0, da1)
                second[2 * j + half] = pack_half2(db0, db1)
        store_two(first, second, True, tile, place, staging)
        turn = return_tile(turn, place, staging)
    return turn, amax
