"""The sum of pieces of the ranks' gradients, while the backward pass continues or after it.

MATHEMATICS
    y[to + i] = x_0[first + i] + … + x_(N-1)[first + i]     in this order, for each piece (_, first, to, count)
    Gradients that are complete at one moment of the backward pass (overlap.py) are added up while
    it continues, by as few blocks as the caller says, because every multiprocessor that they are on
    is one that the backward's kernels have to share. Where copy engines have brought them here,
    they are added up afterwards, from this GPU's memory (copies.py).
SHAPES
    x_0 … x_(N-1), y: flat float32; pieces: int64 (P, 4) as kernels/peer_pieces.py cuts them, with
    any buffer in the first column
VERSIONS
    v1 a block takes a piece after the other: two times four elements of all ranks a thread, under
       way together, by a kernel for each number of ranks.
LAUNCH
    P blocks of 256 threads, or fewer.
DETERMINISM
    fixed order of addition, that of `peer_reduce_scatter`; which thread does it does not matter.
    Pieces do not overlap.
COST
    4 N bytes read and 4 written an element. Roof: the ingoing half of NVLink, where the buffers are
    those of other ranks.
SOURCE
    plain bookkeeping, no source.
READ NEXT
    overlap.py and copies.py, which say what is moved.
"""

from ...device import cuda, int32, launch, store4
from ...device.common import load4_or_zeros
from ...device.specialise import Constant, Variants, specialise
from ...kernels.operation import Problem, operation, single
from ...kernels.peer_pieces import (
    BLOCK,
    MAX_RANKS,
    SIZE,
    check_buffers,
    eight,
    grid_of,
    pieces_argument,
)
from .reduce import add4

RANKS = Constant()  # how many of the buffers there are


def peer_reduce_pieces_reference(buffers, y, pieces, blocks=None):
    for _, first, to, count in pieces:
        y[to : to + count] = sum(
            (x[first : first + count] for x in buffers[1:]), buffers[0][first : first + count]
        )


@cuda.jit(device=True, forceinline=True)
def sum4(x0, x1, x2, x3, x4, x5, x6, x7, i, exists):
    """The sum over the ranks of four neighbours, or zeros; a branch on RANKS vanishes."""
    t = load4_or_zeros(x0, i, exists)
    if RANKS > 1:
        t = add4(t, load4_or_zeros(x1, i, exists))
    if RANKS > 2:
        t = add4(t, load4_or_zeros(x2, i, exists))
    if RANKS > 3:
        t = add4(t, load4_or_zeros(x3, i, exists))
    if RANKS > 4:
        t = add4(t, load4_or_zeros(x4, i, exists))
    if RANKS > 5:
        t = add4(t, load4_or_zeros(x5, i, exists))
    if RANKS > 6:
        t = add4(t, load4_or_zeros(x6, i, exists))
    if RANKS > 7:
        t = add4(t, load4_or_zeros(x7, i, exists))
    return t


def peer_reduce_pieces_kernel_v1(x0, x1, x2, x3, x4, x5, x6, x7, y, pieces):
    for piece in range(int32(cuda.blockIdx.x), int32(pieces.shape[0]), int32(cuda.gridDim.x)):
        first, to, count = pieces[piece, 1], pieces[piece, 2], int32(pieces[piece, 3])
        for i in range(int32(cuda.threadIdx.x) * 4, count, BLOCK * 8):
            j = int32(i + BLOCK * 4)
            a = sum4(x0, x1, x2, x3, x4, x5, x6, x7, first + i, True)
            b = sum4(x0, x1, x2, x3, x4, x5, x6, x7, first + j, j < count)
            store4(y, to + i, a[0], a[1], a[2], a[3])
            if j < count:
                store4(y, to + j, b[0], b[1], b[2], b[3])


REDUCE = Variants(
    range(1, MAX_RANKS + 1), lambda ranks: specialise(peer_reduce_pieces_kernel_v1, RANKS=ranks)
)


def peer_reduce_pieces_cost(n, ranks):
    """(bytes, FLOPs) of n elements in all."""
    return 4 * (ranks + 1) * n, (ranks - 1) * n


@operation(
    reference=peer_reduce_pieces_reference,
    cost=peer_reduce_pieces_cost,
    check=check_buffers,
    problems=[
        Problem(
            f"{ranks} ranks",
            buffers=[single(n)] * ranks,
            y=single(n),
            pieces=pieces_argument((0, 0, 0, 4), (0, 12, 8, n - 16)),
            blocks=2,
            fast=ranks in (1, 3, 8),
        )
        for ranks in range(1, MAX_RANKS + 1)
        for n in (SIZE if ranks == 3 else 48,)
    ],
    writes=("y",),
)
def peer_reduce_pieces(buffers, y, pieces, blocks=None):
    """y[to …] = the sum over all buffers, in rank order, from [first …] on, for each piece.

    blocks: the most that are launched
    """
    if pieces.shape[0]:
        launch(REDUCE[len(buffers)], grid_of(pieces, blocks), BLOCK, *eight(buffers), y, pieces)
