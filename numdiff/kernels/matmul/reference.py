"""What a matmul computes, in NumPy, and what it costs.

MATHEMATICS
    c = alpha · A·B + bias        A = a or aᵀ (M, K), B = b or bᵀ (K, N), bias (N,) added to every row
    dA = alpha · dc·Bᵀ            since c_mn depends on A_mk by alpha · B_kn: dA_mk = alpha · Σ_n dc_mn B_kn
    dB = alpha · Aᵀ·dc            likewise dB_kn = alpha · Σ_m A_mk dc_mn
    where a is stored transposed, da is dA transposed: da = (dc·Bᵀ)ᵀ = B·dcᵀ. So each gradient is again one matmul
    of the same kind, and no array is ever transposed in memory.
SHAPES
    a (..., M, K), or (..., K, M) with transpose_a; b (..., K, N), or (..., N, K) with transpose_b;
    c (..., M, N) the leading axes, the batch, are the same in all three
SOURCE
    the definition of the product; its gradients follow from d(A·B) = dA·B + A·dB.
READ NEXT
    naive.py, the first kernel.
"""

import numpy as np

from ...dtypes import working_type
from ..reduce.trees import column_sum


def matmul_forward_reference(
    a,
    b,
    transpose_a=False,
    transpose_b=False,
    bias=None,
    alpha=1.0,
    out=None,
    accumulate=False,
    residual=None,
    out_dtype=None,
    row_sums=None,
):
    """Operands of 16 bits are multiplied in float32, and the result is rounded once."""
    if row_sums is not None:
        column_sum(a.astype(row_sums.dtype, copy=False), row_sums)
    working, dtype = working_type(a.dtype), a.dtype if out_dtype is None else out_dtype
    left, right = (
        np.swapaxes(x, -1, -2) if transpose else x
        for x, transpose in ((a, transpose_a), (b, transpose_b))
    )
    in_place = out is not None and out.dtype == working and not accumulate and residual is None
    c = np.matmul(
        left.astype(working, copy=False),
        right.astype(working, copy=False),
        out=out if in_place else None,
    )
    if alpha != 1.0:
        c *= c.dtype.type(alpha)
    if bias is not None:
        c += bias
    if residual is not None:
        c += residual
    if out is None:
        return c.astype(dtype, copy=False)
    if not in_place:
        out[...] = out.astype(working, copy=False) + c if accumulate else c
    return out


def matmul_forward_cost(batch, M, N, K):
    """(bytes, FLOPs): each operand read once and the result written once; a multiply and an add for
    every (m, n, k)."""
    return 4 * batch * (M * K + K * N + M * N), 2 * batch * M * N * K
