"""Small files that ask for much: each is refused before the time or the memory is spent."""

import io
import struct

import numpy as np
import pytest

from numdiff.errors import NumdiffError
from numdiff.extras.convert.files import load_state_dict
from numdiff.extras.evaluate.sources import open_source
from numdiff.extras.importers import archives, netpbm
from numdiff.extras.importers.importing import import_dataset
from numdiff.extras.importers.pictures import Unreadable, decoded
from tests.extras.importers.fuzz_importers import pictures
from tests.extras.importers.sources import png, png_of_chunks, zip_of, zipped

MANY = 200_000


def opened(data):
    with decoded(len(data), lambda: data) as image:
        return np.asarray(image)


# PBM, PGM and PPM ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data, expected",
    [
        (b"P1\n3 2\n# c\n101\n0 1 0", [[0, 255, 0], [255, 0, 255]]),
        (b"P4 3 2\n\xa0\x40", [[0, 255, 0], [255, 0, 255]]),
        (b"P2 2 1 3 # c\n1 # 9 9\n3", [[85, 255]]),
        (b"P5 2 1 255\n\x01\x02", [[1, 2]]),
        (b"P5#c\n2#c\n1#c\n255\n\x01\x02", [[1, 2]]),
        (b"P5 2 1 100\n\x32\x64", [[128, 255]]),
        (b"P5 2 1 255 #\x01", [[35, 1]]),
        (b"P5 2 1 255\n \n", [[32, 10]]),
        (b"P6\n# Created by GIMP\n1 1\n255\n#\n#", [[[35, 10, 35]]]),
        (b"P5 2 1 100\n\xff\x00", [[255, 0]]),
        (b"P5 2 1 65535\n\x01\x00\xff\xff", [[1, 255]]),
        (b"P6 1 1 65535\n\x00\x7f\x00\x81\x01\x83", [[[0, 1, 2]]]),
        (b"P6\r\n1 1\r255\n\x01\x02\x03", [[[1, 2, 3]]]),
        (b"P3 1 1 15\n5 10 15 99", [[[85, 170, 255]]]),
    ],
)
def test_netpbm(data, expected):
    assert opened(data).tolist() == expected


@pytest.mark.parametrize(
    "data, why",
    [
        (b"P5 2 1 255\n\x01", "cut off"),
        (b"P4 9 1\n\x01", "cut off"),
        (b"P1 2 1\n1", "cut off"),
        (b"P1 2 1\n12", "not 0 and 1"),
        (b"P2 2 1 9\n1 10", "out of range"),
        (b"P2 2 1 9\n1 -1", "not all numbers"),
        (b"P2 2 1 9\n1 x", "not all numbers"),
        (b"P2 2 1 9\n1", "cut off"),
        (b"P2 2 1 9\n1 " + b"1" * 9999, "range"),
        (b"P5 0 1 255\n", "says 0×1 pixels"),
        (b"P5 1 1 65536\n\0\0", "up to 65536"),
        (b"P5 1 1 0\n\0", "up to 0"),
        (b"P5 1 1\n", "header is damaged"),
        (b"P5 99999 1 255\n", "99999×1 pixels"),
        (b"P5 9999 9999 255\n", "9999×9999 pixels, more than"),
        (b"P5 99999999999 1 255\n", "header is damaged"),
        (b"P2 3000 3000 255\n", "9×9 pixels as text|3000×3000 pixels as text"),
        (b"Pf\n1 1\n1.0\n\0\0\0\0", "not an image"),
        (b"P5\n#" + b"a" * MANY + b"\n1 1 255\n\0", "comments are too long"),
        (b"P5\n" + b" " * MANY + b"1 1 255\n\0", "header is damaged"),
        (b"P5\n" + b"#\n" * MANY + b"1 1 255\n\0", "comments are too long"),
        (b"P2 1 1 255\n" + b"#\n" * MANY + b"1", "more comments than any picture needs"),
    ],
)
def test_damaged_netpbm(data, why):
    with pytest.raises(Unreadable, match=why):
        opened(data)


def test_netpbm_in_a_zip(tmp_path, out):
    """A zip of some kilobytes, whose comment alone would take seconds."""
    long = b"P6\n#" + bytes(5_000_000) + b"\n1 1\n255\nabc"
    path = zipped(tmp_path / "a.zip", {"a.ppm": long, "b.ppm": b"P6\n1 1\n255\nabc"})
    assert import_dataset(path, out).unreadable == [
        ("a.ppm", "its header is damaged, or its comments are too long")
    ]


def test_scaling_in_blocks(monkeypatch):
    monkeypatch.setattr(netpbm, "BLOCK", 3)
    assert opened(b"P2 10 1 9\n" + b" ".join(b"%d" % i for i in range(11))).tolist() == [
        [round(255 * i / 9) for i in range(10)]
    ]
    assert opened(b"P5 10 1 9\n" + bytes(range(10))).tolist() == [
        [round(255 * i / 9) for i in range(10)]
    ]


# What Pillow would follow part by part ------------------------------------------------------------

PNG = png(np.ones((1, 1), np.uint8))
JPEG = pictures()["one.jpg"]
GIF = b"GIF89a" + struct.pack("<HHBBB", 2, 2, 0, 0, 0)


def bitmap(body, side):
    start = 54 + 1024
    head = b"BM", start + len(body), 0, start, 40, side, side, 1, 8, 1, len(body), 0, 0, 256, 0
    return struct.pack("<2sIIIIiiHHIIiiII", *head) + bytes(1024) + body


@pytest.mark.parametrize(
    "data, why",
    [
        (JPEG[:2] + b"\xff\xfe\0\2" * MANY + JPEG[2:], "parts"),
        (JPEG[:2] + b"\xff" * MANY + JPEG[2:], "parts"),
        (JPEG[:2] + b"\xff\xd0" * MANY + JPEG[2:], "parts"),
        (PNG[:33] + png_of_chunks(*[(b"prIv", b"")] * MANY)[8:-12] + PNG[33:], "parts"),
        (PNG[:-12] + png_of_chunks(*[(b"IDAT", b"")] * MANY)[8:], "parts"),
        (GIF + b"!\xfe\1a\0" * MANY, "parts"),
        (GIF + b"\0" * MANY, "parts"),
        (GIF + b"!\xfe" + b"\1a" * MANY, "parts"),
        (b"\0\0\0\x0cjP  \r\n\x87\n" + b"\0\0\0\x08abcd" * MANY, "parts"),
        (bitmap(b"\0\0" * MANY, 8), "more bytes than its pixels"),
        (bitmap(b"", 9000), "at most 8 million"),
        (b"qoif" + struct.pack(">IIBB", 9000, 9000, 3, 0), "at most 8 million"),
    ],
    ids="comments fill markers chunks IDATs extensions junk blocks boxes runs bitmap qoi".split(),
)
def test_parts_without_end(data, why):
    with pytest.raises(Unreadable, match=why):
        opened(data)


def test_intact_pictures_have_few_parts():
    for name, data in pictures().items():
        assert opened(data).size, name


# NumPy's headers ----------------------------------------------------------------------------------


def npy(shape, descr="|u1", order=False):
    text = f"{{'descr': {descr!r}, 'fortran_order': {order}, 'shape': {shape!r}, }}".encode()
    return b"\x93NUMPY\1\0" + struct.pack("<H", 256) + text.ljust(255) + b"\n"


FAR = 2**48 - 1


@pytest.mark.parametrize(
    "shape", [(0, FAR, FAR, 3), (FAR, FAR, FAR, 0), (0, FAR, FAR), (FAR, 0), (FAR,), (0, 1, 1, 3)]
)
@pytest.mark.parametrize("descr", ["|u1", "<f8", "<U0", "<U9"])
def test_shapes_that_no_array_has(tmp_path, out, shape, descr):
    path = tmp_path / "a.npz"
    for names in ("arr_0", "features", "mu sigma", "numdiff arr_0", "images labels classes"):
        path.write_bytes(zip_of({f"{name}.npy": npy(shape, descr) for name in names.split()}))
        for read in (open_source, lambda path: import_dataset(path, out)):
            with pytest.raises(NumdiffError) as caught:
                read(path)
            assert "\n" not in str(caught.value)
        try:
            load_state_dict(path)
        except NumdiffError:
            pass


def test_texts_without_length():
    with pytest.raises(archives.TooMuch, match="texts of length 0"):
        archives.read_npy(io.BytesIO(npy((1 << 40,), "<U0")), 300, 1 << 30)
    assert archives.read_npy(io.BytesIO(npy((2,), "<U0")), 300, 1 << 30).shape == (2,)
