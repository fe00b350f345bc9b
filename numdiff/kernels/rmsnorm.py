"""RMSNorm: every row divided by the root of its mean square. LayerNorm without the mean, and
without the bias.

MATHEMATICS
        rstd = 1 / √(Σ_c x² / C + eps)          xhat = x · rstd          y = xhat · weight[c]
        (weight may be absent: 1)
    Backward, with h = dy · weight and averages over the row:
        dweight[c] += Σ_rows dy · xhat          dx = rstd · (h - xhat · average(h · xhat))
    Against LayerNorm (layernorm.py): y still does not change when x is scaled, but it does when a
    constant is added to x, as no mean is subtracted. So there is no mean to compute, store and
    read, the sum of squares needs no second sweep over the row, and of the backward's two averages
    one is left.
SHAPES
    x, y, dx, dy (..., C) float16, bfloat16 or float32; weight, dweight (C,) float32 or None; rstd (rows,) float32, rows
    the product of the other axes
VERSIONS
    v1 block-per-row: a block a row: its threads add in a tree in shared memory, nine barriers a sum.
    v2 warp-per-row: a warp a row: five shuffles a sum and no barrier; 16-byte loads of float32 (C a multiple of 4).
    v3 persistent: as many blocks as run at once, whose warps take every n-th row and keep weight and row in registers;
       a row's loads, 16 bytes each, are all issued before the first is used. The backward reads dy
       and x once: the sums for dweight stay in registers, too, until a block adds up its warps';
       and a warp loads its next row (of 16 bits) before it works on the one that has arrived. C a
       multiple of 8, up to 1280; sm_80.
LAUNCH
    v1 a block of 256 threads for every row, 1 KiB of shared memory; v2 256 threads for eight rows, none. v3 forward 256
    threads, four blocks a multiprocessor, fewer for long rows; backward 512, 384 or 256 threads, one block.
    dweight: v1 a thread a column; v2 grid (chunks of rows, column tiles), 256 threads, 4 KiB, then reduce.py; v3 with
    dx, 16 to 48 KiB, then reduce.py over the blocks.
DETERMINISM
    no atomics: trees, shuffles and partial sums have an order that the shape decides; in v3 the dtype and the number
    of multiprocessors, too.
COST
    of n float32. Forward: 8 n bytes (v1 and v2 read a row twice, from memory once). Backward: 12 n; v1 and v2 read 8 n
    more for dweight.
    Roof: memory bandwidth.
SOURCE
    Zhang and Sennrich 2019, "Root Mean Square Layer Normalization", arXiv:1910.07467, eq. 4. Shuffles: PTX ISA,
    section 9.7.9.6 (shfl.sync).
READ NEXT
    groupnorm/groups.py, where a group is many rows; transformer/adaln.py, where a norm and a modulation are one pass.
"""

import math

import numpy as np

from ..device import cuda, empty, empty_like, float32, int32, launch, load4, store4
from ..device.eight import fetch8, load8_into, numbers8, store8_from
from ..device.limits import WARP, multiprocessors_of
from ..device.requires import requires
from ..device.specialise import Constant, Variants, specialise
from ..dtypes import in_single, is_half
from .common import warp_sum
from .operation import Version, lacks_multiple, operation
from .problem import Problem, half, positive, single
from .reduce import BLOCK, column_sum_reference, cut, tree_sum
from .second_pass import add_rows

BLOCK4 = 4 * BLOCK  # shared elements for a sum in each of a thread's four columns
ROWS = BLOCK // WARP  # a block of version 2 takes eight rows
SWEEP = 8 * WARP  # columns that a warp of version 3 takes at a time
# each takes 32 of a backward thread's registers: words, weight and sums; more would not fit
MAX_SWEEPS = 5

SWEEPS = Constant()  # a warp's over its row: it has up to 256 · SWEEPS columns
KEPT = Constant(lambda SWEEPS: 8 * SWEEPS)  # numbers that a lane keeps
# whether a warp of the backward loads its next row before it works on one: in 16 bits
AHEAD = Constant()
THREADS = Constant(lambda AHEAD, SWEEPS: threads_of(AHEAD, SWEEPS))
ROW = Constant(lambda SWEEPS: SWEEPS * SWEEP)  # shared elements for one warp's sums
TILE = Constant(lambda THREADS, ROW: THREADS // WARP * ROW)  # … for those of every warp


# References ---------------------------------------------------------------------------------------


@in_single(1)
def rmsnorm_forward_reference(x, weight=None, eps=1e-6):
    rows = x.reshape(-1, x.shape[-1])
    rstd = (1 / np.sqrt(np.einsum("rc,rc->r", rows, rows) / rows.shape[1] + eps)).astype(
        x.dtype, copy=False
    )
    y = rows * rstd[:, None]
    if weight is not None:
        y *= weight
    return y.reshape(x.shape), rstd


@in_single()
def rmsnorm_backward_reference(dy, x, weight, rstd, dweight=None):
    g, xhat = dy.reshape(-1, x.shape[-1]), x.reshape(-1, x.shape[-1]) * rstd[:, None]
    if dweight is not None:
        dweight += column_sum_reference(g * xhat)
    h = g.copy() if weight is None else g * weight
    xhat *= (np.einsum("rc,rc->r", h, xhat) / x.shape[-1])[:, None]
    h -= xhat
    h *= rstd[:, None]
    return h.reshape(x.shape)


# v1: a block a row --------------------------------------------------------------------------------
# `weighted` is 0 where there is no weight; another array then stands in for it, and is not read.


@cuda.jit
def rmsnorm_forward_kernel_v1(x, weight, y, rstd, C, eps, weighted):
    tile = cuda.shared.array(BLOCK, float32)
    t, row = cuda.threadIdx.x, cuda.blockIdx.x
    total = float32(0)
    for c in range(t, C, BLOCK):
        v = float32(x[row * C + c])
        total += v * v
    tile[t] = total
    tree_sum(tile, 1, t, 1, BLOCK)
    r = float32(1) / math.sqrt(tile[0] / float32(C) + eps)
    for c in range(t, C, BLOCK):
        xhat = float32(x[row * C + c]) * r
        y[row * C + c] = xhat * weight[c] if weighted else xhat
    if t == 0:
        rstd[row] = r


@cuda.jit
def rmsnorm_backward_kernel_v1(dy, x, weight, rstd, dx, C, weighted):
    tile = cuda.shared.array(BLOCK, float32)
    t, row = cuda.threadIdx.x, cuda.blockIdx.x
    r = rstd[row]
    total = float32(0)
    for c in range(t, C, BLOCK):
        h = float32(dy[row * C + c]) * weight[c] if weighted else float32(dy[row * C + c])
        total += h * float32(x[row * C + c]) * r
    tile[t] = total
    tree_sum(tile, 1, t, 1, BLOCK)
    average = tile[0] / float32(C)
    for c in range(t, C, BLOCK):
        h = float32(dy[row * C + c]) * weight[c] if weighted else float32(dy[row * C + c])
        dx[row * C + c] = r * (h - float32(x[row * C + c]) * r * average)


@cuda.jit
def rmsnorm_parameter_kernel_v1(dy, x, rstd, dweight, rows, C):
    """dweight, a thread a column: as naive as version 1 of the sums in reduce.py."""
    c = cuda.grid(1)
    if c < C:
        total = float32(0)
        for row in range(rows):
            total += float32(dy[row * C + c]) * float32(x[row * C + c]) * rstd[row]
        dweight[c] += total


# v2: a warp a row ---------------------------------------------------------------------------------
# As in layernorm.py, with one sum where that has two: half the shuffles, and a row is read twice,
# not three times.


@cuda.jit
def rmsnorm_forward_kernel_v2(x, weight, y, rstd, rows, C, eps, weighted):
    lane = cuda.threadIdx.x % WARP
    row = cuda.blockIdx.x * ROWS + cuda.threadIdx.x // WARP
    if row < rows:  # the same for all lanes of a warp, so no shuffle misses one
        first = row * C
        total = float32(0)
        for c in range(lane * 4, C, WARP * 4):
            x0, x1, x2, x3 = load4(x, first + c)
            total += (x0 * x0 + x1 * x1) + (x2 * x2 + x3 * x3)
        r = float32(1) / math.sqrt(warp_sum(total) / float32(C) + eps)
        for c in range(lane * 4, C, WARP * 4):
            x0, x1, x2, x3 = load4(x, first + c)
            x0, x1, x2, x3 = x0 * r, x1 * r, x2 * r, x3 * r
            if weighted:
                w0, w1, w2, w3 = load4(weight, c)
                x0, x1, x2, x3 = x0 * w0, x1 * w1, x2 * w2, x3 * w3
            store4(y, first + c, x0, x1, x2, x3)
        if lane == 0:
            rstd[row] = r


@cuda.jit(device=True)
def load_row(dy, x, weight, i, c, r, weighted):
    """h = dy · weight and xhat of four columns."""
    h0, h1, h2, h3 = load4(dy, i)
    x0, x1, x2, x3 = load4(x, i)
    if weighted:
        w0, w1, w2, w3 = load4(weight, c)
        h0, h1, h2, h3 = h0 * w0, h1 * w1, h2 * w2, h3 * w3
    return h0, h1, h2, h3, x0 * r, x1 * r, x2 * r, x3 * r


@cuda.jit
def rmsnorm_backward_kernel_v2(dy, x, weight, rstd, dx, rows, C, weighted):
    lane = cuda.threadIdx.x % WARP
    row = cuda.blockIdx.x * ROWS + cuda.threadIdx.x // WARP
    if row < rows:
        first, r = row * C, rstd[row]
        total = float32(0)
        for c in range(lane * 4, C, WARP * 4):
            h0, h1, h2, h3, x0, x1, x2, x3 = load_row(dy, x, weight, first + c, c, r, weighted)
            total += (h0 * x0 + h1 * x1) + (h2 * x2 + h3 * x3)
        k = warp_sum(total) / float32(C)
        for c in range(lane * 4, C, WARP * 4):
            h0, h1, h2, h3, x0, x1, x2, x3 = load_row(dy, x, weight, first + c, c, r, weighted)
            store4(
                dx,
                first + c,
                r * (h0 - x0 * k),
                r * (h1 - x1 * k),
                r * (h2 - x2 * k),
                r * (h3 - x3 * k),
            )


@cuda.jit
def rmsnorm_parameter_kernel_v2(dy, x, rstd, partial, rows, C, lanes, chunk):
    """Σ dy · xhat of every column in every chunk of rows: (chunks, C)."""
    tile = cuda.shared.array(BLOCK4, float32)
    t = cuda.threadIdx.x
    rows_at_once = BLOCK // lanes
    row = t // lanes
    c = (cuda.blockIdx.y * lanes + t % lanes) * 4
    start = cuda.blockIdx.x * chunk
    s0 = s1 = s2 = s3 = float32(0)
    if row < rows_at_once and c < C:
        for r in range(start + row, min(start + chunk, rows), rows_at_once):
            g0, g1, g2, g3, x0, x1, x2, x3 = load_row(dy, x, dy, r * C + c, c, rstd[r], 0)
            s0 += g0 * x0
            s1 += g1 * x1
            s2 += g2 * x2
            s3 += g3 * x3
    tile[t], tile[BLOCK + t], tile[2 * BLOCK + t], tile[3 * BLOCK + t] = s0, s1, s2, s3
    tree_sum(tile, 4, t, lanes, rows_at_once)
    if row == 0 and c < C:
        store4(
            partial,
            cuda.blockIdx.x * C + c,
            tile[t],
            tile[BLOCK + t],
            tile[2 * BLOCK + t],
            tile[3 * BLOCK + t],
        )


# v3: warps that stay ------------------------------------------------------------------------------
# What is new: warps continue with further rows, so weight and sums stay in registers, and the
# backward is one pass. Why it pays: version 2 reads dy and x a second time for dweight, and the
# weight for every row; and half of its loads wait for the other half.


@cuda.jit(device=True, forceinline=True)
def keep_weight(weight, factors, numbers, c, C, weighted):
    """factors = the weights of a lane's columns c, c + 1 … of each sweep; ones where there is no
    weight."""
    for s in range(SWEEPS):
        for i in range(8):
            factors[8 * s + i] = float32(1)
        if weighted and c + s * SWEEP < C:
            load8_into(weight, c + s * SWEEP, numbers)
            for i in range(8):
                factors[8 * s + i] = numbers[i]


@requires("8.0")
def rmsnorm_forward_v3(x, weight, y, rstd, rows, C, eps, weighted):
    words, numbers = cuda.local.array((SWEEPS, 8), "uint32"), cuda.local.array(8, "float32")
    factors = cuda.local.array(KEPT, "float32")
    lane = int32(cuda.threadIdx.x % WARP)
    c, row = int32(lane * 8), cuda.grid(1) // WARP
    keep_weight(weight, factors, numbers, c, C, weighted)
    while row < rows:  # the same for all lanes of a warp
        first = row * C + c
        for s in range(SWEEPS):
            if c + s * SWEEP < C:
                fetch8(x, first + s * SWEEP, words[s])
        total = float32(0)
        for s in range(SWEEPS):
            if c + s * SWEEP < C:
                numbers8(x, words[s], numbers)
                for i in range(8):
                    total += numbers[i] * numbers[i]
        r = float32(1) / math.sqrt(warp_sum(total) / float32(C) + eps)
        for s in range(SWEEPS):
            if c + s * SWEEP < C:
                numbers8(x, words[s], numbers)
                for i in range(8):
                    numbers[i] = numbers[i] * r * factors[8 * s + i]
                store8_from(y, first + s * SWEEP, numbers)
        if lane == 0:
            rstd[row] = r
        row += cuda.gridsize(1) // WARP


@cuda.jit(device=True, forceinline=True)
def write_sums(partial, sums, c, C):
    """partial (blocks, C): the block's sums for dweight, from eight a thread and sweep. All threads
    call it."""
    tile = cuda.shared.array(TILE, float32)
    t, block = int32(cuda.threadIdx.x), cuda.blockIdx.x
    for s in range(SWEEPS):
        k, at = 8 * s, int32(t // WARP * ROW + s * SWEEP + c)
        store4(tile, at, sums[k], sums[k + 1], sums[k + 2], sums[k + 3])
        store4(tile, at + 4, sums[k + 4], sums[k + 5], sums[k + 6], sums[k + 7])
    cuda.syncthreads()
    for column in range(t, int32(C), int32(THREADS)):
        total = tile[column]
        for warp in range(1, THREADS // WARP):
            total += tile[warp * ROW + column]
        partial[block * C + column] = total


@cuda.jit(device=True, forceinline=True)
def fetch_row(array, words, first, c, C):
    """Load a lane's columns of a row; the first of them is array[first]."""
    for s in range(SWEEPS):
        if c + s * SWEEP < C:
            fetch8(array, first + s * SWEEP, words[s])


@cuda.jit(device=True, forceinline=True)
def keep_row(words, brought, c, C):
    """Move the row that has arrived, to make room for the next: in 16 bits, four words a sweep."""
    for s in range(SWEEPS):
        if c + s * SWEEP < C:
            for k in range(4):
                words[s, k] = brought[s, k]


@requires("8.0")
def rmsnorm_backward_v3(dy, x, weight, rstd, dx, partial, rows, C, weighted, needed):
    """dx, and if `needed` each block's sums Σ dy · xhat: partial (blocks, C)."""
    g_words, x_words = (
        cuda.local.array((SWEEPS, 8), "uint32"),
        cuda.local.array((SWEEPS, 8), "uint32"),
    )
    g_brought, x_brought = (
        cuda.local.array((SWEEPS, 8), "uint32"),
        cuda.local.array((SWEEPS, 8), "uint32"),
    )
    g, v = cuda.local.array(8, "float32"), cuda.local.array(8, "float32")
    factors, sums = cuda.local.array(KEPT, "float32"), cuda.local.array(KEPT, "float32")
    for i in range(KEPT):
        sums[i] = float32(0)
    c, row, step = (
        int32(cuda.threadIdx.x % WARP * 8),
        cuda.grid(1) // WARP,
        cuda.gridsize(1) // WARP,
    )
    r_brought = float32(0)
    if AHEAD and row < rows:
        fetch_row(dy, g_brought, row * C + c, c, C)
        fetch_row(x, x_brought, row * C + c, c, C)
        r_brought = rstd[row]
    keep_weight(weight, factors, g, c, C, weighted)
    while row < rows:  # the same for all lanes of a warp
        first, r = row * C + c, r_brought
        if AHEAD:
            keep_row(g_words, g_brought, c, C)
            keep_row(x_words, x_brought, c, C)
            if row + step < rows:
                fetch_row(dy, g_brought, first + step * C, c, C)
                fetch_row(x, x_brought, first + step * C, c, C)
                r_brought = rstd[row + step]
        else:
            fetch_row(dy, g_words, first, c, C)
            fetch_row(x, x_words, first, c, C)
            r = rstd[row]
        total = float32(0)
        for s in range(SWEEPS):
            if c + s * SWEEP < C:
                numbers8(dy, g_words[s], g)
                numbers8(x, x_words[s], v)
                for i in range(8):
                    p = g[i] * (v[i] * r)
                    sums[8 * s + i] += p
                    total += p * factors[8 * s + i]
        k = r * warp_sum(total) / float32(C)
        for s in range(SWEEPS):
            if c + s * SWEEP < C:
                numbers8(dy, g_words[s], g)
                numbers8(x, x_words[s], v)
                for i in range(8):
                    g[i] = r * (g[i] * factors[8 * s + i] - v[i] * k)
                store8_from(dx, first + s * SWEEP, g)
        row += step
    if needed:
        write_sums(partial, sums, c, C)


# a multiprocessor, by registers; 16 bits, float32
FORWARD_BLOCKS = {True: (4, 4, 4, 3, 2), False: (4, 4, 3, 2, 2)}


def blocks_of(rows, warps, most):
    """The fewest blocks of `warps` warps, at most `most`, that take no more turns of a row a warp
    than `most` would."""
    turns = -(-rows // (warps * most))
    return -(-rows // (warps * turns))


def threads_of(half, sweeps):
    """Threads of a backward block: as many as leave each the registers it needs."""
    if half:
        return 512 if sweeps <= 3 else 256
    return 512 if sweeps <= 3 else 384 if sweeps <= 4 else 256


FORWARD = Variants(
    [(half, n) for half in (True, False) for n in range(1, MAX_SWEEPS + 1)],
    lambda key: specialise(
        rmsnorm_forward_v3,
        name=f"rmsnorm_forward_kernel_v3_{key[1]}{'_half' * key[0]}",
        SWEEPS=key[1],
        launch_bounds=(BLOCK, FORWARD_BLOCKS[key[0]][key[1] - 1]),
    ),
)
BACKWARD = Variants(
    [(half, n) for half in (True, False) for n in range(1, MAX_SWEEPS + 1)],
    lambda key: specialise(
        rmsnorm_backward_v3,
        name=f"rmsnorm_backward_kernel_v3_{key[1]}{'_half' * key[0]}",
        AHEAD=key[0],
        SWEEPS=key[1],
        launch_bounds=(threads_of(*key), 1),
    ),
)


# Cost ---------------------------------------------------------------------------------------------


def rmsnorm_forward_cost(M, C):
    """(bytes, FLOPs) over M rows of C columns."""
    return 4 * 2 * M * C, 4 * M * C


def rmsnorm_backward_cost(M, C, parameters=True):
    """(bytes, FLOPs): dx from dy and x, and the sums for dweight on the way (partial sums are few
    bytes)."""
    n = M * C
    return 4 * 3 * n, n * (11 if parameters else 8)


# Operations ---------------------------------------------------------------------------------------


def _check(x, weight):
    C = x.shape[-1]
    if weight is not None and tuple(weight.shape) != (C,):
        raise ValueError(
            f"rmsnorm: weight must have shape ({C},), x's last axis, not {tuple(weight.shape)}"
        )


def _lacks_fours(x):
    """What v2 needs and x lacks; None if its rows are made of fours."""
    return lacks_multiple(4, x.shape[-1], "columns")


def _lacks_eights(x):
    """What v3 needs and x lacks; None if its rows are made of eights and fit into registers."""
    C, largest = x.shape[-1], SWEEP * MAX_SWEEPS
    return (
        f"takes a multiple of 8 columns, at most {largest}, not {C}"
        if C % 8 or C > largest
        else None
    )


def _three_versions(first, second, third, parameters=(None, None)):
    """The versions of a direction; parameters: the kernels for dweight of the first two."""
    return [
        Version("block-per-row", first, parameters=parameters[0]),
        Version("warp-per-row", second, parameters=parameters[1], fits=_lacks_fours),
        Version(
            "persistent",
            third,
            fits=_lacks_eights,
            requires="8.0",
            dtypes=("float32", "float16", "bfloat16"),
        ),
    ]


def _statistics(arrays):
    """rstd of the rows of a problem's x."""
    return {"rstd": rmsnorm_forward_reference(arrays["x"])[1]}


def _problems(make):
    """The small problems of a direction, of which `make` makes one."""
    wide = [
        make(
            2,
            C,
            array=array,
            fast=(C, array) == (1032, single) or C == 40,
            versions=("persistent",),
            # a kernel each
            bfloat16=C == 40,
        )
        for array in (single, half)
        for C in (40, 264, 520, 776, 1032)
    ]
    return [
        make(5, 36),
        make(5, 36, array=half, bfloat16=True),
        make(2, 5, 33, weighted=False),
        make(3, 16),
        *wide,
        make(7, 1156, fast=False),
    ]


def forward_problem(*shape, array=single, weighted=True, **more):
    return Problem(x=array(*shape), weight=single(shape[-1]) if weighted else None, **more)


def backward_problem(*shape, array=single, weighted=True, **more):
    """The gradient is added to numbers that are there."""
    vector = single(shape[-1])
    return Problem(
        dy=array(*shape),
        x=array(*shape),
        weight=vector if weighted else None,
        dweight=vector,
        derived=_statistics,
        **more,
    )


TOKENS, WIDTH = half(64 * 256, 768), single(768)  # of a DiT, for the benchmark


@operation(
    reference=rmsnorm_forward_reference,
    cost=rmsnorm_forward_cost,
    check=_check,
    versions=_three_versions(rmsnorm_forward_kernel_v1, rmsnorm_forward_kernel_v2, FORWARD),
    problems=[*_problems(forward_problem), Problem(x=TOKENS, weight=WIDTH, measured=True)],
)
def rmsnorm_forward(x, weight=None, eps=1e-6, version=None):
    """(y (..., C) of x's dtype, rstd (rows,) float32) of x (..., C); weight (C,) or None."""
    C, rows = x.shape[-1], x.size // x.shape[-1]
    y, rstd, weighted, x_ = (
        empty_like(x),
        empty((rows,), np.float32, like=x),
        int(weight is not None),
        x.reshape(-1),
    )
    arrays = x_, weight if weighted else x_, y.reshape(-1), rstd
    if version.name == "block-per-row":
        launch(version.kernel, rows, BLOCK, *arrays, C, float(eps), weighted)
    elif version.name == "warp-per-row":
        launch(version.kernel, -(-rows // ROWS), BLOCK, *arrays, rows, C, float(eps), weighted)
    else:
        key = in_half, sweeps = is_half(x.dtype), -(-C // SWEEP)
        blocks = blocks_of(rows, ROWS, FORWARD_BLOCKS[in_half][sweeps - 1] * multiprocessors_of(x))
        launch(version.kernel[key], blocks, BLOCK, *arrays, rows, C, float(eps), weighted)
    return y, rstd


@operation(
    reference=rmsnorm_backward_reference,
    cost=rmsnorm_backward_cost,
    check=_check,
    versions=_three_versions(
        rmsnorm_backward_kernel_v1,
        rmsnorm_backward_kernel_v2,
        BACKWARD,
        parameters=(rmsnorm_parameter_kernel_v1, rmsnorm_parameter_kernel_v2),
    ),
    problems=[
        *_problems(backward_problem),
        Problem(
            dy=TOKENS, x=TOKENS, weight=WIDTH, rstd=positive(64 * 256), dweight=WIDTH, measured=True
        ),
    ],
    writes=("dweight",),
)
def rmsnorm_backward(dy, x, weight, rstd, dweight=None, version=None):
    """dx (..., C), of x's dtype; the weight's gradient is added into `dweight` (C,) float32 (None:
    not wanted)."""
    C, rows = x.shape[-1], x.size // x.shape[-1]
    dx, dy_, x_, weighted = empty_like(x), dy.reshape(-1), x.reshape(-1), int(weight is not None)
    arrays = dy_, x_, weight if weighted else x_, rstd, dx.reshape(-1)
    if version.name == "persistent":
        key = is_half(x.dtype), -(-C // SWEEP)
        threads, needed = threads_of(*key), int(dweight is not None)
        blocks = blocks_of(rows, threads // WARP, multiprocessors_of(x))
        # which no thread writes
        partial = empty((blocks, C), np.float32, like=x) if needed else rstd
        launch(
            version.kernel[key],
            blocks,
            threads,
            *arrays,
            partial.reshape(-1),
            rows,
            C,
            weighted,
            needed,
        )
        if needed:
            add_rows(partial, dweight)
        return dx
    if version.name == "block-per-row":
        launch(version.kernel, rows, BLOCK, *arrays, C, weighted)
    else:
        launch(version.kernel, -(-rows // ROWS), BLOCK, *arrays, rows, C, weighted)
    if dweight is None:
        return dx
    if version.name == "block-per-row":
        launch(version.parameters, -(-C // BLOCK), BLOCK, dy_, x_, rstd, dweight, rows, C)
    else:
        lanes, tiles, chunk, chunks = cut(1, rows, C, 4)
        partial = empty((chunks, C), np.float32, like=x)
        launch(
            version.parameters,
            (chunks, tiles),
            BLOCK,
            dy_,
            x_,
            rstd,
            partial.reshape(-1),
            rows,
            C,
            lanes,
            chunk,
        )
        add_rows(partial, dweight)
    return dx
