"""CIFAR-10 as its authors give it: cifar-10-python.tar.gz, five pickles of training images.

A pickle is a program: reading one with Python's own reader can run any command. These are read by
convert/unpickle.py. It knows the few names that an array, a list and a dictionary need, has a
harmless stand-in for each, and refuses every other name. No function of the pickle's choice is ever
called.
"""

import io
import os

import numpy as np

from ...errors import NumdiffError
from ..convert import unpickle
from ..convert.unpickle import RefusedError
from .archives import TooMuch
from .arrays import items_of
from .source import (
    Source,
    damage_named,
    damaged,
    no_labels_file,
    open_stream,
    read_exactly,
)
from .tar_archive import tar_files

BATCHES = tuple(f"data_batch_{i}" for i in range(1, 6))
META = "batches.meta"
SIDE = 32
ARRAY_MODULES = ("numpy.core.multiarray", "numpy._core.multiarray")  # before and since NumPy 2
NUMERIC_MODULES = ("numpy.core.numeric", "numpy._core.numeric")
DTYPES = ("u1", "i8", "i4")


class PickledDtype(unpickle.Built):
    """Stands for numpy.dtype: only its name is noted, not its byte order and alignment, of no
    meaning for bytes."""

    def __init__(self, name, *_):
        self.name = unpickle.expect(name, str)

    def build(self, *_):
        pass


class PickledArray(unpickle.Built):
    """Stands for numpy.ndarray."""

    def __init__(self, *_):
        self.value = None

    def build(self, version, shape, dtype, column_order, raw):
        self.fill(raw, dtype, shape, "F" if column_order else "C")

    def fill(self, raw, dtype, shape, order):
        if not isinstance(dtype, PickledDtype) or dtype.name not in DTYPES:
            raise RefusedError(f"an array of {getattr(dtype, 'name', 'objects')}")
        raw = raw.encode("latin1") if isinstance(raw, str) else bytes(raw)
        order = "F" if order == "F" else "C"
        self.value = np.frombuffer(raw, dtype.name).reshape(unpickle.integers(shape), order=order)


def _from_buffer(raw, dtype, shape, order):  # numpy's _frombuffer, of pickle protocol 5
    array = PickledArray()
    array.fill(raw, dtype, shape, order)
    return array


def _scalar(dtype, raw):  # numpy's scalar: one integer
    return int(_from_buffer(raw, dtype, (), "C").value)


NAMES = {
    "numpy ndarray": PickledArray,
    "numpy dtype": PickledDtype,
    "_codecs encode": unpickle.latin_bytes,
    **{f"{module} _reconstruct": PickledArray for module in ARRAY_MODULES},
    **{f"{module} scalar": _scalar for module in ARRAY_MODULES},
    **{f"{module} _frombuffer": _from_buffer for module in NUMERIC_MODULES},
}


def read_pickle(data):
    """The contents of a pickle of numbers, strings, lists, dictionaries and arrays; `RefusedError`
    if it asks for more."""
    return unpickle.read_pickle(io.BytesIO(data), NAMES)


def open_file(path, content, labels, order):
    """None: tar.py opens the archive, and sees whether CIFAR-10 is in it."""


def open_folder(path, names, labels, order):
    """The `Source` of a folder with the batches; None for another."""
    return open_cifar_folder(path, labels) if BATCHES[0] in names else None


def open_cifar_tar(path, labels):
    """Images of cifar-10-python.tar.gz."""
    try:
        with damage_named(path), open_stream(path) as stream:
            members = {os.path.basename(name): place for name, *place in tar_files(stream)}
    except NumdiffError as error:
        if isinstance(error.__context__, TooMuch):
            raise _not_cifar(path) from None
        raise

    def read(name):
        offset, nbytes = members[name]
        if nbytes > unpickle.MAXIMUM_BYTES:
            raise damaged(path, f"{name} has {nbytes:,} bytes")
        with damage_named(path), open_stream(path) as stream:
            stream.seek(offset)
            return read_exactly(stream, nbytes, path)

    return _open_cifar(path, set(members), read, labels)


def open_cifar_folder(path, labels):
    """Images of the folder cifar-10-batches-py, as the archive unpacks."""

    def read(name):
        if not os.path.isfile(os.path.join(path, name)):
            raise damaged(path, f"{name} is not a file")
        with damage_named(path), open(os.path.join(path, name), "rb") as file:
            return file.read(unpickle.MAXIMUM_BYTES)

    return _open_cifar(path, set(os.listdir(path)), read, labels)


def _open_cifar(path, names, read, labels):
    no_labels_file(path, labels)
    batches = [name for name in BATCHES if name in names]
    if not batches:
        raise _not_cifar(path)
    missing = [name for name in (*BATCHES, META) if name not in names]
    notes = [f"It has no {', '.join(missing)}."] if missing else []
    classes = None
    if labels != "none":
        classes = (
            _class_names(path, _load(path, META, read))
            if META in names
            else [str(i) for i in range(10)]
        )
    numbers = None if classes is None else []  # grows as the batches come by, ahead of the images

    def blocks():
        for name in batches:
            batch = _load(path, name, read)
            images = batch.get("data")
            images = images.value if isinstance(images, PickledArray) else images
            if not (
                isinstance(images, np.ndarray)
                and images.dtype == np.uint8
                and images.ndim == 2
                and images.shape[1] == 3 * SIDE * SIDE
            ):
                raise damaged(path, f"{name} has no images of {SIDE}×{SIDE}")
            if classes is not None:
                found = batch.get("labels")
                found = (
                    found.value.tolist()
                    if isinstance(found, PickledArray) and found.value is not None
                    else found
                )
                if (
                    not isinstance(found, list)
                    or len(found) != len(images)
                    or not all(isinstance(n, int) and 0 <= n < len(classes) for n in found)
                ):
                    raise damaged(
                        path, f"{name} has not one label out of {len(classes)} for each image"
                    )
                numbers.extend(found)
            yield images.reshape(-1, 3, SIDE, SIDE).transpose(0, 2, 3, 1)

    return Source("CIFAR-10 training set", items_of(blocks(), numbers), None, classes, notes=notes)


def _not_cifar(path):
    return NumdiffError(
        f"{str(path)!r} is not CIFAR-10 for Python (it has no {BATCHES[0]}): get "
        "cifar-10-python.tar.gz, or unpack other archives and import the folder of images."
    )


def _class_names(path, meta):
    names = meta.get("label_names")
    names = [_text(name) for name in names] if isinstance(names, list) else names
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise damaged(path, f"{META} has no label_names")
    return names


def _load(path, name, read):
    """The dictionary of one pickle of the archive, its keys as text."""
    data = read(name)
    try:
        result = read_pickle(data)
    except RefusedError as error:
        raise NumdiffError(
            f"{name} in {str(path)!r} asks for {error}, which no CIFAR-10 file needs: it may be an "
            "attack and was refused; get the file from its authors."
        ) from None
    except Exception as error:  # a damaged pickle can end in any error at all
        raise damaged(path, f"{name}: {error or type(error).__name__}") from None
    if not isinstance(result, dict):
        raise damaged(path, f"{name} is no dictionary")
    return {_text(key): value for key, value in result.items()}


def _text(value):
    """Python 2 wrote its strings without saying whether they are text or bytes."""
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value
