"""The importers, fed with folders and zips; their labels."""

import json
import os

import h5py
import numpy as np
import pytest
from PIL import Image

from numdiff.errors import NumdiffError
from tests.extras.importers.sources import colours, fill, png, saved, zipped

PICTURE = png(colours(1)[0])


def test_classes_are_the_folders(imported, packed, out):
    images = colours(5)
    source = packed(
        {
            "dog/a.png": images[2],
            "cat/deep/b.png": images[0],
            "cat/deep/c.png": images[1],
            "eel/1.png": images[3],
            "eel/2.png": images[4],
            ".hidden/x.png": images[0],
            "__MACOSX/cat/._b.png": b"?",
        }
    )
    found = imported(source)
    assert found.names == ["cat", "cat", "dog", "eel", "eel"]
    assert found.classes == ["cat", "dog", "eel"] and np.array_equal(found.images, images)
    report = found.report
    assert report.shape == (5, 8, 8, 3) and report.counts == [2, 1, 2]
    assert report.unreadable == report.ignored == []
    first = report.sentences()[0]
    assert "5 images of 8×8×3" in first and "cat 2, dog 1, eel 2" in first
    with h5py.File(out) as file:
        assert file["images"].chunks == (64, 8, 8, 3) and file["labels"].dtype == np.uint8
        names = [name.decode().split("/")[-1] for name in file["names"]]
    assert names == ["b.png", "c.png", "a.png", "1.png", "2.png"]


def test_no_folders_means_no_classes(imported, packed):
    found = imported(packed({f"{i}.png": image for i, image in enumerate(colours(3))}))
    assert found.labels is None and found.classes == []
    assert np.array_equal(found.images, colours(3))


def test_order_of_folders_with_numbers(imported, packed):
    """As numbers, which the report says where ImageFolder's order differs; or as words, as there."""
    source = packed({f"{i}/a.png": colours(12)[i] for i in range(12)})
    numbers = [str(i) for i in range(12)]
    found = imported(source)
    assert found.classes == numbers
    (note,) = found.report.notes
    assert "order of their numbers (0, 1, 2, …)" in note and "(0, 1, 10, …)" in note
    assert "add --class-order words" in found.report.sentences()[-1]
    words = imported(source, order="words")
    assert words.classes == sorted(numbers) and not words.report.notes
    for each in (found, words):
        assert np.array_equal(each.images, colours(12)[[int(name) for name in each.names]])


def test_classes_by_prefix(imported, refused, packed):
    """guided-diffusion's names; its indices with --class-order words."""
    names = ["x/10_a.png", "2_b_c.png", "10_c.png", "y/3_d.png"]
    source = packed(dict(zip(names, colours(4), strict=True)))
    found = imported(source, labels="prefix")
    assert found.classes == ["2", "3", "10"] and found.report.counts == [1, 1, 2]
    assert "--class-order words" in found.report.notes[0]
    assert imported(source, labels="prefix", order="words").classes == ["10", "2", "3"]
    refused(
        packed({"a_b.png": PICTURE, "e.png": PICTURE}),
        "e.png has no _ after a class in the name",
        labels="prefix",
    )
    refused(source, "--class-order alphabet is unknown", order="alphabet")


def test_labels_option(imported, refused, packed):
    source = packed({"a/1.png": PICTURE, "b/2.png": PICTURE, "labels.csv": b"1.png,x\n2.png,x\n"})
    assert imported(source).classes == ["x"]
    assert imported(source, labels="folders").classes == ["a", "b"]
    assert imported(source, labels="none").labels is None
    refused(source, "is unknown: use auto", labels="folder")
    refused(source, "none.csv' cannot be read", NumdiffError, labels="none.csv")


def test_image_next_to_class_folders(imported, refused, packed):
    source = packed({"a/1.png": PICTURE, "b/2.png": PICTURE, "3.png": PICTURE})
    refused(source, "3.png is next to the class folders .*--labels none")
    assert len(imported(source, labels="none").images) == 3


CSV = "file,label\na.png,cat\nsub/b.png,dog\nc.png,cat\n"


PAIRS = [("a.png", "cat"), ("sub/b.png", "dog"), ("c.png", "cat")]


@pytest.mark.parametrize(
    "name, text",
    [
        pytest.param("labels.csv", CSV.replace(",", ";"), id="semicolons"),
        pytest.param("labels.tsv", CSV.replace(",", "\t"), id="tabs"),
        pytest.param("labels.csv", CSV.partition("\n")[2], id="no heading"),
        pytest.param(
            "labels.csv",
            "id,split,class\na,train,cat\nb,test,dog\nc,train,cat\n",
            id="other columns, no suffixes",
        ),
        pytest.param("labels.json", json.dumps(PAIRS), id="json list"),
        pytest.param(
            "labels.json",
            json.dumps([{"file": name, "label": label} for name, label in PAIRS]),
            id="json of dicts",
        ),
    ],
)
def test_labels_files(imported, packed, name, text):
    """Forms in addition to those of `FORMATS` in test_labels.py."""
    images = colours(3)
    files = {"a.png": images[0], "c.png": images[1], "sub/b.png": images[2]}
    found = imported(packed({**files, name: text.encode()}))
    assert found.names == ["cat", "cat", "dog"] and found.classes == ["cat", "dog"]
    assert np.array_equal(found.images, images) and found.report.ignored == []


@pytest.mark.parametrize(
    "name, text, message",
    [
        ("labels.csv", b"x.png,1\ny.png,2\n", "names none of the images"),
        ("labels.csv", b"", "is empty"),
        ("labels.csv", b"\xff\xfe\x00", "not UTF-8"),
        ("labels.json", b"{", "not valid JSON"),
        ("labels.json", b"[" * 100000, "not valid JSON"),
        ("labels.json", b"3", "a format that numdiff knows"),
        (
            "labels.json",
            b'{"a.png": [1, 2], "b.png": [1, 2]}',
            "must be a word or a number",
        ),
        (
            "labels.json",
            b'{"labels": {"a.png": 1, "b.png": 2}, "classes": ["x", "y"]}',
            "label 2, which is none of its 2 classes",
        ),
    ],
)
def test_wrong_labels_files(refused, packed, out, name, text, message):
    refused(packed({"a.png": PICTURE, "b.png": PICTURE, name: text}), message)
    assert not out.exists()


def test_labels_file_elsewhere_and_ambiguous_names(imported, refused, tmp_path):
    source = fill(tmp_path / "s", {"x/1.png": PICTURE, "y/1.png": PICTURE})
    labels = tmp_path / "mine.csv"
    labels.write_text("x/1.png,b\ny/1.png,a\nz/9.png,a\n")
    found = imported(source, labels=labels)
    assert found.names == ["b", "a"] and "also names 1 that" in found.report.notes[0]
    labels.write_text("1.png,b\n")
    refused(source, "several images have this name", labels=labels)


def test_unreadable_images_are_named_and_left_out(imported, packed):
    images = colours(3, 64)
    whole = saved(Image.fromarray(images[0]), "JPEG")
    found = imported(
        packed(
            {
                "a.png": images[0],
                "b.png": images[1],
                "c.png": b"",
                "d.jpg": whole[:-300],
                "e.png": b"this is no image",
                "f.png": png(images[1])[:60],
                "g": png(images[2]),
                "notes.txt": b"hello",
                "page.html": b"<html>",
                "h.heic": b"\0\0\0\x18ftypheic0000",
                "z/Thumbs.db": b"?",
            }
        )
    )
    report = found.report
    assert np.array_equal(found.images, images)
    reasons = {name.split("/")[-1]: why for name, why in report.unreadable}
    assert list(reasons) == ["c.png", "d.jpg", "e.png", "f.png", "h.heic"]
    assert reasons["c.png"] == "empty file"
    assert [name.split("/")[-1] for name in report.ignored] == ["notes.txt", "page.html"]
    text = " ".join(report.sentences())
    for said in ("5 unreadable images were left out", "d.jpg: ", "2 other files were left out"):
        assert said in text


def test_nothing_to_import(refused, packed, out, tmp_path):
    refused(
        packed({"a.png": b"?", "b.png": b""}),
        "none of the 2 images .* could be read .*a.png: ",
        NumdiffError,
    )
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", "empty' holds no images: check", NumdiffError)
    refused(
        fill(tmp_path / "text", {"a.txt": b"hello"}),
        r"holds no images \(1 other files\)",
        NumdiffError,
    )
    refused(zipped(tmp_path / "empty.zip", {}), "holds no images", NumdiffError)
    refused(tmp_path / "none", "nothing at")
    assert not out.exists()


def test_many_images_keep_their_order(imported, packed):
    files = {f"{i:03d}.png": np.full((4, 4), i % 256, np.uint8) for i in range(300)}
    assert imported(packed(files)).images[:, 0, 0, 0].tolist() == [i % 256 for i in range(300)]


def test_two_imports_are_the_same_bytes(imported, packed, out):
    source = packed({f"{i % 3}/{i}.png": image for i, image in enumerate(colours(70))})
    imported(source)
    first = out.read_bytes()
    imported(source)
    assert out.read_bytes() == first


def test_names_in_zips_write_nowhere(imported, tmp_path, out):
    names = ("../../evil.png", "/etc/evil2.png", "..\\x.png")
    source = zipped(tmp_path / "a.zip", dict.fromkeys(names, PICTURE))
    before = sorted(os.walk(tmp_path))
    imported(source, labels="none")
    assert sorted(os.walk(tmp_path)) == before
    with h5py.File(out) as file:
        assert sorted(file["names"]) == [b"etc/evil2.png", b"evil.png", b"x.png"]


def test_damaged_zips(imported, refused, tmp_path):
    rng = np.random.default_rng(0)
    noise = rng.integers(0, 256, (3, 32, 32, 3), dtype=np.uint8)
    path = zipped(tmp_path / "a.zip", {f"{i}.png": image for i, image in enumerate(noise)})
    data = path.read_bytes()
    (tmp_path / "short.zip").write_bytes(data[: len(data) // 2])
    refused(tmp_path / "short.zip", "short.zip' is truncated or damaged", NumdiffError)
    damaged = bytearray(data)
    damaged[1000:1100] = bytes(100)  # within the first image
    (tmp_path / "damaged.zip").write_bytes(damaged)
    found = imported(tmp_path / "damaged.zip")
    assert [name for name, _ in found.report.unreadable] == ["0.png"]
    assert np.array_equal(found.images, noise[1:])
    locked = bytearray(data)
    locked[data.index(b"PK\1\2") + 8] |= 1
    (tmp_path / "locked.zip").write_bytes(locked)
    refused(tmp_path / "locked.zip", "password")


def test_what_is_no_file_is_named(imported, tmp_path):
    source = fill(tmp_path / "s", {"a/1.png": PICTURE, "b/2.png": PICTURE})
    os.symlink(tmp_path / "gone", source / "b" / "gone.png")
    os.symlink("round.png", source / "b" / "round.png")
    os.mkfifo(source / "b" / "fifo.png")
    os.mkfifo(source / "b" / "fifo")
    report = imported(source).report
    assert report.shape[0] == 2 and report.ignored == ["b/fifo"]
    assert report.unreadable == [
        ("b/fifo.png", "it is a FIFO"),
        ("b/gone.png", "it is a link that leads to no file"),
        ("b/round.png", "it is a link that leads to no file"),
    ]


def test_names_that_a_zip_has_twice(imported, tmp_path):
    earlier, later = colours(2)
    path = zipped(tmp_path / "a.zip", {"a.png": earlier, "./a.png": later, "b.png": earlier})
    found = imported(path)
    assert np.array_equal(found.images, [later, earlier])
    said = "1 file was left out, as later ones in the zip have the same names (a.png)."
    assert said in found.report.sentences()


def test_names_that_are_not_utf8(imported, tmp_path):
    folder = fill(tmp_path / "s", {"a/1.png": PICTURE})
    os.makedirs(os.fsencode(folder) + b"/caf\xe9")
    with open(os.fsencode(folder) + b"/caf\xe9/2.png", "wb") as file:
        file.write(PICTURE)
    found = imported(folder)
    assert found.classes == ["a", "caf\\udce9"]
    assert "caf" in found.report.sentences()[0].encode().decode()
