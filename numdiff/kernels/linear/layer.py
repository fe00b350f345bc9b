"""Linear layer: y = x·weightᵀ + bias, a matmul over all leading axes at once.

MATHEMATICS
    y = x·wᵀ + bias          x read as (rows, K), w (N, K): y_rn = Σ_k x_rk w_nk + bias_n
    dx = dy·w                dx_rk = Σ_n dy_rn w_nk
    dweight += dyᵀ·x         dw_nk = Σ_r dy_rn x_rk; or dweight = dyᵀ·x, where nothing is to be added to
    dbias += Σ_r dy_rn       every row got the same bias
    A layer whose result goes through a GELU gives both, u = x·wᵀ + bias and y = GELU(u); the layer
    after it, whose input is y, gives du = (dy·w) ∘ GELU'(u) instead of dx, and y again, so that y
    need not be kept: du first, then dweight. So does one whose result goes through SwiGLU, halves
    of u side by side and y half as wide, which is kept. The last layer of a ConvNeXt block gives z
    = x·wᵀ + bias and residual + scale ∘ z.
SHAPES
    x (..., K) and y (..., N), their leading axes taken together as rows; weight (N, K); bias (N,)
    or None x may be a Pair (concat.py), and then dx is one: matmul/pair.py reads and writes the two
    arrays; for other kernels they are joined
    all float32; or x, y, weight, dx, dy float16 or bfloat16 and bias, dweight, dbias float32, every
    sum in float32
VERSIONS
    those of matmul/: this file only says which operand is which. The bias is added where the matmul
    writes its result, so it costs no pass of its own; dbias, the sums of dyᵀ's rows, is made by the
    product dyᵀ·x where its kernel can (matmul/hopper/row_sums.py), else by reduce/trees.py.
MEMORY
    Of u and y the layer that has y again keeps u alone, and y replaces it: no array more. Elsewhere
    both are kept.
LAUNCH
    as in matmul/. The weight's gradient sums over all rows, often 100,000 for a result of 64 × 64:
    matmul/split_k.py is how that still fills the GPU.
DETERMINISM
    as matmul and reduce: every sum in a fixed order, no atomics.
COST
    forward 2·rows·N·K FLOPs; backward twice that. Roof: arithmetic, unless N or K is small.
SOURCE
    the chain rule; nothing to cite.
READ NEXT
    group.py, many small layers in one launch.
"""

import numpy as np

from ...device import fill_zero, is_device, over_batch
from ...device.batch_invariance import blocks, filled, rows_of_a_sample
from ...device.limits import multiprocessors_of
from ...device.side_stream import on_side_stream
from ...dtypes import working_type
from ..concat import Pair
from ..elementwise import gelu_backward, gelu_forward
from ..matmul import (
    Gated,
    activation_supports,
    gelu_supports,
    matmul_forward,
    matmul_forward_cost,
    matmul_gate_forward,
    matmul_gelu_backward,
    matmul_gelu_forward,
    matmul_layer_scale_forward,
    matmul_pair_backward,
    matmul_pair_forward,
    matmul_pair_gradient,
    matmul_swiglu_backward,
    matmul_swiglu_forward,
    pair_supports,
)
from ..matmul.problems import gate_problems
from ..operation import Problem, half, operation, single
from ..reduce.second_pass import deferrable
from ..reduce.trees import column_sum
from ..transformer.columns import as_columns
from ..transformer.gate import gate_forward
from ..transformer.swiglu import swiglu_backward, swiglu_forward

# Where the product takes the gate in: tiles of 128 × 192 of a block, at least, and columns.
# Sampling from a DiT-XL/2 (1152 columns) gains 1.6 % by it, from a DiT-S/2 (384) loses 4 %; others
# were not measured.
GATE_ROUNDS, GATE_COLUMNS = 2, 1024
LEAST_ROWS = 256  # of a product, where `batch_invariant` cuts the batch


# References ---------------------------------------------------------------------------------------


def linear_forward_reference(x, weight, bias=None, residual=None):
    x = x.joined() if isinstance(x, Pair) else x
    rows = x.reshape(-1, x.shape[-1])
    y = np.empty((len(rows), len(weight)), x.dtype)
    added = None if residual is None else residual.reshape(y.shape)
    working = working_type(x.dtype)
    transposed = weight.T.astype(working, copy=False)

    def part(i):
        given, out = rows[i].astype(working, copy=False), y[i] if y.dtype == working else None
        # the last, filled up, so that all products have the same extents
        if size and len(given) < size:
            product = np.matmul(filled(given, size), transposed)[: len(given)]
        else:
            product = np.matmul(given, transposed, out=out)
        if bias is not None:
            product += bias
        if added is not None:
            product += added[i]
        if product is not out:
            y[i] = product

    each = rows_of_a_sample(len(rows))
    size = each * (blocks(each, LEAST_ROWS) or 0)
    if size:

        def share(several):
            for k in range(several.start, several.stop):
                part(slice(k * size, min((k + 1) * size, len(rows))))

        over_batch(share, -(-len(rows) // size), x.size + y.size)
    else:
        over_batch(part, len(rows), x.size + y.size)
    return y.reshape(*x.shape[:-1], len(weight))


def linear_backward_reference(
    dy,
    x,
    weight,
    dweight,
    dbias=None,
    need_dx=True,
    residual=None,
    gelu_of=None,
    swiglu_of=None,
    accumulate=True,
    aside=None,
):
    if isinstance(x, Pair):
        dx = linear_backward_reference(
            dy,
            x.joined(),
            weight,
            dweight,
            dbias,
            need_dx,
            residual and residual.joined(),
            gelu_of,
            swiglu_of,
            accumulate,
            aside,
        )
        return x.parted(dx) if need_dx else None
    if x is None:
        x = gelu_forward(gelu_of).astype(gelu_of.dtype, copy=False)
    working = working_type(x.dtype)
    rows, inputs = dy.reshape(-1, dy.shape[-1]), x.reshape(-1, x.shape[-1])
    weight = weight.astype(working, copy=False)
    dx = np.empty_like(x) if need_dx else None
    added = None if residual is None else residual.reshape(inputs.shape)

    def part(i):
        dy_i = rows[i].astype(working, copy=False)
        if need_dx:
            product = dy_i @ weight
            dx.reshape(inputs.shape)[i] = product if added is None else product + added[i]
        return None if dweight is None else dy_i.T @ inputs[i].astype(working, copy=False)

    for sum_of_part in over_batch(part, len(rows), dy.size + x.size):
        if dweight is None:
            continue
        if accumulate:
            dweight += sum_of_part
        else:
            dweight[...], accumulate = sum_of_part, True
    if dbias is not None:
        column_sum(rows.astype(working, copy=False), dbias)
    if aside is not None:
        aside(rows, inputs)
    if dx is not None and swiglu_of is not None:
        return swiglu_backward(dx, swiglu_of)
    return (
        dx
        if dx is None or gelu_of is None
        else gelu_backward(dx, gelu_of).astype(dx.dtype, copy=False)
    )


# Costs --------------------------------------------------------------------------------------------


def linear_forward_cost(rows, N, K):
    return matmul_forward_cost(1, rows, N, K)


def linear_backward_cost(rows, N, K, accumulate=True, need_dx=True):
    """dx, if it is wanted, and dweight, each a matmul over the same three extents; a dweight that
    is added to is read, too."""
    moved, flops = matmul_forward_cost(1, rows, N, K)
    products = 1 + bool(need_dx)
    return products * moved + 4 * N * K * accumulate, products * flops


# A layer ------------------------------------------------------------------------------------------


def _check(x, weight):
    if x.shape[-1] != weight.shape[-1]:
        raise ValueError(f"x {x.shape} and weight {weight.shape} must agree in their last axis")


def _check_backward(dy, x, weight, dweight, residual, gelu_of, swiglu_of):
    if (weight if dweight is None else dweight).shape != weight.shape or dy.shape[
        -1
    ] != weight.shape[0]:
        raise ValueError(
            f"dweight {dweight is not None and dweight.shape} must have weight's shape {weight.shape}, "
            f"and dy {dy.shape} its first axis last"
        )
    if (residual is not None) + (gelu_of is not None) + (swiglu_of is not None) > 1:
        raise ValueError(
            "of residual, gelu_of and swiglu_of one can be given: add to what comes back"
        )
    if x is None and gelu_of is None:
        raise ValueError(
            "x is None: linear_backward computes it again from gelu_of=, which is None, too; give one"
        )


B, T, D = 64, 256, 768  # images, tokens and channels of a DiT-B/2
# what the layer before its attention takes and gives
TOKENS, QKV = half(B, T, D), half(B, T, 3 * D)
SMALL = {
    "dy": single(5, 8),
    "x": single(5, 12),
    "weight": single(8, 12),
    "dweight": single(8, 12),
    "dbias": single(8),
}


@operation(
    reference=linear_forward_reference,
    cost=linear_forward_cost,
    check=_check,
    chooses=True,
    versions=matmul_forward.operation.versions,
    problems=[
        Problem(x=single(5, 12), weight=single(8, 12), bias=single(8), versions=()),
        Problem("odd, no bias", x=single(2, 3, 7), weight=single(5, 7), versions=()),
        Problem(
            x=half(1, 9, 24),
            weight=half(16, 24),
            bias=single(16),
            residual=half(1, 9, 16),
            versions=(),
            tolerance=2e-3,
        ),
        Problem(
            x=TOKENS,
            weight=half(3 * D, D),
            bias=single(3 * D),
            versions=("mma", "hopper"),
            measured=True,
        ),
    ],
)
def linear_forward(x, weight, bias=None, version=None, residual=None):
    """x·weightᵀ + bias over the last axis, plus `residual` (like y) where it is given, as a new
    array.

    x: an array or a `Pair`
    """
    if isinstance(x, Pair):
        if version is None and residual is None and pair_supports(x, weight):
            return matmul_pair_forward(x, weight, bias)
        x = x.joined()
    if residual is not None:
        residual = residual.reshape(-1, residual.shape[-1])
    y = matmul_forward(
        x.reshape(-1, x.shape[-1]),
        weight,
        transpose_b=True,
        bias=bias,
        version=version,
        residual=residual,
    )
    return y.reshape(*x.shape[:-1], weight.shape[0])


@operation(
    reference=linear_backward_reference,
    cost=linear_backward_cost,
    check=_check_backward,
    chooses=True,
    versions=matmul_forward.operation.versions,
    writes=("dweight", "dbias"),
    problems=[
        Problem("", versions=(), fast=False, **SMALL),
        Problem("written", versions=(), accumulate=False, **SMALL),
        Problem(
            "float16",
            dy=half(3, 5, 16),
            x=half(3, 5, 24),
            weight=half(16, 24),
            dweight=single(16, 24),
            dbias=single(16),
            residual=half(3, 5, 24),
            versions=(),
            tolerance=2e-3,
        ),
        Problem(
            dy=QKV,
            x=TOKENS,
            weight=half(3 * D, D),
            dweight=single(3 * D, D),
            dbias=single(3 * D),
            versions=("mma", "hopper"),
            measured=True,
        ),
    ],
)
def linear_backward(
    dy,
    x,
    weight,
    dweight,
    dbias=None,
    need_dx=True,
    version=None,
    residual=None,
    gelu_of=None,
    swiglu_of=None,
    accumulate=True,
    aside=None,
):
    """dx as a new array (None unless `need_dx`); the parameters' gradients are added into dweight
    and dbias (None: not wanted, and not computed).

    residual: like x, or None: added to dx in the kernel that makes it
    accumulate: False: dweight is written, whatever it held; dbias is added to all the same
    gelu_of: u, like x, where x = GELU(u): what comes is du instead of dx, in one kernel where that
        can. Then x may be None: it is computed again, by the same kernel, which may leave it in
        place of u
    swiglu_of: u, twice as wide as x, where x = SwiGLU(u): as gelu_of
    aside: without dweight and dbias: aside(dy, x) is called with the matrices that they will be
        made of (gradients.py)
    Of a `Pair` x dx, and `residual`, are Pairs.
    """
    if isinstance(x, Pair):
        if (
            version is None
            and residual is gelu_of is swiglu_of is None
            and dweight is not None
            and pair_supports(x, weight)
        ):
            with deferrable(), on_side_stream(dy, dweight, dbias):
                matmul_pair_gradient(dy, x, dweight if accumulate else fill_zero(dweight), dbias)
            return matmul_pair_backward(dy, x, weight) if need_dx else None
        dx = linear_backward(
            dy,
            x.joined(),
            weight,
            dweight,
            dbias,
            need_dx,
            residual and residual.joined(),
            gelu_of,
            swiglu_of,
            accumulate,
            version=version,
        )
        return x.parted(dx) if need_dx else None
    if x is None and need_dx:
        return _backward_again(dy, weight, dweight, dbias, gelu_of, version, accumulate, aside)
    if x is None:
        x = gelu_forward(gelu_of)
    rows = dy.reshape(-1, dy.shape[-1])
    _parameters(rows, x, dweight, dbias, version, accumulate, aside)
    if not need_dx:
        return None
    if gelu_of is not None:
        return matmul_gelu_backward(rows, weight, gelu_of.reshape(-1, x.shape[-1])).reshape(x.shape)
    if swiglu_of is not None:
        return matmul_swiglu_backward(
            rows, weight, swiglu_of.reshape(-1, swiglu_of.shape[-1])
        ).reshape(swiglu_of.shape)
    if residual is not None:
        residual = residual.reshape(-1, x.shape[-1])
    return matmul_forward(rows, weight, version=version, residual=residual).reshape(x.shape)


def _parameters(rows, x, dweight, dbias, version, accumulate, aside):
    """The parameters' gradients, those that are wanted, from the rows of dy."""
    if aside is not None:
        aside(rows, x.reshape(-1, x.shape[-1]))
    elif dweight is not None:
        with deferrable(), on_side_stream(rows, dweight, dbias):
            matmul_forward(
                rows,
                x.reshape(-1, x.shape[-1]),
                transpose_a=True,
                out=dweight,
                accumulate=accumulate,
                version=version,
                row_sums=dbias,
            )
    elif dbias is not None:
        column_sum(rows, dbias)


def _backward_again(dy, weight, dweight, dbias, u, version, accumulate, aside):
    """du of x = GELU(u), which was not kept: du is computed first, and x with it."""
    rows, given = dy.reshape(-1, dy.shape[-1]), u.reshape(-1, u.shape[-1])
    again = dweight is not None or aside is not None
    found = matmul_gelu_backward(rows, weight, given, again)
    du, x = found if again else (found, None)
    _parameters(rows, x, dweight, dbias, version, accumulate, aside)
    return du.reshape(u.shape)


def linear_gelu_forward(x, weight, bias, keeps_u=True):
    """(u, GELU(u)) as new arrays, u = x·weightᵀ + bias; tanh form, in one kernel where
    `linear_gelu_supports`.

    keeps_u: False if no backward needs u, which may then be None
    """
    if not is_device(x):
        u = linear_forward_reference(x, weight, bias)
        return u, gelu_forward(u).astype(u.dtype, copy=False)
    u, y = matmul_gelu_forward(x.reshape(-1, x.shape[-1]), weight, bias, keeps_u)
    shape = (*x.shape[:-1], weight.shape[0])
    return u if u is None else u.reshape(shape), y.reshape(shape)


def linear_gate_forward_reference(x, weight, bias, residual, gate):
    return gate_forward(residual, linear_forward_reference(x, weight, bias), gate)


@operation(reference=linear_gate_forward_reference, problems=gate_problems)
def linear_gate_forward(x, weight, bias, residual, gate):
    """residual + gate · (x·weightᵀ + bias) as a new array: residual (B, T, N), gate (B, N), an
    array or `Columns`.

    In one kernel, with the bits of two; on a device only where `linear_gate_supports`.
    """
    columns, (_, tokens, width) = as_columns(gate), residual.shape
    gated = Gated(columns.flat, columns.first, columns.pitch, tokens)
    z = matmul_gate_forward(
        x.reshape(-1, x.shape[-1]), weight, bias, residual.reshape(-1, width), gated
    )
    return z.reshape(residual.shape)


def linear_gate_supports(x, gate, *weights):
    """True if a layer on x (B, T, K), with one of these weights, supports `gate` and a residual
    like its result, and it pays. It pays if a block has several tiles, so that the residual is
    loaded while another tile is multiplied."""
    tiles = -(-x.shape[0] * x.shape[1] // 128) * min(
        -(-weight.shape[0] // 192) for weight in weights
    )
    return (
        all(activation_supports(x, *weight.shape) for weight in weights)
        and x.shape[1] % 16 == 0
        and gate.dtype == x.dtype
        and as_columns(gate).flat.offset % 4 == 0
        and tiles >= GATE_ROUNDS * multiprocessors_of(x)
        and weights[0].shape[0] >= GATE_COLUMNS
    )


def linear_layer_scale_forward(x, weight, bias, scale, residual, keeps_z=True):
    """(z, residual + scale (N,) · z) as new arrays, z = x·weightᵀ + bias; in one kernel where
    `linear_gelu_supports`.

    keeps_z: False if no backward needs z, which may then be None
    """
    if not is_device(x):
        z = linear_forward_reference(x, weight, bias)
        return z, (residual + scale * z).astype(z.dtype, copy=False)
    N = weight.shape[0]
    z, y = matmul_layer_scale_forward(
        x.reshape(-1, x.shape[-1]), weight, bias, scale, residual.reshape(-1, N), keeps_z
    )
    return z if z is None else z.reshape(*residual.shape), y.reshape(*residual.shape)


def linear_gelu_supports(x, weight):
    """True where GELU, or a layer scale, is part of the kernels of a layer on x, forward, and
    GELU's derivative of that of the next one, backward."""
    return gelu_supports(x, *weight.shape)


def linear_swiglu_forward(x, weight, bias=None, keeps_u=True):
    """(u (..., 2 · H), SwiGLU(u) (..., H)) as new arrays, u = x·weightᵀ + bias; in one kernel where
    `linear_swiglu_supports`.

    keeps_u: False if no backward needs u, which may then be None
    """
    if not is_device(x):
        u = linear_forward_reference(x, weight, bias)
        return u, swiglu_forward(u)
    u, y = matmul_swiglu_forward(x.reshape(-1, x.shape[-1]), weight, bias, keeps_u)
    rows = x.shape[:-1]
    return u if u is None else u.reshape(*rows, u.shape[-1]), y.reshape(*rows, y.shape[-1])


def linear_swiglu_supports(x, w12, w3):
    """True where SwiGLU is part of the kernels of the layer w12 on x, forward, and of the layer w3
    after it, backward."""
    return activation_supports(x, *w12.shape, *w3.shape)
