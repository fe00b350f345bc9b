"""`numdiff bench quality`: training that is measured on the way."""

import json
import shlex
from types import SimpleNamespace

import h5py
import numpy as np
import pytest
from PIL import Image

import numdiff
from numdiff.data.dataset import Dataset, default_path
from numdiff.errors import UsageError
from numdiff.extras.measure.time_to_quality import (
    SAMPLES,
    check_targets,
    conclusion,
    in_proportion,
    leaderboard_row,
    line,
    revision,
    rules_broken,
)
from numdiff.training.options import resolve
from numdiff.training.picture_record import read_record
from numdiff.training.previews import Previews
from tests.command import last_line, output_of, refusal_of, run
from tests.conftest import exhaustive

SMALL = (
    "bench quality dit --preset tiny --device cpu --batch 2 --size 16 --depth 1 --hidden-size 24 --heads 2 "
    "--classes Flags,Activities --sample-steps 2 --samples 20 --sample-batch 10 --seed 3"
)


def test_targets_reached_and_not(tmp_path, monkeypatch):
    """The run continues to its last step where a target stays out of reach, and ends at the
    smallest that is reached."""
    noise = output_of(SMALL, "--steps 2 --every 2 --target 1000")
    assert "target 1000: not reached in 2 steps" in noise
    assert "reaches 1000, which does not count: recall is below 0.5" in noise
    # of noise, which is what so short a run draws
    monkeypatch.setattr("numdiff.extras.measure.time_to_quality.RECALL", 0.0)
    monkeypatch.chdir(tmp_path)
    files = "--json quality.json --png a.png --grid grid.png"
    output = output_of(SMALL, "--steps 5 --every 2 --target 0.001,1000", files)
    measured = json.loads((tmp_path / "quality.json").read_text())
    first, *_ = points = measured["points"]
    assert [(point["step"], point["images"]) for point in points] == [(2, 4), (4, 8), (5, 10)]
    reached, missed = measured["targets"]
    assert (reached["target"], missed["target"]) == (1000, 0.001)
    assert reached["step"] == 2 and "step" not in missed
    wanted = {"samples": 20, "first_seed": 10_000, "cfg_scale": None}
    assert wanted.items() <= measured.items()
    rules = "none of LEADERBOARD.md, for --classes Flags,Activities (rule 1), --image-size 16 "
    assert output.count(rules) == 1
    assert "target 0.001: not reached in 5 steps; the best was " in output
    assert "target 1000: " in output and " s of training, 2 steps, 4 images" in output
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    with Image.open("grid.png") as grid:
        width, height = grid.size
    assert height / 10 == pytest.approx(width / 2, rel=0.05)  # 20 images, a column for each class
    early = output_of(SMALL, "--steps 5 --every 2 --target 1000 --json early.json")
    assert "not reached" not in early
    (again,) = json.loads((tmp_path / "early.json").read_text())["points"]
    for figure in ("loss", "frechet_distance", "spatial_frechet_distance", "precision", "recall"):
        assert again[figure] == first[figure], figure  # the same bits in another run


@exhaustive
def test_the_command_in_a_grid_makes_it_again(tmp_path, monkeypatch):
    """…and the curve has the same record; the JSON file, too."""
    monkeypatch.chdir(tmp_path)
    files = "--grid grid.png --png curve.png --json quality.json"
    words = f"{SMALL} --steps 4 --every 2 {files}".split()
    monkeypatch.setattr("sys.argv", ["numdiff", *words])
    assert "Activities (5), Flags (15)" in output_of(*words)
    record = read_record("grid.png")
    assert record == read_record("curve.png")
    made = json.loads((tmp_path / "quality.json").read_text())["made"]
    assert record == {**made, "command": ["numdiff", *words]} and made["training_steps"] == 4
    with Image.open("grid.png") as grid:
        before = grid.tobytes()
    (tmp_path / "grid.png").unlink()
    again = shlex.split(last_line(run("info curve.png")))
    assert again[1:3] == ["numdiff", "bench"]
    output_of(shlex.join(again[2:]))
    with Image.open("grid.png") as grid:
        assert grid.tobytes() == before
    assert read_record("grid.png")["model_hash"] == made["model_hash"]


def test_a_run_that_diverges_says_how_far_it_came():
    odd = "--learning-rate 1e30 --clip-norm 0 --warmup-steps 0"
    output = run(SMALL, "--steps 6 --every 2", odd).output
    assert "Traceback" not in output
    early, never = "the run ended early: step", "Error: nothing was measured: step"
    assert early in output or never in output


@pytest.mark.parametrize(
    "more, sentence",
    [
        ("--target 0", "--target takes spatial Fréchet distances, numbers above 0"),
        ("--target nan", "--target takes spatial Fréchet distances"),
        ("--target x", "is not a list"),
        (
            "--size 8",
            "--image-size 8: distances are of images of at least 16×16 pixels; give a larger one.",
        ),
        # as every other that a run's own grids and files have
        ("--sample-every 2", "No such option '--sample-every'"),
        (
            "--steps 5000 --every 1",
            "--every 1 would measure 5,000 times in 5,000 steps: give at least 5.",
        ),
        ("--png a.png --grid ./a.png", "--png and --grid name one file"),
        ("--target none", "--target takes spatial Fréchet distances"),
        ("--png curve.jpg", "must end in .png"),
        ("--json none/a.json", "the folder does not exist"),
    ],
)
def test_refused(more, sentence):
    assert sentence in refusal_of(SMALL, more)


def test_what_is_printed():
    assert check_targets([0.1, 0.3, 0.1]) == [0.3, 0.1]
    with pytest.raises(UsageError):
        check_targets([])
    point = {
        "step": 8,
        "seconds": 2.25,
        "images": 16,
        "tflop": 0.5,
        "spatial_frechet_distance": 0.2,
        "recall": 0.6,
        "loss": 1.0,
        "frechet_distance": 0.1,
        "precision": 0.9,
    }
    record = {
        "card": "H200",
        "ranks": 4,
        "points": [point],
        "targets": [{"target": 0.3, **point}, {"target": 0.1}],
    }
    assert list(conclusion(record)) == [
        "target 0.3: 2.2 s of training, 8 steps, 16 images, 0.5 TFLOP",
        "target 0.1: not reached in 8 steps; the best was 0.200 after 8",
    ]
    assert (
        leaderboard_row(record, "abc", "numdiff bench quality dit")
        == "| abc | 4 × H200 | 2.2 | – | `numdiff bench quality dit` |  |"
    )
    assert revision()
    copying = {**point, "recall": 0.49}
    assert line(point, [0.3]).endswith("   reaches 0.3") and line(copying).endswith("    0.49")
    assert line(copying, [0.3]).endswith(
        "   reaches 0.3, which does not count: recall is below 0.5"
    )
    record = {**record, "points": [copying], "targets": [{"target": 0.3}, {"target": 0.1}]}
    assert list(conclusion(record)) == [
        "target 0.3: not reached in 8 steps; the best was 0.200 after 8",
        "target 0.1: not reached in 8 steps; the best was 0.200 after 8",
        "the best had a recall of 0.49, and below 0.5 nothing counts",
    ]


def test_no_repository_above_numdiff_is_asked(tmp_path, monkeypatch):
    """…which may name programs that git runs: numdiff may be installed within a folder that was
    downloaded."""
    (tmp_path / ".git").mkdir()
    monkeypatch.setattr(
        "numdiff.extras.measure.time_to_quality.__file__",
        str(tmp_path / "env" / "numdiff" / "a" / "b" / "q.py"),
    )
    monkeypatch.setattr("numdiff.extras.measure.time_to_quality.subprocess.run", None)
    assert revision() == numdiff.__version__


def test_each_class_is_drawn_as_often_as_the_data_have_it():
    with Dataset(default_path()) as emoji:
        labels, classes = emoji.labels, len(emoji.classes)
    for count in (SAMPLES, 4 * SAMPLES, 200, 1):
        drawn, often = (
            in_proportion(labels, count),
            np.bincount(labels, minlength=classes) * count / SAMPLES,
        )
        assert (
            drawn.shape == (count,)
            and np.abs(np.bincount(drawn, minlength=classes) - often).max() < 1
        )
    # a grid has whole rows of them
    assert in_proportion(labels, SAMPLES)[:63].tolist() == [*range(classes)] * 7
    assert in_proportion(np.array([2, 0, 2, 2, 0]), 5).tolist() == [0, 2, 0, 2, 2]


@pytest.mark.parametrize("ranks", [1, 3])
def test_classes_of_the_previews(ranks, monkeypatch):
    """Every rank draws its part of the labels that were given, of those in turn where none were."""
    drawn = []
    monkeypatch.setattr(
        "numdiff.training.previews.Sampling", lambda model, count, y, **more: drawn.extend(y)
    )
    options = resolve({"model": "dit", "preset": "tiny", "device": "cpu"}).changed(sample_count=7)
    for given in (None, np.array([4, 4, 4, 0, 0, 1, 2])):
        drawn.clear()
        for rank in range(ranks):
            trainer = SimpleNamespace(
                model=SimpleNamespace(num_classes=5),
                communicator=SimpleNamespace(size=ranks, rank=rank),
                step_function=SimpleNamespace(microbatch=2, arena=None),
            )
            Previews(trainer, options, labels=given).make_sampling()
        assert drawn == ([0, 1, 2, 3, 4, 0, 1] if given is None else given.tolist())


@pytest.mark.parametrize(
    "given, sampling, broken",
    [
        ({}, {}, []),
        ({"data": default_path()}, {"samples": SAMPLES}, []),
        (
            {"data": "mine.h5", "init": True, "classes": ("Flags", "Food & Drink")},
            {},
            [
                "--data mine.h5 (rule 1)",
                "--init {init} (rule 1)",
                "--classes Flags,Food & Drink (rule 1)",
            ],
        ),
        (
            {"image_size": 32},
            {"samples": 100, "sampler": "heun", "sample_steps": 18, "cfg_scale": 2.0},
            [
                "--image-size 32 (rule 1)",
                "--samples 100 (rule 2)",
                "--sampler heun (rule 2)",
                "--sample-steps 18 (rule 2)",
                "--cfg-scale 2.0 (rule 2)",
            ],
        ),
    ],
)
def test_rules_of_the_leaderboard(given, sampling, broken):
    options = resolve(
        {
            "model": "dit",
            "preset": "small64",
            "device": "cpu",
            "data": default_path(),
            **{name: value for name, value in given.items() if name != "init"},
        }
    )
    if "init" in given:
        options = options.changed(init="a.h5")
    assert rules_broken(options, **sampling) == [text.format(init="a.h5") for text in broken]
    with Dataset(default_path()) as emoji:
        assert len(emoji) == SAMPLES and len(emoji.classes) == 9


def test_what_the_data_lack_is_said_before_the_table(tmp_path):
    with h5py.File(tmp_path / "plain.h5", "w") as file:
        file["images"] = np.zeros((20, 16, 16, 3), np.uint8)
    words = SMALL.replace("--classes Flags,Activities", "--class-cond")
    result = run(words, "--steps 2 --data", tmp_path / "plain.h5")
    assert result.exit_code and "--class-cond needs labels" in result.output
    assert "precision" not in result.output
