"""Which tile GroupNorm's one-pass kernels take, and whether they are worth it: a forecast in
nanoseconds.

The longer of memory and arithmetic counts in full. A block reads, then writes: half of the shorter
one is not hidden, and less where several blocks overlap. Version 2's estimate follows what an H100
needs for the UNet's shapes.

SOURCE
    the project's own; comments next to the estimate's constants give their origin.
READ NEXT
    one_pass_launch.py
"""

import functools
import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ...device.batch_invariance import nominal_extent
from ...device.limits import (
    HOPPER_SHARED,
    MULTIPROCESSORS,
    REGISTERS,
    SHARED_RESERVED,
    multiprocessors_of,
    shared_limit,
)
from ...device.requires import supports
from ...dtypes import is_half
from ..concat import parts_of
from .clusters import BACKWARD_CLUSTERS, BLOCKS
from .one_pass import groupnorm_forward_kernel_v3
from .one_pass_half import MAX_NEAR
from .vectors import PARTS, THREADS, VECTOR, WARP
from .warp_sums import CHANNELS, MAX_THREADS

FEW_THREADS = 256, 128  # where several blocks find room
TEAMS = 16, 8, 5, 4, 3, 2, 1  # warps that share the pixels of a part (warp_sums.py)

MEMORY = 2600  # bytes per ns, of arrays that the L2 cache does not hold
L2 = 4500  # bytes per ns, of those that it holds
L2_BYTES = 40 << 20
ONE_MULTIPROCESSOR = 34  # bytes per ns that one of them can take, however idle the others are
SECTOR = 32  # bytes that memory delivers together
# of the time of memory, what comes on top where a pixel is one sector; half of it where it is two …
ONE_SECTOR = 0.6
# ns from the end of one kernel to the start of the next, filling and draining included
LAUNCH = 2500
DISTANT_TURN = 900  # ns of a turn whose pixel a thread loads only when it needs it
# of a thread in the forward: its squares are about the first of them (one_pass.py, ACCURACY)
MOST_PIXELS = 256
# ns; bytes per ns, by bytes of a number
VERSION_2_LAUNCH, VERSION_2_MEMORY = 4400, {2: 2000, 4: 2700}


class Kernel(NamedTuple):
    """The forecast's constants of a kernel; times in nanoseconds.

    registers: of a thread, as compiled for sm_80 and sm_90a, rounded up; latency: of a block: first
    bytes, barriers, last bytes, counting it; element: one element's arithmetic on a multiprocessor,
    SiLU included; turn: of a thread with eight channels of a pixel, were it alone; sweeps: those
    that wait for pixels that have no room
    """

    registers: int
    latency: int
    element: float
    turn: int
    sweeps: int


FORWARD, BACKWARD = Kernel(104, 2500, 0.1, 200, 2), Kernel(128, 3500, 0.14, 220, 1)


class HalfKernel(NamedTuple):
    """As `Kernel`, of those of 16 bits. launch: as LAUNCH; latency: of each wave of blocks, what
    comes with each."""

    registers: int
    launch: int
    latency: int
    element: float
    turn: int


# Fitted to 1,450 cuts of 17 shapes on an H100: what this chooses takes 2 % longer than the best of
# them
FORWARD_HALF, BACKWARD_HALF = (
    HalfKernel(64, 600, 2300, 0.036, 148),
    HalfKernel(128, 3500, 1600, 0.07, 200),
)
HALF_SIZE = 2  # bytes of a number
HALF_MEMORY, HALF_L2, HALF_L2_BYTES = 2600, 4200, 38 << 20  # as MEMORY, L2, L2_BYTES
HALF_MULTIPROCESSOR = 44  # as ONE_MULTIPROCESSOR
SIXTEEN = 1.2  # how much longer memory takes for pixels of one sector than for those of two
EXPOSED = 0.28  # of the shorter of memory and arithmetic, where a multiprocessor has one block
OF_WARP = 50  # ns of each wave for each of a block's warps, whose sums all others read
# ns of each wave: twice that in clusters of two blocks, thrice in those of four, … of eight
OF_CLUSTER = 570


@dataclass(frozen=True)
class NormPlan:
    """How the blocks of version 3 are cut: tile: channels of a block; rows: pixels that its threads
    take at once.

    ns: the forecast; ring: element at which the pixels start in shared memory; held: pixels that
    are kept; share: those of one group of copies; team_bits: log2 of how many threads add up a
    channel's sums; shared: bytes; folded, origins: of `HalfCut`, `ForwardCut`
    """

    ns: float
    tile: int
    rows: int
    ring: int
    held: int
    share: int
    team_bits: int
    shared: int
    near: int = 0  # turns that registers keep
    blocks: int = 1  # of a cluster, which share a sample's pixels (clusters.py)
    part: int = 0  # channels of a warp, where kernels of 16 bits do the work (warp_sums.py)
    folded: int = 0
    origins: int = 0


def pixel_sectors(tile, itemsize):
    """Sectors that `tile` channels of a pixel touch, on average over the tiles of an array."""
    nbytes = tile * itemsize
    starts = range(0, nbytes * SECTOR // math.gcd(nbytes, SECTOR), nbytes)
    return sum(-(-(s % SECTOR + nbytes) // SECTOR) for s in starts) / len(starts)


def make_plan(B, P, C, width, itemsize, backward, tile, threads, limit, multiprocessors):
    """The `NormPlan` of one tile, or None if it does not fit."""
    arrays, sweeps = 1 + backward, 2
    lanes = tile // VECTOR
    # rows of threads that make whole warps, and words of four
    whole = max(4, WARP // math.gcd(lanes, WARP))
    if lanes * whole > threads:
        return None
    rows = min(threads // (lanes * whole), -(-P // whole)) * whole
    threads, groups = lanes * rows, tile // width
    floats = arrays * VECTOR * threads + 2 * groups + (2 * tile + 1 if backward else 0)
    ring = -(-4 * floats // 16) * 16  # bytes
    turn = arrays * VECTOR * itemsize * threads
    turns = -(-P // rows)
    kept = min(turns, (limit - ring) // turn)
    if kept <= 0 or turns > MOST_PIXELS and not backward:
        return None
    team_bits = 0
    while 2 << team_bits <= min(WARP, threads // (2 * tile)) and rows % (8 << team_bits) == 0:
        team_bits += 1
    shared, blocks = ring + kept * turn, B * (C // tile)
    kernel = BACKWARD if backward else FORWARD
    ns = forecast(
        kernel,
        blocks,
        P,
        tile,
        itemsize,
        arrays,
        arrays * (sweeps - 1) * (1 - kept / turns),
        turns,
        turns - kept,
        resident_blocks(kernel.registers, shared, threads, limit),
        multiprocessors,
    )
    return NormPlan(
        ns,
        tile,
        rows,
        ring // itemsize,
        min(P, kept * rows),
        -(-kept // PARTS) * rows,
        team_bits,
        shared,
    )


def make_plan_half(B, P, C, width, backward, part, team, limit, multiprocessors, cluster=1):
    """The `NormPlan` of 16 bits with `team` warps for each `part` channels, or None if it does not
    fit.

    cluster: how many blocks share a sample's pixels
    """
    tile, pixels = math.lcm(width, part), WARP * VECTOR // part
    if P % cluster or C % tile:
        return None
    P, parts, arrays = P // cluster, tile // part, 1 + backward
    team = min(team, -(-P // pixels))
    rows, threads = pixels * team, WARP * team * parts
    if threads > MAX_THREADS:
        return None
    turns, turn = -(-P // rows), arrays * VECTOR * HALF_SIZE * threads
    # of each channel, besides the warps'
    extra = (2 * tile if parts > 1 else 0) + (2 * tile if cluster > 1 else 0)
    origins = 2 * part * parts * team + extra
    ring = 4 * (origins + (0 if backward else tile))  # bytes
    near, folded = max(0, turns - (limit - ring) // turn), 0
    if near and team % 2 == 0:
        ring, folded = 4 * (part * parts * team + extra), 1
        near = max(1, turns - (limit - ring) // turn)
    if near > (MAX_NEAR if backward else 0) or near == turns or near and P % rows:
        return None
    kept = turns - near
    shared = ring + kept * turn
    ns = forecast_half(
        backward,
        B * (C // tile) * cluster,
        P * tile,
        part,
        turns,
        shared,
        threads,
        limit,
        multiprocessors,
        cluster,
    )
    return NormPlan(
        ns, tile, rows, ring // HALF_SIZE, P, 0, 0, shared, near, cluster, part, folded, origins
    )


def forecast(
    kernel,
    blocks,
    P,
    tile,
    itemsize,
    arrays,
    again,
    turns,
    distant,
    resident,
    multiprocessors,
):
    """Nanoseconds; again: how many arrays are read once more; distant: turns of a thread that
    shared memory lacks; resident: blocks that a multiprocessor holds at once."""
    waves, each = -(-blocks // (resident * multiprocessors)), -(-blocks // multiprocessors)
    nbytes, sectors = P * tile * itemsize, P * SECTOR * pixel_sectors(tile, itemsize)
    total = blocks * (arrays + 1) * nbytes
    memory = max(
        (total + blocks * again * nbytes) / (MEMORY if total > L2_BYTES else L2),
        each * (arrays + again + 1) * sectors / ONE_MULTIPROCESSOR,
    )
    memory *= 1 + ONE_SECTOR * SECTOR / (tile * itemsize)
    alone = turns * kernel.turn + distant * kernel.sweeps * DISTANT_TURN
    arithmetic = max(each * P * tile * kernel.element, waves * alone)
    exposed = min(memory, arithmetic) / (2 * min(resident, waves))
    return LAUNCH + max(memory, arithmetic) + exposed + waves * kernel.latency


def forecast_half(
    backward, blocks, elements, part, turns, shared, threads, limit, multiprocessors, cluster
):
    """Nanoseconds of a kernel of 16 bits; elements: of a block."""
    kernel, arrays = (BACKWARD_HALF, 2) if backward else (FORWARD_HALF, 1)
    resident = resident_blocks(kernel.registers, shared, threads, limit)
    waves, each = -(-blocks // (resident * multiprocessors)), -(-blocks // multiprocessors)
    nbytes = (arrays + 1) * elements * HALF_SIZE
    total = blocks * nbytes
    memory = max(
        total / (HALF_MEMORY if total > HALF_L2_BYTES else HALF_L2),
        each * nbytes / HALF_MULTIPROCESSOR,
    )
    memory *= SIXTEEN if part == CHANNELS[0] else 1
    arithmetic = max(each * elements * kernel.element, waves * turns * kernel.turn)
    exposed = EXPOSED * min(memory, arithmetic) / min(resident, waves)
    wave = (
        kernel.latency
        + OF_WARP * threads // WARP
        + (OF_CLUSTER * cluster.bit_length() if cluster > 1 else 0)
    )
    return kernel.launch + max(memory, arithmetic) + exposed + waves * wave


def resident_blocks(registers, shared, threads, limit):
    """How many blocks a multiprocessor holds at once; registers: of a thread."""
    return max(
        1,
        min(
            (limit + SHARED_RESERVED) // (shared + SHARED_RESERVED),
            REGISTERS // (registers * threads),
            32,
        ),
    )


@functools.cache
def choose_plan(
    B,
    P,
    C,
    width,
    itemsize,
    backward,
    limit=HOPPER_SHARED,
    multiprocessors=MULTIPROCESSORS,
    clusters=True,
):
    """The `NormPlan` with the shortest forecast (among equals the one with more blocks), or None if
    no tile fits.

    clusters: whether the device has them
    """
    unit = math.lcm(width, VECTOR)
    tiles = [n for n in range(unit, min(C, VECTOR * THREADS) + 1, unit) if C % n == 0]
    plans = [
        make_plan(B, P, C, width, itemsize, backward, tile, threads, limit, multiprocessors)
        for tile in tiles
        for threads in (*FEW_THREADS, THREADS)
    ]
    for part in CHANNELS if itemsize == 2 else ():
        for cluster in (1, *BLOCKS) if clusters else (1,):
            plans += [
                make_plan_half(
                    B, P, C, width, backward, part, team, limit, multiprocessors, cluster
                )
                for team in TEAMS
            ]
    return min((p for p in plans if p is not None), key=lambda p: p.ns, default=None)


def version_2_estimate(B, P, C, itemsize, backward):
    """Nanoseconds of version 2: its launches wait for each other, and x (and dy) is read twice."""
    launches, passes = (4, 5) if backward else (3, 3)
    return launches * VERSION_2_LAUNCH + passes * B * P * C * itemsize / VERSION_2_MEMORY[itemsize]


def plan_for(x, width, backward):
    """`choose_plan` for an array or a `Pair`, None too where version 3 does not exist."""
    first, _, seam = parts_of(x)
    B, C = x.shape[0], x.shape[-1]
    if (
        C % VECTOR
        or seam % VECTOR
        or not (is_half(x.dtype) or x.dtype == np.float32)
        or x.size >= B << 31
        or not supports(first, groupnorm_forward_kernel_v3)
    ):
        return None
    return choose_plan(
        nominal_extent(B),
        x.size // (B * C),
        C,
        width,
        x.dtype.itemsize,
        backward,
        shared_limit(first),
        multiprocessors_of(first),
        supports(first, BACKWARD_CLUSTERS),
    )
