"""A folder of pictures used as a dataset: decoded once, into a dataset file in the cache, which
later runs read.

    file = decoded("photos/", 64)      # ~/.cache/numdiff/data/photos-64-…h5, or in NUMDIFF_CACHE_DIR

The file's name holds two digests: of the folder's path and the image size, and of the names of all
files and folders and the files' sizes and times. So another picture in the folder means another
file, and the one before is removed.
"""

import contextlib
import functools
import hashlib
import json
import os
import pathlib
import re
import shlex
import stat
import sys
import time

from ...caches import cache_root, check_own_file, own_folder
from ...data.dataset import Dataset
from ...errors import NumdiffError, UsageError
from ...progress import tick
from ...progress_bar import tracked
from ...sizes import as_size
from .fitting import Mixed
from .importing import import_dataset, open_source
from .tree import Folder

RULE = 2  # of decoding: files of another rule are not used
STALE = 24 * 3600  # seconds after which an unfinished file is what a killed process left


def class_names(folder):
    """The names of the classes of a folder of pictures, of which none is decoded."""
    with contextlib.closing(open_source(folder)) as source:
        return source.classes or []


def decoded(folder, image_size=None, say=None):
    """The path of the dataset file with a folder's pictures, made now unless it is there.

    image_size: side in pixels, or (height, width), to which the middle of each picture is brought;
    None: the pictures are of one size. Classes come from sub-folders or a labels file, as in
    `numdiff data import`. say(sentence): called when the pictures have been decoded (default: on
    stderr). A `NumdiffError` where one cannot be read.
    """
    image_size = image_size and as_size(image_size)
    source, digest = _digests(folder, image_size)
    cache = pathlib.Path(cache_root()) / "data"
    name = re.sub(r"[^\w.-]", "_", os.path.basename(os.path.abspath(folder)))[:60] or "pictures"
    prefix = f"{name}-{image_size or 'own'}-{source}-"
    path = cache / f"{prefix}{digest}.h5"
    try:
        own_folder(cache)
    except OSError as error:
        raise NumdiffError(
            f"the pictures of a folder cannot be kept in {cache} ({error.strerror}): set "
            "NUMDIFF_CACHE_DIR to a folder of your own."
        ) from None
    if _usable(path):
        return str(path)
    _remove_irregular(path)
    decode = functools.partial(
        import_dataset,
        folder,
        path,
        size=image_size,
        force=True,
        strict=True,
        size_flag="--image-size",
        progress=lambda items, total: tracked(_ticking(items), total, "decoding", "picture"),
    )
    try:
        try:
            report = decode()
        except Mixed:  # the first picture is grey, another one is not
            report = decode(channels=3)
    except UsageError as error:
        raise UsageError(_for_training(str(error), folder)) from None
    for old in [*cache.glob(f"{prefix}*.h5"), *cache.glob(".*.tmp")]:
        _remove_old(old, path)
    say = say or _on_stderr
    say(
        f"{report.shape[0]:,} pictures of {os.fspath(folder)!r} were decoded into {path} "
        f"({path.stat().st_size / 1e6:,.1f} MB), which later runs read."
    )
    for note in report.notes:
        say(_for_training(note, folder))
    return str(path)


def _digests(folder, image_size):
    """(digest of the pictures' paths and their target size, digest of the files' state)."""
    tree = Folder(folder)
    files = [(name, state.st_size, state.st_mtime_ns) for name, state in tree.states()]
    return _digest([RULE, os.path.realpath(folder), image_size], 4), _digest(
        [RULE, files, tree.folders], 8
    )


def _digest(value, size):
    return hashlib.blake2b(json.dumps(value).encode(), digest_size=size).hexdigest()


def _usable(path):
    try:
        check_own_file(path)
        Dataset(path, in_memory=False).close()
    except (OSError, NumdiffError):
        return False  # damaged: it is written again
    return True


def _remove_irregular(path):
    """Remove a link or a FIFO from the place of a dataset in the cache, which is this user's own;
    refuse a folder."""
    try:
        if not stat.S_ISREG(os.lstat(path).st_mode):
            os.unlink(path)
    except FileNotFoundError:
        pass
    except OSError:
        raise NumdiffError(
            f"{path}, where the pictures of a folder are kept, is a folder: remove it."
        ) from None


def _for_training(sentence, folder):
    """A sentence of an import, whose options training does not have."""
    if not any(option in sentence for option in ("--labels", "--class-order")):
        return sentence
    return (
        f"{sentence.rstrip('.')} (options of `numdiff data import {shlex.quote(os.fspath(folder))} OUT.h5`, whose "
        "file --data takes, too)."
    )


def _ticking(items):
    for item in items:
        tick()
        yield item


def _remove_old(old, path):
    """Remove the file of an earlier state of the folder; a process that is reading it keeps it
    until it ends."""
    try:
        if old != path and (old.suffix == ".h5" or time.time() - old.stat().st_mtime > STALE):
            old.unlink()
    except OSError:
        pass  # another process was quicker, or Windows holds an open file


def _on_stderr(sentence):
    print(sentence, file=sys.stderr)
