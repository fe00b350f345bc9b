"""The two sides of a comparison: images, their features or their statistics, from files of numdiff
and of other programs.

    images       an npz with arr_0 uint8 (N, H, W, 1 or 3), as `numdiff sample --npz` and guided-diffusion write it;
                 a folder of pictures, its sub-folders included; a dataset of `numdiff data import` (.h5)
    features     an npz with features (N, D), and spatial (N, S) if there are any; arr_0 (N, D) of a float type; a .npy
    statistics   an npz with mu (D,) and sigma (D, D), as EDM writes it, and also mu_s, sigma_s for spatial features, as
                 guided-diffusion writes it; numdiff writes all that it has, and both can read it
An npz may hold more than one of these; as in guided-diffusion, statistics are preferred to features
and these to images. Files of numdiff also say how they were made, in a text named `numdiff`: with
features and statistics stand the extractor, and the count, size and classes of the images. Pickled
arrays are refused.
"""

import contextlib
import io
import json
import math
import os
import pathlib
import shlex
import sys
import zipfile
from dataclasses import dataclass, field

import numpy as np

from ... import schema
from ...data.dataset import Dataset
from ...errors import NumdiffError, UsageError
from ...evaluation.frechet import mean_and_covariance
from ...files import Refused, atomic_file, open_regular
from ...hdf5 import open_hdf5
from ...outputs import RUN
from ...training.picture_record import COUNTS
from ..importers.archives import BadArchive, ZipReader, read_npy, read_npy_header
from ..importers.pictures import Unreadable, flatten, open_picture

PICTURES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif")
PICKLES = (".pkl", ".pickle")
DATASETS = (".h5", ".hdf5")
WEIGHTS = (".safetensors", ".pt", ".pth", ".ckpt")
SPARE_BYTES = 64 << 20  # that an npz may take in memory beyond four times its size
MAX_PIXELS = 1 << 22  # of an image
LARGEST = 1e100  # of statistics, so that their products are numbers, too
MAX_BATCH_BYTES = 256 << 20  # of images
MAX_DIMENSIONS = 1 << 13  # of statistics, whose covariance then has half a gigabyte
NUMBER, TEXT = schema.optional(schema.number()), schema.optional(schema.text())
RECORD = schema.record(
    {},
    {
        "count": schema.optional(schema.integer(0)),
        "image_size": schema.items(schema.integer(1, MAX_PIXELS), 2, 2),
        "classes": schema.optional(schema.items(schema.text(1 << 16), 1 << 20)),
        "extractor": TEXT,
        "sampler": TEXT,
        "steps": NUMBER,
        "seed": NUMBER,
        "cfg_scale": NUMBER,
        "weights": TEXT,
        "model": schema.optional(schema.text(1 << 12)),
        "training_steps": NUMBER,
        "model_hash": TEXT,
        "class_counts": COUNTS,
        "diffusion": schema.optional(schema.options),
        "numdiff": TEXT,
    },
    schema.anything,
)


@dataclass
class Images:
    """Images that are read a batch at a time: uint8, brought to three channels."""

    path: str
    count: int
    size: tuple  # height, width
    # function(batch, start, stop) -> iterator of uint8 (b, H, W, C), the images start ≤ i < stop
    read: object
    record: dict = field(default_factory=dict)  # how they were made, if the file says so
    note: str = ""  # what was done to them on reading
    dataset: bool = False
    most: int = sys.maxsize  # images of a batch that memory allows

    @property
    def image_size(self):
        return self.size

    def share(self, batch, rank, ranks):
        """(first, last + 1) of the images of a rank: as many whole batches as the others, or one
        more."""
        batch = min(batch, self.most)
        whole = -(-self.count // batch)
        return [min(self.count, whole * r // ranks * batch) for r in (rank, rank + 1)]

    def batches(self, batch, start=0, stop=None):
        """Yields the images start … stop - 1, uint8 (b, H, W, 3)."""
        stop = self.count if stop is None else stop
        for images in self.read(min(batch, self.most), start, stop):
            yield images if images.shape[-1] == 3 else np.repeat(images, 3, axis=-1)


@dataclass
class Features:
    """Features of images; `statistics` follow from them."""

    path: str
    features: np.ndarray  # (N, D)
    spatial: np.ndarray = None  # (N, S)
    record: dict = field(default_factory=dict)

    @property
    def count(self):
        return len(self.features)

    @property
    def image_size(self):
        return _recorded_size(self.record)

    def statistics(self):
        if self.count < 2:
            raise UsageError(f"{self.path} holds one image, and statistics need at least two.")
        spatial = (None, None) if self.spatial is None else mean_and_covariance(self.spatial)
        return Statistics(
            self.path, *mean_and_covariance(self.features), *spatial, self.record, self.count
        )


@dataclass
class Statistics:
    """Mean and covariance of features, and of spatial features if there are any."""

    path: str
    mu: np.ndarray
    sigma: np.ndarray
    mu_s: np.ndarray = None
    sigma_s: np.ndarray = None
    record: dict = field(default_factory=dict)
    count: int = None  # None: the file does not say

    @property
    def image_size(self):
        return _recorded_size(self.record)

    def statistics(self):
        return self


def _recorded_size(record):
    """(height, width) of the images that features are of; None if the file does not say."""
    return tuple(record["image_size"]) if "image_size" in record else None


# Reading ------------------------------------------------------------------------------------------


def open_source(path, classes=None, size=None):
    """The `Images`, `Features` or `Statistics` in a file or folder.

    classes: names, of a dataset, to keep; size: (height, width) to which a dataset's images are
    averaged down
    """
    path = pathlib.Path(path)
    _refuse_model(path)
    if path.suffix in DATASETS:
        return _dataset(path, classes, size)
    if classes:
        raise UsageError(
            f"{path} is not a dataset (.h5), and only a dataset has classes: leave --classes out."
        )
    if path.is_dir():
        return _folder(path)
    if not path.exists():
        raise UsageError(f"{path} does not exist: give an npz, a folder of pictures or a dataset.")
    if path.suffix in PICKLES:
        raise UsageError(_pickle_refused(path))
    if path.suffix not in (".npy", ".npz"):
        raise UsageError(
            f"{path} is not an npz, npy, dataset (.h5) or folder of pictures: give one of these."
        )
    with _damage_named(path):
        if path.suffix == ".npz":
            with _Npz(path) as file:
                return _npz(path, file)
        with open_regular(path) as raw, io.BufferedReader(raw) as file:
            size = os.fstat(file.fileno()).st_size
            return Features(str(path), _check_features(path, read_npy(file, size, size)))


def _refuse_model(path):
    """Raise a `UsageError` for a model's run or weights: images made with it are what is meant."""
    if (
        (path / RUN).is_file()
        or path.is_file()
        and (path.suffix.lower() in WEIGHTS or _holds_weights(path))
    ):
        raise UsageError(
            f"{path} is a model, and images are compared: make some with `numdiff sample "
            f"{shlex.quote(str(path))} --npz samples.npz`, and give that file."
        )


def _holds_weights(path):
    if path.suffix in DATASETS:
        with contextlib.suppress(OSError, Refused), open_hdf5(path) as file:
            return "buffers" in file.names()
    return False


class _Npz:
    """The arrays of an npz; in all at most four times the file's size and a fixed allowance are
    read into memory."""

    def __init__(self, path):
        self._path, self._zip = path, ZipReader(path)
        self._members = {
            m.filename.removesuffix(".npy"): m
            for m in self._zip.members
            if m.filename.endswith(".npy")
        }
        self._left = 4 * os.path.getsize(path) + SPARE_BYTES
        self.names = self._members.keys()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._zip.close()

    def open(self, name):
        """A stream of an array's file."""
        return self._zip.open(self._members[name])

    def read(self, name):
        """An array."""
        with self.open(name) as stream:
            array = read_npy(stream, self._members[name].file_size, self._left)
        self._left -= array.nbytes
        return array

    def header(self, name):
        """(shape, dtype, whether in column-major order) of an array whose values are complete."""
        with self.open(name) as stream:
            shape, fortran, dtype, length = read_npy_header(stream)
        announced, there = math.prod(shape) * dtype.itemsize, self._members[name].file_size - length
        if announced > there:
            raise NumdiffError(f"{self._path} is truncated: copy it again, or make it again.")
        if announced < there:
            raise BadArchive(f"{name} announces {dtype} {shape}, which is not what it holds")
        return shape, dtype, fortran


def _pickle_refused(path):
    """Why EDM2's statistics, a dict of "mu" and "sigma" for each kind of features, are not read,
    and what to do."""
    return (
        f"{path} is a pickle, which may run code, so it is not opened; if you trust it, convert it to an npz in "
        f"Python with: import numpy, pathlib, pickle; "
        f"s = pickle.loads(pathlib.Path({str(path)!r}).read_bytes()); s = s.get('fid', s); "
        f"numpy.savez({str(path.with_suffix('.npz'))!r}, mu=s['mu'], sigma=s['sigma'])"
    )


def _npz(path, file):
    names = file.names
    record = _record(file) if "numdiff" in names else {}
    if {"mu", "sigma"} <= names:
        return _statistics(path, file, names, record)
    if "features" in names:
        spatial = _check_features(path, file.read("spatial")) if "spatial" in names else None
        features = _check_features(path, file.read("features"))
        if spatial is not None and len(spatial) != len(features):
            raise NumdiffError(
                f"{path} has {len(features)} features and {len(spatial)} spatial ones: write it again."
            )
        return Features(str(path), features, spatial, record)
    if "arr_0" not in names:
        raise NumdiffError(
            f"{path} holds {', '.join(sorted(names)[:5])[:200] or 'nothing'}: numdiff looks for arr_0 "
            "(images), features, or mu and sigma."
        )
    shape, dtype, fortran = file.header("arr_0")
    if len(shape) == 2 and dtype.kind == "f":
        return Features(str(path), _check_features(path, file.read("arr_0")), None, record)
    if dtype != np.uint8 or len(shape) != 4 or shape[3] not in (1, 3) or 0 in shape or fortran:
        raise NumdiffError(
            f"arr_0 in {path} is {dtype} {shape}, and images are uint8 (N, H, W, 3), row by row: "
            f"{'decode the latents first' if dtype.kind == 'f' else 'write it again'}."
        )
    if shape[1] * shape[2] > MAX_PIXELS:
        raise NumdiffError(
            f"the images of {path} are {shape[1]}×{shape[2]}, and at most {MAX_PIXELS:,} pixels are "
            "supported: make them smaller."
        )
    return Images(
        str(path),
        shape[0],
        shape[1:3],
        lambda *which: _npz_batches(path, shape, *which),
        record,
        most=max(1, MAX_BATCH_BYTES // math.prod(shape[1:])),
    )


def _npz_batches(path, shape, batch, start, stop):
    """Images start … stop - 1 of an npz, a batch in memory at a time."""
    row_bytes = math.prod(shape[1:])
    with _damage_named(path), _Npz(path) as file, file.open("arr_0") as member:
        read_npy_header(member)
        for first in range(0, stop, batch):  # what is before `start` can only be read over
            count = min(batch, stop - first)
            data = member.read(count * row_bytes)
            if len(data) < count * row_bytes:
                raise NumdiffError(f"{path} is truncated: copy it, or sample again.")
            if first < start:
                continue
            yield np.frombuffer(data, np.uint8).reshape(count, *shape[1:])


def _record(file):
    """The record in a file of numdiff of how it was made."""
    text = file.read("numdiff")
    if text.dtype.kind != "U" or text.size != 1:
        raise Refused("its text `numdiff` is damaged")
    try:
        return schema.check(schema.parse_json(str(text.reshape(()))), RECORD, "it")
    except schema.Mismatch as error:
        raise Refused(f"its text `numdiff` is damaged: {error}") from None


def _statistics(path, file, names, record):
    arrays = {}
    for mu, sigma in (("mu", "sigma"), ("mu_s", "sigma_s")):
        if (mu in names) != (sigma in names):
            raise NumdiffError(
                f"{path} has one of {mu} and {sigma} without the other: write it again."
            )
        if mu not in names:
            continue
        shapes = [file.header(name)[0] for name in (mu, sigma)]
        if (
            len(shapes[0]) != 1
            or shapes[1] != 2 * shapes[0]
            or not 0 < shapes[0][0] <= MAX_DIMENSIONS
        ):
            raise NumdiffError(
                f"{path} has {mu} {shapes[0]} and {sigma} {shapes[1]}, and a mean (D,) belongs to a "
                f"covariance (D, D), D at most {MAX_DIMENSIONS:,}: write it again."
            )
        for name in (mu, sigma):
            array = file.read(name)
            if array.dtype.kind not in "fiu":
                raise NumdiffError(
                    f"{name} in {path} is {array.dtype}, and statistics are numbers: write it again."
                )
            arrays[name] = np.asarray(array, np.float64)
    if not all(np.isfinite(a).all() and float(np.abs(a).max()) <= LARGEST for a in arrays.values()):
        raise NumdiffError(f"{path} holds values that are not finite: write it again.")
    return Statistics(str(path), **arrays, record=record, count=record.get("count"))


def _folder(path):
    files = sorted(
        p
        for p in path.rglob("*")
        if p.suffix.lower() in PICTURES
        and p.is_file()
        and not any(part.startswith(".") for part in p.relative_to(path).parts)
    )
    if not files:
        raise UsageError(
            f"the folder {path} holds no pictures: give a folder of PNG or JPEG files."
        )
    size = _picture(files[0]).shape[:2]

    def read(batch, start, stop):
        for first in range(start, stop, batch):
            named = files[first : min(first + batch, stop)]
            images = [_picture(file) for file in named]
            for file, image in zip(named, images, strict=True):
                if image.shape[:2] != size:
                    raise UsageError(
                        f"{file} is {image.shape[1]}×{image.shape[0]} and {files[0]} is "
                        f"{size[1]}×{size[0]}: bring all pictures to one size (numdiff data import does "
                        "so)."
                    )
            yield np.stack(images)

    return Images(str(path), len(files), size, read)


def _picture(file):
    try:
        with open_picture(file) as picture:
            return np.asarray(flatten(picture, (255, 255, 255)).convert("RGB"))
    except (Unreadable, OSError) as error:
        raise NumdiffError(
            f"{file} cannot be read ({getattr(error, 'strerror', None) or error}): replace it or "
            "take it out of the folder."
        ) from None


def _dataset(path, classes, size):
    dataset = Dataset(path, size, classes or None)
    count, height, width, _ = dataset.shape
    if dataset.read([0]).dtype != np.uint8:
        raise UsageError(f"{path} holds latents, not images: decode them first.")
    note = f"averaged to {height}×{width}" if size else ""
    note = ", ".join(
        filter(None, [f"classes {', '.join(dataset.classes)}" if classes else "", note])
    )

    def read(batch, start, stop):
        for first in range(start, stop, batch):
            yield dataset.read(np.arange(first, min(first + batch, stop)))

    record = {"classes": list(dataset.classes)} if classes else {}
    return Images(str(path), count, (height, width), read, record, note, dataset=True)


def _check_features(path, features):
    if (
        features.ndim != 2
        or features.dtype.kind != "f"
        or 0 in features.shape
        or features.shape[1] > MAX_DIMENSIONS
    ):
        raise NumdiffError(
            f"{path} holds {features.dtype} {features.shape}, and features are floats (N, D), D at most "
            f"{MAX_DIMENSIONS:,}."
        )
    if not np.isfinite(features).all() or float(np.abs(features).max()) > LARGEST:
        raise NumdiffError(f"{path} holds features that are not finite: compute them again.")
    return features


@contextlib.contextmanager
def _damage_named(path):
    """Context that turns the readers' errors on damaged files into one sentence."""
    try:
        yield
    except OSError as error:
        raise NumdiffError(
            f"{path} cannot be read ({error.strerror or error}): copy or make it again."
        ) from None
    except (BadArchive, Refused, zipfile.BadZipFile) as error:
        reason = (
            str(error).splitlines()[0].strip("'\"")[:200] if str(error) else type(error).__name__
        )
        if "pickle" in reason:
            raise NumdiffError(
                f"{path} holds pickled objects, which numdiff does not load: write plain arrays."
            ) from None
        raise NumdiffError(f"{path} cannot be read ({reason}): copy or make it again.") from None


# Writing ------------------------------------------------------------------------------------------


def save_statistics(path, statistics):
    """Write mu, sigma (EDM) and, if there are spatial features, mu_s, sigma_s (guided-diffusion);
    atomically."""
    arrays = {name: getattr(statistics, name) for name in ("mu", "sigma", "mu_s", "sigma_s")}
    _save(path, "the statistics", arrays, {**statistics.record, "count": statistics.count})


def save_features(path, features):
    """Write features and, if there are any, spatial features; atomically."""
    _save(
        path,
        "the features",
        {"features": features.features, "spatial": features.spatial},
        features.record,
    )


def _save(path, what, arrays, record):
    if os.path.splitext(path)[1] != ".npz":
        raise UsageError(f"{path} must end in .npz.")
    arrays = {name: array for name, array in arrays.items() if array is not None}
    with atomic_file(path, what) as file:
        np.savez(file, **arrays, numdiff=np.array(json.dumps(record)))
