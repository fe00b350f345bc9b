"""Weights of SiT and LightningDiT, whose time runs from noise to the image."""

import numpy as np
import pytest

import numdiff
from numdiff.extras.convert.flow import with_time_reversed, without_variance
from numdiff.extras.convert.layout import to_numdiff_layout, to_torch_layout
from numdiff.extras.convert.models import convert
from numdiff.nn import DiT
from numdiff.training.model_files import read_model_file
from tests.command import output_of, refusal_of

SMALL = {
    "image_size": 8,
    "in_channels": 4,
    "patch_size": 2,
    "hidden_size": 48,
    "depth": 1,
    "num_heads": 3,
    "num_classes": 5,
    "device": "cpu",
}
T = np.array([0.0, 0.03, 0.5, 0.97, 1.0], np.float32)


def random_model(rng, **options):
    model = DiT(**{**SMALL, "learn_sigma": False, **options})
    model.parameters.load_flat(0.2 * rng.standard_normal(model.parameters.total))
    return model


def answers(model, x, t, y):
    return np.asarray(model(numdiff.nn.Tensor(x), t, y).data, np.float64)


@pytest.fixture
def inputs(rng):
    return rng.standard_normal((5, 8, 8, 4)).astype(np.float32), np.arange(5, dtype=np.int32)


def test_the_reversed_model_sees_one_minus_t_and_answers_with_the_other_sign(rng, inputs):
    model, (x, y) = random_model(rng), inputs
    theirs = to_torch_layout(model.arrays())
    want = answers(model, x, T, y)
    ours = random_model(rng)
    ours.load_arrays(to_numdiff_layout(with_time_reversed(theirs)))
    np.testing.assert_allclose(answers(ours, x, 1 - T, y), -want, rtol=2e-5, atol=2e-5)
    ours.load_arrays(to_numdiff_layout(with_time_reversed(theirs, "x_0")))
    np.testing.assert_allclose(answers(ours, x, 1 - T, y), want, rtol=2e-5, atol=2e-5)
    ours.load_arrays(to_numdiff_layout(with_time_reversed(theirs, scale=1000.0)))
    np.testing.assert_allclose(
        answers(ours, x, 1000 - 1000 * T, y), -answers(model, x, 1000 * T, y), atol=5e-4
    )
    back = with_time_reversed(with_time_reversed(theirs))
    for name, array in theirs.items():
        np.testing.assert_allclose(back[name], array, rtol=1e-5, atol=1e-6, err_msg=name)


def test_without_the_variances_channels(rng, inputs):
    model, (x, y) = random_model(rng, learn_sigma=True), inputs
    state, options = without_variance(to_torch_layout(model.arrays()), model.options)
    plain = random_model(rng)
    assert plain.options == options
    plain.load_arrays(to_numdiff_layout(state))
    np.testing.assert_allclose(
        answers(plain, x, T, y), answers(model, x, T, y)[..., :4], rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("lightning", [False, True])
def test_files_go_both_ways(rng, inputs, lightning):
    """A foreign state dict to numdiff and back: their answers at τ are the negatives of ours at 1 -
    τ."""
    block = {"norm": "rms", "rope": True, "mlp": "swiglu"} if lightning else {"learn_sigma": True}
    theirs, (x, y) = random_model(rng, **block), inputs
    np.savez("theirs.npz", **to_torch_layout(theirs.arrays()))
    stated = {} if lightning else {"path": "linear"}
    free = {"image_size": 8, "num_heads": 3, **({"rope": True} if lightning else {})}
    result = convert("theirs.npz", "ours.h5", diffusion=stated, **free)
    assert result.diffusion["path"] == "linear" and result.diffusion["prediction"] == "flow"
    assert result.options["learn_sigma"] is False
    ours = numdiff.load("ours.h5", device="cpu")
    want = answers(theirs, x, T, y)[..., :4]
    np.testing.assert_allclose(answers(ours, x, 1 - T, y), -want, rtol=5e-5, atol=5e-5)
    convert("ours.h5", "back.safetensors")
    again = convert("back.safetensors", "again.h5")
    assert again.diffusion == result.diffusion
    for name, array in read_model_file("again.h5")[1].items():
        np.testing.assert_allclose(array, ours.arrays()[name], rtol=1e-5, atol=1e-6, err_msg=name)


def test_a_model_that_sees_a_thousand_t(rng, inputs):
    theirs, (x, y) = random_model(rng), inputs
    np.savez("theirs.npz", **to_torch_layout(theirs.arrays()))
    diffusion = {"path": "linear", "rescale_timesteps": True}
    given = {"image_size": 8, "num_heads": 3, "diffusion": diffusion}
    result = convert("theirs.npz", "ours.h5", **given)
    assert result.diffusion["timestep_scale"] == 1000
    ours = numdiff.load("ours.h5", device="cpu")
    np.testing.assert_allclose(
        ours.predict(x, 1 - T, y), -answers(theirs, x, 1000 * T, y), atol=5e-4
    )


def test_refused(rng, tmp_path):
    np.savez("theirs.npz", **to_torch_layout(random_model(rng).arrays()))
    command = "convert theirs.npz a.h5 --image-size 8 --num-heads 3 --path linear"
    for words, sentence in (
        (
            "--schedule cosine",
            "--path linear has no whole timesteps, which --schedule is about",
        ),
        ("--diffusion-steps 10", "which --diffusion-steps is about"),
    ):
        assert sentence in refusal_of(command, words)
    assert not (tmp_path / "a.h5").exists()
    assert "x_0" in output_of(command, "--prediction x_0")
