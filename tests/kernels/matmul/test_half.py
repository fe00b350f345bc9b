"""Matmul of float16: the tensor-core rungs, every case of transposes, epilogue and split, against
float64."""

import numpy as np
import pytest

from numdiff.device import download
from numdiff.kernels import linear
from numdiff.kernels import matmul as P
from numdiff.kernels.concat import Pair
from numdiff.kernels.elementwise import gelu_backward, gelu_forward
from numdiff.kernels.linear import (
    linear_backward,
    linear_forward,
    linear_gate_forward,
    linear_gate_supports,
    linear_gelu_forward,
    linear_gelu_supports,
    linear_swiglu_forward,
    linear_swiglu_supports,
)
from numdiff.kernels.matmul import choice, launcher, mma, symmetric
from numdiff.kernels.matmul.hopper import launcher as hopper_launcher
from numdiff.kernels.matmul.hopper import layout, symmetric_epilogue
from numdiff.kernels.matmul.hopper.work import schedule
from numdiff.kernels.transformer.columns import Columns, Sums
from numdiff.kernels.transformer.gate import gate_forward
from numdiff.kernels.transformer.swiglu import swiglu_backward_reference, swiglu_forward_reference
from tests.conftest import exhaustively, large, on, quick, relative_error, shapes, versions, where

TOLERANCE = 2e-3
TRANSPOSES = pytest.mark.parametrize(
    "transposes",
    [(False, False), (False, True), (True, False), (True, True)],
    ids=["nn", "nt", "tn", "tt"],
)
# A kernel takes seconds to compile: test_float16 has one of each rung, test_compile_logs.py has
# all.
QUICK, KERNELS = on("cpu", "launch", "emulator", "cuda"), on("launch", "emulator", "cuda")
NARROWEST = {5: (64, 64), 6: (128, 64)}


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
    monkeypatch.setattr(choice, "choose_half", lambda *_: (tile, slices, 0.0))


def small_tiles(monkeypatch, version):
    """In the emulator, the narrowest tile of a version."""
    if version in NARROWEST:
        choose(monkeypatch, NARROWEST[version])


# minimal: less than a chunk's neighbours; odd: not a multiple of any tile
SHAPES = shapes(
    minimal=(8, 8, 8), odd=(72, 40, 40), not_aligned=(1000, 344, 520), large=(640, 768, 1024)
)


def is_no_repetition(engine, version, shape, transposes):
    """test_matmul.py has version 2; of larger results the emulator does the other cases in
    test_every_tile, of the smallest in `numdiff kernels check`."""
    if engine not in ("emulator", "ptx"):
        return True
    first = shape == (8, 8, 8) and transposes == (False, True)
    return version is not None and (
        first
        or engine == "emulator"
        and version != 2
        and shape != (8, 8, 8)
        and transposes == (False, False)
    )


@SHAPES
@versions(2, 5, 6)
@TRANSPOSES
@where(is_no_repetition)
def test_float16(engine, rng, monkeypatch, shape, version, transposes):
    M, N, K = shape
    a, b = operands(rng, M, N, K, transposes)
    if engine.name in ("emulator", "ptx"):
        small_tiles(monkeypatch, version)
    got = P.matmul_forward(engine(a), engine(b), *transposes, version=version)
    assert got.dtype == np.float16
    engine.check(got, product(a, b, transposes), TOLERANCE)


@pytest.mark.parametrize("tile", [*mma.TILES, *((layout.BM, n) for n in layout.STAGES)], ids=str)
@pytest.mark.parametrize("half", [True, False], ids=["half", "float"])
@KERNELS
@quick(lambda engine, half, tile: engine != "emulator" or half and tile[1] == 64)
def test_every_tile(engine, rng, monkeypatch, tile, half):
    """A result of one tile and a bit, so that a block's edges, and its second tile, are seen."""
    version = 5 if tile in mma.TILES else 6
    choose(monkeypatch, tile)
    transposes = (False, True) if half else (True, False)
    M, N, K = (tile[0] + 8 if tile[1] == 64 else 40), tile[1] - 24, 40 if version == 5 else 8
    a, b = operands(rng, M, N, K, transposes)
    out = np.float16 if half else np.float32
    got = P.matmul_forward(engine(a), engine(b), *transposes, version=version, out_dtype=out)
    assert got.dtype == out
    engine.check(got, product(a, b, transposes), TOLERANCE if half else 1e-6)


def in_pairs(monkeypatch, pairs):
    monkeypatch.setattr(choice, "PAIRS", pairs)


@pytest.mark.parametrize("transpose_b", [True, *exhaustively(False)])
@KERNELS
@where(lambda engine: engine != "launch")
def test_pairs_of_blocks(engine, rng, monkeypatch, transpose_b):
    """Blocks that share their tiles of B give the bits of blocks alone; the second has few rows."""
    (M, N, K), transposes = (136, 136, 72), (False, transpose_b)
    a, b = operands(rng, M, N, K, transposes)
    # more steps than stages, of the widest tile, are in `numdiff kernels check`
    choose(monkeypatch, (layout.BM, 192))
    results = []
    for pairs in (False, True):
        in_pairs(monkeypatch, pairs)
        results.append(P.matmul_forward(engine(a), engine(b), *transposes, version=6))
    engine.check(results[1], product(a, b, transposes), TOLERANCE)
    engine.check_equal(*results)


@pytest.mark.parametrize("version", [None, 2, 5, 6])
@QUICK
@where(lambda engine, version: engine != "cpu" or version is None)
def test_epilogue_float16(engine, rng, monkeypatch, version):
    """alpha, bias and residual, rounded once; and the same bits again."""
    if engine.name == "emulator" and version is not None:
        small_tiles(monkeypatch, version)
    M, N, K = (24, 40, 24) if engine.name == "emulator" else (264, 264, 72)
    a, b = operands(rng, M, N, K)
    bias, residual = rng.standard_normal(N), halves(rng, M, N)
    want = 0.5 * product(a, b) + bias.astype(np.float32) + residual
    results = [
        P.matmul_forward(
            engine(a),
            engine(b),
            False,
            True,
            bias=engine(bias),
            alpha=0.5,
            version=version,
            residual=engine(residual),
        )
        for _ in range(engine.repeats)
    ]
    engine.check(results[0], want, 4e-4)
    engine.check_equal(results[0], results[-1])
    out = engine(residual)
    assert (
        P.matmul_forward(
            engine(a),
            engine(b),
            False,
            True,
            bias=engine(bias),
            alpha=0.5,
            version=version,
            out=out,
            accumulate=True,
        )
        is out
    )
    engine.check_equal(out, results[0])


@pytest.mark.parametrize("slices", [1, 3, 9])
@pytest.mark.parametrize("version", [None, 5, 6])
@QUICK
@where(lambda version, slices: version is not None or slices == 1)
@quick(
    lambda engine, version, slices: (
        engine != "emulator" or slices == 1 or (version, slices) == (6, 9)
    )
)
def test_weight_gradient(engine, rng, monkeypatch, version, slices):
    """dyᵀ·x, added into float32; the long sum, of any length, in slices.

    Tensor cores cut off low bits of a long sum instead of rounding: 3.6e-6 for 3,001 products on an
    H100.
    """
    if version is not None:
        choose(monkeypatch, NARROWEST[version], slices)
    M, N, K = (
        (24, 16, 140 if slices < 9 else 520) if engine.name == "emulator" else (264, 200, 3001)
    )
    a, b = operands(rng, M, N, K, (True, False))
    start, bias = rng.standard_normal((M, N)), rng.standard_normal(N)
    results = []
    for _ in range(engine.repeats):
        results.append(engine(start))
        P.matmul_forward(
            engine(a),
            engine(b),
            True,
            False,
            bias=engine(bias),
            alpha=0.5,
            out=results[-1],
            accumulate=True,
            version=version,
        )
    engine.check(results[0], start + 0.5 * product(a, b, (True, False)) + bias, 1e-5)
    engine.check_equal(results[0], results[-1])
    if engine.name == "cuda":
        P.matmul_forward(engine(a), engine(b), True, False, out=results[0], version=version)
        engine.check(results[0], product(a, b, (True, False)), 1e-5)


@pytest.mark.parametrize("slices", [1, 2])
@pytest.mark.parametrize("version", [None, 2, 5, 6])
@QUICK
@where(lambda version, slices: version not in (None, 2) or slices == 1)
# `kernels check` has the others
@quick(lambda engine, version: engine != "emulator" or version == 2)
def test_row_sums(engine, rng, monkeypatch, version, slices):
    """The bias's gradient with the weight's: both accumulate."""
    few_blocks = engine.name == "emulator" and version == 6
    if version in NARROWEST:
        choose(monkeypatch, NARROWEST[version], slices)
    M, N, K = (24, 16, 136) if engine.name == "emulator" else (264, 200, 3001)
    # a second tile of columns, which sums nothing; two long slices and two short ones on three
    # blocks
    if few_blocks:
        monkeypatch.setattr(
            engine.backend, "multiprocessors", 1 if slices == 1 else 3, raising=False
        )
        M, N, K = (144 if slices == 1 else 24), 72, 136
    a, b = operands(rng, M, N, K, (True, False))
    start, sums = rng.standard_normal((M, N)), rng.standard_normal(M)
    runs = []
    for _ in range(engine.repeats):
        runs.append((engine(start), engine(sums)))
        P.matmul_forward(
            engine(a),
            engine(b),
            True,
            False,
            out=runs[-1][0],
            accumulate=True,
            version=version,
            row_sums=runs[-1][1],
        )
    engine.check(runs[0][0], start + product(a, b, (True, False)), 1e-5)
    engine.check(runs[0][1], sums + a.astype(np.float64).sum(0), 1e-5)
    engine.check_equal(runs[0][0], runs[-1][0])
    engine.check_equal(runs[0][1], runs[-1][1])


@pytest.mark.parametrize("transposes", [(False, True), (False, False)])
@QUICK
def test_batch(engine, rng, monkeypatch, transposes):
    """A batch of small matrices goes to rung 5."""
    if engine.name == "emulator":
        choose(monkeypatch, NARROWEST[5])
    a, b = operands(rng, 24, 16, 24, transposes, (2, 1))
    residual = halves(rng, 2, 1, 24, 16)
    got = P.matmul_forward(engine(a), engine(b), *transposes, residual=engine(residual))
    engine.check(got, product(a, b, transposes) + residual, TOLERANCE)


@TRANSPOSES
@QUICK
@quick(lambda engine, transposes: engine != "emulator" or transposes == (False, True))
def test_a_batch_of_whole_tiles(engine, rng, monkeypatch, transposes):
    """A batch goes to rung 6 where no tile has rows of two matrices. Where columns end within a
    tile the next matrix begins, of which nothing may be seen."""
    M, N, K = (128, 72, 64) if engine.name == "emulator" else (256, 200, 192)
    if engine.name == "emulator":
        choose(monkeypatch, NARROWEST[6])
    a, b = operands(rng, M, N, K, transposes, (2,))
    residual = halves(rng, 2, M, N)
    results = [
        P.matmul_forward(
            engine(a),
            engine(b),
            *transposes,
            alpha=0.5,
            residual=engine(residual),
            version=6 if engine.has_versions else None,
        )
        for _ in range(engine.repeats)
    ]
    engine.check(results[0], 0.5 * product(a, b, transposes) + residual, TOLERANCE)
    engine.check_equal(results[0], results[-1])
    if engine.has_versions:
        with pytest.raises(
            ValueError,
            match="takes a batch for float16 results, M a multiple of 128 and K of 64, not "
            "M 24, K 64 and float16; use version=5",
        ):
            P.matmul_forward(
                engine(halves(rng, 2, 24, 64)), engine(halves(rng, 2, 64, 8)), version=6
            )


@pytest.mark.parametrize("shape", [(5, 7, 3), (20, 12, 9)])
@pytest.mark.parametrize("out", [np.float16, np.float32])
@QUICK
def test_extents_that_do_not_come_in_eights(engine, rng, shape, out):
    """They fall back to rung 2, with every epilogue."""
    M, N, K = shape
    a, b = operands(rng, M, N, K)
    bias, residual = rng.standard_normal(N), halves(rng, M, N)
    got = P.matmul_forward(
        engine(a),
        engine(b),
        False,
        True,
        bias=engine(bias),
        residual=engine(residual),
        out_dtype=out,
    )
    assert got.dtype == out
    engine.check(got, product(a, b) + bias + residual, TOLERANCE)
    add = engine(residual.astype(out))
    P.matmul_forward(engine(a), engine(b), False, True, bias=engine(bias), out=add, accumulate=True)
    engine.check(add, product(a, b) + bias + residual, TOLERANCE)


@pytest.mark.parametrize("blocks", [1, 3])
@pytest.mark.parametrize("width", [None, *layout.STAGES])
@QUICK
@where(lambda engine, width, blocks: engine != "cpu" or (width, blocks) == (None, 1))
@where(lambda engine, width, blocks: engine != "emulator" or (width, blocks) == (128, 1))
# the cases of `numdiff kernels check` have both passes of each width
@quick(lambda engine: engine != "emulator")
def test_gelu(engine, rng, monkeypatch, width, blocks):
    """u and GELU(u) from one product; another one times GELU'(u). With few blocks each has several
    tiles.

    In the emulator `numdiff kernels check` has a tile of each width; here one block has two tiles
    of two steps, more than 64 rows high.
    """
    if width is not None:
        choose(monkeypatch, (layout.BM, width))
        monkeypatch.setattr(engine.backend, "multiprocessors", blocks, raising=False)
    M, N, K = (72, 136, 72) if engine.name in ("cpu", "emulator") else (712, 1096, 328)
    x, weight, bias = halves(rng, M, K), halves(rng, N, K), rng.standard_normal(N)
    weight = (weight / np.sqrt(K) * 2).astype(np.float16)
    runs = [
        linear_gelu_forward(engine(x), engine(weight), engine(bias)) for _ in range(engine.repeats)
    ]
    want = product(x, weight) + bias.astype(np.float32)
    engine.check(runs[0][0], want, TOLERANCE)
    engine.check(runs[0][1], gelu_forward(want), TOLERANCE)
    assert runs[0][0].dtype == runs[0][1].dtype == np.float16
    # as without a backward
    u, alone = linear_gelu_forward(engine(x), engine(weight), engine(bias), keeps_u=False)
    engine.check_equal(alone, runs[0][1])
    assert u is None or not linear_gelu_supports(engine(x), engine(weight))
    u, dy = (2 * rng.standard_normal((M, N))).astype(np.float16), halves(rng, M, K)
    weight_2, h = halves(rng, K, N), gelu_forward(u.astype(np.float32)).astype(np.float16)
    gradients = [
        linear_backward(
            engine(dy),
            engine(h),
            engine(weight_2),
            engine.zeros((K, N)),
            engine.zeros(K),
            gelu_of=engine(u),
        )
        for _ in range(engine.repeats)
    ]
    want = gelu_backward(product(dy, weight_2, (False, False)), u.astype(np.float64))
    engine.check(gradients[0], want, TOLERANCE)
    for first, second in (*zip(runs[0], runs[-1], strict=True), (gradients[0], gradients[-1])):
        engine.check_equal(first, second)
    again = []
    for _ in range(engine.repeats):  # without GELU(u), which the same kernel gives
        dweight, dbias = engine.zeros((K, N)), engine.zeros(K)
        du = linear_backward(engine(dy), None, engine(weight_2), dweight, dbias, gelu_of=engine(u))
        again.append((du, dweight, dbias))
    engine.check_equal(again[0][0], gradients[0])
    engine.check(
        again[0][1], product(dy, gelu_forward(u.astype(np.float64)), (True, False)), TOLERANCE
    )
    engine.check(again[0][2], dy.sum(0, dtype=np.float64), TOLERANCE)
    for first, second in zip(again[0], again[-1], strict=True):
        engine.check_equal(first, second)
    # of a frozen weight
    alone = linear_backward(engine(dy), None, engine(weight_2), None, gelu_of=engine(u))
    engine.check_equal(alone, gradients[0])


@pytest.mark.parametrize("blocks", [1, 3])
@pytest.mark.parametrize("width", [None, *layout.STAGES])
@QUICK
@where(lambda engine, width, blocks: engine != "cpu" or (width, blocks) == (None, 1))
@where(lambda engine, width, blocks: engine != "emulator" or (width, blocks) == (128, 1))
@quick(lambda engine: engine != "emulator")  # as for GELU
def test_swiglu(engine, rng, monkeypatch, width, blocks):
    """u and SwiGLU(u) from one product; its backward from another. The halves end within a tile."""
    if width is not None:
        choose(monkeypatch, (layout.BM, width))
        monkeypatch.setattr(engine.backend, "multiprocessors", blocks, raising=False)
    M, H, K = (72, 136, 72) if engine.name in ("cpu", "emulator") else (712, 1096, 328)
    x, w12, w3, b12 = (
        halves(rng, M, K),
        halves(rng, 2 * H, K),
        halves(rng, K, H),
        rng.standard_normal(2 * H),
    )
    w12 = (w12 / np.sqrt(K) * 2).astype(np.float16)
    fused = linear_swiglu_supports(engine(x), engine(w12), engine(w3))
    runs = [
        linear_swiglu_forward(engine(x), engine(w12), engine(b12)) for _ in range(engine.repeats)
    ]
    want = product(x, w12) + b12.astype(np.float32)
    engine.check(runs[0][0], want, TOLERANCE)
    engine.check(runs[0][1], swiglu_forward_reference(want), TOLERANCE)
    assert runs[0][0].dtype == runs[0][1].dtype == np.float16
    # as without a backward
    u, alone = linear_swiglu_forward(engine(x), engine(w12), engine(b12), keeps_u=False)
    engine.check_equal(alone, runs[0][1])
    assert (u is None) == fused
    plain, _ = linear_swiglu_forward(engine(x), engine(w12))  # without a bias
    engine.check(plain, product(x, w12), TOLERANCE)
    u, dy = (2 * rng.standard_normal((M, 2 * H))).astype(np.float16), halves(rng, M, K)
    h = swiglu_forward_reference(u)
    gradients = [
        linear_backward(
            engine(dy),
            engine(h),
            engine(w3),
            engine.zeros((K, H)),
            engine.zeros(K),
            swiglu_of=engine(u),
        )
        for _ in range(engine.repeats)
    ]
    want = swiglu_backward_reference(product(dy, w3, (False, False)), u.astype(np.float64))
    engine.check(gradients[0], want, TOLERANCE)
    for first, second in (*zip(runs[0], runs[-1], strict=True), (gradients[0], gradients[-1])):
        engine.check_equal(first, second)


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
        else Columns(engine(gates), N, N, Sums((B, 3 * N)))
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


@pytest.mark.parametrize("rows", [(3, 5), (1, 9)])
@QUICK
def test_linear(engine, rng, rows):
    K, N = 24, 16
    x, weight, dy = halves(rng, *rows, K), halves(rng, N, K), halves(rng, *rows, N)
    bias, residual = rng.standard_normal(N), halves(rng, *rows, N)
    y = linear_forward(engine(x), engine(weight), engine(bias), residual=engine(residual))
    assert y.dtype == np.float16
    wide = [v.astype(np.float64) for v in (x, weight, dy)]
    engine.check(y, wide[0] @ wide[1].T + bias + residual, TOLERANCE)
    start = rng.standard_normal((N, K)), rng.standard_normal(N)
    dweight, dbias = engine(start[0]), engine(start[1])
    dx = linear_backward(engine(dy), engine(x), engine(weight), dweight, dbias)
    assert dx.dtype == np.float16
    flat = wide[2].reshape(-1, N), wide[0].reshape(-1, K)
    engine.check(dx, wide[2] @ wide[1], TOLERANCE)
    engine.check(dweight, start[0] + flat[0].T @ flat[1], 1e-5)
    engine.check(dbias, start[1] + flat[0].sum(0), 1e-5)


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
            choice, "choose_half", lambda *given: ((layout.BM, width), 1 + given[5], 0.0)
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
    flat = dy.reshape(-1, N).astype(np.float64)
    y, dx, added, dweight, dbias = results[0]
    engine.check(y, product(x.reshape(-1, K), weight).reshape(*rows, N) + bias, TOLERANCE)
    engine.check(dx, (flat @ weight).reshape(x.shape), TOLERANCE)
    engine.check(added, (flat @ weight).reshape(x.shape) + before, TOLERANCE)
    engine.check(dweight, start_w + flat.T @ x.reshape(-1, K), 1e-5)
    engine.check(dbias, start_b + flat.sum(0), 1e-5)


@pytest.mark.parametrize("width", layout.SYMMETRIC_WIDTHS)
@pytest.mark.parametrize("rows", [1, 2, 3, 6])
def test_the_tiles_of_a_symmetric_result(rows, width):
    """Each that has a number on or below the diagonal, once."""
    n = rows * layout.BM
    count = symmetric_epilogue.tiles_of(n, width)
    places = {symmetric_epilogue.symmetric_place.py_func(tile, width) for tile in range(count)}
    assert len(places) == count
    assert places == {
        (i, j)
        for i in range(rows)
        for j in range(-(-n // width))
        if j * width < (i + 1) * layout.BM
    }


@on("cpu", "cuda")
@pytest.mark.parametrize("transpose_a", [False, True], ids=["x·xᵀ", "xᵀ·x"])
@pytest.mark.parametrize("n, width", [(384, 256), (384, 128), (128, 256), (40, 128)])
def test_a_symmetric_result(engine, rng, monkeypatch, n, width, transpose_a):
    """Blocks below the diagonal have the bits of those above it; two runs agree."""
    monkeypatch.setattr(symmetric, "choose_symmetric", lambda *_: width)
    x, residual = halves(rng, 3, *((64, n) if transpose_a else (n, 64))), halves(rng, 3, n, n)
    residual = residual + residual.swapaxes(1, 2)
    want = 0.25 * product(x, x, (transpose_a, not transpose_a)) + residual - 1.5 * np.eye(n)
    results = [
        P.matmul_symmetric(
            engine(x), engine(x), transpose_a, not transpose_a, 0.25, -1.5, engine(residual)
        )
        for _ in range(engine.repeats)
    ]
    engine.check(results[0], want, TOLERANCE)
    for got in results:
        engine.check_equal(got, results[0])
    if engine.name == "cpu":  # NumPy's BLAS may add up the two halves in two orders
        return
    got, block = download(results[0]), np.arange(n) // layout.BOX
    np.testing.assert_array_equal(
        *(np.where(block[:, None] == block, 0, c) for c in (got, got.swapaxes(1, 2)))
    )


def test_what_is_not_symmetric_is_refused(engine):
    x = engine(np.zeros((2, 8, 16)))
    with pytest.raises(
        ValueError, match="whose products are symmetric; check transpose_a and transpose_b"
    ):
        P.matmul_symmetric(x, x)
    with pytest.raises(
        ValueError, match=r"residual has shape \(2, 8, 16\), the product has \(2, 8, 8\)"
    ):
        P.matmul_symmetric(x, x, transpose_b=True, residual=x)


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
        ((7, 5), (64, 64, 64), (), 2),
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
    tile, slices, _ = choice.choose_half(6, 1, 768, 768, 16384, True, 132)
    tiles = -(-768 // tile[0]) * -(-768 // tile[1])
    assert slices > 1 and tiles * slices > 0.8 * 132
    assert choice.choose_half(6, 1, 8192, 8192, 8192, True, 132)[:2] == ((128, 256), 1)
    assert choice.choose_half(6, 1, 768, 768, 16384, False, 132)[1] == 1


@KERNELS
def test_errors_say_what_to_do(engine, rng):
    a, b = operands(rng, 16, 12, 16)
    a, b = engine(a), engine(b)
    for version in (5, 6):
        with pytest.raises(ValueError, match="use version=2"):
            P.matmul_forward(a, b, False, True, version=version)
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


@on("cuda")
def test_two_runs_are_equal(engine, rng):
    a, b = operands(rng, 1024, 1280, 2048)
    first, second = (P.matmul_forward(engine(a), engine(b), False, True) for _ in range(2))
    engine.check_equal(first, second)
    engine.check(first, product(a, b), TOLERANCE)
