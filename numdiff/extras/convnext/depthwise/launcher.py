"""Which kernel convolves channel by channel: the version for a shape, a type and a device.

SHAPES
    as in reference.py
VERSIONS
    v1 naive: one thread an output (naive.py).
    v2 tiled: tiles in shared memory, runs of pixels in registers (tiled.py); kernels of 3, 5 and 7,
    C a multiple of 8.
    v3 mma: the same in float16 and bfloat16, on tensor cores (mma.py).
    v4 hopper: the same by TMA, each pixel read once for all rows of taps (hopper.py,
       hopper_weight_gradient.py): what runs on Hopper where images are wider than 16.
SOURCE
    reference.py.
READ NEXT
    layernorm.py
"""

import numpy as np

from ....device import empty, is_device, launch
from ....device.common import no_numbers
from ....device.limits import WARP
from ....device.requires import supports
from ....dtypes import is_half
from ....errors import TooManyElementsError
from ....kernels.bias import channel_add_backward
from ....kernels.elementwise import add_forward
from ....kernels.operation import Problem, Version, half, operation, single
from ....kernels.operation.versions import capped, label
from ....kernels.reduce.second_pass import add_rows
from ....kernels.reduce.trees import column_sum
from . import hopper, hopper_weight_gradient, mma
from .naive import (
    BLOCK,
    NaiveDepthwiseImage,
    depthwise_forward_kernel_v1,
    depthwise_weight_gradient_kernel_v1,
)
from .reference import (
    depthwise_forward_cost,
    depthwise_forward_reference,
    depthwise_input_gradient_cost,
    depthwise_input_gradient_reference,
    depthwise_weight_gradient_cost,
    depthwise_weight_gradient_reference,
)
from .tiled import BYTES, FORWARD, GRADIENT_ROWS, KERNELS, WEIGHT_GRADIENT, threads_of

# of 16 bits: the launcher's choice on Hopper
FASTEST = {"forward": 4, "input_gradient": 4, "weight_gradient": 4}
# columns of images up to which version 3 stays: half of version 4's tiles, 32 wide, would be empty
NARROW = 16
# of version 2's weight gradient, about: eight for each multiprocessor of a large GPU
GRADIENT_BLOCKS = 1024


def by_tma(x):
    """Whether version 4 runs in 16 bits, where it is the fastest."""
    return x.shape[2] > NARROW and (not is_device(x) or supports(x, hopper.FORWARD))


def _check(x, weight):
    if len(x.shape) != 4 or len(weight.shape) != 3 or x.shape[3] != weight.shape[2]:
        raise ValueError(
            f"x (B, H, W, C) and weight (kernel, kernel, C) are {tuple(x.shape)} and "
            f"{tuple(weight.shape)}: channels last and equal"
        )
    kernel, across, C = weight.shape
    if kernel != across or kernel % 2 == 0:
        raise ValueError(f"a depthwise kernel of {kernel} × {across}: it must be square and odd")
    if x.size >= 2**31:
        raise TooManyElementsError(
            f"{tuple(x.shape)} has too many elements for 32-bit indices: split the batch"
        )


def _check_forward(x, weight, bias, channel):
    _check(x, weight)
    B, _, _, C = x.shape
    for name, array, shape in (("bias", bias, (C,)), ("channel", channel, (B, C))):
        if array is not None and tuple(array.shape) != shape:
            raise ValueError(
                f"{name} has shape {tuple(array.shape)}, this convolution needs {shape}"
            )


def _check_weight_gradient(dy, x, dweight):
    _check(x, dweight)
    if tuple(dy.shape) != tuple(x.shape) or dy.dtype != x.dtype:
        raise ValueError(
            f"dy {tuple(dy.shape)} {dy.dtype} must be as x, {tuple(x.shape)} {x.dtype}"
        )


def _choose(x, weight, version, direction):
    """The version that runs: of those of 16 bits, one whose tiles the image fills."""
    kernel, _, C = weight.shape
    fits = C % 8 == 0 and kernel in KERNELS and supports(x, FORWARD, WEIGHT_GRADIENT)
    if version in (2, 3, 4) and not fits:
        raise ValueError(
            f"version {label('depthwise', version)} takes eight channels at a time and 3 × 3, 5 × 5 or "
            f"7 × 7 taps, on a device of capability 8.0, not {C} channels and {kernel} × {kernel} here; "
            "use version=1"
        )
    if version in (3, 4) and not is_half(x.dtype):
        raise ValueError(
            f"version {label('depthwise', version)} takes float16 and bfloat16, not {x.dtype}; use "
            "version=2"
        )
    if version == 4 and not supports(x, hopper.FORWARD):
        raise ValueError("version 4 (hopper) needs compute capability 9.0; use version=3")
    if version is not None:
        return version
    return capped(
        "depthwise",
        1 + fits if not (fits and is_half(x.dtype)) else FASTEST[direction] if by_tma(x) else 3,
    )


def _side(x):
    """Of the tiles' pixels."""
    return 16 if max(x.shape[1:3]) > 8 else 8


def _tiles(x, rows, columns):
    return x.shape[0] * -(-x.shape[1] // rows) * -(-x.shape[2] // columns)


def _convolve(x, weight, bias, channel, flip, version, residual=None):
    (_, H, W, C), nothing, y = x.shape, no_numbers(x.backend), empty(x.shape, x.dtype, like=x)
    if version in (3, 4):
        (mma, hopper)[version - 3].convolve(x, weight, bias, channel, residual, y, flip)
        return y
    if residual is not None:
        return add_forward(_convolve(x, weight, bias, channel, flip, version), residual)
    image = NaiveDepthwiseImage(H, W, C, flip, int(bias is not None), int(channel is not None))
    arrays = (
        x.reshape(-1),
        weight.reshape(-1),
        nothing if bias is None else bias,
        nothing if channel is None else channel.reshape(-1),
        y.reshape(-1),
    )
    if version == 1:
        launch(depthwise_forward_kernel_v1, -(-y.size // BLOCK), BLOCK, *arrays, len(weight), image)
        return y
    side, slices = _side(x), -(-C * x.dtype.itemsize // BYTES)
    key = len(weight), x.dtype.itemsize, side
    launch(FORWARD[key], _tiles(x, side, side) * slices, threads_of(*key), *arrays, slices, image)
    return y


# Operations ---------------------------------------------------------------------------------------

VERSIONS = "naive", "tiled", "mma", "hopper"


def _problems(make, *fast):
    """Small problems of an operation: tiles that the image does not fill, and a slice that the
    channels do not fill.

    make: takes the label, x's shape, the filter's size, a kind of array, and what a `Problem` has
        besides; fast: labels of those that the quick tests run; the others differ in constants of
        kernels
    """
    given = [
        ("three channels", (1, 4, 5, 3), 3, "n", single),
        ("3×3", (2, 5, 10, 8), 3, "nt", single),
        ("3×3 float16, two slices", (1, 2, 9, 40), 3, "ntmh", half),
        ("7×7 float16, two tiles", (1, 2, 34, 8), 7, "mh", half),
        ("3×3 float16, five tiles", (1, 2, 130, 8), 3, "h", half),
    ]
    given += [
        (f"{k}×{k} float16, {rows} rows", (1, rows, 3, 8), k, "h", half)
        for k in (3, 5, 7)
        for rows in (3, 17, 29)
    ]
    given += [(f"{k}×{k} float16, 17 wide", (1, 1, 17, 8), k, "m", half) for k in (3, 5)]
    given += [
        (
            f"{k}×{k}{' float16' * (array is half)}, {width} wide",
            (1, 2, width, 8),
            k,
            "tm" if array is half else "t",
            array,
        )
        for k in (3, 5, 7)
        for array in (single, half)
        for width in (3, 9)
    ]
    first = {name[0]: name for name in VERSIONS}
    return [
        make(
            label,
            shape,
            k,
            array,
            versions=tuple(first[letter] for letter in letters),
            fast=label in fast,
            bfloat16=label == "3×3 float16, 3 wide",
        )
        for label, shape, k, letters, array in given
    ]


def _forward_problem(label, shape, k, array, **more):
    B, _, _, C = shape
    return Problem(
        label,
        x=array(*shape),
        weight=array(k, k, C),
        bias=single(C),
        channel=single(B, C),
        once=True,
        **more,
    )


def _input_problem(label, shape, k, array, **more):
    return Problem(label, dy=array(*shape), weight=array(k, k, shape[3]), once=True, **more)


ROWS_COMPILED = {3: (3, 17), 5: (3, 29), 7: (17, 29)}  # {kernel: rows} that tests compile alone


def _increased_problems(*fast):
    """Problems of version 4 with a residual."""
    compiled = {
        f"{k}×{k} float16, {rows} rows" for k, each in ROWS_COMPILED.items() for rows in each
    }
    return [
        Problem(
            f"{each.label}, with a residual",
            **each.arguments,
            residual=each.arguments["dy"],
            versions=("hopper",),
            fast=each.fast,
            once=True,
            only_compiled=each.label in compiled,
        )
        for each in _problems(_input_problem, *fast)
        if "hopper" in each.versions
    ]


def _weight_problem(label, shape, k, array, **more):
    return Problem(
        label,
        dy=array(*shape),
        x=array(*shape),
        dweight=single(k, k, shape[3]),
        tolerance=1e-5,
        once=True,
        **more,
    )


# For the benchmark: of a ConvNeXt block, and of the first of ConvNeXt-T
SEVENS, FIRST, LATER = (
    half(32, 32, 32, 128),
    half(64, 56, 56, 96),
    {"versions": VERSIONS[1:], "measured": True},
)


@operation(
    reference=depthwise_forward_reference,
    cost=depthwise_forward_cost,
    check=_check_forward,
    chooses=True,
    versions=[Version(name) for name in VERSIONS],
    problems=[
        *_problems(
            _forward_problem,
            "three channels",
            "3×3, 3 wide",
            "3×3 float16, two slices",
            "7×7 float16, two tiles",
            "7×7 float16, 3 rows",
        ),
        Problem(
            x=SEVENS,
            weight=half(7, 7, 128),
            bias=single(128),
            channel=single(32, 128),
            measured=True,
        ),
        Problem(x=FIRST, weight=half(7, 7, 96), **LATER),
    ],
)
def depthwise_forward(x, weight, bias=None, channel=None, version=None):
    """The convolution of x (B, H, W, C) with weight (kernel, kernel, C), padded by kernel // 2,
    plus bias (C,) and channel (B, C), where they are given, as a new array like x."""
    return _convolve(x, weight, bias, channel, 0, _choose(x, weight, version, "forward"))


@operation(
    reference=depthwise_input_gradient_reference,
    cost=depthwise_input_gradient_cost,
    check=lambda dy, weight: _check(dy, weight),
    chooses=True,
    versions=[Version(name) for name in VERSIONS],
    problems=[
        *_problems(
            _input_problem, "three channels", "3×3 float16, two slices", "7×7 float16, 9 wide"
        ),
        *_increased_problems("3×3 float16, five tiles", "7×7 float16, 3 rows"),
        Problem(dy=SEVENS, weight=half(7, 7, 128), measured=True),
        Problem(dy=FIRST, weight=half(7, 7, 96), **LATER),
    ],
)
def depthwise_input_gradient(dy, weight, residual=None, version=None):
    """dx of dy (B, H, W, C); plus `residual`, like it, where it is given."""
    return _convolve(
        dy, weight, None, None, 1, _choose(dy, weight, version, "input_gradient"), residual
    )


@operation(
    reference=depthwise_weight_gradient_reference,
    cost=depthwise_weight_gradient_cost,
    check=_check_weight_gradient,
    chooses=True,
    versions=[Version(name) for name in VERSIONS],
    problems=[
        *_problems(
            _weight_problem,
            "three channels",
            "5×5, 3 wide",
            "3×3 float16, two slices",
            "3×3 float16, five tiles",
            "3×3 float16, 17 wide",
            "7×7 float16, 3 rows",
        ),
        Problem(dy=SEVENS, x=SEVENS, dweight=single(7, 7, 128), measured=True),
        Problem(dy=FIRST, x=FIRST, dweight=single(7, 7, 96), **LATER),
    ],
    writes=("dweight",),
)
def depthwise_weight_gradient(dy, x, dweight, version=None):
    """Add the weight's gradient to dweight (kernel, kernel, C), float32."""
    version = _choose(x, dweight, version, "weight_gradient")
    if version in (3, 4):
        (mma, hopper_weight_gradient)[version - 3].add_weight_gradient(dy, x, dweight)
        return
    (B, H, W, C), kernel = x.shape, len(dweight)
    if version == 1:
        launch(
            depthwise_weight_gradient_kernel_v1,
            -(-dweight.size // BLOCK),
            BLOCK,
            dy.reshape(-1),
            x.reshape(-1),
            dweight.reshape(-1),
            B,
            H,
            W,
            C,
            kernel,
        )
        return
    side, slices = _side(x), -(-C * x.dtype.itemsize // BYTES)
    tiles = _tiles(x, GRADIENT_ROWS, side)
    chunk = -(-tiles // max(1, GRADIENT_BLOCKS // slices))
    chunks = -(-tiles // chunk)
    partial = empty((chunks, dweight.size), np.float32, like=x)
    launch(
        WEIGHT_GRADIENT[kernel, x.dtype.itemsize, side],
        chunks * slices,
        kernel * WARP,
        dy.reshape(-1),
        x.reshape(-1),
        partial.reshape(-1),
        tiles,
        chunk,
        slices,
        NaiveDepthwiseImage(H, W, C, 0, 0, 0),
    )
    add_rows(partial, dweight.reshape(-1))


def depthwise_backward(
    dy,
    x,
    weight,
    dweight,
    dbias=None,
    need_dx=True,
    need_channel=False,
    residual=None,
    dchannel=None,
):
    """dx as a new array (None unless `need_dx`); the parameters' gradients are added into dweight
    and dbias (None: not wanted, and not computed).

    need_channel: returns (dx, the gradient (B, C) of `channel`); residual: like x, added to dx
    dchannel: that gradient, where it is known
    """
    if need_channel and dchannel is None:
        dchannel = channel_add_backward(dy)
    if dbias is not None:
        column_sum(dy if dchannel is None else dchannel, dbias)
    if dweight is not None:
        depthwise_weight_gradient(dy, x, dweight)
    dx = depthwise_input_gradient(dy, weight, residual=residual) if need_dx else None
    return (dx, dchannel) if need_channel else dx
