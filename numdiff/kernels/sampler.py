"""One step of a sampler: from a model's answer to x_0, and from there to the image at an earlier timestep.

MATHEMATICS
    predict_x_0, by what the model was trained to give, with a = √ᾱ_t and s = √(1 - ᾱ_t):
        eps   x_0 = (x_t - s · prediction) / a
        v     x_0 = a · x_t - s · prediction
        x_0   x_0 = prediction                          and if asked, x_0 is clipped to [-1, 1]
    ddim_step, from timestep t to an earlier one with ᾱ' (ᾱ' = 1 at the end):
        x' = √ᾱ' · x_0 + √(1 - ᾱ' - σ²) · eps + σ · noise,      eps = (x_t - a · x_0) / s of the clipped x_0
        σ = eta · √((1 - ᾱ') / (1 - ᾱ_t)) · √(1 - ᾱ_t / ᾱ')
      eps put in, it is a sum of three terms whose coefficients depend on t alone:
        x' = coefficient_x_t[t] · x_t + coefficient_x_0[t] · x_0 + coefficient_noise[t] · noise
        coefficient_x_t = √(1 - ᾱ' - σ²) / s,   coefficient_x_0 = √ᾱ' - a · coefficient_x_t,   coefficient_noise = σ
      eta = 0 is deterministic DDIM; eta = 1 over all timesteps is DDPM with the posterior's variance. The caller makes
      the coefficients, in float64: see numdiff/diffusion/samplers.py.
SHAPES
    x_t, x_0, noise (B, ...) float32; prediction (B, ..., Cp), Cp ≥ C: only the first C channels count;
    t (B,) int32, an index into tables (T,) float32 on the same engine
VERSIONS
    v1 one thread an element; v2 one thread four elements of one sample, by 16-byte loads and stores (needs Cp = C).
LAUNCH
    v1 ceil(n / 256) blocks of 256 threads; v2 a quarter of them.
DETERMINISM
    elementwise.
COST
    bytes: 12 n for predict_x_0; 16 n for ddim_step with noise, 12 n without. Roof: memory bandwidth.
SOURCE
    Song, Meng and Ermon 2020, arXiv:2010.02502, eq. 12 and 16; Ho et al. 2020, arXiv:2006.11239, eq. 7;
    v: Salimans and Ho 2022, arXiv:2202.00512, appendix D.
READ NEXT
    numdiff/diffusion/samplers.py, where these steps become a sampler.
"""
import math

import numpy as np

from ..device import cuda, empty_like, float32, is_device, launch, load4, store4, uint32
from .q_sample import per_sample

BLOCK = 256  # threads
KINDS = ("eps", "v", "x_0")
EPS, VELOCITY = 0, 1  # positions in KINDS, as the kernels see them


# References -----------------------------------------------------------------------------------------------------------

def predict_x_0_reference(x_t, prediction, t, sqrt_alpha_bar, sqrt_one_minus_alpha_bar, kind="eps", clip=True):
    prediction = prediction[..., :x_t.shape[-1]]
    a, s = (per_sample(table, t, x_t.ndim) for table in (sqrt_alpha_bar, sqrt_one_minus_alpha_bar))
    if kind == "eps":
        y = (x_t - s * prediction) / a
    elif kind == "v":
        y = a * x_t - s * prediction
    else:
        y = prediction.copy()
    return np.clip(y, -1, 1, out=y) if clip else y


def ddim_step_reference(x_t, x_0, t, coefficient_x_t, coefficient_x_0, coefficient_noise, noise=None):
    y = per_sample(coefficient_x_t, t, x_t.ndim) * x_t
    y += per_sample(coefficient_x_0, t, x_t.ndim) * x_0
    if noise is not None:
        y += per_sample(coefficient_noise, t, x_t.ndim) * noise
    return y


# Device function ------------------------------------------------------------------------------------------------------

@cuda.jit(device=True)
def x_0_of(x, p, a, s, kind, clip):
    y = p
    if kind == EPS:
        y = (x - s * p) / a
    elif kind == VELOCITY:
        y = a * x - s * p
    if clip:
        y = min(max(y, float32(-1)), float32(1))
    return y


# v1: one thread an element --------------------------------------------------------------------------------------------

@cuda.jit
def predict_x_0_kernel_v1(x_t, prediction, t, sqrt_alpha_bar, sqrt_one_minus_alpha_bar, y, count, channels, channels_p,
                          kind, clip):
    i = cuda.grid(1)
    if i < y.size:
        row = uint32(i) // channels  # pixel, and its channel c
        c = uint32(i) - row * channels
        step = t[uint32(i) // count]
        y[i] = x_0_of(x_t[i], prediction[row * channels_p + c], sqrt_alpha_bar[step], sqrt_one_minus_alpha_bar[step],
                      kind, clip)


@cuda.jit
def ddim_step_kernel_v1(x_t, x_0, t, coefficient_x_t, coefficient_x_0, coefficient_noise, noise, y, count, noisy):
    i = cuda.grid(1)
    if i < y.size:
        step = t[uint32(i) // count]
        value = coefficient_x_t[step] * x_t[i] + coefficient_x_0[step] * x_0[i]
        if noisy:
            value += coefficient_noise[step] * noise[i]
        y[i] = value


# v2: four elements of one sample --------------------------------------------------------------------------------------

@cuda.jit
def predict_x_0_kernel_v2(x_t, prediction, t, sqrt_alpha_bar, sqrt_one_minus_alpha_bar, y, count, channels, channels_p,
                          kind, clip):
    i = cuda.grid(1) * 4
    if i < y.size:
        step = t[uint32(i) // count]
        a, s = sqrt_alpha_bar[step], sqrt_one_minus_alpha_bar[step]
        x0, x1, x2, x3 = load4(x_t, i)
        p0, p1, p2, p3 = load4(prediction, i)
        store4(y, i, x_0_of(x0, p0, a, s, kind, clip), x_0_of(x1, p1, a, s, kind, clip),
               x_0_of(x2, p2, a, s, kind, clip), x_0_of(x3, p3, a, s, kind, clip))


@cuda.jit
def ddim_step_kernel_v2(x_t, x_0, t, coefficient_x_t, coefficient_x_0, coefficient_noise, noise, y, count, noisy):
    i = cuda.grid(1) * 4
    if i < y.size:
        step = t[uint32(i) // count]
        a, b = coefficient_x_t[step], coefficient_x_0[step]
        u0, u1, u2, u3 = load4(x_t, i)
        v0, v1, v2, v3 = load4(x_0, i)
        y0, y1, y2, y3 = a * u0 + b * v0, a * u1 + b * v1, a * u2 + b * v2, a * u3 + b * v3
        if noisy:
            s = coefficient_noise[step]
            n0, n1, n2, n3 = load4(noise, i)
            y0, y1, y2, y3 = y0 + s * n0, y1 + s * n1, y2 + s * n2, y3 + s * n3
        store4(y, i, y0, y1, y2, y3)


# Launchers ------------------------------------------------------------------------------------------------------------

def _check_t(t, batch):
    if t.shape != (batch,) or t.dtype != np.int32:
        raise ValueError(f"t must be one int32 for each of {batch} samples, got {t.dtype}{tuple(t.shape)}")


def _choose(version, fits, why):
    if version == 2 and not fits:
        raise ValueError(f"version 2 needs {why}; use version=1")
    return version or (2 if fits else 1)


def predict_x_0(x_t, prediction, t, sqrt_alpha_bar, sqrt_one_minus_alpha_bar, kind="eps", clip=True, version=None):
    """The x_0 that a model's prediction of `kind` ("eps", "v" or "x_0") stands for, as a new array like x_t."""
    if kind not in KINDS:
        raise ValueError(f"a prediction is one of {KINDS}, got {kind!r}")
    if prediction.shape[:-1] != x_t.shape[:-1] or prediction.shape[-1] < x_t.shape[-1]:
        raise ValueError(f"prediction {tuple(prediction.shape)} must have the shape of x_t {tuple(x_t.shape)}, "
                         "or that shape with more channels")
    _check_t(t, x_t.shape[0])
    if not is_device(x_t):
        return predict_x_0_reference(x_t, prediction, t, sqrt_alpha_bar, sqrt_one_minus_alpha_bar, kind, clip)
    count = math.prod(x_t.shape[1:])
    version = _choose(version, count % 4 == 0 and prediction.shape == x_t.shape,
                      "equal shapes, and samples of a multiple of 4 elements")
    y = empty_like(x_t)
    kernel, threads = (predict_x_0_kernel_v1, y.size) if version == 1 else (predict_x_0_kernel_v2, y.size // 4)
    launch(kernel, -(-threads // BLOCK), BLOCK, x_t.reshape(-1), prediction.reshape(-1), t, sqrt_alpha_bar,
           sqrt_one_minus_alpha_bar, y.reshape(-1), uint32(count), uint32(x_t.shape[-1]), uint32(prediction.shape[-1]),
           KINDS.index(kind), int(clip))
    return y


def ddim_step(x_t, x_0, t, coefficient_x_t, coefficient_x_0, coefficient_noise, noise=None, version=None):
    """The image at the next timestep of a sampler; tables from `ddim_coefficients`; noise None adds none."""
    if x_t.shape != x_0.shape or (noise is not None and noise.shape != x_t.shape):
        raise ValueError(f"x_t {tuple(x_t.shape)}, x_0 {tuple(x_0.shape)} and noise must have one shape")
    _check_t(t, x_t.shape[0])
    if not is_device(x_t):
        return ddim_step_reference(x_t, x_0, t, coefficient_x_t, coefficient_x_0, coefficient_noise, noise)
    count = math.prod(x_t.shape[1:])
    version = _choose(version, count % 4 == 0, "samples of a multiple of 4 elements")
    y = empty_like(x_t)
    kernel, threads = (ddim_step_kernel_v1, y.size) if version == 1 else (ddim_step_kernel_v2, y.size // 4)
    launch(kernel, -(-threads // BLOCK), BLOCK, x_t.reshape(-1), x_0.reshape(-1), t, coefficient_x_t, coefficient_x_0,
           coefficient_noise, (x_t if noise is None else noise).reshape(-1), y.reshape(-1), uint32(count),
           int(noise is not None))
    return y


def predict_x_0_cost(n):
    return 12 * n, 3 * n


def ddim_step_cost(n, noise=True):
    return (16 if noise else 12) * n, (5 if noise else 3) * n
