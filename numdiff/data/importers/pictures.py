"""From a picture file to a uint8 array of the wanted size: decode, turn upright, lay over a colour, cut, resize."""
import contextlib
import functools
import logging
import math
import warnings

import numpy as np
from PIL import Image, ImageColor, ImageOps, UnidentifiedImageError

from ...errors import UsageError
from .source import Unreadable

# Only formats that Pillow decodes itself and that say in their first bytes what they are: EPS would start Ghostscript.
FORMATS = ("PNG", "JPEG", "GIF", "BMP", "DIB", "WEBP", "TIFF", "PPM", "JPEG2000", "AVIF", "ICO", "QOI")
SUFFIXES = (".png", ".jpg", ".jpeg", ".jpe", ".jfif", ".gif", ".bmp", ".dib", ".webp", ".tif", ".tiff", ".ppm", ".pgm",
            ".pbm", ".pnm", ".jp2", ".j2k", ".avif", ".ico", ".qoi", ".heic", ".heif", ".tga", ".psd")
MAGICS = (b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"GIF87a", b"GIF89a", b"II*\0", b"MM\0*", b"\0\0\0\x0cjP  ",
          b"\xff\x4f\xff\x51", b"qoif")
LARGEST = 1024  # pixels of a side: 64 such images, which are stored together, have 200 MB
FITS = ("crop", "pad", "stretch")


@functools.cache
def formats():
    """Those of FORMATS that this Pillow was built with."""
    Image.init()
    return [name for name in FORMATS if name in Image.OPEN]


@contextlib.contextmanager
def quiet():
    """Without Pillow's remarks on odd files: what cannot be read is reported by name."""
    logger = logging.getLogger("PIL")
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def looks_like_picture(name, head):
    """Whether a file is meant to be a picture: by its name, or by its first 16 bytes."""
    return (name.lower().endswith(SUFFIXES) or head.startswith(MAGICS) or head[8:12] == b"WEBP"
            or head[4:12] in (b"ftypavif", b"ftypheic"))


def open_picture(file, wanted=None):
    """The PIL image in an open binary file, decoded; `Unreadable` says why it cannot be.

    wanted: the size that it will be brought to; lets JPEG decode a much larger photo at 1/2, 1/4 or 1/8 of its size.
    """
    try:
        image = Image.open(file, formats=formats())
        if wanted:
            image.draft(None, (2 * wanted, 2 * wanted))
        image.load()
        return image
    except UnidentifiedImageError:
        raise Unreadable("not an image that Pillow can read") from None
    except Image.DecompressionBombError:
        raise Unreadable("more than 178 million pixels") from None
    except Exception as error:  # decoders meet broken files with errors of every kind
        raise Unreadable(str(error).splitlines()[0] if str(error) else type(error).__name__) from None


def parse_colour(text):
    """(red, green, blue) of a colour as HTML writes it: a name, #rgb or #rrggbb."""
    try:
        return ImageColor.getrgb(text)[:3]
    except ValueError:
        raise UsageError(f"--background {text!r} is not a colour: use a name such as white, or #rrggbb.") from None


def flatten(image, background):
    """An upright 8-bit image of mode L or RGB, transparent parts laid over the background."""
    try:
        image = ImageOps.exif_transpose(image)
    except Exception:  # damaged EXIF: the pixels are good, only how to turn them is unknown
        pass
    if image.mode.startswith("I"):
        return _eight_bits(image)
    if image.mode == "F":
        raise Unreadable("floating-point pixels, whose range is not known; convert it to 8 bits")
    if image.mode in ("LA", "La", "PA", "RGBA", "RGBa") or "transparency" in image.info:
        grey = image.mode in ("L", "LA", "La") and len(set(background)) == 1
        if image.mode in ("La", "RGBa"):
            image = image.convert({"La": "LA", "RGBa": "RGBA"}[image.mode])
        base = Image.new("RGBA", image.size, (*background, 255))
        base.alpha_composite(image.convert("RGBA"))
        image = base.convert("RGB")
        return image.getchannel(0) if grey else image
    if image.mode in ("L", "RGB"):
        return image
    try:
        return image.convert("L" if image.mode == "1" else "RGB")
    except ValueError:
        raise Unreadable(f"colours of mode {image.mode}, which Pillow cannot convert; save it as RGB") from None


def _eight_bits(image):
    """An image of 16-bit (or wider) grey pixels as 8 bits."""
    pixels = np.asarray(image).astype(np.int64)
    if pixels.min() < 0 or pixels.max() > 65535:
        raise Unreadable("32-bit pixels, whose range is not known; convert it to 8 bits")
    return Image.fromarray(((pixels * 255 + 32767) // 65535).astype(np.uint8))


class Fitting:
    """Brings every image to one size and one number of channels; what the user left open, the first image decides."""

    def __init__(self, size=None, fit="crop", channels=None, background="white"):
        if size is not None and not 1 <= size <= LARGEST:
            raise UsageError(f"--size {size} is out of range: use 1 to {LARGEST} pixels.")
        if fit not in FITS:
            raise UsageError(f"--fit {fit} is unknown: use one of {', '.join(FITS)}.")
        self.size, self.fit, self.channels = size, fit, channels
        self.background = parse_colour(background)
        self.first = None  # name of the image that decided
        self.side = size
        self.mixed_refused = channels is None  # a colour image is refused if nobody said what to do with it

    def decide(self, image, name):
        """Settle size and channels by the first image (PIL or array)."""
        image = flatten(_to_pil(image), self.background)
        if self.channels is None:
            self.channels = len(image.getbands())
        if self.side is None:
            if image.width != image.height:
                raise UsageError(f"{name} is {image.width}×{image.height} pixels and not square: add --size, for "
                                 f"instance --size {_power_of_two(min(image.size))}.")
            if image.width > LARGEST:
                raise UsageError(f"{name} is {image.width}×{image.height} pixels: add --size to reduce it, for "
                                 "instance --size 256.")
            self.side = image.width
        self.first = name

    def __call__(self, image, name):
        """The image as a uint8 array (side, side, channels)."""
        if isinstance(image, np.ndarray) and image.shape == (self.side, self.side, self.channels):
            return image
        image = flatten(_to_pil(image), self.background)
        if self.size is None and image.size != (self.side, self.side):
            raise UsageError(f"{name} is {image.width}×{image.height} pixels, but {self.first} is "
                             f"{self.side}×{self.side}: add --size to bring all to one, for instance "
                             f"--size {_power_of_two(self.side)}.")
        if image.mode == "RGB" and self.channels == 1 and self.mixed_refused:
            raise UsageError(f"{name} is in colour, but {self.first} is grey: add --rgb or --grey.")
        image = image.convert("L" if self.channels == 1 else "RGB")
        if self.size is not None:
            image = _to_square(image, self.size, self.fit, self.background)
        return np.asarray(image).reshape(self.side, self.side, self.channels)


def _to_pil(image):
    """A uint8 array (H, W, 1 to 4) as a PIL image; a PIL image as it is."""
    if not isinstance(image, np.ndarray):
        return image
    return Image.fromarray(image[..., 0] if image.shape[2] == 1 else image)


def _to_square(image, size, fit, background):
    """An image of mode L or RGB brought to size × size pixels."""
    width, height = image.size
    if fit == "crop":  # the largest square in the middle
        side = min(width, height)
        left, top = (width - side) // 2, (height - side) // 2
        return _resize(image.crop((left, top, left + side, top + side)), size, size)
    if fit == "stretch":
        return _resize(image, size, size)
    longer = max(width, height)  # pad: the whole image, with bars of the background colour
    image = _resize(image, max(1, round(width * size / longer)), max(1, round(height * size / longer)))
    colour = background if image.mode == "RGB" else Image.new("RGB", (1, 1), background).convert("L").getpixel((0, 0))
    square = Image.new(image.mode, (size, size), colour)
    square.paste(image, ((size - image.width) // 2, (size - image.height) // 2))
    return square


def _resize(image, width, height):
    """Lanczos: Pillow widens the filter when it shrinks, so that nothing aliases."""
    return image if image.size == (width, height) else image.resize((width, height), Image.Resampling.LANCZOS)


def _power_of_two(side):
    """The power of two nearest to a side, at least 8: a size that every UNet can halve."""
    return max(8, 2 ** round(math.log2(side)))
