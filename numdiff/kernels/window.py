"""A window of an image: zero padding and cropping, each the other's backward.

MATHEMATICS
    y[b, i, j, c] = x[b, i + row, j + column, c], and 0 where that is outside of x; i < height, j <
    width
    A negative row or column pads at the top or the left. The backward is a window, too: of dy, from
    (-row, -column), as large as x. What the window leaves out has the gradient 0.
SHAPES
    x (B, H, W, C) float32, float16 or bfloat16; y (B, height, width, C)
VERSIONS
    v1 naive: one thread an element of y.
    v2 vectorised: one thread four channels, by one load and one store: a quarter of the index
    arithmetic.
LAUNCH
    one thread an element of y (v1) or four (v2), 256 a block. No shared memory.
DETERMINISM
    a copy: no arithmetic at all.
COST
    bytes: y is written once, and the part of x inside the window is read once. Roof: memory
    bandwidth.
SOURCE
    zero padding of the strided convolutions of latent diffusion's autoencoder: Rombach et al. 2022,
    arXiv:2112.10752.
READ NEXT
    concat.py, the other half of a UNet's wiring.
"""

import numpy as np

from ..device import cuda, device_inline, empty, launch, load4, store4
from ..device.common import divide
from ..errors import TooManyElementsError
from .operation import Problem, Version, half, operation, single

BLOCK = 256  # threads

# Reference ----------------------------------------------------------------------------------------


def window_forward_reference(x, row, column, height, width):
    _, H, W, _ = x.shape
    y = np.zeros((len(x), height, width, x.shape[3]), x.dtype)
    top, left = max(0, -row), max(0, -column)  # of y, where x begins
    inside = x[
        :,
        max(0, row) : max(0, min(H, row + height)),
        max(0, column) : max(0, min(W, column + width)),
    ]
    y[:, top : top + inside.shape[1], left : left + inside.shape[2]] = inside
    return y


# v1: one thread an element ------------------------------------------------------------------------


@device_inline
def source(n, row, column, height, width, H, W, C):
    """Where element n of y is in x; -1: outside."""
    rest, c = divide(n, C)
    rest, j = divide(rest, width)
    b, i = divide(rest, height)
    i += row
    j += column
    return ((b * H + i) * W + j) * C + c if 0 <= i < H and 0 <= j < W else -1


@cuda.jit
def window_forward_kernel_v1(x, y, row, column, height, width, H, W, C):
    n = cuda.grid(1)
    if n < y.size:
        place = source(n, row, column, height, width, H, W, C)
        y[n] = x[place] if place >= 0 else y.dtype.type(0)


# v2: one thread four channels ---------------------------------------------------------------------
# Where C is a multiple of four, four neighbouring channels are of one pixel.


@cuda.jit
def window_forward_kernel_v2(x, y, row, column, height, width, H, W, C):
    n = cuda.grid(1) * 4
    if n < y.size:
        place = source(n, row, column, height, width, H, W, C)
        if place >= 0:
            store4(y, n, *load4(x, place))
        else:
            zero = y.dtype.type(0)
            store4(y, n, zero, zero, zero, zero)


# Cost ---------------------------------------------------------------------------------------------


def window_forward_cost(x, row, column, height, width):
    """(bytes, FLOPs) in float32: what is inside is read, the window is written."""
    b, H, W, c = x.shape
    rows = max(0, min(H, row + height) - max(0, row))
    columns = max(0, min(W, column + width) - max(0, column))
    return 4 * b * c * (rows * columns + height * width), 0


# Operation ----------------------------------------------------------------------------------------


def _check(x, height, width):
    if x.ndim != 4 or height < 1 or width < 1:
        raise ValueError(
            f"a window of {height} × {width} pixels of an array {tuple(x.shape)}: both must be at least "
            "1, and the array (B, H, W, C)"
        )


def _fits_vectors(x):
    c = x.shape[3]
    return None if c % 4 == 0 else f"moves 4 channels at a time, and {c} is no multiple of 4"


def _problems():
    """One of each kind of window: padding, cropping, both at once, and one that leaves nothing of x
    inside."""
    windows = {
        "padded": (-1, -1, 6, 7),
        "cropped": (1, 2, 2, 2),
        "both": (-2, 1, 5, 3),
        "outside": (9, 0, 2, 2),
    }
    small = [
        Problem(
            f"{what}, {channels} channels",
            x=array(2, 4, 5, channels),
            row=row,
            column=column,
            height=height,
            width=width,
            tolerance=0.0,
        )
        for what, (row, column, height, width) in windows.items()
        for array, channels in ((single, 8), (half, 4), (single, 3))
    ]
    return [
        *small,
        Problem(x=half(8, 256, 256, 128), row=0, column=0, height=258, width=258, measured=True),
    ]


@operation(
    reference=window_forward_reference,
    cost=window_forward_cost,
    check=_check,
    versions=[
        Version("naive", window_forward_kernel_v1, lanes=1, measured=False),
        Version(
            "vectorised", window_forward_kernel_v2, lanes=4, measured=False, fits=_fits_vectors
        ),
    ],
    problems=_problems(),
)
def window_forward(x, row, column, height, width, version=None):
    """The pixels of x (B, H, W, C) from (row, column) on, as a new array (B, height, width, C); 0
    outside of x."""
    b, H, W, c = x.shape
    y = empty((b, height, width, c), x.dtype, like=x)
    if max(x.size, y.size) >= 2**31 - 4 * BLOCK:
        raise TooManyElementsError(
            f"{x.shape} or {y.shape} has too many elements for 32-bit indices: split the batch"
        )
    launch(
        version.kernel,
        -(-y.size // (version.lanes * BLOCK)),
        BLOCK,
        x.reshape(-1),
        y.reshape(-1),
        row,
        column,
        height,
        width,
        H,
        W,
        c,
    )
    return y
