"""Checkpoints: what is saved is loaded; nothing that happens to the process or the disk leaves a
bad file behind."""

import errno
import logging
import os
import subprocess
import sys
import time

import h5py
import numpy as np
import pytest

import numdiff
from numdiff import files
from numdiff.errors import NumdiffError
from numdiff.files import atomic_file, remove_stray_files
from numdiff.training.checkpoint import (
    checkpoint_name,
    list_checkpoints,
    load_checkpoint,
    load_meta,
    newest_checkpoint,
    prune_checkpoints,
    save_checkpoint,
    why_damaged,
)
from numdiff.training.run_folder import find_checkpoint
from tests.conftest import exhaustive, needs

META = {"format": "numdiff-checkpoint", "version": 1, "step": 7, "losses": [0.5, None], "name": "∂"}


def some_buffers(rng):
    return {
        "parameters": rng.standard_normal(1000).astype(np.float32),
        "step": np.array([7], np.uint32),
        "wide": rng.standard_normal((3, 5)),
        "empty": np.zeros((0, 4), np.float32),
        "scalar": np.float32(3),
    }


def save_steps(run_dir, *steps):
    for step in steps:
        save_checkpoint(
            run_dir / checkpoint_name(step),
            {"parameters": np.full(100, step, np.float32)},
            {"step": step},
        )


def flip_byte(path, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 0x10
    path.write_bytes(data)


def test_round_trip(tmp_path, rng):
    buffers = some_buffers(rng)
    save_checkpoint(
        tmp_path / "model.h5", buffers, {**META, "step": np.int64(7), "rate": np.float32(0.5)}
    )
    loaded, meta = load_checkpoint(tmp_path / "model.h5")
    assert meta == {**META, "rate": 0.5} == load_meta(tmp_path / "model.h5")
    assert loaded.keys() == buffers.keys()
    for name, array in buffers.items():
        assert loaded[name].dtype == array.dtype and np.array_equal(loaded[name], array)
    assert os.listdir(tmp_path) == ["model.h5"]


def test_the_same_content_gives_the_same_file(tmp_path, rng):
    buffers = some_buffers(rng)
    for name in "ab":
        save_checkpoint(tmp_path / name, buffers, META)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_every_damage_is_refused(tmp_path, rng):
    """Flip bytes all over the file, cut it everywhere: never wrong data, never another error, never
    a hang."""
    path = tmp_path / "model.h5"
    save_checkpoint(path, some_buffers(rng), META)
    good = path.read_bytes()
    for at in range(0, len(good), 61):
        path.write_bytes(good)
        flip_byte(path, at)
        with pytest.raises(NumdiffError):
            load_checkpoint(path)
    for length in [*range(0, len(good), 61), len(good) - 1]:
        path.write_bytes(good[:length])
        with pytest.raises(NumdiffError, match="truncated or damaged"):
            load_checkpoint(path)
    path.write_bytes(good + b"x")
    with pytest.raises(NumdiffError, match="damaged"):
        load_checkpoint(path)


def test_other_files_are_named(tmp_path):
    with pytest.raises(NumdiffError, match="does not exist"):
        load_checkpoint(tmp_path / "missing.h5")
    with pytest.raises(NumdiffError, match="is a folder"):
        load_checkpoint(tmp_path)
    (tmp_path / "text").write_text("hello " * 100)
    with pytest.raises(NumdiffError, match="not a numdiff checkpoint"):
        load_checkpoint(tmp_path / "text")
    with h5py.File(tmp_path / "images.h5", "w") as file:
        file["images"] = np.zeros((2, 4, 4, 3), np.uint8)
    with pytest.raises(NumdiffError, match="HDF5 file but not a numdiff checkpoint"):
        load_checkpoint(tmp_path / "images.h5")


def test_newest_skips_the_damaged_and_says_so(tmp_path, caplog):
    save_steps(tmp_path, 1, 2, 3)
    flip_byte(tmp_path / checkpoint_name(3), 500)
    (tmp_path / checkpoint_name(4)).write_bytes(b"")
    messages = []
    assert newest_checkpoint(tmp_path, messages.append) == tmp_path / checkpoint_name(2)
    assert [checkpoint_name(4) in messages[0], checkpoint_name(3) in messages[1]] == [True, True]
    with caplog.at_level(logging.WARNING):
        newest_checkpoint(tmp_path)
    assert len(caplog.records) == 2
    assert newest_checkpoint(tmp_path / "nowhere") is None


def test_damage_after_the_first_look_is_seen(tmp_path):
    save_steps(tmp_path, 1)
    path = tmp_path / checkpoint_name(1)
    assert why_damaged(path) is None
    flip_byte(path, 500)
    os.utime(path, ns=(1, 1))
    assert "checksum" in why_damaged(path)


def test_prune_keeps_the_newest_valid(tmp_path):
    save_steps(tmp_path, 1, 2, 3, 4, 5)
    flip_byte(tmp_path / checkpoint_name(4), 500)
    prune_checkpoints(tmp_path, 2)
    assert [p.name for p in list_checkpoints(tmp_path)] == [checkpoint_name(s) for s in (5, 4, 3)]


def test_a_request_for_a_pruned_checkpoint_is_refused(tmp_path):
    """As when samples are made during the run."""
    save_steps(tmp_path, 1, 2, 3)
    prune_checkpoints(tmp_path, 1)
    for ask in (load_checkpoint, find_checkpoint, numdiff.load):
        with pytest.raises(
            NumdiffError,
            match=r"1.h5 does not exist, as a run keeps only its newest \(--keep\): use "
            r".*00003.h5, or the run folder, which stands for its newest\.$",
        ):
            ask(tmp_path / checkpoint_name(1))
        with pytest.raises(NumdiffError, match="00004.h5 does not exist; check the path"):
            ask(tmp_path / checkpoint_name(4))


@pytest.mark.parametrize("keep", [0, 1, 3])
def test_prune_never_removes_the_only_valid(tmp_path, keep):
    save_steps(tmp_path, 1, 2, 3)
    for step in (2, 3):
        flip_byte(tmp_path / checkpoint_name(step), 500)
    prune_checkpoints(tmp_path, keep)
    assert newest_checkpoint(tmp_path, lambda text: None) == tmp_path / checkpoint_name(1)


@pytest.mark.parametrize("fails_after", [0, 1000, 5000, 100_000, 400_000])
def test_full_disk(tmp_path, monkeypatch, fails_after):
    save_steps(tmp_path, 1)
    written = 0

    def write_some(file, data):
        nonlocal written
        if written + len(data) > fails_after:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written += len(data)
        return file.__class__.__mro__[1].write(file, data)

    monkeypatch.setattr(files.TemporaryFile, "_write_some", write_some)
    with pytest.raises(NumdiffError, match="the disk is full; free some space") as caught:
        save_checkpoint(
            tmp_path / checkpoint_name(2), {"parameters": np.ones(100_000, np.float32)}, META
        )
    assert "\n" not in str(caught.value)
    monkeypatch.undo()
    assert os.listdir(tmp_path) == [checkpoint_name(1)]
    assert newest_checkpoint(tmp_path) == tmp_path / checkpoint_name(1)
    save_steps(tmp_path, 2)
    assert newest_checkpoint(tmp_path) == tmp_path / checkpoint_name(2)


@needs("posix")
def test_full_disk_for_real(tmp_path):
    """A limit on the size of files makes the system itself refuse the write; the process ends as it
    should."""
    script = f"""
import resource, signal, numpy as np
from numdiff.errors import NumdiffError
from numdiff.training.checkpoint import save_checkpoint
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))
try:
    save_checkpoint({str(tmp_path / checkpoint_name(2))!r}, {{"parameters": np.ones(1_000_000, np.float32)}}, {{}})
except NumdiffError as error:
    print(error)
"""
    save_steps(tmp_path, 1)
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "larger than this system allows" in done.stdout
    assert os.listdir(tmp_path) == [checkpoint_name(1)]


@pytest.mark.parametrize("moment", ["fsync", "replace"])
def test_errors_at_the_end_leave_the_old_file(tmp_path, monkeypatch, moment):
    save_steps(tmp_path, 1)
    before = (tmp_path / checkpoint_name(1)).read_bytes()

    def fail(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(files.os, moment, fail)
    with pytest.raises(NumdiffError, match="disk is full"):
        save_steps(tmp_path, 1)
    monkeypatch.undo()
    assert os.listdir(tmp_path) == [checkpoint_name(1)]
    assert (tmp_path / checkpoint_name(1)).read_bytes() == before


def test_missing_folder_and_wrong_type(tmp_path):
    with pytest.raises(NumdiffError, match="the folder does not exist"):
        save_steps(tmp_path / "nowhere", 1)
    with pytest.raises(TypeError):
        save_checkpoint(tmp_path / "a.h5", {"a": np.array([object()])}, {})
    assert os.listdir(tmp_path) == []


def test_stray_files_go_and_live_ones_stay(tmp_path):
    (tmp_path / ".checkpoint-00000001.h5.123.tmp").write_bytes(b"half")
    (tmp_path / ".hidden").write_bytes(b"the user's own")
    with atomic_file(tmp_path / "now") as file:
        file.write(b"content")
        assert remove_stray_files(tmp_path) == [".checkpoint-00000001.h5.123.tmp"]
    assert sorted(os.listdir(tmp_path)) == [".hidden", "now"]
    assert (tmp_path / "now").read_bytes() == b"content"


SAVES = """
import sys, numpy as np
from numdiff.training.checkpoint import checkpoint_name, prune_checkpoints, save_checkpoint
run_dir, step = sys.argv[1], int(sys.argv[2])
while True:
    step += 1
    buffers = {"parameters": np.full(200_000, step, np.float32)}
    save_checkpoint(f"{run_dir}/{checkpoint_name(step)}", buffers, {"step": step})
    print(step, flush=True)
    prune_checkpoints(run_dir, 2)
"""


@exhaustive  # test_run.py kills a whole run
@needs("posix")
def test_kill_at_random_moments(tmp_path, rng):
    """Whatever moment kill -9 comes at, the newest checkpoint is valid and no older than the last
    one reported."""
    step = 0
    for _ in range(8):
        child = subprocess.Popen(
            [sys.executable, "-c", SAVES, str(tmp_path), str(step)],
            stdout=subprocess.PIPE,
            text=True,
        )
        reported = int(child.stdout.readline())
        time.sleep(rng.uniform(0, 0.1))
        child.kill()
        reported = int((f"{reported}\n" + child.stdout.read()).rsplit("\n", 2)[-2])
        child.wait()
        child.stdout.close()
        newest = newest_checkpoint(tmp_path)
        buffers, meta = load_checkpoint(newest)
        step = meta["step"]
        assert step >= reported and (buffers["parameters"] == step).all()
        assert all(why_damaged(p) is None for p in list_checkpoints(tmp_path))
        prune_checkpoints(tmp_path, 2)
        assert not [name for name in os.listdir(tmp_path) if name.endswith(".tmp")]
