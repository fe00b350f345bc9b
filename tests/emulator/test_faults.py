"""Faults planted in small copies of this project's kernels: each is found, where it is, in each
order of the threads.

Every kernel here is made with a fault or without; without, there must be no report and the right
result.
"""

import linecache
from dataclasses import dataclass

import numpy as np
import pytest

from numdiff.device import cuda, float32, int32, load4, store4, upload
from numdiff.device.async_copy import cp_async_16, cp_async_commit, cp_async_wait, shared_address
from numdiff.device.emulator import EmulatorDevice
from numdiff.emulator import EmulatedArray, KernelFault
from numdiff.extras.kernel_check import run as check
from numdiff.extras.kernel_check.run import run_once
from numdiff.kernels.matmul import matmul_forward
from tests.conftest import THREAD_ORDERS, exhaustively
from tests.emulator.planting import copies, fault_at, faults_of, listed, marked, race_between, run  # noqa: F401

TILE = 4
ALL = 0xFFFFFFFF
ONE_AND_A_HALF = 1.5


def tiled_matmul(fault):
    @cuda.jit
    def matmul_kernel(a, b, c, n):
        a_tile = cuda.shared.array((TILE, TILE), float32)
        b_tile = cuda.shared.array((TILE, TILE), float32)
        x, y = cuda.threadIdx.x, cuda.threadIdx.y
        row, column = cuda.blockIdx.y * TILE + y, cuda.blockIdx.x * TILE + x
        total = float32(0)
        for k in range(0, n, TILE):
            a_tile[y, x] = a[row, k + x] if row < n and k + x < n else float32(0)  # load a
            b_tile[y, x] = b[k + y, column] if k + y < n and column < n else float32(0)  # load b
            if fault != "no barrier after the load":
                cuda.syncthreads()
            for i in range(TILE):
                total += a_tile[y, i] * b_tile[i, x]  # use
            if fault != "no barrier before the next load":
                cuda.syncthreads()
        inside = row <= n and column < n if fault == "guard off by one" else row < n and column < n
        if inside:
            c[row, column] = total  # result

    return matmul_kernel


def row_maximum(fault):
    """As softmax v1: a block a row, a tree in shared memory."""

    @cuda.jit
    def maximum_kernel(x, y, n):
        shared = cuda.shared.array(64, float32)
        row, t = cuda.blockIdx.x, cuda.threadIdx.x
        largest = float32(-3e38)
        for i in range(t, n, 64):
            largest = max(largest, x[row * n + i])
        if fault != "a shared element is not written" or t < n:
            shared[t] = largest
        cuda.syncthreads()
        half = 32
        while half > 0:
            if t < half:
                shared[t] = max(shared[t], shared[t + half])  # fold
                if fault == "barrier in a branch":
                    cuda.syncthreads()  # barrier in the branch
            if fault != "barrier in a branch":
                cuda.syncthreads()
            half //= 2
        if fault == "two threads write" and t < 2:
            y[row] = float32(t)  # both
        elif fault == "untyped literal" and t == 0:
            y[row] = shared[0] * ONE_AND_A_HALF / 1.5  # float64
        elif t == 0:
            y[row] = shared[0]

    return maximum_kernel


def column_differences(fault):
    @cuda.jit
    def difference_kernel(x, y, n):
        i = cuda.grid(1)
        if fault == "negative index":
            if i < n:
                y[i] = x[i] - x[i - 1]  # before the first
        elif fault == "guard off by one, read":
            if i < n:
                y[i] = x[i] - x[i + 1] if i <= n - 1 else float32(0)  # behind the last
        elif 0 < i < n:
            y[i] = x[i] - x[i - 1]

    return difference_kernel


def accumulate(fault):
    """As im2col's backward: each thread owns an output; at fault, it adds to what is not there."""

    @cuda.jit
    def add_kernel(x, y, n):
        i = cuda.grid(1)
        if i < n:
            if fault is None:
                y[i] = float32(0)
            y[i] += x[i]  # nothing to add to

    return add_kernel


def pipeline(fault):
    """Three stages of cp.async as in a GEMM, with one row of 16 bytes for each thread."""
    pending = 2 if fault == "waits for a group too few" else 1

    @cuda.jit
    def pipeline_kernel(x, y, steps):
        stages = cuda.shared.array(3 * 128, float32, alignment=16)
        address = shared_address(stages)
        t = cuda.threadIdx.x
        for s in range(2):
            cp_async_16(address + 16 * (32 * s + t), x, int32(4 * (32 * s + t)))
            cp_async_commit()
        total = float32(0)
        for s in range(steps):
            if fault != "no wait":
                cp_async_wait(pending)
            if fault != "no barrier after the wait":
                cuda.syncthreads()
            if s + 2 < steps:
                ahead = s + (3 if fault == "refills what is read" else 2)
                # refill
                cp_async_16(address + 16 * (32 * (ahead % 3) + t), x, int32(4 * (32 * (s + 2) + t)))
            if fault != "no commit":
                cp_async_commit()
            elif s == 0:
                cp_async_commit()
            for i in range(4):
                total += stages[128 * (s % 3) + 4 * (31 - t) + i]  # read
        y[t] = total

    return pipeline_kernel


def warp_sum(fault):
    @cuda.jit
    def warp_sum_kernel(x, y, n):
        t = cuda.threadIdx.x
        value = x[t]
        if fault == "lanes have ended" and t >= n:
            return
        if fault == "half of the lanes":
            if t % 32 < 16:
                value += cuda.shfl_xor_sync(ALL, value, 8)  # half
        distance = 16
        while distance > 0:
            mask = 0xFFFF if fault == "lanes outside of the mask" else ALL
            value += cuda.shfl_xor_sync(mask, value, distance)  # shuffle
            distance //= 2
        if fault == "half of the lanes":
            cuda.syncthreads()  # the others
        y[t] = value

    return warp_sum_kernel


def accumulator_tile(fault):
    """Two warps, each with eight rows of a result that is summed in shared memory."""

    @cuda.jit
    def accumulator_kernel(a, y):
        tile = cuda.shared.array((16, 8), float32)
        warp, lane = cuda.threadIdx.x // 32, cuda.threadIdx.x % 32
        row, column = lane // 8, lane % 8
        first = 4 * warp if fault == "warps overlap" else 8 * warp
        for i in range(0, 8, 4):
            tile[first + row + i, column] = float32(0)  # zero
        if fault == "warps overlap":
            cuda.syncthreads()
        for k in range(2):
            for i in range(0, 8, 4):
                tile[first + row + i, column] += a[k, column] + float32(warp)  # add
        cuda.syncthreads()
        for r in range(warp, 16, 2):
            if lane < 8 and (fault is None or r < 12):
                y[r, lane] = tile[r, lane]

    return accumulator_kernel


def neighbours(fault):
    """Blocks that each write a part of y and read one of their neighbour's."""

    @cuda.jit
    def neighbour_kernel(x, y, z):
        i = cuda.grid(1)
        y[i] = x[i] * x[i]  # mine
        if fault is None:
            z[i] = y[i]
        else:
            z[i] = y[(i + cuda.blockDim.x) % len(y)]  # theirs

    return neighbour_kernel


def warp_exchange(fault):
    @cuda.jit
    def exchange_kernel(x, y):
        shared = cuda.shared.array(64, float32)
        t = cuda.threadIdx.x
        shared[t] = x[t]  # put
        if fault != "no syncwarp":
            cuda.syncwarp()
        y[t] = shared[t ^ 1]  # get
        if fault != "no second syncwarp":
            cuda.syncwarp()
        shared[t] = y[t] + float32(1)  # again

    return exchange_kernel


def vector_copy(fault):
    @cuda.jit
    def vector_kernel(x, y, n):
        i = cuda.grid(1) * 4
        if fault == "misaligned load":
            i += 2
        if i + 3 < n:
            a, b, c, d = load4(x, i)  # load 16
            if fault == "misaligned store":
                store4(y, i + 1, a, b, c, d)  # store 16
            else:
                store4(y, i, a, b, c, d)
        elif fault == "vector tail" and i < n:
            a, b, c, d = load4(x, i)  # tail
            store4(y, i, a, b, c, d)

    return vector_kernel


def handshake(fault):
    """Warp 0 announces a value to warp 1 by a flag in shared memory."""

    @cuda.jit
    def handshake_kernel(y):
        shared = cuda.shared.array(1, int32)
        t = cuda.threadIdx.x
        if t == 0:
            shared[0] = 0
        cuda.syncthreads()
        if fault is not None:
            if t < 32:
                cuda.syncthreads()  # warp 0 waits
                cuda.atomic.add(shared, 0, 1)
            else:
                while cuda.atomic.add(shared, 0, 0) == 0:  # warp 1 waits
                    pass
                cuda.syncthreads()
        else:
            if t == 0:
                cuda.atomic.add(shared, 0, 1)
            if t >= 32:
                while cuda.atomic.add(shared, 0, 0) == 0:
                    pass
            cuda.syncthreads()
        y[t] = shared[0]

    return handshake_kernel


def two_barriers(fault):
    @cuda.jit
    def barriers_kernel(x, y):
        shared = cuda.shared.array(64, float32)
        t = cuda.threadIdx.x
        shared[t] = x[t]
        if fault == "different barriers" and t >= 32:
            cuda.syncthreads()  # the other barrier
        elif fault == "some have ended" and t >= 48:
            return
        else:
            cuda.syncthreads()  # the barrier
        y[t] = shared[63 - t]

    return barriers_kernel


# The cases ----------------------------------------------------------------------------------------


def _matrices(n):
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal((n, n)).astype(np.float32) for _ in range(2))
    c = np.zeros((n, n), np.float32)
    blocks = -(-n // TILE)
    return (blocks, blocks), (TILE, TILE), (a, b, c, n), lambda: np.abs(c - a @ b).max() < 1e-5


def _rows(n):
    x, y = (
        np.random.default_rng(1).standard_normal((2, n)).astype(np.float32),
        np.zeros(2, np.float32),
    )
    return 2, 64, (x.reshape(-1), y, n), lambda: np.array_equal(y, x.max(1))


def _columns(n):
    x, y = np.random.default_rng(2).standard_normal(n).astype(np.float32), np.zeros(n, np.float32)
    return 3, 8, (x, y, n), lambda: np.array_equal(y[1:], np.diff(x))


def _unwritten(n):
    x, y = np.arange(n, dtype=np.float32), EmulatedArray(n, np.float32)
    return 2, 8, (x, y, n), lambda: np.array_equal(y.copy_to_host(), x)


def _stages(steps):
    x, y = np.arange(128 * steps, dtype=np.float32), np.zeros(32, np.float32)
    return (
        1,
        32,
        (x, y, steps),
        lambda: np.array_equal(y, x.reshape(steps, 32, 4).sum((0, 2))[::-1]),
    )


def _lanes(n):
    x, y = np.arange(32, dtype=np.float32), np.zeros(32, np.float32)
    return 1, 32, (x, y, n), lambda: (y == x.sum()).all()


def _accumulator():
    a, y = (
        np.random.default_rng(3).standard_normal((2, 8)).astype(np.float32),
        np.zeros((16, 8), np.float32),
    )
    want = np.repeat([a[0] + a[1], a[0] + np.float32(1) + (a[1] + np.float32(1))], 8, 0)
    return 1, 64, (a, y), lambda: np.allclose(y, want)


def _two(n, z=True):
    x = np.random.default_rng(4).standard_normal(n).astype(np.float32)
    return x, *(np.zeros(n, np.float32) for _ in range(1 + z))


def _neighbours():
    x, y, z = _two(16)
    return 2, 8, (x, y, z), lambda: np.array_equal(z, x * x)


def _exchange():
    x, y = _two(64, False)
    return 1, 64, (x, y), lambda: np.array_equal(y, x.reshape(32, 2)[:, ::-1].ravel())


def _vectors(n):
    x, y = _two(n, False)
    return 1, 8, (x, y, n), lambda: np.array_equal(y[: n // 4 * 4], x[: n // 4 * 4])


def _flags():
    y = np.zeros(64, np.int32)
    return 1, 64, (y,), lambda: (y == 1).all()


def _halves():
    x, y = _two(64, False)
    return 1, 64, (x, y), lambda: np.array_equal(y, x[::-1])


@dataclass
class Planted:
    """A fault: its kernel, its launch, and what must be found: marks of a race's two lines, or of
    one line.

    thread: in the order "forward"; everywhere: in all orders; block: None if it may be any
    """

    kernel: object
    fault: str
    launch: object
    kind: str
    marks: tuple
    thread: tuple = (0, 0, 0)
    block: tuple = (0, 0, 0)
    everywhere: bool = False


PLANTED = [
    Planted(
        tiled_matmul,
        "no barrier after the load",
        lambda: _matrices(8),
        "race",
        ("load a", "use"),
        (1, 0, 0),
    ),
    Planted(
        tiled_matmul,
        "no barrier after the load",
        lambda: _matrices(8),
        "race",
        ("load b", "use"),
        (0, 1, 0),
    ),
    Planted(
        tiled_matmul,
        "no barrier before the next load",
        lambda: _matrices(8),
        "race",
        ("use", "load a"),
        (1, 0, 0),
    ),
    Planted(
        tiled_matmul,
        "guard off by one",
        lambda: _matrices(7),
        "bounds",
        ("result",),
        (0, 3, 0),
        (0, 1, 0),
    ),
    Planted(
        row_maximum,
        "barrier in a branch",
        lambda: _rows(70),
        "divergence",
        ("barrier in the branch",),
    ),
    Planted(
        row_maximum,
        "a shared element is not written",
        lambda: _rows(50),
        "uninitialised",
        ("fold",),
        (18, 0, 0),
    ),
    Planted(row_maximum, "two threads write", lambda: _rows(70), "race", ("both",), (1, 0, 0)),
    Planted(
        row_maximum,
        "untyped literal",
        lambda: _rows(70),
        "float64",
        ("float64",),
        everywhere=True,
        block=None,
    ),
    Planted(
        column_differences,
        "negative index",
        lambda: _columns(19),
        "bounds",
        ("before the first",),
        everywhere=True,
    ),
    Planted(
        column_differences,
        "guard off by one, read",
        lambda: _columns(19),
        "bounds",
        ("behind the last",),
        (2, 0, 0),
        (2, 0, 0),
        everywhere=True,
    ),
    Planted(
        accumulate, "not zeroed", lambda: _unwritten(13), "uninitialised", ("nothing to add to",)
    ),
    Planted(pipeline, "no wait", lambda: _stages(4), "cp.async", ("read",)),
    Planted(pipeline, "waits for a group too few", lambda: _stages(4), "cp.async", ("read",)),
    Planted(pipeline, "no commit", lambda: _stages(4), "cp.async", ("read",)),
    Planted(
        pipeline, "no barrier after the wait", lambda: _stages(4), "race", ("refill", "read"), None
    ),
    Planted(
        pipeline, "refills what is read", lambda: _stages(4), "cp.async", ("read",), (16, 0, 0)
    ),
    Planted(
        warp_sum, "lanes have ended", lambda: _lanes(20), "divergence", ("shuffle",), (4, 0, 0)
    ),
    Planted(warp_sum, "half of the lanes", lambda: _lanes(32), "divergence", ("half", "shuffle")),
    Planted(
        warp_sum, "lanes outside of the mask", lambda: _lanes(32), "divergence", ("shuffle",), None
    ),
    Planted(accumulator_tile, "warps overlap", _accumulator, "race", ("add",), (32, 0, 0)),
    Planted(
        neighbours,
        "reads another block's",
        _neighbours,
        "race",
        ("mine", "theirs"),
        (0, 0, 0),
        (1, 0, 0),
    ),
    Planted(warp_exchange, "no syncwarp", _exchange, "race", ("put", "get"), (1, 0, 0)),
    Planted(warp_exchange, "no second syncwarp", _exchange, "race", ("get", "again"), None),
    Planted(vector_copy, "misaligned load", lambda: _vectors(32), "alignment", ("load 16",)),
    Planted(vector_copy, "misaligned store", lambda: _vectors(64), "alignment", ("store 16",)),
    Planted(
        vector_copy,
        "vector tail",
        lambda: _vectors(30),
        "bounds",
        ("tail",),
        (7, 0, 0),
        everywhere=True,
    ),
    Planted(handshake, "waits for each other", _flags, "divergence", ("warp 0 waits",)),
    Planted(
        two_barriers,
        "different barriers",
        _halves,
        "divergence",
        ("the barrier", "the other barrier"),
    ),
    Planted(two_barriers, "some have ended", _halves, "divergence", ("the barrier",), None),
]
CASES = pytest.mark.parametrize(
    "case", PLANTED, ids=[f"{c.kernel.__name__}: {c.fault}, {' – '.join(c.marks)}" for c in PLANTED]
)


@THREAD_ORDERS
@CASES
def test_a_planted_fault_is_found(case, order):
    kernel, (grid, block, arguments, _) = case.kernel(case.fault), case.launch()
    options = {"float64": False} if case.kind == "float64" else {}
    faults = faults_of(kernel, grid, block, *arguments, order=order, patience=0.2, **options)
    lines = [marked(__file__, mark) for mark in case.marks]
    if case.kind == "race":
        fault = race_between(faults, __file__, *lines)
    elif len(lines) == 2:  # at one of them, and the other is named
        fault = next(f for f in faults if f.kind == case.kind)
        assert {fault.line, *(place.line for _, place in fault.others)} == set(lines), listed(
            faults
        )
    else:
        fault = fault_at(faults, case.kind, __file__, lines[0])
    assert fault.file == __file__ and fault.kernel == kernel.py_func.__name__
    if (order == "forward" or case.everywhere) and case.thread is not None:
        assert fault.thread == case.thread, str(fault)
        assert case.block is None or fault.block == case.block, str(fault)


@THREAD_ORDERS
@pytest.mark.parametrize(
    "maker, launch",
    {c.kernel: c.launch for c in PLANTED}.items(),
    ids=[k.__name__ for k in {c.kernel: 0 for c in PLANTED}],
)
def test_without_the_fault_there_is_no_report(maker, launch, order):
    grid, block, arguments, right = launch()
    run(maker(None), grid, block, *arguments, order=order)
    assert right()


# faults planted in copies of the project's own kernels --------------------------------------------


@dataclass
class InKernel:
    """A change in a module of numdiff.kernels, or one with its full name, and the fault that it
    makes.

    case, version: of numdiff.extras.kernel_check; marks: what the fault's line contains (a race's two
    lines, or one)
    """

    module: str
    before: str
    after: str
    case: str
    version: int
    kind: str
    marks: tuple
    which: int = 0


BARRIER, NONE = "cuda.syncthreads()", "pass"
SLA = "numdiff.extras.sla.kernels.choice"
IN_KERNELS = {
    "softmax, tree": InKernel(
        "softmax",
        BARRIER,
        NONE,
        "softmax",
        1,
        "race",
        ("shared[t] = max(", "result = shared[0]"),
        1,
    ),
    "softmax, next call": InKernel(
        "softmax",
        BARRIER,
        NONE,
        "softmax",
        1,
        "race",
        ("result = shared[0]", "shared[t] = value"),
        2,
    ),
    "softmax, a row too many": InKernel(
        "softmax",
        "row < rows",
        "row <= rows",
        "softmax",
        2,
        "bounds",
        ("largest, total = include(",),
    ),
    "softmax, half a warp": InKernel(
        "softmax",
        "mean = warp_sum(mean)",
        "mean = warp_sum(mean) if lane < 16 else mean",
        "softmax_backward",
        2,
        "divergence",
        ("value += cuda.shfl_xor_sync",),
    ),
    "softmax, untyped zero": InKernel(
        "softmax",
        "total = float32(0)",
        "total = 0.0",
        "softmax",
        1,
        "float64",
        ("total += math.exp",),
    ),
    "softmax, off by a lane": InKernel(
        "softmax",
        "range(4 * lane, N",
        "range(4 * lane + 1, N",
        "softmax",
        3,
        "alignment",
        ("x0, x1, x2, x3 = load4(x",),
    ),
    "reduce, before the tree": InKernel(
        "reduce.trees",
        "cuda.syncthreads()\n        if t <",
        "if t <",
        "column_sum",
        2,
        "race",
        ("tile[plane * BLOCK", "tile[t] = total"),
    ),
    "reduce, barrier in the branch": InKernel(
        "reduce.trees",
        "cuda.syncthreads()\n        if t < (left - half) * lanes:\n",
        "if t < (left - half) * lanes:\n            cuda.syncthreads()\n",
        "column_sum",
        2,
        "divergence",
        ("            cuda.syncthreads()",),
    ),
    "reduce, a row too many": InKernel(
        "reduce.trees",
        "min(start + chunk, P), rows):",
        "min(start + chunk, P) + 1, rows):",
        "column_sum",
        2,
        "bounds",
        ("total += ",),
    ),
    "reduce, adds to what is not there": InKernel(
        "reduce.trees",
        "tile[t] if accumulate",
        "tile[t] if True",
        "column_sum",
        2,
        "uninitialised",
        ("out[i] = out[i]",),
    ),
    "reduce, all chunks to one place": InKernel(
        "reduce.trees",
        "i = (b * cuda.gridDim.x + cuda.blockIdx.x) * N",
        "i = b * cuda.gridDim.x * N",
        "column_sum two passes",
        2,
        "race",
        ("out[i] = out[i] + tile[t] if",),
    ),
    "norm, barrier": InKernel(
        "optimizer.grad_norm",
        BARRIER,
        NONE,
        "global_norm",
        1,
        "race",
        ("partial[k] = value", "partial[k] += partial[k"),
        0,
    ),
    "norm, early end": InKernel(
        "optimizer.grad_norm",
        "    partial[k] = value\n",
        "    partial[k] = value\n    if k >= 200:\n        return partial[k]\n",
        "global_norm",
        1,
        "divergence",
        ("    cuda.syncthreads()",),
    ),
    "groupnorm, mean read late": InKernel(
        "groupnorm.groups",
        BARRIER,
        NONE,
        "groupnorm",
        1,
        "race",
        ("average = tile[0]", "tile[t] = total"),
        0,
    ),
    "groupnorm, not all of the tile": InKernel(
        "groupnorm.groups",
        "    tile[t] = total\n",
        "    if t < m:\n        tile[t] = total\n",
        "groupnorm",
        1,
        "uninitialised",
        ("tile[plane * BLOCK",),
    ),
    "groupnorm, element before the group": InKernel(
        "groupnorm.groups",
        "* C + group * width + e % width]",
        "* C + group * width + e % width - 1]",
        "groupnorm",
        1,
        "bounds",
        ("total += ",),
    ),
    "softmax, part of a warp": InKernel(
        "numdiff.device.common",
        "FULL_MASK, value, 4",
        "0xFFFF, value, 4",
        "softmax_backward",
        2,
        "divergence",
        ("0xFFFF, value, 4",),
    ),
    "matmul, first barrier": InKernel(
        "matmul.tiled",
        BARRIER,
        NONE,
        "matmul",
        2,
        "race",
        ("tile_a[a_r, a_kk] = value", "total += tile_a[y, k]"),
        0,
    ),
    "matmul, second barrier": InKernel(
        "matmul.tiled",
        BARRIER,
        NONE,
        "long",
        2,
        "race",
        ("total += tile_a[y, k]", "tile_b[b_kk, b_c] = value"),
        1,
    ),
    "matmul, guard of the result": InKernel(
        "matmul.tiled", "if row < M and", "if row <= M and", "matmul", 2, "bounds", ("c[i] = ",)
    ),
    "matmul, guard of a load": InKernel(
        "matmul.tiled",
        "b_c < N and",
        "b_c <= N and",
        "matmul",
        2,
        "bounds",
        ("b[b_start + (k0",),
    ),
    "matmul v3, second barrier": InKernel(
        "matmul.register_tiles",
        BARRIER,
        NONE,
        "long",
        3,
        "race",
        ("tile_a[k, r] = fetch", "row0 = add_row("),
        1,
    ),
    "matmul v4, one buffer": InKernel(
        "matmul.vectorised",
        "buffer = int32(1 - buffer)",
        "buffer = int32(buffer)",
        "long",
        4,
        "race",
        (),
    ),
    "matmul v4, barrier": InKernel("matmul.vectorised", BARRIER, NONE, "long", 4, "race", (), 1),
    "split K, shares": InKernel(
        "matmul.split_k",
        BARRIER,
        NONE,
        "matmul split K",
        3,
        "race",
        ("sums[share, x] = total", "total += sums[s, x]"),
    ),
    "sla, sums of too few groups": InKernel(
        SLA,
        "cuda.syncthreads()\n        if group < half",
        "if group < half",
        "sla legacy",
        1,
        "race",
        ("sums[group, i * WARP + lane] +=", "sums[group, "),
    ),
    "sla, means of keys": InKernel(
        SLA, BARRIER, NONE, "sla legacy", 1, "race", ("store4(tile", "k = centred("), 2
    ),
    "sla, products": InKernel(
        SLA, BARRIER, NONE, "sla legacy", 1, "race", ("held[i] =", "keys[row * N + first + t] ="), 3
    ),
    "sla, rows beyond the last": InKernel(
        SLA,
        "min(first + warp, N - 1)",
        "(first + warp)",
        "sla legacy",
        1,
        "bounds",
        ("q[warp, c] =",),
    ),
    "sla, a list too long": InKernel(
        SLA,
        "return uint32(higher - uint32(1))",
        "return uint32(0)",
        "sla legacy",
        1,
        "race",
        ("critical[to +",),
    ),
    "embedding, misaligned": InKernel(
        "embedding",
        "uint32(label) * channels + c)",
        "uint32(label) * channels + c + 2)",
        "embedding",
        2,
        "alignment",
        ("load4(weight",),
    ),
}


@pytest.mark.parametrize(
    "name",
    [*list(IN_KERNELS)[::4], *exhaustively(*(name for k, name in enumerate(IN_KERNELS) if k % 4))],
)
def test_a_fault_planted_in_a_kernel_of_the_project_is_found(copies, name):  # noqa: F811
    planted = IN_KERNELS[name]
    full = planted.module.startswith("numdiff.")
    module = planted.module if full else f"numdiff.kernels.{planted.module}"
    path, lines = copies.plant(module, planted.before, planted.after, planted.which)
    emulated = EmulatorDevice(order="shuffled", seed=len(name), float64=False, on_fault="raise")
    if planted.case == "long":
        a, b = (upload(np.ones(shape, np.float32), emulated) for shape in ((4, 40), (40, 4)))
        with pytest.raises(KernelFault) as caught:
            matmul_forward(a, b, version=planted.version)
    else:
        case = next(
            c
            for c in check.CASES
            if f"{c.name} {c.label}".startswith(planted.case) and planted.version in c.versions
        )
        with pytest.raises(KernelFault) as caught:
            run_once(case, planted.version, emulated)
    faults = caught.value.faults
    if planted.kind != "race":
        assert any(f.kind == planted.kind and planted.marks[0] in f_line(f) for f in faults), (
            listed(faults)
        )
        return
    races = [
        {f_line(f), *(f_line(place) for _, place in f.others)} for f in faults if f.kind == "race"
    ]
    assert any(
        all(any(mark in line for line in race) for mark in planted.marks) for race in races
    ), listed(faults)
    assert all(f.file != path or lines[f.line - 1] == f_line(f) for f in faults)


def f_line(place):
    """The text of the line where a fault is."""
    return linecache.getline(place.file, place.line).rstrip("\n")
