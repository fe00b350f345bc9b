"""Reports: the lines, the records, the pictures."""

import json
import os

import numpy as np
import pytest
from PIL import Image

from numdiff.training.report import (
    STATS,
    Reporter,
    duration,
    image_grid,
    read_stats,
    save_png,
)


def report_steps(run_dir, steps, start_step=0, every=2, **keywords):
    with Reporter(run_dir, steps=10, batch=4, start_step=start_step, **keywords) as reporter:
        for step in range(start_step + every, steps + 1, every):
            reporter.report(step, [step - 0.5, step], 1.25, 1e-3)


def test_plain_lines(tmp_path, capsys):
    report_steps(tmp_path, 10, bar=False, flops_per_step=1e9, peak_flops=1e15)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 5
    for word in (
        "step  2/10",
        "loss 1.7500",
        "norm 1.250",
        "lr 1.00e-03",
        "ms/step",
        "images/s",
        "MFU",
    ):
        assert word in lines[0]
    assert "ETA" not in lines[0] and "ETA 0:00" in lines[1]  # the first steps compile kernels


def test_bar(tmp_path, capsys):
    with Reporter(tmp_path, steps=4, batch=4, flops_per_step=1e9, bar=True) as reporter:
        reporter.report(2, 0.5, 1.0, 1e-3)
        reporter.message("a picture")
        reporter.report(4, 0.5, 1.0, 1e-3)
    out = capsys.readouterr()
    assert out.out == "" and "a picture" in out.err and "4/4 steps  loss 0.5000" in out.err


def test_records_reach_the_file_at_once(tmp_path):
    with Reporter(tmp_path, steps=10, batch=4, bar=False) as reporter:
        reporter.report(2, [1.0, 2.0], float("nan"), 1e-3, skipped=1)
        record = json.loads((tmp_path / STATS).read_text())
    assert (record["step"], record["loss"], record["losses"], record["skipped"]) == (
        2,
        1.5,
        [1.0, 2.0],
        1,
    )
    assert record["gradient_norm"] is None
    assert record["images_per_second"] == pytest.approx(4000 / record["ms_per_step"])


def test_pauses_do_not_count(tmp_path, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr("numdiff.training.report.time.perf_counter", lambda: clock[0])
    with Reporter(tmp_path, steps=10, batch=4, bar=False) as reporter:
        clock[0] += 2
        with reporter.pause():
            clock[0] += 100
        assert reporter.report(2, 1.0, 1.0, 1e-3)["ms_per_step"] == pytest.approx(1000)


def test_resume_leaves_no_step_twice(tmp_path):
    report_steps(tmp_path, 6, bar=False)
    with open(tmp_path / STATS, "a") as file:
        file.write('{"step": 8, "loss": 0.')  # a kill in the middle of a line
    report_steps(tmp_path, 10, start_step=4, bar=False)
    steps, losses = read_stats(tmp_path)
    assert steps == list(range(1, 11))
    assert losses[:4] == [1.5, 2.0, 3.5, 4.0]
    report_steps(tmp_path, 4, start_step=0, bar=False)
    assert read_stats(tmp_path)[0] == [1, 2, 3, 4]


def test_resume_within_a_report(tmp_path):
    """A checkpoint between two reports: the report that reaches past it goes, the steps before it
    are not invented."""
    report_steps(tmp_path, 4, bar=False)
    report_steps(tmp_path, 7, start_step=3, bar=False)
    assert read_stats(tmp_path)[0] == [1, 2, 4, 5, 6, 7]


def test_no_records_yet(tmp_path):
    assert read_stats(tmp_path) == ([], [])


@pytest.mark.parametrize(
    "seconds, text",
    [
        (0, "0:00"),
        (59.6, "1:00"),
        (3599, "59:59"),
        (3723, "1:02:03"),
        (float("nan"), "?"),
        (-1, "0:00"),
    ],
)
def test_duration(seconds, text):
    assert duration(seconds) == text


def test_image_grid(rng):
    images = rng.integers(0, 255, (5, 3, 4, 3), np.uint8)
    grid = image_grid(images, gap=1)
    assert grid.shape == (1 + 2 * 4, 1 + 3 * 5, 3)
    for i in range(5):
        row, column = 1 + i // 3 * 4, 1 + i % 3 * 5
        assert np.array_equal(grid[row : row + 3, column : column + 4], images[i])
    assert (grid[:, 0] == 255).all() and (grid[0] == 255).all() and (grid[-1] == 255).all()
    assert (grid[5:, 11:] == 255).all()  # the empty place
    assert image_grid(images, columns=5, gap=0).shape == (3, 20, 3)
    assert image_grid(images, columns=9, gap=0, zoom=2).shape == (6, 40, 3)
    with pytest.raises(ValueError, match="image_grid takes uint8"):
        image_grid(images.astype(np.float32))


@pytest.mark.parametrize("shape", [(4, 5), (4, 5, 1), (4, 5, 3), (4, 5, 4)])
def test_save_png(tmp_path, rng, shape):
    array = rng.integers(0, 256, shape, np.uint8)
    save_png(tmp_path / "a.png", array)
    with Image.open(tmp_path / "a.png") as picture:
        assert np.array_equal(np.asarray(picture), array[..., 0] if shape[2:] == (1,) else array)
    assert os.listdir(tmp_path) == ["a.png"]


def test_save_png_refuses_what_is_no_picture(tmp_path):
    for array in (
        np.zeros((4, 4)),
        np.zeros((4, 4, 2), np.uint8),
        np.zeros((1, 4, 4, 3), np.uint8),
    ):
        with pytest.raises(ValueError, match="save_png takes uint8"):
            save_png(tmp_path / "a.png", array)
