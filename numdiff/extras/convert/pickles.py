"""Reads PyTorch's `.pt` files without PyTorch and without Python's unpickler.

A pickle is a program; the machine of unpickle.py runs it as data only, within bounds, and the
few names in `GLOBALS` stand for functions of this file. Nothing is ever imported or called by name,
so the worst that a file can do is to be wrong.

THE FORMATS (both of `torch.save`)
    zip      entries <prefix>/data.pkl (the pickle), <prefix>/data/<key> (one storage each, little-endian),
             <prefix>/byteorder. PyTorch 1.6 and later.
    legacy   five pickles one after the other (a magic number, the protocol 1001, facts of the machine, the object, the
             list of storage keys), then every storage: its length as int64, its elements. PyTorch 0.2 to 1.5.
    In both a tensor is (storage, offset, shape, strides); a storage is a "persistent id":
    ('storage', type, key, …).
"""

import io
import math
import zipfile

import numpy as np

from ...errors import NumdiffError
from . import unpickle
from .unpickle import MAXIMUM_BYTES, MAXIMUM_OPERATIONS, Name, expect, integers

LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
LEGACY_PROTOCOL = 1001
FEW = 1000  # limit on the operations of the first pickles of a legacy file
# the name after `torch.` -> how the elements are stored in the file; NumPy has no bfloat16
STORAGES = {
    "DoubleStorage": "<f8",
    "FloatStorage": "<f4",
    "HalfStorage": "<f2",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "<i8",
    "IntStorage": "<i4",
    "ShortStorage": "<i2",
    "CharStorage": "|i1",
    "ByteStorage": "|u1",
    "BoolStorage": "|b1",
}


class PickledTensor:
    """A view of a storage that may not have been read yet."""

    __slots__ = ("storage", "offset", "shape", "strides")

    def __init__(self, storage, offset, shape, strides):
        if not isinstance(storage, Storage):
            raise ValueError("a tensor without a storage")
        shape, strides = integers(shape), integers(strides)
        if len(shape) != len(strides) or type(offset) is not int or offset < 0:
            raise ValueError("a tensor whose shape and strides do not fit")
        self.storage, self.offset, self.shape, self.strides = storage, offset, shape, strides
        last = offset + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
        if self.size and last >= storage.count:
            raise ValueError(f"a tensor of shape {shape} that reaches beyond its storage")

    @property
    def size(self):
        return math.prod(self.shape)

    @property
    def nbytes(self):
        """As in the file, each element counted as often as the shape has it."""
        return self.size * self.storage.stored_type.itemsize

    def numpy(self):
        """The elements as a contiguous array (bfloat16 as float32, which holds it exactly)."""
        if not self.size:
            return np.zeros(
                self.shape, np.float32 if self.storage.dtype == "bfloat16" else self.storage.dtype
            )
        flat = self.storage.read()
        strides = [stride * flat.itemsize for stride in self.strides]
        view = np.lib.stride_tricks.as_strided(
            flat[self.offset :], self.shape, strides, writeable=False
        )
        array = np.ascontiguousarray(view).reshape(self.shape)
        if self.storage.dtype == "bfloat16":
            return (array.astype(np.uint32) << np.uint32(16)).view(np.float32)
        return array


class Storage:
    """A row of elements in the file, read when the first tensor needs it."""

    def __init__(self, dtype, count, load):
        self.dtype, self.count, self.load, self.array = dtype, count, load, None

    @property
    def nbytes(self):
        return self.count * self.stored_type.itemsize

    @property
    def stored_type(self):
        return np.dtype("<u2" if self.dtype == "bfloat16" else self.dtype)

    def read(self):
        if self.array is None:
            data = self.load(self.nbytes)
            if len(data) < self.nbytes:
                raise ValueError(
                    f"a storage has {len(data)} bytes where {self.nbytes} were announced"
                )
            self.array = np.frombuffer(data, self.stored_type, self.count)
        return self.array


# The names that a file may use --------------------------------------------------------------------


def _rebuild_tensor(storage, offset, shape, strides, *unused):
    return PickledTensor(storage, offset, shape, strides)


def _rebuild_parameter(data, *unused):
    if not isinstance(data, PickledTensor):
        raise ValueError("a parameter without a tensor")
    return data


def _size(shape=()):
    return integers(shape)


def _device(*words):
    return None


GLOBALS = {
    "collections OrderedDict": unpickle.dictionary,
    "torch._utils _rebuild_tensor_v2": _rebuild_tensor,
    "torch._utils _rebuild_tensor": _rebuild_tensor,
    "torch._utils _rebuild_parameter": _rebuild_parameter,
    "torch.nn.parameter Parameter": _rebuild_parameter,
    "torch Size": _size,
    "torch device": _device,
    "_codecs encode": unpickle.latin_bytes,
    "argparse Namespace": unpickle.namespace,
    # only the type in a persistent id; nothing to call
    **{f"torch {name}": None for name in STORAGES},
    **{
        f"torch {name}": None
        for name in (
            "float16",
            "float32",
            "float64",
            "bfloat16",
            "int8",
            "int16",
            "int32",
            "int64",
            "uint8",
            "bool",
        )
    },  # a dtype among the settings
}


def _read_pickle(stream, storage_of=None, operations=MAXIMUM_OPERATIONS):
    """The object of the pickle at the stream's position; storage_of gives the `Storage` of each
    persistent id."""
    try:
        return unpickle.read_pickle(stream, GLOBALS, storage_of or _no_storage, operations)
    except unpickle.RefusedError as error:
        raise NumdiffError(
            f"it asks for {error}, which is not on the list of what weights need, and was not run; save "
            "the state dict alone with torch.save(model.state_dict(), …)"
        ) from None


def _no_storage(identifier):
    raise ValueError("a storage in the wrong place")


def _describe_storage(identifier):
    """(dtype, key, count, view) of a persistent id."""
    if len(identifier) < 5 or identifier[0] != "storage":
        raise ValueError("a reference to something that is not a storage")
    kind, key, count = identifier[1], identifier[2], identifier[4]
    name = kind.text.removeprefix("torch ") if isinstance(kind, Name) else ""
    if name not in STORAGES:
        raise ValueError("a storage of a type that numdiff does not read")
    if not isinstance(key, (str, int)) or type(count) is not int or count < 0:
        raise ValueError("a storage without a name or a length")
    return STORAGES[name], str(key), count, identifier[5] if len(identifier) > 5 else None


# The two formats ----------------------------------------------------------------------------------


def read_zip(archive):
    """The object in an `archives.ZipReader` of a zip file of `torch.save`; its tensors read their
    storages from it."""
    entries = {info.filename: info for info in archive.members}
    pickles = [name for name in entries if name == "data.pkl" or name.endswith("/data.pkl")]
    if len(pickles) != 1:
        raise NumdiffError(
            "it is a zip file without PyTorch's data.pkl; give what torch.save wrote"
        )
    prefix = pickles[0].removesuffix("data.pkl")
    if prefix + "constants.pkl" in entries:
        raise NumdiffError(
            "it is a TorchScript program, not weights; save model.state_dict() instead"
        )
    if (
        prefix + "byteorder" in entries
        and _entry(archive, entries, prefix + "byteorder", 16) != b"little"
    ):
        raise NumdiffError(
            "it was written on a big-endian machine, which is not supported; save it again on another"
        )
    storages = {}

    def storage_of(identifier):
        dtype, key, count, view = _describe_storage(identifier)
        if view is not None:
            raise ValueError("a view of a storage, which only the legacy format has")
        if key not in storages:
            name = f"{prefix}data/{key}"
            storages[key] = Storage(dtype, count, lambda _: _entry(archive, entries, name, None))
            if entries[name].file_size < storages[key].nbytes:
                raise ValueError(f"storage {key} is shorter than announced")
        if (storages[key].dtype, storages[key].count) != (dtype, count):
            raise ValueError("one storage with two types or lengths")
        return storages[key]

    return _read_pickle(io.BytesIO(_entry(archive, entries, pickles[0], MAXIMUM_BYTES)), storage_of)


def _entry(archive, entries, name, limit):
    """The bytes of one entry. PyTorch never compresses, so neither may a file: no entry can be
    larger than the file."""
    if entries[name].compress_type != zipfile.ZIP_STORED:
        raise ValueError(f"{name} is compressed, which torch.save never does")
    return archive.read(entries[name], limit)


def read_legacy(file):
    """The object in a legacy file of `torch.save`, from an open binary file that supports seeking."""
    start = io.BytesIO(file.read(MAXIMUM_BYTES))  # the pickles are in it, as they are bounded
    if any(
        _read_pickle(start, operations=FEW) != wanted for wanted in (LEGACY_MAGIC, LEGACY_PROTOCOL)
    ):
        raise NumdiffError(
            "it is a pickle, but not one of torch.save; give a .pt file with a state dict"
        )
    facts = _read_pickle(start, operations=FEW)
    if isinstance(facts, dict) and facts.get("little_endian") is not True:
        raise NumdiffError(
            "it was written on a big-endian machine, which is not supported; save it again on another"
        )
    storages, views = {}, []

    def storage_of(identifier):
        dtype, key, count, view = _describe_storage(identifier)
        if key not in storages:
            storages[key] = Storage(dtype, count, None)
        base = storages[key]
        if (base.dtype, base.count) != (dtype, count):
            raise ValueError("one storage with two types or lengths")
        if view is None:
            return base
        start, length = integers(view[1:3])
        if start + length > count:
            raise ValueError("a view beyond its storage")
        views.append((base, Storage(dtype, length, None), start))
        return views[-1][1]

    result = _read_pickle(start, storage_of)
    keys = [str(k) if type(k) in (str, int) else None for k in expect(_read_pickle(start), list)]
    if set(keys) != set(storages) or len(keys) != len(storages):
        raise ValueError("the list of storages is not that of the tensors")
    position, end = start.tell(), file.seek(0, io.SEEK_END)
    for key in keys:
        storage = storages[key]
        if int.from_bytes(_read_at(file, position, 8), "little") != storage.count:
            raise ValueError(f"storage {key} does not have the announced length")
        storage.load = lambda nbytes, at=position + 8: _read_at(file, at, nbytes)
        position += 8 + storage.nbytes
        if position > end:
            raise ValueError("the file ends within a storage")
    for base, view, start in views:
        view.load = lambda _, base=base, rows=slice(start, start + view.count): base.read()[
            rows
        ].view(np.uint8)
    return result


def _read_at(file, position, nbytes):
    file.seek(position)
    return file.read(nbytes)
