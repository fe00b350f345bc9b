"""Float16 convolution with few channels on one side: the first layer of a UNet (3 → 64) and the last (64 → 3).

MATHEMATICS
    as in conv2d.py. A tensor core's tile would be nearly empty; memory is the roof, so the aim is to touch the wide
    side once.
SHAPES
    x, weight, y, dy, dx float16; bias, dweight float32. 3 × 3 kernel, stride 1; one side up to NARROW channels, the
    other a multiple of 8. Elsewhere version 1 runs.
VERSIONS
    this is version 3 of conv2d.py for float16.
    to few channels    eight threads share a pixel's input channels, eight neighbouring ones each (16 bytes of x, so a
                       warp reads 512 neighbouring bytes), for four output channels; three shuffles add up what they
                       found. Four pixels a thread share the weights it has converted.
    from few channels  eight threads share a pixel's output channels, eight each; the weights lie in shared memory as
                       float32. Forward from C ≤ 8, and the input gradient of a layer to N ≤ 8: the same with the taps
                       counted down.
    weight gradient    the wide side is read once: a lane has two of its channels, and sums 3 × 3 taps × 4 narrow
                       channels over the pixels of some image rows; the narrow rows lie in shared memory with zeros
                       around them.
LAUNCH
    128 threads. Grid: (pixels / 64, narrow channels / 4), (pixels / 64, wide channels / 64), (wide / 64, narrow / 4,
    parts).
DETERMINISM
    a fixed order in each thread and in the shuffles; each warp of the gradient writes a part, which are added in order.
COST
    bytes: both sides once, 2 bytes an element. Roof: memory, with the conversion to float32 close behind.
SOURCE
    the shuffles: CUDA programming guide, "Warp Shuffle Functions".
READ NEXT
    conv2d_mma.py.
"""
import numpy as np

from ..device import cuda, empty, float32, int32, launch, uint32
from ..device.tensor_core import load_word, load_words4, pack_half2, store_words4, unpack_half2
from .conv2d_hopper import no_numbers
from .conv2d_implicit import add_parts, within
from .im2col import divide

NARROW = 8  # channels of the narrow side, at most
SIZE, TAPS = 3, 9
BLOCK = 128  # threads
PIXELS = 4  # of a thread: they share the weights
BLOCK_PIXELS = BLOCK // 8 * PIXELS
SLAB = 64  # output channels whose weights a block keeps
SLAB_WEIGHTS = NARROW * TAPS * SLAB
WARPS = BLOCK // 32
LINE = 256  # pixels of an image row in shared memory at a time
LINE_PIXELS = LINE + 2
STRIP = SIZE * LINE_PIXELS * 4  # float32: three rows, with a pixel more on each side, of four channels
PARTS = 132 * 4  # blocks of the gradient, about


@cuda.jit(device=True, forceinline=True)
def eight(array, at):
    """Eight neighbouring float16 as float32."""
    a, b, c, d = load_words4(array, at)
    v0, v1 = unpack_half2(a)
    v2, v3 = unpack_half2(b)
    v4, v5 = unpack_half2(c)
    v6, v7 = unpack_half2(d)
    return v0, v1, v2, v3, v4, v5, v6, v7


@cuda.jit(device=True, forceinline=True)
def dot8(total, a, b):
    total += a[0] * b[0]
    total += a[1] * b[1]
    total += a[2] * b[2]
    total += a[3] * b[3]
    total += a[4] * b[4]
    total += a[5] * b[5]
    total += a[6] * b[6]
    return total + a[7] * b[7]


# To few channels ------------------------------------------------------------------------------------------------------

@cuda.jit
def conv2d_to_narrow_kernel(x, weight, bias, y, H, W, C, N, pixels, has_bias):
    t = int32(cuda.threadIdx.x)
    lane = t & 7
    first = int32(cuda.blockIdx.x * BLOCK_PIXELS + (t >> 3) * PIXELS)
    n = int32(cuda.blockIdx.y * 4)
    n1, n2, n3 = min(n + 1, N - 1), min(n + 2, N - 1), min(n + 3, N - 1)
    sums = cuda.local.array(16, np.float32)
    for k in range(16):
        sums[k] = float32(0)
    for r in range(SIZE):
        for s in range(SIZE):
            for c in range(lane * 8, C, 64):
                at = int32((r * SIZE + s) * C + c)
                w0 = eight(weight, n * TAPS * C + at)
                w1 = eight(weight, n1 * TAPS * C + at)
                w2 = eight(weight, n2 * TAPS * C + at)
                w3 = eight(weight, n3 * TAPS * C + at)
                for p in range(PIXELS):
                    pixel = int32(first + p)
                    image, rest = divide(pixel, int32(H * W))
                    i, j = divide(rest, W)
                    h, w = int32(i + r - 1), int32(j + s - 1)
                    if pixel < pixels and within(h, w, H, W):
                        v = eight(x, int32(((image * H + h) * W + w) * C + c))
                        sums[4 * p] = dot8(sums[4 * p], v, w0)
                        sums[4 * p + 1] = dot8(sums[4 * p + 1], v, w1)
                        sums[4 * p + 2] = dot8(sums[4 * p + 2], v, w2)
                        sums[4 * p + 3] = dot8(sums[4 * p + 3], v, w3)
    for k in range(16):
        total = sums[k]
        total += cuda.shfl_xor_sync(0xFFFFFFFF, total, 4)
        total += cuda.shfl_xor_sync(0xFFFFFFFF, total, 2)
        total += cuda.shfl_xor_sync(0xFFFFFFFF, total, 1)
        pixel, channel = int32(first + k // 4), int32(n + k % 4)
        if lane == k & 7 and pixel < pixels and channel < N:
            y[pixel * N + channel] = total + bias[channel] if has_bias else total


# From few channels ----------------------------------------------------------------------------------------------------

@cuda.jit
def conv2d_from_narrow_kernel(x, weight, bias, y, H, W, C, N, pixels, has_bias, gradient):
    """x has C ≤ 8 channels. gradient: the weight is (C, taps, N), and its taps are counted down."""
    weights = cuda.shared.array(SLAB_WEIGHTS, float32)  # [channel, tap, output]
    t = int32(cuda.threadIdx.x)
    first_n = int32(cuda.blockIdx.y * SLAB)
    for k in range(t, C * TAPS * SLAB, int32(BLOCK)):
        rest, n = divide(k, int32(SLAB))
        c, tap = divide(rest, int32(TAPS))
        n_at = int32(first_n + n)
        value = float32(0)
        if n_at < N:
            if gradient:
                value = float32(weight[(c * TAPS + TAPS - 1 - tap) * N + n_at])
            else:
                value = float32(weight[(n_at * TAPS + tap) * C + c])
        weights[k] = value
    cuda.syncthreads()
    lane = int32((t & 7) * 8)
    first = int32(cuda.blockIdx.x * BLOCK_PIXELS + (t >> 3) * PIXELS)
    sums = cuda.local.array(32, np.float32)
    for k in range(8):
        start = float32(0)
        if has_bias and first_n + lane + k < N:
            start = bias[first_n + lane + k]
        sums[k] = sums[8 + k] = sums[16 + k] = sums[24 + k] = start
    for c in range(C):
        for r in range(SIZE):
            for s in range(SIZE):
                at = int32((c * TAPS + r * SIZE + s) * SLAB + lane)
                for p in range(PIXELS):
                    pixel = int32(first + p)
                    image, rest = divide(pixel, int32(H * W))
                    i, j = divide(rest, W)
                    h, w = int32(i + r - 1), int32(j + s - 1)
                    if pixel < pixels and within(h, w, H, W):
                        v = float32(x[((image * H + h) * W + w) * C + c])
                        for k in range(8):
                            sums[8 * p + k] += v * weights[uint32(at + k)]
    if first_n + lane < N:
        for p in range(PIXELS):
            if first + p < pixels:
                store_words4(y, (first + p) * N + first_n + lane, pack_half2(sums[8 * p], sums[8 * p + 1]),
                             pack_half2(sums[8 * p + 2], sums[8 * p + 3]), pack_half2(sums[8 * p + 4], sums[8 * p + 5]),
                             pack_half2(sums[8 * p + 6], sums[8 * p + 7]))


# Weight gradient ------------------------------------------------------------------------------------------------------

@cuda.jit
def conv2d_narrow_weight_gradient_kernel_half(wide, narrow, partial, H, W, M, J, lines, part_lines, flipped):
    """partial[part, …] = Σ_q wide[q, m] · narrow[q + tap - 1, j], for M wide and J narrow channels.

    flipped: wide is x and narrow dy, whose pixel lies on the other side of x's, so the taps are counted down; else wide
    is dy and narrow x. A part is a warp's: the pixels of its image rows, every fourth of them.
    """
    strip = cuda.shared.array(STRIP, float32)
    t = int32(cuda.threadIdx.x)
    warp, lane = t >> 5, t & 31
    m, j = int32(cuda.blockIdx.x * SLAB + lane * 2), int32(cuda.blockIdx.y * 4)
    sums = cuda.local.array(72, np.float32)  # [tap, narrow, wide]
    for k in range(72):
        sums[k] = float32(0)
    first = int32(cuda.blockIdx.z * part_lines)
    for line in range(first, int32(min(first + part_lines, lines))):
        image, i = divide(line, H)
        for start in range(int32(0), W, int32(LINE)):
            cuda.syncthreads()
            width = int32(min(W - start, LINE))
            for k in range(t, 4 * SIZE * (width + 2), int32(BLOCK)):
                rest, channel = divide(k, int32(4))
                r, w = divide(rest, int32(width + 2))
                h, value = int32(i + r - 1), float32(0)
                w_at = int32(start + w - 1)
                if j + channel < J and within(h, w_at, H, W):
                    value = float32(narrow[((image * H + h) * W + w_at) * J + j + channel])
                strip[(r * LINE_PIXELS + w) * 4 + channel] = value
            cuda.syncthreads()
            if m < M:
                for w in range(warp, width, int32(WARPS)):
                    a, b = unpack_half2(load_word(wide, (line * W + start + w) * M + m))
                    for r in range(SIZE):
                        for k in range(12):  # three taps, four channels each
                            v = strip[uint32((r * LINE_PIXELS + w) * 4 + k)]
                            sums[r * 24 + 2 * k] += v * a
                            sums[r * 24 + 2 * k + 1] += v * b
    part = (cuda.blockIdx.z * WARPS + warp) * TAPS * M * J
    if m < M:
        for k in range(72):
            channel, at = int32(j + k // 2 % 4), int32(m + k % 2)
            if channel < J:
                if flipped:
                    partial[part + (channel * TAPS + TAPS - 1 - k // 8) * M + at] = sums[k]
                else:
                    partial[part + (at * TAPS + k // 8) * J + channel] = sums[k]


# Launchers ------------------------------------------------------------------------------------------------------------

def _small(size, stride, wide):
    return size == SIZE and stride == 1 and wide % 8 == 0


def narrow_takes(x, weight, stride, plain):
    """Whether these kernels take the forward pass: to few channels, or from few; no addends but the bias (`plain`)."""
    n, size, _, c = weight.shape
    return plain and (n <= NARROW and n % 8 and _small(size, stride, c) or c <= NARROW and c % 8
                      and _small(size, stride, n)) \
        and x.dtype == np.float16


def narrow_gradient_takes(x, weight, stride):
    """Whether they take the weight gradient."""
    return bool(narrow_takes(x, weight, stride, True))


def narrow_input_gradient_takes(dy, weight, stride):
    """Whether they take the input gradient: of a layer to few channels, or from few."""
    return bool(narrow_takes(dy, weight, stride, True)) and weight.shape[0] <= NARROW


def narrow_half_forward(x, weight, bias, y):
    """y = conv2d(x, weight) + bias."""
    b, h, w, c = x.shape
    n, pixels = y.shape[3], b * h * w
    arguments = x.reshape(-1), weight.reshape(-1), no_numbers(x.backend) if bias is None else bias, y.reshape(-1), h, w, c, n
    if n <= NARROW and n % 8:
        launch(conv2d_to_narrow_kernel, (-(-pixels // BLOCK_PIXELS), -(-n // 4)), BLOCK, *arguments, pixels,
               int(bias is not None))
    else:
        launch(conv2d_from_narrow_kernel, (-(-pixels // BLOCK_PIXELS), -(-n // SLAB)), BLOCK, *arguments, pixels,
               int(bias is not None), 0)
    return y


def narrow_half_input_gradient(dy, weight, dx):
    """dx of a layer to few channels."""
    b, h, w, n = dy.shape
    c, pixels = dx.shape[3], b * h * w
    launch(conv2d_from_narrow_kernel, (-(-pixels // BLOCK_PIXELS), -(-c // SLAB)), BLOCK, dy.reshape(-1), weight.reshape(-1),
           no_numbers(dy.backend), dx.reshape(-1), h, w, n, c, pixels, 0, 1)
    return dx


def narrow_half_weight_gradient(dy, x, dweight):
    """dweight += …"""
    b, h, w, n = dy.shape
    c = x.shape[3]
    to_few = n <= NARROW and n % 8
    wide, narrow, m, j = (x, dy, c, n) if to_few else (dy, x, n, c)
    grid = -(-m // SLAB), -(-j // 4)
    part_lines = -(-b * h // max(1, min(b * h, PARTS // (grid[0] * grid[1]))))
    parts = -(-b * h // part_lines)
    partial = empty((parts * WARPS, dweight.size), np.float32, like=dy)
    launch(conv2d_narrow_weight_gradient_kernel_half, (*grid, parts), BLOCK, wide.reshape(-1), narrow.reshape(-1),
           partial.reshape(-1), h, w, m, j, b * h, part_lines, int(bool(to_few)))
    add_parts(partial, dweight, accumulate=True)
