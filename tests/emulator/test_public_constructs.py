"""Constructs that public Numba CUDA code uses, each in a small kernel (docs/log/public-kernels.md lists
the kernels that were run)."""

import math
import types

import numba
import numpy as np
import pytest
from numba import cuda, float32, float64

from numdiff import emulator
from tests.emulator.planting import marked

ORDERS = pytest.mark.parametrize("order", ["forward", "shuffled", "unchecked"])


def device(order):
    checks = order != "unchecked"
    return emulator.device(order=order if checks else "forward", checks=checks, float64=True)


class Scaling:
    """A class that holds its kernel."""

    def __init__(self, factor):
        self.factor = factor

    @staticmethod
    @cuda.jit
    def _kernel(x, factor):
        i = cuda.grid(1)
        if i < x.size:
            x[i] *= factor

    def __call__(self, x):
        self._kernel[2, 8](x, self.factor)


@ORDERS
def test_a_kernel_that_is_a_static_method(order):
    x = np.arange(12.0)
    with device(order):
        Scaling(3)(x)
    assert x.tolist() == [3 * i for i in range(12)]


@numba.njit
def _mirrored(position, normal):
    """It makes a local array, which only a kernel can."""
    kept = cuda.local.array(3, float64)
    along = 0.0
    for i in range(3):
        kept[i] = position[i]
        along += position[i] * normal[i]
    for i in range(3):
        position[i] = kept[i] - 2 * along * normal[i]


@cuda.jit
def mirror(positions, normal):
    i = cuda.grid(1)
    if i < positions.shape[0]:
        _mirrored(positions[i, :], normal)


@ORDERS
def test_an_njit_function_with_a_local_array(order):
    p, n = np.random.default_rng(0).random((5, 3)), np.array([0.6, 0, 0.8])
    want = p - 2 * np.outer(p @ n, n)
    with device(order):
        mirror[1, 8](p, n)
    assert np.allclose(p, want)


def complex_sums(kind):
    """A kernel from text, whose dynamic shared memory has two halves."""
    names = {"cuda": cuda, "kind": kind}
    exec(
        """@cuda.jit
def sums(x, y):
    memory = cuda.shared.array(0, kind)
    n = y.size
    real, imag = memory[:n], memory[n : 2 * n]
    i = cuda.threadIdx.x
    if i < n:
        real[i] = imag[i] = 0
    cuda.syncthreads()
    cuda.atomic.add(real, i % n, x.real[i])
    cuda.atomic.add(imag, i % n, x.imag[i])
    cuda.syncthreads()
    if i < n:
        y[i] = real[i] + 1j * imag[i]
""",
        names,
    )
    return names["sums"]


@ORDERS
def test_a_kernel_from_text_with_halves_of_dynamic_shared_memory(order):
    x = (np.arange(12) + 1j * np.arange(12)[::-1]).astype(np.complex64)
    y = np.zeros(4, np.complex64)
    with device(order):
        complex_sums(np.float32)[1, 12, cuda.stream(), 8 * 4](x, y)
    assert y.tolist() == x.reshape(3, 4).sum(0).tolist()


@cuda.jit(device=True)
def lock(mutex, at):
    while cuda.atomic.cas(mutex, at, 0, 1) != 0:
        pass
    cuda.threadfence()


@cuda.jit(device=True)
def unlock(mutex, at):
    cuda.threadfence()
    cuda.atomic.exch(mutex, at, 0)


@cuda.jit
def insert_largest(values, mutex, top):
    """Each cell keeps its two largest values, under its lock."""
    i = cuda.grid(1)
    if i < values.size:
        cell = i % top.shape[0]
        lock(mutex, (cell, 0))
        if values[i] > top[cell, 0]:
            top[cell, 1] = top[cell, 0]
            top[cell, 0] = values[i]
        elif values[i] > top[cell, 1]:
            top[cell, 1] = values[i]
        unlock(mutex, (cell, 0))


@ORDERS
def test_a_lock_of_each_cell(order):
    values = np.random.default_rng(1).permutation(24)
    mutex, top = np.zeros((3, 1), np.uint32), np.full((3, 2), -1)
    with device(order):
        insert_largest[2, 16](values, mutex, top)
    assert top.tolist() == np.sort(values.reshape(8, 3).T)[:, :-3:-1].tolist()


@cuda.jit
def distinct(x, count):
    """Loops over a slice of a local array; assignments in a chain; `modf`; a chained comparison."""
    seen = cuda.local.array(8, numba.int32)
    corner = cuda.local.array((2, 2), numba.int32)
    corner[0][0] = corner[1][1] = 1
    corner[0][1] = corner[1][0] = 0
    n, i = 0, cuda.grid(1)
    for value in x[i]:
        _, whole = math.modf(value)
        known = False
        for other in seen[0:n]:
            if other == int(whole):
                known = True
                break
        if not known and 0 <= whole < 6:
            seen[n] = int(whole)
            n += corner[0, 0] * corner[1, 1] - corner[0, 1]
    count[i] = n


@ORDERS
def test_loops_over_part_of_a_local_array(order):
    x = np.random.default_rng(2).random((5, 9)) * 8
    count = np.zeros(5, np.int32)
    with device(order):
        distinct[1, 5](x, count)
    assert count.tolist() == [len({int(v) for v in row if v < 6}) for row in x]


detector = types.SimpleNamespace(
    BORDERS=np.array([[0.0, 1.0], [1.0, 3.0]]), DEFAULT=-1, SPEED=0.5, SIZE=(4, 5)
)
TRACK = np.dtype([("x", "f4"), ("charge", "f4"), ("plane", "i4")])


@numba.njit
def cell_of(plane, row):
    return row + detector.SIZE[0] * plane


@cuda.jit
def drift(tracks, cells):
    i = cuda.grid(1)
    if i < tracks.shape[0]:
        track = tracks[i]
        plane = detector.DEFAULT
        for p, border in enumerate(detector.BORDERS):
            if border[0] <= track["x"] < border[1]:
                plane = p
                break
        track["plane"] = plane
        if plane != detector.DEFAULT:
            track["charge"] *= math.exp(-abs(track["x"] - detector.BORDERS[plane][0]) / 0.5)
            cuda.atomic.max(cells, 0, cell_of(plane, int(track["x"] // detector.SPEED)))


@ORDERS
def test_records_and_an_object_of_constants(order):
    tracks = np.zeros(6, TRACK)
    tracks["x"], tracks["charge"] = [0.2, 2.5, -1, 1, 0.9, 7], 10
    cells = np.zeros(1, np.int64)
    with device(order):
        drift[1, 8](tracks, cells)
    assert tracks["plane"].tolist() == [0, 1, -1, 1, 0, -1] and cells[0] == 5 + 4
    depth = np.array([0.2, 1.5, 0, 0, 0.9, 0])
    assert np.allclose(tracks["charge"], 10 * np.exp(-depth / 0.5))


def make_overlaps():
    """Signatures are compiled where they are: this is called inside the context."""

    @cuda.jit("float32(float32[:], float32[:])", device=True, inline=True)
    def overlap(a, b):
        return max(min(a[1], b[1]) - max(a[0], b[0]), float32(0))

    @cuda.jit("(int64, float32[:], uint64[:])")
    def overlaps(n, spans, masks):
        """Bit j of a mask: whether span i overlaps span j, which the block has in shared memory."""
        i = cuda.threadIdx.x
        shared = cuda.shared.array(shape=(16 * 2,), dtype=float32)
        if i < n:
            shared[i * 2 + 0] = spans[i * 2 + 0]
            shared[i * 2 + 1] = spans[i * 2 + 1]
        cuda.syncthreads()
        if i < n:
            mask = 0
            for j in range(n):
                if overlap(spans[i * 2 : i * 2 + 2], shared[j * 2 : j * 2 + 2]) > 0:
                    mask |= 1 << j
            masks[i] = mask

    return overlaps


@ORDERS
def test_slices_of_shared_memory_for_a_function_with_a_signature(order):
    first = np.random.default_rng(3).random(12)
    spans = np.stack([first, first + 0.2], 1).astype(np.float32)
    masks = np.zeros(12, np.uint64)
    with device(order):
        stream = cuda.stream()
        with stream.auto_synchronize():
            d = cuda.to_device(spans.reshape(-1), stream)
            result = cuda.to_device(masks, stream)
            make_overlaps()[1, 16, stream](12, d, result)
            result.copy_to_host(masks, stream=stream)
    meet = abs(first[:, None] - first) < 0.2
    assert masks.tolist() == [sum(1 << j for j in range(12) if row[j]) for row in meet]


@cuda.jit
def two_qubits(real, n):
    i = cuda.grid(1)
    if i < n // 2:  # of the four elements that a task has, n // 4 tasks
        real[i + 3 * (n // 4)] += 1  # beyond


def test_a_guard_of_too_many_tasks_is_found():
    with (
        emulator.device(),
        pytest.raises(emulator.KernelFault, match="index 16 is outside") as caught,
    ):
        two_qubits[1, 8](np.zeros(16, np.int64), 16)
    assert caught.value.faults[0].line == marked(__file__, "beyond")


def integrator(whole):
    """A kernel whose closure names a function that only the other choice makes."""
    if whole:

        @cuda.jit(device=True)
        def advance(x, i):
            x[i] += 1

    else:

        @cuda.jit(device=True)
        def advance_in_part(x, i):
            if i % 2:
                x[i] += 1

    @cuda.jit
    def step(x):
        i = cuda.grid(1)
        if i < x.size:
            if whole:
                advance(x, i)
            else:
                advance_in_part(x, i)

    return step


@ORDERS
def test_a_closure_with_a_name_that_has_no_value(order):
    x = np.zeros(6)
    with device(order):
        integrator(True)[1, 8](x)
        integrator(False)[1, 8](x)
    assert x.tolist() == [1, 2] * 3
