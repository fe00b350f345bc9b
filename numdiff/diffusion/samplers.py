"""Samplers: from noise to images, each one a pure function, all with one signature.

    sampler(denoise, x, sigmas, noise, **settings) -> x at the level sigmas[-1]

denoise(x, sigma): the estimate of the image x_0, an array like x, for a float sigma
x: float32 (B, H, W, C), an image plus noise of standard deviation sigmas[0]: x = x_0 + sigma · eps
sigmas: descending floats, the noise levels to visit; the last is usually 0, the finished image
noise(i): standard normal noise like x, different for every i; a deterministic sampler never calls
it

All of them compute in this one scale, where noise is added and the image is not shrunk ("variance
exploding"). The process that the models are trained on shrinks it, x_t = √ᾱ·x_0 + √(1-ᾱ)·eps, and
is the same process in other units:

    x = x_t / √ᾱ_t,      sigma = √((1 - ᾱ_t) / ᾱ_t),      ᾱ_t = 1 / (1 + sigma²)

`Denoiser` (denoiser.py) makes the change for the model; schedule.py chooses the sigmas. In these
units several papers
meet: DDIM without noise takes Euler's steps, and DDPM with the small variance those of
Euler-ancestral. Each is written here as in its paper, and a test compares them.

Each step is linear in x, the estimates and the noise: its coefficients are computed here in
float64, and a kernel does the rest. Everything works on NumPy arrays, on a GPU's, and on `Value`s,
which stand for arrays. So `Sampling` knows the work beforehand, and records a step once to replay
it with other coefficients (plan.py). The operations of a step may therefore depend on the sigmas
and settings, but never on the contents of an array.
"""

import itertools
import math
from collections.abc import Callable, Sequence

from ..device import AnyArray
from ..errors import UsageError, quoted
from .plan import blend, combine, learned_step
from .schedule import SIGMA_MAX

# a `Denoiser`; ddpm's learned variance also calls its with_prediction
Denoise = Callable[[AnyArray, float], AnyArray]
Noise = Callable[[int], AnyArray]
# times the next level: above EDM's range Heun does not correct such a step; from 20,000 it is 250
WIDE = 100


def ddpm(
    denoise: Denoise,
    x: AnyArray,
    sigmas: Sequence[float],
    noise: Noise | None,
    variance: str = "small",
) -> AnyArray:
    """DDPM, ancestral sampling: draws from q(x_s | x_t, x_0). Ho et al. 2020 (arXiv:2006.11239),
    eq. 6, 7, algorithm 2.

    variance: "small", the posterior's β̃; "large", β; or "learned", between the two on a
        logarithmic scale, chosen by the model's further channels (Nichol and Dhariwal 2021,
        arXiv:2102.09672, eq. 15).
    On a subsequence of the timesteps β is that of the jump, 1 - ᾱ_t / ᾱ_s (same paper, section 4).
    """
    for i, (now, then) in enumerate(itertools.pairwise(sigmas)):
        x_0, prediction = (
            denoise.with_prediction(x, now) if variance == "learned" else (denoise(x, now), None)
        )
        if then == 0:  # the posterior's variance is 0, and its mean x_0
            x = x_0
            continue
        a = then**2 / now**2
        small = then**2 * (1 - a)  # β̃, and below β, both divided by ᾱ_s as x is
        large = (now**2 - then**2) * (1 + then**2) / (1 + now**2)
        if variance == "learned":
            x = learned_step(
                x, x_0, prediction, noise(i), a, 1 - a, math.log(small), math.log(large)
            )
        else:
            x = combine(
                (a, x), (1 - a, x_0), (math.sqrt(large if variance == "large" else small), noise(i))
            )
    return x


def ddim(
    denoise: Denoise,
    x: AnyArray,
    sigmas: Sequence[float],
    noise: Noise | None = None,
    eta: float = 0.0,
) -> AnyArray:
    """DDIM: predicted image, direction back to x_t, noise. Song et al. 2021 (arXiv:2010.02502), eq.
    12 and 16.

    eta: 0 is deterministic and of first order, 1 is `ddpm` with the small variance.
    """
    for i, (now, then) in enumerate(itertools.pairwise(sigmas)):
        x_0 = denoise(x, now)
        # eq. 16, divided by √ᾱ_s; an inversion ascends, where eta is 0
        fresh = eta * then * math.sqrt(max(1 - then**2 / now**2, 0.0))
        # eq. 12's, times eps = (x - x_0) / sigma
        direction = math.sqrt(max(then**2 - fresh**2, 0.0)) / now
        x = combine(
            (direction, x), (1 - direction, x_0), *([(fresh, noise(i))] if fresh > 0 else [])
        )
    return x


def euler(
    denoise: Denoise,
    x: AnyArray,
    sigmas: Sequence[float],
    noise: Noise | None = None,
    **churn: float,
) -> AnyArray:
    """Euler's method on the probability flow dx/dσ = (x - x_0(x, σ)) / σ: first order.

    Karras et al. 2022 (arXiv:2206.00364), eq. 3, and algorithm 2 without its correction (lines 9 to
    11).
    churn: settings of `raised`; without them it is deterministic
    """
    for i, (now, then) in enumerate(itertools.pairwise(sigmas)):
        x, now = raised(x, now, i, len(sigmas) - 1, noise, **churn)
        x = _along_slope(x, denoise(x, now), now, then)
    return x


def euler_ancestral(
    denoise: Denoise, x: AnyArray, sigmas: Sequence[float], noise: Noise | None, eta: float = 1.0
) -> AnyArray:
    """Euler's step to below the next level, then noise up to it: how k-diffusion (Crowson 2022)
    writes DDPM.

    The noise has the posterior's variance, σ_s²·(σ_t² - σ_s²) / σ_t² (Song et al. 2021,
    arXiv:2011.13456, eq. 47), and the step goes to where that leaves room for it. eta: share of the
    noise; 0 is `euler`.
    """
    for i, (now, then) in enumerate(itertools.pairwise(sigmas)):
        up = eta * math.sqrt(then**2 * (now**2 - then**2) / now**2)
        down = math.sqrt(max(then**2 - up**2, 0.0))
        x_0 = denoise(x, now)
        x = _along_slope(x, x_0, now, down, *([(up, noise(i))] if up > 0 else []))
    return x


def heun(
    denoise: Denoise,
    x: AnyArray,
    sigmas: Sequence[float],
    noise: Noise | None = None,
    **churn: float,
) -> AnyArray:
    """Heun's method on the probability flow: second order, two evaluations a step, one where it is
    not `corrected`.

    Karras et al. 2022 (arXiv:2206.00364), algorithm 2; without churn, algorithm 1.
    churn: settings of `raised`; without them it is deterministic
    """
    for i, (now, then) in enumerate(itertools.pairwise(sigmas)):
        x, now = raised(x, now, i, len(sigmas) - 1, noise, **churn)
        x_0 = denoise(x, now)
        ahead = _along_slope(x, x_0, now, then)
        if corrected(max(now, then), min(now, then)):  # the mean of the slopes at both ends
            slope, slope_ahead = _slope(x, x_0, now), _slope(ahead, denoise(ahead, then), then)
            ahead = combine((1.0, x), ((then - now) / 2, slope), ((then - now) / 2, slope_ahead))
        x = ahead
    return x


def heun_in_time(
    denoise: Denoise,
    x: AnyArray,
    sigmas: Sequence[float],
    noise: Noise | None = None,
    **churn: float,
) -> AnyArray:
    """Heun's method on the flow dx_t/dt = eps - x_0 of the linear path: second order in t, where
    that path is straight.

    The ODE sampler of SiT (Ma et al. 2024, arXiv:2401.08740) and JiT (arXiv:2511.13720): `heun`
    takes the mean of slopes in σ, this one in t = σ / (1 + σ), of x_t = (1 - t) · x. The step to 0
    is Euler's. (Euler's own step is the same in both: x_0 + σ' · eps with the estimates kept.)
    churn: settings of `raised`; without them it is deterministic
    """
    for i, (now, then) in enumerate(itertools.pairwise(sigmas)):
        x, now = raised(x, now, i, len(sigmas) - 1, noise, **churn)
        t, s = now / (1 + now), then / (1 + then)
        x_0 = denoise(x, now)
        ahead = combine((then / now, x), (1 - then / now, x_0))
        if then > 0:
            # x and ahead are x_t and x_s over 1 - t and 1 - s; flow = x_t / t - x_0 / t
            left, h = 1 - s, s - t
            flow = combine(((1 - t) / t, x), (-1 / t, x_0))
            flow_ahead = combine((left / s, ahead), (-1 / s, denoise(ahead, then)))
            ahead = combine(((1 - t) / left, x), (h / 2 / left, flow), (h / 2 / left, flow_ahead))
        x = ahead
    return x


def euler_maruyama(
    denoise: Denoise, x: AnyArray, sigmas: Sequence[float], noise: Noise | None
) -> AnyArray:
    """The Euler-Maruyama method on the linear path's reverse SDE, in t = σ / (1 + σ): strong noise,
    and the same law.

    Ma et al. 2024 (SiT, arXiv:2401.08740), eq. 4, with the diffusion coefficient w = 2 · t (its
    public code's "sigma"): x_s = x_t - h · (eps - x_0) - h · eps + √(2·t·h) · noise, h = t - s. The
    step to 0 gives the estimate of x_0.
    """
    for i, (now, then) in enumerate(itertools.pairwise(sigmas)):
        x_0 = denoise(x, now)
        if then == 0:
            x = x_0
            continue
        t, s = now / (1 + now), then / (1 + then)
        direction = (2 * s - t) / (1 - s) / now  # of eps = (x - x_0) / σ, in x_s over 1 - s
        x = combine(
            (direction, x), (1 - direction, x_0), (math.sqrt(2 * t * (t - s)) / (1 - s), noise(i))
        )
    return x


def corrected(now, then):
    """Whether Heun averages the slopes at both ends of a step. It does not for a step to 0, where
    there is no slope, and not for the first step down from pure noise, which is so wide that the
    average is meaningless."""
    return then > 0 and (now <= SIGMA_MAX or now < WIDE * then)


def raised(x, sigma, i, steps, noise, s_churn=0.0, s_tmin=0.0, s_tmax=math.inf, s_noise=1.0):
    """(x, sigma) before step i of `steps`, with noise added up to the level where the step begins:
    algorithm 2, lines 4 to 6.

    s_churn: noise over the whole path; each level within [s_tmin, s_tmax] is raised by the fraction
        min(s_churn / steps, √2 - 1); s_noise: standard deviation of the noise; a little above 1 if
        details get lost
    """
    if s_churn == 0 or not s_tmin <= sigma <= s_tmax:
        return x, sigma
    higher = sigma * (1 + min(s_churn / steps, math.sqrt(2) - 1))
    return combine((1.0, x), (s_noise * math.sqrt(higher**2 - sigma**2), noise(i))), higher


def dpm_solver_pp_2m(
    denoise: Denoise, x: AnyArray, sigmas: Sequence[float], noise: Noise | None = None
) -> AnyArray:
    """DPM-Solver++(2M): second order with one evaluation a step, because the last estimate is used
    again.

    Lu et al. 2022 (arXiv:2211.01095), algorithm 2, in λ = -log σ. The first step, and a step to 0,
    are of first order.
    """
    last = before = None  # the last estimate of x_0, and its λ-distance from this one
    for now, then in itertools.pairwise(sigmas):
        x_0 = denoise(x, now)
        h = math.log(now / then) if then > 0 else math.inf
        weight = 0.0 if last is None or then == 0 else h / (2 * before)  # 1 / 2r, r = before / h
        a = then / now  # e^-h
        target = [((1 + weight) * (1 - a), x_0)] + ([(-weight * (1 - a), last)] if weight else [])
        x = combine((a, x), *target)
        last, before = x_0, h
    return x


def repaint(
    denoise: Denoise,
    x: AnyArray,
    sigmas: Sequence[float],
    noise: Noise | None,
    known: AnyArray,
    mask: AnyArray,
    jump: int = 5,
    resamples: int = 5,
) -> AnyArray:
    """Inpainting: `ddpm` steps, after each of which the known pixels are put back, with the level's
    noise.

    Lugmayr et al. 2022 (arXiv:2201.09865), eq. 8 and algorithm 1, with the jumps of its section
    4.2: every stretch of `jump` steps is run `resamples` times, with noise added in between, so
    that the new pixels can come to agree with the known ones.
    known: image like x; mask: like x, 1 where a pixel is known, 0 where it is made
    """
    draw = itertools.count()
    for now, then in repaint_path(sigmas, jump, resamples):
        if then > now:  # back up: x_t from x_s
            x = combine((1.0, x), (math.sqrt(then**2 - now**2), noise(next(draw))))
            continue
        a = then**2 / now**2
        x_0 = denoise(x, now)
        made, level = x_0, known
        if then > 0:
            made = combine((a, x), (1 - a, x_0), (then * math.sqrt(1 - a), noise(next(draw))))
            level = combine((1.0, known), (then, noise(next(draw))))
        x = blend(mask, level, made)
    return x


def repaint_path(sigmas, jump, resamples):
    """The pairs (sigma, next sigma) that `repaint` walks: down a stretch, back up, down again; the
    step to 0 once."""
    *levels, last = sigmas
    for start in range(0, len(levels) - 1, jump):
        stretch = levels[start : start + jump + 1]
        for again in range(resamples):
            if again:
                yield stretch[-1], stretch[0]
            yield from itertools.pairwise(stretch)
    yield levels[-1], last


SAMPLERS = {
    "ddpm": ddpm,
    "ddim": ddim,
    "euler": euler,
    "euler-ancestral": euler_ancestral,
    "heun": heun,
    "dpm++2m": dpm_solver_pp_2m,
    "euler-maruyama": euler_maruyama,
}
WITH_ETA = {"ddim": 0.0, "euler-ancestral": 1.0}  # those that take an eta, and their defaults
NOISY = ("ddpm", "euler-maruyama")  # those that always add noise


def get_sampler(name: str) -> Callable:
    if name not in SAMPLERS:
        raise UsageError(f"unknown sampler {quoted(name)}: use {', '.join(SAMPLERS)}.")
    return SAMPLERS[name]


def _along_slope(x, x_0, now, then, *noise):
    """x + (then - now) · slope, and noise. If the estimate were used instead, the step down from
    pure noise, to a hundredth of it or less, would leave a difference of two large numbers."""
    return combine((then / now, x), (1 - then / now, x_0), *noise)


def _slope(x, x_0, sigma):
    """dx/dσ, which is also the estimate of eps."""
    return combine((1 / sigma, x), (-1 / sigma, x_0))
