"""The fingerprint of a dataset: what it sees, and what it reads for it."""

import json

import h5py
import numpy as np
import pytest

from numdiff.data import dataset as dataset_module
from numdiff.data.dataset import open_dataset
from numdiff.data.fingerprint import difference, fingerprint, sampled_rows


def write(path, images, labels=None, classes=None):
    with h5py.File(path, "w") as file:
        file["images"] = images
        if labels is not None:
            file["labels"] = labels
        if classes:
            file.attrs["classes"] = classes
    return path


@pytest.fixture
def images():
    return np.random.default_rng(0).integers(0, 256, (200, 8, 8, 3), np.uint8)


def of(path, **options):
    with open_dataset(path, **options) as dataset:
        return fingerprint(dataset)


def test_a_copy_has_the_same_and_every_change_another(tmp_path, images):
    labels, classes = np.arange(200) % 3, ["a", "b", "c"]
    first = of(write(tmp_path / "a.h5", images, labels, classes))
    assert json.loads(json.dumps(first)) == first
    assert (
        difference(first, of(write(tmp_path / "b.h5", images, labels, classes)), "A", "B") is None
    )
    changed, moved = images.copy(), labels.copy()
    changed[77, 3, 3, 1] ^= 1
    moved[[5, 6]] = moved[[6, 5]]
    for number, (others, text) in enumerate(
        (
            (
                (images[:100], labels[:100], classes),
                "A has 200 uint8 images of 8×8×3, B 100 uint8 images of 8×8×3",
            ),
            ((images.astype(np.float32), labels, classes), "B 200 float32 images"),
            ((images, labels, ["b", "a", "c"]), "class 0 of A is 'a', of B 'b'"),
            ((images, labels, [*classes, "d"]), "A has 3 classes, B 4"),
            ((images, moved, classes), "the labels of A"),
            ((images, None, classes), "has 3 classes, B 0"),
            ((changed, labels, classes), "the images of A and B"),
        )
    ):
        other = of(write(tmp_path / f"{number}.h5", *others))
        assert text in difference(first, other, "A", "B")


def test_it_is_of_what_training_sees(tmp_path, images):
    path = write(tmp_path / "a.h5", images, np.arange(200) % 2, ["a", "b"])
    assert of(path, image_size=4)["shape"] == [200, 4, 4, 3]
    chosen = of(path, classes=["b"])
    other = write(tmp_path / "b.h5", images[1::2], np.zeros(100, int), ["b"])
    assert chosen["classes"] == ["b"] and chosen == of(other)


def test_of_a_set_on_disk_four_chunks_are_read(tmp_path, images, monkeypatch):
    monkeypatch.setattr(dataset_module, "IN_MEMORY_BYTES", 0)
    path = write(tmp_path / "a.h5", np.concatenate([images] * 5))
    with open_dataset(path) as dataset:
        read, load = [], dataset._load_chunk
        monkeypatch.setattr(
            dataset, "_load_chunk", lambda index, out: read.append(index) or load(index, out)
        )
        fingerprint(dataset)
    assert sorted(read) == [0, 5, 10, 15]  # by threads
    assert (sampled_rows((1000, 8, 8, 3), 1, False)[[0, 7, -1]] == [0, 63, 996]).all()


@pytest.mark.parametrize("count", [1, 2, 63, 64, 65, 200])
@pytest.mark.parametrize("in_memory", [True, False])
def test_the_rows_exist(count, in_memory):
    rows = sampled_rows((count, 512, 512, 3), 4, in_memory)
    assert (
        rows[0] == 0
        and rows[-1] < count
        and len(rows) <= max(32, count)
        and (np.diff(rows) > 0).all()
    )
