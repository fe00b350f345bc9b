# %% [markdown]
# # 3. The matmul ladder, up to wgmma
#
# A matrix product is where a GPU earns its price, and where the simplest kernel reaches a hundredth
# of what the card can do. This chapter climbs from that kernel to Hopper's `wgmma`, one idea a
# rung. The arithmetic stays the same. Each rung moves fewer bytes for it, or lets the bytes travel
# while the product is computed.

# %%
import numpy as np
from numba import cuda, float32

from numdiff import emulator
from numdiff.emulator import pictures
from numdiff.lessons.lab import (
    TensorMapArgument,
    bars,
    faults,
    measured,
    run,
    show,
    stored,
    timeline,
    words,
)

rng = np.random.default_rng(0)
N = 32
A, B = rng.standard_normal((2, N, N), np.float32)
C = np.zeros((N, N), np.float32)
climbed = {}  # rung -> what it cost


def climb(name, kernel, grid, block):
    C[:] = np.nan
    costs = climbed[name] = run(kernel, grid, block, A, B, C)
    print("right:", np.allclose(C, A @ B, atol=1e-4))
    return costs


# %% [markdown]
# ## Rung 0: one thread, one output
#
# C[row, column] is the sum of A[row, k] · B[k, column] over k. One thread for each element of C.
# With `row, column = cuda.grid(2)` the threads of a warp are in different rows, and at each k they
# read A down a column.


# %%
@cuda.jit
def by_rows(A, B, C):
    row, column = cuda.grid(2)
    total = float32(0)
    for k in range(A.shape[1]):
        total += A[row, k] * B[k, column]
    C[row, column] = total


costs = climb("by rows", by_rows, (1, 4), (32, 8))
words(costs, "A[row, k]")

# %% [markdown]
# Puzzles: 17

# %% [markdown]
# ## Rung 1: swap two names
#
# With `column, row = cuda.grid(2)` the warp is one row of C. All lanes read the same element of A,
# which is one transaction, and 32 neighbours of B, which are four. On the card below this swap
# alone is three times as fast.


# %%
@cuda.jit
def by_columns(A, B, C):
    column, row = cuda.grid(2)
    total = float32(0)
    for k in range(A.shape[1]):
        total += A[row, k] * B[k, column]
    C[row, column] = total


climb("by columns", by_columns, (1, 4), (32, 8))
measured("matmul_first_forward")

# %% [markdown]
# Puzzles: 18

# %% [markdown]
# ## Rung 2: tiles in shared memory
#
# Row 5 of A is used by all outputs of row 5, and each thread loads it again. So let a block of 16 ×
# 16 threads load a tile of A and a tile of B once, and let every thread take its products from
# there. Two barriers: no thread may read the tile before it is complete, and no thread may
# overwrite it before it has been read.


# %%
@cuda.jit
def tiles(A, B, C):
    a = cuda.shared.array((16, 16), np.float32)
    b = cuda.shared.array((16, 16), np.float32)
    x, y = cuda.threadIdx.x, cuda.threadIdx.y
    column, row = cuda.grid(2)
    total = float32(0)
    for start in range(0, A.shape[1], 16):
        a[y, x] = A[row, start + x]
        b[y, x] = B[start + y, column]
        cuda.syncthreads()  # the tiles are complete
        for k in range(16):
            total += a[y, k] * b[k, x]
        cuda.syncthreads()  # the tiles have been read
    C[row, column] = total


costs = climb("tiles", tiles, (2, 2), (16, 16))

# %% [markdown]
# Puzzles: 19

# %% [markdown]
# ## Rung 3: tiles in registers
#
# Global memory is quiet now, and shared memory is busy: two loads for each multiply-add. A thread
# that computes 4 × 4 outputs loads 4 numbers of A and 4 of B for 16 multiply-adds: half a load for
# each.


# %%
@cuda.jit
def registers(A, B, C):
    a = cuda.shared.array((32, 8), np.float32)
    # 32 columns; four rows of 40 words use different banks
    b = cuda.shared.array((8, 40), np.float32)
    total = cuda.local.array((4, 4), np.float32)
    x, y = cuda.threadIdx.x, cuda.threadIdx.y
    for i in range(4):
        for j in range(4):
            total[i, j] = float32(0)
    for start in range(0, A.shape[1], 8):
        for i in range(4):
            a[y + 8 * i, x] = A[y + 8 * i, start + x]
            b[y, x + 8 * i] = B[start + y, x + 8 * i]
        cuda.syncthreads()
        for k in range(8):
            b0, b1, b2, b3 = b[k, x], b[k, x + 8], b[k, x + 16], b[k, x + 24]
            for i in range(4):
                value = a[y + 8 * i, k]
                total[i, 0] += value * b0
                total[i, 1] += value * b1
                total[i, 2] += value * b2
                total[i, 3] += value * b3
        cuda.syncthreads()
    for i in range(4):
        for j in range(4):
            C[y + 8 * i, x + 8 * j] = total[i, j]


climb("registers", registers, 1, (8, 8))

# %% [markdown]
# Puzzles: 20

# %% [markdown]
# ## The number that decides: FLOPs for each byte
#
# A card does many FLOPs in the time in which a byte arrives: an H200 about 14 in float32 and 200
# with tensor cores, for each byte of its memory. A kernel with fewer FLOPs per byte waits for
# memory. Each rung so far raised this number. At 32 × 32 the ceiling is 5.3, when every element
# moves once. It grows with the size: at 8192 × 8192 it is 1,365.

# %%
print(
    "FLOPs per byte:",
    {name: round(costs.flops / costs.moved, 2) for name, costs in climbed.items()},
)
print("shared requests:", {name: costs.shared_requests for name, costs in climbed.items()})
bars(
    f"A product of {N} × {N}: bytes moved",
    {name: costs.moved for name, costs in climbed.items()} | {"floor": 3 * 4 * N * N},
    "bytes",
)

# %% [markdown]
# ## Rung 4: tensor cores, by mma
#
# A *tensor core* multiplies small matrices as one instruction. `mma_m16n8k16` is executed by a
# whole warp: 16 × 16 float16 times 16 × 8, with sums in float32. That is 4,096 FLOPs for one
# instruction of a warp, where a multiply-add of a warp has 64. Each lane holds a few elements of
# each matrix, its *fragment*. This loop multiplies 32 of k, in two steps.

# %%
from numdiff.device.tensor_core import load_word, mma_m16n8k16


@cuda.jit
def with_mma(A, B, C):  # A (16, 32) and B (8, 32) are float16, C (16, 8) is float32
    lane = cuda.threadIdx.x
    row, pair = lane // 4, lane % 4 * 2
    zero = float32(0)
    sums = zero, zero, zero, zero
    for k in range(0, 32, 16):
        i = row * 32 + k + pair  # a word holds two neighbouring float16
        a = load_word(A, i), load_word(A, i + 256), load_word(A, i + 8), load_word(A, i + 264)
        sums = mma_m16n8k16(a, (load_word(B, i), load_word(B, i + 8)), sums)
    C[row, pair], C[row, pair + 1] = sums[0], sums[1]
    C[row + 8, pair], C[row + 8, pair + 1] = sums[2], sums[3]


a16, b16 = (
    rng.integers(-4, 5, (16, 32)).astype(np.float16),
    rng.integers(-4, 5, (8, 32)).astype(np.float16),
)
c = np.zeros((16, 8), np.float32)
run(with_mma, 1, 32, a16, b16, c)
print("right:", np.allclose(c, a16.astype(np.float32) @ b16.astype(np.float32).T))
show(pictures.mma(emulator.trace(with_mma, 1, 32, a16, b16, c).products[0]))

# %% [markdown]
# The picture has the numbers of your first product. T5 is lane 5; the thick edges are all that it
# holds.
#
# Puzzles: 24, 25

# %% [markdown]
# ## Fragments from shared memory: ldmatrix
#
# A lane needs words from rows that are far apart. `ldmatrix` loads four matrices of 8 × 8 as one
# instruction: each lane gives the address of one row of 16 bytes, and gets back the words that
# `mma` wants. Eight rows are read at once. If they are 128 bytes apart, all of them are in the same
# banks: eight wavefronts instead of one.

# %%
show(pictures.swizzled_tile(rows=8, swizzle=0))

# %% [markdown]
# A *swizzle* stores chunk c of row r at place c XOR (r mod 8). Every row is still one line of 128
# bytes, and a column of chunks now touches all banks. The hardware's copies can write it, and its
# tensor cores can read it.

# %%
show(pictures.swizzled_tile(rows=8, swizzle=128))

# %% [markdown]
# Puzzles: 26

# %% [markdown]
# ## Copies that run while you compute: cp.async
#
# A load occupies a register until it arrives. `cp_async_16` copies 16 bytes from global to shared
# memory and returns at once. A *group* of copies is closed by a commit, and waited for later. Here
# the wait is missing.

# %%
from numdiff.device.async_copy import cp_async_16, cp_async_commit, cp_async_wait, shared_address


@cuda.jit
def copy_no_wait(x, y):
    tile = cuda.shared.array(128, np.float32, alignment=16)
    t = cuda.threadIdx.x
    cp_async_16(np.uint32(shared_address(tile) + 16 * t), x, 4 * t)
    cp_async_commit()
    cuda.syncthreads()
    for i in range(4):
        y[32 * i + t] = tile[32 * i + t]


@cuda.jit
def copy_wait(x, y):
    tile = cuda.shared.array(128, np.float32, alignment=16)
    t = cuda.threadIdx.x
    cp_async_16(np.uint32(shared_address(tile) + 16 * t), x, 4 * t)
    cp_async_commit()
    cp_async_wait(0)  # my copies have arrived,
    cuda.syncthreads()  # and so have those of all other threads
    for i in range(4):
        y[32 * i + t] = tile[32 * i + t]


x, y = rng.standard_normal(128, np.float32), np.zeros(128, np.float32)
faults(copy_no_wait, 1, 32, x, y)
run(copy_wait, 1, 32, x, y)
print("right:", np.array_equal(x, y))

# %% [markdown]
# Puzzles: 27

# %% [markdown]
# ## One thread copies a whole tile: TMA
#
# Hopper has an engine for tiles. One thread asks for a box of a matrix, and the bytes arrive in
# shared memory, with the swizzle. An *mbarrier* counts them: the thread says how many bytes it
# expects, and all others wait for that phase. The picture is read from the shared memory of your
# run.

# %%
from numdiff.device.mbarrier import (
    fence_barrier_init,
    mbarrier_expect_tx,
    mbarrier_init,
    mbarrier_wait,
    smem_u32,
)
from numdiff.device.tma import tma_load_2d


@cuda.jit
def copy_tile(map_x, y):  # the map describes a matrix of float16 and a box of 16 rows of 64
    tile = cuda.shared.array(16 * 64, np.float16, alignment=1024)
    barriers = cuda.shared.array(1, np.uint64)
    barrier, t = smem_u32(barriers), cuda.threadIdx.x
    if t == 0:
        mbarrier_init(barrier, 1)
        fence_barrier_init()
        mbarrier_expect_tx(barrier, 16 * 128)
        tma_load_2d(smem_u32(tile), map_x, barrier, 64, 0)  # from column 64 and row 0 on
    cuda.syncthreads()
    mbarrier_wait(barrier, 0)
    y[t] = tile[t]


x, y = pictures.numbered((16, 128)), np.zeros(64, np.float16)
run(copy_tile, 1, 64, TensorMapArgument(x, (64, 16)), y)
print("right:", np.array_equal(y.view(np.uint16), x[0, 64:].view(np.uint16)))
film = emulator.trace(copy_tile, 1, 64, TensorMapArgument(x, (64, 16)).emulated(), y)
show(pictures.swizzled_tile(film.copies[0], rows=8))

# %% [markdown]
# Puzzles: 28

# %% [markdown]
# ## Rung 5: wgmma, and the next tile on its way
#
# `wgmma` is executed by 128 threads, a *warpgroup*, and reads both matrices from shared memory, as
# TMA wrote them. It is asynchronous, too. Two stages of shared memory are enough for both to work
# at once: while the products of one stage are computed, TMA fills the other. `multiply` issues four
# wgmma, for 64 of k.

# %%
from numdiff.device.wgmma import make_multiply, make_wgmma_wait

multiply, wgmma_wait = make_multiply(16), make_wgmma_wait(16)
A_BYTES, STAGE = 64 * 128, (64 + 16) * 128
BYTES = 2 * STAGE


@cuda.jit(device=True)
def load_stage(base, barrier, map_a, map_b, step):
    mbarrier_expect_tx(barrier, STAGE)
    tma_load_2d(base, map_a, barrier, step * 64, 0)
    tma_load_2d(base + A_BYTES, map_b, barrier, step * 64, 0)


@cuda.jit
# A (64, 64 · steps), B (16, 64 · steps) float16; C (64, 16) float32
def double_buffer(map_a, map_b, C, steps):
    memory = cuda.shared.array(BYTES, np.uint8, alignment=1024)
    barriers = cuda.shared.array(2, np.uint64)
    acc = cuda.local.array(8, np.float32)
    base, full, t = smem_u32(memory), smem_u32(barriers), cuda.threadIdx.x
    if t == 0:
        mbarrier_init(full, 1)
        mbarrier_init(full + 8, 1)
        fence_barrier_init()
        load_stage(base, full, map_a, map_b, 0)
    cuda.syncthreads()
    for step in range(steps):
        now, following = step % 2, (step + 1) % 2
        if t == 0 and step + 1 < steps:
            load_stage(base + following * STAGE, full + 8 * following, map_a, map_b, step + 1)
        mbarrier_wait(full + 8 * now, step // 2 % 2)
        multiply(acc, base + now * STAGE, base + now * STAGE + A_BYTES, min(step, 1))
        wgmma_wait(acc)
        cuda.syncthreads()  # the stage has been read: the next load may overwrite it
    row, column = t // 32 * 16 + t % 32 // 4, t % 4 * 2
    for j in range(2):
        for i in range(4):
            C[row + i // 2 * 8, column + 8 * j + i % 2] = acc[4 * j + i]


# %% [markdown]
# ## Rung 5, run
#
# Look at the rows copies and tensor cores in the timeline: a copy begins before the product of the
# stage before.

# %%
a16, b16 = (
    rng.standard_normal((64, 256)).astype(np.float16),
    rng.standard_normal((16, 256)).astype(np.float16),
)
c = np.zeros((64, 16), np.float32)
problem = TensorMapArgument(a16, (64, 64)), TensorMapArgument(b16, (64, 16)), c, 4
run(double_buffer, 1, 128, *problem)
print("right:", np.allclose(c, a16.astype(np.float32) @ b16.astype(np.float32).T, atol=1e-3))
timeline(double_buffer, 1, 128, *problem)

# %% [markdown]
# Puzzles: 29, 30

# %% [markdown]
# ## What it is worth on a real card
#
# The same ladder in the project, at sizes that fill a card. The rungs in float32 are at 2048 ×
# 2048, those on tensor cores at 8192 × 8192.

# %%
for function in (
    "matmul_first_forward",
    "matmul_forward",
    "matmul_mma_level_forward",
    "matmul_level_forward",
):
    measured(function, "float32" if function == "matmul_forward" else "")
ladder = {
    f"{name} v{number}": row["tflops"]
    for name, function in (
        ("first", "matmul_first_forward"),
        ("mma", "matmul_mma_level_forward"),
        ("wgmma", "matmul_level_forward"),
    )
    for _, number, row in stored(function)
}
bars("The matmul ladder on one H200", ladder, "TFLOP/s")

# %% [markdown]
# ## Read the real thing
#
# `numdiff/kernels/matmul/` has one file for each rung: `first.py`, `tiled.py`, `register_tiles.py`,
# the three levels of `numdiff/extras/levels/mma/`, the five of
# `numdiff/extras/levels/wgmma/`. Your last kernel is level 2. The next idea, warps that only load
# and warps that only multiply, is puzzle 30. You can now read
# `numdiff/extras/levels/wgmma/producer_consumer.py`.
