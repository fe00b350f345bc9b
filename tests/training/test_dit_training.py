"""Training a DiT: classes, class dropout, learned variance, latents. On the CPU, and on a GPU where
there is one."""

import h5py
import numpy as np
import pytest

import numdiff
from numdiff.errors import UsageError
from numdiff.extras.convert.dit import with_padding, without_padding
from numdiff.extras.convert.layout import to_torch_layout
from numdiff.training import Trainer
from numdiff.training.checkpoint import load_checkpoint, newest_checkpoint
from numdiff.training.options import resolve
from numdiff.training.run import train
from tests import models
from tests.conftest import needs
from tests.models import small_dit
from tests.training.test_trainer import FixedImages, device, losses  # noqa: F401

pytestmark = pytest.mark.usefixtures("no_curves")


def make(device="cpu", images=None, labels=None, seed=3, model=(), **options):  # noqa: F811
    """A trainer of a small DiT on 24 images of three classes, unless specified otherwise."""
    labels = np.arange(24, dtype=np.int32) % 3 if labels is None else labels
    sizes = {"patch_size": 2, "hidden_size": 64, "depth": 2, "num_classes": 3, "class_dropout": 0.3}
    net = small_dit(**{**sizes, **dict(model)}, device=device, seed=seed)
    return Trainer(
        net,
        FixedImages(images, labels),
        **{
            "batch": 8,
            "learning_rate": 1e-3,
            "warmup_steps": 2,
            "seed": seed,
            "flip": False,
            "precision": "fp32",
            **options,
        },
    )


# 106 channels in the MLP: no multiple of 8
LIGHTNING = {**models.LIGHTNING, "mlp_ratio": 2.5, "learn_sigma": False}


def test_the_block_of_lightningdit_learns_and_resumes_bitwise(device):  # noqa: F811
    flow = {
        "model": LIGHTNING,
        "diffusion": {"path": "linear"},
        "learning_rate": 6e-3,
        "weight_decay": 0.1,
    }
    images = (
        np.random.default_rng(0).integers(0, 256, (24, 1, 1, 3), np.uint8).repeat(8, 1).repeat(8, 2)
    )
    whole, first, second = (make(device, images, **flow) for _ in range(3))
    values = losses(whole, 20)
    assert np.mean(values[-5:]) < 0.75 * np.mean(values[:5])
    assert losses(first, 10) == values[:10]
    second.load_state(first.state())
    assert losses(second, 10) == values[10:]
    for name, array in whole.state().items():
        np.testing.assert_array_equal(array, second.state()[name], err_msg=name)
    # what pads the width is left out and added: still zeros
    ours = to_torch_layout(whole.model.arrays())
    again = with_padding(without_padding(ours, whole.model.options), whole.model.options)
    assert all(np.array_equal(again[name], array) for name, array in ours.items())


def test_sparse_linear_attention_trains_and_resumes_bitwise():
    """Its layer, which starts from zero, learns; AdamW has it under Muon, too."""
    model = {"image_size": 18, "depth": 1, "attention": "sla", "sla_topk": 0.5}
    images = np.random.default_rng(0).integers(0, 256, (24, 18, 18, 3), np.uint8)
    for more in ({}, {"optimizer": "muon"}):
        model["sla_linear"] = "all" if more else "rest"
        whole, first, second = (
            make("cpu", images, model=model, learning_rate=3e-3, **more) for _ in range(3)
        )
        values = losses(whole, 4)
        assert np.abs(whole.model.arrays()["blocks.0.attn.proj_l.weight"]).max() > 1e-4
        assert losses(first, 2) == values[:2]
        second.load_state(first.state())
        assert losses(second, 2) == values[2:]
        for name, array in whole.state().items():
            np.testing.assert_array_equal(array, second.state()[name], err_msg=name)


@needs("gpu")
def test_gpu_and_cpu_engine_give_the_same_ten_losses():
    np.testing.assert_allclose(losses(make("cpu"), 10), losses(make("cuda"), 10), rtol=1e-4)


def test_the_learned_variance_is_trained_and_the_error_falls(device):  # noqa: F811
    images = (
        np.random.default_rng(0).integers(0, 256, (24, 1, 1, 3), np.uint8).repeat(8, 1).repeat(8, 2)
    )
    trainer = make(device, images, learning_rate=6e-3)
    values = losses(trainer, 40)
    assert np.mean(values[-20:]) < 0.5 * np.mean(values[:10])
    # patch, patch, channels, width
    last = trainer.model.arrays()["final_layer.linear.weight"].reshape(2, 2, 6, 64)
    assert np.abs(last[:, :, :3]).max() > 1e-3 and np.abs(last[:, :, 3:]).max() > 1e-3


def test_labels_that_the_model_does_not_have_are_refused():
    with pytest.raises(
        UsageError, match="labels go from 0 to 5, and the model has 3 classes, from 0"
    ):
        make(labels=np.arange(24, dtype=np.int32) % 6)
    with pytest.raises(UsageError, match="labels go from -1 to 22"):
        make(labels=np.arange(24, dtype=np.int32) - 1)
    trainer = make()
    trainer.dataset.labels = None
    with pytest.raises(UsageError, match="has classes and the dataset has no labels"):
        Trainer(trainer.model, trainer.dataset)


def test_a_run_on_latents(tmp_path, rng):
    """Float images of four channels are taken as they are; there is no picture of them; more
    classes may come."""
    with h5py.File(tmp_path / "latents.h5", "w") as file:
        file["images"] = 3 * rng.standard_normal((40, 8, 8, 4)).astype(np.float32)
        file["labels"], file.attrs["classes"] = np.arange(40) % 4, ["a", "b", "c", "d"]
    options = resolve(
        {
            "model": "dit",
            "device": "cpu",
            "data": str(tmp_path / "latents.h5"),
            "image_size": 8,
            "num_classes": 10,
            "architecture": "DiT-Tiny",
            "patch_size": 2,
            "hidden_size": 32,
            "depth": 1,
            "heads": 1,
            "learn_sigma": True,
            "batch": 4,
            "steps": 3,
            "outdir": str(tmp_path / "runs"),
        }
    )
    lines = []
    folder = train(options, echo=lines.append)
    assert "DiT-Tiny, 8×8×4, 10 classes" in "\n".join(lines)
    assert not list(folder.glob("*samples*"))
    buffers, meta = load_checkpoint(newest_checkpoint(folder))
    assert meta["classes"] == ["a", "b", "c", "d"] and np.isfinite(buffers["parameters"]).all()
    model = numdiff.load(folder, "cpu")
    assert (model.in_channels, model.num_classes, model.null_class, model.out_channels) == (
        4,
        10,
        10,
        8,
    )
    images = numdiff.sample(model, count=2, steps=2, y=[0, 9])
    assert images.dtype == np.float32 and images.shape == (2, 8, 8, 4)
