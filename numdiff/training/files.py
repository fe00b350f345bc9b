"""Files that are either whole or not there: written under a temporary name, forced to the disk, then renamed.

A rename inside one folder is atomic, so whoever opens the final name finds the old content or the new, never a half.
The temporary file is locked while its writer lives; the system drops the lock when the writer dies, by whatever cause,
and so `remove_stray_files` can tell the remains of a killed run from a file that is being written now.
"""
import contextlib
import errno
import io
import json
import os
import pathlib
import re

from ..errors import NumdiffError

try:
    import fcntl
except ImportError:  # Windows has no flock; there an open file cannot be removed anyway, which protects it as well
    fcntl = None

TEMPORARY = re.compile(r"^\..+\.\d+\.tmp$")  # .<final name>.<process>.tmp, hidden from listings of the folder

REASONS = {
    errno.ENOSPC: "the disk is full; free some space or choose another folder",
    errno.EDQUOT: "your disk quota is used up; free some space or choose another folder",
    errno.EFBIG: "the file is larger than this system allows; raise the limit (ulimit -f) or choose another folder",
    errno.EACCES: "permission denied; choose a folder that you may write to",
    errno.EPERM: "permission denied; choose a folder that you may write to",
    errno.EROFS: "the file system is read-only; choose another folder",
    errno.ENOENT: "the folder does not exist; create it or choose another",
    errno.ENOTDIR: "a part of this path is a file, not a folder; choose another path",
    errno.EISDIR: "this is a folder; give the name of a file",
}


class TemporaryFile(io.FileIO):
    """A raw file that writes all it is given and keeps the first error instead of raising it.

    HDF5 cannot recover from a write that fails: it tries again when the file is closed, and once more when Python ends.
    So it is told that all went well, and `check` raises the error after it has let go of the file.
    """

    error = None

    def write(self, data):
        data = memoryview(data).cast("B")
        done = 0
        while done < len(data) and self.error is None:
            try:
                done += self._write_some(data[done:])  # the system may take less than it is given, 2 GiB at most
            except BaseException as error:  # a Ctrl-C as well
                self.error = error
        return len(data)

    def _write_some(self, data):
        return super().write(data)

    def truncate(self, size=None):
        if self.error is None:
            try:
                return super().truncate(size)
            except BaseException as error:
                self.error = error
        return size

    def check(self):
        if self.error is not None:
            raise self.error


@contextlib.contextmanager
def atomic_file(path, what="the file"):
    """Yield a raw binary file that becomes `path` when the block ends well; after any error `path` is as it was.

    `what` names the content in the message of an error, as in "cannot write the checkpoint runs/…: the disk is full".
    """
    path = pathlib.Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        file = TemporaryFile(temporary, "w+")
    except OSError as error:
        raise cannot_write(what, path, error) from error
    try:
        with file:
            _lock(file)
            yield file
            file.check()
            os.fsync(file.fileno())  # else a power cut could leave the new name over content that never arrived
            os.replace(temporary, path)
        _sync_folder(path.parent)
    except OSError as error:
        raise cannot_write(what, path, error) from error
    finally:
        with contextlib.suppress(OSError):  # not there any more where all went well
            os.unlink(temporary)


def write_json(path, value, what="the file"):
    """Write `value` as indented JSON, atomically."""
    with atomic_file(path, what) as file:
        file.write((json.dumps(value, indent=2) + "\n").encode())


def cannot_write(what, path, error):
    """The `NumdiffError` for an `OSError` met while writing `path`."""
    reason = REASONS.get(error.errno, f"{error.strerror or error}; choose another folder if it repeats")
    return NumdiffError(f"cannot write {what} {path}: {reason}.")


def remove_stray_files(folder):
    """Remove the temporary files that killed processes left in `folder`; returns their names."""
    removed = []
    for path in sorted(pathlib.Path(folder).iterdir()):
        if TEMPORARY.match(path.name) and path.is_file():
            with contextlib.suppress(OSError):  # its writer lives, or another process was quicker
                with open(path, "rb") as file:
                    _lock(file)
                    if fcntl:
                        path.unlink()
                if not fcntl:
                    path.unlink()
                removed.append(path.name)
    return removed


def _lock(file):
    """Take the lock of an open file without waiting, until it is closed; OSError where another process has it."""
    if fcntl:
        fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)


def _sync_folder(folder):
    """Force the rename itself to the disk, where the system lets folders be opened."""
    if os.name != "nt":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
