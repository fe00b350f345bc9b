"""The hybrid loss of a model that also learns its variance: squared error plus a variational bound.

MATHEMATICS
    The prediction has 2C channels: an estimate p of the target (noise, velocity or image) and v,
    which places the log variance between the two extremes that a reverse step can have:
        log σ² = low_t + f · width_t,   f = (v + 1)/2,   low_t = log β̃_t,   low_t + width_t = log β_t
    The bound's term at timestep t > 0 is the divergence of two Gaussians, the true posterior of
    variance β̃_t and the model's. Their means differ by k_t · (p - target), with k_t a number of
    the schedule, so with d that difference and u = f · width_t
        term = ½ · (u + e^-u - 1 + d² · e^-(low_t + u))                  dterm/du = ½ · (1 - e^-u - d² · e^-(low_t + u))
    At t = 0 it is the probability that the Gaussian gives to the pixel's bin of width 2/255, its edges open at ±1:
        term = -log(Φ((d + 1/255)/σ) - Φ((d - 1/255)/σ))                  Φ(z) = ½ · (1 + tanh √(2/π)·(z + 0.044715 z³))
    loss = 1/n · Σ (p - target)² + weight · 1/n · Σ term        over the n elements of the target
    The bound trains v alone (its gradient to p is taken as zero): it is noisier than the squared error.
        dp = scale · 2/n · (p - target)          dv = scale · weight/n · dterm/du · width_t / 2
    weight = T / 1000 / ln 2: the expected sum over T timesteps, in bits, times λ = 0.001.
SHAPES
    prediction (B, ..., 2C), target and x_0 (B, ..., C) float32, t (B,) int32; tables k, low, width
    (T,) float32 → loss (1,), dprediction (B, ..., 2C)
VERSIONS
    v1 naive: one element of the target a step; finds its place in the prediction by divisions.
    v2 vectorised: four channels of a pixel at a time, by 16-byte loads and stores (C a multiple of
    4, as latents have).
LAUNCH
    loss: at most 512 blocks of 256 threads, then one block; 1 KiB of shared memory.
    gradient: v1 one thread an element of the target, v2 one thread four.
DETERMINISM
    as in kernels/diffusion/mse.py: partial sums in an order given by n alone, then a second pass.
COST
    bytes: 16 n forward, 24 n backward. Roof: memory bandwidth.
SOURCE
    Nichol and Dhariwal 2021, arXiv:2102.09672, eq. 4 to 7, 15 and 16, and appendix A for the
    rescaling; the bins: Ho et al. 2020, arXiv:2006.11239, eq. 13. d: eq. 10 and 12 there, put into
    the posterior's mean, eq. 7.
READ NEXT
    numdiff/diffusion/process.py, which makes the tables.
"""

import math

import numpy as np

from ...device import cuda, empty_like, float32, launch, load4, store4, uint32
from ...kernels.diffusion.mse import BLOCK, arriving, launch_loss, leave_block_sum
from ...kernels.diffusion.q_sample import per_sample
from ...kernels.operation import (
    Problem,
    filled,
    lacks_multiple,
    naive_and_vectorised,
    operation,
    single,
)

# Φ(z) = 1 / (1 + e^-slope·(z + cubic·z³))
SLOPE, CUBIC = np.float32(2 * math.sqrt(2 / math.pi)), np.float32(0.044715)
HALF_BIN = np.float32(1 / 255)
EDGE = np.float32(0.999)  # beyond it a pixel is 0 or 255, whose bin has no other side
SMALLEST = np.float32(1e-12)  # probability, so that its logarithm is finite


# References ---------------------------------------------------------------------------------------


def _phi(z):
    """(Φ, Φ') of the logistic form, which keeps its relative accuracy in the left tail."""
    with np.errstate(over="ignore"):
        p = 1 / (1 + np.exp(-SLOPE * (z + CUBIC * z * z * z)))
    return p, p * (1 - p) * SLOPE * (1 + 3 * CUBIC * z * z)


def _pixel_term(d, log_variance, x_0):
    """(-log P(bin), its derivative in the log variance) of the first timestep."""
    inverse = np.exp(-0.5 * log_variance)
    # the bin's side towards -∞, by symmetry
    d = np.where(x_0 < -EDGE, d, np.where(x_0 > EDGE, -d, -np.abs(d)))
    upper, lower = inverse * (d + HALF_BIN), inverse * (d - HALF_BIN)
    (p, dp), (q, dq) = _phi(upper), _phi(lower)
    edge = np.abs(x_0) > EDGE
    mass = np.where(edge, p, p - q)
    slope = np.where(edge, dp * upper, dp * upper - dq * lower) * -0.5
    return -np.log(np.maximum(mass, SMALLEST)), np.where(
        mass > SMALLEST, -slope / np.maximum(mass, SMALLEST), 0
    )


def vlb_terms_reference(prediction, target, x_0, t, k, low, width):
    """(p - target, the bound's terms, their derivative in v), each like the target."""
    C, nd = target.shape[-1], target.ndim
    error = prediction[..., :C] - target
    w, lowest = per_sample(width, t, nd), per_sample(low, t, nd)
    u = (prediction[..., C:] + 1) * 0.5 * w
    d = per_sample(k, t, nd) * error
    with np.errstate(over="ignore"):  # the reader of the loss notices that it is not finite
        scaled = d * d * np.exp(-lowest - u)
        term, slope = 0.5 * (u + np.expm1(-u) + scaled), 0.5 * (-np.expm1(-u) - scaled)
    first = np.flatnonzero(t == 0)
    if len(first):
        term[first], slope[first] = _pixel_term(d[first], (lowest + u)[first], x_0[first])
    return error, term, slope * (0.5 * w)


@np.errstate(over="ignore", invalid="ignore")
def hybrid_loss_forward_reference(prediction, target, x_0, t, k, low, width, weight):
    error, term, _ = vlb_terms_reference(prediction, target, x_0, t, k, low, width)
    return np.array([(error * error).mean() + weight * term.mean()], prediction.dtype)


@np.errstate(over="ignore", invalid="ignore")
def hybrid_loss_backward_reference(
    prediction, target, x_0, t, k, low, width, weight, scale=1.0, dloss=None
):
    error, _, slope = vlb_terms_reference(prediction, target, x_0, t, k, low, width)
    arrives = 1.0 if dloss is None else float(dloss[0])
    error *= arrives * scale * 2.0 / target.size
    slope *= arrives * scale * weight / target.size
    return np.concatenate((error, slope), axis=-1)


# Device functions: the bound's term of one element ------------------------------------------------


@cuda.jit(device=True)
def phi(z):
    return float32(1) / (float32(1) + math.exp(-SLOPE * (z + CUBIC * z * z * z)))


@cuda.jit(device=True)
def phi_slope(z, p):
    return p * (float32(1) - p) * SLOPE * (float32(1) + float32(3) * CUBIC * z * z)


@cuda.jit(device=True)
def towards_left(d, x_0):
    """The same bin seen from the side where Φ is small and accurate; the open edge points towards
    -∞."""
    y = -abs(d)
    if x_0 < -EDGE:
        y = d
    elif x_0 > EDGE:
        y = -d
    return y


@cuda.jit(device=True)
def bound_term(error, v, x_0, t, k, low, width):
    u = (v + float32(1)) * float32(0.5) * width
    d = k * error
    if t > 0:
        term = float32(0.5) * (u + math.expm1(-u) + d * d * math.exp(-low - u))
    else:
        inverse = math.exp(float32(-0.5) * (low + u))
        d = towards_left(d, x_0)
        mass = phi(inverse * (d + HALF_BIN))
        if abs(x_0) <= EDGE:
            mass -= phi(inverse * (d - HALF_BIN))
        term = -math.log(max(mass, SMALLEST))
    return term


@cuda.jit(device=True)
def bound_slope(error, v, x_0, t, k, low, width):
    """The derivative of the term in v."""
    u = (v + float32(1)) * float32(0.5) * width
    d = k * error
    if t > 0:
        slope = float32(0.5) * (-math.expm1(-u) - d * d * math.exp(-low - u))
    else:
        inverse = math.exp(float32(-0.5) * (low + u))
        d = towards_left(d, x_0)
        upper = inverse * (d + HALF_BIN)
        mass = phi(upper)
        change = phi_slope(upper, mass) * upper
        if abs(x_0) <= EDGE:
            lower = inverse * (d - HALF_BIN)
            p = phi(lower)
            mass -= p
            change -= phi_slope(lower, p) * lower
        slope = float32(0)
        if mass > SMALLEST:
            slope = float32(0.5) * change / mass
    return slope * float32(0.5) * width


# v1: one element a step ---------------------------------------------------------------------------


@cuda.jit
def hybrid_loss_forward_kernel_v1(
    prediction, target, x_0, t, tables, partials, weight, count, channels
):
    (k, low, width), total = tables, float32(0)
    for i in range(cuda.grid(1), target.size, cuda.gridsize(1)):
        pixel = uint32(i) // channels  # its channel c is the rest
        j = pixel * channels + uint32(i)  # 2 · pixel · channels + c
        step = t[uint32(i) // count]
        error = prediction[j] - target[i]
        total += error * error + weight * bound_term(
            error, prediction[j + channels], x_0[i], step, k[step], low[step], width[step]
        )
    leave_block_sum(partials, total)


@cuda.jit
def hybrid_loss_backward_kernel_v1(
    prediction,
    target,
    x_0,
    t,
    tables,
    dloss,
    dprediction,
    factor_p,
    factor_v,
    count,
    channels,
):
    i = cuda.grid(1)
    if i < target.size:
        k, low, width = tables
        factor_p, factor_v = dloss[0] * factor_p, dloss[0] * factor_v
        pixel = uint32(i) // channels
        j = pixel * channels + uint32(i)
        step = t[uint32(i) // count]
        error = prediction[j] - target[i]
        dprediction[j] = factor_p * error
        dprediction[j + channels] = factor_v * bound_slope(
            error, prediction[j + channels], x_0[i], step, k[step], low[step], width[step]
        )


# v2: four channels of a pixel ---------------------------------------------------------------------


@cuda.jit
def hybrid_loss_forward_kernel_v2(
    prediction, target, x_0, t, tables, partials, weight, count, channels
):
    (k, low, width), total = tables, float32(0)
    for i in range(cuda.grid(1) * 4, target.size, cuda.gridsize(1) * 4):
        pixel = uint32(i) // channels
        j = pixel * channels + uint32(i)
        step = t[uint32(i) // count]
        a, b, w = k[step], low[step], width[step]
        p0, p1, p2, p3 = load4(prediction, j)
        v0, v1, v2, v3 = load4(prediction, j + channels)
        y0, y1, y2, y3 = load4(target, i)
        x0, x1, x2, x3 = load4(x_0, i)
        p0, p1, p2, p3 = p0 - y0, p1 - y1, p2 - y2, p3 - y3
        total += (p0 * p0 + p1 * p1) + (p2 * p2 + p3 * p3)
        total += weight * (
            (bound_term(p0, v0, x0, step, a, b, w) + bound_term(p1, v1, x1, step, a, b, w))
            + (bound_term(p2, v2, x2, step, a, b, w) + bound_term(p3, v3, x3, step, a, b, w))
        )
    leave_block_sum(partials, total)


@cuda.jit
def hybrid_loss_backward_kernel_v2(
    prediction,
    target,
    x_0,
    t,
    tables,
    dloss,
    dprediction,
    factor_p,
    factor_v,
    count,
    channels,
):
    i = cuda.grid(1) * 4
    if i < target.size:
        k, low, width = tables
        factor_p, factor_v = dloss[0] * factor_p, dloss[0] * factor_v
        pixel = uint32(i) // channels
        j = pixel * channels + uint32(i)
        step = t[uint32(i) // count]
        a, b, w = k[step], low[step], width[step]
        p0, p1, p2, p3 = load4(prediction, j)
        v0, v1, v2, v3 = load4(prediction, j + channels)
        y0, y1, y2, y3 = load4(target, i)
        x0, x1, x2, x3 = load4(x_0, i)
        p0, p1, p2, p3 = p0 - y0, p1 - y1, p2 - y2, p3 - y3
        store4(dprediction, j, factor_p * p0, factor_p * p1, factor_p * p2, factor_p * p3)
        store4(
            dprediction,
            j + channels,
            factor_v * bound_slope(p0, v0, x0, step, a, b, w),
            factor_v * bound_slope(p1, v1, x1, step, a, b, w),
            factor_v * bound_slope(p2, v2, x2, step, a, b, w),
            factor_v * bound_slope(p3, v3, x3, step, a, b, w),
        )


# Cost ---------------------------------------------------------------------------------------------


def hybrid_loss_forward_cost(n):
    """(bytes, FLOPs) for a target of n elements; an exponential counted as one."""
    return 16 * n, 15 * n


def hybrid_loss_backward_cost(n):
    return 24 * n, 16 * n


# Operations ---------------------------------------------------------------------------------------


def _check(prediction, target, x_0, t, k, low, width):
    C, tables = target.shape[-1], (k, low, width)
    if prediction.shape != (*target.shape[:-1], 2 * C) or x_0.shape != target.shape:
        raise ValueError(
            f"prediction {tuple(prediction.shape)} must have the target's shape {tuple(target.shape)}, "
            f"but twice its channels, and x_0 {tuple(x_0.shape)} that shape itself"
        )
    if t.shape != target.shape[:1] or t.dtype != np.int32:
        raise ValueError(
            f"t must be one int32 for each of {target.shape[0]} samples, got {t.dtype}{tuple(t.shape)}"
        )
    if any(table.ndim != 1 or table.shape != tables[0].shape for table in tables):
        raise ValueError("the tables must be rows of one length, one value a timestep")


def _two_versions(naive, vectorised):
    return naive_and_vectorised(
        naive, vectorised, lambda target: lacks_multiple(4, target.shape[-1], "channels")
    )


def _made(C):
    """A function of a generator: pixels at both edges of the range and within, the first timestep
    and later ones."""

    def inputs(rng):
        shape = 3, 2, 2, C
        target, error, v = (rng.standard_normal(shape).astype(np.float32) for _ in range(3))
        noise = np.linspace(0.01, 0.95, 10)  # 1 - alpha_bar
        beta = 1 - (1 - noise) / (1 - np.append(0.0, noise[:-1]))
        low = np.log(beta * np.append(noise[0], noise[:-1]) / noise)
        return {
            "prediction": np.concatenate((target + np.float32(0.3) * error, v), axis=-1),
            "target": target,
            "x_0": np.clip(1.5 * rng.standard_normal(shape), -1, 1),
            "t": np.array([0, 4, 9], np.int32),
            "k": beta / np.sqrt(noise),
            "low": low,
            "width": np.log(beta) - low + 0.1,
        }

    return inputs


LATENTS, TABLE = single(64, 32, 32, 4), single(1000)
MEASURED = {
    "prediction": single(64, 32, 32, 8),
    "target": LATENTS,
    "x_0": LATENTS,
    "t": filled((64,), lambda rng: rng.integers(0, 1000, 64), np.int32),
    "k": TABLE,
    "low": TABLE,
    "width": TABLE,
    "weight": 1.44,
    "measured": True,
}


@operation(
    reference=hybrid_loss_forward_reference,
    cost=lambda x_0: hybrid_loss_forward_cost(x_0.size),
    check=_check,
    versions=_two_versions(hybrid_loss_forward_kernel_v1, hybrid_loss_forward_kernel_v2),
    problems=[
        *(Problem(f"{C} channels", inputs=_made(C), weight=1.4, tolerance=5e-5) for C in (3, 4)),
        Problem(**MEASURED),
    ],
)
def hybrid_loss_forward(prediction, target, x_0, t, k, low, width, weight, version=None):
    """Mean squared error + weight · mean of the bound's terms, as an array (1,)."""
    flat = prediction.reshape(-1), target.reshape(-1), x_0.reshape(-1)
    return launch_loss(
        version.kernel,
        target.size,
        1.0 / target.size,
        target,
        (*flat, t, (k, low, width)),
        float(weight),
        uint32(math.prod(target.shape[1:])),
        uint32(target.shape[-1]),
    )


@operation(
    reference=hybrid_loss_backward_reference,
    cost=lambda x_0: hybrid_loss_backward_cost(x_0.size),
    check=_check,
    versions=_two_versions(hybrid_loss_backward_kernel_v1, hybrid_loss_backward_kernel_v2),
    problems=[
        *(
            Problem(f"{C} channels", inputs=_made(C), weight=1.4, scale=0.5, tolerance=1e-4)
            for C in (3, 4)
        ),
        Problem(**MEASURED),
    ],
)
def hybrid_loss_backward(
    prediction, target, x_0, t, k, low, width, weight, scale=1.0, dloss=None, version=None
):
    """dprediction: the squared error's gradient in the first C channels, the bound's in the others,
    times `scale`.

    dloss: array (1,), the gradient that arrives at the loss (None: one)
    """
    dprediction = empty_like(prediction)
    launch(
        version.kernel,
        -(-target.size // (version.width * BLOCK)),
        BLOCK,
        prediction.reshape(-1),
        target.reshape(-1),
        x_0.reshape(-1),
        t,
        (k, low, width),
        arriving(dloss, prediction),
        dprediction.reshape(-1),
        scale * 2.0 / target.size,
        scale * weight / target.size,
        uint32(math.prod(target.shape[1:])),
        uint32(target.shape[-1]),
    )
    return dprediction
