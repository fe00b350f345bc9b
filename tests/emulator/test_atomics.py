"""Atomics: programs that are right because of them, and their faults. battery.py has every operation
on every type, against NumPy."""

import numpy as np
import pytest

from numdiff.device import cuda, float32, int32
from numdiff.device.async_copy import (
    cp_async_4_zfill,
    cp_async_commit,
    cp_async_wait,
    shared_address,
)
from numdiff.emulator import EmulatedArray
from tests.conftest import THREAD_ORDERS, exhaustively
from tests.emulator.planting import fault_at, faults_of, marked, race_between, run

MODES = pytest.mark.parametrize(
    "options",
    [
        {"order": "shuffled"},
        {"checks": False},
        *exhaustively({"order": "forward"}, {"order": "reversed"}),
    ],
    ids=["shuffled", "unchecked", "forward", "reversed"],
)


@cuda.jit
def to_many_places(x, counts):
    shared = cuda.shared.array((4, 2), int32)
    t = cuda.threadIdx.x
    if t < 8:
        shared[t // 2, t % 2] = 0
    cuda.syncthreads()
    cuda.atomic.add(shared, (x[cuda.grid(1)] // 2, x[cuda.grid(1)] % 2), 1)
    cuda.syncthreads()
    if t < 8:
        cuda.atomic.add(counts, (t // 2, t % 2), shared[t // 2, t % 2])


@MODES
def test_atomics_on_arrays_of_two_dimensions(options):
    x, counts = (
        np.random.default_rng(1).integers(0, 8, 96).astype(np.int32),
        np.zeros((4, 2), np.int32),
    )
    run(to_many_places, 3, 32, x, counts, **options)
    assert np.array_equal(counts.ravel(), np.bincount(x, minlength=8))


@cuda.jit
def last_block_sums(x, partial, done, out):
    """CUDA's threadFenceReduction: the block that finds all the others done adds up what they left."""
    shared = cuda.shared.array(32, float32)
    last = cuda.shared.array(1, int32)
    t, block = cuda.threadIdx.x, cuda.blockIdx.x
    shared[t] = x[cuda.grid(1)]
    half = 16
    while half > 0:
        cuda.syncthreads()
        if t < half:
            shared[t] += shared[t + half]
        half //= 2
    if t == 0:
        partial[block] = shared[0]  # left
        cuda.threadfence()
        last[0] = cuda.atomic.add(done, 0, 1) == cuda.gridDim.x - 1
    cuda.syncthreads()
    if last[0] and t == 0:
        total = float32(0)
        for b in range(cuda.gridDim.x):
            total += partial[b]
        out[0] = total


@MODES
def test_the_last_block_may_read_what_the_others_left(options):
    x = np.random.default_rng(2).integers(0, 9, 4 * 32).astype(np.float32)
    partial, done, out = (
        EmulatedArray(4, np.float32),
        np.zeros(1, np.int32),
        np.zeros(1, np.float32),
    )
    run(last_block_sums, 4, 32, x, partial, done, out, **options)
    assert out[0] == x.sum()


@THREAD_ORDERS
def test_without_its_fence_that_is_a_race(order):
    @cuda.jit
    def kernel(partial, done, out):
        partial[cuda.blockIdx.x] = float32(cuda.blockIdx.x)  # unfenced
        if cuda.atomic.add(done, 0, 1) == cuda.gridDim.x - 1:
            for b in range(cuda.gridDim.x):
                out[0] += partial[b]  # collected

    partial, done, out = np.zeros(3, np.float32), np.zeros(1, np.int32), np.zeros(1, np.float32)
    faults = faults_of(kernel, 3, 1, partial, done, out, order=order)
    race_between(faults, __file__, marked(__file__, "unfenced"), marked(__file__, "collected"))


@cuda.jit
def locked(lock, total):
    """A lock between blocks, as in Numba's documentation of compare-and-swap."""
    if cuda.threadIdx.x == 0:
        while cuda.atomic.cas(lock, 0, 0, 1) != 0:
            pass
        cuda.threadfence()
        total[0] = total[0] + 1
        cuda.threadfence()
        cuda.atomic.exch(lock, 0, 0)


@MODES
def test_a_lock_orders_the_blocks(options):
    lock, total = np.zeros(1, np.int32), np.zeros(1, np.int32)
    run(locked, 5, 32, lock, total, **options)
    assert total[0] == 5 and lock[0] == 0


@THREAD_ORDERS
@pytest.mark.parametrize(
    "case, kind", [(0, "race"), (1, "bounds"), (2, "uninitialised"), (3, "race")]
)
def test_faults_of_atomics(case, kind, order):
    @cuda.jit
    def kernel(x, case):
        shared = cuda.shared.array(4, int32)
        t = cuda.threadIdx.x
        if case == 0:
            if t == 0:
                shared[0] = 0  # case 0, store
            cuda.atomic.add(shared, 0, 1)  # case 0
        elif case == 1:
            cuda.atomic.add(x, t - 1, 1)  # case 1
        elif case == 2:
            cuda.atomic.add(shared, t, 1)  # case 2
        elif case == 3:
            cuda.atomic.add(x, 0, 1)  # case 3
            if t == 0:
                x[1] = x[0]
            x[2] = t  # case 3, store

    faults = faults_of(kernel, 1, 4, np.zeros(4, np.int32), case, order=order)
    lines = {marked(__file__, f"case {case}")}
    if kind == "race":
        lines.add(marked(__file__, f"case {case}, store"))
    assert {f.kind for f in faults} <= {kind, "uninitialised"} and all(
        f.line in lines for f in faults
    ), [str(f) for f in faults]
    if kind == "bounds":
        assert fault_at(faults, kind, __file__, *lines).thread == (0, 0, 0)


@cuda.jit
def add_to_a_copy(x, y):
    tile, t = cuda.shared.array(32, float32), cuda.threadIdx.x
    cp_async_4_zfill(shared_address(tile) + int32(4 * t), x, t, int32(4))
    cp_async_commit()
    cuda.atomic.add(tile, t, float32(1))  # add too early
    cp_async_wait(0)
    y[t] = tile[t]


@THREAD_ORDERS
def test_an_atomic_on_what_a_copy_still_writes(order):
    x, y = np.zeros(32, np.float32), np.zeros(32, np.float32)
    faults = faults_of(add_to_a_copy, 1, 32, x, y, order=order)
    fault_at(faults, "cp.async", __file__, marked(__file__, "add too early"))


@cuda.jit
def tiny_sums(x, y, value):
    tile = cuda.shared.array(1, float32)
    tile[0] = x[0]
    cuda.atomic.add(tile, 0, value)
    cuda.atomic.add(x, 0, value)
    cuda.atomic.sub(y, 0, value)
    x[1] = tile[0]


@pytest.mark.parametrize("checks", [True, False])
def test_sums_of_subnormal_numbers_are_zero_in_global_memory(checks):
    """PTX ISA, `atom`: "atom.add.f32 on global memory flushes subnormal inputs and results to
    sign-preserving zero"."""
    x, y = np.array([-1e-40, 0], np.float32), np.array([1e-40], np.float32)
    run(tiny_sums, 1, 1, x, y, np.float32(-1e-41), checks=checks)
    assert x[0] == 0 and np.signbit(x[0]) and x[1] == np.float32(-1e-40) + np.float32(-1e-41)
    assert y[0] == np.float32(1e-40) - np.float32(-1e-41)
