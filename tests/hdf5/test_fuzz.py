"""A few files with changed fields and right checksums; `python -m tests.hdf5.fuzz` makes as many as
one likes."""

import struct

import h5py
import numpy as np
import pytest

from numdiff.data.dataset import open_dataset
from numdiff.errors import NumdiffError
from numdiff.hdf5.structure import lookup3
from tests.conftest import exhaustively, needs
from tests.data.fuzz import run_apart


@needs("posix")
@pytest.mark.parametrize(
    "kind, start, count",
    [
        ("fields", 0, 25),
        ("model_fields", 0, 6),
        *exhaustively(("fields", 1000, 1500), ("model_fields", 1000, 300)),
    ],
)
def test_changed_fields_are_read_or_refused_in_one_sentence(kind, start, count):
    from tests.hdf5 import fuzz  # noqa: F401 - it adds its kinds

    assert run_apart(kind, range(start, start + count)) == []


def signed(data, address, count):
    data[address + count - 4 : address + count] = lookup3(
        bytes(data[address : address + count - 4])
    ).to_bytes(4, "little")


def type_of_a_tree(data):
    """The tree of the root's attributes says that it is of another type."""
    at = data.index(b"BTHD")
    data[at + 5] = 0
    signed(data, at, 38)


def largest_index(data):
    """The largest index of an extensible array is 2⁵⁶."""
    at = data.index(b"EAHD")
    data[at + 44 : at + 52] = struct.pack("<Q", 1 << 56)
    signed(data, at, 72)


def tree_in_itself(data):
    """A node of a tree is its own child."""
    at = data.index(b"TREE\1")
    data[at + 5] = 1
    data[at + 24 + 48 : at + 24 + 56] = struct.pack("<Q", at)


@pytest.mark.parametrize(
    "change, version",
    [(type_of_a_tree, "v110"), (largest_index, "v110"), (tree_in_itself, "earliest")],
)
def test_what_leads_in_circles_or_nowhere(tmp_path, change, version):
    with h5py.File(tmp_path / "a.h5", "w", libver=(version, "v110")) as file:
        file.create_dataset(
            "images",
            data=np.zeros((8, 8, 8, 3), np.uint8),
            chunks=(2, 8, 8, 3),
            maxshape=(None, 8, 8, 3),
        )
        file["labels"] = np.arange(8) % 2
        file.attrs.create("classes", ["a", "b"], dtype=h5py.string_dtype())
        for i in range(20):
            file.attrs[f"more {i}"] = i
    data = bytearray((tmp_path / "a.h5").read_bytes())
    change(data)
    (tmp_path / "a.h5").write_bytes(data)
    with pytest.raises(
        NumdiffError,
        match=r"a\.h5' is damaged or not a plain dataset \(.*\): copy or import it again",
    ):
        open_dataset(tmp_path / "a.h5")
