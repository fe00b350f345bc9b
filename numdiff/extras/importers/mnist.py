"""MNIST's idx, plain or gzip."""

import os
import struct

import numpy as np

from ...errors import NumdiffError, UsageError
from .arrays import checked_size, items_of, number_labels
from .rows import row_blocks
from .source import (
    Source,
    announced,
    damaged,
    no_labels_file,
    open_stream,
    read_exactly,
)

# big-endian magic numbers: unsigned bytes in three dimensions, and in one
IDX_IMAGES, IDX_LABELS = 2051, 2049
IDX_HEADER_BYTES = 4 * 4


def open_file(path, content, labels, order):
    """The `Source` of an idx file; None for another."""
    if int.from_bytes(content[:4], "big") in (IDX_IMAGES, IDX_LABELS):
        return open_idx(path, labels)
    return None


def open_folder(path, names, labels, order):
    """That of the training images in an MNIST folder; None for another."""
    images = find_idx_in_folder(path)
    if images is None:
        return None
    source = open_idx(images, labels)
    source.notes.append(f"The images are those of {os.path.basename(images)}.")
    return source


def open_idx(path, labels):
    """Images of an idx file, with the labels of its labels file."""
    no_labels_file(path, labels)
    with open_stream(path) as stream:
        # whose header is shorter
        if int.from_bytes(read_exactly(stream, 4, path), "big") == IDX_LABELS:
            raise UsageError(
                f"{str(path)!r} holds labels: give the images file; labels are read from its folder."
            )
        count, height, width = struct.unpack(
            ">3I", read_exactly(stream, IDX_HEADER_BYTES - 4, path)
        )
    row_bytes = checked_size(count, (height, width), 1, path)
    announced(path, IDX_HEADER_BYTES + count * row_bytes)
    label_file = None if labels == "none" else idx_labels_path(path)
    classes, numbers, order, notes = None, None, "", []
    if label_file:
        classes, numbers, order, _ = number_labels(read_idx_labels(label_file, count, path))
    elif labels == "auto":
        notes.append("No labels file was found in its folder, so the images have no classes.")

    def blocks():
        for data in row_blocks(path, IDX_HEADER_BYTES, count, row_bytes):
            yield np.frombuffer(data, np.uint8).reshape(-1, height, width, 1)

    return Source("MNIST idx file", items_of(blocks(), numbers), count, classes, order, notes=notes)


def idx_labels_path(path):
    """The labels file that belongs to an images file (train-images-idx3-ubyte.gz:
    train-labels-idx1-ubyte.gz), or None."""
    folder, name = os.path.split(path)
    if "images" not in name:
        return None
    stem = name[:-3] if name.endswith(".gz") else name
    stem = stem.replace("images", "labels").replace("idx3", "idx1")
    for candidate in (stem + ".gz", stem) if name.endswith(".gz") else (stem, stem + ".gz"):
        if os.path.isfile(os.path.join(folder, candidate)):
            return os.path.join(folder, candidate)
    return None


def read_idx_labels(path, count, images_path):
    with open_stream(path) as stream:
        magic, found = struct.unpack(">2I", read_exactly(stream, 8, path))
        if magic != IDX_LABELS:
            raise damaged(path, f"its magic number is {magic}, and that of idx labels {IDX_LABELS}")
        if found != count:
            raise NumdiffError(
                f"{str(path)!r} has {found} labels and {str(images_path)!r} has {count} images: "
                "use two files that belong together, or --labels none."
            )
        return np.frombuffer(read_exactly(stream, count, path), np.uint8)


def find_idx_in_folder(path):
    """The training images of an MNIST folder (else any idx images file in it), or None."""
    found = [
        name
        for name in sorted(os.listdir(path))
        if "images" in name and "idx3" in name and os.path.isfile(os.path.join(path, name))
    ]
    found.sort(key=lambda name: "train" not in name)  # stable: train before t10k
    return os.path.join(path, found[0]) if found else None
