"""Paths, predictions and losses: against their formulas in float64, and against a model that is
known."""

import math

import numpy as np
import pytest

from numdiff.device import download, upload
from numdiff.diffusion import Diffusion, Sampling
from numdiff.diffusion.denoiser import Denoiser
from numdiff.diffusion.paths import LAST_T
from numdiff.errors import UsageError
from numdiff.nn import Tape, Tensor
from tests.conftest import on, unchecked
from tests.diffusion.stub import GaussianModel
from tests.nn.steps import unet
from tests.reference import stored_objectives

OBJECTIVES = [
    {"path": "linear"},
    {"path": "linear", "timestep_scale": 1000.0, "time_shift": 2.0},
    stored_objectives.OBJECTIVES["jit"],
    {"path": "linear", "prediction": "eps", "loss": "x_0"},
    {"path": "linear", "prediction": "v", "min_snr_gamma": 5.0},
    {"path": "edm"},
    {"path": "edm", "prediction": "x_0", "loss": "edm", "sigma_data": 0.8},
    {"path": "edm", "prediction": "eps"},
    {"prediction": "flow", "schedule": "cosine"},
    {"prediction": "eps", "min_snr_gamma": 5.0},
    {"prediction": "v", "loss": "eps"},
]
NAMES = [",".join(map(str, objective.values())) for objective in OBJECTIVES]
EACH = pytest.mark.parametrize("objective", OBJECTIVES, ids=NAMES)
COMPUTES = on("cpu", "emulator", "cuda")  # what is compared goes through the host


def counters(put, count):
    return put(np.array([4], np.uint32)), put(np.arange(count, dtype=np.uint32))


def levels_of(diffusion, t):
    """(a, s, the model's noise-level input) of the levels that `draw` gave, float64."""
    if diffusion.continuous:
        return [download(part).astype(np.float64) for part in (t.signal, t.noise, t.seen)]
    bar, t = diffusion.alpha_bar[download(t)], download(t)
    return np.sqrt(bar), np.sqrt(1 - bar), t.astype(np.float64)


@unchecked
@EACH
@COMPUTES
def test_a_model_that_answers_its_target_has_no_loss_and_gives_back_the_image(
    engine, rng, objective
):
    diffusion = Diffusion(**objective, backend=engine.backend)
    plain = Diffusion(**{**objective, "loss": None, "min_snr_gamma": None}, backend=engine.backend)
    image, eps = engine(rng.uniform(-1, 1, (5, 4, 4, 3))), engine(rng.standard_normal((5, 4, 4, 3)))
    t = diffusion.draw(7, *counters(engine, 5))
    a, s, seen = levels_of(diffusion, t)
    x_t, answer = (
        diffusion.q_sample(image, eps, t),
        plain.target(image, eps, plain.draw(7, *counters(engine, 5))),
    )
    each = (slice(None), None, None, None)
    engine.check(x_t, a[each] * download(image) + s[each] * download(eps), 1e-5)
    engine.check(diffusion.model_timesteps(t), seen, 1e-6)
    loss = diffusion.loss(Tensor(answer), diffusion.target(image, eps, t), image, t)
    assert float(download(loss.data)[0]) < 1e-8

    class Model:
        in_channels = 3

        def __call__(self, x_t, noise_level, y):
            self.noise_level = download(noise_level)
            return Tensor(answer[b : b + 1])

    for b in range(5):
        sigma = float(s[b] / a[b])
        if sigma > 50:  # what is left of the image is below float32 there
            continue
        model = Model()
        x = engine(download(image[b : b + 1]) + sigma * download(eps[b : b + 1]))
        engine.check(
            Denoiser(model, diffusion, clip=False)(x, sigma), download(image[b : b + 1]), 2e-4
        )
        assert model.noise_level[0] == pytest.approx(seen[b], rel=1e-3, abs=1e-5)


@EACH
@COMPUTES
def test_the_loss_is_the_weighed_error_and_so_is_its_gradient(engine, rng, objective):
    diffusion = Diffusion(**objective, backend=engine.backend)
    image, eps, answer = (rng.standard_normal((5, 4, 4, 3)) for _ in range(3))
    t = diffusion.draw(7, *counters(engine, 5))
    a, s, _ = (part[:, None, None, None] for part in levels_of(diffusion, t))
    data = diffusion.sigma_data
    kinds = {
        "eps": eps,
        "x_0": image,
        "v": a * eps - s * image,
        "flow": eps - image,
        "edm": s / data * image - data * a * eps,
    }
    turns = {"eps": a, "x_0": s, "v": a * a + s * s, "flow": a + s, "edm": 1 / data}
    weight = 1.0
    if "loss" in objective:
        weight = turns[objective["loss"]] / np.maximum(turns[diffusion.prediction], 0.05)
    if "min_snr_gamma" in objective:
        weight = np.sqrt(np.minimum((a / s) ** 2, 5.0)) * s / turns[diffusion.prediction]
    error = weight * (answer - kinds[diffusion.prediction])
    prediction = Tensor(engine(answer), requires_grad=True)
    with Tape() as tape:
        loss = diffusion.loss(
            prediction, diffusion.target(engine(image), engine(eps), t), engine(image), t
        )
    assert float(download(loss.data)[0]) == pytest.approx((error**2).mean(), rel=1e-4)
    tape.backward(loss, engine(np.ones(1)))
    engine.check(prediction.grad, 2 * weight * error / error.size, 1e-4)


def test_levels_of_the_linear_path_are_even_in_t():
    sampling = Sampling(
        GaussianModel(prediction=None, path="linear"), count=1, steps=10, sampler="heun"
    )
    t = np.array(sampling.sigmas) / (1 + np.array(sampling.sigmas))
    np.testing.assert_allclose(t, [LAST_T, *np.arange(9, -1, -1) / 10], atol=1e-12)
    assert sampling.spacing == "time" and sampling.evaluations == 19
    shifted = Sampling(
        GaussianModel(prediction=None, path="linear", time_shift=3.0), count=1, steps=10
    )
    np.testing.assert_allclose(
        np.array(shifted.sigmas[1:]), 3 * np.array(sampling.sigmas[1:]), rtol=1e-9
    )
    moved = Sampling(
        GaussianModel(prediction=None, path="linear", time_shift=3.0),
        count=1,
        steps=10,
        time_shift=1.5,
    )
    np.testing.assert_allclose(
        np.array(moved.sigmas[1:]), 1.5 * np.array(sampling.sigmas[1:]), rtol=1e-9
    )
    karras = Sampling(
        GaussianModel(prediction=None, path="linear"), count=1, steps=10, sampler="dpm++2m"
    )
    assert karras.spacing == "karras" and karras.sigmas[1] == pytest.approx(80)
    assert (
        Sampling(
            GaussianModel(prediction=None, path="linear"),
            count=1,
            steps=10,
            sampler="dpm++2m",
            time_shift=4.0,
        ).spacing
        == "time"
    )
    assert moved.options["time_shift"] == 1.5 and "time_shift" not in shifted.options
    karras = Sampling(GaussianModel(prediction=None, path="edm"), count=1, steps=18).sigmas
    assert karras[0] == pytest.approx(80) and karras[-2] == pytest.approx(0.002) and karras[-1] == 0


@pytest.mark.parametrize(
    "diffusion, scale",
    [({"path": "edm"}, 80.0), ({"path": "linear"}, 9999.0), ({"steps": 1000}, None)],
)
def test_the_noise_that_samplers_begin_with(diffusion, scale):
    """EDM's and the flow papers' codes begin with noise of the level, DDPM's with x_T that is noise
    alone."""
    sampling = Sampling(
        GaussianModel(**{"prediction": None, **diffusion}), count=1, steps=8, sampler="heun"
    )
    path, first = sampling.diffusion.path, sampling.sigmas[0]
    assert sampling.plan.start_scale == pytest.approx(scale or 1 / path.level(first)[0], rel=1e-9)


def test_what_cannot_be_sampled_is_refused():
    for path, how, sentence in (
        ("linear", {"steps": "ddim10"}, "the path linear has no whole timesteps"),
        ("edm", {"spacing": "timesteps"}, "the path edm has no whole timesteps"),
        ("edm", {"spacing": "time"}, "the path edm has no spacing 'time': use karras, logsnr"),
        (
            "linear",
            {"spacing": "karras", "time_shift": 2.0},
            "time_shift 2 does not go with spacing karras",
        ),
        ("discrete", {"time_shift": 2.0}, "this model's path discrete has not: leave it out"),
        ("linear", {"time_shift": float("nan")}, "time_shift nan must be a finite number"),
        ("discrete", {"spacing": "time"}, "unknown spacing"),
        ("linear", {"steps": 0}, "at least 1"),
    ):
        with pytest.raises(UsageError, match=sentence):
            Sampling(GaussianModel(prediction=None, path=path), **{"steps": 5, **how})


@EACH
def test_options_make_the_same_again(objective):
    diffusion = Diffusion(**objective)
    again = Diffusion(**diffusion.options)
    assert again.options == diffusion.options and again.noise == diffusion.noise
    assert again.measured == diffusion.measured and again.prediction == diffusion.prediction


@pytest.mark.parametrize(
    "objective, sentence",
    [
        ({"path": "curved"}, "unknown path 'curved': use discrete, linear, edm"),
        (
            {"prediction": "edm"},
            "prediction edm is of the preconditioning of path edm, and not of path discrete",
        ),
        (
            {"path": "linear", "loss": "edm"},
            "loss edm is of the preconditioning of path edm, and not of path linear",
        ),
        ({"loss": "v", "min_snr_gamma": 5}, "loss v and min_snr_gamma 5 exclude each other"),
        (
            {"time_sampling": "logit-normal"},
            "time_sampling logit-normal does not go with path discrete",
        ),
        (
            {"path": "edm", "time_shift": 2.0},
            "time_shift 2 does not go with path edm: leave it out, or give path linear",
        ),
        ({"path": "linear", "sigma_data": 1.0}, "sigma_data 1 does not go with path linear"),
        (
            {"path": "linear", "noise_mean": 1.0},
            "noise_mean 1 does not go with time_sampling uniform",
        ),
        (
            {"path": "linear", "time_sampling": "logit-normal", "noise_mean": math.nan},
            "noise_mean nan must be a finite",
        ),
        (
            {"path": "linear", "time_sampling": "logit-normal", "noise_std": math.nan},
            "noise_std nan must be a finite",
        ),
        ({"path": "linear", "time_shift": math.inf}, "time_shift inf must be a finite number"),
        ({"path": "edm", "timestep_scale": 2.0}, "timestep_scale does not go with path edm"),
        ({"path": "edm", "vlb_weight": 1.0}, "vlb_weight 1 does not go with path edm"),
        ({"min_snr_gamma": 0}, "min_snr_gamma 0 must be a finite number from 0.001"),
    ],
)
def test_refused(objective, sentence):
    with pytest.raises(UsageError, match=sentence) as caught:
        Diffusion(**objective)
    assert "\n" not in str(caught.value)


def test_predict_takes_the_paths_own_levels(rng):
    """t in (0, 1) of the linear path, sigma of EDM's, which the model receives as log(sigma) / 4."""
    model = unet()
    model.parameters.load_flat(0.1 * rng.standard_normal(model.parameters.total))
    x = rng.standard_normal((2, 8, 8, 3)).astype(np.float32)
    plain = model.predict(x, [500, 250])
    model.diffusion = Diffusion(path="linear", timestep_scale=1000.0).options
    np.testing.assert_array_equal(model.predict(x, [0.5, 0.25]), plain)
    with pytest.raises(UsageError, match="timestep 2 is not between 0 and 1"):
        model.predict(x, 2)
    model.diffusion = Diffusion(path="edm").options
    assert np.isfinite(model.predict(x, 0.01)).all()
    model.diffusion = {}
    noise_level = np.log([80.0]) / 4
    by_hand = model.predict(x, noise_level.astype(np.float32))
    model.diffusion = Diffusion(path="edm").options
    np.testing.assert_array_equal(model.predict(x, 80.0), by_hand)
    with pytest.raises(UsageError, match="noise levels sigma, numbers above 0"):
        model.predict(x, 0.0)


def test_an_image_draws_its_level_whatever_its_batch():
    diffusion = Diffusion(path="linear", time_sampling="logit-normal")
    step, samples = counters(upload, 8)
    whole, part = diffusion.draw(1, step, samples), diffusion.draw(1, step, samples[5:])
    np.testing.assert_array_equal(whole.noise[5:], part.noise)
    assert len(np.unique(whole.noise)) == 8
    assert (diffusion.draw(1, np.array([5], np.uint32), samples).noise != whole.noise).all()
