"""Tars of images and WebDataset shards: read in place, bounded, and nothing is written by a name."""

import gzip
import io
import os
import tarfile

import numpy as np
import pytest

from numdiff.errors import NumdiffError, UsageError
from numdiff.extras.importers import tar
from numdiff.extras.importers.archives import BadArchive
from numdiff.extras.importers.importing import import_dataset
from numdiff.extras.importers.tar_archive import tar_members
from tests.extras.importers.sources import colours, contents, png

FORMATS = [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]


def packed(files, mode="w", form=tarfile.GNU_FORMAT):
    """The bytes of a tar. files: {name: bytes, array, or a tarfile.TarInfo without contents}."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode=mode, format=form) as archive:
        for name, data in files.items():
            if isinstance(data, tarfile.TarInfo):
                archive.addfile(data)
                continue
            data = data if isinstance(data, bytes) else png(data)
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return stream.getvalue()


def write(path, data):
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("mode", ["w", "w:gz"])
@pytest.mark.parametrize("form", FORMATS)
def test_a_tar_of_class_folders(tmp_path, out, mode, form):
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
    report = import_dataset(write(tmp_path / "some.file", packed(files, mode, form)), out)
    written, labels, classes = contents(out)
    assert np.array_equal(written, images[[0, 1, 2, 4, 3]]) and classes == ["cat", "dog"]
    assert labels.tolist() == [0, 0, 1, 1, 1] and report.source == "tar"
    assert "1 link was left out, as nothing is unpacked (cat/link.png)." in report.notes
    assert os.listdir(tmp_path) == ["some.file"]


@pytest.mark.parametrize("ending, label", [("cls", b"7\n"), ("json", b'{"cls": 7}')])
def test_webdataset_shards(tmp_path, out, ending, label):
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
        write(folder / f"train-{shard:04d}.tar", packed(files))
    write(folder / "README.md", b"text")
    report = import_dataset(folder, out)
    written, labels, classes = contents(out)
    assert np.array_equal(written, images) and classes == ["7", "12"]
    assert labels.tolist() == [0, 1, 0, 1]
    assert report.ignored == ["train-0000.tar/0000.txt", "train-0001.tar/0000.txt"]
    assert report.notes[0] == "The labels are those of the .cls or .json of each image."
    import_dataset(folder, out, labels="none", force=True)
    assert contents(out)[1] is None


def test_labels_that_are_missing_or_are_none(tmp_path, out):
    image = colours(1)[0]
    files = {"a.png": image, "a.cls": b"1", "b.png": image}
    with pytest.raises(
        UsageError, match=r"b.png of .* has no class in a .cls or .json, as the oth"
    ):
        import_dataset(write(tmp_path / "a.tar", packed(files)), out)
    with pytest.raises(UsageError, match="a.cls of .* is not UTF-8 text"):
        import_dataset(write(tmp_path / "a.tar", packed({**files, "a.cls": b"\xff"})), out)
    with pytest.raises(NumdiffError, match="holds more than numdiff reads .a.cls has 65,537 bytes"):
        import_dataset(write(tmp_path / "a.tar", packed({**files, "a.cls": bytes(65_537)})), out)
    files = {"a.png": image, "a.json": b'{"width": 8}', "b.png": image, "b.json": b"{"}
    import_dataset(write(tmp_path / "a.tar", packed(files)), out)
    assert contents(out)[1] is None


def test_a_tar_that_is_cut_off(tmp_path, out):
    """At every block: within a file, and between two, where only the end's zeros are missing."""
    whole = packed(dict(zip(("a.png", "b.png"), colours(2), strict=True)))
    end = len(whole.rstrip(b"\0")) // 512 * 512 + 512
    for length in range(512, end + 1, 512):
        with pytest.raises(NumdiffError, match="cut.tar' is truncated or damaged .it ends with"):
            import_dataset(write(tmp_path / "cut.tar", whole[:length]), out)
    import_dataset(write(tmp_path / "cut.tar", whole[: end + 512]), out)
    damaged = bytearray(whole)
    damaged[3] ^= 1
    with pytest.raises(NumdiffError, match="damaged .the tar's header at byte 0 is damaged"):
        import_dataset(write(tmp_path / "cut.tar", bytes(damaged)), out, force=True)
    shards = tmp_path / "shards"
    shards.mkdir()
    write(shards / "a.tar", whole)
    write(shards / "b.tar", whole[:1024])
    with pytest.raises(NumdiffError, match="shards' is truncated or damaged .b.tar: it ends with"):
        import_dataset(shards, out, force=True)


def test_a_tar_without_end(tmp_path, out, monkeypatch):
    """A gzip of few bytes that unpacks to many is refused before they are all written."""
    monkeypatch.setattr(tar, "FREE", 1 << 20)
    bomb = tarfile.TarInfo("a.png")
    bomb.size = 1 << 40
    data = gzip.compress(bomb.tobuf()) + gzip.compress(bytes(8 << 20))
    with pytest.raises(
        NumdiffError, match="holds more than numdiff reads .it unpacks to more than"
    ):
        import_dataset(write(tmp_path / "a.tar.gz", data), out)
    with pytest.raises(NumdiffError, match="truncated or damaged .it ends within a.png"):
        import_dataset(write(tmp_path / "a.tar", bomb.tobuf() + bytes(1024)), out)


@pytest.mark.parametrize(
    "form, change, sentence",
    [
        (tarfile.PAX_FORMAT, (b"path=", b"path\0"), "header at byte 0 is damaged"),
        (tarfile.PAX_FORMAT, (b" path=", b"x path="), "header at byte 0 is damaged"),
    ],
)
def test_damaged_headers(form, change, sentence):
    data = packed({"é" * 80 + ".png": b"x"}, form=form)
    assert change[0] in data
    data = data.replace(*change)
    with pytest.raises(BadArchive, match=sentence):
        tar_members(io.BytesIO(data), len(data))


def test_headers_larger_than_any_name():
    for kind in (tarfile.XHDTYPE, tarfile.GNUTYPE_LONGNAME):
        member = tarfile.TarInfo("a")
        member.type, member.size = kind, 2 << 20
        data = member.tobuf() + bytes(3 << 20)
        with pytest.raises(BadArchive, match="announces 2,097,152 bytes"):
            tar_members(io.BytesIO(data), len(data))
    member = tarfile.TarInfo("a")
    member.type = b"S"
    data = member.tobuf() + bytes(1024)
    with pytest.raises(BadArchive, match="a is a sparse file"):
        tar_members(io.BytesIO(data), len(data))
