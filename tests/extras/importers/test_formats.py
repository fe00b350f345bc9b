"""The importers of single files: CIFAR-10, MNIST, NumPy, unet.cu's and HDF5, put together here byte
by byte."""

import gzip
import io
import os
import pickle
import struct
import tarfile

import h5py
import numpy as np
import pytest

from numdiff.errors import NumdiffError, UsageError
from numdiff.extras.convert.unpickle import RefusedError
from numdiff.extras.importers.cifar import read_pickle
from numdiff.extras.importers.importing import import_dataset
from tests.extras.importers.sources import colours, contents, fill, png

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


def cifar_batches(rng, pack):
    """(images, labels, files of the archive) with three images a batch."""
    names = [
        b"airplane",
        b"automobile",
        b"bird",
        b"cat",
        b"deer",
        b"dog",
        b"frog",
        b"horse",
        b"ship",
        b"truck",
    ]
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


def tar(path, files, mode="w:gz"):
    with tarfile.open(path, mode) as archive:
        for name, data in files.items():
            member = tarfile.TarInfo(f"cifar-10-batches-py/{name}")
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return path


@pytest.mark.parametrize(
    "pack",
    [python2_pickle, *(lambda batch, p=p: pickle.dumps(batch, p) for p in (2, 4, 5))],
    ids=["Python 2", "protocol 2", "protocol 4", "protocol 5"],
)
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
    assert (
        classes[0] == "airplane"
        and classes[9] == "truck"
        and "CIFAR-10" in report.source
        and not report.notes
    )
    import_dataset(source, out, labels="none", size=16, force=True)
    assert contents(out)[1] is None and contents(out)[0].shape == (15, 16, 16, 3)


class Attack:
    def __reduce__(self):
        return os.system, ("touch /tmp/numdiff-was-attacked",)


@pytest.mark.parametrize(
    "evil, name",
    [
        (pickle.dumps(Attack()), "system"),
        (pickle.dumps({"data": Attack()}, 2), "system"),
        (b"cbuiltins\neval\n(S'1'\ntR.", "builtins.eval"),
        (b"cnumpy.testing._private.utils\nrunstring\n.", "runstring"),
        (b"\x80\x04\x8c\x05numpy\x8c\x0endarray.tofile\x93.", "ndarray.tofile"),
        (b"\x80\x04\x8c\x07_codecs\x8c\x06decode\x93.", "_codecs.decode"),
        (pickle.dumps(np.array([{}], object)), "array of O8|O"),
        (b"Pname\n.", "persistent"),
    ],
    ids=[
        "os.system",
        "within a dictionary",
        "eval",
        "numpy's own",
        "attribute",
        "codec",
        "objects",
        "persistent",
    ],
)
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
        with pytest.raises(
            NumdiffError, match="short.tar.gz' is (truncated or damaged|nothing that numdiff)"
        ):
            import_dataset(tmp_path / "short.tar.gz", out)
    with pytest.raises(NumdiffError, match="the tar .*b.tar.gz' holds no images .1 other files"):
        import_dataset(tar(tmp_path / "b.tar.gz", {"a.txt": b"a"}), out)
    for broken in (
        files["data_batch_2"][:100],
        b"",
        b"garbage",
        pickle.dumps([1]),
        python2_pickle({b"data": images}),
        python2_pickle({b"data": images.reshape(15, 3072), b"labels": [1]}),
        python2_pickle({b"data": images[:1].reshape(1, 3072), b"labels": [10]}),
    ):
        with pytest.raises(NumdiffError, match="truncated or damaged .*data_batch_2"):
            import_dataset(tar(tmp_path / "c.tar.gz", files | {"data_batch_2": broken}), out)
    del files["data_batch_5"]
    report = import_dataset(tar(tmp_path / "d.tar.gz", files), out)
    assert report.shape[0] == 12 and report.notes == ["It has no data_batch_5."]


# MNIST --------------------------------------------------------------------------------------------


def idx(array):
    return (
        struct.pack(">HBB", 0, 8, array.ndim)
        + struct.pack(f">{array.ndim}I", *array.shape)
        + array.tobytes()
    )


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
def test_mnist(tmp_path, out, mnist, images_name, labels_name):
    images, labels = mnist
    for name, array in ((images_name, images), (labels_name, labels)):
        (tmp_path / name).write_bytes(
            gzip.compress(idx(array)) if name.endswith(".gz") else idx(array)
        )
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
    path, neighbour = (
        tmp_path / "train-images-idx3-ubyte.gz",
        tmp_path / "train-labels-idx1-ubyte.gz",
    )
    for few in (labels[:5], labels):
        neighbour.write_bytes(gzip.compress(idx(few)))
        with pytest.raises(UsageError, match="holds labels: give the images file"):
            import_dataset(neighbour, out)
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
        with pytest.raises(
            NumdiffError, match="train-images-idx3-ubyte.gz' is truncated or damaged"
        ):
            import_dataset(path, out)
    path.write_bytes(gzip.compress(b"\0\0\x09\x03" + idx(images)[4:]))
    with pytest.raises(NumdiffError, match="nothing that numdiff can import: give a folder"):
        import_dataset(path, out)
    path.write_bytes(whole)
    for data, message in (
        (idx(labels[:50]), "50 labels and .* has 100 images"),
        (idx(labels)[:50], "labels.*truncated"),
        (b"\0\0\x09\x01" + idx(labels)[4:], "its magic number is 2305"),
    ):
        neighbour.write_bytes(gzip.compress(data))
        with pytest.raises(NumdiffError, match=message):
            import_dataset(path, out)
    assert not out.exists()
    import_dataset(path, out, labels="none")
    assert contents(out)[1] is None


# NumPy --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keys", [("arr_0", "arr_1"), ("images", "labels"), ("x_train", "y_train")])
@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_npz(tmp_path, out, keys, save):
    images = colours(70)
    save(tmp_path / "a.npz", **dict(zip(keys, (images, np.arange(70) % 4), strict=True)))
    import_dataset(tmp_path / "a.npz", out)
    written, labels, classes = contents(out)
    assert (
        np.array_equal(written, images)
        and labels.tolist() == [i % 4 for i in range(70)]
        and classes == list("0123")
    )


@pytest.mark.parametrize(
    "change, expected",
    [
        (lambda a: a.transpose(0, 3, 1, 2), lambda a: a),
        (lambda a: np.asfortranarray(a), lambda a: a),
        (lambda a: a.astype(np.int64), lambda a: a),
        (lambda a: a.astype(np.float32) / 255, lambda a: a),
        (lambda a: a / 127.5 - 1, lambda a: a),
        (lambda a: a.astype(np.float64), lambda a: a),
        (lambda a: a.astype(">u2") * 257, lambda a: a),
        (lambda a: a > 100, lambda a: 255 * (a > 100)),
        (lambda a: a[..., 0], lambda a: a[..., :1]),
    ],
    ids=[
        "NCHW",
        "Fortran",
        "int64",
        "0…1",
        "-1…1",
        "float 0…255",
        "uint16 big-endian",
        "bool",
        "NHW",
    ],
)
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
        (np.array([[5], [5], [7], [7], [5], [7]]), [0, 0, 1, 1, 0, 1], ["5", "7"]),
    ):
        np.savez(tmp_path / "a.npz", images=images, labels=labels)
        import_dataset(tmp_path / "a.npz", out, force=True)
        assert contents(out)[1].tolist() == expected and contents(out)[2] == classes


def latents(rng, channels=4, dtype=np.float32):
    return (3 * rng.standard_normal((70, 8, 8, channels))).astype(dtype)


@pytest.mark.parametrize(
    "dtype, channels", [(np.float32, 4), (np.float64, 4), (np.float16, 4), (np.float32, 16)]
)
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
            file["images"], file["labels"], file.attrs["classes"] = (
                images,
                np.arange(70) % 2,
                ["a", "b"],
            )
    else:
        path = path.with_suffix(".npz")
        moved = images.transpose(0, 3, 1, 2) if form == "NCHW" else images
        np.savez(path, images=moved, labels=np.arange(70) % 2, classes=["a", "b"])
    report = import_dataset(path, out)
    written, labels, classes = contents(out)
    assert written.dtype == np.float32 and np.array_equal(written, images.astype(np.float32))
    if form != "npy":
        assert labels.tolist() == [i % 2 for i in range(70)] and classes == ["a", "b"]
    assert (
        f"70 latents of 8×8×{channels}" in report.sentences()[0]
        and "neither scaled nor resized" in report.notes[-1]
    )
    import_dataset(path, out, labels="none", size=8, force=True)
    assert contents(out)[1] is None
    for options, message in (
        ({"size": 16}, "leave --size out"),
        ({"channels": 3}, "leave --rgb and --grey out"),
        ({"fit": "pad"}, "leave --fit out"),
        ({"background": "red"}, "leave --background out"),
        ({"latents": False}, "bring it to 0 … 255|of 1 to 4 channels"),
    ):
        with pytest.raises(NumdiffError, match=message):
            import_dataset(path, out, force=True, **options)


def test_floats_that_may_be_either(tmp_path, out, rng):
    """Three channels beyond the range of pixels, and alpha below 0, are requested."""
    np.savez(tmp_path / "a.npz", latents(rng, 3))
    with pytest.raises(
        UsageError, match="bring it to 0 … 255, 0 … 1 or -1 … 1 first, or add --latents"
    ):
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
        with pytest.raises(
            UsageError, match="2 channels, which may be pixels with alpha or latents: add --pixels"
        ):
            import_dataset(tmp_path / "two.npy", out, force=True)
        assert import_dataset(tmp_path / "two.npy", out, force=True, latents=False).shape == (
            70,
            8,
            8,
            1,
        )
        assert import_dataset(tmp_path / "two.npy", out, force=True, latents=True).shape == (
            70,
            8,
            8,
            2,
        )
    np.savez(tmp_path / "c.npz", colours(4))
    with pytest.raises(UsageError, match="is uint8, and latents are floats: leave --latents out"):
        import_dataset(tmp_path / "c.npz", out, force=True, latents=True)
    np.savez(tmp_path / "d.npz", images=latents(rng), labels=np.arange(70) % 3, classes=["a", "b"])
    with pytest.raises(NumdiffError, match="`classes` in .*one name for each label from 0 to 2"):
        import_dataset(tmp_path / "d.npz", out, force=True)
    np.savez(
        tmp_path / "e.npz",
        np.where(np.arange(4) == 2, np.float64(1e300), -2 * np.ones((2, 4, 4, 4))),
    )
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


# unet.cu's .bin and HDF5 --------------------------------------------------------------------------


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
        with pytest.raises(NumdiffError, match=message):
            import_dataset(path, out)
    with pytest.raises(UsageError, match="--labels folders is for folders"):
        path.write_bytes(unet_cu(images))
        import_dataset(path, out, labels="folders")


def test_dataset_of_another_size(tmp_path, out):
    import_dataset(
        fill(tmp_path / "s", {f"{i % 2}/{i}.png": image for i, image in enumerate(colours(6, 32))}),
        out,
    )
    small = tmp_path / "small.h5"
    import_dataset(out, small, size=8, channels=1)
    assert contents(small)[0].shape == (6, 8, 8, 1) and contents(small)[1].tolist() == [
        0,
        0,
        0,
        1,
        1,
        1,
    ]
    import_dataset(small, small, force=True, channels=3)
    assert contents(small)[0].shape == (6, 8, 8, 3)
