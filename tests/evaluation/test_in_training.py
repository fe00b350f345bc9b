"""`--evaluate-every`: the distance in the records, the best checkpoint, resume."""

import json
import os

import numpy as np
import pytest

from numdiff.errors import UsageError
from numdiff.evaluation.in_training import RunEvaluation
from numdiff.training.checkpoint import load_checkpoint, load_meta
from numdiff.training.options import resolve
from numdiff.training.run import train
from tests.command import output_of
from tests.models import RUN

SMALL = {
    **RUN,
    "image_size": 16,
    "steps": 6,
    "log_every": 2,
    "sample_steps": 1,
    "checkpoint_every": 4,
    "evaluate_every": 3,
    "evaluate_count": 8,
    "seed": 5,
}


def records_of(run_dir):
    return [json.loads(line) for line in (run_dir / "stats.jsonl").read_text().splitlines()]


def run(outdir, resume=None, **changes):
    lines = []
    options = resolve({**SMALL, "outdir": str(outdir), **changes})
    return train(options, resume, echo=lines.append, evaluation=RunEvaluation), lines


def test_the_distance_is_recorded_and_the_best_kept(tmp_path):
    run_dir, lines = run(tmp_path)
    records = records_of(run_dir)
    found = {r["step"]: r["frechet"] for r in records if "frechet" in r}
    assert list(found) == [3, 6] and all(v > 0 for v in found.values())
    assert [r["step"] for r in records] == [2, 3, 4, 6]
    losses = [v for r in records for v in r["losses"]]
    assert len(losses) == 6  # each step once
    best = min(found, key=found.get)
    assert load_meta(run_dir / "best.h5")["step"] == best
    said = [line for line in lines if line.startswith("evaluate")]
    assert len(said) == 2 and said[0].endswith("after step 3, the best so far")
    assert f"{found[6]:.4g} after step 6" in said[1]


@pytest.mark.parametrize("links", [True, False])
def test_the_best_is_another_name_of_a_checkpoint(tmp_path, monkeypatch, links):
    """…of the same step, where the file system has hard links."""

    def refuse(*_):
        raise OSError("no links here")

    if not links:
        monkeypatch.setattr(os, "link", refuse)
    run_dir, _ = run(tmp_path, checkpoint_every=3, keep=1)
    found = {r["step"]: r["frechet"] for r in records_of(run_dir) if "frechet" in r}
    best = min(found, key=found.get)
    assert load_meta(run_dir / "best.h5")["step"] == best  # also where its checkpoint is removed
    last = run_dir / "checkpoint-00000006.h5"
    assert (run_dir / "best.h5").samefile(last) == (links and best == 6)
    assert not list(run_dir.glob("*.link"))


def test_the_figure_is_the_same_after_a_resume_and_without_evaluation(tmp_path):
    whole, _ = run(tmp_path / "a")
    part, _ = run(tmp_path / "b")
    run(tmp_path / "b", resume=str(part / "checkpoint-00000004.h5"))
    without, _ = run(tmp_path / "c", evaluate_every=0)
    a, b = (
        {r["step"]: r["frechet"] for r in records_of(d) if "frechet" in r} for d in (whole, part)
    )
    assert (a[3], a[6]) == (b[3], b[6])
    name = "checkpoint-00000006.h5"  # measuring changes no bit of the training
    x, y = (load_checkpoint(run_dir / name)[0] for run_dir in (whole, without))
    assert x.keys() == y.keys() and all(np.array_equal(x[key], y[key]) for key in x)
    assert not (without / "best.h5").exists()


def test_a_best_checkpoint_of_a_later_step_is_set_aside(tmp_path):
    run_dir, _ = run(tmp_path, keep=3)
    (run_dir / "checkpoint-00000006.h5").rename(run_dir / "best.h5")
    run(tmp_path, resume=str(run_dir / "checkpoint-00000004.h5"))
    assert load_meta(run_dir / "best.h5.old")["step"] == 6
    found = [r["frechet"] for r in records_of(run_dir) if "frechet" in r]
    assert len(found) == 2 and load_meta(run_dir / "best.h5")["step"] <= 6


def test_the_best_checkpoint_samples(tmp_path):
    run_dir, _ = run(tmp_path)
    output_of("sample", run_dir / "best.h5", "--count 1 --device cpu --grid", tmp_path / "a.png")


def test_what_cannot_be_measured(tmp_path):
    with pytest.raises(UsageError, match="at least 16×16 pixels, and these are 8×8"):
        run(tmp_path, image_size=8)
    with pytest.raises(UsageError, match="needs something that measures"):
        train(resolve({**SMALL, "outdir": str(tmp_path)}), echo=lambda text: None)
    assert not list(tmp_path.glob("0*"))


def test_the_command(tmp_path):
    words = "train unet --device cpu --image-size 16 --model-channels 32 --channel-mult 1 --steps 2"
    more = "--batch 4 --evaluate-every 1 --evaluate-count 4 --sample-count 0 --sample-steps 1"
    output = output_of(words, more, "--outdir", tmp_path)
    assert output.count("evaluate  Fréchet distance") == 2
