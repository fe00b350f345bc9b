"""A folder or a zip of image files. Nothing is unpacked to disk."""

import errno
import io
import os
import posixpath
import zipfile

from ...errors import NumdiffError, UsageError
from ...files import check_regular, open_regular
from . import labels as label_files
from .archives import BadArchive, ZipReader
from .classes import IN_NUMERIC_ORDER, Labelled
from .pictures import MAXIMUM_FILE_BYTES, Unreadable, decoded, looks_like_picture
from .source import Item, Source, damage_named

# What systems keep for themselves, in lower case; and all whose names begin with a dot
SYSTEM_FILES = ("thumbs.db", "desktop.ini")
SYSTEM_FOLDERS = (
    "__macosx",
    "@eadir",
    "@tmp",
    "@recycle",
    "@recently-snapshot",
    "#recycle",
    "#snapshot",
    "$recycle.bin",
    "recycler",
    "system volume information",
    "lost+found",
)
ITSELF = "the folder itself"  # what a link leads back to
UTF_8 = 0x800  # flag of a member of a zip: its name is in UTF-8
MAXIMUM_LABELS_BYTES = 64 << 20  # that of ImageNet's 1.3 million images has 40


class Tree:
    """The contents of a folder or a zip, by paths relative to it with forward slashes."""

    def __init__(self, path):
        self.path = path
        self.names = []  # of files, and of what cannot be read as one, in order
        self.folders = []  # of folders, without a slash at the end, in order
        # system and hidden folders (with a slash), and hidden pictures, which are left out
        self.skipped = []
        # (folder, the folder that it is), of links to folders that are there already
        self.repeated = []
        self.replaced = []  # files that are left out, as a later one has the same name

    def labels_of_samples(self, pictures, order):
        """(`Labelled`, names of the files that were read) of files that belong to each picture;
        None where there are none."""

    def notes(self):
        """Sentences on what is left out."""
        if self.skipped:
            yield (
                f"{_count(self.skipped, 'hidden or system entry was', 'hidden or system entries were')} left out "
                f"({label_files.examples(self.skipped)})."
            )
        if self.replaced:
            yield (
                f"{_count(self.replaced, 'file was', 'files were')} left out, as later ones in the {self.kind} have "
                f"the same names ({label_files.examples(self.replaced)})."
            )
        if self.repeated:
            shown = label_files.examples([f"{name} is {first}" for name, first in self.repeated])
            yield (
                f"{_count(self.repeated, 'link was', 'links were')} left out, as the folder that it leads to is "
                f"read already ({shown})."
            )


def _count(names, one, several):
    return f"{len(names):,} {one if len(names) == 1 else several}"


class Folder(Tree):
    """The files under a folder."""

    kind = "folder"

    def __init__(self, path):
        super().__init__(path)
        self._paths = {}  # name, printable whatever the disk's encoding -> path
        self._walk(path, "", {})
        self.names = sorted(self._paths, key=lambda name: name.split("/"))

    def _walk(self, path, prefix, seen):
        """Collect all files below `path`; follows links, but enters no folder twice."""
        with damage_named(path):
            state = os.stat(path)
            entries = list(os.scandir(path))
        place = prefix.rstrip("/") or "."
        first = seen.setdefault((state.st_dev, state.st_ino), place)
        if first != place:
            self.repeated.append((place, ITSELF if first == "." else first))
            return
        if prefix:
            self.folders.append(place)
        for entry in sorted(entries, key=lambda entry: entry.name):
            name = prefix + entry.name.encode("utf-8", "backslashreplace").decode()
            folder = _is_folder(entry)
            if _is_skipped(entry.name, folder):
                self.skipped += (
                    [name + "/" * folder] if folder or looks_like_picture(name, b"") else []
                )
            elif folder:
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
        """(name, what `os.stat` says, of the link itself where it leads nowhere) of each file, in
        the order of the names."""
        with damage_named(self.path):
            return [
                (name, os.stat(path) if os.path.exists(path) else os.lstat(path))
                for name, path in ((name, self._paths[name]) for name in self.names)
            ]

    def close(self):
        pass


class Archive(Tree):
    """The files in an archive. Attribute members: {name: what the archive knows of the file}."""

    def place(self, entries):
        """Give each file its name. entries: (name in the archive, whether it is a folder, what the
        archive knows of it)

        Names are only names: `../../x.png` is the image x.png, and nothing is written.
        """
        self.members, folders, skipped = {}, set(), {}
        for text, is_folder, member in entries:
            parts = [
                part for part in text.replace("\\", "/").split("/") if part not in ("", ".", "..")
            ]
            if not parts:
                continue
            above = parts if is_folder else parts[:-1]
            end = next((i for i, part in enumerate(above, 1) if _is_skipped(part, True)), None)
            folders.update("/".join(above[:i]) for i in range(1, end or len(above) + 1))
            if end is not None:
                skipped["/".join(above[:end]) + "/"] = None
            if end is not None or is_folder:
                continue
            name = "/".join(parts)
            if _is_skipped(parts[-1], False):
                skipped.update({name: None} if looks_like_picture(name, b"") else {})
                continue
            if name in self.members:
                self.replaced.append(name)
            self.members[name] = member
        self.names = sorted(self.members, key=lambda name: name.split("/"))
        self.folders, self.skipped = (
            sorted(found, key=lambda name: name.split("/")) for found in (folders, skipped)
        )


class Zip(Archive):
    """The files in a zip."""

    kind = "zip"

    def __init__(self, path):
        super().__init__(path)
        with damage_named(path):
            self._zip = ZipReader(path)
        self.place(
            (text, text.endswith(("/", "\\")), member)
            for text, member in ((name_of(member), member) for member in self._zip.members)
        )
        if any(member.flag_bits & 1 for member in self.members.values()):
            self._zip.close()
            raise UsageError(
                f"{str(path)!r} is protected by a password: unpack it and import the folder."
            )

    def open(self, name, limit=None):
        return self._zip.open(self.members[name], limit)

    def size(self, name):
        return self.members[name].file_size

    def close(self):
        self._zip.close()


def _is_folder(entry):
    try:
        return entry.is_dir()
    except OSError:  # a link to itself
        return False


def _is_skipped(name, folder):
    return name.startswith(".") or name.lower() in (SYSTEM_FOLDERS if folder else SYSTEM_FILES)


def name_of(member):
    """The name of a member of a zip. macOS writes it in UTF-8 without saying so, and zipfile then
    reads code page 437.
    """
    if member.flag_bits & UTF_8 or member.filename.isascii():
        return member.filename
    try:
        return member.filename.encode("cp437").decode("utf-8")
    except UnicodeError:
        return member.filename


def open_tree(tree, labels, order="numbers"):
    """A `Source` of the pictures in a folder or zip."""
    pictures, others = [], []
    for name in tree.names:
        (pictures if _is_picture(tree, name) else others).append(name)
    if not pictures:
        raise NumdiffError(
            f"the {tree.kind} {str(tree.path)!r} holds no images"
            + (f" ({len(others)} other files)" if others else "")
            + (
                f" but for what is left out ({label_files.examples(tree.skipped)})"
                if tree.skipped
                else ""
            )
            + ": check the path."
        )
    labelled, read = _label(tree, pictures, labels, order)
    others = [name for name in others if name not in read]

    def items():
        for i, name in enumerate(pictures):
            label = None if labelled.numbers is None else labelled.numbers[i]
            yield Item(name, lambda wanted, name=name: _load(tree, name, wanted), label)

    return Source(
        tree.kind,
        items(),
        len(pictures),
        labelled.classes,
        labelled.order,
        named=True,
        parallel=True,
        ignored=others,
        notes=[*labelled.notes, *_notes_on_order(labelled, order), *tree.notes()],
        close=tree.close,
    )


def _is_picture(tree, name):
    if looks_like_picture(name, b""):
        return True
    try:
        with tree.open(name) as file:
            return looks_like_picture(name, file.read(16))
    # whatever it is, it is not a picture by name, nor can it be read
    except (OSError, BadArchive, zipfile.BadZipFile):
        return False


def _load(tree, name, wanted):
    try:
        nbytes = tree.size(name)
    except OSError as error:
        raise Unreadable(
            "it is a link that leads to no file"
            if error.errno in (errno.ENOENT, errno.ELOOP)
            else error.strerror
        ) from None

    def read():
        with tree.open(name, MAXIMUM_FILE_BYTES) as file:
            return file.read(MAXIMUM_FILE_BYTES)

    return decoded(nbytes, read, wanted)


def _notes_on_order(labelled, order):
    """The note for class folders whose names are numbers, which other programs sort differently."""
    names = labelled.classes
    if (
        order == "numbers"
        and names
        and labelled.order == IN_NUMERIC_ORDER
        and names != sorted(names)
    ):
        yield (
            f"The classes are in the order of their numbers ({label_files.examples(names)}); torchvision's "
            "ImageFolder and guided-diffusion sort them as words "
            f"({label_files.examples(sorted(names))}): for those indices add --class-order words."
        )


def _label(tree, pictures, labels, order):
    """(`Labelled`, names of the labels files in the tree that were read)."""
    if labels == "none":
        return Labelled(), []
    if labels == "folders":
        found = _by_folders(tree, pictures, order)
        if found.classes is None:
            raise UsageError(
                f"{str(tree.path)!r} has no folders that distinguish classes: leave --labels folders out."
            )
        return found, []
    if labels == "prefix":
        return label_files.from_prefixes(pictures, order), []
    if labels != "auto":
        # it may be among the images
        inside = os.path.relpath(labels, tree.path).replace(os.sep, "/")
        text = _read_text(labels, lambda: io.BufferedReader(open_regular(labels)))
        return label_files.from_file(pictures, str(labels), text, "", order), [inside]
    found = _find_labels_file(tree, pictures)
    if found:
        base = posixpath.dirname(found) + "/" if "/" in found else ""
        return label_files.from_file(pictures, found, _text_in(tree, found), base, order), [found]
    metadata, notes = _find_metadata(tree)
    if metadata:
        texts = [(name, _text_in(tree, name)) for name in _not_too_large(tree, metadata)]
        result, read, more = label_files.from_metadata(pictures, texts, order)
        notes += more
        if result is not None:
            result.notes = notes + result.notes
            return result, read
    if found := tree.labels_of_samples(pictures, order):
        return found
    result = _by_folders(tree, pictures, order)
    result.notes = notes + result.notes
    return result, []


def _by_folders(tree, pictures, order):
    path = tree.path if tree.kind == Folder.kind else None
    result = label_files.from_folders(pictures, order, tree.folders, path)
    prefix = label_files.common_folder(pictures)
    if result.classes is None:  # all images are in one folder, and links to it may be next to it
        prefix = prefix[: prefix.rstrip("/").rfind("/") + 1]
    for name, first in tree.repeated:
        if path is not None and not _through_link(path, name):  # the link was read first
            name, first = first, name
        one, other = (each[len(prefix) :].split("/")[0] for each in (name, first))
        if (
            one != other
            and first != ITSELF
            and name.startswith(prefix)
            and first.startswith(prefix)
        ):
            raise UsageError(
                f"{name} in {str(tree.path)!r} is a link to {first}, whose images would then be of two "
                f"classes, {one} and {other}: remove one of them, copy the images, or add --labels none."
            )
    return result


def _through_link(folder, name):
    """Whether a path below a folder goes through a symbolic link."""
    parts = name.split("/")
    return any(os.path.islink(os.path.join(folder, *parts[: i + 1])) for i in range(len(parts)))


def _find_metadata(tree):
    """(Hugging Face's metadata files, notes on those that are not read)."""
    found = [
        name for name in tree.names if posixpath.basename(name).lower() in label_files.METADATA
    ]
    unread = [name for name in found if name.lower().endswith(".parquet")]
    found = [name for name in found if name not in unread]
    folders = [posixpath.dirname(name) for name in found]
    twice = [name for name, folder in zip(found, folders, strict=True) if folders.count(folder) > 1]
    if twice:
        raise UsageError(
            f"{str(tree.path)!r} holds several metadata files in one folder "
            f"({label_files.examples(twice)}): remove one of them, or choose one by --labels FILE."
        )
    return found, [
        f"{name} is not read: save it as metadata.csv if it holds labels." for name in unread
    ]


def _find_labels_file(tree, pictures):
    """A labels file in the folder that contains all pictures, or in one above it."""
    folder = label_files.common_folder(pictures)
    while True:
        found = [
            name
            for name in tree.names
            if posixpath.dirname(name) == folder.rstrip("/")
            and posixpath.basename(name).lower() in label_files.NAMES
        ]
        if len(found) > 1:
            raise UsageError(
                f"{str(tree.path)!r} holds several labels files ({label_files.examples(found)}): choose "
                "one by --labels FILE."
            )
        if found or not folder:
            return found[0] if found else None
        folder = folder.rstrip("/")
        folder = folder[: folder.rindex("/") + 1] if "/" in folder else ""


def _not_too_large(tree, names):
    """Names of labels files, if all together may be read."""
    with damage_named(tree.path):
        size = sum(tree.size(name) for name in names)
    if size > MAXIMUM_LABELS_BYTES:
        raise UsageError(
            f"the metadata files of {str(tree.path)!r} have {size:,} bytes, more than the "
            f"{MAXIMUM_LABELS_BYTES:,} that are read: write the labels as one labels.csv."
        )
    return names


def _text_in(tree, name):
    with damage_named(name):
        size = tree.size(name)
    return _read_text(name, lambda: tree.open(name), size)


def _read_text(path, opener, size=None):
    """The text of a labels file, UTF-8 with or without a byte order mark."""
    path = str(path)
    if not path.lower().endswith((*label_files.TABLES, *label_files.OTHERS)):
        raise UsageError(
            f"--labels {path!r} is unknown: use auto, folders, prefix, none, or a .csv, .json or .jsonl "
            "file."
        )
    try:
        if not size or size <= MAXIMUM_LABELS_BYTES:
            with damage_named(path), opener() as file:
                data = file.read(MAXIMUM_LABELS_BYTES + 1)
            size = len(data)
        if size > MAXIMUM_LABELS_BYTES:
            raise UsageError(
                f"{path} has more than {MAXIMUM_LABELS_BYTES:,} bytes, too many for a labels file: check "
                "it."
            )
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise UsageError(f"{path} is not UTF-8 text: save it as UTF-8.") from None


def open_archive(tree, labels, order):
    """As `open_tree`; the archive is closed where that fails."""
    try:
        return open_tree(tree, labels, order)
    except BaseException:
        tree.close()
        raise
