import itertools
from types import SimpleNamespace

import numpy as np
import pytest

import numdiff.device.emulator
from numdiff.benchmark.sample import NumdiffSample, bench_sample
from numdiff.benchmark.step import RandomImages
from numdiff.benchmark.torch_sample import SAMPLERS, TorchSample
from numdiff.errors import NumdiffError, UsageError
from numdiff.extras.convert.dit import without_padding
from numdiff.extras.convert.layout import to_torch_layout
from numdiff.training.options import resolve
from tests.conftest import needs

from .fake_gpu import FakeGpu
from .test_profile import TINY_DIT, small_unet


def tiny_dit(**more):
    return resolve({**TINY_DIT, "device": "cpu", **more})


def test_samples_are_measured():
    result = bench_sample(small_unet(), batches=2, warmup=0, sampler="heun", steps=3)
    assert result["ms_fastest"] <= result["ms"] <= result["ms_slowest"] and result["versus"] == []
    assert result["evaluations"] == 5 and result["images_asked"] == 2  # heun in t: once to 0
    assert result["ms_per_evaluation"] == pytest.approx(result["ms"] / 5)
    assert result["images_per_second"] == pytest.approx(2e3 / result["ms"])
    assert (
        result["first_batch_s"] > 0
        and result["second_batch_s"] > 0
        and result["peak_of"] == "process"
    )
    with pytest.raises(UsageError, match="--batches"):
        bench_sample(small_unet(), batches=0)


def test_guidance_and_latents():
    """Guidance evaluates twice the images, and counts their arithmetic; latents come as floats;
    pixels as bytes."""
    options = tiny_dit(channels=4, class_cond=True, num_classes=7, batch=3)
    plain, guided = (
        NumdiffSample(options, sampler="ddim", steps=2, cfg_scale=scale) for scale in (None, 4.0)
    )
    assert plain.images_asked == 3 and guided.images_asked == 6
    assert guided.images.dtype == np.float32 and guided.images.shape == (3, 4, 4, 4)
    assert not np.array_equal(plain.images, guided.images)
    assert NumdiffSample(tiny_dit(), steps=1).images.dtype == RandomImages(1, 4, 3).dtype
    with pytest.raises(UsageError, match="guidance needs a model with a null class"):
        bench_sample(small_unet(), cfg_scale=4.0)


def test_a_diffusion_of_the_options():
    """What the model predicts and its schedule are the preset's."""
    assert NumdiffSample(tiny_dit(prediction="v"), steps=1).sampling.diffusion.prediction == "v"


@pytest.mark.parametrize("eager", [False, True])
def test_on_a_gpu(monkeypatch, eager):
    """Graphs are captured before the clock runs, and kept from batch to batch."""
    gpu = FakeGpu()
    monkeypatch.setattr(numdiff.device.emulator, "get_emulator", lambda **_: gpu)
    options = resolve({**TINY_DIT, "device": "emulator", "channels": 4, "eager": eager})
    sample = NumdiffSample(options, steps=4)
    captured = gpu.captured
    assert captured == 0 if eager else captured > 0
    sample.run()
    assert gpu.captured == captured
    result = bench_sample(options, batches=1, warmup=0, steps=2)
    assert result["device"] == gpu.device_name and result["peak_of"] == "device arenas"
    assert result["peak_mib"] == gpu.peak_bytes / 2**20 > 0 and result["mfu"] > 0


def test_a_mode_that_fails_is_said(monkeypatch):
    from numdiff.benchmark import torch_step

    monkeypatch.setattr(torch_step, "require_torch", lambda: None)
    rows = bench_sample(tiny_dit(), 1, 0, [("graphs", "fp32")], steps=1)["versus"]
    assert "ms" not in rows[0] and (
        "graphs need a GPU" in rows[0]["fault"] or "torch" in rows[0]["fault"]
    )


def test_a_sampler_that_pytorchs_side_lacks_is_said():
    with pytest.raises(
        NumdiffError, match="there is no midpoint for PyTorch; use ddpm, .*, or leave --versus out"
    ):
        TorchSample(small_unet(), SimpleNamespace(sampler="midpoint", function=None))


# With PyTorch -------------------------------------------------------------------------------------

CASES = [("unet", sampler, {}) for sampler in SAMPLERS] + [
    ("unet", "ddim", {"class_cond": True, "class_dropout": 0.1, "cfg_scale": 3.0}),
    # learned variance
    ("dit", "ddpm", {"channels": 4, "class_cond": True, "num_classes": 5, "learn_sigma": True}),
    (
        "dit",
        "dpm++2m",
        {"channels": 4, "class_cond": True, "num_classes": 5, "cfg_scale": 3.0, "prediction": "v"},
    ),
    (
        "dit",
        "ddim",
        {
            "class_cond": True,
            "num_classes": 5,
            "cfg_scale": 3.0,
            "learn_sigma": True,
            "prediction": "eps",
        },
    ),
]


@pytest.mark.parametrize("model, sampler, more", CASES)
@needs("torch")
def test_twins_sample_the_same(model, sampler, more):
    """From the same weights and noise PyTorch's side makes the images that numdiff makes."""
    import torch

    scale = more.pop("cfg_scale", None) if (more := dict(more)) else None
    options = (
        tiny_dit(batch=3, **more)
        if model == "dit"
        else small_unet(
            batch=3, channel_mult=(1, 2), num_res_blocks=1, attention_resolutions=(8,), **more
        )
    )
    ours = NumdiffSample(options, sampler=sampler, steps=4, cfg_scale=scale)
    theirs = TorchSample(options, ours.sampling)
    state = to_torch_layout(ours.model.arrays())
    if model == "dit":
        state = without_padding(state, ours.model.options)
    state = {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in state.items()}
    if hasattr(theirs.model, "pos_embed"):
        state["pos_embed"] = theirs.model.pos_embed.data
    theirs.model.load_state_dict(state)
    theirs.noise = philox(torch, ours.sampling)
    theirs.run()
    assert theirs.images.dtype == ours.images.dtype and theirs.images.shape == ours.images.shape
    ours, theirs = ours.images.astype(np.float64), theirs.images.astype(np.float64)
    assert np.abs(theirs - ours).max() <= (
        1 if options.channels is None else 1e-4 * np.abs(ours).max()
    )
    assert ours.std() > 0


def philox(torch, sampling):
    """numdiff's own noise for PyTorch's side."""
    from numdiff.kernels.random import PURPOSE_SAMPLER, random_normal

    shape, samples = (sampling.batch, *sampling.shape), np.arange(sampling.batch, dtype=np.uint32)
    return lambda i: torch.from_numpy(
        np.ascontiguousarray(
            random_normal(
                shape, 0, PURPOSE_SAMPLER, np.array([i + 1], np.uint32), samples
            ).transpose(0, 3, 1, 2)
        )
    )


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@needs("torch")
def test_samples_of_pytorch(precision):
    options = tiny_dit(class_cond=True, num_classes=5)
    result = bench_sample(options, 1, 0, [("eager", precision)], steps=2, cfg_scale=2.0)
    row = result["versus"][0]
    assert row["ms"] == pytest.approx(2 * row["ms_per_evaluation"]) and row["first_s"] > 0
    assert row["ratio"] == pytest.approx(row["ms"] / result["ms"])


@needs("torch")
def test_compiled_by_pytorch():
    """One function is compiled for all levels: no level is compiled again."""
    import torch

    options, compiled = tiny_dit(), itertools.count()
    ours = NumdiffSample(options, sampler="ddim", steps=3)
    twin = TorchSample(options, ours.sampling)

    def backend(module, _):
        next(compiled)
        return module.forward

    torch._dynamo.reset()
    twin.evaluate = torch.compile(twin.evaluate, backend=backend)
    twin.run()
    twin.run()
    twin.close()
    assert next(compiled) == 1
