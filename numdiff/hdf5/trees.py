"""HDF5's trees and heaps: where names, attributes and chunks are found.

old_tree        B-trees of version 1 (III.A.1): groups and chunks of files in the earliest format
tree            B-trees of version 2 (III.A.2): names, attributes and large objects in heaps, chunks
Heap            the fractal heap (III.G), which keeps links and attributes of which there are many, or large ones
global_heap     the objects of a global heap (III.E): strings of variable length
old_names       the names and addresses in a group of the earliest format (III.B, III.D)
"""

import struct

import numpy as np

from ..files import Refused
from .structure import ENTRY, UNDEFINED

MAX_DEPTH = 32  # of a tree
MAX_NAMES, MAX_NAME_BYTES = 1 << 16, 1 << 16  # in a group, or of attributes; of a name
MAX_HELD = 64 << 20  # bytes of blocks of a heap that are kept
MAX_NODE_BYTES, MAX_OBJECT_BYTES = 1 << 20, 64 << 20


def old_tree(source, root, kind, key_bytes):
    """The leaves of a tree of version 1, in order, as uint8 arrays (entries, key_bytes + 8): a key,
    and the address of what it leads to."""
    if root == UNDEFINED:
        return
    waiting, seen = [(root, None)], set()
    while waiting:
        address, level = waiting.pop()
        if address in seen:
            raise Refused("a tree in it is damaged")
        seen.add(address)
        head = source.read(address, 24)
        found, own_level, count = struct.unpack_from("<BBH", head, 4)
        if (
            head[:4] != b"TREE"
            or found != kind
            or own_level > MAX_DEPTH
            or level not in (None, own_level)
        ):
            raise Refused("a tree in it is damaged")
        data = source.read(address + 24, count * (key_bytes + 8))
        entries = np.frombuffer(data, np.uint8).reshape(count, key_bytes + 8)
        if own_level == 0:
            yield entries
        else:
            children = np.ascontiguousarray(entries[:, key_bytes:]).view("<u8").reshape(-1).tolist()
            waiting += [(child, own_level - 1) for child in reversed(children)]


def old_names(source, tree_address, heap_address):
    """(name, address of the object, address of a soft link or None) of each entry in a group of the
    earliest format."""
    head = source.read(heap_address, 32)
    size, _, start = struct.unpack_from("<3Q", head, 8)
    if head[:4] != b"HEAP":
        raise Refused("the names in it are damaged")
    texts = source.read(start, size)
    for entries in old_tree(source, tree_address, 0, 8):
        for address in np.ascontiguousarray(entries[:, 8:]).view("<u8").reshape(-1).tolist():
            head = source.read(address, 8)
            if head[:4] != b"SNOD":
                raise Refused("a group in it is damaged")
            count = int.from_bytes(head[6:8], "little")
            for name, target, kind in struct.iter_unpack(
                "<QQI20x", source.read(address + 8, 40 * count)
            ):
                end = texts.find(b"\0", name, name + MAX_NAME_BYTES)
                if name >= size or end < 0:
                    raise Refused("the names in it are damaged")
                yield texts[name:end], target, kind == 2


def tree(source, address, kind, limit=MAX_NAMES):
    """The records of a tree of version 2, as a list of bytes; kind: its type; limit: of the number
    of records."""
    if address == UNDEFINED:
        return []
    head = source.checked(address, b"BTHD", 38)
    own_kind, node, size, depth = struct.unpack_from("<BIHH", head, 5)
    root, count, total = struct.unpack_from("<QHQ", head, 16)
    if (
        own_kind != kind
        or not size
        or not 10 + 2 * size <= node <= MAX_NODE_BYTES
        or depth > MAX_DEPTH
    ):
        raise Refused("a tree in it is damaged")
    if root == UNDEFINED or total == 0:
        return []
    if total > limit or total * size > source.size:
        raise Refused("a tree in it has too many entries")
    most = [(node - 10) // size]  # records of a node, by its depth
    whole, pointer = most[0], [0]  # records of all below it; bytes of a pointer to a node
    width = _encoded_bytes(most[0])
    for level in range(1, depth + 1):
        pointer.append(8 + width + (_encoded_bytes(whole) if level > 1 else 0))
        most.append((node - 10 - pointer[level]) // (size + pointer[level]))
        whole = (most[level] + 1) * whole + most[level]
        if most[level] < 1:
            raise Refused("a tree in it is damaged")
    records, waiting = [], [(root, count, depth)]
    while waiting:  # in any order: only the records count
        at, count, level = waiting.pop()
        if not 0 < count <= most[level]:
            raise Refused("a tree in it is damaged")
        used = 6 + count * size + (count + 1) * pointer[level] if level else 6 + count * size
        data = source.checked(at, b"BTIN" if level else b"BTLF", used + 4)
        if data[5] != kind:
            raise Refused("a tree in it is damaged")
        records += [data[i : i + size] for i in range(6, 6 + count * size, size)]
        if len(records) > total:
            raise Refused("a tree in it is damaged")
        for i in range(6 + count * size, used, pointer[level]) if level else ():
            child, held = data[i : i + 8], data[i + 8 : i + 8 + width]
            waiting.append(
                (int.from_bytes(child, "little"), int.from_bytes(held, "little"), level - 1)
            )
    if len(records) != total:
        raise Refused("a tree in it is damaged")
    return records


def _encoded_bytes(limit):
    """Bytes that hold the numbers up to a limit."""
    return (limit.bit_length() - 1) // 8 + 1


class Heap:
    """A fractal heap, whose objects are found by their numbers."""

    def __init__(self, source, address):
        head = source.checked(address, b"FRHP", 146)
        self._source, self._address, self._blocks = source, address, {}
        id_bytes, filtered, self._flags, largest, _, self._huge_tree = struct.unpack_from(
            "<HHBIQQ", head, 5
        )
        self._width, self._first, self._most, bits = struct.unpack_from("<HQQH", head, 110)
        self._root, self._rows = struct.unpack_from("<QH", head, 132)
        powers = all(n and not n & n - 1 for n in (self._width, self._first, self._most))
        if (
            filtered
            or not powers
            or not self._first <= self._most <= MAX_NODE_BYTES
            or not 8 < bits <= 64
            or not 4 <= id_bytes <= 32
        ):
            raise Refused("a heap of it is packed or damaged")
        self._offset_bytes = (bits + 7) // 8
        self._length_bytes = min(
            (self._most.bit_length() + 6) // 8, _encoded_bytes(max(largest, 1))
        )
        self._huge = None

    def read(self, number, limit=MAX_OBJECT_BYTES):
        """The bytes of the object with this number, of the heap's own form; limit: of their count."""
        kind = number[0] >> 4 & 3
        if number[0] >> 6 or kind == 3:
            raise Refused("a number in a heap of it is damaged")
        if kind == 2:
            length = (number[0] & 15) + 1
            data = number[1 : 1 + length]
            if len(data) != length or len(number) > 17:
                raise Refused("a number in a heap of it is damaged")
            return data
        if kind == 1:
            return self._read_huge(number[1:9], limit)
        offset = int.from_bytes(number[1 : 1 + self._offset_bytes], "little")
        length = int.from_bytes(number[1 + self._offset_bytes :][: self._length_bytes], "little")
        start, block = self._block_of(offset)
        data = block[offset - start : offset - start + length]
        if len(data) != length or offset - start < self._head_bytes:
            raise Refused("a heap of it is damaged")
        return data

    def _read_huge(self, key, limit):
        if self._huge is None:
            self._huge = {
                record[16:24]: struct.unpack_from("<QQ", record)
                for record in tree(self._source, self._huge_tree, 1)
                if len(record) == 24
            }
        found = self._huge.get(key.ljust(8, b"\0"))
        if found is None or found[1] > limit:
            raise Refused("a heap of it is damaged")
        return self._source.read(*found)

    @property
    def _head_bytes(self):  # of a direct block
        return 13 + self._offset_bytes + (4 if self._flags & 2 else 0)

    def _block_of(self, offset):
        """(offset, bytes) of the block that holds an offset in the heap."""
        address, rows, start = self._root, self._rows, 0
        if rows == 0:
            return 0, self._direct(address, self._first, 0)
        direct_rows = self._most.bit_length() - self._first.bit_length() + 2
        while True:  # each iteration descends into a smaller block
            block = self._indirect(address, rows, start, direct_rows)
            row, row_start, size = 0, start, self._first
            while row < rows and offset >= row_start + self._width * size:
                row_start += self._width * size
                size = size * 2 if row else size
                row += 1
            if row == rows:
                raise Refused("a heap of it is damaged")
            column = (offset - row_start) // size
            at = 13 + self._offset_bytes + 8 * (row * self._width + column)
            address, start = int.from_bytes(block[at : at + 8], "little"), row_start + column * size
            if row < direct_rows:
                return start, self._direct(address, size, start)
            rows = size.bit_length() - (self._first * self._width).bit_length() + 1

    def _direct(self, address, size, start):
        if address not in self._blocks:
            data = bytearray(self._source.read(address, size))
            if self._flags & 2:
                at = 13 + self._offset_bytes
                checksum, data[at : at + 4] = bytes(data[at : at + 4]), bytes(4)
                self._source.check(bytes(data) + checksum, address)
            if (len(self._blocks) + 1) * self._most > MAX_HELD:
                self._blocks.clear()
            self._blocks[address] = bytes(data), size, self._beginning(data, b"FHDB")
        data, own_size, own_start = self._blocks[address]
        if (own_size, own_start) != (size, start):
            raise Refused("a heap of it is damaged")
        return data

    def _indirect(self, address, rows, start, direct_rows):
        if rows > MAX_DEPTH:
            raise Refused("a heap of it is damaged")
        count = 17 + self._offset_bytes + 8 * rows * self._width
        if address not in self._blocks:
            data = self._source.checked(address, b"FHIB", count)
            self._blocks[address] = data, count, self._beginning(data, b"FHIB")
        data, own_count, own_start = self._blocks[address]
        if (own_count, own_start) != (count, start):
            raise Refused("a heap of it is damaged")
        return data

    def _beginning(self, data, signature):
        """The offset in the heap at which a block says that it begins."""
        if data[:4] != signature or int.from_bytes(data[5:13], "little") != self._address:
            raise Refused("a heap of it is damaged")
        return int.from_bytes(data[13 : 13 + self._offset_bytes], "little")


def global_heap(source, address):
    """{number: (offset, size)} of the objects in a global heap collection."""
    head = source.read(address, 16)
    size = int.from_bytes(head[8:16], "little")
    if head[:4] != b"GCOL":
        raise Refused("a heap of it is damaged")
    data, at, objects = source.read(address, size), 16, {}
    while at + 16 <= size:
        number, length = struct.unpack_from("<H6xQ", data, at)
        if number == 0:  # the free space behind the objects
            break
        if at + 16 + length > size:
            raise Refused("a heap of it is damaged")
        objects[number] = (address + at + 16, length)
        source.spend(ENTRY)
        at += 16 + -(-length // 8) * 8
    return objects
