"""A contact sheet: a dataset at a glance, one row of images a class, as a PNG. Latents are shown
undecoded."""

import contextlib

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from ...errors import NumdiffError, printable
from ...files import atomic_file
from ...outputs import check_ending, check_output

COLUMNS, ROWS = 16, 40  # images a row, and rows at most
# pixels of an image on the sheet, about: smaller images are shown at a whole multiple of their size
CELL = 64
GAP, TEXT = 2, 13  # pixels between images; height of the letters
INK, PAPER = (30, 30, 30), (255, 255, 255)


def rows_of_sheet(dataset):
    """A list of (caption, rows of the dataset), spread evenly over each class, or over all images
    without classes."""
    if dataset.labels is None:
        count = min(len(dataset), COLUMNS * COLUMNS)
        chosen = _spread(np.arange(len(dataset)), count)
        return [("", chosen[i : i + COLUMNS]) for i in range(0, count, COLUMNS)]
    shown = [i for i, n in enumerate(dataset.class_counts()) if n]
    return [
        (f"{dataset.classes[i]} ({len(members):,})", _spread(members, min(len(members), COLUMNS)))
        for i in shown[:ROWS]
        for members in [np.flatnonzero(dataset.labels == i)]
    ]


def contact_sheet(dataset):
    """The sheet as a PIL image."""
    statistics = dataset.statistics() if dataset.dtype != np.uint8 else None
    rows = rows_of_sheet(dataset)
    height, width = (_shown_size(n) for n in dataset.shape[1:3])
    font = _font()
    margin = max(
        (int(font.getlength(_printable(caption))) for caption, _ in rows if caption), default=0
    )
    margin = margin + 8 * GAP if margin else GAP
    sheet = Image.new(
        "RGB", (margin + COLUMNS * (width + GAP), GAP + len(rows) * (height + GAP)), PAPER
    )
    draw = ImageDraw.Draw(sheet)
    for line, (caption, chosen) in enumerate(rows):
        top = GAP + line * (height + GAP)
        draw.text((4 * GAP, top + (height - TEXT) // 2), _printable(caption), INK, font)
        images = dataset.read(chosen)
        for column, image in enumerate(
            images if statistics is None else as_pixels(images, statistics)
        ):
            image = Image.fromarray(image[..., 0] if image.shape[2] == 1 else image)
            if image.size != (width, height):
                larger = width >= image.width
                image = image.resize(
                    (width, height), Image.Resampling.NEAREST if larger else Image.Resampling.BOX
                )
            sheet.paste(image, (margin + column * (width + GAP), top))
    return sheet


def as_pixels(images, statistics):
    """Floats (n, H, W, C) as uint8 (n, H, W, 1 or 3): the first channels, each from mean - 2 std to
    mean + 2 std."""
    channels = 3 if images.shape[3] >= 3 else 1
    mean, std = (values[:channels] for values in statistics)
    scaled = (images[..., :channels] - mean) / np.maximum(4 * std, 1e-12) + 0.5
    return np.rint(255 * np.clip(scaled, 0, 1)).astype(np.uint8)


def check_sheet(path, dataset):
    """Raise a `NumdiffError` if `path` cannot, or must not, hold the contact sheet of the file
    `dataset`."""
    check_ending("--sheet", path, ".png")
    with _remedy_told():
        check_output("the contact sheet", path, dataset)


def save_sheet(dataset, path):
    """Write the contact sheet as a PNG, completely or not at all."""
    sheet = contact_sheet(dataset)
    with _remedy_told(), atomic_file(path, "the contact sheet") as file:
        sheet.save(file, "PNG")


@contextlib.contextmanager
def _remedy_told():
    try:
        yield
    except NumdiffError as error:
        raise NumdiffError(
            f"{str(error).rstrip('.')}, with --sheet PATH, or use --no-sheet."
        ) from None


def _spread(rows, count):
    return rows[np.arange(count) * len(rows) // max(count, 1)]


def _shown_size(side):
    return side * max(1, CELL // side) if side <= 2 * CELL else 2 * CELL


def _font():
    try:
        return ImageFont.load_default(TEXT)
    except TypeError:  # Pillow before 10.1 has one small bitmap font
        return ImageFont.load_default()


def _printable(text):
    """Text restricted to what every version of Pillow's own font can draw."""
    text = printable(text)
    text = text if len(text) <= 40 else text[:39] + "~"
    return text.encode("latin-1", "replace").decode("latin-1")
