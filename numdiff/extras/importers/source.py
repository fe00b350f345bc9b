"""The importers' interface: a `Source` of items, one for each image; and helpers that several of
them need."""

import contextlib
import gzip
import lzma
import os
import reprlib
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from ...errors import NumdiffError, UsageError
from .archives import BadArchive, TooMuch, most_from_deflate

BLOCK_BYTES = 16 << 20  # how much of a large array is in memory at a time
# a header that asks for more is damaged, or was made to exhaust the memory
MAXIMUM_IMAGE_BYTES = 1 << 28
MAXIMUM_IMAGES = 50_000_000  # as each needs some memory for its label
MAXIMUM_CLASSES = 1_000_000
ORDERS = ("numbers", "words")
SHOWN, SHOWN_LETTERS = 3, 80  # names given as examples in a message, and how much of one

_reprs = reprlib.Repr()
_reprs.maxstring = _reprs.maxother = 80
short = _reprs.repr  # of a value from a file, whatever its size


@dataclass
class Item:
    """One image of an import.

    `with load(wanted) as image` gives a PIL image or an array (H, W, C), uint8 or of floats, or
    raises `Unreadable`; wanted is the size that it will be brought to, or None.
    """

    name: str
    load: Callable
    label: int | None = None


@dataclass
class Source:
    """A thing to import. Items come in a fixed order, one at a time."""

    kind: str  # in words, for the summary
    items: Iterable  # of Item
    count: int | None = None  # how many items, where it is known
    classes: list | None = None
    order: str = ""  # of the classes, in words
    named: bool = False  # whether the items' names mean something, as files' do, and are kept
    latents: bool = False  # floats, which are written as they are
    floats: bool = False  # whether they could be
    parallel: bool = False  # whether load() is slow, and safe to call from several threads
    ignored: list = field(default_factory=list)  # names of files that are no images
    notes: list = field(default_factory=list)  # sentences for the summary
    close: Callable = lambda: None  # lets go of the files behind the items


@contextlib.contextmanager
def damage_named(path):
    """Context that turns the readers' errors on a truncated or damaged file into one sentence about
    `path`."""
    try:
        yield
    except TooMuch as error:
        raise NumdiffError(
            f"{str(path)!r} holds more than numdiff reads ({error}): check the file."
        ) from None
    except (
        EOFError,
        zlib.error,
        lzma.LZMAError,
        gzip.BadGzipFile,
        BadArchive,
        zipfile.BadZipFile,
        struct.error,
        NotImplementedError,
    ) as error:  # the last: a zip of many volumes
        raise damaged(path, error) from None
    except OSError as error:
        raise NumdiffError(
            f"{str(path)!r} cannot be read ({error.strerror or error}): check the file."
        ) from None


def damaged(path, why):
    why = str(why).splitlines()[0][:200] if str(why).strip() else type(why).__name__
    return NumdiffError(
        f"{str(path)!r} is truncated or damaged ({why.rstrip('.')}): get or make the file again."
    )


def read_exactly(stream, nbytes, path):
    """`nbytes` bytes of a stream, or an error saying that the file is truncated."""
    with damage_named(path):
        data = stream.read(nbytes)
    if len(data) != nbytes:
        raise damaged(path, "it ends before the images that its header announces")
    return data


def announced(path, nbytes):
    """Refuse a file, plain or gzip, that announces more bytes than can be in it."""
    with damage_named(path):
        size = os.path.getsize(path)
        with open(path, "rb") as file:
            packed = file.read(2) == b"\x1f\x8b"
    if nbytes > (most_from_deflate(size) if packed else size):
        raise damaged(path, "it ends before the images that its header announces")


def open_stream(path):
    """A file opened for reading, unpacked on the way if it is gzip, whatever its name says."""
    with damage_named(path):
        with open(path, "rb") as file:
            packed = file.read(2) == b"\x1f\x8b"
        return gzip.open(path, "rb") if packed else open(path, "rb")


def examples(names):
    """The first few names as part of a sentence."""
    shown = [str(name)[:SHOWN_LETTERS] for name in names[:SHOWN]]
    return ", ".join(shown) + (", …" if len(names) > SHOWN else "")


def no_labels_file(path, labels):
    """Refuse --labels FILE, folders or prefix for a source that brings its own labels."""
    if labels not in ("auto", "none"):
        raise UsageError(
            f"--labels {labels} is for folders and zips of image files, and {str(path)!r} is not one: "
            "leave it out, or use --labels none."
        )
