"""Convolution in two dimensions: 88 % of a UNet's arithmetic, and a matmul in disguise.

MATHEMATICS
    forward   y[b,i,j,n] = bias[n] + Σ_rsc x[b, i·stride + r - pad, j·stride + s - pad, c] · weight[n,r,s,c]
              x is zero outside the image, pad = kernel // 2
    Call the K = kernel²·C_in numbers that one output pixel sees a row of col (im2col.py), and let a pixel be a row:
              y = col · weightᵀ + bias
    backward  dcol = dy · weight, so dx = col2im(dcol);  dweight += dyᵀ · col;  dbias += Σ_pixels dy
    With stride 1, dx is itself a convolution. x[h,w] reached y[h + pad - r, w + pad - s] through tap (r,s); count the
    taps from the other end, r' = kernel - 1 - r, and that is y[h + r' - pad, w + s' - pad]:
              dx = conv2d(dy, flipped),  flipped[c,r',s',n] = weight[n, kernel-1-r', kernel-1-s', c]
SHAPES
    x (B, H, W, C_in), weight (C_out, kernel, kernel, C_in), bias (C_out,) or None, y (B, Ho, Wo, C_out), float32
    kernel odd, any stride; Ho = (H - 1) // stride + 1
VERSIONS
    v1 one thread an output, straight from the formula. Every product costs two loads.
    v2 im2col and matmul: the matmul's tiles reuse what they load, but col is kernel² times x, written and read again.
    v3 implicit GEMM (conv2d_implicit.py): the matmul's tiles are filled straight from x; col never exists. For up to
       8 output channels conv2d_narrow.py, since a 64-wide tile would be nearly empty. On an H100, batch 32: 64 to 64
       channels at 64 × 64 run at 36 TFLOP/s, 256 to 128 channels at 32 × 32 at 39.
    A 1 × 1 convolution of stride 1 is a linear layer over pixels, and goes to linear.py. The input gradient of a
    strided convolution stays with v2 in v3: only every stride-th tap would meet a pixel of dy.
LAUNCH
    v1: one thread an output, 256 a block. v2: as im2col.py and matmul/. v3: see its file.
DETERMINISM
    every output's sum has a fixed order; where a sum is cut into parts, a second pass adds them in a fixed order.
COST
    2·pixels·C_out·K FLOPs forward and twice that backward, for reading x, weight and writing y once: at 64 channels and
    3 × 3 taps about 140 FLOPs a byte. Roof: arithmetic.
SOURCE
    LeCun et al. 1989, "Backpropagation Applied to Handwritten Zip Code Recognition"; the GEMM view as in im2col.py; the
    implicit GEMM: Chetlur et al. 2014, "cuDNN", arXiv:1410.0759, section 3.
READ NEXT
    conv2d_implicit.py; before it, matmul/vectorised.py, whose inner loop it borrows.
"""
import numpy as np
from numpy.lib.stride_tricks import as_strided

from ..device import cuda, empty, float32, is_device, launch, over_batch
from .conv2d_implicit import flipped_weight, implicit_forward, implicit_weight_gradient
from .conv2d_narrow import NARROW, narrow_forward, narrow_weight_gradient
from .im2col import divide, im2col_backward, im2col_forward, output_size, reading_pixel
from .linear import linear_backward, linear_forward
from .matmul import matmul_forward
from .reduce import column_sum

BLOCK = 256  # threads
CACHE = 1 << 20  # bytes of rows that the reference multiplies at a time: they should stay in a core's own cache


# Reference ------------------------------------------------------------------------------------------------------------
# The CPU engine, so it must be fast. Channels are innermost, so the `kernel` taps of one row of a window are one run of
# kernel·C numbers, and the runs of image row h serve the windows of `kernel` output rows. We copy those runs once,
# image rows outermost. Then tap row r of all windows is a plain slice, a matrix that BLAS takes as it lies: three
# products of width 3·C in place of one of width 9·C, and a third of im2col's copying.

def tap_rows(x, kernel, stride):
    """(H + 2·pad, B, Wo, kernel·C): entry [h, b, j] is what row h of padded image b shows to the window at column j."""
    b, h, w, c = x.shape
    pad = kernel // 2
    padded = np.zeros((h + 2 * pad, b, w + 2 * pad, c), x.dtype)
    padded[pad:pad + h, :, pad:pad + w] = x.transpose(1, 0, 2, 3)
    row, image, column, channel = padded.strides
    shape = (h + 2 * pad, b, output_size(w, stride), kernel * c)
    return np.ascontiguousarray(as_strided(padded, shape, (row, image, stride * column, channel)))


def cache_sized(x, kernel, share):
    """The images of the slice `share`, as slices of so many as make CACHE bytes of tap rows (one at least)."""
    images = max(1, CACHE // (kernel * x[:1].nbytes))
    return [slice(i, min(i + images, share.stop)) for i in range(share.start, share.stop, images)]


def conv2d_forward_reference(x, weight, bias=None, stride=1):
    n, kernel, _, c = weight.shape
    b, ho, wo = len(x), output_size(x.shape[1], stride), output_size(x.shape[2], stride)
    taps = weight.transpose(1, 2, 3, 0).reshape(kernel, kernel * c, n)
    y = np.empty((b, ho, wo, n), x.dtype)

    def convolve(share):
        for part in cache_sized(x, kernel, share):
            rows = tap_rows(x[part], kernel, stride)
            total = rows[0:stride * ho:stride].reshape(-1, kernel * c) @ taps[0]
            for r in range(1, kernel):
                total += rows[r:r + stride * ho:stride].reshape(-1, kernel * c) @ taps[r]
            if bias is not None:
                total += bias
            y[part] = total.reshape(ho, -1, wo, n).transpose(1, 0, 2, 3)

    over_batch(convolve, b, kernel * y.size)
    return y


def conv2d_backward_reference(dy, x, weight, dweight, dbias=None, stride=1, need_dx=True):
    n, kernel, _, c = weight.shape
    ho = dy.shape[1]

    def weight_gradient(share):
        dtaps = np.zeros((kernel, n, kernel * c), x.dtype)
        for part in cache_sized(x, kernel, share):
            rows = tap_rows(x[part], kernel, stride)
            transposed = dy[part].transpose(1, 0, 2, 3).reshape(-1, n).T
            for r in range(kernel):
                dtaps[r] += transposed @ rows[r:r + stride * ho:stride].reshape(-1, kernel * c)
        return dtaps.transpose(1, 0, 2).reshape(dweight.shape)

    for part in over_batch(weight_gradient, len(x), kernel * dy.size):
        dweight += part
    if dbias is not None:
        column_sum(dy, dbias)
    if not need_dx:
        return None
    if stride > 1:  # a strided convolution is one of stride 1, of whose pixels the others are thrown away
        spread = np.zeros((*x.shape[:3], n), dy.dtype)
        spread[:, ::stride, ::stride] = dy
        dy = spread
    return conv2d_forward_reference(dy, weight[:, ::-1, ::-1].transpose(3, 1, 2, 0))


# v1: one thread an output ---------------------------------------------------------------------------------------------
# The output channel is innermost, so the threads of a warp share a pixel's window, and differ in the weight's row.

@cuda.jit
def conv2d_forward_kernel_v1(x, weight, bias, y, H, W, C, Ho, Wo, N, kernel, stride, has_bias):
    out = cuda.grid(1)
    if out < y.size:
        pixel, n = divide(out, N)
        row, j = divide(pixel, Wo)
        image, i = divide(row, Ho)
        total = bias[n] if has_bias else float32(0)
        for r in range(kernel):
            h = i * stride + r - kernel // 2
            for s in range(kernel):
                w = j * stride + s - kernel // 2
                if h >= 0 and h < H and w >= 0 and w < W:
                    for c in range(C):
                        total += x[((image * H + h) * W + w) * C + c] * weight[((n * kernel + r) * kernel + s) * C + c]
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
                        total += (dy[((image * Ho + i) * Wo + j) * N + n]
                                  * weight[((n * kernel + r) * kernel + s) * C + c])
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
                row_total = float32(0)  # sums of sums: a running sum over 100,000 pixels would lose two digits
                for j in range(Wo):
                    w = j * stride + s - kernel // 2
                    if h >= 0 and h < H and w >= 0 and w < W:
                        row_total += dy[((image * Ho + i) * Wo + j) * N + n] * x[((image * H + h) * W + w) * C + c]
                total += row_total
        dweight[out] += total


# Launchers ------------------------------------------------------------------------------------------------------------

def _check(x, weight, stride, version):
    """Raise what is wrong with the operands, in words that say what to do."""
    if len(x.shape) != 4 or len(weight.shape) != 4 or x.shape[3] != weight.shape[3]:
        raise ValueError(f"x (B, H, W, C_in) and weight (C_out, kernel, kernel, C_in) are {tuple(x.shape)} and "
                         f"{tuple(weight.shape)}: four axes each, channels last and equal")
    if weight.shape[1] != weight.shape[2] or weight.shape[1] % 2 == 0 or stride < 1:
        raise ValueError(f"a kernel of {weight.shape[1]} × {weight.shape[2]} and stride {stride}: the kernel must be "
                         "square and odd, the stride at least 1")
    if version not in (None, 1, 2, 3):
        raise ValueError(f"there is no version {version}: use 1, 2, 3, or None for the fastest")
    if is_device(x) and (x.dtype != np.float32 or weight.dtype != np.float32):
        raise ValueError(f"x and weight are {x.dtype} and {weight.dtype}: cast them to float32")


def _check_size(*arrays):
    if max(a.size for a in arrays) >= 2**31:
        raise ValueError(f"shapes {[tuple(a.shape) for a in arrays]}: an array of 2**31 elements or more is too large "
                         "for 32-bit indices; split the batch")


def _columns(x, kernel, stride):
    """im2col's rows as a matrix; for a 1 × 1 kernel of stride 1 that is x itself."""
    col = x if kernel == stride == 1 else im2col_forward(x, kernel, stride)
    return col.reshape(-1, kernel * kernel * x.shape[3])


def conv2d_forward(x, weight, bias=None, stride=1, version=None):
    """Convolution of x (B, H, W, C_in), padded by kernel // 2, as a new array (B, Ho, Wo, C_out)."""
    _check(x, weight, stride, version)
    n, kernel, _, c = weight.shape
    if kernel == stride == 1 and version is None:
        return linear_forward(x, weight.reshape(n, c), bias)
    if not is_device(x):
        return conv2d_forward_reference(x, weight, bias, stride)
    b, h, w, _ = x.shape
    ho, wo = output_size(h, stride), output_size(w, stride)
    if version == 2:
        y = matmul_forward(_columns(x, kernel, stride), weight.reshape(n, -1), transpose_b=True, bias=bias)
        return y.reshape(b, ho, wo, n)
    y = empty((b, ho, wo, n), like=x)
    _check_size(x, weight, y)
    if version == 1:
        launch(conv2d_forward_kernel_v1, -(-y.size // BLOCK), BLOCK, x.reshape(-1), weight.reshape(-1),
               weight.reshape(-1) if bias is None else bias, y.reshape(-1), h, w, c, ho, wo, n, kernel, stride,
               int(bias is not None))
    elif n <= NARROW:
        narrow_forward(x, weight, bias, y, stride)
    else:
        implicit_forward(x, weight, bias, y, stride)
    return y


def conv2d_backward(dy, x, weight, dweight, dbias=None, stride=1, need_dx=True, version=None):
    """dx as a new array (None unless `need_dx`); the parameters' gradients are added into dweight and dbias."""
    _check(x, weight, stride, version)
    n, kernel, _, c = weight.shape
    b, h, w, _ = x.shape
    ho, wo = output_size(h, stride), output_size(w, stride)
    if tuple(dweight.shape) != tuple(weight.shape) or tuple(dy.shape) != (b, ho, wo, n):
        raise ValueError(f"dweight {tuple(dweight.shape)} must have weight's shape {tuple(weight.shape)}, and dy "
                         f"{tuple(dy.shape)} the output's, {(b, ho, wo, n)}")
    if kernel == stride == 1 and version is None:
        dx = linear_backward(dy, x, weight.reshape(n, c), dweight.reshape(n, c), dbias, need_dx)
        return dx
    if not is_device(x):
        return conv2d_backward_reference(dy, x, weight, dweight, dbias, stride, need_dx)
    _check_size(x, weight, dy)
    if dbias is not None:
        column_sum(dy, dbias)
    _add_weight_gradient(dy, x, dweight, stride, version)
    return _input_gradient(dy, weight, x, stride, version) if need_dx else None


def _add_weight_gradient(dy, x, dweight, stride, version):
    n, kernel, _, c = dweight.shape
    b, h, w, _ = x.shape
    if version == 1:
        launch(conv2d_weight_gradient_kernel_v1, -(-dweight.size // BLOCK), BLOCK, dy.reshape(-1), x.reshape(-1),
               dweight.reshape(-1), b, h, w, c, dy.shape[1], dy.shape[2], n, kernel, stride)
    elif version == 2:
        matmul_forward(dy.reshape(-1, n), _columns(x, kernel, stride), transpose_a=True, out=dweight.reshape(n, -1),
                       accumulate=True)
    elif n <= NARROW:
        narrow_weight_gradient(dy, x, dweight, stride)
    else:
        implicit_weight_gradient(dy, x, dweight, stride)


def _input_gradient(dy, weight, x, stride, version):
    n, kernel, _, c = weight.shape
    b, h, w, _ = x.shape
    if version == 1:
        dx = empty(x.shape, like=x)
        launch(conv2d_input_gradient_kernel_v1, -(-dx.size // BLOCK), BLOCK, dy.reshape(-1), weight.reshape(-1),
               dx.reshape(-1), h, w, c, dy.shape[1], dy.shape[2], n, kernel, stride)
        return dx
    if version == 2 or stride > 1:
        dcol = matmul_forward(dy.reshape(-1, n), weight.reshape(n, -1))
        return dcol.reshape(x.shape) if kernel == stride == 1 else im2col_backward(dcol, x.shape, kernel, stride)
    return conv2d_forward(dy, flipped_weight(weight), version=3)


# Cost -----------------------------------------------------------------------------------------------------------------

def conv2d_forward_cost(B, H, W, C_in, C_out, kernel, stride=1):
    """(bytes, FLOPs): every operand once; the FLOPs count padding's zeros too, as everyone's do."""
    pixels = B * output_size(H, stride) * output_size(W, stride)
    taps = kernel * kernel * C_in
    return 4 * (B * H * W * C_in + C_out * taps + C_out + pixels * C_out), 2 * pixels * C_out * taps


def conv2d_input_gradient_cost(B, H, W, C_in, C_out, kernel, stride=1):
    """(bytes, FLOPs) of dx from dy and weight."""
    return conv2d_forward_cost(B, H, W, C_in, C_out, kernel, stride)


def conv2d_weight_gradient_cost(B, H, W, C_in, C_out, kernel, stride=1):
    """(bytes, FLOPs) of dweight and dbias from dy and x."""
    moved, flops = conv2d_forward_cost(B, H, W, C_in, C_out, kernel, stride)
    return moved, flops + B * output_size(H, stride) * output_size(W, stride) * C_out


def conv2d_backward_cost(B, H, W, C_in, C_out, kernel, stride=1, need_dx=True):
    """(bytes, FLOPs) of the whole backward."""
    moved, flops = conv2d_weight_gradient_cost(B, H, W, C_in, C_out, kernel, stride)
    if need_dx:
        more, again = conv2d_input_gradient_cost(B, H, W, C_in, C_out, kernel, stride)
        moved, flops = moved + more, flops + again
    return moved, flops
