"""Commands as messages advise them: each is run, and gives what the message promises. advice.py
parses all others."""

import errno
import os
import re
import shutil
import signal

import numpy as np
import pytest
from PIL import Image

from numdiff import files
from numdiff.diffusion import Sampling
from numdiff.errors import NumdiffError
from numdiff.training.checkpoint import load_checkpoint, newest_checkpoint
from numdiff.training.options import resolve
from numdiff.training.run import train
from tests import advice
from tests.command import last_line, output_of, run
from tests.models import RUN, small_unet, write
from tests.training.test_sampling import read_npz

SMALL = {**RUN, "log_every": 1, "checkpoint_every": 2, "steps": 4, "lr_schedule": "constant"}
UNET = (
    "train unet --device cpu --size 8 --model-channels 32 --channel-mult 1 --attention-resolutions none "
    "--num-res-blocks 1 --steps 3 --sample-count 0"
)
pytestmark = pytest.mark.usefixtures("no_curves")


def refused(*words):
    """The last line of what a command that fails has said."""
    result = run(*words)
    assert result.exit_code and last_line(result).startswith("Error: "), result.output
    return last_line(result)


def advised(text):
    """The command that stands in a message, without `numdiff`."""
    quoted, last = advice.COMMAND.search(text).groups()
    assert not advice.faults(text)
    return (quoted or last).removeprefix("numdiff ")


@pytest.fixture
def stopped(tmp_path):
    """What a run says that was stopped after two of four steps."""

    def stop(line):
        if line.startswith("step 2/"):
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(NumdiffError) as caught:
        train(resolve({**SMALL, "outdir": str(tmp_path / "my runs")}), echo=stop)
    return str(caught.value)


def test_a_stopped_run_goes_on(tmp_path, stopped):
    assert (
        f"stopped after step 2 of 4; continue with: numdiff train unet --resume '{tmp_path}/my runs/"
        in stopped
    )
    assert "resumed after step 2 of 4" in output_of(advised(stopped))
    (folder,) = (tmp_path / "my runs").iterdir()
    assert load_checkpoint(newest_checkpoint(folder))[1]["step"] == 4


def test_a_run_of_another_model_is_resumed_by_its_own_command(tmp_path, stopped):
    wrong = advised(stopped).replace("train unet", "train dit")
    assert "resumed after step 2 of 4" in output_of(advised(refused(wrong)))


def test_a_run_whose_disk_was_full_goes_on(tmp_path, monkeypatch):
    def replace(temporary, path, **where):
        if os.path.basename(path) == "checkpoint-00000004.h5":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.rename(temporary, path, **where)

    monkeypatch.setattr(files.os, "replace", replace)
    with pytest.raises(NumdiffError, match="then continue after step 2 with: ") as caught:
        train(resolve({**SMALL, "outdir": str(tmp_path)}), echo=lambda _: None)
    monkeypatch.undo()
    assert "resumed after step 2 of 4" in output_of(advised(str(caught.value)))


def test_a_run_with_damaged_options_begins_again_from_its_weights(tmp_path, stopped):
    (folder,) = (tmp_path / "my runs").iterdir()
    (folder / "options.json").write_text("{")
    message = refused(advised(stopped))
    init = re.search(r"with (--init .*)\.$", message)[1]
    assert "init      " in output_of(UNET, init, "--outdir", tmp_path / "new")


@pytest.mark.parametrize("classes", ["1 2 3 4", "0 1 10 2", "b a"])
@pytest.mark.parametrize("asked", ["", "--class LAST --class FIRST"])
def test_stopped_sampling_goes_on_with_the_same_classes(tmp_path, monkeypatch, classes, asked):

    names = classes.split()
    write(tmp_path / "m.h5", small_unet(num_classes=len(names)), classes=names)
    asked = asked.replace("LAST", names[-1]).replace("FIRST", names[0])
    command = f"sample '{tmp_path}/m.h5' --count 7 --steps 1 --batch 1 --device cpu {asked} --npz"
    output_of(command, tmp_path / "whole.npz")
    batches, original = [], Sampling.batches

    def stopping(self, progress, *more):
        for made in original(self, progress, *more):
            batches.append(1)
            if len(batches) == 3:
                os.kill(os.getpid(), signal.SIGINT)
            yield made

    monkeypatch.setattr(Sampling, "batches", stopping)
    message = refused(command, tmp_path / "first.npz")
    monkeypatch.setattr(Sampling, "batches", original)
    more = re.search(r"by the same command with (--skip \d+), and another file name", message)[1]
    output_of(command, tmp_path / "rest.npz", more)
    whole, first, rest = (read_npz(tmp_path / f"{name}.npz") for name in ("whole", "first", "rest"))
    for k in range(2):  # pixels and classes
        np.testing.assert_array_equal(whole[k], np.concatenate([first[k], rest[k]]))


def test_pictures_that_are_no_dataset_are_imported(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for k in range(8):
        path = tmp_path / "two words" / f"{'ab'[k % 2]}" / f"{k}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((8, 8, 3), 9 * k, np.uint8)).save(path)
    shutil.make_archive("two words", "zip", tmp_path / "two words")
    message = refused("data info", tmp_path / "two words.zip")
    output_of(advised(message).replace("OUT.h5", "out.h5"), "--size 8")
    assert "2 classes" in output_of("data info out.h5") or "a" in output_of("data info out.h5")
    output_of(UNET, "--data out.h5 --outdir runs")


OPTIONS = [  # what is refused, what of the message is followed, what stands in its place
    ("--batch 9 --microbatch 2", r"a --microbatch of (\d+)", "--batch 9 --microbatch {}"),
    ("--batch 9 --microbatch 2", r"a --batch of (\d+)", "--batch {} --microbatch 2"),
    ("--precision fp16", r"use (--precision \w+) on the CPU", "{}"),
    ("--precision fp8", r"use (--precision \w+)", "{}"),
    ("--precision tf32", r"use (--precision \w+)", "{}"),
    ("--class-dropout 0.1", r"needs (--class-cond)", "--class-dropout 0.1 {}"),
    ("--cfg-scale 2", r"give (--class-cond)", "--cfg-scale 2 {} --class-dropout 0.1"),
    (
        "--cfg-scale 2 --class-cond",
        r"give a (--class-dropout) such as (0.1)",
        "--cfg-scale 2 --class-cond {}",
    ),
    (
        "--vlb-weight 1 --path discrete",
        r"give (--learn-sigma), too",
        "--vlb-weight 1 --path discrete {}",
    ),
    (
        "--steps 3 --warmup-steps 4",
        r"is more than --steps (\d+); use fewer",
        "--steps 3 --warmup-steps 2",
    ),
    (
        "--muon-momentum 0.5 --optimizer adamw",
        r"needs (--optimizer muon)",
        "--muon-momentum 0.5 {}",
    ),
    ("--loss-scale 4 --precision fp32", "leave it out", "--precision fp32"),
    ("--size 63", r"use a multiple of (\d+)|an image_size of (\d+)|must divide", "--size 32"),
    ("--sigma-data 1 --path discrete", r"give (--path edm)", "--sigma-data 1 {}"),
]


@pytest.mark.parametrize(
    "wrong, remedy, right", OPTIONS, ids=[f"{a} -> {c}" for a, _, c in OPTIONS]
)
def test_an_option_that_is_advised_is_taken(wrong, remedy, right):
    command = "train unet --device cpu --dry-run --preset unet64 "
    message = refused(command + wrong)
    found = re.search(remedy, message)
    assert found, message
    output_of(command + right.format(" ".join(filter(None, found.groups()))))


@pytest.mark.parametrize(
    "text, wrong",
    [
        ("x; continue with: numdiff train unet --resume runs/0", 0),
        ("x: use --precision fp32 on the CPU.", 0),
        ("x: run `numdiff data import 'a b' OUT.h5` first.", 0),
        ("x: give --count by --batch, or leave --seed out.", 0),
        ("x; continue with: numdiff sample --resume runs/0", 1),
        ("x: use --precison fp32.", 1),
        ("x: use --batch 0.", 1),
        ("x: use --precision fp31 on the CPU.", 1),
        ("x: run `numdiff data import --labels`.", 1),
        ("--batch 0 must be at least 1.", 0),
    ],
)
def test_advice_is_found_and_parsed(text, wrong):
    assert len(advice.faults(text)) == wrong, advice.faults(text)
