"""Weights in E4M3, in both orientations: all matrices of a model in three launches.

MATHEMATICS
    as quantise.py; the scale of a matrix is the least power of two ≥ largest / 448 of its own
    elements, which are all there at once.
SHAPES
    quantise_weights    flat float16: matrices (N, K) that a table says; two uint8 of these alone: as it is, transposed;
                        scale float32 (n,) of each
    N and K are multiples of 16.
LAUNCH
    a block for each 64 × 64 of every matrix, two passes: the largest, then the bytes; 5 KiB of
    static shared memory
DETERMINISM
    a largest magnitude is exact in whatever order.
COST
    2 bytes a weight are read, twice, and 2 written. Roof: memory.
SOURCE
    Micikevicius et al. 2022, "FP8 Formats for Deep Learning", arXiv:2209.05433, section 3.2.
READ NEXT
    both.py: activations and gradients in both orientations, too.
"""

from typing import NamedTuple

import numpy as np

from ...device import cuda, empty, float32, int32, launch, uint32, upload
from ...device.eight import load8
from ...device.requires import requires
from ...device.rounded8 import larger
from ...device.tensor_core import float_of, store_words4
from ...kernels.operation import Problem, half, numbers, operation
from .quantise import (
    BLOCK,
    EACH,
    EXACT,
    EXPONENT,
    LIMIT,
    block_largest,
    check_rounding,
    largest8,
    magnitude,
    pack8,
    power_of_two,
    quantise_forward_reference,
    up_to_power,
)

TILE = 64  # side of a block's part of a weight
PITCH = TILE + 16  # bytes from row to row of it in shared memory: stores of 16 bytes stay aligned
TILE_BYTES = TILE * PITCH


class Matrices8(NamedTuple):
    """The places of the weights. table int64 (n, 5): first element in the flat buffer, N, K, the
    number of the first tile, and the first byte in the buffers of bytes, which hold these matrices
    alone, `total` bytes; tiles int32 (blocks, 2): of each tile the matrix and its number within it.
    """

    table: object
    tiles: object
    total: int


def matrices8(places, like):
    """`Matrices8` of [(first element, N, K)], on the device of `like`."""
    table, tiles, total = [], [], 0
    for number, (first, N, K) in enumerate(places):
        if N % EACH or K % EACH:
            raise ValueError(
                f"a weight ({N}, {K}) in E4M3 needs both extents to be multiples of {EACH}"
            )
        table.append((first, N, K, len(tiles), total))
        total += N * K
        tiles += [(number, tile) for tile in range(-(-N // TILE) * -(-K // TILE))]
    return Matrices8(
        upload(np.array(table, np.int64).reshape(-1, 5), like),
        upload(np.array(tiles, np.int32).reshape(-1, 2), like),
        total,
    )


def quantise_weights_reference(flat, matrices, rows, columns, scale):
    for i, (first, N, K, _, at) in enumerate(matrices.table):
        place = slice(at, at + N * K)
        w = flat[first : first + N * K].reshape(N, K)
        most = magnitude(w).view(np.float32)
        scale[i] = power_of_two(most * LIMIT) if 0 < most < np.inf else 1
        q = quantise_forward_reference(w, scale[i : i + 1])
        rows[place], columns[place] = q.reshape(-1), q.T.reshape(-1)


# Kernels ------------------------------------------------------------------------------------------


@cuda.jit(device=True, forceinline=True)
def weight_place(table, tiles):
    """(first element, N, K, this thread's row, its first column) of the block's tile."""
    matrix, tile = tiles[cuda.blockIdx.x, 0], tiles[cuda.blockIdx.x, 1]
    first, N, K = table[matrix, 0], int32(table[matrix, 1]), int32(table[matrix, 2])
    across = int32((K + TILE - 1) // TILE)
    t = int32(cuda.threadIdx.x)
    return (
        first,
        N,
        K,
        int32(tile // across * TILE + t // 4),
        int32(tile % across * TILE + t % 4 * EACH),
    )


@cuda.jit
def weights_largest_kernel_v1(flat, table, tiles, partials):
    """The largest magnitude of each tile."""
    first, N, K, row, column = weight_place(table, tiles)
    most = uint32(0)
    if row < N and column < K:
        at = first + row * K + column
        most = largest8(largest8(most, load8(flat, at)), load8(flat, at + 8))
    most = block_largest(most)
    if cuda.threadIdx.x == 0:
        partials[cuda.blockIdx.x] = most


@cuda.jit
def weights_scale_kernel_v1(table, partials, scale):
    """A block a matrix: from the largest magnitude of its tiles its scale."""
    matrix, most = int32(cuda.blockIdx.x), uint32(0)
    end = table[matrix + 1, 3] if matrix + 1 < table.shape[0] else partials.size
    for i in range(table[matrix, 3] + int32(cuda.threadIdx.x), end, BLOCK):
        most = larger(most, partials[i])
    most = block_largest(most)
    if cuda.threadIdx.x == 0:
        known = most > uint32(0) and most < EXPONENT
        scale[matrix] = up_to_power(float_of(most) * LIMIT) if known else float32(1)


@requires("8.9")
@cuda.jit
def quantise_weights_kernel_v1(flat, table, tiles, scale, rows, columns):
    """A tile of 64 × 64 as it is, and transposed by way of shared memory."""
    tile = cuda.shared.array(TILE_BYTES, "uint8", alignment=16)
    first, N, K, row, column = weight_place(table, tiles)
    t, start = int32(cuda.threadIdx.x), table[tiles[cuda.blockIdx.x, 0], 4]
    if row < N and column < K:
        factor, at = float32(1) / scale[tiles[cuda.blockIdx.x, 0]], row * K + column
        a, b = pack8(load8(flat, first + at), factor)
        c, d = pack8(load8(flat, first + at + 8), factor)
        store_words4(rows, start + at, a, b, c, d)
        store_words4(tile, t // 4 * PITCH + t % 4 * EACH, a, b, c, d)
    cuda.syncthreads()
    # the same thread's column of the tile, and the first of 16 rows of it
    across, down = int32(column - t % 4 * EACH + t // 4), int32(row - t // 4 + t % 4 * EACH)
    if across < K and down < N:
        words = cuda.local.array(4, "uint32")
        for i in range(4):
            words[i] = uint32(0)
            for j in range(4):
                byte = uint32(tile[(t % 4 * EACH + 4 * i + j) * PITCH + t // 4])
                words[i] = words[i] | byte << uint32(8 * j)
        store_words4(columns, start + across * N + down, words[0], words[1], words[2], words[3])


# Operation ----------------------------------------------------------------------------------------


def quantise_weights_cost(n):
    """n: numbers of all matrices."""
    return 6 * n, n


def _weights(*places):
    """A problem of these matrices, (first element, N, K)."""
    table, tiles, total = matrices8(places, np.zeros(1))
    end = max(first + N * K for first, N, K in places)
    return Problem(
        " and ".join(f"{N} × {K}" for _, N, K in places),
        flat=half(end),
        matrices=Matrices8(numbers(table, np.int64), numbers(tiles, np.int32), total),
        rows=numbers(np.zeros(total), np.uint8),
        columns=numbers(np.zeros(total), np.uint8),
        scale=numbers(np.zeros(len(places))),
        **EXACT,
    )


@operation(
    reference=quantise_weights_reference,
    cost=quantise_weights_cost,
    problems=[_weights((0, 80, 48), (80 * 48 + 64, 16, 144))],
    writes=("rows", "columns", "scale"),
)
def quantise_weights(flat, matrices, rows, columns, scale):
    """All matrices of a flat float16 buffer, `Matrices8`, as E4M3 in the buffers of bytes `rows`,
    as stored, and `columns`, each transposed, one matrix after the other; and the scale of each."""
    check_rounding(flat)
    table, tiles, _ = matrices
    partials = empty((len(tiles),), np.uint32, like=flat)
    launch(weights_largest_kernel_v1, len(tiles), BLOCK, flat, table, tiles, partials)
    launch(weights_scale_kernel_v1, len(table), BLOCK, table, partials, scale)
    launch(quantise_weights_kernel_v1, len(tiles), BLOCK, flat, table, tiles, scale, rows, columns)
