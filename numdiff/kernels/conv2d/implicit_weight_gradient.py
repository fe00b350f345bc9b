"""The weight gradient as an implicit GEMM: pixels are the inner dimension, columns of col are
gathered while loading.

MATHEMATICS
    dweight[n, k] += Σ_p dy[p, n] · col[p, k]       as in implicit.py; k = (r, s, c): tap and channel
WHAT A THREAD KNOWS
    A step multiplies 8 pixels, for 128 columns of col and tile_n output channels. A thread keeps
    its columns, so it finds its tap and channel once; what moves is the pixel. The 8 pixels of a
    step are neighbours in one row of dy, so the walk from pixel to pixel is the same for all
    threads and needs no division. (A row that is no multiple of 8 ends with zeros.) In both
    operands a tile's long side is contiguous: a warp reads 512 neighbouring bytes of x and 256 or
    512 of dy, and nothing is transposed while loading to shared memory. Columns are counted C4 a
    tap, C rounded up to whole fours.
LAUNCH, DETERMINISM, COST, SOURCE
    as implicit.py
READ NEXT
    narrow.py, for when the tiles would
    be nearly empty.
"""

from ...device import cuda, device_inline, empty, float32, int32, launch, store4
from ...device.common import divide
from ...device.specialise import specialise
from ..matmul.vectorised import STEP, multiply, no_products
from .direct import Geometry
from .tiles import (
    BY_FOUR,
    LANES,
    ROW,
    SHARED,
    STAGE,
    TILE_M,
    TILE_N,
    TWO_ROUNDS,
    VARIANTS,
    add_parts,
    cut,
    fetch,
    first_output,
    tile_width,
    within,
    write_columns,
)


@cuda.jit(device=True)
def column_source(column, W, C, C4, kernel):
    """What a column of col reads: rows and columns from the window's middle to its tap, that
    distance as an index into x with its channel included, and the channels left from there on (0
    beyond the last column)."""
    tap, c = divide(column, C4)
    r, s = divide(tap, kernel)
    dr, ds = int32(r - kernel // 2), int32(s - kernel // 2)
    return dr, ds, int32((dr * W + ds) * C + c), int32(C - c if tap < kernel * kernel else 0)


@device_inline
def write_gradient(partial, column, channel, C, C4, N, kernel, rows):
    """The epilogue of a thread's 8 × 8 outputs, from `column` and `channel` on, into its part's
    partial results."""
    K = kernel * kernel * C
    start = (cuda.blockIdx.z * N + channel) * K
    tap, c = divide(column, C4)
    left = int32(C - c if tap < kernel * kernel else 0)
    write_columns(
        partial,
        start + tap * C + c,
        K,
        N - channel,
        left,
        rows[0],
        rows[1],
        rows[2],
        rows[3],
        BY_FOUR,
    )
    tap, c = divide(int32(column + 16), C4)
    left = int32(C - c if tap < kernel * kernel else 0)
    write_columns(
        partial,
        start + tap * C + c,
        K,
        N - channel,
        left,
        rows[4],
        rows[5],
        rows[6],
        rows[7],
        BY_FOUR,
    )


def conv2d_weight_gradient_kernel_v3(dy, x, partial, geometry, C4, all_steps, part_steps):
    """geometry: a `Geometry`; BY_FOUR needs C and N to be multiples of 4."""
    H, W, C, Ho, Wo, N, kernel, stride = geometry
    tile_a = cuda.shared.array(SHARED, float32)
    tile_b = cuda.shared.array(SHARED, float32)
    t = int32(cuda.threadIdx.x)
    first_column = int32(cuda.blockIdx.x * TILE_M)
    first_channel = int32(cuda.blockIdx.y * TILE_N)

    # where all threads are: eight pixels of a line (one row of one image) of dy; (h, w) is the
    # first's place in x
    first_step = int32(cuda.blockIdx.z * part_steps)
    steps = int32(min(part_steps, all_steps - first_step))
    line_steps = int32((Wo + STEP - 1) // STEP)
    line, chunk = divide(first_step, line_steps)
    image, i = divide(line, Ho)
    h, w = int32(i * stride), int32(chunk * STEP * stride)
    x_at = int32(((image * H + h) * W + w) * C)
    dy_at = int32((line * Wo + chunk * STEP) * N)

    # what this thread fetches: four columns of pixel k (and of pixel k + 4), four channels of pixel
    # q
    k, mine = t >> 5, int32((t & 31) * 4)
    to_a = int32(k * ROW + mine)
    dr, ds, offset, left = column_source(int32(first_column + mine), W, C, C4, kernel)
    if left == 0:
        dr = int32(-32768 * kernel)  # no such column: a tap far above every image
    ds = int32(ds + k * stride)
    offset = int32(offset + k * stride * C)
    limit = int32((Wo - k) * stride)  # w from which on pixel k is beyond the line's end
    q, mine = t // LANES, int32(t % LANES * 4)
    to_b = int32(q * ROW + mine)
    channel = int32(first_channel + mine)
    if BY_FOUR:
        # channels beyond the last repeat it: they are never written
        channel = int32(min(channel, N - 4))
    dy_left = int32(N - channel)
    dy_offset = int32(q * N + channel)
    dy_limit = int32((Wo - q) * stride)

    row, column = first_output(t)
    accumulators = no_products()
    step = int32(0)
    while step <= steps:  # one round more than steps, as in the forward
        more = step < steps
        a = fetch(
            x,
            int32(x_at + offset),
            more and w < limit and within(h + dr, w + ds, H, W),
            left,
            BY_FOUR,
        )
        b = fetch(dy, int32(dy_at + dy_offset), more and w < dy_limit, dy_left, BY_FOUR)
        if TWO_ROUNDS:
            w_2 = int32(w + 4 * stride)
            a_2 = fetch(
                x,
                int32(x_at + offset + 4 * stride * C),
                more and w_2 < limit and within(h + dr, w_2 + ds, H, W),
                left,
                BY_FOUR,
            )

        stage = int32(step & 1)
        if step > 0:
            accumulators = multiply(
                accumulators, tile_a, stage * STAGE + row, tile_b, stage * STAGE + column, ROW, ROW
            )

        stage = int32(1 - stage)
        store4(tile_a, stage * STAGE + to_a, *a)
        store4(tile_b, stage * STAGE + to_b, *b)
        if TWO_ROUNDS:
            store4(tile_a, stage * STAGE + to_a + 4 * ROW, *a_2)
        cuda.syncthreads()

        step = int32(step + 1)
        w = int32(w + STEP * stride)
        x_at = int32(x_at + STEP * stride * C)
        dy_at = int32(dy_at + STEP * N)
        if w >= Wo * stride:  # the line is through: the next, perhaps of the next image
            dy_at = int32(dy_at + (Wo - line_steps * STEP) * N)
            x_at = int32(x_at + (W * stride - w) * C)
            w = int32(0)
            h = int32(h + stride)
            if h == Ho * stride:
                x_at = int32(x_at + (H - h) * W * C)
                h = int32(0)

    write_gradient(
        partial,
        int32(first_column + row),
        int32(first_channel + column),
        C,
        C4,
        N,
        kernel,
        accumulators,
    )


conv2d_weight_gradient_kernels_v3 = {
    (n, four): specialise(
        conv2d_weight_gradient_kernel_v3,
        name=f"conv2d_weight_gradient_kernel_v3_{n}{'' if four else '_by_one'}",
        TILE_N=n,
        BY_FOUR=four,
    )
    for n, four in VARIANTS
}


def implicit_weight_gradient(dy, x, dweight, stride, accumulate=True):
    """dweight += the gradient, or = it, for arrays that launcher.py has checked."""
    _, h, w, c = x.shape
    b, ho, wo, n = dy.shape
    kernel = dweight.shape[1]
    tile_n, by_four = (tile_width(n), True) if c % 4 == 0 and n % 4 == 0 else (64, False)
    c4 = -(-c // 4) * 4
    grid = -(-kernel * kernel * c4 // TILE_M), -(-n // tile_n)
    threads = 2 * tile_n
    steps = b * ho * -(-wo // STEP)
    parts, part_steps = cut(grid[0] * grid[1], threads, steps)
    partial = empty((parts, dweight.size), like=dy)
    launch(
        conv2d_weight_gradient_kernels_v3[tile_n, by_four],
        (*grid, parts),
        threads,
        dy.reshape(-1),
        x.reshape(-1),
        partial.reshape(-1),
        Geometry(h, w, c, ho, wo, n, kernel, stride),
        c4,
        steps,
        part_steps,
    )
    add_parts(partial, dweight, accumulate=accumulate)
