"""A tar of image files, or a folder of WebDataset shards. Nothing is unpacked to a path.

A gzip is unpacked into a nameless temporary file, up to a bound. In a WebDataset the files of a
sample have a key in common, the name up to its first dot: 000017.jpg and 000017.cls, whose text is
the class, or 000017.json with "cls" or "label".
"""

import contextlib
import io
import os
import posixpath
import tempfile
import threading

from ... import schema
from ...errors import UsageError
from ...files import open_regular
from .archives import BadArchive, TooMuch
from .cifar import BATCHES, open_cifar_tar
from .classes import number_classes
from .pictures import looks_like_picture
from .source import damage_named, examples, open_stream
from .tar_archive import tar_members
from .tree import Archive, open_archive

# a gzip of pictures, which are packed already, has no more
MOST_UNPACKED, MOST_RATIO, FREE = 64 << 30, 100, 64 << 20
LABEL_BYTES = 1 << 16  # of a .cls or .json
PIECE = 1 << 20
LABELS = "cls", "label"  # keys of a .json


def open_file(path, content, labels, order):
    """The `Source` of a tar; None for another file."""
    if content[257:262] != b"ustar" and not _is_old_tar(content):
        return None
    tree = Tar(path)
    if any(os.path.basename(name) in BATCHES for name in tree.names):
        tree.close()
        return open_cifar_tar(path, labels)
    return open_archive(tree, labels, order)


def open_folder(path, names, labels, order):
    """That of a folder of shards; None for another."""
    shards = shards_in(path, names)
    if not shards or _has_others(path, names):
        return None
    return open_archive(Tar(path, shards), labels, order)


def _has_others(path, names):
    """Whether a folder of tars holds folders or pictures, too, which are then what is meant."""
    return any(
        looks_like_picture(name, b"") or os.path.isdir(os.path.join(path, name)) for name in names
    )


def _is_old_tar(head):
    """A tar without a `ustar` mark: 512 bytes whose checksum, at byte 148, is right."""
    if len(head) < 512:
        return False
    try:
        stored = int(head[148:156].strip(b" \0") or b"-1", 8)
    except ValueError:
        return False
    return stored == sum(head[:148]) + 8 * 32 + sum(head[156:512])


class Tar(Archive):
    """The files in a tar, or in all tars of a folder: their names then begin with that of the tar."""

    kind = "tar"

    def __init__(self, path, shards=None):
        """shards: names of the tars in the folder `path`; None: it is a tar itself, maybe a gzip."""
        super().__init__(path)
        self.links, self._unpacked, self._lock = [], None, threading.Lock()
        entries = []
        with damage_named(path):
            for shard in shards or [""]:
                where = os.path.join(path, shard) if shard else path
                with self._opened(where) as file:
                    try:
                        members, links = tar_members(file, file.seek(0, io.SEEK_END))
                    except BadArchive as error:
                        if not shard:
                            raise
                        raise type(error)(f"{shard}: {error}") from None
                prefix = f"{shard}/" if shard else ""
                self.links += [prefix + name for name in links]
                entries += [
                    (prefix + name, name.endswith("/"), (where, offset, size))
                    for name, offset, size in members
                ]
        self.place(entries)

    @contextlib.contextmanager
    def _opened(self, where):
        """The tar as a file that can seek."""
        if self._unpacked is None and _is_gzip(where):
            self._unpacked = _unpacked(where)
        if self._unpacked is None:
            with open_regular(where) as raw:
                yield raw
            return
        with self._lock:
            yield self._unpacked

    def open(self, name, limit=None):
        where, offset, size = self.members[name]
        if limit is not None and size > limit:
            raise TooMuch(f"{name} has {size:,} bytes, and at most {limit:,} are read")
        return _TarMember(self, where, offset, size)

    def size(self, name):
        return self.members[name][2]

    def notes(self):
        yield from super().notes()
        if self.links:
            yield (
                f"{len(self.links):,} link{'s were' if len(self.links) > 1 else ' was'} left out, as nothing "
                f"is unpacked ({examples(self.links)})."
            )

    def labels_of_samples(self, pictures, order):
        return labels_of_samples(self, pictures, order)

    def close(self):
        if self._unpacked is not None:
            self._unpacked.close()


class _TarMember:
    """A member of a tar, read from start to end."""

    def __init__(self, tar, where, offset, size):
        self._tar, self._where, self._offset, self._left = tar, where, offset, size

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def read(self, size):
        size = min(size, self._left)
        with self._tar._opened(self._where) as file:
            file.seek(self._offset)
            pieces, missing = [], size
            while missing:  # an unbuffered file may give less than is asked for
                piece = file.read(missing)
                if not piece:
                    raise BadArchive("it became shorter while it was read")
                pieces.append(piece)
                missing -= len(piece)
        self._offset, self._left = self._offset + size, self._left - size
        return b"".join(pieces)


def shards_in(path, names):
    """The names of the tars among those in a folder, sorted."""
    return sorted(
        name
        for name in names
        if name.lower().endswith(".tar") and os.path.isfile(os.path.join(path, name))
    )


def _is_gzip(path):
    with open_regular(path) as file:
        return file.read(2) == b"\x1f\x8b"


def _unpacked(path):
    """A temporary file with what a gzip holds."""
    most = min(MOST_UNPACKED, FREE + MOST_RATIO * os.path.getsize(path))
    file, total = tempfile.TemporaryFile(), 0
    try:
        with open_stream(path) as stream:
            while piece := stream.read(PIECE):
                total += len(piece)
                if total > most:
                    raise TooMuch(f"it unpacks to more than {most:,} bytes")
                file.write(piece)
    except BaseException:
        file.close()
        raise
    return file


def labels_of_samples(tree, pictures, order):
    """(`Labelled`, names of the files that were read) of pictures with a .cls or .json of the same
    key; None where there are none. A `UsageError` where only some pictures have one."""
    companions = {}
    for name in tree.names:
        key, ending = _key(name)
        if ending in ("cls", "json"):
            companions.setdefault(key, {})[ending] = name
    values, read, without = [], set(), []
    for name in pictures:
        found = companions.get(_key(name)[0], {})
        value = None
        for ending in ("cls", "json"):
            if value is None and ending in found:
                value = _value(_text(tree, found[ending]), ending)
                if value is not None:
                    read.add(found[ending])
        values.append(value)
        if value is None:
            without.append(name)
    if not read:
        return None
    if without:
        raise UsageError(
            f"{examples(without)} of {str(tree.path)!r} ha{'s' if len(without) == 1 else 've'} no class in a "
            ".cls or .json, as the others have: add it, or add --labels none."
        )
    labelled = number_classes(values, order)
    labelled.notes = [*labelled.notes, "The labels are those of the .cls or .json of each image."]
    return labelled, read


def _key(name):
    """(what the files of a sample have in common, the ending that distinguishes them)."""
    folder, file = posixpath.split(name)
    key, _, ending = file.partition(".")
    return f"{folder}/{key}", ending.rpartition(".")[2].lower()


def _text(tree, name):
    with damage_named(tree.path), tree.open(name, LABEL_BYTES) as file:
        data = file.read(LABEL_BYTES)
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise UsageError(
            f"{name} of {str(tree.path)!r} is not UTF-8 text: save it as that, or add --labels none."
        ) from None


def _value(text, ending):
    """The label in the text of a .cls or .json; None without one."""
    if ending == "cls":
        return text.strip() or None
    try:
        record = schema.parse_json(text.encode())
    except schema.Mismatch:
        return None
    found = [record[key] for key in LABELS if key in record] if isinstance(record, dict) else []
    return next((value for value in found if isinstance(value, str | int)), None)
