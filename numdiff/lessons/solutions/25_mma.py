"""Puzzle 25, mma.sync: a warp multiplies on the tensor cores."""

import numpy as np
from numba import cuda

from numdiff.device.tensor_core import load_word, mma_m16n8k16


@cuda.jit
def kernel(a, b, out):
    lane = cuda.threadIdx.x
    row, pair = lane // 4, lane % 4 * 2
    i, zero = row * 16 + pair, np.float32(0)
    a_words = load_word(a, i), load_word(a, i + 128), load_word(a, i + 8), load_word(a, i + 136)
    b_words = load_word(b, i), load_word(b, i + 8)
    s0, s1, s2, s3 = mma_m16n8k16(a_words, b_words, (zero, zero, zero, zero))
    out[row, pair] = s0
    out[row, pair + 1] = s1
    out[row + 8, pair] = s2
    out[row + 8, pair + 1] = s3
