"""The attributes of an object (IV.A.2.m): in its header, or where there are many, or large ones, in
a heap."""

import struct
from typing import NamedTuple

import numpy as np

from ..files import Refused, read_at
from . import structure
from .structure import SHARED, UNDEFINED, VARIABLE
from .trees import Heap, global_heap, tree

MAX_STRINGS, MAX_STRING_BYTES = 1 << 20, 64 << 20


class Attribute(NamedTuple):
    """shape: None where there are no values; dtype: as stored, or `VARIABLE`; data: the values'
    bytes."""

    shape: tuple | None
    dtype: np.dtype | str
    data: bytes


def read_attribute(header, name):
    """The `Attribute` of an object; None where it has none of that name."""
    wanted = name.encode()
    for kind, flags, data in header.messages:
        if kind == structure.ATTRIBUTE:
            if flags & SHARED:
                raise Refused("an attribute of it is stored elsewhere")
            if _name(data)[0] == wanted:
                return _parse(data, name)
    for data in header.all(structure.ATTRIBUTE_INFO):
        heap, by_name = struct.unpack_from("<QQ", data, 4 if data[1] & 1 else 2)
        if heap == UNDEFINED:
            continue
        checksum, objects = structure.lookup3(wanted).to_bytes(4, "little"), None
        for record in tree(header.source, by_name, 8):
            if len(record) != 17 or record[8] & SHARED:
                raise Refused("an attribute of it is stored elsewhere")
            if record[13:] == checksum:
                objects = objects or Heap(header.source, heap)
                found = objects.read(record[:8])
                if _name(found)[0] == wanted:
                    return _parse(found, name)
    return None


def _name(data):
    """(name, where the type begins) of an attribute's message."""
    version, own_flags, size = struct.unpack_from("<BBH", data)
    if version not in (1, 2, 3):
        raise Refused("an attribute of it is of an unknown form")
    at = 9 if version == 3 else 8
    return data[at : at + size].split(b"\0")[0], at + (-(-size // 8) * 8 if version == 1 else size)


def _parse(data, name):
    version, own_flags, _, type_size, space_size = struct.unpack_from("<BBHHH", data)
    if own_flags & 3 and version > 1:
        raise Refused(f"the type of its attribute {name} is stored elsewhere")
    sizes = [-(-n // 8) * 8 if version == 1 else n for n in (type_size, space_size)]
    at = _name(data)[1]
    dtype = structure.datatype(data[at : at + type_size], f"the attribute {name}")
    shape, _ = structure.dataspace(data[at + sizes[0] : at + sizes[0] + space_size])
    width = np.dtype("V16") if dtype is VARIABLE else dtype
    count = 0 if shape is None else structure.bytes_of(shape, width)
    values = data[at + sum(sizes) :][:count]
    if len(values) != count:
        raise Refused(f"its attribute {name} claims {count:,} bytes and has {len(values):,}")
    return Attribute(shape, dtype, values)


def variable_strings(source, data, name):
    """The texts that an attribute's value refers to: each by length, address of a heap, number in
    it."""
    total, heaps = 0, {}
    for length, address, number in struct.iter_unpack("<IQI", data):
        if length == 0:
            yield b""
            continue
        if address not in heaps:
            heaps[address] = global_heap(source, address)
        offset, size = heaps[address].get(number, (0, 0))
        total += length
        if length > size or total > min(MAX_STRING_BYTES, 4 * source.size):
            raise Refused(f"the texts of its attribute {name} are damaged")
        yield read_at(source.raw, offset, length)
