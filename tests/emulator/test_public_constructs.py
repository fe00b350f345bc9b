"""Constructs that public Numba CUDA code uses, each in a small kernel (docs/log/public-kernels.md lists
the kernels that were run)."""

import math
import types

import numba
import numpy as np
import pytest
from numba import cuda, float32

from numdiff import emulator

ORDERS = pytest.mark.parametrize("order", ["forward", "shuffled", "unchecked"])


def device(order):
    checks = order != "unchecked"
    return emulator.device(order=order if checks else "forward", checks=checks, float64=True)


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
