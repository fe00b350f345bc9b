"""The one place that opens pictures: which formats, how large, and how they become upright grey or
RGB images.

Formats are those that Pillow decodes itself and that are recognised by their first bytes (for
PostScript it would start Ghostscript), and PBM, PGM and PPM (netpbm.py). A picture is checked
before it is decoded: bytes of the file, pixels, tags, scans, and whatever Pillow would step through
in Python. Threads that decode share one memory budget: many small pictures at a time, large ones
one after the other.
"""

import contextlib
import functools
import io
import itertools
import logging
import os
import re
import stat
import struct
import sys
import threading
import warnings
import zlib

import numpy as np
from PIL import Image, UnidentifiedImageError
from PIL.JpegImagePlugin import MARKER

from .netpbm import is_netpbm, read_header, read_pixels
from .profiles import Unusable, to_srgb

FORMATS = ("PNG", "JPEG", "GIF", "BMP", "DIB", "WEBP", "TIFF", "JPEG2000", "AVIF", "ICO", "QOI")
SUFFIXES = (
    ".png",
    ".jpg",
    ".jpeg",
    ".jpe",
    ".jfif",
    ".gif",
    ".bmp",
    ".dib",
    ".webp",
    ".tif",
    ".tiff",
    ".ppm",
    ".pgm",
    ".pbm",
    ".pnm",
    ".jp2",
    ".j2k",
    ".avif",
    ".ico",
    ".qoi",
    ".heic",
    ".heif",
    ".tga",
    ".psd",
)
MAGICS = (
    b"\x89PNG\r\n\x1a\n",
    b"\xff\xd8\xff",
    b"GIF87a",
    b"GIF89a",
    b"II*\0",
    b"MM\0*",
    b"\0\0\0\x0cjP  ",
    b"\xff\x4f\xff\x51",
    b"qoif",
)
MAXIMUM_FILE_BYTES = 1 << 29  # MAXIMUM_PIXELS of the widest kind, RGBA of 16 bits
# decoded: 8192×8192; a JPEG that is decoded at a fraction of its size may have more
MAXIMUM_PIXELS = 1 << 26
MAXIMUM_SIDE = 65535
MAXIMUM_ICON = 1024  # pixels of a side; icons have 256
MAXIMUM_TAG_VALUES = 1 << 20  # numbers in one tag of a TIFF: two for each of its strips
# scans of a JPEG times its pixels: 5 seconds; a progressive one has about ten scans
MAXIMUM_SCANNED = 1 << 35
MAXIMUM_JUNK = 1 << 20  # bytes between the segments of a JPEG
# segments of a JPEG, blocks of a GIF before its picture, boxes of a JPEG 2000
MAXIMUM_PARTS = 1 << 16
MAXIMUM_CHUNKS = 1 << 17  # of a PNG: 0.3 seconds; encoders write chunks of 8 kB or more
MAXIMUM_IN_PYTHON = 1 << 23  # pixels of a kind that Pillow decodes in Python: 5 seconds
STRIP_PIXELS = 1 << 22  # of a large picture, that are laid over the background together
TAG_BYTES = {
    1: 1,
    2: 1,
    3: 2,
    4: 4,
    5: 8,
    6: 1,
    7: 1,
    8: 2,
    9: 4,
    10: 8,
    11: 4,
    12: 8,
    13: 4,
    16: 8,
    17: 8,
    18: 8,
}
TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
SIDEWAYS = tuple(TURNS[turn] for turn in (5, 6, 7, 8))
MOVED = dict(
    zip(
        TURNS.values(),
        (  # the new place of a point of an image of w×h pixels
            lambda x, y, w, h: (w - x, y),
            lambda x, y, w, h: (w - x, h - y),
            lambda x, y, w, h: (x, h - y),
            lambda x, y, w, h: (y, x),
            lambda x, y, w, h: (h - y, x),
            lambda x, y, w, h: (h - y, w - x),
            lambda x, y, w, h: (y, w - x),
        ),
        strict=True,
    )
)
ORIENTATION = 0x0112
REGION, PROFILE = "numdiff region", "numdiff profile"  # keys of an image's info


class Unreadable(Exception):
    """Why a picture cannot be read; completes "a.png: …"."""


class Allowance:
    """A budget of bytes for all threads together; a single picture may take more."""

    def __init__(self, nbytes):
        self.nbytes, self.taken, self._changed = nbytes, 0, threading.Condition()

    @contextlib.contextmanager
    def take(self, nbytes):
        with self._changed:
            self._changed.wait_for(lambda: not self.taken or self.taken + nbytes <= self.nbytes)
            self.taken += nbytes
        try:
            yield
        finally:
            with self._changed:
                self.taken -= nbytes
                self._changed.notify_all()


_files, _pixels = Allowance(MAXIMUM_FILE_BYTES // 2), Allowance(8 * MAXIMUM_PIXELS)


@functools.cache
def formats():
    """The FORMATS that this Pillow was built with."""
    Image.init()
    return [name for name in FORMATS if name in Image.OPEN]


def looks_like_picture(name, head):
    """Whether a file is meant to be a picture: by its name, or by its first 16 bytes."""
    return (
        name.lower().endswith(SUFFIXES)
        or head.startswith(MAGICS)
        or head[8:12] == b"WEBP"
        or head[4:12] in (b"ftypavif", b"ftypheic")
    )


@contextlib.contextmanager
def quiet():
    """Context without Pillow's warnings about odd files: what cannot be read is reported by name."""
    logger = logging.getLogger("PIL")
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


# Opening ------------------------------------------------------------------------------------------


@contextlib.contextmanager
def open_picture(path):
    """`with open_picture(path) as image`: the decoded PIL image of a file; `Unreadable` or OSError
    says why not."""
    state = os.stat(path)
    if not stat.S_ISREG(state.st_mode):
        raise Unreadable("it is not a file")

    def read():
        with open(path, "rb") as file:
            return file.read(MAXIMUM_FILE_BYTES + 1)

    with quiet(), decoded(state.st_size, read) as image:
        yield image


@contextlib.contextmanager
def decoded(nbytes, read, wanted=None):
    """`with decoded(…) as image`: the decoded PIL image of a file of this many bytes, which
    `read()` returns.

    It is upright, has 8 bits but for grey of 16, and its colours are sRGB. wanted: the size that it
    will be brought to; lets JPEG decode a much larger photo at 1/2, 1/4 or 1/8 of its size: see
    `region_of`. The image's share of the memory budget is held until the end of the block.
    `Unreadable` says why it cannot be read.
    """
    if not nbytes:
        raise Unreadable("empty file")
    if nbytes > MAXIMUM_FILE_BYTES:
        raise Unreadable(f"a file of {nbytes:,} bytes, which is more than numdiff reads")
    with _files.take(nbytes):
        with _reasons():
            data = read()
        if is_netpbm(data):
            yield from _netpbm(data)
            return
        with _reasons():
            _check(data)
            image = Image.open(io.BytesIO(data), formats=formats())
            full, size = _checked_pixels(image, data), image.size
            draft = image.draft(None, (2 * wanted, 2 * wanted)) if wanted else None
            region = draft[1] if draft else (0, 0, *size)
            pixels = image.width * image.height
            if pixels > MAXIMUM_PIXELS:
                raise Unreadable(_too_large(image))
        deep = _has_16_bits(image, data)
        copies = 8 + 8 * deep + 4 * ("icc_profile" in image.info)
        # 6: a progressive JPEG's
        with _pixels.take(copies * pixels + 6 * full * (image.format in ("JPEG", "MPO"))):
            with _reasons():
                image.load()
                image.info[REGION] = size, region
                image = _in_srgb(_upright(_eight_bit_colour(image, data, deep)))
            yield image


def region_of(image):
    """((width, height), (left, top, right, bottom)) of an image that `decoded` gave: the pixels of
    its file, and the part of the image that they are. A JPEG decoded at 1/8 of 1001 pixels has 126,
    of which 125.125 are the picture."""
    return image.info.get(REGION, (image.size, (0, 0, *image.size)))


def profile_of(image):
    """The treatment of the colour profile of an image that `decoded` gave: "converted", "unusable"
    or None."""
    return image.info.get(PROFILE)


def _netpbm(data):
    """The decoded image of a PBM, PGM or PPM, once."""
    with _reasons():
        header = read_header(data)
        if (
            max(header.width, header.height) > MAXIMUM_SIDE
            or header.width * header.height > MAXIMUM_PIXELS
        ):
            raise Unreadable(_too_large(header))
    values = header.width * header.height * header.channels
    with _pixels.take((4 if header.kind > 3 else 16) * values):
        with _reasons():
            image = Image.fromarray(read_pixels(data, header))
        yield image


@contextlib.contextmanager
def _reasons():
    """Context that turns the decoders' errors on broken files into `Unreadable`."""
    try:
        yield
    except Unreadable:
        raise
    except UnidentifiedImageError:
        raise Unreadable("not an image that Pillow can read") from None
    except Image.DecompressionBombError:
        raise Unreadable("more than 178 million pixels") from None
    except MemoryError:
        raise Unreadable("not enough memory for its pixels") from None
    except Exception as error:
        why = getattr(error, "strerror", None) or str(error)
        raise Unreadable(
            why.splitlines()[0][:200] if why.strip() else type(error).__name__
        ) from None


def _too_large(image):
    return f"{image.width}×{image.height} pixels, more than {MAXIMUM_PIXELS / 1e6:.0f} million; reduce it first"


def _checked_pixels(image, data):
    """Pixels of an opened picture before any reduction."""
    pixels = image.width * image.height
    if max(image.size) > MAXIMUM_SIDE:
        raise Unreadable(_too_large(image))
    jpeg = image.format in ("JPEG", "MPO") or image.info.get("compression") == "jpeg"
    # Pillow traverses all pixels for each
    if jpeg and data.count(b"\xff\xda") * pixels > MAXIMUM_SCANNED:
        raise Unreadable("far more scans than a JPEG has")
    return pixels


# What Pillow believes a file's header, and should not ---------------------------------------------


def _check(data):
    """Refuse a small file that would make Pillow use much memory or time, before Pillow sees it."""
    if data[:2] in (b"II", b"MM"):
        _check_tags(data)
    elif data[:4] == b"\x89PNG":
        _check_parts(_png_chunks(data), MAXIMUM_CHUNKS)
    elif data[:4] == b"GIF8":
        _check_parts(_gif_blocks(data), MAXIMUM_PARTS)
    elif data[:4] == b"qoif":
        _check_in_python(*struct.unpack(">II", data[4:12].ljust(8, b"\0")))
    elif data[:2] == b"BM":
        _check_bitmap(data)
    elif data[:3] == b"\xff\xd8\xff":
        for tags in _jpeg_tags(data):
            _check_tags(tags)
    elif data[:4] == b"\0\0\1\0":
        _check_icon(data)
    elif data[:4] == b"\xff\x4f\xff\x51" or data[4:8] == b"jP  ":
        _check_parts(_boxes(data) if data[4:8] == b"jP  " else (), MAXIMUM_PARTS)
        for match in re.finditer(b"\xff\x4f\xff\x51", data):
            _check_codestream(data[match.end() : match.end() + 38])


def _check_parts(parts, most):
    """Refuse a file of more parts, which are counted no further."""
    if next(itertools.islice(parts, most, None), None) is not None:
        raise Unreadable(f"more than {most:,} parts, which no picture needs")


def _png_chunks(data):
    """The positions of a PNG's chunks."""
    position = 8
    while position + 8 <= len(data):
        yield position
        position += 12 + int.from_bytes(data[position : position + 4], "big")


def _gif_blocks(data):
    """The positions of a GIF's blocks, and of bytes between them, up to its first picture."""
    flags = data[10] if len(data) > 10 else 0
    position = 13 + (3 << (flags & 7) + 1 if flags & 0x80 else 0)
    while position < len(data) and data[position] not in b",;":
        yield position
        if data[position] != 0x21:
            position += 1
            continue
        position += 2  # an extension: its kind, then blocks up to an empty one
        while position < len(data) and data[position]:
            yield position
            position += 1 + data[position]
        position += 1


def _boxes(data):
    """The positions of the boxes of a JPEG 2000."""
    position = 0
    while position + 8 <= len(data):
        yield position
        length = int.from_bytes(data[position : position + 4], "big")
        if length == 1:
            length = int.from_bytes(data[position + 8 : position + 16], "big")
        if length < 8:  # it reaches to the end of the file
            return
        position += length


def _check_bitmap(data):
    """A BMP that is packed by runs: Pillow follows them one by one, and some lead nowhere."""
    if len(data) < 34 or int.from_bytes(data[30:34], "little") not in (1, 2) or data[14] < 40:
        return
    width, height = (abs(n) for n in struct.unpack("<ii", data[18:26]))
    _check_in_python(width, height)
    if len(data) > 4 * (width + 2) * (height + 1) + (1 << 16):
        raise Unreadable("more bytes than its pixels can need")


def _check_in_python(width, height):
    if width * height > MAXIMUM_IN_PYTHON:
        raise Unreadable(
            f"{width}×{height} pixels in a format of which at most {MAXIMUM_IN_PYTHON / 1e6:.0f} million "
            "are read; save it as PNG"
        )


def _check_tags(data):
    """The directory of a TIFF (EXIF is one, too): Pillow copies every value, and values may
    overlap."""
    order = {b"II": "<", b"MM": ">"}.get(data[:2])
    if order is None or len(data) < 16:
        return
    big = data[2:4] in (b"+\0", b"\0+")
    entry, count_format, offset = (
        (order + "HHQ", "Q", data[8:16]) if big else (order + "HHL", "L", data[4:8])
    )
    step, inline = (20, 8) if big else (12, 4)
    start = struct.unpack(order + count_format, offset)[0]
    width = 8 if big else 2
    if start + width > len(data):
        return  # Pillow says so
    entries = struct.unpack_from(order + ("Q" if big else "H"), data, start)[0]
    total, tile = 0, 1
    for position in range(
        start + width, min(start + width + step * entries, len(data) - step + 1), step
    ):
        tag, kind, count = struct.unpack_from(entry, data, position)
        nbytes = count * TAG_BYTES.get(kind, 0)
        if nbytes > len(data):
            continue  # nothing is there to be copied
        total += nbytes if nbytes > inline else 0
        if total > 2 * len(data) or (kind not in (1, 2, 6, 7) and count > MAXIMUM_TAG_VALUES):
            raise Unreadable("tags larger than the file")
        if tag in (322, 323) and kind in (3, 4):  # width and height of its tiles
            tile *= struct.unpack_from(order + "HL"[kind - 3], data, position + step - inline)[0]
    if tile > MAXIMUM_PIXELS:
        raise Unreadable("tiles larger than any picture that is read")


def _jpeg_tags(data):
    """The EXIF and MPF directories of a JPEG, found as Pillow finds them."""
    exif, found, position, junk = [], [], 2, 0
    for steps in itertools.count():
        if not 0 <= position <= len(data) - 4:
            break
        if steps > MAXIMUM_PARTS:
            raise Unreadable(f"more than {MAXIMUM_PARTS:,} parts, which no picture needs")
        if data[position] != 0xFF:
            start, position = position, data.find(b"\xff", position)
            junk += position - start
            if junk > MAXIMUM_JUNK:  # Pillow passes over it byte by byte
                raise Unreadable("not a JPEG")
            continue
        marker = 0xFF00 | data[position + 1]
        position += 2 if marker in MARKER or marker == 0xFF00 else 1
        if marker == 0xFFDA:
            break
        if marker in MARKER and MARKER[marker][2] is not None:
            length = int.from_bytes(data[position : position + 2], "big")
            segment = data[position + 2 : position + length]
            position += max(2, length)
            # Pillow joins several, or takes the last
            if marker == 0xFFE1 and segment[:6] == b"Exif\0\0":
                exif.append(segment[6:])
            elif marker == 0xFFE2 and segment[:4] == b"MPF\0":
                found.append(segment[4:])
    return [b"".join(exif), *exif, *found]


def _check_icon(data):
    """The pictures in an icon; only their own headers count when they are decoded."""
    for i in range(min(int.from_bytes(data[4:6], "little"), 1000)):
        offset = int.from_bytes(data[18 + 16 * i : 22 + 16 * i], "little")
        head = data[offset : offset + 24]
        if head[:4] == b"\x89PNG":
            width, height = struct.unpack(">II", head[16:24].ljust(8, b"\0"))
        else:
            width, height = (abs(n) for n in struct.unpack("<ii", head[4:12].ljust(8, b"\0")))
        if width > MAXIMUM_ICON or height > 2 * MAXIMUM_ICON:
            raise Unreadable(f"an icon of {width}×{height} pixels")


def _check_codestream(header):
    """The SIZ segment of JPEG 2000: the decoder relies on it, whatever the enclosing box says."""
    if len(header) < 38:
        return
    right, bottom, left, top = struct.unpack(">IIII", header[4:20])
    components = int.from_bytes(header[36:38], "big")
    if components > 4 or max(right - left, 0) * max(bottom - top, 0) > MAXIMUM_PIXELS:
        raise Unreadable(
            f"{right - left}×{bottom - top} pixels of {components} colours, more than are read"
        )


# Pixels -------------------------------------------------------------------------------------------


def _has_16_bits(image, data):
    """Whether an opened picture has 16 bits a channel that Pillow would truncate to 8."""
    if image.format == "PNG":
        return data[12:16] == b"IHDR" and data[24] == 16 and data[25] in (2, 4, 6)
    return bool(
        image.format == "TIFF" and image.tile and all(_other_bytes(tile[3]) for tile in image.tile)
    )


def _eight_bit_colour(image, data, deep):
    """A loaded picture whose colour of 16 bits is rounded to 8, and whose transparent colour is one
    of 8 bits.

    Pillow takes the upper bytes; the lower ones come from decoding it as of the other byte order.
    """
    transparent = image.info.get("transparency")
    depth, kind = data[24:26] if image.format == "PNG" else (8, None)
    # in the file's bits, of which Pillow makes 8
    if kind == 0 and depth < 8 and isinstance(transparent, int):
        image.info["transparency"] = min(255, transparent * 255 // (2**depth - 1))
    if not deep:
        return image
    if kind == 4:  # grey and alpha, 4 bytes as RGBA has of 8 bits: Pillow has only the upper ones
        header = data[12:24] + b"\x08\x06" + data[26:29]
        pixels = _decoded_again(
            data[:12] + header + struct.pack(">I", zlib.crc32(header)) + data[33:]
        )
        return _rounded(image, pixels[..., 0::2], pixels[..., 1::2])
    low = _decoded_again(data, _other_bytes)
    return _rounded(
        image, np.asarray(image), low, transparent if isinstance(transparent, tuple) else None
    )


def _decoded_again(data, change=None):
    """The pixels of a picture, decoded with other arguments where `change` makes some from the
    decoder's."""
    image = Image.open(io.BytesIO(data), formats=formats())
    if change:
        image.tile = [
            tile._replace(args=change(tile[3]))
            if hasattr(tile, "_replace")
            # a plain tuple before Pillow 11
            else (*tile[:3], change(tile[3]))
            for tile in image.tile
        ]
    image.load()
    return np.asarray(image)


def _other_bytes(arguments):
    """A decoder's arguments for the lower bytes of 16-bit colour; None if it is something else."""
    raw = arguments if isinstance(arguments, str) else arguments[0] if arguments else None
    if not isinstance(raw, str) or raw[:-1] not in ("RGB;16", "RGBX;16", "RGBA;16", "CMYK;16"):
        return None
    native = "L" if sys.byteorder == "little" else "B"
    other = raw[:-1] + {"L": "B", "B": "L", "N": "B" if native == "L" else "L"}[raw[-1]]
    return other if isinstance(arguments, str) else (other, *arguments[1:])


def _rounded(image, high, low, transparent=None):
    """An image like `image` of 16-bit pixels, given as their upper and lower bytes, rounded to 8;
    pixels of the colour `transparent` get an alpha of 0."""
    height, width, channels = high.shape
    out = np.empty((height, width, channels + (transparent is not None)), np.uint8)
    rows = max(1, STRIP_PIXELS // width)
    for top in range(0, height, rows):
        wide = high[top : top + rows].astype(np.uint32) * 256 + low[top : top + rows]
        out[top : top + rows, :, :channels] = (wide * 255 + 32767) // 65535
        if transparent is not None:
            out[top : top + rows, :, channels] = 255 * (wide != transparent).any(-1)
    result = Image.fromarray(
        out, {2: "LA", 3: "RGB"}.get(out.shape[2], "CMYK" if image.mode == "CMYK" else "RGBA")
    )
    result.info = {
        name: value
        for name, value in image.info.items()
        if name != "transparency" or transparent is None
    }
    return result


def _in_srgb(image):
    """The picture in sRGB, if it has a colour profile; see `profile_of`."""
    profile = image.info.pop("icc_profile", None)
    if not profile or image.mode in ("1", "F"):
        return image
    try:
        plain = _plain(image)
        result = to_srgb(plain, profile)
    except Unusable:
        image.info[PROFILE] = "unusable"
        return image
    if result is plain:
        return image
    result.info = {**image.info, PROFILE: "converted"}
    result.info.pop("transparency", None)
    return result


def _plain(image):
    """A picture as a mode that colour profiles are for: L, LA, RGB, RGBA or CMYK."""
    transparent = "transparency" in image.info
    if image.mode.startswith("I"):
        grey = Image.fromarray(_grey_of_16_bits(image))
        if isinstance(image.info.get("transparency"), int):
            grey.putalpha(
                Image.fromarray(
                    np.where(np.asarray(image) == image.info["transparency"], 0, 255).astype(
                        np.uint8
                    )
                )
            )
        return grey
    if image.mode in ("L", "RGB") and transparent:
        return image.convert({"L": "LA", "RGB": "RGBA"}[image.mode])
    if image.mode in ("P", "PA"):
        return image.convert("RGBA" if transparent or image.mode == "PA" else "RGB")
    return image.convert(
        {"La": "LA", "RGBa": "RGBA", "RGBX": "RGB", "YCbCr": "RGB"}.get(image.mode, image.mode)
    )


def flatten(image, background):
    """An 8-bit image of mode L or RGB, transparent parts composed over the background (red, green,
    blue). It is grey if the file and the background are. 16-bit grey is rounded to 8.
    """
    if image.mode == "F":
        raise Unreadable("floating-point pixels, whose range is not known; convert it to 8 bits")
    transparent = image.mode in ("LA", "La", "PA", "RGBA", "RGBa") or "transparency" in image.info
    if image.mode in ("L", "RGB") and not transparent:
        return image
    grey = image.mode in ("1", "L", "LA", "La") or image.mode.startswith("I")
    grey = grey and (not transparent or len(set(background)) == 1)
    flat = Image.new("L" if grey else "RGB", image.size)
    rows = max(1, STRIP_PIXELS // image.width)
    for top in range(0, image.height, rows):
        strip = image.crop((0, top, image.width, min(top + rows, image.height)))
        flat.paste(_flat(strip, background, transparent).convert(flat.mode), (0, top))
    return flat


def _upright(image):
    """Turned as EXIF says; then EXIF says nothing more."""
    try:
        exif = image.info.get("exif") or b""
        raw = image.info.get("Raw profile type exif") or ""  # ImageMagick's, in hexadecimal digits
        for tags in (exif, bytes.fromhex("".join(raw.split("\n")[3:]))):
            _check_tags(tags.removeprefix(b"Exif\0\0"))
        turn = TURNS.get(image.getexif().get(ORIENTATION))
    except Exception:  # damaged EXIF: the pixels are good, only the orientation is unknown
        return image
    if turn is None:
        return image
    size, (left, top, right, bottom) = region_of(image)
    moved = MOVED[turn]
    (left, top), (right, bottom) = (
        moved(x, y, *image.size) for x, y in ((left, top), (right, bottom))
    )
    image = image.transpose(turn)
    image.info[REGION] = (
        size[::-1] if turn in SIDEWAYS else size,
        (min(left, right), min(top, bottom), max(left, right), max(top, bottom)),
    )
    return image


def _flat(image, background, transparent):
    if image.mode.startswith("I"):
        return _eight_bits(image, background, image.info.get("transparency"))
    if transparent:
        if image.mode in ("La", "RGBa"):
            image = image.convert({"La": "LA", "RGBa": "RGBA"}[image.mode])
        base = Image.new("RGBA", image.size, (*background, 255))
        base.alpha_composite(image.convert("RGBA"))
        return (
            base.getchannel(0)
            if len(set(background)) == 1 and image.mode in ("1", "L", "LA")
            else base
        )
    try:
        return image.convert("L" if image.mode == "1" else "RGB")
    except ValueError:
        raise Unreadable(
            f"colours of mode {image.mode}, which Pillow cannot convert; save it as RGB"
        ) from None


def _eight_bits(image, background, transparent):
    """An image of 16-bit (or wider) grey pixels as 8 bits; pixels of the value `transparent` as the
    background."""
    pixels, grey = np.asarray(image), _grey_of_16_bits(image)
    if not isinstance(transparent, int):
        return Image.fromarray(grey)
    shown = np.repeat(grey[..., None], 3, axis=-1)
    shown[pixels == transparent] = background
    return Image.fromarray(
        shown if len(set(background)) > 1 else np.ascontiguousarray(shown[..., 0])
    )


def _grey_of_16_bits(image):
    """Grey pixels of 16 bits or more as uint8 (H, W), rounded."""
    pixels = np.asarray(image)
    if pixels.dtype.itemsize > 2 and (pixels.min() < 0 or pixels.max() > 65535):
        raise Unreadable("32-bit pixels, whose range is not known; convert it to 8 bits")
    return ((pixels.astype(np.uint32) * 255 + 32767) // 65535).astype(np.uint8)
