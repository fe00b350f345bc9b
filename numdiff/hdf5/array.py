"""A dataset of an HDF5 file: whether all of it is stored, and its rows, unpacked."""

import itertools
import math
import struct
import threading
import zlib
from collections import OrderedDict

import numpy as np

from ..files import Refused, read_at, read_into
from . import structure
from .chunks import chunked_layout, find_chunks
from .lzf import unpack_lzf
from .structure import UNDEFINED

MAX_CHUNK_BYTES = 512 << 20
# bytes that `all` unpacks of any file; of a larger one four times its size more
MAX_WHOLE = 256 << 20
MAX_CHUNKS = 1 << 22
MAX_PACKED = 1100  # gzip packs at most 1032 bytes into one, lzf 88
# of unpacked chunks, or the last one: rows are not read in the portions of the chunks
CACHE_BYTES = 32 << 20
BLOCK = 1 << 18  # bytes of a checksum taken at a time
ROWS = 64  # a chunk may have room for this many rows although there are fewer
DEFLATE, SHUFFLE, FLETCHER32, LZF = 1, 2, 3, 32000
FILTERS = {DEFLATE: "gzip", SHUFFLE: "shuffle", FLETCHER32: "Fletcher-32", LZF: "lzf"}
# of a structure that is broken
DAMAGE = (OSError, ValueError, IndexError, OverflowError, struct.error, zlib.error)


class StoredArray:
    """A dataset that is completely stored in its HDF5 file. shape, dtype (of the values as `read`
    gives them); plain: each row is stored as it is, so that reading one costs its own bytes only.
    """

    plain, _filters = False, ()

    def __init__(self, file, header, name):
        if not header.is_dataset:
            raise Refused(f"it has no dataset `{name}`, but another object of that name")
        layout = header.one(structure.LAYOUT, f"layout of `{name}`")
        if layout[0] not in (3, 4, 5):
            raise Refused(f"`{name}` in it is stored in a form of the time before HDF5 1.8")
        kind = layout[1]
        if kind == 3:
            raise Refused(f"`{name}` in it is a virtual dataset, whose values are stored elsewhere")
        if header.has(structure.EXTERNAL_FILES):
            raise Refused(f"the values of `{name}` are stored in another file")
        self.header, self.name, self._file, self._raw = header, name, file, file.raw
        self._lock, self._cache, self._held = threading.Lock(), OrderedDict(), 0
        self._stored = structure.datatype(
            header.one(structure.DATATYPE, f"type of `{name}`"), f"`{name}`"
        )
        if self._stored is structure.VARIABLE:
            raise Refused(f"`{name}` in it holds neither numbers nor texts of one length")
        self.dtype = self._stored.newbyteorder("=")
        shape, largest = structure.dataspace(header.one(structure.DATASPACE, f"shape of `{name}`"))
        self.shape = (0,) if shape is None else shape
        self.nbytes = structure.bytes_of(self.shape, self._stored)
        if kind == 0:
            self._check_compact(layout)
        elif kind == 1:
            self._check_contiguous(layout)
        elif kind == 2:
            self._check_chunks(layout, header, self.shape if shape is None else largest)
        else:
            raise Refused(f"`{name}` in it is stored in an unknown way")

    def __len__(self):
        return self.shape[0]

    @property
    def filters(self):
        """How the values are packed, such as "shuffle, gzip"; "" where they are not."""
        return ", ".join(FILTERS[code] for code in self._filters)

    def read(self, start, stop, out=None):
        """Rows start to stop (fewer at the end) as a new array, or written to `out`, C-contiguous
        and of their shape and `dtype`; safe in several threads at once."""
        start, stop = (min(max(n, 0), len(self)) for n in (start, stop))
        shape = (max(stop - start, 0), *self.shape[1:])
        out = np.empty(shape, self.dtype) if out is None else out
        if out.shape != shape or out.dtype != self.dtype or not out.flags.c_contiguous:
            raise ValueError(
                f"rows {start} to {stop} are {self.dtype} {shape}, contiguous; `out` is {out.dtype} "
                f"{out.shape}"
            )
        if 0 in shape:
            return out
        # those of another byte order
        rows = out if self._stored == self.dtype else np.empty(shape, self._stored)
        try:
            self._rows(start, stop, rows)
        except DAMAGE as error:
            raise damaged(error) from None
        if rows is not out:
            out[...] = rows
        return out

    def all(self):
        """All values; a `Refused` where they take far more memory than the file."""
        if self.nbytes > MAX_WHOLE + 4 * self._file.size:
            raise Refused(f"`{self.name}` in it unpacks to {self.nbytes:,} bytes")
        if self.shape == ():
            return self._as_row().reshape(())
        return self.read(0, len(self))

    def _as_row(self):
        self.shape = (1,)
        try:
            return self.read(0, 1)
        finally:
            self.shape = ()

    # Compact and contiguous

    def _check_compact(self, layout):
        size = int.from_bytes(layout[2:4], "little")
        self._values, self._rows = layout[4 : 4 + size], self._compact_rows
        if len(self._values) != size or self.nbytes > size:
            raise self._never_stored()

    def _compact_rows(self, start, stop, rows):
        rows[...] = np.frombuffer(self._values[: self.nbytes], self._stored).reshape(self.shape)[
            start:stop
        ]

    def _check_contiguous(self, layout):
        self._rows, self.plain = self._contiguous_rows, True
        self._offset, size = struct.unpack_from("<QQ", layout, 2)
        if self.nbytes and (
            self._offset == UNDEFINED
            or size < self.nbytes
            or self._offset + self.nbytes > self._file.size
        ):
            raise self._never_stored()

    def _contiguous_rows(self, start, stop, rows):
        self._fill(rows, self._offset + start * (self.nbytes // len(self)))

    def _fill(self, rows, offset):
        """Values of the file from `offset` on, as they are stored."""
        if read_into(self._raw, offset, rows) != rows.nbytes:
            raise Refused("it is truncated")

    def _never_stored(self):
        return Refused(
            f"`{self.name}` in it claims {' × '.join(map(str, self.shape)) or 1} values of {self._stored}, "
            "which were never stored, or not all of them"
        )

    # In chunks

    def _check_chunks(self, layout, header, largest):
        self._rows, file_size, name = self._chunked_rows, self._file.size, self.name
        layout = chunked_layout(layout, len(self.shape), self._stored.itemsize)
        self._chunk, self._chunk_bytes = layout.shape, layout.nbytes
        self._filters = (
            structure.filters(header.one(structure.FILTERS, f"list of filters of `{name}`"))
            if header.has(structure.FILTERS)
            else []
        )
        unknown = [code for code in self._filters if code not in FILTERS]
        if unknown:
            raise Refused(
                f"`{name}` in it is compressed by the filter {unknown[0]}, and numdiff reads gzip and lzf"
            )
        if len(self._filters) > len(FILTERS):
            raise Refused(f"`{name}` in it passed {len(self._filters)} filters")
        row = self.nbytes // max(len(self), 1)
        most = min(MAX_CHUNK_BYTES, max(1 << 20, ROWS * row, 4 * self.nbytes))
        if self._chunk_bytes > most:
            raise Refused(
                f"`{name}` in it has chunks of {self._chunk_bytes:,} bytes, and at most {most:,} are read"
            )
        self._grid = tuple(-(-n // c) for n, c in zip(self.shape, self._chunk, strict=True))
        self.plain = not self._filters and self._chunk[1:] == self.shape[1:]
        count = math.prod(self._grid)
        if count == 0:
            return
        packed = MAX_PACKED if self._filters else 1
        if count > MAX_CHUNKS or count * 8 > file_size or self.nbytes > packed * file_size:
            raise self._never_stored()
        extents = tuple(
            0 if n == UNDEFINED else -(-n // c) for n, c in zip(largest, self._chunk, strict=True)
        )
        where, self._packed, self._masks = find_chunks(
            self._file.source, layout, self._grid, extents, bool(self._filters)
        )
        stored = (where < file_size) & (self._packed <= file_size)
        if not stored.all() or not self._packed.all():
            raise self._never_stored()
        self._where = where.astype(np.int64)
        order = np.argsort(self._where)
        ends = self._where[order] + self._packed[order]
        if (
            ends[-1] > file_size
            or (ends[:-1] > self._where[order][1:]).any()
            or self.nbytes > packed * int(self._packed.sum())
            or not self._filters
            and (self._packed != self._chunk_bytes).any()
        ):
            raise self._never_stored()

    def _chunked_rows(self, start, stop, rows):
        first, last = start // self._chunk[0], (stop - 1) // self._chunk[0]
        for place in itertools.product(range(first, last + 1), *map(range, self._grid[1:])):
            corner = [p * c for p, c in zip(place, self._chunk, strict=True)]
            low, high = max(start, corner[0]), min(stop, corner[0] + self._chunk[0])
            if self.plain:
                skipped = (low - corner[0]) * (self.nbytes // len(self))
                self._fill(rows[low - start : high - start], int(self._where[place[0]]) + skipped)
                continue
            ends = [
                min(n - o, c)
                for n, o, c in zip(self.shape[1:], corner[1:], self._chunk[1:], strict=True)
            ]
            inner = (slice(o, o + e) for o, e in zip(corner[1:], ends, strict=True))
            target = (slice(low - start, high - start), *inner)
            source = (slice(low - corner[0], high - corner[0]), *map(slice, ends))
            # so no other read needs it
            whole = high - low == min(self._chunk[0], len(self) - corner[0])
            rows[target] = (self._unpack if whole else self._unpacked)(place)[source]

    def _unpacked(self, place):
        """A chunk's values; the last ones are cached, as portions of rows seldom end where chunks
        do."""
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
        if code == DEFLATE:
            return zlib.decompressobj().decompress(data, self._chunk_bytes + 64)
        if code == FLETCHER32:
            data, checksum = data[:-4], data[-4:]
            if fletcher32(data) != [
                int.from_bytes(half, "little") % 65535 for half in (checksum[:2], checksum[2:])
            ]:
                raise Refused(f"the checksum of a chunk of `{self.name}` is wrong")
            return data
        if code == LZF:
            return unpack_lzf(data, self._chunk_bytes)
        size = self._stored.itemsize  # shuffle: the first bytes of all values, then the second ones
        whole = len(data) // size * size
        return np.frombuffer(data[:whole], np.uint8).reshape(size, -1).T.tobytes() + data[whole:]


def fletcher32(data):
    """HDF5's checksum: the sum of the big-endian 16-bit words, and the sum of that sum's values;
    modulo 65535."""
    first = second = 0
    for start in range(0, len(data), BLOCK):
        part = data[start : start + BLOCK]
        words = np.frombuffer(part + b"\0" * (len(part) % 2), ">u2").astype(np.uint64)
        second += len(words) * first + int(words @ np.arange(len(words), 0, -1, dtype=np.uint64))
        first += int(words.sum())
    return [first % 65535, second % 65535]


def damaged(error):
    """The `Refused` for what readers raise where a file's structure is broken."""
    if isinstance(error, Refused):
        return error
    lines = str(error).splitlines()
    return Refused(lines[0][:200] if lines else type(error).__name__)
