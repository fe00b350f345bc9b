"""Elementwise operations: the first kernels to read.

MATHEMATICS
    add    y = a + b                         da = db = dy
    SiLU   y = x · s, s = 1 / (1 + e^-x)     dx = dy · s · (1 + x · (1 - s))
    GELU   y = x/2 · (1 + tanh u), u = √(2/π) · (x + 0.044715 x³)
           dx = dy · ½ · (1 + tanh u + x · (1 - tanh² u) · du/dx),  du/dx = √(2/π) · (1 + 3 · 0.044715 x²)
    cast   y = x in another dtype
SHAPES
    every array is read as one long row of n elements, whatever its shape; float32, float16 or
    bfloat16
VERSIONS
    v1 naive: one thread an element: neighbouring threads read neighbouring addresses, so a warp's
       32 loads are one request.
    v2 vectorised: one thread four elements, by one 16-byte load and one 16-byte store: a quarter of
       the memory instructions.
LAUNCH
    v1 ceil(n / 256) blocks of 256 threads; v2 a quarter of the blocks. No shared memory.
DETERMINISM
    each output is written by one thread, from its own inputs: same bits every run.
COST
    bytes: 4 n for every array read or written; the arithmetic is free compared with it. Roof:
    memory bandwidth.
SOURCE
    SiLU: Elfwing et al. 2017, arXiv:1702.03118, eq. 2. GELU: Hendrycks and Gimpel 2016,
    arXiv:1606.08415, section 2.
READ NEXT
    reduce/trees.py, where threads first have to work together; then fuse/, which writes kernels like
    these.
"""

import math

import numpy as np

from ..device import cuda, empty, empty_like, float32, launch, load4, store4
from ..dtypes import in_single
from .fuse import EACH, Operation, as_it_is, fuse
from .operation import Problem, half, lacks_multiple, naive_and_vectorised, operation, single

# threads: eight warps, enough to hide memory latency, and any GPU runs several such blocks at once
BLOCK = 256
GELU_SLOPE = np.float32(math.sqrt(2.0 / math.pi))
GELU_CUBIC = np.float32(0.044715)


# References ---------------------------------------------------------------------------------------


def add_forward_reference(a, b):
    return a + b


def cast_forward_reference(x, dtype):
    return x.astype(dtype)


@in_single()
def silu_forward_reference(x):
    return x / (1 + np.exp(-x))


@in_single()
def silu_backward_reference(dy, x):
    s = 1 / (1 + np.exp(-x))
    return dy * (s * (1 + x * (1 - s)))


@in_single()
def gelu_forward_reference(x):
    return x * (1 + np.tanh(GELU_SLOPE * (x + GELU_CUBIC * x * x * x))) / 2


@in_single()
def gelu_backward_reference(dy, x):
    t = np.tanh(GELU_SLOPE * (x + GELU_CUBIC * x * x * x))
    return dy * (1 + t + x * (1 - t * t) * (GELU_SLOPE * (1 + 3 * GELU_CUBIC * x * x))) / 2


# Device functions: the arithmetic of one element --------------------------------------------------


@cuda.jit(device=True)
def silu(x):
    return x / (float32(1) + math.exp(-x))


@cuda.jit(device=True)
def silu_gradient(dy, x):
    s = float32(1) / (float32(1) + math.exp(-x))
    return dy * s * (float32(1) + x * (float32(1) - s))


@cuda.jit(device=True)
def gelu(x):
    return float32(0.5) * x * (float32(1) + math.tanh(GELU_SLOPE * (x + GELU_CUBIC * x * x * x)))


@cuda.jit(device=True)
def gelu_gradient(dy, x):
    t = math.tanh(GELU_SLOPE * (x + GELU_CUBIC * x * x * x))
    du = GELU_SLOPE * (float32(1) + float32(3) * GELU_CUBIC * x * x)
    return float32(0.5) * dy * (float32(1) + t + x * (float32(1) - t * t) * du)


# v1: one thread an element ------------------------------------------------------------------------


@cuda.jit
def add_forward_kernel_v1(a, b, y):
    i = cuda.grid(1)  # this thread's index in the whole grid: blockIdx.x · blockDim.x + threadIdx.x
    if i < y.size:  # the last block may be only partly used
        y[i] = float32(a[i]) + float32(b[i])


@cuda.jit
def silu_forward_kernel_v1(x, y):
    i = cuda.grid(1)
    if i < y.size:
        y[i] = silu(float32(x[i]))  # x may be float16; the arithmetic is float32


@cuda.jit
def silu_backward_kernel_v1(dy, x, dx):
    i = cuda.grid(1)
    if i < dx.size:
        dx[i] = silu_gradient(float32(dy[i]), float32(x[i]))


# v2: one thread four elements, 16 bytes at a time -------------------------------------------------


@cuda.jit
def add_forward_kernel_v2(a, b, y):
    i = cuda.grid(1) * 4  # the first of this thread's four elements
    if i < y.size:  # then all four exist: the record has checked that the size is a multiple of 4
        a0, a1, a2, a3 = load4(a, i)
        b0, b1, b2, b3 = load4(b, i)
        store4(y, i, a0 + b0, a1 + b1, a2 + b2, a3 + b3)


@cuda.jit
def silu_forward_kernel_v2(x, y):
    i = cuda.grid(1) * 4
    if i < y.size:
        x0, x1, x2, x3 = load4(x, i)
        store4(y, i, silu(x0), silu(x1), silu(x2), silu(x3))


@cuda.jit
def silu_backward_kernel_v2(dy, x, dx):
    i = cuda.grid(1) * 4
    if i < dx.size:
        dy0, dy1, dy2, dy3 = load4(dy, i)
        x0, x1, x2, x3 = load4(x, i)
        store4(
            dx,
            i,
            silu_gradient(dy0, x0),
            silu_gradient(dy1, x1),
            silu_gradient(dy2, x2),
            silu_gradient(dy3, x3),
        )


# GELU and cast have the same kernels with another line of arithmetic: fuse/ writes them from the
# functions above. `print(GELU.text("backward", 2))` shows one.

GELU = fuse(EACH, Operation(gelu, x=gelu_gradient), EACH, name="gelu", module=__name__)
CAST = fuse(EACH, Operation(as_it_is), EACH, name="cast", module=__name__)


# Cost ---------------------------------------------------------------------------------------------


def elementwise_cost(n, arrays, flops_per_element):
    """(bytes, FLOPs) of an operation over `n` float32 elements that reads and writes `arrays`
    arrays in all."""
    return 4 * n * arrays, n * flops_per_element


def add_forward_cost(n):
    return elementwise_cost(n, 3, 1)


def silu_forward_cost(n):
    return elementwise_cost(n, 2, 4)


def silu_backward_cost(n):
    return elementwise_cost(n, 3, 8)


def gelu_forward_cost(n):
    return elementwise_cost(n, 2, 9)


def gelu_backward_cost(n):
    return elementwise_cost(n, 3, 17)


def cast_forward_cost(n):
    return elementwise_cost(n, 2, 0)


# Operations ---------------------------------------------------------------------------------------


def _launch_each(version, *arrays):
    """Launch a kernel whose threads have `version.width` elements each; the last array is the
    result."""
    blocks = -(-arrays[-1].size // (version.width * BLOCK))
    launch(version.kernel, blocks, BLOCK, *(array.reshape(-1) for array in arrays))
    return arrays[-1]


IMAGES = half(32, 64, 64, 64)  # activations of the UNet, for the benchmark


@operation(
    reference=add_forward_reference,
    cost=add_forward_cost,
    versions=naive_and_vectorised(
        add_forward_kernel_v1, add_forward_kernel_v2, fits=lambda a: lacks_multiple(4, a.size)
    ),
    problems=[
        Problem(a=single(3, 5), b=single(3, 5)),
        Problem(a=single(4, 8), b=single(4, 8)),
        Problem(a=IMAGES, b=IMAGES, measured=True),
    ],
)
def add_forward(a, b, version=None):
    """a + b, both of one shape, as a new array."""
    if a.shape != b.shape:
        raise ValueError(f"add: a {a.shape} and b {b.shape} differ in shape")
    return _launch_each(version, a, b, empty_like(a))


@operation(
    reference=silu_forward_reference,
    cost=silu_forward_cost,
    versions=naive_and_vectorised(silu_forward_kernel_v1, silu_forward_kernel_v2),
    problems=[Problem(x=single(3, 5)), Problem(x=single(4, 8)), Problem(x=IMAGES, measured=True)],
)
def silu_forward(x, version=None):
    """SiLU of every element, as a new array."""
    return _launch_each(version, x, empty_like(x))


@operation(
    reference=silu_backward_reference,
    cost=silu_backward_cost,
    versions=naive_and_vectorised(silu_backward_kernel_v1, silu_backward_kernel_v2),
    problems=[Problem(dy=single(3, 5), x=single(3, 5)), Problem(dy=single(4, 8), x=single(4, 8))],
)
def silu_backward(dy, x, version=None):
    """dx from dy and the forward's input x."""
    return _launch_each(version, dy, x, empty_like(x))


@operation(
    reference=gelu_forward_reference,
    cost=gelu_forward_cost,
    versions=GELU.versions(),
    problems=[Problem(x=single(3, 5)), Problem(x=single(4, 8))],
)
def gelu_forward(x, version=None):
    """GELU (tanh form) of every element, as a new array."""
    return GELU.forward(x, version=version.number)


@operation(
    reference=gelu_backward_reference,
    cost=gelu_backward_cost,
    versions=GELU.versions("backward"),
    problems=[Problem(dy=single(3, 5), x=single(3, 5)), Problem(dy=single(4, 8), x=single(4, 8))],
)
def gelu_backward(dy, x, version=None):
    """dx from dy and the forward's input x."""
    return GELU.backward(dy, x, version=version.number)[0]


@operation(
    reference=cast_forward_reference,
    cost=cast_forward_cost,
    versions=CAST.versions(),
    problems=[
        Problem(x=single(3, 5), dtype=np.float16, tolerance=1e-3),
        Problem(x=single(3, 4), dtype=np.float16, tolerance=1e-3),
    ],
)
def cast_forward(x, dtype, version=None):
    """x in another float dtype, as a new array; its backward is the cast back."""
    return CAST.forward(x, version=version.number, out=empty(x.shape, dtype, like=x))


def cast_into(x, y):
    """x in the dtype of y, written to y, in place; returns y."""
    return CAST.forward(x, out=y)
