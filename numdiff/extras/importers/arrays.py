"""Images that come as one array: .npz and .npy, and numdiff's own HDF5.

Arrays of integers are pixels. Arrays of floats are pixels or latents: see `_range_of`.
"""

import contextlib
import math
import os

import numpy as np

from ...data.dataset import CHUNK, open_dataset
from ...errors import NumdiffError, UsageError
from .archives import ZipReader, read_npy, read_npy_header
from .classes import IN_NUMERIC_ORDER, IN_THE_FILES_ORDER, WHOLE, check_names, number_classes
from .source import (
    BLOCK_BYTES,
    MAXIMUM_CLASSES,
    MAXIMUM_IMAGE_BYTES,
    MAXIMUM_IMAGES,
    Item,
    Source,
    damage_named,
    damaged,
    no_labels_file,
    open_stream,
    read_exactly,
)

MAXIMUM_LATENT_BYTES = 1 << 22  # of one: 256×256×16, 64 of which are stored together
MAXIMUM_COLUMNS_FIRST = 1 << 30  # bytes of an array that must be read as a whole
MAXIMUM_NAMES_BYTES = 64 << 20  # of the names of the classes
# arr_0/arr_1 as guided-diffusion writes, x_train as Keras
NPZ_IMAGES = ("images", "arr_0", "x_train", "x", "data")
NPZ_LABELS = ("labels", "arr_1", "y_train", "y", "targets")


def items_of(blocks, labels):
    """Items of an iterator over blocks (n, H, W, C), counted on from one block to the next."""
    i = 0
    for block in blocks:
        for image in block:
            yield Item(
                f"image {i}",
                lambda wanted, image=image: contextlib.nullcontext(image),
                None if labels is None else int(labels[i]),
            )
            i += 1


def rows_per_block(row_bytes):
    return max(1, BLOCK_BYTES // max(1, row_bytes))


def checked_size(count, shape, itemsize, path):
    """Bytes of one image of this shape; refuses values that only a damaged header can have."""
    nbytes = math.prod(shape) * itemsize
    if count < 0 or min(shape) < 1 or nbytes > MAXIMUM_IMAGE_BYTES:
        raise damaged(path, f"its header speaks of {count} images of {'×'.join(map(str, shape))}")
    if count == 0:
        raise NumdiffError(f"{str(path)!r} holds no images: check the path.")
    if count > MAXIMUM_IMAGES:
        raise NumdiffError(
            f"{str(path)!r} holds {count:,} images, more than the {MAXIMUM_IMAGES:,} that are read: "
            "split it."
        )
    return nbytes


def to_bytes(values, low, high):
    """Values in [low, high] as uint8, rounded to the nearest."""
    values = values.astype(np.float32)
    values -= low
    values *= 255 / (high - low)
    return np.clip(np.rint(values, out=values), 0, 255, out=values).astype(np.uint8)


# NumPy: .npz and .npy -----------------------------------------------------------------------------


class NpyStream:
    """One array of a .npy or of an .npz: its header at once, its rows in blocks. Executes no
    pickle.

    opener() opens the stream again; size: bytes of the .npy as it says itself or, in an .npz, the
    zip
    """

    def __init__(self, path, name, opener, size):
        self.path, self.name, self.opener = path, name, opener
        with damage_named(path), opener() as stream:
            self.shape, self.fortran, self.dtype, self.header_bytes = read_npy_header(stream)
        if self.dtype.hasobject:
            raise NumdiffError(
                f"{name} in {str(path)!r} holds Python objects, which are a pickle, and numdiff "
                "executes none: save it as an array of numbers."
            )
        if self.dtype.kind not in "buif":
            raise NumdiffError(
                f"{name} in {str(path)!r} is {self.dtype}: save it as an array of numbers."
            )
        nbytes = math.prod(self.shape) * self.dtype.itemsize
        if self.header_bytes + nbytes > size:
            raise damaged(
                path, f"{name} ends before the {nbytes:,} bytes that its header announces"
            )
        if self.fortran and nbytes > MAXIMUM_COLUMNS_FIRST:
            raise NumdiffError(
                f"{name} in {str(path)!r} is in column-major order, and its {nbytes:,} bytes would have "
                "to be read as a whole: save it through np.ascontiguousarray."
            )

    def blocks(self):
        """Arrays of consecutive rows."""
        row = math.prod(self.shape[1:]) * self.dtype.itemsize
        if row > MAXIMUM_IMAGE_BYTES:
            raise damaged(self.path, f"{self.name} has shape {self.shape}")
        with damage_named(self.path), self.opener() as stream:
            stream.read(self.header_bytes)
            if self.fortran:  # column-major: no row is complete before all is read
                data = np.frombuffer(
                    read_exactly(stream, row * self.shape[0], self.path), self.dtype
                )
                data = data.reshape(self.shape, order="F")
                for start in range(0, self.shape[0], rows_per_block(row)):
                    yield data[start : start + rows_per_block(row)]
                return
            for start in range(0, self.shape[0], rows_per_block(row)):
                n = min(rows_per_block(row), self.shape[0] - start)
                data = read_exactly(stream, n * row, self.path)
                yield np.frombuffer(data, self.dtype).reshape(n, *self.shape[1:])


class Hdf5Stream:
    """The images of a dataset file, as those of an `NpyStream`."""

    def __init__(self, path, dataset):
        self.path, self.name, self.dtype, self.dataset = path, "`images`", dataset.dtype, dataset

    def blocks(self):
        return (self.dataset.chunk(i) for i in range(-(-len(self.dataset) // CHUNK)))


def open_npy(path, labels, latents=None):
    stream = NpyStream(path, "the array", lambda: open(path, "rb"), os.path.getsize(path))
    return _array_source(path, "NumPy array", stream, None, labels, latents)


def open_npz(path, labels, latents=None):
    with damage_named(path):
        archive = ZipReader(path)
    try:
        members = {
            member.filename[:-4]: member
            for member in archive.members
            if member.filename.endswith(".npy")
        }
        images = next((key for key in NPZ_IMAGES if key in members), None)
        if images is None and len(members) == 1:
            images = next(iter(members))
        if images is None:
            found = ", ".join(sorted(members)[:8])[:200]
            raise NumdiffError(
                f"{str(path)!r} has no array `images` or `arr_0` (it has {found}): "
                "save the images under one of these names."
            )
        label_file = next((key for key in NPZ_LABELS if key in members), None)
        streams = [
            NpyStream(
                path, f"`{key}`", lambda key=key: archive.open(members[key]), members[key].file_size
            )
            if key
            else None
            for key in (images, label_file)
        ]
        names = None
        if "classes" in members and label_file and labels != "none":
            with damage_named(path), archive.open(members["classes"]) as stream:
                names = read_npy(stream, members["classes"].file_size, MAXIMUM_NAMES_BYTES)
        return _array_source(path, ".npz file", *streams, labels, latents, names, archive.close)
    except BaseException:
        archive.close()
        raise


def _array_source(
    path, kind, images, labels_stream, labels, latents, names=None, close=lambda: None
):
    no_labels_file(path, labels)
    shape, floats = images.shape, images.dtype.kind == "f"
    if len(shape) not in (3, 4):
        raise not_images(images, path)
    channels_first = len(shape) == 4 and (
        shape[1] in (1, 3, 4)
        and shape[3] not in (1, 2, 3, 4)
        or floats
        and shape[1] != shape[2] == shape[3]
    )
    channels = 1 if len(shape) == 3 else shape[1] if channels_first else shape[-1]
    if not (channels in (1, 2, 3, 4) or floats and latents is not False):
        raise not_images(images, path)
    if channels == 2 and not floats:
        raise NumdiffError(
            f"{images.name} in {str(path)!r} has shape {shape}, whose 2 channels may be grey and alpha "
            "or two of anything: save it as grey, (N, H, W, 1), or as RGBA, (N, H, W, 4)."
        )
    checked_size(shape[0], shape[1:], images.dtype.itemsize, path)
    notes = (
        ["The channels came before height and width, and were moved to the end."]
        if channels_first
        else []
    )
    scale, note = _range_of(path, images, channels, latents)
    notes += [note] if note else []
    dtype = np.float16 if images.dtype == np.float16 else np.float32
    if scale is None:
        _checked_latent(path, shape, images.dtype.itemsize)
    classes, numbers, order = None, None, ""
    if labels_stream is not None and labels != "none":
        classes, numbers, order, more = _array_labels(path, labels_stream, shape[0])
        if names is not None:
            (classes, numbers), order, more = (
                _named(path, classes, numbers, names),
                IN_THE_FILES_ORDER,
                [],
            )
        notes += more

    def blocks():
        for block in images.blocks():
            block = (
                block.transpose(0, 2, 3, 1)
                if channels_first
                else block[..., None]
                if block.ndim == 3
                else block
            )
            if scale is None:
                with np.errstate(over="ignore"):  # which is reported as a value that is not finite
                    yield np.ascontiguousarray(block, dtype)
            else:
                yield block if block.dtype == np.uint8 else to_bytes(block, *scale)

    return Source(
        kind,
        items_of(blocks(), numbers),
        shape[0],
        classes,
        order,
        latents=scale is None,
        floats=floats,
        notes=notes,
        close=close,
    )


def not_images(images, path):
    return NumdiffError(
        f"{images.name} in {str(path)!r} has shape {images.shape}, and images are (N, H, W, C) or "
        "(N, H, W), of 1 to 4 channels: save it in that form."
    )


def _range_of(path, images, channels, latents):
    """((value of black, value of white), note), or (None, note) if the floats are latents, to be
    used as they are. latents: True, False, or None to decide. The meaning of 8-bit and 16-bit
    integers is known. Floats in 0 … 1, -1 … 1 and 0 … 255 are pixels. Otherwise, arrays with
    negative values and neither 1 nor 3 channels are latents, as are all with more than 4 channels.
    With 1 or 3 channels they may be badly scaled pixels, so the user must decide; 2 channels may
    also be grey and alpha.
    """
    floats = images.dtype.kind == "f"
    if latents and not floats:
        raise UsageError(
            f"{images.name} in {str(path)!r} is {images.dtype}, and latents are floats: leave --latents "
            "out."
        )
    known = {
        np.dtype(np.uint8): (0, 255),
        np.dtype(np.uint16): (0, 65535),
        np.dtype(np.bool_): (0, 1),
    }
    if images.dtype.newbyteorder("=") in known:
        return known[images.dtype.newbyteorder("=")], None
    low, high = math.inf, -math.inf
    for block in images.blocks():
        low, high = min(low, float(block.min())), max(high, float(block.max()))
        if not math.isfinite(block.sum(dtype=np.float64)):
            raise NumdiffError(
                f"{images.name} in {str(path)!r} holds values that are not finite: fix the file."
            )
    found = f"{images.name} in {str(path)!r} is {images.dtype} from {low:g} to {high:g}"
    scale = next(
        (
            scale
            for scale in ((0, 1), (-1, 1), (0, 255))
            if scale[0] <= low and high <= scale[1] and (floats or scale == (0, 255))
        ),
        None,
    )
    unsure = scale is not None and channels == 2 or scale == (-1, 1) and channels == 4
    if latents is None and floats:
        latents = channels > 4 or (scale is None and channels in (2, 4) and low < 0)
        if unsure:
            raise UsageError(
                f"{found} with {channels} channels, which may be pixels with alpha or latents: add "
                "--pixels or --latents."
            )
    if latents:
        return None, (
            f"Taken as latents, neither scaled nor resized: {images.dtype} of {channels} channels from "
            f"{low:g} to {high:g}."
        )
    if scale is None:
        more = ", or add --latents if they are latents" if floats else ""
        raise UsageError(f"{found}: bring it to 0 … 255{', 0 … 1 or -1 … 1' * floats} first{more}.")
    return scale, (
        f"Taken as pixels, {scale[0]} black and {scale[1]} white: {images.dtype} from {low:g} to {high:g}."
        if floats
        else None
    )


def _array_labels(path, stream, count):
    """(classes, labels, order in words, notes) of an array (N,), (N, 1) or one-hot (N, K)."""
    if not stream.shape or stream.shape[0] != count or len(stream.shape) > 2:
        raise NumdiffError(
            f"{stream.name} in {str(path)!r} has shape {stream.shape}, and there are {count} images: "
            "save one label for each, or use --labels none."
        )
    columns = stream.shape[1] if len(stream.shape) == 2 else 1
    if columns > MAXIMUM_CLASSES or not columns:
        raise damaged(path, f"{stream.name} has shape {stream.shape}")
    if columns > 1:
        labels = np.empty(count, np.int32)
        done = 0
        for block in stream.blocks():
            if not (np.isin(block, (0, 1)).all() and (block.sum(1) == 1).all()):
                raise NumdiffError(
                    f"{stream.name} in {str(path)!r} is a table that is not one-hot: save one label for "
                    "each image, or use --labels none."
                )
            labels[done : done + len(block)] = block.argmax(1)
            done += len(block)
        return [str(i) for i in range(columns)], labels, IN_NUMERIC_ORDER, []
    return number_labels(np.concatenate([block.reshape(-1) for block in stream.blocks()]))


def number_labels(values):
    """`number_classes` of an array of numbers: (classes, labels as an array, order in words,
    notes)."""
    if values.dtype.kind not in "iuf":
        raise UsageError(
            f"a label is {values[0]}, and a label must be a word or a number: fix the labels."
        )
    distinct, labels = np.unique(values, return_inverse=True)  # its last may be NaN, more than once
    if len(distinct) > MAXIMUM_CLASSES:
        raise UsageError(
            f"there are {len(distinct):,} different labels, more than {MAXIMUM_CLASSES:,} classes: check "
            "them, or add --labels none."
        )
    narrow = values.dtype.kind == "f" and values.dtype.itemsize < 8
    found = number_classes(
        [float(str(value)) for value in distinct] if narrow else distinct.tolist()
    )
    return found.classes, np.array(found.numbers, np.int32)[labels], found.order, found.notes


def _named(path, classes, numbers, names):
    """(classes, labels) with the names that the file itself gives to the labels 0 … K-1."""
    values = np.array(
        [int(word) if WHOLE.fullmatch(word) and len(word) < 19 else -1 for word in classes]
    )
    if (
        names.ndim != 1
        or names.dtype.kind not in "US"
        or values.min() < 0
        or values.max() >= len(names)
    ):
        raise NumdiffError(
            f"`classes` in {str(path)!r} is {names.dtype} {names.shape}, and must be one name for each "
            f"label from 0 to {values.max()}: fix it, or use --labels none."
        )
    names = [
        name.decode("utf-8", "replace") if isinstance(name, bytes) else name
        for name in names.tolist()
    ]
    # half a surrogate pair
    names = [name.encode("utf-8", "backslashreplace").decode() for name in names]
    return check_names(names, f"`classes` in {str(path)!r}"), values[numbers]


# numdiff's own HDF5: to change size or channels ---------------------------------------------------


def open_hdf5(path, labels, latents=None):
    no_labels_file(path, labels)
    dataset = open_dataset(path)
    try:
        if dataset.dtype != np.uint8 and latents is not False:
            scale, note = None, "Floats of a dataset are latents: neither scaled nor resized."
            _checked_latent(path, dataset.shape, dataset.dtype.itemsize)
        else:
            scale, note = _range_of(path, Hdf5Stream(path, dataset), dataset.channels, latents)
    except BaseException:
        dataset.close()
        raise
    keep = dataset.labels is not None and labels != "none"
    blocks = (dataset.chunk(i) for i in range(-(-len(dataset) // CHUNK)))
    if dataset.dtype != np.uint8 and scale is not None:
        blocks = (to_bytes(block, *scale) for block in blocks)
    return Source(
        "numdiff dataset",
        items_of(blocks, dataset.labels if keep else None),
        len(dataset),
        dataset.classes if keep else None,
        latents=scale is None,
        floats=dataset.dtype != np.uint8,
        notes=[note] if note else [],
        close=dataset.close,
    )


def _checked_latent(path, shape, itemsize):
    if math.prod(shape[1:]) * itemsize > MAXIMUM_LATENT_BYTES:
        raise NumdiffError(
            f"`images` in {str(path)!r} has shape {shape}, and a latent has at most "
            f"{MAXIMUM_LATENT_BYTES:,} bytes: check it."
        )


def first_bytes(path, count=512):
    """(the first bytes of a file, the first bytes of what is in it if it is gzip, else None)."""
    with damage_named(path), open(path, "rb") as file:
        head = file.read(count)
    if head[:2] != b"\x1f\x8b":
        return head, None
    with damage_named(path), open_stream(path) as stream:
        return head, stream.read(count)
