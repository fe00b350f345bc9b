"""Each structure that HDF5 1.8 to 2.0 write: indexes of chunks, with pages and levels, and heaps of
names."""

import h5py
import numpy as np
import pytest

from numdiff.files import Refused
from numdiff.hdf5 import open_hdf5
from numdiff.hdf5.lzf import unpack, unpack_lzf
from numdiff.hdf5.structure import lookup3
from tests.conftest import exhaustive, exhaustively

LATEST = ("v110", "v110"), ("latest", "latest")
OLD = ("earliest", "v108"), ("v108", "v108")


def written(path, version, make):
    with h5py.File(path, "w", libver=version) as file:
        make(file)
    return open_hdf5(path)


# shape, chunks, maxshape: the index that HDF5 1.10 chooses
INDEXES = {
    "single": ((7, 3), (7, 3), (7, 3)),
    "fixed": ((40, 9), (3, 2), (40, 9)),
    "fixed, may grow": ((40, 9), (3, 2), (90, 20)),
    "fixed, pages": ((3000, 3), (2, 2), (3000, 3)),
    "fixed, some pages": ((3000, 3), (2, 2), (9000, 4)),
    "extensible": ((40, 9), (3, 2), (None, 9)),
    "second axis": ((9, 40), (2, 3), (20, None)),
    "extensible, super blocks": ((1000, 3), (2, 2), (None, 3)),
    "tree": ((30, 40), (3, 4), (None, None)),
    "tree of levels": ((120, 60), (3, 2), (None, None)),
    "empty": ((0, 3), (2, 2), (None, 3)),
}


@pytest.mark.parametrize("shape, chunks, most", INDEXES.values(), ids=INDEXES)
@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gzip"])
def test_indexes_of_chunks(tmp_path, rng, shape, chunks, most, packed):
    values = rng.integers(0, 50, shape, dtype=np.int16)
    for version in (*LATEST, OLD[0]):
        with written(
            tmp_path / "a.h5",
            version,
            lambda file: file.create_dataset(
                "x",
                data=values,
                chunks=chunks,
                maxshape=most,
                compression="gzip" if packed else None,
            ),
        ) as file:
            assert np.array_equal(file.array("x").all(), values), version


@exhaustive
@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gzip"])
def test_pages_of_an_extensible_array(tmp_path, rng, packed):
    """…which it has above 131,000 chunks."""
    values = rng.integers(0, 50, (140_000, 1), dtype=np.int16)
    with written(
        tmp_path / "a.h5",
        LATEST[0],
        lambda file: file.create_dataset(
            "x",
            data=values,
            chunks=(1, 1),
            maxshape=(None, 1),
            compression="gzip" if packed else None,
        ),
    ) as file:
        assert np.array_equal(file.array("x").all(), values)


@pytest.mark.parametrize("version", [*LATEST, *OLD], ids="-".join)
def test_grown_and_shrunk(tmp_path, version):
    """As an importer writes images, and a user's program that takes some away again."""

    def make(file):
        x = file.create_dataset("x", (0, 4), np.uint8, maxshape=(None, 4), chunks=(8, 4))
        for start in range(0, 400, 40):
            x.resize(start + 40, 0)
            x[start:] = np.arange(start, start + 40)[:, None] % 256
        x.resize(101, 0)

    with written(tmp_path / "a.h5", version, make) as file:
        assert np.array_equal(file.array("x").all(), np.repeat(np.arange(101)[:, None], 4, 1))


@pytest.mark.parametrize("version", [*LATEST, *OLD], ids="-".join)
@pytest.mark.parametrize("count", [3, 9, *exhaustively(700)])
def test_names_and_attributes_in_any_number(tmp_path, version, count):
    def make(file):
        group = file.create_group("group").create_group("é")
        for i in range(count):
            group[f"name {i} {'x' * (i % 50)}"] = np.float32(i)
            file.attrs[f"number {i}"] = np.int16(-i)
        if version[1] != "v108" or version[0] == "v108":
            file.attrs["large"] = np.array([b"x" * 5000] * 20)

    with written(tmp_path / "a.h5", version, make) as file:
        names = file.names("group/é")
        assert names == sorted(f"name {i} {'x' * (i % 50)}" for i in range(count))
        for i in (0, count // 2, count - 1):
            assert file.array(f"name {i} {'x' * (i % 50)}", "/group/é").all() == i
            assert file.integer(f"number {i}") == -i
        assert file.strings("none") is None and file.array("none", "group") is None
        assert file.strings("large") in (None, ["x" * 5000] * 20)
        with pytest.raises(Refused, match="it has no group none"):
            file.names("none")


def test_numbers_of_every_kind(tmp_path):
    kinds = [
        np.dtype(order + kind) for order in "<>" for kind in "i1 u1 i2 u2 i4 u8 f2 f4 f8".split()
    ]

    def make(file):
        for i, kind in enumerate(kinds):
            file[f"{i}"] = np.arange(3).astype(kind)
            file.attrs[f"{i}"] = np.arange(3).astype(kind)
        file["nothing"] = h5py.Empty("f4")
        file["true"], file["pair"], file["complex"] = (
            np.array([True]),
            np.zeros(2, "i4,f4"),
            np.zeros(2, "c8"),
        )
        file.create_dataset("list", (2,), h5py.vlen_dtype("i4"))
        file.attrs["empty"] = h5py.Empty("S1")
        file["type"] = np.dtype("<f4")
        file.create_dataset("of the type", data=[1, 2], dtype=file["type"])

    for version in (*LATEST, *OLD):
        with written(tmp_path / "a.h5", version, make) as file:
            for i, kind in enumerate(kinds):
                found = file.array(f"{i}")
                assert found.dtype == kind.newbyteorder("=") and found.all().tolist() == [0, 1, 2]
                if kind.kind != "f":
                    assert file.strings(f"{i}") == ["0", "1", "2"]
            assert file.array("of the type").all().tolist() == [1, 2]
            assert file.array("nothing").shape == (0,) and file.strings("empty") == []
            for name in ("true", "pair", "complex", "list"):
                with pytest.raises(Refused, match=f"`{name}`"):
                    file.array(name)


def test_what_its_writer_has_not_closed(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w", libver="latest") as file:
        file["x"] = [1]
        file.flush()
        (tmp_path / "b.h5").write_bytes((tmp_path / "a.h5").read_bytes())
    with pytest.raises(Refused, match="has not closed it|truncated"):
        open_hdf5(tmp_path / "b.h5")


def test_checksums():
    # of its author
    assert lookup3(b"") == 0xDEADBEEF and lookup3(b"Four score and seven years ago") == 0x17770551


def test_lzf():
    assert (
        unpack_lzf(b"\x02abc\x20\x02", 99) == b"abcabc"
        and unpack_lzf(b"\x00a\xe0\x08\x00", 99) == b"a" * 18
    )
    for damaged in (
        b"\x02ab",
        b"\x20\x00",
        b"\x00a\x20",
        b"\x00a\xe0",
        b"\x00a\xe0\xff\x00" * 2,
        b"\x1f" + b"a" * 32,
    ):
        # the text itself
        assert unpack(np.frombuffer(damaged, np.uint8), np.zeros(31, np.uint8)) == -1
        with pytest.raises(Refused, match="lzf"):
            unpack_lzf(damaged, 31)
