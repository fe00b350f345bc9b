"""Bias and GELU in one pass, between the two matmuls of a transformer's MLP.

MATHEMATICS
        z = x + bias          y = z/2 · (1 + tanh u),   u = √(2/π) · (z + 0.044715 z³)
        dx = dy · GELU'(z)    dbias[c] += Σ_rows dx      (GELU' as in elementwise.py; z is made again, not stored)
SHAPES
    x, y, dx, dy (..., C) float32, the other axes read as M rows; bias, dbias (C,)
VERSIONS
    v1 naive: one thread an element, backward a thread a column; v2 vectorised: four columns a thread, the backward's
    sums in a tree on the way: dx is not read again for dbias (C a multiple of 4). fuse/ writes both.
MEASURED
    NVIDIA H200, 2026-11-26, PyTorch 2.11.0: numdiff bench kernels --of files; * is the launcher's choice
    bias_gelu_forward, 64×256×3072, 3072, float16
        v1       233 µs      865 GB/s   21 % of memory
        v2*     86.5 µs    2,329 GB/s   57 % of memory   2.69 × v1
    bias_gelu_backward, 64×256×3072, 64×256×3072, float16
        v1     8,159 µs     37.0 GB/s    1 % of memory
        v2*      135 µs    2,229 GB/s   54 % of memory   60.2 × v1
LAUNCH, DETERMINISM
    as fuse/
COST
    bytes: 8 n forward; 12 n backward, where GELU's backward and then the bias's would move 16 n. FLOPs: 10 and 19 an
    element, a tanh counted as one. Roof: memory bandwidth.
SOURCE
    Hendrycks and Gimpel 2016, arXiv:1606.08415, section 2.
READ NEXT
    matmul/activations.py: where Hopper's kernels run both matmuls, GELU is part of them, and this file's kernels do not
    run (`mlp` in numdiff/nn/functional/feed_forward.py); numdiff/nn/dit.py, where the block is put together.
"""
import numpy as np

from ...device import is_device, over_batch
from ...dtypes import in_single
from ..elementwise import GELU_CUBIC, GELU_SLOPE, gelu, gelu_gradient
from ..fuse import EACH, PER_CHANNEL, UNCHANGED, Operation, fuse
from ..versions import versions_by_name

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


# Kernels --------------------------------------------------------------------------------------------------------------

def biased(x, bias):
    return x + bias


BIAS_GELU = fuse(EACH, Operation(biased, PER_CHANNEL, x=UNCHANGED, bias=UNCHANGED), Operation(gelu, x=gelu_gradient),
                 EACH, name="bias_gelu", module=__name__)


# Launchers ------------------------------------------------------------------------------------------------------------

@versions_by_name
def bias_gelu_forward(x, bias, version=None):
    """GELU(x (..., C) + bias (C,)), tanh form, as a new array."""
    BIAS_GELU.check(x, bias)
    return BIAS_GELU.forward(x, bias, version=version) if is_device(x) else bias_gelu_forward_reference(x, bias)


@versions_by_name
def bias_gelu_backward(dy, x, bias, dbias, version=None):
    """dx from dy and the forward's input x; the gradient of the bias is added into `dbias`."""
    BIAS_GELU.check(x, bias)
    if not is_device(x):
        return bias_gelu_backward_reference(dy, x, bias, dbias)
    return BIAS_GELU.backward(dy, x, bias, version=version, into={"bias": dbias})[0]


# Cost -----------------------------------------------------------------------------------------------------------------

def bias_gelu_forward_cost(M, C):
    """(bytes, FLOPs) over M rows of C columns."""
    return 4 * (2 * M * C + C), 10 * M * C


def bias_gelu_backward_cost(M, C):
    return 4 * (3 * M * C + 3 * C), 19 * M * C
