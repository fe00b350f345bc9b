"""The operations of a warp's threads on tiles in shared memory: patches of 4 × 4 numbers in
registers.

THE PATCH
    Four rows of four sums, a tuple of four tuples: 16 registers. Every product of the attention
    comes down to one of two steps, both over four values of the inner index, so that all that is
    read comes 16 bytes at a time:
        dots       s_ij += Σ_d a_id b_jd     a and b are rows: each 16-byte load brings four d of a row
        combine    o_ic += Σ_p a_ip b_pc     b_p is a row of which the thread owns four columns c
    So no tile is ever transposed: where a product needs the transpose of a matrix, it uses the
    other step.
THE WARP
    32 threads as 4 × 8, (y, x). Along rows a thread owns 4y … 4y+3. Along a head's columns it owns
    4x … 4x+3, then 32+4x … 32+4x+3 where HS is 64 or 72, and 64+x where HS is 72. Which keys it
    owns, `dots` leaves free to choose: x, x+8, x+16 and x+24, so that eight threads read eight
    neighbouring rows.
LANES
    x is lane / 2 % 8, y is lane % 2 + 2 · (lane / 16). Shared memory serves 16-byte loads to half a
    warp at a time, and in one cycle if the half reads at most 128 bytes in different banks and each
    two neighbours (lanes 2i, 2i+1, or lanes apart by 2) want the same 16. With this order both
    kinds of load do: along x eight different addresses for two lanes each, along y two for eight
    lanes each.
THE BANKS
    Rows of a tile are HS + 4 numbers apart. Then neighbouring rows start 4, 4 or 12 banks apart (HS
    32, 64, 72): eight of them are in different banks, and so are rows 4y and 4(y+1).
POSITIONS
    Scores go to shared memory as 16-byte stores: a row's scores for keys x, x+8, x+16, x+24 side by
    side. So position p of a row of scores belongs to key 8 · (p % 4) + p / 4 of its 32, and a loop
    over the positions in order reads the keys' rows in that order (`key_row`).
SOURCE
    Volkov and Demmel, SC 2008 (outer products in registers); 16-byte accesses: PTX ISA, section
    9.7.9.
READ NEXT
    forward.py
"""

from ....device import cuda, float32, int32, load4, store4, uint32

KEYS = 64  # keys of a tile
PAD = 4  # numbers after each row of a tile: see THE BANKS
SCORE_ROW = KEYS + PAD  # from one row of scores to the next


@cuda.jit(device=True)
def lane_place(lane):
    """(y, x) of a lane."""
    return int32((lane & 1) + (lane >> 4) * 2), int32((lane >> 1) & 7)


@cuda.jit(device=True)
def zero_patch():
    zero = float32(0)
    row = (zero, zero, zero, zero)
    return row, row, row, row


# The two steps ------------------------------------------------------------------------------------


@cuda.jit(device=True)
def dot(s, a, b):
    return s + a[0] * b[0] + a[1] * b[1] + a[2] * b[2] + a[3] * b[3]


@cuda.jit(device=True)
def load_rows(shared, at, step):
    """Four numbers of each of four rows, `step` apart."""
    return (
        load4(shared, at),
        load4(shared, at + step),
        load4(shared, at + 2 * step),
        load4(shared, at + 3 * step),
    )


@cuda.jit(device=True)
def dots_of_row(s, a, b):
    return dot(s[0], a, b[0]), dot(s[1], a, b[1]), dot(s[2], a, b[2]), dot(s[3], a, b[3])


@cuda.jit(device=True)
def dots(s, a, b):
    """s_ij + Σ_d a_id b_jd over four d; a and b are four rows each."""
    return (
        dots_of_row(s[0], a[0], b),
        dots_of_row(s[1], a[1], b),
        dots_of_row(s[2], a[2], b),
        dots_of_row(s[3], a[3], b),
    )


@cuda.jit(device=True)
def combine_row(o, a, b):
    return (
        o[0] + a[0] * b[0][0] + a[1] * b[1][0] + a[2] * b[2][0] + a[3] * b[3][0],
        o[1] + a[0] * b[0][1] + a[1] * b[1][1] + a[2] * b[2][1] + a[3] * b[3][1],
        o[2] + a[0] * b[0][2] + a[1] * b[1][2] + a[2] * b[2][2] + a[3] * b[3][2],
        o[3] + a[0] * b[0][3] + a[1] * b[1][3] + a[2] * b[2][3] + a[3] * b[3][3],
    )


@cuda.jit(device=True)
def combine(o, a, b):
    """o_ic + Σ_p a_ip b_pc over four p; a is four rows of four p, b four p of four columns."""
    return (
        combine_row(o[0], a[0], b),
        combine_row(o[1], a[1], b),
        combine_row(o[2], a[2], b),
        combine_row(o[3], a[3], b),
    )


@cuda.jit(device=True)
def transpose(a):
    """Costs nothing: the registers get other names."""
    return (
        (a[0][0], a[1][0], a[2][0], a[3][0]),
        (a[0][1], a[1][1], a[2][1], a[3][1]),
        (a[0][2], a[1][2], a[2][2], a[3][2]),
        (a[0][3], a[1][3], a[2][3], a[3][3]),
    )


@cuda.jit(device=True)
def load_column(shared, at, step):
    """One number of each of four rows, `step` apart (unsigned: no test for an index from the end)."""
    at = uint32(at)
    return (
        shared[at],
        shared[uint32(at + step)],
        shared[uint32(at + 2 * step)],
        shared[uint32(at + 3 * step)],
    )


@cuda.jit(device=True)
def combine_column(o, a, b):
    """o_i + Σ_p a_ip b_p: the ninth column that a thread owns where HS is 72."""
    return dot(o[0], a[0], b), dot(o[1], a[1], b), dot(o[2], a[2], b), dot(o[3], a[3], b)


@cuda.jit(device=True)
def key_row(g):
    """The key of position 4g of a row of scores; positions 4g + 1 … 4g + 3 belong to those 8, 16
    and 24 further on."""
    return int32(g // 8 * 32 + g % 8)


# Scores -------------------------------------------------------------------------------------------


@cuda.jit(device=True)
def store_rows(shared, at, step, s):
    """A patch, its rows `step` apart."""
    store4(shared, at, s[0][0], s[0][1], s[0][2], s[0][3])
    store4(shared, at + step, s[1][0], s[1][1], s[1][2], s[1][3])
    store4(shared, at + 2 * step, s[2][0], s[2][1], s[2][2], s[2][3])
    store4(shared, at + 3 * step, s[3][0], s[3][1], s[3][2], s[3][3])


@cuda.jit(device=True)
def scale_rows(s, f):
    """Row i of a patch times f_i."""
    return (
        (f[0] * s[0][0], f[0] * s[0][1], f[0] * s[0][2], f[0] * s[0][3]),
        (f[1] * s[1][0], f[1] * s[1][1], f[1] * s[1][2], f[1] * s[1][3]),
        (f[2] * s[2][0], f[2] * s[2][1], f[2] * s[2][2], f[2] * s[2][3]),
        (f[3] * s[3][0], f[3] * s[3][1], f[3] * s[3][2], f[3] * s[3][3]),
    )


@cuda.jit(device=True)
def multiply_fours(a, b):
    return a[0] * b[0], a[1] * b[1], a[2] * b[2], a[3] * b[3]


@cuda.jit(device=True)
def store_row(y, at, s, f):
    """f · (four neighbours)."""
    store4(y, at, f * s[0], f * s[1], f * s[2], f * s[3])


# Tiles from memory --------------------------------------------------------------------------------
# Fetching and storing are two functions, for what is fetched can wait in registers while the tile
# before it is used.


@cuda.jit(device=True)
def fetch(x, at, exists):
    """Four neighbours in memory, or zeros."""
    if exists:
        return load4(x, at)
    zero = float32(0)
    return zero, zero, zero, zero


@cuda.jit(device=True)
def fetch_patch(x, at, step, exist, apart):
    """Four numbers of each of four rows `apart` rows from each other; zeros for rows from `exist`
    on."""
    step = int32(step * apart)
    return (
        fetch(x, at, exist > 0),
        fetch(x, at + step, exist > apart),
        fetch(x, at + int32(2 * step), exist > 2 * apart),
        fetch(x, at + int32(3 * step), exist > 3 * apart),
    )


# HS and threads are constants in the kernel that calls: compiled into it, these functions hold only
# what is needed for them. (They are no closures over HS, for Numba finds nothing in its cache on
# disk that closes over other functions.) A thread takes the same four columns of every apart-th row
# of a tile of 64, so its addresses are one base and constant steps; neighbouring threads take
# neighbouring fours, so a warp reads whole lines. Columns 64 … 71 come last.


@cuda.jit(device=True)
def tile_lanes(HS):
    """Threads side by side in a row of a tile, columns 64 … 71 left out."""
    return 16 if HS >= 64 else 8


@cuda.jit(device=True)
def fetch_tile(x, start, step, exist, t, HS, threads):
    """Rows start, start + step … of x, `exist` of them: what store_tile takes."""
    lanes = tile_lanes(HS)
    apart = int32(threads // lanes)
    row, column = int32(t // lanes), int32(t % lanes * 4)
    at = start + int32(row * step + column)
    left = int32(exist - row)
    one = fetch_patch(x, at, step, left, apart)
    two, three, four = zero_patch(), zero_patch(), zero_patch()
    if apart < 16:
        two = fetch_patch(x, at + int32(4 * apart * step), step, left - 4 * apart, apart)
    if apart < 8:
        three = fetch_patch(x, at + int32(8 * apart * step), step, left - 8 * apart, apart)
        four = fetch_patch(x, at + int32(12 * apart * step), step, left - 12 * apart, apart)
    row = int32(t // 2)
    at = start + int32(row * step + 64 + t % 2 * 4)
    last = fetch(x, at, HS == 72 and row < exist)
    last_32 = fetch(x, at + int32(32 * step), HS == 72 and threads == 64 and row + 32 < exist)
    return one, two, three, four, last, last_32


@cuda.jit(device=True)
def store_tile(shared, to, tile, f, t, HS, threads):
    """A tile that fetch_tile gave, times f, to shared[to]."""
    lanes, ROW = tile_lanes(HS), HS + PAD
    apart = int32(threads // lanes)
    at = int32(to + t // lanes * ROW + t % lanes * 4)
    step = int32(apart * ROW)
    factors = (f, f, f, f)
    store_rows(shared, at, step, scale_rows(tile[0], factors))
    if apart < 16:
        store_rows(shared, at + 4 * step, step, scale_rows(tile[1], factors))
    if apart < 8:
        store_rows(shared, at + 8 * step, step, scale_rows(tile[2], factors))
        store_rows(shared, at + 12 * step, step, scale_rows(tile[3], factors))
    at = int32(to + t // 2 * ROW + 64 + t % 2 * 4)
    if HS == 72:
        store_row(shared, at, tile[4], f)
        if threads == 64:
            store_row(shared, at + 32 * ROW, tile[5], f)
