"""Zeroing parts of a flat buffer in one launch: the gradients that a step adds to, and not those
that it writes.

MATHEMATICS
    flat[start … stop-1] = 0        for every range (start, stop)
    A backward pass adds to the gradients of most parameters, which therefore begin at zero. A large
    weight that is used once a step gets its gradient from one product, which may as well write it:
    then neither the zeros nor the reading of them is paid. So of a DiT's flat gradient only the
    biases and a few small weights are zeroed here.
SHAPES
    flat (n,) float32; ranges (R, 2) int64, on the same engine: first element and the one after the
    last of each, with starts in multiples of 4 and none longer than PIECE; `pieces` cuts long
    ranges so
VERSIONS
    v1 a block a range: four elements a thread, by 16-byte stores; what is left over one by one.
LAUNCH
    R blocks of 256 threads.
DETERMINISM
    each element is written by one thread.
COST
    bytes: 4 a zeroed element. Roof: memory bandwidth, and the launch where the ranges are few.
SOURCE
    plain bookkeeping, no source.
READ NEXT
    grad_norm.py, which reads the whole buffer once the gradients are there.
"""

import numpy as np

from ...device import cuda, float32, int32, launch, store4
from ..operation import Problem, integers, operation, single

BLOCK = 256  # threads
PIECE = 16 * 4 * BLOCK  # elements that a block zeroes at most: 16 stores a thread


def pieces(ranges):
    """int64 (R, 2): ranges [(start, stop)] with neighbours joined and long ones cut, as
    `zero_ranges` takes them."""
    joined = []
    for start, stop in sorted(ranges):
        if joined and joined[-1][1] == start:
            joined[-1][1] = stop
        else:
            joined.append([start, stop])
    cut = [
        (at, min(at + PIECE, stop)) for start, stop in joined for at in range(start, stop, PIECE)
    ]
    return np.array(cut, np.int64).reshape(-1, 2)


def zero_ranges_reference(flat, ranges):
    for start, stop in ranges:
        flat[start:stop] = 0


@cuda.jit
def zero_ranges_kernel_v1(flat, ranges):
    start, stop = ranges[cuda.blockIdx.x, 0], ranges[cuda.blockIdx.x, 1]
    count = int32(stop - start)
    whole = count & int32(-4)
    zero = float32(0)
    for i in range(int32(cuda.threadIdx.x) * 4, whole, BLOCK * 4):
        store4(flat, start + i, zero, zero, zero, zero)
    rest = whole + int32(cuda.threadIdx.x)
    if rest < count:
        flat[start + rest] = zero


# Cost ---------------------------------------------------------------------------------------------


def zero_ranges_cost(n):
    """(bytes, FLOPs) of n elements in all."""
    return 4 * n, 0


# Operations ---------------------------------------------------------------------------------------

PARAMETERS = 20_494_272  # of the UNet, for the benchmark
STARTS = np.arange(0, PARAMETERS - PIECE, 18_976)


@operation(
    reference=zero_ranges_reference,
    cost=zero_ranges_cost,
    problems=[
        Problem(
            flat=single(2500),
            ranges=integers(pieces([(8, 13), (40, 2100), (2100, 2103)]), np.int64),
        ),
        Problem(
            flat=single(PARAMETERS),
            ranges=integers(np.stack((STARTS, STARTS + PIECE), 1), np.int64),
            note="86 % of it",
            moved=4 * PIECE * len(STARTS),
            measured=True,
        ),
    ],
    writes=("flat",),
)
def zero_ranges(flat, ranges):
    """Set the elements of `flat` within `ranges` to zero, in place."""
    if ranges.shape[0]:
        launch(zero_ranges_kernel_v1, ranges.shape[0], BLOCK, flat, ranges)
