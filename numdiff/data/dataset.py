"""A set of images in an HDF5 file, as training reads it.

THE FILE
    images   uint8 (N, H, W, C), pixels of 0 … 255, C = 1 (grey) or 3 (RGB); or a float type (N, H, W, C) with any C,
    such as latents, which the model sees as they are; best in chunks of 64 images
    labels   any integer type (N,), optional: an index into `classes`
    classes  attribute of the file, optional: the names of the classes, in the order of their labels
`numdiff data import` writes such files; so can any HDF5 library.

A set below two gigabytes is read into memory once. A larger one stays on disk: rows are read a
chunk at a time, and as many of the last chunks are kept as the loader's order (loader.py) returns
to (chunks.py). Either way threads do it.
"""

import importlib.resources
import math
import os
import shlex
import threading
import weakref
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing

from .. import extensions, schema
from ..errors import NumdiffError, UsageError, shown
from ..files import IrregularFile, Refused, open_regular
from ..hdf5 import is_hdf5, open_hdf5
from ..progress import tick
from ..sizes import as_size, in_pixels, is_multiple, scaled_down, sides
from .chunks import CHUNK, ChunkCache, in_threads
from .names import key, loose_key

IN_MEMORY_BYTES = 2 << 30  # below this, the images are held in memory as a whole
# images among which the loader shuffles freely; two windows are cached for a set on disk
WINDOW_BYTES = 256 << 20
MAX_IMAGE_BYTES = 16 << 20  # of one image, as stored in the file: 64 of them are read together
MAX_CLASSES = 1 << 20
CHANNELS = (1, 3)
NAMED = 12  # names of classes listed in a message


def default_path():
    """The path of emoji64.h5, which is installed with numdiff."""
    try:
        return str(importlib.resources.files("numdiff_data") / "emoji64.h5")
    except ModuleNotFoundError:
        raise NumdiffError(
            "the default dataset is not installed (there is no package numdiff_data): "
            "install numdiff again, or give a dataset file."
        ) from None


def open_dataset(
    path: str | os.PathLike | None = None,
    image_size: int | Sequence[int] | None = None,
    classes: Sequence[str] | None = None,
) -> "Dataset":
    """The dataset in the HDF5 file `path`, or of the pictures in a folder, which an extension decodes
    once into a file in the cache. None is the default dataset: 1,906 emoji of 64×64 pixels in 9
    classes.

    image_size: side of the images in pixels, or (height, width), to reduce those of a file. It must
    divide their size, because pixels are averaged over whole squares. The pictures of a folder are
    resized to any side. classes: the names of the classes to keep (labels are then renumbered, in
    the file's order); None keeps every image.
    """
    if isinstance(path, str | os.PathLike) and os.path.isdir(path):
        path = folders(path).decoded(path, image_size)
    return Dataset(default_path() if path is None else path, image_size, classes)


def folders(path):
    """The extension's module for a folder of pictures as a dataset."""
    return extensions.find("pictures", "folders", f"--data {os.fspath(path)}")


def class_names(path=None):
    """The names of the classes of what `open_dataset` takes, of which no image is read; none where
    it takes nothing."""
    try:
        if path is not None and os.path.isdir(path):
            return folders(path).class_names(path)
        with Dataset(path or default_path(), in_memory=False) as file:
            return file.classes
    except NumdiffError:  # which training will tell
        return []


class StoredImages(NamedTuple):
    """What a file's images are: their `size` in pixels (numdiff/sizes.py); `pixels`: uint8, which can
    be averaged over squares; else floats, such as latents, which have one size. labelled: whether
    each has a class."""

    size: int | tuple[int, int]
    pixels: bool
    labelled: bool


def stored_images(path: str | os.PathLike) -> StoredImages | None:
    """The `StoredImages` of a file; None: opening it as a dataset will say what is wrong."""
    try:
        file = _open_file(os.fspath(path))
        try:
            images = _check_images(os.fspath(path), file)
            size = as_size(images.shape[1:3])
            return StoredImages(size, images.dtype == np.uint8, file.array("labels") is not None)
        finally:
            file.close()
    except (NumdiffError, Refused):
        return None


def fitting_size(stored: StoredImages, largest: int) -> int | tuple[int, int] | None:
    """Size of the images to train on, in pixels, where none is given: the largest that the file
    allows with no side above `largest`. It divides the stored size, and its sides are multiples of
    8, as a model halves them. None: there is no such size."""
    if not stored.pixels:
        return stored.size
    sizes = (size for size in _reduced_sizes(stored.size) if is_multiple(size, 8))
    return next((size for size in sizes if max(sides(size)) <= largest), None)


def _reduced_sizes(size):
    """The sizes to which images can be averaged, from their own down."""
    return [scaled_down(size, n) for n in range(1, min(sides(size)) + 1) if is_multiple(size, n)]


class Dataset:
    """Images of one HDF5 file: `shape` (N, H, W, C), `dtype` uint8 (pixels) or float32 (as they
    are), `labels` int32 (N,) or None, `classes` a list of names."""

    shape: tuple[int, int, int, int]
    labels: np.ndarray | None
    classes: list[str]

    def __init__(
        self,
        path: str | os.PathLike,
        image_size: int | Sequence[int] | None = None,
        classes: Sequence[str] | None = None,
        in_memory: bool | None = None,
    ):
        """in_memory: whether the images are held in memory as a whole; None: if they have less than
        two gigabytes."""
        if not isinstance(path, str | os.PathLike):
            raise UsageError(f"a dataset is opened by its path, and not by {shown(path)}.")
        self.path = os.fspath(path)
        self._file, self._cache, self._lock = _open_file(self.path), None, threading.Lock()
        weakref.finalize(self, self._file.close)
        try:
            self._open(image_size, classes, in_memory)
        except Refused as error:
            self.close()
            raise _damaged(self.path, error) from None
        except BaseException:
            self.close()
            raise

    def _open(self, image_size, classes, in_memory):
        self._source = _check_images(self.path, self._file)
        self.labels, self.classes = _read_labels(self.path, self._file, len(self._source))
        self.dtype = np.dtype(np.uint8 if self._source.dtype == np.uint8 else np.float32)
        self._factor = _reduction(self.path, self._source, image_size)
        # rows of the file; None: all
        self._rows = None if classes is None else self._select(classes)
        count = len(self._source) if self._rows is None else len(self._rows)
        height, width = (n // self._factor for n in self._source.shape[1:3])
        self.shape = (count, height, width, self._source.shape[3])
        image_bytes = height * width * self.shape[3] * self.dtype.itemsize
        chunk_bytes = CHUNK * image_bytes
        self.window = max(4, WINDOW_BYTES // chunk_bytes)  # in chunks
        self.in_memory = count * image_bytes < IN_MEMORY_BYTES if in_memory is None else in_memory
        if self.in_memory:
            self._images = np.empty(self.shape, self.dtype)
            with in_threads(self._load_chunk) as load:
                for done in [
                    load(index, self._images[start : start + CHUNK])
                    for index, start in enumerate(range(0, count, CHUNK))
                ]:
                    done.result()  # the first error in the order of the file

    def __len__(self):
        return self.shape[0]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    @property
    def image_size(self) -> int | tuple[int, int]:
        """Side of the images, or their height and width."""
        return as_size(self.shape[1:3])

    @property
    def channels(self) -> int:
        return self.shape[3]

    @property
    def stored_dtype(self) -> np.dtype:
        """The dtype of the images in the file: latents of 16 bits are read as float32."""
        return np.dtype(self._source.dtype)

    @property
    def encoded_by(self) -> dict | None:
        """What `numdiff data encode` says of the autoencoder of these latents: "weights" (a hash),
        "scaling_factor", "shift_factor", "factor", "channels"; None for other files."""
        try:
            return schema.check(
                schema.parse_json(self._file.strings("vae")[0]), schema.options, "vae"
            )
        # there is no such attribute, or it is of another program
        except (Refused, TypeError, IndexError):
            return None

    @property
    def stored(self) -> str:
        """The images' layout in the file, in words."""
        return f"{self._source.dtype} {self._source.filters or 'not packed'}"

    def read(self, rows: np.typing.ArrayLike, out: np.ndarray | None = None) -> np.ndarray:
        """Images of the given rows, (n, H, W, C) of `dtype`; `out`, if given, is written and
        returned."""
        rows = _row_numbers(rows)
        if rows.size and not (0 <= rows.min() and rows.max() < len(self)):
            raise IndexError(f"row out of range: there are {len(self)} images")
        if out is None:
            out = np.empty((len(rows), *self.shape[1:]), self.dtype)
        if self.in_memory:
            # "raise" would write to a copy of `out`
            return np.take(self._images, rows, axis=0, out=out, mode="clip")
        return self._chunks().read(rows, out)

    def chunk(self, index: int) -> np.ndarray:
        """Rows 64·index to 64·(index+1); of a set in memory a view."""
        start, stop = index * CHUNK, min((index + 1) * CHUNK, len(self))
        return self._images[start:stop] if self.in_memory else self.read(np.arange(start, stop))

    def prefetch(self, index: int) -> None:
        """Begin to read a chunk that will be needed soon, unless it is in memory; returns at once."""
        if not self.in_memory:
            self._chunks().prefetch(index)

    def _chunks(self):
        with self._lock:  # the loader's thread and the caller may both be the first
            if self._cache is None:
                self._cache = ChunkCache(
                    2 * self.window + 2, self.shape, self.dtype, self._load_chunk
                )
            return self._cache

    def class_counts(self) -> np.ndarray:
        """How many images each class has, in the order of `classes`."""
        return np.bincount(self.labels, minlength=len(self.classes))

    def statistics(self) -> tuple[np.ndarray, np.ndarray]:
        """(mean, standard deviation) of each channel, in units of 0 to 255; of floats, in their
        own."""
        wide = np.int64 if self.dtype == np.uint8 else np.float64  # integer sums are exact
        total, squares = np.zeros(self.channels, wide), np.zeros(self.channels, wide)
        for index in range(-(-len(self) // CHUNK)):
            for image in self.chunk(index):
                pixels = image.reshape(-1, self.channels).astype(wide)
                total += pixels.sum(0)
                squares += (pixels * pixels).sum(0)
        count = len(self) * self.shape[1] * self.shape[2]
        mean = total / count
        return mean, np.sqrt(np.maximum(squares / count - mean * mean, 0))

    def close(self) -> None:
        if self._cache is not None:
            self._cache.close()
        self._file.close()

    def _load_chunk(self, index, out):
        """Chunk `index` of this dataset from the file into `out` (n, H, W, C), reduced to the size
        requested."""
        tick()
        start, stop = index * CHUNK, min((index + 1) * CHUNK, len(self))
        direct = self._source.dtype == self.dtype and self._factor == 1
        images = (
            out if direct else np.empty((stop - start, *self._source.shape[1:]), self._source.dtype)
        )
        try:
            self._read_rows(start, stop, images)
        except Refused as error:
            raise _damaged(self.path, error) from None
        if not direct:
            with np.errstate(over="ignore"):  # of a float64, which is then not finite
                out[...] = _average(images, self._factor)
        if self.dtype != np.uint8 and not np.isfinite(out).all():
            wrong = int(np.argmin(np.isfinite(out).all((1, 2, 3))))
            raise NumdiffError(
                f"image {start + wrong} of {self.path!r} holds values that are not finite: fix the "
                "file."
            )

    def _read_rows(self, start, stop, images):
        """Rows of this dataset as the file has them."""
        if self._rows is None:
            self._source.read(start, stop, images)
            return
        rows = self._rows[start:stop]
        if self._source.plain:
            for run in np.split(np.arange(len(rows)), np.flatnonzero(np.diff(rows) != 1) + 1):
                first, last = rows[run[0]], rows[run[-1]]
                self._source.read(first, last + 1, images[run[0] : run[-1] + 1])
            return
        # whole chunks, then the rows: faster than HDF5's selection
        for index in np.unique(rows // CHUNK):
            chosen = rows // CHUNK == index
            images[chosen] = self._source.read(index * CHUNK, (index + 1) * CHUNK)[
                rows[chosen] - index * CHUNK
            ]

    def _select(self, names):
        """Keep the images of the named classes; returns their rows."""
        if self.labels is None:
            raise UsageError(
                f"{self.path!r} has no labels, so no class can be chosen from it: leave the classes out."
            )
        given, names = (
            names,
            [names] if isinstance(names, str) or not isinstance(names, Iterable) else list(names),
        )
        if not all(isinstance(name, str) for name in names):
            raise UsageError(f"classes must be a list of names, and not {shown(given)}.")
        found, unknown = _indices(names, self.classes)
        if unknown is not None:
            raise UsageError(
                f"{self.path!r} has no class {unknown!r}: it has {_listed(self.classes)}."
            )
        chosen = np.array(sorted(set(found)), np.int64)
        rows = np.flatnonzero(np.isin(self.labels, chosen))
        if len(rows) == 0:
            raise UsageError(
                f"{self.path!r} has no image of {_listed(names)}: choose other classes."
            )
        self.labels = np.searchsorted(chosen, self.labels[rows]).astype(np.int32)
        self.classes = [self.classes[i] for i in chosen]
        return rows


def _row_numbers(given):
    """Row numbers as int64 (n,); a number that is none would be truncated, and a mask taken for
    rows 0 and 1."""
    try:
        rows = np.asarray(given)
    except ValueError:  # lists of several lengths
        rows = None
    if rows is None or rows.ndim != 1 or rows.size and rows.dtype.kind not in "iu":
        raise UsageError(f"rows must be a list of whole numbers, and not {shown(given)}.")
    return rows.astype(np.int64, copy=False)


def _open_file(path):
    if os.path.isdir(path):
        raise UsageError(
            f"{path!r} is a folder, not a dataset: run "
            f"`numdiff data import {shlex.quote(str(path))} OUT.h5` first."
        )
    try:
        if is_hdf5(path):
            return open_hdf5(path)
    except FileNotFoundError:
        raise UsageError(
            f"there is no dataset file {path!r}: check the path, or make one with "
            "`numdiff data import SOURCE OUT.h5`."
        ) from None
    except IrregularFile as error:
        raise UsageError(
            f"{path!r} cannot be a dataset, as {error.strerror}: give the path of a file."
        ) from None
    except OSError as error:
        raise NumdiffError(
            f"the dataset file {path!r} cannot be read ({error.strerror}): check its permissions."
        ) from None
    except Refused as error:
        raise _damaged(path, error) from None
    pictures = extensions.available("pictures").get("files")
    with open_regular(path) as file:
        head = file.read(16)
    single = pictures and pictures.looks_like_picture(os.path.basename(path), head)
    if single:
        folder = os.path.dirname(path) or "."
        raise UsageError(
            f"{path!r} is a single image: run `numdiff data import {shlex.quote(str(folder))} OUT.h5` on "
            "its folder, and use the file that this writes."
        )
    raise NumdiffError(
        f"{path!r} is not an HDF5 file: run `numdiff data import {shlex.quote(str(path))} OUT.h5` "
        "and use what that writes."
    )


def _check_images(path, file):
    """The dataset `images` of an open file, if it has the right form."""
    images = file.array("images")
    if images is None and "buffers" in file.names():  # of a checkpoint or a model file
        raise NumdiffError(
            f"{path!r} holds the weights of a model, and no images: give a file that "
            "`numdiff data import` wrote."
        )
    if images is None:
        raise NumdiffError(
            f"{path!r} has no dataset `images`: numdiff reads uint8 (N, H, W, C) by that name."
        )
    shape, wanted = images.shape, "numdiff reads uint8 (N, H, W, C), or floats as they are"
    if images.dtype != np.uint8 and images.dtype.kind != "f":
        raise NumdiffError(
            f"`images` in {path!r} is {images.dtype}: {wanted}, so convert pixels to 0 … 255 first."
        )
    floats = images.dtype != np.uint8
    if len(shape) == 4 and (
        shape[1] < shape[2] == shape[3]
        if floats
        else shape[1] in CHANNELS and shape[3] not in CHANNELS
    ):
        raise NumdiffError(
            f"`images` in {path!r} has shape {shape}, which looks like (N, C, H, W): {wanted}, "
            "so move the channels to the end."
        )
    if len(shape) != 4 or 0 in shape[1:] or (not floats and shape[3] not in CHANNELS):
        raise NumdiffError(
            f"`images` in {path!r} has shape {shape}: {wanted} with 1 or 3 channels."
        )
    if shape[0] == 0:
        raise NumdiffError(f"{path!r} holds no images: import it again.")
    if math.prod(shape[1:]) * images.dtype.itemsize > MAX_IMAGE_BYTES:
        raise NumdiffError(
            f"the images of {path!r} are {'×'.join(map(str, shape[1:]))} {images.dtype}, and an image "
            f"has at most {MAX_IMAGE_BYTES >> 20} MiB: import them again with --size."
        )
    return images


def _read_labels(path, file, count):
    """(labels int32 (N,), names of the classes), or (None, []) for a set without labels."""
    labels = file.array("labels")
    if labels is None:
        return None, []
    if labels.shape != (count,) or labels.dtype.kind not in "iu":
        raise NumdiffError(
            f"`labels` in {path!r} is {labels.dtype} {labels.shape}: it must be one integer for each of "
            f"the {count} images."
        )
    labels, names = labels.all(), file.strings("classes")
    if names is None:
        if labels.max() >= MAX_CLASSES:
            raise NumdiffError(
                f"`labels` in {path!r} go up to {labels.max()}, and there are at most {MAX_CLASSES:,} "
                "classes: number them from 0."
            )
        names = [str(i) for i in range(int(labels.max()) + 1)]
    wrong = (labels < 0) | (labels >= len(names))
    if wrong.any():
        row = int(np.argmax(wrong))
        raise NumdiffError(
            f"label {labels[row]} of image {row} in {path!r} is out of range: "
            f"there are {len(names)} classes, counted from 0."
        )
    return labels.astype(np.int32), names


def _reduction(path, images, image_size):
    """The integer by which the images' sides are divided to reach `image_size`."""
    if image_size is None:
        return 1
    wanted, own = as_size(image_size), as_size(images.shape[1:3])
    if wanted == own:
        return 1
    if images.dtype != np.uint8:
        raise UsageError(
            f"the images of {path!r} are {images.dtype} of {in_pixels(own)} and are used as they are: use "
            f"image size {own}."
        )
    sizes = _reduced_sizes(own)
    if wanted not in sizes:
        fitting = ", ".join(str(size) for size in sizes if min(sides(size)) >= 8) or str(own)
        raise UsageError(
            f"image size {wanted} does not divide the {own} pixels of {path!r}: use one of {fitting}, or "
            "import the images again with --size."
        )
    return sides(own)[0] // sides(wanted)[0]


def _average(images, factor):
    """Mean over squares of factor × factor pixels, rounded to the nearest integer (halves up)."""
    if factor == 1:
        return images
    n, height, width, channels = images.shape
    # whole rows, then pixels
    rows = images.reshape(n, height // factor, factor, width * channels).sum(2, np.uint32)
    squares = np.einsum(
        "nhwfc->nhwc", rows.reshape(n, height // factor, width // factor, factor, channels)
    )
    return ((squares + factor * factor // 2) // (factor * factor)).astype(np.uint8)


def _indices(names, classes):
    """(indices of the classes that are named, None), or (None, the first name that is of none).

    A name in any case will do, where it is that of one class. One with commas may have been cut at
    them, as where a list was: then it is put together again, unless its parts are classes, too.
    """
    forms = [
        {name: i for i, name in reversed(list(enumerate(classes)))},
        *(_unique(classes, f) for f in (key, _loose)),
    ]
    commas, ways, furthest = (
        max((name.count(",") for name in classes), default=0),
        [[], *[None] * len(names)],
        0,
    )
    for start in range(len(names)):  # ways[n]: the classes that the first n names are
        for stop in range(start + 1, min(start + 1 + commas, len(names)) + 1):
            name = ",".join(names[start:stop])
            index = next(
                (
                    form[text]
                    for form, text in zip(forms, (name, key(name), _loose(name)), strict=True)
                    if text in form
                ),
                None,
            )
            if (
                ways[start] is not None
                and index is not None
                and (ways[stop] is None or stop == start + 1)
            ):
                ways[stop], furthest = [*ways[start], index], max(furthest, stop)
    return (ways[-1], None) if ways[-1] is not None else (None, names[furthest])


def _unique(classes, form):
    """{form(name): index} of the classes that no other one is taken for."""
    found = {}
    for i, name in enumerate(classes):
        found.setdefault(form(name), []).append(i)
    return {
        text: indices[0]
        for text, indices in found.items()
        if len({classes[i] for i in indices}) == 1
    }


def _loose(name):
    """A name in any case, without the spaces around its commas, which a list on the command line
    loses."""
    return ",".join(map(loose_key, name.split(",")))


def _listed(names):
    """The names as part of a sentence; only the first ones of a long list."""
    names = [repr(name) for name in names]
    rest = len(names) - NAMED
    return ", ".join(names[:NAMED]) + (f" and {rest} more" if rest > 0 else "")


def _damaged(path, error):
    """The error for a `Refused`."""
    if "truncated" in str(error):
        return NumdiffError(f"{path!r} is truncated: copy or import it again.")
    return NumdiffError(
        f"{path!r} is damaged or not a plain dataset ({error}): copy or import it again."
    )
