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
import bz2
import functools
import gzip
import io
import itertools
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

from tests.extras.importers.sources import (
    ADOBE,
    icc,
    idx,
    png,
    png_of_rows,
    saved,
    tarred,
    tiff,
    zip_of,
)
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


@functools.cache
def pictures():
    """{name: bytes} of small pictures of every format."""
    rng = np.random.default_rng(1)
    rgb = Image.fromarray(rng.integers(0, 256, (24, 24, 3), np.uint8))
    clear = Image.fromarray(rng.integers(0, 256, (24, 24, 4), np.uint8))
    grey, palette, inks = rgb.convert("L"), rgb.convert("P"), rgb.convert("CMYK")
    deep = Image.fromarray(rng.integers(0, 65536, (24, 24), np.uint16))
    exif = Image.Exif()
    exif[0x0112], exif[0x010E], exif[0x011A] = 6, "a picture" * 4, 72.0
    found = {
        "colour16.tif": tiff(rng.integers(0, 65536, (24, 24, 3), np.uint16)),
        "colour16.png": png(rng.integers(0, 65536, (24, 24, 4), np.uint16)),
        "a.pgm": b"P2 4 4 255\n" + b"1 2 3 4\n" * 4,
    }
    Image.init()
    forms = Image.registered_extensions()

    def save(name, image, **options):
        found[name] = saved(image, forms[os.path.splitext(name)[1]], **options)

    save("rgb.png", rgb, exif=exif)
    save("clear.png", clear)
    save("deep.png", deep)
    save("palette.png", palette, transparency=3)
    save("grey.png", grey, transparency=9)
    save("one.jpg", rgb, exif=exif)
    save("progressive.jpg", rgb, progressive=True)
    save("cmyk.jpg", inks)
    save("a.bmp", palette)
    save("b.bmp", rgb)
    save("a.gif", palette, save_all=True, append_images=[palette.rotate(90)], transparency=3)
    save("raw.tif", rgb, exif=exif)
    save("deep.tif", deep)
    save("a.ppm", rgb)
    save("lzw.tif", rgb, compression="tiff_lzw")
    save("jpeg.tif", rgb, compression="jpeg")
    save("bits.tif", rgb.convert("1"), compression="group4")
    save("a.ico", clear)
    save("bmp.ico", clear, bitmap_format="bmp")
    save("icc.tif", rgb, icc_profile=icc(ADOBE))
    save("icc.jpg", rgb, icc_profile=icc(ADOBE))
    save("icc.png", grey, icc_profile=icc(space=b"GRAY"))
    save("inks.tif", inks, icc_profile=icc(space=b"CMYK", kind=b"prtr"))
    for module, name in (("webp", "a.webp"), ("jpg_2000", "a.jp2"), ("avif", "a.avif")):
        if module in features.get_supported():
            save(name, clear if module == "webp" else rgb)
    return found


def _npy(array):
    stream = io.BytesIO()
    np.save(stream, array)
    return stream.getvalue()


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
    from tests.extras.convert.weights import pickled, tensor

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


# Cases: each yields (who reads it, files, options of an import) ------------------------------------
#
# The readers are words of `read`. They get the first of the files, or the folder that it is in.

METHODS = zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA


def picture_case(rng):
    name = _choice(rng, pictures())
    data = mutated(pictures()[name], rng, list(pictures().values()))
    if name.endswith("png") and rng.random() < 0.7:
        data = png_again(data)
    yield "picture mask", {name: data}
    yield "import evaluate", {f"source/{name}": data}, {"size": 16}


def mutated_zip(rng, files, method):
    """A zip that is damaged, or one of a damaged file."""
    if rng.random() < 0.5:
        return mutated(zip_of(files, method), rng)
    key = _choice(rng, files)
    return zip_of({**files, key: mutated(files[key], rng)}, method)


def zip_case(rng):
    names = [_choice(rng, pictures()) for _ in range(3)]
    files = {
        f"{'cat' if i else 'dog'}/{i}_{name}": pictures()[name] for i, name in enumerate(names)
    }
    if rng.random() < 0.5:
        files["labels.csv"] = labels_csv(files)
    options = {"size": 16, "labels": str(rng.choice(["auto", "folders", "prefix", "none"]))}
    yield "import", {"a.zip": mutated_zip(rng, files, METHODS[rng.integers(4)])}, options


def labels_case(rng):
    names = [f"{i}.png" for i in range(4)]
    pairs = {"labels": [[name, i] for i, name in enumerate(names)], "classes": list("abcd")}
    lines = [json.dumps({"file_name": name, "label": 1.0}) for name in names]
    texts = {
        "labels.csv": labels_csv(names),
        "labels.tsv": labels_csv(names).replace(b",", b"\t"),
        "labels.json": json.dumps(pairs).encode(),
        "dataset.json": json.dumps([{"file": n, "label": "x"} for n in names]).encode(),
        "metadata.csv": b"file_name,label\n" + labels_csv(names),
        "metadata.jsonl": "\n".join(lines).encode(),
    }
    name = _choice(rng, texts)
    files = {name: mutated(texts[name], rng, list(texts.values()))}
    files |= dict.fromkeys(names, pictures()["grey.png"])
    yield "import", {f"source/{name}": data for name, data in files.items()}


def array_case(rng):
    found = arrays()
    images = found[str(rng.choice(["images", "latents", "columns"]))]
    yield "import", {"a.npy": mutated(images, rng)}
    files = {
        "images.npy": images,
        "labels.npy": found[str(rng.choice(["labels", "table"]))],
        "classes.npy": found["classes"],
    }
    data = mutated_zip(rng, files, METHODS[rng.integers(2)])
    options = {"latents": [None, True, False][rng.integers(3)]}
    yield "import weights evaluate", {"a.npz": data}, options


def idx_case(rng):
    images = idx(np.random.default_rng(4).integers(0, 256, (9, 8, 8), np.uint8))
    labels = idx(np.arange(9, dtype=np.uint8))
    header = struct.pack("<256i", 20240620, 4, 3, 8, 8, *[0] * 251)
    kind = rng.integers(3)
    if kind == 2:
        images = mutated(header + bytes(4 * 4 * 3 * 64), rng)
    else:
        images, labels = (mutated(images, rng), labels) if kind else (images, mutated(labels, rng))
    packed = gzip.compress if rng.random() < 0.5 else bytes
    images = packed(images)
    images = mutated(images, rng) if rng.random() < 0.2 else images
    yield (
        "import",
        {"train-images-idx3-ubyte": images, "train-labels-idx1-ubyte": packed(labels)},
    )


def tar_case(rng):
    protocol = int(rng.choice([2, 4, 5]))
    files = {f"data_batch_{i}": cifar_batch(protocol) for i in range(1, 6)}
    files["batches.meta"] = pickle.dumps({"label_names": list("abcdefghij")}, 2)
    if rng.random() < 0.6:
        key = _choice(rng, files)
        files[key] = mutated(files[key], rng, [weights()[0]])
    form = [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT][rng.integers(3)]
    folders = ["x" * 120 if rng.random() < 0.1 else "cifar" for _ in files]
    data = tarred(
        {f"{folder}/{name}": files[name] for folder, name in zip(folders, files, strict=True)},
        form=form,
    )
    data = mutated(data, rng) if rng.random() < 0.5 else data
    yield "import", {"a.tar": gzip.compress(data, 1) if rng.random() < 0.5 else data}


def weights_case(rng):
    program, storages = weights()
    kind = rng.integers(3)
    if kind == 0:  # the legacy format, cut off behind its pickles
        head = (0x1950A86A20F9469CFC6C, 1001, {"little_endian": True})
        pickles = [*(pickle.dumps(value, 2) for value in head), program]
        pickles.append(pickle.dumps(["0", "1", "2"], 2))
        yield "weights", {"a.pt": mutated(b"".join(pickles), rng)}
        return
    if kind == 1:
        program = mutated(program, rng, [cifar_batch(2)])
    files = {"a/data.pkl": program, **{f"a/data/{key}": data for key, data in storages.items()}}
    data = zip_of(files, zipfile.ZIP_STORED)
    yield "weights", {"a.pt": mutated(data, rng) if kind == 2 else data}


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
    end = struct.pack("<HHHHLLH", 0, 0, 1, 1, len(directory), len(body), 0)
    return body + directory + b"PK\5\6" + end


def _more_than_announced(rng):
    """Zip members that unpack to a gigabyte and announce a hundred bytes, packed by deflate and
    bzip2."""
    zeros, bomb = _deflated_zeros(64), bz2.compress(bytes(4 * ZEROS), 1)
    yield "import", {"a.zip": _zip_by_hand(b"a.png", zeros, 100)}
    yield "import", {"b.zip": _zip_by_hand(b"a.png", bomb, 100, 12)}
    yield "weights", {"a.npz": _zip_by_hand(b"images.npy", zeros, 100)}


def _labels_bomb(rng):
    lines = [line * (4_000_000 // len(line)) for line in (b"ab,", b"a,1\n", b'a,"\n",')]
    for text in (bytes(5 * ZEROS), *lines):
        yield "import", {"a.zip": zip_of({"a.png": pictures()["rgb.png"], "labels.csv": text})}


def _png(width, height, kind=0):
    """The header of a PNG of this size, and no pixels."""
    data = bytearray(png_of_rows([], width, kind=kind))
    data[20:24] = struct.pack(">I", height)
    return png_again(bytes(data))


def _pixels(rng):
    """Pictures that announce more pixels than are decoded, in each format that a header of ours can
    be written for."""
    side = 13000
    jpeg = bytearray(pictures()["one.jpg"])
    frame = jpeg.index(b"\xff\xc0") + 5
    jpeg[frame : frame + 4] = struct.pack(">HH", side, side)
    icon = struct.pack("<HHHBBBBHHII", 0, 1, 1, 16, 16, 0, 0, 1, 32, 100, 22)
    bmp = (b"BM", 54, 0, 54, 40, side, side, 1, 24, 0, 0, 0, 0, 0, 0)
    gif = struct.pack("<HHBBB", side, side, 0, 0, 0) + b","
    for name, data in {
        "a.png": _png(side, side),
        "b.png": _png(70000, 100),
        "a.jpg": bytes(jpeg),
        "a.ico": icon + _png(side, side, 6),
        "a.bmp": struct.pack("<2sIIIIiiHHIIiiII", *bmp),
        "a.gif": b"GIF89a" + gif + struct.pack("<HHHHB", 0, 0, side, side, 0) + b"\x02\x01\0\0;",
        "a.ppm": b"P6 13000 13000 255\n",
        "a.qoi": b"qoif" + struct.pack(">IIBB", side, side, 3, 0) + bytes(9),
    }.items():
        yield "picture", {name: data}
        yield "import", {f"of {name}/{name}": data}


def _tags(rng):
    """Tags of a TIFF, and of a JPEG's EXIF, that are over one another; scans of a JPEG without end."""
    count, size = 4000, 60_000
    entries = b"".join(struct.pack("<HHLL", 1000 + i, 7, size - 100, 8) for i in range(count))
    tags = struct.pack("<2sHLH", b"II", 42, 8, count) + entries
    yield "picture", {"a.tif": tags + bytes(4 + size)}
    exif = b"Exif\0\0" + tags + bytes(12_000)
    jpeg = pictures()["one.jpg"]
    exif = b"\xff\xe1" + struct.pack(">H", len(exif) + 2) + exif
    yield "picture", {"a.jpg": jpeg[:2] + exif + jpeg[2:]}
    jpeg = bytearray(pictures()["progressive.jpg"])
    frame = jpeg.index(b"\xff\xc2") + 5
    jpeg[frame : frame + 4] = struct.pack(">HH", 8000, 8000)
    scan = jpeg.index(b"\xff\xda")
    scan = bytes(jpeg[scan : jpeg.index(b"\xff", scan + 2)])
    yield "picture", {"b.jpg": bytes(jpeg[:-2]) + scan * 20_000 + b"\xff\xd9"}


def _npy_headers(rng):
    header = b"\x93NUMPY\2\0" + struct.pack("<I", 0xFFFFFFFF)
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    packed = packer.compress(header) + packer.flush(zlib.Z_FULL_FLUSH) + _deflated_zeros(64)
    data = _zip_by_hand(b"images.npy", packed, len(header) + 64 * ZEROS)
    yield "import weights evaluate", {"a.npz": data}
    text = "{'descr': '|u1', 'fortran_order': %s, 'shape': (%d, 9999, 9999, 3)}"
    for count, order in itertools.product((1, 1 << 20, 1 << 60), (True, False)):
        words = (text % (order, count)).encode().ljust(117) + b"\n"
        data = b"\x93NUMPY\1\0v\0" + words + bytes(1000)
        yield "import", {"a.npy": data}
        packed = zlib.compress(data, 9)[2:-4]
        yield "import", {"b.npz": _zip_by_hand(b"images.npy", packed, 1 << 31)}
    header = struct.pack(">4I", 2051, 1 << 31, 1, 1)
    yield "import", {"a-images": gzip.compress(header + bytes(9))}


def _programs(rng):
    """Pickles that ask for gigabytes, or for a time without end."""
    from tests.extras.convert.weights import pickled, tensor

    mega = 1 << 20
    encode = b"(X" + struct.pack("<I", mega) + b"a" * mega + b"q\0X\6\0\0\0latin1q\1\x86q\2"
    same_hash = [(i * ((1 << 61) - 1)).to_bytes(10, "little") for i in range(1, 99_999)]
    large = {str(i): tensor("FloatStorage", "0", 4, (mega, 1 << 10), (0, 0)) for i in range(9)}
    huge = {"a": tensor("FloatStorage", "0", 4, ((1 << 2000),) * 20, (0,) * 20)}
    programs = {
        "encode": encode + b"c_codecs\nencode\nh\2R" * 4000 + b"t.",
        "long": b"\x8b" + struct.pack("<i", mega) + b"\x7f" * mega + b".",
        "huge": pickled(huge)[2:],
        "large": pickled(large)[2:],
        "nested": b"}(" + b")" + b"2\x86" * 200 + b"K\x01u.",
        "memo": b"}r\xff\xff\xff\x0f.",
        "lists": b"(" + b"]q\0" * 600_000 + b"t.",
        "same hash": b"}(" + b"".join(b"\x8a\x0a" + key + b"N" for key in same_hash) + b"u.",
    }
    for name, program in programs.items():
        program = b"\x80\x02" + program
        files = {"a/data.pkl": program, "a/data/0": bytes(16)}
        yield "weights", {"a.pt": zip_of(files, zipfile.ZIP_STORED)}
        yield "import", {f"{name}.tar": tarred({"cifar/data_batch_1": program})}


def _tar_headers(rng):
    """A PAX header of 600 MB, and a tar of 100,000 members, in a gzip of some hundred kilobytes."""
    zeros = gzip.compress(bytes(ZEROS))
    for kind in (tarfile.XHDTYPE, tarfile.GNUTYPE_LONGNAME):
        member = tarfile.TarInfo("data_batch_1")
        member.type, member.size = kind, 40 * ZEROS
        yield "import", {"a.tar.gz": gzip.compress(member.tobuf()) + zeros * 40}
    yield "import", {"b.tar.gz": gzip.compress(tarfile.TarInfo("a").tobuf() * 100_000)}


def _parts(rng):
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
        yield "picture", {name: data}
        yield "import", {f"{name}.zip": zip_of({name: data})}


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
    *(picture_case, picture_case, picture_case, zip_case, labels_case),
    *(array_case, idx_case, tar_case, weights_case, weights_case),
)


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


def readings(case, folder):
    """Write a case's files; yields (reader, path, options)."""
    for readers, files, *options in case:
        for name, data in files.items():
            path = os.path.join(folder, name)
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(path, "wb") as file:
                file.write(data)
        first = next(iter(files)).partition("/")[0]
        for reader in readers.split():
            yield reader, os.path.join(folder, first), options[0] if options else {}


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
        for what, path, options in readings(make(rng), folder):
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
