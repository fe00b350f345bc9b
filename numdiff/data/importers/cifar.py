"""CIFAR-10 as its authors give it: cifar-10-python.tar.gz, five pickles of training images.

A pickle is a programme: reading one with Python's own reader can run any command. These are read by a reader that knows
the handful of names that an array, a list and a dictionary need, gives a harmless stand-in for each, and refuses every
other name. No function of the pickle's choice is ever called.
"""
import contextlib
import io
import os
import pickle
import tarfile

import numpy as np

from ...errors import NumdiffError
from .arrays import items_of
from .source import Source, damage_named, damaged, no_labels_file, open_stream

BATCHES = tuple(f"data_batch_{i}" for i in range(1, 6))
META = "batches.meta"
SIDE = 32
MAXIMUM_BATCH_BYTES = 1 << 29  # a batch has 31 MB
ARRAY_MODULES = ("numpy.core.multiarray", "numpy._core.multiarray")  # before and since NumPy 2
NUMERIC_MODULES = ("numpy.core.numeric", "numpy._core.numeric")


class RefusedError(Exception):
    """A pickle asks for a name that no array of numbers needs."""


def read_pickle(data):
    """Dictionaries, lists, strings, numbers and uint8/int arrays of a pickle; `RefusedError` if it asks for more."""

    class Dtype:  # stands for numpy.dtype: only its name is noted
        def __init__(self, name, *_):
            self.name = name.decode() if isinstance(name, bytes) else str(name)

        def __setstate__(self, state):
            pass  # byte order and alignment: of no meaning for bytes

    class Array:  # stands for numpy.ndarray: its bytes are noted, and turned into an array after the reading
        def __init__(self, *_):
            self.value = None

        def __setstate__(self, state):
            _, shape, dtype, column_order, raw = state
            self.fill(raw, dtype, shape, "F" if column_order else "C")

        def fill(self, raw, dtype, shape, order):
            if not isinstance(dtype, Dtype) or dtype.name not in ("u1", "i8", "i4"):
                raise RefusedError(f"an array of {getattr(dtype, 'name', 'objects')}")
            raw = raw.encode("latin1") if isinstance(raw, str) else bytes(raw)
            self.value = np.frombuffer(raw, dtype.name).reshape(shape, order=order)

    def from_buffer(raw, dtype, shape, order):  # numpy's _frombuffer, of pickle protocol 5
        array = Array()
        array.fill(raw, dtype, shape, order)
        return array

    def scalar(dtype, raw):  # numpy's scalar: one integer
        array = Array()
        array.fill(raw, dtype, (), "C")
        return int(array.value)

    def latin1(text, encoding):  # _codecs.encode: how Python 3 writes bytes for readers of Python 2
        if encoding not in ("latin1", b"latin1"):
            raise RefusedError(f"the encoding {encoding!r}")
        return text.encode("latin1")

    def reconstruct(*_):  # numpy's _reconstruct: an empty array, filled by __setstate__
        return Array()

    class Reader(pickle.Unpickler):
        def find_class(self, module, name):
            known = {("numpy", "ndarray"): Array, ("numpy", "dtype"): Dtype, ("_codecs", "encode"): latin1}
            known.update({(m, "_reconstruct"): reconstruct for m in ARRAY_MODULES})
            known.update({(m, "scalar"): scalar for m in ARRAY_MODULES})
            known.update({(m, "_frombuffer"): from_buffer for m in NUMERIC_MODULES})
            if (module, name) not in known:
                raise RefusedError(f"{module}.{name}")
            return known[module, name]

        def persistent_load(self, pid):
            raise RefusedError("a persistent object")

    def plain(value):
        if isinstance(value, Array):
            return value.value
        if isinstance(value, bytes):
            return value.decode("utf-8", "replace")
        if isinstance(value, (list, tuple)):
            return [plain(v) for v in value]
        if isinstance(value, dict):
            return {plain(k): plain(v) for k, v in value.items()}
        return value

    # Python 2 wrote its strings without saying whether they are text or bytes: take them as bytes
    return plain(Reader(io.BytesIO(data), encoding="bytes").load())


def open_cifar_tar(path, labels):
    """Images of cifar-10-python.tar.gz."""
    with contextlib.ExitStack() as stack:
        stream = stack.enter_context(open_stream(path))
        with damage_named(path):
            archive = tarfile.open(fileobj=stream, mode="r:")
            members = {os.path.basename(m.name): m for m in archive.getmembers() if m.isfile()}
            while stream.read(1 << 20):  # to the end, where gzip keeps its checksum
                pass
        source = _open_cifar(path, set(members), lambda name: _read_member(path, archive, members[name]), labels)
        source.close = stack.pop_all().close
        return source


def _read_member(path, archive, member):
    if member.size > MAXIMUM_BATCH_BYTES:
        raise damaged(path, f"{member.name} has {member.size} bytes")
    with damage_named(path):
        data = archive.extractfile(member).read()
    if len(data) != member.size:
        raise damaged(path, f"{member.name} is cut off")
    return data


def open_cifar_folder(path, labels):
    """Images of the folder cifar-10-batches-py, as the archive unpacks."""
    def read(name):
        with damage_named(path), open(os.path.join(path, name), "rb") as file:
            return file.read(MAXIMUM_BATCH_BYTES)

    return _open_cifar(path, set(os.listdir(path)), read, labels)


def _open_cifar(path, names, read, labels):
    no_labels_file(path, labels)
    batches = [name for name in BATCHES if name in names]
    if not batches:
        raise NumdiffError(f"{str(path)!r} is not CIFAR-10 for Python (it has no {BATCHES[0]}): "
                           "get cifar-10-python.tar.gz, or unpack other archives and import the folder of images.")
    missing = [name for name in (*BATCHES, META) if name not in names]
    notes = [f"It has no {', '.join(missing)}."] if missing else []
    classes = None
    if labels != "none":
        classes = _class_names(path, _load(path, META, read)) if META in names else [str(i) for i in range(10)]
    numbers = None if classes is None else []  # grows as the batches come by, ahead of the images

    def blocks():
        for name in batches:
            batch = _load(path, name, read)
            images = batch.get("data")
            if not (isinstance(images, np.ndarray) and images.dtype == np.uint8 and images.ndim == 2
                    and images.shape[1] == 3 * SIDE * SIDE):
                raise damaged(path, f"{name} has no images of {SIDE}×{SIDE}")
            if classes is not None:
                found = batch.get("labels")
                found = found.tolist() if isinstance(found, np.ndarray) else found
                if not isinstance(found, list) or len(found) != len(images) or not all(
                        isinstance(n, int) and 0 <= n < len(classes) for n in found):
                    raise damaged(path, f"{name} has not one label out of {len(classes)} for each image")
                numbers.extend(found)
            yield images.reshape(-1, 3, SIDE, SIDE).transpose(0, 2, 3, 1)

    return Source("CIFAR-10 training set", items_of(blocks(), numbers), None, classes, notes=notes)


def _class_names(path, meta):
    names = meta.get("label_names")
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise damaged(path, f"{META} has no label_names")
    return names


def _load(path, name, read):
    """The dictionary of one pickle of the archive."""
    data = read(name)
    try:
        result = read_pickle(data)
    except RefusedError as error:
        raise NumdiffError(f"{name} in {str(path)!r} asks for {error}, which no CIFAR-10 file needs: it may be an "
                           "attack and was refused; get the file from its authors.") from None
    except Exception as error:  # a damaged pickle can end in any error at all
        raise damaged(path, f"{name}: {error or type(error).__name__}") from None
    if not isinstance(result, dict):
        raise damaged(path, f"{name} is no dictionary")
    return result
