"""Models loaded for sampling alone: the same bits, each weight held once, and one sentence for what
they cannot do."""

import copy

import numpy as np
import pytest

import numdiff
from numdiff.device import download
from numdiff.device.arena import Arena
from numdiff.device.planned import CARDS
from numdiff.diffusion.memory import Measuring
from numdiff.errors import NumdiffError, UsageError
from numdiff.nn import DiT, UNet
from numdiff.training.inference import inference_model, read_in_single
from numdiff.training.sampling import model_hash
from tests.models import small_dit, small_unet, with_random_weights, write


@pytest.fixture
def model_file(tmp_path):
    """A function: kind -> (path of a model file of random weights, classes of two images)."""

    def made(kind):
        if kind == "dit":
            model = small_dit(image_size=4, in_channels=4, patch_size=2, num_classes=3)
        else:
            sizes = {"model_channels": 8, "groups": 2, "num_head_channels": 8}
            model = small_unet(image_size=4, **sizes)
        path = write(tmp_path / "model.h5", with_random_weights(model, 0.1))
        return path, {"y": [1, 2]} if kind == "dit" else {}

    return made


def both(path, device, precision):
    """The model of a file as it is usually loaded, and for sampling alone."""
    return (numdiff.load(path, device, precision=precision, inference=way) for way in (False, True))


@pytest.mark.parametrize("kind, precision", [("dit", "fp32"), ("unet", "bf16")])
def test_same_predictions(model_file, rng, kind, precision):
    path, classes = model_file(kind)
    usual, alone = both(path, "cpu", precision)
    x = rng.standard_normal((2, 4, 4, usual.in_channels)).astype(np.float32)
    wanted = usual.predict(x, [3, 500], **classes)
    assert wanted.std() > 0
    np.testing.assert_array_equal(alone.predict(x, [3, 500], **classes), wanted)
    assert model_hash(usual) == model_hash(alone)


def test_same_weights_on_a_device(model_file):
    """Those that are read in float32 are held so, all in 16 bits, in the bits of the usual copy."""
    path, _ = model_file("dit")
    usual, alone = (each.parameters.parameters for each in both(path, "emulator", "fp16"))
    single = [name for name, parameter in alone.items() if parameter.data is not None]
    assert "blocks.0.mlp.fc1.bias" in single and "blocks.0.mlp.fc1.weight" not in single
    for name in single:
        np.testing.assert_array_equal(download(alone[name].data), download(usual[name].data))
    for name, parameter in usual.items():
        np.testing.assert_array_equal(download(alone[name].half), download(parameter.half))


def test_refusals(model_file):
    path, _ = model_file("dit")
    model = numdiff.load(path, "cpu", inference=True)
    for use in (
        lambda: model.arrays(),
        lambda: model.gradients(),
        lambda: copy.deepcopy(model),
        lambda: model.compute_in_half("bfloat16"),
        lambda: model.parameters.freeze(["blocks.*"]),
    ):
        with pytest.raises(UsageError, match="loaded for sampling alone.*inference=False"):
            use()
    with pytest.raises(NumdiffError, match="missing x_embedder.proj.weight"):
        inference_model(DiT, model.options, "cpu", {})


@pytest.mark.parametrize("name", ["XL/2", "unet"])
def test_bytes_on_a_gpu(name):
    """Loading a model, and what it holds then, take about two bytes a parameter."""
    device, taken = Measuring(CARDS[-1]), []
    device.arena = Arena(lambda nbytes: taken.append(nbytes) or (1 << 40) + sum(taken) - nbytes)
    options = {"hidden_size": 1152, "depth": 2, "num_heads": 16} if name == "XL/2" else {}
    kind = UNet if name == "unet" else DiT
    model = inference_model(kind, options, device, Zeros)
    model.compute_in_half()
    parameters = model.parameters
    half = 2 * parameters.total
    assert half < device.arena.used_bytes < (1.12 if name == "unet" else 1.15) * half
    largest = 4 * max(np.prod(entry["shape"]) for entry in parameters.index)
    assert device.arena.peak_bytes - device.arena.used_bytes <= largest
    assert 0 < len(read_in_single(model, np.float16)) < len(parameters.index)


class Zeros(dict):
    """Zeros of a model's parameters, made when they are looked at."""

    def __init__(self, parameters):
        super().__init__({entry["name"]: entry["shape"] for entry in parameters.index})

    def __getitem__(self, name):
        return np.zeros(super().__getitem__(name), np.float32)
