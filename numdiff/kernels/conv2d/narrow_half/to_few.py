"""Float16 convolution to few channels: the sum over channels comes first, for every tap, then the
sum over taps.

    z[q, (tap, n)] = Σ_c x[q, c] · weight[n, tap, c], 27 of 32 columns for three channels: by tensor
    cores y[p, n] = bias[n] + Σ_tap z[p + tap - pad, (tap, n)]: nine additions a number, from shared
    memory
A lane loads 16 neighbouring channels of its pixel, eight words: so the inner index of a fragment's
places is in another order than it stands in memory, for both operands alike.
LAUNCH
    256 threads for TILE_H × TILE_W pixels and three channels; z, with its halo, in 37 KiB of shared
    memory.
SOURCE
    PTX ISA, section 9.7.14.5 (mma), whose fragments are written down in emulator/fragments.py.
READ NEXT
    weight_gradient.py
"""

import numpy as np

from ....device import cuda, device_inline, float32, int32, uint32
from ....device.common import divide
from ....device.requires import requires
from ....device.tensor_core import load_word, load_words4, mma_m16n8k16_into
from ..implicit import within
from .windows import GROUP, SIZE, SLAB, TAPS, THREE

TILE_H, TILE_W = 8, 32  # output pixels of a block: one for each thread
HALO_W = TILE_W + 2
HALO = (TILE_H + 2) * HALO_W
Z_ROW = THREE * TAPS  # odd, so that neighbouring pixels' numbers are in different banks
Z_SIZE = HALO * Z_ROW
BLOCK = TILE_H * TILE_W  # threads


@device_inline
def sixteen(x, pixel, inside, c, C):
    """Sixteen neighbouring channels of a pixel as eight words, zeros outside."""
    zero = uint32(0)
    a = b = (zero, zero, zero, zero)
    if inside and c < C:
        a = load_words4(x, pixel * C + c)
    if inside and c + 8 < C:
        b = load_words4(x, pixel * C + c + 8)
    return a[0], a[1], a[2], a[3], b[0], b[1], b[2], b[3]


@requires("7.5")
@cuda.jit(launch_bounds=BLOCK)
def conv2d_to_narrow_kernel(x, weight, bias, y, H, W, C, N, has_bias):
    z = cuda.shared.array(Z_SIZE, float32)  # [pixel with halo][tap][channel]
    words = cuda.shared.array(1024, np.uint32)  # the weight, in the order in which lanes take it
    t = int32(cuda.threadIdx.x)
    warp, lane = t >> 5, t & 31
    row, q = lane >> 2, lane & 3
    rest, tile_w = divide(cuda.blockIdx.x, int32((W + TILE_W - 1) // TILE_W))
    image, tile_h = divide(rest, int32((H + TILE_H - 1) // TILE_H))
    first_h, first_w, first_n = (
        int32(tile_h * TILE_H),
        int32(tile_w * TILE_W),
        int32(cuda.blockIdx.y * THREE),
    )
    accumulators = cuda.local.array(16, np.float32)
    weights = cuda.local.array(32, np.uint32)
    for first_c in range(int32(0), C, int32(SLAB)):
        cuda.syncthreads()
        # word `which` (0 … 7) of quad lane q has its channels 2 · which and 2 · which + 1 of
        # sixteen
        for k in range(t, int32(1024), int32(BLOCK)):
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
        for start in range(int32(warp * GROUP), int32(HALO), int32(BLOCK // 32 * GROUP)):
            m, m_2 = int32(start + row), int32(start + row + 8)
            h, w = divide(m, int32(HALO_W))
            h_2, w_2 = divide(m_2, int32(HALO_W))
            h, w = int32(first_h + h - 1), int32(first_w + w - 1)
            h_2, w_2 = int32(first_h + h_2 - 1), int32(first_w + w_2 - 1)
            inside, inside_2 = (
                m < HALO and within(h, w, H, W),
                m_2 < HALO and within(h_2, w_2, H, W),
            )
            a = sixteen(x, (image * H + h) * W + w, inside, int32(first_c + q * 16), C)
            b = sixteen(x, (image * H + h_2) * W + w_2, inside_2, int32(first_c + q * 16), C)
            for k in range(16):
                accumulators[k] = float32(0)
            for j in range(4):
                mma_m16n8k16_into(
                    accumulators, 4 * j, (a[0], b[0], a[1], b[1]), (weights[j], weights[4 + j])
                )
                mma_m16n8k16_into(
                    accumulators, 4 * j, (a[2], b[2], a[3], b[3]), (weights[8 + j], weights[12 + j])
                )
                mma_m16n8k16_into(
                    accumulators,
                    4 * j,
                    (a[4], b[4], a[5], b[5]),
                    (weights[16 + j], weights[20 + j]),
                )
                mma_m16n8k16_into(
                    accumulators,
                    4 * j,
                    (a[6], b[6], a[7], b[7]),
                    (weights[24 + j], weights[28 + j]),
                )
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
