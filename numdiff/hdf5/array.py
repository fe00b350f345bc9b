"""A dataset of an HDF5 file: whether all of it is stored, and its rows, unpacked."""
import itertools
import math
import struct
import threading
import zlib
from collections import OrderedDict

import h5py
import numpy as np
from h5py import h5d, h5s, h5t, h5z

from ..files import Refused, read_at, read_into

MAX_CHUNK_BYTES = 512 << 20
MAX_LZF_CHUNK_BYTES = 4 << 20  # lzf, which h5py unpacks, can expand a hostile chunk to 88 times its size
MAX_CHUNKS = 1 << 22
MAX_DEFLATE = 1100  # gzip packs at most 1032 bytes into one
CACHE_BYTES = 32 << 20  # of unpacked chunks, or the last one: rows are not read in the portions in which they lie
BLOCK = 1 << 18  # bytes of a checksum taken at a time
ROWS = 64  # a chunk may have room for this many rows although there are fewer
FILTERS = {h5z.FILTER_DEFLATE: "gzip", h5z.FILTER_SHUFFLE: "shuffle", h5z.FILTER_FLETCHER32: "Fletcher-32",
           h5z.FILTER_LZF: "lzf"}
# what h5py and readers raise where the structure is broken
DAMAGE = (OSError, RuntimeError, ValueError, KeyError, TypeError, OverflowError, struct.error, zlib.error)


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
