"""Muon: momentum whose singular values are made equal, for weights that are matrices; AdamW keeps
all others.

MATHEMATICS                                        for each matrix W (rows, columns) on its own
    g = gradient · c · u, as in adamw.py
    m = μ m + (1 - μ) g                            stored in the buffer of AdamW's first moment
    n = μ m + (1 - μ) g                            Nesterov's look ahead
    X = n / max(‖n‖_F, 10⁻⁷)                       so its singular values are at most 1
    O = newton_schulz(X)                           U·Vᵀ, nearly, of n = U·S·Vᵀ
    W = (1 - lr · decay) · W - lr · 0.2 √max(rows, columns) · O
    U·Vᵀ is the steepest descent where a step is measured by its largest singular value: rare
    directions, which a few examples ask for, get the step that common ones get. U·Vᵀ of full rank
    has numbers of root mean square 1 / √max(rows, columns), so the factor makes that of the update
    0.2, about AdamW's, and one learning rate and one decay serve both. (Jordan's own factor,
    √max(1, rows / columns), needs a separate learning rate.)
    Nothing changes where gradient_norm is not finite. ema and half follow the new weight as in
    adamw.py.
SHAPES
    weight, gradient, m, ema flat (n,) float32, half (n,) float16, which hold `MuonStack`s: `count`
    matrices, wherever they begin; X (count, rows, columns) in float16 where there is a half, else
    in float32
STACKS OF SEVERAL SHAPES
    A UNet has a few matrices of each of many shapes, whose products are so small that the number of
    launches is what they cost. A stack may hold matrices of up to `rows` × `columns`: X has each in
    its first rows and columns, and zeros around it, which stay zeros and add nothing. `alike` says
    which shapes of a model should share one.
VERSIONS
    v1 naive: one thread an element at a time.
    v2 vectorised: four, by 16-byte loads and stores.
LAUNCH
    muon_momentum: two kernels, up to 64 blocks of 256 threads a matrix. The first updates m and
    sums the squares of n, a partial sum a block; the second sums those, makes n again and writes X.
    muon_apply: a thread for four elements.
DETERMINISM
    the sum of squares has a fixed order, which depends on the shape alone; the rest is elementwise.
COST
    bytes an element: 22 for momentum and X in float16 (g and m twice, m written), 20 to apply it
    with average and copy, where AdamW moves 38; FLOPs: newton_schulz.py.
SOURCE
    Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks",
    kellerjordan.github.io/posts/muon. The factor and the decay: Liu et al. 2025, "Muon is Scalable
    for LLM Training", arXiv:2502.16982, section 2.2.
READ NEXT
    step_state.py.
"""

import functools
import math
from typing import Any, NamedTuple

import numpy as np

from ...device import cuda, empty, float32, int32, launch, load4, store4, uint32, upload
from ...kernels.operation import (
    Problem,
    half,
    integers,
    lacks_multiple,
    naive_and_vectorised,
    numbers,
    operation,
    single,
)
from ...kernels.optimizer.adamw import (
    AdamWCopies,
    State,
    check_flat,
    clip_of,
    clip_reference,
    follow,
    follow4,
    followers_of,
)
from ...kernels.optimizer.ema import rest_of
from ...kernels.optimizer.grad_norm import BLOCK, block_sum, sum_of_squares_reference
from .newton_schulz import FIRST, newton_schulz, newton_schulz_estimate

MAX_PARTS = 64  # blocks a matrix, at most BLOCK: with a few dozen matrices enough to fill any GPU
LEAST_NORM = 1e-7  # keeps a matrix of zeros from dividing
MULTIPLE = 128  # of rows and columns that are padded: wgmma's tiles take them
PASSES = 42 / 3000  # ns an element in the passes in addition to the products, at 3 TB/s
ROOT_MEAN_SQUARE = 0.2  # of an update; AdamW's is between 0.2 and 0.4


class MuonStack(NamedTuple):
    """Matrices in a flat buffer, each row by row. starts: (count,) int64 on the engine, multiples
    of 4.

    extents: None if all are rows × columns, else (2 · count,) int64 on the engine: rows and columns
        of each, at most those, columns multiples of 4
    """

    starts: Any
    rows: int
    columns: int
    extents: Any = None


class MuonPlaces(NamedTuple):
    """A `MuonStack` as kernels see it. padded: 0, or 1 where extents are to be read."""

    starts: Any
    extents: Any
    rows: int
    columns: int
    padded: int


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


def scale_of(rows, columns):
    """The learning rate's factor."""
    return ROOT_MEAN_SQUARE * math.sqrt(max(rows, columns))


def shapes_of(stack):
    """[(rows, columns)] of its matrices; for arrays of NumPy."""
    if stack.extents is None:
        return [(stack.rows, stack.columns)] * len(stack.starts)
    return [tuple(shape) for shape in stack.extents.reshape(-1, 2).tolist()]


# References ---------------------------------------------------------------------------------------


def muon_momentum_reference(
    gradient, m, stack, gradient_norm, momentum, clip_norm=0.0, unscale=None, dtype=None
):
    x = np.zeros((len(stack.starts), stack.rows, stack.columns), gradient.dtype)
    norm = float(gradient_norm[0])
    if math.isfinite(norm):
        factor = 1.0 if unscale is None else float(unscale[0])
        rest = clip_reference(norm, clip_norm, factor) * (1.0 - momentum)
        for start, (rows, columns), into in zip(stack.starts, shapes_of(stack), x, strict=True):
            g, m_ = gradient[start : start + rows * columns], m[start : start + rows * columns]
            n = rest * g
            m_ *= momentum
            m_ += n
            n += momentum * m_
            n *= FIRST / max(math.sqrt(sum_of_squares_reference(n)), LEAST_NORM)
            into[:rows, :columns] = n.reshape(rows, columns)
    return x


def muon_apply_reference(weight, x, stack, state, weight_decay, copies=None):
    copies, rate = copies or AdamWCopies(), float(state.learning_rate[0])
    if math.isfinite(state.gradient_norm[0]):
        for start, (rows, columns), update in zip(stack.starts, shapes_of(stack), x, strict=True):
            w = weight[start : start + rows * columns].reshape(rows, columns)
            w *= 1.0 - rate * weight_decay
            w -= rate * scale_of(rows, columns) * update[:rows, :columns]
    for start, (rows, columns) in zip(stack.starts, shapes_of(stack), strict=True):
        w, ema, half = (
            a if a is None else a[start : start + rows * columns]
            for a in (weight, copies.ema, copies.half)
        )
        follow(w, state, copies._replace(ema=ema, half=half))


# Device functions ---------------------------------------------------------------------------------


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


@cuda.jit(device=True, forceinline=True)
def extent_of(stack):
    """(rows, columns) of the block's matrix."""
    rows, columns = int32(stack.rows), int32(stack.columns)
    if stack.padded:
        rows = int32(stack.extents[2 * cuda.blockIdx.y])
        columns = int32(stack.extents[2 * cuda.blockIdx.y + 1])
    return rows, columns


@cuda.jit(device=True, forceinline=True)
def within(i, stack, rows, columns):
    """Which element of its matrix of rows × columns element i of X is; -1 for zeros around it."""
    at = int32(i)
    if stack.padded:
        row = int32(uint32(i) // uint32(stack.columns))
        column = int32(i - row * stack.columns)
        at = int32(row * columns + column if row < rows and column < columns else -1)
    return at


@cuda.jit(device=True, forceinline=True)
def in_x(i, stack, columns):
    """Which element of X element i of its matrix is."""
    at = int32(i)
    if stack.padded:
        row = int32(uint32(i) // uint32(columns))
        at = int32(row * stack.columns + i - row * columns)
    return at


@cuda.jit(device=True, forceinline=True)
def scale_in(stack, move, rows, columns):
    """The learning rate's factor for a matrix."""
    return (
        float32(ROOT_MEAN_SQUARE) * math.sqrt(float32(max(rows, columns)))
        if stack.padded
        else move.scale
    )


# v1: one element a step ---------------------------------------------------------------------------
# Block (p, j) takes its share of matrix j: elements 256 p + k, then one grid's width further, …


@cuda.jit
def muon_momentum_kernel_v1(gradient, m, partials, stack, state, blend):
    rows, columns = extent_of(stack)
    start, size = stack.starts[cuda.blockIdx.y], int32(rows * columns)
    finite, clip, total = (
        math.isfinite(state.gradient_norm[0]),
        clip_of(state, blend.clip_norm),
        float32(0),
    )
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
    rows, columns = extent_of(stack)
    factor, clip = factor_of(partials, blend), clip_of(state, blend.clip_norm)
    for i in range(cuda.grid(1), size, cuda.gridsize(1)):
        at, n = within(i, stack, rows, columns), float32(0)
        if at >= 0:
            n = ahead(gradient[start + at] * clip, m[start + at], blend)
        x[cuda.blockIdx.y * size + i] = x.dtype.type(factor * n)


@cuda.jit
def muon_apply_kernel_v1(weight, x, stack, state, move, followers):
    rows, columns = extent_of(stack)
    i, size = cuda.grid(1), int32(stack.rows * stack.columns)
    if i < rows * columns and math.isfinite(state.gradient_norm[0]):
        at, rate = stack.starts[cuda.blockIdx.y] + i, state.learning_rate[0]
        update = float32(x[cuda.blockIdx.y * size + in_x(i, stack, columns)])
        w = (float32(1) - rate * move.decay) * weight[at] - rate * scale_in(
            stack, move, rows, columns
        ) * update
        weight[at] = w
        if followers.averages:
            followers.ema[at] += rest_of(
                state.step, followers.rest, followers.averages == int32(1)
            ) * (w - followers.ema[at])
        if followers.halves:
            followers.half[at] = followers.half.dtype.type(w)


# v2: four elements a step -------------------------------------------------------------------------


@cuda.jit
def muon_momentum_kernel_v2(gradient, m, partials, stack, state, blend):
    rows, columns = extent_of(stack)
    start, size = stack.starts[cuda.blockIdx.y], int32(rows * columns)
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
    rows, columns = extent_of(stack)
    factor = factor_of(partials, blend)
    of_m, of_g = factor * blend.beta, factor * blend.rest * clip_of(state, blend.clip_norm)
    for i in range(cuda.grid(1) * 4, size, cuda.gridsize(1) * 4):
        at = within(i, stack, rows, columns)
        g0 = g1 = g2 = g3 = m0 = m1 = m2 = m3 = float32(0)
        if at >= 0:
            g0, g1, g2, g3 = load4(gradient, start + at)
            m0, m1, m2, m3 = load4(m, start + at)
        store4(
            x,
            cuda.blockIdx.y * size + i,
            of_m * m0 + of_g * g0,
            of_m * m1 + of_g * g1,
            of_m * m2 + of_g * g2,
            of_m * m3 + of_g * g3,
        )


@cuda.jit
def muon_apply_kernel_v2(weight, x, stack, state, move, followers):
    rows, columns = extent_of(stack)
    i, size = cuda.grid(1) * 4, int32(stack.rows * stack.columns)
    if i < rows * columns and math.isfinite(state.gradient_norm[0]):
        at, rate = stack.starts[cuda.blockIdx.y] + i, state.learning_rate[0]
        keep, step_size = (
            float32(1) - rate * move.decay,
            rate * scale_in(stack, move, rows, columns),
        )
        w0, w1, w2, w3 = load4(weight, at)
        x0, x1, x2, x3 = load4(x, cuda.blockIdx.y * size + in_x(i, stack, columns))
        w0, w1, w2, w3 = (
            keep * w0 - step_size * x0,
            keep * w1 - step_size * x1,
            keep * w2 - step_size * x2,
            keep * w3 - step_size * x3,
        )
        store4(weight, at, w0, w1, w2, w3)
        follow4(followers, state, at, (w0, w1, w2, w3))


# Which shapes share a stack -----------------------------------------------------------------------


def alike(shapes, multiprocessors):
    """{shape: the shape that it is padded to} for stacks that take the least time on a GPU, by an
    estimate.

    shapes: {(rows, columns): how many}. Two stacks become one as long as that saves time: launches,
    for arithmetic.
    """
    ceil = {n: -(-n // MULTIPLE) * MULTIPLE for shape in shapes for n in shape}
    # (its shapes, padded to, how many)
    groups = [({shape}, shape, count) for shape, count in shapes.items()]

    @functools.cache  # as of most pairs nothing changes from turn to turn
    def time(shape, count):
        return (
            newton_schulz_estimate((count, *shape), multiprocessors)
            + PASSES * math.prod(shape) * count
        )

    def joined(a, b):
        padded = tuple(max(ceil.get(m, m), ceil.get(n, n)) for m, n in zip(a[1], b[1], strict=True))
        return a[0] | b[0], padded, a[2] + b[2]

    def saved(a, b):
        if (a[1][0] > a[1][1]) != (b[1][0] > b[1][1]) or any(s[1] % 4 for s in a[0] | b[0]):
            return 0.0  # a tall one has its Gram matrix on the other side; v2 moves four columns
        return time(*a[1:]) + time(*b[1:]) - time(*joined(a, b)[1:])

    while pairs := [
        (saved(a, b), i, j) for i, a in enumerate(groups) for j, b in enumerate(groups[:i])
    ]:
        best, i, j = max(pairs)
        if best <= 0:
            break
        groups.append(joined(groups.pop(i), groups.pop(j)))
    return {shape: padded for found, padded, _ in groups for shape in found}


# Cost ---------------------------------------------------------------------------------------------


def muon_momentum_cost(n, itemsize=4):
    """(bytes, FLOPs) of matrices of n elements in all; itemsize: of x."""
    return (20 + itemsize) * n, 11 * n


def muon_apply_cost(n, itemsize=4, ema=False, half=False):
    return (8 + itemsize + 8 * ema + 2 * half) * n, (4 + 3 * ema) * n


# Operations ---------------------------------------------------------------------------------------


def _places(stack):
    padded = stack.extents is not None
    return MuonPlaces(
        stack.starts,
        stack.extents if padded else stack.starts,
        stack.rows,
        stack.columns,
        int(padded),
    )


def _ones(array, like):
    return upload(np.ones(1, np.float32), like) if array is None else array


def _lacks_fours(stack):
    """What v2 needs and a stack lacks; None if its matrices are made of fours."""
    return lacks_multiple(4, stack.rows * stack.columns)


def _check_momentum(gradient, m, momentum):
    check_flat(gradient=gradient, m=m)
    if not 0 <= momentum < 1:
        raise ValueError(f"Muon needs 0 <= momentum < 1, got {momentum}")


def _check_apply(weight, x, stack, copies):
    copies = copies or AdamWCopies()
    check_flat(weight=weight, ema=copies.ema, half=copies.half)
    if tuple(x.shape) != (*stack.starts.shape, stack.rows, stack.columns):
        raise ValueError(
            f"x {x.shape} must hold {stack.starts.shape[0]} matrices of {stack.rows} × {stack.columns}, "
            "as muon_momentum made it of this stack"
        )


def _problems(make):
    """The small problems of an operation: two matrices of a flat buffer that has room for three.
    `make` takes the label, the stack and the buffer's length."""
    found = []
    for rows, columns, extents in ((3, 5, None), (24, 16, None), (24, 16, (20, 12, 24, 16))):
        n = -(-rows * columns // 8) * 8
        stack = MuonStack(
            integers([0, 2 * n], np.int64), rows, columns, extents and integers(extents, np.int64)
        )
        found.append(
            make(f"{rows} × {columns}{', and a smaller one' if extents else ''}", stack, 3 * n)
        )
    return found


# of a DiT-B: the weights of fc1, and those of q, k, v and the projection
MANY = single(12 * 4 * 768 * 768)
STACK = MuonStack(integers(np.arange(12) * (4 * 768 * 768), np.int64), 4 * 768, 768)


@operation(
    reference=muon_momentum_reference,
    cost=muon_momentum_cost,
    exact_bytes=True,
    check=_check_momentum,
    versions=naive_and_vectorised(
        (muon_momentum_kernel_v1, muon_normalise_kernel_v1),
        (muon_momentum_kernel_v2, muon_normalise_kernel_v2),
        _lacks_fours,
    ),
    problems=[
        *_problems(
            lambda label, stack, n: Problem(
                label,
                gradient=single(n),
                m=single(n),
                stack=stack,
                gradient_norm=numbers([4.0]),
                momentum=0.95,
                clip_norm=1.0,
                unscale=numbers([0.5]),
            )
        ),
        Problem(
            gradient=MANY,
            m=MANY,
            stack=STACK,
            gradient_norm=single(1),
            momentum=0.95,
            clip_norm=1.0,
            dtype=np.float16,
            measured=True,
        ),
    ],
    writes=("m",),
)
def muon_momentum(
    gradient,
    m,
    stack,
    gradient_norm,
    momentum,
    clip_norm=0.0,
    unscale=None,
    dtype=None,
    version=None,
):
    """`newton_schulz`'s x of the matrices in `stack`, as a new array (count, rows, columns);
    updates m in place.

    unscale: array (1,) by which the gradients are multiplied first (None: 1); dtype: of x on a
    device; None: float32
    """
    (count,), size = stack.starts.shape, stack.rows * stack.columns
    parts = max(1, min(MAX_PARTS, -(-size // (4 * BLOCK))))
    partials = empty((count * parts,), np.float32, like=m)
    x = empty((count, stack.rows, stack.columns), dtype or np.float32, like=m)
    # the first two are not read
    state = State(gradient_norm, gradient_norm, gradient_norm, _ones(unscale, m))
    blend = Blend(*map(float32, (momentum, 1.0 - momentum, clip_norm, FIRST)))
    first, second = version.kernel
    places = _places(stack)
    launch(first, (parts, count), BLOCK, gradient, m, partials, places, state, blend)
    launch(
        second, (parts, count), BLOCK, gradient, m, x.reshape(-1), partials, places, state, blend
    )
    return x


@operation(
    reference=muon_apply_reference,
    cost=muon_apply_cost,
    exact_bytes=True,
    check=_check_apply,
    versions=naive_and_vectorised(muon_apply_kernel_v1, muon_apply_kernel_v2, _lacks_fours),
    problems=[
        *_problems(
            lambda label, stack, n: Problem(
                label,
                weight=single(n),
                x=single(2, stack.rows, stack.columns),
                stack=stack,
                state=State(integers([3], np.uint32), numbers([1e-2]), numbers([4.0])),
                weight_decay=0.1,
                copies=AdamWCopies(single(n), 0.99, numbers(np.zeros(n), np.float16)),
                tolerance=1e-3,
            )
        ),
        Problem(
            weight=MANY,
            x=half(12, 4 * 768, 768),
            stack=STACK,
            state=State(integers([7], np.uint32), single(1), single(1)),
            weight_decay=0.0,
            copies=AdamWCopies(MANY, 0.998, half(*MANY.shape)),
            measured=True,
        ),
    ],
    writes=("weight", "copies"),
)
def muon_apply(weight, x, stack, state, weight_decay, copies=None, version=None):
    """Take the step x (count, rows, columns), what `newton_schulz` gave, from the matrices in
    `stack`, in place.

    state, copies: as of `adamw_update`
    """
    size = stack.rows * stack.columns
    launch(
        version.kernel,
        (-(-size // (version.width * BLOCK)), x.shape[0]),
        BLOCK,
        weight,
        x.reshape(-1),
        _places(stack),
        state._replace(unscale=state.gradient_norm),  # is not read
        Move(float32(weight_decay), float32(scale_of(stack.rows, stack.columns))),
        followers_of(weight, copies or AdamWCopies()),
    )


def muon_update(
    weight, gradient, m, stack, state, momentum, weight_decay, clip_norm=0.0, copies=None
):
    """One Muon update of the matrices in `stack`, in place. state, copies: as of `adamw_update`.

    The products are of float16 where there is a 16-bit copy on a device, else of float32.
    """
    dtype = np.float16 if copies and copies.half is not None else np.float32
    x = muon_momentum(
        gradient, m, stack, state.gradient_norm, momentum, clip_norm, state.unscale, dtype
    )
    muon_apply(weight, newton_schulz(x), stack, state, weight_decay, copies)
