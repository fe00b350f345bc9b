"""Products in one kernel with what follows them in a transformer's block: GELU, SwiGLU, a gate, a
layer's scale.

    forward     (u, GELU(u)), u = x·Wᵀ + bias               (u, SwiGLU(u))
                residual + gate · (x·Wᵀ + bias)             (z, residual + scale · z), z = x·Wᵀ + bias
    backward    (dy·W) ∘ GELU'(u), and GELU(u) again        what SwiGLU's backward makes of dy·W

Rung 6 has an epilogue for each (hopper/epilogues.py and its neighbours), rung 5 for GELU
(mma_epilogues.py). Elsewhere the product is followed by a kernel of ../elementwise.py,
../transformer/swiglu.py or ../transformer/gate.py.

SOURCE
    ../elementwise.py, ../transformer/swiglu.py and ../transformer/gate.py, for the functions.
READ NEXT
    pair.py
"""

import functools

import numpy as np

from ...device import empty
from ..elementwise import gelu_backward, gelu_forward
from ..operation import operation
from ..transformer.gate import gate_forward
from ..transformer.swiglu import swiglu_backward, swiglu_forward
from .choice import by_eight
from .launcher import matmul_forward
from .problems import activation_problems
from .product import Product, ProductFused, ProductOperand
from .products import launch_products, rung_of


def activation_supports(x, *extents):
    """True where rung 6 takes products of x, so that what follows them costs no pass of its own.

    extents: of the matrices along the axes that are contiguous in one of them
    """
    return rung_of(x) == 6 and by_eight((x,), extents)


def gelu_supports(x, *extents):
    """True where rung 5 or 6 takes products of x, so that GELU and its derivative cost no pass of
    their own; extents: as in `activation_supports`."""
    return rung_of(x) > 4 and by_eight((x,), extents)


def _require(a, **wanted):
    """Raise a `ValueError` unless arrays that go with `a` have these shapes: name=(array or None,
    shape)."""
    wrong = [
        f"{name} {shape}, not {tuple(x.shape)}"
        for name, (x, shape) in wanted.items()
        if x is not None and tuple(x.shape) != shape
    ]
    if wrong:
        raise ValueError(f"a {tuple(a.shape)} needs {' and '.join(wrong)}")


def _in_one(supports, a, others, *extents):
    """Whether one kernel takes `a` and arrays like it; extents: as in `supports`."""
    alike = all(x.dtype == a.dtype for x in others)
    return supports(a, *extents) and alike and by_eight(others, ())


def _launch_activation(a, b, c, transpose_b, **fused):
    """c = A·B or A·Bᵀ with what is fused to it: the keywords of `ProductFused`."""
    product = Product(
        ProductOperand(a), ProductOperand(b, transpose_b), ProductOperand(c), ProductFused(**fused)
    )
    launch_products([product])


# GELU ---------------------------------------------------------------------------------------------


@operation(problems=functools.partial(activation_problems, "gelu"))
def matmul_gelu_forward(a, b, bias, keeps_u=True):
    """(u, GELU(u)) as new arrays, u = a (M, K) · b (N, K)ᵀ + bias (N,); in one kernel where
    `gelu_supports`.

    keeps_u: False if no backward needs u, which is then None
    """
    (M, K), N = a.shape, b.shape[0]
    _require(a, b=(b, (N, K)), bias=(bias, (N,)))
    if bias.dtype != np.float32 or not _in_one(gelu_supports, a, (b,), K, N):
        u = matmul_forward(a, b, transpose_b=True, bias=bias)
        return u, gelu_forward(u)
    y = empty((M, N), a.dtype, like=a)
    u = empty((M, N), a.dtype, like=a) if keeps_u else None
    _launch_activation(
        a, b, y if u is None else u, True, activation="gelu", other=y, bias=bias, keeps_u=keeps_u
    )
    return u, y


@operation(problems=functools.partial(activation_problems, "gelu", backward=True))
def matmul_gelu_backward(a, b, u, again=False):
    """(a (M, K) · b (K, N)) ∘ GELU'(u (M, N)) as a new array; in one kernel where `gelu_supports`.

    again: give (that, GELU(u)), the second as a new array or in place of u, which must not be read
    afterwards
    """
    (M, K), N = a.shape, b.shape[1]
    _require(a, b=(b, (K, N)), u=(u, (M, N)))
    if not _in_one(gelu_supports, a, (b, u), K, N):
        du = gelu_backward(matmul_forward(a, b), u)
        return (du, gelu_forward(u)) if again else du
    c = empty((M, N), a.dtype, like=a)
    _launch_activation(
        a, b, c, False, activation="gelu_again_gradient" if again else "gelu_gradient", other=u
    )
    return (c, u) if again else c


# SwiGLU -------------------------------------------------------------------------------------------


@operation(problems=functools.partial(activation_problems, "swiglu"))
def matmul_swiglu_forward(a, b, bias=None, keeps_u=True):
    """(u, h) as new arrays: u = a (M, K) · b (2 · H, K)ᵀ + bias (2 · H,), h = silu(u[:, :H]) · u[:,
    H:].

    One kernel where `activation_supports` has K and H. keeps_u: False if no backward needs u, then
    None
    """
    (M, K), H = a.shape, len(b) // 2
    _require(a, b=(b, (2 * H, K)), bias=(bias, (2 * H,)))
    if not _in_one(activation_supports, a, (b,), K, H):
        u = matmul_forward(a, b, transpose_b=True, bias=bias)
        return u, swiglu_forward(u)
    h = empty((M, H), a.dtype, like=a)
    u = empty((M, 2 * H), a.dtype, like=a) if keeps_u else None
    _launch_activation(
        a, b, h if u is None else u, True, activation="swiglu", other=h, bias=bias, keeps_u=keeps_u
    )
    return u, h


@operation(problems=functools.partial(activation_problems, "swiglu", backward=True))
def matmul_swiglu_backward(a, b, u):
    """du (M, 2 · H) as a new array: what SwiGLU's backward makes of dh = a (M, K) · b (K, H) and
    its input u like du. One kernel where `activation_supports` has K and H.
    """
    (M, K), H = a.shape, b.shape[1]
    _require(a, b=(b, (K, H)), u=(u, (M, 2 * H)))
    if not _in_one(activation_supports, a, (b, u), K, H):
        return swiglu_backward(matmul_forward(a, b), u)
    du = empty((M, 2 * H), a.dtype, like=a)
    _launch_activation(a, b, du, False, activation="swiglu_gradient", other=u)
    return du


# What is added to a residual ----------------------------------------------------------------------


def matmul_gate_forward(a, b, bias, residual, gated):
    """residual (M, N) + gate · (a (M, K) · b (N, K)ᵀ + bias (N,)) as a new array (M, N), for a
    `Gated` like a.

    Only where `activation_supports` has K and N; the sum in brackets is rounded before it is gated.
    """
    (M, _), N = a.shape, b.shape[0]
    if gated.tokens % 16 or M % gated.tokens or gated.first % 2 or gated.pitch % 2:
        raise ValueError(
            f"{M} rows in images of {gated.tokens} must be whole images of a multiple of 16, and gates at "
            f"even places, not from {gated.first} on every {gated.pitch}; use gate_forward"
        )
    c = empty((M, N), a.dtype, like=a)
    _launch_activation(a, b, c, True, activation="gate", other=residual, bias=bias, residual=gated)
    return c


@operation(problems=functools.partial(activation_problems, "layer_scale"))
def matmul_layer_scale_forward(a, b, bias, scale, residual, keeps_z=True):
    """(z, residual + scale (N,) · z) as new arrays, z = a (M, K) · b (N, K)ᵀ + bias (N,), residual
    (M, N); in one kernel where `activation_supports`.

    keeps_z: False if no backward needs z, which is then None
    """
    (M, K), N = a.shape, b.shape[0]
    _require(a, b=(b, (N, K)), bias=(bias, (N,)), scale=(scale, (N,)), residual=(residual, (M, N)))
    if not _in_one(activation_supports, a, (b, residual), K, N):
        z = matmul_forward(a, b, transpose_b=True, bias=bias)
        return z, gate_forward(
            residual.reshape(1, M, N), z.reshape(1, M, N), scale.reshape(1, N)
        ).reshape(M, N)
    y = empty((M, N), a.dtype, like=a)
    z = empty((M, N), a.dtype, like=a) if keeps_z else None
    _launch_activation(
        a,
        b,
        y if z is None else z,
        True,
        activation="layer_scale",
        other=y,
        bias=bias,
        keeps_u=keeps_z,
        residual=residual,
        scale=scale,
    )
    return z, y
