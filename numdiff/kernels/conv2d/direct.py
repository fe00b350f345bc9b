"""Convolution from the formula: 88 % of a UNet's arithmetic, and a matmul in disguise.

MATHEMATICS
    forward   y[b,i,j,n] = bias[n] + Σ_rsc x[b, i·stride + r - pad, j·stride + s - pad, c] · weight[n,r,s,c]
              x is zero outside the image, pad = kernel // 2
    An output pixel sees K = kernel²·C_in numbers of x. Write them as a row of a matrix col
    (im2col.py), a row for each pixel; then
              y = col · weightᵀ + bias
    backward  dcol = dy · weight, so dx = col2im(dcol);  dweight += dyᵀ · col;  dbias += Σ_pixels dy
              A vector channel[b,n] that was added to all pixels of image b has dchannel[b,n] = Σ_ij
              dy[b,i,j,n]; then dbias += Σ_b dchannel[b]
    With stride 1, dx is itself a convolution. x[h,w] reached y[h + pad - r, w + pad - s] through
    tap (r,s). Count the taps from the other end, r' = kernel - 1 - r, and that is y[h + r' - pad, w
    + s' - pad], because kernel - 1 = 2·pad:
              dx = conv2d(dy, flipped),  flipped[c,r',s',n] = weight[n, kernel-1-r', kernel-1-s', c]
SHAPES
    x (B, H, W, C_in), weight (C_out, kernel, kernel, C_in), bias (C_out,) or None, y (B, Ho, Wo,
    C_out), float32 or x, weight, y float16, bias float32; optional addends: channel (B, C_out)
    float32, residual like y kernel odd, any stride; Ho = (H - 1) // stride + 1
VERSIONS
    v1 direct: one thread an output, straight from the formula. Every product costs two loads.
    v2 im2col: im2col.py and matmul: the matmul's tiles reuse what they load, but col is kernel²
       times x, written and read again.
    What comes after them, and which version runs, is in launcher.py.
LAUNCH
    v1: one thread an output, 256 a block. v2: as im2col.py and matmul/.
DETERMINISM
    every output's sum has a fixed order; v2's as in matmul/.
COST
    2·pixels·C_out·K FLOPs forward and twice that backward, with x and weight read and y written
    once: at 64 channels and 3 × 3 taps about 140 FLOPs a byte. Roof: arithmetic.
SOURCE
    LeCun et al. 1989, "Backpropagation Applied to Handwritten Zip Code Recognition"; the GEMM view
    as in im2col.py.
READ NEXT
    im2col.py; then implicit.py, with the inner loop of the matmul ladder's fourth rung.
"""

from typing import Any, NamedTuple

import numpy as np

from ...device import cuda, float32, launch
from ...device.common import divide, no_numbers
from ...dtypes import in_single
from ..matmul import matmul_forward
from .im2col import im2col_backward, im2col_forward, output_size, reading_pixel

BLOCK = 256  # threads


# Reference ----------------------------------------------------------------------------------------


@in_single()
def conv2d_forward_reference(x, weight, bias=None, stride=1, channel=None, residual=None):
    (b, h, w, _), (n, kernel, _, _) = x.shape, weight.shape
    pad, ho, wo = kernel // 2, output_size(h, stride), output_size(w, stride)
    padded, y = (
        np.pad(x, ((0, 0), (pad, pad), (pad, pad), (0, 0))),
        np.zeros((b, ho, wo, n), x.dtype),
    )
    for r in range(kernel):
        for s in range(kernel):
            y += (
                padded[:, r : r + stride * ho : stride, s : s + stride * wo : stride]
                @ weight[:, r, s].T
            )
    addends = bias, None if channel is None else channel[:, None, None], residual
    return sum((a for a in addends if a is not None), y)


@in_single()
def conv2d_backward_reference(dy, x, weight, dweight, dbias=None, stride=1, need_dx=True):
    (_, h, w, _), (_, ho, wo, _), kernel = x.shape, dy.shape, weight.shape[1]
    pad = kernel // 2
    padded = np.pad(x, ((0, 0), (pad, pad), (pad, pad), (0, 0)))
    dpadded = np.zeros_like(padded)
    for r in range(kernel):
        for s in range(kernel):
            # through this tap, by all outputs
            seen = np.s_[:, r : r + stride * ho : stride, s : s + stride * wo : stride]
            dweight[:, r, s] += np.tensordot(dy, padded[seen], axes=((0, 1, 2), (0, 1, 2)))
            dpadded[seen] += dy @ weight[:, r, s]
    if dbias is not None:
        dbias += dy.sum((0, 1, 2))
    return dpadded[:, pad : pad + h, pad : pad + w] if need_dx else None


class Geometry(NamedTuple):
    """A convolution's geometry: x (·, H, W, C), y (·, Ho, Wo, N), the weight's rows and columns,
    and the stride."""

    H: int
    W: int
    C: int
    Ho: int
    Wo: int
    N: int
    size: int
    stride: int


class Addends(NamedTuple):
    """The addends of the products: bias (N,), channel (B, N), residual as y; each is read only
    where `Added` says."""

    bias: Any
    channel: Any
    residual: Any


class Added(NamedTuple):
    """Which of the `Addends` there are."""

    bias: int
    channel: int
    residual: int


# v1: one thread an output -------------------------------------------------------------------------
# Output channels are innermost, so the threads of a warp share a pixel's window and each reads its
# own row of weights.


@cuda.jit
def conv2d_forward_kernel_v1(x, weight, addends, y, geometry, added):
    H, W, C, Ho, Wo, N, kernel, stride = geometry
    out = cuda.grid(1)
    if out < y.size:
        pixel, n = divide(out, N)
        row, j = divide(pixel, Wo)
        image, i = divide(row, Ho)
        total = addends.bias[n] if added.bias else float32(0)
        for r in range(kernel):
            h = i * stride + r - kernel // 2
            for s in range(kernel):
                w = j * stride + s - kernel // 2
                if h >= 0 and h < H and w >= 0 and w < W:
                    for c in range(C):
                        total += float32(x[((image * H + h) * W + w) * C + c]) * float32(
                            weight[((n * kernel + r) * kernel + s) * C + c]
                        )
        if added.channel:
            total += addends.channel[image * N + n]
        if added.residual:
            total += float32(addends.residual[out])
        y[out] = total


@cuda.jit
def conv2d_input_gradient_kernel_v1(dy, weight, dx, H, W, C, Ho, Wo, N, kernel, stride):
    out = cuda.grid(1)
    if out < dx.size:
        pixel, c = divide(out, C)
        row, w = divide(pixel, W)
        image, h = divide(row, H)
        total = float32(0)
        for r in range(kernel):
            i = reading_pixel(h, r, Ho, kernel, stride)
            for s in range(kernel):
                j = reading_pixel(w, s, Wo, kernel, stride)
                if i >= 0 and j >= 0:
                    for n in range(N):
                        total += float32(dy[((image * Ho + i) * Wo + j) * N + n]) * float32(
                            weight[((n * kernel + r) * kernel + s) * C + c]
                        )
        dx[out] = total


@cuda.jit
def conv2d_weight_gradient_kernel_v1(dy, x, dweight, B, H, W, C, Ho, Wo, N, kernel, stride):
    out = cuda.grid(1)
    if out < dweight.size:
        rest, c = divide(out, C)
        rest, s = divide(rest, kernel)
        n, r = divide(rest, kernel)
        total = float32(0)
        for image in range(B):
            for i in range(Ho):
                h = i * stride + r - kernel // 2
                # one sum for each row: a running sum over 100,000 pixels would lose two digits
                row_total = float32(0)
                for j in range(Wo):
                    w = j * stride + s - kernel // 2
                    if h >= 0 and h < H and w >= 0 and w < W:
                        row_total += float32(dy[((image * Ho + i) * Wo + j) * N + n]) * float32(
                            x[((image * H + h) * W + w) * C + c]
                        )
                total += row_total
        dweight[out] += total


def direct_forward(x, weight, bias, y, stride, channel=None, residual=None):
    """y = conv2d(x, weight) + …, for arrays that launcher.py has checked; so are those of all
    functions below."""
    (_, h, w, c), (_, ho, wo, n), nothing = x.shape, y.shape, no_numbers(x.backend)
    launch(
        conv2d_forward_kernel_v1,
        -(-y.size // BLOCK),
        BLOCK,
        x.reshape(-1),
        weight.reshape(-1),
        Addends(
            nothing if bias is None else bias,
            nothing if channel is None else channel.reshape(-1),
            x.reshape(-1) if residual is None else residual.reshape(-1),
        ),
        y.reshape(-1),
        Geometry(h, w, c, ho, wo, n, weight.shape[1], stride),
        Added(int(bias is not None), int(channel is not None), int(residual is not None)),
    )
    return y


def direct_input_gradient(dy, weight, dx, stride):
    (_, h, w, c), (_, ho, wo, n) = dx.shape, dy.shape
    launch(
        conv2d_input_gradient_kernel_v1,
        -(-dx.size // BLOCK),
        BLOCK,
        dy.reshape(-1),
        weight.reshape(-1),
        dx.reshape(-1),
        h,
        w,
        c,
        ho,
        wo,
        n,
        weight.shape[1],
        stride,
    )
    return dx


def direct_weight_gradient(dy, x, dweight, stride):
    """dweight += the gradient."""
    (b, h, w, c), (_, ho, wo, n) = x.shape, dy.shape
    launch(
        conv2d_weight_gradient_kernel_v1,
        -(-dweight.size // BLOCK),
        BLOCK,
        dy.reshape(-1),
        x.reshape(-1),
        dweight.reshape(-1),
        b,
        h,
        w,
        c,
        ho,
        wo,
        n,
        dweight.shape[1],
        stride,
    )


# v2: a matrix product -----------------------------------------------------------------------------
# A row of col holds what one output pixel sees, so the three passes are three products of the
# matmul ladder.


def columns(x, kernel, stride):
    """im2col's rows as a matrix; for a 1 × 1 kernel of stride 1 that is x itself."""
    col = x if kernel == stride == 1 else im2col_forward(x, kernel, stride)
    return col.reshape(-1, kernel * kernel * x.shape[3])


def columns_forward(x, weight, bias, shape, stride):
    """conv2d(x, weight) + bias as a new array of this shape."""
    n, kernel = weight.shape[:2]
    y = matmul_forward(
        columns(x, kernel, stride), weight.reshape(n, -1), transpose_b=True, bias=bias
    )
    return y.reshape(*shape)


def columns_input_gradient(dy, weight, shape, stride):
    """dx as a new array of this shape."""
    n, kernel = weight.shape[:2]
    dcol = matmul_forward(dy.reshape(-1, n), weight.reshape(n, -1))
    return (
        dcol.reshape(shape)
        if kernel == stride == 1
        else im2col_backward(dcol, shape, kernel, stride)
    )


def columns_weight_gradient(dy, x, dweight, stride, accumulate=True):
    """dweight += the gradient, or = it."""
    n, kernel = dweight.shape[:2]
    matmul_forward(
        dy.reshape(-1, n),
        columns(x, kernel, stride),
        transpose_a=True,
        out=dweight.reshape(n, -1),
        accumulate=accumulate,
    )


# Cost ---------------------------------------------------------------------------------------------


def conv2d_forward_cost(B, H, W, C_in, C_out, kernel, stride=1):
    """(bytes, FLOPs): every operand once; the FLOPs include those with the padding's zeros, as is
    usual."""
    pixels = B * output_size(H, stride) * output_size(W, stride)
    taps = kernel * kernel * C_in
    return 4 * (B * H * W * C_in + C_out * taps + C_out + pixels * C_out), 2 * pixels * C_out * taps


def conv2d_input_gradient_cost(B, H, W, C_in, C_out, kernel, stride=1):
    """(bytes, FLOPs) of dx from dy and weight."""
    moved, flops = conv2d_forward_cost(B, H, W, C_in, C_out, kernel, stride)
    return moved - 4 * C_out, flops  # no bias


def conv2d_weight_gradient_cost(B, H, W, C_in, C_out, kernel, stride=1):
    """(bytes, FLOPs) of dweight and dbias from dy and x; both are added to, so they are read, too."""
    moved, flops = conv2d_forward_cost(B, H, W, C_in, C_out, kernel, stride)
    moved += 4 * C_out * (kernel * kernel * C_in + 1)
    return moved, flops + B * output_size(H, stride) * output_size(W, stride) * C_out


def conv2d_backward_cost(B, H, W, C_in, C_out, kernel, stride=1, need_dx=True):
    """(bytes, FLOPs) of the whole backward."""
    moved, flops = conv2d_weight_gradient_cost(B, H, W, C_in, C_out, kernel, stride)
    if need_dx:
        more, again = conv2d_input_gradient_cost(B, H, W, C_in, C_out, kernel, stride)
        moved, flops = moved + more, flops + again
    return moved, flops
