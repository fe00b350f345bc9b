"""Pieces of the flat buffers of several ranks, copied from the rank that has them or from a packed
buffer.

MATHEMATICS
    y[to + i] = x_s[first + i]                   for i < count, for each piece (s, first, to, count)
    Where ranks share the update (nn/partition.py), a rank brings its new weights to the others: of
    those with which they compute in 16 bits the copy of 16 bits, two numbers a word, of all others
    the float32, from which the copy is rounded where it arrives. Such parameters are next to each
    other in the buffers, so what is moved is a list of pieces.
SHAPES
    x_0 … x_(N-1), y: flat float32, or words of 4 bytes (`as_words`); half: flat like y, float16 or
    bfloat16;
    pieces: int64 (P, 4), rows (buffer, first, to, count) as `pieces_of` cuts them: at most PIECE
    elements, all of them multiples of 4
VERSIONS
    v1 a block takes a piece after the other: four elements a thread, by 16-byte loads and stores.
LAUNCH
    P blocks of 256 threads, or fewer.
DETERMINISM
    Pieces do not overlap.
COST
    4 bytes read and 4 written an element; 2 more written with `half`. Roof: the ingoing half of
    NVLink, where the buffers are those of other ranks.
SOURCE
    plain bookkeeping, no source.
READ NEXT
    numdiff/nn/partition.py, which says what is moved.
"""

import numpy as np

from ..device import cuda, int32, launch, load4, store4
from ..device.eight import one_of
from .elementwise import cast_into
from .operation import Problem, integers, numbers, operation, single

MAX_RANKS = 8  # GPUs of a host: the buffer of each is an argument of the kernels
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


def eight(arrays):
    """The kernels take eight arrays: the last one stands in for absent ranks, and is never read as
    theirs."""
    return [*arrays, *[arrays[-1]] * (MAX_RANKS - len(arrays))]


def grid_of(pieces, blocks):
    """Blocks of a launch over these pieces, at most `blocks`."""
    return min(pieces.shape[0], blocks or MOST_BLOCKS)


def peer_copy_pieces_reference(buffers, y, pieces, half=None, blocks=None):
    for buffer, first, to, count in pieces:
        y[to : to + count] = buffers[buffer][first : first + count]
        if half is not None:
            cast_into(y[to : to + count], half[to : to + count])


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


def peer_copy_pieces_cost(n, half=False):
    """(bytes, FLOPs) of n elements in all."""
    return (8 + 2 * half) * n, 0


def check_buffers(buffers):
    """Raise a `ValueError` if the kernels do not take so many."""
    if not 1 <= len(buffers) <= MAX_RANKS:
        raise ValueError(f"pieces come from 1 to {MAX_RANKS} buffers, not {len(buffers)}")


def _check(buffers, y, half):
    check_buffers(buffers)
    if half is not None and half.shape != y.shape:
        raise ValueError(
            f"the copy of 16 bits has shape {half.shape} and not {y.shape}, that of the numbers"
        )


def pieces_argument(*ranges):
    """`pieces_of` these ranges, as an argument of a `Problem`."""
    return integers(pieces_of(ranges), np.int64)


SIZE = PIECE + 24
TWO = pieces_argument((2, 0, 0, 4), (0, 12, 8, PIECE + 8))  # of which the second is divided
PARAMETERS = 20_494_272  # of the UNet, for the benchmark


@operation(
    reference=peer_copy_pieces_reference,
    cost=peer_copy_pieces_cost,
    check=_check,
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
            pieces=pieces_argument((0, 0, 0, PARAMETERS // 4)),
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
            grid_of(pieces, blocks),
            BLOCK,
            *eight(buffers),
            y,
            pieces,
            y if half is None else half,
            int(half is not None),
        )
