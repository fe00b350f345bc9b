"""Sources of images for the tests of importers, put together byte by byte or by the standard library."""
import io
import struct
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
    return np.broadcast_to(values[:, None, None], (count, size, size, channels)).astype(np.uint8).copy()


def png(array):
    """PNG bytes of an array (H, W), (H, W, 3) or (H, W, 4), uint8 or uint16, put together by hand."""
    colour_type = {1: 0, 2: 4, 3: 2, 4: 6}[array.shape[2] if array.ndim == 3 else 1]
    rows = b"".join(b"\0" + row.astype(array.dtype.newbyteorder(">")).tobytes() for row in array)
    header = struct.pack(">IIBBBBB", array.shape[1], array.shape[0], 8 * array.itemsize, colour_type, 0, 0, 0)
    return png_of_chunks((b"IHDR", header), (b"IDAT", zlib.compress(rows)))


def png_of_chunks(*chunks):
    def chunk(name, data):
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

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


def zipped(path, files):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(name, data if isinstance(data, bytes) else png(data))
    return path
