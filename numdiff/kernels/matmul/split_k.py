"""Split-K: a long sum shared by many blocks.

WHY
    A weight's gradient, dyᵀ·x, has a small result and a long sum: 64 × 64 outputs over 131,072
    pixels. One block owns the whole result, so one multiprocessor of 132 would work. Instead K is
    cut into slices, each slice is a matmul of its own into an array of partial results, and a
    second pass adds the slices up.
HOW
    To the kernels of the ladder the slices are simply a batch: from one slice to the next A and B
    move on by `slice_length` elements of K, and C by M · N. Only the last slice may be shorter,
    which is their argument K_last.
LAUNCH
    the second pass: grid (ceil(M · N / 32)), blocks of 32 outputs × 8 shares of the slices; 1 KiB
    of shared memory.
DETERMINISM
    a share is summed in the order of its slices, the shares in theirs. With atomics the order, and
    with it the last bits of a training run, would be left to the hardware's timing.
COST
    the partial results are written and read once: 8 · slices · M · N bytes.
READ NEXT
    choice.py, which decides how many slices pay.
"""

from ...device import cuda, float32
from .operands import write_output

OUTPUTS = 32  # a warp's width: its loads from one slice are neighbours
# warps of a block, each with every 8th slice: eight loads in flight for an output instead of one
SHARES = 8


@cuda.jit
def sum_slices_kernel(partial, slices, c, bias, M, N, c_row, epilogue):
    sums = cuda.shared.array((SHARES, OUTPUTS), float32)
    x, share = cuda.threadIdx.x, cuda.threadIdx.y
    i = cuda.blockIdx.x * OUTPUTS + x
    total = float32(0)
    if i < M * N:
        for s in range(share, slices, SHARES):
            total += partial[s * M * N + i]
    sums[share, x] = total
    cuda.syncthreads()
    if share == 0 and i < M * N:
        for s in range(1, SHARES):
            total += sums[s, x]
        row, column = i // N, i % N
        write_output(c, row * c_row + column, total, column, bias, epilogue)
