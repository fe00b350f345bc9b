"""Gradients of weights by rung 5: up to four products Aᵀ·B of one K in one launch, cut only where
they fill no round.

    C_p (M_p, N_p) = or += A_pᵀ · B_p        A_p (K, M_p), B_p (K, N_p), 16 bits; C_p float32
    row_sums_p (M_p,) += A_p summed over K

WHY IT PAYS
    A block of DiT-B/2 has 54, 18, 72 and 72 tiles of 128 × 256 for 132 multiprocessors. One by one,
    each is cut into slices that never fill whole rounds, and a second pass adds up all of its
    results. Together they have 216: 132 are multiplied whole, and the steps along K of the other 84
    are distributed evenly, in two or three parts a tile.
UNITS IN A TABLE
    `schedule` makes a table of the launch's units, once for the same sizes, which stays on the
    device. So a unit costs the kernel two loads of 16 bytes, whatever the schedule. Block b takes
    units b, b + blocks, …, until one is empty.
TILES THAT ARE CUT
    Each part is written as a whole tile of float32; `add_tiles_kernel` adds them up in the order of
    k.
ROW SUMS
    Tiles of the first columns multiply A's fragments by ones, too: the four warps of the same 64 rows
    take 16 each, one `mma` more for 32 and four registers. A pass of its own over all A took 5 % of a
    step of DiT-S/2.
DETERMINISM
    every order is fixed by the sizes and the number of multiprocessors.
SOURCE
    Osama et al. 2023, "Stream-K", arXiv:2301.03598, section 4.3, "Basic Stream-K", and section 5.3
    on hybrid schedules.
READ NEXT
    split_half.py
"""

import functools
from typing import NamedTuple

import numpy as np

from ...device import cuda, empty, int32, int64, lasting, launch, upload
from ...device.eight import array_of, load8, store8
from ...device.half import in_bfloat16
from ...device.limits import shared_limit
from ...device.specialise import Variants
from . import choice
from .choice import HALF_SECOND_PASS, HALF_TILES, MMA_WRITTEN_A_NS, PARTIALS_A_NS, START_NS
from .mma import STAGED, make_kernel
from .mma_epilogues import add
from .mma_layout import (
    ADDING,
    FIELDS,
    PLAIN,
    PRODUCTS,
    TILES,
    MmaArrays,
    MmaEpilogue,
    MmaGroup,
    stage_bytes,
    stages_of,
    threads_of,
)
from .split_half import unused

TILE = 128, 256
SIZE = TILE[0] * TILE[1]
STEP = TILES[TILE].k
SHORTEST = 8  # steps of a part, at least
OF_GROUP = 1.05  # measured over estimated time: units come from a table
SINGLE_GAIN = 0.95  # below which time of equal slices a single product pays
ADD_BLOCK = 256
ADDED = 8 * ADD_BLOCK  # outputs of a block that adds up parts
GROUP_KERNELS = Variants(
    ((stages, end) for tile, stages in STAGED if tile == TILE for end in (PLAIN, ADDING)),
    lambda key: make_kernel(TILE, key[0], True, True, key[1], grouped=True, module=__name__),
)


class Schedule(NamedTuple):
    """Arrays of FIELDS int32 for each unit, in the order of their numbers, and for each tile that
    is cut: product, row, column, first part, count of parts, M, N, 0; how many parts there are."""

    units: np.ndarray
    tiles: np.ndarray
    parts: int


@functools.lru_cache(maxsize=4096)
def schedule(sizes, K, blocks, shortest):
    """The `Schedule` of products of these sizes (M, N) on `blocks` blocks; shortest: see `snap`."""
    steps = -(-K // STEP)
    tiles = [
        (p, row, column, M, N)
        for p, (M, N) in enumerate(sizes)
        for row in range(0, M, TILE[0])
        for column in range(0, N, TILE[1])
    ]
    whole = len(tiles) // blocks * blocks
    dealt = [[] for _ in range(blocks)]  # of each block
    for i, (p, row, column, M, N) in enumerate(tiles[:whole]):
        dealt[i % blocks].append((p, row, column, 0, K, -1, M, N))
    rest, cut, parts = tiles[whole:], [], 0
    total = len(rest) * steps
    ends = [snap(total * b // blocks, steps, shortest) for b in range(blocks + 1)]
    for i, (p, row, column, M, N) in enumerate(rest):
        first, last = i * steps, (i + 1) * steps
        shares = [
            (b, max(ends[b], first) - first, min(ends[b + 1], last) - first)
            for b in range(blocks)
            if ends[b] < last and ends[b + 1] > first
        ]
        shares = [share for share in shares if share[1] < share[2]]
        for b, begin, end in shares:
            part = -1 if len(shares) == 1 else parts
            parts += len(shares) > 1
            dealt[b].append((p, row, column, begin * STEP, min(end * STEP, K), part, M, N))
        if len(shares) > 1:
            cut.append((p, row, column, parts - len(shares), len(shares), M, N, 0))
    units = np.zeros((max(map(len, dealt)), blocks, FIELDS), np.int32)
    for b, given in enumerate(dealt):
        units[: len(given), b] = np.reshape(given, (-1, FIELDS))
    return Schedule(units.reshape(-1), np.reshape(np.array(cut, np.int32), -1), parts)


def snap(step, steps, shortest):
    """A place in a line of tiles of `steps` steps, moved to a tile's end where that is fewer than
    `shortest` away."""
    near = (step + steps // 2) // steps * steps
    return near if abs(near - step) < shortest else step


@functools.lru_cache(maxsize=4096)
def estimate(sizes, K, blocks):
    """The time of a launch in ns, by the model of choice.py."""
    step, results = HALF_TILES[5][TILE]
    results += 2 * SIZE / MMA_WRITTEN_A_NS  # float32
    made = schedule(sizes, K, blocks, SHORTEST)
    each = made.units.reshape(-1, blocks, FIELDS)
    lengths = (each[..., 4] - each[..., 3]).sum(0).max() / 64
    ns = START_NS[5] + lengths * step + len(each) * results
    if made.parts:
        ns += HALF_SECOND_PASS + 8 * made.parts * SIZE / PARTIALS_A_NS
    return OF_GROUP * ns


def pays(M, N, K, blocks):
    """Whether one product takes clearly less time so than in equal slices, by the estimates."""
    alone = choice.choose_half(5, choice.gradient_product(M, N, K), True, blocks)[2]
    return estimate(((M, N),), K, blocks) < SINGLE_GAIN * alone


@functools.cache  # for good: captured steps read them
def tables(backend, *key):
    """The units and the cut tiles of a `Schedule` on a device."""
    made = schedule(*key)
    with lasting(backend):
        return upload(made.units, backend), upload(
            made.tiles if made.parts else np.zeros(FIELDS, np.int32), backend
        )


def four(items):
    """A tuple of PRODUCTS items: those given, then the first again."""
    return *items, *[items[0]] * (PRODUCTS - len(items))


def launch_group(products):
    """C = or += Aᵀ·B for up to PRODUCTS `Product`s: matrices of one dtype and one K, all or none of
    which accumulate."""
    first, accumulate = products[0].a.array, products[0].fused.accumulate
    sizes = tuple(tuple(p.c.array.shape) for p in products)
    K, blocks = len(first), first.backend.multiprocessors
    key = sizes, K, blocks, SHORTEST
    made, (units, tiles) = schedule(*key), tables(first.backend, *key)
    parts = empty((made.parts * SIZE,), np.float32, like=first) if made.parts else unused(first)
    a, b, c = (
        four([x.array.reshape(-1) for x in xs])
        for xs in zip(*(product[:3] for product in products), strict=True)
    )
    sums = [p.fused.row_sums for p in products]
    summed = sum(1 << i for i, given in enumerate(sums) if given is not None)
    nothing = unused(parts)
    row_sums = (
        *four([nothing if given is None else given for given in sums]),
        empty((made.parts * TILE[0],), np.float32, like=first)
        if made.parts and summed
        else nothing,
    )
    stages = stages_of(TILE, shared_limit(first))
    kernel = in_bfloat16(GROUP_KERNELS[stages, ADDING if accumulate else PLAIN], first.dtype)
    launch(
        kernel,
        blocks,
        threads_of(TILE),
        a,
        b,
        MmaArrays((*c, parts), parts, parts),
        MmaGroup(units, K, len(made.units) // FIELDS, row_sums, summed),
        MmaEpilogue(1.0, 0, 0),
        shared=stages * stage_bytes(TILE),
    )
    if made.parts:
        launch(
            add_tiles_kernel,
            len(made.tiles) // FIELDS * (SIZE // ADDED),
            ADD_BLOCK,
            parts,
            tiles,
            c,
            int(accumulate),
            row_sums,
            summed,
        )


@cuda.jit
def add_tiles_kernel(parts, tiles, targets, accumulate, row_sums, summed):
    """The sum of a cut tile's parts, in their order: eight neighbouring outputs a thread, and of a
    tile of the first columns the row sums."""
    tile = int32(cuda.blockIdx.x // (SIZE // ADDED)) * FIELDS
    e = int32(int32(cuda.blockIdx.x % (SIZE // ADDED)) * ADDED + 8 * cuda.threadIdx.x)
    row, column = int32(tiles[tile + 1] + e // TILE[1]), int32(tiles[tile + 2] + e % TILE[1])
    if row < tiles[tile + 5] and column < tiles[tile + 6]:
        at = int64(tiles[tile + 3]) * SIZE + e
        total = load8(parts, at)
        for i in range(1, tiles[tile + 4]):
            total = add(total, load8(parts, at + int64(i) * SIZE))
        if column == 0 and summed >> tiles[tile] & 1:
            of_parts = array_of(int32(PRODUCTS), row_sums)
            part = int64(tiles[tile + 3]) * TILE[0] + e // TILE[1]
            of_row = of_parts[part]
            for i in range(1, tiles[tile + 4]):
                of_row += of_parts[part + i * TILE[0]]
            of_product = array_of(tiles[tile], row_sums)
            of_product[row] += of_row
        target = array_of(tiles[tile], targets)
        at = int64(row) * tiles[tile + 6] + column
        if accumulate:
            total = add(total, load8(target, at))
        store8(target, at, total)
