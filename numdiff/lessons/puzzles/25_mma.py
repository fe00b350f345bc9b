"""Puzzle 25, mma.sync: a warp multiplies on the tensor cores.

One instruction, executed by a whole warp, multiplies a matrix of 16 x 16 float16 by one of 16 x 8,
with sums in float32. Each matrix, a fragment, is spread over the registers of the 32 lanes, two
float16 in a word.

With row = lane // 4 and pair = lane % 4 * 2 a lane has

    of a    four words, at (row, pair), (row + 8, pair), (row, pair + 8), (row + 8, pair + 8)
    of b    two words, at (row, pair) and (row, pair + 8): b is stored with k as its last index
    of out  four float32, at (row, pair), (row, pair + 1), (row + 8, pair), (row + 8, pair + 1)

`load_word(a, i)` reads the two float16 from element i on, where i counts over both axes: row * 16 +
column. `mma_m16n8k16(a_words, b_words, sums)` takes tuples of 4, 2 and 4, and returns the 4 new
sums.

NumPy: out = a.astype("f4") @ b.astype("f4").T
"""

import numpy as np
from numba import cuda

from numdiff.device.tensor_core import load_word, mma_m16n8k16


def specification(a, b):
    return a.astype("f4") @ b.astype("f4").T


@cuda.jit
def kernel(a, b, out):  # 1 warp; a (16, 16) and b (8, 16) are float16, out (16, 8) is float32
    lane = cuda.threadIdx.x
    row, pair = lane // 4, lane % 4 * 2
    # fill in


# For the judge ------------------------------------------------------------------------------------

HINTS = (
    "i = row * 16 + pair is the index of the first word, in a and in b. Eight rows further is i + 128.",
    "The sums begin with (zero, zero, zero, zero), zero = np.float32(0).",
    "The order of the words of a: (row, pair), (row + 8, pair), (row, pair + 8), (row + 8, pair + 8).",
)
USES = {"mma_m16n8k16": "One instruction computes all 128 outputs."}


def problems(rng):
    yield (
        1,
        32,
        (
            rng.standard_normal((16, 16), "f4").astype("f2"),
            rng.standard_normal((8, 16), "f4").astype("f2"),
        ),
    )
