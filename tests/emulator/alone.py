"""A program of kernels that runs where the emulator alone is installed: .ci/run gives it to `-m
numdiff_emulator`."""

import numpy as np
from numba import cuda, float32


@cuda.jit
def row_sums(x, out):
    tile = cuda.shared.array(64, float32)
    t = cuda.threadIdx.x
    tile[t] = x[cuda.blockIdx.x, t]
    cuda.syncthreads()
    k = 32
    while k:
        if t < k:
            tile[t] += tile[t + k]
        cuda.syncthreads()
        k //= 2
    if t == 0:
        out[cuda.blockIdx.x] = tile[0]


if __name__ == "__main__":
    x, out = np.arange(192, dtype=np.float32).reshape(3, 64), cuda.device_array(3, np.float32)
    row_sums[3, 64](cuda.to_device(x), out)
    assert (out.copy_to_host() == x.sum(1)).all()
