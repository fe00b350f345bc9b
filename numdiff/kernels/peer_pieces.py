"""Pieces of the flat buffers of several ranks, each copied from the rank that has it, or from a packed buffer.

MATHEMATICS
    y[to + i] = x_s[first + i]   for i < count, for each piece (s, first, to, count): s numbers the buffers
    Where ranks share the update (nn/partition.py), a rank brings its new weights to the others: of those with which
    they compute in 16 bits the copy of 16 bits, two numbers a word, of all others the float32, from which the copy is
    rounded where it arrives. Such parameters lie next to each other in the buffers, so what is moved is a list of
    pieces. `peer_all_gather` (peer_reduce.py) moves one run of elements a rank.
SHAPES
    x_0 … x_(N-1), y: flat float32, or words of 4 bytes (`as_words`); half: flat like y, float16 or bfloat16;
    pieces: int64 (P, 4), rows (buffer, first, to, count) as `pieces_of` cuts them: at most PIECE elements, all of them
    multiples of 4
VERSIONS
    v1 a block a piece: four elements a thread, by 16-byte loads and stores.
LAUNCH
    P blocks of 256 threads.
DETERMINISM
    a copy; pieces do not overlap.
COST
    4 bytes read and 4 written an element; 2 more written with `half`. Roof: the ingoing half of NVLink, where the
    buffers are those of other ranks.
SOURCE
    plain bookkeeping, no source.
READ NEXT
    numdiff/nn/partition.py, which says what is moved.
"""
import numpy as np

from ..device import cuda, int32, is_device, launch, load4, store4
from ..device.eight import one_of
from .elementwise import cast_into
from .peer_reduce import MAX_RANKS, eight

BLOCK = 256  # threads
PIECE = 4 * 4 * BLOCK  # elements that a block copies at most: 16 KiB, four loads a thread


def pieces_of(ranges):
    """int64 (P, 4): ranges (buffer, first, to, count) cut into pieces of at most PIECE elements."""
    cut = [(buffer, first + at, to + at, min(PIECE, count - at))
           for buffer, first, to, count in ranges for at in range(0, count, PIECE)]
    return np.array(cut, np.int64).reshape(-1, 4)


# Reference ------------------------------------------------------------------------------------------------------------

def peer_copy_pieces_reference(buffers, y, pieces, half):
    for buffer, first, to, count in pieces:
        y[to:to + count] = buffers[buffer][first:first + count]
        if half is not None:
            cast_into(y[to:to + count], half[to:to + count])


# Kernel ---------------------------------------------------------------------------------------------------------------

@cuda.jit
def peer_copy_pieces_kernel_v1(x0, x1, x2, x3, x4, x5, x6, x7, y, pieces, half, halves):
    """halves: whether there is a `half`; otherwise y stands in for it, and is not written as such."""
    piece = cuda.blockIdx.x
    k, first, to, count = int32(pieces[piece, 0]), pieces[piece, 1], pieces[piece, 2], int32(pieces[piece, 3])
    k1, k2, k3, k4 = int32(k - 1), int32(k - 2), int32(k - 3), int32(k - 4)
    k5, k6, k7 = int32(k - 5), int32(k - 6), int32(k - 7)
    x = one_of(k1, x0, one_of(k2, x1, one_of(k3, x2, one_of(k4, x3, one_of(k5, x4, one_of(k6, x5, one_of(
        k7, x6, x7)))))))
    for i in range(int32(cuda.threadIdx.x) * 4, count, BLOCK * 4):
        a0, a1, a2, a3 = load4(x, first + i)
        store4(y, to + i, a0, a1, a2, a3)
        if halves:
            store4(half, to + i, a0, a1, a2, a3)


# Launcher -------------------------------------------------------------------------------------------------------------

def peer_copy_pieces(buffers, y, pieces, half=None):
    """y[to …] = buffers[buffer][first …] for each piece of `pieces_of`; with `half`, its copy of 16 bits as well."""
    if not 1 <= len(buffers) <= MAX_RANKS:
        raise ValueError(f"pieces come from 1 to {MAX_RANKS} buffers, not {len(buffers)}")
    if half is not None and half.shape != y.shape:
        raise ValueError(f"the copy of 16 bits has shape {half.shape} and not {y.shape}, that of the numbers")
    if not is_device(y):
        peer_copy_pieces_reference(buffers, y, pieces, half)
    elif pieces.shape[0]:
        launch(peer_copy_pieces_kernel_v1, pieces.shape[0], BLOCK, *eight(buffers), y, pieces,
               y if half is None else half, int(half is not None))


# Cost -----------------------------------------------------------------------------------------------------------------

def peer_copy_pieces_cost(n, half=False):
    """(bytes, FLOPs) of n elements in all."""
    return (8 + 2 * half) * n, 0
