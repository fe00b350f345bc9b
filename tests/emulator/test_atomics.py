"""Atomics: every operation on every type, against NumPy, and programs that are right because of
them."""

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

INTEGERS = (np.int32, np.uint32, np.int64, np.uint64)
FLOATS = (np.float32, np.float64)
MODES = pytest.mark.parametrize(
    "options",
    [
        {"order": "shuffled"},
        {"checks": False},
        *exhaustively({"order": "forward"}, {"order": "reversed"}),
    ],
    ids=["shuffled", "unchecked", "forward", "reversed"],
)


def kernel_of(name):
    @cuda.jit
    def atomic_kernel(x, values, old):
        t = cuda.threadIdx.x
        old[t] = getattr(cuda.atomic, name)(x, 0, values[t])

    return atomic_kernel


@cuda.jit
def add_kernel(x, values, old):
    t = cuda.threadIdx.x
    old[t] = cuda.atomic.add(x, 0, values[t])


@cuda.jit
def sub_kernel(x, values, old):
    t = cuda.threadIdx.x
    old[t] = cuda.atomic.sub(x, 0, values[t])


@cuda.jit
def max_kernel(x, values, old):
    t = cuda.threadIdx.x
    old[t] = cuda.atomic.max(x, 0, values[t])


@cuda.jit
def min_kernel(x, values, old):
    t = cuda.threadIdx.x
    old[t] = cuda.atomic.min(x, 0, values[t])


@cuda.jit
def nanmax_kernel(x, values, old):
    t = cuda.threadIdx.x
    old[t] = cuda.atomic.nanmax(x, 0, values[t])


@cuda.jit
def nanmin_kernel(x, values, old):
    t = cuda.threadIdx.x
    old[t] = cuda.atomic.nanmin(x, 0, values[t])


@cuda.jit
def and_kernel(x, values, old):
    t = cuda.threadIdx.x
    old[t] = cuda.atomic.and_(x, 0, values[t])


@cuda.jit
def or_kernel(x, values, old):
    t = cuda.threadIdx.x
    old[t] = cuda.atomic.or_(x, 0, values[t])


@cuda.jit
def xor_kernel(x, values, old):
    t = cuda.threadIdx.x
    old[t] = cuda.atomic.xor(x, 0, values[t])


@cuda.jit
def exch_kernel(x, values, old):
    t = cuda.threadIdx.x
    old[t] = cuda.atomic.exch(x, 0, values[t])


@cuda.jit
def inc_kernel(x, values, old):
    t = cuda.threadIdx.x
    old[t] = cuda.atomic.inc(x, 0, 5)


@cuda.jit
def dec_kernel(x, values, old):
    t = cuda.threadIdx.x
    old[t] = cuda.atomic.dec(x, 0, 5)


@cuda.jit
def cas_kernel(x, values, old):
    t = cuda.threadIdx.x
    old[t] = cuda.atomic.cas(x, 0, values[t], values[(t + 1) % 8])


@cuda.jit
def compare_and_swap_kernel(x, values, old):
    t = cuda.threadIdx.x
    old[t] = cuda.atomic.compare_and_swap(x, values[t], values[(t + 1) % 8])


def sequence(step):
    """The old values and the last one, of eight threads that come one after another."""

    def make(start, values):
        now, old = start, []
        for t in range(8):
            old.append(now)
            now = step(now, values, t)
        return old, now

    return make


SPECS = {
    add_kernel: (lambda x, v, t: x + v[t], INTEGERS + FLOATS),
    sub_kernel: (lambda x, v, t: x - v[t], INTEGERS + FLOATS),
    max_kernel: (lambda x, v, t: max(x, v[t]), INTEGERS + FLOATS),
    min_kernel: (lambda x, v, t: min(x, v[t]), INTEGERS + FLOATS),
    nanmax_kernel: (lambda x, v, t: np.fmax(x, v[t]), INTEGERS + FLOATS),
    nanmin_kernel: (lambda x, v, t: np.fmin(x, v[t]), INTEGERS + FLOATS),
    and_kernel: (lambda x, v, t: x & v[t], INTEGERS),
    or_kernel: (lambda x, v, t: x | v[t], INTEGERS),
    xor_kernel: (lambda x, v, t: x ^ v[t], INTEGERS),
    exch_kernel: (lambda x, v, t: v[t], INTEGERS),
    inc_kernel: (lambda x, v, t: 0 if x >= 5 else x + 1, INTEGERS[1:4:2]),
    dec_kernel: (lambda x, v, t: 5 if x == 0 or x > 5 else x - 1, INTEGERS[1:4:2]),
    cas_kernel: (lambda x, v, t: v[(t + 1) % 8] if x == v[t] else x, INTEGERS),
    compare_and_swap_kernel: (lambda x, v, t: v[(t + 1) % 8] if x == v[t] else x, INTEGERS),
}


@pytest.mark.parametrize("checks", [True, False])
@pytest.mark.parametrize(
    "kernel, dtype",
    [
        pytest.param(k, d, id=f"{k.py_func.__name__[:-7]}-{np.dtype(d).name}")
        for k, (_, dtypes) in SPECS.items()
        for d in dtypes
    ],
)
def test_operations(kernel, dtype, checks):
    rng = np.random.default_rng(0)
    values = rng.integers(0, 100, 8).astype(dtype)
    if dtype in (np.int32, *FLOATS):
        values[::2] *= dtype(-1)
    if dtype in INTEGERS and kernel in (add_kernel, xor_kernel):
        values[3] = np.iinfo(dtype).max  # wraps
    if kernel in (nanmax_kernel, nanmin_kernel) and dtype in FLOATS:
        values[5] = np.nan
    x, old = (
        values[:1].copy() if kernel not in (inc_kernel, dec_kernel) else np.array([3], dtype),
        np.zeros(8, dtype),
    )
    with np.errstate(over="ignore"):
        want, last = sequence(SPECS[kernel][0])(x[0], values)
    run(kernel, 1, 8, x, values, old, checks=checks)
    assert np.array_equal(old, np.array(want, dtype)) and x[0] == last


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


@cuda.jit
def work_queue(x, y, head):
    """A counter without a lock gives each thread its next piece of work."""
    i = cuda.atomic.add(head, 0, 1)
    while i < x.size:
        y[i] = x[i] * x[i]
        i = cuda.atomic.add(head, 0, 1)


@MODES
def test_a_counter_without_a_lock(options):
    x, y, head = np.arange(40.0), np.zeros(40), np.zeros(1, np.int32)
    run(work_queue, 2, 8, x, y, head, **options)
    assert np.array_equal(y, x * x) and head[0] == 40 + 16


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


EXTREMES = {"max": max_kernel, "min": min_kernel, "nanmax": nanmax_kernel, "nanmin": nanmin_kernel}


@pytest.mark.parametrize("name", EXTREMES)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("checks", [True, False])
def test_extremes_and_nan(name, dtype, checks):
    """What Numba's loops around a compare-and-swap give: NaN in memory stays, except for nanmax and
    nanmin; a NaN that is given changes nothing; of two zeros the one in memory stays."""
    nan, inf = np.nan, np.inf
    for old in (nan, 1, -inf, 0.0, -0.0):
        for value in (nan, 2, -2, inf, 0.0, -0.0):
            x, before = np.array([old], dtype), np.zeros(1, dtype)
            run(
                EXTREMES[name],
                1,
                1,
                x,
                np.array([value], dtype),
                before,
                checks=checks,
                float64=True,
            )
            if np.isnan(value) or np.isnan(old) and not name.startswith("nan"):
                want = old
            elif np.isnan(old):
                want = value
            else:
                want = value if (old < value if "max" in name else old > value) else old
            assert before.tobytes() == np.array([old], dtype).tobytes()
            assert x.tobytes() == np.array([want], dtype).tobytes(), (name, old, value)


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


def test_values_of_atomics_are_converted_to_the_type_of_the_array():
    @cuda.jit
    def kernel(a, b):
        cuda.atomic.and_(a, 0, 13.9)
        cuda.atomic.or_(a, 1, -1)
        cuda.atomic.xor(a, 2, (1 << 32) + 5)
        cuda.atomic.max(b, 0, 3.9)
        cuda.atomic.max(b, 1, (1 << 32) + 7)

    a, b = np.array([11, 0, 3], np.uint32), np.array([1, 1], np.int32)
    run(kernel, 1, 1, a, b)
    assert a.tolist() == [9, (1 << 32) - 1, 6] and b.tolist() == [3, 7]
