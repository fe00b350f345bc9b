"""Writes a dataset file image by image, under a temporary name until it is whole."""
import os
from array import array

import h5py
import numpy as np

from ...errors import NumdiffError, UsageError
from ..dataset import CHUNK

GZIP = 4  # emoji shrink to a quarter, photos hardly; unpacking is as fast at every level


class Writer:
    """`with Writer(path) as w: w.append(...)…; w.finish(classes)`. Left without finish(), it leaves no file behind."""

    def __init__(self, path, force=False):
        self.path = os.fspath(path)
        folder, name = os.path.split(os.path.abspath(self.path))
        if os.path.isdir(self.path):
            raise UsageError(f"{self.path!r} is a folder: give the name of the file to write, such as {name}.h5.")
        if not os.path.isdir(folder):
            raise UsageError(f"there is no folder {folder!r} to write into: make it first.")
        if os.path.exists(self.path) and not force:
            raise UsageError(f"{self.path!r} exists already: choose another name, or add --force to replace it.")
        self._temporary = os.path.join(folder, f".{name}.{os.getpid()}.tmp")
        self._file = self._images = None
        self._waiting, self._count = [], 0
        self._labels, self._names = array("q"), []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._discard()

    def append(self, image, label=None, name=None):
        """One more image, uint8 (H, W, C), all of one shape."""
        self._waiting.append(image)
        if label is not None:
            self._labels.append(label)
        if name is not None:
            self._names.append(name.encode("utf-8", "backslashreplace").decode())
        if len(self._waiting) == CHUNK:
            self._flush()

    def finish(self, classes):
        """Write what is left, make it durable, give it its name."""
        self._flush()
        try:
            if classes is not None:
                smallest = np.min_scalar_type(max(len(classes) - 1, 0))
                self._file.create_dataset("labels", data=np.frombuffer(self._labels, np.int64).astype(smallest))
                self._file.attrs.create("classes", classes, dtype=h5py.string_dtype())
            if self._names:
                self._file.create_dataset("names", data=self._names, dtype=h5py.string_dtype())
            self._file.close()
            self._file = None
            with open(self._temporary, "rb+") as file:
                os.fsync(file.fileno())
            os.replace(self._temporary, self.path)
        except (OSError, RuntimeError, ValueError) as error:
            raise self._failed(error) from None

    def _flush(self):
        if not self._waiting:
            return
        block = np.stack(self._waiting)
        try:
            if self._file is None:
                # "v108" allows attributes beyond 64 kB, which the names of very many classes need
                self._file = h5py.File(self._temporary, "w", libver=("v108", "latest"))
                self._images = self._file.create_dataset(
                    "images", (0, *block.shape[1:]), np.uint8, maxshape=(None, *block.shape[1:]),
                    chunks=(CHUNK, *block.shape[1:]), compression="gzip", compression_opts=GZIP)
            self._images.resize(self._count + len(block), axis=0)
            self._images[self._count:] = block
        except (OSError, RuntimeError, ValueError) as error:
            raise self._failed(error) from None
        self._count += len(block)
        self._waiting.clear()

    def _failed(self, error):
        why = getattr(error, "strerror", None) or str(error).splitlines()[0]
        if "No space left" in str(error) or "No space left" in why:
            why = "the disk is full"
        return NumdiffError(f"{self.path!r} cannot be written ({why}): free some space or choose another place.")

    def _discard(self):
        """Remove the temporary file, if it is still there."""
        if self._file is not None:
            try:
                self._file.close()
            except (OSError, RuntimeError):
                pass  # after a full disk, closing fails too
            self._file = None
        if os.path.exists(self._temporary):
            os.unlink(self._temporary)
