"""Warp operations: what every lane gets, in whichever order the lanes come, and what is said when
some do not."""

import numpy as np
import pytest

from numdiff.device import cuda, float32, int32, uint32
from tests.conftest import THREAD_ORDERS, exhaustively
from tests.emulator.planting import fault_at, faults_of, marked, run

ALL = 0xFFFFFFFF
MODES = pytest.mark.parametrize(
    "options",
    [
        {"order": "shuffled"},
        {"checks": False},
        *exhaustively({"order": "forward"}, {"order": "reversed"}),
    ],
    ids=["shuffled", "unchecked", "forward", "reversed"],
)


@cuda.jit
def shuffles(x, out, argument, width):
    t = cuda.threadIdx.x
    v = x[t]
    out[0, t] = cuda.shfl_sync(ALL, v, argument, width)
    out[1, t] = cuda.shfl_up_sync(ALL, v, argument, width)
    out[2, t] = cuda.shfl_down_sync(ALL, v, argument, width)
    out[3, t] = cuda.shfl_xor_sync(ALL, v, argument, width)


def by_the_isa(lane, argument, width):
    """Which lanes `shfl.sync` reads, as the pseudocode of PTX ISA 9.7.9.6 has it: mode idx, up,
    down, bfly."""
    segment = ~(width - 1) & 31
    low = lane & segment
    high = low | (31 & ~segment)
    sources = [low | (argument & ~segment & 31), lane - argument, lane + argument, lane ^ argument]
    valid = [True, sources[1] >= low, sources[2] <= high, sources[3] <= high]
    return [s if ok else lane for s, ok in zip(sources, valid, strict=True)]


@MODES
@pytest.mark.parametrize(
    "argument, width",
    [
        (0, 32),
        (1, 32),
        (5, 32),
        (31, 32),
        (16, 32),
        (1, 8),
        (3, 8),
        (7, 8),
        (2, 4),
        (1, 2),
        (9, 8),
        (20, 16),
    ],
)
def test_shuffles_read_the_lanes_of_the_isa(options, argument, width):
    x, out = np.arange(64, dtype=np.float32) + 0.5, np.zeros((4, 64), np.float32)
    run(shuffles, 1, 64, x, out, argument, width, **options)
    want = [
        [x[t // 32 * 32 + by_the_isa(t % 32, argument, width)[mode]] for t in range(64)]
        for mode in range(4)
    ]
    assert np.array_equal(out, want)


@cuda.jit
def shuffles_of_types(i32, i64, f16, f64, words):
    t = cuda.threadIdx.x
    i32[t] = cuda.shfl_xor_sync(ALL, i32[t], 1)
    i64[t] = cuda.shfl_down_sync(ALL, i64[t], 2)
    f64[t] = cuda.shfl_up_sync(ALL, f64[t], 2)
    words[t] = cuda.shfl_sync(ALL, words[t], 31 - t)
    if t == 0:
        f16[0] = float32(3)


@MODES
def test_shuffles_keep_types_and_all_bits(options):
    i32, i64 = -np.arange(32, dtype=np.int32), np.arange(32, dtype=np.int64) << 40
    f64, words = np.arange(32) / 3, np.arange(32, dtype=np.uint32) + 0xFFFFFF00
    want = (
        i32.reshape(16, 2)[:, ::-1].ravel(),
        np.r_[i64[2:], i64[30:]],
        np.r_[f64[:2], f64[:30]],
        words[::-1].copy(),
    )
    run(shuffles_of_types, 1, 32, i32, i64, np.zeros(1, np.float16), f64, words, **options)
    for got, expected in zip((i32, i64, f64, words), want, strict=True):
        assert np.array_equal(got, expected)


@cuda.jit
def votes(x, out):
    t = cuda.threadIdx.x
    out[0, t] = cuda.all_sync(ALL, x[t] > 0)
    out[1, t] = cuda.any_sync(ALL, x[t] > 0)
    out[2, t] = cuda.eq_sync(ALL, x[t] > 0)
    out[3, t] = cuda.ballot_sync(ALL, x[t] > 0)
    out[4, t] = cuda.match_any_sync(ALL, x[t])
    found, same = cuda.match_all_sync(ALL, x[t])
    out[5, t], out[6, t] = found, same
    out[7, t] = cuda.popc(cuda.ballot_sync(ALL, x[t] > 0) & cuda.lanemask_lt())
    out[8, t] = cuda.laneid


@MODES
@pytest.mark.parametrize(
    "x", [np.arange(64) % 7 - 2, np.ones(64), np.zeros(64), np.arange(64) // 32]
)
def test_votes_matches_and_lane_masks(options, x):
    x, out = x.astype(np.int32), np.zeros((9, 64), np.int64)
    run(votes, 1, 64, x, out, **options)
    for warp, got in zip(x.reshape(2, 32), out.reshape(9, 2, 32).swapaxes(0, 1), strict=True):
        positive, bits = warp > 0, 1 << np.arange(32)
        ballot = bits[positive].sum()
        assert (got[0] == positive.all()).all() and (got[1] == positive.any()).all()
        assert (got[2] == (positive == positive[0]).all()).all() and (got[3] == ballot).all()
        assert np.array_equal(got[4], [bits[warp == v].sum() for v in warp])
        same = (warp == warp[0]).all()
        assert (got[5] == (ALL if same else 0)).all() and (got[6] == same).all()
        assert np.array_equal(got[7], positive.cumsum() - positive) and np.array_equal(
            got[8], np.arange(32)
        )


@cuda.jit
def halves(x, out):
    """Each half of a warp works for itself, and comes to its operations on its own way."""
    t = cuda.threadIdx.x
    v = x[t]
    if t < 16:
        for distance in (8, 4, 2, 1):
            v += cuda.shfl_xor_sync(0xFFFF, v, distance)
    else:
        v = max(v, cuda.shfl_xor_sync(uint32(0xFFFF0000), v, 8, 16))
        cuda.syncwarp(0xFFFF0000)
        v = cuda.shfl_sync(0xFFFF0000, v, 16)
    out[t] = v


@MODES
def test_masks_split_a_warp(options):
    x, out = np.arange(32, dtype=np.int32), np.zeros(32, np.int32)
    run(halves, 1, 32, x, out, **options)
    assert out.tolist() == [120] * 16 + [24] * 16


@cuda.jit
def aggregated(x, counter, out, n):
    """A counter that each warp raises once: the lanes that are here find themselves by
    activemask()."""
    i = cuda.grid(1)
    if i < n and x[i] > 0:
        mask = cuda.match_any_sync(cuda.activemask(), 1)
        leader = cuda.ffs(mask) - 1
        first = int32(0)
        if cuda.laneid == leader:
            first = cuda.atomic.add(counter, 0, cuda.popc(mask))
        first = cuda.shfl_sync(mask, first, leader)
        out[first + cuda.popc(mask & cuda.lanemask_lt())] = x[i]


@THREAD_ORDERS
def test_activemask_names_no_lane_that_has_gone_elsewhere(order):
    """Which lanes it names is for the hardware to say; lanes that have ended, or wait elsewhere,
    are not among them."""

    @cuda.jit
    def kernel(out):
        t = cuda.threadIdx.x
        if t >= 20:
            return
        cuda.syncwarp(0xFFFFF)
        out[t] = cuda.activemask()

    out = np.zeros(32, np.int64)
    run(kernel, 1, 32, out, order=order, checks=False)
    assert all(mask >> t & 1 and not mask >> 20 for t, mask in enumerate(out[:20].tolist()))


@cuda.jit(device=True)
def agree():
    return cuda.all_sync(ALL, True)  # in a function


@cuda.jit
def faulty(x, n):
    t = cuda.threadIdx.x
    if n == 0:
        cuda.syncwarp(0xF)  # lane not in the mask
    elif n == 1 and t < 31:
        cuda.ballot_sync(ALL, True)  # lane 31 is not there
    elif n == 2:
        # over the edge of the mask
        x[t] = cuda.shfl_down_sync(0xFF if t < 8 else 0xFFFFFF00, x[t], 1)
    elif n == 3:
        if t % 2:
            cuda.all_sync(ALL, True)  # odd
        else:
            cuda.all_sync(ALL, False)  # even
    elif n == 4:
        if t == 0:
            cuda.syncwarp()  # syncwarp
        else:
            cuda.any_sync(ALL, True)  # vote
    elif n == 5:
        if t % 2 == 0:
            agree()
        else:
            agree()
    if n == 1:
        cuda.syncthreads()


@THREAD_ORDERS
@pytest.mark.parametrize(
    "n, marks, text",
    [
        (0, ["lane not in the mask"], "does not name"),
        (1, ["lane 31 is not there"], "waits for lane 31, which never comes"),
        (2, ["over the edge of the mask"], "is not in the mask"),
        (3, ["odd", "even"], "at another"),
        (4, ["syncwarp", "vote"], "never come"),
        (5, ["in a function"], "at another"),
    ],
)
def test_faults_of_warp_operations(order, n, marks, text):
    faults = faults_of(faulty, 1, 32, np.zeros(32, np.float32), n, order=order)
    found = [f for f in faults if text in f.message]
    assert found and {f.line for f in found} <= {marked(__file__, m) for m in marks}, [
        str(f) for f in faults
    ]
    assert {f.kind for f in faults} == {"divergence"}


def test_a_value_from_a_lane_that_ended_is_undefined():
    @cuda.jit
    def kernel(x):
        t = cuda.threadIdx.x
        if t < 31:
            x[t] = cuda.shfl_down_sync(ALL, x[t], 1)  # 31 has ended

    x = np.zeros(32, np.float32)
    fault = fault_at(
        faults_of(kernel, 1, 32, x), "divergence", __file__, marked(__file__, "31 has ended")
    )
    assert (
        fault.thread == (30, 0, 0)
        and "lane 31, which has ended" in fault.message
        and np.isnan(x[30])
    )
