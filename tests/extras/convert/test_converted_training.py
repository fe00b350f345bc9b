"""What a converted file keeps next to weights and options: the step, the class names, the run's
sampling."""

import json
import pathlib

import numpy as np
import pytest
import safetensors

from numdiff import load
from numdiff.errors import NumdiffError
from numdiff.extras.convert.files import read_weights
from numdiff.extras.convert.models import convert
from numdiff.training.checkpoint import checkpoint_name, save_checkpoint
from numdiff.training.initial import read_any
from numdiff.training.model_files import read_model_file, write_model_file
from tests.extras.convert.weights import same_models, write_weights
from tests.models import small_dit, with_random_weights

NAMES = ["cat", "dög"]
PICTURES = {"sampler": "heun", "steps": 7, "cfg_scale": 1.5, "cfg_interval": None}


def saved(folder, classes=NAMES):
    """A run's folder with a DiT of these classes."""
    model = with_random_weights(small_dit(num_classes=len(classes)))
    data = model.parameters.data
    folder = pathlib.Path(folder)
    folder.mkdir()
    save_checkpoint(
        folder / checkpoint_name(20),
        {"parameters": data, "m": data},
        {
            "model": "dit",
            "model_options": model.options,
            "index": model.parameters.index,
            "step": 20,
            "classes": classes,
            "diffusion": {"steps": 50, "schedule": "cosine", "prediction": "v"},
            "pictures": PICTURES,
        },
    )
    return folder


@pytest.mark.parametrize("target", ["w.safetensors", "w.npz", "folder"])
def test_there_and_back_nothing_is_lost(target):
    convert(saved("run"), target)
    assert convert(target, "back.h5").step == 20
    assert same_models("run", "back.h5")
    meta, old = load("back.h5", "cpu").meta, load("run", "cpu").meta
    for name in ("step", "classes", "pictures", "diffusion"):
        assert meta[name] == old[name]
    assert meta["classes"] == NAMES
    assert read_any(target).classes == NAMES  # as `--init` reads it


def test_the_names_of_many_classes_have_no_place_in_an_npz():
    names = [f"a class of number {k}" for k in range(4000)]
    run = saved("run", names)
    assert convert(run, "w.npz").notes[-1] == (
        "left out",
        "the names of 4,000 classes, for which an .npz has no place: .safetensors has",
    )
    found = read_any("w.npz")
    assert found.classes is None and found.options["num_classes"] == 4000
    assert (found.step, found.pictures) == (20, PICTURES)
    convert(run, "w.safetensors")
    assert read_any("w.safetensors").classes == names


@pytest.mark.parametrize(
    "wrong",
    [
        {"step": -1},
        {"step": 1.5},
        {"step": "20"},
        {"classes": "cat"},
        {"classes": [1, 2]},
        {"pictures": [1]},
        [1],
        "x",
        None,
    ],
)
def test_what_somebody_else_wrote_there_is_left_alone(wrong):
    state = {"a": np.ones(3, np.float32)}
    write_weights("w.safetensors", state, "safetensors", None, None, wrong)
    assert "training" not in read_weights("w.safetensors")[1]


def test_what_is_left_out_is_said(caplog):
    """By convert, --init and load: a damaged record, and more names than the model has classes."""
    convert(saved("run"), "w.npz")
    state, stored = read_weights("w.npz")
    diffusion, training = stored.pop("diffusion"), stored.pop("training")
    for wrong, words in (
        (
            {**training, "step": -1},
            "the step, the names of the classes and how the run drew its "
            "pictures, as their record in the file is damaged (numdiff_training.step is -1 and must be a "
            "whole number",
        ),
        (
            {**training, "classes": [*NAMES, "fish"]},
            "the names of the classes, as it names 3 classes, and its model has 2",
        ),
    ):
        write_weights("w.npz", state, "npz", stored, diffusion, wrong)
        (note,) = [text for heading, text in convert("w.npz", "m.h5").notes]
        assert note.startswith(words) and read_any("w.npz", reader="train").remarks == [
            ("left out", note)
        ]
        caplog.clear()
        with caplog.at_level("WARNING", "numdiff"):
            assert "classes" not in load("w.npz", "cpu").meta
        assert caplog.messages == [f"w.npz: left out: {note}"]


def test_a_checkpoint_of_more_names_than_classes_is_none():
    """Fewer are a model with room for more, of --num-classes."""
    options, arrays, _ = read_model_file(saved("run"))
    for names in ([], NAMES[:1], [*NAMES, "fish"]):
        write_model_file("m.h5", options, arrays, model="dit", classes=names)
        if len(names) < 3:
            assert load("m.h5", "cpu").meta["classes"] == names
    with pytest.raises(
        NumdiffError, match=r"holds no whole model \(it names 3 classes, and its model has 2\); use"
    ):
        load("m.h5", "cpu")


def test_other_readers_of_safetensors_are_undisturbed():
    convert(saved("run"), "w.safetensors")
    with safetensors.safe_open("w.safetensors", "np") as file:
        stored = file.metadata()
        assert (
            stored["format"] == "pt" and json.loads(stored["numdiff_training"])["classes"] == NAMES
        )
        assert "blocks.0.attn.qkv.weight" in file.keys()
