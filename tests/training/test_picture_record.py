"""A grid says how it was made, and the command it gives makes the same one."""

import json
import shlex

import numpy as np
import pytest
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from numdiff.errors import NumdiffError
from numdiff.training.picture_record import read_record
from tests.command import output_of
from tests.models import small_unet, write


@pytest.fixture
def model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write("m.h5", small_unet(num_classes=2), classes=["a cat", "dog"])


def test_the_command_in_a_grid_makes_it_again(model):
    output_of(
        "sample m.h5 --count 3 --steps 2 --class dog --class 'a cat' --seed 5 --grid one.png",
        "--device cpu --no-clip",
    )
    lines = dict(line.split(maxsplit=1) for line in output_of("info one.png").splitlines())
    assert lines["classes"] == "a cat (1), dog (2)" and "seeds 5 to 7" in lines["images"]
    words = shlex.split(lines["command"])
    assert words[:3] == ["numdiff", "sample", "m.h5"] and "--no-clip" in words and "a cat" in words
    before = np.asarray(Image.open("one.png").copy())
    output_of(lines["command"].removeprefix("numdiff ").replace("one.png", "two.png"))
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
    output = output_of("info", tmp_path / "x.png")
    assert "\\x1b[2Jm" in output and "'a; rm -rf b'" in output


@pytest.mark.parametrize("content", [b"", b"no PNG", b"\x89PNG\r\n\x1a\n" + bytes(40)])
def test_files_that_are_no_picture_say_so(tmp_path, content):
    (tmp_path / "x.png").write_bytes(content)
    with pytest.raises(NumdiffError, match="give a picture that `numdiff sample` wrote"):
        read_record(tmp_path / "x.png")
