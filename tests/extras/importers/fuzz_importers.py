"""Damaged and hostile archives, pickles and pictures: `python -m tests.extras.importers.fuzz_importers
--seconds 600`.

Each case is made from a seed and a number alone: a small whole file (zip, tar, pickle, picture,
npz, idx, labels), mutated at random, where it pays inside its packing, too, so that checksums are
right; or one of BOMBS, which say little and ask for much. A process of its own reads it:
`import_dataset`, `load_state_dict`, `read_picture`, `read_mask` or `open_source`. It must succeed,
or refuse it with a `NumdiffError` of one line; within SECONDS of a core, with at most MEGABYTES of
additional memory, and leave nothing behind. A failing case is reported by its number; `--case`
repeats it, and `--keep FOLDER` keeps its file. tests/extras/importers/test_fuzz_importers.py runs a few
hundred, and all bombs.
"""

import argparse
import functools
import gzip
import io
import json
import os
import pickle
import select
import shutil
import struct
import subprocess
import sys
import tarfile
import tempfile
import time
import traceback
import zipfile
import zlib

import numpy as np
from PIL import Image, features

from tests.extras.importers.sources import ADOBE, icc, png, tiff
from tests.forked import forked

SECONDS, MEGABYTES = 20, 300  # of a slow core: what is not refused in time takes minutes
HANG = 60  # seconds after which a case is given up
EXTREME = (
    b"\0\0\0\0",
    b"\xff\xff\xff\xff",
    b"\x7f\xff\xff\xff",
    b"\xff\xff\xff\x7f",
    b"\0\0\0\x80",
    b"\x80\0\0\0",
    b"\xff\xff",
    b"\0",
    b"\xff",
    b"\0\0\0\x01",
    b"\x01\0\0\0",
)


# Whole files --------------------------------------------------------------------------------------


def _saved(image, form, **options):
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


@functools.cache
def pictures():
    """{name: bytes} of small pictures of every format."""
    rng = np.random.default_rng(1)
    rgb = Image.fromarray(rng.integers(0, 256, (24, 24, 3), np.uint8))
    clear = Image.fromarray(rng.integers(0, 256, (24, 24, 4), np.uint8))
    grey, palette = rgb.convert("L"), rgb.convert("P")
    deep = Image.fromarray(rng.integers(0, 65536, (24, 24), np.uint16))
    exif = Image.Exif()
    exif[0x0112], exif[0x010E], exif[0x011A] = 6, "a picture" * 4, 72.0
    found = {
        "rgb.png": _saved(rgb, "PNG", exif=exif),
        "clear.png": _saved(clear, "PNG"),
        "deep.png": _saved(deep, "PNG"),
        "palette.png": _saved(palette, "PNG", transparency=3),
        "grey.png": _saved(grey, "PNG", transparency=9),
        "one.jpg": _saved(rgb, "JPEG", exif=exif),
        "progressive.jpg": _saved(rgb, "JPEG", progressive=True),
        "cmyk.jpg": _saved(rgb.convert("CMYK"), "JPEG"),
        "a.bmp": _saved(palette, "BMP"),
        "b.bmp": _saved(rgb, "BMP"),
        "a.gif": _saved(
            palette, "GIF", save_all=True, append_images=[palette.rotate(90)], transparency=3
        ),
        "raw.tif": _saved(rgb, "TIFF", exif=exif),
        "deep.tif": _saved(deep, "TIFF"),
        "a.ppm": _saved(rgb, "PPM"),
        "lzw.tif": _saved(rgb, "TIFF", compression="tiff_lzw"),
        "jpeg.tif": _saved(rgb, "TIFF", compression="jpeg"),
        "bits.tif": _saved(rgb.convert("1"), "TIFF", compression="group4"),
        "a.ico": _saved(clear, "ICO"),
        "icc.tif": _saved(rgb, "TIFF", icc_profile=icc(ADOBE)),
        "icc.jpg": _saved(rgb, "JPEG", icc_profile=icc(ADOBE)),
        "icc.png": _saved(grey, "PNG", icc_profile=icc(space=b"GRAY")),
        "inks.tif": _saved(
            rgb.convert("CMYK"), "TIFF", icc_profile=icc(space=b"CMYK", kind=b"prtr")
        ),
        "colour16.tif": tiff(rng.integers(0, 65536, (24, 24, 3), np.uint16)),
        "colour16.png": png(rng.integers(0, 65536, (24, 24, 4), np.uint16)),
        "bmp.ico": _saved(clear, "ICO", bitmap_format="bmp"),
        "a.pgm": b"P2 4 4 255\n" + b"1 2 3 4\n" * 4,
    }
    for module, name, form in (
        ("webp", "a.webp", "WEBP"),
        ("jpg_2000", "a.jp2", "JPEG2000"),
        ("avif", "a.avif", "AVIF"),
    ):
        if module in features.get_supported():
            found[name] = _saved(clear if form == "WEBP" else rgb, form)
    return found


def _zip(files, method=zipfile.ZIP_DEFLATED):
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", method) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return stream.getvalue()


def _npy(array):
    stream = io.BytesIO()
    np.save(stream, array)
    return stream.getvalue()


def _idx(array):
    return (
        struct.pack(">HBB", 0, 8, array.ndim)
        + struct.pack(f">{array.ndim}I", *array.shape)
        + array.tobytes()
    )


@functools.cache
def arrays():
    """{name: bytes of a .npy} of images, latents and labels."""
    rng = np.random.default_rng(2)
    return {
        "images": _npy(rng.integers(0, 256, (9, 8, 8, 3), np.uint8)),
        "labels": _npy(np.arange(9) % 3),
        "latents": _npy(rng.standard_normal((9, 8, 8, 4)).astype(np.float32)),
        "columns": _npy(np.asfortranarray(rng.random((9, 8, 8, 3)))),
        "classes": _npy(np.array(["a", "b", "c"])),
        "table": _npy(np.eye(3)[np.arange(9) % 3]),
    }


@functools.cache
def cifar_batch(protocol):
    images = np.random.default_rng(3).integers(0, 256, (2, 3072), np.uint8)
    return pickle.dumps({b"data": images, b"labels": [1, 2], b"filenames": [b"a", b"b"]}, protocol)


@functools.cache
def weights():
    """(data.pkl, its storages) of a state dict, as torch.save writes it."""
    from tests.extras.convert.test_state_dicts import pickled, tensor

    entries = {f"layer{i}.weight": tensor("FloatStorage", str(i), 6, (2, 3)) for i in range(3)}
    return pickled({"ema": entries, "step": 5, "name": "a"}), {str(i): bytes(24) for i in range(3)}


def labels_csv(names):
    return "".join(f"{name},{i % 3}\n" for i, name in enumerate(names)).encode()


# Mutations ----------------------------------------------------------------------------------------


def mutated(data, rng, more=()):
    """The bytes with one to a few changes: bits, extreme numbers, cuts, repetitions, pieces of
    other files."""
    data = bytearray(data)
    for _ in range(rng.choice([1, 1, 2, 4, 12])):
        if not data:
            break
        place, kind = int(rng.integers(len(data))), rng.integers(8)
        if rng.random() < 0.5:
            place = int(rng.integers(min(len(data), 200)))  # headers are short
        if kind <= 1:
            data[place] ^= 1 << int(rng.integers(8))
        elif kind <= 3:
            value = EXTREME[rng.integers(len(EXTREME))]
            data[place : place + len(value)] = value
        elif kind == 4:
            del data[place : place + int(rng.integers(1, 50))]
        elif kind == 5:
            piece = bytes(data[place : place + int(rng.integers(1, 100))])
            data[place:place] = piece * int(rng.choice([1, 2, 1000]))
        elif kind == 6 and more:
            other = more[rng.integers(len(more))]
            start = int(rng.integers(len(other)))
            data[place:place] = other[start : start + int(rng.integers(1, 300))]
        elif rng.random() < 0.3:
            del data[place:]
    return bytes(data)


def png_again(data):
    """The checksums of a PNG's chunks made right, as far as its chunks can be found."""
    out, position = bytearray(data[:8]), 8
    while position + 12 <= len(data):
        length = int.from_bytes(data[position : position + 4], "big")
        body = data[position + 4 : position + 8 + length]
        out += struct.pack(">I", length) + body + struct.pack(">I", zlib.crc32(body))
        position += 12 + length
    return bytes(out + data[position:])


def _choice(rng, table):
    names = sorted(table)
    return names[rng.integers(len(names))]


# Cases: each writes into `folder` and gives what is to be done ------------------------------------


def picture_case(rng, folder):
    name = _choice(rng, pictures())
    data = mutated(pictures()[name], rng, list(pictures().values()))
    if name.endswith("png") and rng.random() < 0.7:
        data = png_again(data)
    path = _write(folder, "source/" + name, data)
    return [
        ("import", folder + "/source", {"size": 16}),
        ("picture", path, {}),
        ("mask", path, {}),
        ("evaluate", folder + "/source", {}),
    ]


def zip_case(rng, folder):
    names = [_choice(rng, pictures()) for _ in range(3)]
    files = {
        f"{'cat' if i else 'dog'}/{i}_{name}": pictures()[name] for i, name in enumerate(names)
    }
    if rng.random() < 0.5:
        files["labels.csv"] = labels_csv(files)
    method = int(
        rng.choice([zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
    )
    if rng.random() < 0.5:
        data = mutated(_zip(files, method), rng)
    else:
        key = _choice(rng, files)
        data = _zip({**files, key: mutated(files[key], rng)}, method)
    options = {"size": 16, "labels": str(rng.choice(["auto", "folders", "prefix", "none"]))}
    return [("import", _write(folder, "a.zip", data), options)]


def labels_case(rng, folder):
    names = [f"{i}.png" for i in range(4)]
    for name in names:
        _write(folder, "source/" + name, pictures()["grey.png"])
    pairs = {"labels": [[name, i] for i, name in enumerate(names)], "classes": list("abcd")}
    texts = {
        "labels.csv": labels_csv(names),
        "labels.tsv": labels_csv(names).replace(b",", b"\t"),
        "labels.json": json.dumps(pairs).encode(),
        "dataset.json": json.dumps([{"file": n, "label": "x"} for n in names]).encode(),
        "metadata.csv": b"file_name,label\n" + labels_csv(names),
        "metadata.jsonl": b"".join(
            json.dumps({"file_name": n, "label": 1.0}).encode() + b"\n" for n in names
        ),
    }
    name = _choice(rng, texts)
    _write(folder, "source/" + name, mutated(texts[name], rng, list(texts.values())))
    return [("import", folder + "/source", {})]


def array_case(rng, folder):
    found = arrays()
    kind = rng.integers(3)
    name = str(rng.choice(["images", "latents", "columns"]))
    if kind == 0:
        return [("import", _write(folder, "a.npy", mutated(found[name], rng)), {})]
    files = {
        "images.npy": found[name],
        "labels.npy": found[str(rng.choice(["labels", "table"]))],
        "classes.npy": found["classes"],
    }
    method = int(rng.choice([zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED]))
    if kind == 1:
        data = mutated(_zip(files, method), rng)
    else:
        key = _choice(rng, files)
        data = _zip({**files, key: mutated(files[key], rng)}, method)
    path = _write(folder, "a.npz", data)
    return [
        ("import", path, {"latents": [None, True, False][rng.integers(3)]}),
        ("weights", path, {}),
        ("evaluate", path, {}),
    ]


def idx_case(rng, folder):
    images = _idx(np.random.default_rng(4).integers(0, 256, (9, 8, 8), np.uint8))
    labels = _idx(np.arange(9, dtype=np.uint8))
    header = struct.pack("<256i", 20240620, 4, 3, 8, 8, *[0] * 251)
    kind = rng.integers(3)
    if kind == 2:
        images = mutated(header + bytes(4 * 4 * 3 * 64), rng)
    else:
        images, labels = (mutated(images, rng), labels) if kind else (images, mutated(labels, rng))
    packed = gzip.compress if rng.random() < 0.5 else bytes
    images = packed(images)
    path = _write(
        folder, "train-images-idx3-ubyte", mutated(images, rng) if rng.random() < 0.2 else images
    )
    _write(folder, "train-labels-idx1-ubyte", packed(labels))
    return [("import", path, {})]


def tar_case(rng, folder):
    protocol = int(rng.choice([2, 4, 5]))
    files = {f"data_batch_{i}": cifar_batch(protocol) for i in range(1, 6)}
    files["batches.meta"] = pickle.dumps({"label_names": list("abcdefghij")}, 2)
    if rng.random() < 0.6:
        key = _choice(rng, files)
        files[key] = mutated(files[key], rng, [weights()[0]])
    stream = io.BytesIO()
    form = [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT][rng.integers(3)]
    with tarfile.open(fileobj=stream, mode="w", format=form) as archive:
        for name, data in files.items():
            member = tarfile.TarInfo(("x" * 120 if rng.random() < 0.1 else "cifar") + "/" + name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    data = stream.getvalue()
    data = mutated(data, rng) if rng.random() < 0.5 else data
    data = gzip.compress(data, 1) if rng.random() < 0.5 else data
    return [("import", _write(folder, "a.tar", data), {})]


def weights_case(rng, folder):
    program, storages = weights()
    kind = rng.integers(3)
    if kind == 0:  # the legacy format, cut off behind its pickles
        data = (
            b"".join(
                pickle.dumps(v, 2) for v in (0x1950A86A20F9469CFC6C, 1001, {"little_endian": True})
            )
            + program
        )
        return [
            (
                "weights",
                _write(folder, "a.pt", mutated(data + pickle.dumps(["0", "1", "2"], 2), rng)),
                {},
            )
        ]
    files = {
        "a/data.pkl": mutated(program, rng, [cifar_batch(2)]) if kind == 1 else program,
        **{f"a/data/{key}": data for key, data in storages.items()},
    }
    data = _zip(files, zipfile.ZIP_STORED)
    return [("weights", _write(folder, "a.pt", mutated(data, rng) if kind == 2 else data), {})]


# Bombs: small files that ask for much -------------------------------------------------------------

ZEROS = 16 << 20


@functools.cache
def _deflated_zeros(blocks):
    """A raw deflate stream of `blocks` blocks of ZEROS zeros: after a full flush its parts can be
    repeated."""
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    piece = packer.compress(bytes(ZEROS)) + packer.flush(zlib.Z_FULL_FLUSH)
    return piece * blocks + b"\x03\0"


def _zip_by_hand(name, packed, size, method=8):
    """A zip of one member that announces `size` bytes."""
    facts = struct.pack("<HHHHHLLLHH", 20, 0, method, 0, 33, 0, len(packed), size, len(name), 0)
    directory = b"PK\1\2\x14\0" + facts + bytes(14) + name
    body = b"PK\3\4" + facts + name + packed
    return (
        body
        + directory
        + b"PK\5\6"
        + struct.pack("<HHHHLLH", 0, 0, 1, 1, len(directory), len(body), 0)
    )


def _more_than_announced(rng, folder):
    """Zip members that unpack to a gigabyte and announce a hundred bytes, packed by deflate and
    bzip2."""
    import bz2

    bomb = bz2.compress(bytes(4 * ZEROS), 1)
    yield "import", _write(folder, "a.zip", _zip_by_hand(b"a.png", _deflated_zeros(64), 100)), {}
    yield "import", _write(folder, "b.zip", _zip_by_hand(b"a.png", bomb, 100, 12)), {}
    yield (
        "weights",
        _write(folder, "a.npz", _zip_by_hand(b"images.npy", _deflated_zeros(64), 100)),
        {},
    )


def _labels_bomb(rng, folder):
    with zipfile.ZipFile(folder + "/a.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.png", pictures()["rgb.png"])
        archive.writestr("labels.csv", bytes(5 * ZEROS))
    yield "import", folder + "/a.zip", {}
    for end in (b"ab,", b"a,1\n", b'a,"\n",'):
        with zipfile.ZipFile(
            folder + "/b.zip", "w", zipfile.ZIP_DEFLATED, compresslevel=1
        ) as archive:
            archive.writestr("a.png", pictures()["rgb.png"])
            archive.writestr("labels.csv", end * (4_000_000 // len(end)))
        yield "import", folder + "/b.zip", {}


def _png(width, height, kind=0, depth=8, rows=b""):
    header = struct.pack(">IIBBBBB", width, height, depth, kind, 0, 0, 0)
    chunks = [(b"IHDR", header), (b"IDAT", zlib.compress(rows)), (b"IEND", b"")]
    return png_again(
        b"\x89PNG\r\n\x1a\n"
        + b"".join(struct.pack(">I", len(d)) + n + d + bytes(4) for n, d in chunks)
    )


def _pixels(rng, folder):
    """Pictures that announce more pixels than are decoded, in each format that a header of ours can
    be written for."""
    jpeg = bytearray(pictures()["one.jpg"])
    frame = jpeg.index(b"\xff\xc0") + 5
    jpeg[frame : frame + 4] = struct.pack(">HH", 13000, 13000)
    icon = struct.pack("<HHHBBBBHHII", 0, 1, 1, 16, 16, 0, 0, 1, 32, 100, 22) + _png(
        13000, 13000, 6
    )
    bmp = struct.pack(
        "<2sIIIIiiHHIIiiII", b"BM", 54, 0, 54, 40, 13000, 13000, 1, 24, 0, 0, 0, 0, 0, 0
    )
    gif = (
        b"GIF89a"
        + struct.pack("<HHBBB", 13000, 13000, 0, 0, 0)
        + b","
        + struct.pack("<HHHHB", 0, 0, 13000, 13000, 0)
    )
    files = {
        "a.png": _png(13000, 13000),
        "b.png": _png(70000, 100),
        "a.jpg": bytes(jpeg),
        "a.ico": icon,
        "a.bmp": bmp,
        "a.gif": gif + b"\x02\x01\0\0;",
        "a.ppm": b"P6 13000 13000 255\n",
        "a.qoi": b"qoif" + struct.pack(">IIBB", 13000, 13000, 3, 0) + bytes(9),
    }
    for name, data in files.items():
        path = _write(folder, f"{name}/{name}", data)
        yield "picture", path, {}
        yield "import", os.path.dirname(path), {}


def _tags(rng, folder):
    """Tags of a TIFF, and of a JPEG's EXIF, that are over one another; scans of a JPEG without end."""
    count, size = 4000, 60_000
    entries = b"".join(struct.pack("<HHLL", 1000 + i, 7, size - 100, 8) for i in range(count))
    tiff = struct.pack("<2sHL", b"II", 42, 8) + struct.pack("<H", count) + entries + bytes(4 + size)
    yield "picture", _write(folder, "a.tif", tiff), {}
    exif = (
        b"Exif\0\0"
        + struct.pack("<2sHL", b"II", 42, 8)
        + struct.pack("<H", count)
        + entries
        + bytes(12_000)
    )
    jpeg = pictures()["one.jpg"]
    exif = b"\xff\xe1" + struct.pack(">H", len(exif) + 2) + exif
    yield "picture", _write(folder, "a.jpg", jpeg[:2] + exif + jpeg[2:]), {}
    jpeg = bytearray(pictures()["progressive.jpg"])
    frame = jpeg.index(b"\xff\xc2") + 5
    jpeg[frame : frame + 4] = struct.pack(">HH", 8000, 8000)
    scan = jpeg.index(b"\xff\xda")
    scan = bytes(jpeg[scan : jpeg.index(b"\xff", scan + 2)])
    yield "picture", _write(folder, "b.jpg", bytes(jpeg[:-2]) + scan * 20_000 + b"\xff\xd9"), {}


def _npy_headers(rng, folder):
    header = b"\x93NUMPY\2\0" + struct.pack("<I", 0xFFFFFFFF)
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    packed = packer.compress(header) + packer.flush(zlib.Z_FULL_FLUSH) + _deflated_zeros(64)
    data = _zip_by_hand(b"images.npy", packed, len(header) + 64 * ZEROS)
    for what in ("import", "weights", "evaluate"):
        yield what, _write(folder, "a.npz", data), {}
    text = "{'descr': '|u1', 'fortran_order': %s, 'shape': (%d, 9999, 9999, 3)}"
    for shape in (1, 1 << 20, 1 << 60):
        for order in (True, False):
            words = (text % (order, shape)).encode().ljust(117) + b"\n"
            data = b"\x93NUMPY\1\0v\0" + words + bytes(1000)
            yield "import", _write(folder, "a.npy", data), {}
            packed = zlib.compress(data, 9)[2:-4]
            yield (
                "import",
                _write(folder, "b.npz", _zip_by_hand(b"images.npy", packed, 1 << 31)),
                {},
            )
    yield (
        "import",
        _write(
            folder, "a-images", gzip.compress(struct.pack(">4I", 2051, 1 << 31, 1, 1) + bytes(9))
        ),
        {},
    )


def _programs(rng, folder):
    """Pickles that ask for gigabytes, or for a time without end."""
    from tests.extras.convert.test_state_dicts import pickled, tensor

    mega = b"X" + struct.pack("<I", 1 << 20) + b"a" * (1 << 20)
    nested = b"\x80\x02}(" + b")" + b"2\x86" * 200 + b"K\x01u."
    programs = {
        "encode": b"\x80\x02("
        + mega
        + b"q\0X\6\0\0\0latin1q\1\x86q\2"
        + b"c_codecs\nencode\nh\2R" * 4000
        + b"t.",
        "long": b"\x80\x02\x8b" + struct.pack("<i", 1 << 20) + b"\x7f" * (1 << 20) + b".",
        "huge": pickled({"a": tensor("FloatStorage", "0", 4, ((1 << 2000),) * 20, (0,) * 20)}),
        "large": pickled(
            {str(i): tensor("FloatStorage", "0", 4, (1 << 20, 1 << 10), (0, 0)) for i in range(9)}
        ),
        "nested": nested,
        "memo": b"\x80\x02}r\xff\xff\xff\x0f.",
        "lists": b"\x80\x02(" + b"]q\0" * 600_000 + b"t.",
        "same hash": b"\x80\x02}("
        + b"".join(
            b"\x8a\x0a" + (i * ((1 << 61) - 1)).to_bytes(10, "little") + b"N"
            for i in range(1, 99_999)
        )
        + b"u.",
    }
    for name, program in programs.items():
        data = _zip({"a/data.pkl": program, "a/data/0": bytes(16)}, zipfile.ZIP_STORED)
        yield "weights", _write(folder, "a.pt", data), {}
        stream = io.BytesIO()
        with tarfile.open(fileobj=stream, mode="w") as archive:
            member = tarfile.TarInfo("cifar/data_batch_1")
            member.size = len(program)
            archive.addfile(member, io.BytesIO(program))
        yield "import", _write(folder, f"{name}.tar", stream.getvalue()), {}


def _tar_headers(rng, folder):
    """A PAX header of 600 MB, and a tar of 100,000 members, in a gzip of some hundred kilobytes."""
    zeros = gzip.compress(bytes(ZEROS))
    for kind in (tarfile.XHDTYPE, tarfile.GNUTYPE_LONGNAME):
        member = tarfile.TarInfo("data_batch_1")
        member.type, member.size = kind, 40 * ZEROS
        yield "import", _write(folder, "a.tar.gz", gzip.compress(member.tobuf()) + zeros * 40), {}
    member = gzip.compress(tarfile.TarInfo("a").tobuf() * 100_000)
    yield "import", _write(folder, "b.tar.gz", member), {}


def _parts(rng, folder):
    """Headers and parts of a hundred megabytes, which are some kilobytes in a zip."""
    jpeg, size = pictures()["one.jpg"], 6 * ZEROS
    for name, start, part, end in (
        ("a.ppm", b"P6\n#", b"a", b"\n2 2\n255\n" + bytes(12)),
        ("b.ppm", b"P3\n2 2\n255\n", b"#\n", b"1 " * 12),
        ("a.jpg", jpeg[:2], b"\xff", jpeg[2:]),
        ("b.jpg", jpeg[:2], b"\xff\xfe\0\2", jpeg[2:]),
        ("a.png", _png(2, 2)[:33], b"\0\0\0\0prIv\x5d\xb6\x54\x5a", b""),
        ("a.gif", b"GIF89a" + struct.pack("<HHBBB", 2, 2, 0, 0, 0), b"!\xfe\1a\0", b""),
    ):
        data = start + part * (size // len(part)) + end
        yield "picture", _write(folder, name, data), {}
        yield "import", _write(folder, name + ".zip", _zip({name: data})), {}


BOMBS = (
    _more_than_announced,
    _labels_bomb,
    _pixels,
    _tags,
    _npy_headers,
    _programs,
    _tar_headers,
    _parts,
)
CASES = (
    picture_case,
    picture_case,
    picture_case,
    zip_case,
    labels_case,
    array_case,
    idx_case,
    tar_case,
    weights_case,
    weights_case,
)


def _write(folder, name, data):
    path = os.path.join(folder, name)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "wb") as file:
        file.write(data)
    return path


# One case, in a separate process ------------------------------------------------------------------


def read(what, path, options, folder):
    """Read a file as a command would; what comes of it is looked at as far as a command would."""
    from numdiff.data.dataset import open_dataset
    from numdiff.extras.convert.files import load_state_dict
    from numdiff.extras.evaluate.sources import open_source
    from numdiff.extras.importers.importing import import_dataset
    from numdiff.training.sample_files import read_mask, read_picture

    if what == "import":
        out = os.path.join(folder, "out.h5")
        import_dataset(path, out, force=True, **options).sentences()
        with open_dataset(out) as dataset:
            dataset.read([0])
        os.unlink(out)
    elif what == "weights":
        load_state_dict(path)
    elif what == "picture":
        read_picture(path, (16, 16, 3))
    elif what == "mask":
        read_mask(path, 16)
    elif hasattr(opened := open_source(path), "batches"):
        next(iter(opened.batches(4)))


def peak_megabytes(reset=False):
    """The most memory that this process has had, since the last reset."""
    if reset:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) / 1024 for line in file if line.startswith("VmHWM"))


def run_case(seed, number, keep=None):
    """A dict: what was done, seconds, megabytes, and `fault`, None if all is well."""
    from numdiff.errors import NumdiffError

    make = CASES[number % len(CASES)] if number >= 0 else BOMBS[number]
    rng = np.random.default_rng([seed, abs(number)])
    folder = tempfile.mkdtemp(prefix="fuzz")
    report = {"case": number, "kind": make.__name__, "fault": None, "done": 0, "refused": 0}
    try:
        for what, path, options in make(rng, folder):
            before, start = peak_megabytes(reset=True), time.process_time()
            try:
                read(what, path, options, folder)
                report["done"] += 1
            except NumdiffError as error:
                report["refused"] += 1
                if "\n" in str(error) or not str(error).isprintable() or len(str(error)) > 1000:
                    report["fault"] = f"{what}: not one line: {str(error)[:300]!r}"
            except BaseException:
                report["fault"] = f"{what}: " + traceback.format_exc()[-1500:]
            seconds, megabytes = time.process_time() - start, peak_megabytes() - before
            if seconds > SECONDS or megabytes > MEGABYTES:
                report["fault"] = report["fault"] or f"{what}: {seconds:.1f} s, {megabytes:.0f} MB"
            left = [name for name in os.listdir(folder) if "out.h5" in name]
            if left:
                report["fault"] = report["fault"] or f"{what}: left {left}"
        if report["fault"] and keep:
            shutil.copytree(folder, os.path.join(keep, f"{seed}-{number}"), dirs_exist_ok=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return report


def _worker(seed, first, keep):
    """Cases from `first` on, a line each, until the other side closes."""
    import warnings

    warnings.simplefilter("ignore")
    number = first
    while True:
        print(json.dumps(run_case(seed, number, keep)), flush=True)
        number += 1


def fuzz(seed=0, first=0, count=None, seconds=None, keep=None):
    """(reports with a fault, cases, done, refused) from case `first` on: `count`, or as many as the
    seconds allow."""
    faults, number, done, refused, end = [], first, 0, 0, time.monotonic() + (seconds or 1e9)

    def worker():
        command = forked(
            "-m",
            "tests.extras.importers.fuzz_importers",
            "--worker",
            "--seed",
            seed,
            "--first",
            number,
            *(["--keep", keep] if keep else []),
        )
        return subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )

    process = worker()
    try:
        while time.monotonic() < end and (count is None or number < first + count):
            ready, _, _ = select.select([process.stdout], [], [], HANG)
            line = process.stdout.readline() if ready else ""
            if line:
                report = json.loads(line)
                done, refused = done + report["done"], refused + report["refused"]
                if report["fault"]:
                    faults.append(report)
            else:  # it hangs, or the process has died
                faults.append(
                    {"case": number, "fault": f"ended with {process.poll()}" if ready else "hangs"}
                )
                process.kill()
                process.wait()
            number += 1
            if not line:
                process = worker()
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    return faults, number - first, done, refused


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--case", type=int, help="run this one here, and print what comes of it")
    parser.add_argument("--keep", help="folder for the files of cases that fail")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        _worker(options.seed, options.first, options.keep)
    if options.case is not None:
        print(json.dumps(run_case(options.seed, options.case, options.keep), indent=1))
        return
    faults, cases, done, refused = fuzz(
        options.seed, options.first, seconds=options.seconds, keep=options.keep
    )
    for report in faults:
        print(json.dumps(report))
    print(
        f"seed {options.seed}: {cases:,} cases, {done:,} read, {refused:,} refused, {len(faults)} faults"
    )
    sys.exit(bool(faults))


if __name__ == "__main__":
    main()
