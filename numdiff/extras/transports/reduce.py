"""The sum of a buffer over the GPUs of one host, each reading the others' memory directly.

MATHEMATICS
    y = x_0 + x_1 + … + x_(N-1), element by element, in this order, N the number of ranks; every
    rank ends with the same bits, because each element is added up by one rank alone and then
    copied.
        reduce-scatter   rank r adds up slice r of all ranks' buffers, and writes it over its own
        all-gather       rank r copies slice s from rank s, for every s but its own
        barrier          before, between and after: no rank reads an unwritten slice, or overwrites one being read
    A buffer of n numbers crosses each link 2 (N-1)/N times, the least there can be (Patarasuk and
    Yuan 2009).
    Slices are of nearly the same size, or such as the caller says: between the two passes each rank
    may continue with its own slice alone, as where ranks share the update (nn/partition.py). The
    barrier counts: the k-th time, rank r writes k into its place of every rank's flags, then waits
    until each place of its own flags holds k or more. Nothing is ever reset, so the same launch
    works in every replay of a CUDA graph.
SHAPES
    buffers: one float32 (n,) a rank; mails: a short float32 (m,) a rank; flags: one int32
    (MAX_RANKS · STRIDE,) a rank; counter, status int32 (1,) of the rank itself. Those of the other
    ranks are their memory, mapped by CUDA IPC.
VERSIONS
    v1 naive: one element a thread and step, any number of ranks up to 8.
    v2 vectorised: 16 bytes a load; the loads from all ranks (2, 4 or 8 of them) stand in one block
       of code, so that they are under way together: a load over NVLink takes longer than one from
       the GPU's own memory.
LAUNCH
    reduce and gather: blocks of 256 threads, at most 8 a multiprocessor, each thread strides
    through the slice; the gather has a second grid axis, one row of blocks a peer, so that all
    links are busy. Barrier: 32 threads.
DETERMINISM
    fixed order of addition; which thread does it does not matter.
COST
    reduce-scatter and all-gather each read (N-1)/N · 4n bytes from the peers. Roof: the ingoing
    half of NVLink.
SOURCE
    Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of workstations",
    Journal of Parallel and Distributed Computing 69(2). Flags: PTX ISA, "Memory Consistency Model",
    and device/system_scope.py.
READ NEXT
    peer_exchange.py, which puts the six launches together.
"""

from typing import NamedTuple

import numpy as np

from ...device import (
    cuda,
    int32,
    int64,
    is_device,
    launch,
    load4,
    load_acquire,
    nanoseconds,
    store4,
    store_release,
)
from ...kernels.operation import Problem, Version, lacks_multiple, numbers, operation, single
from ...kernels.peer_pieces import MAX_RANKS, eight

BLOCK = 256  # threads
# of 256: all the threads that a multiprocessor holds, so that many loads are under way
BLOCKS_PER_MULTIPROCESSOR = 8
# int32 between two flags: 128 bytes, a cache line for each, as different GPUs write them
STRIDE = 32
WARP = 32
MILLISECOND = 1_000_000  # nanoseconds


# References ---------------------------------------------------------------------------------------


def slice_of(n, rank, ranks):
    """(first, stop): the elements of an n-element buffer that `rank` adds up; first is a multiple
    of 4."""
    size = -(-n // (4 * ranks)) * 4
    return min(rank * size, n), min((rank + 1) * size, n)


def bounds_of(n, ranks):
    """[ranks + 1] elements at which those slices begin and end."""
    return [slice_of(n, rank, ranks)[0] for rank in range(ranks)] + [n]


def all_bounds(buffers, bounds):
    """`bounds`, or those of nearly equal slices."""
    return bounds_of(buffers[0].size, len(buffers)) if bounds is None else bounds


def peer_reduce_scatter_reference(buffers, rank, bounds=None):
    first, stop = all_bounds(buffers, bounds)[rank : rank + 2]
    total = buffers[0][first:stop].copy()
    for x in buffers[1:]:
        total += x[first:stop]
    buffers[rank][first:stop] = total


def peer_all_gather_reference(buffers, rank, bounds=None):
    bounds = all_bounds(buffers, bounds)
    for peer, x in enumerate(buffers):
        first, stop = bounds[peer : peer + 2]
        buffers[rank][first:stop] = x[first:stop]


def peer_sum_reference(mails, total):
    total[...] = mails[0]
    for x in mails[1:]:
        total += x


def peer_barrier_reference(flags, counter, status, rank, limit_ms):
    """The same protocol for ranks that run one after the other: none can wait, so a missing rank
    goes into `status`."""
    counter += 1
    for k, places in enumerate(flags):
        places[rank * STRIDE] = counter[0]
        if status[0] == 0 and flags[rank][k * STRIDE] < counter[0]:
            status[0] = k + 1


# What a kernel is given ---------------------------------------------------------------------------


class Bounds(NamedTuple):
    """Rank k has the elements b_k … b_(k+1) - 1; those of absent ranks are the last one's end."""

    b0: int
    b1: int
    b2: int
    b3: int
    b4: int
    b5: int
    b6: int
    b7: int
    b8: int


# The barrier --------------------------------------------------------------------------------------


@cuda.jit
def peer_barrier_kernel_v1(flags, mine, counter, status, rank, ranks, limit_ms):
    """Thread k signals rank k that this rank has arrived, and waits for rank k's signal.

    flags: of each of eight ranks; mine: this rank's.

    status[0] becomes k + 1 if rank k is not here after `limit_ms`; no later barrier waits then.
    """
    k = int32(cuda.threadIdx.x)
    arrival = int32(counter[0] + int32(1))
    failed = status[0] != 0
    cuda.syncthreads()  # all threads have read the counter before thread 0 moves it on
    if k < ranks:
        place = rank * STRIDE
        cuda.threadfence_system()  # what earlier kernels wrote is out before the flag is
        if k == 0:
            store_release(flags[0], place, arrival)
        elif k == 1:
            store_release(flags[1], place, arrival)
        elif k == 2:
            store_release(flags[2], place, arrival)
        elif k == 3:
            store_release(flags[3], place, arrival)
        elif k == 4:
            store_release(flags[4], place, arrival)
        elif k == 5:
            store_release(flags[5], place, arrival)
        elif k == 6:
            store_release(flags[6], place, arrival)
        else:
            store_release(flags[7], place, arrival)
        if not failed:
            deadline = nanoseconds() + int64(limit_ms) * int64(MILLISECOND)
            # the difference, not the values, is compared: it stays right when the counter passes
            # 2³¹
            while int32(load_acquire(mine, k * STRIDE) - arrival) < 0:
                if nanoseconds() > deadline:
                    status[0] = int32(k + 1)
                    break
        cuda.threadfence_system()
    cuda.syncthreads()
    if k == 0:
        counter[0] = arrival


# v1: one element a step ---------------------------------------------------------------------------


@cuda.jit
def peer_reduce_scatter_kernel_v1(x0, x1, x2, x3, x4, x5, x6, x7, y, first, stop, ranks):
    for i in range(first + cuda.grid(1), stop, cuda.gridsize(1)):
        total = x0[i]
        if ranks > 1:
            total += x1[i]
        if ranks > 2:
            total += x2[i]
        if ranks > 3:
            total += x3[i]
        if ranks > 4:
            total += x4[i]
        if ranks > 5:
            total += x5[i]
        if ranks > 6:
            total += x6[i]
        if ranks > 7:
            total += x7[i]
        y[i] = total


@cuda.jit(device=True)
def copy_slice(x, y, first, stop):
    """Elements first … stop-1 of x to the same place of y, by the blocks of one grid row."""
    for i in range(
        first + cuda.blockIdx.x * BLOCK + cuda.threadIdx.x, stop, cuda.gridDim.x * BLOCK
    ):
        y[i] = x[i]


@cuda.jit
def peer_all_gather_kernel_v1(x0, x1, x2, x3, x4, x5, x6, x7, y, bounds, rank, ranks):
    """Grid row k copies from rank (rank + 1 + k) mod N: the ranks start with different peers."""
    peer = int32((rank + int32(1) + cuda.blockIdx.y) % ranks)
    if peer == 0:
        copy_slice(x0, y, bounds.b0, bounds.b1)
    elif peer == 1:
        copy_slice(x1, y, bounds.b1, bounds.b2)
    elif peer == 2:
        copy_slice(x2, y, bounds.b2, bounds.b3)
    elif peer == 3:
        copy_slice(x3, y, bounds.b3, bounds.b4)
    elif peer == 4:
        copy_slice(x4, y, bounds.b4, bounds.b5)
    elif peer == 5:
        copy_slice(x5, y, bounds.b5, bounds.b6)
    elif peer == 6:
        copy_slice(x6, y, bounds.b6, bounds.b7)
    else:
        copy_slice(x7, y, bounds.b7, bounds.b8)


# v2: 16 bytes a load, the loads from all ranks under way together ---------------------------------


@cuda.jit(device=True)
def add4(a, b):
    return a[0] + b[0], a[1] + b[1], a[2] + b[2], a[3] + b[3]


@cuda.jit
def peer_reduce_scatter_kernel_v2_of_2(x0, x1, y, first, stop):
    for i in range(first + cuda.grid(1) * 4, stop, cuda.gridsize(1) * 4):
        a, b = load4(x0, i), load4(x1, i)
        t = add4(a, b)
        store4(y, i, t[0], t[1], t[2], t[3])


@cuda.jit
def peer_reduce_scatter_kernel_v2_of_4(x0, x1, x2, x3, y, first, stop):
    for i in range(first + cuda.grid(1) * 4, stop, cuda.gridsize(1) * 4):
        a, b, c, d = load4(x0, i), load4(x1, i), load4(x2, i), load4(x3, i)
        t = add4(add4(add4(a, b), c), d)
        store4(y, i, t[0], t[1], t[2], t[3])


@cuda.jit
def peer_reduce_scatter_kernel_v2_of_8(x0, x1, x2, x3, x4, x5, x6, x7, y, first, stop):
    for i in range(first + cuda.grid(1) * 4, stop, cuda.gridsize(1) * 4):
        a, b, c, d = load4(x0, i), load4(x1, i), load4(x2, i), load4(x3, i)
        e, f, g, h = load4(x4, i), load4(x5, i), load4(x6, i), load4(x7, i)
        t = add4(add4(add4(add4(add4(add4(add4(a, b), c), d), e), f), g), h)
        store4(y, i, t[0], t[1], t[2], t[3])


@cuda.jit(device=True)
def copy_slice4(x, y, first, stop):
    """As `copy_slice`, 16 bytes at a time, two loads under way."""
    step = cuda.gridDim.x * (4 * BLOCK)
    for i in range(first + 4 * (cuda.blockIdx.x * BLOCK + cuda.threadIdx.x), stop, 2 * step):
        j = i + step
        a = load4(x, i)
        if j < stop:
            b = load4(x, j)
            store4(y, i, a[0], a[1], a[2], a[3])
            store4(y, j, b[0], b[1], b[2], b[3])
        else:
            store4(y, i, a[0], a[1], a[2], a[3])


@cuda.jit
def peer_all_gather_kernel_v2(x0, x1, x2, x3, x4, x5, x6, x7, y, bounds, rank, ranks):
    peer = int32((rank + int32(1) + cuda.blockIdx.y) % ranks)
    if peer == 0:
        copy_slice4(x0, y, bounds.b0, bounds.b1)
    elif peer == 1:
        copy_slice4(x1, y, bounds.b1, bounds.b2)
    elif peer == 2:
        copy_slice4(x2, y, bounds.b2, bounds.b3)
    elif peer == 3:
        copy_slice4(x3, y, bounds.b3, bounds.b4)
    elif peer == 4:
        copy_slice4(x4, y, bounds.b4, bounds.b5)
    elif peer == 5:
        copy_slice4(x5, y, bounds.b5, bounds.b6)
    elif peer == 6:
        copy_slice4(x6, y, bounds.b6, bounds.b7)
    else:
        copy_slice4(x7, y, bounds.b7, bounds.b8)


REDUCE_V2 = {
    2: peer_reduce_scatter_kernel_v2_of_2,
    4: peer_reduce_scatter_kernel_v2_of_4,
    8: peer_reduce_scatter_kernel_v2_of_8,
}


# Cost ---------------------------------------------------------------------------------------------


def peer_all_reduce_cost(n, ranks):
    """(bytes that a rank reads from its peers, FLOPs that it does) for the sum of an n-element
    buffer."""
    return 2 * 4 * n * (ranks - 1) // ranks, n * (ranks - 1) // ranks


# Operations ---------------------------------------------------------------------------------------


def _check(buffers, rank, bounds):
    n = buffers[0].size
    if not 1 <= len(buffers) <= MAX_RANKS or not 0 <= rank < len(buffers):
        raise ValueError(
            f"the peers' buffers are summed over 1 to {MAX_RANKS} ranks, not {len(buffers)}; use the mpi "
            "or the nccl transport"
        )
    # the reference keeps its own
    dtypes = (np.float32,) if is_device(buffers[rank]) else (np.float32, np.float64)
    if any(x.size != n or x.ndim != 1 or x.dtype not in dtypes for x in buffers):
        raise ValueError(
            f"the peers' buffers must be flat, float32 and of one size, not {[x.shape for x in buffers]}"
        )
    bounds = all_bounds(buffers, bounds)
    if (
        len(bounds) != len(buffers) + 1
        or sorted(bounds) != list(bounds)
        or (bounds[0], bounds[-1]) != (0, n)
    ):
        raise ValueError(
            f"bounds {bounds} must rise from 0 to {n}, and be one more than the {len(buffers)} ranks"
        )


def _blocks(array, elements, width):
    return max(
        1,
        min(
            -(-elements // (width * BLOCK)),
            array.backend.multiprocessors * BLOCKS_PER_MULTIPROCESSOR,
        ),
    )


def _lacks_fours(buffers, bounds):
    """What v2 needs and slices lack; None if all of them begin at multiples of four."""
    return next(
        filter(None, (lacks_multiple(4, bound) for bound in all_bounds(buffers, bounds))), None
    )


def _lacks_ranks(buffers, bounds):
    if len(buffers) not in REDUCE_V2:
        return f"takes 2, 4 or 8 ranks, not {len(buffers)}"
    return _lacks_fours(buffers, bounds)


def _problems():
    """Small problems of both operations: one rank's part, with slices of nearly equal size and of
    given ones."""
    found = [
        Problem(f"{ranks} ranks, {n}", buffers=[single(n)] * ranks, rank=ranks // 2, fast=n < 1000)
        for ranks, n in ((2, 40), (3, 37), (4, 44), (4, 1028), (8, 64), (8, 5))
    ]
    return [
        *found,
        Problem(
            "4 ranks, given slices", buffers=[single(44)] * 4, rank=2, bounds=[0, 8, 8, 32, 44]
        ),
    ]


PARAMETERS = 20_494_272  # of the UNet, for the benchmark


@operation(
    reference=peer_reduce_scatter_reference,
    check=_check,
    versions=[
        Version("naive", peer_reduce_scatter_kernel_v1, width=1),
        Version("vectorised", REDUCE_V2, width=4, fits=_lacks_ranks),
    ],
    problems=[
        *_problems(),
        Problem(
            buffers=[single(PARAMETERS)] * 2,
            rank=0,
            moved=3 * 4 * PARAMETERS // 2,
            note="both ranks' arrays on one card",
            measured=True,
        ),
    ],
    writes=("buffers",),
)
def peer_reduce_scatter(buffers, rank, bounds=None, version=None):
    """buffers[rank][slice of rank] = the sum of that slice over all buffers, in rank order; the
    rest stays.

    bounds: [ranks + 1] elements at which the ranks' slices begin and end; None: nearly equal ones
    """
    first, stop = all_bounds(buffers, bounds)[rank : rank + 2]
    if first == stop:
        return
    grid = _blocks(buffers[rank], stop - first, version.width)
    if version.name == "vectorised":
        launch(version.kernel[len(buffers)], grid, BLOCK, *buffers, buffers[rank], first, stop)
    else:
        launch(
            version.kernel, grid, BLOCK, *eight(buffers), buffers[rank], first, stop, len(buffers)
        )


@operation(
    reference=peer_all_gather_reference,
    check=_check,
    versions=[
        Version("naive", peer_all_gather_kernel_v1, width=1),
        Version("vectorised", peer_all_gather_kernel_v2, width=4, fits=_lacks_fours),
    ],
    problems=_problems(),
    writes=("buffers",),
)
def peer_all_gather(buffers, rank, bounds=None, version=None):
    """buffers[rank][slice of s] = buffers[s][slice of s] for every rank s; bounds: as of
    `peer_reduce_scatter`."""
    if len(buffers) == 1:
        return
    bounds = all_bounds(buffers, bounds)
    size = max(stop - first for first, stop in zip(bounds, bounds[1:], strict=False))
    grid = (
        max(1, _blocks(buffers[rank], size, version.width) // (len(buffers) - 1)),
        len(buffers) - 1,
    )
    places = Bounds(*bounds, *[buffers[0].size] * (MAX_RANKS - len(buffers)))
    launch(version.kernel, grid, BLOCK, *eight(buffers), buffers[rank], places, rank, len(buffers))


@operation(
    reference=peer_sum_reference,
    problems=[Problem(mails=[single(n)] * 3, total=single(n)) for n in (1, 300)],
    writes=("total",),
)
def peer_sum(mails, total):
    """total (m,) = the sum of the ranks' mails, in rank order; each rank makes all of it by itself."""
    launch(
        peer_reduce_scatter_kernel_v1,
        _blocks(total, total.size, 1),
        BLOCK,
        *eight(mails),
        total,
        0,
        total.size,
        len(mails),
    )


def _flags(*arrived):
    """The flags of three ranks, of which rank 1's show how often each rank has arrived."""
    own = np.zeros(MAX_RANKS * STRIDE, np.int32)
    own[[0, STRIDE, 2 * STRIDE]] = arrived
    return [
        numbers(np.zeros_like(own), np.int32),
        numbers(own, np.int32),
        numbers(np.zeros_like(own), np.int32),
    ]


# Rank 1 arrives for the sixth time. Launches of one device run one after the other, so others'
# flags are set before.
@operation(
    reference=peer_barrier_reference,
    problems=[
        Problem(
            label,
            flags=_flags(*arrived),
            counter=numbers([5], np.int32),
            status=numbers([0], np.int32),
            rank=1,
            limit_ms=1,
        )
        for label, arrived in (("all are there", (7, 5, 6)), ("rank 2 never comes", (6, 5, 3)))
    ],
    writes=("flags", "counter", "status"),
)
def peer_barrier(flags, counter, status, rank, limit_ms):
    """Wait, on the device, for all ranks; status (1,) becomes k + 1 if rank k has not come after
    `limit_ms`."""
    launch(
        peer_barrier_kernel_v1,
        1,
        WARP,
        tuple(eight(flags)),
        flags[rank],
        counter,
        status,
        rank,
        len(flags),
        limit_ms,
    )
