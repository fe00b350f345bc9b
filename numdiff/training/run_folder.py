"""Run folders: `runs/00000-unet-tiny`, one a run, numbered in the order in which the runs were
started.

    options.json                the settings (options.py)
    stats.jsonl                 one line a report (report.py)
    loss.png, samples-….png     pictures
    checkpoint-00001234.h5      (checkpoint.py)
    best.h5                     likewise, of the least Fréchet distance (--evaluate-every)
"""

import contextlib
import logging
import os
import pathlib
import re

from ..errors import NumdiffError, UsageError
from ..files import cannot_write, fcntl, open_to_append
from .checkpoint import (
    checkpoint_step,
    list_checkpoints,
    newest_checkpoint,
    why_damaged,
    why_missing,
)

NUMBER = re.compile(r"^(\d{5,})(-.*)?$")
OPTIONS = "options.json"
BEST = "best.h5"  # the checkpoint of the least distance that --evaluate-every has measured


def list_runs(outdir):
    """Paths of the run folders in `outdir`, the newest first."""
    outdir = pathlib.Path(outdir)
    runs = (
        [p for p in outdir.iterdir() if NUMBER.match(p.name) and p.is_dir()]
        if outdir.is_dir()
        else []
    )
    return sorted(runs, key=_number, reverse=True)


def create_run(options):
    """Make the next run folder under `options.outdir`, with its options.json; returns its path.

    Several processes may do so at once: making the folder `00003` claims the number 3, whatever the
    run will be called, and only then is it given its whole name.
    """
    outdir = pathlib.Path(options.outdir)
    try:
        outdir.mkdir(parents=True, exist_ok=True)
        number = max(map(_number, list_runs(outdir)), default=-1) + 1
        while True:
            claim = outdir / f"{number:05d}"
            with contextlib.suppress(FileExistsError):
                claim.mkdir()
                if sum(_number(p) == number for p in list_runs(outdir)) == 1:
                    break
                # another process had claimed this number and named its run before our mkdir
                claim.rmdir()
            number += 1
        run_dir = claim.rename(
            outdir / f"{number:05d}-{options.model}-{options.preset or 'custom'}"
        )
    except OSError as error:
        raise cannot_write("a run folder in", outdir, error) from error
    try:
        options.save(run_dir / OPTIONS)
    except BaseException:
        with contextlib.suppress(OSError):  # it has been saved
            run_dir.rmdir()
        raise
    return run_dir


def find_resume(resume, outdir="runs", warn=None):
    """(run folder, checkpoint) to resume from.

    resume: "auto", the newest run in `outdir` with a valid checkpoint; or a run folder, its number
    in `outdir`, or a checkpoint file. What is passed over, and why, is reported to `warn(text)`.
    """
    warn = warn or logging.getLogger("numdiff").warning
    if str(resume) == "auto":
        for run_dir in list_runs(outdir):
            checkpoint = newest_checkpoint(run_dir, warn)
            if checkpoint:
                return run_dir, checkpoint
            warn(f"passed over: {run_dir} has no checkpoint yet.")
        raise NumdiffError(
            f"there is no run with a checkpoint in {outdir} to resume; leave --resume out to start one, "
            "or give the right --outdir."
        )
    path = find_run(resume, outdir)
    if path.is_file():
        reason = why_damaged(path)
        if reason:
            raise NumdiffError(reason)
        return path.parent, path
    checkpoint = newest_checkpoint(path, warn)
    if checkpoint is None:
        check_run(path)
        raise NumdiffError(f"{path} has no valid checkpoint to resume from; start a new run.")
    return path, checkpoint


def check_run(path):
    """Raise a `UsageError` for a folder that is no run."""
    if (path / OPTIONS).exists():
        return
    refuse_runs(path, f", or `auto` for the newest (with --outdir {path})")
    raise UsageError(
        f"{path} is not a run folder: give one that `numdiff train` made, a checkpoint or a model file."
    )


def refuse_runs(path, otherwise=""):
    """Raise a `UsageError` for a folder that holds runs: one of them is what is meant. otherwise:
    what else goes."""
    if runs := list_runs(path):
        raise UsageError(
            f"{path} is a folder that holds runs, and not itself a run: give one of them, such as "
            f"{runs[0]}{otherwise}."
        )


def find_checkpoint(where, outdir="runs", warn=None):
    """The checkpoint or model file that `where` means: a file, or what `find_resume` takes."""
    path = pathlib.Path(where)
    if path.is_file():
        return path
    return find_resume(where, outdir, warn)[1]


def find_run(where, outdir="runs"):
    """The path that `where` means: an existing path, or the number of a run in `outdir`."""
    path = pathlib.Path(where)
    if path.exists():
        return path
    if str(where).isdecimal() and len(str(where)) < 19:  # characters such as ² are not digits here
        for run_dir in list_runs(outdir):
            if _number(run_dir) == int(str(where)):
                return run_dir
        raise NumdiffError(
            f"there is no run number {int(str(where))} in {outdir}; give a run folder, or the right "
            "--outdir."
        )
    if checkpoint_step(path) is not None and list_checkpoints(path.parent):
        raise NumdiffError(why_missing(path))
    raise NumdiffError(
        f"{where} does not exist; give a run folder, its number, a checkpoint file, or `auto`."
    )


def check_outdir(resume, run_dir, outdir):
    """Raise a `UsageError` if the run that `resume` means is not in the `outdir` that was given
    with it."""
    if pathlib.Path(run_dir).resolve().parent != pathlib.Path(outdir).resolve():
        raise UsageError(
            f"--outdir {outdir} and --resume {resume} contradict each other, as a run continues in its "
            f"own folder, {run_dir}: leave --outdir out, or move the run there first."
        )


@contextlib.contextmanager
def lock_run(run_dir):
    """Hold a run for this process; a `NumdiffError` if another one trains it. The lock ends with
    the process."""
    with open_to_append(pathlib.Path(run_dir) / ".lock", "the lock of the run") as file:
        try:
            if fcntl:
                fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise NumdiffError(
                f"another process is training {run_dir}; wait for it, or resume another run."
            ) from None
        except OSError:  # a file system without locks
            pass
        yield


def sample_path(run_dir, step):
    """The path of a step's sample grid."""
    return os.path.join(run_dir, f"samples-{step:08d}.png")


def _number(path):
    return int(NUMBER.match(path.name).group(1))
