"""Code that Numba compiles and that ran wrongly, or was refused or reported, in the emulator
before."""

import math
from contextlib import nullcontext

import numpy as np
import pytest
from numba import cuda, float32, int32
from numba.cuda import int8x1

from numdiff import emulator
from numdiff.emulator import Emulator

CHECKS = pytest.mark.parametrize("checks", [True, False], ids=["checked", "unchecked"])


def launch(kernel, threads, *arguments, checks=True, **options):
    Emulator(checks=checks, float64=True, **options).launch(
        cuda.jit(kernel), 1, threads, *arguments
    )


@CHECKS
def test_range_of_a_float_and_of_unsigned_numbers(checks):
    def kernel(x, n, y):
        for i in range(math.ceil(n[0] / 3)):
            y[0] += i
        for i in range(n[1], n[0]):
            y[1] = i - n[0]  # uint64 minus uint64
        for i in range(0.5, x[0]):
            y[2] += i

    y = np.zeros(3)
    launch(kernel, 1, np.array([3.9], np.float32), np.array([7, 5], np.uint64), y, checks=checks)
    assert y.tolist() == [3, 2**64, 3]


@CHECKS
def test_zip_reads_no_further_than_the_shortest(checks):
    def kernel(y):
        a, b = cuda.local.array(4, float32), cuda.local.array(2, float32)
        for k in range(2):
            a[k], b[k] = k, 10 * k
        for u, v in zip(a, b):  # noqa: B905
            y[0] += u + v
        for k, (u, v) in enumerate(zip(b, (1, 2))):  # noqa: B905
            y[1] += k * u * v

    y = np.zeros(2, np.float32)
    launch(kernel, 1, y, checks=checks)
    assert y.tolist() == [11, 20]


@pytest.mark.parametrize("order", ["forward", "reversed", "shuffled"])
def test_the_active_mask(order):
    def kernel(y):
        i = cuda.threadIdx.x
        mask = cuda.activemask()
        y[i] = cuda.shfl_sync(mask, i, 31)
        if i % 2:
            y[i] += cuda.activemask()
        if i < 8:
            mask = cuda.activemask()
            y[i] += cuda.ballot_sync(mask, i % 2 == 0)

    y = np.zeros(64, np.int64)
    launch(kernel, 64, y, order=order)
    odd = 0xAAAAAAAA
    assert y.tolist() == [
        (31 if i < 32 else 63) + odd * (i % 2) + 0x55 * (i < 8) for i in range(64)
    ]


@CHECKS
def test_a_variable_that_some_lanes_have_not_bound_is_shuffled(checks):
    def kernel(x, y):
        i = cuda.threadIdx.x
        if i == 3:
            value = x[0] * 2
        y[i] = cuda.shfl_sync(0xFFFFFFFF, value, 3)

    def wrong(x, y):
        i = cuda.threadIdx.x
        if i == 3:
            value = x[0]
        y[i] = cuda.shfl_sync(0xFFFFFFFF, value, 4)

    x, y = np.array([2.5], np.float32), np.zeros(32, np.float32)
    launch(kernel, 32, x, y, checks=checks)
    assert y.tolist() == [5] * 32
    text = "variable value has no value in the thread from which it is taken"
    with pytest.raises(emulator.KernelFault, match=text) if checks else nullcontext():
        launch(wrong, 32, x, y, checks=checks)
    assert checks or np.isnan(y).all()


@CHECKS
def test_a_variable_that_some_threads_have_not_bound_is_passed_stored_and_returned(checks):
    @cuda.jit(device=True)
    def larger(t, value, n, tile):
        tile[t] = value
        cuda.syncthreads()
        if t + 2 < n and tile[t + 2] > value:
            value = tile[t + 2]
        other = cuda.shfl_down_sync(0xFFFFFFFF, value, 1)
        if t == 0 and other > value:
            value = other
        return value

    def kernel(x, y):
        tile, t = cuda.shared.array(32, x.dtype), cuda.threadIdx.x
        if t < x.size:
            value = x[t]
        largest = larger(t, value, x.size, tile)
        if t == 0:
            y[0] = largest

    def reads_it(x, y):
        tile, t = cuda.shared.array(32, x.dtype), cuda.threadIdx.x
        if t < x.size:
            value = x[t]
        tile[t] = value
        cuda.syncthreads()
        y[t] = tile[31 - t]

    def adds_to_it(x, y):
        if cuda.threadIdx.x < x.size:
            value = x[0]
        y[cuda.threadIdx.x] = value + x[0]

    for kind in np.float32, np.int32:
        x, y = np.array([2, 7, 3], kind), np.zeros(32, kind)
        launch(kernel, 32, x, y, checks=checks)
        assert y[0] == 7
        if checks:
            with pytest.raises(
                emulator.KernelFault, match="reads shared array.31., which was never"
            ):
                launch(reads_it, 32, x, y)
        else:
            launch(reads_it, 32, x, y, checks=False)
            assert y[31] == 2
        with pytest.raises(emulator.KernelFault, match="local variable 'value'"):
            launch(adds_to_it, 32, x, y, checks=checks)


@CHECKS
def test_reductions_of_arrays(checks):
    def kernel(x, n, c, out):
        out[0], out[1], out[2], out[3] = x.sum(), x.mean(), x.argmax(), x[1:3].max()
        out[4], out[5], out[6] = n.sum(), n.mean(), n.argmin()
        out[7], out[8], out[9] = np.sum(n), c.real.sum(), c.imag[1]
        out[10], out[11] = x.std(), n.prod()
        out[12], out[13] = np.max(x), n.any()

    x, n = np.array([0.1, 2, 7, 3], np.float32), np.array([[3, 250], [200, 9]], np.uint8)
    c, out = np.array([1 + 2j, 3 - 4j], np.complex64), np.zeros(14)
    launch(kernel, 1, x, n, c, out, checks=checks)
    total = np.float32(np.float32(np.float32(x[0] + x[1]) + x[2]) + x[3])
    assert out[:10].tolist() == [total, total / 4, 2, 7, 462, 115.5, 0, 462, 4, -4]
    assert (
        np.isclose(out[10], x.std())
        and out[11] == 3 * 250 * 200 * 9
        and out[12:].tolist() == [7, 1]
    )


def test_atomics_on_the_parts_of_complex_numbers():
    def kernel(c):
        cuda.atomic.add(c.real, 1, 2)
        cuda.atomic.add(c.imag, 1, -1)

    c = np.zeros(2, np.complex64)
    launch(kernel, 4, c)
    assert c.tolist() == [0, 8 - 4j]


@CHECKS
def test_cache_hints(checks):
    load = cuda.ldcg

    def kernel(x, y):
        i = cuda.threadIdx.x
        cuda.stcs(y, i, load(x, i) + cuda.ldca(x, (i + 1) % 4))

    x, y = np.arange(4, dtype=np.float32), np.zeros(4, np.float32)
    launch(kernel, 4, x, y, checks=checks)
    assert y.tolist() == [1, 3, 5, 3]
    if checks:
        with pytest.raises(emulator.KernelFault, match="bounds"):
            launch(kernel, 5, x, y)


def test_vector_types():
    from numba.cuda import stubs

    names = {name for stub in stubs._vector_type_stubs for name in (stub.__name__, *stub.aliases)}
    known = Emulator().resolver.cuda.__dict__
    assert len(names) == 88 and names <= known.keys()

    def kernel(y):
        pair = cuda.float32x2(1, 2.5)
        v = cuda.float4(pair, 3, int8x1(300))
        y[0], y[1], y[2], y[3] = v.x, v.y, v.z, v.w
        y[4] = cuda.uchar2(-1, 7).x

    y = np.zeros(5)
    launch(kernel, 1, y)
    assert y.tolist() == [1, 2.5, 3, 44, 255]

    def wrong(y):
        y[0] = cuda.int3(1, 2).x

    with pytest.raises(emulator.KernelFault, match="int32x3 takes 3 numbers, 2 were given"):
        launch(wrong, 1, y)


def test_methods_of_other_things_are_theirs():
    total = 3

    def kernel(y):
        y[0] = int32(total).sum if False else total

    y = np.zeros(1, np.int32)
    launch(kernel, 1, y)
    assert y[0] == 3
