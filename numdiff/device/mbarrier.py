"""mbarriers and named barriers: how the warps of a block, and what copies for them, wait for each
other (sm_90).

A fast kernel on Hopper is a pipeline between two kinds of warpgroups (128 threads each). One thread
of the producer loads tiles by TMA (tma.py); the consumers multiply them with `wgmma` (wgmma.py),
straight from shared memory. Each stage of the pipeline has two mbarriers, `full` and `empty`
(pipeline.py puts them into words):

    producer                                            consumer
    mbarrier_wait(empty, parity)                        mbarrier_wait(full, parity)
    mbarrier_expect_tx(full, bytes)                     wgmma_fence()
    tma_load_2d(tile_a, map_a, full, k, row)            wgmma(acc, descriptor_a, descriptor_b, 1)   … one per 16 of k
    tma_load_2d(tile_b, map_b, full, k, column)         wgmma_commit(); wgmma_wait_1()
                                                        mbarrier_arrive(empty of the stage before)

    mbarriers       mbarrier_init, _inval, _arrive, _arrive_count, _expect_tx (which arrives too), _expect_tx_only,
                    _wait, _try_wait, _test_wait; fence_barrier_init                 PTX ISA, section 9.7.13.15
    named barriers  bar_sync, bar_arrive                                                                   9.7.13.1
    clusters        in cluster.py

ADDRESSES in shared memory are 32-bit numbers, `smem_u32(array)` plus bytes.

The body of each is its twin in the emulator (emulator/mbarrier.py).
"""

from ..emulator import mbarrier
from ..emulator.values import UInt32
from .inline_ptx import boolean, contiguous, instruction, u32

# Addresses ----------------------------------------------------------------------------------------


@instruction("{ .reg .u64 a; cvta.to.shared.u64 a, $1; cvt.u32.u64 $0, a; }")
def smem_u32(machine, array: contiguous) -> u32:
    """The address (uint32, bytes) of a shared array's first element in the shared state space."""
    return UInt32(machine.shared_address(array))


# mbarriers ----------------------------------------------------------------------------------------


@instruction("mbarrier.init.shared::cta.b64 [$0], $1;", ordered=True)
def mbarrier_init(machine, barrier: u32, count: u32):
    """Make the 8 bytes at a shared address an mbarrier whose phases take `count` arrivals; one
    thread does it.

    Then `fence_barrier_init()` in the same thread, and `cuda.syncthreads()`, before anybody uses
    it.
    """
    mbarrier.initialise(machine, barrier, count)


@instruction("mbarrier.inval.shared::cta.b64 [$0];", ordered=True)
def mbarrier_inval(machine, barrier: u32):
    """Invalidate an mbarrier that is no longer used: its bytes may then hold something else."""
    mbarrier.invalidate(machine, barrier)


@instruction("mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], $1;", ordered=True)
def mbarrier_expect_tx(machine, barrier: u32, tx_bytes: u32):
    """Announce that TMA will bring `tx_bytes` in this phase, and arrive."""
    mbarrier.arrive(machine, barrier, 1, tx_bytes)


@instruction("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [$0], $1;", ordered=True)
def mbarrier_expect_tx_only(machine, barrier: u32, tx_bytes: u32):
    """Announce that TMA will bring `tx_bytes` in this phase, without arriving."""
    mbarrier.expect_tx(machine, barrier, tx_bytes)


@instruction("mbarrier.arrive.shared::cta.b64 _, [$0];", ordered=True)
def mbarrier_arrive(machine, barrier: u32):
    """Arrive: threads that wait for this phase will see what this thread has done before."""
    mbarrier.arrive(machine, barrier)


@instruction("mbarrier.arrive.shared::cta.b64 _, [$0], $1;", ordered=True)
def mbarrier_arrive_count(machine, barrier: u32, count: u32):
    """Arrive `count` times at once."""
    mbarrier.arrive(machine, barrier, count)


@instruction(
    "{ .reg .pred over; WAIT_${:uid}: mbarrier.try_wait.parity.shared::cta.b64 over, [$0], $1; @!over bra "
    "WAIT_${:uid}; }",
    ordered=True,
)
def mbarrier_wait(machine, barrier: u32, parity: u32):
    """Wait until the phase of this parity is over; returns at once if it was the last to end. A
    fresh barrier is in phase 0, so a wait for parity 1 gets through it."""
    mbarrier.wait(machine, barrier, parity)


ASK = "{{ .reg .pred over; mbarrier.{}.parity.shared::cta.b64 over, [$1], $2; selp.u32 $0, 1, 0, over; }}"


@instruction(ASK.format("try_wait"), ordered=True)
def mbarrier_try_wait(machine, barrier: u32, parity: u32) -> boolean:
    """Whether the phase of this parity is over; the hardware may wait a while before it says no."""
    return mbarrier.try_wait(machine, barrier, parity)


@instruction(ASK.format("test_wait"), ordered=True)
def mbarrier_test_wait(machine, barrier: u32, parity: u32) -> boolean:
    """Whether the phase of this parity is over, without waiting."""
    return mbarrier.try_wait(machine, barrier, parity)


@instruction("fence.mbarrier_init.release.cluster; fence.proxy.async.shared::cta;", ordered=True)
def fence_barrier_init(machine):
    """After `mbarrier_init`: TMA and other blocks of a cluster see the initialised barriers."""
    machine.asynchronous.fence(machine.thread)


# Named barriers -----------------------------------------------------------------------------------


@instruction("bar.sync $0, $1;", ordered=True, collective=True)
def bar_sync(machine, number: u32, threads: u32):
    """Wait at one of the block's barriers 1 … 15 (0 is `cuda.syncthreads`) until `threads` threads,
    whole warps, have come."""
    mbarrier.named(machine, number, threads, True)


@instruction("bar.arrive $0, $1;", ordered=True, collective=True)
def bar_arrive(machine, number: u32, threads: u32):
    """Come to one of the block's barriers without waiting; `threads` counts the waiting and the
    arriving threads."""
    mbarrier.named(machine, number, threads, False)
