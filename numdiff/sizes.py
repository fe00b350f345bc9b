"""Sizes of images: the side of a square in pixels, or height and width.

Where a function takes an image size, both forms go. `as_size` gives the one that is kept: a side
wherever height and width are equal, so that files of squares hold one number.
"""

import numbers
from typing import NamedTuple

from .errors import UsageError, shown

MAX_HALVINGS = 16  # of an image of 65,536 pixels a side


class Sides(NamedTuple):
    """Height and width of an image that is no square, in pixels; as text 48x64."""

    height: int
    width: int

    def __str__(self):
        return f"{self.height}x{self.width}"


def as_size(size):
    """The size in the form that is kept: a side, or `Sides` where height and width differ."""
    parts = tuple(size) if isinstance(size, tuple | list) else (size, size)
    if len(parts) != 2 or any(
        isinstance(n, bool) or not isinstance(n, numbers.Integral) for n in parts
    ):
        raise UsageError(
            f"image_size must be a whole number, or height and width, and not {shown(size)}."
        )
    height, width = map(int, parts)
    return height if height == width else Sides(height, width)


def sides(size):
    """(height, width) of a size."""
    return (size, size) if isinstance(size, numbers.Integral) else tuple(size)


def in_pixels(size):
    """A size in words: 64×64, 48×64."""
    return "×".join(map(str, sides(size)))


def scaled_down(size, factor):
    """A size over a whole number that divides it."""
    return as_size([n // factor for n in sides(size)])


def is_multiple(size, factor):
    """Whether a whole number divides both sides."""
    return all(n % factor == 0 for n in sides(size))


def nearest_multiple(size, factor):
    """The size nearest to this one whose sides a whole number divides."""
    return as_size([max(factor, round(n / factor) * factor) for n in sides(size)])


def check_halvings(size, count):
    """Raise a `UsageError` unless both sides can be halved `count` times."""
    if count > MAX_HALVINGS:
        raise UsageError(
            f"channel_mult has {count + 1} entries: give at most {MAX_HALVINGS + 1}, one for each level."
        )
    if not is_multiple(size, 2**count):
        raise UsageError(
            f"image_size {as_size(size)} cannot be halved {count} times: use a multiple of {2**count}, "
            f"such as {nearest_multiple(size, 2**count)}, or fewer entries in channel_mult."
        )


def level_sides(size, count):
    """The longer side of an image that is halved again and again, at each of `count` levels: how
    models name their levels."""
    return [max(sides(size)) // 2**i for i in range(count)]


def image_shape(model):
    """(height, width, channels) of the images that a model takes."""
    return (*sides(model.image_size), model.in_channels)
