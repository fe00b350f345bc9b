"""`numdiff bench quality`: training that is measured on the way."""
import json

import pytest
from click.testing import CliRunner
from PIL import Image

from numdiff.errors import UsageError
from numdiff.evaluation.quality import check_targets, conclusion, leaderboard_row, revision
from numdiff_cli.main import main

SMALL = ("bench quality dit --preset tiny --device cpu --batch 2 --size 16 --depth 1 --hidden-size 24 --heads 2 "
         "--classes Flags,Activities --sample-steps 2 --samples 20 --sample-batch 10 --seed 3").split()


def run(*more):
    return CliRunner().invoke(main, [*SMALL, *map(str, more)])


def test_targets_reached_and_not(tmp_path):
    """The run goes on to its last step where a target stays out of reach, and ends at the smallest that is reached."""
    record = tmp_path / "quality.json"
    result = run("--steps", 5, "--every", 2, "--target", "0.001,1000", "--json", record, "--png", tmp_path / "a.png",
                 "--grid", tmp_path / "grid.png")
    assert result.exit_code == 0, result.output
    measured = json.loads(record.read_text())
    assert [point["step"] for point in measured["points"]] == [2, 4, 5]
    assert [point["images"] for point in measured["points"]] == [4, 8, 10]
    assert [row["target"] for row in measured["targets"]] == [1000, 0.001]
    assert measured["targets"][0]["step"] == 2 and "step" not in measured["targets"][1]
    assert measured["samples"] == 20 and measured["first_seed"] == 10_000 and measured["cfg_scale"] is None
    assert "target 0.001: not reached in 5 steps; the best was " in result.output
    assert "target 1000: " in result.output and " s of training, 2 steps, 4 images" in result.output
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    with Image.open(tmp_path / "grid.png") as grid:
        width, height = grid.size
    assert height / 10 == pytest.approx(width / 2, rel=0.05)  # 20 images, a column for each class
    early = run("--steps", 5, "--every", 2, "--target", 1000, "--json", tmp_path / "early.json")
    assert early.exit_code == 0 and "not reached" not in early.output
    again = json.loads((tmp_path / "early.json").read_text())["points"]
    assert len(again) == 1
    for figure in ("loss", "frechet_distance", "spatial_frechet_distance", "precision", "recall"):
        assert again[0][figure] == measured["points"][0][figure], figure  # the same bits in another run


def test_a_run_that_diverges_says_how_far_it_came():
    result = run("--steps", 6, "--every", 2, "--learning-rate", "1e30", "--clip-norm", 0, "--warmup-steps", 0)
    assert "Traceback" not in result.output
    assert "the run ended early: step" in result.output or "Error: nothing was measured: step" in result.output


@pytest.mark.parametrize("more, sentence", [
    (("--target", "0"), "--target takes spatial Fréchet distances, numbers above 0"),
    (("--target", "nan"), "--target takes spatial Fréchet distances"), (("--target", "x"), "is not a list"),
    (("--size", 8), "--image-size 8: distances are of images of at least 16×16 pixels; give a larger one."),
    (("--sample-every", 2), "No such option '--sample-every'"),  # as every other that a run's own grids and files have
    (("--steps", 5000, "--every", 1), "--every 1 would measure 5,000 times in 5,000 steps: give at least 5."),
    (("--png", "a.png", "--grid", "./a.png"), "--png and --grid name one file"),
    (("--target", "none"), "--target takes spatial Fréchet distances"),
    (("--png", "curve.jpg"), "must end in .png"), (("--json", "none/a.json"), "the folder does not exist")])
def test_refused(more, sentence):
    result = run(*more)
    assert result.exit_code and sentence in result.output and "Traceback" not in result.output, result.output


def test_what_is_printed():
    assert check_targets([0.1, 0.3, 0.1]) == [0.3, 0.1]
    with pytest.raises(UsageError):
        check_targets([])
    point = {"step": 8, "seconds": 2.25, "images": 16, "tflop": 0.5, "spatial_frechet_distance": 0.2}
    record = {"card": "H200", "ranks": 4, "points": [point], "targets": [{"target": 0.3, **point}, {"target": 0.1}]}
    assert list(conclusion(record)) == ["target 0.3: 2.2 s of training, 8 steps, 16 images, 0.5 TFLOP",
                                        "target 0.1: not reached in 8 steps; the best was 0.200 after 8"]
    assert leaderboard_row(record, "abc", "numdiff bench quality dit") == \
        "| abc | 4 × H200 | 2.2 | – | `numdiff bench quality dit` |  |"
    assert revision()
