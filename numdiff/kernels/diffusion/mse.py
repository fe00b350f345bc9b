"""Mean squared error, and its gradient.

MATHEMATICS
    loss = 1/n · Σ (prediction - target)²                  over the n elements of the target
    dprediction = dloss · scale · 2/n · (prediction - target)
    scale: known to the host, e.g. 1 / (number of microbatches); dloss: what arrives on the tape,
    e.g. a loss scale A model that also predicts a variance has more channels than the target: they
    take no part, their gradient is zero.
SHAPES
    prediction (B, ..., Cp), target (B, ..., C), Cp ≥ C, float32 → loss (1,), dprediction (B, ...,
    Cp); dloss (1,)
VERSIONS
    v1 naive: one element a step; finds its place in the prediction by a division.
    v2 vectorised: where Cp = C: both arrays are one row of equal length, read four elements at a
    time.
LAUNCH
    loss: at most 512 blocks of 256 threads, then one block; 1 KiB of shared memory.
    gradient: v1 one thread an element, v2 one thread four.
DETERMINISM
    as in optimizer/grad_norm.py: partial sums in an order given by n alone, then a second pass.
COST
    bytes: 8 n forward, 12 n backward; FLOPs 3 n and 2 n. Roof: memory bandwidth.
SOURCE
    the "simple" loss of Ho, Jain and Abbeel 2020, arXiv:2006.11239, eq. 14.
READ NEXT
    optimizer/zero_ranges.py, before gradients are added up, and optimizer/grad_norm.py, once they
    are there.
"""

import numpy as np

from ...device import (
    cuda,
    device_inline,
    empty,
    empty_like,
    float32,
    launch,
    load4,
    store4,
    uint32,
    upload,
)
from ...device.four import scale4, subtract4
from ..operation import Problem, Version, operation, single
from ..optimizer.grad_norm import BLOCK, MAX_BLOCKS, block_sum

# References ---------------------------------------------------------------------------------------


# the reader of the loss notices that it is not finite
@np.errstate(over="ignore", invalid="ignore")
def mse_forward_reference(prediction, target):
    difference = prediction[..., : target.shape[-1]] - target
    difference *= difference
    # NumPy sums in pairs: exact enough in float32
    return np.array([difference.mean()], difference.dtype)


def mse_backward_reference(prediction, target, scale=1.0, dloss=None):
    dprediction = np.zeros_like(prediction)
    used = dprediction[..., : target.shape[-1]]
    np.subtract(prediction[..., : target.shape[-1]], target, out=used)
    used *= (1.0 if dloss is None else float(dloss[0])) * scale * 2.0 / target.size
    return dprediction


# What losses share --------------------------------------------------------------------------------


@device_inline
def leave_block_sum(partials, total):
    """The block's partial sum, from the sums of its threads."""
    total = block_sum(total)
    if cuda.threadIdx.x == 0:
        partials[cuda.blockIdx.x] = total


@cuda.jit
def sum_partials_kernel(partials, scale, loss):
    """Second pass, one block: scale · sum of all partials."""
    total = float32(0)
    for i in range(cuda.threadIdx.x, partials.size, BLOCK):
        total += partials[i]
    total = block_sum(total)
    if cuda.threadIdx.x == 0:
        loss[0] = total * scale


def launch_loss(kernel, n, factor, like, arguments, *more):
    """factor · the sum of n terms that a kernel(*arguments, partials, *more) sums, as an array (1,);
    like: an array on the device."""
    partials = empty((min(MAX_BLOCKS, -(-n // (4 * BLOCK))),), np.float32, like=like)
    loss = empty((1,), np.float32, like=like)
    launch(kernel, partials.size, BLOCK, *arguments, partials, *more)
    launch(sum_partials_kernel, 1, BLOCK, partials, factor, loss)
    return loss


def arriving(dloss, like):
    """The gradient that arrives at a loss, (1,): one if dloss is None."""
    return upload(np.ones(1, np.float32), like) if dloss is None else dloss


# v1: one element a step ---------------------------------------------------------------------------


@cuda.jit
def mse_forward_kernel_v1(prediction, target, partials, channels, channels_p):
    total = float32(0)
    for i in range(cuda.grid(1), target.size, cuda.gridsize(1)):
        row = uint32(i) // channels  # pixel; its channel c is the rest
        c = uint32(i) - row * channels
        difference = prediction[row * channels_p + c] - target[i]
        total += difference * difference
    leave_block_sum(partials, total)


@cuda.jit
def mse_backward_kernel_v1(prediction, target, dloss, dprediction, factor, channels, channels_p):
    i = cuda.grid(1)
    if i < dprediction.size:
        row = uint32(i) // channels_p
        c = uint32(i) - row * channels_p
        gradient = float32(0)
        if c < channels:
            gradient = dloss[0] * factor * (prediction[i] - target[row * channels + c])
        dprediction[i] = gradient


# v2: equal channels, four elements a step ---------------------------------------------------------


@cuda.jit
def mse_forward_kernel_v2(prediction, target, partials):
    t0, t1, t2, t3 = float32(0), float32(0), float32(0), float32(0)
    for i in range(cuda.grid(1) * 4, target.size, cuda.gridsize(1) * 4):
        p0, p1, p2, p3 = load4(prediction, i)
        x0, x1, x2, x3 = load4(target, i)
        t0 += (p0 - x0) * (p0 - x0)
        t1 += (p1 - x1) * (p1 - x1)
        t2 += (p2 - x2) * (p2 - x2)
        t3 += (p3 - x3) * (p3 - x3)
    leave_block_sum(partials, (t0 + t1) + (t2 + t3))


@cuda.jit
def mse_backward_kernel_v2(prediction, target, dloss, dprediction, factor):
    i = cuda.grid(1) * 4
    if i < dprediction.size:
        factor *= dloss[0]
        d = subtract4(load4(prediction, i), load4(target, i))
        store4(dprediction, i, *scale4(factor, d))


# Cost ---------------------------------------------------------------------------------------------


def mse_forward_cost(n):
    return 8 * n, 3 * n


def mse_backward_cost(n):
    return 12 * n, 2 * n


# Operations ---------------------------------------------------------------------------------------


def _check(prediction, target):
    if prediction.shape[:-1] != target.shape[:-1] or prediction.shape[-1] < target.shape[-1]:
        raise ValueError(
            f"prediction {tuple(prediction.shape)} must have the target's shape {tuple(target.shape)}, "
            "or that shape with more channels"
        )


def _lacks_fours(prediction, target):
    """What v2 needs and the arrays lack; None if they are alike and made of fours."""
    if prediction.shape != target.shape or target.size % 4:
        return f"needs equal shapes of a multiple of 4 elements, not {prediction.shape} and {target.shape}"
    return None


def _channels(prediction, target, version):
    """What v1 is given: the channels of both."""
    return (
        (uint32(target.shape[-1]), uint32(prediction.shape[-1])) if version.name == "naive" else ()
    )


def _problems(**more):
    return [
        Problem(prediction=single(*shape, C), target=single(*shape, channels), **more)
        for shape, C, channels in (
            ((2, 4, 4), 4, 4),
            ((2, 4, 4), 4, 3),
            ((3, 5), 7, 7),
            ((5, 16, 16), 8, 4),
        )
    ]


IMAGES = {"prediction": single(32, 64, 64, 3), "target": single(32, 64, 64, 3), "measured": True}


@operation(
    reference=mse_forward_reference,
    cost=mse_forward_cost,
    check=_check,
    versions=[
        Version("naive", mse_forward_kernel_v1),
        Version("vectorised", mse_forward_kernel_v2, fits=_lacks_fours),
    ],
    problems=[*_problems(), Problem(**IMAGES)],
)
def mse_forward(prediction, target, version=None):
    """The mean squared error over the target's elements, as an array (1,)."""
    flat = prediction.reshape(-1), target.reshape(-1)
    n = target.size
    return launch_loss(
        version.kernel, n, 1.0 / n, target, flat, *_channels(prediction, target, version)
    )


@operation(
    reference=mse_backward_reference,
    cost=mse_backward_cost,
    check=_check,
    versions=[
        Version("naive", mse_backward_kernel_v1, width=1),
        Version("vectorised", mse_backward_kernel_v2, width=4, fits=_lacks_fours),
    ],
    problems=[*_problems(scale=0.25, dloss=single(1)), Problem(**IMAGES)],
)
def mse_backward(prediction, target, scale=1.0, dloss=None, version=None):
    """dprediction = dloss · scale · 2/n · (prediction - target); zero in channels that the target
    does not have.

    dloss: array (1,), the gradient that arrives at the loss (None: one)
    """
    dprediction = empty_like(prediction)
    launch(
        version.kernel,
        -(-dprediction.size // (version.width * BLOCK)),
        BLOCK,
        prediction.reshape(-1),
        target.reshape(-1),
        arriving(dloss, prediction),
        dprediction.reshape(-1),
        scale * 2.0 / target.size,
        *_channels(prediction, target, version),
    )
    return dprediction
