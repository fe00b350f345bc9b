"""The places of a dataset's chunks: the indexes of HDF5's layouts 3, 4 and 5 (IV.A.2.i, VII).

`find_chunks` gives the address, the size and the filter mask of each chunk of a grid, in the order
of its places. An address is `UNDEFINED` where no chunk is stored.
"""

import math
import struct
from typing import NamedTuple

import numpy as np

from ..files import Refused
from .structure import UNDEFINED
from .trees import old_tree, tree

# indexes; TREE_1 of layout 3 has no number in a file
TREE_1, SINGLE, IMPLICIT, FIXED, EXTENSIBLE, TREE_2 = range(6)
PARAMETER_BYTES = {SINGLE: 0, IMPLICIT: 0, FIXED: 1, EXTENSIBLE: 5, TREE_2: 6}


class Chunked(NamedTuple):
    """How a dataset is stored in chunks. shape and nbytes: of a chunk; index, address: the kind and
    place of its index; single: (size, filter mask) of the only chunk, where it is packed."""

    shape: tuple
    nbytes: int
    index: int
    address: int
    single: tuple | None = None


def chunked_layout(data, rank, itemsize):
    """The `Chunked` in a layout message of class 2 (IV.A.2.i)."""
    version, flags, index, single = data[0], 0, TREE_1, None
    if version == 3:
        axes, at = data[2], 11
        (address,) = struct.unpack_from("<Q", data, 3)
        extents = struct.unpack_from(f"<{axes}I", data, at)
    else:
        flags, axes, width = data[2:5]
        if not 1 <= width <= 8:
            raise Refused("a layout of it is damaged")
        extents = tuple(
            int.from_bytes(data[5 + i * width : 5 + (i + 1) * width], "little") for i in range(axes)
        )
        at = 5 + axes * width
        index, at = data[at], at + 1
        if index not in PARAMETER_BYTES or flags & ~2 or flags and index != SINGLE:
            raise Refused("its chunks are stored in an unknown way")
        if flags:
            single, at = struct.unpack_from("<QI", data, at), at + 12
        (address,) = struct.unpack_from("<Q", data, at + PARAMETER_BYTES[index])
    if axes != rank + 1 or extents[-1] != itemsize or 0 in extents:
        raise Refused("a layout of it is damaged")
    return Chunked(extents[:-1], math.prod(extents), index, address, single)


def find_chunks(source, layout, grid, largest, filtered):
    """(addresses uint64, sizes int64, masks uint32), one each for the chunks of a grid.

    layout: the `Chunked` of the dataset; grid: chunks along each axis; largest: the same of the
    largest shape that the dataset may have, where an axis without limit has 0; filtered: whether
    chunks pass filters
    """
    count = math.prod(grid)
    if layout.index in (TREE_1, TREE_2):
        return _by_place(source, layout, grid, count, filtered)
    if layout.index == SINGLE:
        if count != 1:
            raise Refused("an index of chunks in it is damaged")
        size, mask = layout.single or (layout.nbytes, 0)
        return (
            np.array([layout.address], np.uint64),
            np.array([size], np.int64),
            np.array([mask], np.uint32),
        )
    numbers = _numbers(grid, largest, layout.index)
    if layout.index == IMPLICIT:
        return (
            layout.address + numbers.astype(np.uint64) * np.uint64(layout.nbytes),
            np.full(count, layout.nbytes, np.int64),
            np.zeros(count, np.uint32),
        )
    elements = (_fixed if layout.index == FIXED else _extensible)(
        source, layout, int(numbers.max()) + 1, filtered
    )
    elements = elements[numbers]
    if not filtered:
        return (
            _numbers_in(elements),
            np.full(count, layout.nbytes, np.int64),
            np.zeros(count, np.uint32),
        )
    return (
        _numbers_in(elements[:, :8]),
        _sizes(elements[:, 8:-4]),
        _numbers_in(elements[:, -4:]).astype(np.uint32),
    )


def _numbers(grid, largest, index):
    """The place of each chunk in an index that counts the chunks of the largest shape, an axis
    without limit first."""
    free = [axis for axis, n in enumerate(largest) if n == 0]
    if len(free) != (index == EXTENSIBLE):
        raise Refused("an index of chunks in it is damaged")
    order = [*free, *(axis for axis in range(len(grid)) if axis not in free)]
    extents = [grid[axis] if axis in free else max(largest[axis], grid[axis]) for axis in order]
    if math.prod(extents) >= 1 << 62:
        raise Refused("an index of chunks in it is damaged")
    numbers = np.zeros(grid, np.int64)
    for position, axis in enumerate(order):
        step = math.prod(extents[position + 1 :])
        numbers += (np.arange(grid[axis]) * step).reshape(-1, *(1,) * (len(grid) - 1 - axis))
    return numbers.reshape(-1)


def _numbers_in(data):
    """Little-endian numbers of n bytes, uint8 (count, n), as uint64."""
    padded = np.zeros((len(data), 8), np.uint8)
    padded[:, : data.shape[1]] = data
    return padded.view("<u8").reshape(-1).astype(np.uint64)


def _sizes(data):
    sizes = _numbers_in(data)
    if (sizes >= 1 << 62).any():
        raise Refused("an index of chunks in it is damaged")
    return sizes.astype(np.int64)


def _by_place(source, layout, grid, count, filtered):
    """Of an index whose entries name the chunks' places."""
    rank = len(grid)
    if layout.index == TREE_1:  # size, mask, offset along each axis and within a value; address
        if count * (24 + 8 * rank) > source.size:
            raise Refused("an index of chunks in it is larger than the file")
        parts, have = [], 0
        for entries in old_tree(source, layout.address, 1, 8 + 8 * (rank + 1)):
            parts.append(entries)
            have += len(entries)
            if have > count:
                raise Refused("an index of chunks in it is damaged")
        entries = np.concatenate(parts) if parts else np.zeros((0, 24 + 8 * rank), np.uint8)
        sizes, masks, addresses = (
            _sizes(entries[:, :4]),
            _numbers_in(entries[:, 4:8]),
            _numbers_in(entries[:, -8:]),
        )
        places = np.ascontiguousarray(entries[:, 8 : 8 + 8 * rank]).view("<u8").reshape(-1, rank)
        chunk = np.array(layout.shape, np.uint64)
        if (places % chunk).any():
            raise Refused("an index of chunks in it is damaged")
        places = places // chunk
    else:  # address, size and mask if they are filtered, place along each axis
        records = tree(source, layout.address, 11 if filtered else 10, count)
        least = 8 + 8 * rank + (5 if filtered else 0)
        if records and not least <= len(records[0]) <= least + 7 * filtered:
            raise Refused("an index of chunks in it is damaged")
        entries = (
            np.frombuffer(b"".join(records), np.uint8).reshape(len(records), -1)
            if records
            else np.zeros((0, least), np.uint8)
        )
        addresses, places = _numbers_in(entries[:, :8]), entries[:, entries.shape[1] - 8 * rank :]
        places = np.ascontiguousarray(places).view("<u8").reshape(-1, rank)
        if filtered:
            end = entries.shape[1] - 8 * rank - 4
            sizes, masks = _sizes(entries[:, 8:end]), _numbers_in(entries[:, end : end + 4])
        else:
            sizes, masks = np.full(len(entries), layout.nbytes, np.int64), np.zeros(len(entries))
    if len(entries) > count or (places >= np.array(grid, np.uint64)).any():
        raise Refused("an index of chunks in it is damaged")
    numbers = (
        np.ravel_multi_index(tuple(places.T.astype(np.int64)), grid)
        if len(entries)
        else np.zeros(0, np.int64)
    )
    found = (
        np.full(count, UNDEFINED, np.uint64),
        np.zeros(count, np.int64),
        np.zeros(count, np.uint32),
    )
    for target, values in zip(found, (addresses, sizes, masks), strict=True):
        target[numbers] = values
    return found


def _element_bytes(head, at, filtered):
    """The bytes of an element of an array index; the number of its kind is checked."""
    kind, size = head[at], head[at + 1]
    if kind != filtered or not (13 <= size <= 20 if filtered else size == 8):
        raise Refused("an index of chunks in it is damaged")
    return size


def _fixed(source, layout, count, filtered):
    """The first `count` elements of a fixed array (VII.C), uint8 (at least `count`, bytes of one)."""
    head = source.checked(layout.address, b"FAHD", 28)
    size, page_bits = _element_bytes(head, 5, filtered), head[7]
    total, block = struct.unpack_from("<QQ", head, 8)
    if total < count or total * size > source.size or page_bits > 32:
        raise Refused("an index of chunks in it is damaged")
    page = 1 << page_bits
    if total <= page:
        data = source.checked(block, b"FADB", 14 + total * size + 4)[14:-4]
        return np.frombuffer(data, np.uint8).reshape(-1, size)
    pages = -(-total // page)
    head = source.checked(block, b"FADB", 14 + (pages + 7) // 8 + 4)
    return _pages(
        source, block + len(head), head[14:-4], 0, min(total, -(-count // page) * page), page, size
    )


def _pages(source, address, bitmap, first, count, page, size):
    """`count` elements in pages, each followed by a checksum; the bitmap has a bit for each page
    that was written, from `first` on."""
    parts = []
    for number in range(-(-count // page)):
        bit = first + number
        if not bitmap[bit // 8] >> 7 - bit % 8 & 1:
            raise Refused("chunks of it were never stored")
        length = min(page, count - number * page) * size
        parts.append(source.read(address + number * (page * size + 4), length))
    return np.frombuffer(b"".join(parts), np.uint8).reshape(-1, size)


def _extensible(source, layout, count, filtered):
    """The first `count` elements of an extensible array (VII.D), uint8 (at least `count`, bytes of
    one)."""
    head = source.checked(layout.address, b"EAHD", 72)
    size = _element_bytes(head, 5, filtered)
    bits, first, smallest, pointers, page_bits = head[7:12]
    used, realised, block = struct.unpack_from("<3Q", head, 44)
    if (
        count * size > source.size
        or not count <= used <= realised
        or not 0 < bits <= 64
        or page_bits > 32
        or any(not n or n & n - 1 for n in (smallest, pointers))
    ):
        raise Refused("an index of chunks in it is damaged")
    offset_bytes, page = (bits + 7) // 8, 1 << page_bits
    supers = 1 + bits - (smallest.bit_length() - 1)
    direct_supers, direct = 2 * (pointers.bit_length() - 1), 2 * (pointers - 1)
    if not direct_supers <= supers:
        raise Refused("an index of chunks in it is damaged")
    data = source.checked(
        block, b"EAIB", 14 + first * size + 8 * (direct + supers - direct_supers) + 4
    )
    parts, have = [data[14 : 14 + first * size]], first
    addresses = np.frombuffer(data[14 + first * size : -4], "<u8").tolist()
    for number in range(supers):
        if have >= count:
            break
        blocks, elements, bitmap = 1 << number // 2, smallest << (number + 1) // 2, None
        if number < direct_supers:
            targets, addresses = addresses[:blocks], addresses[blocks:]
        else:
            # bytes that say which pages were written
            paged = -(-elements // page // 8) if elements > page else 0
            start = 14 + offset_bytes
            if addresses[number - direct_supers] == UNDEFINED:
                raise Refused("chunks of it were never stored")
            held = source.checked(
                addresses[number - direct_supers], b"EASB", start + blocks * (paged + 8) + 4
            )
            bitmap = held[start : start + blocks * paged]
            targets = np.frombuffer(held[start + blocks * paged : -4], "<u8").tolist()
        for i, target in enumerate(targets):
            if have >= count:
                break
            if target == UNDEFINED:
                raise Refused("chunks of it were never stored")
            wanted = min(elements, count - have)
            if elements > page:
                if bitmap is None:
                    raise Refused("an index of chunks in it is damaged")
                prefix = source.checked(target, b"EADB", 14 + offset_bytes + 4)
                parts.append(
                    _pages(
                        source,
                        target + len(prefix),
                        bitmap,
                        i * (elements // page),
                        -(-wanted // page) * page,
                        page,
                        size,
                    ).tobytes()
                )
            else:
                parts.append(
                    source.checked(target, b"EADB", 14 + offset_bytes + elements * size + 4)[
                        14 + offset_bytes : -4
                    ]
                )
            have += elements
    return np.frombuffer(b"".join(parts), np.uint8).reshape(-1, size)
