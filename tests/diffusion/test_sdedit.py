"""SDEdit: samples that start from an image with noise."""

import numpy as np
import pytest

from numdiff.diffusion import SAMPLERS, Diffusion, Sampling, sample
from numdiff.diffusion.run import SamplerRun
from numdiff.errors import UsageError
from tests.diffusion.stub import check_devices_agree
from tests.models import small_unet


@pytest.fixture
def model():
    model = small_unet(seed=4)
    model.diffusion = Diffusion(steps=100).options
    return model


@pytest.fixture
def image(rng):
    return (rng.integers(0, 256, (8, 8, 3)) / 127.5 - 1).astype(np.float32)


@pytest.mark.parametrize("sampler", [*SAMPLERS])
def test_strength_0_is_the_image_and_1_is_plain_sampling(model, image, sampler):
    how = {"count": 3, "steps": 4, "sampler": sampler, "seed": 5, "batch": 2}
    if sampler == "euler-maruyama":
        model.diffusion = Diffusion(path="linear").options
    same = Sampling(model, **how, init=image, strength=0)
    assert same.evaluations == 0
    pixels = np.rint((image + 1) * 127.5).astype(np.uint8)
    for _, made in same.batches():
        assert np.array_equal(made, np.broadcast_to(pixels, made.shape))
    plain = sample(model, **how)
    assert np.array_equal(sample(model, **how, init=image, strength=1), plain)
    between = sample(model, **how, init=image, strength=0.5)
    assert not np.array_equal(between, plain) and not np.array_equal(between[0], between[1])


@pytest.mark.parametrize("options", [{"steps": 100}, {"path": "linear"}, {"path": "edm"}])
def test_it_starts_at_the_image_plus_noise_of_the_level(model, image, options, monkeypatch):
    """x = x_0 + σ · noise, and the number of steps is the share that strength says."""
    model.diffusion = Diffusion(**options).options
    sampling = Sampling(model, count=1, steps=10, sampler="euler", init=image, strength=0.3)
    assert sampling.steps == sampling.evaluations == 3
    assert sampling.sigmas == Sampling(model, count=1, steps=10, sampler="euler").sigmas[-4:]
    started = []
    monkeypatch.setattr(
        SamplerRun, "start", lambda self, noise: started.append(self.plan.start_scale * noise)
    )
    next(sampling.batches())
    noise = sampling.new_run(1).noise(np.zeros(1, np.uint32))
    wanted = image + sampling.sigmas[0] * noise
    assert np.abs(started[0] - wanted).max() < 1e-5 * np.abs(wanted).max()


def test_more_strength_changes_more(model, image):
    """Of a model that predicts zero noise, whose estimate of the image is x itself."""
    model.load_arrays({name: np.zeros_like(array) for name, array in model.arrays().items()})
    errors = [
        np.abs(
            sample(model, 4, 20, "ddim", init=image, strength=s, clip=False).astype(float)
            - np.rint((image + 1) * 127.5)
        ).mean()
        for s in (0, 0.2, 0.5, 0.8)
    ]
    assert errors[0] == 0 and errors == sorted(errors) and errors[3] > 2 * errors[1]


def test_devices_agree(image, engine):
    check_devices_agree(engine, init=image, strength=0.5)


def test_what_cannot_be_is_refused(model, image):
    for options, sentence in (
        ({"strength": 0.5}, "strength 0.5 says how much of an image changes: give init, too"),
        ({"init": image, "strength": 1.5}, "strength must be between 0 .the image. and 1"),
        ({"init": image[:4]}, r"init must be an array of 8×8×3, and not \(4, 8, 3\)"),
        ({"init": "a.png"}, "init must be an array of 8×8×3, and not"),
        ({"init": image * np.nan}, "init holds values that are not finite"),
        ({"init": image, "known": image, "mask": image[..., 0]}, "init and known, of inpainting"),
        ({"init": image, "strength": "a"}, "strength must be a number"),
    ):
        with pytest.raises(UsageError, match=sentence):
            Sampling(model, count=1, steps=4, **options)
