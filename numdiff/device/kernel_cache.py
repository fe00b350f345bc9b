"""Compiled kernels on disk: where Numba keeps them, and how several processes keep them at the same time.

Numba numbers the kernels that one function makes as it saves them: it reads an index, adds a line, writes it again, and
then writes the kernel. Two processes that do so together take the same number, and who comes next is given the one's
kernel for the other's. Ranks and workers that start with an empty cache do just that; so here each waits for its turn.
"""
import contextlib
import functools
import hashlib
import os
import pathlib

try:
    import fcntl
except ImportError:  # Windows, where several ranks do not run
    fcntl = None


def cache_directory():
    """Where compiled kernels are kept: a folder whose name changes with any line of the kernels' own code.

    Numba's cache looks at the file of a kernel only; a change in an intrinsic or a device function of another file
    would go unseen, so their contents are part of the folder's name.
    """
    root = os.environ.get("NUMDIFF_CACHE_DIR") or os.path.join(
        os.environ.get("XDG_CACHE_HOME") or os.path.join(pathlib.Path.home(), ".cache"), "numdiff")
    package = pathlib.Path(__file__).resolve().parent.parent
    digest = hashlib.sha256()
    for folder in ("device", "kernels"):
        for path in sorted((package / folder).rglob("*.py")):
            digest.update(path.read_bytes())
    return os.path.join(root, f"kernels-{digest.hexdigest()[:16]}")


@contextlib.contextmanager
def turn(folder):
    """Within the context no other process saves a kernel in this folder; where file systems have no locks, it may."""
    with open(os.path.join(folder, "lock"), "a") as file:
        if fcntl:
            with contextlib.suppress(OSError):  # a parallel file system may have none
                fcntl.flock(file.fileno(), fcntl.LOCK_EX)  # ends with the file, and with the process
        yield


@functools.cache
def save_in_turn():
    """Make Numba save kernels one process after another; once is enough."""
    from numba.cuda.core.caching import IndexDataCacheFile
    save = IndexDataCacheFile.save

    def one_at_a_time(self, key, data):
        with turn(self._cache_path):
            save(self, key, data)

    IndexDataCacheFile.save = one_at_a_time
