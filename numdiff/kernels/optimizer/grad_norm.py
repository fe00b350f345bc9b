"""The global norm of a flat gradient: a reduction of millions of numbers to one, in a fixed order.

MATHEMATICS
    norm = √ Σ x_i²
SHAPES
    x flat (n,) float32 → (1,) float32; of ranges of x where only those are trained: each has its
    own blocks in the first pass, and the second adds up the partials of all
OF PIECES
    Ranks that share an update (nn/partition.py) have a part of the gradient each, and their norm
    must have the bits of one rank's that has all. So `squares_of_pieces` gives each piece of the
    buffer, cut in the same places on any number of ranks, a partial of its own; once all ranks have
    all partials, `root_of_sum` adds them up.
VERSIONS
    v1 tree: two passes. Block p sums the squares of its share (thread k of it the elements k, k +
       stride, …) in registers, then its 256 sums by a tree in shared memory: one partial a block.
       The second kernel, a single block, sums the partials in the same way and takes the root.
    v2 vectorised: the same, with four elements by one 16-byte load and four running sums, so that
       no addition waits for the last.
    Of pieces: v2 with a block a piece, whose elements follow each other.
LAUNCH
    at most 512 blocks of 256 threads, or one a piece; then one block of 256; 1 KiB of shared
    memory.
DETERMINISM
    which elements a thread sums depends on n alone, not on the GPU, and the order of additions does
    not depend on which block comes first (with atomics it would). So the bits are the same in every
    run.
COST
    bytes: 4 n, read once; FLOPs 2 n. Roof: memory bandwidth.
SOURCE
    Pascanu et al. 2013, "On the difficulty of training recurrent neural networks", arXiv:1211.5063,
    algorithm 1.
READ NEXT
    adamw.py, which clips by this norm.
"""

import math

import numpy as np

from ...device import cuda, empty, float32, int32, launch, load4
from ..operation import Problem, Version, integers, lacks_multiple, operation, positive, single

BLOCK = 256  # threads, a power of two for the tree
MAX_BLOCKS = 512  # enough to fill any GPU, few enough that the second pass is short
# elements the reference gives BLAS at a time: too few to be split over threads, so the order is
# fixed
CHUNK = 8192


# Reference ----------------------------------------------------------------------------------------


# an overflow is an answer here: the caller looks for it
@np.errstate(over="ignore", invalid="ignore")
def sum_of_squares_reference(x):
    """Σ x² of a flat array as a Python float: short dot products in x's dtype, added in float64."""
    return sum(
        (float(np.dot(c, c)) for c in (x[i : i + CHUNK] for i in range(0, x.size, CHUNK))), 0.0
    )


def global_norm_reference(x, ranges=None):
    x = x.reshape(-1)
    parts = [x] if ranges is None else [x[start:stop] for start, stop in ranges]
    return np.array([math.sqrt(sum(map(sum_of_squares_reference, parts)))], x.dtype)


def squares_of_pieces_reference(x, pieces, partials):
    for k, (start, stop) in enumerate(pieces):
        partials[k] = sum_of_squares_reference(x[start:stop])


def root_of_sum_reference(partials):
    return np.array([math.sqrt(sum(map(float, partials)))], np.float32)


# Device function ----------------------------------------------------------------------------------


@cuda.jit(device=True)
def block_sum(value):
    """The sum of `value` over the block's 256 threads, in every thread: eight halvings in shared
    memory."""
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


# v1: one element a step ---------------------------------------------------------------------------


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


# v2: four elements a step, four sums under way ----------------------------------------------------


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


# v2 of pieces: a block each -----------------------------------------------------------------------


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


# Cost ---------------------------------------------------------------------------------------------


def global_norm_cost(n):
    return 4 * n, 2 * n


def squares_of_pieces_cost(n, pieces):
    return 4 * n + 20 * pieces, 2 * n


def root_of_sum_cost(pieces):
    return 4 * pieces + 4, pieces


# Operations ---------------------------------------------------------------------------------------


def _parts(x, ranges):
    """The flat parts of x that count."""
    x = x.reshape(-1)
    return [x] if ranges is None else [x[start:stop] for start, stop in ranges]


def _lacks_fours(x, ranges):
    """What v2 needs and x lacks; None if its parts are made of fours."""
    return next(filter(None, (lacks_multiple(4, part.size) for part in _parts(x, ranges))), None)


def _check_pieces(pieces, partials):
    if tuple(pieces.shape) != (*partials.shape, 2):
        raise ValueError(
            f"pieces {pieces.shape} and partials {partials.shape} must be (P, 2) and (P,)"
        )


PARAMETERS = 20_494_272  # of the UNet, for the benchmark
EDGES = np.append(np.arange(0, PARAMETERS, 16384), PARAMETERS)  # as nn/partition.py divides it


@operation(
    reference=global_norm_reference,
    cost=global_norm_cost,
    versions=[
        Version("tree", sum_of_squares_kernel_v1),
        Version("vectorised", sum_of_squares_kernel_v2, fits=_lacks_fours),
    ],
    problems=[
        Problem(x=single(1000)),
        Problem(x=single(5)),
        Problem("of ranges", x=single(1096), ranges=[(0, 4), (64, 1096), (8, 16)]),
        Problem(x=single(40_001), fast=False),
        Problem(x=single(PARAMETERS), measured=True),
    ],
)
def global_norm(x, ranges=None, version=None):
    """√Σx² of a flat array, as an array (1,).

    ranges: [(start, stop)] of the elements that count (None: all), each start a multiple of 4
    """
    parts = _parts(x, ranges)
    blocks = [max(1, min(MAX_BLOCKS, -(-part.size // (4 * BLOCK)))) for part in parts]
    partials = empty((sum(blocks),), np.float32, like=x)
    norm = empty((1,), np.float32, like=x)
    first = 0
    for part, count in zip(parts, blocks, strict=True):
        launch(version.kernel, count, BLOCK, part, partials[first : first + count])
        first += count
    launch(root_of_sum_kernel, 1, BLOCK, partials, norm)
    return norm


@operation(
    reference=squares_of_pieces_reference,
    cost=squares_of_pieces_cost,
    check=_check_pieces,
    problems=[
        Problem(
            x=single(1096),
            pieces=integers([(0, 4), (64, 1096), (8, 16)], np.int64),
            partials=single(3),
        ),
        Problem(
            x=single(PARAMETERS),
            pieces=integers(np.stack((EDGES[:-1], EDGES[1:]), 1), np.int64),
            partials=single(len(EDGES) - 1),
            moved=4 * PARAMETERS,
            measured=True,
        ),
    ],
    writes=("partials",),
)
def squares_of_pieces(x, pieces, partials):
    """partials (P,) = Σx² of each piece of a flat array.

    pieces: (P, 2) int64 on the engine, starts and ends in multiples of 4; partials: float32, or
    float64 for NumPy
    """
    if pieces.shape[0]:
        launch(squares_of_pieces_kernel, pieces.shape[0], BLOCK, x, pieces, partials)


@operation(
    reference=root_of_sum_reference,
    cost=lambda partials: root_of_sum_cost(partials.size),
    problems=[Problem(partials=positive(300))],
)
def root_of_sum(partials):
    """√ of the sum of the partials (P,), as a float32 array (1,)."""
    norm = empty((1,), np.float32, like=partials)
    launch(root_of_sum_kernel, 1, BLOCK, partials, norm)
    return norm
