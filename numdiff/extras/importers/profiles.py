"""Colours of a picture with an embedded ICC profile, as sRGB: by LittleCMS, which Pillow contains.

Rendering is relative colorimetric with black point compensation, as Photoshop's default. A profile
that says sRGB in other words, to within ALIKE of 255, leaves the pixels as they are.
"""

import functools
import io

import numpy as np
from PIL import Image

try:
    from PIL import ImageCms
except ImportError:  # a Pillow built without LittleCMS
    ImageCms = None

MAXIMUM_BYTES = 1 << 22  # of a profile; those of printers have up to 3 MB
# bytes of a tag of processing elements, each of which is run for every node of a table
MAXIMUM_ELEMENTS = 1 << 16
ALIKE = 2
BLACK_POINT_COMPENSATION = 0x2000  # LittleCMS' flag; Pillow names it since 10.3
# LittleCMS' name of a profile's colours: Pillow's mode
SPACES = {"RGB ": "RGB", "GRAY": "L", "CMYK": "CMYK"}
# PyCMSError is raised from these
FAILURES = (OSError, ValueError, TypeError, AttributeError, MemoryError)


class Unusable(ValueError):
    """Why a profile is not used."""


def to_srgb(image, profile):
    """The image, of mode L, LA, RGB, RGBA or CMYK, in sRGB: of mode L, LA, RGB or RGBA, the same
    object if nothing changes. `Unusable` where the profile is damaged, or not one of such pixels.
    """
    alpha = image.getchannel("A") if image.mode in ("LA", "RGBA") else None
    plain = image if alpha is None else image.convert(image.mode[:-1])
    space = colour_space(profile)
    grey = plain.mode == "L"
    if grey and space == "RGB":  # grey pixels of a program that works in colour
        plain = plain.convert("RGB")
    if plain.mode != space:
        raise Unusable(f"a profile of {space} pixels")
    transform = transform_to_srgb(profile, space)
    if transform is None:
        return image
    try:
        result = transform.apply(plain)
    except FAILURES as error:
        raise Unusable(str(error)) from None
    result = result.getchannel("G") if grey else result
    if alpha is not None:
        result.putalpha(alpha)
    return result


@functools.lru_cache(64)
def colour_space(profile):
    """The mode of the pixels that an ICC profile describes: L, RGB or CMYK."""
    if ImageCms is None:
        raise Unusable("this Pillow has no LittleCMS")
    if not 128 <= len(profile) <= MAXIMUM_BYTES:
        raise Unusable(f"a profile of {len(profile):,} bytes")
    for i in range(min(int.from_bytes(profile[128:132], "big"), 100)):
        tag = profile[132 + 12 * i : 144 + 12 * i]
        if tag[:3] in (b"D2B", b"B2D") and int.from_bytes(tag[8:12], "big") > MAXIMUM_ELEMENTS:
            raise Unusable("a profile of very many processing elements")
    if profile[12:16] not in (b"scnr", b"mntr", b"prtr", b"spac"):
        raise Unusable("a profile of no device")
    space = profile[16:20].decode("latin-1")
    if space not in SPACES:
        raise Unusable(f"a profile of {space.strip()} pixels")
    return SPACES[space]


@functools.lru_cache(64)
def transform_to_srgb(profile, mode):
    """The transform of pixels of this mode to sRGB pixels of mode RGB; None if it would change
    nothing."""
    try:
        source = ImageCms.ImageCmsProfile(io.BytesIO(profile))
        transform = ImageCms.buildTransform(
            source,
            _srgb(),
            mode,
            "RGB",
            ImageCms.Intent.RELATIVE_COLORIMETRIC,
            BLACK_POINT_COMPENSATION,
        )
    except (*FAILURES, ImageCms.PyCMSError) as error:
        raise Unusable(str(error)) from None
    if mode == "CMYK":
        return transform
    steps = np.linspace(0, 255, 18).astype(np.uint8)
    probe = (
        np.arange(256, dtype=np.uint8)[:, None]
        if mode == "L"
        else np.stack(np.meshgrid(steps, steps, steps), -1).reshape(18 * 18, 18, 3)
    )
    changed = np.asarray(transform.apply(Image.fromarray(probe))).astype(int)
    return (
        None
        if np.abs(changed - (probe[..., None] if mode == "L" else probe)).max() <= ALIKE
        else transform
    )


@functools.cache
def _srgb():
    return ImageCms.createProfile("sRGB")
