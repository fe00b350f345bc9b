"""A grid says how it was made, and the command it gives makes the same one."""

import json
import shlex

import numpy as np
import pytest
from click.testing import CliRunner
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from cli.main import main
from numdiff.errors import NumdiffError
from numdiff.nn import UNet
from numdiff.training.model_files import write_model_file
from numdiff.training.picture_record import read_record


def run(*words):
    result = CliRunner().invoke(main, list(map(str, words)))
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture
def model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made = UNet(
        image_size=8,
        model_channels=32,
        channel_mult=(1,),
        num_res_blocks=1,
        attention_resolutions=(),
        num_classes=2,
        device="cpu",
    )
    write_model_file("m.h5", made.options, made.arrays(), classes=["a cat", "dog"])


def test_the_command_in_a_grid_makes_it_again(model):
    run(
        "sample",
        "m.h5",
        "--count",
        3,
        "--steps",
        2,
        "--class",
        "dog",
        "--class",
        "a cat",
        "--seed",
        5,
        "--grid",
        "one.png",
        "--device",
        "cpu",
        "--no-clip",
    )
    lines = dict(line.split(maxsplit=1) for line in run("info", "one.png").splitlines())
    assert lines["classes"] == "a cat (1), dog (2)" and "seeds 5 to 7" in lines["images"]
    words = shlex.split(lines["command"])
    assert words[:3] == ["numdiff", "sample", "m.h5"] and "--no-clip" in words and "a cat" in words
    before = np.asarray(Image.open("one.png").copy())
    run(*["two.png" if word == "one.png" else word for word in words[1:]])
    assert (np.asarray(Image.open("two.png").copy()) == before).all()


def save(path, text=None):
    info = PngInfo()
    if text is not None:
        info.add_itxt("numdiff", text)
    Image.new("RGB", (4, 4)).save(path, pnginfo=info)


@pytest.mark.parametrize(
    "text, message",
    [
        (None, "does not say how it was made"),
        ("{", "is damaged"),
        ("[]", "is damaged"),
        (json.dumps({"model": "m", "sampler": "ddim", "count": -1}), "is damaged"),
        (json.dumps({"model": "m", "sampler": "ddim", "count": 1, "command": [1]}), "is damaged"),
        (json.dumps({"model": "m" * 5000, "sampler": "ddim", "count": 1}), "is damaged"),
    ],
)
def test_other_pictures_say_so(tmp_path, text, message):
    save(tmp_path / "x.png", text)
    with pytest.raises(NumdiffError, match=message):
        read_record(tmp_path / "x.png")


def test_what_a_picture_says_is_printed_visibly(tmp_path):
    save(
        tmp_path / "x.png",
        json.dumps(
            {
                "model": "\x1b[2Jm",
                "sampler": "ddim",
                "count": 1,
                "command": ["numdiff", "sample", "a; rm -rf b"],
            }
        ),
    )
    output = run("info", tmp_path / "x.png")
    assert "\\x1b[2Jm" in output and "'a; rm -rf b'" in output


@pytest.mark.parametrize("content", [b"", b"no PNG", b"\x89PNG\r\n\x1a\n" + bytes(40)])
def test_files_that_are_no_picture_say_so(tmp_path, content):
    (tmp_path / "x.png").write_bytes(content)
    with pytest.raises(NumdiffError, match="give a picture that `numdiff sample` wrote"):
        read_record(tmp_path / "x.png")
