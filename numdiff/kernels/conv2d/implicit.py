"""Convolution as an implicit GEMM: im2col's matrix is multiplied without ever being written.

MATHEMATICS
    forward           y[p, n] = Σ_k col[p, k] · weight[n, k] + bias[n]       p a pixel, k = (r, s, c): tap and channel
    weight gradient   dweight[n, k] += Σ_p dy[p, n] · col[p, k]
    input gradient    with stride 1 the forward over dy, with flipped_weight (direct.py derives it)
    col[p, k] lies at x[b, i·stride + r - pad, j·stride + s - pad, c], p = (b, i, j). So whoever fetches a tile of col
    can fetch it from x, if it knows its pixel and its tap. Everything else is matmul/vectorised.py: read that first.
SHAPES
    as in direct.py; every array flat, float32, fewer than 2³¹ elements
VERSIONS
    v3 implicit-gemm: of launcher.py. There are three kernels of each kind, one text with other constants (`specialise`
    does what a template does in C++):
      128 × 128 outputs a block, where C_out fills whole tiles of 128;
      128 × 64, where it would leave more of them empty (64, 192, 320);
      128 × 64 with loads of single numbers, where channels do not come in eights (forward) or fours (gradient).
MEASURED
    NVIDIA H200, 2026-11-22, PyTorch 2.11.0: numdiff bench kernels --of files; * is the launcher's choice
    conv2d_forward, 32×64×64×64, 64×3×3×64, float32
        v3*      265 µs  36.4 TFLOP/s   54 % of arithmetic   1.46 × v2   107 % of cuDNN
    conv2d_input_gradient, 32×64×64×64, 64×3×3×64, float32
        v3*      270 µs  35.8 TFLOP/s   54 % of arithmetic   1.42 × v2   116 % of cuDNN
    conv2d_weight_gradient, 32×64×64×64, 32×64×64×64, float32
        v3*      287 µs  33.8 TFLOP/s   50 % of arithmetic   1.27 × v2   145 % of cuDNN
LAUNCH
    one thread for 8 × 8 outputs, 256 or 128 a block, and 16.5 KiB of shared memory. Grid (row tiles, column tiles,
    parts): where the tiles are too few to fill a GPU, the inner dimension is cut into parts. At most 128 registers a
    thread, so that a multiprocessor holds 512 threads.
DETERMINISM
    each part writes its own sums, and a second pass adds them in order. The number of parts depends on the shape alone.
COST
    FLOPs as in direct.py. A step loads 4·8·(128 + tile_n) bytes for 2·8·128·tile_n FLOPs, 32 or 21 FLOPs a byte,
    mostly from the L2 cache, because nine taps read the same pixels. Roof: arithmetic.
SOURCE
    Chetlur et al. 2014, "cuDNN: Efficient Primitives for Deep Learning", arXiv:1410.0759, section 3.
READ NEXT
    im2win.py, which writes a part of the matrix and has the shorter loop for it; narrow.py, for when the tiles would
    be nearly empty.
"""
from typing import NamedTuple

from ...device import cuda, empty, float32, int32, launch, load4, store4, uint32
from ...device.specialise import Constant, specialise
from ..any_batch import assumed
from ..common import divide
from ..matmul.vectorised import PAD, STEP, WARP_COLUMNS, WARP_ROWS, multiply, no_products
from .direct import Geometry

TILE_M = 128  # pixels (forward) or columns of col (weight gradient) in a block's tile
ROW = TILE_M + PAD  # shared-memory distance from one k to the next, in both tiles
STAGE = STEP * ROW  # one of a tile's two buffers
SHARED = 2 * STAGE
LARGEST_KERNEL = 15  # a window's rows and columns are kept as 16 bits each
THREADS_WANTED = 65536  # in the grid: 512 for each of an H100's 132 multiprocessors
SHORTEST_PART = 8  # steps: a shorter part would spend more on filling and emptying its pipeline than it wins
BLOCK = 256  # threads of a block that adds parts, at most
TRANSPOSE = 32  # weights along each side of a tile that is transposed
TRANSPOSE_TILE = TRANSPOSE, TRANSPOSE + 1

# Of each kernel: output channels of a tile; whether fours of channels are fetched by one load
TILE_N, BY_FOUR = Constant(), Constant()
TWO_ROUNDS = Constant(lambda TILE_N: TILE_N < TILE_M)  # 2 · TILE_N threads fetch TILE_N pixels, then the others
WARPS_N = Constant(lambda TILE_N: TILE_N // WARP_COLUMNS)
LANES = Constant(lambda TILE_N: TILE_N // 4)  # threads that share a pixel of dy; a whole warp shares one of x


# Device functions -----------------------------------------------------------------------------------------------------

@cuda.jit(device=True)
def fetch(x, at, inside, left, by_four):
    """x[at], …, x[at + 3]: zeros where not `inside`, and beyond the `left` that exist (by_four: all of them do)."""
    zero = float32(0)
    if by_four:
        if inside:
            return load4(x, at)
        return zero, zero, zero, zero
    left = int32(left) if inside else int32(0)
    at = uint32(at)  # an unsigned index spares the test whether it counts from the end
    a = b = c = d = zero
    if left > 0:
        a = x[at]
    if left > 1:
        b = x[at + 1]
    if left > 2:
        c = x[at + 2]
    if left > 3:
        d = x[at + 3]
    return a, b, c, d


@cuda.jit(device=True)
def write_four(out, at, left, v0, v1, v2, v3, by_four):
    """out[at], …, out[at + 3], of which `left` exist (by_four: four, or none)."""
    if by_four:
        if left > 0:
            store4(out, at, v0, v1, v2, v3)
    else:
        at = uint32(at)
        if left > 0:
            out[at] = v0
        if left > 1:
            out[at + 1] = v1
        if left > 2:
            out[at + 2] = v2
        if left > 3:
            out[at + 3] = v3


@cuda.jit(device=True)
def scatter(tile, at, v):
    """Four neighbouring k of one pixel go to four rows of the tile, which is k-major: transposed on the way."""
    at = uint32(at)
    tile[at] = v[0]
    tile[at + ROW] = v[1]
    tile[at + 2 * ROW] = v[2]
    tile[at + 3 * ROW] = v[3]


@cuda.jit(device=True)
def within(h, w, H, W):
    h, w = int32(h), int32(w)
    return h >= 0 and h < H and w >= 0 and w < W


# Forward --------------------------------------------------------------------------------------------------------------
# A step multiplies 8 channels of one tap, for 128 pixels and tile_n output channels. Two threads share a pixel: each
# fetches four of the eight channels by one 16-byte load. A thread keeps two numbers for its pixel: where its window
# starts in x, and which rows and columns of the window are inside the image, as bits. The rest of an address, the tap
# and the channel, is the same for all threads. So no division stands in the loop, and a new tap, every C / 8 steps, is
# two shifts. Numbers are fetched a step ahead, while those fetched before are multiplied, and go to the other of two
# buffers in shared memory: one barrier a step.

@cuda.jit(device=True)
def window(pixel, pixels, H, W, C, Ho, Wo, kernel, stride):
    """Where an output pixel's window starts in x (perhaps before it), and which of its rows (bits 0 …) and columns
    (bits 16 …) lie inside the image. A pixel beyond the last sees nothing."""
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
    """Whether tap (r, s) of a window lies inside the image."""
    return ((seen >> r) & (seen >> (s + 16)) & 1) != 0


class Step(NamedTuple):
    """Where all threads are: at tap (r, s), channels c … c + 7, and so far into a window of x, and into a weight."""

    r: int
    s: int
    c: int
    x_at: int
    weight_at: int


class Seen(NamedTuple):
    """A pixel that a thread fetches: where its window starts in x, its taps inside the image (`window`), and whether
    the step's tap is one of these."""

    start: int
    taps: int
    inside: bool


@cuda.jit(device=True, forceinline=True)
def first_step(g, part_steps):
    """(steps of this block's part, its first `Step`)."""
    steps_a_tap = int32((g.C + STEP - 1) // STEP)
    first = int32(cuda.blockIdx.z * part_steps)
    steps = int32(min(part_steps, g.size * g.size * steps_a_tap - first))
    tap, chunk = divide(first, steps_a_tap)
    r, s = divide(tap, g.size)
    c = int32(chunk * STEP)
    return steps, Step(r, s, c, int32((r * g.W + s) * g.C + c), int32(tap * g.C + c))


@cuda.jit(device=True, forceinline=True)
def look(pixel, pixels, k, at, g):
    """What a thread that fetches channels k … k + 3 of a pixel needs to know of it."""
    start, taps = window(pixel, pixels, g.H, g.W, g.C, g.Ho, g.Wo, g.size, g.stride)
    return Seen(int32(start + k), taps, sees(taps, at.r, at.s))


@cuda.jit(device=True, forceinline=True)
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
    return (Step(r, s, c, x_at, weight_at), Seen(mine.start, mine.taps, inside),
            Seen(mine_2.start, mine_2.taps, inside_2))


@cuda.jit(device=True, forceinline=True)
def multiplied(t):
    """(row, column) of the tile from which on a thread multiplies: rows row … and row + 16 …, columns column … and
    column + 32 …"""
    warp, lane = t >> 5, t & 31
    return (int32(warp // WARPS_N * WARP_ROWS + (lane >> 3) * 4),
            int32(warp % WARPS_N * WARP_COLUMNS + (lane & 7) * 4))


@cuda.jit(device=True)
def write_pixel(y, at, exists, left, v, bias_0, bias_32, by_four):
    """A thread's eight channels of one pixel: four at `at` and four at `at + 32`."""
    if exists:
        write_four(y, at, left, v[0] + bias_0[0], v[1] + bias_0[1], v[2] + bias_0[2], v[3] + bias_0[3], by_four)
        write_four(y, at + 32, left - 32, v[4] + bias_32[0], v[5] + bias_32[1], v[6] + bias_32[2], v[7] + bias_32[3],
                   by_four)


@cuda.jit(device=True, forceinline=True)
def write_outputs(y, bias, pixel, channel, pixels, N, rows, has_bias):
    """The epilogue of a thread's 8 × 8 outputs, from `pixel` and `channel` on."""
    left = int32(N - channel)
    whole = N % 4 == 0
    first_part = has_bias != 0 and cuda.blockIdx.z == 0  # only one part may bring the bias
    bias_0 = fetch(bias, channel, first_part, left, False)
    bias_32 = fetch(bias, channel + 32, first_part, left - 32, False)
    at = (cuda.blockIdx.z * pixels + pixel) * N + channel
    write_pixel(y, at, pixel < pixels, left, rows[0], bias_0, bias_32, whole)
    write_pixel(y, at + N, pixel + 1 < pixels, left, rows[1], bias_0, bias_32, whole)
    write_pixel(y, at + 2 * N, pixel + 2 < pixels, left, rows[2], bias_0, bias_32, whole)
    write_pixel(y, at + 3 * N, pixel + 3 < pixels, left, rows[3], bias_0, bias_32, whole)
    pixel += 16
    at += 16 * N
    write_pixel(y, at, pixel < pixels, left, rows[4], bias_0, bias_32, whole)
    write_pixel(y, at + N, pixel + 1 < pixels, left, rows[5], bias_0, bias_32, whole)
    write_pixel(y, at + 2 * N, pixel + 2 < pixels, left, rows[6], bias_0, bias_32, whole)
    write_pixel(y, at + 3 * N, pixel + 3 < pixels, left, rows[7], bias_0, bias_32, whole)


def conv2d_forward_kernel_v3(x, weight, bias, y, g, pixels, part_steps, has_bias):
    """g: a `Geometry`; BY_FOUR needs C to be a multiple of 8: whole steps, 16-byte loads."""
    tile_a = cuda.shared.array(SHARED, float32)
    tile_b = cuda.shared.array(SHARED, float32)
    t = int32(cuda.threadIdx.x)
    first_pixel, first_channel = int32(cuda.blockIdx.x * TILE_M), int32(cuda.blockIdx.y * TILE_N)
    steps, at = first_step(g, part_steps)

    # what this thread fetches: channels c + k … c + k + 3 of pixel `place` of the tile, and of weight row `place`
    place, k = t >> 1, int32((t & 1) * 4)
    to = int32(k * ROW + place)
    mine = look(int32(first_pixel + place), pixels, k, at, g)
    mine_2 = mine
    if TWO_ROUNDS:
        mine_2 = look(int32(first_pixel + place + TILE_N), pixels, k, at, g)
    n = min(first_channel + place, g.N - 1)  # rows beyond the last repeat it: their outputs are never written
    weight_start = int32(n * g.size * g.size * g.C + k)

    row, column = multiplied(t)
    accumulators = no_products()
    step = int32(0)
    while step <= steps:  # one round more than steps: round 0 only fetches, the last only multiplies
        more = step < steps
        left = int32(g.C - at.c - k)
        a = fetch(x, int32(mine.start + at.x_at), mine.inside and more, left, BY_FOUR)
        b = fetch(weight, int32(weight_start + at.weight_at), more, left, BY_FOUR)
        a_2 = a
        if TWO_ROUNDS:
            a_2 = fetch(x, int32(mine_2.start + at.x_at), mine_2.inside and more, left, BY_FOUR)

        stage = int32(step & 1)
        if step > 0:
            accumulators = multiply(accumulators, tile_a, stage * STAGE + row, tile_b, stage * STAGE + column, ROW, ROW)
        stage = int32(1 - stage)
        scatter(tile_a, stage * STAGE + to, a)
        scatter(tile_b, stage * STAGE + to, b)
        if TWO_ROUNDS:
            scatter(tile_a, stage * STAGE + to + TILE_N, a_2)
        cuda.syncthreads()
        step = int32(step + 1)
        at, mine, mine_2 = next_step(at, mine, mine_2, g)

    write_outputs(y, bias, first_pixel + row, int32(first_channel + column), pixels, g.N, accumulators, has_bias)


# Weight gradient ------------------------------------------------------------------------------------------------------
# Now pixels are the inner dimension: a step multiplies 8 pixels, for 128 columns of col and tile_n output channels. A
# thread keeps its columns, so it finds its tap and channel once; what moves is the pixel. The 8 pixels of a step are
# neighbours in one row of dy, so the walk from pixel to pixel is the same for all threads and needs no division. (A row
# that is no multiple of 8 ends with zeros.) In both operands a tile's long side is contiguous: a warp reads 512
# neighbouring bytes of x and 256 or 512 of dy, and nothing is transposed on the way to shared memory.
# Columns are counted C4 a tap, C rounded up to whole fours.

@cuda.jit(device=True)
def column_source(column, W, C, C4, kernel):
    """What a column of col reads: rows and columns from the window's middle to its tap, that distance as an index into
    x with its channel included, and the channels left from there on (0 beyond the last column)."""
    tap, c = divide(column, C4)
    r, s = divide(tap, kernel)
    dr, ds = int32(r - kernel // 2), int32(s - kernel // 2)
    return dr, ds, int32((dr * W + ds) * C + c), int32(C - c if tap < kernel * kernel else 0)


@cuda.jit(device=True)
def write_columns(partial, at, K, channels, left, s0, s1, s2, s3, by_four):
    """A thread's four columns (s0 … s3) of eight channels: 0 … 3 and 32 … 35, of which `channels` exist."""
    write_four(partial, at, left if channels > 0 else 0, s0[0], s1[0], s2[0], s3[0], by_four)
    write_four(partial, at + K, left if channels > 1 else 0, s0[1], s1[1], s2[1], s3[1], by_four)
    write_four(partial, at + 2 * K, left if channels > 2 else 0, s0[2], s1[2], s2[2], s3[2], by_four)
    write_four(partial, at + 3 * K, left if channels > 3 else 0, s0[3], s1[3], s2[3], s3[3], by_four)
    at += 32 * K
    write_four(partial, at, left if channels > 32 else 0, s0[4], s1[4], s2[4], s3[4], by_four)
    write_four(partial, at + K, left if channels > 33 else 0, s0[5], s1[5], s2[5], s3[5], by_four)
    write_four(partial, at + 2 * K, left if channels > 34 else 0, s0[6], s1[6], s2[6], s3[6], by_four)
    write_four(partial, at + 3 * K, left if channels > 35 else 0, s0[7], s1[7], s2[7], s3[7], by_four)


@cuda.jit(device=True, forceinline=True)
def write_gradient(partial, column, channel, C, C4, N, kernel, rows):
    """The epilogue of a thread's 8 × 8 outputs, from `column` and `channel` on, into its part's partial results."""
    K = kernel * kernel * C
    start = (cuda.blockIdx.z * N + channel) * K
    tap, c = divide(column, C4)
    left = int32(C - c if tap < kernel * kernel else 0)
    write_columns(partial, start + tap * C + c, K, N - channel, left, rows[0], rows[1], rows[2], rows[3], BY_FOUR)
    tap, c = divide(int32(column + 16), C4)
    left = int32(C - c if tap < kernel * kernel else 0)
    write_columns(partial, start + tap * C + c, K, N - channel, left, rows[4], rows[5], rows[6], rows[7], BY_FOUR)


def conv2d_weight_gradient_kernel_v3(dy, x, partial, H, W, C, C4, Ho, Wo, N, kernel, stride, all_steps, part_steps):
    """BY_FOUR needs C and N to be multiples of 4."""
    tile_a = cuda.shared.array(SHARED, float32)
    tile_b = cuda.shared.array(SHARED, float32)
    t = int32(cuda.threadIdx.x)
    first_column = int32(cuda.blockIdx.x * TILE_M)
    first_channel = int32(cuda.blockIdx.y * TILE_N)

    # where all threads are: eight pixels of a line (one row of one image) of dy; (h, w) is the first's place in x
    first_step = int32(cuda.blockIdx.z * part_steps)
    steps = int32(min(part_steps, all_steps - first_step))
    line_steps = int32((Wo + STEP - 1) // STEP)
    line, chunk = divide(first_step, line_steps)
    image, i = divide(line, Ho)
    h, w = int32(i * stride), int32(chunk * STEP * stride)
    x_at = int32(((image * H + h) * W + w) * C)
    dy_at = int32((line * Wo + chunk * STEP) * N)

    # what this thread fetches: four columns of pixel k (and of pixel k + 4), four channels of pixel q
    k, mine = t >> 5, int32((t & 31) * 4)
    to_a = int32(k * ROW + mine)
    dr, ds, offset, left = column_source(int32(first_column + mine), W, C, C4, kernel)
    if left == 0:
        dr = int32(-32768 * kernel)  # no such column: a tap far above every image
    ds = int32(ds + k * stride)
    offset = int32(offset + k * stride * C)
    limit = int32((Wo - k) * stride)  # w from which on pixel k lies beyond the line's end
    q, mine = t // LANES, int32(t % LANES * 4)
    to_b = int32(q * ROW + mine)
    channel = int32(first_channel + mine)
    if BY_FOUR:
        channel = int32(min(channel, N - 4))  # channels beyond the last repeat it: they are never written
    dy_left = int32(N - channel)
    dy_offset = int32(q * N + channel)
    dy_limit = int32((Wo - q) * stride)

    row, column = multiplied(t)
    accumulators = no_products()
    step = int32(0)
    while step <= steps:  # one round more than steps, as in the forward
        more = step < steps
        a = fetch(x, int32(x_at + offset), more and w < limit and within(h + dr, w + ds, H, W), left, BY_FOUR)
        b = fetch(dy, int32(dy_at + dy_offset), more and w < dy_limit, dy_left, BY_FOUR)
        if TWO_ROUNDS:
            w_2 = int32(w + 4 * stride)
            a_2 = fetch(x, int32(x_at + offset + 4 * stride * C),
                        more and w_2 < limit and within(h + dr, w_2 + ds, H, W), left, BY_FOUR)

        stage = int32(step & 1)
        if step > 0:
            accumulators = multiply(accumulators, tile_a, stage * STAGE + row, tile_b, stage * STAGE + column, ROW, ROW)

        stage = int32(1 - stage)
        store4(tile_a, stage * STAGE + to_a, a[0], a[1], a[2], a[3])
        store4(tile_b, stage * STAGE + to_b, b[0], b[1], b[2], b[3])
        if TWO_ROUNDS:
            store4(tile_a, stage * STAGE + to_a + 4 * ROW, a_2[0], a_2[1], a_2[2], a_2[3])
        cuda.syncthreads()

        step = int32(step + 1)
        w = int32(w + STEP * stride)
        x_at = int32(x_at + STEP * stride * C)
        dy_at = int32(dy_at + STEP * N)
        if w >= Wo * stride:  # the line is through: the next, perhaps of the next image
            dy_at = int32(dy_at + (Wo - line_steps * STEP) * N)
            x_at = int32(x_at + (W * stride - w) * C)
            w = int32(0)
            h = int32(h + stride)
            if h == Ho * stride:
                x_at = int32(x_at + (H - h) * W * C)
                h = int32(0)

    write_gradient(partial, int32(first_column + row), int32(first_channel + column), C, C4, N, kernel, accumulators)


VARIANTS = (128, True), (64, True), (64, False)  # (TILE_N, BY_FOUR)
conv2d_forward_kernels_v3, conv2d_weight_gradient_kernels_v3 = (
    {(n, four): specialise(kernel, name=f"{kernel.__name__}_{n}{'' if four else '_by_one'}", TILE_N=n, BY_FOUR=four)
     for n, four in VARIANTS} for kernel in (conv2d_forward_kernel_v3, conv2d_weight_gradient_kernel_v3))


# Around them: the sum of the parts, and the flipped weight ------------------------------------------------------------

@cuda.jit
def add_parts_kernel(partial, out, size, parts, accumulate):
    """out = or += the sum of `parts` arrays of `size`: 32 elements a block; its rows of threads share the parts."""
    tile = cuda.shared.array(BLOCK, float32)
    lane, group = cuda.threadIdx.x, cuda.threadIdx.y
    groups = cuda.blockDim.y
    i = cuda.blockIdx.x * 32 + lane
    total = float32(0)
    if i < size:
        for part in range(group, parts, groups):
            total += partial[part * size + i]
    tile[group * 32 + lane] = total
    cuda.syncthreads()
    if group == 0 and i < size:
        for other in range(1, groups):
            total += tile[other * 32 + lane]
        out[i] = out[i] + total if accumulate else total


@cuda.jit
def flip_weight_kernel(weight, flipped, N, C, taps):
    """flipped[c, taps - 1 - tap, n] = weight[n, tap, c], by tiles of 32 × 32 that turn round in shared memory.

    Reading and writing then both run along neighbouring addresses. The tile's rows are 33 long, so that reading a
    column of it meets 32 different banks.
    """
    tile = cuda.shared.array(TRANSPOSE_TILE, float32)
    first_n, first_c, tap = cuda.blockIdx.y * TRANSPOSE, cuda.blockIdx.x * TRANSPOSE, cuda.blockIdx.z
    lane = cuda.threadIdx.x
    for line in range(cuda.threadIdx.y, TRANSPOSE, cuda.blockDim.y):
        n, c = first_n + line, first_c + lane
        if n < N and c < C:
            tile[line, lane] = weight[(n * taps + tap) * C + c]
    cuda.syncthreads()
    for line in range(cuda.threadIdx.y, TRANSPOSE, cuda.blockDim.y):
        n, c = first_n + lane, first_c + line
        if n < N and c < C:
            flipped[(c * taps + taps - 1 - tap) * N + n] = tile[lane, line]


# Launchers ------------------------------------------------------------------------------------------------------------

def tile_width(n):
    """128 where that leaves no more of the tiles empty than 64 does, and 64 elsewhere."""
    return 128 if 2 * -(-n // 128) == -(-n // 64) else 64


def cut(tiles, threads, steps):
    """(parts, steps a part): enough parts for `tiles` blocks of `threads` threads to fill a GPU."""
    parts = max(1, min(THREADS_WANTED // (tiles * threads), steps // SHORTEST_PART))
    part_steps = -(-steps // parts)
    return -(-steps // part_steps), part_steps


def add_parts(partial, out, accumulate):
    """out = or += partial summed over its first axis, in order."""
    parts, size = partial.shape[0], out.size
    launch(add_parts_kernel, -(-size // 32), (32, min(parts, BLOCK // 32)), partial.reshape(-1), out.reshape(-1), size,
           parts, int(accumulate))


def implicit_forward(x, weight, bias, y, stride):
    """y = conv2d(x, weight) + bias, for arrays that launcher.py has checked."""
    _, h, w, c = x.shape
    n, kernel = weight.shape[:2]
    b, ho, wo, _ = y.shape
    if kernel > LARGEST_KERNEL:
        raise ValueError(f"version 3 (implicit-gemm) takes kernels up to {LARGEST_KERNEL} pixels wide, not {kernel}; "
                         "use version=2")
    tile_n, by_four = (tile_width(n), True) if c % STEP == 0 else (64, False)
    grid = -(-b * ho * wo // TILE_M), -(-n // tile_n)
    threads = 2 * tile_n
    parts, part_steps = cut(-(-assumed(b * ho * wo) // TILE_M) * grid[1], threads, kernel * kernel * -(-c // STEP))
    out = y if parts == 1 else empty((parts, y.size), like=y)
    launch(conv2d_forward_kernels_v3[tile_n, by_four], (*grid, parts), threads, x.reshape(-1), weight.reshape(-1),
           weight.reshape(-1) if bias is None else bias, out.reshape(-1), Geometry(h, w, c, ho, wo, n, kernel, stride),
           b * ho * wo, part_steps, int(bias is not None))
    if parts > 1:
        add_parts(out, y, accumulate=False)


def implicit_weight_gradient(dy, x, dweight, stride):
    """dweight += the gradient, for arrays that launcher.py has checked."""
    _, h, w, c = x.shape
    b, ho, wo, n = dy.shape
    kernel = dweight.shape[1]
    tile_n, by_four = (tile_width(n), True) if c % 4 == 0 and n % 4 == 0 else (64, False)
    c4 = -(-c // 4) * 4
    grid = -(-kernel * kernel * c4 // TILE_M), -(-n // tile_n)
    threads = 2 * tile_n
    steps = b * ho * -(-wo // STEP)
    parts, part_steps = cut(grid[0] * grid[1], threads, steps)
    partial = empty((parts, dweight.size), like=dy)
    launch(conv2d_weight_gradient_kernels_v3[tile_n, by_four], (*grid, parts), threads, dy.reshape(-1), x.reshape(-1),
           partial.reshape(-1), h, w, c, c4, ho, wo, n, kernel, stride, steps, part_steps)
    add_parts(partial, dweight, accumulate=True)


def flipped_weight(weight):
    """The weight (C_in, kernel, kernel, C_out) whose convolution over dy is dx, as a new array."""
    n, kernel, _, c = weight.shape
    flipped = empty((c, kernel, kernel, n), like=weight)
    launch(flip_weight_kernel, (-(-c // TRANSPOSE), -(-n // TRANSPOSE), kernel * kernel), (TRANSPOSE, 8),
           weight.reshape(-1), flipped.reshape(-1), n, c, kernel * kernel)
    return flipped
