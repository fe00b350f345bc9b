# %% [markdown]
# # 4. Convolution as a product
#
# Nine tenths of a UNet's arithmetic are 3 × 3 convolutions. A convolution looks unlike anything in
# chapter 3, and it is a matrix product all the same. This chapter finds the matrix, refuses to
# write it down, and ends with the kernel of chapter 3, in which one line is different.

# %%
import numpy as np
from numba import cuda, float32

from numdiff import emulator
from numdiff.emulator import pictures
from numdiff.lessons.lab import TensorMapArgument, bars, drawing, faults, measured, run, show

rng = np.random.default_rng(0)
H = W = 8
C, N = 8, 16  # channels that come in, channels that go out
x = rng.standard_normal((H, W, C), np.float32)  # channels last: a pixel's numbers are neighbours
weight = rng.standard_normal((3, 3, C, N), np.float32)

# %% [markdown]
# ## The definition
#
# An output pixel is a weighted sum over its 3 × 3 neighbours, the *taps*, and over all channels.
# Outside the image there are zeros. NumPy needs nine lines of loop, and each of them is a matrix
# product already: the pixels of one tap times the weights of that tap.


# %%
def convolve(x, weight):
    padded = np.pad(x, ((1, 1), (1, 1), (0, 0)))
    y = np.zeros((*x.shape[:2], weight.shape[-1]), np.float32)
    for r in range(3):
        for s in range(3):
            y += (
                padded[r : r + x.shape[0], s : s + x.shape[1]] @ weight[r, s]
            )  # (H, W, C) times (C, N)
    return y


wanted = convolve(x, weight)
print("FLOPs:", 2 * H * W * N * 9 * C)

# %% [markdown]
# ## One thread, one output
#
# Neighbouring threads take neighbouring output channels n. So they read the same pixel, which is
# one transaction, and neighbouring weights. Each of the 64 pixels reads all weights again, and each
# pixel is read for nine outputs.


# %%
@cuda.jit
def direct(x, weight, y):
    n, w, h = cuda.grid(3)
    total = float32(0)
    for r in range(3):
        for s in range(3):
            i, j = h + r - 1, w + s - 1
            if i >= 0 and i < x.shape[0] and j >= 0 and j < x.shape[1]:
                for c in range(x.shape[2]):
                    total += x[i, j, c] * weight[r, s, c, n]
    y[h, w, n] = total


y = np.zeros((H, W, N), np.float32)
by_threads = run(direct, (1, 4, 8), (N, 2, 1), x, weight, y)
print("right:", np.allclose(y, wanted, atol=1e-4))

# %% [markdown]
# Puzzles: 8, 10

# %% [markdown]
# ## The matrix: im2col
#
# Write, for each pixel, all that it sees as one row: 9 taps of C channels. Then y = col · weight, a
# product of 64 × 72 by 72 × 16. The plot shows the matrix for an image that is a ramp. Each column
# block is the image again, shifted.


# %%
@cuda.jit
def im2col(x, col):
    k, w, h = cuda.grid(3)  # k = tap · C + channel
    tap, c = k // x.shape[2], k % x.shape[2]
    i, j = h + tap // 3 - 1, w + tap % 3 - 1
    value = float32(0)
    if i >= 0 and i < x.shape[0] and j >= 0 and j < x.shape[1]:
        value = x[i, j, c]
    col[h * x.shape[1] + w, k] = value


col = np.zeros((H * W, 9 * C), np.float32)
written = run(im2col, (1, 2, 8), (9 * C, 4, 1), x, col)
print("right:", np.allclose((col @ weight.reshape(9 * C, N)).reshape(H, W, N), wanted, atol=1e-4))
print("size of x, and of col:", x.nbytes, col.nbytes)
ramp = np.broadcast_to(np.linspace(0.2, 1, H * W, dtype=np.float32).reshape(H, W, 1), x.shape)
shown = np.zeros_like(col)
emulator.Emulator().launch(im2col, (1, 2, 8), (9 * C, 4, 1), np.ascontiguousarray(ramp), shown)


def draw(axes):
    axes.imshow(shown, aspect="auto", cmap="viridis", interpolation="nearest", vmin=0)
    axes.set_xticks(
        np.arange(9) * C + C / 2 - 0.5, [f"tap {r},{s}" for r in range(3) for s in range(3)]
    )
    axes.grid(False)


drawing("The matrix of a convolution: dark is the padding", "9 taps of 8 channels", "pixel", draw)

# %% [markdown]
# ## The product of chapter 3
#
# Tiles in shared memory: 16 pixels and 16 output channels for a block of 16 × 16 threads, 8 of k in
# a step. With C = 8 a step is one tap.


# %%
@cuda.jit
def product(col, weight, y):  # col (64, 72), weight (72, 16), y (64, 16)
    a = cuda.shared.array((16, 8), np.float32)
    b = cuda.shared.array((8, 16), np.float32)
    n, p = cuda.threadIdx.x, cuda.threadIdx.y
    pixel = cuda.blockIdx.x * 16 + p
    total = float32(0)
    for tap in range(9):
        if n < 8:
            a[p, n] = col[pixel, tap * 8 + n]
        if p < 8:
            b[p, n] = weight[tap * 8 + p, n]
        cuda.syncthreads()
        for k in range(8):
            total += a[p, k] * b[k, n]
        cuda.syncthreads()
    y[pixel, n] = total


y[:] = 0
multiplied = run(product, 4, (16, 16), col, weight.reshape(9 * C, N), y.reshape(H * W, N))
print("right:", np.allclose(y, wanted, atol=1e-4))

# %% [markdown]
# It works, and it costs: the matrix is nine times the image, and it is written once and read once.

# %% [markdown]
# ## The matrix that is never written
#
# The matrix holds nothing new: element (pixel, tap, channel) is x[h + r - 1, w + s - 1, c]. So let
# the load of the tile compute this index. This is an *implicit* product. Compare it with the kernel
# above: the lines that fill `a` differ.


# %%
@cuda.jit
def implicit(x, weight, y):  # a block: 16 pixels, two rows of the image, and 16 output channels
    a = cuda.shared.array((16, 8), np.float32)
    b = cuda.shared.array((8, 16), np.float32)
    n, p = cuda.threadIdx.x, cuda.threadIdx.y
    h, w = cuda.blockIdx.x * 2 + p // 8, p % 8
    total = float32(0)
    for tap in range(9):
        i, j = h + tap // 3 - 1, w + tap % 3 - 1
        if n < 8:
            a[p, n] = float32(0)
            if i >= 0 and i < x.shape[0] and j >= 0 and j < x.shape[1]:
                a[p, n] = x[i, j, n]
        if p < 8:
            b[p, n] = weight[tap // 3, tap % 3, p, n]
        cuda.syncthreads()
        for k in range(8):
            total += a[p, k] * b[k, n]
        cuda.syncthreads()
    y[h, w, n] = total


y[:] = 0
as_product = run(implicit, 4, (16, 16), x, weight, y)
print("right:", np.allclose(y, wanted, atol=1e-4))
print(
    f"im2col and its product move {written.moved + multiplied.moved:,} bytes, this one {as_product.moved:,}"
)

# %% [markdown]
# ## A tile with its halo
#
# The implicit product still loads each pixel nine times. A tile of 8 × 8 outputs needs 10 × 10
# pixels: the tile and a border of one pixel, its *halo*. Load them once into shared memory, and
# take all nine taps from there. The argument `pixels` says how many are loaded: 100 is right. 80
# would be the tile with the rows above and below only.


# %%
@cuda.jit
def with_halo(x, weight, y, pixels):
    tile = cuda.shared.array((10, 10, 8), np.float32)
    n, t = cuda.threadIdx.x, cuda.threadIdx.y
    for i in range(t, pixels, 16):
        h, w = i // 10 - 1, i % 10 - 1
        if n < 8:
            tile[h + 1, w + 1, n] = float32(0)
            if h >= 0 and h < x.shape[0] and w >= 0 and w < x.shape[1]:
                tile[h + 1, w + 1, n] = x[h, w, n]
    cuda.syncthreads()
    for p in range(t, 64, 16):
        h, w = p // 8, p % 8
        total = float32(0)
        for tap in range(9):
            for c in range(8):
                total += tile[h + tap // 3, w + tap % 3, c] * weight[tap // 3, tap % 3, c, n]
        y[h, w, n] = total


faults(with_halo, 1, (16, 16), x, weight, y, 80)

# %% [markdown]
# ## The halo, counted
#
# The emulator named the line that reads what no thread has loaded. With all 100 pixels the kernel
# is right. x now moves once. What remains are the weights, which each warp loads again for each of
# its pixels.

# %%
halo = run(with_halo, 1, (16, 16), x, weight, y, 100)
print("right:", np.allclose(y, wanted, atol=1e-4))
of_x = {
    "one thread, one output": by_threads.recorder.line("x[i, j, c] * weight").read_bytes["global"]
    // 2,
    "implicit product": as_product.recorder.line("a[p, n] = x[i, j, n]").read_bytes["global"],
    "tile with halo": halo.recorder.line("= x[h, w, n]").read_bytes["global"],
    "the image itself": x.nbytes,
}
print(of_x)
bars("Bytes of x that the threads load", of_x, "bytes")

# %% [markdown]
# ## On Hopper: nine shifted boxes
#
# TMA copies boxes of a tensor with three dimensions, too, and a box may reach over the edge: zeros
# arrive. That is the padding, for free. So the matrix of tap (r, s) is the box of the image that
# begins at (r - 1, s - 1). This is the double buffer of chapter 3. Only the coordinates of the load
# are new.

# %%
from numdiff.device.mbarrier import (
    fence_barrier_init,
    mbarrier_expect_tx,
    mbarrier_init,
    mbarrier_wait,
    smem_u32,
)
from numdiff.device.tma import tma_load_2d, tma_load_3d
from numdiff.device.wgmma import make_multiply, make_wgmma_wait

multiply, wgmma_wait = make_multiply(16), make_wgmma_wait(16)
A_BYTES, STAGE = 64 * 128, (64 + 16) * 128
BYTES = 2 * STAGE


@cuda.jit(device=True)
def load_tap(base, barrier, map_x, map_weight, tap):
    mbarrier_expect_tx(barrier, STAGE)
    tma_load_3d(base, map_x, barrier, 0, tap % 3 - 1, tap // 3 - 1)  # channel, column, row
    tma_load_2d(base + A_BYTES, map_weight, barrier, tap * 64, 0)


@cuda.jit
def boxes(map_x, map_weight, y):  # x (8, 8, 64), weight (16, 9 · 64) float16; y (64, 16) float32
    memory = cuda.shared.array(BYTES, np.uint8, alignment=1024)
    barriers = cuda.shared.array(2, np.uint64)
    acc = cuda.local.array(8, np.float32)
    base, full, t = smem_u32(memory), smem_u32(barriers), cuda.threadIdx.x
    if t == 0:
        mbarrier_init(full, 1)
        mbarrier_init(full + 8, 1)
        fence_barrier_init()
        load_tap(base, full, map_x, map_weight, 0)
    cuda.syncthreads()
    for tap in range(9):
        now, following = tap % 2, (tap + 1) % 2
        if t == 0 and tap < 8:
            load_tap(base + following * STAGE, full + 8 * following, map_x, map_weight, tap + 1)
        mbarrier_wait(full + 8 * now, tap // 2 % 2)
        multiply(acc, base + now * STAGE, base + now * STAGE + A_BYTES, min(tap, 1))
        wgmma_wait(acc)
        cuda.syncthreads()
    row, column = t // 32 * 16 + t % 32 // 4, t % 4 * 2
    for j in range(2):
        for i in range(4):
            y[row + i // 2 * 8, column + 8 * j + i % 2] = acc[4 * j + i]


# %% [markdown]
# ## The boxes of your run
#
# Three of the nine boxes, as the emulator saw TMA copy them. Hatched pixels are outside the image,
# and arrive as zeros.

# %%
x16 = rng.standard_normal((8, 8, 64)).astype(np.float16)
w16 = rng.standard_normal((3, 3, 64, 16)).astype(np.float16)
b16 = np.ascontiguousarray(w16.transpose(3, 0, 1, 2)).reshape(16, 576)
y16 = np.zeros((64, 16), np.float32)
arguments = TensorMapArgument(x16, (64, 8, 8)), TensorMapArgument(b16, (64, 16)), y16
run(boxes, 1, 128, *arguments)
in_float32 = convolve(x16.astype(np.float32), w16.astype(np.float32))
print("right:", np.allclose(y16.reshape(8, 8, 16), in_float32, atol=0.02))
film = emulator.trace(boxes, 1, 128, *[a.emulated() for a in arguments[:2]], y16)
of_image = [copy for copy in film.copies if len(copy.at) == 3]
show(pictures.tma_box([of_image[0], of_image[4], of_image[8]]))

# %% [markdown]
# ## Backward: two more products
#
# Training needs two gradients. That of x is a convolution of dy with the weights turned around:
# taps reversed, channels in and out exchanged. So the same kernel computes it. That of the weights
# is, for each tap, the shifted image times dy, a product whose inner dimension is the pixels.

# %%
dy = rng.standard_normal((H, W, N), np.float32)
turned = np.ascontiguousarray(weight[::-1, ::-1].swapaxes(2, 3))
dx = convolve(dy, turned)
padded = np.pad(x, ((1, 1), (1, 1), (0, 0)))
taps = [(r, s) for r in range(3) for s in range(3)]
dweight = np.stack(
    [padded[r : r + H, s : s + W].reshape(-1, C).T @ dy.reshape(-1, N) for r, s in taps]
)
dweight = dweight.reshape(weight.shape)
step = 1e-2  # a check by differences: y is linear in x and in the weights
for name, array, gradient, loss in (
    ("dx", x, dx, lambda a: (convolve(a, weight) * dy).sum()),
    ("dweight", weight, dweight, lambda a: (convolve(x, a) * dy).sum()),
):
    direction = rng.standard_normal(array.shape, np.float32)
    slope = (loss(array + step * direction) - loss(array - step * direction)) / (2 * step)
    print(
        name,
        "agrees with differences:",
        np.isclose((gradient * direction).sum(), slope, rtol=1e-3, atol=0.1),
    )

# %% [markdown]
# ## What it is worth on a real card
#
# The convolution of a UNet at 64 × 64, with 64 channels. Version 1 is one thread for an output. The
# later versions are
# products: in float32, then with `mma`, then with `wgmma`. The last line is the boxes, at 256
# channels.

# %%
measured("conv2d_forward", "32×64×64×64, 64×3×3×64")
measured("conv2d_level_forward")
measured("im2col_forward")

# %% [markdown]
# ## Read the real thing
#
# `numdiff/kernels/conv2d/im2col.py` writes the matrix, `numdiff/kernels/conv2d/implicit.py` does
# not. You can now read `numdiff/extras/levels/conv2d/shifted_boxes.py`, which is your last kernel
# with warps that only load.
