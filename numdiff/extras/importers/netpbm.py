"""PBM, PGM and PPM, plain (P1, P2, P3) and raw (P4, P5, P6), of any maximum up to 65,535.

Pillow reads their headers and most of their pixels in Python, byte by byte: comments of 100 MB take
it 15 seconds. Here the header has a limit and the pixels are one array.
"""

import re
from dataclasses import dataclass

import numpy as np

MAXIMUM_HEADER = 1 << 16  # bytes, comments included
MAXIMUM_COMMENTS = 1 << 16
MAXIMUM_PLAIN = 1 << 22  # pixels of the plain kinds, whose numbers take 8 bytes while they are read
BLOCK = 1 << 22  # numbers that are scaled together
SPACES = b" \t\n\v\f\r"
# spaces and comments, then a number
TOKEN = re.compile(rb"(?:[ \t\n\v\f\r]|#[^\r\n]*[\r\n])*([0-9]{1,10})(?![0-9])")


class Damaged(ValueError):
    """Why the file cannot be read."""


@dataclass
class NetpbmHeader:
    kind: int  # 1 to 6
    width: int
    height: int
    maximum: int
    offset: int  # of the first pixel

    @property
    def channels(self):
        return 3 if self.kind in (3, 6) else 1


def is_netpbm(data):
    return (
        data[:1] == b"P"
        and data[1:2] in (b"1", b"2", b"3", b"4", b"5", b"6")
        and data[2:3] in (b" ", b"\t", b"\n", b"\v", b"\f", b"\r", b"#")
    )


def read_header(data):
    """The `NetpbmHeader` of a file."""
    kind, values, position, head = int(data[1:2]), [], 2, data[:MAXIMUM_HEADER]
    for _ in range(2 if kind in (1, 4) else 3):
        match = TOKEN.match(head, position)
        if match is None or match.end() == MAXIMUM_HEADER:
            raise Damaged("its header is damaged, or its comments are too long")
        values.append(int(match[1]))
        position = match.end()
    width, height, maximum = values if len(values) == 3 else (*values, 1)
    if not (width and height and 1 <= maximum <= 65535):
        raise Damaged(f"its header says {width}×{height} pixels up to {maximum}")
    if kind < 4 and width * height > MAXIMUM_PLAIN:
        raise Damaged(
            f"{width}×{height} pixels as text, and at most {MAXIMUM_PLAIN:,} are read; save it as PNG"
        )
    # one space, then pixels, whatever they look like
    return NetpbmHeader(kind, width, height, maximum, position + 1)


def read_pixels(data, header):
    """The pixels uint8 (H, W) or (H, W, 3), scaled to 255 and rounded."""
    count = header.width * header.height * header.channels
    body, wide = memoryview(data)[header.offset :], header.maximum > 255
    if header.kind == 4:
        row = -(-header.width // 8)
        bits = np.frombuffer(_whole(body, row * header.height), np.uint8).reshape(
            header.height, row
        )
        pixels = np.unpackbits(bits, axis=1)[:, : header.width]
        pixels ^= 1  # 1 is black
        pixels *= 255
        return pixels
    if header.kind in (5, 6):
        values = np.frombuffer(_whole(body, count * (1 + wide)), ">u2" if wide else np.uint8)
    elif header.kind == 1:
        text = _text(body, count).translate(None, SPACES)
        values = np.frombuffer(_whole(text, count), np.uint8) - ord("0")
        if values.max() > 1:
            raise Damaged("its pixels are not 0 and 1")
        values = 1 - values
    else:
        values = _numbers(_text(body, count), count)
        if len(values) < count or values.max() > header.maximum:
            raise Damaged("its pixels are cut off or out of range")
    pixels = (
        values if values.dtype == np.uint8 and header.maximum == 255 else np.empty(count, np.uint8)
    )
    for start in range(0, count, BLOCK) if pixels is not values else ():
        block = np.minimum(values[start : start + BLOCK], header.maximum).astype(np.uint32)
        pixels[start : start + BLOCK] = (block * 255 + header.maximum // 2) // header.maximum
    shape = (header.height, header.width, 3)
    return pixels.reshape(shape if header.channels == 3 else shape[:2])


def _whole(body, nbytes):
    if len(body) < nbytes:
        raise Damaged("it is cut off")
    return body[:nbytes]


def _numbers(text, count):
    """The first `count` numbers of a text, int64, or fewer."""
    text = text.translate(bytes.maketrans(SPACES, b" " * len(SPACES)))
    if text.translate(None, b"0123456789 "):
        raise Damaged("its pixels are not all numbers")
    values, done, start = np.empty(count, np.int64), 0, 0
    while done < count and start < len(text):
        end = text.find(b" ", start + BLOCK)
        end = len(text) if end < 0 else end
        tokens = text[start:end].split()[: count - done]
        if any(len(token) > 5 for token in tokens):
            raise Damaged("its pixels are out of range")
        values[done : done + len(tokens)] = [*map(int, tokens)]
        done, start = done + len(tokens), end
    return values[:done]


def _text(body, count):
    """The numbers of a plain file, without comments."""
    text = bytes(body[: 16 * count + (1 << 20)])
    if text.count(b"#") > MAXIMUM_COMMENTS:
        raise Damaged("it has more comments than any picture needs")
    return re.sub(rb"#[^\r\n]*", b" ", text) if b"#" in text else text
