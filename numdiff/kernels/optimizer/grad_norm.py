"""The global norm of a flat gradient: a reduction of millions of numbers to one, in a fixed order.

MATHEMATICS
    norm = √ Σ x_i²
SHAPES
    x flat (n,) float32 → (1,) float32; of ranges of x where only those are trained: each has its own blocks in the
    first pass, and the second adds up the partials of all
OF PIECES
    Ranks that share an update (nn/partition.py) have a part of the gradient each, and their norm must have the bits of
    one rank's that has all. So `squares_of_pieces` gives each piece of the buffer, cut in the same places on any number
    of ranks, a partial of its own; once all ranks have all partials, `root_of_sum` adds them up.
VERSIONS
    v1 tree: two passes. Block p sums the squares of its share (thread k of it the elements k, k + stride, …) in
       registers, then its 256 sums by a tree in shared memory: one partial a block. The second kernel, a single block,
       sums the partials in the same way and takes the root.
    v2 vectorised: the same, with four elements by one 16-byte load and four running sums, so that no addition waits for
       the last.
    Of pieces: v2 with a block a piece, whose elements follow each other.
LAUNCH
    at most 512 blocks of 256 threads, or one a piece; then one block of 256; 1 KiB of shared memory.
DETERMINISM
    which elements a thread sums depends on n alone, not on the GPU, and the order of additions does not depend on which
    block comes first (with atomics it would). So the bits are the same in every run.
COST
    bytes: 4 n, read once; FLOPs 2 n. Roof: memory bandwidth.
SOURCE
    Pascanu et al. 2013, "On the difficulty of training recurrent neural networks", arXiv:1211.5063, algorithm 1.
READ NEXT
    adamw.py, which clips by this norm.
"""
import math

import numpy as np

from ...device import cuda, empty, float32, int32, is_device, launch, load4
from ..versions import versions_by_name

BLOCK = 256  # threads, a power of two for the tree
MAX_BLOCKS = 512  # enough to fill any GPU, few enough that the second pass is short
CHUNK = 8192  # elements the reference gives BLAS at a time: too few to be split over threads, so the order is fixed


# Reference ------------------------------------------------------------------------------------------------------------

@np.errstate(over="ignore", invalid="ignore")  # an overflow is an answer here: the caller looks for it
def sum_of_squares_reference(x):
    """Σ x² of a flat array as a Python float: short dot products in x's dtype, added in float64."""
    return sum((float(np.dot(c, c)) for c in (x[i:i + CHUNK] for i in range(0, x.size, CHUNK))), 0.0)


def global_norm_reference(x, ranges=None):
    x = x.reshape(-1)
    parts = [x] if ranges is None else [x[start:stop] for start, stop in ranges]
    return np.array([math.sqrt(sum(map(sum_of_squares_reference, parts)))], x.dtype)


def squares_of_pieces_reference(x, pieces, partials):
    for k, (start, stop) in enumerate(pieces):
        partials[k] = sum_of_squares_reference(x[start:stop])


def root_of_sum_reference(partials):
    return np.array([math.sqrt(sum(map(float, partials)))], np.float32)


# Device function ------------------------------------------------------------------------------------------------------

@cuda.jit(device=True)
def block_sum(value):
    """The sum of `value` over the block's 256 threads, in every thread: eight halvings in shared memory."""
    partial = cuda.shared.array(BLOCK, float32)
    k = cuda.threadIdx.x
    partial[k] = value
    cuda.syncthreads()
    half = BLOCK // 2
    while half > 0:
        if k < half:
            partial[k] += partial[k + half]
        cuda.syncthreads()  # every thread comes here, whether it added or not
        half //= 2
    return partial[0]


# v1: one element a step -----------------------------------------------------------------------------------------------

@cuda.jit
def sum_of_squares_kernel_v1(x, partials):
    total = float32(0)
    for i in range(cuda.grid(1), x.size, cuda.gridsize(1)):
        total += x[i] * x[i]
    total = block_sum(total)
    if cuda.threadIdx.x == 0:
        partials[cuda.blockIdx.x] = total


@cuda.jit
def root_of_sum_kernel(partials, norm):
    """Second pass, one block: √ of the sum of all partials."""
    total = float32(0)
    for i in range(cuda.threadIdx.x, partials.size, BLOCK):
        total += partials[i]
    total = block_sum(total)
    if cuda.threadIdx.x == 0:
        norm[0] = math.sqrt(total)


# v2: four elements a step, four sums under way ------------------------------------------------------------------------

@cuda.jit
def sum_of_squares_kernel_v2(x, partials):
    t0, t1, t2, t3 = float32(0), float32(0), float32(0), float32(0)
    for i in range(cuda.grid(1) * 4, x.size, cuda.gridsize(1) * 4):
        x0, x1, x2, x3 = load4(x, i)
        t0 += x0 * x0
        t1 += x1 * x1
        t2 += x2 * x2
        t3 += x3 * x3
    total = block_sum((t0 + t1) + (t2 + t3))
    if cuda.threadIdx.x == 0:
        partials[cuda.blockIdx.x] = total


# v2 of pieces: a block each -------------------------------------------------------------------------------------------

@cuda.jit
def squares_of_pieces_kernel(x, pieces, partials):
    start, stop = pieces[cuda.blockIdx.x, 0], pieces[cuda.blockIdx.x, 1]
    t0, t1, t2, t3 = float32(0), float32(0), float32(0), float32(0)
    for i in range(start + int32(cuda.threadIdx.x) * 4, stop, BLOCK * 4):
        x0, x1, x2, x3 = load4(x, i)
        t0 += x0 * x0
        t1 += x1 * x1
        t2 += x2 * x2
        t3 += x3 * x3
    total = block_sum((t0 + t1) + (t2 + t3))
    if cuda.threadIdx.x == 0:
        partials[cuda.blockIdx.x] = total


# Launcher -------------------------------------------------------------------------------------------------------------

@versions_by_name
def global_norm(x, version=None, ranges=None):
    """√Σx² of a flat array, as an array (1,).

    ranges: [(start, stop)] of the elements that count (None: all), each start a multiple of 4
    """
    if not is_device(x):
        return global_norm_reference(x, ranges)
    x = x.reshape(-1)
    parts = [x] if ranges is None else [x[start:stop] for start, stop in ranges]
    odd = next((part.size for part in parts if part.size % 4), 0)
    if version is None:
        version = 1 if odd else 2
    elif version == 2 and odd:
        raise ValueError(f"version 2 (vectorised) reads four elements at a time, and {odd} is not a multiple of 4; "
                         "use version=1")
    blocks = [max(1, min(MAX_BLOCKS, -(-part.size // (4 * BLOCK)))) for part in parts]
    partials = empty((sum(blocks),), np.float32, like=x)
    norm = empty((1,), np.float32, like=x)
    first = 0
    for part, count in zip(parts, blocks, strict=True):
        launch(sum_of_squares_kernel_v1 if version == 1 else sum_of_squares_kernel_v2, count, BLOCK, part,
               partials[first:first + count])
        first += count
    launch(root_of_sum_kernel, 1, BLOCK, partials, norm)
    return norm


def squares_of_pieces(x, pieces, partials):
    """partials (P,) = Σx² of each piece of a flat array.

    pieces: (P, 2) int64 on the engine, starts and ends in multiples of 4; partials: float32, or float64 for NumPy
    """
    if tuple(pieces.shape) != (*partials.shape, 2):
        raise ValueError(f"pieces {pieces.shape} and partials {partials.shape} must be (P, 2) and (P,)")
    if not is_device(x):
        squares_of_pieces_reference(x, pieces, partials)
    elif pieces.shape[0]:
        launch(squares_of_pieces_kernel, pieces.shape[0], BLOCK, x, pieces, partials)


def root_of_sum(partials):
    """√ of the sum of the partials (P,), as a float32 array (1,)."""
    if not is_device(partials):
        return root_of_sum_reference(partials)
    norm = empty((1,), np.float32, like=partials)
    launch(root_of_sum_kernel, 1, BLOCK, partials, norm)
    return norm


def global_norm_cost(n):
    return 4 * n, 2 * n


def squares_of_pieces_cost(n, pieces):
    return 4 * n + 20 * pieces, 2 * n


def root_of_sum_cost(pieces):
    return 4 * pieces + 4, pieces
