"""Convolution in two dimensions: 88 % of a UNet's arithmetic, and a matmul in disguise.

MATHEMATICS
    forward   y[b,i,j,n] = bias[n] + Σ_rsc x[b, i·stride + r - pad, j·stride + s - pad, c] · weight[n,r,s,c]
              x is zero outside the image, pad = kernel // 2
    Call the K = kernel²·C_in numbers that one output pixel sees a row of col (im2col.py), and let a pixel be a row:
              y = col · weightᵀ + bias
    backward  dcol = dy · weight, so dx = col2im(dcol);  dweight += dyᵀ · col;  dbias += Σ_pixels dy
              of a vector added to each image's pixels dchannel[b,n] = Σ_ij dy[b,i,j,n]; then dbias += Σ_b of it
    With stride 1, dx is itself a convolution. x[h,w] reached y[h + pad - r, w + pad - s] through tap (r,s); count the
    taps from the other end, r' = kernel - 1 - r, and that is y[h + r' - pad, w + s' - pad]:
              dx = conv2d(dy, flipped),  flipped[c,r',s',n] = weight[n, kernel-1-r', kernel-1-s', c]
SHAPES
    x (B, H, W, C_in), weight (C_out, kernel, kernel, C_in), bias (C_out,) or None, y (B, Ho, Wo, C_out), float32
    or x, weight, y float16, bias float32; optional addends: channel (B, C_out) float32, residual like y
    kernel odd, any stride; Ho = (H - 1) // stride + 1
    x may be a Pair (concat.py), and then dx is one: linear.py takes it as it is, else the two are joined
VERSIONS
    v1 one thread an output, straight from the formula. Every product costs two loads.
    v2 im2col and matmul: the matmul's tiles reuse what they load, but col is kernel² times x, written and read again.
    v3 implicit GEMM (implicit.py): the matmul's tiles are filled straight from x; col never exists. For up to
       8 output channels narrow.py, since a 64-wide tile would be nearly empty. On an H100, batch 32: 64 to 64
       channels at 64 × 64 run at 36 TFLOP/s, 256 to 128 channels at 32 × 32 at 39.
    v4 where the device's switch `tf32` is on: implicit GEMM on tensor cores by mma.sync, operands rounded to tf32
       (tf32.py), sm_80 and later.
    In float16 (sums in float32, the result rounded once; dweight and dbias float32):
    v1 and v3 as above, converting what they load; v3 where one side has up to 8 channels (narrow_half.py).
    v4 implicit GEMM on tensor cores by mma.sync, sm_80 and later, strides too (mma.py).
    v5, v6 by wgmma and the copy engine, sm_90a, stride 1 (hopper.py, hopper_weight_gradient.py, for 3 × 3 taps
        hopper_weight_gradient_3x3.py).
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
    implicit.py, with the inner loop of the matmul ladder's fourth rung.
"""
import math

import numpy as np

from ...device import cuda, empty, float32, is_device, launch, over_batch
from ..any_batch import assumed, blocks, filled
from ..bias import channel_add_backward, channel_add_forward
from ..common import divide
from ..concat import Pair
from ..elementwise import add_forward
from ..linear import linear_backward, linear_forward
from ..matmul import matmul_forward
from ..reduce import column_sum
from . import hopper as conv2d_hopper
from .hopper import hopper_forward, hopper_input_gradient, no_numbers
from .hopper_weight_gradient import hopper_weight_gradient
from .im2col import im2col_backward, im2col_forward, output_size, reading_pixel
from .implicit import flipped_weight, implicit_forward, implicit_weight_gradient
from .mma import mma_forward, mma_input_gradient, mma_takes, mma_weight_gradient
from .narrow import NARROW, narrow_forward, narrow_weight_gradient
from .narrow_half import (
    narrow_gradient_takes,
    narrow_half_forward,
    narrow_half_input_gradient,
    narrow_half_weight_gradient,
    narrow_input_gradient_takes,
    narrow_takes,
)
from .tf32 import tf32_chosen, tf32_forward, tf32_input_gradient, tf32_weight_gradient
from .winograd import winograd_forward, winograd_supports, winograd_weight_gradient

BLOCK = 256  # threads
LEAST_ROWS = 256  # of a product of the reference, where `any_batch` cuts the batch
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
    strides = row, image, stride * column, channel
    return np.ascontiguousarray(np.ndarray(shape, x.dtype, padded, strides=strides))  # `as_strided`, without its 40 µs


def cache_sized(x, kernel, share):
    """The images of the slice `share`, as slices of so many as make CACHE bytes of tap rows (one at least)."""
    images = max(1, CACHE // (kernel * x[:1].nbytes))
    return [slice(i, min(i + images, share.stop)) for i in range(share.start, share.stop, images)]


def conv2d_forward_reference(x, weight, bias=None, stride=1, channel=None, residual=None):
    if x.dtype == np.float16:
        wide = conv2d_forward_reference(x.astype(np.float32), weight.astype(np.float32), bias, stride, channel,
                                        residual)
        return wide.astype(np.float16)
    if winograd_supports(x, weight, stride):
        return winograd_forward(x, weight, bias, channel, residual)
    n, kernel, _, c = weight.shape
    b, ho, wo = len(x), output_size(x.shape[1], stride), output_size(x.shape[2], stride)
    taps = weight.transpose(1, 2, 3, 0).reshape(kernel, kernel * c, n)
    y = np.empty((b, ho, wo, n), x.dtype)

    size = blocks(ho * wo, LEAST_ROWS)

    def convolve(share):
        for part in ([slice(k * size, min((k + 1) * size, b)) for k in range(share.start, share.stop)] if size else
                     cache_sized(x, kernel, share)):
            rows = tap_rows(filled(x[part], size) if size else x[part], kernel, stride)
            total = rows[0:stride * ho:stride].reshape(-1, kernel * c) @ taps[0]
            for r in range(1, kernel):
                total += rows[r:r + stride * ho:stride].reshape(-1, kernel * c) @ taps[r]
            if bias is not None:
                total += bias
            y[part] = total.reshape(ho, -1, wo, n).transpose(1, 0, 2, 3)[:part.stop - part.start]
            if channel is not None:  # here, where the part still lies in the core's cache
                y[part] += channel[part, None, None]
            if residual is not None:
                y[part] += residual[part]

    over_batch(convolve, -(-b // size) if size else b, kernel * y.size)
    return y


def conv2d_backward_reference(dy, x, weight, dweight, dbias=None, stride=1, need_dx=True):
    if x.dtype == np.float16:
        dx = conv2d_backward_reference(*(a.astype(np.float32) for a in (dy, x, weight)), dweight, dbias, stride,
                                       need_dx)
        return dx.astype(np.float16) if need_dx else None
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

    if winograd_supports(x, weight, stride):
        winograd_weight_gradient(dy, x, dweight)
    else:
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
def conv2d_forward_kernel_v1(x, weight, bias, channel, residual, y, H, W, C, Ho, Wo, N, kernel, stride, has_bias,
                             has_channel, has_residual):
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
                        total += (float32(x[((image * H + h) * W + w) * C + c])
                                  * float32(weight[((n * kernel + r) * kernel + s) * C + c]))
        if has_channel:
            total += channel[image * N + n]
        if has_residual:
            total += float32(residual[out])
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
                        total += (float32(dy[((image * Ho + i) * Wo + j) * N + n])
                                  * float32(weight[((n * kernel + r) * kernel + s) * C + c]))
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
                        row_total += (float32(dy[((image * Ho + i) * Wo + j) * N + n])
                                      * float32(x[((image * H + h) * W + w) * C + c]))
                total += row_total
        dweight[out] += total


# Launchers ------------------------------------------------------------------------------------------------------------

PREFERRED = 3, 6, 5, 4, 1  # of the float16 versions, the fastest first
WORTH_STATISTICS = 8 << 20  # bytes of a result: GroupNorm gains less on a smaller one than they cost
VERSIONS = {np.dtype(np.float32): (1, 2, 3, 4), np.dtype(np.float16): (1, 3, 4, 5, 6)}


def _check(x, weight, stride, version):
    """Raise what is wrong with the operands, in words that say what to do."""
    if len(x.shape) != 4 or len(weight.shape) != 4 or x.shape[3] != weight.shape[3]:
        raise ValueError(f"x (B, H, W, C_in) and weight (C_out, kernel, kernel, C_in) are {tuple(x.shape)} and "
                         f"{tuple(weight.shape)}: four axes each, channels last and equal")
    if weight.shape[1] != weight.shape[2] or weight.shape[1] % 2 == 0 or stride < 1:
        raise ValueError(f"a kernel of {weight.shape[1]} × {weight.shape[2]} and stride {stride}: the kernel must be "
                         "square and odd, the stride at least 1")
    if is_device(x) and (x.dtype not in VERSIONS or weight.dtype != x.dtype):
        raise ValueError(f"x and weight are {x.dtype} and {weight.dtype}: cast both to float32, or both to float16")
    known = VERSIONS.get(x.dtype, VERSIONS[np.dtype(np.float32)])
    if version is not None and version not in known:
        raise ValueError(f"there is no version {version} in {x.dtype}: use one of {known}, or None for the fastest")


def _check_addends(y_shape, bias, channel, residual):
    n = y_shape[3]
    for name, array, shape in (("bias", bias, (n,)), ("channel", channel, (y_shape[0], n)),
                               ("residual", residual, y_shape)):
        if array is not None and tuple(array.shape) != tuple(shape):
            raise ValueError(f"{name} has shape {tuple(array.shape)}, this convolution needs {tuple(shape)}")


def _half_version(x, weight, stride, version, taken):
    """The version for float16 operands: the forced one, where it takes them, or the fastest that does.

    taken: {version: whether it takes this pass}
    """
    if version is not None:
        if not taken.get(version, True):
            raise ValueError(f"version {version} does not take x {tuple(x.shape)}, weight {tuple(weight.shape)} and "
                             f"stride {stride} on this device; use version=1, or None for the fastest")
        return version
    return next(v for v in PREFERRED if taken.get(v, True))


def _check_size(*arrays):
    if max(a.size for a in arrays) >= 2**31:
        raise ValueError(f"shapes {[tuple(a.shape) for a in arrays]}: an array of 2**31 elements or more is too large "
                         "for 32-bit indices; split the batch")


def _columns(x, kernel, stride):
    """im2col's rows as a matrix; for a 1 × 1 kernel of stride 1 that is x itself."""
    col = x if kernel == stride == 1 else im2col_forward(x, kernel, stride)
    return col.reshape(-1, kernel * kernel * x.shape[3])


def channel_statistics(x, weight, stride=1, least=WORTH_STATISTICS):
    """A new array for the statistics of a convolution's result (groupnorm/normalise.py), or None where none come.

    Hopper's float16 kernel leaves them, beside a result of `least` bytes or more whose images 8 × 8 pixels tile.
    """
    shape = None
    if not isinstance(x, Pair) and is_device(x) and conv2d_hopper.can_run(x, weight, stride):
        result = *x.shape[:3], weight.shape[0]
        if assumed(math.prod(result)) * x.dtype.itemsize >= least:
            shape = conv2d_hopper.statistics_shape(result)
    return None if shape is None else empty(shape, np.float32, like=x)


def conv2d_forward(x, weight, bias=None, stride=1, version=None, channel=None, residual=None, statistics=None):
    """Convolution of x (B, H, W, C_in), padded by kernel // 2, as a new array (B, Ho, Wo, C_out).

    channel (B, C_out), residual (like the result): added to it before it is rounded
    statistics: of `channel_statistics`, to be written
    """
    _check(x, weight, stride, version)
    n, kernel, _, c = weight.shape
    b, h, w, _ = x.shape
    ho, wo = output_size(h, stride), output_size(w, stride)
    _check_addends((b, ho, wo, n), bias, channel, residual)
    plain = channel is None and residual is None
    if statistics is not None:
        if version not in (None, 5, 6):
            raise ValueError(f"version {version} leaves no statistics; use version=6, or None")
        version = version or 6
    if kernel == stride == 1 and version is None and plain:
        return linear_forward(x, weight.reshape(n, c), bias)
    if isinstance(x, Pair):
        x = x.joined()
    if not is_device(x):
        return conv2d_forward_reference(x, weight, bias, stride, channel, residual)
    y = empty((b, ho, wo, n), x.dtype, like=x)
    _check_size(x, weight, y)
    if x.dtype == np.float16:
        version = _half_version(x, weight, stride, version, {
            3: narrow_takes(x, weight, stride, plain), 4: mma_takes(x, weight),
            5: conv2d_hopper.can_run(x, weight, stride), 6: conv2d_hopper.can_run(x, weight, stride)})
        if version >= 5:
            return hopper_forward(x, weight, bias, y, channel, residual, version == 6, statistics)
        if version == 4:
            return mma_forward(x, weight, bias, y, stride, channel, residual)
        if version == 3:
            return narrow_half_forward(x, weight, bias, y)
    elif tf32_chosen(x, weight, version):
        return tf32_forward(x, weight, bias, y, stride, channel, residual)
    elif not plain and version != 1:
        y = conv2d_forward(x, weight, bias, stride, version)
        y = y if channel is None else channel_add_forward(y, channel)
        return y if residual is None else add_forward(y, residual)
    if version == 2:
        y = matmul_forward(_columns(x, kernel, stride), weight.reshape(n, -1), transpose_b=True, bias=bias)
        return y.reshape(b, ho, wo, n)
    if version == 1:
        nothing = no_numbers(x.backend)
        launch(conv2d_forward_kernel_v1, -(-y.size // BLOCK), BLOCK, x.reshape(-1), weight.reshape(-1),
               nothing if bias is None else bias, nothing if channel is None else channel.reshape(-1),
               x.reshape(-1) if residual is None else residual.reshape(-1), y.reshape(-1), h, w, c, ho, wo, n, kernel,
               stride, int(bias is not None), int(channel is not None), int(residual is not None))
    elif n <= NARROW:
        narrow_forward(x, weight, bias, y, stride)
    else:
        implicit_forward(x, weight, bias, y, stride)
    return y


def conv2d_backward(dy, x, weight, dweight, dbias=None, stride=1, need_dx=True, version=None, need_channel=False):
    """dx as a new array (None unless `need_dx`); the parameters' gradients are added into dweight and dbias.

    need_channel: returns (dx, the gradient (B, C_out) of `channel`)
    """
    _check(x, weight, stride, version)
    n, kernel, _, c = weight.shape
    b, h, w, _ = x.shape
    ho, wo = output_size(h, stride), output_size(w, stride)
    if tuple(dweight.shape) != tuple(weight.shape) or tuple(dy.shape) != (b, ho, wo, n):
        raise ValueError(f"dweight {tuple(dweight.shape)} must have weight's shape {tuple(weight.shape)}, and dy "
                         f"{tuple(dy.shape)} the output's, {(b, ho, wo, n)}")
    given, is_linear = x, kernel == stride == 1 and version is None
    if isinstance(x, Pair) and not is_linear:
        x = x.joined()
    if is_linear:
        dchannel, dbias = _sums(dy, dbias, need_channel)
        dx = linear_backward(dy, x, weight.reshape(n, c), dweight.reshape(n, c), dbias, need_dx)
    elif not is_device(x):
        dchannel, dbias = _sums(dy, dbias, need_channel)
        dx = conv2d_backward_reference(dy, x, weight, dweight, dbias, stride, need_dx)
    else:
        _check_size(x, weight, dy)
        if x.dtype == np.float16:
            if dy.dtype != np.float16 or dweight.dtype != np.float32:
                raise ValueError(f"dy and dweight are {dy.dtype} and {dweight.dtype}: with x in float16 they must be "
                                 "float16 and float32")
            dchannel = _add_half_gradients(dy, x, weight, dweight, dbias, stride, version, need_channel)
            dx = _half_input_gradient(dy, weight, x, stride, version) if need_dx else None
        else:
            dchannel, dbias = _sums(dy, dbias, need_channel)
            if dbias is not None:
                column_sum(dy, dbias)
            _add_weight_gradient(dy, x, dweight, stride, version)
            dx = _input_gradient(dy, weight, x, stride, version) if need_dx else None
    if x is not given and need_dx:
        dx = given.parted(dx)
    return (dx, dchannel) if need_channel else dx


def _sums(dy, dbias, need_channel):
    """(the gradient of `channel` or None, dbias where it is still to be added to): one pass over dy is enough."""
    if not need_channel:
        return None, dbias
    dchannel = channel_add_backward(dy if is_device(dy) or dy.dtype != np.float16 else dy.astype(np.float32))
    if dbias is not None:
        column_sum(dchannel, dbias)
    return dchannel, None


def _add_half_gradients(dy, x, weight, dweight, dbias, stride, version, need_channel=False):
    """dweight and dbias from float16 arrays; returns the gradient of `channel`, or None."""
    hopper = conv2d_hopper.can_run(x, weight, stride)
    version = _half_version(x, weight, stride, version, {
        3: narrow_gradient_takes(x, weight, stride), 4: mma_takes(x, weight), 5: hopper, 6: hopper})
    if version >= 5:
        return hopper_weight_gradient(dy, x, dweight, dbias, whole_halo=version == 6, need_channel=need_channel)
    dchannel, dbias = _sums(dy, dbias, need_channel)
    summed = version == 3 and narrow_half_weight_gradient(dy, x, dweight, dbias)
    if dbias is not None and not summed:
        column_sum(dy, dbias)
    if version == 4:
        mma_weight_gradient(dy, x, dweight, stride)
    elif version == 1:
        _add_weight_gradient(dy, x, dweight, stride, 1)
    return dchannel


def _half_input_gradient(dy, weight, x, stride, version):
    hopper = conv2d_hopper.can_run(x, weight, stride)
    version = _half_version(x, weight, stride, version, {
        3: narrow_input_gradient_takes(dy, weight, stride), 4: mma_takes(x, weight), 5: hopper, 6: hopper})
    if version == 1:
        return _input_gradient(dy, weight, x, stride, 1)
    dx = empty(x.shape, x.dtype, like=x)
    if version >= 5:
        return hopper_input_gradient(dy, weight, dx, whole_halo=version == 6)
    if version == 4:
        return mma_input_gradient(dy, weight, dx, stride)
    return narrow_half_input_gradient(dy, weight, dx)


def _add_weight_gradient(dy, x, dweight, stride, version):
    n, kernel, _, c = dweight.shape
    b, h, w, _ = x.shape
    if tf32_chosen(x, dweight, version):
        tf32_weight_gradient(dy, x, dweight, stride)
    elif version == 1:
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
    if stride == 1 and tf32_chosen(x, weight, version):
        return tf32_input_gradient(dy, weight, empty(x.shape, x.dtype, like=x))
    if version == 1:
        dx = empty(x.shape, x.dtype, like=x)
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
