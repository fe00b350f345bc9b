"""The metadata in numdiff's `.npz` and `.safetensors` files: texts from outside, stored where other
programs do not look."""

import io
import json
import zipfile

import numpy as np
import pytest
import safetensors.numpy

from numdiff.extras.convert.files import LONGEST_COMMENT, read_weights, write_state_dict
from tests.extras.convert.weights import write_weights

KINDS = ["npz", "safetensors"]
STATE = {"a.weight": np.ones((2, 3), np.float32), "a.bias": np.zeros(2, np.float32)}
OPTIONS, DIFFUSION = {"image_size": 8}, {"prediction": "v"}


def written(path, kind, training):
    """What `write_state_dict` says that it left out."""
    with open(path, "wb") as file:
        return write_state_dict(file, STATE, kind, OPTIONS, DIFFUSION, training)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "names",
    [
        ["cat", "cat", ""],
        ['"a"\\', "new\nline", "\x1b[31m"],
        [f"{'猫' * 10}{k:04}" for k in range(1000)],
        ["\ud800", "dög"],
    ],
    ids=["plain", "escaped", "a thousand in Chinese", "no Unicode"],
)
def test_names_of_every_kind_come_back(kind, names):
    training = {
        "step": 3,
        "classes": names,
        "pictures": {"sampler": "heun", "steps": 7, "cfg_interval": [0.1, 2.0]},
    }
    assert written("w", kind, training) == {}
    state, stored = read_weights("w")
    assert set(state) == set(STATE)
    assert stored == {**OPTIONS, "diffusion": DIFFUSION, "training": training}


@pytest.mark.parametrize("letter, longest", [("a", 66), ("猫", 22), ('"', 16)])
def test_a_comment_holds_all_or_names_what_is_missing(letter, longest):
    """Names of as many letters as a zip's comment has place for, and of one more: never a comment
    cut off."""

    def left(length):
        stream = io.BytesIO()
        result = write_state_dict(
            stream, STATE, "npz", None, None, {"step": 1, "classes": [letter * length] * 900}
        )
        with zipfile.ZipFile(stream) as archive:
            assert 0 < len(archive.comment) <= LONGEST_COMMENT
            stored = json.loads(json.loads(archive.comment)["numdiff_training"])
        assert (
            stored.keys() | result.keys() == {"step", "classes"}
            and not stored.keys() & result.keys()
        )
        with np.load(stream) as arrays:
            assert arrays.files == list(STATE)  # all that load_state_dict(strict=True) is given
        return bool(result)

    assert not left(longest) and left(longest + 1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "text",
    [
        '{"step": NaN}',
        '{"step": 1e999}',
        '{"step": true}',
        '{"step": 9007199254740993}',
        '{"classes": [["a"]]}',
        '{"classes": {"0": "a"}}',
        '{"pictures": {"steps": {"a": 1}}}',
        '{"pictures": {"steps": [[1]]}}',
        '{"step": 3',
        "[" * 60000,
        '{"step": 3}, {}',
    ],
    ids=range(11),
)
def test_what_is_no_record_is_left_out_and_said(kind, text):
    """Types, ranges and depths; the weights and the other metadata are read all the same."""
    metadata = {"numdiff_options": json.dumps(OPTIONS), "numdiff_training": text}
    if kind == "npz":
        np.savez("w.npz", **STATE)
        with zipfile.ZipFile("w.npz", "a") as archive:
            archive.comment = json.dumps(metadata).encode()
    else:
        safetensors.numpy.save_file(STATE, "w.safetensors", metadata)
    state, stored = read_weights(f"w.{kind}")
    (said,) = stored.pop("broken")
    assert (
        said.startswith(
            "the step, the names of the classes and how the run drew its pictures, as their record in "
            "the file is damaged ("
        )
        and len(said) < 400
    )
    assert set(state) == set(STATE) and stored == OPTIONS


@pytest.mark.parametrize("name", ["training", "diffusion", "broken", "betas"])
def test_metadata_next_to_options_is_no_option(name):
    write_weights("w", STATE, "safetensors", {**OPTIONS, name: [1]})
    assert read_weights("w")[1] == OPTIONS


@pytest.mark.parametrize("kind", KINDS)
def test_keys_of_a_newer_numdiff_are_passed_over(kind):
    written("w", kind, {"step": 3, "colour": {"deep": [1, None]}})
    assert read_weights("w")[1]["training"]["step"] == 3
