"""Bias and GELU in one pass, between the two matmuls of a transformer's MLP.

MATHEMATICS
        z = x + bias          y = z/2 · (1 + tanh u),   u = √(2/π) · (z + 0.044715 z³)
        dx = dy · GELU'(z)    dbias[c] += Σ_rows dx      (GELU' as in elementwise.py; z is made again, not stored)
SHAPES
    x, y, dx, dy (..., C) float32, the other axes read as M rows; bias, dbias (C,)
VERSIONS
    v1 naive: one thread an element, backward a thread a column; v2 vectorised: four columns a
    thread, the backward's sums in a tree in the same pass: dx is not read again for dbias (C a
    multiple of 4). fuse/ writes both.
LAUNCH, DETERMINISM
    as fuse/
COST
    bytes: 8 n forward; 12 n backward, where GELU's backward and then the bias's would move 16 n.
    FLOPs: 10 and 19 an element, a tanh counted as one. Roof: memory bandwidth.
SOURCE
    Hendrycks and Gimpel 2016, arXiv:1606.08415, section 2.
READ NEXT
    matmul/activations.py: where Hopper's kernels run both matmuls, GELU is part of them, and this
    file's kernels do not run (`mlp` in numdiff/nn/functional/feed_forward.py); numdiff/nn/dit.py,
    where the block is put together.
"""

import numpy as np

from ...device import on_host, over_batch
from ...dtypes import in_single
from ..cpu.exp import exponential, sigmoid
from ..elementwise import GELU_CUBIC, GELU_SLOPE, gelu, gelu_gradient
from ..fuse import EACH, PER_CHANNEL, UNCHANGED, Operation, fuse
from ..operation import Problem, half, operation, single

# Python floats take the arrays' type
SLOPE, BOTH = float(GELU_SLOPE), float(GELU_SLOPE) * float(GELU_CUBIC)
ONE, THREE, SLOPE_2, BOTH_2 = (np.float32(value) for value in (1, 3, 2 * SLOPE, 2 * BOTH))
PARALLEL_THRESHOLD_FACTOR = 4  # an element is 4 times cheaper than the threshold assumes


# References ---------------------------------------------------------------------------------------


def bias_gelu_forward_reference(x, bias):
    z = x + bias
    return 0.5 * z * (1 + np.tanh(z * (SLOPE + BOTH * z * z)))


def bias_gelu_backward_reference(dy, x, bias, dbias):
    z = x + bias
    t = np.tanh(z * (SLOPE + BOTH * z * z))
    dx = dy * 0.5 * (1 + t + z * (1 - t * t) * (SLOPE + 3 * BOTH * z * z))
    dbias += dx.reshape(-1, len(bias)).sum(0)
    return dx


# Where there is no GPU: loops compiled for the host -----------------------------------------------
# (1 + tanh u) / 2 is the sigmoid of 2 u.


@on_host
def gelu_rows(x, bias, y):
    for row in range(len(x)):
        for c in range(len(bias)):
            z = x[row, c] + bias[c]
            y[row, c] = z * sigmoid(z * (SLOPE_2 + BOTH_2 * z * z))


@on_host
def gelu_gradient_rows(dy, x, bias, dx, dbias):
    """dbias (C,) float64: the sum of these rows."""
    for row in range(len(x)):
        for c in range(len(bias)):
            z = x[row, c] + bias[c]
            e = exponential(-z * (SLOPE_2 + BOTH_2 * z * z))
            s = ONE / (ONE + e)  # 1 - s is e · s, which loses no digits where s is nearly 1
            dx[row, c] = dy[row, c] * s * (ONE + (e * s) * z * (SLOPE_2 + THREE * BOTH_2 * z * z))
        for c in range(len(bias)):
            dbias[c] += dx[row, c]


def _rows(array, C):
    return np.ascontiguousarray(array).reshape(-1, C)


@in_single()
def bias_gelu_forward_cpu(x, bias):
    if x.dtype != np.float32:
        return bias_gelu_forward_reference(x, bias)
    rows, y = _rows(x, len(bias)), np.empty_like(x, order="C")
    out = y.reshape(rows.shape)
    over_batch(
        lambda some: gelu_rows(rows[some], bias, out[some]),
        len(rows),
        x.size // PARALLEL_THRESHOLD_FACTOR,
    )
    return y


@in_single()
def bias_gelu_backward_cpu(dy, x, bias, dbias):
    if x.dtype != np.float32:
        return bias_gelu_backward_reference(dy, x, bias, dbias)
    (g, rows), dx = (_rows(a, len(bias)) for a in (dy, x)), np.empty_like(x, order="C")
    out = dx.reshape(rows.shape)

    def part(some):
        total = np.zeros(len(bias))
        gelu_gradient_rows(g[some], rows[some], bias, out[some], total)
        return total

    dbias += sum(over_batch(part, len(rows), x.size // PARALLEL_THRESHOLD_FACTOR)).astype(
        dbias.dtype
    )
    return dx


# Kernels ------------------------------------------------------------------------------------------


def biased(x, bias):
    return x + bias


BIAS_GELU = fuse(
    EACH,
    Operation(biased, PER_CHANNEL, x=UNCHANGED, bias=UNCHANGED),
    Operation(gelu, x=gelu_gradient),
    EACH,
    name="bias_gelu",
    module=__name__,
)


# Cost ---------------------------------------------------------------------------------------------


def bias_gelu_forward_cost(M, C):
    """(bytes, FLOPs) over M rows of C columns."""
    return 4 * (2 * M * C + C), 10 * M * C


def bias_gelu_backward_cost(M, C):
    return 4 * (3 * M * C + 3 * C), 19 * M * C


# Operations ---------------------------------------------------------------------------------------

HIDDEN, WIDTH = half(64, 256, 4 * 768), single(4 * 768)  # of a DiT-B/2, for the benchmark
SHAPES = (2, 3, 36), (1, 2, 132), (2, 2, 7)


@operation(
    reference=bias_gelu_forward_cpu,
    cost=bias_gelu_forward_cost,
    check=lambda x, bias: BIAS_GELU.check(x, bias),
    versions=BIAS_GELU.versions(),
    problems=[
        *(Problem(x=single(*shape), bias=single(shape[2])) for shape in SHAPES),
        Problem(x=half(2, 5, 8), bias=single(8)),
        Problem(x=HIDDEN, bias=WIDTH, measured=True),
    ],
)
def bias_gelu_forward(x, bias, version=None):
    """GELU(x (..., C) + bias (C,)), tanh form, as a new array."""
    return BIAS_GELU.forward(x, bias, version=version.number)


@operation(
    reference=bias_gelu_backward_cpu,
    cost=bias_gelu_backward_cost,
    check=lambda x, bias: BIAS_GELU.check(x, bias),
    versions=BIAS_GELU.versions("backward"),
    problems=[
        *(
            Problem(
                dy=single(*shape), x=single(*shape), bias=single(shape[2]), dbias=single(shape[2])
            )
            for shape in SHAPES
        ),
        Problem(dy=half(2, 5, 8), x=half(2, 5, 8), bias=single(8), dbias=single(8)),
        Problem(dy=HIDDEN, x=HIDDEN, bias=WIDTH, dbias=WIDTH, measured=True),
    ],
    writes=("dbias",),
)
def bias_gelu_backward(dy, x, bias, dbias, version=None):
    """dx from dy and the forward's input x; the gradient of the bias is added into `dbias`."""
    return BIAS_GELU.backward(dy, x, bias, version=version.number, into={"bias": dbias})[0]
