"""RMSNorm: every row divided by the root of its mean square. LayerNorm without the mean, and
without the bias.

MATHEMATICS
        rstd = 1 / √(Σ_c x² / C + eps)          xhat = x · rstd          y = xhat · weight[c]
        (weight may be absent: 1)
    Backward, with h = dy · weight and averages over the row:
        dweight[c] += Σ_rows dy · xhat          dx = rstd · (h - xhat · average(h · xhat))
    Against LayerNorm (extras/layer_norm/layernorm.py): y still does not change when x is scaled, but it does when a
    constant is added to x, as no mean is subtracted. So there is no mean to compute, store and
    read, the sum of squares needs no second sweep over the row, and of the backward's two averages
    one is left.
SHAPES
    x, y, dx, dy (..., C) float16, bfloat16 or float32; weight, dweight (C,) float32 or None; rstd (rows,) float32, rows
    the product of the other axes
VERSIONS
    v1 block-per-row, v2 warp-per-row: kernels/norms/row_norm.py.
    v3 persistent: as many blocks as run at once, whose warps take every n-th row and keep weight and row in registers;
       a row's loads, 16 bytes each, are all issued before the first is used. The backward reads dy
       and x once: the sums for dweight stay in registers, too, until a block adds up its warps';
       and a warp loads its next row (of 16 bits) before it works on the one that has arrived. C a
       multiple of 8, up to 1280; sm_80.
LAUNCH
    v1 and v2 as kernels/norms/row_norm.py. v3 forward 256 threads, four blocks a multiprocessor,
    fewer for long rows; backward 512, 384 or 256 threads, one block.
    dweight: v1 a thread a column; v2 grid (chunks of rows, column tiles), 256 threads, 4 KiB, then
    kernels/reduce/trees.py; v3 with dx, 16 to 48 KiB, then kernels/reduce/trees.py over the blocks.
DETERMINISM
    no atomics: trees, shuffles and partial sums have an order that the shape decides; in v3 the dtype and the number
    of multiprocessors, too.
COST
    of n float32. Forward: 8 n bytes (v1 and v2 read a row twice, from memory once). Backward: 12 n; v1 and v2 read 8 n
    more for dweight.
    Roof: memory bandwidth.
SOURCE
    Zhang and Sennrich 2019, "Root Mean Square Layer Normalization", arXiv:1910.07467, eq. 4.
READ NEXT
    kernels/transformer/adaln.py, where a norm and a modulation are one pass.
"""

import math

import numpy as np

from ...device import cuda, empty, empty_like, float32, int32, launch, store4
from ...device.common import warp_sum
from ...device.eight import fetch8, load8_into, numbers8, store8_from
from ...device.limits import WARP, multiprocessors_of
from ...device.requires import requires
from ...device.specialise import Constant, Variants, specialise
from ...dtypes import in_single, is_half
from ...kernels.norms.row_norm import (
    BACKWARD,
    FORWARD,
    RMSNORMS,
    add_parameter_gradients,
    launch_rows,
    row_versions,
)
from ...kernels.operation import Problem, Version, half, operation, positive, single
from ...kernels.reduce.second_pass import add_rows
from ...kernels.reduce.trees import BLOCK, column_sum_reference

ROWS = BLOCK // WARP  # that a block of the forward works on at once
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


@requires("7.5")
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


@requires("7.5")
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


PERSISTENT_FORWARD = Variants(
    [(half, n) for half in (True, False) for n in range(1, MAX_SWEEPS + 1)],
    lambda key: specialise(
        rmsnorm_forward_v3,
        name=f"rmsnorm_forward_kernel_v3_{key[1]}{'_half' * key[0]}",
        SWEEPS=key[1],
        launch_bounds=(BLOCK, FORWARD_BLOCKS[key[0]][key[1] - 1]),
    ),
)
PERSISTENT_BACKWARD = Variants(
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


def _lacks_eights(x):
    """What v3 needs and x lacks; None if its rows are made of eights and fit into registers."""
    C, largest = x.shape[-1], SWEEP * MAX_SWEEPS
    return (
        f"takes a multiple of 8 columns, at most {largest}, not {C}"
        if C % 8 or C > largest
        else None
    )


def _three_versions(kernels, persistent):
    """The versions of a direction."""
    return [
        *row_versions(kernels),
        Version(
            "persistent",
            persistent,
            fits=_lacks_eights,
            requires="7.5",
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
        make(3, 20, weighted=False, fast=False, versions=("warp-per-row",)),
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
    versions=_three_versions(FORWARD, PERSISTENT_FORWARD),
    problems=[*_problems(forward_problem), Problem(x=TOKENS, weight=WIDTH, measured=True)],
)
def rmsnorm_forward(x, weight=None, eps=1e-6, version=None):
    """(y (..., C) of x's dtype, rstd (rows,) float32) of x (..., C); weight (C,) or None."""
    C, rows = x.shape[-1], x.size // x.shape[-1]
    y, rstd, x_ = empty_like(x), empty((rows,), np.float32, like=x), x.reshape(-1)
    y_, weighted, weight_ = y.reshape(-1), weight is not None, x_ if weight is None else weight
    if version.name != "persistent":  # what stands for an absent array is not read
        arrays = x_, x_, (weight_,), y_, rstd, rstd
        launch_rows(version, RMSNORMS[weighted], rows, rows, C, arrays, float(eps))
        return y, rstd
    key = in_half, sweeps = is_half(x.dtype), -(-C // SWEEP)
    blocks = blocks_of(rows, ROWS, FORWARD_BLOCKS[in_half][sweeps - 1] * multiprocessors_of(x))
    launch(
        version.kernel[key],
        blocks,
        BLOCK,
        x_,
        weight_,
        y_,
        rstd,
        rows,
        C,
        float(eps),
        int(weighted),
    )
    return y, rstd


@operation(
    reference=rmsnorm_backward_reference,
    cost=rmsnorm_backward_cost,
    check=_check,
    versions=_three_versions(BACKWARD, PERSISTENT_BACKWARD),
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
    dx, dy_, x_, weighted = empty_like(x), dy.reshape(-1), x.reshape(-1), weight is not None
    dx_, weight_ = dx.reshape(-1), weight if weighted else x_
    if version.name != "persistent":
        arrays = dy_, x_, (weight_,), rstd, rstd, dx_
        launch_rows(version, RMSNORMS[weighted], rows, rows, C, arrays)
        add_parameter_gradients(version, dy, x, rstd, rstd, dweight)
        return dx
    key = is_half(x.dtype), -(-C // SWEEP)
    threads, needed = threads_of(*key), int(dweight is not None)
    blocks = blocks_of(rows, threads // WARP, multiprocessors_of(x))
    # which no thread writes
    partial = empty((blocks, C), np.float32, like=x) if needed else rstd
    launch(
        version.kernel[key],
        blocks,
        threads,
        dy_,
        x_,
        weight_,
        rstd,
        dx_,
        partial.reshape(-1),
        rows,
        C,
        int(weighted),
        needed,
    )
    if needed:
        add_rows(partial, dweight)
    return dx
