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
from numdiff.extras.importers.tree import Zip
from tests.extras.importers.sources import colours, fill, png, zipped

COMPOSED, DECOMPOSED = "caf\u00e9", unicodedata.normalize("NFD", "caf\u00e9")
PICTURE = png(colours(1)[0])


def as_csv(pairs):
    return {"labels.csv": "".join(f'"{name}","{label}"\n' for name, label in pairs).encode()}


def as_json(pairs):
    return {"labels.json": json.dumps(dict(pairs)).encode()}


def as_pairs(pairs):
    return {"dataset.json": json.dumps({"labels": pairs}).encode()}


def as_lines(pairs, name="labels.jsonl", key="file"):
    lines = [json.dumps({key: image, "label": label}) + "\n" for image, label in pairs]
    return {name: "".join(lines).encode()}


def as_metadata(pairs):
    return as_lines(pairs, "metadata.jsonl", "file_name")


def as_metadata_csv(pairs):
    return {"metadata.csv": b"file_name,label\n" + as_csv(pairs)["labels.csv"]}


FORMATS = (as_csv, as_json, as_pairs, as_lines, as_metadata, as_metadata_csv)


def pictures(count):
    return {f"{i}.png": image for i, image in enumerate(colours(count))}


def labelled(labels, write=as_json):
    """As many pictures, and a file of their labels."""
    files = pictures(len(labels))
    return {**files, **write(list(zip(files, labels, strict=True)))}


def called(*names):
    """One picture under several names."""
    return dict.fromkeys(names, PICTURE)


# One rule -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("write", FORMATS)
@pytest.mark.parametrize(
    "labels, names, order",
    [
        (["0.0", "1.0", "10.0", "2.0"], ["0", "1", "10", "2"], float),
        ([0.0, 1.0, 10.0, 2.0], ["0", "1", "10", "2"], float),
        ([0, 1, 10, 2], ["0", "1", "10", "2"], float),
        (["10", "-1", "2", "0"], ["10", "-1", "2", "0"], float),
        (["10", "9", "a", "1"], ["10", "9", "a", "1"], str),
        (["2.5", "10.5", "1.25", "10.25"], ["2.5", "10.5", "1.25", "10.25"], float),
        (["1.0", "x", "10", "2"], ["1.0", "x", "10", "2"], str),
        (["001", "010", "002", "100"], ["001", "010", "002", "100"], float),
        ([-0.0, 1, 2, 3], ["0", "1", "2", "3"], float),
    ],
    ids=str,
)
def test_order_is_the_same_in_every_format(imported, write, labels, names, order):
    found = imported(labelled(labels, write))
    assert found.names == names and found.classes == sorted(names, key=order)
    said = "numeric order" if order is float else "the order of their text"
    assert f"), in {said}; " in found.report.sentences()[0]
    if write is as_csv and labels == names:  # folders follow the same rule
        assert imported(called(*(f"{name}/1.png" for name in names))).classes == found.classes


def test_order_of_arrays(imported, refused, tmp_path):
    path = tmp_path / "a.npz"
    for labels, classes in (
        ([0.0, 10.0, 2.0], ["0", "2", "10"]),
        ([0.5, 0.25, 0.5], ["0.25", "0.5"]),
        (np.float32([0.1, 10.5, 2]), ["0.1", "2.0", "10.5"]),
    ):
        np.savez(path, images=colours(3), labels=labels)
        found = imported(path)
        assert found.classes == classes and "in numeric order" in found.report.sentences()[0]
    assert "fractions" in found.report.notes[0]
    for names in (
        ["a", "a", "b"],
        ["a", "", "b"],
        ["a", "\u200b", "b"],
        [COMPOSED, DECOMPOSED, "b"],
    ):
        np.savez(path, images=colours(3), labels=[0, 1, 2], classes=names)
        refused(path, "names that are the same|no name of a class")


@pytest.mark.parametrize(
    "labels, classes, note",
    [
        ([1, "1", 1.0, "2"], ["1", "2"], "are one class"),
        (["cat", "cat ", " cat", "dog"], ["cat", "dog"], "are one class"),
        ([COMPOSED, DECOMPOSED, "x", "x"], [COMPOSED, "x"], "are one class"),
        (
            ["Cat", "cat", "a b", "ab"],
            ["Cat", "a b", "ab", "cat"],
            "differ only in upper and lower case, spaces or digits ('Cat' and 'cat'; 'a b' and "
            "'ab')",
        ),
        (["1", "01", "2", "3"], ["01", "1", "2", "3"], "differ only"),
        (["cat", "None"], ["None", "cat"], "A class is called 'None'"),
    ],
    ids=ascii,
)
def test_one_spelling_of_a_number_and_of_a_word(imported, packed, labels, classes, note):
    found = imported(packed(labelled(labels)))
    assert found.classes == classes and note in " ".join(found.report.notes)


# No label -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("write", FORMATS)
@pytest.mark.parametrize(
    "label", ["", " ", "\t", "\u200b", "\u00a0", None, float("nan")], ids=ascii
)
def test_empty_label(refused, packed, out, write, label):
    if label is None or label != label:
        if write in (as_csv, as_metadata_csv):
            label = ""
    files = labelled(["a", label, "b"], write)
    refused(packed(files), "line without a label|has no label for .*1.png")
    assert not out.exists()


@pytest.mark.parametrize(
    "text, message",
    [
        ("0.png,a\n1.png,\n2.png,b\n", "line without a label, '1.png,'"),
        ("0.png,a\n1.png, \n2.png,b\n", "line without a label"),
        ('0.png,a\n1.png,""\n2.png,b\n', "line without a label"),
        ("0.png;a\n1.png;\n2.png;b\n", "line without a label"),
        ("0.png,a\n,c\n1.png,a\n2.png,b\n", "line without a file name"),
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
def test_tables_that_say_too_little(refused, packed, text, message):
    refused(packed({**pictures(3), "labels.csv": text.encode()}), message)


def test_a_class_may_be_called_nan(imported, packed):
    found = imported(packed(labelled(["a", "b", "NaN"], as_csv)))
    assert "called 'NaN'" in found.report.notes[0]


@pytest.mark.parametrize(
    "text, note",
    [
        ("\ufefffile,label\r\n0.png,b\r\n1.png,a\r\n", None),
        ("file,label\r0.png,b\r1.png,a\r", None),
        ('0.png, "b"\n1.png, a\n', None),
        ("0.png,b,\n1.png,a,\n", None),
        ("\n\n0.png,b\n\n1.png,a\n\n", None),
        ("0.png,b\n1.png,a\n0.png,b\n", None),
        ("label,file\nb,0.png\na,1.png\n", None),
        ("0.png\tb\n1.png\ta\n", None),
        ("0,b\n1,a\n", None),
        ("what,breed\n0.png,b\n1.png,a\n", "is taken for a heading"),
        ("id,label,class\n0.png,b,x\n1.png,a,x\n", "several columns"),
        ("C:\\photos\\0.png,b\n/home/me/photos/1.png,a\n", None),
        (
            "missing.png,c\n0.png,b\n1.png,a\n",
            "also names 1 that are not among the images (missing.png)",
        ),
    ],
)
def test_tables_of_other_habits(imported, packed, text, note):
    found = imported(packed({**pictures(2), "labels.csv": text.encode()}))
    assert found.names == ["b", "a"] and found.classes == ["a", "b"]
    notes = " ".join(found.report.notes)
    for each in ("is taken for a heading", "several columns", "also names"):
        assert (each in notes) == (note is not None and note.startswith(each))
    assert note is None or note in notes


def test_a_comma_within_a_label(imported, packed):
    files = {**pictures(2), "labels.csv": b'0.png, "b, c"\n1.png, a\n'}
    assert imported(packed(files)).classes == ["a", "b, c"]


def test_a_heading_may_be_the_name_of_an_image(imported, packed):
    table = b"image,label\nimage.png,b\nid.png,a\n"
    found = imported(packed({**called("image.png", "id.png"), "labels.csv": table}))
    assert found.names == ["a", "b"]


def test_a_name_elsewhere_is_another_image(imported, refused, packed):
    def naming(name):
        table = f"{name},a\ny/2.png,b\n".encode()
        return packed({**called("x/1.png", "y/2.png"), "labels.csv": table})

    for name in ("y/1.png", "z/1.png", "xx/1.png"):
        refused(naming(name), f"no label to 1 of 2 images .*x/1.png; it names {name}")
    for name in ("data/x/1.png", "/data/x/1.png", "1.png", "1", "x/1", "./x/../x/1.png"):
        assert imported(naming(name)).names == ["a", "b"]


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
def test_json_that_says_too_little(refused, packed, text, message):
    refused(packed({**pictures(2), "labels.json": text.encode()}), message)


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
def test_classes_that_a_file_lists(imported, packed, labels, names, expected):
    pairs = dict(zip(pictures(2), labels, strict=True))
    text = json.dumps({"labels": pairs, "classes": [*names, "unused"]})
    found = imported(packed({**pictures(2), "labels.json": text.encode()}))
    assert found.names == expected and found.classes == [*map(str, names), "unused"]
    first = found.report.sentences()[0]
    assert "), in the file's order; " in first and "unused 0" in first


def test_a_file_without_labels_says_so(imported, packed):
    files = {**called("a/0.png", "b/1.png"), "dataset.json": b'{"labels": null}'}
    found = imported(packed(files))
    assert found.labels is None and "says that there are no labels" in found.report.notes[0]


# Names in two normal forms ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "one, other", [(COMPOSED, DECOMPOSED), (DECOMPOSED, COMPOSED)], ids=["disk NFC", "disk NFD"]
)
def test_names_are_compared_in_one_form(imported, refused, packed, out, one, other):
    assert imported(packed(called(f"{one}/1.png", "tea/2.png"))).classes == [one, "tea"]
    for given in (one, other, other.upper()):
        with open_dataset(out, classes=[given]) as dataset:
            assert dataset.classes == [one] and len(dataset) == 1
    for write in FORMATS:
        files = called(f"{one}.png", f"{other}/x.png")
        table = write([(f"{other}.png", other), (f"{one}/x.png", "b")])
        found = imported(packed({**files, **table}))
        assert found.names == ([other, "b"] if one < other else ["b", other])
        assert found.classes == ["b", other]
    found = imported(packed(called(f"{one}_1.png", f"{other}_2.png")), labels="prefix")
    assert len(found.classes) == 1
    message = r"'cafe\\u0301' and 'caf\u00e9'|'caf\u00e9' and 'cafe\\u0301'"
    refused(packed(called(f"{one}/1.png", f"{other}/2.png")), message)


def test_zips_of_macos(imported, tmp_path):
    """Its names are UTF-8, and the flag that says so is not set."""
    path = zipped(tmp_path / "a.zip", called(f"{DECOMPOSED}/1.png", "tea/2.png"))
    data = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as archive:
        places = [member.header_offset + 6 for member in archive.infolist()]
    for place in [*places, *(i + 8 for i in range(len(data)) if data[i : i + 4] == b"PK\1\2")]:
        data[place + 1] &= ~8
    path.write_bytes(data)
    assert imported(path).classes == [DECOMPOSED, "tea"]
    path = zipped(tmp_path / "b.zip", called("caf\u00e9/1.png", "tea/2.png"))
    legacy = path.read_bytes().replace("caf\u00e9".encode(), b"caf\x82\x82")
    path.write_bytes(legacy.replace(b"\x14\0\0\x08", b"\x14\0\0\0"))
    tree = Zip(path)
    tree.close()
    assert tree.names == ["caf\u00e9\u00e9/1.png", "tea/2.png"]


# Folders ------------------------------------------------------------------------------------------


def test_folders_that_would_merge(imported, refused, packed):
    for names in (("cat", "cat "), ("1", "1.0"), (COMPOSED, DECOMPOSED)):
        source = packed(called(f"{names[0]}/0.png", f"{names[1]}/1.png", "2/2.png"))
        refused(source, "would be one class: rename or join them")
        assert len(imported(source, labels="none").images) == 3
    found = imported(packed(called("Cat/1.png", "cat/2.png")))
    assert found.classes == ["Cat", "cat"]
    assert "differ only in upper and lower case" in found.report.notes[0]
    for blank in (" ", "\u200b"):
        refused(packed(called(f"{blank}/1.png", "cat/2.png")), "name that cannot be seen")
    refused(packed(called("_1.png", "cat_2.png")), "has no _ after a class", labels="prefix")


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


def test_an_empty_class_folder_stays_a_class(imported, packed):
    files = {**called("a/1.png", "c/2.png"), "d/notes.txt": b"?"}
    found = imported(directories(packed(files), "b", "c/deep"))
    assert found.names == ["a", "c"] and found.classes == ["a", "b", "c", "d"]
    assert found.report.counts == [1, 0, 1, 0]
    assert "The class folders b, d hold no images and are kept as classes" in found.report.notes[0]
    files = {**called("a/1.png", "c/2.png"), "b/1.png": b"?"}
    assert imported(packed(files)).classes == ["a", "b", "c"]
    found = imported(directories(packed(called("a/1.png")), "b"))
    if "b" in " ".join(found.report.notes):
        assert found.labels is None and "there are no classes; " in found.report.notes[0]


def test_an_empty_folder_changes_what_is_cached(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("NUMDIFF_CACHE_DIR", str(tmp_path / "cache"))
    source = fill(tmp_path / "s", called("a/1.png", "c/2.png"))
    with open_dataset(source) as dataset:
        assert dataset.classes == ["a", "c"]
    (source / "b").mkdir()
    with open_dataset(source) as dataset:
        assert dataset.classes == ["a", "b", "c"]
    assert "The class folder b holds no images" in capsys.readouterr().err
    assert folders.class_names(source) == ["a", "b", "c"]


def test_links_to_one_folder(imported, refused, tmp_path):
    source = fill(tmp_path / "s", called("a/1.png", "c/2.png", "c/deep/3.png"))
    os.symlink("deep", source / "c" / "more")
    os.symlink(source, source / "c" / "deep" / "back")
    found = imported(source)
    assert len(found.images) == 3 and found.classes == ["a", "c"]
    assert (
        "2 links were left out, as the folder that it leads to is read already (c/deep/back is the folder itself, "
        "c/more is c/deep)."
    ) in found.report.notes
    os.symlink("a", source / "b")
    refused(source, "b in .* is a link to a, whose images would then be of two classes, b and a")
    os.rename(source / "b", source / "0")  # read before what it leads to
    refused(source, "0 in .* is a link to a, whose images")
    os.remove(source / "0")
    # part of a class in another one
    for name, target in (("b", "c/deep"), ("0", "c/deep"), ("a/more", "../c/deep")):
        os.symlink(target, source / name)
        refused(source, "is a link to .*two classes")
        os.remove(source / name)
    os.symlink(".", source / "b")
    assert len(imported(source).images) == 3
    elsewhere = fill(tmp_path / "elsewhere", called("1.png"))
    linked = tmp_path / "linked"
    linked.mkdir()
    for name in ("x", "y"):
        os.symlink(elsewhere, linked / name)
    refused(linked, "y in .* is a link to x")
    assert len(imported(linked, labels="none").images) == 1


def test_odd_folders(imported, packed):
    hidden = "@eaDir", "#recycle", "__MACOSX", ".thumbnails", "cat/@eaDir/x.jpg", "$RECYCLE.BIN"
    files = called("cat/1.png", "dog/2.png", *(f"{name}/1.png" for name in hidden))
    found = imported(packed({**files, "dog/._2.png": b"?", "dog/Thumbs.db": b"?"}))
    assert found.names == found.classes == ["cat", "dog"] and not found.report.unreadable
    notes = found.report.notes
    assert any(note.startswith("7 hidden or system entries were left out (") for note in notes)
    found = imported(packed(called("train/cat/1.png", "train/dog/2.png")))
    assert found.classes == ["cat", "dog"] and not found.report.notes
    for names, note in (
        (("train/1.png", "Val/2.png"), "folders Val, train look like parts of a data set"),
        (("cat/1.png", "thumbnails/2.png"), "folder thumbnails may be no class"),
    ):
        assert note in imported(packed(called(*names))).report.notes[0]


# Hugging Face's metadata --------------------------------------------------------------------------


def test_metadata_in_each_folder(imported, packed):
    files = {
        **called("train/1.png", "train/2.png", "test/1.png"),
        "train/metadata.csv": b'file_name,text,label\n1.png,a photo,cat\n2.png,"a, b",dog\n',
        "test/metadata.jsonl": b'{"file_name": "1.png", "label": "dog", "objects": {"bbox": [1]}}\n\n',
    }
    found = imported(packed(files))
    assert found.names == ["dog", "cat", "dog"] and found.classes == ["cat", "dog"]
    assert found.report.ignored == []
    note = found.report.notes[-1]
    assert "The labels are those of " in note and "--labels folders" in note
    assert imported(packed(files), labels="folders").classes == ["test", "train"]


def test_metadata_without_labels(imported, refused, packed):
    files = called("cat/1.png", "dog/2.png")
    for text, message in (
        (
            b"file_name,text\n1.png,a photo\n",
            "has no column label (its columns are file_name, text",
        ),
        (b"a,b\n1,2\n", "has no column file_name"),
        (b"file_name,label\n7.png,x\n", "names none of the images"),
    ):
        found = imported(packed({**files, "metadata.csv": text}))
        assert found.classes == ["cat", "dog"] and message in found.report.notes[0]
        assert found.report.ignored[0].endswith("metadata.csv")
    report = imported(packed({**files, "metadata.parquet": b"PAR1"})).report
    assert "metadata.parquet is not read: save it as metadata.csv" in report.notes[0]
    for name, text in (
        ("metadata.csv", b"file_name,label\n1.png,x\n"),
        ("metadata.csv", b"file_name,label\n1.png,\n"),
        ("metadata.jsonl", b'{"file_name": "cat/1.png", "label": null}\n'),
        ("metadata.jsonl", b'{"file_name": \n'),
    ):
        message = "metadata.* (gives no|line without a|has no) label|not valid"
        refused(packed({**files, name: text}), message)
    several = {**files, "metadata.csv": b"", "metadata.jsonl": b""}
    refused(packed(several), "several metadata files in one folder")


def test_metadata_as_the_labels_option(imported, tmp_path):
    labels = tmp_path / "metadata.jsonl"
    labels.write_text('{"file_name": "1.png", "label": 1}\n{"file_name": "2.png", "label": "0"}\n')
    found = imported(called("1.png", "2.png"), labels=labels)
    assert found.names == ["1", "0"] and found.classes == ["0", "1"]


@pytest.mark.parametrize("name", ["fifo.csv", "fifo.json", "folder.csv", "/dev/zero.csv"])
def test_labels_that_are_no_file(refused, tmp_path, name):
    """A FIFO would wait for ever."""
    source = fill(tmp_path / "s", called("1.png"))
    path = tmp_path / name.replace("/dev/", "")
    if "fifo" in name:
        os.mkfifo(path)
    elif "zero" in name:
        os.symlink("/dev/zero", path)
    else:
        path.mkdir()
    refused(source, "cannot be read .it is a (FIFO|folder|device)", NumdiffError, labels=path)
    if not path.is_dir():  # a folder among the images is a folder
        path.rename(source / f"labels{path.suffix}")
        refused(source, "'labels.* cannot be read .it is a (FIFO|device)", NumdiffError)


def test_training_names_the_command_that_has_the_options(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("NUMDIFF_CACHE_DIR", str(tmp_path / "cache"))
    with pytest.raises(
        UsageError, match="or add --labels none .options of `numdiff data import .*/s OUT.h5`"
    ):
        open_dataset(fill(tmp_path / "s", called("a/1.png", "c/2.png", "3.png")))
    open_dataset(fill(tmp_path / "t", called("train/1.png", "val/2.png"))).close()
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
def test_labels_files_without_end(refused, packed, monkeypatch, name, line, message):
    """64 MB of them are 64 kB in a zip, and would take a minute or gigabytes."""
    monkeypatch.setattr(labels_module, "MAXIMUM_LINES", 10)
    monkeypatch.setattr(labels_module, "MAXIMUM_VALUES", 10)
    refused(packed({**pictures(4), name: line * 50}), message)


def test_metadata_files_are_small_together(refused, packed, monkeypatch):
    monkeypatch.setattr(tree_module, "MAXIMUM_LABELS_BYTES", 40)
    files = {}
    for folder in "abc":
        files[f"{folder}/1.png"] = PICTURE
        files[f"{folder}/metadata.csv"] = b"file_name,label\n1.png,a\n"
    refused(packed(files), "have 72 bytes, more than the 40 that are read")
