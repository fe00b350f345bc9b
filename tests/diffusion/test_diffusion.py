import numpy as np
import pytest

from numdiff.diffusion import Diffusion, alpha_bars, sample, spaced_timesteps
from numdiff.diffusion.samplers import ddim, ddpm
from numdiff.errors import UsageError
from tests.nn.test_tape import tiny


def test_schedules_against_their_formulas():
    linear = alpha_bars("linear", 1000)
    assert linear[0] == pytest.approx(1 - 1e-4) and linear[-1] == pytest.approx(4.036e-5, rel=1e-3)
    cosine = alpha_bars("cosine", 1000)
    u = np.arange(1, 900) / 1000
    expected = np.cos((u + 0.008) / 1.008 * np.pi / 2) ** 2 / np.cos(0.008 / 1.008 * np.pi / 2) ** 2
    np.testing.assert_allclose(cosine[:899], expected, rtol=1e-9)
    for name in ("linear", "cosine"):
        for steps in (1, 10, 250, 4000):
            bars = alpha_bars(name, steps)
            assert (np.diff(bars) < 0).all() and 0 < bars[-1] <= bars[0] < 1
    with pytest.raises(UsageError, match="unknown schedule"):
        alpha_bars("square", 10)


def test_spaced_timesteps():
    np.testing.assert_array_equal(spaced_timesteps(5, 5), [4, 3, 2, 1, 0])
    for count in (1, 2, 3, 50, 999, 1000):
        steps = spaced_timesteps(1000, count)
        assert steps[0] == 999 and len(np.unique(steps)) == count and (count == 1 or steps[-1] == 0)
    with pytest.raises(UsageError, match="between 1 and"):
        spaced_timesteps(10, 11)


@pytest.mark.parametrize("prediction", ["eps", "v", "x_0"])
def test_target_and_prediction_are_inverse(engine, rng, prediction):
    from numdiff.kernels.sampler import predict_x_0
    diffusion = Diffusion(100, "cosine", prediction, engine.backend)
    x_0, eps = rng.uniform(-1, 1, (4, 6, 6, 3)), rng.standard_normal((4, 6, 6, 3))
    t = engine(np.array([0, 20, 50, 80], np.int32))
    x_t = diffusion.q_sample(engine(x_0), engine(eps), t)
    target = diffusion.target(engine(x_0), engine(eps), t)
    engine.check(predict_x_0(x_t, target, t, *diffusion.tables, kind=prediction, clip=False), x_0, 1e-4)


@pytest.mark.parametrize("sampler", [ddim, ddpm])
@pytest.mark.parametrize("count", [1, 7, 100])
def test_a_perfect_model_gives_back_the_image(rng, sampler, count):
    bars = alpha_bars("linear", 100)
    image = rng.uniform(-1, 1, (2, 4, 4, 3)).astype(np.float32)

    def noise(i):
        return rng.standard_normal(image.shape).astype(np.float32)

    result = sampler(lambda x, t: image, noise(-1), spaced_timesteps(100, count), bars, noise, 1.0)
    np.testing.assert_allclose(result, image, atol=1e-6)


def test_ddim_with_eta_one_is_ddpm(rng):
    bars, steps = alpha_bars("linear", 100), spaced_timesteps(100, 20)
    start = rng.standard_normal((2, 4, 4, 3)).astype(np.float32)
    noises = rng.standard_normal((20, *start.shape)).astype(np.float32)

    def run(sampler):
        return sampler(lambda x, t: np.tanh(x), start, steps, bars, lambda i: noises[i], 1.0)

    np.testing.assert_allclose(run(ddim), run(ddpm), atol=1e-5)


@pytest.mark.parametrize("sampler", [ddim, ddpm])
def test_samples_of_a_gaussian_have_its_mean_and_variance(rng, sampler):
    """x_0 ~ N(m, s²): the exact E[x_0 | x_t] is linear, and a fine sampler must reproduce the distribution."""
    mean, std, bars = 0.3, 0.2, alpha_bars("linear", 1000)

    def posterior_mean(x, t):
        gain = np.sqrt(bars[t]) * std**2 / (bars[t] * std**2 + 1 - bars[t])
        return (mean + gain * (x - np.sqrt(bars[t]) * mean)).astype(np.float32)

    def noise(i):
        return rng.standard_normal((20000, 1)).astype(np.float32)

    eta = 1.0 if sampler is ddpm else 0.0
    x = sampler(posterior_mean, noise(-1), spaced_timesteps(1000, 500), bars, noise, eta)
    assert abs(x.mean() - mean) < 0.01 and abs(x.std() - std) < 0.01


def test_an_image_depends_on_its_seed_and_not_on_its_batch(rng):
    model = tiny()
    model.parameters.load_flat(0.05 * rng.standard_normal(model.parameters.total))
    for options in ({"sampler": "ddpm"}, {"sampler": "ddim", "eta": 0.5}):
        together = sample(model, count=5, steps=4, seed=10, batch=5, **options)
        apart = sample(model, count=3, steps=4, seed=12, batch=2, **options)
        assert together.shape == (5, 8, 8, 3) and together.dtype == np.uint8
        assert np.abs(together[2:].astype(int) - apart).max() <= 1
        assert np.abs(together[0].astype(int) - together[1]).max() > 1


def test_bad_sampling_options_are_refused():
    model = tiny()
    for options, message in (({"sampler": "euler"}, "unknown sampler"), ({"eta": 2.0}, "eta"),
                             ({"count": 0}, "at least 1"), ({"steps": 0}, "between 1"),
                             ({"y": [1]}, "without classes")):
        with pytest.raises(UsageError, match=message):
            sample(model, **options)
    with pytest.raises(UsageError, match="eta belongs to ddim"):
        sample(model, sampler="ddpm", eta=0.5)
    with pytest.raises(UsageError, match="seeds 4294967295 to 4294967296"):
        sample(model, count=2, seed=2**32 - 1)
    for y in ("cats", [0, 1]):
        with pytest.raises(UsageError, match="one class index, or one for each"):
            sample(tiny(num_classes=4), count=3, steps=1, y=y)
    with pytest.raises(UsageError, match="class 4 does not exist"):
        sample(tiny(num_classes=4), count=1, steps=1, y=[4])
