"""Pieces of the flat buffers of several ranks: added up, or copied from the rank that has them or a
packed buffer.

MATHEMATICS
    copy    y[to + i] = x_s[first + i]                   for i < count, for each piece (s, first, to, count)
    reduce  y[to + i] = x_0[first + i] + … + x_(N-1)[first + i]     in this order, whatever s is
    Where ranks share the update (nn/partition.py), a rank brings its new weights to the others: of
    those with which they compute in 16 bits the copy of 16 bits, two numbers a word, of all others
    the float32, from which the copy is rounded where it arrives. Such parameters are next to each
    other in the buffers, so what is moved is a list of pieces. `peer_all_gather` (reduce.py)
    moves one run of elements a rank.
    So do gradients that are complete at one moment of the backward pass (distributed/overlap.py):
    they are added up and copied while it continues, by as few blocks as the caller says, because
    every multiprocessor that they are on is one that the backward's kernels have to share. Where
    copy engines have brought them here, they are added up afterwards, from this GPU's memory
    (distributed/copies.py).
SHAPES
    x_0 … x_(N-1), y: flat float32, or words of 4 bytes (`as_words`); half: flat like y, float16 or
    bfloat16;
    pieces: int64 (P, 4), rows (buffer, first, to, count) as `pieces_of` cuts them: at most PIECE
    elements, all of them multiples of 4
VERSIONS
    v1 a block takes a piece after the other: four elements a thread, by 16-byte loads and stores;
       of a sum two times four from all ranks under way together, by a kernel for each number of
       ranks.
LAUNCH
    P blocks of 256 threads, or fewer.
DETERMINISM
    fixed order of addition, that of `peer_reduce_scatter`; which thread does it does not matter.
    Pieces do not overlap.
COST
    copy: 4 bytes read and 4 written an element; 2 more written with `half`. Sum: 4 N read and 4
    written. Roof: the ingoing half of NVLink, where the buffers are those of other ranks.
SOURCE
    plain bookkeeping, no source.
READ NEXT
    numdiff/nn/partition.py, numdiff/distributed/overlap.py and numdiff/distributed/copies.py, which
    say what is moved.
"""

import numpy as np

from ...device import cuda, int32, launch, load4, store4
from ...device.common import load4_or_zeros
from ...device.eight import one_of
from ...device.specialise import Constant, Variants, specialise
from ..elementwise import cast_into
from ..operation import Problem, integers, numbers, operation, single
from .reduce import MAX_RANKS, add4, eight

BLOCK = 256  # threads
PIECE = 4 * 4 * BLOCK  # elements that a block copies at most: 16 KiB, four loads a thread
MOST_BLOCKS = 2**16  # more take further pieces each


def pieces_of(ranges):
    """int64 (P, 4): ranges (buffer, first, to, count) divided into pieces of at most PIECE
    elements."""
    cut = [
        (buffer, first + at, to + at, min(PIECE, count - at))
        for buffer, first, to, count in ranges
        for at in range(0, count, PIECE)
    ]
    return np.array(cut, np.int64).reshape(-1, 4)


# Reference ----------------------------------------------------------------------------------------


def peer_copy_pieces_reference(buffers, y, pieces, half=None, blocks=None):
    for buffer, first, to, count in pieces:
        y[to : to + count] = buffers[buffer][first : first + count]
        if half is not None:
            cast_into(y[to : to + count], half[to : to + count])


def peer_reduce_pieces_reference(buffers, y, pieces, blocks=None):
    for _, first, to, count in pieces:
        y[to : to + count] = sum(
            (x[first : first + count] for x in buffers[1:]), buffers[0][first : first + count]
        )


# Copies -------------------------------------------------------------------------------------------


@cuda.jit
def peer_copy_pieces_kernel_v1(x0, x1, x2, x3, x4, x5, x6, x7, y, pieces, half, halves):
    """halves: whether there is a `half`; otherwise y stands in for it, and is not written as such."""
    for piece in range(int32(cuda.blockIdx.x), int32(pieces.shape[0]), int32(cuda.gridDim.x)):
        k, first, to, count = (
            int32(pieces[piece, 0]),
            pieces[piece, 1],
            pieces[piece, 2],
            int32(pieces[piece, 3]),
        )
        k1, k2, k3, k4 = int32(k - 1), int32(k - 2), int32(k - 3), int32(k - 4)
        k5, k6, k7 = int32(k - 5), int32(k - 6), int32(k - 7)
        x = one_of(
            k1,
            x0,
            one_of(
                k2,
                x1,
                one_of(k3, x2, one_of(k4, x3, one_of(k5, x4, one_of(k6, x5, one_of(k7, x6, x7))))),
            ),
        )
        for i in range(int32(cuda.threadIdx.x) * 4, count, BLOCK * 4):
            a0, a1, a2, a3 = load4(x, first + i)
            store4(y, to + i, a0, a1, a2, a3)
            if halves:
                store4(half, to + i, a0, a1, a2, a3)


# Sums ---------------------------------------------------------------------------------------------

RANKS = Constant()  # how many of the buffers there are


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


# Cost ---------------------------------------------------------------------------------------------


def peer_copy_pieces_cost(n, half=False):
    """(bytes, FLOPs) of n elements in all."""
    return (8 + 2 * half) * n, 0


def peer_reduce_pieces_cost(n, ranks):
    return 4 * (ranks + 1) * n, (ranks - 1) * n


# Operations ---------------------------------------------------------------------------------------


def _check(buffers):
    if not 1 <= len(buffers) <= MAX_RANKS:
        raise ValueError(f"pieces come from 1 to {MAX_RANKS} buffers, not {len(buffers)}")


def _check_copy(buffers, y, half):
    _check(buffers)
    if half is not None and half.shape != y.shape:
        raise ValueError(
            f"the copy of 16 bits has shape {half.shape} and not {y.shape}, that of the numbers"
        )


def _grid(pieces, blocks):
    return min(pieces.shape[0], blocks or MOST_BLOCKS)


def _pieces(*ranges):
    return integers(pieces_of(ranges), np.int64)


SIZE = PIECE + 24
TWO = _pieces((2, 0, 0, 4), (0, 12, 8, PIECE + 8))  # of which the second is divided
PARAMETERS = 20_494_272  # of the UNet, for the benchmark


@operation(
    reference=peer_copy_pieces_reference,
    cost=peer_copy_pieces_cost,
    check=_check_copy,
    problems=[
        Problem("3 ranks", buffers=[single(SIZE)] * 3, y=single(SIZE), pieces=TWO, blocks=2),
        Problem(
            "with a copy of 16 bits",
            buffers=[single(SIZE)] * 3,
            y=single(SIZE),
            pieces=TWO,
            half=numbers(np.ones(SIZE), np.float16),
            tolerance=1e-3,
        ),
        Problem(
            buffers=[single(PARAMETERS)],
            y=single(PARAMETERS),
            pieces=_pieces((0, 0, 0, PARAMETERS // 4)),
            moved=2 * PARAMETERS,
            note="both ranks' arrays on one card",
            measured=True,
        ),
    ],
    writes=("y", "half"),
)
def peer_copy_pieces(buffers, y, pieces, half=None, blocks=None):
    """y[to …] = buffers[buffer][first …] for each piece of `pieces_of`; with `half`, its copy of 16
    bits as well.

    blocks: the most that are launched
    """
    if pieces.shape[0]:
        launch(
            peer_copy_pieces_kernel_v1,
            _grid(pieces, blocks),
            BLOCK,
            *eight(buffers),
            y,
            pieces,
            y if half is None else half,
            int(half is not None),
        )


@operation(
    reference=peer_reduce_pieces_reference,
    cost=peer_reduce_pieces_cost,
    check=_check,
    problems=[
        Problem(
            f"{ranks} ranks",
            buffers=[single(n)] * ranks,
            y=single(n),
            pieces=_pieces((0, 0, 0, 4), (0, 12, 8, n - 16)),
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
        launch(REDUCE[len(buffers)], _grid(pieces, blocks), BLOCK, *eight(buffers), y, pieces)
