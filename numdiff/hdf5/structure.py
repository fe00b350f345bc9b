"""The bytes of an HDF5 file as objects: superblock, object headers, and the messages in them.

Names and layouts are those of "HDF5 File Format Specification, Version 3.0", whose sections are
cited. Everything is little-endian, and addresses and lengths have 8 bytes. Nothing here trusts a
size: `RawFile.read` gives bytes of the file or refuses. What one question may read is limited, so
that no damage leads in circles and a hostile file takes seconds.
"""

import math
import struct

import numpy as np

from ..files import Refused, read_at

MAGIC = b"\x89HDF\r\n\x1a\n"
UNDEFINED = (1 << 64) - 1  # an address of nothing
MAX_BLOCK = 64 << 20  # bytes of one structure
MAX_HEADER_BYTES, MAX_MESSAGES = 64 << 20, 1 << 16  # of an object header, and its blocks
# of a question, in µs on one core of 2024: an index of four million chunks takes 1.5 million
WORK = 4_000_000
# work of a read, bytes a unit, work of an entry of a heap
READ, READ_BYTES, CHECKED_BYTES, ENTRY = 10, 1000, 3, 4
MAX_RANK, MAX_TYPE_BYTES = 32, (1 << 31) - 1
# IV.A.2
DATASPACE, LINK_INFO, DATATYPE, LINK, EXTERNAL_FILES, LAYOUT = 0x01, 0x02, 0x03, 0x06, 0x07, 0x08
FILTERS, ATTRIBUTE, CONTINUATION, SYMBOL_TABLE, ATTRIBUTE_INFO = 0x0B, 0x0C, 0x10, 0x11, 0x15
SHARED = 2  # flag of a message that is stored elsewhere
VARIABLE = "variable"  # the type of strings that are stored in a heap
# size of a float: bits of the exponent's place, of the exponent, of the fraction; bias of the
# exponent
FLOATS = {2: (10, 5, 10, 15), 4: (23, 8, 23, 127), 8: (52, 11, 52, 1023)}


class RawFile:
    """The open raw file, from which structures are read."""

    def __init__(self, raw, size):
        self.raw, self.size = raw, size
        self.allow()

    def allow(self):
        """Allow the work of one question from now on."""
        self._left = WORK

    def spend(self, work):
        """Count work; a `Refused` where it is too much."""
        self._left -= work
        if self._left < 0:
            raise Refused("its structure leads in circles, or is too large")

    def read(self, address, count):
        """`count` bytes at `address`; a `Refused` where the file does not have them."""
        if not 0 <= count <= MAX_BLOCK or address + count > self.size:
            raise Refused("its structure leads out of the file")
        self.spend(READ + count // READ_BYTES)
        data = read_at(self.raw, address, count)
        if len(data) != count:
            raise Refused("it is truncated")
        return data

    def checked(self, address, signature, count):
        """A structure of `count` bytes that begins with a signature and ends with its checksum, of
        4 bytes."""
        data = self.read(address, count)
        if data[:4] != signature:
            raise Refused(f"its structure is damaged: no {signature.decode()} at byte {address}")
        self.check(data, address)
        return data

    def check(self, data, address):
        """A `Refused` unless the last 4 bytes are the checksum of those before."""
        self.spend(len(data) // CHECKED_BYTES)
        if lookup3(data[:-4]) != int.from_bytes(data[-4:], "little"):
            raise Refused(f"its structure is damaged: the checksum at byte {address} is wrong")


def lookup3(data):
    """HDF5's checksum of structures: Bob Jenkins' lookup3 (burtleburtle.net/bob/c/lookup3.c),
    `hashlittle`, from 0."""
    a = b = c = 0xDEADBEEF + len(data) & 0xFFFFFFFF
    if not data:
        return c
    words = struct.unpack(f"<{-(-len(data) // 12) * 3}I", data + bytes(-len(data) % 12))
    for i in range(0, len(words) - 3, 3):
        a, b, c = (
            a + words[i] & 0xFFFFFFFF,
            b + words[i + 1] & 0xFFFFFFFF,
            c + words[i + 2] & 0xFFFFFFFF,
        )
        a = a - c & 0xFFFFFFFF ^ (c << 4 & 0xFFFFFFFF | c >> 28)
        c = c + b & 0xFFFFFFFF
        b = b - a & 0xFFFFFFFF ^ (a << 6 & 0xFFFFFFFF | a >> 26)
        a = a + c & 0xFFFFFFFF
        c = c - b & 0xFFFFFFFF ^ (b << 8 & 0xFFFFFFFF | b >> 24)
        b = b + a & 0xFFFFFFFF
        a = a - c & 0xFFFFFFFF ^ (c << 16 & 0xFFFFFFFF | c >> 16)
        c = c + b & 0xFFFFFFFF
        b = b - a & 0xFFFFFFFF ^ (a << 19 & 0xFFFFFFFF | a >> 13)
        a = a + c & 0xFFFFFFFF
        c = c - b & 0xFFFFFFFF ^ (b << 4 & 0xFFFFFFFF | b >> 28)
        b = b + a & 0xFFFFFFFF
    a, b, c = a + words[-3] & 0xFFFFFFFF, b + words[-2] & 0xFFFFFFFF, c + words[-1] & 0xFFFFFFFF
    for bits in (14, 11, 25, 16, 4, 14, 24):
        c = (c ^ b) - (b << bits | b >> 32 - bits) & 0xFFFFFFFF
        a, b, c = b, c, a
    return b


def root_address(source):
    """The address of the root's object header, from the superblock (II); a `Refused` for another
    kind of file."""
    head = source.read(0, min(96, source.size))
    if head[:8] != MAGIC:
        raise Refused("it is not an HDF5 file")
    version = head[8] if len(head) > 8 else UNDEFINED
    sizes = head[13:15] if version < 2 else head[9:11]
    if version < 4 and sizes != b"\x08\x08":
        raise Refused("its addresses are not of 8 bytes")
    if version < 2:
        at = 24 + 4 * version
        base, _, end, _, _, root = struct.unpack_from("<6Q", head, at)
    elif version < 4:
        source.check(head[:48], 0)
        if version == 3 and head[11] & 1:
            raise Refused("the program that wrote it has not closed it")
        base, _, end, root = struct.unpack_from("<4Q", head, 12)
    else:
        raise Refused(
            f"it has version {version} of HDF5's format, and numdiff reads versions 0 to 3"
        )
    if base:
        raise Refused("its addresses do not count from its beginning")
    if end > source.size:
        raise Refused("it is truncated")
    return root


# Object headers -----------------------------------------------------------------------------------


class ObjectHeader:
    """The messages of an object (IV.A.1): a group or a dataset."""

    def __init__(self, source, address):
        self.source, self.address, self.messages = source, address, list(_messages(source, address))

    def all(self, kind):
        """The bytes of each message of a kind."""
        return [data for each, flags, data in self.messages if each == kind and not flags & SHARED]

    def one(self, kind, what):
        """The bytes of the message of a kind; a `Refused`, which says what it is, where there is
        none."""
        for each, flags, data in self.messages:
            if each == kind and flags & SHARED and kind == DATATYPE:
                return _named_type(self.source, data)
            if each == kind and flags & SHARED:
                raise Refused(f"the {what} is stored elsewhere")
            if each == kind:
                return data
        raise Refused(f"it has no {what}")

    def has(self, kind):
        return any(each == kind for each, _, _ in self.messages)

    @property
    def is_group(self):
        return self.has(SYMBOL_TABLE) or self.has(LINK_INFO)

    @property
    def is_dataset(self):
        return self.has(LAYOUT)


def _messages(source, address):
    """(type, flags, bytes) of each message of an object header, in either version."""
    head = source.read(address, min(40, source.size - address))
    ordered = False
    if head[:4] == b"OHDR":
        if head[4] != 2:
            raise Refused("its object header is of an unknown version")
        flags = head[5]
        at = 6 + (16 if flags & 0x20 else 0) + (4 if flags & 0x10 else 0)
        width = 1 << (flags & 3)
        size, ordered = int.from_bytes(head[at : at + width], "little"), bool(flags & 4)
        blocks, modern, skipped = [(address, at + width + size + 4)], True, at + width
    else:
        if head[:1] != b"\1":
            raise Refused(f"its object header at byte {address} is damaged")
        blocks, modern, skipped = [(address + 16, int.from_bytes(head[8:12], "little"))], False, 0
    length, count, total = (6 if ordered else 4) if modern else 8, 0, 0
    for number, (start, size) in enumerate(blocks):  # which grow meanwhile
        total += size
        if number == MAX_MESSAGES or total > MAX_HEADER_BYTES:
            raise Refused("its object header is damaged")
        if modern:
            data = source.checked(start, b"OCHK" if number else b"OHDR", size)[:-4]
        else:
            data = source.read(start, size)
        at = skipped if number == 0 else 4 if modern else 0
        while at + length <= len(data):
            kind, size, flags = struct.unpack_from("<BHB" if modern else "<HHB", data, at)
            message = data[at + length : at + length + size]
            if len(message) != size:
                raise Refused("its object header is damaged")
            at, count = at + length + size, count + 1
            if count > MAX_MESSAGES:
                raise Refused("its object header is damaged")
            if kind == CONTINUATION and size >= 16:
                blocks.append(struct.unpack_from("<QQ", message))
            yield kind, flags, message


def _named_type(source, data):
    """The message of a type that is an object with a name, from the reference to it (IV.A.2, shared
    messages)."""
    version, kind = data[:2]
    if version == 3 and kind != 2:
        raise Refused("a type of it is stored elsewhere")
    (address,) = struct.unpack_from("<Q", data, 8 if version == 1 else 2)
    found = ObjectHeader(source, address).all(DATATYPE)
    if not found:
        raise Refused("a type of it is stored elsewhere")
    return found[0]


# Messages -----------------------------------------------------------------------------------------


def dataspace(data):
    """(shape, largest shape) of a dataspace message (IV.A.2.b), where an unlimited axis is
    `UNDEFINED`; shape is None where there are no values."""
    version, rank, flags = data[:3]
    if version not in (1, 2) or rank > MAX_RANK or flags & 2:
        raise Refused("a dataspace of it is of an unknown form")
    if version == 2 and data[3] == 2:
        return None, None
    at = 8 if version == 1 else 4
    shape = struct.unpack_from(f"<{rank}Q", data, at)
    most = struct.unpack_from(f"<{rank}Q", data, at + 8 * rank) if flags & 1 else shape
    return shape, tuple(max(n, m) for n, m in zip(shape, most, strict=True))


def datatype(data, name):
    """The NumPy dtype of a datatype message (IV.A.2.d), as stored, or `VARIABLE`. name: whose it
    is, for a `Refused`"""
    kind, first, second, _, size = struct.unpack_from("<BBBBI", data)
    kind, order = kind & 15, ">" if first & 1 else "<"
    if kind == 9 and first & 15 == 1 and size == 16:
        return VARIABLE
    if kind == 3 and 0 < size <= MAX_TYPE_BYTES:
        return np.dtype(f"S{size}")
    if kind == 0:
        if size in (1, 2, 4, 8) and struct.unpack_from("<HH", data, 8) == (0, 8 * size):
            return np.dtype(f"{order if size > 1 else ''}{'i' if first & 8 else 'u'}{size}")
    elif kind == 1:
        place, exponent, fraction, bias = FLOATS.get(size, (0,) * 4)
        usual = (0, 8 * size, place, exponent, 0, fraction, bias)
        if (
            size in FLOATS
            and struct.unpack_from("<HHBBBBI", data, 8) == usual
            and second == 8 * size - 1
            and not first & 0x40
            and first >> 4 & 3 == 2
        ):
            return np.dtype(f"{order}f{size}")
    else:
        raise Refused(f"{name} in it holds neither numbers nor texts of one length")
    raise Refused(f"{name} in it holds numbers of an unusual format")


def filters(data):
    """[number of each filter], in the order in which values passed them when they were written
    (IV.A.2.l)."""
    version, count = data[:2]
    if version not in (1, 2):
        raise Refused("a list of filters in it is of an unknown form")
    found, at = [], 8 if version == 1 else 2
    for _ in range(count):
        (code,) = struct.unpack_from("<H", data, at)
        named = version == 1 or code >= 256
        length = struct.unpack_from("<H", data, at + 2)[0] if named else 0
        (values,) = struct.unpack_from("<H", data, at + (6 if named else 4))
        at += (8 if named else 6) + length + 4 * values + (4 * (values % 2) if version == 1 else 0)
        found.append(code)
    if at > len(data):
        raise Refused("a list of filters in it is damaged")
    return found


def bytes_of(shape, dtype):
    """How many bytes an array has; a `Refused` where no array can have its shape, 0 among its axes
    or not."""
    if math.prod(max(n, 1) for n in shape) * dtype.itemsize >= 1 << 62:
        raise Refused(f"it claims an array of {' × '.join(map(str, shape))} values of {dtype}")
    return math.prod(shape) * dtype.itemsize
