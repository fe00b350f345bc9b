"""The patches that a convolution with a rectangular kernel sees, as the rows of a matrix.

MATHEMATICS
    y[b·Ho·Wo + i·Wo + j, (r·columns + s)·C + c] = x[b, i·stride + r - top, j·stride + s - left, c], 0 outside of x
    A convolution is then y · weightᵀ, with weight (C_out, rows·columns·C). No gradient: the networks
    that use it are not trained.
SHAPES
    x (B, H, W, C) float32; y (B, Ho, Wo, rows·columns·C), Ho = (H + 2·top - rows) // stride + 1
VERSIONS
    v1 naive: one thread an element.
    v2 vectorised: one thread four channels, by 16-byte loads and stores.
LAUNCH
    one thread an element of y (v1) or four (v2), 256 a block. No shared memory.
DETERMINISM
    a copy: no arithmetic at all.
COST
    bytes: x is read once from memory, y is written, rows·columns as large where the stride is 1. Roof: memory
    bandwidth.
SOURCE
    Chellapilla, Puri and Simard 2006, "High Performance Convolutional Neural Networks for Document Processing"
READ NEXT
    pooling.py
"""

from typing import NamedTuple

import numpy as np

from ....device import cuda, empty, float32, int32, launch, load4, store4
from ....device.common import divide
from ....errors import TooManyElementsError
from ....kernels.operation import Problem, lacks_multiple, naive_and_vectorised, operation, single

BLOCK = 256  # threads


class SlidingWindow(NamedTuple):
    """Extents of x, of the output and of a window, its stride, and the padding above and to the
    left."""

    H: int
    W: int
    C: int
    Ho: int
    Wo: int
    rows: int
    columns: int
    stride: int
    top: int
    left: int


def sliding_window(shape, size, stride, padding):
    """The `SlidingWindow` of x's shape (B, H, W, C), a window (rows, columns) and padding (top,
    left), which is the same at the other end."""
    _, H, W, C = shape
    extents = [
        (n + 2 * pad - k) // stride + 1 for n, k, pad in zip((H, W), size, padding, strict=True)
    ]
    return SlidingWindow(H, W, C, *extents, *size, stride, *padding)


# Reference ----------------------------------------------------------------------------------------


def patches_forward_reference(x, size, stride=1, padding=(0, 0)):
    (top, left), (rows, columns) = padding, size
    if top or left:
        x = np.pad(x, ((0, 0), (top, top), (left, left), (0, 0)))
    found = np.lib.stride_tricks.sliding_window_view(x, (rows, columns), (1, 2))
    found = found[:, ::stride, ::stride].transpose(0, 1, 2, 4, 5, 3)
    return np.ascontiguousarray(found).reshape(*found.shape[:3], -1)


# Device function ----------------------------------------------------------------------------------


@cuda.jit(device=True)
def source_of_patch(n, window):
    """Index into x of element n of y; -1 where that is padding."""
    rest, c = divide(n, window.C)
    rest, s = divide(rest, window.columns)
    rest, r = divide(rest, window.rows)
    rest, j = divide(rest, window.Wo)
    b, i = divide(rest, window.Ho)
    h = int32(i * window.stride + r - window.top)
    w = int32(j * window.stride + s - window.left)
    if h >= 0 and h < window.H and w >= 0 and w < window.W:
        return int32(((b * window.H + h) * window.W + w) * window.C + c)
    return int32(-1)


# v1: one thread an element ------------------------------------------------------------------------


@cuda.jit
def patches_forward_kernel_v1(x, y, window):
    n = cuda.grid(1)
    if n < y.size:
        source = source_of_patch(n, window)
        y[n] = x[source] if source >= 0 else float32(0)


# v2: one thread four channels ---------------------------------------------------------------------
# The divisions that find a thread's pixel cost more than its load; here four channels share them.


@cuda.jit
def patches_forward_kernel_v2(x, y, window):
    n = cuda.grid(1) * 4
    if n < y.size:
        source = source_of_patch(n, window)
        v0 = v1 = v2 = v3 = float32(0)
        if source >= 0:
            v0, v1, v2, v3 = load4(x, source)
        store4(y, n, v0, v1, v2, v3)


# Operation ----------------------------------------------------------------------------------------


def check_window(x, size, stride, padding):
    if x.ndim != 4 or stride < 1 or min(sliding_window(x.shape, size, stride, padding)) < 0:
        raise ValueError(
            f"windows of {size[0]} × {size[1]} with stride {stride} of an array {tuple(x.shape)}: it "
            "must be (B, H, W, C), as large as a window, and the stride at least 1"
        )


def launch_windows(version, x, y, *arguments):
    """Launch a kernel with a thread for each element of y, or for each four."""
    if max(x.size, y.size) >= 2**31 - 4 * BLOCK:
        raise TooManyElementsError(
            f"{tuple(x.shape)} or {tuple(y.shape)} has too many elements for 32-bit indices: split "
            "the batch"
        )
    blocks = -(-y.size // version.width // BLOCK)
    launch(version.kernel, blocks, BLOCK, x.reshape(-1), y.reshape(-1), *arguments)
    return y


def fits_four_channels(x):
    return lacks_multiple(4, x.shape[3], "channels")


@operation(
    reference=patches_forward_reference,
    cost=lambda x, size, stride, padding: (
        4 * x.size + 4 * np.prod(_shape(x, size, stride, padding)),
        0,
    ),
    check=check_window,
    versions=naive_and_vectorised(
        patches_forward_kernel_v1, patches_forward_kernel_v2, fits=fits_four_channels
    ),
    problems=[
        Problem(x=single(2, 5, 6, 4), size=(3, 3), stride=2, tolerance=0.0),
        Problem(x=single(1, 4, 9, 8), size=(1, 7), padding=(0, 3), tolerance=0.0),
        Problem(x=single(2, 7, 5, 3), size=(5, 1), padding=(2, 0), tolerance=0.0),
        Problem(x=single(64, 147, 147, 32), size=(3, 3), padding=(1, 1), measured="not yet"),
    ],
)
def patches_forward(x, size, stride=1, padding=(0, 0), version=None):
    """The patches (B, Ho, Wo, rows·columns·C) of x (B, H, W, C), as a new array.

    size: (rows, columns) of a window; padding: zeros (above and below, left and right)
    """
    y = empty(_shape(x, size, stride, padding), like=x)
    return launch_windows(version, x, y, sliding_window(x.shape, size, stride, padding))


def _shape(x, size, stride, padding):
    window = sliding_window(x.shape, size, stride, padding)
    return x.shape[0], window.Ho, window.Wo, size[0] * size[1] * window.C
