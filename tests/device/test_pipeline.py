"""The words of a pipeline: stages are handed over in order, at the cost of the arithmetic written
out."""

import collections
import pathlib
import re

import numpy as np
import pytest

from numdiff import emulator
from numdiff.device import cuda, get_backend, int32, launch, uint32, upload
from numdiff.device.compiler import type_of_word
from numdiff.device.mbarrier import fence_barrier_init, mbarrier_arrive, mbarrier_wait, smem_u32
from numdiff.device.pipeline import (
    advance,
    barrier_at,
    consumer_release,
    consumer_start,
    consumer_wait,
    init_ring,
    make_ring,
    producer_start,
    stage_at,
)
from numdiff.device.ptx import compile_to_ptx
from numdiff.device.wgmma import make_multiply, wgmma_wait_0
from numdiff.emulator import KernelFault
from tests.kernels.ptx_equal import normalised

STAGES, BARRIERS = 3, 6
# a number of this file: it does not make it a file of words, whose faults are reported elsewhere
WORDS = 1


@cuda.jit
def hand_over(x, y, places, steps):
    """A thread puts numbers into a ring of three stages, a thread of another warp takes them out."""
    box = cuda.shared.array(STAGES, "int32")
    barriers = cuda.shared.array(BARRIERS, "uint64")
    ring = make_ring(smem_u32(box), uint32(4), STAGES, smem_u32(barriers))
    if cuda.threadIdx.x == 0:
        init_ring(ring, 1, 1)
        fence_barrier_init()
    cuda.syncthreads()
    if cuda.threadIdx.x == 0:
        stage, parity = producer_start()
        for i in range(steps):
            mbarrier_wait(barrier_at(ring.empty, stage), parity)
            box[stage] = x[i]
            mbarrier_arrive(barrier_at(ring.full, stage))
            stage, parity = advance(ring, stage, parity)
    elif cuda.threadIdx.x == 32:
        stage, parity = consumer_start()
        for i in range(steps):
            consumer_wait(ring, stage, parity)
            y[i] = box[stage]
            places[i] = (stage_at(ring, stage) - ring.base) // uint32(4)
            consumer_release(ring, stage)
            stage, parity = advance(ring, stage, parity)


@pytest.mark.parametrize("steps", [1, 3, 8])
def test_numbers_go_through_in_order(steps):
    backend = get_backend("emulator")
    x = np.arange(steps, dtype=np.int32) * 10
    y, places = (upload(np.zeros(steps, np.int32), backend) for _ in range(2))
    launch(hand_over, 1, 64, upload(x, backend), y, places, steps)
    np.testing.assert_array_equal(backend.download(y), x)
    np.testing.assert_array_equal(backend.download(places), np.arange(steps) % STAGES)


@cuda.jit
def written_out(x, steps):
    barriers = cuda.shared.array(BARRIERS, "uint64")
    full = smem_u32(barriers)
    empty = full + uint32(8 * STAGES)
    stage, parity = int32(0), uint32(0)
    for i in range(steps):
        mbarrier_wait(full + uint32(8) * uint32(stage), parity)
        x[i] = stage
        mbarrier_arrive(empty + uint32(8) * uint32(stage))
        stage = int32(stage + 1)
        if stage == STAGES:
            stage, parity = int32(0), uint32(parity ^ uint32(1))


@cuda.jit
def in_words(x, steps):
    barriers = cuda.shared.array(BARRIERS, "uint64")
    ring = make_ring(uint32(0), uint32(4), STAGES, smem_u32(barriers))
    stage, parity = consumer_start()
    for i in range(steps):
        consumer_wait(ring, stage, parity)
        x[i] = stage
        consumer_release(ring, stage)
        stage, parity = advance(ring, stage, parity)


def instructions(kernel):
    """How often each instruction stands in a kernel's PTX, whatever its registers are called."""
    text = normalised(
        compile_to_ptx(kernel, tuple(map(type_of_word, ("int32[1]", "int32"))), (9, 0, "a"))
    )
    return collections.Counter(re.sub(r"%[a-z]+[0-9]+", "%", text).splitlines())


def test_words_cost_nothing():
    """They become the instructions of the same loop with the arithmetic written out."""
    ours = instructions(in_words)
    assert any("mbarrier.try_wait" in line for line in ours) and ours == instructions(written_out)


multiply = make_multiply(8)


@cuda.jit(device=True)
def beyond(x, i):
    return x[i + WORDS]  # its own line


@cuda.jit
def two_faults(x):
    tiles = cuda.shared.array(8192 + 1024, "uint8", alignment=1024)
    acc = cuda.local.array(4, "float32")
    if cuda.threadIdx.x == 0:
        x[0] = beyond(x, 0)
    multiply(acc, smem_u32(tiles), smem_u32(tiles) + 8192, 0)  # the line that uses it
    wgmma_wait_0()


def test_faults_are_reported_where_words_are_used():
    x = np.zeros(1, np.int32)
    with pytest.raises(KernelFault) as raised, emulator.device(cc=(9, 0)):
        two_faults[1, 128](x)
    lines = pathlib.Path(__file__).read_text(encoding="utf-8").splitlines()
    for kind, mark in (("bounds", "# its own line"), ("uninitialised", "# the line that uses it")):
        assert {fault.line for fault in raised.value.faults if fault.kind == kind} == {
            next(n for n, line in enumerate(lines, 1) if line.endswith(mark))
        }, raised.value
