"""Puzzle 27, cp.async: copy the next tile while you use this one.

`cp_async_16(address, a, i)` starts a copy of 16 bytes from element i of a to a shared address, and
the thread continues at once. `cp_async_commit()` closes a group of copies. `cp_async_wait(n)` waits
until at most n of the thread's groups are under way; then a barrier says that the copies of the
other threads have arrived, too.

With two tiles, the stages, step s + 1 is copied to one while step s is read from the other. Each
thread copies 4 elements of a tile of 128 and adds up elements t, t + 32, t + 64 and t + 96 of it.

NumPy: out = a.reshape(-1, 32).sum(axis=0)
"""

import numpy as np
from numba import cuda

from numdiff.device.async_copy import cp_async_16, cp_async_commit, cp_async_wait, shared_address


def specification(a):
    return a.reshape(-1, 32).sum(axis=0)


@cuda.jit
def kernel(a, out):  # 1 block of 32 threads; a has a multiple of 128 elements
    tiles = cuda.shared.array(2 * 128, np.float32, alignment=16)
    base, t, steps = shared_address(tiles), cuda.threadIdx.x, a.size // 128
    # fill in


# For the judge ------------------------------------------------------------------------------------

HINTS = (
    "Before the loop: start the copy of step 0 and commit it.",
    "In a step: start the next step's copy, if there is one, and commit; cp_async_wait(1); barrier; add; barrier.",
    "The address of stage s for thread t is np.uint32(base + s * 512 + 16 * t): 128 elements have 512 bytes.",
)
USES = {"cp_async_16": "Copy by cp_async_16, one step ahead."}
TOLERANCE = 1e-5


def problems(rng):
    yield 1, 32, (rng.random(5 * 128, "f4"),)
