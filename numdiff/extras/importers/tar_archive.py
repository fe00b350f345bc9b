"""The members of a tar: numbers in its headers are held against the file's size. Nothing is unpacked."""

from .archives import BLOCK, MAXIMUM_MEMBERS, BadArchive, TooMuch

MAXIMUM_TAR_MEMBERS = 10_000
MAXIMUM_TAR_BYTES = 384 << 20  # CIFAR-10 has 186
MAXIMUM_TAR_EXTENSION = 1 << 20  # bytes of a header with a long name


def tar_files(stream):
    """[(name, offset, bytes)] of the regular files of a tar, from a stream at its start, which is
    read to the end.

    Header extensions (PAX, GNU's long names) are skipped: they can have any size, and short names
    need none.
    """
    files, position = [], 0
    for _ in range(MAXIMUM_TAR_MEMBERS):
        header = stream.read(512)
        position += len(header)
        if not header.strip(b"\0"):  # a block of zeros, or the end of the file
            while piece := stream.read(16 * BLOCK):  # to the end, where gzip keeps its checksum
                position += len(piece)
                if position > MAXIMUM_TAR_BYTES:
                    raise TooMuch(f"it has more than {MAXIMUM_TAR_BYTES:,} bytes")
            return files
        size, stored = _tar_number(header[124:136]), _tar_number(header[148:156])
        if len(header) < 512 or stored != sum(header[:148]) + 8 * 32 + sum(header[156:]):
            raise BadArchive(f"the tar's header at byte {position - len(header):,} is damaged")
        padded = -(-size // 512) * 512
        if position + padded > MAXIMUM_TAR_BYTES:
            raise TooMuch(f"it has more than {MAXIMUM_TAR_BYTES:,} bytes")
        if header[156:157] in (b"0", b"\0", b"7"):
            files.append((header[:100].split(b"\0")[0].decode("utf-8", "replace"), position, size))
        while padded:
            piece = stream.read(min(padded, 16 * BLOCK))
            if not piece:
                raise BadArchive("it ends within a file")
            position += len(piece)
            padded -= len(piece)
    raise TooMuch(f"it has more than {MAXIMUM_TAR_MEMBERS:,} members")


def tar_members(file, size):
    """([(name, offset, bytes)] of the regular files of a tar, with a / at the end of a folder's
    name, names of links) of a file of `size` bytes that can seek. What is in the files is not read.

    Long names of PAX and GNU are read. Every number is held against the file's size, and a tar
    without its last block, as of an interrupted download, is refused.
    """
    members, links, position, more = [], [], 0, {}
    for _ in range(MAXIMUM_MEMBERS):
        file.seek(position)
        header = file.read(512)
        position += 512
        if len(header) < 512:
            raise BadArchive("it ends without the block of zeros that is a tar's last")
        if not header.strip(b"\0"):
            return members, links
        length, stored = _tar_number(header[124:136]), _tar_number(header[148:156])
        if stored != sum(header[:148]) + 8 * 32 + sum(header[156:]):
            raise BadArchive(f"the tar's header at byte {position - 512:,} is damaged")
        kind = header[156:157]
        if kind in b"xL":
            more = {**more, **_tar_extension(file, position, length, size, kind)}
            position += -(-length // 512) * 512
            continue
        length = more.get("size", length)
        name = more.get("path") or _tar_name(header)
        if position + length > size:
            raise BadArchive(f"it ends within {name[:100]}")
        if kind in b"0\0" + b"7":
            members.append((name, position, length))
        elif kind == b"5":
            members.append((name.rstrip("/") + "/", position, 0))
        elif kind in b"12":
            links.append(name)
            length = 0 if kind == b"2" else length
        elif kind == b"S":
            raise BadArchive(f"{name[:100]} is a sparse file, which is not read")
        position += -(-length // 512) * 512
        more = more if kind == b"g" else {}
    raise TooMuch(f"it has more than {MAXIMUM_MEMBERS:,} members")


def _tar_name(header):
    """The name in a tar's header; POSIX's has a field for the folders before it."""
    name, before = (header[a:b].split(b"\0")[0] for a, b in ((0, 100), (345, 500)))
    if header[257:263] == b"ustar\0" and before:
        name = before + b"/" + name
    return name.decode("utf-8", "replace")


def _tar_extension(file, position, length, size, kind):
    """{"path", "size"} of the next member, of those that a header of PAX or GNU gives."""
    if length > MAXIMUM_TAR_EXTENSION or position + length > size:
        raise BadArchive(f"the tar's header at byte {position - 512:,} announces {length:,} bytes")
    file.seek(position)
    data, found = file.read(length), {}
    if kind == b"L":
        return {"path": data.split(b"\0")[0].decode("utf-8", "replace")}
    while data:  # "LENGTH key=value\n", the length that of the whole line
        digits, _, _ = data.partition(b" ")
        count = int(digits) if digits.isdigit() and len(digits) < 9 else 0
        line = data[len(digits) + 1 : count - 1] if count else b""
        key, separator, value = line.partition(b"=")
        if not separator or count > len(data):
            raise BadArchive(f"the tar's header at byte {position - 512:,} is damaged")
        if key == b"path":
            found["path"] = value.decode("utf-8", "replace")
        elif key == b"size":
            found["size"] = int(value) if value.isdigit() and len(value) < 20 else size + 1
        data = data[count:]
    return found


def _tar_number(field):
    """A number of a tar's header: octal digits, or binary where the first bit is set."""
    if field[:1] >= b"\x80":
        return int.from_bytes(field, "big") & ((1 << (8 * len(field) - 1)) - 1)
    try:
        return max(0, int(field.split(b"\0")[0].strip() or b"0", 8))
    except ValueError:
        raise BadArchive("a number in the tar's header is damaged") from None
