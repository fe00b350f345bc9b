"""Each picture that `numdiff sample` writes names the command that makes the same pixels again:
for models of each kind, of latents, converted ones, and for each way of sampling."""

import json
import pathlib

import numpy as np
import pytest
from PIL import Image

from numdiff.extras.convert.autoencoders import write_autoencoder
from numdiff.extras.convert.models import convert
from numdiff.nn.autoencoder import Autoencoder
from numdiff.training.picture_record import read_record
from tests.command import output_of
from tests.conftest import exhaustive
from tests.models import small_dit, small_unet, with_random_weights, write

SIZES = {"image_size": 8, "model_channels": 32, "channel_mult": (1,), "num_res_blocks": 1}
SMALL = {"hidden_size": 32, "patch_size": 2}
CLASSES = ["1", "a cat", "0"]  # names that look like other indices


@pytest.fixture
def models(tmp_path, rng, monkeypatch):
    """A folder with models of each kind, an autoencoder, and two pictures."""
    monkeypatch.chdir(tmp_path)
    for name, made, classes in (
        ("unet", small_unet(num_classes=3, class_dropout=0.1), CLASSES),
        ("dit", small_dit(**SMALL, num_classes=3), CLASSES),
        ("latents", small_dit(**SMALL, image_size=4, in_channels=4, num_classes=None), []),
    ):
        write(f"{name}.h5", with_random_weights(made, 0.02), classes=classes)
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
    return dict(line.split(maxsplit=1) for line in output_of("info", path).splitlines())


WAYS = {
    "UNet": "unet.h5 --class 0 --class 'a cat' --cfg-scale 2",
    "DiT": "dit.h5 --sampler heun --steps 3 --cfg-interval 0.3,200 --cfg-scale 3",
    "latents": "latents.h5 --vae vae.h5",
    "SDEdit": "unet.h5 --init-image photo.png --strength 0.5",
    "SDEdit of latents": "latents.h5 --vae vae.h5 --init-image photo.png",
    "inpainting": "unet.h5 --inpaint photo.png --mask left --jump 1",
    "interpolation": "dit.h5 --slerp 2 --count 4",
    "inversion": "unet.h5 --invert photo.png --invert other.png --slerp 3",
    "noise": "unet.h5 --sampler ddim --eta 1 --no-clip --skip 1",
    "autoguidance": "unet.h5 --guide-with dit.h5 --class 1",
    "converted": "converted.npz --class 0",
    "diffusers": "folder --vae wide.h5 --class 0",
    "animation": "unet.h5 --animation frames.png --frames 2",
}


@pytest.mark.parametrize(
    "way",
    [pytest.param(w, marks=[] if w in ("UNet", "animation") else [exhaustive]) for w in WAYS],
)
def test_the_command_makes_the_same_pixels(models, way):
    if way == "converted":
        convert("unet.h5", "converted.npz")
    if way == "diffusers":
        plain = small_dit(**SMALL, num_classes=3, in_channels=4, learn_sigma=True)
        write("plain.h5", with_random_weights(plain, 0.02), classes=CLASSES)
        convert("plain.h5", "folder")
        made = Autoencoder(**{**SIZES, "image_size": 16, "channel_mult": (1, 1)}, device="cpu")
        write_autoencoder("wide.h5", made.options, made.arrays())
    words = f"sample {WAYS[way]} --device cpu --seed 5 --json made.json"
    words += "" if "--steps" in words else " --steps 2"
    words += "" if "--count" in words or "--invert" in words else " --count 3"
    name = "frames.png" if way == "animation" else "one.png"
    output = output_of(words, "" if way == "animation" else f"--grid {name}")
    first, said = pixels(name), described(name)
    assert json.loads(pathlib.Path("made.json").read_text()) == read_record(name)
    assert f"hash {read_record(name)['model_hash']}" in output and "hash" in said["model"]
    assert said["command"].startswith("numdiff ")
    again = said["command"].removeprefix("numdiff ")
    pathlib.Path(name).unlink()
    output_of(again)
    assert np.array_equal(pixels(name), first) and len(np.unique(first)) > 4
    output_of(again.replace("--seed 5", "--seed 6"))  # the seed, which must matter
    assert way == "inversion" or not np.array_equal(pixels(name), first)


def test_what_a_picture_says_of_its_images(models):
    output_of(
        "sample unet.h5 --count 4 --slerp 2 --steps 2 --class 0 --seed 7 --device cpu --grid one.png"
    )
    record, said = read_record("one.png"), described("one.png")
    assert record["class_counts"] == [["0", 4]] and said["classes"] == "0 (4)"
    assert record["seeds"] == [7, 9] and said["images"].endswith("seeds 7 to 9")
