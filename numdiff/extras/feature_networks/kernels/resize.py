"""Resizing along one axis: each output is a weighted sum of neighbours.

MATHEMATICS
    y[o, i, k] = Σ_t weight[i, t] · x[o, start[i] + t, k]
    Rows and columns are resized in two passes; `limit` holds y within 0 … 255 after the second. No gradient: data.
SHAPES
    x (O, n, K) uint8 or float32, weight (m, T) float32, start (m,) int32 with start + T ≤ n; y (O, m, K) float32.
    Rows of images (B, H, W, C): O = B, n = H, K = W·C; columns: O = B·H, n = W, K = C
VERSIONS
    v1 naive: one thread an output.
LAUNCH
    one thread an output, 256 a block. No shared memory.
DETERMINISM
    the sum of each output has a fixed order.
COST
    bytes: x is read once from memory, y is written; 2·T FLOPs an output. Roof: memory bandwidth.
SOURCE
    resizing.py names the methods, which are these weights.
READ NEXT
    ../resizing.py
"""

import numpy as np

from ....device import cuda, empty, float32, launch
from ....device.common import divide
from ....errors import TooManyElementsError
from ....kernels.operation import Problem, Version, integers, numbers, operation, single

BLOCK = 256  # threads
LARGEST = np.float32(255)

# Reference ----------------------------------------------------------------------------------------


def resize_forward_reference(x, weight, start, limit=False):
    working = weight.dtype
    matrix = np.zeros((len(weight), x.shape[1]), working)
    for row, first, values in zip(matrix, start, weight, strict=True):
        row[first : first + len(values)] = values
    y = np.matmul(matrix, x.astype(working, copy=False))
    return np.clip(y, 0, 255, out=y) if limit else y


# v1: one thread an output -------------------------------------------------------------------------


@cuda.jit
def resize_forward_kernel_v1(x, weight, start, y, n, m, T, K, limit):
    at = cuda.grid(1)
    if at < y.size:
        rest, k = divide(at, K)
        o, i = divide(rest, m)
        source = (o * n + start[i]) * K + k
        total = float32(0)
        for t in range(T):
            total += weight[i * T + t] * float32(x[source + t * K])
        if limit:
            total = min(max(total, float32(0)), LARGEST)
        y[at] = total


# Operation ----------------------------------------------------------------------------------------


def _check(x, weight, start):
    if x.ndim != 3 or weight.ndim != 2 or start.shape != weight.shape[:1]:
        raise ValueError(
            f"x {tuple(x.shape)}, weight {tuple(weight.shape)} and start {tuple(start.shape)} must be "
            "(O, n, K), (m, T) and (m,)"
        )


SMALL = {
    "weight": numbers([[0.5, 0.25, 0.25], [1, -0.5, 0.5], [0, 0, 2]]),
    "start": integers([0, 1, 2]),
}


@operation(
    reference=resize_forward_reference,
    cost=lambda x, weight: (
        x.size * x.dtype.itemsize + 4 * x.size // x.shape[1] * len(weight),
        2 * weight.size * x.size // x.shape[1],
    ),
    check=_check,
    versions=[Version("naive", resize_forward_kernel_v1, measured=False)],
    problems=[
        Problem(x=single(2, 5, 3), **SMALL),
        Problem(
            "limited bytes",
            x=integers(np.arange(30).reshape(1, 5, 6) * 8, np.uint8),
            limit=True,
            **SMALL,
        ),
    ],
)
def resize_forward(x, weight, start, limit=False, version=None):
    """The weighted sums (O, m, K) of x (O, n, K) along its middle axis, as a new array."""
    (O, n, K), (m, T) = x.shape, weight.shape
    y = empty((O, m, K), np.float32, like=x)
    if max(x.size, y.size) >= 2**31 - BLOCK:
        raise TooManyElementsError(
            f"{x.shape} or {y.shape} has too many elements for 32-bit indices: split the batch"
        )
    arrays = x.reshape(-1), weight.reshape(-1), start, y.reshape(-1)
    launch(version.kernel, -(-y.size // BLOCK), BLOCK, *arrays, n, m, T, K, int(limit))
    return y
