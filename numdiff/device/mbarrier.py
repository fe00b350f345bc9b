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

In the emulator each has its twin, right below it here: what it does is written in
emulator/mbarrier.py.
"""

from numba.cuda import types
from numba.cuda.extending import intrinsic

from ..emulator import mbarrier, twin
from ..emulator.values import UInt32
from .inline_ptx import I32, I64, element_pointer, emit, require_contiguous, statement

u32, void = types.uint32, types.void


# Addresses ----------------------------------------------------------------------------------------


@intrinsic
def smem_u32(typingctx, array):
    """The address (uint32, bytes) of a shared array's first element in the shared state space."""
    require_contiguous("smem_u32", array)

    def codegen(context, builder, sig, args):
        pointer = element_pointer(context, builder, sig.args[0], args[0], I32(0))
        address = builder.ptrtoint(pointer, I64)
        return emit(
            builder,
            "{ .reg .u64 a; cvta.to.shared.u64 a, $1; cvt.u32.u64 $0, a; }",
            [I32],
            [address],
        )[0]

    return u32(array), codegen


@twin(smem_u32)
def _smem_u32(machine, array):
    return UInt32(machine.shared_address(array))


# mbarriers ----------------------------------------------------------------------------------------


@intrinsic
def mbarrier_init(typingctx, barrier, count):
    """Make the 8 bytes at a shared address an mbarrier whose phases take `count` arrivals; one
    thread does it.

    Then `fence_barrier_init()` in the same thread, and `cuda.syncthreads()`, before anybody uses
    it.
    """
    return void(u32, u32), statement("mbarrier.init.shared::cta.b64 [$0], $1;", ordered=True)


@twin(mbarrier_init)
def _mbarrier_init(machine, barrier, count):
    mbarrier.initialise(machine, barrier, count)


@intrinsic
def mbarrier_inval(typingctx, barrier):
    """Invalidate an mbarrier that is no longer used: its bytes may then hold something else."""
    return void(u32), statement("mbarrier.inval.shared::cta.b64 [$0];", ordered=True)


@twin(mbarrier_inval)
def _mbarrier_inval(machine, barrier):
    mbarrier.invalidate(machine, barrier)


@intrinsic
def mbarrier_expect_tx(typingctx, barrier, tx_bytes):
    """Announce that TMA will bring `tx_bytes` in this phase, and arrive."""
    return void(u32, u32), statement(
        "mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], $1;", ordered=True
    )


@twin(mbarrier_expect_tx)
def _mbarrier_expect_tx(machine, barrier, tx_bytes):
    mbarrier.arrive(machine, barrier, 1, tx_bytes)


@intrinsic
def mbarrier_expect_tx_only(typingctx, barrier, tx_bytes):
    """Announce that TMA will bring `tx_bytes` in this phase, without arriving."""
    return void(u32, u32), statement(
        "mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [$0], $1;", ordered=True
    )


@twin(mbarrier_expect_tx_only)
def _mbarrier_expect_tx_only(machine, barrier, tx_bytes):
    mbarrier.expect_tx(machine, barrier, tx_bytes)


@intrinsic
def mbarrier_arrive(typingctx, barrier):
    """Arrive: threads that wait for this phase will see what this thread has done before."""
    return void(u32), statement("mbarrier.arrive.shared::cta.b64 _, [$0];", ordered=True)


@twin(mbarrier_arrive)
def _mbarrier_arrive(machine, barrier):
    mbarrier.arrive(machine, barrier)


@intrinsic
def mbarrier_arrive_count(typingctx, barrier, count):
    """Arrive `count` times at once."""
    return void(u32, u32), statement("mbarrier.arrive.shared::cta.b64 _, [$0], $1;", ordered=True)


@twin(mbarrier_arrive_count)
def _mbarrier_arrive_count(machine, barrier, count):
    mbarrier.arrive(machine, barrier, count)


@intrinsic
def mbarrier_wait(typingctx, barrier, parity):
    """Wait until the phase of this parity is over; returns at once if it was the last to end. A
    fresh barrier is in phase 0, so a wait for parity 1 gets through it."""
    return void(u32, u32), statement(
        "{ .reg .pred over; WAIT_${:uid}: mbarrier.try_wait.parity.shared::cta.b64 over, [$0], $1; @!over bra "
        "WAIT_${:uid}; }",
        ordered=True,
    )


@twin(mbarrier_wait)
def _mbarrier_wait(machine, barrier, parity):
    mbarrier.wait(machine, barrier, parity)


def _asks(instruction):
    """Code generator of a test of a barrier that gives a boolean."""

    def codegen(context, builder, sig, args):
        text = (
            f"{{ .reg .pred over; mbarrier.{instruction}.parity.shared::cta.b64 over, [$1], $2; "
            "selp.u32 $0, 1, 0, over; }"
        )
        answer = emit(builder, text, [I32], args, ordered=True)[0]
        return builder.icmp_unsigned("!=", answer, I32(0))

    return codegen


@intrinsic
def mbarrier_try_wait(typingctx, barrier, parity):
    """Whether the phase of this parity is over; the hardware may wait a while before it says no."""
    return types.boolean(u32, u32), _asks("try_wait")


@twin(mbarrier_try_wait)
def _mbarrier_try_wait(machine, barrier, parity):
    return mbarrier.try_wait(machine, barrier, parity)


@intrinsic
def mbarrier_test_wait(typingctx, barrier, parity):
    """Whether the phase of this parity is over, without waiting."""
    return types.boolean(u32, u32), _asks("test_wait")


@twin(mbarrier_test_wait)
def _mbarrier_test_wait(machine, barrier, parity):
    return mbarrier.try_wait(machine, barrier, parity)


@intrinsic
def fence_barrier_init(typingctx):
    """After `mbarrier_init`: TMA and other blocks of a cluster see the initialised barriers."""
    return void(), statement(
        "fence.mbarrier_init.release.cluster; fence.proxy.async.shared::cta;", ordered=True
    )


@twin(fence_barrier_init)
def _fence_barrier_init(machine):
    machine.asynchronous.fence(machine.thread)


# Named barriers -----------------------------------------------------------------------------------


@intrinsic
def bar_sync(typingctx, number, threads):
    """Wait at one of the block's barriers 1 … 15 (0 is `cuda.syncthreads`) until `threads` threads,
    whole warps, have come."""
    return void(u32, u32), statement("bar.sync $0, $1;", ordered=True, collective=True)


@twin(bar_sync)
def _bar_sync(machine, number, threads):
    mbarrier.named(machine, number, threads, True)


@intrinsic
def bar_arrive(typingctx, number, threads):
    """Come to one of the block's barriers without waiting; `threads` counts the waiting and the
    arriving threads."""
    return void(u32, u32), statement("bar.arrive $0, $1;", ordered=True, collective=True)


@twin(bar_arrive)
def _bar_arrive(machine, number, threads):
    mbarrier.named(machine, number, threads, False)
