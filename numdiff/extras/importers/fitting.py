"""From a decoded picture to a uint8 array of the wanted size: composed over a colour, cropped,
resized."""

import math

import numpy as np
from PIL import Image, ImageColor

from ...errors import NumdiffError, UsageError
from ...sizes import as_size
from .pictures import flatten, profile_of, region_of
from .source import examples

LARGEST = 1024  # pixels of a side: 64 such images, which are stored together, have 200 MB
FITS = ("crop", "pad", "stretch")
CROPS = ("lanczos", "adm")


def parse_colour(text):
    """(red, green, blue) of a colour as HTML writes it: a name, #rgb or #rrggbb."""
    try:
        return ImageColor.getrgb(text)[:3]
    except ValueError:
        raise UsageError(
            f"--background {text!r} is not a colour: use a name such as white, or #rrggbb."
        ) from None


class Mixed(UsageError):
    """A picture in colour among grey ones."""


class Fitting:
    """Brings every image to one size and one number of channels; the first image decides what the
    user left open."""

    def __init__(
        self,
        size=None,
        fit=None,
        channels=None,
        background=None,
        size_flag="--size",
        crop=None,
    ):
        """size: a side, or (height, width); size_flag: the option that gives it, for messages;
        crop: one of CROPS."""
        self.size = (size, size) if isinstance(size, int) else size
        if size is not None and not all(1 <= n <= LARGEST for n in self.size):
            raise UsageError(
                f"{size_flag} {as_size(self.size)} is out of range: use 1 to {LARGEST} pixels."
            )
        if fit not in (None, *FITS):
            raise UsageError(f"--fit {fit} is unknown: use one of {', '.join(FITS)}.")
        if crop not in (None, *CROPS):
            raise UsageError(f"--crop {crop} is unknown: use one of {', '.join(CROPS)}.")
        if crop is not None and fit not in (None, "crop"):
            raise UsageError(f"--crop {crop} and --fit {fit} exclude each other: leave one out.")
        if crop is not None and size is None:
            raise UsageError(
                f"--crop {crop} needs {size_flag}, the size that images are brought to: add it, or "
                "leave this out."
            )
        if crop == "adm" and self.size[0] != self.size[1]:
            raise UsageError(
                f"--crop adm makes squares, and {size_flag} is {as_size(self.size)}: give one "
                "number, or leave --crop out."
            )
        self.fit, self.channels, self.flag = fit or FITS[0], channels, size_flag
        self.crop = crop or CROPS[0]
        # a side for which a JPEG may be decoded at a part of its size; ADM's crop sees all pixels
        self.decoded_for = None if size is None or self.crop == "adm" else max(self.size)
        self.background = parse_colour("white" if background is None else background)
        self.first = None  # name of the image that decided
        # names of images with colour profiles, in no certain order
        self.profiles = {"converted": [], "unusable": []}
        self.shape = self.size  # (height, width)
        # a colour image is refused unless an option says how to convert it
        self.mixed_refused = channels is None

    def decide(self, image, name):
        """Settle size and channels by the first image (PIL or array)."""
        image = flatten(_to_pil(image), self.background)
        if self.channels is None:
            self.channels = len(image.getbands())
        if self.shape is None:
            if max(image.size) > LARGEST:
                raise UsageError(
                    f"{name} is {image.width}×{image.height} pixels: add {self.flag} to reduce it, for "
                    f"instance {self.flag} 256."
                )
            self.shape = image.height, image.width
        self.first = name

    def __call__(self, image, name):
        """The image as a uint8 array (height, width, channels)."""
        if isinstance(image, np.ndarray) and image.shape == (*self.shape, self.channels):
            return image
        image = _to_pil(image)
        region = region_of(image)
        if profile := profile_of(image):
            self.profiles[profile].append(name)
        image = flatten(image, self.background)
        if self.size is None and image.size != self.shape[::-1]:
            raise UsageError(
                f"{name} is {image.width}×{image.height} pixels, but {self.first} is "
                f"{self.shape[1]}×{self.shape[0]}: add {self.flag} to bring all to one, for instance "
                f"{self.flag} {_powers_of_two(self.shape)}, and --fit for those of another shape."
            )
        if image.mode == "RGB" and self.channels == 1 and self.mixed_refused:
            raise Mixed(f"{name} is in colour, but {self.first} is grey: add --rgb or --grey.")
        image = image.convert("L" if self.channels == 1 else "RGB")
        if self.size is not None:
            image = (
                adm_crop(image, self.size[0])
                if self.crop == "adm"
                else _to_shape(image, *self.size, self.fit, self.background, *region)
            )
        return np.asarray(image).reshape(*self.shape, self.channels)

    def notes(self):
        """Sentences on colour profiles."""
        for outcome, text in (
            ("converted", "converted to sRGB from the colour profile in the file"),
            ("unusable", "taken for sRGB, as the colour profile cannot be used"),
        ):
            if names := sorted(self.profiles[outcome]):
                yield f"{len(names):,} image{'s were' if len(names) > 1 else ' was'} {text} ({examples(names)})."


class AsTheyAre:
    """Passes latents, floats (H, W, C), on unchanged, or rounded to float16; refuses options that
    would change them."""

    decoded_for = None

    def notes(self):
        return ()

    def __init__(self, path, size, channels=None, fit=None, background=None, float16=False):
        self.path, self.float16 = path, float16
        self.wanted = (size, size) if isinstance(size, int) else size
        for given, options in (
            (channels, "--rgb and --grey"),
            (fit, "--fit"),
            (background, "--background"),
        ):
            if given is not None:
                raise UsageError(
                    f"{str(path)!r} holds latents, which are not converted: leave {options} out, or add "
                    "--pixels if they are pictures."
                )

    def decide(self, image, name):
        height, width = image.shape[:2]
        if self.wanted not in (None, (height, width)):
            raise UsageError(
                f"{str(self.path)!r} holds latents of {height}×{width}, which are not resized: leave "
                "--size out, or add --pixels if they are pictures."
            )

    def __call__(self, image, name):
        if not np.isfinite(image).all():
            raise NumdiffError(
                f"{name} of {str(self.path)!r} holds values that are not finite: fix the file."
            )
        if self.float16:
            with np.errstate(over="ignore"):
                image = image.astype(np.float16)
            if not np.isfinite(image).all():
                raise UsageError(
                    f"{name} of {str(self.path)!r} holds values beyond those of float16, ±65504: leave "
                    "--float16 out."
                )
        return image


def _to_pil(image):
    """A uint8 array (H, W, 1 to 4) as a PIL image; a PIL image as it is."""
    if not isinstance(image, np.ndarray):
        return image
    return Image.fromarray(image[..., 0] if image.shape[2] == 1 else image)


def adm_crop(image, side):
    """The square in the middle of an image of mode L or RGB, with the bits of guided-diffusion's
    `center_crop_arr`: halved by a box filter while it is at least twice as large, then by a bicubic
    one to the shorter side, then cropped (Dhariwal and Nichol 2021, arXiv:2105.05233)."""
    while min(image.size) >= 2 * side:
        image = image.resize((image.width // 2, image.height // 2), Image.Resampling.BOX)
    scale = side / min(image.size)
    image = image.resize(
        (round(image.width * scale), round(image.height * scale)), Image.Resampling.BICUBIC
    )
    left, top = (image.width - side) // 2, (image.height - side) // 2
    return image.crop((left, top, left + side, top + side))


def _to_shape(image, rows, columns, fit, background, pixels, region):
    """An image of mode L or RGB brought to rows × columns pixels. What is cut out is counted in the
    `pixels` (width, height) of its file, which are the part `region` of the image, so that a JPEG's
    reduction moves nothing."""
    width, height = pixels
    is_wider = width * rows >= height * columns  # than what is wanted
    # one of those pixels, in the image's: 1, 1/2, 1/4 or 1/8
    step = (region[2] - region[0]) / width
    if fit == "crop":  # the largest rectangle of that shape in the middle
        across = height * columns / rows if is_wider else width
        down = height if is_wider else width * rows / columns
        left, top = (width - across) // 2, (height - down) // 2
        left, top = region[0] + left * step, region[1] + top * step
        return _resize(image, (left, top, left + across * step, top + down * step), columns, rows)
    if fit == "stretch":
        return _resize(image, region, columns, rows)
    # pad: the whole image, with bars of the background colour
    across = columns if is_wider else max(1, round(width * rows / height))
    down = max(1, round(height * columns / width)) if is_wider else rows
    image = _resize(image, region, across, down)
    colour = (
        background
        if image.mode == "RGB"
        else Image.new("RGB", (1, 1), background).convert("L").getpixel((0, 0))
    )
    whole = Image.new(image.mode, (columns, rows), colour)
    whole.paste(image, ((columns - image.width) // 2, (rows - image.height) // 2))
    return whole


def _resize(image, box, width, height):
    """A box (left, top, right, bottom) of an image, in pixels that may be broken, as width×height
    pixels.

    Lanczos: Pillow widens the filter when it shrinks, so that nothing aliases. What is outside the
    box is not seen.
    """
    around = [math.floor(n) for n in box[:2]] + [math.ceil(n) for n in box[2:]]
    image = image.crop(around)
    if image.size == (width, height) and list(box) == around:
        return image
    box = [n - corner for n, corner in zip(box, around[:2] * 2, strict=True)]
    return image.resize((width, height), Image.Resampling.LANCZOS, box)


def _powers_of_two(shape):
    """The powers of two nearest to height and width, at least 8: a size that every UNet can halve."""
    return as_size([max(8, 2 ** round(math.log2(side))) for side in shape])
