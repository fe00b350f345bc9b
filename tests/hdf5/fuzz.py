"""HDF5 files of which fields are changed and all checksums made right: each is read, or refused in
one sentence.

    python -m tests.hdf5.fuzz                                       # 300 files of each kind
    python -m tests.hdf5.fuzz --cases 5000 --seed 3 fields

`fields` are datasets in each layout and index, `model_fields` model files. What numdiff reads of an
intact file says where its structures are. tests/data/fuzz.py says when a case fails.
"""

import functools
import pathlib
import tempfile
from unittest import mock

import h5py
import numpy as np

from numdiff.data.dataset import open_dataset
from numdiff.extras.convert.models import convert
from numdiff.hdf5 import open_hdf5
from numdiff.hdf5.structure import UNDEFINED, RawFile, lookup3
from numdiff.nn import DiT, UNet
from numdiff.training.checkpoint import LAST_LINE_BYTES
from numdiff.training.model_files import load, write_model_file
from tests.data import fuzz

VERSIONS = ("earliest", "v108"), ("v108", "latest"), ("v110", "v110"), ("latest", "latest")
LAYOUTS = [
    (chunks, most)
    for chunks in ((16, 8, 8, 3), (9, 4, 8, 3), (40, 8, 8, 3), (1, 2, 2, 3))
    for most in ((40, 8, 8, 3), (None, 8, 8, 3), (None, None, 8, 3), (90, 16, 8, 3))
] + [(None, None)]
CLASSES = [f"class {i}" for i in range(5000)]  # more than fit into an object header


def dataset(path, number):
    """One of the datasets in each layout."""
    chunks, most = LAYOUTS[number // 4 % len(LAYOUTS)]
    images = np.arange(40 * 8 * 8 * 3, dtype=np.uint32).astype(np.uint8).reshape(40, 8, 8, 3)
    with h5py.File(path, "w", libver=VERSIONS[number % 4]) as file:
        file.create_dataset(
            "images",
            data=images,
            chunks=chunks,
            maxshape=most,
            compression=(None, "gzip", "lzf")[number % 3] if chunks else None,
        )
        file["labels"] = np.arange(40) % 3
        large = number % 4 and number % 5 == 0
        file.attrs.create(
            "classes", CLASSES if large else ["a", "b", "c"], dtype=h5py.string_dtype()
        )
        for i in range(12 if number % 2 else 0):
            file.attrs[f"more {i}"], file[f"more {i}"] = i, i


def use_dataset(path):
    with open_dataset(path) as found:
        found.statistics()
        if found.labels is not None:
            found.class_counts()


def model(path, number):
    made = UNet(**fuzz.UNET, device="cpu") if number % 2 else DiT(**fuzz.DIT, device="cpu")
    write_model_file(
        path,
        made.options,
        made.arrays(),
        {"steps": 10},
        5,
        ("dit", "unet")[number % 2],
        classes=["a", "b"],
    )


def use_model(path):
    load(path, "cpu", "raw")
    convert(path, path.with_suffix(".npz"))


@functools.cache
def base(make, number):
    """(bytes of a file, spans of its structures, spans of those that have a checksum)"""
    read, check, spans, checked = RawFile.read, RawFile.check, [], []

    def noted(self, address, count):
        spans.append((address, count))
        return read(self, address, count)

    def checks(self, data, address):
        checked.append((address, len(data)))
        check(self, data, address)

    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "a.h5"
        make(path, number)
        data = path.read_bytes()
        data = data[:-LAST_LINE_BYTES] if make is model else data
        with (
            mock.patch.object(RawFile, "read", noted),
            mock.patch.object(RawFile, "check", checks),
            open_hdf5(path) as file,
        ):
            for group in ("/", "buffers") if make is model else ("/",):
                for name in file.names(group):
                    if group != "/" or name != "buffers":
                        file.array(name, group)
            file.strings("classes")
        return (
            data,
            spans,
            [(address, count, _place(data, address, count)) for address, count in checked],
        )


def _place(data, address, count):
    """Where the checksum of a structure is: at its end, or behind the head of a direct block."""
    if data[address : address + 4] != b"FHDB":
        return address + count - 4
    for at in range(address + 14, address + 22):
        block = data[address:at] + bytes(4) + data[at + 4 : address + count - 4]
        if lookup3(block) == int.from_bytes(data[at : at + 4], "little"):
            return at
    raise AssertionError("a heap's block without a checksum")


def changed(rng, make, number):
    """The bytes of a file with one to three fields changed and right checksums."""
    data, spans, checked = base(make, number)
    addresses, data = sorted({address for address, _ in spans}), bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        address, count = rng.choice(spans)
        at, width = address + rng.randrange(count), rng.choice((1, 1, 2, 4, 8))
        old = int.from_bytes(data[at : at + width], "little")
        value = rng.choice(
            (
                0,
                1,
                2,
                old + 1,
                old - 1,
                2 * old,
                old ^ 1 << rng.randrange(8 * width),
                UNDEFINED,
                1 << 31,
                1 << 56,
                1 << 63,
                len(data),
                rng.randrange(256),
                rng.getrandbits(64),
                rng.choice(addresses),
            )
        )
        data[at : at + width] = (value % (1 << 8 * width)).to_bytes(width, "little")
    for address, count, at in checked:
        if data[address : address + 4] == b"FHDB":
            data[at : at + 4] = bytes(4)
            block = data[address : address + count - 4]
        else:
            block = data[address:at]
        data[at : at + 4] = lookup3(bytes(block)).to_bytes(4, "little")
    return bytes(data)


def fields(rng, folder):
    path = folder / "a.h5"
    path.write_bytes(changed(rng, dataset, rng.randrange(4 * len(LAYOUTS))))
    return lambda: use_dataset(path)


def model_fields(rng, folder):
    path = folder / "a.h5"
    path.write_bytes(fuzz.signed(changed(rng, model, rng.randrange(2))))
    return lambda: use_model(path)


fuzz.KINDS.update({"fields": fields, "model_fields": model_fields})

if __name__ == "__main__":
    fuzz.main()
