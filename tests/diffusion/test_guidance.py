"""Guidance in an interval of noise levels, and by another model: against the closed forms of a
Gaussian's score."""

import itertools

import numpy as np
import pytest

from numdiff.device import upload
from numdiff.diffusion import Sampling, sample
from numdiff.diffusion.memory import Measuring, bytes_for, measuring_twin
from numdiff.diffusion.sampling_config import SamplingConfig
from numdiff.errors import UsageError
from numdiff.kernels.diffusion.sampler import weighted_sum
from numdiff.kernels.embedding import embedding_forward
from numdiff.nn import Tensor
from numdiff.training.compiling import plan_sampling
from tests.device.recording import RecordingDevice
from tests.diffusion.stub import MEANS, STD, GaussianModel
from tests.models import small_dit, small_unet, with_random_weights
from tests.training.test_plan import H200

PATHS = [
    {"prediction": "v"},
    {"prediction": None, "path": "linear"},
    {"prediction": None, "path": "edm"},
]
INTERVAL = (0.3, 5.0)


class CountedModel(GaussianModel):
    """Also counts the images that it is given."""

    images = 0

    def __call__(self, x, t, y=None):
        self.images += len(t)
        return super().__call__(x, t, y)


class Shifted(GaussianModel):
    """A worse model: its classes have other means."""

    shift = 0.2

    def __call__(self, x, t, y=None):
        before = MEANS.copy()
        MEANS[:] += self.shift
        try:
            return super().__call__(x, t, y)
        finally:
            MEANS[:] = before


def euler_of_means(sampling, mean_at):
    """Euler's steps in float64 for D = mean + gain · (x - mean), from the sampling's own noise."""
    run = sampling.new_run(sampling.count)
    x = run.noise(sampling._seeds(slice(0, sampling.count))[0]).astype(np.float64)
    x *= sampling.plan.start_scale
    for now, then in itertools.pairwise(sampling.sigmas):
        gain = STD**2 / (STD**2 + now**2)
        x_0 = mean_at(now) + gain * (x - mean_at(now))
        x = x_0 + then / now * (x - x_0)
    return x


@pytest.mark.parametrize("path", PATHS, ids=["discrete", "linear", "edm"])
def test_guided_inside_of_the_interval_alone(path):
    """Latents, which are neither clipped nor rounded: every element is that of the recursion in
    float64."""
    model = CountedModel(channels=4, **path)
    sampling = Sampling(
        model, count=2, steps=12, sampler="euler", y=2, cfg_scale=3.0, cfg_interval=INTERVAL
    )
    ((_, made),) = sampling.batches()
    guided, plain = 0.1 + 3 * (MEANS[2] - 0.1), MEANS[2]
    inside = [INTERVAL[0] < sigma <= INTERVAL[1] for sigma in sampling.sigmas[:-1]]
    assert 2 < sum(inside) < 10 and sampling.guided_evaluations == sum(inside)
    assert model.images == 2 * (12 + sum(inside)) and model.calls == 12  # twice as many only inside
    wanted = euler_of_means(
        sampling, lambda sigma: guided if INTERVAL[0] < sigma <= INTERVAL[1] else plain
    )
    np.testing.assert_allclose(made, wanted, atol=2e-4)
    assert abs(wanted.mean() - plain) > 0.05  # there is something to see


def test_the_upper_end_belongs_to_the_interval_and_the_lower_one_does_not():
    model = GaussianModel()
    sigmas = Sampling(model, count=1, steps=10, sampler="heun").sigmas
    sampling = Sampling(
        model, count=1, steps=10, sampler="heun", cfg_scale=2.0, cfg_interval=(sigmas[6], sigmas[3])
    )
    assert [sampling.denoiser.guided(sigma) for sigma in sigmas[:-1]] == 3 * [False] + 3 * [
        True
    ] + 4 * [False]
    # heun: twice a step, but for the last
    assert sampling.guided_evaluations == 6 and sampling.evaluations == 19


@pytest.mark.parametrize("name", ["ddpm", "heun", "dpm++2m"])
def test_an_interval_of_all_levels_is_none_and_the_bits_outside_are_those_of_no_guidance(name):
    model = dit()
    how = {"count": 3, "steps": 4, "sampler": name, "batch": 2, "clip": False}
    wanted = sample(model, cfg_scale=3.0, **how)
    np.testing.assert_array_equal(
        sample(model, cfg_scale=3.0, cfg_interval=(0, 1e6), **how), wanted
    )
    last = Sampling(model, count=1, steps=4, sampler=name).sigmas[-2]
    least = sample(model, cfg_scale=1 + 1e-12, cfg_interval=(0, last), **how)  # a float32 of 1
    np.testing.assert_allclose(least, sample(model, **how), atol=1e-5)
    assert not np.allclose(wanted, least, atol=1e-3)


# Autoguidance -------------------------------------------------------------------------------------


@pytest.mark.parametrize("of_guide", PATHS, ids=["discrete", "linear", "edm"])
@pytest.mark.parametrize("path", PATHS, ids=["discrete", "linear", "edm"])
def test_a_guide_of_any_path_moves_the_mean_away_from_its_own(path, of_guide):
    model, guide = CountedModel(channels=4, **path), Shifted(channels=4, **of_guide)
    scale = 2.5
    sampling = Sampling(
        model,
        count=3,
        steps=12,
        sampler="euler",
        guide=guide,
        guide_scale=scale,
        cfg_interval=INTERVAL,
    )
    ((_, made),) = sampling.batches()
    means = MEANS.reshape(3, 1, 1, 1)
    moved = means + Shifted.shift + scale * -Shifted.shift
    wanted = euler_of_means(
        sampling, lambda sigma: moved if INTERVAL[0] < sigma <= INTERVAL[1] else means
    )
    np.testing.assert_allclose(made, wanted, atol=4e-4)
    assert model.calls == 12 and guide.calls == sampling.guided_evaluations < 12


@pytest.mark.parametrize(
    "name", ["ddpm", "ddim", "heun", "dpm++2m", "euler-ancestral", "euler-maruyama"]
)
def test_every_sampler_takes_a_guide(name):
    """Guided by the class's absence is guided by a model without classes: the null class's mean is
    0.1."""

    class Null(GaussianModel):
        num_classes = property(lambda self: None, lambda self, value: None)

    model = GaussianModel("eps", size=16, learn_sigma=True)
    images = sample(
        model,
        count=6,
        steps=40,
        sampler=name,
        y=2,
        guide=Null("x_0", size=16, classes=False),
        guide_scale=1.5,
    )
    wanted = sample(model, count=6, steps=40, sampler=name, y=2, cfg_scale=1.5)
    assert np.abs(images.astype(int) - wanted).max() <= 1
    assert images.mean() / 127.5 - 1 == pytest.approx(0.1 + 1.5 * (MEANS[2] - 0.1), abs=0.05)


def test_the_estimates_are_clipped_after_they_are_mixed():
    """Either one is within [-1, 1] here; the mixture would not be."""
    model, guide = GaussianModel(size=16), Shifted(size=16)
    images = sample(model, count=4, steps=20, y=0, guide=guide, guide_scale=4.0) / 127.5 - 1
    # -0.5 + 0.2 - 4 · 0.2 = -1.1
    assert images.min() == -1 and images.mean() == pytest.approx(-1, abs=0.05)


def test_a_learned_variance_is_the_models_own():
    class Wide(GaussianModel):
        """The largest of variances."""

        def __call__(self, x, t, y=None):
            answer = super().__call__(x, t, y)
            answer.data[..., 3:] = 1
            return answer

    model, guide = GaussianModel(size=16, learn_sigma=True), Wide(size=16, learn_sigma=True)
    own = sample(model, count=4, steps=10, sampler="ddpm", y=1).std()
    assert sample(guide, count=4, steps=10, sampler="ddpm", y=1).std() > 1.05 * own
    assert sample(
        model, count=4, steps=10, sampler="ddpm", y=1, guide=guide
    ).std() == pytest.approx(own, rel=1e-2)


def test_inpainting_with_a_guide_keeps_what_is_known():
    known, mask = np.full((8, 8, 3), 0.25), np.zeros((8, 8))
    mask[:, :4] = 1
    images = (
        sample(
            GaussianModel(size=8),
            count=3,
            steps=8,
            y=0,
            known=known,
            mask=mask,
            guide=Shifted(size=8),
        )
        / 127.5
    )
    np.testing.assert_allclose(images[:, :, :4] - 1, 0.25, atol=0.01)
    assert images[:, :, 4:].mean() - 1 == pytest.approx(-0.5 + 0.2 - 2 * 0.2, abs=0.1)


LATENTS = {"image_size": 4, "in_channels": 4}


def dit(**options):
    sizes = {**LATENTS, "patch_size": 2, "hidden_size": 16, "depth": 2, "num_classes": 3}
    return with_random_weights(small_dit(**{**sizes, **options}), 0.1)


def unet(**options):
    sizes = {**LATENTS, "model_channels": 8, "groups": 2, "num_head_channels": 8}
    return with_random_weights(small_unet(**{**sizes, **options}), 0.1)


@pytest.mark.parametrize("with_guide", [False, True], ids=["cfg", "autoguidance"])
def test_an_image_follows_from_its_seed_alone(with_guide):
    model = dit()
    how = {"steps": 4, "sampler": "heun", "cfg_interval": (0.5, 30.0), "y": 1}
    how |= {"guide": unet(num_classes=3)} if with_guide else {"cfg_scale": 3.0}
    together = sample(model, 5, seed=10, batch=5, **how)
    np.testing.assert_array_equal(sample(model, 3, seed=12, batch=2, **how), together[2:])


class Elementwise:
    """A model of two kernels: answer = x / 2 + a row of a table, of the class or the null class."""

    image_size, in_channels, num_classes, null_class, options = 2, 4, 3, 3, {}

    def __init__(self, device, rng):
        self.backend, self.diffusion, self.meta = device, {}, {}
        self.move(rng)

    def move(self, rng):
        """Other weights, at another place."""
        self.table = upload(rng.standard_normal((4, 16)).astype(np.float32), self.backend)

    def place(self):
        return id(self.table)

    def __call__(self, x, t, y):
        rows = embedding_forward(y, self.table).reshape(x.shape)
        return Tensor(
            weighted_sum(upload(np.array([0.5, 1], np.float32), self.backend), x.data, rows)
        )


@pytest.mark.parametrize("with_guide", [False, True], ids=["cfg", "autoguidance"])
def test_replayed_and_launched_one_by_one_give_the_same_bits(rng, with_guide):
    """The steps inside of the interval and those outside are recorded separately; a guide that has
    moved is recorded again."""
    device = RecordingDevice()
    model, guide = Elementwise(device, rng), Elementwise(device, rng)
    how = {"cfg_interval": (0.5, 30.0)} | ({"guide": guide} if with_guide else {"cfg_scale": 3.0})
    replayed, launched = (
        Sampling(model, count=2, steps=6, sampler="euler", eager=eager, **how)
        for eager in (False, True)
    )
    assert 2 <= replayed.guided_evaluations <= 4 and len(set(replayed.plan.steps)) == 2
    seen = []
    for turn in range(3):
        if turn == 2:
            (guide if with_guide else model).move(rng)
        before = device.replays
        ((_, got),), ((_, wanted),) = list(replayed.batches()), list(launched.batches())
        np.testing.assert_array_equal(got, wanted)
        assert device.replays - before == (4 if turn != 1 else 6)  # a kind's first step is launched
        seen.append(got)
    np.testing.assert_array_equal(seen[0], seen[1])
    assert np.isfinite(seen[0]).all() and not np.array_equal(seen[0], seen[2])


def test_the_guide_counts_in_what_fits():
    model, guide = (
        dit(image_size=16),
        unet(image_size=16, model_channels=64),
    )

    class Gpu:
        capability, multiprocessors, device_name, shared_limit = (9, 0), 132, "a GPU", 227 << 10

    alone, guided = (
        bytes_for(
            Sampling(model, count=500, steps=3, sampler="euler", batch=500, **how),
            measuring_twin(model, Measuring(Gpu)),
            500,
        )
        for how in ({}, {"guide": guide})
    )
    assert guided > alone + 500 * 16 * 16 * 64 * 4


def test_the_guides_kernels_are_planned():
    model, guide = dit(), unet()
    names = [
        {key.name for key in plan_sampling(model, SamplingConfig(count=2, steps=3, **how))(H200)}
        for how in ({}, {"guide": guide})
    ]
    assert names[0] < names[1] and any("conv2d" in name for name in names[1] - names[0])


BAD = [
    ({"cfg_interval": (0.3, 5)}, "cfg_interval has no effect without guidance"),
    ({"cfg_scale": 1.0, "cfg_interval": (0.3, 5)}, "cfg_interval has no effect without guidance"),
    *(
        (
            {"cfg_scale": 2.0, "cfg_interval": wrong},
            "cfg_interval .* must be two noise levels sigma",
        )
        for wrong in (
            (5, 0.3),
            (1, 1),
            (-1, 2),
            (0, float("inf")),
            (float("nan"), 2),
            (1,),
            (1, 2, 3),
            3,
            "0.3,5",
            (True, 3),
        )
    ),
    (
        {"cfg_scale": 2.0, "cfg_interval": (1e4, 1e5)},
        "holds none of the noise levels at which the 50 steps evaluate",
    ),
    ({"guide_scale": 2.0}, "no effect without a model that guides"),
    ({"guide": "a run"}, "a guide is a model, as numdiff.load gives it, and not the str 'a run'"),
    ({"guide": GaussianModel(), "cfg_scale": 3.0}, "cfg_scale 3 and a guide exclude each other"),
    (
        {"guide": GaussianModel(), "guide_scale": float("inf")},
        "guide_scale must be a finite number",
    ),
    ({"guide": GaussianModel(), "guide_scale": True}, "guide_scale must be a number"),
    ({"guide": GaussianModel(size=8)}, "the guide makes images of 8×8×3 and the model of 4×4×3"),
    ({"guide": GaussianModel(channels=1)}, "the guide makes images of 4×4×1"),
]


@pytest.mark.parametrize("options, message", BAD, ids=[str(i) for i in range(len(BAD))])
def test_bad_options_are_refused(options, message):
    with pytest.raises(UsageError, match=message):
        Sampling(GaussianModel(), **options)


def test_a_guide_has_the_models_classes_or_none():
    model, other = GaussianModel(), GaussianModel()
    with pytest.raises(UsageError, match="cannot guide itself"):
        Sampling(model, guide=model)
    other.num_classes = 5
    with pytest.raises(
        UsageError,
        match="the guide has 5 classes and the model 3: give a guide of the same classes",
    ):
        Sampling(model, guide=other)
    with pytest.raises(UsageError, match="the guide has 3 classes and the model none"):
        Sampling(GaussianModel(classes=False), guide=model)
    other.num_classes, other.meta, model.meta = (
        3,
        {"classes": list("acb")},
        {"classes": list("abc")},
    )
    with pytest.raises(
        UsageError, match="the guide's classes are others than the model's, or in another order"
    ):
        Sampling(model, guide=other)
    other.backend = object()
    other.meta = {}
    with pytest.raises(UsageError, match="on another device"):
        Sampling(model, guide=other)
    assert Sampling(model, guide=GaussianModel(), guide_scale=1.0).guide is None
    assert Sampling(model, guide=GaussianModel()).options["guide_scale"] == 2.0
