# %% [markdown]
# # 1. Threads and memory
#
# You know Python and NumPy. After this chapter you know what a GPU does with a loop over an array,
# why the order of two indices can cost a factor of eight, and how to find a missing barrier. No GPU
# is needed: the emulator runs each kernel thread by thread and counts what it does. If this machine
# has an NVIDIA GPU, `run` uses it, too.
#
# The puzzles of `numdiff learn` go with the chapters. Each unit says which of them you can solve
# next.

# %%
import numpy as np
from numba import cuda

from numdiff.device import load4, store4
from numdiff.lessons.lab import banks, faults, film, measured, run, timeline, words

rng = np.random.default_rng(0)

# %% [markdown]
# ## A kernel is what one thread does
#
# NumPy computes `y = x * x` with a loop inside. A GPU has no loop: it starts one *thread* for each element. All threads
# execute the same function, the *kernel*, and each has its own index. On a GPU, `square[1, 32](x, y)` starts 1 *block*
# of 32 threads. Here `run(square, 1, 32, x, y)` does so in the emulator, and prints what the kernel costs.


# %%
@cuda.jit
def square(x, y):
    i = cuda.threadIdx.x  # the index of this thread in its block
    y[i] = x[i] * x[i]


x = rng.standard_normal(32, np.float32)
y = np.zeros_like(x)
costs = run(square, 1, 32, x, y)
print("right:", np.array_equal(y, x * x))

# %% [markdown]
# Read the line of numbers from left to right. The 32 threads are a *warp*: they execute an
# instruction together. The warp loads x[i] twice and stores y[i] once, which makes three *requests*
# to memory. Memory moves *transactions* of 32 bytes, and 32 neighbouring float32 are 128 bytes:
# four transactions for a request. A multiplication is one *FLOP*.
#
# A compiler would load x[i] once. Write `value = x[i]` to do so by hand: then the line has two
# requests.
#
# Puzzles: 1, 2

# %% [markdown]
# ## Blocks, and a guard
#
# A block has at most 1,024 threads. Larger arrays need several blocks, and the last one is rarely
# full. Here 2 blocks of 64 threads are 128 threads for 100 elements. `cuda.grid(1)` is the index in
# the whole grid.


# %%
@cuda.jit
def add(a, b, y):
    i = cuda.grid(1)
    y[i] = a[i] + b[i]


a, b = rng.standard_normal((2, 100), np.float32)
y = np.zeros_like(a)
faults(add, 2, 64, a, b, y)

# %% [markdown]
# On a GPU the last 28 threads would read and write memory that belongs to something else, and no
# message would say so. A *guard* is the cure: a thread without an element does nothing.


# %%
@cuda.jit
def add_guarded(a, b, y):
    i = cuda.grid(1)
    if i < y.size:
        y[i] = a[i] + b[i]


run(add_guarded, 2, 64, a, b, y)
print("right:", np.array_equal(y, a + b))

# %% [markdown]
# Puzzles: 3, 6

# %% [markdown]
# ## Memory moves 32 bytes, whether you use them or not
#
# This kernel copies every step-th element. It always loads 32 numbers. What it costs depends on
# where they are.


# %%
@cuda.jit
def gather(x, y, step):
    i = cuda.threadIdx.x
    y[i] = x[i * step]


x, y = rng.standard_normal(256, np.float32), np.zeros(32, np.float32)
for step in (1, 2, 8):
    costs = run(gather, 1, 32, x, y, step)
words(costs, "x[i * step]")

# %% [markdown]
# The picture shows the last run, step 8. Each lane of the warp uses one word of a transaction, and
# seven others are fetched for nothing. With step 1 the same request is four transactions. An access
# whose lanes read neighbouring words is *coalesced*.

# %% [markdown]
# ## The order of two indices
#
# A matrix is stored row by row. `cuda.grid(2)` gives two indices. The first one, x, is the one in
# which neighbouring threads differ, so x must be the column. Both kernels below are right. One of
# them moves eight times as much.


# %%
@cuda.jit
def double_rows(a, y):
    row, column = cuda.grid(2)  # x is the row: a warp walks down a column
    y[row, column] = a[row, column] + a[row, column]


@cuda.jit
def double_columns(a, y):
    column, row = cuda.grid(2)  # x is the column: a warp walks along a row
    y[row, column] = a[row, column] + a[row, column]


a = rng.standard_normal((32, 32), np.float32)
y = np.zeros_like(a)
slow = run(double_rows, (1, 4), (32, 8), a, y)
fast = run(double_columns, (1, 4), (32, 8), a, y)
print(f"{slow.transactions / fast.transactions:.0f} times as many transactions")
words(slow, "a[row, column]")

# %% [markdown]
# Puzzles: 4, 5

# %% [markdown]
# ## Shared memory, and a barrier that is missing
#
# The threads of a block have a small, fast memory in common: *shared memory*. Here a block of 64
# threads reverses 64 numbers. Each thread stores one number into `tile`, then loads another
# thread's. One line is missing.


# %%
@cuda.jit
def reverse_wrong(x, y):
    tile = cuda.shared.array(64, np.float32)
    t = cuda.threadIdx.x
    tile[t] = x[t]
    y[t] = tile[63 - t]


x, y = rng.standard_normal(64, np.float32), np.zeros(64, np.float32)
faults(reverse_wrong, 1, 64, x, y)
film(reverse_wrong, 1, 64, x, y)

# %% [markdown]
# Threads run in any order. Thread 0 reads tile[63], which thread 63 may not have written yet: the
# emulator says that it was never written. Where it was written, the read and the write are a
# *race*: nothing orders them. On a GPU the result of such a kernel is often right, and wrong on
# another day. The film shows your run step by step: move the slider, or press F to go to a fault.
# An arrow joins the two accesses of a race.
#
# `cuda.syncthreads()` is a *barrier*: no thread passes it before all threads of the block have
# arrived.


# %%
@cuda.jit
def reverse(x, y):
    tile = cuda.shared.array(64, np.float32)
    t = cuda.threadIdx.x
    tile[t] = x[t]
    cuda.syncthreads()
    y[t] = tile[63 - t]


run(reverse, 1, 64, x, y)
print("right:", np.array_equal(y, x[::-1]))
timeline(reverse, 1, 64, x, y)

# %% [markdown]
# In the timeline a row is a warp and time runs to the right. Both warps meet at the barrier.
#
# Puzzles: 7

# %% [markdown]
# ## Transpose: a tile makes both sides coalesced
#
# A transpose reads rows and writes columns, so one side is not coalesced. A tile in shared memory
# helps: a warp reads a row of the matrix into the tile, and after the barrier it takes a column of
# the tile and writes it as a row.


# %%
@cuda.jit
def transpose(a, y):
    column, row = cuda.grid(2)
    y[column, row] = a[row, column]


@cuda.jit
def transpose_tile(a, y):
    tile = cuda.shared.array((32, 32), np.float32)
    x = cuda.threadIdx.x
    for row in range(cuda.threadIdx.y, 32, 8):
        tile[row, x] = a[row, x]
    cuda.syncthreads()
    for row in range(cuda.threadIdx.y, 32, 8):
        y[row, x] = tile[x, row]


a, y = rng.standard_normal((32, 32), np.float32), np.zeros((32, 32), np.float32)
run(transpose, (1, 4), (32, 8), a, y)
costs = run(transpose_tile, 1, (32, 8), a, y)
print("right:", np.array_equal(y, a.T))
banks(costs, "tile[x, row]")

# %% [markdown]
# ## Bank conflicts
#
# The tile moved the problem. Shared memory has 32 *banks*, and each serves one word of 4 bytes at a
# time. Word w is in bank w modulo 32. A column of a tile with rows of 32 words is in one bank, so
# the warp waits 31 times: *bank conflicts*. A row of 33 words moves each row by one bank. One
# unused word in a row removes all conflicts.


# %%
@cuda.jit
def transpose_padded(a, y):
    tile = cuda.shared.array((32, 33), np.float32)
    x = cuda.threadIdx.x
    for row in range(cuda.threadIdx.y, 32, 8):
        tile[row, x] = a[row, x]
    cuda.syncthreads()
    for row in range(cuda.threadIdx.y, 32, 8):
        y[row, x] = tile[x, row]


costs = run(transpose_padded, 1, (32, 8), a, y)
print("right:", np.array_equal(y, a.T))
banks(costs, "tile[x, row]")

# %% [markdown]
# Puzzles: 22

# %% [markdown]
# ## Sixteen bytes a thread
#
# When every byte that is moved is also used, what remains is the number of instructions. `load4`
# loads four float32 as one request. A thread then computes four elements, and a quarter of the
# requests moves the same bytes.


# %%
@cuda.jit
def copy(x, y):
    i = cuda.grid(1)
    if i < y.size:
        y[i] = x[i]


@cuda.jit
def copy4(x, y):
    i = 4 * cuda.grid(1)
    if i < y.size:
        a, b, c, d = load4(x, i)
        store4(y, i, a, b, c, d)


x, y = rng.standard_normal(1024, np.float32), np.zeros(1024, np.float32)
run(copy, 4, 256, x, y)
run(copy4, 1, 256, x, y)
print("right:", np.array_equal(y, x))

# %% [markdown]
# Puzzles: 21

# %% [markdown]
# ## What it is worth on a real card
#
# The project's SiLU exists in both ways. Version 1 has one thread for an element, version 2 four
# elements for a thread. The stored figures below are those of one card. A percentage is the share
# of what the card's memory can do.

# %%
measured("silu_forward")
measured("add_forward")

# %% [markdown]
# ## Read the real thing
#
# You can now read `numdiff/kernels/elementwise.py`. It has the guard, one thread for an element in
# version 1, and 16-byte loads in version 2. `numdiff kernels check silu --counts` prints the counts
# of each of its lines.
