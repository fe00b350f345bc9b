"""Races between the reads of threads and what others write before or after them, element by element
and by fours."""

import numpy as np
import pytest

from numdiff import emulator
from numdiff.device import cuda, float32, int32, load4, store4
from numdiff.device.async_copy import cp_async_16, cp_async_commit, cp_async_wait, shared_address
from tests.conftest import THREAD_ORDERS
from tests.emulator.planting import fault_at, faults_of, marked, race_between, run


@cuda.jit
def exchange(x, y, wide, fault):
    """Each thread takes what another has in shared memory, then changes its own."""
    tile, t = cuda.shared.array(128, float32), cuda.threadIdx.x
    store4(tile, 4 * t, x[4 * t], x[4 * t + 1], x[4 * t + 2], x[4 * t + 3])
    cuda.syncthreads()
    for turn in range(2):
        if wide:
            four = load4(tile, 4 * (31 - t))  # wide
        else:
            # single
            four = tile[124 - 4 * t], tile[125 - 4 * t], tile[126 - 4 * t], tile[127 - 4 * t]
        if turn != fault:
            cuda.syncthreads()
        store4(tile, 4 * t, four[0], four[1], four[2], four[3])  # back
        cuda.syncthreads()
    store4(y, 4 * t, four[0], four[1], four[2], four[3])


@cuda.jit
def turn_over(x, wide):
    """Each block writes where another one reads, in global memory."""
    at = 4 * (
        cuda.gridDim.x * cuda.blockDim.x - 1 - cuda.blockIdx.x * cuda.blockDim.x - cuda.threadIdx.x
    )
    four = load4(x, at) if wide else (x[at], x[at + 1], x[at + 2], x[at + 3])  # from there
    at = 4 * (cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x)
    store4(x, at, four[0], four[1], four[2], four[3])  # to here


@cuda.jit
def reverse(x, y):
    """What a thread has copied it knows of when it has waited; the others do not."""
    tile, t = cuda.shared.array(128, float32), cuda.threadIdx.x
    cp_async_16(shared_address(tile) + int32(16 * t), x, int32(4 * t))  # begins
    cp_async_commit()
    cuda.syncthreads()
    cp_async_wait(0)
    y[t] = tile[4 * (31 - t)]  # too early


def check_both_ways(faults, read, write):
    """Of two threads that read what the other writes, the second one reads too late and writes too
    early."""
    assert "has written" in fault_at(faults, "race", __file__, marked(__file__, read)).message
    assert "has read" in fault_at(faults, "race", __file__, marked(__file__, write)).message


@THREAD_ORDERS
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("fault", [-1, 0])
def test_shared_memory(wide, fault, order):
    x, y = np.arange(128, dtype=np.float32), np.zeros(128, np.float32)
    if fault < 0:
        run(exchange, 1, 32, x, y, wide, fault, order=order)
        assert np.array_equal(x, y)
    else:
        faults = faults_of(exchange, 1, 32, x, y, wide, fault, order=order)
        check_both_ways(faults, "wide" if wide else "single", "back")


@THREAD_ORDERS
@pytest.mark.parametrize("blocks, threads", [(1, 8), (8, 1), (2, 4)])
@pytest.mark.parametrize("wide", [False, True])
def test_global_memory(wide, blocks, threads, order):
    faults = faults_of(turn_over, blocks, threads, np.zeros(32, np.float32), wide, order=order)
    check_both_ways(faults, "from there", "to here")


@THREAD_ORDERS
def test_copies_of_another_thread(order):
    faults = faults_of(
        reverse, 1, 32, np.zeros(128, np.float32), np.zeros(32, np.float32), order=order
    )
    race_between(faults, __file__, marked(__file__, "too early"), marked(__file__, "begins"))


@cuda.jit
def read_then_written(x, y):
    """Block 0 reads x, which block 1 writes."""
    i = cuda.threadIdx.x
    if cuda.blockIdx.x == 0:
        y[i] = x[i, 1] + x[i, 0]
    elif i == 3:
        x[i, 1] = 1


@THREAD_ORDERS
def test_reads_of_an_array_that_a_later_block_writes(order):
    x, y = np.zeros((4, 2), np.float32), np.zeros(4, np.float32)
    with emulator.device(order=order, on_fault="collect") as gpu:
        read_then_written[2, 4](x, y)
    assert [f.kind for f in gpu.faults] == ["race"]


def test_unset_elements_of_a_global_array_are_found():
    y = np.zeros(4, np.float32)
    with emulator.device(on_fault="collect") as gpu:
        read_then_written[1, 4](cuda.device_array((4, 2), np.float32), y)
    assert {f.kind for f in gpu.faults} == {"uninitialised"}


@cuda.jit
def padded(x, y, column):
    """Reads of a tile whose last column is never written."""
    tile, t = cuda.shared.array((8, 9), float32), cuda.threadIdx.x
    for k in range(8):
        tile[k, t] = x[k, t]
    cuda.syncthreads()
    total = float32(0)
    for k in range(8):
        total += tile[t, k] * tile[k, t]
    y[t] = total + tile[t, column]  # of that column


@THREAD_ORDERS
def test_padding_of_a_tile(order):
    x, y = np.arange(64, dtype=np.float32).reshape(8, 8), np.zeros(8, np.float32)
    run(padded, 1, 8, x, y, 7, order=order)
    assert np.array_equal(y, np.diag(x @ x) + x[:, 7])
    faults = faults_of(padded, 1, 8, x, y, 8, order=order)
    fault_at(faults, "uninitialised", __file__, marked(__file__, "of that column"))


@cuda.jit
def reads_of_two_lines(x, y, fault):
    """One thread reads a tile on two lines, waits for its warp between, and another one writes."""
    tile, t = cuda.shared.array(64, float32), cuda.threadIdx.x
    tile[t] = x[t]
    cuda.syncthreads()
    total = tile[t] + tile[63 - t]  # before
    cuda.syncwarp()
    total += tile[(t + 1) % 64]  # after
    if fault == 0 and t == 40:
        # thread 57 has read it before, thread 5 after
        tile[6] = total  # of others
    if fault == 1 and t == 40:
        # this thread has read it after, thread 22 before
        tile[41] = total  # of both lines
    y[t] = total


@THREAD_ORDERS
def test_lines_of_reads(order):
    x, y = np.arange(64, dtype=np.float32), np.zeros(64, np.float32)
    for fault, mark in ((0, "of others"), (1, "of both lines")):
        faults = faults_of(reads_of_two_lines, 1, 64, x, y, fault, order=order)
        fault_at(faults, "race", __file__, marked(__file__, mark))
        lines = {other.line for f in faults for _, other in f.others}
        assert marked(__file__, "before") in lines | {f.line for f in faults}
        assert lines <= {marked(__file__, m) for m in ("before", "after", mark)}
