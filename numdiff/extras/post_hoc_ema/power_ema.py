"""Averages of the weights with power-function profiles, from which one of any width can be put
together afterwards.

An exponential average decays at one rate, which must be chosen before the training. A power
function's average weighs the past in proportion to the training's length, so that its profile has
one shape at any time: the weights of step s count at step t by (s / t)^γ. Kept for two widths and
stored now and then, such averages are a basis for all others (combine.py).

MATHEMATICS
    ema_k = ema_k + (1 - β_k) · (weight - ema_k),   β_k = (1 - 1/t)^(γ_k + 1),   t = 1, 2, … counts the updates
    so that after t updates  ema_k = Σ_s (s^(γ_k+1) - (s - 1)^(γ_k+1)) / t^(γ_k+1) · weight_s   (the first has β = 0)
    1 - β is computed as -expm1((γ + 1) · log1p(-1/t)): late in training β is 1 in float32, or nearly.
    The width of a profile is its standard deviation relative to t:  σ_rel² = (γ + 1) / ((γ + 2)² · (γ + 3)).
    Nothing changes where gradient_norm is not finite; updates that were skipped do not count.
SHAPES
    ema (K, n) float32, weight (n,) float32, exponents (K,) float32 = γ_k + 1; updates (1,) uint32 =
    t, this update included; gradient_norm (1,) float32
VERSIONS
    v1 naive: one thread an element of the weights, which it reads once for all K averages;
    v2 vectorised: one thread four, by 16-byte loads and stores.
LAUNCH
    v1 ceil(n / 256) blocks of 256 threads; v2 a quarter of them.
DETERMINISM
    elementwise.
COST
    bytes: 4 n + 8 K n; FLOPs 3 K n. Roof: memory bandwidth.
SOURCE
    Karras et al. 2024, "Analyzing and Improving the Training Dynamics of Diffusion Models",
    arXiv:2312.02696, section 3.1: eq. 2 (profile), eq. 3 (width), and the update's β; its appendix
    C derives them.
READ NEXT
    combine.py, which makes an average of another width of these.
"""

import math

import numpy as np

from ...device import cuda, float32, launch, load4, store4
from ...errors import UsageError
from ...kernels.operation import (
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
NARROWEST, WIDEST = 0.005, 0.28  # widths: γ of 198 and of 0.1; at 0.2887 all steps weigh the same


# Widths -------------------------------------------------------------------------------------------


def gamma_of(std):
    """γ of a relative width: the largest root of σ²·(γ + 2)²·(γ + 3) = γ + 1 (the paper's algorithm
    2)."""
    t = std**-2
    return float(np.roots([1, 7, 16 - t, 12 - t]).real.max())


def std_of(gamma):
    """The relative width of a profile."""
    return math.sqrt((gamma + 1) / ((gamma + 2) ** 2 * (gamma + 3)))


def exponents_of(stds):
    """γ + 1 of each of some widths, float32 (K,); a `UsageError` for what is none, and for one that
    is there twice."""
    for std in stds:
        if not NARROWEST <= std <= WIDEST:
            raise UsageError(
                f"a width of averaged weights is a share of the training from {NARROWEST} to {WIDEST}, "
                f"and not {std:g}."
            )
        if [f"{other:g}" for other in stds].count(f"{std:g}") > 1:
            raise UsageError(
                f"ema_std {','.join(f'{each:g}' for each in stds)} has the width {std:g} twice: give it "
                "once."
            )
    return np.array([gamma_of(std) + 1 for std in stds], np.float32)


# Reference ----------------------------------------------------------------------------------------


def power_ema_update_reference(ema, weight, updates, gradient_norm, exponents):
    if not math.isfinite(gradient_norm[0]):
        return
    t = int(updates[0])
    scratch = np.empty(min(CHUNK, weight.size), ema.dtype)
    for average, exponent in zip(ema, exponents, strict=True):
        rest = 1.0 if t <= 1 else -math.expm1(float(exponent) * math.log1p(-1 / t))
        for i in range(0, weight.size, CHUNK):
            e, w = average[i : i + CHUNK], weight[i : i + CHUNK]
            s = np.subtract(w, e, out=scratch[: e.size])
            s *= rest
            e += s


# Device function ----------------------------------------------------------------------------------


@cuda.jit(device=True)
def rest_of_power(updates, exponent):
    """1 - β of this update."""
    t = float32(updates[0])
    if t <= float32(1):
        return float32(1)
    return -math.expm1(exponent * math.log1p(float32(-1) / t))


# v1: one thread an element ------------------------------------------------------------------------


@cuda.jit
def power_ema_update_kernel_v1(ema, weight, updates, gradient_norm, exponents):
    i = cuda.grid(1)
    if i < weight.size and math.isfinite(gradient_norm[0]):
        w = weight[i]
        for k in range(exponents.size):
            r = rest_of_power(updates, exponents[k])
            j = k * weight.size + i
            e = ema[j]
            ema[j] = e + r * (w - e)


# v2: one thread four elements ---------------------------------------------------------------------


@cuda.jit
def power_ema_update_kernel_v2(ema, weight, updates, gradient_norm, exponents):
    i = cuda.grid(1) * 4
    if i < weight.size and math.isfinite(gradient_norm[0]):
        w0, w1, w2, w3 = load4(weight, i)
        for k in range(exponents.size):
            r = rest_of_power(updates, exponents[k])
            j = k * weight.size + i
            e0, e1, e2, e3 = load4(ema, j)
            store4(
                ema,
                j,
                e0 + r * (w0 - e0),
                e1 + r * (w1 - e1),
                e2 + r * (w2 - e2),
                e3 + r * (w3 - e3),
            )


# Cost ---------------------------------------------------------------------------------------------


def power_ema_update_cost(n, k):
    """n: numbers in all averages; k: how many averages."""
    return 8 * n + 4 * (n // k), 3 * n


# Operations ---------------------------------------------------------------------------------------


def _check(ema, weight, exponents):
    k, n = ema.shape
    if weight.shape != (n,) or exponents.shape != (k,):
        raise ValueError(
            f"ema {ema.shape} must have a row like weight {weight.shape} for each of the exponents "
            f"{exponents.shape}"
        )


SMALL = {
    "updates": integers([3], np.uint32),
    "gradient_norm": numbers([4.0]),
    "exponents": numbers(exponents_of((0.05, 0.1))),
}
PARAMETERS = 20_494_272  # of the UNet, for the benchmark


@operation(
    reference=power_ema_update_reference,
    cost=power_ema_update_cost,
    exact_bytes=True,
    check=_check,
    versions=naive_and_vectorised(
        power_ema_update_kernel_v1,
        power_ema_update_kernel_v2,
        lambda weight: lacks_multiple(4, weight.size),
    ),
    problems=[
        Problem(ema=single(2, 24), weight=single(24), **SMALL),
        Problem(ema=single(2, 7), weight=single(7), **SMALL),
        Problem(
            ema=single(2, PARAMETERS),
            weight=single(PARAMETERS),
            updates=integers([7], np.uint32),
            gradient_norm=single(1),
            exponents=single(2),
            measured=True,
        ),
    ],
    writes=("ema",),
)
def power_ema_update(ema, weight, updates, gradient_norm, exponents, version=None):
    """Moves each row of `ema` (K, n) towards `weight` (n,), in place."""
    launch(
        version.kernel,
        -(-weight.size // (version.width * BLOCK)),
        BLOCK,
        ema.reshape(-1),
        weight,
        updates,
        gradient_norm,
        exponents,
    )
