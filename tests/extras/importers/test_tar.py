"""Tars of images and WebDataset shards: read in place, bounded, and nothing is written by a name."""

import gzip
import io
import os
import tarfile

import numpy as np
import pytest

from numdiff.errors import NumdiffError
from numdiff.extras.importers import tar
from numdiff.extras.importers.archives import BadArchive
from numdiff.extras.importers.tar_archive import tar_members
from tests.extras.importers.sources import colours, fill, tarred

FORMATS = [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]


def write(path, data):
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("mode", ["w", "w:gz"])
@pytest.mark.parametrize("form", FORMATS)
def test_a_tar_of_class_folders(imported, tmp_path, mode, form):
    """With names longer than a header's, a link, a hidden file, and names that lead out of it."""
    images = colours(5)
    link = tarfile.TarInfo("cat/link.png")
    link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
    folder = tarfile.TarInfo("cat")
    folder.type = tarfile.DIRTYPE
    long = "dog/" + "long-" * 17 + "b.png"
    files = {
        "cat": folder,
        "cat/a.png": images[0],
        "cat/link.png": link,
        "../../cat/b.png": images[1],
        "/dog/a.png": images[2],
        long: images[3],
        "dog/c.png": images[4],
        "dog/.hidden.png": images[0],
    }
    found = imported(write(tmp_path / "some.file", tarred(files, mode, form)))
    assert np.array_equal(found.images, images[[0, 1, 2, 4, 3]])
    assert found.names == ["cat", "cat", "dog", "dog", "dog"] and found.report.source == "tar"
    assert "1 link was left out, as nothing is unpacked (cat/link.png)." in found.report.notes
    assert os.listdir(tmp_path) == ["some.file"]


@pytest.mark.parametrize("ending, label", [("cls", b"7\n"), ("json", b'{"cls": 7}')])
def test_webdataset_shards(imported, tmp_path, ending, label):
    """Keys are of a shard; the labels are numbers, and words where they are."""
    images, folder = colours(4), tmp_path / "shards"
    folder.mkdir()
    other = label.replace(b"7", b"12")
    for shard, (first, second) in enumerate(((0, 1), (2, 3))):
        files = {
            "0001.png": images[second],
            f"0001.{ending}": other,
            "0000.png": images[first],
            f"0000.{ending}": label,
            "0000.txt": b"a caption",
        }
        write(folder / f"train-{shard:04d}.tar", tarred(files))
    write(folder / "README.md", b"text")
    found = imported(folder)
    assert np.array_equal(found.images, images)
    assert found.names == ["7", "12", "7", "12"] and found.classes == ["7", "12"]
    assert found.report.ignored == ["train-0000.tar/0000.txt", "train-0001.tar/0000.txt"]
    assert found.report.notes[0] == "The labels are those of the .cls or .json of each image."
    assert imported(folder, labels="none").labels is None


def test_labels_that_are_missing_or_are_none(imported, refused, tmp_path):
    image, path = colours(1)[0], tmp_path / "a.tar"
    for label, message in (
        (b"1", r"b.png of .* has no class in a .cls or .json, as the oth"),
        (b"\xff", "a.cls of .* is not UTF-8 text"),
        (bytes(65_537), "holds more than numdiff reads .a.cls has 65,537 bytes"),
    ):
        files = {"a.png": image, "a.cls": label, "b.png": image}
        refused(write(path, tarred(files)), message, NumdiffError)
    files = {"a.png": image, "a.json": b'{"width": 8}', "b.png": image, "b.json": b"{"}
    assert imported(write(path, tarred(files))).labels is None


def test_a_tar_that_is_cut_off(imported, refused, tmp_path):
    """At every block: within a file, and between two, where only the end's zeros are missing."""
    whole = tarred(dict(zip(("a.png", "b.png"), colours(2), strict=True)))
    end = len(whole.rstrip(b"\0")) // 512 * 512 + 512
    path = tmp_path / "cut.tar"
    for length in range(512, end + 1, 512):
        path.write_bytes(whole[:length])
        refused(path, "cut.tar' is truncated or damaged .it ends with", NumdiffError)
    imported(write(path, whole[: end + 512]))
    damaged = bytes([whole[0] ^ 1]) + whole[1:]
    message = "damaged .the tar's header at byte 0 is damaged"
    refused(write(path, damaged), message, NumdiffError)
    shards = fill(tmp_path / "shards", {"a.tar": whole, "b.tar": whole[:1024]})
    refused(shards, "shards' is truncated or damaged .b.tar: it ends with", NumdiffError)


def test_a_tar_without_end(refused, tmp_path, monkeypatch):
    """A gzip of few bytes that unpacks to many is refused before they are all written."""
    monkeypatch.setattr(tar, "FREE", 1 << 20)
    bomb = tarfile.TarInfo("a.png")
    bomb.size = 1 << 40
    head = bomb.tobuf()
    for data, message in (
        (
            gzip.compress(head) + gzip.compress(bytes(8 << 20)),
            "holds more than numdiff reads .it unpacks to more than",
        ),
        (head + bytes(1024), "truncated or damaged .it ends within a.png"),
    ):
        refused(write(tmp_path / "a.tar", data), message, NumdiffError)


@pytest.mark.parametrize("before, after", [(b"path=", b"path\0"), (b" path=", b"x path=")])
def test_damaged_headers(before, after):
    data = tarred({"é" * 80 + ".png": b"x"}, form=tarfile.PAX_FORMAT)
    assert before in data
    data = data.replace(before, after)
    with pytest.raises(BadArchive, match="header at byte 0 is damaged"):
        tar_members(io.BytesIO(data), len(data))


@pytest.mark.parametrize(
    "kind, sentence",
    [
        (tarfile.XHDTYPE, "announces 2,097,152 bytes"),
        (tarfile.GNUTYPE_LONGNAME, "announces 2,097,152 bytes"),
        (b"S", "a is a sparse file"),
    ],
)
def test_members_that_are_no_files(kind, sentence):
    member = tarfile.TarInfo("a")
    member.type, member.size = kind, 2 << 20
    data = member.tobuf() + bytes(3 << 20)
    with pytest.raises(BadArchive, match=sentence):
        tar_members(io.BytesIO(data), len(data))
