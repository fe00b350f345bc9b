"""Float32 on the tensor cores: tf32 for what counts most, bfloat16 for what it leaves out.

WHAT IT DOES
    A tensor core multiplies tf32: float32 with 10 mantissa bits instead of 23. But x = h + l, where
    h is x cut off to 10 mantissa bits, as the tensor core itself does it, and l what is left, below
    2⁻¹⁰ of x. Then
        a·b = h_a·h_b + (l_a·b + a·l_b) − l_a·l_b
    of which the last is below 2⁻²⁰ of the first and is left out. For the two in the middle bfloat16
    is enough: 7 mantissa bits, with the range of float32. Their rounding costs some 2⁻¹⁹ of a
    product, now up, now down.
    An mma of bfloat16 is 16 deep and takes as long as one of tf32 that is 8 deep. So l and x of
    eight columns of the left side are side by side in one fragment, x and l of the right side in
    another, and one mma does both: two mma stand for what the other units do in 32 instructions,
    where tf32 alone (3×TF32) takes three.
FRAGMENTS OF 32 BITS
    A row of a tile has HS + 4 numbers, an odd number of chunks of 16 bytes. Along a row ldmatrix
    serves numbers of 32 bits as it serves pairs of 16: the addresses `by_row` and `by_chunk` of
    kernels/attention/fragments.py. It cannot turn them round; so a tile that is summed over its rows is read number
    by number (`lane_place`), rows 2x and 2x + 1 (x = l % 4, l the lane) of every eight: the 32
    lanes then meet 32 banks.
    These are also the columns of which a lane has the accumulators of an m16n8. A product does not
    care which row is called which, as long as both sides agree: with rows 2x and 2x + 1 as its k =
    x and x + 4, a fragment is the left side of the next product as it is (`left_of_accumulators`).
    Likewise k = x and x + 4 of tf32, which a lane has, are neighbours in a word of bfloat16.
ROUNDING
    A tensor core cuts its sums off instead of rounding them. Over thousands of terms that adds up
    to more than float32 may lose; so it sums tile by tile, and the tiles' sums are added outside
    (`add_accumulators`), rounded.
SOURCE
    Markidis et al. 2018, "NVIDIA Tensor Core Programmability, Performance & Precision",
    arXiv:1803.04014, section V; Ootomo and Yokota 2022, "Recovering single precision accuracy from
    Tensor Cores", arXiv:2203.03341; Henry, Tang and Heinecke 2019, "Leveraging the bfloat16
    Artificial Intelligence Datatype For Higher-Precision Computations", arXiv:1904.06376; PTX ISA,
    section 9.7.14.5.
READ NEXT
    forward.py
"""

from ....device import cuda, int32, opaque, uint32
from ....device.async_copy import cp_async_16_zfill
from ....device.bfloat16 import mma_m16n8k16_bf16, pack_bfloat2
from ....device.tensor_core import float_of, ldmatrix_x4, load_word, mma_m16n8k8_tf32_into, word_of
from ....kernels.attention.fragments import CHUNK, four_neighbours, write_four

FLOATS = 4  # in a chunk
HIGH = uint32(0xFFFFE000)  # sign, exponent and the ten mantissa bits that tf32 has


def pitch_of(HS):
    """Bytes from a row of a tile to the next: an odd number of chunks."""
    return 4 * (HS + FLOATS)


@cuda.jit(device=True, forceinline=True)
def opaque_thread(t):
    """`opaque` without a sign: divisions by powers of two are then one instruction each, and not
    six."""
    return uint32(opaque(t))


@cuda.jit(device=True, forceinline=True)
def fetch_rows(tile, pitch, x, start, step, exist, rows, HS, t, threads):
    """`fetch_rows` of fragments.py for float32; chunks 16 and 17 of HS 72 come after the others."""
    exist = int32(exist)
    chunks = int32(HS // 32 * 8)
    apart = int32(threads // chunks)
    row, chunk = int32(t // chunks), int32(t % chunks)
    to = tile + int32(row * pitch + chunk * CHUNK)
    at = start + int32(row * step + chunk * FLOATS)
    for i in range(rows // apart):
        cp_async_16_zfill(
            to + int32(i * apart * pitch),
            x,
            at + int32(i * apart * step),
            int32(CHUNK) if int32(row + i * apart) < exist else int32(0),
        )
    if HS % 32:
        for i in range((2 * rows + threads - 1) // threads):
            row, chunk = int32((t + i * threads) // 2), int32(chunks + t % 2)
            if row < rows:
                cp_async_16_zfill(
                    tile + int32(row * pitch + chunk * CHUNK),
                    x,
                    start + int32(row * step + chunk * FLOATS),
                    int32(CHUNK) if row < exist else int32(0),
                )


@cuda.jit(device=True, forceinline=True)
def lane_place(lane, pitch):
    """Byte, from the start of eight rows, of row 2x and the lane's column of a fragment of eight
    columns."""
    return lane % 4 * 2 * pitch + lane // 4 * 4


@cuda.jit(device=True, forceinline=True)
def low(x):
    """The part of x that tf32 truncates."""
    return x - float_of(uint32(word_of(x) & HIGH))


@cuda.jit(device=True, forceinline=True)
def split_left(x0, x1, x2, x3):
    """A left side's four numbers as a fragment of tf32 and one of bfloat16: l, then x."""
    return (
        (word_of(x0), word_of(x1), word_of(x2), word_of(x3)),
        (
            pack_bfloat2(low(x0), low(x2)),
            pack_bfloat2(low(x1), low(x3)),
            pack_bfloat2(x0, x2),
            pack_bfloat2(x1, x3),
        ),
    )


@cuda.jit(device=True, forceinline=True)
def split_right(x0, x1):
    """A right side's two numbers likewise: x, then l."""
    return (word_of(x0), word_of(x1)), (pack_bfloat2(x0, x1), pack_bfloat2(low(x0), low(x1)))


@cuda.jit(device=True, forceinline=True)
def multiply(accumulators, i, a, a_both, b, b_both):
    """accumulators[i … i + 3] += left · right, of eight columns and rows."""
    accumulators[i], accumulators[i + 1], accumulators[i + 2], accumulators[i + 3] = (
        mma_m16n8k16_bf16(
            a_both,
            b_both,
            (accumulators[i], accumulators[i + 1], accumulators[i + 2], accumulators[i + 3]),
        )
    )
    mma_m16n8k8_tf32_into(accumulators, i, a, b)


@cuda.jit(device=True, forceinline=True)
def load_left(address):
    """16 rows and 8 columns of a tile, from address (with the lane's `by_row`), as `split_left`
    gives them."""
    w = ldmatrix_x4(address)
    return split_left(float_of(w[0]), float_of(w[1]), float_of(w[2]), float_of(w[3]))


@cuda.jit(device=True, forceinline=True)
def left_of_accumulators(accumulators, first):
    """A fragment of accumulators as a left side: its columns 2x and 2x + 1 are k = x and x + 4."""
    return split_left(
        accumulators[first],
        accumulators[first + 2],
        accumulators[first + 1],
        accumulators[first + 3],
    )


@cuda.jit(device=True, forceinline=True)
def multiply_rows(accumulators, N, left, right, pitch, HS):
    """accumulators[0 … N − 1] += 16 rows of a tile · (8·N rows of another)ᵀ, summed over HS
    columns.

    left: address of the first row, and the lane's `by_row`; right: the same, and the lane's
    `by_chunk`
    """
    # fragments of the left side between two jumps, so that many loads are under way
    TURN = 3 if HS == 72 else 4
    for turn in range(0, HS // 8, TURN):
        for s in range(turn, turn + TURN):
            a, a_both = load_left(left + int32(s * 32))
            for n in range(0, N, 2):
                w = ldmatrix_x4(right + int32(n * 8 * pitch + s * 32))
                b, b_both = split_right(float_of(w[0]), float_of(w[1]))
                multiply(accumulators, 4 * n, a, a_both, b, b_both)
                b, b_both = split_right(float_of(w[2]), float_of(w[3]))
                multiply(accumulators, 4 * n + 4, a, a_both, b, b_both)


@cuda.jit(device=True, forceinline=True)
def add_products(accumulators, first, N, a, a_both, shared, at, pitch):
    """accumulators[first … first + N − 1] += left · (8 rows of a tile): 8·N columns, the rows are
    what is summed over.

    at: byte of the first row and column in shared memory, and the lane's `lane_place`
    """
    for n in range(N):
        x0, x1 = (
            float_of(load_word(shared, at + n * 32)),
            float_of(load_word(shared, at + (n * 32 + pitch))),
        )
        b, b_both = split_right(x0, x1)
        multiply(accumulators, 4 * (first + n), a, a_both, b, b_both)


@cuda.jit(device=True, forceinline=True)
def add_accumulators(total, accumulators, count):
    """A tile's accumulators onto those of the tiles before."""
    for i in range(count):
        total[i] += accumulators[i]


@cuda.jit(device=True, forceinline=True)
def write_rows(out, at, step, exist, accumulators, N, f, f_below, lane):
    """A warp's 16 rows of N fragments, times f (f_below: the eight rows below), to out[at], rows
    `step` apart."""
    row = int32(lane // 4 + lane % 2 * 8)
    at += int32(row * step + lane % 4 // 2 * 4)
    if lane % 2:
        f = f_below
    for n in range(N):
        v = four_neighbours(accumulators, 4 * n, lane)
        write_four(out, at + 8 * n, v, f, row < exist)
