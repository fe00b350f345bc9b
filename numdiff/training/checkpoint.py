"""Checkpoints: everything that a run needs to continue with the same bits, in one HDF5 file.

WHAT IS IN A FILE
    attributes       `format` = "numdiff-checkpoint" and `version` = 1
    /meta            JSON text: what the caller gave
    /buffers/<name>  one dataset a buffer (parameters, ema, adam_m, adam_v, …), its attribute `crc32` the checksum of
                     its content; uncompressed, as float weights hardly shrink
    after the HDF5   a last line with the checksum of all bytes before it. HDF5 itself does not mind it; it is checked
    first, because HDF5 can loop for ever over a file that is damaged in the wrong place

WHAT IS PROMISED
    A file under its final name is whole: it was written under another name, synced and renamed
    (`files.py`). So neither a kill nor a full disk damages an older checkpoint, and a reader never
    meets a half-written one.
    Later damage by a disk is detected, since a checksum covers every byte, and a damaged file is
    passed over for the newest valid one.

A model file made by `numdiff convert` has the same format, with the buffers "parameters" (and
"ema") only.
"""

import json
import logging
import os
import pathlib
import re
import zlib

import h5py
import numpy as np

from .. import extensions, schema
from ..errors import NumdiffError, printable
from ..files import (
    Refused,
    atomic_file,
    check_held,
    open_regular,
    remove,
    remove_stray_files,
    set_aside,
)
from ..hdf5 import MAGIC, open_hdf5
from ..progress import tick
from ..signals import deferred_signals

FORMAT = "numdiff-checkpoint"
VERSION = 1
NAME = re.compile(r"^checkpoint-(\d+)\.h5$")
HDF5_VERSION = ("v110", "v110")  # the file format of HDF5 1.10, which every current h5py reads
MAX_BUFFERS = 256
LAST_LINE = b"\nnumdiff crc32 %08x\n"
LAST_LINE_BYTES = len(LAST_LINE % 0)
CHUNK = 4 << 20  # bytes read at a time for the checksum
# bytes of a buffer that are synced at a time, which shows the other ranks that saving continues
SYNCED = 256 << 20

INDEX = schema.items(
    schema.record(
        {
            "name": schema.text(),
            "shape": schema.items(schema.integer(1, 1 << 31), 8),
            "offset": schema.integer(0),
        }
    ),
    1 << 20,
)
CLASSES = schema.items(schema.text(1 << 16), 1 << 20)
FINGERPRINT = schema.record(
    {  # data/fingerprint.py
        "rule": schema.integer(0),
        "shape": schema.items(schema.integer(0), 4, 4),
        "dtype": schema.text(),
        "classes": CLASSES,
        "labels": schema.optional(schema.text()),
        "rows": schema.text(),
    },
    {},
    schema.anything,
)
META = schema.record(
    {},
    {  # of the known keys; there may be others
        **extensions.available("checkpoint_meta"),
        "model": schema.text(),
        "model_options": schema.options,
        "diffusion": schema.optional(schema.options),
        "objective": schema.optional(schema.options),
        "index": INDEX,
        "step": schema.integer(0),
        "classes": schema.optional(CLASSES),
        "source": schema.text(1 << 12),
        "averaged": schema.record(
            {"std": schema.number(), "error": schema.number(), "stored": schema.integer(0)}
        ),
        "split": schema.record(
            {"ranks": schema.integer(1), "microbatch": schema.integer(1)}, {}, schema.anything
        ),
        "schedule": schema.record(
            {
                "learning_rate": schema.number(0, 1e308),
                "warmup_steps": schema.integer(0),
                "steps": schema.integer(1),
                "lr_schedule": schema.text(),
            },
            {},
            schema.anything,
        ),
        "seed": schema.optional(schema.integer(0)),
        "data": schema.optional(FINGERPRINT),
        "init": schema.optional(
            schema.record({"lines": schema.items(schema.text(1 << 16), 64)}, {}, schema.anything)
        ),
    },
    schema.anything,
)

# path -> the stat of the file when it was found valid, so that no prune reads a file again
_verified = {}


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
    found = (
        [p for p in run_dir.iterdir() if checkpoint_step(p) is not None and p.is_file()]
        if run_dir.is_dir()
        else []
    )
    return sorted(found, key=checkpoint_step, reverse=True)


# Writing ------------------------------------------------------------------------------------------


def save_checkpoint(path, buffers, meta):
    """Write a checkpoint atomically: when it returns the file is whole and on the disk; after an
    error it is as before.

    buffers: name -> NumPy array; meta: anything that JSON can say, NumPy scalars included.
    """
    text = json.dumps(meta, default=_plain).encode()
    with atomic_file(path, "the checkpoint") as raw:
        with deferred_signals(), h5py.File(raw, "w", libver=HDF5_VERSION) as file:
            file.attrs["format"] = np.bytes_(FORMAT)
            file.attrs["version"] = VERSION
            file["meta"] = np.bytes_(text)
            group = file.create_group("buffers")
            for name, array in buffers.items():
                array = np.asarray(array, order="C")
                group.create_dataset(name, data=array).attrs["crc32"] = _checksum(array)
                raw.check()  # a full disk: no need to write the rest
                if array.nbytes >= SYNCED:
                    os.fsync(raw.fileno())
                tick()
        raw.check()
        size = raw.seek(0, os.SEEK_END)
        raw.write(LAST_LINE % _file_checksum(raw, size))


def prune_checkpoints(run_dir, keep):
    """Remove all but the newest `keep` valid checkpoints, and what killed processes left; returns
    the removed paths.

    Damaged files do not count as kept, so the only valid checkpoint of a run is never removed.
    """
    check_held(run_dir)
    remove_stray_files(run_dir)
    valid, removed = 0, []
    for path in list_checkpoints(run_dir):
        if valid >= max(keep, 1):
            remove(path)
            removed.append(path)
        elif why_damaged(path) is None:
            valid += 1
    return removed


def set_aside_later(run_dir, step):
    """Rename the checkpoints after `step` to ….h5.old, or ….h5.old.2 and on; returns their new
    paths.

    A run that continues from an older checkpoint leaves the later ones behind: they must neither be
    resumed from, nor count as the newest when `prune_checkpoints` chooses what to remove.
    """
    return [set_aside(path) for path in list_checkpoints(run_dir) if checkpoint_step(path) > step]


def _checksum(array):
    return zlib.crc32(array.reshape(-1).view(np.uint8)) if array.size else 0


def _file_checksum(file, size):
    """The checksum of the first `size` bytes of an open file, which is left positioned behind them."""
    checksum = 0
    file.seek(0)
    while size:
        data = file.read(min(size, CHUNK))
        if not data:  # it was truncated meanwhile: the checksum will not match
            break
        checksum, size = zlib.crc32(data, checksum), size - len(data)
        tick()
    return checksum


def _plain(value):
    """NumPy's scalars and arrays as JSON knows them."""
    if isinstance(value, (np.generic, np.ndarray)):
        return value.tolist()
    raise TypeError(f"a checkpoint's meta cannot hold a {type(value).__name__}")


# Reading ------------------------------------------------------------------------------------------


def load_checkpoint(path):
    """(buffers, meta) of a checkpoint or model file; a `NumdiffError` in one sentence where it
    cannot be used."""
    return _read(path, lambda file: (_read_buffers(file), _read_meta(file)))


def load_meta(path):
    """The meta of a checkpoint or model file alone."""
    return _read(path, _read_meta)


def newest_checkpoint(run_dir, warn=None):
    """Path of the newest valid checkpoint of a run folder, or None.

    Every newer damaged one is reported to `warn(text)`; by default it is logged, which prints it on
    stderr.
    """
    warn = warn or logging.getLogger("numdiff").warning
    for path in list_checkpoints(run_dir):
        reason = why_damaged(path)
        if reason is None:
            return path
        warn(printable(f"passed over: {reason}"))
    return None


def why_damaged(path):
    """None for a valid checkpoint, else the sentence that says what is wrong. A file found valid is
    not read again."""
    path = pathlib.Path(path).absolute()
    try:
        stat = path.stat()
        state = (stat.st_ino, stat.st_size, stat.st_mtime_ns)
        if _verified.get(path) != state:
            load_meta(path)
            _verified[path] = state
    except FileNotFoundError:
        return why_missing(path)
    except OSError as error:
        return f"cannot read the checkpoint {path}: {error.strerror}."
    except NumdiffError as error:
        return str(error)
    return None


def why_missing(path):
    """The sentence on a checkpoint that is not there: a run that continues removes its older ones."""
    path = pathlib.Path(path)
    newest = next(iter(list_checkpoints(path.parent)), None)
    if (
        checkpoint_step(path) is None
        or newest is None
        or checkpoint_step(newest) <= checkpoint_step(path)
    ):
        return f"the checkpoint {path} does not exist; check the path."
    return (
        f"the checkpoint {path} does not exist, as a run keeps only its newest (--keep): use {newest}, or the run "
        "folder, which stands for its newest."
    )


def buffer_names(path):
    """Names of the buffers in a checkpoint or model file."""
    return _read(path, lambda file: file.names("buffers"))


def _read(path, take):
    """`take(file)` of the HDF5 file, once it is known to be a numdiff checkpoint and whole."""
    path = pathlib.Path(path)
    try:
        if path.is_dir():
            raise NumdiffError(f"{path} is a folder; give a checkpoint file.")
        raw = open_regular(path)
    except FileNotFoundError:
        raise NumdiffError(why_missing(path)) from None
    except OSError as error:
        raise NumdiffError(f"cannot read the checkpoint {path}: {error.strerror}.") from error
    try:
        with raw:
            _check_file(path, raw)
            with open_hdf5(path, raw) as file:
                version = file.integer("version")
                if version > VERSION:
                    raise NumdiffError(
                        f"{path} has checkpoint version {version} and this numdiff reads up to "
                        f"{VERSION}; install a newer numdiff."
                    )
                return take(file)
    except Refused as error:
        raise _damaged(path, error) from error
    except OSError as error:
        raise NumdiffError(
            f"cannot read the checkpoint {path}: {error.strerror or error}."
        ) from error


def _read_meta(file):
    text = file.array("meta")
    if (
        text is None
        or text.shape != ()
        or text.dtype.kind != "S"
        or text.nbytes > schema.JSON_BYTES
    ):
        raise Refused("it holds no meta")
    return schema.check(schema.parse_json(text.all().tobytes().rstrip(b"\0")), META, "meta")


def _read_buffers(file):
    names = file.names("buffers")
    if len(names) > MAX_BUFFERS:
        raise Refused(f"it holds {len(names)} buffers")
    arrays = {name: file.array(name, "buffers") for name in names}
    if sum(array.nbytes for array in arrays.values()) > file.size:
        raise Refused("its buffers overlap, or are packed")
    return {name: _read_buffer(file, array) for name, array in arrays.items()}


def _read_buffer(file, stored):
    array = stored.all()
    if _checksum(array) != file.integer("crc32", stored):
        raise Refused(f"the checksum of {stored.name} is wrong")
    return array


def _check_file(path, file):
    """Check an open file against the checksum in its last line, without HDF5."""
    size = file.seek(0, os.SEEK_END) - LAST_LINE_BYTES
    file.seek(0)
    head = file.read(len(MAGIC))
    if not MAGIC.startswith(head):
        raise NumdiffError(
            f"{path} is not a numdiff checkpoint; give a file that `numdiff train` or `numdiff convert` "
            "wrote."
        )
    if size < 0:
        raise _damaged(path, f"it ends after {size + LAST_LINE_BYTES} bytes")
    checksum = _file_checksum(file, size)
    if file.read() != LAST_LINE % checksum:
        raise _damaged_or_foreign(path, file, size)


def _damaged(path, reason):
    return NumdiffError(
        f"{path} is truncated or damaged ({reason}); use another checkpoint of the run."
    )


def _damaged_or_foreign(path, file, size):
    """The error for a file whose last line does not match: truncated, damaged, or another program's
    HDF5 file."""
    file.seek(0)
    head = file.read(512)  # a checkpoint has its attribute `format` in it
    if len(head) == 512 and FORMAT.encode() not in head:
        return NumdiffError(
            f"{path} is an HDF5 file but not a numdiff checkpoint; give a file that `numdiff train` or "
            "`numdiff convert` wrote."
        )
    file.seek(size)
    cut_off = not file.read().startswith(LAST_LINE[:15])
    return _damaged(path, "its end is missing" if cut_off else "its checksum is wrong")
