"""Write samplers.npz: what six steps of every sampler make of the same noise, in float64.

    python -m tests.reference.make_samplers       (needs NumPy; no time)

Each is written in the coordinates of its own paper, where numdiff has one for all of them: of
√ᾱ·x_0 + √(1-ᾱ)·eps, of x_0 + σ·eps, or of τ·x_0 + (1-τ)·eps with time from noise to the image.
"""

import pathlib

import numpy as np

from tests.reference.stored_samplers import CASES, SIGMAS, estimate, fraction, noise, start

BARS = [1 / (1 + sigma**2) for sigma in SIGMAS]  # ᾱ


def eps_of(x_t, bar):
    x_0 = estimate(x_t / np.sqrt(bar), np.sqrt((1 - bar) / bar))
    return (x_t - np.sqrt(bar) * x_0) / np.sqrt(1 - bar)


def ddpm(variance):
    """Ho et al. 2020 (arXiv:2006.11239), eq. 11 with β of the jump; Nichol and Dhariwal 2021
    (2102.09672), eq. 15."""
    x = np.sqrt(BARS[0]) * start()
    for i, (bar, previous) in enumerate(zip(BARS, BARS[1:], strict=False)):
        alpha = bar / previous
        beta = 1 - alpha
        mean = (x - beta / np.sqrt(1 - bar) * eps_of(x, bar)) / np.sqrt(alpha)
        tilde = beta * (1 - previous) / (1 - bar)
        if previous == 1:
            return mean
        share = (fraction(x) + 1) / 2
        chosen = {"small": tilde, "large": beta, "learned": beta**share * tilde ** (1 - share)}[
            variance
        ]
        x = mean + np.sqrt(chosen) * noise(i)


def ddim(eta=0.0):
    """Song et al. 2021 (arXiv:2010.02502), eq. 12 and 16."""
    x = np.sqrt(BARS[0]) * start()
    for i, (bar, previous) in enumerate(zip(BARS, BARS[1:], strict=False)):
        sigma = eta * np.sqrt((1 - previous) / (1 - bar)) * np.sqrt(1 - bar / previous)
        eps = eps_of(x, bar)
        x = (
            np.sqrt(previous) * (x - np.sqrt(1 - bar) * eps) / np.sqrt(bar)
            + np.sqrt(1 - previous - sigma**2) * eps
            + sigma * noise(i)
        )
    return x


def churned(x, i, s_churn=0.0, s_tmin=0.0, s_tmax=np.inf, s_noise=1.0):
    """(x with more noise, its level): the first half of a step of EDM's algorithm 2."""
    N = len(SIGMAS) - 1
    gamma = min(s_churn / N, np.sqrt(2) - 1) if s_tmin <= SIGMAS[i] <= s_tmax else 0
    raised = SIGMAS[i] + gamma * SIGMAS[i]
    return x + np.sqrt(raised**2 - SIGMAS[i] ** 2) * s_noise * noise(i), raised


def edm(second_order, **churn):
    """Karras et al. 2022 (arXiv:2206.00364), algorithm 2."""
    x = start()
    for i in range(len(SIGMAS) - 1):
        x_hat, raised = churned(x, i, **churn)
        d = (x_hat - estimate(x_hat, raised)) / raised
        x = x_hat + (SIGMAS[i + 1] - raised) * d
        if second_order and SIGMAS[i + 1] > 0:
            d_ahead = (x - estimate(x, SIGMAS[i + 1])) / SIGMAS[i + 1]
            x = x_hat + (SIGMAS[i + 1] - raised) * (d / 2 + d_ahead / 2)
    return x


def ancestral(eta):
    """As k-diffusion has it: down to √(σ'² - up²), and noise of `up`."""
    x = start()
    for i, (now, then) in enumerate(zip(SIGMAS, SIGMAS[1:], strict=False)):
        up = eta * then * np.sqrt(1 - (then / now) ** 2)
        x = x + (np.sqrt(then**2 - up**2) - now) * (x - estimate(x, now)) / now + up * noise(i)
    return x


def dpm_solver():
    """Lu et al. 2022 (arXiv:2211.01095), algorithm 2, with α = √ᾱ, σ = √(1-ᾱ); the last step is its
    first order."""
    x, alphas, sigmas = np.sqrt(BARS[0]) * start(), np.sqrt(BARS), np.sqrt(1 - np.array(BARS))
    lambdas, answers = np.log(alphas[:-1] / sigmas[:-1]), []
    for i in range(1, len(BARS)):
        answers.append(estimate(x / alphas[i - 1], sigmas[i - 1] / alphas[i - 1]))
        if i == len(BARS) - 1:
            return answers[-1]
        h = lambdas[i] - lambdas[i - 1]
        D = answers[-1]
        if i > 1:
            r = (lambdas[i - 1] - lambdas[i - 2]) / h
            D = (1 + 1 / (2 * r)) * answers[-1] - 1 / (2 * r) * answers[-2]
        x = sigmas[i] / sigmas[i - 1] * x - alphas[i] * np.expm1(-h) * D


def flow(stochastic, **churn):
    """Ma et al. 2024 (SiT, arXiv:2401.08740), eq. 2 and 4 with w = 2 (1 - τ), τ from noise to the
    image: by Heun's method (JiT, arXiv:2511.13720: the last step is Euler's), or Euler-Maruyama's,
    whose last step gives x_0."""
    times = [1 / (1 + sigma) for sigma in SIGMAS]

    def velocity(x, time):  # of an image less its noise
        x_0 = estimate(x / time, (1 - time) / time)
        return (x_0 - x) / (1 - time)

    x = times[0] * start()
    for i, (now, then) in enumerate(zip(times, times[1:], strict=False)):
        x_hat, sigma = churned(x / now, i, **churn)
        now = 1 / (1 + sigma)
        x = now * x_hat
        v, h = velocity(x, now), then - now
        if then == 1:
            return x + h * v
        if stochastic:
            score = (now * v - x) / (1 - now)
            x = x + h * (v + (1 - now) * score) + np.sqrt(2 * (1 - now) * h) * noise(i)
        else:
            x = x + h / 2 * (v + velocity(x + h * v, then))


MADE = {
    "ddpm": ddpm,
    "ddim": ddim,
    "euler": lambda **how: edm(False, **how),
    "heun": lambda **how: edm(True, **how),
    "heun_in_time": lambda **how: flow(False, **how),
    "euler_maruyama": lambda: flow(True),
    "euler_ancestral": ancestral,
    "dpm_solver_pp_2m": dpm_solver,
}

if __name__ == "__main__":
    values = {name: MADE[function](**settings) for name, (function, settings) in CASES.items()}
    np.savez_compressed(pathlib.Path(__file__).with_name("samplers.npz"), **values)
