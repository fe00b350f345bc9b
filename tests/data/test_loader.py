import threading

import h5py
import numpy as np
import pytest

from numdiff.data import dataset as D
from numdiff.data import loader as loader_module
from numdiff.data.loader import Loader, epoch_order
from numdiff.errors import NumdiffError, UsageError


@pytest.fixture
def path(tmp_path):
    """500 images of one pixel row whose first two bytes are their number."""
    images = np.zeros((500, 2, 2, 1), np.uint8)
    images[:, 0, 0, 0], images[:, 0, 1, 0] = np.arange(500) // 256, np.arange(500) % 256
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("images", data=images, chunks=(64, 2, 2, 1), compression="gzip")
        file["labels"] = np.arange(500) % 7
    return tmp_path / "a.h5"


@pytest.fixture(params=["in memory", "on disk"])
def dataset(request, path, monkeypatch):
    if request.param == "on disk":
        monkeypatch.setattr(D, "IN_MEMORY_BYTES", 0)
    with D.open_dataset(path) as dataset:
        if request.param == "on disk":
            dataset.window = 2
        yield dataset


def numbers(images):
    return images[:, 0, 0, 0].astype(int) * 256 + images[:, 0, 1, 0]


def take(loader, steps):
    with loader:
        return np.stack([numbers(next(loader)[0]) for _ in range(steps)])


def test_every_epoch_has_every_image_once(dataset):
    seen = take(Loader(dataset, 30, seed=1), 100).ravel()
    for epoch in range(6):
        assert sorted(seen[epoch * 500 : (epoch + 1) * 500]) == list(range(500))
    assert not np.array_equal(seen[:500], seen[500:1000])


def test_labels_belong_to_images(dataset):
    with Loader(dataset, 8, seed=1) as loader:
        for _ in range(5):
            images, labels = next(loader)
            assert (
                images.dtype == np.uint8
                and images.shape == (8, 2, 2, 1)
                and labels.dtype == np.int32
            )
            assert np.array_equal(labels, numbers(images) % 7)


@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_step_follows_from_seed_and_number(dataset, prefetch):
    whole = take(Loader(dataset, 30, seed=5, prefetch=prefetch), 40)
    assert np.array_equal(
        take(Loader(dataset, 30, seed=5, start_step=17, prefetch=prefetch), 10), whole[17:27]
    )
    with Loader(dataset, 30, seed=5, prefetch=prefetch) as loader:
        for step in (33, 2, 16, 33):
            assert np.array_equal(numbers(loader.read(step)[0]), whole[step])
        assert loader.step == 0
    assert not np.array_equal(take(Loader(dataset, 30, seed=6), 40), whole)
    assert take(Loader(dataset, 30, seed=-1), 1).shape == (1, 30)


def test_ranks_share_the_batch(dataset):
    whole = take(Loader(dataset, 12, seed=5), 20)
    parts = [take(Loader(dataset, 12, seed=5, rank=rank, ranks=3), 20) for rank in range(3)]
    assert np.array_equal(np.concatenate(parts, 1), whole)
    with pytest.raises(UsageError, match="multiple of 5"):
        Loader(dataset, 12, seed=5, ranks=5)


def test_batch_larger_than_the_dataset(dataset):
    seen = take(Loader(dataset, 1200, seed=5), 1)[0]
    assert sorted(np.bincount(seen, minlength=500)) == [2] * 300 + [3] * 200


def test_order_is_chunk_aligned():
    order, chunks = epoch_order(1000, 3, 0, window=4)
    assert sorted(order) == list(range(1000)) and sorted(chunks) == list(range(16))
    start = 0
    for window in range(4):
        inside = [
            row
            for chunk in chunks[4 * window : 4 * window + 4]
            for row in range(64 * chunk, min(64 * chunk + 64, 1000))
        ]
        assert sorted(order[start : start + len(inside)]) == sorted(inside)
        assert not np.array_equal(order[start : start + len(inside)], inside)
        start += len(inside)


def test_order_never_changes():
    """Stored words: a run must resume under another version of NumPy."""
    order, chunks = epoch_order(500, 7, 2, window=3)
    assert chunks.tolist() == [6, 7, 4, 0, 1, 5, 3, 2]
    assert order[:10].tolist() == [283, 431, 275, 291, 314, 482, 429, 396, 447, 440]


def test_disk_is_read_once_an_epoch(path, monkeypatch):
    monkeypatch.setattr(D, "IN_MEMORY_BYTES", 0)
    with D.open_dataset(path) as dataset:
        dataset.window = 2
        loaded = []
        load = dataset._load_chunk
        dataset._load_chunk = lambda index, out: loaded.append(index) or load(index, out)
        take(Loader(dataset, 10, seed=1, prefetch=1), 49)
        # eight chunks, and the next epoch's first window ahead of its time
        assert len(loaded) <= 8 + 4


class Pinning:
    """A backend that only notes what it lends out."""

    def __init__(self):
        self.buffers = []

    def pinned(self, shape, dtype):
        self.buffers.append(np.zeros(shape, dtype))
        return self.buffers[-1]


def test_pinned_buffers_are_used_in_turn(dataset):
    backend = Pinning()
    whole = take(Loader(dataset, 30, seed=5), 40)
    with Loader(dataset, 30, seed=5, prefetch=2, backend=backend) as loader:
        kept = []
        for _ in range(40):
            images, labels = next(loader)
            assert any(images is buffer for buffer in backend.buffers)
            kept.append((images, labels))
            # this batch and the one before are untouched
            for old, (images, labels) in list(enumerate(kept))[-2:]:
                assert np.array_equal(numbers(images), whole[old]) and np.array_equal(
                    labels, whole[old] % 7
                )
    assert len(backend.buffers) == 10  # five of images and of labels


def test_errors_of_the_thread_reach_the_caller(path, monkeypatch):
    monkeypatch.setattr(D, "IN_MEMORY_BYTES", 0)
    data = bytearray(path.read_bytes())
    with h5py.File(path) as file:
        chunk = file["images"].id.get_chunk_info(3)
    data[chunk.byte_offset : chunk.byte_offset + chunk.size] = bytes(chunk.size)
    path.write_bytes(data)
    with D.open_dataset(path) as dataset, Loader(dataset, 50, seed=1) as loader:
        with pytest.raises(NumdiffError, match="a.h5' is damaged"):
            for _ in range(10):
                next(loader)
        with pytest.raises(NumdiffError, match="a.h5' is damaged"):
            next(loader)


def test_close_ends_the_thread(dataset):
    dataset.read(np.arange(500))  # a set on disk has threads of its own, until it is closed
    before = threading.active_count()
    loader = Loader(dataset, 30, seed=1)
    assert threading.active_count() == before + 1
    next(loader)
    loader.close()
    assert threading.active_count() == before
    assert list(loader) == []
    loader.close()
    Loader(dataset, 30, seed=1, backend=Pinning()).close()  # before anything was taken
    assert threading.active_count() == before


def test_the_thread_ends_before_the_interpreter_frees_its_memory(dataset, monkeypatch):
    """A script that ends by an error closes nothing; what the thread writes to must outlive it all
    the same."""
    at_exit = []
    monkeypatch.setattr(loader_module.atexit, "register", at_exit.append)
    monkeypatch.setattr(loader_module.atexit, "unregister", at_exit.remove)
    loader = Loader(dataset, 30, seed=1)
    next(loader)
    (last,) = at_exit
    last()
    assert not loader._thread.is_alive() and at_exit == []


def test_without_labels(tmp_path):
    with h5py.File(tmp_path / "b.h5", "w") as file:
        file["images"] = np.zeros((3, 4, 4, 3), np.uint8)
    with D.open_dataset(tmp_path / "b.h5") as dataset, Loader(dataset, 2, seed=0) as loader:
        assert next(loader)[1] is None and loader.epoch(3) == 2
