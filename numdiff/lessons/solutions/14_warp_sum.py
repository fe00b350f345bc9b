"""Puzzle 14, warp shuffle: a sum without shared memory."""

from numba import cuda


@cuda.jit
def kernel(a, out):
    t = cuda.threadIdx.x
    lane, warp = t % 32, t // 32
    total = a[t]
    step = 16
    while step > 0:
        total += cuda.shfl_xor_sync(0xFFFFFFFF, total, step)
        step //= 2
    if lane == 0:
        out[warp] = total
