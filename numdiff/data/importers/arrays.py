"""Images that come as one array: MNIST's idx, .npz and .npy, unet.cu's .bin, and numdiff's own HDF5."""
import math
import os
import struct
import zipfile

import numpy as np

from ...errors import NumdiffError, UsageError
from ..dataset import CHUNK, open_dataset
from .source import (
    BLOCK_BYTES,
    MAXIMUM_IMAGE_BYTES,
    Item,
    Source,
    damage_named,
    damaged,
    no_labels_file,
    number_classes,
    open_stream,
    read_exactly,
)

IDX_IMAGES, IDX_LABELS = 2051, 2049  # big-endian magic numbers: unsigned bytes in three dimensions, and in one
BIN_MAGIC, BIN_WEIGHTS_MAGIC = 20240620, 12345678  # unet.cu's images, and its weights
IDX_HEADER_BYTES, BIN_HEADER_BYTES = 4 * 4, 256 * 4
NPZ_IMAGES = ("images", "arr_0", "x_train", "x", "data")  # arr_0/arr_1 as guided-diffusion writes, x_train as Keras
NPZ_LABELS = ("labels", "arr_1", "y_train", "y", "targets")


def items_of(blocks, labels):
    """Items of an iterator over blocks uint8 (n, H, W, C), counted on from one block to the next."""
    i = 0
    for block in blocks:
        for image in block:
            yield Item(f"image {i}", lambda wanted, image=image: image, None if labels is None else labels[i])
            i += 1


def rows_per_block(row_bytes):
    return max(1, BLOCK_BYTES // max(1, row_bytes))


def row_blocks(path, header_bytes, count, row_bytes):
    """The bytes behind the header of a file, plain or gzip, a whole number of rows at a time."""
    with open_stream(path) as stream:
        read_exactly(stream, header_bytes, path)
        for start in range(0, count, rows_per_block(row_bytes)):
            yield read_exactly(stream, min(rows_per_block(row_bytes), count - start) * row_bytes, path)
        with damage_named(path):
            stream.read(1)  # at its end, gzip compares its checksum


def checked_size(count, shape, itemsize, path):
    """Bytes of one image of this shape; refuses what only a damaged header can say."""
    nbytes = math.prod(shape) * itemsize
    if count < 0 or min(shape) < 1 or nbytes > MAXIMUM_IMAGE_BYTES:
        raise damaged(path, f"its header speaks of {count} images of {'×'.join(map(str, shape))}")
    if count == 0:
        raise NumdiffError(f"{str(path)!r} holds no images: check the path.")
    return nbytes


# MNIST: idx, plain or gzip --------------------------------------------------------------------------------------------

def open_idx(path, labels):
    """Images of an idx file, with the labels of the file beside it."""
    no_labels_file(path, labels)
    with open_stream(path) as stream:
        magic, count, height, width = struct.unpack(">4I", read_exactly(stream, IDX_HEADER_BYTES, path))
    if magic == IDX_LABELS:
        raise UsageError(f"{str(path)!r} holds labels: give the images file, and its labels are found beside it.")
    row_bytes = checked_size(count, (height, width), 1, path)
    beside = None if labels == "none" else idx_labels_path(path)
    classes = numbers = None
    notes = []
    if beside:
        classes, numbers = number_classes(read_idx_labels(beside, count, path))
    elif labels == "auto":
        notes.append("No labels file was found beside it, so the images have no classes.")

    def blocks():
        for data in row_blocks(path, IDX_HEADER_BYTES, count, row_bytes):
            yield np.frombuffer(data, np.uint8).reshape(-1, height, width, 1)

    return Source("MNIST idx file", items_of(blocks(), numbers), count, classes, notes=notes)


def idx_labels_path(path):
    """The labels file beside an images file (train-images-idx3-ubyte.gz: train-labels-idx1-ubyte.gz), or None."""
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
            raise NumdiffError(f"{str(path)!r} has {found} labels and {str(images_path)!r} has {count} images: "
                               "use two files that belong together, or --labels none.")
        return np.frombuffer(read_exactly(stream, count, path), np.uint8)


def find_idx_in_folder(path):
    """The training images of an MNIST folder (else any idx images file in it), or None."""
    found = [name for name in sorted(os.listdir(path)) if "images" in name and "idx3" in name]
    found.sort(key=lambda name: "train" not in name)  # stable: train before t10k
    return os.path.join(path, found[0]) if found else None


# unet.cu: .bin --------------------------------------------------------------------------------------------------------

def open_bin(path, labels):
    """Images of unet.cu: header int32[256] {20240620, count, 3, height, width}, float32 (count, 3, H, W) in [-1, 1]."""
    no_labels_file(path, labels)
    with open_stream(path) as stream:
        header = np.frombuffer(read_exactly(stream, BIN_HEADER_BYTES, path), "<i4")
    count, channels, height, width = (int(n) for n in header[1:5])
    row_bytes = checked_size(count, (channels, height, width), 4, path)
    if channels not in (1, 3):
        raise damaged(path, f"its header speaks of {channels} channels")

    def blocks():
        for data in row_blocks(path, BIN_HEADER_BYTES, count, row_bytes):
            values = np.frombuffer(data, "<f4")
            if not (np.abs(values) <= 1.001).all():  # also false for NaN
                raise NumdiffError(f"{str(path)!r} has values outside of [-1, 1]: scale its images as x / 127.5 - 1.")
            yield to_bytes(values.reshape(-1, channels, height, width).transpose(0, 2, 3, 1), -1, 1)

    return Source("unet.cu file", items_of(blocks(), None), count)


def to_bytes(values, low, high):
    """Values in [low, high] as uint8, rounded to the nearest."""
    return np.clip(np.rint((values.astype(np.float32) - low) * (255 / (high - low))), 0, 255).astype(np.uint8)


# NumPy: .npz and .npy -------------------------------------------------------------------------------------------------

class NpyStream:
    """One array of a .npy or of an .npz: its header at once, its rows in blocks. Executes no pickle."""

    def __init__(self, path, name, opener):
        self.path, self.name, self.opener = path, name, opener
        with self._open() as stream:
            self.shape, self.fortran, self.dtype = self._header(stream)
        if self.dtype.hasobject:
            raise NumdiffError(f"{name} in {str(path)!r} holds Python objects, which are a pickle, and numdiff "
                               "executes none: save it as an array of numbers.")
        if self.dtype.kind not in "buif":
            raise NumdiffError(f"{name} in {str(path)!r} is {self.dtype}: save it as an array of numbers.")

    def _open(self):
        with damage_named(self.path):
            return self.opener()

    def _header(self, stream):
        try:
            with damage_named(self.path):
                version = np.lib.format.read_magic(stream)
                read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
                if version not in read:
                    raise ValueError(f"format {version} of .npy is unknown")
                return read[version](stream)
        except NumdiffError:
            raise
        except Exception as error:  # the header is Python's own notation, so it can be broken in any way
            raise damaged(self.path, error) from None

    def blocks(self):
        """Arrays of consecutive rows."""
        row = math.prod(self.shape[1:]) * self.dtype.itemsize
        if row > MAXIMUM_IMAGE_BYTES:
            raise damaged(self.path, f"{self.name} has shape {self.shape}")
        with self._open() as stream:
            self._header(stream)
            if self.fortran:  # columns first: no row is whole before all is read
                data = np.frombuffer(read_exactly(stream, row * self.shape[0], self.path), self.dtype)
                yield data.reshape(self.shape, order="F")
                return
            for start in range(0, self.shape[0], rows_per_block(row)):
                n = min(rows_per_block(row), self.shape[0] - start)
                data = read_exactly(stream, n * row, self.path)
                yield np.frombuffer(data, self.dtype).reshape(n, *self.shape[1:])


def open_npy(path, labels):
    return _array_source(path, "NumPy array", NpyStream(path, "the array", lambda: open(path, "rb")), None, labels)


def open_npz(path, labels):
    with damage_named(path):
        archive = zipfile.ZipFile(path)
    members = {name[:-4]: name for name in archive.namelist() if name.endswith(".npy")}
    images = next((key for key in NPZ_IMAGES if key in members), None)
    if images is None and len(members) == 1:
        images = next(iter(members))
    if images is None:
        raise NumdiffError(f"{str(path)!r} has no array `images` or `arr_0` (it has {', '.join(sorted(members))}): "
                           "save the images under one of these names.")
    beside = next((key for key in NPZ_LABELS if key in members), None)
    streams = [NpyStream(path, f"`{key}`", lambda name=members[key]: archive.open(name)) if key else None
               for key in (images, beside)]
    return _array_source(path, ".npz file", *streams, labels, archive.close)


def _array_source(path, kind, images, labels_stream, labels, close=lambda: None):
    no_labels_file(path, labels)
    shape = images.shape
    channels_first = len(shape) == 4 and shape[1] in (1, 3, 4) and shape[3] not in (1, 2, 3, 4)
    if len(shape) not in (3, 4) or (len(shape) == 4 and not channels_first and shape[3] not in (1, 2, 3, 4)):
        raise NumdiffError(f"{images.name} in {str(path)!r} has shape {shape}, and images are (N, H, W, C) or "
                           "(N, H, W): save it in that form.")
    checked_size(shape[0], shape[1:], images.dtype.itemsize, path)
    notes = ["The channels stood before height and width, and were moved behind them."] if channels_first else []
    low, high = _range_of(path, images)
    classes = numbers = None
    if labels_stream is not None and labels != "none":
        classes, numbers = _array_labels(path, labels_stream, shape[0])

    def blocks():
        for block in images.blocks():
            block = block.transpose(0, 2, 3, 1) if channels_first else block[..., None] if block.ndim == 3 else block
            yield block if block.dtype == np.uint8 else to_bytes(block, low, high)

    return Source(kind, items_of(blocks(), numbers), shape[0], classes, notes=notes, close=close)


def _range_of(path, images):
    """What values mean black and white: known for integers of 8 and 16 bits, else seen from the least and greatest."""
    if images.dtype == np.uint8:
        return 0, 255
    if images.dtype == np.uint16:
        return 0, 65535
    if images.dtype == np.bool_:
        return 0, 1
    low, high = math.inf, -math.inf
    for block in images.blocks():
        low, high = min(low, float(block.min())), max(high, float(block.max()))
        if not math.isfinite(block.sum(dtype=np.float64)):
            low = math.nan
            break
    is_float = images.dtype.kind == "f"
    if is_float and 0 <= low and high <= 1:
        return 0, 1
    if is_float and -1 <= low and high <= 1:
        return -1, 1
    if 0 <= low and high <= 255:
        return 0, 255
    raise NumdiffError(f"{images.name} in {str(path)!r} is {images.dtype} from {low:g} to {high:g}: bring it to "
                       "0 … 255, 0 … 1 or -1 … 1 first.")


def _array_labels(path, stream, count):
    """(classes, labels) of an array (N,), (N, 1) or one-hot (N, K)."""
    if not stream.shape or stream.shape[0] != count or len(stream.shape) > 2:
        raise NumdiffError(f"{stream.name} in {str(path)!r} has shape {stream.shape}, and there are {count} images: "
                           "save one label for each, or use --labels none.")
    values = np.concatenate(list(stream.blocks()))
    if values.ndim == 2 and values.shape[1] > 1:
        if not (np.isin(values, (0, 1)).all() and (values.sum(1) == 1).all()):
            raise NumdiffError(f"{stream.name} in {str(path)!r} is a table that is not one-hot: save one label for "
                               "each image, or use --labels none.")
        return [str(i) for i in range(values.shape[1])], values.argmax(1).tolist()
    return number_classes(values.reshape(-1).tolist())


# numdiff's own HDF5: to change size or channels -----------------------------------------------------------------------

def open_hdf5(path, labels):
    no_labels_file(path, labels)
    dataset = open_dataset(path)
    keep = dataset.labels is not None and labels != "none"
    blocks = (dataset.chunk(i) for i in range(-(-len(dataset) // CHUNK)))
    return Source("numdiff dataset", items_of(blocks, dataset.labels.tolist() if keep else None), len(dataset),
                  dataset.classes if keep else None, close=dataset.close)


def first_bytes(path, count=512):
    """(the first bytes of a file, the first bytes of what is in it if it is gzip, else None)."""
    with damage_named(path), open(path, "rb") as file:
        head = file.read(count)
    if head[:2] != b"\x1f\x8b":
        return head, None
    with damage_named(path), open_stream(path) as stream:
        return head, stream.read(count)
