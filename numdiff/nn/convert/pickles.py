"""Reads PyTorch's `.pt` files without PyTorch and without Python's unpickler.

A pickle is a program for a stack machine, and Python's own machine will import and call whatever the program names. The
machine here knows data only: its opcodes build numbers, strings, tuples, lists and dicts, and the few names in
`GLOBALS` stand for functions of this file. Any other name is refused before anything happens. Nothing is ever imported
or called by name, so a file can at worst be wrong.

THE FORMATS (both of `torch.save`)
    zip      entries <prefix>/data.pkl (the pickle), <prefix>/data/<key> (one storage each, little-endian),
             <prefix>/byteorder. PyTorch 1.6 and later.
    legacy   five pickles one after the other (a magic number, the protocol 1001, facts of the machine, the object, the
             list of storage keys), then every storage: its length as int64, its elements. PyTorch 0.2 to 1.5.
    In both a tensor is (storage, offset, shape, strides); a storage is a "persistent id": ('storage', type, key, …).
"""
import io
import math
import pickletools
import zipfile

import numpy as np

from ...errors import NumdiffError

LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
LEGACY_PROTOCOL = 1001
STORAGES = {  # the name after `torch.` -> how the elements lie in the file; NumPy has no bfloat16
    "DoubleStorage": "<f8", "FloatStorage": "<f4", "HalfStorage": "<f2", "BFloat16Storage": "bfloat16",
    "LongStorage": "<i8", "IntStorage": "<i4", "ShortStorage": "<i2", "CharStorage": "|i1", "ByteStorage": "|u1",
    "BoolStorage": "|b1"}
MAX_DIMENSIONS = 32  # more than any tensor of a model has, and NumPy's own limit was the same
MAPPING_KEYS = (str, int, float, bool, type(None))  # hashing a nested tuple can take for ever


class Tensor:
    """A view of a storage that has perhaps not been read yet."""

    __slots__ = ("storage", "offset", "shape", "strides")

    def __init__(self, storage, offset, shape, strides):
        if not isinstance(storage, Storage):
            raise ValueError("a tensor without a storage")
        shape, strides = _integers(shape), _integers(strides)
        if len(shape) != len(strides) or len(shape) > MAX_DIMENSIONS or not isinstance(offset, int) or offset < 0:
            raise ValueError("a tensor whose shape and strides do not fit")
        self.storage, self.offset, self.shape, self.strides = storage, offset, shape, strides
        last = offset + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
        if self.size and last >= storage.count:
            raise ValueError(f"a tensor of shape {shape} that reaches beyond its storage")

    @property
    def size(self):
        return math.prod(self.shape)

    def numpy(self):
        """The elements as a contiguous array (bfloat16 as float32, which holds it exactly)."""
        if not self.size:
            return np.zeros(self.shape, np.float32 if self.storage.dtype == "bfloat16" else self.storage.dtype)
        flat = self.storage.read()
        strides = [stride * flat.itemsize for stride in self.strides]
        view = np.lib.stride_tricks.as_strided(flat[self.offset:], self.shape, strides, writeable=False)
        array = np.ascontiguousarray(view).reshape(self.shape)
        if self.storage.dtype == "bfloat16":
            return (array.astype(np.uint32) << np.uint32(16)).view(np.float32)
        return array


class Storage:
    """A row of elements in the file, read once, when the first tensor asks for it."""

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
                raise ValueError(f"a storage has {len(data)} bytes where {self.nbytes} were announced")
            self.array = np.frombuffer(data, self.stored_type, self.count)
        return self.array


def _integers(values):
    """A tuple of non-negative ints, or an error."""
    if not isinstance(values, (tuple, list)) or not all(type(v) is int and v >= 0 for v in values):
        raise ValueError("a shape or strides that are not whole numbers")
    return tuple(values)


# The names that a file may use ---------------------------------------------------------------------------------------

class Name:
    """An allowed global: what the stack holds for it, and the function of this file that stands in for it."""

    __slots__ = ("text", "function")

    def __init__(self, text, function=None):
        self.text, self.function = text, function


def _dictionary(pairs=()):
    if not isinstance(pairs, (dict, list, tuple)):
        raise ValueError("a dict made from something that is not pairs")
    result = {}
    for pair in pairs.items() if isinstance(pairs, dict) else pairs:
        if not isinstance(pair, (tuple, list)):
            raise ValueError("a dict made from something that is not pairs")
        key, value = pair
        _put(result, key, value)
    return result


def _rebuild_tensor(storage, offset, shape, strides, *unused):
    return Tensor(storage, offset, shape, strides)


def _rebuild_parameter(data, *unused):
    if not isinstance(data, Tensor):
        raise ValueError("a parameter without a tensor")
    return data


def _size(shape=()):
    return _integers(shape)


def _device(*words):
    return None


def _namespace():
    """The settings of a program, which training checkpoints keep; its attributes are not wanted."""
    return {}


def _latin_bytes(text, encoding):
    """How protocol 2 writes bytes: `_codecs.encode(text, 'latin1')`."""
    if not isinstance(text, str) or encoding != "latin1":
        raise ValueError("bytes in an encoding that no pickle uses")
    return text.encode("latin1")


GLOBALS = {
    "collections OrderedDict": _dictionary,
    "torch._utils _rebuild_tensor_v2": _rebuild_tensor,
    "torch._utils _rebuild_tensor": _rebuild_tensor,
    "torch._utils _rebuild_parameter": _rebuild_parameter,
    "torch.nn.parameter Parameter": _rebuild_parameter,
    "torch Size": _size,
    "torch device": _device,
    "_codecs encode": _latin_bytes,
    "argparse Namespace": _namespace,
    **{f"torch {name}": None for name in STORAGES},  # only the type in a persistent id; nothing to call
    **{f"torch {name}": None for name in ("float16", "float32", "float64", "bfloat16", "int8", "int16", "int32",
                                          "int64", "uint8", "bool")},  # a dtype among the settings
}


def _allowed(text):
    """The `Name` for 'module name', or a refusal that names it."""
    if text not in GLOBALS:
        shown = text.replace(" ", ".", 1)
        raise NumdiffError(f"it asks for {shown[:100]!r}, which is not on the list of what weights need, and was not "
                           "run; save the state dict alone with torch.save(model.state_dict(), …)")
    return Name(text, GLOBALS[text])


def _put(mapping, key, value):
    if not isinstance(key, MAPPING_KEYS):
        raise ValueError("a dict key that is neither a text nor a number")
    mapping[key] = value


# The machine ---------------------------------------------------------------------------------------------------------

MARK = object()
LITERALS = {"INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT", "STRING", "BINSTRING",
            "SHORT_BINSTRING", "UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "BINBYTES", "SHORT_BINBYTES",
            "BINBYTES8", "BYTEARRAY8"}
CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
EMPTY = {"EMPTY_LIST": list, "EMPTY_DICT": dict, "EMPTY_TUPLE": tuple, "EMPTY_SET": list}
TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


def read_pickle(stream, storage_of):
    """The object of the pickle that starts at the stream's position, which is left just behind it.

    storage_of: called with each persistent id (a tuple), returns its `Storage`.
    """
    stack, memo = [], {}

    def pop_to_mark():
        items = []
        while (item := stack.pop()) is not MARK:
            items.append(item)
        return items[::-1]

    for opcode, argument, position in pickletools.genops(stream):
        name = opcode.name
        if name in LITERALS:
            stack.append(argument)
        elif name in CONSTANTS:
            stack.append(CONSTANTS[name])
        elif name in EMPTY:
            stack.append(EMPTY[name]())
        elif name == "MARK":
            stack.append(MARK)
        elif name in TUPLES:
            items = [stack.pop() for _ in range(TUPLES[name])][::-1]
            stack.append(tuple(items))
        elif name == "TUPLE":
            stack.append(tuple(pop_to_mark()))
        elif name in ("LIST", "FROZENSET"):
            stack.append(pop_to_mark())
        elif name == "DICT":
            items = pop_to_mark()
            stack.append(_dictionary(list(zip(items[::2], items[1::2], strict=True))))
        elif name in ("APPEND", "APPENDS", "ADDITEMS"):
            items = [stack.pop()] if name == "APPEND" else pop_to_mark()
            _expect(stack[-1], list).extend(items)
        elif name in ("SETITEM", "SETITEMS"):
            items = [stack.pop(), stack.pop()][::-1] if name == "SETITEM" else pop_to_mark()
            mapping = _expect(stack[-1], dict)
            for key, value in zip(items[::2], items[1::2], strict=True):
                _put(mapping, key, value)
        elif name in ("BINPUT", "LONG_BINPUT", "PUT"):
            memo[argument] = stack[-1]
        elif name == "MEMOIZE":
            memo[len(memo)] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET", "GET"):
            stack.append(memo[argument])
        elif name == "POP":
            stack.pop()
        elif name == "POP_MARK":
            pop_to_mark()
        elif name == "DUP":
            stack.append(stack[-1])
        elif name == "GLOBAL":
            stack.append(_allowed(argument))
        elif name == "STACK_GLOBAL":
            attribute, module = stack.pop(), stack.pop()
            stack.append(_allowed(f"{_expect(module, str)} {_expect(attribute, str)}"))
        elif name == "REDUCE":
            arguments, function = _expect(stack.pop(), tuple), _expect(stack.pop(), Name)
            if function.function is None:
                raise ValueError(f"{function.text.replace(' ', '.')} is called, and it is only a type")
            stack.append(function.function(*arguments))
        elif name == "NEWOBJ":
            arguments, function = _expect(stack.pop(), tuple), _expect(stack.pop(), Name)
            if function.function is not _namespace:
                raise ValueError(f"{function.text.replace(' ', '.')} is made in a way that torch.save does not use")
            stack.append(_namespace(*arguments))
        elif name == "BUILD":  # attributes: the versions that a state dict carries, the settings of a namespace
            stack.pop()
            _expect(stack[-1], dict)
        elif name == "BINPERSID":
            stack.append(storage_of(_expect(stack.pop(), tuple)))
        elif name == "STOP":
            return stack.pop()
        elif name not in ("PROTO", "FRAME"):
            raise NumdiffError(f"its pickle uses the operation {name} at byte {position}, which weights do not "
                               "need, and which was not run; save the state dict alone with "
                               "torch.save(model.state_dict(), …)")
    raise ValueError("the pickle has no end")


def _expect(value, kind):
    if not isinstance(value, kind):
        raise ValueError(f"a {kind.__name__} was expected in the pickle")
    return value


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


# The two formats -----------------------------------------------------------------------------------------------------

def read_zip(path):
    """The object in a zip file of `torch.save`; its tensors read their storages from the file while it is open."""
    archive = zipfile.ZipFile(path)
    entries = {info.filename: info for info in archive.infolist()}
    pickles = [name for name in entries if name == "data.pkl" or name.endswith("/data.pkl")]
    if len(pickles) != 1:
        raise NumdiffError("it is a zip file without PyTorch's data.pkl; give what torch.save wrote")
    prefix = pickles[0].removesuffix("data.pkl")
    if prefix + "constants.pkl" in entries:
        raise NumdiffError("it is a TorchScript program, not weights; save model.state_dict() instead")
    if prefix + "byteorder" in entries and _entry(archive, entries, prefix + "byteorder") != b"little":
        raise NumdiffError("it was written on a big-endian machine, which is not supported; save it again on another")
    storages = {}

    def storage_of(identifier):
        dtype, key, count, view = _describe_storage(identifier)
        if view is not None:
            raise ValueError("a view of a storage, which only the legacy format has")
        if key not in storages:
            storages[key] = Storage(dtype, count, lambda _, name=f"{prefix}data/{key}": _entry(archive, entries, name))
            if entries[f"{prefix}data/{key}"].file_size < storages[key].nbytes:
                raise ValueError(f"storage {key} is shorter than announced")
        if (storages[key].dtype, storages[key].count) != (dtype, count):
            raise ValueError("one storage with two types or lengths")
        return storages[key]

    return read_pickle(io.BytesIO(_entry(archive, entries, pickles[0])), storage_of)


def _entry(archive, entries, name):
    """The bytes of one entry. PyTorch never compresses, so neither may a file: no entry can be larger than the file."""
    if entries[name].compress_type != zipfile.ZIP_STORED:
        raise ValueError(f"{name} is compressed, which torch.save never does")
    return archive.read(entries[name])


def read_legacy(file):
    """The object in a legacy file of `torch.save`, from an open binary file that supports seeking."""
    def no_storage(identifier):
        raise ValueError("a storage in the wrong place")

    if read_pickle(file, no_storage) != LEGACY_MAGIC or read_pickle(file, no_storage) != LEGACY_PROTOCOL:
        raise NumdiffError("it is a pickle, but not one of torch.save; give a .pt file with a state dict")
    facts = read_pickle(file, no_storage)
    if isinstance(facts, dict) and facts.get("little_endian") is not True:
        raise NumdiffError("it was written on a big-endian machine, which is not supported; save it again on another")
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
        start, length = _integers(view[1:3])
        if start + length > count:
            raise ValueError("a view beyond its storage")
        views.append((base, Storage(dtype, length, None), start))
        return views[-1][1]

    result = read_pickle(file, storage_of)
    keys = _expect(read_pickle(file, no_storage), list)
    if {str(k) for k in keys} != set(storages) or len(keys) != len(storages):
        raise ValueError("the list of storages is not that of the tensors")
    position, end = file.tell(), file.seek(0, io.SEEK_END)
    for key in keys:
        storage = storages[str(key)]
        if int.from_bytes(_read_at(file, position, 8), "little") != storage.count:
            raise ValueError(f"storage {key} does not have the announced length")
        storage.load = lambda nbytes, at=position + 8: _read_at(file, at, nbytes)
        position += 8 + storage.nbytes
        if position > end:
            raise ValueError("the file ends within a storage")
    for base, view, start in views:
        view.load = lambda nbytes, base=base, at=start: base.read()[at:].tobytes()[:nbytes]
    return result


def _read_at(file, position, nbytes):
    file.seek(position)
    return file.read(nbytes)
