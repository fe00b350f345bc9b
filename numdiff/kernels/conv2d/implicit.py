"""Convolution as an implicit GEMM: im2col's matrix is multiplied without ever being written.

MATHEMATICS
    forward           y[p, n] = Σ_k col[p, k] · weight[n, k] + bias[n]       p a pixel, k = (r, s, c): tap and channel
    input gradient    with stride 1 the forward over dy, with flipped_weight (flip.py)
    col[p, k] is x[b, i·stride + r - pad, j·stride + s - pad, c], p = (b, i, j). So a block can load a tile of col
    directly from x, from each element's pixel and tap. Everything else is in tiles.py.
SHAPES
    as in direct.py; every array flat, float32, fewer than 2³¹ elements
VERSIONS
    v3 implicit-gemm: of launcher.py.
WHAT A THREAD KNOWS
    A step multiplies 8 channels of one tap, for 128 pixels and tile_n output channels. Two threads
    share a pixel: each fetches four of the eight channels by one 16-byte load. A thread keeps two
    numbers for its pixel: where its window starts in x, and which rows and columns of the window
    are inside the image, as bits. The rest of an address, the tap and the channel, is the same for
    all threads. So no division stands in the loop, and a new tap, every C / 8 steps, is two shifts.
    Numbers are fetched a step ahead, while those fetched before are multiplied, and go to the other
    of two buffers in shared memory: one barrier a step.
LAUNCH
    one thread for 8 × 8 outputs, 256 or 128 a block, and 16.5 KiB of shared memory. Grid (row
    tiles, column tiles, parts): where the tiles are too few to fill a GPU, the inner dimension is
    cut into parts. At most 128 registers a thread, so that a multiprocessor holds 512 threads.
DETERMINISM
    each output is summed in the order of k, its parts in their order.
COST
    FLOPs as in direct.py. A step loads 4·8·(128 + tile_n) bytes for 2·8·128·tile_n FLOPs, 32 or 21
    FLOPs a byte, mostly from the L2 cache, because nine taps read the same pixels. Roof:
    arithmetic.
SOURCE
    Chetlur et al. 2014, "cuDNN: Efficient Primitives for Deep Learning", arXiv:1410.0759, section
    3.
READ NEXT
    implicit_weight_gradient.py
"""

from typing import NamedTuple

from ...device import cuda, device_inline, empty, float32, int32, launch
from ...device.batch_invariance import nominal_extent
from ...device.common import divide
from ...device.specialise import specialise
from ..matmul.vectorised import STEP, multiply, no_products
from .direct import Geometry
from .tiles import (
    BY_FOUR,
    ROW,
    SHARED,
    STAGE,
    TILE_M,
    TILE_N,
    TWO_ROUNDS,
    VARIANTS,
    add_parts,
    cut,
    fetch,
    first_output,
    scatter,
    tile_width,
    within,
    write_outputs,
)

LARGEST_KERNEL = 15  # a window's rows and columns are kept as 16 bits each


# The window of a pixel ----------------------------------------------------------------------------


@cuda.jit(device=True)
def window(pixel, pixels, H, W, C, Ho, Wo, kernel, stride):
    """The start of an output pixel's window in x (perhaps before it), and which of its rows (bits 0
    …) and columns (bits 16 …) are inside the image. A pixel beyond the last sees nothing."""
    image, rest = divide(pixel, int32(Ho * Wo))
    i, j = divide(rest, Wo)
    top = int32(i * stride - kernel // 2)
    left = int32(j * stride - kernel // 2)
    seen = int32(0)
    for tap in range(kernel):
        if pixel < pixels and within(top + tap, 0, H, 1):
            seen = int32(seen | (1 << tap))
        if within(0, left + tap, 1, W):
            seen = int32(seen | (65536 << tap))
    return int32(((image * H + top) * W + left) * C), seen


@cuda.jit(device=True)
def sees(seen, r, s):
    """Whether tap (r, s) of a window is inside the image."""
    return ((seen >> r) & (seen >> (s + 16)) & 1) != 0


class ImplicitGemmStep(NamedTuple):
    """The position of all threads: at tap (r, s), channels c … c + 7, and so far into a window of
    x, and into a weight."""

    r: int
    s: int
    c: int
    x_at: int
    weight_at: int


class Seen(NamedTuple):
    """A pixel that a thread fetches: where its window starts in x, its taps inside the image
    (`window`), and whether the step's tap is one of these."""

    start: int
    taps: int
    inside: bool


@device_inline
def first_step(g, part_steps):
    """(steps of this block's part, its first `ImplicitGemmStep`)."""
    steps_a_tap = int32((g.C + STEP - 1) // STEP)
    first = int32(cuda.blockIdx.z * part_steps)
    steps = int32(min(part_steps, g.size * g.size * steps_a_tap - first))
    tap, chunk = divide(first, steps_a_tap)
    r, s = divide(tap, g.size)
    c = int32(chunk * STEP)
    return steps, ImplicitGemmStep(r, s, c, int32((r * g.W + s) * g.C + c), int32(tap * g.C + c))


@device_inline
def look(pixel, pixels, k, at, g):
    """The data of a pixel for a thread that fetches its channels k … k + 3."""
    start, taps = window(pixel, pixels, g.H, g.W, g.C, g.Ho, g.Wo, g.size, g.stride)
    return Seen(int32(start + k), taps, sees(taps, at.r, at.s))


@device_inline
def next_step(at, mine, mine_2, g):
    """The step after `at`, with this thread's two pixels as they are then."""
    r, s, c = at.r, at.s, int32(at.c + STEP)
    x_at, weight_at = int32(at.x_at + STEP), int32(at.weight_at + STEP)
    inside, inside_2 = mine.inside, mine_2.inside
    if c >= g.C:  # the channels are through: the next tap
        weight_at = int32(weight_at + g.C - c)
        c = int32(0)
        s = int32(s + 1)
        if s == g.size:
            s = int32(0)
            r = int32(r + 1)
        x_at = int32((r * g.W + s) * g.C)
        inside = sees(mine.taps, r, s)
        if TWO_ROUNDS:
            inside_2 = sees(mine_2.taps, r, s)
    return (
        ImplicitGemmStep(r, s, c, x_at, weight_at),
        Seen(mine.start, mine.taps, inside),
        Seen(mine_2.start, mine_2.taps, inside_2),
    )


# The kernel ---------------------------------------------------------------------------------------


def conv2d_forward_kernel_v3(x, weight, bias, y, g, pixels, part_steps, has_bias):
    """g: a `Geometry`; BY_FOUR needs C to be a multiple of 8: whole steps, 16-byte loads."""
    tile_a = cuda.shared.array(SHARED, float32)
    tile_b = cuda.shared.array(SHARED, float32)
    t = int32(cuda.threadIdx.x)
    first_pixel, first_channel = int32(cuda.blockIdx.x * TILE_M), int32(cuda.blockIdx.y * TILE_N)
    steps, at = first_step(g, part_steps)

    # what this thread fetches: channels c + k … c + k + 3 of pixel `place` of the tile, and of
    # weight row `place`
    place, k = t >> 1, int32((t & 1) * 4)
    to = int32(k * ROW + place)
    mine = look(int32(first_pixel + place), pixels, k, at, g)
    mine_2 = mine
    if TWO_ROUNDS:
        mine_2 = look(int32(first_pixel + place + TILE_N), pixels, k, at, g)
    # rows beyond the last repeat it: their outputs are never written
    n = min(first_channel + place, g.N - 1)
    weight_start = int32(n * g.size * g.size * g.C + k)

    row, column = first_output(t)
    accumulators = no_products()
    step = int32(0)
    # one round more than steps: round 0 only fetches, the last only multiplies
    while step <= steps:
        more = step < steps
        left = int32(g.C - at.c - k)
        a = fetch(x, int32(mine.start + at.x_at), mine.inside and more, left, BY_FOUR)
        b = fetch(weight, int32(weight_start + at.weight_at), more, left, BY_FOUR)
        a_2 = a
        if TWO_ROUNDS:
            a_2 = fetch(x, int32(mine_2.start + at.x_at), mine_2.inside and more, left, BY_FOUR)

        stage = int32(step & 1)
        if step > 0:
            accumulators = multiply(
                accumulators, tile_a, stage * STAGE + row, tile_b, stage * STAGE + column, ROW, ROW
            )
        stage = int32(1 - stage)
        scatter(tile_a, stage * STAGE + to, a)
        scatter(tile_b, stage * STAGE + to, b)
        if TWO_ROUNDS:
            scatter(tile_a, stage * STAGE + to + TILE_N, a_2)
        cuda.syncthreads()
        step = int32(step + 1)
        at, mine, mine_2 = next_step(at, mine, mine_2, g)

    write_outputs(
        y,
        bias,
        first_pixel + row,
        int32(first_channel + column),
        pixels,
        g.N,
        accumulators,
        has_bias,
    )


conv2d_forward_kernels_v3 = {
    (n, four): specialise(
        conv2d_forward_kernel_v3,
        name=f"conv2d_forward_kernel_v3_{n}{'' if four else '_by_one'}",
        TILE_N=n,
        BY_FOUR=four,
    )
    for n, four in VARIANTS
}


def implicit_forward(x, weight, bias, y, stride):
    """y = conv2d(x, weight) + bias, for arrays that launcher.py has checked."""
    _, h, w, c = x.shape
    n, kernel = weight.shape[:2]
    b, ho, wo, _ = y.shape
    if kernel > LARGEST_KERNEL:
        raise ValueError(
            f"version 3 (implicit-gemm) takes kernels up to {LARGEST_KERNEL} pixels wide, not {kernel}; "
            "use version=2"
        )
    tile_n, by_four = (tile_width(n), True) if c % STEP == 0 else (64, False)
    grid = -(-b * ho * wo // TILE_M), -(-n // tile_n)
    threads = 2 * tile_n
    blocks = -(-nominal_extent(b * ho * wo) // TILE_M) * grid[1]
    parts, part_steps = cut(blocks, threads, kernel * kernel * -(-c // STEP))
    out = y if parts == 1 else empty((parts, y.size), like=y)
    launch(
        conv2d_forward_kernels_v3[tile_n, by_four],
        (*grid, parts),
        threads,
        x.reshape(-1),
        weight.reshape(-1),
        weight.reshape(-1) if bias is None else bias,
        out.reshape(-1),
        Geometry(h, w, c, ho, wo, n, kernel, stride),
        b * ho * wo,
        part_steps,
        int(bias is not None),
    )
    if parts > 1:
        add_parts(out, y, accumulate=False)
