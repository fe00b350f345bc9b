"""Sums over pixels: how threads work together, in an order that never changes.

MATHEMATICS
    column_sum   s[n] = Σ_m x[m, n]              sample_sum   s[b, c] = Σ_p x[b, p, c]
    Each is a sum over the middle axis of a (B, P, N) array: columns have B = 1. They are the
    backward of every broadcast; their own backward, a broadcast, is in bias.py.
SHAPES
    x (B, P, N) float32, float16 or bfloat16, contiguous; partial (B, chunks, N) and out (B, N)
    float32
VERSIONS
    v1 naive: one thread a column: neighbours read neighbouring addresses, but N threads are far too
    few to fill a GPU.
    v2 tree: a block owns a chunk of rows. Its 256 threads share the rows; a tree in shared memory
    adds up their sums, and each chunk writes one row of partial sums. The same kernel, over the
    partial sums, is the second pass.
    v3 vectorised: as v2, with four columns a thread, by 16-byte loads.
LAUNCH
    v2, v3: grid (chunks, column tiles, B), 256 threads = rows × lanes, 1 or 4 KiB of shared memory;
    one pass up to 512 rows, or where one chunk has them all, else two.
DETERMINISM
    no atomics: which thread adds which row, and the tree, depend on the shape alone.
COST
    bytes: 4 B P N read, little written; one addition an element. Roof: memory bandwidth.
SOURCE
    the tree: Harris, "Optimizing Parallel Reduction in CUDA" (2007), kernel 3 (sequential
    addressing).
    Its error grows with log P where a running sum's grows with P: Higham, SIAM J. Sci. Comput. 14
    (1993), 783.
READ NEXT
    fuse/, where sums are made on the way; groupnorm/groups.py, where they are used in the next
    line.
"""

import numpy as np

from ...device import cuda, device_inline, empty, float32, int32, int64, launch, load4
from ...device.common import divide, load4_or_zeros
from ...dtypes import in_single
from ..cpu.reductions import column_totals
from ..operation import Problem, Version, lacks_multiple, operation, single

# threads: the tree has eight levels, and eight blocks of this size fill a multiprocessor
BLOCK = 256
BLOCK4 = 4 * BLOCK  # shared elements where each thread has four sums
# rows that one pass takes: at most 16 loads a thread, which cost less than a second launch
DIRECT = 512
GRID = 512  # blocks of a first pass, at most: about four for each of an H100's 132 multiprocessors
# rows that the reference sums at a time, before it adds those sums: keeps float32 accurate to 1e-6
CHUNK = 1024
COLUMNS = 16  # that a compiled loop adds up faster than BLAS: it takes a core's vectors of them


# References ---------------------------------------------------------------------------------------


@in_single(0)
def column_sum_reference(x, out=None):
    rows = x.reshape(-1, x.shape[-1])
    if x.dtype == np.float32 and x.shape[-1] >= COLUMNS:
        total = np.zeros(x.shape[-1], np.float32)
        column_totals(np.ascontiguousarray(rows), total)
        return total if out is None else np.add(out, total, out=out)
    # a product with ones is BLAS, five times faster than np.sum over the first axis
    ones = np.ones(CHUNK, x.dtype)
    total = np.sum(
        [
            ones[: len(part)] @ part
            for part in (rows[i : i + CHUNK] for i in range(0, len(rows), CHUNK))
        ],
        axis=0,
    )
    return total if out is None else np.add(out, total, out=out)


def sample_sum_reference(x):
    return np.stack([column_sum_reference(sample) for sample in x])


# Device functions ---------------------------------------------------------------------------------


@cuda.jit(device=True)
def tree_sum(tile, planes, t, lanes, rows):
    """Adds up `rows` rows of `lanes` sums into the first row, in each of `planes` planes of BLOCK
    elements.

    Thread t owns element t of every plane. All threads of the block call it, and may read the sums
    when it returns.
    """
    left = rows
    while left > 1:  # add the second half of the rows that are left to the first half
        half = (left + 1) >> 1
        cuda.syncthreads()
        if t < (left - half) * lanes:
            for plane in range(planes):
                tile[plane * BLOCK + t] += tile[plane * BLOCK + t + half * lanes]
        left = half
    cuda.syncthreads()


@device_inline
def put4(tile, at, s0, s1, s2, s3):
    """A thread's sums of four columns, in four planes: a warp's threads touch neighbouring words."""
    tile[at], tile[BLOCK + at], tile[2 * BLOCK + at], tile[3 * BLOCK + at] = s0, s1, s2, s3


@device_inline
def get4(tile, at):
    return tile[at], tile[BLOCK + at], tile[2 * BLOCK + at], tile[3 * BLOCK + at]


# v1: one thread a column --------------------------------------------------------------------------


@cuda.jit
def sum_rows_kernel_v1(x, out, B, P, N, accumulate):
    i = cuda.grid(1)  # sample b, column n
    if i < B * N:
        b, n = i // N, i % N
        total = float32(0)
        for p in range(P):
            total += float32(x[(b * P + p) * N + n])
        out[i] = out[i] + total if accumulate else total


# v2: a block a chunk of rows, then a tree in shared memory ----------------------------------------
# At N = 64 a version-1 launch has 64 threads; here every chunk of every sample has 256, and a warp
# still reads neighbouring addresses.


@cuda.jit
def sum_rows_kernel_v2(x, out, P, N, lanes, chunk, accumulate):
    tile = cuda.shared.array(BLOCK, float32)
    t = cuda.threadIdx.x
    rows = BLOCK // lanes
    row, b = t // lanes, cuda.blockIdx.z
    n = cuda.blockIdx.y * lanes + t % lanes
    start = cuda.blockIdx.x * chunk
    total = float32(0)
    if row < rows and n < N:  # the other threads (`lanes` need not divide 256) contribute zeros
        for p in range(start + row, min(start + chunk, P), rows):
            total += float32(x[(b * P + p) * N + n])
    tile[t] = total
    tree_sum(tile, 1, t, lanes, rows)
    if row == 0 and n < N:
        i = (b * cuda.gridDim.x + cuda.blockIdx.x) * N + n
        out[i] = out[i] + tile[t] if accumulate else tile[t]


# v3: four columns a thread ------------------------------------------------------------------------
# A quarter of the load instructions for the same bytes, so a quarter of the threads keeps the
# memory busy; and the loads of four rows are in flight at a time.


@cuda.jit
def sum_rows_kernel_v3(x, out, P, N, lanes, chunk, accumulate):
    tile = cuda.shared.array(BLOCK4, float32)
    t, b = int32(cuda.threadIdx.x), cuda.blockIdx.z
    row, lane = divide(t, lanes)
    rows, _ = divide(BLOCK, lanes)
    n, p = (cuda.blockIdx.y * lanes + lane) * 4, int32(cuda.blockIdx.x * chunk + row)
    end, works = int32(min((cuda.blockIdx.x + 1) * chunk, P)), row < rows and n < N
    i, at, step = (
        (b * cuda.gridDim.x + cuda.blockIdx.x) * N + n,
        (b * P + p) * N + n,
        int64(rows) * N,
    )
    o0 = o1 = o2 = o3 = s0 = s1 = s2 = s3 = float32(0)
    if accumulate and works and row == 0:  # loaded while the threads add
        o0, o1, o2, o3 = out[i], out[i + 1], out[i + 2], out[i + 3]
    while works and p < end:
        x0, x1, x2, x3 = load4(x, at)
        y0, y1, y2, y3 = load4_or_zeros(x, at + step, p + rows < end)
        z0, z1, z2, z3 = load4_or_zeros(x, at + 2 * step, p + 2 * rows < end)
        w0, w1, w2, w3 = load4_or_zeros(x, at + 3 * step, p + 3 * rows < end)
        s0, s1 = s0 + x0 + y0 + z0 + w0, s1 + x1 + y1 + z1 + w1
        s2, s3 = s2 + x2 + y2 + z2 + w2, s3 + x3 + y3 + z3 + w3
        p, at = int32(p + 4 * rows), at + 4 * step
    put4(tile, t, s0, s1, s2, s3)
    tree_sum(tile, 4, t, lanes, rows)
    if works and row == 0:
        out[i], out[i + 1] = o0 + tile[t], o1 + tile[BLOCK + t]
        out[i + 2], out[i + 3] = o2 + tile[2 * BLOCK + t], o3 + tile[3 * BLOCK + t]


# Launchers ----------------------------------------------------------------------------------------


def cut(B, P, N, vector):
    """How blocks of 256 threads share a (B, P, N) array, `vector` columns a thread: (lanes, tiles,
    chunk, chunks).

    A block has `lanes` threads across and 256 // lanes down; it owns one of `tiles` column tiles
    and one of `chunks` chunks of `chunk` rows. Few rows: narrow tiles (128 bytes with vectors of
    four, still whole memory sectors), so that many threads share the rows. Many rows: wide tiles,
    and chunks for about GRID blocks, at least eight rows a thread.
    """
    columns = -(-N // vector)
    tiles = -(-columns // (8 if P <= DIRECT else 64))
    lanes = -(-columns // tiles)
    if P <= DIRECT:
        return lanes, tiles, P, 1
    chunk = max(8 * (BLOCK // lanes), -(-P // max(1, GRID // (tiles * B))))
    return lanes, tiles, chunk, -(-P // chunk)


def _sum_rows(version, x, out, B, P, N, accumulate):
    """out (B, N) = or += the sums of x (B, P, N) over P."""
    x_, out_ = x.reshape(-1), out.reshape(-1)
    if version.name == "naive":
        launch(version.kernel, -(-B * N // BLOCK), BLOCK, x_, out_, B, P, N, int(accumulate))
        return
    lanes, tiles, chunk, chunks = cut(B, P, N, version.width)
    if chunks == 1:
        launch(version.kernel, (1, tiles, B), BLOCK, x_, out_, P, N, lanes, chunk, int(accumulate))
    else:
        partial = empty((B, chunks, N), np.float32, like=x)
        launch(
            version.kernel,
            (chunks, tiles, B),
            BLOCK,
            x_,
            partial.reshape(-1),
            P,
            N,
            lanes,
            chunk,
            0,
        )
        _sum_rows(version, partial, out, B, chunks, N, accumulate)


# Cost ---------------------------------------------------------------------------------------------


def column_sum_cost(M, N):
    """(bytes, FLOPs) of the sums of the columns of an (M, N) array."""
    return 4 * (M * N + N), M * N


def sample_sum_cost(B, P, C):
    return 4 * (B * P * C + B * C), B * P * C


# Operations ---------------------------------------------------------------------------------------


def sum_versions(fits):
    """The three versions of a sum; width: columns of a thread."""
    return [
        Version("naive", sum_rows_kernel_v1, width=1),
        Version("tree", sum_rows_kernel_v2, width=1),
        Version("vectorised", sum_rows_kernel_v3, width=4, fits=fits),
    ]


def _lacks_fours(x):
    """What v3 needs and x lacks; None if rows are made of fours."""
    return lacks_multiple(4, x.shape[-1], "columns")


def _check_column_sum(x, out):
    N = x.shape[-1]
    if out is not None and tuple(out.shape) != (N,):
        raise ValueError(
            f"column_sum adds {N} sums into `out`, whose shape {tuple(out.shape)} must be ({N},)"
        )


def _check_sample_sum(x):
    if x.ndim < 2:
        raise ValueError(f"sample_sum takes (B, ..., C), got shape {tuple(x.shape)}")


@operation(
    reference=column_sum_reference,
    cost=column_sum_cost,
    check=_check_column_sum,
    versions=sum_versions(_lacks_fours),
    problems=[
        Problem(x=single(37, 12)),
        Problem(x=single(3, 5, 7), out=single(7)),
        Problem(x=single(2, 5, 12), out=single(12)),
        Problem("two passes", x=single(1100, 8), versions=("tree", "vectorised")),
        Problem(x=single(1, 1), fast=False),
        Problem(x=single(2, 600, 33), fast=False),
        Problem(x=single(2, 1000, 516), fast=False),
        Problem(x=single(32 * 64 * 64, 64), measured=True),
    ],
)
def column_sum(x, out=None, version=None):
    """Sum over all axes but the last, as a new array (N,) float32; ADDED into `out`, if given (and
    returned)."""
    N = x.shape[-1]
    total = empty((N,), np.float32, like=x) if out is None else out
    _sum_rows(version, x, total, 1, x.size // N, N, out is not None)
    return total


@operation(
    reference=sample_sum_reference,
    cost=sample_sum_cost,
    check=_check_sample_sum,
    versions=sum_versions(_lacks_fours),
    problems=[
        Problem(x=single(2, 9, 8)),
        Problem(x=single(3, 5, 7)),
        Problem(x=single(1, 130)),
        Problem(x=single(2, 600, 33), fast=False),
        Problem(x=single(2, 1000, 516), fast=False),
        Problem(x=single(32, 64 * 64, 64), measured=True),
    ],
)
def sample_sum(x, version=None):
    """Sum over all axes but the first and the last: (B, ..., C) to a new array (B, C) float32."""
    B, C = x.shape[0], x.shape[-1]
    total = empty((B, C), np.float32, like=x)
    _sum_rows(version, x, total, B, x.size // (B * C), C, False)
    return total
