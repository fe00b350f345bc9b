"""Attributes and heaps, as HDF5's file format specification has them (version 3.0, sections III.D, IV.A).

An attribute of variable strings is a list of references to a heap: length, address of the heap, number in it. h5py is
not asked for them, as a damaged heap makes HDF5 loop for ever.
"""
import itertools
import struct

from ..files import Refused, read_at

MAX_STRINGS, MAX_STRING_BYTES = 1 << 20, 64 << 20
MAX_HEADER_BLOCKS, MAX_HEADER_BYTES = 64, 1 << 20  # of an object header


def raw_attribute(file, address, name, count):
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


def heap_objects(file, address, file_size):
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
