"""Inversion: from pictures to noise, and back."""

import numpy as np
import pytest

from numdiff.diffusion import Diffusion, Sampling, sample
from numdiff.diffusion.inversion import check_invert, inverted
from numdiff.diffusion.plan import SamplerPlan
from numdiff.errors import UsageError
from tests.diffusion.stub import MEANS, STD, GaussianModel, check_devices_agree
from tests.models import small_unet

KINDS = (
    {"prediction": "eps"},
    {"prediction": "v"},
    {"prediction": "flow", "path": "linear"},
    {"prediction": "edm", "path": "edm"},
)


@pytest.fixture
def pictures(rng):
    """One of each class of the `GaussianModel`, drawn from its distribution."""
    drawn = MEANS.reshape(3, 1, 1, 1) + STD * rng.standard_normal((3, 4, 4, 3))
    return np.clip(drawn, -1, 1).astype(np.float32)


def mean_error(model, pictures, steps, sampler, **more):
    made = sample(model, len(pictures), steps, sampler, invert=pictures, clip=False, **more)
    return np.abs(made - np.rint((pictures + 1) * 127.5)).mean()


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind["prediction"])
def test_pictures_come_back(pictures, kind):
    """The mean error in levels of 255 at 20, 50 and 250 steps falls with the order of the sampler."""
    model = GaussianModel(**kind)
    for sampler, bounds in (
        ("ddim", (10, 5, 1.1)),
        ("euler", (5, 2.1, 0.45)),
        ("heun", (0.3, 0.05, 0.01)),
        ("dpm++2m", (0.4, 0.1, 0.01)),
    ):
        errors = [mean_error(model, pictures, steps, sampler) for steps in (20, 50, 250)]
        assert all(np.array(errors) < bounds), (sampler, errors)


def test_the_noise_is_the_one_of_the_ode(pictures):
    """Of a Gaussian the solution is known: x at σ is mean + (x_0 - mean) · √(STD² + σ²) / STD."""
    sampling = Sampling(
        GaussianModel(),
        count=3,
        steps=250,
        sampler="heun",
        invert=pictures,
        clip=False,
        y=np.arange(3),
    )
    sigma, means = sampling.sigmas[0], MEANS.reshape(3, 1, 1, 1)
    x = means + (pictures - means) * np.sqrt(STD**2 + sigma**2) / STD
    assert np.abs(sampling._noises() - x / sampling.plan.start_scale).max() < 0.01


def test_levels_that_were_not_trained_are_passed_over(pictures):
    """A model that predicts x_0 with an error of 0.1 at σ below e^-1.6 gives noise of a
    root mean square of about 1 all the same."""

    class Rough(GaussianModel):
        def __call__(self, x, t, y=None):
            made = super().__call__(x, t, y)
            a, s = self.level(np.asarray(t, np.float64))
            made.data += np.where(s / a < np.exp(-1.6), 0.1, 0).astype(np.float32)[
                :, None, None, None
            ]
            return made

    model = Rough("x_0", path="linear", noise_mean=0.8, noise_std=0.8, time_sampling="logit-normal")
    sampling = Sampling(model, count=3, steps=50, sampler="ddim", invert=pictures, clip=False)
    assert 0.7 < np.sqrt(np.mean(sampling._noises() ** 2)) < 1.3
    sampling.inversion = SamplerPlan(
        inverted(sampling.function), sampling.denoiser.numbers, sampling.sigmas, {}, start_scale=1.0
    )
    assert np.sqrt(np.mean(sampling._noises() ** 2)) > 2  # with all levels


def test_a_row_goes_from_picture_to_picture(pictures):
    given = {"steps": 20, "sampler": "heun", "clip": False, "invert": pictures, "y": 1}
    rows = sample(GaussianModel(), 10, slerp=5, batch=3, **given)
    whole = sample(GaussianModel(), 3, **given)
    assert np.abs(rows[[0, 4, 5, 9]].astype(int) - whole[[0, 1, 1, 2]]).max() <= 1
    steps = np.abs(np.diff(rows[:5].astype(int), axis=0)).mean((1, 2, 3))
    assert 0 < steps.max() < np.abs(rows[0].astype(int) - rows[4]).mean()
    same = sample(GaussianModel(), 3, slerp=3, **{**given, "invert": pictures[[0, 0]]})
    assert np.abs(same - same[:1].astype(int)).max() <= 1  # the angle between the noises is 0


def test_evaluations_are_counted(pictures):
    model, seen = GaussianModel(), []
    sampling = Sampling(model, count=3, steps=5, sampler="heun", invert=pictures, batch=2)
    for _ in sampling.batches(lambda: seen.append(1)):
        pass
    assert len(seen) == model.calls == 2 * sampling.evaluations + sampling.inversion_evaluations
    assert sampling.options["inverted_pictures"] == 3


def test_devices_agree(rng, engine):
    pictures = rng.uniform(-1, 1, (1, 8, 8, 3)).astype(np.float32)
    check_devices_agree(engine, invert=pictures)


def test_what_cannot_be_is_refused(pictures):
    init = pictures[0]
    for options, sentence in (
        ({"invert": init}, r"invert must be an array of pictures of 4×4×3, and not \(4, 4, 3\)"),
        ({"invert": "a.png"}, "invert must be an array of pictures of 4×4×3, and not"),
        ({"invert": pictures * np.nan}, "not finite"),
        ({"invert": pictures, "count": 4}, "count must be 3, not 4"),
        ({"invert": pictures, "slerp": 4}, "count must be 8, not 3"),
        ({"invert": pictures[:1], "slerp": 4}, "give at least two"),
        ({"invert": pictures, "init": init}, "invert and init exclude each other"),
        ({"invert": pictures, "sampler": "ddpm"}, "invert needs a sampler that adds no noise"),
        ({"invert": pictures, "eta": 0.5}, "invert needs a sampler that adds no noise"),
    ):
        with pytest.raises(UsageError, match=sentence):
            Sampling(GaussianModel(), **{"count": 3, "steps": 4, **options})
    model = small_unet()
    model.diffusion = Diffusion().options
    with pytest.raises(UsageError, match="8×8×3"):
        Sampling(model, count=3, invert=pictures)
    assert check_invert(pictures, (4, 4, 3), 3, None, {}).flags.c_contiguous
