import math

import numpy as np
import pytest

from numdiff.diffusion import SAMPLERS, Diffusion, Sampling, alpha_bars, sample, spaced_timesteps
from numdiff.diffusion.denoiser import Denoiser
from numdiff.diffusion.sampling import spherical_mean
from numdiff.diffusion.sampling_config import SamplingConfig
from numdiff.diffusion.schedule import (
    SPACINGS,
    respaced_timesteps,
    sampling_sigmas,
    sigma_table,
    timestep_at,
)
from numdiff.errors import UsageError
from numdiff.nn import Tensor
from tests.conftest import exhaustively, on
from tests.diffusion.stub import MEANS, STD, GaussianModel
from tests.models import with_random_weights
from tests.nn.steps import unet

STOCHASTIC = [
    ("ddpm", {}),
    ("ddpm", {"variance": "large"}),
    ("euler-ancestral", {}),
    ("ddim", {"eta": 0.5}),
    ("heun", {"s_churn": 20.0, "s_noise": 1.003}),
]
DETERMINISTIC = [(name, {}) for name in ("ddim", "euler", "heun", "dpm++2m")]


# Schedules and levels -----------------------------------------------------------------------------


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


# worked out by hand from guided-diffusion's description
@pytest.mark.parametrize(
    "total, spacing, wanted",
    [
        (20, "ddim5", range(16, -1, -4)),
        (1000, "ddim50", range(980, -1, -20)),
        (1000, "ddim1000", range(999, -1, -1)),
        (
            300,
            "10,15,20",
            [200 + round(k * 99 / 19) for k in range(20)][::-1]
            # the sum of 7 strides is below 49.5
            + [100 + (49 if k == 7 else round(k * 99 / 14)) for k in range(15)][::-1]
            + [k * 11 for k in range(10)][::-1],
        ),
        (10, "1,2", [9, 5, 0]),
        (7, "2,2", [6, 4, 3, 0]),
        (10, "0,1", [5]),
        (8, "3", [7, 4, 0]),
        (1000, "250", None),
    ],
)
def test_respaced_timesteps(total, spacing, wanted):
    got = respaced_timesteps(total, spacing)
    assert got.dtype == np.int32 and (np.diff(got) < 0).all()
    np.testing.assert_array_equal(
        got, spaced_timesteps(total, int(spacing)) if wanted is None else wanted
    )


def test_respacing_that_cannot_be():
    for spacing, message in (
        ("ddim33", "no stride takes 33 of the 100"),
        ("ddim0", "no stride"),
        ("60,60", "only 50"),
        ("0,0", "at least one"),
        ("ddim", "not 'ddim'"),
        ("1,,2", "not '1,,2'"),
        ("²", "not '²'"),
        ("101", "between 1 and the 100"),
    ):
        with pytest.raises(UsageError, match=message):
            respaced_timesteps(100, spacing)
    for steps in (2.5, True, None):
        with pytest.raises(UsageError, match="must be a whole number, not"):
            sampling_sigmas(alpha_bars("linear", 100), "timesteps", steps)


def test_sampling_at_respaced_timesteps():
    """The model is asked at the diffusion's own timesteps; a number as text is that number; levels
    are not spaced."""
    model, seen = GaussianModel("eps", size=16), []

    class Recorded(GaussianModel):
        def __call__(self, x, t, y=None):
            seen.append(float(t[0]))
            return super().__call__(x, t, y)

    sampling = Sampling(Recorded("eps", size=16), count=1, steps="3,2")
    next(sampling.batches())
    assert seen == [999, 500, 499, 250, 0] and sampling.steps == sampling.evaluations == 5
    assert sampling.options["respacing"] == "3,2" and sampling.spacing == "timesteps"
    assert Sampling(model, count=1, steps="ddim20", sampler="heun").spacing == "timesteps"
    np.testing.assert_array_equal(
        sample(model, count=2, steps="25"), sample(model, count=2, steps=25)
    )
    assert Sampling(model, count=1, steps="25", sampler="heun").spacing == "karras"
    with pytest.raises(UsageError, match="leave spacing karras out"):
        Sampling(model, count=1, steps="ddim20", spacing="karras")


# What the model sees of a timestep ----------------------------------------------------------------


def test_rescaled_timesteps(engine):
    """t · 1000 / T, as the training step, the samplers and `predict` give it to the model; else t
    itself."""
    t = engine(np.array([0, 1, 2999, 3999], np.int32))
    diffusion = Diffusion(4000, backend=engine.backend, timestep_scale=0.25)
    seen = diffusion.model_timesteps(t)
    assert seen.dtype == np.float32
    engine.check(seen, [0, 0.25, 749.75, 999.75], 0)
    assert Diffusion(**diffusion.options).timestep_scale == 0.25
    plain = Diffusion(4000, backend=engine.backend)
    assert plain.model_timesteps(t) is t and "timestep_scale" not in plain.options
    for wrong in (0, -1, math.nan, math.inf, "4"):
        with pytest.raises(UsageError, match="timestep_scale must be a number above 0"):
            Diffusion(timestep_scale=wrong)


def test_samplers_ask_at_rescaled_timesteps():
    seen = []

    class Rescaled(GaussianModel):
        def __call__(self, x, t, y=None):
            seen.append(float(t[0]))
            return super().__call__(x, np.asarray(t) / 0.25, y)

    rescaled = Rescaled("eps", size=16, steps=4000, timestep_scale=0.25)
    images = sample(rescaled, count=2, steps="ddim4")
    assert seen == [750, 500, 250, 0]
    np.testing.assert_array_equal(
        images, sample(GaussianModel("eps", size=16, steps=4000), count=2, steps="ddim4")
    )


def test_predict_rescales_timesteps(rng):
    """A model that sees t · 0.25 answers at 400 what it answers at 100 without."""
    model = with_random_weights(unet(), 0.1)
    x = rng.standard_normal((2, 8, 8, 3)).astype(np.float32)
    plain = model.predict(x, [100, 200])
    model.diffusion = {"steps": 4000, "timestep_scale": 0.25}
    np.testing.assert_array_equal(model.predict(x, [400, 800]), plain)
    assert not np.array_equal(model.predict(x, [100, 200]), plain)


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_levels(schedule):
    bars = alpha_bars(schedule, 1000)
    for spacing in SPACINGS:
        for steps in (1, 2, 18, 100):
            sigmas = sampling_sigmas(bars, spacing, steps)
            assert len(sigmas) == steps + 1 and sigmas[-1] == 0 and (np.diff(sigmas) < 0).all()
            assert sigmas[0] <= sigma_table(bars)[-1] * (1 + 1e-12)
    table = sigma_table(bars)
    for spacing, even in (("karras", lambda sigmas: np.power(sigmas, 1 / 7)), ("logsnr", np.log)):
        # noise alone, and from EDM's 80 on as their papers say
        top, *levels, _ = sampling_sigmas(bars, spacing, 18)
        assert (
            top == table[-1]
            and levels[0] == pytest.approx(80)
            and levels[16] == pytest.approx(table[0])
        )
        np.testing.assert_allclose(np.diff(even(levels), 2), 0, atol=1e-12)
    low = bars[table < 50]  # a schedule that does not reach 80
    assert sampling_sigmas(low, "karras", 18)[0] == pytest.approx(sigma_table(low)[-1])
    for spacing, steps, message in (
        ("cubic", 5, "unknown spacing"),
        ("karras", 0, "at least 1"),
        ("timesteps", 1001, "between 1 and the 1000"),
    ):
        with pytest.raises(UsageError, match=message):
            sampling_sigmas(bars, spacing, steps)


def test_timestep_of_a_level():
    table = sigma_table(alpha_bars("linear", 1000))
    assert [timestep_at(table[t], table) for t in (0, 1, 499, 999)] == [0, 1, 499, 999]
    between = timestep_at(math.sqrt(table[10] * table[11]), table)
    assert between == pytest.approx(10.5)
    assert timestep_at(1e-9, table) == 0 and timestep_at(1e9, table) == 999


# The model as an estimate of x_0 ------------------------------------------------------------------


@pytest.mark.parametrize("prediction", ["eps", "v", "x_0"])
def test_the_estimate_inverts_the_target(engine, rng, prediction):
    """A model that answers its training target exactly gives back the image that was noised."""
    diffusion = Diffusion(100, "cosine", prediction, engine.backend)
    shape = (2, 6, 6, 3)
    image, eps = rng.uniform(-1, 1, shape), rng.standard_normal(shape)
    for t in (0, 20, 80):
        sigma = sigma_table(diffusion.alpha_bar)[t]
        seen = []

        class Model:
            in_channels = 3

            def __call__(self, x_t, t, y, seen=seen, step=t):
                seen.append((x_t.data, t))
                steps = engine(np.full(2, step, np.int32))
                return Tensor(diffusion.target(engine(image), engine(eps), steps))

        got = Denoiser(Model(), diffusion, clip=False)(engine(image + sigma * eps), float(sigma))
        engine.check(got, image, 2e-4)
        x_t, timestep = seen[0]
        engine.check(x_t, math.sqrt(diffusion.alpha_bar[t]) * (image + sigma * eps), 1e-6)
        assert timestep.dtype == np.float32
        engine.check(timestep, np.full(2, t), 0)


@pytest.mark.parametrize("channels", [None, 1])
def test_guidance_is_linear_between_the_two_answers(rng, channels):
    """eps = u + scale · (c - u), on all channels or the first; scale 1 is no guidance and asks
    once."""
    model = GaussianModel("eps")
    diffusion, labels = Diffusion(), np.array([0, 2], np.int32)
    x = 3 * rng.standard_normal((2, 4, 4, 3)).astype(np.float32)

    def estimate(scale, y=labels, channels=None):
        return Denoiser(model, diffusion, y, False, scale, channels)(x, 1.5)

    c, u = estimate(None), estimate(None, np.array([3, 3], np.int32))
    for scale in (0.0, 2.5, -1.0):
        got, wanted = estimate(scale, channels=channels), u + scale * (c - u)
        if channels:
            wanted[..., channels:] = c[..., channels:]
        np.testing.assert_allclose(got, wanted, atol=1e-5)
    model.calls = 0
    np.testing.assert_array_equal(estimate(1.0), c)
    assert model.calls == 1


# Sampling -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name, options", STOCHASTIC + DETERMINISTIC)
@pytest.mark.parametrize("prediction", ["v", *exhaustively("eps", "x_0")])
def test_samples_of_every_sampler_have_the_classes_means(name, options, prediction):
    """The whole path from Philox noise to pixels, for every prediction."""
    model = GaussianModel(prediction, size=16, schedule="cosine")
    images = sample(model, count=12, steps=60, sampler=name, batch=5, **options) / 127.5 - 1
    for c, mean in enumerate(MEANS):
        made = images[c::3]
        assert abs(made.mean() - mean) < 0.03
        assert made.std() == pytest.approx(
            STD, rel=0.12 if (name, options) in DETERMINISTIC else 0.3
        )


@pytest.mark.parametrize("variance", ["small", "large", "learned"])
def test_learned_variance_is_used(variance):
    """Channels of zeros are the geometric mean of both bounds."""
    model = GaussianModel("eps", size=16, learn_sigma=True)
    spread = {
        v: sample(model, count=8, steps=10, sampler="ddpm", y=1, variance=v).std()
        for v in ("small", "large", "learned")
    }
    assert spread["small"] < spread["learned"] < spread["large"]
    assert (
        sample(model, count=8, steps=10, sampler="ddpm", y=1, variance=variance).std()
        == spread[variance]
    )
    assert Sampling(model, sampler="ddpm").settings == {"variance": "learned"}
    assert Sampling(GaussianModel(), sampler="ddpm").settings == {"variance": "small"}


@pytest.mark.parametrize("name, options", STOCHASTIC + DETERMINISTIC)
def test_an_image_depends_on_its_seed_and_not_on_its_batch(rng, name, options):
    model = with_random_weights(unet(), 0.05)
    together = sample(model, count=5, steps=3, sampler=name, seed=10, batch=5, **options)
    apart = sample(model, count=3, steps=3, sampler=name, seed=12, batch=2, **options)
    assert together.shape == (5, 8, 8, 3) and together.dtype == np.uint8
    assert np.array_equal(together[2:], apart)
    assert np.abs(together[0].astype(int) - together[1]).max() > 1


@pytest.mark.parametrize(
    "name, options", [*STOCHASTIC, *DETERMINISTIC, ("ddpm", {"learn_sigma": True})]
)
@on("cuda")
def test_a_gpu_makes_the_images_of_the_cpu(engine, name, options):
    model = unet(device=engine.backend, learn_sigma=options.get("learn_sigma", False))
    options = {k: v for k, v in options.items() if k != "learn_sigma"}
    on_cpu = unet(learn_sigma=model.options["learn_sigma"])
    images, wanted = (
        sample(with_random_weights(each), 3, 3, sampler=name, batch=2, **options)
        for each in (model, on_cpu)
    )
    assert np.abs(images.astype(int) - wanted).max() <= 2


def test_evaluations_are_as_many_as_said():
    for name in SAMPLERS:
        model, seen = GaussianModel(), []
        sampling = Sampling(model, count=5, steps=7, sampler=name, batch=2)
        for _ in sampling.batches(progress=lambda seen=seen: seen.append(1)):
            pass
        assert model.calls == len(seen) == 3 * sampling.evaluations
    sampling = Sampling(
        GaussianModel(),
        count=1,
        steps=12,
        known=np.zeros((4, 4, 3)),
        mask=np.ones((4, 4)),
        jump=4,
        resamples=3,
    )
    list(sampling.batches())
    assert sampling.model.calls == sampling.evaluations == 3 * 11 + 1


def test_labels_in_turn_and_one_for_all():
    assert Sampling(GaussianModel(), count=7).labels.tolist() == [0, 1, 2, 0, 1, 2, 0]
    assert Sampling(GaussianModel(), count=3, y=[2]).labels.tolist() == [2, 2, 2]
    assert Sampling(GaussianModel(), count=6, slerp=3, sampler="euler").labels.tolist() == [
        0,
        0,
        0,
        1,
        1,
        1,
    ]
    assert Sampling(GaussianModel(classes=False)).labels is None


def test_inpainting_keeps_the_known_pixels():
    rng = np.random.default_rng(3)
    picture = rng.integers(0, 256, (16, 16, 3)).astype(np.uint8)
    mask = np.zeros((16, 16))
    mask[:, :9] = 1
    known = picture.astype(np.float32) / np.float32(127.5) - 1
    images = sample(GaussianModel(size=16), count=3, steps=20, batch=2, y=2, known=known, mask=mask)
    assert (images[:, :, :9] == picture[:, :9]).all()
    made = images[:, :, 9:] / 127.5 - 1
    assert abs(made.mean() - MEANS[2]) < 0.05 and made.std() < 0.3
    alone = sample(GaussianModel(size=16), count=1, steps=20, seed=2, y=2, known=known, mask=mask)
    assert np.array_equal(alone[0], images[2])


def test_slerp_rows():
    model = GaussianModel(classes=False)
    rows = sample(model, count=10, steps=8, sampler="heun", seed=4, slerp=5, batch=3)
    whole = sample(model, count=3, steps=8, sampler="heun", seed=4)
    assert np.array_equal(rows[[0, 5]], whole[:2])  # a row begins with its seed's own image
    assert (
        np.abs(rows[4].astype(int) - whole[1]).max() <= 1
        and np.abs(rows[9].astype(int) - whole[2]).max() <= 1
    )
    steps = np.abs(np.diff(rows[:5].astype(int), axis=0)).mean((1, 2, 3))
    assert steps.max() < np.abs(rows[0].astype(int) - rows[4]).mean()


def test_spherical_mean(rng):
    a, b = rng.standard_normal((2, 3, 50, 50, 3))
    share = np.array([0.0, 0.5, 1.0])
    middle = spherical_mean(a, b, share)
    np.testing.assert_allclose(middle[0], a[0])
    np.testing.assert_allclose(middle[2], b[2], atol=1e-12)
    lengths = np.linalg.norm(middle.reshape(3, -1), axis=1) / math.sqrt(7500)
    assert np.abs(lengths - 1).max() < 0.05  # a plain mean's would be 0.71
    np.testing.assert_allclose(
        middle[1].ravel() @ a[1].ravel() / np.linalg.norm(a[1]),
        middle[1].ravel() @ b[1].ravel() / np.linalg.norm(b[1]),
        rtol=0.05,
    )


def test_latents_are_neither_clipped_nor_rounded():
    images = sample(GaussianModel(channels=4), count=2, steps=5, y=2)
    assert images.dtype == np.float32 and images.shape == (2, 4, 4, 4)
    assert not Sampling(GaussianModel(channels=4)).clip and Sampling(GaussianModel(channels=1)).clip


BAD = [
    ({"sampler": "leapfrog"}, "unknown sampler"),
    ({"eta": 2.0}, "eta must be"),
    ({"count": 0}, "at least 1"),
    ({"batch": 0}, "at least 1"),
    ({"steps": 0}, "must be at least 1, not 0"),
    ({"steps": 1001}, "between 1 and the 1000"),
    ({"steps": 100_001, "spacing": "karras"}, "at most 100,000, not 100,001"),
    ({"sampler": "ddpm", "eta": 0.5}, "eta belongs to ddim and euler-ancestral"),
    ({"s_churn": 2.0}, "s_churn belongs to heun and euler, and ddim takes none"),
    ({"sampler": "heun", "s_tmin": 2.0}, "s_tmin only affects the noise that s_churn adds"),
    ({"sampler": "euler", "s_churn": math.nan}, "s_churn must be a finite number of at least 0"),
    ({"slerp": 4, "sampler": "heun", "s_churn": 1.0}, "adds no noise"),
    ({"sampler": "heun", "variance": "large"}, "variance belongs to ddpm"),
    ({"sampler": "ddpm", "variance": "huge"}, "unknown variance"),
    ({"sampler": "ddpm", "variance": "learned"}, "did not learn a variance"),
    ({"spacing": "cubic"}, "unknown spacing"),
    ({"count": 2, "seed": 2**32 - 1}, "seeds 4294967295 to 4294967296"),
    ({"seed": -1}, "seeds -1 to"),
    ({"y": "cats"}, "one class index, or one for each"),
    ({"count": 3, "y": [0, 1]}, "one class index, or one"),
    ({"count": 1, "y": [3]}, "class 3 does not exist"),
    ({"count": 1, "y": [-1]}, "class -1 does not exist"),
    ({"count": 1, "y": [2**32]}, "class 4294967296 does not exist"),
    ({"cfg_scale": float("nan")}, "finite"),
    ({"cfg_scale": 1e39}, "cfg_scale must be a finite number from -1000"),
    ({"sampler": "euler", "s_churn": 1.0, "s_noise": 1e300}, "s_noise must be at most 1000"),
    ({"cfg_channels": 3}, "give a cfg_scale"),
    ({"cfg_scale": 2.0, "cfg_channels": 4}, "between 1 and the model's 3"),
    ({"slerp": 5}, "whole rows"),
    ({"slerp": 1}, "at least 2"),
    ({"slerp": 4, "sampler": "ddpm"}, "adds no noise"),
    ({"slerp": 4, "eta": 0.1}, "adds no noise"),
    ({"slerp": 4, "sampler": "euler-ancestral"}, "adds no noise"),
    ({"known": np.zeros((4, 4, 3)), "mask": None}, "a mask"),
    (
        {"known": np.zeros((4, 4, 3)), "mask": np.zeros((4, 4)), "slerp": 4},
        "and inpainting, by RePaint, does",
    ),
    ({"known": np.zeros((4, 5, 3)), "mask": np.zeros((4, 4))}, "a picture of 4×4×3"),
    ({"known": np.zeros((4, 4, 3)), "mask": np.zeros((4, 4)), "jump": 0}, "at least 1"),
]


@pytest.mark.parametrize("options, message", BAD, ids=[m for _, m in BAD])
def test_bad_sampling_options_are_refused(options, message):
    with pytest.raises(UsageError, match=message):
        Sampling(GaussianModel(), **options)


def test_guidance_needs_a_null_class():
    for model, why in ((GaussianModel(null=False), "class dropout"), (unet(), "without classes")):
        with pytest.raises(UsageError, match=f"guidance needs a model with a null class.*{why}"):
            Sampling(model, cfg_scale=2.0)
        Sampling(model, cfg_scale=1.0)
    with pytest.raises(UsageError, match="without classes"):
        Sampling(unet(), y=[1])


def test_timesteps_of_the_process_are_checked_on_the_host():
    """NumPy would take -1 for the last."""
    diffusion, x = Diffusion(steps=10), np.zeros((1, 2, 2, 3), np.float32)
    for t in (-1, 10, 0.5, np.nan):
        with pytest.raises(UsageError, match="whole numbers from 0 to 9"):
            diffusion.q_sample(x, x, np.array([t]))
    with pytest.raises(UsageError, match="whole numbers from 0 to 9"):
        diffusion.loss(
            Tensor(np.zeros((1, 2, 2, 6), np.float32)), x, x, np.array([-1]), learn_sigma=True
        )
    for steps in (0, -1, 2.5, True, "10", 2**40):
        with pytest.raises(UsageError, match=r"must be a whole number from 1 to 100,000\."):
            Diffusion(steps=steps)


def test_the_weight_of_the_variational_bound(rng):
    """None: T / 1000, as it was before there was a choice."""
    x = rng.standard_normal((2, 4, 4, 3)).astype(np.float32)
    prediction, t = (
        Tensor(rng.standard_normal((2, 4, 4, 6)).astype(np.float32)),
        np.array([3, 200], np.int32),
    )

    def loss(weight, steps):
        diffusion = Diffusion(steps=steps, vlb_weight=weight)
        return float(diffusion.loss(prediction, x, x, t, learn_sigma=True).data[0])

    for steps in (250, 1000):
        without, once, default = (loss(weight, steps) for weight in (0, 1, None))
        assert once > without and default == pytest.approx(
            without + steps / 1000 * (once - without), rel=1e-5
        )
        assert loss(2.5, steps) == pytest.approx(without + 2.5 * (once - without), rel=1e-5)
    assert Diffusion().options == {"steps": 1000, "schedule": "linear", "prediction": "eps"}
    assert Diffusion(vlb_weight=1).options["vlb_weight"] == 1
    for weight in (-1, math.nan, math.inf, "1"):
        with pytest.raises(UsageError, match="must be a finite number of at least 0"):
            Diffusion(vlb_weight=weight)


def test_a_model_that_gives_fewer_channels_than_it_takes_is_not_sampled():
    with pytest.raises(UsageError, match="takes 6 channels and gives 3: .* super-resolution"):
        sample(unet(in_channels=6, out_channels=3), 1, 1)


def test_a_sampling_takes_a_configuration():
    config = SamplingConfig(count=3, steps=5, sampler="heun")
    sampling = Sampling(GaussianModel(), config, batch=2)
    by_name = Sampling(GaussianModel(), count=3, steps=5, sampler="heun", batch=2)
    assert sampling.options == by_name.options and sampling.batch == 2
    with pytest.raises(UsageError, match="Sampling takes a SamplingConfig as config, .* the int 4"):
        Sampling(GaussianModel(), 4)
    with pytest.raises(UsageError, match=r"Sampling has no argument 'cuont' \(did you mean"):
        Sampling(GaussianModel(), cuont=4)
