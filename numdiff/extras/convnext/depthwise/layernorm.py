"""Depthwise convolution and the LayerNorm over its channels, in one kernel: how a ConvNeXt block begins.

MATHEMATICS
    h = the depthwise convolution of x, plus bias[c] and channel[b,c] (reference.py)
    y = (h - mean) · rstd · gain[c] + offset[c], mean and rstd of each pixel over its channels (kernels/layernorm.py)
    The backward is that of both: dh from kernels/layernorm.py, whose pass also adds it up over each image, which is the
    gradient of channel; dx and the parameters' gradients from reference.py.
SHAPES
    x, h, y (B, H, W, C) float16 or bfloat16, C a multiple of 8 up to 512; weight (7, 7, C) like x; bias, gain, offset
    (C,), channel (B, C), mean, rstd (B · H · W,) float32
WHAT IS NEW
    A pixel is normalised when all of its channels are there, so a block convolves them all, a slice of 64 after the
    other (mma.py), stores h, which the backward needs anyway, and after a barrier reads its own tile again,
    which is in the L2 cache still. A warp then takes four pixels at a time: each lane has four channels of each in
    registers, and the sums of the four travel through the shuffles together.
WHY IT PAYS
    h is not read from memory again, and a launch is saved: 6 bytes a number instead of 8. The bits are those of mma.py
    and a separate LayerNorm.
VERSIONS
    v1 apart: the launcher's depthwise convolution, then LayerNorm: the choice wherever the convolution is hopper.py's,
       and for few tiles.
    v2 fused: this kernel.
WHY IT IS SELDOM CHOSEN
    A block has all channels of its tile, one slice after the other, with nothing in flight meanwhile: for the 256
    tiles of 32×32×32×128, two a multiprocessor, it took 29.6 µs on an H200, where mma.py and the LayerNorm take 17 and
    7, hopper.py and the LayerNorm 10 and 7. More tiles would hide its waiting and show what it saves; TILES says from
    how many on, which is an estimate. A tile of hopper.py has 32 channels, so to norm there the blocks of a pixel's
    channels would have to meet in a cluster; it would save the 3 µs for which h is read, and a launch.
LAUNCH
    v2 a block for each tile of 8 × 16 pixels: 256 threads, a warp for eight channels, then for a row of pixels; 59 KB
    of dynamic shared memory.
DETERMINISM
    as mma.py; a butterfly of shuffles has one order.
COST
    2·pixels·C·49 FLOPs and 8 more for each number of the norm; 6 bytes a number: x read, h and y written.
SOURCE
    Liu et al. 2022, "A ConvNet for the 2020s", arXiv:2201.03545, figure 4.
READ NEXT
    ../block.py
"""
import math
from typing import NamedTuple

import numpy as np

from ....device import cuda, empty, empty_like, float32, int32, is_device, launch, load4, store4, uint32
from ....device.half import in_bfloat16
from ....device.limits import WARP
from ....device.requires import requires, supports
from ....device.specialise import Constant, Variants, specialise
from ....dtypes import is_half
from ....kernels.common import divide, no_numbers, warp_sum
from ....kernels.layernorm import layernorm_backward, layernorm_forward
from ....kernels.operation import Version, operation
from ....kernels.problem import Problem, filled, half, single
from ....kernels.versions import capped, label
from .launcher import FASTEST, by_tma, depthwise_backward, depthwise_forward
from .mma import (
    BAND,
    COLUMNS,
    HALO_ROWS,
    OCTET,
    PAIRS,
    PLANE,
    SLICE,
    TILE,
    WORDS,
    Image,
    K,
    load_added,
    load_bands,
    load_planes,
    multiply_octet,
    place_of,
    store_octet,
)
from .reference import depthwise_forward_cost

KERNEL, TILE_ROWS, TILE_COLUMNS, CHANNELS = 7, 8, 16, 64  # of the taps; of a tile; of a slice
BLOCK = CHANNELS // 8 * WARP
LARGEST = 512  # channels that a warp's registers take
PIXELS = 4  # that a warp normalises at a time
TILES = 4  # for each multiprocessor, from which on the fused kernel runs where hopper.py does not: an estimate

CHUNKS = Constant()  # of 128 channels
NUMBERS = Constant(lambda CHUNKS: 4 * PIXELS * CHUNKS)
WORDS_OF_TILE = Constant(lambda TILE: TILE // 2)


class Norm(NamedTuple):
    """gain, offset (C,); mean, rstd (pixels,); eps."""

    gain: object
    offset: object
    mean: object
    rstd: object
    eps: float


@cuda.jit(device=True, forceinline=True)
def load_pixels(numbers, sums, h, row, count, C, lane):
    """A lane's four channels of each chunk of PIXELS pixels from `row` on, `count` of which there are, and their
    sums."""
    for p in range(PIXELS):
        total = float32(0)
        for k in range(CHUNKS):
            c, at = int32(4 * lane + 128 * k), 4 * (p * CHUNKS + k)
            x0 = x1 = x2 = x3 = float32(0)
            if p < count and c < C:
                x0, x1, x2, x3 = load4(h, (row + p) * C + c)
            total += (x0 + x1) + (x2 + x3)
            numbers[at], numbers[at + 1], numbers[at + 2], numbers[at + 3] = x0, x1, x2, x3
        sums[p] = total


@cuda.jit(device=True, forceinline=True)
def centre_pixels(numbers, sums, means, C, lane):
    """numbers - mean of each pixel, and the sums of their squares."""
    for p in range(PIXELS):
        means[p] = warp_sum(sums[p]) / float32(C)
    for p in range(PIXELS):
        total = float32(0)
        for k in range(CHUNKS):
            at = 4 * (p * CHUNKS + k)
            for e in range(4):
                numbers[at + e] -= means[p]
            if 4 * lane + 128 * k < C:
                total += ((numbers[at] * numbers[at] + numbers[at + 1] * numbers[at + 1])
                          + (numbers[at + 2] * numbers[at + 2] + numbers[at + 3] * numbers[at + 3]))
        sums[p] = total


@cuda.jit(device=True, forceinline=True)
def normalise_pixels(y, h, norm, row, count, C, lane):
    """y of `count` pixels, at most PIXELS, from `row` on; by a warp."""
    numbers, sums = cuda.local.array(NUMBERS, "float32"), cuda.local.array(PIXELS, "float32")
    means = cuda.local.array(PIXELS, "float32")
    load_pixels(numbers, sums, h, row, count, C, lane)
    centre_pixels(numbers, sums, means, C, lane)
    for p in range(PIXELS):
        sums[p] = float32(1) / math.sqrt(warp_sum(sums[p]) / float32(C) + norm.eps)
    for k in range(CHUNKS):
        c = int32(4 * lane + 128 * k)
        if c < C:
            w0, w1, w2, w3 = load4(norm.gain, c)
            b0, b1, b2, b3 = load4(norm.offset, c)
            for p in range(PIXELS):
                if p < count:
                    at, scale = 4 * (p * CHUNKS + k), sums[p]
                    store4(y, (row + p) * C + c, numbers[at] * scale * w0 + b0, numbers[at + 1] * scale * w1 + b1,
                           numbers[at + 2] * scale * w2 + b2, numbers[at + 3] * scale * w3 + b3)
    for p in range(PIXELS):
        if lane == 0 and p < count:
            norm.mean[uint32(row + p)] = means[p]
            norm.rstd[uint32(row + p)] = sums[p]


@requires("8.0")
def depthwise_layernorm_kernel(x, weight, bias, channel, h, y, norm, slices, image):
    tile = cuda.shared.array(0, x.dtype.type, alignment=128)[:TILE]
    bands, added = cuda.shared.array(0, uint32, alignment=128)[WORDS_OF_TILE:], cuda.shared.array(SLICE, float32)
    b, top, left = place_of(int32(cuda.blockIdx.x), image)
    warp, lane = divide(int32(cuda.threadIdx.x), int32(WARP))
    for part in range(slices):
        corner = b, int32(top - K // 2), int32(left - K // 2), int32(part * SLICE)
        cuda.syncthreads()  # the slice before is no longer read
        load_bands(bands, weight, corner[3], image)
        load_added(added, bias, channel, b, corner[3], image)
        load_planes(tile, x, HALO_ROWS, PAIRS, PLANE, OCTET, corner, image)
        cuda.syncthreads()
        i, c = int32(top + (lane >> 2)), int32(part * SLICE + 8 * warp)
        if c < image.C:  # the same for the whole warp
            words = cuda.local.array(WORDS, "uint32")
            multiply_octet(words, tile, bands, added, int32(0), warp, lane)
            if i < image.H:
                store_octet(h, words, h, int32(((b * image.H + i) * image.W + left) * image.C + c), left, lane, image)
    cuda.syncthreads()
    i = int32(top + warp)  # a warp a row of pixels
    if i < image.H:
        for j in range(left, min(int32(left + COLUMNS), int32(image.W)), int32(PIXELS)):
            count = min(int32(PIXELS), int32(image.W - j))
            normalise_pixels(y, h, norm, int32((b * image.H + i) * image.W + j), count, image.C, lane)


def shared_bytes():
    """Of the planes, with their halo, and the taps of a slice."""
    octets, plane = CHANNELS // 8, (TILE_ROWS + KERNEL - 1) * (TILE_COLUMNS + 8)
    return 2 * octets * (8 * plane + 64 // octets) + 4 * CHANNELS * BAND


FORWARD = Variants(range(1, LARGEST // 128 + 1), lambda chunks: specialise(
    depthwise_layernorm_kernel, launch_bounds=BLOCK, K=KERNEL, COLUMNS=TILE_COLUMNS, THREADS=BLOCK, FETCHES=4,
    ROWS=TILE_ROWS, SLICE=CHANNELS, CHUNKS=chunks))


def tiles_of(x):
    B, H, W, _ = x.shape
    return B * -(-H // TILE_ROWS) * -(-W // TILE_COLUMNS)


def fits(x, kernel):
    """Whether the fused kernel takes these."""
    return (is_device(x) and is_half(x.dtype) and kernel == KERNEL and x.shape[3] % 8 == 0 and x.shape[3] <= LARGEST
            and supports(x, FORWARD))


def depthwise_layernorm_version(x, kernel):
    """What runs: 2, the fused kernel, where it should be faster than the two of 1."""
    fast = capped("depthwise", FASTEST["forward"] if by_tma(x) else 3)
    return capped("depthwise_layernorm", 2) if (
        fits(x, kernel) and fast == 3 and capped("layernorm", 2) == 2
        and tiles_of(x) >= TILES * x.backend.multiprocessors) else 1


def depthwise_layernorm_forward_cost(B, H, W, C, kernel, itemsize=2):
    """(bytes, FLOPs): x read, h and y written."""
    moved, flops = depthwise_forward_cost(B, H, W, C, kernel, itemsize)
    return moved + itemsize * B * H * W * C, flops + 8 * B * H * W * C


def forward_on_cpu(x, weight, bias, channel, gain, offset, eps=1e-6):
    h = depthwise_forward(x, weight, bias, channel)
    return h, *layernorm_forward(h, gain, offset, eps)


def _problems():
    """Rows of pixels that warps do not fill; in version 2 two slices, and each number of chunks that a warp has."""
    found = []
    for B, H, W, C in ((1, 1, 17, 8), (1, 1, 3, 72), (1, 1, 1, 136), (1, 1, 1, 264), (1, 1, 1, 392)):
        # the means of the channels are results, too: none is nearly 0
        bias = filled((C,), lambda rng, C=C: 4 + rng.standard_normal(C))
        found.append(Problem(f"float16, {W} wide, {C} channels", x=half(B, H, W, C), weight=half(7, 7, C), bias=bias,
                             channel=single(B, C), gain=single(C), offset=single(C),
                             versions=("apart", "fused") if C == 8 else ("fused",), once=True, fast=C < 100,
                             only_compiled=C == 264))  # another has fewer channels, another more
    return found


VECTOR = single(128)  # of a ConvNeXt block, for the benchmark


@operation(reference=forward_on_cpu, cost=depthwise_layernorm_forward_cost, chooses=True,
           versions=[Version("apart"), Version("fused")],
           problems=[*_problems(), Problem(x=half(32, 32, 32, 128), weight=half(7, 7, 128), bias=VECTOR,
                                           channel=single(32, 128), gain=VECTOR, offset=VECTOR, measured=True)])
def depthwise_layernorm_forward(x, weight, bias, channel, gain, offset, eps=1e-6, version=None):
    """(h, y, mean, rstd): h the depthwise convolution of x (B, H, W, C) with weight (kernel, kernel, C), plus bias (C,)
    and channel (B, C), or None; y its LayerNorm over the channels with gain and offset (C,); mean and rstd (pixels,).
    """
    if version == 2 and not fits(x, len(weight)):
        raise ValueError(f"version {label('depthwise_layernorm', 2)} takes float16 and bfloat16, 7 × 7 taps and a "
                         f"multiple of 8 channels up to {LARGEST}, on a device of capability 8.0, not {x.dtype}, "
                         f"{len(weight)} × {len(weight)} and {x.shape[3]} here; use version=1")
    if (version or depthwise_layernorm_version(x, len(weight))) == 1:
        h = depthwise_forward(x, weight, bias, channel)
        return h, *layernorm_forward(h, gain, offset, eps)
    (B, H, W, C), nothing = x.shape, no_numbers(x.backend)
    for name, array, shape in (("weight", weight, (KERNEL, KERNEL, C)), ("bias", bias, (C,)), ("gain", gain, (C,)),
                               ("channel", channel, (B, C)), ("offset", offset, (C,))):
        if array is not None and tuple(array.shape) != shape:
            raise ValueError(f"{name} has shape {tuple(array.shape)}, a depthwise convolution and LayerNorm of x "
                             f"{tuple(x.shape)} need {shape}")
    h, y = empty_like(x), empty_like(x)
    mean, rstd = (empty((B * H * W,), np.float32, like=x) for _ in range(2))
    launch(in_bfloat16(FORWARD[-(-C // 128)], x.dtype), tiles_of(x), BLOCK, x.reshape(-1), weight.reshape(-1),
           *(nothing if a is None else a.reshape(-1) for a in (bias, channel)), h.reshape(-1), y.reshape(-1),
           Norm(gain, offset, mean, rstd, float(eps)), -(-C // CHANNELS),
           Image(H, W, C, 0, int(bias is not None), int(channel is not None), 0), shared=shared_bytes())
    return h, y, mean, rstd


def depthwise_layernorm_backward(dy, x, h, weight, gain, mean, rstd, gradients, need_dx=True, residual=None):
    """(dx, or None unless `need_dx`, and the gradient (B, C) of `channel`) from what the forward took and gave.

    gradients: of weight, bias, gain and offset, which are added to (None: not wanted); residual: like x, added to dx
    """
    dweight, dbias, dgain, doffset = gradients
    dh, dchannel = layernorm_backward(dy, h, gain, mean, rstd, dgain, doffset, images=len(x))
    return depthwise_backward(dh, x, weight, dweight, dbias, need_dx, True, residual, dchannel)
