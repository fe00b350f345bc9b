"""The weight gradients of several linear layers on the same rows in one launch: those of a transformer block.

MATHEMATICS
    dweight_p[n, k] += Σ_r dy_p[r, n] · x_p[r, k]        dbias_p[n] += Σ_r dy_p[r, n]        up to four layers p
    or dweight_p = …, where there is nothing to add to
    Sums over 16,384 tokens with small results: one by one, each layer's product is cut into slices, so that it has work
    for all multiprocessors, and a second pass adds up what they give. Together they have enough tiles, or nearly.
    Their operands must then be in memory at the same time (nn/together.py).
SHAPES
    dy_p (R, N_p), x_p (R, K_p), float16 or bfloat16; dweight_p (N_p, K_p) and dbias_p (N_p,) float32, dbias_p or None
    R, N_p and K_p are multiples of 8
VERSIONS
    that of matmul/group.py, on Hopper's tensor cores, or of matmul/mma_group.py, on those of sm_80 and later. Elsewhere
    each layer computes its own (`linear_backward`).
LAUNCH
    one (matmul/group.py); where there are biases another, which adds up their parts (second_pass.py).
DETERMINISM
    every sum in a fixed order; which one follows from the sizes and the number of multiprocessors.
COST
    2 · R · (N_p + K_p) + 4 · N_p · K_p bytes a layer, 4 · N_p · K_p more to add; 2 · R · N_p · K_p FLOPs. Roof:
    arithmetic.
SOURCE
    the chain rule; for the schedule, matmul/hopper/group_schedule.py.
READ NEXT
    matmul/hopper_fp8.py, the same kernel on 8-bit floats.
"""
import numpy as np

from ..device import is_device
from ..device.limits import multiprocessors_of
from .beside import rejoin
from .linear import linear_backward_reference
from .matmul import group, mma_group
from .matmul.activations import rung_of
from .matmul.choice import by_eight, choose_half

MOST = group.PRODUCTS  # layers of a launch
GAIN = 0.98  # of the estimated time of single launches: if one launch takes more, the layers stay separate


def linear_gradients_supports(x, sizes):
    """Whether there is a kernel for layers with weights of these sizes (N, K), one of them on x (..., K), and it is
    faster than a launch for each."""
    rows, rung = x.size // x.shape[-1], rung_of(x)
    return (rung > 4 and 1 < len(sizes) <= MOST and by_eight((), (rows, *(n for size in sizes for n in size)))
            and gains(rung, tuple(map(tuple, sizes)), rows, multiprocessors_of(x)))


def gains(rung, sizes, rows, multiprocessors):
    """Whether layers with weights of these sizes should be taken together, by the estimates."""
    alone = sum(choose_half(rung, 1, *size, rows, True, multiprocessors)[2] for size in sizes)
    together = (group.choose(sizes, rows, multiprocessors)[2] if rung == 6 else
                mma_group.estimate(sizes, rows, multiprocessors))
    return together < GAIN * alone


def linear_gradients_backward(layers, accumulate=True):
    """Add to, or write, the gradients of up to 4 layers [(dy (R, N), x (R, K), dweight (N, K), dbias (N,) or None)].

    accumulate: False: every dweight is overwritten; each dbias is added to all the same
    """
    rows, *others = (len(array) for dy, x, *_ in layers for array in (dy, x))
    if len(layers) > MOST or any(n != rows for n in others) or any(
            tuple(dweight.shape) != (dy.shape[1], x.shape[1]) for dy, x, dweight, _ in layers):
        raise ValueError(f"up to {MOST} layers (dy (R, N), x (R, K), dweight (N, K), dbias) with the same R, not "
                         f"{[(dy.shape, x.shape, dweight.shape) for dy, x, dweight, _ in layers]}")
    if not is_device(layers[0][0]):
        for dy, x, dweight, dbias in layers:
            linear_backward_reference(dy, x, np.empty(dweight.shape, x.dtype), dweight, dbias, False,
                                      accumulate=accumulate)
        return
    rejoin()  # launches share the counters by which parts are added up
    if rung_of(layers[0][0]) == 6:
        group.launch_group([group.Product(*layer) for layer in layers], accumulate)
        return
    mma_group.launch_group([(dy, x, dweight) for dy, x, dweight, _ in layers], accumulate)
    if pairs := [(dy, dbias) for dy, _, _, dbias in layers if dbias is not None]:
        mma_group.launch_row_sums(pairs)


# Cost -----------------------------------------------------------------------------------------------------------------

def linear_gradients_backward_cost(rows, sizes, accumulate=True):
    """(bytes, FLOPs) for layers of these sizes (N, K)."""
    return (sum(2 * rows * (N + K) + 4 * N * K * (1 + accumulate) for N, K in sizes),
            sum(2 * rows * N * K for N, K in sizes))
