"""`numdiff sample`, from the command line to the files that it writes."""

import contextlib
import errno
import gc
import io
import json
import os
import pathlib
import re
import signal
import zipfile
from types import SimpleNamespace

import h5py
import numpy as np
import pytest
from PIL import Image

from numdiff.diffusion import SAMPLERS, Diffusion, Sampling
from numdiff.diffusion.pictures import as_in_training
from numdiff.diffusion.sampling import VARIANCES
from numdiff.diffusion.schedule import SPACINGS
from numdiff.errors import NumdiffError, UsageError
from numdiff.extras.convert.models import convert
from numdiff.training import sampling
from numdiff.training.checkpoint import save_checkpoint
from numdiff.training.options import resolve
from numdiff.training.picture_record import read_record
from numdiff.training.precision import MEANING
from numdiff.training.run_folder import create_run
from numdiff.training.sample_files import Frames, SamplesFile, read_mask, read_picture
from numdiff.training.sampling import class_indices, find_model, sample_command
from numdiff_cli.sample import sample as sample_options
from tests import command
from tests.command import last_line
from tests.conftest import MPIEXEC, exhaustive, exhaustively, needs
from tests.distributed.test_distributed import check_done, job, main_of
from tests.distributed.test_distributed import run as run_job
from tests.forked import forked
from tests.models import small_dit, small_unet, with_random_weights, write

CLASSES = ["Cats & Dogs", "birds", "7"]


def write_model(path, seed=0, **options):
    model = small_unet(**{"image_size": 16, "num_classes": 3, **options})
    return write(path, with_random_weights(model, seed=seed), classes=CLASSES, step=12)


def sample(model, **options):
    """The images and the lines of `sample_command` on the CPU."""
    lines = []
    images = sample_command(model, device="cpu", echo=lines.append, **options)
    return images, lines


def test_a_model_of_few_timesteps_takes_them_all(tmp_path):
    model = write(tmp_path / "m.h5", small_unet(), Diffusion(steps=3).options)
    _, said = sample(model, count=1, grid=str(tmp_path / "a.png"))
    assert ": 1 image of " in said[-1] and "ddim, 3 steps, seed 0, " in said[-1]


@pytest.mark.parametrize(
    "own, given, want",
    [
        ({}, {}, ("dpm++2m", 3, 2.0, (0.5, 4.0))),
        ({}, {"steps": "3"}, ("dpm++2m", "3", None, None)),
        ({}, {"steps": 5}, ("dpm++2m", 5, None, None)),  # the interval was chosen for other steps
        ({"cfg_interval": None}, {"steps": 5}, ("dpm++2m", 5, 2.0, None)),
        ({}, {"sampler": "dpm++2m", "cfg_scale": 1}, ("dpm++2m", 3, 1, None)),
        ({}, {"sampler": "heun", "cfg_interval": (1.0, 2.0)}, ("heun", 50, 2.0, (1.0, 2.0))),
        ({"cfg_interval": None}, {"sampler": "heun", "steps": 7}, ("heun", 7, 2.0, None)),
        ({}, {"steps": 0}, ("dpm++2m", 0, None, None)),  # which is refused later
        ({}, {"steps": "ddim7", "guide": "another model"}, ("ddim", "ddim7", None, None)),
        ({}, {"eta": 0.5}, ("ddim", 50, None, None)),
        ({"cfg_interval": None}, {"known": "a picture"}, ("ddim", 50, 2.0, None)),
        (
            {"sampler": "euler-ancestral", "cfg_scale": None},
            {"eta": 0.5},
            ("euler-ancestral", 3, None, None),
        ),
        ({"sampler": "euler-ancestral", "cfg_scale": 1}, {"slerp": 2}, ("ddim", 50, None, None)),
        (
            {"sampler": "euler-ancestral", "cfg_scale": 1},
            {"slerp": 2, "eta": 0},
            ("euler-ancestral", 3, None, None),
        ),
        ({"of a later numdiff": True}, {}, ("dpm++2m", 3, 2.0, (0.5, 4.0))),
        *(
            ({name: value}, {}, ("ddim", 50, None, None))
            for name, value in (
                ("sampler", "of a later numdiff"),
                ("steps", 0),
                ("steps", 10**15),
                ("cfg_scale", 1e20),
                ("cfg_interval", [1]),
                ("cfg_interval", [5, 1]),
            )
        ),
    ],
)
def test_what_is_not_given_is_as_in_the_runs_own_pictures(own, given, want):
    pictures = {
        "sampler": "dpm++2m",
        "steps": 3,
        "cfg_scale": 2.0,
        "cfg_interval": [0.5, 4.0],
        **own,
    }
    model = SimpleNamespace(meta={"pictures": pictures}, diffusion={}, null_class=3)
    sampler, steps, eta = (given.pop(name, None) for name in ("sampler", "steps", "eta"))
    made = as_in_training(model, sampler, steps, eta, given)
    assert (*made, given.get("cfg_scale"), given.get("cfg_interval")) == want


@pytest.mark.parametrize("meta", [None, {}, {"pictures": None}, {"pictures": {}}])
def test_without_a_run_the_sampler_is_ddim(meta):
    more = {}
    assert as_in_training(
        SimpleNamespace(meta=meta, diffusion={"steps": 20}), None, None, None, more
    ) == ("ddim", 20)
    assert not more


def test_pictures_are_drawn_as_the_file_tells(tmp_path):
    pictures = {"sampler": "dpm++2m", "steps": 2, "cfg_scale": None, "cfg_interval": None}
    model = write(tmp_path / "m.h5", small_unet(), pictures=pictures)
    for given, text in (
        ({}, "dpm++2m, 2 steps"),
        ({"eta": 0.5}, "ddim (for --eta, in place of the run's dpm++2m), 50 steps, eta 0.5, seed"),
        (
            {"steps": "ddim2"},
            "ddim (for --steps, in place of the run's dpm++2m), 2 steps (ddim2), ",
        ),
        ({"sampler": "ddim", "eta": 1}, "weights), ddim, 50 steps, eta 1, seed"),
    ):
        _, said = sample(model, count=1, grid=str(tmp_path / "a.png"), **given)
        assert text in said[-1]


@pytest.fixture(scope="module")
def model_file(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model") / "model.h5")


def run(*words):
    return command.run("sample", *words, "--device cpu")


def pixels(path):
    with Image.open(path) as picture:
        return np.asarray(picture)


# What it writes -----------------------------------------------------------------------------------


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_every_sampler_draws_a_grid(model_file, tmp_path, sampler):
    result = run(model_file, "--sampler", sampler, "--count 3 --steps 2 --grid", tmp_path / "a.png")
    assert result.exit_code == 0, result.output
    assert f"converted weights), {sampler}, 2 steps" in last_line(
        result
    ) and "seeds 0 to 2" in last_line(result)
    # a column a class, each pixel eight wide
    assert pixels(tmp_path / "a.png").shape == (132, 3 * 130 + 2, 3)


def test_the_command_offers_what_there_is():
    choices = {p.name: list(getattr(p.type, "choices", ())) for p in sample_options.params}
    assert choices["sampler"] == list(SAMPLERS) and choices["spacing"] == [*SPACINGS, "time"]
    assert choices["variance"] == list(VARIANCES) and choices["precision"] == [
        "auto",
        *MEANING,
        "fp8",
    ]


def test_npz_for_evaluators(model_file, tmp_path):
    result = run(
        model_file,
        "--count 5 --steps 2 --batch 2 --seed 9 --npz",
        tmp_path / "a.npz",
    )
    assert result.exit_code == 0 and [p.name for p in tmp_path.iterdir()] == ["a.npz"], (
        result.output
    )
    with np.load(tmp_path / "a.npz", allow_pickle=False) as file:
        images, labels, record = file["arr_0"], file["arr_1"], json.loads(str(file["numdiff"]))
    assert images.shape == (5, 16, 16, 3) and images.dtype == np.uint8
    assert labels.tolist() == [0, 1, 2, 0, 1] and labels.dtype == np.int64
    assert {
        k: record[k]
        for k in ("sampler", "steps", "seed", "count", "eta", "weights", "training_steps")
    } == {
        "sampler": "ddim",
        "steps": 2,
        "seed": 9,
        "count": 5,
        "eta": 0.0,
        "weights": "converted",
        "training_steps": 12,
    }
    shown, _ = sample(model_file, count=5, steps=2, batch=5, seed=9, grid=tmp_path / "b.png")
    assert np.abs(shown.astype(int) - images).max() <= 1


def test_grey_samples_get_three_channels_and_latents_stay_latents(tmp_path):
    grey = write_model(tmp_path / "grey.h5", in_channels=1)
    sample(grey, count=2, steps=1, npz=tmp_path / "grey.npz", grid=tmp_path / "grey.png")
    with np.load(tmp_path / "grey.npz") as file:
        images = file["arr_0"]
    assert images.shape == (2, 16, 16, 3) and (images[..., :1] == images).all()
    assert pixels(tmp_path / "grey.png").ndim == 2
    latents = write_model(tmp_path / "latents.h5", in_channels=4)
    with pytest.raises(UsageError, match="latents of 4 channels"):
        sample(latents, count=2, steps=1, grid=tmp_path / "l.png")
    sample(latents, count=2, steps=1, npz=tmp_path / "latents.npz")
    with np.load(tmp_path / "latents.npz") as file:
        latents = file["arr_0"]
    assert latents.shape == (2, 16, 16, 4) and latents.dtype == np.float32


def test_samples_are_written_as_they_come_and_a_full_disk_is_told_at_once():
    class Full(io.BytesIO):
        limit = 3000

        def check(self):
            if self.tell() > self.limit:
                raise OSError(errno.ENOSPC, "No space left on device")

    file = Full()
    samples = SamplesFile(file, (100, 16, 16, 3), np.uint8)
    samples.write(np.zeros((2, 16, 16, 3), np.uint8))
    assert 1536 < file.tell() < 2500
    with pytest.raises(OSError, match="No space"):
        for _ in range(10):
            samples.write(np.zeros((2, 16, 16, 3), np.uint8))


@pytest.mark.parametrize("name", ["a.gif", "a.png", "a.APNG"])
def test_animation(model_file, tmp_path, name):
    path = tmp_path / name
    result = run(
        model_file,
        "--count 3 --batch 2 --steps 6 --frames 4 --animation",
        path,
        "--columns 3",
    )
    assert result.exit_code == 0 and list(tmp_path.iterdir()) == [path], result.output
    final, _ = sample(model_file, count=3, batch=2, steps=6, grid=tmp_path / "b.png", columns=3)
    assert len(final) == 3
    with Image.open(path) as picture:
        # equal frames are written as one
        assert picture.n_frames in (4, 5) and picture.info["loop"] == 0
        first = np.asarray(picture.convert("RGB"), int)
        picture.seek(picture.n_frames - 1)
        last = np.asarray(picture.convert("RGB"), int)
    grid = pixels(tmp_path / "b.png").astype(int)
    assert first.shape == last.shape == grid.shape
    assert np.abs(last - grid).mean() < (12 if name == "a.gif" else 0.01)  # a GIF has 256 colours
    noise = first[2:130:8, 2:130:8].reshape(-1, 3)
    assert noise.std() > 60  # noise, at first


def test_frames_are_evenly_spread():
    frames = Frames(3, (2, 2, 1), 100, 5)
    for k in range(100):
        frames.watch(slice(0, 2), k, lambda k=k: np.full((2, 2, 2, 1), k, np.uint8))
        # image 3 is not shown
        frames.watch(slice(2, 4), k, lambda k=k: np.full((2, 2, 2, 1), k + 100, np.uint8))
    assert frames.images[:-1, :, 0, 0, 0].tolist() == [[k, k, k + 100] for k in (0, 24, 49, 74, 99)]


def test_slerp(model_file, tmp_path):
    result = run(
        model_file,
        "--count 6 --slerp 3 --sampler heun --steps 2 --class birds --grid",
        tmp_path / "a.png",
    )
    assert result.exit_code == 0 and pixels(tmp_path / "a.png").shape == (262, 392, 3), (
        result.output
    )
    assert "seeds 0 to 2" in last_line(result)


# Stopped, and shared by ranks ---------------------------------------------------------------------


def read_npz(path):
    with np.load(path, allow_pickle=False) as file:  # checks the archive's checksums, too
        return file["arr_0"], file["arr_1"], json.loads(str(file["numdiff"]))


@contextlib.contextmanager
def stopped_in(evaluation, number=signal.SIGINT):
    """Sampling gets a signal in this evaluation of the model, counted from 1. Gives a list with an
    entry for each."""
    seen, original = [], Sampling.batches

    def stopping(self, progress, *more):
        def count():
            seen.append(1)
            if len(seen) == evaluation:
                os.kill(os.getpid(), number)
            progress()

        return original(self, count, *more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Sampling, "batches", stopping)
        yield seen


@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_what_was_made_before_a_stop_is_kept(model_file, tmp_path, number, code):
    whole = tmp_path / "whole.npz"
    sample(model_file, count=7, steps=2, batch=2, npz=whole)
    says = (
        "stopped after 4 of 7 images, which .*b.png, .*a.npz hold; the others are "
        "made by the same command with --skip 4, and other file names.$"
    )
    with (
        stopped_in(6, number) as evaluations,  # in the third batch
        pytest.raises(NumdiffError, match=says) as stop,
    ):
        sample(
            model_file, count=7, steps=2, batch=2, npz=tmp_path / "a.npz", grid=tmp_path / "b.png"
        )
    assert stop.value.exit_code == code and len(evaluations) == 6
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.npz", "b.png", "whole.npz"]
    images, labels, record = read_npz(tmp_path / "a.npz")
    np.testing.assert_array_equal(images, read_npz(whole)[0][:4])
    assert labels.tolist() == [0, 1, 2, 0] and record["count"] == 4
    assert zipfile.ZipFile(tmp_path / "a.npz").testzip() is None
    sample(model_file, count=7, skip=4, steps=2, batch=2, npz=tmp_path / "rest.npz")
    for name in range(2):
        np.testing.assert_array_equal(
            read_npz(tmp_path / "rest.npz")[name], read_npz(whole)[name][4:]
        )
    (tmp_path / "rest.npz").unlink()
    says = "stopped before the first 2 images were done; nothing was written"
    with stopped_in(1, number), pytest.raises(NumdiffError, match=says) as stop:
        sample(model_file, count=7, steps=2, batch=2, npz=tmp_path / "c.npz")
    assert stop.value.exit_code == code and not (tmp_path / "c.npz").exists()
    assert len(list(tmp_path.iterdir())) == 3


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"class_name": ["7", "birds"]},
        {"slerp": 2, "class_name": "1"},
        {"slerp": 2, "sampler": "dpm++2m"},
    ],
)
def test_the_rest_of_the_images_is_that_of_all(model_file, tmp_path, more):
    """…in their classes and pixels, wherever a stop was."""
    how = {"count": 6, "steps": 2, "batch": 4, "seed": 3, "device": "cpu", **more}
    sample_command(model_file, npz=tmp_path / "whole.npz", **how)
    sample_command(model_file, npz=tmp_path / "rest.npz", skip=2, **how)
    for whole, rest in zip(
        read_npz(tmp_path / "whole.npz")[:2], read_npz(tmp_path / "rest.npz")[:2], strict=True
    ):
        np.testing.assert_array_equal(whole[2:], rest)


@pytest.mark.parametrize(
    "names, given, want, said",
    [
        (
            ["1", "2", "3", "4"],
            None,
            [0, 1, 2, 3, 0],
            ["classes   '1' (index 0), '2' (index 1), '3' (index 2), '4' (index 3), in turn"],
        ),
        (["1", "2", "3", "4"], "1", [0] * 5, ["classes   '1' (index 0)"]),
        (
            ["1", "2", "3", "4"],
            ("0", "4"),
            [0, 3, 0, 3, 0],
            [
                "note      --class 0 is no name of a class, and is read as an index: '1'",
                "classes   '1' (index 0), '4' (index 3), in turn",
            ],
        ),
        ([], "3", [3] * 5, ["classes   index 3"]),
        (["café", "b", "c", "d"], "CAFE\u0301", [0] * 5, ["classes   'café' (index 0)"]),
        (["cafe\u0301", "b", "c", "d"], "café", [0] * 5, ["classes   'cafe\u0301' (index 0)"]),
    ],
)
def test_the_classes_that_are_made_are_said(tmp_path, names, given, want, said):
    model = write(tmp_path / "m.h5", small_unet(num_classes=4), classes=names)
    _, lines = sample(model, count=5, steps=1, class_name=given, npz=tmp_path / "a.npz")
    assert lines[:-1] == said and read_npz(tmp_path / "a.npz")[1].tolist() == want


@exhaustive
@needs("mpi")
@pytest.mark.parametrize(
    "first, second, text",
    [
        (
            ["a/m.h5", "--class", "0"],
            ["a/m.h5", "--class", "1"],
            r"--class: rank 0 has \('0',\), rank 1 has \('1',\);",
        ),
        (["m.h5", "-wdir", "a"], ["m.h5", "-wdir", "b"], "what is in m.h5: rank 0 has"),
    ],
    ids=["options", "models"],
)
def test_ranks_that_would_make_different_images_are_refused(tmp_path, first, second, text):
    for seed, name in enumerate("ab"):
        (tmp_path / name).mkdir()
        write_model(tmp_path / name / "m.h5", seed)
    ranks = []
    for arguments in (first, second):
        folder = tmp_path / arguments[2] if "-wdir" in arguments else tmp_path
        more = arguments[:1] if "-wdir" in arguments else arguments
        how = "--count 4 --batch 2 --steps 2 --device cpu --npz".split()
        command = *main_of(forked()), "sample", *more, *how, str(tmp_path / "x.npz")
        ranks.append(["-n", "1", "-wdir", str(folder), *command])
    result = run_job([MPIEXEC, *ranks[0], ":", *ranks[1]])
    assert result.returncode and re.search("Error: the ranks disagree on " + text, result.stderr), (
        result.stderr
    )
    assert "Traceback" not in result.stderr and not (tmp_path / "x.npz").exists()


@needs("mpi")
@pytest.mark.parametrize("count", [2, *exhaustively(4)])
def test_ranks_make_the_images_of_one(model_file, tmp_path, count):
    """Several ranks, of which one has nothing to do in the end."""
    options = "--count 7 --steps 2 --batch 1 --cfg-scale 1 --seed 3 --device cpu"
    assert run(model_file, options, "--npz", tmp_path / "one.npz").exit_code == 0
    files = "--npz", str(tmp_path / "all.npz"), "--grid", str(tmp_path / "all.png")
    arguments = "sample", str(model_file), *options.split(), *files
    out = check_done(run_job(job(count, *main_of(forked()), *arguments)))
    assert len(out.splitlines()) == 2 and "all.npz" in out
    for one, four in zip(
        read_npz(tmp_path / "one.npz"), read_npz(tmp_path / "all.npz"), strict=True
    ):
        assert np.array_equal(one, four)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["all.npz", "all.png", "one.npz"]


# Inpainting ---------------------------------------------------------------------------------------


def test_inpainting_keeps_the_picture_where_the_mask_is_black(model_file, tmp_path):
    picture = np.random.default_rng(0).integers(0, 256, (16, 16, 3)).astype(np.uint8)
    mask = np.zeros((16, 16), np.uint8)
    mask[3:9, 5:11] = 255
    Image.fromarray(picture).save(tmp_path / "p.png")
    Image.fromarray(mask).save(tmp_path / "m.png")
    images, _ = sample(
        model_file,
        count=3,
        batch=2,
        steps=4,
        inpaint=tmp_path / "p.png",
        mask=tmp_path / "m.png",
        grid=tmp_path / "a.png",
        class_name="birds",
    )
    assert (images[:, mask == 0] == picture[mask == 0]).all()
    assert (images[:, mask == 255] != picture[mask == 255]).mean() > 0.9
    result = run(
        model_file,
        "--inpaint",
        tmp_path / "p.png",
        "--mask top --steps 2 --count 1 --grid",
        tmp_path / "b.png",
    )
    assert result.exit_code == 0 and "repaint, 2 steps" in last_line(result)


def test_a_picture_to_start_from(model_file, tmp_path):
    """At strength 0 it comes back to the bit; in between the record and the line say how."""
    picture = np.random.default_rng(0).integers(0, 256, (16, 16, 3)).astype(np.uint8)
    Image.fromarray(picture).save(tmp_path / "p.png")
    given = {"count": 2, "steps": 4, "device": "cpu", "grid": tmp_path / "a.png"}
    same = sample_command(model_file, init_image=tmp_path / "p.png", strength=0.0, **given)
    assert (same == picture).all()
    options = "--strength 0.5 --steps 4 --count 1 --init-image"
    result = run(model_file, options, tmp_path / "p.png", "--grid", tmp_path / "b.png")
    assert result.exit_code == 0 and "2 steps, strength 0.5" in last_line(result)


def test_pictures_are_inverted_and_interpolated(model_file, tmp_path, monkeypatch):
    """The pictures come back at the ends of their rows, whatever the batch or what was skipped."""
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    for name in "abc":
        Image.fromarray(rng.integers(0, 256, (16, 16, 3)).astype(np.uint8)).save(f"{name}.png")
    pictures = ("a.png", "b.png", "c.png")
    given = {"steps": 4, "class_name": "birds", "sampler": "euler"}
    alone, lines = sample(model_file, invert=pictures, **given)
    assert len(alone) == 3 and "3 pictures inverted" in lines[-1]
    rows, _ = sample(model_file, invert=pictures, slerp=3, batch=2, **given)
    assert np.abs(rows[[0, 2, 3, 5]].astype(int) - alone[[0, 1, 1, 2]]).max() <= 1
    error = np.mean([np.abs(alone[i] - read_pixels(pictures[i])).mean() for i in range(3)])
    assert f"mean error {error:.2f} of 255" in lines[-2]
    rest, _ = sample(model_file, invert=pictures, slerp=3, skip=3, **given)
    assert np.array_equal(rest, rows[3:])
    for options, sentence in (
        ("--count 2", "--invert makes one image of each picture, or with --slerp a row"),
        ("--sampler ddpm", "--invert needs a sampler that adds no noise, and ddpm does"),
    ):
        result = run(model_file, "--invert a.png", options)
        assert result.exit_code == 2 and sentence in last_line(result)


def read_pixels(path):
    return np.asarray(Image.open(path), float)


@pytest.mark.parametrize(
    "lightness, said",
    [
        (0, "is black everywhere, so nothing is repainted of"),
        (255, "is white everywhere, so nothing is kept of"),
    ],
)
def test_a_mask_of_one_colour_is_noted(model_file, tmp_path, capfd, lightness, said):
    Image.new("RGB", (16, 16)).save(tmp_path / "p.png")
    Image.new("L", (16, 16), lightness).save(tmp_path / "m.png")
    given = {
        "count": 1,
        "steps": 2,
        "inpaint": tmp_path / "p.png",
        "device": "cpu",
        "grid": tmp_path / "a.png",
    }
    sample_command(model_file, mask=tmp_path / "m.png", **given)
    assert (
        f"note: --mask {tmp_path / 'm.png'} {said} {tmp_path / 'p.png'}.\n"
        == capfd.readouterr().err
    )
    sample_command(model_file, mask="left", **given)
    assert "note" not in capfd.readouterr().err


def test_latents_are_not_inpainted_from_a_picture(tmp_path):
    Image.new("RGB", (16, 16)).save(tmp_path / "a.png")
    model = write_model(tmp_path / "latents.h5", in_channels=4, out_channels=4)
    result = run(model, "--inpaint", tmp_path / "a.png", "--mask left --npz", tmp_path / "x.npz")
    assert (
        result.exit_code == 2
        and "makes latents of 4 channels, and --inpaint takes a picture" in last_line(result)
    )


def test_pictures_and_masks(tmp_path):
    ramp = np.repeat(np.arange(0, 256, 4, dtype=np.uint8)[None], 64, 0)
    Image.fromarray(ramp).save(tmp_path / "grey.png")
    read = read_picture(tmp_path / "grey.png", (32, 32, 3))  # resized, and given colours
    assert (
        read.shape == (32, 32, 3)
        and read.dtype == np.float32
        and abs(read[0, 16, 0] - 2 / 127.5) < 0.05
    )
    clear = np.zeros((16, 16, 4), np.uint8)
    Image.fromarray(clear).save(tmp_path / "clear.png")
    # what is transparent is white
    assert (read_picture(tmp_path / "clear.png", (16, 16, 3)) == 1).all()
    assert read_picture(tmp_path / "clear.png", (16, 16, 1)).shape == (16, 16, 1)
    for side, made in (
        ("left", np.s_[:, :8]),
        ("right", np.s_[:, 8:]),
        ("top", np.s_[:8]),
        ("bottom", np.s_[8:]),
        ("centre", np.s_[4:12, 4:12]),
    ):
        mask = read_mask(side, 16)
        assert (
            mask.dtype == np.float32
            and not mask[made].any()
            and mask.sum() == 256 - mask[made].size
        )
    Image.fromarray(ramp[:, :32]).save(tmp_path / "wide.png")
    (tmp_path / "text.png").write_text("not a picture")
    for function, message in (
        (
            lambda: read_picture(tmp_path / "wide.png", (16, 16, 3)),
            "64×32 pixels, height × width, and the model makes images of 16×16",
        ),
        (lambda: read_mask(str(tmp_path / "wide.png"), 16), "the mask .* of 16×16"),
        (lambda: read_picture(tmp_path / "no.png", (16, 16, 3)), "no picture"),
        (lambda: read_mask("middle", 16), "give one of left, right"),
        (lambda: read_picture(tmp_path / "text.png", (16, 16, 3)), "not an image that Pillow"),
    ):
        with pytest.raises(NumdiffError, match=message):
            function()


# What it refuses ----------------------------------------------------------------------------------


def test_classes_by_name_in_any_case_and_by_index(model_file):
    class Model:
        num_classes, meta = 3, {"classes": CLASSES}

    model = Model()
    for name in ("cats & dogs", "CATS & Dogs", "Cats & Dogs", "0"):
        assert class_indices(name, model) == [0]
    assert class_indices(("Birds", "2", 1), model) == [1, 2, 1]
    assert class_indices("7", model) == [2]  # a name comes before an index
    assert class_indices(None, model) is class_indices((), model) is None
    for wrong in ("fish", "3", "-1", "99999999999999999999", "²", "", 3):
        with pytest.raises(
            UsageError, match="the model has no class .* 'birds', '7' or an index from 0 to 2"
        ):
            class_indices(wrong, model)
    model.meta = {"classes": ["a", "A", "b", "b"]}
    model.num_classes = 4
    assert class_indices(("a", "A", "2"), model) == [0, 1, 2]
    with pytest.raises(
        UsageError, match=r"--class b may be 'b' \(index 2\) or 'b' \(index 3\): give its index"
    ):
        class_indices("b", model)
    model.meta = {"classes": ["CAT", "Cat"]}
    with pytest.raises(UsageError, match="--class cat may be .*: give its exact name"):
        class_indices("cat", model)
    model.meta, model.num_classes = {}, 3
    with pytest.raises(UsageError, match="use an index from 0 to 2"):
        class_indices("birds", model)
    model.num_classes = None
    with pytest.raises(UsageError, match="without classes"):
        class_indices("birds", model)


BAD = [  # arguments, exit code, what the message says
    ("--class fish", 2, "the model has no class 'fish'"),
    ("--class 3", 2, "an index from 0 to 2"),
    ("--cfg-scale 2", 2, "guidance needs a model with a null class"),
    ("--cfg-scale much", 2, "--cfg-scale"),
    ("--cfg-interval 1,5", 2, "--cfg-interval has no effect without guidance"),
    ("--cfg-interval a,5", 2, "'a,5' is not a list of numbers"),
    ("--guide-scale 2", 2, "give --guide-with, too"),
    ("--guide-with nowhere", 1, "--guide-with: nowhere does not exist"),
    ("--cfg-scale nan", 2, "finite"),
    ("--cfg-channels 3", 2, "give a --cfg-scale"),
    ("--sampler leapfrog", 2, "--sampler"),
    ("--steps 0", 2, "--steps"),
    ("--steps 5000", 2, "5000"),
    ("--steps ²", 2, "neither a number from 1 to 100,000 nor a respacing"),
    ("--steps 100001", 2, "'100001' is neither a number from 1 to 100,000 nor a respacing"),
    ("--steps ddim", 2, "nor a respacing"),
    ("--steps ddim999", 2, "no stride takes 999"),
    ("--steps ddim10 --spacing karras", 2, "--steps 'ddim10' already"),
    ("--s-churn 3", 2, "--s-churn belongs to heun and euler"),
    ("--sampler heun --s-noise 1", 2, "--s-churn above 0"),
    ("--sampler ddpm --eta 0.5", 2, "takes none: leave --eta out"),
    ("--variance large", 2, ": --variance belongs to"),
    ("--sampler ddpm --variance learned", 2, "trained with --learn-sigma"),
    ("--spacing karras --time-shift 2", 2, "--time-shift 2 shifts the levels of --spacing time"),
    (
        "--weights raw --ema-std 0.1",
        2,
        "--ema-std 0.1 is of averaged weights, and does not go with --weights raw",
    ),
    ("--skip 16", 2, "--skip 16 leaves none of the 16 images of --count"),
    ("--slerp 4 --skip 3", 2, "--skip 3 must leave whole rows of --slerp 4: give 0"),
    ("--slerp 5", 2, ": --slerp needs whole rows"),
    (f"--slerp {2**64}", 2, f"--slerp {2**64} makes rows of more than"),
    ("--slerp 4 --sampler ddpm", 2, "adds no noise"),
    ("--sampler heun --s-churn 3 --s-tmin 5 --s-tmax 2", 2, "--s-tmin 5 is above --s-tmax 2"),
    (
        "--sampler heun --s-churn 3 --s-tmax 0.00001",
        2,
        "--s-tmax 1e-05 leaves --s-churn none of the noise levels",
    ),
    ("--sampler euler --s-churn 3 --s-tmin 1e9", 2, "--s-tmin 1e+09 leaves --s-churn none"),
    ("--frames 3", 2, "--frames 3 needs --animation"),
    ("--jump 3", 2, "--jump 3 needs --inpaint"),
    ("--resamples 3", 2, "--resamples 3 needs --inpaint"),
    ("--npz a.npz --columns 3", 2, "--columns 3 needs --grid or --animation"),
    ("--seed 4294967290", 2, "must be between 0 and 4294967295"),
    ("--grid a.jpg", 2, "--grid a.jpg must end in .png"),
    ("--npz a.h5", 2, "--npz a.h5 must end in .npz"),
    ("--animation a.mp4", 2, "--animation a.mp4 must end in .gif or .png or .apng"),
    ("--animation a.png --grid a.png", 2, "one file"),
    ("--animation ../{here}/a.png --grid a.png", 2, "--grid and --animation name one file"),
    ("--inpaint a.png", 2, "belong together"),
    ("--mask left", 2, "belong together"),
    ("--inpaint a.png --mask left", 2, "no picture a.png"),
    ("--inpaint a.png --mask left --sampler heun", 2, "leave --sampler out"),
    ("--strength 0.5", 2, "--strength 0.5 needs --init-image: add it"),
    ("--init-image a.png --strength 2", 2, "2 is not in the range"),
    ("--init-image a.png", 2, "no picture a.png"),
    (
        "--init-image a.png --inpaint a.png --mask left",
        2,
        "--init-image and --inpaint exclude each other",
    ),
    ("--invert a.png", 2, "no picture a.png"),
    ("--invert a.png --slerp 4", 2, "give --invert once more"),
    ("--invert a.png --init-image b.png", 2, "--invert and --init-image exclude each other"),
    ("--precision fp16", 2, "--precision fp16 computes on a GPU; on the CPU use --precision fp32"),
    ("--precision tf32", 2, "--precision tf32 needs a GPU"),
    ("--precision half", 2, "--precision"),
    ("--npz no/where.npz --steps 1", 1, "the folder does not exist"),
    ("--count 0", 2, "--count"),
    # before hours of work
    ("--grid no/where.png --count 10000000", 1, "the folder does not exist"),
    ("--animation no/where.gif --count 10000000", 1, "the folder does not exist"),
]


@pytest.mark.parametrize("arguments, exit_code, message", BAD, ids=[a for a, _, _ in BAD])
def test_bad_input_is_one_sentence(
    model_file, tmp_path, monkeypatch, arguments, exit_code, message
):
    monkeypatch.chdir(tmp_path)
    result = run(model_file, arguments.format(here=tmp_path.name))
    assert result.exit_code == exit_code, result.output
    assert last_line(result).startswith("Error: ") and message in last_line(result)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("option", ["--grid", "--animation"])
@pytest.mark.parametrize("read", ["picture.png", "mask.png", "data.png"])
def test_what_it_reads_is_not_replaced(model_file, tmp_path, monkeypatch, option, read):
    monkeypatch.chdir(tmp_path)
    for name in ("picture.png", "mask.png"):
        Image.new("RGB", (16, 16)).save(name)
    with h5py.File("data.png", "w") as file:
        file["images"] = np.zeros((2, 8, 8, 3), np.uint8)
    before = (tmp_path / read).read_bytes(), (tmp_path / read).stat().st_mtime_ns
    result = run(model_file, "--inpaint picture.png --mask mask.png", option, tmp_path / read)
    assert result.exit_code == 1 and last_line(result).startswith("Error: cannot write the "), (
        result.output
    )
    assert (
        "it is a dataset" if read == "data.png" else f"it is {read}, which is read"
    ) in last_line(result)
    assert ((tmp_path / read).read_bytes(), (tmp_path / read).stat().st_mtime_ns) == before


@pytest.mark.parametrize(
    "most, says",
    [
        (64, "which {} holds; the others are made by the same command with --skip 4, "),
        (
            3,
            "of which {} holds the first 3; the others are made by the same command "
            "with --skip 3, and another file name.",
        ),
    ],
)
def test_a_stopped_animation_has_what_is_finished(model_file, tmp_path, monkeypatch, most, says):
    how = {"steps": 3, "batch": 2, "device": "cpu", "columns": 4}
    monkeypatch.setattr(sampling, "ANIMATED", most)
    says = "stopped after 4 of 7 images, " + says.format(tmp_path / "a.png")
    with stopped_in(8), pytest.raises(NumdiffError, match=says):  # in the third batch
        sample_command(model_file, count=7, animation=tmp_path / "a.png", **how)
    sample_command(model_file, count=4, animation=tmp_path / "b.png", **how)
    with Image.open(tmp_path / "a.png") as stopped, Image.open(tmp_path / "b.png") as whole:
        assert stopped.n_frames == whole.n_frames > 2
        for frame in range(whole.n_frames):
            stopped.seek(frame)
            whole.seek(frame)
            assert stopped.tobytes() == whole.tobytes()
    assert read_record(tmp_path / "a.png")["count"] == 4


def test_averages_that_no_run_kept_are_refused(tmp_path):
    """If they are requested; the message names the weights in use."""
    model = small_unet()
    flat = np.zeros(model.parameters.total, np.float32)
    for name, more in (("raw", {}), ("both", {"ema": flat})):
        save_checkpoint(
            tmp_path / f"{name}.h5",
            {"parameters": flat, "m": flat, **more},
            {
                "model": "unet",
                "model_options": model.options,
                "index": model.parameters.index,
                "step": 3,
            },
        )
    how = "--count 1 --steps 2 --npz", tmp_path / "a.npz"
    for name, weights, text in (
        ("raw", "", "raw weights"),
        ("raw", "--weights raw", "raw weights"),
        ("both", "", "ema weights"),
        ("both", "--weights raw", "raw weights"),
    ):
        result = run(tmp_path / f"{name}.h5", *how, *weights.split())
        assert result.exit_code == 0 and text in last_line(result), result.output
    for name, more in (
        ("sample", "--device cpu"),
        ("convert", "m.h5"),
        ("schedule", "--device cpu"),
    ):
        result = command.run(name, tmp_path / "raw.h5", "--weights ema", more)
        assert "give --weights raw, or leave that out" in last_line(result), result.output
        assert result.exit_code == 2


def test_a_worse_model_guides(model_file, tmp_path):
    """Another model of the same images; the log and the npz record it."""
    other = write_model(tmp_path / "other.h5", seed=1, model_channels=32, num_res_blocks=2)
    how = "--count 2 --steps 3 --npz"
    result = run(
        model_file,
        how,
        tmp_path / "a.npz",
        "--guide-with",
        other,
        "--guide-scale 1.5 --cfg-interval 0.005,50",
    )
    assert result.exit_code == 0, result.output
    assert (
        "3 steps, autoguidance 1.5 for sigma 0.005 to 50 (2 of 3 evaluations), seeds"
        in last_line(result)
    )
    assert run(model_file, how, tmp_path / "b.npz").exit_code == 0
    with np.load(tmp_path / "a.npz") as a, np.load(tmp_path / "b.npz") as b:
        record = json.loads(str(a["numdiff"]))
        assert (record["guide"], record["guide_scale"], record["cfg_interval"]) == (
            str(other),
            1.5,
            [0.005, 50.0],
        )
        assert not np.array_equal(a["arr_0"], b["arr_0"]) and "guide" not in json.loads(
            str(b["numdiff"])
        )
    for guide, message in (
        (model_file, "is the model itself"),
        (write_model(tmp_path / "small.h5", image_size=8), "the guide makes images of 8×8×3"),
    ):
        result = run(model_file, "--guide-with", guide)
        assert result.exit_code == 2 and message in last_line(result)


def test_what_is_no_run_is_told_so(model_file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = resolve({"device": "cpu", "preset": "tiny", "outdir": str(tmp_path / "mine")})
    run_dir = create_run(options)
    (tmp_path / "empty").mkdir()
    for where, message in (
        ("mine", "mine is a folder that holds runs, and not itself a run: give one of them"),
        ("empty", "empty is not a run folder"),
        (run_dir, "has no valid checkpoint to sample from"),
        ("auto", "there is no run with a checkpoint in runs"),
        ("nowhere", "does not exist"),
        ("3", "no run number 3"),
    ):
        with pytest.raises(NumdiffError, match=message):
            find_model(where, "runs", print)
    assert find_model(model_file) == model_file


@pytest.mark.parametrize("target", ["w.npz", "folder"])
def test_weights_need_no_conversion(tmp_path, monkeypatch, target):
    """The same images, with the run's own sampler and classes; what is read is not replaced."""
    monkeypatch.chdir(tmp_path)
    model = with_random_weights(small_dit(in_channels=4, num_classes=3))
    write("m.h5", model, step=12, classes=CLASSES, pictures={"sampler": "heun", "steps": 2})
    convert("m.h5", target)
    images = []
    for source in ("m.h5", target):
        result = run(
            source,
            "--class birds --count 2 --npz a.npz --guide-with",
            "m.h5" if source == target else target,
        )
        assert result.exit_code == 0, result.output
        assert f"{source} (step 12, converted weights), heun, 2 steps" in result.output
        images.append(read_npz("a.npz")[0])
    assert np.array_equal(*images)
    read = target if target == "w.npz" else "folder/config.json"
    result = run(target, "--npz" if target == "w.npz" else "--grid", read)
    assert result.exit_code != 0 and pathlib.Path(read).stat().st_size


@pytest.mark.parametrize("fails", ["disk", "model"])
def test_nothing_is_left_of_samples_that_could_not_be_made(
    tmp_path, monkeypatch, model_file, fails
):
    """One sentence, which says that the disk is full, and no error of the archive's when Python
    lets go of it."""
    left, unraisable = [3000], []

    def write_some(self, data):
        left[0] -= len(data)
        if left[0] < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return io.FileIO.write(self, data)

    def fail(*_):
        raise NumdiffError("the model failed.")

    if fails == "disk":
        monkeypatch.setattr("numdiff.files.TemporaryFile._write_some", write_some)
    else:
        monkeypatch.setattr("numdiff.diffusion.sampling.Sampling.batches", fail)
    monkeypatch.setattr("sys.unraisablehook", lambda error: unraisable.append(error.exc_value))
    result = run(model_file, "--count 8 --batch 2 --steps 1 --npz", tmp_path / "a.npz")
    gc.collect()
    assert result.exit_code == 1 and not unraisable and not list(tmp_path.iterdir())
    assert ("the disk is full" if fails == "disk" else "the model failed.") in last_line(result)
