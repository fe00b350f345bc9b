import os
import subprocess
import sys

import h5py
import numpy as np
import pytest
from PIL import Image

from numdiff.data.dataset import open_dataset
from tests import command


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def run(*words):
    return command.run("data", *words)


@pytest.fixture
def pictures(tmp_path):
    for name, colour in (("cat", "red"), ("dog", "blue")):
        (tmp_path / "pictures" / name).mkdir(parents=True)
        for i in range(3):
            Image.new("RGB", (40, 20), colour).save(tmp_path / "pictures" / name / f"{i}.jpg")
    (tmp_path / "pictures" / "cat" / "broken.jpg").write_bytes(b"?")
    return tmp_path / "pictures"


def test_import_and_info(pictures):
    result = run("import", pictures, "a.h5 --size 16")
    assert result.exit_code == 0, result.output
    assert (
        "Wrote a.h5: 6 images of 16×16×3 from a folder in 2 classes (cat 3, dog 3)" in result.output
    )
    assert (
        "1 unreadable image was left out (cat/broken.jpg: " in result.output
        and "Traceback" not in result.output
    )
    result = run("info a.h5")
    assert result.exit_code == 0, result.output
    for text in ("(6, 16, 16, 3)", "classes  2", "3  cat", "3  dog", "a-sheet.png"):
        assert text in result.output
    with Image.open("a-sheet.png") as sheet:
        assert sheet.format == "PNG" and sheet.width > 16 * 64
    assert sorted(os.listdir()) == ["a-sheet.png", "a.h5", "pictures"]


def test_options(pictures):
    result = run(
        "import",
        pictures,
        "a.h5 --size 20 --fit pad --grey --background black --labels none",
    )
    assert result.exit_code == 0, result.output
    with open_dataset("a.h5") as dataset:
        assert dataset.shape == (6, 20, 20, 1) and dataset.labels is None
        assert not dataset.read([0])[0, :5].any() and dataset.read([0])[0, 5:15].all()
    assert run("import", pictures, "a.h5 --size 8").exit_code == 2
    assert run("import", pictures, "a.h5 --size 8 --force").exit_code == 0
    result = run("info a.h5 --sheet x.png")
    assert os.path.exists("x.png") and "sheet    x.png" in result.output
    run("info a.h5 --no-sheet")
    assert not os.path.exists("a-sheet.png")


def test_info_of_the_default_dataset():
    result = run("info")
    assert "1,906 of 64×64×3" in result.output and "386  People & Body" in result.output
    assert os.listdir() == ["emoji64-sheet.png"]


def test_latents(rng):
    """A file as the README describes it: described, drawn, imported."""
    images = rng.standard_normal((9, 8, 8, 4)).astype(np.float32)
    with h5py.File("latents.h5", "w") as file:
        file["images"], file["labels"], file.attrs["classes"] = (
            images,
            np.arange(9) % 3,
            ["a", "b", "c"],
        )
    result = run("info latents.h5")
    assert result.exit_code == 0, result.output
    for text in (
        "latents  9 of 8×8×4: float32",
        "taken as they are",
        f"{images[..., 0].mean():.4f}",
        "3  b",
        "latents-sheet.png (latents are not decoded",
    ):
        assert text in result.output
    with Image.open("latents-sheet.png") as sheet:
        assert len(np.unique(np.asarray(sheet))) > 100
    assert "9 latents of 8×8×4 from a numdiff dataset" in run("import latents.h5 a.h5").output
    np.save("two.npy", images[..., :2] * 9)
    assert run("import two.npy b.h5").exit_code == 0 and run("info b.h5").exit_code == 0


def test_info_says_how_latents_are_stored():
    np.save("a.npy", np.zeros((3, 8, 8, 4), np.float32))
    assert run("import a.npy a.h5 --latents --float16").exit_code == 0
    assert "3 of 8×8×4: float16 (N, H, W, C)" in run("info a.h5 --no-sheet").output


def test_info_without_labels():
    np.save("a.npy", np.zeros((3, 8, 8), np.uint8))
    assert run("import a.npy a.h5").exit_code == 0
    assert "none (no labels)" in run("info a.h5").output


@pytest.mark.parametrize(
    "arguments",
    [
        "import here",
        "import . out.h5 --size 0",
        "import . out.h5 --size big",
        "import . out.h5 --fit maybe",
        "info a b",
        "unknown",
    ],
)
def test_wrong_usage(arguments):
    result = run(arguments)
    assert result.exit_code == 2 and "Traceback" not in result.output


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("--rgb --grey", "--rgb and --grey exclude each other"),
        ("--latents --pixels", "--latents and --pixels exclude each other"),
        ("--fit pad", "--fit pad needs --size"),
    ],
)
def test_options_that_do_not_go_together(pictures, arguments, message):
    result = run("import", pictures, "a.h5", arguments)
    assert result.exit_code == 2 and message in result.output
    assert not os.path.exists("a.h5")


@pytest.mark.parametrize("name", ["x.txt", "x", "x.h5.npz"])
def test_a_dataset_is_written_under_the_ending_of_one(pictures, name):
    result = run("import", pictures, name, "--size 16")
    assert result.output == f"Error: OUT.h5 {name} must end in .h5 or .hdf5.\n"
    assert not os.path.exists(name)


def test_a_dataset_may_end_in_hdf5(pictures):
    assert run("import", pictures, "x.hdf5 --size 16").exit_code == 0
    assert os.path.exists("x.hdf5")


def test_help_says_what_can_be_imported():
    text = run("import --help").output
    assert all(
        word in text
        for word in ("zip", "cifar-10-python.tar.gz", "idx", ".npz", ".bin", "--labels", "--size")
    )


def test_help_is_quick():
    """Help needs neither NumPy nor Numba."""
    code = "import sys, numdiff_cli.data; sys.exit('numpy' in sys.modules or 'h5py' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
