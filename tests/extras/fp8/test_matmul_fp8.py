"""Products of E4M3 against float64, on every engine; what is refused."""

import numpy as np
import pytest

from numdiff.device import download, upload
from numdiff.device.ptx import get_ptx_device
from numdiff.errors import NumdiffError
from numdiff.extras.fp8 import matmul as P
from numdiff.extras.fp8.quantise import PARTIALS, quantise_forward
from numdiff.float8 import bits_of, numbers_of
from tests.conftest import large, on, quick, shapes

PROMOTED = pytest.mark.parametrize("promoted", [True, False], ids=["promoted", "plain"])


@pytest.fixture(autouse=True)
def narrow(engine, monkeypatch):
    if engine.name in ("emulator", "ptx"):
        monkeypatch.setattr(P, "choose_width", lambda *given: min(P.widths_of(*given[-2:])))


def operands(rng, M, N, K, *more):
    """a, b, their scales, and float16 matrices of the further shapes; what a·bᵀ is."""
    a, b = bits_of(rng.standard_normal((M, K))), bits_of(rng.standard_normal((N, K)))
    scale_a, scale_b = np.float32([2.0**-3]), np.float32([2.0])
    product = numbers_of(a).astype(float) @ numbers_of(b).astype(float).T / 4
    return [
        a,
        b,
        scale_a,
        scale_b,
        *(rng.standard_normal(shape).astype(np.float16) for shape in more),
    ], product


@quick(lambda engine: engine != "emulator")
@shapes(odd=(72, 48, 32), large=(1000, 1152, 768))
@PROMOTED
@quick(lambda engine, promoted: engine != "emulator" or promoted)
@quick(lambda engine, shape: engine != "cpu" or shape[0] == 72)
def test_epilogues_that_round(engine, rng, shape, promoted):
    """GELU and its derivative as bytes, and their largest magnitude, with the bits of a pass that
    rounds afterwards."""
    (*given, u), _ = operands(rng, *shape, shape[:2])
    given, u, scale = [*map(engine, given)], engine(u), engine(np.float32([2.0**-4]))
    bias = engine(100 * rng.standard_normal(shape[1]).astype(np.float32))
    amax, alone = (engine(np.zeros(PARTIALS, np.uint32)) for _ in range(2))
    want_u, h = P.matmul_fp8_gelu_forward(*given, bias, promoted=promoted)
    got_u, got = P.matmul_fp8_gelu_forward(*given, bias, promoted=promoted, into=(scale, amax))
    engine.check_equal(got_u, want_u)
    engine.check_equal(got, quantise_forward(h, scale, alone))
    engine.check_equal(
        P.matmul_fp8_gelu_forward(*given, bias, False, promoted, (scale, amax))[1], got
    )
    assert not engine.computes or download(amax).max() == download(alone).max() > 0
    amax, alone = (engine(np.zeros(PARTIALS, np.uint32)) for _ in range(2))
    du = P.matmul_fp8_gelu_backward(*given, u, promoted)
    engine.check_equal(
        P.matmul_fp8_gelu_backward(*given, u, promoted, (scale, amax)),
        quantise_forward(du, scale, alone),
    )
    assert not engine.computes or download(amax).max() == download(alone).max() > 0


@large
@on("cpu")
def test_what_the_scales_lose(rng):
    """Four significant bits: products of normal numbers are off by 3.7 % of their size, whatever
    the scales."""
    x, w = (
        rng.standard_normal((64, 768)).astype(np.float32),
        rng.standard_normal((64, 768)).astype(np.float32),
    )
    for scale in (2.0**-6, 2.0**-3):
        one = np.float32([scale])
        got = P.matmul_fp8_forward(bits_of(x / one), bits_of(w / one), one, one).astype(float)
        assert 0.02 < np.linalg.norm(got - x @ w.T) / np.linalg.norm(x @ w.T) < 0.06


@on("cpu")
def test_what_is_refused(rng):
    given, _ = operands(rng, 8, 8, 16)
    with pytest.raises(ValueError, match="must be bytes"):
        P.matmul_fp8_forward(given[0][:, :8], *given[1:])
    with pytest.raises(ValueError, match="bias has shape"):
        P.matmul_fp8_forward(*given, bias=np.zeros(3, np.float32))
    with pytest.raises(ValueError, match="the product float32"):
        P.matmul_fp8_gradient(*given, np.zeros(64, np.float32))
    device = get_ptx_device()
    with pytest.raises(ValueError, match="K 8 must be a multiple of 16"):
        P.matmul_fp8_forward(
            *(upload(x[:, :8].copy() if x.ndim == 2 else x, device) for x in given)
        )

    class Older(type(device)):
        capability = (8, 0)

    with pytest.raises(NumdiffError, match="need a GPU of compute capability 8.9 or later"):
        P.matmul_fp8_forward(*(upload(x, Older()) for x in given))
