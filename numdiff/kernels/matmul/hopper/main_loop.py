"""The main loop of Hopper's matmul: a consumer's products of one tile, stage after stage.

A stage is four wgmma of 16 along k (of E4M3, 32), in one group. While a group runs, the next stage
is waited for and its group issued. As soon as no more than that one is under way, the stage before
has been read, and the producer may fill it again. So the tensor cores always have a group to
continue with.

`promoted_loop` is for E4M3, of whose sums the tensor cores keep too few bits (PROMOTION in
extras/fp8/matmul.py).

SOURCE
    PTX ISA, section 9.7.15 (wgmma).
READ NEXT
    epilogue.py
"""

import numpy as np

from ....device import cuda, device_inline, float32, int32, uint32
from ....device.cluster import cluster_address, cluster_rank, mbarrier_arrive_cluster
from ....device.pipeline import advance, barrier_at, consumer_release, consumer_wait, stage_at
from ....device.specialise import Constant, Field
from ....device.wgmma import make_wgmma, make_wgmma_wait, wgmma_commit, wgmma_fence, wgmma_wait_1
from .layout import A_ALONG_M, A_BYTES, ACCUMULATORS, B_ALONG_N, descriptor

paired = Field("SCHEDULER", "paired")
wgmma = Constant(
    lambda BN, A_ALONG_M, B_ALONG_N, FP8: make_wgmma(
        BN, A_ALONG_M, B_ALONG_N, "e4m3" if FP8 else "f16"
    )
)
wgmma_wait = Constant(lambda BN: make_wgmma_wait(BN, pin=False))


@device_inline
def release(ring, stage):
    """A warpgroup has read a stage: its producer, of a pair both, may fill it again."""
    consumer_release(ring, stage)
    if paired:
        mbarrier_arrive_cluster(
            cluster_address(barrier_at(ring.empty, stage), cluster_rank() ^ uint32(1))
        )


@device_inline
def multiply_rest(acc, a, b):
    """acc += the products of a stage, except those of its first 16 of k; a, b: descriptors."""
    # to the next 16 in units of 16 bytes: 32 bytes along a row, or 16 rows
    step_a = np.uint64(128 if A_ALONG_M else 2)
    step_b = np.uint64(128 if B_ALONG_N else 2)
    wgmma(acc, a + step_a, b + step_b, int32(1))
    wgmma(acc, a + step_a + step_a, b + step_b + step_b, int32(1))
    wgmma(acc, a + step_a + step_a + step_a, b + step_b + step_b + step_b, int32(1))


@device_inline
def main_loop(acc, ring, stage, parity, steps, a_offset, elected):
    """acc = the products of `steps` stages; returns the ring's stage and parity after them.

    The first stage overwrites the accumulators; it stands before the loop so that ptxas sees it. A
    stage is released when the products of the next are under way.
    """
    consumer_wait(ring, stage, parity)
    address = stage_at(ring, stage)
    a, b = descriptor(address + a_offset), descriptor(address + uint32(A_BYTES))
    wgmma_fence()
    wgmma(acc, a, b, int32(0))
    multiply_rest(acc, a, b)
    wgmma_commit()
    previous = stage
    stage, parity = advance(ring, stage, parity)
    step = int32(1)
    while step < steps:
        consumer_wait(ring, stage, parity)
        address = stage_at(ring, stage)
        a, b = descriptor(address + a_offset), descriptor(address + uint32(A_BYTES))
        wgmma_fence()
        wgmma(acc, a, b, int32(1))
        multiply_rest(acc, a, b)
        wgmma_commit()
        wgmma_wait_1()
        if elected:
            release(ring, previous)
        previous = stage
        stage, parity = advance(ring, stage, parity)
        step = int32(step + 1)
    wgmma_wait(acc)
    if elected:
        release(ring, previous)
    return stage, parity


@device_inline
def promoted_loop(sums, ring, stage, parity, steps, a_offset, elected):
    """As `main_loop`, with each stage's products in accumulators of their own, which float32
    additions then add to `sums`. Meanwhile the tensor cores multiply for the other consumer."""
    acc = cuda.local.array(ACCUMULATORS, "float32")
    for i in range(ACCUMULATORS):
        sums[i] = float32(0)
    step = int32(0)
    while step < steps:
        consumer_wait(ring, stage, parity)
        address = stage_at(ring, stage)
        a, b = descriptor(address + a_offset), descriptor(address + uint32(A_BYTES))
        wgmma_fence()
        wgmma(acc, a, b, int32(0))
        multiply_rest(acc, a, b)
        wgmma_commit()
        wgmma_wait(acc)
        if elected:
            release(ring, stage)
        for i in range(ACCUMULATORS):
            sums[i] += acc[i]
        stage, parity = advance(ring, stage, parity)
        step = int32(step + 1)
    return stage, parity
