"""The conditioning of the steps to come, computed together, gives the bits of one computed step by
step."""

import numpy as np
import pytest

from numdiff.diffusion import Sampling
from numdiff.diffusion import ahead as module
from tests.device.recording import RecordingDevice
from tests.models import small_dit, small_unet, with_random_weights

MODELS = {
    "dit": lambda device: small_dit(
        image_size=2,
        in_channels=4,
        patch_size=2,
        hidden_size=16,
        depth=2,
        num_heads=1,
        num_classes=3,
        device=device,
    ),
    "unet": lambda device: small_unet(
        image_size=2,
        in_channels=4,
        model_channels=8,
        groups=2,
        num_head_channels=8,
        use_scale_shift_norm=True,
        device=device,
    ),
}


def made(model, steps, monkeypatch, sampler, **how):
    """Four images in batches of two, `steps` steps ahead, and the number of steps that were ahead."""
    monkeypatch.setattr("numdiff.diffusion.run.steps_ahead", lambda *_: steps)
    sampling = Sampling(model, count=4, steps=3, sampler=sampler, batch=2, **how)
    images = np.concatenate([images for _, images in sampling.batches()])
    ahead = sampling._run(2).ahead
    return images, ahead and ahead.steps


@pytest.mark.parametrize("kind, sampler", [("dit", "heun"), ("unet", "ddim"), ("dit", "ddpm")])
def test_the_bits_of_step_by_step(kind, sampler, rng, monkeypatch):
    model, how = (
        with_random_weights(MODELS[kind]("cpu"), 0.1),
        {"cfg_scale": 2.0} if kind == "dit" else {},
    )
    wanted, _ = made(model, 0, monkeypatch, sampler, **how)
    # latents, which are not rounded
    assert wanted.dtype == np.float32 and len(np.unique(wanted)) == wanted.size
    for steps in (2, 5, 9):  # several times on the way, or once
        got, ahead = made(model, steps, monkeypatch, sampler, **how)
        assert ahead == steps
        np.testing.assert_array_equal(got, wanted)


def test_steps_without_guidance_take_half_of_the_rows(rng, monkeypatch):
    model, how = (
        with_random_weights(MODELS["dit"]("cpu"), 0.1),
        {"cfg_scale": 2.0, "cfg_interval": (0.005, 50.0)},
    )
    wanted, _ = made(model, 0, monkeypatch, "heun", **how)
    got, ahead = made(model, 3, monkeypatch, "heun", **how)
    np.testing.assert_array_equal(got, wanted)
    assert ahead == 3 and not np.array_equal(
        made(model, 0, monkeypatch, "heun", cfg_scale=2.0)[0], wanted
    )


def test_as_many_steps_as_have_room(monkeypatch):
    model = MODELS["unet"](RecordingDevice())
    bytes_a_step = 4 * sum(model.conditioning_columns()[0]) * 2
    for room, steps in (
        (9 * bytes_a_step, 5),
        (2 * bytes_a_step + 1, 2),
        (2 * bytes_a_step - 1, 0),
    ):
        monkeypatch.setattr(module, "MAX_BYTES", room)
        assert module.steps_ahead(model, 2, 5) == steps
    for room, steps in ((4, 4), (13, 10), (20, 20), (99, 20)):  # whole graphs, or all steps
        monkeypatch.setattr(module, "MAX_BYTES", room * bytes_a_step)
        assert module.steps_ahead(model, 2, 20) == steps
    assert module.steps_ahead(MODELS["unet"]("cpu"), 2, 5) == 0


def test_somebody_elses_arena_takes_no_more_memory(rng):
    model = MODELS["unet"](RecordingDevice())
    assert Sampling(model, count=2, steps=3).new_run(2).ahead is not None
    assert Sampling(model, count=2, steps=3, arena=object()).new_run(2).ahead is None
