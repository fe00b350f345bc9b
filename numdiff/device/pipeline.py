"""A pipeline through shared memory, in words: a ring of stages between producers and consumers.

A fast Hopper kernel keeps several stages of shared memory in flight. A producer thread uses TMA to
fill one after the other; consumers multiply what has arrived. Each stage has two mbarriers: `full`
completes when its bytes have arrived, `empty` when all consumers have read them. A parity bit shows
which round of the ring a stage is in. In the words of this file the two loops read

    producer                                                      consumers
    stage, parity = producer_start()                              stage, parity = consumer_start()
    …                                                             …
    full = producer_acquire(ring, stage, parity, tile_bytes)      consumer_wait(ring, stage, parity)
    tma_load_2d(stage_at(ring, stage), map_a, full, k, row)       wgmma(…, stage_at(ring, stage), …); wgmma_commit()
    stage, parity = advance(ring, stage, parity)                  wgmma_wait_1()  # the stage before has been read
                                                                  if elected: consumer_release(ring,
                                                                  previous) previous = stage stage,
                                                                  parity = advance(ring, stage,
                                                                  parity)

after `start_ring(ring, producers, consumers)`, or where more must be made at the start, `if thread
== 0: init_ring(ring, producers, consumers); fence_barrier_init()` and a `cuda.syncthreads()`.

A `Ring` is a named tuple of integers, made once in a kernel. Inlined, all of this becomes the PTX
of the same loop with the arithmetic written out: tuples that device functions take and return are
split up by the compiler. (So is a tuple that a loop carries from round to round, but its registers
come out in another order; so stage and parity are two variables.) Values that do not change, such
as the number of stages, should be constants of the kernel, so that they are constants in the
machine code. The emulator runs the words as they stand.

SOURCE
    PTX ISA, section 9.7.13.15 (mbarrier). The words are those of CUTLASS's pipelines
    (`PipelineTmaAsync`): acquire, wait, release, advance.
"""

from typing import NamedTuple

from .gpu import cuda
from .intrinsics import int32, uint32
from .limits import WARPGROUP
from .mbarrier import (
    fence_barrier_init,
    mbarrier_arrive,
    mbarrier_expect_tx,
    mbarrier_init,
    mbarrier_wait,
)

BARRIER_BYTES = 8
WORDS = True  # the emulator reports their faults at the line that uses them


class Ring(NamedTuple):
    """Stages in shared memory. Addresses are uint32, in the shared state space.

    base: address of the first stage; stage_bytes: from one to the next; stages: how many
    full, empty: addresses of the first stage's barriers, which the other stages' follow
    """

    base: int
    stage_bytes: int
    stages: int
    full: int
    empty: int


# Set-up -------------------------------------------------------------------------------------------


@cuda.jit(device=True, forceinline=True)
def make_ring(base, stage_bytes, stages, barriers):
    """The ring whose barriers are at the address `barriers`: `full` of all its stages, then `empty`
    of all."""
    return Ring(base, stage_bytes, stages, barriers, barrier_at(barriers, stages))


@cuda.jit(device=True, forceinline=True)
def barrier_at(first, number):
    """The address of barrier `number` of a row that begins at `first`, such as a stage's."""
    return uint32(first + uint32(BARRIER_BYTES) * uint32(number))


@cuda.jit(device=True, forceinline=True)
def init_barriers(first, count, arrivals):
    """Make `count` barriers, whose phases take `arrivals` arrivals each; one thread does it.

    Before they are used: `fence_barrier_init()` in this thread, and a `cuda.syncthreads()`.
    """
    for number in range(count):
        mbarrier_init(barrier_at(first, number), uint32(arrivals))


@cuda.jit(device=True, forceinline=True)
def init_ring(ring, producers, consumers):
    """Make a ring's barriers as `init_barriers` does; producers, consumers: arrivals that fill a
    stage, or empty it."""
    for stage in range(ring.stages):
        mbarrier_init(barrier_at(ring.full, stage), uint32(producers))
        mbarrier_init(barrier_at(ring.empty, stage), uint32(consumers))


@cuda.jit(device=True, forceinline=True)
def start_ring(ring, producers, consumers):
    """Make a ring's barriers as `init_ring` does, and let all threads see them; all threads of the
    block call it."""
    if cuda.threadIdx.x == 0:
        init_ring(ring, producers, consumers)
        fence_barrier_init()
    cuda.syncthreads()


# Going around -------------------------------------------------------------------------------------


@cuda.jit(device=True, forceinline=True)
def producer_start():
    """(stage, parity) at a producer's start. Parity 1 is the phase before the first: fresh barriers
    let it through."""
    return int32(0), uint32(1)


@cuda.jit(device=True, forceinline=True)
def consumer_start():
    """(stage, parity) at a consumer's start."""
    return int32(0), uint32(0)


@cuda.jit(device=True, forceinline=True)
def advance(ring, stage, parity):
    """(stage, parity) one stage on: after the last comes the first, in its next phase."""
    stage = int32(stage + 1)
    if stage == ring.stages:
        stage, parity = int32(0), uint32(parity ^ uint32(1))
    return stage, parity


@cuda.jit(device=True, forceinline=True)
def stage_at(ring, stage):
    """The address of a stage."""
    return uint32(ring.base + uint32(stage) * uint32(ring.stage_bytes))


@cuda.jit(device=True, forceinline=True)
def producer_acquire(ring, stage, parity, tx_bytes):
    """Wait until a stage is empty, and announce that TMA will bring `tx_bytes`; returns its barrier
    `full`."""
    full = barrier_at(ring.full, stage)
    mbarrier_wait(barrier_at(ring.empty, stage), parity)
    mbarrier_expect_tx(full, uint32(tx_bytes))
    return full


@cuda.jit(device=True, forceinline=True)
def consumer_wait(ring, stage, parity):
    """Wait until a stage is full."""
    mbarrier_wait(barrier_at(ring.full, stage), parity)


@cuda.jit(device=True, forceinline=True)
def consumer_release(ring, stage):
    """Arrive at a stage's barrier `empty`: one of its consumers has read it."""
    mbarrier_arrive(barrier_at(ring.empty, stage))


@cuda.jit(device=True, forceinline=True)
def warpgroup_release(ring, stage):
    """`consumer_release` for a warpgroup, by its first thread; all of its threads call it, once all
    have read."""
    if cuda.threadIdx.x % WARPGROUP == 0:
        consumer_release(ring, stage)
