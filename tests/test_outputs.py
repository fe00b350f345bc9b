"""What a command may write: nothing over what it reads, over another of its outputs, or over what
is kept."""

import os

import h5py
import numpy as np
import pytest

from numdiff.errors import NumdiffError, UsageError
from numdiff.files import atomic_file
from numdiff.outputs import check_ending, check_output, check_outputs
from numdiff.training.checkpoint import save_checkpoint
from tests.command import run


@pytest.fixture
def files(tmp_path, monkeypatch):
    """A folder with a run, a checkpoint of it elsewhere, a model file, a dataset and what is none
    of these."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    for name in (
        "run/options.json",
        "run/stats.jsonl",
        "run/loss.png",
        "run/averages-00000001.h5",
        "options.json",
    ):
        (tmp_path / name).write_text("{}")
    os.rename("options.json", "notes.json")
    weights = np.zeros(3, np.float32)
    save_checkpoint("run/checkpoint-00000002.h5", {"parameters": weights, "m": weights}, {})
    save_checkpoint("copy.h5", {"parameters": weights, "m": weights}, {})
    save_checkpoint("run/ema-0.1.h5", {"parameters": weights}, {})
    with h5py.File("data.h5", "w") as file:
        file["images"] = np.zeros((4, 8, 8, 3), np.uint8)
    os.link("data.h5", "data.png")
    (tmp_path / "latest").symlink_to("run")
    return tmp_path


@pytest.mark.parametrize(
    "path, why",
    [
        *(
            (f"{folder}/{name}", "a file of this name is the run's own")
            for folder in ("run", "latest", "./run/../run")
            for name in (
                "options.json",
                "stats.jsonl",
                "averages-00000001.h5",
                "checkpoint-00000002.h5",
                "checkpoint-00000003.h5",
                "checkpoint-00000001.h5.old.2",
            )
        ),
        ("copy.h5", "it is a checkpoint of a run"),
        ("data.h5", "it is a dataset"),
        ("data.png", "it is a dataset"),
    ],
)
def test_what_is_kept_is_not_replaced(files, path, why):
    with pytest.raises(NumdiffError) as refused:
        check_output("the picture", path)
    assert str(refused.value) == f"cannot write the picture {path}: {why}; give another name."


@pytest.mark.parametrize(
    "path", ["run/ema-0.1.h5", "run/loss.png", "run/new.h5", "notes.json", "checkpoint-1.h5"]
)
def test_anything_else_is(files, path):
    check_output("the picture", path, "run", "data.h5", None)


def test_what_a_killed_command_left_is_removed(files):
    for name in ("run/.new.h5.12.tmp", "run/.new.h5.old.12.tmp", ".new.h5.12.tmp"):
        open(name, "w").close()
    with atomic_file("run/new.h5") as writer:  # another process, which lives
        check_output("the model file", "run/new.h5")
        writer.write(b"all")
    assert {n for n in os.listdir("run") if n.startswith((".", "new"))} == {
        "new.h5",
        ".new.h5.old.12.tmp",
    }
    assert os.path.exists(".new.h5.12.tmp")


def test_what_is_read_is_not_replaced(files):
    for path, source in (("notes.json", "./notes.json"), ("run/loss.png", "latest/loss.png")):
        with pytest.raises(
            NumdiffError, match=f"the rows {path}: it is {source}, which is read; give another name"
        ):
            check_output("the rows", path, None, "nowhere", source)


@pytest.mark.parametrize(
    "first, second", [("a.png", "./a.png"), ("a.png", "run/../a.png"), ("run/a", "latest/a")]
)
def test_outputs_are_apart(files, first, second):
    with pytest.raises(
        UsageError, match="^--grid and --json name one file: give them different names.$"
    ):
        check_outputs(
            [
                ("--grid", "the grid", first),
                ("--npz", "the samples", None),
                ("--json", "the rows", second),
            ]
        )
    check_outputs([("--grid", "the grid", "a.png"), ("--json", "the rows", "b.png")])


def test_endings():
    check_ending("--grid", None, ".png")
    check_ending("--grid", "a.PNG", ".png")
    with pytest.raises(UsageError, match="^--grid png must end in .png or .gif.$"):
        check_ending("--grid", "png", ".png", ".gif")


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("data.h5 --sheet data.h5", "--sheet data.h5 must end in .png."),
        (
            "data.h5 --sheet data.png",
            "it is data.h5, which is read; give another name, with --sheet PATH, or use "
            "--no-sheet.",
        ),
        (
            "copy.h5 --sheet data.png",
            "it is a dataset; give another name, with --sheet PATH, or use --no-sheet.",
        ),
        (
            "data.h5 --sheet a.png --no-sheet",
            "--sheet a.png and --no-sheet exclude each other: leave one of them out.",
        ),
        (
            "data.h5 --sheet no/a.png",
            "the folder does not exist; create it or choose another, with --sheet PATH, or use "
            "--no-sheet.",
        ),
    ],
)
def test_a_contact_sheet_is_refused_before_the_dataset_is_read(
    files, monkeypatch, arguments, message
):
    monkeypatch.setattr("numdiff.data.dataset.Dataset", None)
    before = (files / "data.h5").read_bytes()
    result = run("data info", arguments)
    assert (
        result.exit_code in (1, 2)
        and result.output.startswith("Error: ")
        and result.output.endswith(message + "\n")
    ), result.output
    assert (files / "data.h5").read_bytes() == before


@pytest.mark.parametrize(
    "command, message",
    [
        ("bench kernels --json bk.png --png bk.png", "--png and --json name one file"),
        ("bench kernels --json run/stats.jsonl", "a file of this name is the run's own"),
        ("bench ladder unet --csv data.png", "it is a dataset"),
        ("profile unet --out a.png --png ./a.png", "--png and --out name one file"),
        ("bench quality unet --grid qq.svg", "--grid qq.svg must end in .png."),
        ("bench quality unet --grid qq.txt", "--grid qq.txt must end in .png."),
        ("bench quality unet --grid q.png --json q.png", "--grid and --json name one file"),
        (
            "kernels check --trace no/x.html",
            "cannot write the film no/x.html: the folder does not exist",
        ),
    ],
)
def test_results_are_refused_before_the_work(files, command, message):
    result = run(command, "" if command.startswith("kernels") else "--device cpu")
    assert (
        result.exit_code in (1, 2) and message in result.output and result.output.count("\n") == 1
    ), result.output


@pytest.mark.parametrize(
    "path, why",
    [
        ("run/checkpoint-00000002.h5", "a file of this name is the run's own"),
        ("copy.h5", "it is a checkpoint of a run"),
        ("data.h5", None),
    ],
)
def test_an_import_replaces_datasets_alone(files, path, why):
    np.save("images.npy", np.ones((2, 8, 8, 3), np.uint8))
    with open(path, "rb") as file:
        before = file.read()
    result = run("data import images.npy", path, "--force")
    with open(path, "rb") as file:
        assert (file.read() == before) == (why is not None) == (result.exit_code != 0), (
            result.output
        )
    assert (why or "Wrote") in result.output
