"""Labels: the same ones mean the same in every format, and nothing vanishes, merges or becomes a
class unreported."""

import json
import os
import unicodedata
import zipfile

import numpy as np
import pytest

from numdiff.data import open_dataset
from numdiff.errors import NumdiffError, UsageError
from numdiff.extras.importers import folders
from numdiff.extras.importers import labels as labels_module
from numdiff.extras.importers import tree as tree_module
from numdiff.extras.importers.importing import import_dataset
from numdiff.extras.importers.tree import Zip
from tests.extras.importers.sources import colours, contents, fill, png, zipped

COMPOSED, DECOMPOSED = "caf\u00e9", unicodedata.normalize("NFD", "caf\u00e9")
PICTURE = png(colours(1)[0])


def as_csv(pairs):
    return {"labels.csv": "".join(f'"{name}","{label}"\n' for name, label in pairs).encode()}


def as_json(pairs):
    return {"labels.json": json.dumps(dict(pairs)).encode()}


def as_pairs(pairs):
    return {"dataset.json": json.dumps({"labels": pairs}).encode()}


def as_lines(pairs):
    return {
        "labels.jsonl": "".join(
            json.dumps({"file": n, "label": v}) + "\n" for n, v in pairs
        ).encode()
    }


def as_metadata(pairs):
    return {
        "metadata.jsonl": "".join(
            json.dumps({"file_name": n, "label": v}) + "\n" for n, v in pairs
        ).encode()
    }


def as_metadata_csv(pairs):
    return {"metadata.csv": b"file_name,label\n" + as_csv(pairs)["labels.csv"]}


FORMATS = (as_csv, as_json, as_pairs, as_lines, as_metadata, as_metadata_csv)


def pictures(count):
    return {f"{i}.png": image for i, image in enumerate(colours(count))}


def imported(packed, out, files, **options):
    return import_dataset(packed(files), out, force=True, **options)


def labels_of(out):
    """The name of the class of each image."""
    _, labels, classes = contents(out)
    return [classes[i] for i in labels], classes


# One rule -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("write", FORMATS)
@pytest.mark.parametrize(
    "labels, classes",
    [
        (["0.0", "1.0", "10.0", "2.0"], ["0", "1", "2", "10"]),
        ([0.0, 1.0, 10.0, 2.0], ["0", "1", "2", "10"]),
        ([0, 1, 10, 2], ["0", "1", "2", "10"]),
        (["10", "-1", "2", "0"], ["-1", "0", "2", "10"]),
        (["10", "9", "a", "1"], ["1", "10", "9", "a"]),
        (["2.5", "10.5", "1.25", "10.25"], ["1.25", "2.5", "10.25", "10.5"]),
        (["1.0", "x", "10", "2"], ["1.0", "10", "2", "x"]),
        (["001", "010", "002", "100"], ["001", "002", "010", "100"]),
        ([-0.0, 1, 2, 3], ["0", "1", "2", "3"]),
    ],
    ids=str,
)
def test_order_is_the_same_in_every_format(tmp_path, out, write, labels, classes):
    pairs = list(zip(pictures(4), labels, strict=True))
    report = import_dataset(fill(tmp_path / "s", {**pictures(4), **write(pairs)}), out)
    found, names = labels_of(out)
    assert names == classes
    assert [classes.index(name) for name in found] == np.argsort(
        np.argsort(
            [
                classes.index(
                    str(v).removesuffix(".0").replace("-0", "0")
                    if classes != ["1.0", "10", "2", "x"]
                    else str(v)
                )
                for v in labels
            ]
        )
    ).tolist()
    numeric = "x" not in classes and "a" not in classes
    assert (
        "), in numeric order; " if numeric else "), in the order of their text; "
    ) in report.sentences()[0]
    if write is as_csv and not any("." in str(v) for v in labels):  # folders follow the same rule
        import_dataset(
            fill(tmp_path / "f", {f"{v}/{n}": png(pictures(4)[n]) for n, v in pairs}),
            out,
            force=True,
        )
        assert labels_of(out)[1] == classes


def test_order_of_arrays(tmp_path, out):
    for labels, classes in (
        ([0.0, 10.0, 2.0], ["0", "2", "10"]),
        ([0.5, 0.25, 0.5], ["0.25", "0.5"]),
        (np.float32([0.1, 10.5, 2]), ["0.1", "2.0", "10.5"]),
    ):
        np.savez(tmp_path / "a.npz", images=colours(3), labels=labels)
        report = import_dataset(tmp_path / "a.npz", out, force=True)
        assert contents(out)[2] == classes and "in numeric order" in report.sentences()[0]
    assert "fractions" in report.notes[0]
    for names in (
        ["a", "a", "b"],
        ["a", "", "b"],
        ["a", "\u200b", "b"],
        [COMPOSED, DECOMPOSED, "b"],
    ):
        np.savez(tmp_path / "a.npz", images=colours(3), labels=[0, 1, 2], classes=names)
        with pytest.raises(UsageError, match="names that are the same|no name of a class"):
            import_dataset(tmp_path / "a.npz", out, force=True)


def test_one_spelling_of_a_number_and_of_a_word(packed, out):
    for labels, classes in (
        ([1, "1", 1.0, "2"], ["1", "2"]),
        (["cat", "cat ", " cat", "dog"], ["cat", "dog"]),
        ([COMPOSED, DECOMPOSED, "x", "x"], [COMPOSED, "x"]),
    ):
        report = imported(
            packed, out, {**pictures(4), **as_json(zip(pictures(4), labels, strict=True))}
        )
        assert labels_of(out)[1] == classes and "are one class" in " ".join(report.notes)
    report = imported(
        packed,
        out,
        {**pictures(4), **as_json(zip(pictures(4), ["Cat", "cat", "a b", "ab"], strict=True))},
    )
    assert labels_of(out)[1] == ["Cat", "a b", "ab", "cat"]
    assert (
        "differ only in upper and lower case, spaces or digits ('Cat' and 'cat'; 'a b' and 'ab')"
        in report.notes[0]
    )
    report = imported(
        packed, out, {**pictures(4), **as_csv(zip(pictures(4), ["1", "01", "2", "3"], strict=True))}
    )
    assert labels_of(out)[1] == ["01", "1", "2", "3"] and "differ only" in report.notes[0]
    report = imported(
        packed, out, {**pictures(2), **as_csv(zip(pictures(2), ["cat", "None"], strict=True))}
    )
    assert "A class is called 'None'" in report.notes[0]


# No label -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("write", FORMATS)
@pytest.mark.parametrize(
    "label", ["", " ", "\t", "\u200b", "\u00a0", None, float("nan")], ids=ascii
)
def test_empty_label(packed, out, write, label):
    if label is None or label != label:
        if write in (as_csv, as_metadata_csv):
            label = ""
    with pytest.raises(UsageError, match="line without a label|has no label for .*1.png"):
        imported(
            packed,
            out,
            {**pictures(3), **write([("0.png", "a"), ("1.png", label), ("2.png", "b")])},
        )
    assert not out.exists()


@pytest.mark.parametrize(
    "text, message",
    [
        ("0.png,a\n1.png,\n2.png,b\n", "line without a label, '1.png,'"),
        ("0.png,a\n1.png, \n2.png,b\n", "line without a label"),
        ('0.png,a\n1.png,""\n2.png,b\n', "line without a label"),
        ("0.png;a\n1.png;\n2.png;b\n", "line without a label"),
        ("0.png,a\n,c\n1.png,a\n2.png,b\n", "line without a file name"),
        ("0.png,a\n1.png,b\n2.png,NaN\n", None),
        ("0.png,0\n1.png,1\n2.png,NaN\n", "label is 'NaN', where the others are numbers"),
        ("0.png,0\n1.png,-inf\n2.png,2\n", "label is '-inf'"),
        (
            "0.png,a\n1.png,a\n2.png,cat, black\n",
            "line of 3 columns.*'2.png,cat,black', and 2 are expected",
        ),
        (
            "file,label\n0.png,a\n1.png,a\n2.png,cat, black\n",
            "line of 3 columns.*and 2 are in its heading",
        ),
        ("0.png,a,train\n1.png,b,val\n2.png,c,val\n", "add a heading"),
        ('0.png,a\n1.png,b\n2.png,"c\n', "not a table of text"),
        ("file,breed,age\n0.png,a,1\n1.png,a,2\n2.png,b,3\n", "none of which is called label"),
        ("0.png,a\n1.png,a\n2.png,a\n0.png,b\n", "0.png two labels"),
        ("0.png,a\n1.png,a\n2.png,a\n./0,b\n", "0.png two labels"),
        (
            "0.PNG,a\n1.png,a\n2.png,a\n",
            "no label to 1 of 3 images .*0.png; it names 0.PNG, which is not there",
        ),
    ],
)
def test_tables_that_say_too_little(packed, out, text, message):
    files = {**pictures(3), "labels.csv": text.encode()}
    if message is None:
        assert "called 'NaN'" in imported(packed, out, files).notes[0]
        return
    with pytest.raises(UsageError, match=message):
        imported(packed, out, files)


@pytest.mark.parametrize(
    "text, classes",
    [
        ("\ufefffile,label\r\n0.png,b\r\n1.png,a\r\n", ["a", "b"]),
        ("file,label\r0.png,b\r1.png,a\r", ["a", "b"]),
        ('0.png, "b, c"\n1.png, a\n', ["a", "b, c"]),
        ("0.png,b,\n1.png,a,\n", ["a", "b"]),
        ("\n\n0.png,b\n\n1.png,a\n\n", ["a", "b"]),
        ("0.png,b\n1.png,a\n0.png,b\n", ["a", "b"]),
        ("label,file\nb,0.png\na,1.png\n", ["a", "b"]),
        ("0.png\tb\n1.png\ta\n", ["a", "b"]),
        ("0,b\n1,a\n", ["a", "b"]),
        ("what,breed\n0.png,b\n1.png,a\n", ["a", "b"]),
        ("id,label,class\n0.png,b,x\n1.png,a,x\n", ["a", "b"]),
        ("C:\\photos\\0.png,b\n/home/me/photos/1.png,a\n", ["a", "b"]),
        ("missing.png,c\n0.png,b\n1.png,a\n", ["a", "b"]),
    ],
)
def test_tables_of_other_habits(packed, out, text, classes):
    report = imported(packed, out, {**pictures(2), "labels.csv": text.encode()})
    assert labels_of(out) == (["b", "a"], classes) or classes[1] == "b, c"
    notes = " ".join(report.notes)
    assert ("is taken for a heading" in notes) == text.startswith("what")
    assert ("several columns" in notes) == text.startswith("id")
    assert ("also names 1 that are not among the images (missing.png)" in notes) == text.startswith(
        "missing"
    )


def test_a_heading_may_be_the_name_of_an_image(packed, out):
    files = {"image.png": PICTURE, "id.png": PICTURE}
    imported(packed, out, {**files, "labels.csv": b"image,label\nimage.png,b\nid.png,a\n"})
    assert labels_of(out)[0] == ["a", "b"]


def test_a_name_elsewhere_is_another_image(packed, out):
    files = {"x/1.png": PICTURE, "y/2.png": PICTURE}
    for name in ("y/1.png", "z/1.png", "xx/1.png"):
        with pytest.raises(
            UsageError, match=f"no label to 1 of 2 images .*x/1.png; it names {name}"
        ):
            imported(packed, out, {**files, "labels.csv": f"{name},a\ny/2.png,b\n".encode()})
    for name in ("data/x/1.png", "/data/x/1.png", "1.png", "1", "x/1", "./x/../x/1.png"):
        imported(packed, out, {**files, "labels.csv": f"{name},a\ny/2.png,b\n".encode()})
        assert labels_of(out)[0] == ["a", "b"]


@pytest.mark.parametrize(
    "text, message",
    [
        (
            '{"0.png": "a", "1.png": "b", "0.png": "c"}',
            "two labels: '0.png' stands twice in it, with 'a' and 'c'",
        ),
        ('{"0.png": true, "1.png": 1}', "a label is True"),
        ('{"0.png": 1, "1.png": Infinity}', "a label is inf"),
        ('{"0.png": {"label": 1}, "1.png": 1}', "a label is {'label': 1}"),
        ('{"a": ["0.png"], "b": ["1.png"]}', r"names none of the images \(it has a, b"),
        ('[["0.png", "a"], [null, "b"]]', "None where the name of a file should be"),
        ('[{"file": "0.png", "label": "a"}, {"file": "1.png"}]', "no label for .*1.png .None"),
        ('[{"file": "0.png", "label": "a"}, {"label": "b"}]', "None where the name of a file"),
        (
            '{"labels": {"0.png": 0, "1.png": 1}, "classes": ["a", "a"]}',
            "two names that are the same",
        ),
        ('{"labels": {"0.png": 0, "1.png": 1}, "classes": ["a", ""]}', "no name of a class"),
        ('{"labels": {"0.png": 0, "1.png": 1}, "classes": ["a", null]}', "no name of a class"),
        ('{"labels": {"0.png": 0, "1.png": 1}, "classes": ["a", ["b"]]}', "no name of a class"),
        (
            '{"labels": {"0.png": 1, "1.png": 2}, "classes": ["1", "2", "3"]}',
            "name of one of its classes and the index",
        ),
        ('{"labels": {"0.png": 1, "1.png": -1}, "classes": ["a", "b"]}', "label -1, which is none"),
        ("{}", "names none of the images .it has no line"),
    ],
)
def test_json_that_says_too_little(packed, out, text, message):
    with pytest.raises(UsageError, match=message):
        imported(packed, out, {**pictures(2), "labels.json": text.encode()})


@pytest.mark.parametrize(
    "labels, names, expected",
    [
        ([0, 1], ["b", "a"], ["b", "a"]),
        (["0", 1.0], ["b", "a"], ["b", "a"]),
        (["a", "b"], ["b", "a"], ["a", "b"]),
        (["a", 0], ["b", "a"], ["a", "b"]),
        ([1, 0], ["1", "2"], ["2", "1"]),
        ([3, 5], [3, 5], ["3", "5"]),
        ([DECOMPOSED, "b"], ["b", COMPOSED], [COMPOSED, "b"]),
        ([0, 1], ["0", "1"], ["0", "1"]),
    ],
    ids=ascii,
)
def test_classes_that_a_file_lists(packed, out, labels, names, expected):
    text = json.dumps(
        {"labels": dict(zip(pictures(2), labels, strict=True)), "classes": [*names, "unused"]}
    )
    report = imported(packed, out, {**pictures(2), "labels.json": text.encode()})
    assert labels_of(out) == (expected, [*map(str, names), "unused"])
    assert (
        "), in the file's order; " in report.sentences()[0] and "unused 0" in report.sentences()[0]
    )


def test_a_file_without_labels_says_so(packed, out):
    report = imported(
        packed, out, {"a/0.png": PICTURE, "b/1.png": PICTURE, "dataset.json": b'{"labels": null}'}
    )
    assert contents(out)[1] is None and "says that there are no labels" in report.notes[0]


# Names in two normal forms ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "one, other", [(COMPOSED, DECOMPOSED), (DECOMPOSED, COMPOSED)], ids=["disk NFC", "disk NFD"]
)
def test_names_are_compared_in_one_form(packed, out, one, other):
    imported(packed, out, {f"{one}/1.png": PICTURE, "tea/2.png": PICTURE})
    assert labels_of(out)[1] == [one, "tea"]
    for given in (one, other, other.upper()):
        with open_dataset(out, classes=[given]) as dataset:
            assert dataset.classes == [one] and len(dataset) == 1
    for write in FORMATS:
        files = {f"{one}.png": PICTURE, f"{other}/x.png": PICTURE}
        imported(packed, out, {**files, **write([(f"{other}.png", other), (f"{one}/x.png", "b")])})
        assert labels_of(out) == ([other, "b"] if one < other else ["b", other], ["b", other])
    imported(packed, out, {f"{one}_1.png": PICTURE, f"{other}_2.png": PICTURE}, labels="prefix")
    assert len(labels_of(out)[1]) == 1
    with pytest.raises(
        UsageError, match=r"'cafe\\u0301' and 'caf\u00e9'|'caf\u00e9' and 'cafe\\u0301'"
    ):
        imported(packed, out, {f"{one}/1.png": PICTURE, f"{other}/2.png": PICTURE})


def test_zips_of_macos(tmp_path, out):
    """Its names are UTF-8, and the flag that says so is not set."""
    path = zipped(tmp_path / "a.zip", {f"{DECOMPOSED}/1.png": PICTURE, "tea/2.png": PICTURE})
    data = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as archive:
        places = [member.header_offset + 6 for member in archive.infolist()]
    for place in [*places, *(i + 8 for i in range(len(data)) if data[i : i + 4] == b"PK\1\2")]:
        data[place + 1] &= ~8
    path.write_bytes(data)
    import_dataset(path, out)
    assert labels_of(out)[1] == [DECOMPOSED, "tea"]
    legacy = zipped(
        tmp_path / "b.zip", {"caf\u00e9/1.png": PICTURE, "tea/2.png": PICTURE}
    ).read_bytes()
    legacy = legacy.replace("caf\u00e9".encode(), b"caf\x82\x82")
    (tmp_path / "b.zip").write_bytes(legacy.replace(b"\x14\0\0\x08", b"\x14\0\0\0"))
    tree = Zip(tmp_path / "b.zip")
    tree.close()
    assert tree.names == ["caf\u00e9\u00e9/1.png", "tea/2.png"]


# Folders ------------------------------------------------------------------------------------------


def test_folders_that_would_merge(packed, out):
    for names in (("cat", "cat "), ("1", "1.0"), (COMPOSED, DECOMPOSED)):
        files = {f"{name}/{i}.png": PICTURE for i, name in enumerate((*names, "2"))}
        with pytest.raises(UsageError, match="would be one class: rename or join them"):
            imported(packed, out, files)
        assert imported(packed, out, files, labels="none").shape[0] == 3
    report = imported(packed, out, {"Cat/1.png": PICTURE, "cat/2.png": PICTURE})
    assert (
        labels_of(out)[1] == ["Cat", "cat"]
        and "differ only in upper and lower case" in report.notes[0]
    )
    for blank in (" ", "\u200b"):
        with pytest.raises(UsageError, match="name that cannot be seen"):
            imported(packed, out, {f"{blank}/1.png": PICTURE, "cat/2.png": PICTURE})
    with pytest.raises(UsageError, match="has no _ after a class"):
        imported(packed, out, {"_1.png": PICTURE, "cat_2.png": PICTURE}, labels="prefix")


def directories(source, *names):
    """Add empty folders to a source."""
    if source.is_dir():
        for name in names:
            (source / name).mkdir()
    else:
        with zipfile.ZipFile(source, "a") as archive:
            around = "all/" if archive.namelist()[0].startswith("all/") else ""
            for name in names:
                archive.writestr(f"{around}{name}/", b"")
    return source


def test_an_empty_class_folder_stays_a_class(packed, out):
    files = {"a/1.png": PICTURE, "c/2.png": PICTURE, "d/notes.txt": b"?"}
    report = import_dataset(directories(packed(files), "b", "c/deep"), out)
    assert labels_of(out) == (["a", "c"], ["a", "b", "c", "d"]) and report.counts == [1, 0, 1, 0]
    assert "The class folders b, d hold no images and are kept as classes" in report.notes[0]
    report = imported(packed, out, {"a/1.png": PICTURE, "b/1.png": b"?", "c/2.png": PICTURE})
    assert labels_of(out)[1] == ["a", "b", "c"]
    report = import_dataset(directories(packed({"a/1.png": PICTURE}), "b"), out, force=True)
    if "b" in " ".join(report.notes):
        assert contents(out)[1] is None and "there are no classes; " in report.notes[0]


def test_an_empty_folder_changes_what_is_cached(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("NUMDIFF_CACHE_DIR", str(tmp_path / "cache"))
    source = fill(tmp_path / "s", {"a/1.png": PICTURE, "c/2.png": PICTURE})
    with open_dataset(source) as dataset:
        assert dataset.classes == ["a", "c"]
    (source / "b").mkdir()
    with open_dataset(source) as dataset:
        assert dataset.classes == ["a", "b", "c"]
    assert "The class folder b holds no images" in capsys.readouterr().err
    assert folders.class_names(source) == ["a", "b", "c"]


def test_links_to_one_folder(tmp_path, out):
    source = fill(tmp_path / "s", {"a/1.png": PICTURE, "c/2.png": PICTURE, "c/deep/3.png": PICTURE})
    os.symlink("deep", source / "c" / "more")
    os.symlink(source, source / "c" / "deep" / "back")
    report = import_dataset(source, out)
    assert report.shape[0] == 3 and labels_of(out)[1] == ["a", "c"]
    assert (
        "2 links were left out, as the folder that it leads to is read already (c/deep/back is the folder itself, "
        "c/more is c/deep)."
    ) in report.notes
    os.symlink("a", source / "b")
    with pytest.raises(
        UsageError,
        match="b in .* is a link to a, whose images would then be of two classes, b and a",
    ):
        import_dataset(source, out, force=True)
    os.rename(source / "b", source / "0")  # read before what it leads to
    with pytest.raises(UsageError, match="0 in .* is a link to a, whose images"):
        import_dataset(source, out, force=True)
    os.remove(source / "0")
    # part of a class in another one
    for name, target in (("b", "c/deep"), ("0", "c/deep"), ("a/more", "../c/deep")):
        os.symlink(target, source / name)
        with pytest.raises(UsageError, match="is a link to .*two classes"):
            import_dataset(source, out, force=True)
        os.remove(source / name)
    os.symlink(".", source / "b")
    assert labels_of(out)[1] == ["a", "c"] and import_dataset(source, out, force=True).shape[0] == 3
    elsewhere = fill(tmp_path / "elsewhere", {"1.png": PICTURE})
    linked = tmp_path / "linked"
    linked.mkdir()
    for name in ("x", "y"):
        os.symlink(elsewhere, linked / name)
    with pytest.raises(UsageError, match="y in .* is a link to x"):
        import_dataset(linked, out, force=True)
    assert import_dataset(linked, out, labels="none", force=True).shape[0] == 1


def test_odd_folders(packed, out):
    junk = {
        f"{name}/1.png": PICTURE
        for name in (
            "@eaDir",
            "#recycle",
            "__MACOSX",
            ".thumbnails",
            "cat/@eaDir/x.jpg",
            "$RECYCLE.BIN",
        )
    }
    files = {"cat/1.png": PICTURE, "dog/2.png": PICTURE, "dog/._2.png": b"?", "dog/Thumbs.db": b"?"}
    report = imported(packed, out, {**files, **junk})
    assert report.shape[0] == 2 and labels_of(out)[1] == ["cat", "dog"] and not report.unreadable
    assert any(
        note.startswith("7 hidden or system entries were left out (") for note in report.notes
    )
    report = imported(packed, out, {"train/1.png": PICTURE, "Val/2.png": PICTURE})
    assert "folders Val, train look like parts of a data set" in report.notes[0]
    report = imported(packed, out, {"train/cat/1.png": PICTURE, "train/dog/2.png": PICTURE})
    assert labels_of(out)[1] == ["cat", "dog"] and not report.notes
    report = imported(packed, out, {"cat/1.png": PICTURE, "thumbnails/2.png": PICTURE})
    assert "folder thumbnails may be no class" in report.notes[0]


# Hugging Face's metadata --------------------------------------------------------------------------


def test_metadata_in_each_folder(packed, out):
    files = {
        "train/1.png": PICTURE,
        "train/2.png": PICTURE,
        "test/1.png": PICTURE,
        "train/metadata.csv": b'file_name,text,label\n1.png,a photo,cat\n2.png,"a, b",dog\n',
        "test/metadata.jsonl": b'{"file_name": "1.png", "label": "dog", "objects": {"bbox": [1]}}\n\n',
    }
    report = imported(packed, out, files)
    assert labels_of(out) == (["dog", "cat", "dog"], ["cat", "dog"]) and report.ignored == []
    assert "The labels are those of " in report.notes[-1] and "--labels folders" in report.notes[-1]
    imported(packed, out, files, labels="folders")
    assert labels_of(out)[1] == ["test", "train"]


def test_metadata_without_labels(packed, out):
    files = {"cat/1.png": PICTURE, "dog/2.png": PICTURE}
    for text, message in (
        (
            b"file_name,text\n1.png,a photo\n",
            "has no column label (its columns are file_name, text",
        ),
        (b"a,b\n1,2\n", "has no column file_name"),
        (b"file_name,label\n7.png,x\n", "names none of the images"),
    ):
        report = imported(packed, out, {**files, "metadata.csv": text})
        assert labels_of(out)[1] == ["cat", "dog"] and message in report.notes[0]
        assert report.ignored[0].endswith("metadata.csv")
    report = imported(packed, out, {**files, "metadata.parquet": b"PAR1"})
    assert "metadata.parquet is not read: save it as metadata.csv" in report.notes[0]
    for name, text in (
        ("metadata.csv", b"file_name,label\n1.png,x\n"),
        ("metadata.csv", b"file_name,label\n1.png,\n"),
        ("metadata.jsonl", b'{"file_name": "cat/1.png", "label": null}\n'),
        ("metadata.jsonl", b'{"file_name": \n'),
    ):
        with pytest.raises(
            UsageError, match="metadata.* (gives no|line without a|has no) label|not valid"
        ):
            imported(packed, out, {**files, name: text})
    with pytest.raises(UsageError, match="several metadata files in one folder"):
        imported(packed, out, {**files, "metadata.csv": b"", "metadata.jsonl": b""})


def test_metadata_as_the_labels_option(tmp_path, out):
    source = fill(tmp_path / "s", {"1.png": PICTURE, "2.png": PICTURE})
    labels = tmp_path / "metadata.jsonl"
    labels.write_text('{"file_name": "1.png", "label": 1}\n{"file_name": "2.png", "label": "0"}\n')
    import_dataset(source, out, labels=labels)
    assert labels_of(out) == (["1", "0"], ["0", "1"])


@pytest.mark.parametrize("name", ["fifo.csv", "fifo.json", "folder.csv", "/dev/zero.csv"])
def test_labels_that_are_no_file(tmp_path, out, name):
    """A FIFO would wait for ever."""
    source = fill(tmp_path / "s", {"1.png": PICTURE})
    path = tmp_path / name.replace("/dev/", "")
    if "fifo" in name:
        os.mkfifo(path)
    elif "zero" in name:
        os.symlink("/dev/zero", path)
    else:
        path.mkdir()
    with pytest.raises(NumdiffError, match="cannot be read .it is a (FIFO|folder|device)"):
        import_dataset(source, out, labels=path)
    if not path.is_dir():  # a folder among the images is a folder
        path.rename(source / f"labels{path.suffix}")
        with pytest.raises(NumdiffError, match="'labels.* cannot be read .it is a (FIFO|device)"):
            import_dataset(source, out)


def test_training_names_the_command_that_has_the_options(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("NUMDIFF_CACHE_DIR", str(tmp_path / "cache"))
    with pytest.raises(
        UsageError, match="or add --labels none .options of `numdiff data import .*/s OUT.h5`"
    ):
        open_dataset(
            fill(tmp_path / "s", {"a/1.png": PICTURE, "c/2.png": PICTURE, "3.png": PICTURE})
        )
    open_dataset(fill(tmp_path / "t", {"train/1.png": PICTURE, "val/2.png": PICTURE})).close()
    assert "add --labels none (options of `numdiff data import" in capsys.readouterr().err


@pytest.mark.parametrize(
    "name, line, message",
    [
        ("labels.csv", b"9.png,a\n", "more than 18 lines for 4 images"),
        ("labels.csv", b"\n", "more than 18 lines"),
        ("labels.jsonl", b'{"file": "9.png", "label": 1}\n', "more than 10 lines"),
        ("labels.jsonl", b"{}\r", "10 lines"),
        ("labels.json", b"[", "more than 10 values"),
        ("labels.json", b"{}, ", "more than 10 values"),
    ],
)
def test_labels_files_without_end(packed, out, monkeypatch, name, line, message):
    """64 MB of them are 64 kB in a zip, and would take a minute or gigabytes."""
    monkeypatch.setattr(labels_module, "MAXIMUM_LINES", 10)
    monkeypatch.setattr(labels_module, "MAXIMUM_VALUES", 10)
    with pytest.raises(UsageError, match=message):
        imported(packed, out, {**pictures(4), name: line * 50})


def test_metadata_files_are_small_together(packed, out, monkeypatch):
    monkeypatch.setattr(tree_module, "MAXIMUM_LABELS_BYTES", 40)
    files = {f"{i}/1.png": PICTURE for i in range(3)}
    with pytest.raises(UsageError, match="have 72 bytes, more than the 40 that are read"):
        imported(
            packed,
            out,
            {**files, **{f"{i}/metadata.csv": b"file_name,label\n1.png,a\n" for i in range(3)}},
        )
