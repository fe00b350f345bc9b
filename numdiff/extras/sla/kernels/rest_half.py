"""Sparse-linear attention forward, rung 3: S of all blocks of queries as one product on the tensor
cores.

WHAT IS NEW, AND WHY IT PAYS
    S_i is the sum of H_j over the blocks of keys that are not in C_i: a row of zeros and ones times
    a matrix of N rows, H, whose HS² columns are the numbers of a block. Rung 2 takes 2 · HS² bytes
    from the L2 cache for each of a list's blocks, a third of all that it takes; a product of
    matrices reads H once for 128 blocks of queries, and where that kernel was, 64 registers' worth
    of totals and conversions are gone: 16 warps a multiprocessor instead of 12.
    There are no totals of H, and nothing cancels: what is summed is what is left.
    The left side is in memory as bits, which the choice has as it writes its lists: 128 rows of N
    are in shared memory, and each lane makes its fragments of them, a pair of numbers with four
    integer instructions.
WHAT REMAINS
    N² · HS² multiply-adds, however few blocks are critical: less than what rung 2 does from a share
    of 2 % on.
LAUNCH
    grid (HS² / 64 · ceil(N / 128), heads, B), 4 warps, each of 32 blocks of queries; dynamic shared
    memory: two stages of 64 blocks of keys, 18 KiB, and the bits.
ACCURACY
    H is float16, zeros and ones are exact, sums float32, S is rounded once.
DETERMINISM
    one warp sums a number of S, over the blocks of keys in their order.
COST
    2 · N² · HS² FLOPs a head; H is read ceil(N / 128) times from the L2 cache, S written once.
SOURCE
    reference.py.
READ NEXT
    queries_half.py
"""

from ....device import cuda, float32, int32, uint32
from ....device.async_copy import cp_async_4_zfill, cp_async_commit, cp_async_wait, shared_address
from ....device.limits import WARP
from ....device.requires import requires
from ....device.specialise import specialise
from ....device.tensor_core import load_word, ones_half2
from ....kernels.attention.fragments import (
    add_products,
    by_row,
    clear,
    copy_out,
    fetch_rows,
    pitch_of,
    stash,
)
from .choice import head_number
from .tiles_half import THREADS

COLUMNS = 64  # of HS² numbers: a multiple for each head size
KEYS = 64  # blocks of keys of a stage
QUERIES = 128  # blocks of queries: two fragments of 16 a warp
PITCH = pitch_of(COLUMNS)
STAGE = KEYS * PITCH
BITS = 2 * STAGE  # where they begin


def words_of_row(N):
    """32-bit words of a row of bits: odd, so that eight rows are in eight banks."""
    return -(-N // KEYS) * (KEYS // 32) + 1


def shared_bytes(N):
    return BITS + 4 * QUERIES * words_of_row(N)


@cuda.jit(device=True, forceinline=True)
def fetch_bits(tiles, left, at, exist, given, row_bytes, t):
    """Start the copies of 128 rows of `given` words from left[at] on, of which `exist` exist; zeros
    for all others."""
    first, apart = int32(t // 8), int32(THREADS // 8)
    for w in range(int32(t % 8), int32(row_bytes // 4 - 1), int32(8)):
        to, start = tiles + int32(BITS + first * row_bytes + 4 * w), at + int32(first * given + w)
        for i in range(QUERIES // (THREADS // 8)):
            cp_async_4_zfill(
                to + int32(i * apart * row_bytes),
                left,
                start + int32(i * apart * given),
                int32(4) if first + i * apart < exist and w < given else int32(0),
            )


@cuda.jit(device=True, forceinline=True)
def pair_of(word, bit):
    """Two neighbouring bits as two numbers, zeros and ones."""
    two = uint32(word >> uint32(bit))
    apart = uint32(two & uint32(1) | uint32(two & uint32(2)) << uint32(15))
    return uint32(apart * uint32(ones_half2() & uint32(0xFFFF)))


@cuda.jit(device=True, forceinline=True)
def add_rows(sums, words, shared, at, row_bytes, tile, lane):
    """sums += 32 blocks of keys, times the bits of the warp's 32 rows. at: byte of the bits in the
    lane's first row; tile: address of the first block, and the lane's `by_row`"""
    bit = uint32(lane % 4 * 2)
    a = uint32(load_word(shared, at) >> bit)
    b = uint32(load_word(shared, int32(at + 8 * row_bytes)) >> bit)
    c = uint32(load_word(shared, int32(at + 16 * row_bytes)) >> bit)
    d = uint32(load_word(shared, int32(at + 24 * row_bytes)) >> bit)
    for k in range(2):
        words[0], words[1] = pair_of(a, 16 * k), pair_of(b, 16 * k)
        words[2], words[3] = pair_of(a, 16 * k + 8), pair_of(b, 16 * k + 8)
        words[4], words[5] = pair_of(c, 16 * k), pair_of(d, 16 * k)
        words[6], words[7] = pair_of(c, 16 * k + 8), pair_of(d, 16 * k + 8)
        add_products(sums, words, tile + int32(k * 16 * PITCH), 2, COLUMNS)


@requires("7.5")
def sla_rest_kernel_v3(H, left, S, N, size):
    shared = cuda.shared.array(0, "uint8", alignment=128)
    tiles, t = shared_address(shared), int32(cuda.threadIdx.x)
    lane, warp, head = int32(t % WARP), int32(t // WARP), head_number()
    rows = int32((N + QUERIES - 1) // QUERIES)
    first, column = (
        int32(cuda.blockIdx.x % rows * QUERIES),
        int32(cuda.blockIdx.x // rows * COLUMNS),
    )
    start = head * N * size + column
    fetch_rows(tiles, PITCH, H, start, size, int32(N), KEYS, COLUMNS, t, THREADS)
    row_bytes, given = int32(4 * ((N + KEYS - 1) // KEYS * (KEYS // 32) + 1)), int32((N + 31) // 32)
    fetch_bits(tiles, left, (head * N + first) * given, int32(N - first), given, row_bytes, t)
    cp_async_commit()
    sums, words = cuda.local.array(64, "float32"), cuda.local.array(8, "uint32")
    clear(sums, 64)
    own = int32(BITS + (warp * 32 + lane // 4) * row_bytes)
    stage = int32(0)
    for j in range(0, N, KEYS):
        cp_async_wait(0)
        cuda.syncthreads()  # the tile is there, and the other stage is no longer read
        if j + KEYS < N:
            ahead = int32(j + KEYS)
            fetch_rows(
                tiles + int32(STAGE - stage),
                PITCH,
                H,
                start + ahead * size,
                size,
                int32(N - ahead),
                KEYS,
                COLUMNS,
                t,
                THREADS,
            )
            cp_async_commit()
        for half in range(2):
            add_rows(
                sums,
                words,
                shared,
                int32(own + j // 32 * 4 + half * 4),
                row_bytes,
                tiles + int32(stage + half * 32 * PITCH + by_row(lane, PITCH)),
                lane,
            )
        stage = int32(STAGE - stage)
    cuda.syncthreads()  # the stages are no longer read: S takes their place
    share, patch, row = float32(1) / float32(N), int32(warp * 32 * PITCH), int32(first + warp * 32)
    for m in range(2):
        stash(
            shared, int32(patch + m * 16 * PITCH), PITCH, sums, m, COLUMNS // 8, share, share, lane
        )
    cuda.syncwarp()
    copy_out(
        shared,
        patch,
        PITCH,
        S,
        (head * N + row) * size + column,
        size,
        int32(N - row),
        32,
        COLUMNS,
        lane,
    )


def make_rest():
    return specialise(sla_rest_kernel_v3, launch_bounds=(THREADS, 4))
