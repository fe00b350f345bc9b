"""Zips and NumPy's files from anywhere: their contents are bounded before they are unpacked.

A few kilobytes can announce, or unpack to, any number of bytes. Nothing is unpacked before its
announced size was checked against the file's size and the caller's expectation. Nothing is unpacked
beyond its announced size, and no step holds more memory than was requested. Whatever is wrong is a
`BadArchive`, whose text completes "… is damaged (…)".
"""

import bz2
import copy
import io
import lzma
import math
import os
import sys
import zipfile
import zlib

import numpy as np

from ...files import check_regular

# of a zip, each a kilobyte of memory: all of ImageNet's training images
MAXIMUM_MEMBERS = 1_500_000
MAXIMUM_DIMENSIONS = 32
DEFLATE_RATIO = 1032  # bytes that one byte of deflate becomes at most (zlib's technical details)
LZMA_DICTIONARY_BYTES = 64 << 20  # 7-Zip's at its highest setting
NPY_MAGIC = b"\x93NUMPY"
NPY_HEADERS = {
    (1, 0): (2, np.lib.format.read_array_header_1_0),
    (2, 0): (4, np.lib.format.read_array_header_2_0),
}
NPY_HEADER_BYTES = 1 << 16
BLOCK = 1 << 16


class BadArchive(Exception):
    """Why an archive cannot be read."""


class TooMuch(BadArchive):
    """It may be intact, but holds more than is read."""


def most_from_deflate(nbytes):
    """More bytes than this cannot come out of `nbytes` of deflate or gzip."""
    return DEFLATE_RATIO * nbytes + 1024


# Zips ---------------------------------------------------------------------------------------------


class _Disk(io.FileIO):
    """The file under a zip; counts the members in its directory, which zipfile reads in one piece."""

    def read(self, size=-1):
        data = super().read(size)
        if (
            len(data) > 46 * MAXIMUM_MEMBERS
            and data.count(zipfile.stringCentralDir) > MAXIMUM_MEMBERS
        ):
            raise TooMuch(f"it has more than {MAXIMUM_MEMBERS:,} members; unpack it")
        return data


class ZipReader:
    """The members of a zip file, as `zipfile.ZipInfo`, and their bytes. Safe to read from several
    threads."""

    def __init__(self, path):
        check_regular(path, os.stat(path).st_mode)  # a FIFO would wait for ever
        self._disk = _Disk(path)
        try:
            self._zip = zipfile.ZipFile(self._disk)
        except BaseException as error:
            self._disk.close()
            # damaged records
            if isinstance(error, (ValueError, NotImplementedError, UnicodeError, OverflowError)):
                raise BadArchive(str(error)) from None
            raise
        self.members = self._zip.infolist()
        self.comment = self._zip.comment  # bytes, at most 65,535

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def open(self, member, limit=None):
        """A stream of a member's bytes, to be read from start to end; refused if it announces more
        than `limit`."""
        if limit is not None and member.file_size > limit:
            raise TooMuch(
                f"{member.filename} has {member.file_size:,} bytes, and at most {limit:,} are read"
            )
        return _Member(self._zip, member)

    def read(self, member, limit):
        """All bytes of a member, at most `limit`."""
        with self.open(member, limit) as stream:
            return stream.read(member.file_size)

    def close(self):
        self._zip.close()
        self._disk.close()


class _Member:
    """A member of a zip, unpacked as it is read. (zipfile's own reader unpacks bzip2 and LZMA
    without a bound.)"""

    def __init__(self, archive, member):
        self.member, self.left, self._crc = member, member.file_size, 0
        self._unpacker, self._tail = None, b""
        if member.flag_bits & 1:
            raise BadArchive(f"{member.filename} is protected by a password")
        most = {
            zipfile.ZIP_STORED: member.compress_size,
            zipfile.ZIP_DEFLATED: most_from_deflate(member.compress_size),
        }
        if member.file_size > most.get(member.compress_type, member.file_size):
            raise BadArchive(
                f"{member.filename} announces {member.file_size:,} bytes, more than it can hold"
            )
        # to zipfile a stored member, whose contents are the packed bytes
        packed = copy.copy(member)
        packed.compress_type, packed.file_size = zipfile.ZIP_STORED, member.compress_size
        del packed.CRC
        try:
            self._source = archive.open(packed)
        except (
            RuntimeError,
            ValueError,
            NotImplementedError,
            UnicodeError,
            OverflowError,
        ) as error:
            raise BadArchive(f"{member.filename}: {error}") from None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._source.close()

    def read(self, size):
        """The next `size` bytes, fewer at the end; the checksum is compared with the last of them."""
        size = min(size, self.left)
        pieces, missing = [], size
        while missing:
            piece = self._piece(missing)
            pieces.append(piece)
            missing -= len(piece)
            self._crc = zlib.crc32(piece, self._crc)
        self.left -= size
        if not self.left and self._crc != self.member.CRC:
            raise BadArchive(f"the CRC of {self.member.filename} is wrong")
        return b"".join(pieces)

    def _packed(self, size):
        """Up to `size` of the file's bytes."""
        try:
            return self._source.read(size)
        except EOFError:
            raise BadArchive(f"{self.member.filename} is cut off") from None

    def _piece(self, size):
        """The next 1 to `size` bytes."""
        if self.member.compress_type == zipfile.ZIP_STORED:
            piece = self._packed(min(size, 16 * BLOCK))
            if not piece:
                raise BadArchive(f"{self.member.filename} is cut off")
            return piece
        if self._unpacker is None:
            self._unpacker = self._start()
        deflated = self.member.compress_type == zipfile.ZIP_DEFLATED
        while True:
            packed = self._tail
            if not packed and (deflated or self._unpacker.needs_input):
                packed = self._packed(BLOCK)
            try:  # without input deflate returns what it has held back, the others raise an error
                piece = self._unpacker.decompress(packed, min(size, 16 * BLOCK))
            except (zlib.error, OSError, EOFError, lzma.LZMAError) as error:
                raise BadArchive(f"{self.member.filename}: {error}") from None
            self._tail = self._unpacker.unconsumed_tail if deflated else b""
            if piece:
                return piece
            if self._unpacker.eof or (not packed and (deflated or self._unpacker.needs_input)):
                raise BadArchive(
                    f"{self.member.filename} ends before its announced {self.member.file_size:,} bytes"
                )

    def _start(self):
        kind = self.member.compress_type
        if kind == zipfile.ZIP_DEFLATED:
            return zlib.decompressobj(-15)
        if kind == zipfile.ZIP_BZIP2:
            return bz2.BZ2Decompressor()
        if kind != zipfile.ZIP_LZMA:
            raise BadArchive(
                f"{self.member.filename} is compressed by method {kind}, which is not supported"
            )
        # version of the packer, length of what follows, then LZMA's five bytes
        header = self._packed(9)
        dictionary = int.from_bytes(header[5:9], "little")
        if (
            len(header) < 9
            or header[2:4] != b"\5\0"
            or header[4] >= 225
            or dictionary > LZMA_DICTIONARY_BYTES
        ):
            raise BadArchive(f"{self.member.filename} has an LZMA header that is not read")
        lc, lp, pb = header[4] % 9, header[4] // 9 % 5, header[4] // 45
        try:
            return lzma.LZMADecompressor(
                lzma.FORMAT_RAW,
                filters=[
                    {"id": lzma.FILTER_LZMA1, "dict_size": dictionary, "lc": lc, "lp": lp, "pb": pb}
                ],
            )
        except (lzma.LZMAError, ValueError) as error:
            raise BadArchive(f"{self.member.filename}: {error}") from None


# NumPy's .npy -------------------------------------------------------------------------------------


def read_npy_header(stream):
    """(shape, whether columns come first, dtype, bytes of the header) of the .npy that starts here;
    runs nothing."""
    start = _exactly(stream, 8)
    version = tuple(start[6:8])
    if start[:6] != NPY_MAGIC or version not in NPY_HEADERS:
        raise BadArchive("its header is not one of NumPy's, version 1 or 2")
    width, parse = NPY_HEADERS[version]
    length = _exactly(stream, width)
    nbytes = int.from_bytes(length, "little")
    if nbytes > NPY_HEADER_BYTES:
        raise BadArchive(f"its NumPy header has {nbytes:,} bytes")
    text = _exactly(stream, nbytes)
    try:
        shape, fortran, dtype = parse(io.BytesIO(length + text))
    except Exception as error:  # it is Python notation, so it can be broken in any way
        raise BadArchive(
            str(error).splitlines()[0] if str(error) else type(error).__name__
        ) from None
    if (
        len(shape) > MAXIMUM_DIMENSIONS
        or any(type(n) is not int or not 0 <= n < 1 << 48 for n in shape)
        or (
            # NumPy counts without the zeros
            math.prod(n for n in shape if n) * max(dtype.itemsize, 1) >= 1 << 62
        )
    ):
        raise BadArchive("its NumPy header has a shape that no array has")
    return shape, fortran, dtype, 8 + width + nbytes


def read_npy(stream, size, limit):
    """The array of the .npy of `size` bytes that starts here. It is refused before its memory is
    allocated if it has more than `limit` bytes, is shorter than announced, or holds objects (a
    pickle, which is never run)."""
    shape, fortran, dtype, header = read_npy_header(stream)
    if dtype.hasobject:
        raise BadArchive("it holds Python objects, a pickle, and pickles are never run")
    count = 1
    for n in shape:
        count *= n
    nbytes = count * dtype.itemsize
    if nbytes > limit:
        raise TooMuch(f"its array has {nbytes:,} bytes, and at most {limit:,} are read")
    if header + nbytes > size:
        raise BadArchive(
            f"it announces an array of {nbytes:,} bytes and holds {max(0, size - header):,}"
        )
    data = _exactly(stream, nbytes)
    if (
        dtype.kind == "U"
        and np.frombuffer(data, dtype.str[0] + "u4").max(initial=0) > sys.maxunicode
    ):
        raise BadArchive("it holds texts of length 0")
    if not dtype.itemsize and count > size:  # NumPy gives each of them a byte
        raise TooMuch(f"it announces {count:,} texts of length 0")
    if not dtype.itemsize:  # NumPy cannot view no bytes as strings of length 0
        return np.zeros(shape, dtype)
    return np.frombuffer(data, dtype, count).reshape(shape, order="F" if fortran else "C")


def _exactly(stream, nbytes):
    data = stream.read(nbytes)
    if len(data) != nbytes:
        raise BadArchive("it is cut off")
    return data
