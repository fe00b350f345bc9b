"""A folder or a zip of image files. Nothing is unpacked to disk."""
import errno
import io
import os
import posixpath
import zipfile

from ...archives import BadArchive, ZipReader
from ...errors import NumdiffError, UsageError
from ...files import check_regular, open_regular
from ..pictures import MAXIMUM_FILE_BYTES, Unreadable, decoded
from . import labels as label_files
from .pictures import looks_like_picture
from .source import Item, Source, damage_named

SKIPPED = ("__macosx", "thumbs.db", "desktop.ini")
MAXIMUM_LABELS_BYTES = 64 << 20  # that of ImageNet's 1.3 million images has 40


class Folder:
    """What lies under a folder, by its path relative to it, with forward slashes: files, and what cannot be read as
    one."""

    kind = "folder"

    def __init__(self, path):
        self.path, self.replaced = path, []
        self._paths = {}  # name, printable whatever the disk's encoding -> path
        self._walk(path, "", set())
        self.names = sorted(self._paths, key=lambda name: name.split("/"))

    def _walk(self, path, prefix, seen):
        """Collect all files below `path`; follows links, but enters no folder twice."""
        with damage_named(path):
            state = os.stat(path)
            entries = list(os.scandir(path))
        if (state.st_dev, state.st_ino) in seen:
            return
        seen.add((state.st_dev, state.st_ino))
        for entry in sorted(entries, key=lambda entry: entry.name):
            name = prefix + entry.name.encode("utf-8", "backslashreplace").decode()
            if _skipped(entry.name):
                continue
            if _is_folder(entry):
                self._walk(entry.path, name + "/", seen)
            else:
                self._paths[name] = entry.path

    def open(self, name, limit=None):
        return io.BufferedReader(open_regular(self._paths[name]))

    def size(self, name):
        state = os.stat(self._paths[name])
        check_regular(self._paths[name], state.st_mode)
        return state.st_size

    def states(self):
        """(name, what `os.stat` says, of the link itself where it leads nowhere) of each file, in the order of the
        names."""
        with damage_named(self.path):
            return [(name, os.stat(path) if os.path.exists(path) else os.lstat(path))
                    for name, path in ((name, self._paths[name]) for name in self.names)]

    def close(self):
        pass


class Zip:
    """The files in a zip. Their names are only names: `../../x.png` is the image x.png, and nothing is written.

    replaced: the names of those that are left out, as a later one has the same
    """

    kind = "zip"

    def __init__(self, path):
        self.path, self.replaced = path, []
        with damage_named(path):
            self._zip = ZipReader(path)
        self._members = {}
        for member in self._zip.members:
            parts = [part for part in member.filename.replace("\\", "/").split("/") if part not in ("", ".", "..")]
            if member.filename.endswith("/") or not parts or any(_skipped(part) for part in parts):
                continue
            if member.flag_bits & 1:
                self._zip.close()
                raise UsageError(f"{str(path)!r} is protected by a password: unpack it and import the folder.")
            name = "/".join(parts)
            if name in self._members:
                self.replaced.append(name)
            self._members[name] = member
        self.names = sorted(self._members, key=lambda name: name.split("/"))

    def open(self, name, limit=None):
        return self._zip.open(self._members[name], limit)

    def size(self, name):
        return self._members[name].file_size

    def close(self):
        self._zip.close()


def _is_folder(entry):
    try:
        return entry.is_dir()
    except OSError:  # a link to itself
        return False


def _skipped(part):
    return part.startswith(".") or part.lower() in SKIPPED


def open_tree(tree, labels, order="numbers"):
    """A `Source` of the pictures in a folder or zip."""
    pictures, others = [], []
    for name in tree.names:
        (pictures if _is_picture(tree, name) else others).append(name)
    if not pictures:
        raise NumdiffError(f"the {tree.kind} {str(tree.path)!r} holds no images"
                           + (f" ({len(others)} other files)" if others else "") + ": check the path.")
    classes, numbers, note, labels_file = _label(tree, pictures, labels, order)
    if labels_file in others:
        others.remove(labels_file)

    def items():
        for i, name in enumerate(pictures):
            label = None if numbers is None else numbers[i]
            yield Item(name, lambda wanted, name=name: _load(tree, name, wanted), label)

    return Source(tree.kind, items(), len(pictures), classes, named=True, parallel=True, ignored=others,
                  notes=[*filter(None, [note, _note_on_order(classes, order), _note_on_names(tree)])],
                  close=tree.close)


def _is_picture(tree, name):
    if looks_like_picture(name, b""):
        return True
    try:
        with tree.open(name) as file:
            return looks_like_picture(name, file.read(16))
    except (OSError, BadArchive, zipfile.BadZipFile):  # whatever it is, it is not a picture by name, nor can it be read
        return False


def _load(tree, name, wanted):
    try:
        nbytes = tree.size(name)
    except OSError as error:
        raise Unreadable("it is a link that leads to no file" if error.errno in (errno.ENOENT, errno.ELOOP)
                         else error.strerror) from None

    def read():
        with tree.open(name, MAXIMUM_FILE_BYTES) as file:
            return file.read(MAXIMUM_FILE_BYTES)

    return decoded(nbytes, read, wanted)


def _note_on_order(classes, order):
    """The note for class folders whose names are numbers, which other programs sort differently."""
    if order == "words" or not classes or classes == sorted(classes):
        return None
    there = label_files.examples(sorted(classes))
    return (f"The classes are in the order of their numbers ({label_files.examples(classes)}); torchvision's "
            f"ImageFolder and guided-diffusion sort them as words ({there}): for those indices add --class-order "
            "words.")


def _note_on_names(tree):
    """The note for files of a zip that are left out, as it has others of the same names."""
    if not tree.replaced:
        return None
    count = len(tree.replaced)
    return (f"{count:,} file{'s were' if count > 1 else ' was'} left out, as later ones in the zip have the same names "
            f"({label_files.examples(tree.replaced)}).")


def _label(tree, pictures, labels, order):
    """(classes, labels, note, name of the labels file in the tree); classes and labels None where there are none."""
    if labels == "none":
        return None, None, None, None
    if labels == "folders":
        classes, numbers = label_files.from_folders(pictures, order)
        if classes is None:
            raise UsageError(f"{str(tree.path)!r} has no folders that distinguish classes: leave --labels folders out.")
        return classes, numbers, None, None
    if labels == "prefix":
        return *label_files.from_prefixes(pictures, order), None, None
    if labels != "auto":
        inside = os.path.relpath(labels, tree.path).replace(os.sep, "/")  # it may lie among the images
        return *label_files.from_file(pictures, str(labels), _read_text(labels, open), "", order), inside
    found = _find_labels_file(tree, pictures)
    if found:
        base = posixpath.dirname(found) + "/" if "/" in found else ""
        text = _read_text(found, lambda name, mode: tree.open(name), tree.size(found))
        return *label_files.from_file(pictures, found, text, base, order), found
    return *label_files.from_folders(pictures, order), None, None


def _find_labels_file(tree, pictures):
    """A labels file in the folder that contains all pictures, or in one above it."""
    folder = label_files.common_folder(pictures)
    while True:
        found = [name for name in tree.names if posixpath.dirname(name) == folder.rstrip("/")
                 and posixpath.basename(name).lower() in label_files.NAMES]
        if len(found) > 1:
            raise UsageError(f"{str(tree.path)!r} holds several labels files ({label_files.examples(found)}): choose "
                             "one by --labels FILE.")
        if found or not folder:
            return found[0] if found else None
        folder = folder.rstrip("/")
        folder = folder[:folder.rindex("/") + 1] if "/" in folder else ""


def _read_text(path, opener, size=None):
    """The text of a labels file, UTF-8 with or without a byte order mark."""
    path = str(path)
    if not path.lower().endswith((".csv", ".tsv", ".txt", ".json")):
        raise UsageError(f"--labels {path!r} is unknown: use auto, folders, prefix, none, or a .csv or .json file.")
    try:
        if not size or size <= MAXIMUM_LABELS_BYTES:
            with damage_named(path), opener(path, "rb") as file:
                data = file.read(MAXIMUM_LABELS_BYTES + 1)
            size = len(data)
        if size > MAXIMUM_LABELS_BYTES:
            raise UsageError(f"{path} has more than {MAXIMUM_LABELS_BYTES:,} bytes, too many for a labels file: check "
                             "it.")
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise UsageError(f"{path} is not UTF-8 text: save it as UTF-8.") from None
