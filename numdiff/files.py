"""How every file is read and written: the one place that opens what a user names.

READING. `open_regular` opens only regular files: a FIFO would wait for ever, a device might never
end. The contents of a file are never trusted before they are checked: sizes before allocation, a
schema before use (schema.py, hdf5/, npz.py).

WRITING. A file is either whole or not there: it is written under a temporary name, synced to the
disk, then renamed. Which names a command may write to is in outputs.py.
Anything but a regular file (a device, a FIFO, a symbolic link, which leads elsewhere) is neither
replaced nor followed. A rename inside one folder is atomic, so a reader of the final name finds the
old contents or the new, never a part. The temporary file is locked while its writer lives, and the
system drops the lock when the writer dies. So `remove_stray_files` can distinguish the remains of a
killed run from a file that is being written.
"""

import contextlib
import errno
import io
import itertools
import json
import os
import pathlib
import re
import stat

from .errors import NumdiffError
from .signals import deferred_signals

try:
    import fcntl
# Windows has no flock; there an open file cannot be removed anyway, which protects it as well
except ImportError:
    fcntl = None

# .<final name>.<process>.tmp, hidden from listings of the folder
TEMPORARY = re.compile(r"^\.(.+)\.\d+\.tmp$")

REASONS = {
    errno.ENOSPC: "the disk is full; free some space or choose another folder",
    errno.EDQUOT: "your disk quota is used up; free some space or choose another folder",
    errno.EFBIG: "the file is larger than this system allows; raise the limit (ulimit -f) or choose another folder",
    errno.EACCES: "permission denied; choose a folder that you may write to",
    errno.EPERM: "permission denied; choose a folder that you may write to",
    errno.EROFS: "the file system is read-only; choose another folder",
    errno.EEXIST: "there is a file of this name; choose another",
    errno.ENOENT: "the folder does not exist; create it or choose another",
    errno.ENOTDIR: "a part of this path is a file, not a folder; choose another path",
    errno.EISDIR: "this is a folder; give the name of a file",
    errno.ELOOP: "it is a symbolic link; give the name of what it leads to, or remove it",
    errno.ENXIO: "it is not a regular file; give another name",
}
KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
    (stat.S_ISLNK, "a symbolic link"),
)
WITHOUT_WAITING = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0)
NOT_FOLLOWED = getattr(os, "O_NOFOLLOW", 0) | WITHOUT_WAITING  # 0 on Windows, which has no FIFOs


# Reading ------------------------------------------------------------------------------------------


def open_regular(path):
    """The regular file `path`, raw and binary; an `IrregularFile` (an OSError) for a folder, a
    FIFO, a device."""
    check_regular(path, os.stat(path).st_mode)  # even opening a device can have effects
    file = open(
        path, "rb", buffering=0, opener=lambda name, flags: os.open(name, flags | WITHOUT_WAITING)
    )
    try:
        check_regular(path, os.fstat(file.fileno()).st_mode)  # it may have been replaced meanwhile
    except OSError:
        file.close()
        raise
    return file


def read_bytes(path, limit):
    """The contents of the regular file `path`, of at most `limit` bytes; a `NumdiffError` if there
    are more."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > limit:
            raise NumdiffError(
                f"{path} has {size:,} bytes, and such files have at most {limit:,}; give another file."
            )
        return read_at(file, 0, size)


def read_at(file, offset, count):
    """`count` bytes of an open raw file from `offset` on, fewer only at its end; its own position
    stays."""
    parts, missing = [], count
    while missing:
        part = _pread(file, min(missing, 1 << 30), offset + count - missing)
        if not part:
            break
        parts.append(part)
        missing -= len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def read_into(file, offset, array):
    """Fill a C-contiguous array with the bytes of an open raw file from `offset` on, without a copy
    between them. Returns the number of bytes, which is smaller than the array's only at the file's
    end."""
    data, done = memoryview(array.reshape(-1).view("u1")), 0
    while done < len(data):
        part = data[done : done + (1 << 30)]
        if hasattr(os, "preadv"):
            count = os.preadv(file.fileno(), [part], offset + done)
        else:  # on Windows
            read = read_at(file, offset + done, len(part))
            part[: len(read)], count = read, len(read)
        if not count:
            break
        done += count
    return done


def _pread(file, count, offset):
    if hasattr(os, "pread"):
        return os.pread(file.fileno(), count, offset)
    file.seek(offset)  # on Windows
    return file.read(count)


class Refused(ValueError):
    """A file's contents are refused; the text says why, as part of a sentence."""


class WriteError(NumdiffError):
    """A file cannot be written: the disk is full, say."""


class IrregularFile(OSError):
    """Not a file, where one is to be read or written; `strerror` says what it is."""


def check_regular(path, mode):
    """Raise an `IrregularFile` unless `mode`, of os.stat, is that of a regular file."""
    if not stat.S_ISREG(mode):
        kind = next((name for test, name in KINDS if test(mode)), "no regular file")
        raise IrregularFile(errno.EINVAL, f"it is {kind}", str(path))


# Writing ------------------------------------------------------------------------------------------

_held = {}  # {absolute path of a folder: its descriptor}, of `held_folder`


class FolderTaken(NumdiffError):
    """A folder that this process holds has been removed, moved or replaced."""


@contextlib.contextmanager
def held_folder(folder):
    """Context: files are written to this folder alone, and not to one that is given its name
    meanwhile; `check_held`.

    An open folder keeps its number (st_ino) for itself, even when it has been removed.
    """
    path = os.path.abspath(folder)
    # Windows does not remove a folder with open files
    if os.open not in os.supports_dir_fd or path in _held:
        yield
        return
    _held[path] = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield
    finally:
        os.close(_held.pop(path))


def check_held(folder):
    """Raise a `FolderTaken` where another folder, or none, has the name of one that is held."""
    handle = _held.get(os.path.abspath(folder))
    if handle is None:
        return
    with contextlib.suppress(OSError):
        if os.path.samestat(os.fstat(handle), os.stat(folder)):
            return
    raise FolderTaken(
        f"{folder} was removed, moved or replaced while this process wrote to it, so nothing more is "
        "written; continue with --resume from where the folder is now, or start a new run."
    )


def _reached(path):
    """(path, None); or (name, descriptor of the folder) of what is in a held folder."""
    folder, name = os.path.split(os.path.abspath(path))
    return (name, _held[folder]) if folder in _held else (path, None)


def remove(path):
    """Remove a file if it is there."""
    name, at = _reached(path)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(name, dir_fd=at)


def check_target(what, path):
    """Raise a `NumdiffError` if writing `path` would replace or follow what is not a regular file,
    or its folder is another one than was held."""
    check_held(os.path.dirname(os.path.abspath(path)))
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        name, at = _reached(path)
        mode = os.stat(name, dir_fd=at, follow_symlinks=False).st_mode
        if stat.S_ISDIR(mode):
            raise cannot_write(what, path, OSError(errno.EISDIR, ""))
        try:
            check_regular(path, mode)
        except IrregularFile as error:
            raise cannot_write(what, path, error) from None


def open_to_append(path, what):
    """The regular file `path`, or a new one, raw, for appending; it is not truncated, and no link
    is followed."""
    check_target(what, path)
    try:
        name, at = _reached(path)
        handle = os.open(
            name, os.O_WRONLY | os.O_CREAT | os.O_APPEND | NOT_FOLLOWED, 0o666, dir_fd=at
        )
        file = open(handle, "ab", buffering=0)
        check_regular(path, os.fstat(handle).st_mode)
        return file
    except OSError as error:
        raise cannot_write(what, path, error) from error


class TemporaryFile(io.FileIO):
    """A raw file that writes all it is given and keeps the first error instead of raising it.

    HDF5 cannot recover from a write that fails: it tries again when the file is closed, and once
    more when Python ends. So each write reports success, and `check` raises the error after HDF5
    has closed the file.
    """

    error = None

    def write(self, data):
        data = memoryview(data).cast("B")
        done = 0
        while done < len(data) and self.error is None:
            try:
                # the system may write less than it is given, 2 GiB at most
                done += self._write_some(data[done:])
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


def write_all(file, data):
    """Write all of `data` to a raw file: the system may write less than it is given, 2 GiB at most."""
    data = memoryview(data)
    while data:
        data = data[file.write(data) :]


@contextlib.contextmanager
def atomic_file(path, what="the file"):
    """Yield a raw binary file that becomes `path` when the block ends well; after any error `path`
    is as it was.

    `what` names the content in the message of an error, as in "cannot write the checkpoint runs/…:
    the disk is full".
    """
    path = pathlib.Path(path)
    check_target(what, path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    (name, at), final = _reached(temporary), _reached(path)[0]
    try:
        # left by a killed process that had our process ID
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=at)
        file = TemporaryFile(
            name, "x+", opener=lambda name, flags: os.open(name, flags, 0o666, dir_fd=at)
        )
    except OSError as error:
        raise cannot_write(what, path, error) from error
    try:
        with file:
            _lock(file)
            yield file
            _force(file)
            check_target(what, path)
            os.replace(name, final, src_dir_fd=at, dst_dir_fd=at)
        _sync_folder(path.parent)
    except OSError as error:
        raise cannot_write(what, path, error) from error
    finally:
        with contextlib.suppress(OSError):  # already gone if all went well
            os.unlink(name, dir_fd=at)


@contextlib.contextmanager
def atomic_pair(path, what, key, key_what, key_data):
    """`atomic_file` of `path`, which is read only together with the file `key`, here with the
    contents `key_data`. Both are replaced once both are on the disk. A reader meanwhile, or after
    the process is killed, finds the old ones, the new ones, or no `key`, which is removed in
    between."""
    with contextlib.ExitStack() as stack:
        key_file = stack.enter_context(atomic_file(key, key_what))
        key_file.write(key_data)
        _force(key_file)
        file = stack.enter_context(atomic_file(path, what))
        yield file
        _force(file)
        replacing = stack.pop_all()  # `path`, then `key`
    with deferred_signals(), replacing:
        pathlib.Path(key).unlink(missing_ok=True)
        _sync_folder(pathlib.Path(key).parent)


def _force(file):
    """Force what a `TemporaryFile` holds to the disk: otherwise a power cut could leave the new
    name on contents that never arrived. Raises what has gone wrong with it."""
    file.check()
    os.fsync(file.fileno())


def write_text(path, text, what="the file"):
    """Write `text` as UTF-8, atomically."""
    with atomic_file(path, what) as file:
        file.write(text.encode())


def write_json(path, value, what="the file"):
    """Write `value` as indented JSON, atomically."""
    write_text(path, json.dumps(value, indent=2) + "\n", what)


def cannot_write(what, path, error):
    """The `WriteError` for an `OSError` met while writing `path`."""
    if isinstance(error, IrregularFile):
        reason = f"{error.strerror}, which numdiff neither replaces nor follows; give another name"
    else:
        reason = REASONS.get(
            error.errno, f"{error.strerror or error}; choose another folder if it repeats"
        )
    return WriteError(f"cannot write {what} {path}: {reason}.")


def set_aside(path):
    """Rename a file to ….old, or to ….old.2 and on where there is one already; returns its new
    path."""
    path = pathlib.Path(path)
    names = itertools.chain((".old",), (f".old.{n}" for n in itertools.count(2)))
    return path.replace(
        next(
            new
            for new in (path.with_name(path.name + name) for name in names)
            if not os.path.lexists(new)
        )
    )


def remove_stray_files(folder, name=None):
    """Remove the temporary files that killed processes left in `folder`, those of writing `name` if
    it is given; returns their names."""
    removed = []
    for path in sorted(pathlib.Path(folder).iterdir()):
        written = TEMPORARY.match(path.name)
        if written and name in (None, written[1]):
            with contextlib.suppress(OSError):  # its writer lives, or another process was quicker
                with open_regular(path) as file:
                    _lock(file)
                    if fcntl:
                        path.unlink()
                if not fcntl:
                    path.unlink()
                removed.append(path.name)
    return removed


def _lock(file):
    """Take the lock of an open file without waiting, until it is closed; OSError where another
    process has it."""
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
