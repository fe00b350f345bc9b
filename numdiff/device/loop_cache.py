"""Loops that Numba has compiled for the host's cores (`on_host`), kept on disk like kernels
(kernel_cache.py).

Numba's own cache unpickles the files in `NUMBA_CACHE_DIR`, also another user's, and raises where
one is damaged or the disk is full. This one has a file for each function and its types, in a folder
that is this user's alone, with a checksum. Whatever is wrong with a file or with the folder, the
loop is compiled again: all of a run's take 4 s.
"""

import hashlib
import pathlib
import pickle
import platform

import numba
from numba.core.caching import NullCache
from numba.core.compiler import CompileResult
from numba.core.serialize import dumps

from ..caches import cache_root, check_own, own_folder, read_own, write_own
from .kernel_cache import code_digest, is_hashed, toolchain

CHECKSUM = 32  # bytes of SHA-256, before the rest


class LoopCache(NullCache):
    """What Numba's dispatchers ask for compiled code, of one function; `NullCache` has no other
    methods. Of a function outside of numdiff, or one that is made in another, nothing is kept: its
    code may change under the same name."""

    def __init__(self, function):
        self._name = f"{function.__module__}.{function.__qualname__}"
        self._kept = is_hashed(self._name) and "<locals>" not in self._name

    def load_overload(self, sig, target_context):
        """The compiled function for arguments of certain types; None if it is not there, or
        damaged."""
        if not self._kept:
            return None
        try:
            target_context.refresh()
            path = self._path(sig, target_context)
            check_own(path.parent)
            data = read_own(path)
            if hashlib.sha256(data[CHECKSUM:]).digest() == data[:CHECKSUM]:
                return CompileResult._rebuild(target_context, *pickle.loads(data[CHECKSUM:]))
        except Exception:  # no folder, no file, or one of another Numba
            pass
        return None

    def save_overload(self, sig, data):
        # it refers to addresses of this process
        if not self._kept or data.lifted or data.library.has_dynamic_globals:
            return
        try:
            path = self._path(sig, data.target_context)
            content = dumps(data._reduce())
            write_own(
                own_folder(path.parent) / path.name, hashlib.sha256(content).digest() + content
            )
        except Exception:  # a full disk, say: the next process compiles it again
            pass

    def _path(self, sig, target_context):
        text = repr(
            (
                self._name,
                str(sig),
                target_context.codegen().magic_tuple(),
                toolchain(),
                platform.python_version(),
                numba.__version__,
            )
        )
        name = f"{self._name.rpartition('.')[2]}-{hashlib.sha256(text.encode()).hexdigest()[:24]}"
        return folder() / name


def folder():
    """The folder of the loops of this version of the code."""
    return pathlib.Path(cache_root()) / f"loops-{code_digest()}"


def has_loops():
    """Whether an earlier process has compiled loops."""
    return any(folder().glob("*-*"))
