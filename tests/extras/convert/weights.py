"""Files of weights for the tests of conversion: written as PyTorch does, compared, and damaged."""

import io
import os
import pickle
import zipfile
from collections import OrderedDict
from types import SimpleNamespace

import numpy as np
import pytest

from numdiff.errors import UsageError
from numdiff.extras.convert.files import write_state_dict
from numdiff.extras.convert.models import convert
from numdiff.training.model_files import load


def same(got, want, in_order=True):
    """Whether two state dicts have the same arrays, in the same order."""
    names = (list if in_order else set)(want)
    return type(names)(got) == names and all(np.array_equal(got[k], want[k]) for k in names)


def of_shapes(shapes):
    """A state dict without numbers, of {name: shape}."""
    return {name: SimpleNamespace(shape=tuple(shape)) for name, shape in shapes.items()}


def write_weights(path, state_dict, kind, *settings):
    """A file of weights as numdiff writes it, npz or safetensors; returns its path."""
    with open(path, "wb") as file:
        write_state_dict(file, state_dict, kind, *settings)
    return path


def write_npz(path, state_dict):
    return write_weights(path, state_dict, "npz")


def same_models(*paths):
    """Whether files hold models of the same options, weights and diffusion."""
    first, *others = (load(path, "cpu") for path in paths)
    return all(
        (first.options, first.diffusion) == (other.options, other.diffusion)
        and same(other.arrays(), first.arrays())
        for other in others
    )


def refused(message, source, target="m.h5", error=UsageError, **options):
    """The conversion ends with this error, and what was there stays."""
    existed = os.path.exists(target)
    with pytest.raises(error, match=message):
        convert(source, target, **options)
    assert os.path.exists(target) == existed


# `.pt` files: Python's pickler with the names of PyTorch's classes --------------------------------


class ForeignClass:
    """An object whose pickle asks for the global `text` ('module name') and calls it with
    `arguments`."""

    def __init__(self, text, *arguments):
        self.text, self.arguments = text, arguments


class Pickler(pickle._Pickler):  # the one written in Python, whose methods can be replaced
    def persistent_id(self, value):
        return value.identifier if isinstance(value, StorageId) else None

    def save(self, value, save_persistent_id=True):
        if isinstance(value, ForeignClass):
            self.write(b"c" + value.text.replace(" ", "\n").encode() + b"\n")
            if value.arguments != (None,):
                self.save(tuple(value.arguments))
                self.write(b"R")
        else:
            super().save(value, save_persistent_id)


class StorageId:
    def __init__(self, kind, key, count):
        self.identifier = ("storage", ForeignClass(f"torch {kind}", None), key, "cpu", count)


def tensor(kind, key, count, shape, strides=None, offset=0):
    if strides is None:
        strides = tuple(int(np.prod(shape[i + 1 :])) for i in range(len(shape)))
    return ForeignClass(
        "torch._utils _rebuild_tensor_v2",
        StorageId(kind, key, count),
        offset,
        shape,
        strides,
        False,
        OrderedDict(),
    )


def pickled(value):
    stream = io.BytesIO()
    Pickler(stream, 2).dump(value)
    return stream.getvalue()


def write_pt(path, pickle_bytes, storages=(), byteorder=b"little", compress=False, **more):
    with zipfile.ZipFile(
        path, "w", zipfile.ZIP_DEFLATED if compress else zipfile.ZIP_STORED
    ) as archive:
        archive.writestr("archive/data.pkl", pickle_bytes)
        archive.writestr("archive/byteorder", byteorder)
        for key, data in dict(storages).items():
            archive.writestr(f"archive/data/{key}", data)
        for name, data in more.items():
            archive.writestr(f"archive/{name}", data)
    return path


def write_state_pt(path, state_dict):
    """A whole state dict as `torch.save` would write it."""
    entries = {
        name: tensor("FloatStorage", str(i), a.size, a.shape)
        for i, (name, a) in enumerate(state_dict.items())
    }
    return write_pt(
        path,
        pickled(OrderedDict(entries)),
        {str(i): a.astype("<f4").tobytes() for i, a in enumerate(state_dict.values())},
    )


# Damage -------------------------------------------------------------------------------------------


def damaged_copies(data, rng, count):
    """Copies of a file, each with a few bytes changed, cut off, doubled or taken out."""
    for i in range(count):
        copy = bytearray(data)
        if i % 3 == 0:
            yield copy[: rng.integers(len(copy))]
            continue
        for _ in range(rng.integers(1, 4)):
            if i % 3 == 1:
                copy[rng.integers(len(copy))] = rng.integers(256)
            else:
                start = rng.integers(len(copy) - 1)
                stop = start + rng.integers(1, 9)
                copy[start:stop] = [b"", bytes(copy[start:stop]) * 2, b"\xff" * 8, b"\0" * 3][
                    rng.integers(4)
                ]
        yield copy


def damaged_states(state):
    """(name, what it becomes, the state dict) with one array missing or of another shape."""
    for name in state:
        for damage in (None, *map(np.ones, (5, (0, 1), (2, 2, 2, 2), (7, 7)))):
            changed = {**state, name: damage}
            yield name, damage, {k: v for k, v in changed.items() if v is not None}
