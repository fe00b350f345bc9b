"""Linear layer: y = x·weightᵀ + bias, a matmul over all leading axes at once.

MATHEMATICS
    y = x·wᵀ + bias          x read as (rows, K), w (N, K): y_rn = Σ_k x_rk w_nk + bias_n
    dx = dy·w                dx_rk = Σ_n dy_rn w_nk
    dweight += dyᵀ·x         dw_nk = Σ_r dy_rn x_rk
    dbias += Σ_r dy_rn       every row got the same bias
SHAPES
    x (..., K) and y (..., N), their leading axes taken together as rows; weight (N, K); bias (N,) or None
    all float32; or x, y, weight, dx, dy float16 and bias, dweight, dbias float32, every sum in float32
VERSIONS
    those of matmul/: this file only says which operand is which. The bias is added where the matmul writes its
    result, so it costs no pass of its own.
LAUNCH
    as in matmul/. The weight's gradient sums over all rows, often 100,000 for a result of 64 × 64: matmul/split_k.py
    is how that still fills the GPU.
DETERMINISM
    as matmul and reduce: every sum in a fixed order, no atomics.
COST
    forward 2·rows·N·K FLOPs; backward twice that. Roof: arithmetic, unless N or K is small.
SOURCE
    the chain rule; nothing to cite.
READ NEXT
    conv2d.py, which turns a convolution into the same product.
"""
import numpy as np

from ..device import is_device, over_batch
from .matmul import matmul_forward, matmul_forward_cost
from .reduce import column_sum


def linear_forward_reference(x, weight, bias=None, residual=None):
    rows = x.reshape(-1, x.shape[-1])
    y = np.empty((len(rows), len(weight)), x.dtype)
    added = None if residual is None else residual.reshape(y.shape)
    working = np.float32 if x.dtype == np.float16 else x.dtype
    transposed = weight.T.astype(working, copy=False)

    def part(i):
        product = np.matmul(rows[i].astype(working, copy=False), transposed, out=y[i] if y.dtype == working else None)
        if bias is not None:
            product += bias
        if added is not None:
            product += added[i]
        if y.dtype != working:
            y[i] = product

    over_batch(part, len(rows), x.size + y.size)
    return y.reshape(*x.shape[:-1], len(weight))


def linear_backward_reference(dy, x, weight, dweight, dbias=None, need_dx=True):
    working = np.float32 if x.dtype == np.float16 else x.dtype
    rows, inputs = dy.reshape(-1, dy.shape[-1]), x.reshape(-1, x.shape[-1])
    weight = weight.astype(working, copy=False)
    dx = np.empty_like(x) if need_dx else None

    def part(i):
        dy_i = rows[i].astype(working, copy=False)
        if need_dx:
            dx.reshape(inputs.shape)[i] = dy_i @ weight
        return dy_i.T @ inputs[i].astype(working, copy=False)

    for sum_of_part in over_batch(part, len(rows), dy.size + x.size):
        dweight += sum_of_part
    if dbias is not None:
        column_sum(rows.astype(working, copy=False), dbias)
    return dx


def linear_forward(x, weight, bias=None, version=None, residual=None):
    """x·weightᵀ + bias over the last axis, plus `residual` (like y) where it is given, as a new array."""
    if x.shape[-1] != weight.shape[-1]:
        raise ValueError(f"x {x.shape} and weight {weight.shape} must agree in their last axis")
    if not is_device(x):
        return linear_forward_reference(x, weight, bias, residual)
    if residual is not None:
        residual = residual.reshape(-1, residual.shape[-1])
    y = matmul_forward(x.reshape(-1, x.shape[-1]), weight, transpose_b=True, bias=bias, version=version,
                       residual=residual)
    return y.reshape(*x.shape[:-1], weight.shape[0])


def linear_backward(dy, x, weight, dweight, dbias=None, need_dx=True, version=None):
    """dx as a new array (None unless `need_dx`); the parameters' gradients are added into dweight and dbias."""
    if dweight.shape != weight.shape or dy.shape[-1] != weight.shape[0]:
        raise ValueError(f"dweight {dweight.shape} must have weight's shape {weight.shape}, and dy {dy.shape} its "
                         "first axis last")
    if not is_device(x):
        return linear_backward_reference(dy, x, weight, dweight, dbias, need_dx)
    rows = dy.reshape(-1, dy.shape[-1])
    matmul_forward(rows, x.reshape(-1, x.shape[-1]), transpose_a=True, out=dweight, accumulate=True, version=version)
    if dbias is not None:
        column_sum(rows, dbias)
    return matmul_forward(rows, weight, version=version).reshape(x.shape) if need_dx else None


def linear_forward_cost(rows, N, K):
    return matmul_forward_cost(1, rows, N, K)


def linear_backward_cost(rows, N, K):
    """dx and dweight, each a matmul over the same three extents; dweight is added to, so it is read, too."""
    moved, flops = matmul_forward_cost(1, rows, N, K)
    return 2 * moved + 4 * N * K, 2 * flops
