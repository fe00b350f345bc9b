"""Weights in E4M3, in both orientations."""

import numpy as np
import pytest

from numdiff.device import download
from numdiff.extras.fp8 import weights as Q
from numdiff.float8 import LARGEST, bits_of
from tests.conftest import on, quick


@pytest.mark.parametrize(
    "places", [[(0, 16, 16)], [(64, 80, 144), (64 + 80 * 144, 64, 64)]], ids=str
)
@quick(lambda engine, places: engine != "emulator" or len(places) == 1)
def test_weights_both_ways(engine, rng, places):
    size = places[-1][0] + places[-1][1] * places[-1][2]
    flat = rng.standard_normal(size).astype(np.float16)
    flat_on, scale = engine(flat), engine(np.zeros(len(places), np.float32))
    matrices, at = Q.matrices8(places, flat_on), 0
    rows, columns = (
        engine(np.zeros(matrices.total, np.uint8)),
        engine(np.zeros(matrices.total, np.uint8)),
    )
    assert matrices.total == sum(N * K for _, N, K in places)
    Q.quantise_weights(flat_on, matrices, rows, columns, scale)
    if not engine.computes:
        return
    for i, (first, N, K) in enumerate(places):
        w, unit = flat[first : first + N * K].reshape(N, K).astype(np.float32), download(scale)[i]
        assert LARGEST / 2 < np.abs(w).max() / unit <= LARGEST and np.log2(unit) % 1 == 0
        np.testing.assert_array_equal(
            download(rows)[at : at + N * K], bits_of(w / unit).reshape(-1)
        )
        np.testing.assert_array_equal(
            download(columns)[at : at + N * K], bits_of(w.T / unit).reshape(-1)
        )
        at += N * K


@on("cpu")
def test_what_is_refused():
    with pytest.raises(ValueError, match="multiples of 16"):
        Q.matrices8([(0, 24, 16)], None)
