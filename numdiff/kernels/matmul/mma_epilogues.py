"""Epilogues of rung 5: what becomes of the accumulators.

A lane has eight neighbouring columns of each of its rows, twice where a warp has 64 columns
(../../device/tiles.py, SPREAD COLUMNS). So whatever an epilogue reads or writes moves in 16 bytes
of float16, four lanes 64 neighbouring bytes.

    plain           alpha · sum + bias; float16, bfloat16 or float32
    adding          the same + a residual, or + what c holds
    GELU            u = sum + bias, if it is kept, and GELU(u)
    GELU'           sum · GELU'(u); and GELU(u) in place of u, where it is wanted again

READ NEXT
    mma_group.py
"""

from ...device import device_inline, float32, int32, int64, uint32
from ...device.eight import load8, store8
from ...device.tiles import eight_of_four
from .hopper.fast_gelu import fast_gelu, fast_gelu_gradient, gelu_and_gradient
from .mma_layout import ADDING, B_ACROSS, COLUMNS, END, GELU, GELU_AGAIN_GRADIENT, PLAIN, ROW_SUMS


@device_inline
def eight_of(x, n):
    """Eight neighbours of an array that need not be aligned."""
    n = uint32(n)  # of an index that may be negative Numba makes two
    return (
        x[n],
        x[n + uint32(1)],
        x[n + uint32(2)],
        x[n + uint32(3)],
        x[n + uint32(4)],
        x[n + uint32(5)],
        x[n + uint32(6)],
        x[n + uint32(7)],
    )


@device_inline
def load_biases(bias, place, epilogue):
    """The biases of a lane's columns: two times eight."""
    z = float32(0)
    first = second = z, z, z, z, z, z, z, z
    if epilogue.has_bias:
        if place.column < place.N:
            first = eight_of(bias, place.column)
        if COLUMNS > 32 and int32(place.column + 32) < place.N:
            second = eight_of(bias, int32(place.column + 32))
    return first, second


@device_inline
def add(v, w):
    """The sums of eight and eight numbers."""
    return (
        v[0] + w[0],
        v[1] + w[1],
        v[2] + w[2],
        v[3] + w[3],
        v[4] + w[4],
        v[5] + w[5],
        v[6] + w[6],
        v[7] + w[7],
    )


@device_inline
def scale_and_add(alpha, v, w):
    return (
        alpha * v[0] + w[0],
        alpha * v[1] + w[1],
        alpha * v[2] + w[2],
        alpha * v[3] + w[3],
        alpha * v[4] + w[4],
        alpha * v[5] + w[5],
        alpha * v[6] + w[6],
        alpha * v[7] + w[7],
    )


@device_inline
def multiply(v, w):
    return (
        v[0] * w[0],
        v[1] * w[1],
        v[2] * w[2],
        v[3] * w[3],
        v[4] * w[4],
        v[5] * w[5],
        v[6] * w[6],
        v[7] * w[7],
    )


@device_inline
def gelu_of_eight(v):
    return (
        fast_gelu(v[0]),
        fast_gelu(v[1]),
        fast_gelu(v[2]),
        fast_gelu(v[3]),
        fast_gelu(v[4]),
        fast_gelu(v[5]),
        fast_gelu(v[6]),
        fast_gelu(v[7]),
    )


@device_inline
def gelu_gradients(u):
    return (
        fast_gelu_gradient(u[0]),
        fast_gelu_gradient(u[1]),
        fast_gelu_gradient(u[2]),
        fast_gelu_gradient(u[3]),
        fast_gelu_gradient(u[4]),
        fast_gelu_gradient(u[5]),
        fast_gelu_gradient(u[6]),
        fast_gelu_gradient(u[7]),
    )


@device_inline
def gelus_and_gradients(u):
    """(GELU, GELU') of eight numbers."""
    y0, s0 = gelu_and_gradient(u[0])
    y1, s1 = gelu_and_gradient(u[1])
    y2, s2 = gelu_and_gradient(u[2])
    y3, s3 = gelu_and_gradient(u[3])
    y4, s4 = gelu_and_gradient(u[4])
    y5, s5 = gelu_and_gradient(u[5])
    y6, s6 = gelu_and_gradient(u[6])
    y7, s7 = gelu_and_gradient(u[7])
    return (y0, y1, y2, y3, y4, y5, y6, y7), (s0, s1, s2, s3, s4, s5, s6, s7)


@device_inline
def load_where(x, at, inside):
    """Eight numbers of an array, zeros where not inside."""
    z = float32(0)
    values = z, z, z, z, z, z, z, z
    if inside:
        values = load8(x, at)
    return values


@device_inline
def finish_eight(sums, s, at, inside, added, bias, arrays, epilogue, lane):
    """Eight outputs; added: a residual, what c held, or the u of GELU'(u)."""
    v = eight_of_four(sums, s, lane, not B_ACROSS)
    if END == PLAIN or END == ADDING:
        v = scale_and_add(epilogue.alpha, v, bias)
        if END == ADDING:
            v = add(v, added)
        if inside:
            store8(arrays.c, at, v)
    elif END == GELU:
        v = add(v, bias)
        if inside:
            if epilogue.keeps_u:
                store8(arrays.c, at, v)
            store8(arrays.other, at, gelu_of_eight(v))
    elif inside:
        if END == GELU_AGAIN_GRADIENT:
            y, slopes = gelus_and_gradients(added)
            store8(arrays.other, at, y)
            store8(arrays.c, at, multiply(v, slopes))
        else:
            store8(arrays.c, at, multiply(v, gelu_gradients(added)))


@device_inline
def finish_rows(sums, i, place, arrays, biases, epilogue, adds, lane):
    """A warp's rows 16 · i …: of each lane two, eight apart. First all loads, then all stores.

    adds: False: with ADDING nothing is added
    """
    m, n, s = int32(place.row + 16 * i), place.column, i * ROW_SUMS
    at = place.start + int64(m) * place.N + n
    below = at + int64(8 * place.N)
    first, second = n < place.N, COLUMNS > 32 and int32(n + 32) < place.N
    upper, lower = m < place.M, int32(m + 8) < place.M
    z = float32(0)
    r0 = r1 = r2 = r3 = z, z, z, z, z, z, z, z
    if END != PLAIN and END != GELU and adds:
        r0 = load_where(arrays.other, at, first and upper)
        r1 = load_where(arrays.other, at + 32, second and upper)
        r2 = load_where(arrays.other, below, first and lower)
        r3 = load_where(arrays.other, below + 32, second and lower)
    finish_eight(sums, s, at, first and upper, r0, biases[0], arrays, epilogue, lane)
    finish_eight(sums, s + 2, below, first and lower, r2, biases[0], arrays, epilogue, lane)
    if COLUMNS > 32:
        finish_eight(sums, s + 16, at + 32, second and upper, r1, biases[1], arrays, epilogue, lane)
        finish_eight(
            sums, s + 18, below + 32, second and lower, r3, biases[1], arrays, epilogue, lane
        )
