"""What float32's convolutions by tiles share: loads and stores by four, places of a thread, sums of
parts.

A TILE in shared memory is k-major: all 128 pixels (or columns) of one k, then those of the next,
    with a little padding. Eight k make a stage, of which there are two. Everything else is
    ../matmul/vectorised.py: read that first.
THREE KERNELS of each kind, one text with other constants (`specialise` does what a template does in
    C++): 128 × 128 outputs a block, where C_out fills whole tiles of 128; 128 × 64, where it would
    leave more of them empty (64, 192, 320); 128 × 64 with loads of single numbers, where channels
    do not come in eights (forward) or fours (gradient).
PARTS
    Where the tiles are too few to fill a GPU, the inner dimension is cut into parts. Each writes
    its own sums, and a second pass adds them in order. The number of parts depends on the shape
    alone.
SOURCE
    implicit.py; the tiles are ../matmul/vectorised.py's.
READ NEXT
    flip.py, then implicit.py.
"""

from ...device import cuda, device_inline, float32, int32, launch, load4, store4, uint32
from ...device.specialise import Constant
from ..matmul.vectorised import PAD, STEP, WARP_COLUMNS, WARP_ROWS

TILE_M = 128  # pixels (forward) or columns of col (weight gradient) in a block's tile
ROW = TILE_M + PAD  # shared-memory distance from one k to the next, in both tiles
STAGE = STEP * ROW  # one of a tile's two buffers
SHARED = 2 * STAGE
THREADS_WANTED = 65536  # in the grid: 512 for each of an H100's 132 multiprocessors
# steps: a shorter part would spend more on filling and emptying its pipeline than it wins
SHORTEST_PART = 8
BLOCK = 256  # threads of a block that adds parts, at most
VARIANTS = (128, True), (64, True), (64, False)  # (TILE_N, BY_FOUR)

# Of each kernel: output channels of a tile; whether fours of channels are fetched by one load
TILE_N, BY_FOUR = Constant(), Constant()
# 2 · TILE_N threads fetch TILE_N pixels, then the others
TWO_ROUNDS = Constant(lambda TILE_N: TILE_N < TILE_M)
WARPS_N = Constant(lambda TILE_N: TILE_N // WARP_COLUMNS)
# threads that share a pixel of dy; a whole warp shares one of x
LANES = Constant(lambda TILE_N: TILE_N // 4)


# Loads and stores ---------------------------------------------------------------------------------


@cuda.jit(device=True)
def fetch(x, at, inside, left, by_four):
    """x[at], …, x[at + 3]: zeros where not `inside`, and beyond the `left` that exist (by_four: all
    of them do)."""
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
    """Four neighbouring k of one pixel go to four rows of the tile, which is k-major: transposed
    while loading."""
    at = uint32(at)
    tile[at] = v[0]
    tile[at + ROW] = v[1]
    tile[at + 2 * ROW] = v[2]
    tile[at + 3 * ROW] = v[3]


@cuda.jit(device=True)
def within(h, w, H, W):
    h, w = int32(h), int32(w)
    return h >= 0 and h < H and w >= 0 and w < W


# A thread's 8 × 8 outputs -------------------------------------------------------------------------


@device_inline
def first_output(t):
    """(row, column) of a thread's first output in the tile. Its 8 × 8 outputs are in four rows from
    `row` on and four from row + 16, in four columns from `column` on and four from column + 32."""
    warp, lane = t >> 5, t & 31
    return (
        int32(warp // WARPS_N * WARP_ROWS + (lane >> 3) * 4),
        int32(warp % WARPS_N * WARP_COLUMNS + (lane & 7) * 4),
    )


@cuda.jit(device=True)
def write_pixel(y, at, exists, left, v, bias_0, bias_32, by_four):
    """A thread's eight channels of one pixel: four at `at` and four at `at + 32`."""
    if exists:
        write_four(
            y,
            at,
            left,
            v[0] + bias_0[0],
            v[1] + bias_0[1],
            v[2] + bias_0[2],
            v[3] + bias_0[3],
            by_four,
        )
        write_four(
            y,
            at + 32,
            left - 32,
            v[4] + bias_32[0],
            v[5] + bias_32[1],
            v[6] + bias_32[2],
            v[7] + bias_32[3],
            by_four,
        )


@device_inline
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


@cuda.jit(device=True)
def write_columns(partial, at, K, channels, left, s0, s1, s2, s3, by_four):
    """A thread's four columns (s0 … s3) of eight channels: 0 … 3 and 32 … 35, of which `channels`
    exist."""
    write_four(partial, at, left if channels > 0 else 0, s0[0], s1[0], s2[0], s3[0], by_four)
    write_four(partial, at + K, left if channels > 1 else 0, s0[1], s1[1], s2[1], s3[1], by_four)
    write_four(
        partial, at + 2 * K, left if channels > 2 else 0, s0[2], s1[2], s2[2], s3[2], by_four
    )
    write_four(
        partial, at + 3 * K, left if channels > 3 else 0, s0[3], s1[3], s2[3], s3[3], by_four
    )
    at += 32 * K
    write_four(partial, at, left if channels > 32 else 0, s0[4], s1[4], s2[4], s3[4], by_four)
    write_four(partial, at + K, left if channels > 33 else 0, s0[5], s1[5], s2[5], s3[5], by_four)
    write_four(
        partial, at + 2 * K, left if channels > 34 else 0, s0[6], s1[6], s2[6], s3[6], by_four
    )
    write_four(
        partial, at + 3 * K, left if channels > 35 else 0, s0[7], s1[7], s2[7], s3[7], by_four
    )


# Which tile, and how many parts -------------------------------------------------------------------


def tile_width(n):
    """128 where that leaves no more of the tiles empty than 64 does, and 64 elsewhere."""
    return 128 if 2 * -(-n // 128) == -(-n // 64) else 64


def cut(tiles, threads, steps):
    """(parts, steps a part): enough parts for `tiles` blocks of `threads` threads to fill a GPU."""
    parts = max(1, min(THREADS_WANTED // (tiles * threads), steps // SHORTEST_PART))
    part_steps = -(-steps // parts)
    return -(-steps // part_steps), part_steps


@cuda.jit
def add_parts_kernel(partial, out, size, parts, accumulate):
    """out = or += the sum of `parts` arrays of `size`: 32 elements a block; its rows of threads
    share the parts."""
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


def add_parts(partial, out, accumulate):
    """out = or += partial summed over its first axis, in order."""
    parts, size = partial.shape[0], out.size
    launch(
        add_parts_kernel,
        -(-size // 32),
        (32, min(parts, BLOCK // 32)),
        partial.reshape(-1),
        out.reshape(-1),
        size,
        parts,
        int(accumulate),
    )
