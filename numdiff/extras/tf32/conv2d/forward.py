"""Convolution of float32 by tf32, forward: an implicit GEMM on tensor cores, for any GPU from sm_80
on.

MATHEMATICS
    as in ../implicit.py, whose matrix col is gathered here, too, without being written:
    forward           y[p, n] = Σ_k col[p, k] · weight[n, k] + bias[n] + channel[image, n] + residual[p, n]
    input gradient    the forward over dy, whose weight[c, tap, n] is weight[n, taps - 1 - tap, c]. The tile of it is
                      read in its stored layout, a row of c for each n, and multiplied across: no
                      flipped copy is made. With a stride only every stride-th tap meets a pixel of
                      dy: ../launcher.py then multiplies and calls im2col.
WHAT IS NEW, AND WHY IT PAYS, against ../implicit.py
    products by mma.m16n8k8, 1024 multiply-adds an instruction; tiles travel by cp.async, three
    stages deep. Tiles in shared memory, fragments and the rounding are those of ../matmul.py: read
    that first.
LAUNCH
    128 threads. 128 × 128 or 256 × 64 pixels × channels, or 64 × 64 where those are few; a warp has
    64 × 64 or 32 × 32. Grid (pixel tiles, channel tiles, parts): where the tiles do not fill a GPU,
    the taps and channels are cut into parts, and a second kernel adds them up, and what else is
    added. Shared memory 24 to 60 KiB.
SOURCE
    PTX ISA, sections 9.7.9.25.3 (cp.async) and 9.7.14.5 (mma, ldmatrix).
READ NEXT
    weight_gradient.py
"""

from typing import NamedTuple

from ....device import cuda, int32, load4, store4, uint32
from ....device.async_copy import cp_async_16_zfill, cp_async_commit, cp_async_wait, shared_address
from ....device.common import divide
from ....device.requires import requires
from ....device.specialise import Constant
from ..matmul import (
    A_BYTES,
    ACCUMULATORS,
    B_BYTES,
    B_FIRST,
    BK,
    FRAGMENTS,
    PAIRS,
    PENDING,
    ROW,
    STAGES,
    THREADS,
    TILE_M,
    TILE_N,
    WARP_M,
    WARP_N,
    WARPS_N,
    clear,
    multiply_tiles,
    place_across,
    place_along_k,
    row_at,
)

BLOCK = 256  # threads of the kernel that adds parts

# Of each kernel, in addition to those of ../matmul.py
# of the input: the weight is (C, taps, N), to be read from its last tap to its first
GRADIENT = Constant()
PIXELS, WEIGHTS = (
    Constant(lambda TILE_M: TILE_M * 4 // THREADS),
    Constant(lambda TILE_N: TILE_N * 4 // THREADS),
)
# copies of a thread in a step; and the pixels, or rows of weights, from one to the next
APART = THREADS // 4
FOURS = Constant(lambda TILE_N: TILE_N // 4)  # of a row of n in the gradient's tile
K_APART = Constant(lambda TILE_N: THREADS // (TILE_N // 4))


# The epilogue -------------------------------------------------------------------------------------


@cuda.jit(device=True, forceinline=True)
def write_four(y, pixel, n, exists, N, per_image, v0, v1, v2, v3, addends, added):
    """Four neighbouring channels of a pixel, with all that is added to them, into y."""
    if exists:
        at = int32(pixel * N + n)
        if added.bias:
            v0 += addends.bias[uint32(n)]
            v1 += addends.bias[uint32(n + 1)]
            v2 += addends.bias[uint32(n + 2)]
            v3 += addends.bias[uint32(n + 3)]
        if added.channel:
            c0, c1, c2, c3 = load4(addends.channel, divide(pixel, per_image)[0] * N + n)
            v0, v1, v2, v3 = v0 + c0, v1 + c1, v2 + c2, v3 + c3
        if added.residual:
            r0, r1, r2, r3 = load4(addends.residual, at)
            v0, v1, v2, v3 = v0 + r0, v1 + r1, v2 + r2, v3 + r3
        store4(y, at, v0, v1, v2, v3)


@cuda.jit(device=True, forceinline=True)
def write_rows(y, start, accumulators, i, pixel, n, pixels, N, per_image, addends, added):
    """Fragments 16 · i … of a lane, as `write_rows` of ../matmul.py: two pixels, four channels of
    each pair."""
    p = int32(pixel + 16 * i)
    for j in range(PAIRS):
        s, m = 8 * (PAIRS * i + j), int32(n + 16 * j)
        write_four(
            y,
            int32(start + p),
            m,
            p < pixels and m < N,
            N,
            per_image,
            accumulators[s],
            accumulators[s + 4],
            accumulators[s + 1],
            accumulators[s + 5],
            addends,
            added,
        )
        write_four(
            y,
            int32(start + p + 1),
            m,
            p + 1 < pixels and m < N,
            N,
            per_image,
            accumulators[s + 2],
            accumulators[s + 6],
            accumulators[s + 3],
            accumulators[s + 7],
            addends,
            added,
        )


@cuda.jit(device=True, forceinline=True)
def write_outputs(y, start, accumulators, pixel, n, pixels, N, per_image, addends, added):
    """A lane's outputs, from its first pixel and channel on; start: pixels before those of this
    part."""
    # not in a loop: accumulators stay in registers only under constant indices
    write_rows(y, start, accumulators, 0, pixel, n, pixels, N, per_image, addends, added)
    write_rows(y, start, accumulators, 1, pixel, n, pixels, N, per_image, addends, added)
    if FRAGMENTS > 2:
        write_rows(y, start, accumulators, 2, pixel, n, pixels, N, per_image, addends, added)
        write_rows(y, start, accumulators, 3, pixel, n, pixels, N, per_image, addends, added)


# The producer: copies of a step -------------------------------------------------------------------


@cuda.jit(device=True, forceinline=True)
def inside_of(first, extent, size, apart):
    """Bits 0, apart, … below size · apart: up to the first and from the last that is in an image of
    `extent`."""
    low, high = int32(max(int32(0), int32(-first))), int32(min(int32(size), int32(extent - first)))
    return int32((int32(1) << int32(high * apart)) - (int32(1) << int32(low * apart)))


@cuda.jit(device=True, forceinline=True)
def window(pixel, pixels, H, W, C, Ho, Wo, size, stride, rows):
    """The start of an output pixel's window in x (perhaps before it), and which of its taps are
    inside the image, as bits; none for a pixel beyond the last.

    rows: a bit for the first tap of each row. Times the bits of one row that is the same bits in
    all of them.
    """
    image, rest = divide(min(pixel, int32(pixels - 1)), int32(Ho * Wo))
    i, j = divide(rest, Wo)
    top, left = int32(i * stride - size // 2), int32(j * stride - size // 2)
    seen = int32(inside_of(left, W, size, 1) * rows & inside_of(top, H, size, size))
    return int32(((image * H + top) * W + left) * C), seen if pixel < pixels else int32(0)


class Tf32ConvCopies(NamedTuple):
    """What a thread copies of each step: the channels from `four` on of PIXELS pixels, to address
    a_to; of WEIGHTS rows of the weight, of channel n, what begins with b_k of the step's channels,
    to address b_to. (Of the gradient's, the channels from n on, and b_k is the row.)"""

    four: int
    a_to: int
    b_to: int
    n: int
    b_k: int


class Tf32ConvStep(NamedTuple):
    """Of the inner dimension: a tap, its row and column in the window, and the first channel."""

    tap: int
    r: int
    s: int
    c: int


@cuda.jit(device=True, forceinline=True)
def copies_of(base, first_n, t):
    place, four = int32(t // 4), int32(t % 4 * 4)
    a_to = base + place_along_k(place, int32(t % 4))
    if GRADIENT:
        b_k, n = int32(t // FOURS), int32(first_n + t % FOURS * 4)
        b_to = base + B_FIRST + place_across(b_k, int32(t % FOURS), TILE_N * 4)
    else:
        b_k, n = four, int32(first_n + row_at(place))
        b_to = base + B_FIRST + place_along_k(place, int32(t % 4))
    return Tf32ConvCopies(four, a_to, b_to, n, b_k)


@cuda.jit(device=True, forceinline=True)
def fetch_pixels(x, at, stage, starts, seen, mine, geometry):
    """Start this thread's copies of a step's pixels; starts, seen: what `window` says of them."""
    four = mine.four
    a_at = int32((at.r * geometry.W + at.s) * geometry.C + at.c + four)
    tap_bit = int32(int32(1) << at.tap if at.c + four < geometry.C else 0)
    for i in range(PIXELS):
        inside = seen[i] & tap_bit != 0
        cp_async_16_zfill(
            mine.a_to + int32(stage * A_BYTES + i * APART * ROW),
            x,
            int32(starts[i] + a_at),
            int32(16) if inside else int32(0),
        )


@cuda.jit(device=True, forceinline=True)
def fetch_weights(weight, at, stage, taps, mine, geometry):
    """Start this thread's copies of a step's weights."""
    C, N, n, b_k = geometry.C, geometry.N, mine.n, mine.b_k
    for i in range(WEIGHTS):
        if GRADIENT:
            k = int32(at.c + b_k + i * K_APART)
            inside = k < C and n < N
            source = int32((k * taps + taps - 1 - at.tap) * N + n)
            to = int32(i * K_APART * TILE_N * 4)
        else:
            inside = at.c + b_k < C and n + i * APART < N
            source = int32(((n + i * APART) * taps + at.tap) * C + at.c + b_k)
            to = int32(i * APART * ROW)
        cp_async_16_zfill(
            mine.b_to + int32(stage * B_BYTES + to),
            weight,
            source,
            int32(16) if inside else int32(0),
        )


@cuda.jit(device=True, forceinline=True)
def next_step(at, geometry):
    tap, r, s, c = at.tap, at.r, at.s, int32(at.c + BK)
    if c >= geometry.C:  # the channels are through: the next tap
        c, tap, s = int32(0), int32(tap + 1), int32(s + 1)
        if s == geometry.size:
            s, r = int32(0), int32(r + 1)
    return Tf32ConvStep(tap, r, s, c)


# The kernel ---------------------------------------------------------------------------------------


@requires("8.0")
def conv2d_tf32(x, weight, addends, y, geometry, pixels, part_steps, added):
    H, W, C, Ho, Wo, N, size, stride = geometry
    tiles = cuda.shared.array(0, "uint8", alignment=128)
    base = shared_address(tiles)
    t = int32(cuda.threadIdx.x)
    lane, warp = int32(t % 32), int32(t // 32)
    first_pixel, first_n = int32(cuda.blockIdx.x * TILE_M), int32(cuda.blockIdx.y * TILE_N)
    warp_row, warp_column = int32(warp // WARPS_N * WARP_M), int32(warp % WARPS_N * WARP_N)
    taps = int32(size * size)
    # bits 0, size, 2 · size, …
    first_taps = int32(((int32(1) << taps) - 1) // ((int32(1) << size) - 1))
    chunks = int32((uint32(C) + uint32(BK - 1)) // uint32(BK))  # steps of a tap
    first_step = int32(cuda.blockIdx.z * part_steps)
    steps = int32(min(int32(part_steps), int32(taps * chunks - first_step)))

    starts = cuda.local.array(PIXELS, "int32")
    seen = cuda.local.array(PIXELS, "int32")
    for i in range(PIXELS):
        starts[i], seen[i] = window(
            int32(first_pixel + row_at(int32(t // 4)) + i * APART),
            pixels,
            H,
            W,
            C,
            Ho,
            Wo,
            size,
            stride,
            first_taps,
        )
    mine = copies_of(base, first_n, t)
    tap, chunk = divide(first_step, chunks)
    r, s = divide(tap, size)
    at = Tf32ConvStep(tap, r, s, int32(chunk * BK))  # the step that is fetched
    accumulators = cuda.local.array(ACCUMULATORS, "float32")
    clear(accumulators, ACCUMULATORS)
    stage, ahead = int32(0), int32(0)
    for step in range(int32(1 - STAGES), steps):
        if step >= 0:
            cp_async_wait(PENDING)  # this thread's part of the step's tiles is there
            cuda.syncthreads()  # so are all parts, and the tiles before them are no longer read
        if step + STAGES - 1 < steps:
            fetch_pixels(x, at, ahead, starts, seen, mine, geometry)
            fetch_weights(weight, at, ahead, taps, mine, geometry)
            at = next_step(at, geometry)
            ahead = int32(0 if ahead == STAGES - 1 else ahead + 1)
        cp_async_commit()
        if step >= 0:
            multiply_tiles(accumulators, tiles, base, stage, warp_row, warp_column, lane)
            stage = int32(0 if stage == STAGES - 1 else stage + 1)

    pixel, n = (
        int32(first_pixel + warp_row + lane // 4 * 2),
        int32(first_n + warp_column + lane % 4 * 4),
    )
    write_outputs(
        y,
        int32(cuda.blockIdx.z * pixels),
        accumulators,
        pixel,
        n,
        pixels,
        N,
        int32(Ho * Wo),
        addends,
        added,
    )


# The second kernel: adds the parts ----------------------------------------------------------------


@cuda.jit
def add_parts_and_more_kernel(partial, addends, y, parts, pixels, N, per_image, added):
    """Four neighbouring channels a thread: their parts, in order, and what is added to them."""
    four = int32(cuda.blockIdx.x * BLOCK + cuda.threadIdx.x)
    pixel, n = divide(four, int32(N // 4))
    n = int32(n * 4)
    if pixel < pixels:
        size, at = pixels * N, pixel * N + n
        v0, v1, v2, v3 = load4(partial, at)
        for part in range(1, parts):
            p0, p1, p2, p3 = load4(partial, part * size + at)
            v0, v1, v2, v3 = v0 + p0, v1 + p1, v2 + p2, v3 + p3
        write_four(y, pixel, n, True, N, per_image, v0, v1, v2, v3, addends, added)
