"""Convolution on the CPU engine: a few large products, on rows that BLAS reads in place.

MATHEMATICS
    that of conv2d/direct.py. Channels are innermost, so the `kernel` taps of one row of a window
    are one run of kernel·C numbers, and the runs of image row h serve the windows of `kernel`
    output rows. We copy those runs once, image rows outermost. Then tap row r of all windows is a
    plain slice, a matrix that BLAS reads in place: three products of width 3·C instead of one of
    width 9·C, and a third of im2col's copying.
    Convolutions that winograd.py supports go there, or to winograd_rows.py.
SHAPES
    as in conv2d/direct.py, of any float; what has 16 bits is computed in float32 and rounded once
DETERMINISM
    the cores share the images, and their parts of a weight gradient are added in order; within
    `batch_invariant` a product has the same number of rows in any batch.
SOURCE
    conv2d/direct.py; rows copied once, of which BLAS reads overlapping operands: Cho and Brand
    2017, "MEC: Memory-efficient Convolution for Deep Neural Network", arXiv:1706.06873.
READ NEXT
    winograd.py.
"""

import numpy as np

from ...device import over_batch
from ...device.batch_invariance import blocks, filled, is_batch_invariant, rows_are_alike
from ...dtypes import is_half
from ..conv2d.im2col import output_size
from ..reduce.trees import column_sum
from .winograd import winograd_forward, winograd_supports, winograd_weight_gradient
from .winograd_rows import winograd_rows_forward

LEAST_ROWS = 256  # of a product, where `batch_invariant` cuts the batch
# bytes of rows that are multiplied at a time: they should stay in a core's own cache
CACHE = 1 << 20


def tap_rows(x, kernel, stride):
    """(H + 2·pad, B, Wo, kernel·C): entry [h, b, j] is what row h of padded image b shows to the
    window at column j."""
    b, h, w, c = x.shape
    pad = kernel // 2
    padded = np.zeros((h + 2 * pad, b, w + 2 * pad, c), x.dtype)
    padded[pad : pad + h, :, pad : pad + w] = x.transpose(1, 0, 2, 3)
    row, image, column, channel = padded.strides
    shape = (h + 2 * pad, b, output_size(w, stride), kernel * c)
    strides = row, image, stride * column, channel
    # `as_strided`, without its 40 µs
    return np.ascontiguousarray(np.ndarray(shape, x.dtype, padded, strides=strides))


def cache_sized(x, kernel, share):
    """The slice `share` cut into slices whose images have CACHE bytes of tap rows at most (but one
    image at least)."""
    images = max(1, CACHE // (kernel * x[:1].nbytes))
    return [slice(i, min(i + images, share.stop)) for i in range(share.start, share.stop, images)]


def conv2d_forward_cpu(x, weight, bias=None, stride=1, channel=None, residual=None):
    if is_half(x.dtype):
        wide = conv2d_forward_cpu(
            x.astype(np.float32), weight.astype(np.float32), bias, stride, channel, residual
        )
        return wide.astype(x.dtype)
    if winograd_supports(x, weight, stride):
        forward = (
            winograd_rows_forward
            if is_batch_invariant() and not rows_are_alike()
            else winograd_forward
        )
        return forward(x, weight, bias, channel, residual)
    n, kernel, _, c = weight.shape
    b, ho, wo = len(x), output_size(x.shape[1], stride), output_size(x.shape[2], stride)
    taps = weight.transpose(1, 2, 3, 0).reshape(kernel, kernel * c, n)
    y = np.empty((b, ho, wo, n), x.dtype)

    size = blocks(ho * wo, LEAST_ROWS)

    def convolve(share):
        for part in (
            [slice(k * size, min((k + 1) * size, b)) for k in range(share.start, share.stop)]
            if size
            else cache_sized(x, kernel, share)
        ):
            rows = tap_rows(filled(x[part], size) if size else x[part], kernel, stride)
            total = rows[0 : stride * ho : stride].reshape(-1, kernel * c) @ taps[0]
            for r in range(1, kernel):
                total += rows[r : r + stride * ho : stride].reshape(-1, kernel * c) @ taps[r]
            if bias is not None:
                total += bias
            y[part] = total.reshape(ho, -1, wo, n).transpose(1, 0, 2, 3)[: part.stop - part.start]
            if channel is not None:  # here, while the part is still in the core's cache
                y[part] += channel[part, None, None]
            if residual is not None:
                y[part] += residual[part]

    over_batch(convolve, -(-b // size) if size else b, kernel * y.size)
    return y


def conv2d_backward_cpu(dy, x, weight, dweight, dbias=None, stride=1, need_dx=True):
    if is_half(x.dtype):
        dx = conv2d_backward_cpu(
            *(a.astype(np.float32) for a in (dy, x, weight)), dweight, dbias, stride, need_dx
        )
        return dx.astype(x.dtype) if need_dx else None
    n, kernel, _, c = weight.shape
    ho = dy.shape[1]

    def weight_gradient(share):
        dtaps = np.zeros((kernel, n, kernel * c), x.dtype)
        for part in cache_sized(x, kernel, share):
            rows = tap_rows(x[part], kernel, stride)
            transposed = dy[part].transpose(1, 0, 2, 3).reshape(-1, n).T
            for r in range(kernel):
                dtaps[r] += transposed @ rows[r : r + stride * ho : stride].reshape(-1, kernel * c)
        return dtaps.transpose(1, 0, 2).reshape(dweight.shape)

    if dweight is None:
        pass
    elif winograd_supports(x, weight, stride):
        winograd_weight_gradient(dy, x, dweight)
    else:
        for part in over_batch(weight_gradient, len(x), kernel * dy.size):
            dweight += part
    if dbias is not None:
        column_sum(dy, dbias)
    if not need_dx:
        return None
    # a strided convolution is one of stride 1, of whose pixels the others are thrown away
    if stride > 1:
        spread = np.zeros((*x.shape[:3], n), dy.dtype)
        spread[:, ::stride, ::stride] = dy
        dy = spread
    return conv2d_forward_cpu(dy, weight[:, ::-1, ::-1].transpose(3, 1, 2, 0))
