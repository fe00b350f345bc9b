"""Tensor-core and asynchronous-copy intrinsics: twins against NumPy, a whole GEMM, faults planted
in it, PTX, and a GPU."""

import functools

import numpy as np
import pytest

from numdiff.device import cuda, float32, int32
from numdiff.device.async_copy import (
    cp_async_4,
    cp_async_4_zfill,
    cp_async_8,
    cp_async_8_zfill,
    cp_async_16,
    cp_async_16_zfill,
    cp_async_commit,
    cp_async_wait,
    cp_async_wait_all,
    shared_address,
)
from numdiff.device.ptx import compile_to_ptx
from numdiff.device.tensor_core import (
    float_of,
    ldmatrix_x1,
    ldmatrix_x1_trans,
    ldmatrix_x2,
    ldmatrix_x2_trans,
    ldmatrix_x4,
    ldmatrix_x4_trans,
    load_word,
    load_words4,
    mma_m16n8k8,
    mma_m16n8k8_into,
    mma_m16n8k8_tf32,
    mma_m16n8k8_tf32_into,
    mma_m16n8k16,
    mma_m16n8k16_into,
    mma_m16n8k32_e4m3,
    mma_m16n8k32_e4m3_into,
    pack_half2,
    round_tf32,
    store_word,
    store_words4,
    unpack_half2,
    word_of,
)
from numdiff.emulator import KernelFault, fragments
from numdiff.emulator.counts import Recorder
from numdiff.float8 import bits_of, numbers_of
from tests.conftest import exhaustive, exhaustively, needs, relative_error
from tests.emulator import kernels_mma
from tests.emulator.planting import (
    changed_copy,
    fault_at,
    faults_of,
    line_with,
    marked,
    race_between,
    run,
)
from tests.kernels.compile_logs import architecture, assemble

MODES = pytest.mark.parametrize("checks", [True, False], ids=["checked", "unchecked"])
float16 = np.float16


def fault_here(faults, kind, mark):
    """The fault of this kind at the line of this file that has this mark."""
    return fault_at(faults, kind, __file__, marked(__file__, f"mark: {mark}"))


# fragments ----------------------------------------------------------------------------------------


def by_the_isa(name, lane, i):
    """(row, column) of element i of a lane, by the formulas as PTX ISA 9.7.14.5 prints them."""
    group, thread = lane >> 2, lane % 4
    if name == "a_m16n8k16":
        return group if i in (0, 1, 4, 5) else group + 8, thread * 2 + (i & 1) + (
            8 if i >= 4 else 0
        )
    if name == "b_m16n8k16":
        return thread * 2 + (i & 1) + (8 if i >= 2 else 0), group
    if name == "a_m16n8k8":
        return group if i < 2 else group + 8, thread * 2 + (i & 1)
    if name == "b_m16n8k8":
        return thread * 2 + i, group
    if name == "a_m16n8k8_tf32":
        return group + 8 * (i in (1, 3)), thread + 4 * (i >= 2)
    if name == "b_m16n8k8_tf32":
        return thread + 4 * i, group
    if name == "a_m16n8k32":
        return group if i < 4 or 8 <= i < 12 else group + 8, thread * 4 + (i & 3) + (
            0 if i < 8 else 16
        )
    if name == "b_m16n8k32":
        return thread * 4 + (i & 3) + (0 if i < 4 else 16), group
    return group if i < 2 else group + 8, thread * 2 + (i & 1)  # c


FRAGMENTS = {  # rows and columns of the matrix, 1/32 of which each lane has
    "a_m16n8k16": (16, 16),
    "b_m16n8k16": (16, 8),
    "a_m16n8k8": (16, 8),
    "b_m16n8k8": (8, 8),
    "a_m16n8k8_tf32": (16, 8),
    "b_m16n8k8_tf32": (8, 8),
    "a_m16n8k32": (16, 32),
    "b_m16n8k32": (32, 8),
    "c_m16n8": (16, 8),
}


@pytest.mark.parametrize("name, shape", FRAGMENTS.items())
def test_fragments_are_the_isas_and_cover_the_matrix_once(name, shape):
    fragment = getattr(fragments, f"fragment_{name}")
    seen = np.zeros(shape, int)
    for lane in range(32):
        elements = [place for register in fragment(lane) for place in register]
        assert elements == [by_the_isa(name, lane, i) for i in range(len(elements))]
        for place in elements:
            seen[place] += 1
    assert (seen == 1).all()


# words --------------------------------------------------------------------------------------------


@cuda.jit
def convert_kernel(x, packed, unpacked, rounded, back):
    i = cuda.threadIdx.x
    packed[i] = pack_half2(x[2 * i], x[2 * i + 1])
    unpacked[2 * i], unpacked[2 * i + 1] = unpack_half2(packed[i])
    rounded[2 * i] = round_tf32(x[2 * i])
    rounded[2 * i + 1] = round_tf32(x[2 * i + 1])
    back[2 * i] = float_of(word_of(x[2 * i]))
    back[2 * i + 1] = float_of(rounded[2 * i + 1])


def tf32(x):
    """float32 rounded to 11 significant bits, ties away from zero, by arithmetic in float64."""
    fraction, exponent = np.frexp(np.asarray(x, np.float64))
    return np.float32(
        np.ldexp(np.trunc(np.ldexp(fraction, 11) + np.copysign(0.5, fraction)), exponent - 11)
    )


@MODES
def test_conversions_round_as_ptx_says(rng, checks):
    x = (rng.standard_normal(256) * 10.0 ** rng.integers(-9, 6, 256)).astype(np.float32)
    x[:6] = 0, -0.0, 1 + 2**-11, 1 + 3 * 2**-11, -1 - 2**-11, 2**-14
    x[6:12] = 65519.9, 65520, -1e30, 2**-25, 2**-24 * 1.5, 6e-8
    # just below and above a tie of float16 and of tf32
    x[12:14] = 1 + 2**-11 - 2**-23, 1 + 2**-11 + 2**-23
    packed, unpacked = np.zeros(128, np.uint32), np.zeros(256, np.float32)
    rounded, back = np.zeros(256, np.uint32), np.zeros(256, np.float32)
    run(convert_kernel, 1, 128, x, packed, unpacked, rounded, back, checks=checks)
    with np.errstate(over="ignore"):
        half = x.astype(np.float16)
    assert np.array_equal(packed.view(np.uint16), half.view(np.uint16))
    assert np.array_equal(unpacked, half.astype(np.float32))
    assert np.array_equal(rounded.view(np.float32), tf32(x))
    assert np.array_equal(back[0::2], x[0::2]) and np.array_equal(back[1::2], tf32(x)[1::2])


def test_nan_and_infinity_stay_what_they_are():
    x = np.array([np.nan, np.inf, -np.inf, np.nan], np.float32)
    packed, rounded = np.zeros(2, np.uint32), np.zeros(4, np.uint32)
    run(convert_kernel, 1, 2, x, packed, np.zeros(4, np.float32), rounded, np.zeros(4, np.float32))
    assert list(packed.view(np.uint16)) == [0x7FFF, 0x7C00, 0xFC00, 0x7FFF]
    assert list(rounded) == [0x7FC00000, 0x7F800000, 0xFF800000, 0x7FC00000]


@cuda.jit
def words_kernel(x, y, z, shift):
    i = cuda.threadIdx.x
    a, b, c, d = load_words4(x, 8 * i + shift)  # mark: words in
    store_words4(y, 8 * i, d, c, b, a)
    store_word(z, 2 * i, load_word(x, 8 * i + 2 + shift))


@MODES
def test_words_move_bytes_of_float16(rng, checks):
    x = rng.standard_normal(64).astype(np.float16)
    y, z = np.zeros(64, np.float16), np.zeros(16, np.float16)
    run(words_kernel, 1, 8, x, y, z, 0, checks=checks)
    assert np.array_equal(y.reshape(8, 4, 2), x.reshape(8, 4, 2)[:, ::-1])
    assert np.array_equal(z.reshape(8, 2), x.reshape(8, 8)[:, 2:4])


def test_words_must_be_aligned_and_inside(rng):
    x, z = np.zeros(64, np.float16), np.zeros(16, np.float16)
    faults = faults_of(words_kernel, 1, 8, x, np.zeros(64, np.float16), z, 2)
    assert fault_here(faults, "alignment", "words in").thread == (0, 0, 0)
    assert fault_here(faults, "bounds", "words in").thread == (7, 0, 0)


# ldmatrix and mma ---------------------------------------------------------------------------------


@cuda.jit
def ldmatrix_kernel(x, one, two, four):
    tile = cuda.shared.array((32, 8), "float16")
    lane = cuda.threadIdx.x
    for c in range(8):
        tile[lane, c] = x[lane, c]
    cuda.syncwarp()
    row = shared_address(tile) + 16 * lane
    one[0, lane] = ldmatrix_x1(row)
    one[1, lane] = ldmatrix_x1_trans(row)
    two[0, lane, 0], two[0, lane, 1] = ldmatrix_x2(row)
    two[1, lane, 0], two[1, lane, 1] = ldmatrix_x2_trans(row)
    four[0, lane, 0], four[0, lane, 1], four[0, lane, 2], four[0, lane, 3] = ldmatrix_x4(row)
    four[1, lane, 0], four[1, lane, 1], four[1, lane, 2], four[1, lane, 3] = ldmatrix_x4_trans(row)


def ldmatrix_arguments(rng):
    return (
        rng.standard_normal((32, 8)).astype(np.float16),
        np.zeros((2, 32), np.uint32),
        np.zeros((2, 32, 2), np.uint32),
        np.zeros((2, 32, 4), np.uint32),
    )


def check_ldmatrix(x, one, two, four):
    matrices = x.reshape(4, 8, 8)
    for trans, source in enumerate((matrices, matrices.transpose(0, 2, 1))):
        # lane l: the l-th pair, row by row
        want = np.ascontiguousarray(source).reshape(4, 64).view(np.uint32).T
        assert np.array_equal(one[trans], want[:, 0])
        assert np.array_equal(two[trans], want[:, :2])
        assert np.array_equal(four[trans], want)


@MODES
def test_ldmatrix_spreads_matrices_over_a_warp(rng, checks):
    arguments = ldmatrix_arguments(rng)
    run(ldmatrix_kernel, 1, 32, *arguments, checks=checks)
    check_ldmatrix(*arguments)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("order", ["forward", "reversed"])
def test_ldmatrix_needs_the_stores_of_all_rows_before_it(rng, order, transposed):
    """Each lane stores the row whose address it gives, but other lanes receive it: a syncwarp must
    come between."""
    load = ldmatrix_x1_trans if transposed else ldmatrix_x1

    def kernel_with(barrier):
        @cuda.jit
        def kernel(x, y):
            tile = cuda.shared.array((32, 8), "float16")
            lane = cuda.threadIdx.x
            for c in range(8):
                tile[lane, c] = x[lane, c]  # mark: store of a row
            if barrier:
                cuda.syncwarp()
            y[lane] = load(shared_address(tile) + 16 * lane)  # mark: load of rows

        return kernel

    x, y = rng.standard_normal((32, 8)).astype(np.float16), np.zeros(32, np.uint32)
    run(kernel_with(True), 1, 32, x, y, order=order)
    faults = faults_of(kernel_with(False), 1, 32, x, y, order=order)
    lines = (marked(__file__, f"mark: {mark}") for mark in ("store of a row", "load of rows"))
    race_between(faults, __file__, *lines)


@cuda.jit(device=True)
def half_pair(x, row, column):
    """Two neighbours of a row as a word."""
    return pack_half2(float32(x[row, column]), float32(x[row, column + 1]))


@cuda.jit(device=True)
def half_pair_down(x, row, column):
    return pack_half2(float32(x[row, column]), float32(x[row + 1, column]))


@cuda.jit(device=True)
def write_fragment(d, sums, g, t):
    d[g, 2 * t], d[g, 2 * t + 1], d[g + 8, 2 * t], d[g + 8, 2 * t + 1] = (
        sums[0],
        sums[1],
        sums[2],
        sums[3],
    )


@cuda.jit
def mma_kernel(shape, a, b, c, d, e):
    """d and e = a · b + c by the tuple form and by the array form of one mma."""
    lane = cuda.threadIdx.x
    g, t = int32(lane // 4), int32(lane % 4)
    sums = cuda.local.array(6, "float32")
    sums[1], sums[2], sums[3], sums[4] = (
        c[g, 2 * t],
        c[g, 2 * t + 1],
        c[g + 8, 2 * t],
        c[g + 8, 2 * t + 1],
    )
    four = (sums[1], sums[2], sums[3], sums[4])
    if shape == 16:
        p = (
            half_pair(a, g, 2 * t),
            half_pair(a, g + 8, 2 * t),
            half_pair(a, g, 2 * t + 8),
            half_pair(a, g + 8, 2 * t + 8),
        )
        q = (half_pair_down(b, 2 * t, g), half_pair_down(b, 2 * t + 8, g))
        result = mma_m16n8k16(p, q, four)
        mma_m16n8k16_into(sums, 1, p, q)
    elif shape == 8:
        u = (half_pair(a, g, 2 * t), half_pair(a, g + 8, 2 * t))
        v = half_pair_down(b, 2 * t, g)
        result = mma_m16n8k8(u, v, four)
        mma_m16n8k8_into(sums, 1, u, v)
    else:
        p = (word_of(a[g, t]), word_of(a[g + 8, t]), word_of(a[g, t + 4]), word_of(a[g + 8, t + 4]))
        q = (word_of(b[t, g]), word_of(b[t + 4, g]))
        result = mma_m16n8k8_tf32(p, q, four)
        mma_m16n8k8_tf32_into(sums, 1, p, q)
    write_fragment(d, result, g, t)
    write_fragment(e, (sums[1], sums[2], sums[3], sums[4]), g, t)


def mma_arguments(rng, shape):
    """shape: k of the float16 instructions, 0 for tf32."""
    k = shape or 8
    a, b = (rng.standard_normal(s).astype(np.float32) for s in ((16, k), (k, 8)))
    if shape:
        a, b = (x.astype(np.float16).astype(np.float32) for x in (a, b))
    c = rng.standard_normal((16, 8)).astype(np.float32)
    return shape, a, b, c, np.zeros((16, 8), np.float32), np.zeros((16, 8), np.float32)


def cut_off(x, shape):
    """What an mma takes of float32: all of it where it was float16, without 13 bits as tf32."""
    return x if shape else (x.view(np.uint32) >> 13 << 13).view(np.float32)


@MODES
@pytest.mark.parametrize("shape", [16, 8, 0], ids=["m16n8k16", "m16n8k8", "m16n8k8_tf32"])
def test_mma_adds_products_in_the_order_of_k(rng, checks, shape):
    arguments = mma_arguments(rng, shape)
    run(mma_kernel, 1, 32, *arguments, checks=checks)
    _, a, b, c, d, e = arguments
    a, b = cut_off(a, shape), cut_off(b, shape)
    want = c.copy()
    for m in range(16):
        for n in range(8):
            for k in range(a.shape[1]):
                want[m, n] = want[m, n] + a[m, k] * b[k, n]
    assert np.array_equal(d, want)
    assert np.array_equal(e, want)
    assert relative_error(d, c + a.astype(float) @ b) < 1e-6


@cuda.jit
def mma_e4m3_kernel(a, b, c, d, e):
    """d and e = a · bᵀ + c by both forms; a (16, 32) and b (8, 32) are loaded by `ldmatrix` as rows of
    32 bytes."""
    tile = cuda.shared.array((24, 32), "uint8", alignment=128)
    lane = cuda.threadIdx.x
    g, t = int32(lane // 4), int32(lane % 4)
    if lane < 24:
        for k in range(32):
            tile[lane, k] = a[lane, k] if lane < 16 else b[lane - 16, k]
    cuda.syncwarp()
    start = shared_address(tile)
    p = ldmatrix_x4(start + lane % 16 * 32 + lane // 16 * 16)
    q = ldmatrix_x2(start + (16 + lane % 8) * 32 + lane // 8 % 2 * 16)
    sums = cuda.local.array(4, "float32")
    sums[0], sums[1] = c[g, 2 * t], c[g, 2 * t + 1]
    sums[2], sums[3] = c[g + 8, 2 * t], c[g + 8, 2 * t + 1]
    write_fragment(d, mma_m16n8k32_e4m3(p, q, (sums[0], sums[1], sums[2], sums[3])), g, t)
    mma_m16n8k32_e4m3_into(sums, 0, p, q)
    write_fragment(e, sums, g, t)


@MODES
def test_mma_of_e4m3(rng, checks):
    """Fragments of `ldmatrix`; the sum of exact products in the order of k."""
    a, b = (bits_of(rng.standard_normal(shape)) for shape in ((16, 32), (8, 32)))
    c = rng.standard_normal((16, 8)).astype(np.float32)
    d, e = np.full((16, 8), np.nan, np.float32), np.full((16, 8), np.nan, np.float32)
    run(mma_e4m3_kernel, 1, 32, a, b, c, d, e, checks=checks)
    want = c.copy()
    for k in range(32):
        want += numbers_of(a)[:, None, k] * numbers_of(b)[None, :, k]
    assert np.array_equal(d, want) and np.array_equal(e, want)
    assert relative_error(d, c + numbers_of(a).astype(float) @ numbers_of(b).T) < 1e-6


@cuda.jit
def absent_kernel(out, last, late):
    lane = cuda.threadIdx.x
    sums = cuda.local.array(4, "float32")
    for i in range(4):
        sums[i] = float32(0)
    if lane < last:
        mma_m16n8k8_into(sums, 0, (0, 0), 0)  # mark: not the whole warp
    if late:
        cuda.syncthreads()
    out[lane] = sums[0]


@pytest.mark.parametrize(
    "block, last, late, why",
    [
        (32, 31, 0, "lane 31 has ended"),
        (32, 31, 1, "lane 31, which never comes"),
        (16, 16, 0, "lane 16 does not exist"),
    ],
)
def test_a_lane_absent_from_an_mma_is_a_fault(block, last, late, why):
    fault = fault_here(
        faults_of(absent_kernel, 1, block, np.zeros(32, np.float32), last, late),
        "divergence",
        "not the whole warp",
    )
    assert why in fault.message


@cuda.jit
def unwritten_sums_kernel(out):
    sums = cuda.local.array(4, "float32")
    mma_m16n8k8_into(sums, 0, (0, 0), 0)  # mark: the sums are unwritten
    out[cuda.threadIdx.x] = sums[0]


def test_uninitialised_accumulators_are_a_fault():
    fault_here(
        faults_of(unwritten_sums_kernel, 1, 32, np.zeros(32, np.float32)),
        "uninitialised",
        "the sums are unwritten",
    )


# cp.async -----------------------------------------------------------------------------------------


@cuda.jit
def copy_kernel(x, y, count):
    tile = cuda.shared.array(256, "float32")
    t = cuda.threadIdx.x
    address = shared_address(tile) + 32 * t
    if count < 0:
        cp_async_16(address, x, 8 * t)
        cp_async_8(address + 16, x, 8 * t + 4)
        cp_async_4(address + 24, x, 8 * t + 6)
        cp_async_4(address + 28, x, 8 * t + 7)
    else:
        cp_async_16_zfill(address, x, 8 * t, count)
        cp_async_8_zfill(address + 16, x, 8 * t + 4, min(count, 8))
        cp_async_4_zfill(address + 24, x, 8 * t + 6, min(count, 4))
        cp_async_4_zfill(address + 28, x, 8 * t + 7 + 1000, 0)  # outside of x: nothing is read
    cp_async_commit()
    cp_async_wait(0)
    for i in range(8):
        y[8 * t + i] = tile[8 * t + i]


@MODES
@pytest.mark.parametrize("count", [-1, 0, 4, 16])
def test_copies_of_every_size_arrive_filled_with_zeros(rng, checks, count):
    x, y = rng.standard_normal(256).astype(np.float32), np.full(256, np.nan, np.float32)
    run(copy_kernel, 1, 32, x, y, count, checks=checks)
    want = x.reshape(32, 8).copy()
    if count >= 0:
        want[:, count // 4 : 4] = 0
        want[:, 4 + min(count, 8) // 4 : 6] = 0
        want[:, 6 + min(count, 4) // 4 :] = 0
    assert np.array_equal(y.reshape(32, 8), want)


@cuda.jit
def groups_kernel(x, y, case):
    tile = cuda.shared.array((3, 32, 8), "float16")
    t = cuda.threadIdx.x
    for i in range(8):
        for s in range(3):
            tile[s, t, i] = float16(-1)
    for s in range(3):
        # mark: copied here
        cp_async_16(shared_address(tile) + 16 * (32 * s + t), x, 8 * (32 * s + t))
        if case != 3:
            cp_async_commit()
    if case == 0:
        cp_async_wait(1)
    elif case == 2:
        cp_async_wait(2)
    elif case == 3:
        cp_async_wait(0)
    elif case == 4:
        cp_async_wait_all()
    for i in range(8):
        y[t, i] = tile[1, t, i]  # mark: the second group is read


@pytest.mark.parametrize(
    "case, hint",
    [(1, "cp_async_wait(1)"), (2, "cp_async_wait(1)"), (3, "commit")],
    ids=["no wait", "too large a number", "not committed"],
)
def test_a_copy_read_before_its_groups_wait_is_a_fault(case, hint):
    x, y = np.ones((96, 8), np.float16), np.zeros((32, 8), np.float16)
    fault = fault_here(
        faults_of(groups_kernel, 1, 32, x, y, case), "cp.async", "the second group is read"
    )
    assert "tile[1, 0, 0]" in fault.message and hint in fault.message
    ((what, place),) = fault.others
    assert (what, place.line, place.thread) == (
        "started at",
        marked(__file__, "mark: copied here"),
        (0, 0, 0),
    )
    run(groups_kernel, 1, 32, x, y, case, checks=False)
    assert (y == -1).all()  # as late as the rules allow


@MODES
@pytest.mark.parametrize("case", [0, 4], ids=["wait", "wait_all"])
def test_the_right_wait_is_no_fault(checks, case):
    x, y = np.arange(768).reshape(96, 8).astype(np.float16), np.zeros((32, 8), np.float16)
    run(groups_kernel, 1, 32, x, y, case, checks=checks)
    assert np.array_equal(y, x[32:64])


@cuda.jit
def wrong_copy_kernel(x, case):
    tile = cuda.shared.array(64, "float32")
    address = shared_address(tile)
    if case == 0:
        cp_async_16(address + 8, x, 0)  # mark: misaligned target
    elif case == 1:
        cp_async_16(address, x, 2)  # mark: misaligned source
    elif case == 2:
        cp_async_16(address, x, 64)  # mark: behind the source
    elif case == 3:
        cp_async_16(address + 256, x, 0)  # mark: behind the target
    elif case == 4:
        cp_async_16(address, x, 0)
        x[1] = float32(5)  # mark: the source is changed
        cp_async_wait_all()
    elif case == 5:
        cp_async_16(address, x, 0)
        cp_async_16(address, x, 4)  # mark: twice the same target
    elif case == 6:
        cp_async_16_zfill(address, x, 0, 20)  # mark: more than 16 bytes
    elif case == 7:
        cp_async_4(address, tile, 4)  # mark: not from global memory
    elif case == 8:
        cp_async_16(shared_address(x), x, 0)  # mark: not to shared memory


@pytest.mark.parametrize(
    "case, kind, mark",
    [
        (0, "alignment", "misaligned target"),
        (1, "alignment", "misaligned source"),
        (2, "bounds", "behind the source"),
        (3, "bounds", "behind the target"),
        (4, "cp.async", "the source is changed"),
        (5, "cp.async", "twice the same target"),
        (6, "cp.async", "more than 16 bytes"),
        (7, "cp.async", "not from global memory"),
        (8, "error", "not to shared memory"),
    ],
)
def test_wrong_copies_are_faults(case, kind, mark):
    fault_here(faults_of(wrong_copy_kernel, 1, 1, np.zeros(64, np.float32), case), kind, mark)


# a whole GEMM -------------------------------------------------------------------------------------


def gemm_arguments(rng, M, N, K):
    a, b = (rng.standard_normal((rows, K)).astype(np.float16) for rows in (M, N))
    return (a, b, np.full((M, N), np.nan, np.float32)), (-(-N // 64), -(-M // 64))


def run_gemm(kernel, arguments, grid, **options):
    a, b, c = arguments
    c[:] = np.nan
    run(kernel, grid, 128, *(x.reshape(-1) for x in arguments), *c.shape, a.shape[1], **options)
    return c.copy()


def test_gemm_costs_what_its_shape_says(rng):
    arguments, grid = gemm_arguments(rng, 64, 64, 64)
    recorder = Recorder()
    run_gemm(kernels_mma.matmul_mma_kernel, arguments, grid, recorder=recorder)
    assert recorder.total().tensor_flops == 2 * 64**3
    assert recorder.total().distinct_read_bytes == 2 * 2 * 64 * 64
    for line in ("a_upper = ldmatrix_x4", "b = ldmatrix_x4", "cp_async_16_zfill(tile"):
        # what the swizzle is for
        assert recorder.line(line).shared_requests and not recorder.line(line).conflicts
    assert recorder.line("cp_async_16_zfill(tile").efficiency == 1


PLANTED = {  # what is changed in the kernel, and the fault that must be found where
    "no wait": ("cp_async_wait(PENDING)", "pass", "cp.async", "a_upper = ldmatrix_x4"),
    "wait for too few": (
        "PENDING = STAGES - 2",
        "PENDING = STAGES - 1",
        "cp.async",
        "a_upper = ldmatrix_x4",
    ),
    "no commit": (
        "        cp_async_commit()\n        multiply",
        "        multiply",
        "cp.async",
        "a_upper = ldmatrix_x4",
    ),
    "no barrier after the wait": (
        "        cuda.syncthreads()",
        "        pass",
        "race",
        "a_upper = ldmatrix_x4",
    ),
    "refilled before the barrier": (
        "        cuda.syncthreads()",
        "        fetch_tile(a_tiles + (stage + 2) % 3 * "
        "TILE_BYTES, a, first_row, 0, M, K, t)\n        cuda.syncthreads()",
        "race",
        "cp_async_16_zfill(tile",
    ),
    "refilled while it is read": (
        "(stage + STAGES - 1) % STAGES",
        "(stage + STAGES) % STAGES",
        "cp.async",
        "a_upper = ldmatrix_x4",
    ),
    "misaligned row": (
        "a_lower = ldmatrix_x4(a_tile",
        "a_lower = ldmatrix_x4(a_tile + 8",
        "alignment",
        "a_lower = ldmatrix_x4",
    ),
    "lane absent": (
        "            mma_m16n8k16_into(sums, 8 * pair + 4,",
        "            if lane != 5:\n                mma_m16n8k16_into(sums, 8 * pair + 4,",
        "divergence",
        "8 * pair + 4, a_upper",
    ),
    "guard off by one": ("m < rows and", "m <= rows and", "bounds", "cp_async_16_zfill(tile"),
}


# those that the first tile shows
ONE_TILE = set(PLANTED) - {"no commit", "refilled before the barrier"}


@pytest.mark.parametrize(
    "name", [*list(PLANTED)[::4], *exhaustively(*(name for k, name in enumerate(PLANTED) if k % 4))]
)
def test_faults_planted_in_the_gemm_are_found(rng, tmp_path, name):
    before, after, kind, mark = PLANTED[name]
    module, path = changed_copy(tmp_path, kernels_mma, [(before, after)])
    (a, b, c), grid = gemm_arguments(rng, 48, 64, 64 if name in ONE_TILE else 128)
    with pytest.raises(KernelFault) as caught:
        run_gemm(module.matmul_mma_kernel, (a, b, c), grid)
    assert (
        fault_at(caught.value.faults, kind, path, line_with(path, mark)).kernel
        == "matmul_mma_kernel"
    )


# compiled -----------------------------------------------------------------------------------------


def signature(*arguments):
    from numba import types

    return tuple(
        types.Array(getattr(types, a.dtype.name), a.ndim, "C")
        if isinstance(a, np.ndarray)
        else types.int32
        for a in arguments
    )


def all_kernels():
    half, single, words = (
        lambda n, d=dtype: np.zeros((1,) * n, d) for dtype in (np.float16, np.float32, np.uint32)
    )
    return {
        "gemm": (kernels_mma.matmul_mma_kernel, signature(half(1), half(1), single(1), 0, 0, 0)),
        "convert": (convert_kernel, signature(single(1), words(1), single(1), words(1), single(1))),
        "words": (words_kernel, signature(half(1), half(1), half(1), 0)),
        "ldmatrix": (ldmatrix_kernel, signature(half(2), words(2), words(3), words(3))),
        "mma": (mma_kernel, signature(0, *[single(2)] * 5)),
        "mma_e4m3": (
            mma_e4m3_kernel,
            signature(*[np.zeros((1, 1), np.uint8)] * 2, *[single(2)] * 3),
        ),
        "copy": (copy_kernel, signature(single(1), single(1), 0)),
        "groups": (groups_kernel, signature(half(2), half(2), 0)),
    }


@exhaustive
@pytest.mark.parametrize(
    "name, capability",
    [
        *[(name, (8, 9) if "e4m3" in name else (8, 0)) for name in all_kernels()],
        ("gemm", (9, 0, "a")),
        ("mma_e4m3", (12, 0)),
    ],
    ids=lambda value: value if isinstance(value, str) else architecture(value),
)
@needs("ptxas")
def test_kernels_compile_without_spills(name, capability):
    text = compile_to_ptx(*all_kernels()[name], capability)
    assert ".f64" not in text
    if name == "gemm":
        assert (
            "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32" in text and "ldmatrix.sync" in text
        )
        assert "cp.async.wait_group 1;" in text
    assert assemble(text, capability)[1] == []


def test_a_wait_for_a_number_that_is_not_known_is_refused():
    @cuda.jit
    def kernel(n):
        cp_async_wait(n)

    with pytest.raises(Exception, match="a literal or a constant by name"):
        compile_to_ptx(kernel, signature(0), (8, 0))


# on a GPU, where there is one ---------------------------------------------------------------------


def conversion_arguments(rng):
    special = np.nan, np.inf, 65519.9, 65520, 1 + 2**-11, 2**-25
    x = np.append(rng.standard_normal(250) * 10.0 ** rng.integers(-9, 6, 250), special)
    words, floats = (lambda n: np.zeros(n, np.uint32)), (lambda n: np.zeros(n, np.float32))
    return x.astype(np.float32), words(128), floats(256), words(256), floats(256)


def copy_arguments(rng, count):
    x = rng.standard_normal(256).astype(np.float32)
    return x, np.zeros(256, np.float32), count


def flat_gemm_arguments(rng, *shape):
    (a, b, c), _ = gemm_arguments(rng, *shape)
    return a.reshape(-1), b.reshape(-1), c.reshape(-1), *shape


ON_HARDWARE = {  # (kernel, grid, block, arguments, relative error of float32)
    "words": (convert_kernel, 1, 128, conversion_arguments, 0),
    "ldmatrix": (ldmatrix_kernel, 1, 32, ldmatrix_arguments, 0),
    **{
        f"mma {shape}": (mma_kernel, 1, 32, functools.partial(mma_arguments, shape=shape), 2e-6)
        for shape in (16, 8, 0)
    },
    **{
        f"copy {count}": (copy_kernel, 1, 32, functools.partial(copy_arguments, count=count), 0)
        for count in (-1, 0, 4, 16)
    },
    "gemm, edges": (
        kernels_mma.matmul_mma_kernel,
        (3, 2),
        128,
        lambda rng: flat_gemm_arguments(rng, 72, 136, 200),
        1e-5,
    ),
}


@needs("gpu")
@pytest.mark.parametrize("name", ON_HARDWARE)
def test_the_hardware_gives_what_the_twins_give(rng, name):
    """The same bits, but for the order in which an mma sums."""
    kernel, grid, block, make, tolerance = ON_HARDWARE[name]
    given = make(rng)
    on_device = [cuda.to_device(a) if isinstance(a, np.ndarray) else a for a in given]
    kernel[grid, block](*on_device)
    run(kernel, grid, block, *given)
    for twins, hardware in zip(given, on_device, strict=True):
        if not isinstance(twins, np.ndarray):
            continue
        got = hardware.copy_to_host()
        if tolerance:
            assert relative_error(got, twins) < tolerance
        else:
            assert np.array_equal(got, twins, equal_nan=got.dtype == np.float32)
