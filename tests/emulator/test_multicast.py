"""TMA multicast in the emulator: two blocks fill each other's shared memory, stage after stage; and
faults in that."""

import numpy as np
import pytest

from numdiff.device import cuda, download, float32, get_gpu, int32, launch, uint32, upload
from numdiff.device.cluster import (
    cluster_address,
    cluster_rank,
    cluster_sync,
    mbarrier_arrive_cluster,
)
from numdiff.device.mbarrier import (
    fence_barrier_init,
    mbarrier_arrive,
    mbarrier_expect_tx,
    mbarrier_init,
    mbarrier_wait,
    smem_u32,
)
from numdiff.device.ptx import PtxDevice
from numdiff.device.tensor_map import tensor_map
from numdiff.device.tma import tma_load_2d_multicast
from tests.conftest import THREAD_ORDERS, needs
from tests.emulator.planting import fault_at, faults_of, marked, run

ROWS, COLUMNS = 8, 32  # of a box, float32
STAGES, STEPS = 2, 5
NUMBERS = ROWS * COLUMNS
BYTES = 4 * NUMBERS
ALL_NUMBERS, BARRIERS = STAGES * 2 * NUMBERS, 2 * STAGES


def halves_kernel(fault=None):
    """Each block loads half of every step's two boxes, for both blocks; both add up all of them."""

    @cuda.jit
    def kernel(x_map, y):
        boxes = cuda.shared.array(ALL_NUMBERS, float32, alignment=1024)
        barriers = cuda.shared.array(BARRIERS, np.uint64)
        t, rank = int32(cuda.threadIdx.x), int32(cluster_rank())
        base, full, empty = (
            smem_u32(boxes),
            smem_u32(barriers),
            smem_u32(barriers) + uint32(8 * STAGES),
        )
        if t == 0:
            for s in range(STAGES):
                mbarrier_init(full + uint32(8 * s), uint32(1))
                mbarrier_init(empty + uint32(8 * s), uint32(2))  # of one thread of each block
            fence_barrier_init()
        if fault != "barriers that the other has not made yet":
            cluster_sync()
        else:
            cuda.syncthreads()
        if t == 32:  # the producer
            for step in range(STEPS):
                s, parity = step % STAGES, uint32((step // STAGES + 1) & 1)
                if fault != "no wait for the other":
                    mbarrier_wait(empty + uint32(8 * s), parity)
                mbarrier_expect_tx(
                    full + uint32(8 * s),
                    uint32(BYTES if fault == "half of the bytes" else 2 * BYTES),
                )
                ranks = uint32(7 if fault == "a block too many" else 3)
                box, row = base + uint32((2 * s + rank) * BYTES), uint32((2 * step + rank) * ROWS)
                # load
                tma_load_2d_multicast(box, x_map, full + uint32(8 * s), ranks, uint32(0), row)
        total = float32(0)
        if t < 32:
            for step in range(STEPS):
                s = step % STAGES
                mbarrier_wait(full + uint32(8 * s), uint32(step // STAGES & 1))
                for i in range(2 * NUMBERS // 32):
                    total += boxes[2 * s * NUMBERS + 32 * i + t]  # read
                cuda.syncwarp()
                if t == 0:
                    mbarrier_arrive(empty + uint32(8 * s))
                    if fault != "the other is never signalled":
                        # signal
                        mbarrier_arrive_cluster(
                            cluster_address(empty + uint32(8 * s), uint32(1 - rank))
                        )
            y[32 * rank + t] = total
        if fault != "leaves early":
            cluster_sync()

    return kernel


def inputs(rng):
    return rng.integers(-9, 9, (2 * STEPS * ROWS, COLUMNS)).astype(np.float32), np.zeros(
        64, np.float32
    )


def want(x):
    return np.tile(x.sum(0), 2)


@THREAD_ORDERS
@pytest.mark.parametrize("checks", (True, False))
def test_both_blocks_get_all_boxes(rng, checks, order):
    x, y = inputs(rng)
    run(
        halves_kernel(),
        2,
        64,
        tensor_map(x, (COLUMNS, ROWS), 0),
        y,
        cluster=2,
        order=order,
        checks=checks,
    )
    assert np.array_equal(y, want(x))


def test_it_compiles(rng):
    device = PtxDevice()
    x, y = (upload(array, device) for array in inputs(rng))
    launch(halves_kernel(), 2, 64, tensor_map(x, (COLUMNS, ROWS), 0), y, cluster=2)


@needs("gpu")
def test_on_a_gpu(rng):
    gpu = get_gpu()
    if gpu.capability[0] < 9:
        pytest.skip("no clusters there")
    x, y = inputs(rng)
    given, got = upload(x, gpu), upload(y, gpu)
    launch(halves_kernel(), 2, 64, tensor_map(given, (COLUMNS, ROWS), 0), got, cluster=2)
    assert np.array_equal(download(got), want(x))


def faults_with(fault, rng, order):
    x, y = inputs(rng)
    x_map = tensor_map(x, (COLUMNS, ROWS), 0)
    return faults_of(halves_kernel(fault), 2, 64, x_map, y, cluster=2, order=order)


@THREAD_ORDERS
@pytest.mark.parametrize(
    "fault, kind, mark",
    [
        ("a block too many", "bounds", "load"),
        ("half of the bytes", "asynchronous", "read"),
        ("leaves early", "cluster", "signal"),
        ("no wait for the other", "asynchronous", "load"),
    ],
)
def test_a_fault(rng, fault, kind, mark, order):
    fault_at(faults_with(fault, rng, order), kind, __file__, marked(__file__, mark))


@THREAD_ORDERS
@pytest.mark.parametrize(
    "fault, kind, text",
    [
        ("barriers that the other has not made yet", "mbarrier", "initialise"),
        ("the other is never signalled", "deadlock", "lacks 1 of 2 arrivals"),
    ],
)
def test_a_fault_of_barriers(rng, fault, kind, text, order):
    assert any(f.kind == kind and text in str(f) for f in faults_with(fault, rng, order))
