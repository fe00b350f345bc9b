"""Matmul in float16, rung 5: the tensor cores of every GPU from sm_80 on.

WHAT IS NEW, AND WHY IT PAYS
    mma.sync: a warp multiplies 16 × 16 by 16 × 8 in one instruction, 2,048 multiply-adds where rung 4 spends 64
        instructions of 32 (one a lane). Accumulators stay float32, operands are float16: half the bytes as well.
    ldmatrix: loads the fragments that mma.sync needs and spreads them over the lanes as it needs them; `.trans`
        transposes an operand that is contiguous along m or n. So no case of transposes needs a copy.
    cp.async in STAGES stages: tiles go from global to shared memory without passing through registers, two of them in
        flight while a third is multiplied.
A BLOCK'S TILE is 128 × 128 with eight warps of 64 × 32, or 64 × 64 with four of 32 × 32 where C is small, and steps
    along K by 32. For each 16 of k a large warp loads 4 + 2 fragments for 16 mma.
TILES IN SHARED MEMORY, and their swizzles: eight addresses of an ldmatrix must fall into eight different groups of four
    banks.
        along k          rows of 32 k, 64 bytes: chunk c (16 bytes) of row r lies at c ^ (r / 2 % 4)
        along m or n     a row for each k, of the tile's 64 or 128 columns: chunk c of row k lies at c ^ (k % 8)
EPILOGUE
    alpha · accumulator + bias + residual in float32. float16: rounded, and written by way of a patch of shared memory
    that each warp has to itself, so that four lanes write 64 neighbouring bytes. float32: pairs of lanes exchange
    halves and write 16 bytes each; a slice of a split K writes its partial sums in this way, too, and
    ../second_pass.py adds them up; with a factor or a bias `add_partials_kernel`.
LAUNCH
    grid (tiles of C, slices of K, batch), 256 or 128 threads, 48 or 24 KiB of shared memory: two blocks of 256 on a
    multiprocessor that has 100 KiB.
NEEDS
    contiguous extents that are multiples of 8: every chunk is then aligned, and wholly inside or outside.
DETERMINISM
    one warp sums each output in the order of k; slices are added in their order.
SOURCE
    PTX ISA, sections 9.7.14.5 (mma, ldmatrix) and 9.7.9.25.3 (cp.async).
READ NEXT
    hopper/, where TMA and instructions up to 128 times as large take over.
"""
import itertools
from typing import NamedTuple

import numpy as np

from ...device import DeviceArray, cuda, empty, float32, int32, launch, load4, opaque, uint32
from ...device.async_copy import cp_async_16_zfill, cp_async_commit, cp_async_wait, shared_address
from ...device.half import in_bfloat16
from ...device.limits import FULL_MASK
from ...device.requires import requires
from ...device.specialise import Constant, Variants, specialise
from ...device.tensor_core import (
    ldmatrix_x4,
    ldmatrix_x4_trans,
    load_word,
    load_words4,
    mma_m16n8k16_into,
    pack_half2,
    store_word,
    store_words4,
    unpack_half2,
)
from ...dtypes import is_half
from ..second_pass import Sum, add_parts
from .operands import Epilogue
from .vectorised import write_four

BK = 32  # of K in a tile: two mma deep
STAGES = 3
PENDING = STAGES - 2  # groups that may be on their way while a tile is multiplied
TILES = {(128, 128): (2, 4), (64, 64): (2, 2)}  # tile of C -> warps along m and n
COLUMNS = 32  # of C for each warp
PITCH = COLUMNS * 2 + 16  # bytes of a row of a warp's patch: eight rows start in eight different groups of banks
PARTIALS_BLOCK = 256
PLANES = 4 * PARTIALS_BLOCK  # shared elements: four planes
MANY_PARTIALS = 8  # slices from which the warps of a block share them: one thread's loads would come one by one

# Of each kernel: the tile of C, the case of transposes (across: contiguous along m or n), the kind of result
TILE_M, TILE_N, A_ACROSS, B_ACROSS, HALF = Constant(), Constant(), Constant(), Constant(), Constant()
THREADS = Constant(lambda TILE_M, TILE_N: threads_of((TILE_M, TILE_N)))
WARPS_N = Constant(lambda TILE_M, TILE_N: TILES[TILE_M, TILE_N][1])
ROWS = Constant(lambda TILE_M, TILE_N: TILE_M // TILES[TILE_M, TILE_N][0])  # of a warp, and accumulators of a thread
FRAGMENTS = Constant(lambda ROWS: ROWS // 16)
A_BYTES, B_BYTES = Constant(lambda TILE_M: TILE_M * BK * 2), Constant(lambda TILE_N: TILE_N * BK * 2)
B_FIRST = Constant(lambda A_BYTES: STAGES * A_BYTES)  # all stages of A, then those of B


class Operand(NamedTuple):
    """A block's part of A or B: where the matrix starts, the first row of the tile (B: column), how many there are."""

    start: int
    first: int
    extent: int


class Extents(NamedTuple):
    """Of C."""

    M: int
    N: int


class Place(NamedTuple):
    """Where a warp's outputs go: where C begins, its first row and column there, the byte of its patch."""

    start: int
    row: int
    column: int
    patch: int


# Tiles in shared memory -----------------------------------------------------------------------------------------------

@cuda.jit(device=True, forceinline=True)
def place_along_k(row, chunk):
    """Byte of a chunk in a tile whose rows run along k."""
    return int32(row * 64 + ((chunk ^ (row >> 1 & 3)) << 4))


@cuda.jit(device=True, forceinline=True)
def place_across(k, chunk, row_bytes):
    """Byte of a chunk in a tile with a row for each k."""
    return int32(k * row_bytes + ((chunk ^ (k & 7)) << 4))


@cuda.jit(device=True, forceinline=True)
def fetch_tile(tile, x, start, first, k, extent, k_end, K, rows, across, t, threads):
    """Start this thread's two copies of an operand's tile: rows first … of `extent`, from k on; zeros beyond the ends.

    start: of the matrix in x; across: the matrix is (K, extent) and not (extent, K)
    """
    for i in range(2):
        e = int32(t + i * threads)
        if across:
            row, chunk = int32(e // (rows // 8)), int32(e % (rows // 8))
            inside = k + row < k_end and first + 8 * chunk < extent
            cp_async_16_zfill(tile + place_across(row, chunk, rows * 2), x,
                              start + (k + row) * extent + first + 8 * chunk, int32(16) if inside else int32(0))
        else:
            row, chunk = int32(e // 4), int32(e % 4)
            inside = first + row < extent and k + 8 * chunk < k_end
            cp_async_16_zfill(tile + place_along_k(row, chunk), x, start + (first + row) * K + k + 8 * chunk,
                              int32(16) if inside else int32(0))


@cuda.jit(device=True, forceinline=True)
def load_a(tile, row, step, across, rows, lane):
    """The fragment of A at `row` of a tile and its k 16 · step …"""
    if across:
        k = int32(16 * step + lane % 8 + lane // 16 * 8)
        return ldmatrix_x4_trans(tile + place_across(k, (row >> 3) + lane // 8 % 2, rows * 2))
    return ldmatrix_x4(tile + place_along_k(row + lane % 16, 2 * step + lane // 16))


@cuda.jit(device=True, forceinline=True)
def load_b(tile, column, step, across, columns, lane):
    """Two fragments of B, at `column` of a tile and 8 further, in four words."""
    if across:
        k = int32(16 * step + lane % 8 + lane // 8 % 2 * 8)
        return ldmatrix_x4_trans(tile + place_across(k, (column >> 3) + lane // 16, columns * 2))
    return ldmatrix_x4(tile + place_along_k(column + lane % 8 + lane // 16 * 8, 2 * step + lane // 8 % 2))


# Epilogues ------------------------------------------------------------------------------------------------------------

@cuda.jit(device=True, forceinline=True)
def write_fragment(c, start, a0, a1, a2, a3, row, column, lane, shape, bias, epilogue):
    """A fragment's four accumulators as float32. A lane has two of `row` and two of the row 8 below, so it gives one
    pair to its neighbour and gets another: even lanes write 16 bytes of `row`, odd ones of the row below.

    row: of the lane; column: where the fragment's 8 columns begin; shape: has M and N
    """
    even = lane & 1 == 0
    got0 = cuda.shfl_xor_sync(FULL_MASK, a2 if even else a0, 1)
    got1 = cuda.shfl_xor_sync(FULL_MASK, a3 if even else a1, 1)
    v0, v1, v2, v3 = a0, a1, got0, got1
    if not even:
        v0, v1, v2, v3 = got0, got1, a2, a3
        row = int32(row + 8)
    n = int32(column + lane % 4 // 2 * 4)
    if row < shape.M:
        write_four(c, start + row * shape.N + n, v0, v1, v2, v3, n, shape.N, bias, epilogue)


@cuda.jit(device=True, forceinline=True)
def write_float(c, start, accumulators, row, column, lane, shape, bias, epilogue):
    """The warp's outputs as float32; row, column: of its first."""
    for i in range(FRAGMENTS):
        for j in range(4):
            s, m = 16 * i + 4 * j, int32(row + 16 * i + lane // 4)
            write_fragment(c, start, accumulators[s], accumulators[s + 1], accumulators[s + 2], accumulators[s + 3], m,
                           int32(column + 8 * j), lane, shape, bias, epilogue)


@cuda.jit(device=True, forceinline=True)
def stash_half(tiles, accumulators, i, place, lane, shape, bias, residual, epilogue, has_residual):
    """The warp's rows 16 · i …: scaled and added to, rounded to float16, into its patch of shared memory."""
    for j in range(4):
        n = int32(place.column + 8 * j + lane % 4 * 2)
        b0 = b1 = float32(0)
        if epilogue.has_bias and n < shape.N:
            b0, b1 = bias[uint32(n)], bias[uint32(n + 1)]
        for half in range(2):
            s, m = 16 * i + 4 * j + 2 * half, int32(place.row + 16 * i + 8 * half + lane // 4)
            v0, v1 = epilogue.alpha * accumulators[s] + b0, epilogue.alpha * accumulators[s + 1] + b1
            if has_residual and m < shape.M and n < shape.N:
                r0, r1 = unpack_half2(load_word(residual, place.start + m * shape.N + n))
                v0, v1 = v0 + r0, v1 + r1
            at = place.patch + (16 * i + 8 * half + lane // 4) * PITCH + 16 * j + lane % 4 * 4
            store_word(tiles, at, pack_half2(v0, v1))


@cuda.jit(device=True, forceinline=True)
def write_half(c, tiles, accumulators, place, lane, shape, bias, residual, epilogue, has_residual):
    """The warp's outputs as float16, through its patch of shared memory, which nobody may use any more."""
    # not in a loop: accumulators stay in registers only under constant indices
    stash_half(tiles, accumulators, 0, place, lane, shape, bias, residual, epilogue, has_residual)
    stash_half(tiles, accumulators, 1, place, lane, shape, bias, residual, epilogue, has_residual)
    if FRAGMENTS > 2:
        stash_half(tiles, accumulators, 2, place, lane, shape, bias, residual, epilogue, has_residual)
        stash_half(tiles, accumulators, 3, place, lane, shape, bias, residual, epilogue, has_residual)
    cuda.syncwarp()
    for i in range(ROWS // 8):  # 32 lanes, 8 rows of 4 chunks
        m, n = int32(place.row + 8 * i + lane // 4), int32(place.column + lane % 4 * 8)
        if m < shape.M and n < shape.N:
            w = load_words4(tiles, place.patch + (8 * i + lane // 4) * PITCH + lane % 4 * 16)
            store_words4(c, place.start + m * shape.N + n, w[0], w[1], w[2], w[3])


# The kernel -----------------------------------------------------------------------------------------------------------

@cuda.jit(device=True, forceinline=True)
def fetch_tiles(a, b, a_tile, b_tile, of_a, of_b, k, k_end, K, t):
    """Start this thread's copies of both tiles at k, and make them a group."""
    fetch_tile(a_tile, a, of_a.start, of_a.first, k, of_a.extent, k_end, K, TILE_M, A_ACROSS, t, THREADS)
    fetch_tile(b_tile, b, of_b.start, of_b.first, k, of_b.extent, k_end, K, TILE_N, B_ACROSS, t, THREADS)
    cp_async_commit()


@cuda.jit(device=True, forceinline=True)
def multiply_tiles(accumulators, a_tile, b_tile, warp_row, warp_column, lane):
    """accumulators += the warp's part of one tile of A times one of B: BK of k."""
    for step in range(BK // 16):
        left = load_b(b_tile, warp_column, step, B_ACROSS, TILE_N, lane)
        right = load_b(b_tile, warp_column + 16, step, B_ACROSS, TILE_N, lane)
        for i in range(FRAGMENTS):
            a4 = load_a(a_tile, warp_row + 16 * i, step, A_ACROSS, TILE_M, lane)
            mma_m16n8k16_into(accumulators, 16 * i, a4, (left[0], left[1]))
            mma_m16n8k16_into(accumulators, 16 * i + 4, a4, (left[2], left[3]))
            mma_m16n8k16_into(accumulators, 16 * i + 8, a4, (right[0], right[1]))
            mma_m16n8k16_into(accumulators, 16 * i + 12, a4, (right[2], right[3]))


@requires("8.0")
def gemm_mma(a, b, c_half, c_float, bias, residual, M, N, K, slice_length, alpha, has_bias, has_residual, accumulate):
    tiles = cuda.shared.array(0, "uint8", alignment=128)
    a_tiles = shared_address(tiles)
    b_tiles = a_tiles + B_FIRST
    t = int32(cuda.threadIdx.x)
    lane, warp = int32(t % 32), int32(t // 32)
    tiles_n = (N + TILE_N - 1) // TILE_N
    first_row, first_column = int32(cuda.blockIdx.x // tiles_n * TILE_M), int32(cuda.blockIdx.x % tiles_n * TILE_N)
    warp_row, warp_column = int32(warp // WARPS_N * ROWS), int32(warp % WARPS_N * COLUMNS)
    batch = cuda.blockIdx.z
    of_a, of_b = Operand(batch * (M * K), first_row, M), Operand(batch * (N * K), first_column, N)
    c_start = batch * (M * N)
    k = int32(cuda.blockIdx.y * slice_length)
    k_end = int32(min(int32(k + slice_length), int32(K)))
    accumulators = cuda.local.array(ROWS, "float32")
    for i in range(ROWS):
        accumulators[i] = float32(0)

    for s in range(STAGES - 1):
        fetch_tiles(a, b, a_tiles + s * A_BYTES, b_tiles + s * B_BYTES, of_a, of_b, int32(k + s * BK), k_end, K, t)
    stage = int32(0)
    while k < k_end:
        cp_async_wait(PENDING)  # this thread's part of the tile at k is there
        cuda.syncthreads()  # so is everybody's, and nobody reads the tile before it any more
        ahead = int32(stage + STAGES - 1 if stage == 0 else stage - 1)
        fetch_tiles(a, b, a_tiles + ahead * A_BYTES, b_tiles + ahead * B_BYTES, of_a, of_b,
                    int32(k + (STAGES - 1) * BK), k_end, K, t)
        multiply_tiles(accumulators, a_tiles + stage * A_BYTES, b_tiles + stage * B_BYTES, warp_row, warp_column, lane)
        stage = int32(stage + 1)
        if stage == STAGES:
            stage = int32(0)
        k = int32(k + BK)

    t_end = opaque(t)
    lane, warp = int32(t_end % 32), int32(t_end // 32)
    row = int32(first_row + warp // WARPS_N * ROWS)  # of the warp's first output
    column = int32(first_column + warp % WARPS_N * COLUMNS)
    shape, epilogue = Extents(M, N), Epilogue(alpha, has_bias, accumulate)
    if HALF:
        cp_async_wait(0)
        cuda.syncthreads()  # the tiles are no longer read, nor written: their memory is the warps' patches now
        place = Place(c_start, row, column, int32(warp * (ROWS * PITCH)))
        write_half(c_half, tiles, accumulators, place, lane, shape, bias, residual, epilogue, has_residual)
    else:
        c_start += cuda.blockIdx.y * (M * N)  # a slice's partial sums
        write_float(c_float, c_start, accumulators, row, column, lane, shape, bias, epilogue)


def make_kernel(tile, a_across, b_across, half):
    """The kernel for one tile, one case of transposes (across: contiguous along m or n) and one kind of result."""
    case = f"{'t' if a_across else 'n'}{'n' if b_across else 't'}"
    return specialise(gemm_mma, name=f"gemm_mma_{tile[0]}x{tile[1]}_{case}_{'half' if half else 'float'}",
                      launch_bounds=(threads_of(tile), 2), TILE_M=tile[0], TILE_N=tile[1], A_ACROSS=a_across,
                      B_ACROSS=b_across, HALF=half)


def threads_of(tile):
    return 32 * TILES[tile][0] * TILES[tile][1]


KERNELS = Variants(itertools.product(TILES, (False, True), (False, True), (False, True)),
                   lambda key: make_kernel(*key))


def shared_bytes(tile):
    return STAGES * (tile[0] + tile[1]) * BK * 2


def unused(x):
    """A float32 array for an argument that a kernel does not read: the memory of `x`."""
    return DeviceArray(x.backend, (x.nbytes // 4,), np.float32, x.memory, x.offset)


def launch_mma(a, b, c, batch, M, N, K, transpose_a, transpose_b, bias, residual, alpha, accumulate, tile, slices):
    """As `launch_hopper`, for `batch` matrices; several slices of K only for one of float32."""
    half = is_half(c.dtype)
    slice_length = -(-K // (slices * BK)) * BK
    slices = -(-K // slice_length)
    flat_a, flat_b, nothing = a.reshape(-1), b.reshape(-1), unused(a)
    biases, residuals = nothing if bias is None else bias, flat_a if residual is None else residual.reshape(-1)
    end = float(alpha), int(bias is not None)
    target = nothing if half else c.reshape(-1)
    if slices > 1:
        target = empty((slices * M * N,), np.float32, like=a)
    kernel = in_bfloat16(KERNELS[tile, transpose_a, not transpose_b, half], a.dtype)
    launch(kernel, (-(-M // tile[0]) * -(-N // tile[1]), slices, batch),
           threads_of(tile), flat_a, flat_b, c.reshape(-1) if half else flat_a, target, biases, residuals, M, N, K,
           slice_length, *(end if slices == 1 else (1.0, 0)), int(residual is not None),
           int(accumulate and slices == 1), shared=shared_bytes(tile))
    if slices > 1:
        add_partials(target, c, slices, biases, *end, accumulate)


# The second pass of a split sum ---------------------------------------------------------------------------------------

@cuda.jit
def add_partials_kernel(partial, c, bias, slices, MN, N, epilogue):
    """Four neighbouring outputs a thread: their slices, in order, then what `write_output` does."""
    i = (cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x) * 4
    if i < MN:
        v0, v1, v2, v3 = load4(partial, i)
        for s in range(1, slices):
            p0, p1, p2, p3 = load4(partial, i + s * MN)
            v0, v1, v2, v3 = v0 + p0, v1 + p1, v2 + p2, v3 + p3
        write_four(c, i, v0, v1, v2, v3, int32(i % N), N, bias, epilogue)


@cuda.jit
def add_many_partials_kernel(partial, c, bias, slices, MN, N, epilogue):
    """The same for small results of many slices: the eight warps of a block share them, for the same 128 outputs.

    Warp w adds slices w, w + 8, …; then the first adds up the warps' sums, in their order.
    """
    sums = cuda.shared.array(PLANES, float32)  # in four planes: a warp touches neighbouring words
    t = cuda.threadIdx.x
    i = (cuda.blockIdx.x * 32 + t % 32) * 4
    v0 = v1 = v2 = v3 = float32(0)
    if i < MN:
        for s in range(t // 32, slices, PARTIALS_BLOCK // 32):
            p0, p1, p2, p3 = load4(partial, i + s * MN)
            v0, v1, v2, v3 = v0 + p0, v1 + p1, v2 + p2, v3 + p3
    sums[t], sums[PARTIALS_BLOCK + t] = v0, v1
    sums[2 * PARTIALS_BLOCK + t], sums[3 * PARTIALS_BLOCK + t] = v2, v3
    cuda.syncthreads()
    if t < 32 and i < MN:
        for w in range(32 + t, PARTIALS_BLOCK, 32):
            v0, v1 = v0 + sums[w], v1 + sums[PARTIALS_BLOCK + w]
            v2, v3 = v2 + sums[2 * PARTIALS_BLOCK + w], v3 + sums[3 * PARTIALS_BLOCK + w]
        write_four(c, i, v0, v1, v2, v3, int32(i % N), N, bias, epilogue)


def add_partials(partial, c, slices, bias, alpha, has_bias, accumulate, row_sums=None, row_parts=0):
    """c = or += alpha · the sum of `slices` partial results + bias, in float32; row_sums += that of its `row_parts`,
    which come after the others."""
    sums = []
    if alpha == 1 and not has_bias:
        sums.append(Sum(partial[:slices * c.size], slices, c, accumulate))
    else:
        kernel, outputs = add_partials_kernel, 4 * PARTIALS_BLOCK
        if slices >= MANY_PARTIALS:
            kernel, outputs = add_many_partials_kernel, 4 * 32
        launch(kernel, -(-c.size // outputs), PARTIALS_BLOCK, partial, c.reshape(-1), bias, slices, c.size,
               c.shape[-1], Epilogue(alpha, has_bias, int(accumulate)))
    if row_sums is not None:
        sums.append(Sum(partial[slices * c.size:], row_parts, row_sums, True))
    if sums:
        add_parts(sums)
