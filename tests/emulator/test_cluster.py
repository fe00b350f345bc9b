"""Clusters of blocks in the emulator: what they add up, and faults planted in it, each found in
each order."""

import time

import numpy as np
import pytest

from numdiff.device import cuda, download, float32, get_gpu, int32, launch, uint32, upload
from numdiff.device.cluster import (
    cluster_address,
    cluster_rank,
    cluster_sync,
    cluster_sync_relaxed,
    load_cluster_4,
)
from numdiff.device.emulator import EmulatorDevice
from numdiff.device.mbarrier import mbarrier_init, mbarrier_wait, smem_u32
from numdiff.emulator import KernelFault, LaunchRefused, Unsupported
from numdiff.kernels import conv2d
from numdiff.kernels.conv2d.hopper import cluster_sums, weight_gradient_3x3_plan
from numdiff.kernels.conv2d.hopper import weight_gradient_3x3 as conv2d_hopper_gradient_3x3
from tests.conftest import THREAD_ORDERS, exhaustively, needs
from tests.emulator.planting import copies, fault_at, faults_of, listed, marked, race_between, run  # noqa: F401

THREADS, NUMBERS, ROUNDS = 32, 128, 2  # four numbers a thread


def sums_of_blocks(fault=None):
    """Each block writes four numbers a thread, then adds up those of all blocks of its cluster;
    twice."""

    @cuda.jit
    def sum_kernel(x, y, blocks):
        mine = cuda.shared.array(NUMBERS, float32)
        t, at = cuda.threadIdx.x, (cuda.blockIdx.z * THREADS + cuda.threadIdx.x) * 4
        rank = cluster_rank()
        for turn in range(ROUNDS):
            for i in range(4):
                if fault != "a number is not written" or t < THREADS - 1 or i < 3 or rank != 1:
                    mine[4 * t + i] = x[at + i] + float32(turn)  # write
            if fault != "no barrier after the write":
                cluster_sync()
            a, b, c, d = float32(0), float32(0), float32(0), float32(0)
            for k in range(blocks):
                other = uint32(k + 1 if fault == "a block too far" else k)
                place = smem_u32(mine) + uint32(16 * t + (4 if fault == "not aligned" else 0))
                if fault == "beyond the end":
                    place += uint32(16)
                e, f, g, h = load_cluster_4(cluster_address(place, other))  # read
                a, b, c, d = a + e, b + f, c + g, d + h
            last = turn == ROUNDS - 1
            if last and fault != "leaves early" or fault == "a relaxed barrier":
                cluster_sync_relaxed()
            elif not last and fault != "no barrier after the read":
                cluster_sync()
            if last:
                y[at], y[at + 1], y[at + 2], y[at + 3] = a, b, c, d

    return sum_kernel


def numbers(blocks, rng=None):
    x = (rng or np.random.default_rng(0)).standard_normal((blocks, NUMBERS), dtype=np.float32)
    return x.reshape(-1), np.zeros(x.size, np.float32)


def sums(launcher, x, y, blocks, fault=None, **options):
    """Launch the kernel on as many clusters of this many blocks as there are numbers for."""
    grid, cluster = (1, 1, x.size // NUMBERS), (1, 1, blocks)
    return launcher(sums_of_blocks(fault), grid, THREADS, x, y, blocks, cluster=cluster, **options)


@THREAD_ORDERS
@pytest.mark.parametrize("checks", (True, False))
@pytest.mark.parametrize("blocks", (1, 2, 3, 8))
def test_blocks_of_a_cluster_read_each_other(blocks, checks, order):
    x, y = numbers(2 * blocks)
    sums(run, x, y, blocks, order=order, checks=checks)
    want = np.zeros((2, NUMBERS), np.float32)
    for k in range(blocks):
        want += x.reshape(2, blocks, -1)[:, k] + np.float32(ROUNDS - 1)
    assert np.array_equal(
        y.reshape(2, blocks, -1), np.broadcast_to(want[:, None], (2, blocks, NUMBERS))
    )


@needs("gpu")
@pytest.mark.parametrize("blocks", (1, 2, 3, 8))
def test_on_a_gpu(blocks):
    gpu = get_gpu()
    if gpu.capability[0] < 9:
        pytest.skip("no clusters there")
    x, y = numbers(2 * blocks)
    given, got = upload(x, gpu), upload(y, gpu)
    sums(launch, given, got, blocks)
    sums(run, x, y, blocks)
    assert np.array_equal(download(got), y)


@cuda.jit
def rank_kernel(out):
    b = cuda.blockIdx
    if cuda.threadIdx.x == 0:
        out[(b.z * cuda.gridDim.y + b.y) * cuda.gridDim.x + b.x] = int32(cluster_rank())


def test_ranks_count_along_x_then_y_then_z():
    out = np.full((2, 4, 6), -1, np.int32)
    run(rank_kernel, (6, 4, 2), 32, out.reshape(-1), cluster=(3, 1, 2))
    z, y, x = np.indices(out.shape)
    assert np.array_equal(out, x % 3 + 3 * z)


@THREAD_ORDERS
@pytest.mark.parametrize(
    "fault, kind, mark",
    [
        ("a block too far", "bounds", "read"),
        ("beyond the end", "bounds", "read"),
        ("not aligned", "alignment", "read"),
        ("a number is not written", "uninitialised", "read"),
        ("leaves early", "cluster", "read"),
    ],
)
def test_a_fault_at_a_load(fault, kind, mark, order):
    faults = sums(faults_of, *numbers(3), 3, fault, order=order)
    fault_at(faults, kind, __file__, marked(__file__, mark))


@THREAD_ORDERS
@pytest.mark.parametrize(
    "fault", ("no barrier after the write", "no barrier after the read", "a relaxed barrier")
)
def test_a_race_between_blocks(fault, order):
    faults = sums(faults_of, *numbers(2), 2, fault, order=order)
    found = race_between(faults, __file__, marked(__file__, "write"), marked(__file__, "read"))
    assert "no cluster_sync() between" in found.message


@cuda.jit
def absent_kernel(x):
    if cuda.threadIdx.x != 5 or cuda.blockIdx.x == 0:
        cluster_sync()  # all but one
    cuda.syncthreads()  # all
    cluster_sync()


@cuda.jit
def waiting_kernel(x):
    if cluster_rank() == 0:
        cluster_sync()  # first
    cluster_sync()  # second


@THREAD_ORDERS
def test_a_barrier_that_not_all_reach(order):
    faults = faults_of(absent_kernel, 2, 32, np.zeros(1, np.float32), cluster=2, order=order)
    assert any(f.kind in ("divergence", "deadlock") for f in faults), listed(faults)
    places = {f.line for f in faults} | {place.line for f in faults for _, place in f.others}
    assert {marked(__file__, "all but one"), marked(__file__, "all")} <= places, listed(faults)
    # who has ended is not waited for
    run(waiting_kernel, 2, 32, np.zeros(1, np.float32), cluster=2, order=order)


@cuda.jit
def loop_kernel(x):
    if cuda.blockIdx.x == 1:
        while x[0] == float32(0):
            pass
    cluster_sync()  # alone


@THREAD_ORDERS
def test_a_barrier_that_a_block_never_reaches(order):
    faults = faults_of(
        loop_kernel, 2, 32, np.zeros(1, np.float32), cluster=2, order=order, patience=0.2
    )
    assert (
        "32 of the cluster's 64 threads"
        in fault_at(faults, "deadlock", __file__, marked(__file__, "alone")).message
    )


@cuda.jit
def mbarrier_kernel(x):
    bar, t = cuda.shared.array(1, np.uint64), cuda.threadIdx.x
    if t == 0:
        mbarrier_init(smem_u32(bar), uint32(1))
    cuda.syncthreads()
    if cluster_rank() == 1 and t == 0:
        mbarrier_wait(smem_u32(bar), uint32(0))  # without an arrival
    cuda.syncwarp()
    cluster_sync()


@THREAD_ORDERS
def test_a_deadlock_is_reported_where_it_begins(order):
    faults = faults_of(mbarrier_kernel, 4, 32, np.zeros(1, np.float32), cluster=2, order=order)
    found = fault_at(faults, "deadlock", __file__, marked(__file__, "without an arrival"))
    assert found is faults[0] and "lacks 1 of 1 arrivals" in found.message


@cuda.jit
def spinning_kernel(x):
    flag, t = cuda.shared.array(4, float32), cuda.threadIdx.x
    if t < 4:
        flag[t] = float32(0)
    cluster_sync()
    value = float32(0)
    while cluster_rank() == 0 and value == float32(0):
        value = load_cluster_4(cluster_address(smem_u32(flag), uint32(1)))[0]  # never another
    cluster_sync()


@THREAD_ORDERS
def test_a_block_that_waits_for_anothers_memory_does_not_hang(order):
    start = time.process_time()
    faults = faults_of(
        spinning_kernel, 2, 32, np.zeros(1, np.float32), cluster=2, order=order, patience=0.5
    )
    assert [f.kind for f in faults] == ["deadlock"] and time.process_time() - start < 4


@pytest.mark.parametrize(
    "options",
    [
        {"cluster": (1, 1, 9)},
        {"cluster": (1, 1, 2)},
        {"cluster": 3, "cc": (8, 0)},
        {"cluster": (-1, -1, 1)},
        {"cluster": 0},
        {"cluster": (1, 1, 1, 1)},
    ],
    ids=str,
)
def test_a_launch_is_refused(options):
    with pytest.raises(LaunchRefused, match="cluster"):
        run(rank_kernel, (3, 1, 9), 32, np.zeros(27, np.int32), **options)


@cuda.jit
def global_kernel(x, y):
    t, b = cuda.threadIdx.x, cuda.blockIdx.x
    x[32 * b + t] = float32(b)
    cluster_sync()
    y[32 * b + t] = x[32 * (1 - b) + t]


@THREAD_ORDERS
def test_the_barrier_orders_global_memory_too(order):
    x, y = np.zeros(64, np.float32), np.zeros(64, np.float32)
    run(global_kernel, 2, 32, x, y, cluster=2, order=order)
    assert np.array_equal(y, np.repeat([1, 0], 32))
    if order == "forward":
        faults_of(global_kernel, 2, 32, x, y)  # blocks of two clusters


def test_older_gpus_have_none_of_the_instructions():
    with pytest.raises(
        Unsupported, match="needs compute capability 9.0, not 8.0; used at .*test_cluster.py:"
    ):
        run(rank_kernel, 1, 32, np.zeros(1, np.int32), cc=(8, 0))


@cuda.jit
def changing_kernel(x, y):
    t, rank = cuda.threadIdx.x, cluster_rank()
    before = x[t]
    cluster_sync()
    if rank == 0:
        cuda.syncthreads()
        x[t] += float32(1)  # change
    else:
        y[32 * rank + t] = x[t] + before  # unchanged


@THREAD_ORDERS
@pytest.mark.parametrize("blocks", (2, 3))
def test_a_block_changes_what_another_may_still_read(blocks, order):
    faults = faults_of(
        changing_kernel,
        blocks,
        32,
        np.zeros(32, np.float32),
        np.zeros(32 * blocks, np.float32),
        cluster=blocks,
        order=order,
    )
    race_between(faults, __file__, marked(__file__, "change"), marked(__file__, "unchanged"))


@cuda.jit(device=True)
def first_array(x, t):
    first = cuda.shared.array(32, float32)
    first[t] = x[t]
    return smem_u32(first)


@cuda.jit(device=True)
def second_array(x, t):
    second = cuda.shared.array(32, float32)
    second[t] = -x[t]
    return smem_u32(second)


@cuda.jit
def arrays_kernel(x, y):
    t, rank = cuda.threadIdx.x, cluster_rank()
    if rank == 0:
        alone = cuda.shared.array(100, float32)
        alone[t] = x[0]
    mine = first_array(x, t) if t < 32 else second_array(x, t - 32)
    cluster_sync()
    y[64 * cuda.blockIdx.x + t] = load_cluster_4(
        cluster_address(mine + uint32(16) + uint32(-16), uint32(1) - rank)
    )[3]
    cluster_sync_relaxed()


@THREAD_ORDERS
@pytest.mark.parametrize("seed", range(3))
def test_an_array_has_one_address_in_all_blocks(seed, order):
    x, y = np.arange(32, dtype=np.float32), np.zeros((2, 2, 32), np.float32)
    run(arrays_kernel, 2, 64, x, y.reshape(-1), cluster=2, order=order, seed=seed)
    assert np.array_equal(y[:, 0], np.full((2, 32), 3)) and np.array_equal(
        y[:, 1], np.full((2, 32), -3)
    )


GRADIENT = "numdiff.kernels.conv2d.hopper.weight_gradient_3x3"
STAGES = {  # before, after, the fault's kind, what is at its line
    "nothing": None,
    "a stage goes back while it is multiplied": (
        "        wgmma_wait_1()\n",
        "",
        "wgmma",
        "tma_load_4d(",
    ),
    "an arrival that never comes": (
        "5 if own.sums_dy else 3",
        "6 if own.sums_dy else 3",
        "deadlock",
        "producer_acquire(",
    ),
    "a lane hands back what others still add": (
        "        cuda.syncwarp()\n        if lane",
        "        if lane",
        "race",
        "tma_load_4d(",
    ),
}


@pytest.mark.parametrize("fault", ["nothing", *exhaustively(*list(STAGES)[1:])])
def test_stages_that_are_used_again(copies, monkeypatch, fault):  # noqa: F811
    """Two stages for the three chunks of a block, in a cluster of two; the cases of `kernels check`
    use none again."""
    monkeypatch.setattr(weight_gradient_3x3_plan, "MAX_STAGES", 2)
    conv2d_hopper_gradient_3x3.choose_plan.cache_clear()
    device = EmulatorDevice(float64=False, order="shuffled")
    rng = np.random.default_rng(0)
    dy, x = (rng.standard_normal((1, 2, 33, 8)).astype(np.float16) for _ in range(2))
    dweight, dbias = np.zeros((8, 3, 3, 8), np.float32), np.zeros(8, np.float32)
    arrays = [upload(a, device) for a in (dy, x, dweight, dbias)]
    try:
        if STAGES[fault] is None:
            conv2d_hopper_gradient_3x3.hopper_weight_gradient_3x3(*arrays, only=(16, 2, 64, 2))
            conv2d.conv2d_backward_reference(
                dy.astype(np.float32), x.astype(np.float32), dweight, dweight, dbias, need_dx=False
            )
            assert np.allclose(download(arrays[2]), dweight, atol=1e-4)
            assert np.allclose(download(arrays[3]), dbias, atol=1e-4)
            return
        before, after, kind, text = STAGES[fault]
        path, lines = copies.plant(GRADIENT, before, after)
        with pytest.raises(KernelFault) as caught:
            conv2d_hopper_gradient_3x3.hopper_weight_gradient_3x3(*arrays, only=(16, 2, 64, 2))
    finally:
        conv2d_hopper_gradient_3x3.choose_plan.cache_clear()
    found = caught.value.faults[0]
    assert (found.kind, found.file) == (kind, path) and text in lines[found.line - 1], listed(
        caught.value.faults
    )


def test_a_relaxed_barrier_planted_in_a_weight_gradient(copies):  # noqa: F811
    copies.plant(
        GRADIENT,
        "cluster_sync()  # all sums are there\n        add_up",
        "cluster_sync_relaxed()  # mine\n        add_up",
    )
    device = EmulatorDevice(float64=False)
    arrays = *np.ones((2, 1, 2, 33, 8), np.float16), np.zeros((8, 3, 3, 8), np.float32)
    with pytest.raises(KernelFault) as caught:
        conv2d_hopper_gradient_3x3.hopper_weight_gradient_3x3(
            *(upload(a, device) for a in arrays), only=(16, 2, 64, 2)
        )
    race = next(f for f in caught.value.faults if f.kind == "race")
    assert (
        "with no cluster_sync() between" in race.message and race.file == cluster_sums.__file__
    ), str(race)
