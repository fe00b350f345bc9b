"""Whole runs on the CPU engine: the folder they leave, resume, stops, kills."""
import json
import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

import numdiff
from numdiff.device.traffic import Readback
from numdiff.errors import NumdiffError
from numdiff.training.checkpoint import list_checkpoints, load_checkpoint, newest_checkpoint
from numdiff.training.options import resolve
from numdiff.training.run import train

SMALL = {"device": "cpu", "image_size": 16, "channel_mult": (1, 2), "attention_resolutions": (8,), "batch": 4,
         "log_every": 2, "sample_every": 0, "sample_count": 4, "sample_steps": 2, "checkpoint_every": 3, "seed": 5}


def run(outdir, steps, resume=None, **more):
    lines = []
    options = resolve({**SMALL, "outdir": str(outdir), "steps": steps, "lr_schedule": "constant", "warmup_steps": 2,
                       **more})
    return train(options, resume=resume, echo=lines.append), lines


def records(folder):
    return [json.loads(line) for line in (folder / "stats.jsonl").read_text().splitlines()]


def test_a_run_leaves_what_it_promises(tmp_path):
    folder, lines = run(tmp_path, 7)
    assert {"options.json", "stats.jsonl", "loss.png", "samples-00000007.png"} <= set(os.listdir(folder))
    assert [p.name for p in list_checkpoints(folder)] == [f"checkpoint-{n:08d}.h5" for n in (7, 6, 3)]
    assert [r["step"] for r in records(folder)] == [2, 3, 4, 6, 7]
    assert sum(len(r["losses"]) for r in records(folder)) == 7
    text = "\n".join(lines)
    assert "parameters" in text and "TFLOP" in text and "samples-00000007.png" in text
    model = numdiff.load(folder, device="cpu")
    images = numdiff.sample(model, count=4, steps=2, seed=1)
    assert images.shape == (4, 16, 16, 3)
    raw = numdiff.load(folder, "cpu", "raw")
    assert not np.array_equal(model.arrays()["out.2.weight"], raw.arrays()["out.2.weight"])


def test_late_reports_change_no_record(tmp_path, monkeypatch):
    """As on a GPU, where the host looks at a step's figures some steps later."""
    at_once, _ = run(tmp_path / "a", 13, log_every=4, checkpoint_every=9)
    monkeypatch.setattr(Readback, "lag", 4)
    late, _ = run(tmp_path / "b", 13, log_every=4, checkpoint_every=9)
    for folder in (at_once, late):
        assert [(r["step"], len(r["losses"])) for r in records(folder)] == [(4, 4), (8, 4), (9, 1), (12, 3), (13, 1)]
    assert [r["losses"] for r in records(at_once)] == [r["losses"] for r in records(late)]


def test_a_run_says_and_keeps_its_precision(tmp_path):
    folder, lines = run(tmp_path, 2, recompute=True)
    assert "precision fp32: float32 throughout; blocks recomputed" in lines
    assert json.loads((folder / "options.json").read_text())["precision"] == "fp32"


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
    assert sum((r["losses"] for r in records(whole)), []) == sum((r["losses"] for r in records(part)), [])


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


def command(outdir, *more):
    return [sys.executable, "-c", "from numdiff_cli.main import main; main()", "train", "unet", "--device", "cpu",
            "--image-size", "16", "--channel-mult", "1,2", "--attention-resolutions", "8", "--batch", "4",
            "--log-every", "1", "--sample-every", "0", "--sample-count", "0", "--checkpoint-every", "2",
            "--outdir", str(outdir), *more]


def start(outdir, *more, after):
    """A training process, once it has printed `after`."""
    process = subprocess.Popen(command(outdir, *more), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    seen = []
    guard = threading.Timer(120, process.kill)
    guard.daemon = True
    guard.start()
    for line in process.stdout:
        seen.append(line)
        if after in line:
            return process, seen
    raise AssertionError("".join(seen))


@pytest.mark.parametrize("number, code", [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_saves_and_says_how_to_go_on(tmp_path, number, code):
    process, _ = start(tmp_path, "--steps", "5000", after=" 3/5000")
    process.send_signal(number)
    text = process.communicate(timeout=60)[0]
    assert process.returncode == code
    assert "--resume" in text and "Traceback" not in text
    folder = next(tmp_path.iterdir())
    _, meta = load_checkpoint(newest_checkpoint(folder))
    assert meta["step"] >= 3 and f"stopped after step {meta['step']}" in text


def test_kill_9_at_any_moment_leaves_a_valid_checkpoint(tmp_path):
    rng = np.random.default_rng(0)
    process, _ = start(tmp_path, "--steps", "5000", after=" 2/5000")
    for _ in range(3):
        time.sleep(rng.uniform(0, 0.5))
        process.kill()
        process.communicate()
        folder = next(tmp_path.iterdir())
        checkpoint = newest_checkpoint(folder)
        assert checkpoint is not None
        step = load_checkpoint(checkpoint)[1]["step"]
        process, seen = start(tmp_path, "--resume", after=f" {step + 3}/5000")
        assert any(f"resumed after step {step} " in line for line in seen)
    process.kill()
    process.communicate()


@pytest.mark.parametrize("arguments, word, code", [
    (["--microbatch", "3"], "--microbatch", 2), (["--image-size", "17"], "--image-size", 2),
    (["--data", "nowhere.h5"], "nowhere.h5", 2), (["--classes", "Nothing"], "Nothing", 2),
    (["--resume", "nowhere"], "nowhere", 1)])
def test_bad_input_is_one_sentence(tmp_path, arguments, word, code):
    result = subprocess.run([*command(tmp_path / "runs", "--steps", "2"), *arguments], capture_output=True, text=True,
                            timeout=60)
    assert result.returncode == code, result.stderr
    assert word in result.stderr and "Traceback" not in result.stderr
    assert not (tmp_path / "runs").exists()


def test_weights_that_overflow_are_never_saved_and_are_told_in_one_sentence(tmp_path, recwarn):
    with pytest.raises(NumdiffError, match="after step 1, .* is the first non-finite tensor"):
        run(tmp_path / "a", 6, learning_rate=1e39, warmup_steps=0, clip_norm=0, checkpoint_every=1)
    with pytest.raises(NumdiffError, match="step [23] gave loss .* is the first non-finite tensor"):
        run(tmp_path / "b", 6, learning_rate=1e30, warmup_steps=0, clip_norm=0, checkpoint_every=1)
    for folder in ("a", "b"):
        for path in list_checkpoints(tmp_path / folder / "00000-unet-tiny"):
            assert all(np.isfinite(values).all() for values in load_checkpoint(path)[0].values())
    assert not [w for w in recwarn if issubclass(w.category, RuntimeWarning)]
