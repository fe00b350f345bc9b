"""TMA, the tensor memory accelerator: one thread requests a box of a tensor, and it arrives in
shared memory (sm_90).

    loads     tma_load_1d … 5d, whose bytes an mbarrier counts (mbarrier.py); tma_load_2d_multicast, into the
              shared memory of several blocks of a cluster; tma_prefetch            PTX ISA, section 9.7.9.27
    stores    tma_store_1d … 5d, tma_store_commit, tma_store_wait_0, tma_store_wait_read_0, _1; make_tma_store_wait
    fences    fence_proxy_async, fence_proxy_async_global: what threads have stored is seen by TMA and wgmma

Addresses in shared memory are 32-bit numbers, `smem_u32(array)` plus bytes. Tensor maps are the
arrays of 128 bytes that `tensor_map` makes on the host (tensor_map.py). Coordinates and sizes of
boxes run innermost dimension first. The innermost coordinate must be a multiple of 16 bytes, and no
coordinate of a store negative, or a GPU ends with an illegal instruction.

The body of each is its twin in the emulator (emulator/tma.py).
"""

import functools

from ..emulator import tensor_map, tma
from ..emulator.memory import GLOBAL
from .inline_ptx import contiguous, instruction, u32

# The asynchronous proxy ---------------------------------------------------------------------------


@instruction("fence.proxy.async.shared::cta;", ordered=True)
def fence_proxy_async(machine):
    """Make this thread's stores to shared memory visible to the `wgmma` and TMA stores that come
    after (a barrier)."""
    machine.asynchronous.fence(machine.thread)


@instruction("fence.proxy.async.global;", ordered=True)
def fence_proxy_async_global(machine):
    """Make this thread's stores to global memory visible to the TMA loads that come after (a
    barrier)."""
    machine.asynchronous.fence(machine.thread, GLOBAL)


# Copies -------------------------------------------------------------------------------------------


def _box(rank, first):
    """In PTX, the box of a tensor of `rank` dimensions, whose coordinates begin at register `first`."""
    return f"[$1, {{{', '.join(f'${k}' for k in range(first, first + rank))}}}]"


def _load(rank):
    """Decorator: a copy from a box of a tensor to a shared address."""
    kind = f"{rank}d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
    return instruction(f"cp.async.bulk.tensor.{kind} [$0], {_box(rank, 3)}, [$2];", ordered=True)


def _store(rank):
    """Decorator: a copy from a shared address to a box of a tensor."""
    kind = f"{rank}d.global.shared::cta.tile.bulk_group"
    return instruction(f"cp.async.bulk.tensor.{kind} {_box(rank, 2)}, [$0];", ordered=True)


@_load(1)
def tma_load_1d(machine, smem: u32, descriptor: contiguous, barrier: u32, x: u32):
    """Start a copy of the box at element x of a tensor to the tile at a shared address; `barrier`
    counts its bytes.

    Coordinates may be negative or beyond the end: elements outside the tensor are filled with
    zeros, whose bytes count. x must be a multiple of 16 bytes.
    """
    tma.load(machine, smem, descriptor, barrier, (x,))


@_load(2)
def tma_load_2d(machine, smem: u32, descriptor: contiguous, barrier: u32, x: u32, y: u32):
    """As `tma_load_1d`, of a matrix: x is the column, y the row."""
    tma.load(machine, smem, descriptor, barrier, (x, y))


@instruction(
    "{ .reg .b16 ranks; cvt.u16.u32 ranks, $3; cp.async.bulk.tensor.2d.shared::cluster.global.tile."
    "mbarrier::complete_tx::bytes.multicast::cluster [$0], [$1, {$4, $5}], [$2], ranks; }",
    ordered=True,
)
def tma_load_2d_multicast(
    machine, smem: u32, descriptor: contiguous, barrier: u32, ranks: u32, x: u32, y: u32
):
    """As `tma_load_2d`, for several blocks of the cluster (cluster.py): the box arrives in each at
    the same place of its shared memory, and is counted by the barrier at the same place. It is read
    from the L2 cache once.

    ranks: bit r stands for the block of rank r. Each of them must be done with what lay there
    before, and must expect the bytes at its own barrier; and none may end before they have come.
    """
    tma.load_multicast(machine, smem, descriptor, barrier, ranks, (x, y))


@_load(3)
def tma_load_3d(machine, smem: u32, descriptor: contiguous, barrier: u32, x: u32, y: u32, z: u32):
    """As `tma_load_1d`, of a tensor of three dimensions."""
    tma.load(machine, smem, descriptor, barrier, (x, y, z))


@_load(4)
def tma_load_4d(
    machine, smem: u32, descriptor: contiguous, barrier: u32, c: u32, w: u32, h: u32, n: u32
):
    """As `tma_load_1d`, of a tensor of four dimensions, such as images (n, h, w, c)."""
    tma.load(machine, smem, descriptor, barrier, (c, w, h, n))


@_load(5)
def tma_load_5d(
    machine, smem: u32, descriptor: contiguous, barrier: u32, a: u32, b: u32, c: u32, d: u32, e: u32
):
    """As `tma_load_1d`, of a tensor of five dimensions."""
    tma.load(machine, smem, descriptor, barrier, (a, b, c, d, e))


@_store(1)
def tma_store_1d(machine, smem: u32, descriptor: contiguous, x: u32):
    """Start a copy of the tile at a shared address to the box at element x of a tensor; part of
    this thread's open group.

    x must be a multiple of 16 bytes, and not negative. Threads that stored into the tile must have
    called `fence_proxy_async()` since; elements outside the tensor are not written.
    """
    tma.store(machine, smem, descriptor, (x,))


@_store(2)
def tma_store_2d(machine, smem: u32, descriptor: contiguous, x: u32, y: u32):
    """As `tma_store_1d`, into a matrix: x is the column, y the row."""
    tma.store(machine, smem, descriptor, (x, y))


@_store(3)
def tma_store_3d(machine, smem: u32, descriptor: contiguous, x: u32, y: u32, z: u32):
    """As `tma_store_1d`, into a tensor of three dimensions."""
    tma.store(machine, smem, descriptor, (x, y, z))


@_store(4)
def tma_store_4d(machine, smem: u32, descriptor: contiguous, c: u32, w: u32, h: u32, n: u32):
    """As `tma_store_1d`, into a tensor of four dimensions."""
    tma.store(machine, smem, descriptor, (c, w, h, n))


@_store(5)
def tma_store_5d(
    machine, smem: u32, descriptor: contiguous, a: u32, b: u32, c: u32, d: u32, e: u32
):
    """As `tma_store_1d`, into a tensor of five dimensions."""
    tma.store(machine, smem, descriptor, (a, b, c, d, e))


@instruction("cp.async.bulk.commit_group;", ordered=True)
def tma_store_commit(machine):
    """Close a group: the stores that this thread has started since the last one."""
    tma.commit(machine)


@functools.cache
def make_tma_store_wait(pending, read=False):
    """An intrinsic that waits until at most `pending` groups of the thread's stores are under way.

    read: only until their tiles have been read and may be overwritten; the data may not have
    arrived yet
    """

    @instruction(f"cp.async.bulk.wait_group{'.read' * read} {pending};", ordered=True)
    def tma_store_wait(machine):
        tma.wait(machine, pending, read)

    return tma_store_wait


tma_store_wait_0 = make_tma_store_wait(0)
tma_store_wait_read_0, tma_store_wait_read_1 = (make_tma_store_wait(n, True) for n in (0, 1))


@instruction("prefetch.tensormap [$0];", ordered=True)
def tma_prefetch(machine, descriptor: contiguous):
    """Fetch a tensor map into TMA's cache, before the first copy needs it."""
    tensor_map.map_from(machine, descriptor)
