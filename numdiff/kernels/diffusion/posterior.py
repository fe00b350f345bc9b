"""An autoencoder's latents: drawn from its Gaussian by reparametrisation, and their KL divergence.

MATHEMATICS
    The encoder gives the mean μ and the log variance l of each latent, l limited to [-30, 20].
    sample     z = μ + exp(l / 2) · ε                     dμ = dz,  dl = dz · ½ · exp(l / 2) · ε
    KL         kl = factor · Σ ½ (μ² + exp(l) - 1 - l)    dμ = g · μ,  dl = g · ½ (exp(l) - 1)
               g = dkl · scale · factor
    dl is 0 where l was limited.
SHAPES
    moments (B, ..., 2C) float32, [..., :C] is μ and [..., C:] is l; noise, z, dz (B, ..., C);
    kl, dkl (1,); dmoments (B, ..., 2C)
VERSIONS
    v1 naive: one latent an iteration.
LAUNCH
    KL: at most 512 blocks of 256 threads, then one block; 1 KiB of shared memory.
    the others: one thread a latent.
DETERMINISM
    as mse.py: partial sums in an order given by the size alone, then a second pass.
COST
    n latents. bytes: sample 16 n forward and 20 n backward, KL 8 n and 16 n; FLOPs, an exponential
    counted as one: 4 n, 4 n, 7 n, 5 n. Roof: memory bandwidth.
SOURCE
    Kingma and Welling 2014, arXiv:1312.6114, section 2.4 and appendix B.
READ NEXT
    numdiff/diffusion/reconstruction.py, which adds the terms of the loss.
"""

import math

import numpy as np

from ...device import cuda, empty_like, float32, launch, uint32
from ..operation import Problem, Version, operation, single
from .mse import BLOCK, arriving, launch_loss, leave_block_sum

LOW, HIGH = -30.0, 20.0  # limits of the log variance, as in the public latent-diffusion code

# References ---------------------------------------------------------------------------------------


def _split(moments):
    """(mean, log variance within its limits, whether it was within them)."""
    mean, logvar = np.split(moments, 2, axis=-1)
    limited = np.clip(logvar, LOW, HIGH)
    return mean, limited, limited == logvar


def posterior_sample_forward_reference(moments, noise):
    mean, logvar, _ = _split(moments)
    return mean + np.exp(logvar / 2) * noise


def posterior_sample_backward_reference(dz, moments, noise):
    _, logvar, within = _split(moments)
    return np.concatenate([dz, dz * noise * np.exp(logvar / 2) * (within / 2)], -1, dtype=dz.dtype)


# the reader of the loss notices that it is not finite
@np.errstate(over="ignore", invalid="ignore")
def posterior_kl_forward_reference(moments, factor=1.0):
    mean, logvar, _ = _split(moments)
    terms = (mean * mean + np.exp(logvar) - 1 - logvar) / 2
    return np.array([terms.sum() * factor], moments.dtype)


def posterior_kl_backward_reference(moments, factor=1.0, scale=1.0, dkl=None):
    mean, logvar, within = _split(moments)
    g = (1.0 if dkl is None else float(dkl[0])) * scale * factor
    return np.concatenate([g * mean, g * np.expm1(logvar) * (within / 2)], -1, dtype=moments.dtype)


# v1: one latent an iteration ----------------------------------------------------------------------


@cuda.jit(device=True)
def limited(logvar):
    """The log variance within its limits; a NaN stays one."""
    if logvar < float32(LOW):
        logvar = float32(LOW)
    if logvar > float32(HIGH):
        logvar = float32(HIGH)
    return logvar


@cuda.jit(device=True)
def where_mean_is(i, channels):
    """Index in `moments` of the mean of latent i; its log variance is `channels` later."""
    return uint32(i) + (uint32(i) // channels) * channels


@cuda.jit
def posterior_sample_forward_kernel_v1(moments, noise, z, channels):
    i = cuda.grid(1)
    if i < z.size:
        j = where_mean_is(i, channels)
        z[i] = moments[j] + math.exp(float32(0.5) * limited(moments[j + channels])) * noise[i]


@cuda.jit
def posterior_sample_backward_kernel_v1(dz, moments, noise, dmoments, channels):
    i = cuda.grid(1)
    if i < dz.size:
        j = where_mean_is(i, channels)
        logvar = moments[j + channels]
        gradient = float32(0)
        if limited(logvar) == logvar:
            gradient = dz[i] * float32(0.5) * math.exp(float32(0.5) * logvar) * noise[i]
        dmoments[j] = dz[i]
        dmoments[j + channels] = gradient


@cuda.jit
def posterior_kl_forward_kernel_v1(moments, partials, latents, channels):
    total = float32(0)
    for i in range(cuda.grid(1), latents, cuda.gridsize(1)):
        j = where_mean_is(i, channels)
        mean, logvar = moments[j], limited(moments[j + channels])
        total += float32(0.5) * (mean * mean + (math.exp(logvar) - float32(1) - logvar))
    leave_block_sum(partials, total)


@cuda.jit
def posterior_kl_backward_kernel_v1(moments, dkl, dmoments, factor, latents, channels):
    i = cuda.grid(1)
    if i < latents:
        j = where_mean_is(i, channels)
        g, logvar = dkl[0] * factor, moments[j + channels]
        gradient = float32(0)
        if limited(logvar) == logvar:
            gradient = g * float32(0.5) * math.expm1(logvar)
        dmoments[j] = g * moments[j]
        dmoments[j + channels] = gradient


# Cost ---------------------------------------------------------------------------------------------


def posterior_sample_forward_cost(n):
    """(bytes, FLOPs) for n latents."""
    return 16 * n, 4 * n


def posterior_sample_backward_cost(n):
    return 20 * n, 4 * n


def posterior_kl_forward_cost(n):
    return 8 * n, 7 * n


def posterior_kl_backward_cost(n):
    return 16 * n, 5 * n


# Operations ---------------------------------------------------------------------------------------


def _check(moments, of=None):
    if (
        moments.shape[-1] % 2
        or of is not None
        and (tuple(of.shape) != (*moments.shape[:-1], moments.shape[-1] // 2))
    ):
        raise ValueError(
            f"moments {tuple(moments.shape)} must have a mean and a log variance for each channel"
            + ("" if of is None else f" of the latents {tuple(of.shape)}")
        )


SHAPES = (2, 4, 4, 4), (3, 5, 7), (5, 16, 16, 4)  # of latents
LARGE = (32, 32, 32, 4)


def _moments(shape):
    return single(*shape[:-1], 2 * shape[-1])


def _problems(*latents, **more):
    """Problems whose arrays `latents` have the shape of the latents."""
    return [
        Problem(
            moments=_moments(shape),
            **{name: single(*shape) for name in latents},
            **more,
            **measured,
        )
        for shape, measured in (
            *((shape, {}) for shape in SHAPES),
            (LARGE, {"measured": "not yet"}),
        )
    ]


@operation(
    reference=posterior_sample_forward_reference,
    cost=lambda noise: posterior_sample_forward_cost(noise.size),
    check=lambda moments, noise: _check(moments, noise),
    versions=[Version("naive", posterior_sample_forward_kernel_v1)],
    problems=_problems("noise"),
)
def posterior_sample_forward(moments, noise, version=None):
    """z = mean + exp(log variance / 2) · noise, as a new array."""
    z = empty_like(noise)
    launch(
        version.kernel,
        -(-z.size // BLOCK),
        BLOCK,
        moments.reshape(-1),
        noise.reshape(-1),
        z.reshape(-1),
        uint32(noise.shape[-1]),
    )
    return z


@operation(
    reference=posterior_sample_backward_reference,
    cost=lambda noise: posterior_sample_backward_cost(noise.size),
    check=lambda dz, moments, noise: (_check(moments, dz), _check(moments, noise)) and None,
    versions=[Version("naive", posterior_sample_backward_kernel_v1)],
    problems=_problems("dz", "noise"),
)
def posterior_sample_backward(dz, moments, noise, version=None):
    """The gradient of the moments."""
    dmoments = empty_like(moments)
    launch(
        version.kernel,
        -(-dz.size // BLOCK),
        BLOCK,
        dz.reshape(-1),
        moments.reshape(-1),
        noise.reshape(-1),
        dmoments.reshape(-1),
        uint32(dz.shape[-1]),
    )
    return dmoments


@operation(
    reference=posterior_kl_forward_reference,
    cost=lambda moments: posterior_kl_forward_cost(moments.size // 2),
    check=lambda moments, factor=1.0: _check(moments),
    versions=[Version("naive", posterior_kl_forward_kernel_v1)],
    problems=_problems(factor=0.5),
)
def posterior_kl_forward(moments, factor=1.0, version=None):
    """factor · the KL divergence from a standard normal distribution, summed over all latents, in
    nats, as an array (1,)."""
    n = moments.size // 2
    channels = uint32(moments.shape[-1] // 2)
    return launch_loss(version.kernel, n, factor, moments, (moments.reshape(-1),), n, channels)


@operation(
    reference=posterior_kl_backward_reference,
    cost=lambda moments: posterior_kl_backward_cost(moments.size // 2),
    check=lambda moments, factor=1.0, scale=1.0, dkl=None: _check(moments),
    versions=[Version("naive", posterior_kl_backward_kernel_v1)],
    problems=_problems(factor=0.5, scale=0.25, dkl=single(1)),
)
def posterior_kl_backward(moments, factor=1.0, scale=1.0, dkl=None, version=None):
    """The gradient of the moments, times `scale`; dkl: array (1,), the gradient that arrives at the
    divergence (None: one)."""
    dmoments, n = empty_like(moments), moments.size // 2
    launch(
        version.kernel,
        -(-n // BLOCK),
        BLOCK,
        moments.reshape(-1),
        arriving(dkl, moments),
        dmoments.reshape(-1),
        scale * factor,
        n,
        uint32(moments.shape[-1] // 2),
    )
    return dmoments
