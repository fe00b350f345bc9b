"""What every importer gives: a `Source` of items, one an image, and the helpers that several of them need."""
import contextlib
import gzip
import lzma
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np

from ...errors import NumdiffError, UsageError

BLOCK_BYTES = 16 << 20  # how much of a large array is in memory at a time
MAXIMUM_IMAGE_BYTES = 1 << 30  # a header that asks for more is damaged, or was made to exhaust the memory


class Unreadable(Exception):
    """One image cannot be read; the import names it and goes on."""


@dataclass
class Item:
    """One image on its way in.

    `load(wanted)` gives a PIL image or a uint8 array (H, W, C), or raises `Unreadable`; wanted is the size that it will
    be brought to, or None.
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
    named: bool = False  # whether the items' names mean something, as files' do, and are kept
    parallel: bool = False  # whether load() is slow, and safe to call from several threads
    ignored: list = field(default_factory=list)  # names of files that are no images
    notes: list = field(default_factory=list)  # sentences for the summary
    close: Callable = lambda: None  # lets go of the files behind the items


@contextlib.contextmanager
def damage_named(path):
    """Turn whatever a cut or damaged file makes the readers raise into one sentence about `path`."""
    try:
        yield
    except (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile, tarfile.TarError, zipfile.BadZipFile,
            struct.error, NotImplementedError) as error:  # the last: a zip's compression or its many volumes
        raise damaged(path, error) from None
    except OSError as error:
        raise NumdiffError(f"{str(path)!r} cannot be read ({error.strerror or error}): check the file.") from None


def damaged(path, why):
    why = str(why).splitlines()[0] if str(why) else type(why).__name__
    return NumdiffError(f"{str(path)!r} is truncated or damaged ({why.rstrip('.')}): get or make the file again.")


def read_exactly(stream, nbytes, path):
    """`nbytes` bytes of a stream, or an error that says that the file is truncated."""
    with damage_named(path):
        data = stream.read(nbytes)
    if len(data) != nbytes:
        raise damaged(path, "it ends before the images that its header announces")
    return data


def open_stream(path):
    """A file opened for reading, unpacked on the way if it is gzip, whatever its name says."""
    with damage_named(path):
        with open(path, "rb") as file:
            packed = file.read(2) == b"\x1f\x8b"
        return gzip.open(path, "rb") if packed else open(path, "rb")


def number_classes(values):
    """(names of the classes, label of each value) for labels given as integers or as words, one a value.

    Integers 0 … K-1 stay what they are; others are numbered in numeric order, words in alphabetic order.
    """
    values = [_tidy(value) for value in values]
    distinct = set(values)
    if all(isinstance(value, int) or _is_integer(value) for value in distinct):
        distinct = sorted({int(value) for value in distinct})
        index = {value: i for i, value in enumerate(distinct)}
        return [str(value) for value in distinct], [index[int(value)] for value in values]
    names = sorted({str(value) for value in distinct})
    index = {name: i for i, name in enumerate(names)}
    return names, [index[str(value)] for value in values]


def _tidy(value):
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise UsageError(f"a label is {value!r}, and a label must be a word or an integer: mend the labels.")
    if isinstance(value, float):
        if not value.is_integer():
            raise UsageError(f"a label is {value!r}, and a label must be a word or an integer: mend the labels.")
        return int(value)
    return value.strip() if isinstance(value, str) else value


def _is_integer(word):
    digits = word[1:] if word[:1] == "-" else word
    return digits.isascii() and digits.isdigit() and str(int(word)) == word


def no_labels_file(path, labels):
    """Refuse --labels FILE or folders for a source that brings its own labels."""
    if labels not in ("auto", "none"):
        raise UsageError(f"--labels {labels} is for folders and zips of image files, and {str(path)!r} is not one: "
                         "leave it out, or use --labels none.")
