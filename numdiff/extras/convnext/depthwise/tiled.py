"""Depthwise convolution v2: tiles in shared memory, runs of pixels in registers.

MATHEMATICS, SHAPES
    as in reference.py
VERSIONS
    v2 tiled: a block copies a tile of pixels with its halo, of 64 bytes of channels, to shared
       memory, 16 bytes a copy; a thread computes eight neighbouring pixels of four channels in
       registers, so that what it reads from shared memory serves up to eight outputs. The weight
       gradient: a warp a row of taps, whose sums stay in its registers while the block goes from
       tile to tile.
LAUNCH
    forward and dx: a block for each tile of 16 × 16 pixels (8 × 8 of small images) and slice of 32
    channels (16 in float32): 256 threads (128); 39 KB of shared memory for 7 × 7 taps. dweight:
    blocks of `kernel` warps, each with a slice and a chunk of tiles of 8 × 16 pixels; 29 KB.
DETERMINISM
    the chunks' parts of dweight are in a separate array, which kernels/reduce/trees.py adds up.
COST
    as in reference.py: memory in float32, arithmetic in float16.
SOURCE
    reference.py; runs of outputs in registers: Volkov and Demmel, SC 2008; PTX ISA, section
    9.7.9.25.3 (cp.async).
READ NEXT
    mma.py, for 16 bits.
"""

from ....device import cuda, float32, int32, load4, store4
from ....device.async_copy import cp_async_commit, cp_async_wait_all
from ....device.common import divide
from ....device.eight import copy8, store8
from ....device.limits import FULL_MASK, WARP
from ....device.requires import requires
from ....device.specialise import Constant, Variants, specialise

BYTES = 64  # of a pixel's channels in a tile: two sectors of memory
RUN = 8  # neighbouring pixels of a thread
KERNELS = 3, 5, 7
# of pixels in a tile of the weight gradient, so that x and dy take 29 KB together
GRADIENT_ROWS = 8


# v2: tiles in shared memory, runs of pixels in registers ------------------------------------------
# WHAT IS NEW: neighbouring outputs share all but a column of what they see. A block of 16 × 16
# outputs reads 22 × 22 pixels once, not 49 times, and a thread with eight outputs in a row reads 14
# pixels of a row of taps, not 56.
# WHY IT PAYS: version 1 has two loads for every product; here it is 21 loads of four numbers for
# 224 products.
# Rows of the tile are an odd number of pixels, of 64 bytes, apart, so that two rows' pixels are in
# different banks.

# taps a row, channels, a tile's pixels
K, SLICE, ROWS, COLUMNS = Constant(), Constant(), Constant(), Constant()
HALO_ROWS, HALO_COLUMNS = (
    Constant(lambda ROWS, K: ROWS + K - 1),
    Constant(lambda COLUMNS, K: COLUMNS + K - 1),
)
PITCH = Constant(lambda HALO_COLUMNS, SLICE: (HALO_COLUMNS | 1) * SLICE)
TILE = Constant(lambda HALO_ROWS, PITCH: HALO_ROWS * PITCH)
DY_PITCH = Constant(lambda COLUMNS, SLICE: (COLUMNS | 1) * SLICE)
DY_TILE = Constant(lambda ROWS, DY_PITCH: ROWS * DY_PITCH)
TAPS, WEIGHTS = Constant(lambda K: K * K), Constant(lambda K, SLICE: K * K * SLICE)
QUADS, OCTETS = Constant(lambda SLICE: SLICE // 4), Constant(lambda SLICE: SLICE // 8)
# rows of pixels that a warp of the weight gradient adds up at a time
GROUPS = Constant(lambda QUADS: WARP // QUADS)
RUN4, K4, SEEN4 = 4 * RUN, Constant(lambda K: 4 * K), Constant(lambda K: 4 * (RUN + K - 1))


@cuda.jit(device=True, forceinline=True)
def copy_pixels(tile, pitch, rows, columns, x, b, top, left, first, image):
    """Start copies of rows × columns pixels from (top, left) of image b, of the channels from
    `first` on; zeros where there are none. All threads call it."""
    zero = float32(0)
    for k in range(int32(cuda.threadIdx.x), rows * columns * OCTETS, int32(cuda.blockDim.x)):
        pixel, octet = divide(k, int32(OCTETS))
        i, j = divide(pixel, int32(columns))
        at = int32(i * pitch + j * SLICE + octet * 8)
        h, w, c = int32(top + i), int32(left + j), int32(first + octet * 8)
        if h >= 0 and h < image.H and w >= 0 and w < image.W and c < image.C:
            copy8(tile, at, x, ((b * image.H + h) * image.W + w) * image.C + c)
        else:
            store8(tile, at, (zero, zero, zero, zero, zero, zero, zero, zero))


@cuda.jit(device=True, forceinline=True)
def place_of(tile, image):
    """(image, first row, first column) of a tile of all images."""
    across, down = int32(-(-image.W // COLUMNS)), int32(-(-image.H // ROWS))
    rest, j = divide(tile, across)
    b, i = divide(rest, down)
    return b, int32(i * ROWS), int32(j * COLUMNS)


@cuda.jit(device=True, forceinline=True)
def look_at(seen, tile, x):
    """What the taps of one row see from a run of pixels, of four channels: the tile's numbers from
    x on."""
    for q in range(RUN + K - 1):
        x0, x1, x2, x3 = load4(tile, x + q * SLICE)
        seen[4 * q], seen[4 * q + 1], seen[4 * q + 2], seen[4 * q + 3] = x0, x1, x2, x3


@cuda.jit(device=True, forceinline=True)
def multiply_row(totals, seen, weights, w, tile, x):
    """totals[p] += x[p + s] · weight[s] for the pixels p of a run and the taps s of one row, of
    four channels; pixels are read from x on, weights from w on."""
    look_at(seen, tile, x)
    for s in range(K):
        w0, w1, w2, w3 = load4(weights, w + s * SLICE)
        for p in range(RUN):
            totals[4 * p] += seen[4 * (p + s)] * w0
            totals[4 * p + 1] += seen[4 * (p + s) + 1] * w1
            totals[4 * p + 2] += seen[4 * (p + s) + 2] * w2
            totals[4 * p + 3] += seen[4 * (p + s) + 3] * w3


@requires("7.5")
def depthwise_forward_kernel_v2(x, weight, bias, channel, y, slices, image):
    tile = cuda.shared.array(TILE, x.dtype.type, alignment=128)
    weights = cuda.shared.array(WEIGHTS, float32, alignment=128)
    t, C = int32(cuda.threadIdx.x), image.C
    # neighbours have the same pixels: their channels share lines
    n, part = divide(int32(cuda.blockIdx.x), slices)
    b, top, left = place_of(n, image)
    first = int32(part * SLICE)
    copy_pixels(
        tile,
        PITCH,
        HALO_ROWS,
        HALO_COLUMNS,
        x,
        b,
        int32(top - K // 2),
        int32(left - K // 2),
        first,
        image,
    )
    cp_async_commit()
    for k in range(t, WEIGHTS, int32(cuda.blockDim.x)):
        tap, c = divide(k, int32(SLICE))
        tap = int32(TAPS - 1 - tap) if image.flip else tap
        weights[k] = float32(weight[tap * C + first + c]) if first + c < C else float32(0)
    cp_async_wait_all()
    cuda.syncthreads()

    strip, quad = divide(t, int32(QUADS))
    run, row = divide(strip, int32(ROWS))
    totals, seen = cuda.local.array(RUN4, "float32"), cuda.local.array(SEEN4, "float32")
    for p in range(RUN4):
        totals[p] = float32(0)
    i, j, c = int32(top + row), int32(left + run * RUN), int32(first + quad * 4)
    if i < image.H and j < image.W and c < C:
        for r in range(K):
            multiply_row(
                totals,
                seen,
                weights,
                int32(r * K * SLICE + quad * 4),
                tile,
                int32((row + r) * PITCH + run * RUN * SLICE + quad * 4),
            )
        a0 = a1 = a2 = a3 = float32(0)
        if image.bias:
            a0, a1, a2, a3 = load4(bias, c)
        if image.channel:
            e0, e1, e2, e3 = load4(channel, b * C + c)
            a0, a1, a2, a3 = a0 + e0, a1 + e1, a2 + e2, a3 + e3
        for p in range(RUN):
            if j + p < image.W:
                store4(
                    y,
                    ((b * image.H + i) * image.W + j + p) * C + c,
                    totals[4 * p] + a0,
                    totals[4 * p + 1] + a1,
                    totals[4 * p + 2] + a2,
                    totals[4 * p + 3] + a3,
                )


@cuda.jit(device=True, forceinline=True)
def add_run(totals, seen, tile, x, gradient, g):
    """totals[s] += Σ_p dy[p] · x[p + s] over the pixels p of a run, of four channels; read from x
    and from g on."""
    look_at(seen, tile, x)
    for p in range(RUN):
        g0, g1, g2, g3 = load4(gradient, g + p * SLICE)
        for s in range(K):
            totals[4 * s] += g0 * seen[4 * (p + s)]
            totals[4 * s + 1] += g1 * seen[4 * (p + s) + 1]
            totals[4 * s + 2] += g2 * seen[4 * (p + s) + 2]
            totals[4 * s + 3] += g3 * seen[4 * (p + s) + 3]


@cuda.jit(device=True, forceinline=True)
def group_sum(value):
    """The sum over the lanes that have the same four channels, in each of them."""
    value += cuda.shfl_xor_sync(FULL_MASK, value, 16)
    value += cuda.shfl_xor_sync(FULL_MASK, value, 8)
    if QUADS == 4:
        value += cuda.shfl_xor_sync(FULL_MASK, value, 4)
    return value


@requires("7.5")
def depthwise_weight_gradient_kernel_v2(dy, x, partial, tiles, chunk, slices, image):
    """partial (chunks, K, K, C): the sums over each chunk of the tiles."""
    tile = cuda.shared.array(TILE, x.dtype.type, alignment=128)
    gradient = cuda.shared.array(DY_TILE, x.dtype.type, alignment=128)
    r, lane = divide(int32(cuda.threadIdx.x), int32(WARP))  # a warp for each row of taps
    group, quad = divide(lane, int32(QUADS))
    part, piece = divide(int32(cuda.blockIdx.x), slices)
    first = int32(piece * SLICE)
    totals, seen = cuda.local.array(K4, "float32"), cuda.local.array(SEEN4, "float32")
    for s in range(K4):
        totals[s] = float32(0)
    for n in range(part * chunk, min(part * chunk + chunk, tiles)):
        b, top, left = place_of(int32(n), image)
        cuda.syncthreads()  # the tile before is no longer read
        copy_pixels(
            tile,
            PITCH,
            HALO_ROWS,
            HALO_COLUMNS,
            x,
            b,
            int32(top - K // 2),
            int32(left - K // 2),
            first,
            image,
        )
        copy_pixels(gradient, DY_PITCH, ROWS, COLUMNS, dy, b, top, left, first, image)
        cp_async_commit()
        cp_async_wait_all()
        cuda.syncthreads()
        # below it dy is zero
        for i in range(group, min(int32(ROWS), int32(image.H - top)), int32(GROUPS)):
            for j in range(0, COLUMNS * SLICE, RUN * SLICE):
                add_run(
                    totals,
                    seen,
                    tile,
                    int32((i + r) * PITCH + quad * 4 + j),
                    gradient,
                    int32(i * DY_PITCH + quad * 4 + j),
                )
    for s in range(K4):
        totals[s] = group_sum(totals[s])
    c = int32(first + quad * 4)
    if group == 0 and c < image.C:
        for s in range(K):
            store4(
                partial,
                ((part * K + r) * K + s) * image.C + c,
                totals[4 * s],
                totals[4 * s + 1],
                totals[4 * s + 2],
                totals[4 * s + 3],
            )


def threads_of(_, itemsize, side):
    return BYTES // itemsize // 4 * side * (side // RUN)


KEYS = [(kernel, bytes_, side) for kernel in KERNELS for bytes_ in (2, 4) for side in (8, 16)]
FORWARD = Variants(
    KEYS,
    lambda key: specialise(
        depthwise_forward_kernel_v2,
        launch_bounds=(threads_of(*key), 1),
        K=key[0],
        SLICE=BYTES // key[1],
        ROWS=key[2],
        COLUMNS=key[2],
    ),
)
WEIGHT_GRADIENT = Variants(
    KEYS,
    lambda key: specialise(
        depthwise_weight_gradient_kernel_v2,
        launch_bounds=(key[0] * WARP, 1),
        K=key[0],
        SLICE=BYTES // key[1],
        ROWS=GRADIENT_ROWS,
        COLUMNS=key[2],
    ),
)
