"""Exponential moving average of the weights: the weights that samples are drawn from.

MATHEMATICS
    ema = ema + (1 - d) · (weight - ema)
    d = decay, or with warm-up min(decay, (1 + step) / (10 + step)), so that the random first
    weights are soon forgotten; then 1 - d = max(1 - decay, 9 / (10 + step)), which has no
    cancellation.
    Nothing changes where gradient_norm is not finite.
SHAPES
    ema, weight flat (n,) float32; step (1,) uint32 = updates done before this one; gradient_norm
    (1,) float32
VERSIONS
    v1 naive: one thread an element; v2 vectorised: one thread four, by 16-byte loads and stores.
LAUNCH
    v1 ceil(n / 256) blocks of 256 threads; v2 a quarter of them.
DETERMINISM
    elementwise.
COST
    bytes: 12 n; FLOPs 3 n. Roof: memory bandwidth.
SOURCE
    Polyak and Juditsky 1992; the warm-up is that of TensorFlow's ExponentialMovingAverage.
READ NEXT
    ../../extras/muon/newton_schulz.py, of another optimiser over the same buffers.
"""

import math

import numpy as np

from ...device import cuda, float32, launch, load4, store4
from ...device.four import add4, scale4, subtract4
from ..operation import (
    Problem,
    integers,
    lacks_multiple,
    naive_and_vectorised,
    numbers,
    operation,
    single,
)

BLOCK = 256  # threads
# elements the reference updates at a time: three arrays of 128 KiB, which stay in the caches
CHUNK = 32768


def rest_of_average(step, decay, warmup):
    """By which part the average moves to the weight in this update: 1 - decay, or more in a
    warm-up."""
    return max(1.0 - decay, 9.0 / (10.0 + float(step[0]))) if warmup else 1.0 - decay


def ema_update_reference(ema, weight, step, gradient_norm, decay, warmup=True):
    if not math.isfinite(gradient_norm[0]):
        return
    rest = rest_of_average(step, decay, warmup)
    scratch = np.empty(min(CHUNK, ema.size), ema.dtype)
    for i in range(0, ema.size, CHUNK):
        e, w = ema[i : i + CHUNK], weight[i : i + CHUNK]
        s = np.subtract(w, e, out=scratch[: e.size])
        s *= rest
        e += s


@cuda.jit(device=True)
def rest_of(step, rest, warmup):
    """1 - d of this step."""
    if warmup:
        rest = max(rest, float32(9) / (float32(10) + float32(step[0])))
    return rest


# v1: one thread an element ------------------------------------------------------------------------


@cuda.jit
def ema_update_kernel_v1(ema, weight, step, gradient_norm, rest, warmup):
    i = cuda.grid(1)
    if i < ema.size and math.isfinite(gradient_norm[0]):
        ema[i] += rest_of(step, rest, warmup) * (weight[i] - ema[i])


# v2: one thread four elements ---------------------------------------------------------------------


@cuda.jit
def ema_update_kernel_v2(ema, weight, step, gradient_norm, rest, warmup):
    i = cuda.grid(1) * 4
    if i < ema.size and math.isfinite(gradient_norm[0]):
        r = rest_of(step, rest, warmup)
        average = load4(ema, i)
        store4(ema, i, *add4(average, scale4(r, subtract4(load4(weight, i), average))))


# Cost ---------------------------------------------------------------------------------------------


def ema_update_cost(n):
    return 12 * n, 3 * n


# Operations ---------------------------------------------------------------------------------------


def _check(ema, weight):
    n = ema.size
    if ema.shape != (n,) or weight.shape != (n,):
        raise ValueError(
            f"ema and weight must be flat and of one length, got {ema.shape} and {weight.shape}"
        )


STATE = {"step": integers([3], np.uint32), "gradient_norm": numbers([4.0])}
FLAT = single(20_494_272)  # the UNet's parameters, for the benchmark


@operation(
    reference=ema_update_reference,
    cost=ema_update_cost,
    exact_bytes=True,
    check=_check,
    versions=naive_and_vectorised(
        ema_update_kernel_v1, ema_update_kernel_v2, lambda ema: lacks_multiple(4, ema.size)
    ),
    problems=[
        Problem(ema=single(24), weight=single(24), **STATE, decay=0.99),
        Problem(ema=single(7), weight=single(7), **STATE, decay=0.99, warmup=False),
        Problem(
            ema=FLAT,
            weight=FLAT,
            step=integers([7], np.uint32),
            gradient_norm=single(1),
            decay=0.998,
            measured=True,
        ),
    ],
    writes=("ema",),
)
def ema_update(ema, weight, step, gradient_norm, decay, warmup=True, version=None):
    """Moves `ema` towards `weight`, both flat, in place."""
    launch(
        version.kernel,
        -(-ema.size // (version.width * BLOCK)),
        BLOCK,
        ema,
        weight,
        step,
        gradient_norm,
        float32(1.0 - decay),
        int(warmup),
    )
