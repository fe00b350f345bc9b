"""Thread block clusters (sm_90): blocks that run at the same time and read each other's shared
memory.

`launch(kernel, grid, block, …, cluster=(1, 1, 4))` makes clusters of four blocks, neighbours along
z. A block's number in its cluster is its rank: x first, then y, then z. All blocks of a cluster run
on neighbouring multiprocessors, so there are at most 8 (16 on request), and a cluster starts when
there is room for all of it.

    partial[t] = …                                          # in the block's own shared memory
    cluster_sync()                                          # now all blocks of the cluster have written theirs
    for rank in range(blocks):
        a, b, c, d = load_cluster_4(cluster_address(smem_u32(partial) + 16 * t, rank))
    …                                                       # use of what was loaded
    cluster_sync_relaxed()                                  # no block exits while another may still read its memory

    cluster_rank            %cluster_ctarank                PTX ISA, section 10.16
    cluster_address         mapa                            9.7.9.23
    load_cluster_4          ld.shared::cluster.v4           9.7.9.8
    mbarrier_arrive_cluster mbarrier.arrive                 9.7.13.15.13
    cluster_sync, cluster_sync_relaxed  barrier.cluster     9.7.13.3

In the emulator each has its twin, right below it here: what it does is written in
emulator/cluster.py.
"""

from numba.cuda import types
from numba.cuda.extending import intrinsic

from ..emulator import cluster, twin
from ..emulator.values import UInt32
from .inline_ptx import F32, I32, statement

u32, f32, void = types.uint32, types.float32, types.void


@intrinsic
def cluster_rank(typingctx):
    """The block's number in its cluster, uint32; 0 where there are no clusters."""
    return u32(), statement("mov.u32 $0, %cluster_ctarank;", [I32])


@twin(cluster_rank)
def _cluster_rank(machine):
    return UInt32(cluster.rank_of(machine))


@intrinsic
def cluster_address(typingctx, address, rank):
    """The address (uint32) of the same place in the shared memory of the cluster's block `rank`.

    address: in the block's own shared memory, as `smem_u32` gives it
    """
    return u32(u32, u32), statement("mapa.shared::cluster.u32 $0, $1, $2;", [I32])


@twin(cluster_address)
def _cluster_address(machine, address, rank):
    return UInt32(cluster.address_of(machine, address, rank))


@intrinsic
def load_cluster_4(typingctx, address):
    """Four float32 at an address of the cluster's shared memory, a multiple of 16."""
    return types.UniTuple(f32, 4)(u32), statement(
        "ld.shared::cluster.v4.f32 {$0, $1, $2, $3}, [$4];", [F32] * 4, ordered=True
    )


@twin(load_cluster_4)
def _load_cluster_4(machine, address):
    return cluster.load_4(machine, address)


@intrinsic
def mbarrier_arrive_cluster(typingctx, barrier):
    """Arrive at the mbarrier at an address of the cluster's shared memory (`cluster_address`),
    which may be another block's. Reads of this thread before it are complete when threads there see
    the end of this phase. That block must not have ended.

    With `.release.cluster` what it has written before would be seen there, too; ptxas then puts a
    MEMBAR.ALL.GPU before the arrival, about a microsecond.
    """
    return void(u32), statement("mbarrier.arrive.shared::cluster.b64 _, [$0];", ordered=True)


@twin(mbarrier_arrive_cluster)
def _mbarrier_arrive_cluster(machine, barrier):
    cluster.arrive(machine, barrier)


@intrinsic
def cluster_sync(typingctx):
    """A barrier of all threads of the cluster that have not ended, wherever they call it.

    After it, all of them see what any of them has stored, in shared or global memory. The first one
    of a kernel also makes sure that the other blocks are running: before that, their memory does
    not exist.
    """
    return void(), statement(
        "barrier.cluster.arrive.release; barrier.cluster.wait.acquire;",
        ordered=True,
        collective=True,
    )


@twin(cluster_sync)
def _cluster_sync(machine):
    cluster.sync(machine)


@intrinsic
def cluster_sync_relaxed(typingctx):
    """As `cluster_sync`, but earlier stores need not be visible after it: for the end of a kernel.

    It does not wait for the thread's stores to reach the L2 cache. The results of all loads must
    have been used before.
    """
    return void(), statement(
        "barrier.cluster.arrive.relaxed; barrier.cluster.wait;", ordered=True, collective=True
    )


@twin(cluster_sync_relaxed)
def _cluster_sync_relaxed(machine):
    cluster.sync(machine, relaxed=True)
