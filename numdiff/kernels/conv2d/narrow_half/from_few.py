"""Float16 convolution from few channels: a window's numbers, 27 of three channels, are the inner
dimension.

    y[p, n] = Σ_k col[p, k] · weight[n, k],  k = tap · C + c: 27 of 32, or of up to seven channels 63 of 64
THE ORDER OF k AND n
    An inner index may have any place in a fragment, as long as both operands agree, and output
    columns may come in any order. Both are chosen so that a lane stores eight neighbouring channels
    of its pixels, 16 bytes. What a window shows is gathered number by number: it is small, and
    stays in the L1 cache.
LAUNCH
    128 threads, each warp walks over groups of 16 pixels, for a slab of 64 channels; the weight in
    registers.
SOURCE
    PTX ISA, section 9.7.14.5 (mma), whose fragments are written down in emulator/fragments.py.
READ NEXT
    to_few.py
"""

import numpy as np

from ....device import cuda, device_inline, float32, int32, uint32
from ....device.common import divide
from ....device.requires import requires
from ....device.specialise import Constant, specialise
from ....device.tensor_core import mma_m16n8k16_into, pack_half2, store_words4
from .windows import GROUP, OUTSIDE, SLAB, TAPS, seen, tap_offset

BLOCK = 128  # threads
BLOCKS = 4  # on a multiprocessor

STEPS = Constant()  # of 16 products an output, at most
# words of a weight's row in shared memory: eight rows' words are in
ROW = Constant(lambda STEPS: 8 * STEPS + 4)
WORDS = Constant(lambda ROW: SLAB * ROW)  # different banks
FRAGMENTS, INNER = Constant(lambda STEPS: 16 * STEPS), Constant(lambda STEPS: 4 * STEPS)


@device_inline
def store_weights(words, weight, first_n, C, N, gradient, t):
    """A slab's weights as float16 pairs into shared memory.

    Row 8 · j + g has the channel that column g of product j stands for: a lane's two columns in
    each of four products are eight neighbouring channels.
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
                low = float32(
                    weight[
                        (c * TAPS + TAPS - 1 - tap) * N + n
                        if gradient
                        else (n * TAPS + tap) * C + c
                    ]
                )
            if tap_2 < TAPS:
                high = float32(
                    weight[
                        (c_2 * TAPS + TAPS - 1 - tap_2) * N + n
                        if gradient
                        else (n * TAPS + tap_2) * C + c_2
                    ]
                )
        words[place * ROW + pair] = pack_half2(low, high)


@device_inline
def load_weights(weights, words, row, q):
    """A lane's fragments of a slab's weights into registers."""
    for j in range(8):
        for step in range(STEPS):
            at = int32((8 * j + row) * ROW + 8 * step + q)
            weights[2 * (j * STEPS + step)] = words[uint32(at)]
            weights[2 * (j * STEPS + step) + 1] = words[uint32(at + 4)]


@device_inline
def find_taps(taps, offsets, q, W, C):
    """The inner indices of a lane: k = 16 · step + 2 · q + 0, 1, 8, 9."""
    for k in range(4 * STEPS):
        tap, c = divide(int32(k // 4 * 16 + 2 * q + k % 2 + k % 4 // 2 * 8), C)
        taps[k] = tap if tap < TAPS else OUTSIDE
        offsets[k] = tap_offset(tap, W, C) + c


@device_inline
def number(array, at, mask, tap):
    """The number that a tap sees, or 0 outside of the image."""
    return float32(array[at]) if (mask >> tap) & 1 else float32(0)


@device_inline
def pair_of(x, at, mask, taps, offsets, k):
    """The inputs of a pixel's inner indices k and k + 1, as a word."""
    return pack_half2(
        number(x, at + offsets[k], mask, taps[k]), number(x, at + offsets[k + 1], mask, taps[k + 1])
    )


@device_inline
def multiply_window(accumulators, weights, x, taps, offsets, at, at_2, mask, mask_2):
    """accumulators += (what two pixels' windows show) · weights; at, at_2: of the pixels in x."""
    for step in range(STEPS):
        k = 4 * step
        a = (
            pair_of(x, at, mask, taps, offsets, k),
            pair_of(x, at_2, mask_2, taps, offsets, k),
            pair_of(x, at, mask, taps, offsets, k + 2),
            pair_of(x, at_2, mask_2, taps, offsets, k + 2),
        )
        for j in range(8):
            b = 2 * (j * STEPS + step)
            mma_m16n8k16_into(accumulators, 4 * j, a, (weights[b], weights[b + 1]))


@device_inline
def write_eight(y, at, accumulators, k):
    """Eight neighbouring channels of a pixel, two of each of four products."""
    store_words4(
        y,
        at,
        pack_half2(accumulators[k], accumulators[k + 1]),
        pack_half2(accumulators[k + 4], accumulators[k + 5]),
        pack_half2(accumulators[k + 8], accumulators[k + 9]),
        pack_half2(accumulators[k + 12], accumulators[k + 13]),
    )


@requires("7.5")
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
    for group in range(
        int32(cuda.blockIdx.x * (BLOCK // 32) + warp), groups, int32(cuda.gridDim.x * (BLOCK // 32))
    ):
        pixel, pixel_2 = int32(group * GROUP + row), int32(group * GROUP + row + 8)
        line, w = divide(pixel, W)
        mask = seen(divide(line, H)[1], w, H, W, pixel < pixels)
        line, w = divide(pixel_2, W)
        mask_2 = seen(divide(line, H)[1], w, H, W, pixel_2 < pixels)
        for j in range(8):
            for k in range(2):
                accumulators[4 * j + k] = accumulators[4 * j + 2 + k] = biases[
                    uint32(j // 4 * 32 + 8 * q + j % 4 * 2 + k)
                ]
        multiply_window(
            accumulators,
            weights,
            x,
            taps,
            offsets,
            int32(pixel * C),
            int32(pixel_2 * C),
            mask,
            mask_2,
        )
        for half in range(2):
            n = int32(first_n + half * 32 + q * 8)
            if n < N:
                if pixel < pixels:
                    write_eight(y, pixel * N + n, accumulators, 16 * half)
                if pixel_2 < pixels:
                    write_eight(y, pixel_2 * N + n, accumulators, 16 * half + 2)


# The kernels for up to 16 · steps products an output
conv2d_from_narrow_kernels = {
    steps: specialise(
        conv2d_from_narrow_kernel,
        name=f"conv2d_from_narrow_kernel_{16 * steps}",
        launch_bounds=(BLOCK, 8 // steps),
        STEPS=steps,
    )
    for steps in (2, 4)
}
