import numpy as np
import pytest

from numdiff.kernels import matmul as P
from numdiff.kernels.matmul import choice, launcher, vectorised
from tests.conftest import large, numerical_gradient, quick, relative_error, shapes, versions, where

# (batch, M, N, K)
SHAPES = shapes(
    minimal=(1, 4, 4, 4),
    odd=(2, 5, 7, 3),
    one_tile=(1, 64, 64, 16),
    not_aligned=(3, 67, 130, 45),
    vectors=(2, 132, 68, 36),
    large=(1, 300, 260, 516),
)
USABLE = where(lambda version, shape: version != 4 or not any(n % 4 for n in shape[1:]))
TRANSPOSES = pytest.mark.parametrize(
    "transposes",
    [(False, False), (False, True), (True, False), (True, True)],
    ids=["nn", "nt", "tn", "tt"],
)


def operands(rng, shape, transposes=(False, False)):
    batch, M, N, K = shape
    a = rng.standard_normal((batch, K, M) if transposes[0] else (batch, M, K))
    b = rng.standard_normal((batch, N, K) if transposes[1] else (batch, K, N))
    return a, b


@TRANSPOSES
def test_reference_is_the_sum_of_products(rng, transposes):
    a, b = operands(rng, (2, 3, 4, 5), transposes)
    bias = rng.standard_normal(4)
    c = P.matmul_forward_reference(a, b, *transposes, bias=bias, alpha=0.5)
    for z, m, n in np.ndindex(c.shape):
        total = sum(
            (a[z, k, m] if transposes[0] else a[z, m, k])
            * (b[z, n, k] if transposes[1] else b[z, k, n])
            for k in range(5)
        )
        assert abs(c[z, m, n] - (0.5 * total + bias[n])) < 1e-12


@TRANSPOSES
def test_gradient(rng, transposes):
    a, b = operands(rng, (2, 3, 4, 5), transposes)
    dc = rng.standard_normal((2, 3, 4))
    da, db = P.matmul_backward(dc, a, b, *transposes, alpha=0.5)
    want_a = numerical_gradient(lambda v: P.matmul_forward(v, b, *transposes, alpha=0.5), a, dc)
    want_b = numerical_gradient(lambda v: P.matmul_forward(a, v, *transposes, alpha=0.5), b, dc)
    assert relative_error(da, want_a) < 1e-7
    assert relative_error(db, want_b) < 1e-7


@SHAPES
@versions(1, 2, 3, 4)
@TRANSPOSES
@USABLE
@where(lambda engine, version: engine != "emulator" or version)
# as in `kernels check`
@quick(lambda engine, version, shape: engine != "emulator" or version < 3 or shape[1] > 4)
def test_matmul(engine, rng, shape, version, transposes):
    a, b = operands(rng, shape, transposes)
    bias = rng.standard_normal(shape[2])
    c = P.matmul_forward(
        engine(a), engine(b), *transposes, bias=engine(bias), alpha=0.5, version=version
    )
    engine.check(c, P.matmul_forward(a, b, *transposes, bias=bias, alpha=0.5), 2e-6)
    if engine.repeats > 1:
        again = P.matmul_forward(
            engine(a), engine(b), *transposes, bias=engine(bias), alpha=0.5, version=version
        )
        engine.check_equal(c, again)


@SHAPES
@versions(1, 2, 3, 4)
@USABLE
@where(lambda engine, version: engine != "emulator" or version)
def test_out(engine, rng, shape, version):
    a, b = operands(rng, shape)
    start = rng.standard_normal((shape[0], shape[1], shape[2]))
    out = engine(start)
    assert P.matmul_forward(engine(a), engine(b), out=out, accumulate=True, version=version) is out
    engine.check(out, start + a @ b, 2e-6)
    P.matmul_forward(engine(a), engine(b), out=out, version=version)
    engine.check(out, a @ b, 2e-6)


@SHAPES
@TRANSPOSES
def test_backward(engine, rng, shape, transposes):
    a, b = operands(rng, shape, transposes)
    dc = rng.standard_normal((shape[0], shape[1], shape[2]))
    got = P.matmul_backward(engine(dc), engine(a), engine(b), *transposes)
    for ours, want in zip(got, P.matmul_backward(dc, a, b, *transposes), strict=True):
        engine.check(ours, want, 2e-6)


@pytest.mark.parametrize("tile", vectorised.TILES)
@pytest.mark.parametrize(
    "shape", [(1, 4, 4, 4), None, pytest.param((2, 132, 196, 44), marks=large)]
)
@quick(lambda engine: engine != "emulator")  # the cases of `numdiff kernels check` have each tile
def test_each_tile_of_version_4(engine, rng, monkeypatch, shape, tile):
    """One chunk; one tile and a bit, of either extent; several."""
    shape = shape or (1, tile[0] + 4, tile[1] + 8, 12)
    monkeypatch.setattr(vectorised, "TILES", (tile,))
    for transposes in ((False, False), (True, True)):
        a, b = operands(rng, shape, transposes)
        c = P.matmul_forward(engine(a), engine(b), *transposes)
        engine.check(c, P.matmul_forward(a, b, *transposes), 2e-6)


@pytest.mark.parametrize(
    "shape",
    [
        (1, 8, 4, 100),
        (1, 5, 7, 97),
        pytest.param((1, 64, 27, 5000), marks=large),
        pytest.param((1, 64, 576, 4100), marks=large),
    ],
)
@pytest.mark.parametrize("version", [3, 4])
@USABLE
@where(lambda engine, version, shape: engine != "emulator" or version == 4 or shape[3] == 97)
def test_split_k(engine, rng, monkeypatch, shape, version):
    monkeypatch.setattr(launcher, "choose_tile", lambda *a: ((64, 64), 3))
    _, M, N, K = shape
    a, b, start = (
        rng.standard_normal((K, M)),
        rng.standard_normal((N, K)),
        rng.standard_normal((M, N)),
    )
    results = [engine(start) for _ in range(engine.repeats)]
    for out in results:
        P.matmul_forward(
            engine(a),
            engine(b),
            True,
            True,
            bias=engine(start[0]),
            alpha=0.5,
            out=out,
            accumulate=True,
            version=version if engine.has_versions else None,
        )
    engine.check(results[0], start + 0.5 * (b @ a).T + start[0], 3e-6)
    engine.check_equal(results[0], results[-1])


def test_a_small_result_of_a_long_sum_is_split():
    tile, slices = choice.choose_tile(1, 64, 64, 131072, 132)
    assert slices >= 64
    assert choice.choose_tile(1, 4096, 4096, 4096, 132) == ((128, 128), 1)
    # the batch fills the GPU, and only one batch is summed
    assert choice.choose_tile(64, 64, 64, 4096, 132)[1] == 1
    length = choice.slice_of(131071, slices)
    assert (slices - 1) * length < 131071 <= slices * length


def test_errors_say_what_to_do(engine, rng):
    a, b = engine(np.ones((4, 5))), engine(np.ones((4, 6)))
    with pytest.raises(ValueError, match="check transpose_a"):
        P.matmul_forward(a, b)
    with pytest.raises(ValueError, match="pass out="):
        P.matmul_forward(a, b, transpose_a=True, accumulate=True)
    with pytest.raises(ValueError, match=r"bias has shape \(5,\)"):
        P.matmul_forward(a, b, transpose_a=True, bias=engine(np.ones(5)))
    if engine.has_versions:
        with pytest.raises(ValueError, match="use version=3"):
            P.matmul_forward(a, b, transpose_a=True, version=4)
        with pytest.raises(ValueError, match="no version 9"):
            P.matmul_forward(a, b, transpose_a=True, version=9)


def test_cost():
    assert P.matmul_forward_cost(2, 3, 4, 5) == (4 * 2 * (15 + 20 + 12), 2 * 2 * 3 * 4 * 5)
