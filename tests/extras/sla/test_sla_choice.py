"""Sparse-linear attention's choice alone: more than a warp's blocks, many of them equal, and the
lists turned round."""

import numpy as np
import pytest

from numdiff.device import download, empty, launch
from numdiff.extras.sla.kernels.choice import (
    BLOCK,
    ROWS,
    THREADS,
    SlaProblem,
    bits_left,
    sla_choose_kernel,
    sla_totals_kernel,
    sla_transpose_kernel,
    sum_over_blocks,
)
from tests.conftest import on

N = 37  # a warp looks at 32 blocks at a time


def problem(rng, count, N=N, HS=4):
    """q and k means that are small integers, so that many products are equal and none is rounded;
    what is chosen."""
    q, k = rng.integers(-2, 3, (2, N, HS)).astype(np.float64)
    k[0] -= k.sum(0)  # their mean is 0
    return q, k, np.sort(np.argsort(-(q @ k.T), axis=1, kind="stable")[:, :count])


@on("emulator", "cuda")
@pytest.mark.parametrize("count, N, HS", [(34, N, 36), (40, THREADS + 11, 4)])
def test_the_largest_and_of_equal_ones_the_first(engine, rng, count, N, HS):
    """Of one block of threads' rows, 32 channels at a time; of more blocks than registers hold."""
    q, k, want = problem(rng, count, N, HS)
    sums = engine(np.stack((rng.standard_normal(k.shape), BLOCK * k), 1))
    total = engine(np.concatenate((np.ones((1, HS)), np.zeros((1, HS)))))
    critical, left = (
        empty((N, count), np.int32, like=total),
        empty((N, -(-N // 32)), np.int32, like=total),
    )
    launch(
        sla_choose_kernel,
        (1, 1, 1),
        THREADS,
        engine(q).reshape(-1),
        sums.reshape(-1),
        total.reshape(-1),
        critical.reshape(-1),
        left.reshape(-1),
        SlaProblem(N * BLOCK, 0, 0, 0, N, count, 1.0),
        HS,
        shared=4 * ROWS * N,
    )
    assert np.array_equal(download(critical[:ROWS]), want[:ROWS])
    assert np.array_equal(download(left[:ROWS]), bits_left(want)[:ROWS])


@on("emulator", "cuda")
def test_lists_turned_round(engine, rng):
    *_, want = problem(rng, 6)
    lists, counts = engine(np.full((N, N), -1), np.int32), engine(np.zeros(N), np.int32)
    launch(
        sla_transpose_kernel,
        (-(-N // ROWS), 1, 1),
        THREADS,
        engine(want, np.int32).reshape(-1),
        lists.reshape(-1),
        counts,
        N,
        6,
    )
    for j, (row, size) in enumerate(zip(download(lists), download(counts), strict=True)):
        assert np.array_equal(row[:size], np.flatnonzero((want == j).any(1)))


@on("emulator", "cuda")
def test_sums_over_blocks(engine, rng, N=83):
    """…of more of them than are requested at once, and of more columns than a block of threads
    sums."""
    x, small = rng.standard_normal((1, 2, N, 132)), rng.standard_normal((1, 2, N, 8))
    totals = (
        empty((1, 2, 132), np.float32, like=engine(x)),
        empty((1, 2, 8), np.float32, like=engine(x)),
    )
    launch(
        sla_totals_kernel,
        (3, 2, 1),
        THREADS,
        engine(x).reshape(-1),
        engine(small).reshape(-1),
        *(t.reshape(-1) for t in totals),
        N,
        132,
        8,
    )
    for got, a in zip(totals, (x, small), strict=True):
        engine.check(got, a.sum(2), 1e-6, np.abs(a).sum(2))
        assert np.array_equal(download(got)[0, 0], sum_over_blocks(a[0, 0].astype(np.float32)))
