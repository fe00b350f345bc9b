"""The weight gradient of a float16 convolution with few channels on one side: pixels are the inner
dimension.

    sums[(tap, j), m] = Σ_p narrow[p + tap - pad, j] · wide[p, m]: wide is dy and narrow x, or wide
    is x and narrow dy, whose pixel is on the other side of x's, so the taps are counted down. Row
    27 of 32 is ones: where wide is dy its sums are dbias.
LAUNCH
    512 threads, one block a multiprocessor, for chunks of up to 1,024 pixels. What the chunk sees
    of the narrow side, with the image rows before and after it, is one run of memory: it is copied
    to shared memory first, where 27 numbers a pixel are gathered without waiting for memory.
    Meanwhile each warp's first 16 pixels of the wide side are on their way, and the next 16 while
    these are multiplied. In the end the warps leave their accumulators side by side in 64 KiB of
    shared memory, the second eight warps first, and all threads add them up.
DETERMINISM
    a fixed order in each warp; the warps are added in a fixed order, and then the blocks.
SOURCE
    PTX ISA, section 9.7.14.5 (mma), whose fragments are written down in emulator/fragments.py.
READ NEXT
    launcher.py
"""

import numpy as np

from ....device import cuda, device_inline, float32, int32, load4, store4, uint32
from ....device.common import divide
from ....device.requires import requires
from ....device.tensor_core import load_words4, mma_m16n8k16_into, pack_half2
from .windows import COLUMNS, GROUP, OUTSIDE, SIZE, SLAB, TAPS, THREE, seen

BLOCK = 512  # threads
WARPS = BLOCK // 32
RESULTS = COLUMNS * SLAB  # of a warp, and of a block
SLOTS = WARPS // 2
AT_ONCE = 8  # loads of a thread in flight
ONES = THREE * TAPS  # the row of the results that sums the wide side
ADD_ROWS = 32  # threads that share the parts of a sum
ADD_SHARED = 32 * ADD_ROWS


# The narrow side: what the taps see ---------------------------------------------------------------


@device_inline
def next_pixel(i, j, H, W):
    j = int32(j + 1)
    if j == W:
        i, j = int32(i + 1), int32(0)
    return int32(0) if i == H else i, j


@device_inline
def seen_by_four(pixel, pixels, H, W):
    """`seen` of four neighbouring pixels."""
    line, w = divide(pixel, W)
    i_0 = divide(line, H)[1]
    i_1, w_1 = next_pixel(i_0, w, H, W)
    i_2, w_2 = next_pixel(i_1, w_1, H, W)
    i_3, w_3 = next_pixel(i_2, w_2, H, W)
    return (
        seen(i_0, w, H, W, pixel < pixels),
        seen(i_1, w_1, H, W, pixel + 1 < pixels),
        seen(i_2, w_2, H, W, pixel + 2 < pixels),
        seen(i_3, w_3, H, W, pixel + 3 < pixels),
    )


@device_inline
def find_places(places, row, first_j, W, J):
    """The taps of a lane's four rows, and 32 times the offsets in the tile from the number of the
    first pixel's first tap: registers are scarce."""
    for k in range(4):
        tap, j = divide(int32(8 * k + row), int32(THREE))
        exists = tap < TAPS and first_j + j < J
        r, s = divide(tap, int32(SIZE))
        places[k] = int32(((r * W + s) * J + first_j + j) << 5 | tap) if exists else int32(OUTSIDE)


@device_inline
def fill_tile(tile, values, narrow, start, count, size, t):
    """Numbers start … of the narrow side, which has `size`, into shared memory, zeros where there
    are none.

    values: AT_ONCE numbers, in registers
    """
    for begin in range(t, count, int32(AT_ONCE * BLOCK)):
        for k in range(AT_ONCE):
            at = int32(begin + k * BLOCK)
            element = int32(start + at)
            values[k] = float32(0)
            if at < count and element >= 0 and element < size:
                values[k] = float32(narrow[element])
        for k in range(AT_ONCE):
            at = int32(begin + k * BLOCK)
            if at < count:
                tile[at] = values[k]


@device_inline
def seen_number(tile, at, mask, tap):
    """The number that a tap sees, or 0 outside of the image."""
    return tile[uint32(at)] if (mask >> tap) & 1 else float32(0)


@device_inline
def gather(a, tile, places, mine, masks, row, J):
    """Two fragments of what the taps see of 16 pixels, of which a lane has four; mine: the first of
    these in the tile.

    Of row + 8 · k: pixels 0 and 1, pixels 2 and 3.
    """
    for k in range(4):
        at, tap = int32(mine * J + (places[k] >> 5)), places[k] & 31
        v_0, v_1 = seen_number(tile, at, masks[0], tap), seen_number(tile, at + J, masks[1], tap)
        v_2, v_3 = (
            seen_number(tile, at + 2 * J, masks[2], tap),
            seen_number(tile, at + 3 * J, masks[3], tap),
        )
        if k == 3 and row == 3:  # row 27 of 32
            v_0 = v_1 = v_2 = v_3 = float32(1)
        a[k // 2 * 4 + k % 2] = pack_half2(v_0, v_1)
        a[k // 2 * 4 + k % 2 + 2] = pack_half2(v_2, v_3)


# The wide side, and the products ------------------------------------------------------------------


@device_inline
def fetch(wide, p, pixel, pixels, m, M, exists):
    """Eight channels, from channel m, of four pixels."""
    left = int32(pixels - pixel if exists and m < M else 0)
    at = int32(pixel * M + m)
    for k in range(4):
        a = b = c = d = uint32(0)
        if k < left:
            a, b, c, d = load_words4(wide, uint32(at + k * M))
        p[4 * k], p[4 * k + 1], p[4 * k + 2], p[4 * k + 3] = a, b, c, d


@device_inline
def low_halves(a, b):
    return (a & uint32(0xFFFF)) | (b << uint32(16))


@device_inline
def high_halves(a, b):
    return (a >> uint32(16)) | (b & uint32(0xFFFF0000))


@device_inline
def multiply_group(accumulators, a, p):
    """accumulators += two fragments of taps · eight of wide channels, of 16 pixels; p: what `fetch`
    has brought."""
    low, high = (a[0], a[1], a[2], a[3]), (a[4], a[5], a[6], a[7])
    for k in range(4):
        b = (low_halves(p[k], p[4 + k]), low_halves(p[8 + k], p[12 + k]))
        mma_m16n8k16_into(accumulators, 8 * k, low, b)
        mma_m16n8k16_into(accumulators, 32 + 8 * k, high, b)
        b = (high_halves(p[k], p[4 + k]), high_halves(p[8 + k], p[12 + k]))
        mma_m16n8k16_into(accumulators, 8 * k + 4, low, b)
        mma_m16n8k16_into(accumulators, 32 + 8 * k + 4, high, b)


# The kernel ---------------------------------------------------------------------------------------


@device_inline
def write_sum_of_warps(partial, tile, accumulators, warp, lane, t):
    """The warps' accumulators, added up in shared memory: those of the second half of the warps go
    to the first's."""
    cuda.syncthreads()
    slot = int32((warp & (SLOTS - 1)) * RESULTS + lane * 4)
    if warp >= SLOTS:
        for k in range(16):
            store4(
                tile,
                slot + 128 * k,
                accumulators[4 * k],
                accumulators[4 * k + 1],
                accumulators[4 * k + 2],
                accumulators[4 * k + 3],
            )
    cuda.syncthreads()
    if warp < SLOTS:
        for k in range(16):
            s0, s1, s2, s3 = load4(tile, slot + 128 * k)
            store4(
                tile,
                slot + 128 * k,
                accumulators[4 * k] + s0,
                accumulators[4 * k + 1] + s1,
                accumulators[4 * k + 2] + s2,
                accumulators[4 * k + 3] + s3,
            )
    cuda.syncthreads()
    t0 = t1 = t2 = t3 = float32(0)
    for k in range(SLOTS):  # in order
        s0, s1, s2, s3 = load4(tile, k * RESULTS + 4 * t)
        t0, t1, t2, t3 = t0 + s0, t1 + s1, t2 + s2, t3 + s3
    part = (
        (cuda.blockIdx.z * cuda.gridDim.y + cuda.blockIdx.y) * cuda.gridDim.x + cuda.blockIdx.x
    ) * RESULTS
    store4(partial, part + 4 * t, t0, t1, t2, t3)


@requires("7.5")
@cuda.jit(launch_bounds=BLOCK)
def conv2d_narrow_weight_gradient_kernel_half(wide, narrow, partial, H, W, M, J, pixels, turns):
    """partial[part, group, slab] = sums[(tap, j), m] of the part's pixels, as its threads hold
    them; row 27 sums wide.

    turns: groups of 16 pixels of each warp in a chunk. A lane's pixels are four neighbours of a
    group; product k has channel 8 · column + k of the slab.
    """
    tile = cuda.shared.array(0, float32)
    t = int32(cuda.threadIdx.x)
    warp, lane = t >> 5, t & 31
    row, q = lane >> 2, lane & 3
    m, first_j = int32(cuda.blockIdx.x * SLAB + row * 8), int32(cuda.blockIdx.y * THREE)
    places = cuda.local.array(4, np.int32)
    find_places(places, row, first_j, W, J)
    accumulators = cuda.local.array(64, np.float32)
    for k in range(64):
        accumulators[k] = float32(0)
    a = cuda.local.array(8, np.uint32)
    p = cuda.local.array(16, np.uint32)
    ahead = cuda.local.array(16, np.uint32)
    values = cuda.local.array(AT_ONCE, np.float32)
    chunk_pixels = int32(turns * (WARPS * GROUP))
    chunks = divide(pixels + chunk_pixels - 1, chunk_pixels)[0]
    count, size = int32((chunk_pixels + 2 * W + 2) * J), int32(pixels * J)
    for chunk in range(int32(cuda.blockIdx.z), chunks, int32(cuda.gridDim.z)):
        first = int32(chunk * chunk_pixels)
        mine = int32(warp * turns * GROUP + q * 4)  # of the chunk's pixels
        fetch(wide, ahead, int32(first + mine), pixels, m, M, True)
        cuda.syncthreads()  # the tile has been read
        fill_tile(tile, values, narrow, int32((first - W - 1) * J), count, size, t)
        cuda.syncthreads()
        for left in range(turns, 0, -1):
            pixel = int32(first + mine)
            gather(a, tile, places, mine, seen_by_four(pixel, pixels, H, W), row, J)
            for k in range(16):
                p[k] = ahead[k]
            fetch(wide, ahead, int32(pixel + GROUP), pixels, m, M, left > 1)
            multiply_group(accumulators, a, p)
            mine = int32(mine + GROUP)
    write_sum_of_warps(partial, tile, accumulators, warp, lane, t)


# The second kernel: adds the blocks' sums ---------------------------------------------------------


@device_inline
def one_or_zero(array, at, exists):
    return array[at] if exists else float32(0)


@cuda.jit
def add_narrow_weight_gradient_kernel(
    partial, dweight, dbias, parts, slabs, M, J, flipped, has_bias
):
    """dweight += the sum of the parts, dbias += that of their row 27: 32 sums a block, whose rows
    share the parts."""
    tile = cuda.shared.array(ADD_SHARED, float32)
    lane, share, shares = int32(cuda.threadIdx.x), int32(cuda.threadIdx.y), int32(cuda.blockDim.y)
    place = int32(cuda.blockIdx.x * 32 + lane)
    size = int32(cuda.gridDim.x * 32)
    # which sum that is: vector `product` of four sums of thread `holder` of a warp
    rest, element = divide(place, int32(RESULTS))
    group, slab = divide(rest, slabs)
    product, holder, which = element >> 7, (element >> 2) & 31, element & 3
    row = int32((product >> 3) * 16 + (which >> 1) * 8 + (holder >> 2))
    tap, j = divide(row, int32(THREE))
    m = int32(slab * SLAB + (holder & 3) * 16 + (which & 1) * 8 + (product & 7))
    j = int32(group * THREE + j)
    at = int32((j * TAPS + TAPS - 1 - tap) * M + m if flipped else (m * TAPS + tap) * J + j)
    of_weight = share == 0 and m < M and tap < TAPS and j < J
    of_bias = share == 0 and m < M and has_bias != 0 and row == ONES and group == 0
    before = one_or_zero(dweight, at, of_weight)  # in flight as well
    total = float32(0)
    for part in range(share, parts, int32(4 * shares)):  # four loads in flight at a time
        a = partial[part * size + place]
        b = one_or_zero(partial, (part + shares) * size + place, part + shares < parts)
        c = one_or_zero(partial, (part + 2 * shares) * size + place, part + 2 * shares < parts)
        d = one_or_zero(partial, (part + 3 * shares) * size + place, part + 3 * shares < parts)
        total += a + b + c + d
    tile[share * 32 + lane] = total
    cuda.syncthreads()
    if share == 0:
        for other in range(int32(1), shares):
            total += tile[other * 32 + lane]
        if of_weight:
            dweight[at] = before + total
        if of_bias:
            dbias[m] += total
