"""unet.cu's .bin, plain or gzip."""

import numpy as np

from ...errors import NumdiffError, UsageError
from .arrays import checked_size, items_of, to_bytes
from .rows import row_blocks
from .source import (
    Source,
    announced,
    damaged,
    no_labels_file,
    open_stream,
    read_exactly,
)

BIN_MAGIC, BIN_WEIGHTS_MAGIC = 20240620, 12345678  # unet.cu's images, and its weights
BIN_HEADER_BYTES = 256 * 4


def open_file(path, content, labels, order):
    """The `Source` of a .bin of images; None for another file."""
    magic = int.from_bytes(content[:4], "little")
    if magic == BIN_WEIGHTS_MAGIC:
        raise UsageError(
            f"{str(path)!r} holds the weights of a model: read it with `numdiff convert`."
        )
    return open_bin(path, labels) if magic == BIN_MAGIC else None


def open_folder(path, names, labels, order):
    """None: a .bin is a file."""


def open_bin(path, labels):
    """Images of unet.cu: header int32[256] {20240620, count, 3, height, width}, float32 (count, 3,
    H, W) in [-1, 1]."""
    no_labels_file(path, labels)
    with open_stream(path) as stream:
        header = np.frombuffer(read_exactly(stream, BIN_HEADER_BYTES, path), "<i4")
    count, channels, height, width = (int(n) for n in header[1:5])
    row_bytes = checked_size(count, (channels, height, width), 4, path)
    if channels not in (1, 3):
        raise damaged(path, f"its header speaks of {channels} channels")
    announced(path, BIN_HEADER_BYTES + count * row_bytes)

    def blocks():
        for data in row_blocks(path, BIN_HEADER_BYTES, count, row_bytes):
            values = np.frombuffer(data, "<f4")
            if not (np.abs(values) <= 1.001).all():  # also false for NaN
                raise NumdiffError(
                    f"{str(path)!r} has values outside of [-1, 1]: scale its images as x / 127.5 - 1."
                )
            yield to_bytes(values.reshape(-1, channels, height, width).transpose(0, 2, 3, 1), -1, 1)

    return Source("unet.cu file", items_of(blocks(), None), count)
