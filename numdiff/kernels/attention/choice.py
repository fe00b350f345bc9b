"""Which tiles, chunks of keys and version flash attention takes: the lowest of estimated times.

THE MODEL, in ns
    start + rounds · time of a block (+ a second pass, where partial sums of dq are added up)
    A multiprocessor has one block at a time, or two of four warps. Two take two shares of its time;
    one alone is slowed down by its own waits, and takes ALONE shares. Rounds count shares.
    forward    a block has 64 or 128 queries and meets all keys
    backward   a block has the tiles of keys of one chunk, one after the other, and meets all queries.
               From the second tile on it reads the partial sums of dq, and adds to them: AGAIN.
               So one tile a chunk is best, as long as memory has room for a dq of each chunk
SOURCE
    the project's own; the constants were fitted to the times of all candidates of some 45 drawn
    problems on an H200, as itself and as capability 8.0 (benchmark/scripts/choices.py).
READ NEXT
    launcher.py
"""

import functools
import math
from typing import NamedTuple

LARGEST_CHUNKS = 16  # of keys: a chunk has a dq of its own
LARGEST_PARTS = 1 << 30  # bytes of all of them, at most, where there are several


class ForwardTile(NamedTuple):
    """rate: FLOPs a ns of a multiprocessor, at_once: blocks that it has, alone: shares of its time
    that one alone takes; wide: channels' worth of time of a head in addition to its channels"""

    queries: int
    keys: int
    rate: float
    at_once: int
    alone: float
    wide: float
    start: float
    each: float  # ns of a block in addition


FORWARD = {
    "hopper": ForwardTile(128, 128, 5430.0, 1, 1.0, 43.0, 4600.0, 565.0),
    64: ForwardTile(64, 64, 2790.0, 2, 1.05, 51.0, 3000.0, 0.0),
    128: ForwardTile(128, 64, 3280.0, 2, 1.18, 51.0, 3000.0, 0.0),
}


class BackwardTile(NamedTuple):
    """As `ForwardTile`."""

    keys: int
    rate: float
    at_once: int
    alone: float
    start: float


# version 3's by (fragments of keys a warp, warps)
BACKWARD = {
    "hopper": BackwardTile(256, 3040.0, 1, 1.0, 4900.0),
    (1, 4): BackwardTile(64, 1340.0, 2, 1.18, 3400.0),
    (2, 4): BackwardTile(128, 1770.0, 2, 1.24, 3400.0),
    (1, 8): BackwardTile(128, 1660.0, 1, 1.0, 3400.0),
    (2, 8): BackwardTile(256, 2250.0, 1, 1.0, 3400.0),
}
SINGLE_RATE = 300.0  # of float32


def single_tile(keys, warps):
    """The `BackwardTile` of an extension's kernel for float32."""
    at_once = max(1, 8 // warps)
    return BackwardTile(keys, SINGLE_RATE, at_once, 1.0 if at_once == 1 else 1.2, 3000.0)


BACKWARD_QUERIES, BACKWARD_WIDE = 64, 11.0  # of a tile; as `wide`
AGAIN = 1.37  # time of a chunk's further tiles of keys, of that of its first
SECOND_PASS = 1000.0  # ns


def shares(blocks, tile, multiprocessors):
    """Shares of a multiprocessor's time that `blocks` blocks take, the longest line of them."""
    full, rest = divmod(blocks, multiprocessors * tile.at_once)
    last = max(-(-rest // multiprocessors), tile.alone) if rest else 0
    return full * tile.at_once + last


def forward_ns(tile, batch, T, HS, multiprocessors):
    """Nanoseconds of the forward of `batch` heads of all images."""
    blocks = batch * -(-T // tile.queries)
    keys = -(-T // tile.keys) * tile.keys
    block = 4 * tile.queries * keys * (HS + tile.wide) / tile.rate + tile.each
    return tile.start + shares(blocks, tile, multiprocessors) * block


def backward_ns(tile, chunks, batch, T, HS, multiprocessors):
    """Nanoseconds of the backward in this many chunks of keys."""
    tiles = -(-T // tile.keys)
    chunk_tiles = -(-tiles // chunks)
    queries = -(-T // BACKWARD_QUERIES) * BACKWARD_QUERIES
    first = 10 * tile.keys * queries * (HS + BACKWARD_WIDE) / tile.rate
    block = first * (1 + AGAIN * (chunk_tiles - 1))
    apart = SECOND_PASS if chunks * chunk_tiles > 1 else 0
    return tile.start + shares(batch * chunks, tile, multiprocessors) * block + apart


def choose_queries(batch, T, HS, multiprocessors):
    """64 or 128 queries a block of version 3's forward."""
    return min((128, 64), key=lambda n: forward_ns(FORWARD[n], batch, T, HS, multiprocessors))


@functools.lru_cache(maxsize=4096)
def choose_chunks(batch, T, HS, multiprocessors, tile):
    """(chunks of keys, tiles a chunk, ns) of the backward; tile: a `BackwardTile`."""
    tiles = -(-T // tile.keys)
    room = max(1, LARGEST_PARTS // (4 * batch * T * HS))  # of `batch` heads of all images
    counts = range(1, min(tiles, LARGEST_CHUNKS, room) + 1)
    chunks = min(counts, key=lambda n: backward_ns(tile, n, batch, T, HS, multiprocessors))
    chunk_tiles = -(-tiles // chunks)
    chunks = -(-tiles // chunk_tiles)
    return chunks, chunk_tiles, backward_ns(tile, chunks, batch, T, HS, multiprocessors)


def choose_tile(fit, batch, T, HS, multiprocessors):
    """(fragments of keys a warp, warps) of version 3's backward, of those in `fit`."""
    return min(
        fit, key=lambda tile: choose_chunks(batch, T, HS, multiprocessors, BACKWARD[tile])[2]
    )


def hopper_pays_forward(batch, T, HS, multiprocessors):
    """Whether version 5's forward is estimated to take less time than version 3's."""
    return forward_ns(FORWARD["hopper"], batch, T, HS, multiprocessors) < min(
        forward_ns(FORWARD[n], batch, T, HS, multiprocessors) for n in (64, 128)
    )


def hopper_pays_backward(fit, batch, T, HS, multiprocessors):
    """The same of the backward; fit: version 3's tiles that find shared memory."""
    by_hopper = choose_chunks(batch, T, HS, multiprocessors, BACKWARD["hopper"])[2]
    by_mma = (choose_chunks(batch, T, HS, multiprocessors, BACKWARD[tile])[2] for tile in fit)
    return by_hopper < min(by_mma, default=math.inf)
