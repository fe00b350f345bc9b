"""The weight of an input gradient: its taps counted down, its channels swapped.

With stride 1 the input gradient is the forward over dy with this weight (direct.py derives it).
SOURCE
    direct.py.
READ NEXT
    implicit.py
"""

from ...device import cuda, empty, float32, launch

TRANSPOSE = 32  # weights along each side of a tile that is transposed
TRANSPOSE_TILE = TRANSPOSE, TRANSPOSE + 1


@cuda.jit
def flip_weight_kernel(weight, flipped, N, C, taps):
    """flipped[c, taps - 1 - tap, n] = weight[n, tap, c], by tiles of 32 × 32 that turn round in
    shared memory.

    Reading and writing then both run along neighbouring addresses. The tile's rows are 33 long, so
    that reading a column of it meets 32 different banks.
    """
    tile = cuda.shared.array(TRANSPOSE_TILE, float32)
    first_n, first_c, tap = (
        cuda.blockIdx.y * TRANSPOSE,
        cuda.blockIdx.x * TRANSPOSE,
        cuda.blockIdx.z,
    )
    lane = cuda.threadIdx.x
    for line in range(cuda.threadIdx.y, TRANSPOSE, cuda.blockDim.y):
        n, c = first_n + line, first_c + lane
        if n < N and c < C:
            tile[line, lane] = weight[(n * taps + tap) * C + c]
    cuda.syncthreads()
    for line in range(cuda.threadIdx.y, TRANSPOSE, cuda.blockDim.y):
        n, c = first_n + lane, first_c + line
        if n < N and c < C:
            flipped[(c * taps + taps - 1 - tap) * N + n] = tile[lane, line]


def flipped_weight(weight):
    """The weight (C_in, kernel, kernel, C_out) whose convolution over dy is dx, as a new array."""
    n, kernel, _, c = weight.shape
    flipped = empty((c, kernel, kernel, n), like=weight)
    launch(
        flip_weight_kernel,
        (-(-c // TRANSPOSE), -(-n // TRANSPOSE), kernel * kernel),
        (TRANSPOSE, 8),
        weight.reshape(-1),
        flipped.reshape(-1),
        n,
        c,
        kernel * kernel,
    )
    return flipped
