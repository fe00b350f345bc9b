"""im2win: of im2col's matrix only the rows are written, not the columns: windows overlap in memory
as they do in x.

MATHEMATICS
    Output pixel (i,j) sees F × F pixels, F = kernel, and (i,j+1) sees most of them again; im2col
    writes those twice. Written column by column they need not be: the F pixels of a column of the
    window first, then the next column,
              win[b,i,k,u,c] = x[b, i·stride + u - pad, k - pad, c]          zero outside x
              filters[n,v,u,c] = weight[n,u,v,c]                              the weights in the same order
    and pixel (b,i,j)'s window is one slice of F·F·C neighbours, which begins at column k =
    j·stride; the next pixel's begins stride columns, stride·F·C numbers, further on, and shares (F
    - stride)·F·C of them:
        F = 3, stride 1:   |column 0|column 1|column 2|column 3| …        of row (b,i) of win
                           |— window of pixel 0 ——————|
                                    |— window of pixel 1 ——————|
    forward   y[p, n] = Σ_q window(p)[q] · filters[n, q] + bias[n]            a matrix product whose rows overlap
    backward  dwindow = dy · filters would have to be added up where windows overlap; instead
              dx = conv2d(dy, flipped) (direct.py derives it), by windows of dy: with a stride, of
              dy with stride - 1 zeros between its pixels, spread[h,w] = dy[h/stride, w/stride]
              where both divide, else 0; dweight[n,u,v,c] += Σ_p dy[p, n] · window(p)[v,u,c]
SHAPES
    as in direct.py; win (B, Ho, (Wo - 1)·stride + kernel, kernel, C), float32, fewer than 2³¹
    elements
VERSIONS
    of the transform: v1 naive: one thread a number.
       v2 vectorised: one thread four channels, by 16-byte loads and stores.
    of the convolution: number 7, only where it is requested: `conv2d_forward(…, version="im2win")`.
       Its products are implicit.py's without the bookkeeping: no tap, no test whether it is inside
       the image; a thread's next numbers are always STEP further on. It writes and reads kernel /
       stride times x where im2col has (kernel / stride)² times x. But implicit.py writes and reads
       nothing: it pays with a few integer instructions, every C / 8 steps, which overlap 512
       multiply-adds a thread. So im2win is a rung to learn from, not the one that is launched. Its
       idea pays where the gathering cannot be hidden: with three channels, of which implicit.py
       takes number by number, it is a fifth to two fifths faster (docs/log/kernels.md has the
       paper's layers; the launcher has narrow.py for those); and
       in shared memory: the box with a halo in levels/ is a window that overlaps its neighbours,
       written nowhere else. Of a strided convolution's input gradient 1 - 1/stride² of the products
       are with the zeros; v2 has none of them.
LAUNCH
    the transform: one thread a number (v1) or four (v2), 256 a block. The products: as
    implicit.py's, the same tiles and parts, chosen in the same way, at most 128 registers a thread
    (ptxas, sm_80 and sm_90a), no spills; 16-byte loads where channels come in fours.
DETERMINISM
    as implicit.py: each part writes its own sums, and a second pass adds them in order.
COST
    bytes: win is written and read, 4·B·Ho·((Wo - 1)·stride + F)·F·C each way, in addition to what
    implicit.py moves; FLOPs as in direct.py. Roof: memory for the transform, arithmetic for the
    products.
SOURCE
    Lu, Chu, Guo and Liu 2023, "Im2win: An Efficient Convolution Paradigm on GPU", arXiv:2306.14316,
    section 3; with channels innermost: Fu et al. 2024, arXiv:2408.00278.
READ NEXT
    kernels/conv2d/narrow.py, for when the tiles would be nearly empty.
"""

from typing import NamedTuple

import numpy as np

from ...device import cuda, empty, float32, int32, launch, load4, store4
from ...device.batch_invariance import nominal_extent
from ...device.common import divide
from ...device.specialise import specialise
from ...errors import TooManyElementsError
from ...kernels.conv2d.flip import flipped_weight
from ...kernels.conv2d.im2col import output_size
from ...kernels.conv2d.tiles import (
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
    scatter,
    tile_width,
    write_columns,
    write_outputs,
)
from ...kernels.matmul.vectorised import STEP, multiply, no_products
from ...kernels.operation import Problem, Version, lacks_multiple, operation, single

BLOCK = 256  # threads


# References ---------------------------------------------------------------------------------------


def columns_of(outputs, kernel, stride):
    """Columns of x that a row of `outputs` pixels sees."""
    return (outputs - 1) * stride + kernel


def im2win_forward_reference(x, kernel, stride=1, pad=None):
    pad = kernel // 2 if pad is None else pad
    padded = np.pad(x, ((0, 0), (pad, pad), (pad, pad), (0, 0)))
    ho, wo = ((n - kernel) // stride + 1 for n in padded.shape[1:3])
    columns = columns_of(wo, kernel, stride)
    rows = [padded[:, u : u + stride * ho : stride, :columns] for u in range(kernel)]
    return np.stack(rows, axis=3)


def windows_reference(win, stride):
    """All windows (B, Ho, Wo, kernel·kernel·C) of a transformed image: a view, in which neighbours
    share memory."""
    b, ho, columns, kernel, c = win.shape
    size, shift = win.itemsize, stride * kernel * c
    row = columns * kernel * c
    return np.lib.stride_tricks.as_strided(
        win,
        (b, ho, (columns - kernel) // stride + 1, kernel * kernel * c),
        (ho * row * size, row * size, shift * size, size),
        writeable=False,
    )


def filters_reference(weight):
    """weight (N, kernel, kernel, C) in the order of a window, as a matrix."""
    return weight.transpose(0, 2, 1, 3).reshape(len(weight), -1)


def spread_reference(dy, shape, stride):
    """dy with stride - 1 zeros between its pixels, as an image of `shape` (B, H, W)."""
    spread = np.zeros((*shape, dy.shape[3]), dy.dtype)
    spread[:, ::stride, ::stride] = dy
    return spread


# The transform ------------------------------------------------------------------------------------
# Neighbouring threads write neighbours, and read neighbours as far as the channels go. Each pixel
# of x is read for up to kernel rows of win: the caches serve all but the first.


class Layout(NamedTuple):
    """The layout of a transform: x (·, H, W, C) and win (·, Ho, columns, size, C); `spread`: from
    one pixel of x to the next in the image that is transformed, between them zeros."""

    H: int
    W: int
    C: int
    Ho: int
    columns: int
    size: int
    stride: int
    pad: int
    spread: int


@cuda.jit(device=True)
def unspread(place, extent, spread):
    """Row (or column) of x at `place` of the image that is transformed; -1 where there is a zero."""
    if place < 0:
        return int32(-1)
    found, rest = divide(place, spread)
    return found if rest == 0 and found < extent else int32(-1)


@cuda.jit(device=True)
def source_of(n, layout):
    """Index into x of number n of win; -1 where that is zero."""
    rest, c = divide(n, layout.C)
    rest, u = divide(rest, layout.size)
    row, k = divide(rest, layout.columns)
    image, i = divide(row, layout.Ho)
    h = unspread(int32(i * layout.stride + u - layout.pad), layout.H, layout.spread)
    w = unspread(int32(k - layout.pad), layout.W, layout.spread)
    if h >= 0 and w >= 0:
        return int32(((image * layout.H + h) * layout.W + w) * layout.C + c)
    return int32(-1)


@cuda.jit
def im2win_forward_kernel_v1(x, win, layout):
    n = cuda.grid(1)
    if n < win.size:
        source = source_of(n, layout)
        win[n] = x[source] if source >= 0 else float32(0)


@cuda.jit
def im2win_forward_kernel_v2(x, win, layout):
    n = cuda.grid(1) * 4
    if n < win.size:
        source = source_of(n, layout)
        v0 = v1 = v2 = v3 = float32(0)
        if source >= 0:
            v0, v1, v2, v3 = load4(x, source)
        store4(win, n, v0, v1, v2, v3)


# Forward ------------------------------------------------------------------------------------------
# conv2d_forward_kernel_v3 of implicit.py with one change: a pixel's row of the matrix is in memory.
# A thread finds where it begins, once, and then walks along it.


class Windows(NamedTuple):
    """The layout of windows: Wo in a row of win, which has `columns` columns of `length` numbers;
    from window to window `stride` columns; K numbers in each."""

    Wo: int
    columns: int
    length: int
    stride: int
    K: int


@cuda.jit(device=True)
def window_start(pixel, windows):
    row, j = divide(pixel, windows.Wo)
    return int32((row * windows.columns + j * windows.stride) * windows.length)


def conv2d_forward_kernel_v7(win, filters, bias, y, windows, pixels, N, part_steps, has_bias):
    """BY_FOUR needs C to be a multiple of 4: then so are `length` and K."""
    tile_a = cuda.shared.array(SHARED, float32)
    tile_b = cuda.shared.array(SHARED, float32)
    t = int32(cuda.threadIdx.x)
    first_pixel, first_channel = int32(cuda.blockIdx.x * TILE_M), int32(cuda.blockIdx.y * TILE_N)
    first_step = int32(cuda.blockIdx.z * part_steps)
    steps = int32(min(part_steps, (windows.K + STEP - 1) // STEP - first_step))

    # what this thread fetches: numbers at … at + 3 of window `place` of the tile, and of filter
    # `place`
    place, at = t >> 1, int32(first_step * STEP + (t & 1) * 4)
    to = int32((t & 1) * 4 * ROW + place)
    # windows and filters beyond the last repeat it: their outputs are never written
    last = int32(pixels - 1)
    mine = window_start(min(first_pixel + place, last), windows)
    mine_2 = mine
    if TWO_ROUNDS:
        mine_2 = window_start(min(first_pixel + place + TILE_N, last), windows)
    filter_start = int32(min(first_channel + place, N - 1) * windows.K)

    row, column = first_output(t)
    accumulators = no_products()
    step = int32(0)
    # one round more than steps: round 0 only fetches, the last only multiplies
    while step <= steps:
        left = int32(windows.K - at)
        inside = step < steps and left > 0
        a = fetch(win, int32(mine + at), inside, left, BY_FOUR)
        b = fetch(filters, int32(filter_start + at), inside, left, BY_FOUR)
        a_2 = a
        if TWO_ROUNDS:
            a_2 = fetch(win, int32(mine_2 + at), inside, left, BY_FOUR)

        stage = int32(step & 1)
        if step > 0:
            accumulators = multiply(
                accumulators, tile_a, stage * STAGE + row, tile_b, stage * STAGE + column, ROW, ROW
            )
        stage = int32(1 - stage)
        scatter(tile_a, stage * STAGE + to, a)
        scatter(tile_b, stage * STAGE + to, b)
        if TWO_ROUNDS:
            scatter(tile_a, stage * STAGE + to + TILE_N, a_2)
        cuda.syncthreads()
        step = int32(step + 1)
        at = int32(at + STEP)

    write_outputs(
        y, bias, first_pixel + row, int32(first_channel + column), pixels, N, accumulators, has_bias
    )


# Weight gradient ----------------------------------------------------------------------------------
# As in implicit.py pixels are the inner dimension, eight neighbours of a line a step, and a thread
# keeps its columns. A line's windows follow one another, and so do the lines, whichever image they
# are of: nothing else to know.
# Columns are counted C4 a tap, C rounded up to whole fours, and a tap is (v, u) here; dweight has
# (u, v).


@cuda.jit(device=True)
def write_taps(partial, start, column, channels, K, C, C4, size, s0, s1, s2, s3):
    """A thread's four columns from `column` on of eight channels, to their place in the order of
    dweight."""
    tap, c = divide(column, C4)
    v, u = divide(tap, size)
    left = int32(C - c if tap < size * size else 0)
    write_columns(
        partial, start + (u * size + v) * C + c, K, channels, left, s0, s1, s2, s3, BY_FOUR
    )


@cuda.jit(device=True, forceinline=True)
def write_gradient(partial, column, channel, K, C, C4, N, size, rows):
    """The epilogue of a thread's 8 × 8 outputs, from `column` and `channel` on, into its part's
    partial results."""
    start = (cuda.blockIdx.z * N + channel) * K
    write_taps(
        partial, start, column, N - channel, K, C, C4, size, rows[0], rows[1], rows[2], rows[3]
    )
    write_taps(
        partial,
        start,
        int32(column + 16),
        N - channel,
        K,
        C,
        C4,
        size,
        rows[4],
        rows[5],
        rows[6],
        rows[7],
    )


def conv2d_weight_gradient_kernel_v7(
    dy, win, partial, windows, C, C4, N, size, all_steps, part_steps
):
    """BY_FOUR needs C and N to be multiples of 4."""
    tile_a = cuda.shared.array(SHARED, float32)
    tile_b = cuda.shared.array(SHARED, float32)
    t = int32(cuda.threadIdx.x)
    first_column = int32(cuda.blockIdx.x * TILE_M)
    first_channel = int32(cuda.blockIdx.y * TILE_N)

    # where all threads are: at pixel j of a line (one row of one image) of dy
    first_step = int32(cuda.blockIdx.z * part_steps)
    steps = int32(min(part_steps, all_steps - first_step))
    line, chunk = divide(first_step, int32((windows.Wo + STEP - 1) // STEP))
    j = int32(chunk * STEP)
    shift = int32(windows.stride * windows.length)
    win_at = int32(line * windows.columns * windows.length + j * shift)
    dy_at = int32((line * windows.Wo + j) * N)

    # what this thread fetches: four columns of pixel k (and of pixel k + 4), four channels of pixel
    # q
    k, mine = t >> 5, int32((t & 31) * 4)
    to_a = int32(k * ROW + mine)
    tap, c = divide(int32(first_column + mine), C4)
    left = int32(C - c if tap < size * size else 0)
    offset = int32(k * shift + tap * C + c)
    q, mine = t // LANES, int32(t % LANES * 4)
    to_b = int32(q * ROW + mine)
    channel = int32(first_channel + mine)
    if BY_FOUR:
        # channels beyond the last repeat it: they are never written
        channel = int32(min(channel, N - 4))
    dy_offset = int32(q * N + channel)

    row, column = first_output(t)
    accumulators = no_products()
    step = int32(0)
    while step <= steps:  # one round more than steps, as in the forward
        more = step < steps
        a = fetch(
            win, int32(win_at + offset), more and left > 0 and j + k < windows.Wo, left, BY_FOUR
        )
        b = fetch(
            dy, int32(dy_at + dy_offset), more and j + q < windows.Wo, int32(N - channel), BY_FOUR
        )
        if TWO_ROUNDS:
            a_2 = fetch(
                win,
                int32(win_at + offset + 4 * shift),
                more and left > 0 and j + k + 4 < windows.Wo,
                left,
                BY_FOUR,
            )

        stage = int32(step & 1)
        if step > 0:
            accumulators = multiply(
                accumulators, tile_a, stage * STAGE + row, tile_b, stage * STAGE + column, ROW, ROW
            )
        stage = int32(1 - stage)
        store4(tile_a, stage * STAGE + to_a, a[0], a[1], a[2], a[3])
        store4(tile_b, stage * STAGE + to_b, b[0], b[1], b[2], b[3])
        if TWO_ROUNDS:
            store4(tile_a, stage * STAGE + to_a + 4 * ROW, a_2[0], a_2[1], a_2[2], a_2[3])
        cuda.syncthreads()

        step = int32(step + 1)
        j = int32(j + STEP)
        win_at = int32(win_at + STEP * shift)
        dy_at = int32(dy_at + STEP * N)
        if j >= windows.Wo:  # the line is through: the next begins with whole columns
            win_at = int32(win_at + windows.columns * windows.length - j * shift)
            dy_at = int32(dy_at + (windows.Wo - j) * N)
            j = int32(0)

    write_gradient(
        partial,
        int32(first_column + row),
        int32(first_channel + column),
        windows.K,
        C,
        C4,
        N,
        size,
        accumulators,
    )


conv2d_forward_kernels_v7, conv2d_weight_gradient_kernels_v7 = (
    {
        (n, four): specialise(
            kernel, name=f"{kernel.__name__}_{n}{'' if four else '_by_one'}", TILE_N=n, BY_FOUR=four
        )
        for n, four in VARIANTS
    }
    for kernel in (conv2d_forward_kernel_v7, conv2d_weight_gradient_kernel_v7)
)


# Launchers ----------------------------------------------------------------------------------------


def _transform(x, outputs, kernel, stride, pad, spread=1, version=None):
    """win, a new array, for `outputs` (Ho, Wo) pixels of x (B, H, W, C), spread with zeros."""
    (b, h, w, c), (ho, wo) = x.shape, outputs
    columns = columns_of(wo, kernel, stride)
    shape = b, ho, columns, kernel, c
    if max(x.size, b * ho * columns * kernel * c) >= 2**31:
        raise TooManyElementsError(
            f"im2win of {tuple(x.shape)} has too many elements for 32-bit indices: split the batch"
        )
    if version is None:
        version = 2 if _lacks_fours(x) is None else 1
    win = empty(shape, like=x)
    threads = win.size if version == 1 else win.size // 4
    launch(
        im2win_forward_kernel_v1 if version == 1 else im2win_forward_kernel_v2,
        -(-threads // BLOCK),
        BLOCK,
        x.reshape(-1),
        win.reshape(-1),
        Layout(h, w, c, ho, columns, kernel, stride, pad, spread),
    )
    return win


def filters(weight):
    """The weight in the order of a window: im2win of an image that is one window, for each output
    channel."""
    return _transform(weight, (1, 1), weight.shape[1], 1, 0)


def _windows(win, stride):
    _, _, columns, kernel, c = win.shape
    return Windows(
        (columns - kernel) // stride + 1, columns, kernel * c, stride, kernel * kernel * c
    )


def _multiply(win, weight, bias, y, stride):
    """y = all windows of win, each times all filters."""
    windows, n, c = _windows(win, stride), weight.shape[0], weight.shape[3]
    pixels, by_four = y.size // n, c % 4 == 0
    tile_n = tile_width(n) if by_four else 64
    grid = -(-pixels // TILE_M), -(-n // tile_n)
    parts, part_steps = cut(
        -(-nominal_extent(pixels) // TILE_M) * grid[1], 2 * tile_n, -(-windows.K // STEP)
    )
    out = y if parts == 1 else empty((parts, y.size), like=y)
    launch(
        conv2d_forward_kernels_v7[tile_n, by_four],
        (*grid, parts),
        2 * tile_n,
        win.reshape(-1),
        filters(weight).reshape(-1),
        weight.reshape(-1) if bias is None else bias,
        out.reshape(-1),
        windows,
        pixels,
        n,
        part_steps,
        int(bias is not None),
    )
    if parts > 1:
        add_parts(out, y, accumulate=False)


def forward(x, weight, bias, y, stride):
    """y = conv2d(x, weight) + bias, for arrays that the launcher has checked; so are those of the
    two below."""
    kernel = weight.shape[1]
    _multiply(_transform(x, y.shape[1:3], kernel, stride, kernel // 2), weight, bias, y, stride)
    return y


def input_gradient(dy, weight, dx, stride):
    """dx, by windows of dy."""
    kernel = weight.shape[1]
    win = _transform(dy, dx.shape[1:3], kernel, 1, kernel // 2, spread=stride)
    _multiply(win, flipped_weight(weight), None, dx, 1)
    return dx


def weight_gradient(dy, x, dweight, stride, accumulate=True):
    """dweight += the gradient, or = it."""
    (b, ho, wo, n), kernel, c = dy.shape, dweight.shape[1], x.shape[3]
    win = _transform(x, (ho, wo), kernel, stride, kernel // 2)
    tile_n, by_four = (tile_width(n), True) if c % 4 == 0 and n % 4 == 0 else (64, False)
    c4 = -(-c // 4) * 4
    grid = -(-kernel * kernel * c4 // TILE_M), -(-n // tile_n)
    steps = b * ho * -(-wo // STEP)
    parts, part_steps = cut(grid[0] * grid[1], 2 * tile_n, steps)
    partial = empty((parts, dweight.size), like=dy)
    launch(
        conv2d_weight_gradient_kernels_v7[tile_n, by_four],
        (*grid, parts),
        2 * tile_n,
        dy.reshape(-1),
        win.reshape(-1),
        partial.reshape(-1),
        _windows(win, stride),
        c,
        c4,
        n,
        kernel,
        steps,
        part_steps,
    )
    add_parts(partial, dweight, accumulate=accumulate)


# Cost ---------------------------------------------------------------------------------------------


def im2win_bytes(B, H, W, C, kernel, stride=1):
    """Bytes of the transformed image."""
    return (
        4
        * B
        * output_size(H, stride)
        * columns_of(output_size(W, stride), kernel, stride)
        * kernel
        * C
    )


def im2win_forward_cost(B, H, W, C, kernel, stride=1):
    """(bytes, FLOPs): x is read once from memory (the caches serve its neighbours' reads), win is
    written."""
    return 4 * B * H * W * C + im2win_bytes(B, H, W, C, kernel, stride), 0


# Operation ----------------------------------------------------------------------------------------


def _lacks_fours(x):
    """None if four channels can be moved at a time."""
    if x.offset % 16:
        return "moves 16 bytes at a time, and these numbers begin elsewhere"
    return lacks_multiple(4, x.shape[-1], "channels")


@operation(
    reference=lambda x, kernel, stride=1: im2win_forward_reference(x, kernel, stride),
    cost=lambda x, kernel, stride: im2win_forward_cost(*x.shape, kernel, stride),
    exact_bytes=True,
    versions=[Version("naive"), Version("vectorised", fits=_lacks_fours)],
    problems=[
        Problem(x=single(1, 4, 5, 4), kernel=3, stride=2),
        Problem(x=single(32, 64, 64, 64), kernel=3, measured=True),
    ],
)
def im2win_forward(x, kernel, stride=1, version=None):
    """The windows of x (B, H, W, C) along each output row (B, Ho, columns, kernel, C), as a new
    array."""
    outputs = [output_size(n, stride) for n in x.shape[1:3]]
    return _transform(x, outputs, kernel, stride, kernel // 2, version=version.number)
