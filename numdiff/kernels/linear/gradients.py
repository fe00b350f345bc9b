"""The weight gradients of several linear layers on the same rows in one launch: those of a
transformer block.

MATHEMATICS
    dweight_p[n, k] += Σ_r dy_p[r, n] · x_p[r, k]        dbias_p[n] += Σ_r dy_p[r, n]        up to four layers p
    or dweight_p = …, where there is nothing to add to
    Sums over 16,384 tokens with small results: one by one, each layer's product is cut into slices,
    so that it has work for all multiprocessors, and a second pass adds up what they give. Together
    they have enough tiles, or nearly. Their operands must then be in memory at the same time
    (nn/deferred_gradients.py).
SHAPES
    dy_p (R, N_p), x_p (R, K_p), float16 or bfloat16; dweight_p (N_p, K_p) and dbias_p (N_p,)
    float32, dbias_p or None R, N_p and K_p are multiples of 8
VERSIONS
    those of matmul/products.py for several products, on Hopper's tensor cores or those of sm_80 and
    later. Elsewhere each layer computes its own (`linear_backward`).
LAUNCH
    one (matmul/group.py); where there are biases another, which adds up their parts
    (reduce/second_pass.py).
DETERMINISM
    every sum in a fixed order; which one follows from the sizes and the number of multiprocessors.
COST
    2 · R · (N_p + K_p) + 4 · N_p · K_p bytes a layer, 4 · N_p · K_p more to add; 2 · R · N_p · K_p
    FLOPs. Roof: arithmetic.
SOURCE
    the chain rule; for the schedule, matmul/hopper/group_schedule.py.
READ NEXT
    ../extras/fp8/, the same kernel on 8-bit floats.
"""

import contextlib
import functools

import numpy as np

from ...device.limits import multiprocessors_of
from ...device.side_stream import rejoin
from ..matmul import group, mma_group
from ..matmul.choice import by_eight, choose_half, gradient_product
from ..matmul.hopper import group_schedule
from ..matmul.hopper.layout import BK
from ..matmul.mma_layout import TURING_STAGES
from ..matmul.product import Product, ProductFused, ProductOperand
from ..matmul.products import launch_products, rung_of
from ..operation import Problem, half, operation, single
from ..operation.versions import at_most
from .layer import linear_backward_reference

MOST = group_schedule.PRODUCTS  # layers of a launch
# of the estimated time of single launches: if one launch takes more, the layers stay separate
GAIN = 0.98
# ns of a layer's row sums, which rung 5 makes by other launches where the layers stay separate
ROW_SUMS_NS = 5000.0


def linear_gradients_supports(x, sizes):
    """Whether there is a kernel for layers with weights of these sizes (N, K), one of them on x
    (..., K), and it is faster than a launch for each."""
    rows, rung = x.size // x.shape[-1], rung_of(x)
    return (
        rung > 4
        and 1 < len(sizes) <= MOST
        and by_eight((), (rows, *(n for size in sizes for n in size)))
        and gains(rung, tuple(map(tuple, sizes)), rows, multiprocessors_of(x))
    )


def gains(rung, sizes, rows, multiprocessors):
    """Whether layers with weights of these sizes should be taken together, by the estimates."""
    alone = sum(
        choose_half(rung, gradient_product(*size, rows), True, multiprocessors)[2] for size in sizes
    )
    alone += len(sizes) * ROW_SUMS_NS if rung == 5 else 0
    together = (
        group.choose(sizes, rows, multiprocessors)[2]
        if rung == 6
        else mma_group.estimate(sizes, rows, multiprocessors)
    )
    return together < GAIN * alone


def linear_gradients_backward_reference(layers, accumulate=True):
    for dy, x, dweight, dbias in layers:
        linear_backward_reference(
            dy, x, np.empty(dweight.shape, x.dtype), dweight, dbias, False, accumulate=accumulate
        )


def _check(layers):
    rows, *others = (len(array) for dy, x, *_ in layers for array in (dy, x))
    if (
        len(layers) > MOST
        or any(n != rows for n in others)
        or any(tuple(dweight.shape) != (dy.shape[1], x.shape[1]) for dy, x, dweight, _ in layers)
    ):
        raise ValueError(
            f"up to {MOST} layers (dy (R, N), x (R, K), dweight (N, K), dbias) with the same R, not "
            f"{[(dy.shape, x.shape, dweight.shape) for dy, x, dweight, _ in layers]}"
        )


# Cost ---------------------------------------------------------------------------------------------


def linear_gradients_backward_cost(rows, sizes, accumulate=True):
    """(bytes, FLOPs) for layers of these sizes (N, K)."""
    return (
        sum(2 * rows * (N + K) + 4 * N * K * (1 + accumulate) for N, K in sizes),
        sum(2 * rows * N * K for N, K in sizes),
    )


# Problems -----------------------------------------------------------------------------------------

# weights (N, K): qkv, proj, fc1, fc2
BLOCK_OF_A_DIT = (3 * 768, 768), (768, 768), (4 * 768, 768), (768, 4 * 768)
TOKENS = 64 * 256


def _of_arrays(sizes, accumulate, arrays, version):
    """The gradients of layers whose arrays are dy_0, x_0, dweight_0, dbias_0, dy_1, …; the last has
    no bias."""
    layers = [
        [getattr(arrays, f"{name}_{i}") for name in ("dy", "x", "dweight", "dbias")]
        for i in range(len(sizes))
    ]
    layers[-1][3] = None
    linear_gradients_backward(layers, accumulate)
    return tuple(array for layer in layers for array in layer[2:] if array is not None)


def _small(label, rows, sizes, accumulate, within, **more):
    shaped = {
        "dy": lambda N, K: half(rows, N),
        "x": lambda N, K: half(rows, K),
        "dweight": single,
        "dbias": lambda N, K: single(N),
    }
    return Problem(
        f"float16, {label}{', written' * (not accumulate)}",
        tolerance=1e-5,
        within=within,
        once=True,
        run=functools.partial(_of_arrays, sizes, accumulate),
        **more,
        **{
            f"{name}_{i}": make(*size)
            for i, size in enumerate(sizes)
            for name, make in shaped.items()
        },
    )


@contextlib.contextmanager
def _by_mma(stages=None):
    """Context: rung 5 by its table of units, whatever its rows; stages: of its tile, None for the
    device's."""
    before = mma_group.SHORTEST, mma_group.pays, mma_group.stages_of
    mma_group.SHORTEST, mma_group.pays = 1, lambda *_: True
    if stages:
        mma_group.stages_of = lambda *given: stages
    try:
        with at_most({"matmul": 5}):
            yield
    finally:
        mma_group.SHORTEST, mma_group.pays, mma_group.stages_of = before


@contextlib.contextmanager
def _cut(width, cut):
    """Context: rung 6 with tiles of this width, and this cut of their sums."""
    choose, group.choose = group.choose, lambda *_: (width, cut, 0)
    try:
        yield
    finally:
        group.choose = choose


def _by_hopper(width, blocks, rows, sizes, accumulate):
    tiles = sum(m * n for m, n in group.tiles_of(sizes, width))
    cut = group_schedule.cut(tiles, -(-rows // BK), blocks)
    return _small(
        f"{tiles} tiles of 128×{width} on {blocks} blocks",
        rows,
        sizes,
        accumulate,
        functools.partial(_cut, width, cut),
    )


def _of_a_dit(x, others, dys, dweight, dbias):
    """The gradients of a block's weights, written, as views of two arrays; x, others: the layers'
    inputs."""
    layers, at, place = [], 0, 0
    for (N, K), dy_i, x_i in zip(BLOCK_OF_A_DIT, dys, (x, *others), strict=True):
        layers.append((dy_i, x_i, dweight[at : at + N * K].reshape(N, K), dbias[place : place + N]))
        at, place = at + N * K, place + N
    linear_gradients_backward(layers, False)


# tiles that are cut, of which one has three parts; one that is and two that are not; none; each
# width
PROBLEMS = [
    # two tiles are whole, one is cut
    _small("by mma, 3 products", 40, [(8, 16), (16, 8), (8, 8)], True, _by_mma),
    _small("by mma, 1 products", 8, [(8, 264)], False, _by_mma, fast=False),
    *(
        _small(
            "by mma, Turing's stages",
            72,
            [(8, 16), (16, 8)],
            added,
            functools.partial(_by_mma, TURING_STAGES),
            fast=False,
            only_compiled=added,
        )
        for added in (False, True)
    ),
    _by_hopper(128, 5, 4 * BK + 8, [(136, 72), (8, 72)], True),
    _by_hopper(192, 2, 2 * BK, [(8, 200), (8, 8)], False),
    _by_hopper(256, 4, 72, [(8, 8), (136, 8), (16, 8)], True),
    Problem(
        x=half(TOKENS, 768),
        others=[half(TOKENS, K) for _, K in BLOCK_OF_A_DIT[1:]],
        dys=[half(TOKENS, N) for N, _ in BLOCK_OF_A_DIT],
        dweight=single(12 * 768 * 768),
        dbias=single(9 * 768),
        call=_of_a_dit,
        flops=linear_gradients_backward_cost(TOKENS, BLOCK_OF_A_DIT, False)[1],
        measured=True,
    ),
]


# Operation ----------------------------------------------------------------------------------------


@operation(
    reference=linear_gradients_backward_reference,
    cost=linear_gradients_backward_cost,
    check=_check,
    problems=PROBLEMS,
)
def linear_gradients_backward(layers, accumulate=True):
    """Add to, or write, the gradients of up to 4 layers [(dy (R, N), x (R, K), dweight (N, K),
    dbias (N,) or None)].

    accumulate: False: every dweight is overwritten; each dbias is added to all the same
    """
    rejoin()  # launches share the counters by which parts are added up
    launch_products(
        [
            Product(
                ProductOperand(dy, True),
                ProductOperand(x),
                ProductOperand(dweight),
                ProductFused(accumulate=accumulate, row_sums=dbias),
            )
            for dy, x, dweight, dbias in layers
        ]
    )
