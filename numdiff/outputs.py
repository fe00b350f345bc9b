"""What a command may write: neither over what it reads, nor over another of its outputs, nor over
what is kept.

    check_outputs([("--grid", "the picture", grid), ("--npz", "the samples", npz)], checkpoint,
    mask)

precedes the long work that writes to these paths. It protects files that take long to make again:
the files of a run, its checkpoints in any folder, and datasets. (files.py writes, so that a file is
complete or absent.)
"""

import contextlib
import errno
import os
import re
import stat

from .errors import NumdiffError, UsageError
from .files import Refused, cannot_write, check_target, remove_stray_files

RUN = "options.json"  # what a folder is a run's by
OF_A_RUN = re.compile(
    r"^((checkpoint|averages)-\d+\.h5(\.old(\.\d+)?)?|best\.h5(\.old(\.\d+)?)?|options\.json|stats\.jsonl)$"
)


def check_outputs(outputs, *sources):
    """Raise a `NumdiffError` for the first of several outputs that must not be written where it is
    to go.

    outputs: [(option, what it holds, path)], None for a path that is not given; sources: as
    `check_output` takes them
    """
    options = {}
    for option, what, path in outputs:
        if path:
            check_output(what, path, *sources)
            other = options.setdefault(os.path.realpath(path), option)
            if other != option:
                raise UsageError(f"{other} and {option} name one file: give them different names.")


def check_output(what, path, *sources):
    """Raise a `NumdiffError` if `path` could not be written, or would replace what is read or kept.

    sources: paths of what is read, None for those that are not there
    """
    check_target(what, path)
    folder = os.path.dirname(os.path.abspath(path))
    try:
        if not stat.S_ISDIR(os.stat(folder).st_mode):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise cannot_write(what, path, error) from error
    check_apart(what, path, *sources)


def check_apart(what, path, *sources, datasets=True):
    """Raise a `NumdiffError` if writing `path` would replace what is read, or kept. Removes the
    parts of it that a killed command has left behind.

    datasets: whether these are among what is kept
    """
    for source in filter(None, sources):
        if os.path.exists(path) and os.path.exists(source) and os.path.samefile(path, source):
            raise NumdiffError(
                f"cannot write {what} {path}: it is {source}, which is read; give another name."
            )
    why = _why_kept(path, datasets)
    if why:
        raise NumdiffError(f"cannot write {what} {path}: {why}; give another name.")
    folder, name = os.path.split(os.path.abspath(path))
    with contextlib.suppress(OSError):  # there is no such folder, or it cannot be read
        remove_stray_files(folder, name)


def check_ending(option, path, *endings):
    """Raise a `UsageError` if the path of an option has none of the endings, in upper or lower
    case."""
    if path is not None and os.path.splitext(path)[1].lower() not in endings:
        raise UsageError(f"{option} {path} must end in {' or '.join(endings)}.")


def _why_kept(path, datasets):
    """Why nothing may be written at a path, in words; None if something may."""
    folder, name = os.path.split(os.path.realpath(path))
    if OF_A_RUN.match(name) and os.path.isfile(os.path.join(folder, RUN)):
        # also one that is not there: it would be taken for a checkpoint
        return "a file of this name is the run's own"
    if os.path.isfile(path):
        from .hdf5 import open_hdf5  # it imports NumPy, which takes a while

        with contextlib.suppress(OSError, Refused), open_hdf5(path) as file:
            names = file.names()
            if "images" in names:
                return "it is a dataset" if datasets else None
            if "buffers" in names and set(file.names("buffers")) != {"parameters"}:
                return "it is a checkpoint of a run"
    return None
