"""Folders of diffusers' DiTPipeline: written, read again with the same bits, and refused."""

import json

import numpy as np
import pytest
from click.testing import CliRunner

from cli.main import main
from numdiff.errors import NumdiffError, UsageError
from numdiff.extras.convert.autoencoders import write_autoencoder
from numdiff.extras.convert.kinds.pipeline_files import read_pipeline, scheduler_config
from numdiff.extras.convert.pipelines import convert_pipeline
from numdiff.nn import DiT
from numdiff.nn.autoencoder import Autoencoder
from numdiff.training.autoencoders import load_autoencoder
from numdiff.training.model_files import read_any, write_model_file

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


@pytest.fixture
def files(tmp_path, monkeypatch):
    """dit.h5 and vae.h5 in the current folder; returns the weights of both."""
    monkeypatch.chdir(tmp_path)
    dit = DiT(**SMALL, device="cpu", seed=1)
    write_model_file("dit.h5", dit.options, dit.arrays(), None, 7, "dit", classes=["cat", "dog"])
    vae = Autoencoder(
        image_size=8,
        model_channels=32,
        channel_mult=(1, 1),
        num_res_blocks=1,
        scaling_factor=0.5,
        shift_factor=0.25,
        device="cpu",
    )
    write_autoencoder("vae.h5", vae.options, vae.arrays())
    return dit.arrays(), vae.arrays()


def run(*arguments):
    return CliRunner().invoke(main, list(arguments))


def test_a_pipeline_is_written_and_read(files, tmp_path):
    command = ["convert", "dit.h5", "whole", "--to", "diffusers-pipeline", "--vae", "vae.h5"]
    for _ in range(2):  # over itself, too
        result = run(*command)
        assert result.exit_code == 0, result.output
        assert "for block in pipeline.transformer.transformer_blocks: block" in result.output
        assert "takes 1000 for no class, which this model of 2 classes does not" in result.output
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
        assert theirs.keys() == own.keys()
        assert all(np.array_equal(theirs[name], own[name]) for name in own)


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


def test_what_is_no_pipeline_is_refused(files, tmp_path):
    vae = Autoencoder(
        image_size=8,
        model_channels=32,
        channel_mult=(1, 1),
        num_res_blocks=1,
        latent_channels=8,
        device="cpu",
    )
    write_autoencoder("other.h5", vae.options, vae.arrays())
    flow = {"path": "linear", "prediction": "flow"}
    for source, target, options, sentence in (
        ("dit.h5", "whole", {}, "a pipeline has an autoencoder, and dit.h5 names none"),
        ("dit.h5", "whole.h5", {"vae": "vae.h5"}, "it is a folder: give a name without an ending"),
        ("dit.h5", "whole", {"vae": "other.h5"}, "of 8 channels, and dit.h5 makes 4"),
        ("flow.h5", "whole", {"vae": "vae.h5"}, "this one is of the path linear: leave --to out"),
    ):
        dit = DiT(**SMALL, device="cpu")
        write_model_file("flow.h5", dit.options, dit.arrays(), flow, 0, "dit")
        with pytest.raises(UsageError, match=sentence):
            convert_pipeline(source, target, **options)
    assert not (tmp_path / "whole").exists()
    with pytest.raises(UsageError, match="this one sees timesteps times 2: leave --to out"):
        scheduler_config({"steps": 9, "prediction": "eps", "timestep_scale": 2.0})
    result = run("convert", "dit.h5", "a", "--vae", "vae.h5")
    assert "--vae vae.h5 needs --to diffusers-pipeline" in result.output
    result = run("convert", "dit.h5", "a", "--to", "diffusers-pipeline", "--conv-resample")
    assert "--conv-resample is of a UNet" in result.output
    result = run("convert", "vae.h5", "a", "--to", "diffusers-pipeline")
    assert "--to means nothing for an autoencoder" in result.output
