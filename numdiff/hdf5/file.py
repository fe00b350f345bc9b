"""An HDF5 file that is open for reading: its groups, its links, and the attributes of its root."""
import contextlib
import itertools
import json
import math
import os
import struct
import subprocess

import h5py
import numpy as np
from h5py import h5a, h5g, h5l, h5o, h5s, h5t

from ..children import python_command
from ..files import Refused, open_regular, read_at
from .array import DAMAGE, Array, damaged
from .attributes import MAX_STRING_BYTES, MAX_STRINGS, heap_objects, raw_attribute

MAGIC = b"\x89HDF\r\n\x1a\n"


def is_hdf5(path):
    """Whether a regular file begins as HDF5 files do; an OSError where it cannot be read."""
    with open_regular(path) as file:
        return read_at(file, 0, len(MAGIC)) == MAGIC


def open_hdf5(path, raw=None):
    """The `File`; raw: the file if it is already open; it is closed with the `File`. An OSError or `Refused` where it
    cannot be read."""
    return File(open_regular(path) if raw is None else raw)


class File:
    """An HDF5 file that is open for reading."""

    def __init__(self, raw):
        self.raw, self.size, self._h5 = raw, os.fstat(raw.fileno()).st_size, None
        try:
            head = read_at(raw, 0, 24)
            if head[:8] != MAGIC:
                raise Refused("it is not an HDF5 file")
            sizes = head[13:15] if head[8:9] in (b"\0", b"\1") else head[9:11]
            if sizes != b"\x08\x08":
                raise Refused("its addresses are not of 8 bytes")
            self._h5 = h5py.File(raw, "r")
        except Refused:
            raw.close()
            raise
        except DAMAGE as error:
            raw.close()
            raise damaged(error) from None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def __del__(self):  # a dataset may stay open to the end of the program, as in short scripts
        with contextlib.suppress(Exception):
            self.close()

    def close(self):
        if self._h5 is not None:
            self._h5.close()
        self.raw.close()

    def names(self, group="/"):
        """Names in the root or in one of its groups; a `Refused` where there is no such group."""
        try:
            names = [bytes(name) for name in itertools.islice(self._group(group), MAX_STRINGS)]
            return [name.decode() for name in names]
        except DAMAGE as error:
            raise damaged(error) from None

    def array(self, name, group="/"):
        """The `Array` of that name in the root or in one of its groups; None where there is none."""
        try:
            found = self._open(self._group(group), name)
            return None if found is None else Array(self, found, name)
        except DAMAGE as error:
            raise damaged(error) from None

    def integer(self, name, array=None):
        """An attribute of the root, or of an `Array`, that is one integer."""
        try:
            attribute = self._attribute(name, self._h5.id if array is None else array.id)
            if attribute is None:
                raise Refused(f"it has no attribute {name}")
            if attribute.get_type().get_class() != h5t.INTEGER or math.prod(attribute.shape) != 1:
                raise Refused(f"its attribute {name} is not one integer")
            value = np.empty(attribute.shape, np.int64)
            attribute.read(value)
            return int(value.reshape(-1)[0])
        except DAMAGE as error:
            raise damaged(error) from None

    def strings(self, name):
        """An attribute of the root that is text, or integers, as a list of str; None where there is none."""
        try:
            attribute = self._attribute(name, self._h5.id)
            if attribute is None:
                return None
            count = attribute.get_space().get_simple_extent_npoints()
            if attribute.get_space().get_simple_extent_type() == h5s.NULL:
                return []
            kind = attribute.get_type()
            if count > MAX_STRINGS or kind.get_size() * count > min(MAX_STRING_BYTES, self.size):
                raise Refused(f"its attribute {name} claims {count:,} texts")
            if kind.get_class() == h5t.INTEGER or (kind.get_class() == h5t.STRING and not kind.is_variable_str()):
                return list(map(_text, np.atleast_1d(np.asarray(self._h5.attrs[name])).tolist()))
            if kind.get_class() != h5t.STRING:
                raise Refused(f"its attribute {name} is not text")
            raw = raw_attribute(self.raw, h5o.get_info(self._h5.id).addr, name, count)
            return self._by_h5py(name) if raw is None else list(map(_text, self._variable_strings(raw, name)))
        except DAMAGE as error:
            raise damaged(error) from None

    def _group(self, path):
        group = h5g.open(self._h5.id, b"/")
        for name in path.strip("/").split("/") if path.strip("/") else ():
            group = self._open(group, name)
            if not isinstance(group, h5g.GroupID):
                raise Refused(f"it has no group {name}")
        return group

    @staticmethod
    def _open(group, name):
        """The object under a hard link of a group; None where there is none."""
        encoded = name.encode()
        if encoded not in group:
            return None
        kind = group.links.get_info(encoded).type
        if kind != h5l.TYPE_HARD:
            what = {h5l.TYPE_SOFT: "a soft link", h5l.TYPE_EXTERNAL: "a link to another file"}.get(kind, "a link")
            raise Refused(f"`{name}` in it is {what}")
        return h5o.open(group, encoded)

    @staticmethod
    def _attribute(name, owner):
        return h5a.open(owner, name.encode()) if h5a.exists(owner, name.encode()) else None

    def _variable_strings(self, raw, name):
        """The texts that an attribute's value refers to: each by length, address of a heap, number in it."""
        total, heaps = 0, {}
        for length, address, number in struct.iter_unpack("<IQI", raw):
            if length == 0:
                yield b""
                continue
            if address not in heaps:
                heaps[address] = heap_objects(self.raw, address, self.size)
            offset, size = heaps[address].get(number, (0, 0))
            total += length
            if length > size or total > min(MAX_STRING_BYTES, 4 * self.size):
                raise Refused(f"the texts of its attribute {name} are damaged")
            yield read_at(self.raw, offset, length)

    def _by_h5py(self, name):
        """The same for an attribute that is stored apart, as those of thousands of texts are.

        That is a tree in a heap, which h5py reads in a separate process with limited memory and time.
        """
        code = ("import json, resource, sys\nimport h5py, numpy as np\n"
                "resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))\n"
                "file = h5py.File(f'/dev/fd/{sys.argv[1]}', 'r', locking=False)\n"
                "names = [n.decode('utf-8', 'replace') if isinstance(n, bytes) else str(n)\n"
                "         for n in np.atleast_1d(file.attrs[sys.argv[2]])]\n"
                "print(json.dumps(names))\n")
        handle = self.raw.fileno()
        try:
            done = subprocess.run(python_command(code, handle, name), pass_fds=[handle], timeout=5,
                                  stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True)
            return json.loads(done.stdout)
        except (subprocess.SubprocessError, ValueError):
            raise Refused(f"its attribute {name} cannot be read") from None


def _text(value):
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)
