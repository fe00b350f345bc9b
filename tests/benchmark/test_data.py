import os

import numpy as np
import pytest
from click.testing import CliRunner

from numdiff.benchmark import data as D
from numdiff.data.writer import Writer
from numdiff_cli.main import main


@pytest.fixture
def path(tmp_path):
    with Writer(tmp_path / "a.h5", gzip=True) as writer:
        for i in range(100):
            writer.append(np.full((64, 64, 3), i, np.uint8))
        writer.finish(None)
    return str(tmp_path / "a.h5")


def test_rows(path):
    warm = [row for row in D.bench_data(path, 32, 30, repeats=2) if not row["cold"]]
    assert [row["where"] for row in warm] == ["file", "memory"]
    for row in warm:
        assert row["mb_per_second"] == pytest.approx(row["images_per_second"] * 32 * 32 * 3 / 1e6)
        assert row["cpu_us"] > 0 and row["open_s"] > 0


def test_the_emulator_gets_the_images(path):
    row = D.measure(path, 8, 40, D.get_backend("emulator"), False, images=41)
    assert row["images_per_second"] > 0


def test_a_file_that_stays_in_the_cache_is_not_called_cold(path, monkeypatch):
    D.read_pages(path)
    monkeypatch.setattr(os, "posix_fadvise", lambda *_: None, raising=False)
    monkeypatch.setattr(D, "cached_share", lambda file: 0.5)
    cold, warm, *_ = D.bench_data(path, 32, repeats=1)
    assert "images_per_second" not in cold and "images_per_second" in warm
    assert (
        D.line(cold)
        == f"{'cold, from the file':24} not measured: the system kept 50 % of its pages"
    )
    monkeypatch.delattr(os, "posix_fadvise")
    assert D.drop_pages(path) == "this system does not drop a file's pages"


def test_words():
    row = {
        "where": "file",
        "cold": False,
        "images_per_second": 10400.0,
        "mb_per_second": 128.0,
        "cpu_us": 8.0,
        "open_s": 0.01,
    }
    assert D.line(row, 5200).endswith("2.0 ×") and len(D.line(row, 5200)) <= len(D.HEADING)
    assert "gives 2.0 × that, enough" in D.verdict([row], 5200)
    assert (
        "gives 1.0 × that, too little" in D.verdict([row], 10400) and D.verdict([row], None) is None
    )


def test_command(path):
    result = CliRunner().invoke(
        main, ["bench", "data", path, "--repeats", "1", "--images", "64", "--device", "cpu"]
    )
    assert result.exit_code == 0, result.output
    assert "\\n" not in result.output and D.HEADING in result.output.splitlines()
    assert (
        "100 images of 64×64×3 uint8, uint8 gzip" in result.output
        and "demand is 5,200 images/s" in result.output
    )
