"""Which tile GroupNorm's one-pass kernels take, and whether they are worth it: a forecast in nanoseconds.

The longer of memory and arithmetic counts in full. A block reads, then writes: half of the shorter one is not hidden,
and less where several blocks overlap. Version 2's estimate follows what an H100 needs for the UNet's shapes.

SOURCE
    the project's own; what the estimate is made of is said beside its numbers.
READ NEXT
    normalise.py
"""
import functools
import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

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
from ..any_batch import assumed
from ..concat import parts_of
from .clusters import BLOCKS, groupnorm_backward_clusters
from .one_pass import groupnorm_forward_kernel_v3
from .one_pass_half import MAX_NEAR, MAX_THREADS, PART, PIXELS
from .vectors import PARTS, THREADS, VECTOR, WARP

FEW_THREADS = 256, 128  # where several blocks find room
TEAMS = 16, 8, 5, 4, 3, 2, 1  # warps that share the pixels of sixteen channels (one_pass_half.py)

MEMORY = 2600  # bytes per ns, of arrays that the L2 cache does not hold
L2 = 4500  # bytes per ns, of those that it holds
L2_BYTES = 40 << 20
ONE_MULTIPROCESSOR = 34  # bytes per ns that one of them can take, however idle the others are
SECTOR = 32  # bytes that memory delivers together
LAUNCH = 2500  # ns from the end of one kernel to the start of the next, filling and draining included
DISTANT_TURN = 900  # ns of a turn whose pixel a thread loads only when it needs it
MOST_PIXELS = 256  # of a thread in the forward: its squares are about the first of them (one_pass.py, ACCURACY)
VERSION_2_LAUNCH, VERSION_2_MEMORY = 4400, 2000  # ns; bytes per ns


class Kernel(NamedTuple):
    """What the forecast needs to know of a kernel; times in nanoseconds.

    registers: of a thread, as compiled for sm_80 and sm_90a, rounded up; latency: of a block: first bytes, barriers,
    last bytes, counting it; element: one element's arithmetic on a multiprocessor, SiLU included; turn: of a
    thread with eight channels of a pixel, were it alone; sweeps: those that wait for pixels that have no room
    """

    registers: int
    latency: int
    element: float
    turn: int
    sweeps: int


FORWARD, BACKWARD = Kernel(104, 2500, 0.1, 200, 2), Kernel(128, 3500, 0.14, 220, 1)
HALF = Kernel(128, 2000, 0.1, 200, 1)  # eight channels side by side, and nobody counts blocks
CLUSTER = HALF._replace(latency=HALF.latency + 1500)  # two cluster barriers, and sums read from the other blocks


@dataclass(frozen=True)
class Plan:
    """How the blocks of version 3 are cut: tile: channels of a block; rows: pixels that its threads take at once.

    ns: the forecast; ring: element at which the pixels start in shared memory; held: pixels that are kept; share: those
    of one group of copies; team_bits: log2 of how many threads add up a channel's sums; shared: bytes
    """

    ns: float
    tile: int
    rows: int
    ring: int
    held: int
    share: int
    team_bits: int
    shared: int
    near: int | None = None  # turns that registers keep, where one_pass_half.py's kernel does the work
    blocks: int = 1  # of a cluster, which share a sample's pixels (clusters.py)


def pixel_sectors(tile, itemsize):
    """Sectors that `tile` channels of a pixel touch, on average over the tiles of an array."""
    nbytes = tile * itemsize
    starts = range(0, nbytes * SECTOR // math.gcd(nbytes, SECTOR), nbytes)
    return sum(-(-(s % SECTOR + nbytes) // SECTOR) for s in starts) / len(starts)


def make_plan(B, P, C, width, itemsize, backward, tile, threads, limit, multiprocessors):
    """The `Plan` of one tile, or None if it does not fit."""
    arrays, sweeps = 1 + backward, 2
    lanes = tile // VECTOR
    whole = max(4, WARP // math.gcd(lanes, WARP))  # rows of threads that make whole warps, and words of four
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
    ns = forecast(BACKWARD if backward else FORWARD, blocks, P, tile, itemsize, arrays,
                  arrays * (sweeps - 1) * (1 - kept / turns), turns, turns - kept, shared, threads, limit,
                  multiprocessors)
    return Plan(ns, tile, rows, ring // itemsize, min(P, kept * rows), -(-kept // PARTS) * rows, team_bits,
                shared)


def make_plan_half(B, P, C, width, itemsize, team, limit, multiprocessors, cluster=1):
    """The `Plan` of a backward by one_pass_half.py with `team` warps for 16 channels, or None if it does not fit.

    cluster: how many blocks share a sample's pixels
    """
    tile = math.lcm(width, PART)
    if P % cluster:
        return None
    P //= cluster
    parts, team = tile // PART, min(team, -(-P // PIXELS))
    if itemsize != 2 or C % tile or team * parts * WARP > MAX_THREADS:
        return None
    rows, threads = PIXELS * team, WARP * team * parts
    turns, turn = -(-P // rows), 2 * VECTOR * itemsize * threads
    ring = 4 * (threads + (2 * tile if parts > 1 else 0) + (2 * tile if cluster > 1 else 0))  # bytes
    near = max(0, turns - (limit - ring) // turn)
    if near > MAX_NEAR or near == turns or near and P % rows:
        return None
    kept = turns - near
    shared = ring + kept * turn
    ns = forecast(HALF if cluster == 1 else CLUSTER, B * (C // tile) * cluster, P, tile, itemsize, 2, 0, turns, 0,
                  shared, threads, limit, multiprocessors)
    return Plan(ns, tile, rows, ring // itemsize, P, 0, 0, shared, near, cluster)


def forecast(kernel, blocks, P, tile, itemsize, arrays, again, turns, distant, shared, threads, limit, multiprocessors):
    """Nanoseconds; again: how many arrays are read once more; distant: turns of a thread that shared memory lacks."""
    resident = max(1, min((limit + SHARED_RESERVED) // (shared + SHARED_RESERVED),
                          REGISTERS // (kernel.registers * threads), 32))
    waves, each = -(-blocks // (resident * multiprocessors)), -(-blocks // multiprocessors)
    nbytes, sectors = P * tile * itemsize, P * SECTOR * pixel_sectors(tile, itemsize)
    total = blocks * (arrays + 1) * nbytes
    memory = max((total + blocks * again * nbytes) / (MEMORY if total > L2_BYTES else L2),
                 each * (arrays + again + 1) * sectors / ONE_MULTIPROCESSOR)
    alone = turns * kernel.turn + distant * kernel.sweeps * DISTANT_TURN
    arithmetic = max(each * P * tile * kernel.element, waves * alone)
    exposed = min(memory, arithmetic) / (2 * min(resident, waves))
    return LAUNCH + max(memory, arithmetic) + exposed + waves * kernel.latency


@functools.cache
def choose_plan(B, P, C, width, itemsize, backward, limit=HOPPER_SHARED, multiprocessors=MULTIPROCESSORS,
                clusters=True):
    """The `Plan` with the shortest forecast (among equals the one with more blocks), or None if no tile fits.

    clusters: whether the device has them
    """
    unit = math.lcm(width, VECTOR)
    tiles = [n for n in range(unit, min(C, VECTOR * THREADS) + 1, unit) if C % n == 0]
    plans = [make_plan(B, P, C, width, itemsize, backward, tile, threads, limit, multiprocessors)
             for tile in tiles for threads in (*FEW_THREADS, THREADS)]
    if backward:
        for cluster in (1, *BLOCKS) if clusters else (1,):  # no more blocks than are needed to keep everything
            sixteens = [make_plan_half(B, P, C, width, itemsize, team, limit, multiprocessors, cluster)
                        for team in TEAMS]
            if any(sixteens):
                plans += sixteens
                break
    return min((p for p in plans if p is not None), key=lambda p: p.ns, default=None)


def version_2_estimate(B, P, C, itemsize, backward):
    """Nanoseconds of version 2: its launches wait for each other, and x (and dy) is read twice."""
    launches, passes = (4, 5) if backward else (3, 3)
    return launches * VERSION_2_LAUNCH + passes * B * P * C * itemsize / VERSION_2_MEMORY


def plan_for(x, width, backward):
    """`choose_plan` for an array or a `Pair`, None too where version 3 does not exist."""
    first, _, seam = parts_of(x)
    B, C = x.shape[0], x.shape[-1]
    if (C % VECTOR or seam % VECTOR or not (is_half(x.dtype) or x.dtype == np.float32) or x.size >= B << 31
            or not supports(first, groupnorm_forward_kernel_v3)):
        return None
    return choose_plan(assumed(B), x.size // (B * C), C, width, x.dtype.itemsize, backward, shared_limit(first),
                       multiprocessors_of(first),
                       supports(first, groupnorm_backward_clusters))
