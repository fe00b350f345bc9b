"""The samplers against a model whose score is known: x_0 ~ N(m, s²), for which everything has a
closed form."""

import itertools
import math

import numpy as np
import pytest

from numdiff.diffusion import SAMPLERS, alpha_bars, sample
from numdiff.diffusion.samplers import (
    WITH_ETA,
    ddim,
    ddpm,
    dpm_solver_pp_2m,
    euler,
    heun,
    heun_in_time,
    repaint,
    repaint_path,
)
from numdiff.diffusion.sampling import WITH_CHURN
from numdiff.diffusion.schedule import sampling_sigmas
from numdiff.errors import UsageError
from numdiff.kernels.diffusion.sampler import combine
from tests.conftest import exhaustively
from tests.diffusion.stub import GaussianModel

MEAN, STD = 0.3, 0.2
# of the deterministic samplers
ORDER = {ddim: 1, euler: 1, heun: 2, heun_in_time: 2, dpm_solver_pp_2m: 2}


class Gaussian:
    """E[x_0 | x] for x = x_0 + σ·eps and x_0 ~ N(MEAN, STD²); `fraction` is its learned variance,
    for ddpm."""

    def __init__(self, fraction=0.0):
        self.fraction, self.evaluations = fraction, 0

    def __call__(self, x, sigma):
        self.evaluations += 1
        gain = STD**2 / (STD**2 + sigma**2)
        return MEAN + gain * (x - MEAN)

    def with_prediction(self, x, sigma):
        x_0 = self(x, sigma)
        return x_0, np.concatenate([x_0, np.full_like(x_0, 2 * self.fraction - 1)], -1)


def flow(x, now, then):
    """The exact solution of the probability flow of this Gaussian."""
    return MEAN + (x - MEAN) * math.sqrt((STD**2 + then**2) / (STD**2 + now**2))


def normal(rng, shape=(100_000, 1)):
    return lambda i: rng.standard_normal(shape)


def start(rng, sigma, shape=(100_000, 1)):
    """Exact samples at the level sigma."""
    return MEAN + math.sqrt(STD**2 + sigma**2) * rng.standard_normal(shape)


# The fewest levels --------------------------------------------------------------------------------

EXTREMES = [
    {"steps": 1, "schedule": "linear"},
    {"steps": 2, "schedule": "cosine"},
    *exhaustively(
        *(
            {"steps": steps, "schedule": schedule}
            for steps, schedule in ((1, "cosine"), (2, "linear"), (3, "linear"), (3, "cosine"))
        )
    ),
    {"path": "linear", "prediction": "flow"},
    {"path": "edm", "prediction": "edm"},
]


@pytest.mark.parametrize("diffusion", EXTREMES, ids=str)
def test_any_number_of_steps_is_taken_or_refused(diffusion):
    """…by every sampler, at the levels of every spacing and with its own settings, also where there
    is one timestep."""
    made = set()
    for learns in (False, *([True] if "steps" in diffusion else [])):
        model = GaussianModel(learn_sigma=learns, size=2, **diffusion)
        for name, spacing, steps in itertools.product(
            SAMPLERS, (None, "timesteps", "karras", "logsnr", "time"), (1, 2, 3, 7)
        ):
            eta, churn = (
                [{setting: 1.0}] * (name in names)
                for setting, names in (("eta", WITH_ETA), ("s_churn", WITH_CHURN))
            )
            for how in ({}, *eta, *churn):
                try:
                    images = sample(model, 1, steps, name, spacing=spacing, **how)
                except UsageError:
                    continue
                assert images.shape == (1, 2, 2, 3)
                made.add((name, steps))
    assert made >= {(name, 1) for name in SAMPLERS}


@pytest.mark.parametrize(
    "diffusion, how, most",
    [
        ({"steps": 1}, {"sampler": "dpm++2m", "steps": 3}, 1),
        ({"steps": 1}, {"sampler": "heun", "steps": 100_000}, 1),
        (
            {"path": "linear", "prediction": "flow", "time_shift": 100.0},
            {"sampler": "heun", "steps": 300},
            100,
        ),
    ],
)
def test_levels_that_would_be_equal_are_refused(diffusion, how, most):
    model = GaussianModel(size=2, **diffusion)
    with pytest.raises(
        UsageError, match=r"^steps .* repeat noise levels, .* at most ([0-9]+) here: use \1.$"
    ) as error:
        sample(model, 1, **how)
    found = int(str(error.value).rpartition(" ")[2][:-1])
    assert found == most or most == 100 and 100 <= found < 300
    sample(model, 1, **{**how, "steps": found})


# Order --------------------------------------------------------------------------------------------

# the levels between which errors are measured: the step to 0 is of first order for all
HIGH, LOW = 5.0, 0.2
ORDERS = pytest.mark.parametrize("sampler, order", ORDER.items())
SPACINGS = pytest.mark.parametrize("spacing", ["karras", "logsnr"])


def slope_of_error(sampler, spacing, denoise, x, exact, counts=(40, 80, 160, 320)):
    """-d log(error) / d log(steps)."""
    errors = []
    for n in counts:
        sigmas = (
            np.linspace(HIGH ** (1 / 7), LOW ** (1 / 7), n + 1) ** 7
            if spacing == "karras"
            else np.geomspace(HIGH, LOW, n + 1)
        )
        errors.append(np.abs(sampler(denoise, x, list(map(float, sigmas))) - exact).max())
    return -np.polyfit(np.log(counts), np.log(errors), 1)[0]


def mixture(x, sigma):
    """E[x_0 | x] where x_0 is N(-1, s²) or N(1, s²) with equal chances: a score that is not linear
    in x."""
    variance = STD**2 + sigma**2
    weight = np.tanh(x / variance)  # chance of +1 less that of -1
    return weight + STD**2 / variance * (x - weight)


@ORDERS
@SPACINGS
def test_order_of_convergence_on_a_mixture(sampler, order, spacing):
    def slope(x, log_sigma):  # dx / d log σ
        return x - mixture(x, math.exp(log_sigma))

    x = start_at = np.array([[6.0], [-1.0], [0.4]])
    u, h = math.log(HIGH), (math.log(LOW) - math.log(HIGH)) / 2000
    for _ in range(2000):  # the classical Runge-Kutta method, of fourth order
        k1 = slope(x, u)
        k2 = slope(x + h / 2 * k1, u + h / 2)
        k3 = slope(x + h / 2 * k2, u + h / 2)
        k4 = slope(x + h * k3, u + h)
        x, u = x + h / 6 * (k1 + 2 * k2 + 2 * k3 + k4), u + h
    assert abs(slope_of_error(sampler, spacing, mixture, start_at, x) - order) < 0.2


# Identities between papers ------------------------------------------------------------------------


def test_inputs_are_not_changed(rng):
    shape = (2, 3, 3, 1)
    x = 5 * rng.standard_normal(shape)
    for sampler in SAMPLERS.values():
        kept = x.copy()
        sampler(Gaussian(), x, [5.0, 1.0, 0.2, 0.0], normal(rng, shape))
        assert np.array_equal(x, kept)


@pytest.mark.parametrize("name", [*SAMPLERS, "repaint", "learned"])
def test_every_engine_takes_the_same_steps(engine, rng, name):
    shape, sigmas = (2, 3, 3, 2), [9.0, 3.0, 1.0, 0.3, 0.0]
    x, noises = 9 * rng.standard_normal(shape), rng.standard_normal((20, *shape))
    known, mask = rng.uniform(-1, 1, shape), rng.integers(0, 2, shape).astype(float)

    def run(put):
        class Denoise:
            def __call__(self, x, sigma):
                return combine((STD**2 / (STD**2 + sigma**2), x))

            def with_prediction(self, x, sigma):
                return self(x, sigma), put(np.concatenate([noises[0], np.tanh(noises[1])], -1))

        if name == "repaint":
            return repaint(
                Denoise(), put(x), sigmas, lambda i: put(noises[i]), put(known), put(mask), 2, 2
            )
        sampler, settings = (
            (ddpm, {"variance": "learned"}) if name == "learned" else (SAMPLERS[name], {})
        )
        return sampler(Denoise(), put(x), sigmas, lambda i: put(noises[i]), **settings)

    engine.check(run(engine), run(np.asarray), 1e-5)


# RePaint ------------------------------------------------------------------------------------------


def test_repaint_keeps_the_known_pixels_and_makes_the_others(rng):
    shape = (20_000, 1, 2, 1)
    known, mask = np.full(shape, 0.77), np.zeros(shape)
    mask[:, :, 0] = 1
    sigmas = sampling_sigmas(alpha_bars("cosine", 1000), "timesteps", 100)
    x = repaint(
        Gaussian(), start(rng, sigmas[0], shape), sigmas, normal(rng, shape), known, mask, 10, 2
    )
    assert (x[:, :, 0] == 0.77).all()
    assert abs(x[:, :, 1].mean() - MEAN) < 0.01 and abs(x[:, :, 1].std() - STD) < 0.02


def test_repaint_without_known_pixels_is_ddpm_in_distribution(rng):
    shape = (100_000, 1)
    sigmas = sampling_sigmas(alpha_bars("linear", 1000), "timesteps", 10)
    given = start(rng, sigmas[0]), sigmas, normal(rng)
    known, mask = np.ones(shape), np.zeros(shape)
    made = repaint(Gaussian(), *given, known, mask, 10, 1)
    assert made.var() == pytest.approx(ddpm(Gaussian(), *given).var(), rel=0.025)


def test_repaint_agrees_with_what_is_known(rng):
    """Two pixels that are always equal: the made one must follow the known one, and resampling
    makes it do so."""

    def denoise(x, sigma):  # (a, b) with a = b ~ N(0, 1): the estimate is that of their mean
        mean = x.mean(-1, keepdims=True) / (1 + sigma**2 / 2)
        return np.broadcast_to(mean, x.shape)

    shape = (5000, 2)
    known, mask = (
        rng.standard_normal((5000, 1)) * np.ones(2),
        np.array([1.0, 0.0]) * np.ones((5000, 1)),
    )
    sigmas, errors = sampling_sigmas(alpha_bars("linear", 1000), "timesteps", 20), []
    for resamples in (1, 10):
        x = repaint(
            denoise,
            sigmas[0] * rng.standard_normal(shape),
            sigmas,
            normal(rng, shape),
            known,
            mask,
            3,
            resamples,
        )
        errors.append(np.abs(x[:, 0] - x[:, 1]).mean())
    assert errors[1] < 0.7 * errors[0]


def test_repaint_path():
    sigmas = [5.0, 4.0, 3.0, 2.0, 1.0, 0.0]
    assert list(repaint_path(sigmas, 1, 1)) == list(itertools.pairwise(sigmas))
    assert list(repaint_path(sigmas, 4, 1)) == list(itertools.pairwise(sigmas))
    twice = list(repaint_path(sigmas, 3, 2))
    assert [a for a, _ in twice] == [5, 4, 3, 2, 5, 4, 3, 2, 1, 2, 1]
    assert all(a[1] == b[0] for a, b in itertools.pairwise(twice)) and twice[-1] == (1.0, 0.0)
    assert list(repaint_path([7.0, 0.0], 3, 4)) == [(7.0, 0.0)]
