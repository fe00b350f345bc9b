"""A step of ancestral sampling whose variance the model has chosen, element by element.

MATHEMATICS
    y = a · x + b · x_0 + exp((low + f · (high - low)) / 2) · noise,    f = (v + 1) / 2
    v are the model's second C channels: they choose, between two bounds, each element's log variance
SHAPES
    x, x_0, noise (B, ..., C) float32; prediction (B, ..., Cp), Cp ≥ 2C; a, b, low, high: as the
    numbers of kernels/diffusion/sampler.py
VERSIONS
    v1 naive: one thread an element.
LAUNCH
    ceil(n / 256) blocks of 256 threads.
DETERMINISM
    elementwise.
COST
    bytes: 20 n. Roof: memory bandwidth.
SOURCE
    Nichol and Dhariwal 2021, arXiv:2102.09672, eq. 15.
READ NEXT
    numdiff/diffusion/samplers.py, `ddpm`.
"""

import math

import numpy as np

from ...device import cuda, empty_like, float32, uint32
from ...kernels.diffusion.sampler import (
    X,
    check_prediction,
    check_shapes,
    launch_elementwise,
    on_engine,
)
from ...kernels.operation import Problem, operation, single


def learned_step_reference(x, x_0, prediction, noise, weights):
    a, b, low, high = weights[:4]
    channels = x.shape[-1]
    fraction = (prediction[..., channels : 2 * channels] + 1) / 2
    return a * x + b * x_0 + np.exp((low + fraction * (high - low)) / 2) * noise


@cuda.jit
def learned_step_kernel_v1(y, x, x_0, prediction, noise, weights, channels, channels_p):
    i = cuda.grid(1)
    if i < y.size:
        row = uint32(i) // channels
        c = uint32(i) - row * channels
        low, high = weights[2], weights[3]
        fraction = float32(0.5) * (prediction[row * channels_p + channels + c] + float32(1))
        deviation = math.exp(float32(0.5) * (low + fraction * (high - low)))
        y[i] = weights[0] * x[i] + weights[1] * x_0[i] + deviation * noise[i]


def learned_step_cost(n):
    return 20 * n, 10 * n


def _check_learned(x, x_0, prediction, noise):
    check_shapes(x.shape, x_0=x_0, noise=noise)
    check_prediction(x, prediction, 2)


@operation(
    reference=learned_step_reference,
    cost=learned_step_cost,
    check=_check_learned,
    problems=[
        Problem(x=X, x_0=X, prediction=single(2, 3, 8), noise=X, weights=(0.9, 0.2, -3.0, -1.0))
    ],
)
def learned_step(x, x_0, prediction, noise, weights):
    """a · x + b · x_0 + noise of the variance that prediction's second C channels choose, as a new
    array.

    weights: a, b, low, high
    """
    return launch_elementwise(
        learned_step_kernel_v1,
        1,
        empty_like(x),
        x,
        x_0,
        prediction,
        noise,
        on_engine(weights, x),
        uint32(x.shape[-1]),
        uint32(prediction.shape[-1]),
    )
