"""Compilers' logs and kernels' result bits, kept for all workers and for the next run under a
digest of their inputs.

The inputs are the kernel's source, with that of all functions it calls and files it imports, and
its constants; the compilers' versions; the question. It is stored in pytest's cache (`pytest
--cache-clear` empties it), which drops entries that have not been used for a fortnight.
"""

import contextlib
import functools
import json
import os
import pathlib
import sys
import time
import zlib

import numdiff
from numdiff.device.kernel_cache import toolchain
from tests.kernels.ptx_equal import SourceTree, hash_of, made_of

__all__ = ["begin", "ptx", "recall", "remember", "said", "whole_package"]

FORTNIGHT = 14 * 24 * 3600
folder = None  # a pathlib.Path, or None: nothing is kept


def begin(config):
    """Keep what comes in this run's cache of pytest's, if it has one."""
    global folder
    cache = getattr(config, "cache", None)
    folder = cache and cache.mkdir("compiled")
    if folder and not hasattr(config, "workerinput"):
        for path in folder.iterdir():
            with contextlib.suppress(OSError):
                if path.stat().st_mtime < time.time() - FORTNIGHT:
                    path.unlink()


@functools.cache
def sources():
    return SourceTree(pathlib.Path(numdiff.__file__).resolve().parent)


def ptx(kernel, signature, capabilities, make):
    """make(), PTX texts of a kernel; or what it gave for the same source. Kernels of a test are not
    kept."""
    function = kernel.py_func
    if function.__module__ not in sources().paths:
        return make()
    return said(
        make,
        *made_of(function, sources(), set()),
        sources().digest("numdiff.device.ptx"),
        function.__name__,
        repr((signature, capabilities)),
    )


def said(make, *texts):
    """make(), which is JSON; or what it gave for the same texts."""
    answer = recall(*texts)
    if answer is None:
        answer = make()
        remember(answer, *texts)
    return answer


def recall(*texts):
    """What was kept for these texts; None if there is nothing."""
    if folder is None:
        return None
    path = folder / hash_of(*texts, toolchain(), sys.version)
    with contextlib.suppress(OSError, ValueError, zlib.error):
        answer = json.loads(zlib.decompress(path.read_bytes()))
        os.utime(path)
        return answer
    return None


def remember(answer, *texts):
    """Keep an answer, which is JSON, for these texts."""
    if folder is not None:
        path = folder / hash_of(*texts, toolchain(), sys.version)
        unfinished = path.with_suffix(f".{os.getpid()}")
        unfinished.write_bytes(zlib.compress(json.dumps(answer).encode(), 1))
        unfinished.replace(path)


@functools.cache
def whole_package():
    """A text that changes with any file of numdiff."""
    return hash_of(*sources().texts.values())
