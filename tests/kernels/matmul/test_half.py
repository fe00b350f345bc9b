"""Matmul of float16: the tensor-core rungs, every case of transposes, epilogue and split, against
float64."""

import numpy as np
import pytest

from numdiff.kernels import matmul as P
from numdiff.kernels.concat import Pair
from numdiff.kernels.linear import layer as linear
from numdiff.kernels.linear.layer import (
    linear_backward,
    linear_forward,
    linear_gate_forward,
    linear_gate_supports,
    linear_swiglu_supports,
)
from numdiff.kernels.matmul import choice, launcher, mma
from numdiff.kernels.matmul.hopper import launcher as hopper_launcher
from numdiff.kernels.matmul.hopper import layout
from numdiff.kernels.matmul.hopper.work import schedule
from numdiff.kernels.transformer.columns import RowColumns, RowColumnSums
from numdiff.kernels.transformer.gate import gate_forward
from tests.conftest import large, on, quick, relative_error, where

TOLERANCE = 2e-3
# A kernel takes seconds to compile: test_float16 has one of each rung, test_compile_logs.py has
# all.
QUICK, KERNELS = on("cpu", "launch", "emulator", "cuda"), on("launch", "emulator", "cuda")


def halves(rng, *shape):
    return rng.standard_normal(shape).astype(np.float16)


def operands(rng, M, N, K, transposes=(False, True), batch=()):
    return (
        halves(rng, *batch, *((K, M) if transposes[0] else (M, K))),
        halves(rng, *batch, *((N, K) if transposes[1] else (K, N))),
    )


def product(a, b, transposes=(False, True)):
    a, b = a.astype(np.float64), b.astype(np.float64)
    return (np.swapaxes(a, -1, -2) if transposes[0] else a) @ (
        np.swapaxes(b, -1, -2) if transposes[1] else b
    )


def choose(monkeypatch, tile, slices=1):
    monkeypatch.setattr(choice, "choose_half", lambda *_, **more: (tile, slices, 0.0))


@pytest.mark.parametrize("blocks", [1, 3])
@pytest.mark.parametrize("width", [None, *layout.STAGES])
@QUICK
@where(lambda engine, width, blocks: engine != "cpu" or (width, blocks) == (None, 1))
@where(lambda engine, width, blocks: engine != "emulator" or (width, blocks) == (64, 1))
def test_gate(engine, rng, monkeypatch, width, blocks):
    """residual + gate · (x·weightᵀ + bias) with the bits of three steps; the gate is a part of a
    wider array."""
    if width is not None:
        choose(monkeypatch, (layout.BM, width))
        monkeypatch.setattr(engine.backend, "multiprocessors", blocks, raising=False)
    B, T, N, K = (3, 16, 72, 8) if engine.name == "emulator" else (3, 240, 1096, 328)
    x, weight, bias = halves(rng, B, T, K), halves(rng, N, K), rng.standard_normal(N)
    residual, gates = halves(rng, B, T, N), halves(rng, B, 3 * N)
    gate = (
        gates[:, N : 2 * N]
        if engine.name == "cpu"
        else RowColumns(engine(gates), N, N, RowColumnSums((B, 3 * N)))
    )
    runs = [
        linear_gate_forward(*map(engine, (x, weight, bias, residual)), gate)
        for _ in range(engine.repeats)
    ]
    g = gates[:, None, N : 2 * N].astype(np.float64)
    engine.check(
        runs[0],
        residual + g * (product(x.reshape(-1, K), weight).reshape(B, T, N) + bias),
        TOLERANCE,
    )
    engine.check_equal(runs[0], runs[-1])
    if engine.name != "cpu":
        h = linear_forward(*map(engine, (x, weight, bias)))
        engine.check_equal(
            runs[0], gate_forward(engine(residual), h, engine(gates[:, N : 2 * N].copy()))
        )


@on("emulator")
def test_where_a_gate_is_part_of_the_product(engine, monkeypatch):
    """On Hopper in 16 bits, for images of a multiple of 16 tokens and rows of a multiple of 8, if
    there are enough."""

    def supports(tokens=16, width=8, dtype=np.float16, gate_dtype=np.float16):
        return linear_gate_supports(
            engine(np.zeros((2, tokens, width)), dtype),
            engine(np.zeros((2, 8)), gate_dtype),
            engine(np.zeros((8, width)), dtype),
        )

    assert not supports()
    monkeypatch.setattr(linear, "GATE_COLUMNS", 0)
    monkeypatch.setattr(linear, "GATE_ROUNDS", 0)
    assert supports() and not supports(tokens=24) and not supports(width=12)
    assert not supports(dtype=np.float32, gate_dtype=np.float32) and not supports(
        gate_dtype=np.float32
    )


@pytest.mark.parametrize(
    "shape, fused",
    [((16, 48, 8), True), ((16, 40, 8), False), ((12, 48, 8), False), ((16, 48, 12), False)],
)
@on("emulator")
def test_where_swiglu_is_part_of_the_products(engine, shape, fused):
    """On Hopper in 16 bits, where each half has a multiple of 8 columns, and so have the layers
    around it."""
    K, columns, M = shape
    x, w12, w3 = (
        engine(np.zeros(s), np.float16) for s in ((2, K), (columns, K), (M, columns // 2))
    )
    assert linear_swiglu_supports(x, w12, w3) == fused
    assert not linear_swiglu_supports(engine(np.zeros((2, K)), np.float32), w12, w3)


@KERNELS
def test_persistent_blocks(engine, rng, monkeypatch):
    """More tiles than blocks: stages, parities and the two buffers of the epilogue continue from
    tile to tile."""
    choose(monkeypatch, (128, 64))
    monkeypatch.setattr(type(engine.backend), "multiprocessors", 1, raising=False)
    if engine.name == "cuda":
        monkeypatch.setattr(engine.backend, "multiprocessors", 1)
    M, N, K = 8, 200, 136
    a, b = operands(rng, M, N, K)
    got = P.matmul_forward(engine(a), engine(b), False, True, version=6)
    engine.check(got, product(a, b), TOLERANCE)


@pytest.mark.parametrize("grid", [(1, 1), (5, 3), (16, 4), (37, 7)])
def test_every_tile_has_one_place(grid):
    """The grouped order of tiles visits each once."""
    places = {layout.tile_place.py_func(t, *grid) for t in range(grid[0] * grid[1])}
    assert places == {(m, n) for m in range(grid[0]) for n in range(grid[1])}


@pytest.mark.parametrize("seam", [64, 128, 40])
@pytest.mark.parametrize("width", [None, *layout.STAGES])
@QUICK
@where(lambda engine, width: engine != "cpu" or width is None)
@where(
    lambda engine, width, seam: (
        engine != "emulator"
        or (width, seam) in ((64, 40), (64, 128), (128, 64), (128, 128), (192, 64), (256, 128))
    )
)
@quick(lambda engine, width, seam: engine != "emulator" or (width, seam) == (128, 64))
def test_a_layer_of_two_arrays(engine, rng, monkeypatch, width, seam):
    """x and dx in two arrays, side by side as one: the bits of the layer on their concatenation.

    A seam that is no multiple of 64: they are joined first. In the emulator a seam inside of a tile
    for each width that has one, and between two tiles.
    """
    rows, N, K = (
        ((2, 7), 40, seam + 24) if engine.name == "emulator" else ((3, 431), 264, seam + 136)
    )
    if width is not None:
        monkeypatch.setattr(
            choice, "choose_half", lambda *given, **more: ((layout.BM, width), 1 + given[2], 0.0)
        )
        if engine.name == "emulator":
            monkeypatch.setattr(engine.backend, "multiprocessors", 2, raising=False)
    x, weight, dy, before = (
        halves(rng, *shape) for shape in ((*rows, K), (N, K), (*rows, N), (*rows, K))
    )
    bias, start_w, start_b = (
        rng.standard_normal(N),
        rng.standard_normal((N, K)),
        rng.standard_normal(N),
    )
    results = []
    for joined in (False, True):
        pair, residual = (Pair(engine(a[..., :seam]), engine(a[..., seam:])) for a in (x, before))
        assert P.pair_supports(pair) == (
            engine.name != "cpu" and seam % 64 == 0 and engine.backend.capability[0] == 9
        )
        if joined:
            pair, residual = pair.joined(), residual.joined()
        y = linear_forward(pair, engine(weight), engine(bias))
        dweight, dbias = engine(start_w), engine(start_b)
        dx = linear_backward(engine(dy), pair, engine(weight), dweight, dbias)
        added = linear_backward(engine(dy), pair, engine(weight), None, residual=residual)
        if not joined:
            assert [part.shape for part in dx] == [part.shape for part in pair]
            dx, added = dx.joined(), added.joined()
        results.append((y, dx, added, dweight, dbias))
    for of_two, of_one in zip(*results, strict=True):
        engine.check_equal(of_two, of_one)


def test_the_cpu_rounds_once(rng):
    """float16 on the CPU engine is float32 arithmetic, rounded at the end."""
    a, b = operands(rng, 9, 10, 300)
    residual = halves(rng, 9, 10)
    got = P.matmul_forward(a, b, False, True, residual=residual)
    want = (a.astype(np.float32) @ b.astype(np.float32).T + residual).astype(np.float16)
    assert np.array_equal(got, want)
    assert (
        relative_error(P.matmul_forward(a, b, False, True, out_dtype=np.float32), product(a, b))
        < 1e-6
    )


@large
@on("launch")
def test_the_launcher_chooses(engine, rng, monkeypatch):
    launched = []
    monkeypatch.setattr(hopper_launcher, "launch", lambda kernel, *a, **k: launched.append(6))
    monkeypatch.setattr(mma, "launch", lambda kernel, *a, **k: launched.append(5))
    monkeypatch.setattr(launcher, "launch", lambda kernel, *a, **k: launched.append(2))
    for capability, shape, batch, version in (
        ((9, 0), (64, 64, 64), (), 6),
        ((9, 0), (64, 64, 64), (3,), 5),
        ((9, 0), (128, 64, 64), (3,), 6),
        ((9, 0), (128, 64, 72), (3,), 5),
        ((8, 0), (64, 64, 64), (), 5),
        ((12, 0), (64, 64, 64), (), 5),
        ((7, 5), (64, 64, 64), (), 5),
        ((7, 0), (64, 64, 64), (), 2),
        ((9, 0), (64, 60, 64), (), 2),
        ((9, 0), (61, 64, 64), (), 6),
    ):
        monkeypatch.setattr(type(engine.backend), "capability", capability)
        a, b = operands(rng, *shape, batch=batch)
        P.matmul_forward(engine(a), engine(b), False, True)
        assert launched.pop() == version and not launched


@pytest.mark.parametrize(
    "tiles, slices, k_tiles, blocks",
    [
        (96, 2, 256, 132),
        (54, 3, 256, 132),
        (24, 6, 256, 132),
        (2, 2, 3, 3),
        (1, 3, 5, 8),
        (131, 2, 2, 132),
        (96, 4, 256, 132),
        (7, 1, 9, 132),
        (5, 7, 3, 33),
    ],
)
def test_a_schedule_covers_every_sum(tiles, slices, k_tiles, blocks):
    """What the blocks do, as the kernel walks through it: each step of each tile once, in about
    equal shares."""
    steps, slices, alone = schedule(tiles, slices, k_tiles, blocks)
    units = slices * tiles
    grid, seen, work = min(units, blocks), set(), []
    for block in range(grid):
        unit, done = block, 0
        while unit < units:
            part, tile = divmod(unit, tiles)
            ks = range(part * steps, min((part + 1) * steps, k_tiles))
            assert ks and seen.isdisjoint((tile, k) for k in ks)
            seen.update((tile, k) for k in ks)
            done += len(ks)
            unit += units if unit < alone else grid - alone
        work.append(done)
    assert len(seen) == tiles * k_tiles
    if alone:
        assert max(work) == steps and steps < -(-k_tiles // (slices - 1))


def test_splits_fill_a_gpu():
    """A weight gradient's few tiles are split, a large product is not."""
    tile, slices, _ = choice.choose_half(6, choice.gradient_product(768, 768, 16384), True, 132)
    tiles = -(-768 // tile[0]) * -(-768 // tile[1])
    assert slices > 1 and tiles * slices > 0.8 * 132
    (_, width), slices, _ = choice.choose_half(
        6, choice.gradient_product(8192, 8192, 8192), True, 132
    )
    assert width >= 192 and slices == 1
    assert choice.choose_half(6, choice.HalfProduct(1, 768, 768, 16384), False, 132)[1] == 1


@KERNELS
def test_errors_say_what_to_do(engine, rng):
    a, b = operands(rng, 16, 12, 16)
    a, b = engine(a), engine(b)
    for version in (5, 6):
        with pytest.raises(ValueError, match="use version=2"):
            P.matmul_forward(a, b, False, True, version=version)
    with pytest.raises(
        ValueError,
        match="takes a batch for float16 results, or float32 ones of A·Bᵀ, M a multiple of 128 and "
        "K of 64, not M 24, K 64 and float16; use version=5",
    ):
        batches = engine(halves(rng, 2, 24, 64)), engine(halves(rng, 2, 64, 8))
        P.matmul_forward(*batches, version=6)
    with pytest.raises(ValueError, match="use tiled, mma or hopper"):
        P.matmul_forward(a, b, False, True, version=4)
    with pytest.raises(ValueError, match="use cast_forward"):
        P.matmul_forward(a, engine(np.ones((12, 16))), False, True)
    with pytest.raises(ValueError, match="use cast_forward"):
        P.matmul_forward(a, b, False, True, bias=engine(np.ones(12), np.float16))
    with pytest.raises(ValueError, match="transpose_a=True"):
        P.matmul_forward(a, b, False, True, version=2, row_sums=engine.zeros(16))
    with pytest.raises(ValueError, match="pass one of them"):
        P.matmul_forward(a, b, False, True, residual=a, out=a, accumulate=True)
