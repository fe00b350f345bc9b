"""Puzzle 26, ldmatrix: fragments from shared memory."""

import numpy as np
from numba import cuda

from numdiff.device.async_copy import shared_address
from numdiff.device.tensor_core import (
    ldmatrix_x2,
    ldmatrix_x4,
    load_words4,
    mma_m16n8k16,
    store_words4,
)

ROW, A_SIZE, B_SIZE = 24, 16 * 24, 8 * 24


@cuda.jit
def kernel(a, b, out):
    tile_a = cuda.shared.array(A_SIZE, np.float16, alignment=16)
    tile_b = cuda.shared.array(B_SIZE, np.float16, alignment=16)
    lane = cuda.threadIdx.x
    row, pair = lane // 4, lane % 4 * 2
    i, j = lane % 16, lane // 16 * 8
    w0, w1, w2, w3 = load_words4(a, i * 16 + j)
    store_words4(tile_a, i * ROW + j, w0, w1, w2, w3)
    n, k = lane % 8, lane // 8 % 2 * 8
    if lane < 16:
        w0, w1, w2, w3 = load_words4(b, n * 16 + k)
        store_words4(tile_b, n * ROW + k, w0, w1, w2, w3)
    cuda.syncthreads()
    a_words = ldmatrix_x4(np.uint32(shared_address(tile_a) + 2 * (i * ROW + j)))
    b_words = ldmatrix_x2(np.uint32(shared_address(tile_b) + 2 * (n * ROW + k)))
    zero = np.float32(0)
    s0, s1, s2, s3 = mma_m16n8k16(a_words, b_words, (zero, zero, zero, zero))
    out[row, pair] = s0
    out[row, pair + 1] = s1
    out[row + 8, pair] = s2
    out[row + 8, pair + 1] = s3
