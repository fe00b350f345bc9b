"""Depthwise convolution in 16 bits, version 3: tensor cores, by way of banded matrices of taps.

WHAT IS NEW
    49 multiply-adds for 4 bytes of memory are more than the float32 units keep up with. For tensor
    cores a row of taps becomes a matrix. Of one channel, a run of 8 outputs sees 14 pixels through
    7 taps:

        y[n] = Σ_k seen[k] · T[k, n],    T[k, n] = w[k - n] for 0 ≤ k - n < kernel, else 0        (16 × 8, a band)

    so 16 runs at once are a product of 16 × 16 pixels and that band: one mma.sync. Seven rows of
    taps are seven products into the same accumulators. 9/16 of what is multiplied is zeros, at
    several times the rate.
    The weight's gradient has the pixels as its long dimension: P[m, n] = Σ_i x[i, m] · dy[i, n]
    over rows i of pixels, a product of 16 × 16 pixels of x, transposed, and 16 × 8 of dy. The sum
    for tap s is on the diagonal m - n = s, and P stays in the accumulators until all pixels are in
    it.
    Channels, innermost in memory, must become planes of pixels. A thread loads 8 channels of two
    neighbouring pixels, exchanges halves of words (`prmt`), and stores 8 words of two pixels of one
    channel: ldmatrix finds its rows.
WHY IT PAYS
    Counted in instructions of a thread, an output of 7 × 7 taps takes about 20, where version 2
    needs 49 multiply-adds alone, and packed half2 ones would need 25 and their conversions.
    Products of 16-bit numbers are exact in float32, and sums nearly so: what is rounded is the
    result, so the relative error in the 2-norm is at most 2⁻¹¹ (4.9e-4) in float16, 2⁻⁸ in
    bfloat16, plus 49 · 2⁻²³ of the sums.
WHAT REMAINS
    Two thirds of the time, by the counts. For 128 outputs of 7 × 7 taps a multiprocessor issues for
    20 cycles and reads and writes shared memory for 28, neither with a bank conflict; an H200 takes
    about 100. What these leave out: a block's 16 channels are 32 bytes of a pixel, so a warp's load
    touches 16 lines of the cache and its store 32, one a cycle, some 30 cycles together; and the
    taps, the pixels in two rounds and the products wait for each other behind one barrier. On
    Hopper, hopper.py does without all of them.
NOT FINITE pixels spoil the sixteen outputs of their run, not seven, as 0 · ∞ is not a number.
LAUNCH
    forward and dx: a block for each tile of 16 × 32 pixels (16 × 16 of images up to 16 wide) and
    slice of 16 channels, 128 threads; a warp takes 8 of the rows and 8 of the channels; 32 KB of
    shared memory.
    dweight: 256 threads, a warp two channels; 48 KB; a block goes from tile to tile of its chunk.
DETERMINISM
    one warp sums each output in the order of the rows of taps; of the weight's gradient each chunk
    has sums of its own, which kernels/reduce/trees.py adds up.
SOURCE
    PTX ISA, sections 9.7.14.5 (mma, ldmatrix) and 9.7.9.7 (prmt); the derivation is above.
READ NEXT
    layernorm.py
"""

from typing import NamedTuple

import numpy as np

from ....device import cuda, empty, float32, int32, launch, uint32
from ....device.async_copy import shared_address
from ....device.common import divide, no_numbers
from ....device.half import in_bfloat16
from ....device.limits import WARP
from ....device.requires import requires
from ....device.specialise import Constant, Variants, specialise
from ....device.tensor_core import (
    float_of,
    high_halves,
    ldmatrix_x2,
    ldmatrix_x2_trans,
    ldmatrix_x4,
    ldmatrix_x4_trans,
    load_word,
    load_words4,
    load_words4_where,
    low_halves,
    mma_m16n8k8_into,
    mma_m16n8k16_into,
    pack_half2,
    store_word,
    store_words4,
    unpack_half2,
    word_of,
)
from ....kernels.reduce.second_pass import add_rows

CHANNELS = 16  # of a block: a sector of memory
TILE_ROWS = 16  # of pixels
KERNELS = 3, 5, 7
WIDTHS = 16, 32  # of tiles
FORWARD_THREADS = TILE_ROWS // 8 * 2 * WARP
# two blocks for each multiprocessor of a large GPU
GRADIENT_THREADS, GRADIENT_BLOCKS = CHANNELS // 2 * WARP, 264
# words of a channel's taps in shared memory: those of 8 distances, in up to 8 rows of taps
BAND = 8 * 8

K, THREADS = Constant(), Constant()
ROWS, COLUMNS, SLICE = Constant(), Constant(), Constant()  # of a tile; channels of a block
OCTETS = Constant(lambda SLICE: SLICE // 8)
FETCHES = Constant()  # pairs of pixels that a thread has under way at a time
FETCHED = Constant(lambda FETCHES: 8 * FETCHES)
# elements of a row of a plane: an odd number of 16-byte chunks
PITCH = Constant(lambda COLUMNS: COLUMNS + 8)
PAIRS = Constant(lambda PITCH: PITCH // 2)
HALO_ROWS = Constant(lambda ROWS, K: ROWS + K - 1)
PLANE = Constant(lambda HALO_ROWS, PITCH: HALO_ROWS * PITCH)  # elements of a channel
# of eight channels, and a share of the banks
OCTET = Constant(lambda PLANE, OCTETS: 8 * PLANE + 64 // OCTETS)
TILE = Constant(lambda OCTET, OCTETS: OCTETS * OCTET)
DY_PLANE = Constant(lambda ROWS, PITCH: ROWS * PITCH)
DY_OCTET = Constant(lambda DY_PLANE, OCTETS: 8 * DY_PLANE + 64 // OCTETS)
BANDS = Constant(lambda SLICE: SLICE * BAND)
RUNS = Constant(lambda COLUMNS: COLUMNS // 8)  # runs of eight outputs in a row
OUTPUTS = Constant(lambda COLUMNS: COLUMNS // 4)  # of a thread and channel
RUNS2 = Constant(lambda RUNS: 2 * RUNS)
DY_PAIRS = Constant(lambda COLUMNS: COLUMNS // 2)
WORDS, ACCUMULATORS = Constant(lambda OUTPUTS: 4 * OUTPUTS), Constant(lambda OUTPUTS: 2 * OUTPUTS)
SUMS = Constant(lambda K: 4 * K)  # accumulators of a thread and channel of the weight's gradient
SUMS2 = Constant(lambda SUMS: 2 * SUMS)
# words from one m of P, from one row of taps to the next: odd distances, for the banks
ACROSS, ROW_OF_TAPS = 9, 145
SHARE = Constant(lambda K: ROW_OF_TAPS * K)  # words of a warp
PLANES = Constant(lambda TILE, DY_OCTET, SHARE: max(TILE + 2 * DY_OCTET, CHANNELS * SHARE))


class DepthwiseMmaImage(NamedTuple):
    """Of x and y (·, H, W, C); flip: 1 to count the taps from the other end; bias, channel,
    residual: whether there is one."""

    H: int
    W: int
    C: int
    flip: int
    bias: int
    channel: int
    residual: int


# Planes in shared memory --------------------------------------------------------------------------


@cuda.jit(device=True, forceinline=True)
def place_of(tile, image):
    """(image, first row, first column) of a tile of all images."""
    across, down = int32(-(-image.W // COLUMNS)), int32(-(-image.H // ROWS))
    rest, j = divide(tile, across)
    b, i = divide(rest, down)
    return b, int32(i * ROWS), int32(j * COLUMNS)


@cuda.jit(device=True, forceinline=True)
def fetch_pairs(words, x, start, rows, pairs, corner, image):
    """Load this thread's next pairs of neighbouring pixels, each of eight channels: words 8 · n + 0
    … 3 of the left one, 4 … 7 of the right one; zeros outside. corner: image, row, column and
    channel of the tile's first."""
    b, top, left, first = corner
    for n in range(FETCHES):
        place = uint32(start + n * THREADS)
        i, pair = divide(place // uint32(OCTETS), pairs)
        h, w, c = (
            int32(top + i),
            int32(left + 2 * pair),
            int32(first + 8 * int32(place % uint32(OCTETS))),
        )
        # -1 is a large uint32
        inside = int32(i < rows) & int32(uint32(h) < uint32(image.H)) & int32(c < image.C)
        at = int32(((b * image.H + h) * image.W + w) * image.C + c)
        a = load_words4_where(x, at, inside & int32(uint32(w) < uint32(image.W)))
        z = load_words4_where(
            x, int32(at + image.C), inside & int32(uint32(w + 1) < uint32(image.W))
        )
        for k in range(4):
            words[8 * n + k], words[8 * n + 4 + k] = a[k], z[k]


@cuda.jit(device=True, forceinline=True)
def spread_pairs(words, tile, start, rows, pairs, plane, octets):
    """Store them: a word of two pixels in the plane of each of eight channels."""
    for n in range(FETCHES):
        place = uint32(start + n * THREADS)
        i, pair = divide(place // uint32(OCTETS), pairs)
        if i < rows:
            at = int32(int32(place % uint32(OCTETS)) * octets + i * PITCH + 2 * pair)
            for k in range(4):
                a, z = words[8 * n + k], words[8 * n + 4 + k]
                store_word(tile, int32(at + 2 * k * plane), low_halves(a, z))
                store_word(tile, int32(at + (2 * k + 1) * plane), high_halves(a, z))


@cuda.jit(device=True, forceinline=True)
def load_planes(tile, x, rows, pairs, plane, octets, corner, image):
    """Rows of pairs of pixels of the slice's channels as planes. All threads call it."""
    words = cuda.local.array(FETCHED, "uint32")
    for start in range(
        int32(cuda.threadIdx.x), int32(OCTETS * rows * pairs), int32(FETCHES * THREADS)
    ):
        fetch_pairs(words, x, start, int32(rows), int32(pairs), corner, image)
        spread_pairs(words, tile, start, int32(rows), int32(pairs), plane, octets)


@cuda.jit(device=True, forceinline=True)
def load_bands(bands, weight, first, image):
    """bands[channel, e, r] = (w[r, e-1], w[r, e]), zero where there is no such tap: the words of a
    band at the distance k - n = e - 1."""
    for place in range(int32(cuda.threadIdx.x), int32(8 * SLICE), int32(THREADS)):
        r, channel = int32(place & 7), int32(place >> 3)
        step = int32(-image.C) if image.flip else image.C
        tap = int32(K * K - 1 - r * K) if image.flip else int32(r * K)
        here = int32(tap * image.C + first + channel)
        before, inside = float32(0), r < K and first + channel < image.C
        for e in range(8):
            w = float32(0)
            if e < K and inside:
                w = float32(weight[uint32(here + e * step)])
            store_word(bands, int32(channel * BAND + e * 8 + r), pack_half2(before, w))
            before = w


# Forward and dx -----------------------------------------------------------------------------------
# A fragment's 16 rows are 8 rows of pixels in two runs: the first and the third, the second and the
# fourth. Matrices S0 to S4 of 8 × 8 pixels serve all four, and S0 … S3 are in registers as both
# take them: the second two share (S1, S3), and multiply in two steps of k. Of a band's two words in
# a lane one is always zero: distances k - n from 8 on in the one, below -1 in the other.


@cuda.jit(device=True, forceinline=True)
def multiply_channel(acc, first, pixels, next_, bands, at, high):
    """acc[first …] += the products of all rows of taps, of a channel; pixels: the lane's address in
    its plane, at: of its words in bands, high: whether they belong to the second half of k."""
    taps = cuda.local.array(8, "uint32")
    for half in range(2):
        taps[4 * half], taps[4 * half + 1], taps[4 * half + 2], taps[4 * half + 3] = load_words4(
            bands, at + 4 * half
        )
    zero = uint32(0)
    for r in range(K):
        b0, b1 = zero if high else taps[r], taps[r] if high else zero
        here = uint32(pixels + uint32(r * PITCH * 2))
        if COLUMNS == 32:
            s0, s2, s1, s3 = ldmatrix_x4(here)
            mma_m16n8k16_into(acc, first, (s0, s2, s1, s3), (b0, b1))
            mma_m16n8k8_into(acc, first + 4, (s1, s3), b0)
            mma_m16n8k8_into(acc, first + 4, ldmatrix_x2(uint32(here + next_)), b1)
        else:
            mma_m16n8k16_into(acc, first, ldmatrix_x4(here), (b0, b1))


@cuda.jit(device=True, forceinline=True)
def column_of(p, lane):
    """The column in the tile of output p of a lane: two neighbours of each run, in the order of its
    accumulators."""
    run = int32(p >> 2 | p & 2) if COLUMNS == 32 else int32(p >> 1)
    return int32(8 * run + 2 * (lane & 3) + (p & 1))


@cuda.jit(device=True, forceinline=True)
def matrix_of(lane):
    """The matrix, of S0 to S3 of a row of taps, whose row a lane's address gives: of images up to
    16 wide S1 twice."""
    m = int32(lane >> 3)
    return int32((m & 1) << 1 | m >> 1) if COLUMNS == 32 else int32(m + 1 >> 1)


@cuda.jit(device=True, forceinline=True)
def start_sums(acc, first, value):
    for k in range(OUTPUTS):
        acc[first + k] = value


@cuda.jit(device=True, forceinline=True)
def multiply_octet(words, tile, bands, added, group, octet, lane):
    """words[4 · p …]: the outputs of eight channels, rounded, at each of a lane's pixels p; `added`
    to each channel."""
    acc = cuda.local.array(ACCUMULATORS, "float32")
    pixels = uint32(
        shared_address(tile)
        + uint32(2 * (octet * OCTET + (8 * group + (lane & 7)) * PITCH + 8 * matrix_of(lane)))
    )
    next_ = uint32(32 * (1 + (lane >> 3 & 1)) - 16 * matrix_of(lane))
    distance = int32(2 * (lane & 3) - (lane >> 2))
    at = int32(octet * 8 * BAND + (distance + 1 & 7) * 8)
    for pair in range(4):
        for k in range(2):
            start_sums(acc, k * OUTPUTS, added[8 * octet + 2 * pair + k])
            multiply_channel(
                acc,
                k * OUTPUTS,
                uint32(pixels + uint32(2 * (2 * pair + k) * PLANE)),
                next_,
                bands,
                int32(at + (2 * pair + k) * BAND),
                distance < -1,
            )
        for p in range(OUTPUTS):
            words[4 * p + pair] = pack_half2(acc[p], acc[OUTPUTS + p])


@cuda.jit(device=True, forceinline=True)
def load_added(added, bias, channel, b, first, image):
    """What is added to each of the slice's channels, of image b."""
    t = int32(cuda.threadIdx.x)
    if t < SLICE:
        c, value = int32(first + t), float32(0)
        if c < image.C:
            if image.bias:
                value = bias[uint32(c)]
            if image.channel:
                value += channel[uint32(b * image.C + c)]
        added[t] = value


@cuda.jit(device=True, forceinline=True)
def store_octet(y, words, residual, at, left, lane, image):
    """Eight channels of each of a lane's pixels; at: of its row's first, in y."""
    for p in range(OUTPUTS):
        column = column_of(p, lane)
        if left + column < image.W:
            a, b, c, d = words[4 * p], words[4 * p + 1], words[4 * p + 2], words[4 * p + 3]
            here = int32(at + column * image.C)
            if image.residual:
                r0, r1, r2, r3 = load_words4(residual, here)
                a, b, c, d = add_words(a, r0), add_words(b, r1), add_words(c, r2), add_words(d, r3)
            store_words4(y, here, a, b, c, d)


@cuda.jit(device=True, forceinline=True)
def add_words(a, b):
    a0, a1 = unpack_half2(a)
    b0, b1 = unpack_half2(b)
    return pack_half2(a0 + b0, a1 + b1)


@requires("7.5")
def depthwise_forward_kernel_v3(x, weight, bias, channel, residual, y, slices, image):
    tile = cuda.shared.array(TILE, x.dtype.type, alignment=128)
    bands, added = (
        cuda.shared.array(BANDS, uint32, alignment=128),
        cuda.shared.array(SLICE, float32),
    )
    # neighbours have the same pixels: their channels share lines
    n, part = divide(int32(cuda.blockIdx.x), slices)
    b, top, left = place_of(n, image)
    corner = b, int32(top - K // 2), int32(left - K // 2), int32(part * SLICE)
    load_bands(bands, weight, corner[3], image)
    load_added(added, bias, channel, b, corner[3], image)
    load_planes(tile, x, HALO_ROWS, PAIRS, PLANE, OCTET, corner, image)
    cuda.syncthreads()

    warp, lane = divide(int32(cuda.threadIdx.x), int32(WARP))
    group, octet = int32(warp >> 1), int32(warp & 1)
    i, c = int32(top + 8 * group + (lane >> 2)), int32(part * SLICE + 8 * octet)
    if top + 8 * group < image.H and c < image.C:  # the same for the whole warp
        words = cuda.local.array(WORDS, "uint32")
        multiply_octet(words, tile, bands, added, group, octet, lane)
        if i < image.H:
            store_octet(
                y,
                words,
                residual,
                int32(((b * image.H + i) * image.W + left) * image.C + c),
                left,
                lane,
                image,
            )


# dweight ------------------------------------------------------------------------------------------


@cuda.jit(device=True, forceinline=True)
def add_products(acc, first, pixels, gradients):
    """acc[first + 4 · r …] += P of the row of taps r, over a tile's pixels, of a channel; the
    lane's addresses in its planes."""
    d = cuda.local.array(RUNS2, "uint32")
    for t in range(0, RUNS, 2):
        d[2 * t], d[2 * t + 1], d[2 * t + 2], d[2 * t + 3] = ldmatrix_x4_trans(
            uint32(gradients + uint32(16 * t))
        )
    for r in range(K):
        here = uint32(pixels + uint32(r * PITCH * 2))
        u0, v0, u1, v1 = ldmatrix_x4_trans(here)
        if COLUMNS == 32:
            u2, v2, u3, v3 = ldmatrix_x4_trans(uint32(here + uint32(32)))
            u4, v4 = ldmatrix_x2_trans(uint32(here + uint32(64)))
            mma_m16n8k16_into(acc, first + 4 * r, (u0, u1, v0, v1), (d[0], d[1]))
            mma_m16n8k16_into(acc, first + 4 * r, (u1, u2, v1, v2), (d[2], d[3]))
            mma_m16n8k16_into(acc, first + 4 * r, (u2, u3, v2, v3), (d[4], d[5]))
            mma_m16n8k16_into(acc, first + 4 * r, (u3, u4, v3, v4), (d[6], d[7]))
        else:
            u2, v2 = ldmatrix_x2_trans(uint32(here + uint32(32)))
            mma_m16n8k16_into(acc, first + 4 * r, (u0, u1, v0, v1), (d[0], d[1]))
            mma_m16n8k16_into(acc, first + 4 * r, (u1, u2, v1, v2), (d[2], d[3]))


@cuda.jit(device=True, forceinline=True)
def store_diagonals(acc, first, sums, mine, partial, at, C, lane):
    """partial[at + tap · C] = Σ_n P[n + s, n] for all taps of a channel, by way of the warp's part
    of shared memory, which begins at word `mine`."""
    cuda.syncwarp()
    for r in range(K):
        for k in range(4):
            m, n = int32((lane >> 2) + 8 * (k >> 1)), int32(2 * (lane & 3) + (k & 1))
            store_word(
                sums,
                2 * int32(mine + r * ROW_OF_TAPS + m * ACROSS + n),
                word_of(acc[first + 4 * r + k]),
            )
    cuda.syncwarp()
    for tap in range(lane, int32(K * K), int32(WARP)):
        r, s = divide(tap, int32(K))
        total = float32(0)
        for n in range(8):
            total += float_of(
                load_word(sums, 2 * int32(mine + r * ROW_OF_TAPS + (n + s) * ACROSS + n))
            )
        partial[uint32(at + tap * C)] = total


@requires("7.5")
def depthwise_weight_gradient_kernel_v3(dy, x, partial, tiles, chunk, slices, image):
    """partial (chunks, K, K, C): the sums over each chunk of the tiles."""
    planes = cuda.shared.array(PLANES, x.dtype.type, alignment=128)
    tile, gradient = planes[:TILE], planes[TILE:]
    warp, lane = divide(int32(cuda.threadIdx.x), int32(WARP))  # a warp two channels
    octet, inner = int32(warp >> 2), int32(2 * (warp & 3))
    part, piece = divide(int32(cuda.blockIdx.x), slices)
    first = int32(piece * SLICE)
    acc = cuda.local.array(SUMS2, "float32")
    for k in range(SUMS2):
        acc[k] = float32(0)
    row = int32((lane & 15) * PITCH + 8 * (lane >> 4))
    pixels = uint32(shared_address(tile) + uint32(2 * (octet * OCTET + inner * PLANE + row)))
    gradients = uint32(
        shared_address(gradient) + uint32(2 * (octet * DY_OCTET + inner * DY_PLANE + row))
    )
    for n in range(int32(part * chunk), int32(min(part * chunk + chunk, tiles))):
        b, top, left = place_of(n, image)
        cuda.syncthreads()  # the tile before is no longer read
        load_planes(
            tile,
            x,
            HALO_ROWS,
            PAIRS,
            PLANE,
            OCTET,
            (b, int32(top - K // 2), int32(left - K // 2), first),
            image,
        )
        load_planes(gradient, dy, ROWS, DY_PAIRS, DY_PLANE, DY_OCTET, (b, top, left, first), image)
        cuda.syncthreads()
        for k in range(2):
            add_products(
                acc,
                k * SUMS,
                uint32(pixels + uint32(2 * k * PLANE)),
                uint32(gradients + uint32(2 * k * DY_PLANE)),
            )
    cuda.syncthreads()
    for k in range(2):
        c = int32(first + 2 * warp + k)
        if c < image.C:
            store_diagonals(
                acc,
                k * SUMS,
                planes,
                int32(warp * SHARE),
                partial,
                int32(part * K * K * image.C + c),
                image.C,
                lane,
            )


KEYS = [(kernel, columns) for kernel in KERNELS for columns in WIDTHS]


def bounds(key, threads):
    """launch_bounds: with three taps ptxas uses few registers and spills one unless launch_bounds
    allows more."""
    return (threads, 512 // threads) if key[0] == 3 else threads


FORWARD = Variants(
    KEYS,
    lambda key: specialise(
        depthwise_forward_kernel_v3,
        launch_bounds=bounds(key, FORWARD_THREADS),
        K=key[0],
        COLUMNS=key[1],
        THREADS=FORWARD_THREADS,
        FETCHES=4,
        ROWS=TILE_ROWS,
        SLICE=CHANNELS,
    ),
)
WEIGHT_GRADIENT = Variants(
    KEYS,
    lambda key: specialise(
        depthwise_weight_gradient_kernel_v3,
        launch_bounds=bounds(key, GRADIENT_THREADS),
        K=key[0],
        COLUMNS=key[1],
        THREADS=GRADIENT_THREADS,
        FETCHES=2,
        ROWS=TILE_ROWS,
        SLICE=CHANNELS,
    ),
)


# Launchers ----------------------------------------------------------------------------------------


def tiles_of(x):
    """(columns of a tile, tiles of all images)."""
    B, H, W, _ = x.shape
    columns = WIDTHS[0] if W <= WIDTHS[0] else WIDTHS[1]
    return columns, B * -(-H // TILE_ROWS) * -(-W // columns)


def convolve(x, weight, bias, channel, residual, y, flip):
    """y = the convolution of x, plus what is not None; flip: 1 to count the taps from the other
    end."""
    (_, H, W, C), nothing, (columns, tiles) = x.shape, no_numbers(x.backend), tiles_of(x)
    slices = -(-C // CHANNELS)
    image = DepthwiseMmaImage(
        H, W, C, flip, *(int(a is not None) for a in (bias, channel, residual))
    )
    launch(
        in_bfloat16(FORWARD[len(weight), columns], x.dtype),
        tiles * slices,
        FORWARD_THREADS,
        x.reshape(-1),
        weight.reshape(-1),
        *(nothing if a is None else a.reshape(-1) for a in (bias, channel)),
        (x if residual is None else residual).reshape(-1),
        y.reshape(-1),
        slices,
        image,
    )


def add_weight_gradient(dy, x, dweight):
    """Add to dweight."""
    (_, H, W, C), (columns, tiles) = x.shape, tiles_of(x)
    slices = -(-C // CHANNELS)
    chunk = -(-tiles // max(1, GRADIENT_BLOCKS // slices))
    chunks = -(-tiles // chunk)
    partial = empty((chunks, dweight.size), np.float32, like=x)
    launch(
        in_bfloat16(WEIGHT_GRADIENT[len(dweight), columns], x.dtype),
        chunks * slices,
        GRADIENT_THREADS,
        dy.reshape(-1),
        x.reshape(-1),
        partial.reshape(-1),
        tiles,
        chunk,
        slices,
        DepthwiseMmaImage(H, W, C, 0, 0, 0, 0),
    )
    add_rows(partial, dweight.reshape(-1))
