"""Which rung of the ladder runs: the functions that everything above calls."""
from ...device import is_device
from .reference import matmul_forward_reference


def matmul_forward(a, b, transpose_a=False, transpose_b=False, bias=None, alpha=1.0, out=None, accumulate=False,
                   version=None):
    """alpha · A·B + bias, as a new array or in `out` (added to what `out` holds if `accumulate`)."""
    if not is_device(a):
        return matmul_forward_reference(a, b, transpose_a, transpose_b, bias, alpha, out, accumulate)
    raise NotImplementedError


def matmul_backward(dc, a, b, transpose_a=False, transpose_b=False, alpha=1.0):
    """(da, db) from dc and the forward's operands: two more matmuls."""
    if transpose_a:
        da = matmul_forward(b, dc, transpose_b, True, alpha=alpha)
    else:
        da = matmul_forward(dc, b, False, not transpose_b, alpha=alpha)
    if transpose_b:
        db = matmul_forward(dc, a, True, transpose_a, alpha=alpha)
    else:
        db = matmul_forward(a, dc, not transpose_a, False, alpha=alpha)
    return da, db
