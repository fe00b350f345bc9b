"""Resampling by two: average pooling and nearest upsampling, each the other's backward.

MATHEMATICS
    avgpool    y[i,j] = (x[2i,2j] + x[2i,2j+1] + x[2i+1,2j] + x[2i+1,2j+1]) / 4    dx[h,w] = dy[h//2, w//2] / 4
    upsample   y[h,w] = x[h//2, w//2]                                              dx[i,j] = sum of dy's 2 × 2 block
    So there are two movements, "sum 2 × 2 blocks" and "repeat into 2 × 2 blocks", each with a factor: ¼ or 1.
SHAPES
    x (B, H, W, C) float32; avgpool y (B, H/2, W/2, C), H and W even; upsample y (B, 2H, 2W, C)
VERSIONS
    v1 naive: one thread an output. Channels are innermost, so a warp reads 128 neighbouring bytes of each of the
       pixels.
    v2 vectorised: one thread four channels, by 16-byte loads and stores: a quarter of the index arithmetic and
       instructions.
MEASURED
    NVIDIA H200, 2026-11-22, PyTorch 2.11.0: numdiff bench kernels --of files; * is the launcher's choice
    avgpool_forward, 32×64×64×64, float16
        v1      13.3 µs    1,582 GB/s   39 % of memory
        v2*     6.76 µs    3,100 GB/s   76 % of memory   1.96 × v1
    upsample_forward, 32×32×32×128, float16
        v1      79.2 µs      529 GB/s   13 % of memory
        v2*     21.7 µs    1,934 GB/s   47 % of memory   3.65 × v1
LAUNCH
    one thread an output (v1) or four (v2), 256 a block. No shared memory.
DETERMINISM
    each output is written by one thread, which adds its four inputs in a fixed order.
COST
    bytes: the larger array once and the smaller once, 5 numbers an element of the smaller. Roof: memory bandwidth.
SOURCE
    the UNet's down- and upsampling without convolution: Dhariwal and Nichol 2021, arXiv:2105.05233.
READ NEXT
    concat.py, the other half of a UNet's wiring.
"""
import numpy as np

from ..device import cuda, empty, float32, is_device, launch, load4, store4
from ..dtypes import in_single
from ..errors import TooManyElementsError
from .common import divide
from .versions import versions_by_name

BLOCK = 256  # threads


# References -----------------------------------------------------------------------------------------------------------

@in_single()
def sum_blocks_reference(x, factor):
    y = x[:, 0::2, 0::2] + x[:, 0::2, 1::2]
    y += x[:, 1::2, 0::2]
    y += x[:, 1::2, 1::2]
    y *= x.dtype.type(factor)
    return y


@in_single()
def repeat_blocks_reference(x, factor):
    b, h, w, c = x.shape
    y = np.empty((b, h, 2, w, 2, c), x.dtype)
    y[...] = (x * x.dtype.type(factor) if factor != 1 else x)[:, :, None, :, None]
    return y.reshape(b, 2 * h, 2 * w, c)


# v1: one thread an output ---------------------------------------------------------------------------------------------

@cuda.jit
def sum_blocks_kernel_v1(x, y, W, C, factor):
    n = cuda.grid(1)  # W is the width of y, the smaller image; the rows of all images are counted through
    if n < y.size:
        rest, c = divide(n, C)
        row, j = divide(rest, W)
        above = (4 * row * W + 2 * j) * C + c  # x's row 2·row has 2·W pixels
        below = above + 2 * W * C
        y[n] = factor * (float32(x[above]) + float32(x[above + C]) + float32(x[below]) + float32(x[below + C]))


@cuda.jit
def repeat_blocks_kernel_v1(x, y, W, C, factor):
    n = cuda.grid(1)  # W is the width of y, the larger image
    if n < y.size:
        rest, c = divide(n, C)
        row, j = divide(rest, W)
        y[n] = factor * float32(x[((row // 2) * (W // 2) + j // 2) * C + c])


# v2: one thread four channels -----------------------------------------------------------------------------------------

@cuda.jit
def sum_blocks_kernel_v2(x, y, W, C, factor):
    n = cuda.grid(1) * 4
    if n < y.size:
        rest, c = divide(n, C)
        row, j = divide(rest, W)
        above = (4 * row * W + 2 * j) * C + c
        below = above + 2 * W * C
        p0, p1, p2, p3 = load4(x, above)
        q0, q1, q2, q3 = load4(x, above + C)
        r0, r1, r2, r3 = load4(x, below)
        s0, s1, s2, s3 = load4(x, below + C)
        store4(y, n, factor * (p0 + q0 + r0 + s0), factor * (p1 + q1 + r1 + s1), factor * (p2 + q2 + r2 + s2),
               factor * (p3 + q3 + r3 + s3))


@cuda.jit
def repeat_blocks_kernel_v2(x, y, W, C, factor):
    n = cuda.grid(1) * 4
    if n < y.size:
        rest, c = divide(n, C)
        row, j = divide(rest, W)
        x0, x1, x2, x3 = load4(x, ((row // 2) * (W // 2) + j // 2) * C + c)
        store4(y, n, factor * x0, factor * x1, factor * x2, factor * x3)


# Launchers ------------------------------------------------------------------------------------------------------------

def _launch_blocks(kernel_v1, kernel_v2, version, x, y, factor):
    w, c = y.shape[2:]
    if max(x.size, y.size) >= 2**31:
        raise TooManyElementsError(f"{x.shape} or {y.shape} has too many elements for 32-bit indices: split the batch")
    if version is None:
        version = 2 if c % 4 == 0 else 1
    if version == 2 and c % 4:
        raise ValueError(f"version 2 (vectorised) moves four channels at a time, and {c} is not a multiple of 4; use "
                         "version=1")
    threads = y.size if version == 1 else y.size // 4
    launch(kernel_v1 if version == 1 else kernel_v2, -(-threads // BLOCK), BLOCK, x.reshape(-1), y.reshape(-1), w, c,
           float32(factor))
    return y


def _sum_blocks(x, factor, version):
    b, h, w, c = x.shape
    if h % 2 or w % 2:
        raise ValueError(f"an image of {h} × {w} pixels cannot be halved: both must be even")
    if not is_device(x):
        return sum_blocks_reference(x, factor)
    y = empty((b, h // 2, w // 2, c), x.dtype, like=x)
    return _launch_blocks(sum_blocks_kernel_v1, sum_blocks_kernel_v2, version, x, y, factor)


def _repeat_blocks(x, factor, version):
    b, h, w, c = x.shape
    if not is_device(x):
        return repeat_blocks_reference(x, factor)
    y = empty((b, 2 * h, 2 * w, c), x.dtype, like=x)
    return _launch_blocks(repeat_blocks_kernel_v1, repeat_blocks_kernel_v2, version, x, y, factor)


@versions_by_name
def avgpool_forward(x, version=None):
    """Mean of every 2 × 2 block of pixels: (B, H, W, C) to a new (B, H/2, W/2, C)."""
    return _sum_blocks(x, 0.25, version)


@versions_by_name
def avgpool_backward(dy, version=None):
    """dx (B, 2·H, 2·W, C) of dy (B, H, W, C): each of a block's four pixels had the weight ¼."""
    return _repeat_blocks(dy, 0.25, version)


@versions_by_name
def upsample_forward(x, version=None):
    """Every pixel repeated into a 2 × 2 block: (B, H, W, C) to a new (B, 2·H, 2·W, C)."""
    return _repeat_blocks(x, 1.0, version)


@versions_by_name
def upsample_backward(dy, version=None):
    """dx (B, H/2, W/2, C) of dy (B, H, W, C): the sum over the block that each pixel went into."""
    return _sum_blocks(dy, 1.0, version)


# Cost -----------------------------------------------------------------------------------------------------------------

def avgpool_forward_cost(B, H, W, C):
    """(bytes, FLOPs) of pooling H × W pixels."""
    smaller = B * (H // 2) * (W // 2) * C
    return 4 * 5 * smaller, 4 * smaller


def avgpool_backward_cost(B, H, W, C):
    """(bytes, FLOPs) of spreading a gradient of H × W pixels over 2·H × 2·W."""
    return 4 * 5 * B * H * W * C, 4 * B * H * W * C


def upsample_forward_cost(B, H, W, C):
    return 4 * 5 * B * H * W * C, 0


def upsample_backward_cost(B, H, W, C):
    return avgpool_forward_cost(B, H, W, C)
