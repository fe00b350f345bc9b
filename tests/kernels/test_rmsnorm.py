import numpy as np
import pytest

from numdiff.kernels import rmsnorm as RN
from numdiff.nn import functional as F
from numdiff.nn.layers import RMSNorm
from numdiff.nn.tensor import Tape, Tensor
from tests.conftest import numerical_gradient, on, quick, relative_error, shapes, versions, where

SHAPES = shapes(minimal=(1, 3), odd=(3, 12), not_aligned=(2, 5, 33), one_vector=(9, 4), tokens=(4, 64, 384),
                wide=(7, 1156), five_sweeps=(3, 1032), large=(3, 700, 192))
USABLE = where(lambda version, shape: version is None or version == 1 or shape[-1] % (4 * (version - 1)) == 0)
WEIGHTED = pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
TYPES = pytest.mark.parametrize("dtype", [np.float32, np.float16])
FITS = where(lambda engine, dtype: engine != "cpu" or dtype == np.float32)  # NumPy rounds as its own tests say
FEW = quick(lambda engine, dtype, weighted, version, shape: (
    engine not in ("emulator", "launch") or dtype == np.float32 or weighted and version != 1) and (
        engine != "emulator" or version is not None or shape[-1] == 3))


def make(rng, shape, weighted, dtype=np.float64):
    """x, dy and the weight or None, float64 numbers that the dtype holds."""
    x, dy = (a.astype(dtype).astype(np.float64) for a in (1 + 2 * rng.standard_normal(shape),
                                                          rng.standard_normal(shape)))
    return x, dy, 1 + 0.5 * rng.standard_normal(shape[-1]) if weighted else None


def tolerance(dtype):
    return 1e-3 if dtype == np.float16 else 5e-6


@SHAPES
@TYPES
@versions(1, 2, 3)
@WEIGHTED
@FITS
@USABLE
@FEW
@where(lambda engine, version: engine != "emulator" or version)  # None is one of the others
def test_forward(engine, rng, shape, dtype, version, weighted):
    x, _, weight = make(rng, shape, weighted, dtype)
    want = RN.rmsnorm_forward(x, weight)
    given = engine(x, dtype), weight if weight is None else engine(weight)
    runs = [RN.rmsnorm_forward(*given, version=version) for _ in range(engine.repeats)]
    assert runs[0][0].dtype == dtype
    for got, again, expected in zip(runs[0], runs[-1], want, strict=True):
        engine.check(got, expected, tolerance(dtype))
        engine.check_equal(got, again)


@versions(1, 2, 3)
def test_eps_counts_where_a_row_is_nearly_zero(engine, rng, version):
    """A mean square of eps, which stands within the root."""
    x = 1e-3 * rng.standard_normal((3, 16))
    for got, expected in zip(RN.rmsnorm_forward(engine(x), version=version), RN.rmsnorm_forward(x), strict=True):
        engine.check(got, expected)


@SHAPES
@TYPES
@versions(1, 2, 3)
@WEIGHTED
@FITS
@USABLE
@FEW
@where(lambda engine, version: engine != "emulator" or version)  # None is one of the others
def test_backward_accumulates(engine, rng, shape, dtype, version, weighted):
    x, dy, weight = make(rng, shape, weighted, dtype)
    _, rstd = RN.rmsnorm_forward(x, weight)
    start = rng.standard_normal(shape[-1])
    dweight, runs = start.copy(), []
    dx = RN.rmsnorm_backward(dy, x, weight, rstd, dweight)
    for _ in range(engine.repeats):
        sums = engine(start)  # not zero: the gradient is added
        runs.append((RN.rmsnorm_backward(engine(dy, dtype), engine(x, dtype), weight if weight is None else engine(
            weight), engine(rstd), sums, version=version), sums))
    # all of dy may lie along what dx has not
    sizes = (dy if weight is None else dy * weight) * rstd.reshape(*shape[:-1], 1), np.abs(start) + np.abs(
        dweight - start)
    for got, again, expected, size in zip(runs[0], runs[-1], (dx, dweight), sizes, strict=True):
        engine.check(got, expected, tolerance(dtype), size)
        engine.check_equal(got, again)
    alone = RN.rmsnorm_backward(engine(dy, dtype), engine(x, dtype), weight if weight is None else engine(weight),
                                engine(rstd), version=version)
    engine.check_equal(alone, runs[0][0])


def test_reference_against_the_definition(rng):
    x, _, weight = make(rng, (2, 3, 7), True)
    y, rstd = RN.rmsnorm_forward_reference(x, weight, eps=1e-3)
    for i, (b, t) in enumerate(np.ndindex(2, 3)):
        root = np.sqrt(np.mean(x[b, t] ** 2) + 1e-3)
        np.testing.assert_allclose(y[b, t], x[b, t] / root * weight, rtol=1e-12)
        np.testing.assert_allclose(rstd[i], 1 / root, rtol=1e-12)


@WEIGHTED
def test_gradient(rng, weighted):
    """Of the layer, through the tape."""
    x, dy, weight = make(rng, (3, 2, 5), weighted)
    layer = RMSNorm(5, eps=1e-3, affine=weighted)
    if weighted:
        layer.weight.data, layer.weight.grad = weight.copy(), np.zeros(5)
    leaf = Tensor(x, requires_grad=True)
    with Tape() as tape:
        y = layer(leaf)
    tape.backward(y, dy)

    def forward(x=x, weight=weight):
        return RN.rmsnorm_forward_reference(x, weight, 1e-3)[0]

    assert relative_error(leaf.grad, numerical_gradient(lambda a: forward(x=a), x, dy)) < 1e-7
    if weighted:
        assert relative_error(layer.weight.grad, numerical_gradient(lambda a: forward(weight=a), weight, dy)) < 1e-7


def test_a_frozen_weight_gets_no_gradient(rng):
    layer, x = RMSNorm(4), Tensor(rng.standard_normal((2, 4)), requires_grad=True)
    layer.weight.data, layer.weight.grad, layer.weight.frozen = np.ones(4), np.zeros(4), True
    with Tape() as tape:
        y = F.rms_norm(x, layer.weight)
    tape.backward(y, np.ones((2, 4)))
    assert not layer.weight.grad.any() and x.grad.any()


def test_wrong_arguments_say_so(engine):
    x = engine(np.ones((2, 6), np.float32))
    with pytest.raises(ValueError, match="must have shape"):
        RN.rmsnorm_forward(x, engine(np.ones(3, np.float32)))
    with pytest.raises(ValueError, match="multiple of 4"):
        RN.rmsnorm_forward(x, version=2)


@on("emulator", "ptx", "cuda")
def test_what_version_3_does_not_take(engine):
    for columns, other in ((12, 2), (1288, 2), (6, 1)):
        x = engine(np.ones((2, columns), np.float32))
        with pytest.raises(ValueError, match=f"takes a multiple of 8 columns, at most 1280.*use version={other}"):
            RN.rmsnorm_forward(x, version=3)


@on("emulator", "cuda")
def test_warps_that_take_several_rows(engine, rng, monkeypatch):
    """One multiprocessor: of 37 rows a warp of the forward has two, the last only one, and of the backward three."""
    monkeypatch.setattr(RN, "multiprocessors_of", lambda x: 1)
    assert RN.blocks_of(37, 8, 4) == 3 and RN.blocks_of(37, 16, 1) == 1 and RN.blocks_of(5, 8, 528) == 1
    assert RN.blocks_of(16384, 8, 4 * 132) == 512 and RN.blocks_of(16384, 16, 132) == 128
    x, dy, weight = make(rng, (37, 16), True)
    y, rstd = RN.rmsnorm_forward(x, weight)
    start = rng.standard_normal(16)
    want = start.copy()
    dx = RN.rmsnorm_backward(dy, x, weight, rstd, want)
    got = engine(start)
    engine.check(RN.rmsnorm_forward(engine(x), engine(weight), version=3)[0], y)
    engine.check(RN.rmsnorm_backward(engine(dy), engine(x), engine(weight), engine(rstd), got, version=3), dx)
    engine.check(got, want)
