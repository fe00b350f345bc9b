# %% [markdown]
# # 2. Reductions and softmax
#
# A sum needs threads that work together. This chapter goes from one thread that does everything to
# a softmax that reads each row twice instead of three times. On the way a barrier is missing, a sum
# changes with the order of the threads, and an exponential overflows.

# %%
import math

import numpy as np
from numba import cuda, float32

from numdiff import emulator
from numdiff.lessons.lab import bars, drawing, faults, film, measured, run, steps, timeline

rng = np.random.default_rng(0)
x = rng.standard_normal(64, np.float32)

# %% [markdown]
# ## A sum, one element after the other
#
# One thread can add 64 numbers. It takes 64 steps, each of which waits for the one before, and 63
# threads are idle. Each load is a request of its own and fetches 32 bytes for the 4 that it uses.


# %%
@cuda.jit
def sum_alone(x, y):
    if cuda.threadIdx.x == 0:
        total = float32(0)
        for i in range(x.size):
            total += x[i]
        y[0] = total


y = np.zeros(1, np.float32)
run(sum_alone, 1, 64, x, y)
print("right:", np.isclose(y[0], x.sum()))

# %% [markdown]
# ## A tree, and the barrier in its loop
#
# Half of the threads add the other half's numbers to their own. Then half of those do the same.
# After log2(64) = 6 steps one number is left. Each step reads what other threads wrote in the step
# before. So where does a barrier belong? This kernel has one before the loop.


# %%
@cuda.jit
def tree_wrong(x, y):
    sums = cuda.shared.array(64, np.float32)
    t = cuda.threadIdx.x
    sums[t] = x[t]
    cuda.syncthreads()
    half = 32
    while half > 0:
        if t < half:
            sums[t] += sums[t + half]
        half //= 2
    if t == 0:
        y[0] = sums[0]


faults(tree_wrong, 1, 64, x, y)

# %% [markdown]
# The race is in one line with itself: thread 0 reads the sum that another thread wrote in the step
# before. The barrier belongs into the loop, and not into the `if`: a barrier that only some threads
# reach never opens.


# %%
@cuda.jit
def tree(x, y):
    sums = cuda.shared.array(64, np.float32)
    t = cuda.threadIdx.x
    sums[t] = x[t]
    cuda.syncthreads()
    half = 32
    while half > 0:
        if t < half:
            sums[t] += sums[t + half]
        cuda.syncthreads()
        half //= 2
    if t == 0:
        y[0] = sums[0]


run(tree, 1, 64, x, y)
print("right:", np.isclose(y[0], x.sum()))
timeline(tree, 1, 64, x, y)

# %% [markdown]
# The timeline shows seven barriers. Warp 1 has nothing to add after the first step, and waits at
# every one of them.
#
# Puzzles: 9, 11, 12

# %% [markdown]
# ## A warp needs no barrier
#
# The 32 lanes of a warp can read each other's registers. `shfl_xor_sync(mask, value, d)` gives each
# lane the value of the lane whose number differs in bit d. Five such *shuffles* add 32 numbers,
# without shared memory and without a barrier. Two warps then need one exchange.

# %%
ALL = 0xFFFFFFFF  # the mask: all 32 lanes take part


@cuda.jit
def shuffles(x, y):
    parts = cuda.shared.array(2, np.float32)
    t = cuda.threadIdx.x
    value = x[t]
    for d in (16, 8, 4, 2, 1):
        value += cuda.shfl_xor_sync(ALL, value, d)
    if t % 32 == 0:
        parts[t // 32] = value
    cuda.syncthreads()
    if t == 0:
        y[0] = parts[0] + parts[1]


run(shuffles, 1, 64, x, y)
print("right:", np.isclose(y[0], x.sum()))
film(shuffles, 1, 64, x, y)

# %%
chains = {
    kernel.py_func.__name__: steps(kernel, 1, 64, x, y) for kernel in (sum_alone, tree, shuffles)
}
print(chains)
bars("One sum of 64 numbers", chains, "steps: lines, one after the other")

# %% [markdown]
# The bars are the length of each timeline: what has to happen one after the other, however many
# threads there are.
#
# Puzzles: 14, 15

# %% [markdown]
# ## The order of a sum changes its bits
#
# float32 keeps 24 bits, and every addition rounds. `cuda.atomic.add` adds to one number from all
# threads, in the order in which they come. The emulator can run threads forward, reversed or
# shuffled. A GPU has an order of its own each day.


# %%
@cuda.jit
def sum_atomic(x, y):
    cuda.atomic.add(y, 0, x[cuda.threadIdx.x])


for kernel in (sum_atomic, tree, shuffles):
    results = set()
    for order in emulator.ORDERS:
        y[0] = 0
        emulator.Emulator(order=order, seed=1).launch(kernel, 1, 64, x, y)
        results.add(float(y[0]))
    print(
        f"{kernel.py_func.__name__:11} {len(results)} result(s):",
        *(f"{r:.9f}" for r in sorted(results)),
    )

# %% [markdown]
# The tree and the shuffles fix who adds what, so they give the same bits every time. numdiff has no
# atomic float addition anywhere: two trainings on one machine give the same model, bit for bit.

# %% [markdown]
# ## Many blocks: two passes
#
# Blocks cannot wait for each other. So each block writes its partial sum to memory, and a second
# launch, of one block, adds them. A launch begins when the one before has ended, which is the
# barrier of the whole grid.


# %%
@cuda.jit
def partial_sums(x, parts):
    value = float32(0)
    # a stride of the whole grid: coalesced in each step
    for i in range(cuda.grid(1), x.size, cuda.gridsize(1)):
        value += x[i]
    for d in (16, 8, 4, 2, 1):
        value += cuda.shfl_xor_sync(ALL, value, d)
    if cuda.threadIdx.x == 0:
        parts[cuda.blockIdx.x] = value


many = rng.standard_normal(4000, np.float32)
parts, y = np.zeros(8, np.float32), np.zeros(1, np.float32)
run(partial_sums, 8, 32, many, parts)
run(partial_sums, 1, 32, parts, y)
print("right:", np.isclose(y[0], many.sum(), atol=1e-3))

# %% [markdown]
# Puzzles: 23

# %% [markdown]
# ## Softmax: why the maximum comes first
#
# Softmax turns a row of numbers into shares that add up to 1: e^x / Σ e^x. As written it fails
# early. float32 ends at 3.4e38, and e^89 is larger. Multiplying both sides by e^-max changes
# nothing, and then no exponent is above 0.

# %%
row = np.array([1, 2, 100], np.float32)
with np.errstate(over="ignore", invalid="ignore"):
    print("as written:", np.exp(row) / np.exp(row).sum())
safe = np.exp(row - row.max())
print("with the maximum:", (safe / safe.sum()).round(3))

# %% [markdown]
# ## Three passes over a row
#
# One warp for each row. Lane t sees elements t, t + 32, …: neighbouring lanes read neighbouring
# elements. The first pass finds the maximum, the second the sum, the third writes. Every pass reads
# the whole row.


# %%
@cuda.jit
def softmax3(x, y):
    row, lane = cuda.blockIdx.x, cuda.threadIdx.x
    largest = float32(-3.4e38)
    for i in range(lane, x.shape[1], 32):
        largest = max(largest, x[row, i])
    for d in (16, 8, 4, 2, 1):
        largest = max(largest, cuda.shfl_xor_sync(ALL, largest, d))
    total = float32(0)
    for i in range(lane, x.shape[1], 32):
        total += math.exp(x[row, i] - largest)
    for d in (16, 8, 4, 2, 1):
        total += cuda.shfl_xor_sync(ALL, total, d)
    for i in range(lane, x.shape[1], 32):
        y[row, i] = math.exp(x[row, i] - largest) / total


a = rng.standard_normal((4, 256), np.float32)
y = np.zeros_like(a)
e = np.exp(a - a.max(1, keepdims=True))
wanted = e / e.sum(1, keepdims=True)
three = run(softmax3, 4, 32, a, y)
print("right:", np.allclose(y, wanted, rtol=1e-5))

# %% [markdown]
# Puzzles: 13

# %% [markdown]
# ## The online softmax: maximum and sum in one pass
#
# Walk along the row with two numbers: m, the maximum so far, and l, the sum of e^(x - m) so far.
# When a larger m comes, multiply l by e^(old m - new m). At the end l is the sum for the true
# maximum. The plot shows m and l for one row.

# %%
ms, ls, m, l = [], [], -np.inf, 0.0
for value in a[0]:
    larger = max(m, value)
    l, m = l * np.exp(m - larger) + np.exp(value - larger), larger
    ms.append(m)
    ls.append(l)
print("the same sum:", np.isclose(l, e[0].sum()))


def draw(axes):
    axes.plot(a[0], ".", color="#b0cce8", label="x")
    axes.plot(ms, color="#165ea6", label="m, the maximum so far")
    right = axes.twinx()
    right.plot(ls, color="#d9622b", label="l, the sum so far (right)")
    right.set_ylim(0)
    axes.legend(
        *[
            sum(pair, [])
            for pair in zip(
                axes.get_legend_handles_labels(), right.get_legend_handles_labels(), strict=True
            )
        ],
        loc="upper center",
        bbox_to_anchor=(0.5, -0.15),
        ncol=3,
    )


drawing("The online softmax of one row", "element", "x and m", draw)

# %% [markdown]
# Where m jumps, l falls: what was summed before counts less from there on. Chapter 5 needs this
# trick for attention.

# %% [markdown]
# ## The same in a kernel
#
# Each lane keeps its own m and l. Two lanes join theirs as a lane joins a new element: the smaller
# m is raised.


# %%
@cuda.jit
def softmax2(x, y):
    row, lane = cuda.blockIdx.x, cuda.threadIdx.x
    m, l = float32(-3.4e38), float32(0)
    for i in range(lane, x.shape[1], 32):
        value = x[row, i]
        larger = max(m, value)
        l = l * math.exp(m - larger) + math.exp(value - larger)
        m = larger
    for d in (16, 8, 4, 2, 1):
        other_m, other_l = cuda.shfl_xor_sync(ALL, m, d), cuda.shfl_xor_sync(ALL, l, d)
        larger = max(m, other_m)
        l = l * math.exp(m - larger) + other_l * math.exp(other_m - larger)
        m = larger
    for i in range(lane, x.shape[1], 32):
        y[row, i] = math.exp(x[row, i] - m) / l


y[:] = 0
two = run(softmax2, 4, 32, a, y)
print("right:", np.allclose(y, wanted, rtol=1e-5))
print(
    f"transactions: {three.transactions} in three passes, {two.transactions} in two: {two.moved / three.moved:.0%}"
)
bars(
    "Softmax of 4 rows of 256",
    {
        "three passes": three.moved,
        "two passes": two.moved,
        "floor: read once, write once": two.needed,
    },
    "bytes moved",
)

# %% [markdown]
# Puzzles: 16

# %% [markdown]
# ## What it is worth on a real card
#
# Version 1 is a block for each row, with trees in shared memory. Version 2 is a warp for each row,
# with shuffles and the online softmax. Percentages are shares of what the card's memory can do.

# %%
measured("softmax_forward")
measured("global_norm")

# %% [markdown]
# ## Read the real thing
#
# `numdiff/kernels/reduce/trees.py` has the trees and the partial sums. You can now read
# `numdiff/kernels/softmax.py` to its end, and its backward, too.
