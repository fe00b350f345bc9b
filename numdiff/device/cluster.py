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

The body of each is its twin in the emulator (emulator/cluster.py).
"""

from ..emulator import cluster
from ..emulator.values import UInt32
from .inline_ptx import f32, instruction, many, u32


@instruction("mov.u32 $0, %cluster_ctarank;")
def cluster_rank(machine) -> u32:
    """The block's number in its cluster, uint32; 0 where there are no clusters."""
    return UInt32(cluster.rank_of(machine))


@instruction("mapa.shared::cluster.u32 $0, $1, $2;")
def cluster_address(machine, address: u32, rank: u32) -> u32:
    """The address (uint32) of the same place in the shared memory of the cluster's block `rank`.

    address: in the block's own shared memory, as `smem_u32` gives it
    """
    return UInt32(cluster.address_of(machine, address, rank))


@instruction("ld.shared::cluster.v4.f32 {$0, $1, $2, $3}, [$4];", ordered=True)
def load_cluster_4(machine, address: u32) -> many(f32, 4):
    """Four float32 at an address of the cluster's shared memory, a multiple of 16."""
    return cluster.load_4(machine, address)


@instruction("mbarrier.arrive.shared::cluster.b64 _, [$0];", ordered=True)
def mbarrier_arrive_cluster(machine, barrier: u32):
    """Arrive at the mbarrier at an address of the cluster's shared memory (`cluster_address`),
    which may be another block's. Reads of this thread before it are complete when threads there see
    the end of this phase. That block must not have ended.

    With `.release.cluster` what it has written before would be seen there, too; ptxas then puts a
    MEMBAR.ALL.GPU before the arrival, about a microsecond.
    """
    cluster.arrive(machine, barrier)


@instruction(
    "barrier.cluster.arrive.release; barrier.cluster.wait.acquire;", ordered=True, collective=True
)
def cluster_sync(machine):
    """A barrier of all threads of the cluster that have not ended, wherever they call it.

    After it, all of them see what any of them has stored, in shared or global memory. The first one
    of a kernel also makes sure that the other blocks are running: before that, their memory does
    not exist.
    """
    cluster.sync(machine)


@instruction("barrier.cluster.arrive.relaxed; barrier.cluster.wait;", ordered=True, collective=True)
def cluster_sync_relaxed(machine):
    """As `cluster_sync`, but earlier stores need not be visible after it: for the end of a kernel.

    It does not wait for the thread's stores to reach the L2 cache. The results of all loads must
    have been used before.
    """
    cluster.sync(machine, relaxed=True)
