"""Mean absolute error, and its gradient.

MATHEMATICS
    loss = 1/n · Σ |prediction - target|                   over the n elements
    dprediction = dloss · scale / n · sign(prediction - target), 0 where they are equal
    scale, dloss: as in mse.py
SHAPES
    prediction, target (B, ..., C) float32 → loss (1,), dprediction (B, ..., C); dloss (1,)
VERSIONS
    v1 naive: one element an iteration.
LAUNCH
    loss: at most 512 blocks of 256 threads, then one block; 1 KiB of shared memory.
    gradient: one thread an element.
DETERMINISM
    as mse.py: partial sums in an order given by n alone, then a second pass.
COST
    bytes: 8 n forward, 12 n backward; FLOPs 3 n and 2 n. Roof: memory bandwidth.
SOURCE
    the reconstruction term of Rombach et al. 2022, arXiv:2112.10752, appendix G, without its
    perceptual and adversarial terms.
READ NEXT
    posterior.py, the other term of an autoencoder's loss.
"""

import numpy as np

from ...device import cuda, empty_like, float32, launch
from ..operation import Problem, Version, operation, single
from .mse import BLOCK, arriving, launch_loss, leave_block_sum

# References ---------------------------------------------------------------------------------------


# the reader of the loss notices that it is not finite
@np.errstate(over="ignore", invalid="ignore")
def l1_forward_reference(prediction, target):
    return np.array([np.abs(prediction - target).mean()], prediction.dtype)


def l1_backward_reference(prediction, target, scale=1.0, dloss=None):
    dprediction = np.sign(prediction - target)
    dprediction *= (1.0 if dloss is None else float(dloss[0])) * scale / target.size
    return dprediction


# v1: one element an iteration ---------------------------------------------------------------------


@cuda.jit
def l1_forward_kernel_v1(prediction, target, partials):
    total = float32(0)
    for i in range(cuda.grid(1), target.size, cuda.gridsize(1)):
        total += abs(prediction[i] - target[i])
    leave_block_sum(partials, total)


@cuda.jit
def l1_backward_kernel_v1(prediction, target, dloss, dprediction, factor):
    i = cuda.grid(1)
    if i < dprediction.size:
        difference = prediction[i] - target[i]
        gradient = difference  # a NaN stays one; zero stays zero
        if difference > float32(0):
            gradient = float32(1)
        elif difference < float32(0):
            gradient = float32(-1)
        dprediction[i] = dloss[0] * factor * gradient


# Cost ---------------------------------------------------------------------------------------------


def l1_forward_cost(n):
    return 8 * n, 3 * n


def l1_backward_cost(n):
    return 12 * n, 2 * n


# Operations ---------------------------------------------------------------------------------------


def _check(prediction, target):
    if prediction.shape != target.shape:
        raise ValueError(
            f"prediction {tuple(prediction.shape)} must have the target's shape {tuple(target.shape)}"
        )


def _problems(**more):
    return [
        Problem(prediction=single(*shape), target=single(*shape), **more)
        for shape in ((2, 4, 4, 3), (3, 5, 7), (5, 16, 16, 4))
    ]


IMAGES = {
    "prediction": single(8, 256, 256, 3),
    "target": single(8, 256, 256, 3),
    "measured": "not yet",
}


@operation(
    reference=l1_forward_reference,
    cost=l1_forward_cost,
    check=_check,
    versions=[Version("naive", l1_forward_kernel_v1)],
    problems=[*_problems(), Problem(**IMAGES)],
)
def l1_forward(prediction, target, version=None):
    """The mean absolute error, as an array (1,)."""
    flat = prediction.reshape(-1), target.reshape(-1)
    return launch_loss(version.kernel, target.size, 1.0 / target.size, target, flat)


@operation(
    reference=l1_backward_reference,
    cost=l1_backward_cost,
    check=_check,
    versions=[Version("naive", l1_backward_kernel_v1)],
    problems=[*_problems(scale=0.25, dloss=single(1)), Problem(**IMAGES)],
)
def l1_backward(prediction, target, scale=1.0, dloss=None, version=None):
    """dprediction = dloss · scale / n · sign(prediction - target).

    dloss: array (1,), the gradient that arrives at the loss (None: one)
    """
    dprediction = empty_like(prediction)
    launch(
        version.kernel,
        -(-dprediction.size // BLOCK),
        BLOCK,
        prediction.reshape(-1),
        target.reshape(-1),
        arriving(dloss, prediction),
        dprediction.reshape(-1),
        scale / target.size,
    )
    return dprediction
