"""Folders of diffusers' DiTPipeline: written, read again with the same bits, and refused."""

import json
import os

import pytest

from numdiff.errors import NumdiffError, UsageError
from numdiff.extras.convert.autoencoders import write_autoencoder
from numdiff.extras.convert.kinds.pipeline_files import read_pipeline, scheduler_config
from numdiff.nn.autoencoder import Autoencoder
from numdiff.training.autoencoders import load_autoencoder
from numdiff.training.model_files import read_any
from tests.command import output_of, refusal_of
from tests.extras.convert.weights import same
from tests.models import small_dit, write

SMALL = {
    "image_size": 4,
    "in_channels": 4,
    "patch_size": 2,
    "hidden_size": 32,
    "depth": 1,
    "num_heads": 2,
    "num_classes": 2,
    "class_dropout": 0.1,
}


def write_vae(path, **options):
    sizes = {"image_size": 8, "model_channels": 32, "channel_mult": (1, 1), "num_res_blocks": 1}
    vae = Autoencoder(**sizes, **options, device="cpu")
    write_autoencoder(path, vae.options, vae.arrays())
    return vae.arrays()


@pytest.fixture
def files():
    """dit.h5 and vae.h5 in the current folder; returns the weights of both."""
    dit = small_dit(**SMALL, seed=1)
    write("dit.h5", dit, step=7, classes=["cat", "dog"])
    return dit.arrays(), write_vae("vae.h5", scaling_factor=0.5, shift_factor=0.25)


def test_a_pipeline_is_written_and_read(files, tmp_path):
    for _ in range(2):  # over itself, too
        output = output_of("convert dit.h5 whole --to diffusers-pipeline --vae vae.h5")
        assert "for block in pipeline.transformer.transformer_blocks: block" in output
        assert "takes 1000 for no class, which this model of 2 classes does not" in output
    index = json.loads((tmp_path / "whole" / "model_index.json").read_text())
    assert index["_class_name"] == "DiTPipeline" and index["id2label"] == {"0": "cat", "1": "dog"}
    for part in ("scheduler", "transformer", "vae"):
        (config,) = (tmp_path / "whole" / part).glob("*config.json")
        assert json.loads(config.read_text())["_class_name"] == index[part][1]
    found = read_any("whole")
    assert found.classes == ["cat", "dog"] and found.diffusion["steps"] == 1000
    assert found.options["class_dropout"] == 0.1
    vae = load_autoencoder("whole", "cpu")
    assert (vae.scaling_factor, vae.shift_factor) == (0.5, 0.25)
    for theirs, own in zip((found.arrays, vae.arrays()), files, strict=True):
        assert same(theirs, own, in_order=False)


def test_the_scheduler_of_another_program_is_read(files, tmp_path):
    """Where the weights do not name the diffusion, as in published folders."""
    folder = tmp_path / "whole"
    (folder / "scheduler").mkdir(parents=True)
    (folder / "model_index.json").write_text(json.dumps({"id2label": {"0": "a", "2": "b"}}))
    config = folder / "scheduler" / "scheduler_config.json"
    assert read_pipeline(folder) == {}  # no scheduler, and labels with a gap
    for diffusion in (
        {"steps": 1000, "schedule": "linear", "prediction": "eps"},
        {"steps": 50, "schedule": "cosine", "prediction": "v"},
    ):
        config.write_text(json.dumps(scheduler_config(diffusion)))
        assert read_pipeline(folder) == {"diffusion": diffusion}
    for change, sentence in (
        ({"beta_schedule": "scaled_linear"}, "has the schedule 'scaled_linear' from"),
        ({"beta_schedule": "linear", "beta_start": "x"}, "has the schedule 'linear' from x"),
        ({"prediction_type": "score"}, "has the prediction_type 'score', which numdiff does not"),
    ):
        config.write_text(json.dumps({**scheduler_config(diffusion), **change}))
        with pytest.raises(NumdiffError, match=sentence):
            read_pipeline(folder)
    config.write_text("{")
    assert read_pipeline(folder) == {}


def test_what_is_no_pipeline_is_refused(files):
    write_vae("other.h5", latent_channels=8)
    write("flow.h5", small_dit(**SMALL), {"path": "linear", "prediction": "flow"})
    pipeline = "--to diffusers-pipeline"
    for words, sentence in (
        (f"dit.h5 whole {pipeline}", "a pipeline has an autoencoder, and dit.h5 names none"),
        (
            f"dit.h5 whole.h5 {pipeline} --vae vae.h5",
            "it is a folder: give a name without an ending",
        ),
        (f"dit.h5 whole {pipeline} --vae other.h5", "of 8 channels, and dit.h5 makes 4"),
        (
            f"flow.h5 whole {pipeline} --vae vae.h5",
            "this one is of the path linear: leave --to out",
        ),
        ("dit.h5 whole --vae vae.h5", "--vae vae.h5 needs --to diffusers-pipeline"),
        (f"dit.h5 whole {pipeline} --conv-resample", "--conv-resample is of a UNet"),
        (f"vae.h5 whole {pipeline}", "--to means nothing for an autoencoder"),
    ):
        assert sentence in refusal_of("convert", words)
    assert sorted(os.listdir()) == ["dit.h5", "flow.h5", "other.h5", "vae.h5"]
    with pytest.raises(UsageError, match="this one sees timesteps times 2: leave --to out"):
        scheduler_config({"steps": 9, "prediction": "eps", "timestep_scale": 2.0})
