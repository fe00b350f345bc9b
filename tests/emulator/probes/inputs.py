"""Inputs of the kernels in units.py and in the GEMM, and what they must give, as the PTX ISA
and NumPy say it."""

import numpy as np

from numdiff.float8 import bits_of

DESCRIPTOR_MODE = {0: 0, 128: 1, 64: 2, 32: 3}  # PTX ISA 9.7.15.5.1.2.2, bits 62-63, by bytes


# TMA ----------------------------------------------------------------------------------------------


def box_of(x, at, box):
    """The box of `box` elements at `at` (both innermost dimension first) of x, zeros where x ends,
    element by element."""
    found = np.zeros(box[::-1], x.dtype)
    for index in np.ndindex(found.shape):
        where = tuple(c + i for c, i in zip(at[::-1], index, strict=True))
        if all(0 <= w < n for w, n in zip(where, x.shape, strict=True)):
            found[index] = x[where]
    return found


def with_box(y, at, tile):
    """A copy of y with a tile written at `at`, clipped to the array."""
    y = y.copy()
    for index in np.ndindex(tile.shape):
        where = tuple(c + i for c, i in zip(at[::-1], index, strict=True))
        if all(0 <= w < n for w, n in zip(where, y.shape, strict=True)):
            y[where] = tile[index]
    return y


def place(offset, swizzle, row=None):
    """The address of the byte at `offset` of a tile that begins at a multiple of 1024 bytes.

    row: bytes of a row where they are fewer than the swizzle's: rows then begin as many bytes apart
    as it has

    The patterns as figures show them: memory in lines of 128 bytes, eight chunks of 16 bytes each;
    with 128 bytes chunk c of line l is at c ^ (l % 8); with 64 bytes the two halves of a line, four
    chunks each, are mixed by l % 4; with 32 bytes the four quarters by l % 2.
    """
    if row is not None:
        offset = offset // row * max(row, swizzle) + offset % row
    line, chunk, byte = offset // 128, offset // 16 % 8, offset % 16
    part = max(swizzle // 16, 1)
    return 128 * line + 16 * (chunk // part * part + (chunk % part ^ line % part)) + byte


# name: (dtype, shape, box innermost first, swizzle, from, to); only loads may begin before the
# tensor
COPIES = {
    "1d": (np.float32, (100,), (32,), 0, (4,), (60,)),
    "1d begins before": (np.float16, (64,), (16,), 0, (-8,), (8,)),
    "1d ends behind": (np.uint8, (96,), (48,), 0, (64,), (80,)),
    "2d none": (np.float16, (20, 24), (8, 6), 0, (8, 2), (16, 15)),
    "2d 32": (np.float16, (40, 32), (16, 20), 32, (8, 9), (16, 0)),
    "2d 64": (np.float32, (24, 32), (16, 10), 64, (8, -4), (20, 19)),
    "2d 128": (np.float16, (40, 72), (64, 16), 128, (16, 30), (8, 1)),
    "2d row of 64 in 128": (np.float16, (40, 72), (32, 16), 128, (48, 3), (8, 1)),
    "2d row of 16 in 128": (np.float16, (40, 72), (8, 16), 128, (32, 3), (0, 1)),
    "2d row of 32 in 64": (np.float16, (40, 72), (16, 16), 64, (32, 3), (0, 1)),
    "2d float64": (np.float64, (9, 8), (2, 5), 32, (-2, 6), (6, 0)),
    "2d wholly outside": (np.int32, (8, 8), (4, 4), 0, (8, 0), (0, 8)),
    "3d": (np.float16, (5, 6, 16), (8, 3, 2), 0, (8, -1, 4), (0, 5, 4)),
    "4d image with halo": (
        np.float16,
        (2, 6, 6, 64),
        (64, 6, 3, 1),
        128,
        (0, -1, -1, 1),
        (0, 1, 4, 0),
    ),
    "5d": (np.uint16, (2, 3, 3, 4, 16), (8, 2, 3, 2, 2), 0, (8, 3, -1, 1, 1), (0, 3, 1, 2, 1)),
    "5d 64": (
        np.float16,
        (2, 2, 3, 3, 32),
        (32, 3, 2, 2, 1),
        64,
        (0, -1, 2, 1, 1),
        (0, 0, 0, 1, 0),
    ),
}


def copy_case(name):
    """(x, y, box, swizzle, at (int32[10]), the bytes of the tile with zeros in its gaps, what y
    must be)."""
    dtype, shape, box, swizzle, source, target = COPIES[name]
    x = (1 + np.arange(np.prod(shape)) % 251).reshape(shape).astype(dtype)
    y = np.full(shape, 7, dtype)
    at = np.zeros(10, np.int32)
    at[: len(shape)], at[5 : 5 + len(shape)] = source, target
    tile = box_of(x, source, box)
    data = tile.reshape(-1).view(np.uint8)
    row = box[0] * x.itemsize
    raw = np.zeros(len(data) // row * max(row, swizzle), np.uint8)
    for offset in range(0, len(data), 16):
        to = place(offset, swizzle, row)
        raw[to : to + 16] = data[offset : offset + 16]
    return x, y, box, swizzle, at, raw, with_box(y, target, tile)


# wgmma --------------------------------------------------------------------------------------------


def layout(swizzle, mn_major, rows, far=False):
    """(leading, stride) in bytes of a dense matrix, or with the blocks in the other order and gaps
    between (far)."""
    if swizzle and not mn_major:
        return 16, 8 * swizzle * (2 if far else 1)
    if swizzle:  # blocks of S bytes of m by 8 of k; leading: from one to the next along m
        return (
            (8 * swizzle, 8 * swizzle * -(-rows // (swizzle // 2)))
            if far
            else (16 * swizzle, 8 * swizzle)
        )
    if mn_major:
        return (128, 256) if far else (128 * (rows // 8), 128)
    return (rows * 16, 128) if far else (128, 256)


def matrix_image(matrix, swizzle, mn_major, leading, stride, first_k=0):
    """The bytes of shared memory of a matrix (rows, 16) of 16-bit elements: PTX ISA 9.7.15.5.1,
    element by element.

    first_k: a K-major matrix is columns first_k … of a wider tile
    """
    found = {}
    for (r, k), value in np.ndenumerate(matrix):
        k += first_k
        if not mn_major and swizzle:
            at = r // 8 * stride + r % 8 * swizzle + 2 * k
        elif not mn_major:
            at = r // 8 * stride + k // 8 * leading + r % 8 * 16 + k % 8 * 2
        elif swizzle:
            per = swizzle // 2
            at = r // per * leading + k // 8 * stride + k % 8 * swizzle + r % per * 2
        else:
            at = r // 8 * stride + k // 8 * leading + k % 8 * 16 + r % 8 * 2
        found[place(at, swizzle)] = value
    image = np.zeros(-(-(max(found) + 2) // 1024) * 512, matrix.dtype)
    for at, value in found.items():
        image[at // 2] = value
    return image.view(np.uint8)


def descriptor(address, leading, stride, swizzle):
    return address >> 4 | leading >> 4 << 16 | stride >> 4 << 32 | DESCRIPTOR_MODE[swizzle] << 62


def product_case(rng, n, swizzle, a_mn=False, b_mn=False, far=False, first_k=0):
    """(a, b, image, descriptors, fragments): what `units.make_product` takes, of small integers."""
    a, b = (rng.integers(-4, 5, (rows, 16)).astype(np.float16) for rows in (64, n))
    images, bits, start = [], [], 0
    for matrix, mn_major in ((a, a_mn), (b, b_mn)):
        leading, stride = layout(swizzle, mn_major, len(matrix), far)
        images.append(matrix_image(matrix, swizzle, mn_major, leading, stride, first_k))
        bits.append(descriptor(start + 2 * first_k, leading, stride, swizzle))
        start += len(images[-1])
    fragments = np.zeros((128, 8), np.float16)
    for t in range(128):  # figure "WGMMA .m64nNk16 register fragment layout for matrix A"
        for i in range(8):
            row = 16 * (t // 32) + t % 32 // 4 + (8 if i in (2, 3, 6, 7) else 0)
            fragments[t, i] = a[row, t % 4 * 2 + (i & 1) + (8 if i >= 4 else 0)]
    return (
        a,
        b,
        np.concatenate(images).view(np.uint32),
        np.array(bits, np.uint64),
        fragments.view(np.uint32),
    )


def product_case_e4m3(rng, n, swizzle, first_k=0):
    """`product_case` of E4M3, 32 along k, as bytes; a and b as the float32 that they stand for.
    `matrix_image` places two of them at a time."""
    a, b = (rng.integers(-4, 5, (rows, 32)).astype(np.float32) for rows in (64, n))
    images, bits, start = [], [], 0
    for matrix in (a, b):
        leading, stride = layout(swizzle, False, len(matrix))
        images.append(
            matrix_image(
                bits_of(matrix).view(np.uint16), swizzle, False, leading, stride, first_k // 2
            )
        )
        bits.append(descriptor(start + first_k, leading, stride, swizzle))
        start += len(images[-1])
    return (
        a,
        b,
        np.concatenate(images).view(np.uint32),
        np.array(bits, np.uint64),
        np.zeros((128, 4), np.uint32),
    )


def in_registers(d):
    """D (64, n) as the threads hold it (128, n / 2): figure "WGMMA .m64nNk16 register fragment
    layout for accumulator"."""
    t, i = np.arange(128)[:, None], np.arange(d.shape[1] // 2)[None, :]
    return d[
        16 * (t // 32) + t % 32 // 4 + 8 * (i >> 1 & 1), i // 4 * 8 + t % 4 * 2 + (i & 1)
    ].astype(np.float32)


PHASES = (1, 0, 0, 1, 0, 0, 1, 0, 16, 1, 1, 0)  # what `units.phases` must log for x = 1, 2, …


# The GEMM -----------------------------------------------------------------------------------------


def gemm_arrays(m, n, k):
    rng = np.random.default_rng(0)
    return (
        rng.standard_normal((m, k), dtype=np.float32).astype(np.float16),
        rng.standard_normal((n, k), dtype=np.float32).astype(np.float16),
        np.full((m, n), np.nan, np.float16),
    )
