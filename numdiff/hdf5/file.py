"""An HDF5 file that is open for reading: its groups, its links, and the attributes of its root."""

import contextlib
import math
import os
import struct

import numpy as np

from ..files import Refused, open_regular, read_at
from . import structure
from .array import DAMAGE, StoredArray, damaged
from .attributes import MAX_STRINGS, read_attribute, variable_strings
from .structure import MAGIC, UNDEFINED, VARIABLE, ObjectHeader, RawFile, root_address
from .trees import MAX_NAME_BYTES, MAX_NAMES, Heap, old_names, tree

HARD, SOFT, EXTERNAL = 0, 1, 64  # kinds of links (IV.A.2.g)
MAX_NAMES_BYTES = 16 << 20  # of a group


def is_hdf5(path):
    """Whether a regular file begins as HDF5 files do; an OSError where it cannot be read."""
    with open_regular(path) as file:
        return read_at(file, 0, len(MAGIC)) == MAGIC


def open_hdf5(path, raw=None):
    """The `File`; raw: the file if it is already open; it is closed with the `File`. An OSError or
    `Refused` where it cannot be read."""
    return File(open_regular(path) if raw is None else raw)


class File:
    """An HDF5 file that is open for reading."""

    def __init__(self, raw):
        self.raw, self.size = raw, os.fstat(raw.fileno()).st_size
        self.source, self._links = RawFile(raw, self.size), {}
        try:
            self._root = ObjectHeader(self.source, root_address(self.source))
            if not self._root.is_group:
                raise Refused("it has no root group")
        except DAMAGE as error:
            raw.close()
            raise damaged(error) from None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def close(self):
        self.raw.close()

    def names(self, group="/"):
        """Names in the root or in one of its groups, sorted; a `Refused` where there is no such
        group."""
        with self._asked():
            return [name.decode() for name in sorted(self._group(group))]

    def array(self, name, group="/"):
        """The `StoredArray` of that name in the root or in one of its groups; None where there is none."""
        with self._asked():
            found = self._open(self._group(group), name)
            return None if found is None else StoredArray(self, found, name)

    def integer(self, name, array=None):
        """An attribute of the root, or of an `StoredArray`, that is one integer."""
        with self._asked():
            found = read_attribute(self._root if array is None else array.header, name)
            if found is None:
                raise Refused(f"it has no attribute {name}")
            if (
                found.dtype is VARIABLE
                or found.dtype.kind not in "iu"
                or found.shape is None
                or math.prod(found.shape) != 1
            ):
                raise Refused(f"its attribute {name} is not one integer")
            return int(np.frombuffer(found.data, found.dtype)[0])

    def strings(self, name):
        """An attribute of the root that is text, or integers, as a list of str; None where there is
        none."""
        with self._asked():
            found = read_attribute(self._root, name)
            if found is None:
                return None
            if found.shape is None:
                return []
            if math.prod(found.shape) > MAX_STRINGS:
                raise Refused(f"its attribute {name} claims {math.prod(found.shape):,} texts")
            if found.dtype is VARIABLE:
                return list(map(_text, variable_strings(self.source, found.data, name)))
            if found.dtype.kind == "f":
                raise Refused(f"its attribute {name} is not text")
            return list(map(_text, np.frombuffer(found.data, found.dtype).tolist()))

    @contextlib.contextmanager
    def _asked(self):
        """Context of one question: what structures it may read is limited, and their damage is a
        `Refused`."""
        self.source.allow()
        try:
            yield
        except DAMAGE as error:
            raise damaged(error) from None

    def _group(self, path):
        """{name: (kind of link, address)} of a group."""
        header = self._root
        links = self._links_of(header)
        for name in path.strip("/").split("/") if path.strip("/") else ():
            header = self._open(links, name)
            if header is None or not header.is_group:
                raise Refused(f"it has no group {name}")
            links = self._links_of(header)
        return links

    def _open(self, links, name):
        """The `ObjectHeader` of the object under a hard link of a group; None where there is none."""
        kind, address = links.get(name.encode(), (None, None))
        if kind is None:
            return None
        if kind != HARD:
            what = {SOFT: "a soft link", EXTERNAL: "a link to another file"}.get(kind, "a link")
            raise Refused(f"`{name}` in it is {what}")
        return ObjectHeader(self.source, address)

    def _links_of(self, header):
        if header.address not in self._links:
            links, total = {}, 0
            for count, (name, link) in enumerate(_read_links(header)):
                links[name], total = link, total + len(name)
                if count == MAX_NAMES or total > MAX_NAMES_BYTES:
                    raise Refused(
                        f"a group of it holds more than {MAX_NAMES:,} names, or very long ones"
                    )
            self._links[header.address] = links
        return self._links[header.address]


def _read_links(header):
    """(name, (kind, address)) of each link of a group, in each of the three forms."""
    for message in header.all(structure.SYMBOL_TABLE):
        for name, address, soft in old_names(header.source, *struct.unpack_from("<QQ", message)):
            yield name, (SOFT if soft else HARD, address)
    yield from map(_link, header.all(structure.LINK))
    for message in header.all(structure.LINK_INFO):
        heap, by_name = struct.unpack_from("<QQ", message, 10 if message[1] & 1 else 2)
        if heap != UNDEFINED:
            objects = Heap(header.source, heap)
            for record in tree(header.source, by_name, 5):
                yield _link(objects.read(record[4:], 2 * MAX_NAME_BYTES))


def _link(data):
    """(name, (kind, address)) of a link message (IV.A.2.g)."""
    version, flags = data[:2]
    if version != 1:
        raise Refused("a link of it is of an unknown form")
    kind, at = (data[2], 3) if flags & 8 else (HARD, 2)
    at += (8 if flags & 4 else 0) + (1 if flags & 16 else 0)
    width = 1 << (flags & 3)
    length, at = int.from_bytes(data[at : at + width], "little"), at + width
    name = data[at : at + length]
    if len(name) != length or not name:
        raise Refused("a link of it is damaged")
    return name, (kind, struct.unpack_from("<Q", data, at + length)[0] if kind == HARD else None)


def _text(value):
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)
