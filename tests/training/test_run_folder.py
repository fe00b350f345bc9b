"""Run folders: numbered, made by several at once, found again."""

import pathlib
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from numdiff.errors import NumdiffError, UsageError
from numdiff.training.checkpoint import checkpoint_name, save_checkpoint, set_aside_later
from numdiff.training.options import load_options, resolve
from numdiff.training.run_folder import (
    create_run,
    find_checkpoint,
    find_resume,
    list_runs,
    lock_run,
)


@pytest.fixture
def options(tmp_path):
    return resolve({"device": "cpu", "preset": "tiny", "outdir": str(tmp_path / "runs")})


def add_checkpoint(run_dir, step):
    path = run_dir / checkpoint_name(step)
    save_checkpoint(path, {"parameters": np.ones(3, np.float32)}, {"step": step})
    return path


def test_numbers_and_options(options):
    first, second = create_run(options), create_run(options)
    assert (first.name, second.name) == ("00000-unet-tiny", "00001-unet-tiny")
    assert load_options(first) == options
    (first.parent / "00041-kept-by-hand").mkdir()
    (first.parent / "00099").write_text("a file, not a run")
    assert create_run(options).name == "00042-unet-tiny"
    assert [p.name[:5] for p in list_runs(options.outdir)] == ["00042", "00041", "00001", "00000"]


def test_none_is_left_without_options(options, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(type(options), "save", interrupted)
    with pytest.raises(KeyboardInterrupt):
        create_run(options)
    assert not list_runs(options.outdir)


def test_many_at_once_get_different_numbers(options):
    with ThreadPoolExecutor(16) as pool:
        runs = list(pool.map(lambda _: create_run(options), range(64)))
    assert sorted(int(run.name[:5]) for run in runs) == sorted({int(run.name[:5]) for run in runs})
    assert all((run / "options.json").exists() for run in runs)


def test_a_folder_that_cannot_be_made(options, tmp_path):
    (tmp_path / "runs").write_text("a file is in the way")
    with pytest.raises(NumdiffError, match="cannot write a run folder in .*runs"):
        create_run(options)


def test_find_resume(options):
    first, second, third = (create_run(options) for _ in range(3))
    old, new = add_checkpoint(first, 1), add_checkpoint(second, 2)
    messages = []
    assert find_resume("auto", options.outdir, messages.append) == (second, new)
    assert len(messages) == 1 and "00002-unet-tiny has no checkpoint yet" in messages[0]
    assert (
        find_resume(first, options.outdir)
        == find_resume("0", options.outdir)
        == find_resume(old)
        == (first, old)
    )
    assert find_checkpoint(new) == find_checkpoint("00001", options.outdir) == new
    with pytest.raises(NumdiffError, match="has no valid checkpoint"):
        find_resume(third)
    with pytest.raises(NumdiffError, match="no run number 7"):
        find_resume("7", options.outdir)
    with pytest.raises(
        UsageError, match="holds runs, and not itself a run: give one of them, .*00002-unet-tiny"
    ):
        find_resume(options.outdir)
    with pytest.raises(UsageError, match="is not a run folder: give one that `numdiff train` made"):
        find_resume(pathlib.Path(options.outdir).parent)
    with pytest.raises(NumdiffError, match="nowhere does not exist"):
        find_resume("nowhere", options.outdir)
    with pytest.raises(NumdiffError, match="no run with a checkpoint"):
        find_resume("auto", "nowhere")


def test_damaged_checkpoints_are_passed_over(options):
    run_dir = create_run(options)
    good, bad = add_checkpoint(run_dir, 1), add_checkpoint(run_dir, 2)
    bad.write_bytes(bad.read_bytes()[:-40])
    messages = []
    assert find_resume("auto", options.outdir, messages.append) == (run_dir, good)
    assert "truncated or damaged" in messages[0]
    with pytest.raises(NumdiffError, match="truncated or damaged"):
        find_resume(bad)


def test_later_checkpoints_are_set_aside(options):
    run_dir = create_run(options)
    first, second = add_checkpoint(run_dir, 1), add_checkpoint(run_dir, 2)
    for name in (".old", ".old.2", ".old.3"):  # of each path that was left
        content = second.read_bytes() + name.encode()
        second.write_bytes(content)
        assert [p.name for p in set_aside_later(run_dir, 1)] == [second.name + name]
        assert (run_dir / (second.name + name)).read_bytes() == content
        assert find_resume(run_dir) == (run_dir, first)
        add_checkpoint(run_dir, 2)


def test_one_process_trains_a_run(options):
    run_dir = create_run(options)
    with lock_run(run_dir):
        with pytest.raises(NumdiffError, match="another process is training"), lock_run(run_dir):
            pass
    with lock_run(run_dir):
        pass
    with pytest.raises(FileNotFoundError), lock_run(run_dir):
        raise FileNotFoundError("an error of the training keeps its own name")
