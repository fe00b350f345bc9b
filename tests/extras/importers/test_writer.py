"""The file that an import writes: whole or not there, and how the values are stored in it."""

import errno
import subprocess
import threading

import h5py
import numpy as np
import pytest

from numdiff.data import writer as writer_module
from numdiff.data.dataset import open_dataset
from numdiff.errors import NumdiffError, UsageError
from numdiff.extras.importers.importing import import_dataset
from tests.conftest import needs
from tests.extras.importers.sources import colours, fill
from tests.forked import forked


@pytest.fixture
def source(tmp_path):
    return fill(tmp_path / "source", {f"{i:02d}.png": image for i, image in enumerate(colours(20))})


def test_never_overwrites(imported, refused, source, out, tmp_path):
    out.write_text("precious")
    with pytest.raises(UsageError, match="already exists.*--force"):
        import_dataset(source, out)
    # an import that fails leaves the old file alone, even with force
    refused(source, "--labels folders", labels="folders")
    assert out.read_text() == "precious"
    assert imported(source).images.shape == (20, 8, 8, 3)
    with pytest.raises(UsageError, match="is a folder"):
        import_dataset(source, tmp_path)
    with pytest.raises(UsageError, match="there is no folder"):
        import_dataset(source, tmp_path / "none" / "a.h5")


def test_what_a_killed_import_left_is_removed_by_the_next(source, out):
    stray = out.with_name(f".{out.name}.12.tmp")
    stray.write_bytes(b"half")
    import_dataset(source, out)
    assert out.exists() and not stray.exists()


def test_full_disk(source, out, monkeypatch):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    for function in ("replace", "fsync"):
        with monkeypatch.context() as patch:
            patch.setattr(writer_module.os, function, full)
            with pytest.raises(
                NumdiffError, match="^cannot write the dataset .*out.h5: the disk is full; free"
            ):
                import_dataset(source, out)
        assert not out.exists()


@pytest.mark.parametrize("limit", [0, 100, 1000, 10000, 100000])
@needs("posix")
def test_no_room_for_the_file(tmp_path, out, limit):
    """With a real failure of the system's own writes, in a separate process: HDF5 must not crash it
    at its end."""
    np.save(
        tmp_path / "a.npy",
        np.random.default_rng(0).integers(0, 256, (200, 32, 32, 3), dtype=np.uint8),
    )
    code = (
        "import resource, sys\n"
        "from numdiff.extras.importers.importing import import_dataset\n"
        "from numdiff.errors import NumdiffError\n"
        f"resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, resource.RLIM_INFINITY))\n"
        "try:\n"
        "    import_dataset(*sys.argv[1:])\n"
        "except NumdiffError as error:\n"
        "    sys.exit(str(error))\n"
    )
    result = subprocess.run(
        forked("-c", code, tmp_path / "a.npy", out), capture_output=True, text=True
    )
    assert (
        result.returncode == 1
        and "out.h5: the file is larger than this system allows" in result.stderr
    )
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


def test_very_many_classes(imported, tmp_path, out):
    """Their names outgrow the 64 kB that old HDF5 files allow an attribute."""
    np.savez(tmp_path / "a.npz", images=np.zeros((5000, 1, 1, 1), np.uint8), labels=np.arange(5000))
    assert len(imported(tmp_path / "a.npz").classes) == 5000
    with h5py.File(out) as file:
        assert file["labels"].dtype == np.uint16


def test_packed_only_if_asked(tmp_path):
    np.save(tmp_path / "a.npy", np.zeros((100, 8, 8, 3), np.uint8))
    for asked in (False, True):
        import_dataset(tmp_path / "a.npy", tmp_path / "a.h5", force=True, gzip=asked)
        with h5py.File(tmp_path / "a.h5") as file:
            assert file["images"].compression == ("gzip" if asked else None) and file[
                "images"
            ].chunks == (64, 8, 8, 3)


def test_latents_in_half_the_bytes(tmp_path):
    latents = np.random.default_rng(0).normal(size=(70, 4, 4, 4)).astype(np.float32)
    np.save(tmp_path / "a.npy", latents)
    import_dataset(tmp_path / "a.npy", tmp_path / "a.h5", latents=True, float16=True)
    with h5py.File(tmp_path / "a.h5") as file:
        assert file["images"].dtype == np.float16
    with open_dataset(tmp_path / "a.h5") as dataset:
        assert dataset.dtype == np.float32
        assert np.array_equal(
            dataset.read(np.arange(70)), latents.astype(np.float16).astype(np.float32)
        )
    import_dataset(tmp_path / "a.h5", tmp_path / "b.h5", latents=True, float16=True)  # again
    assert (tmp_path / "b.h5").stat().st_size == (tmp_path / "a.h5").stat().st_size
    latents[3, 0, 0, 0] = 70000
    np.save(tmp_path / "a.npy", latents)
    with pytest.raises(
        UsageError,
        match="image 3 of .* holds values beyond those of float16, ±65504: leave --float16",
    ):
        import_dataset(tmp_path / "a.npy", tmp_path / "c.h5", latents=True, float16=True)
    np.save(tmp_path / "a.npy", np.zeros((5, 8, 8, 3), np.uint8))
    with pytest.raises(UsageError, match="--float16 is for latents, and .* holds pixels"):
        import_dataset(tmp_path / "a.npy", tmp_path / "c.h5", float16=True)
    assert not (tmp_path / "c.h5").exists()


def test_a_class_that_hdf5_cannot_name_is_a_sentence(tmp_path):
    with pytest.raises(
        NumdiffError, match=r"out.h5' cannot be written \(.*NULL.*\): rename the class or"
    ):
        with writer_module.Writer(tmp_path / "out.h5") as writer:
            writer.append(np.zeros((4, 4, 3), np.uint8), label=0)
            writer.finish(["a\0b"])
    assert not list(tmp_path.iterdir())
