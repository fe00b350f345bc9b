"""Sources of images for the tests of importers, put together byte by byte or by the standard
library."""

import io
import itertools
import struct
import tarfile
import zipfile
import zlib

import numpy as np

from numdiff.data.dataset import open_dataset


def contents(path):
    with open_dataset(path) as dataset:
        return dataset.read(np.arange(len(dataset))), dataset.labels, dataset.classes


def colours(count, size=8, channels=3):
    """Images of one colour each, another for every image: they survive JPEG and resizing."""
    values = (np.arange(count)[:, None] * 40 + np.arange(channels) * 7) % 256
    return (
        np.broadcast_to(values[:, None, None], (count, size, size, channels))
        .astype(np.uint8)
        .copy()
    )


def png(array):
    """PNG bytes of an array (H, W), (H, W, 3) or (H, W, 4), uint8 or uint16, put together by hand."""
    kind = {1: 0, 2: 4, 3: 2, 4: 6}[array.shape[2] if array.ndim == 3 else 1]
    rows = [row.astype(array.dtype.newbyteorder(">")).tobytes() for row in array]
    return png_of_rows(rows, array.shape[1], 8 * array.itemsize, kind)


def png_of_rows(rows, width, depth=8, kind=0, **chunks):
    """PNG bytes of packed rows. kind: the colour type; chunks: those before the pixels, by name."""
    header = struct.pack(">IIBBBBB", width, len(rows), depth, kind, 0, 0, 0)
    pixels = zlib.compress(b"".join(b"\0" + row for row in rows))
    more = [(name.encode(), data) for name, data in chunks.items()]
    return png_of_chunks((b"IHDR", header), *more, (b"IDAT", pixels))


def png_of_chunks(*chunks):
    def chunk(name, data):
        return (
            struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        )

    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(*c) for c in (*chunks, (b"IEND", b"")))


def saved(image, form, **options):
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def fill(folder, files):
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data if isinstance(data, bytes) else png(data))
    return folder


def zip_of(files, method=zipfile.ZIP_DEFLATED):
    """The bytes of a zip. files: {name: bytes or an array}."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", method) as archive:
        for name, data in files.items():
            archive.writestr(name, data if isinstance(data, bytes) else png(data))
    return stream.getvalue()


def zipped(path, files):
    path.write_bytes(zip_of(files))
    return path


def tarred(files, mode="w", form=tarfile.GNU_FORMAT):
    """The bytes of a tar. files: {name: bytes, array, or a tarfile.TarInfo without contents}."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode=mode, format=form) as archive:
        for name, data in files.items():
            if isinstance(data, tarfile.TarInfo):
                archive.addfile(data)
                continue
            data = data if isinstance(data, bytes) else png(data)
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return stream.getvalue()


def idx(array):
    """An array of bytes as MNIST's files have it."""
    return (
        struct.pack(">HBB", 0, 8, array.ndim)
        + struct.pack(f">{array.ndim}I", *array.shape)
        + array.tobytes()
    )


def tiff(pixels, order="<", compressed=False, extra=None):
    """TIFF bytes of 16-bit pixels (H, W, C), in one strip."""
    height, width, channels = pixels.shape
    data = pixels.astype(order + "u2").tobytes()
    data = zlib.compress(data) if compressed else data
    bits = struct.pack(f"{order}{channels}H", *[16] * channels)
    tags = [
        (256, 3, 1, width),
        (257, 3, 1, height),
        (258, 3, channels, 8),
        (259, 3, 1, 8 if compressed else 1),
        (262, 3, 1, 2),
        (273, 4, 1, 8 + len(bits)),
        (277, 3, 1, channels),
        (278, 3, 1, height),
        (279, 4, 1, len(data)),
    ] + ([(338, 3, 1, extra)] if extra is not None else [])
    entries = b"".join(
        struct.pack(order + "HHI", tag, kind, count)
        + (
            struct.pack(order + "HH", value, 0)
            if kind == 3 and count == 1
            else struct.pack(order + "I", value)
        )
        for tag, kind, count, value in tags
    )
    start = 8 + len(bits) + len(data)
    head = (b"II*\0" if order == "<" else b"MM\0*") + struct.pack(order + "I", start + start % 2)
    return (
        head
        + bits
        + data
        + bytes(start % 2)
        + struct.pack(order + "H", len(tags))
        + entries
        + bytes(4)
    )


# Matrices of RGB to XYZ, adapted to D50 (Lindbloom)
SRGB = np.array(
    [
        [0.4360747, 0.3850649, 0.1430804],
        [0.2225045, 0.7168786, 0.0606169],
        [0.0139322, 0.0971045, 0.7141733],
    ]
)
ADOBE = np.array(
    [
        [0.6097559, 0.2052401, 0.1492240],
        [0.3111242, 0.6256560, 0.0632197],
        [0.0194811, 0.0608902, 0.7448387],
    ]
)


def icc(matrix=None, gamma=2.2, space=b"RGB ", kind=b"mntr"):
    """An ICC profile of version 2: a matrix (3, 3) and one exponent, of grey an exponent, or of
    CMYK a table of two nodes a colour, whose lightness falls with the product of what each leaves.
    """

    def xyz(values):
        return b"XYZ \0\0\0\0" + struct.pack(">3i", *(round(65536 * v) for v in values))

    curve = b"curv\0\0\0\0" + struct.pack(">IH", 1, round(256 * gamma)) + b"\0\0"
    tags = [
        (b"desc", b"desc\0\0\0\0" + struct.pack(">I", 2) + b"a\0" + bytes(78)),
        (b"cprt", b"text\0\0\0\0none\0"),
        (b"wtpt", xyz((0.9642, 1, 0.8249))),
    ]
    if space == b"CMYK" and matrix is None:
        nodes = bytes(
            value
            for node in itertools.product((0, 1), repeat=4)
            for value in (255 * (not any(node)), 128, 128)
        )
        tags.append(
            (
                b"A2B0",
                b"mft1\0\0\0\0\4\3\2\0"
                + struct.pack(">9i", *(65536 * (i % 4 == 0) for i in range(9)))
                + bytes(range(256)) * 4
                + nodes
                + bytes(range(256)) * 3,
            )
        )
    elif matrix is None:
        tags.append((b"kTRC", curve))
    else:
        tags += [
            (name, xyz(column))
            for name, column in zip((b"rXYZ", b"gXYZ", b"bXYZ"), matrix.T, strict=True)
        ]
        tags += [(name, curve) for name in (b"rTRC", b"gTRC", b"bTRC")]
    table, body, position = struct.pack(">I", len(tags)), b"", 132 + 12 * len(tags)
    for name, data in tags:
        data += bytes(-len(data) % 4)
        table += name + struct.pack(">II", position + len(body), len(data))
        body += data
    between = b"Lab " if space == b"CMYK" else b"XYZ "
    header = struct.pack(
        ">I4sI4s4s4s12x4s28x3i",
        128 + len(table) + len(body),
        b"lcms",
        0x02100000,
        kind,
        space,
        between,
        b"acsp",
        63190,
        65536,
        54061,
    )
    return header.ljust(128, b"\0") + table + body
