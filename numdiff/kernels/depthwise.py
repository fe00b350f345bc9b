"""Depthwise convolution: every channel has a filter of its own, and no arithmetic to hide the memory behind.

MATHEMATICS
    forward   y[b,i,j,c] = bias[c] + channel[b,c] + Σ_rs x[b, i+r-pad, j+s-pad, c] · weight[r,s,c]
              x is zero outside the image, pad = kernel // 2; bias and channel may be absent
    backward  dx[b,h,w,c] = Σ_rs dy[b, h+r-pad, w+s-pad, c] · weight[kernel-1-r, kernel-1-s, c]: the same convolution,
              of dy, with the taps counted from the other end (see conv2d/direct.py)
              dweight[r,s,c] += Σ_bij dy[b,i,j,c] · x[b, i+r-pad, j+s-pad, c]
              dchannel[b,c] = Σ_ij dy[b,i,j,c]          dbias[c] += Σ_b dchannel[b,c]
SHAPES
    x, y, dx, dy (B, H, W, C) and weight (kernel, kernel, C) float32, float16 or bfloat16; kernel odd, stride 1;
    dweight, bias, dbias (C,), channel (B, C), dchannel float32
VERSIONS
    v1 naive: one thread an output, which reads kernel² pixels and as many weights. The weight gradient: one thread a
       weight, which reads all images.
    v2 tiled: a block copies a tile of pixels with its halo, of 64 bytes of channels, to shared memory, 16 bytes a copy;
       a thread computes eight neighbouring pixels of four channels in registers, so that what it reads from shared
       memory serves up to eight outputs. The weight gradient: a warp a row of taps, whose sums stay in its registers
       while the block goes from tile to tile.
    v3 mma: in float16 and bfloat16, products with banded matrices of taps on tensor cores: depthwise_mma.py.
MEASURED
    NVIDIA H200, 2026-11-23, PyTorch 2.11.0: numdiff bench kernels --of files; * is the launcher's choice
    depthwise_forward, 32×32×32×128, 7×7×128, float16
        v1       444 µs     37.9 GB/s    1 % of memory    10 % of PyTorch
        v2      20.7 µs      813 GB/s   20 % of memory   21.5 × v1   208 % of PyTorch
        v3*     17.1 µs      986 GB/s   24 % of memory   1.21 × v2   252 % of PyTorch
    depthwise_input_gradient, 32×32×32×128, 7×7×128, float16
        v1       468 µs     35.9 GB/s    1 % of memory    15 % of PyTorch
        v2      21.9 µs      766 GB/s   19 % of memory   21.3 × v1   326 % of PyTorch
        v3*     16.6 µs    1,010 GB/s   25 % of memory   1.32 × v2   430 % of PyTorch
    depthwise_weight_gradient, 32×32×32×128, 32×32×32×128, float16
        v1    10,919 µs     1.54 GB/s    0 % of memory     0 % of PyTorch
        v2      36.7 µs      459 GB/s   11 % of memory    298 × v1    90 % of PyTorch
        v3*     19.1 µs      881 GB/s   21 % of memory   1.92 × v2   173 % of PyTorch
    depthwise_forward, 64×56×56×96, 7×7×96, float16
        v2       100 µs      770 GB/s   19 % of memory   137 % of PyTorch
        v3*     64.5 µs    1,195 GB/s   29 % of memory   1.55 × v2   212 % of PyTorch
    depthwise_input_gradient, 64×56×56×96, 7×7×96, float16
        v2       103 µs      746 GB/s   18 % of memory   329 % of PyTorch
        v3*     64.4 µs    1,198 GB/s   29 % of memory   1.61 × v2   528 % of PyTorch
    depthwise_weight_gradient, 64×56×56×96, 64×56×56×96, float16
        v2       144 µs      534 GB/s   13 % of memory    84 % of PyTorch
        v3*     65.3 µs    1,181 GB/s   29 % of memory   2.21 × v2   186 % of PyTorch
LAUNCH
    v1 one thread an output, 256 a block.
    v2 of forward and dx a block for each tile of 16 × 16 pixels (8 × 8 of small images) and slice of 32 channels (16 in
    float32): 256 threads (128); 39 KB of shared memory for 7 × 7 taps. dweight: blocks of `kernel` warps, each with a
    slice and a chunk of tiles of 8 × 16 pixels; 29 KB.
DETERMINISM
    every sum has a fixed order; the chunks' parts of dweight lie in an array of their own, which reduce.py adds up.
COST
    2·pixels·C·kernel² FLOPs for each of the three passes, 2 numbers of memory an output. With 7 × 7 taps in float32
    that is 12 FLOPs a byte and the roof is memory; in float16 it is 24.5 FLOPs a byte, more than the float32 units of
    an H200 keep up with (67 TFLOP/s and 4.8 TB/s: 14): there v2 would meet the roof of arithmetic at 57 % of the
    memory's rate. v3 multiplies on tensor cores, and what holds it is neither roof: depthwise_mma.py, WHAT REMAINS.
SOURCE
    Chollet 2017, "Xception", arXiv:1610.02357; 7 × 7 taps as in Liu et al. 2022, "A ConvNet for the 2020s",
    arXiv:2201.03545, section 2.5.
READ NEXT
    linear.py: a ConvNeXt block's other products; in 16 bits depthwise_mma.py.
"""
from typing import NamedTuple

import numpy as np

from ..device import cuda, empty, float32, int32, is_device, launch, load4, store4
from ..device.async_copy import cp_async_commit, cp_async_wait_all
from ..device.eight import copy8, store8
from ..device.limits import FULL_MASK, WARP
from ..device.requires import requires, supports
from ..device.specialise import Constant, Variants, specialise
from ..dtypes import in_single, is_half
from ..errors import TooManyElementsError
from . import depthwise_mma
from .bias import channel_add_backward
from .common import divide, no_numbers
from .elementwise import add_forward
from .reduce import column_sum
from .versions import capped, label, versions_by_name

BLOCK = 256  # threads of version 1
BYTES = 64  # of a pixel's channels in a tile: two sectors of memory
RUN = 8  # neighbouring pixels of a thread
KERNELS = 3, 5, 7  # of version 2
GRADIENT_ROWS = 8  # of pixels in a tile of the weight gradient, so that x and dy take 29 KB together
GRADIENT_BLOCKS = 1024  # of the weight gradient, about: eight for each multiprocessor of a large GPU


# References -----------------------------------------------------------------------------------------------------------

def _taps(x, kernel):
    """((r, s), what tap (r, s) of each window sees, as x) of every tap."""
    (_, h, w, _), pad = x.shape, kernel // 2
    padded = np.pad(x, ((0, 0), (pad, pad), (pad, pad), (0, 0)))
    for r, s in np.ndindex(kernel, kernel):
        yield (r, s), padded[:, r:r + h, s:s + w]


@in_single()
def depthwise_forward_reference(x, weight, bias=None, channel=None):
    y = np.zeros_like(x)
    for tap, seen in _taps(x, len(weight)):
        y += seen * weight[tap]
    addends = bias, None if channel is None else channel[:, None, None]
    return sum((a for a in addends if a is not None), y)


@in_single()
def depthwise_input_gradient_reference(dy, weight):
    return depthwise_forward_reference(dy, weight[::-1, ::-1])


@in_single()
def depthwise_weight_gradient_reference(dy, x, dweight):
    for tap, seen in _taps(x, len(dweight)):
        dweight[tap] += np.einsum("bijc,bijc->c", dy, seen)


class Image(NamedTuple):
    """Of x and y (·, H, W, C); flip: 1 to count the taps from the other end; bias, channel: whether there is one."""

    H: int
    W: int
    C: int
    flip: int
    bias: int
    channel: int


# v1: one thread an output ---------------------------------------------------------------------------------------------

@cuda.jit
def depthwise_forward_kernel_v1(x, weight, bias, channel, y, kernel, image):
    H, W, C = image.H, image.W, image.C
    out = cuda.grid(1)
    if out < y.size:
        pixel, c = divide(out, C)
        row, j = divide(pixel, W)
        b, i = divide(row, H)
        total = bias[c] if image.bias else float32(0)
        if image.channel:
            total += channel[b * C + c]
        for r in range(kernel):
            h = i + r - kernel // 2
            for s in range(kernel):
                w = j + s - kernel // 2
                if h >= 0 and h < H and w >= 0 and w < W:
                    tap = r * kernel + s
                    if image.flip:
                        tap = kernel * kernel - 1 - tap
                    total += float32(x[((b * H + h) * W + w) * C + c]) * float32(weight[tap * C + c])
        y[out] = total


@cuda.jit
def depthwise_weight_gradient_kernel_v1(dy, x, dweight, B, H, W, C, kernel):
    out = cuda.grid(1)
    if out < dweight.size:
        tap, c = divide(out, C)
        r, s = divide(tap, kernel)
        total = float32(0)
        for b in range(B):
            for i in range(H):
                h = i + r - kernel // 2
                row_total = float32(0)  # a sum for each row: a running sum over 100,000 pixels would lose two digits
                for j in range(W):
                    w = j + s - kernel // 2
                    if h >= 0 and h < H and w >= 0 and w < W:
                        row_total += (float32(dy[((b * H + i) * W + j) * C + c])
                                      * float32(x[((b * H + h) * W + w) * C + c]))
                total += row_total
        dweight[out] += total


# v2: tiles in shared memory, runs of pixels in registers --------------------------------------------------------------
# WHAT IS NEW: neighbouring outputs share all but a column of what they see. A block of 16 × 16 outputs reads 22 × 22
# pixels once, not 49 times, and a thread with eight outputs in a row reads 14 pixels of a row of taps, not 56.
# WHY IT PAYS: version 1 has two loads for every product; here it is 21 loads of four numbers for 224 products.
# Rows of the tile are an odd number of pixels, of 64 bytes, apart, so that two rows' pixels lie in different banks.

K, SLICE, ROWS, COLUMNS = Constant(), Constant(), Constant(), Constant()  # taps a row, channels, a tile's pixels
HALO_ROWS, HALO_COLUMNS = Constant(lambda ROWS, K: ROWS + K - 1), Constant(lambda COLUMNS, K: COLUMNS + K - 1)
PITCH = Constant(lambda HALO_COLUMNS, SLICE: (HALO_COLUMNS | 1) * SLICE)
TILE = Constant(lambda HALO_ROWS, PITCH: HALO_ROWS * PITCH)
DY_PITCH = Constant(lambda COLUMNS, SLICE: (COLUMNS | 1) * SLICE)
DY_TILE = Constant(lambda ROWS, DY_PITCH: ROWS * DY_PITCH)
TAPS, WEIGHTS = Constant(lambda K: K * K), Constant(lambda K, SLICE: K * K * SLICE)
QUADS, OCTETS = Constant(lambda SLICE: SLICE // 4), Constant(lambda SLICE: SLICE // 8)
GROUPS = Constant(lambda QUADS: WARP // QUADS)  # rows of pixels that a warp of the weight gradient adds up at a time
RUN4, K4, SEEN4 = 4 * RUN, Constant(lambda K: 4 * K), Constant(lambda K: 4 * (RUN + K - 1))


@cuda.jit(device=True, forceinline=True)
def copy_pixels(tile, pitch, rows, columns, x, b, top, left, first, image):
    """Start copies of rows × columns pixels from (top, left) of image b, of the channels from `first` on; zeros where
    there are none. All threads call it."""
    zero = float32(0)
    for k in range(int32(cuda.threadIdx.x), rows * columns * OCTETS, int32(cuda.blockDim.x)):
        pixel, octet = divide(k, int32(OCTETS))
        i, j = divide(pixel, int32(columns))
        at = int32(i * pitch + j * SLICE + octet * 8)
        h, w, c = int32(top + i), int32(left + j), int32(first + octet * 8)
        if h >= 0 and h < image.H and w >= 0 and w < image.W and c < image.C:
            copy8(tile, at, x, ((b * image.H + h) * image.W + w) * image.C + c)
        else:
            store8(tile, at, (zero, zero, zero, zero, zero, zero, zero, zero))


@cuda.jit(device=True, forceinline=True)
def place_of(tile, image):
    """(image, first row, first column) of a tile of all images."""
    across, down = int32(-(-image.W // COLUMNS)), int32(-(-image.H // ROWS))
    rest, j = divide(tile, across)
    b, i = divide(rest, down)
    return b, int32(i * ROWS), int32(j * COLUMNS)


@cuda.jit(device=True, forceinline=True)
def look_at(seen, tile, x):
    """What the taps of one row see from a run of pixels, of four channels: the tile's numbers from x on."""
    for q in range(RUN + K - 1):
        x0, x1, x2, x3 = load4(tile, x + q * SLICE)
        seen[4 * q], seen[4 * q + 1], seen[4 * q + 2], seen[4 * q + 3] = x0, x1, x2, x3


@cuda.jit(device=True, forceinline=True)
def multiply_row(totals, seen, weights, w, tile, x):
    """totals[p] += x[p + s] · weight[s] for the pixels p of a run and the taps s of one row, of four channels; pixels
    are read from x on, weights from w on."""
    look_at(seen, tile, x)
    for s in range(K):
        w0, w1, w2, w3 = load4(weights, w + s * SLICE)
        for p in range(RUN):
            totals[4 * p] += seen[4 * (p + s)] * w0
            totals[4 * p + 1] += seen[4 * (p + s) + 1] * w1
            totals[4 * p + 2] += seen[4 * (p + s) + 2] * w2
            totals[4 * p + 3] += seen[4 * (p + s) + 3] * w3


@requires("8.0")
def depthwise_forward_kernel_v2(x, weight, bias, channel, y, slices, image):
    tile = cuda.shared.array(TILE, x.dtype.type, alignment=128)
    weights = cuda.shared.array(WEIGHTS, float32, alignment=128)
    t, C = int32(cuda.threadIdx.x), image.C
    n, part = divide(int32(cuda.blockIdx.x), slices)  # neighbours have the same pixels: their channels share lines
    b, top, left = place_of(n, image)
    first = int32(part * SLICE)
    copy_pixels(tile, PITCH, HALO_ROWS, HALO_COLUMNS, x, b, int32(top - K // 2), int32(left - K // 2), first, image)
    cp_async_commit()
    for k in range(t, WEIGHTS, int32(cuda.blockDim.x)):
        tap, c = divide(k, int32(SLICE))
        tap = int32(TAPS - 1 - tap) if image.flip else tap
        weights[k] = float32(weight[tap * C + first + c]) if first + c < C else float32(0)
    cp_async_wait_all()
    cuda.syncthreads()

    strip, quad = divide(t, int32(QUADS))
    run, row = divide(strip, int32(ROWS))
    totals, seen = cuda.local.array(RUN4, "float32"), cuda.local.array(SEEN4, "float32")
    for p in range(RUN4):
        totals[p] = float32(0)
    i, j, c = int32(top + row), int32(left + run * RUN), int32(first + quad * 4)
    if i < image.H and j < image.W and c < C:
        for r in range(K):
            multiply_row(totals, seen, weights, int32(r * K * SLICE + quad * 4), tile,
                         int32((row + r) * PITCH + run * RUN * SLICE + quad * 4))
        a0 = a1 = a2 = a3 = float32(0)
        if image.bias:
            a0, a1, a2, a3 = load4(bias, c)
        if image.channel:
            e0, e1, e2, e3 = load4(channel, b * C + c)
            a0, a1, a2, a3 = a0 + e0, a1 + e1, a2 + e2, a3 + e3
        for p in range(RUN):
            if j + p < image.W:
                store4(y, ((b * image.H + i) * image.W + j + p) * C + c, totals[4 * p] + a0, totals[4 * p + 1] + a1,
                       totals[4 * p + 2] + a2, totals[4 * p + 3] + a3)


@cuda.jit(device=True, forceinline=True)
def add_run(totals, seen, tile, x, gradient, g):
    """totals[s] += Σ_p dy[p] · x[p + s] over the pixels p of a run, of four channels; read from x and from g on."""
    look_at(seen, tile, x)
    for p in range(RUN):
        g0, g1, g2, g3 = load4(gradient, g + p * SLICE)
        for s in range(K):
            totals[4 * s] += g0 * seen[4 * (p + s)]
            totals[4 * s + 1] += g1 * seen[4 * (p + s) + 1]
            totals[4 * s + 2] += g2 * seen[4 * (p + s) + 2]
            totals[4 * s + 3] += g3 * seen[4 * (p + s) + 3]


@cuda.jit(device=True, forceinline=True)
def group_sum(value):
    """The sum over the lanes that have the same four channels, in each of them."""
    value += cuda.shfl_xor_sync(FULL_MASK, value, 16)
    value += cuda.shfl_xor_sync(FULL_MASK, value, 8)
    if QUADS == 4:
        value += cuda.shfl_xor_sync(FULL_MASK, value, 4)
    return value


@requires("8.0")
def depthwise_weight_gradient_kernel_v2(dy, x, partial, tiles, chunk, slices, image):
    """partial (chunks, K, K, C): the sums over each chunk of the tiles."""
    tile = cuda.shared.array(TILE, x.dtype.type, alignment=128)
    gradient = cuda.shared.array(DY_TILE, x.dtype.type, alignment=128)
    r, lane = divide(int32(cuda.threadIdx.x), int32(WARP))  # a warp for each row of taps
    group, quad = divide(lane, int32(QUADS))
    part, piece = divide(int32(cuda.blockIdx.x), slices)
    first = int32(piece * SLICE)
    totals, seen = cuda.local.array(K4, "float32"), cuda.local.array(SEEN4, "float32")
    for s in range(K4):
        totals[s] = float32(0)
    for n in range(part * chunk, min(part * chunk + chunk, tiles)):
        b, top, left = place_of(int32(n), image)
        cuda.syncthreads()  # nobody reads the tile before any more
        copy_pixels(tile, PITCH, HALO_ROWS, HALO_COLUMNS, x, b, int32(top - K // 2), int32(left - K // 2), first, image)
        copy_pixels(gradient, DY_PITCH, ROWS, COLUMNS, dy, b, top, left, first, image)
        cp_async_commit()
        cp_async_wait_all()
        cuda.syncthreads()
        for i in range(group, min(int32(ROWS), int32(image.H - top)), int32(GROUPS)):  # below it dy is zero
            for j in range(0, COLUMNS * SLICE, RUN * SLICE):
                add_run(totals, seen, tile, int32((i + r) * PITCH + quad * 4 + j), gradient,
                        int32(i * DY_PITCH + quad * 4 + j))
    for s in range(K4):
        totals[s] = group_sum(totals[s])
    c = int32(first + quad * 4)
    if group == 0 and c < image.C:
        for s in range(K):
            store4(partial, ((part * K + r) * K + s) * image.C + c, totals[4 * s], totals[4 * s + 1],
                   totals[4 * s + 2], totals[4 * s + 3])


KEYS = [(kernel, bytes_, side) for kernel in KERNELS for bytes_ in (2, 4) for side in (8, 16)]
FORWARD = Variants(KEYS, lambda key: specialise(
    depthwise_forward_kernel_v2, launch_bounds=(_threads(*key), 1), K=key[0], SLICE=BYTES // key[1], ROWS=key[2],
    COLUMNS=key[2]))
WEIGHT_GRADIENT = Variants(KEYS, lambda key: specialise(
    depthwise_weight_gradient_kernel_v2, launch_bounds=(key[0] * WARP, 1), K=key[0], SLICE=BYTES // key[1],
    ROWS=GRADIENT_ROWS, COLUMNS=key[2]))


# Launchers ------------------------------------------------------------------------------------------------------------

def _threads(_, itemsize, side):
    return BYTES // itemsize // 4 * side * (side // RUN)


def _check(x, weight, version):
    """The version, where operands fit; in words that say what to do where they do not."""
    if len(x.shape) != 4 or len(weight.shape) != 3 or x.shape[3] != weight.shape[2]:
        raise ValueError(f"x (B, H, W, C) and weight (kernel, kernel, C) are {tuple(x.shape)} and "
                         f"{tuple(weight.shape)}: channels last and equal")
    kernel, across, C = weight.shape
    if kernel != across or kernel % 2 == 0:
        raise ValueError(f"a depthwise kernel of {kernel} × {across}: it must be square and odd")
    if x.size >= 2**31:
        raise TooManyElementsError(f"{tuple(x.shape)} has too many elements for 32-bit indices: split the batch")
    fits = C % 8 == 0 and kernel in KERNELS and (not is_device(x) or supports(x, FORWARD, WEIGHT_GRADIENT))
    if version in (2, 3) and not fits:
        raise ValueError(f"version {label('depthwise', version)} takes eight channels at a time and 3 × 3, 5 × 5 or "
                         f"7 × 7 taps, on a device of capability 8.0, not {C} channels and {kernel} × {kernel} here; "
                         "use version=1")
    if version == 3 and not is_half(x.dtype):
        raise ValueError(f"version 3 (mma) takes float16 and bfloat16, not {x.dtype}; use version=2")
    return capped("depthwise", 1 + fits + (fits and is_half(x.dtype))) if version is None else version


def _side(x):
    """Of the tiles' pixels."""
    return 16 if max(x.shape[1:3]) > 8 else 8


def _tiles(x, rows, columns):
    return x.shape[0] * -(-x.shape[1] // rows) * -(-x.shape[2] // columns)


def _convolve(x, weight, bias, channel, flip, version, residual=None):
    (_, H, W, C), nothing, y = x.shape, no_numbers(x.backend), empty(x.shape, x.dtype, like=x)
    if version == 3:
        depthwise_mma.convolve(x, weight, bias, channel, residual, y, flip)
        return y
    if residual is not None:
        return add_forward(_convolve(x, weight, bias, channel, flip, version), residual)
    image = Image(H, W, C, flip, int(bias is not None), int(channel is not None))
    arrays = (x.reshape(-1), weight.reshape(-1), nothing if bias is None else bias,
              nothing if channel is None else channel.reshape(-1), y.reshape(-1))
    if version == 1:
        launch(depthwise_forward_kernel_v1, -(-y.size // BLOCK), BLOCK, *arrays, len(weight), image)
        return y
    side, slices = _side(x), -(-C * x.dtype.itemsize // BYTES)
    key = len(weight), x.dtype.itemsize, side
    launch(FORWARD[key], _tiles(x, side, side) * slices, _threads(*key), *arrays, slices, image)
    return y


@versions_by_name(asks=True)
def depthwise_forward(x, weight, bias=None, channel=None, version=None):
    """The convolution of x (B, H, W, C) with weight (kernel, kernel, C), padded by kernel // 2, plus bias (C,) and
    channel (B, C), where they are given, as a new array like x."""
    version = _check(x, weight, version)
    B, _, _, C = x.shape
    for name, array, shape in (("bias", bias, (C,)), ("channel", channel, (B, C))):
        if array is not None and tuple(array.shape) != shape:
            raise ValueError(f"{name} has shape {tuple(array.shape)}, this convolution needs {shape}")
    if not is_device(x):
        return depthwise_forward_reference(x, weight, bias, channel)
    return _convolve(x, weight, bias, channel, 0, version)


@versions_by_name(asks=True)
def depthwise_input_gradient(dy, weight, version=None, residual=None):
    """dx of dy (B, H, W, C); plus `residual`, like it, where it is given."""
    version = _check(dy, weight, version)
    if not is_device(dy):
        dx = depthwise_input_gradient_reference(dy, weight)
        return dx if residual is None else add_forward(dx, residual)
    return _convolve(dy, weight, None, None, 1, version, residual)


@versions_by_name(asks=True)
def depthwise_weight_gradient(dy, x, dweight, version=None):
    """Add the weight's gradient to dweight (kernel, kernel, C), float32."""
    version = _check(x, dweight, version)
    if tuple(dy.shape) != tuple(x.shape) or dy.dtype != x.dtype:
        raise ValueError(f"dy {tuple(dy.shape)} {dy.dtype} must be as x, {tuple(x.shape)} {x.dtype}")
    if not is_device(x):
        depthwise_weight_gradient_reference(dy, x, dweight)
        return
    if version == 3:
        depthwise_mma.add_weight_gradient(dy, x, dweight)
        return
    (B, H, W, C), kernel = x.shape, len(dweight)
    if version == 1:
        launch(depthwise_weight_gradient_kernel_v1, -(-dweight.size // BLOCK), BLOCK, dy.reshape(-1), x.reshape(-1),
               dweight.reshape(-1), B, H, W, C, kernel)
        return
    side, slices = _side(x), -(-C * x.dtype.itemsize // BYTES)
    tiles = _tiles(x, GRADIENT_ROWS, side)
    chunk = -(-tiles // max(1, GRADIENT_BLOCKS // slices))
    chunks = -(-tiles // chunk)
    partial = empty((chunks, dweight.size), np.float32, like=x)
    launch(WEIGHT_GRADIENT[kernel, x.dtype.itemsize, side], chunks * slices, kernel * WARP, dy.reshape(-1),
           x.reshape(-1), partial.reshape(-1), tiles, chunk, slices, Image(H, W, C, 0, 0, 0))
    column_sum(partial, dweight.reshape(-1))


def depthwise_backward(dy, x, weight, dweight, dbias=None, need_dx=True, need_channel=False, residual=None):
    """dx as a new array (None unless `need_dx`); the parameters' gradients are added into dweight and dbias (None: not
    wanted, and not computed).

    need_channel: returns (dx, the gradient (B, C) of `channel`); residual: like x, added to dx
    """
    dchannel = channel_add_backward(dy) if need_channel else None
    if dbias is not None:
        column_sum(dchannel if need_channel else dy, dbias)
    if dweight is not None:
        depthwise_weight_gradient(dy, x, dweight)
    dx = depthwise_input_gradient(dy, weight, residual=residual) if need_dx else None
    return (dx, dchannel) if need_channel else dx


# Cost -----------------------------------------------------------------------------------------------------------------

def depthwise_forward_cost(B, H, W, C, kernel, itemsize=4):
    """(bytes, FLOPs): x read and y written once."""
    return 2 * itemsize * B * H * W * C, 2 * B * H * W * C * kernel * kernel


def depthwise_input_gradient_cost(B, H, W, C, kernel, itemsize=4):
    return depthwise_forward_cost(B, H, W, C, kernel, itemsize)


def depthwise_weight_gradient_cost(B, H, W, C, kernel, itemsize=4):
    """(bytes, FLOPs): dy and x read once."""
    return depthwise_forward_cost(B, H, W, C, kernel, itemsize)
