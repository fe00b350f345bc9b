"""Which kernel convolves: the version for a shape, a type and a device, forward and backward.

SHAPES
    as in direct.py; x may be a Pair (concat.py), and then dx is one: linear.py takes it as it is, else the two
    are joined
VERSIONS
    v1 direct, v2 im2col: direct.py.
    v3 implicit-gemm: the matmul's tiles are filled straight from x; col never exists (implicit.py). For up to 8 output
       channels narrow.py, since a 64-wide tile would be nearly empty. On an H100, batch 32: 64 to 64 channels at
       64 × 64 run at 36 TFLOP/s, 256 to 128 channels at 32 × 32 at 39.
    v4 tf32: where the device's switch `tf32` is on: implicit GEMM on tensor cores by mma.sync, operands rounded to tf32
       (extras/tf32), sm_80 and later.
    v7 im2win: an extension's, only by its name: windows that overlap in memory (extras/im2win/windows.py).
    In float16 and bfloat16 (sums in float32, the result rounded once; dweight and dbias float32):
    v1 as above, converting what it loads; v3 narrow: where one side has up to 8 channels (narrow_half/).
    v4 mma: implicit GEMM on tensor cores by mma.sync, sm_80 and later, strides too (mma.py).
    v5 hopper-columns, v6 hopper: by wgmma and TMA, sm_90a, stride 1 (hopper/).
    A 1 × 1 convolution of stride 1 is a linear layer over pixels, and goes to linear.py. The input gradient of a
    strided convolution stays with v2 in v3: only every stride-th tap would meet a pixel of dy.
    Arrays of the host: cpu.py.
DETERMINISM
    every output's sum has a fixed order; where a sum is cut into parts, a second pass adds them in a fixed order.
SOURCE
    the implicit GEMM: Chetlur et al. 2014, "cuDNN", arXiv:1410.0759, section 3.
"""
import functools
import math

import numpy as np

from ... import extensions
from ...device import empty, fill_zero, is_device
from ...dtypes import HALVES, is_half
from ...errors import TooManyElementsError
from ..batch_invariance import nominal_extent
from ..bias import channel_add_backward, channel_add_forward
from ..concat import Pair
from ..elementwise import add_forward
from ..linear import linear_backward, linear_forward
from ..reduce import column_sum
from ..side_stream import made_on_side_stream, on_side_stream
from ..versions import CONV2D, capped, label, versions_by_name
from .cpu import conv2d_backward_cpu, conv2d_forward_cpu
from .direct import (
    columns_forward,
    columns_input_gradient,
    columns_weight_gradient,
    direct_forward,
    direct_input_gradient,
    direct_weight_gradient,
)
from .flip import flipped_weight
from .hopper import convolution as conv2d_hopper
from .hopper.convolution import hopper_forward, hopper_input_gradient
from .hopper.weight_gradient import hopper_weight_gradient
from .im2col import output_size
from .implicit import implicit_forward
from .implicit_weight_gradient import implicit_weight_gradient
from .mma import mma_forward, mma_input_gradient, mma_supports, mma_weight_gradient
from .narrow import NARROW, narrow_forward, narrow_weight_gradient
from .narrow_half.launcher import (
    narrow_gradient_supports,
    narrow_half_forward,
    narrow_half_input_gradient,
    narrow_half_weight_gradient,
    narrow_input_gradient_supports,
    narrow_supports,
)

PREFERRED = 3, 6, 5, 4, 1  # of the float16 versions, the fastest first
WORTH_STATISTICS = 8 << 20  # bytes of a result: GroupNorm gains less on a smaller one than they cost
OTHERS = tuple(CONV2D[name] for name in extensions.entries("conv2d"))  # versions of extensions, in float32
VERSIONS = {np.dtype(np.float32): (1, 2, 3, 4, *OTHERS), **dict.fromkeys(HALVES.values(), (1, 3, 4, 5, 6))}


def _other(version):
    """An extension's module: forward(x, weight, bias, y, stride), input_gradient(dy, weight, dx, stride) and
    weight_gradient(dy, x, dweight, stride, accumulate), on checked arrays of a device."""
    name = next(name for name in extensions.entries("conv2d") if CONV2D[name] == version)
    return extensions.find("conv2d", name, f"version {version} ({name})")


@functools.cache
def _switches():
    return tuple(extensions.available("conv2d_switched").values())


def _switched(x, weight, version):
    """An extension's module that the device's switch, or the version, chooses: chosen(x, weight, version),
    forward(x, weight, bias, y, stride, channel, residual), weight_gradient and input_gradient as of `_other`; or None.
    """
    return next((module for module in _switches() if module.chosen(x, weight, version)), None)


def _check(x, weight, stride, version):
    """Raise what is wrong with the operands, in words that say what to do."""
    if len(x.shape) != 4 or len(weight.shape) != 4 or x.shape[3] != weight.shape[3]:
        raise ValueError(f"x (B, H, W, C_in) and weight (C_out, kernel, kernel, C_in) are {tuple(x.shape)} and "
                         f"{tuple(weight.shape)}: four axes each, channels last and equal")
    if weight.shape[1] != weight.shape[2] or weight.shape[1] % 2 == 0 or stride < 1:
        raise ValueError(f"a kernel of {weight.shape[1]} × {weight.shape[2]} and stride {stride}: the kernel must be "
                         "square and odd, the stride at least 1")
    if is_device(x) and (x.dtype not in VERSIONS or weight.dtype != x.dtype):
        raise ValueError(f"x and weight are {x.dtype} and {weight.dtype}: cast both to float32, or both to "
                         "float16, or bfloat16")
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
            raise ValueError(f"version {label('conv2d', version, x.dtype)} does not take x {tuple(x.shape)}, weight "
                             f"{tuple(weight.shape)} and stride {stride} on this device; use version=1, or None for "
                             "the fastest")
        return version
    return next(v for v in PREFERRED if taken.get(v, True) and capped("conv2d", v) == v)


def _single_version(version):
    """The version for float32 operands: the forced one; None, for the fastest, but below a ceiling that."""
    below = capped("conv2d", 3)
    return below if version is None and below < 3 else version


def _check_size(*arrays):
    if max(a.size for a in arrays) >= 2**31:
        raise TooManyElementsError(f"shapes {[tuple(a.shape) for a in arrays]}: an array of 2**31 elements or more is "
                                   "too large for 32-bit indices; split the batch")


def channel_statistics(x, weight, stride=1, least=WORTH_STATISTICS):
    """A new array for the statistics of a convolution's result (groupnorm/normalise.py), or None if none come.

    Hopper's float16 kernel computes them, with a result of `least` bytes or more whose images 8 × 8 pixels tile.
    """
    shape = None
    allowed = capped("conv2d", 6) == 6 and not isinstance(x, Pair)
    if allowed and is_device(x) and conv2d_hopper.hopper_supports(x, weight, stride):
        result = *x.shape[:3], weight.shape[0]
        if nominal_extent(math.prod(result)) * x.dtype.itemsize >= least:
            shape = conv2d_hopper.statistics_shape(result)
    return None if shape is None else empty(shape, np.float32, like=x)


@versions_by_name(asks=True)
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
            raise ValueError(f"version {label('conv2d', version, x.dtype)} leaves no statistics; use version=6, or "
                             "None")
        version = version or 6
    if kernel == stride == 1 and version is None and plain:
        return linear_forward(x, weight.reshape(n, c), bias)
    if isinstance(x, Pair):
        x = x.joined()
    if not is_device(x):
        return conv2d_forward_cpu(x, weight, bias, stride, channel, residual)
    y = empty((b, ho, wo, n), x.dtype, like=x)
    _check_size(x, weight, y)
    if not is_half(x.dtype):
        version = _single_version(version)
    if is_half(x.dtype):
        version = _half_version(x, weight, stride, version, {
            3: narrow_supports(x, weight, stride, plain), 4: mma_supports(x, weight),
            5: conv2d_hopper.hopper_supports(x, weight, stride), 6: conv2d_hopper.hopper_supports(x, weight, stride)})
        if version >= 5:
            return hopper_forward(x, weight, bias, y, channel, residual, version == 6, statistics)
        if version == 4:
            return mma_forward(x, weight, bias, y, stride, channel, residual)
        if version == 3:
            return narrow_half_forward(x, weight, bias, y)
    elif switched := _switched(x, weight, version):
        return switched.forward(x, weight, bias, y, stride, channel, residual)
    elif not plain and version != 1:
        y = conv2d_forward(x, weight, bias, stride, version)
        y = y if channel is None else channel_add_forward(y, channel)
        return y if residual is None else add_forward(y, residual)
    if version == 2:
        return columns_forward(x, weight, bias, y.shape, stride)
    if version in OTHERS:
        return _other(version).forward(x, weight, bias, y, stride)
    if version == 1:
        direct_forward(x, weight, bias, channel, residual, y, stride)
    elif n <= NARROW:
        narrow_forward(x, weight, bias, y, stride)
    else:
        implicit_forward(x, weight, bias, y, stride)
    return y


@versions_by_name(asks=True)
def conv2d_backward(dy, x, weight, dweight, dbias=None, stride=1, need_dx=True, version=None, need_channel=False,
                    residual=None, accumulate=True):
    """dx as a new array (None unless `need_dx`); the parameters' gradients are added into dweight and dbias (None: not
    wanted, and not computed).

    need_channel: returns (dx, the gradient (B, C_out) of `channel`)
    residual: like x, or None: added to dx, in the kernel that makes it where that can; of a `Pair` x a Pair, too
    accumulate: False: dweight is written, whatever it held; dbias is added to all the same
    """
    _check(x, weight, stride, version)
    n, kernel, _, c = weight.shape
    b, h, w, _ = x.shape
    ho, wo = output_size(h, stride), output_size(w, stride)
    given_shape = tuple((weight if dweight is None else dweight).shape)
    if given_shape != tuple(weight.shape) or tuple(dy.shape) != (b, ho, wo, n):
        raise ValueError(f"dweight {given_shape} must have weight's shape {tuple(weight.shape)}, and dy "
                         f"{tuple(dy.shape)} the output's, {(b, ho, wo, n)}")
    given, is_linear = x, kernel == stride == 1 and version is None
    if residual is not None and (tuple(residual.shape) != tuple(x.shape) or residual.dtype != x.dtype):
        raise ValueError(f"conv2d: the residual, {residual.dtype}{tuple(residual.shape)}, must be an array like x, "
                         f"{x.dtype}{tuple(x.shape)}")
    if isinstance(x, Pair) and not is_linear:
        x, residual = x.joined(), residual and residual.joined()
    if is_linear:
        dchannel, dbias = _sums(dy, dbias, need_channel)
        rows = None if dweight is None else dweight.reshape(n, c)
        dx = linear_backward(dy, x, weight.reshape(n, c), rows, dbias, need_dx, residual=residual,
                             accumulate=accumulate)
        residual = None
    elif not is_device(x):
        dchannel, dbias = _sums(dy, dbias, need_channel)
        dx = conv2d_backward_cpu(dy, x, weight, _to_add_to(dweight, accumulate), dbias, stride, need_dx)
    else:
        _check_size(x, weight, dy)
        if is_half(x.dtype):
            kind = np.dtype(np.float32) if dweight is None else dweight.dtype
            if dy.dtype != x.dtype or kind != np.float32:
                raise ValueError(f"dy and dweight are {dy.dtype} and {kind}: with x in {x.dtype} they must be "
                                 f"{x.dtype} and float32")
            with on_side_stream(dy, dweight, dbias):
                dchannel = _half_gradients(dy, x, weight, dweight, dbias, stride, version, need_channel, accumulate)
            made_on_side_stream(dchannel)
            dx = _half_input_gradient(dy, weight, x, stride, version, residual) if need_dx else None
            residual = None
        else:
            version = _single_version(version)
            with on_side_stream(dy, dweight, dbias):
                dchannel, dbias = _sums(dy, dbias, need_channel)
                if dbias is not None:
                    column_sum(dy, dbias)
                if dweight is not None:
                    _weight_gradient(dy, x, dweight, stride, version, accumulate)
            made_on_side_stream(dchannel)
            dx = _input_gradient(dy, weight, x, stride, version) if need_dx else None
    if residual is not None and need_dx:
        dx = add_forward(dx, residual)
    if x is not given and need_dx:
        dx = given.parted(dx)
    return (dx, dchannel) if need_channel else dx


def _sums(dy, dbias, need_channel):
    """(the gradient of `channel` or None, dbias where it is still to be added to): one pass over dy is enough."""
    if not need_channel:
        return None, dbias
    dchannel = channel_add_backward(dy)
    if dbias is not None:
        column_sum(dchannel, dbias)
    return dchannel, None


def _to_add_to(dweight, accumulate):
    """dweight for a kernel that can only add to it."""
    return dweight if accumulate or dweight is None else fill_zero(dweight)


def _half_gradients(dy, x, weight, dweight, dbias, stride, version, need_channel=False, accumulate=True):
    """dweight and dbias from float16 arrays; returns the gradient of `channel`, or None."""
    if dweight is None:
        dchannel, dbias = _sums(dy, dbias, need_channel)
        if dbias is not None:
            column_sum(dy, dbias)
        return dchannel
    hopper = conv2d_hopper.hopper_supports(x, weight, stride)
    version = _half_version(x, weight, stride, version, {
        3: narrow_gradient_supports(x, weight, stride), 4: mma_supports(x, weight), 5: hopper, 6: hopper})
    if version >= 5:
        return hopper_weight_gradient(dy, x, dweight, dbias, whole_halo=version == 6, need_channel=need_channel,
                                      accumulate=accumulate)
    dchannel, dbias = _sums(dy, dbias, need_channel)
    summed = version == 3 and narrow_half_weight_gradient(dy, x, _to_add_to(dweight, accumulate), dbias)
    if dbias is not None and not summed and version != 4:
        column_sum(dy, dbias)
    if version == 4:
        mma_weight_gradient(dy, x, dweight, stride, accumulate, dbias)
    elif version == 1:
        _weight_gradient(dy, x, dweight, stride, 1, accumulate)
    return dchannel


def _half_input_gradient(dy, weight, x, stride, version, residual=None):
    hopper = conv2d_hopper.hopper_supports(x, weight, stride)
    version = _half_version(x, weight, stride, version, {
        3: narrow_input_gradient_supports(dy, weight, stride), 4: mma_supports(x, weight), 5: hopper, 6: hopper})
    dx = None if version == 1 else empty(x.shape, x.dtype, like=x)
    if version >= 5:
        return hopper_input_gradient(dy, weight, dx, whole_halo=version == 6, residual=residual)
    if version == 4:
        return mma_input_gradient(dy, weight, dx, stride, residual)
    if version == 3:
        dx = narrow_half_input_gradient(dy, weight, dx)
    else:
        dx = _input_gradient(dy, weight, x, stride, 1)
    return dx if residual is None else add_forward(dx, residual)


def _weight_gradient(dy, x, dweight, stride, version, accumulate=True):
    if switched := _switched(x, dweight, version):
        switched.weight_gradient(dy, x, dweight, stride, accumulate)
    elif version == 1:
        direct_weight_gradient(dy, x, _to_add_to(dweight, accumulate), stride)
    elif version == 2:
        columns_weight_gradient(dy, x, dweight, stride, accumulate)
    elif version in OTHERS:
        _other(version).weight_gradient(dy, x, dweight, stride, accumulate)
    elif dweight.shape[0] <= NARROW:
        narrow_weight_gradient(dy, x, dweight, stride, accumulate)
    else:
        implicit_weight_gradient(dy, x, dweight, stride, accumulate)


def _input_gradient(dy, weight, x, stride, version):
    if stride == 1 and (switched := _switched(x, weight, version)):
        return switched.input_gradient(dy, weight, empty(x.shape, x.dtype, like=x))
    if version == 1:
        return direct_input_gradient(dy, weight, empty(x.shape, x.dtype, like=x), stride)
    if version in OTHERS:
        return _other(version).input_gradient(dy, weight, empty(x.shape, x.dtype, like=x), stride)
    if version == 2 or stride > 1:
        return columns_input_gradient(dy, weight, x.shape, stride)
    return conv2d_forward(dy, flipped_weight(weight), version=3)
