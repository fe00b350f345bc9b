"""Tiles of 16-bit operands in shared memory for `mma.sync`: swizzled places, and the fragments read
out of them.

A tile is made of chunks of 16 bytes, eight elements, which `cp.async` copies and `ldmatrix` reads.
ldmatrix takes eight chunks at a time, one of each of eight rows. They must fall into the eight
groups of four banks, so chunk c of a row stands at c ^ key, and the key differs in those eight
rows:

    along k     rows of 32 or 64 k, 64 or 128 bytes; eight rows one below the other     key from the row's low bits
    spread      the same for the rows 0, 1, 8, 9, 16, 17, 24, 25 from an even row on    key from bits 0, 3 and 4
    across      a row for each k, of 64 columns or more                                 key k % 8

SPREAD COLUMNS
    A lane of an m16n8k16 has two neighbouring columns of each product. B's rows (columns of C) may
    be taken in any
    order: column n of product j is row 8 · (n // 2) + 2 · j + n % 2 here. So a lane has 8
    neighbouring columns of four products, 16 bytes of float16, and writes them at once. Of a B with
    rows across k `eight_of_four` does the same by shuffles, once a tile.

SOURCE  PTX ISA, section 9.7.14.5 (`ldmatrix`, `mma`).
"""

from .gpu import cuda
from .intrinsics import int32
from .limits import FULL_MASK
from .tensor_core import ldmatrix_x4, ldmatrix_x4_trans

# Places: bytes from the start of a tile; row_bytes is known when a kernel is compiled -------------


@cuda.jit(device=True, forceinline=True)
def place_along_k(row, chunk, row_bytes):
    if row_bytes == 128:
        return int32(row * 128 + ((chunk ^ (row & 7)) << 4))
    return int32(row * 64 + ((chunk ^ (row >> 1 & 3)) << 4))


@cuda.jit(device=True, forceinline=True)
def place_spread(row, chunk, row_bytes):
    if row_bytes == 128:
        return int32(row * 128 + ((chunk ^ (row & 1 | row >> 2 & 6)) << 4))
    return int32(row * 64 + ((chunk ^ (row >> 3 & 3)) << 4))


@cuda.jit(device=True, forceinline=True)
def place_across(k, chunk, row_bytes):
    return int32(k * row_bytes + ((chunk ^ (k & 7)) << 4))


# Where a lane reads: of a warp's first fragment, at the first 16 of k -----------------------------


@cuda.jit(device=True, forceinline=True)
def a_along_k(row, step, lane, row_bytes):
    """The place for the fragment of A at `row` and its k 16 · step …; 16 rows further it is 16 ·
    row_bytes more."""
    return place_along_k(int32(row + lane % 16), int32(2 * step + lane // 16), row_bytes)


@cuda.jit(device=True, forceinline=True)
def a_across(row, lane, row_bytes):
    """The same for a tile with a row for each k; 16 of k further it is 16 · row_bytes more."""
    return place_across(
        int32(lane % 8 + lane // 16 * 8), int32((row >> 3) + lane // 8 % 2), row_bytes
    )


@cuda.jit(device=True, forceinline=True)
def b_spread(column, pair, step, lane, row_bytes):
    """The place for products 2 · pair and the next of the four at `column`, spread; 32 columns
    further it is 32 · row_bytes more."""
    row = int32(column + 8 * (lane % 8 // 2) + lane % 2 + 2 * (2 * pair + lane // 16))
    return place_spread(row, int32(2 * step + lane // 8 % 2), row_bytes)


@cuda.jit(device=True, forceinline=True)
def b_across(column, lane, row_bytes):
    """The place for two products at `column`; 16 of k further it is 16 · row_bytes more."""
    return place_across(
        int32(lane % 8 + lane // 8 % 2 * 8), int32((column >> 3) + lane // 16), row_bytes
    )


# Accumulators as rows -----------------------------------------------------------------------------


@cuda.jit(device=True, forceinline=True)
def exchange_pairs(low0, low1, high0, high1, bit, lane):
    """One step of a transposition among lanes: a lane without `bit` keeps `low` and gets its
    partner's `low` as `high`; a lane with it keeps `high` and gets its partner's `high` as `low`.
    """
    has = lane & bit != 0
    got0 = cuda.shfl_xor_sync(FULL_MASK, low0 if has else high0, bit)
    got1 = cuda.shfl_xor_sync(FULL_MASK, low1 if has else high1, bit)
    if has:
        return got0, got1, high0, high1
    return low0, low1, got0, got1


@cuda.jit(device=True, forceinline=True)
def eight_of_four(acc, s, lane, spread):
    """Eight neighbouring columns of one of a lane's rows, of the four products whose accumulators
    begin at s, s + 4, s + 8 and s + 12: columns 8 · (lane % 4) … of the 32. spread: whether B's
    columns were spread."""
    a0, a1, b0, b1 = acc[s], acc[s + 1], acc[s + 4], acc[s + 5]
    c0, c1, d0, d1 = acc[s + 8], acc[s + 9], acc[s + 12], acc[s + 13]
    if not spread:
        a0, a1, b0, b1 = exchange_pairs(a0, a1, b0, b1, 1, lane)
        c0, c1, d0, d1 = exchange_pairs(c0, c1, d0, d1, 1, lane)
        a0, a1, c0, c1 = exchange_pairs(a0, a1, c0, c1, 2, lane)
        b0, b1, d0, d1 = exchange_pairs(b0, b1, d0, d1, 2, lane)
    return a0, a1, b0, b1, c0, c1, d0, d1


# Fragments ----------------------------------------------------------------------------------------


@cuda.jit(device=True, forceinline=True)
def fragment(address, across):
    """Four words of each lane: an A, or two Bs."""
    if across:
        return ldmatrix_x4_trans(address)
    return ldmatrix_x4(address)
