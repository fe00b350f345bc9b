"""The peers' kernels with all ranks' buffers on one device: what each rank launches, one rank after
the other."""

import numpy as np
import pytest

from numdiff.device import download, with_dtype
from numdiff.extras.fp8 import quantise as Q
from numdiff.extras.transports import reduce as P
from tests.conftest import on, shapes, where

SHAPES = shapes(
    minimal=(1,), odd=(37,), not_aligned=(1030,), fewer_than_ranks=(4,), large=(1 << 18,)
)
RANKS = pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])


@RANKS
@SHAPES
def test_sum_over_ranks(engine, rng, shape, ranks):
    x = rng.standard_normal((ranks, *shape)).astype(np.float32)
    buffers = [engine(row) for row in x]
    for rank in range(ranks):
        P.peer_reduce_scatter(buffers, rank)
    for rank in range(ranks):
        P.peer_all_gather(buffers, rank)
    expected = x[0]
    for row in x[1:]:
        expected = expected + row  # in rank order, in float32: the bits are part of the contract
    for buffer in buffers:
        engine.check(buffer, x.sum(0, dtype=np.float64), 1e-5, np.abs(x).sum(0))
        engine.check_equal(buffer, engine(expected))


@RANKS
def test_slices_cover_the_buffer_and_begin_at_multiples_of_four(ranks):
    for n in (1, 4, 37, 1030, 1 << 18):
        slices = [P.slice_of(n, rank, ranks) for rank in range(ranks)]
        assert slices[0][0] == 0 and slices[-1][1] == n
        assert all(a[1] == b[0] for a, b in zip(slices, slices[1:], strict=False))
        assert all(first % 4 == 0 or first == n for first, _ in slices)


@RANKS
def test_a_rank_writes_nothing_but_its_own(engine, rng, ranks):
    x = rng.standard_normal((ranks, 64)).astype(np.float32)
    buffers = [engine(row) for row in x]
    P.peer_reduce_scatter(buffers, ranks - 1)
    if engine.computes:
        first, stop = P.slice_of(64, ranks - 1, ranks)
        for rank in range(ranks):
            changed = np.flatnonzero(download(buffers[rank]) != x[rank])
            assert rank == ranks - 1 or not len(changed)
            assert all(first <= i < stop for i in changed)


@RANKS
@shapes(minimal=(1,), odd=(37,), blocks=(2 * P.BLOCK + 1,))
def test_sum_of_a_mail_of_each_rank(engine, rng, ranks, shape):
    x = rng.standard_normal((ranks, *shape)).astype(np.float32)
    total = engine(np.full(shape, np.nan, np.float32))
    P.peer_sum([engine(row) for row in x], total)
    engine.check_equal(total, engine(sum(x[1:], x[0])))


@RANKS
# test_sum_over_ranks has the others
@where(lambda engine, ranks: engine != "emulator" or ranks == 3)
def test_a_sum_brings_the_largest_of_every_rank(engine, rng, ranks):
    """…exactly, with infinities and what is no number; and scales of it are those of one rank that
    has seen all."""
    rows = 6
    x = np.abs(rng.standard_normal((ranks, rows, Q.PARTIALS))).astype(np.float16).astype(np.float32)
    x[ranks - 1, 1, 5], x[0, 2, 7], x[:, 3], x[0, 4, 0] = np.inf, np.nan, 0, 2e4
    tables = [engine(np.full((rows, ranks), np.nan, np.float32)) for _ in range(ranks)]
    parts = [engine(part.view(np.uint32)) for part in x]
    for rank, (part, table) in enumerate(zip(parts, tables, strict=True)):
        Q.share_largest(part, with_dtype(table, np.uint32), rank)
    total = engine(np.full(rows * ranks, np.nan, np.float32))
    P.peer_sum([table.reshape(-1) for table in tables], total)
    mine, whole = (
        (engine(np.ones((rows, Q.HISTORY), np.float32)), engine(np.ones(rows, np.float32)))
        for _ in "12"
    )
    Q.scale_update(with_dtype(total, np.uint32).reshape(rows, ranks), *mine)
    Q.scale_update(engine(x.view(np.uint32).max(axis=0)), *whole)
    for a, b in zip(mine, whole, strict=True):
        engine.check_equal(a, b)
    if engine.computes:
        assert not any(download(part).any() for part in parts)
        assert download(mine[0])[:5, 0].tolist() == [x[:, 0].max(), 0, 0, 0, 2e4]


@RANKS
def test_barrier_signals_all_ranks_and_passes_when_all_arrive(engine, ranks):
    flags = [engine.zeros(P.MAX_RANKS * P.STRIDE, np.int32) for _ in range(ranks)]
    counters = [engine.zeros(1, np.int32) for _ in range(ranks)]
    status = engine.zeros(1, np.int32)
    if not engine.computes:
        P.peer_barrier(flags, counters[0], status, 0, 1000)
        return
    from numdiff.device import copy_into

    me = ranks - 1
    there = np.zeros(P.MAX_RANKS * P.STRIDE, np.int32)
    for round in (1, 2):
        there[: ranks * P.STRIDE : P.STRIDE] = round + np.arange(ranks)  # some are ahead already
        there[me * P.STRIDE] = round - 1
        copy_into(flags[me], there)
        P.peer_barrier(flags, counters[me], status, me, 1000)
        assert download(counters[me])[0] == round and download(status)[0] == 0
        for rank in range(ranks):
            assert download(flags[rank])[me * P.STRIDE] == round


def test_barrier_gives_up_on_who_never_comes_and_does_not_wait_again(engine):
    flags = [engine.zeros(P.MAX_RANKS * P.STRIDE, np.int32) for _ in range(3)]
    counter, status = engine.zeros(1, np.int32), engine.zeros(1, np.int32)
    flags_of_0 = np.zeros(P.MAX_RANKS * P.STRIDE, np.int32)
    flags_of_0[P.STRIDE] = 5  # rank 1 is there, rank 2 is not
    flags[0] = engine(flags_of_0)
    P.peer_barrier(flags, counter, status, 0, 20)
    P.peer_barrier(flags, counter, status, 0, 3_600_000)
    if engine.computes:
        assert download(status)[0] == 3 and download(counter)[0] == 2


@on()  # the reference counts in Python's integers
def test_the_counter_may_pass_2_to_the_31(engine):
    flags = engine(np.full(P.MAX_RANKS * P.STRIDE, -(2**31), np.int32))
    counter, status = engine(np.array([2**31 - 1], np.int32)), engine.zeros(1, np.int32)
    P.peer_barrier([flags], counter, status, 0, 1000)
    if engine.computes:
        assert download(counter)[0] == -(2**31) and download(status)[0] == 0


def test_flags_are_released_and_acquired_at_system_scope():
    """What the memory model asks for stands in the compiled code."""
    from numba import types

    from numdiff.device.ptx import compile_to_ptx

    array, number = types.Array(types.int32, 1, "C"), types.int32
    text = compile_to_ptx(
        P.peer_barrier_kernel_v1,
        (types.UniTuple(array, P.MAX_RANKS), *[array] * 3, number, number, number),
        (9, 0, "a"),
    )
    assert text.count("st.release.sys") == P.MAX_RANKS and "ld.acquire.sys" in text
    assert text.index("membar.sys") < text.index("st.release.sys")


def test_bad_input_says_so(engine):
    buffers = [engine(np.ones(8)) for _ in range(9)]
    with pytest.raises(ValueError, match="1 to 8 ranks, not 9"):
        P.peer_reduce_scatter(buffers, 0)
    with pytest.raises(ValueError, match="of one size"):
        P.peer_all_gather([engine(np.ones(8)), engine(np.ones(4))], 0)
    with pytest.raises(ValueError, match="must rise from 0 to 8"):
        P.peer_all_gather(buffers[:2], 0, bounds=[0, 4])
    if engine.has_versions:
        with pytest.raises(ValueError, match="use version=1"):
            P.peer_reduce_scatter(buffers[:3], 0, version=2)
