import numpy as np
import pytest

from numdiff.extras.rms_norm import rmsnorm as RN
from numdiff.nn import functional as F
from numdiff.nn.layers import RMSNorm
from numdiff.nn.tensor import Tape, Tensor
from tests.conftest import numerical_gradient, on, relative_error, versions

WEIGHTED = pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])


def make(rng, shape, weighted):
    """x, dy and the weight or None."""
    x, dy = 1 + 2 * rng.standard_normal(shape), rng.standard_normal(shape)
    return x, dy, 1 + 0.5 * rng.standard_normal(shape[-1]) if weighted else None


@versions(1, 2, 3)
def test_eps_counts_where_a_row_is_nearly_zero(engine, rng, version):
    """A mean square of eps, which stands within the root."""
    x = 1e-3 * rng.standard_normal((3, 16))
    for got, expected in zip(
        RN.rmsnorm_forward(engine(x), version=version), RN.rmsnorm_forward(x), strict=True
    ):
        engine.check(got, expected)


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
        assert (
            relative_error(
                layer.weight.grad, numerical_gradient(lambda a: forward(weight=a), weight, dy)
            )
            < 1e-7
        )


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
    if engine.has_versions:
        with pytest.raises(ValueError, match="multiple of 4"):
            RN.rmsnorm_forward(x, version=2)


@on("emulator", "ptx", "cuda")
def test_what_version_3_does_not_take(engine):
    for columns, other in ((12, 2), (1288, 2), (6, 1)):
        x = engine(np.ones((2, columns), np.float32))
        with pytest.raises(
            ValueError, match=f"takes a multiple of 8 columns, at most 1280.*use version={other}"
        ):
            RN.rmsnorm_forward(x, version=3)


@on("emulator", "cuda")
def test_warps_that_take_several_rows(engine, rng, monkeypatch):
    """One multiprocessor: of 37 rows a warp of the forward has two, the last only one, and of the
    backward three."""
    monkeypatch.setattr(RN, "multiprocessors_of", lambda x: 1)
    assert (
        RN.blocks_of(37, 8, 4) == 3
        and RN.blocks_of(37, 16, 1) == 1
        and RN.blocks_of(5, 8, 528) == 1
    )
    assert RN.blocks_of(16384, 8, 4 * 132) == 512 and RN.blocks_of(16384, 16, 132) == 128
    x, dy, weight = make(rng, (37, 16), True)
    y, rstd = RN.rmsnorm_forward(x, weight)
    start = rng.standard_normal(16)
    want = start.copy()
    dx = RN.rmsnorm_backward(dy, x, weight, rstd, want)
    got = engine(start)
    engine.check(RN.rmsnorm_forward(engine(x), engine(weight), version=3)[0], y)
    engine.check(
        RN.rmsnorm_backward(engine(dy), engine(x), engine(weight), engine(rstd), got, version=3), dx
    )
    engine.check(got, want)
