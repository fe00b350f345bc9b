import numpy as np
import pytest

from numdiff.kernels.reduce import trees as R
from tests.conftest import large, versions, where


@large
@pytest.mark.parametrize("M, N", [(131072, 1), (131072, 3), (50000, 64)])
def test_long_sums_stay_accurate(engine, rng, M, N):
    x = rng.standard_normal((M, N)).astype(np.float32)
    # of such sums: one column's may be nearly 0
    deviation = np.sqrt((x.astype(np.float64) ** 2).sum(0))
    engine.check(R.column_sum(engine(x)), x.astype(np.float64).sum(0), 1e-5, deviation)
    engine.check(R.sample_sum(engine(x[None])), x.astype(np.float64).sum(0)[None], 1e-5, deviation)


def test_reference_against_loops(rng):
    x = rng.integers(-9, 9, (3, 4, 5)).astype(np.float64)
    want = np.zeros((3, 5))
    for b, p, c in np.ndindex(x.shape):
        want[b, c] += x[b, p, c]
    np.testing.assert_array_equal(R.sample_sum_reference(x), want)
    np.testing.assert_array_equal(R.column_sum_reference(x), want[0] + want[1] + want[2])


@pytest.mark.parametrize(
    "B, P, N, vector",
    [
        (1, 1, 1, 1),
        (1, 131072, 64, 4),
        (32, 4096, 64, 4),
        (32, 1024, 512, 4),
        (2, 513, 2048, 1),
        (300, 600, 260, 4),
        (1, 10**7, 1, 1),
    ],
)
def test_cut_covers_everything(B, P, N, vector):
    lanes, tiles, chunk, chunks = R.cut(B, P, N, vector)
    assert 1 <= lanes <= 64 and lanes * tiles * vector >= N and lanes * (tiles - 1) * vector < N
    assert chunk * chunks >= P and chunk * (chunks - 1) < P and chunks <= R.DIRECT


def test_wrong_arguments_say_so(engine):
    x = engine(np.ones((4, 6), np.float32))
    with pytest.raises(ValueError, match="must be"):
        R.column_sum(x, out=engine.zeros((4,)))
    if engine.has_versions:
        with pytest.raises(ValueError, match="multiple of 4"):
            R.column_sum(x, version=3)


@versions(2, 3)
@where(lambda engine, version: engine != "emulator" or version)  # None is one of the others
def test_two_passes(engine, rng, monkeypatch, version):
    """Two passes and unequal chunks, made small enough for the emulator."""
    monkeypatch.setattr(R, "DIRECT", 4)
    x = rng.standard_normal((1, 70, 128))
    assert R.cut(1, 70, 128, 4)[3] == 2
    engine.check(R.sample_sum(engine(x), version=version), x.sum(1), 1e-6)
