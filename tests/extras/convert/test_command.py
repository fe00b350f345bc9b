import pathlib
import re

import numpy as np
import pytest
from click.testing import CliRunner

from numdiff.errors import NumdiffError, UsageError
from numdiff.extras.convert.command import convert
from numdiff.extras.convert.files import write_state_dict
from numdiff_cli.main import main
from tests.reference import stored


@pytest.fixture
def weights(tmp_path):
    shapes = stored.load("model_plain")["info"]["shapes"]
    with open("w.npz", "wb") as file:
        write_state_dict(file, stored.state_dict(shapes, 1), "npz")
    return str(tmp_path / "w.npz")


def run(*arguments):
    return CliRunner().invoke(convert, list(arguments))


def test_convert_and_export(tmp_path, weights):
    model, exported = str(tmp_path / "m.h5"), str(tmp_path / "x.npz")
    result = run(
        weights, model, "--image-size", "8", "--num-head-channels", "32", "--attention-order", "new"
    )
    assert result.exit_code == 0, result.output
    assert (
        "64 × (1, 2), 1 block a level" in result.output
        and "32 channels a head, new order" in result.output
    )
    result = run(model, exported)
    assert result.exit_code == 0, result.output
    with np.load(weights) as a, np.load(exported) as b:
        assert a.files == b.files and all(np.array_equal(a[k], b[k]) for k in a.files)


def test_wrong_options(weights):
    assert run(weights, "m.h5", "--image-size", "0").exit_code == 2
    assert run(weights, "m.h5", "--schedule", "wavy").exit_code == 2
    result = run(weights, "m.h5", "--image-size", "8")
    assert isinstance(result.exception, UsageError) and "--num-head-channels" in str(
        result.exception
    )
    before = pathlib.Path(weights).read_bytes()
    result = run(weights, weights, "--image-size", "8", "--num-head-channels", "32")
    assert isinstance(result.exception, NumdiffError) and "which is read; give another name" in str(
        result.exception
    )
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
def test_a_file_without_weights_is_reported(tmp_path, arrays, what):
    """To every command that takes weights."""
    np.savez("s.npz", **arrays)
    source, out = str(tmp_path / "s.npz"), str(tmp_path / "m.h5")
    for command in (
        ["convert", source, out],
        ["sample", source],
        ["train", "unet", "--init", source, "--dry-run"],
    ):
        result = CliRunner().invoke(main, command)
        want = rf"Error: .*cannot use .*s\.npz: it holds {what}, and no weights; give the model of which they are\.\n$"
        assert result.exit_code == 1 and re.search(want, result.output), result.output


def test_a_folder_of_runs_is_reported(tmp_path):
    (tmp_path / "00000-unet").mkdir()
    result = run(str(tmp_path), str(tmp_path / "m.h5"))
    assert isinstance(result.exception, UsageError) and str(result.exception) == (
        f"{tmp_path} is a folder that holds runs, and not itself a run: give one of them, such as "
        f"{tmp_path / '00000-unet'}."
    )


def test_what_the_message_says_of_the_diffusion(tmp_path, weights):
    """Rescaled timesteps are an option and reported; an export names guided-diffusion's flags."""
    plain = (
        weights,
        str(tmp_path / "m.h5"),
        "--image-size",
        "8",
        "--num-head-channels",
        "32",
        "--diffusion-steps",
        "4000",
    )
    result = run(*plain)
    assert isinstance(result.exception, UsageError) and "--no-rescale-timesteps" in str(
        result.exception
    )
    result = run(*plain, "--rescale-timesteps", "--schedule", "cosine")
    assert (
        "diffusion   4000 steps, cosine schedule, predicts eps, the model sees timesteps times 0.25"
        in result.output
    )
    result = run(str(tmp_path / "m.h5"), str(tmp_path / "x.npz"))
    assert "guided-diffusion its scripts need: --image_size 8" in result.output
    assert "no flag there levels that are joined without convolutions" in result.output
    result = run(str(tmp_path / "m.h5"), str(tmp_path / "x.npz"), "--conv-resample")
    assert result.exit_code == 0 and "no flag there" not in result.output


def test_help_names_every_option():
    text = run("--help").output
    for option in (
        "--weights",
        "--image-size",
        "--num-heads",
        "--attention-order",
        "--max-period",
        "--prediction",
        "--rescale-timesteps",
        "--conv-resample",
    ):
        assert option in text
