"""Clusters of blocks: addresses in the shared memory of another block, loads from there, the
cluster's barrier.

An address of the cluster's shared memory is an address of a block's own shared memory, plus the
block's rank + 1 from bit RANK on. An address of the block's own, with zeros there, is valid, too
(PTX ISA, section 5.1.7, "Shared State Space").

The blocks of a cluster run together (schedule.py). Their barrier joins what their threads have
seen, so that races.py finds races between them. What a block does in the shared memory of another
(loads, arrivals at an mbarrier, copies by TMA) is noted in the other, whose end must come after all
of it.
"""

import numpy as np

from . import mbarrier
from .faults import Unsupported
from .memory import POISON

RANK = 24  # bit
WORD = 0xFFFFFFFF  # an address is a uint32: sums of two of those are longer in Numba
MAX_BLOCKS = 8  # blocks of a cluster that every GPU with clusters takes
NOTHING = tuple(np.full(16, POISON, np.uint8).view(np.float32))


def _require(machine, what):
    if machine.cc < (9, 0):
        raise Unsupported(
            f"{what} needs compute capability 9.0, not {machine.cc[0]}.{machine.cc[1]}"
        )


def rank_of(machine):
    """The current block's number in its cluster."""
    _require(machine, "cluster_rank")
    return machine.thread.block.rank


def address_of(machine, address, rank):
    """The address of the same place in the shared memory of the cluster's block `rank`."""
    _require(machine, "cluster_address")
    blocks, rank = machine.thread.block.cluster.blocks, int(rank)
    if not 0 <= rank < len(blocks):
        machine.report(
            "bounds",
            f"asks for an address in block {rank} of a cluster of {len(blocks)}",
            machine.site_here(),
        )
    return rank + 1 << RANK | int(address) & WORD


def load_4(machine, address):
    """Four float32 at an address of the cluster's shared memory."""
    _require(machine, "load_cluster_4")
    site, thread, address = machine.site_here(), machine.thread, int(address) & WORD
    blocks, rank, own = (
        thread.block.cluster.blocks,
        (address >> RANK) - 1,
        address & (1 << RANK) - 1,
    )
    block = thread.block if rank < 0 else blocks[rank] if rank < len(blocks) else None
    found = block and machine.shared_memory(own, block)
    if not found or found[1] + 16 > found[0].size:
        machine.report(
            "bounds",
            f"reads 16 bytes at the cluster's shared address {address:#x}, which is outside of "
            "the shared memory of its blocks",
            site,
        )
        return NOTHING
    if own % 16:
        machine.report(
            "alignment",
            f"reads 16 bytes at the cluster's shared address {address:#x}, which is not a "
            "multiple of 16",
            site,
        )
        return NOTHING
    uses(machine, block, "reads")
    return tuple(machine.access.read_bytes(*found, 16, site).view(np.float32))


def arrive(machine, address):
    """`mbarrier.arrive` at an address of the cluster's shared memory."""
    _require(machine, "mbarrier_arrive_cluster")
    address = int(address) & WORD
    blocks, rank, own = (
        machine.thread.block.cluster.blocks,
        (address >> RANK) - 1,
        address & (1 << RANK) - 1,
    )
    if rank >= len(blocks):
        machine.report(
            "bounds",
            f"arrives at an mbarrier at the cluster's shared address {address:#x}, which is "
            "outside of the shared memory of its blocks",
            machine.site_here(),
        )
        return
    block = machine.thread.block if rank < 0 else blocks[rank]
    uses(machine, block, "arrives at an mbarrier in")
    mbarrier.arrive(machine, own, block=block)


def uses(machine, block, does):
    """The current thread uses the shared memory of a block of its cluster, which must not end
    before."""
    thread = machine.thread
    if block is not thread.block:
        site = machine.site_here()
        if not block.alive:
            _report_end(machine, block, thread, site, does)
        block.uses[thread.stamp] = site, does


def sync(machine, relaxed=False):
    """barrier.cluster: wait for all threads of the cluster that have not ended; relaxed: it orders
    no memory."""
    _require(machine, "cluster_sync")
    machine.scheduler.cluster_meet(relaxed, machine._frame_here())


def block_ends(machine, block):
    """A block has ended: other blocks must have finished using its shared memory."""
    acquired = block.state.get("acquired", {})
    for (thread, clock), (site, does) in block.uses.items():
        if all(
            thread.block not in known or known[thread.block][thread.tid] < clock
            for known in (block.met, acquired)
        ):
            _report_end(machine, block, thread, site, does)


def _report_end(machine, block, thread, site, does):
    if "race" in machine.checks:
        machine.report(
            "cluster",
            f"{does} shared memory of block {block.index}, which may have ended by then: a "
            "cluster_sync() must come between this and the end, or that block must wait for it",
            site,
            thread,
        )
