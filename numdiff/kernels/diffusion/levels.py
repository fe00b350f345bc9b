"""Noise levels without whole timesteps: each image draws its own, and the factors that a training
step needs.

MATHEMATICS
    An image at a level is x_t = a · x_0 + s · eps, its noise σ = s / a. What is drawn is u = log σ:
        uniform   t in (0, 1), u = log(t / (1 - t))          normal   u = mean + std · z: logit-normal t, log-normal σ
    and u + log(shift) after that, which turns t into shift · t / (1 + (shift - 1) · t). The paths:
        linear    t = σ / (1 + σ),  a = 1 - t,  s = t;                            the model sees t · scale
        edm       c_in = 1 / √(σ² + σ_data²),  a = c_in,  s = c_in · σ;           the model sees log(σ) / 4
    What can be predicted, as p · x_0 + q · eps, and its turn D = q · a - s · p, by which an error
    of x_0 follows from one of the answer: δx_0 = -(s / D) · δanswer.
        eps       0, 1               D = a
        x_0       1, 0               D = -s
        v         -s, a              D = a² + s²
        flow      -1, 1              D = a + s
        edm       s / σ_data, -σ_data · a       D = -1 / σ_data             the network F of EDM's preconditioning
    A loss that measures L where P is predicted weighs the answer's error by k = |D_L| / max(|D_P|,
    0.05); min-SNR-γ, the error of x_0 times √min(a²/s², γ), by k = min(a, √γ · s) / |D_P|; plain: k
    = 1.
SHAPES
    step (1,), samples (B,) uint32 → levels (6, B) float32: a, s, what the model sees, k · p, k · q,
    k; rows (B,) int32: 0 … B-1, where an image's numbers are in each of the six
VERSIONS
    v1 one thread an image.
LAUNCH
    ceil(B / 256) blocks of 256 threads.
DETERMINISM
    a pure function of (seed, purpose, step, sample).
COST
    bytes: 32 B, with 4 B of samples. Negligible compared with a step: what counts is that the host
    reads nothing back.
SOURCE
    linear, flow: Lipman et al. 2023, arXiv:2210.02747, and Liu et al. 2023, arXiv:2209.03003;
    logit-normal and shift: Esser et al. 2024, arXiv:2403.03206, eq. 19 and 23; edm: Karras et al.
    2022, arXiv:2206.00364, table 1; min-SNR-γ: Hang et al. 2023, arXiv:2303.09556; x_0 under the
    flow's loss, and 0.05: Li and He 2025, arXiv:2511.13720 (JiT).
READ NEXT
    l1.py
"""

import math
from typing import NamedTuple

import numpy as np

from ...device import cuda, empty, float32, int32, launch, uint32
from ...device.philox import philox4x32
from ..operation import PURPOSE, SEED, Problem, counters, integers, operation
from ..random import (
    check_counters,
    normal_pair,
    random_elements_reference,
    random_normal_reference,
    seed_words,
)

BLOCK = 256  # threads
PATHS = LINEAR, EDM = 0, 1
PREDICTIONS = "eps", "x_0", "v", "flow", "edm"  # their places are the kernel's codes
PLAIN, MIN_SNR = -1, -2  # instead of a prediction that the loss measures
MIN_TURN = np.float32(0.05)  # JiT's, for t
TINY = np.float32(1e-30)
# 23 bits and a half: never 0 nor 1 in float32
HALF_BITS, HALF_UNIT = np.uint32(9), np.float32(2.0**-23)


# What is drawn and predicted ----------------------------------------------------------------------


class Draw(NamedTuple):
    """How a level is drawn: u normal with mean and std, or t uniform; shift: of σ."""

    normal: int
    mean: float
    std: float
    shift: float


class Aim(NamedTuple):
    """What is predicted on which path and what the loss measures; scale: of t, as the model sees
    it."""

    path: int
    prediction: int
    loss: int
    scale: float
    sigma_data: float
    root_gamma: float


def draw_of(normal=False, mean=0.0, std=1.0, shift=1.0):
    """The `Draw` as the kernel takes it."""
    return Draw(int(normal), float(mean), float(std), float(shift))


def aim_of(path, prediction, loss=PLAIN, scale=1.0, sigma_data=0.5, gamma=0.0):
    """The `Aim` as the kernel takes it. path: LINEAR or EDM; prediction: of PREDICTIONS; loss:
    another of them, PLAIN or MIN_SNR with its gamma."""
    return Aim(
        int(path),
        PREDICTIONS.index(prediction),
        PREDICTIONS.index(loss) if loss in PREDICTIONS else int(loss),
        float(scale),
        float(sigma_data),
        math.sqrt(gamma),
    )


# References ---------------------------------------------------------------------------------------


def target_reference(prediction, a, s, sigma_data=0.5):
    """(p, q) of a prediction, by name, at levels a, s."""
    return {
        "eps": (0 * a, 1 + 0 * a),
        "x_0": (1 + 0 * a, 0 * a),
        "v": (-s, a),
        "flow": (0 * a - 1, 1 + 0 * a),
        "edm": (s / sigma_data, -sigma_data * a),
    }[prediction]


def turn_reference(prediction, a, s, sigma_data=0.5):
    """D = q · a - s · p, without the rounding of where it is simple."""
    return {"eps": a, "x_0": -s, "v": a * a + s * s, "flow": a + s, "edm": 0 * a - 1 / sigma_data}[
        prediction
    ]


def weight_reference(aim, a, s):
    """k at levels a, s."""
    if aim.loss == PLAIN:
        return 1 + 0 * a
    turn = np.abs(turn_reference(PREDICTIONS[aim.prediction], a, s, aim.sigma_data))
    if aim.loss == MIN_SNR:
        return np.minimum(a, aim.root_gamma * s) / np.maximum(turn, TINY)
    measured = np.abs(turn_reference(PREDICTIONS[aim.loss], a, s, aim.sigma_data))
    return measured / np.maximum(turn, float(MIN_TURN))


def path_reference(path, u, scale=1.0, sigma_data=0.5):
    """(a, s, what the model sees) at u = log σ, float64."""
    if path == LINEAR:
        t = 1 / (1 + np.exp(-u))
        return 1 / (1 + np.exp(u)), t, t * scale
    sigma = np.exp(u)
    a = 1 / np.sqrt(sigma * sigma + sigma_data**2)
    return a, a * sigma, u / 4


def log_sigma_reference(seed, purpose, step, samples, draw):
    """u of each sample, float64 (B,)."""
    shape = len(samples), 1
    if draw.normal:
        z = random_normal_reference(shape, seed, purpose, step, samples)[:, 0].astype(np.float64)
        u = draw.mean + draw.std * z
    else:
        t = random_elements_reference(
            lambda words: ((words >> HALF_BITS) + np.float64(0.5)) * 2.0**-23,
            np.float64,
            shape,
            seed,
            purpose,
            step,
            samples,
        )[:, 0]
        u = np.log(t / (1 - t))
    return u + math.log(draw.shift)


def levels_forward_reference(seed, purpose, step, samples, draw, aim):
    u = log_sigma_reference(seed, purpose, step, samples, draw)
    rows = np.arange(len(samples), dtype=np.int32)
    return numbers_reference(u, aim).astype(np.float32), rows


def numbers_reference(u, aim):
    """The six rows at levels u = log σ (B,), float64 (6, B)."""
    a, s, seen = path_reference(aim.path, u, aim.scale, aim.sigma_data)
    p, q = target_reference(PREDICTIONS[aim.prediction], a, s, aim.sigma_data)
    k = weight_reference(aim, a, s)
    return np.stack([a, s, seen, k * p, k * q, k])


# Device functions ---------------------------------------------------------------------------------


@cuda.jit(device=True)
def target_of(prediction, a, s, sigma_data):
    """(p, q) of a prediction, by its place in PREDICTIONS."""
    p, q = float32(0), float32(1)
    if prediction == 1:
        p, q = float32(1), float32(0)
    elif prediction == 2:
        p, q = -s, a
    elif prediction == 3:
        p = float32(-1)
    elif prediction == 4:
        p, q = s / sigma_data, -sigma_data * a
    return p, q


@cuda.jit(device=True)
def turn_of(prediction, a, s, sigma_data):
    """|D| of a prediction."""
    turn = a
    if prediction == 1:
        turn = s
    elif prediction == 2:
        turn = a * a + s * s
    elif prediction == 3:
        turn = a + s
    elif prediction == 4:
        turn = float32(1) / sigma_data
    return turn


# v1: one thread an image --------------------------------------------------------------------------


@cuda.jit
def levels_forward_kernel_v1(levels, rows, seed_low, seed_high, purpose, step, samples, draw, aim):
    """draw: a `Draw`, aim: an `Aim`."""
    b = cuda.grid(1)
    if b < rows.size:
        rows[b] = b
        w0, w1, _, _ = philox4x32(uint32(0), samples[b], step[0], seed_high, seed_low, purpose)
        if draw.normal:
            z, _ = normal_pair(w0, w1)
            sigma = math.exp(draw.mean + draw.std * z) * draw.shift
        else:  # 1 - t is exact
            t = (float32(int32(w0 >> HALF_BITS)) + float32(0.5)) * HALF_UNIT
            sigma = t / (float32(1) - t) * draw.shift
        if aim.path == LINEAR:
            a = float32(1) / (float32(1) + sigma)
            s = sigma * a
            seen = s * aim.scale
        else:
            a = float32(1) / math.sqrt(sigma * sigma + aim.sigma_data * aim.sigma_data)
            s = sigma * a
            seen = math.log(sigma) * float32(0.25)
        p, q = target_of(aim.prediction, a, s, aim.sigma_data)
        k = float32(1)
        if aim.loss == MIN_SNR:
            k = min(a, aim.root_gamma * s) / max(
                turn_of(aim.prediction, a, s, aim.sigma_data), TINY
            )
        elif aim.loss != PLAIN:
            k = turn_of(aim.loss, a, s, aim.sigma_data) / max(
                turn_of(aim.prediction, a, s, aim.sigma_data), MIN_TURN
            )
        levels[0, b], levels[1, b], levels[2, b] = a, s, seen
        levels[3, b], levels[4, b], levels[5, b] = k * p, k * q, k


# Cost ---------------------------------------------------------------------------------------------


def levels_forward_cost(n):
    """(bytes, FLOPs) for n images: the samples read, six numbers and a row written."""
    return 32 * n, 60 * n


# Operations ---------------------------------------------------------------------------------------


def _check(step, samples):
    check_counters(step, samples, samples.shape[0])


KEY = {"seed": SEED, "purpose": PURPOSE, **counters(5)}


@operation(
    reference=levels_forward_reference,
    cost=levels_forward_cost,
    check=_check,
    problems=[
        Problem("uniform", **KEY, draw=draw_of(shift=3.0), aim=aim_of(LINEAR, "flow")),
        Problem(
            "logit-normal", **KEY, draw=draw_of(normal=True), aim=aim_of(LINEAR, "x_0", "flow")
        ),
        Problem("edm", **KEY, draw=draw_of(True, mean=-1.2, std=1.2), aim=aim_of(EDM, "edm")),
        Problem("min-snr", **KEY, draw=draw_of(), aim=aim_of(LINEAR, "v", MIN_SNR, gamma=5.0)),
        Problem("eps", **KEY, draw=draw_of(normal=True), aim=aim_of(EDM, "eps", "edm")),
        Problem(
            seed=1,
            purpose=PURPOSE,
            step=integers([7], np.uint32),
            samples=integers(np.arange(32), np.uint32),
            draw=draw_of(normal=True),
            aim=aim_of(LINEAR, "flow"),
            measured=True,
        ),
    ],
)
def levels_forward(seed, purpose, step, samples, draw, aim):
    """(levels, rows) of the samples of a step; draw: a `Draw`, aim: an `Aim`."""
    levels = empty((6, samples.shape[0]), np.float32, like=samples)
    rows = empty(samples.shape, np.int32, like=samples)
    low, high = seed_words(seed)
    launch(
        levels_forward_kernel_v1,
        -(-rows.size // BLOCK),
        BLOCK,
        levels,
        rows,
        low,
        high,
        uint32(purpose),
        step,
        samples,
        draw,
        aim,
    )
    return levels, rows
