"""Gradients of several layers in one launch; the kernels themselves are among the cases of `numdiff
kernels check`."""

import numpy as np
import pytest

from numdiff.device import cuda, get_backend, int32, launch, zeros
from numdiff.device.emulator import EmulatorDevice
from numdiff.device.limits import MULTIPROCESSORS
from numdiff.kernels.linear import gradients as L
from numdiff.kernels.matmul import group
from numdiff.kernels.matmul.hopper.group_schedule import (
    count_parts,
    cut,
    group_tile,
    longest,
    parts_of,
    unit_after,
    walk_of,
)
from numdiff.kernels.operation.versions import at_most
from tests.conftest import needs

DEVICES = ["emulator", pytest.param("cuda", marks=needs("gpu"))]
BLOCK_OF_A_DIT = (1152, 384), (384, 384), (1536, 384), (384, 1536)
FIELDS = 7  # of a unit in `walk_kernel`'s table


@cuda.jit
def walk_kernel(table, parts, group, most):
    """A block's units, one after the other: the fields of their `GroupTile`."""
    block, at = int32(cuda.blockIdx.x), int32(cuda.blockIdx.x * (most * FIELDS))
    unit, walk = walk_of(block, int32(cuda.gridDim.x), group)
    while unit < walk.last:
        tile = group_tile(unit, walk, group)
        for i in range(FIELDS):
            table[at + i] = tile[i]
        at = int32(at + FIELDS)
        unit = unit_after(unit, tile, walk, group)
    for number in range(block, group.tiles, int32(cuda.gridDim.x)):
        parts[number] = parts_of(int32(number), group)


@pytest.mark.parametrize(
    "sizes, width, steps, blocks, shortest",
    [
        # tiles that are whole, and others with two parts
        (((384, 200), (136, 72), (8, 8)), 128, 5, 4, 1),
        (((384, 200), (136, 72)), 128, 9, 11, 1),  # … with two and three
        # more rows of tiles than sweep together
        (((2304, 72), (8, 392), (8, 8), (128, 128)), 128, 7, 16, 1),
        (((8, 8),), 256, 9, 4, 2),  # one tile
        (((8, 8),), 256, 3, 16, 1),  # blocks without work
        (((384, 200), (136, 72)), 128, 5, 4, 8),
    ],
)  # nothing is cut
def test_each_step_of_each_tile_is_done_once(sizes, width, steps, blocks, shortest):
    tiles = sum(m * n for m, n in group.tiles_of(sizes, width))
    made = cut(tiles, steps, blocks, shortest)
    given, _ = group.group_of(sizes, 64 * steps, width, made)
    most = tiles // blocks + 4
    backend = EmulatorDevice()
    table, parts = (
        zeros(made.blocks * most * FIELDS, np.int32, backend),
        zeros(tiles, np.int32, backend),
    )
    backend.view(table)[...] = -2
    launch(walk_kernel, made.blocks, 1, table, parts, given, most)
    found = {}
    for block in backend.download(table).reshape(made.blocks, most, FIELDS).tolist():
        units = [unit for unit in block if unit[0] >= 0]
        for part, row, column, first, end, product, number in units:
            rows, columns = group.tiles_of(sizes, width)[product]
            assert first < end and row < rows and column < columns
            found.setdefault(number, []).append((part, first, end, product, row, column))
        later = sum(unit[4] - unit[3] for unit in units if unit[6] >= made.whole)
        assert later <= (longest(made) if made.whole < tiles else 0)
    assert (
        sorted(found) == [*range(tiles)] and len({tile[0][3:] for tile in found.values()}) == tiles
    )
    for number, pieces in found.items():
        pieces.sort()
        assert [part for part, *_ in pieces] == [*range(len(pieces))] and len(
            pieces
        ) == backend.download(parts)[number]
        assert [first for _, first, *_ in pieces] == [0, *(end for _, _, end, *_ in pieces[:-1])]
        assert pieces[-1][2] == steps and (number >= made.whole or len(pieces) == 1)
    assert max(map(len, found.values())) == made.parts
    if made.whole < tiles:
        assert sum(map(len, found.values())) == made.whole + count_parts(made, tiles)


def test_what_is_chosen():
    """Of a DiT-S/2's and an XL/2's blocks no tile is cut, of a B/2's those of the third round."""
    for D, K, width, whole in (
        (384, 16384, 128, 108),
        (768, 16384, 192, 264),
        (1152, 8192, 192, 648),
    ):
        sizes = (3 * D, D), (D, D), (4 * D, D), (D, 4 * D)
        chosen, made, ns = group.choose(sizes, K, MULTIPROCESSORS)
        assert (chosen, made.whole) == (width, whole)
        for width in group.WIDTHS:
            tiles = sum(m * n for m, n in group.tiles_of(sizes, width))
            for splits in (False, True):
                made = cut(tiles, K // 64, MULTIPROCESSORS, group.SHORTEST, splits)
                time = group.estimate(sizes, K, MULTIPROCESSORS, width, made)
                assert ns <= time or tiles - made.whole > group.MOST_CUT * tiles


@pytest.mark.parametrize("device", DEVICES)
def test_what_is_supported(device, monkeypatch):
    backend = get_backend(device)
    monkeypatch.setattr(L, "GAIN", 10)
    x = zeros((2, 64, 384), np.float16, backend)
    assert L.linear_gradients_supports(x, BLOCK_OF_A_DIT)
    assert not L.linear_gradients_supports(x, BLOCK_OF_A_DIT[:1])
    assert not L.linear_gradients_supports(x, (*BLOCK_OF_A_DIT, (8, 8)))
    assert not L.linear_gradients_supports(x, ((384, 384), (12, 384)))
    assert not L.linear_gradients_supports(zeros((3, 384), np.float16, backend), BLOCK_OF_A_DIT)
    assert not L.linear_gradients_supports(zeros((8, 384), np.float32, backend), BLOCK_OF_A_DIT)
    assert not L.linear_gradients_supports(np.zeros((8, 384), np.float16), BLOCK_OF_A_DIT)
    with at_most({"matmul": "mma"}):
        assert L.linear_gradients_supports(x, BLOCK_OF_A_DIT)
    with at_most({"matmul": "tiled"}):
        assert not L.linear_gradients_supports(x, BLOCK_OF_A_DIT)
    monkeypatch.setattr(L, "GAIN", 0)
    assert not L.linear_gradients_supports(x, BLOCK_OF_A_DIT)


def test_layers_that_fill_a_gpu_by_themselves_stay_apart():
    full = (1536, 256 * 11)  # 12 · 11 tiles
    for rung in (5, 6):
        assert L.gains(rung, BLOCK_OF_A_DIT, 16384, MULTIPROCESSORS)
        assert not L.gains(rung, (full, full), 16384, MULTIPROCESSORS)


def test_against_single_layers(rng):
    """NumPy, and what does not fit together."""
    layers = [
        [rng.standard_normal(shape) for shape in ((5, N), (5, K), (N, K), (N,))]
        for N, K in ((3, 4), (2, 6))
    ]
    want = [(dweight + dy.T @ x, dbias + dy.sum(0)) for dy, x, dweight, dbias in layers]
    L.linear_gradients_backward(layers)
    for (_, _, dweight, dbias), (w, b) in zip(layers, want, strict=True):
        np.testing.assert_allclose(dweight, w)
        np.testing.assert_allclose(dbias, b)
    layers[1][3] = None
    L.linear_gradients_backward(layers, False)
    np.testing.assert_allclose(layers[1][2], layers[1][0].T @ layers[1][1])
    layers[1][0] = layers[1][0][:4]
    with pytest.raises(ValueError, match="with the same R"):
        L.linear_gradients_backward(layers)


def test_costs():
    assert L.linear_gradients_backward_cost(2, ((3, 5), (1, 4))) == (4 * 13 + 8 * 19, 4 * 19)
    assert L.linear_gradients_backward_cost(2, ((3, 5),), False) == (4 * 8 + 4 * 15, 60)
