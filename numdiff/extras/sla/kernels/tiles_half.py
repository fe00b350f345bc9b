"""The common part of the float16 rungs: features of fragments, products along a tile's rows, and
totals minus what is listed.

A block of 4 warps has 64 rows, a warp 16 of them; tiles and fragments are those of ../fragments.py.
ACCUMULATORS
    as everywhere in this folder: of fragment n, 16 rows by 8 columns, a lane has in [4n], [4n + 1]
    two neighbours of row l / 4, columns 8n + 2 (l % 4), and in [4n + 2], [4n + 3] those of the row
    8 below. A row is in four lanes.
HEADS OF 72
    are eight fragments of 8 columns and a ninth. Along a row, 64 of it make four products of 16
    deep, the rest one of 8, as in ../fragments.py; no zeros are stored. The same where a sum is
    over the 72 rows of a square: S, W or R. Where a result has 72 rows, H, A and dW, a warp has 16
    of the first 64, and of the last eight, the tail, two or three fragments, whose other eight rows
    are zeros.
FEATURES
    A row's maximum and sum take two shuffles each; `features` leaves the accumulators as
    exponentials, and gives what they have to be multiplied by.
WHAT IS LEFT OF A TOTAL
    HS² numbers in float32, some eights a thread (of 72² five, and two numbers more in a thread of
    the first warp), from which each block of the list is taken away as it passes by in shared
    memory, next to its tiles of keys or queries; the load hides behind the products as theirs do.
    HS numbers, of z or a, go the same way, one a thread.
SOURCE
    reference.py; ../fragments.py.
READ NEXT
    prepare_half.py
"""

from ....device import cuda, float32, int32, load4, uint32
from ....device.async_copy import cp_async_16
from ....device.limits import FULL_MASK, WARP
from ....device.specialise import Constant
from ....device.tensor_core import (
    float_of,
    ldmatrix_x1,
    ldmatrix_x1_trans,
    ldmatrix_x2_trans,
    ldmatrix_x4,
    ldmatrix_x4_trans,
    load_word,
    load_words4,
    mma_m16n8k8_into,
    mma_m16n8k16_into,
    pack_half2,
    store_word,
    store_words4,
    unpack_half2,
)
from ....kernels.attention.forward_half import exponentials, largest_of_row, sum_of_row
from ....kernels.attention.fragments import (
    CHUNK,
    HALVES,
    add_products,
    by_chunk,
    by_row,
    multiply_rows,
    pack,
    pitch_of,
)
from ....kernels.attention.heads import LOG2_E, LOWEST
from .choice import BLOCK

WARPS = 4
THREADS = WARP * WARPS
FLOOR = float32(2.0**-10)  # reference.FLOOR


def tile_bytes(HS):
    """Bytes of 64 rows."""
    return BLOCK * pitch_of(HS)


def square_bytes(HS):
    """Bytes of HS rows."""
    return HS * pitch_of(HS)


def sums_bytes(HS):
    """Bytes of a block's HS² and HS numbers."""
    return 2 * HS * HS + 4 * HS


HS = Constant()  # channels of a head: 32, 64 or 72
PITCH = Constant(lambda HS: pitch_of(HS))
TILE = Constant(lambda HS: tile_bytes(HS))
SQUARE = Constant(lambda HS: square_bytes(HS))
N = Constant(lambda HS: HS // 8)  # fragments side by side in a row
STEPS = Constant(lambda HS: HS // 16)  # of 16 numbers of a sum over a row
NINTH = Constant(lambda HS: HS % 16 > 0)  # whether eight are left
WORDS = Constant(lambda HS: HS // 4)  # of a warp's 16 rows in a lane, packed
NUMBERS = Constant(lambda HS: HS // 2)  # the same as float32
SIZE = Constant(lambda HS: HS * HS)
EIGHTS = Constant(lambda HS: HS * HS // 8 // THREADS)  # of HS² numbers that a thread keeps
REST = Constant(lambda EIGHTS: EIGHTS * 8 * THREADS)  # the first of those that are left
TWOS = Constant(lambda HS, REST: (HS * HS - REST) // 2)  # how many threads have two of them
LEFT = Constant(lambda EIGHTS, TWOS: EIGHTS * 8 + (2 if TWOS else 0))
TAIL = Constant(lambda HS: 12 if HS % 16 else 1)  # numbers of a warp's fragments of the tail


# Rows ---------------------------------------------------------------------------------------------


@cuda.jit(device=True, forceinline=True)
def widen(x, words):
    """Packed fragments as float32."""
    for s in range(STEPS):
        for i in range(4):
            v = unpack_half2(words[4 * s + i])
            x[8 * s + 2 * i], x[8 * s + 2 * i + 1] = v[0], v[1]
    if NINTH:
        for i in range(2):
            v = unpack_half2(words[4 * STEPS + i])
            x[8 * STEPS + 2 * i], x[8 * STEPS + 2 * i + 1] = v[0], v[1]


@cuda.jit(device=True, forceinline=True)
def narrow(words, x):
    """Accumulators as the left side of a product along their rows."""
    for s in range(STEPS):
        pack(words, s, x, 8 * s)
    if NINTH:
        words[4 * STEPS] = pack_half2(x[8 * STEPS], x[8 * STEPS + 1])
        words[4 * STEPS + 1] = pack_half2(x[8 * STEPS + 2], x[8 * STEPS + 3])


@cuda.jit(device=True, forceinline=True)
def features(x):
    """x becomes e^(x − the row's maximum); what makes φ of it, for the upper and the lower rows."""
    m_above, m_below = (
        LOG2_E * largest_of_row(x, N, 0, LOWEST),
        LOG2_E * largest_of_row(x, N, 2, LOWEST),
    )
    above, below = exponentials(x, N, 0, LOG2_E, m_above), exponentials(x, N, 2, LOG2_E, m_below)
    return float32(1) / sum_of_row(above), float32(1) / sum_of_row(below)


@cuda.jit(device=True, forceinline=True)
def scale_rows(x, above, below):
    for n in range(N):
        x[4 * n], x[4 * n + 1] = above * x[4 * n], above * x[4 * n + 1]
        x[4 * n + 2], x[4 * n + 3] = below * x[4 * n + 2], below * x[4 * n + 3]


@cuda.jit(device=True, forceinline=True)
def dot_rows(x, y):
    """x · y of the upper rows and of the lower, in all four lanes of a row."""
    above, below = float32(0), float32(0)
    for n in range(N):
        above += x[4 * n] * y[4 * n] + x[4 * n + 1] * y[4 * n + 1]
        below += x[4 * n + 2] * y[4 * n + 2] + x[4 * n + 3] * y[4 * n + 3]
    return sum_of_row(above), sum_of_row(below)


@cuda.jit(device=True, forceinline=True)
def dot_vector(x, vector, at, lane):
    """x · vector[at …], a float32 array, of the upper rows and of the lower."""
    above, below = float32(0), float32(0)
    for n in range(N):
        c = at + 8 * n + lane % 4 * 2
        above += x[4 * n] * vector[c] + x[4 * n + 1] * vector[c + 1]
        below += x[4 * n + 2] * vector[c] + x[4 * n + 3] * vector[c + 1]
    return sum_of_row(above), sum_of_row(below)


@cuda.jit(device=True, forceinline=True)
def feature_gradient(dphi, phi):
    """The gradient dphi of φ becomes that of the row."""
    above, below = dot_rows(dphi, phi)
    for n in range(N):
        dphi[4 * n] = phi[4 * n] * (dphi[4 * n] - above)
        dphi[4 * n + 1] = phi[4 * n + 1] * (dphi[4 * n + 1] - above)
        dphi[4 * n + 2] = phi[4 * n + 2] * (dphi[4 * n + 2] - below)
        dphi[4 * n + 3] = phi[4 * n + 3] * (dphi[4 * n + 3] - below)


# Tiles --------------------------------------------------------------------------------------------


@cuda.jit(device=True, forceinline=True)
def add_transposed(accumulators, left, right):
    """accumulators += leftᵀ · right, summed over the 64 rows of both tiles: 16 columns of the one,
    HS of the other.

    left: address of the columns, and the lane's `by_chunk`; right: of a tile, and its `by_row`
    """
    for k in range(0, BLOCK, 16):
        a = ldmatrix_x4_trans(left + int32(k * PITCH))
        for n in range(0, N - 1, 2):
            b = ldmatrix_x4_trans(right + int32(k * PITCH + n * CHUNK))
            mma_m16n8k16_into(accumulators, 4 * n, a, (b[0], b[1]))
            mma_m16n8k16_into(accumulators, 4 * n + 4, a, (b[2], b[3]))
        if NINTH:
            b2 = ldmatrix_x2_trans(right + int32(k * PITCH + (N - 1) * CHUNK))
            mma_m16n8k16_into(accumulators, 4 * N - 4, a, b2)


@cuda.jit(device=True, forceinline=True)
def add_tail(accumulators, left, right, warp):
    """…of the left tile's last eight columns: the warp's fragments `warp`, `warp` + 4 and, if it is
    the first, 8.

    left, right: addresses of tiles, and the lane's `by_row`
    """
    for k in range(0, BLOCK, 16):
        a = ldmatrix_x2_trans(left + int32(k * PITCH + (N - 1) * CHUNK))
        for i in range(3):
            n = int32(warp + 4 * i)
            if n < N:
                b = ldmatrix_x2_trans(right + int32(int32(k * PITCH) + n * CHUNK))
                mma_m16n8k16_into(accumulators, 4 * i, (a[0], uint32(0), a[1], uint32(0)), b)


@cuda.jit(device=True, forceinline=True)
def write_tail(accumulators, out, at, lane, warp):
    """The last eight of HS rows from out[at] on, in its type."""
    for i in range(3):
        n = int32(warp + 4 * i)
        if n < N:
            store_word(
                out,
                at + (HS - 8 + lane // 4) * HS + 8 * n + lane % 4 * 2,
                pack_half2(accumulators[4 * i], accumulators[4 * i + 1]),
            )


@cuda.jit(device=True, forceinline=True)
def by_eight(lane):
    """Row l % 8, chunk l / 8: four neighbouring matrices of eight rows."""
    return int32(lane % 8 * PITCH + lane // 8 * CHUNK)


@cuda.jit(device=True, forceinline=True)
def add_four(out, first, a, b):
    """Four fragments from out[first] += 16 × 8 · four matrices of eight rows."""
    mma_m16n8k8_into(out, first, a, b[0])
    mma_m16n8k8_into(out, first + 4, a, b[1])
    mma_m16n8k8_into(out, first + 8, a, b[2])
    mma_m16n8k8_into(out, first + 12, a, b[3])


@cuda.jit(device=True, forceinline=True)
def times_square(out, words, square, lane):
    """out += left · square, summed over its HS rows; square: an address."""
    for s in range(STEPS):
        add_products(
            out,
            (words[4 * s], words[4 * s + 1], words[4 * s + 2], words[4 * s + 3]),
            square + int32(s * 16 * PITCH + by_row(lane, PITCH)),
            1,
            HS,
        )
    if NINTH:
        a, rows = (
            (words[4 * STEPS], words[4 * STEPS + 1]),
            square + int32(STEPS * 16 * PITCH + by_eight(lane)),
        )
        # a loop would not be unrolled, and `out` not be in registers
        add_four(out, 0, a, ldmatrix_x4_trans(rows))
        add_four(out, 16, a, ldmatrix_x4_trans(rows + 4 * CHUNK))
        mma_m16n8k8_into(out, 32, a, ldmatrix_x1_trans(rows + 8 * CHUNK))


@cuda.jit(device=True, forceinline=True)
def times_transposed(out, words, square, lane):
    """out += left · squareᵀ, summed over its columns; square: an address."""
    for n in range(0, N - 1, 2):
        rows = square + int32(n * 8 * PITCH)
        multiply_rows(
            out, n, N, words, rows + by_chunk(lane, PITCH), rows + by_row(lane, PITCH), 1, HS
        )
    if NINTH:
        rows = square + int32((N - 1) * 8 * PITCH + by_eight(lane))
        for s in range(0, STEPS, 2):
            b = ldmatrix_x4(rows + int32(s * 32))
            mma_m16n8k16_into(
                out,
                4 * N - 4,
                (words[4 * s], words[4 * s + 1], words[4 * s + 2], words[4 * s + 3]),
                (b[0], b[1]),
            )
            mma_m16n8k16_into(
                out,
                4 * N - 4,
                (words[4 * s + 4], words[4 * s + 5], words[4 * s + 6], words[4 * s + 7]),
                (b[2], b[3]),
            )
        last = ldmatrix_x1(rows + int32(STEPS * 32))
        mma_m16n8k8_into(out, 4 * N - 4, (words[4 * STEPS], words[4 * STEPS + 1]), last)


@cuda.jit(device=True, forceinline=True)
def fetch_square(tile, x, at, t):
    """Start the copies of HS² numbers from x[at] as a tile of HS rows to an address."""
    for i in range((SIZE // HALVES + THREADS - 1) // THREADS):
        chunk = int32(t + i * THREADS)
        if chunk < SIZE // HALVES:
            cp_async_16(
                tile + int32(chunk // N * PITCH + chunk % N * CHUNK), x, at + chunk * HALVES
            )


@cuda.jit(device=True, forceinline=True)
def half_at(shared, at):
    """A float16 of shared memory; at: its byte."""
    pair = unpack_half2(load_word(shared, at & ~3))
    return pair[1] if at & 2 else pair[0]


@cuda.jit(device=True, forceinline=True)
def sum_run(shared, tile, run, column):
    """The sums of two neighbouring columns over 16 rows of a tile, one after the other."""
    a, b = float32(0), float32(0)
    for row in range(16 * run, 16 * run + 16):
        pair = unpack_half2(load_word(shared, tile + row * PITCH + 2 * column))
        a, b = a + pair[0], b + pair[1]
    return a, b


@cuda.jit(device=True, forceinline=True)
def sum_runs(partial, which, shared, tile, lane, warp):
    """partial[which, run, column] of all columns of a tile: a warp has a run."""
    for column in range(2 * lane, HS, 2 * WARP):
        partial[which, warp, column], partial[which, warp, column + 1] = sum_run(
            shared, tile, warp, column
        )


@cuda.jit(device=True, forceinline=True)
def joined(partial, which, column):
    return (partial[which, 0, column] + partial[which, 1, column]) + (
        partial[which, 2, column] + partial[which, 3, column]
    )


# What is left of a total --------------------------------------------------------------------------


@cuda.jit(device=True, forceinline=True)
def fetch_small(to, small, at, t):
    """Start the copy of HS float32 from small[at]."""
    if t < HS // 4:
        cp_async_16(to + int32(t * CHUNK), small, at + 4 * t)


@cuda.jit(device=True, forceinline=True)
def fetch_sums(to, x, at, small, small_at, t):
    """Start the copies of a block's HS² numbers from x[at] and of its HS float32 from
    small[small_at]."""
    for i in range(EIGHTS):
        chunk = int32(t + i * THREADS)
        cp_async_16(to + chunk * CHUNK, x, at + chunk * HALVES)
    if TWOS > 0 and t < TWOS // 4:
        cp_async_16(to + int32(2 * REST + t * CHUNK), x, at + REST + t * HALVES)
    fetch_small(to + 2 * SIZE, small, small_at, t)


@cuda.jit(device=True, forceinline=True)
def load_total(left, total, at, t):
    for i in range(EIGHTS):
        start = at + int32(t + i * THREADS) * HALVES
        for k in range(0, 8, 4):
            v = load4(total, start + k)
            left[8 * i + k], left[8 * i + k + 1], left[8 * i + k + 2], left[8 * i + k + 3] = (
                v[0],
                v[1],
                v[2],
                v[3],
            )
    if TWOS > 0:
        left[8 * EIGHTS], left[8 * EIGHTS + 1] = float32(0), float32(0)
        if t < TWOS:
            left[8 * EIGHTS], left[8 * EIGHTS + 1] = (
                total[at + REST + 2 * t],
                total[at + REST + 2 * t + 1],
            )


@cuda.jit(device=True, forceinline=True)
def take_away(left, shared, at, t):
    """left −= a block's numbers, which `fetch_sums` has brought to byte `at`."""
    for i in range(EIGHTS):
        w = load_words4(shared, at + int32(t + i * THREADS) * CHUNK)
        for k in range(4):
            v = unpack_half2(w[k])
            left[8 * i + 2 * k] -= v[0]
            left[8 * i + 2 * k + 1] -= v[1]
    if TWOS > 0 and t < TWOS:
        v = unpack_half2(load_word(shared, at + int32(2 * REST + 4 * t)))
        left[8 * EIGHTS] -= v[0]
        left[8 * EIGHTS + 1] -= v[1]


@cuda.jit(device=True, forceinline=True)
def small_of(shared, at, t):
    """This thread's of HS float32 at byte `at`."""
    return float_of(load_word(shared, at + int32(4 * t)))


@cuda.jit(device=True, forceinline=True)
def store_left(shared, tile, left, factor, out, out_at, writes, t):
    """factor · left as a tile of HS rows in shared memory, and, if it `writes`, to out[out_at …]."""
    for i in range(EIGHTS):
        chunk = int32(t + i * THREADS)
        a, b = (
            pack_half2(factor * left[8 * i], factor * left[8 * i + 1]),
            pack_half2(factor * left[8 * i + 2], factor * left[8 * i + 3]),
        )
        c, d = (
            pack_half2(factor * left[8 * i + 4], factor * left[8 * i + 5]),
            pack_half2(factor * left[8 * i + 6], factor * left[8 * i + 7]),
        )
        store_words4(shared, tile + chunk // N * PITCH + chunk % N * CHUNK, a, b, c, d)
        if writes:
            store_words4(out, out_at + chunk * HALVES, a, b, c, d)
    if TWOS > 0 and t < TWOS:
        e = int32(REST + 2 * t)
        a = pack_half2(factor * left[8 * EIGHTS], factor * left[8 * EIGHTS + 1])
        store_word(shared, tile + e // HS * PITCH + e % HS * 2, a)
        if writes:
            store_word(out, out_at + e, a)


@cuda.jit(device=True, forceinline=True)
def number_of_row(array, at, row, exists, lane):
    """array[at + row], or 0, which one lane of four reads."""
    value = float32(0)
    if exists and lane % 4 == 0:
        value = array[at + row]
    return cuda.shfl_sync(FULL_MASK, value, lane // 4 * 4)
