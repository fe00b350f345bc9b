"""Resampling by two: average pooling and nearest upsampling, each the other's backward.

MATHEMATICS
    avgpool    y[i,j] = (x[2i,2j] + x[2i,2j+1] + x[2i+1,2j] + x[2i+1,2j+1]) / 4    dx[h,w] = dy[h//2, w//2] / 4
    upsample   y[h,w] = x[h//2, w//2]                                              dx[i,j] = sum of dy's 2 × 2 block
    So there are two movements, "sum 2 × 2 blocks" and "repeat into 2 × 2 blocks", each with a factor: ¼ or 1. Of an
    array that others read, too, as the skips of a UNet, avgpool's backward adds the gradient that they have given it.
SHAPES
    x (B, H, W, C) float32; avgpool y (B, H/2, W/2, C), H and W even; upsample y (B, 2H, 2W, C)
VERSIONS
    v1 naive: one thread an output. Channels are innermost, so a warp reads 128 neighbouring bytes
       of each of the pixels.
    v2 vectorised: one thread four channels, by 16-byte loads and stores: a quarter of the index
       arithmetic and instructions.
    v3 eight: one thread eight channels, for float16: two divisions for 16 bytes, where v2 has them
       for 8, sm_80. It pays where outputs are many: an H200 upsamples 1.61× faster than by v2, and
       pools 1.01×. fuse/ makes both.
LAUNCH, DETERMINISM
    as fuse/; the four inputs of an output are added in a fixed order
COST
    bytes: the larger array once and the smaller once, 5 numbers an element of the smaller. Roof:
    memory bandwidth.
SOURCE
    the UNet's down- and upsampling without convolution: Dhariwal and Nichol 2021, arXiv:2105.05233.
READ NEXT
    window.py, which pads and crops.
"""

import numpy as np

from ..device import cuda, empty
from ..device.common import divide
from ..dtypes import in_single
from ..errors import TooManyElementsError
from .fuse import EACH, NUMBER, Operation, Place, fuse
from .operation import Problem, half, operation, single

# References ---------------------------------------------------------------------------------------


@in_single()
def sum_blocks_reference(x, factor):
    y = x[:, 0::2, 0::2] + x[:, 0::2, 1::2]
    y += x[:, 1::2, 0::2]
    y += x[:, 1::2, 1::2]
    y *= x.dtype.type(factor)
    return y


@in_single()
def repeat_blocks_reference(x, factor, residual=None):
    b, h, w, c = x.shape
    y = np.empty((b, h, 2, w, 2, c), x.dtype)
    y[...] = (x * x.dtype.type(factor) if factor != 1 else x)[:, :, None, :, None]
    if residual is not None:
        y += residual.reshape(y.shape)
    return y.reshape(b, 2 * h, 2 * w, c)


def avgpool_forward_reference(x):
    return sum_blocks_reference(x, 0.25)


def avgpool_backward_reference(dy, residual=None):
    return repeat_blocks_reference(dy, 0.25, residual)


def upsample_forward_reference(x):
    return repeat_blocks_reference(x, 1.0)


def upsample_backward_reference(dy):
    return sum_blocks_reference(dy, 1.0)


# Kernels ------------------------------------------------------------------------------------------
# fuse/ may read another layout than it writes: W and C are y's, whose rows of all images are
# counted through.


@cuda.jit(device=True)
def corner(i, W, C):
    """The first of the four pixels in x, the larger image, of element i of y."""
    rest, c = divide(i, C)
    row, j = divide(rest, W)
    return (4 * row * W + 2 * j) * C + c  # x's row 2·row has 2·W pixels


@cuda.jit(device=True)
def parent(i, W, C):
    """The pixel in x, the smaller image, that element i of y repeats."""
    rest, c = divide(i, C)
    row, j = divide(rest, W)
    return ((row // 2) * (W // 2) + j // 2) * C + c


def added(a, b, c, d, factor):
    return factor * (a + b + c + d)


def repeated(x, factor):
    return factor * x


def increased(x, residual):
    return x + residual


CORNERS = [
    Place(
        "(B, 2·H, 2·W, C)",
        lambda y: (y[0], 2 * y[1], 2 * y[2], y[3]),
        f"corner(i, W, C){more}",
        corner=corner,
    )
    for more in ("", " + C", " + 2 * W * C", " + 2 * W * C + C")
]
PARENT = Place(
    "(B, H/2, W/2, C)",
    lambda y: (y[0], y[1] // 2, y[2] // 2, y[3]),
    "parent(i, W, C)",
    parent=parent,
)
WIDTHS = 1, 4, 8  # channels a thread
SUM_BLOCKS = fuse(
    CORNERS[0],
    Operation(added, *CORNERS[1:], NUMBER),
    EACH,
    name="sum_blocks",
    module=__name__,
    widths=WIDTHS,
)
REPEAT_BLOCKS = fuse(
    PARENT, Operation(repeated, NUMBER), EACH, name="repeat_blocks", module=__name__, widths=WIDTHS
)
REPEAT_AND_ADD = fuse(
    PARENT,
    Operation(repeated, NUMBER),
    Operation(increased, EACH),
    EACH,
    name="repeat_and_add",
    module=__name__,
    widths=WIDTHS,
)


# Cost ---------------------------------------------------------------------------------------------


def avgpool_forward_cost(B, H, W, C):
    """(bytes, FLOPs) of pooling H × W pixels."""
    smaller = B * (H // 2) * (W // 2) * C
    return 4 * 5 * smaller, 4 * smaller


def avgpool_backward_cost(B, H, W, C, residual=False):
    """(bytes, FLOPs) of spreading a gradient of H × W pixels over 2·H × 2·W; a residual is read,
    too, and added."""
    return 4 * (9 if residual else 5) * B * H * W * C, (8 if residual else 4) * B * H * W * C


def upsample_forward_cost(B, H, W, C):
    return 4 * 5 * B * H * W * C, 0


def upsample_backward_cost(B, H, W, C):
    return avgpool_forward_cost(B, H, W, C)


# Operations ---------------------------------------------------------------------------------------


def _check_even(x):
    _, h, w, _ = x.shape
    if h % 2 or w % 2:
        raise ValueError(f"an image of {h} × {w} pixels cannot be halved: both must be even")


def _check_residual(dy, residual):
    b, h, w, c = dy.shape
    if residual is not None and (
        tuple(residual.shape) != (b, 2 * h, 2 * w, c) or residual.dtype != dy.dtype
    ):
        raise ValueError(
            f"a residual must be like the result, {dy.dtype} {(b, 2 * h, 2 * w, c)}, not {residual.dtype} "
            f"{tuple(residual.shape)}"
        )


def _new(x, *shape):
    """A new array for the result; both must do with 32-bit indices."""
    y = empty(shape, x.dtype, like=x)
    if max(x.size, y.size) >= 2**31:
        raise TooManyElementsError(
            f"{x.shape} or {y.shape} has too many elements for 32-bit indices: split the batch"
        )
    return y


def _sum_blocks(version, x, factor):
    b, h, w, c = x.shape
    return SUM_BLOCKS.forward(
        x, x, x, x, factor, version=version.number, out=_new(x, b, h // 2, w // 2, c)
    )


def _repeat_blocks(version, x, factor):
    b, h, w, c = x.shape
    return REPEAT_BLOCKS.forward(x, factor, version=version.number, out=_new(x, b, 2 * h, 2 * w, c))


def _problems(name, *shape):
    """A problem in float32, one in float16, and one of few channels, of an argument called `name`."""
    return [
        Problem(**{name: array})
        for array in (single(*shape, 8), half(*shape, 8), single(*shape, 3))
    ]


@operation(
    reference=avgpool_forward_reference,
    cost=avgpool_forward_cost,
    check=lambda x: _check_even(x),
    versions=SUM_BLOCKS.versions(),
    problems=[*_problems("x", 2, 4, 6), Problem(x=half(32, 64, 64, 64), measured=True)],
)
def avgpool_forward(x, version=None):
    """Mean of every 2 × 2 block of pixels: (B, H, W, C) to a new (B, H/2, W/2, C)."""
    return _sum_blocks(version, x, 0.25)


@operation(
    reference=avgpool_backward_reference,
    cost=avgpool_backward_cost,
    check=_check_residual,
    versions=REPEAT_BLOCKS.versions(of="dy"),
    problems=[
        *_problems("dy", 2, 2, 3),
        *(Problem(dy=array(2, 2, 3, 8), residual=array(2, 4, 6, 8)) for array in (single, half)),
    ],
)
def avgpool_backward(dy, residual=None, version=None):
    """dx (B, 2·H, 2·W, C) of dy (B, H, W, C): each of a block's four pixels had the weight ¼; plus
    `residual`, like it.
    """
    if residual is None:
        return _repeat_blocks(version, dy, 0.25)
    return REPEAT_AND_ADD.forward(
        dy, 0.25, residual, version=version.number, out=_new(dy, *residual.shape)
    )


@operation(
    reference=upsample_forward_reference,
    cost=upsample_forward_cost,
    versions=REPEAT_BLOCKS.versions(),
    problems=[*_problems("x", 2, 2, 3), Problem(x=half(32, 32, 32, 128), measured=True)],
)
def upsample_forward(x, version=None):
    """Every pixel repeated into a 2 × 2 block: (B, H, W, C) to a new (B, 2·H, 2·W, C)."""
    return _repeat_blocks(version, x, 1.0)


@operation(
    reference=upsample_backward_reference,
    cost=upsample_backward_cost,
    check=lambda dy: _check_even(dy),
    versions=SUM_BLOCKS.versions(of="dy"),
    problems=_problems("dy", 2, 4, 6),
)
def upsample_backward(dy, version=None):
    """dx (B, H/2, W/2, C) of dy (B, H, W, C): the sum over the block that each pixel went into."""
    return _sum_blocks(version, dy, 1.0)
