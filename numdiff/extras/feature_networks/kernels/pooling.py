"""Pooling over windows of 3 × 3 pixels: the largest, or the mean of those inside of the image.

MATHEMATICS
    max    y[b, i, j, c] = max  x[b, h, w, c]       over the h, w of the window that are inside of x
    mean   y[b, i, j, c] = Σ x[b, h, w, c] / n      n: how many they are, 9 where no padding is seen
    h = i·stride + r - pad, w = j·stride + s - pad, r, s = 0, 1, 2. No gradient: the networks that use it are not
    trained.
SHAPES
    x (B, H, W, C) float32; y (B, Ho, Wo, C), Ho = (H + 2·pad - 3) // stride + 1; pad 0 or 1
VERSIONS
    v1 naive: one thread an output.
    v2 vectorised: one thread four channels, by 16-byte loads and stores.
LAUNCH
    one thread an output (v1) or four (v2), 256 a block. No shared memory.
DETERMINISM
    the sum of a window has a fixed order.
COST
    bytes: x is read once from memory (the caches serve the neighbours' reads), y is written; 9 FLOPs an output.
    Roof: memory bandwidth.
SOURCE
    Szegedy et al. 2016, arXiv:1512.00567, table 1; that padding is not counted is the average pooling of the network
    of 2015-12-05, which Heusel et al. 2017, arXiv:1706.08500, use.
READ NEXT
    activations.py
"""

import numpy as np

from ....device import cuda, empty, float32, int32, load4, store4
from ....device.common import divide
from ....kernels.operation import Problem, naive_and_vectorised, operation, single
from .patches import check_window, fits_four_channels, launch_windows, sliding_window

SIZE = (3, 3)
LOWEST = np.float32(np.finfo(np.float32).min)

# Reference ----------------------------------------------------------------------------------------


def pool_forward_reference(x, mean=False, stride=1, pad=0):
    found = _over_windows(x, np.add if mean else np.maximum, stride, pad, 0 if mean else -np.inf)
    if mean:
        ones = np.ones((1, *x.shape[1:3], 1), x.dtype)
        found /= _over_windows(ones, np.add, stride, pad, 0)
    return found


def _over_windows(x, combine, stride, pad, fill):
    """A ufunc's result over each window of x, which is padded with `fill`."""
    window = sliding_window(x.shape, SIZE, stride, (pad, pad))
    x = np.pad(x, ((0, 0), (pad, pad), (pad, pad), (0, 0)), constant_values=fill) if pad else x
    found = None
    for r in range(SIZE[0]):
        rows = x[:, r : r + stride * (window.Ho - 1) + 1 : stride]
        for s in range(SIZE[1]):
            part = rows[:, :, s : s + stride * (window.Wo - 1) + 1 : stride]
            found = part.copy() if found is None else combine(found, part, out=found)
    return found


# Device functions ---------------------------------------------------------------------------------


@cuda.jit(device=True)
def first_pixel(n, window):
    """(image, row, column, channel) where the window of element n of y begins."""
    rest, c = divide(n, window.C)
    rest, j = divide(rest, window.Wo)
    b, i = divide(rest, window.Ho)
    return b, int32(i * window.stride - window.top), int32(j * window.stride - window.left), c


@cuda.jit(device=True, forceinline=True)
def pooled(before, value, mean):
    return before + value if mean else max(before, value)


# v1: one thread an output -------------------------------------------------------------------------


@cuda.jit
def pool_forward_kernel_v1(x, y, window, mean):
    n = cuda.grid(1)
    if n < y.size:
        b, top, left, c = first_pixel(n, window)
        found, count = float32(0) if mean else LOWEST, float32(0)
        for r in range(3):
            for s in range(3):
                h, w = int32(top + r), int32(left + s)
                if h >= 0 and h < window.H and w >= 0 and w < window.W:
                    value = x[((b * window.H + h) * window.W + w) * window.C + c]
                    found = pooled(found, value, mean)
                    count += float32(1)
        y[n] = found / count if mean else found


# v2: one thread four channels ---------------------------------------------------------------------


@cuda.jit
def pool_forward_kernel_v2(x, y, window, mean):
    n = cuda.grid(1) * 4
    if n < y.size:
        b, top, left, c = first_pixel(n, window)
        p0 = p1 = p2 = p3 = float32(0) if mean else LOWEST
        count = float32(0)
        for r in range(3):
            for s in range(3):
                h, w = int32(top + r), int32(left + s)
                if h >= 0 and h < window.H and w >= 0 and w < window.W:
                    at = ((b * window.H + h) * window.W + w) * window.C + c
                    v0, v1, v2, v3 = load4(x, at)
                    p0, p1 = pooled(p0, v0, mean), pooled(p1, v1, mean)
                    p2, p3 = pooled(p2, v2, mean), pooled(p3, v3, mean)
                    count += float32(1)
        if not mean:
            count = float32(1)
        store4(y, n, p0 / count, p1 / count, p2 / count, p3 / count)


# Operation ----------------------------------------------------------------------------------------


def _shape(x, stride, pad):
    window = sliding_window(x.shape, SIZE, stride, (pad, pad))
    return x.shape[0], window.Ho, window.Wo, window.C


def _cost(x, stride, pad):
    outputs = int(np.prod(_shape(x, stride, pad)))
    return 4 * (x.size + outputs), 9 * outputs


@operation(
    reference=pool_forward_reference,
    cost=_cost,
    check=lambda x, stride, pad: check_window(x, SIZE, stride, (pad, pad)),
    versions=naive_and_vectorised(
        pool_forward_kernel_v1, pool_forward_kernel_v2, fits=fits_four_channels
    ),
    problems=[
        *(
            Problem(
                f"{'mean' if mean else 'max'}, stride {stride}, {C} channels",
                x=single(2, 5, 6, C),
                mean=mean,
                stride=stride,
                pad=pad,
            )
            for mean, stride, pad in ((False, 2, 0), (False, 1, 1), (True, 1, 1))
            for C in (8, 3)
        ),
        Problem(x=single(64, 35, 35, 288), mean=True, pad=1, measured="not yet"),
    ],
)
def pool_forward(x, mean=False, stride=1, pad=0, version=None):
    """The largest of each window of 3 × 3 pixels of x (B, H, W, C), or their mean, as a new array."""
    y = empty(_shape(x, stride, pad), like=x)
    window = sliding_window(x.shape, SIZE, stride, (pad, pad))
    return launch_windows(version, x, y, window, int(mean))
