"""E4M3 in both orientations, with the sums of its columns."""

import numpy as np
import pytest

from numdiff.device import download
from numdiff.extras.fp8 import both as Q
from numdiff.extras.fp8.quantise import PARTIALS, quantise_forward
from numdiff.float8 import numbers_of
from tests.conftest import on, quick, shapes


@shapes(minimal=(1, 16), odd=(70, 80), large=(3000, 1152))
# `numdiff kernels check` has the other
@quick(lambda engine, shape: engine != "emulator" or shape[0] == 1)
@quick(lambda engine, shape: engine != "cpu" or shape[0] < 3000)
def test_both_orientations(engine, rng, shape):
    """The rows and the reported maxima are those of `quantise_forward`; the sums are added."""
    x, scale = (30 * rng.standard_normal(shape)).astype(np.float16), np.float32([0.25])
    (R, C), more = shape, rng.standard_normal(shape[1]).astype(np.float32)
    x_on, scale_on = engine(x), engine(scale)
    amax, alone = (engine(np.zeros(PARTIALS, np.uint32)) for _ in range(2))
    want = quantise_forward(x_on, scale_on, alone)
    results = []
    for _ in range(engine.repeats):
        sums = engine(more)
        results.append((*Q.quantise_both(x_on, scale_on, amax, sums), sums))
    rows, columns, sums = results[0]
    engine.check_equal(rows, want)
    for first, again in zip(results[0], results[-1], strict=True):
        engine.check_equal(first, again)
    engine.check_equal(Q.columns_of(rows, scale_on), columns)
    if not engine.computes:
        return
    rows, columns = download(rows), download(columns)
    assert columns.shape == (C, -(-R // 16) * 16) and download(amax).max() == download(alone).max()
    np.testing.assert_array_equal(columns[:, :R], rows.T)
    assert not columns[:, R:].any()
    numbers = numbers_of(rows).astype(float) / 4
    assert (
        np.abs(download(sums) - more - numbers.sum(axis=0))
        <= 1e-6 * (1 + np.abs(numbers).sum(axis=0))
    ).all()


@on("cpu")
def test_what_is_refused():
    with pytest.raises(ValueError, match="multiple of 16 columns"):
        Q.quantise_both(np.zeros((4, 24), np.float16), np.ones(1, np.float32))
    with pytest.raises(ValueError, match="multiple of 16 columns"):
        Q.columns_of(np.zeros((4, 24), np.uint8), np.ones(1, np.float32))
