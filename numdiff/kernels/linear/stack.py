"""Linear layers of one input, all of one size and at equal distances in memory, as one product: the
conditioning on its way into every block of a DiT.

MATHEMATICS
    forward   y[b, g·N + n] = bias_g[n] + Σ_k x[b, k] · weight_g[n, k]         G layers of N outputs
    backward  dx[b, k] = Σ_g Σ_n dy[b, g·N + n] · weight_g[n, k]
              dweight_g[n, k] += Σ_b dy[b, g·N + n] · x[b, k]        dbias_g[n] += Σ_b dy[b, g·N + n]
              or dweight_g = …, where nothing is to be added to
    With 64 images each layer's product has one row of tiles, or one column, which a few
    multiprocessors work on while the others wait; together they read, or write, all weights at the
    memory's rate: 80 and 96 % of it on an H200 (28 layers of 6912 × 1152). 12 layers of 2304 × 384
    took 60, 120 and 70 µs one by one, and take 13, 13 and 22. dx is rounded once, at its end.
SHAPES
    x (B, K), weight_g (N, K), dy and y (B, G·N), float16 or bfloat16; bias_g (N,), dx, dweight_g,
    dbias_g float32. 128 divides N, 64 divides K. Weights, biases and gradients are views at equal
    distances, as a model of equal blocks has them.
VERSIONS
    that of matmul/products.py, on Hopper's tensor cores. Elsewhere each layer is a `linear`
    (nn/dit.py).
LAUNCH
    a launch forward; three backward: dx in slices, their sum, and the parameters' gradients.
DETERMINISM
    each sum in the order of k; the slices of dx in theirs.
COST
    forward 2 · (B K + G N K + B G N) bytes; backward 2 · G N K for dx and 4 · G N K for the
    weights' gradients. Roof: memory, for B below about 300.
SOURCE
    adaLN-Zero's layers: Peebles and Xie 2023, arXiv:2212.09748, section 3.2.
READ NEXT
    ../extras/fp8/, the same kernel on floats of 8 bits.
"""

import functools

import numpy as np

from ...device import empty, is_device
from ...device.requires import supports
from ...dtypes import is_half
from ..matmul.hopper.kernel import STACK_KERNELS
from ..matmul.product import Product, ProductFused, ProductOperand, Stacked, distance
from ..matmul.products import launch_products, stack_fits
from ..operation import Problem, half, operation, single
from ..operation.versions import capped
from .layer import linear_backward_reference, linear_forward_reference


def linear_stack_supports(like, weights, biases):
    """Whether there is a kernel for these weights and biases, and an x of the type and device of
    `like`."""
    return (
        is_device(like)
        and is_half(like.dtype)
        and len(weights) > 1
        and weights[0].dtype == like.dtype
        and stack_fits(*weights[0].shape)
        and supports(like, STACK_KERNELS)
        and capped("matmul", 6) == 6
        and None not in (distance(weights), distance(biases))
    )


# References ---------------------------------------------------------------------------------------


def linear_stack_forward_reference(x, layers):
    return np.concatenate([linear_forward_reference(x, weight, bias) for weight, bias in layers], 1)


def linear_stack_backward_reference(dy, x, weights, gradients=None, accumulate=True, need_dx=True):
    parts = np.split(dy, len(weights), 1)
    given = gradients or [(None, None)] * len(weights)
    every = [
        linear_backward_reference(part, x, weight, *into, need_dx=need_dx, accumulate=accumulate)
        for part, weight, into in zip(parts, weights, given, strict=True)
    ]
    return sum(every) if need_dx else None


# Cost ---------------------------------------------------------------------------------------------


def linear_stack_forward_cost(B, K, N):
    """(bytes, FLOPs) for N outputs in all."""
    return 2 * (B * K + N * K + B * N) + 4 * N, 2 * B * N * K


def linear_stack_backward_cost(B, K, N, gradients=True, accumulate=True, need_dx=True):
    """(bytes, FLOPs): weights are read, their gradients written, or read, too."""
    products = bool(gradients) + bool(need_dx)
    moved = products * 2 * (B * K + B * N) + bool(need_dx) * (2 * N * K + 4 * B * K)
    return moved + bool(gradients) * (
        4 * N * K * (1 + bool(accumulate)) + 8 * N
    ), products * 2 * B * N * K


# Problems: the layers are views of arrays ---------------------------------------------------------

GAP = 64  # elements after a small problem's weight, and after its bias
DEPTH, WIDTH = 12, 768  # blocks of a DiT-B, each with a layer (6 · WIDTH, WIDTH)
ROWS = DEPTH * 6 * WIDTH


def _views(flat, N, K, G):
    """[(weight (N, K), bias (N,))] of G layers in a flat array, with gaps."""
    each = N * K + N + 2 * GAP
    return [
        (flat[at : at + N * K].reshape(N, K), flat[at + N * K + GAP : at + N * K + GAP + N])
        for at in range(0, G * each, each)
    ]


def _both_ways(N, K, G, accumulate, arrays, version):
    """Forward and backward of G layers, whose weights are in `half` and whose biases in `flat`."""
    half_layers, layers, gradients = (
        _views(flat, N, K, G) for flat in (arrays.half, arrays.flat, arrays.gradient)
    )
    weights = [weight for weight, _ in half_layers]
    y = linear_stack_forward(arrays.x, [*zip(weights, [bias for _, bias in layers], strict=True)])
    return (
        y,
        linear_stack_backward(arrays.dy, arrays.x, weights, gradients, accumulate),
        arrays.gradient,
    )


def _small(B, N, K, G, accumulate, **more):
    size = G * (N * K + N + 2 * GAP)
    return Problem(
        f"float16, and backward, {G} of {N}×{K}{', written' * (not accumulate)}",
        once=True,
        x=half(B, K),
        dy=half(B, G * N),
        half=half(size),
        flat=single(size),
        gradient=single(size),
        run=functools.partial(_both_ways, N, K, G, accumulate),
        **more,
    )


def _of_a_dit(weight, bias):
    """(weights, biases) of DEPTH layers, one after the other in two flat arrays."""
    N, size = 6 * WIDTH, 6 * WIDTH * WIDTH
    return (
        [weight[at : at + size].reshape(N, WIDTH) for at in range(0, DEPTH * size, size)],
        [bias[at : at + N] for at in range(0, ROWS, N)],
    )


def _forward_of_a_dit(x, weight, bias):
    return linear_stack_forward(x, [*zip(*_of_a_dit(weight, bias), strict=True)])


def _backward_of_a_dit(x, dy, weight, dweight, dbias):
    weights, _ = _of_a_dit(weight, dbias)
    return linear_stack_backward(
        dy, x, weights, [*zip(*_of_a_dit(dweight, dbias), strict=True)], False
    )


# Operations ---------------------------------------------------------------------------------------


@operation(
    reference=linear_stack_forward_reference,
    cost=linear_stack_forward_cost,
    problems=[
        # rows of x that end within a tile, slices of dx, each width
        _small(8, 128, 64, 3, True),
        _small(8, 256, 128, 2, False, fast=False),
        _small(136, 128, 192, 2, True),
        Problem(
            x=half(64, WIDTH),
            weight=half(ROWS * WIDTH),
            bias=single(ROWS),
            call=_forward_of_a_dit,
            flops=linear_stack_forward_cost(64, WIDTH, ROWS)[1],
            measured=True,
        ),
    ],
)
def linear_stack_forward(x, layers):
    """y (B, G·N) of layers [(weight, bias)] as a new array; on a device those that
    `linear_stack_supports`."""
    weights, biases = map(Stacked, zip(*layers, strict=True))
    y = empty((len(x), len(weights)), x.dtype, like=x)
    _launch(ProductOperand(x), ProductOperand(weights, True), y, bias=biases)
    return y


@operation(
    reference=linear_stack_backward_reference,
    cost=linear_stack_backward_cost,
    problems=[
        Problem(
            x=half(64, WIDTH),
            dy=half(64, ROWS),
            weight=half(ROWS * WIDTH),
            dweight=single(ROWS * WIDTH),
            dbias=single(ROWS),
            call=_backward_of_a_dit,
            flops=linear_stack_backward_cost(64, WIDTH, ROWS, accumulate=False)[1],
            measured=True,
        )
    ],
)
def linear_stack_backward(dy, x, weights, gradients=None, accumulate=True, need_dx=True):
    """dx (B, K) in float32 as a new array, or None; the parameters' gradients are added into
    `gradients` [(dweight, dbias)], if they are given.

    accumulate: False: every dweight is written, whatever it held; each dbias is added to all the
    same
    """
    if gradients is not None:
        dweights, dbiases = map(Stacked, zip(*gradients, strict=True))
        _launch(
            ProductOperand(dy, True),
            ProductOperand(x),
            dweights,
            row_sums=dbiases,
            accumulate=accumulate,
        )
    if not need_dx:
        return None
    dx = empty(x.shape, np.float32, like=dy)
    _launch(ProductOperand(dy), ProductOperand(Stacked(weights)), dx)
    return dx


def _launch(a, b, c, **fused):
    launch_products([Product(a, b, ProductOperand(c), ProductFused(**fused))], rung=6)
