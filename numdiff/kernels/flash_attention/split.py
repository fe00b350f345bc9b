"""Float32 on the tensor cores: each number in two halves of its digits, each product as three (3×TF32).

WHAT IT DOES
    A tensor core multiplies tf32: float32 with 11 digits instead of 24. But x = h + l, where h is x cut off to 11
    digits and l what is left, cut off to the next 11, and
        a·b = h_a·h_b + h_a·l_b + l_a·h_b + l_a·l_b
    of which the last is below 2⁻²² of the first and is left out. Products of tf32 are exact in float32, so the error is
    2⁻²¹ or so of a product, like that of a sum in float32. Two instructions split a number, and three mma of 1024
    multiply-adds stand for what the other units do in 32 instructions of 32.
FRAGMENTS OF 32 BITS
    A row of a tile has HS + 4 numbers, an odd number of chunks of 16 bytes. Along a row ldmatrix serves numbers of 32
    bits as it serves pairs of 16: the addresses `by_row` and `by_chunk` of fragments.py. It cannot turn them round; so
    a tile that is summed over its rows is read number by number (`lane_place`), rows 2x and 2x + 1 (x = l % 4, l the
    lane) of every eight: the 32 lanes then meet 32 banks.
    These are also the columns of which a lane has the sums of an m16n8. A product does not care which row is called
    which, as long as both sides agree: with rows 2x and 2x + 1 as its k = x and x + 4, a fragment of sums is the left
    side of the next product as it is (`left_of_sums`).
SUMS
    A tensor core cuts its sums off instead of rounding them. Over thousands of terms that adds up to more than float32
    may lose; so it sums tile by tile, and the tiles' sums are added outside (`add_sums`), rounded.
SOURCE
    Markidis et al. 2018, "NVIDIA Tensor Core Programmability, Performance & Precision", arXiv:1803.04014, section V;
    Ootomo and Yokota 2022, "Recovering single precision accuracy from Tensor Cores", arXiv:2203.03341; PTX ISA, section
    9.7.14.5.
READ NEXT
    forward_split.py
"""
from ...device import cuda, int32, uint32
from ...device.async_copy import cp_async_16_zfill
from ...device.tensor_core import (
    float_of,
    ldmatrix_x4,
    load_word,
    mma_m16n8k8_tf32_into,
    word_of,
)
from .fragments import CHUNK, four_neighbours, write_four

FLOATS = 4  # in a chunk
HIGH = uint32(0xFFFFE000)  # sign, exponent and the ten bits of fraction that tf32 has


def pitch_of(HS):
    """Bytes from a row of a tile to the next: an odd number of chunks."""
    return 4 * (HS + FLOATS)


@cuda.jit(device=True, forceinline=True)
def fetch_rows(tile, pitch, x, start, step, exist, rows, HS, t, threads):
    """`fetch_rows` of fragments.py for float32; chunks 16 and 17 of HS 72 come after the others."""
    chunks = int32(HS // 32 * 8)
    apart = int32(threads // chunks)
    row, chunk = int32(t // chunks), int32(t % chunks)
    to = tile + int32(row * pitch + chunk * CHUNK)
    at = start + int32(row * step + chunk * FLOATS)
    for i in range(rows // apart):
        cp_async_16_zfill(to + int32(i * apart * pitch), x, at + int32(i * apart * step),
                          int32(CHUNK) if row + i * apart < exist else int32(0))
    if HS % 32:
        for i in range((2 * rows + threads - 1) // threads):
            row, chunk = int32((t + i * threads) // 2), int32(chunks + t % 2)
            if row < rows:
                cp_async_16_zfill(tile + int32(row * pitch + chunk * CHUNK), x,
                                  start + int32(row * step + chunk * FLOATS),
                                  int32(CHUNK) if row < exist else int32(0))


@cuda.jit(device=True, forceinline=True)
def lane_place(lane, pitch):
    """Byte, from the start of eight rows, of row 2x and the lane's column of a fragment of eight columns."""
    return lane % 4 * 2 * pitch + lane // 4 * 4


@cuda.jit(device=True, forceinline=True)
def split(x):
    """(h, l) of x, as words of tf32; of l the tensor core itself cuts off the rest."""
    high = uint32(word_of(x) & HIGH)
    return high, word_of(x - float_of(high))


@cuda.jit(device=True, forceinline=True)
def split_left(x0, x1, x2, x3):
    """A left side's four numbers as two fragments."""
    h0, l0 = split(x0)
    h1, l1 = split(x1)
    h2, l2 = split(x2)
    h3, l3 = split(x3)
    return (h0, h1, h2, h3), (l0, l1, l2, l3)


@cuda.jit(device=True, forceinline=True)
def load_left(address):
    """16 rows and 8 columns of a tile, from address (with the lane's `by_row`), split."""
    w = ldmatrix_x4(address)
    return split_left(float_of(w[0]), float_of(w[1]), float_of(w[2]), float_of(w[3]))


@cuda.jit(device=True, forceinline=True)
def left_of_sums(sums, first):
    """A fragment of sums as a left side, split: its columns 2x and 2x + 1 are k = x and x + 4."""
    return split_left(sums[first], sums[first + 2], sums[first + 1], sums[first + 3])


@cuda.jit(device=True, forceinline=True)
def split_right(x0, x1):
    h0, l0 = split(x0)
    h1, l1 = split(x1)
    return (h0, h1), (l0, l1)


@cuda.jit(device=True, forceinline=True)
def multiply_rows(sums, N, left, right, pitch, HS):
    """sums[0 … N − 1] += 16 rows of a tile · (8·N rows of another)ᵀ, summed over HS columns.

    left: address of the first row, and the lane's `by_row`; right: the same, and the lane's `by_chunk`
    """
    for s in range(HS // 8):
        a_high, a_low = load_left(left + int32(s * 32))
        for n in range(0, N, 2):
            w = ldmatrix_x4(right + int32(n * 8 * pitch + s * 32))
            b_high, b_low = split_right(float_of(w[0]), float_of(w[1]))
            d_high, d_low = split_right(float_of(w[2]), float_of(w[3]))
            mma_m16n8k8_tf32_into(sums, 4 * n, a_low, b_high)
            mma_m16n8k8_tf32_into(sums, 4 * n + 4, a_low, d_high)
            mma_m16n8k8_tf32_into(sums, 4 * n, a_high, b_low)
            mma_m16n8k8_tf32_into(sums, 4 * n + 4, a_high, d_low)
            mma_m16n8k8_tf32_into(sums, 4 * n, a_high, b_high)
            mma_m16n8k8_tf32_into(sums, 4 * n + 4, a_high, d_high)


@cuda.jit(device=True, forceinline=True)
def add_products(sums, first, N, a_high, a_low, shared, at, pitch):
    """sums[first … first + N − 1] += left · (8 rows of a tile): 8·N columns, the rows are what is summed over.

    at: byte of the first row and column in shared memory, and the lane's `lane_place`
    """
    for n in range(N):
        x0, x1 = float_of(load_word(shared, at + n * 32)), float_of(load_word(shared, at + (n * 32 + pitch)))
        b_high, b_low = split_right(x0, x1)
        i = 4 * (first + n)
        mma_m16n8k8_tf32_into(sums, i, a_low, b_high)
        mma_m16n8k8_tf32_into(sums, i, a_high, b_low)
        mma_m16n8k8_tf32_into(sums, i, a_high, b_high)


@cuda.jit(device=True, forceinline=True)
def add_sums(total, sums, count):
    """A tile's sums onto those of the tiles before."""
    for i in range(count):
        total[i] += sums[i]


@cuda.jit(device=True, forceinline=True)
def write_rows(out, at, step, exist, sums, N, f, f_below, lane):
    """A warp's 16 rows of N fragments, times f (f_below: the eight rows below), to out[at], rows `step` apart."""
    row = int32(lane // 4 + lane % 2 * 8)
    at += int32(row * step + lane % 4 // 2 * 4)
    if lane % 2:
        f = f_below
    for n in range(N):
        v = four_neighbours(sums[4 * n], sums[4 * n + 1], sums[4 * n + 2], sums[4 * n + 3], lane)
        write_four(out, at + 8 * n, v, f, row < exist)
