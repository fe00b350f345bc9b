"""The cache on disk of what can be made again: compiled kernels and loops, decoded pictures.

    folder = own_folder(os.path.join(cache_root(), "data"))     made if it is missing; an OSError says why it cannot be
    write_own(folder / "name", data)                            under another name first, then renamed
    data = read_own(folder / "name")

Machine code that another user put there would run. So a folder is used only if it and the cache's
root belong to this user, no other user may write to them, and neither is a link of another user's;
files likewise. Other processes of this user may read and write at the same time.
"""

import contextlib
import errno
import os
import pathlib
import stat
import tempfile

from .files import NOT_FOLLOWED, check_regular, write_all

OWN_ONLY = 0o700  # the mode of new folders
MAX_BYTES = 256 << 20  # of a file that is read as a whole; a kernel has some 100 kB
FLAGS = NOT_FOLLOWED | getattr(os, "O_BINARY", 0)  # the second on Windows


class NotOwn(PermissionError):
    """A folder or file of the cache is not this user's alone; `strerror` says why."""

    def __init__(self, path, why):
        super().__init__(errno.EPERM, why, str(path))


def cache_root():
    """The folder for what can be made again: `NUMDIFF_CACHE_DIR`, or numdiff's in the user's cache;
    for a user without a home, as a container may have, one among the temporary files."""
    named, cache = os.environ.get("NUMDIFF_CACHE_DIR"), os.environ.get("XDG_CACHE_HOME")
    if named or cache:
        return named or os.path.join(cache, "numdiff")
    try:
        return os.path.join(pathlib.Path.home(), ".cache", "numdiff")
    except RuntimeError:
        return os.path.join(tempfile.gettempdir(), f"numdiff-{os.getuid()}")


def own_folder(path):
    """The folder `path`, made with those above it; an OSError where it cannot be, or is not this
    user's alone."""
    path, root = pathlib.Path(path), pathlib.Path(cache_root())
    for folder in (root, path) if root in path.parents else (path,):
        # or one above it is a file, which the next line says
        with contextlib.suppress(FileExistsError):
            folder.parent.mkdir(parents=True)
        with contextlib.suppress(FileExistsError):
            folder.mkdir(OWN_ONLY)
        check_own(folder)
    return path


def check_own(path):
    """Raise an OSError unless `path` and, where it is in the cache, the cache's root are this
    user's alone."""
    path, root = pathlib.Path(path), pathlib.Path(cache_root())
    for folder in (root, path) if root in path.parents else (path,):
        state = os.lstat(folder)
        if stat.S_ISLNK(state.st_mode):
            if folder != root:
                raise NotOwn(folder, "it is a symbolic link")
            _check_owner(folder, state)  # a user may keep the whole cache elsewhere
            state = os.stat(folder)
        if not stat.S_ISDIR(state.st_mode):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder))
        _check_owner(folder, state)
        if os.name == "posix" and state.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise NotOwn(folder, f"other users may write to it: run chmod go-w {folder}")


def _check_owner(path, state):
    if hasattr(os, "geteuid") and state.st_uid != os.geteuid():
        raise NotOwn(path, "it belongs to another user")


def check_own_file(path):
    """Raise an OSError unless `path` is a regular file of this user's, and no link."""
    state = os.lstat(path)
    check_regular(path, state.st_mode)
    _check_owner(path, state)


def read_own(path):
    """The contents of a file in a folder of `own_folder`; an OSError where it is not this user's
    regular file."""
    handle = os.open(path, os.O_RDONLY | FLAGS)
    try:
        state = os.fstat(handle)
        check_regular(path, state.st_mode)
        _check_owner(path, state)
        if state.st_size > MAX_BYTES:
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), str(path))
        with open(handle, "rb", closefd=False) as file:
            return file.read(MAX_BYTES)
    finally:
        os.close(handle)


def write_own(path, data):
    """Write a file in a folder of `own_folder`: under another name, then renamed, so that readers
    find it whole. An OSError where it cannot be."""
    path = pathlib.Path(path)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    unfinished.unlink(missing_ok=True)  # left by a killed process that had our number
    handle = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | FLAGS, 0o600)
    try:
        with open(handle, "wb", buffering=0) as file:
            write_all(file, data)
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)
