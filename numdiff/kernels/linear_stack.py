"""Linear layers of one input, all of one size and at equal distances in memory, as one product: the conditioning on its
way into every block of a DiT.

MATHEMATICS
    forward   y[b, g·N + n] = bias_g[n] + Σ_k x[b, k] · weight_g[n, k]         G layers of N outputs
    backward  dx[b, k] = Σ_g Σ_n dy[b, g·N + n] · weight_g[n, k]
              dweight_g[n, k] += Σ_b dy[b, g·N + n] · x[b, k]        dbias_g[n] += Σ_b dy[b, g·N + n]
              or dweight_g = …, where nothing is to be added to
    With 64 images each layer's product has one row of tiles, or one column, which a few multiprocessors work on while
    the others wait; together they read, or write, all weights at the memory's rate: 80 and 96 % of it on an H200 (28
    layers of 6912 × 1152). 12 layers of 2304 × 384 took 60, 120 and 70 µs one by one, and take 13, 13 and 22. dx is
    rounded once, at its end.
SHAPES
    x (B, K), weight_g (N, K), dy and y (B, G·N), float16 or bfloat16; bias_g (N,), dx, dweight_g, dbias_g float32.
    128 divides N, 64 divides K. Weights, biases and gradients are views at equal distances, as a model of equal blocks
    has them.
VERSIONS
    that of matmul/stack.py, on Hopper's tensor cores. Elsewhere each layer is a `linear` (nn/dit.py).
LAUNCH
    a launch forward; three backward: dx in slices, their sum, and the parameters' gradients.
DETERMINISM
    each sum in the order of k; the slices of dx in theirs.
COST
    forward 2 · (B K + G N K + B G N) bytes; backward 2 · G N K for dx and 4 · G N K for the weights' gradients. Roof:
    memory, for B below about 300.
SOURCE
    adaLN-Zero's layers: Peebles and Xie 2023, arXiv:2212.09748, section 3.2.
READ NEXT
    matmul/hopper_fp8.py, the same kernel on floats of 8 bits.
"""
import numpy as np

from ..device import is_device
from ..device.requires import supports
from ..dtypes import is_half
from .linear import linear_backward_reference, linear_forward_reference
from .matmul import stack
from .versions import capped


def linear_stack_supports(like, weights, biases):
    """Whether there is a kernel for these weights and biases, and an x of the type and device of `like`."""
    return (is_device(like) and is_half(like.dtype) and len(weights) > 1 and weights[0].dtype == like.dtype
            and stack.fits(*weights[0].shape) and supports(like, stack.STACK_KERNELS) and capped("matmul", 6) == 6
            and None not in (stack.distance(weights), stack.distance(biases)))


def linear_stack_forward(x, layers):
    """y (B, G·N) of layers [(weight, bias)] as a new array; on a device those that `linear_stack_supports`."""
    if not is_device(x):
        return np.concatenate([linear_forward_reference(x, weight, bias) for weight, bias in layers], 1)
    return stack.stack_forward(x, *zip(*layers, strict=True))


def linear_stack_backward(dy, x, weights, gradients=None, accumulate=True, need_dx=True):
    """dx (B, K) in float32 as a new array, or None; the parameters' gradients are added into `gradients` [(dweight,
    dbias)], if they are given.

    accumulate: False: every dweight is written, whatever it held; each dbias is added to all the same
    """
    if not is_device(x):
        parts = np.split(dy, len(weights), 1)
        given = gradients or [(None, None)] * len(weights)
        every = [linear_backward_reference(part, x, weight, *into, need_dx=need_dx, accumulate=accumulate)
                 for part, weight, into in zip(parts, weights, given, strict=True)]
        return sum(every) if need_dx else None
    if gradients is not None:
        stack.stack_weight_gradient(dy, x, *zip(*gradients, strict=True), accumulate)
    return stack.stack_input_gradient(dy, weights) if need_dx else None


# Cost -----------------------------------------------------------------------------------------------------------------

def linear_stack_forward_cost(B, K, N):
    """(bytes, FLOPs) for N outputs in all."""
    return 2 * (B * K + N * K + B * N) + 4 * N, 2 * B * N * K


def linear_stack_backward_cost(B, K, N, gradients=True, accumulate=True, need_dx=True):
    """(bytes, FLOPs): weights are read, their gradients written, or read, too."""
    products = bool(gradients) + bool(need_dx)
    moved = products * 2 * (B * K + B * N) + bool(need_dx) * (2 * N * K + 4 * B * K)
    return moved + bool(gradients) * (4 * N * K * (1 + bool(accumulate)) + 8 * N), products * 2 * B * N * K
