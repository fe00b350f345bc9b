"""Writes a dataset file image by image, under a temporary name until it is complete."""

import contextlib
import os
from array import array

import h5py
import numpy as np

from ..errors import NumdiffError, UsageError
from ..files import atomic_file, check_target
from ..outputs import check_ending
from ..signals import deferred_signals
from .dataset import CHUNK

MAX_CHUNK_BYTES = 64 << 20  # of images above about 590×590 there are fewer in a chunk
GZIP = 4  # emoji shrink to a quarter, photos hardly; unpacking is equally fast at every level


class Unfinished(Exception):
    """Raised to leave the context of a file that is not to be kept."""


class Writer:
    """`with Writer(path) as w: w.append(...)…; w.finish(classes)`. Left without finish(), it leaves
    no file behind. gzip: pack the chunks, which suits drawings of few colours that are to be
    copied; floats shrink by a tenth only."""

    def __init__(self, path, force=False, gzip=False):
        self.path, self._packed = (
            os.fspath(path),
            {"compression": "gzip", "compression_opts": GZIP} if gzip else {},
        )
        folder, name = os.path.split(os.path.abspath(self.path))
        if os.path.isdir(self.path):
            raise UsageError(
                f"{self.path!r} is a folder: give the name of the file to write, such as {name}.h5."
            )
        check_ending("OUT.h5", self.path, ".h5", ".hdf5")
        if not os.path.isdir(folder):
            raise UsageError(f"there is no folder {folder!r} to write into: make it first.")
        if os.path.exists(self.path) and not force:
            raise UsageError(
                f"{self.path!r} already exists: choose another name, or add --force to replace it."
            )
        check_target("the dataset", self.path)
        self._atomic = self._disk = self._file = self._images = None
        self._waiting, self._count = [], 0
        self._labels, self._names = array("i"), []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        """Discard what is not finished."""
        if self._atomic is not None:
            self._discard(Unfinished())

    def append(self, image, label=None, name=None):
        """One more image (H, W, C), uint8 or of floats, all of one shape and type."""
        self._waiting.append(image)
        if label is not None:
            self._labels.append(label)
        if name is not None:
            self._names.append(name.encode("utf-8", "backslashreplace").decode())
        if len(self._waiting) == CHUNK:
            self._flush()

    def finish(self, classes, attributes=None):
        """Write the rest, sync it, and rename the file. attributes: {name: text} of the file."""
        self._flush()
        with self._writing():
            if classes is not None:
                smallest = np.min_scalar_type(max(len(classes) - 1, 0))
                self._file.create_dataset(
                    "labels", data=np.frombuffer(self._labels, np.intc).astype(smallest)
                )
                self._file.attrs.create("classes", classes, dtype=h5py.string_dtype())
            for name, text in (attributes or {}).items():
                self._file.attrs.create(name, [text], dtype=h5py.string_dtype())
            if self._names:
                self._file.create_dataset("names", data=self._names, dtype=h5py.string_dtype())
            self._file.close()
        self._atomic.__exit__(None, None, None)
        self._atomic = None

    def _flush(self):
        if not self._waiting:
            return
        block = np.stack(self._waiting)
        if self._file is None:
            self._atomic = atomic_file(self.path, "the dataset")
            self._disk = self._atomic.__enter__()
        with self._writing():
            if self._file is None:
                rows = max(1, min(CHUNK, MAX_CHUNK_BYTES // (block.nbytes // len(block))))
                # "v108" allows attributes beyond 64 kB, which the names of very many classes need
                self._file = h5py.File(self._disk, "w", libver=("v108", "latest"))
                self._images = self._file.create_dataset(
                    "images",
                    (0, *block.shape[1:]),
                    block.dtype,
                    maxshape=(None, *block.shape[1:]),
                    chunks=(rows, *block.shape[1:]),
                    **self._packed,
                )
            self._images.resize(self._count + len(block), axis=0)
            self._images[self._count :] = block
        self._count += len(block)
        self._waiting.clear()

    @contextlib.contextmanager
    def _writing(self):
        """Context of what HDF5 does; raises what went wrong with the file, such as a full disk, as
        `atomic_file` says it."""
        with deferred_signals():
            try:
                yield
            # it could not read what it had not written
            except (OSError, RuntimeError, ValueError) as error:
                # or what it was given is not for it, such as a name with a zero byte
                if self._disk.error is None:
                    raise NumdiffError(
                        f"{self.path!r} cannot be written ({str(error).splitlines()[0]}): "
                        "rename the class or the picture whose name HDF5 cannot hold."
                    ) from None
        if self._disk.error is not None:
            self._discard(self._disk.error)

    def _discard(self, error):
        """Remove the temporary file, because of an error, which is raised as `atomic_file` says it."""
        with deferred_signals():
            # HDF5 writes as it forgets an array
            file, self._file, self._images = self._file, None, None
            with contextlib.suppress(OSError, RuntimeError, ValueError):
                if file is not None:
                    file.close()
            self._atomic.__exit__(type(error), error, error.__traceback__)
