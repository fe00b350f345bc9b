"""Float16 convolution with few channels on one side: the first layer of a UNet (3 → 64) and the last (64 → 3).

MATHEMATICS
    as in direct.py. Memory is the roof: the wide side is read or written once, 16 bytes an instruction. The arithmetic
    is small, but still too much for ordinary multiply-adds, so it goes to the tensor cores, whose tiles taps fill:
    from few channels  y[p, n] = Σ_k col[p, k] · weight[n, k] with k = tap · C + c: 27 of 32 for three channels.
    to few channels    Σ_c comes first: z[q, (tap, n)] = Σ_c x[q, c] · weight[n, tap, c], 27 of 32 columns for three
                       channels; then y[p, n] = bias[n] + Σ_tap z[p + tap - pad, (tap, n)].
    weight gradient    sums[(tap, j), m] = Σ_p narrow[p + tap - pad, j] · wide[p, m]: wide is dy and narrow x, or wide
                       is x and narrow dy, whose pixel lies on the other side of x's, so the taps are counted down.
                       Where wide is dy, a row of ones beside the 27 gives dbias.
SHAPES
    x, weight, y, dy, dx float16; bias, dweight, dbias float32. 3 × 3 kernel, stride 1; one side up to NARROW channels,
    the other a multiple of 8. Elsewhere version 1 runs.
VERSIONS
    v3 narrow: of launcher.py for float16, by mma.sync: sm_80 and later.
    An inner index may have any place in a fragment, as long as both operands agree, and output columns may come in any
    order. Both are chosen so that a lane loads or stores eight neighbouring channels of its pixels, 16 bytes, and
    nothing of the wide side passes through shared memory. The narrow side is gathered number by number: it is small,
    and stays in the L1 cache or, for the gradient, in shared memory.
MEASURED
    NVIDIA H200, 2026-11-22, PyTorch 2.11.0: numdiff bench kernels --of files; * is the launcher's choice
    conv2d_forward, 32×64×64×3, 64×3×3×3, float16
        v3*     14.7 µs    1,191 GB/s   29 % of memory   148 % of cuDNN
    conv2d_forward, 32×64×64×64, 3×3×3×64, float16
        v3*     14.4 µs    1,221 GB/s   30 % of memory   231 % of cuDNN
    conv2d_input_gradient, 32×64×64×3, 3×3×3×64, float16
        v3*     14.6 µs    1,205 GB/s   29 % of memory   200 % of cuDNN
    conv2d_weight_gradient, 32×64×64×3, 32×64×64×64, float16
        v3*     15.5 µs    1,134 GB/s   27 % of memory   297 % of cuDNN
LAUNCH
    from few: 128 threads, each warp walks over groups of 16 pixels, for a slab of 64 channels; the weight in registers.
    to few: 256 threads for TILE_H × TILE_W pixels and three channels; z, with its halo, in 37 KiB of shared memory.
    weight gradient: 512 threads, one block a multiprocessor, for chunks of up to 1,024 pixels. What the chunk sees of
    the narrow side, with the image rows before and after it, is one run of memory: it is copied to shared memory first,
    where 27 numbers a pixel are gathered without waiting for memory. Meanwhile each warp's first 16 pixels of the wide
    side are on their way, and the next 16 while these are multiplied. In the end the warps leave their accumulators
    side by side in 64 KiB of shared memory, the second eight warps first, and all threads add them up.
DETERMINISM
    a fixed order in each warp; the gradient's warps are added in a fixed order, and then its blocks.
COST
    bytes: both sides once, 2 bytes an element (to few: the wide side 1.3 times, from L2). Roof: memory.
SOURCE
    PTX ISA, section 9.7.14.5 (mma), whose fragments are written down in emulator/fragments.py.
READ NEXT
    matmul/hopper.py, where tensor cores read their operands straight from shared memory.
"""
import numpy as np

from ...device import cuda, empty, float32, int32, launch, load4, store4, uint32
from ...device.half import in_bfloat16
from ...device.requires import requires, supports
from ...device.specialise import Constant, specialise
from ...device.tensor_core import load_word, load_words4, mma_m16n8k16_into, pack_half2, store_words4
from ...dtypes import is_half
from ..common import divide, no_numbers
from .implicit import within

NARROW = 7  # channels of the narrow side, at most: other versions take eight
SIZE, TAPS = 3, 9
SLAB = 64  # wide channels of a block: eight for each of eight lanes, or 16 for each of four
GROUP = 16  # pixels of a warp's step
OUTSIDE = 31  # stands for "no tap": no mask has this bit
BLOCK = 128  # threads, from few channels
BLOCKS = 4  # such blocks on a multiprocessor
THREE = 3  # narrow channels of a block, to few channels and in the gradient: 27 of 32 rows or columns are used
COLUMNS = 32
TILE_H, TILE_W = 8, 32  # output pixels of a block to few channels: one for each thread
HALO_W = TILE_W + 2
HALO = (TILE_H + 2) * HALO_W
Z_ROW = THREE * TAPS  # odd, so that neighbouring pixels' numbers lie in different banks
Z_SIZE = HALO * Z_ROW
TO_BLOCK = TILE_H * TILE_W  # threads
GRADIENT_BLOCK = 512
GRADIENT_WARPS = GRADIENT_BLOCK // 32
RESULTS = COLUMNS * SLAB  # of a warp, and of a block, of the gradient
SLOTS = GRADIENT_WARPS // 2
MAX_TURNS = 4  # groups of a warp in a chunk
AT_ONCE = 8  # loads of a thread on their way
MAX_SHARED = 96 << 10  # bytes: what every GPU with these instructions gives a block
ADD_ROWS = 32  # threads that share the parts of a sum
ADD_SHARED = 32 * ADD_ROWS


@cuda.jit(device=True, forceinline=True)
def seen(i, j, H, W, exists):
    """Bit 3 · r + s: whether tap (r, s) of the window around pixel (i, j) lies in the image."""
    rows = 0b000111000 | (0b000000111 if i > 0 else 0) | (0b111000000 if i < H - 1 else 0)
    columns = 0b010010010 | (0b001001001 if j > 0 else 0) | (0b100100100 if j < W - 1 else 0)
    return int32(rows & columns if exists else 0)


@cuda.jit(device=True, forceinline=True)
def tap_offset(tap, W, C):
    """Elements from a pixel's first channel to those of the pixel that a tap sees."""
    r, s = divide(tap, int32(SIZE))
    return int32(((r - 1) * W + s - 1) * C)


@cuda.jit(device=True, forceinline=True)
def number(array, at, mask, tap):
    """The number that a tap sees, or 0 outside of the image."""
    return float32(array[at]) if (mask >> tap) & 1 else float32(0)


# From few channels ----------------------------------------------------------------------------------------------------

STEPS = Constant()  # of 16 products an output, at most
ROW = Constant(lambda STEPS: 8 * STEPS + 4)  # words of a weight's row in shared memory: eight rows' words lie in
WORDS = Constant(lambda ROW: SLAB * ROW)  # different banks
FRAGMENTS, INNER = Constant(lambda STEPS: 16 * STEPS), Constant(lambda STEPS: 4 * STEPS)


@cuda.jit(device=True, forceinline=True)
def store_weights(words, weight, first_n, C, N, gradient, t):
    """A slab's weights as float16 pairs into shared memory.

    Row 8 · j + g has the channel that column g of product j stands for: a lane's two columns in each of four products
    are eight neighbouring channels.
    """
    for k in range(t, SLAB * 8 * STEPS, int32(BLOCK)):
        place, pair = divide(k, int32(8 * STEPS))
        j, g = place >> 3, place & 7
        n = int32(first_n + (j >> 2) * 32 + (g >> 1) * 8 + (j & 3) * 2 + (g & 1))
        low = high = float32(0)
        tap, c = divide(int32(2 * pair), C)
        tap_2, c_2 = divide(int32(2 * pair + 1), C)
        if n < N:
            if tap < TAPS:
                low = float32(weight[(c * TAPS + TAPS - 1 - tap) * N + n if gradient else (n * TAPS + tap) * C + c])
            if tap_2 < TAPS:
                high = float32(weight[(c_2 * TAPS + TAPS - 1 - tap_2) * N + n if gradient else
                                      (n * TAPS + tap_2) * C + c_2])
        words[place * ROW + pair] = pack_half2(low, high)


@cuda.jit(device=True, forceinline=True)
def load_weights(weights, words, row, q):
    """A lane's fragments of a slab's weights into registers."""
    for j in range(8):
        for step in range(STEPS):
            at = int32((8 * j + row) * ROW + 8 * step + q)
            weights[2 * (j * STEPS + step)] = words[uint32(at)]
            weights[2 * (j * STEPS + step) + 1] = words[uint32(at + 4)]


@cuda.jit(device=True, forceinline=True)
def find_taps(taps, offsets, q, W, C):
    """The inner indices of a lane: k = 16 · step + 2 · q + 0, 1, 8, 9."""
    for k in range(4 * STEPS):
        tap, c = divide(int32(k // 4 * 16 + 2 * q + k % 2 + k % 4 // 2 * 8), C)
        taps[k] = tap if tap < TAPS else OUTSIDE
        offsets[k] = tap_offset(tap, W, C) + c


@cuda.jit(device=True, forceinline=True)
def pair_of(x, at, mask, taps, offsets, k):
    """What a pixel's inner indices k and k + 1 see, as a word."""
    return pack_half2(number(x, at + offsets[k], mask, taps[k]), number(x, at + offsets[k + 1], mask, taps[k + 1]))


@cuda.jit(device=True, forceinline=True)
def multiply_window(accumulators, weights, x, taps, offsets, at, at_2, mask, mask_2):
    """accumulators += (what two pixels' windows show) · weights; at, at_2: of the pixels in x."""
    for step in range(STEPS):
        k = 4 * step
        a = (pair_of(x, at, mask, taps, offsets, k), pair_of(x, at_2, mask_2, taps, offsets, k),
             pair_of(x, at, mask, taps, offsets, k + 2), pair_of(x, at_2, mask_2, taps, offsets, k + 2))
        for j in range(8):
            b = 2 * (j * STEPS + step)
            mma_m16n8k16_into(accumulators, 4 * j, a, (weights[b], weights[b + 1]))


@cuda.jit(device=True, forceinline=True)
def write_eight(y, at, accumulators, k):
    """Eight neighbouring channels of a pixel, two of each of four products."""
    store_words4(y, at, pack_half2(accumulators[k], accumulators[k + 1]),
                 pack_half2(accumulators[k + 4], accumulators[k + 5]),
                 pack_half2(accumulators[k + 8], accumulators[k + 9]),
                 pack_half2(accumulators[k + 12], accumulators[k + 13]))


@requires("8.0")
def conv2d_from_narrow_kernel(x, weight, bias, y, H, W, C, N, pixels, has_bias, gradient):
    """gradient: the weight is (C, taps, N), and its taps are counted down."""
    words = cuda.shared.array(WORDS, np.uint32)
    biases = cuda.shared.array(SLAB, float32)
    t = int32(cuda.threadIdx.x)
    warp, lane = t >> 5, t & 31
    row, q = lane >> 2, lane & 3  # of a fragment
    first_n = int32(cuda.blockIdx.y * SLAB)
    store_weights(words, weight, first_n, C, N, gradient, t)
    if t < SLAB:
        biases[t] = bias[first_n + t] if has_bias and first_n + t < N else float32(0)
    cuda.syncthreads()

    weights = cuda.local.array(FRAGMENTS, np.uint32)
    taps = cuda.local.array(INNER, np.int32)
    offsets = cuda.local.array(INNER, np.int32)
    load_weights(weights, words, row, q)
    find_taps(taps, offsets, q, W, C)
    accumulators = cuda.local.array(32, np.float32)
    groups = int32((pixels + GROUP - 1) // GROUP)
    for group in range(int32(cuda.blockIdx.x * (BLOCK // 32) + warp), groups, int32(cuda.gridDim.x * (BLOCK // 32))):
        pixel, pixel_2 = int32(group * GROUP + row), int32(group * GROUP + row + 8)
        line, w = divide(pixel, W)
        mask = seen(divide(line, H)[1], w, H, W, pixel < pixels)
        line, w = divide(pixel_2, W)
        mask_2 = seen(divide(line, H)[1], w, H, W, pixel_2 < pixels)
        for j in range(8):
            for k in range(2):
                accumulators[4 * j + k] = accumulators[4 * j + 2 + k] = biases[
                    uint32(j // 4 * 32 + 8 * q + j % 4 * 2 + k)]
        multiply_window(accumulators, weights, x, taps, offsets, int32(pixel * C), int32(pixel_2 * C), mask, mask_2)
        for half in range(2):
            n = int32(first_n + half * 32 + q * 8)
            if n < N:
                if pixel < pixels:
                    write_eight(y, pixel * N + n, accumulators, 16 * half)
                if pixel_2 < pixels:
                    write_eight(y, pixel_2 * N + n, accumulators, 16 * half + 2)


# The kernels for up to 16 · steps products an output
conv2d_from_narrow_kernels = {
    steps: specialise(conv2d_from_narrow_kernel, name=f"conv2d_from_narrow_kernel_{16 * steps}",
                      launch_bounds=(BLOCK, 8 // steps), STEPS=steps) for steps in (2, 4)}


# To few channels ------------------------------------------------------------------------------------------------------

@cuda.jit(device=True, forceinline=True)
def sixteen(x, pixel, inside, c, C):
    """Sixteen neighbouring channels of a pixel as eight words, zeros outside."""
    zero = uint32(0)
    a = b = (zero, zero, zero, zero)
    if inside and c < C:
        a = load_words4(x, pixel * C + c)
    if inside and c + 8 < C:
        b = load_words4(x, pixel * C + c + 8)
    return a[0], a[1], a[2], a[3], b[0], b[1], b[2], b[3]


@requires("8.0")
@cuda.jit(launch_bounds=TO_BLOCK)
def conv2d_to_narrow_kernel(x, weight, bias, y, H, W, C, N, has_bias):
    z = cuda.shared.array(Z_SIZE, float32)  # [pixel with halo][tap][channel]
    words = cuda.shared.array(1024, np.uint32)  # the weight, in the order in which lanes take it
    t = int32(cuda.threadIdx.x)
    warp, lane = t >> 5, t & 31
    row, q = lane >> 2, lane & 3
    rest, tile_w = divide(cuda.blockIdx.x, int32((W + TILE_W - 1) // TILE_W))
    image, tile_h = divide(rest, int32((H + TILE_H - 1) // TILE_H))
    first_h, first_w, first_n = int32(tile_h * TILE_H), int32(tile_w * TILE_W), int32(cuda.blockIdx.y * THREE)
    accumulators = cuda.local.array(16, np.float32)
    weights = cuda.local.array(32, np.uint32)
    for first_c in range(int32(0), C, int32(SLAB)):
        cuda.syncthreads()
        # word `which` (0 … 7) of quad lane q has its channels 2 · which and 2 · which + 1 of sixteen
        for k in range(t, int32(1024), int32(TO_BLOCK)):
            column, which, word = (k >> 2) & 31, k >> 7, uint32(0)
            tap, channel = divide(column, int32(THREE))
            n, c = int32(first_n + channel), int32(first_c + (k & 3) * 16 + which * 2)
            if tap < TAPS and n < N and c < C:
                word = load_word(weight, (n * TAPS + tap) * C + c)
            words[k] = word
        cuda.syncthreads()
        for which in range(8):
            for j in range(4):
                weights[which * 4 + j] = words[which * 128 + (8 * j + row) * 4 + q]
        for start in range(int32(warp * GROUP), int32(HALO), int32(TO_BLOCK // 32 * GROUP)):
            m, m_2 = int32(start + row), int32(start + row + 8)
            h, w = divide(m, int32(HALO_W))
            h_2, w_2 = divide(m_2, int32(HALO_W))
            h, w = int32(first_h + h - 1), int32(first_w + w - 1)
            h_2, w_2 = int32(first_h + h_2 - 1), int32(first_w + w_2 - 1)
            inside, inside_2 = m < HALO and within(h, w, H, W), m_2 < HALO and within(h_2, w_2, H, W)
            a = sixteen(x, (image * H + h) * W + w, inside, int32(first_c + q * 16), C)
            b = sixteen(x, (image * H + h_2) * W + w_2, inside_2, int32(first_c + q * 16), C)
            for k in range(16):
                accumulators[k] = float32(0)
            for j in range(4):
                mma_m16n8k16_into(accumulators, 4 * j, (a[0], b[0], a[1], b[1]), (weights[j], weights[4 + j]))
                mma_m16n8k16_into(accumulators, 4 * j, (a[2], b[2], a[3], b[3]), (weights[8 + j], weights[12 + j]))
                mma_m16n8k16_into(accumulators, 4 * j, (a[4], b[4], a[5], b[5]), (weights[16 + j], weights[20 + j]))
                mma_m16n8k16_into(accumulators, 4 * j, (a[6], b[6], a[7], b[7]), (weights[24 + j], weights[28 + j]))
            for k in range(16):
                column = int32(k // 4 * 8 + 2 * q + k % 2)
                mine = int32(m if k % 4 < 2 else m_2)
                if column < Z_ROW and mine < HALO:
                    at = uint32(mine * Z_ROW + column)
                    z[at] = accumulators[k] if first_c == 0 else z[at] + accumulators[k]
    cuda.syncthreads()
    h, w = t // TILE_W, t % TILE_W
    total_0 = total_1 = total_2 = float32(0)
    for r in range(SIZE):
        for s in range(SIZE):
            at = int32(((h + r) * HALO_W + w + s) * Z_ROW + (r * SIZE + s) * THREE)
            total_0 += z[uint32(at)]
            total_1 += z[uint32(at + 1)]
            total_2 += z[uint32(at + 2)]
    i, j = int32(first_h + h), int32(first_w + w)
    if i < H and j < W:
        at = ((image * H + i) * W + j) * N
        y[at + first_n] = total_0 + bias[first_n] if has_bias else total_0
        if first_n + 1 < N:
            y[at + first_n + 1] = total_1 + bias[first_n + 1] if has_bias else total_1
        if first_n + 2 < N:
            y[at + first_n + 2] = total_2 + bias[first_n + 2] if has_bias else total_2


# Weight gradient ------------------------------------------------------------------------------------------------------

@cuda.jit(device=True, forceinline=True)
def low_halves(a, b):
    return (a & uint32(0xFFFF)) | (b << uint32(16))


@cuda.jit(device=True, forceinline=True)
def high_halves(a, b):
    return (a >> uint32(16)) | (b & uint32(0xFFFF0000))


@cuda.jit(device=True, forceinline=True)
def next_pixel(i, j, H, W):
    j = int32(j + 1)
    if j == W:
        i, j = int32(i + 1), int32(0)
    return int32(0) if i == H else i, j


@cuda.jit(device=True, forceinline=True)
def fetch(wide, p, pixel, pixels, m, M, exists):
    """Eight channels, from channel m, of four pixels."""
    left = int32(pixels - pixel if exists and m < M else 0)
    at = int32(pixel * M + m)
    for k in range(4):
        a = b = c = d = uint32(0)
        if k < left:
            a, b, c, d = load_words4(wide, uint32(at + k * M))
        p[4 * k], p[4 * k + 1], p[4 * k + 2], p[4 * k + 3] = a, b, c, d


@cuda.jit(device=True, forceinline=True)
def seen_number(tile, at, mask, tap):
    """The number that a tap sees, or 0 outside of the image."""
    return tile[uint32(at)] if (mask >> tap) & 1 else float32(0)


@cuda.jit(device=True, forceinline=True)
def find_places(places, row, first_j, W, J):
    """The taps of a lane's four rows, and 32 times the offsets in the tile from the number of the first pixel's first
    tap: registers are scarce."""
    for k in range(4):
        tap, j = divide(int32(8 * k + row), int32(THREE))
        exists = tap < TAPS and first_j + j < J
        r, s = divide(tap, int32(SIZE))
        places[k] = int32(((r * W + s) * J + first_j + j) << 5 | tap) if exists else int32(OUTSIDE)


@cuda.jit(device=True, forceinline=True)
def fill_tile(tile, values, narrow, start, count, size, t):
    """Numbers start … of the narrow side, which has `size`, into shared memory, zeros where there are none.

    values: AT_ONCE numbers, in registers
    """
    for begin in range(t, count, int32(AT_ONCE * GRADIENT_BLOCK)):
        for k in range(AT_ONCE):
            at = int32(begin + k * GRADIENT_BLOCK)
            element = int32(start + at)
            values[k] = float32(0)
            if at < count and element >= 0 and element < size:
                values[k] = float32(narrow[element])
        for k in range(AT_ONCE):
            at = int32(begin + k * GRADIENT_BLOCK)
            if at < count:
                tile[at] = values[k]


@cuda.jit(device=True, forceinline=True)
def seen_by_four(pixel, pixels, H, W):
    """`seen` of four neighbouring pixels."""
    line, w = divide(pixel, W)
    i_0 = divide(line, H)[1]
    i_1, w_1 = next_pixel(i_0, w, H, W)
    i_2, w_2 = next_pixel(i_1, w_1, H, W)
    i_3, w_3 = next_pixel(i_2, w_2, H, W)
    return (seen(i_0, w, H, W, pixel < pixels), seen(i_1, w_1, H, W, pixel + 1 < pixels),
            seen(i_2, w_2, H, W, pixel + 2 < pixels), seen(i_3, w_3, H, W, pixel + 3 < pixels))


@cuda.jit(device=True, forceinline=True)
def gather(a, tile, places, mine, masks, row, J):
    """Two fragments of what the taps see of 16 pixels, of which a lane has four; mine: the first of these in the tile.

    Of row + 8 · k: pixels 0 and 1, pixels 2 and 3.
    """
    for k in range(4):
        at, tap = int32(mine * J + (places[k] >> 5)), places[k] & 31
        v_0, v_1 = seen_number(tile, at, masks[0], tap), seen_number(tile, at + J, masks[1], tap)
        v_2, v_3 = seen_number(tile, at + 2 * J, masks[2], tap), seen_number(tile, at + 3 * J, masks[3], tap)
        if k == 3 and row == 3:  # row 27 of 32
            v_0 = v_1 = v_2 = v_3 = float32(1)
        a[k // 2 * 4 + k % 2] = pack_half2(v_0, v_1)
        a[k // 2 * 4 + k % 2 + 2] = pack_half2(v_2, v_3)


@cuda.jit(device=True, forceinline=True)
def multiply_group(accumulators, a, p):
    """accumulators += two fragments of taps · eight of wide channels, of 16 pixels; p: what `fetch` has brought."""
    low, high = (a[0], a[1], a[2], a[3]), (a[4], a[5], a[6], a[7])
    for k in range(4):
        b = (low_halves(p[k], p[4 + k]), low_halves(p[8 + k], p[12 + k]))
        mma_m16n8k16_into(accumulators, 8 * k, low, b)
        mma_m16n8k16_into(accumulators, 32 + 8 * k, high, b)
        b = (high_halves(p[k], p[4 + k]), high_halves(p[8 + k], p[12 + k]))
        mma_m16n8k16_into(accumulators, 8 * k + 4, low, b)
        mma_m16n8k16_into(accumulators, 32 + 8 * k + 4, high, b)


@cuda.jit(device=True, forceinline=True)
def write_sum_of_warps(partial, tile, accumulators, warp, lane, t):
    """The warps' accumulators, added up in shared memory: those of the second half of the warps go to the first's."""
    cuda.syncthreads()
    slot = int32((warp & (SLOTS - 1)) * RESULTS + lane * 4)
    if warp >= SLOTS:
        for k in range(16):
            store4(tile, slot + 128 * k, accumulators[4 * k], accumulators[4 * k + 1], accumulators[4 * k + 2],
                   accumulators[4 * k + 3])
    cuda.syncthreads()
    if warp < SLOTS:
        for k in range(16):
            s0, s1, s2, s3 = load4(tile, slot + 128 * k)
            store4(tile, slot + 128 * k, accumulators[4 * k] + s0, accumulators[4 * k + 1] + s1,
                   accumulators[4 * k + 2] + s2, accumulators[4 * k + 3] + s3)
    cuda.syncthreads()
    t0 = t1 = t2 = t3 = float32(0)
    for k in range(SLOTS):  # in order
        s0, s1, s2, s3 = load4(tile, k * RESULTS + 4 * t)
        t0, t1, t2, t3 = t0 + s0, t1 + s1, t2 + s2, t3 + s3
    part = ((cuda.blockIdx.z * cuda.gridDim.y + cuda.blockIdx.y) * cuda.gridDim.x + cuda.blockIdx.x) * RESULTS
    store4(partial, part + 4 * t, t0, t1, t2, t3)


@requires("8.0")
@cuda.jit(launch_bounds=GRADIENT_BLOCK)
def conv2d_narrow_weight_gradient_kernel_half(wide, narrow, partial, H, W, M, J, pixels, turns):
    """partial[part, group, slab] = sums[(tap, j), m] of the part's pixels, as its threads hold them; row 27 sums wide.

    turns: groups of 16 pixels of each warp in a chunk. A lane's pixels are four neighbours of a group; product k has
    channel 8 · column + k of the slab.
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
    chunk_pixels = int32(turns * (GRADIENT_WARPS * GROUP))
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


@cuda.jit(device=True, forceinline=True)
def one_or_zero(array, at, exists):
    return array[at] if exists else float32(0)


@cuda.jit
def add_narrow_weight_gradient_kernel(partial, dweight, dbias, parts, slabs, M, J, flipped, has_bias):
    """dweight += the sum of the parts, dbias += that of their row 27: 32 sums a block, whose rows share the parts."""
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
    of_bias = share == 0 and m < M and has_bias != 0 and row == Z_ROW and group == 0
    before = one_or_zero(dweight, at, of_weight)  # on its way as well
    total = float32(0)
    for part in range(share, parts, int32(4 * shares)):  # four loads on their way at a time
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


# Launchers ------------------------------------------------------------------------------------------------------------

def _small(size, stride, wide):
    return size == SIZE and stride == 1 and wide % 8 == 0


def narrow_supports(x, weight, stride, plain):
    """Whether these kernels take the forward pass: to few channels, or from few; no addends but the bias (`plain`)."""
    n, size, _, c = weight.shape
    return (plain and (n <= NARROW and _small(size, stride, c) or c <= NARROW and _small(size, stride, n))
            and is_half(x.dtype) and supports(x, conv2d_to_narrow_kernel))


def narrow_gradient_supports(x, weight, stride):
    """Whether they take the weight gradient: also the tile must fit."""
    few = min(weight.shape[0], weight.shape[3])
    return bool(narrow_supports(x, weight, stride, True)) and gradient_tile(1, x.shape[2], few) <= MAX_SHARED


def narrow_input_gradient_supports(dy, weight, stride):
    """Whether they take the input gradient: of a layer to few channels."""
    return bool(narrow_supports(dy, weight, stride, True)) and weight.shape[0] <= NARROW


def _from_narrow(x, weight, bias, y, gradient):
    b, h, w, c = x.shape
    n, pixels = y.shape[3], b * h * w
    backend = x.backend
    blocks = min(-(-pixels // (GROUP * BLOCK // 32)), BLOCKS * backend.multiprocessors)
    kernel = in_bfloat16(conv2d_from_narrow_kernels[2 if TAPS * c <= 32 else 4], x.dtype)
    launch(kernel, (blocks, -(-n // SLAB)), BLOCK, x.reshape(-1),
           weight.reshape(-1), no_numbers(backend) if bias is None else bias, y.reshape(-1), h, w, c, n, pixels,
           int(bias is not None), gradient)
    return y


def narrow_half_forward(x, weight, bias, y):
    """y = conv2d(x, weight) + bias."""
    b, h, w, c = x.shape
    n = y.shape[3]
    if n > NARROW:
        return _from_narrow(x, weight, bias, y, 0)
    kernel = in_bfloat16(conv2d_to_narrow_kernel, x.dtype)
    launch(kernel, (-(-w // TILE_W) * -(-h // TILE_H) * b, -(-n // THREE)), TO_BLOCK, x.reshape(-1),
           weight.reshape(-1), no_numbers(x.backend) if bias is None else bias, y.reshape(-1), h, w, c, n,
           int(bias is not None))
    return y


def narrow_half_input_gradient(dy, weight, dx):
    """dx of a layer to few channels."""
    return _from_narrow(dy, weight, None, dx, 1)


def gradient_tile(turns, width, channels):
    """Bytes of what a chunk sees of the narrow side."""
    return 4 * (turns * GRADIENT_WARPS * GROUP + 2 * width + 2) * channels


def narrow_half_weight_gradient(dy, x, dweight, dbias=None):
    """dweight += …; dbias += … of a layer from few channels."""
    b, h, w, n = dy.shape
    c = x.shape[3]
    to_few = n <= NARROW
    wide, narrow, m, j = (x, dy, c, n) if to_few else (dy, x, n, c)
    slabs, threes, pixels = -(-m // SLAB), -(-j // THREE), b * h * w
    most = max(1, dy.backend.multiprocessors // (slabs * threes))
    turns = min(MAX_TURNS, -(-pixels // (GRADIENT_WARPS * GROUP * most)))
    while turns > 1 and gradient_tile(turns, w, j) > MAX_SHARED:
        turns -= 1
    parts = min(-(-pixels // (GROUP * GRADIENT_WARPS * turns)), most)
    partial = empty((parts, threes * slabs * RESULTS), np.float32, like=dy)
    kernel = in_bfloat16(conv2d_narrow_weight_gradient_kernel_half, x.dtype)
    launch(kernel, (slabs, threes, parts), GRADIENT_BLOCK, wide.reshape(-1),
           narrow.reshape(-1), partial.reshape(-1), h, w, m, j, pixels, turns,
           shared=max(gradient_tile(turns, w, j), 4 * SLOTS * RESULTS))
    has_bias = dbias is not None and not to_few
    launch(add_narrow_weight_gradient_kernel, threes * slabs * RESULTS // 32, (32, min(parts, ADD_ROWS)),
           partial.reshape(-1), dweight.reshape(-1), dbias if has_bias else no_numbers(dy.backend), parts, slabs, m, j,
           int(to_few), int(has_bias))
    return has_bias
