import subprocess

import h5py
import numpy as np
import pytest

from numdiff.data import dataset as D
from numdiff.errors import NumdiffError, UsageError
from numdiff.extras.importers.sheet import contact_sheet, save_sheet
from tests.forked import forked


def write(path, images, labels=None, classes=None, **options):
    with h5py.File(path, "w") as file:
        file.create_dataset("images", data=images, **options)
        if labels is not None:
            file["labels"] = labels
        if classes is not None:
            file.attrs["classes"] = classes
    return path


@pytest.fixture
def images(rng):
    return rng.integers(0, 256, (200, 8, 8, 3), dtype=np.uint8)


@pytest.fixture(params=["in memory", "on disk"])
def placed(request, monkeypatch):
    """Both ways to hold images; the second with a cache far smaller than the dataset."""
    if request.param == "on disk":
        monkeypatch.setattr(D, "IN_MEMORY_BYTES", 0)
    return request.param


def test_default_dataset():
    with D.open_dataset() as emoji:
        assert emoji.shape == (1906, 64, 64, 3) and len(emoji) == 1906 and emoji.image_size == 64
        assert emoji.labels.dtype == np.int32
        assert emoji.class_counts().tolist() == [169, 386, 159, 131, 218, 85, 264, 224, 270]
        assert emoji.classes[0] == "Smileys & Emotion" and emoji.in_memory


def test_reads_rows(tmp_path, images, placed):
    path = write(
        tmp_path / "a.h5", images, np.arange(200) % 3, ["a", "b", "c"], chunks=(64, 8, 8, 3)
    )
    with D.open_dataset(path) as dataset:
        assert dataset.in_memory == (placed == "in memory")
        rows = [199, 0, 63, 64, 64]
        assert np.array_equal(dataset.read(rows), images[rows])
        out = np.empty((5, 8, 8, 3), np.uint8)
        assert dataset.read(rows, out=out) is out and np.array_equal(out, images[rows])
        assert np.array_equal(dataset.chunk(3), images[192:])
        assert dataset.read([]).shape == (0, 8, 8, 3)
        with pytest.raises(IndexError):
            dataset.read([200])


@pytest.mark.parametrize(
    "rows", ([1.5], [True, False], ["1"], [None], [[0, 1]], [[0], [1, 2]], 3), ids=str
)
def test_rows_are_whole_numbers(tmp_path, images, placed, rows):
    with D.open_dataset(write(tmp_path / "a.h5", images)) as dataset:
        with pytest.raises(
            UsageError, match="^rows must be a list of whole numbers, and not the (list|int) "
        ):
            dataset.read(rows)
        assert np.array_equal(dataset.read(np.array([1], np.uint8)), images[1:2])


def test_statistics(tmp_path, images, placed):
    with D.open_dataset(write(tmp_path / "a.h5", images)) as dataset:
        mean, std = dataset.statistics()
        assert np.allclose(mean, images.reshape(-1, 3).mean(0), rtol=1e-12)
        assert np.allclose(std, images.reshape(-1, 3).std(0), rtol=1e-9)
        assert dataset.labels is None and dataset.classes == []


def test_smaller_images_are_averaged(tmp_path, placed):
    image = np.zeros((1, 4, 4, 1), np.uint8)
    image[0, :2, :2, 0] = [[1, 2], [3, 4]]  # mean 2.5, rounded up
    image[0, 2:, 2:, 0] = [[1, 2], [2, 2]]  # mean 1.75
    image[0, :2, 2:] = 255
    with D.open_dataset(write(tmp_path / "a.h5", image), image_size=2) as dataset:
        assert dataset.shape == (1, 2, 2, 1)
        assert dataset.read([0])[0, :, :, 0].tolist() == [[3, 255], [0, 2]]


def test_classes_are_chosen_by_name(tmp_path, images, placed):
    labels = np.arange(200) % 3
    path = write(tmp_path / "a.h5", images, labels.astype(np.uint8), ["cat", "dog", "Eel"])
    with D.open_dataset(path, classes=["eel", "cat"]) as dataset:
        kept = np.flatnonzero(labels != 1)
        assert dataset.classes == ["cat", "Eel"] and len(dataset) == len(kept)
        assert np.array_equal(dataset.read(np.arange(len(kept))), images[kept])
        assert np.array_equal(dataset.labels, labels[kept] // 2)
    with D.open_dataset(path, classes="dog") as dataset:
        assert dataset.classes == ["dog"] and set(dataset.labels) == {0}
    with pytest.raises(UsageError, match="no class 'cow'.*'cat', 'dog', 'Eel'"):
        D.open_dataset(path, classes=["cow"])
    # as a list on the command line is cut
    names = ["Food", "Food, drink", "drink ,rest", "tea, milk, rum"]
    commas = write(tmp_path / "commas.h5", images, np.arange(200) % 4, names)
    for given, found in (
        ("food,drink", [1]),
        ("Food", [0]),
        ("Food,drink , rest", [0, 2]),
        ("food, drink,TEA,MILK,RUM", [1, 3]),
        ("Food,drink,Food", [0, 1]),
    ):
        with D.open_dataset(commas, classes=[name.strip() for name in given.split(",")]) as dataset:
            assert dataset.classes == [names[i] for i in found], given
    with pytest.raises(UsageError, match="no class 'milk'"):
        D.open_dataset(commas, classes=["Food", "milk", "rum"])
    with pytest.raises(UsageError, match="no image of"):
        D.open_dataset(
            write(tmp_path / "b.h5", images, np.zeros(200, int), ["cat", "dog"]), classes=["dog"]
        )
    with pytest.raises(UsageError, match="no labels"):
        D.open_dataset(write(tmp_path / "c.h5", images), classes=["dog"])


def test_labels_without_names_are_numbered(tmp_path, images):
    with D.open_dataset(write(tmp_path / "a.h5", images, np.arange(200) % 5)) as dataset:
        assert (
            dataset.classes == ["0", "1", "2", "3", "4"]
            and dataset.class_counts().tolist() == [40] * 5
        )


@pytest.mark.parametrize(
    "array, message",
    [
        (np.zeros((5, 8, 8, 3), np.int16), "is int16.*uint8"),
        (np.zeros((5, 4, 8, 8), np.float32), "move the channels to the end"),
        (np.zeros((5, 3, 8, 8), np.uint8), "move the channels to the end"),
        (np.zeros((5, 8, 8), np.uint8), "1 or 3 channels"),
        (np.zeros((5, 8, 8, 4), np.uint8), "1 or 3 channels"),
        (np.zeros((0, 8, 8, 3), np.uint8), "no images"),
    ],
    ids=[
        "int16",
        "channels first, float",
        "channels first",
        "no channels",
        "four channels",
        "empty",
    ],
)
def test_wrong_images(tmp_path, array, message):
    with pytest.raises(NumdiffError, match=message) as caught:
        D.open_dataset(write(tmp_path / "a.h5", array))
    assert "a.h5" in str(caught.value)


@pytest.mark.parametrize(
    "labels, classes, message",
    [
        ([0, 1, 2, 3, 4], ["a", "b"], "label 2 of image 2 .* out of range: there are 2 classes"),
        ([0, 1, -1, 0, 0], ["a", "b"], "label -1 of image 2"),
        ([0, 1], None, "one integer for each of the 5 images"),
        ([0.5, 1, 2, 3, 4], None, "float64"),
    ],
    ids=["too large", "negative", "too few", "not integers"],
)
def test_wrong_labels(tmp_path, labels, classes, message):
    with pytest.raises(NumdiffError, match=message):
        D.open_dataset(
            write(tmp_path / "a.h5", np.zeros((5, 8, 8, 3), np.uint8), np.array(labels), classes)
        )


def test_wrong_files(tmp_path, images):
    with pytest.raises(UsageError, match="no dataset file"):
        D.open_dataset(tmp_path / "none.h5")
    with pytest.raises(UsageError, match="folder.*numdiff data import"):
        D.Dataset(tmp_path)
    (tmp_path / "a b").write_text("hello")
    with pytest.raises(
        NumdiffError, match="not an HDF5 file: run `numdiff data import '.*/a b' OUT.h5`"
    ):
        D.open_dataset(tmp_path / "a b")
    (tmp_path / "1.png").write_text("a picture by its name")
    with pytest.raises(
        UsageError,
        match="1.png' is a single image: run `numdiff data import [^ ]*[^g] OUT.h5` on its",
    ):
        D.open_dataset(tmp_path / "1.png")
    (tmp_path / "empty.h5").write_bytes(b"")
    with pytest.raises(NumdiffError, match="not an HDF5 file"):
        D.open_dataset(tmp_path / "empty.h5")
    with h5py.File(tmp_path / "other.h5", "w") as file:
        file.create_group("images")
    with pytest.raises(NumdiffError, match="no dataset `images`"):
        D.open_dataset(tmp_path / "other.h5")
    with h5py.File(tmp_path / "checkpoint.h5", "w") as file:
        file.create_group("buffers")
    with pytest.raises(
        NumdiffError,
        match="checkpoint.h5' holds the weights of a model, and no images: give a file",
    ):
        D.open_dataset(tmp_path / "checkpoint.h5")


def test_truncated_and_damaged_files(tmp_path, images):
    path = write(tmp_path / "a.h5", images, compression="gzip", chunks=(64, 8, 8, 3))
    data = path.read_bytes()
    (tmp_path / "short.h5").write_bytes(data[: len(data) // 2])
    with pytest.raises(NumdiffError, match="short.h5' is truncated"):
        D.open_dataset(tmp_path / "short.h5")
    with h5py.File(path) as file:
        chunk = file["images"].id.get_chunk_info(0)
    damaged = bytearray(data)
    damaged[chunk.byte_offset : chunk.byte_offset + chunk.size] = bytes(chunk.size)
    (tmp_path / "damaged.h5").write_bytes(damaged)
    with pytest.raises(NumdiffError, match="damaged.h5' is damaged"):
        D.open_dataset(tmp_path / "damaged.h5")


def test_sizes_that_do_not_fit(tmp_path, images):
    with pytest.raises(UsageError, match="size 48 does not divide the 64.*64, 32, 16, 8"):
        D.open_dataset(image_size=48)
    with pytest.raises(UsageError, match="size 128 does not divide"):
        D.open_dataset(image_size=128)
    path = write(tmp_path / "a.h5", np.repeat(np.repeat(images[:, :6], 4, 1), 4, 2))
    for size in (8, 16, (12, 32), (8, 12), (24, 16)):
        with pytest.raises(
            UsageError, match="does not divide the 24x32 pixels .*: use one of 24x32, "
        ):
            D.open_dataset(path, image_size=size)
    with pytest.raises(UsageError, match="must be a whole number, or height and width"):
        D.open_dataset(path, image_size=(8, 8, 8))
    with D.open_dataset(path) as dataset:
        assert dataset.image_size == (24, 32)


def test_pictures_that_are_no_squares_are_averaged(tmp_path, images):
    path = write(tmp_path / "a.h5", np.repeat(np.repeat(images[:, :6], 4, 1), 4, 2))
    with D.open_dataset(path, (6, 8)) as dataset:
        assert np.array_equal(dataset.read(np.arange(200)), images[:, :6])


def test_contact_sheet(tmp_path, images):
    path = write(tmp_path / "a.h5", images, np.arange(200) % 2, ["left", "字" * 50])
    with D.open_dataset(path) as dataset:
        sheet = contact_sheet(dataset)
        assert sheet.height == 2 + 2 * (64 + 2)
        # the last image of the first row, every pixel eight times as large
        right = np.asarray(sheet)[2:66, -66:-2]
        assert np.array_equal(right[::8, ::8], images[15 * 100 // 16 * 2])
        with pytest.raises(NumdiffError, match="--sheet"):
            save_sheet(dataset, tmp_path / "nowhere" / "a.png")
    with D.open_dataset(write(tmp_path / "b.h5", images[..., :1])) as dataset:
        assert contact_sheet(dataset).height == 2 + 13 * 66
        save_sheet(dataset, tmp_path / "b.png")
        assert sorted(p.name for p in tmp_path.glob("*.png")) == ["b.png"] and not list(
            tmp_path.glob(".*")
        )


def test_the_package_exports_what_a_script_needs():
    import numdiff.data

    assert numdiff.data.open_dataset is D.open_dataset and numdiff.data.Dataset is D.Dataset
    with pytest.raises(AttributeError, match="nothing"):
        numdiff.data.nothing  # noqa: B018 - the access itself must fail


@pytest.mark.parametrize("kind", ["uint8", "gzip", "float16", ">f4", "reduced"])
def test_a_set_on_disk_is_the_set_in_memory(tmp_path, kind):
    """More chunks than the cache has places for, in any order, whole and by classes."""
    dtype = {"gzip": "uint8", "reduced": "uint8"}.get(kind, kind)
    values = np.random.default_rng(0).integers(0, 256, (1000, 4, 4, 3)).astype(dtype)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset(
            "images",
            data=values,
            chunks=(64, 4, 4, 3),
            compression="gzip" if kind == "gzip" else None,
        )
        file["labels"] = np.arange(1000) * 7 % 3
    size, rows = 2 if kind == "reduced" else None, np.random.default_rng(1).integers(0, 1000, 700)
    for classes in (None, ["0", "2"]):
        with (
            D.Dataset(tmp_path / "a.h5", size, classes, in_memory=True) as memory,
            D.Dataset(tmp_path / "a.h5", size, classes, in_memory=False) as disk,
        ):
            disk.window = 2  # six places for 16 chunks
            wanted = rows % len(memory)
            for _ in range(2):
                disk.prefetch(3)
                assert (
                    np.array_equal(disk.read(wanted), memory.read(wanted))
                    and disk.dtype == memory.dtype
                )
            assert np.array_equal(disk.chunk(2), memory.chunk(2))
    if kind == "uint8":
        assert np.array_equal(memory.read(np.arange(3)), values[np.arange(1000) * 7 % 3 != 1][:3])


def test_a_chunk_that_could_not_be_read_is_tried_again(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset(
            "images",
            data=np.arange(640, dtype=np.float32).reshape(640, 1, 1, 1),
            chunks=(64, 1, 1, 1),
        )
    with D.Dataset(tmp_path / "a.h5", in_memory=False) as dataset:
        load, fail = dataset._load_chunk, [True]

        def failing(index, out):
            if fail and index == 4:
                raise NumdiffError("no")
            load(index, out)

        dataset._load_chunk = failing
        dataset.prefetch(4)
        for _ in range(2):
            with pytest.raises(NumdiffError, match="^no$"):
                dataset.read(np.arange(640))
        fail.clear()
        assert (dataset.read(np.arange(640)).reshape(-1) == np.arange(640)).all()
        (tmp_path / "a.h5").write_bytes((tmp_path / "a.h5").read_bytes()[:-100])
        dataset._cache = None
        with pytest.raises(NumdiffError, match="a.h5' is truncated: copy"):
            dataset.read(np.arange(640))


LEFT_OPEN = """
import sys, threading
from numdiff.data.dataset import Dataset

thread = threading.Thread(target=lambda dataset: threading.Event().wait(), args=(Dataset(sys.argv[1]),), daemon=True)
thread.start()
"""


def test_one_that_a_thread_keeps_is_closed_at_exit(tmp_path, images):
    """HDF5 closed it after Python's end, by a call of Python, and crashed."""
    path = write(tmp_path / "a.h5", images)
    done = subprocess.run(forked("-c", LEFT_OPEN, path), capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
