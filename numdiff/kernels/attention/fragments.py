"""Tiles of float16 for the tensor cores: how they come into shared memory, leave it, and go back to
memory.

A TILE
    has a row of HS numbers for each token, and 16 bytes or more after it, so that a row begins an
    odd number of chunks (16 bytes) after the one before: the eight rows of an ldmatrix are then in
    eight different groups of four banks, whether they are read along the row or, with `.trans`,
    across. No swizzle is needed, and every fragment is at a constant distance from one of two
    addresses that a lane computes once:
        by_row     row l % 16, chunk l / 16                        A stored (M, K); B stored (K, N), with .trans
        by_chunk   row l % 8 + 8·(l / 16), chunk l / 8 % 2         B stored (N, K); A stored (K, M), with .trans
    l is the lane. For HS 72, 64 of it make four products of 16 deep, the rest one of 8 (m16n8k8).
ACCUMULATORS AS OPERANDS
    Where the accumulators of an m16n8 are, two neighbours of row l / 4 and two of the row 8 below,
    is where an operand A of float16 has its numbers. So the scores, rounded and packed, are the
    left side of the next product.
SOURCE
    PTX ISA, section 9.7.14.5; ../../emulator/fragments.py.
READ NEXT
    forward_half.py
"""

from ...device import cuda, device_inline, float32, int32, int64, store4, uint32
from ...device.async_copy import cp_async_16, cp_async_16_zfill
from ...device.limits import FULL_MASK, WARP
from ...device.tensor_core import (
    ldmatrix_x2,
    ldmatrix_x2_trans,
    ldmatrix_x4,
    ldmatrix_x4_trans,
    load_words4,
    mma_m16n8k8_into,
    mma_m16n8k16_into,
    pack_half2,
    store_word,
    store_words4,
)

CHUNK = 16  # bytes that a thread copies at once
HALVES = 8  # float16 in a chunk


def pitch_of(HS):
    """Bytes from a row of a tile to the next: an odd number of chunks."""
    return CHUNK * (HS // HALVES | 1)


# Into shared memory -------------------------------------------------------------------------------


@device_inline
def fetch_rows(tile, pitch, x, start, step, exist, rows, HS, t, threads):
    """Start this thread's copies of `rows` rows from x[start], `step` apart; zeros for rows from
    `exist` on.

    A thread takes the same chunk of every apart-th row; chunk 8 of HS 72 comes after the others.
    """
    chunks = int32(HS // 16 * 2)
    apart = int32(threads // chunks)
    row, chunk = int32(t // chunks), int32(t % chunks)
    to = uint32(tile + int32(row * pitch + chunk * CHUNK))
    at, apart_step = int64(start + int32(row * step + chunk * HALVES)), int64(int32(apart * step))
    if exist >= rows:
        for i in range(rows // apart):
            cp_async_16(to + uint32(i * apart * pitch), x, at + i * apart_step)
    else:
        for i in range(rows // apart):
            cp_async_16_zfill(
                to + uint32(i * apart * pitch),
                x,
                at + i * apart_step,
                uint32(CHUNK) if row + i * apart < exist else uint32(0),
            )
    if HS % 16:
        for i in range((rows + threads - 1) // threads):
            row = int32(t + i * threads)
            if row < rows:
                cp_async_16_zfill(
                    tile + int32(row * pitch + chunks * CHUNK),
                    x,
                    start + int32(row * step + chunks * HALVES),
                    int32(CHUNK) if row < exist else int32(0),
                )


@device_inline
def by_row(lane, pitch):
    return int32(lane % 16 * pitch + lane // 16 * CHUNK)


@device_inline
def by_chunk(lane, pitch):
    return int32((lane % 8 + lane // 16 * 8) * pitch + lane // 8 % 2 * CHUNK)


# Products -----------------------------------------------------------------------------------------
# M fragments of 16 rows each on the left. Accumulators and fragments are local arrays: every index
# is a constant once the loops are unrolled, so they stay in registers.


@device_inline
def load_left(fragments, tile, M, pitch, HS):
    """The left side of a product along HS: M fragments of every 16 columns, then two words for the
    last 8 of 72.

    tile: address of the first row, and the lane's `by_row`
    """
    STEPS = HS // 16
    for m in range(M):
        for s in range(STEPS):
            a = ldmatrix_x4(tile + int32(m * 16 * pitch + s * 32))
            at = (m * STEPS + s) * 4
            fragments[at], fragments[at + 1], fragments[at + 2], fragments[at + 3] = (
                a[0],
                a[1],
                a[2],
                a[3],
            )
        if HS % 16:
            a2 = ldmatrix_x2(tile + int32(m * 16 * pitch + STEPS * 32))
            fragments[M * STEPS * 4 + 2 * m], fragments[M * STEPS * 4 + 2 * m + 1] = a2[0], a2[1]


@device_inline
def multiply_rows(accumulators, n, N, fragments, rows_chunk, rows_row, M, HS):
    """accumulators[m, n … n + 1] += left · (16 rows of a tile)ᵀ, summed over HS; each m has N
    fragments.

    rows_chunk, rows_row: address of the first of the rows, and the lane's `by_chunk`, or its
    `by_row`
    """
    STEPS = HS // 16
    for s in range(STEPS):
        b = ldmatrix_x4(rows_chunk + int32(s * 32))
        for m in range(M):
            at = (m * STEPS + s) * 4
            a = fragments[at], fragments[at + 1], fragments[at + 2], fragments[at + 3]
            mma_m16n8k16_into(accumulators, (m * N + n) * 4, a, (b[0], b[1]))
            mma_m16n8k16_into(accumulators, (m * N + n + 1) * 4, a, (b[2], b[3]))
    if HS % 16:
        b2 = ldmatrix_x2(rows_row + int32(STEPS * 32))
        for m in range(M):
            a2 = fragments[M * STEPS * 4 + 2 * m], fragments[M * STEPS * 4 + 2 * m + 1]
            mma_m16n8k8_into(accumulators, (m * N + n) * 4, a2, b2[0])
            mma_m16n8k8_into(accumulators, (m * N + n + 1) * 4, a2, b2[1])


@device_inline
def multiply_tiles(accumulators, N, tile, rows_chunk, rows_row, M, pitch, HS):
    """`multiply_rows` with a left side that is loaded as it is needed; tile: as `load_left` takes
    it."""
    STEPS = HS // 16
    for s in range(STEPS):
        b = ldmatrix_x4(rows_chunk + int32(s * 32))
        for m in range(M):
            a = ldmatrix_x4(tile + int32(m * 16 * pitch + s * 32))
            mma_m16n8k16_into(accumulators, m * N * 4, a, (b[0], b[1]))
            mma_m16n8k16_into(accumulators, (m * N + 1) * 4, a, (b[2], b[3]))
    if HS % 16:
        b2 = ldmatrix_x2(rows_row + int32(STEPS * 32))
        for m in range(M):
            a2 = ldmatrix_x2(tile + int32(m * 16 * pitch + STEPS * 32))
            mma_m16n8k8_into(accumulators, m * N * 4, a2, b2[0])
            mma_m16n8k8_into(accumulators, (m * N + 1) * 4, a2, b2[1])


@device_inline
def add_products(accumulators, words, rows_row, M, HS):
    """accumulators[m] += words[4·m …] · (16 rows of a tile): HS columns, the rows are what is
    summed over.

    rows_row: address of the first of the rows, and the lane's `by_row`
    """
    N = HS // 8
    for n in range(0, N - 1, 2):
        b = ldmatrix_x4_trans(rows_row + int32(n * CHUNK))
        for m in range(M):
            a = words[4 * m], words[4 * m + 1], words[4 * m + 2], words[4 * m + 3]
            mma_m16n8k16_into(accumulators, (m * N + n) * 4, a, (b[0], b[1]))
            mma_m16n8k16_into(accumulators, (m * N + n + 1) * 4, a, (b[2], b[3]))
    if N % 2:
        b2 = ldmatrix_x2_trans(rows_row + int32((N - 1) * CHUNK))
        for m in range(M):
            a = words[4 * m], words[4 * m + 1], words[4 * m + 2], words[4 * m + 3]
            mma_m16n8k16_into(accumulators, (m * N + N - 1) * 4, a, b2)


@device_inline
def pack(words, m, accumulators, first):
    """Two neighbouring fragments of accumulators, from accumulators[first], as the left side of the
    next product."""
    words[4 * m] = pack_half2(accumulators[first], accumulators[first + 1])
    words[4 * m + 1] = pack_half2(accumulators[first + 2], accumulators[first + 3])
    words[4 * m + 2] = pack_half2(accumulators[first + 4], accumulators[first + 5])
    words[4 * m + 3] = pack_half2(accumulators[first + 6], accumulators[first + 7])


@device_inline
def clear(accumulators, count):
    for i in range(count):
        accumulators[i] = float32(0)


# Out of registers ---------------------------------------------------------------------------------


@device_inline
def stash(shared, patch, pitch, accumulators, m, N, f, f_below, lane):
    """A warp's 16 rows of N fragments, times f (f_below: the eight rows below), as float16 into
    shared memory."""
    at = int32(patch + lane // 4 * pitch + lane % 4 * 4)
    for n in range(N):
        s = (m * N + n) * 4
        store_word(shared, at + n * CHUNK, pack_half2(f * accumulators[s], f * accumulators[s + 1]))
        store_word(
            shared,
            at + 8 * pitch + n * CHUNK,
            pack_half2(f_below * accumulators[s + 2], f_below * accumulators[s + 3]),
        )


@device_inline
def copy_out(shared, patch, pitch, out, at, step, exist, rows, HS, lane):
    """Copy the warp's stash, 16 bytes a lane, into rows from out[at], `step` apart, as far as they
    exist."""
    chunks = int32(HS // HALVES)
    exist = min(int32(exist), int32(rows))
    for i in range((rows * chunks + WARP - 1) // WARP):
        row, chunk = int32(int32(lane + i * WARP) // chunks), int32(int32(lane + i * WARP) % chunks)
        if row < exist:
            w = load_words4(shared, int32(patch + row * pitch + chunk * CHUNK))
            store_words4(out, at + int32(row * step + chunk * HALVES), *w)


@device_inline
def four_neighbours(accumulators, first, lane):
    """A fragment's accumulators, exchanged by pairs of lanes: even lanes get columns 4·(l % 4 / 2)
    … of row l / 4, odd ones those of the row 8 below."""
    s0, s1, s2, s3 = (
        accumulators[first],
        accumulators[first + 1],
        accumulators[first + 2],
        accumulators[first + 3],
    )
    even = lane & 1 == 0
    got0 = cuda.shfl_xor_sync(FULL_MASK, s2 if even else s0, 1)
    got1 = cuda.shfl_xor_sync(FULL_MASK, s3 if even else s1, 1)
    if even:
        return s0, s1, got0, got1
    return got0, got1, s2, s3


@device_inline
def write_four(out, at, v, f, exists):
    """out[at …] = f · v, rounded to what `out` holds."""
    if exists:
        store4(out, at, f * v[0], f * v[1], f * v[2], f * v[3])
