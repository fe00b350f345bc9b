"""Learned steps: the space they search, the levels they choose, and how near they come to many
steps."""

import numpy as np
import pytest

from numdiff.diffusion import Sampling, sample
from numdiff.errors import UsageError
from numdiff.extras.learned_steps.fit import CHOICES, Trajectory
from numdiff.extras.learned_steps.steps import check_schedule, described
from tests.diffusion.stub import GaussianModel
from tests.models import small_unet

LONG = 30


class Bent(GaussianModel):
    """The answers of a mixture: what a Gaussian model answers is linear in x, and one step is then
    exact."""

    def __call__(self, x, t, y=None):
        answer = super().__call__(x, t, y)
        answer.data += (0.3 * np.sin(3 * x.data)).astype(np.float32)
        return answer


def trajectory(model=None, **more):
    given = {"count": 6, "steps": LONG, "sampler": "ddim", "seed": 99, "batch": 4, "clip": False}
    return Trajectory(Sampling(model or Bent(size=4), **{**given, **more}))


def test_the_products_are_those_of_the_states():
    """Whatever the batches; and all steps together are DDIM itself."""
    long = trajectory()
    assert long.products.shape == (2 * LONG + 1, 2 * LONG + 1)
    whole = trajectory(batch=6)
    np.testing.assert_allclose(long.products, whole.products, rtol=1e-9, atol=1e-9)
    values = np.linalg.eigvalsh(long.products)
    assert np.abs(values.min()) < 1e-6 * values.max()
    assert long.states.shape == (LONG + 1, 6, 48)
    np.testing.assert_allclose(
        long.products[7, 9], np.sum(long.states[7].astype(float) * long.states[9]), rtol=1e-6
    )


def test_levels_fall_and_a_tighter_bound_needs_more_of_them():
    long = trajectory()
    counts = [len(long.levels(bound)) for bound in (1.0, 0.1, 0.01, 0.001, 0.0)]
    assert counts == sorted(counts) and counts[0] == 1 and counts[-1] == LONG
    for steps in (1, 2, 5, 9, LONG):
        schedule = long.schedule(steps)
        assert len(schedule["sigmas"]) == steps
        assert schedule["sigmas"][0] == pytest.approx(long.sigmas[0])
        assert [len(row) for row in schedule["weights"]] == list(range(2, steps + 2))
        check_schedule(schedule)
    with pytest.raises(UsageError, match="learned steps are 1 to 30, and not 31"):
        long.schedule(31)


@pytest.mark.parametrize("steps", [1, 2, 6, 29, 30])
def test_the_nearest_choice_of_levels_is_kept(steps):
    long = trajectory()
    choices = [long.nearest(name, steps) for name in long.sampling.diffusion.path.spacings]
    for chosen in choices:
        assert len(chosen) == steps and chosen == sorted(set(chosen))
        assert chosen[0] == 0 and chosen[-1] < LONG
    ends = [long._along(chosen)[2][-1] for chosen in (long.choose(steps), *choices)]
    assert long.schedule(steps)["errors"][-1] == min(ends) and len(ends) <= CHOICES


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"prediction": "v", "schedule": "cosine"},
        {"prediction": None, "path": "linear"},
        {"prediction": None, "path": "edm"},
    ],
)
def test_few_learned_steps_come_nearer_to_many_than_other_samplers_do(options):
    model = Bent(size=4, **options)
    schedule = trajectory(model, count=24, seed=500).schedule(6)
    want = sample(model, 9, LONG, "ddim", seed=3, clip=False).astype(float)

    def distance(**how):
        return np.sqrt(np.mean((sample(model, 9, seed=3, clip=False, **how) - want) ** 2))

    learned = distance(schedule=schedule)
    for sampler in ("ddim", "dpm++2m"):
        assert learned < distance(steps=6, sampler=sampler), sampler


def test_a_gaussian_models_steps_are_exact():
    """Its answers are linear in x: with the classes apart, two of them span all that DDIM visits."""
    model = GaussianModel(size=4, classes=False)
    schedule = trajectory(model, count=4, seed=7).schedule(2)
    assert max(schedule["errors"]) < 1e-4
    got, want = (
        sample(model, 4, seed=1, clip=False, **how).astype(int)
        for how in ({"schedule": schedule}, {"steps": LONG, "sampler": "ddim"})
    )
    assert np.abs(got - want).max() <= 1


def test_what_does_not_fit_is_refused():
    model = Bent(size=4)
    schedule = trajectory(model).schedule(3)

    def sampling(**how):
        return Sampling(model, **{"count": 2, "schedule": schedule, "clip": False, **how})

    def refused(sentence, **how):
        with pytest.raises(UsageError, match=sentence):
            sampling(**how)

    other = {**schedule["diffusion"], "prediction": "v"}
    for changed, sentence in (
        ({"cfg_scale": 2.0}, "learned with cfg_scale 2.0, and here it is none"),
        ({"model": "dit"}, "learned with model dit, and here it is function"),
        ({"diffusion": other}, "learned with diffusion.prediction v, and here it is eps"),
        ({"clip": True}, "learned with clip True, and here it is False"),
        (
            {"weights": schedule["weights"][:2]},
            "no schedule of numdiff schedule: its levels must fall",
        ),
        ({"sigmas": schedule["sigmas"][::-1]}, "its levels must fall"),
        ({"sigmas": [float("nan")] * 3}, "no schedule of numdiff schedule"),
        ({"kind": "x"}, "no schedule"),
    ):
        refused(sentence, schedule={**schedule, **changed})
    for how in (
        {"sampler": "heun"},
        {"eta": 1.0},
        {"spacing": "karras"},
        {"steps": 10},
        {"steps": "ddim10"},
    ):
        refused(f"leaves nothing to say by {next(iter(how))}", **how)
    less = {key: value for key, value in schedule.items() if key != "guide_scale"}
    refused("the schedule has no guide_scale", schedule=less)
    with pytest.raises(UsageError, match="ddim without noise"):
        trajectory(model, eta=1.0)
    options = sampling().options
    # that word says which of a model's are taken
    assert options["sampler"] == "learned" and "weights" not in options
    assert options["sigmas"] == schedule["sigmas"]
    assert options["step_weights"] == schedule["weights"]
    sampling(cfg_scale=1.0)  # no guidance, as in learning
    sampling(guide=Bent(size=4), guide_scale=1.0)
    # fewer than a sampler takes by default
    model.diffusion = {**schedule["diffusion"], "steps": 20}
    sampling(schedule={**schedule, "diffusion": model.diffusion})


def test_of_a_unet():
    """Guidance is learned as part of the model; images depend on their seeds alone."""
    model = small_unet(num_classes=3, class_dropout=0.1)
    model.diffusion = {"steps": 1000, "schedule": "cosine", "prediction": "x_0"}
    sampling = Sampling(model, count=4, steps=12, sampler="ddim", seed=9, cfg_scale=1.5)
    schedule = Trajectory(sampling).schedule(4)
    assert schedule["cfg_scale"] == 1.5 and schedule["model_options"]["image_size"] == 8
    assert described(sampling).items() <= schedule.items()
    given = {"schedule": schedule, "cfg_scale": 1.5}
    whole = sample(model, 4, seed=2, **given)
    np.testing.assert_array_equal(whole[2:], sample(model, 2, seed=4, y=[2, 0], **given))
    for changed, sentence in (
        ({"cfg_scale": None}, "learned with cfg_scale 1.5, and here it is none"),
        ({"cfg_interval": (0.5, 5.0)}, r"cfg_interval none, and here it is \[0.5, 5.0\]"),
        (
            {"cfg_scale": None, "guide": small_unet(num_classes=3, seed=3)},
            "leaves nothing to say by guide",
        ),
    ):
        with pytest.raises(UsageError, match=sentence):
            Sampling(model, count=4, **{**given, **changed})
