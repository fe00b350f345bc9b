"""From stored bytes to a training image: normalise and, where asked, mirror; and from an image to
bytes.

MATHEMATICS
    y[b, h, w, c] = x[b, h, w', c] / 127.5 - 1,  w' = W - 1 - w where flip[b] is not 0, else w.     No gradient: data.
    pixels[b, h, w, c] = (x + 1) · 127.5, between 0 and 255, rounded to the nearest, to the even of two: the way back
SHAPES
    x (B, H, W, C) uint8, flip (B,) int32 or None → y (B, H, W, C) float32 in [-1, 1]; x float32 →
    pixels uint8
VERSIONS
    v1 naive: one thread an element.
    v2 vectorised: one thread four neighbouring elements of one image row, stored at once; the four
       bytes are read singly, since mirroring reverses the order of pixels but not of the channels
       inside one.
LAUNCH
    v1 ceil(n / 256) blocks of 256 threads; v2 a quarter of them.
DETERMINISM
    each output is written by one thread; float32 division is exact to the last bit, so engines
    agree bitwise.
COST
    bytes: n read, 4 n written. A batch is uploaded as bytes and grows to float32 only here: a
    quarter of the transfer.
SOURCE
    Ho et al. 2020, arXiv:2006.11239, section 3.3: images scaled linearly to [-1, 1].
READ NEXT
    q_sample.py, which adds the noise.
"""

import math

import numpy as np

from ...device import cuda, empty, float32, launch, store4, uint32, zeros
from ..operation import (
    Problem,
    filled,
    integers,
    lacks_multiple,
    naive_and_vectorised,
    operation,
    single,
)

BLOCK = 256  # threads
HALF_RANGE = np.float32(127.5)
# where neighbouring float32 are one apart: adding it rounds, taking it away is exact
TO_WHOLE = np.float32(2**23)


def images_forward_reference(images, flip=None):
    y = images.astype(np.float32)
    y /= HALF_RANGE
    y -= np.float32(1)
    if flip is not None:
        mirrored = np.flatnonzero(flip)
        y[mirrored] = y[mirrored, :, ::-1]
    return y


def pixels_forward_reference(x):
    y = x + np.float32(1)
    y *= HALF_RANGE
    return np.clip(np.rint(y, out=y), 0, 255, out=y).astype(np.uint8)


# Device function ----------------------------------------------------------------------------------


@cuda.jit(device=True)
def normalised(x, row, offset, mirror, width, channels):
    """The output at `offset` = w · C + c of the image row that begins at x[row]."""
    w = uint32(offset) // channels
    c = uint32(offset) - w * channels
    if mirror:
        w = width - uint32(1) - w
    return float32(x[row + w * channels + c]) / HALF_RANGE - float32(1)


# v1: one thread an element ------------------------------------------------------------------------


@cuda.jit
def images_forward_kernel_v1(x, flip, y, height, width, channels):
    i = cuda.grid(1)
    if i < y.size:
        # of an image row; unsigned throughout, so that no index becomes a float
        length = uint32(width * channels)
        r = uint32(uint32(i) // length)
        mirror = flip[r // height] != 0
        y[i] = normalised(x, r * length, uint32(i) - r * length, mirror, width, channels)


@cuda.jit
def pixels_forward_kernel_v1(x, y):
    i = cuda.grid(1)
    if i < y.size:
        value = min(max((x[i] + float32(1)) * HALF_RANGE, float32(0)), float32(255))
        y[i] = np.uint8(value + TO_WHOLE - TO_WHOLE)


# v2: four elements of a row -----------------------------------------------------------------------


@cuda.jit
def images_forward_kernel_v2(x, flip, y, height, width, channels):
    i = cuda.grid(1) * 4
    if i < y.size:
        length = uint32(width * channels)
        r = uint32(uint32(i) // length)
        row = r * length
        o = uint32(i) - row
        mirror = flip[r // height] != 0
        store4(
            y,
            i,
            normalised(x, row, o, mirror, width, channels),
            normalised(x, row, o + uint32(1), mirror, width, channels),
            normalised(x, row, o + uint32(2), mirror, width, channels),
            normalised(x, row, o + uint32(3), mirror, width, channels),
        )


# Cost ---------------------------------------------------------------------------------------------


def images_forward_cost(shape):
    n = math.prod(shape)
    return 5 * n, 2 * n


def pixels_forward_cost(n):
    return 5 * n, 2 * n


# Operations ---------------------------------------------------------------------------------------


def _check(images, flip):
    if images.ndim != 4 or images.dtype != np.uint8:
        raise ValueError(
            f"images must be uint8 of shape (B, H, W, C), got {images.dtype}{tuple(images.shape)}"
        )
    if flip is not None and (flip.shape != (images.shape[0],) or flip.dtype != np.int32):
        raise ValueError(
            f"flip must be int32 of shape ({images.shape[0]},), got {flip.dtype}{tuple(flip.shape)}"
        )


def _pictures(*shape):
    return filled(shape, lambda rng: rng.integers(0, 256, shape), np.uint8)


@operation(
    reference=images_forward_reference,
    cost=images_forward_cost,
    check=_check,
    versions=naive_and_vectorised(
        images_forward_kernel_v1,
        images_forward_kernel_v2,
        lambda images: lacks_multiple(4, images.shape[2] * images.shape[3], "bytes of a row"),
    ),
    problems=[
        Problem(images=_pictures(2, 3, 4, 3), flip=integers([0, 1])),
        Problem(images=_pictures(3, 4, 4, 1)),
        Problem(images=_pictures(2, 3, 7, 3), flip=integers([1, 0])),
        Problem(
            images=_pictures(32, 64, 64, 3),
            flip=filled((32,), lambda rng: rng.integers(0, 2, 32), np.int32),
            measured=True,
        ),
    ],
)
def images_forward(images, flip=None, version=None):
    """uint8 images (B, H, W, C) → float32 in [-1, 1], mirrored left to right where flip[b] is not
    0."""
    batch, height, width, channels = images.shape
    if flip is None:
        flip = zeros((batch,), np.int32, like=images)
    y = empty(images.shape, np.float32, like=images)
    launch(
        version.kernel,
        -(-y.size // (version.width * BLOCK)),
        BLOCK,
        images.reshape(-1),
        flip,
        y.reshape(-1),
        uint32(height),
        uint32(width),
        uint32(channels),
    )
    return y


@operation(
    reference=pixels_forward_reference,
    cost=pixels_forward_cost,
    problems=[Problem(x=single(2, 3, 4, 3))],
)
def pixels_forward(x):
    """float32 images, clipped to [-1, 1], as uint8 of the same shape."""
    if x.dtype != np.float32:
        raise ValueError(f"images must be float32, got {x.dtype}; use cast_forward first")
    y = empty(x.shape, np.uint8, like=x)
    launch(pixels_forward_kernel_v1, -(-y.size // BLOCK), BLOCK, x.reshape(-1), y.reshape(-1))
    return y
