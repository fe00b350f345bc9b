"""Model kinds: a record is all that a third one needs; no other file distinguishes kinds."""

import ast
import json
import pathlib

import pytest

import numdiff
from numdiff.errors import UsageError
from numdiff.extras.convert.kinds import weights_of
from numdiff.extras.convert.models import convert
from numdiff.training import kinds
from numdiff.training.options import TrainOptions, resolve
from tests.command import run

from .toy import TOY, Toy

ROOT = pathlib.Path(numdiff.__file__).parent


@pytest.fixture
def toy(monkeypatch):
    monkeypatch.setattr(kinds, "KINDS", dict(kinds.KINDS))
    kinds.register(TOY)


@pytest.mark.usefixtures("no_curves")
def test_a_third_kind_is_one_record(toy, tmp_path, monkeypatch):
    """Trained by the command line, resumed, sampled, converted and loaded; its settings are
    separate from the others'."""
    monkeypatch.chdir(tmp_path)
    shown = run("train toy --help").output
    assert (
        "Toy:" in shown
        and "--width N" in shown
        and "Train a Toy." in shown
        and "--hidden-size" not in shown
    )
    trained = run("train toy --device cpu")
    assert trained.exit_code == 0 and "toy, preset small: " in trained.output, trained.output
    folder = tmp_path / "runs" / "00000-toy-small"
    saved = json.loads((folder / "options.json").read_text())
    # of two settings called depth the kind's own counts
    assert (saved["width"], saved["depth"]) == (8, 1)
    assert TrainOptions.load(folder / "options.json") == resolve({"model": "toy", "device": "cpu"})
    again = run("train toy --resume --steps 4")
    assert again.exit_code == 0 and (folder / "checkpoint-00000004.h5").exists(), again.output
    model = numdiff.load(folder, device="cpu")
    assert isinstance(model, Toy) and model.options["width"] == 8
    assert numdiff.sample(model, count=1, steps=1).shape == (1, 16, 16, 3)
    assert run("sample 0 --count 1 --steps 1 --device cpu").exit_code == 0
    measured = run("bench step toy --device cpu --steps 1 --warmup 0 --width 4")
    assert measured.exit_code == 0 and "toy, preset small" in measured.output, measured.output
    assert run("profile toy --device cpu").exit_code == 0
    converted = run("convert", folder, "toy.h5")
    assert (
        converted.exit_code == 0 and "a Toy of 515 parameters for 16×16 images" in converted.output
    ), converted.output
    assert convert("toy.h5", "toy.npz").kind == "toy"


def test_what_a_third_kind_cannot_is_said(toy):
    for arguments, sentence in (
        ("train toy --width 2", "2 is not in the range 4<=x<=64"),
        ("train toy --preset tiny", "'tiny' is not 'small'"),
        (
            "bench step toy --device cpu --versus torch",
            "there is no Toy in PyTorch to",
        ),
    ):
        result = run(arguments)
        assert result.exit_code and sentence in result.output, result.output
    with pytest.raises(
        UsageError, match="--width belongs to the model toy; leave it out, or train that one"
    ):
        resolve({"width": 8, "device": "cpu"})
    with pytest.raises(UsageError, match="--mlp-ratio belongs to the model dit"):
        resolve({"model": "toy", "mlp_ratio": 2.0, "device": "cpu"})
    with pytest.raises(UsageError, match="--model resnet does not exist; use unet or dit or toy"):
        resolve({"model": "resnet"})
    with pytest.raises(UsageError, match="cannot be called 'toy'"):
        kinds.register(TOY)


def test_what_other_programs_have_of_it_is_nothing():
    with pytest.raises(UsageError, match="means nothing for a Toy"):
        weights_of(TOY).with_convolutions({}, {})
    with pytest.raises(
        UsageError, match="diffusers' layout, which is for a DiT, and this is a Toy"
    ):
        weights_of(TOY).write_folder("a", {}, {}, {})


def test_no_other_file_distinguishes_kinds():
    """A comparison with a kind's name, or a table with both, stands nowhere but in the
    records, and in measurements by hand."""
    found = []
    for folder in (ROOT, ROOT.parent / "cli"):
        for path in folder.rglob("*.py"):
            text = path.read_text(encoding="utf-8")
            if {"kinds", "scripts"} & {*path.parts} or not any(
                f'"{kind}"' in text for kind in kinds.KINDS
            ):
                continue
            for node in ast.walk(ast.parse(text)):
                parts = (
                    [node.left, *node.comparators]
                    if isinstance(node, ast.Compare)
                    else (
                        node.keys
                        if isinstance(node, ast.Dict)
                        else node.elts
                        if isinstance(node, ast.List | ast.Tuple)
                        else []
                    )
                )
                if any(isinstance(p, ast.Constant) and p.value in kinds.KINDS for p in parts):
                    found.append(path.name)
    assert found == ["diffusers.py"]  # the folder "unet" of a pipeline of diffusers
