"""Channel concatenation: how a UNet's skip connections join the way up.

MATHEMATICS
    y[p] = a[p] followed by b[p], for every pixel p         da[p], db[p] = the two parts of dy[p]
SHAPES
    a (..., Ca), b (..., Cb), y (..., Ca + Cb) float32, equal leading axes, read together as P pixels
VERSIONS
    v1 one thread a number of y: it finds its pixel and channel, and with them its source (backward: its target).
    v2 one thread four channels, by 16-byte loads and stores, where both parts are multiples of four channels.
LAUNCH
    one thread a number of y (v1) or four (v2), 256 a block. No shared memory.
DETERMINISM
    a copy: no arithmetic at all.
COST
    bytes: y is written once, a and b are read once. Roof: memory bandwidth.
SOURCE
    the UNet: Ronneberger, Fischer and Brox 2015, arXiv:1505.04597, figure 1 ("copy").
READ NEXT
    groupnorm.py, which reads what this writes.
"""
import numpy as np

from ..device import cuda, empty, is_device, launch, load4, store4
from .im2col import divide

BLOCK = 256  # threads


# References -----------------------------------------------------------------------------------------------------------

def concat_forward_reference(a, b):
    return np.concatenate((a, b), axis=-1)


def concat_backward_reference(dy, channels_a):
    return np.ascontiguousarray(dy[..., :channels_a]), np.ascontiguousarray(dy[..., channels_a:])


# v1: one thread a number ----------------------------------------------------------------------------------------------

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


# v2: one thread four channels -----------------------------------------------------------------------------------------
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


# Launchers ------------------------------------------------------------------------------------------------------------

def _launch_concat(kernel_v1, kernel_v2, version, joined, channels_a, channels_b, *arrays):
    aligned = channels_a % 4 == 0 and channels_b % 4 == 0
    if joined.size >= 2**31:
        raise ValueError(f"{joined.shape} has too many elements for 32-bit indices: split the batch")
    if version is None:
        version = 2 if aligned else 1
    if version == 2 and not aligned:
        raise ValueError(f"version 2 moves four channels at a time, and {channels_a} and {channels_b} are not both "
                         "multiples of 4; use version=1")
    threads = joined.size if version == 1 else joined.size // 4
    launch(kernel_v1 if version == 1 else kernel_v2, -(-threads // BLOCK), BLOCK, *(x.reshape(-1) for x in arrays),
           channels_a, channels_b)


def concat_forward(a, b, version=None):
    """a (..., Ca) and b (..., Cb) side by side, as a new array (..., Ca + Cb)."""
    if a.shape[:-1] != b.shape[:-1]:
        raise ValueError(f"only the channels of a {a.shape} and b {b.shape} may differ")
    if not is_device(a):
        return concat_forward_reference(a, b)
    channels_a, channels_b = a.shape[-1], b.shape[-1]
    y = empty((*a.shape[:-1], channels_a + channels_b), a.dtype, like=a)
    _launch_concat(concat_forward_kernel_v1, concat_forward_kernel_v2, version, y, channels_a, channels_b, a, b, y)
    return y


def concat_backward(dy, channels_a, version=None):
    """(da, db): the first `channels_a` channels of dy and the others, as new arrays."""
    channels_b = dy.shape[-1] - channels_a
    if not 0 < channels_a < dy.shape[-1]:
        raise ValueError(f"channels_a is {channels_a}: both sides need some of dy's {dy.shape[-1]} channels")
    if not is_device(dy):
        return concat_backward_reference(dy, channels_a)
    da, db = (empty((*dy.shape[:-1], c), dy.dtype, like=dy) for c in (channels_a, channels_b))
    _launch_concat(concat_backward_kernel_v1, concat_backward_kernel_v2, version, dy, channels_a, channels_b, dy, da,
                   db)
    return da, db


# Cost -----------------------------------------------------------------------------------------------------------------

def concat_forward_cost(pixels, channels_a, channels_b):
    """(bytes, FLOPs); the backward costs the same."""
    return 4 * 2 * pixels * (channels_a + channels_b), 0


def concat_backward_cost(pixels, channels_a, channels_b):
    return concat_forward_cost(pixels, channels_a, channels_b)
