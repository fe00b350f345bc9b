"""Checkpoints: everything that a run needs to continue with the same bits, in one HDF5 file.

WHAT IS IN A FILE
    /document        JSON text: {"meta": what the caller gave, "buffers": {name: {"dtype", "shape", "crc32"}}};
                     its attribute `crc32` is the checksum of the text
    /buffers/<name>  one dataset a buffer (parameters, ema, adam_m, adam_v, …), uncompressed: float weights hardly shrink
    the file's attributes `format` = "numdiff-checkpoint" and `version` = 1

WHAT IS PROMISED
    A file under its final name is whole: it was written under another name, synced and renamed (`files.py`). So neither
    a kill nor a full disk damages an older checkpoint, and a reader never meets a half-written one.
    What a disk damages later is seen: every byte that matters is under a checksum, and a damaged file is passed over for
    the newest valid one.

A model file made by `numdiff convert` has the same format, with the buffers "parameters" (and "ema") only.
"""
import json
import logging
import pathlib
import re
import zlib

import h5py
import numpy as np

from ..errors import NumdiffError
from .files import atomic_file, remove_stray_files

FORMAT = "numdiff-checkpoint"
VERSION = 1
NAME = re.compile(r"^checkpoint-(\d+)\.h5$")
HDF5_VERSION = ("v110", "v110")  # the first whose own metadata is under checksums; HDF5 1.10 and later read it
HDF5_MAGIC = b"\x89HDF\r\n\x1a\n"
SMALLEST = 48  # bytes of an HDF5 superblock: a shorter file cannot be one

_verified = {}  # path -> the stat of the file when its content was found right, so that no file is read at every prune


def checkpoint_name(step):
    """The file name of the checkpoint after `step` steps."""
    return f"checkpoint-{step:08d}.h5"


def checkpoint_step(path):
    """The step in a checkpoint's file name; None for any other file."""
    match = NAME.match(pathlib.Path(path).name)
    return int(match.group(1)) if match else None


def list_checkpoints(run_dir):
    """Paths of the checkpoints in a run folder, newest first; damaged ones too."""
    run_dir = pathlib.Path(run_dir)
    found = [p for p in run_dir.iterdir() if checkpoint_step(p) is not None] if run_dir.is_dir() else []
    return sorted(found, key=checkpoint_step, reverse=True)


# Writing ---------------------------------------------------------------------------------------------------------------

def save_checkpoint(path, buffers, meta):
    """Write a checkpoint atomically: after this returns the file is whole and on the disk, after an error it is as before.

    buffers: name -> NumPy array; meta: anything that JSON can say, NumPy scalars included.
    """
    buffers = {name: np.asarray(array, order="C") for name, array in buffers.items()}
    document = json.dumps({"meta": meta, "buffers": {name: _describe(array) for name, array in buffers.items()}},
                          default=_plain).encode()
    with atomic_file(path, "the checkpoint") as raw, h5py.File(raw, "w", libver=HDF5_VERSION) as file:
        file.attrs["format"] = FORMAT
        file.attrs["version"] = VERSION
        file.create_dataset("document", data=np.bytes_(document)).attrs["crc32"] = zlib.crc32(document)
        group = file.create_group("buffers")
        for name, array in buffers.items():
            raw.check()  # a full disk: no need to go through the rest
            group.create_dataset(name, data=array)


def prune_checkpoints(run_dir, keep):
    """Remove all but the newest `keep` valid checkpoints, and what killed processes left; returns the removed paths.

    Damaged files do not count as kept, so the only valid checkpoint of a run is never removed.
    """
    remove_stray_files(run_dir)
    valid, removed = 0, []
    for path in list_checkpoints(run_dir):
        if valid >= max(keep, 1):
            path.unlink(missing_ok=True)
            removed.append(path)
        elif why_damaged(path) is None:
            valid += 1
    return removed


def _describe(array):
    if array.dtype.hasobject:
        raise TypeError("a checkpoint holds numbers only, not Python objects")
    return {"dtype": array.dtype.str, "shape": list(array.shape), "crc32": _checksum(array)}


def _checksum(array):
    return zlib.crc32(array.reshape(-1).view(np.uint8)) if array.size else 0


def _plain(value):
    """NumPy's scalars and arrays as JSON knows them."""
    if isinstance(value, (np.generic, np.ndarray)):
        return value.tolist()
    raise TypeError(f"a checkpoint's meta cannot hold a {type(value).__name__}")


# Reading ---------------------------------------------------------------------------------------------------------------

def load_checkpoint(path):
    """(buffers, meta) of a checkpoint or model file; a `NumdiffError` in one sentence where it cannot be used."""
    buffers = {}
    meta = _read(path, buffers.__setitem__)
    return buffers, meta


def load_meta(path):
    """The meta of a checkpoint or model file alone; the buffers are not read."""
    return _read(path, None)


def newest_checkpoint(run_dir, warn=None):
    """Path of the newest valid checkpoint of a run folder, or None.

    Every damaged one that is newer is told to `warn(text)`; by default it is logged, which prints it on stderr.
    """
    warn = warn or logging.getLogger("numdiff").warning
    for path in list_checkpoints(run_dir):
        reason = why_damaged(path)
        if reason is None:
            return path
        warn(f"{reason} It is passed over.")
    return None


def why_damaged(path):
    """None for a valid checkpoint, else the sentence that says what is wrong. Content found right is not read again."""
    path = pathlib.Path(path).absolute()
    try:
        stat = path.stat()
        state = (stat.st_ino, stat.st_size, stat.st_mtime_ns)
        if _verified.get(path) != state:
            _read(path, lambda name, array: None)
            _verified[path] = state
    except FileNotFoundError:
        return f"{path} does not exist."
    except NumdiffError as error:
        return str(error)
    return None


def _read(path, take):
    """Check a checkpoint and return its meta; every buffer is read, checked and given to `take(name, array)`."""
    path = pathlib.Path(path)
    _refuse_other_files(path)
    try:
        with h5py.File(path, "r", locking=False) as file:
            if file.attrs.get("format") != FORMAT:
                raise NumdiffError(f"{path} is an HDF5 file but not a numdiff checkpoint; give a file that "
                                   "`numdiff train` or `numdiff convert` wrote.")
            version = int(file.attrs["version"])
            if version > VERSION:
                raise NumdiffError(f"{path} has checkpoint version {version} and this numdiff reads up to {VERSION}; "
                                   "install a newer numdiff.")
            dataset = file["document"]
            text = bytes(dataset[()])
            if zlib.crc32(text) != int(dataset.attrs["crc32"]):
                raise ValueError("the checksum of its description is wrong")
            document = json.loads(text)
            for name, expected in document["buffers"].items():
                dataset = file["buffers"][name]
                if list(dataset.shape) != expected["shape"] or dataset.dtype.str != expected["dtype"]:
                    raise ValueError(f"{name} is not what its description says")
                if take is not None:
                    array = dataset[()]
                    if _checksum(array) != expected["crc32"]:
                        raise ValueError(f"the checksum of {name} is wrong")
                    take(name, array)
            return document["meta"]
    except NumdiffError:
        raise
    except Exception as error:  # whatever damaged metadata makes of h5py: OSError, KeyError, ValueError, MemoryError …
        reason = " ".join(str(error).split())
        raise NumdiffError(f"{path} is truncated or damaged ({reason}); use another checkpoint of the run.") from error


def _refuse_other_files(path):
    """The faults that have a plainer name than what HDF5 would say."""
    try:
        if path.is_dir():
            raise NumdiffError(f"{path} is a folder; give a checkpoint file.")
        with open(path, "rb") as file:
            head = file.read(SMALLEST)
    except FileNotFoundError:
        raise NumdiffError(f"the checkpoint {path} does not exist; check the path.") from None
    except OSError as error:
        raise NumdiffError(f"cannot read the checkpoint {path}: {error.strerror}.") from error
    if len(head) < SMALLEST and HDF5_MAGIC.startswith(head[:8]):
        raise NumdiffError(f"{path} is truncated or damaged (it has {len(head)} bytes); use another checkpoint of the run.")
    if not head.startswith(HDF5_MAGIC):
        raise NumdiffError(f"{path} is not a numdiff checkpoint (no HDF5 file at all); give a file that `numdiff train` "
                           "or `numdiff convert` wrote.")
