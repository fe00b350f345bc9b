"""Channel concatenation: how a UNet's skip connections join the way up.

MATHEMATICS
    y[p] = a[p] followed by b[p], for every pixel p         da[p], db[p] = the two parts of dy[p]
SHAPES
    a (..., Ca), b (..., Cb), y (..., Ca + Cb) float32, float16 or bfloat16, equal leading axes,
    read together as P pixels
VERSIONS
    v1 naive: one thread a number of y: it finds its pixel and channel, and with them its source
    (backward: its target).
    v2 vectorised: one thread four channels, by one load and store, where both parts are multiples
    of four channels.
    v3 unrolled: 16 bytes a load and store in float16 too (eight channels), two of them a thread,
       both loads before the stores.
LAUNCH
    one thread a number of y (v1), four (v2) or twice 16 bytes (v3), 256 a block. No shared memory.
DETERMINISM
    a copy: no arithmetic at all.
COST
    bytes: y is written once, a and b are read once. Roof: memory bandwidth.
SOURCE
    the UNet: Ronneberger, Fischer and Brox 2015, arXiv:1505.04597, figure 1 ("copy").
WITHOUT A COPY
    Kernels that take two pointers read a `Pair` as if it were the joined array: GroupNorm's version
    3, and 1×1 convolutions (a matmul) on Hopper. Their gradients with respect to a Pair are Pairs.
READ NEXT
    embedding.py, where the class comes in.
"""

from typing import NamedTuple

import numpy as np

from ..device import cuda, device_inline, empty, int32, launch, load4, over_batch, store4
from ..device.common import divide
from ..device.tensor_core import load_words4, store_words4
from ..errors import TooManyElementsError
from .operation import Problem, Version, half, operation, single

BLOCK = 256  # threads


class Pair(NamedTuple):
    """Two arrays (..., Ca) and (..., Cb), for a kernel that reads them as one, (..., Ca + Cb)."""

    a: object
    b: object

    shape = property(lambda self: (*self.a.shape[:-1], self.a.shape[-1] + self.b.shape[-1]))
    dtype = property(lambda self: self.a.dtype)
    size = property(lambda self: self.a.size + self.b.size)

    def joined(self):
        return concat_forward(*self)

    def parted(self, y):
        """The parts of an array like this one."""
        return Pair(*concat_backward(y, self.a.shape[-1]))


def parts_of(x):
    """(first array, second, channels of the first) of a `Pair`; of an array: itself, again, and all
    of its channels."""
    return (*x, x.a.shape[-1]) if isinstance(x, Pair) else (x, x, x.shape[-1])


# References ---------------------------------------------------------------------------------------


def concat_forward_reference(a, b):
    y = np.empty((*a.shape[:-1], a.shape[-1] + b.shape[-1]), np.result_type(a, b))
    over_batch(lambda i: np.concatenate((a[i], b[i]), axis=-1, out=y[i]), len(a), y.size)
    return y


def concat_backward_reference(dy, channels_a):
    return np.ascontiguousarray(dy[..., :channels_a]), np.ascontiguousarray(dy[..., channels_a:])


# v1: one thread a number --------------------------------------------------------------------------


@cuda.jit
def concat_forward_kernel_v1(a, b, y, Ca, Cb):
    n = cuda.grid(1)
    if n < y.size:
        pixel, c = divide(n, Ca + Cb)
        y[n] = a[pixel * Ca + c] if c < Ca else b[pixel * Cb + c - Ca]


@cuda.jit
def concat_backward_kernel_v1(dy, da, db, Ca, Cb):
    n = cuda.grid(1)
    if n < dy.size:
        pixel, c = divide(n, Ca + Cb)
        if c < Ca:
            da[pixel * Ca + c] = dy[n]
        else:
            db[pixel * Cb + c - Ca] = dy[n]


# v2: one thread four channels ---------------------------------------------------------------------
# Where Ca and Cb are multiples of four, four neighbouring channels never straddle the seam.


@cuda.jit
def concat_forward_kernel_v2(a, b, y, Ca, Cb):
    n = cuda.grid(1) * 4
    if n < y.size:
        pixel, c = divide(n, Ca + Cb)
        if c < Ca:
            v0, v1, v2, v3 = load4(a, pixel * Ca + c)
        else:
            v0, v1, v2, v3 = load4(b, pixel * Cb + c - Ca)
        store4(y, n, v0, v1, v2, v3)


@cuda.jit
def concat_backward_kernel_v2(dy, da, db, Ca, Cb):
    n = cuda.grid(1) * 4
    if n < dy.size:
        pixel, c = divide(n, Ca + Cb)
        v0, v1, v2, v3 = load4(dy, n)
        if c < Ca:
            store4(da, pixel * Ca + c, v0, v1, v2, v3)
        else:
            store4(db, pixel * Cb + c - Ca, v0, v1, v2, v3)


# v3: twice 16 bytes a thread ----------------------------------------------------------------------
# Version 2 moves 8 bytes a thread in float16. What a multiprocessor has in flight is four times as
# much here.


@device_inline
def part_load(a, b, n, Ca, Cb):
    pixel, c = divide(n, Ca + Cb)
    if c < Ca:
        return load_words4(a, pixel * Ca + c)
    return load_words4(b, pixel * Cb + c - Ca)


@device_inline
def part_store(a, b, n, Ca, Cb, words):
    pixel, c = divide(n, Ca + Cb)
    if c < Ca:
        store_words4(a, pixel * Ca + c, *words)
    else:
        store_words4(b, pixel * Cb + c - Ca, *words)


@cuda.jit
def concat_forward_kernel_v3(a, b, y, Ca, Cb, width):
    """width: channels in 16 bytes."""
    n = int32((cuda.blockIdx.x * 2 * BLOCK + cuda.threadIdx.x) * width)
    n_2 = int32(n + BLOCK * width)
    if n_2 < y.size:
        words, words_2 = part_load(a, b, n, Ca, Cb), part_load(a, b, n_2, Ca, Cb)
        store_words4(y, n, *words)
        store_words4(y, n_2, *words_2)
    elif n < y.size:
        words = part_load(a, b, n, Ca, Cb)
        store_words4(y, n, *words)


@cuda.jit
def concat_backward_kernel_v3(dy, da, db, Ca, Cb, width):
    n = int32((cuda.blockIdx.x * 2 * BLOCK + cuda.threadIdx.x) * width)
    n_2 = int32(n + BLOCK * width)
    if n_2 < dy.size:
        words, words_2 = load_words4(dy, n), load_words4(dy, n_2)
        part_store(da, db, n, Ca, Cb, words)
        part_store(da, db, n_2, Ca, Cb, words_2)
    elif n < dy.size:
        part_store(da, db, n, Ca, Cb, load_words4(dy, n))


# Cost ---------------------------------------------------------------------------------------------


def concat_forward_cost(pixels, channels_a, channels_b):
    """(bytes, FLOPs); the backward costs the same."""
    return 4 * 2 * pixels * (channels_a + channels_b), 0


def concat_backward_cost(pixels, channels_a, channels_b):
    return concat_forward_cost(pixels, channels_a, channels_b)


# Operations ---------------------------------------------------------------------------------------


def _lacks(width, channels_a, channels_b, *arrays):
    """The unmet condition of a version that moves `width` channels at a time; None if it takes it."""
    if channels_a % width or channels_b % width:
        return (
            f"moves {width} channels at a time, and {channels_a} and {channels_b} are not both multiples of "
            f"{width}"
        )
    if any(x.offset % 16 for x in arrays):  # views may begin anywhere
        return "moves 16 bytes at a time, and an array does not begin at a multiple of 16 bytes"
    return None


def _launch_concat(version, joined, channels_a, channels_b, *arrays):
    """Launch a kernel whose threads have `version.width` channels, or 16 bytes, each."""
    widest = 16 // joined.dtype.itemsize
    if joined.size >= 2**31 - 4 * BLOCK * widest:
        raise TooManyElementsError(
            f"{joined.shape} has too many elements for 32-bit indices: split the batch"
        )
    given = *(x.reshape(-1) for x in arrays), channels_a, channels_b
    if version.name == "unrolled":
        launch(version.kernel, -(-joined.size // (widest * 2 * BLOCK)), BLOCK, *given, widest)
    else:
        launch(version.kernel, -(-joined.size // (version.width * BLOCK)), BLOCK, *given)


def _check_forward(a, b):
    if a.shape[:-1] != b.shape[:-1]:
        raise ValueError(f"only the channels of a {a.shape} and b {b.shape} may differ")


def _check_backward(dy, channels_a):
    if not 0 < channels_a < dy.shape[-1]:
        raise ValueError(
            f"channels_a is {channels_a}: both sides need some of dy's {dy.shape[-1]} channels"
        )


def _problems(make):
    """The small problems of a direction, of which `make` makes one: pixels, channels of a and of b,
    kind of array."""
    return [
        make(6, 8, 4, single),
        make(15, 3, 5, single),
        make(64, 8, 6, half),
        make(20, 16, 8, half),
        make(100, 128, 64, half, fast=False),
    ]


IMAGE = half(32, 64, 64, 64)  # of the UNet, for the benchmark


@operation(
    reference=concat_forward_reference,
    cost=lambda a, b: concat_forward_cost(a.size // a.shape[-1], a.shape[-1], b.shape[-1]),
    check=_check_forward,
    versions=[
        Version("naive", concat_forward_kernel_v1, width=1),
        Version(
            "vectorised",
            concat_forward_kernel_v2,
            width=4,
            fits=lambda a, b: _lacks(4, a.shape[-1], b.shape[-1]),
        ),
        Version(
            "unrolled",
            concat_forward_kernel_v3,
            fits=lambda a, b: _lacks(16 // a.dtype.itemsize, a.shape[-1], b.shape[-1], a, b),
        ),
    ],
    problems=[
        *_problems(
            lambda pixels, a, b, array, **more: Problem(
                a=array(pixels, 1, a), b=array(pixels, 1, b), tolerance=0.0, **more
            )
        ),
        Problem(a=half(32, 64, 64, 128), b=IMAGE, measured=True),
    ],
)
def concat_forward(a, b, version=None):
    """a (..., Ca) and b (..., Cb) side by side, as a new array (..., Ca + Cb)."""
    channels_a, channels_b = a.shape[-1], b.shape[-1]
    y = empty((*a.shape[:-1], channels_a + channels_b), a.dtype, like=a)
    _launch_concat(version, y, channels_a, channels_b, a, b, y)
    return y


@operation(
    reference=concat_backward_reference,
    cost=lambda dy, channels_a: concat_backward_cost(
        dy.size // dy.shape[-1], channels_a, dy.shape[-1] - channels_a
    ),
    check=_check_backward,
    versions=[
        Version("naive", concat_backward_kernel_v1, width=1),
        Version(
            "vectorised",
            concat_backward_kernel_v2,
            width=4,
            fits=lambda dy, channels_a: _lacks(4, channels_a, dy.shape[-1] - channels_a),
        ),
        Version(
            "unrolled",
            concat_backward_kernel_v3,
            fits=lambda dy, channels_a: _lacks(
                16 // dy.dtype.itemsize, channels_a, dy.shape[-1] - channels_a, dy
            ),
        ),
    ],
    problems=[
        *_problems(
            lambda pixels, a, b, array, **more: Problem(
                dy=array(pixels, 1, a + b), channels_a=a, tolerance=0.0, **more
            )
        ),
        Problem(dy=half(32, 64, 64, 192), channels_a=128, measured=True),
    ],
)
def concat_backward(dy, channels_a, version=None):
    """(da, db): the first `channels_a` channels of dy and the others, as new arrays."""
    channels_b = dy.shape[-1] - channels_a
    da, db = (empty((*dy.shape[:-1], c), dy.dtype, like=dy) for c in (channels_a, channels_b))
    _launch_concat(version, dy, channels_a, channels_b, dy, da, db)
    return da, db
