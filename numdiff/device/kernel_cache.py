"""Compiled kernels on disk: one file a kernel, with its machine code and all that a launch needs to
know.

A file's name is a hash of the inputs of its content: the kernel's module and name, the types of its
arguments, the architecture, and the versions of the compilers. The folder's name is a hash of the
code of numdiff's kernels. So a file under that name is the right one, and entries for another card
or another Numba are never read. Two processes that compile the same kernel at the same time write
the same file: no lock is needed. A file appears under its name only when complete (it is written
under a temporary name, then renamed), and its content has a checksum: a damaged file counts as
missing.

Where the folder cannot be written, or is not this user's alone, kernels go to a temporary one,
which lasts as long as the process that made it.
"""

import atexit
import contextlib
import functools
import hashlib
import importlib.metadata
import json
import os
import pathlib
import shutil
import sys
import tempfile
import time
from typing import NamedTuple

from ..caches import cache_root, check_own, own_folder, read_own, write_own
from ..extensions import kernel_files, kernel_packages

MAGIC = b"numdiff kernel 1\n"
STALE = 3600  # seconds after which an unfinished file is removed
COMPILERS = (
    "numba",
    "numba-cuda",
    "llvmlite",
    "nvidia-nvvm",
    "nvidia-nvjitlink",
    "nvidia-cuda-nvcc-cu12",
    "nvidia-nvjitlink-cu12",
)  # the packages whose versions decide the machine code


class Key(NamedTuple):
    """A kernel for arguments of certain types, which are words such as "float32[2]" (an array with
    two axes) and "int32"."""

    module: str
    name: str
    types: tuple


class MachineCode(NamedTuple):
    """A compiled kernel. entry: its name in the cubin; seconds: how long it took to compile."""

    entry: str
    cubin: bytes
    seconds: float = 0.0


def cache_directory():
    """The folder of compiled kernels: a folder whose name changes with any line of the kernels' own
    code."""
    return os.path.join(cache_root(), f"kernels-{code_digest()}")


def is_hashed(module):
    """Whether the source of a module is in the folder's name, so that its compiled code can be
    kept."""
    return module.startswith(("numdiff.device.", *kernel_packages()))


@functools.cache
def code_digest():
    """A hash of all files: a kernel may call functions of many of them."""
    package = pathlib.Path(__file__).resolve().parent.parent
    digest = hashlib.sha256()
    for folder in ("device", "kernels"):
        for path in sorted((package / folder).rglob("*.py")):
            digest.update(path.read_bytes())
    for path in kernel_files():
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


@functools.cache
def toolchain():
    """The compilers' versions as text: another version may make other machine code."""
    found = []
    for name in COMPILERS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found.append(f"{name} {importlib.metadata.version(name)}")
    # a toolkit not installed as packages
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    return ", ".join([*found, os.path.realpath(home)] if home else found)


def architecture(capability):
    """The architecture that kernels are compiled for on a card: (9, 0) -> "sm_90a"."""
    major, minor = capability[:2]
    return f"sm_{major}{minor}{'a' if (major, minor) >= (9, 0) else ''}"


class KernelCache:
    """The compiled kernels for cards of one compute capability.

    capability: (major, minor); a capability below 8.0 that the card acts as follows it, (9, 0, 7,
        5): turing.py
    folder: where they are kept (default: `cache_directory()`); more: other folders to look into
    """

    def __init__(self, capability, folder=None):
        self.capability = tuple(capability)
        self.folder = pathlib.Path(folder or cache_directory())
        self.more = []

    def file_name(self, key):
        target = architecture(self.capability), *self.capability[2:]
        text = json.dumps([*key, *target, toolchain()])
        return f"{key.name}-{hashlib.sha256(text.encode()).hexdigest()[:24]}"

    def has(self, key):
        """Whether a kernel is there and intact: 84 files are checked in 20 ms."""
        return self.read(key) is not None

    def read(self, key):
        """The `MachineCode` of a kernel; None if it is not there, or damaged."""
        name = self.file_name(key)
        for folder in (self.folder, *self.more):
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                check_own(folder)
                return unpack(read_own(folder / name))
        return None

    def write(self, key, code):
        """Keep a compiled kernel. Raises OSError where it cannot be written: see `writable`."""
        write_own(
            own_folder(self.more[-1] if self.more else self.folder) / self.file_name(key),
            pack(code),
        )

    def writable(self, complain=None):
        """The folder that new kernels go to. Where the cache's own cannot be used it is a temporary
        one.

        complain(sentence): called to say so, once a process (default: on stderr)
        """
        if self.more:
            return self.more[-1]
        try:
            own_folder(self.folder)
            with tempfile.TemporaryFile(dir=self.folder) as file:
                file.write(bytes(4096))  # a full disk takes a name but no bytes
        except OSError as error:
            self.more.append(temporary_folder(str(self.folder), error.strerror, complain))
            return self.more[-1]
        remove_stale(self.folder)
        return self.folder


@functools.cache
def temporary_folder(folder, reason, complain):
    """A folder that is removed with this process, in place of one that cannot be used; says so."""
    (complain or functools.partial(print, file=sys.stderr))(
        f"the kernel cache {folder} cannot be used ({reason}): kernels are compiled again in every run; set "
        "NUMDIFF_CACHE_DIR to a folder of your own."
    )
    path = tempfile.mkdtemp(prefix="numdiff-kernels-")
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return pathlib.Path(path)


def remove_stale(folder):
    """Remove what processes that were killed while writing left behind."""
    with contextlib.suppress(OSError):
        for path in folder.glob(".*.[0-9]*"):
            if time.time() - path.stat().st_mtime > STALE:
                path.unlink(missing_ok=True)


def remove_unfinished(folder, process):
    """Remove what the process with this number was writing when it was killed."""
    with contextlib.suppress(OSError):
        for path in folder.glob(f".*.{process}"):
            path.unlink(missing_ok=True)


def pack(code):
    """A kernel's file: a line that says what it is, a checksum of the rest, a line of JSON, the
    cubin."""
    head = json.dumps(
        {"entry": code.entry, "seconds": round(code.seconds, 3), "bytes": len(code.cubin)}
    )
    rest = head.encode() + b"\n" + code.cubin
    return MAGIC + hashlib.sha256(rest).digest() + rest


def unpack(data):
    """The `MachineCode` in a kernel's file; ValueError or KeyError if it is none, or damaged."""
    at = len(MAGIC) + hashlib.sha256().digest_size
    rest = data[at:]
    if data[: len(MAGIC)] != MAGIC or hashlib.sha256(rest).digest() != data[len(MAGIC) : at]:
        raise ValueError("damaged")
    head, cubin = rest.split(b"\n", 1)
    head = json.loads(head)
    return MachineCode(head["entry"], cubin, head["seconds"])
