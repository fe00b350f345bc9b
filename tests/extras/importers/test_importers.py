"""The importers, fed with folders and zips; their labels."""

import csv
import json
import os

import h5py
import numpy as np
import pytest
from PIL import Image

from numdiff.errors import NumdiffError, UsageError
from numdiff.extras.importers.importing import import_dataset
from tests.extras.importers.sources import colours, contents, fill, png, saved, zipped


def test_classes_are_the_folders(packed, out):
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
    report = import_dataset(source, out)
    written, labels, classes = contents(out)
    assert (
        classes == ["cat", "dog", "eel"]
        and labels.tolist() == [0, 0, 1, 2, 2]
        and np.array_equal(written, images)
    )
    assert (
        report.shape == (5, 8, 8, 3)
        and report.counts == [2, 1, 2]
        and not report.unreadable
        and not report.ignored
    )
    assert (
        "5 images of 8×8×3" in report.sentences()[0]
        and "cat 2, dog 1, eel 2" in report.sentences()[0]
    )
    with h5py.File(out) as file:
        assert file["images"].chunks == (64, 8, 8, 3) and file["labels"].dtype == np.uint8
        assert [name.decode().split("/")[-1] for name in file["names"]] == [
            "b.png",
            "c.png",
            "a.png",
            "1.png",
            "2.png",
        ]


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
    assert (
        "order of their numbers (0, 1, 2, …)" in report.notes[0]
        and "(0, 1, 10, …)" in report.notes[0]
    )
    assert "add --class-order words" in report.sentences()[-1]
    report = import_dataset(source, out, order="words", force=True)
    images, labels, classes = contents(out)
    assert classes == sorted(map(str, range(12))) and not report.notes
    assert np.array_equal(images, colours(12)[[int(classes[i]) for i in labels]])
    assert not import_dataset(
        packed({f"c{i}/{i}.png": colours(1)[0] for i in range(3)}),
        out,
        force=True,
        labels="folders",
    ).notes or "all" in str(source)


def test_classes_by_prefix(packed, out):
    """guided-diffusion's names; its indices with --class-order words."""
    names = ["x/10_a.png", "2_b_c.png", "10_c.png", "y/3_d.png"]
    source = packed(dict(zip(names, colours(4), strict=True)))
    report = import_dataset(source, out, labels="prefix")
    images, labels, classes = contents(out)
    assert (
        classes == ["2", "3", "10"]
        and report.counts == [1, 1, 2]
        and "--class-order words" in report.notes[0]
    )
    import_dataset(source, out, labels="prefix", order="words", force=True)
    assert contents(out)[2] == ["10", "2", "3"]
    with pytest.raises(UsageError, match="e.png has no _ after a class in the name"):
        import_dataset(
            packed({"a_b.png": colours(1)[0], "e.png": colours(1)[0]}),
            out,
            labels="prefix",
            force=True,
        )
    with pytest.raises(UsageError, match="--class-order alphabet is unknown"):
        import_dataset(source, out, order="alphabet", force=True)


def test_labels_option(packed, out):
    source = packed(
        {"a/1.png": colours(2)[0], "b/2.png": colours(2)[1], "labels.csv": b"1.png,x\n2.png,x\n"}
    )
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


def test_image_next_to_class_folders(packed, out):
    source = packed({"a/1.png": colours(1)[0], "b/2.png": colours(1)[0], "3.png": colours(1)[0]})
    with pytest.raises(UsageError, match="3.png is next to the class folders .*--labels none"):
        import_dataset(source, out)
    assert import_dataset(source, out, labels="none").shape[0] == 3


CSV = "file,label\na.png,cat\nsub/b.png,dog\nc.png,cat\n"


@pytest.mark.parametrize(
    "name, text",
    [
        ("labels.csv", CSV),
        ("labels.csv", "\ufeff" + CSV.replace("\n", "\r\n")),
        ("labels.csv", CSV.replace(",", ";")),
        ("labels.tsv", CSV.replace(",", "\t")),
        ("labels.csv", CSV[11:]),
        ("labels.csv", "id,split,class\na,train,cat\nb,test,dog\nc,train,cat\n"),
        ("labels.csv", '"a.png","cat"\n"sub/b.png","dog"\n"c.png","cat"\n'),
        ("labels.json", json.dumps({"a.png": "cat", "sub/b.png": "dog", "c.png": "cat"})),
        ("labels.json", json.dumps([["a.png", "cat"], ["sub/b.png", "dog"], ["c.png", "cat"]])),
        (
            "labels.json",
            json.dumps([{"file": n, "label": v} for n, v in csv.reader(CSV.splitlines()[1:])]),
        ),
        (
            "dataset.json",
            json.dumps(
                {
                    "labels": [["a.png", 0], ["sub/b.png", 1], ["c.png", 0]],
                    "classes": ["cat", "dog"],
                }
            ),
        ),
    ],
    ids=[
        "csv",
        "csv of Windows",
        "semicolons",
        "tabs",
        "no heading",
        "other columns, no suffixes",
        "quotes",
        "json dict",
        "json list",
        "json of dicts",
        "NVlabs with classes",
    ],
)
def test_labels_files(packed, out, name, text):
    images = colours(3)
    source = packed(
        {"a.png": images[0], "c.png": images[1], "sub/b.png": images[2], name: text.encode()}
    )
    report = import_dataset(source, out)
    written, labels, classes = contents(out)
    assert (
        classes == ["cat", "dog"]
        and labels.tolist() == [0, 0, 1]
        and np.array_equal(written, images)
    )
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
    source = packed(
        {"a.png": colours(2)[0], "b.png": colours(2)[1], "labels.csv": b"a.png,10\nb.png,7\n"}
    )
    import_dataset(source, out)
    assert contents(out)[1].tolist() == [1, 0] and contents(out)[2] == ["7", "10"]


@pytest.mark.parametrize(
    "text, message",
    [
        (b"a.png,1\n", "no label to 1 of 2 images .*b.png"),
        (b"x.png,1\ny.png,2\n", "names none of the images"),
        (b"a.png,1\nb.png\n", "line without a label"),
        (b"a.png,1\nb.png,2\na.png,3\n", "two labels"),
        (b"", "is empty"),
        (b"\xff\xfe\x00", "not UTF-8"),
    ],
)
def test_wrong_labels_csv(packed, out, text, message):
    source = packed({"a.png": colours(2)[0], "b.png": colours(2)[1], "labels.csv": text})
    with pytest.raises(UsageError, match=message):
        import_dataset(source, out)


@pytest.mark.parametrize(
    "text, message",
    [
        (b"{", "not valid JSON"),
        (b"[" * 100000, "not valid JSON"),
        (b"3", "a format that numdiff knows"),
        (b'{"a.png": [1, 2], "b.png": [1, 2]}', "must be a word or a number"),
        (
            b'{"labels": {"a.png": 1, "b.png": 2}, "classes": ["x", "y"]}',
            "label 2, which is none of its 2 classes",
        ),
    ],
)
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
    report = import_dataset(
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
        ),
        out,
    )
    assert np.array_equal(contents(out)[0], images)
    assert [name.split("/")[-1] for name, _ in report.unreadable] == [
        "c.png",
        "d.jpg",
        "e.png",
        "f.png",
        "h.heic",
    ]
    assert dict(report.unreadable)[report.unreadable[0][0]] == "empty file"
    assert [name.split("/")[-1] for name in report.ignored] == ["notes.txt", "page.html"]
    text = " ".join(report.sentences())
    assert (
        "5 unreadable images were left out" in text
        and "d.jpg: " in text
        and "2 other files were left out" in text
    )


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
        assert sorted(name.decode() for name in file["names"]) == [
            "etc/evil2.png",
            "evil.png",
            "x.png",
        ]


def test_damaged_zips(tmp_path, out):
    rng = np.random.default_rng(0)
    noise = rng.integers(0, 256, (3, 32, 32, 3), dtype=np.uint8)
    path = zipped(tmp_path / "a.zip", {f"{i}.png": image for i, image in enumerate(noise)})
    data = path.read_bytes()
    (tmp_path / "short.zip").write_bytes(data[: len(data) // 2])
    with pytest.raises(NumdiffError, match="short.zip' is truncated or damaged"):
        import_dataset(tmp_path / "short.zip", out)
    damaged = bytearray(data)
    damaged[1000:1100] = bytes(100)  # within the first image
    (tmp_path / "damaged.zip").write_bytes(damaged)
    report = import_dataset(tmp_path / "damaged.zip", out)
    assert [name for name, _ in report.unreadable] == ["0.png"] and np.array_equal(
        contents(out)[0], noise[1:]
    )
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
    assert report.unreadable == [
        ("b/fifo.png", "it is a FIFO"),
        ("b/gone.png", "it is a link that leads to no file"),
        ("b/round.png", "it is a link that leads to no file"),
    ]


def test_names_that_a_zip_has_twice(tmp_path, out):
    path = zipped(
        tmp_path / "a.zip",
        {"a.png": colours(2)[0], "./a.png": colours(2)[1], "b.png": colours(2)[0]},
    )
    report = import_dataset(path, out)
    assert report.shape[0] == 2 and np.array_equal(contents(out)[0][0], colours(2)[1])
    assert (
        "1 file was left out, as later ones in the zip have the same names (a.png)."
        in report.sentences()
    )


def test_names_that_are_not_utf8(tmp_path, out):
    folder = fill(tmp_path / "s", {"a/1.png": colours(2)[0]})
    os.makedirs(os.fsencode(folder) + b"/caf\xe9")
    with open(os.fsencode(folder) + b"/caf\xe9/2.png", "wb") as file:
        file.write(png(colours(2)[1]))
    report = import_dataset(folder, out)
    assert (
        contents(out)[2] == ["a", "caf\\udce9"] and "caf" in report.sentences()[0].encode().decode()
    )
