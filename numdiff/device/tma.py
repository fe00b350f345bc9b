"""TMA, the tensor memory accelerator: one thread requests a box of a tensor, and it arrives in
shared memory (sm_90).

    loads     tma_load_1d … 5d, whose bytes an mbarrier counts (mbarrier.py); tma_load_2d_multicast, into the
              shared memory of several blocks of a cluster; tma_prefetch            PTX ISA, section 9.7.9.27
    stores    tma_store_1d … 5d, tma_store_commit, tma_store_wait_0, _1, tma_store_wait_read_0, _1, _3
    fences    fence_proxy_async, fence_proxy_async_global: what threads have stored is seen by TMA and wgmma

Addresses in shared memory are 32-bit numbers, `smem_u32(array)` plus bytes. Tensor maps are the
arrays of 128 bytes that `tensor_map` makes on the host (tensor_map.py). Coordinates and sizes of
boxes run innermost dimension first. The innermost coordinate must be a multiple of 16 bytes, and no
coordinate of a store negative, or a GPU ends with an illegal instruction.

In the emulator each has its twin, right below it here: what it does is written in emulator/tma.py.
"""

import functools

from numba.cuda import types
from numba.cuda.extending import intrinsic

from ..emulator import tensor_map, tma, twin
from ..emulator.memory import GLOBAL
from .inline_ptx import I32, I64, element_pointer, emit, require_contiguous, statement

u32, void = types.uint32, types.void


# The asynchronous proxy ---------------------------------------------------------------------------


@intrinsic
def fence_proxy_async(typingctx):
    """Make this thread's stores to shared memory visible to the `wgmma` and TMA stores that come
    after (a barrier)."""
    return void(), statement("fence.proxy.async.shared::cta;", ordered=True)


@twin(fence_proxy_async)
def _fence_proxy_async(machine):
    machine.asynchronous.fence(machine.thread)


@intrinsic
def fence_proxy_async_global(typingctx):
    """Make this thread's stores to global memory visible to the TMA loads that come after (a
    barrier)."""
    return void(), statement("fence.proxy.async.global;", ordered=True)


@twin(fence_proxy_async_global)
def _fence_proxy_async_global(machine):
    machine.asynchronous.fence(machine.thread, GLOBAL)


# Copies -------------------------------------------------------------------------------------------


def _tensor_copy(rank, load):
    """Code generator of a copy between a shared address and a box of a tensor of `rank` dimensions."""
    registers = [f"${k}" for k in range(3 if load else 2, (3 if load else 2) + rank)]
    box = f"[$1, {{{', '.join(registers)}}}]"
    if load:
        text = (
            f"cp.async.bulk.tensor.{rank}d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [$0], {box}, "
            "[$2];"
        )
    else:
        text = f"cp.async.bulk.tensor.{rank}d.global.shared::cta.tile.bulk_group {box}, [$0];"

    def codegen(context, builder, sig, args):
        pointer = element_pointer(context, builder, sig.args[1], args[1], I32(0))
        operands = [args[0], builder.ptrtoint(pointer, I64), *args[2:]]
        emit(builder, text, [], operands, ordered=True)
        return context.get_dummy_value()

    return codegen


def _loads(rank, descriptor):
    """Signature and code of a load."""
    require_contiguous("a TMA load", descriptor)
    return void(u32, descriptor, u32, *[u32] * rank), _tensor_copy(rank, True)


def _stores(rank, descriptor):
    """Signature and code of a store."""
    require_contiguous("a TMA store", descriptor)
    return void(u32, descriptor, *[u32] * rank), _tensor_copy(rank, False)


@intrinsic
def tma_load_1d(typingctx, smem, descriptor, barrier, x):
    """Start a copy of the box at element x of a tensor to the tile at a shared address; `barrier`
    counts its bytes.

    Coordinates may be negative or beyond the end: elements outside the tensor are filled with
    zeros, whose bytes count. x must be a multiple of 16 bytes.
    """
    return _loads(1, descriptor)


@twin(tma_load_1d)
def _tma_load_1d(machine, smem, descriptor, barrier, *at):
    tma.load(machine, smem, descriptor, barrier, at)


@intrinsic
def tma_load_2d(typingctx, smem, descriptor, barrier, x, y):
    """As `tma_load_1d`, of a matrix: x is the column, y the row."""
    return _loads(2, descriptor)


@twin(tma_load_2d)
def _tma_load_2d(machine, smem, descriptor, barrier, *at):
    tma.load(machine, smem, descriptor, barrier, at)


@intrinsic
def tma_load_2d_multicast(typingctx, smem, descriptor, barrier, ranks, x, y):
    """As `tma_load_2d`, for several blocks of the cluster (cluster.py): the box arrives in each at
    the same place of its shared memory, and is counted by the barrier at the same place. It is read
    from the L2 cache once.

    ranks: bit r stands for the block of rank r. Each of them must be done with what lay there
    before, and must expect the bytes at its own barrier; and none may end before they have come.
    """
    require_contiguous("a TMA load", descriptor)
    text = (
        "{ .reg .b16 ranks; cvt.u16.u32 ranks, $3; cp.async.bulk.tensor.2d.shared::cluster.global.tile."
        "mbarrier::complete_tx::bytes.multicast::cluster [$0], [$1, {$4, $5}], [$2], ranks; }"
    )

    def codegen(context, builder, sig, args):
        pointer = element_pointer(context, builder, sig.args[1], args[1], I32(0))
        emit(builder, text, [], [args[0], builder.ptrtoint(pointer, I64), *args[2:]], ordered=True)
        return context.get_dummy_value()

    return void(u32, descriptor, u32, u32, u32, u32), codegen


@twin(tma_load_2d_multicast)
def _tma_load_2d_multicast(machine, smem, descriptor, barrier, ranks, *at):
    tma.load_multicast(machine, smem, descriptor, barrier, ranks, at)


@intrinsic
def tma_load_3d(typingctx, smem, descriptor, barrier, x, y, z):
    """As `tma_load_1d`, of a tensor of three dimensions."""
    return _loads(3, descriptor)


@twin(tma_load_3d)
def _tma_load_3d(machine, smem, descriptor, barrier, *at):
    tma.load(machine, smem, descriptor, barrier, at)


@intrinsic
def tma_load_4d(typingctx, smem, descriptor, barrier, c, w, h, n):
    """As `tma_load_1d`, of a tensor of four dimensions, such as images (n, h, w, c)."""
    return _loads(4, descriptor)


@twin(tma_load_4d)
def _tma_load_4d(machine, smem, descriptor, barrier, *at):
    tma.load(machine, smem, descriptor, barrier, at)


@intrinsic
def tma_load_5d(typingctx, smem, descriptor, barrier, a, b, c, d, e):
    """As `tma_load_1d`, of a tensor of five dimensions."""
    return _loads(5, descriptor)


@twin(tma_load_5d)
def _tma_load_5d(machine, smem, descriptor, barrier, *at):
    tma.load(machine, smem, descriptor, barrier, at)


@intrinsic
def tma_store_1d(typingctx, smem, descriptor, x):
    """Start a copy of the tile at a shared address to the box at element x of a tensor; part of
    this thread's open group.

    x must be a multiple of 16 bytes, and not negative. Threads that stored into the tile must have
    called `fence_proxy_async()` since; elements outside the tensor are not written.
    """
    return _stores(1, descriptor)


@twin(tma_store_1d)
def _tma_store_1d(machine, smem, descriptor, *at):
    tma.store(machine, smem, descriptor, at)


@intrinsic
def tma_store_2d(typingctx, smem, descriptor, x, y):
    """As `tma_store_1d`, into a matrix: x is the column, y the row."""
    return _stores(2, descriptor)


@twin(tma_store_2d)
def _tma_store_2d(machine, smem, descriptor, *at):
    tma.store(machine, smem, descriptor, at)


@intrinsic
def tma_store_3d(typingctx, smem, descriptor, x, y, z):
    """As `tma_store_1d`, into a tensor of three dimensions."""
    return _stores(3, descriptor)


@twin(tma_store_3d)
def _tma_store_3d(machine, smem, descriptor, *at):
    tma.store(machine, smem, descriptor, at)


@intrinsic
def tma_store_4d(typingctx, smem, descriptor, c, w, h, n):
    """As `tma_store_1d`, into a tensor of four dimensions."""
    return _stores(4, descriptor)


@twin(tma_store_4d)
def _tma_store_4d(machine, smem, descriptor, *at):
    tma.store(machine, smem, descriptor, at)


@intrinsic
def tma_store_5d(typingctx, smem, descriptor, a, b, c, d, e):
    """As `tma_store_1d`, into a tensor of five dimensions."""
    return _stores(5, descriptor)


@twin(tma_store_5d)
def _tma_store_5d(machine, smem, descriptor, *at):
    tma.store(machine, smem, descriptor, at)


@intrinsic
def tma_store_commit(typingctx):
    """Close a group: the stores that this thread has started since the last one."""
    return void(), statement("cp.async.bulk.commit_group;", ordered=True)


@twin(tma_store_commit)
def _tma_store_commit(machine):
    tma.commit(machine)


@functools.cache
def make_tma_store_wait(pending, read=False):
    """An intrinsic that waits until at most `pending` groups of the thread's stores are under way.

    read: only until their tiles have been read and may be overwritten; the data may not have
    arrived yet
    """
    text = f"cp.async.bulk.wait_group{'.read' * read} {pending};"

    @intrinsic
    def tma_store_wait(typingctx):
        return void(), statement(text, ordered=True)

    @twin(tma_store_wait)
    def _tma_store_wait(machine):
        tma.wait(machine, pending, read)

    return tma_store_wait


tma_store_wait_0, tma_store_wait_1 = (make_tma_store_wait(n) for n in (0, 1))
tma_store_wait_read_0, tma_store_wait_read_1, tma_store_wait_read_3 = (
    make_tma_store_wait(n, True) for n in (0, 1, 3)
)


@intrinsic
def tma_prefetch(typingctx, descriptor):
    """Fetch a tensor map into TMA's cache, before the first copy needs it."""
    require_contiguous("tma_prefetch", descriptor)

    def codegen(context, builder, sig, args):
        pointer = element_pointer(context, builder, sig.args[0], args[0], I32(0))
        emit(
            builder, "prefetch.tensormap [$0];", [], [builder.ptrtoint(pointer, I64)], ordered=True
        )
        return context.get_dummy_value()

    return void(descriptor), codegen


@twin(tma_prefetch)
def _tma_prefetch(machine, descriptor):
    tensor_map.map_from(machine, descriptor)
