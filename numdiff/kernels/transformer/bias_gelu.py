"""Bias and GELU in one pass, between the two matmuls of a transformer's MLP.

MATHEMATICS
        z = x + bias          y = z/2 · (1 + tanh u),   u = √(2/π) · (z + 0.044715 z³)
        dx = dy · GELU'(z)    dbias[c] += Σ_rows dx      (GELU' as in elementwise.py; z is made again, not stored)
SHAPES
    x, y, dx, dy (..., C) float32, the other axes read as M rows; bias, dbias (C,)
VERSIONS
    v1 naive: one thread an element; the backward a thread a column, which goes down all rows.
    v2 vectorised: one thread four neighbouring columns, by 16-byte loads and stores (C a multiple of 4). The backward's
       blocks own a chunk of rows, write dx, and add up its columns on the way, in a tree: dx is not read again for
       dbias.
MEASURED
    NVIDIA H200, 2026-11-22, PyTorch 2.11.0: numdiff bench kernels --of files; * is the launcher's choice
    bias_gelu_forward, 64×256×3072, 3072, float16
        v1       197 µs    1,021 GB/s   25 % of memory
        v2*     84.6 µs    2,379 GB/s   58 % of memory   2.33 × v1
    bias_gelu_backward, 64×256×3072, 64×256×3072, float16
        v1     7,740 µs     39.0 GB/s    1 % of memory
        v2*      130 µs    2,320 GB/s   57 % of memory   59.5 × v1
LAUNCH
    forward: v1 ceil(n / 256) blocks of 256 threads, v2 a quarter. Backward: v1 ceil(C / 256) blocks; v2 grid
    (chunks, column tiles), 256 threads, 4 KiB of shared memory, then reduce.py over the chunks.
DETERMINISM
    no atomics; the order of the sums depends on the shape alone.
COST
    bytes: 8 n forward; 12 n backward, where GELU's backward and then the bias's would move 16 n. FLOPs: 10 and 19 an
    element, a tanh counted as one. Roof: memory bandwidth.
SOURCE
    Hendrycks and Gimpel 2016, arXiv:1606.08415, section 2.
READ NEXT
    matmul/epilogues.py: where Hopper's kernels run both matmuls, GELU is part of them, and this file's kernels do not
    run (`mlp` in numdiff/nn/functional.py); numdiff/nn/dit.py, where the block is put together.
"""
import numpy as np

from ...device import cuda, empty, empty_like, float32, is_device, launch, load4, over_batch, store4
from ...dtypes import in_single
from ..elementwise import GELU_CUBIC, GELU_SLOPE, gelu, gelu_gradient
from ..reduce import BLOCK, column_sum, cut, tree_sum
from ..versions import versions_by_name

BLOCK4 = 4 * BLOCK  # shared elements: a sum in each of a thread's four columns
SLOPE, BOTH = float(GELU_SLOPE), float(GELU_SLOPE) * float(GELU_CUBIC)  # Python floats take the arrays' type
ROWS = 64  # that the reference takes at a time: its temporaries stay in the cache


# References -----------------------------------------------------------------------------------------------------------

def _over_rows(function, count, width):
    """Call `function(slice)` for parts of range(count) of at most ROWS rows; results of each worker are added up."""
    def part(rows):
        return sum(function(slice(i, min(i + ROWS, rows.stop))) for i in range(rows.start, rows.stop, ROWS))

    return sum(over_batch(part, count, count * width))


def _gelu_parts(z):
    """(z², tanh u)."""
    square = z * z
    u = square * BOTH
    u += SLOPE
    u *= z
    return square, np.tanh(u, out=u)


@in_single()
def bias_gelu_forward_reference(x, bias):
    y = np.empty_like(x)
    rows, out = x.reshape(-1, x.shape[-1]), y.reshape(-1, x.shape[-1])

    def some(i):
        z = np.add(rows[i], bias, out=out[i])
        _, t = _gelu_parts(z)
        t += 1
        t *= 0.5
        z *= t
        return 0

    _over_rows(some, *rows.shape)
    return y


@in_single()
def bias_gelu_backward_reference(dy, x, bias, dbias):
    dx = np.empty_like(x)
    g, rows, out = (a.reshape(-1, x.shape[-1]) for a in (dy, x, dx))

    def some(i):
        z = rows[i] + bias
        square, t = _gelu_parts(z)
        square *= 3 * BOTH
        square += SLOPE  # du/dz
        square *= z
        square *= 1 - t * t
        square += t
        square += 1
        square *= 0.5
        np.multiply(g[i], square, out=out[i])
        return out[i].sum(0)

    dbias += _over_rows(some, *rows.shape)
    return dx


# v1: one thread an element, or a column -------------------------------------------------------------------------------

@cuda.jit
def bias_gelu_forward_kernel_v1(x, bias, y, C):
    i = cuda.grid(1)
    if i < y.size:
        y[i] = gelu(x[i] + bias[i % C])


@cuda.jit
def bias_gelu_backward_kernel_v1(dy, x, bias, dx, dbias, rows, C):
    c = cuda.grid(1)
    if c < C:
        total = float32(0)
        for row in range(rows):
            d = gelu_gradient(dy[row * C + c], x[row * C + c] + bias[c])
            dx[row * C + c] = d
            total += d
        dbias[c] += total


# v2: four neighbouring columns a thread -------------------------------------------------------------------------------

@cuda.jit
def bias_gelu_forward_kernel_v2(x, bias, y, C):
    i = cuda.grid(1) * 4
    if i < y.size:
        x0, x1, x2, x3 = load4(x, i)
        b0, b1, b2, b3 = load4(bias, i % C)
        store4(y, i, gelu(x0 + b0), gelu(x1 + b1), gelu(x2 + b2), gelu(x3 + b3))


@cuda.jit
def bias_gelu_backward_kernel_v2(dy, x, bias, dx, partial, rows, C, lanes, chunk):
    """dx, and the sums of its columns over every chunk of rows: (chunks, C)."""
    tile = cuda.shared.array(BLOCK4, float32)
    t = cuda.threadIdx.x
    rows_at_once = BLOCK // lanes
    row = t // lanes
    c = (cuda.blockIdx.y * lanes + t % lanes) * 4
    start = cuda.blockIdx.x * chunk
    s0 = s1 = s2 = s3 = float32(0)
    if row < rows_at_once and c < C:
        b0, b1, b2, b3 = load4(bias, c)
        for r in range(start + row, min(start + chunk, rows), rows_at_once):
            g0, g1, g2, g3 = load4(dy, r * C + c)
            x0, x1, x2, x3 = load4(x, r * C + c)
            g0, g1 = gelu_gradient(g0, x0 + b0), gelu_gradient(g1, x1 + b1)
            g2, g3 = gelu_gradient(g2, x2 + b2), gelu_gradient(g3, x3 + b3)
            store4(dx, r * C + c, g0, g1, g2, g3)
            s0 += g0
            s1 += g1
            s2 += g2
            s3 += g3
    tile[t], tile[BLOCK + t], tile[2 * BLOCK + t], tile[3 * BLOCK + t] = s0, s1, s2, s3
    tree_sum(tile, 4, t, lanes, rows_at_once)
    if row == 0 and c < C:
        store4(partial, cuda.blockIdx.x * C + c, tile[t], tile[BLOCK + t], tile[2 * BLOCK + t], tile[3 * BLOCK + t])


# Launchers ------------------------------------------------------------------------------------------------------------

def _check(x, bias, version):
    """(rows, C, version)."""
    C = x.shape[-1]
    if tuple(bias.shape) != (C,):
        raise ValueError(f"bias_gelu: the bias must have shape ({C},), x's last axis, not {tuple(bias.shape)}")
    if version is None:
        version = 2 if C % 4 == 0 else 1
    if version == 2 and C % 4:
        raise ValueError(f"version 2 (vectorised) takes four columns at a time, and {C} is not a multiple of 4; use "
                         "version=1")
    return x.size // C, C, version


@versions_by_name
def bias_gelu_forward(x, bias, version=None):
    """GELU(x (..., C) + bias (C,)), tanh form, as a new array."""
    _, C, version = _check(x, bias, version)
    if not is_device(x):
        return bias_gelu_forward_reference(x, bias)
    y = empty_like(x)
    kernel, width = (bias_gelu_forward_kernel_v1, 1) if version == 1 else (bias_gelu_forward_kernel_v2, 4)
    launch(kernel, -(-x.size // (width * BLOCK)), BLOCK, x.reshape(-1), bias, y.reshape(-1), C)
    return y


@versions_by_name
def bias_gelu_backward(dy, x, bias, dbias, version=None):
    """dx from dy and the forward's input x; the gradient of the bias is added into `dbias`."""
    rows, C, version = _check(x, bias, version)
    if not is_device(x):
        return bias_gelu_backward_reference(dy, x, bias, dbias)
    dx, arrays = empty_like(x), (dy.reshape(-1), x.reshape(-1), bias)
    if version == 1:
        launch(bias_gelu_backward_kernel_v1, -(-C // BLOCK), BLOCK, *arrays, dx.reshape(-1), dbias, rows, C)
        return dx
    lanes, tiles, chunk, chunks = cut(1, rows, C, 4)
    partial = empty((chunks, C), np.float32, like=x)
    launch(bias_gelu_backward_kernel_v2, (chunks, tiles), BLOCK, *arrays, dx.reshape(-1), partial.reshape(-1), rows, C,
           lanes, chunk)
    column_sum(partial, out=dbias)
    return dx


# Cost -----------------------------------------------------------------------------------------------------------------

def bias_gelu_forward_cost(M, C):
    """(bytes, FLOPs) over M rows of C columns."""
    return 4 * (2 * M * C + C), 10 * M * C


def bias_gelu_backward_cost(M, C):
    return 4 * (3 * M * C + 3 * C), 19 * M * C
