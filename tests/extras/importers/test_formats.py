"""The importers of single files: CIFAR-10, MNIST, NumPy, unet.cu's and HDF5, put together here byte
by byte."""

import gzip
import os
import pickle
import struct

import h5py
import numpy as np
import pytest

from numdiff.errors import NumdiffError
from numdiff.extras.convert.unpickle import RefusedError
from numdiff.extras.importers.cifar import read_pickle
from numdiff.extras.importers.importing import import_dataset
from tests.extras.importers.sources import colours, contents, fill, idx, png, tarred

# CIFAR-10 -----------------------------------------------------------------------------------------


def python2_pickle(batch):
    """A pickle of protocol 2 as Python 2 writes it: its strings are bytes without an encoding."""

    def text(value):
        return (
            b"U" + bytes([len(value)]) + value
            if len(value) < 256
            else b"T" + struct.pack("<I", len(value)) + value
        )

    def integer(value):
        return b"J" + struct.pack("<i", value)

    def array(value):
        return (
            b"cnumpy.core.multiarray\n_reconstruct\n"
            b"cnumpy\nndarray\n"
            + integer(0)
            + b"\x85"
            + text(b"b")
            + b"\x87R"
            + b"("
            + integer(1)
            + b"("
            + b"".join(integer(n) for n in value.shape)
            + b"t"
            + b"cnumpy\ndtype\n"
            + text(b"u1")
            + integer(0)
            + integer(1)
            + b"\x87R"
            + b"("
            + integer(3)
            + text(b"|")
            + b"NNN"
            + integer(-1)
            + integer(-1)
            + integer(0)
            + b"tb"
            + b"\x89"
            + text(value.tobytes())
            + b"tb"
        )

    def write(value):
        if isinstance(value, np.ndarray):
            return array(value)
        if isinstance(value, list):
            return b"](" + b"".join(write(v) for v in value) + b"e"
        return text(value) if isinstance(value, bytes) else integer(value)

    return b"\x80\x02}(" + b"".join(text(k) + write(v) for k, v in batch.items()) + b"u."


CIFAR = "airplane automobile bird cat deer dog frog horse ship truck".split()


def cifar_batches(rng, pack):
    """(images, labels, files of the archive) with three images a batch."""
    names = [name.encode() for name in CIFAR]
    images = rng.integers(0, 256, (15, 32, 32, 3), dtype=np.uint8)
    labels = rng.integers(0, 10, 15).tolist()
    files = {
        "batches.meta": pack({b"num_cases_per_batch": 3, b"label_names": names, b"num_vis": 3072})
    }
    for i in (4, 2, 5, 1, 3):  # the archive's order is not that of the numbers either
        rows = slice(3 * i - 3, 3 * i)
        files[f"data_batch_{i}"] = pack(
            {
                b"batch_label": b"training batch",
                b"labels": labels[rows],
                b"filenames": [b"x.png"] * 3,
                b"data": images[rows].transpose(0, 3, 1, 2).reshape(3, 3072),
            }
        )
    files["test_batch"] = files["data_batch_1"]
    files["readme.html"] = b"<html>"
    return images, labels, files


def cifar_tar(path, files, mode="w:gz"):
    files = {f"cifar-10-batches-py/{name}": data for name, data in files.items()}
    path.write_bytes(tarred(files, mode))
    return path


@pytest.mark.parametrize(
    "pack",
    [python2_pickle, *(lambda batch, p=p: pickle.dumps(batch, p) for p in (2, 4, 5))],
    ids=["Python 2", "protocol 2", "protocol 4", "protocol 5"],
)
@pytest.mark.parametrize("form", ["w:gz", "w", "folder"])
def test_cifar(imported, tmp_path, rng, pack, form):
    images, labels, files = cifar_batches(rng, pack)
    if form == "folder":
        source = fill(tmp_path / "cifar-10-batches-py", files)
    else:
        source = cifar_tar(tmp_path / "some.file", files, form)
    found = imported(source)
    assert np.array_equal(found.images, images) and found.labels.tolist() == labels
    assert found.classes == CIFAR
    assert "CIFAR-10" in found.report.source and not found.report.notes
    small = imported(source, labels="none", size=16)
    assert small.labels is None and small.images.shape == (15, 16, 16, 3)


class Attack:
    def __reduce__(self):
        return os.system, ("touch /tmp/numdiff-was-attacked",)


EVIL = {  # {what it is: (a pickle, what the refusal names)}
    "os.system": (pickle.dumps(Attack()), "system"),
    "within a dictionary": (pickle.dumps({"data": Attack()}, 2), "system"),
    "eval": (b"cbuiltins\neval\n(S'1'\ntR.", "builtins.eval"),
    "numpy's own": (b"cnumpy.testing._private.utils\nrunstring\n.", "runstring"),
    "attribute": (b"\x80\x04\x8c\x05numpy\x8c\x0endarray.tofile\x93.", "ndarray.tofile"),
    "codec": (b"\x80\x04\x8c\x07_codecs\x8c\x06decode\x93.", "_codecs.decode"),
    "objects": (pickle.dumps(np.array([{}], object)), "array of O"),
    "persistent": (b"Pname\n.", "persistent"),
}


@pytest.mark.parametrize("evil, name", EVIL.values(), ids=EVIL)
def test_cifar_executes_nothing(refused, tmp_path, out, rng, evil, name):
    with pytest.raises(RefusedError, match=name):
        read_pickle(evil)
    _, _, files = cifar_batches(rng, python2_pickle)
    files["data_batch_3"] = evil
    refused(
        cifar_tar(tmp_path / "a.tar.gz", files),
        "data_batch_3 in .* asks for .*refused",
        NumdiffError,
    )
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


def test_wrong_cifar(imported, refused, tmp_path, rng):
    images, _, files = cifar_batches(rng, python2_pickle)
    whole = cifar_tar(tmp_path / "a.tar.gz", files).read_bytes()
    short = tmp_path / "short.tar.gz"
    for length in (len(whole) // 2, len(whole) - 20, 40, 5):
        short.write_bytes(whole[:length])
        refused(short, "short.tar.gz' is (truncated or damaged|nothing that numdiff)", NumdiffError)
    refused(
        cifar_tar(tmp_path / "b.tar.gz", {"a.txt": b"a"}),
        "the tar .*b.tar.gz' holds no images .1 other files",
        NumdiffError,
    )
    for broken in (
        files["data_batch_2"][:100],
        b"",
        b"garbage",
        pickle.dumps([1]),
        python2_pickle({b"data": images}),
        python2_pickle({b"data": images.reshape(15, 3072), b"labels": [1]}),
        python2_pickle({b"data": images[:1].reshape(1, 3072), b"labels": [10]}),
    ):
        refused(
            cifar_tar(tmp_path / "c.tar.gz", files | {"data_batch_2": broken}),
            "truncated or damaged .*data_batch_2",
            NumdiffError,
        )
    del files["data_batch_5"]
    report = imported(cifar_tar(tmp_path / "d.tar.gz", files)).report
    assert report.shape[0] == 12 and report.notes == ["It has no data_batch_5."]


# MNIST --------------------------------------------------------------------------------------------


@pytest.fixture
def mnist(rng):
    return rng.integers(0, 256, (100, 28, 28), dtype=np.uint8), rng.integers(
        0, 10, 100, dtype=np.uint8
    )


@pytest.mark.parametrize(
    "images_name, labels_name",
    [
        ("train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz"),
        ("t10k-images.idx3-ubyte", "t10k-labels.idx1-ubyte"),
        ("train-images-idx3-ubyte", "train-labels-idx1-ubyte.gz"),
        ("emnist-letters-train-images-idx3-ubyte.gz", "emnist-letters-train-labels-idx1-ubyte"),
    ],
)
def test_mnist(imported, tmp_path, mnist, images_name, labels_name):
    images, labels = mnist
    for name, array in ((images_name, images), (labels_name, labels)):
        packed = gzip.compress if name.endswith(".gz") else bytes
        (tmp_path / name).write_bytes(packed(idx(array)))
    found = imported(tmp_path / images_name)
    assert np.array_equal(found.images, images[..., None])
    assert np.array_equal(found.labels, labels) and found.classes == list("0123456789")
    assert imported(tmp_path, size=32, channels=3).images.shape == (100, 32, 32, 3)


def test_mnist_without_labels(imported, tmp_path, mnist):
    (tmp_path / "x.gz").write_bytes(gzip.compress(idx(mnist[0])))
    found = imported(tmp_path / "x.gz")
    assert found.labels is None and "No labels file was found" in found.report.notes[0]


def test_wrong_mnist(imported, refused, tmp_path, out, mnist):
    images, labels = mnist
    path, neighbour = (
        tmp_path / "train-images-idx3-ubyte.gz",
        tmp_path / "train-labels-idx1-ubyte.gz",
    )
    for few in (labels[:5], labels):
        neighbour.write_bytes(gzip.compress(idx(few)))
        refused(neighbour, "holds labels: give the images file")
    whole = gzip.compress(idx(images))
    for data in (
        whole[: len(whole) // 2],
        whole[:-9],
        gzip.compress(idx(images)[:-1]),
        gzip.compress(idx(images)[:12]),
        gzip.compress(struct.pack(">4I", 2051, 10, 2**31, 2**31)),
        whole[:3],
        whole[:-8] + bytes(8),
    ):
        path.write_bytes(data)
        refused(path, "train-images-idx3-ubyte.gz' is truncated or damaged", NumdiffError)
    path.write_bytes(gzip.compress(b"\0\0\x09\x03" + idx(images)[4:]))
    refused(path, "nothing that numdiff can import: give a folder", NumdiffError)
    path.write_bytes(whole)
    for data, message in (
        (idx(labels[:50]), "50 labels and .* has 100 images"),
        (idx(labels)[:50], "labels.*truncated"),
        (b"\0\0\x09\x01" + idx(labels)[4:], "its magic number is 2305"),
    ):
        neighbour.write_bytes(gzip.compress(data))
        refused(path, message, NumdiffError)
    assert not out.exists()
    assert imported(path, labels="none").labels is None


# NumPy --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keys", [("arr_0", "arr_1"), ("images", "labels"), ("x_train", "y_train")])
@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_npz(imported, tmp_path, keys, save):
    images = colours(70)
    save(tmp_path / "a.npz", **dict(zip(keys, (images, np.arange(70) % 4), strict=True)))
    found = imported(tmp_path / "a.npz")
    assert np.array_equal(found.images, images) and found.names == [str(i % 4) for i in range(70)]
    assert found.classes == list("0123")


FORMS = {  # of images of bytes, that are read as these again
    "NCHW": lambda a: a.transpose(0, 3, 1, 2),
    "Fortran": np.asfortranarray,
    "int64": lambda a: a.astype(np.int64),
    "0…1": lambda a: a.astype(np.float32) / 255,
    "-1…1": lambda a: a / 127.5 - 1,
    "float 0…255": lambda a: a.astype(np.float64),
    "uint16 big-endian": lambda a: a.astype(">u2") * 257,
    "bool": lambda a: a > 100,
    "NHW": lambda a: a[..., 0],
}


@pytest.mark.parametrize("form", FORMS)
def test_npz_forms(imported, tmp_path, form):
    images = colours(20)
    images[0, 0, 0], images[1, 0, 0] = 0, 255
    changed = FORMS[form](images)
    expected = {"bool": 255 * (images > 100), "NHW": images[..., :1]}.get(form, images)
    np.savez(tmp_path / "a.npz", changed)
    np.save(tmp_path / "b.npy", changed)
    for name in ("a.npz", "b.npy"):
        found = imported(tmp_path / name)
        assert np.array_equal(found.images, expected) and found.labels is None


def test_npz_labels_forms(imported, tmp_path):
    images = colours(6)
    for labels, expected, classes in (
        (np.eye(3)[[2, 1, 0, 0, 1, 2]], [2, 1, 0, 0, 1, 2], ["0", "1", "2"]),
        (np.array([[5], [5], [7], [7], [5], [7]]), [0, 0, 1, 1, 0, 1], ["5", "7"]),
    ):
        np.savez(tmp_path / "a.npz", images=images, labels=labels)
        found = imported(tmp_path / "a.npz")
        assert found.labels.tolist() == expected and found.classes == classes


def latents(rng, channels=4, dtype=np.float32):
    return (3 * rng.standard_normal((70, 8, 8, channels))).astype(dtype)


@pytest.mark.parametrize(
    "dtype, channels", [(np.float32, 4), (np.float64, 4), (np.float16, 4), (np.float32, 16)]
)
@pytest.mark.parametrize("form", ["npz", "npy", "h5", "NCHW"])
def test_latents(imported, refused, tmp_path, rng, dtype, channels, form):
    """They arrive as they left; the report says what they were taken for."""
    images = latents(rng, channels, dtype)
    path = tmp_path / "latents"
    if form == "npy":
        path = path.with_suffix(".npy")
        np.save(path, images)
    elif form == "h5":
        with h5py.File(path, "w") as file:
            file["images"], file["labels"] = images, np.arange(70) % 2
            file.attrs["classes"] = ["a", "b"]
    else:
        path = path.with_suffix(".npz")
        moved = images.transpose(0, 3, 1, 2) if form == "NCHW" else images
        np.savez(path, images=moved, labels=np.arange(70) % 2, classes=["a", "b"])
    found = imported(path)
    assert found.images.dtype == np.float32
    assert np.array_equal(found.images, images.astype(np.float32))
    if form != "npy":
        assert found.names == ["a", "b"] * 35
    assert f"70 latents of 8×8×{channels}" in found.report.sentences()[0]
    assert "neither scaled nor resized" in found.report.notes[-1]
    assert imported(path, labels="none", size=8).labels is None
    for options, message in (
        ({"size": 16}, "leave --size out"),
        ({"channels": 3}, "leave --rgb and --grey out"),
        ({"fit": "pad"}, "leave --fit out"),
        ({"background": "red"}, "leave --background out"),
        ({"latents": False}, "bring it to 0 … 255|of 1 to 4 channels"),
    ):
        refused(path, message, NumdiffError, **options)


def test_floats_that_may_be_either(imported, refused, tmp_path, rng):
    """Three channels beyond the range of pixels, and alpha below 0, are requested."""
    path = tmp_path / "a.npz"
    np.savez(path, latents(rng, 3))
    refused(path, "bring it to 0 … 255, 0 … 1 or -1 … 1 first, or add --latents")
    assert imported(path, latents=True).report.noun == "latents"
    for values, channels in (
        (np.tanh(latents(rng, 4)), 3),
        (rng.random((70, 8, 8, 2)), 1),  # grey and alpha, or two of anything
        (255 * rng.random((70, 8, 8, 2)), 1),
    ):
        np.savez(path, values)
        refused(path, "pixels with alpha or latents: add --pixels or --latents")
        assert imported(path, latents=False).images.shape == (70, 8, 8, channels)
        found = imported(path, latents=True).images
        assert found.shape == values.shape and found.dtype == np.float32
    np.savez(path, colours(4))
    refused(path, "is uint8, and latents are floats: leave --latents out", latents=True)
    np.savez(path, images=latents(rng), labels=np.arange(70) % 3, classes=["a", "b"])
    refused(path, "`classes` in .*one name for each label from 0 to 2", NumdiffError)
    np.savez(path, np.where(np.arange(4) == 2, 1e300, -2 * np.ones((2, 4, 4, 4))))
    refused(path, "not finite", NumdiffError)  # as float32


def test_wrong_npz(refused, tmp_path, out):
    images = colours(6)
    path = tmp_path / "a.npz"
    for arrays, message in (
        ({"images": np.array([Attack()] * 6, object)}, "holds Python objects"),
        ({"images": images, "labels": np.array(["a", None] * 3, object)}, "holds Python objects"),
        ({"images": images, "labels": np.arange(5)}, "there are 6 images"),
        ({"images": images, "labels": np.ones((6, 2))}, "not one-hot"),
        ({"images": images, "labels": np.full(6, np.nan)}, "a label is nan"),
        ({"images": images[0, :, :, 0]}, "has shape"),
        ({"images": np.zeros((6, 192), np.uint8)}, r"has shape \(6, 192\)"),
        (
            {"images": colours(6, channels=2)},
            r"2 channels may be grey and alpha .* as grey, \(N, H, W, 1\)",
        ),
        ({"images": np.float32(3)}, r"has shape \(\), and images are \(N, H, W, C\)"),
        ({"images": images[:0]}, "no images"),
        ({"images": images * 1e3}, "from 0 to .*: bring it to"),
        ({"images": np.full((2, 4, 4, 3), np.nan)}, "not finite"),
        ({"images": images.astype(complex)}, "complex128"),
        ({"u": images, "v": images}, r"no array `images` or `arr_0` \(it has u, v\)"),
    ):
        np.savez(path, **arrays)
        refused(path, message, NumdiffError)
    np.savez(path, images)
    data = path.read_bytes()
    path.write_bytes(data[:-100])
    refused(path, "a.npz' is truncated or damaged", NumdiffError)
    damaged = bytearray(data)
    damaged[500:520] = b"x" * 20
    path.write_bytes(damaged)
    refused(path, "a.npz' is truncated or damaged .*CRC", NumdiffError)
    path = tmp_path / "b.npy"
    np.save(path, images)
    data = path.read_bytes()
    for length in (8, 60, len(data) - 1):
        path.write_bytes(data[:length])
        refused(path, "b.npy' is truncated or damaged", NumdiffError)
    assert not os.path.exists("/tmp/numdiff-was-attacked") and not out.exists()


# unet.cu's .bin and HDF5 --------------------------------------------------------------------------


def unet_cu(images, count=None, magic=20240620):
    n, h, w, c = images.shape
    header = struct.pack("<256i", magic, n if count is None else count, c, h, w, *[0] * 251)
    return header + (images.transpose(0, 3, 1, 2) / np.float32(127.5) - 1).astype("<f4").tobytes()


def test_unet_cu(imported, tmp_path, rng):
    images = rng.integers(0, 256, (70, 16, 16, 3), dtype=np.uint8)
    (tmp_path / "a.bin").write_bytes(unet_cu(images))
    (tmp_path / "a.bin.gz").write_bytes(gzip.compress(unet_cu(images)))
    for name in ("a.bin", "a.bin.gz"):
        assert np.array_equal(imported(tmp_path / name).images, images)


def test_wrong_unet_cu(refused, tmp_path):
    path, images = tmp_path / "a.bin", colours(3)
    for data, message in (
        (unet_cu(images)[:-4], "a.bin' is truncated or damaged"),
        (unet_cu(images)[:500], "truncated"),
        (unet_cu(images, count=-1), "truncated or damaged"),
        (unet_cu(images, count=0), "holds no images"),
        (unet_cu(images, magic=12345678), "weights of a model.*numdiff convert"),
        (unet_cu(images, magic=1), "nothing that numdiff can import"),
        (unet_cu(images)[:1024] + b"\xff" * (3 * 8 * 8 * 3 * 4), r"outside of \[-1, 1\]"),
        (
            struct.pack("<256i", 20240620, 2**31 - 1, 3, 2**31 - 1, 2**31 - 1, *[0] * 251),
            "truncated or damaged",
        ),
        (b"", "is empty"),
        (b"x", "nothing that numdiff can import"),
        (png(images[0]), "is a single image"),
    ):
        path.write_bytes(data)
        refused(path, message, NumdiffError)
    path.write_bytes(unet_cu(images))
    refused(path, "--labels folders is for folders", labels="folders")


def test_dataset_of_another_size(imported, tmp_path, out):
    imported({f"{i % 2}/{i}.png": image for i, image in enumerate(colours(6, 32))})
    small = tmp_path / "small.h5"
    import_dataset(out, small, size=8, channels=1)
    images, labels, _ = contents(small)
    assert images.shape == (6, 8, 8, 1) and labels.tolist() == [0, 0, 0, 1, 1, 1]
    import_dataset(small, small, force=True, channels=3)
    assert contents(small)[0].shape == (6, 8, 8, 3)
