import os

import numpy as np
import pytest
from PIL import Image

from numdiff.data import open_dataset
from numdiff.distributed.communicator import Alone
from numdiff.errors import NumdiffError, UsageError
from numdiff.extras.importers import folders
from numdiff.extras.importers.importing import import_dataset
from numdiff.training.build import build_dataset, open_data
from numdiff.training.options import resolve


@pytest.fixture
def photos(tmp_path, monkeypatch):
    """Six pictures of 20×24 pixels in two folders; the first is grey."""
    monkeypatch.setenv("NUMDIFF_CACHE_DIR", str(tmp_path / "cache"))
    pixels = np.random.default_rng(0).integers(0, 256, (6, 20, 24, 3), np.uint8)
    for i, image in enumerate(pixels):
        folder = tmp_path / "photos" / ("cat", "dog")[i % 2]
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image if i else image[..., 0]).save(
            folder / f"{i}.{'png' if i < 4 else 'jpg'}"
        )
    return tmp_path / "photos"


@pytest.fixture
def imports(monkeypatch):
    """The sources that were imported."""
    seen = []
    real = folders.tracked
    monkeypatch.setattr(
        folders, "tracked", lambda items, *rest: seen.append(rest[0]) or real(items, *rest)
    )
    return seen


def names(tmp_path):
    return sorted(os.listdir(tmp_path / "cache" / "data"))


def test_the_images_are_those_of_an_import(photos, tmp_path, capsys):
    import_dataset(photos, tmp_path / "a.h5", size=16, channels=3)
    with open_dataset(photos, 16) as folder, open_dataset(tmp_path / "a.h5") as file:
        rows = np.arange(6)
        assert np.array_equal(folder.read(rows), file.read(rows)) and np.array_equal(
            folder.labels, file.labels
        )
        assert folder.classes == ["cat", "dog"] and folder.shape == (6, 16, 16, 3)
    said = capsys.readouterr().err
    assert f"6 pictures of '{photos}' were decoded into {tmp_path}/cache/data/photos-16-" in said
    with open_dataset(photos, 16, ["dog"]) as dogs:
        assert len(dogs) == 3


def test_decoded_again_only_where_something_changed(photos, tmp_path, imports):
    def opened(size=16):
        before = len(imports)
        open_dataset(photos, size).close()
        return len(imports) > before

    assert opened() and not opened()
    assert opened(8) and not opened(16) and not opened(8) and len(names(tmp_path)) == 2
    before = names(tmp_path)
    Image.new("RGB", (9, 9)).save(photos / "cat" / "new.png")
    assert opened() and not opened()
    # the file of the earlier state is gone
    assert len(names(tmp_path)) == 2 and names(tmp_path) != before
    os.utime(photos / "cat" / "new.png", (1, 1))
    assert opened()
    path = folders.decoded(photos, 16)
    with open(path, "r+b") as file:
        file.truncate(1000)
    assert opened() and not opened()


def test_a_link_that_leads_nowhere_is_refused_where_it_is_a_pictures(photos):
    os.symlink("gone", photos / "notes.txt")
    open_dataset(photos, 16).close()
    os.symlink("gone", photos / "cat" / "gone.png")
    with pytest.raises(NumdiffError, match="cat/gone.png .it is a link that leads to no file."):
        open_dataset(photos, 16)


def test_unreadable_pictures_leave_nothing(photos, tmp_path):
    for name in ("cat/bad.jpg", "dog/worse.png"):
        (photos / name).write_bytes(b"none")
    with pytest.raises(
        NumdiffError,
        match="^2 of the 8 images of .*photos' could not be read, the first of them "
        "cat/bad.jpg .*numdiff data import",
    ):
        open_dataset(photos, 16)
    assert names(tmp_path) == []


def test_what_cannot_be_used(photos, tmp_path, monkeypatch):
    Image.new("RGB", (9, 9)).save(photos / "cat" / "new.png")
    with pytest.raises(
        UsageError,
        match="add --image-size to bring all to one, for instance --image-size 16x32, and",
    ):
        open_dataset(photos)
    (tmp_path / "none").mkdir()
    with pytest.raises(NumdiffError, match="holds no images: check the path"):
        open_dataset(tmp_path / "none", 16)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("NUMDIFF_CACHE_DIR", str(tmp_path / "file"))
    with pytest.raises(
        NumdiffError, match="cannot be kept in .*data .Not a directory.: set NUMDIFF_CACHE_DIR"
    ):
        open_dataset(photos, 16)


def test_rank_0_decodes(photos, imports):
    class Ranked(Alone):
        def first(self, function, *arguments):
            order.append("first")
            return function(*arguments)

        def build(self, function, *arguments):
            order.append(len(imports))
            return function(*arguments)

    order, options = (
        [],
        resolve({"model": "unet", "data": str(photos), "image_size": 16, "device": "cpu"}),
    )
    open_data(Ranked(), options).close()
    # as a grey picture came first, in colour again
    assert order == ["first", 2] and len(imports) == 2


@pytest.mark.parametrize(
    "model, remedy", [("unet", "leave --class-cond out"), ("dit", "give --no-class-cond")]
)
def test_classes_are_sub_folders(photos, model, remedy):
    options = resolve(
        {
            "model": model,
            "data": str(photos / "cat"),
            "image_size": 16,
            "class_cond": True,
            "device": "cpu",
        }
    )
    with pytest.raises(
        UsageError,
        match="cat' has no sub-folders: make one for each class and move its pictures "
        f"there, or {remedy}.$",
    ):
        build_dataset(options)
