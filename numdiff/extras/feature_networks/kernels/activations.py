"""What follows a product: bias and ReLU, written among the channels of a wider array; and the exact
GELU.

MATHEMATICS
    bias_relu   out[p, first + c] = max(x[p, c] + bias[c], 0)
    gelu_erf    y = x/2 · (1 + erf(x / √2))
    No gradients: the networks that use them are not trained.
SHAPES
    x (..., C), bias (C,), out (..., N) float32 with N ≥ first + C: branches of a block are written side by side.
    gelu_erf: any shape
VERSIONS
    v1 naive: one thread an element.
    v2 vectorised: one thread four neighbours, by 16-byte loads and stores.
LAUNCH
    one thread an element (v1) or four (v2), 256 a block.
DETERMINISM
    elementwise.
COST
    bytes: x is read and as much is written. Roof: memory bandwidth.
SOURCE
    GELU: Hendrycks and Gimpel 2016, arXiv:1606.08415, section 2.
READ NEXT
    resize.py
"""

import math

import numpy as np

from ....device import cuda, empty_like, float32, launch, load4, on_host, over_batch, store4
from ....device.common import divide
from ....kernels.elementwise import elementwise_cost
from ....kernels.operation import Problem, lacks_multiple, naive_and_vectorised, operation, single

BLOCK = 256  # threads
SQRT_HALF = math.sqrt(0.5)
SINGLE_SQRT_HALF = np.float32(SQRT_HALF)


# References ---------------------------------------------------------------------------------------


def bias_relu_forward_reference(x, bias, out, first=0):
    place = out[..., first : first + x.shape[-1]]
    np.add(x, bias, out=place)
    np.maximum(place, 0, out=place)


@on_host
def gelu_erf_rows(x, y):
    for i in range(len(x)):
        y[i] = 0.5 * x[i] * (1.0 + math.erf(x[i] * SQRT_HALF))


def gelu_erf_forward_reference(x):
    x = np.ascontiguousarray(x)
    y = np.empty_like(x)
    flat, out = x.reshape(-1), y.reshape(-1)
    over_batch(lambda some: gelu_erf_rows(flat[some], out[some]), x.size, x.size)
    return y


# Device function ----------------------------------------------------------------------------------


@cuda.jit(device=True)
def gelu_erf(x):
    return float32(0.5) * x * (float32(1) + math.erf(x * SINGLE_SQRT_HALF))


# v1: one thread an element ------------------------------------------------------------------------


@cuda.jit
def bias_relu_forward_kernel_v1(x, bias, out, C, N, first):
    n = cuda.grid(1)
    if n < x.size:
        p, c = divide(n, C)
        out[p * N + first + c] = max(x[n] + bias[c], float32(0))


@cuda.jit
def gelu_erf_forward_kernel_v1(x, y):
    n = cuda.grid(1)
    if n < y.size:
        y[n] = gelu_erf(x[n])


# v2: one thread four neighbours -------------------------------------------------------------------


@cuda.jit
def bias_relu_forward_kernel_v2(x, bias, out, C, N, first):
    n = cuda.grid(1) * 4
    if n < x.size:
        p, c = divide(n, C)
        x0, x1, x2, x3 = load4(x, n)
        b0, b1, b2, b3 = load4(bias, c)
        zero = float32(0)
        y0, y1, y2, y3 = (
            max(x0 + b0, zero),
            max(x1 + b1, zero),
            max(x2 + b2, zero),
            max(x3 + b3, zero),
        )
        store4(out, p * N + first + c, y0, y1, y2, y3)


@cuda.jit
def gelu_erf_forward_kernel_v2(x, y):
    n = cuda.grid(1) * 4
    if n < y.size:
        x0, x1, x2, x3 = load4(x, n)
        store4(y, n, gelu_erf(x0), gelu_erf(x1), gelu_erf(x2), gelu_erf(x3))


# Operations ---------------------------------------------------------------------------------------


def _check(x, bias, out, first):
    C, N = x.shape[-1], out.shape[-1]
    if x.shape[:-1] != out.shape[:-1] or bias.shape != (C,) or first < 0 or first + C > N:
        raise ValueError(
            f"x {tuple(x.shape)} with bias {tuple(bias.shape)} goes to channels {first} to {first + C} "
            f"of out {tuple(out.shape)}: give arrays of the same pixels, and as many channels"
        )


def _fits(x, out, first):
    lacks = (lacks_multiple(4, n, "channels") for n in (x.shape[-1], out.shape[-1], first))
    return next((lack for lack in lacks if lack), None)


@operation(
    reference=bias_relu_forward_reference,
    cost=lambda x: (8 * x.size, 2 * x.size),
    check=_check,
    versions=naive_and_vectorised(
        bias_relu_forward_kernel_v1, bias_relu_forward_kernel_v2, fits=_fits
    ),
    problems=[
        Problem(x=single(3, 5, 8), bias=single(8), out=single(3, 5, 24), first=12),
        Problem("odd", x=single(7, 5), bias=single(5), out=single(7, 9), first=3),
        Problem(
            x=single(64, 35, 35, 64),
            bias=single(64),
            out=single(64, 35, 35, 256),
            measured="not yet",
        ),
    ],
    writes=("out",),
)
def bias_relu_forward(x, bias, out, first=0, version=None):
    """Writes max(x + bias, 0) of x (..., C) into the channels from `first` on of `out` (..., N)."""
    C, N = x.shape[-1], out.shape[-1]
    blocks = -(-x.size // version.width // BLOCK)
    launch(version.kernel, blocks, BLOCK, x.reshape(-1), bias, out.reshape(-1), C, N, first)


@operation(
    reference=gelu_erf_forward_reference,
    cost=lambda n: elementwise_cost(n, 2, 20),
    versions=naive_and_vectorised(
        gelu_erf_forward_kernel_v1,
        gelu_erf_forward_kernel_v2,
        fits=lambda x: lacks_multiple(4, x.size),
    ),
    problems=[
        Problem(x=single(3, 8)),
        Problem(x=single(5, 7)),
        Problem(x=single(64, 257, 3072), measured="not yet"),
    ],
)
def gelu_erf_forward(x, version=None):
    """x/2 · (1 + erf(x / √2)), as a new array."""
    y = empty_like(x)
    blocks = -(-y.size // version.width // BLOCK)
    launch(version.kernel, blocks, BLOCK, x.reshape(-1), y.reshape(-1))
    return y
