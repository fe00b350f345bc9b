"""The importers, fed with files that are put together here byte by byte or by the standard library."""
import csv
import errno
import gzip
import io
import json
import os
import pickle
import struct
import subprocess
import tarfile
import threading
import zipfile
import zlib

import h5py
import numpy as np
import pytest
from PIL import Image

from numdiff.data.dataset import open_dataset
from numdiff.data.importers import import_dataset
from numdiff.data.importers import writer as writer_module
from numdiff.data.importers.cifar import read_pickle
from numdiff.errors import NumdiffError, UsageError
from numdiff.evaluation.sources import open_source
from numdiff.training.sample_files import read_mask, read_picture
from numdiff.unpickle import RefusedError
from tests.conftest import needs
from tests.forked import forked


@pytest.fixture
def out(tmp_path_factory):
    """The file to write; whatever the test did, nothing else may be left beside it."""
    folder = tmp_path_factory.mktemp("out")
    yield folder / "out.h5"
    assert [name for name in os.listdir(folder) if name != "out.h5"] == []


def contents(path):
    with open_dataset(path) as dataset:
        return dataset.read(np.arange(len(dataset))), dataset.labels, dataset.classes


def colours(count, size=8, channels=3):
    """Images of one colour each, another for every image: they survive JPEG and resizing."""
    values = (np.arange(count)[:, None] * 40 + np.arange(channels) * 7) % 256
    return np.broadcast_to(values[:, None, None], (count, size, size, channels)).astype(np.uint8).copy()


def png(array):
    """PNG bytes of an array (H, W), (H, W, 3) or (H, W, 4), uint8 or uint16, put together by hand."""
    colour_type = {1: 0, 2: 4, 3: 2, 4: 6}[array.shape[2] if array.ndim == 3 else 1]
    rows = b"".join(b"\0" + row.astype(array.dtype.newbyteorder(">")).tobytes() for row in array)
    header = struct.pack(">IIBBBBB", array.shape[1], array.shape[0], 8 * array.itemsize, colour_type, 0, 0, 0)
    return png_of_chunks((b"IHDR", header), (b"IDAT", zlib.compress(rows)))


def png_of_chunks(*chunks):
    def chunk(name, data):
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(*c) for c in (*chunks, (b"IEND", b"")))


def saved(image, form, **options):
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def fill(folder, files):
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data if isinstance(data, bytes) else png(data))
    return folder


def zipped(path, files):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(name, data if isinstance(data, bytes) else png(data))
    return path


# Folders and zips -----------------------------------------------------------------------------------------------------

@pytest.fixture(params=["folder", "zip", "zip with one folder around all"])
def packed(request, tmp_path):
    """Makes a source of named files, as a folder or a zip."""
    def pack(files):
        if request.param == "folder":
            return fill(tmp_path / "source", files)
        around = "all/" if "around" in request.param else ""
        return zipped(tmp_path / "source.zip", {around + name: data for name, data in files.items()})
    return pack


def test_classes_are_the_folders(packed, out):
    images = colours(5)
    source = packed({"dog/a.png": images[2], "cat/deep/b.png": images[0], "cat/deep/c.png": images[1],
                     "eel/1.png": images[3], "eel/2.png": images[4], ".hidden/x.png": images[0],
                     "__MACOSX/cat/._b.png": b"?"})
    report = import_dataset(source, out)
    written, labels, classes = contents(out)
    assert classes == ["cat", "dog", "eel"] and labels.tolist() == [0, 0, 1, 2, 2] and np.array_equal(written, images)
    assert report.shape == (5, 8, 8, 3) and report.counts == [2, 1, 2] and not report.unreadable and not report.ignored
    assert "5 images of 8×8×3" in report.sentences()[0] and "cat 2, dog 1, eel 2" in report.sentences()[0]
    with h5py.File(out) as file:
        assert file["images"].chunks == (64, 8, 8, 3) and file["labels"].dtype == np.uint8
        assert [name.decode().split("/")[-1] for name in file["names"]] == ["b.png", "c.png", "a.png", "1.png", "2.png"]


def test_no_folders_means_no_classes(packed, out):
    import_dataset(packed({f"{i}.png": image for i, image in enumerate(colours(3))}), out)
    written, labels, classes = contents(out)
    assert labels is None and classes == [] and np.array_equal(written, colours(3))


def test_folders_with_numbers_are_in_numeric_order(packed, out):
    import_dataset(packed({f"{i}/a.png": colours(12)[i] for i in range(12)}), out)
    written, labels, classes = contents(out)
    assert classes == [str(i) for i in range(12)]
    assert np.array_equal(written, colours(12)[labels])


def test_order_of_folders_with_numbers(packed, out):
    """As numbers, which the report says where ImageFolder's order differs; or as words, as there."""
    source = packed({f"{i}/a.png": colours(12)[i] for i in range(12)})
    report = import_dataset(source, out)
    assert "order of their numbers (0, 1, 2, …)" in report.notes[0] and "(0, 1, 10, …)" in report.notes[0]
    assert "add --class-order words" in report.sentences()[-1]
    report = import_dataset(source, out, order="words", force=True)
    images, labels, classes = contents(out)
    assert classes == sorted(map(str, range(12))) and not report.notes
    assert np.array_equal(images, colours(12)[[int(classes[i]) for i in labels]])
    assert not import_dataset(packed({f"c{i}/{i}.png": colours(1)[0] for i in range(3)}), out, force=True,
                              labels="folders").notes or "all" in str(source)


def test_classes_by_prefix(packed, out):
    """guided-diffusion's names; its indices with --class-order words."""
    names = ["x/10_a.png", "2_b_c.png", "10_c.png", "y/3_d.png"]
    source = packed(dict(zip(names, colours(4), strict=True)))
    report = import_dataset(source, out, labels="prefix")
    images, labels, classes = contents(out)
    assert classes == ["2", "3", "10"] and report.counts == [1, 1, 2] and "--class-order words" in report.notes[0]
    import_dataset(source, out, labels="prefix", order="words", force=True)
    assert contents(out)[2] == ["10", "2", "3"]
    with pytest.raises(UsageError, match="e.png has no _ after a class in the name"):
        import_dataset(packed({"a_b.png": colours(1)[0], "e.png": colours(1)[0]}), out, labels="prefix", force=True)
    with pytest.raises(UsageError, match="--class-order alphabet is unknown"):
        import_dataset(source, out, order="alphabet", force=True)


def test_labels_option(packed, out):
    source = packed({"a/1.png": colours(2)[0], "b/2.png": colours(2)[1], "labels.csv": b"1.png,x\n2.png,x\n"})
    import_dataset(source, out)
    assert contents(out)[2] == ["x"]
    import_dataset(source, out, labels="folders", force=True)
    assert contents(out)[2] == ["a", "b"]
    import_dataset(source, out, labels="none", force=True)
    assert contents(out)[1] is None
    with pytest.raises(UsageError, match="is unknown: use auto"):
        import_dataset(source, out, labels="folder", force=True)
    with pytest.raises(NumdiffError, match="none.csv' cannot be read"):
        import_dataset(source, out, labels="none.csv", force=True)


def test_image_beside_class_folders(packed, out):
    source = packed({"a/1.png": colours(1)[0], "b/2.png": colours(1)[0], "3.png": colours(1)[0]})
    with pytest.raises(UsageError, match="3.png lies beside the class folders .*--labels none"):
        import_dataset(source, out)
    assert import_dataset(source, out, labels="none").shape[0] == 3


CSV = "file,label\na.png,cat\nsub/b.png,dog\nc.png,cat\n"


@pytest.mark.parametrize("name, text", [
    ("labels.csv", CSV),
    ("labels.csv", "\ufeff" + CSV.replace("\n", "\r\n")),
    ("labels.csv", CSV.replace(",", ";")),
    ("labels.tsv", CSV.replace(",", "\t")),
    ("labels.csv", CSV[11:]),
    ("labels.csv", "id,split,class\na,train,cat\nb,test,dog\nc,train,cat\n"),
    ("labels.csv", '"a.png","cat"\n"sub/b.png","dog"\n"c.png","cat"\n'),
    ("labels.json", json.dumps({"a.png": "cat", "sub/b.png": "dog", "c.png": "cat"})),
    ("labels.json", json.dumps([["a.png", "cat"], ["sub/b.png", "dog"], ["c.png", "cat"]])),
    ("labels.json", json.dumps([{"file": n, "label": v} for n, v in csv.reader(CSV.splitlines()[1:])])),
    ("dataset.json", json.dumps({"labels": [["a.png", 0], ["sub/b.png", 1], ["c.png", 0]], "classes": ["cat", "dog"]})),
], ids=["csv", "csv of Windows", "semicolons", "tabs", "no heading", "other columns, no suffixes", "quotes",
        "json dict", "json list", "json of dicts", "NVlabs with classes"])
def test_labels_files(packed, out, name, text):
    images = colours(3)
    source = packed({"a.png": images[0], "c.png": images[1], "sub/b.png": images[2], name: text.encode()})
    report = import_dataset(source, out)
    written, labels, classes = contents(out)
    assert classes == ["cat", "dog"] and labels.tolist() == [0, 0, 1] and np.array_equal(written, images)
    assert report.ignored == []


def test_labels_file_of_nvlabs_with_numbers(packed, out):
    files = {f"0000{i // 2}/img{i}.png": image for i, image in enumerate(colours(4))}
    pairs = [[name, 3 - i] for i, name in enumerate(files)]
    source = packed(files | {"dataset.json": json.dumps({"labels": pairs}).encode()})
    import_dataset(source, out)
    assert contents(out)[1].tolist() == [3, 2, 1, 0] and contents(out)[2] == ["0", "1", "2", "3"]


def test_labels_file_of_nvlabs_without_labels(packed, out):
    files = {f"0000{i}/img.png": image for i, image in enumerate(colours(4))}
    import_dataset(packed(files | {"dataset.json": b'{"labels": null}'}), out)
    assert contents(out)[1] is None


def test_numbers_with_gaps_become_dense(packed, out):
    source = packed({"a.png": colours(2)[0], "b.png": colours(2)[1], "labels.csv": b"a.png,10\nb.png,7\n"})
    import_dataset(source, out)
    assert contents(out)[1].tolist() == [1, 0] and contents(out)[2] == ["7", "10"]


@pytest.mark.parametrize("text, message", [
    (b"a.png,1\n", "no label to 1 of 2 images .*b.png"),
    (b"x.png,1\ny.png,2\n", "names none of the images"),
    (b"a.png,1\nb.png\n", "line without a label"),
    (b"a.png,1\nb.png,2\na.png,3\n", "two labels"),
    (b"", "is empty"),
    (b"\xff\xfe\x00", "not UTF-8"),
])
def test_wrong_labels_csv(packed, out, text, message):
    source = packed({"a.png": colours(2)[0], "b.png": colours(2)[1], "labels.csv": text})
    with pytest.raises(UsageError, match=message):
        import_dataset(source, out)


@pytest.mark.parametrize("text, message", [
    (b"{", "not valid JSON"),
    (b"[" * 100000, "not valid JSON"),
    (b"3", "a format that numdiff knows"),
    (b'{"a.png": [1, 2], "b.png": [1, 2]}', "must be a word or an integer"),
    (b'{"labels": {"a.png": 1, "b.png": 2}, "classes": ["x", "y"]}', "label 2, which is none of its 2 classes"),
])
def test_wrong_labels_json(packed, out, text, message):
    source = packed({"a.png": colours(2)[0], "b.png": colours(2)[1], "labels.json": text})
    with pytest.raises(UsageError, match=message):
        import_dataset(source, out)


def test_labels_file_elsewhere_and_ambiguous_names(tmp_path, out):
    source = fill(tmp_path / "s", {"x/1.png": colours(2)[0], "y/1.png": colours(2)[1]})
    labels = tmp_path / "mine.csv"
    labels.write_text("x/1.png,b\ny/1.png,a\nz/9.png,a\n")
    report = import_dataset(source, out, labels=labels)
    assert contents(out)[1].tolist() == [1, 0] and "also names 1 that" in report.notes[0]
    labels.write_text("1.png,b\n")
    with pytest.raises(UsageError, match="several images have this name"):
        import_dataset(source, out, labels=labels, force=True)


def test_unreadable_images_are_named_and_left_out(packed, out):
    images = colours(3, 64)
    whole = saved(Image.fromarray(images[0]), "JPEG")
    report = import_dataset(packed({
        "a.png": images[0], "b.png": images[1], "c.png": b"", "d.jpg": whole[:-300], "e.png": b"this is no image",
        "f.png": png(images[1])[:60], "g": png(images[2]), "notes.txt": b"hello", "page.html": b"<html>",
        "h.heic": b"\0\0\0\x18ftypheic0000", "z/Thumbs.db": b"?"}), out)
    assert np.array_equal(contents(out)[0], images)
    assert [name.split("/")[-1] for name, _ in report.unreadable] == ["c.png", "d.jpg", "e.png", "f.png", "h.heic"]
    assert dict(report.unreadable)[report.unreadable[0][0]] == "empty file"
    assert [name.split("/")[-1] for name in report.ignored] == ["notes.txt", "page.html"]
    text = " ".join(report.sentences())
    assert "5 unreadable images were left out" in text and "d.jpg: " in text and "2 other files were left out" in text


def test_nothing_to_import(packed, out, tmp_path):
    with pytest.raises(NumdiffError, match="none of the 2 images .* could be read .*a.png: "):
        import_dataset(packed({"a.png": b"?", "b.png": b""}), out)
    (tmp_path / "empty").mkdir()
    with pytest.raises(NumdiffError, match="empty' holds no images: check"):
        import_dataset(tmp_path / "empty", out)
    with pytest.raises(NumdiffError, match=r"holds no images \(1 other files\)"):
        import_dataset(fill(tmp_path / "text", {"a.txt": b"hello"}), out)
    with pytest.raises(NumdiffError, match="holds no images"):
        import_dataset(zipped(tmp_path / "empty.zip", {}), out)
    with pytest.raises(UsageError, match="nothing at"):
        import_dataset(tmp_path / "none", out)
    assert not out.exists()


def test_many_images_keep_their_order(packed, out):
    files = {f"{i:03d}.png": np.full((4, 4), i % 256, np.uint8) for i in range(300)}
    import_dataset(packed(files), out)
    assert contents(out)[0][:, 0, 0, 0].tolist() == [i % 256 for i in range(300)]


def test_two_imports_are_the_same_bytes(packed, out):
    source = packed({f"{i % 3}/{i}.png": image for i, image in enumerate(colours(70))})
    import_dataset(source, out)
    first = out.read_bytes()
    import_dataset(source, out, force=True)
    assert out.read_bytes() == first


def test_names_in_zips_write_nowhere(tmp_path, out):
    images = colours(3)
    names = ("../../evil.png", "/etc/evil2.png", "..\\x.png")
    source = zipped(tmp_path / "a.zip", dict(zip(names, images, strict=True)))
    before = sorted(os.walk(tmp_path))
    report = import_dataset(source, out, labels="none")
    assert report.shape[0] == 3 and sorted(os.walk(tmp_path)) == before
    with h5py.File(out) as file:
        assert sorted(name.decode() for name in file["names"]) == ["etc/evil2.png", "evil.png", "x.png"]


def test_damaged_zips(tmp_path, out):
    rng = np.random.default_rng(0)
    noise = rng.integers(0, 256, (3, 32, 32, 3), dtype=np.uint8)
    path = zipped(tmp_path / "a.zip", {f"{i}.png": image for i, image in enumerate(noise)})
    data = path.read_bytes()
    (tmp_path / "short.zip").write_bytes(data[:len(data) // 2])
    with pytest.raises(NumdiffError, match="short.zip' is truncated or damaged"):
        import_dataset(tmp_path / "short.zip", out)
    damaged = bytearray(data)
    damaged[1000:1100] = bytes(100)  # within the first image
    (tmp_path / "damaged.zip").write_bytes(damaged)
    report = import_dataset(tmp_path / "damaged.zip", out)
    assert [name for name, _ in report.unreadable] == ["0.png"] and np.array_equal(contents(out)[0], noise[1:])
    locked = bytearray(data)
    locked[data.index(b"PK\1\2") + 8] |= 1
    (tmp_path / "locked.zip").write_bytes(locked)
    with pytest.raises(UsageError, match="password"):
        import_dataset(tmp_path / "locked.zip", out, force=True)


def test_links_that_lead_back(tmp_path, out):
    source = fill(tmp_path / "s", {"a/1.png": colours(1)[0], "b/2.png": colours(1)[0]})
    os.symlink(source, source / "a" / "again")
    assert import_dataset(source, out).shape[0] == 2


def test_what_is_no_file_is_named(tmp_path, out):
    source = fill(tmp_path / "s", {"a/1.png": colours(1)[0], "b/2.png": colours(1)[0]})
    os.symlink(tmp_path / "gone", source / "b" / "gone.png")
    os.symlink("round.png", source / "b" / "round.png")
    os.mkfifo(source / "b" / "fifo.png")
    os.mkfifo(source / "b" / "fifo")
    report = import_dataset(source, out)
    assert report.shape[0] == 2 and report.ignored == ["b/fifo"]
    assert report.unreadable == [("b/fifo.png", "it is a FIFO"), ("b/gone.png", "it is a link that leads to no file"),
                                 ("b/round.png", "it is a link that leads to no file")]


def test_names_that_a_zip_has_twice(tmp_path, out):
    path = zipped(tmp_path / "a.zip", {"a.png": colours(2)[0], "./a.png": colours(2)[1], "b.png": colours(2)[0]})
    report = import_dataset(path, out)
    assert report.shape[0] == 2 and np.array_equal(contents(out)[0][0], colours(2)[1])
    assert "1 file was left out, as later ones in the zip have the same names (a.png)." in report.sentences()


def test_names_that_are_not_utf8(tmp_path, out):
    folder = fill(tmp_path / "s", {"a/1.png": colours(2)[0]})
    os.makedirs(os.fsencode(folder) + b"/caf\xe9")
    with open(os.fsencode(folder) + b"/caf\xe9/2.png", "wb") as file:
        file.write(png(colours(2)[1]))
    report = import_dataset(folder, out)
    assert contents(out)[2] == ["a", "caf\\udce9"] and "caf" in report.sentences()[0].encode().decode()


# Pixels ---------------------------------------------------------------------------------------------------------------

def imported(tmp_path, out, data, **options):
    """The one image of a folder that holds one file of these bytes."""
    import_dataset(fill(tmp_path / "one", {"a.png": data}), out, force=True, **options)
    return contents(out)[0][0]


def test_16_bit_pixels(tmp_path, out):
    values = np.array([[0, 128, 257, 65535], [32768, 65278, 300, 1]] * 2, np.uint16)
    expected = np.rint(values / 257).astype(np.uint8)
    assert np.array_equal(imported(tmp_path, out, values)[..., 0], expected)
    tiff = saved(Image.fromarray(values), "TIFF")
    assert np.array_equal(imported(tmp_path, out, tiff)[..., 0], expected)
    rgb = np.stack([values] * 3, -1)
    assert np.abs(imported(tmp_path, out, rgb).astype(int) - expected[..., None]).max() <= 1


def test_palette_with_transparency(tmp_path, out):
    palette = bytes([255, 0, 0, 0, 255, 0, 0, 0, 255])
    rows = b"".join(b"\0" + bytes(row) for row in ([0, 1], [2, 0]))
    header = struct.pack(">IIBBBBB", 2, 2, 8, 3, 0, 0, 0)
    chunks = [(b"IHDR", header), (b"PLTE", palette), (b"IDAT", zlib.compress(rows))]
    expected = [[[255, 0, 0], [0, 255, 0]], [[0, 0, 255], [255, 0, 0]]]
    assert imported(tmp_path, out, png_of_chunks(*chunks)).tolist() == expected
    chunks.insert(2, (b"tRNS", bytes([255, 0, 255])))  # the second colour is transparent
    expected[0][1] = [255, 255, 255]
    assert imported(tmp_path, out, png_of_chunks(*chunks)).tolist() == expected
    expected[0][1] = [0, 0, 128]
    assert imported(tmp_path, out, png_of_chunks(*chunks), background="navy").tolist() == expected


def test_alpha_over_a_colour(tmp_path, out):
    image = np.zeros((2, 2, 4), np.uint8)
    image[..., 0], image[..., 3] = 200, [[255, 128], [0, 0]]
    over_white = imported(tmp_path, out, image)
    assert over_white[0, 0].tolist() == [200, 0, 0] and over_white[1, 1].tolist() == [255, 255, 255]
    assert np.abs(over_white[0, 1].astype(int) - [228, 127, 127]).max() <= 1
    assert imported(tmp_path, out, image, background="#102030")[1, 0].tolist() == [16, 32, 48]
    grey = image[..., [0, 3]]
    assert imported(tmp_path, out, grey)[..., 0].tolist()[1] == [255, 255]
    assert imported(tmp_path, out, grey, background="red")[1, 0].tolist() == [255, 0, 0]
    with pytest.raises(UsageError, match="--background 'whitish' is not a colour"):
        imported(tmp_path, out, image, background="whitish")


def test_transparent_grey(tmp_path, out):
    """Of 16 bits, and of fewer than 8: one channel over grey, three over a colour; opaque pixels as without alpha."""
    values = np.array([[0, 514], [32896, 65535]], np.uint16)

    def chunks(depth, rows, transparent):
        header = (b"IHDR", struct.pack(">IIBBBBB", 2, 2, depth, 0, 0, 0, 0))
        return png_of_chunks(header, (b"tRNS", struct.pack(">H", transparent)), (b"IDAT", zlib.compress(rows)))

    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in values)
    assert imported(tmp_path, out, chunks(16, rows, 514))[..., 0].tolist() == [[0, 255], [128, 255]]
    assert imported(tmp_path, out, chunks(16, rows, 514), background="black").tolist() == [[[0], [0]], [[128], [255]]]
    assert imported(tmp_path, out, chunks(16, rows, 515))[..., 0].tolist() == [[0, 2], [128, 255]]
    assert imported(tmp_path, out, chunks(16, rows, 514), background="red").tolist() == [
        [[0, 0, 0], [255, 0, 0]], [[128, 128, 128], [255, 255, 255]]]
    for depth, rows, expected in ((2, b"\0\x10\0\xb0", [[0, 255], [170, 255]]),
                                  (4, b"\0\x0a\0\x0f", [[0, 255], [0, 255]]),
                                  (1, b"\0\x40\0\x80", [[0, 255], [255, 0]])):
        transparent = {1: 1, 2: 1, 4: 10}[depth]  # the upper right pixel
        assert imported(tmp_path, out, chunks(depth, rows, transparent))[..., 0].tolist() == expected
    alpha = np.stack([values, [[65535, 65535], [65535, 0]]], -1).astype(np.uint16)
    assert imported(tmp_path, out, png(alpha))[..., 0].tolist() == [[0, 2], [128, 255]]
    assert imported(tmp_path, out, png(alpha), background="black").shape == (2, 2, 1)
    assert imported(tmp_path, out, png(alpha), background="red")[1, 1].tolist() == [255, 0, 0]
    rgb = png_of_chunks((b"IHDR", struct.pack(">IIBBBBB", 1, 1, 16, 2, 0, 0, 0)),
                        (b"tRNS", struct.pack(">HHH", 514, 771, 1028)),
                        (b"IDAT", zlib.compress(b"\0" + struct.pack(">HHH", 514, 771, 1028))))
    assert imported(tmp_path, out, rgb).tolist() == [[[255, 255, 255]]]


def test_postscript_under_another_name(tmp_path, out, monkeypatch):
    """Ghostscript is not started, whoever opens the picture."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "gs").write_text(f"#!/bin/sh\ntouch {tmp_path}/started\n")
    (tmp_path / "bin" / "gs").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    eps = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\nshowpage\n%%EOF\n"
    path = fill(tmp_path / "s", {"a.png": eps}) / "a.png"
    for read in (lambda: import_dataset(tmp_path / "s", out), lambda: read_picture(path, (8, 8, 3)),
                 lambda: read_mask(str(path), 8), lambda: open_source(tmp_path / "s")):
        with pytest.raises(NumdiffError, match="not an image that Pillow can read"):
            read()
    assert not (tmp_path / "started").exists()


def test_picture_is_read_alike_everywhere(tmp_path, out):
    values = np.tile(np.linspace(0, 65535, 16).astype(np.uint16), (16, 1))
    path = fill(tmp_path / "s", {"a.png": values}) / "a.png"
    import_dataset(tmp_path / "s", out)
    expected = contents(out)[0][0]
    assert len(np.unique(expected)) == 16
    assert np.allclose((read_picture(path, (16, 16, 1)) + 1) * 127.5, expected, atol=1e-3)
    assert np.array_equal(next(iter(open_source(tmp_path / "s").batches(1)))[0], np.repeat(expected, 3, -1))


def test_cmyk_one_bit_and_gif(tmp_path, out):
    cmyk = saved(Image.new("CMYK", (8, 8), (0, 255, 255, 0)), "JPEG", quality=95)
    assert np.abs(imported(tmp_path, out, cmyk).astype(int) - [255, 0, 0]).max() <= 6
    bits = saved(Image.fromarray(np.eye(8, dtype=bool)), "PNG")
    assert np.array_equal(imported(tmp_path, out, bits)[..., 0], 255 * np.eye(8, dtype=np.uint8))
    gif = saved(Image.new("RGB", (8, 8), (0, 0, 255)), "GIF", save_all=True,
                append_images=[Image.new("RGB", (8, 8), (255, 0, 0))])
    assert imported(tmp_path, out, gif)[0, 0].tolist() == [0, 0, 255]


def test_float_pixels_are_refused_by_name(tmp_path, out):
    with pytest.raises(NumdiffError, match="a.png: floating-point pixels"):
        imported(tmp_path, out, saved(Image.fromarray(np.ones((4, 4), np.float32)), "TIFF"))


@pytest.mark.parametrize("orientation, turned", [
    (1, lambda a: a), (2, lambda a: a[:, ::-1]), (3, lambda a: a[::-1, ::-1]), (4, lambda a: a[::-1]),
    (5, lambda a: a.transpose(1, 0, 2)), (6, lambda a: np.rot90(a, -1)), (8, lambda a: np.rot90(a))])
def test_exif_orientation(tmp_path, out, orientation, turned):
    image = np.zeros((16, 16, 3), np.uint8)
    image[:8, :8], image[:8, 8:] = 255, (255, 0, 0)
    exif = struct.pack(">2sHIHHHIHHI", b"MM", 42, 8, 1, 0x0112, 3, 1, orientation, 0, 0)
    data = saved(Image.fromarray(image), "JPEG", quality=100, subsampling=0, exif=b"Exif\0\0" + exif)
    assert np.abs(imported(tmp_path, out, data).astype(int) - turned(image)).max() < 8


def test_crop_pad_and_stretch(tmp_path, out):
    image = np.zeros((16, 48, 3), np.uint8)
    image[:, :16], image[:, 16:32], image[:, 32:] = (255, 0, 0), (0, 255, 0), (0, 0, 255)
    assert np.array_equal(imported(tmp_path, out, image, size=16), image[:, 16:32])
    assert np.array_equal(imported(tmp_path, out, image, size=8), image[:8, 16:24])
    padded = imported(tmp_path, out, image, size=48, fit="pad", background="black")
    assert np.array_equal(padded[16:32], image) and not padded[:16].any() and not padded[32:].any()
    stretched = imported(tmp_path, out, image, size=24, fit="stretch")
    assert stretched[:, 4].tolist() == [[255, 0, 0]] * 24 and stretched[:, 20].tolist() == [[0, 0, 255]] * 24
    tall = imported(tmp_path, out, image.transpose(1, 0, 2), size=48, fit="pad")
    assert np.array_equal(tall[:, 16:32], image.transpose(1, 0, 2)) and (tall[:, :16] == 255).all()


def test_large_jpeg_is_reduced_without_aliasing(tmp_path, out):
    stripes = np.zeros((1024, 1024), np.uint8)
    stripes[:, ::2] = 255
    reduced = imported(tmp_path, out, saved(Image.fromarray(stripes), "JPEG", quality=95), size=32)
    assert np.abs(reduced.astype(int) - 127).max() <= 3


def test_grey_and_colour(packed, out):
    grey, colour = np.full((8, 8), 100, np.uint8), colours(1)[0]
    mixed = packed({"a.png": grey, "b.png": colour})
    with pytest.raises(UsageError, match="b.png is in colour, but .*a.png is grey: add --rgb or --grey"):
        import_dataset(mixed, out)
    assert import_dataset(mixed, out, channels=3).shape == (2, 8, 8, 3)
    assert contents(out)[0][0, 0, 0].tolist() == [100, 100, 100]
    assert import_dataset(mixed, out, channels=1, force=True).shape == (2, 8, 8, 1)
    red, green, blue = colour[0, 0]
    assert abs(int(contents(out)[0][1, 0, 0, 0]) - (0.299 * red + 0.587 * green + 0.114 * blue)) <= 1


def test_colour_first_then_grey_needs_no_option(packed, out):
    assert import_dataset(packed({"a.png": colours(1)[0], "b.png": np.full((8, 8), 9, np.uint8)}), out).shape[3] == 3


def test_sizes_that_differ(packed, out):
    source = packed({"a.png": colours(1)[0], "b.png": colours(1, 60)[0]})
    with pytest.raises(UsageError, match=r"b.png is 60×60 pixels, but .*a.png is 8×8: add --size"):
        import_dataset(source, out)
    assert import_dataset(source, out, size=16).shape == (2, 16, 16, 3)


def test_too_large(tmp_path, out):
    source = fill(tmp_path / "s", {"a.png": np.zeros((1100, 1100), np.uint8)})
    with pytest.raises(UsageError, match="1100×1100 pixels: add --size"):
        import_dataset(source, out)
    with pytest.raises(UsageError, match="--size 2000 is out of range"):
        import_dataset(source, out, size=2000)


def test_not_square(packed, out):
    with pytest.raises(UsageError, match="a.png is 48×16 pixels and not square: add --size, for instance --size 16"):
        import_dataset(packed({"a.png": np.zeros((16, 48, 3), np.uint8)}), out)


# CIFAR-10 -------------------------------------------------------------------------------------------------------------

def python2_pickle(batch):
    """A pickle of protocol 2 as Python 2 writes it: its strings are bytes without an encoding."""
    def text(value):
        return b"U" + bytes([len(value)]) + value if len(value) < 256 else b"T" + struct.pack("<I", len(value)) + value

    def integer(value):
        return b"J" + struct.pack("<i", value)

    def array(value):
        return (b"cnumpy.core.multiarray\n_reconstruct\n" b"cnumpy\nndarray\n"
                + integer(0) + b"\x85" + text(b"b") + b"\x87R"
                + b"(" + integer(1) + b"(" + b"".join(integer(n) for n in value.shape) + b"t"
                + b"cnumpy\ndtype\n" + text(b"u1") + integer(0) + integer(1) + b"\x87R"
                + b"(" + integer(3) + text(b"|") + b"NNN" + integer(-1) + integer(-1) + integer(0) + b"tb"
                + b"\x89" + text(value.tobytes()) + b"tb")

    def write(value):
        if isinstance(value, np.ndarray):
            return array(value)
        if isinstance(value, list):
            return b"](" + b"".join(write(v) for v in value) + b"e"
        return text(value) if isinstance(value, bytes) else integer(value)

    return b"\x80\x02}(" + b"".join(text(k) + write(v) for k, v in batch.items()) + b"u."


def cifar_batches(rng, pack):
    """(images, labels, files of the archive) with three images a batch."""
    names = [b"airplane", b"automobile", b"bird", b"cat", b"deer", b"dog", b"frog", b"horse", b"ship", b"truck"]
    images = rng.integers(0, 256, (15, 32, 32, 3), dtype=np.uint8)
    labels = rng.integers(0, 10, 15).tolist()
    files = {"batches.meta": pack({b"num_cases_per_batch": 3, b"label_names": names, b"num_vis": 3072})}
    for i in (4, 2, 5, 1, 3):  # the archive's order is not that of the numbers either
        rows = slice(3 * i - 3, 3 * i)
        files[f"data_batch_{i}"] = pack({
            b"batch_label": b"training batch", b"labels": labels[rows], b"filenames": [b"x.png"] * 3,
            b"data": images[rows].transpose(0, 3, 1, 2).reshape(3, 3072)})
    files["test_batch"] = files["data_batch_1"]
    files["readme.html"] = b"<html>"
    return images, labels, files


def tar(path, files, mode="w:gz"):
    with tarfile.open(path, mode) as archive:
        for name, data in files.items():
            member = tarfile.TarInfo(f"cifar-10-batches-py/{name}")
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return path


@pytest.mark.parametrize("pack", [python2_pickle, *(lambda batch, p=p: pickle.dumps(batch, p) for p in (2, 4, 5))],
                         ids=["Python 2", "protocol 2", "protocol 4", "protocol 5"])
@pytest.mark.parametrize("form", ["w:gz", "w", "folder"])
def test_cifar(tmp_path, out, rng, pack, form):
    images, labels, files = cifar_batches(rng, pack)
    if form == "folder":
        source = fill(tmp_path / "cifar-10-batches-py", files)
    else:
        source = tar(tmp_path / "some.file", files, form)
    report = import_dataset(source, out)
    written, written_labels, classes = contents(out)
    assert np.array_equal(written, images) and written_labels.tolist() == labels
    assert classes[0] == "airplane" and classes[9] == "truck" and "CIFAR-10" in report.source and not report.notes
    import_dataset(source, out, labels="none", size=16, force=True)
    assert contents(out)[1] is None and contents(out)[0].shape == (15, 16, 16, 3)


class Attack:
    def __reduce__(self):
        return os.system, ("touch /tmp/numdiff-was-attacked",)


@pytest.mark.parametrize("evil, name", [
    (pickle.dumps(Attack()), "system"),
    (pickle.dumps({"data": Attack()}, 2), "system"),
    (b"cbuiltins\neval\n(S'1'\ntR.", "builtins.eval"),
    (b"cnumpy.testing._private.utils\nrunstring\n.", "runstring"),
    (b"\x80\x04\x8c\x05numpy\x8c\x0endarray.tofile\x93.", "ndarray.tofile"),
    (b"\x80\x04\x8c\x07_codecs\x8c\x06decode\x93.", "_codecs.decode"),
    (pickle.dumps(np.array([{}], object)), "array of O8|O"),
    (b"Pname\n.", "persistent"),
], ids=["os.system", "within a dictionary", "eval", "numpy's own", "attribute", "codec", "objects", "persistent"])
def test_cifar_executes_nothing(tmp_path, out, rng, evil, name):
    with pytest.raises(RefusedError, match=name.replace("|", "?|")):
        read_pickle(evil)
    _, _, files = cifar_batches(rng, python2_pickle)
    files["data_batch_3"] = evil
    with pytest.raises(NumdiffError, match="data_batch_3 in .* asks for .*refused"):
        import_dataset(tar(tmp_path / "a.tar.gz", files), out)
    assert not os.path.exists("/tmp/numdiff-was-attacked") and not out.exists()


def test_pickle_cannot_change_the_reader():
    """BUILD may set attributes: of stand-ins that only this reading knows."""
    evil = b"\x80\x02cnumpy\ndtype\nN}U\x0c__setstate__cnumpy\nndarray\ns\x86b."
    for _ in range(2):
        try:
            read_pickle(evil)
        except Exception:
            pass
    array = np.arange(6, dtype=np.uint8)
    assert np.array_equal(read_pickle(python2_pickle({b"data": array}))["data"].value, array)


def test_wrong_cifar(tmp_path, out, rng):
    images, _, files = cifar_batches(rng, python2_pickle)
    whole = tar(tmp_path / "a.tar.gz", files).read_bytes()
    for length in (len(whole) // 2, len(whole) - 20, 40, 5):
        (tmp_path / "short.tar.gz").write_bytes(whole[:length])
        with pytest.raises(NumdiffError, match="short.tar.gz' is (truncated or damaged|nothing that numdiff)"):
            import_dataset(tmp_path / "short.tar.gz", out)
    with pytest.raises(NumdiffError, match="is not CIFAR-10 for Python .*unpack other archives"):
        import_dataset(tar(tmp_path / "b.tar.gz", {"a.png": png(images[0])}), out)
    for broken in (files["data_batch_2"][:100], b"", b"garbage", pickle.dumps([1]), python2_pickle({b"data": images}),
                   python2_pickle({b"data": images.reshape(15, 3072), b"labels": [1]}),
                   python2_pickle({b"data": images[:1].reshape(1, 3072), b"labels": [10]})):
        with pytest.raises(NumdiffError, match="truncated or damaged .*data_batch_2"):
            import_dataset(tar(tmp_path / "c.tar.gz", files | {"data_batch_2": broken}), out)
    del files["data_batch_5"]
    report = import_dataset(tar(tmp_path / "d.tar.gz", files), out)
    assert report.shape[0] == 12 and report.notes == ["It has no data_batch_5."]


# MNIST ----------------------------------------------------------------------------------------------------------------

def idx(array):
    return struct.pack(">HBB", 0, 8, array.ndim) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


@pytest.fixture
def mnist(rng):
    return rng.integers(0, 256, (100, 28, 28), dtype=np.uint8), rng.integers(0, 10, 100, dtype=np.uint8)


@pytest.mark.parametrize("images_name, labels_name", [
    ("train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz"),
    ("t10k-images.idx3-ubyte", "t10k-labels.idx1-ubyte"),
    ("train-images-idx3-ubyte", "train-labels-idx1-ubyte.gz"),
    ("emnist-letters-train-images-idx3-ubyte.gz", "emnist-letters-train-labels-idx1-ubyte"),
])
def test_mnist(tmp_path, out, mnist, images_name, labels_name):
    images, labels = mnist
    for name, array in ((images_name, images), (labels_name, labels)):
        (tmp_path / name).write_bytes(gzip.compress(idx(array)) if name.endswith(".gz") else idx(array))
    report = import_dataset(tmp_path / images_name, out)
    written, written_labels, classes = contents(out)
    assert np.array_equal(written[..., 0], images) and np.array_equal(written_labels, labels)
    assert classes == [str(i) for i in range(10)] and report.shape == (100, 28, 28, 1)
    assert import_dataset(tmp_path, out, size=32, channels=3, force=True).shape == (100, 32, 32, 3)


def test_mnist_without_labels(tmp_path, out, mnist):
    (tmp_path / "x.gz").write_bytes(gzip.compress(idx(mnist[0])))
    report = import_dataset(tmp_path / "x.gz", out)
    assert contents(out)[1] is None and "No labels file was found" in report.notes[0]


def test_wrong_mnist(tmp_path, out, mnist):
    images, labels = mnist
    path, beside = tmp_path / "train-images-idx3-ubyte.gz", tmp_path / "train-labels-idx1-ubyte.gz"
    for few in (labels[:5], labels):
        beside.write_bytes(gzip.compress(idx(few)))
        with pytest.raises(UsageError, match="holds labels: give the images file"):
            import_dataset(beside, out)
    whole = gzip.compress(idx(images))
    for data in (whole[:len(whole) // 2], whole[:-9], gzip.compress(idx(images)[:-1]), gzip.compress(idx(images)[:12]),
                 gzip.compress(struct.pack(">4I", 2051, 10, 2**31, 2**31)), whole[:3],
                 whole[:-8] + bytes(8)):
        path.write_bytes(data)
        with pytest.raises(NumdiffError, match="train-images-idx3-ubyte.gz' is truncated or damaged"):
            import_dataset(path, out)
    path.write_bytes(gzip.compress(b"\0\0\x09\x03" + idx(images)[4:]))
    with pytest.raises(NumdiffError, match="nothing that numdiff can import: give a folder"):
        import_dataset(path, out)
    path.write_bytes(whole)
    for data, message in ((idx(labels[:50]), "50 labels and .* has 100 images"),
                          (idx(labels)[:50], "labels.*truncated"),
                          (b"\0\0\x09\x01" + idx(labels)[4:], "its magic number is 2305")):
        beside.write_bytes(gzip.compress(data))
        with pytest.raises(NumdiffError, match=message):
            import_dataset(path, out)
    assert not out.exists()
    import_dataset(path, out, labels="none")
    assert contents(out)[1] is None


# NumPy ----------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("keys", [("arr_0", "arr_1"), ("images", "labels"), ("x_train", "y_train")])
@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_npz(tmp_path, out, keys, save):
    images = colours(70)
    save(tmp_path / "a.npz", **dict(zip(keys, (images, np.arange(70) % 4), strict=True)))
    import_dataset(tmp_path / "a.npz", out)
    written, labels, classes = contents(out)
    assert np.array_equal(written, images) and labels.tolist() == [i % 4 for i in range(70)] and classes == list("0123")


@pytest.mark.parametrize("change, expected", [
    (lambda a: a.transpose(0, 3, 1, 2), lambda a: a),
    (lambda a: np.asfortranarray(a), lambda a: a),
    (lambda a: a.astype(np.int64), lambda a: a),
    (lambda a: a.astype(np.float32) / 255, lambda a: a),
    (lambda a: a / 127.5 - 1, lambda a: a),
    (lambda a: a.astype(np.float64), lambda a: a),
    (lambda a: a.astype(">u2") * 257, lambda a: a),
    (lambda a: a > 100, lambda a: 255 * (a > 100)),
    (lambda a: a[..., 0], lambda a: a[..., :1]),
], ids=["NCHW", "Fortran", "int64", "0…1", "-1…1", "float 0…255", "uint16 big-endian", "bool", "NHW"])
def test_npz_forms(tmp_path, out, change, expected):
    images = colours(20)
    images[0, 0, 0], images[1, 0, 0] = 0, 255
    np.savez(tmp_path / "a.npz", change(images))
    import_dataset(tmp_path / "a.npz", out)
    assert np.array_equal(contents(out)[0], expected(images))
    np.save(tmp_path / "b.npy", change(images))
    import_dataset(tmp_path / "b.npy", out, force=True)
    assert np.array_equal(contents(out)[0], expected(images)) and contents(out)[1] is None


def test_npz_labels_forms(tmp_path, out):
    images = colours(6)
    for labels, expected, classes in (
            (np.eye(3)[[2, 1, 0, 0, 1, 2]], [2, 1, 0, 0, 1, 2], ["0", "1", "2"]),
            (np.array([[5], [5], [7], [7], [5], [7]]), [0, 0, 1, 1, 0, 1], ["5", "7"])):
        np.savez(tmp_path / "a.npz", images=images, labels=labels)
        import_dataset(tmp_path / "a.npz", out, force=True)
        assert contents(out)[1].tolist() == expected and contents(out)[2] == classes


def latents(rng, channels=4, dtype=np.float32):
    return (3 * rng.standard_normal((70, 8, 8, channels))).astype(dtype)


@pytest.mark.parametrize("dtype, channels", [(np.float32, 4), (np.float64, 4), (np.float16, 4), (np.float32, 16)])
@pytest.mark.parametrize("form", ["npz", "npy", "h5", "NCHW"])
def test_latents(tmp_path, out, rng, dtype, channels, form):
    """They arrive as they left; the report says what they were taken for."""
    images = latents(rng, channels, dtype)
    path = tmp_path / "latents"
    if form == "npy":
        path = path.with_suffix(".npy")
        np.save(path, images)
    elif form == "h5":
        with h5py.File(path, "w") as file:
            file["images"], file["labels"], file.attrs["classes"] = images, np.arange(70) % 2, ["a", "b"]
    else:
        path = path.with_suffix(".npz")
        moved = images.transpose(0, 3, 1, 2) if form == "NCHW" else images
        np.savez(path, images=moved, labels=np.arange(70) % 2, classes=["a", "b"])
    report = import_dataset(path, out)
    written, labels, classes = contents(out)
    assert written.dtype == np.float32 and np.array_equal(written, images.astype(np.float32))
    if form != "npy":
        assert labels.tolist() == [i % 2 for i in range(70)] and classes == ["a", "b"]
    assert f"70 latents of 8×8×{channels}" in report.sentences()[0] and "neither scaled nor resized" in report.notes[-1]
    import_dataset(path, out, labels="none", size=8, force=True)
    assert contents(out)[1] is None
    for options, message in (({"size": 16}, "leave --size out"), ({"channels": 3}, "leave --rgb and --grey out"),
                             ({"fit": "pad"}, "leave --fit out"), ({"background": "red"}, "leave --background out"),
                             ({"latents": False}, "bring it to 0 … 255|of 1 to 4 channels")):
        with pytest.raises(NumdiffError, match=message):
            import_dataset(path, out, force=True, **options)


def test_floats_that_may_be_either(tmp_path, out, rng):
    """Three channels beyond the range of pixels, and alpha below 0, are asked for."""
    np.savez(tmp_path / "a.npz", latents(rng, 3))
    with pytest.raises(UsageError, match="bring it to 0 … 255, 0 … 1 or -1 … 1 first, or add --latents"):
        import_dataset(tmp_path / "a.npz", out)
    assert import_dataset(tmp_path / "a.npz", out, latents=True).noun == "latents"
    np.savez(tmp_path / "b.npz", np.tanh(latents(rng, 4)))
    with pytest.raises(UsageError, match="pixels with alpha or latents: add --pixels or --latents"):
        import_dataset(tmp_path / "b.npz", out, force=True)
    assert import_dataset(tmp_path / "b.npz", out, force=True, latents=False).shape == (70, 8, 8, 3)
    report = import_dataset(tmp_path / "b.npz", out, force=True, latents=True)
    assert report.shape == (70, 8, 8, 4) and contents(out)[0].dtype == np.float32
    for scale in (1, 255):  # grey and alpha, or two of anything
        np.save(tmp_path / "two.npy", scale * rng.random((70, 8, 8, 2)))
        with pytest.raises(UsageError, match="2 channels, which may be pixels with alpha or latents: add --pixels"):
            import_dataset(tmp_path / "two.npy", out, force=True)
        assert import_dataset(tmp_path / "two.npy", out, force=True, latents=False).shape == (70, 8, 8, 1)
        assert import_dataset(tmp_path / "two.npy", out, force=True, latents=True).shape == (70, 8, 8, 2)
    np.savez(tmp_path / "c.npz", colours(4))
    with pytest.raises(UsageError, match="is uint8, and latents are floats: leave --latents out"):
        import_dataset(tmp_path / "c.npz", out, force=True, latents=True)
    np.savez(tmp_path / "d.npz", images=latents(rng), labels=np.arange(70) % 3, classes=["a", "b"])
    with pytest.raises(NumdiffError, match="`classes` in .*one name for each label from 0 to 2"):
        import_dataset(tmp_path / "d.npz", out, force=True)
    np.savez(tmp_path / "e.npz", np.where(np.arange(4) == 2, np.float64(1e300), -2 * np.ones((2, 4, 4, 4))))
    with pytest.raises(NumdiffError, match="not finite"):  # as float32
        import_dataset(tmp_path / "e.npz", out, force=True)


def test_wrong_npz(tmp_path, out):
    images = colours(6)
    path = tmp_path / "a.npz"
    for arrays, message in (
            ({"images": np.array([Attack()] * 6, object)}, "holds Python objects"),
            ({"images": images, "labels": np.array(["a", None] * 3, object)}, "holds Python objects"),
            ({"images": images, "labels": np.arange(5)}, "there are 6 images"),
            ({"images": images, "labels": np.ones((6, 2))}, "not one-hot"),
            ({"images": images, "labels": np.arange(6) + 0.5}, "a word or an integer"),
            ({"images": images[0]}, "not square|has shape"),
            ({"images": np.zeros((6, 192), np.uint8)}, r"has shape \(6, 192\)"),
            ({"images": colours(6, channels=2)}, r"2 channels may be grey and alpha .* as grey, \(N, H, W, 1\)"),
            ({"images": np.float32(3)}, r"has shape \(\), and images are \(N, H, W, C\)"),
            ({"images": images[:0]}, "no images"),
            ({"images": images * 1e3}, "from 0 to .*: bring it to"),
            ({"images": np.full((2, 4, 4, 3), np.nan)}, "not finite"),
            ({"images": images.astype(complex)}, "complex128"),
            ({"u": images, "v": images}, r"no array `images` or `arr_0` \(it has u, v\)")):
        np.savez(path, **arrays)
        with pytest.raises(NumdiffError, match=message):
            import_dataset(path, out)
    np.savez(path, images)
    data = path.read_bytes()
    path.write_bytes(data[:-100])
    with pytest.raises(NumdiffError, match="a.npz' is truncated or damaged"):
        import_dataset(path, out)
    damaged = bytearray(data)
    damaged[500:520] = b"x" * 20
    path.write_bytes(damaged)
    with pytest.raises(NumdiffError, match="a.npz' is truncated or damaged .*CRC"):
        import_dataset(path, out)
    np.save(tmp_path / "b.npy", images)
    data = (tmp_path / "b.npy").read_bytes()
    for length in (8, 60, len(data) - 1):
        (tmp_path / "b.npy").write_bytes(data[:length])
        with pytest.raises(NumdiffError, match="b.npy' is truncated or damaged"):
            import_dataset(tmp_path / "b.npy", out)
    assert not os.path.exists("/tmp/numdiff-was-attacked") and not out.exists()


# unet.cu's .bin and HDF5 ----------------------------------------------------------------------------------------------

def unet_cu(images, count=None, magic=20240620):
    n, h, w, c = images.shape
    header = struct.pack("<256i", magic, n if count is None else count, c, h, w, *[0] * 251)
    return header + (images.transpose(0, 3, 1, 2) / np.float32(127.5) - 1).astype("<f4").tobytes()


def test_unet_cu(tmp_path, out, rng):
    images = rng.integers(0, 256, (70, 16, 16, 3), dtype=np.uint8)
    (tmp_path / "a.bin").write_bytes(unet_cu(images))
    (tmp_path / "a.bin.gz").write_bytes(gzip.compress(unet_cu(images)))
    for name in ("a.bin", "a.bin.gz"):
        report = import_dataset(tmp_path / name, out, force=True)
        assert np.array_equal(contents(out)[0], images) and report.shape == (70, 16, 16, 3)


def test_wrong_unet_cu(tmp_path, out):
    path, images = tmp_path / "a.bin", colours(3)
    for data, message in (
            (unet_cu(images)[:-4], "a.bin' is truncated or damaged"), (unet_cu(images)[:500], "truncated"),
            (unet_cu(images, count=-1), "truncated or damaged"), (unet_cu(images, count=0), "holds no images"),
            (unet_cu(images, magic=12345678), "weights of a model.*numdiff convert"),
            (unet_cu(images, magic=1), "nothing that numdiff can import"),
            (unet_cu(images)[:1024] + b"\xff" * (3 * 8 * 8 * 3 * 4), r"outside of \[-1, 1\]"),
            (struct.pack("<256i", 20240620, 2**31 - 1, 3, 2**31 - 1, 2**31 - 1, *[0] * 251), "truncated or damaged"),
            (b"", "is empty"), (b"x", "nothing that numdiff can import"), (png(images[0]), "is a single image")):
        path.write_bytes(data)
        with pytest.raises(NumdiffError, match=message):
            import_dataset(path, out)
    with pytest.raises(UsageError, match="--labels folders is for folders"):
        path.write_bytes(unet_cu(images))
        import_dataset(path, out, labels="folders")


def test_dataset_of_another_size(tmp_path, out):
    import_dataset(fill(tmp_path / "s", {f"{i % 2}/{i}.png": image for i, image in enumerate(colours(6, 32))}), out)
    small = tmp_path / "small.h5"
    import_dataset(out, small, size=8, channels=1)
    assert contents(small)[0].shape == (6, 8, 8, 1) and contents(small)[1].tolist() == [0, 0, 0, 1, 1, 1]
    import_dataset(small, small, force=True, channels=3)
    assert contents(small)[0].shape == (6, 8, 8, 3)


# The file written -----------------------------------------------------------------------------------------------------

@pytest.fixture
def source(tmp_path):
    return fill(tmp_path / "source", {f"{i:02d}.png": image for i, image in enumerate(colours(20))})


def test_never_overwrites(source, out, tmp_path):
    out.write_text("precious")
    with pytest.raises(UsageError, match="already exists.*--force"):
        import_dataset(source, out)
    with pytest.raises(UsageError):  # an import that fails leaves the old file alone, even with force
        import_dataset(source, out, force=True, labels="folders")
    assert out.read_text() == "precious"
    import_dataset(source, out, force=True)
    assert contents(out)[0].shape == (20, 8, 8, 3)
    with pytest.raises(UsageError, match="is a folder"):
        import_dataset(source, tmp_path)
    with pytest.raises(UsageError, match="there is no folder"):
        import_dataset(source, tmp_path / "none" / "a.h5")


def test_full_disk(source, out, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    for function in ("replace", "fsync"):
        with monkeypatch.context() as patch:
            patch.setattr(writer_module.os, function, full)
            with pytest.raises(NumdiffError, match="^cannot write the dataset .*out.h5: the disk is full; free"):
                import_dataset(source, out)
        assert not out.exists()


@pytest.mark.parametrize("limit", [0, 100, 1000, 10000, 100000])
@needs("posix")
def test_no_room_for_the_file(tmp_path, out, limit):
    """With a real failure of the system's own writes, in a process of its own: HDF5 must not crash it at its end."""
    np.save(tmp_path / "a.npy", np.random.default_rng(0).integers(0, 256, (200, 32, 32, 3), dtype=np.uint8))
    code = ("import resource, sys\n"
            "from numdiff.data.importers import import_dataset\n"
            "from numdiff.errors import NumdiffError\n"
            f"resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, resource.RLIM_INFINITY))\n"
            "try:\n"
            "    import_dataset(*sys.argv[1:])\n"
            "except NumdiffError as error:\n"
            "    sys.exit(str(error))\n")
    result = subprocess.run(forked("-c", code, tmp_path / "a.npy", out), capture_output=True, text=True)
    assert result.returncode == 1 and "out.h5: the file is larger than this system allows" in result.stderr
    assert len(result.stderr.splitlines()) == 1 and not out.exists()


def test_interrupted(source, out):
    def progress(items, total):
        assert total == 20
        yield next(iter(items))
        raise KeyboardInterrupt

    before = threading.active_count()
    with pytest.raises(KeyboardInterrupt):
        import_dataset(source, out, progress=progress)
    assert not out.exists() and threading.active_count() == before


def test_very_many_classes(tmp_path, out):
    """Their names outgrow the 64 kB that old HDF5 files allow an attribute."""
    np.savez(tmp_path / "a.npz", images=np.zeros((5000, 1, 1, 1), np.uint8), labels=np.arange(5000))
    import_dataset(tmp_path / "a.npz", out)
    assert len(contents(out)[2]) == 5000
    with h5py.File(out) as file:
        assert file["labels"].dtype == np.uint16


def test_packed_only_if_asked(tmp_path):
    np.save(tmp_path / "a.npy", np.zeros((100, 8, 8, 3), np.uint8))
    for asked in (False, True):
        import_dataset(tmp_path / "a.npy", tmp_path / "a.h5", force=True, gzip=asked)
        with h5py.File(tmp_path / "a.h5") as file:
            assert file["images"].compression == ("gzip" if asked else None) and file["images"].chunks == (64, 8, 8, 3)


def test_latents_in_half_the_bytes(tmp_path):
    latents = np.random.default_rng(0).normal(size=(70, 4, 4, 4)).astype(np.float32)
    np.save(tmp_path / "a.npy", latents)
    import_dataset(tmp_path / "a.npy", tmp_path / "a.h5", latents=True, float16=True)
    with h5py.File(tmp_path / "a.h5") as file:
        assert file["images"].dtype == np.float16
    with open_dataset(tmp_path / "a.h5") as dataset:
        assert dataset.dtype == np.float32
        assert np.array_equal(dataset.read(np.arange(70)), latents.astype(np.float16).astype(np.float32))
    import_dataset(tmp_path / "a.h5", tmp_path / "b.h5", latents=True, float16=True)  # again
    assert (tmp_path / "b.h5").stat().st_size == (tmp_path / "a.h5").stat().st_size
    latents[3, 0, 0, 0] = 70000
    np.save(tmp_path / "a.npy", latents)
    with pytest.raises(UsageError, match="image 3 of .* holds values beyond those of float16, ±65504: leave --float16"):
        import_dataset(tmp_path / "a.npy", tmp_path / "c.h5", latents=True, float16=True)
    np.save(tmp_path / "a.npy", np.zeros((5, 8, 8, 3), np.uint8))
    with pytest.raises(UsageError, match="--float16 is for latents, and .* holds pixels"):
        import_dataset(tmp_path / "a.npy", tmp_path / "c.h5", float16=True)
    assert not (tmp_path / "c.h5").exists()


def test_a_class_that_hdf5_cannot_name_is_a_sentence(tmp_path):
    with pytest.raises(NumdiffError, match=r"out.h5' cannot be written \(.*NULL.*\): rename the class or"):
        with writer_module.Writer(tmp_path / "out.h5") as writer:
            writer.append(np.zeros((4, 4, 3), np.uint8), label=0)
            writer.finish(["a\0b"])
    assert not list(tmp_path.iterdir())
