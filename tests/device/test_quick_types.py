"""Compiling with a memory of type inference (quick_types.py) gives the PTX that Numba gives without
it."""

import re

import pytest
from numba import cuda, float32, int32

from numdiff.device import quick_types
from numdiff.device.ptx import compile_for


@cuda.jit(device=True)
def clipped(x, limit):
    return min(max(x, -limit), limit)


@cuda.jit
def scale(x, y, factor):
    i = cuda.grid(1)
    if i < x.size:
        y[i] = clipped(x[i] * factor, float32(2)) + y[i] / float32(3)


@cuda.jit
def count(x, y, limit):
    total = int32(0)
    for i in range(cuda.threadIdx.x, x.size, cuda.blockDim.x):
        total += int32(x[i] > limit) << int32(i & 1)
    cuda.atomic.add(y, 0, total)


@pytest.mark.parametrize(
    "kernel, signature",
    [(scale, (float32[::1], float32[::1], float32)), (count, (float32[::1], int32[::1], float32))],
    ids=["scale", "count"],
)
def test_same_ptx(kernel, signature):
    def texts():
        found = compile_for(kernel, signature, ((8, 0), (9, 0, "a"))).values()
        # mangled names count what was compiled before
        return [re.sub(r"_ZN[\w$]+", "name", text) for text in found]

    plain = texts()
    with quick_types.quick_types():
        first, again = texts(), texts()
    assert first == again == plain


@pytest.mark.skipif(
    not quick_types.available, reason="this version of Numba is compiled with plainly"
)
def test_memory_is_used():
    quick_types.answers.clear()
    with quick_types.quick_types():
        compile_for(scale, (float32[::1], float32[::1], float32), ((8, 0),))
    assert quick_types.answers
    assert quick_types.BaseFunction.get_call_type is quick_types.plain_call_type


def test_plain_where_numba_differs(monkeypatch):
    monkeypatch.setattr(quick_types, "available", False)
    with quick_types.quick_types():
        assert "ret" in compile_for(scale, (float32[::1], float32[::1], float32), ((8, 0),))[8, 0]
