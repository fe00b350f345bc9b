"""A diffusion model of latents with its autoencoder: the grids of a run and of `numdiff sample` are
pictures."""

import json
import pathlib

import h5py
import numpy as np
import pytest
from PIL import Image

from numdiff.data.dataset import Dataset
from numdiff.diffusion.sampling import to_uint8
from numdiff.errors import UsageError
from numdiff.extras.convert.autoencoders import write_autoencoder
from numdiff.extras.encode.latents import encode_dataset
from numdiff.nn.autoencoder import Autoencoder
from numdiff.training.autoencoders import load_autoencoder
from numdiff.training.options import resolve
from numdiff.training.run import train
from numdiff.training.sampling import sample_command

SIZES = {"image_size": 8, "model_channels": 32, "channel_mult": (1, 1), "num_res_blocks": 1}
DIT = {
    "model": "dit",
    "device": "cpu",
    "depth": 1,
    "hidden_size": 32,
    "heads": 2,
    "steps": 1,
    "batch": 2,
    "sample_count": 2,
    "sample_steps": 1,
    "sample_every": 1,
    "class_cond": False,
    "vae": "vae.h5",
    "data": "latents.h5",
}


def silent(text):
    pass


@pytest.fixture
def latents(tmp_path, rng, monkeypatch):
    """A folder with latents.h5, the autoencoder vae.h5 that made them, and another one."""
    monkeypatch.chdir(tmp_path)
    for seed, name in enumerate(("vae.h5", "other.h5")):
        model = Autoencoder(**SIZES, device="cpu", seed=seed)
        write_autoencoder(name, model.options, model.arrays())
    wide = Autoencoder(**SIZES, latent_channels=8, device="cpu")
    write_autoencoder("wide.h5", wide.options, wide.arrays())
    with h5py.File("photos.h5", "w") as file:
        file["images"] = rng.integers(0, 256, (4, 8, 8, 3), dtype=np.uint8)
    encode_dataset("photos.h5", "latents.h5", "vae.h5", device="cpu", echo=silent)


def test_a_run_draws_pictures_and_sample_knows_its_decoder(latents):
    folder = pathlib.Path(train(resolve(DIT), echo=silent))
    with Image.open(folder / "samples-00000001.png") as grid:
        assert grid.size[0] >= 16
    options = {"steps": 1, "device": "cpu", "echo": silent}
    pictures = sample_command(
        str(folder), count=2, npz="pictures.npz", grid="grid.png", animation="a.gif", **options
    )
    assert pictures.shape == (2, 8, 8, 3) and pictures.dtype == np.uint8
    assert (np.load("pictures.npz")["arr_0"] == pictures).all()
    assert json.loads((folder / "options.json").read_text())["vae"] == "vae.h5"

    # a picture to start from is encoded, and at strength 0 decoded again
    Image.fromarray(pictures[0]).save("p.png")
    started = {"init_image": "p.png", "strength": 0.0, "grid": "grid.png"}
    again = sample_command(str(folder), count=1, **started, **options)
    own = load_autoencoder("vae.h5", "cpu")
    mean, _ = own.encode(pictures[:1].astype(np.float32) / np.float32(127.5) - 1)
    assert np.abs(to_uint8(own.decode(mean)).astype(int) - again).max() <= 1

    # so is a picture that is inverted, and one between two
    Image.fromarray(pictures[1]).save("q.png")
    inverted = {"invert": ("p.png", "q.png"), "grid": "grid.png", **options, "sampler": "ddim"}
    made = sample_command(str(folder), **inverted)
    row = sample_command(str(folder), slerp=3, **inverted)
    assert made.shape == (2, 8, 8, 3) and row.shape == (3, 8, 8, 3)
    assert np.abs(row[[0, 2]].astype(int) - made).max() <= 1

    pathlib.Path("vae.h5").rename("moved.h5")  # then the latents alone can be made
    with pytest.raises(UsageError, match="give the --vae FILE that encodes it, too"):
        sample_command(str(folder), count=1, **started, **options)
    with pytest.raises(UsageError, match="and --invert takes a picture: give the --vae FILE"):
        sample_command(str(folder), **inverted)
    raw = sample_command(str(folder), count=2, npz="latents.npz", **options)
    assert raw.shape == (2, 4, 4, 4) and raw.dtype == np.float32
    vae = load_autoencoder("moved.h5", "cpu")
    assert np.abs(to_uint8(vae.decode(vae.unscale(raw))).astype(int) - pictures).max() <= 1
    with pytest.raises(
        UsageError, match="give the --vae FILE that decodes them, or --npz FILE.npz alone"
    ):
        sample_command(str(folder), count=2, grid="grid.png", **options)
    assert (
        sample_command(str(folder), count=2, vae="moved.h5", grid="grid.png", **options) == pictures
    ).all()
    with pytest.raises(
        UsageError, match="--vae wide.h5 decodes latents of 8 channels, and the model makes 4"
    ):
        sample_command(str(folder), count=2, vae="wide.h5", grid="grid.png", **options)


@pytest.mark.parametrize(
    "given, message",
    [
        (
            {"vae": "other.h5"},
            "--vae other.h5 is not the autoencoder by which the data were encoded .its weights differ",
        ),
        ({"vae": "wide.h5"}, "decodes latents of 8 channels, and the model makes 4"),
        (
            {"data": "photos.h5"},
            "the images of --data are pictures of 3 channels: leave it out, or run",
        ),
    ],
)
def test_another_autoencoder_is_refused_before_the_first_step(latents, given, message):
    with pytest.raises(UsageError, match=message):
        train(resolve({**DIT, **given}), echo=silent)
    assert not pathlib.Path("runs").exists()


def test_only_files_of_encode_say_by_what_they_were_made(latents):
    with Dataset("latents.h5") as dataset:
        assert dataset.encoded_by["channels"] == 4
    with h5py.File("latents.h5", "r+") as file:
        file.attrs["vae"] = "no JSON"
    with Dataset("latents.h5") as dataset, Dataset("photos.h5") as photos:
        assert dataset.encoded_by is None and photos.encoded_by is None
