"""Convolution on arrays, forward and backward: which version runs, and how it is called.

SHAPES
    as in direct.py; x may be a Pair (concat.py), and then dx is one: linear/layer.py takes it as it is, else the two
    are joined
HOW A CALL RUNS
    check    what no version takes is refused, in words that say what to do
    set-up   a 1 × 1 convolution of stride 1 is a linear layer over pixels, and goes to linear/; a Pair is joined
    choice   of a pass's versions (FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT) the last that fits and pays
    launch   `version.kernel`, a function that launches its kernels; what it does not add by itself is added after it
VERSIONS
    v1 direct, v2 im2col: direct.py. In 16 bits v1 converts what it loads.
    v3 implicit-gemm: the matmul's tiles are filled straight from x; col never exists (implicit.py). For up to 8 output
       channels narrow.py, since a 64-wide tile would be nearly empty. On an H100, batch 32: 64 to
       64 channels at 64 × 64 run at 36 TFLOP/s, 256 to 128 channels at 32 × 32 at 39.
    v3 narrow: in 16 bits, where one side has up to 7 channels (narrow_half/).
    v4 mma: in 16 bits, implicit GEMM on tensor cores by mma.sync, sm_80 and later, strides too
    (mma.py).
    v4 tf32: an extension's, where the device's switch `tf32` is on: the same in float32, operands
    rounded to tf32 (extras/tf32).
    v5 hopper-columns, v6 hopper: in 16 bits by wgmma and TMA, sm_90a, stride 1 (hopper/). v5
       launches v6's kernels with a box for each column of taps instead of one for all nine, in the
       same time (H200, 64 channels: 1.00×). It needs no kernel, and is kept as the step between the
       two levels of ../../extras/levels/conv2d/.
    v7 im2win: an extension's, only by its name: windows that overlap in memory
    (extras/im2win/windows.py). Sums are float32, and results are rounded once; dweight and dbias
    are float32. The input gradient of a strided convolution is v2's in v3 and in tf32: only every
    stride-th tap would meet a pixel of dy. Arrays of the host: cpu/convolution.py.
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
from ...device.batch_invariance import nominal_extent
from ...device.side_stream import made_on_side_stream, on_side_stream
from ...dtypes import HALVES, is_half
from ...errors import TooManyElementsError
from ..bias import channel_add_backward, channel_add_forward
from ..concat import Pair
from ..cpu.convolution import conv2d_backward_cpu, conv2d_forward_cpu
from ..elementwise import add_forward
from ..groupnorm.normalise import channel_statistics_reference
from ..linear.layer import linear_backward, linear_forward
from ..operation import Version, operation
from ..operation.versions import capped, label
from ..reduce.trees import column_sum
from . import problems
from .direct import (
    columns_forward,
    columns_input_gradient,
    columns_weight_gradient,
    conv2d_backward_cost,
    conv2d_forward_cost,
    conv2d_input_gradient_cost,
    conv2d_weight_gradient_cost,
    direct_forward,
    direct_input_gradient,
    direct_weight_gradient,
)
from .flip import flipped_weight
from .hopper.convolution import (
    hopper_forward,
    hopper_input_gradient,
    hopper_supports,
    statistics_shape,
)
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

# bytes of a result: GroupNorm gains less on a smaller one than they cost
WORTH_STATISTICS = 8 << 20
SINGLE, HALF = ("float32",), tuple(HALVES)
# {name: (number, dtypes)}, in the order of preference: narrow before tensor cores, since eight
# channels are theirs, too
RUNGS = {
    "direct": (1, SINGLE + HALF),
    "im2col": (2, SINGLE),
    "implicit-gemm": (3, SINGLE),
    "mma": (4, HALF),
    **dict.fromkeys(extensions.entries("conv2d_switched"), (4, SINGLE)),
    "hopper-columns": (5, HALF),
    "hopper": (6, HALF),
    "narrow": (3, HALF),
    **{name: (7 + i, SINGLE) for i, name in enumerate(extensions.entries("conv2d"))},
}


# Checks -------------------------------------------------------------------------------------------


def _output_shape(x, weight, stride):
    return (
        x.shape[0],
        output_size(x.shape[1], stride),
        output_size(x.shape[2], stride),
        weight.shape[0],
    )


def _check(x, weight, stride):
    """Raise what is wrong with the operands that all passes have, in words that say what to do."""
    if len(x.shape) != 4 or len(weight.shape) != 4 or x.shape[3] != weight.shape[3]:
        raise ValueError(
            f"x (B, H, W, C_in) and weight (C_out, kernel, kernel, C_in) are {tuple(x.shape)} and "
            f"{tuple(weight.shape)}: four axes each, channels last and equal"
        )
    if weight.shape[1] != weight.shape[2] or weight.shape[1] % 2 == 0 or stride < 1:
        raise ValueError(
            f"a kernel of {weight.shape[1]} × {weight.shape[2]} and stride {stride}: the kernel must be "
            "square and odd, the stride at least 1"
        )
    if is_device(x) and not (x.dtype == np.float32 or is_half(x.dtype)):
        raise ValueError(f"x is {x.dtype}: cast it to float32, float16 or bfloat16")


def _check_type(x, weight):
    if is_device(x) and weight.dtype != x.dtype:
        raise ValueError(
            f"x and weight are {x.dtype} and {weight.dtype}: cast both to float32, or both to float16, or "
            "bfloat16"
        )


def _check_forward(x, weight, bias, stride, channel, residual):
    _check(x, weight, stride)
    _check_type(x, weight)
    shape = _output_shape(x, weight, stride)
    for name, array, wanted in (
        ("bias", bias, shape[3:]),
        ("channel", channel, (shape[0], shape[3])),
        ("residual", residual, shape),
    ):
        if array is not None and tuple(array.shape) != tuple(wanted):
            raise ValueError(
                f"{name} has shape {tuple(array.shape)}, this convolution needs {tuple(wanted)}"
            )


def _check_backward(dy, x, weight, dweight, stride, residual):
    _check(x, weight, stride)
    _check_type(x, weight)
    given, shape = (
        tuple((weight if dweight is None else dweight).shape),
        _output_shape(x, weight, stride),
    )
    if given != tuple(weight.shape) or tuple(dy.shape) != shape:
        raise ValueError(
            f"dweight {given} must have weight's shape {tuple(weight.shape)}, and dy {tuple(dy.shape)} "
            f"the output's, {shape}"
        )
    if residual is not None and (
        tuple(residual.shape) != tuple(x.shape) or residual.dtype != x.dtype
    ):
        raise ValueError(
            f"conv2d: the residual, {residual.dtype}{tuple(residual.shape)}, must be an array like x, "
            f"{x.dtype}{tuple(x.shape)}"
        )
    kind = np.dtype(np.float32) if dweight is None else dweight.dtype
    if (
        is_device(x)
        and is_half(x.dtype)
        and not _is_linear(weight, stride)
        and (dy.dtype != x.dtype or kind != np.float32)
    ):
        raise ValueError(
            f"dy and dweight are {dy.dtype} and {kind}: with x in {x.dtype} they must be {x.dtype} and "
            "float32"
        )


def _check_size(*arrays):
    if is_device(arrays[0]) and max(a.size for a in arrays) >= 2**31:
        raise TooManyElementsError(
            f"shapes {[tuple(a.shape) for a in arrays]}: an array of 2**31 elements or more is "
            "too large for 32-bit indices; split the batch"
        )


# The versions of each pass ------------------------------------------------------------------------


def _rung(name, launch, supports=None, of=(), **more):
    """A `Version`. launch: what calls its kernels; supports: whether it takes the arguments that
    `of` names"""

    def fits(*values):
        words = [
            f"{name} {tuple(value.shape) if hasattr(value, 'shape') else value}"
            for name, value in zip(of, values, strict=True)
            if value is not None
        ]
        return None if supports(*values) else f"does not take {', '.join(words)} on this device"

    number, dtypes = RUNGS[name]
    return Version(
        name,
        launch,
        number=number,
        dtypes=dtypes,
        fits=supports and fits,
        of=of,
        ladder="conv2d",
        **more,
    )


def _of_extensions(function, given=lambda *arguments: arguments, **more):
    """[Version] of extensions, which run only by their names. Their modules have forward(x, weight,
    bias, y, stride), input_gradient(dy, weight, dx, stride) and weight_gradient(dy, x, dweight,
    stride, accumulate)."""

    def launch(name, *arguments):
        module = extensions.find("conv2d", name, f"version {name!r} of conv2d")
        return getattr(module, function)(*given(*arguments))

    return [
        _rung(name, functools.partial(launch, name), pays=lambda: False, **more)
        for name in extensions.entries("conv2d")
    ]


@functools.cache
def _switches():
    return extensions.available("conv2d_switched")


def _of_switches(launch, pays, of=("x", "weight"), **more):
    """[Version] of extensions that a switch of the device chooses. Their modules have, in addition
    to the functions above, takes(x, weight), pays(x, weight), and problems(of) as problems.py.

    launch: takes the module, too; pays: makes the version's `pays` of the module's
    """

    def version(name):
        def takes(x, weight):
            return name in _switches() and _switches()[name].takes(x, weight)

        def is_on(x, weight):
            return name in _switches() and _switches()[name].pays(x, weight)

        return _rung(
            name,
            lambda *given: launch(_switches()[name], *given),
            takes,
            of,
            pays=pays(is_on),
            **more,
        )

    return [version(name) for name in extensions.entries("conv2d_switched")]


def _tiles_forward(x, weight, bias, y, stride):
    (narrow_forward if weight.shape[0] <= NARROW else implicit_forward)(x, weight, bias, y, stride)
    return y


def _narrow_takes(x, weight, stride, channel, residual):
    return narrow_supports(x, weight, stride, channel is None and residual is None)


def _hopper_forward(
    x, weight, bias, y, stride, channel, residual, statistics=None, whole_halo=True
):
    return hopper_forward(x, weight, bias, y, channel, residual, whole_halo, statistics)


# launch(x, weight, bias, y, stride), which returns y; of those that add them in their kernels also
# channel and residual
FORWARD = [
    _rung("direct", direct_forward, adds=True),
    _rung(
        "im2col",
        lambda x, weight, bias, y, stride: columns_forward(x, weight, bias, y.shape, stride),
        adds=False,
    ),
    _rung("implicit-gemm", _tiles_forward, adds=False),
    _rung("mma", mma_forward, mma_supports, ("x", "weight"), adds=True),
    *_of_switches(lambda module, *given: module.forward(*given), lambda is_on: is_on, adds=True),
    _rung(
        "hopper-columns",
        functools.partial(_hopper_forward, whole_halo=False),
        hopper_supports,
        ("x", "weight", "stride"),
        adds=True,
    ),
    _rung("hopper", _hopper_forward, hopper_supports, ("x", "weight", "stride"), adds=True),
    _rung(
        "narrow",
        lambda x, weight, bias, y, stride, *_: narrow_half_forward(x, weight, bias, y),
        _narrow_takes,
        ("x", "weight", "stride", "channel", "residual"),
        adds=True,
    ),  # it takes none
    *_of_extensions("forward", adds=False),
]


def _like(x):
    return empty(x.shape, x.dtype, like=x)


def _tiles_input_gradient(dy, weight, x, stride):
    if stride > 1:
        return columns_input_gradient(dy, weight, x.shape, stride)
    return conv2d_forward(dy, flipped_weight(weight), version="implicit-gemm")


def _switched_input_gradient(module, dy, weight, x, stride):
    if stride > 1:
        return columns_input_gradient(dy, weight, x.shape, stride)
    return module.input_gradient(dy, weight, _like(x))


def _hopper_input_gradient(dy, weight, x, stride, residual, whole_halo=True):
    return hopper_input_gradient(dy, weight, _like(x), whole_halo, residual)


# launch(dy, weight, x, stride), which returns dx, a new array; of those that add it in their
# kernels also residual
INPUT_GRADIENT = [
    _rung(
        "direct",
        lambda dy, weight, x, stride: direct_input_gradient(dy, weight, _like(x), stride),
        adds=False,
    ),
    _rung(
        "im2col",
        lambda dy, weight, x, stride: columns_input_gradient(dy, weight, x.shape, stride),
        adds=False,
    ),
    _rung("implicit-gemm", _tiles_input_gradient, adds=False),
    _rung(
        "mma",
        lambda dy, weight, x, stride, residual: mma_input_gradient(
            dy, weight, _like(x), stride, residual
        ),
        mma_supports,
        ("x", "weight"),
        adds=True,
    ),
    *_of_switches(
        _switched_input_gradient,
        lambda is_on: lambda x, weight, stride: stride == 1 and is_on(x, weight),
        adds=False,
    ),
    _rung(
        "hopper-columns",
        functools.partial(_hopper_input_gradient, whole_halo=False),
        hopper_supports,
        ("x", "weight", "stride"),
        adds=True,
    ),
    _rung("hopper", _hopper_input_gradient, hopper_supports, ("x", "weight", "stride"), adds=True),
    _rung(
        "narrow",
        lambda dy, weight, x, _: narrow_half_input_gradient(dy, weight, _like(x)),
        narrow_input_gradient_supports,
        ("dy", "weight", "stride"),
        adds=False,
    ),
    *_of_extensions(
        "input_gradient", lambda dy, weight, x, stride: (dy, weight, _like(x), stride), adds=False
    ),
]


def _direct_weight_gradient(dy, x, dweight, stride, accumulate):
    direct_weight_gradient(dy, x, _to_add_to(dweight, accumulate), stride)


def _tiles_weight_gradient(dy, x, dweight, stride, accumulate):
    launch = narrow_weight_gradient if dweight.shape[0] <= NARROW else implicit_weight_gradient
    launch(dy, x, dweight, stride, accumulate)


def _mma_weight_gradient(dy, x, dweight, stride, accumulate, dbias):
    mma_weight_gradient(dy, x, dweight, stride, accumulate, dbias)
    return True


def _narrow_weight_gradient(dy, x, dweight, stride, accumulate, dbias):
    return narrow_half_weight_gradient(dy, x, _to_add_to(dweight, accumulate), dbias)


def _to_add_to(dweight, accumulate):
    """dweight for a kernel that can only add to it."""
    return dweight if accumulate else fill_zero(dweight)


def _hopper_weight_gradient(dy, x, dweight, dbias, need_channel, accumulate, whole_halo=True):
    return hopper_weight_gradient(
        dy, x, dweight, dbias, whole_halo, need_channel=need_channel, accumulate=accumulate
    )


# launch(dy, x, dweight, stride, accumulate). `sums`: what it sums of dy in addition. None: nothing
# "bias": launch(dy, x, dweight, stride, accumulate, dbias), which returns whether it has added to
# dbias "channel": launch(dy, x, dweight, dbias, need_channel, accumulate), which returns dchannel
WEIGHT_GRADIENT = [
    _rung("direct", _direct_weight_gradient, sums=None),
    _rung("im2col", columns_weight_gradient, sums=None),
    _rung("implicit-gemm", _tiles_weight_gradient, sums=None),
    _rung("mma", _mma_weight_gradient, mma_supports, ("x", "dweight"), sums="bias"),
    *_of_switches(
        lambda module, *given: module.weight_gradient(*given),
        lambda is_on: lambda x, dweight: is_on(x, dweight),
        of=("x", "dweight"),
        sums=None,
    ),
    _rung(
        "hopper-columns",
        functools.partial(_hopper_weight_gradient, whole_halo=False),
        hopper_supports,
        ("x", "dweight", "stride"),
        sums="channel",
    ),
    _rung(
        "hopper",
        _hopper_weight_gradient,
        hopper_supports,
        ("x", "dweight", "stride"),
        sums="channel",
    ),
    _rung(
        "narrow",
        _narrow_weight_gradient,
        narrow_gradient_supports,
        ("x", "dweight", "stride"),
        sums="bias",
    ),
    *_of_extensions("weight_gradient", sums=None),
]


# Forward ------------------------------------------------------------------------------------------


def _is_linear(weight, stride):
    """Whether it is a linear layer over pixels."""
    return weight.shape[1] == stride == 1


def _extents(x, weight, stride):
    """What the cost functions take."""
    return *x.shape, weight.shape[0], weight.shape[1], stride


def forward_on_cpu(x, weight, bias=None, stride=1, channel=None, residual=None, statistics=None):
    if _is_linear(weight, stride) and channel is None and residual is None:
        return linear_forward(x, weight.reshape(weight.shape[0], -1), bias)
    x = x.joined() if isinstance(x, Pair) else x
    y = conv2d_forward_cpu(x, weight, bias, stride, channel, residual)
    if statistics is not None:
        statistics[...] = channel_statistics_reference(y)
    return y


def channel_statistics(x, weight, stride=1, least=WORTH_STATISTICS):
    """A new array for the statistics of a convolution's result (groupnorm/normalise.py), or None if
    none come.

    Hopper's float16 kernel computes them, with a result of `least` bytes or more whose images 8 × 8
    pixels tile.
    """
    shape = None
    allowed = capped("conv2d", 6) == 6 and not isinstance(x, Pair)
    if allowed and is_device(x) and x.dtype == weight.dtype and hopper_supports(x, weight, stride):
        result = *x.shape[:3], weight.shape[0]
        if nominal_extent(math.prod(result)) * x.dtype.itemsize >= least:
            shape = statistics_shape(result)
    return None if shape is None else empty(shape, np.float32, like=x)


@operation(
    reference=forward_on_cpu,
    check=_check_forward,
    versions=FORWARD,
    chooses=True,
    writes=("statistics",),
    cost=lambda x, weight, stride: conv2d_forward_cost(*_extents(x, weight, stride)),
    problems=problems.of_forward,
)
def conv2d_forward(
    x, weight, bias=None, stride=1, channel=None, residual=None, statistics=None, version=None
):
    """Convolution of x (B, H, W, C_in), padded by kernel // 2, as a new array (B, Ho, Wo, C_out).

    channel (B, C_out), residual (like the result): added to it before it is rounded
    statistics: of `channel_statistics`, to be written
    """
    given, plain, more = version, channel is None and residual is None, {}
    if statistics is not None:
        if version not in (None, 5, 6):
            raise ValueError(
                f"version {label('conv2d', version, x.dtype)} leaves no statistics; use version=6, or "
                "None"
            )
        version, more = version or 6, {"statistics": statistics}
    if _is_linear(weight, stride) and version is None and plain:
        return linear_forward(x, weight.reshape(weight.shape[0], -1), bias)
    x = x.joined() if isinstance(x, Pair) else x
    y = empty(_output_shape(x, weight, stride), x.dtype, like=x)
    _check_size(x, weight, y)
    record = conv2d_forward.operation
    version = record.choose(
        version and record.version(version, x),
        x,
        {"x": x, "weight": weight, "stride": stride, "channel": channel, "residual": residual},
    )
    if version.adds:
        return version.kernel(x, weight, bias, y, stride, channel, residual, **more)
    if plain:
        return version.kernel(x, weight, bias, y, stride)
    y = conv2d_forward(x, weight, bias, stride, version=given)
    y = y if channel is None else channel_add_forward(y, channel)
    return y if residual is None else add_forward(y, residual)


# Backward -----------------------------------------------------------------------------------------


def _input_gradient_cost(x, weight, stride):
    moved, flops = conv2d_input_gradient_cost(*_extents(x, weight, stride))
    return moved * x.dtype.itemsize // 4, flops


def _gradient_on_cpu(dy, weight, x, stride=1, residual=None):
    dx = conv2d_backward_cpu(dy, x, weight, None, None, stride)
    return dx if residual is None else add_forward(dx, residual)


def _weight_gradient_on_cpu(
    dy, x, dweight, dbias=None, stride=1, need_channel=False, accumulate=True
):
    dchannel, dbias = _sums(dy, dbias, need_channel)
    conv2d_backward_cpu(
        dy, x, dweight, _to_add_to(dweight, accumulate), dbias, stride, need_dx=False
    )
    return dchannel


def _sums(dy, dbias, need_channel):
    """(the gradient of `channel` or None, dbias where it is still to be added to): one pass over dy
    is enough."""
    if not need_channel:
        return None, dbias
    dchannel = channel_add_backward(dy)
    _add_columns(dchannel, dbias)
    return dchannel, None


def _add_columns(dy, dbias):
    if dbias is not None:
        column_sum(dy, dbias)


@operation(
    reference=_gradient_on_cpu,
    check=lambda weight, x, stride: _check(x, weight, stride),
    versions=INPUT_GRADIENT,
    problems=problems.of_input_gradient,
    exact_bytes=True,
    cost=_input_gradient_cost,
)
def conv2d_input_gradient(dy, weight, x, stride=1, residual=None, version=None):
    """dx, as a new array, plus `residual`, which is like it; x only for its shape."""
    if version.adds:
        return version.kernel(dy, weight, x, stride, residual)
    dx = version.kernel(dy, weight, x, stride)
    return dx if residual is None else add_forward(dx, residual)


@operation(
    reference=_weight_gradient_on_cpu,
    check=lambda x, dweight, stride: _check(x, dweight, stride),
    versions=WEIGHT_GRADIENT,
    problems=problems.of_weight_gradient,
    writes=("dweight", "dbias"),
    cost=lambda x, dweight, stride: conv2d_weight_gradient_cost(*_extents(x, dweight, stride)),
)
def conv2d_weight_gradient(
    dy, x, dweight, dbias=None, stride=1, need_channel=False, accumulate=True, version=None
):
    """Adds to dweight and dbias (None: not wanted); returns the gradient (B, C_out) of `channel`,
    None if not needed.

    accumulate: False: dweight is written, whatever it held
    """
    if version.sums == "channel":
        return version.kernel(dy, x, dweight, dbias, need_channel, accumulate)
    dchannel, dbias = _sums(dy, dbias, need_channel)
    if version.sums is None:
        _add_columns(dy, dbias)
        version.kernel(dy, x, dweight, stride, accumulate)
    elif not version.kernel(dy, x, dweight, stride, accumulate, dbias):
        _add_columns(dy, dbias)
    return dchannel


@operation(
    check=_check_backward,
    chooses=True,
    versions=[_rung(name, None) for name in RUNGS],
    writes=("dweight", "dbias"),
    problems=problems.of_backward,
    cost=lambda x, weight, stride, need_dx: conv2d_backward_cost(
        *_extents(x, weight, stride), need_dx
    ),
)
def conv2d_backward(
    dy,
    x,
    weight,
    dweight,
    dbias=None,
    stride=1,
    need_dx=True,
    need_channel=False,
    residual=None,
    accumulate=True,
    version=None,
):
    """dx as a new array (None unless `need_dx`); the parameters' gradients are added into dweight
    and dbias (None: not wanted, and not computed).

    need_channel: returns (dx, the gradient (B, C_out) of `channel`)
    residual: like x, or None: added to dx, in the kernel that makes it where that can; of a `Pair`
    x a Pair, too
    accumulate: False: dweight is written, whatever it held; dbias is added to all the same
    version: of arrays on the host ignored
    """
    if _is_linear(weight, stride) and (version is None or not is_device(dy)):
        dchannel, dbias = _sums(dy, dbias, need_channel)
        rows = None if dweight is None else dweight.reshape(weight.shape[0], -1)
        dx = linear_backward(
            dy,
            x,
            weight.reshape(weight.shape[0], -1),
            rows,
            dbias,
            need_dx,
            residual=residual,
            accumulate=accumulate,
        )
        return (dx, dchannel) if need_channel else dx
    given = x
    if isinstance(x, Pair):
        x, residual = x.joined(), residual and residual.joined()
    _check_size(x, weight, dy)
    with on_side_stream(dy, dweight, dbias):
        if dweight is None:
            dchannel, dbias = _sums(dy, dbias, need_channel)
            _add_columns(dy, dbias)
        else:
            dchannel = conv2d_weight_gradient(
                dy, x, dweight, dbias, stride, need_channel, accumulate, version=version
            )
    made_on_side_stream(dchannel)
    dx = (
        conv2d_input_gradient(dy, weight, x, stride, residual, version=version) if need_dx else None
    )
    if x is not given and need_dx:
        dx = given.parted(dx)
    return (dx, dchannel) if need_channel else dx
