"""Muon: momentum whose singular values are made equal, for weights that are matrices; AdamW keeps all others.

MATHEMATICS                                        for each matrix W (rows, columns) on its own
    g = gradient · c · u, as in adamw.py
    m = μ m + (1 - μ) g                            lies in the buffer of AdamW's first moment
    n = μ m + (1 - μ) g                            Nesterov's look ahead
    X = n / max(‖n‖_F, 10⁻⁷)                       so its singular values are at most 1
    O = newton_schulz(X)                           U·Vᵀ, nearly, of n = U·S·Vᵀ
    W = (1 - lr · decay) · W - lr · 0.2 √max(rows, columns) · O
    U·Vᵀ is the steepest descent where a step is measured by its largest singular value: rare directions, which a few
    examples ask for, get the step that common ones get. U·Vᵀ of full rank has numbers of root mean square
    1 / √max(rows, columns), so the factor makes that of the update 0.2, about AdamW's, and one learning rate and one
    decay serve both. (Jordan's own factor, √max(1, rows / columns), asks for a learning rate of its own.)
    Nothing changes where gradient_norm is not finite. ema and half follow the new weight as in adamw.py.
SHAPES
    weight, gradient, m, ema flat (n,) float32, half (n,) float16, which hold `Stack`s: `count` matrices of one shape,
    wherever they begin; X (count, rows, columns) in float16 where there is a half, else in float32
VERSIONS
    v1 naive: one thread an element at a time.
    v2 vectorised: four, by 16-byte loads and stores.
LAUNCH
    muon_momentum: two kernels, up to 64 blocks of 256 threads a matrix. The first updates m and sums the squares of n,
    a partial sum a block; the second sums those, makes n again and writes X. muon_apply: a thread for four elements.
DETERMINISM
    the sum of squares has a fixed order, which depends on the shape alone; the rest is elementwise.
COST
    bytes an element: 22 for momentum and X in float16 (g and m twice, m written), 20 to apply it with average and copy,
    where AdamW moves 38; FLOPs: newton_schulz.py.
SOURCE
    Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks", kellerjordan.github.io/posts/muon.
    The factor and the decay: Liu et al. 2025, "Muon is Scalable for LLM Training", arXiv:2502.16982, section 2.2.
READ NEXT
    step_state.py.
"""
import math
from typing import Any, NamedTuple

import numpy as np

from ...device import cuda, empty, float32, int32, is_device, launch, load4, store4, upload
from ..versions import versions_by_name
from .adamw import State, check_flat, clip_of, clip_reference, follow4, follow_reference, followers_of
from .ema import rest_of
from .grad_norm import BLOCK, block_sum, sum_of_squares_reference
from .newton_schulz import FIRST, newton_schulz

MAX_PARTS = 64  # blocks a matrix, at most BLOCK: with a few dozen matrices enough to fill any GPU
LEAST_NORM = 1e-7  # keeps a matrix of zeros from dividing
ROOT_MEAN_SQUARE = 0.2  # of an update; AdamW's is between 0.2 and 0.4


class Stack(NamedTuple):
    """Matrices of one shape in a flat buffer, each row by row. starts: (count,) int64 on the engine, multiples of 4."""

    starts: Any
    rows: int
    columns: int


class Blend(NamedTuple):
    """beta is μ, rest 1 - μ; first: what X is multiplied by."""

    beta: float
    rest: float
    clip_norm: float
    first: float


class Move(NamedTuple):
    """decay: decoupled; scale: the learning rate's factor."""

    decay: float
    scale: float


def scale_of(stack):
    """The learning rate's factor."""
    return ROOT_MEAN_SQUARE * math.sqrt(max(stack.rows, stack.columns))


# References -----------------------------------------------------------------------------------------------------------

def muon_momentum_reference(gradient, m, stack, gradient_norm, momentum, clip_norm=0.0, unscale=1.0):
    x = np.zeros((len(stack.starts), stack.rows * stack.columns), gradient.dtype)
    norm = float(gradient_norm[0])
    if math.isfinite(norm):
        rest = clip_reference(norm, clip_norm, unscale) * (1.0 - momentum)
        for start, n in zip(stack.starts, x, strict=True):
            g, m_ = gradient[start:start + n.size], m[start:start + n.size]
            m_ *= momentum
            m_ += np.multiply(g, rest, out=n)
            n += momentum * m_
            n *= FIRST / max(math.sqrt(sum_of_squares_reference(n)), LEAST_NORM)
    return x.reshape(-1, stack.rows, stack.columns)


def muon_apply_reference(weight, x, stack, learning_rate, gradient_norm, weight_decay):
    rate = float(learning_rate[0])
    if math.isfinite(gradient_norm[0]):
        for start, update in zip(stack.starts, x.reshape(len(x), -1), strict=True):
            w = weight[start:start + update.size]
            w *= 1.0 - rate * weight_decay
            w -= rate * scale_of(stack) * update


# Device functions -----------------------------------------------------------------------------------------------------

@cuda.jit(device=True, forceinline=True)
def ahead(g, m, blend):
    """n of one element, once m is the new one."""
    return blend.beta * m + blend.rest * g


@cuda.jit(device=True, forceinline=True)
def factor_of(partials, blend):
    """What n is multiplied by, from the partial sums of the block's matrix."""
    k, parts = cuda.threadIdx.x, cuda.gridDim.x
    total = block_sum(partials[cuda.blockIdx.y * parts + k] if k < parts else float32(0))
    return blend.first / max(math.sqrt(total), float32(LEAST_NORM))


# v1: one element a step -----------------------------------------------------------------------------------------------
# Block (p, j) takes its share of matrix j: elements 256 p + k, then one grid's width further, …

@cuda.jit
def muon_momentum_kernel_v1(gradient, m, partials, stack, state, blend):
    start, size = stack.starts[cuda.blockIdx.y], int32(stack.rows * stack.columns)
    finite, clip, total = math.isfinite(state.gradient_norm[0]), clip_of(state, blend.clip_norm), float32(0)
    for i in range(cuda.grid(1), size, cuda.gridsize(1)):
        g = gradient[start + i] * clip
        new = blend.beta * m[start + i] + blend.rest * g
        if finite:
            m[start + i] = new
        n = ahead(g, new, blend)
        total += n * n
    total = block_sum(total)
    if cuda.threadIdx.x == 0:
        partials[cuda.blockIdx.y * cuda.gridDim.x + cuda.blockIdx.x] = total


@cuda.jit
def muon_normalise_kernel_v1(gradient, m, x, partials, stack, state, blend):
    start, size = stack.starts[cuda.blockIdx.y], int32(stack.rows * stack.columns)
    factor, clip = factor_of(partials, blend), clip_of(state, blend.clip_norm)
    for i in range(cuda.grid(1), size, cuda.gridsize(1)):
        n = ahead(gradient[start + i] * clip, m[start + i], blend)
        x[cuda.blockIdx.y * size + i] = x.dtype.type(factor * n)


@cuda.jit
def muon_apply_kernel_v1(weight, x, stack, state, move, followers):
    i, size = cuda.grid(1), int32(stack.rows * stack.columns)
    if i < size and math.isfinite(state.gradient_norm[0]):
        at, rate = stack.starts[cuda.blockIdx.y] + i, state.learning_rate[0]
        w = (float32(1) - rate * move.decay) * weight[at] - rate * move.scale * float32(x[cuda.blockIdx.y * size + i])
        weight[at] = w
        if followers.averages:
            followers.ema[at] += rest_of(state.step, followers.rest, followers.averages == int32(1)) * (
                w - followers.ema[at])
        if followers.halves:
            followers.half[at] = followers.half.dtype.type(w)


# v2: four elements a step ---------------------------------------------------------------------------------------------

@cuda.jit
def muon_momentum_kernel_v2(gradient, m, partials, stack, state, blend):
    start, size = stack.starts[cuda.blockIdx.y], int32(stack.rows * stack.columns)
    finite, clip = math.isfinite(state.gradient_norm[0]), clip_of(state, blend.clip_norm)
    beta, rest = blend.beta, blend.rest * clip
    t0, t1, t2, t3 = float32(0), float32(0), float32(0), float32(0)
    for i in range(cuda.grid(1) * 4, size, cuda.gridsize(1) * 4):
        g0, g1, g2, g3 = load4(gradient, start + i)
        m0, m1, m2, m3 = load4(m, start + i)
        g0, g1, g2, g3 = rest * g0, rest * g1, rest * g2, rest * g3
        m0, m1, m2, m3 = beta * m0 + g0, beta * m1 + g1, beta * m2 + g2, beta * m3 + g3
        if finite:
            store4(m, start + i, m0, m1, m2, m3)
        n0, n1, n2, n3 = beta * m0 + g0, beta * m1 + g1, beta * m2 + g2, beta * m3 + g3
        t0, t1, t2, t3 = t0 + n0 * n0, t1 + n1 * n1, t2 + n2 * n2, t3 + n3 * n3
    total = block_sum((t0 + t1) + (t2 + t3))
    if cuda.threadIdx.x == 0:
        partials[cuda.blockIdx.y * cuda.gridDim.x + cuda.blockIdx.x] = total


@cuda.jit
def muon_normalise_kernel_v2(gradient, m, x, partials, stack, state, blend):
    start, size = stack.starts[cuda.blockIdx.y], int32(stack.rows * stack.columns)
    factor = factor_of(partials, blend)
    of_m, of_g = factor * blend.beta, factor * blend.rest * clip_of(state, blend.clip_norm)
    for i in range(cuda.grid(1) * 4, size, cuda.gridsize(1) * 4):
        g0, g1, g2, g3 = load4(gradient, start + i)
        m0, m1, m2, m3 = load4(m, start + i)
        store4(x, cuda.blockIdx.y * size + i, of_m * m0 + of_g * g0, of_m * m1 + of_g * g1, of_m * m2 + of_g * g2,
               of_m * m3 + of_g * g3)


@cuda.jit
def muon_apply_kernel_v2(weight, x, stack, state, move, followers):
    i, size = cuda.grid(1) * 4, int32(stack.rows * stack.columns)
    if i < size and math.isfinite(state.gradient_norm[0]):
        at, rate = stack.starts[cuda.blockIdx.y] + i, state.learning_rate[0]
        keep, step_size = float32(1) - rate * move.decay, rate * move.scale
        w0, w1, w2, w3 = load4(weight, at)
        x0, x1, x2, x3 = load4(x, cuda.blockIdx.y * size + i)
        w0, w1, w2, w3 = (keep * w0 - step_size * x0, keep * w1 - step_size * x1, keep * w2 - step_size * x2,
                          keep * w3 - step_size * x3)
        store4(weight, at, w0, w1, w2, w3)
        follow4(followers, state, at, w0, w1, w2, w3)


# Launchers ------------------------------------------------------------------------------------------------------------

def _version(version, stack):
    size = stack.rows * stack.columns
    if version is None:
        return 2 if size % 4 == 0 else 1
    if version == 2 and size % 4:
        raise ValueError(f"version 2 (vectorised) moves four elements at a time, and {stack.rows} × {stack.columns} is "
                         "not a multiple of 4; use version=1")
    return version


def _ones(array, like):
    return upload(np.ones(1, np.float32), like) if array is None else array


@versions_by_name
def muon_momentum(gradient, m, stack, gradient_norm, momentum, clip_norm=0.0, unscale=None, dtype=None, version=None):
    """`newton_schulz`'s x of the matrices in `stack`, as a new array (count, rows, columns); updates m in place.

    unscale: array (1,) by which the gradients are multiplied first (None: 1); dtype: of x on a device; None: float32
    """
    check_flat(gradient=gradient, m=m)
    if not 0 <= momentum < 1:
        raise ValueError(f"Muon needs 0 <= momentum < 1, got {momentum}")
    if not is_device(gradient):
        return muon_momentum_reference(gradient, m, stack, gradient_norm, momentum, clip_norm,
                                       1.0 if unscale is None else float(unscale[0]))
    version, (count,), size = _version(version, stack), stack.starts.shape, stack.rows * stack.columns
    parts = max(1, min(MAX_PARTS, -(-size // (4 * BLOCK))))
    partials = empty((count * parts,), np.float32, like=m)
    x = empty((count, stack.rows, stack.columns), dtype or np.float32, like=m)
    unscale = _ones(unscale, m)
    state = State(gradient_norm, gradient_norm, gradient_norm, unscale)  # the first two are not read
    blend = Blend(*map(float32, (momentum, 1.0 - momentum, clip_norm, FIRST)))
    first, second = ((muon_momentum_kernel_v1, muon_normalise_kernel_v1) if version == 1 else
                     (muon_momentum_kernel_v2, muon_normalise_kernel_v2))
    launch(first, (parts, count), BLOCK, gradient, m, partials, stack, state, blend)
    launch(second, (parts, count), BLOCK, gradient, m, x.reshape(-1), partials, stack, state, blend)
    return x


@versions_by_name
def muon_apply(weight, x, stack, step, learning_rate, gradient_norm, weight_decay, ema=None, ema_decay=0.0, half=None,
               version=None, ema_warmup=True):
    """Take the step x (count, rows, columns), what `newton_schulz` gave, from the matrices in `stack`, in place.

    step, ema, ema_decay, half, ema_warmup: as of `adamw_update`
    """
    check_flat(weight=weight, ema=ema, half=half)
    size = stack.rows * stack.columns
    if tuple(x.shape) != (*stack.starts.shape, stack.rows, stack.columns):
        raise ValueError(f"x {x.shape} must hold {stack.starts.shape[0]} matrices of {stack.rows} × {stack.columns}, "
                         "as muon_momentum made it of this stack")
    if not is_device(weight):
        muon_apply_reference(weight, x, stack, learning_rate, gradient_norm, weight_decay)
        for start in stack.starts:
            w, e, h = (None if a is None else a[start:start + size] for a in (weight, ema, half))
            follow_reference(w, step, gradient_norm, e, ema_decay, ema_warmup, h)
        return
    version = _version(version, stack)
    kernel, each = (muon_apply_kernel_v1, 1) if version == 1 else (muon_apply_kernel_v2, 4)
    launch(kernel, (-(-size // (each * BLOCK)), x.shape[0]), BLOCK, weight, x.reshape(-1), stack,
           State(step, learning_rate, gradient_norm, gradient_norm), Move(float32(weight_decay),
                                                                         float32(scale_of(stack))),
           followers_of(weight, ema, ema_decay, ema_warmup, half))


@versions_by_name
def muon_update(weight, gradient, m, stack, step, learning_rate, gradient_norm, momentum, weight_decay, clip_norm=0.0,
                unscale=None, ema=None, ema_decay=0.0, half=None, version=None, ema_warmup=True):
    """One Muon update of the matrices in `stack`, in place. What `adamw_update` takes, too, is as there.

    The products are of float16 where there is a `half` on a device, else of float32.
    """
    dtype = np.float16 if half is not None else np.float32
    x = muon_momentum(gradient, m, stack, gradient_norm, momentum, clip_norm, unscale, dtype, version=version)
    x = newton_schulz(x)
    muon_apply(weight, x, stack, step, learning_rate, gradient_norm, weight_decay, ema, ema_decay, half,
               version=version, ema_warmup=ema_warmup)


# Cost -----------------------------------------------------------------------------------------------------------------

def muon_momentum_cost(n, itemsize=4):
    """(bytes, FLOPs) of matrices of n elements in all; itemsize: of x."""
    return (20 + itemsize) * n, 11 * n


def muon_apply_cost(n, itemsize=4, ema=False, half=False):
    return (8 + itemsize + 8 * ema + 2 * half) * n, (4 + 3 * ema) * n
