"""Puzzle 26, ldmatrix: fragments from shared memory.

In a large product tiles are in shared memory. `ldmatrix_x4(address)` loads the four words of a
fragment of a in one instruction, `ldmatrix_x2(address)` the two words of one of b. Each lane gives
the address of 8 float16, 16 bytes: for x4 those of row lane % 16, from column lane // 16 * 8 on;
for x2 those of row lane % 8, from column lane // 8 % 2 * 8 on. An address is a number of bytes:
`shared_address(tile)` is that of the first element.

Eight of these rows are read at a time, and should be in different banks. Rows of 16 float16 have 32
bytes, and every fourth begins in the same bank. Longer rows avoid that, as in puzzle 22; a row's
length must stay a multiple of 8.

`load_words4(a, i)` reads 8 float16 from element i on as four words; `store_words4(tile, i, w0, w1,
w2, w3)` stores them.

NumPy: out = a.astype("f4") @ b.astype("f4").T
"""

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


def specification(a, b):
    return a.astype("f4") @ b.astype("f4").T


# elements of a row, and of the tiles: longer rows give three stars
ROW, A_SIZE, B_SIZE = 16, 16 * 16, 8 * 16


@cuda.jit
def kernel(a, b, out):  # 1 warp; a (16, 16) and b (8, 16) are float16, out (16, 8) is float32
    tile_a = cuda.shared.array(A_SIZE, np.float16, alignment=16)
    tile_b = cuda.shared.array(B_SIZE, np.float16, alignment=16)
    lane = cuda.threadIdx.x
    row, pair = lane // 4, lane % 4 * 2
    # fill in: copy a and b to the tiles, wait, load the fragments, multiply, store


# For the judge ------------------------------------------------------------------------------------

HINTS = (
    "Let lane copy 8 elements of a: row i = lane % 16, from column j = lane // 16 * 8 on. For b, 16 lanes copy.",
    "For ldmatrix_x4: np.uint32(shared_address(tile_a) + 2 * (i * ROW + j)), as an element has 2 bytes.",
    "With ROW = 24 eight rows begin in eight different groups of banks.",
)
USES = {
    "ldmatrix_x4": "It loads four words at once.",
    "ldmatrix_x2": "It loads both words of b at once.",
    "syncthreads": "The tiles must be complete before ldmatrix reads them: a barrier comes between.",
}


def problems(rng):
    yield (
        1,
        32,
        (
            rng.standard_normal((16, 16), "f4").astype("f2"),
            rng.standard_normal((8, 16), "f4").astype("f2"),
        ),
    )
