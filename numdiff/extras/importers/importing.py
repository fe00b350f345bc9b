"""Import a dataset: recognise the format of a source, and write its images to an HDF5 file."""

import contextlib
import os
import shlex
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from ... import extensions
from ...configuration import given_values
from ...data.writer import Writer
from ...errors import NumdiffError, UsageError
from ...outputs import check_apart
from .arrays import first_bytes, open_hdf5, open_npy, open_npz
from .fitting import AsTheyAre, Fitting
from .pictures import Unreadable, looks_like_picture, quiet
from .source import ORDERS, examples
from .tree import Folder, Zip, open_archive, open_tree

KNOWN = (
    "a folder, zip or tar of images, cifar-10-python.tar.gz, MNIST's idx files, .npz, .npy, unet.cu's .bin, "
    "or a numdiff .h5"
)
# threads that decode pictures: Pillow releases the GIL meanwhile
WORKERS = min(16, os.cpu_count() or 1)


@dataclass
class Report:
    """The result of an import."""

    path: str
    source: str  # what kind of source it was
    noun: str = "images"  # or latents
    shape: tuple = (0,)  # (N, H, W, C) as written
    classes: list | None = None
    order: str = ""  # of the classes, in words
    counts: list = field(default_factory=list)  # images of each class
    unreadable: list = field(default_factory=list)  # (name, reason) of images left out
    ignored: list = field(default_factory=list)  # names of files that are no images
    notes: list = field(default_factory=list)

    def sentences(self):
        """The summary as sentences."""
        count, height, width, channels = self.shape
        text = f"Wrote {self.path}: {count:,} {self.noun} of {height}×{width}×{channels} from a {self.source}"
        if self.classes:
            shown = ", ".join(
                f"{name} {n:,}"
                for name, n in list(zip(self.classes, self.counts, strict=True))[:12]
            )
            more = f", and {len(self.classes) - 12} more" if len(self.classes) > 12 else ""
            order = f", {self.order}" if self.order else ""
            text += f" in {len(self.classes)} class{'es' * (len(self.classes) != 1)} ({shown}{more}){order}"
        lines = [f"{text}; {os.path.getsize(self.path) / 1e6:,.1f} MB."]
        if self.unreadable:
            shown = ", ".join(f"{name}: {why}" for name, why in self.unreadable[:5])
            more = ", …" if len(self.unreadable) > 5 else ""
            lines.append(f"{_left_out(len(self.unreadable), 'unreadable image')} ({shown}{more}).")
        if self.ignored:
            lines.append(
                f"{_left_out(len(self.ignored), 'other file')} ({examples(self.ignored)})."
            )
        return lines + self.notes


def _left_out(n, noun):
    return f"{n:,} {noun} was left out" if n == 1 else f"{n:,} {noun}s were left out"


@dataclass(frozen=True, kw_only=True)
class ImportConfig:
    """Settings of an import.

    size: side in pixels, or (height, width); None keeps the images' own size, which must then be
        one and square
    fit: how an image of another shape is brought to `size`: "crop" (the largest part of that shape
        in the middle, also for None), "pad" (bars of the background) or "stretch"
    crop: "lanczos" (also for None) or "adm", which has the bits of guided-diffusion's centre crop
    channels: 1 grey, 3 RGB, None what the first image has
    background: the colour under transparent images, None for white
    labels: "auto" (a labels file if there is one, else sub-folders), "folders", "prefix" (of the
        files' names, up to the first _), "none", or the path of a labels file
    order: of classes whose names are integers, "numbers" (0, 1, 2, 10) or "words" (0, 1, 10, 2, as
        torchvision and guided-diffusion number them)
    latents: whether floats of an array are latents, which are written as they are, or pixels; None
        decides by their channels and values (arrays.py), and the report says so
    gzip: compress the images: smaller where they are drawings, slower to read (data/README.md)
    float16: store latents in half the bytes, rounded
    """

    size: Any = None
    fit: str | None = None
    crop: str | None = None
    channels: int | None = None
    background: str | None = None
    labels: Any = "auto"
    order: str = "numbers"
    latents: bool | None = None
    gzip: bool = False
    float16: bool = False


def import_dataset(
    source, out, *, force=False, progress=None, strict=False, size_flag="--size", **settings
):
    """Read the images of `source`, write them to the HDF5 file `out`, and return a `Report`.

    settings: of an `ImportConfig`
    force: replace `out`; progress: wraps the iterator over the images, called as progress(iterator,
    total); strict: unreadable images are an error; size_flag: what `size` is called in messages
    """
    c = ImportConfig(**given_values(ImportConfig, None, settings, "import_dataset"))
    fitting = Fitting(c.size, c.fit, c.channels, c.background, size_flag, c.crop)
    # a run's files are not replaced, whatever `force` says
    check_apart("the dataset", out, datasets=False)
    with Writer(out, force, c.gzip) as writer, quiet():
        if not str(c.labels).strip():
            raise UsageError(
                "--labels is empty: give auto, folders, none, or the path of a .csv or .json file."
            )
        opened = open_source(source, str(c.labels), c.order, c.latents)
        with contextlib.closing(opened):
            if opened.latents:
                fitting = AsTheyAre(
                    source, c.size, c.channels, c.fit or c.crop, c.background, c.float16
                )
            elif c.float16:
                raise UsageError(
                    f"--float16 is for latents, and {str(source)!r} holds pixels, which take a byte each: "
                    "leave it out."
                )
            elif c.fit is not None and c.size is None:
                raise UsageError(
                    f"--fit {c.fit} needs {size_flag}, the size that images are brought to: add it, or "
                    "leave this out."
                )
            report = Report(
                str(out),
                opened.kind,
                "latents" if opened.latents else "images",
                classes=opened.classes,
                order=opened.order,
                counts=[0] * len(opened.classes or ()),
                ignored=opened.ignored,
                notes=opened.notes,
            )
            items = opened.items if progress is None else progress(opened.items, opened.count)
            for item, image in _finished(items, fitting, opened.parallel):
                if isinstance(image, Unreadable):
                    report.unreadable.append((item.name, str(image)))
                    continue
                writer.append(image, item.label, item.name if opened.named else None)
                report.shape = (report.shape[0] + 1, *image.shape)
                if item.label is not None:
                    report.counts[item.label] += 1
        if report.shape[0] == 0:
            name, why = report.unreadable[0]
            raise NumdiffError(
                f"none of the {len(report.unreadable)} images of {str(source)!r} could be read "
                f"({name}: {why}): check the files."
            )
        if strict and report.unreadable:
            (name, why), count = report.unreadable[0], len(report.unreadable)
            raise NumdiffError(
                f"{count:,} of the {report.shape[0] + count:,} images of {str(source)!r} could not be "
                f"read, the first of them {name} ({why}): replace or remove what is damaged, or run "
                f"`numdiff data import {shlex.quote(str(source))} OUT.h5`, which leaves it out, and use "
                "that file."
            )
        report.notes += fitting.notes()
        writer.finish(opened.classes)
    return report


def open_source(path, labels="auto", order="numbers", latents=None):
    """A `Source` for the file or folder at `path`, recognised by its contents."""
    if order not in ORDERS:
        raise UsageError(f"--class-order {order} is unknown: use {' or '.join(ORDERS)}.")
    opened = _open_source(path, labels, order, latents)
    if order != "numbers" and not opened.named:
        opened.close()
        raise UsageError(
            f"--class-order is for folders and zips of image files, and {str(path)!r} is not one: "
            "leave it out."
        )
    if latents is not None and not opened.floats:
        opened.close()
        raise UsageError(
            f"--latents and --pixels are for arrays of floats, and {str(path)!r} holds none: leave them "
            "out."
        )
    return opened


def _open_source(path, labels, order, latents):
    if os.path.isdir(path):
        return _open_folder(path, labels, order)
    if not os.path.exists(path):
        raise UsageError(f"there is nothing at {str(path)!r}: check the path.")
    if not os.path.isfile(path):
        raise UsageError(f"{str(path)!r} is neither a file nor a folder: give {KNOWN}.")
    head, unpacked = first_bytes(path)
    if not head:
        raise NumdiffError(f"{str(path)!r} is empty: get or make the file again.")
    if head.startswith((b"PK\3\4", b"PK\5\6")):
        tree = Zip(path)
        if tree.names and all(name.endswith(".npy") for name in tree.names):
            tree.close()
            return open_npz(path, labels, latents)
        return open_archive(tree, labels, order)
    if head.startswith(b"\x89HDF"):
        return open_hdf5(path, labels, latents)
    if head.startswith(b"\x93NUMPY"):
        return open_npy(path, labels, latents)
    content = head if unpacked is None else unpacked
    for importer in extensions.available("importer").values():
        if source := importer.open_file(path, content, labels, order):
            return source
    if looks_like_picture(os.path.basename(path), head[:16]):
        raise UsageError(f"{str(path)!r} is a single image: give its folder.")
    raise NumdiffError(f"{str(path)!r} is nothing that numdiff can import: give {KNOWN}.")


def _open_folder(path, labels, order):
    for importer in extensions.available("importer").values():
        if source := importer.open_folder(path, os.listdir(path), labels, order):
            return source
    return open_tree(Folder(path), labels, order)


def _finished(items, fitting, parallel):
    """(item, array or `Unreadable`) in order; the first readable image settles what the others are
    brought to."""

    def load(item):
        try:
            with item.load(fitting.decoded_for) as image:
                return fitting(image, item.name)
        except Unreadable as error:
            return error

    items = iter(items)
    for item in items:
        try:
            with item.load(fitting.decoded_for) as first:
                fitting.decide(first, item.name)
                image = fitting(first, item.name)
        except Unreadable as error:
            yield item, error
            continue
        yield item, image
        break
    if not parallel or WORKERS == 1:
        yield from ((item, load(item)) for item in items)
        return
    with ThreadPoolExecutor(WORKERS) as pool:
        waiting = deque()
        try:
            for item in items:
                waiting.append((item, pool.submit(load, item)))
                if len(waiting) >= 4 * WORKERS:
                    item, future = waiting.popleft()
                    yield item, future.result()
            while waiting:
                item, future = waiting.popleft()
                yield item, future.result()
        finally:
            pool.shutdown(cancel_futures=True)
