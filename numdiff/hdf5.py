"""The strict reader of HDF5 files, for datasets, checkpoints and model files.

    with open_hdf5(path) as file:
        images = file.array("images")              # an `Array`: shape and dtype, nothing read yet; None: absent
        rows = images.read(0, 64)
        names = file.strings("classes")            # an attribute of the root

h5py says where things are; the values themselves are read here, from the one open file, so that nothing outside it can
be read and nothing larger than what is stored is ever allocated:
    links        hard links alone: soft and external links, virtual datasets and external storage are refused
    sizes        all that a shape claims must be stored: contiguous data lie within the file, every chunk exists, chunks
                 do not share bytes, and compressed ones unpack to exactly their size
    filters      gzip, shuffle, Fletcher-32 and h5py's lzf; others would be loaded from the machine's libraries
    strings      variable strings lie in a heap whose damage makes HDF5 loop for ever: it is walked here
A `Refused` says why, as part of a sentence.
"""
import contextlib
import itertools
import json
import math
import os
import struct
import subprocess
import sys
import threading
import zlib
from collections import OrderedDict

import h5py
import numpy as np
from h5py import h5a, h5d, h5g, h5l, h5o, h5s, h5t, h5z

from .files import Refused, open_regular, read_at, read_into

MAGIC = b"\x89HDF\r\n\x1a\n"
MAX_CHUNK_BYTES = 512 << 20
MAX_LZF_CHUNK_BYTES = 4 << 20  # lzf, which h5py unpacks, can expand a hostile chunk to 88 times its size
MAX_CHUNKS = 1 << 22
MAX_DEFLATE = 1100  # gzip packs at most 1032 bytes into one
CACHE_BYTES = 32 << 20  # of unpacked chunks, or the last one: rows are not read in the portions in which they lie
BLOCK = 1 << 18  # bytes of a checksum taken at a time
ROWS = 64  # a chunk may have room for this many rows although there are fewer
MAX_STRINGS, MAX_STRING_BYTES = 1 << 20, 64 << 20
MAX_HEADER_BLOCKS, MAX_HEADER_BYTES = 64, 1 << 20  # of an object header
FILTERS = {h5z.FILTER_DEFLATE: "gzip", h5z.FILTER_SHUFFLE: "shuffle", h5z.FILTER_FLETCHER32: "Fletcher-32",
           h5z.FILTER_LZF: "lzf"}
DAMAGE = (OSError, RuntimeError, ValueError, KeyError, TypeError, OverflowError, struct.error, zlib.error)


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
            raw = _raw_attribute(self.raw, h5o.get_info(self._h5.id).addr, name, count)
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
                heaps[address] = _heap_objects(self.raw, address, self.size)
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
            done = subprocess.run([sys.executable, "-c", code, str(handle), name], pass_fds=[handle], timeout=5,
                                  stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True)
            return json.loads(done.stdout)
        except (subprocess.SubprocessError, ValueError):
            raise Refused(f"its attribute {name} cannot be read") from None


class Array:
    """A dataset that is completely stored in its HDF5 file. shape, dtype (of the values as `read` gives them); plain:
    each row lies in the file as it is, so that reading one costs its own bytes only."""

    plain, _filters = False, ()

    def __init__(self, file, identifier, name):
        if not isinstance(identifier, h5d.DatasetID):
            raise Refused(f"it has no dataset `{name}`, but another object of that name")
        plan = identifier.get_create_plist()
        if plan.get_layout() == h5d.VIRTUAL:
            raise Refused(f"`{name}` in it is a virtual dataset, whose values lie elsewhere")
        if plan.get_external_count():
            raise Refused(f"the values of `{name}` lie in another file")
        self.id, self.name, self._file, self._raw = identifier, name, file, file.raw
        self._lock, self._cache, self._held = threading.Lock(), OrderedDict(), 0
        self._set_type(identifier.get_type())
        self.shape = tuple(map(int, identifier.shape)) if identifier.shape is not None else (0,)
        self.nbytes = math.prod(self.shape) * self._stored.itemsize
        {h5d.COMPACT: self._check_compact, h5d.CONTIGUOUS: self._check_contiguous,
         h5d.CHUNKED: self._check_chunks}[plan.get_layout()](plan)

    def __len__(self):
        return self.shape[0]

    @property
    def filters(self):
        """How the values are packed, such as "shuffle, gzip"; "" where they are not."""
        return ", ".join(FILTERS[code] for code in self._filters)

    def read(self, start, stop, out=None):
        """Rows start to stop (fewer at the end) as a new array, or written to `out`, C-contiguous and of their shape
        and `dtype`; safe in several threads at once."""
        start, stop = (min(max(n, 0), len(self)) for n in (start, stop))
        shape = (max(stop - start, 0), *self.shape[1:])
        out = np.empty(shape, self.dtype) if out is None else out
        if out.shape != shape or out.dtype != self.dtype or not out.flags.c_contiguous:
            raise ValueError(f"rows {start} to {stop} are {self.dtype} {shape}, contiguous; `out` is {out.dtype} "
                             f"{out.shape}")
        if 0 in shape:
            return out
        rows = out if self._stored == self.dtype else np.empty(shape, self._stored)  # those of another byte order
        try:
            self._rows(start, stop, rows)
        except DAMAGE as error:
            raise damaged(error) from None
        if rows is not out:
            out[...] = rows
        return out

    def all(self):
        """All values."""
        if self.shape == ():
            return self._as_row().reshape(())
        return self.read(0, len(self))

    def _as_row(self):
        self.shape = (1,)
        try:
            return self.read(0, 1)
        finally:
            self.shape = ()

    def _set_type(self, kind):
        number = kind.get_class() in (h5t.INTEGER, h5t.FLOAT)
        if not number and (kind.get_class() != h5t.STRING or kind.is_variable_str()):
            raise Refused(f"`{self.name}` in it holds neither numbers nor texts of one length")
        self._stored = kind.dtype
        if number and (self._stored.itemsize > 8 or not h5t.py_create(self._stored).equal(kind)):
            raise Refused(f"`{self.name}` in it holds numbers of an unusual format")
        if not number:  # h5py's dtype of a text carries its encoding, which a plain one does not need
            self._stored = np.dtype(f"S{kind.get_size()}")
        self.dtype = self._stored.newbyteorder("=")

    # Compact and contiguous

    def _check_compact(self, plan):
        self._rows = self._compact_rows
        if self.nbytes > min(1 << 16, self._file.size):
            raise self._never_stored()

    def _compact_rows(self, start, stop, rows):
        values = np.empty(self.id.shape, self._stored)
        self.id.read(h5s.ALL, h5s.ALL, values)
        rows[...] = values.reshape(self.shape)[start:stop]

    def _check_contiguous(self, plan):
        self._rows, self.plain = self._contiguous_rows, True
        self._offset = self.id.get_offset()
        if self.nbytes and (self._offset is None or self._offset + self.nbytes > self._file.size):
            raise self._never_stored()

    def _contiguous_rows(self, start, stop, rows):
        self._fill(rows, self._offset + start * (self.nbytes // len(self)))

    def _fill(self, rows, offset):
        """Values of the file from `offset` on, as they are stored."""
        if read_into(self._raw, offset, rows) != rows.nbytes:
            raise Refused("it is truncated")

    def _never_stored(self):
        return Refused(f"`{self.name}` in it claims {' × '.join(map(str, self.shape)) or 1} values of {self._stored}, "
                       "which were never stored, or not all of them")

    # In chunks

    def _check_chunks(self, plan):
        self._rows, file_size, name = self._chunked_rows, self._file.size, self.name
        self._chunk = tuple(map(int, plan.get_chunk()))
        self._chunk_bytes = math.prod(self._chunk) * self._stored.itemsize
        self._filters = [plan.get_filter(i)[0] for i in range(plan.get_nfilters())]
        unknown = [code for code in self._filters if code not in FILTERS]
        if unknown:
            raise Refused(f"`{name}` in it is compressed by the filter {unknown[0]}, and numdiff reads gzip and lzf")
        if len(self._filters) > len(FILTERS):
            raise Refused(f"`{name}` in it passed {len(self._filters)} filters")
        row = self.nbytes // max(len(self), 1)
        lzf = h5z.FILTER_LZF in self._filters
        most = MAX_LZF_CHUNK_BYTES if lzf else min(MAX_CHUNK_BYTES, max(1 << 20, ROWS * row, 4 * self.nbytes))
        if self._chunk_bytes > most:
            raise Refused(f"`{name}` in it has chunks of {self._chunk_bytes:,} bytes, and at most {most:,} are read")
        self._grid = tuple(-(-n // c) for n, c in zip(self.shape, self._chunk, strict=True))
        self.plain = not self._filters and self._chunk[1:] == self.shape[1:]
        count = math.prod(self._grid)
        if count == 0:
            return
        packed = MAX_DEFLATE if self._filters else 1
        if count > MAX_CHUNKS or count * 8 > file_size or self.nbytes > packed * file_size \
                or self.id.get_num_chunks() != count:
            raise self._never_stored()
        self._where, self._packed = np.zeros(count, np.int64), np.zeros(count, np.int64)
        self._masks, number = np.zeros(count, np.uint32), 0
        for info in self._chunk_infos(count):
            place = [o // c for o, c in zip(info.chunk_offset, self._chunk, strict=True)]
            if any(p >= g for p, g in zip(place, self._grid, strict=True)):
                raise self._never_stored()
            number = int(np.ravel_multi_index(place, self._grid))
            if info.byte_offset is None or info.byte_offset + info.size > file_size:
                raise self._never_stored()
            self._where[number], self._packed[number] = info.byte_offset, info.size
            self._masks[number] = info.filter_mask
        total = int(self._packed.sum())
        if not self._packed.all() or total > file_size or self.nbytes > packed * total \
                or not self._filters and (self._packed != self._chunk_bytes).any():
            raise self._never_stored()

    def _chunk_infos(self, count):
        if hasattr(self.id, "chunk_iter"):  # since h5py 3.8: one pass over the index
            found = []
            self.id.chunk_iter(found.append)
            return found
        return (self.id.get_chunk_info(i) for i in range(count))

    def _chunked_rows(self, start, stop, rows):
        first, last = start // self._chunk[0], (stop - 1) // self._chunk[0]
        for place in itertools.product(range(first, last + 1), *map(range, self._grid[1:])):
            corner = [p * c for p, c in zip(place, self._chunk, strict=True)]
            low, high = max(start, corner[0]), min(stop, corner[0] + self._chunk[0])
            if self.plain:
                skipped = (low - corner[0]) * (self.nbytes // len(self))
                self._fill(rows[low - start:high - start], int(self._where[place[0]]) + skipped)
                continue
            ends = [min(n - o, c) for n, o, c in zip(self.shape[1:], corner[1:], self._chunk[1:], strict=True)]
            inner = (slice(o, o + e) for o, e in zip(corner[1:], ends, strict=True))
            target = (slice(low - start, high - start), *inner)
            source = (slice(low - corner[0], high - corner[0]), *map(slice, ends))
            whole = high - low == min(self._chunk[0], len(self) - corner[0])  # so that nobody returns to it
            rows[target] = (self._unpack if whole else self._unpacked)(place)[source]

    def _unpacked(self, place):
        """A chunk's values; the last ones are cached, as portions of rows seldom end where chunks do."""
        with self._lock:
            if place in self._cache:
                self._cache.move_to_end(place)
                return self._cache[place]
        chunk = self._unpack(place)
        with self._lock:
            self._cache[place] = chunk
            while len(self._cache) > 1 and len(self._cache) * self._chunk_bytes > CACHE_BYTES:
                self._cache.popitem(last=False)
        return chunk

    def _unpack(self, place):
        if h5z.FILTER_LZF in self._filters:
            corner = [p * c for p, c in zip(place, self._chunk, strict=True)]
            part = tuple(slice(o, min(o + c, n)) for o, c, n in zip(corner, self._chunk, self.shape, strict=True))
            return h5py.Dataset(self.id)[part]
        number = int(np.ravel_multi_index(place, self._grid))
        size, mask = int(self._packed[number]), int(self._masks[number])
        if size > 2 * self._chunk_bytes + 4096:  # gzip makes incompressible data a little longer
            raise Refused(f"a chunk of `{self.name}` is larger than its values")
        data = read_at(self._raw, int(self._where[number]), size)
        for i, code in reversed(list(enumerate(self._filters))):
            if not mask >> i & 1:
                data = self._undo(code, data)
        if len(data) != self._chunk_bytes:
            raise Refused(f"a chunk of `{self.name}` does not have the size of its values")
        return np.frombuffer(data, self._stored).reshape(self._chunk)

    def _undo(self, code, data):
        if code == h5z.FILTER_DEFLATE:
            return zlib.decompressobj().decompress(data, self._chunk_bytes + 64)
        if code == h5z.FILTER_FLETCHER32:
            data, checksum = data[:-4], data[-4:]
            if fletcher32(data) != [int.from_bytes(half, "little") % 65535 for half in (checksum[:2], checksum[2:])]:
                raise Refused(f"the checksum of a chunk of `{self.name}` is wrong")
            return data
        size = self._stored.itemsize  # shuffle: the first bytes of all values, then the second ones
        whole = len(data) // size * size
        return np.frombuffer(data[:whole], np.uint8).reshape(size, -1).T.tobytes() + data[whole:]


def fletcher32(data):
    """HDF5's checksum: the sum of the big-endian 16-bit words, and the sum of that sum's values; modulo 65535."""
    first = second = 0
    for start in range(0, len(data), BLOCK):
        part = data[start:start + BLOCK]
        words = np.frombuffer(part + b"\0" * (len(part) % 2), ">u2").astype(np.uint64)
        second += len(words) * first + int(words @ np.arange(len(words), 0, -1, dtype=np.uint64))
        first += int(words.sum())
    return [first % 65535, second % 65535]


def damaged(error):
    """The `Refused` for what h5py raises where a file's structure is broken."""
    if isinstance(error, Refused):
        return error
    lines = str(error).strip("'\"").splitlines()
    return Refused(lines[0][:200] if lines else type(error).__name__)


def _text(value):
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


# Attributes, as HDF5's file format specification has them (version 3.0, sections III.D, IV.A) -------------------------

def _raw_attribute(file, address, name, count):
    """The bytes of an attribute's value of `count` variable strings; None where it is not in the object header."""
    for kind, flags, message in _messages(file, address):
        if kind != 0x0C or flags & 2:  # an attribute; shared ones are stored apart
            continue
        version, own_flags, name_size, type_size, space_size = struct.unpack_from("<BBHHH", message)
        at = 9 if version == 3 else 8
        if message[at:at + name_size].split(b"\0")[0] != name.encode():
            continue
        if own_flags & 3 and version > 1:
            return None
        sizes = [-(-n // 8) * 8 if version == 1 else n for n in (name_size, type_size, space_size)]
        value = message[at + sum(sizes):][:16 * count]
        if len(value) != 16 * count:
            raise Refused(f"its attribute {name} is damaged")
        return value
    return None


def _messages(file, address):
    """(type, flags, bytes) of each message of an object header, in any version."""
    head = read_at(file, address, 40)
    ordered = False
    if head[:4] == b"OHDR":
        flags = head[5]
        at = 6 + (16 if flags & 0x20 else 0) + (4 if flags & 0x10 else 0)
        width = 1 << (flags & 3)
        size, ordered = int.from_bytes(head[at:at + width], "little"), bool(flags & 4)
        blocks, modern = [(address + at + width, size)], True
    else:
        size, blocks, modern = int.from_bytes(head[8:12], "little"), [], False
        blocks.append((address + 16, size))
    for number in itertools.count():
        if number == len(blocks):
            return
        if number == MAX_HEADER_BLOCKS or blocks[number][1] > MAX_HEADER_BYTES:
            raise Refused("its object header is damaged")
        data, at = read_at(file, *blocks[number]), 0
        length = (6 if ordered else 4) if modern else 8
        while at + length <= len(data):
            kind, size, flags = struct.unpack_from("<BHB" if modern else "<HHB", data, at)
            message = data[at + length:at + length + size]
            at += length + size
            if kind == 0x10 and len(message) >= 16:  # it goes on elsewhere
                start, size = struct.unpack_from("<QQ", message)
                blocks.append((start + 4, size - 8) if modern and size >= 8 else (start, size))
            yield kind, flags, message


def _heap_objects(file, address, file_size):
    """{number: (offset, size)} of the objects in a global heap collection."""
    head = read_at(file, address, 16) if address < file_size else b""
    size = int.from_bytes(head[8:16], "little")
    if head[:4] != b"GCOL" or address + size > file_size or size > MAX_STRING_BYTES:
        raise Refused("a heap of it is damaged")
    data, at, objects = read_at(file, address, size), 16, {}
    while at + 16 <= size:
        number, length = struct.unpack_from("<H6xQ", data, at)
        if number == 0:  # the free space behind the objects
            break
        if at + 16 + length > size or len(objects) > MAX_STRINGS:
            raise Refused("a heap of it is damaged")
        objects[number] = (address + at + 16, length)
        at += 16 + -(-length // 8) * 8
    return objects
