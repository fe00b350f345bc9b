"""im2col and col2im: a convolution's neighbourhoods as the rows of a matrix, and the way back.

MATHEMATICS
    forward   col[b,i,j,r,s,c] = x[b, i·stride + r - pad, j·stride + s - pad, c], pad = kernel // 2; zero outside x
    backward  dx[b,h,w,c] = Σ dcol[b,i,j,r,s,c] over all taps (r,s) and output pixels (i,j) that read (h,w):
              i·stride = h + pad - r and j·stride = w + pad - s
    A row of col holds all that one output pixel sees, so convolution becomes col · weightᵀ: im2col
    copies, matmul adds.
SHAPES
    x, dx (B, H, W, C); col, dcol (B, Ho, Wo, kernel, kernel, C), Ho = (H - 1) // stride + 1;
    float32; kernel odd
VERSIONS
    v1 naive: one thread a number. The channels are innermost, so neighbouring threads read and
       write neighbouring addresses.
    v2 vectorised: one thread four channels, by 16-byte loads and stores; the index arithmetic is
    shared by the four.
LAUNCH
    one thread an output (v1) or four (v2), 256 a block. No shared memory.
DETERMINISM
    col2im gathers: each thread owns outputs and adds the taps that read them in a fixed order. The
    obvious scatter, one thread a column entry, would need atomic additions, whose order changes
    from run to run.
COST
    bytes: col is kernel² times as large as x, and is written and then read by the matmul. Roof:
    memory bandwidth, which is why implicit.py never writes it.
SOURCE
    Chellapilla, Puri and Simard 2006, "High Performance Convolutional Neural Networks for Document
    Processing"
READ NEXT
    implicit.py, which multiplies these rows and never writes them.
"""

import numpy as np

from ...device import cuda, empty, float32, int32, launch, load4, store4
from ...device.common import divide
from ...errors import TooManyElementsError
from ..operation import Problem, half, lacks_multiple, naive_and_vectorised, operation, single

BLOCK = 256  # threads


# References ---------------------------------------------------------------------------------------


def output_size(size, stride):
    """Pixels along an axis of `size` pixels after a convolution of any odd kernel, padded by kernel
    // 2."""
    return (size - 1) // stride + 1


def im2col_forward_reference(x, kernel, stride=1):
    b, h, w, c = x.shape
    pad, ho, wo = kernel // 2, output_size(h, stride), output_size(w, stride)
    padded = np.zeros((b, h + 2 * pad, w + 2 * pad, c), x.dtype)
    padded[:, pad : pad + h, pad : pad + w] = x
    col = np.empty((b, ho, wo, kernel, kernel, c), x.dtype)
    for r in range(kernel):
        for s in range(kernel):
            col[:, :, :, r, s] = padded[
                :, r : r + stride * ho : stride, s : s + stride * wo : stride
            ]
    return col


def im2col_backward_reference(dcol, x_shape, kernel, stride=1):
    b, h, w, c = x_shape
    pad, ho, wo = kernel // 2, output_size(h, stride), output_size(w, stride)
    padded = np.zeros((b, h + 2 * pad, w + 2 * pad, c), dcol.dtype)
    for r in range(kernel):
        for s in range(kernel):
            padded[:, r : r + stride * ho : stride, s : s + stride * wo : stride] += dcol[
                :, :, :, r, s
            ]
    return np.ascontiguousarray(padded[:, pad : pad + h, pad : pad + w])


# Device functions ---------------------------------------------------------------------------------


@cuda.jit(device=True)
def source_pixel(pixel, tap, H, W, Ho, Wo, kernel, stride):
    """Index of the input pixel that output pixel `pixel` reads through `tap`; -1 where that is
    padding."""
    image, rest = divide(pixel, int32(Ho * Wo))
    i, j = divide(rest, Wo)
    r, s = divide(tap, kernel)
    h = int32(i * stride + r - kernel // 2)
    w = int32(j * stride + s - kernel // 2)
    if h >= 0 and h < H and w >= 0 and w < W:
        return int32((image * H + h) * W + w)
    return int32(-1)


@cuda.jit(device=True)
def reading_pixel(h, r, Ho, kernel, stride):
    """Output row (or column) that reads input row `h` through row `r` of the taps; -1 where none
    does."""
    distance = int32(h + kernel // 2 - r)
    if distance < 0:
        return int32(-1)
    i, rest = divide(distance, stride)
    return i if rest == 0 and i < Ho else int32(-1)


# v1: one thread a number --------------------------------------------------------------------------


@cuda.jit
def im2col_forward_kernel_v1(x, col, H, W, C, Ho, Wo, kernel, stride):
    n = cuda.grid(1)
    if n < col.size:
        rest, c = divide(n, C)
        pixel, tap = divide(rest, kernel * kernel)
        source = source_pixel(pixel, tap, H, W, Ho, Wo, kernel, stride)
        col[n] = x[source * C + c] if source >= 0 else float32(0)


@cuda.jit
def im2col_backward_kernel_v1(dcol, dx, H, W, C, Ho, Wo, kernel, stride):
    n = cuda.grid(1)
    if n < dx.size:
        rest, c = divide(n, C)
        rest, w = divide(rest, W)
        image, h = divide(rest, H)
        total = float32(0)
        for r in range(kernel):
            i = reading_pixel(h, r, Ho, kernel, stride)
            for s in range(kernel):
                j = reading_pixel(w, s, Wo, kernel, stride)
                if i >= 0 and j >= 0:
                    total += dcol[((((image * Ho + i) * Wo + j) * kernel + r) * kernel + s) * C + c]
        dx[n] = total


# v2: one thread four channels ---------------------------------------------------------------------
# The divisions that find a thread's pixel and tap cost more than its load; here four channels share
# them.


@cuda.jit
def im2col_forward_kernel_v2(x, col, H, W, C, Ho, Wo, kernel, stride):
    n = cuda.grid(1) * 4
    if n < col.size:
        rest, c = divide(n, C)
        pixel, tap = divide(rest, kernel * kernel)
        source = source_pixel(pixel, tap, H, W, Ho, Wo, kernel, stride)
        v0 = v1 = v2 = v3 = float32(0)
        if source >= 0:
            v0, v1, v2, v3 = load4(x, source * C + c)
        store4(col, n, v0, v1, v2, v3)


@cuda.jit
def im2col_backward_kernel_v2(dcol, dx, H, W, C, Ho, Wo, kernel, stride):
    n = cuda.grid(1) * 4
    if n < dx.size:
        rest, c = divide(n, C)
        rest, w = divide(rest, W)
        image, h = divide(rest, H)
        t0 = t1 = t2 = t3 = float32(0)
        for r in range(kernel):
            i = reading_pixel(h, r, Ho, kernel, stride)
            for s in range(kernel):
                j = reading_pixel(w, s, Wo, kernel, stride)
                if i >= 0 and j >= 0:
                    v0, v1, v2, v3 = load4(
                        dcol, ((((image * Ho + i) * Wo + j) * kernel + r) * kernel + s) * C + c
                    )
                    t0 += v0
                    t1 += v1
                    t2 += v2
                    t3 += v3
        store4(dx, n, t0, t1, t2, t3)


# Cost ---------------------------------------------------------------------------------------------


def im2col_forward_cost(B, H, W, C, kernel, stride=1):
    """(bytes, FLOPs): x is read once from memory (the caches serve its neighbours' reads), col is
    written."""
    pixels = B * output_size(H, stride) * output_size(W, stride)
    return 4 * C * (B * H * W + pixels * kernel * kernel), 0


def im2col_backward_cost(B, H, W, C, kernel, stride=1):
    moved, _ = im2col_forward_cost(B, H, W, C, kernel, stride)
    return moved, B * output_size(H, stride) * output_size(W, stride) * kernel * kernel * C


# Operations ---------------------------------------------------------------------------------------


def _launch_im2col(version, source, target, x_shape, kernel, stride):
    _, h, w, c = x_shape
    if max(source.size, target.size) >= 2**31:
        raise TooManyElementsError(
            f"im2col of {x_shape} has too many elements for 32-bit indices: split the batch"
        )
    launch(
        version.kernel,
        -(-target.size // version.width // BLOCK),
        BLOCK,
        source.reshape(-1),
        target.reshape(-1),
        h,
        w,
        c,
        output_size(h, stride),
        output_size(w, stride),
        kernel,
        stride,
    )
    return target


@operation(
    reference=im2col_forward_reference,
    cost=lambda x, kernel, stride: im2col_forward_cost(*x.shape, kernel, stride),
    versions=naive_and_vectorised(
        im2col_forward_kernel_v1,
        im2col_forward_kernel_v2,
        fits=lambda x: lacks_multiple(4, x.shape[3], "channels"),
    ),
    problems=[
        Problem(x=single(1, 4, 5, 4), kernel=3),
        Problem(x=half(32, 64, 64, 64), kernel=3, measured=True),
    ],
)
def im2col_forward(x, kernel, stride=1, version=None):
    """Every output pixel's neighbourhood (B, Ho, Wo, kernel, kernel, C) of x (B, H, W, C), as a new
    array."""
    b, h, w, c = x.shape
    col = empty((b, output_size(h, stride), output_size(w, stride), kernel, kernel, c), like=x)
    return _launch_im2col(version, x, col, x.shape, kernel, stride)


@operation(
    reference=im2col_backward_reference,
    cost=lambda x_shape, kernel, stride: im2col_backward_cost(*x_shape, kernel, stride),
    versions=naive_and_vectorised(
        im2col_backward_kernel_v1,
        im2col_backward_kernel_v2,
        fits=lambda x_shape: lacks_multiple(4, x_shape[3], "channels"),
    ),
    problems=[
        Problem(dcol=single(1, 4, 5, 3, 3, 4), x_shape=(1, 4, 5, 4), kernel=3),
        Problem(dcol=half(32, 64, 64, 3, 3, 64), x_shape=(32, 64, 64, 64), kernel=3, measured=True),
    ],
)
def im2col_backward(dcol, x_shape, kernel, stride=1, version=None):
    """dx of shape `x_shape`: each pixel's sum over the neighbourhoods that it is in (col2im)."""
    return _launch_im2col(version, dcol, empty(x_shape, like=dcol), x_shape, kernel, stride)
