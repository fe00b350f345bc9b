"""Writes a dataset file image by image, under a temporary name until it is complete."""
import contextlib
import errno
import os
from array import array

import h5py
import numpy as np

from ...errors import NumdiffError, UsageError
from ...files import check_target
from ..dataset import CHUNK

MAX_CHUNK_BYTES = 64 << 20  # of images above about 590×590 there are fewer in a chunk
GZIP = 4  # emoji shrink to a quarter, photos hardly; unpacking is equally fast at every level


class PatientFile:
    """A file for HDF5 to write to that hides a failed write, and keeps it in `error`.

    HDF5 cannot cope with a full disk: it fails again when the file is closed, and then crashes the process at exit. So
        it is told that all went well, and the file that it believes it has written is deleted.
    """

    def __init__(self, path):
        with contextlib.suppress(FileNotFoundError):  # left by a killed process with the same number
            os.unlink(path)
        self._file = open(path, "x+b", buffering=0)  # HDF5 buffers its writes itself
        self.error = None
        self.read, self.readinto, self.seek, self.tell = (
            self._file.read, self._file.readinto, self._file.seek, self._file.tell)

    def write(self, data):
        data = memoryview(data).cast("B")
        done = 0
        try:
            while self.error is None and done < len(data):  # the system may write less than requested
                done += self._file.write(data[done:])
        except OSError as error:
            self.error = error
        return len(data)

    def truncate(self, size):
        try:
            return self._file.truncate(size)
        except OSError as error:
            self.error = self.error or error
            return size

    def flush(self):
        pass

    def close(self):
        """Make what was written durable, unless something failed."""
        try:
            with self._file:
                if self.error is None:
                    os.fsync(self._file.fileno())
        except OSError as error:
            self.error = self.error or error


class Writer:
    """`with Writer(path) as w: w.append(...)…; w.finish(classes)`. Left without finish(), it leaves no file behind.
    gzip: pack the chunks, which suits drawings of few colours that are to be copied; floats shrink by a tenth only."""

    def __init__(self, path, force=False, gzip=False):
        self.path, self._packed = os.fspath(path), {"compression": "gzip", "compression_opts": GZIP} if gzip else {}
        folder, name = os.path.split(os.path.abspath(self.path))
        if os.path.isdir(self.path):
            raise UsageError(f"{self.path!r} is a folder: give the name of the file to write, such as {name}.h5.")
        if not os.path.isdir(folder):
            raise UsageError(f"there is no folder {folder!r} to write into: make it first.")
        if os.path.exists(self.path) and not force:
            raise UsageError(f"{self.path!r} already exists: choose another name, or add --force to replace it.")
        check_target("the dataset", self.path)
        self._temporary = os.path.join(folder, f".{name}.{os.getpid()}.tmp")
        self._disk = self._file = self._images = None
        self._waiting, self._count = [], 0
        self._labels, self._names = array("i"), []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._discard()

    def append(self, image, label=None, name=None):
        """One more image (H, W, C), uint8 or of floats, all of one shape and type."""
        self._waiting.append(image)
        if label is not None:
            self._labels.append(label)
        if name is not None:
            self._names.append(name.encode("utf-8", "backslashreplace").decode())
        if len(self._waiting) == CHUNK:
            self._flush()

    def finish(self, classes):
        """Write the rest, sync it, and rename the file."""
        self._flush()
        try:
            if classes is not None:
                smallest = np.min_scalar_type(max(len(classes) - 1, 0))
                self._file.create_dataset("labels", data=np.frombuffer(self._labels, np.intc).astype(smallest))
                self._file.attrs.create("classes", classes, dtype=h5py.string_dtype())
            if self._names:
                self._file.create_dataset("names", data=self._names, dtype=h5py.string_dtype())
            self._close()
            os.replace(self._temporary, self.path)
        except (OSError, RuntimeError, ValueError) as error:
            raise self._failed(error) from None

    def _flush(self):
        if not self._waiting:
            return
        block = np.stack(self._waiting)
        try:
            if self._file is None:
                rows = max(1, min(CHUNK, MAX_CHUNK_BYTES // (block.nbytes // len(block))))
                # "v108" allows attributes beyond 64 kB, which the names of very many classes need
                self._disk = PatientFile(self._temporary)
                self._file = h5py.File(self._disk, "w", libver=("v108", "latest"))
                self._images = self._file.create_dataset(
                    "images", (0, *block.shape[1:]), block.dtype, maxshape=(None, *block.shape[1:]),
                    chunks=(rows, *block.shape[1:]), **self._packed)
            self._images.resize(self._count + len(block), axis=0)
            self._images[self._count:] = block
            if self._disk.error:
                raise self._disk.error
        except (OSError, RuntimeError, ValueError) as error:
            raise self._failed(error) from None
        self._count += len(block)
        self._waiting.clear()

    def _close(self):
        """Close the file, if one is open, and raise what went wrong with it at any time."""
        file, disk = self._file, self._disk
        self._file = self._disk = self._images = None
        if file is not None:
            file.close()
        if disk is not None:
            disk.close()
            if disk.error:
                raise disk.error

    def _failed(self, error):
        why = getattr(error, "strerror", None) or str(error).splitlines()[0]
        if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT):
            why = "the disk is full"
        return NumdiffError(f"{self.path!r} cannot be written ({why}): free some space or choose another place.")

    def _discard(self):
        """Remove the temporary file, if it is still there."""
        try:
            self._close()
        except (OSError, RuntimeError):
            pass  # the error has been reported
        if os.path.exists(self._temporary):
            os.unlink(self._temporary)
