"""Gates and norms of the DiT that round for a layer in FP8."""

import functools

import numpy as np
import pytest

from numdiff.device import download
from numdiff.device.rounded8 import PARTIALS
from numdiff.extras.fp8.quantise import Scale8, quantise_forward
from numdiff.kernels.transformer import gate_adaln as G
from tests.conftest import quick, shapes
from tests.kernels.transformer.test_gate_adaln import make


@shapes(odd=(2, 3, 16), xl=(3, 256, 1152), base=(5, 256, 768))
@pytest.mark.parametrize("norm, weighted", [("layer", False), ("rms", True)], ids=["layer", "rms"])
@quick(lambda engine, shape: engine != "cpu" or shape[-1] == 16)
def test_bytes_for_a_layer_in_fp8(engine, rng, shape, norm, weighted):
    """y and dh as E4M3 have the bits of a pass that rounds afterwards, and so has the largest
    magnitude."""
    x, h, dz, dy, gate, shift, scale = (
        engine(a.astype(np.float16)) for a in make(rng, shape, np.float16)
    )
    weight = engine(rng.standard_normal(shape[-1]).astype(np.float32)) if weighted else None
    unit = engine(np.float32([2.0**-4]))

    def check(rounded, results, place):
        """`rounded` are the results, the one at this place as E4M3 with its largest magnitude."""
        amax, alone = (engine(np.zeros(PARTIALS, np.uint32)) for _ in range(2))
        found, wanted = rounded(Scale8(unit, amax)), list(results)
        wanted[place] = quantise_forward(wanted[place], unit, alone)
        for got, want in zip(found, wanted, strict=True):
            assert got is want is None or engine.check_equal(got, want) is None
        assert not engine.computes or download(amax).max() == download(alone).max() > 0

    arrays = x, h, gate, shift, scale
    forward = functools.partial(G.gate_adaln_forward, *arrays, weight=weight, norm=norm)
    z, _, mean, rstd = results = forward()
    check(lambda into: forward(into=into), results, 1)
    given = dz, dy, z, h, (gate, shift, scale), mean, rstd, weight
    backward = functools.partial(G.gate_adaln_backward, *given)
    check(lambda into: backward(dh_into=into), backward(), 1)
