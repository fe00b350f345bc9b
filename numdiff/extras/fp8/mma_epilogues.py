"""Epilogues of mma.py: the scales, and activations that the next product of E4M3 reads as bytes.

    write_scaled    the scales, then an epilogue of kernels/matmul/mma_epilogues.py
    write_bytes     GELU, or sum · GELU'(u), rounded to E4M3, and the largest magnitude

A lane has eight neighbouring columns of a row, eight bytes of E4M3, and writes them at once. What
is rounded to E4M3 has been rounded to float16 before, so that the bits are those of a separate pass
(quantise.py). A warp writes its largest magnitude once for 16 rows, by an integer maximum.

SOURCE
    PTX ISA, section 9.7.9.21 (cvt).
READ NEXT
    matmul.py, which has the operations.
"""

from ...device import cuda, device_inline, float32, int32, int64, uint32
from ...device.eight import store8
from ...device.rounded8 import keep_largest, store_rounded8
from ...device.tiles import eight_of_four
from ...kernels.matmul.mma_epilogues import (
    add,
    finish_rows,
    gelu_gradients,
    gelu_of_eight,
    load_where,
    multiply,
)
from ...kernels.matmul.mma_layout import COLUMNS, END, GELU, ROW_SUMS


@device_inline
def scale_rows(sums, i, arrays):
    """The sums of a warp's rows 16 · i …, times both scales."""
    scale = arrays.scale_a[0] * arrays.scale_b[0]
    for j in range(ROW_SUMS):
        sums[i * ROW_SUMS + j] *= scale


@device_inline
def write_scaled(sums, i, place, arrays, biases, epilogue, adds, lane):
    """As `finish_rows`, of sums times the scales."""
    scale_rows(sums, i, arrays)
    finish_rows(sums, i, place, arrays, biases, epilogue, adds, lane)


@device_inline
def write_eight(sums, s, at, inside, u, bias, arrays, epilogue, lane, factor, most):
    """Eight outputs as bytes; the next `most`. u: that of GELU'(u)"""
    v = eight_of_four(sums, s, lane, True)
    if END == GELU:
        v = add(v, bias)
        if inside:
            if epilogue.keeps_u:
                store8(arrays.c, at, v)
            most = store_rounded8(arrays.other, at, gelu_of_eight(v), factor, most)
    elif inside:
        most = store_rounded8(arrays.c, at, multiply(v, gelu_gradients(u)), factor, most)
    return most


@device_inline
def write_bytes(sums, i, place, arrays, biases, epilogue, adds, lane):
    """A warp's rows 16 · i …: of each lane two, eight apart, as bytes."""
    scale_rows(sums, i, arrays)
    m, n, s = int32(place.row + 16 * i), place.column, i * ROW_SUMS
    at = place.start + int64(m) * place.N + n
    below = at + int64(8 * place.N)
    first, second = n < place.N, COLUMNS > 32 and int32(n + 32) < place.N
    upper, lower = m < place.M, int32(m + 8) < place.M
    z, most, factor = float32(0), uint32(0), float32(1) / arrays.scale_c[0]
    r0 = r1 = r2 = r3 = z, z, z, z, z, z, z, z
    if END != GELU:
        r0 = load_where(arrays.other, at, first and upper)
        r1 = load_where(arrays.other, at + 32, second and upper)
        r2 = load_where(arrays.other, below, first and lower)
        r3 = load_where(arrays.other, below + 32, second and lower)
    b0, b1 = biases
    most = write_eight(sums, s, at, first and upper, r0, b0, arrays, epilogue, lane, factor, most)
    most = write_eight(
        sums, s + 2, below, first and lower, r2, b0, arrays, epilogue, lane, factor, most
    )
    if COLUMNS > 32:
        most = write_eight(
            sums, s + 16, at + 32, second and upper, r1, b1, arrays, epilogue, lane, factor, most
        )
        most = write_eight(
            sums, s + 18, below + 32, second and lower, r3, b1, arrays, epilogue, lane, factor, most
        )
    keep_largest(arrays.amax, int32(cuda.blockIdx.x), most, lane)
