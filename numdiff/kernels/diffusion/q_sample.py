"""The forward diffusion process: noise an image to a timestep, the velocity that a model may be asked for, a weight.

MATHEMATICS
    x_t = √ᾱ_t · x_0 + √(1 - ᾱ_t) · eps
    v_t = √ᾱ_t · eps - √(1 - ᾱ_t) · x_0             x_t turned by 90°: x_0 = √ᾱ_t · x_t - √(1 - ᾱ_t) · v_t
    y = w_t · x                                     and so dx = w_t · dy: a weight of each timestep in the loss
    The first two are not differentiated: they are made from data. Any p_t · x_0 + q_t · eps is a q_sample, too.
SHAPES
    x_0, eps (B, ...) float32; t (B,) int32, one timestep an image; tables √ᾱ, √(1 - ᾱ), w (T,) float32
VERSIONS
    v1 naive: one thread an element.
    v2 vectorised: one thread four elements of one sample, by 16-byte loads and stores; they share the division that
       finds it.
MEASURED
    NVIDIA H200, 2026-11-22, PyTorch 2.11.0: numdiff bench kernels --of files; * is the launcher's choice
    q_sample_forward, 32×64×64×3, 32×64×64×3, float32
        v1      2.69 µs    1,758 GB/s   43 % of memory
        v2*     2.13 µs    2,220 GB/s   54 % of memory   1.26 × v1
LAUNCH
    v1 ceil(n / 256) blocks of 256 threads; v2 a quarter of them.
DETERMINISM
    each output is written by one thread.
COST
    bytes: 12 n (two reads, one write), 8 n for the weight. Roof: memory bandwidth.
SOURCE
    Ho, Jain and Abbeel 2020, arXiv:2006.11239, eq. 4; v: Salimans and Ho 2022, arXiv:2202.00512, appendix D.
READ NEXT
    mse.py, which compares the model's answer with eps or v.
"""
import math

import numpy as np

from ...device import cuda, empty_like, is_device, launch, load4, store4, uint32
from ..versions import versions_by_name

BLOCK = 256  # threads


# References -----------------------------------------------------------------------------------------------------------

def per_sample(table, t, ndim):
    """table[t] shaped (B, 1, ..., 1)."""
    return table[t].reshape((-1,) + (1,) * (ndim - 1))


def q_sample_forward_reference(x_0, eps, t, sqrt_alpha_bar, sqrt_one_minus_alpha_bar):
    y = per_sample(sqrt_alpha_bar, t, x_0.ndim) * x_0
    y += per_sample(sqrt_one_minus_alpha_bar, t, x_0.ndim) * eps
    return y


def velocity_forward_reference(x_0, eps, t, sqrt_alpha_bar, sqrt_one_minus_alpha_bar):
    y = per_sample(sqrt_alpha_bar, t, x_0.ndim) * eps
    y -= per_sample(sqrt_one_minus_alpha_bar, t, x_0.ndim) * x_0
    return y


def weigh_forward_reference(x, t, weight):
    return per_sample(weight, t, x.ndim) * x


# v1: one thread an element --------------------------------------------------------------------------------------------

@cuda.jit
def q_sample_forward_kernel_v1(x_0, eps, t, sqrt_alpha_bar, sqrt_one_minus_alpha_bar, y, count):
    i = cuda.grid(1)
    if i < y.size:
        step = t[uint32(i) // count]  # of sample b; a sample has `count` elements (uint32)
        y[i] = sqrt_alpha_bar[step] * x_0[i] + sqrt_one_minus_alpha_bar[step] * eps[i]


@cuda.jit
def velocity_forward_kernel_v1(x_0, eps, t, sqrt_alpha_bar, sqrt_one_minus_alpha_bar, y, count):
    i = cuda.grid(1)
    if i < y.size:
        step = t[uint32(i) // count]
        y[i] = sqrt_alpha_bar[step] * eps[i] - sqrt_one_minus_alpha_bar[step] * x_0[i]


@cuda.jit
def weigh_forward_kernel_v1(x, t, weight, y, count):
    i = cuda.grid(1)
    if i < y.size:
        y[i] = weight[t[uint32(i) // count]] * x[i]


# v2: four elements of one sample --------------------------------------------------------------------------------------

@cuda.jit
def q_sample_forward_kernel_v2(x_0, eps, t, sqrt_alpha_bar, sqrt_one_minus_alpha_bar, y, count):
    i = cuda.grid(1) * 4
    if i < y.size:
        step = t[uint32(i) // count]
        a, s = sqrt_alpha_bar[step], sqrt_one_minus_alpha_bar[step]
        x0, x1, x2, x3 = load4(x_0, i)
        e0, e1, e2, e3 = load4(eps, i)
        store4(y, i, a * x0 + s * e0, a * x1 + s * e1, a * x2 + s * e2, a * x3 + s * e3)


@cuda.jit
def velocity_forward_kernel_v2(x_0, eps, t, sqrt_alpha_bar, sqrt_one_minus_alpha_bar, y, count):
    i = cuda.grid(1) * 4
    if i < y.size:
        step = t[uint32(i) // count]
        a, s = sqrt_alpha_bar[step], sqrt_one_minus_alpha_bar[step]
        x0, x1, x2, x3 = load4(x_0, i)
        e0, e1, e2, e3 = load4(eps, i)
        store4(y, i, a * e0 - s * x0, a * e1 - s * x1, a * e2 - s * x2, a * e3 - s * x3)


@cuda.jit
def weigh_forward_kernel_v2(x, t, weight, y, count):
    i = cuda.grid(1) * 4
    if i < y.size:
        w = weight[t[uint32(i) // count]]
        x0, x1, x2, x3 = load4(x, i)
        store4(y, i, w * x0, w * x1, w * x2, w * x3)


# Launchers ------------------------------------------------------------------------------------------------------------

def _check(x_0, eps, t, sqrt_alpha_bar, sqrt_one_minus_alpha_bar):
    if x_0.shape != eps.shape:
        raise ValueError(f"x_0 {tuple(x_0.shape)} and eps {tuple(eps.shape)} differ in shape")
    if t.shape != (x_0.shape[0],) or t.dtype != np.int32:
        raise ValueError(f"t must be one int32 for each of {x_0.shape[0]} samples, got {t.dtype}{tuple(t.shape)}")
    if sqrt_alpha_bar.ndim != 1 or sqrt_alpha_bar.shape != sqrt_one_minus_alpha_bar.shape:
        raise ValueError("the two tables must be rows of one length, one value a timestep")


def _launch(kernels, arrays, t, tables, version):
    count = math.prod(arrays[0].shape[1:])
    if version is None:
        version = 2 if count % 4 == 0 else 1
    elif version == 2 and count % 4:
        raise ValueError(f"version 2 (vectorised) needs samples of a multiple of 4 elements, got {count}; use "
                         "version=1")
    y = empty_like(arrays[0])
    threads = y.size if version == 1 else y.size // 4
    launch(kernels[version - 1], -(-threads // BLOCK), BLOCK, *(x.reshape(-1) for x in arrays), t, *tables,
           y.reshape(-1), uint32(count))
    return y


@versions_by_name
def q_sample_forward(x_0, eps, t, sqrt_alpha_bar, sqrt_one_minus_alpha_bar, version=None):
    """x_t of every sample at its own timestep t[b]."""
    _check(x_0, eps, t, sqrt_alpha_bar, sqrt_one_minus_alpha_bar)
    if not is_device(x_0):
        return q_sample_forward_reference(x_0, eps, t, sqrt_alpha_bar, sqrt_one_minus_alpha_bar)
    kernels = q_sample_forward_kernel_v1, q_sample_forward_kernel_v2
    return _launch(kernels, (x_0, eps), t, (sqrt_alpha_bar, sqrt_one_minus_alpha_bar), version)


@versions_by_name
def velocity_forward(x_0, eps, t, sqrt_alpha_bar, sqrt_one_minus_alpha_bar, version=None):
    """The v target of every sample at its own timestep t[b]."""
    _check(x_0, eps, t, sqrt_alpha_bar, sqrt_one_minus_alpha_bar)
    if not is_device(x_0):
        return velocity_forward_reference(x_0, eps, t, sqrt_alpha_bar, sqrt_one_minus_alpha_bar)
    kernels = velocity_forward_kernel_v1, velocity_forward_kernel_v2
    return _launch(kernels, (x_0, eps), t, (sqrt_alpha_bar, sqrt_one_minus_alpha_bar), version)


@versions_by_name
def weigh_forward(x, t, weight, version=None):
    """Every sample of x (B, ...) times the weight of its own timestep t[b]; of dy, it is the gradient."""
    _check(x, x, t, weight, weight)
    if not is_device(x):
        return weigh_forward_reference(x, t, weight)
    return _launch((weigh_forward_kernel_v1, weigh_forward_kernel_v2), (x,), t, (weight,), version)


def q_sample_forward_cost(n):
    return 12 * n, 3 * n


def velocity_forward_cost(n):
    return 12 * n, 3 * n


def weigh_forward_cost(n):
    return 8 * n, n
