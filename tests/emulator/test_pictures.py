"""What the pictures show, against the formulas of the PTX ISA; and that both forms of a picture can
be opened."""

import math
import re
from xml.etree import ElementTree

import numpy as np
import pytest
from numba import cuda
from PIL import Image

from numdiff import emulator
from numdiff.device.half import in_bfloat16
from numdiff.device.mbarrier import (
    fence_barrier_init,
    mbarrier_expect_tx,
    mbarrier_init,
    mbarrier_wait,
    smem_u32,
)
from numdiff.device.tensor_map import tensor_map
from numdiff.device.tma import tma_load_2d, tma_load_3d
from numdiff.dtypes import bfloat16
from numdiff.emulator import fragments, pictures
from numdiff.emulator.drawing import COLOURS, FAULT, Picture
from tests.conftest import exhaustively
from tests.emulator.kernels_mma import THREADS, TILE, matmul_mma_kernel
from tests.emulator.test_tensor_core import FRAGMENTS, by_the_isa

float16, uint32 = np.float16, np.uint32
SVG = "{http://www.w3.org/2000/svg}"


def tips(picture):
    """What an SVG viewer shows under the pointer, from the picture's SVG."""
    return [e.text for e in ElementTree.fromstring(picture.svg()).iter(SVG + "title")]


def texts(picture):
    return [e.text for e in ElementTree.fromstring(picture.svg()).iter(SVG + "text")]


# Fragments of a warp ------------------------------------------------------------------------------


def ptx_places(matrix, shape):
    """{(row, column): (lane, label)} by the formulas of PTX ISA 9.7.14.5."""
    name = "c_m16n8" if matrix == "c" else f"{matrix}_{shape.replace(' ', '_')}"
    in_pairs = matrix != "c" and "tf32" not in shape  # two float16 in a register
    return {
        by_the_isa(name, lane, i): (lane, f"{matrix}{f'{i // 2}.{i % 2}' if in_pairs else i}")
        for lane in range(32)
        for i in range(math.prod(FRAGMENTS[name]) // 32)
    }


@pytest.mark.parametrize("shape", ["m16n8k16", "m16n8k8", "m16n8k8 tf32"])
def test_fragments_of_an_mma(shape):
    picture = pictures.mma(shape, lane=9)
    shown = [
        re.fullmatch(r"\((\d+), (\d+)\) is in lane (\d+), (.*)", tip).groups()
        for tip in tips(picture)
    ]
    for matrix in "abc":
        mine = {
            (int(r), int(c)): (int(lane), label)
            for r, c, lane, label in shown
            if label[0] == matrix
        }
        assert mine == ptx_places(matrix, shape)
        count = len(mine) // 32  # elements of a lane
        assert len([1 for lane, _ in mine.values() if lane == 9]) == count
    edges = [s for s in picture.shapes if s[0] == "rectangle" and s[4] == 2.5]
    assert len(edges) == len(shown) // 32  # thick around all that lane 9 holds
    bold = [s for s in picture.shapes if s[0] == "text" and s[2] == "T9" and s[5]]
    assert len(bold) == len(edges)
    assert texts(picture).count("T9") == len(edges)


def test_the_colour_is_the_registers():
    picture = pictures.mma()
    for shape in picture.shapes:
        if shape[0] == "rectangle" and shape[6]:
            register = int(re.search(r"[abc](\d)", shape[6].split("lane")[1]).group(1))
            assert shape[2] == COLOURS[register]


def test_ldmatrix():
    """Row r of matrix m comes from the address of lane 8·m + r; lane l gets elements 2·(l % 4), + 1
    of row l // 4."""
    picture = pictures.ldmatrix(4)
    shown = tips(picture)
    assert len(shown) == 4 * 64
    for lane in range(32):
        for m in range(4):
            for half in range(2):
                assert (
                    f"({lane // 4}, {2 * (lane % 4) + half}) is in lane {lane}, r{m}.{half}"
                    in shown
                )
    assert [t for t in texts(picture) if t.startswith("address")] == [
        f"address of T{i}" for i in range(32)
    ]
    transposed = tips(pictures.ldmatrix(1, transposed=True))
    assert "(3, 1) is in lane 5, r0.1" in transposed and "(2, 1) is in lane 5, r0.0" in transposed


@pytest.mark.parametrize("dtype", [float16, *exhaustively(bfloat16)])
def test_numbers_of_a_product_are_those_of_the_run(dtype):
    rng = np.random.default_rng(1)
    a, b = (rng.integers(-9, 10, (TILE, TILE)).astype(dtype) for _ in "ab")
    c = np.zeros(TILE * TILE, np.float32)
    kernel = in_bfloat16(matmul_mma_kernel, dtype)
    film = emulator.trace(
        kernel, (1, 1), THREADS, a.ravel(), b.ravel(), c, TILE, TILE, TILE, cc=(8, 0)
    )
    first = next(p for p in film.products if p.warp == 3)  # rows and columns 32 … of C, k = 0 … 15
    shape, (shown_a, shown_b, shown_d) = pictures.numbers(first)
    assert shape == "m16n8k16"
    assert all(shown_a[r, k] == a[32 + r, k] for r in range(16) for k in range(16))
    assert all(shown_b[k, n] == b[32 + n, k] for k in range(16) for n in range(8))
    want = a[32:48, :16].astype(float) @ b[32:40, :16].astype(float).T
    assert all(shown_d[at] == want[at] for at in np.ndindex(16, 8))
    written = texts(pictures.mma(first))
    assert written[0] == f"mma m16n8k16: warp 3 of block (0, 0, 0) at {first.place}"
    assert written.count(f"{want[0, 0]:.3g}") >= 1 and "D = A · B + C  16 × 8" in written


@pytest.mark.parametrize("n", [8, 24])
def test_accumulators_of_a_wgmma(n):
    """PTX ISA, 9.7.15.5, "Register fragments": warp w has rows 16·w …, d_i is in columns 8·(i // 4)
    …"""
    shown = tips(pictures.wgmma_accumulator(n, thread=100))
    assert len(shown) == len(set(shown)) == 64 * n
    for thread in range(128):
        for i in range(n // 2):
            row = 16 * (thread // 32) + thread % 32 // 4 + 8 * (i // 2 % 2)
            column = 8 * (i // 4) + 2 * (thread % 4) + i % 2
            assert f"({row}, {column}) is d{i} of thread {thread}" in shown


# Tiles and boxes ----------------------------------------------------------------------------------


@cuda.jit
def fetch_2d(map_x, out, x, y, size):
    """Load one box, and copy the tile byte by byte in its shared-memory layout."""
    tile = cuda.shared.array(0, np.uint8, alignment=1024)
    bars = cuda.shared.array(1, np.uint64)
    t = cuda.threadIdx.x
    bar = smem_u32(bars)
    if t == 0:
        mbarrier_init(bar, uint32(1))
        fence_barrier_init()
        mbarrier_expect_tx(bar, uint32(size))
        tma_load_2d(smem_u32(tile), map_x, bar, uint32(x), uint32(y))
    cuda.syncthreads()
    mbarrier_wait(bar, uint32(0))
    for i in range(t, size, 32):
        out[i] = tile[i]


def fetch(shape, box, swizzle, at):
    """(the copy, the tile's bytes, the array) of one load."""
    x = pictures.numbered(shape)
    size = box[0] * box[1] * 2
    out = np.zeros(size, np.uint8)
    film = emulator.trace(fetch_2d, 1, 32, tensor_map(x, box, swizzle), out, *at, size, shared=size)
    (copy,) = film.copies
    return copy, out, x


@pytest.mark.parametrize("swizzle", [0, 32, 64, 128])
def test_a_swizzled_tile_is_where_the_formula_says(swizzle):
    """Byte `a` of the tile is at a ^ ((a >> 7) & mask) << 4, for masks of 0, 1, 3 and 7 (the tile
    at 1024·n)."""
    row_bytes = swizzle or 128
    mask = {0: 0, 32: 1, 64: 3, 128: 7}[swizzle]
    copy, tile, x = fetch((16, row_bytes // 2), (row_bytes // 2, 16), swizzle, (0, 0))
    places = pictures.chunks_found(copy)
    start = copy.memory.address + copy.offset
    assert start % 1024 == 0
    shown = {}
    picture = pictures.swizzled_tile(copy)
    for tip in tips(picture):
        row, chunk, address, bank = re.fullmatch(
            r"row (\d+), chunk (\d+): address (0x[0-9a-f]+), banks (\d+) to \d+", tip
        ).groups()
        shown[int(row), int(chunk)] = int(address, 16), int(bank)
    for row in range(16):
        for chunk in range(row_bytes // 16):
            a = row * row_bytes + 16 * chunk
            where = a ^ (((a >> 7) & mask) << 4)
            assert places[row, chunk] == where
            assert shown[row, chunk] == (start + where, where // 4 % 32)
            assert tile[where : where + 16].tobytes() == x[row, 8 * chunk : 8 * chunk + 8].tobytes()
    assert tips(
        pictures.swizzled_tile(rows=16, row_bytes=row_bytes, swizzle=swizzle, address=start)
    ) == tips(picture)
    (said,) = [t for t in texts(picture) if t.startswith("Outlined")]
    rows_of_a_column = {shown[r, min(2, row_bytes // 16 - 1)][1] for r in range(8)}
    assert len(rows_of_a_column) == (8 if swizzle else 1)
    assert ("one wavefront" in said) == (swizzle != 0) and ("8 wavefronts" in said) == (
        swizzle == 0
    )
    outlined = [s for s in picture.shapes if s[0] == "rectangle" and s[4] == 3]
    assert len(outlined) == 16  # eight chunks, on the left and on the right


def test_chunks_have_the_colour_of_their_banks():
    for shape in pictures.swizzled_tile(swizzle=64, row_bytes=64).shapes:
        if shape[0] == "rectangle" and shape[6]:
            assert shape[2] == COLOURS[int(re.search(r"banks (\d+)", shape[6]).group(1)) // 4]


def test_a_tile_that_was_overwritten_or_repeats_itself_is_refused():
    copy, _, _ = fetch((16, 64), (64, 16), 128, (0, 0))
    copy.memory.bytes[copy.offset : copy.offset + 16] = 77
    with pytest.raises(ValueError, match="chunk 0 of row 0 .* overwritten"):
        pictures.swizzled_tile(copy)
    copy.memory.bytes[copy.offset : copy.offset + 32] = 77
    with pytest.raises(ValueError, match="equal: load an array made by pictures.numbered"):
        pictures.swizzled_tile(copy)


@pytest.mark.parametrize("at", [(-8, -3), (0, 0), (24, 17), (104, 0)])
def test_what_of_a_box_lies_outside_comes_as_zeros(at):
    dims, box = (48, 20), (32, 8)
    copy, tile, x = fetch(dims[::-1], box, 64, at)
    arrived = tile.reshape(-1, 16)[
        np.arange(len(tile) // 16).reshape(8, 4) ^ (np.arange(8)[:, None] // 2 % 4)
    ]
    arrived = arrived.reshape(8, -1).view(float16)
    padded = np.zeros((60, 200), float16)
    padded[20:40, 60:108] = x
    assert np.array_equal(arrived, padded[20 + at[1] :, 60 + at[0] :][:8, :32])

    picture = pictures.tma_box(copy)
    inside = [max(0, min(b, d - c) - max(0, -c)) for c, b, d in zip(at, box, dims, strict=True)]
    outside = 32 * 8 - inside[0] * inside[1]
    assert np.count_nonzero(arrived == 0) == outside
    assert f"{outside} of the box's 256 places are outside" in texts(picture)
    assert f"box at x = {at[0]}, y = {at[1]}" in texts(picture)
    # the drawn rectangles: tensor, box (hatched), what of the box is in the tensor
    drawn = [s for s in picture.shapes if s[0] == "rectangle"]
    tensor = next(s[1] for s in drawn if s[2] == "#eef2f6")
    cell = tensor[2] / dims[0]
    whole = next(s[1] for s in drawn if s[5] == FAULT)
    assert np.allclose(
        whole, [tensor[0] + at[0] * cell, tensor[1] + at[1] * cell, 32 * cell, 8 * cell]
    )
    filled = [s[1] for s in drawn if s[2] == COLOURS[2]][:-1]  # the last is the legend's
    if not inside[0] * inside[1]:
        assert filled == []
    else:
        assert np.allclose(
            filled,
            [
                [
                    tensor[0] + max(0, at[0]) * cell,
                    tensor[1] + max(0, at[1]) * cell,
                    inside[0] * cell,
                    inside[1] * cell,
                ]
            ],
        )
    assert all(
        x0 >= 0 and y0 >= 0 and x0 + w <= picture.width and y0 + h <= picture.height
        for x0, y0, w, h in (s[1] for s in drawn)
    )

    tile = pictures.swizzled_tile(copy)
    hatched = [s for s in tile.shapes if s[0] == "rectangle" and s[5]]
    # chunks of zeros
    assert len(hatched) == np.count_nonzero(~arrived.reshape(8, 4, 8).any(axis=2))


@cuda.jit
def fetch_3d(map_x, size):
    tile = cuda.shared.array(0, np.uint8, alignment=1024)
    bars = cuda.shared.array(1, np.uint64)
    bar = smem_u32(bars)
    if cuda.threadIdx.x == 0:
        mbarrier_init(bar, uint32(1))
        fence_barrier_init()
        for k in range(2):
            mbarrier_expect_tx(bar, uint32(size))
            tma_load_3d(smem_u32(tile), map_x, bar, uint32(8), uint32(k - 1), uint32(k + 5))
            mbarrier_wait(bar, uint32(k))


def test_a_box_of_pixels_over_an_image():
    x = pictures.numbered((7, 9, 16))  # height, width, channels
    size = 8 * 4 * 3 * 2
    film = emulator.trace(fetch_3d, 1, 32, tensor_map(x, (8, 4, 3), 0), size, shared=size)
    picture = pictures.tma_box(film.copies)
    said = texts(picture)
    assert "tensor 16 × 9 × 7, box 8 × 4 × 3, innermost dimension first" in said
    assert "box at x = -1, y = 5" in said and "box at x = 0, y = 6" in said
    assert said.count("8 in dimension 0") == 2
    # x from -1 to 2, y from 5 to 7 of 0 … 8, 0 … 6: a column and a row; then two rows
    assert (
        "6 of the box's 12 places are outside" in said
        and "8 of the box's 12 places are outside" in said
    )
    assert said[0] == "Tensor copies of map_x"


# Files --------------------------------------------------------------------------------------------

ALL = {
    "mma": pictures.mma,
    "ldmatrix": pictures.ldmatrix,
    "wgmma": pictures.wgmma_accumulator,
    "tile": pictures.swizzled_tile,
    "narrow tile": lambda: pictures.swizzled_tile(row_bytes=32, swizzle=32),
    "fragment": lambda: pictures.fragment(fragments.matrix_8x8, (8, 8), lane=3),
}


@pytest.mark.parametrize("name", [*list(ALL)[3:], *exhaustively(*list(ALL)[:3])])
def test_both_forms_can_be_opened_and_no_text_is_cut_off(name, tmp_path):
    picture = ALL[name]()
    picture.save(tmp_path / "a.svg")
    root = ElementTree.parse(tmp_path / "a.svg").getroot()
    assert root.tag == SVG + "svg" and root.get("width") == str(picture.width)
    picture.png(tmp_path / "a.png", scale=1)
    with Image.open(tmp_path / "a.png") as image:
        assert image.size == (picture.width, picture.height)
        pixels = np.asarray(image.convert("L"))
        assert len(image.getcolors(1 << 20)) > 8
    for border in (pixels[:, :4], pixels[:, -4:], pixels[:4], pixels[-4:]):
        assert (border == 255).all()  # a margin all around: nothing reaches the edge


def test_text_is_escaped_and_names_are_checked(tmp_path):
    picture = Picture(100, 40)
    picture.text(10, 10, "a < b & c", anchor="start")
    picture.rectangle(1, 1, 5, 5, "#ff0000", tip='"<x>"', hatch="#00ff00")
    assert texts(picture) == ["a < b & c"] and set(tips(picture)) == {'"<x>"'}
    with pytest.raises(ValueError, match="saved as .png or .svg"):
        picture.save(tmp_path / "a.jpg")
