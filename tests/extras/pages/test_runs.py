"""What a page shows of a run folder, also of a damaged one and of one that is being written."""

import json

import numpy as np
import pytest
from PIL import Image

from numdiff.errors import NumdiffError
from numdiff.extras.pages.runs import (
    curve_of,
    find_runs,
    list_grids,
    read_grid,
    read_run,
    shrink,
    thin,
)
from numdiff.training.report import STATS
from tests.command import output_of
from tests.extras.pages.folders import make_run, report_steps


def test_the_curves_of_a_run(tmp_path):
    run_dir = make_run(tmp_path, steps=40)
    run = read_run(run_dir)
    assert (run["step"], run["steps"], run["finished"], run["notes"]) == (40, 40, True, [])
    assert set(run["curves"]) == {"loss", "norm", "rate", "speed"}
    loss = run["curves"]["loss"]
    lines = (run_dir / STATS).read_text().splitlines()
    losses = [v for line in lines for v in json.loads(line)["losses"]]
    assert loss["x"].tolist() == list(range(1, 41))
    np.testing.assert_allclose(loss["y"], losses, rtol=1e-6)
    assert run["curves"]["norm"]["x"].tolist() == [10, 20, 30, 40]
    assert run["settings"]["steps"] == "40"


def test_thinning_keeps_means_and_extremes():
    x, y = np.arange(10_001.0), np.sin(np.arange(10_001.0))
    y[5000] = 40
    curve = thin(x, y, 100)
    assert [len(curve[key]) for key in ("x", "y", "low", "high")] == [100] * 4
    assert curve["high"].max() == 40 and curve["low"].min() == np.float32(y.min())
    assert (curve["low"] <= curve["y"]).all() and (curve["y"] <= curve["high"]).all()
    sizes = np.diff([*(np.arange(100) * 10_001 // 100), 10_001])
    np.testing.assert_allclose((curve["y"] * sizes).sum() / 10_001, y.mean(), atol=1e-5)


def test_a_running_mean_is_drawn_over_a_noisy_curve(tmp_path):
    run = read_run(make_run(tmp_path, steps=400))
    loss, rate = (run["curves"][name] for name in ("loss", "rate"))
    for at in (3, 200, 396):  # 400 losses: the mean of nine, of fewer near the ends
        around = loss["y"][max(0, at - 4) : at + 5]
        assert loss["smooth"][at] == pytest.approx(around.mean(), rel=1e-5)
    assert np.diff(loss["smooth"][50:]).std() < np.diff(loss["y"][50:]).std() / 4
    assert (rate["smooth"] == rate["y"]).all()


def test_settings_are_those_of_the_kind_as_one_writes_them(tmp_path):
    settings = read_run(make_run(tmp_path, classes=("Flags", "Objects")))["settings"]
    assert settings["classes"] == "Flags, Objects" and settings["min_snr_gamma"] == "–"
    assert settings["class_cond"] == "no" and settings["freeze"] == "none"
    assert "patch_size" not in settings and "latent_channels" not in settings


def test_values_that_are_no_numbers_are_left_out():
    records = [
        {"step": 1, "loss": None, "losses": [None], "gradient_norm": "x", "scale": True},
        {"step": 2, "loss": 0.5, "losses": [0.5], "gradient_norm": 10**40, "scale": [1]},
    ]
    assert curve_of(records, "loss")["x"].tolist() == [2]
    assert curve_of(records, "gradient_norm") is None and curve_of(records, "scale") is None


def test_damaged_records_are_counted(tmp_path):
    run_dir = make_run(tmp_path, steps=40)
    path = run_dir / STATS
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([lines[0], b"\xff\x00{\n", lines[1], b'{"step": -1}\n', *lines[2:]]))
    run = read_run(run_dir)
    assert run["step"] == 40 and run["notes"] == [
        "stats.jsonl is damaged: 2 lines that are no records are left out."
    ]
    assert "2 lines that are no records" in output_of(
        "report", run_dir, "--out", tmp_path / "r.html"
    )


def test_a_run_that_is_being_written(tmp_path):
    run_dir = make_run(tmp_path, steps=20, planned=100, grids=())
    with open(run_dir / STATS, "ab") as file:
        file.write(b'{"step": 30, "lo')
    run = read_run(run_dir)
    assert (run["step"], run["steps"], run["finished"]) == (20, 100, False)
    assert run["notes"] == ["A report is being written: this page ends at the one before."]
    (run_dir / STATS).unlink()
    assert "has no report yet" in read_run(run_dir)["notes"][0]
    (run_dir / STATS).mkdir()
    with pytest.raises(NumdiffError, match="cannot read the records"):
        read_run(run_dir)


def test_runs_are_found_once(tmp_path):
    run_dir = make_run(tmp_path, steps=10)
    assert find_runs([str(run_dir), "0", str(run_dir / STATS)], tmp_path) == [run_dir]
    for name, outdir, sentence in (
        ("7", tmp_path, "there is no run number 7"),
        (str(tmp_path), tmp_path, "is a folder that holds runs"),
    ):
        with pytest.raises(NumdiffError, match=sentence):
            find_runs([name], outdir)


def test_grids(tmp_path):
    run_dir = make_run(tmp_path, steps=40, grids=range(1, 31))
    (run_dir / "samples-000001.png").write_bytes(b"")
    assert [step for step, _ in list_grids(run_dir)] == list(range(1, 31))
    assert [step for step, _ in list_grids(run_dir, 4)] == [1, 11, 20, 30]
    path = list_grids(run_dir)[0][1]
    assert read_grid(path).size == (60, 40)
    path.write_bytes(path.read_bytes()[:60])
    assert read_grid(path) is None
    path.unlink()
    path.mkdir()
    assert read_grid(path) is None


def test_grids_are_shrunk_to_the_room():
    rng = np.random.default_rng(0)
    noise = [Image.fromarray(rng.integers(0, 256, (300, 300, 3), np.uint8)) for _ in range(4)]
    files = shrink(noise, 60_000)
    assert len(files) == 4 and sum(map(len, files)) <= 60_000
    with pytest.raises(NumdiffError, match="give fewer runs"):
        shrink(noise, 100)


def test_a_run_grows_between_two_reads(tmp_path):
    run_dir = make_run(tmp_path, steps=20, planned=40)
    assert read_run(run_dir)["step"] == 20
    report_steps(run_dir, 20, 40, 10)
    assert read_run(run_dir)["curves"]["loss"]["x"][-1] == 40
