# %% [markdown]
# # 5. Attention without the matrix
#
# In attention every token looks at every other. For T tokens that is a matrix of T × T numbers, and
# a transformer has one for each head of each layer. This chapter computes the same result and never
# has that matrix. The trick is the online softmax of chapter 2, extended by one array.

# %%
import math

import numpy as np
from numba import cuda, float32

from numdiff.lessons.lab import bars, drawing, faults, measured, run

rng = np.random.default_rng(0)
T, D = 64, 16  # tokens, and numbers in each query, key and value
q, k, v = rng.standard_normal((3, T, D), np.float32)
q[:8] *= 4  # some queries that prefer few keys
SCALE = np.float32(1 / math.sqrt(D))

# %% [markdown]
# ## The definition, and its size
#
# Each query is compared with all keys by a dot product. Softmax turns a row of such scores into
# weights, and the output is the weighted mean of the values. The matrix of the weights is T × T.
# The sizes below are those of one head of 64, in float16.


# %%
def attention(q, k, v):
    scores = q @ k.T * SCALE
    weights = np.exp(scores - scores.max(1, keepdims=True))
    weights /= weights.sum(1, keepdims=True)
    return weights @ v, weights


wanted, weights = attention(q, k, v)
for tokens in (256, 1024, 4096, 16384):
    print(
        f"{tokens:6,} tokens: q, k, v {tokens * 384 / 2**20:5.2f} MiB, the matrix {tokens**2 * 2 / 2**20:6.2f}"
    )


def draw(axes):
    axes.imshow(weights, cmap="viridis", interpolation="nearest", vmax=0.3)
    axes.grid(False)


drawing("The matrix: how much each query takes of each key", "key", "query", draw)

# %% [markdown]
# ## Three kernels, with the matrix
#
# Scores, softmax, product: three launches, and the matrix goes to memory and back between them.


# %%
@cuda.jit
def score(q, kt, s, scale):  # kt is k transposed: neighbouring threads read neighbouring keys
    j, i = cuda.grid(2)
    total = float32(0)
    for d in range(q.shape[1]):
        total += q[i, d] * kt[d, j]
    s[i, j] = total * scale


@cuda.jit
def softmax(s):  # a warp for each row, in place
    i, lane = cuda.blockIdx.x, cuda.threadIdx.x
    m, l = float32(-3.4e38), float32(0)
    for j in range(lane, s.shape[1], 32):
        m = max(m, s[i, j])
    for d in (16, 8, 4, 2, 1):
        m = max(m, cuda.shfl_xor_sync(0xFFFFFFFF, m, d))
    for j in range(lane, s.shape[1], 32):
        l += math.exp(s[i, j] - m)
    for d in (16, 8, 4, 2, 1):
        l += cuda.shfl_xor_sync(0xFFFFFFFF, l, d)
    for j in range(lane, s.shape[1], 32):
        s[i, j] = math.exp(s[i, j] - m) / l


@cuda.jit
def combine(s, v, y):
    d, i = cuda.grid(2)
    total = float32(0)
    for j in range(s.shape[1]):
        total += s[i, j] * v[j, d]
    y[i, d] = total


# %% [markdown]
# ## Three kernels, run
#
# The matrix has 16,384 bytes, as many as q, k, v and y together. The softmax alone moves it four
# times.

# %%
s, y = np.zeros((T, T), np.float32), np.zeros((T, D), np.float32)
three = [
    run(score, (2, 16), (32, 4), q, np.ascontiguousarray(k.T), s, SCALE),
    run(softmax, T, 32, s),
    run(combine, (1, 8), (16, 8), s, v, y),
]
print("right:", np.allclose(y, wanted, atol=1e-5))

# %% [markdown]
# ## The online softmax, with values
#
# Walk over the keys. Keep m, the largest score so far; l, the sum of e^(score - m); and o, the sum
# of e^(score - m) times the value. When m grows, both l and o are multiplied by e^(old m - new m).
# At the end the output is o / l. The plot shows one query: how far o / l is from the result, key by
# key.

# %%
m, l, o = -np.inf, 0.0, np.zeros(D)
away, ms = [], []
for key, value in zip(k, v, strict=True):
    x = float(q[0] @ key * SCALE)
    larger = max(m, x)
    l = l * np.exp(m - larger) + np.exp(x - larger)
    o = o * np.exp(m - larger) + np.exp(x - larger) * value
    m = larger
    away.append(np.abs(o / l - wanted[0]).max())
    ms.append(m)
print("right:", np.allclose(o / l, wanted[0], atol=1e-5))


def draw(axes):
    axes.plot(ms, color="#165ea6", label="m, the largest score so far")
    axes.plot(away, color="#d9622b", label="distance of o / l from the result")
    axes.set_ylim(0)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.18), ncol=2)


drawing("One query, key by key", "key", "", draw)

# %% [markdown]
# Nothing in this loop is as long as T. That is the whole idea of FlashAttention's forward pass.

# %% [markdown]
# ## One thread, one query
#
# A thread keeps its query and its o in registers, and walks over all keys. All lanes of a warp read
# the same key at the same time: one transaction serves 32 queries.


# %%
@cuda.jit
def online(q, k, v, y, logsumexp, scale):
    i = cuda.grid(1)
    mine, o = cuda.local.array(16, np.float32), cuda.local.array(16, np.float32)
    for d in range(16):
        mine[d], o[d] = q[i, d] * scale, float32(0)
    m, l = float32(-3.4e38), float32(0)
    for j in range(k.shape[0]):
        x = float32(0)
        for d in range(16):
            x += mine[d] * k[j, d]
        larger = max(m, x)
        old, new = math.exp(m - larger), math.exp(x - larger)
        l = l * old + new
        for d in range(16):
            o[d] = o[d] * old + new * v[j, d]
        m = larger
    for d in range(16):
        y[i, d] = o[d] / l
    logsumexp[i] = m + math.log(l)


y[:], logsumexp = 0, np.zeros(T, np.float32)
one = run(online, 2, 32, q, k, v, y, logsumexp, SCALE)
print("right:", np.allclose(y, wanted, atol=1e-5))

# %% [markdown]
# ## Tiles of keys in shared memory
#
# Four warps of a block walk over the same keys. Let them load a tile of 16 keys and values
# together. The kernel takes `barriers` as an argument: with 1 it leaves out the second barrier.
# What can go wrong then?


# %%
@cuda.jit
def tiled(q, k, v, y, scale, barriers):
    keys = cuda.shared.array((16, 16), np.float32)
    values = cuda.shared.array((16, 16), np.float32)
    mine, o = cuda.local.array(16, np.float32), cuda.local.array(16, np.float32)
    t, i = cuda.threadIdx.x, cuda.grid(1)
    for d in range(16):
        mine[d], o[d] = q[i, d] * scale, float32(0)
    m, l = float32(-3.4e38), float32(0)
    for start in range(0, k.shape[0], 16):
        for e in range(t, 256, cuda.blockDim.x):  # neighbouring threads load neighbouring numbers
            keys[e // 16, e % 16] = k[start + e // 16, e % 16]
            values[e // 16, e % 16] = v[start + e // 16, e % 16]
        cuda.syncthreads()  # the tile is complete
        for j in range(16):
            x = float32(0)
            for d in range(16):
                x += mine[d] * keys[j, d]
            larger = max(m, x)
            old, new = math.exp(m - larger), math.exp(x - larger)
            l, m = l * old + new, larger
            for d in range(16):
                o[d] = o[d] * old + new * values[j, d]
        if barriers == 2:
            cuda.syncthreads()  # the tile has been read
    for d in range(16):
        y[i, d] = o[d] / l


faults(tiled, 1, T, q, k, v, y, SCALE, 1)

# %% [markdown]
# ## Tiles, counted
#
# A fast warp would overwrite the tile while a slow one still reads it. With both barriers every key
# and value is loaded once for the whole block.

# %%
y[:] = 0
tiles = run(tiled, 1, T, q, k, v, y, SCALE, 2)
print("right:", np.allclose(y, wanted, atol=1e-5))
bars(
    f"Attention of {T} tokens",
    {
        "three kernels, with the matrix": sum(costs.moved for costs in three),
        "one thread, one query": one.moved,
        "tiles of keys": tiles.moved,
        "floor: q, k, v and y once": 4 * q.nbytes,
    },
    "bytes moved",
)

# %% [markdown]
# What is above the floor are q and y: neighbouring threads own neighbouring rows, so their loads
# are not coalesced. Puzzle 22 has the cure: a tile in shared memory for the queries, too.

# %% [markdown]
# ## Backward: compute the weights again
#
# The gradients need the weights, all T × T of them, and the forward pass has not kept them. It has
# kept one number for each query: L = m + log(l). The weight of a key is e^(score - L), so the
# backward pass computes it again, tile by tile. It does more FLOPs and moves fewer bytes. `mean` is
# what the softmax's derivative subtracts.

# %%
dy = rng.standard_normal((T, D), np.float32)
# from the kernel's own L; a real kernel has a tile of it at a time
p = np.exp(q @ k.T * SCALE - logsumexp[:, None])
print("the same weights:", np.allclose(p, weights, atol=1e-5))
mean = (dy * wanted).sum(1, keepdims=True)
dv = p.T @ dy
ds = p * (dy @ v.T - mean)
dq, dk = ds @ k * SCALE, ds.T @ q * SCALE


def loss(*arrays):
    return (attention(*arrays)[0] * dy).sum()


inputs, step = [a.astype(np.float64) for a in (q, k, v)], 1e-4
for n, gradient in enumerate((dq, dk, dv)):
    direction = rng.standard_normal(gradient.shape)
    ahead, behind = (
        [a + way * direction if m == n else a for m, a in enumerate(inputs)]
        for way in (step, -step)
    )
    slope = (loss(*ahead) - loss(*behind)) / (2 * step)
    print(
        ("dq", "dk", "dv")[n],
        "agrees with differences:",
        np.isclose((gradient * direction).sum(), slope, rtol=1e-3, atol=1e-2),
    )
print(f"kept for the backward pass: {logsumexp.nbytes} bytes instead of {weights.nbytes:,}")

# %% [markdown]
# ## What it is worth on a real card
#
# Version 1 is your last kernel. Version 2 keeps 64 scores in each thread's registers, version 3 is
# on tensor cores by `mma`, and version 5 by `wgmma`.

# %%
measured("flash_attention_forward")

# %% [markdown]
# ## Read the real thing
#
# `numdiff/kernels/attention/unfused.py` has the three kernels with the matrix,
# `numdiff/kernels/attention/reference.py` the mathematics of the backward. You can now read
# `numdiff/extras/levels/attention/simple.py`.
