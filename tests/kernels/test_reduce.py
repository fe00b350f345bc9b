import numpy as np
import pytest

from numdiff.kernels import reduce as R
from tests.conftest import large, shapes, versions, where

SHAPES = shapes(minimal=(1, 1), odd=(3, 5, 7), aligned=(2, 5, 12), one_row=(1, 130), not_aligned=(2, 600, 33),
                small=(32, 2048), large=(3, 37, 41, 64), wide=(2, 1000, 516))
USABLE = where(lambda version, shape: version != 3 or shape[-1] % 4 == 0)


@SHAPES
@versions(1, 2, 3)
@USABLE
def test_column_sum(engine, rng, shape, version):
    x, out = 1 + rng.standard_normal(shape), rng.standard_normal(shape[-1:])
    want, size = (a.sum(axis=tuple(range(x.ndim - 1))) for a in (x, np.abs(x)))
    got = R.column_sum(engine(x), version=version)
    engine.check(got, want, 1e-6, size)
    engine.check_equal(got, R.column_sum(engine(x), version=version))
    into = engine(out)
    R.column_sum(engine(x), out=into, version=version)
    engine.check(into, out + want, 1e-6, np.abs(out) + size)


@SHAPES
@versions(1, 2, 3)
@USABLE
def test_sample_sum(engine, rng, shape, version):
    x = 1 + rng.standard_normal(shape)
    want, size = (a.reshape(shape[0], -1, shape[-1]).sum(axis=1) for a in (x, np.abs(x)))
    got = R.sample_sum(engine(x), version=version)
    engine.check(got, want, 1e-6, size)
    engine.check_equal(got, R.sample_sum(engine(x), version=version))


@SHAPES
@versions(2, 3)
@where(lambda version, shape: version != 3 or np.prod(shape) % 4 == 0)
def test_total_sum(engine, rng, shape, version):
    x = 1 + rng.standard_normal(shape)
    engine.check(R.total_sum(engine(x), version=version), np.array([x.sum()]), 1e-6, np.abs(x).sum())


@large
@pytest.mark.parametrize("M, N", [(131072, 1), (131072, 3), (50000, 64)])
def test_long_sums_stay_accurate(engine, rng, M, N):
    x = rng.standard_normal((M, N)).astype(np.float32)
    deviation = np.sqrt((x.astype(np.float64) ** 2).sum(0))  # of such sums: one column's may be nearly 0
    engine.check(R.column_sum(engine(x)), x.astype(np.float64).sum(0), 1e-5, deviation)
    engine.check(R.sample_sum(engine(x[None])), x.astype(np.float64).sum(0)[None], 1e-5, deviation)


def test_reference_against_loops(rng):
    x = rng.integers(-9, 9, (3, 4, 5)).astype(np.float64)
    want = np.zeros((3, 5))
    for b, p, c in np.ndindex(x.shape):
        want[b, c] += x[b, p, c]
    np.testing.assert_array_equal(R.sample_sum_reference(x), want)
    np.testing.assert_array_equal(R.column_sum_reference(x), want[0] + want[1] + want[2])
    np.testing.assert_array_equal(R.total_sum_reference(x), [want.sum()])


@pytest.mark.parametrize("B, P, N, vector", [(1, 1, 1, 1), (1, 131072, 64, 4), (32, 4096, 64, 4), (32, 1024, 512, 4),
                                             (2, 513, 2048, 1), (300, 600, 260, 4), (1, 10**7, 1, 1)])
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
