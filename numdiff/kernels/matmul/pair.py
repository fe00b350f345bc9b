"""Products of a layer whose x is two arrays, read side by side as one, without a copy.

    y = x·Wᵀ + bias        dx = dy·W        dW += dyᵀ·x, dbias += the sums of dy's rows

x and dx are a `Pair` (../concat.py), as where a UNet's decoder meets a skip. Rung 6 alone reads one
(TWO MATRICES AS ONE in hopper/producer.py); linear/layer.py joins the arrays elsewhere.

SOURCE
    reference.py.
READ NEXT
    ../conv2d/hopper/convolution.py
"""

import functools

from ...device import empty, empty_like, is_device
from ...device.requires import supports
from ...dtypes import is_half
from ..concat import Pair
from ..operation import Problem, half, operation, single
from ..operation.versions import capped
from ..reduce.trees import column_sum
from .choice import by_eight
from .hopper.kernel import KERNELS
from .hopper.layout import BOX
from .problems import with_tile
from .product import Product, ProductFused, ProductOperand
from .products import launch_products
from .reference import matmul_forward_cost, matmul_forward_reference


def pair_supports(x, weight=None):
    """True where rung 6 reads a `Pair` x (..., K), or writes one like it, as it is; with this
    weight (N, K)."""
    a, b = x
    return (
        is_device(a)
        and a.dtype == b.dtype
        and is_half(a.dtype)
        and a.shape[-1] % BOX == 0
        and supports(a, KERNELS)
        and capped("matmul", 6) == 6
        and by_eight((a, b, weight), (b.shape[-1], 8 if weight is None else len(weight)))
        and (weight is None or weight.dtype == a.dtype)
    )


def _operand(x, transposed=False):
    """An array, or a `Pair`, as an operand."""
    first, second = x if isinstance(x, Pair) else (x, None)
    return ProductOperand(
        first.reshape(-1, first.shape[-1]),
        transposed,
        second=None if second is None else second.reshape(-1, second.shape[-1]),
    )


def _launch_pair(a, b, c, **fused):
    """a, b, c: `ProductOperand`, one of which is a pair; fused: the keywords of `ProductFused`."""
    launch_products([Product(a, b, c, ProductFused(**fused))], 6)


def matmul_pair_forward_reference(x, weight, bias=None):
    return matmul_forward_reference(x.joined(), weight, transpose_b=True, bias=bias)


def matmul_pair_backward_reference(dy, x, weight):
    return x.parted(matmul_forward_reference(dy, weight))


def matmul_pair_gradient_reference(dy, x, dweight, dbias=None):
    matmul_forward_reference(
        dy, x.joined(), transpose_a=True, out=dweight, accumulate=True, row_sums=dbias
    )


def matmul_pair_forward_cost(rows, N, K):
    """As `matmul_forward_cost`; the two other products cost the same."""
    return matmul_forward_cost(1, rows, N, K)


def matmul_pair_gradient_cost(rows, N, K):
    return matmul_forward_cost(1, rows, N, K)


X, DY, WEIGHT = Pair(half(9, 64), half(9, 8)), half(9, 8), half(8, 72)
# matmul/test_half.py has others
PROBLEM = functools.partial(
    Problem,
    "float16, two arrays",
    bfloat16=True,
    fast=False,
    within=functools.partial(with_tile, 64, 6),
)


@operation(
    reference=matmul_pair_forward_reference,
    cost=matmul_pair_forward_cost,
    problems=[PROBLEM(x=X, weight=WEIGHT, bias=single(8))],
)
def matmul_pair_forward(x, weight, bias=None):
    """x·weightᵀ + bias as a new array (..., N): x a `Pair` (..., K) that `pair_supports`, weight
    (N, K)."""
    y = empty((*x.shape[:-1], len(weight)), weight.dtype, like=weight)
    _launch_pair(_operand(x), _operand(weight, True), _operand(y), bias=bias)
    return y


@operation(
    reference=matmul_pair_backward_reference,
    cost=matmul_pair_forward_cost,
    problems=[PROBLEM(dy=DY, x=X, weight=WEIGHT)],
)
def matmul_pair_backward(dy, x, weight):
    """dy (..., N)·weight (N, K) as a new `Pair` like x."""
    dx = Pair(*map(empty_like, x))
    _launch_pair(_operand(dy), _operand(weight), _operand(dx))
    return dx


@operation(
    reference=matmul_pair_gradient_reference,
    cost=matmul_pair_gradient_cost,
    writes=("dweight", "dbias"),
    problems=[PROBLEM(dy=DY, x=X, dweight=single(8, 72), dbias=single(8))],
)
def matmul_pair_gradient(dy, x, dweight, dbias=None):
    """dweight (N, K) += dyᵀ·x, dbias (N,) += the sums of dy's rows."""
    if dbias is not None and dbias.offset % 16:
        column_sum(dy, dbias)
        dbias = None
    operands = _operand(dy, True), _operand(x), _operand(dweight)
    _launch_pair(*operands, accumulate=True, row_sums=dbias)
