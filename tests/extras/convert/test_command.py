import pathlib
import re

import numpy as np
import pytest

from tests.command import output_of, refusal_of
from tests.extras.convert.weights import same, write_npz
from tests.reference import stored


@pytest.fixture
def weights():
    shapes = stored.load("model_plain")["info"]["shapes"]
    return write_npz("w.npz", stored.state_dict(shapes, 1))


PLAIN = "--image-size 8 --num-head-channels 32"  # what the weights do not say


def test_convert_and_export(weights):
    output = output_of("convert w.npz m.h5", PLAIN, "--attention-order new")
    assert "64 × (1, 2), 1 block a level" in output and "32 channels a head, new order" in output
    output_of("convert m.h5 x.npz")
    assert same(np.load("x.npz"), np.load("w.npz"))


def test_wrong_options(weights):
    before = pathlib.Path(weights).read_bytes()
    for words, sentence in (
        ("m.h5 --image-size 0", "--image-size"),
        ("m.h5 --schedule wavy", "--schedule"),
        ("m.h5 --image-size 8", "--num-head-channels"),
        (f"w.npz {PLAIN}", "which is read; give another name"),
    ):
        assert sentence in refusal_of("convert w.npz", words)
    assert pathlib.Path(weights).read_bytes() == before


@pytest.mark.parametrize(
    "arrays, what",
    [
        (
            {"arr_0": np.zeros((1, 8, 8, 3), np.uint8), "numdiff": np.array("{}")},
            r"samples, .* \(arr_0\)",
        ),
        ({"mu": np.zeros(3), "sigma": np.eye(3)}, r"statistics of images \(mu\)"),
        ({"features": np.zeros((3, 2))}, r"features of images \(features\)"),
    ],
)
def test_a_file_without_weights_is_reported(arrays, what):
    """To every command that takes weights."""
    np.savez("s.npz", **arrays)
    for words in ("convert s.npz m.h5", "sample s.npz", "train unet --init s.npz --dry-run"):
        want = rf"Error: .*cannot use .*s\.npz: it holds {what}, and no weights; give the model of which they are\.$"
        assert re.search(want, refusal_of(words))


def test_a_folder_of_runs_is_reported(tmp_path):
    (tmp_path / "00000-unet").mkdir()
    assert refusal_of("convert", tmp_path, "m.h5") == (
        f"Error: {tmp_path} is a folder that holds runs, and not itself a run: give one of them, such as "
        f"{tmp_path / '00000-unet'}."
    )


def test_what_the_message_says_of_the_diffusion(weights):
    """Rescaled timesteps are an option and reported; an export names guided-diffusion's flags."""
    command = f"convert w.npz m.h5 {PLAIN} --diffusion-steps 4000"
    assert "--no-rescale-timesteps" in refusal_of(command)
    assert (
        "diffusion   4000 steps, cosine schedule, predicts eps, the model sees timesteps times 0.25"
        in output_of(command, "--rescale-timesteps --schedule cosine")
    )
    output = output_of("convert m.h5 x.npz")
    assert "guided-diffusion its scripts need: --image_size 8" in output
    assert "no flag there levels that are joined without convolutions" in output
    assert "no flag there" not in output_of("convert m.h5 x.npz --conv-resample")


def test_help_names_every_option():
    text = output_of("convert --help")
    names = "weights image-size num-heads attention-order max-period prediction rescale-timesteps"
    for name in (*names.split(), "conv-resample"):
        assert f"--{name}" in text
