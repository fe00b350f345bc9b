"""Whole runs on the CPU engine: the folder they leave, resume, stops, kills."""

import errno
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time

import h5py
import numpy as np
import pytest

import numdiff
from numdiff import files, plots
from numdiff.diffusion import Sampling
from numdiff.errors import NumdiffError, UsageError
from numdiff.training import loop
from numdiff.training.checkpoint import (
    list_checkpoints,
    load_checkpoint,
    newest_checkpoint,
    save_checkpoint,
)
from numdiff.training.options import TrainOptions, resolve, resolve_resumed
from numdiff.training.run import train
from numdiff.training.sampling import sample_command
from tests.command import output_of
from tests.command import run as command
from tests.conftest import exhaustive, exhaustively, needs
from tests.distributed.test_distributed import COMMAND
from tests.forked import forked
from tests.models import RUN

SMALL = {**RUN, "log_every": 2, "sample_count": 4, "checkpoint_every": 3, "seed": 5}


def run(outdir, steps, resume=None, new_data=False, **more):
    lines = []
    options = resolve(
        {
            **SMALL,
            "outdir": str(outdir),
            "steps": steps,
            "lr_schedule": "constant",
            "warmup_steps": 2,
            **more,
        }
    )
    return train(options, resume=resume, new_data=new_data, echo=lines.append), lines


def records(folder):
    return [json.loads(line) for line in (folder / "stats.jsonl").read_text().splitlines()]


def test_a_run_leaves_what_it_promises(tmp_path):
    folder, lines = run(tmp_path, 7)
    assert {"options.json", "stats.jsonl", "loss.png", "samples-00000007.png"} <= set(
        os.listdir(folder)
    )
    assert [p.name for p in list_checkpoints(folder)] == [
        f"checkpoint-{n:08d}.h5" for n in (7, 6, 3)
    ]
    assert [r["step"] for r in records(folder)] == [2, 3, 4, 6, 7]
    assert sum(len(r["losses"]) for r in records(folder)) == 7
    text = "\n".join(lines)
    assert "parameters" in text and "TFLOP" in text and "samples-00000007.png" in text
    model = numdiff.load(folder, device="cpu")
    assert model.meta["pictures"] == {
        "sampler": "dpm++2m",
        "steps": 2,
        "cfg_scale": None,
        "cfg_interval": None,
    }
    images = numdiff.sample(model, count=4, seed=1)
    assert images.shape == (4, 8, 8, 3)
    np.testing.assert_array_equal(images, numdiff.sample(model, 4, 2, "dpm++2m", seed=1))
    raw = numdiff.load(folder, "cpu", "raw")
    assert not np.array_equal(model.arrays()["out.2.weight"], raw.arrays()["out.2.weight"])


@pytest.mark.usefixtures("no_curves")
def test_a_run_says_and_keeps_its_precision(tmp_path):
    folder, lines = run(
        tmp_path,
        2,
        recompute=True,
        image_size=16,
        channel_mult=(1, 2),
        attention_resolutions=(8,),
        sample_count=0,
    )
    assert "precision fp32: float32 throughout; blocks recomputed" in lines
    assert any(
        re.fullmatch(r"recompute blocks: [\d.]+ TFLOP more in each step, 32 %", line)
        for line in lines
    )
    assert json.loads((folder / "options.json").read_text())["precision"] == "fp32"


@pytest.mark.usefixtures("no_curves")
@pytest.mark.parametrize(
    "objective",
    [
        pytest.param(
            {
                "path": "linear",
                "prediction": "x_0",
                "loss": "flow",
                "time_sampling": "logit-normal",
                "sampler": "heun",
            },
            id="flow",
        ),
        pytest.param({"path": "edm", "sampler": "heun"}, id="edm"),
        pytest.param({"min_snr_gamma": 5.0}, id="min-snr", marks=exhaustive),
    ],
)
def test_a_run_of_another_objective_is_sampled_converted_and_resumed(tmp_path, objective):
    """The run's file stores the objective: the same images from the run, its export, and its
    preview."""
    folder, _ = run(tmp_path / "runs", 3, **objective)
    model = numdiff.load(folder, device="cpu")
    assert {k: v for k, v in objective.items() if k != "sampler"}.items() <= model.diffusion.items()
    images = numdiff.sample(model, count=2, steps=3, sampler="heun")
    for source, name in (
        ("auto", "model.h5"),
        ("0", "weights.npz"),
        (str(tmp_path / "weights.npz"), "again.h5"),
    ):
        output_of("convert", source, tmp_path / name, "--outdir", tmp_path / "runs")
    for name in ("model.h5", "again.h5"):
        again = numdiff.load(tmp_path / name, device="cpu")
        assert again.diffusion == model.diffusion
        np.testing.assert_array_equal(
            numdiff.sample(again, count=2, steps=3, sampler="heun"), images
        )
    run(tmp_path / "runs", 4, resume=str(folder), **objective)
    with pytest.raises(
        UsageError, match="--noise-mean 2 does not fit the run, which was started with"
    ):
        resolve_resumed(TrainOptions.load(folder / "options.json"), {"noise_mean": 2.0})


@pytest.mark.usefixtures("no_curves")
def test_resume_gives_the_same_bits(tmp_path):
    whole, _ = run(tmp_path / "whole", 8)
    part, _ = run(tmp_path / "part", 3)
    again, lines = run(tmp_path / "part", 8, resume=str(part))
    assert again == part and any("resumed after step 3" in line for line in lines)
    a, _ = load_checkpoint(newest_checkpoint(whole))
    b, _ = load_checkpoint(newest_checkpoint(part))
    assert a.keys() == b.keys()
    for name in a:
        np.testing.assert_array_equal(a[name], b[name], err_msg=name)
    assert sum((r["losses"] for r in records(whole)), []) == sum(
        (r["losses"] for r in records(part)), []
    )


@pytest.mark.parametrize(
    "what, step",
    [
        ("checkpoint-00000006.h5", 3),
        ("samples-00000004.png", 3),
        ("averages-00000002.h5", 0),
        ("checkpoint-00000000.h5", None),
    ],
)
@pytest.mark.usefixtures("no_curves")
def test_a_full_disk_ends_a_run_that_says_how_to_go_on(tmp_path, monkeypatch, what, step):
    def replace(temporary, path, **where):
        if os.path.basename(path) == what:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.rename(temporary, path, **where)

    monkeypatch.setattr(files.os, "replace", replace)
    with pytest.raises(
        NumdiffError, match=f"^cannot write .*{what}: the disk is full; free some space or"
    ) as caught:
        run(tmp_path, 8, sample_every=4, ema_std=(0.1,), ema_snapshots=4)
    monkeypatch.undo()
    folder = tmp_path / "00000-unet-tiny"
    if step is None:  # there is nothing to continue from
        assert not list_checkpoints(folder) and str(caught.value).endswith("choose another folder.")
        return
    assert str(caught.value).endswith(
        f"; then continue after step {step} with: numdiff train unet --resume {folder}"
    )
    run(tmp_path, 8, resume=str(folder), sample_every=4, ema_std=(0.1,), ema_snapshots=4)


def test_dry_run_writes_nothing(tmp_path):
    lines = []
    options = resolve({**SMALL, "outdir": str(tmp_path / "runs"), "steps": 5})
    assert train(options, dry_run=True, echo=lines.append) is None
    assert not (tmp_path / "runs").exists() and any("TFLOP" in line for line in lines)


def test_a_finished_run_and_another_models_checkpoint_are_refused(tmp_path):
    folder, _ = run(tmp_path, 3)
    with pytest.raises(NumdiffError, match="--steps"):
        run(tmp_path, 3, resume=str(folder))
    with pytest.raises(NumdiffError, match="another model"):
        run(tmp_path, 5, resume=str(folder), model_channels=64)


@pytest.mark.usefixtures("no_curves")
def test_a_run_goes_on_with_the_objective_and_the_seed_that_it_was_trained_with(tmp_path):
    """An options.json that was changed by hand, or other options in Python, would change them
    without a word."""
    folder, _ = run(tmp_path, 2)
    for change, text in (
        ({"prediction": "v", "loss": "v"}, "prediction x_0, .* say prediction v"),
        ({"noise_mean": 0.5}, "noise_mean 0.8, .* say noise_mean 0.5"),
        ({"seed": 4}, "seed 5, .* say seed 4"),
        ({"path": "discrete"}, "path linear, .* say no path"),
    ):
        with pytest.raises(
            NumdiffError, match=f"trained with {text}: restore the run's options.json"
        ):
            run(tmp_path, 3, resume=str(folder), **change)


@pytest.mark.usefixtures("no_curves")
def test_a_run_goes_on_with_its_own_data_or_with_other_on_purpose(tmp_path):
    rng = np.random.default_rng(0)
    images, labels = rng.integers(0, 256, (40, 8, 8, 3), np.uint8), np.arange(40) % 2
    files = {}
    for name, content in {
        "own": (images, labels, ["a", "b"]),
        "copy": (images, labels, ["a", "b"]),
        "other": (images[::-1], labels, ["a", "b"]),
        "fewer": (images[:20], labels[:20], ["a", "b"]),
        "turned": (images, 1 - labels, ["b", "a"]),
    }.items():
        files[name] = str(tmp_path / f"{name}.h5")
        with h5py.File(files[name], "w") as file:
            file["images"], file["labels"], file.attrs["classes"] = content
    few = {"class_cond": True, "sample_count": 0}
    folder, _ = run(tmp_path / "runs", 2, data=files["own"], **few)
    run(tmp_path / "runs", 3, resume=str(folder), data=files["copy"], **few)
    for name, why in (
        ("other", "the images of"),
        ("fewer", "has 40 uint8 images of 8×8×3, .*fewer.h5 20 uint8"),
    ):
        with pytest.raises(
            UsageError, match=f"{name}.h5 is not the data that .*{why}.* or --new-data"
        ):
            run(tmp_path / "runs", 4, resume=str(folder), data=files[name], **few)
    for new_data in (False, True):
        with pytest.raises(
            UsageError, match="class 0 of the run is 'a', of .*turned.h5 'b': .* in the same order"
        ):
            run(
                tmp_path / "runs",
                4,
                resume=str(folder),
                data=files["turned"],
                new_data=new_data,
                **few,
            )
    _, lines = run(
        tmp_path / "runs", 4, resume=str(folder), data=files["fewer"], new_data=True, **few
    )
    assert any(
        line.startswith("data      new: what the run was trained on has 40") for line in lines
    )
    run(tmp_path / "runs", 5, resume=str(folder), data=files["fewer"], **few)

    buffers, meta = load_checkpoint(newest_checkpoint(folder))
    assert meta["data"]["shape"] == [20, 8, 8, 3]
    del meta["data"]  # as an older numdiff wrote it
    save_checkpoint(newest_checkpoint(folder), buffers, meta)
    _, lines = run(tmp_path / "runs", 6, resume=str(folder), data=files["other"], **few)
    assert sum("not compared: an older numdiff wrote" in line for line in lines) == 1
    save_checkpoint(newest_checkpoint(folder), buffers, {**meta, "step": 6})
    with pytest.raises(UsageError, match="class 0 of the run"):
        run(tmp_path / "runs", 8, resume=str(folder), data=files["turned"], **few)


@pytest.mark.usefixtures("no_curves")
def test_a_learning_rate_that_jumps_at_a_resume_is_said_and_can_be_kept(tmp_path):
    """…as where --steps moves the end of a cosine."""
    cosine = {"lr_schedule": "cosine", "warmup_steps": 0, "learning_rate": 1e-3, "sample_count": 0}
    folder, _ = run(tmp_path, 6, **cosine)
    last = records(folder)[-1]["learning_rate"]
    _, lines = run(tmp_path, 12, resume=str(folder), **cosine)
    (line,) = (line for line in lines if line.startswith("rate "))
    assert (
        f"rate      goes from {last:.3g} in step 6 to 0.0005 in step 7, as the cosine now ends at step 12 instead "
        f"of 6; to keep {last:.4g}, stop this and continue with: "
    ) in line
    advised = line.partition("continue with: numdiff ")[2]
    assert re.match(r"train unet --resume \S*/checkpoint-00000006\.h5 ", advised)
    assert "rate  " not in output_of(advised)  # as it does not jump
    rates = [record["learning_rate"] for record in records(folder)]
    np.testing.assert_allclose(rates[3:], last, rtol=1e-3)
    _, lines = run(
        tmp_path,
        14,
        resume=str(folder),
        **{**cosine, "lr_schedule": "constant", "learning_rate": 0.01},
    )
    assert [line for line in lines if line.startswith("rate ")] == [
        f"rate      goes from {last:.3g} in step 12 to 0.01 in step 13"
    ]
    _, lines = run(
        tmp_path,
        15,
        resume=str(folder),
        **{**cosine, "lr_schedule": "constant", "learning_rate": 0.01},
    )
    assert not any(line.startswith("rate ") for line in lines)


@pytest.mark.usefixtures("no_curves")
def test_another_split_of_the_batch_is_said_at_a_resume(tmp_path):
    folder, lines = run(tmp_path, 2, sample_count=0)
    _, more = run(tmp_path, 3, resume=str(folder), sample_count=0)
    assert not any("before: sums" in line for line in (*lines, *more))
    _, lines = run(tmp_path, 4, resume=str(folder), sample_count=0, microbatch=2)
    assert (
        sum(
            line.startswith(
                "ranks     1 rank in parts of 2 images now, 1 rank in parts of 4 images before: sums "
                "are rounded in another order"
            )
            for line in lines
        )
        == 1
    )


@needs("posix")
@pytest.mark.usefixtures("no_curves")
@pytest.mark.parametrize("what", ["removed", "moved", "replaced"])
def test_a_run_does_not_write_into_the_folder_of_another(tmp_path, what):
    options = resolve({**SMALL, "outdir": str(tmp_path), "steps": 8, "keep": 1, "sample_count": 0})
    folder = tmp_path / "00000-unet-tiny"

    def content():
        return (
            {path.name: path.read_bytes() for path in sorted(folder.iterdir())}
            if folder.exists()
            else None
        )

    def disturb(line):
        if line.startswith("step 4/"):
            folder.rename(tmp_path / "elsewhere")
            if what == "removed":
                shutil.rmtree(tmp_path / "elsewhere")
            if what == "replaced":
                folder.mkdir()
                for name in ("checkpoint-00000001.h5", "checkpoint-00000002.h5", "stats.jsonl"):
                    shutil.copy(
                        next((tmp_path / "elsewhere").glob("checkpoint-*.h5")), folder / name
                    )
            there.append(content())

    there = []
    with pytest.raises(
        NumdiffError,
        match="00000-unet-tiny was removed, moved or replaced while .* nothing more is "
        "written; continue with --resume from where .* or start a new run",
    ):
        train(options, echo=disturb)
    assert [content()] == there
    if what != "removed":  # it is whole, and continues
        assert train(options, resume=str(tmp_path / "elsewhere"), echo=lambda _: None)


@needs("posix")
def test_no_file_appears_in_a_folder_that_replaces_a_held_one(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    with files.held_folder(folder):
        files.write_text(folder / "a", "1")
        with pytest.raises(files.FolderTaken):
            with files.atomic_file(folder / "b") as file:
                file.write(b"2")
                folder.rename(tmp_path / "old")
                folder.mkdir()
        (folder / "a").write_text("3")
        files.remove(folder / "a")  # of the held one
        for name in ("b", ".lock"):
            with pytest.raises(files.FolderTaken):
                files.open_to_append(folder / name, "it")
    assert [path.name for path in folder.iterdir()] == ["a"] and not list(
        (tmp_path / "old").iterdir()
    )
    files.write_text(folder / "a", "4")


def test_a_curve_that_cannot_be_drawn_ends_no_run(tmp_path, monkeypatch):
    def fail(*_):
        raise plots.NoPlotsError("plots need matplotlib")

    monkeypatch.setattr(plots, "loss_curve", fail)
    folder, lines = run(tmp_path, 4, sample_every=2)
    assert [line for line in lines if "loss.png" in line] == [
        "note      loss.png is not drawn: plots need matplotlib"
    ]
    assert (folder / "samples-00000004.png").exists() and list_checkpoints(folder)


def test_a_run_that_was_killed_before_its_pictures_draws_them(tmp_path):
    folder, _ = run(tmp_path, 3)
    pictures = [folder / "samples-00000003.png", folder / "loss.png"]
    expected = [path.read_bytes() for path in pictures]
    for missing in pictures:
        missing.unlink()
        _, lines = run(tmp_path, 3, resume=str(folder))
        assert any("resumed after step 3 of 3, for its pictures" in line for line in lines)
        assert [path.read_bytes() for path in pictures] == expected
        with pytest.raises(NumdiffError, match="has done its 3 steps"):
            run(tmp_path, 3, resume=str(folder))
    os.utime(folder / "loss.png", (1, 1))  # the curve of an earlier step
    run(tmp_path, 3, resume=str(folder))
    with pytest.raises(
        NumdiffError, match="has done its 3 steps, and --steps 2 is not more: give more than 3"
    ):
        run(tmp_path, 2, resume=str(folder))
    resolve({**SMALL, "steps": 7}).save(folder / "options.json")  # as if it had been stopped
    with pytest.raises(
        NumdiffError,
        match="3 of its 7 steps, and --steps 2 is not more: leave it out .* more than 3",
    ):
        run(tmp_path, 2, resume=str(folder))


@pytest.mark.usefixtures("no_curves")
def test_a_stop_is_seen_between_the_evaluations_of_a_grid(tmp_path, monkeypatch):
    asked = []

    def slow(sampling, progress):
        while True:
            asked.append(1)
            if len(asked) == 3:
                os.kill(os.getpid(), signal.SIGTERM)
            progress()

    monkeypatch.setattr(Sampling, "batches", slow)
    with pytest.raises(
        loop.Stopped, match="stopped after step 2 of 9; continue with: numdiff train"
    ) as stop:
        run(tmp_path / "a b", 9, sample_every=2)
    assert len(asked) == 3 and stop.value.exit_code == 143
    (folder,) = (tmp_path / "a b").iterdir()
    assert shlex.split(str(stop.value))[-2:] == ["--resume", str(folder)]  # as a shell takes it
    assert load_checkpoint(newest_checkpoint(folder))[1]["step"] == 2
    asked.clear()
    with pytest.raises(
        loop.Stopped,
        match="stopped after its last step, before its pictures, which are drawn",
    ):
        run(tmp_path, 3, resume=str(folder))


SCRIPT = "-c", COMMAND  # which draws no curve


OPTIONS = (
    "train unet --device cpu --image-size 8 --model-channels 32 --channel-mult 1 "
    "--attention-resolutions none --num-res-blocks 1 --batch 4 --log-every 1 --sample-every 0 "
    "--sample-count 0 --checkpoint-every 2 --outdir"
)


def arguments_of(outdir, *more):
    return [*OPTIONS.split(), str(outdir), *" ".join(more).split()]


def start(outdir, *more, after, begin=None, stderr=subprocess.STDOUT):
    """A training process, once it has printed `after`."""
    process = subprocess.Popen(
        [*(begin or forked()), *SCRIPT, *arguments_of(outdir, *more)],
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
    )
    seen = []
    guard = threading.Timer(120, process.kill)
    guard.daemon = True
    guard.start()
    for line in process.stdout:
        seen.append(line)
        if after in line:
            return process, seen
    raise AssertionError("".join(seen))


@exhaustive
@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGHUP, 129)])
def test_a_signal_saves_and_says_how_to_go_on(tmp_path, number, code):
    process, _ = start(tmp_path, "--steps 5000", after=" 3/5000", begin=[sys.executable])
    check_stopped(process, tmp_path, number, code, 3)


def check_stopped(process, outdir, number, code, least):
    """That a signal ends the process in order, after step `least` or a later one."""
    process.send_signal(number)
    text = process.communicate(timeout=60)[0]
    assert process.returncode == code
    assert "--resume" in text and "Traceback" not in text
    _, meta = load_checkpoint(newest_checkpoint(next(outdir.iterdir())))
    assert meta["step"] >= least and f"stopped after step {meta['step']}" in text


@exhaustive
def test_a_terminal_that_is_closed_sends_sighup_twice(tmp_path):
    process, _ = start(tmp_path, "--steps 5000", after=" 3/5000", begin=[sys.executable])
    for _ in range(3):
        process.send_signal(signal.SIGHUP)
    assert "Traceback" not in process.communicate(timeout=60)[0] and process.returncode == 129


@exhaustive
def test_nohup_is_left_alone(tmp_path):
    process, _ = start(tmp_path, "--steps 5000", after=" 3/5000", begin=["nohup", sys.executable])
    process.send_signal(signal.SIGHUP)
    assert any(" 9/5000" in line for line in process.stdout)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 143


@exhaustive
def test_a_reader_that_leaves_stops_the_run_in_order(tmp_path):
    process, _ = start(tmp_path, "--steps 5000", after=" 3/5000", stderr=subprocess.PIPE)
    process.stdout.close()
    text = process.stderr.read()
    assert process.wait(60) == 141 and "Traceback" not in text and "Exception ignored" not in text
    step = load_checkpoint(newest_checkpoint(next(tmp_path.iterdir())))[1]["step"]
    assert (
        step >= 3
        and f"stopped after step {step} of 5000, as its output has no reader; continue with: num"
        in text
    )
    process.stderr.close()


@needs("full")
def test_a_full_disk_behind_the_output_is_no_reason_to_stop(tmp_path):
    with open("/dev/full", "w") as full:
        result = subprocess.run(
            [*forked(), *SCRIPT, *arguments_of(tmp_path, "--steps 3")],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
        )
    assert result.returncode == 0 and not result.stderr, result.stderr
    assert [r["step"] for r in records(next(tmp_path.iterdir()))] == [1, 2, 3]


@pytest.mark.parametrize("times", [1, *exhaustively(4)])
def test_kill_9_at_any_moment_leaves_a_valid_checkpoint(tmp_path, times):
    """…from which the run continues, until it is asked to end."""
    rng = np.random.default_rng(0)
    process, _ = start(tmp_path, "--steps 5000", after=" 2/5000")
    for _ in range(times):
        time.sleep(rng.uniform(0, 0.2))
        process.kill()
        process.communicate()
        folder = next(tmp_path.iterdir())
        checkpoint = newest_checkpoint(folder)
        assert checkpoint is not None
        step = load_checkpoint(checkpoint)[1]["step"]
        process, seen = start(tmp_path, "--resume", after=f" {step + 3}/5000")
        assert any(f"resumed after step {step} " in line for line in seen)
    check_stopped(process, tmp_path, signal.SIGTERM, 143, step + 3)


@pytest.mark.parametrize(
    "arguments, word, code",
    [
        ("--microbatch 3", "--microbatch", 2),
        ("--resume nowhere", "nowhere", 1),
        ("--image-size 17 --channel-mult 1,2", "--image-size", 2),
        ("--data nowhere.h5", "nowhere.h5", 2),
        ("--classes Nothing", "Nothing", 2),
        ("--new-data", "--new-data needs --resume", 2),
    ],
)
def test_bad_input_is_one_sentence(tmp_path, arguments, word, code):
    result = command(OPTIONS, tmp_path / "runs", "--steps 2", arguments)
    assert result.exit_code == code and isinstance(result.exception, SystemExit), result.output
    assert word in result.stderr and not result.stdout
    assert not (tmp_path / "runs").exists()


def test_an_outdir_that_contradicts_the_resumed_run_is_refused(tmp_path):
    folder, _ = run(tmp_path / "runs", 2, sample_count=0)
    for resume, outdir, text in (
        (folder, "elsewhere", "contradict each other, as a run continues in its own folder"),
        (newest_checkpoint(folder), "elsewhere", "contradict each other"),
        (folder, "runs", "has done its 2 steps"),
        ("0", "runs", "has done its 2 steps"),
        ("0", "elsewhere", "there is no run number 0 in"),
    ):
        result = command("train unet --steps 2 --outdir", tmp_path / outdir, "--resume", resume)
        assert result.exit_code in (1, 2) and text in result.output, result.output
    assert os.listdir(tmp_path) == ["runs"] and len(os.listdir(tmp_path / "runs")) == 1


@pytest.mark.usefixtures("no_curves")
def test_weights_that_overflow_are_never_saved_and_are_told_in_one_sentence(tmp_path, recwarn):
    with pytest.raises(NumdiffError, match="after step 1, .* is the first non-finite tensor"):
        run(tmp_path / "a", 6, learning_rate=1e39, warmup_steps=0, clip_norm=0, checkpoint_every=1)
    with pytest.raises(NumdiffError, match="step [23] gave loss .* is the first non-finite tensor"):
        run(tmp_path / "b", 6, learning_rate=1e30, warmup_steps=0, clip_norm=0, checkpoint_every=1)
    for folder in ("a", "b"):
        for path in list_checkpoints(tmp_path / folder / "00000-unet-tiny"):
            assert all(np.isfinite(values).all() for values in load_checkpoint(path)[0].values())
    assert not [w for w in recwarn if issubclass(w.category, RuntimeWarning)]


@pytest.mark.usefixtures("no_curves")
def test_grids_are_drawn_with_guidance(tmp_path, monkeypatch):
    from numdiff.training import previews

    asked = []
    sampling = previews.Sampling
    monkeypatch.setattr(
        previews,
        "Sampling",
        lambda *a, **more: (
            asked.append((more["cfg_scale"], more["cfg_interval"])) or sampling(*a, **more)
        ),
    )
    how = {"class_cond": True, "class_dropout": 0.5, "cfg_scale": 2.0, "sample_count": 1}
    _, lines = run(tmp_path, 2, cfg_interval=(0.3, 1e3), classes=("Flags", "Activities"), **how)
    assert asked == [(2.0, (0.3, 1e3))] and lines[-2] == "columns   Activities, Flags"
    # before there is a run folder
    with pytest.raises(UsageError, match="holds none of the noise levels"):
        run(tmp_path / "none", 2, cfg_interval=(1e5, 1e6), **how)
    assert not (tmp_path / "none").exists()


@pytest.mark.usefixtures("no_curves")
@pytest.mark.parametrize("latents", [False, True])
def test_a_run_without_pictures_says_how_to_sample_from_it(tmp_path, latents, rng):
    how = {
        "class_cond": True,
        "class_dropout": 0.5,
        "cfg_scale": 2.0,
        "sampler": "euler",
        "sample_steps": 3,
    }
    if latents:
        with h5py.File(tmp_path / "latents.h5", "w") as file:
            file["images"], file["labels"] = (
                rng.standard_normal((8, 8, 8, 4), np.float32),
                np.arange(8) % 2,
            )
        how |= {"data": str(tmp_path / "latents.h5"), "flip": False}
    else:
        how["sample_count"] = 0
    with pytest.raises(
        UsageError, match="--cfg-interval 1e\\+06,2e\\+06 holds none of the noise levels"
    ):
        run(tmp_path / "none", 2, cfg_interval=(1e6, 2e6), **how)
    assert not (tmp_path / "none").exists()
    folder, _ = run(tmp_path, 2, cfg_interval=(0.3, 1e3), **how)
    said = []
    sample_command(folder, count=2, device="cpu", npz=str(tmp_path / "a.npz"), echo=said.append)
    assert "euler, 3 steps, guidance 2 for sigma 0.3 to 1000" in said[-1]
