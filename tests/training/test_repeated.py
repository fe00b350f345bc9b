"""Each picture that `numdiff sample` writes names the command that makes the same pixels again:
for models of each kind, of latents, converted ones, and for each way of sampling."""

import json
import pathlib
import shlex

import numpy as np
import pytest
from click.testing import CliRunner
from PIL import Image

from numdiff.extras.convert.autoencoders import write_autoencoder
from numdiff.extras.convert.models import convert
from numdiff.nn import DiT, UNet
from numdiff.nn.autoencoder import Autoencoder
from numdiff.training.model_files import write_model_file
from numdiff.training.picture_record import read_record
from numdiff_cli.main import main
from tests.conftest import exhaustive

SIZES = {"image_size": 8, "model_channels": 32, "channel_mult": (1,), "num_res_blocks": 1}
CLASSES = ["1", "a cat", "0"]  # names that look like other indices


def run(*words):
    result = CliRunner().invoke(main, list(map(str, words)))
    assert result.exit_code == 0, result.output
    return result.output


def write(path, made, **meta):
    rng = np.random.default_rng(0)
    made.parameters.load_flat(0.02 * rng.standard_normal(made.parameters.total))
    write_model_file(path, made.options, made.arrays(), model=made.kind, **meta)


@pytest.fixture
def models(tmp_path, rng, monkeypatch):
    """A folder with models of each kind, an autoencoder, and two pictures."""
    monkeypatch.chdir(tmp_path)
    small = {"depth": 1, "hidden_size": 32, "num_heads": 2, "patch_size": 2, "device": "cpu"}
    made = UNet(**SIZES, attention_resolutions=(), num_classes=3, class_dropout=0.1, device="cpu")
    write("unet.h5", made, classes=CLASSES)
    made = DiT(image_size=8, in_channels=3, num_classes=3, class_dropout=0.1, **small)
    write("dit.h5", made, classes=CLASSES)
    write("latents.h5", DiT(image_size=4, in_channels=4, num_classes=None, **small))
    made = Autoencoder(**{**SIZES, "channel_mult": (1, 1)}, device="cpu")
    write_autoencoder("vae.h5", made.options, made.arrays())
    for name in ("photo.png", "other.png"):
        Image.fromarray(rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)).save(name)


def pixels(path):
    """Of all frames."""
    with Image.open(path) as picture:
        frames = []
        for k in range(picture.n_frames):
            picture.seek(k)
            frames.append(np.asarray(picture.convert("RGB")))
    return np.stack(frames)


def described(path):
    """{word: rest} of the lines of `numdiff info`."""
    return dict(line.split(maxsplit=1) for line in run("info", path).splitlines())


WAYS = {
    "UNet": ["unet.h5", "--class", "0", "--class", "a cat", "--cfg-scale", 2],
    "DiT": [
        "dit.h5",
        "--sampler",
        "heun",
        "--steps",
        3,
        "--cfg-interval",
        "0.3,200",
        "--cfg-scale",
        3,
    ],
    "latents": ["latents.h5", "--vae", "vae.h5"],
    "SDEdit": ["unet.h5", "--init-image", "photo.png", "--strength", 0.5],
    "SDEdit of latents": ["latents.h5", "--vae", "vae.h5", "--init-image", "photo.png"],
    "inpainting": ["unet.h5", "--inpaint", "photo.png", "--mask", "left", "--jump", 1],
    "interpolation": ["dit.h5", "--slerp", 2, "--count", 4],
    "inversion": ["unet.h5", "--invert", "photo.png", "--invert", "other.png", "--slerp", 3],
    "noise": ["unet.h5", "--sampler", "ddim", "--eta", 1, "--no-clip", "--skip", 1],
    "autoguidance": ["unet.h5", "--guide-with", "dit.h5", "--class", "1"],
    "converted": ["converted.npz", "--class", "0"],
    "diffusers": ["folder", "--class", "0"],
    "animation": ["unet.h5", "--animation", "frames.png", "--frames", 2],
}


@pytest.mark.parametrize(
    "way",
    [pytest.param(w, marks=[] if w in ("UNet", "animation") else [exhaustive]) for w in WAYS],
)
def test_the_command_makes_the_same_pixels(models, way):
    if way == "converted":
        convert("unet.h5", "converted.npz")
    if way == "diffusers":
        plain = DiT(image_size=8, num_classes=3, class_dropout=0.1, hidden_size=32, depth=1, num_heads=2,
                    patch_size=2, in_channels=4, learn_sigma=True, device="cpu")  # fmt: skip
        write("plain.h5", plain, classes=CLASSES)
        convert("plain.h5", "folder")
        WAYS[way] = ["folder", "--vae", "wide.h5", "--class", "0"]
        made = Autoencoder(**{**SIZES, "image_size": 16, "channel_mult": (1, 1)}, device="cpu")
        write_autoencoder("wide.h5", made.options, made.arrays())
    words = ["sample", *WAYS[way], "--device", "cpu", "--seed", 5]
    words += [] if "--steps" in words else ["--steps", 2]
    words += [] if {"--count", "--invert"} & set(words) else ["--count", 3]
    name = "frames.png" if way == "animation" else "one.png"
    words += ["--json", "made.json"] + ([] if way == "animation" else ["--grid", name])
    output = run(*words)
    first, said = pixels(name), described(name)
    assert json.loads(pathlib.Path("made.json").read_text()) == read_record(name)
    assert f"hash {read_record(name)['model_hash']}" in output and "hash" in said["model"]
    again = shlex.split(said["command"])
    assert again[0] == "numdiff"
    pathlib.Path(name).unlink()
    run(*again[1:])
    assert np.array_equal(pixels(name), first) and len(np.unique(first)) > 4
    run(*[6 if word == "5" else word for word in again[1:]])  # the seed, which must matter
    assert way == "inversion" or not np.array_equal(pixels(name), first)


def test_what_a_picture_says_of_its_images(models):
    run("sample", "unet.h5", "--count", 4, "--slerp", 2, "--steps", 2, "--class", "0", "--seed", 7,
        "--device", "cpu", "--grid", "one.png")  # fmt: skip
    record, said = read_record("one.png"), described("one.png")
    assert record["class_counts"] == [["0", 4]] and said["classes"] == "0 (4)"
    assert record["seeds"] == [7, 9] and said["images"].endswith("seeds 7 to 9")
