"""The strict reader of HDF5: what h5py writes is read bit by bit, in every layout; what leads out
is refused."""

import json
import os
import subprocess
import sys

import h5py
import numpy as np
import pytest

from numdiff.data.dataset import open_dataset
from numdiff.errors import NumdiffError
from numdiff.files import Refused
from numdiff.hdf5 import is_hdf5, open_hdf5
from numdiff.hdf5.array import fletcher32
from numdiff.training.checkpoint import load_checkpoint, save_checkpoint

VERSIONS = [("earliest", "v108"), ("v108", "latest"), ("v110", "v110"), ("latest", "latest")]
CLASSES = ["a", "bé", "c" * 300, ""]


@pytest.mark.parametrize("version", VERSIONS, ids="-".join)
def test_reads_what_h5py_writes(tmp_path, rng, version):
    """Every layout, filter and index of chunks; rows in portions that fit the chunks and that do
    not."""
    for packing, shuffle, checksum in (
        (None, False, False),
        (None, False, True),
        ("gzip", False, False),
        ("gzip", True, True),
        ("lzf", True, False),
    ):
        for shape, chunks, growing in (
            ((40, 8, 8, 3), (16, 8, 8, 3), 1),
            ((37, 5, 7, 3), (10, 3, 4, 2), 4),
            ((9, 4), None, 0),
            ((5000,), True, 0),
            ((3, 2), (2, 2), 2),
        ):
            if chunks is None and (packing or shuffle or checksum):
                continue
            for dtype in ("u1", ">f4"):
                values = (rng.standard_normal(shape) * 100).astype(dtype)
                with h5py.File(tmp_path / "a.h5", "w", libver=version) as file:
                    file.create_dataset(
                        "images",
                        data=values,
                        chunks=chunks,
                        compression=packing,
                        shuffle=shuffle,
                        fletcher32=checksum,
                        maxshape=(None,) * growing + shape[growing:] if growing else None,
                    )
                    file.attrs.create("classes", CLASSES, dtype=h5py.string_dtype())
                    file.attrs["plain"], file.attrs["number"] = np.bytes_("x"), np.uint16(7)
                with open_hdf5(tmp_path / "a.h5") as file:
                    found = file.array("images")
                    assert found.dtype == np.dtype(dtype).newbyteorder("=") and found.shape == shape
                    assert np.array_equal(found.all(), values)
                    assert np.array_equal(found.read(1, 3), values[1:3])
                    assert np.array_equal(found.read(2, 10**9), values[2:])
                    assert file.strings("classes") == CLASSES and file.strings("plain") == ["x"]
                    assert (
                        file.integer("number") == 7
                        and file.array("none") is None
                        and file.strings("none") is None
                    )


@pytest.mark.parametrize("more", [0, 6000])
def test_many_names(tmp_path, more):
    """Above about 4,000 names, or eight attributes, HDF5 keeps them outside of the object's header."""
    names = [f"name {i}" for i in range(20 + more)]
    with h5py.File(tmp_path / "a.h5", "w", libver=("v108", "latest")) as file:
        for i in range(12):
            file.attrs[f"more {i}"] = i
        file.attrs.create("classes", names, dtype=h5py.string_dtype())
    with open_hdf5(tmp_path / "a.h5") as file:
        assert file.strings("classes") == names


def test_compact_values_and_types_that_are_no_numbers(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        plan = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        plan.set_layout(h5py.h5d.COMPACT)
        h5py.h5d.create(
            file.id, b"compact", h5py.h5t.NATIVE_INT32, h5py.h5s.create_simple((3,)), plan
        ).write(h5py.h5s.ALL, h5py.h5s.ALL, np.array([1, 2, 3], np.int32))
        file["words"] = np.array([b"ab", b"c"])
        file["variable"] = ["ab", "c"]
        file.create_group("group")
    with open_hdf5(tmp_path / "a.h5") as file:
        assert file.array("compact").all().tolist() == [1, 2, 3]
        assert file.array("words").all().tolist() == [b"ab", b"c"]
        for name in ("variable", "group"):
            with pytest.raises(Refused, match=f"`{name}`"):
                file.array(name)


def test_fletcher32():
    data = np.random.default_rng(0).integers(0, 256, (1 << 19) + 1, dtype=np.uint8).tobytes()
    words = np.frombuffer(data + b"\0", ">u2").astype(object)
    assert fletcher32(data) == [int(words.sum()) % 65535, int(np.cumsum(words).sum()) % 65535]


# What is refused ----------------------------------------------------------------------------------


def external_link(folder, file):
    file["images"] = h5py.ExternalLink(folder / "other.h5", "images")


def soft_link(folder, file):
    file["images"] = h5py.SoftLink("/images")


def soft_link_to_itself_in_a_group(folder, file):
    file["a"], file["images"] = h5py.SoftLink("/images"), h5py.SoftLink("/a")


def external_storage(folder, file):
    (folder / "raw").write_bytes(bytes(4 * 8 * 8 * 3))
    file.create_dataset(
        "images", (4, 8, 8, 3), np.uint8, external=[(folder / "raw", 0, h5py.h5f.UNLIMITED)]
    )


def external_fifo(folder, file):
    file.create_dataset(
        "images", (4, 8, 8, 3), np.uint8, external=[(folder / "fifo", 0, h5py.h5f.UNLIMITED)]
    )


def virtual(folder, file, source="other.h5", shape=(4, 8, 8, 3)):
    layout = h5py.VirtualLayout(shape, np.uint8)
    layout[...] = h5py.VirtualSource(folder / source, "images", shape)
    file.create_virtual_dataset("images", layout)


def virtual_of_itself(folder, file):
    virtual(folder, file, "a.h5")


def virtual_of_a_fifo(folder, file):
    virtual(folder, file, "fifo")


def virtual_without_end(folder, file):
    space = h5py.h5s.create_simple((4, 8, 8, 3), (h5py.h5s.UNLIMITED, 8, 8, 3))
    space.select_hyperslab((0, 0, 0, 0), (h5py.h5s.UNLIMITED, 1, 1, 1), (1, 1, 1, 1), (1, 8, 8, 3))
    plan = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    plan.set_virtual(space, os.fsencode(folder / "fifo"), b"images", space)
    h5py.h5d.create(file.id, b"images", h5py.h5t.NATIVE_UINT8, space, plan)


def never_stored(folder, file):
    file.create_dataset("images", (2, 60000, 60000, 1), np.uint8)


def never_stored_in_chunks(folder, file):
    file.create_dataset(
        "images", (1 << 40, 8, 8, 3), np.uint8, chunks=(64, 8, 8, 3), compression="gzip"
    )


def half_stored(folder, file):
    images = file.create_dataset(
        "images", (100, 8, 8, 3), np.uint8, chunks=(10, 8, 8, 3), compression="gzip"
    )
    images[:50] = 1


def large_chunk(folder, file):
    file.create_dataset(
        "images",
        (4, 8, 8, 3),
        np.uint8,
        maxshape=(None, 8, 8, 3),
        chunks=(13_000_000, 8, 8, 3),
        compression="gzip",
    )[:0] = 0


def early_chunks(folder, file):
    plan = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    plan.set_chunk((1, 1, 1, 1))
    plan.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    h5py.h5d.create(
        file.id, b"images", h5py.h5t.NATIVE_UINT8, h5py.h5s.create_simple((1 << 40, 8, 8, 3)), plan
    )


def large_image(folder, file):
    file.create_dataset(
        "images",
        data=np.zeros((1, 4000, 4000, 3), np.uint8),
        chunks=(1, 400, 4000, 3),
        compression="gzip",
    )


def other_filter(folder, file):
    file.create_dataset(
        "images", data=np.zeros((4, 8, 8, 3), np.uint8), chunks=(4, 8, 8, 3), scaleoffset=0
    )


def gzip_bomb(folder, file):
    import zlib

    images = file.create_dataset(
        "images", (4, 8, 8, 3), np.uint8, chunks=(4, 8, 8, 3), compression="gzip"
    )
    images[:] = 0
    images.id.write_direct_chunk((0, 0, 0, 0), zlib.compress(bytes(1 << 20), 9))


def shared_chunks(folder, file):
    """All chunks in the index are at one place."""
    images = file.create_dataset("images", (64, 8, 8, 3), np.uint8, chunks=(1, 8, 8, 3))
    images[:] = 1
    file.flush()
    offsets = [images.id.get_chunk_info(i).byte_offset for i in range(64)]
    file.close()
    data = (folder / "a.h5").read_bytes()
    for offset in offsets[1:]:
        data = data.replace(offset.to_bytes(8, "little"), offsets[0].to_bytes(8, "little"))
    (folder / "a.h5").write_bytes(data[:-8000])


def large_label(folder, file):
    file["images"], file["labels"] = np.zeros((4, 8, 8, 3), np.uint8), np.array([0, 1, 2, 1 << 40])


def label_bomb(folder, file):
    """Labels of which all chunks are packed to nearly nothing."""
    count = (256 << 20) // 8 + 1_000_000
    file.create_dataset(
        "images",
        data=np.zeros((count, 1, 1, 1), np.uint8),
        chunks=(1 << 20, 1, 1, 1),
        compression="gzip",
    )
    file.create_dataset(
        "labels", data=np.zeros(count, np.int64), chunks=(1 << 20,), compression="gzip"
    )


def label_links(folder, file):
    file["images"], file["labels"] = (
        np.zeros((4, 8, 8, 3), np.uint8),
        h5py.ExternalLink("fifo", "labels"),
    )


def endless_heap(folder, file):
    """A heap whose objects go round in a circle makes HDF5 itself loop for ever."""
    file["images"], file["labels"] = np.zeros((4, 8, 8, 3), np.uint8), np.zeros(4, int)
    file.attrs.create("classes", ["a" * 40], dtype=h5py.string_dtype())
    file.close()
    data = bytearray((folder / "a.h5").read_bytes())
    at = data.rindex(b"GCOL") + 16
    data[at + 8 : at + 16] = (1 << 63).to_bytes(8, "little")
    (folder / "a.h5").write_bytes(data)


def shared_names(folder, file):
    """Thousands of names that are all the same megabyte of the file."""
    file["images"], file["labels"] = np.zeros((4, 8, 8, 3), np.uint8), np.zeros(4, int)
    file.attrs.create(
        "classes", ["a" * (1 << 20)] + [f"{i}" for i in range(3000)], dtype=h5py.string_dtype()
    )
    file.close()
    data = bytearray((folder / "a.h5").read_bytes())
    first = data.index((1 << 20).to_bytes(4, "little") + b"\0", 1000)
    data[first : first + 16 * 3001] = data[first : first + 16] * 3001
    (folder / "a.h5").write_bytes(data)


def many_claimed_names(folder, file):
    file["images"], file["labels"] = np.zeros((4, 8, 8, 3), np.uint8), np.zeros(4, int)
    file.attrs.create("classes", np.zeros(1, "S60000"))
    file.close()
    data = (folder / "a.h5").read_bytes()
    (folder / "a.h5").write_bytes(
        data.replace((60000).to_bytes(4, "little"), (1 << 31).to_bytes(4, "little"), 1)
    )


ATTACKS = [
    value
    for value in list(globals().values())
    if callable(value)
    and getattr(value, "__code__", None)
    and value.__code__.co_varnames[:2] == ("folder", "file")
]


def write(folder, attack):
    os.mkfifo(folder / "fifo")
    with h5py.File(folder / "other.h5", "w") as file:
        file["images"] = np.zeros((4, 8, 8, 3), np.uint8)
    with h5py.File(folder / "a.h5", "w", libver=("v108", "latest")) as file:
        attack(folder, file)
    return folder / "a.h5"


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.__name__)
def test_what_leads_out_or_claims_too_much_is_refused(tmp_path, attack):
    with pytest.raises(NumdiffError) as caught:
        open_dataset(write(tmp_path, attack))
    assert "a.h5" in str(caught.value) and str(caught.value).endswith(".")


LIMITED = """
import json, resource, sys, time
from numdiff.data.dataset import open_dataset
from numdiff.errors import NumdiffError
before, reported = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, []
resource.setrlimit(resource.RLIMIT_CPU, (60, 60))
for path in sys.argv[1:]:
    start = time.process_time()
    try:
        open_dataset(path)
    except NumdiffError as error:
        reported.append([str(error), time.process_time() - start])
print(json.dumps([reported, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before]))
"""


def test_refusals_take_little_memory_and_time(tmp_path):
    paths = []
    for attack in ATTACKS:
        (tmp_path / attack.__name__).mkdir()
        paths.append(str(write(tmp_path / attack.__name__, attack)))
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, *paths], capture_output=True, text=True, check=True
    )
    reported, kibibytes = json.loads(done.stdout)
    assert (
        len(reported) == len(ATTACKS)
        and max(seconds for _, seconds in reported) < 2
        and kibibytes < 200 << 10
    )


def test_checkpoints_are_read_alike(tmp_path):
    """A link or a claim in a checkpoint, its checksums all right, is refused as in a dataset."""

    def rewritten(change):
        from numdiff.training.checkpoint import LAST_LINE, LAST_LINE_BYTES, _file_checksum

        save_checkpoint(tmp_path / "c.h5", {"parameters": np.ones(100, np.float32)}, {"step": 1})
        data = (tmp_path / "c.h5").read_bytes()[:-LAST_LINE_BYTES]
        (tmp_path / "c.h5").write_bytes(data)
        with h5py.File(tmp_path / "c.h5", "r+") as file:
            change(file)
        with open(tmp_path / "c.h5", "r+b", buffering=0) as file:
            size = file.seek(0, 2)
            file.write(LAST_LINE % _file_checksum(file, size))
        return tmp_path / "c.h5"

    def replaced(name, value):
        def change(file):
            del file[name]
            file[name] = value

        return change

    os.mkfifo(tmp_path / "fifo")
    virtual_layout = h5py.VirtualLayout((100,), np.float32)
    virtual_layout[:] = h5py.VirtualSource(str(tmp_path / "fifo"), "x", (100,))
    load_checkpoint(rewritten(lambda file: None))
    for change in (
        replaced("meta", h5py.ExternalLink("fifo", "x")),
        replaced("buffers", h5py.SoftLink("/")),
        replaced("buffers/parameters", h5py.ExternalLink(str(tmp_path / "fifo"), "x")),
        replaced("buffers/parameters", np.ones(3)),
        replaced("meta", np.bytes_(b'{"step": NaN}')),
        replaced("meta", 3),
        replaced("meta", np.bytes_(b"[" * 100_000)),
        replaced("buffers", 3),
        lambda file: file.attrs.__setitem__("version", "x"),
        lambda file: file.attrs.__delitem__("version"),
        lambda file: file["buffers"].create_virtual_dataset("m", virtual_layout),
        lambda file: file["buffers"].create_dataset("m", (1 << 40,), np.float32),
    ):
        with pytest.raises(
            NumdiffError, match=r"c\.h5 is truncated or damaged \(.*\); use another checkpoint"
        ):
            load_checkpoint(rewritten(change))


def test_is_hdf5(tmp_path):
    (tmp_path / "a").write_bytes(b"\x89HDF")
    assert not is_hdf5(tmp_path / "a")
    with pytest.raises(Refused, match="it is not an HDF5 file"):
        open_hdf5(tmp_path / "a")


def test_rows_are_written_to_an_array_of_their_form_only(tmp_path):
    values = np.arange(40, dtype=np.float32).reshape(10, 4)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("images", data=values, chunks=(4, 4))
        file.create_dataset("columns", data=values, chunks=(4, 2))
    with open_hdf5(tmp_path / "a.h5") as file:
        for name, plain in (("images", True), ("columns", False)):
            array, out = file.array(name), np.full((6, 4), -1, np.float32)
            assert (
                array.plain == plain
                and array.read(3, 9, out) is out
                and np.array_equal(out, values[3:9])
            )
            for wrong in (
                np.empty((5, 4), np.float32),
                np.empty((6, 4)),
                np.empty((6, 8), np.float32)[:, ::2],
            ):
                with pytest.raises(ValueError, match="rows 3 to 9 are float32"):
                    array.read(3, 9, wrong)
