"""Loops that NumPy adds up at once: the same bits, variables and faults as one iteration after another."""

import numpy as np
import pytest

from numdiff.device import cuda, float32, int32
from numdiff.emulator import Emulator
from numdiff.emulator.reductions import LEAST
from tests.emulator.planting import fault_at, faults_of, marked, run

CHECKED = pytest.mark.parametrize("checks", [True, False], ids=["checked", "unchecked"])


@cuda.jit
def dot(x, y, out, n):
    total = out[0]
    k = int32(-1)
    for k in range(n):
        total += x[k] * y[k]
    out[0], out[1] = total, float32(k)


@cuda.jit
def strided(x, y, out, n):
    total, i = float32(1), int32(-1)
    for k in range(1, n, 3):
        i = 2 * k + 1
        total += x[i] - y[4 * k - 1]
    out[0], out[1] = total, float32(i)


@cuda.jit
def squares(x, y, out, n):
    total, mean, d, sum_ = float32(0), y[0], float32(0), float32(2)
    for k in range(n):
        d = float32(x[k]) - mean
        total += d * d * float32(0.25)
        sum_ += d
    out[0], out[1] = total + sum_, d


@cuda.jit
def fixed(x, y, out, n):
    """One operand is the same element in all iterations."""
    total = float32(0)
    for k in range(n):
        total += x[k] * y[3]
    out[0], out[1] = total, float32(0)


@cuda.jit
def backwards(x, y, out, n):
    total = float32(0)
    for k in range(n - 1, -1, -1):
        total += x[k]
    out[0], out[1] = total, float32(0)


def expected(kernel, x, y, out, n):
    """What the kernel's own text gives, each operation rounded by NumPy's scalars."""
    with np.errstate(all="ignore"):
        kernel.py_func(x, y, out, n)


@CHECKED
@pytest.mark.parametrize("n", [0, 1, LEAST - 1, LEAST, 61])
@pytest.mark.parametrize("kernel", [dot, strided, squares, fixed, backwards])
def test_the_bits_of_the_loop(kernel, n, checks):
    draw = np.random.default_rng(n)
    x, y = (draw.standard_normal(300).astype(np.float32) for _ in range(2))
    x[20], x[21], y[20] = 1e-40, 3e38, 3e-39  # subnormal, nearly overflowing
    found, known = (np.full(2, 0.1, np.float32) for _ in range(2))
    run(kernel, 1, 1, x, y, found, n, checks=checks)
    expected(kernel, x, y, known, n)
    assert found.tobytes() == known.tobytes()


@CHECKED
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, np.int32])
def test_elements_of_other_types_are_cast_or_left_to_the_loop(dtype, checks):
    x = (np.arange(40) / 7).astype(dtype)
    found, known = (np.zeros(2, np.float32) for _ in range(2))
    run(squares, 1, 1, x, np.ones(1, np.float32), found, 40, checks=checks)
    expected(squares, x, np.ones(1, np.float32), known, 40)
    assert found.tobytes() == known.tobytes()


@cuda.jit
def of_two(a, b, diagonal, out):
    i, total = cuda.threadIdx.x, float32(0)
    for k in range(16):
        total += a[i, k] * b[k, i]
    for k in range(16):
        total += diagonal[k, k]
    out[i] = total


@CHECKED
def test_rows_columns_and_diagonals(checks):
    draw = np.random.default_rng(3)
    a, b, diagonal = (draw.standard_normal((16, 16)).astype(np.float32) for _ in range(3))
    out = np.zeros(16, np.float32)
    run(of_two, 1, 16, a, b.T, diagonal[:, ::-1], out, checks=checks)
    for i in range(16):
        total = np.float32(0)
        for k in range(16):
            total += a[i, k] * b.T[k, i]
        for k in range(16):
            total += diagonal[k, 15 - k]
        assert out[i] == total


@CHECKED
def test_infinite_and_missing_numbers(checks):
    x, y, out = np.ones(32, np.float32), np.ones(32, np.float32), np.zeros(2, np.float32)
    x[4], x[20], y[20] = np.inf, np.inf, -np.inf
    run(dot, 1, 1, x, y, out, 32, checks=checks)
    assert np.isnan(out[0]) and out[1] == 31


@CHECKED
@pytest.mark.parametrize("kernel, of_numpy", [(dot, 1), (squares, 2), (strided, 1), (fixed, 1)])
def test_these_loops_are_left_to_numpy(kernel, of_numpy, checks, monkeypatch):
    """Else all of these tests are of nothing. NumPy's view of a fixed element has no stride."""
    machine = Emulator(checks=checks)
    accumulate, calls = machine.helpers["__accumulate"], []
    machine.helpers["__accumulate"] = lambda values: calls.append(1) or accumulate(values)
    x = np.ones(300, np.float32)
    machine.launch(kernel, 1, 1, x, x, np.zeros(2, np.float32), 60)
    assert len(calls) == of_numpy * (checks or kernel is not fixed)


# Faults -------------------------------------------------------------------------------------------


def test_an_index_past_the_end():
    faults = faults_of(dot, 1, 1, *(np.ones(20, np.float32) for _ in range(3)), 21)
    assert [fault.message for fault in faults] == ["reads x[20]: index 20 is outside of 0 … 19"]
    assert faults[0].count == 2  # y, too


@cuda.jit
def neighbours(x, out, n, hole, before, after):
    """Threads add up what all have put into a tile, then change it."""
    tile = cuda.shared.array(32, float32)
    t = cuda.threadIdx.x
    if t != hole:
        tile[t] = x[t]  # put
    if before:
        cuda.syncthreads()
    total = float32(0)
    for k in range(n):
        total += tile[k]  # add
    if after:
        cuda.syncthreads()
    tile[31 - t] = total  # change
    cuda.syncthreads()
    out[t] = tile[t]


@pytest.mark.parametrize("order", ["forward", "reversed", "shuffled"])
def test_races_of_a_sum(order):
    x, out = np.arange(32, dtype=np.float32), np.zeros(32, np.float32)
    run(neighbours, 1, 32, x, out, 32, -1, True, True, order=order)
    assert (out == x.sum()).all()
    faults = faults_of(neighbours, 1, 32, x, out, 32, -1, False, True, order=order)
    put, add, change = (marked(__file__, mark) for mark in ("put", "add", "change"))
    assert {place.line for f in faults if f.kind == "race" for _, place in f.others} <= {put, add}
    assert "has read" in fault_at(faults, "race", __file__, put).message
    faults = faults_of(neighbours, 1, 32, x, out, 32, -1, True, False, order=order)
    fault = fault_at(faults, "race", __file__, change)
    assert "has read" in fault.message and fault.others[0][1].line == add


def test_an_element_that_was_never_written():
    x, out = np.zeros(32, np.float32), np.zeros(32, np.float32)
    faults = faults_of(neighbours, 1, 32, x, out, 32, 17, True, True)
    fault = fault_at(faults, "uninitialised", __file__, marked(__file__, "add"))
    assert "tile[17]" in fault.message and fault.count == 32
    run(neighbours, 1, 32, x, out, 16, 17, True, True)  # which no thread reads


@cuda.jit
def shifted(x, n):
    """Each block adds up what the next one writes."""
    total, b = float32(0), cuda.blockIdx.x
    for k in range(n):
        total += x[(b + 1) * n + k]  # next
    for k in range(n):
        x[b * n + k] = total  # own


@pytest.mark.parametrize("order", ["forward", "reversed"])
def test_races_of_blocks(order):
    fault = faults_of(shifted, 3, 1, np.ones(64, np.float32), 16, order=order)[0]
    read, write = marked(__file__, "next"), marked(__file__, "own")
    assert fault.kind == "race" and "nothing orders the blocks" in fault.message
    assert [fault.line, fault.others[0][1].line] == (
        [write, read] if order == "forward" else [read, write]
    )
